"""Each check of lesson 05 accepts right answers and rejects mutants, several of them from published code, by name."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from exercises import exercises_of, heard_alike, judge_solutions, not_attempted
from manyhands.checks import same_science as checks
from torch.utils.data.distributed import DistributedSampler

LESSON = "05_same_science"
N_RANKS = 3  # does not divide 13, and means over it round


# ---- exercise 1: answers say what is wrong with a recorded run ----


def says_fine(read, length):
    return "fine"


def looks_at_distinct_ranks(read, length):  # one rank has no other to give a sequence to
    readers = {i: {r for epoch in read for r, mine in enumerate(epoch) if i in mine} for i in range(length)}
    return "same order" if all(len(r) == 1 for r in readers.values()) else disagreement(read, length)


def disagreement(read, length):
    return "ranks disagree" if any(len({*sum(epoch, [])}) < length for epoch in read) else "fine"


def takes_filling_for_a_fault(read, length):  # the library reads some twice
    if any(len(sum(epoch, [])) != length for epoch in read):
        return "ranks disagree"
    return "same order" if read[0] == read[1] else disagreement(read, length)


def looks_at_rank_0_only(read, length):
    return "same order" if read[0][0] == read[1][0] else "fine"


def counts_over_all_epochs(read, length):  # what one epoch lacks, another has twice
    seen = {i for epoch in read for mine in epoch for i in mine}
    if len(seen) < length:
        return "ranks disagree"
    return "same order" if read[0] == read[-1] else "fine"


def looks_at_the_first_epoch_only(read, length):
    if len(set(sum(read[0], []))) < length:
        return "ranks disagree"
    return "same order" if all(epoch == read[0] for epoch in read) else "fine"


def says_true(read, length):
    return True


# ---- exercise 2: answers list what a rank still has to read ----


def order(length, epoch):
    return np.random.default_rng(np.random.SeedSequence(0, spawn_key=(epoch,))).permutation(length).tolist()


def pads_like_the_library(length, epoch, done, rank, n):
    sampler = DistributedSampler(range(length), n, rank)
    sampler.set_epoch(epoch)
    return list(sampler)


def drops_the_tail(length, epoch, done, rank, n):
    left = order(length, epoch)[done:]
    return left[: len(left) // n * n][rank::n]


def deals_blocks(length, epoch, done, rank, n):  # what was read is then no beginning of the order
    return [int(i) for i in np.array_split(order(length, epoch)[done:], n)[rank]]


def forgets_the_epoch(length, epoch, done, rank, n):
    return order(length, 0)[done:][rank::n]


def uses_the_global_numpy_state(length, epoch, done, rank, n):
    return np.random.permutation(length)[done:][rank::n]


def uses_the_global_random_state(length, epoch, done, rank, n):
    deck = list(range(length))
    random.shuffle(deck)
    return deck[done:][rank::n]


def seeds_with_the_rank(length, epoch, done, rank, n):
    return np.random.default_rng((epoch, rank)).permutation(length)[done:][rank::n]


def starts_the_epoch_again(length, epoch, done, rank, n):
    return order(length, epoch)[rank::n]


def takes_done_for_this_ranks(length, epoch, done, rank, n):
    return order(length, epoch)[rank::n][done:]


def takes_its_part_of_done(length, epoch, done, rank, n):  # right where done comes out even
    return order(length, epoch)[rank::n][done // n :]


def leaves_what_is_left_to_rank_0(length, epoch, done, rank, n):
    left = order(length, epoch)[done:]
    return left[rank::n] if done == 0 else left * (rank == 0)


def turns_the_first_order(length, epoch, done, rank, n):
    return np.roll(order(length, 0), 5 * epoch)[done:][rank::n]


def loses_one_in_odd_epochs(length, epoch, done, rank, n):
    return order(length, epoch)[done + (epoch == 1) :][rank::n]


def does_not_shuffle(length, epoch, done, rank, n):
    deck = list(range(length))
    return (deck[epoch:] + deck[:epoch])[done:][rank::n]


def shuffles_after_dealing(length, epoch, done, rank, n):  # each rank keeps its cards for ever
    mine = list(range(length))[rank::n]
    random.Random(epoch).shuffle(mine)
    return mine


def counts_from_one(length, epoch, done, rank, n):
    return [i + 1 for i in order(length, epoch)[done:][rank::n]]


def leaves_the_rest_to_the_last_rank(length, epoch, done, rank, n):
    left, each = order(length, epoch)[done:], (length - done) // n
    return left[rank * each : (rank + 1) * each if rank < n - 1 else None]


def asks_rank_0(length, epoch, done, rank, n):  # right, but one message for each call
    deck = torch.tensor(order(length, epoch))
    dist.broadcast(deck, src=0)
    return deck.tolist()[done:][rank::n]


# ---- exercise 3: answers run backward on micro-batches ----


def total(ddp, x, y, reduction="sum"):
    return F.cross_entropy(ddp(x), y, ignore_index=-100, reduction=reduction)


def tokens_of(micro_batches):
    return sum((y != -100).sum() for _, y in micro_batches)


def all_tokens_of(micro_batches):
    tokens = tokens_of(micro_batches)
    dist.all_reduce(tokens)
    return tokens


def accumulate(ddp, micro_batches, loss):
    with ddp.no_sync():
        for x, y in micro_batches[:-1]:
            loss(x, y).backward()
    loss(*micro_batches[-1]).backward()


def mean_of_means(ddp, micro_batches):  # transformers#34191
    accumulate(ddp, micro_batches, lambda x, y: total(ddp, x, y, "mean") / len(micro_batches))


def mean_of_means_without_nan(ddp, micro_batches):
    def loss(x, y):
        return total(ddp, x, y) / max(1, int((y != -100).sum())) / len(micro_batches)

    accumulate(ddp, micro_batches, loss)


def scales_means_by_counts(ddp, micro_batches):  # right: the loss of no token is nan, its gradient is zero
    everyone = all_tokens_of(micro_batches)

    def loss(x, y):
        tokens = (y != -100).sum()
        return dist.get_world_size() * tokens * (total(ddp, x, y) / tokens) / everyone

    accumulate(ddp, micro_batches, loss)


def mean_of_rank_means(ddp, micro_batches):
    tokens = max(1, int(tokens_of(micro_batches)))
    accumulate(ddp, micro_batches, lambda x, y: total(ddp, x, y) / tokens)


def forgets_that_ddp_divides(ddp, micro_batches):
    tokens = all_tokens_of(micro_batches)
    accumulate(ddp, micro_batches, lambda x, y: total(ddp, x, y) / tokens)


def counts_padding(ddp, micro_batches):
    tokens = sum(len(y) for _, y in micro_batches) * dist.get_world_size()
    accumulate(ddp, micro_batches, lambda x, y: dist.get_world_size() * total(ddp, x, y) / tokens)


def multiplies_twice(ddp, micro_batches):
    tokens, n = all_tokens_of(micro_batches), dist.get_world_size()
    accumulate(ddp, micro_batches, lambda x, y: n * n * total(ddp, x, y) / tokens)


def averages_every_micro_batch(ddp, micro_batches):
    tokens = all_tokens_of(micro_batches)
    for x, y in micro_batches:
        (dist.get_world_size() * total(ddp, x, y) / tokens).backward()


def one_large_batch(ddp, micro_batches):
    x, y = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    (dist.get_world_size() * total(ddp, x, y) / all_tokens_of(micro_batches)).backward()


def divides_in_float32(ddp, micro_batches):  # right: 1 / an integer tensor has seven digits
    weight = dist.get_world_size() * (1 / all_tokens_of(micro_batches))
    accumulate(ddp, micro_batches, lambda x, y: total(ddp, x, y) * weight)


def skips_empty_micro_batches(ddp, micro_batches):  # the rank that skips them all makes one call less
    tokens = all_tokens_of(micro_batches)
    full = [(x, y) for x, y in micro_batches if (y != -100).any()]
    if full:
        accumulate(ddp, full, lambda x, y: dist.get_world_size() * total(ddp, x, y) / tokens)


def only_counts(ddp, micro_batches):
    all_tokens_of(micro_batches)


REJECTED = {
    "diagnose": {
        says_fine: 'is "same order", not "fine": every rank reads the same list in every epoch',
        looks_at_distinct_ranks: "one rank reads every sequence in every epoch. Look at the order too",
        takes_filling_for_a_fault: "3 sequences are read twice in each epoch",
        looks_at_rank_0_only: "one rank is in another epoch than the rest",
        counts_over_all_epochs: "one rank is in another epoch than the rest",
        looks_at_the_first_epoch_only: "from epoch 2 on one rank is in another epoch than the rest",
        says_true: 'return "fine", "same order" or "ranks disagree", not True',
    },
    "sharded_order": {
        pads_like_the_library: "are read twice",
        drops_the_tail: "are never read",
        deals_blocks: "deal it like cards",
        forgets_the_epoch: "epochs 0 and 1 have the same order",
        uses_the_global_numpy_state: "all ranks must cut one and the same order",
        uses_the_global_random_state: "all ranks must cut one and the same order",
        seeds_with_the_rank: "all ranks must cut one and the same order",
        starts_the_epoch_again: "after the stop all 64 are read again",
        takes_done_for_this_ranks: "never read",
        takes_its_part_of_done: "are read twice",
        leaves_what_is_left_to_rank_0: "so some wait for others; sizes may differ by one",
        turns_the_first_order: "the order of epoch 0, begun elsewhere",
        loses_one_in_odd_epochs: "1 are never read",
        does_not_shuffle: "in the order of the file; shuffle",
        shuffles_after_dealing: "after the stop all 64 are read again",
        counts_from_one: "is no sequence; they are 0 to",
        leaves_the_rest_to_the_last_rank: "sizes may differ by one",
        asks_rank_0: "every rank can compute it by itself",
    },
    "token_weighted": {
        mean_of_means: "the mean of the micro-batches' means",
        mean_of_means_without_nan: "the mean of the micro-batches' means",
        mean_of_rank_means: "the mean of the ranks' means",
        forgets_that_ddp_divides: "3 times too small: DDP takes the mean over the ranks",
        counts_padding: "from those of the mean over all tokens",
        multiplies_twice: "3 times too large",
        averages_every_micro_batch: "and a count are enough",
        one_large_batch: "the model was given 24 rows at once, and a micro-batch has 8",
        skips_empty_micro_batches: "also where a micro-batch has no token",
        only_counts: "run a backward pass for each micro-batch",
    },
}
SOLUTIONS = {"diagnose": "diagnose", "sharded_order": "remaining", "token_weighted": "weighted_backward"}
MUTANTS = [(check, mutant) for check, mutants in REJECTED.items() for mutant in mutants]


def judge_all(ranks):
    """Every mutant and every solution, one after the other in the same processes: none poisons the next."""
    verdicts = {mutant.__name__: getattr(checks, check)(mutant, ranks) for check, mutant in MUTANTS}
    verdicts |= judge_solutions(ranks, checks.__name__, LESSON, SOLUTIONS)
    for check, name in SOLUTIONS.items():
        verdicts[f"stub of {name}"] = getattr(checks, check)(not_attempted, ranks)
    verdicts["weighted means"] = checks.token_weighted(scales_means_by_counts, ranks)
    verdicts["a weight in float32"] = checks.token_weighted(divides_in_float32, ranks)
    return verdicts


@pytest.fixture(scope="module")
def verdicts(pool):
    return heard_alike(pool.run(N_RANKS, judge_all, timeout_s=200))


@pytest.mark.parametrize(("check", "mutant"), MUTANTS, ids=[mutant.__name__ for _, mutant in MUTANTS])
def test_check_rejects_mutant_with_the_right_sentence(verdicts, check, mutant):
    # case aside: what is said begins with a capital
    assert REJECTED[check][mutant].lower() in verdicts[mutant.__name__].lower()


@pytest.mark.parametrize("name", SOLUTIONS.values())
def test_check_accepts_the_lessons_solution(verdicts, name):
    assert verdicts[name] == "correct"


@pytest.mark.parametrize("name", SOLUTIONS.values())
def test_unattempted_exercise_is_no_fault(verdicts, name):
    assert verdicts[f"stub of {name}"] == "not attempted"


@pytest.mark.parametrize("answer", ["weighted means", "a weight in float32"])
def test_check_welcomes_other_ways_to_weigh_by_counts(verdicts, answer):
    assert verdicts[answer] == "correct"


def test_every_check_of_the_lesson_has_four_mutants_or_more():
    assert exercises_of(checks) == set(REJECTED)
    assert all(len(mutants) >= 4 for mutants in REJECTED.values())


def test_solutions_are_accepted_by_a_world_of_one(pool):
    (verdicts,) = pool.run(1, judge_solutions, checks.__name__, LESSON, SOLUTIONS, timeout_s=120)
    assert set(verdicts.values()) == {"correct"}
