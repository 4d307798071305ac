"""Everyday slips: the check names them, all ranks live on, and a right answer after any of them is still accepted."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from exercises import heard_alike
from manyhands.checks import Wrong, exercise, trial
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


def longer_on_the_last(x, rank, n):
    return torch.cat([x, x]) if rank == n - 1 else x


# ---- messages that do not match: answers (x, rank, n) ----


def passes_on_without_an_end(x, rank, n):
    if rank > 0:
        dist.recv(x, rank - 1)
    dist.send(x, rank + 1)


def receives_into_too_little(x, rank, n):
    work = dist.isend(x.double(), (rank + 1) % n)
    dist.recv(torch.empty(2), (rank - 1) % n)
    work.wait()


# ---- collectives that do not match ----


def exchanges_unequal(x, rank, n):
    mine = torch.cat([longer_on_the_last(x, rank, n)] * n)
    dist.all_to_all_single(torch.empty_like(mine), mine)


def swallows_what_it_is_told(x, rank, n):
    with contextlib.suppress(Exception):
        dist.all_reduce(torch.ones(1 + rank))
    return torch.full((2,), n * (n - 1) / 2)


# ---- errors: whose they are, and what they say ----


def raises_like_a_lost_message(x, rank, n):
    raise RuntimeError("Timed out while I waited for the coffee")


def on_rank_1(act):
    """An answer that is right, but that rank 1 does `act()` first."""
    return lambda x, rank, n: right(x if rank != 1 or act() is None else x)


def ends_the_group(x, rank, n):
    right(x)
    dist.destroy_process_group()
    return x


def loops_on():
    """It catches what stops it, a few times."""
    for _ in range(3):
        with contextlib.suppress(BaseException):
            while True:
                time.sleep(0.001)
    while True:
        time.sleep(0.001)


def comes_later(seconds):
    """A thread that calls a collective when the check is over, which would meet another call of the others."""
    threading.Timer(seconds, lambda: dist.all_reduce(torch.ones(100))).start()


def waits_for_a_message_on_rank_1(x, rank, n):
    """The others meet in the check, which is none of the learner's business."""
    if rank == 1:
        dist.recv(x, 2)
    return torch.full((2,), 6.0)


def makes_a_group_on_some(x, rank, n):
    """All ranks have to make it, also those that are not in it."""
    if rank < 2:
        dist.new_group([0, 1])
    return right(x)


def begins_but_does_not_wait(x, rank, n):
    dist.all_reduce(x.clone(), async_op=True)
    return right(x)


def leaves_a_message_behind(x, rank, n):
    dist.isend(torch.tensor([222.0, 222.0]), (rank + 1) % n)
    return torch.zeros(2)


def fails_in_a_hook(x, rank, n):
    weight = nn.Parameter(torch.ones(2))

    def hook(p):
        return p.grad + "1"

    weight.register_post_accumulate_grad_hook(hook)
    weight.sum().backward()


