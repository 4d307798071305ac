"""Compare a learner's predictions with results: a cell takes a number, the next compares it, a card lists all.

    guess_100 = ____  # MB at rank 0 with 100 ranks: type a number
    compare("rank 0 with 100 ranks", "guess_100", 3960, "MB")     # you said 400 MB, it is 3,960 MB
    card("a collective is a call that all ranks make", ..., figure="ring", command="srun -n 8 python scripts/02_...")

All ranks may call these functions; rank 0 prints. They do not communicate. In a notebook the answer to a question that
nobody has answered yet is in a closed fold, so that no stored output shows it.
"""

import html
import math
import re
import sys

from manyhands.checks.witness import shown
from manyhands.launch.program import say_once
from manyhands.launch.ranks import joined, wrapped

____ = None  # not typed yet
NONE_YET = "no guess yet"
CLOSE = 0.02  # a guess within 2 % is right, to allow for rounding

_last: list[str] = []  # the question that was compared last
_sentences: dict[str, str] = {}  # {question: how the guess compares}, in the order of the questions


def compare(what, guess, answer, unit="", because=""):
    """Print on rank 0 how a guess compares with the answer, and keep the sentence for the card.

    what: the question in a few words; asked again, it replaces the first comparison. guess: the name of the caller's
    variable, "guess_100", which may be missing, or a number or a text; None or ... is no guess. answer: a finite
    number, or a text. unit: printed after each number. because: a line, or a list of lines, that is
    printed, or folded, with the answer.
    Returns None.
    """
    if isinstance(guess, str) and re.fullmatch(r"guess\w*", guess):
        guess = sys._getframe(1).f_globals.get(guess)
    sentence, because = _compared(guess, answer, unit), because if isinstance(because, str) else "\n".join(because)
    folded = sentence.startswith(NONE_YET) and _in_a_notebook()
    _sentences[what], _last[:] = NONE_YET if folded else sentence, [what]
    if not folded:
        say_once(f"{what}: {sentence}\n{because}".strip())
    elif joined() is None or joined().rank == 0:
        _show_folded(what, f"{sentence.removeprefix(f'{NONE_YET}: ')}\n{because}".strip())


def unanswered():
    """Return the line to click for a figure that answers the last comparison, where it has no guess; else ""."""
    return f"{_last[0]}: the figure" if _last and _sentences[_last[0]] == NONE_YET else ""


def card(*lines, figure, command):
    """Print the lesson's card on rank 0: the lines, one figure, one command for the cluster, and all predictions.

    lines: one sentence each. figure: the name of a figure of the lesson. command: one line for a shell.
    """
    text = [part for number, line in enumerate(lines, 1) for part in wrapped(f"{number}. {line}", "   ")]
    text += [f"figure: {figure}", f"on the cluster: {command}"]
    text += ["your predictions:"] * bool(_sentences)
    text += [part for what, said in _sentences.items() for part in wrapped(f"- {what}: {said}", "  ")]
    say_once("\n".join(text))


def forget():
    """Forget all comparisons, at the start of a lesson."""
    _sentences.clear()


def _in_a_notebook():
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None


def _show_folded(what, answer):
    from IPython.display import display

    lines = "<br>".join(map(html.escape, answer.splitlines()))
    page = f"<details><summary>{html.escape(what)}: {NONE_YET}</summary>{lines}</details>"
    display({"text/html": page, "text/plain": f"{what}: {NONE_YET}; the answer is folded"}, raw=True)


def _compared(guess, answer, unit):
    unit = f" {unit}" if unit else ""
    it_is = f"it is {_plain(answer)}{unit}"
    if guess is None or guess is ...:
        return f"{NONE_YET}: {it_is}"
    if isinstance(answer, str):
        if type(guess) is int:  # such as a job's number
            guess = str(guess)
        if not isinstance(guess, str):
            return f"a guess is a text here, not {shown(guess)}: {it_is}"
        return f"right, {it_is}" if guess.strip().casefold() == answer.casefold() else f"you said {guess!r}, {it_is}"
    value = _number(guess)
    if value is None:
        return f"a guess is a number here, not {shown(guess)}: {it_is}"
    if abs(value - answer) <= CLOSE * abs(answer):
        return f"right, {it_is}"
    return f"you said {_plain(value)}{unit}, {it_is}"


def _number(guess):
    """Return the finite number that was typed (as "3,960 MB", or of numpy or torch), or None for anything else."""
    if isinstance(guess, str):
        found = re.fullmatch(r"\s*([-+]?[\d,_]*\.?\d+(?:[eE][-+]?\d+)?)\s*\D*", guess)
        guess = found[1].replace(",", "").replace("_", "") if found else None
    try:
        value = math.nan if isinstance(guess, bool) else float(guess)
    except Exception:  # noqa: BLE001 - whatever was typed
        return None
    return value if math.isfinite(value) else None


def _plain(answer):
    return repr(answer) if isinstance(answer, str) else f"{answer:,.10g}"
