"""Checks of lesson 02's ring: its two halves, the whole for any length, one that ships too much, and its time."""

import math

import torch

from manyhands.checks import Wrong, exercise
from manyhands.checks.tensors import count, same
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


@exercise("A", "reduce-scatter on the ring")
def ring_reduce_scatter(answer, ranks):
    """`answer(chunks)` sums everybody's chunk rank + 1 into this rank's, in place: n-1 messages of one chunk, to the right."""
    n, rank = ranks.world_size, ranks.rank
    # chunk c of rank r has a 1 where (c, r) stands and 0 elsewhere: so what it holds afterwards tells whose numbers are in it
    x_nnn = torch.zeros(n, n, n, dtype=torch.float64)  # [chunk, chunk, rank]
    x_nnn[range(n), range(n), rank] = 1
    seen = _run_half(answer, ranks, x_nnn)
    right = (rank + 1) % n
    for chunk, other, source in x_nnn.nonzero().tolist():
        if other != chunk:
            raise Wrong(
                f"chunk {chunk} holds numbers of rank {source}'s chunk {other}: what arrives must be added to the chunk of "
                "the same number"
            )
    often = x_nnn.diagonal().T  # [chunk, rank]: how often a chunk holds the numbers of a rank
    finished = [chunk for chunk in range(n) if (often[chunk] == 1).all()]
    if finished and right not in finished:
        raise Wrong(
            f"chunk {finished[0]} is finished here, and chunk {right} should be: at the first hop rank {rank} sends chunk "
            f"{rank}"
        )
    for source, times in enumerate(often[right].tolist()):
        if times not in (0, 1):
            raise Wrong(f"chunk {right} holds rank {source}'s numbers {times:g} times; once each is the sum")
    if right not in finished:
        raise Wrong(
            f"chunk {right} holds the numbers of {_ranks(often[right].nonzero().flatten().tolist())}, not of all {n}: send on "
            "the chunk to which you have just added, and add what arrives"
        )
    _judge_messages(seen, ranks, n * n)


def _ranks(some):
    if not some:
        return "no rank"
    return f"rank{'s' if len(some) > 1 else ''} {', '.join(map(str, some))}"


@exercise("B", "all-gather on the ring")
def ring_all_gather(answer, ranks):
    """`answer(chunks)` takes chunk rank + 1 of each rank to all ranks, in place: n-1 messages of one chunk, to the right."""
    n, rank = ranks.world_size, ranks.rank
    generator = torch.Generator().manual_seed(1)
    # of each rank its unfinished chunks, and in the last row the finished ones
    numbers = torch.randint(1, 2**40, (n + 1, n), generator=generator, dtype=torch.float64)
    right = (rank + 1) % n
    x_n5 = numbers[rank].clone()[:, None].repeat(1, 5)
    x_n5[right] = numbers[n, right]
    seen = _run_half(answer, ranks, x_n5)
    faults = [_fault_of_copy(x_n5[chunk], chunk, numbers, rank) for chunk in range(n)]
    if any(faults):
        raise Wrong(min(fault for fault in faults if fault)[1])
    _judge_messages(seen, ranks, 5)


def _fault_of_copy(held_5, chunk, numbers, rank):
    """None for a finished chunk, else (how little the fault tells, the sentence)."""
    n = numbers.shape[1]
    if (held_5 == numbers[n, chunk]).all():
        return None
    from_where = (numbers == held_5[0]).nonzero().tolist() if (held_5 == held_5[0]).all() else []
    if not from_where:
        return 2, (
            f"chunk {chunk} holds neither a finished chunk nor what stood there before: in this half nothing is added, the "
            "chunks are only copied"
        )
    source, other = from_where[0]
    if source == n:
        return (
            0,
            f"chunk {chunk} holds the finished chunk {other}: receive each chunk where the same number stands",
        )
    if (source, other) == (rank, chunk):
        return 3, (
            f"chunk {chunk} still holds this rank's unfinished sum: a finished one must arrive there in one of the {n - 1} "
            "hops"
        )
    return 1, (
        f"chunk {chunk} holds an unfinished sum of rank {source}: at the first hop rank {source} sends the chunk that is "
        f"finished there, {(source + 1) % n}"
    )


def _run_half(answer, ranks, x_nk):
    """What the answer did with the rows of x_nk as its list of chunks; raises Wrong if it did not work on these."""
    views = list(x_nk.view(len(x_nk), -1).unbind())
    given = list(views)
    with wire.watch() as seen:
        answer(given)
    for chunk, (mine, view) in enumerate(zip(given, views, strict=False)):
        if mine is not view:
            raise Wrong(
                f"chunks[{chunk}] is another tensor now, and the gradient of which it was a view has not changed: write into "
                "the chunk itself, with += or as the tensor that receives"
            )
    right = (ranks.rank + 1) % ranks.world_size
    for call in seen.calls:
        if call.op == "send" and call.peer not in (None, right):
            raise Wrong(f"this rank sent to rank {call.peer}; on the ring it sends only to its right, rank {right}")
    return seen


