"""Checks of exercises: they run an answer on all ranks, name its fault in a sentence, and never break a notebook.

    @exercise(1, "ring all-reduce")
    def ring_all_reduce(answer, ranks):
        if not torch.equal(answer(given), wanted):
            raise Wrong("for 7 numbers the sum is wrong")

    checks.ring_all_reduce(my_answer, ranks)                  # exercise 1 (ring all-reduce): not yet. For 7 ...
    checks.ring_all_reduce(solution, ranks, solution=True)    # anything but "correct" raises AssertionError

An answer can leave messages behind that poison whatever comes next on the same connections. So each answer runs in a
process group of its own, which is thrown away afterwards; the verdict travels over the ranks' own group.
"""

import functools
import re
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from manyhands.runs.screen import say

TIMEOUT_S = 5.0
CORRECT, NOT_ATTEMPTED = "correct", "not attempted"
_LOST = re.compile(r"[Tt]imed out|[Tt]imeout|Connection closed|Connection reset|Broken pipe")


class Wrong(Exception):
    """What is wrong with an answer: one sentence to the learner, with the numbers."""


class Verdict(str):
    """What a check returns: a text that a notebook does not echo, as the check has said it already."""

    __slots__ = ()

    def _ipython_display_(self):
        pass


def exercise(number, title, timeout_s=TIMEOUT_S):
    """Make a check of `body(answer, ranks, **given)`, which raises Wrong or returns.

    The check is called by all ranks as `check(answer, ranks, solution=False, **given)`. It says its verdict on rank 0
    and returns it on every rank: "correct", "not attempted" (the answer is None or ... or raised
    NotImplementedError), or the sentence of the lowest rank that found a fault. `ranks` None judges in this process
    alone, without a process group.
    """

    def decorate(body):
        @functools.wraps(body)
        def check(answer, ranks=None, solution=False, **given):
            state = torch.get_rng_state()
            with _trial_group(ranks, timeout_s):
                verdict = _judge(body, answer, ranks, given, timeout_s)
            torch.set_rng_state(state)
            verdict = _agree(verdict, ranks)
            label = f"{'solution' if solution else 'exercise'} {number} ({title})"
            shown = verdict if verdict in (CORRECT, NOT_ATTEMPTED) else f"not yet. {verdict}"
            if ranks is None or ranks.rank == 0:
                say(f"{label}: {shown}")
            if solution and verdict != CORRECT:
                raise AssertionError(f"{label}: {shown}")
            return Verdict(verdict)

        return check

    return decorate


def _judge(body, answer, ranks, given, timeout_s):
    """(weight, verdict) of this rank: the heavier a verdict, the more it says about the cause."""
    if answer is None or answer is ...:
        return 4, NOT_ATTEMPTED
    try:
        body(answer, ranks, **given)
    except NotImplementedError:
        return 4, NOT_ATTEMPTED
    except Wrong as fault:
        return 3, _sentence(str(fault))
    except Exception as error:
        if isinstance(error, RuntimeError) and _LOST.search(str(error)):
            return 1, (
                f"A rank waited {timeout_s:g} s for a message that never came: every send needs its receive, and two "
                "ranks that both wait for the other first wait forever."
            )
        return 2, _sentence(f"your code raised {type(error).__name__}: {error}")
    return 0, CORRECT


def _sentence(text):
    text = text.strip().split("\n")[0]
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?", "!")) else ".")


def _agree(verdict, ranks):
    """The heaviest verdict of all ranks, of the lowest rank that has it."""
    if ranks is None:
        return verdict[1]
    verdicts = [None] * ranks.world_size
    dist.all_gather_object(verdicts, verdict)
    heaviest = max(range(ranks.world_size), key=lambda rank: (verdicts[rank][0], -rank))
    weight, text = verdicts[heaviest]
    return f"Rank {heaviest}: {text}" if weight in (2, 3) and ranks.world_size > 1 else text


@contextmanager
def _trial_group(ranks, timeout_s):
    """Swap the default process group for a fresh one (gloo, short time-out), so that plain dist calls use it."""
    if ranks is None or not dist.is_initialized():
        yield
        return
    own = dist.group.WORLD
    dist.barrier()  # with the group's own patience: a rank that still draws a figure must not use up the trial's
    trial = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    c10d._update_default_pg(trial)
    try:
        yield
    finally:
        c10d._update_default_pg(own)
        dist.barrier()  # nobody hangs up while another still waits for its message
        c10d._abort_process_group(trial)
