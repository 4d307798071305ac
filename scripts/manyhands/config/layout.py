"""Compute the number of ranks on each mesh axis, and refuse incompatible options, without communication.

    layout = resolve_layout(options, config, world_size=8)   # a Layout, or LayoutError with the numbers and the cure

The axes, outermost first: pipeline x replicate x shard x tensor. Ranks that differ only in `tensor` are neighbours, so
that the axis with the most traffic stays within a node. Ranks that differ in `replicate` or `shard` see different data.

Ranks of the context axis see the same sequences, each a share of the positions. For all that is about weights they are
data ranks, so that `replicate` or `shard` of a Layout counts them: they lie innermost there. `sizes` counts them apart.
"""

import re
from dataclasses import dataclass, fields
from itertools import chain
from math import prod

from manyhands.config.options import OptionError, Options, ParallelOptions
from manyhands.config.strategies import STRATEGIES
from manyhands.gpt.config import GPTConfig

AXES = ("pipeline", "replicate", "shard", "tensor")
TWO_STAGES = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")  # of inputs first, of weights later
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # a rank's two stages lie symmetric in the depth


class LayoutError(OptionError):
    """Options that do not fit together or do not fit the number of ranks: one sentence with the cure."""


COMPILED = ("ddp", "zero1", "fsdp")  # strategies that compile unasked
STEPS_TO_COMPILE = 100  # shorter runs end before the compiler has paid
MOST_RECORDED = 200_000_000  # parameters: larger models keep a GPU busy without a CUDA graph
LOGITS_AT_ONCE = 2**28  # 1 GiB in float32


