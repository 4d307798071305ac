"""Each check of lesson 05 accepts right answers and rejects mutants, several of them from published code, by name."""

import os
import random
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from exercises import AnswersOfRanks
from manyhands.checks import same_science as checks
from torch.utils.data.distributed import DistributedSampler

# ---- exercise 1: answers say what is wrong with a recorded run ----


def looks_at_distinct_ranks(read, length):  # one rank has no other to give a sequence to
    readers = {i: {r for epoch in read for r, mine in enumerate(epoch) if i in mine} for i in range(length)}
    return "same order" if all(len(r) == 1 for r in readers.values()) else disagreement(read, length)


def disagreement(read, length):
    return "ranks disagree" if any(len({*sum(epoch, [])}) < length for epoch in read) else "fine"


def takes_filling_for_a_fault(read, length):  # the library reads some twice
    if any(len(sum(epoch, [])) != length for epoch in read):
        return "ranks disagree"
    return "same order" if read[0] == read[1] else disagreement(read, length)


def counts_over_all_epochs(read, length):  # what one epoch lacks, another has twice
    seen = {i for epoch in read for mine in epoch for i in mine}
    if len(seen) < length:
        return "ranks disagree"
    return "same order" if read[0] == read[-1] else "fine"


def looks_at_the_first_epoch_only(read, length):
    if len(set(sum(read[0], []))) < length:
        return "ranks disagree"
    return "same order" if all(epoch == read[0] for epoch in read) else "fine"


def looks_at_two_ranks(one, other):
    """An answer that looks for sequences that two ranks both read in one epoch, and at these ranks only."""

    def answer(read, length):
        filled = any(len(sum(epoch, [])) > length for epoch in read)
        if len(read[0]) > 1 and not filled and any({*epoch[one]} & {*epoch[other]} for epoch in read):
            return "ranks disagree"
        return "same order" if all(epoch == read[0] for epoch in read) else disagreement_of_padded(read, length)

    answer.__name__ = f"looks_at_ranks_{one}_and_{other}"
    return answer


def disagreement_of_padded(read, length):
    return disagreement(read, length) if any(len(sum(epoch, [])) > length for epoch in read) else "fine"


def looks_at_the_last_epoch_only(read, length):
    if len(set(sum(read[-1], []))) < length:
        return "ranks disagree"
    return "same order" if read[0] == read[-1] else "fine"


def compares_rank_0_with_the_last_epoch(read, length):
    if disagreement(read, length) != "fine":
        return "ranks disagree"
    return "same order" if read[0][0] == read[-1][0] else "fine"


def compares_neighbouring_epochs(read, length):  # right as well
    if disagreement(read, length) != "fine":
        return "ranks disagree"
    return "same order" if read[0] == read[1] else "fine"


# ---- build A: answers list what a rank still has to read ----


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


def uses_the_global_numpy_state(length, epoch, done, rank, n):
    return np.random.permutation(length)[done:][rank::n]


def uses_the_global_random_state(length, epoch, done, rank, n):
    deck = list(range(length))
    random.shuffle(deck)
    return deck[done:][rank::n]


def seeds_with_the_rank(length, epoch, done, rank, n):
    return np.random.default_rng((epoch, rank)).permutation(length)[done:][rank::n]


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


def leaves_the_rest_to_the_last_rank(length, epoch, done, rank, n):
    left, each = order(length, epoch)[done:], (length - done) // n
    return left[rank * each : (rank + 1) * each if rank < n - 1 else None]


def asks_rank_0(length, epoch, done, rank, n):  # right, but one message for each call
    deck = torch.tensor(order(length, epoch))
    dist.broadcast(deck, src=0)
    return deck.tolist()[done:][rank::n]


_own_seed = random.SystemRandom().randrange(2**62)  # drawn when it is imported, so that each process has another


def seed_drawn_by_the_process(length, epoch, done, rank, n):
    return np.random.default_rng((_own_seed, epoch)).permutation(length)[done:][rank::n]


