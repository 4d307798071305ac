"""Check answers to exercises: run an answer on all ranks, name its fault in one sentence, never break a notebook.

    @exercise(1, "ring all-reduce")
    def ring_all_reduce(answer, ranks):
        x_N, n = normal(ranks.rank, 7), ranks.world_size              # drawn from a seed: every rank can compute it
        total_N = sum(normal(rank, 7) for rank in range(n))
        with wire.watch() as seen:
            found = answer(x_N.clone())
        slips = {"that is the mean": total_N / n, "that is this rank's own": x_N}     # {sentence: wrong value}
        expect_tensor(found, total_N, "for 7 numbers what came back", slips, it_is="the sum over the ranks")
        expect_traffic(seen, "the sum is right", "sum, then hand round", calls=2 * (n - 1))

    checks.ring_all_reduce(my_answer, ranks)                  # exercise 1 (ring all-reduce): not yet. For 7 ...

Each lesson has its module. They share `expect` (compare a result, explain a wrong one) and `drawn` (random numbers
that every rank can compute without communication).

An answer can leave unread messages behind, which would corrupt later communication on the same connections. So each
answer runs in a temporary process group, and mismatched calls are reported before gloo aborts the process (`trial`).
The verdict is exchanged through the main group's store. Process-wide settings are restored afterwards (`unspoilt`).
An answer that changes its input tensors is rejected. An error that the check's own code raises over an unusable
result is not blamed on the learner's code (`witness`). An answer that never ends is stopped, together with the
threads that it started (`stop`).

Each answer is judged twice, with different numbers of the same sizes. This finds state kept between calls.
"""

import functools
import json
import re
import time
from contextlib import contextmanager, suppress
from contextvars import ContextVar

# An optimizer imports it at first use, which takes seconds. Import it here so that the time counts for the cell that
# imports the checks, not for the first answer.
import torch._dynamo  # noqa: F401
import torch.distributed as dist

from manyhands.checks.stop import LeftRunning, NeverEnds, stopped_after
from manyhands.checks.trial import CallsDiffer, Matching, NobodyCalls, meet, trial_group
from manyhands.checks.unspoilt import RANDOM_STATE, SETTINGS, unspoilt
from manyhands.checks.witness import Changed, Witness, said, unfinished
from manyhands.course import board
from manyhands.course.catch_up import go_on_without
from manyhands.launch.limits import cure
from manyhands.launch.program import say
from manyhands.launch.run_folder import outputs_folder

TIMEOUT_S = 5.0
FACT = ContextVar("fact", default="")  # communication of a correct answer in its last trial, shown to the learner
TURN = ContextVar("turn", default=(0, 0))  # (seed of the check, 0 or 1: the first or the second time), see `drawn`
CORRECT, NOT_ATTEMPTED = "correct", "not attempted"
RECORD = "checks.jsonl"  # in the folder of outputs: an attendee's own verdicts, a line for each
_LOST = re.compile(r"[Tt]imed out|[Tt]imeout|Connection closed|Connection reset|Broken pipe")
_CODE = re.compile(r"\w*[^\W\d_](_|\.\w|\(|\[|-\d| = )|(x|y|dx|dy|f|g)\b")  # a sentence that begins with a name
# A heavier verdict says more about the cause. Among equal ones, the lowest rank's counts.
_FINE, _ALONE, _WAITED, _RAISED, _WRONG, _DIFFER, _EMPTY = range(7)


class Wrong(Exception):
    """Raised by a check for a wrong answer: one sentence to the learner, with the numbers."""


@contextmanager
def naming(slips):
    """Raise Wrong with the slip behind an error that Python or torch words otherwise: {part of its text: slip}."""
    try:
        yield
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        for slip in (slip for part, slip in slips.items() if part in str(error)):
            raise Wrong(slip) from error
        raise


class Verdict(str):
    """The text that a check returns. A notebook does not echo it: the check has printed it."""

    def _ipython_display_(self):
        pass


