"""What an alignment run can be told: the trainer's groups of options, and four of its own.

    wanted = read_options(["grpo", "--from", "outputs/sft", "--grpo.reward", "in_order", "--train.steps", "40"])
    options = trainer_options(wanted, config)          # what the trainer's code understands

The model's sizes come from the checkpoint. Each method has defaults of its own, for a model of lesson size.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from manyhands.align.chat import LetterTask
from manyhands.config import options as trainer
from manyhands.config.command_line import named_value, parsed
from manyhands.config.options import OptionError, from_file, validate
from manyhands.config.strategies import STRATEGIES


@dataclass(frozen=True)
class DataOptions:
    """The task with a verifier, and lines of the corpus's speakers: see `manyhands.align.chat`."""

    task: Literal["sort", "reverse"] = "sort"  # what to do with the letters of a word
    letters: int = 12  # how many letters of the alphabet the words are made of
    length: int = 4  # different letters per word
    held_out: int = 256  # words on which accuracy is measured; no stage learns from such words
    demos: int = 96  # sft: words with their answers
    speeches: float = 0.2  # sft: share of each batch that is speeches from the corpus


@dataclass(frozen=True)
class DpoOptions:
    """Pairs: the right answer, and a wrong one that the reference has given."""

    # what a nat of margin is worth: the smaller, the further the policy moves from the reference
    beta: float = 1.0
    questions: int = 2048  # asked of the reference before the first step; each wrong answer makes a pair


@dataclass(frozen=True)
class GrpoOptions:
    """Answers drawn from the policy, and judged."""

    group: int = 8  # answers to each question; train.global_batch counts answers
    kl: float = 0.01  # weight of the divergence from the reference; 0: no reference is held
    clip: float = 0.2  # how far the ratio may leave 1; with one update per draw, as here, it is 1
    temperature: float = 1.0  # at which answers are drawn
    scale: bool = True  # divide advantages by the group's standard deviation
    reward: Literal["right", "in_order"] = "right"  # in_order: one that can be had without solving the task


@dataclass(frozen=True)
class LoraOptions:
    """Thin matrices learn beside frozen ones: see `manyhands.gpt.lora`."""

    rank: int = 0  # 0: all weights learn
    alpha: float = 8.0  # the adapters' output is multiplied by alpha / rank


@dataclass(frozen=True)
class AlignOptions:
    """All options of an alignment run."""

    # sft: imitate demonstrations; dpo: prefer one answer to another; grpo: answers that a program judges
    method: tyro.conf.Positional[Literal["sft", "dpo", "grpo"]]
    # where the model comes from: a folder of checkpoints, a run's, one step's, or a .safetensors file
    source: Annotated[Path, tyro.conf.arg(name="from")]
    step: str = "best"  # which checkpoint of --from: best (validation loss), newest, or a number
    config: Path | None = None  # a TOML file of options
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


MOST = 10**6  # words, questions, answers: more take days to draw
# steps, global batch (sft: examples, dpo: pairs, grpo: answers), learning rate
DEFAULTS = {"sft": (100, 40, 3e-3), "dpo": (40, 64, 3e-4), "grpo": (60, 256, 2e-3)}


def default_options(method, source=Path("outputs/train/latest")):
    """The options of a method before anything is said."""
    steps, global_batch, lr = DEFAULTS[method]
    return AlignOptions(
        method=method,
        source=Path(source),
        train=trainer.TrainOptions(steps=steps, global_batch=global_batch),
        optimizer=trainer.OptimizerOptions(lr=lr, weight_decay=0.1 if method == "sft" else 0.0),
        log=trainer.LogOptions(eval_every=20),
    )


def read_options(argv, prog="align.py", description=None):
    """The `AlignOptions` of a command line. Raises Refused; `--help` ends the program."""
    method = next((word for word in argv if word in DEFAULTS), "sft")
    options = dataclasses.replace(default_options(method), source=tyro.MISSING, method=tyro.MISSING)
    if (file := named_value(argv, "--config")) is not None:
        options = from_file(file, options)
    wanted = parsed(AlignOptions, argv, prog, description, options)
    refuse_senseless(wanted)
    return wanted


def refuse_senseless(wanted):
    """Raises OptionError for values that make no sense, or belong to pre-training."""
    data, dpo, grpo, parallel = wanted.data, wanted.dpo, wanted.grpo, wanted.parallel
    partial = [name for name, one in STRATEGIES.items() if not one.whole_logits]
    whole = ", ".join(name for name in STRATEGIES if name not in partial)
    at_least = {
        "data.demos": (data.demos, 1), "data.held_out": (data.held_out, 1), "dpo.questions": (dpo.questions, 10),
        "grpo.group": (grpo.group, 2), "grpo.kl": (grpo.kl, 0), "grpo.clip": (grpo.clip, 0),
        "lora.rank": (wanted.lora.rank, 0),
    }  # fmt: skip
    positive = {"dpo.beta": dpo.beta, "grpo.temperature": grpo.temperature, "lora.alpha": wanted.lora.alpha}
    faults = [
        *((f"{name}={value} is too small; use at least {least}", not value >= least)
          for name, (value, least) in at_least.items()),
        *((f"{name}={value:,} is too large; use at most {MOST:,}", value > MOST)
          for name, (value, _) in at_least.items()),
        *((f"{name}={value:g} makes no sense; use 1e-6 or more, and less than 1e6", not 1e-6 <= value < 1e6)
          for name, value in positive.items()),
        (f"data.speeches={data.speeches:g} is a share of a batch; use 0 or more and less than 1",
         not 0 <= data.speeches < 1),
        (f"train.global_batch={wanted.train.global_batch} answers are no groups of grpo.group={grpo.group}; use a"
         " multiple of it", wanted.method == "grpo" and wanted.train.global_batch % max(1, grpo.group)),
        (f"alignment needs whole logits on a rank: not {', '.join(partial)} or parallel.loss_parallel; use {whole}",
         parallel.strategy in partial or (parallel.pipeline or 1) > 1 or parallel.loss_parallel),
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
    """The trainer's options of an alignment run of a GPTConfig. Raises OptionError as the trainer does."""
    sizes = {f.name: getattr(config, f.name) for f in dataclasses.fields(trainer.ModelOptions)}
    groups = {name: getattr(wanted, name) for name in ("train", "optimizer", "parallel", "checkpoint", "log")}
    about = f"align {wanted.method}"
    options = trainer.Options(about, wanted.config, model=trainer.ModelOptions(**sizes), **groups)
    validate(options)
    return options