def seeds_with_the_process_number(length, epoch, done, rank, n):
    return np.random.default_rng((os.getpid(), epoch)).permutation(length)[done:][rank::n]


def seeds_with_the_clock(length, epoch, done, rank, n):
    return np.random.default_rng((int(time.time()), epoch)).permutation(length)[done:][rank::n]


def turns_from_epoch_2_on(length, epoch, done, rank, n):
    return np.roll(order(length, min(epoch, 2)), epoch)[done:][rank::n]


def shuffles_the_rest_anew(length, epoch, done, rank, n):  # lost or repeated after a second stop
    left = order(length, epoch)[done:]
    if done:
        random.Random(f"{epoch} {done}").shuffle(left)
    return left[rank::n]


def sorts_the_rest(length, epoch, done, rank, n):
    left = order(length, epoch)[done:]
    return (sorted(left) if done else left)[rank::n]


def takes_steps_of_seven(length, epoch, done, rank, n):
    stride = next(step for step in (7, 11, 13) if length % step or length == 1)
    return [(i * stride + 5 * epoch) % length for i in range(length)][done:][rank::n]


def from_the_back(length, epoch, done, rank, n):
    deck = list(range(length))[::-1]
    return (deck[epoch:] + deck[:epoch])[done:][rank::n]


def tensor_of_indices(length, epoch, done, rank, n):  # right, with a seed of its own, by another library
    generator = torch.Generator().manual_seed(1000 + epoch)
    return torch.randperm(length, generator=generator)[done:][rank::n]


def goes_round_from_where_it_stood(
    length, epoch, done, rank, n
):  # right: rank r reads the places r, r + n, ... of it all
    return [i for at, i in enumerate(order(length, epoch)) if at >= done and at % n == rank]


def as_a_generator(length, epoch, done, rank, n):  # right
    yield from order(length, epoch)[done:][rank::n]


# ---- build B: answers turn the sum of a rank's losses into what it calls backward on ----


def count(y):
    return (y != -100).sum()


def count_of_all(y):
    tokens = count(y)
    dist.all_reduce(tokens)
    return tokens


def counts_rows(total, y):
    rows = torch.tensor(len(y))
    dist.all_reduce(rows)
    return dist.get_world_size() * total / rows


def forgets_to_divide(total, y):
    count_of_all(y)
    return dist.get_world_size() * total


def gathers_all_targets(total, y):
    rows = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, y)
    return dist.get_world_size() * total / sum(map(count, rows))


def marks_the_targets(total, y):
    tokens = count_of_all(y)
    y.fill_(-100)
    return dist.get_world_size() * total / tokens


def adds_up_losses_too(total, y):  # right: the value is that of all ranks, the gradient this rank's
    both = torch.stack([total.detach(), count(y).double()])
    dist.all_reduce(both)
    return dist.get_world_size() * total / both[1]


def gathers_small_counts(total, y):  # right
    counts = [torch.zeros((), dtype=torch.long) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, count(y))
    return total * (dist.get_world_size() / sum(counts))


# ---- build C: answers say the learning rate of an update ----


def rate_after(warm_up, kind, base, k, step, updates):
    return base * (k if kind == "SGD" else k**0.5) * min(1, (step + 1) / max(1, warm_up))


