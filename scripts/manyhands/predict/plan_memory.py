"""Bytes of a GPU under a layout that is planned, in closed form: thousands of layouts per second, and without torch.

    held = planned_bytes(model, layout, options)     # PlannedBytes of the fullest rank
    held.on_gpu                                      # what must fit

Between two steps the same numbers as `rank_memory.bytes_per_rank`, which builds the model and asks torch; within a step those
of `activation_memory.activation_bytes`. Tests hold both together, to the byte, and with what real ranks hold.
"""

import heapq
from dataclasses import dataclass, fields
from functools import cache
from math import ceil, prod

from manyhands.predict.activation_memory import activation_bytes, sequences_at_once
from manyhands.predict.precision import MOMENTS, PRECISION_BYTES, weight_bytes

AT_REST = ("parameters", "gradients", "optimizer")  # what offload moves to the host


@dataclass(frozen=True)
class PlannedBytes:
    """Bytes of one rank, by kind."""

    parameters: int
    gradients: int
    optimizer: int
    copies: int  # autocast's, in low precision
    gathered: int  # FSDP: weights of other ranks that are here for the moment
    activations: int
    accumulated: int  # FSDP with several micro-batches: gradients of whole units, which are summed over ranks at the last one
    momentary: (
        int  # logits and their gradient in 32 bits; under FSDP the whole gradient of a unit before it is cut
    )
    offload: bool = False

    @property
    def on_host(self):
        """What offload keeps in the host's memory instead."""
        return sum(getattr(self, kind) for kind in AT_REST) if self.offload else 0

    @property
    def on_gpu(self):
        """What the GPU's memory must hold at its fullest moment."""
        return sum(self.by_kind().values()) - self.on_host

    def by_kind(self):
        """{kind: bytes}."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "offload"}


def planned_bytes(model, layout, options):
    """The PlannedBytes of a PlannedModel under a Layout and Options of the trainer, AdamW included."""
    rest = bytes_at_rest(model, layout, options)
    return PlannedBytes(
        *rest, activation_bytes(model, layout, options), accumulated_bytes(model, layout, options),
        momentary_bytes(model, layout, options), options.parallel.offload,
    )  # fmt: skip


def bytes_at_rest(model, layout, options):
    """(parameters, gradients, optimizer, copies, gathered) of the fullest rank, as `rank_memory.bytes_per_rank` counts them.

    For copies, zero1 and fsdp wrapped by block; DeepSpeed is not planned.
    """
    parallel = options.parallel
    keeps_gathered = parallel.strategy != "fsdp" or parallel.sharding in ("grad_op", "none")
    return _at_rest(
        model, layout.data_by(options), layout.pipeline, layout.stages_per_rank, layout.tensor, layout.shard,
        layout.replicate, keeps_gathered, weight_bytes(options), PRECISION_BYTES[options.train.precision],
        MOMENTS[options.optimizer.name],
    )  # fmt: skip


@cache
def _at_rest(
    model, kind, pipeline, stages_per_rank, tensor, shard, replicate, keeps_gathered, size, low, moments
):
    found = []
    for rank in sorted(set(stages_of_ranks(model.n_layer, pipeline, stages_per_rank))):  # many are alike
        stages = [(layers, *_shares(model, tensor, is_first, is_last)) for layers, is_first, is_last in rank]
        if kind == "fsdp":
            found.append(_fsdp(stages, shard, keeps_gathered, size, low, moments))
        else:
            found.append(_whole(stages, replicate if kind == "zero1" else 1, size, low, moments))
    return max(found, key=sum)


def stages_of_ranks(n_layer, pipeline, stages_per_rank):
    """Per pipeline rank a tuple of its stages: (layers, whether it is the first, whether it is the last).

    As `pipeline_stage` cuts the depth for 1F1B and Interleaved1F1B: around in a loop, the last stage gets no extra layer.
    """
    count = pipeline * stages_per_rank
    least, extra = divmod(n_layer, count)
    stages = [(least + (s < extra), s == 0, s == count - 1) for s in range(count)]
    return [tuple(stages[rank::pipeline]) for rank in range(pipeline)]


@cache
def rank_parameters(model, tensor, pipeline, stages_per_rank):
    """Parameters of the fullest pipeline rank, of its tensor share, before any sharding over data."""
    found = []
    for rank in set(stages_of_ranks(model.n_layer, pipeline, stages_per_rank)):
        count = 0
        for layers, is_first, is_last in rank:
            layer, around = _shares(model, tensor, is_first, is_last)
            count += layers * _numel(layer) + _numel(around)
        found.append(count)
    return max(found)


@cache
def _shares(model, tensor, is_first, is_last):
    """What the first tensor rank has of a layer, and of what is around the layers: [(shape, whether linear)] each."""
    around = (model.front_weights() if is_first else []) + (model.back_weights() if is_last else [])
    return [[_share(weight, tensor) for weight in weights] for weights in (model.layer_weights(), around)]


def _share(weight, tensor):
    shape = tuple(ceil(n / tensor) if dim == weight.split else n for dim, n in enumerate(weight.shape))
    return shape, weight.linear


def _numel(weights):
    return sum(prod(shape) for shape, _ in weights)


def _whole(stages, sharing, size, low, moments):
    """Copies: all of it; with zero1 the optimizer's state goes to `sharing` ranks, the largest weights first."""
    weights = [weight for layers, layer, around in stages for weight in layer * layers + around]
    count = _numel(weights)
    owned = count
    if sharing > 1:
        loads = [(0, rank) for rank in range(sharing)]
        for numbers in sorted((prod(shape) for shape, _ in weights), reverse=True):
            load, rank = loads[0]
            heapq.heapreplace(loads, (load + numbers, rank))
        owned = max(loads)[0]
    cast = sum(prod(shape) for shape, linear in weights if linear) * low if low < size else 0
    return count * size, count * size, moments * owned * size, cast, 0


