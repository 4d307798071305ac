"""Report a training run: a legend once, then a line per interval, and the same numbers as JSON.

    report = Report(ranks, options, layout, config, corpus, folder, mean_loss)      # all ranks
    report.start()                                                          # the run's header and the legend
    report.timer.step_start() ... report.timer.mark("step")                 # around each step, its batch included
    report.step(step, loss, grad_norm, lr, busiest)                         # all ranks, every step; steps count from 1
    report.evaluation(step, val_loss); report.sample(step, text); report.note(sentence)
    report.close("300 steps done")

`step` neither synchronises nor communicates, except in an interval's last step: then it makes two collectives, the mean
loss and one all-reduce of a few numbers per rank. Only rank 0 shows and writes. A line waits for the evaluation of its
step. Numbers count the whole world: samples/s is the global batch over the time of the slowest rank. A row holds one
line's numbers: {key of KEYS: number or None}.
"""

import math
import shutil
import statistics
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist

from manyhands.launch.metrics import StepLog
from manyhands.launch.program import write
from manyhands.launch.ranks import said
from manyhands.measure.timing import peak_memory_gib
from manyhands.predict.machines import dense_peak, device_name
from manyhands.predict.models import flops_per_token
from manyhands.train.timing import StepTimer
from manyhands.train.trackers import Trackers

HEADER_EVERY = 30  # lines between headers
WORTH_S = 60.0  # a run that ends sooner needs no announcement
LOG_WIDTH = 160  # without a terminal: every column
KEYS = (
    "step", "tokens", "loss", "val_loss", "dt_s", "dt_min_s", "dt_mean_s", "slowest_rank", "dtf_s", "dtb_s",
    "samples_per_s", "samples_per_s_per_rank", "tokens_per_s", "tokens_per_s_per_rank", "mfu", "grad_norm", "lr",
    "busiest", "memory_gib", "memory_min_gib", "memory_mean_gib", "elapsed_s", "start_up_s",
)  # fmt: skip
OVER_RANKS = {  # keys that compare ranks, absent with one rank
    "dt_min_s", "dt_mean_s", "samples_per_s_per_rank", "tokens_per_s_per_rank", "memory_min_gib", "memory_mean_gib",
}  # fmt: skip
PHASES = {"dtf_s", "dtb_s"}  # absent in a pipeline, whose forwards and backwards alternate


