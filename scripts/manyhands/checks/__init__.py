"""Checks of exercises: they run an answer on all ranks, name its fault in a sentence, and never break a notebook.

    @exercise(1, "ring all-reduce")
    def ring_all_reduce(answer, ranks):
        x_N, n = normal(ranks.rank, 7), ranks.world_size              # drawn: what each rank has, known to all
        total_N = sum(normal(rank, 7) for rank in range(n))
        with wire.watch() as seen:
            found = answer(x_N.clone())
        slips = {"that is the mean": total_N / n, "that is this rank's own": x_N}     # {sentence: wrong value}
        expect_tensor(found, total_N, "for 7 numbers what came back", slips, it_is="the sum over the ranks")
        expect_traffic(seen, "the sum is right", "sum, then hand round", calls=2 * (n - 1))

    checks.ring_all_reduce(my_answer, ranks)                  # exercise 1 (ring all-reduce): not yet. For 7 ...

There is a module for each lesson. They share `expect` (what came back, and a sentence where it is not right) and
`drawn` (numbers that each rank knows without a message).

An answer can leave messages behind that poison whatever comes next on the same connections. So each answer runs in a
process group of its own, which is thrown away afterwards, and calls that do not match are told before gloo ends a
process over them (`trial`). The verdict travels over the ranks' own group. What an answer sets for the whole
process is put back (`unspoilt`). It leaves the tensors that it is given as they are, or is told so, and what the
check's own code raises over a strange answer is not blamed on the learner's code (`witness`). An answer that never
ends is stopped, and so are the threads that it leaves behind (`stop`).

Each answer is judged twice, with other numbers of the same sizes: so what it keeps from one call to the next is found.
"""

import functools
import re
from contextvars import ContextVar

# An optimizer imports it at its first use, for seconds. Here it is on the clock of the cell that imports the checks,
# not on that of the first answer.
import torch._dynamo  # noqa: F401
import torch.distributed as dist

from manyhands.checks.stop import LeftRunning, NeverEnds, stopped_after
from manyhands.checks.trial import CallsDiffer, Matching, NobodyCalls, trial_group
from manyhands.checks.unspoilt import RANDOM_STATE, SETTINGS, unspoilt
from manyhands.checks.witness import Changed, Witness, said, unfinished
from manyhands.course import board
from manyhands.course.catch_up import go_on_without
from manyhands.launch.program import say

TIMEOUT_S = 5.0
FACT = ContextVar("fact", default="")  # what a right answer communicated in its last trial, for the learner
TURN = ContextVar("turn", default=(0, 0))  # (seed of the check, 0 or 1: the first or the second time), see `drawn`
CORRECT, NOT_ATTEMPTED = "correct", "not attempted"
_LOST = re.compile(r"[Tt]imed out|[Tt]imeout|Connection closed|Connection reset|Broken pipe")
_CODE = re.compile(r"\w*[^\W\d_](_|\.\w|\(|\[|-\d| = )|(x|y|dx|dy|f|g)\b")  # a sentence that begins with a name
# The heavier a verdict of one rank, the more it says about the cause; of equal ones that of the lowest rank counts.
_FINE, _ALONE, _WAITED, _RAISED, _WRONG, _DIFFER, _EMPTY = range(7)


class Wrong(Exception):
    """What is wrong with an answer: one sentence to the learner, with the numbers."""


class Verdict(str):
    """What a check returns: a text that a notebook does not echo, as the check has said it already."""

    def _ipython_display_(self):
        pass


def exercise(number, title, timeout_s=TIMEOUT_S, if_calls_differ="", in_place=False, in_flight=False):
    """Make a check of `body(answer, ranks, **given)`, which raises Wrong or returns.

    `number` is that of an exercise (1, 2, ...), or the letter of a build ("A", "B", ...): lines of a lesson's CORE
    that the learner writes. `if_calls_differ`: what to think of where ranks do not make the same calls. `in_place`: an
    answer may change the tensors that it is given. `in_flight`: it may return while a collective is on its way.

    The check is called by all ranks as `check(answer, ranks, seed=0, **given)`. It says its verdict on rank 0 and
    returns it on every rank: "correct", "not attempted" (the answer is None or ... or raised NotImplementedError), or
    the sentence of the lowest rank that found a fault. A function that is not attempted is replaced by the lesson's
    own, so that the cells below run. `ranks` None judges in this process alone, without a process group. With another
    seed other sizes and numbers are drawn.
    """

    def decorate(body):
        @functools.wraps(body)
        def check(answer, ranks=None, seed=0, **given):
            witness = None
            FACT.set("")
            for turn in range(2):
                witness = Witness(body, in_place, in_flight, witness)
                verdict = _one_turn((seed, turn), witness, answer, ranks, given, timeout_s, if_calls_differ)
                if verdict != CORRECT:
                    break
            kind = "exercise" if str(number).isdigit() else "build"
            shown = verdict if verdict in (CORRECT, NOT_ATTEMPTED) else f"not yet. {verdict}"
            if verdict == CORRECT and FACT.get():
                shown += f". {FACT.get()}"
            if verdict == NOT_ATTEMPTED and (names := go_on_without(*(answer if type(answer) is tuple else (answer,)))):
                shown += f". The cells below use the lesson's own {' and '.join(names)}."
            if ranks is None or ranks.rank == 0:
                say(f"{kind} {number} ({title}): {shown}")
                board.note(body.__module__.rpartition(".")[2], number, title, verdict)
            return Verdict(verdict)

        return check

    return decorate


