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
from typing import NamedTuple

from manyhands.predict.activation_memory import activation_bytes, sequences_at_once
from manyhands.predict.planned_model import share_of
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
    accumulated: (
        int  # FSDP with several micro-batches: gradients of whole units, which are summed over ranks at the last one
    )
    momentary: int  # logits and their gradient in 32 bits; under FSDP the whole gradient of a unit before it is cut
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
        *rest, activation_bytes(share_of(model, layout.context), layout, options), accumulated_bytes(model, layout, options),
        momentary_bytes(model, layout, options), options.parallel.offload,
    )  # fmt: skip


def bytes_at_rest(model, layout, options):
    """(parameters, gradients, optimizer, copies, gathered) of the fullest rank, as `rank_memory.bytes_per_rank` counts them.

    For replicas, zero1 and fsdp wrapped by block; DeepSpeed is not planned.
    """
    parallel = options.parallel
    keeps_gathered = parallel.strategy != "fsdp" or parallel.sharding in ("grad_op", "none")
    return _at_rest(
        model, layout.dp_mode(options), layout.pipeline, layout.stages_per_rank, layout.tensor, layout.shard,
        layout.replicate, layout.expert, keeps_gathered, weight_bytes(options), PRECISION_BYTES[options.train.precision],
        MOMENTS[options.optimizer.name],
    )  # fmt: skip


@cache
def _at_rest(
    model,
    kind,
    pipeline,
    stages_per_rank,
    tensor,
    shard,
    replicate,
    expert,
    keeps_gathered,
    size,
    low,
    moments,
):
    found = []
    for rank in sorted(set(stages_of_ranks(model.n_layer, pipeline, stages_per_rank))):  # many are alike
        stages = [(layers, *_shares(model, tensor, expert, is_first, is_last)) for layers, is_first, is_last in rank]
        if kind == "fsdp":
            found.append(_fsdp(stages, shard, expert, keeps_gathered, size, low, moments))
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
def rank_parameters(model, tensor, pipeline, stages_per_rank, expert=1):
    """(parameters of the fullest pipeline rank, those of experts among them): its tensor share, before sharding over data."""
    found = []
    for rank in set(stages_of_ranks(model.n_layer, pipeline, stages_per_rank)):
        count = experts = 0
        for layers, is_first, is_last in rank:
            layer, around = _shares(model, tensor, expert, is_first, is_last)
            count += layers * _numel(layer) + _numel(around)
            experts += layers * _numel([share for share in layer if share.expert])
        found.append((count, experts))
    return max(found)


class Share(NamedTuple):
    """What a tensor rank has of a weight."""

    shape: tuple[int, ...]
    linear: bool
    expert: bool

    @property
    def numel(self):
        return prod(self.shape)


@cache
def _shares(model, tensor, expert, is_first, is_last):
    """What the first tensor rank has of a layer, with its share of the experts, and of what is around the layers: [Share] each."""
    around = (model.front_weights() if is_first else []) + (model.back_weights() if is_last else [])
    layer = model.layer_weights(model.n_expert // expert)
    return [[_share(weight, tensor) for weight in weights] for weights in (layer, around)]


def _share(weight, tensor):
    shape = tuple(ceil(n / tensor) if dim == weight.split else n for dim, n in enumerate(weight.shape))
    return Share(shape, weight.linear, weight.expert)


def _numel(shares):
    return sum(share.numel for share in shares)


def _whole(stages, sharing, size, low, moments):
    """Copies: all of it; with zero1 the optimizer's state goes to `sharing` ranks, the largest weights first."""
    count = sum(layers * _numel(layer) + _numel(around) for layers, layer, around in stages)
    owned = count
    if sharing > 1:
        weights = [share.numel for layers, layer, around in stages for share in layer * layers + around]
        loads = [(0, rank) for rank in range(sharing)]
        for numbers in sorted(weights, reverse=True):
            load, rank = loads[0]
            heapq.heapreplace(loads, (load + numbers, rank))
        owned = max(loads)[0]
    linear = sum(layers * _linear(layer) + _linear(around) for layers, layer, around in stages)
    return count * size, count * size, moments * owned * size, linear * low if low < size else 0, 0


def _linear(shares):
    return sum(share.numel for share in shares if share.linear)


def _fsdp(stages, shard, expert, keeps_gathered, size, low, moments):
    """fully_shard: each weight is cut along its first dim and padded; a layer is a unit, all else the root.

    Ranks that the experts are spread over hold different ones: so many fewer share an expert.
    """
    held = gathered = 0
    for layers, layer, around in stages:
        unit, root = _sharded(layer, shard, expert), _sharded(around, shard, expert)
        held += layers * unit[0] + root[0]
        gathered += (layers if keeps_gathered else min(layers, 1)) * unit[1] + root[1]
    return held * size, held * size, moments * held * size, 0, gathered * low


def _sharded(shares, shard, expert):
    """Numbers of these weights, padding included: (that a rank holds, that it gathers)."""
    held = gathered = 0
    for share in shares:
        ranks = max(1, shard // expert) if share.expert else shard
        part = ceil(share.shape[0] / ranks) * prod(share.shape[1:])
        held, gathered = held + part, gathered + part * ranks
    return held, gathered


def accumulated_bytes(model, layout, options):
    """Gradients that FSDP holds whole until the last micro-batch, in the precision in which it sums them; 0 with one alone."""
    ranks = layout.replicate * layout.shard
    if layout.dp_mode(options) != "fsdp" or layout.micro_batches == 1 or ranks == 1:
        return 0
    numbers, experts = rank_parameters(model, layout.tensor, layout.pipeline, layout.stages_per_rank, layout.expert)
    if layout.expert == ranks:  # no other rank has these experts: nothing is to be summed
        numbers -= experts
    return numbers * weight_bytes(options)


def momentary_bytes(model, layout, options):
    """What single operations need for the moment: the most of it.

    The logits in 32 bits and their gradient, on the last stage; under FSDP the gradient of the largest unit, in low precision
    and once more in 32 bits, on its way into a reduce-scatter; on context ranks the keys and values of another rank and their
    gradients, here and on their way; tokens on their way to experts and back.
    """
    low, size = PRECISION_BYTES[options.train.precision], weight_bytes(options)
    split = layout.tensor if options.parallel.loss_parallel else 1
    tokens = sequences_at_once(layout, options) * model.block_size // layout.context
    found = 2 * 4 * tokens * ceil(model.vocab_size / split)
    if layout.context > 1:
        found += 2 * 2 * tokens * ceil(model.kv_width / layout.tensor) * (low + size)
    if layout.expert > 1:
        found += ceil(2 * tokens * model.routed * model.n_embd * low)
    if layout.dp_mode(options) != "fsdp":
        return found
    return found + _largest_unit(model, layout.tensor, layout.expert, layout.pipeline == 1) * (low + size)


@cache
def _largest_unit(model, tensor, expert, is_last):
    """Parameters of the largest unit of FSDP: a layer, or all that is around the layers."""
    return max(_numel(shares) for shares in _shares(model, tensor, expert, True, is_last))
