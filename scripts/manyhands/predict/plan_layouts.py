"""The layouts that a plan chooses from: every way to split GPUs over the axes that `train.py` has, and what it refuses.

    for family in families(Question(model, machine, gpus=64, global_batch=512)):
        family.refused, family.variants          # a sentence of the trainer's own check, or [Candidate]

A family is a product of axes with one way to share data-parallel state; its variants differ in micro-batch, schedule and
recomputation. Tried are tensor ranks within a node, 1F1B and Interleaved1F1B with two stages per rank (GPipe takes the time
of 1F1B and more memory; of zero-bubble schedules no time is predicted here), micro-batches of a power of two, one GPU per
rank. Tensor ranks always use sequence and, without a pipeline, loss parallelism: they cost nothing more and save memory.
No context parallelism: `train.py` has none.
"""

from dataclasses import dataclass, fields, replace

from manyhands.config.layout import Layout, LayoutError, resolve_layout
from manyhands.config.options import ModelOptions, Options, from_preset
from manyhands.config.presets import PRESETS
from manyhands.predict.machines import Machine
from manyhands.predict.planned_model import PlannedModel

LARGEST_MICRO_BATCH = 64
RECOMPUTE = ("none", "selective", "block")
SCHEDULES = {1: "1F1B", 2: "Interleaved1F1B"}
# {how data ranks share: (strategy, its options)}; the simplest first
SHARINGS = {
    "copies": ("ddp", {}),
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

    def __post_init__(self):
        for name, least in (("gpus", 1), ("global_batch", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value} is too small; use at least {least}")
        per_node = self.machine.gpus_per_node
        if self.gpus > per_node and self.gpus % per_node:
            raise ValueError(
                f"{self.gpus} GPUs do not fill nodes of {per_node}; use a multiple of {per_node}, or at most {per_node}"
            )


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
    data = f"{layout.replicate} x {layout.shard}" if sharing == "hybrid" else str(layout.data)
    parts = [f"{sharing} {data}" if layout.data > 1 or sharing == "offload" else ""]
    parts += [f"tensor {layout.tensor}"] * (layout.tensor > 1)
    if layout.pipeline > 1:
        parts.append(f"pipeline {layout.pipeline}")
    return " x ".join(part for part in parts if part) or "one GPU"


def families(question, recompute=RECOMPUTE, most_micro_batch=LARGEST_MICRO_BATCH):
    """Every Family of a question, in order: fewest tensor ranks first, then fewest stages."""
    model, per_node = question.model, min(question.machine.gpus_per_node, question.gpus)
    base = base_options(model)
    for tensor in divisors(question.gpus):
        if tensor > per_node or per_node % tensor:
            continue
        for pipeline in divisors(question.gpus // tensor):
            for sharing in _sharings(question, tensor, pipeline, per_node):
                yield _family(question, base, tensor, pipeline, sharing, recompute, most_micro_batch)


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def _sharings(question, tensor, pipeline, per_node):
    """What makes sense for so many data ranks; zero1 goes with nothing else, and the trainer says so itself."""
    data = question.gpus // tensor // pipeline
    within = per_node // tensor
    names = ["copies"]
    if data > 1:
        names += ["zero2", "zero3"] + (["zero1"] if tensor == pipeline == 1 else [])
        if 1 < within < data and data % within == 0:
            names.append("hybrid")
    return names + ["offload"] * question.offload


def base_options(model):
    """The Options that a command line starts from: the model's preset, or nano with the model's sizes."""
    options = from_preset(model.name) if model.name in PRESETS else from_preset("nano")
    sizes = {
        f.name: getattr(model, f.name)
        for f in fields(ModelOptions)
        if f.name not in ("dropout", "vocab_size")
    }
    vocabulary = options.model.vocab_size if model.name in PRESETS else model.vocab_size
    return replace(options, model=replace(options.model, vocab_size=vocabulary, **sizes))


def _family(question, base, tensor, pipeline, sharing, recompute, most_micro_batch):
    model, data = question.model, question.gpus // tensor // pipeline
    shard = data if sharing in ("zero2", "zero3", "offload") else 1
    if sharing == "hybrid":
        shard = min(question.machine.gpus_per_node, question.gpus) // tensor
    name = name_of(sharing, Layout(pipeline, data // shard, shard, tensor))
    if model.n_kv_head != model.n_head and model.n_kv_head % tensor:
        sentence = f"{model.n_kv_head} key-value heads do not split over {tensor} tensor ranks"
        return Family(name, (), f"{sentence}; use a divisor of {model.n_kv_head}")
    variants, refused = [], ""
    for micro_batch in micro_batches(question.global_batch, data, most_micro_batch):
        for stages_per_rank in (1, 2) if pipeline > 1 else (1,):
            options = _options(base, question, tensor, pipeline, sharing, shard, micro_batch, stages_per_rank)
            try:
                layout = resolve_layout(options, model, question.gpus, question.machine.gpus_per_node)
            except LayoutError as error:
                refused = refused or str(error)
                continue
            for kind in recompute:
                changed = replace(options, parallel=replace(options.parallel, recompute=kind))
                variants.append(Candidate(sharing, layout, changed))
    return Family(name, tuple(variants), "" if variants else refused)


def micro_batches(global_batch, data, most):
    """Powers of two that divide a data rank's share, the smallest first; [1] where the share is no whole number."""
    share = global_batch // data
    if global_batch % data:
        return [1]
    return [b for b in (2**i for i in range(most.bit_length())) if b <= most and share % b == 0]


def _options(base, question, tensor, pipeline, sharing, shard, micro_batch, stages_per_rank):
    strategy, extra = SHARINGS[sharing]
    model = question.model
    changes = {
        "strategy": strategy,
        "tensor": tensor if tensor > 1 else None,
        "pipeline": pipeline if pipeline > 1 else None,
        "shard": shard if sharing == "hybrid" else None,
        "replicate": None,
        "sharding": "full",
        "offload": False,
        "wrapping": "block",
        "copies": "auto",
        "zero_stage": 3,
        "sequence_parallel": tensor > 1 and model.block_size % tensor == 0,
        "loss_parallel": tensor > 1 and pipeline == 1,
        "schedule": SCHEDULES[stages_per_rank],
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
