"""Checks of lesson 05: an order that survives a change of ranks, a loss that counts every token once, a learning rate,
which rank read what, and whether losses reveal the number of ranks.

Orders and rates need no communication, and their checks require that. The checks of a loss compute the right gradients
without communication, because rank r's data is drawn from a seed that contains r.
"""

import contextlib
import functools
import itertools
import random
from collections import Counter
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.data.distributed import DistributedSampler

from manyhands.checks import Wrong, exercise
from manyhands.checks.drawn import IGNORED, Watched, expect_token_mean, flat, generator, gradients, luck, seeded, sizes
from manyhands.checks.expect import (
    count,
    expect_equal,
    expect_number,
    expect_scalar,
    expect_traffic,
    expect_unchanged,
    number,
    plain,
)
from manyhands.checks.unspoilt import RANDOM_STATE, unspoilt
from manyhands.measure import wire

FINE, SAME, DISAGREE = "fine", "same order", "ranks disagree"


@exercise("A", "your share of what is left")
def sharded_order(answer, ranks=None):
    """`answer(length, epoch, done, rank, n)` lists what this rank still reads after `done` sequences of the epoch."""
    with wire.watch() as seen:
        for length in (1, 7, 12, 64, 101):
            for n in (1, 2, 3, 4, 8):
                shares = _shares(answer, length, 0, 0, n)
                _each_once(shares, [], length, f"{count(length, 'sequence')} on {count(n, 'rank')}")
        orders = [_shares(answer, 64, epoch, 0, 1)[0] for epoch in range(10)]
        if orders[0] == sorted(orders[0]):
            raise Wrong("the sequences come in the order of the file; shuffle them")
        for one, other in itertools.combinations(range(10), 2):
            if orders[one] == orders[other]:
                raise Wrong(f"epochs {one} and {other} have the same order; put the epoch into the seed")
        for length, epoch, done, n in (
            (64, 3, 32, 3), (101, 3, 48, 5), (101, 3, 48, 8), (13, 3, 8, 1), (24, 3, 12, 4), (64, 0, 0, 4),
            (64, 4, 17, 3), (64, 1, 63, 2), (64, 2, 64, 4), (64, 7, 1, 5),
        ):  # fmt: skip
            _goes_on(answer, length, epoch, done, n)
    if ranks and dist.is_initialized():
        of_all = [None] * ranks.world_size
        dist.all_gather_object(of_all, orders)
        if orders != of_all[0]:
            raise Wrong("this process has another order than that of rank 0: draw it from the epoch and nothing else")
    expect_traffic(seen, "the order is right", "every rank can compute it by itself", calls=0)


def _shares(answer, length, epoch, done, n):
    """Return every rank's list, each as if in a separate process: other random numbers, process id and clock."""
    shares, plain_hash = [], hash
    own = {
        "os.getpid": lambda: 1000 + rank, "time.time": lambda: 1e9 + 60 * rank, "time.time_ns": lambda: 10**18 + rank,
        # the hash of a text, alone or in a tuple, differs between Python processes
        "builtins.hash": lambda x: plain_hash(x) + rank * any(isinstance(it, (str, bytes)) for it in tree_leaves(x)),
    }  # fmt: skip
    with unspoilt(RANDOM_STATE), contextlib.ExitStack() as process:
        for name, function in own.items():
            process.enter_context(mock.patch(name, function))
        for rank in range(n):
            for seed in (torch.default_generator.manual_seed, np.random.seed, random.seed):
                seed(rank)
            shares.append(plain(list(answer(length, epoch, done, rank, n))))
    return shares


