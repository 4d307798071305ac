"""Move a tensor between tensor ranks: one way in the forward, and what belongs to it in the backward.

    y = g(row(column(f(x, group))), group)            # as lesson 07 builds them, after Megatron-LM
    y = scattered(row(column(gathered(x, group))), group)    # the same where ranks share the positions of x and y

All of them are collective: all ranks of `group` call them, and go backward through them, in the same order. Messages
are torch's functional ones, which the compiler and selective checkpointing know. Dimension 1 of a stream are positions.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

_SEND = torch.ops._c10d_functional


class Move(torch.autograd.Function):
    """Move.apply(x, there, back, *how): `there(x, *how)` in the forward, `back(gradient, *how)` in the backward."""

    @staticmethod
    def forward(ctx: Any, x, there, back, *how):
        ctx.back, ctx.how = back, how
        return there(x, *how)

    @staticmethod
    def backward(ctx: Any, gradient):  # type: ignore[override]
        return ctx.back(gradient, *ctx.how), None, None, *[None] * len(ctx.how)


def f(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return x, which all ranks hold and each uses differently: its gradients are summed."""
    return Move.apply(x, _kept, _summed, group)


def g(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of the ranks' parts, whose gradient all of them hold."""
    return Move.apply(x, _summed, _kept, group)


def gathered(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return all positions of a stream, which each rank uses differently: `f` where positions are shared."""
    return Move.apply(x, _all_gathered, _reduce_scattered, group)


def scattered(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's positions of the sum of the ranks' parts: `g` where positions are shared."""
    return Move.apply(x, _reduce_scattered, _all_gathered, group)


def joined(x: torch.Tensor, group: dist.ProcessGroup, dim: int, size: int | None = None) -> torch.Tensor:
    """Return the whole, of which each rank has a part along `dim` as torch.chunk cuts it, and which all use alike.

    `size`: of the whole; None: parts are equal.
    """
    return Move.apply(x, _all_gathered, _own_part, group, dim, size)


def shared_out(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return x over the ranks' number, for a sum over them: its gradient is that of x, on each rank."""
    return Move.apply(x, lambda x, group: x / group.size(), _kept, group)


def _kept(x, group):
    return x


def _summed(x, group):
    return _SEND.wait_tensor(_SEND.all_reduce(x.contiguous(), "sum", group.group_name))


def _all_gathered(x, group, dim=1, size=None):
    n = group.size()
    size = x.shape[dim] * n if size is None else size
    most = -(-size // n)
    if less := most - x.shape[dim]:  # messages are of one size
        x = F.pad(x.movedim(dim, -1), (0, less)).movedim(-1, dim)
    parts = _SEND.wait_tensor(_SEND.all_gather_into_tensor(x.contiguous(), n, group.group_name)).chunk(n)
    return torch.cat([part.narrow(dim, 0, min(most, max(0, size - i * most))) for i, part in enumerate(parts)], dim)


def _reduce_scattered(x, group):
    n = group.size()
    parts = torch.cat(x.chunk(n, dim=1))
    return _SEND.wait_tensor(_SEND.reduce_scatter_tensor(parts, "sum", n, group.group_name))


def _own_part(x, group, dim, _):
    size = x.shape[dim]
    most = -(-size // group.size())
    first = min(size, group.rank() * most)
    return x.narrow(dim, first, min(most, size - first))
