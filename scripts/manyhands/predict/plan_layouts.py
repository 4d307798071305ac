"""The layouts that a plan chooses from: every way to split GPUs over the axes that `train.py` has, and what it refuses.

    for family in families(Question(model, machine, gpus=64, global_batch=512)):
        family.refused, family.variants          # a sentence of the trainer's own check, or [Candidate]

A family is a product of axes with one way to share data-parallel state; its variants differ in micro-batch, schedule and
recomputation. Tried are tensor ranks within a node; 1F1B, GPipe (the time of 1F1B, and more memory), Interleaved1F1B and
InterleavedZeroBubble, the last two with two stages per rank; micro-batches of a power of two; one GPU per rank. Tensor ranks
always use sequence and, without a pipeline, loss parallelism: they cost nothing more and save memory. Two axes are planned
that `train.py` does not have (see `planned_layout`): context ranks, for long sequences or where a question asks for them, and
ranks that the experts of a model are spread over.
"""

from dataclasses import dataclass, fields, replace

from manyhands.config.layout import SPLIT_BACKWARD, Layout, LayoutError, resolve_layout
from manyhands.config.options import ModelOptions, Options, from_preset
from manyhands.config.presets import PRESETS
from manyhands.predict.machines import Machine
from manyhands.predict.plan_axes import all_axes
from manyhands.predict.planned_layout import planned_layout
from manyhands.predict.planned_model import PlannedModel, share_of

LARGEST_MICRO_BATCH, MOST_TOKENS = 64, 131_072  # what is larger saves no time
LONG, SHORTEST = (
    8192,
    4096,
)  # positions of a sequence that is worth a context axis, and of a rank's share of it
CHECKPOINTING = ("none", "selective", "block")
# {schedule: stages per rank}, the simplest first
SCHEDULES = {"1F1B": 1, "GPipe": 1, "Interleaved1F1B": 2, "InterleavedZeroBubble": 2}
# {how data ranks share: (strategy, its options)}; the simplest first
SHARINGS = {
    "replicas": ("ddp", {}),
    "zero1": ("zero1", {}),
    "zero2": ("fsdp", {"sharding": "grad_op"}),
    "zero3": ("fsdp", {"sharding": "full"}),
    "hybrid": ("fsdp", {"sharding": "hybrid"}),
    "offload": ("fsdp", {"sharding": "full", "offload": True}),
}


@dataclass(frozen=True)
class Question:
    """What is asked. Raises ValueError for counts that cannot be."""

    model: PlannedModel
    machine: Machine
    gpus: int
    global_batch: int
    offload: bool = True  # may state rest in the host's memory?
    schedule: str | None = None  # of pipelines, a key of SCHEDULES; none: each of them is tried
    context: int | None = (
        None  # ranks that share a sequence; none: powers of two, for sequences of LONG positions and more
    )

    def __post_init__(self):
        for name, least in (("gpus", 1), ("global_batch", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value} is too small; use at least {least}")
        if self.schedule is not None and self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r} is not planned; use one of {', '.join(SCHEDULES)}")
        per_node = self.machine.gpus_per_node
        if self.gpus > per_node and self.gpus % per_node:
            raise ValueError(
                f"{self.gpus} GPUs do not fill nodes of {per_node}; use a multiple of {per_node}, or at most {per_node}"
            )
        if self.context is not None:
            self._refuse_context()

    def _refuse_context(self):
        context, positions = self.context, self.model.block_size
        if context < 1 or self.gpus % context:
            raise ValueError(f"context={context} does not split {self.gpus} GPUs; use a divisor of {self.gpus}")
        if context > 1 and positions % (2 * context):
            raise ValueError(
                f"{positions} positions do not split into 2 x {context} equal pieces for {context} context ranks; use fewer"
            )

    @property
    def per_node(self):
        """GPUs of a node that take part."""
        return int(min(self.machine.gpus_per_node, self.gpus))

    def contexts(self):
        """Degrees of context parallelism to try: where a rank keeps SHORTEST positions or more, attention hides the ring."""
        if self.context is not None:
            return [self.context]
        positions, degrees = self.model.block_size, [1]
        while positions >= LONG and positions // (2 * degrees[-1]) >= SHORTEST:
            if positions % (4 * degrees[-1]) or self.gpus % (2 * degrees[-1]):
                break
            degrees.append(2 * degrees[-1])
        return degrees


@dataclass(frozen=True)
class Candidate:
    """One layout with the options of the trainer that make it."""

    sharing: str  # a key of SHARINGS
    layout: Layout
    options: Options

    @property
    def micro_batch(self):
        return self.options.train.micro_batch

    def __str__(self):
        return name_of(self.sharing, self.layout)


@dataclass(frozen=True)
class Family:
    """A product of axes and one way to share: what can be run of it, or why nothing can."""

    name: str
    variants: tuple[Candidate, ...]
    refused: str = ""


