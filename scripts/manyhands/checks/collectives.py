"""Checks of lesson 02: collectives by their pictures, a ring in rungs, its time; ordered sends, pi, speed-up.

The checks of the ring's rungs draw what each rank's chunks hold after the learner's code, with wrong cells marked.
"""

import functools
import itertools
import math

import torch
import torch.distributed as dist

from manyhands.checks import NOT_ATTEMPTED, Wrong, exercise
from manyhands.checks.drawn import generator, in_turn, luck, sizes
from manyhands.checks.expect import count, expect_equal, expect_number, expect_tensor
from manyhands.checks.trial import waits
from manyhands.checks.witness import listed, shown, unfinished
from manyhands.launch.program import say
from manyhands.launch.ranks import name_ranks
from manyhands.measure import wire

LENGTHS = (8, 7, 1, 0, 1000)
_held = {}  # what this rank held after the last answer, for the picture: "cells" as texts, "wrong" as places


def draws(what):
    """Make a check print on rank 0 what all ranks held after the learner's code; `what` names the columns."""

    def decorate(check):
        @functools.wraps(check)
        def and_draw(answer, ranks, **given):
            _held.clear()
            verdict = check(answer, ranks, **given)
            everybody = [None] * ranks.world_size
            dist.all_gather_object(everybody, dict(_held))
            if ranks.rank == 0 and all(everybody):
                say("\n".join(_grid(everybody, what)))
            return verdict

        return and_draw

    return decorate


def _grid(everybody, what):
    """Return a table's lines: a row per rank, a column per place (one line for one place); ✗ marks wrong cells."""
    rows = [
        [f"{text or '-'}{'✗' if place in held['wrong'] else ' '}" for place, text in enumerate(held["cells"])]
        for held in everybody
    ]
    columns = max(map(len, rows))
    if columns == 1:
        return [f"        ranks 0 to {len(rows) - 1} hold: " + "  ".join(cells[0].strip() for cells in rows)]
    width = 1 + max(len(text) for row in rows for text in [*row, f"{what} {columns - 1}"])
    head = "".join(f"{f'{what} {place}':<{width}}" for place in range(columns))
    lines = [f"rank {rank}: " + "".join(f"{text:<{width}}" for text in row) for rank, row in enumerate(rows)]
    return [f"{'':<8}{head}".rstrip(), *(line.rstrip() for line in lines)]


def _note(cells, wanted):
    """Record what this rank holds, as texts, and which of its places are wrong."""
    wrong = [place for place, (ours, right) in enumerate(zip(cells, wanted, strict=True)) if ours != right]
    _held.update(cells=list(cells), wrong=wrong)


def _picture(number, after, call):
    """Check one blank: `call(answer, x, parts)` returns what this rank holds, `after(rank, n)` what it should hold."""

    @draws("holds")
    @exercise(f"A{number}", f"picture {number}", in_place=True)
    def check(answer, ranks):
        n, rank = ranks.world_size, ranks.rank
        x = torch.tensor([(3, 1, 4, 2)[rank % 4]])
        parts = torch.arange(n) + 10 * rank
        found = call(answer, x, parts, rank, n)
        wanted = after(rank, n)
        if wanted is None:  # the picture leaves this rank empty: what it holds is scratch space
            _note([""], [""])
            return
        _note([str(found.tolist())], [str(wanted)])
        expect_equal(found.tolist(), wanted, f"picture {number}: what this rank holds afterwards")

    return check


def _numbers(n):
    return [(3, 1, 4, 2)[rank % 4] for rank in range(n)]


def _scatter(answer, x, parts, rank, n):
    part = torch.zeros_like(x)
    answer(part, list(parts.split(1)) if rank == 0 else None)
    return part


def _gather(answer, x, parts, rank, n):
    whole = [torch.zeros_like(x) for _ in range(n)] if rank == 0 else None
    answer(x, whole)
    return torch.cat(whole) if rank == 0 else x


def _in_place(answer, x, parts, rank, n):
    answer(x)
    return x


def _all_gather(answer, x, parts, rank, n):
    whole = [torch.zeros_like(x) for _ in range(n)]
    answer(whole, x)
    return torch.cat(whole)


def _reduce_scatter(answer, x, parts, rank, n):
    part = torch.zeros_like(x)
    answer(part, list(parts.split(1)))
    return part


def _all_to_all(answer, x, parts, rank, n):
    whole = torch.zeros_like(parts)
    answer(whole, parts)
    return whole


