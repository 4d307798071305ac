"""Each check of lesson 05 accepts right answers and rejects mutants, several of them from published code, by name."""

import contextlib
import math
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


def looks_at_epoch(number, order=lambda read: all(epoch == read[0] for epoch in read)):
    """An answer that looks for what one epoch lacks, and takes order(read) for the sign of one order in all."""

    def answer(read, length):
        if len({*sum(read[number], [])}) < length:
            return "ranks disagree"
        return "same order" if order(read) else "fine"

    return answer


def compares_two_ranks(read, length):  # the first and the last
    if any({*epoch[0]} & {*epoch[-1]} for epoch in read if len(epoch) > 1 and length % len(epoch) == 0):
        return "ranks disagree"
    return "same order" if read[0] == read[1] else "fine"


def compares(order):
    """An answer that looks for what any epoch lacks, and takes order(read) for the sign of one order in all."""

    def answer(read, length):
        found = disagreement(read, length)
        return "same order" if found == "fine" and order(read) else found

    return answer


OF_THIS_PROCESS = int.from_bytes(os.urandom(4), "big")

# ---- build A: answers list what a rank still has to read ----


def dealt(deck_of):
    """An answer that deals deck_of(length, epoch)."""
    return lambda length, epoch, done, rank, n: deck_of(length, epoch)[done:][rank::n]


def drawn_with(seed):
    """An answer that deals a permutation drawn with seed(epoch, rank)."""

    def answer(length, epoch, done, rank, n):
        deck = np.random.default_rng(seed(epoch, rank)).permutation(length)
        return deck[done:][rank::n]

    return answer


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


def uses_the_global_random_state(length, epoch):
    return random.sample(range(length), length)


def takes_its_part_of_done(length, epoch, done, rank, n):  # right where done comes out even
    return order(length, epoch)[rank::n][done // n :]


def leaves_what_is_left_to_rank_0(length, epoch, done, rank, n):
    left = order(length, epoch)[done:]
    return left[rank::n] if done == 0 else left * (rank == 0)


def shuffles_after_dealing(length, epoch, done, rank, n):  # each rank keeps its cards for ever
    mine = list(range(length))[rank::n]
    random.Random(epoch).shuffle(mine)
    return mine


def asks_rank_0(length, epoch, done, rank, n):  # right, but one message for each call
    deck = torch.tensor(order(length, epoch))
    dist.broadcast(deck, src=0)
    return deck.tolist()[done:][rank::n]


def shuffles_the_rest_anew(length, epoch, done, rank, n):  # lost or repeated after a second stop
    left = order(length, epoch)[done:]
    if done:
        random.Random(f"{epoch} {done}").shuffle(left)
    return left[rank::n]


def tensor_of_indices(length, epoch):  # right, with a seed of its own, by another library
    return torch.randperm(length, generator=torch.Generator().manual_seed(1000 + epoch))


def goes_round_from_where_it_stood(length, epoch, done, rank, n):  # right: rank r reads r, r + n, ... of it all
    return [i for at, i in enumerate(order(length, epoch)) if at >= done and at % n == rank]


def as_a_generator(length, epoch, done, rank, n):  # right
    yield from order(length, epoch)[done:][rank::n]


# ---- build B: answers turn the sum of a rank's losses into what it calls backward on ----


def summed(x):
    dist.all_reduce(x)
    return x


def count(y):
    return (y != -100).sum()


def count_of_all(y):
    return summed(count(y))


def gathers_all_targets(total, y):
    rows = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, y)
    return dist.get_world_size() * total / sum(map(count, rows))


def marks_the_targets(total, y):
    tokens = count_of_all(y)
    y.fill_(-100)
    return dist.get_world_size() * total / tokens


def adds_up_losses_too(total, y):  # right: the value is that of all ranks, the gradient this rank's
    both = summed(torch.stack([total.detach(), count(y).double()]))
    return dist.get_world_size() * total / both[1]


