"""Tensor parallelism: the ranks of one mesh axis share every layer of a GPT, by torch's DTensor and from outside.

    apply_tensor_parallel(model, mesh["tensor"], sequence_parallel=True, loss_parallel=False)    # in place
    with sharded_loss(loss_parallel):
        logits, loss = model(ids_BT, targets_BT)      # plain tensors go in, a plain loss comes out
        loss.backward()
    finish_gradients(model.parameters())              # all ranks, once per step, before gradients are looked at

Attention and MLP are split by columns, then by rows (Shoeybi et al. 2019, Megatron-LM, section 3): whole heads and
whole hidden units per rank, one all-reduce after each of them, and one in the backward before each. The token embedding
and the head are split over the vocabulary. With `sequence_parallel` each all-reduce becomes an all-gather and a
reduce-scatter, and norms and dropout between them see T/t positions per rank (Korthikanti et al. 2022, section 4.2.2).

A llama's queries, keys and values are matrices of their own. Where it has fewer heads of keys than there are ranks,
each rank holds the weights of all of them, and multiplies with those of the one that its queries need.

Works on a whole `manyhands.gpt.model.GPT` and on a stage of a pipeline, which has only some of its parts.
Shapes: B sequences, T positions, D width, V tokens in the vocabulary, t tensor ranks.
"""

import contextlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as tp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module

from manyhands.gpt.model import Attention
from manyhands.parallel.experts import share_experts
from manyhands.parallel.fsdp import is_tied


def apply_tensor_parallel(
    model: Any, tensor_mesh: DeviceMesh, sequence_parallel: bool = False, loss_parallel: bool = False
) -> None:
    """Split the layers of `model` (a GPT or a stage of one) over `tensor_mesh`, in place. All its ranks call it.

    Every rank holds the same full weights before, and its shards after: nothing is sent. Heads, hidden units and (with
    `sequence_parallel`) block_size must divide by the mesh's size (`layout` makes sure), the vocabulary need not.
    """
    tied = is_tied(model)
    between = Shard(1) if sequence_parallel else Replicate()  # the stream x_BTD between the layers
    plan: dict[str, tp.ParallelStyle] = {}
    if hasattr(model, "tokens"):
        plan["tokens"] = tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
        if sequence_parallel and model.positions is not None:
            plan["positions"] = _OwnPositions()
    if len(model.blocks):
        parts: list[tuple[str, tuple[str, ...], str]]
        parts = [("attention", ("qkv",), "out"), ("mlp", ("up",), "down")]
        if model.config.style == "llama":
            parts = [("attention", ("q", "k", "v"), "out"), ("mlp", ("gate", "up"), "down")]
        if model.config.experts > 1:
            del parts[1]
            share_experts(model, tensor_mesh)
            plan["blocks.*.mlp"] = tp.PrepareModuleInputOutput(
                input_layouts=between, desired_input_layouts=Replicate(), use_local_input=True,
                output_layouts=Partial(), desired_output_layouts=between,
            )  # fmt: skip
            if model.config.shared_experts:  # torch warns of a part of the plan that no module has
                plan["blocks.*.mlp.shared.up"] = tp.ColwiseParallel()
                plan["blocks.*.mlp.shared.down"] = tp.RowwiseParallel(output_layouts=Partial())
        for part, first, last in parts:
            plan[f"blocks.*.{part}"] = tp.PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
            for name in first:
                own_head = name in ("k", "v") and model.config.kv_heads < tensor_mesh.size()
                plan[f"blocks.*.{part}.{name}"] = _OwnHead(model.config) if own_head else tp.ColwiseParallel()
            plan[f"blocks.*.{part}.{last}"] = tp.RowwiseParallel(output_layouts=between)
        if sequence_parallel:
            plan["blocks.*.norm_1"] = plan["blocks.*.norm_2"] = tp.SequenceParallel()
    if hasattr(model, "head"):
        logits = Shard(-1) if loss_parallel else Replicate()
        plan["head"] = tp.ColwiseParallel(
            input_layouts=between, output_layouts=logits, use_local_output=not loss_parallel
        )
        if sequence_parallel:
            plan["norm"] = tp.SequenceParallel()
    # every rank has the full weights and cuts its own share out of them: src_data_rank=None sends nothing
    tp.parallelize_module(model, tensor_mesh, plan, src_data_rank=None)
    if tied:
        model.head.weight = model.tokens.weight
    if sequence_parallel and hasattr(model, "tokens") and hasattr(model, "head"):
        _pad_positions(model, tensor_mesh.size())
    if loss_parallel:
        model.register_forward_hook(_plain_results)
    _draw_own_dropout(model, tensor_mesh.get_local_rank(), sequence_parallel)


def sharded_loss(loss_parallel: bool) -> contextlib.AbstractContextManager[None]:
    """The context that loss and backward run in: cross-entropy of logits that stay split over the vocabulary."""
    return tp.loss_parallel() if loss_parallel else contextlib.nullcontext()


