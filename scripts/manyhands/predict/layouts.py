"""The layouts that a plan chooses from: every way to split GPUs over the axes that a program has, and what is refused.

    for family in families(Question(model, machine, gpus=64, global_batch=512)):
        family.refused, family.variants          # a sentence of the trainer's own check, or [Candidate]

A family is a product of axes with one way to share data-parallel state; its variants differ in micro-batch, schedule
and activation checkpointing. Tried are tensor ranks within a node; the schedules of the program, of which GPipe takes
the time of 1F1B and more memory, and interleaved ones have two stages per rank up to a stage per layer; micro-batches
of a power of two; one GPU per rank. Tensor ranks use sequence and, where it runs, loss parallelism: they cost nothing
more and save memory. What `train.py` cannot run is refused by its own check, `resolve_layout`; a Program that is
described only here has no such check, and gets its Layout from the degrees.

Context ranks share each sequence, as in `train.py`: a rank has two of 2 c equal pieces of it, one from the front and
one from the back (zig-zag), so that all have as much attention to do under the causal mask. For all that is about
weights they are data ranks, and `replicate` and `shard` count them. Planned are kernels that hold no scores. `train.py`
holds those of a block and may need more, so that it gets no command for such a plan.

Experts are spread over `expert` neighbours among these ranks, which keep the dense weights as they are. In `train.py`
tensor ranks hold different experts, too. From the inside: tensor, context, shard, replicate, pipeline.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import groupby, islice, product
from typing import Any, NamedTuple

from manyhands.config.layout import Layout, LayoutError, resolve_layout
from manyhands.config.options import PRESETS, ModelOptions, Options, ParallelOptions, from_preset
from manyhands.config.strategies import STRATEGIES
from manyhands.predict.machines import Machine
from manyhands.predict.memory import STATES
from manyhands.predict.models import PlannedModel, share_of
from manyhands.predict.program import TRAIN_PY, Program, in_both_orders
from manyhands.predict.traffic import OF_DATA

LARGEST_MICRO_BATCH, MOST_TOKENS = 64, 131_072  # what is larger saves no time
# positions of a sequence that is worth a context axis, and of a rank's share of it
LONG, SHORTEST = 8192, 4096
CHECKPOINTING = TRAIN_PY.checkpointings
# {schedule: stages per rank}, the simplest first
SCHEDULES = {"1F1B": 1, "GPipe": 1, "Interleaved1F1B": 2, "InterleavedZeroBubble": 2}


class Sharing(NamedTuple):
    """A way for data ranks to share weights, gradients and optimizer: a strategy with options of `options.parallel`."""

    strategy: str
    options: Mapping[str, Any]

    @property
    def hybrid(self) -> bool:
        """Return whether a node's ranks share, and nodes hold replicas."""
        return self.options.get("sharding") == "hybrid"

    @property
    def offload(self) -> bool:
        """Return whether what is shared rests in the host's memory."""
        return self.options.get("offload", False)


def _planned():
    """({name: Sharing}, {strategy: why it is not planned}), as registered; ranks of other axes share no data."""
    found, left_out = {}, {}
    for name, one in STRATEGIES.items():
        if one.axis not in ("replicate", "shard"):
            continue  # tensor and pipeline ranks go with each of them
        if missing := [what for what, known in (("memory", STATES), ("traffic", OF_DATA)) if one.dp_mode not in known]:
            left_out[name] = f"no formula of {' and '.join(missing)} for dp_mode={one.dp_mode!r} in manyhands.predict"
        else:
            ways = {name: {}} if one.planned is None else one.planned
            found |= {way: Sharing(name, options) for way, options in ways.items()}
    return found, left_out


SHARINGS, NOT_PLANNED = _planned()  # the simplest first
ALONE = next(iter(SHARINGS))  # with nobody to share with all are the same