def gathers_small_counts(total, y):  # right
    counts = [torch.zeros((), dtype=torch.long) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, count(y))
    return total * (dist.get_world_size() / sum(counts))


# ---- build C: answers say the learning rate of an update ----


def rate_after(warm_up, kind, base, k, step, updates):
    return base * (k if kind == "SGD" else k**0.5) * min(1, (step + 1) / max(1, warm_up))


def rated(change):
    """An answer of change(the right rate once warm, the share of the warm-up that is done, kind, base, k)."""

    def answer(kind, base, k, step, updates):
        done = min(1, (step + 1) / max(1, updates // 10))
        return change(base * (k if kind == "SGD" else k**0.5), done, kind, base, k)

    return answer


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
    return summed(tokens_of(micro_batches))


def accumulated(weight, reduction="sum", quiet=lambda ddp: ddp.no_sync(), full_only=False, after=lambda ddp: None):
    """An answer that runs backward on the sum (or mean) of each micro-batch's losses times weight(all of them)."""

    def answer(ddp, micro_batches):
        share = weight(micro_batches)
        if full_only:
            micro_batches = [(x, y) for x, y in micro_batches if (y != -100).any()]
        with quiet(ddp):
            for x, y in micro_batches[:-1]:
                (total(ddp, x, y, reduction) * share).backward()
        for x, y in micro_batches[-1:]:
            (total(ddp, x, y, reduction) * share).backward()
        after(ddp)

    return answer


def share_of_all(micro_batches):
    return dist.get_world_size() / all_tokens_of(micro_batches).double()


def times(factor):
    return accumulated(lambda micro_batches: factor(micro_batches) * share_of_all(micro_batches))


def by_means(mean):
    """An answer that runs backward on mean(logits, targets, tokens of all ranks) of each micro-batch."""

    def answer(ddp, micro_batches):
        everyone = all_tokens_of(micro_batches)
        for i, (x, y) in enumerate(micro_batches):
            with ddp.no_sync() if i < len(micro_batches) - 1 else contextlib.nullcontext():
                mean(ddp(x), y, everyone).backward()

    return answer


def scales_means_by_counts(logits, y, everyone):  # right: the loss of no token is nan, its gradient is zero
    mean = F.cross_entropy(logits, y, ignore_index=-100, reduction="sum") / count(y)
    return dist.get_world_size() * count(y) * mean / everyone


def becomes_nan(logits, y, everyone):  # 0/0 where a micro-batch has no token
    kept = y != -100
    of_target = F.log_softmax(logits, dim=-1).gather(1, y.clamp(min=0)[:, None])[:, 0]
    return dist.get_world_size() * -(of_target * kept).sum() / kept.sum() * kept.sum() / everyone


def one_large_batch(ddp, micro_batches):
    x, y = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    (total(ddp, x, y) * share_of_all(micro_batches)).backward()


def makes_the_step(ddp):
    for p in ddp.parameters():
        p.data -= 0.1 * p.grad


def share_of_gathered_tokens(micro_batches):
    mine = torch.cat([y for _, y in micro_batches])
    of_all = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all, mine)
    return dist.get_world_size() / (torch.cat(of_all) != -100).sum().double()


def gathered_share(micro_batches):  # right: a few bytes more than needed, and the gradients travel once
    counts = [None] * dist.get_world_size()
    dist.all_gather_object(counts, tokens_of(micro_batches))
    return dist.get_world_size() / sum(counts).double()


# ---- exercise 3: answers say the first update that betrays the number of ranks ----


def first_beyond(limit_of):
    """An answer: the first update whose losses are not within limit_of(loss on one rank, eps) of each other."""

    def answer(one, many, dtype):
        eps = torch.finfo(dtype).eps
        apart = (i for i, (a, b) in enumerate(zip(one, many, strict=True)) if not abs(a - b) <= limit_of(a, eps))
        return next(apart, None)

    return answer


to_the_right = first_beyond(lambda loss, eps: 2000 * eps * abs(loss))


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


def in_arrays(one, many, dtype):  # right
    one, many = np.array(one), np.array(many)
    apart = np.flatnonzero(~(np.abs(one - many) <= 1000 * torch.finfo(dtype).eps * one))
    return apart[0] if len(apart) else None


REJECTED = {
    "diagnose": {
        "says fine": (lambda read, length: "fine",
            "(every rank reads the same list in every epoch) should be 'same order', not 'fine'"),
        looks_at_distinct_ranks: "one rank reads every sequence in every epoch. Look at the order too",
        takes_filling_for_a_fault: "the library deals 3 sequences twice, so that all have as many; none is lost",
        counts_over_all_epochs: "one rank is in another epoch than the rest",
        "looks at the first epoch only": (looks_at_epoch(0),
            "from epoch 2 on one rank is in another epoch than the rest"),
        "looks at the last epoch only": (looks_at_epoch(-1),
            "in epoch 1 alone one rank is in another epoch than the rest"),
        compares_two_ranks: "in epoch 1 alone one rank is in another epoch than the rest",
    },
    "sharded_order": {
        pads_like_the_library: "read twice",
        drops_the_tail: "never read",
        deals_blocks: "deal what is left as it lies",
        "forgets the epoch": (dealt(lambda length, epoch: order(length, 0)),
            "epochs 0 and 1 have the same order"),
        "uses the global numpy state": (dealt(lambda length, epoch: np.random.permutation(length)),
            "all ranks must cut one and the same order"),
        "uses the global random state": (dealt(uses_the_global_random_state),
            "all ranks must cut one and the same order"),
        "seeds with the rank": (drawn_with(lambda epoch, rank: (epoch, rank)),
            "all ranks must cut one and the same order"),
        "seeds with a text's hash": (drawn_with(lambda epoch, rank: hash(f"epoch {epoch}") % 2**32),
            "all ranks must cut one and the same order"),
        "seeds with the hash of a tuple with a text": (drawn_with(lambda epoch, rank: hash(("order", epoch)) % 2**32),
            "all ranks must cut one and the same order"),
        "seeds with the clock": (drawn_with(lambda epoch, rank: (epoch, int(time.time()))),
            "all ranks must cut one and the same order"),
        "seeds with the process": (drawn_with(lambda epoch, rank: (epoch, os.getpid())),
            "all ranks must cut one and the same order"),
        "starts the epoch again": (lambda length, epoch, done, rank, n: order(length, epoch)[rank::n],
            "after the stop all 64 are read again"),
        "takes done for this ranks": (lambda length, epoch, done, rank, n: order(length, epoch)[rank::n][done:],
            "never read"),
        takes_its_part_of_done: "read twice",
        leaves_what_is_left_to_rank_0: "so some would wait; sizes may differ by at most one",
        "does not shuffle": (dealt(lambda length, epoch: list(range(length))),
            "in the order of the file; shuffle"),
        shuffles_after_dealing: "after the stop all 64 are read again",
        "counts from one": (lambda length, epoch, done, rank, n: [i + 1 for i in order(length, epoch)[done:][rank::n]],
            "is not a sequence; they are 0 to"),
        "every second epoch": (dealt(lambda length, epoch: order(length, epoch % 2)),
            "epochs 0 and 2 have the same order"),
        "seeds all later epochs alike": (dealt(lambda length, epoch: order(length, min(epoch, 5))),
            "epochs 5 and 6 have the same order"),
        "a number of this process": (dealt(lambda length, epoch: order(length, epoch + OF_THIS_PROCESS)),
            "this process has another order than that of rank 0"),
        shuffles_the_rest_anew: "After a second stop some are read twice",
        asks_rank_0: "every rank can compute it by itself",
    },
    "token_mean": {
        "own mean": (lambda total, y: total / count(y), "the mean of the ranks' means"),
        "trusts ddp": (lambda total, y: total / count_of_all(y),
            "3 times too small: DDP takes the mean over the ranks"),
        "counts rows": (lambda total, y: dist.get_world_size() * total / summed(torch.tensor(len(y))),
            "targets were counted, and"),
        "multiplies by own count": (lambda total, y: dist.get_world_size() * total * count(y) / count_of_all(y),
            "element [0] should be -0.0006768, not -0.0616"),
        "cuts the graph": (lambda total, y: torch.tensor(dist.get_world_size() * total.item() / count_of_all(y).item()),
            "the loss has no graph, so backward finds nothing"),
        "returns a number": (lambda total, y: dist.get_world_size() * total.item() / count_of_all(y).item(),
            "The loss should be one number with its graph, a tensor, not 2.04913272930996"),
        "a loss of its own without a token": (lambda total, y: dist.get_world_size() * total / tokens
            if (tokens := count_of_all(y)) and count(y) else torch.zeros((), requires_grad=True),
            "without a token return 0 * total"),
        gathers_all_targets: "a count is 8 bytes",
        marks_the_targets: "y was changed; leave it as it is",
    },
    "gain": {
        "linear": (lambda k, batch, noise: k, "that is k, the linear rule: it holds only far below the noise scale"),
        "square root": (lambda k, batch, noise: k**0.5, "that is the square root of k"),
        "upside down": (lambda k, batch, noise: (1 + noise / (k * batch)) / (1 + noise / batch),
            "that is the factor upside down: the larger batch has the larger rate"),
        "of the large batch": (lambda k, batch, noise: 1 / (1 + noise / (k * batch)),
            "that is the large batch's own factor; divide by the small one's"),
        "changed places": (lambda k, batch, noise: (1 + batch / noise) / (1 + k * batch / noise),
            "batch and noise have changed places"),
        "forgets the batch": (lambda k, batch, noise: (1 + noise) / (1 + noise / k),
            "k = 8, batch 4, noise 12: the factor should be 2.909, not 5.2"),
    },
    "rate_rule": {
        "keeps the rate": (lambda kind, base, k, step, updates: rate_after(updates // 10, kind, base, 1, step, updates),
            "that is the base itself; the rule is linear: k times"),
        "linear for all": (rated(lambda full, done, kind, base, k: base * k * done),
            "that is k times the base; the rule is the square root"),
        "swaps the rules": (rated(lambda full, done, kind, base, k: base * (k**0.5 if kind == "SGD" else k) * done),
            "that is the square root of k times the base; the rule is"),
        "no warm up": (lambda kind, base, k, step, updates: rate_after(1, kind, base, k, step, updates),
            "update 0 has the rate 0.4; begin near 0, at about 0.04"),
        "begins with nothing": (lambda kind, base, k, step, updates: rate_after(
            updates // 10, kind, base, k, step - 1, updates),
            "update 0 has the rate 0, so it learns nothing; begin with step + 1"),
        "always ten updates": (lambda kind, base, k, step, updates: rate_after(10, kind, base, k, step, updates),
            "the warm-up lasts 4 updates, and the rate of update 4 should be"),
        "half of the training": (
            lambda kind, base, k, step, updates: rate_after(updates // 2, kind, base, k, step, updates),
            "the warm-up lasts 10 updates, and the rate of update 10 should be"),
        # as Goyal et al. do
        "begins at the base": (rated(lambda full, done, kind, base, k: base + (full - base) * done),
            "begin near 0, at about 0.04"),
        "climbs in a curve": (rated(lambda full, done, *_: full * done**2), "climb in equal steps of 0.04"),
        asks_for_the_rate: "every rank can compute them by itself",
    },
    "token_weighted": {
        # transformers#34191
        "mean of means": (accumulated(lambda micro_batches: 1 / len(micro_batches), reduction="mean"),
            "the mean of the micro-batches' means"),
        "mean of rank means": (accumulated(lambda micro_batches: 1 / max(1, int(tokens_of(micro_batches)))),
            "the mean of the ranks' means"),
        "forgets that ddp divides": (times(lambda _: 1 / dist.get_world_size()),
            "3 times too small: DDP takes the mean over the ranks"),
        "counts padding": (accumulated(lambda micro_batches: 1 / sum(len(y) for _, y in micro_batches)),
            "768 targets were counted, and"),
        "gathers tokens": (accumulated(share_of_gathered_tokens), "and send counts, not tokens"),
        "divides by the micro batches too": (times(lambda micro_batches: 1 / len(micro_batches)),
            "4 times too small: that is the number of micro-batches"),
        "multiplies by the micro batches": (times(len), "4 times too large: that is the number of micro-batches"),
        "divides by nothing": (
            accumulated(lambda micro_batches: (all_tokens_of(micro_batches), dist.get_world_size())[1]),
            "the number of tokens divides the sum of the losses"),
        "becomes nan": (by_means(becomes_nan), "became nan: where a micro-batch has no token, its mean is 0/0"),
        "makes the step too": (accumulated(share_of_all, after=makes_the_step),
            "leave gradients only, a later step is the optimizer's"),
        "averages every micro batch": (accumulated(share_of_all, quiet=contextlib.nullcontext),
            "keep all but the last micro-batch inside no_sync"),
        one_large_batch: "the model was given 256 rows at once, and a micro-batch has 64",
        "skips empty micro batches": (accumulated(share_of_all, full_only=True),
            "also where a micro-batch has no token"),
    },
    "betrays": {
        "asks for equality": (first_beyond(lambda loss, eps: 0),
            "training A is right, in torch.float32: the first update that differs should be None, not 0"),
        "one limit for both": (first_beyond(lambda loss, eps: 1e-10),
            "training A is right, in torch.float32: the first update that differs should be None, not 0"),
        "never says so": (first_beyond(lambda loss, eps: math.inf),
            "training B is wrong, in torch.float32: the first update that differs "
            "should be 1, not None"),
        "counts updates from one": (lambda *given: None if to_the_right(*given) is None else to_the_right(*given) + 1,
            "training B is wrong, in torch.float32: the first update that differs should be 1, not 2"),
        "float32s eps for both": (first_beyond(lambda loss, eps: 1.2e-4 * loss),
            "and later ones are not: the first update that differs should be 7, not None"),
        "forgets the loss": (first_beyond(lambda loss, eps: 1000 * eps),
            "a loss of 4,000 rounds a thousand times as far as one of 4: the first update that differs "
            "should be None, not 0"),
        takes_nan_for_equal: "nan is not a rounding error: the first update that differs should be 5, not None",
        looks_for_larger_losses: "the first update that differs should be 1, not 11",
        where_it_is_largest: "the first update that differs should be 1, not 5",
        "takes update 0 for none": (lambda one, many, dtype: to_the_right(one, many, dtype) or None,
            "start alike: the first update that differs should be 0, not None"),
    },
}  # fmt: skip
RIGHT = {
    "diagnose": [compares(lambda read: read[0] == read[1])],
    "sharded_order": [
        dealt(tensor_of_indices),
        drawn_with(lambda epoch, rank: hash((7, epoch)) % 2**32),  # numbers have one hash in all processes
        goes_round_from_where_it_stood,
        as_a_generator,
    ],
    "token_mean": [adds_up_losses_too, gathers_small_counts],
    "gain": [lambda k, batch, noise: k * (batch + noise) / (k * batch + noise)],
    "rate_rule": [in_numpy],
    "token_weighted": [
        accumulated(gathered_share),
        by_means(scales_means_by_counts),
        # 1 / an integer tensor has seven digits
        accumulated(lambda micro_batches: dist.get_world_size() * (1 / all_tokens_of(micro_batches))),
    ],
    "betrays": [in_arrays, to_the_right],
}


class TestAnswers(AnswersOfRanks):
    lesson, checks, rejected, right = "05_same_science", checks, REJECTED, RIGHT
    world = 3  # does not divide 13, and means over it round
    solutions = {"sharded_order": "remaining", "rate_rule": "learning_rate", "token_weighted": "weighted_backward"}
