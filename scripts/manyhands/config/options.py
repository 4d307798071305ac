"""The options of a training run: typed, from presets, a file, and flags, in this order.

    options = read_options(["--preset", "shakespeare", "--train.steps", "1000", "--parallel.strategy", "fsdp"])

Flags are spelled as tyro spells dataclasses: `--model.n-layer 12`, `--train.compile`, `--train.no-compile`. A file
(`--config run.toml`) has one table per group, with the names of the fields below. Flags win over the file, the file
wins over the preset. A value that makes no sense by itself is refused here; what must fit the ranks, by `layout`.
"""

import dataclasses
import json
import math
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from manyhands.config.bounds import Count, Positive, Rate, Seconds, Seed, Share
from manyhands.config.model_folder import LONGEST, sizes_in
from manyhands.config.strategies import STRATEGIES, strategies_help
from manyhands.course.folders import named
from manyhands.gpt.config import GPTConfig
from manyhands.launch.program import Refused, explained

if TYPE_CHECKING:
    Strategy = str
else:
    Strategy = Literal[tuple(STRATEGIES)]  # flags accept what is registered

Schedule = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]
PRESETS = tomllib.loads(files("manyhands.config").joinpath("presets.toml").read_text("utf-8"))
UNSET = "is empty (is a variable of the shell unset?)"


class OptionError(Refused):
    """An option that cannot be: one sentence with the numbers and the cure."""


@dataclass(frozen=True)
class ModelOptions:
    """The sizes of the GPT: see `manyhands.gpt.model`."""

    n_layer: int = 4  # layers
    n_head: int = 4  # attention heads per layer
    n_embd: int = 128  # width
    block_size: int = 64  # positions: the longest sequence in training
    vocab_size: Positive | None = None  # none: as the corpus has
    dropout: float = 0.0  # share of the numbers that training sets to zero
    tie: bool = False  # one matrix for token embedding and head, as in GPT-2
    qkv_bias: bool = False  # as in GPT-2
    experts: Positive = 1  # MLPs per layer, which share the tokens by a router: a mixture of experts
    top_k: Positive = 2  # with experts: the number of them that each token passes through
    shared_experts: Count = 0  # with experts: one MLP for every token, as wide as this number of experts
    router: Literal["softmax", "sigmoid"] = "softmax"  # with experts: what makes an expert's score
    gelu: Literal["exact", "tanh"] = "exact"  # tanh: the approximation that GPT-2 was trained with
    # llama: RMSNorm, rotary positions, SwiGLU, no biases; what follows is for llama alone
    style: Literal["gpt", "llama"] = "gpt"
    n_kv_head: Positive | None = None  # heads of keys and values, which share out the others; none: as many
    n_hidden: Positive | None = None  # width of the MLP; none: 4 times that of the model
    head_dim: Positive | None = None  # width of a head; none: that of the model over its heads
    norm: Literal["rms", "layer"] = "rms"  # layer: OLMo's LayerNorm, without weight and bias
    norm_eps: float = 1e-5  # of rms: what is added to the mean square
    clip_qkv: float | None = None  # the largest size of a number in queries, keys and values; none: any
    rope_theta: float = 10000.0  # larger: positions turn more slowly
    rope_factor: float = 1.0  # Llama 3.1's scaling: slow turns become slower by this; 1: none
    rope_low: float = 1.0  # turns within rope_original positions: with fewer, a turn is slow
    rope_high: float = 4.0  # and with more it stays as it is
    rope_original: Positive = 8192  # positions that the scaling goes by
    max_positions: Positive | None = None  # the longest sequence that it reads and writes; none: block_size


@dataclass(frozen=True)
class DataOptions:
    """The text: the course's own, unless a folder is named."""

    folder: str | None = None  # a text of your own, as scripts/prepare_data.py leaves it; none: Shakespeare
    mask_documents: bool = True  # attention stays within a document, where the text has several