def _judge_messages(seen, ranks, chunk):
    """Raises Wrong unless this rank sent n-1 messages of one chunk, of that many float64 numbers."""
    n = ranks.world_size
    _no_collective(seen, "all chunks are right, but")
    if seen.messages != n - 1:
        raise Wrong(
            f"all chunks are right, but this rank sent {count(seen.messages, 'message')}; the ring sends one for each of its "
            f"n-1 = {n - 1} hops"
        )
    largest = max((call.bytes // 8 for call in seen.calls if call.op == "send"), default=0)
    if largest > chunk:
        raise Wrong(
            f"all chunks are right, but a message carried {count(largest, 'number')}; one chunk of {chunk} per hop is enough"
        )


def _no_collective(seen, but):
    for op in COLLECTIVES:
        if seen.count(op):
            raise Wrong(f"{but} it calls {op}; build it from messages to your neighbours")


@exercise(1, "ring all-reduce")
def all_reduce_any_length(answer, ranks):
    """`answer(x_N)` sums x_N over all ranks in place and returns it: any length, 2(n-1) messages of about N/n."""
    _judge_ring(answer, ranks, LENGTHS)


@exercise(4, "the mended ring")
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
    what = f"for {count(length, 'number')} ({str(x_N.dtype).removeprefix('torch.')})"
    if not isinstance(returned, torch.Tensor):
        raise Wrong(f"{what} it returned {shown(returned)}; return the summed tensor")
    same(returned, wanted_N, what, "the sum")
    _no_collective(seen, "the sum is right, but")
    if seen.messages != messages:
        raise Wrong(
            f"{what} the sum is right, but this rank sent {count(seen.messages, 'message')}; the ring on {n} ranks sends "
            f"exactly 2(n-1) = {messages}: n-1 hops to sum, n-1 to hand around"
        )
    sizes = [call.bytes // x_N.element_size() for call in seen.calls if call.op == "send"]
    chunk = math.ceil(length / n)
    if max(sizes, default=0) > chunk:
        raise Wrong(
            f"{what} the sum is right, but {count(sum(sizes), 'number')} left this rank in {messages} messages, the "
            f"largest of {max(sizes)}; chunks of at most {chunk} are enough, {count(messages * chunk, 'number')} in all"
        )
    if not torch.equal(x_N, wanted_N):
        raise Wrong("the returned sum is right, but x_N still holds other numbers; sum in place")


@exercise("D", "the ring's time")
def ring_seconds(answer, ranks=None):
    """`answer(n_bytes, n, alpha, beta)` is 2(n-1) (alpha + n_bytes / n / beta), the seconds of a ring all-reduce."""
    for n_bytes, n, alpha, beta in (
        (40_000_000, 4, 1e-5, 5e10),
        (4_096, 4, 5e-4, 1e9),
        (40_000_000, 100, 2e-6, 1.5e11),
        (1_000_003, 3, 1e-3, 1e8),
        (1_000_000, 1, 1e-3, 1e8),
    ):
        found = number(answer(n_bytes, n, alpha, beta), "a number of seconds")
        wanted = 2 * (n - 1) * (alpha + n_bytes / n / beta)
        if not math.isclose(found, wanted, rel_tol=1e-6, abs_tol=1e-15):
            raise Wrong(
                f"{n_bytes:,} bytes on {count(n, 'rank')}, alpha = {1e6 * alpha:g} µs, beta = {beta / 1e9:g} GB/s: you predict "
                f"{1e3 * found:.6g} ms, and it is {1e3 * wanted:.6g} ms{_why(found, n_bytes, n, alpha, beta)}"
            )


def _why(found, n_bytes, n, alpha, beta):
    """The slip that gives this number of seconds, as the end of a sentence."""
    hops, chunk_s = 2 * (n - 1), n_bytes / n / beta
    slips = {
        "a hop carries one chunk, not the whole tensor": hops * (alpha + n_bytes / beta),
        "that is one of the two halves": (n - 1) * (alpha + chunk_s),
        "every hop pays alpha": alpha + hops * chunk_s,
        "every hop carries a chunk, not one hop alone": hops * alpha + chunk_s,
        "that is one hop, and a ring has 2(n-1)": alpha + chunk_s,
        "each half has n-1 hops, not n": 2 * n * (alpha + chunk_s),
        "beta is bytes per second, so divide by it": hops * (alpha + n_bytes / n * beta),
        "the bytes are right, and alpha is missing": hops * chunk_s,
    }
    return next((f": {why}" for why, s in slips.items() if math.isclose(found, s, rel_tol=1e-6)), "")