PICTURES = {
    1: _picture(1, lambda rank, n: [3], _in_place),
    2: _picture(2, lambda rank, n: [rank], _scatter),
    3: _picture(3, lambda rank, n: _numbers(n) if rank == 0 else None, _gather),
    4: _picture(4, lambda rank, n: [sum(_numbers(n))] if rank == 0 else None, _in_place),
    5: _picture(5, lambda rank, n: [sum(_numbers(n))], _in_place),
    6: _picture(6, lambda rank, n: _numbers(n), _all_gather),
    7: _picture(7, lambda rank, n: [n * rank + 5 * n * (n - 1)], _reduce_scatter),
    8: _picture(8, lambda rank, n: [10 * other + rank for other in range(n)], _all_to_all),
}


class Verdicts(dict):
    """{number of a picture: verdict}. A notebook does not echo it, because each check has already printed its own."""

    def _ipython_display_(self):
        pass


def pictures(answer, ranks):
    """`answer()` returns {number of a picture: a function that makes its collective}. Returns {number: verdict}."""
    calls = answer()
    if unfinished(answer) and all(map(unfinished, calls.values())):
        if ranks.rank == 0:
            say(f"build A (eight names): {NOT_ATTEMPTED}")
        return Verdicts.fromkeys(PICTURES, NOT_ATTEMPTED)
    found = {number: check(calls.get(number), ranks) for number, check in PICTURES.items()}
    return Verdicts(found)


@draws("chunk")
@exercise("B", "one hop", in_place=True)
def one_hop(answer, ranks):
    """`answer(chunks)` sends chunk `rank` to the right and adds what arrives to chunk `left`, in place."""
    n, rank = ranks.world_size, ranks.rank
    number = 2 * luck(1).randrange(2**39, 2**40) + 1
    x_nnn = torch.zeros(n, n, n, dtype=torch.float64)  # [chunk, chunk, rank]
    x_nnn[range(n), range(n), rank] = number
    seen = _run_half(answer, ranks, x_nnn)
    x_nnn /= number
    left = (rank - 1) % n
    if n == 1:  # the message to itself is a copy of its own chunk
        return _note(["0"], ["0"])
    _note_sums(x_nnn, [sorted({rank, left}) if chunk == left else [rank] for chunk in range(n)])
    _no_foreign_chunk(x_nnn)
    often = x_nnn.diagonal().T
    if often[rank].sum() != 1:
        raise Wrong(f"chunk {rank} has changed: it is what this rank sends, add what arrives to chunk {left}")
    if often[left, left] != 1 or often[left, rank] != 1:
        raise Wrong(f"chunk {left} should hold the numbers of rank {left} and rank {rank}, once each")
    if (changed := (often.sum(1) != 1).nonzero().flatten().tolist()) != [left]:
        raise Wrong(f"chunks {listed(changed)} have changed, and chunk {left} alone should")
    _judge_messages(seen, "both chunks are right", 2, 1, n * n, 8)


@draws("hop")
@exercise("C1", "which chunk at which hop")
def which_chunks(answer, ranks):
    """`answer(hop)` is (the chunk that leaves, the chunk that arrives) on this rank at that hop, from 0."""
    n, rank = ranks.world_size, ranks.rank
    table = [((rank - hop) % n, (rank - hop - 1) % n) for hop in range(n - 1)]
    found = [tuple(answer(hop)) for hop in range(n - 1)]
    as_text = [[f"{leaves} -> {arrives}" for leaves, arrives in rows] for rows in (found, table)]
    _note(*as_text) if n > 1 else _note([""], [""])
    for hop, (ours, right) in enumerate(zip(found, table, strict=True)):
        slips = {
            "that runs the other way round: what arrives comes from the left": ((rank + hop) % n, (rank + hop + 1) % n),
            "count modulo world_size": (rank - hop, rank - hop - 1),
            "every hop has another chunk": (rank, left_of(rank, n)) if hop else None,
            "the first is what leaves, the second what arrives": right[::-1],
        }
        expect_equal(ours, right, f"at hop {hop} (leaves, arrives)", slips)


def left_of(rank, n):
    return (rank - 1) % n


def _note_sums(x_nnn, wanted):
    """Record for the picture which ranks' numbers each chunk holds; `wanted` lists those that each should hold."""
    n = len(x_nnn)
    cells = []
    for chunk in range(n):
        own = [str(rank) * int(x_nnn[chunk, chunk, rank].clamp(0, 9)) for rank in range(n)]
        foreign = x_nnn[chunk].sum() != x_nnn[chunk, chunk].sum()
        cells.append("".join(own) + "+?" * bool(foreign))
    _note(cells, ["".join(map(str, ranks)) for ranks in wanted])