@dataclass(frozen=True)
class TrainOptions:
    """The number of steps, the batch, and the arithmetic."""

    steps: Positive = 300  # optimizer steps
    global_batch: Positive = 24  # sequences per step, over all ranks
    # sequences per forward on one rank; none: its whole share (a GPU: what fits; a pipeline: half a stage's)
    micro_batch: Positive | None = None
    precision: Literal["fp64", "fp32", "bf16", "fp16"] = "fp32"  # bf16 and fp16: autocast over fp32 weights
    # torch.compile; none: on GPUs for ddp and fsdp, where a run has 100 steps or more and a compiler is there
    compile: bool | None = None
    low_stream: bool = True  # in bf16 what the blocks add to has 16 bits, too
    chunk_loss: bool = True  # of many logits, a chunk of them at a time; tensor ranks and pipelines have all
    # liger: head and loss by the package liger-kernel, on GPUs, where ours would go in chunks
    loss_kernel: Literal["ours", "liger"] = "ours"
    flash: Literal["torch", "FA3", "FA4"] = "torch"  # on GPUs: another FlashAttention, where its package is installed
    # what a GPU does in a micro-batch is recorded once and played back (ddp, small models)
    cuda_graphs: bool = True
    # on GPUs in 16 bits the head computes with zeros up to a multiple of 64 tokens; tensor ranks do without
    pad_vocab: bool = True
    tf32: bool = True  # on GPUs products of fp32 have 10 bits behind the point, and are several times as fast
    hold_garbage: bool = True  # Python collects garbage at the same steps on all ranks
    seed: Seed = 1337  # of the weights, the batches and dropout
    device: Literal["auto", "cpu", "cuda", "xpu"] = "auto"  # auto: GPUs, where every rank has one
    timeout_s: Seconds = 600.0  # a collective that takes longer has failed
    stall_s: Seconds = 120.0  # a rank that makes no progress for this time is named


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW with decay on matrices only; warm-up, then cosine down to `min_lr` at the last step."""

    name: Literal["adamw", "sgd"] = "adamw"  # sgd: without momentum
    lr: Rate = 1e-3  # at its peak
    min_lr: Rate | None = None  # at the end; none: a tenth of lr
    warmup: Count | None = None  # steps; none: a twentieth of the run, at most 100
    weight_decay: Rate = 0.1  # of matrices, per step and times lr
    beta1: Share = 0.9  # how much of adamw's mean gradient stays from step to step
    beta2: Share = 0.99  # how much of adamw's mean squared gradient stays
    clip: Rate = 1.0  # largest global gradient norm; 0: no clipping
    balance_speed: Rate = 1e-3  # with experts: how far a step moves the biases that the router chooses by
    balance_loss: Rate = 1e-4  # with experts: weight of the balancing loss in the gradients


@dataclass(frozen=True)
class ParallelOptions:
    """The way ranks share the work. An axis of None takes the ranks that the others leave, if the strategy uses it."""

    strategy: Strategy = "ddp"  # what the ranks that no axis below claims are used for
    replicate: Positive | None = None  # ranks that hold replicas
    shard: Positive | None = None  # ranks that share parameters, gradients and optimizer (fsdp)
    tensor: Positive | None = None  # ranks that share each layer
    pipeline: Positive | None = None  # ranks that share the depth
    context: Positive = 1  # ranks that share each sequence, and hold replicas or shards
    expert: Positive = 1  # of the data ranks, neighbours that hold different experts of each layer
    sharding: Literal["full", "grad_op", "hybrid", "none"] = "full"  # fsdp: what is sharded, and for how long
    wrapping: str = "block"  # fsdp units: block, block_and_size, block_group:M (blocks), size:N (parameters)
    # ddp: DDP's buckets, or one flat vector (auto: that on CPUs)
    all_reduce: Literal["auto", "buckets", "flat"] = "auto"
    # data ranks sum gradients in the weights' own precision, or in bf16: half the bytes, for slow links between nodes
    reduce_dtype: Literal["own", "bf16"] = "own"
    offload: bool = False  # fsdp: parameters, gradients and optimizer rest in the CPU's memory
    # keep less of the forward and compute it again in the backward
    activation_checkpointing: Literal["none", "block", "selective"] = "none"
    sequence_parallel: bool = False  # tp: norms and dropout work on a share of the positions
    loss_parallel: bool = False  # tp: the logits stay split over the vocabulary
    schedule: Schedule = "1F1B"  # pp: in which order a rank goes through its micro-batches
    stages_per_rank: Positive | None = None  # pp: none: what the schedule needs, 1 or 2
    zero_stage: Literal[1, 2, 3] = 3  # deepspeed: shards the optimizer, and gradients, and parameters


@dataclass(frozen=True)
class CheckpointOptions:
    """The checkpoints' folder and schedule. A run resumes from the folder it saves to."""

    folder: str | None = None  # none: in the run's own new folder; name one to resume from it later
    every: Count = 0  # steps between checkpoints; 0: only at the end and on a signal
    at_end: bool = True  # write one when all steps are done, too; a run that only measures speed needs none
    keep: Positive = 2  # number of last checkpoints to keep, besides the best
    resume: Literal["auto", "never", "must"] = "auto"  # auto: from the folder's newest, if it has one
    asynchronous: bool = False  # write while training goes on


