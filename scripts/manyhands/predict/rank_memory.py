"""Bytes that a rank keeps between two steps, by formula: nothing is allocated and nothing communicates.

    held = bytes_per_rank(config, layout, options)     # Bytes of the fullest rank
    print(held.parameters, held.gradients, held.optimizer, held.copies, held.gathered, held.total)
    state_bytes(P, "bf16 + fp32 master")               # and on paper, without a layout (see `bytes_per_parameter`)

Counted: the weights that the optimizer updates, their gradients, Adam's two moments, copies in another precision, and
what FSDP gathers for the moment. Not counted: activations, buffers of the communication library, the allocator's waste.
After Rajbhandari et al. 2020 (ZeRO), section 5; each function says what it assumes.
"""

from dataclasses import replace
from math import ceil, prod

import torch

from manyhands.gpt.model import GPT
from manyhands.measure.tensor_bytes import Bytes
from manyhands.parallel.deepspeed_engine import LIVE_NUMEL
from manyhands.parallel.fsdp import parameters_by_unit, units
from manyhands.parallel.pipeline_stage import Stage, layers_of_stages, stage_owners
from manyhands.predict.precision import MOMENTS, PRECISION_BYTES, weight_bytes

# which dim of a weight the tensor ranks split (see `tensor_parallel`); they hold all others whole
TENSOR_DIM = {
    "attention.qkv.weight": 0,
    "attention.qkv.bias": 0,
    "attention.out.weight": 1,
    "mlp.up.weight": 0,
    "mlp.up.bias": 0,
    "mlp.down.weight": 1,
    "tokens.weight": 0,  # over the vocabulary
    "head.weight": 0,
    "head.bias": 0,
}


def parameter_terms(config):
    """{term: parameters} of a GPT, from the embeddings to the head; together `config.num_params()`.

    Per layer 12 D^2 of matrices and 10 D of biases and norms (13 D with qkv_bias), beside them D (V + T) of embeddings, 2 D
    of the last norm and V (D + 1) of the head, which has none of its own where it is tied to the token embedding.
    """
    N, D, V, T = config.n_layer, config.n_embd, config.vocab_size, config.block_size
    return {
        "token embedding": V * D,
        "position embedding": T * D,
        "qkv": N * (3 * D**2 + (3 * D if config.qkv_bias else 0)),
        "attention out": N * (D**2 + D),
        "mlp up": N * (4 * D**2 + 4 * D),
        "mlp down": N * (4 * D**2 + D),
        "layer norms": N * 4 * D,
        "final norm": 2 * D,
        "head": 0 if config.tie else V * (D + 1),
    }


def bytes_per_rank(config, layout, options):
    """The `Bytes` of the fullest rank: with a pipeline, of the one whose stages hold the most."""
    return max((_of_rank(config, layout, options, i) for i in range(layout.pipeline)), key=lambda b: b.total)


def checkpoint_bytes(config, options):
    """What a checkpoint holds under every strategy: weights and optimizer, whole, in their own precision."""
    return config.num_params() * weight_bytes(options) * (1 + MOMENTS[options.optimizer.name])


def accumulated_bytes(config, layout, options):
    """Gradients that FSDP holds whole from one micro-batch to the next, as it sums them over the ranks after the last; else 0."""
    if layout.dp_mode(options) != "fsdp" or layout.micro_batches == 1 or layout.data == 1:
        return 0
    models = (_models(config, layout, options, i) for i in range(layout.pipeline))
    return max(_numel(_shapes(parts, layout)) for parts in models) * weight_bytes(options)


def _of_rank(config, layout, options, pipeline_rank):
    models = _models(config, layout, options, pipeline_rank)
    kinds = {"replicas": _whole, "fsdp": _fsdp, "zero1": _zero1, "deepspeed": _deepspeed}
    return kinds[layout.dp_mode(options)](models, _shapes(models, layout), layout, options)


def _shapes(models, layout):
    """{weight: shape of this rank's tensor share}; DTensor gives the first ranks the larger parts."""
    return {
        weight: tuple(ceil(n / layout.tensor) if d == _tensor_dim(name) else n for d, n in enumerate(weight.shape))
        for model in models
        for name, weight in model.named_parameters()
    }