def _no_foreign_chunk(x_nnn):
    for chunk, other, source in x_nnn.nonzero().tolist():
        if other != chunk:
            raise Wrong(f"chunk {chunk} holds numbers of rank {source}'s chunk {other}: add chunks of the same number")


@draws("chunk")
@exercise("C", "reduce-scatter on the ring", in_place=True)
def ring_reduce_scatter(answer, ranks):
    """`answer(chunks)` sums everybody's chunk rank + 1 into this rank's, in place, by n-1 messages to the right."""
    n, rank = ranks.world_size, ranks.rank
    # Chunk c of rank r has one number at (c, r) and 0 elsewhere, so a chunk shows whose numbers it holds. The number
    # is odd and too large for float32 and int32.
    number = 2 * luck(1).randrange(2**39, 2**40) + 1
    x_nnn = torch.zeros(n, n, n, dtype=torch.float64)  # [chunk, chunk, rank]
    x_nnn[range(n), range(n), rank] = number
    seen = _run_half(answer, ranks, x_nnn)
    x_nnn /= number  # how often it was added
    right = (rank + 1) % n
    _note_sums(x_nnn, [sorted((chunk + step) % n for step in range((rank - chunk) % n + 1)) for chunk in range(n)])
    _no_foreign_chunk(x_nnn)
    often = x_nnn.diagonal().T  # [chunk, rank]: how often a chunk holds the numbers of a rank
    finished = [chunk for chunk in range(n) if (often[chunk] == 1).all()]
    if finished and right not in finished:
        raise Wrong(f"chunk {finished[0]} is finished here, not chunk {right}: at the first hop send chunk {rank}")
    for source, times in enumerate(often[right].tolist()):
        if not times.is_integer():
            raise Wrong(f"chunk {right} holds rank {source}'s numbers {times:.10g} times: keep the dtype all the way")
        if times not in (0, 1):
            raise Wrong(f"chunk {right} holds rank {source}'s numbers {times:g} times; once each is the sum")
    if right not in finished:
        if often[:, rank].sum() == often.sum() == n:  # each chunk holds its own number, once
            raise Wrong("your chunks have not changed: `mine += arrived` writes into the chunk")
        whose = name_ranks(often[right].nonzero().flatten().tolist())
        if not often[right, rank]:
            raise Wrong(f"chunk {right} holds the numbers of {whose}, and yours are gone: add what arrives to them")
        raise Wrong(f"chunk {right} holds the numbers of {whose}, not of all {n}: send on what you have just added to")
    _judge_messages(seen, "all chunks are right", n, 1, n * n, 8)


@draws("chunk")
@exercise("D", "all-gather on the ring", in_place=True)
def ring_all_gather(answer, ranks):
    """`answer(chunks)` takes chunk rank + 1 of each rank to all ranks, in place, by n-1 messages to the right."""
    n, rank = ranks.world_size, ranks.rank
    # each rank's unfinished chunks; the last row has the finished ones
    numbers = torch.randint(1, 2**40, (n + 1, n), generator=generator(1), dtype=torch.float64)
    right = (rank + 1) % n
    x_n5 = numbers[rank].clone()[:, None].repeat(1, 5)
    x_n5[right] = numbers[n, right]
    seen = _run_half(answer, ranks, x_n5)
    whose = {numbers[source, chunk].item(): (source, chunk) for source in range(n + 1) for chunk in range(n)}
    wrong = [chunk for chunk in range(n) if (x_n5[chunk] != numbers[n, chunk]).any()]
    done = "".join(map(str, range(n)))
    _note(["?" if chunk in wrong else done for chunk in range(n)], [done] * n)
    for chunk in sorted(wrong, key=lambda chunk: (x_n5[chunk] == numbers[rank, chunk]).all()):  # untouched last
        source, other = whose.get(x_n5[chunk, 0].item(), (None, None))
        if source is None:
            raise Wrong(f"chunk {chunk} holds numbers that no rank had: in this half, copy and do not add")
        if source == n:
            raise Wrong(f"chunk {chunk} holds the finished chunk {other}: receive it into that chunk")
        if (source, other) == (rank, chunk):
            raise Wrong(f"chunk {chunk} still holds this rank's unfinished sum: a finished one must arrive there")
        raise Wrong(f"chunk {chunk} holds an unfinished sum of rank {source}: first send the chunk that is finished")
    _judge_messages(seen, "all chunks are right", n, 1, 5, 8)


