"""Expert parallelism: the experts of each layer are spread over the ranks of a group, and tokens travel to them.

    mesh = expert_mesh(device_type, layout)                  # axes replicas x expert x tensor; all ranks
    spread_experts(model, mesh, device)                      # in place: a rank keeps its share of each layer's experts
    share_experts(model, tensor_mesh)                        # then over tensor ranks, which see the same tokens
    finish_expert_gradients(model, mesh, divide=data_ranks)  # once per step, after the last backward; all ranks

Each rank has different tokens, as in data parallelism. Two all-to-alls per layer send rows to the ranks of their
experts and back (Lepikhin et al. 2020, GShard), and in the backward their gradients the other way. So an expert's
gradient is a sum over the losses of all ranks in its group already: it is divided by the number of data ranks, and
summed over those that hold the same experts. In a pipeline all of these are ranks of one stage. Lesson 09 builds all
of it.

Tensor ranks have the same tokens and make the same choices. So each has other experts, computes their rows alone, and
what they make of a token is summed, as behind an MLP that is split: no token travels for that.

Shapes: E experts of a layer, n ranks of the group, e = E / n of this rank, D width, R rows.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from manyhands.config.layout import Layout
from manyhands.gpt.experts import Experts, multiplied_in, run_experts
from manyhands.gpt.model import experts_of
from manyhands.measure.tensor_bytes import local_part
from manyhands.parallel.moves import f


class Exchange(torch.autograd.Function):
    """Exchange.apply(rows, leaving, arriving, group): rows to their ranks; gradients take the way back."""

    @staticmethod
    def forward(ctx: Any, rows, leaving, arriving, group):
        ctx.sizes, ctx.group = (leaving, arriving), group
        received = rows.new_empty(sum(arriving), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), arriving, leaving, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient):  # type: ignore[override]
        leaving, arriving = ctx.sizes
        return Exchange.apply(gradient, arriving, leaving, ctx.group), None, None, None


def run_on_ranks(
    rows_RD: torch.Tensor, sizes_E: torch.Tensor, up: torch.Tensor, down: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """`run_experts` where `up` and `down` are spread over `group`. All its ranks must call it, also without rows."""
    n = group.size()
    leaving_ne = sizes_E.view(n, -1)
    arriving_ne = torch.empty_like(leaving_ne)
    dist.all_to_all_single(arriving_ne, leaving_ne, group=group)
    leaving, arriving = leaving_ne.sum(1).tolist(), arriving_ne.sum(1).tolist()  # the host waits for them
    rows_RD = Exchange.apply(rows_RD.to(multiplied_in(rows_RD)), leaving, arriving, group)
    # rows arrive ordered by rank, then by expert
    e = arriving_ne.shape[1]
    expert_R = torch.arange(e, device=rows_RD.device).repeat(n).repeat_interleave(arriving_ne.flatten())
    order_R = expert_R.argsort(stable=True)
    rows_RD = run_experts(rows_RD[order_R], arriving_ne.sum(0), local_part(up), local_part(down))
    return Exchange.apply(rows_RD[order_R.argsort()], arriving, leaving, group)


def run_own(
    rows_RD: torch.Tensor, sizes_E: torch.Tensor, up: torch.Tensor, down: torch.Tensor,
    run: Callable[..., torch.Tensor], mesh: DeviceMesh, spread: int,
) -> torch.Tensor:  # fmt: skip
    """Take the rows whose experts this tensor rank has through `run`; the others are zeros."""
    own_E = torch.zeros_like(sizes_E, dtype=torch.bool)
    own_E.view(spread, mesh.size(), -1)[:, mesh.get_local_rank()] = True
    own_R = own_E.repeat_interleave(sizes_E)
    done_RD = run(rows_RD[own_R], sizes_E[own_E], local_part(up), local_part(down))
    all_RD = done_RD.new_zeros(rows_RD.shape)
    all_RD[own_R] = done_RD
    return all_RD


def mix_own(
    x_ND: torch.Tensor, gates_Nk: torch.Tensor, experts_Nk: torch.Tensor, mix: Callable[..., torch.Tensor],
    mesh: DeviceMesh,
) -> torch.Tensor:  # fmt: skip
    """`Experts.mix` of this tensor rank's experts: a part of the sum. Gradients of tokens and gates are whole again."""
    parts = [f(whole, mesh.get_group()) for whole in (x_ND, gates_Nk)]
    return mix(*parts, experts_Nk)


def share_experts(model: nn.Module, tensor_mesh: DeviceMesh) -> None:
    """Share each layer's experts out over tensor ranks, in place; what `spread_experts` has cut, it has cut for them.

    All ranks of `tensor_mesh` call it. A layer then gives a part of a sum over them.
    """
    for layer in experts_of(model):
        spread = 1
        for name in ("up", "down"):
            weight = getattr(layer, name)
            if isinstance(weight, DTensor):
                spread = weight.device_mesh["expert"].size()
            else:  # every rank has all: nothing is sent
                own = distribute_tensor(weight.detach(), tensor_mesh, [Shard(0)], src_data_rank=None)
                setattr(layer, name, nn.Parameter(own))
        layer.run = partial(run_own, run=layer.run, mesh=tensor_mesh, spread=spread)
        layer.mix = partial(mix_own, mix=layer.mix, mesh=tensor_mesh)


def expert_mesh(device_type: str, layout: Layout) -> DeviceMesh:
    """The mesh replicas x expert x tensor of this stage's ranks: all but replicas hold different experts.

    All ranks call it.
    """
    replicas = layout.replicate * layout.shard // layout.expert
    sizes = {"pipeline": layout.pipeline, "replicas": replicas, "expert": layout.expert, "tensor": layout.tensor}
    mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return mesh["replicas", "expert", "tensor"]


def spread_experts(model: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
    """Keep only this rank's share of each layer's experts, on `device`, in place. Every rank starts with all."""
    for layer in experts_of(model):
        for name in ("up", "down"):
            own = getattr(layer, name).detach()
            for axis in ("expert", "tensor"):
                own = own.chunk(mesh[axis].size())[mesh[axis].get_local_rank()]
            own, placements = own.to(device, copy=True), [Replicate(), Shard(0), Shard(0)]
            setattr(layer, name, nn.Parameter(DTensor.from_local(own, mesh, placements, run_check=False)))
        layer.run = partial(run_on_ranks, group=mesh["expert"].get_group())


def spread_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return {name: weight} of the spread experts, which data parallelism must exclude."""
    return {
        f"{name}.{weight}": getattr(layer, weight)
        for name, layer in model.named_modules()
        if isinstance(layer, Experts)
        for weight in ("up", "down")
        if "expert" in _axes(getattr(layer, weight))
    }


def _axes(weight):
    return weight.device_mesh.mesh_dim_names if isinstance(weight, DTensor) else ()


@torch.no_grad()
def finish_expert_gradients(model: nn.Module, mesh: DeviceMesh, divide: int) -> None:
    """Divide the gradients of spread experts, and sum them over the ranks that hold the same. All ranks call it."""
    for weight in spread_weights(model).values():
        assert weight.grad is not None, "no backward has come through the experts"
        gradient = local_part(weight.grad).div_(divide)
        if mesh["replicas"].size() > 1:
            dist.all_reduce(gradient, group=mesh["replicas"].get_group())
