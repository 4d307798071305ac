"""Checks of lesson 05: who read what, an order that survives a change of ranks, and a loss that counts every token once.

The first two need no message between ranks, and the checks say so. The third computes the right gradients without
communicating, as the data of rank r is drawn from a seed that says r.
"""

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
from manyhands.checks.values import plain
from manyhands.measure import wire

CLOSE = 1e-6  # of the largest: a number divided by a count is a float32, and right all the same
FINE, SAME, DISAGREE = "fine", "same order", "ranks disagree"
LUCKY = 880  # a seed of which rank 0 of 4 reads the same one of 4 sequences in 4 epochs
IGNORED = -100  # a target that is padding: F.cross_entropy leaves it out


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
        name: recorded(kind, 4, 240, num_epochs=8)
        for name, kind in zip("ABC", (SAME, DISAGREE, FINE), strict=True)
    }


# ---- exercise 2 ----


@exercise(2, "a sharded order that loses and repeats nothing")
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
        raise Wrong(
            f"the order is right, but it took {len(seen.calls)} messages; every rank can compute it by itself"
        )
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
    case = f"{length} sequences on {n} rank{'s' * (n > 1)}"
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
        raise Wrong(
            f"{case}: after the stop all {length} are read again; leave out the {done} that were read"
        )
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
            raise Wrong(
                f"in epoch {epoch} most sequences come {step} of 64 places after the one before; shuffle them"
            )
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


def _each_once(shares, wanted, case):
    counts = Counter(i for share in shares for i in share)
    lost = [i for i in wanted if not counts[i]]
    repeated = [i for i, times in counts.items() if times > 1]
    foreign = [i for i in counts if i not in wanted]
    if foreign:
        raise Wrong(f"{case}: {foreign[0]} is no sequence; they are 0 to {len(wanted) - 1}")
    if lost and repeated:
        raise Wrong(
            f"{case}: {len(lost)} are lost (the first is {lost[0]}) and {len(repeated)} read twice; all ranks must cut "
            "one and the same order, and deal it like cards, so that what was read is the beginning of it"
        )
    if repeated:
        raise Wrong(f"{case}: {len(repeated)} are read twice (the first is {repeated[0]})")
    if lost:
        raise Wrong(f"{case}: {len(lost)} are never read (the first is {lost[0]})")


# ---- exercise 3 ----


@exercise(3, "token-weighted loss")
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
            raise Wrong(
                f"right, but the model was given {max(rows)} rows at once, and a micro-batch has {largest}"
            )
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
            "the gradients became nan: where a micro-batch has no token, its mean is 0/0; divide its sum by the number of "
            "tokens of all ranks"
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
    why = next(
        (why for usual, why in reasons if usual != 1 and abs(factor / usual - 1) < 1e-5), "all of them alike"
    )
    if factor < 0:
        return f"the gradients are {factor:.4g} times what they should be: {why}"
    size = f"{factor:.4g} times too large" if factor > 1 else f"{1 / factor:.4g} times too small"
    return f"the gradients are {size}: {why}"


def _classifier():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 5)).double()


def _micro_batches(rank, step, fewest, empty, count):
    """`count` micro-batches (x [8, 6], y [8]) of a rank, with `fewest` to 8 targets each; all padding if `empty`."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    batches = []
    for i in range(count):
        x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
        y = torch.randint(5, (8,), generator=generator)
        kept = fewest if i == 1 else int(torch.randint(1, 9, (), generator=generator))
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