def _run_half(answer, ranks, x_nk):
    """Run the answer on the rows of x_nk as its list of chunks; raise Wrong if it did not work on these rows."""
    views = list(x_nk.view(len(x_nk), -1).unbind())
    given = list(views)
    with wire.watch() as seen:
        answer(given)
    for chunk, (mine, view) in enumerate(zip(given, views, strict=False)):
        if mine is not view:
            raise Wrong(f"chunks[{chunk}] is another tensor now, no view of the gradient: write into the chunk itself")
    right = (ranks.rank + 1) % ranks.world_size
    for call in seen.calls:
        if call.op == "send" and call.peer not in (None, right):
            raise Wrong(f"this rank sent to rank {call.peer}; on the ring it sends only to its right, rank {right}")
    return seen


def _judge_messages(seen, right, n, halves, chunk, item_bytes):
    """Raise Wrong unless this rank sent n-1 messages in each of the ring's `halves`, of at most `chunk` numbers."""
    if others := sorted({call.op for call in seen.calls} - {"send", "recv", "barrier"}):
        raise Wrong(f"{right}, but it calls {listed(others)}; build it from messages to your neighbours")
    hops, formula = halves * (n - 1), ("n-1", "2(n-1)")[halves - 1]
    expect_equal(seen.messages, hops, f"{right}, but the messages that this rank sends, {formula} on {n} ranks,")
    largest = max((call.bytes // item_bytes for call in seen.calls if call.op == "send"), default=0)
    if largest > chunk:
        raise Wrong(f"{right}, but the largest message has {largest} numbers; chunks of at most {chunk} are enough")


@exercise(1, "ring all-reduce", in_place=True)
def all_reduce_any_length(answer, ranks):
    """`answer(x_N)` sums x_N over all ranks in place and returns it: any length, 2(n-1) messages of about N/n."""
    _judge_ring(answer, ranks, in_turn([*LENGTHS, *sizes(1, 1, least=11, most=99)]))


@exercise(4, "the mended ring", in_place=True)
def mended_ring(answer, ranks):
    """The same requirements, for lengths that are divisible by the number of ranks."""
    _judge_ring(answer, ranks, [ranks.world_size * k for k in (1, 5, 300)])


def _judge_ring(answer, ranks, lengths):
    runs, n = [], ranks.world_size  # run every length on every rank before judging, so that no rank is left waiting
    for length, (dtype, most) in itertools.product(lengths, ((torch.float64, 2**48), (torch.int64, 2**58))):
        drawn = [torch.randint(most, (length,), generator=generator(100 * length + r)).to(dtype) for r in range(n)]
        x_N = drawn[ranks.rank].clone()
        with wire.watch() as seen:
            returned = answer(x_N)
        runs.append((drawn, x_N, returned, seen))
    for drawn, x_N, returned, seen in runs:
        wanted_N, length = sum(drawn), x_N.numel()
        what = f"for {count(length, 'number')} ({str(x_N.dtype).removeprefix('torch.')}) the sum"
        slips = {"that is this rank's own" if r == ranks.rank else f"that is rank {r}'s": drawn[r] for r in range(n)}
        expect_tensor(returned, wanted_N, what, slips if n > 1 else None, close=0)
        _judge_messages(seen, f"{what} is right", n, 2, math.ceil(length / n), x_N.element_size())
        if not torch.equal(x_N, wanted_N):
            raise Wrong("the returned sum is right, but x_N still holds other numbers; sum in place")


@exercise("E", "the time of a ring")
def ring_seconds(answer, ranks=None):
    """`answer(n_bytes, n, alpha, beta)` is 2(n-1) (alpha + n_bytes / n / beta), the seconds of a ring all-reduce."""
    for n_bytes, n, alpha, beta in (
        (40_000_000, 4, 1e-5, 5e10), (40_000_000, 100, 2e-6, 1.5e11), (1_000_000, 1, 1e-3, 1e8),
        (luck(1).randint(10**5, 10**7), luck(2).randint(5, 99), luck(3).uniform(1e-5, 1e-3), luck(4).uniform(1e8, 1e9)),
    ):  # fmt: skip
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
            "that is in milliseconds": 1e3 * hops * (alpha + chunk_s),
        }
        links = f"alpha = {1e6 * alpha:g} µs and beta = {beta / 1e9:g} GB/s"
        what = f"for {n_bytes:,} bytes on {count(n, 'rank')}, {links} the time"
        found = answer(n_bytes, n, alpha, beta)
        expect_number(found, hops * (alpha + chunk_s), what, "seconds", slips, rel=1e-6, close=1e-15)


@exercise("F", "nobody goes first")
def pass_right(answer, ranks):
    """`answer(mine)` returns the left neighbour's tensor. All ranks call it, and no rank waits for another's turn."""
    _judge_pass(answer, ranks)


@exercise(5, "ordered sends")
def pass_in_rounds(answer, ranks):
    """The same, for an answer with nothing but send and recv."""
    _judge_pass(answer, ranks)


def _judge_pass(answer, ranks):
    n, left = ranks.world_size, (ranks.rank - 1) % ranks.world_size
    runs, programs = [], []
    for shape, dtype in (((1,), torch.float32), ((5, 2), torch.int32), ((250_000,), torch.float32)):
        everyone = [torch.randint(2**20, shape, generator=generator(1000 + rank)).to(dtype) for rank in range(n)]
        mine = everyone[ranks.rank]
        with wire.watch() as seen, waits(seen.calls) as waited:
            theirs = answer(mine)
        runs.append((everyone, mine, theirs, seen))
        programs.append(([call.op for call in seen.calls], 1 in waited))
    all_programs = [None] * n
    dist.all_gather_object(all_programs, programs)
    for everyone, mine, theirs, seen in runs:
        what = f"for {count(mine.numel(), 'number')}"
        slips = {f"it is that of rank {rank}": belongings for rank, belongings in enumerate(everyone)}
        if all(call.op == "send" for call in seen.calls):
            slips["this rank received nothing"] = theirs if isinstance(theirs, torch.Tensor) else None
        it_is = f"the tensor of rank {left}, your left neighbour"
        expect_tensor(theirs, everyone[left], f"{what} what comes back", slips, it_is, close=0)
        if n > 1:
            expect_equal((seen.messages, seen.sent_bytes), (1, mine.nbytes), f"{what} (messages, bytes) that you send")
    rounds = max(_rounds(run) for run in zip(*all_programs, strict=True))
    # blocking calls need two rounds (half of the ranks send, then the others), and three if n is odd
    if rounds > 2 + n % 2:
        raise Wrong(f"right, but ranks wait for their turn: {rounds} messages one after the other, and {2 + n % 2} do")


def _rounds(programs):
    """Return how many messages travel round a ring one after the other, given each rank's order of calls.

    programs: of each rank its calls, a send to the right and a receive from the left, and whether it waited for the
    first before it began the second. With other calls the number of barriers, each of which may part two messages.
    """
    n = len(programs)
    if any(sorted(calls) != ["recv", "send"] for calls, _ in programs):
        return max(calls.count("barrier") for calls, _ in programs)
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
        raise Wrong(f"{n} ranks were asked for {all_points} points and counted {counted}; count each point once")
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
        expect_number(result, wanted, "with the hits of all ranks what rank 0 returns", rel=0, close=1e-6)


@exercise(3, "speed-up and efficiency")
def speed_up(answer, ranks=None):
    """`answer(seconds)`: {ranks: (speed-up, efficiency)} from {ranks: seconds}; the efficiency is a fraction."""
    # in the last table, one rank is neither the first entry nor the slowest
    for seconds in ({1: 8.03, 2: 4.21, 4: 2.09, 8: 1.06}, {1: 10.0, 4: 5.0}, {2: 16.0, 1: 8.0, 16: 1.0}):
        table = answer(dict(seconds))
        if not isinstance(table, dict) or set(table) != set(seconds):
            raise Wrong(f"return a dictionary with the keys {list(seconds)}, not {shown(table)}")
        for n, pair in table.items():
            try:
                ratio, efficiency = pair
            except (TypeError, ValueError):
                raise Wrong(f"for {count(n, 'rank')} return (speed-up, efficiency), not {shown(pair)}") from None
            right, on = seconds[1] / seconds[n], count(n, "rank")
            slips = {
                "that is upside down": 1 / right,
                "one rank is the one with the key 1": seconds[next(iter(seconds))] / seconds[n],
            }
            what = f"with {seconds[1]} s on 1 rank and {seconds[n]} s on {n} the speed-up"
            expect_number(ratio, right, what, slips=slips, rel=5e-3)
            slips = {
                "that is the speed-up; it is the share of the ideal speed-up n that was reached": right,
                "that is in percent; return a fraction": 100 * right / n,
            }
            what = f"with a speed-up of {right:.2f} on {on} the efficiency"
            expect_number(efficiency, right / n, what, slips=slips, rel=5e-3)
