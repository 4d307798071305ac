"""Define the options of an alignment run: the trainer's groups and four more.

    wanted = read_options(["grpo", "--from", "outputs/sft", "--grpo.reward", "in_order", "--train.steps", "40"])
    options = trainer_options(wanted, config)          # what the trainer's code understands

The model's sizes come from the checkpoint. Each method has defaults of its own, for a model of lesson size.
"""

import dataclasses
import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from pydantic import Field

from manyhands.align.chat import LetterTask
from manyhands.config import options as trainer
from manyhands.config.bounds import Rate, Share
from manyhands.config.command_line import named_value, parsed
from manyhands.config.options import UNSET, OptionError, from_file, short_warmup, validate
from manyhands.config.strategies import STRATEGIES

MOST = 10**6  # words, questions, answers: more take days to draw
Drawn = Annotated[int, Field(ge=1, le=MOST)]
Scale = Annotated[float, Field(ge=1e-6, lt=1e6)]  # outside of it numbers leave their range


@dataclass(frozen=True)
class DataOptions:
    """The task with a verifier, and lines of the corpus's speakers: see `manyhands.align.chat`."""

    # sft: conversations in place of the task, a line of JSON each: {"messages": [{"role": ..., "content": ...}, ...]}
    file: str | None = None
    task: Literal["sort", "reverse"] = "sort"  # what to do with the letters of a word
    letters: int = 12  # how many letters of the alphabet the words are made of
    length: int = 4  # different letters per word
    held_out: Drawn = 256  # words on which accuracy is measured; no stage learns from such words
    demos: Drawn = 96  # sft: words with their answers
    speeches: Share = 0.2  # sft: share of each batch that is speeches from the corpus


@dataclass(frozen=True)
class DpoOptions:
    """Pairs: the right answer, and a wrong one that the reference has given."""

    # what a nat of margin is worth: the smaller, the further the policy moves from the reference
    beta: Scale = 1.0
    # asked of the reference before the first step; each wrong answer makes a pair
    questions: Annotated[int, Field(ge=10, le=MOST)] = 2048


@dataclass(frozen=True)
class GrpoOptions:
    """Answers drawn from the policy, and judged."""

    group: Annotated[int, Field(ge=2, le=MOST)] = 8  # answers to each question; train.global_batch counts answers
    kl: Rate = 0.01  # weight of the divergence from the reference; 0: no reference is held
    clip: Rate = 0.2  # how far the ratio may leave 1; with one update per draw, as here, it is 1
    temperature: Scale = 1.0  # at which answers are drawn
    scale: bool = True  # divide advantages by the group's standard deviation
    reward: Literal["right", "in_order"] = "right"  # in_order: one that can be had without solving the task


@dataclass(frozen=True)
class LoraOptions:
    """Thin matrices learn beside frozen ones: see `manyhands.gpt.lora`."""

    rank: Annotated[int, Field(ge=0, le=MOST)] = 0  # 0: all weights learn
    alpha: Scale = 8.0  # the adapters' output is multiplied by alpha / rank


@dataclass(frozen=True)
class AlignOptions:
    """All options of an alignment run."""

    # sft: imitate demonstrations; dpo: prefer one answer to another; grpo: answers that a program judges
    method: tyro.conf.Positional[Literal["sft", "dpo", "grpo"]]
    # where the model comes from: a folder of checkpoints, a run's, one step's, a .safetensors file, or a folder as
    # transformers writes it, with a chat template
    source: Annotated[Path, tyro.conf.arg(name="from")]
    step: str = "best"  # which checkpoint of --from: best (validation loss), newest, or a number
    config: Path | None = None  # a TOML file of options
    dry_run: bool = False  # say what it would take, and end
    ranks: trainer.Positive | None = None  # with --dry-run: as if on this number of ranks
    gpu_gib: float | None = None  # with --dry-run: does it fit into so much per rank? none: into what is here
    data: DataOptions = field(default_factory=DataOptions)
    dpo: DpoOptions = field(default_factory=DpoOptions)
    grpo: GrpoOptions = field(default_factory=GrpoOptions)
    lora: LoraOptions = field(default_factory=LoraOptions)
    train: trainer.TrainOptions = field(default_factory=trainer.TrainOptions)
    optimizer: trainer.OptimizerOptions = field(default_factory=trainer.OptimizerOptions)
    parallel: trainer.ParallelOptions = field(default_factory=trainer.ParallelOptions)
    checkpoint: trainer.CheckpointOptions = field(default_factory=trainer.CheckpointOptions)
    log: trainer.LogOptions = field(default_factory=trainer.LogOptions)

    @property
    def letter_task(self):
        return LetterTask(self.data.task, self.data.letters, self.data.length)


# steps, global batch (sft: examples, dpo: pairs, grpo: answers), learning rate
DEFAULTS = {"sft": (100, 40, 3e-3), "dpo": (40, 64, 3e-4), "grpo": (60, 256, 2e-3)}


