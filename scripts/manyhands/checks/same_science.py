"""Checks of lesson 05: an order that survives a change of ranks, a loss that counts every token once, a learning rate,
who read what, and whether losses betray on how many ranks they were made.

Orders and rates need no message between ranks, and the checks say so. Those of a loss compute the right gradients without
communicating, as the data of rank r is drawn from a seed that says r.
"""

import functools
import itertools
import operator
import random
from collections import Counter
from collections.abc import Iterable
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

from manyhands.checks import Wrong, exercise
from manyhands.checks.values import number, plain, shown
from manyhands.measure import wire

CLOSE = 1e-6  # of the largest: a number divided by a count is a float32, and right all the same
FINE, SAME, DISAGREE = "fine", "same order", "ranks disagree"
LUCKY = 880  # a seed of which rank 0 of 4 reads the same one of 4 sequences in 4 epochs
IGNORED = -100  # a target that is padding: F.cross_entropy leaves it out


# ---- build A ----


@exercise("A", "your share of what is left")
def sharded_order(answer, ranks=None):
    """`answer(length, epoch, done, rank, n)` lists what this rank still reads after `done` sequences of the epoch."""
    with wire.watch() as seen:
        for length in (1, 2, 7, 12, 13, 64, 101):
            for n in (1, 2, 3, 4, 8):
                _one_epoch(answer, length, n)
        for length, first_n, then_n in [(64, 4, 3), (101, 4, 5), (101, 3, 8), (13, 8, 1), (24, 1, 4)]:
            _resumed(answer, length, first_n, then_n)
        for epoch, done, n in [(3, 16, 4), (4, 17, 3), (1, 63, 2), (2, 64, 4), (7, 1, 5)]:
            _in_order(answer, 64, epoch, done, n)
        orders = _fresh(answer)
    if seen.calls:
        raise Wrong(f"the order is right, but it took {len(seen.calls)} messages; every rank can compute it by itself")
    if ranks is not None:
        _same_everywhere(orders[0], ranks)


def _shares(answer, length, epoch, done, n):
    """Every rank's list, each as if in a process of its own: with other random numbers, another number and clock."""
    shares = []
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        for rank in range(n):
            torch.manual_seed(rank)
            np.random.seed(rank)
            random.seed(rank)
            number, clock = mock.Mock(return_value=100 + rank), mock.Mock(return_value=1e9 + rank)
            with mock.patch("os.getpid", number), mock.patch("time.time", clock):
                shares.append(_indices(answer(length, epoch, done, rank, n)))
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
    return shares


def _indices(given):
    """What came back as a list of whole numbers; raises Wrong if it is something else."""
    if given is None:
        raise Wrong("nothing came back; return a list of indices, also if it is empty")
    if isinstance(given, (str, bytes, dict, set, frozenset)) or not isinstance(given, Iterable):
        raise Wrong(f"return a list of indices, not {plain(given)}")
    if isinstance(given, (torch.Tensor, np.ndarray)):
        given = given.tolist()
    try:
        given = list(given)
    except TypeError:  # a single number, as a tensor may be
        raise Wrong(f"return a list of indices, not {plain(given)}") from None
    indices = []
    for one in given:
        try:
            indices.append(operator.index(one))
        except TypeError:
            raise Wrong(f"the list holds {plain(one)}; return indices, which are whole numbers") from None
    return indices


def _one_epoch(answer, length, n, epoch=0):
    shares = _shares(answer, length, epoch, 0, n)
    case = f"{length} sequence{'s' * (length > 1)} on {n} rank{'s' * (n > 1)}"
    _each_once(shares, range(length), case)
    _evenly(shares, case)
    return shares


def _evenly(shares, case):
    sizes = [len(share) for share in shares]
    if max(sizes) - min(sizes) > 1:
        raise Wrong(f"{case}: the ranks read {sizes}, so some wait for others; sizes may differ by one")