class Report:
    """A run's report. `mean_loss(loss)` is the mean over the global batch (collective); `now`: a clock."""

    def __init__(
        self, ranks, options, layout, config, corpus, folder, mean_loss=lambda loss: loss, *, now=time.perf_counter,
        terminal=None,
    ):  # fmt: skip
        self.ranks, self.options, self.layout = ranks, options, layout
        self.config, self.corpus, self.folder = config, corpus, folder
        self.mean_loss, self.now = mean_loss, now
        self.resumed = (0, 0)  # the step at which a resumed run continues, and the tokens seen until then
        self.timer = StepTimer(ranks.device, now)
        # peak FLOP/s of one rank, the same for every precision, so that runs are comparable; fp16 for GPUs without bf16
        peaks = {kind: dense_peak(ranks.device, kind) for kind in ("bf16", "fp16")}
        self.peak_kind, self.peak = next((pair for pair in peaks.items() if pair[1]), (None, None))
        self.began, self.in_steps_s = now(), 0.0
        self.rows, self.pending, self.closed = [], None, False
        self.first, self.start_up_said = True, False  # no step reported yet
        self.shows = ranks.rank == 0
        self.log = self.trackers = None
        if self.shows:
            terminal = sys.stdout.isatty() if terminal is None else terminal
            self.bar = Bar(options.train.steps, terminal and options.log.progress)

    def start(self):
        """Show the run's header and the legend."""
        if not self.shows:
            return
        everything = all_columns(self.options, self.config, self.layout, self.ranks.device, self.peak, self.peak_kind)
        self.columns = fitting(everything, screen_width())
        about = run_header(self.options, self.config, self.layout, self.ranks.device, self.corpus, self.folder)
        self.bar.write(f"{about}\n\n{legend(everything, self.columns, screen_width())}\n")
        self.log = self._guarded(lambda: StepLog(self.ranks, self.folder / "steps.jsonl"))
        self.trackers = Trackers(self.options, self.folder, self.ranks.world_size, self.note)
        self.bar.start()

    def step(self, step, loss, grad_norm, lr, busiest=None):
        """Record that step number `step` is done. All ranks call it.

        0-dim tensors: this rank's `loss`, the global `grad_norm`, and with experts `busiest` (see `Strategy.balance`).
        """
        line = self.first or step % self.options.log.every == 0 or self._evaluated(step)
        self.first = False
        if not line:
            if self.shows:
                self.bar.advance(step)
            return
        self._flush()
        timing = self.timer.take()
        mean = self.mean_loss(loss)
        mine = (timing.step_s, timing.forward_s, timing.backward_s, peak_memory_gib(self.ranks))
        over_ranks = self._over_ranks(mine)
        if not self.shows:
            return
        self.pending = self._row(step, loss=float(mean), grad_norm=float(grad_norm), lr=float(lr))
        self.pending["busiest"] = None if busiest is None else float(busiest)
        self._add_measured(timing.steps, *over_ranks)
        self.bar.advance(step, self.pending)
        # the first line's steps warm up and may compile: estimate the run's duration from the second line
        timed = sum(row["dt_s"] is not None for row in self.rows)
        end = self._expected_end(step, self.pending["dt_s"] or 0.0) if timed == 1 else ""
        if not self._evaluated(step):
            self._flush()
        if end:
            self.bar.write(end)

    def _add_measured(self, steps, dt_n, dtf_n, dtb_n, memory_n):
        """Add the values of all ranks to the pending row."""
        row, size = self.pending, self.ranks.world_size
        row |= {
            "dtf_s": _mean(dtf_n), "dtb_s": _mean(dtb_n),
            "memory_gib": max(memory_n), "memory_min_gib": min(memory_n), "memory_mean_gib": _mean(memory_n),
        }  # fmt: skip
        if not dt_n or (dt := max(dt_n)) <= 0:
            return
        self.in_steps_s += dt * steps
        samples_per_s = self.options.train.global_batch / dt
        tokens_per_s = samples_per_s * self.config.block_size
        done = flops_per_token(self.config) * tokens_per_s / size
        row |= {
            "dt_s": dt, "dt_min_s": min(dt_n), "dt_mean_s": _mean(dt_n), "slowest_rank": dt_n.index(dt),
            "samples_per_s": samples_per_s, "samples_per_s_per_rank": samples_per_s / size,
            "tokens_per_s": tokens_per_s, "tokens_per_s_per_rank": tokens_per_s / size,
            "mfu": done / self.peak if self.peak else None,
        }  # fmt: skip

    def _expected_end(self, step, step_s):
        """Return a sentence on when the run will end, if that is worth a line."""
        left = self.options.train.steps - step
        if left * step_s < WORTH_S:
            return ""
        end = time.strftime("%a %d %b, %H:%M", time.localtime(time.time() + left * step_s))
        left_s = timedelta(minutes=round(left * step_s / 60))
        return f"{left:,} steps are left at about {format_seconds(step_s)} each: {left_s}, until {end}"

    def _evaluated(self, step):
        every = self.options.log.eval_every
        return step == self.options.train.steps or (every > 0 and step % every == 0)

    def _over_ranks(self, mine):
        """Return each number's values over all ranks, in rank order, or [] if it is None. One all-reduce."""
        table_nk = torch.zeros(self.ranks.world_size, len(mine), dtype=torch.float64)
        table_nk[self.ranks.rank] = torch.tensor([math.nan if value is None else value for value in mine])
        if dist.is_initialized():
            table_nk = table_nk.to("cpu" if "gloo" in self.ranks.backend else self.ranks.device)
            dist.all_reduce(table_nk)  # each rank adds zeros to the others' rows
        return [[v for v in values if not math.isnan(v)] for values in table_nk.t().tolist()]

    def tokens(self, step):
        """Return the tokens seen after `step` steps, including those of the run that was resumed."""
        since, before = self.resumed
        return before + (step - since) * self.options.train.global_batch * self.config.block_size

    def _row(self, step, **values):
        elapsed = self.now() - self.began
        return dict.fromkeys(KEYS) | {"step": step, "tokens": self.tokens(step), "elapsed_s": elapsed} | values

    def _flush(self):
        """Show and write the pending line, if any."""
        row, self.pending = self.pending, None
        if row is None:
            return
        if not self.start_up_said and self.timer.first_start_s:
            row["start_up_s"] = max(0.0, self.timer.first_start_s - launch_time(self.ranks.launcher))
            self.start_up_said = True
            self.bar.write(f"start-up: {row['start_up_s']:.1f} s from launch to the first step")
        if len(self.rows) % HEADER_EVERY == 0:
            self.bar.write(header_line(self.columns))
        self.rows.append(row)
        self.bar.write(" ".join(column.cell(row[column.key]) for column in self.columns))
        if self.log and not self._guarded(lambda: self.log.write(**row) or True):
            self.log = None  # shown once
        self.trackers.log(row)

    def evaluation(self, step, val_loss):
        """Report the validation loss after `step`, in that step's line or a separate one. All ranks may call it."""
        if not self.shows:
            return
        if self.pending is None or self.pending["step"] != step:
            self._flush()
            self.pending = self._row(step)
        self.pending["val_loss"] = float(val_loss)
        self._flush()

    def sample(self, step, text):
        """Show text that the model wrote, with control characters as codes."""
        if self.shows:
            self._flush()
            self.bar.write(f"sample after step {step}:\n{shown_text(text, screen_width())}")
            self.trackers.text(step, text)

    def note(self, sentence):
        """Show a sentence, on rank 0."""
        if self.shows:
            self._flush()
            self.bar.write(str(sentence))

    def close(self, reason):
        """Report how the run ended, draw its curves, end the trackers. All ranks may call it, even twice."""
        if not self.shows or self.closed:
            return
        self.closed = True
        self._flush()
        self.bar.stop()
        if self.trackers is None:
            return  # refused before it started
        self.bar.write(self._summary(reason))
        if self.options.log.plots and len(self.rows) > 1:
            self._guarded(self._draw)
        for ending in (self.log, self.trackers):
            if ending:
                self._guarded(ending.close)

    def _summary(self, reason):
        elapsed = self.now() - self.began
        lines = [
            f"{reason}: {elapsed:.1f} s, {format_share(self.in_steps_s / elapsed) if elapsed else '-'} of them in steps"
        ]
        measured = [row for row in self.rows if math.isfinite(row["val_loss"] or math.nan)]
        if measured:
            best = min(measured, key=lambda row: row["val_loss"])
            lines.append(f"  lowest val_loss {best['val_loss']:.4f} after step {best['step']}")
        if found := self.measured():
            lines.append(f"  median {format_rate(found['tokens_per_s'])} tokens/s")
        return "\n".join([*lines, f"  every number: {self.folder / 'steps.jsonl'}"])

    def measured(self):
        """Return the median tokens per second, the last MFU and the most memory after the first interval, on rank 0."""
        rows = [row for row in self.rows if row["tokens_per_s"]][1:]
        found = {name: rows[-1][name] for name in ("mfu", "memory_gib") if rows and rows[-1][name] is not None}
        return found | ({"tokens_per_s": statistics.median(row["tokens_per_s"] for row in rows)} if rows else {})

    def _draw(self):
        from manyhands.train import curves

        self.bar.write(curves.terminal(self.rows, screen_width()))
        self.bar.write(f"curves: {curves.png(self.rows, self.folder / 'curves.png')}")

    def _guarded(self, call):
        """Call a function; on failure print a note and return None, because reporting must not end the training."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001
            self.bar.write(f"report: {said(None, error)}; training continues")


class Bar:
    """A progress bar, if `active` (in a terminal). The run's lines are printed above it with `write`."""

    def __init__(self, steps, active):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.progress = Progress(
            MofNCompleteColumn(), TextColumn("steps"), BarColumn(), TextColumn("{task.fields[loss]}"),
            TextColumn("left:"), TimeRemainingColumn(), console=Console(force_terminal=active), disable=not active,
            refresh_per_second=4, transient=True, redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self.task = self.progress.add_task("", total=steps, loss="")
        self.stop = self.progress.stop

    def start(self):
        self.progress.start()
        if self.progress.live.is_started:  # rich hides the cursor, and a killed run could not restore it
            self.progress.console.show_cursor(True)

    def advance(self, step, row=None):
        """Advance to `step` steps; `row`: a line's new numbers, if any."""
        self.progress.update(self.task, completed=step, **({"loss": f"loss {row['loss']:.4f}"} if row else {}))

    def write(self, text):
        if self.progress.live.is_started:
            from rich.text import Text

            self.progress.console.print(Text.from_ansi(text), soft_wrap=True, highlight=False)
        else:
            write(f"{text}\n")


@dataclass(frozen=True)
class Column:
    """One number of a report line, always `width` characters wide.

    `key`: its name in steps.jsonl; `meaning`: its row in the legend; `drop_order`: if columns do not fit, those with
    the highest number are dropped first; 0 is never dropped.
    """

    key: str
    name: str
    width: int
    form: Callable[[float], str]
    meaning: str
    drop_order: int = 0

    def cell(self, value):
        if value is None:
            text = "-"
        elif isinstance(value, float) and not math.isfinite(value):
            text = str(value)  # nan, inf
        else:
            text = self.form(value)
        return text.rjust(self.width)


def format_seconds(value):
    """Format seconds in at most seven characters: 45.1ms, 12.35s."""
    if value < 0.9999:
        return f"{value * 1000:.1f}ms" if value >= 0.001 else f"{value * 1000:.3f}ms"
    return f"{value:.2f}s" if value < 999 else f"{value:.0f}s"


def format_gib(value):
    return f"{value:.2f}GiB" if value < 9.995 else f"{value:.1f}GiB" if value < 99.95 else f"{value:.0f}GiB"


def format_loss(value):
    digits = 4 if abs(value) < 9.99995 else 3 if abs(value) < 99.9995 else 1
    return f"{value:.{digits}f}" if abs(value) < 9999 else f"{value:.0e}"


def format_rate(value):
    for unit, size in (("", 1), ("k", 1e3), ("M", 1e6), ("G", 1e9)):
        if value < 99999.5 * size or unit == "G":
            shown = value / size
            return f"{shown:.1f}{unit}" if shown < 999.95 else f"{shown:.0f}{unit}"


def format_share(value):
    return f"{value:.1%}" if value < 0.9995 else f"{value:.0%}"


def screen_width():
    """Return characters per line, of the terminal or from COLUMNS; a log file shows all columns."""
    return shutil.get_terminal_size((LOG_WIDTH, 24)).columns


def all_columns(options, config, layout, device, peak, peak_kind="bf16"):
    """Return every column of a run, in order, with the run's numbers in the meanings.

    `peak`: FLOP/s of a rank in products of `peak_kind`, or None.
    """
    unit, batch, clip = "rank" if device.type == "cpu" else "GPU", options.train.global_batch, options.optimizer.clip
    held = "of the process" if device.type == "cpu" else "of tensors on its GPU"
    mfu = "unknown device: no vendor's dense peak is listed for it, so no share of it can be given"
    if peak:
        mfu = (
            f"{flops_per_token(config) / 1e6:,.1f} MFLOP per token x tokens/s/{unit}, as a share of"
            f" {peak / 1e12:,.1f} TFLOP/s, the dense {peak_kind} peak of {device_name(device)},"
            " whatever the precision of the run"
        )
    clipping = f"before it is clipped to {clip:g}" if clip else "(it is not clipped)"
    columns = [
        Column("step", "step", max(4, len(str(options.train.steps))), str, "optimizer steps done"),
        Column(
            "loss", "loss", 6, format_loss,
            "cross-entropy in nats per token: the mean over the global batch of this step",
        ),
        Column(
            "val_loss", "val_loss", 8, format_loss,
            "the same on text that is never trained on; - where it was not measured",
        ),
        Column(
            "dt_s", "dt", 7, format_seconds,
            "time of one step, on the slowest rank: mean of the steps since the line above",
        ),
        Column("dt_min_s", "dt_min", 7, format_seconds, "dt of the fastest rank", drop_order=5),
        Column("dt_mean_s", "dt_mean", 7, format_seconds, "dt, mean over ranks", drop_order=5),
        Column("dtf_s", "dtf", 7, format_seconds, "the part of dt in the forward pass (mean over ranks)", drop_order=2),
        Column(
            "dtb_s", "dtb", 7, format_seconds,
            "the part of dt in the backward pass; what is left is the batch, clipping and the optimizer", drop_order=2,
        ),
        Column(
            "samples_per_s", "samples/s", 9, format_rate,
            f"sequences per second of all ranks together: the global batch of {batch} / dt", drop_order=1,
        ),
        Column(
            "samples_per_s_per_rank", f"samples/s/{unit}", 10 + len(unit), format_rate,
            f"samples/s divided by the number of {unit}s", drop_order=4,
        ),
        Column("tokens_per_s", "tokens/s", 8, format_rate, f"samples/s x {config.block_size} tokens"),
        Column(
            "tokens_per_s_per_rank", f"tokens/s/{unit}", 9 + len(unit), format_rate,
            f"tokens/s divided by the number of {unit}s", drop_order=3,
        ),
        Column("mfu", "MFU", 5, format_share, f"model FLOPs utilisation: {mfu}", drop_order=1),
        Column(
            "grad_norm", "grad_norm", 9, "{:.4g}".format, f"length of the gradient of the whole model, {clipping}"
        ),
        Column("lr", "lr", 8, "{:.2e}".format, "learning rate of this step"),
        Column(
            "busiest", "busiest", 7, "{:.2f}".format,
            "tokens of the busiest expert over the mean of all experts, in the least even layer of this step",
            drop_order=3,
        ),
        Column("memory_gib", "memory", 7, format_gib, f"the most memory {held} that any rank has held so far"),
        Column("memory_min_gib", "mem_min", 7, format_gib, "memory of the rank with the least", drop_order=6),
        Column("memory_mean_gib", "mem_mean", 8, format_gib, "memory, mean over ranks", drop_order=6),
    ]  # fmt: skip
    absent = (OVER_RANKS if layout.world_size == 1 else set()) | (PHASES if layout.pipeline > 1 else set())
    absent |= {"busiest"} if config.experts == 1 else set()
    return [column for column in columns if column.key not in absent]


def fitting(columns, width):
    """Return the columns that fit into `width` characters; those with the highest `drop_order` are dropped first."""
    columns = list(columns)
    while len(header_line(columns)) > width and any(column.drop_order for column in columns):
        most = max(column.drop_order for column in columns)
        columns = [column for column in columns if column.drop_order != most]
    return columns


def header_line(columns):
    return " ".join(column.name.rjust(column.width) for column in columns)


def legend(everything, shown, width):
    """Return a row per column of `shown`, and the names of the others in `everything`."""
    wide = max(len(column.name) for column in shown)
    rows = [("column", "what it says"), *((column.name, column.meaning) for column in shown)]
    lines = [
        textwrap.fill(f" {name:<{wide}}  {says}", width, subsequent_indent=" " * (wide + 3)) for name, says in rows
    ]
    missing = ", ".join(column.name for column in everything if column not in shown)
    if missing:
        lines.append(textwrap.fill(f" {width} characters have no room for {missing}: see steps.jsonl", width))
    return "\n".join(lines)


def about_run(options, config, layout):
    """Describe the run as {name: a line}."""
    train, parallel, many = options.train, options.parallel, layout.micro_batches
    size, share, tokens = layout.world_size, train.global_batch // layout.data, train.global_batch * config.block_size
    return {
        "model": f"{config.num_params():,} parameters in {config.n_layer} layers of width {config.n_embd} with"
        f" {config.n_head} heads; a vocabulary of {config.vocab_size:,}, {config.block_size:,} positions"
        + f" of the {config.context:,} that it reads" * (config.context > config.block_size)
        + f"; a llama with {config.kv_heads} heads of keys and values" * (config.style == "llama")
        + about_experts(config),
        "ranks": f"{size} ranks, strategy {parallel.strategy}: {layout}" if size > 1 else "one rank",
        "a step": f"{train.global_batch} sequences of {config.block_size:,} = {tokens:,} tokens; a rank's share is"
        f" {share} sequence{'s' * (share > 1)} in {many} micro-batch{'es' * (many > 1)}"
        + (f", {config.block_size // layout.context:,} positions of each" if layout.context > 1 else ""),
        "the run": f"preset {options.preset}: {train.steps:,} steps, {train.steps * tokens:,} tokens",
    }


def about_experts(config):
    """Describe the model's experts, if any, as the end of a sentence."""
    if config.experts == 1:
        return ""
    shared = f", and {config.shared_experts} that all tokens share" if config.shared_experts else ""
    return f"; {config.experts} experts per layer, {config.top_k} of them for each token{shared}"


def run_header(options, config, layout, device, corpus, folder):
    """Return the header in a few aligned lines."""
    epochs = corpus.epochs(options.train.steps * options.train.global_batch, config.block_size)
    lines = about_run(options, config, layout) | {
        "corpus": f"{corpus.name}, {len(corpus.train_ids):,} tokens to train on: {epochs:.2g} epochs in this run",
        "arithmetic": f"{options.train.precision}{', compiled' * bool(options.train.compile)} on {device_name(device)};"
        f" {flops_per_token(config) / 1e6:,.1f} MFLOP per token",
        "files": str(folder),
    }
    whole = {"subsequent_indent": " " * 12, "break_long_words": False, "break_on_hyphens": False}
    return "\n".join(textwrap.fill(f"{name:<11} {fact}", screen_width(), **whole) for name, fact in lines.items())


def shown_text(text, width):
    """Format untrusted text for a screen: control characters as codes, long lines wrapped, a bar at the left."""
    visible = "".join(c if c == "\n" or c.isprintable() else repr(c)[1:-1] for c in text.expandtabs(4))
    lines = []
    for line in visible.split("\n"):
        lines += textwrap.wrap(line, max(20, min(width, 100) - 4), drop_whitespace=False) or [""]
    return "\n".join(f"  | {line}".rstrip() for line in lines)


def launch_time(launcher):
    """Return when the command was started, as time.time(): our launcher's start if it is our parent, else ours."""
    process = psutil.Process()
    if launcher in ("torchrun", "mpich"):
        process = process.parent() or process
    return process.create_time()


def _mean(values):
    return statistics.fmean(values) if values else None
