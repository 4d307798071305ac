"""What lesson 07's movements are judged by: a pass forward and backward with its calls, and a tensor beside likely mistakes."""

import torch
import torch.distributed as dist

from manyhands.checks import Wrong
from manyhands.checks.tensors import count
from manyhands.checks.values import shown
from manyhands.measure import wire

CLOSE = 1e-10


def normal(seed, *shape):
    """Random numbers that every rank can draw."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, there, back, group):
        ctx.back, ctx.group = back, group
        return x.view_as(x) if there is None else there(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return gradient if ctx.back is None else ctx.back(gradient, ctx.group), None, None, None


def move(x, there, back, group):
    """`there(x, group)` in forward, `back(gradient, group)` in backward; None leaves it as it is."""
    return _Moved.apply(x, there, back, group)


def summed(x, group):
    """The sum over the group, in a new tensor."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class Calls:
    """A function that counts how often it is called."""

    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, x):
        self.calls += 1
        return self.function(x)


class Pass:
    """`function` forward on x and backward from v: `result`, `gradient` of x, gradients of `others`, and both calls' `Seen`.

    Raises Wrong where no tensor comes back, x or v is changed, or backward does not arrive at x.
    """

    def __init__(self, function, x, v, name, *others):
        leaf = x.clone().requires_grad_()
        with wire.watch() as self.there:
            result = function(leaf)
        if not isinstance(result, torch.Tensor):
            raise Wrong(f"{name} should return a tensor, not {shown(result)}")
        untouched(leaf.detach(), x, "x", f": {name} works in a new tensor")
        self.result = result.detach()
        self.gradient, self.back, self.others = None, None, ()
        if result.shape != v.shape:
            return
        if not result.requires_grad:
            raise Wrong(f"backward does not arrive at x: what {name} returned has no gradient; use Move.apply")
        # neither contiguous nor the caller's own: as gradients are
        sent = v.transpose(0, 1).contiguous().transpose(0, 1)
        with wire.watch() as self.back:
            self.gradient, *self.others = torch.autograd.grad(result, (leaf, *others), sent, allow_unused=True)
        untouched(sent, v, "the gradient that arrived", f": backward of {name} works in a new tensor")


def untouched(tensor, before, name, cure=""):
    """Raises Wrong where a tensor that was given has other numbers now."""
    if not torch.equal(tensor, before):
        raise Wrong(f"{name} was changed in place; leave it as it is{cure}")


def judge_tensor(found, wanted, what, it_is, hints):
    """Raises Wrong unless `found` is `wanted`; `hints` {what it is instead: tensor} name likely mistakes."""
    if not isinstance(found, torch.Tensor):
        raise Wrong(f"{what} should be {it_is}; what is there is {shown(found)}")
    if found.shape != wanted.shape:
        raise Wrong(f"{what} should have the shape {list(wanted.shape)}, not {list(found.shape)}: it is {it_is}")
    if found.dtype != wanted.dtype:
        raise Wrong(f"{what} should be {wanted.dtype}, as what it was given, not {found.dtype}")
    if _near(found, wanted, CLOSE):
        return
    for why, mistaken in hints.items():
        if mistaken.shape == found.shape and _near(found, mistaken, CLOSE):
            raise Wrong(f"{what} should be {it_is}; it is {why}")
    if _near(found, wanted, 1e-5):
        raise Wrong(f"{what} is right to float32's accuracy only; keep the dtype of what you were given")
    far = (found - wanted).abs().max().item()
    raise Wrong(f"{what} should be {it_is}; it is up to {far:.3g} away")


def _near(a, b, limit):
    return bool((a - b).abs().max() <= limit * b.abs().max().clamp(min=1))


def judge_cost(seen, ops, n_bytes, what, each=1):
    """Raises Wrong where more was called than one of `ops` with `n_bytes`, an all-reduce counted twice; right values assumed.

    `each`: how many calls a slow answer makes where one does; None of it matters in a world of one.
    """
    if seen is None or dist.get_world_size() == 1:
        return
    calls = [call.op for call in seen.calls]
    volume = sum((2 if call.op == "all_reduce" else 1) * call.bytes for call in seen.calls)
    allowed = sum((2 if op == "all_reduce" else 1) * n_bytes for op in ops)
    if len(calls) <= len(ops) and volume <= allowed:
        return
    made = f"{count(len(calls), 'call')} ({', '.join(sorted(set(calls)))})"
    enough = f"one {ops[0]} of {n_bytes} bytes is enough" if ops else "nothing needs to be sent"
    several = " for all parameters together" if each > 1 else ""
    raise Wrong(
        f"{what}: the numbers are right, but it made {made} with a volume of {volume} bytes, an all_reduce counted twice; "
        f"{enough}{several}"
    )
