"""Checks of lesson 02: ordered sends, pi by a reduce, speed-up; those of the ring are in `rings`."""

import math

import torch
import torch.distributed as dist

from manyhands.checks import Wrong, exercise
from manyhands.checks.observe import Waits
from manyhands.checks.rings import all_reduce_any_length as all_reduce_any_length
from manyhands.checks.rings import mended_ring as mended_ring
from manyhands.checks.rings import ring_all_gather as ring_all_gather
from manyhands.checks.rings import ring_reduce_scatter as ring_reduce_scatter
from manyhands.checks.rings import ring_seconds as ring_seconds
from manyhands.checks.tensors import count, same
from manyhands.checks.values import number, shown
from manyhands.measure import wire


@exercise("C", "ordered sends")
def pass_right(answer, ranks):
    """`answer(mine)` returns the left neighbour's tensor; all ranks call it, none waits for another's turn."""
    n, left = ranks.world_size, (ranks.rank - 1) % ranks.world_size
    runs, programs = [], []
    for shape, dtype in (((1,), torch.float32), ((5, 2), torch.int32), ((250_000,), torch.float32)):
        everyone = [_belongings(rank, shape, dtype) for rank in range(n)]
        mine = everyone[ranks.rank].clone()
        with wire.watch() as seen, Waits(seen.calls) as waits:
            theirs = answer(mine)
        runs.append((everyone, mine, theirs, seen))
        programs.append(([call.op for call in seen.calls], 1 in waits.after))
    all_programs = [None] * n
    dist.all_gather_object(all_programs, programs)
    for everyone, mine, theirs, seen in runs:
        what = f"for {count(mine.numel(), 'number')}"
        if not isinstance(theirs, torch.Tensor):
            raise Wrong(f"{what} it returned {shown(theirs)}; return the tensor of rank {left}")
        name = f"the tensor of rank {left}, your left neighbour"
        same(theirs, everyone[left], what, name, _whose(theirs, everyone, seen))
        if not torch.equal(mine, everyone[ranks.rank]):
            raise Wrong(f"{what} the tensor that you were given has changed; receive into another one")
        if n > 1 and (seen.messages, seen.sent_bytes) != (1, mine.nbytes):
            raise Wrong(
                f"{what} this rank sent {count(seen.messages, 'message')} and {seen.sent_bytes} bytes; "
                f"1 message and {mine.nbytes} bytes are needed"
            )
    rounds = max(_rounds(run) for run in zip(*all_programs, strict=True))
    # blocking calls need two rounds: half of the ranks send, then the others; and three if n is odd
    if rounds > 2 + n % 2:
        raise Wrong(
            f"right, but some ranks wait for their turn: {rounds} messages one after the other, where {2 + n % 2} rounds "
            f"are enough for {n} ranks"
        )


def _whose(theirs, everyone, seen):
    """Where a wrong tensor may come from, as the end of a sentence."""
    for rank, belongings in enumerate(everyone):
        if theirs.dtype == belongings.dtype and torch.equal(theirs, belongings):
            return f"; it is that of rank {rank}"
    return "" if any(call.op != "send" for call in seen.calls) else "; this rank received nothing"


def _belongings(rank, shape, dtype):
    """What a rank gives away: numbers that nobody can guess who knows the rank alone."""
    generator = torch.Generator().manual_seed(1_000_003 * (rank + 1))
    return torch.randint(1, 2**20, shape, generator=generator).to(dtype)


def _rounds(programs):
    """How many messages travel one after the other round a ring, by what each rank did in which order.

    programs: of each rank its calls, a send to the right and a receive from the left, and whether it waited for the
    first before it began the second. 0 for other calls than those two.
    """
    n = len(programs)
    if any(sorted(calls) != ["recv", "send"] for calls, _ in programs):
        return 0
    done = [1] * n  # when the message of rank r has arrived at r + 1

    def begins(rank, op):
        calls, waited = programs[rank]
        if not waited or calls[0] == op:
            return 0
        return done[rank - 1] if op == "send" else done[rank]

    for _ in range(n):
        done = [1 + max(begins(r, "send"), begins((r + 1) % n, "recv")) for r in range(n)]
    return max(done)


