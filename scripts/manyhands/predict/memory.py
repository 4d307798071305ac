"""Bytes of a rank under a layout, in closed form: nothing is allocated, nothing communicates, and nothing needs torch.

    held = bytes_per_rank(config, layout, options)     # RankBytes of the fullest rank; a GPTConfig or a PlannedModel
    held.parameters, held.optimizer, held.on_gpu       # what must fit
    RECIPES["bf16 + fp32 master"].total                # on paper, before any layout: 16 bytes per parameter
    zero_bytes(7.5e9, n_ranks=64, stage=3)             # 1.9e9 bytes on each rank

The dry run, the planner and the lessons all count by this one model. Counted: the weights that the optimizer updates,
their gradients, Adam's two moments, copies in another precision, what FSDP unshards, activations (see
`activation_memory`) and what single operations need. Not counted: masks of dropout, buffers of the communication
library, the allocator's waste. After Rajbhandari et al. 2020 (ZeRO), section 5; each function says what it assumes.
Tests hold it to real ranks.
"""

import heapq
from dataclasses import astuple, dataclass, fields, replace
from functools import cache, cached_property
from math import ceil, prod
from operator import itemgetter
from types import SimpleNamespace
from typing import NamedTuple

from manyhands.config.layout import resolve_layout
from manyhands.config.options import OptionError
from manyhands.config.strategies import STRATEGIES
from manyhands.config.wrapping import OUTSIDE, parsed, units_of_size
from manyhands.predict.activation_memory import (
    PRECISION_BYTES,
    activation_bytes,
    in_chunks,
    reduce_bytes,
    sequences_at_once,
    weight_bytes,
)
from manyhands.predict.models import PlannedModel, Weight, model_of, share_of
from manyhands.predict.pipeline_schedules import stages_of_ranks
from manyhands.predict.program import TRAIN_PY, Program

RESERVE = 0.1  # of a device's memory, for what is not modelled: its context, NCCL's buffers, the allocator's waste
STEADY = 2**16  # tokens of a micro-batch: more at once do not make a GPU faster
MOMENTS = {"adamw": 2, "sgd": 0}  # numbers that the optimizer keeps per parameter; SGD has no momentum here
AT_REST = ("parameters", "gradients", "optimizer")  # what lasts from step to step, and what offload moves to the host


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank, by kind: each at its most within a step."""

    parameters: int  # what the optimizer updates
    gradients: int
    optimizer: int  # Adam's moments
    copies: int  # the weights once more: in low precision for the products, or a master copy
    unsharded_parameters: int  # FSDP and ZeRO-3: weights of other ranks that are here for the moment
    activations: int
    accumulated_gradients: int  # FSDP with several micro-batches: of whole units, until the last micro-batch
    workspace: int  # logits and their gradient in 32 bits; under FSDP the whole gradient of a unit before it is cut
    offload: bool = False

    @property
    def between_steps(self) -> int:
        """The bytes that last from one step to the next."""
        return sum(getattr(self, kind) for kind in AT_REST)

    @property
    def on_host(self) -> int:
        """The bytes that offload keeps in the host's memory instead."""
        return self.between_steps if self.offload else 0

    @cached_property
    def on_gpu(self) -> int:
        """The bytes that the GPU's memory must hold at its fullest moment."""
        return sum(self.by_kind().values()) - self.on_host

    def kinds_on_gpu(self) -> dict[str, int]:
        """{kind: bytes} of what is in the GPU's memory at all."""
        on_host = AT_REST if self.offload else ()
        return {kind: size for kind, size in self.by_kind().items() if size and kind not in on_host}

    def largest_kinds(self) -> str:
        """Return the three largest kinds on the GPU, with their GB (10^9 bytes), as a phrase."""
        largest = sorted(self.kinds_on_gpu().items(), key=itemgetter(1), reverse=True)[:3]
        return ", ".join(f"{kind.replace('_', ' ')} {size / 1e9:.1f}" for kind, size in largest)

    def by_kind(self) -> dict[str, int]:
        """{kind: bytes}."""
        return {kind: getattr(self, kind) for kind in KINDS}


