"""Checks of lesson 03: gradients that are averaged, once, over all ranks, and no byte in vain.

Every check knows the right gradients without communicating: the data of rank r is drawn from a seed that says r, so each
rank computes the gradients of all. Models are tiny, in float64, and live on the CPU, where the trial group can send.
"""

from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from manyhands.checks import Wrong, exercise
from manyhands.measure import wire

CLOSE = 1e-10


@exercise(1, "gradient hook")
def gradient_hook(answer, ranks):
    """`answer(model)` attaches hooks; after backward each gradient must be the mean over the ranks."""
    model = _mlp()
    weights = _numbers(model.parameters())
    answer(model)
    for step in range(2):  # a hook stays: the second backward must be averaged as well
        expected = _mean(_gradients(_mlp(), r, step) for r in range(ranks.world_size))
        model.zero_grad()
        with wire.watch() as seen:
            _loss(model, ranks.rank, step).backward()
        given = _numbers(p.grad for p in model.parameters())
        own = _gradients(_mlp(), ranks.rank, step)
        if not torch.equal(_numbers(model.parameters()), weights) and not _same(given, expected):
            raise Wrong(
                "the weights changed during backward: the hook is handed the parameter, and what is to be averaged is "
                "its grad"
            )
        if not seen.calls:
            when = "during the second backward: the hook must stay" if step else "while backward ran"
            raise Wrong(f"nothing was sent {when}; register a hook on every parameter")
        if _same(given, own) and not _same(given, expected):
            raise Wrong(
                "something was averaged, but the gradients still are this rank's own: the hook is handed the parameter; "
                "send its grad"
            )
        _compare(given, expected, ranks.world_size)
        _enough(seen.payload_bytes("all_reduce"), weights.nbytes, "each gradient needs one all-reduce")


@exercise(2, "tied, frozen and unused parameters")
def untidy(answer, ranks):
    """`answer(model)`, after backward, averages what is trainable: once, and also where this rank has no gradient."""
    last = ranks.world_size - 1  # the only rank whose loss uses the rare parameter
    after_backward = [_after_backward(_Untidy(), r, rare=r == last) for r in range(ranks.world_size)]
    given = [[_grad_or_zeros(p) for p in m.parameters() if p.requires_grad] for m in after_backward]
    expected = [sum(parts) / ranks.world_size for parts in zip(*given, strict=True)]
    _rehearse(answer, _after_backward(_Untidy(), ranks.rank, rare=ranks.rank == last), ranks)
    model = after_backward[ranks.rank]
    with wire.watch() as seen:
        answer(model)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if model.frozen.grad is not None:
        raise Wrong("the frozen parameter has a gradient now; leave alone what does not train")
    for (name, p), wanted in zip(trainable.items(), expected, strict=True):
        if p.grad is None and wanted.any():
            raise Wrong(
                f"{name} has no gradient here, because this rank did not use it; but rank {last} did, so its mean is "
                "not zero, and without it the copies part"
            )
    given = _numbers(_grad_or_zeros(p) for p in trainable.values())
    _compare(given, _numbers(expected), ranks.world_size)
    sent, tied = seen.payload_bytes(), model.tied.weight.nbytes
    enough = sum(p.nbytes for p in trainable.values())
    why = (
        "a tied matrix has one gradient; send it once" if sent == enough + tied else "send each gradient once"
    )
    _enough(sent, enough, why)


@exercise(3, "accumulation with no_sync")
def accumulation(answer, ranks):
    """`answer(ddp, micro_batches)` leaves the mean over all micro-batches and ranks, averaged by one set of calls."""
    num = 3
    ddp = DistributedDataParallel(_mlp())
    for step in range(2):  # a flag that one call leaves behind shows in the next
        micro_batches = [_rows(ranks.rank, num * step + i) for i in range(num)]
        everyone = [
            _gradients(_mlp(), r, num * step + i) for r in range(ranks.world_size) for i in range(num)
        ]
        expected = _mean(everyone)
        ddp.zero_grad()
        with wire.watch() as seen:
            answer(ddp, micro_batches)
        if any(p.grad is None for p in ddp.parameters()):
            raise Wrong("some gradients are None: run a backward pass for each micro-batch")
        given = _numbers(p.grad for p in ddp.parameters())
        sent, once = seen.payload_bytes("all_reduce"), given.nbytes
        if sent == 0:
            raise Wrong("nothing was averaged: the last micro-batch belongs outside no_sync")
        if _same(given, num * expected):
            raise Wrong(
                f"the gradients are {num} times too large: each micro-batch's loss is a mean already, so divide it by "
                f"their number"
            )
        if sent >= num * once:
            raise Wrong(
                f"{sent} bytes were averaged where {once} are enough: all but the last micro-batch belong inside "
                "no_sync, their forward pass too, because that is where DDP looks"
            )
        if not _same(given, expected):
            raise Wrong(
                f"right number of calls, but the gradients are off by {_apart(given, expected):.2g}: what was averaged "
                "was not the sum of all micro-batches. DDP decides in forward whether the next backward averages"
            )