def exercise(number, title, timeout_s=TIMEOUT_S, if_calls_differ="", in_place=False, in_flight=False):
    """Turn `body(answer, ranks, **given)`, which raises Wrong or returns, into a check.

    `number` is an exercise's number (1, 2, ...) or a build's letter ("A", "B", ...). A build is lines of a lesson's
    CORE that the learner writes. `if_calls_differ`: a hint for when ranks do not make the same calls. `in_place`: an
    answer may change its input tensors. `in_flight`: an answer may return before its collective has finished.

    The check is called by all ranks as `check(answer, ranks, seed=0, **given)`. It prints its verdict on rank 0 and
    returns it on every rank: "correct", "not attempted" (the answer is None or ... or raised NotImplementedError), or
    the sentence of the lowest rank that found a fault. A function that is not attempted is replaced by the lesson's
    solution, so that the cells below run. With `ranks` None, judge in this process alone, without a process group. A
    different seed draws different sizes and numbers.
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
                topic = body.__module__.rpartition(".")[2]
                if topic == "__main__" and ranks is not None:  # a check that stands in the lesson itself
                    topic = ranks.lesson.partition("_")[2]
                board.note(topic, number, title, verdict)
                if verdict != NOT_ATTEMPTED and ranks is not None and ranks.launcher == "notebook":
                    keep(topic, number, title, verdict)
            return Verdict(verdict)

        return check

    return decorate


def keep(topic, number, title, verdict):
    """Add a verdict to the attendee's own record, for `make my-report`. A check must not fail over it."""
    said = {"topic": topic, "build": str(number), "title": title, "verdict": str(verdict), "at": time.time()}
    with suppress(OSError), (outputs_folder() / RECORD).open("a", encoding="utf-8") as record:
        record.write(json.dumps(said) + "\n")


def _one_turn(turn, witness, answer, ranks, given, timeout_s, if_calls_differ):
    """Try an answer once and return the verdict of all ranks."""
    before = TURN.set(turn)
    try:
        with unspoilt(SETTINGS), unspoilt(RANDOM_STATE), trial_group(ranks, timeout_s) as group:
            verdict = _judge(witness, answer, ranks, given, group, timeout_s, if_calls_differ)
            if verdict[0] == _WRONG and witness.came_before():
                verdict = _WRONG, f"{verdict[1]} The first trial had other numbers and the same result: is it kept?"
        return _agree(verdict, ranks)
    except RuntimeError as error:
        ended = "a rank's process ended while its answer was judged: restart the ranks"
        raise RuntimeError(cure(str(error)) or ended) from error
    finally:
        TURN.reset(before)


def _judge(witness, answer, ranks, given, group, timeout_s, if_calls_differ):
    """Try the answer in `group`, if there is one, and return this rank's (weight, verdict)."""
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
        return _DIFFER, "Your code destroyed the process group, which later cells need: do not destroy it."
    if matching.not_waited_for and not witness.in_flight and verdict[0] in (_FINE, _WRONG):
        # numbers that are wrong follow from it
        begun = f"you started {matching.not_waited_for[0]} with async_op=True"
        return _WRONG, _sentence(f"{begun} and did not wait for it: call wait() on its handle")
    return verdict


def _verdict(trial, witness, timeout_s, ranks):
    """Run `trial()` and return (weight, verdict) for what it raised. A KeyboardInterrupt is raised again."""
    try:
        trial()
    except (Wrong, Changed) as fault:
        return _WRONG, _sentence(_with_return(str(fault), witness), witness.names())
    except NobodyCalls as fault:
        if not fault.by_answer:  # the check's own collective: the missing rank's verdict says more
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
                f"{who} waited {timeout_s:g} s for a message that never arrived{witness.where(error)}: every send "
                "needs its receive, and two ranks that both wait for the other first wait forever."
            )
        if not witness.is_theirs(error):
            return _RAISED, _sentence(witness.what_came_back(error))
        if isinstance(error, SystemExit):
            return _RAISED, "Your code ended the program (SystemExit): return instead."
        return _RAISED, _sentence(f"your code raised {said(error)}{witness.where(error)}")
    return _FINE, CORRECT


def _with_return(text, witness):
    """Add the likely cause to a sentence about None if the learner's function returned None."""
    hint = f"not None ({witness.why_none()})"
    return text if hint in text or not witness.returned_none() else text.replace("not None", hint, 1)


def _sentence(text, names=()):
    """Return the first line as a sentence, without capitalising a name of the learner's code."""
    text = text.strip().split("\n")[0]
    begins = text[:1] if _CODE.match(text) or text.split(" ")[0] in names else text[:1].upper()
    return begins + text[1:] + ("" if text.endswith((".", "?", "!")) else ".")


def _agree(verdict, ranks):
    """Return the heaviest verdict of all ranks, from the lowest rank that has it."""
    if ranks is None:
        return verdict[1]
    store = dist.PrefixStore("verdict", dist.distributed_c10d._get_default_store())
    store.set(str(ranks.rank), json.dumps(verdict))
    meet()
    verdicts = [json.loads(store.get(str(rank))) for rank in range(ranks.world_size)]
    heaviest = max(range(ranks.world_size), key=lambda rank: (verdicts[rank][0], -rank))
    weight, text = verdicts[heaviest]
    return f"Rank {heaviest}: {text}" if weight in (_RAISED, _WRONG) and ranks.world_size > 1 else text
