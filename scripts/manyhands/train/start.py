"""What comes before the first step of a run: a text, a prompt, room for the model; a checkpoint to go on from, on its
own layout or another; and what each rank draws its dropout from.

    corpus = corpus_of(options, ranks)
    resume(run)
"""

import dataclasses
import platform

import numpy as np
import torch
import torch.distributed as dist

from manyhands.checkpoint.manifest import CheckpointError, read_manifest
from manyhands.config.layout import compiles, resolve_layout
from manyhands.config.options import LogOptions, OptionError, to_dict
from manyhands.data.corpus import load_corpus, open_text
from manyhands.gpt.model import GPTConfig
from manyhands.launch.machine import available_memory_bytes, compiler_for
from manyhands.launch.ranks import Agreement
from manyhands.launch.settings import environment
from manyhands.predict.memory import bytes_per_rank

STEADY = 2**16  # tokens
AIR = 0.1  # of the memory: the device's context, NCCL's buffers, gaps between tensors
WAITS = ("timeout_s", "stall_s", "device", "hold_garbage")  # options of the place where a run is, not of what it learns


def corpus_of(options, ranks=None):
    """The corpus that `options.data` names, the same on all ranks. All ranks must call it.

    Raises DataError, on all of them, for a folder that is no prepared text.
    """
    folder = options.data.folder
    return load_corpus(ranks) if folder is None else open_text(folder, ranks)


def refuse_text(options, config, corpus):
    """Raises OptionError where the corpus has no window of block_size, or not what a sample begins with."""
    least = min(len(corpus.train_ids), len(corpus.val_ids))
    if least <= config.block_size:
        raise OptionError(
            f"model.block_size={config.block_size} needs {config.block_size + 1} tokens and the corpus's smaller part"
            f" has {least}; use a smaller block_size"
        )
    if options.log.sample:
        prompt_ids(options, corpus)


def prompt_ids(options, corpus):
    """The ids that a sample goes on from: of `log.prompt`, or the text's first token where that is its default and
    unknown.

    Raises OptionError.
    """
    try:
        return corpus.encode(options.log.prompt)
    except ValueError as error:
        if options.log.prompt == LogOptions().prompt:  # a text without a newline
            return corpus.train_ids[:1].long()
        raise OptionError(f"log.prompt={options.log.prompt!r}: {error}") from None


def refuse_size(config, ranks):
    """Raises OptionError on all ranks, which call it, where a node has no room for what its ranks hold as they start.

    Each makes all weights in float32 before it keeps its share (`full_model`); what training adds is not counted.
    """
    room = torch.tensor(available_memory_bytes() / ranks.local_world_size, dtype=torch.float64)
    dist.all_reduce(room, dist.ReduceOp.MIN)
    needed = 4 * config.num_params()
    if needed > room:
        raise OptionError(
            f"the model's {config.num_params():,} parameters take {needed / 2**30:,.1f} GiB on each rank while it"
            f" starts, and a rank finds {room.item() / 2**30:,.1f} GiB; use a smaller model or fewer ranks on a node"
            " (--dry-run computes what training adds)"
        )


def decided(options, config, layout, ranks):
    """`options` with what they leave to the place: micro-batches that fit, and whether to compile. All ranks call it.

    Returns them and a sentence about what could not be had, or None.
    """
    room = memory_of_a_rank(ranks.device.type, ranks.local_world_size)
    compiler = compiler_for(ranks.device.type, environment()) is not None
    least = torch.tensor([room, compiler], dtype=torch.float64)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    room, compiler = least.tolist()
    options = with_micro_batch(options, config, ranks.world_size, ranks.local_world_size, room)
    wanted, sentence = compiles(layout, options) and ranks.device.type == "cuda", None
    if options.train.compile is None:
        if wanted and not compiler:
            sentence = "not compiled: a host has no C compiler (CC, gcc or clang); scripts/doctor.py says more"
        train = dataclasses.replace(options.train, compile=bool(wanted and compiler))
        options = dataclasses.replace(options, train=train)
    return options, sentence


def memory_of_a_rank(kind, on_node):
    """Bytes of the GPU, or a share of the host's memory where ranks compute on a CPU and `on_node` of them share it."""
    if kind == "cuda":
        return torch.cuda.mem_get_info()[1]
    return available_memory_bytes() // on_node


