"""Implement `--dry-run`: print the options, the ranks and whether it fits, without a process group or weights.

    python scripts/train.py --preset gpt-7b --ranks 64 --dry-run                 # read it
    python scripts/train.py --preset gpt2 --train.steps 9 --dry-run > run.toml    # --config run.toml runs the same

The output is a configuration file: the resolved options in TOML, preceded by derived numbers as comments.

    spread = model_from_flags("--parallel.strategy fsdp", ranks, vocab_size=65)      # a run's model, without the run
    loss = spread.parallel.forward_backward(ids_bT, targets_bT)
    spread.optimizer.step()
    spread.held_by_formula, spread.sent_by_formula
"""

import contextlib
import json
import shlex
import sys
from dataclasses import dataclass, replace

from manyhands.checkpoint.to_folder import refuse_config
from manyhands.config.layout import Layout, resolve_layout
from manyhands.config.options import Options, model_config, read_options, to_dict
from manyhands.data.shakespeare import DataError, at_hand
from manyhands.gpt.config import GPTConfig
from manyhands.launch.allocation import Allocation, RanksError
from manyhands.launch.devices import gpus_here
from manyhands.launch.launchers import LaunchError, resolve
from manyhands.launch.program import Refused, end, write
from manyhands.parallel.optimizer import build_optimizer
from manyhands.parallel.strategy import Strategy, full_model, parallelize
from manyhands.predict import memory, traffic
from manyhands.predict.activation_memory import sequences_at_once
from manyhands.train.report import about_run
from manyhands.train.start import corpus_of, may_not_fit, memory_of_a_rank, model_folder, refuse_text

USUAL_PER_NODE = 8  # ranks per node: a node rarely has more GPUs
NOT_IN_THE_FILE = ("config", "dry_run", "ranks", "gpu_gib")  # options of this call, not of the run


def dry_run(options, prog="train.py", described=None):
    """Print the run of `options` on `options.ranks` ranks (none: those that were started); return the exit status.

    A run that would be refused is refused here with the same sentence. On several ranks, the first one prints.
    `described`: what makes the text, such as `describe` (none: that).
    """
    try:
        place = resolve()
        world_size = options.ranks or place.world_size or 1
        if place.rank == 0:
            per_node = None if options.ranks else place.local_world_size
            write(f"{(described or describe)(options, world_size, per_node)}\n")
    except (LaunchError, Refused, DataError, RanksError) as error:
        end(f"{prog}: {error}", 2)
    return 0


def describe(options, world_size, per_node=None):
    """Return the configuration file of a run on `world_size` ranks. Raise OptionError, LayoutError or DataError.

    `per_node`: ranks per node; none: as on the nodes here, or the usual number.
    """
    with contextlib.redirect_stdout(sys.stderr):  # messages about the corpus do not belong in the file
        # not fetched if it is needed only for a check
        needed = options.model.vocab_size is None or options.data.folder
        corpus = corpus_of(options) if needed or at_hand() else None
    config = model_config(options, len(corpus.vocab) if corpus else 0, corpus and corpus.separator)
    per_node = per_node or usual_per_node(world_size)
    room, whose = room_of(options.gpu_gib, min(per_node, world_size))
    layout = resolve_layout(options, config, world_size, per_node)
    if may_not_fit(options, config, layout):
        options = memory.with_micro_batch(options, config, world_size, per_node, room)
        layout = resolve_layout(options, config, world_size, per_node)
    if corpus:
        refuse_text(options, config, corpus)
    model_folder(options, config, corpus)
    held = memory.bytes_per_rank(config, layout, options)
    several_nodes = world_size > per_node and world_size % per_node == 0
    about = about_run(options, config, layout)
    if several_nodes:
        about["ranks"] += f" (on nodes of {per_node} ranks)"
    said = [
        *(f"{name}: {fact}" for name, fact in about.items()),
        f"a checkpoint: {gib(memory.checkpoint_bytes(config, options))}",
        "" if corpus else "not checked: vocabulary and prompt against the corpus, which is not on this machine yet",
        *held_lines(held, options, layout, config.dropout > 0),
        fits(held.on_gpu, room, whose),
        *(
            ["fine-tuned with AdamW a model takes 16 bytes a parameter in all, in fp32 and under autocast"]
            if options.source and options.optimizer.name == "adamw" and options.train.precision != "fp64"
            else []
        ),
        *(with_lora_line(held, config, layout, options) if options.source else []),
        *export_refusal(config, options),
        "",
        "save this as run.toml, and start it with",
        f"  python scripts/launch.py --nproc {min(per_node, world_size)} -- --config run.toml"
        if world_size > 1
        else "  python scripts/train.py --config run.toml",
        *([f"on {world_size // per_node} nodes, by jobs/train.slurm or jobs/train.pbs"] if several_nodes else []),
    ]
    return "\n".join([f"# {line}".rstrip() for line in said] + ["", to_toml(options)])


def export_refusal(config, options):
    """Return what an export will say instead of writing a folder for transformers: a line, or none."""
    try:
        refuse_config(config)
    except Refused as error:
        return [f"no folder for transformers can be made of it: {error}"]
    if config.experts > 1 and options.optimizer.balance_speed:
        why = "a Mixtral chooses without biases; train with --optimizer.balance-speed 0"
        return [f"no folder for transformers can be made of it: {why}"]
    return []