def name_of(sharing, layout):
    """A layout for people: "zero3 8 x tensor 8"; 1 is left out."""
    context = layout.context
    data = f"{layout.replicate} x {layout.shard // context}" if sharing == "hybrid" else str(layout.data)
    shown = layout.data > 1 or sharing == "offload" or (context > 1 and sharing != "replicas")
    parts = [f"{sharing} {data}" if shown else ""]
    for axis in ("context", "tensor", "pipeline"):
        if (degree := getattr(layout, axis)) > 1:
            parts.append(f"{axis} {degree}")
    name = " x ".join(part for part in parts if part) or "one GPU"
    return f"{name}, experts over {layout.expert}" if layout.expert > 1 else name


def families(question, checkpointing=CHECKPOINTING, most_micro_batch=LARGEST_MICRO_BATCH):
    """Every Family of a question, in order: no context ranks first, then fewest tensor ranks, then fewest stages."""
    base = base_options(question.model)
    for axes in all_axes(question):
        yield _family(question, base, axes, checkpointing, most_micro_batch)


def base_options(model):
    """The Options that a command line starts from: the model's preset, or nano with the model's sizes."""
    options = from_preset(model.name) if model.name in PRESETS else from_preset("nano")
    sizes = {f.name: getattr(model, f.name) for f in fields(ModelOptions) if f.name not in ("dropout", "vocab_size")}
    vocabulary = options.model.vocab_size if model.name in PRESETS else model.vocab_size
    return replace(options, model=replace(options.model, vocab_size=vocabulary, **sizes))


def _family(question, base, axes, checkpointing, most_micro_batch):
    model, tensor, pipeline = question.model, axes.tensor, axes.pipeline
    shard = axes.shard(question.per_node)
    over = "replicate" if axes.sharing in ("replicas", "zero1") else "shard"
    whole = Layout(pipeline, axes.group // shard, shard // axes.context or 1, tensor)
    if over == "replicate":
        whole = Layout(pipeline, axes.data, 1, tensor)
    name = name_of(axes.sharing, planned_layout(whole, over, axes.context, axes.expert))
    if model.n_kv_head != model.n_head and model.n_kv_head % tensor:
        sentence = f"{model.n_kv_head} key-value heads do not split over {tensor} tensor ranks"
        return Family(name, (), f"{sentence}; use a divisor of {model.n_kv_head}")
    schedules = tuple(SCHEDULES) if pipeline > 1 else ("1F1B",)
    if pipeline > 1 and question.schedule is not None:
        schedules = (question.schedule,)
    variants, refused, share = [], "", share_of(model, axes.context)
    most = max(1, min(most_micro_batch, MOST_TOKENS // share.block_size))
    if pipeline > model.n_layer:  # refused anyway: once is enough
        schedules, most = schedules[:1], 1
    for micro_batch in micro_batches(question.global_batch, axes.data, most):
        for schedule in schedules:
            options = _options(base, question, axes, whole.shard, micro_batch, schedule)
            try:
                layout = resolve_layout(options, share, question.gpus // axes.context)
            except LayoutError as error:
                refused = refused or str(error)
                continue
            layout = planned_layout(layout, over, axes.context, axes.expert)
            for kind in checkpointing:
                if kind == "selective" and pipeline > 1 and schedule in SPLIT_BACKWARD:
                    continue  # the trainer refuses it
                changed = options
                if kind != "none":
                    changed = replace(options, parallel=replace(options.parallel, activation_checkpointing=kind))
                variants.append(Candidate(axes.sharing, layout, changed))
    return Family(name, tuple(variants), "" if variants else refused)


def micro_batches(global_batch, data, most):
    """Powers of two up to `most` that divide a data rank's share, the smallest first; [1] where that is no whole number."""
    share = global_batch // data
    if global_batch % data:
        return [1]
    return [b for b in (2**i for i in range(most.bit_length())) if b <= most and share % b == 0]


def _options(base, question, axes, shard, micro_batch, schedule):
    strategy, extra = SHARINGS[axes.sharing]
    tensor, pipeline, positions = axes.tensor, axes.pipeline, question.model.block_size // axes.context
    changes = {
        "strategy": strategy,
        "tensor": tensor if tensor > 1 else None,
        "pipeline": pipeline if pipeline > 1 else None,
        "shard": shard if axes.sharing == "hybrid" else None,
        "replicate": None,
        "sharding": "full",
        "offload": False,
        "wrapping": "block",
        "all_reduce": "auto",
        "zero_stage": 3,
        "sequence_parallel": tensor > 1 and positions % tensor == 0,
        "loss_parallel": tensor > 1 and pipeline == 1,
        "schedule": schedule,
        "activation_checkpointing": "none",
        "stages_per_rank": None,
    }
    train = replace(
        base.train,
        global_batch=question.global_batch,
        micro_batch=micro_batch,
        precision="bf16",
        compile=False,
    )
    return replace(base, train=train, parallel=replace(base.parallel, **changes | extra))