@dataclass(frozen=True)
class Question:
    """The planner's input. Raises ValueError for impossible counts."""

    model: PlannedModel
    machine: Machine
    gpus: int
    global_batch: int
    offload: bool = True  # may state rest in the host's memory?
    schedule: str | None = None  # of pipelines, a key of SCHEDULES; none: each of them is tried
    # ranks that share a sequence; none: powers of two, for sequences of LONG positions and more
    context: int | None = None
    program: Program = TRAIN_PY  # that trains
    source: str | None = None  # the folder of transformers' that has the model

    def __post_init__(self):
        apart = self.model.style == "llama" and not self.is_trained
        object.__setattr__(self, "model", replace(self.model, apart=apart))
        for fault in self._faults():
            raise ValueError(fault)

    def _faults(self):
        gpus, per_node, positions = self.gpus, self.machine.gpus_per_node, self.model.block_size
        context = 1 if self.context is None else self.context
        for name in ("gpus", "global_batch"):
            if getattr(self, name) < 1:
                yield f"{name}={getattr(self, name)} is too small; use at least 1"
        if self.schedule is not None and self.schedule not in SCHEDULES:
            yield f"schedule={self.schedule!r} is not planned; use one of {', '.join(SCHEDULES)}"
        if gpus > per_node and gpus % per_node:
            yield f"{gpus} GPUs do not fill nodes of {per_node}; use a multiple of {per_node}, or at most {per_node}"
        if context < 1 or gpus % context:
            yield f"context={context} does not split {gpus} GPUs; use a divisor of {gpus}"
        if context > 1 and positions % (2 * context):
            pieces = f"2 x {context} equal pieces for {context} context ranks"
            yield f"{positions} positions do not split into {pieces}; use fewer"

    @property
    def per_node(self) -> int:
        """GPUs of a node that take part."""
        return min(self.machine.gpus_per_node, self.gpus)

    @cached_property
    def base(self) -> Options:
        """Return the options a command line starts from: the model's preset, or nano with the model's sizes."""
        name = self.model.name
        options = from_preset(name if name in PRESETS else "nano")
        own = {"dropout", "vocab_size"} | (set() if trains_experts(self) else {"experts", "top_k", "shared_experts"})
        sizes = {f.name: getattr(self.model, f.name) for f in fields(ModelOptions) if f.name not in own}
        vocabulary = options.model.vocab_size if name in PRESETS else self.model.vocab_size
        train = replace(
            options.train, precision="bf16", compile=None, chunk_loss=self.is_trained and options.train.chunk_loss
        )
        return replace(options, model=replace(options.model, vocab_size=vocabulary, **sizes), train=train)

    @property
    def is_trained(self) -> bool:
        """Return whether it is about train.py, whose own check refuses what it cannot run."""
        return self.program.name == TRAIN_PY.name

    def contexts(self) -> list[int]:
        """Degrees of context parallelism to try: with SHORTEST positions or more, attention hides the ring."""
        if self.context is not None:
            return [self.context]
        positions, degrees = self.model.block_size, [1]
        while positions // (ranks := 2 * degrees[-1]) >= SHORTEST and positions % (2 * ranks) == self.gpus % ranks == 0:
            degrees.append(ranks)
        return degrees


@dataclass(frozen=True)
class Candidate:
    """One layout with the options of the trainer that make it."""

    sharing: str  # a key of SHARINGS
    layout: Layout
    options: Options
    program: Program = TRAIN_PY

    @property
    def micro_batch(self) -> int:
        return self.options.train.micro_batch

    @property
    def schedule(self) -> str:
        return self.options.parallel.schedule

    @property
    def checkpointing(self) -> str:
        return self.options.parallel.activation_checkpointing

    def __str__(self):
        return name_of(self.sharing, self.layout)


@dataclass(frozen=True)
class Family:
    """A product of axes and one way to share: what can be run of it, or why nothing can."""

    name: str
    variants: tuple[Candidate, ...]
    refused: str = ""

    def alike(self) -> Iterator[list[Candidate]]:
        """Yield the variants that differ in activation checkpointing alone; smaller micro-batches come first."""
        for _, alike in groupby(self.variants, lambda one: (one.program, one.micro_batch, one.schedule, one.layout)):
            yield list(alike)