KINDS = tuple(field.name for field in fields(RankBytes) if field.name != "offload")


def bytes_per_rank(config, layout, options, program: Program = TRAIN_PY) -> RankBytes:
    """The RankBytes of the fullest rank: with a pipeline, of the one whose stages hold the most.

    `config` is a GPTConfig or a PlannedModel, `layout` and `options` are the trainer's, also for another `program`.
    """
    model = model_of(config)
    return RankBytes(
        *state_of_rank(model, layout, options, program),
        activation_bytes(share_of(model, layout.context, layout.tensor), layout, options, program),
        *_within_a_step(model, layout, options, program),
        options.parallel.offload,
    )


def with_lora(held: RankBytes, config, layout, options, rank: int, rows: bool = False) -> RankBytes:
    """Return `held` with all weights frozen and adapters of `rank` that learn, as `gpt.lora` puts them.

    `rows`: embedding and head learn, too, for tokens that are new. Autocast's copies of the adapters are left out.
    """
    model, storage = model_of(config), storage_of(layout, options)
    linears = [weight.shape for weight in model.layer_weights() if weight.linear and len(weight.shape) == 2]
    thin = [Weight("", shape) for o, i in linears for shape in ((rank, i), (o, rank))] * model.n_layer
    ends = [w for w in (*model.front_weights(), *model.back_weights()) if rows and w.module in ("tokens", "head")]

    def state(weights):
        units = [Unit(1, weights, weights)]
        share = SimpleNamespace(
            weights=weights, numel=sum(w.numel for w in weights), twice=[], units=lambda by: [units]
        )
        return STATES[storage.dp_mode](share, layout, storage)

    learns = state(thin + ends)
    summed = min(held.accumulated_gradients, sum(w.numel for w in thin + ends) * storage.reduced)
    return replace(
        held, parameters=held.parameters + state(thin).parameters, gradients=learns.gradients,
        optimizer=learns.optimizer, accumulated_gradients=summed,
    )  # fmt: skip


def room(memory_bytes: float) -> float:
    """Return what of a device's memory a plan may fill, so that planner, dry run and trainer agree on what fits."""
    return memory_bytes * (1 - RESERVE)