@dataclass(frozen=True)
class LogOptions:
    """The output: lines, evaluations, samples and files."""

    every: Positive = 10  # steps per line
    eval_every: Count = 100  # steps between evaluations; 0: only at the end
    eval_batches: Positive = 8  # validation batches (of the global batch's size) per evaluation
    sample: Count = 200  # tokens generated at each evaluation; 0: none
    prompt: str = "\n"  # what the sample goes on from, in the corpus's characters
    plots: bool = True  # curves at the end, in the terminal and as PNG
    progress: bool = True  # a bar, where the output is a terminal
    tensorboard: bool = False  # write for TensorBoard too
    wandb: str | None = None  # a project's name; works without network too (offline)
    profile: bool = False  # torch.profiler's trace of each rank


@dataclass(frozen=True)
class Options:
    """All options of a run."""

    # sizes under a name: nano, shakespeare, shakespeare-moe, shakespeare-85m, gpt2, gpt2-medium, gpt2-large, gpt2-xl,
    # gpt-1b, gpt-7b, llama-nano, smollm2-135m, llama3.2-1b, llama3-8b, olmo-1b, olmo-7b
    preset: str = "nano"
    # a model to go on from: a folder as transformers writes it, which has the sizes; none: a new one
    source: Annotated[Path | None, arg(name="from")] = None
    config: Path | None = None  # a TOML file
    dry_run: bool = False  # print what would run, and end
    ranks: Positive | None = None  # with --dry-run: as if on this number of ranks
    gpu_gib: float | None = None  # with --dry-run: does it fit into so much per rank? none: into what is here
    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    log: LogOptions = field(default_factory=LogOptions)


def read_options(argv: Sequence[str], prog: str = "train.py", description: str | None = None) -> Options:
    """The `Options` of a command line. Raise Refused; `--help` ends the program."""
    from manyhands.config.command_line import named_value, parsed  # late: plan.py needs none

    preset, config = named_value(argv, "--preset"), named_value(argv, "--config")
    if config == "":
        raise OptionError(f"config {UNSET}; name a file, or leave it out")
    if config is None:
        options = from_preset(preset)
    else:
        options = from_file(config, None if preset is None else from_preset(preset))
    source = named_value(argv, "--from")
    if source is not None:
        options = from_model(source, options, config is None, named_value(argv, "--checkpoint.folder"))
    about = f"{description or ''}\nWhat the ranks share under each --parallel.strategy:\n\n{strategies_help()}"
    options = parsed(Options, argv, prog, about, options)
    if source is not None:
        options = dataclasses.replace(options, optimizer=short_warmup(options))
    validate(options)
    for group in ("data", "checkpoint"):  # ~ as a shell reads it, which does not look behind "--data.folder="
        own = getattr(options, group)
        if own.folder is not None:
            own = dataclasses.replace(own, folder=str(_named(own.folder, f"{group}.folder")))
            options = dataclasses.replace(options, **{group: own})
    return options