SLIPS = {
    "sends behind the last": (passes_on_without_an_end, "Rank 3 sends to rank 4, and there are 4 ranks: 0 to 3."),
    "too little room": (receives_into_too_little, "sends 16 bytes to rank"),
    "sends to itself": (lambda x, rank, n: dist.isend(x, rank).wait(),
        "Rank 0 sends to itself; a message must go to another rank."),
    "all-to-all": (exchanges_unequal, "In all_to_all_single rank 0 sends 8 bytes to rank 3, which receives into 16."),
    "another dtype": (lambda x, rank, n: right(x.int() if rank == n - 1 else x),
        "Ranks 0-3 call all_reduce with float32, float32, float32 and int32 numbers."),
    "only some": (lambda x, rank, n: right(x) if x.any() else x,
        "Ranks 1-3 call all_reduce when rank 0 has no call left to make: each collective needs all ranks."),
    "another call": (lambda x, rank, n: dist.reduce(x, 0) if rank == 1 else right(x),
        "Rank 0 calls all_reduce while rank 1 calls reduce."),
    "swallowed": (swallows_what_it_is_told, "Ranks 0-3 call all_reduce with 4, 8, 12 and 16 bytes."),
    "an error like a lost message": (raises_like_a_lost_message,
        "Rank 0: Your code raised RuntimeError: Timed out while I waited for the coffee (line N: "),
    "no numbers on meta": (lambda x, rank, n: torch.ones(2, device="meta").cpu(),
        "Rank 0: Your code raised NotImplementedError: Cannot copy out of meta tensor"),
    "os._exit": (on_rank_1(lambda: os._exit(3)), "Rank 1: Your code ended the program (SystemExit): return instead."),
    "a loop that is hard to end": (on_rank_1(loops_on), "Rank 1: Your code had not ended after"),
    "a thread that comes later": (on_rank_1(lambda: comes_later(30.0)), "Rank 1: Your code left a thread running (Thr"),
    "a process that goes on": (on_rank_1(lambda: subprocess.Popen(["sleep", "60"])),
        "Rank 1: Your code left a process running: wait for its end, or end it, before you return."),
    "a group of some": (makes_a_group_on_some, "Rank 0 calls new_group while rank 2 calls all_reduce."),
    "no group left": (ends_the_group,
        "Your code destroyed the process group, which later cells need: do not destroy it."),
    "a message that never comes": (waits_for_a_message_on_rank_1,
        "Rank 1 waited 4 s for a message that never arrived (line N: dist.recv(x, 2)): every send needs"),
    "wrong on the last rank": (lambda x, rank, n: right(x) + (rank == n - 1),
        "Rank 3: The sum is [7.0, 7.0], not [6.0, 6.0]."),
    "not waited for": (begins_but_does_not_wait,
        "Rank 0: You started all_reduce with async_op=True and did not wait for it: call wait() on its handle."),
    "a message left behind": (leaves_a_message_behind, "Rank 0: The sum is [0.0, 0.0], not [6.0, 6.0]."),
    "fails in a hook": (fails_in_a_hook, "Rank 0: Your code raised TypeError: "),
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


def first_a_length_from_anybody(x, rank, n):
    """Rank 0 learns from anybody how much comes, and takes that from whoever it was; sums go back."""
    if rank:
        dist.send(torch.tensor([50]), 0)
        dist.send(torch.cat([x, torch.ones(48)]), 0)
        dist.recv(x, 0)
        return x
    for _ in range(n - 1):
        length = torch.tensor([0])
        source = dist.recv(length)
        room = torch.empty(int(length))
        dist.recv(room, source)
        x = x + room[: len(x)]
    for r in range(1, n):
        dist.send(x, r)
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


def in_pairs_of_groups(x, rank, n):
    """A group of the even ranks and one of the odd ones, with messages of unequal length, then one of the first two."""
    groups = [dist.new_group(list(range(i, n, 2))) for i in range(min(2, n))]
    for i, group in enumerate(groups):
        if rank % 2 == i:
            dist.all_reduce(torch.ones(1 + i), group=group)
            dist.all_reduce(x, group=group)
    other = x.clone()
    if n > 1:
        firsts = dist.new_group([0, 1])
        if rank < 2:
            both = [torch.empty_like(x) for _ in range(2)]
            dist.all_gather(both, x, group=firsts)
            other = both[0] + both[1]
        dist.broadcast(other, 0)
    return other


def all_at_the_same_time(x, rank, n):
    for work in [dist.all_reduce(t, async_op=True) for t in (torch.ones(3), x)]:
        work.wait()
    return x


def looks_until_it_has_come(x, rank, n):
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        pass
    return x


def in_unequal_parts(x, rank, n):
    """An all-to-all in which rank r gets r + 1 numbers from everybody."""
    numbers, sizes = torch.ones(n * (n + 1) // 2), list(range(1, n + 1))
    dist.all_to_all_single(torch.empty(n * (rank + 1)), numbers, [rank + 1] * n, sizes)
    return right(x)


RIGHT = [
    by_messages_to_rank_0, first_a_length_from_anybody, receives_before_it_sends, in_pairs_of_groups,
    all_at_the_same_time, looks_until_it_has_come, in_unequal_parts,
]  # fmt: skip


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
    """On three ranks rank 0 comes later than the others wait within a check, as if it drew a figure."""
    time.sleep(7 * (ranks.rank == 0 and ranks.world_size == 3))
    return [the_sum(told(answer), ranks) for answer in RIGHT]


class _Lost:
    """The handle of a barrier whose message was lost."""

    def is_completed(self):
        return False

    def wait(self):
        raise AssertionError("this would wait for ever")


def _judged_on_lost_connections(ranks):
    """What a check says where the n-th barrier of the ranks' own group does not end."""
    found, barrier = [], dist.barrier
    for nth in range(3):
        begun = []

        def begin(*args, nth=nth, begun=begun, **kwargs):
            begun.append(1)
            return _Lost() if len(begun) == nth + 1 else barrier(*args, **kwargs)

        with mock.patch.object(dist, "barrier", begin), mock.patch.object(trial, "STUCK_S", 0.3):
            try:
                found.append(str(twice(lambda x: 2 * x, ranks)))
            except trial.Stuck as stuck:
                found.append(str(stuck))
    return found, str(twice(lambda x: 2 * x, ranks))


def test_a_check_ends_with_a_sentence_where_the_ranks_own_barrier_does_not(pool):
    for found, afterwards in pool.run(2, _judged_on_lost_connections):
        assert afterwards == "correct"
        assert len(found) == 3
        for sentence in found:
            assert sentence.startswith("all 2 ranks are in the check, and the barrier of their process group has not")


@pytest.mark.parametrize("n", [1, 3])
def test_calls_that_match_are_let_through_in_any_order_also_by_a_rank_that_comes_late(pool, n):
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
        ((prints, appends), "Your function returned None: is a `return` missing?\n"),
        ((appends, appends), "Your code raised AttributeError: 'int' object has no attribute 'append' (line "),
        ((lambda x: "6", appends), "Your function returned the text '6', which the check cannot use (TypeError"),
        ((lambda x: 2 * x, len), "3 and 3 numbers are 9."),
        ((len, appends), "Your code raised TypeError: object of type 'int' has no len()."),
        ((lambda x: sys.exit(2), appends), "Your code ended the program (SystemExit): return instead."),
        (5, "Your answer is 5, which the check cannot use (TypeError: cannot unpack"),
    ]:
        assert f"{a_pair(answer)}\n".startswith(verdict), a_pair(answer)


@exercise(4, "handed out as an empty function")
def handed_out_empty(answer, ranks=None):
    if answer(2) is None:
        raise NotImplementedError


def test_an_empty_function_is_not_attempted_and_one_that_forgets_its_return_is(capsys):
    def empty(x): ...

    def described(x):
        """Twice x."""

    def forgetful(x):
        x *= 2

    @torch.no_grad()
    def decorated(x): ...

    def in_parts(x):
        first = second = ...
        return first, second

    answers = (empty, described, decorated, in_parts, lambda x: {"a": ...}, (empty, ...))
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
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.use_deterministic_algorithms(True)
        os.chdir(folder)
        os.environ["OMP_NUM_THREADS"] = "77"
        os.environ.pop("PATH")
        torch.manual_seed(77)
        random.seed(77)
        np.random.seed(77)
        return 2 * x

    return answer


def settings():
    return (
        torch.ones(1).dtype, torch.ones(1).device, torch.is_grad_enabled(), torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(), os.getcwd(), dict(os.environ), torch.get_rng_state().tolist(),
        random.getstate(), np.random.get_state()[1].tolist(),
    )  # fmt: skip


@exercise(5, "twice")
def twice(answer, ranks=None):
    before = settings()[:-3]  # random numbers may be part of what is asked for
    if answer(21) != 42:
        raise Wrong("twice 21 is 42")
    assert settings()[:-3] == before, "within a check the next call meets what the one before it has set"


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
        (lambda x, table: setattr(table["rows"][1], "data", 2 * x), "A weight was changed; leave it as it is."),
        (lambda *given: given[0].zero_(), "What your code was given was changed; leave it as it is."),
    ]:
        assert what_is_given(answer) == verdict


TABLE = {"groups": [[0, 1], [2, 3]], "names": ["a", "b"], "pairs": [(1, [2])]}


@exercise(6, "how many")
def how_many(answer, ranks=None):
    for _ in range(2):
        flat = {"a": 1}
        if (found := answer(dict(TABLE), flat)) != 4:
            raise Wrong(f"there are 4, not {found}")
        if flat != {"a": 1}:
            raise Wrong("leave it as it is")


def uses_up(table, flat):
    count = 0
    for group in table["groups"]:
        while group:
            group.pop()
            count += 1
    table["names"].clear()
    table["pairs"][0][1].append(3)
    return count


def test_an_answer_that_uses_up_what_it_is_given_is_right_every_time(capsys):
    assert [how_many(uses_up), how_many(uses_up)] == ["correct", "correct"]
    assert TABLE == {"groups": [[0, 1], [2, 3]], "names": ["a", "b"], "pairs": [(1, [2])]}
    assert how_many(lambda table, flat: flat.clear() or 4) == "Leave it as it is.", "a check can see it"
