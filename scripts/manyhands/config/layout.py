"""How many ranks stand on each axis of the mesh, and which wishes do not fit together. Nothing here communicates.

    layout = resolve_layout(options, config, world_size=8)   # a Layout, or LayoutError with the numbers and the cure

The axes, outermost first: pipeline x replicate x shard x tensor. Ranks that differ only in `tensor` are neighbours, so
that the axis with the most traffic stays within a node. Ranks that differ in `replicate` or `shard` see different data.
"""

from dataclasses import dataclass
from math import prod

from manyhands.config.options import OptionError

AXES = ("pipeline", "replicate", "shard", "tensor")
TWO_STAGES = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")  # of inputs first, of weights later
# {strategy: (axis of the ranks that no other axis claims, how data ranks are served: see `Layout.dp_mode`)}
STRATEGIES = {
    "ddp": ("replicate", "replicas"),
    "zero1": ("replicate", "zero1"),
    "deepspeed": ("replicate", "deepspeed"),
    "fsdp": ("shard", "fsdp"),
    "tp": ("tensor", "replicas"),
    "pp": ("pipeline", "replicas"),
}


class LayoutError(OptionError):
    """Options that do not fit together or do not fit the number of ranks: one sentence with the cure."""


@dataclass(frozen=True)
class Layout:
    """Ranks per axis, and how the global batch is cut."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    micro_batches: int = 1  # per data rank and step: accumulation, or what fills a pipeline
    stages_per_rank: int = 1
    # axes that no run has: see `predict.planned_layout`
    context = expert = 1

    @property
    def world_size(self):
        return self.pipeline * self.replicate * self.shard * self.tensor

    @property
    def data(self):
        """Ranks, or groups of ranks, that see different sequences."""
        return self.replicate * self.shard

    def coordinates(self, rank):
        """Where `rank` stands: {"pipeline": i, "replicate": j, "shard": k, "tensor": l}."""
        place = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return place

    def data_rank(self, rank):
        """Which of the `data` shares of the global batch `rank` works on."""
        place = self.coordinates(rank)
        return place["replicate"] * self.shard + place["shard"]

    def dp_mode(self, options):
        """How the data ranks are served: each has a copy ("replicas"), or they share by "zero1", "fsdp" or "deepspeed"."""
        if self.tensor > 1 and self.data > 1 and self.pipeline == 1:
            return "fsdp"  # DDP refuses DTensors; fully_shard averages copies too, over an axis shard of one rank
        return STRATEGIES[options.parallel.strategy][1]

    def __str__(self):
        axes = " x ".join(f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1)
        return axes or "one rank"


def resolve_layout(options, config, world_size, ranks_per_node=None):
    """The `Layout` of `world_size` ranks for `options` and a GPTConfig. Raises LayoutError.

    `ranks_per_node` (none: all on one) tells hybrid sharding where to shard: within a node.
    """
    degrees = _degrees(options.parallel, world_size, ranks_per_node or world_size)
    stages_per_rank = _stages_per_rank(options.parallel, degrees["pipeline"])
    _refuse_combinations(options, degrees)
    _refuse_sizes(options.parallel, config, degrees, stages_per_rank)
    micro_batches = _micro_batches(options, degrees)
    return Layout(**degrees, micro_batches=micro_batches, stages_per_rank=stages_per_rank)


def _degrees(parallel, world_size, ranks_per_node):
    asked = {axis: getattr(parallel, axis) for axis in AXES}
    for axis, degree in asked.items():
        if degree is not None and degree < 1:
            raise LayoutError(f"parallel.{axis}={degree} is too small; use at least 1")
    hybrid = parallel.strategy == "fsdp" and parallel.sharding == "hybrid"
    if parallel.sharding == "none" and parallel.strategy == "fsdp":
        leftover = "replicate"  # FSDP's NO_SHARD: every rank holds all
    elif hybrid and asked["shard"] is not None:
        leftover = "replicate"  # copies of what so many ranks share
    else:
        leftover, _ = STRATEGIES[parallel.strategy]
    if hybrid and asked["shard"] is None:
        rest = world_size // prod(d or 1 for axis, d in asked.items() if axis != "shard")
        if asked["replicate"] is None and rest > 1:
            nodes = max(1, world_size // ranks_per_node)
            asked["replicate"] = nodes if nodes > 1 and rest % nodes == 0 else 2 if rest % 2 == 0 else 1
    fixed = prod(degree or 1 for axis, degree in asked.items() if axis != leftover)
    claimed = (
        ", ".join(f"{axis}={d}" for axis, d in asked.items() if d is not None and axis != leftover) or "the others"
    )
    if asked[leftover] is None:
        if world_size % fixed:
            raise LayoutError(f"{world_size} ranks do not split by {claimed}; use a multiple of {fixed} ranks")
        asked[leftover] = world_size // fixed
    degrees = {axis: degree or 1 for axis, degree in asked.items()}
    if prod(degrees.values()) != world_size:
        product = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1) or "1"
        raise LayoutError(
            f"{product} = {prod(degrees.values())} ranks, but {world_size} were started; start as many, "
            f"or leave parallel.{leftover} out"
        )
    return degrees


def _stages_per_rank(parallel, pipeline):
    if pipeline == 1:
        return 1
    least = 2 if parallel.schedule in TWO_STAGES else 1
    wanted = parallel.stages_per_rank or least
    if parallel.schedule in ("ZBVZeroBubble", "DualPipeV") and wanted != 2:
        raise LayoutError(
            f"parallel.schedule={parallel.schedule} gives each rank 2 stages, not {wanted}; leave stages_per_rank out"
        )
    if wanted < least:
        raise LayoutError(
            f"parallel.schedule={parallel.schedule} interleaves at least 2 stages per rank, not {wanted}; use 1F1B"
        )
    if parallel.schedule not in TWO_STAGES and wanted != 1:
        raise LayoutError(
            f"parallel.schedule={parallel.schedule} has one stage per rank, not {wanted}; use Interleaved1F1B"
        )
    return wanted


def _refuse_combinations(options, degrees):
    parallel, train = options.parallel, options.train
    strategy = parallel.strategy

    def refuse(sentence):
        raise LayoutError(sentence)

    if strategy != "fsdp":
        if degrees["shard"] > 1:
            refuse(f"parallel.shard={degrees['shard']} needs parallel.strategy=fsdp, not {strategy}")
        for name, default in (("sharding", "full"), ("wrapping", "block"), ("offload", False)):
            if getattr(parallel, name) != default:
                refuse(f"parallel.{name}={getattr(parallel, name)} needs parallel.strategy=fsdp, not {strategy}")
    if strategy == "fsdp" and parallel.sharding == "none" and degrees["shard"] > 1:
        refuse(f"parallel.shard={degrees['shard']} shards and parallel.sharding=none does not; leave one of them out")
    if strategy == "fsdp" and degrees["shard"] > 1 and degrees["replicate"] > 1 and parallel.sharding != "hybrid":
        refuse(
            f"replicate={degrees['replicate']} and shard={degrees['shard']} together are hybrid sharding;"
            " use parallel.sharding=hybrid"
        )
    if parallel.all_reduce != "auto" and strategy != "ddp":
        refuse(f"parallel.all_reduce={parallel.all_reduce} needs parallel.strategy=ddp, not {strategy}")
    if strategy == "zero1" and (degrees["tensor"] > 1 or degrees["pipeline"] > 1):
        refuse("zero1 shards the optimizer over copies only; with tensor or pipeline ranks use parallel.strategy=fsdp")
    if strategy == "deepspeed" and (degrees["tensor"] > 1 or degrees["pipeline"] > 1):
        refuse("deepspeed runs here over data-parallel ranks only; leave parallel.tensor and parallel.pipeline out")
    if strategy == "deepspeed" and train.precision in ("fp64", "fp16"):
        refuse(f"deepspeed runs here in fp32 or bf16, not {train.precision}")
    if strategy == "deepspeed" and (parallel.activation_checkpointing != "none" or train.compile):
        asked = (
            f"parallel.activation_checkpointing={parallel.activation_checkpointing}"
            if parallel.activation_checkpointing != "none"
            else "train.compile"
        )
        refuse(
            f"deepspeed runs here without {asked}; use --parallel.activation-checkpointing none and --train.no-compile, or"
            " parallel.strategy=fsdp"
        )
    if strategy != "deepspeed" and parallel.zero_stage != 3:
        refuse(
            f"parallel.zero_stage={parallel.zero_stage} needs parallel.strategy=deepspeed, not {strategy}; use"
            " parallel.strategy=zero1, or fsdp with parallel.sharding=grad_op, for the like of it"
        )
    if strategy != "pp" and degrees["pipeline"] == 1:
        for name, default in (("schedule", "1F1B"), ("stages_per_rank", None)):
            if getattr(parallel, name) != default:
                refuse(
                    f"parallel.{name}={getattr(parallel, name)} needs pipeline ranks, not {strategy} alone; use"
                    " parallel.strategy=pp or parallel.pipeline=2, or leave it out"
                )
    if degrees["tensor"] == 1:
        for name in ("sequence_parallel", "loss_parallel"):
            if getattr(parallel, name):
                refuse(f"parallel.{name} needs tensor ranks; use parallel.tensor=2 or more, or leave it out")
    if degrees["tensor"] > 1 and train.compile and parallel.activation_checkpointing == "block":
        # torch 2.13 cannot compile a recomputed block of DTensors
        refuse(
            f"parallel.activation_checkpointing=block does not go with train.compile and {degrees['tensor']} tensor ranks; "
            "use parallel.activation_checkpointing=selective or --train.no-compile"
        )
    if degrees["pipeline"] > 1:
        if options.model.tie:
            refuse(
                "model.tie shares one matrix between the first and the last stage; use --model.no-tie with a pipeline"
            )
        if parallel.loss_parallel:
            refuse("parallel.loss_parallel does not run inside a pipeline; leave it out")
        if train.compile:
            refuse("train.compile does not run with a pipeline; use --train.no-compile")
        if parallel.schedule in SPLIT_BACKWARD:
            # the weights' gradients come after FSDP has resharded the weights (torch 2.13: missing or wrong gradients)
            if strategy == "fsdp" and parallel.sharding in ("full", "hybrid"):
                refuse(
                    f"parallel.schedule={parallel.schedule} needs weights that stay gathered until their gradients come, "
                    f"not parallel.sharding={parallel.sharding}; use parallel.sharding=grad_op, or 1F1B"
                )
            if parallel.activation_checkpointing == "selective":
                refuse(
                    f"parallel.schedule={parallel.schedule} goes through a block's backward twice and "
                    "parallel.activation_checkpointing=selective allows one; use parallel.activation_checkpointing=block"
                )
    if train.precision == "fp16" and degrees["pipeline"] > 1:
        refuse("fp16's loss scale is not known inside a pipeline's schedule; use train.precision=bf16 or fp32")
    if parallel.offload and train.precision == "fp16":
        refuse("fp16 and parallel.offload do not go together; use train.precision=bf16")


def _refuse_sizes(parallel, config, degrees, stages_per_rank):
    tensor, stages = degrees["tensor"], degrees["pipeline"] * stages_per_rank
    for name in ("n_head", "n_embd"):
        if getattr(config, name) % tensor:
            raise LayoutError(
                f"model.{name}={getattr(config, name)} does not split over {tensor} tensor ranks; "
                f"use a divisor of {getattr(config, name)}"
            )
    tokens = -(-config.vocab_size // tensor)  # of each tensor rank; the last ones get what is left
    if tokens * (tensor - 1) >= config.vocab_size:
        raise LayoutError(
            f"model.vocab_size={config.vocab_size} tokens, {tokens} for each of {tensor} tensor ranks, leave none for the"
            " last one; use fewer tensor ranks or a larger vocabulary"
        )
    if parallel.sequence_parallel and config.block_size % tensor:
        raise LayoutError(
            f"model.block_size={config.block_size} positions do not split over {tensor} tensor ranks; "
            f"use a multiple of {tensor}"
        )
    if stages > config.n_layer:
        raise LayoutError(
            f"{stages} stages ({degrees['pipeline']} ranks x {stages_per_rank}) are more than model.n_layer={config.n_layer};"
            " use fewer pipeline ranks or more layers"
        )
    kind, _, count = parallel.wrapping.partition(":")
    if kind in ("block", "block_and_size"):
        fits = not count
    else:
        fits = kind in ("block_group", "size") and count.isdecimal() and int(count) >= 1
    if not fits:
        raise LayoutError(
            f"parallel.wrapping={parallel.wrapping!r} is unknown; use block, block_and_size, block_group:2 or size:100000"
        )
    if kind == "block_group" and int(count) > config.n_layer:
        raise LayoutError(
            f"parallel.wrapping={parallel.wrapping}: there are only {config.n_layer} blocks; use at most that"
        )


def _micro_batches(options, degrees):
    train, parallel, pipeline = options.train, options.parallel, degrees["pipeline"]
    data = degrees["replicate"] * degrees["shard"]
    if train.global_batch % data:
        raise LayoutError(
            f"train.global_batch={train.global_batch} does not split over {data} data-parallel ranks; use a multiple of {data}"
        )
    share = train.global_batch // data
    if train.micro_batch is not None:
        if share % train.micro_batch:
            raise LayoutError(
                f"a rank's share of {share} sequences (train.global_batch={train.global_batch} over {data}) does not split"
                f" into micro-batches of {train.micro_batch}; use a divisor of {share}"
            )
        count = share // train.micro_batch
    elif pipeline == 1:
        return 1
    else:  # twice as many as stages where that goes: the pipeline's idle share halves
        count = next((n for n in (2 * pipeline, pipeline) if share % n == 0), share)
    # DualPipeV (torch 2.13) wants one for each stage, and a rank has two
    least = 2 * pipeline if parallel.schedule == "DualPipeV" else pipeline
    if pipeline > 1 and (count < least or count % pipeline):
        raise LayoutError(
            f"{count} micro-batches do not fill {pipeline} pipeline ranks evenly under {parallel.schedule}; choose"
            f" train.global_batch and train.micro_batch so that there are {least} or a larger multiple of {pipeline}"
        )
    return count