def with_micro_batch(options, config, world_size: int, per_node: int, memory_bytes: float):
    """Return `options` with the largest micro-batch that fits into a rank's memory and its reserve, or with 1.

    They are unchanged if they name a micro-batch, if a rank's whole share fits, or for a pipeline, which has its own
    rule. Micro-batches of more than STEADY tokens are not taken.
    """
    layout = resolve_layout(options, config, world_size, per_node)
    if options.train.micro_batch or layout.pipeline > 1:
        return options
    share = options.train.global_batch // layout.data
    for size in (size for size in range(share, 0, -1) if share % size == 0):
        chosen = replace(options, train=replace(options.train, micro_batch=None if size == share else size))
        layout = resolve_layout(chosen, config, world_size, per_node)
        fits = bytes_per_rank(config, layout, chosen).on_gpu <= room(memory_bytes)
        if size == 1 or (fits and size * config.block_size // layout.context <= STEADY):
            break
    return chosen


def checkpoint_bytes(config, options) -> int:
    """Return the size of a checkpoint under any strategy: full weights and optimizer, in their own precision."""
    return config.num_params() * weight_bytes(options) * (1 + MOMENTS[options.optimizer.name])


# ------------------------------------------------------------------ weights, gradients, optimizer


class State(NamedTuple):
    """The first five kinds of RankBytes: what does not depend on the batch."""

    parameters: int
    gradients: int
    optimizer: int
    copies: int = 0
    unsharded_parameters: int = 0


class Storage(NamedTuple):
    """The way in which weights are stored, according to the options."""

    dp_mode: str
    keeps_unsharded: bool  # FSDP keeps all units whole from the forward to the end of the backward
    wrapping: str
    zero_stage: int
    schedule: str
    size: int  # bytes of a number that the optimizer updates
    reduced: int  # and of one that data ranks sum
    low: int  # and of one that is multiplied
    moments: int  # bytes of the optimizer per number that it updates
    program: Program


def storage_of(layout, options, program: Program = TRAIN_PY) -> Storage:
    """The Storage of the trainer's options under a layout."""
    parallel, size, moments = options.parallel, weight_bytes(options), MOMENTS[options.optimizer.name]
    # replicas of tensor shares are FSDP's, too, and it keeps them
    dp_mode = STRATEGIES[parallel.strategy].dp_mode
    keeps = dp_mode != "fsdp" or parallel.sharding in ("grad_op", "none")
    if not program.master:
        dp_mode = layout.dp_mode(options)
    elif dp_mode != "fsdp":  # whose fp32 shards are the master copy
        dp_mode, moments = f"{dp_mode} of a master copy", moments + 1
    return Storage(
        dp_mode, keeps, parallel.wrapping, parallel.zero_stage, parallel.schedule,
        size, reduce_bytes(options), PRECISION_BYTES[options.train.precision], moments * size, program,
    )  # fmt: skip


def state_of_rank(model: PlannedModel, layout, options, program: Program = TRAIN_PY) -> State:
    """The State of the fullest rank."""
    # many layouts differ in their batch alone: it is remembered without
    return _state(model, _as_one_batch(layout), storage_of(layout, options, program))


@cache
def _as_one_batch(layout):
    return replace(layout, micro_batches=1)


@cache
def _state(model, layout, storage):
    if storage.dp_mode not in STATES:
        raise OptionError(f"no formula says what a rank holds under dp_mode={storage.dp_mode!r}; use another strategy")
    held = STATES[storage.dp_mode]
    return max((held(share, layout, storage) for share in shares_of_ranks(model, layout, storage.schedule)), key=sum)


@dataclass(frozen=True)
class Share:
    """The part of a model that the first tensor rank of a pipeline rank has, with one part of its experts."""

    model: PlannedModel
    tensor: int
    expert: int  # ranks over which the experts are spread
    stages: tuple[tuple[int, bool, bool], ...]  # see `stages_of_ranks`

    @cached_property
    def weights(self) -> list[Weight]:
        """In the order of `parameters()`."""
        model, found = self.model, []
        layer = model.layer_weights(model.experts // self.expert)
        for layers, first, last in self.stages:
            found += model.front_weights(last) * first + layer * layers + model.back_weights(first) * last
        return [weight.of_tensor_rank(self.tensor) for weight in found]

    @cached_property
    def numel(self) -> int:
        """Parameters, those of its experts included."""
        return sum(weight.numel for weight in self.weights)

    @cached_property
    def twice(self) -> list[Weight]:
        """The head of a tied model on a rank that has the first stage, too: its optimizer knows the embedding alone."""
        both = len(self.stages) > 1 and any(one[1] for one in self.stages) and any(one[2] for one in self.stages)
        return [self.weights[-1]] if self.model.tie and both else []

    @cached_property
    def expert_numel(self) -> int:
        """Parameters of its experts."""
        return sum(weight.numel for weight in self.weights if weight.expert)

    def units(self, wrapping: str) -> list[list["Unit"]]:
        """The units of FSDP of each stage."""
        return [fsdp_units(self.model, self.tensor, self.expert, *stage, wrapping) for stage in self.stages]


@cache
def _shares(model, tensor, expert, *pipeline):
    stages = dict.fromkeys(stages_of_ranks(model.n_layer, *pipeline))  # many are alike
    return [Share(model, tensor, expert, one) for one in stages]


def shares_of_ranks(model: PlannedModel, layout, schedule: str = "1F1B") -> list[Share]:
    """The different shares of the pipeline's ranks."""
    return _shares(model, layout.tensor, layout.expert, layout.pipeline, layout.stages_per_rank, schedule)


def fullest_share(model: PlannedModel, layout, schedule: str = "1F1B") -> Share:
    """That of the pipeline rank with the most parameters."""
    return max(shares_of_ranks(model, layout, schedule), key=lambda share: (share.numel, share.expert_numel))


def _whole(share, layout, storage):
    """ddp, tp, pp: a rank has its part of the model for itself. The gradients are the buckets that are sent.

    Autocast keeps a copy of what its linear layers multiply with and add, from the forward until the backward has used
    it; embeddings and norms it leaves as they are. With zero1, ZeroRedundancyOptimizer spreads the optimizer's state
    over the replicas: whole tensors, matrices before vectors, the largest first, each to the least loaded rank.
    """
    size, low = storage.size, storage.low
    count = share.numel
    owned = count - sum(weight.numel for weight in share.twice)
    if storage.dp_mode == "zero1":
        loads = [0] * layout.replicate  # a heap
        for weight in sorted(share.weights, key=lambda one: (len(one.shape) == 1, -one.numel)):
            heapq.heapreplace(loads, loads[0] + weight.numel)
        owned = max(loads)
    linear = sum(weight.numel for weight in share.weights if weight.linear)
    return State(count * size, count * size, storage.moments * owned, linear * low if low < size else 0)


def _fsdp(share, layout, storage):
    """fully_shard cuts each weight along its first dim and pads: all ranks have what the first has. So are gradients.

    Whole at the same time, in the precision of the products: the root, which stays, and the most of a unit with the
    units around it; where they stay for the step, all units. A unit that is fetched early would come on top.
    """
    held = unsharded = 0
    for units in share.units(storage.wrapping):
        cut = [(unit.times, *padded(unit.weights, layout)) for unit in units]
        held += sum(times * part for times, part, _ in cut)
        if storage.keeps_unsharded:
            unsharded += sum(times * whole for times, _, whole in cut)
        else:
            unsharded += cut[-1][2] + max(padded(unit.nested, layout)[1] for unit in units)
    size, owned = storage.size, held - padded(share.twice, layout)[0]
    return State(held * size, held * size, storage.moments * owned, 0, unsharded * storage.low)


def _master(share, layout, storage):
    """Weights in low precision with gradients in fp32; a master copy with its moments, which zero1 shares equally."""
    experts, ranks = share.expert_numel, layout.replicate if storage.dp_mode.startswith("zero1") else 1
    owned = ceil((share.numel - experts) / ranks) + ceil(experts / max(1, ranks // layout.expert))
    return State(share.numel * storage.low, share.numel * storage.size, storage.moments * owned)


def padded(weights: list[Weight], layout) -> tuple[int, int]:
    """Numbers of these weights, padding included: (that a rank holds, that it gathers).

    Ranks that the experts are spread over hold different ones: fewer ranks share an expert. In `train.py`, whose
    experts are one weight of the module `mlp`, FSDP leaves those to the ranks that hold them, and gathers none.
    """
    held = whole = 0
    for weight in weights:
        if weight.expert and layout.expert > 1 and weight.module == "mlp":
            held += weight.numel
            continue
        ranks = max(1, layout.shard // layout.expert) if weight.expert else layout.shard
        part = ceil(weight.shape[0] / ranks) * prod(weight.shape[1:])
        held, whole = held + part, whole + part * ranks
    return held, whole


class Unit(NamedTuple):
    """The parameters that FSDP gathers in one message; there are `times` equal units."""

    times: int
    weights: list[Weight]  # its own, without those of units further inside
    nested: list[Weight]  # its own, and those of the units around it: the root's left out


@cache
def fsdp_units(
    model: PlannedModel, tensor: int, expert: int, layers: int, is_first: bool, is_last: bool, wrapping: str
) -> list[Unit]:
    """The units of a stage as `parallel.fsdp` wraps it; the last one is the root, which may have nothing left."""
    layer = model.layer_weights(model.experts // expert)
    around = model.front_weights(is_last) * is_first + model.back_weights(is_first) * is_last
    kind, count = parsed(wrapping)
    if kind == "size":
        inner, of_root = _by_size(layer, count, is_layer=True)
        outer, left = _by_size(around, count, is_layer=False)
        units = [(layers, *unit) for unit in inner] + [(1, *unit) for unit in outer]
        around = of_root * layers + left
    else:
        units = [(layers // count, layer * count), (1, layer * (layers % count))]
        if kind == "block_and_size":
            units += [(1, [w for w in around if w.module == name]) for name in OUTSIDE]
            around = [w for w in around if w.module not in OUTSIDE]
        units = [(times, own, own) for times, own in units if times and own]
    return [
        Unit(times, *([weight.of_tensor_rank(tensor) for weight in weights] for weights in both))
        for times, *both in (*units, (1, around, []))
    ]


def _by_size(weights, least, is_layer):
    """([(weights of a unit, and those of the units around it)], weights in no unit)."""
    paths = [tuple(weight.module.split(".")) for weight in weights]
    # with the modules around them, and the layer itself; outside the layers that would be the root
    own = {path[:depth]: 0 for path in paths for depth in range(0 if is_layer else 1, len(path) + 1)}
    for path, weight in zip(paths, weights, strict=True):
        own[path] += weight.numel
    units = units_of_size(own, least)
    found = {unit: [w for w, path in zip(weights, paths, strict=True) if path in units[unit]] for unit in units}
    nested = {unit: [w for other in found if other == unit[: len(other)] for w in found[other]] for unit in found}
    left = [w for w, path in zip(weights, paths, strict=True) if not any(path in inside for inside in units.values())]
    return [(own, nested[unit]) for unit, own in found.items()], left


def _deepspeed(share, layout, storage):
    """DeepSpeed's ZeRO cuts what it shards into equal parts; gradients and weights are fp32, as this course sets it up.

    Stages 1 and 2 keep a master copy of a rank's part beside the whole weights. Stage 3 keeps up to LIVE_NUMEL numbers
    of what it has gathered until the step is over.
    """
    from manyhands.parallel.deepspeed_engine import LIVE_NUMEL  # late: it brings torch

    size, low, count = storage.size, storage.low, share.numel
    part = ceil(count / layout.replicate)
    moments = storage.moments * part
    if storage.zero_stage == 3:
        return State(part * size, part * size, moments, 0, min(count, LIVE_NUMEL) * low)
    gradients = count if storage.zero_stage == 1 else part
    return State(count * size, gradients * size, moments, part * size + (count * low if low < size else 0))


# {dp_mode of a strategy: (Share, layout, Storage) -> State}
STATES = {"replicas": _whole, "zero1": _whole, "fsdp": _fsdp, "deepspeed": _deepspeed}
STATES |= {"replicas of a master copy": _master, "zero1 of a master copy": _master}


def _within_a_step(model, layout, options, program):
    """(accumulated gradients, workspace) in bytes.

    Gradients accumulate whole, unit by unit, in the precision in which FSDP sums them over ranks after the last of
    several micro-batches. Workspace is the most that single operations need: the logits in 32 bits and their gradient,
    on the last stage; under FSDP the gradient of the largest unit, in low precision and as it is summed, on its way
    into a reduce-scatter; on context ranks the keys and values of another rank and their gradients, here and on
    their way, and in the trainer's ring, where no kernel spares them, a block of scores and their gradient; tokens on
    their way to experts and back.
    """
    low, size, reduced = PRECISION_BYTES[options.train.precision], weight_bytes(options), reduce_bytes(options)
    sharded = storage_of(layout, options, program).dp_mode == "fsdp"
    tokens = sequences_at_once(layout, options) * model.block_size // layout.context
    logits = tokens * ceil(model.vocab_size / (layout.tensor if options.parallel.loss_parallel else 1))
    chunk = in_chunks(model, layout, options)
    workspace = 5 * 4 * chunk if chunk else 2 * 4 * logits
    if program.saves == "inputs":  # a kernel makes the gradient in 16 bits where the logits were
        workspace = low * logits
    if layout.context > 1:
        kv_width = share_of(model, 1, layout.tensor).kv_width
        workspace += 2 * 2 * tokens * ceil(kv_width / layout.tensor) * (low + size)
    no_scores = low == 2 and model.separator is None  # FlashAttention; a plan of others' runs takes such kernels, too
    if options.parallel.context > 1 and not no_scores:
        positions = model.block_size // layout.context
        workspace += 2 * tokens * positions * ceil(model.n_head / layout.tensor) * size
    if layout.expert > 1:
        share = layout.tensor if model.stacks_experts else 1
        workspace += ceil(2 * tokens * model.routed * model.n_embd * low / share)
    if sharded:
        stage = (model.n_layer, True, layout.pipeline == 1)
        units = fsdp_units(model, layout.tensor, layout.expert, *stage, options.parallel.wrapping)
        workspace += max(sum(weight.numel for weight in unit.weights) for unit in units) * (low + reduced)
    accumulated, ranks = 0, layout.replicate * layout.shard
    if sharded and layout.micro_batches > 1 and ranks > 1 and not program.sums_each:
        share = fullest_share(model, layout, options.parallel.schedule)
        # where no other rank has these experts, nothing of them is to be summed
        accumulated = (share.numel - (share.expert_numel if layout.expert == ranks else 0)) * reduced
    return accumulated, workspace


# ------------------------------------------------------------------ on paper


@dataclass(frozen=True)
class Recipe:
    """Bytes that training keeps per parameter, by kind."""

    weights: float  # what the forward multiplies with, or is cast from
    gradients: float
    master: float  # the weights once more, exact, where the update goes
    moments: float  # Adam's two
    cast: float = 0  # autocast's copies, which live from the forward to the backward

    @property
    def total(self) -> float:
        """Bytes per parameter while a step runs, the copies of a cast included."""
        return sum(astuple(self))


# Adam or AdamW throughout. "bf16 + fp32 master" is the mixed precision of Rajbhandari et al. 2020, section 3.1 (2 + 2 +
# 12). Many slides take its 2 + 12 and leave the gradients out.
RECIPES = {
    "fp32": Recipe(weights=4, gradients=4, master=0, moments=8),
    "bf16": Recipe(weights=2, gradients=2, master=0, moments=4),
    "bf16 + fp32 master": Recipe(weights=2, gradients=2, master=4, moments=8),
    "bf16 + fp32 master and gradients": Recipe(weights=2, gradients=4, master=4, moments=8),
    "fp32 + autocast": Recipe(weights=4, gradients=4, master=0, moments=8, cast=2),
    "14P of many slides": Recipe(weights=2, gradients=0, master=4, moments=8),
}


def zero_bytes(num_params: float, n_ranks: int, stage: int, k: float = 12) -> float:
    """Bytes of each of `n_ranks` ranks under a stage of ZeRO (0: none, plain data parallelism).

    Rajbhandari et al. 2020, figure 1: 2 bytes of weights, 2 of gradients and `k` of optimizer state per parameter (12:
    Adam's moments and a master copy, in fp32). Stage 1 partitions the optimizer state, stage 2 the gradients too, stage
    3 the weights too; into parts of equal size, without unsharded parameters, without activations. Raise ValueError
    for another stage, or less than one rank.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"unknown ZeRO stage {stage}; use 0 (nothing partitioned), 1, 2 or 3")
    if n_ranks < 1:
        raise ValueError(f"n_ranks={n_ranks} is too small; use at least 1")
    weights, gradients, optimizer = (1 / n_ranks if stage >= first else 1 for first in (3, 2, 1))
    return num_params * (2 * weights + 2 * gradients + k * optimizer)