def from_preset(name: str | None) -> Options:
    """The options of a preset (none: nano). Raise OptionError for an unknown one."""
    name = "nano" if name is None else name
    if not isinstance(name, str) or name not in PRESETS:
        raise OptionError(f"preset {name!r} is unknown; use one of {', '.join(PRESETS)}")
    return merged(Options(preset=name), PRESETS[name], f"preset {name}")


def from_file(path: str | Path, options: Options | None = None) -> Options:
    """A TOML file over `options` (none: over the preset that it names, or nano). Raise OptionError."""
    file = _named(path, "config")
    if file.suffix != ".toml":
        raise OptionError(f"{file} does not end in .toml; write the options in TOML")
    with explained(OptionError, "mend it, or name another file", file):
        content = tomllib.loads(file.read_text("utf-8-sig"))  # editors of Windows put a mark in front
    if "config" in content:
        raise OptionError(f"{file}: config={content['config']} is not read from a file; name one file as --config")
    preset = content.pop("preset", None)
    return merged(from_preset(preset) if options is None else options, content, path)


def from_model(source: str | Path, options: Options, tender: bool = True, checkpoints: str | None = None) -> Options:
    """Return `options` with the sizes of a folder's model; those of the newest checkpoint, where a run goes on from it.

    `tender`: with a learning rate that does not destroy a trained model. Raise Refused.
    """
    manifests = sorted(Path(checkpoints or "", "").glob("step-*[0-9]/manifest.json")) if checkpoints else []
    if manifests:
        with explained(OptionError, "name another checkpoint.folder", manifests[-1]):
            sizes = json.loads(manifests[-1].read_text("utf-8")).get("metadata", {}).get("config", {})
        sizes = {f.name: sizes[f.name] for f in dataclasses.fields(ModelOptions) if f.name in sizes}
    else:
        sizes = sizes_in(source)
        sizes["block_size"] = min(sizes["block_size"], LONGEST)
    options = dataclasses.replace(options, model=ModelOptions(**sizes))
    # experts of transformers have no biases to choose by
    gentle = {"lr": 2e-5} | ({"balance_speed": 0.0} if options.model.experts > 1 else {})
    return merged(options, {"optimizer": gentle}, "--from") if tender else options


