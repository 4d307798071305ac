"""Runs that others have published (published_runs.toml), predicted: what the planner is held against.

    python scripts/plan.py --published               # the table below with residuals
    fit()                                            # (share of the peak, passes over memory), from FITTED_ON alone

Each run names its source, what was checked and how, and what is assumed because the source leaves it open. TFLOP/s are
per GPU, counted as the source counts them: with the operations that recomputation repeats ("hardware") or without
("model").
"""

import tomllib
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Literal

from pydantic import BaseModel, ConfigDict

from manyhands.predict.machines import MACHINES, Machine
from manyhands.predict.models import PlannedModel, preset_model
from manyhands.predict.step_time import MATMUL_SHARE, MEMORY_PASSES, Assumptions, Work, step_time
from manyhands.predict.traffic import Message


class PublishedRun(BaseModel):
    """A row of published_runs.toml: model, machine, layout, and the TFLOP/s per GPU that were published."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    source: str
    counts: Literal["hardware", "model"]
    checked: str
    assumed: str
    gpus: int
    tensor: int
    pipeline: int
    global_batch: int
    tflops: float | None = None  # per GPU; none: `seconds` of an iteration say it
    seconds: float | None = None
    check: dict[str, float]  # what the table says of the row in another way
    preset: str | None = None  # or a GPT of these sizes, with 2,048 positions
    n_layer: int = 0
    n_head: int = 0
    n_embd: int = 0
    vocab_size: int = 51200
    on: str = "a100-80"
    between_bytes_per_s: float | None = None  # none: as the machine has it
    micro_batch: int = 1
    stages_per_rank: int = 1
    checkpointing: Literal["block", "attention", "none"] = "block"  # attention: its core alone
    sequence_parallel: bool = False
    flash: bool = False  # attention's scores are never kept
    sharing: Literal["replicas", "zero1", "zero2"] = "replicas"
    overlap: bool = False
    scattered: bool = True  # tensor ranks share what a stage sends

    @cached_property
    def model(self) -> PlannedModel:
        """The model that was trained."""
        if self.preset:
            return preset_model(self.preset)
        sizes = (self.vocab_size, 2048, self.n_layer, self.n_head, self.n_embd)
        return PlannedModel(self.name, *sizes, tie=True, qkv_bias=True)

    @property
    def machine(self) -> Machine:
        """What it was trained on."""
        there = MACHINES[self.on]
        return replace(there, between_bytes_per_s=self.between_bytes_per_s or there.between_bytes_per_s)

    @property
    def published(self) -> float:
        """TFLOP/s per GPU."""
        flops = self.model.flops_per_token() * self.global_batch * self.model.block_size
        return self.tflops or flops / self.seconds / self.gpus / 1e12


def _runs() -> Iterator[PublishedRun]:
    for table in tomllib.loads(Path(__file__).with_name("published_runs.toml").read_text("utf-8"))["table"]:
        columns, rows, check = (table.pop(key, []) for key in ("columns", "rows", "check"))
        for row in rows:
            values = table | dict(zip(columns, row, strict=True))
            yield PublishedRun(**values | {"check": {name: values.pop(name) for name in check}})


RUNS = tuple(_runs())
NARAYANAN = RUNS[0].source
FITTED_ON = ("GPT 1.7B", "GPT 1008.0B")  # the ends of the first table: the most memory-bound run, and the least


def published_work(run: PublishedRun) -> Work:
    """The `Work` of a published run. Bytes of activations by Korthikanti et al. 2022, sections 4.1 to 4.3."""
    model, b = run.model, run.micro_batch
    tokens, D, t = b * model.block_size, model.n_embd, run.tensor
    data = run.gpus // (t * run.pipeline)
    layers = model.n_layer / run.pipeline
    scores = 0 if run.flash else 5 * model.n_head * model.block_size
    whole = (10 / t if run.sequence_parallel else 10) * D  # norms, dropouts and the inputs of linears
    mlp = 4 * model.n_hidden if model.style == "llama" else 4 * D
    # 24 of a gpt: 8 in attention, 16 in the MLP; of a Llama twice the numbers that `activation_memory` counts
    shared = (24 * D if model.style == "gpt" else 2 * (2 * D + 2 * model.kv_width + mlp)) + scores
    a_layer = tokens * (whole + shared / t)
    flops = layers * tokens * model.layer_flops() / t
    parameters = model.num_params() / (t * run.pipeline)
    again = {
        "none": (0.0, 0.0),
        "attention": (layers * tokens * model.attention_flops() / t, layers * tokens * scores / t),
        "block": (flops, layers * a_layer),
    }[run.checkpointing]
    return Work(
        micro_batches=run.global_batch // data // b,
        layers=int(layers),
        layers_flops=flops,
        head_flops=tokens * model.head_flops() / t,
        again_flops=again[0],
        layers_bytes=layers * a_layer,
        again_bytes=again[1],
        around_bytes=4 * tokens * (D + model.vocab_size) / t,
        owned=parameters / (1 if run.sharing == "replicas" else data),
        messages=tuple(message for message in _published_messages(run, data, parameters) if message.ranks > 1),
        units=int(layers) + 1,
        bubble=(run.pipeline - 1) / run.stages_per_rank,
    )


def _published_messages(run, data, parameters):
    """Of Megatron-LM and its like: 16-bit activations, weights and gradients."""
    model, t, m = run.model, run.tensor, run.global_batch // data // run.micro_batch
    layers = model.n_layer / run.pipeline  # on average
    stream = run.micro_batch * model.block_size * model.n_embd * 2
    calls, units = m * int(layers * (6 if run.checkpointing == "block" else 4)), int(layers) + 1
    yield Message("tensor", "all_reduce", calls, calls * stream, t, 1)
    calls, shared = m * 2 * run.stages_per_rank, t if run.sequence_parallel or run.scattered else 1
    yield Message("pipeline", "send", calls, calls * stream / shared, run.pipeline, t * data)
    gradients = "last backward" if run.overlap else ""
    if run.sharing == "zero2":
        behind = "first forward" if run.overlap else ""
        yield Message("data", "all_gather", units, parameters * 2, data, t, behind)
        yield Message("data", "reduce_scatter", units, parameters * 2, data, t, gradients)
        return
    yield Message("data", "all_reduce", units, parameters * 2, data, t, gradients)
    if run.sharing == "zero1":
        yield Message("data", "broadcast", units, parameters * 2, data, t)


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
    """The Assumptions under which two runs, and no others, are predicted exactly; by bisection, in turns.

    The first run decides the passes over memory, the second the share of the peak.
    """
    runs = {run.name: run for run in RUNS}
    found, (first, second) = Assumptions(), FITTED_ON
    for _ in range(40):
        for name, key, low, high in ((first, "memory_passes", 0.0, 20.0), (second, "matmul_share", 0.2, 1.0)):
            for _ in range(40):
                middle = (low + high) / 2
                # more passes are slower, a larger share is faster
                too_fast = residual(runs[name], replace(found, **{key: middle})) > 0
                up = too_fast if key == "memory_passes" else not too_fast
                low, high = (middle, high) if up else (low, middle)
            found = replace(found, **{key: (low + high) / 2})
    return found


def summary(runs: list[PublishedRun]) -> tuple[float, float]:
    """(median, largest) size of the residuals, those of the fitted runs left out."""
    sizes = [abs(residual(run)) for run in runs if run.name not in FITTED_ON]
    return median(sizes), max(sizes)


def published_text() -> str:
    """The tables of published runs: predicted, published, residual, and what each rests on."""
    head = f"{'run':28}{'GPUs':>6}{'layout':>14}{'published':>11}{'predicted':>11}{'residual':>10}"
    lines = [
        f"Two constants, fitted on {' and '.join(FITTED_ON)} alone: matrix products attain {MATMUL_SHARE:.1%} of the"
        f" peak, kept bytes pass {MEMORY_PASSES:.2f} times through memory.",
        "TFLOP/s per GPU, counted as the source counts them.",
    ]
    for source in dict.fromkeys(run.source for run in RUNS):
        runs = [run for run in RUNS if run.source == source]
        lines += ["", source, head, *(_published_row(run) for run in runs)]
        middle, worst = summary(runs)
        lines.append(f"  not fitted: median error {middle:.1%}, largest {worst:.1%}")
        lines += [f"  checked: {said}" for said in dict.fromkeys(run.checked for run in runs)]
        assumed = dict.fromkeys(run.assumed for run in runs)
        lines += [f"  assumed, as the source leaves it open: {said}" for said in assumed]
    return "\n".join(lines)


def _published_row(run):
    layout, fitted = f"t {run.tensor}, p {run.pipeline}", " (fitted)" * (run.name in FITTED_ON)
    values = f"{run.published:11.1f}{predicted_tflops(run):11.1f}{residual(run):+10.1%}{fitted}"
    return f"{run.name:28}{run.gpus:6,}{layout:>14}{values}"