def name_of(sharing: str, layout: Layout) -> str:
    """A layout for people: "zero3 8 x tensor 8"; 1 is left out."""
    context, how = layout.context, SHARINGS[sharing]
    data = f"{layout.replicate} x {layout.shard // context}" if how.hybrid else str(layout.data)
    shown = layout.data > 1 or how.offload or (context > 1 and sharing != ALONE)
    parts = [f"{sharing} {data}" if shown else ""]
    for axis in ("context", "tensor", "pipeline"):
        if (degree := getattr(layout, axis)) > 1:
            parts.append(f"{axis} {degree}")
    name = " x ".join(part for part in parts if part) or "one GPU"
    return f"{name}, experts over {layout.expert}" if layout.expert > 1 else name


def families(
    question: Question, checkpointing: tuple[str, ...] = (), most_micro_batch: int = LARGEST_MICRO_BATCH
) -> Iterator[Family]:
    """Every Family that strategies do not refuse: by context ranks, tensor ranks and stages, the fewest first.

    `checkpointing`: kinds that are tried; none: those of the program.
    """
    per_node, program = question.per_node, question.program
    kinds = tuple(kind for kind in checkpointing or CHECKPOINTING if kind in program.checkpointings)
    near = question.context is None and not program.far_context  # a ring between nodes is for those who ask for it
    for context in question.contexts() if "context" in program.axes else [1]:
        for tensor in divisors(question.gpus // context) if "tensor" in program.axes else [1]:
            if per_node % tensor or (near and context > 1 and context * tensor > per_node):
                continue
            for pipeline in divisors(question.gpus // context // tensor) if "pipeline" in program.axes else [1]:
                if pipeline > question.model.n_layer and not question.is_trained:
                    break
                group = question.gpus // tensor // pipeline  # data ranks, times context
                for sharing in _sharings(question, context, tensor, pipeline, group):
                    how = SHARINGS[sharing]
                    whole = group if STRATEGIES[how.strategy].axis == "shard" else 1
                    shard = per_node // tensor if how.hybrid else whole
                    degrees = pipeline, group // shard, shard, tensor
                    for expert in _experts(question, how, tensor, group):
                        split = Layout(*degrees, context=context)
                        if expert > 1:
                            split = Layout(*degrees, context=context, expert=expert)
                        yield _family(question, sharing, split, kinds, most_micro_batch)


def trains_experts(question: Question) -> bool:
    """Return whether train.py is to train a mixture of experts."""
    return question.is_trained and question.model.experts > 1


def divisors(n: int) -> list[int]:
    """Return the divisors of `n`, the smallest first; [] for 0."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def _sharings(question, context, tensor, pipeline, group):
    """Return the sharings that make sense for the data ranks that these axes leave."""
    within, degrees = question.per_node // tensor, {"tensor": tensor, "pipeline": pipeline, "replicate": 1, "shard": 1}
    for name, how in SHARINGS.items():
        there = question.offload if how.offload else group > 1 or name == ALONE
        if how.hybrid:
            there = 1 < within < group and group % within == 0 and within % context == 0
        if question.is_trained:
            there = there and not STRATEGIES[how.strategy].refusal(question.base, degrees)
        elif pipeline > 1:  # stages would gather their weights for each micro-batch
            there = there and name not in ("zero3", "hybrid")
        if there and (question.is_trained or name in question.program.sharings):
            yield name


def _experts(question, how, tensor, group):
    """Over how many ranks the experts are spread: not at all, as far as a node reaches, and farther."""
    spread = ("replicas", "fsdp") if question.is_trained else ("replicas", "zero1", "fsdp")
    if how.hybrid or STRATEGIES[how.strategy].dp_mode not in spread or "expert" not in question.program.axes:
        return [1]
    experts = question.model.experts // tensor  # of a tensor rank
    degrees = [degree for degree in divisors(experts) if group % degree == 0] or [1]
    return [n for n in degrees if n == 1 or n == degrees[-1] or n * tensor >= question.per_node]


def _family(question, sharing, split, checkpointing, most_micro_batch):
    model, name = question.model, name_of(sharing, split)
    if wrong := _uneven_heads(question, split.tensor):
        return Family(name, (), wrong)
    schedules = [("1F1B", 1)]
    if split.pipeline > 1:
        names = question.program.schedules if question.schedule is None else (question.schedule,)
        deep = [stages for stages in divisors(_most_layers(question, split.pipeline)) if stages > 2]
        schedules = [(name, stages) for name in names for stages in (SCHEDULES[name], *deep * (SCHEDULES[name] > 1))]
    variants, refused, share = [], "", share_of(model, split.context)
    # powers of two that divide a data rank's share; resolve_layout refuses one that is no whole number
    most, own = min(most_micro_batch, MOST_TOKENS // share.block_size), question.global_batch // split.data
    whole = question.global_batch % split.data == 0
    batches = [2**i for i in range(max(1, most.bit_length())) if own % 2**i == 0] if whole else [1]
    programs = [question.program]
    if not question.is_trained and split.pipeline > 1 and split.data > 1 and split.tensor * split.context < 8:
        programs = in_both_orders(question.program)
    ways = product(programs, batches, schedules, checkpointing)
    # more stages than layers are refused in any way
    for program, micro_batch, (schedule, stages), kind in islice(ways, 1 if split.pipeline > model.n_layer else None):
        options = options_of(question, SHARINGS[sharing], split, micro_batch, schedule, stages, kind)
        try:
            layout = _resolved(question, options, share, split, stages)
        except LayoutError as error:
            refused = refused or str(error)
            continue
        if trains_experts(question) and split.expert > 1:
            options = replace(options, parallel=replace(options.parallel, expert=split.expert))
        filled = {"micro_batches": layout.micro_batches, "stages_per_rank": layout.stages_per_rank}
        variants.append(Candidate(sharing, replace(split, **filled), options, program))
    return Family(name, tuple(variants), "" if variants else refused)


def _most_layers(question, pipeline):
    """Return the layers of a pipeline rank: the least, as train.py needs one per stage, or the most."""
    layers = question.model.n_layer
    return layers // pipeline if question.is_trained else -(-layers // pipeline)


def _uneven_heads(question, tensor):
    """Return why heads do not split over the tensor ranks, or ""; the trainer says it by itself."""
    heads, groups = question.model.n_head, question.model.kv_heads
    kinds = [] if question.is_trained else [("key-value heads", groups)] * (groups != heads) + [("heads", heads)]
    return next(
        (f"{count} {kind} do not split over {tensor} tensor ranks; use a divisor of {count}"
         for kind, count in kinds if count % tensor), "",
    )  # fmt: skip


def _resolved(question, options, share, split, stages):
    """The Layout of the options: by the trainer's own check, or by the degrees. Raise LayoutError."""
    if question.is_trained:
        return resolve_layout(options, share, question.gpus // split.context)
    batch = question.global_batch
    if batch % split.data:
        raise LayoutError(
            f"{batch} sequences do not split over {split.data} data ranks; use a multiple of {split.data}"
        )
    count = batch // split.data // options.train.micro_batch
    if stages > 1 and count % split.pipeline:  # an interleaved schedule takes micro-batches in rounds
        raise LayoutError(f"{count} micro-batches do not fill {split.pipeline} pipeline ranks evenly")
    return replace(split, micro_batches=count, stages_per_rank=stages)


def options_of(question, how, split, micro_batch, schedule, stages, checkpointing) -> Options:
    """Return the trainer's options of a variant: also those of another program are said in them."""
    positions, tensor, program = question.model.block_size // split.context, split.tensor, question.program
    balance_loss = trains_experts(question) and question.base.optimizer.balance_loss  # which loss parallelism lacks
    parallel = ParallelOptions(
        strategy=how.strategy,
        tensor=tensor if tensor > 1 else None,
        pipeline=split.pipeline if split.pipeline > 1 else None,
        shard=split.shard // split.context if how.hybrid else None,
        sequence_parallel=program.sequence_parallel and tensor > 1 and positions % tensor == 0,
        loss_parallel=tensor > 1 and not balance_loss and (split.pipeline == 1 or not question.is_trained),
        reduce_dtype="own" if program.reduce_bytes == 4 else "bf16",
        schedule=schedule,
        stages_per_rank=stages if stages > 2 else None,  # none: what the schedule needs
        activation_checkpointing=checkpointing,
        **how.options,
    )
    train = replace(question.base.train, global_batch=question.global_batch, micro_batch=micro_batch)
    return replace(question.base, train=train, parallel=parallel)
