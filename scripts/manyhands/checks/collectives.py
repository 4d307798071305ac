"""Checks of lesson 02: rings, ordered sends, pi by a reduce, speed-up."""

import math
from unittest import mock

import torch
import torch.distributed as dist

from manyhands.checks import Wrong, exercise
from manyhands.checks.values import number, shown
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
    # small numbers first: a fault is easier to read in them
    for first, some_lengths in ((_from_zero, lengths), (_of_all_digits, lengths[:2])):
        for length in some_lengths:
            for dtype in (torch.float64, torch.int64):
                row_N = torch.arange(length, dtype=dtype) + first(dtype, ranks.world_size)
                x_N = row_N * (ranks.rank + 1)
                with wire.watch() as seen:
                    returned = answer(x_N)
                runs.append((row_N, x_N, returned, seen))
    for run in runs:
        _judge_one_ring(*run, ranks.world_size)


def _from_zero(dtype, n):
    return 0


def _of_all_digits(dtype, n):
    """An odd number that no smaller type holds, and whose n (n + 1) / 2 fold its own type holds exactly."""
    return (2**52 if dtype.is_floating_point else 2**61) // (n * (n + 1) // 2) | 1


def _judge_one_ring(row_N, x_N, returned, seen, n):
    length, messages = x_N.numel(), 2 * (n - 1)
    wanted_N = row_N * (n * (n + 1) // 2)
    what = f"for {_count(length, 'number')} ({str(x_N.dtype).removeprefix('torch.')})"
    if not isinstance(returned, torch.Tensor):
        raise Wrong(f"{what} it returned {shown(returned)}; return the summed tensor")
    _same(returned, wanted_N, what, "the sum")
    for op in COLLECTIVES:
        if seen.count(op):
            raise Wrong(f"the sum is right, but it calls {op}; build it from messages to your neighbours")
    if seen.messages != messages:
        raise Wrong(
            f"{what} the sum is right, but this rank sent {_count(seen.messages, 'message')}; the ring on {n} ranks sends "
            f"exactly 2(n-1) = {messages}: n-1 hops to sum, n-1 to hand around"
        )
    sizes = [call.bytes // x_N.element_size() for call in seen.calls if call.op == "send"]
    chunk = math.ceil(length / n)
    if max(sizes, default=0) > chunk:
        raise Wrong(
            f"{what} the sum is right, but {_count(sum(sizes), 'number')} left this rank in {messages} messages, the "
            f"largest of {max(sizes)}; chunks of at most {chunk} are enough, {_count(messages * chunk, 'number')} in all"
        )
    if not torch.equal(x_N, wanted_N):
        raise Wrong("the returned sum is right, but x_N still holds other numbers; sum in place")


@exercise(2, "ordered sends")
def pass_right(answer, ranks):
    """`answer(mine)` returns the left neighbour's tensor; all ranks call it, none waits for another's turn."""
    n, left = ranks.world_size, (ranks.rank - 1) % ranks.world_size
    runs, programs = [], []
    for shape, dtype in (((1,), torch.float32), ((5, 2), torch.int32), ((250_000,), torch.float32)):
        everyone = [_belongings(rank, shape, dtype) for rank in range(n)]
        mine = everyone[ranks.rank].clone()
        with _Waits() as waits, wire.watch() as seen:
            waits.calls = seen.calls
            theirs = answer(mine)
        runs.append((everyone, mine, theirs, seen))
        programs.append(([call.op for call in seen.calls], 1 in waits.after))
    all_programs = [None] * n
    dist.all_gather_object(all_programs, programs)
    for everyone, mine, theirs, seen in runs:
        what = f"for {_count(mine.numel(), 'number')}"
        if not isinstance(theirs, torch.Tensor):
            raise Wrong(f"{what} it returned {shown(theirs)}; return the tensor of rank {left}")
        name = f"the tensor of rank {left}, your left neighbour"
        _same(theirs, everyone[left], what, name, _whose(theirs, everyone, seen))
        if not torch.equal(mine, everyone[ranks.rank]):
            raise Wrong(f"{what} the tensor that you were given has changed; receive into another one")
        if n > 1 and (seen.messages, seen.sent_bytes) != (1, mine.nbytes):
            raise Wrong(
                f"{what} this rank sent {_count(seen.messages, 'message')} and {seen.sent_bytes} bytes; "
                f"1 message and {mine.nbytes} bytes are needed"
            )
    rounds = max(_rounds(run) for run in zip(*all_programs, strict=True))
    # blocking calls need two rounds: half of the ranks send, then the others; and three if n is odd
    if rounds > 2 + n % 2:
        raise Wrong(
            f"right, but some ranks wait for their turn: {rounds} messages one after the other, where all could travel "
            "at the same time"
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


class _Waits:
    """After how many of `calls` this process waited for one, while the block runs."""

    def __enter__(self):
        self.calls, self.after, wait = (), [], dist.Work.wait

        def noted(work, *args, **kwargs):
            self.after.append(len(self.calls))
            return wait(work, *args, **kwargs)

        self.patch = mock.patch.object(dist.Work, "wait", noted)
        self.patch.start()
        return self

    def __exit__(self, *_):
        self.patch.stop()


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


@exercise(3, "pi with one reduce")
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
        raise Wrong(
            f"the ranks used the seeds {seeds}: equal seeds draw the same points, and more ranks add nothing"
        )
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


@exercise(4, "speed-up and efficiency")
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
                raise Wrong(
                    f"for {_count(n, 'rank')} return a pair, (speed-up, efficiency), not {shown(pair)}"
                )
            ratio = number(pair[0], f"a number as the speed-up on {_count(n, 'rank')}")
            efficiency = number(pair[1], f"a number as the efficiency on {_count(n, 'rank')}")
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


def _same(found_N, wanted_N, what, name, hint=""):
    if found_N.dtype != wanted_N.dtype or found_N.shape != wanted_N.shape:
        showns = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in (found_N, wanted_N)]
        raise Wrong(f"{what} it returned {showns[0]}, not {showns[1]}")
    differ = (found_N != wanted_N).flatten()  # nan differs as well
    if differ.any():
        i = int(differ.nonzero()[0])
        found, wanted = found_N.flatten()[i].item(), wanted_N.flatten()[i].item()
        if 0 < abs(found - wanted) < 1e-6 * abs(wanted):
            hint = (
                "; digits are lost on the way, so let every tensor have the dtype of the one you were given"
            )
        raise Wrong(f"{what} {name} is wrong: element {i} is {_exact(found)}, not {_exact(wanted)}{hint}")


def _exact(value):
    return f"{value:.17g}" if isinstance(value, float) else str(value)


def _count(number, noun):
    return f"{number} {noun}{'' if number == 1 else 's'}"