def linear_for_all(kind, base, k, step, updates):
    return rate_after(updates // 10, "SGD", base, k, step, updates)


def swaps_the_rules(kind, base, k, step, updates):
    return rate_after(updates // 10, "Adam" if kind == "SGD" else "SGD", base, k, step, updates)


def begins_with_nothing(kind, base, k, step, updates):
    return base * (k if kind == "SGD" else k**0.5) * min(1, step / max(1, updates // 10))


def half_of_the_training(kind, base, k, step, updates):
    return rate_after(updates // 2, kind, base, k, step, updates)


def begins_at_the_base(kind, base, k, step, updates):  # as Goyal et al. do
    full = base * (k if kind == "SGD" else k**0.5)
    return base + (full - base) * min(1, (step + 1) / max(1, updates // 10))


def climbs_in_a_curve(kind, base, k, step, updates):
    return base * (k if kind == "SGD" else k**0.5) * min(1, (step + 1) / max(1, updates // 10)) ** 2


def divides_by_a_tenth_of_nothing(kind, base, k, step, updates):
    return base * (k if kind == "SGD" else k**0.5) * min(1, (step + 1) / (updates // 10))


def asks_for_the_rate(kind, base, k, step, updates):
    rate = torch.tensor(rate_after(updates // 10, kind, base, k, step, updates), dtype=torch.float64)
    dist.broadcast(rate, src=0)
    return rate


def in_numpy(kind, base, k, step, updates):  # right, as an array
    warm_up = max(updates / 10, 1)
    return np.float64(base) * {"SGD": k, "Adam": np.sqrt(k)}[kind] * np.clip((step + 1) / warm_up, 0, 1)


# ---- exercise 2: answers run backward on micro-batches ----


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


def weighted(ddp, micro_batches, factor=1, tokens_of_all=all_tokens_of):
    tokens = tokens_of_all(micro_batches)
    accumulate(ddp, micro_batches, lambda x, y: factor * dist.get_world_size() * total(ddp, x, y) / tokens)


def divides_by_the_micro_batches_too(ddp, micro_batches):
    weighted(ddp, micro_batches, 1 / len(micro_batches))


def multiplies_by_the_micro_batches(ddp, micro_batches):
    weighted(ddp, micro_batches, len(micro_batches))


def takes_a_tenth(ddp, micro_batches):
    weighted(ddp, micro_batches, 0.1)


def climbs(ddp, micro_batches):
    weighted(ddp, micro_batches, -1)


def divides_by_nothing(ddp, micro_batches):
    all_tokens_of(micro_batches)
    accumulate(ddp, micro_batches, lambda x, y: dist.get_world_size() * total(ddp, x, y))


def becomes_nan(ddp, micro_batches):  # 0/0 where a micro-batch has no token
    tokens = all_tokens_of(micro_batches)

    def loss(x, y):
        kept = y != -100
        of_target = F.log_softmax(ddp(x), dim=-1).gather(1, y.clamp(min=0)[:, None])[:, 0]
        mean = -(of_target * kept).sum() / kept.sum()
        return dist.get_world_size() * mean * kept.sum() / tokens

    accumulate(ddp, micro_batches, loss)


def makes_the_step_too(ddp, micro_batches):
    weighted(ddp, micro_batches)
    with torch.no_grad():
        for p in ddp.parameters():
            p -= 0.1 * p.grad


def gathers_the_counts(ddp, micro_batches):  # right: a few bytes more than needed, and the gradients travel once
    def tokens_of_all(micro_batches):
        counts = [None] * dist.get_world_size()
        dist.all_gather_object(counts, tokens_of(micro_batches))
        return sum(counts)

    weighted(ddp, micro_batches, tokens_of_all=tokens_of_all)


def only_counts(ddp, micro_batches):
    all_tokens_of(micro_batches)


# ---- exercise 3: answers say the first update that betrays the number of ranks ----


def first_beyond(limit_of):
    """An answer: the first update whose losses are not within limit_of(loss on one rank, eps) of each other."""

    def answer(one, many, dtype):
        eps = torch.finfo(dtype).eps
        apart = (i for i, (a, b) in enumerate(zip(one, many, strict=True)) if not abs(a - b) <= limit_of(a, eps))
        return next(apart, None)

    return answer


def named(name, answer):
    answer.__name__ = name
    return answer


asks_for_equality = named("asks_for_equality", first_beyond(lambda loss, eps: 0))
one_limit_for_both = named("one_limit_for_both", first_beyond(lambda loss, eps: 1e-10))
float32s_eps_for_both = named("float32s_eps_for_both", first_beyond(lambda loss, eps: 1.2e-4 * loss))
forgets_the_loss = named("forgets_the_loss", first_beyond(lambda loss, eps: 1000 * eps))
never_says_so = named("never_says_so", first_beyond(lambda loss, eps: float("inf")))
to_the_right = named("to_the_right", first_beyond(lambda loss, eps: 2000 * eps * abs(loss)))


def takes_nan_for_equal(one, many, dtype):
    limit = 1000 * torch.finfo(dtype).eps
    return next((i for i, (a, b) in enumerate(zip(one, many, strict=True)) if abs(a - b) > limit * a), None)


def looks_for_larger_losses(one, many, dtype):
    limit = 1000 * torch.finfo(dtype).eps
    pairs = enumerate(zip(one, many, strict=True))
    return next((i for i, (a, b) in pairs if not b - a <= limit * a), None)


def where_it_is_largest(one, many, dtype):
    apart = [abs(a - b) / a for a, b in zip(one, many, strict=True)]
    return None if max(apart) <= 1000 * torch.finfo(dtype).eps else apart.index(max(apart))


def counts_updates_from_one(one, many, dtype):
    found = to_the_right(one, many, dtype)
    return None if found is None else found + 1


def in_arrays(one, many, dtype):  # right
    one, many = np.array(one), np.array(many)
    apart = np.flatnonzero(~(np.abs(one - many) <= 1000 * torch.finfo(dtype).eps * one))
    return apart[0] if len(apart) else None


REJECTED = {
    "diagnose": {
        "says fine": (lambda read, length: "fine",
            "(every rank reads the same list in every epoch) should be 'same order', not 'fine'"),
        looks_at_distinct_ranks: "one rank reads every sequence in every epoch. Look at the order too",
        takes_filling_for_a_fault: "3 sequences are read twice in each epoch",
        "looks at rank 0 only": (lambda read, length: "same order" if read[0][0] == read[1][0] else "fine",
            "one rank is in another epoch than the rest"),
        counts_over_all_epochs: "one rank is in another epoch than the rest",
        looks_at_the_first_epoch_only: "from epoch 2 on one rank is in another epoch than the rest",
        looks_at_two_ranks(0, -1): "should be 'ranks disagree', not 'fine'",
        looks_at_two_ranks(0, 1): "should be 'ranks disagree', not 'fine'",
        looks_at_the_last_epoch_only: "in epoch 1 one rank is in another epoch than the rest",
        compares_rank_0_with_the_last_epoch: "rank 0 reads the same in every epoch by chance, and the others do not",
    },
    "sharded_order": {
        pads_like_the_library: "read twice",
        drops_the_tail: "never read",
        deals_blocks: "deal it like cards",
        "forgets the epoch": (lambda length, epoch, done, rank, n: order(length, 0)[done:][rank::n],
            "epochs 0 and 1 have the same order"),
        uses_the_global_numpy_state: "all ranks must cut one and the same order",
        uses_the_global_random_state: "all ranks must cut one and the same order",
        seeds_with_the_rank: "all ranks must cut one and the same order",
        "starts the epoch again": (lambda length, epoch, done, rank, n: order(length, epoch)[rank::n],
            "after the stop all 64 are read again"),
        "takes done for this ranks": (lambda length, epoch, done, rank, n: order(length, epoch)[rank::n][done:],
            "never read"),
        takes_its_part_of_done: "read twice",
        leaves_what_is_left_to_rank_0: "so some wait for others; sizes may differ by one",
        turns_the_first_order: "the order of epoch 0, begun elsewhere",
        loses_one_in_odd_epochs: "1 is never read",
        does_not_shuffle: "in the order of the file; shuffle",
        shuffles_after_dealing: "after the stop all 64 are read again",
        "counts from one": (lambda length, epoch, done, rank, n: [i + 1 for i in order(length, epoch)[done:][rank::n]],
            "is no sequence; they are 0 to"),
        leaves_the_rest_to_the_last_rank: "sizes may differ by one",
        seed_drawn_by_the_process: "take nothing into the seed that differs between processes",
        seeds_with_the_process_number: "all ranks must cut one and the same order",
        seeds_with_the_clock: "all ranks must cut one and the same order",
        "frozen from epoch 3": (lambda length, epoch, done, rank, n: order(length, min(epoch, 3))[done:][rank::n],
            "epochs 3 and 4 have the same order"),
        "every second epoch": (lambda length, epoch, done, rank, n: order(length, epoch % 2)[done:][rank::n],
            "epochs 0 and 2 have the same order"),
        "wraps after 100 epochs": (lambda length, epoch, done, rank, n: order(length, epoch % 100)[done:][rank::n],
            "epochs 0 and 100 have the same order"),
        turns_from_epoch_2_on: "epoch 3 has the order of epoch 2, begun elsewhere",
        shuffles_the_rest_anew: "After a second stop some are read twice",
        sorts_the_rest: "After a second stop some are read twice",
        takes_steps_of_seven: "most sequences come 7 of 64 places after the one before",
        from_the_back: "most sequences come 63 of 64 places after the one before",
        "lists a set": (lambda length, epoch, done, rank, n: set(order(length, epoch)[done:][rank::n]),
            "Return a list of indices, which are whole numbers, also if it"),
        "lists a number": (lambda length, epoch, done, rank, n: torch.tensor(3),
            "Return a list of indices, which are whole numbers, also if it"),
        asks_rank_0: "every rank can compute it by itself",
    },
    "token_mean": {
        "own mean": (lambda total, y: total / count(y), "the mean of the ranks' means"),
        "own mean without nan": (lambda total, y: total / count(y).clamp(min=1), "the mean of the ranks' means"),
        "trusts ddp": (lambda total, y: total / count_of_all(y),
            "3 times too small: DDP takes the mean over the ranks"),
        counts_rows: "targets were counted, and",
        "multiplies by own count": (lambda total, y: dist.get_world_size() * total * count(y) / count_of_all(y),
            "element [0] should be -0.0006768, not -0.0616"),
        forgets_to_divide: "the number of tokens divides the sum of the losses",
        "cuts the graph": (lambda total, y: torch.tensor(dist.get_world_size() * total.item() / count_of_all(y).item()),
            "the loss was cut off from `total`"),
        "returns a number": (lambda total, y: dist.get_world_size() * total.item() / count_of_all(y).item(),
            "Return the loss as a tensor of one number, not 2.04913272930996"),
        "returns a row": (lambda total, y: (dist.get_world_size() * total / count_of_all(y)).repeat(2),
            "Return the loss as a tensor of one number, not the Tensor"),
        gathers_all_targets: "a count is 8 bytes",
        marks_the_targets: "The row of targets was changed; leave it as it is: count them",
    },
    "rate_rule": {
        "keeps the rate": (lambda kind, base, k, step, updates: rate_after(updates // 10, kind, base, 1, step, updates),
            "that is the base itself; the rule is linear: k times"),
        linear_for_all: "that is k times the base; the rule is the square root",
        swaps_the_rules: "that is the square root of k times the base; the rule is",
        "no warm up": (lambda kind, base, k, step, updates: rate_after(1, kind, base, k, step, updates),
            "update 0 has the full rate 0.4 already; climb to it over 10 updates"),
        begins_with_nothing: "update 0 has the rate 0, so it learns nothing; begin with step + 1",
        "always ten updates": (lambda kind, base, k, step, updates: rate_after(10, kind, base, k, step, updates),
            "the warm-up lasts 4 updates, and the rate of update 5 should be"),
        half_of_the_training: "the warm-up lasts 10 updates, and the rate of update 11 should be",
        begins_at_the_base: "begin near 0, at about 0.04",
        climbs_in_a_curve: "climb in equal steps of 0.04",
        divides_by_a_tenth_of_nothing: "division by zero in learning_rate(",
        asks_for_the_rate: "every rank can compute them by itself",
    },
    "token_weighted": {
        mean_of_means: "the mean of the micro-batches' means",
        mean_of_means_without_nan: "the mean of the micro-batches' means",
        mean_of_rank_means: "the mean of the ranks' means",
        forgets_that_ddp_divides: "3 times too small: DDP takes the mean over the ranks",
        counts_padding: "96 targets were counted, and",
        divides_by_the_micro_batches_too: "4 times too small: that is the number of micro-batches",
        multiplies_by_the_micro_batches: "4 times too large: that is the number of micro-batches",
        takes_a_tenth: "what came is 0.1 times that",
        climbs: "their sign is wrong",
        divides_by_nothing: "the number of tokens divides the sum of the losses",
        becomes_nan: "the gradients became nan",
        makes_the_step_too: "leave gradients only, a later step is the optimizer's",
        multiplies_twice: "3 times too large",
        averages_every_micro_batch: "keep all but the last micro-batch inside no_sync",
        one_large_batch: "the model was given 32 rows at once, and a micro-batch has 8",
        skips_empty_micro_batches: "also where a micro-batch has no token",
        only_counts: "run a backward pass for each micro-batch",
    },
    "betrays": {
        asks_for_equality: "training A is right, in float32: no update, not update",
        one_limit_for_both: "training A is right, in float32: no update, not update",
        never_says_so: "training B is wrong, in float32: update 1, not no update",
        counts_updates_from_one: "training B is wrong, in float32: update 1, not update 2",
        float32s_eps_for_both: "one loss is off by 10000 eps, and later ones are not: update 7, not no update",
        forgets_the_loss: "a loss of 4,000 rounds a thousand times as far as one of 4: no update, not update",
        takes_nan_for_equal: "nan is no rounding: update 5, not no update",
        looks_for_larger_losses: "training B is wrong, in float32: update 1, not",
        where_it_is_largest: "training B is wrong, in float32: update 1, not update",
        "takes update 0 for none": (lambda one, many, dtype: to_the_right(one, many, dtype) or None,
            "the very first losses differ: they did not start alike: update 0, not no update"),
        "says that it betrays": (lambda one, many, dtype: to_the_right(one, many, dtype) is not None,
            "return the number of an update, or None, not False"),
    },
}  # fmt: skip
RIGHT = {
    "diagnose": [compares_neighbouring_epochs],
    "sharded_order": [tensor_of_indices, goes_round_from_where_it_stood, as_a_generator],
    "token_mean": [adds_up_losses_too, gathers_small_counts],
    "rate_rule": [in_numpy],
    "token_weighted": [gathers_the_counts, scales_means_by_counts, divides_in_float32],
    "betrays": [in_arrays, to_the_right],
}


class TestAnswers(AnswersOfRanks):
    lesson, checks, rejected, right = "05_same_science", checks, REJECTED, RIGHT
    world = 3  # does not divide 13, and means over it round
    solutions = {"sharded_order": "remaining", "rate_rule": "learning_rate", "token_weighted": "weighted_backward"}


def test_every_run_that_disagrees_lacks_a_sequence_and_the_lucky_one_none():
    lucky = checks.recorded(checks.FINE, 4, 4, seed=checks.LUCKY)
    assert len({epoch[0][0] for epoch in lucky}) == 1 and len({str(epoch) for epoch in lucky}) == 4
    for more in ({"seed": 2, "odd": 0}, {"seed": 3, "odd": 1}, {"seed": 4, "odd": 2, "since": 1, "until": 2}):
        lacking = [len(set(sum(epoch, []))) < 40 for epoch in checks.recorded(checks.DISAGREE, 4, 40, **more)]
        assert lacking == ([False, True, False, False] if "until" in more else [True] * 4)