def short_warmup(options: Any) -> OptimizerOptions:
    """Return the optimizer's options of a run that begins from a trained model: a warm-up of 3 %, if none is named."""
    steps, optimizer = options.train.steps, options.optimizer
    return dataclasses.replace(optimizer, warmup=steps * 3 // 100) if optimizer.warmup is None else optimizer


def _named(path, option):
    try:
        return named(path)
    except ValueError as error:
        raise OptionError(f"{option}: {error}") from None


def merged(options: Any, values: Mapping[str, Any], source: object) -> Any:
    """`options` with the nested dict `values` over it, types checked. Raise OptionError naming the source."""
    known = {f.name: f.type for f in dataclasses.fields(options)}
    hints, changes = typing.get_type_hints(type(options)), {}
    for name, value in values.items():
        key = str(name).replace("-", "_")
        if key not in known:
            raise OptionError(f"{source}: {name!r} is not an option; use one of {', '.join(known)}")
        if dataclasses.is_dataclass(getattr(options, key)):
            if not isinstance(value, dict):
                raise OptionError(f"{source}: {name} is a group; write its options below it")
            value = merged(getattr(options, key), value, f"{source}: {name}")
        else:
            value = _typed(value, hints[key], f"{source}: {name}")
        changes[key] = value
    return dataclasses.replace(options, **changes)


def _typed(value: Any, kind: Any, source: str) -> Any:
    allowed = typing.get_args(kind) or (kind,)
    if typing.get_origin(kind) is Literal:
        if any(value == one and type(value) is type(one) for one in allowed):
            return value
        raise OptionError(f"{source}={value!r}; use one of {', '.join(map(str, allowed))}")
    if float in allowed and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if Path in allowed and isinstance(value, str):
        return Path(value)
    if type(value) in allowed:
        return value
    names = " or ".join(f"a{'n' * (one is int)} {one.__name__}" for one in allowed if one is not type(None))
    raise OptionError(f"{source}={value!r} is not {names}")


def validate(options: Options) -> None:
    """Refuse values that make no sense on any number of ranks. Raise OptionError."""
    if fault := next(_faults(options), None):
        raise OptionError(fault)
    try:
        GPTConfig(**{**dataclasses.asdict(options.model), "vocab_size": options.model.vocab_size or 1})
    except ValueError as error:
        raise OptionError(f"model.{error}") from None


def _faults(options):
    """A sentence for each value that makes no sense beside the others."""
    train, optimizer, log = options.train, options.optimizer, options.log
    for name in ("data.folder", "checkpoint.folder", "log.wandb"):
        text = attrgetter(name)(options)
        if text is not None and not text.strip():
            yield f"{name} {UNSET}; name one, or leave it out"
    if (shrink := optimizer.lr * optimizer.weight_decay) > 1:
        why = f"optimizer.weight_decay={optimizer.weight_decay:g} times optimizer.lr={optimizer.lr:g} is {shrink:g}"
        yield f"{why}: each step would take more from a weight than it has; use a smaller weight_decay"
    if optimizer.min_lr is not None and optimizer.min_lr > optimizer.lr:
        why = f"optimizer.min_lr={optimizer.min_lr:g}, for the end of the run"
        yield f"{why}, is more than optimizer.lr={optimizer.lr:g}, its peak; use less, or leave it out"
    if optimizer.warmup is not None and optimizer.warmup >= train.steps:
        why = f"optimizer.warmup={optimizer.warmup} steps do not end before the run does, after {train.steps}"
        yield f"{why}: the learning rate would never reach its peak; use less than {train.steps}, or leave it out"
    if log.sample and not log.prompt:
        yield "log.prompt is empty; name at least one character to go on from, or use log.sample=0"
    if options.ranks is not None and not options.dry_run:
        yield f"ranks={options.ranks} is for --dry-run; the launcher decides how many ranks train"
    if options.gpu_gib is not None and not (options.dry_run and 0 < options.gpu_gib < math.inf):
        yield f"gpu_gib={options.gpu_gib:g} is for --dry-run, and a size: use more than 0 GiB"


def model_config(options: Options, vocab_size: int, separator: int | None = None) -> "GPTConfig":
    """The GPTConfig of a run on a corpus with `vocab_size` different tokens. Raise OptionError if it does not fit.

    `separator`: the token that begins each of its documents, if it has several.
    """
    wanted = options.model.vocab_size
    if wanted is not None and wanted < vocab_size:
        why = f"model.vocab_size={wanted} is less than the corpus's {vocab_size} tokens"
        raise OptionError(f"{why}; use {vocab_size} or leave it out")
    sizes = {**dataclasses.asdict(options.model), "vocab_size": wanted or vocab_size}
    return GPTConfig(**sizes, separator=separator if options.data.mask_documents else None)


def to_dict(options: Any) -> dict[str, Any]:
    """Plain values, as JSON holds them: what `merged` reads back."""
    values = dataclasses.asdict(options)
    return values | {name: str(value) for name, value in values.items() if isinstance(value, Path)}
