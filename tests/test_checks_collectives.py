"""The checks of lesson 02 accept the lesson's solutions and reject real mistakes with a sentence that names each."""

import math
import time
from fractions import Fraction

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


def adds_to_what_it_sends(chunks):
    rank, n, *_ = place()
    for hop in range(n - 1):
        give = chunks[(rank - hop) % n]
        arrived = torch.empty_like(give)
        exchange(give, arrived)
        give += arrived


def sends_its_own_chunk_each_hop(chunks):
    rank, n, *_ = place()
    for hop in range(n - 1):
        arrived = torch.empty_like(chunks[0])
        exchange(chunks[rank], arrived)
        chunks[(rank - hop - 1) % n] += arrived


def overwrites(chunks):
    rank, n, *_ = place()
    for hop in range(n - 1):
        exchange(chunks[(rank - hop) % n], chunks[(rank - hop - 1) % n])


def begins_one_chunk_early(chunks):  # the other convention: rank k ends with chunk k
    rank, n, *_ = place()
    for hop in range(n - 1):
        arrived = torch.empty_like(chunks[0])
        exchange(chunks[(rank - hop - 1) % n], arrived)
        chunks[(rank - hop - 2) % n] += arrived


def adds_into_a_new_tensor(chunks):
    rank, n, *_ = place()
    for hop in range(n - 1):
        mine = (rank - hop - 1) % n
        arrived = torch.empty_like(chunks[mine])
        exchange(chunks[(rank - hop) % n], arrived)
        chunks[mine] = chunks[mine] + arrived


