"""Checks of lesson 02: rings, ordered sends, pi by a reduce, speed-up."""

import math

import torch
import torch.distributed as dist

from manyhands.checks import Wrong, exercise
from manyhands.measure import wire

LENGTHS = (8, 7, 1, 0, 1000)
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
)


@exercise(1, "ring all-reduce")
def all_reduce_any_length(answer, ranks):
    """`answer(x_N)` sums x_N over all ranks in place and returns it: any length, 2(n-1) messages of about N/n."""
    _judge_ring(answer, ranks, LENGTHS)


@exercise(5, "the mended ring")
def mended_ring(answer, ranks):
    """The same demands, for lengths that the number of ranks divides."""
    _judge_ring(answer, ranks, [ranks.world_size * k for k in (1, 5, 300)])


def _judge_ring(answer, ranks, lengths):
    runs = []  # first every length on every rank, then the verdict: nobody is left waiting by a fault found early
    for length in lengths:
        for dtype in (torch.float64, torch.int64):
            x_N = torch.arange(length, dtype=dtype) * (ranks.rank + 1)
            with wire.watch() as seen:
                returned = answer(x_N)
            runs.append((x_N, returned, seen))
    for run in runs:
        _judge_one_ring(*run, ranks.world_size)


def _judge_one_ring(x_N, returned, seen, n):
    length, messages = x_N.numel(), 2 * (n - 1)
    wanted_N = torch.arange(length, dtype=x_N.dtype) * (n * (n + 1) // 2)
    what = f"for {length} numbers ({str(x_N.dtype).removeprefix('torch.')})"
    if not isinstance(returned, torch.Tensor):
        raise Wrong(f"{what} it returned {type(returned).__name__}; return the summed tensor")
    _same(returned, wanted_N, what, "the sum")
    for op in COLLECTIVES:
        if seen.count(op):
            raise Wrong(f"the sum is right, but it calls {op}; build it from messages to your neighbours")
    if seen.messages != messages:
        raise Wrong(
            f"{what} the sum is right, but this rank sent {_count(seen.messages, 'message')}; the ring on {n} ranks sends "
            f"exactly 2(n-1) = {messages}: n-1 hops to sum, n-1 to hand around"
        )
    sent, enough = seen.sent_bytes // x_N.element_size(), messages * math.ceil(length / n)
    if sent > enough:
        raise Wrong(
            f"{what} the sum is right, but {_count(sent, 'number')} left this rank in {messages} messages; "
            f"chunks of at most {math.ceil(length / n)} are enough, {_count(enough, 'number')} in all"
        )
    if not torch.equal(x_N, wanted_N):
        raise Wrong("the returned sum is right, but x_N still holds other numbers; sum in place")


@exercise(2, "ordered sends")
def pass_right(answer, ranks):
    """`answer(mine)` returns the left neighbour's tensor; all ranks call it, none waits for another's turn."""
    n, left = ranks.world_size, (ranks.rank - 1) % ranks.world_size
    runs = []
    for length in (1, 250_000):
        mine = torch.full((length,), float(ranks.rank))
        with wire.watch() as seen:
            theirs = answer(mine)
        runs.append((mine, theirs, seen))
    orders = [None] * n
    dist.all_gather_object(orders, [call.op for call in runs[0][2].calls][:1])
    for mine, theirs, seen in runs:
        what = f"for {_count(mine.numel(), 'number')}"
        if not isinstance(theirs, torch.Tensor):
            raise Wrong(f"{what} it returned {type(theirs).__name__}; return the tensor of rank {left}")
        _same(
            theirs,
            torch.full_like(mine, float(left)),
            what,
            f"the tensor of rank {left}, your left neighbour",
        )
        if not bool((mine == ranks.rank).all()):
            raise Wrong(f"{what} the tensor that you were given has changed; receive into another one")
        if n > 1 and (seen.messages, seen.sent_bytes) != (1, 4 * mine.numel()):
            raise Wrong(
                f"{what} this rank sent {_count(seen.messages, 'message')} and {seen.sent_bytes} bytes; "
                f"1 message and {4 * mine.numel()} bytes are needed"
            )
    send_first = orders.count(["send"])
    if n > 3 and min(send_first, n - send_first) == 1:
        raise Wrong(
            f"right, but one rank goes first and the others wait for their turn: {n} messages one after the other, "
            "where all could travel at the same time"
        )


@exercise(3, "pi with one reduce")
def estimate_pi(answer, ranks):
    """`answer(points, count_hits)` is 4 x hits / points on rank 0 and None elsewhere, with one reduce."""
    n, points, asked = ranks.world_size, 1_003, []

    def count_hits(share, seed):
        asked.append((int(share), int(seed)))
        return 3 * int(share) // 4 + int(seed) % 2

    with wire.watch() as seen:
        result = answer(points, count_hits)
    everybody = [None] * n
    dist.all_gather_object(everybody, asked)
    calls = [call for rank_calls in everybody for call in rank_calls]
    counted = sum(share for share, _ in calls)
    if counted != points:
        raise Wrong(
            f"{n} ranks were asked for {points} points and counted {counted}; let no remainder fall, count none twice"
        )
    seeds = [seed for _, seed in calls]
    if len(set(seeds)) < len(seeds):
        raise Wrong(
            f"the ranks used the seeds {seeds}: equal seeds draw the same points, and more ranks add nothing"
        )
    if max(share for share, _ in calls) > math.ceil(points / n):
        raise Wrong(
            f"one rank counts {max(share for share, _ in calls)} of {points} points; share them evenly"
        )
    if [call.op for call in seen.calls] != ["reduce"]:
        used = ", ".join(call.op for call in seen.calls) or "nothing"
        raise Wrong(f"it calls {used}; one reduce to rank 0 is enough, as nobody else needs the result")
    wanted = 4 * sum(3 * share // 4 + seed % 2 for share, seed in calls) / points
    if ranks.rank != 0 and result is not None:
        raise Wrong("only rank 0 has the sum after a reduce; return None on the others")
    if ranks.rank == 0 and (result is None or abs(float(result) - wanted) > 1e-6):
        raise Wrong(f"rank 0 returns {result}; with the hits of all ranks it is {wanted:.6f}")


@exercise(4, "speed-up and efficiency")
def speed_up(answer, ranks=None):
    """`answer(seconds)`: {ranks: (speed-up, efficiency)} from {ranks: seconds}; the efficiency is a fraction."""
    for seconds in ({1: 8.03, 2: 4.21, 4: 2.09, 8: 1.06}, {1: 10.0, 4: 5.0}, {1: 3.0}):
        table = answer(dict(seconds))
        if not isinstance(table, dict) or set(table) != set(seconds):
            raise Wrong(
                f"return a dictionary with the keys {list(seconds)}, each with (speed-up, efficiency)"
            )
        for n, (ratio, efficiency) in table.items():
            right = seconds[1] / seconds[n]
            if not math.isclose(ratio, right, rel_tol=5e-3):
                raise Wrong(
                    f"{seconds[1]} s on one rank and {seconds[n]} s on {n} are a speed-up of {right:.2f}, not {ratio:.2f}"
                )
            if not math.isclose(efficiency, right / n, rel_tol=5e-3):
                raise Wrong(
                    f"a speed-up of {right:.2f} on {_count(n, 'rank')} is an efficiency of {right / n:.2f}, not {efficiency:.2f}: "
                    "the share of the ideal speed-up n that was reached"
                )


def _same(found_N, wanted_N, what, name):
    if found_N.dtype != wanted_N.dtype or found_N.shape != wanted_N.shape:
        shown = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in (found_N, wanted_N)]
        raise Wrong(f"{what} it returned {shown[0]}, not {shown[1]}")
    for i in (found_N != wanted_N).nonzero()[:1].flatten().tolist():
        raise Wrong(
            f"{what} {name} is wrong: element {i} is {found_N[i].item():g}, not {wanted_N[i].item():g}"
        )


def _count(number, noun):
    return f"{number} {noun}{'' if number == 1 else 's'}"
