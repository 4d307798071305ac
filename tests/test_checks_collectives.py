"""The checks of lesson 02 accept the lesson's solutions and reject real mistakes, each with a sentence that names it."""

import pytest
import torch
import torch.distributed as dist
from manyhands.checks import collectives as checks
from manyhands.course.catch_up import taken_from
from rank_pool import run_on_ranks

SOLUTIONS = {
    "all_reduce_any_length": "all_reduce_any_length",
    "pass_right": "pass_right",
    "estimate_pi": "estimate_pi",
    "speed_up": "scaling",
    "mended_ring": "mended_ring",
}


def place():
    rank, n = dist.get_rank(), dist.get_world_size()
    return rank, n, (rank - 1) % n, (rank + 1) % n


def exchange(give, take):
    rank, n, left, right = place()
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, give, right), dist.P2POp(dist.irecv, take, left)]
    ):
        work.wait()


# ---- mutants of the ring ----


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
        ops = [
            dist.P2POp(dist.isend, mine_N, (rank + step) % n),
            dist.P2POp(dist.irecv, arrived_N, (rank - step) % n),
        ]
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


def returns_nothing(x_N):
    _ring(x_N, x_N.tensor_split(dist.get_world_size()))


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
    return _pi(
        points, count_hits, points // n + (rank < points % n), rank, lambda hits: dist.all_reduce(hits)
    )


def reads_after_the_reduce(points, count_hits):
    rank, n, *_ = place()
    return _pi(points, count_hits, points // n + (rank < points % n), rank, everywhere=True)


def averages_means(points, count_hits):
    rank, n, *_ = place()
    share = points // n + (rank < points % n)
    mean = torch.tensor(4 * count_hits(share, rank) / share, dtype=torch.float64)
    dist.reduce(mean, 0)
    return mean.item() / n if rank == 0 else None


# ---- mutants of the speed-up ----


def upside_down(seconds):
    return {n: (s / seconds[1], s / seconds[1] / n) for n, s in seconds.items()}


def efficiency_is_speed_up(seconds):
    return {n: (seconds[1] / s, seconds[1] / s) for n, s in seconds.items()}


def in_percent(seconds):
    return {n: (seconds[1] / s, 100 * seconds[1] / s / n) for n, s in seconds.items()}


def knows_the_table(seconds):
    return {1: (1.0, 1.0), 2: (1.907, 0.954), 4: (3.842, 0.961), 8: (7.575, 0.947)}


MUTANTS = {
    "all_reduce_any_length": {
        ships_whole_tensors: "numbers left this rank in 6 messages; chunks of at most 2 are enough, 12 numbers in all",
        sends_to_everyone: "this rank sent 3 messages; the ring on 4 ranks sends exactly 2(n-1) = 6",
        uses_the_library: "it calls all_reduce; build it from messages",
        forgets_the_second_half: "the sum is wrong: element",
        splits_with_chunk: "IndexError",
        leaves_the_input: "x_N still holds other numbers; sum in place",
        returns_nothing: "it returned NoneType; return the summed tensor",
        always_float: "it returned float32[8], not float64[8]",
        pads_every_chunk: "numbers left this rank in 6 messages; chunks of at most 2 are enough",
        drops_the_remainder: "for 7 numbers (float64) the sum is wrong: element 4 is",
    },
    "mended_ring": {
        ships_whole_tensors: "24 numbers left this rank in 6 messages; chunks of at most 1 are enough, 6 numbers in all",
        sends_to_everyone: "exactly 2(n-1) = 6",
        forgets_the_second_half: "the sum is wrong",
    },
    "pass_right": {
        sends_first: "waited 5 s for a message that never came",
        by_turns: "4 messages one after the other, where all could travel at the same time",
        wrong_way_round: "the tensor of rank 3, your left neighbour is wrong: element 0 is 1, not 3",
        into_its_own: "the tensor that you were given has changed",
        gathers_everything: "this rank sent 0 messages and 0 bytes; 1 message and 4 bytes are needed",
        forgets_to_wait: "your left neighbour is wrong: element 0 is -1",
    },
    "estimate_pi": {
        loses_the_remainder: "asked for 1003 points and counted 1000",
        everybody_throws_all: "asked for 1003 points and counted 4012",
        one_seed_for_all: "equal seeds draw the same points",
        all_reduces: "it calls all_reduce; one reduce to rank 0 is enough",
        reads_after_the_reduce: "only rank 0 has the sum after a reduce",
        averages_means: "with the hits of all ranks it is",
    },
    "speed_up": {
        upside_down: "8.03 s on one rank and 4.21 s on 2 are a speed-up of 1.91, not 0.52",
        efficiency_is_speed_up: "an efficiency of 0.95, not 1.91",
        in_percent: "an efficiency of 1.00, not 100.00",
        knows_the_table: "return a dictionary with the keys [1, 4]",
    },
}


def unattempted(*args):
    raise NotImplementedError


def judge(ranks, check, answers):
    return [getattr(checks, check)(answer, ranks) for answer in answers]


@pytest.mark.parametrize("check", MUTANTS)
def test_each_mistake_is_rejected_with_the_sentence_that_names_it(check, capfd):
    verdicts = run_on_ranks(4, judge, check, [*MUTANTS[check], unattempted], timeout_s=150)
    for per_rank in verdicts:
        assert per_rank == verdicts[0], "all ranks say the same"
    for (mutant, sentence), verdict in zip(MUTANTS[check].items(), verdicts[0], strict=False):
        assert sentence.lower() in verdict.lower(), f"{mutant.__name__}: {verdict}"
    assert verdicts[0][-1] == "not attempted"


def _solutions(ranks):
    n = ranks.world_size
    given = {"rank": ranks.rank, "world_size": n, "left": (ranks.rank - 1) % n, "right": (ranks.rank + 1) % n}
    names = ["exchange", "ring_reduce_scatter", "ring_all_gather", *SOLUTIONS.values()]
    functions = vars(taken_from("02_collectives", *names, **given))
    extra = [even_ranks_first] if n > 1 else []
    return [
        getattr(checks, check)(functions[name], ranks, solution=True) for check, name in SOLUTIONS.items()
    ] + [checks.pass_right(answer, ranks) for answer in extra]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_lessons_solutions_are_correct_on_any_number_of_ranks(n, capfd):
    for verdicts in run_on_ranks(n, _solutions, timeout_s=120):
        assert set(verdicts) == {"correct"}


def test_the_speed_up_needs_no_ranks(capsys):
    assert (
        checks.speed_up(lambda seconds: {n: (seconds[1] / s, seconds[1] / s / n) for n, s in seconds.items()})
        == "correct"
    )
