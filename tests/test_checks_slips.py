"""Everyday slips: the check names them, all ranks live on, and a right answer after any of them is still accepted."""

import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from exercises import heard_alike
from manyhands.checks import Wrong, exercise
from torch import nn

N = 4


@exercise(1, "the sum", timeout_s=4, in_place=True)
def the_sum(answer, ranks):
    total = answer(torch.full((2,), float(ranks.rank)))
    dist.barrier()
    wanted = ranks.world_size * (ranks.world_size - 1) / 2
    if total.tolist() != [wanted, wanted]:
        raise Wrong(f"the sum is {total.tolist()}, not {[wanted, wanted]}")


def right(x):
    dist.all_reduce(x)
    return x


def told(answer):
    """An answer of x that is handed (x, rank, n)."""
    return lambda x: answer(x, dist.get_rank(), dist.get_world_size())


# ---- slips: answers (x, rank, n) ----


def on_rank_1(act):
    """An answer that is right, but that rank 1 does `act()` first."""
    return lambda x, rank, n: right(x if rank != 1 or act() is None else x)


def waits_for_a_message_on_rank_1(x, rank, n):
    """The others meet in the check, which is none of the learner's business."""
    if rank == 1:
        dist.recv(x, 2)
    return torch.full((2,), 6.0)


def begins_but_does_not_wait(x, rank, n):
    dist.all_reduce(x.clone(), async_op=True)
    return right(x)


SLIPS = {
    "another dtype": (lambda x, rank, n: right(x.int() if rank == n - 1 else x),
        "Ranks 0-3 call all_reduce with float32, float32, float32 and int32 numbers."),
    "wrong on the last rank": (lambda x, rank, n: right(x) + (rank == n - 1),
        "Rank 3: The sum is [7.0, 7.0], not [6.0, 6.0]."),
    "not waited for": (begins_but_does_not_wait,
        "Rank 0: You started all_reduce with async_op=True and did not wait for it: call wait() on its handle."),
    "only some": (lambda x, rank, n: right(x) if x.any() else x,
        "Ranks 1-3 call all_reduce when rank 0 has no call left to make: each collective needs all ranks."),
    "another call": (lambda x, rank, n: dist.reduce(x, 0) if rank == 1 else right(x),
        "Rank 0 calls all_reduce while rank 1 calls reduce."),
    "os._exit": (on_rank_1(lambda: os._exit(3)), "Rank 1: Your code ended the program (SystemExit): return instead."),
    "a process that goes on": (on_rank_1(lambda: subprocess.Popen(["sleep", "60"])),
        "Rank 1: Your code left a process running: wait for its end, or end it, before you return."),
    "a message that never comes": (waits_for_a_message_on_rank_1,
        "Rank 1 waited 4 s for a message that never arrived (line N: dist.recv(x, 2)): every send needs"),
}  # fmt: skip


# ---- calls that do match, in other orders than the usual ones ----


def by_messages_to_rank_0(x, rank, n):
    """In rank order, from anybody, with a buffer that is too long, and back in one batch."""
    if rank == 0:
        for _ in range(n - 1):
            room = torch.zeros(5)
            dist.recv(room)
            x = x + room[: len(x)]
        for work in [dist.isend(x, r, tag=7) for r in range(1, n)]:
            work.wait()
    else:
        dist.send(x, 0)
        dist.recv(x, 0, tag=7)
    return x


def receives_before_it_sends(x, rank, n):
    total, passed = x.clone(), x
    for _ in range(n - 1):
        room = torch.empty_like(x)
        works = [dist.irecv(room, (rank - 1) % n), dist.isend(passed, (rank + 1) % n)]
        for work in works:
            work.wait()
        total, passed = total + room, room
    return total


RIGHT = [by_messages_to_rank_0, receives_before_it_sends]


def judge_slips(ranks):
    """{slip: (the verdict on it, the verdict on a right answer after it)}"""
    after = told(receives_before_it_sends)  # it would receive what was left behind
    return {name: (the_sum(told(slip), ranks), the_sum(after, ranks)) for name, (slip, _) in SLIPS.items()}


