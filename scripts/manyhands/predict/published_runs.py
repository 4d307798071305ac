"""Runs that others have published (published_runs.toml), predicted: what the planner is held against.

    python scripts/plan.py --published               # the table below with residuals
    fit()                                            # (share of the peak, passes over memory), from FITTED_ON alone

Each run names its source, what was checked and how, and what is assumed because the source leaves it open. TFLOP/s are
per GPU, counted as the source counts them: with the operations that recomputation repeats ("hardware") or without
("model").
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from pathlib import Path
from statistics import median
from typing import Literal

from pydantic import BaseModel, ConfigDict

from manyhands.predict.layouts import Question
from manyhands.predict.machines import MACHINES, Machine
from manyhands.predict.megatron import AXES, CHECKPOINTING, SHARINGS, Program, Split, work_of
from manyhands.predict.models import PlannedModel, preset_model
from manyhands.predict.planner import Plan, plan
from manyhands.predict.step_time import Assumptions, Work, step_time


class PublishedRun(BaseModel):
    """A row of published_runs.toml: model, machine, layout, and the speed that was published."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    source: str
    counts: Literal["hardware", "model"] = "model"
    checked: str
    assumed: str
    exception: str = ""  # why its layout is not among our first choices
    gpus: int
    global_batch: int  # sequences
    # the speed is one of these: TFLOP/s per GPU, seconds of an iteration, tokens per second and GPU
    tflops: float | None = None
    seconds: float | None = None
    tokens_per_s: float | None = None
    check: dict[str, float]  # what the table says of the row in another way
    # the model: a preset, or a GPT of these sizes, with other positions where `positions` says so
    preset: str | None = None
    positions: int | None = None
    n_layer: int = 0
    n_head: int = 0
    n_embd: int = 0
    vocab_size: int = 51200
    # the machine
    on: str = "a100-80"
    best_share: float | None = None  # these: none, as the machine has it
    best_fp8_flops: float | None = None
    memory_bytes: float | None = None
    memory_bytes_per_s: float | None = None
    inside_bytes_per_s: float | None = None
    between_bytes_per_s: float | None = None
    # the layout
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    sharing: Literal["replicas", "zero1", "zero2", "zero3", "hybrid"] = "replicas"
    micro_batch: int = 1
    stages_per_rank: int = 1
    schedule: Literal["1F1B", "ZeroBubble"] = "1F1B"
    checkpointing: Literal["block", "selective", "none"] = "block"
    data_outside: bool = False
    # the program
    fused: bool = True
    sequence_parallel: bool = True
    flash: bool = True
    overlap: bool = True
    scattered: bool = True
    reduce_bytes: int = 4
    fp8: bool = False
    hides_experts: bool = False
    axes: tuple[str, ...] = AXES
    sharings: tuple[str, ...] = SHARINGS
    checkpointings: tuple[str, ...] = CHECKPOINTING

    @cached_property
    def model(self) -> PlannedModel:
        """The model that was trained."""
        if self.preset:
            model = preset_model(self.preset)
            return replace(model, block_size=self.positions) if self.positions else model
        sizes = (self.vocab_size, self.positions or 2048, self.n_layer, self.n_head, self.n_embd)
        return PlannedModel(self.name, *sizes, tie=True, qkv_bias=True)

    @property
    def machine(self) -> Machine:
        """The machine it was trained on."""
        names = (
            "best_share",
            "best_fp8_flops",
            "memory_bytes",
            "memory_bytes_per_s",
            "inside_bytes_per_s",
            "between_bytes_per_s",
        )
        return replace(MACHINES[self.on], **{name: value for name in names if (value := getattr(self, name))})

    @property
    def split(self) -> Split:
        """Its layout."""
        names = ("tensor", "context", "pipeline", "expert", "sharing", "stages_per_rank", "schedule", "micro_batch",
                 "checkpointing", "data_outside")  # fmt: skip
        data = self.gpus // (self.tensor * self.context * self.pipeline)
        within = MACHINES[self.on].gpus_per_node // self.tensor if self.sharing == "hybrid" else 1
        return Split(data=data, within=within, **{name: getattr(self, name) for name in names})

    @property
    def program(self) -> Program:
        """The program that trained it."""
        return Program(**{field.name: getattr(self, field.name) for field in fields(Program)})

    @property
    def published(self) -> float:
        """TFLOP/s per GPU."""
        flops = self.model.flops_per_token()
        if self.tokens_per_s:
            return flops * self.tokens_per_s / 1e12
        return self.tflops or flops * self.global_batch * self.model.block_size / self.seconds / self.gpus / 1e12


def _runs() -> Iterator[PublishedRun]:
    content = tomllib.loads(Path(__file__).with_name("published_runs.toml").read_text("utf-8"))
    for table in content["table"]:
        columns, rows, check = (table.pop(key, []) for key in ("columns", "rows", "check"))
        for row in rows:
            values = table | dict(zip(columns, row, strict=True))
            values |= {"exception": content["exceptions"].get(values["name"], "")}
            yield PublishedRun(**values | {"check": {name: values.pop(name) for name in check}})


