"""Runs that others have published (published_runs.toml), predicted: what the planner is held against.

    python scripts/plan.py --published               # the table below with residuals
    fit()                                            # (share of the peak, passes over memory), from FITTED_ON alone

Each run names its source, what was checked and how, and what is assumed because the source leaves it open. TFLOP/s are
per GPU, counted as the source counts them: with the operations that recomputation repeats ("hardware") or without
("model").
"""

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from manyhands.config.layout import Layout, resolve_layout
from manyhands.config.options import Options, read_options
from manyhands.predict.layouts import SHARINGS, Candidate, Question, options_of
from manyhands.predict.machines import MACHINES, Machine
from manyhands.predict.models import PlannedModel, preset_model
from manyhands.predict.planner import Plan, plan
from manyhands.predict.program import MEGATRON, Program, Sharing
from manyhands.predict.step_time import Assumptions, Work, planned_work, step_time


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
    sharing: Sharing = "replicas"
    micro_batch: int = 1
    stages_per_rank: int = 1
    schedule: Literal["1F1B", "InterleavedZeroBubble"] = "1F1B"
    checkpointing: Literal["block", "selective", "none"] = "block"
    data_outside: bool = False
    features: dict[str, Any] = {}  # of its Program, that MEGATRON has otherwise
    fp8: bool = False

    @cached_property
    def model(self) -> PlannedModel:
        """The model that was trained."""
        if self.preset:
            model = preset_model(self.preset)
            return replace(model, block_size=self.positions, max_positions=None) if self.positions else model
        sizes = (self.vocab_size, self.positions or 2048, self.n_layer, self.n_head, self.n_embd)
        return PlannedModel(*sizes, name=self.name, tie=True, qkv_bias=True)

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
    def program(self) -> Program:
        """The program that trained it."""
        return replace(MEGATRON, **{"fp8": self.fp8} | self.features)

    @cached_property
    def question(self) -> Question:
        """The question that its layout answers."""
        return Question(self.model, self.machine, self.gpus, self.global_batch, program=self.program)

    @cached_property
    def candidate(self) -> Candidate:
        """Its layout, with the options that describe it."""
        how, stages = SHARINGS[self.sharing], self.stages_per_rank
        group = self.gpus // self.tensor // self.pipeline  # data ranks, times context
        within = MACHINES[self.on].gpus_per_node // self.tensor if how.hybrid else group
        shard = within if how.strategy == "fsdp" else 1
        layout = Layout(
            self.pipeline, group // shard, shard, self.tensor, 1, stages, self.context,
            max(1, self.expert // self.tensor),
        )  # fmt: skip
        layout = replace(layout, micro_batches=self.global_batch // layout.data // self.micro_batch)
        schedule = "Interleaved1F1B" if self.schedule == "1F1B" and stages > 1 else self.schedule
        options = options_of(self.question, how, layout, self.micro_batch, schedule, stages, self.checkpointing)
        return Candidate(self.sharing, layout, options, replace(self.program, data_outside=self.data_outside))

    @property
    def published(self) -> float:
        """TFLOP/s per GPU."""
        flops = self.model.flops_per_token()
        if self.tokens_per_s:
            return flops * self.tokens_per_s / 1e12
        return self.tflops or flops * self.global_batch * self.model.block_size / self.seconds / self.gpus / 1e12


class RecordedRun(BaseModel):
    """A run of train.py that we measured, with its commit and its switches."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    what: str  # as the record calls it
    on: str
    commit: str
    flags: str
    switches: str
    mfu: float
    unplanned: str  # what of it no formula knows; "": nothing

    @cached_property
    def options(self) -> Options:
        """Its options."""
        return read_options(f"{self.switches} {self.flags * ('compile' not in self.switches)}".split())

    @cached_property
    def model(self) -> PlannedModel:
        """The model that was trained."""
        return preset_model(self.options.preset)

    def predicted(self, assumed: Assumptions | None = None) -> float:
        """Return the MFU that the planner predicts."""
        layout, machine = resolve_layout(self.options, self.model, 1), MACHINES[self.on]
        seconds = step_time(planned_work(self.model, layout, self.options), machine, assumed).total_s
        tokens = self.options.train.global_batch * self.model.block_size
        return self.model.flops_per_token() * tokens / seconds / machine.peak_flops


def _runs() -> Iterator[PublishedRun]:
    content = tomllib.loads(Path(__file__).with_name("published_runs.toml").read_text("utf-8"))
    for table in content["table"]:
        columns, rows, check = (table.pop(key, []) for key in ("columns", "rows", "check"))
        for row in rows:
            values = table | dict(zip(columns, row, strict=True))
            values |= {"exception": content["exceptions"].get(values["name"], "")}
            yield PublishedRun(**values | {"check": {name: values.pop(name) for name in check}})


def _recorded() -> Iterator[RecordedRun]:
    content = tomllib.loads(Path(__file__).with_name("published_runs.toml").read_text("utf-8"))
    for table in content["recorded"]:
        columns, rows = table.pop("columns"), table.pop("rows")
        yield from (RecordedRun(**table, **dict(zip(columns, row, strict=True))) for row in rows)


RUNS = tuple(_runs())
RECORDED = tuple(_recorded())
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
    one = run.candidate
    return planned_work(run.model, one.layout, one.options, one.program)


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


def fit_recorded(runs: Sequence[RecordedRun] = RECORDED) -> Assumptions:
    """The Assumptions whose rate of torch's attention predicts one of the `runs` as much too fast as another too slow.

    It is the one constant that our own runs decide; those of which something is unplanned decide nothing.
    """
    low, high, planned = 0.1, 1.0, [run for run in runs if not run.unplanned]
    for _ in range(30):
        share = (low + high) / 2
        errors = [run.predicted(Assumptions(torch_attention_share=share)) / run.mfu - 1 for run in planned]
        low, high = (low, share) if max(errors) > -min(errors) else (share, high)
    return Assumptions(torch_attention_share=share)


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
    answer = plan(run.question)
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
    return "\n".join([*lines, "", *_recorded_rows()])


def _recorded_rows():
    """The rows of our own runs of train.py: MFU, and what remains of it."""
    yield (
        "Our own runs of train.py on one H200, which decide the rate of torch's attention"
        f" ({Assumptions().torch_attention_share:.0%} of the best product); MFU:"
    )
    yield f"{'run':36}{'commit':>9}{'measured':>11}{'predicted':>11}{'residual':>10}"
    for run in RECORDED:
        predicted = run.predicted()
        yield f"{run.what:36}{run.commit:>9}{run.mfu:11.1%}{predicted:11.1%}{predicted / run.mfu - 1:+10.1%}"
        if run.unplanned:
            yield f"    not planned: {run.unplanned}"


def _published_row(run):
    made, fitted = choice(run), " (fitted)" * (run.name in FITTED_ON)
    values = f"{run.published:11.1f}{predicted_tflops(run):11.1f}{residual(run):+10.1%}"
    yield f"{run.name:36}{run.gpus:7,}{values}{made.place:6}/{made.of:<3}{made.slower:7.2f}  {made.first.name}{fitted}"
    if run.exception:
        yield f"    {run.exception}"