def goes_to_the_left(chunks):
    rank, n, left, right = place()
    for hop in range(n - 1):
        arrived = torch.empty_like(chunks[0])
        ops = [dist.P2POp(dist.isend, chunks[(rank + hop) % n], left), dist.P2POp(dist.irecv, arrived, right)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        chunks[(rank + hop + 1) % n] += arrived


def adds_twice(chunks):
    rank, n, *_ = place()
    for hop in range(n - 1):
        mine = chunks[(rank - hop - 1) % n]
        arrived = torch.empty_like(mine)
        exchange(chunks[(rank - hop) % n], arrived)
        mine += 2 * arrived


def sends_all_chunks_each_hop(chunks):
    rank, n, *_ = place()
    for hop in range(n - 1):
        arrived = torch.empty(n, *chunks[0].shape, dtype=chunks[0].dtype)
        exchange(torch.stack(chunks), arrived)
        chunks[(rank - hop - 1) % n] += arrived[(rank - hop - 1) % n]


def reduces_with_the_library(chunks):
    for chunk in chunks:
        dist.all_reduce(chunk)


def one_hop_too_many(chunks):  # the last one carries nothing that is needed
    rank, n, *_ = place()
    follows_its_chunk(chunks)
    exchange(chunks[rank], torch.empty_like(chunks[rank]))


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


def begins_with_its_own_number(chunks):
    rank, n, *_ = place()
    for hop in range(n - 1):
        exchange(chunks[(rank - hop) % n], chunks[(rank - hop - 1) % n])


def receives_one_place_off(chunks):
    rank, n, *_ = place()
    for hop in range(n - 1):
        exchange(chunks[(rank + 1 - hop) % n].clone(), chunks[(rank - 1 - hop) % n])


def adds_in_the_second_half(chunks):
    rank, n, *_ = place()
    for hop in range(n - 1):
        arrived = torch.empty_like(chunks[0])
        exchange(chunks[(rank + 1 - hop) % n], arrived)
        chunks[(rank - hop) % n] += arrived


def one_hop_too_few(chunks):
    rank, n, *_ = place()
    for hop in range(n - 2):
        exchange(chunks[(rank + 1 - hop) % n], chunks[(rank - hop) % n])


def gathers_with_the_library(chunks):
    rank, n, _, right = place()
    everything = [torch.empty_like(chunks[0]) for _ in range(n)]
    dist.all_gather(everything, chunks[right].clone())
    for rank, finished in enumerate(everything):
        chunks[(rank + 1) % n].copy_(finished)


def keeps_what_arrives_in_the_list(chunks):
    rank, n, *_ = place()
    for hop in range(n - 1):
        arrived = torch.empty_like(chunks[0])
        exchange(chunks[(rank + 1 - hop) % n], arrived)
        chunks[(rank - hop) % n] = arrived


def copies_from_a_buffer(chunks):  # right
    rank, n, _, right = place()
    travelling = chunks[right]
    for c in range(rank, rank + 1 - n, -1):
        arrived = torch.empty_like(travelling)
        exchange(travelling, arrived)
        travelling = chunks[c % n].copy_(arrived)


# ---- mutants of the ring's time: build D ----


def whole_tensors(n_bytes, n, alpha, beta):
    return 2 * (n - 1) * (alpha + n_bytes / beta)


def one_half(n_bytes, n, alpha, beta):
    return (n - 1) * (alpha + n_bytes / n / beta)


def one_alpha_in_all(n_bytes, n, alpha, beta):
    return alpha + 2 * (n - 1) / n * n_bytes / beta


def n_hops(n_bytes, n, alpha, beta):
    return 2 * n * (alpha + n_bytes / n / beta)


def times_beta(n_bytes, n, alpha, beta):
    return 2 * (n - 1) * (alpha + n_bytes / n * beta)


def four_ranks_for_ever(n_bytes, n, alpha, beta):
    return 6 * (alpha + n_bytes / 4 / beta)


def in_milliseconds(n_bytes, n, alpha, beta):
    return 2e3 * (n - 1) * (alpha + n_bytes / n / beta)


def latency_and_bus_bandwidth(n_bytes, n, alpha, beta):  # right
    return 2 * (n - 1) * alpha + 2 * (n - 1) / n * n_bytes / beta


def in_a_tensor(n_bytes, n, alpha, beta):  # right
    return torch.tensor([alpha + n_bytes / n / beta] * 2 * (n - 1), dtype=torch.float64).sum()


def a_fraction(n_bytes, n, alpha, beta):  # right
    return Fraction(2 * (n - 1)) * (Fraction(alpha) + Fraction(n_bytes, n) / Fraction(beta))


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


def _ring(x_N, chunks, second_half=True):
    rank, n, *_ = place()
    for hop in range(n - 1):
        mine = chunks[(rank - hop - 1) % n]
        arrived = torch.empty_like(mine)
        exchange(chunks[(rank - hop) % n], arrived)
        mine += arrived
    for hop in range(n - 1 if second_half else 0):
        exchange(chunks[(rank + 1 - hop) % n], chunks[(rank - hop) % n])
    return x_N


def forgets_the_second_half(x_N):
    return _ring(x_N, x_N.tensor_split(dist.get_world_size()), second_half=False)


def splits_with_chunk(x_N):  # 5 numbers in 4 chunks: chunk() gives 3
    return _ring(x_N, x_N.chunk(dist.get_world_size()))


def leaves_the_input(x_N):
    sum_N = x_N.clone()
    return _ring(sum_N, sum_N.tensor_split(dist.get_world_size()))


def always_float(x_N):
    sum_N = x_N.float()
    return _ring(sum_N, sum_N.tensor_split(dist.get_world_size()))


def pads_every_chunk(x_N):
    n = dist.get_world_size()
    padded = torch.nn.functional.pad(x_N, (0, 4 * n * n - x_N.numel() % n))
    padded = padded[: padded.numel() // n * n].clone()
    x_N.copy_(_ring(padded, padded.chunk(n))[: x_N.numel()])
    return x_N


def drops_the_remainder(x_N):
    n = dist.get_world_size()
    even_N = x_N[: x_N.numel() // n * n]
    _ring(even_N, even_N.view(n, -1))
    return x_N


def _in(dtype):
    def answer(x_N):
        sum_N = x_N.to(dtype)
        x_N.copy_(_ring(sum_N, sum_N.tensor_split(dist.get_world_size())))
        return x_N

    return answer


sums_in_float32, sums_in_float64, sums_in_int16 = _in(torch.float32), _in(torch.float64), _in(torch.int16)


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


def sends_first(mine):  # the polite ring itself
    _, _, left, right = place()
    theirs = torch.empty_like(mine)
    dist.send(mine, right)
    dist.recv(theirs, left)
    return theirs


def by_turns(mine):
    rank, _, left, right = place()
    theirs = torch.empty_like(mine)
    if rank == 0:
        dist.send(mine, right)
    dist.recv(theirs, left)
    if rank != 0:
        dist.send(mine, right)
    return theirs


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


def first(senders):
    """Blocking calls, where the ranks in `senders` send first."""

    def answer(mine):
        rank, _, left, right = place()
        theirs = torch.empty_like(mine)
        if rank in senders:
            dist.send(mine, right)
            dist.recv(theirs, left)
        else:
            dist.recv(theirs, left)
            dist.send(mine, right)
        return theirs

    return answer


two_send_first, three_send_first = first({0, 1}), first({0, 1, 2})


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


def even_ranks_first(mine):  # not a mutant: two rounds, nobody waits for a turn
    rank, _, left, right = place()
    theirs = torch.empty_like(mine)
    if rank % 2 == 0:
        dist.send(mine, right)
    dist.recv(theirs, left)
    if rank % 2:
        dist.send(mine, right)
    return theirs


# ---- mutants of pi ----


def _pi(points, count_hits, share, seed, reduce=dist.reduce, everywhere=False):
    hits = torch.tensor(count_hits(share, seed), dtype=torch.int64)
    reduce(hits, 0) if reduce is dist.reduce else reduce(hits)
    return 4 * hits.item() / points if everywhere or dist.get_rank() == 0 else None


def loses_the_remainder(points, count_hits):
    rank, n, *_ = place()
    return _pi(points, count_hits, points // n, rank)


def everybody_throws_all(points, count_hits):
    return _pi(points, count_hits, points, dist.get_rank())


def one_seed_for_all(points, count_hits):
    rank, n, *_ = place()
    return _pi(points, count_hits, points // n + (rank < points % n), 0)


def all_reduces(points, count_hits):
    rank, n, *_ = place()
    return _pi(points, count_hits, points // n + (rank < points % n), rank, lambda hits: dist.all_reduce(hits))


def reads_after_the_reduce(points, count_hits):
    rank, n, *_ = place()
    return _pi(points, count_hits, points // n + (rank < points % n), rank, everywhere=True)


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
    hits = torch.tensor(hits)
    dist.reduce(hits, 0)
    return 4 * hits.item() / points if rank == 0 else None


def _returns(change):
    def answer(points, count_hits):
        rank, n, *_ = place()
        pi = _pi(points, count_hits, points // n + (rank < points % n), rank)
        return change(pi) if rank == 0 else None

    return answer


pi_as_a_fraction, pi_as_a_tensor = _returns(Fraction), _returns(torch.tensor)  # right


def pi_by_name(points, count_hits):  # right: the names are those of the lesson's count_hits
    rank, n, *_ = place()
    return _pi(points, lambda share, seed: count_hits(points=share, seed=seed), len(range(rank, points, n)), rank)


# ---- mutants of the speed-up ----


def upside_down(seconds):
    return {n: (s / seconds[1], s / seconds[1] / n) for n, s in seconds.items()}


def efficiency_is_speed_up(seconds):
    return {n: (seconds[1] / s, seconds[1] / s) for n, s in seconds.items()}


def in_percent(seconds):
    return {n: (seconds[1] / s, 100 * seconds[1] / s / n) for n, s in seconds.items()}


def knows_the_table(seconds):
    return {1: (1.0, 1.0), 2: (1.907, 0.954), 4: (3.842, 0.961), 8: (7.575, 0.947)}


def _table(pair):
    return lambda seconds: {n: pair(seconds[1] / s, seconds[1] / s / n) for n, s in seconds.items()}


in_lists = _table(lambda ratio, efficiency: [ratio, efficiency])  # right
in_tensors = _table(lambda ratio, efficiency: torch.tensor([ratio, efficiency]))  # right


def by_the_first(seconds):
    one = next(iter(seconds.values()))
    return {n: (one / s, one / s / n) for n, s in seconds.items()}


def by_the_slowest(seconds):
    one = max(seconds.values())
    return {n: (one / s, one / s / n) for n, s in seconds.items()}


MUTANTS = {
    "ring_reduce_scatter": {
        adds_to_what_it_sends: "holds numbers of rank 3's chunk 3: what arrives must be added to the chunk of the same",
        sends_its_own_chunk_each_hop: "what arrives must be added to the chunk of the same number",
        overwrites: "chunk 1 holds the numbers of rank 1, not of all 4: send on the chunk to which you have just added",
        begins_one_chunk_early: "chunk 0 is finished here, and chunk 1 should be: at the first hop rank 0 sends chunk",
        adds_into_a_new_tensor: "chunks[1] is another tensor now, and the gradient of which it was a view has not chan",
        goes_to_the_left: "this rank sent to rank 3; on the ring it sends only to its right, rank 1",
        adds_twice: "chunk 1 holds rank 1's numbers 8 times; once each is the sum",
        sends_all_chunks_each_hop: "192 numbers left this rank in 3 messages, the largest of 64; chunks of at most 16",
        reduces_with_the_library: "all chunks are right, but it calls all_reduce; build it from messages",
        one_hop_too_many: "this rank sent 4 messages; the ring on 4 ranks sends exactly n-1 = 3: one for each hop",
    },
    "ring_all_gather": {
        begins_with_its_own_number: "holds an unfinished sum of rank",
        receives_one_place_off: "receive each chunk where the same number stands",
        adds_in_the_second_half: "in this half nothing is added",
        one_hop_too_few: "chunk 2 still holds this rank's unfinished sum: a finished one must arrive there in one of t",
        gathers_with_the_library: "all chunks are right, but it calls all_gather; build it from messages",
        keeps_what_arrives_in_the_list: "chunks[0] is another tensor now",
        goes_to_the_left: "this rank sent to rank 3",
    },
    "ring_seconds": {
        whole_tensors: "should be 0.00126 seconds, not 0.00486 seconds: a hop carries one chunk, not the whole tensor",
        one_half: "should be 0.00126 seconds, not 0.00063 seconds: that is one of the two halves",
        one_alpha_in_all: "every hop pays alpha",
        n_hops: "each half has n-1 hops, not n",
        times_beta: "beta is bytes per second, so divide by it",
        four_ranks_for_ever: "40,000,000 bytes on 100 ranks",
        in_milliseconds: "should be 0.00126 seconds, not 1.26 seconds: that is in milliseconds",
    },
    "all_reduce_any_length": {
        ships_whole_tensors: "numbers left this rank in 6 messages, the largest of 8; chunks of at most 2 are enough,",
        sends_to_everyone: "this rank sent 3 messages; the ring on 4 ranks sends exactly 2(n-1) = 6",
        uses_the_library: "it calls all_reduce; build it from messages",
        forgets_the_second_half: "the sum is wrong: element [1] should be 10, not 1",
        splits_with_chunk: "IndexError",
        leaves_the_input: "x_N still holds other numbers; sum in place",
        always_float: "for 8 numbers (float64) the sum should be float64, as what you were given, not float32",
        pads_every_chunk: "are enough, 12 numbers in all",
        drops_the_remainder: "for 7 numbers (float64) the sum is wrong: element [4] should be",
        sums_in_float32: "which is float32's accuracy; keep the dtype of what you were given",
        sums_in_float64: "for 8 numbers (int64) the sum is wrong: element [0] should be 2,305,843,009,213,693",
        sums_in_int16: "for 8 numbers (float64) the sum is wrong: element [0] should be",
        gives_the_rest_to_the_last: "the largest of 4; chunks of at most 2 are enough, 12 numbers in all",
        fills_with_not_a_number: "the sum is wrong: element [0] should be 0, and is nan",
    },
    "mended_ring": {
        ships_whole_tensors: "24 numbers left this rank in 6 messages, the largest of 4; chunks of at most 1 are enoug",
        sums_in_float32: "which is float32's accuracy; keep the dtype of what you were given",
        sums_in_int16: "for 4 numbers (float64) the sum is wrong: element [0] should be 4,503,599,627,370",
        gives_the_rest_to_the_first: "the largest of 4; chunks of at most 1 are enough",
        sends_to_everyone: "exactly 2(n-1) = 6",
        forgets_the_second_half: "the sum is wrong",
    },
    "pass_right": {
        sends_first: "waited 5 s for a message that never came",
        by_turns: "4 messages one after the other, where 2 rounds are enough for 4 ranks",
        wrong_way_round: "what comes back should be the tensor of rank 3, your left neighbour: it is that of rank 1",
        guesses: ": this rank received nothing",
        returns_its_own: ": it is that of rank 0",
        two_send_first: "some ranks wait for their turn: 3 messages one after the other",
        three_send_first: "some ranks wait for their turn: 4 messages one after the other",
        always_float32: "what comes back should be int32, as what you were given, not float32",
        into_its_own: "the tensor that you were given was changed",
        gathers_everything: "this rank sent 0 messages and 0 bytes; 1 message and 4 bytes are needed",
        forgets_to_wait: "your left neighbour: element [0] should be",
    },
    "estimate_pi": {
        loses_the_remainder: "asked for 1003 points and counted 1000",
        everybody_throws_all: "asked for 1003 points and counted 4012",
        one_seed_for_all: "equal seeds draw the same points",
        all_reduces: "it calls all_reduce; one reduce to rank 0 is enough",
        reads_after_the_reduce: "only rank 0 has the sum after a reduce",
        averages_means: "with the hits of all ranks what rank 0 returns should be",
        rank_0_throws_all: "rank 0 counts 1003 of 1003 points; share them evenly",
    },
    "speed_up": {
        upside_down: "with 8.03 s on 1 rank and 4.21 s on 2 the speed-up should be 1.907, not 0.5243: that is upside d",
        efficiency_is_speed_up: "the efficiency should be 0.9537, not 1.907: that is the speed-up",
        in_percent: "the efficiency should be 1, not 100: that is in percent",
        knows_the_table: "return a dictionary with the keys [1, 4]",
        by_the_first: "with 8.0 s on 1 rank and 16.0 s on 2 the speed-up should be 0.5, not 1: one rank is the one wit",
        by_the_slowest: "the speed-up should be 0.5, not 1",
    },
}


RIGHT = {
    "ring_reduce_scatter": [follows_its_chunk, without_a_batch],
    "ring_all_gather": [copies_from_a_buffer],
    "ring_seconds": [latency_and_bus_bandwidth, in_a_tensor, a_fraction],
    "all_reduce_any_length": [chunks_of_the_rounded_up_size],
    "mended_ring": [chunks_of_the_rounded_up_size],
    "pass_right": [even_ranks_first, rank_0_receives_first_without_waiting, receives_while_it_sends],
    "estimate_pi": [pi_as_a_fraction, pi_as_a_tensor, pi_by_name],
    "speed_up": [in_lists, in_tensors],
}


class TestAnswers(AnswersOfRanks):
    lesson, checks, world, worlds = "02_collectives", collectives, 4, (1, 2, 3, 4)
    rejected, right, solutions, around = MUTANTS, RIGHT, {"speed_up": "scaling"}, ("exchange",)