def default_options(method, source=Path("outputs/train/latest"), large=False):
    """Return a method's default options. `large`: of a model from elsewhere, which a lesson's rate would destroy."""
    steps, global_batch, lr = DEFAULTS[method]
    return AlignOptions(
        method=method,
        source=Path(source),
        train=trainer.TrainOptions(steps=steps, global_batch=global_batch, micro_batch=1 if large else None),
        optimizer=trainer.OptimizerOptions(
            lr=(2e-5 if method == "sft" else 2e-6) if large else lr,
            weight_decay=0.1 if method == "sft" else 0.0,
            balance_speed=0.0 if large else 1e-3,  # experts of transformers have no biases to choose by
        ),
        log=trainer.LogOptions(eval_every=20, sample=40 if large else 200),
    )


def from_elsewhere(*places):
    """Return whether one of `places` is a folder as transformers writes it, or of checkpoints that began from one."""
    for place in map(Path, filter(None, places)):
        if (place / "config.json").is_file():
            return True
        for manifest in (
            m for steps in ("", "step-*/", "checkpoints/step-*/") for m in place.glob(f"{steps}manifest.json")
        ):
            with suppress(OSError, ValueError, AttributeError):  # a broken one is refused where it is read
                if json.loads(manifest.read_bytes())["metadata"].get("base"):
                    return True
    return False


def read_options(argv, prog="align.py", description=None):
    """Return the `AlignOptions` of a command line. Raise Refused; `--help` ends the program."""
    method = next((word for word in argv if word in DEFAULTS), "sft")
    large = from_elsewhere(named_value(argv, "--from"), named_value(argv, "--checkpoint.folder"))
    options = dataclasses.replace(default_options(method, large=large), source=tyro.MISSING, method=tyro.MISSING)
    if (file := named_value(argv, "--config")) is not None:
        options = from_file(file, options)
    wanted = parsed(AlignOptions, argv, prog, description, options)
    if large:
        wanted = dataclasses.replace(wanted, optimizer=short_warmup(wanted))
    refuse_senseless(wanted)
    return wanted


def refuse_senseless(wanted):
    """Raise OptionError for invalid values, or options of pre-training."""
    grpo, parallel = wanted.grpo, wanted.parallel
    partial = [name for name, one in STRATEGIES.items() if not one.whole_logits]
    whole = ", ".join(name for name in STRATEGIES if name not in partial)
    faults = [
        (f"data.file={wanted.data.file} holds answers to imitate, for sft; {wanted.method} asks the task: leave it out",
         wanted.data.file is not None and wanted.method != "sft"),
        (f"data.file {UNSET}; name one, or leave it out", wanted.data.file == ""),
        (f"train.global_batch={wanted.train.global_batch} answers are no groups of grpo.group={grpo.group}; use a"
         " multiple of it", wanted.method == "grpo" and wanted.train.global_batch % grpo.group),
        (f"alignment needs whole logits on a rank: not {', '.join(partial)} or parallel.loss_parallel; use {whole}",
         parallel.strategy in partial or (parallel.pipeline or 1) > 1 or parallel.loss_parallel),
        (f"parallel.context={parallel.context}: alignment needs whole sequences on a rank; leave it out",
         parallel.context > 1),
        (f"parallel.expert={parallel.expert}: alignment keeps all experts on each rank; leave it out",
         parallel.expert > 1),
        (f"lora.rank={wanted.lora.rank}: adapters are not split over tensor ranks here; use ddp, zero1 or fsdp",
         wanted.lora.rank and (parallel.strategy == "tp" or (parallel.tensor or 1) > 1)),
        *((f"log.{name} is train.py's; accuracy is measured on data.held_out words: leave it out",
           getattr(wanted.log, name) != getattr(trainer.LogOptions(), name)) for name in ("prompt", "eval_batches")),
    ]  # fmt: skip
    for sentence, wrong in faults:
        if wrong:
            raise OptionError(sentence)
    try:
        wanted.letter_task  # noqa: B018 - it refuses what makes no task
    except ValueError as error:
        raise OptionError(f"data: {error}") from None


def trainer_options(wanted, config):
    """The trainer's options of an alignment run of a GPTConfig. Raise OptionError as the trainer does."""
    sizes = {f.name: getattr(config, f.name) for f in dataclasses.fields(trainer.ModelOptions)}
    groups = {name: getattr(wanted, name) for name in ("train", "optimizer", "parallel", "checkpoint", "log")}
    about = f"align {wanted.method}"
    call = {name: getattr(wanted, name) for name in ("dry_run", "ranks", "gpu_gib")}
    options = trainer.Options(about, config=wanted.config, model=trainer.ModelOptions(**sizes), **call, **groups)
    validate(options)
    return options
