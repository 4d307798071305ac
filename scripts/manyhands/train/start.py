"""Prepare a run before its first step: check the text, the prompt and memory for the model, resume from a checkpoint
of the same or another layout, and seed each rank's dropout.

    corpus = corpus_of(options, ranks)
    resume(run)
"""

import dataclasses
import platform
import time
from importlib.util import find_spec

import numpy as np
import torch
import torch.distributed as dist

from manyhands.checkpoint.manifest import CheckpointError, read_manifest
from manyhands.config.layout import compiles
from manyhands.config.model_folder import sizes_in
from manyhands.config.options import LogOptions, OptionError, to_dict
from manyhands.data.corpus import load_corpus, open_text
from manyhands.data.tokenizer import cut_alike, tokenizer_from, tokenizer_of_folder
from manyhands.gpt.config import GPTConfig
from manyhands.launch.machine import available_memory_bytes, compiler_for
from manyhands.launch.ranks import Agreement
from manyhands.launch.settings import environment

OWN = 0.1  # of a device's memory, in use before the model is there: this process's context; more is another process's
SMALL = 2**24  # numbers: tokens of a rank's share, times what each of them has in all layers
WAITS = ("timeout_s", "stall_s", "device", "hold_garbage")  # options that concern the machine, not the training
HOSTS_OWN = ("config", "data.folder", "data.file")  # each host may have its own copy of what these name


def of_all_ranks(options):
    """Return {"train.steps": 300, ...}: the options of a run that all ranks must have been started with."""
    groups = {name: value if isinstance(value, dict) else {"": value} for name, value in to_dict(options).items()}
    named = {f"{group}.{name}".rstrip("."): (name, v) for group, own in groups.items() for name, v in own.items()}
    return {path: value for path, (name, value) in named.items() if name not in WAITS and path not in HOSTS_OWN}


def corpus_of(options, ranks=None):
    """Return the corpus that `options.data` names, the same on all ranks. All ranks must call it.

    Raise DataError on all ranks for a folder that is not a prepared text.
    """
    folder = options.data.folder
    return load_corpus(ranks) if folder is None else open_text(folder, ranks)


def model_folder(options, config, corpus):
    """Return the ModelFolder that `options.source` names, or None without one. `corpus`: None if it is not at hand.

    Raise Refused if the model there is another than `config`, cannot be read, or has another tokenizer than the text.
    """
    if options.source is None:
        return None
    from manyhands.checkpoint.folders import ModelFolder  # late: most runs need none of it

    sizes = sizes_in(options.source)
    longest = sizes.pop("block_size")
    for name, value in sizes.items():
        if (own := getattr(options.model, name)) != value and (own, value) != (config.n_head, None):
            raise OptionError(f"model.{name}={own}, and the model in {options.source} has {value}; leave it out")
    if config.block_size > longest:
        why = f"model.block_size={config.block_size} is more than the model in {options.source} reads"
        raise OptionError(f"{why}, {longest}; use at most that")
    folder = ModelFolder(options.source, config)
    if corpus and not cut_alike(tokenizer_of_folder(options.source), corpus.tokenizer):
        cure = f"cut it anew: scripts/prepare_data.py FILES --to data/mine --tokenizer {options.source}"
        raise OptionError(f"the text is cut by another tokenizer than that of {options.source}; {cure}")
    return folder


def fill(run, folder, parallel=None):
    """Fill `parallel` (None: the model of `run`) from a ModelFolder, each rank what it holds.

    Raise CheckpointError on all ranks.
    """
    run.report.note(f"reading the model in {folder.path}")
    begin, named = time.perf_counter(), (parallel or run.parallel).named_parameters()
    num_bytes = Agreement(run.ranks, None, CheckpointError).all(lambda: folder.fill(named))
    run.report.note(f"this rank has read {num_bytes / 1e6:,.1f} MB of weights in {time.perf_counter() - begin:.1f} s")


def refuse_text(options, config, corpus):
    """Raise OptionError if the corpus is shorter than block_size or lacks the prompt's characters."""
    least = min(len(corpus.train_ids), len(corpus.val_ids))
    if least <= config.block_size:
        raise OptionError(
            f"model.block_size={config.block_size} needs {config.block_size + 1} tokens and the corpus's smaller part"
            f" has {least}; use a smaller block_size"
        )
    if options.log.sample:
        prompt_ids(options, corpus)


def prompt_ids(options, corpus):
    """Return the ids of `log.prompt`, or the text's first token if the default prompt is not in the vocabulary.

    Raise OptionError for another prompt that is not.
    """
    try:
        return corpus.encode(options.log.prompt)
    except ValueError as error:
        if options.log.prompt == LogOptions().prompt:  # a text without a newline
            return corpus.train_ids[:1].long()
        raise OptionError(f"log.prompt={options.log.prompt!r}: {error}") from None


