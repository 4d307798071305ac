"""The gradient norm of the whole model, however its gradients are spread, and clipping by it.

    norm = global_norm(parameters)                  # collective; the same 0-dim tensor on all ranks
    clip(parameters, norm, max_norm=1.0)            # in place, local

A rank's local shards have a norm too, and it is not the model's: clipped by it, ranks scale their shards differently
and by too little (torchtitan#766, pytorch#170862). Sums of squares add up over exactly those mesh axes that a gradient
is sharded on; where it is replicated, every copy knows the whole.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from manyhands.measure.tensor_bytes import local_part

TINY = 1e-6  # what torch.nn.utils.clip_grad_norm_ adds to the norm before it divides


@torch.no_grad()
def global_norm(parameters: Iterable[nn.Parameter], pipeline_group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The 2-norm of all gradients of the model: a 0-dim float64 tensor, the same on all ranks. All ranks must call it.

    `parameters` are this rank's: plain tensors, which all ranks (of a pipeline stage) hold whole, and DTensors, on one
    mesh or several. `pipeline_group`: the ranks that hold the other stages, None without a pipeline.
    Raises ValueError for a gradient that is still a partial sum (placement Partial).
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients and pipeline_group is None:
        return torch.zeros((), dtype=torch.float64)
    # {the process groups whose ranks hold the other shares: local gradients that are spread in this way}
    spread: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for gradient in gradients:
        groups = _groups(gradient) + ([pipeline_group] if pipeline_group is not None else [])
        spread.setdefault(tuple(groups), []).append(local_part(gradient))
    sums = {groups: _sum_of_squares(members) for groups, members in spread.items()}
    return _add_up(sums).sqrt()


def _groups(gradient):
    """The groups over which a gradient is cut into shares, innermost axis first."""
    if not isinstance(gradient, DTensor):
        return []
    mesh, groups = gradient.device_mesh, []
    for axis, placement in enumerate(gradient.placements):
        if placement.is_partial():
            raise ValueError(
                f"a gradient on mesh {mesh.mesh_dim_names} is {gradient.placements}, a partial sum; "
                "reduce gradients before their norm is taken"
            )
        if not placement.is_replicate() and mesh.size(axis) > 1:
            groups.insert(0, mesh.get_group(axis))
    return groups


def _sum_of_squares(tensors):
    """In float64: the square of a large float32 norm would overflow. An empty share counts as 0."""
    return torch.stack(torch._foreach_norm(tensors)).double().square().sum()


def _add_up(sums):
    """{groups: local sum of squares} to one sum over all: an all-reduce per group, whatever is sharded on it."""
    while any(sums):
        # an inner group first: then its sum joins that of what is sharded on the outer ones alone
        group = max(sums, key=len)[0]
        members = [groups for groups in sums if group in groups]
        flat = torch.stack([sums[groups] for groups in members])
        dist.all_reduce(flat, group=group)
        for groups, total in zip(members, flat, strict=True):
            del sums[groups]
            rest = tuple(g for g in groups if g is not group)
            sums[rest] = sums.get(rest, 0) + total
    return sums[()]


@torch.no_grad()
def clip(
    parameters: Iterable[nn.Parameter], norm: torch.Tensor, max_norm: float, loss_scale: float = 1.0
) -> torch.Tensor:
    """Divide the gradients by `loss_scale`, and scale them in place so that their global norm is at most `max_norm` (0:
    any).

    `norm` is that of the gradients as they are, with the loss scale in them; returns the norm without it. A norm that
    is not finite leaves the gradients as they are. Nothing waits for the device: the decision is taken on it.
    """
    norm = norm / loss_scale
    if max_norm > 0:
        factor = (max_norm / (norm + TINY)).clamp(max=1.0) / loss_scale
    elif loss_scale != 1.0:
        factor = torch.full_like(norm, 1 / loss_scale)
    else:
        return norm
    factor = torch.where(norm.isfinite(), factor, torch.ones_like(factor))
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in (p.grad for p in parameters if p.grad is not None):
        gradient = local_part(gradient)
        by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, dtype), members in by_kind.items():
        torch._foreach_mul_(members, factor.to(device, dtype))
    return norm