@torch.no_grad()
def finish_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Bring each gradient to where its parameter lies. All tensor ranks call it, after a step's last backward.

    Under sequence parallelism a rank's norms and position embeddings have seen T/t positions only: their gradients are
    partial sums (DTensors with placement Partial) until here, as are those of heads of keys that ranks share. One
    all-reduce adds them all up. Without it the ranks drift apart (Megatron-LM#443). The token embedding's gradient is
    whole on each rank: it is cut, nothing is sent.
    """
    partial_sums: dict[Any, list[Any]] = {}
    parameter: Any  # a DTensor in a Parameter's clothes
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(gradient, DTensor) or gradient.placements == parameter.placements:
            continue
        if gradient.placements == (Partial("sum"),) and parameter.placements == (Replicate(),):
            partial_sums.setdefault((gradient.device_mesh, gradient.dtype), []).append(parameter)
        else:
            parameter.grad = gradient.redistribute(placements=parameter.placements)
    for (mesh, _), members in partial_sums.items():
        flat = torch.cat([parameter.grad.to_local().flatten() for parameter in members])
        dist.all_reduce(flat, group=mesh.get_group())
        sums = flat.split([parameter.numel() for parameter in members])
        for parameter, total in zip(members, sums, strict=True):
            total = total.view(parameter.shape)
            parameter.grad = DTensor.from_local(total, mesh, [Replicate()], run_check=False)


class _OwnHead(tp.ParallelStyle):
    """Keys or values of fewer heads than ranks: all weights on each rank, those of its own queries' head multiplied."""

    def __init__(self, config):
        super().__init__()
        self.heads, self.size = config.kv_heads, config.head_size

    def _apply(self, module, mesh):
        first = mesh.get_local_rank() * self.heads // mesh.size() * self.size

        def multiplied(x_BTD):  # a DTensor, as the weight is: see `PrepareModuleInput`
            x_BTD, weight = (whole.to_local(grad_placements=[Partial()]) for whole in (x_BTD, module.weight))
            return F.linear(x_BTD, weight[first : first + self.size])

        module.forward = multiplied
        return distribute_module(module, mesh)  # Replicate


class _OwnPositions(tp.ParallelStyle):
    """The position embedding under sequence parallelism: all weights on each rank, the own T/t positions looked up."""

    def _apply(self, module, mesh):
        def replicate(_, embedding, mesh):
            weight = DTensor.from_local(embedding.weight.detach(), mesh, [Replicate()], run_check=False)
            embedding.register_parameter("weight", nn.Parameter(weight))

        def own(_, inputs, mesh):
            positions_T = DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)
            return positions_T.redistribute(placements=[Shard(0)])

        return distribute_module(module, mesh, replicate, own, lambda _, rows, mesh: rows.to_local())


def _pad_positions(model, t):
    """Sequence parallelism splits T evenly. Others are padded at the end, where causal attention does not look back."""

    def pad(_, args):
        ids_BT, *targets = args
        odd = -ids_BT.shape[1] % t
        if odd and targets and targets[0] is not None:
            raise ValueError(f"{ids_BT.shape[1]} positions do not split over {t} tensor ranks; use a multiple of {t}")
        model.padded = odd
        return (F.pad(ids_BT, (0, odd)), *targets) if odd else args

    def cut(_, args, results):
        logits_BTV, loss = results
        return (logits_BTV[:, : logits_BTV.shape[1] - model.padded], loss) if model.padded else results

    model.register_forward_pre_hook(pad)
    model.register_forward_hook(cut)


def _plain_results(_, args, results):
    """Return the results of a full GPT with split logits: a plain loss, and gathered logits if requested."""
    logits_BTV, loss = results
    if loss is None:
        return logits_BTV.full_tensor(), None
    return logits_BTV, loss.to_local()


def _draw_own_dropout(model, tensor_rank, sequence_parallel):
    """Let tensor ranks draw different masks where they hold different things: other heads, or other positions.

    Their generators run alike, so that masks of what they all hold agree. Inside such a module the generator starts
    from a number drawn from the common stream and the rank, and goes back afterwards. A recomputed forward, which
    starts from the same state of the common stream, draws the same.
    """
    for module in model.modules():
        split = isinstance(module, Attention) or (sequence_parallel and isinstance(module, nn.Dropout))
        if split and (module.p if isinstance(module, nn.Dropout) else module.dropout):
            _OwnStream(tensor_rank).attach(module)


class _OwnStream:
    """Switches torch's generators to a stream of this rank's own while a module runs."""

    def __init__(self, tensor_rank):
        self.tensor_rank, self.common = tensor_rank, None

    def attach(self, module):
        module.register_forward_pre_hook(self.enter)
        module.register_forward_hook(self.leave, always_call=True)

    def enter(self, module, args):
        if not module.training:
            return
        seed = torch.randint(2**48, (), device="cpu").item()
        device = args[0].device
        self.common = [(torch, torch.get_rng_state())]
        if device.type != "cpu":
            backend = torch.get_device_module(device)
            self.common.append((backend, backend.get_rng_state()))
        # mixed, because torch's generator on the CPU takes the lower 32 bits of a seed
        torch.manual_seed(int(np.random.SeedSequence((seed, self.tensor_rank)).generate_state(1)[0]))

    def leave(self, module, args, output):
        for backend, state in self.common or ():
            backend.set_rng_state(state)
        self.common = None