@exercise(2, "pi with one reduce")
def estimate_pi(answer, ranks):
    """`answer(points, count_hits)` is 4 x hits / points on rank 0 and None elsewhere, with one reduce."""
    n, all_points, asked = ranks.world_size, 1_003, []

    def count_hits(points, seed):  # named as in the lesson: answers may say count_hits(points=..., seed=...)
        asked.append((int(points), int(seed)))
        return 3 * int(points) // 4 + int(seed) % 2

    with wire.watch() as seen:
        result = answer(all_points, count_hits)
    everybody = [None] * n
    dist.all_gather_object(everybody, asked)
    calls = [call for rank_calls in everybody for call in rank_calls]
    counted = sum(share for share, _ in calls)
    if counted != all_points:
        raise Wrong(
            f"{n} ranks were asked for {all_points} points and counted {counted}; let no remainder fall, count none twice"
        )
    seeds = [seed for _, seed in calls]
    if len(set(seeds)) < len(seeds):
        raise Wrong(f"the ranks used the seeds {seeds}: equal seeds draw the same points, and more ranks add nothing")
    for rank, rank_calls in enumerate(everybody):
        mine = sum(share for share, _ in rank_calls)
        if mine > math.ceil(all_points / n):
            raise Wrong(f"rank {rank} counts {mine} of {all_points} points; share them evenly")
    if [call.op for call in seen.calls] != ["reduce"]:
        used = ", ".join(call.op for call in seen.calls) or "nothing"
        raise Wrong(f"it calls {used}; one reduce to rank 0 is enough, as nobody else needs the result")
    wanted = 4 * sum(3 * share // 4 + seed % 2 for share, seed in calls) / all_points
    if ranks.rank != 0 and result is not None:
        raise Wrong("only rank 0 has the sum after a reduce; return None on the others")
    if ranks.rank == 0:
        result = number(result, f"the number {wanted:.6f} on rank 0")
        if not abs(result - wanted) <= 1e-6:
            raise Wrong(f"rank 0 returns {result:.6f}; with the hits of all ranks it is {wanted:.6f}")


@exercise(3, "speed-up and efficiency")
def speed_up(answer, ranks=None):
    """`answer(seconds)`: {ranks: (speed-up, efficiency)} from {ranks: seconds}; the efficiency is a fraction."""
    cases = [
        {1: 8.03, 2: 4.21, 4: 2.09, 8: 1.06},
        {1: 10.0, 4: 5.0},
        {1: 3.0},
        {2: 16.0, 1: 8.0, 16: 1.0},  # one rank is neither the first nor the slowest
    ]
    for seconds in cases:
        table = answer(dict(seconds))
        if table is ...:
            raise NotImplementedError
        if not isinstance(table, dict) or set(table) != set(seconds):
            raise Wrong(
                f"return a dictionary with the keys {list(seconds)}, each with (speed-up, efficiency), not {shown(table)}"
            )
        for n, pair in table.items():
            many = isinstance(pair, (tuple, list)) or getattr(pair, "ndim", 0) == 1  # a row of numpy or torch
            if not many or len(pair) != 2:
                raise Wrong(f"for {count(n, 'rank')} return a pair, (speed-up, efficiency), not {shown(pair)}")
            ratio = number(pair[0], f"a number as the speed-up on {count(n, 'rank')}")
            efficiency = number(pair[1], f"a number as the efficiency on {count(n, 'rank')}")
            right = seconds[1] / seconds[n]
            if not math.isclose(ratio, right, rel_tol=5e-3):
                raise Wrong(
                    f"{seconds[1]} s on one rank and {seconds[n]} s on {n} are a speed-up of {right:.2f}, not {ratio:.2f}"
                )
            if not math.isclose(efficiency, right / n, rel_tol=5e-3):
                raise Wrong(
                    f"a speed-up of {right:.2f} on {count(n, 'rank')} is an efficiency of {right / n:.2f}, not {efficiency:.2f}: "
                    "the share of the ideal speed-up n that was reached"
                )
