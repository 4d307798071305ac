"""Tensor parallelism: the ranks of one mesh axis share every layer of a GPT, applied from outside.

    apply_tensor_parallel(model, mesh["tensor"], sequence_parallel=True, loss_parallel=False)    # in place
    with sharded_loss(loss_parallel):
        logits, loss = model(ids_BT, targets_BT)      # plain tensors go in, a plain loss comes out
        loss.backward()
    finish_gradients(model.parameters())              # all ranks, once per step, before gradients are looked at

Attention and MLP are split by columns, then by rows (Shoeybi et al. 2019, Megatron-LM, section 3): whole heads and
whole hidden units per rank, one all-reduce after each of them, and one in the backward before each. The token embedding
and the head are split over the vocabulary. With `sequence_parallel` each all-reduce becomes an all-gather and a
reduce-scatter, and norms and dropout between them see T/t positions per rank (Korthikanti et al. 2022, section 4.2.2).

Parameters are DTensors, which FSDP and checkpoints understand. Layers multiply this rank's shares of them, and `moves`
stand where streams enter and leave: DTensor's own products would cost a small model more than what they compute.

A llama's queries, keys and values are matrices of their own. Where it has fewer heads of keys than there are ranks,
each rank holds the weights of all of them, and multiplies with those of the one that its queries need.

Works on a whole `manyhands.gpt.model.GPT` and on a stage of a pipeline, which has only some of its parts.
Shapes: B sequences, T positions, D width, V tokens in the vocabulary, t tensor ranks.
"""

import contextlib
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as tp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from manyhands.gpt.experts import Experts
from manyhands.gpt.llama import rms_norm
from manyhands.gpt.model import Attention, GroupedAttention
from manyhands.parallel.experts import share_experts
from manyhands.parallel.fsdp import is_tied
from manyhands.parallel.moves import f, g, gathered, joined, scattered, shared_out