def kept(held):
    """Return what a rank keeps, as a phrase."""
    return f"{gib(held.between_steps)} between two steps and {gib(held.on_gpu)} at its peak"


def with_lora_line(held, config, layout, options, rows=False):
    """Return what adapters would make of `held`, the bytes of a run without: a line, or none where none can stand."""
    if config.experts > 1 or layout.tensor * layout.pipeline * layout.context > 1:
        return []
    rank = min(8, config.n_embd)
    thin = memory.with_lora(held, config, layout, options, rank, rows)
    return [f"with LoRA alone (align.py, --lora.rank {rank}) a rank keeps {kept(thin)}"]


def held_lines(held, options, layout, dropout):
    """Return what the fullest rank holds, a line per kind, between two steps and within one."""
    sequences, checkpointing = sequences_at_once(layout, options), options.parallel.activation_checkpointing
    said = {
        "activations": f"of micro-batches of {sequences} sequence{'s' * (sequences > 1)}, activation checkpointing"
        f" {checkpointing}{', without the masks of dropout' * dropout}",
        "accumulated_gradients": f"whole, until the last of {layout.micro_batches} micro-batches",
        "workspace": "of single operations: the logits and their gradient above all",
        "optimizer": "in the host's memory, as parameters and gradients are" * held.offload,
    }
    lines = {
        kind: f"  {kind.replace('_', ' '):<22}{gib(size):>14}  {said.get(kind, '')}".rstrip()
        for kind, size in held.by_kind().items() if size or kind in memory.AT_REST
    }  # fmt: skip
    within = [line for kind, line in lines.items() if kind not in memory.AT_REST]
    total = f"  {'total':<22}{gib(held.between_steps):>14}"
    peak = f"  {'at its peak':<22}{gib(held.on_gpu):>14}"
    between = [lines[kind] for kind in memory.AT_REST]
    return ["a rank keeps between two steps (the fullest rank):", *between, total, "and within a step", *within, peak]


def usual_per_node(world_size):
    """Return the ranks of a node, where nobody says them: as on the nodes here, or the usual number."""
    nodes = Allocation.find().num_nodes
    return max(1, world_size // nodes) if nodes > 1 else min(world_size, USUAL_PER_NODE)


def room_of(gpu_gib, on_node):
    """Return (bytes, description): `gpu_gib`, else the memory of a GPU here, else a share of this machine's memory.

    `on_node` ranks share a node; other nodes are assumed to be like this one.
    """
    if gpu_gib is not None:
        return gpu_gib * 2**30, "of a rank (--gpu-gib)"
    if (kind := gpus_here()[0]) != "cpu":
        return memory_of_a_rank(kind, on_node), "of a GPU here"
    return memory_of_a_rank("cpu", on_node), "that a rank finds here; --gpu-gib asks for another machine"


def fits(needed, room, whose):
    """Return a sentence on whether `needed` bytes per rank fit into `room`."""
    said = f"{gib(needed)} at least, into the {gib(room)} {whose}"
    if needed > room:
        return f"IT DOES NOT FIT: {said}"
    if needed > memory.room(room):
        return f"it fits, but tightly: {said}; libraries take up to {memory.RESERVE:.0%} in addition"
    return f"it fits: {said}"


def gib(count):
    """Format bytes in GiB, or in MiB below one GiB."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.2f} MiB"


def to_toml(options):
    """Return the options as TOML for `read_options`. None becomes a comment, because TOML has no none."""
    lines = []
    for name, value in to_dict(options).items():  # options outside groups come first
        if isinstance(value, dict):
            lines += [f"\n[{name}]", *(_toml_line(*item) for item in value.items())]
        elif name not in NOT_IN_THE_FILE:
            lines.append(_toml_line(name, value))
    return "\n".join(lines)


def _toml_line(name, value):
    if value is None:
        return f"# {name}: none"
    # JSON writes text, numbers and booleans as TOML does, except for one character
    return f"{name} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007f")


@dataclass(frozen=True)
class ModelFromFlags:
    """A strategy with the model, its optimizer, and the formulas' predictions for them."""

    parallel: Strategy
    optimizer: object
    config: GPTConfig
    layout: Layout
    options: Options

    @property
    def held_by_formula(self) -> memory.RankBytes:
        """Return the `RankBytes` of the fullest rank."""
        return memory.bytes_per_rank(self.config, self.layout, self.options)

    @property
    def sent_by_formula(self) -> dict[str, traffic.Traffic]:
        """Return {collective: Traffic} of a step; raise ValueError for a strategy without a formula."""
        return traffic.per_step(self.config, self.layout, self.options)


def model_from_flags(flags, ranks, vocab_size, start=full_model):
    """Return a ModelFromFlags for the trainer's `flags`, a command line's text. All ranks must call it.

    `start(config, options)` makes the full GPT that is sharded: see `parallelize`.
    Raise OptionError as the trainer does.
    """
    options = read_options(shlex.split(flags))
    # code that counts and times must run
    options = replace(options, train=replace(options.train, cuda_graphs=False))
    config = model_config(options, vocab_size)
    layout = resolve_layout(options, config, ranks.world_size)
    parallel = parallelize(config, layout, options, ranks, start)
    return ModelFromFlags(parallel, build_optimizer(parallel, options), config, layout, options)
