"""`--dry-run`: what would run, on how many ranks, and whether it fits. No process group, no weights.

    python scripts/train.py --preset olmo-7b --ranks 64 --dry-run                 # read it
    python scripts/train.py --preset gpt2 --train.steps 9 --dry-run > run.toml    # --config run.toml runs the same

What it prints is a configuration file: the resolved options in TOML, and what follows from them as comments above.
"""

import contextlib
import json
import shlex
import sys

from manyhands.config.layout import resolve_layout
from manyhands.config.options import OptionError, model_config, to_dict
from manyhands.data.shakespeare import DataError, from_cache
from manyhands.launch import settings
from manyhands.launch.allocation import Allocation, RanksError
from manyhands.launch.commands import TRAIN, command_for
from manyhands.launch.join import end
from manyhands.launch.launchers import LaunchError, resolve
from manyhands.launch.machine import available_memory_bytes
from manyhands.launch.program import write
from manyhands.predict.activation_memory import sequences_at_once
from manyhands.predict.memory import AT_REST, bytes_per_rank, checkpoint_bytes
from manyhands.train.preconditions import corpus_of

USUAL_PER_NODE = 8  # ranks: a node rarely has more GPUs
NOT_IN_THE_FILE = ("config", "dry_run", "ranks", "gpu_gib")  # of this call, not of the run


def dry_run(options):
    """Print what `options` would run on `options.ranks` ranks (none: on those that were started). Returns the exit
    status.

    A run that would be refused is refused here with the same sentence. Started on many ranks, the first one prints.
    """
    try:
        place = resolve()
        world_size = options.ranks or place.world_size or 1
        if place.rank == 0:
            per_node = None if options.ranks else place.local_world_size
            write(f"{describe(options, world_size, per_node)}\n")
    except (LaunchError, OptionError, DataError, RanksError) as error:
        end(f"train.py: {error}", 2)
    return 0


def describe(options, world_size, per_node=None):
    """The configuration file of a run on `world_size` ranks, a str. Raises OptionError, LayoutError or DataError.

    `per_node` of them stand on a node; none: as the nodes here have it, or as is usual.
    """
    from manyhands.train.preconditions import refuse_text  # late: it brings the whole trainer

    with contextlib.redirect_stdout(sys.stderr):  # what is said of the corpus is no part of the file
        corpus = _corpus_at_hand(options)
    config = model_config(options, len(corpus.vocab) if corpus else 0, corpus and corpus.separator)
    per_node = per_node or _usual_per_node(world_size)
    layout = resolve_layout(options, config, world_size, per_node)
    if corpus:
        refuse_text(options, config, corpus)
    train, share = options.train, options.train.global_batch // layout.data
    tokens = train.global_batch * config.block_size
    held = bytes_per_rank(config, layout, options)
    several_nodes = world_size > per_node and world_size % per_node == 0
    said = [
        f"{options.preset}: {config.num_params():,} parameters in {config.n_layer} layers of width {config.n_embd} with"
        f" {config.n_head} heads; a vocabulary of {config.vocab_size:,}, {config.block_size:,} positions",
        f"{f'{world_size} ranks' if world_size > 1 else 'one rank'}, strategy {options.parallel.strategy}"
        + (f": {layout}" if world_size > 1 else "")
        + (f" (on nodes of {per_node} ranks)" if several_nodes else ""),
        f"a step: {train.global_batch} sequences of {config.block_size:,} = {tokens:,} tokens; a rank's share is"
        f" {share}"
        f" sequence{'s' * (share > 1)} in {layout.micro_batches} micro-batch{'es' * (layout.micro_batches > 1)}",
        f"the run: {train.steps:,} steps, {train.steps * tokens:,} tokens",
        f"a checkpoint: {gib(checkpoint_bytes(config, options))}",
        *(
            []
            if corpus
            else ["not checked: vocabulary and prompt against the corpus, which is not on this machine yet"]
        ),
        "",
        *held_lines(held, options, layout, config.dropout > 0),
        fits(held.on_gpu, options.gpu_gib, min(per_node, world_size)),
        "",
        "start it with",
        *(f"  {line}" for line in launch_lines(world_size, sys.argv[1:])),
    ]
    return "\n".join([f"# {line}".rstrip() for line in said] + ["", to_toml(options)])