def _one_turn(turn, witness, answer, ranks, given, timeout_s, if_calls_differ):
    """The verdict of all ranks on one trial of an answer."""
    before = TURN.set(turn)
    try:
        with unspoilt(SETTINGS), unspoilt(RANDOM_STATE), trial_group(ranks, timeout_s) as group:
            verdict = _judge(witness, answer, ranks, given, group, timeout_s, if_calls_differ)
            if verdict[0] == _WRONG and witness.came_before():
                verdict = _WRONG, f"{verdict[1]} The same came the first time, with other numbers: is it kept?"
        return _agree(verdict, ranks)
    except RuntimeError as error:
        raise RuntimeError("a rank's process ended while its answer was judged: start the ranks anew") from error
    finally:
        TURN.reset(before)


def _judge(witness, answer, ranks, given, group, timeout_s, if_calls_differ):
    """(weight, verdict) of this rank, after the answer was tried in `group`, if there is one."""
    if answer is None or unfinished(answer):
        return _EMPTY, NOT_ATTEMPTED
    trial = stopped_after(timeout_s)(functools.partial(witness.body, witness.watched(answer), ranks, **given))
    if group is None:
        return _verdict(trial, witness, timeout_s, ranks)
    matching = Matching(group, timeout_s, witness.is_running, lambda: witness.group, witness.begins_async)
    with matching:
        verdict = _verdict(trial, witness, timeout_s, ranks)
    if isinstance(matching.fault, CallsDiffer):
        return _DIFFER, _sentence(": ".join(filter(None, (str(matching.fault), if_calls_differ))))
    if not dist.is_initialized():
        return _DIFFER, "Your code ended the process group, which all that follows needs: leave it alone."
    if matching.not_waited_for and not witness.in_flight and verdict[0] in (_FINE, _WRONG):
        # numbers that are wrong follow from it
        begun = f"you started {matching.not_waited_for[0]} with async_op=True"
        return _WRONG, _sentence(f"{begun} and did not wait for it: call wait() of what it returns")
    return verdict


def _verdict(trial, witness, timeout_s, ranks):
    """(weight, verdict) of what `trial()` raised, if it did. A key that was pressed interrupts the check."""
    try:
        trial()
    except (Wrong, Changed) as fault:
        return _WRONG, _sentence(_with_return(str(fault), witness), witness.names())
    except NobodyCalls as fault:
        if not fault.by_answer:  # the check's own collective: the rank that is missing knows more
            return _ALONE, _sentence(str(fault))
        return _WAITED, _sentence(f"{fault}: all ranks make the same calls, in the same order")
    except NeverEnds as fault:
        return _RAISED, _sentence(f"{fault}{witness.where(fault, ' It was in {}.')}")
    except LeftRunning as fault:
        return _RAISED, _sentence(str(fault))
    except BaseException as error:  # noqa: BLE001 - also sys.exit() of one rank, for which the others would wait
        stated = witness.said_so(error)
        if isinstance(error, KeyboardInterrupt) and not stated:
            raise
        if isinstance(error, NotImplementedError) and stated and not witness.returned_none():
            return _EMPTY, NOT_ATTEMPTED
        if isinstance(error, RuntimeError) and not stated and _LOST.search(said(error)):
            who = f"Rank {ranks.rank}" if ranks else "A rank"
            return _WAITED, (
                f"{who} waited {timeout_s:g} s for a message that never came{witness.where(error)}: every send needs "
                "its receive, and two ranks that both wait for the other first wait forever."
            )
        if not witness.is_theirs(error):
            return _RAISED, _sentence(witness.what_came_back(error))
        if isinstance(error, SystemExit):
            return _RAISED, "Your code ended the program (SystemExit): return instead."
        return _RAISED, _sentence(f"your code raised {said(error)}{witness.where(error)}")
    return _FINE, CORRECT


def _with_return(text, witness):
    """A sentence that complains of None, with the likely cause if the learner's function returned None."""
    hint = "not None (is a `return` missing?)"
    return text if hint in text or not witness.returned_none() else text.replace("not None", hint, 1)


def _sentence(text, names=()):
    """The first line as a sentence; a name of the learner's code, as those of its parameters, stays as it is."""
    text = text.strip().split("\n")[0]
    begins = text[:1] if _CODE.match(text) or text.split(" ")[0] in names else text[:1].upper()
    return begins + text[1:] + ("" if text.endswith((".", "?", "!")) else ".")


def _agree(verdict, ranks):
    """The heaviest verdict of all ranks, of the lowest rank that has it."""
    if ranks is None:
        return verdict[1]
    verdicts = [None] * ranks.world_size
    dist.all_gather_object(verdicts, verdict)
    heaviest = max(range(ranks.world_size), key=lambda rank: (verdicts[rank][0], -rank))
    weight, text = verdicts[heaviest]
    return f"Rank {heaviest}: {text}" if weight in (_RAISED, _WRONG) and ranks.world_size > 1 else text