def with_micro_batch(options, config, world_size, per_node, room):
    """`options` with the largest micro-batch that fits into `room` bytes of a rank and leaves AIR; 1 if none does.

    As they are, where they name one, where a rank's whole share fits, or where a pipeline has its own rule. More than
    STEADY tokens at once make no GPU faster.
    """
    layout = resolve_layout(options, config, world_size, per_node)
    if options.train.micro_batch or layout.pipeline > 1:
        return options
    share = options.train.global_batch // layout.data
    for size in (size for size in range(share, 0, -1) if share % size == 0):
        asked = None if size == share else size
        chosen = dataclasses.replace(options, train=dataclasses.replace(options.train, micro_batch=asked))
        layout = resolve_layout(chosen, config, world_size, per_node)
        fits = bytes_per_rank(config, layout, chosen).on_gpu <= (1 - AIR) * room
        if size == 1 or (fits and size * config.block_size // layout.context <= STEADY):
            break
    return chosen


def refuse_compile(options, ranks):
    """Raises OptionError on all ranks, which call it, where train.compile finds no compiler on one of their hosts."""

    def look():
        if options.train.compile and compiler_for(ranks.device.type, environment()) is None:
            needs = "C++ compiler (CXX or g++)" if ranks.device.type == "cpu" else "C compiler (CC, gcc or clang)"
            raise OptionError(
                f"train.compile needs a {needs}, and {platform.node()} has none; load the site's compiler module, or"
                " use --train.no-compile"
            )

    Agreement(ranks, None, OptionError).all(look)


def choose_tf32(options, device):
    """Set whether a GPU's products of fp32 run in TF32. A CPU computes as the lessons do."""
    if device.type != "cpu" and options.train.precision == "fp32":
        torch.set_float32_matmul_precision("high" if options.train.tf32 else "highest")


def resume(run):
    """Go on from the newest checkpoint of the folder, if there is one and it is wanted. Raises CheckpointError."""
    run.checkpoints.claim()  # it can be written, and no other run writes there
    wanted, newest = run.options.checkpoint.resume, run.checkpoints.newest()
    if newest is None:
        if not run.checkpoints.empty():
            raise CheckpointError(
                f"{run.checkpoint_folder} holds checkpoints and none of them can be trusted; mend it, or name another"
            )
        if wanted == "must":
            raise CheckpointError(f"{run.checkpoint_folder} holds no complete checkpoint to resume from")
        return
    if wanted == "never":
        raise CheckpointError(
            f"{run.checkpoint_folder} holds {newest.name} already; name another folder, or resume from it"
            " (--checkpoint.resume auto)"
        )
    _refuse_foreign(run, newest)
    rank_state = random_state(run.ranks.device)
    tensors = run.tensors()
    # every rank reads what it needs of the shards that any layout has written
    metadata = run.checkpoints.load(newest, tensors, rank_state, str(run.layout))
    run.parallel.take_checkpoint(tensors)
    if metadata["rank_state_restored"]:
        Agreement(run.ranks, None, CheckpointError).all(lambda: set_random_state(rank_state, run.ranks.device, newest))
    else:  # saved under another layout: draw on, but not what the first steps drew
        seed_dropout(run.options.train.seed, run.layout, run.ranks, metadata["step"])
    if run.scale and metadata.get("loss_scale"):
        run.scale.restore(metadata["loss_scale"])
    run.step = run.saved = metadata["step"]
    run.eval_pending = metadata.get("val_loss") is None
    if metadata.get("tokens") is not None:
        run.report.resumed = (run.step, metadata["tokens"])
    several = "s" * (metadata["world_size"] != 1)
    run.report.note(f"resumed from {newest}, saved by {metadata['world_size']} rank{several} ({metadata['layout']})")
    if changed := _changed(metadata.get("options", {}), to_dict(run.options)):
        run.report.note(f"it goes on with other options: {', '.join(changed)}")
    if run.step > run.options.train.steps:
        run.report.note(
            f"step {run.step} is already past train.steps={run.options.train.steps}: nothing is left to train"
        )


def _refuse_foreign(run, path):
    """Another model or another text is another run. Raises CheckpointError with what differs."""
    metadata = read_manifest(path).metadata
    own, saved = dataclasses.asdict(run.config), dataclasses.asdict(GPTConfig(**metadata["config"]))
    differing = [f"{k}={saved[k]}" for k in own if saved[k] != own[k]]
    if differing:
        here = ", ".join(f"{d.split('=')[0]}={own[d.split('=')[0]]}" for d in differing)
        raise CheckpointError(f"{path} holds another model ({', '.join(differing)}; here {here})")
    if metadata["corpus"]["sha256"] != run.corpus.sha256:
        raise CheckpointError(f"{path} was trained on another text ({metadata['corpus']['name']}); use that one")


def _changed(before, now):
    """What of the training differs between two runs' options, as phrases; what one of them lacks counts for nothing."""
    return [
        f"{group}.{name}={value} (was {before[group][name]})"
        for group in ("train", "optimizer", "parallel")
        for name, value in now[group].items()
        if name not in WAITS and before.get(group, {}).get(name, value) != value
    ]


def seed_dropout(seed, layout, ranks, step=0):
    """Seed this rank's masks, for a run that begins at `step`.

    Ranks with other data or another stage draw other dropout masks; tensor ranks draw the same, on the same
    activations.

    The numbers are mixed, not multiplied: products of ranks collide, so that `seed * (rank + 1) * (local_rank + 1)`
    gives ranks 2 and 8 of two nodes with eight each the same masks.
    """
    place = layout.coordinates(ranks.rank)
    key = (layout.data_rank(ranks.rank), place["pipeline"], step)
    torch.manual_seed(int(np.random.SeedSequence(seed, spawn_key=key).generate_state(1, np.uint64)[0] >> 1))


def random_state(device):
    """The states of torch's generators on this rank: {"cpu": uint8 tensor, "device": another, on a GPU}."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_random_state(states, device, path):
    """Go on drawing where `random_state` was taken. Raises CheckpointError, which names `path`, for no such state."""
    try:
        torch.set_rng_state(states["cpu"])
        if device.type != "cpu":
            torch.get_device_module(device).set_rng_state(states["device"], device)
    except RuntimeError as error:
        raise CheckpointError(
            f"{path} cannot be resumed from: the state of its random numbers is damaged ({error}); remove this"
            " checkpoint, and the run goes on from the one before it"
        ) from None