def apply_tensor_parallel(
    model: Any, tensor_mesh: DeviceMesh, sequence_parallel: bool = False, loss_parallel: bool = False
) -> None:
    """Split the layers of `model` (a GPT or a stage of one) over `tensor_mesh`, in place. All its ranks call it.

    Every rank holds the same full weights before, and its shards after: nothing is sent. Heads, hidden units and (with
    `sequence_parallel`) block_size must divide by the mesh's size (`layout` makes sure), the vocabulary need not.
    """
    tied, group = is_tied(model), tensor_mesh.get_group()
    # where the stream x_BTD between the layers enters split ones, and where what they make of it leaves them
    enter, leave = (partial(move, group=group) for move in ((gathered, scattered) if sequence_parallel else (f, g)))
    if hasattr(model, "tokens"):
        _split_vocabulary(model.tokens, tensor_mesh, leave)
        if sequence_parallel and model.positions is not None:
            _own_positions(model.positions, tensor_mesh)
    for block in model.blocks.values() if hasattr(model.blocks, "values") else model.blocks:
        attention, mlp = block.attention, block.mlp
        llama = isinstance(attention, GroupedAttention)
        _enter(attention, enter)
        for name in ("q", "k", "v") if llama else ("qkv",):
            if name in ("k", "v") and model.config.kv_heads < tensor_mesh.size():
                _own_head(getattr(attention, name), tensor_mesh, model.config)
            else:
                _by_columns(getattr(attention, name), tensor_mesh)
        _by_rows(attention.out, tensor_mesh, leave)
        if isinstance(mlp, Experts):
            if sequence_parallel:  # each rank's router sees all positions, and chooses alike
                _enter(mlp, partial(joined, group=group, dim=1))
            mlp.register_forward_hook(lambda _, args, y_BTD: leave(y_BTD))
            if mlp.shared is not None:
                _enter(mlp.shared, partial(f, group=group))
                _by_columns(mlp.shared.up, tensor_mesh)
                _by_rows(mlp.shared.down, tensor_mesh)
        else:
            _enter(mlp, enter)
            for layer in (mlp.gate, mlp.up) if llama else (mlp.up,):
                _by_columns(layer, tensor_mesh)
            _by_rows(mlp.down, tensor_mesh, leave)
        if sequence_parallel:
            _norm_positions(block.norm_1, tensor_mesh)
            _norm_positions(block.norm_2, tensor_mesh)
    share_experts(model, tensor_mesh)
    if hasattr(model, "head"):
        _enter(model.head, enter)
        _by_columns(model.head, tensor_mesh)
        whole = _as_sharded if loss_parallel else _joined_logits
        model.head.register_forward_hook(partial(whole, mesh=tensor_mesh))
        if sequence_parallel:
            _norm_positions(model.norm, tensor_mesh)
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
    all-reduce adds them all up. Without it the ranks drift apart (Megatron-LM#443).
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


def _hold(layer, mesh, placements):
    """Turn the parameters of `layer` into DTensors, in place, by {name: placement}: each rank cuts its own share."""
    for name, parameter in layer.named_parameters(recurse=False):
        # every rank has the full weights: src_data_rank=None sends nothing
        own = distribute_tensor(parameter.detach(), mesh, [placements[name]], src_data_rank=None)
        layer.register_parameter(name, nn.Parameter(own, parameter.requires_grad))


def _own(parameter, is_part=False):
    """This rank's share of a parameter (or None), for products; `is_part`: its gradients here are partial sums."""
    return parameter if parameter is None else parameter.to_local(grad_placements=[Partial()] if is_part else None)


def _enter(module, move):
    module.register_forward_pre_hook(lambda _, args: (move(args[0]), *args[1:]))


def _by_columns(layer, mesh):
    """Some of the outputs per rank."""
    _hold(layer, mesh, {"weight": Shard(0), "bias": Shard(0)})
    layer.forward = lambda x: F.linear(x, _own(layer.weight), _own(layer.bias))


def _by_rows(layer, mesh, leave=None):
    """Some of the inputs per rank: the outputs are partial sums, of the bias too, until they `leave`."""
    _hold(layer, mesh, {"weight": Shard(1), "bias": Replicate()})

    def multiplied(x):
        bias = None if layer.bias is None else shared_out(_own(layer.bias), mesh.get_group())
        y = F.linear(x, _own(layer.weight), bias)
        return leave(y) if leave else y

    layer.forward = multiplied


def _own_head(layer, mesh, config):
    """Keys or values of fewer heads than ranks: all weights on each rank, those of its own queries' head multiplied."""
    _hold(layer, mesh, {"weight": Replicate()})
    first = mesh.get_local_rank() * config.kv_heads // mesh.size() * config.head_size
    layer.forward = lambda x: F.linear(x, _own(layer.weight, True)[first : first + config.head_size])


def _norm_positions(norm, mesh):
    """A norm of this rank's positions: all weights on each rank."""
    _hold(norm, mesh, {"weight": Replicate(), "bias": Replicate()})
    if isinstance(norm, nn.RMSNorm):
        norm.forward = lambda x: rms_norm(x, _own(norm.weight, True), norm.eps)
    else:
        norm.forward = lambda x: F.layer_norm(
            x, norm.normalized_shape, _own(norm.weight, True), _own(norm.bias, True), norm.eps
        )


def _own_positions(embedding, mesh):
    """The position embedding under sequence parallelism: all weights on each rank, the own T/t positions looked up."""
    _hold(embedding, mesh, {"weight": Replicate()})
    embedding.forward = lambda positions_T: F.embedding(
        positions_T.chunk(mesh.size())[mesh.get_local_rank()], _own(embedding.weight, True)
    )


def _split_vocabulary(embedding, mesh, leave):
    """Some tokens per rank, which looks up zeros for all others."""
    _hold(embedding, mesh, {"weight": Shard(0)})
    first = mesh.get_local_rank() * -(-embedding.num_embeddings // mesh.size())  # as DTensor cuts rows

    def looked_up(ids_BT):
        weight, own_BT = _own(embedding.weight), ids_BT - first
        elsewhere_BT = (own_BT < 0) | (own_BT >= len(weight))
        x_BTD = F.embedding(own_BT.masked_fill(elsewhere_BT, 0), weight)
        return leave(x_BTD.masked_fill(elsewhere_BT[..., None], 0))

    embedding.forward = looked_up


def _joined_logits(head, _, logits_BTv, mesh):
    return joined(logits_BTv, mesh.get_group(), logits_BTv.ndim - 1, head.out_features)


def _as_sharded(head, _, logits_BTv, mesh):
    """The logits as a DTensor, for torch's loss of them."""
    whole = torch.empty(*logits_BTv.shape[:-1], head.out_features, device="meta")
    return DTensor.from_local(
        logits_BTv, mesh, [Shard(logits_BTv.ndim - 1)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


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