@exercise(4, "bytes per step")
def bytes_per_step(answer, ranks=None):
    """`answer(num_params, n_ranks, bytes_per_value, micro_batches, no_sync)` is what one rank sends on a ring."""
    cases = [
        (816_705, 4, 4, 1, False),
        (816_705, 2, 4, 1, False),
        (816_705, 1, 4, 1, False),
        (124_000_000, 8, 2, 1, False),
        (124_000_000, 8, 2, 4, False),
        (124_000_000, 8, 2, 4, True),
    ]
    for num_params, n, value, micro_batches, no_sync in cases:
        given = answer(num_params, n, bytes_per_value=value, micro_batches=micro_batches, no_sync=no_sync)
        payload = num_params * value
        right = wire.ring_all_reduce_bytes(payload, n) * (1 if no_sync else micro_batches)
        if not isinstance(given, (int, float)):
            raise Wrong(f"the answer is a {type(given).__name__}; return a number of bytes")
        if abs(given - right) <= 1e-9 * max(right, 1):
            continue
        case = f"for {num_params:,} parameters of {value} bytes on {n} ranks"
        case += f", {micro_batches} micro-batches {'with' if no_sync else 'without'} no_sync" * (
            micro_batches > 1
        )
        hint = _bytes_hint(given, right, payload, n, micro_batches)
        raise Wrong(f"{case} a rank sends {right:,.0f} bytes, not {given:,.0f}{hint}")


def _bytes_hint(given, right, payload, n, micro_batches):
    if n == 1:
        return ": one rank has nobody to send to"
    for factor, why in {
        payload: "that is what it hands to the all-reduce; on the ring it sends 2(n-1)/n of it",
        (n - 1) * payload: "that is a copy for every other rank; the ring sends chunks",
        right / 2: "that is the reduce-scatter alone; then the finished chunks go round once more",
        right * n: "each of the 2(n-1) messages is one chunk, 1/n of the gradient",
        right * micro_batches: "with no_sync only the last micro-batch is averaged",
        right / micro_batches: "without no_sync every micro-batch is averaged",
    }.items():
        if factor != right and abs(given - factor) <= 1e-9 * factor:
            return f": {why}"
    return ""


# ---- tiny models and their data, the same on every rank ----


def _mlp():
    """6 -> 4 -> 2, 38 parameters, always the same first weights."""
    return _seeded(lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)))


def _seeded(make):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(38)
        return make().double()


class _Untidy(nn.Module):
    """One matrix used twice, one frozen, one that only some ranks use, one that nobody uses."""

    def __init__(self):
        super().__init__()
        first = _seeded(
            lambda: nn.ModuleDict({name: nn.Linear(6, 6, bias=False) for name in ("tied", "rare")})
        )
        self.rare, self.tied = first["rare"], first["tied"]
        self.again = nn.Linear(6, 6, bias=False)
        self.again.weight = self.tied.weight
        self.frozen = nn.Parameter(torch.ones(6, dtype=torch.float64), requires_grad=False)
        self.nobody = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.out = _seeded(lambda: nn.Linear(6, 2))

    def forward(self, x_b6, rare=False):
        x_b6 = self.again(torch.tanh(self.tied(x_b6)) * self.frozen)
        return self.out(self.rare(x_b6) if rare else x_b6)


def _rows(rank, step):
    """Inputs [5, 6] and targets [5, 2] of a rank at a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return tuple(torch.randn(5, width, generator=generator, dtype=torch.float64) for width in (6, 2))


def _loss(model, rank, step, **how):
    x, y = _rows(rank, step)
    return F.mse_loss(model(x, **how), y)


def _gradients(model, rank, step):
    return _numbers(p.grad for p in _after_backward(model, rank, step).parameters())


def _after_backward(model, rank, step=0, **how):
    _loss(model, rank, step, **how).backward()
    return model


def _grad_or_zeros(p):
    return torch.zeros_like(p) if p.grad is None else p.grad.clone()


# ---- judging ----


def _numbers(tensors):
    return torch.cat([t.detach().flatten() for t in tensors])


def _mean(rows):
    return torch.stack(list(rows)).mean(0)


def _apart(a, b):
    return (a - b).abs().max().item()


def _same(a, b):
    return _apart(a, b) <= CLOSE


def _compare(given, expected, n):
    """Raises Wrong with the factor between the two, if there is one."""
    if _same(given, expected):
        return
    if _same(given, n * expected):
        raise Wrong(
            f"the gradients are the sum over the ranks, {n} times too large; divide by the number of ranks"
        )
    if _same(n * given, expected):
        raise Wrong(f"the gradients are {n} times too small: they were divided by the number of ranks twice")
    raise Wrong(f"the gradients are off by {_apart(given, expected):.2g} from the mean over the ranks")


def _enough(sent, enough, why):
    if sent > enough:
        raise Wrong(
            f"the gradients are right, but {sent} bytes were handed over where {enough} are enough: {why}"
        )


def _rehearse(answer, model, ranks):
    """Run the answer on a model of its own without sending, and compare what the ranks would have called.

    For real, calls that do not match would end a rank: gloo aborts the process when sizes differ.
    """
    calls = []

    def note(tensor, *_, async_op=False, **__):
        calls.append(tuple(tensor.shape))
        return mock.Mock() if async_op else None  # a handle, of which anything may be asked

    with mock.patch.object(dist, "all_reduce", note):
        answer(model)
    everyone = [None] * ranks.world_size
    dist.all_gather_object(everyone, calls)
    for r, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            counts = f"rank 0 would call all_reduce {len(everyone[0])} times and rank {r} {len(theirs)} times"
            if len(theirs) == len(everyone[0]):
                counts = f"rank 0 and rank {r} would call all_reduce with tensors of different sizes"
            raise Wrong(
                f"{counts}, so they would wait forever: a parameter that one rank did not use has grad None there; the "
                "others still need its zeros"
            )