def refuse_size(config, ranks, shares=None):
    """Raise OptionError on all ranks if a node lacks memory for its ranks' start. All ranks call it.

    Each rank makes all weights in float32 before it keeps its share (`full_model`), or its share of them alone and one
    weight at a time (`drawn_in_shares`). `shares`: into how many FSDP cuts the model from the start, 1 where it could,
    None where every rank needs the whole. Training's memory is not counted.
    """
    room = torch.tensor(available_memory_bytes() / ranks.local_world_size, dtype=torch.float64)
    dist.all_reduce(room, dist.ReduceOp.MIN)
    needed = 4 * config.num_params() / (shares or 1)
    if needed > room:
        instead = ", or --parallel.strategy fsdp alone, under which a rank makes only its share" * (shares == 1)
        raise OptionError(
            f"the model's {config.num_params():,} parameters take {needed / 2**30:,.1f} GiB on each rank while it"
            f" starts, and a rank finds {room.item() / 2**30:,.1f} GiB; use a smaller model or fewer ranks on a node"
            f"{instead} (--dry-run computes what training adds)"
        )


def decided(options, config, layout, ranks):
    """Complete `options` for this machine: micro-batches that fit, and whether to compile. All ranks call it.

    Return them and a sentence about what is unavailable, or None.
    """
    room = memory_of_a_rank(ranks.device.type, ranks.local_world_size)
    compiler = compiler_for(ranks.device.type, environment()) is not None
    least = torch.tensor([room, compiler], dtype=torch.float64)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    room, compiler = least.tolist()
    if may_not_fit(options, config, layout):
        from manyhands.predict.memory import with_micro_batch  # late: most runs need none of it

        options = with_micro_batch(options, config, ranks.world_size, ranks.local_world_size, room)
    wanted, sentence = compiles(layout, options) and ranks.device.type == "cuda", None
    if options.train.compile is None:
        if wanted and not compiler:
            sentence = "not compiled: a host has no C compiler (CC, gcc or clang); run scripts/doctor.py for details"
        train = dataclasses.replace(options.train, compile=bool(wanted and compiler))
        options = dataclasses.replace(options, train=train)
    return options, sentence


def memory_of_a_rank(kind, on_node):
    """Return the accelerator's bytes, or on a CPU the share of the host's memory for one of `on_node` ranks.

    Of an accelerator that other processes use, too (a hub's, one under MPS), these are the bytes that they leave free.
    """
    if kind != "cpu":
        free, all_bytes = torch.get_device_module(kind).mem_get_info()
        return all_bytes if all_bytes - free <= OWN * all_bytes else free
    return available_memory_bytes() // on_node


def may_not_fit(options, config, layout):
    """Return whether a micro-batch must be chosen: none is named, and a rank's whole share is not small anyway.

    A pipeline has a rule of its own. Small is what keeps less than about 1 GiB of activations.
    """
    if options.train.micro_batch or layout.pipeline > 1:
        return False
    tokens = options.train.global_batch // layout.data * config.block_size
    return tokens * (config.n_layer * config.n_embd + config.vocab_size) > SMALL


def refuse_missing(options, ranks):
    """Raise OptionError on all ranks if a host lacks a compiler or a package that `options` need. All ranks call it.

    Another FlashAttention than torch's is switched on here, for this process.
    """
    train, on = options.train, f"on {platform.node()}"

    def look():
        if train.loss_kernel == "liger" and not (find_spec("liger_kernel") and ranks.device.type != "cpu"):
            raise OptionError(f"train.loss_kernel=liger needs a GPU and the package liger-kernel {on}; leave it out")
        if train.flash != "torch":
            try:
                torch.nn.attention.activate_flash_attention_impl(train.flash)
            except (AttributeError, ImportError, RuntimeError, ValueError) as error:
                why = f"train.flash={train.flash} does not start {on} ({' '.join(str(error).split())[:200]})"
                raise OptionError(f"{why}; install its package, or leave it out") from None
        if options.train.compile and compiler_for(ranks.device.type, environment()) is None:
            needs = "C++ compiler (CXX or g++)" if ranks.device.type == "cpu" else "C compiler (CC, gcc or clang)"
            raise OptionError(
                f"train.compile needs a {needs}, and {platform.node()} has none; load the site's compiler module, or"
                " use --train.no-compile"
            )

    Agreement(ranks, None, OptionError).all(look)


def choose_tf32(options, device):
    """Set whether a GPU multiplies fp32 matrices in TF32. A CPU computes as in the lessons."""
    if device.type != "cpu" and options.train.precision == "fp32":
        torch.set_float32_matmul_precision("high" if options.train.tf32 else "highest")