def held_lines(held, options, layout, dropout):
    """What the fullest rank holds, a line per kind: between two steps, and within one."""
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
        for kind, size in held.by_kind().items() if size or kind in AT_REST
    }  # fmt: skip
    within = [line for kind, line in lines.items() if kind not in AT_REST]
    total = f"  {'total':<22}{gib(held.between_steps):>14}"
    peak = f"  {'at its peak':<22}{gib(held.on_gpu):>14}"
    between = [lines[kind] for kind in AT_REST]
    return ["a rank keeps between two steps (the fullest rank):", *between, total, "and within a step", *within, peak]


def _corpus_at_hand(options):
    """The corpus, or None where it is needed for nothing but a check and would have to be fetched."""
    needed = options.model.vocab_size is None or options.data.folder
    return corpus_of(options) if needed or settings.path("MANYHANDS_SHAKESPEARE") or from_cache() else None


def _usual_per_node(world_size):
    nodes = Allocation.find().num_nodes
    return max(1, world_size // nodes) if nodes > 1 else min(world_size, USUAL_PER_NODE)


def fits(needed, gpu_gib, on_node):
    """Whether `needed` bytes per rank fit, a sentence: into `gpu_gib`, else into the GPU or a share of the memory here.

    `on_node` ranks share a node; more than this one are taken to be like it.
    """
    import torch

    if gpu_gib is not None:
        room, whose = gpu_gib * 2**30, "of a rank (--gpu-gib)"
    elif torch.cuda.is_available():
        room, whose = torch.cuda.get_device_properties(0).total_memory, "of a GPU here"
    else:
        room, whose = (
            available_memory_bytes() // on_node,
            "that a rank finds here; --gpu-gib asks for another machine",
        )
    verdict = "it fits" if needed <= room else "IT DOES NOT FIT"
    return f"{verdict}: {gib(needed)} at least, into the {gib(room)} {whose}"


def gib(count):
    """Bytes for people: in GiB, or in MiB below one."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.2f} MiB"


def to_toml(options):
    """The options as a file that `read_options` reads back. None is a comment: TOML has no none."""
    lines, content = [], to_dict(options)
    groups = {name: value for name, value in content.items() if isinstance(value, dict)}
    top = {name: value for name, value in content.items() if name not in groups}
    for group, values in ({None: top} | groups).items():
        lines += [f"\n[{group}]"] if group else []
        for name, value in values.items():
            if group is None and name in NOT_IN_THE_FILE:
                continue
            lines.append(f"# {name}: none" if value is None else f"{name} = {_toml_value(value)}")
    return "\n".join(lines)


def _toml_value(value):
    if isinstance(value, float):
        return repr(value)
    # JSON spells text, whole numbers and truth as TOML does, but for one character
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def launch_lines(world_size, flags):
    """How to start `flags` on so many ranks, and the command that this is here."""
    flags = without(flags, {"--dry-run": 0, "--ranks": 1, "--gpu-gib": 1})
    if world_size == 1:
        return [shlex.join(["python", "scripts/train.py", *flags])]
    try:
        nodes = Allocation.find().num_nodes
        per_node = world_size // nodes
        lines = [shlex.join(["python", "scripts/launch.py", "--nproc", str(per_node), "--", *flags])]
        if world_size % nodes:
            return [f"{world_size} ranks do not split over the {nodes} nodes here; ask for other nodes"]
        lines.append(f"which is here: {shlex.join(command_for([str(TRAIN), *flags], nproc=per_node))}")
    except ValueError as error:  # a starter that is missing here
        lines = [str(error)]
    if per_node > USUAL_PER_NODE:
        lines.append("or, on several nodes, with jobs/train.slurm or jobs/train.pbs: see jobs/README.md")
    return lines


def without(flags, dropped):
    """`flags` without those of `dropped`, {flag: number of words after it}."""
    kept, skip = [], 0
    for word in flags:
        if skip:
            skip -= 1
            continue
        flag, *value = word.split("=", 1)
        flag = flag.replace("_", "-")  # both spellings are read
        if flag not in dropped:
            kept.append(word)
        elif not value:
            skip = dropped[flag]
    return kept