def _fsdp(stages, shard, keeps_gathered, size, low, moments):
    """fully_shard: each weight is cut along its first dim and padded; a layer is a unit, all else the root."""
    held = gathered = 0
    for layers, layer, around in stages:
        unit, root = _sharded(layer, shard), _sharded(around, shard)
        held += layers * unit + root
        whole = layers * unit if keeps_gathered else min(layers, 1) * unit
        gathered += (whole + root) * shard
    return held * size, held * size, moments * held * size, 0, gathered * low


def _sharded(weights, shard):
    """Numbers that a rank holds of these weights, padding included."""
    return sum(ceil(shape[0] / shard) * prod(shape[1:]) for shape, _ in weights)


def accumulated_bytes(model, layout, options):
    """Gradients that FSDP holds whole until the last micro-batch, in the precision in which it sums them; 0 with one alone."""
    if layout.data_by(options) != "fsdp" or layout.micro_batches == 1 or layout.data == 1:
        return 0
    numbers = rank_parameters(model, layout.tensor, layout.pipeline, layout.stages_per_rank)
    return numbers * weight_bytes(options)


def momentary_bytes(model, layout, options):
    """What single operations need for the moment: the most of it.

    The logits in 32 bits and their gradient, on the last stage; under FSDP the gradient of the largest unit, in low precision
    and once more in 32 bits, on its way into a reduce-scatter.
    """
    split = layout.tensor if options.parallel.loss_parallel else 1
    tokens = sequences_at_once(layout, options) * model.block_size
    logits = 2 * 4 * tokens * ceil(model.vocab_size / split)
    if layout.data_by(options) != "fsdp":
        return logits
    layer, around = _shares(model, layout.tensor, True, layout.pipeline == 1)
    low, size = PRECISION_BYTES[options.train.precision], weight_bytes(options)
    return logits + max(_numel(layer), _numel(around)) * (low + size)