def resume(run):
    """Resume from the folder's newest checkpoint, if there is one and the options ask for it. Raise CheckpointError."""
    run.checkpoints.claim()  # check that it is writable and no other run writes there
    wanted, newest = run.options.checkpoint.resume, run.checkpoints.newest()
    if newest is None:
        if not run.checkpoints.empty():
            raise CheckpointError(
                f"{run.checkpoint_folder} holds only damaged checkpoints; repair it or name another folder"
            )
        if wanted == "must":
            raise CheckpointError(f"{run.checkpoint_folder} holds no complete checkpoint to resume from")
        if run.source is not None:
            fill(run, run.source)
            _take_tokenizer(run, tokenizer_of_folder(run.source.path))
        return
    if wanted == "never":
        raise CheckpointError(
            f"{run.checkpoint_folder} holds {newest.name} already; name another folder, or resume from it"
            " (--checkpoint.resume auto)"
        )
    _refuse_foreign(run, newest)
    rank_state = random_state(run.ranks.device)
    tensors = run.tensors()
    # every rank reads the parts that it needs from shards of any layout
    metadata = run.checkpoints.load(newest, tensors, rank_state, str(run.layout))
    run.parallel.take_checkpoint(tensors)
    if metadata["rank_state_restored"]:
        Agreement(run.ranks, None, CheckpointError).all(lambda: set_random_state(rank_state, run.ranks.device, newest))
    else:  # saved under another layout: continue with new random numbers, not those of the first steps
        seed_dropout(run.options.train.seed, run.layout, run.ranks, metadata["step"])
    if run.scale and metadata.get("loss_scale"):
        run.scale.restore(metadata["loss_scale"])
    run.step = run.saved = metadata["step"]
    run.eval_pending = metadata.get("val_loss") is None
    run.origin = metadata.get("base")
    if (vocabulary := metadata["corpus"].get("vocabulary", {})).get("template"):
        _take_tokenizer(run, tokenizer_from(vocabulary))
    if metadata.get("tokens") is not None:
        run.report.resumed = (run.step, metadata["tokens"])
    several = "s" * (metadata["world_size"] != 1)
    run.report.note(f"resumed from {newest}, saved by {metadata['world_size']} rank{several} ({metadata['layout']})")
    if changed := _changed(metadata.get("options", {}), to_dict(run.options)):
        run.report.note(f"it continues with other options: {', '.join(changed)}")
    if run.step > run.options.train.steps:
        run.report.note(
            f"step {run.step} is already past train.steps={run.options.train.steps}: nothing is left to train"
        )


def _take_tokenizer(run, tokenizer):
    """Let checkpoints keep the chat template of the model that `run` goes on from, which its text may not know."""
    run.corpus = dataclasses.replace(run.corpus, tokenizer=tokenizer)


def _refuse_foreign(run, path):
    """Raise CheckpointError if a checkpoint's model or text differs; the message names the difference."""
    metadata = read_manifest(path).metadata
    own, saved = dataclasses.asdict(run.config), dataclasses.asdict(GPTConfig(**metadata["config"]))
    differing = [f"{k}={saved[k]}" for k in own if saved[k] != own[k]]
    if differing:
        here = ", ".join(f"{d.split('=')[0]}={own[d.split('=')[0]]}" for d in differing)
        raise CheckpointError(f"{path} holds another model ({', '.join(differing)}; here {here})")
    if metadata["corpus"]["sha256"] != run.corpus.sha256:
        raise CheckpointError(f"{path} was trained on another text ({metadata['corpus']['name']}); use that one")


def _changed(before, now):
    """Return the training options that differ between two runs, as phrases, ignoring options that one lacks."""
    return [
        f"{group}.{name}={value} (was {before[group][name]})"
        for group in ("train", "optimizer", "parallel")
        for name, value in now[group].items()
        if name not in WAITS and before.get(group, {}).get(name, value) != value
    ]


def seed_dropout(seed, layout, ranks, step=0):
    """Seed this rank's masks, for a run that begins at `step`.

    Ranks with different data or stages draw different dropout masks. Tensor ranks draw the same ones for the same
    activations.

    The numbers are hashed, not multiplied. Products of ranks collide: `seed * (rank + 1) * (local_rank + 1)`
    gives ranks 2 and 8 of two nodes with eight each the same masks.
    """
    place = layout.coordinates(ranks.rank)
    key = (layout.data_rank(ranks.rank), place["pipeline"], step)
    torch.manual_seed(int(np.random.SeedSequence(seed, spawn_key=key).generate_state(1, np.uint64)[0] >> 1))


def random_state(device):
    """Return the states of torch's generators on this rank: {"cpu": uint8 tensor, "device": another, on a GPU}."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_random_state(states, device, path):
    """Restore a `random_state`. Raise CheckpointError, naming `path`, for an invalid state."""
    try:
        torch.set_rng_state(states["cpu"])
        if device.type != "cpu":
            torch.get_device_module(device).set_rng_state(states["device"], device)
    except RuntimeError as error:
        raise CheckpointError(
            f"{path} cannot be resumed from: the state of its random numbers is damaged ({error}); remove this"
            " checkpoint, and the run goes on from the one before it"
        ) from None
