"""The strategies of training: each is registered here, once, and written in one module of `manyhands.parallel`.

    STRATEGIES["fsdp"].axis               # "shard": the mesh axis of the ranks that no other axis claims
    STRATEGIES["fsdp"].implementation     # "mesh_strategy.MeshStrategy"

Flags, help, layouts, what is refused, the dry run and the planner read what stands here. A new strategy is a class that
fills in `manyhands.parallel.strategy.Strategy`, and an entry in STRATEGIES. The planner tries it where `predict` has
formulas for its `dp_mode`, of memory and of traffic, and says so where it has none.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Registration:
    """The properties of a strategy that need neither ranks nor weights."""

    help: str  # what its ranks share: a line of `train.py --help`
    axis: str  # of the mesh: that of the ranks which no other axis claims
    dp_mode: str  # how data-parallel ranks hold the model; its formulas of memory and traffic go by this
    implementation: str = "mesh_strategy.MeshStrategy"  # module and class in `manyhands.parallel`
    options: tuple[str, ...] = ()  # those of `ParallelOptions` that no other strategy understands
    whole_logits: bool = True  # a rank has whole logits, and may compute a loss of its own on them
    # {name in a plan: options of `ParallelOptions`}, each a way to share that the planner tries; none: itself as it is
    planned: Mapping[str, Mapping[str, Any]] | None = None
    # (options, {axis: ranks}) -> why they do not go together and what to use instead, or ""
    refusal: Callable[[Any, Mapping[str, int]], str] = lambda options, degrees: ""


def _zero1(options: Any, degrees: Mapping[str, int]) -> str:
    if degrees["tensor"] > 1 or degrees["pipeline"] > 1:
        return "zero1 shards the optimizer over replicas only; with tensor or pipeline ranks use parallel.strategy=fsdp"
    return ""


def _fsdp(options: Any, degrees: Mapping[str, int]) -> str:
    parallel, shard, replicate = options.parallel, degrees["shard"], degrees["replicate"]
    if parallel.sharding == "none" and shard > 1:
        return f"parallel.shard={shard} shards and parallel.sharding=none does not; leave one of them out"
    if shard > 1 and replicate > 1 and parallel.sharding != "hybrid":
        return f"replicate={replicate} and shard={shard} together are hybrid sharding; use parallel.sharding=hybrid"
    if parallel.offload and options.train.precision == "fp16":
        return "fp16 and parallel.offload do not go together; use train.precision=bf16"
    return ""


def _deepspeed(options: Any, degrees: Mapping[str, int]) -> str:
    parallel, train = options.parallel, options.train
    if degrees["tensor"] > 1 or degrees["pipeline"] > 1:
        return "deepspeed runs here over data-parallel ranks only; leave parallel.tensor and parallel.pipeline out"
    if parallel.context > 1:
        return f"deepspeed runs here without parallel.context={parallel.context}; use parallel.strategy=fsdp"
    if train.precision in ("fp64", "fp16"):
        return f"deepspeed runs here in fp32 or bf16, not {train.precision}"
    if parallel.reduce_dtype != "own":
        return "deepspeed sums gradients here in their own precision; leave parallel.reduce_dtype out"
    asked = f"parallel.activation_checkpointing={parallel.activation_checkpointing}"
    if not asked.endswith("=none") or train.compile:
        why = f"deepspeed runs here without {'train.compile' if asked.endswith('=none') else asked}"
        return f"{why}; use --parallel.activation-checkpointing none and --train.no-compile, or parallel.strategy=fsdp"
    return ""


STRATEGIES = {
    "ddp": Registration(
        "the batch; each rank has a replica, and gradients are averaged",
        axis="replicate", dp_mode="replicas", options=("all_reduce",), planned={"replicas": {}},
    ),
    "zero1": Registration(
        "the batch and the optimizer's state (ZeRO-1)",
        axis="replicate", dp_mode="zero1", implementation="zero1.Zero1", refusal=_zero1,
    ),
    "fsdp": Registration(
        "the batch, the optimizer's state, gradients and parameters",
        axis="shard", dp_mode="fsdp", options=("sharding", "wrapping", "offload"), refusal=_fsdp,
        planned={
            "zero2": {"sharding": "grad_op"}, "zero3": {"sharding": "full"}, "hybrid": {"sharding": "hybrid"},
            "offload": {"sharding": "full", "offload": True},
        },
    ),
    "tp": Registration("each layer", axis="tensor", dp_mode="replicas"),
    "pp": Registration("the depth", axis="pipeline", dp_mode="replicas", whole_logits=False),
    "deepspeed": Registration(
        "ZeRO-1, 2 or 3 by DeepSpeed, an optional extra",
        axis="replicate", dp_mode="deepspeed", implementation="deepspeed_engine.DeepSpeedParallel",
        options=("zero_stage",), whole_logits=False, refusal=_deepspeed,
    ),
}  # fmt: skip


def strategies_help() -> str:
    """Return a line for each strategy on what its ranks share."""
    return "\n".join(f"    {name:<11}{one.help}" for name, one in STRATEGIES.items())
