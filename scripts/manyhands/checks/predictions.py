"""Compare a learner's predictions with results: a cell takes a number, the next compares it, a card lists all.

    guess = None  # MB at rank 0 with 100 ranks: type a number
    compare("rank 0 with 100 ranks", guess, 3960, "MB")     # you said 400 MB, it is 3,960 MB
    card("a collective is a call that all ranks make", ..., figure="ring", command="srun -n 8 python scripts/02_...")

All ranks may call these functions; rank 0 prints. They do not communicate.
"""

import math
import re

from manyhands.checks.witness import shown
from manyhands.launch.program import say
from manyhands.launch.ranks import joined, wrapped

____ = None  # not typed yet
CLOSE = 0.02  # a guess within 2 % is right, to allow for rounding

_sentences: dict[str, str] = {}  # {question: how the guess compares}, in the order of the questions


def compare(what, guess, answer, unit=""):
    """Print on rank 0 how a guess compares with the answer, and keep the sentence for the card.

    what: the question in a few words; asked again, it replaces the first comparison. guess: a number or a text; None
    or ... is no guess. answer: a finite number, or a text. unit: printed after each number. Returns None.
    """
    _sentences[what] = sentence = _compared(guess, answer, unit)
    _say_once(f"{what}: {sentence}")


def card(*lines, figure, command):
    """Print the lesson's card on rank 0: the lines, one figure, one command for the cluster, and all predictions.

    lines: one sentence each. figure: the name of a figure of the lesson. command: one line for a shell.
    """
    text = [part for number, line in enumerate(lines, 1) for part in wrapped(f"{number}. {line}", "   ")]
    text += [f"figure: {figure}", f"on the cluster: {command}"]
    text += ["your predictions:"] * bool(_sentences)
    text += [part for what, said in _sentences.items() for part in wrapped(f"- {what}: {said}", "  ")]
    _say_once("\n".join(text))


def forget():
    """Forget all comparisons, at the start of a lesson."""
    _sentences.clear()


def _say_once(text):
    """Print `text` on rank 0, or in a process that is no rank."""
    ranks = joined()
    if ranks is None or ranks.rank == 0:
        say(text)


def _compared(guess, answer, unit):
    unit = f" {unit}" if unit else ""
    it_is = f"it is {_plain(answer)}{unit}"
    if guess is None or guess is ...:
        return f"no guess: {it_is}"
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