RUNS = tuple(_runs())
NARAYANAN = RUNS[0].source
# {run: the constant that it decides}. Of the first table the most memory-bound run and the least; a run with
# long sequences; the smallest one in eager mode. The fifth decides what one machine's products reach (`best_share`).
FITTED_ON = {
    "GPT 1.7B": "memory_passes",
    "GPT 1008.0B": "matmul_share",
    "Llama 3 8B, CP 4, 131,072, fp8": "attention_share",
    "MPT 1B, 8 GPUs": "unfused",
    "Llama 3 8B, FSDP 8": "",
}
SLOWER_IF_MORE = ("memory_passes", "unfused")


def published_work(run: PublishedRun) -> Work:
    """The `Work` of a published run."""
    return work_of(run.model, run.split, run.global_batch, run.program)


def predicted_tflops(run: PublishedRun, assumed: Assumptions | None = None) -> float:
    """TFLOP/s per GPU that the planner predicts, counted as the run's source counts."""
    model, work = run.model, published_work(run)
    flops = model.flops_per_token()
    if run.counts == "hardware":
        flops += model.n_layer * model.layer_flops()
    seconds = step_time(work, run.machine, assumed).total_s
    return flops * run.global_batch * model.block_size / seconds / run.gpus / 1e12


def residual(run: PublishedRun, assumed: Assumptions | None = None) -> float:
    """(predicted - published) / published."""
    return predicted_tflops(run, assumed) / run.published - 1


def fit() -> Assumptions:
    """The Assumptions under which four runs, and no others, are predicted exactly; by bisection, in turns."""
    runs = {run.name: run for run in RUNS}
    found = Assumptions()
    for _ in range(12):
        for name, key in FITTED_ON.items():
            low, high = (0.0, 20.0) if key in SLOWER_IF_MORE else (0.05, 1.0)
            for _ in range(40 * bool(key)):
                middle = (low + high) / 2
                too_fast = residual(runs[name], replace(found, **{key: middle})) > 0
                low, high = (middle, high) if too_fast == (key in SLOWER_IF_MORE) else (low, middle)
            found = replace(found, **{key: (low + high) / 2}) if key else found
    return found


@dataclass(frozen=True)
class Choice:
    """A published layout among those that the planner finds for the same question."""

    place: int  # 1: none is predicted to be faster
    of: int
    slower: float  # its predicted time over that of the planner's first
    first: Plan


def choice(run: PublishedRun) -> Choice:
    """Return the Choice of a run, by the search that answers any question, for the program that the run had."""
    return _choice(run.name)


@cache
def _choice(name):
    run = next(run for run in RUNS if run.name == name)
    answer = plan(Question(run.model, run.machine, run.gpus, run.global_batch, program=run.program))
    own_s = step_time(published_work(run), run.machine).total_s
    faster = sum(one.step_s < 0.999 * own_s for one in answer.ranked)
    return Choice(faster + 1, max(faster + 1, len(answer.ranked)), own_s / answer.best.step_s, answer.best)


def summary(runs: list[PublishedRun]) -> tuple[float, float]:
    """(median, largest) size of the residuals, those of the fitted runs left out."""
    sizes = [abs(residual(run)) for run in runs if run.name not in FITTED_ON]
    return median(sizes), max(sizes)


def published_text() -> str:
    """The tables of published runs: predicted, published, residual, our choice, and what each rests on."""
    head = (
        f"{'run':36}{'GPUs':>7}{'published':>11}{'predicted':>11}{'residual':>10}{'place':>9}{'slower':>8}"
        "  the planner's first"
    )
    a = Assumptions()
    lines = [
        f"Fitted on {len(FITTED_ON)} of {len(RUNS)} runs: matrix products reach {a.matmul_share:.1%} of a GPU's best"
        f" product, attention {a.attention_share:.1%}; kept bytes pass {a.memory_passes:.2f} times through memory,"
        f" {a.unfused:.2f} times as often without fused kernels.",
        "TFLOP/s per GPU, counted as the source counts them. place: of the published layout among those that the"
        " planner finds; slower: its predicted time over that of the planner's first.",
        "All that are not fitted: median error {:.1%}, largest {:.1%}.".format(*summary(list(RUNS))),
    ]
    for source in dict.fromkeys(run.source for run in RUNS):
        runs = [run for run in RUNS if run.source == source]
        lines += ["", source, head, *(line for run in runs for line in _published_row(run))]
        if any(run.name not in FITTED_ON for run in runs):
            lines.append("  not fitted: median error {:.1%}, largest {:.1%}".format(*summary(runs)))
        lines += [f"  checked: {said}" for said in dict.fromkeys(run.checked for run in runs)]
        assumed = dict.fromkeys(run.assumed for run in runs)
        lines += [f"  assumed, as the source leaves it open: {said}" for said in assumed]
    return "\n".join(lines)


def _published_row(run):
    made, fitted = choice(run), " (fitted)" * (run.name in FITTED_ON)
    values = f"{run.published:11.1f}{predicted_tflops(run):11.1f}{residual(run):+10.1%}"
    yield f"{run.name:36}{run.gpus:7,}{values}{made.place:6}/{made.of:<3}{made.slower:7.2f}  {made.first.name}{fitted}"
    if run.exception:
        yield f"    {run.exception}"