def _models(config, layout, options, pipeline_rank):
    """The modules that a rank holds, without numbers in them: the GPT, or its stages."""
    with torch.device("meta"):
        model = GPT(config)
    if layout.pipeline == 1:
        return [model]
    owners = stage_owners(options.parallel.schedule, layout.pipeline, layout.stages_per_rank)
    layers = layers_of_stages(config.n_layer, len(owners))
    return [Stage(model, layers[i]) for i, owner in enumerate(owners) if owner == pipeline_rank]


def _tensor_dim(name):
    return next((dim for end, dim in TENSOR_DIM.items() if name.endswith(end)), None)


def _numel(shapes):
    return sum(prod(shape) for shape in shapes.values())


def _whole(models, shapes, layout, options):
    """ddp, tp, pp: a rank has its part of the model for itself. The gradients are the buckets that are sent.

    Autocast keeps a copy of what its linear layers multiply with and add, from the forward until the backward has used it;
    embeddings and norms it leaves as they are.
    """
    count, size, low = _numel(shapes), weight_bytes(options), PRECISION_BYTES[options.train.precision]
    moments = MOMENTS[options.optimizer.name] * count
    linear = {
        p
        for model in models
        for module in model.modules()
        if isinstance(module, torch.nn.Linear)
        for p in module.parameters()
    }
    cast = _numel({p: shapes[p] for p in linear}) * low if low < size else 0
    return Bytes(count * size, count * size, moments * size, copies=cast)


def _zero1(models, shapes, layout, options):
    """ZeroRedundancyOptimizer: whole tensors, the largest first, each to the rank that has the least so far."""
    shares = [0] * layout.replicate
    for count in sorted((prod(shape) for shape in shapes.values()), reverse=True):
        shares[shares.index(min(shares))] += count
    moments = MOMENTS[options.optimizer.name] * max(shares)
    return replace(_whole(models, shapes, layout, options), optimizer=moments * weight_bytes(options))


def _fsdp(models, shapes, layout, options):
    """fully_shard cuts each weight along its first dim and pads: all ranks have what the first has. Gradients lie alike.

    Gathered at the same time, in the precision of the products: the root, which stays, and the largest unit; with sharding
    grad_op and none all units. A unit that is fetched early would come on top. With offload, all but these are in the
    host's memory.
    """
    size, low = weight_bytes(options), PRECISION_BYTES[options.train.precision]
    moments = MOMENTS[options.optimizer.name]
    # {weight: numbers}: of this rank, and of all with the padding, which is gathered too
    parts = {p: ceil(shape[0] / layout.shard) * prod(shape[1:]) for p, shape in shapes.items()}
    padded = {p: part * layout.shard for p, part in parts.items()}
    held, gathered = sum(parts.values()), sum(padded.values())
    if options.parallel.strategy == "fsdp" and options.parallel.sharding not in ("grad_op", "none"):
        gathered = sum(_at_once(model, padded, options.parallel.wrapping) for model in models)
    return Bytes(held * size, held * size, moments * held * size, gathered=gathered * low)


def _at_once(model, counts, wrapping):
    """Numbers that are whole at the same time: the root's, and the most of a unit with the units around it."""
    parts = [sum(counts[p] for p in part) for part in parameters_by_unit(model, wrapping)]
    inside = [{inner for module in unit for inner in module.modules()} for unit in units(model, wrapping)]
    nests = [sum(parts[j] for j in range(i, len(inside)) if inside[i] <= inside[j]) for i in range(len(inside))]
    return parts[-1] + max(nests, default=0)


def _deepspeed(models, shapes, layout, options):
    """DeepSpeed's ZeRO cuts what it shards into equal parts; gradients and weights are fp32, as this course sets it up.

    Stages 1 and 2 keep a master copy of a rank's part beside the whole weights. Stage 3 keeps up to LIVE_NUMEL numbers of
    what it has gathered until the step is over.
    """
    stage, count, moments = options.parallel.zero_stage, _numel(shapes), MOMENTS[options.optimizer.name]
    share, size = ceil(count / layout.replicate), weight_bytes(options)
    low = PRECISION_BYTES[options.train.precision]
    if stage < 3:
        gradients = count if stage == 1 else share
        copies = share * size + (count * low if low < size else 0)
        return Bytes(count * size, gradients * size, moments * share * size, copies=copies)
    return Bytes(share * size, share * size, moments * share * size, gathered=min(count, LIVE_NUMEL) * low)
