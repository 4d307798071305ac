"""The checks of lesson 02 accept the lesson's solutions and reject real mistakes with a sentence that names each."""

import math
import time
from fractions import Fraction
from operator import setitem

import torch
import torch.distributed as dist
from exercises import AnswersOfRanks
from manyhands.checks import collectives


def place():
    rank, n = dist.get_rank(), dist.get_world_size()
    return rank, n, (rank - 1) % n, (rank + 1) % n


def exchange(give, take):
    rank, n, left, right = place()
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, give, right), dist.P2POp(dist.irecv, take, left)]):
        work.wait()


# ---- mutants of the ring's two halves: builds A and B ----


def received(give, like=None):
    arrived = torch.empty_like(give if like is None else like)
    exchange(give, arrived)
    return arrived


def hops(act, first=0, more=0):
    """An answer that does act(chunks, c) at each of its hops: rank r begins with c = r + first, and c falls."""

    def answer(chunks):
        rank, n, *_ = place()
        for hop in range(n - 1 + more):
            act(chunks, (rank + first - hop) % n)

    return answer


def adds(chunks, c):
    chunks[c - 1].add_(received(chunks[c], chunks[c - 1]))


def hands_on(chunks, c):
    exchange(chunks[c], chunks[c - 1])


def goes_to_the_left(chunks):
    rank, n, left, right = place()
    for hop in range(n - 1):
        arrived = torch.empty_like(chunks[0])
        ops = [dist.P2POp(dist.isend, chunks[(rank + hop) % n], left), dist.P2POp(dist.irecv, arrived, right)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        chunks[(rank + hop + 1) % n] += arrived


def sends_all_chunks_each_hop(chunks, c):
    chunks[c - 1].add_(received(torch.stack(chunks))[c - 1])


def reduces_with_the_library(chunks):
    for chunk in chunks:
        dist.all_reduce(chunk)


def one_hop_too_many(chunks):  # the last one carries nothing that is needed
    hops(adds)(chunks)
    received(chunks[dist.get_rank()])


def follows_its_chunk(chunks):  # right
    rank, n, *_ = place()
    travelling = rank
    while (travelling - 1 - rank) % n:
        arrived = torch.empty_like(chunks[travelling - 1])
        exchange(chunks[travelling], arrived)
        travelling = (travelling - 1) % n
        chunks[travelling].add_(arrived)
    return chunks


def without_a_batch(chunks):  # right on gloo
    rank, n, left, right = place()
    for c in reversed(range(rank + 2 - n, rank + 1)):
        arrived = torch.zeros_like(chunks[(c - 1) % n])
        sending = dist.isend(chunks[c % n], right)
        dist.recv(arrived, left)
        sending.wait()
        chunks[(c - 1) % n][:] = chunks[(c - 1) % n] + arrived


def gathers_with_the_library(chunks):
    rank, n, _, right = place()
    everything = [torch.empty_like(chunks[0]) for _ in range(n)]
    dist.all_gather(everything, chunks[right].clone())
    for rank, finished in enumerate(everything):
        chunks[(rank + 1) % n].copy_(finished)


def copies_from_a_buffer(chunks):  # right
    rank, n, _, right = place()
    travelling = chunks[right]
    for c in range(rank, rank + 1 - n, -1):
        arrived = torch.empty_like(travelling)
        exchange(travelling, arrived)
        travelling = chunks[c % n].copy_(arrived)


# ---- mutants of the whole ring ----


def ships_whole_tensors(x_N):  # ARENA_3.0#407
    travelling_N = x_N.clone()
    for _ in range(dist.get_world_size() - 1):
        arrived_N = torch.empty_like(x_N)
        exchange(travelling_N, arrived_N)
        x_N += arrived_N
        travelling_N = arrived_N
    for _ in range(dist.get_world_size() - 1):
        arrived_N = torch.empty_like(x_N)
        exchange(x_N, arrived_N)
        x_N.copy_(arrived_N)
    return x_N


def sends_to_everyone(x_N):
    rank, n, *_ = place()
    mine_N = x_N.clone()
    for step in range(1, n):
        arrived_N = torch.empty_like(x_N)
        ops = [dist.P2POp(dist.isend, mine_N, (rank + step) % n), dist.P2POp(dist.irecv, arrived_N, (rank - step) % n)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        x_N += arrived_N
    return x_N


def uses_the_library(x_N):
    dist.all_reduce(x_N)
    return x_N


def _ring(x_N, chunks):
    hops(adds)(chunks)
    hops(hands_on, first=1)(chunks)
    return x_N


def summed_as(change):
    """An answer that sums `change(x_N)`, and leaves x_N as it is."""

    def answer(x_N):
        sum_N = change(x_N)
        return _ring(sum_N, sum_N.tensor_split(dist.get_world_size()))

    return answer


def summed_in(dtype):
    return lambda x_N: x_N.copy_(summed_as(lambda x_N: x_N.to(dtype))(x_N))


def pads_every_chunk(x_N):
    n = dist.get_world_size()
    padded = torch.nn.functional.pad(x_N, (0, 4 * n * n - x_N.numel() % n))
    padded = padded[: padded.numel() // n * n].clone()
    return x_N.copy_(_ring(padded, padded.chunk(n))[: x_N.numel()])


def drops_the_remainder(x_N):
    n = dist.get_world_size()
    even_N = x_N[: x_N.numel() // n * n]
    _ring(even_N, even_N.view(n, -1))
    return x_N


def gives_the_rest_to_the_last(x_N):
    n = dist.get_world_size()
    even = x_N.numel() // n
    return _ring(x_N, x_N.split([even] * (n - 1) + [x_N.numel() - even * (n - 1)]))


def gives_the_rest_to_the_first(x_N):  # in the exercise of lengths that n divides, so much that it is too large
    n = dist.get_world_size()
    small = max(0, x_N.numel() // n - 1)
    return _ring(x_N, x_N.split([x_N.numel() - small * (n - 1)] + [small] * (n - 1)))


def fills_with_not_a_number(x_N):
    dist.barrier()
    return torch.full_like(x_N, math.nan) if x_N.dtype.is_floating_point else x_N


def chunks_of_the_rounded_up_size(x_N):  # right: the last chunks are smaller, or empty
    n = dist.get_world_size()
    size = math.ceil(x_N.numel() / n)
    return _ring(x_N, [x_N[i * size : (i + 1) * size] for i in range(n)])


# ---- mutants of the exchange ----


def sending_first(*senders):
    """Blocking calls, where these ranks send first: nobody waits for a turn if every second one does."""

    def answer(mine):
        rank, _, left, right = place()
        theirs = torch.empty_like(mine)
        if rank in senders:
            dist.send(mine, right)
        dist.recv(theirs, left)
        if rank not in senders:
            dist.send(mine, right)
        return theirs

    return answer


def wrong_way_round(mine):
    _, _, left, right = place()
    theirs = torch.empty_like(mine)
    ops = [dist.P2POp(dist.isend, mine, left), dist.P2POp(dist.irecv, theirs, right)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return theirs


def into_its_own(mine):
    exchange(mine.clone(), mine)
    return mine


def gathers_everything(mine):
    _, n, left, _ = place()
    everything = [torch.empty_like(mine) for _ in range(n)]
    dist.all_gather(everything, mine)
    return everything[left]


def forgets_to_wait(mine):
    rank, _, left, right = place()
    theirs = torch.full_like(mine, -1)
    before = theirs.clone()  # what one reads too early: taken here, since the message may also come at once
    works = [dist.isend(mine, right), dist.irecv(theirs, left)]
    for work in works:
        work.wait()
    return before


def guesses(mine):
    rank, _, left, right = place()
    work = dist.isend(mine, right)
    time.sleep(0.01)
    del work
    return torch.full_like(mine, left)


def returns_its_own(mine):
    exchange(mine, torch.empty_like(mine))
    return mine.clone()


def always_float32(mine):  # of the same size as int32
    _, _, left, right = place()
    theirs = torch.empty(mine.shape)
    exchange(mine, theirs)
    return theirs


def rank_0_receives_first_without_waiting(mine):  # right: all messages are under way at the same time
    rank, _, left, right = place()
    theirs = torch.empty_like(mine)
    begin = [lambda: dist.irecv(theirs, left), lambda: dist.isend(mine, right)]
    works = [call() for call in (begin if rank == 0 else reversed(begin))]
    for work in works:
        work.wait()
    return theirs


def receives_while_it_sends(mine):  # right: a blocking call after one that does not block
    _, _, left, right = place()
    theirs = torch.empty_like(mine)
    work = dist.irecv(theirs, left)
    dist.send(mine, right)
    work.wait()
    return theirs


# ---- mutants of pi ----


def pi(count, points, share=None, seed=None, reduce=lambda hits: dist.reduce(hits, 0), everywhere=False):
    rank, n, *_ = place()
    share = points // n + (rank < points % n) if share is None else share
    hits = torch.tensor(count(share, rank if seed is None else seed), dtype=torch.int64)
    reduce(hits)
    return 4 * hits.item() / points if everywhere or rank == 0 else None


def averages_means(points, count_hits):
    rank, n, *_ = place()
    share = points // n + (rank < points % n)
    mean = torch.tensor(4 * count_hits(share, rank) / share, dtype=torch.float64)
    dist.reduce(mean, 0)
    return mean.item() / n if rank == 0 else None


def rank_0_throws_all(points, count_hits):
    rank, n, *_ = place()
    shares = [points // n + (r < points % n) for r in range(n)]
    hits = sum(count_hits(share, seed) for seed, share in enumerate(shares)) if rank == 0 else 0
    return pi(lambda share, seed: hits, points)


def pi_as(kind):
    def answer(points, count_hits):
        estimate = pi(count_hits, points)
        return None if estimate is None else kind(estimate)

    return answer


def pi_by_name(points, count_hits):  # right: the names are those of the lesson's count_hits
    rank, n, *_ = place()
    return pi(lambda share, seed: count_hits(points=share, seed=seed), points, len(range(rank, points, n)))


# ---- mutants of the speed-up ----


def table(pair, one=lambda seconds: seconds[1]):
    return lambda seconds: {n: pair(one(seconds) / s, one(seconds) / s / n) for n, s in seconds.items()}


MUTANTS = {
    "ring_reduce_scatter": {
        "adds to what it sends": (hops(lambda chunks, c: chunks[c].add_(received(chunks[c]))),
            "holds numbers of rank 3's chunk 3: what arrives must be added to the chunk of the same"),
        "sends its own chunk each hop": (hops(lambda chunks, c: chunks[c - 1].add_(received(chunks[dist.get_rank()]))),
            "what arrives must be added to the chunk of the same number"),
        "overwrites": (hops(hands_on),
            "chunk 1 holds the numbers of rank 1, not of all 4: send on the chunk to which you have just added"),
        "begins one chunk early": (hops(adds, first=-1),
            "chunk 0 is finished here, and chunk 1 should be: at the first hop rank 0 sends chunk"),
        "adds into a new tensor": (
            hops(lambda chunks, c: setitem(chunks, c - 1, chunks[c - 1] + received(chunks[c]))),
            "chunks[1] is another tensor now, and the gradient of which it was a view has not chan"),
        goes_to_the_left: "this rank sent to rank 3; on the ring it sends only to its right, rank 1",
        "adds twice": (hops(lambda chunks, c: chunks[c - 1].add_(received(chunks[c]), alpha=2)),
            "chunk 1 holds rank 1's numbers 8 times; once each is the sum"),
        "sends all chunks each hop": (hops(sends_all_chunks_each_hop),
            "192 numbers left this rank in 3 messages, the largest of 64; chunks of at most 16"),
        reduces_with_the_library: "all chunks are right, but it calls all_reduce; build it from messages",
        one_hop_too_many: "this rank sent 4 messages; the ring on 4 ranks sends exactly n-1 = 3: one for each hop",
    },
    "ring_all_gather": {
        "begins with its own number": (hops(hands_on), "holds an unfinished sum of rank"),
        "receives one place off": (hops(lambda chunks, c: exchange(chunks[c].clone(), chunks[c - 2]), first=1),
            "receive each chunk where the same number stands"),
        "adds in the second half": (hops(adds, first=1), "in this half nothing is added"),
        "one hop too few": (hops(hands_on, first=1, more=-1),
            "chunk 2 still holds this rank's unfinished sum: a finished one must arrive there in one of t"),
        gathers_with_the_library: "all chunks are right, but it calls all_gather; build it from messages",
        "keeps what arrives in the list": (hops(lambda chunks, c: setitem(chunks, c - 1, received(chunks[c])), first=1),
            "chunks[0] is another tensor now"),
        goes_to_the_left: "this rank sent to rank 3",
    },
    "ring_seconds": {
        "whole tensors": (lambda b, n, alpha, beta: 2 * (n - 1) * (alpha + b / beta),
            "should be 0.00126 seconds, not 0.00486 seconds: a hop carries one chunk, not the whole tensor"),
        "one half": (lambda b, n, alpha, beta: (n - 1) * (alpha + b / n / beta),
            "should be 0.00126 seconds, not 0.00063 seconds: that is one of the two halves"),
        "one alpha in all": (lambda b, n, alpha, beta: alpha + 2 * (n - 1) / n * b / beta, "every hop pays alpha"),
        "n hops": (lambda b, n, alpha, beta: 2 * n * (alpha + b / n / beta), "each half has n-1 hops, not n"),
        "times beta": (lambda b, n, alpha, beta: 2 * (n - 1) * (alpha + b / n * beta),
            "beta is bytes per second, so divide by it"),
        "four ranks for ever": (lambda b, n, alpha, beta: 6 * (alpha + b / 4 / beta), "40,000,000 bytes on 100 ranks"),
        "in milliseconds": (lambda b, n, alpha, beta: 2e3 * (n - 1) * (alpha + b / n / beta),
            "should be 0.00126 seconds, not 1.26 seconds: that is in milliseconds"),
    },
    "all_reduce_any_length": {
        ships_whole_tensors: "numbers left this rank in 6 messages, the largest of 8; chunks of at most 2 are enough,",
        sends_to_everyone: "this rank sent 3 messages; the ring on 4 ranks sends exactly 2(n-1) = 6",
        uses_the_library: "it calls all_reduce; build it from messages",
        "forgets the second half": (lambda x_N: hops(adds)(x_N.tensor_split(dist.get_world_size())) or x_N,
            "the sum is wrong: element [1] should be 10, not 1"),
        "splits with chunk": (lambda x_N: _ring(x_N, x_N.chunk(dist.get_world_size())), "IndexError"),
        "leaves the input": (summed_as(torch.clone), "x_N still holds other numbers; sum in place"),
        "always float": (summed_as(torch.Tensor.float),
            "for 8 numbers (float64) the sum should be float64, as what you were given, not float32"),
        pads_every_chunk: "are enough, 12 numbers in all",
        drops_the_remainder: "for 7 numbers (float64) the sum is wrong: element [4] should be",
        "sums in float32": (summed_in(torch.float32),
            "which is float32's accuracy; keep the dtype of what you were given"),
        "sums in float64": (summed_in(torch.float64),
            "for 8 numbers (int64) the sum is wrong: element [0] should be 2,305,843,009,213,693"),
        "sums in int16": (summed_in(torch.int16), "for 8 numbers (float64) the sum is wrong: element [0] should be"),
        gives_the_rest_to_the_last: "the largest of 4; chunks of at most 2 are enough, 12 numbers in all",
        fills_with_not_a_number: "the sum is wrong: element [0] should be 0, and is nan",
    },
    "mended_ring": {
        ships_whole_tensors: "24 numbers left this rank in 6 messages, the largest of 4; chunks of at most 1 are enoug",
        "sums in float32": (summed_in(torch.float32),
            "which is float32's accuracy; keep the dtype of what you were given"),
        "sums in int16": (summed_in(torch.int16),
            "for 4 numbers (float64) the sum is wrong: element [0] should be 4,503,599,627,370"),
        gives_the_rest_to_the_first: "the largest of 4; chunks of at most 1 are enough",
        sends_to_everyone: "exactly 2(n-1) = 6",
        "forgets the second half": (lambda x_N: hops(adds)(x_N.tensor_split(dist.get_world_size())) or x_N,
            "the sum is wrong"),
    },
    "pass_right": {
        "sends first": (sending_first(0, 1, 2, 3), "waited 5 s for a message that never came"),
        "by turns": (sending_first(0), "4 messages one after the other, where 2 rounds are enough for 4 ranks"),
        wrong_way_round: "what comes back should be the tensor of rank 3, your left neighbour: it is that of rank 1",
        guesses: ": this rank received nothing",
        returns_its_own: ": it is that of rank 0",
        "two send first": (sending_first(0, 1), "some ranks wait for their turn: 3 messages one after the other"),
        "three send first": (sending_first(0, 1, 2), "some ranks wait for their turn: 4 messages one after the other"),
        always_float32: "what comes back should be int32, as what you were given, not float32",
        into_its_own: "the tensor that you were given was changed",
        gathers_everything: "this rank sent 0 messages and 0 bytes; 1 message and 4 bytes are needed",
        forgets_to_wait: "your left neighbour: element [0] should be",
    },
    "estimate_pi": {
        "loses the remainder": (lambda points, count: pi(count, points, share=points // 4),
            "asked for 1003 points and counted 1000"),
        "everybody throws all": (lambda points, count: pi(count, points, share=points),
            "asked for 1003 points and counted 4012"),
        "one seed for all": (lambda points, count: pi(count, points, seed=0), "equal seeds draw the same points"),
        "all reduces": (lambda points, count: pi(count, points, reduce=lambda hits: dist.all_reduce(hits)),
            "it calls all_reduce; one reduce to rank 0 is enough"),
        "reads after the reduce": (lambda points, count: pi(count, points, everywhere=True),
            "only rank 0 has the sum after a reduce"),
        averages_means: "with the hits of all ranks what rank 0 returns should be",
        rank_0_throws_all: "rank 0 counts 1003 of 1003 points; share them evenly",
    },
    "speed_up": {
        "upside down": (lambda seconds: {n: (s / seconds[1], s / seconds[1] / n) for n, s in seconds.items()},
            "with 8.03 s on 1 rank and 4.21 s on 2 the speed-up should be 1.907, not 0.5243: that is upside d"),
        "efficiency is speed up": (table(lambda ratio, efficiency: (ratio, ratio)),
            "the efficiency should be 0.9537, not 1.907: that is the speed-up"),
        "in percent": (table(lambda ratio, efficiency: (ratio, 100 * efficiency)),
            "the efficiency should be 1, not 100: that is in percent"),
        "knows the table": (lambda seconds: {1: (1.0, 1.0), 2: (1.907, 0.954), 4: (3.842, 0.961), 8: (7.575, 0.947)},
            "return a dictionary with the keys [1, 4]"),
        "by the first": (table(lambda *pair: pair, one=lambda seconds: next(iter(seconds.values()))),
            "with 8.0 s on 1 rank and 16.0 s on 2 the speed-up should be 0.5, not 1: one rank is the one wit"),
        "by the slowest": (table(lambda *pair: pair, one=lambda seconds: max(seconds.values())),
            "the speed-up should be 0.5, not 1"),
    },
}  # fmt: skip
RIGHT = {
    "ring_reduce_scatter": [follows_its_chunk, without_a_batch],
    "ring_all_gather": [copies_from_a_buffer],
    "ring_seconds": [
        lambda b, n, alpha, beta: 2 * (n - 1) * alpha + 2 * (n - 1) / n * b / beta,
        lambda b, n, alpha, beta: torch.tensor([alpha + b / n / beta] * 2 * (n - 1), dtype=torch.float64).sum(),
        lambda b, n, alpha, beta: Fraction(2 * (n - 1)) * (Fraction(alpha) + Fraction(b, n) / Fraction(beta)),
    ],
    "all_reduce_any_length": [chunks_of_the_rounded_up_size],
    "mended_ring": [chunks_of_the_rounded_up_size],
    "pass_right": [sending_first(0, 2), rank_0_receives_first_without_waiting, receives_while_it_sends],
    "estimate_pi": [pi_as(Fraction), pi_as(torch.tensor), pi_by_name],
    "speed_up": [table(lambda *pair: list(pair)), table(lambda *pair: torch.tensor(pair))],
}


class TestAnswers(AnswersOfRanks):
    lesson, checks, world, worlds = "02_collectives", collectives, 4, (1, 2, 3, 4)
    rejected, right, solutions, around = MUTANTS, RIGHT, {"speed_up": "scaling"}, ("exchange",)