@pytest.fixture(scope="module")
def verdicts(pool):
    return heard_alike(pool.run(N, judge_slips, timeout_s=280))


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_named_and_kills_no_rank(verdicts, slip):
    verdict, later = verdicts[slip]
    assert SLIPS[slip][1] in re.sub(r"\bline \d+", "line N", verdict)
    assert later == "correct", f"after it a right answer is told: {later}"


def judge_right(ranks):
    return [the_sum(told(answer), ranks) for answer in RIGHT]


@pytest.mark.parametrize("n", [1, 3])
def test_calls_that_match_are_let_through_in_any_order(pool, n):
    assert heard_alike(pool.run(n, judge_right)) == ["correct"] * len(RIGHT)


@exercise(2, "a pair of functions")
def a_pair(answer, ranks=None):
    double, note = answer
    numbers = [1, 2]
    note(numbers)
    if double(3) + len(numbers) != 9:
        raise Wrong("3 and 3 numbers are 9")


def appends(numbers):
    numbers.append(3)


def prints(x):
    print(2 * x)


def test_without_a_group_errors_are_told_with_their_author_as_well(capsys):
    for answer, verdict in [
        ((lambda x: 2 * x, appends), "correct"),
        (
            (prints, appends),
            "Your function returned None: is a `return` missing? If not, the check cannot go on "
            "with what your code left behind (TypeError",
        ),
        ((appends, appends), "Your code raised AttributeError: 'int' object has no attribute 'append' (line "),
        ((lambda x: sys.exit(2), appends), "Your code ended the program (SystemExit): return instead."),
        (5, "Your answer is 5, which the check cannot use (TypeError: cannot unpack"),
    ]:
        assert a_pair(answer).startswith(verdict), a_pair(answer)


@exercise(4, "handed out as an empty function")
def handed_out_empty(answer, ranks=None):
    if answer(2) is None:
        raise NotImplementedError


def test_an_empty_function_is_not_attempted_and_one_that_forgets_its_return_is(capsys):
    def empty(x): ...

    def forgetful(x):
        x *= 2

    @torch.no_grad()
    def decorated(x): ...

    answers = (empty, decorated, lambda x: {"a": ...}, (empty, ...))
    assert [handed_out_empty(answer) for answer in answers] == ["not attempted"] * len(answers)
    assert handed_out_empty(forgetful).startswith("Your function returned None: is a `return` missing?")


def test_a_key_that_was_pressed_interrupts_a_check():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever started these tests may ignore it

    def presses(x):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    try:
        with pytest.raises(KeyboardInterrupt):
            handed_out_empty(presses)
    finally:
        signal.signal(signal.SIGINT, before)


# ---- what an answer leaves behind ----


def sets_everything(folder):
    """An answer that is right, and sets what it can for the whole process."""

    def answer(x):
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        os.chdir(folder)
        os.environ["OMP_NUM_THREADS"] = "77"
        torch.manual_seed(77)
        return 2 * x

    return answer


def settings():
    here = torch.ones(1).dtype, torch.is_grad_enabled(), os.getcwd(), dict(os.environ)
    return *here, torch.get_rng_state().tolist()


@exercise(5, "twice")
def twice(answer, ranks=None):
    before = settings()[:-1]  # random numbers may be part of what is asked for
    if answer(21) != 42:
        raise Wrong("twice 21 is 42")
    assert settings()[:-1] == before, "within a check the next call meets what the one before it has set"


def test_what_an_answer_sets_for_the_whole_process_is_put_back(tmp_path, capsys):
    before = settings()
    assert twice(sets_everything(tmp_path)) == "correct"
    assert settings() == before


@exercise(8, "what is given")
def what_is_given(answer, ranks=None):
    answer(torch.ones(2), {"rows": [np.ones(3), nn.Parameter(torch.ones(2))]})


def test_a_tensor_or_an_array_that_an_answer_changes_is_told_by_its_name(capsys):
    for answer, verdict in [
        (lambda x, table: x * table["rows"].pop(), "correct"),
        (lambda x, table: x.mul_(2), "x was changed; leave it as it is."),
        (lambda x, table: table["rows"][0].fill(0), "table was changed; leave it as it is."),
        (lambda x, table: table["rows"][1].data.zero_(), "A weight was changed; leave it as it is."),
        (lambda *given: given[0].zero_(), "What your code was given was changed; leave it as it is."),
    ]:
        assert what_is_given(answer) == verdict