def _goes_on(answer, length, epoch, done, n):
    """Raise Wrong unless n ranks together read the rest of the epoch in its order, so that a second stop works too."""
    (order,) = _shares(answer, length, epoch, 0, 1)
    shares, case = _shares(answer, length, epoch, done, n), f"{length} sequences, {done} of them read"
    if done and sum(map(len, shares)) == length:
        raise Wrong(f"{case}: after the stop all {length} are read again; leave out the {done} that were read")
    _each_once(shares, [order[:done]], length, f"{case}, and the rest by {count(n, 'rank')}")
    for step in range(-(-(length - done) // n)):
        mine = sorted(share[step] for share in shares if step < len(share))
        wanted = sorted(order[done + step * n :][:n])
        if mine != wanted:
            raise Wrong(
                f"{case}: in step {step} {n} ranks read {mine}, and in the order of this epoch come {wanted}. After a "
                "second stop some are read twice: deal what is left as it lies"
            )


def _each_once(shares, before, length, case):
    """Raise Wrong unless the shares, with what was read before a stop, hold every sequence once, in equal numbers."""
    counts = Counter(i for share in before + shares for i in share)
    lost = [i for i in range(length) if not counts[i]]
    repeated = [i for i, times in counts.items() if times > 1]
    if foreign := [i for i in counts if i not in range(length) or isinstance(i, float)]:
        raise Wrong(f"{case}: {foreign[0]} is not a sequence; they are 0 to {length - 1}")
    if lost and repeated:
        raise Wrong(
            f"{case}: {len(lost)} lost (the first is {lost[0]}) and {len(repeated)} read twice; all ranks must cut one "
            "and the same order, and deal it like cards, so that what was read is the beginning of it"
        )
    for wrong, happened in ((repeated, "read twice"), (lost, "never read")):
        if wrong:
            raise Wrong(f"{case}: {len(wrong)} {happened} (the first is {wrong[0]})")
    sizes = list(map(len, shares))
    if max(sizes) - min(sizes) > 1:
        raise Wrong(f"{case}: the ranks read {sizes}, so some would wait; sizes may differ by at most one")


@exercise("B", "the token-weighted loss")
def token_mean(answer, ranks):
    """`answer(total, y)` returns the loss of which DDP's mean gradient is that of the mean over all tokens."""
    n = ranks.world_size
    for step in range(3):  # in the last one rank has no token
        empty = n - 1 if step == 2 and n > 1 else None
        batches = [_micro_batches(r, step, 1, empty == r, number=1, rows=64) for r in range(n)]
        x, y = batches[ranks.rank][0]
        ddp = DistributedDataParallel(_classifier())
        total = F.cross_entropy(ddp(x), y, ignore_index=IGNORED, reduction="sum")
        with wire.watch() as seen:
            loss = answer(total, y)
        if any(p.grad is not None for p in ddp.parameters()):
            raise Wrong("return the loss, and leave backward() to the check")
        expect_scalar(loss, "the loss", ": of a rank without a token, 0 / 0; divide by all ranks' count").backward()
        cure = "the loss must depend on `total`, or DDP's backward never runs; without a token return 0 * total"
        expect_token_mean(gradients(ddp, cure), _classifier, batches)
        expect_traffic(seen, "the gradients are right", "a count is 8 bytes", calls=2, payload=y.nbytes - 1)


@exercise("C", "how much further")
def gain(answer, ranks=None):
    """`answer(k, batch, noise)` is the factor by which the best rate grows from `batch` to k * batch sequences."""
    for k, batch, noise in (
        (8, 4, 12.0), (8, 4, 0.5), (2, 64, 3000.0), (1, 16, 40.0),
        (luck(1).randrange(3, 30), luck(2).randrange(2, 50), luck(3).uniform(5, 500)),
    ):  # fmt: skip
        full = (1 + noise / batch) / (1 + noise / (k * batch))
        slips = {
            "that is k, the linear rule: it holds only far below the noise scale": k,
            "that is the square root of k": k**0.5,
            "that is the factor upside down: the larger batch has the larger rate": 1 / full,
            "that is the large batch's own factor; divide by the small one's": 1 / (1 + noise / (k * batch)),
            "batch and noise have changed places": [x := (1 + batch / noise) / (1 + k * batch / noise), 1 / x],
        }
        expect_number(number(answer(k, batch, noise)), full, f"k = {k}, batch {batch}, noise {noise:.4g}: the factor",
                      slips=slips if k > 1 else None, rel=1e-6)  # fmt: skip


@exercise(4, "the rule, with warm-up")
def rate_rule(answer, ranks=None):
    """`answer(kind, base, k, step, updates)` is the learning rate of an update: linear or square root, with warm-up."""
    with wire.watch() as seen:
        for kind, base, k, updates in (
            ("SGD", 0.1, 4, 100), ("Adam", 0.001, 4, 100), ("SGD", 0.02, 9, 40), ("Adam", 0.3, 9, 250),
            ("SGD", 1.0, 1, 100), ("SGD", 0.1, 4, 5),  # a tenth of 5 is less than one update
            *((kind, luck(1).uniform(0.01, 0.2), *sizes(2, 2, least=5, most=90)) for kind in ("SGD", "Adam")),
        ):  # fmt: skip
            rates = [number(answer(kind, base, k, step, updates)) for step in range(updates)]
            _judge_schedule(rates, kind, base, k)
    expect_traffic(seen, "the rates are right", "every rank can compute them by itself", calls=0)


def _judge_schedule(rates, kind, base, k):
    """Judge the rates of all updates of one training: first those after the warm-up, then the warm-up."""
    updates, full = len(rates), base * (k if kind == "SGD" else k**0.5)
    warm_up = max(1, updates // 10)
    case = f"{kind}, base {base:g}, k = {k}, {updates} updates: "
    rule = "the rule is linear: k times" if kind == "SGD" else "the rule is the square root: k**0.5 times"
    slips = {
        f"that is the base itself; {rule}": base,
        f"that is k times the base; {rule}": base * k,
        f"that is the square root of k times the base; {rule}": base * k**0.5,
        f"that is the base divided by k; {rule}": base / k,
    }
    expect_number(rates[-1], full, f"{case}the last rate", slips=slips, rel=1e-6)
    for step in range(warm_up, updates):
        what = f"{case}the warm-up lasts {warm_up} updates, and the rate of update {step}"
        expect_number(rates[step], full, what, rel=1e-6)
    if rates[0] <= 0:
        raise Wrong(f"{case}update 0 has the rate {rates[0]:g}, so it learns nothing; begin with step + 1")
    if rates[0] > 2 * full / warm_up:
        raise Wrong(f"{case}update 0 has the rate {rates[0]:.4g}; begin near 0, at about {full / warm_up:.4g}")
    climbs = [b - a for a, b in itertools.pairwise(rates[:warm_up])]
    if climbs and max(climbs) - min(climbs) > 0.01 * full:
        first = ", ".join(f"{rate:.3g}" for rate in rates[:4])
        raise Wrong(f"{case}the first rates are {first}, ...; climb in equal steps of {full / warm_up:.3g}")


@exercise(1, "find the set_epoch bug")
def diagnose(answer, ranks=None):
    """`answer(read, length)` says "fine", "same order" or "ranks disagree"; read[epoch][rank] lists indices."""
    one_list, lacks = "every rank reads the same list in every epoch", "one rank is in another epoch than the rest"
    for kind, n, length, why, more in (
        (SAME, 4, 12, one_list, {}),
        (FINE, 4, 12, "each epoch holds every sequence, in an order of its own", {}),
        (DISAGREE, 4, 12, f"in each epoch {lacks}, so an epoch lacks some sequences", {}),
        (DISAGREE, 4, 40, f"from epoch 2 on {lacks}, so an epoch lacks some sequences", {"seed": 7, "since": 2}),
        (DISAGREE, 4, 40, f"in epoch 1 alone {lacks}, so that epoch lacks some sequences",
         {"seed": 9, "since": 1, "until": 2, "ahead": luck(6).randint(1, 2)}),
        (FINE, 4, 13, "the library deals 3 sequences twice, so that all have as many; none is lost", {"seed": 3}),
        (FINE, 1, 12, "one rank reads every sequence in every epoch. Look at the order too", {}),
        (SAME, 1, 12, one_list, {"seed": 2}),
    ):  # fmt: skip
        read = recorded(kind, n, length, **more)
        run = f"a run of {len(read)} epochs over {count(length, 'sequence')} on {count(n, 'rank')} ({why})"
        expect_equal(answer([[list(mine) for mine in epoch] for epoch in read], length), kind, run)


def recorded(kind, n, length, seed=0, num_epochs=4, since=0, until=None, ahead=-1):
    """Return DistributedSampler's indices in a training loop that is FINE, forgot set_epoch or called it unevenly.

    In a DISAGREE run, the rank `ahead` (-1: the last one) is one epoch ahead in epochs [since:until].
    Returns read[epoch][rank], a list of indices.
    """
    samplers = [DistributedSampler(range(length), n, r, shuffle=True, seed=seed) for r in range(n)]
    read, uneven = [], range(num_epochs)[since:until]
    for epoch in range(num_epochs):
        for rank, sampler in enumerate(samplers):
            if kind != SAME:  # one rank that is an epoch ahead is enough to disagree
                sampler.set_epoch(epoch + (kind == DISAGREE and rank == ahead % n and epoch in uneven))
        read.append([list(sampler) for sampler in samplers])
    return read


def three_runs():
    """Return three recorded runs of eight epochs over 240 sequences on four ranks, under neutral names."""
    return {
        name: recorded(kind, 4, 240, num_epochs=8) for name, kind in zip("ABC", (SAME, DISAGREE, FINE), strict=True)
    }


@exercise(2, "token-weighted loss, with accumulation")
def token_weighted(answer, ranks):
    """`answer(ddp, micro_batches)` leaves the gradient of the mean over all tokens of all ranks and micro-batches."""
    n = ranks.world_size
    for step, fewest in ((0, 1), (1, 0), (2, 0)):  # then micro-batches, then a rank, with no token
        empty = n - 1 if step == 2 and n > 1 else None
        # one micro-batch more than ranks, so that a wrong factor shows which of the two it comes from
        batches = [_micro_batches(r, step, fewest, empty == r, number=n + 1, rows=64) for r in range(n)]
        model, mine = Watched(_classifier()), batches[ranks.rank]
        ddp = DistributedDataParallel(model)
        with wire.watch() as seen:
            answer(ddp, mine)
        found = gradients(ddp, "run a backward pass also where a micro-batch has no token, or other ranks wait")
        cure = ": leave gradients only, a later step is the optimizer's"
        expect_unchanged(flat(ddp.parameters()), flat(_classifier().parameters()), "a weight", cure)
        expect_token_mean(found, _classifier, batches)
        model.expect_one_at_a_time(len(mine[0][0]), "the gradients are right")
        # a count may be sent in any way: it is far smaller than a rank's tokens
        cure = "keep all but the last micro-batch inside no_sync, and send counts, not tokens"
        tokens = sum(y.nbytes for _, y in mine)
        expect_traffic(seen, "the gradients are right", cure, payload=found.nbytes + tokens - 1)


def _classifier():
    return seeded(lambda: nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 5)).double(), 5)


def _micro_batches(rank, step, fewest, empty, number, rows):
    """Return `number` micro-batches (x [rows, 6], y [rows]) of a rank, with at least `fewest` targets or none."""
    draw, batches = generator(100 * step + rank), []
    for i in range(number):
        x = torch.randn(rows, 6, generator=draw, dtype=torch.float64)
        y = torch.randint(5, (rows,), generator=draw)
        kept = fewest if i == 1 else int(torch.randint(1, rows + 1, (), generator=draw))
        y[0 if empty else kept :] = IGNORED
        batches.append((x, y))
    return batches


LIMIT = 1000  # the lesson's tolerance for rounding, in units of eps, the relative rounding of one operation
ROUNDING, A_FAULT = 100, 1e4  # well below, well above


@functools.cache
def three_trainings(num_ranks=4, updates=12):
    """Return {"A", "B", "C": (losses on one rank, losses on `num_ranks`, dtype)}; one reveals the rank count."""
    kinds = {"A": (torch.float32, True), "B": (torch.float32, False), "C": (torch.float64, True)}
    return {
        name: (_train(1, updates, dtype, weigh), _train(num_ranks, updates, dtype, weigh), dtype)
        for name, (dtype, weigh) in kinds.items()
    }


def _train(n, updates, dtype, weigh, classes=6, width=8, rows=960):
    """Return the losses per row of a linear classifier trained on n shares; `weigh` False: mean of their means."""
    generator = torch.Generator().manual_seed(5)
    truth_DC = torch.randn(width, classes, generator=generator, dtype=torch.float64)
    w_DC = torch.zeros(width, classes, dtype=dtype)
    often_B, losses = torch.linspace(1.0, 0.2, rows), []
    for _ in range(updates):
        x_BD = torch.randn(rows, width, generator=generator, dtype=torch.float64)
        noise_BC = torch.randn(rows, classes, generator=generator, dtype=torch.float64)
        y_B = (x_BD @ truth_DC + noise_BC).argmax(1)
        counts_B = torch.rand(rows, generator=generator) < often_B  # each share has fewer targets than the one before
        gradient_DC, total = torch.zeros_like(w_DC), torch.zeros((), dtype=dtype)
        for x_bD, y_b, counts_b in zip(x_BD.chunk(n), y_B.chunk(n), counts_B.chunk(n), strict=True):
            x_bD, y_b = x_bD[counts_b].to(dtype), y_b[counts_b]
            logs_bC = (x_bD @ w_DC).log_softmax(1)
            wanted_bC = torch.nn.functional.one_hot(y_b, classes).to(dtype)
            share = int(counts_B.sum()) if weigh else n * len(y_b)
            gradient_DC += x_bD.T @ (logs_bC.exp() - wanted_bC) / share
            total -= (logs_bC * wanted_bC).sum(1).cumsum(0)[-1]  # one by one, which rounds most
        losses.append((total / int(counts_B.sum())).item())
        w_DC -= 0.5 * gradient_DC
    return losses


@exercise(3, "spot the rank count")
def betrays(answer, ranks=None):
    """`answer(one, many, dtype)` is the first update whose loss differs by more than rounding errors, or None."""
    for one, many, dtype, wanted, why in _pairs_of_losses():
        expect_equal(answer(list(one), list(many), dtype), wanted, f"{why}: the first update that differs")


def _pairs_of_losses():
    """Yield (losses on one rank, on many, dtype, first update that reveals the rank count or None, why)."""
    for name, (one, many, dtype) in three_trainings().items():
        limit = LIMIT * torch.finfo(dtype).eps
        wanted = next((i for i, (a, b) in enumerate(zip(one, many, strict=True)) if abs(a - b) > limit * a), None)
        yield one, many, dtype, wanted, f"training {name} is {'right' if wanted is None else 'wrong'}, in {dtype}"
    falling, nan = [4.0 * 0.97**step for step in range(30)], float("nan")
    for dtype in (torch.float32, torch.float64):
        eps = torch.finfo(dtype).eps
        for off, wanted, why in (  # the error of each loss in eps
            (lambda i: (-1) ** i * ROUNDING * i / 30, None, f"a difference that grows to {ROUNDING} eps is rounding"),
            (lambda i: A_FAULT * (i == 7), 7, f"one loss is off by {A_FAULT:g} eps, and later ones are not"),
            (lambda i: A_FAULT, 0, "the very first losses differ: they did not start alike"),
            (lambda i: -A_FAULT * (i >= 3), 3, f"the losses of many ranks are too small by {A_FAULT:g} eps"),
            (lambda i: nan if i >= 5 else 0, 5, "nan is not a rounding error"),
        ):
            yield falling, [a * (1 + eps * off(i)) for i, a in enumerate(falling)], dtype, wanted, f"in {dtype} {why}"
        large = [1000 * a for a in falling]
        drift = [a * (1 + eps * ROUNDING) for a in large]
        yield large, drift, dtype, None, f"in {dtype} a loss of 4,000 rounds a thousand times as far as one of 4"