@dataclass(frozen=True)
class Layout:
    """Ranks per axis, and how the global batch is cut."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    micro_batches: int = 1  # per data rank and step: accumulation, or what fills a pipeline
    stages_per_rank: int = 1
    context: int = 1  # of replicate x shard: ranks that share each sequence
    expert: int = 1  # of replicate x shard: neighbours that hold different experts

    @property
    def world_size(self) -> int:
        return self.pipeline * self.replicate * self.shard * self.tensor

    @property
    def data(self) -> int:
        """Ranks, or groups of ranks, that see different sequences."""
        return self.replicate * self.shard // self.context

    def sizes(self) -> dict[str, int]:
        """Ranks per axis as a command line asks for them, context apart: their product is the world's size."""
        sizes = {"pipeline": self.pipeline, "replicate": self.replicate, "shard": self.shard}
        sizes["shard" if self.shard % self.context == 0 else "replicate"] //= self.context
        return sizes | {"context": self.context, "tensor": self.tensor}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return where `rank` stands: {"pipeline": i, "replicate": j, "shard": k, "tensor": l}."""
        place = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return place

    def data_rank(self, rank: int) -> int:
        """Return which of the `data` shares of the global batch `rank` processes."""
        place = self.coordinates(rank)
        return (place["replicate"] * self.shard + place["shard"]) // self.context

    def dp_mode(self, options: Options) -> str:
        """Return how data-parallel ranks hold the model: "replicas", or the way of sharding, such as "fsdp"."""
        if self.tensor > 1 and self.replicate * self.shard > 1 and self.pipeline == 1:
            return "fsdp"  # DDP refuses DTensors; fully_shard averages replicas too, over an axis shard of one rank
        return STRATEGIES[options.parallel.strategy].dp_mode

    def __str__(self) -> str:
        axes = " x ".join(f"{axis} {size}" for axis, size in self.sizes().items() if size > 1) or "one rank"
        return f"{axes} with experts over {self.expert}" if self.expert > 1 else axes


def logits_at_once(layout: Layout, options: Options) -> int | None:
    """Return how many logits the head computes at once, or None for all, as for tensor ranks and pipelines."""
    whole = layout.tensor > 1 or layout.pipeline > 1 or options.parallel.strategy == "deepspeed"
    return None if whole or not options.train.chunk_loss else LOGITS_AT_ONCE


def starts_in_shares(config: "GPTConfig", layout: Layout, options: Options) -> bool:
    """Return whether a rank makes its shares alone, never the whole model: only FSDP cuts it, and no weight is tied."""
    alone = layout.tensor == layout.pipeline == layout.expert == 1
    return alone and not config.tie and layout.dp_mode(options) == "fsdp"


def compiles(layout: Layout, options: Options) -> bool:
    """Return whether a run on GPUs that have a compiler beside them compiles its blocks and its loss."""
    train = options.train
    if train.compile is not None:
        return train.compile
    plain = layout.tensor == layout.pipeline == layout.context == 1 and train.precision != "fp64"
    plain = plain and options.model.experts == 1  # the host needs the number of tokens per expert
    return plain and options.parallel.strategy in COMPILED and train.steps >= STEPS_TO_COMPILE


def records_graph(config: "GPTConfig", layout: Layout, options: Options) -> bool:
    """Return whether a GPU's micro-batch is recorded as one CUDA graph: what a small model computes, without messages.

    Gradients then go as one flat vector after the last backward, and nothing hides them.
    """
    train, parallel = options.train, options.parallel
    plain = parallel.strategy == "ddp" and layout.tensor == layout.pipeline == layout.context == 1
    kept = parallel.activation_checkpointing == "none" and getattr(config, "separator", None) is None
    small = options.model.experts == 1 and config.num_params() <= MOST_RECORDED
    waits = train.loss_kernel == "liger"  # for the number of its targets, which a graph cannot
    return train.cuda_graphs and train.precision != "fp16" and plain and kept and small and not waits


def stage_owners(schedule: str, pipeline: int, stages_per_rank: int) -> list[int]:
    """[rank of stage 0, 1, ...] on the pipeline axis: around in a loop, or down and up again for V-shaped schedules."""
    if schedule in V_SHAPED and stages_per_rank == 2:
        return [*range(pipeline), *reversed(range(pipeline))]
    return list(range(pipeline)) * stages_per_rank


def layers_of_stages(n_layer: int, num_stages: int) -> list[range]:
    """A range of layers per stage, sizes one apart at most: the last stage, which has the head, gets no extra one."""
    least, extra = divmod(n_layer, num_stages)
    ends = [least * (s + 1) + min(s + 1, extra) for s in range(num_stages)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def resolve_layout(options: Options, config: "GPTConfig", world_size: int, ranks_per_node: int | None = None) -> Layout:
    """The `Layout` of `world_size` ranks for `options` and a GPTConfig. Raise LayoutError.

    `ranks_per_node` (none: all on one) tells hybrid sharding where to shard: within a node.
    """
    parallel = options.parallel
    degrees = _degrees(parallel, world_size, ranks_per_node or world_size)
    stages_per_rank = _stages_per_rank(parallel, degrees["pipeline"])
    faults = [
        _style(options, config),
        _foreign_options(parallel, degrees),
        filter(None, [STRATEGIES[parallel.strategy].refusal(options, degrees)]),
        _combinations(options, degrees),
        _context(options, config, degrees),
        _experts(options, config, degrees),
        _sizes(parallel, config, degrees, stages_per_rank),
    ]
    for fault in chain(*faults):
        raise LayoutError(fault)
    micro_batches = _micro_batches(options, degrees)
    return Layout(
        **degrees, micro_batches=micro_batches, stages_per_rank=stages_per_rank, context=parallel.context,
        expert=parallel.expert,
    )  # fmt: skip


def _degrees(parallel, world_size, ranks_per_node):
    asked = {axis: getattr(parallel, axis) for axis in AXES}
    asked |= {"context": parallel.context} if parallel.context > 1 else {}
    hybrid = parallel.strategy == "fsdp" and parallel.sharding == "hybrid"
    unsharded = parallel.strategy == "fsdp" and parallel.sharding == "none"  # NO_SHARD: every rank holds all
    # under hybrid sharding: replicas of what `shard` ranks share
    replicas = unsharded or (hybrid and asked["shard"] is not None)
    leftover = "replicate" if replicas else STRATEGIES[parallel.strategy].axis
    if hybrid and asked["shard"] is None:
        rest = world_size // prod(d or 1 for axis, d in asked.items() if axis != "shard")
        if asked["replicate"] is None and rest > 1:
            nodes = max(1, world_size // ranks_per_node)
            asked["replicate"] = nodes if nodes > 1 and rest % nodes == 0 else 2 if rest % 2 == 0 else 1
    if asked[leftover] is None:
        claimed = {axis: degree for axis, degree in asked.items() if degree is not None}
        fixed = prod(claimed.values())
        if world_size % fixed:
            by = ", ".join(f"{axis}={degree}" for axis, degree in claimed.items())
            raise LayoutError(f"{world_size} ranks do not split by {by}; use a multiple of {fixed} ranks")
        asked[leftover] = world_size // fixed
    degrees = {axis: degree or 1 for axis, degree in asked.items()}
    if prod(degrees.values()) != world_size:
        product = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1) or "1"
        why = f"{product} = {prod(degrees.values())} ranks, but {world_size} were started"
        raise LayoutError(f"{why}; start as many, or leave parallel.{leftover} out")
    # they hold, or share, the weights as data ranks do
    degrees["shard" if parallel.strategy == "fsdp" and not unsharded else "replicate"] *= degrees.pop("context", 1)
    return degrees


def _stages_per_rank(parallel, pipeline):
    if pipeline == 1:
        return 1
    least = 2 if parallel.schedule in TWO_STAGES else 1
    wanted = parallel.stages_per_rank or least
    asked = f"parallel.schedule={parallel.schedule}"
    if parallel.schedule in ("ZBVZeroBubble", "DualPipeV") and wanted != 2:
        raise LayoutError(f"{asked} gives each rank 2 stages, not {wanted}; leave stages_per_rank out")
    if wanted < least:
        raise LayoutError(f"{asked} interleaves at least 2 stages per rank, not {wanted}; use 1F1B")
    if least == 1 and wanted > 1:
        raise LayoutError(f"{asked} has one stage per rank, not {wanted}; use Interleaved1F1B")
    return wanted


def _style(options, config):
    """A sentence for the one way in which a llama does not run."""
    if config.style == "llama" and options.parallel.strategy == "deepspeed":
        yield "model.style=llama does not run under deepspeed; use parallel.strategy=fsdp, or model.style=gpt"


def _foreign_options(parallel, degrees):
    """A sentence for each option that would have no effect here."""
    default, strategy = ParallelOptions(), parallel.strategy
    owners = {name: owner for owner, one in STRATEGIES.items() for name in one.options}
    for name in [f.name for f in fields(parallel) if getattr(parallel, f.name) != getattr(default, f.name)]:
        asked = f"parallel.{name}={getattr(parallel, name)}"
        if owners.get(name, strategy) != strategy:
            yield f"{asked} needs parallel.strategy={owners[name]}, not {strategy}; use that one, or leave it out"
        if name in ("schedule", "stages_per_rank") and degrees["pipeline"] == 1 and strategy != "pp":
            why = f"{asked} needs pipeline ranks, not {strategy} alone"
            yield f"{why}; use parallel.strategy=pp or parallel.pipeline=2, or leave it out"
        if name in ("sequence_parallel", "loss_parallel") and degrees["tensor"] == 1:
            yield f"parallel.{name} needs tensor ranks; use parallel.tensor=2 or more, or leave it out"
    if degrees["shard"] > 1 and strategy != "fsdp":
        yield f"parallel.shard={degrees['shard']} needs parallel.strategy=fsdp, not {strategy}"


def _combinations(options, degrees):
    """A sentence for each thing that tensor or pipeline ranks do not go together with."""
    parallel, train, tensor = options.parallel, options.train, degrees["tensor"]
    # torch 2.13 cannot compile a checkpointed block of DTensors
    if tensor > 1 and train.compile and parallel.activation_checkpointing == "block":
        why = f"parallel.activation_checkpointing=block does not go with train.compile and {tensor} tensor ranks"
        yield f"{why}; use parallel.activation_checkpointing=selective or --train.no-compile"
    if train.loss_kernel != "ours" and (tensor > 1 or degrees["pipeline"] > 1 or parallel.strategy == "deepspeed"):
        why = f"train.loss_kernel={train.loss_kernel} needs the whole head on each rank"
        yield f"{why}; leave out tensor and pipeline ranks, and deepspeed, or this"
    if degrees["pipeline"] == 1:
        return
    if parallel.loss_parallel:
        yield "parallel.loss_parallel does not run inside a pipeline; leave it out"
    if train.compile:
        yield "train.compile does not run with a pipeline; use --train.no-compile"
    if train.precision == "fp16":
        yield "fp16's loss scale is not known inside a pipeline's schedule; use train.precision=bf16 or fp32"
    if parallel.schedule not in SPLIT_BACKWARD:
        return
    # the weights' gradients come after FSDP has resharded the weights (torch 2.13: missing or wrong gradients)
    if parallel.strategy == "fsdp" and parallel.sharding in ("full", "hybrid"):
        why = f"parallel.schedule={parallel.schedule} needs weights that stay gathered until their gradients come"
        yield f"{why}, not parallel.sharding={parallel.sharding}; use parallel.sharding=grad_op, or 1F1B"
    if parallel.activation_checkpointing == "selective":
        yield (
            f"parallel.schedule={parallel.schedule} goes through a block's backward twice and parallel."
            "activation_checkpointing=selective allows one; use parallel.activation_checkpointing=block"
        )


def _context(options, config, degrees):
    """A sentence for each thing that context ranks do not go together with."""
    parallel, context = options.parallel, options.parallel.context
    if context == 1:
        return
    asked = f"parallel.context={context}"
    if degrees["pipeline"] > 1:
        yield f"{asked} does not run inside a pipeline; use parallel.strategy=ddp or fsdp without parallel.pipeline"
    if config.block_size % (2 * context):
        why = f"model.block_size={config.block_size} positions do not split into 2 x {context} equal pieces"
        yield f"{why} for {context} context ranks; use a multiple of {2 * context}"
    if config.dropout:
        yield f"{asked} has no dropout in its attention; use model.dropout=0, not {config.dropout:g}"
    if options.train.compile:
        yield f"{asked} does not go with train.compile; use --train.no-compile"
    if parallel.activation_checkpointing == "selective":
        why = f"{asked} with parallel.activation_checkpointing=selective would keep all of attention's scores"
        yield f"{why}; use parallel.activation_checkpointing=block"


def _experts(options, config, degrees):
    """A sentence for each thing that a mixture of experts does not go together with."""
    parallel, experts = options.parallel, config.experts
    asked, spread = f"model.experts={experts}", f"parallel.expert={parallel.expert}"
    if parallel.expert > 1:
        if experts % parallel.expert or experts == 1:
            yield f"{asked} does not split over {spread} ranks; use a multiple of {parallel.expert}"
        if (data := degrees["replicate"] * degrees["shard"]) % parallel.expert:
            yield f"{data} data ranks do not split into groups of {spread}; use a divisor of {data}"
        if parallel.strategy == "zero1":
            yield f"zero1 shares out whole weights, and {spread} spreads them; use parallel.strategy=fsdp or ddp"
    if experts == 1:
        return
    if parallel.strategy == "deepspeed":
        yield f"{asked} does not run under deepspeed; use parallel.strategy=ddp or fsdp"
    if experts % (parallel.expert * degrees["tensor"]):
        ranks = f"{spread} x {degrees['tensor']} tensor ranks"
        yield f"{asked} does not split over {ranks}; use a multiple of {parallel.expert * degrees['tensor']}"
    if parallel.loss_parallel and options.optimizer.balance_loss:
        why = f"{asked} has a balancing loss, which parallel.loss_parallel does not know"
        yield f"{why}; leave it out, or use optimizer.balance_loss=0"
    if options.train.compile:
        yield f"{asked} does not go with train.compile; use --train.no-compile"
    if parallel.activation_checkpointing == "selective":
        why = f"{asked} does not go with parallel.activation_checkpointing=selective"
        yield f"{why}; use parallel.activation_checkpointing=block"
    if parallel.context > 1 and options.optimizer.balance_loss:
        why = f"{asked} has a balancing loss of whole sequences, which parallel.context={parallel.context} ranks share"
        yield f"{why}; use optimizer.balance_loss=0, and leave balancing to the biases"


def uneven_heads(config, tensor: int) -> str:
    """A sentence that says why heads do not split over tensor ranks; "" where they do.

    Ranks have equally many heads of queries, and whole heads of keys and values, or several of them the same one.
    """
    heads = config.n_head
    of_keys = config.kv_heads
    *most, last = (t for t in range(1, heads + 1) if heads % t == 0 == min(of_keys % t, t % of_keys))
    if tensor in (*most, last):
        return ""
    said = f"model.n_head={heads}" + f" with model.n_kv_head={of_keys}" * (of_keys != heads)
    cure = f"use {', '.join(map(str, most))} or {last}" if most else "use 1"
    return f"{said} does not split over {tensor} tensor ranks; {cure}"


def _sizes(parallel, config, degrees, stages_per_rank):
    """A sentence for each size of the model that does not split, and for wrapping that is none."""
    tensor, stages = degrees["tensor"], degrees["pipeline"] * stages_per_rank
    if uneven := uneven_heads(config, tensor):
        yield uneven
    if (hidden := config.hidden) % tensor:
        yield f"model.n_hidden={hidden} does not split over {tensor} tensor ranks; use a divisor of {hidden}"
    tokens = -(-config.vocab_size // tensor)  # of each tensor rank; the last ones get what is left
    if tokens * (tensor - 1) >= config.vocab_size:
        why = f"model.vocab_size={config.vocab_size} tokens, {tokens} for each of {tensor} tensor ranks"
        yield f"{why}, leave none for the last one; use fewer tensor ranks or a larger vocabulary"
    if parallel.sequence_parallel and (positions := config.block_size // parallel.context) % tensor:
        shared = f" over {parallel.context} context ranks leave {positions}, which"
        why = f"model.block_size={config.block_size} positions{shared * (parallel.context > 1)} do not split over"
        yield f"{why} {tensor} tensor ranks; use a multiple of {tensor * parallel.context}"
    if stages > config.n_layer:
        why = f"{stages} stages ({degrees['pipeline']} ranks x {stages_per_rank})"
        yield f"{why} are more than model.n_layer={config.n_layer}; use fewer pipeline ranks or more layers"
    kind, _, count = parallel.wrapping.partition(":")
    if not re.fullmatch(r"block|block_and_size|(block_group|size):[1-9][0-9]*", parallel.wrapping):
        why = f"parallel.wrapping={parallel.wrapping!r} is unknown"
        yield f"{why}; use block, block_and_size, block_group:2 or size:100000"
    elif kind == "block_group" and int(count) > config.n_layer:
        yield f"parallel.wrapping={parallel.wrapping}: there are only {config.n_layer} blocks; use at most that"


def _micro_batches(options, degrees):
    train, parallel, pipeline = options.train, options.parallel, degrees["pipeline"]
    data = degrees["replicate"] * degrees["shard"] // parallel.context
    if train.global_batch % data:
        why = f"train.global_batch={train.global_batch} does not split over {data} data-parallel ranks"
        raise LayoutError(f"{why}; use a multiple of {data}")
    share = train.global_batch // data
    if train.micro_batch is not None:
        if share % (size := train.micro_batch):
            why = f"a rank's share of {share} sequences (train.global_batch={train.global_batch} over {data})"
            raise LayoutError(f"{why} does not split into micro-batches of {size}; use a divisor of {share}")
        count = share // train.micro_batch
    elif pipeline == 1:
        return 1
    else:  # twice as many as stages where that goes: the pipeline's idle share halves
        count = next((n for n in (2 * pipeline, pipeline) if share % n == 0), share)
    # DualPipeV (torch 2.13) wants one for each stage, and a rank has two
    least = 2 * pipeline if parallel.schedule == "DualPipeV" else pipeline
    if pipeline > 1 and (count < least or count % pipeline):
        why = f"{count} micro-batches do not fill {pipeline} pipeline ranks evenly under {parallel.schedule}"
        cure = f"there are {least} or a larger multiple of {pipeline}"
        raise LayoutError(f"{why}; choose train.global_batch and train.micro_batch so that {cure}")
    return count