def _resumed(answer, length, first_n, then_n):
    """Some steps on first_n ranks, a stop, the rest on then_n."""
    epoch, steps = 3, max(1, length // first_n // 2)
    before = [share[:steps] for share in _shares(answer, length, epoch, 0, first_n)]
    done = sum(len(share) for share in before)
    after = _shares(answer, length, epoch, done, then_n)
    case = f"{length} sequences, {done} of them read by {first_n} ranks and the rest by {then_n}"
    if sum(len(share) for share in after) == length:
        raise Wrong(f"{case}: after the stop all {length} are read again; leave out the {done} that were read")
    _each_once(before + after, range(length), case)
    _evenly(after, case)


def _in_order(answer, length, epoch, done, n):
    """What n ranks read together, step by step, goes on in the epoch's one order: then one may stop as often as one likes."""
    (order,) = _shares(answer, length, epoch, 0, 1)
    shares = _shares(answer, length, epoch, done, n)
    for step in range(-(-(length - done) // n)):
        mine = sorted(share[step] for share in shares if step < len(share))
        wanted = sorted(order[done + step * n :][:n])
        if mine != wanted:
            raise Wrong(
                f"{length} sequences, {done} of them read: in step {step} {n} ranks read {mine}, and in the order of this "
                f"epoch come {wanted}. After a second stop some are read twice: deal what is left as it lies, on any n"
            )


def _fresh(answer):
    """The orders of many epochs on 64 sequences, all of them shuffled."""
    first, second = (_one_epoch(answer, 64, 4, epoch) for epoch in (0, 1))
    if first == second:
        raise Wrong("epochs 0 and 1 have the same order; the epoch belongs into the seed")
    if sum(first, []) == sorted(sum(first, [])) or all(share == sorted(share) for share in first):
        raise Wrong("the sequences come in the order of the file; shuffle them")
    moved = sum(a != b for a, b in zip(map(set, first), map(set, second), strict=True))
    if not moved:
        raise Wrong("every rank reads the same sequences in every epoch; shuffle before you share out")
    epochs = [*range(16), 25, 32, 50, 64, 100, 128, 256, 1000, 1024]
    orders = [_shares(answer, 64, epoch, 0, 1)[0] for epoch in epochs]
    for i, (epoch, order) in enumerate(zip(epochs, orders, strict=True)):
        _each_once([order], range(64), f"epoch {epoch}, 64 sequences on 1 rank")
        if (step := _stride(order)) is not None:
            raise Wrong(f"in epoch {epoch} most sequences come {step} of 64 places after the one before; shuffle them")
        for earlier, other in zip(epochs[:i], orders, strict=False):
            place = {sequence: at for at, sequence in enumerate(other)}
            if order == other:
                raise Wrong(f"epochs {earlier} and {epoch} have the same order; shuffle anew in every epoch")
            if _stride([place[sequence] for sequence in order]) is not None:
                raise Wrong(
                    f"epoch {epoch} has the order of epoch {earlier}, begun elsewhere; shuffle anew in every epoch"
                )
    return orders


def _stride(order):
    """By how much an order goes on, cyclically, if it does so at every fourth place or more; None if it is shuffled."""
    steps = Counter((b - a) % len(order) for a, b in itertools.pairwise(order))
    step, times = steps.most_common(1)[0]
    return step if 4 * times >= len(order) else None


def _same_everywhere(order, ranks):
    """Raises Wrong where another rank's process computes another order from the same arguments."""
    orders = [None] * ranks.world_size
    dist.all_gather_object(orders, order)
    for r, other in enumerate(orders):
        if other != orders[0]:
            raise Wrong(
                f"for the same arguments rank 0 computes an order that begins with {orders[0][:3]}, and rank {r} one that "
                f"begins with {other[:3]}: take nothing into the seed that differs between processes"
            )


def _are(found):
    return f"{len(found)} {'are' if len(found) > 1 else 'is'}"


def _each_once(shares, wanted, case):
    counts = Counter(i for share in shares for i in share)
    lost = [i for i in wanted if not counts[i]]
    repeated = [i for i, times in counts.items() if times > 1]
    foreign = [i for i in counts if i not in wanted]
    if foreign:
        raise Wrong(f"{case}: {foreign[0]} is no sequence; they are 0 to {len(wanted) - 1}")
    if lost and repeated:
        raise Wrong(
            f"{case}: {_are(lost)} lost (the first is {lost[0]}) and {len(repeated)} read twice; all ranks must cut "
            "one and the same order, and deal it like cards, so that what was read is the beginning of it"
        )
    if repeated:
        raise Wrong(f"{case}: {_are(repeated)} read twice (the first is {repeated[0]})")
    if lost:
        raise Wrong(f"{case}: {_are(lost)} never read (the first is {lost[0]})")


# ---- build B ----


@exercise("B", "the token-weighted loss")
def token_mean(answer, ranks):
    """`answer(total, y)` returns the loss of which DDP's mean gradient is that of the mean over all tokens of all ranks."""
    n = ranks.world_size
    for step in range(3):  # in the last one rank has no token
        empty = n - 1 if step == 2 and n > 1 else None
        batches = [_micro_batches(r, step, 1, empty == r, count=1, rows=64) for r in range(n)]
        expected = _token_mean_gradient([batch for part in batches for batch in part])
        x, y = batches[ranks.rank][0]
        ddp, targets = DistributedDataParallel(_classifier()), y.clone()
        total = F.cross_entropy(ddp(x), y, ignore_index=IGNORED, reduction="sum")
        with wire.watch() as seen:
            loss = _scalar(answer(total, targets))
        if not torch.equal(targets, y):
            raise Wrong("the targets were changed; count them, and leave them as they are")
        loss.backward()
        _judge_gradient(_numbers(p.grad for p in ddp.parameters()), expected, batches, n)
        if seen.payload_bytes() >= y.nbytes or len(seen.calls) > 2:
            raise Wrong(
                f"the gradients are right, but {seen.payload_bytes()} bytes were handed over (calls: {len(seen.calls)}); a count "
                "is one integer of 8"
            )


def _scalar(given):
    """What came back as a loss that backward can start from; raises Wrong if it is something else."""
    if not isinstance(given, torch.Tensor):
        raise Wrong(f"return the loss as a tensor, not {plain(given)}")
    if given.numel() != 1:
        raise Wrong(f"return one number; yours has the shape {list(given.shape)}")
    if not given.requires_grad:
        raise Wrong(
            "backward has nothing to go back to: the loss was cut off from `total`, by item(), float() or detach()"
        )
    return given.sum()


# ---- build C ----


@exercise("C", "the rule, with warm-up")
def rate_rule(answer, ranks=None):
    """`answer(kind, base, k, step, updates)` is the learning rate of an update: linear or square root, with warm-up."""
    cases = [
        ("SGD", 0.1, 4, 100),
        ("Adam", 0.001, 4, 100),
        ("SGD", 0.02, 9, 40),
        ("Adam", 0.3, 9, 250),
        ("SGD", 1.0, 1, 100),
    ]
    with wire.watch() as seen:
        for kind, base, k, updates in cases:
            _one_schedule(answer, kind, base, k, updates)
        for updates in (1, 5):  # a tenth of it is less than one
            _rate(answer, "SGD", 0.1, 4, 0, updates)
    if seen.calls:
        raise Wrong(
            f"the rates are right, but it took {len(seen.calls)} messages; every rank can compute them by itself"
        )


def _rate(answer, kind, base, k, step, updates):
    case = f'learning_rate("{kind}", {base:g}, {k}, {step}, {updates})'
    try:
        given = answer(kind, base, k, step, updates)
    except ZeroDivisionError:
        raise Wrong(
            f"a division by zero in {case}: a tenth of {updates} is less than one update; warm up for at least 1"
        ) from None
    return number(given, f"a learning rate from {case}")


def _one_schedule(answer, kind, base, k, updates):
    """The rates of all updates of one training: those after the warm-up first, then how they climb."""
    rates = [_rate(answer, kind, base, k, step, updates) for step in range(updates)]
    warm_up, full = updates // 10, base * (k if kind == "SGD" else k**0.5)
    case = f"{kind}, base {base:g}, k = {k}, {updates} updates"
    last = rates[-1]
    if not _near(last, full):
        rule = "linear: k times" if kind == "SGD" else "the square root: k**0.5 times"
        others = {
            "the base itself": base,
            "k times the base": base * k,
            "the square root of k times": base * k**0.5,
        }
        others |= {"the base divided by k": base / k}
        found = next((f" ({name})" for name, rate in others.items() if _near(last, rate)), "")
        raise Wrong(f"{case}: the last rate is {last:.4g}{found}; the rule is {rule}, {full:.4g}")
    late = next((step for step in range(warm_up + 1, updates) if not _near(rates[step], full)), None)
    if late is not None:
        raise Wrong(
            f"{case}: the warm-up lasts {warm_up} updates, and update {late} has the rate {rates[late]:.4g} and not {full:.4g}"
        )
    if rates[0] <= 0:
        raise Wrong(f"{case}: update 0 has the rate {rates[0]:g}, so it learns nothing; begin with step + 1")
    if _near(rates[0], full):
        raise Wrong(f"{case}: update 0 has the full rate {full:.4g} already; climb to it over {warm_up} updates")
    if rates[0] > 2 * full / warm_up:
        raise Wrong(
            f"{case}: update 0 has the rate {rates[0]:.4g}; begin near 0, at about {full / warm_up:.4g}, and climb from there"
        )
    climbs = [b - a for a, b in itertools.pairwise(rates[:warm_up])]
    if max(climbs) - min(climbs) > 0.01 * full:
        raise Wrong(
            f"{case}: the first rates are {', '.join(f'{rate:.3g}' for rate in rates[:4])}, ...; climb in equal steps of "
            f"{full / warm_up:.3g}"
        )
    if rates[warm_up - 1] < 0.85 * full:
        raise Wrong(
            f"{case}: update {warm_up - 1} has the rate {rates[warm_up - 1]:.4g}; by then it should be {full:.4g}"
        )


def _near(a, b):
    return abs(a - b) <= 1e-6 * abs(b)


# ---- exercise 1 ----


@exercise(1, "set_epoch from a histogram")
def diagnose(answer, ranks=None):
    """`answer(read, length)` says "fine", "same order" or "ranks disagree"; read[epoch][rank] lists indices."""
    for kind, n, length, more in [
        (SAME, 4, 12, {}),
        (FINE, 4, 12, {}),
        (DISAGREE, 4, 12, {}),
        (DISAGREE, 4, 40, {"seed": 7, "since": 2}),  # the first two epochs are right
        (
            FINE,
            4,
            13,
            {"seed": 3},
        ),  # the library repeats three, so that every rank has as many: no fault of the loop
        (DISAGREE, 2, 40, {"seed": 1}),
        (FINE, 1, 12, {}),  # one rank reads everything, always: only the order can differ
        (SAME, 1, 12, {"seed": 2}),
        (SAME, 3, 13, {"seed": 5}),
        (DISAGREE, 3, 13, {}),
        (DISAGREE, 4, 40, {"seed": 2, "odd": 0}),
        (DISAGREE, 4, 40, {"seed": 3, "odd": 1}),
        (DISAGREE, 4, 40, {"seed": 4, "odd": 2, "since": 1, "until": 2}),  # and the last two are
        (
            FINE,
            4,
            4,
            {"seed": LUCKY},
        ),  # by chance rank 0 reads the same in every epoch, and the others do not
    ]:
        since = more.get("since", 0)
        read = recorded(kind, n, length, **more)
        given = answer([[list(mine) for mine in epoch] for epoch in read], length)
        if not isinstance(given, str) or given not in (FINE, SAME, DISAGREE):
            raise Wrong(f'return "{FINE}", "{SAME}" or "{DISAGREE}", not {plain(given)}')
        if given == kind:
            continue
        run = f"a run of {len(read)} epochs over {length} sequences on {n} rank{'s' * (n > 1)}"
        if kind == FINE and n == 1:
            raise Wrong(
                f'{run} is fine, not "{given}": one rank reads every sequence in every epoch. Look at the order too'
            )
        if kind == FINE and length == n:
            raise Wrong(
                f'{run} is fine, not "{given}": rank 0 reads the same in every epoch by chance, and the others do not'
            )
        if kind == FINE and length % n:
            raise Wrong(
                f'{run} is fine, not "{given}": {-length % n} sequences are read twice in each epoch, so that all ranks '
                "have as many, but none is lost"
            )
        why = {
            FINE: "each epoch holds every sequence, in an order of its own",
            SAME: "every rank reads the same list in every epoch",
            DISAGREE: f"from epoch {since} on one rank is in another epoch than the rest, so an epoch lacks some sequences"
            if "until" not in more
            else f"in epoch {since} one rank is in another epoch than the rest, so this epoch lacks some sequences",
        }[kind]
        raise Wrong(f'{run} is "{kind}", not "{given}": {why}')


def recorded(kind, n, length, seed=0, num_epochs=4, since=0, until=None, odd=-1):
    """What DistributedSampler handed out in a training loop that is FINE, or forgot set_epoch, or called it unevenly.

    In a run that is DISAGREE rank `odd` (-1: the last) is one epoch ahead from epoch `since` on, before epoch `until`.
    Returns read[epoch][rank], a list of indices.
    """
    samplers = [DistributedSampler(range(length), n, r, shuffle=True, seed=seed) for r in range(n)]
    uneven = range(since, num_epochs if until is None else until)
    read = []
    for epoch in range(num_epochs):
        for rank, sampler in enumerate(samplers):
            if kind != SAME:  # a rank that counts one more is enough to disagree
                ahead = kind == DISAGREE and rank == odd % n and epoch in uneven
                sampler.set_epoch(epoch + ahead)
        read.append([list(sampler) for sampler in samplers])
    return read


def three_runs():
    """Three recorded runs of eight epochs over 240 sequences on four ranks, under names that do not say which is which."""
    return {
        name: recorded(kind, 4, 240, num_epochs=8) for name, kind in zip("ABC", (SAME, DISAGREE, FINE), strict=True)
    }


# ---- exercise 2 ----


@exercise(2, "token-weighted loss, with accumulation")
def token_weighted(answer, ranks):
    """`answer(ddp, micro_batches)` leaves the gradient of the mean over all tokens of all ranks and micro-batches."""
    n = ranks.world_size
    for step, fewest in ((0, 1), (1, 0), (2, 0)):  # then micro-batches, then a whole rank, without a token
        empty = ranks.world_size - 1 if step == 2 and n > 1 else None
        # one micro-batch more than ranks: a factor that is wrong says which of the two it comes from
        batches = [_micro_batches(r, step, fewest, empty == r, count=n + 1) for r in range(n)]
        expected = _token_mean_gradient([batch for part in batches for batch in part])
        ddp = DistributedDataParallel(_classifier())
        mine, rows = batches[ranks.rank], []
        ddp.module.register_forward_hook(lambda module, given, made, rows=rows: rows.append(len(given[0])))
        with wire.watch() as seen:
            answer(ddp, [(x.clone(), y.clone()) for x, y in mine])
        if any(p.grad is None for p in ddp.parameters()):
            raise Wrong(
                "some gradients are None: run a backward pass for each micro-batch, also where a micro-batch has no token, "
                "else the other ranks wait for this one"
            )
        if not torch.equal(_numbers(ddp.parameters()), _numbers(_classifier().parameters())):
            raise Wrong("the weights were changed; leave gradients only, a later step is the optimizer's")
        given = _numbers(p.grad for p in ddp.parameters())
        _judge_gradient(given, expected, batches, n)
        largest = max(len(x) for x, _ in mine)
        if max(rows, default=0) > largest:
            raise Wrong(f"right, but the model was given {max(rows)} rows at once, and a micro-batch has {largest}")
        sent, once = seen.payload_bytes(), given.nbytes
        if sent >= 2 * once:  # a count may travel as it likes, it is far smaller
            raise Wrong(
                f"the gradients are right, but {sent} bytes were handed over where {once} and a count are enough: keep all "
                "but the last micro-batch inside no_sync"
            )


def _judge_gradient(given, expected, batches, n):
    if _same(given, expected):
        return
    if not given.isfinite().all():
        raise Wrong(
            f"the gradients became nan: where a {'micro-batch' if len(batches[0]) > 1 else 'rank'} has no token, its mean is "
            "0/0; divide its sum by the number of tokens of all ranks"
        )
    parts = [part for part in batches if any((y != IGNORED).any() for _, y in part)]
    counts = [sum(int((y != IGNORED).sum()) for _, y in part) for part in batches]
    per_rank = sum(_token_mean_gradient(part) for part in parts) / n
    if n > 1 and _same(given, per_rank):
        raise Wrong(
            f"that is the mean of the ranks' means: the ranks have {counts} tokens, and a token of a rank with few counts "
            "more than one of a rank with many"
        )
    every = [batch for part in batches for batch in part if (batch[1] != IGNORED).any()]
    means = sum(_token_mean_gradient([batch]) for batch in every) / sum(len(part) for part in batches)
    if _same(given, means):
        raise Wrong(
            "that is the mean of the micro-batches' means: a token of a short micro-batch counts more than one of a long"
        )
    factor = (given @ expected / (expected @ expected)).item()
    if factor and _same(given / factor, expected):
        raise Wrong(_wrong_factor(factor, batches, n))
    raise Wrong(
        f"the gradients are off by {_apart(given, expected):.2g} from those of the mean over all tokens, the largest of "
        f"which is {expected.abs().max().item():.2g}"
    )


def _wrong_factor(factor, batches, n):
    """What to say of gradients that are right but for one factor."""
    every = [y for part in batches for _, y in part]
    rows, tokens = sum(len(y) for y in every), sum(int((y != IGNORED).sum()) for y in every)
    m = len(batches[0])
    reasons = [
        (n, "DDP takes the mean over the ranks, and the count is that of all ranks"),
        (1 / n, "DDP takes the mean over the ranks, and the count is that of all ranks; multiply the loss by the number of ranks"),
        (m, "that is the number of micro-batches; divide by the number of tokens, and by nothing else"),
        (1 / m, "that is the number of micro-batches; their sums add up, and the number of tokens divides them"),
        (tokens / rows, f"{rows} targets were counted, and {tokens} of them are not -100"),
        (tokens / rows / n, f"{rows} targets were counted, and {tokens} of them are not -100; and DDP takes the mean over the ranks"),
        (tokens, "the number of tokens divides the sum of the losses"),
        (-1, "their sign is wrong"),
    ]  # fmt: skip
    why = next((why for usual, why in reasons if usual != 1 and abs(factor / usual - 1) < 1e-5), "all of them alike")
    if factor < 0:
        return f"the gradients are {factor:.4g} times what they should be: {why}"
    size = f"{factor:.4g} times too large" if factor > 1 else f"{1 / factor:.4g} times too small"
    return f"the gradients are {size}: {why}"


def _classifier():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 5)).double()


def _micro_batches(rank, step, fewest, empty, count, rows=8):
    """`count` micro-batches (x [rows, 6], y [rows]) of a rank, with `fewest` or more targets each; all padding if `empty`."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    batches = []
    for i in range(count):
        x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
        y = torch.randint(5, (rows,), generator=generator)
        kept = fewest if i == 1 else int(torch.randint(1, rows + 1, (), generator=generator))
        y[0 if empty else kept :] = IGNORED
        batches.append((x, y))
    return batches


def _token_mean_gradient(batches):
    """The gradient of the mean over all tokens of these micro-batches, in one process."""
    model = _classifier()
    total = sum(F.cross_entropy(model(x), y, ignore_index=IGNORED, reduction="sum") for x, y in batches)
    (total / sum(int((y != IGNORED).sum()) for _, y in batches)).backward()
    return _numbers(p.grad for p in model.parameters())


def _numbers(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def _apart(a, b):
    return (a - b).abs().max().item()


def _same(a, b):
    return _apart(a, b) <= CLOSE * b.abs().max().item()


# ---- exercise 3 ----

LIMIT = 1000  # what the lesson allows for rounding, in eps: the relative rounding of one operation
ROUNDING, A_FAULT = 100, 1e4  # well below, well above


@functools.cache
def three_trainings(num_ranks=4, updates=12):
    """{"A", "B", "C": (losses on one rank, losses on `num_ranks`, dtype)}, lists of floats; one of them betrays the number."""
    kinds = {"A": (torch.float32, True), "B": (torch.float32, False), "C": (torch.float64, True)}
    return {
        name: (_train(1, updates, dtype, weigh), _train(num_ranks, updates, dtype, weigh), dtype)
        for name, (dtype, weigh) in kinds.items()
    }


def _train(n, updates, dtype, weigh, classes=6, width=8, rows=960):
    """Losses per row of a linear classifier, trained on n shares; `weigh` False: by the mean of the shares' means."""
    generator = torch.Generator().manual_seed(5)
    truth_DC = torch.randn(width, classes, generator=generator, dtype=torch.float64)
    w_DC = torch.zeros(width, classes, dtype=dtype)
    often_B, losses = torch.linspace(1.0, 0.2, rows), []
    for _ in range(updates):
        x_BD = torch.randn(rows, width, generator=generator, dtype=torch.float64)
        noise_BC = torch.randn(rows, classes, generator=generator, dtype=torch.float64)
        y_B = (x_BD @ truth_DC + noise_BC).argmax(1)
        counts_B = torch.rand(rows, generator=generator) < often_B  # fewer and fewer from the first share on
        gradient_DC, total = torch.zeros_like(w_DC), torch.zeros((), dtype=dtype)
        for x_bD, y_b, counts_b in zip(x_BD.chunk(n), y_B.chunk(n), counts_B.chunk(n), strict=True):
            x_bD, y_b = x_bD[counts_b].to(dtype), y_b[counts_b]
            logs_bC = (x_bD @ w_DC).log_softmax(1)
            wanted_bC = torch.nn.functional.one_hot(y_b, classes).to(dtype)
            share = int(counts_B.sum()) if weigh else n * len(y_b)
            gradient_DC += x_bD.T @ (logs_bC.exp() - wanted_bC) / share
            total -= (logs_bC * wanted_bC).sum(1).cumsum(0)[-1]  # one by one, as it rounds most
        losses.append((total / int(counts_B.sum())).item())
        w_DC -= 0.5 * gradient_DC
    return losses


@exercise(3, "spot the rank count")
def betrays(answer, ranks=None):
    """`answer(one, many, dtype)` is the first update whose loss differs by more than rounding, or None."""
    for one, many, dtype, wanted, why in _pairs_of_losses():
        given = answer(list(one), list(many), dtype)
        if given is not None and (isinstance(given, bool) or not hasattr(given, "__index__")):
            raise Wrong(f"return the number of an update, or None, not {shown(given)}")
        given = None if given is None else operator.index(given)
        if given != wanted:
            told = "None" if given is None else f"update {given}"
            right = "None" if wanted is None else f"update {wanted}"
            raise Wrong(f"{why}: {right}, not {told}")


def _pairs_of_losses():
    """(losses on one rank, on many, dtype, first update that betrays the number of ranks or None, why)."""
    names = {torch.float32: "float32", torch.float64: "float64"}
    for name, (one, many, dtype) in three_trainings().items():
        wanted = next(
            (i for i, (a, b) in enumerate(zip(one, many, strict=True)) if _beyond_rounding(a, b, dtype)), None
        )
        why = f"training {name} is {'right' if wanted is None else 'wrong'}, in {names[dtype]}"
        yield one, many, dtype, wanted, why
    falling = [4.0 * 0.97**step for step in range(30)]
    for dtype, name in names.items():
        eps = torch.finfo(dtype).eps
        drift = [a * (1 + (-1) ** i * eps * ROUNDING * i / 30) for i, a in enumerate(falling)]
        yield falling, drift, dtype, None, f"in {name} a difference that grows to {ROUNDING} eps is rounding"
        large = [1000 * a for a in falling]
        drift = [1000 * a for a in drift]
        yield (
            large,
            drift,
            dtype,
            None,
            f"in {name} a loss of 4,000 rounds a thousand times as far as one of 4",
        )
        once = [a * (1 + eps * A_FAULT * (i == 7)) for i, a in enumerate(falling)]
        yield falling, once, dtype, 7, f"in {name} one loss is off by {A_FAULT:g} eps, and later ones are not"
        start = [a * (1 + eps * A_FAULT) for a in falling]
        yield falling, start, dtype, 0, f"in {name} the very first losses differ: they did not start alike"
        below = [a * (1 - eps * A_FAULT * (i >= 3)) for i, a in enumerate(falling)]
        yield falling, below, dtype, 3, f"in {name} the losses of many ranks are too small by {A_FAULT:g} eps"
        lost = falling[:5] + [float("nan")] * 25
        yield falling, lost, dtype, 5, "nan is no rounding"


def _beyond_rounding(a, b, dtype):
    return not abs(a - b) <= LIMIT * torch.finfo(dtype).eps * abs(a)
