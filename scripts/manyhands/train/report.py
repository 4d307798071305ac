"""What people see of a training run: a legend once, then a line per interval; and the same as JSON, always.

    report = Report(ranks, options, layout, config, corpus, folder)         # all ranks
    report.mean_loss = parallel.mean_loss                                   # collective: the mean over the global batch
    report.start(num_params)                                                # who and what runs, and the legend
    report.timer.step_start() ... report.timer.step_done()                  # around each step, its batch included
    report.step(step, loss, grad_norm, lr)                                  # all ranks, every step; steps count from 1
    report.evaluation(step, val_loss); report.sample(step, text); report.note(sentence)
    report.close("300 steps done")

`step` reads no number and sends no message, except in an interval's last step: then two collectives, the mean loss and
one all-reduce of a few numbers per rank. Only rank 0 shows and writes. A line waits for the evaluation of its step.
Numbers count the whole world: samples/s is the global batch over the time of the slowest rank.
"""

import math
import statistics
import sys
import textwrap
import time

import psutil
import torch
import torch.distributed as dist

from manyhands.launch.metrics import StepLog
from manyhands.launch.program import write
from manyhands.measure.timing import peak_memory_gib
from manyhands.predict.machines import dense_peak, device_name
from manyhands.predict.models import flops_per_token
from manyhands.train import columns
from manyhands.train.columns import screen_width
from manyhands.train.step_timer import StepTimer
from manyhands.train.trackers import Trackers

HEADER_EVERY = 30  # lines between headers
SOON_S = 10.0  # of steps are enough to tell when the run will be over; fewer until the second line is there
WORTH_S = 60.0  # a run that is over by then needs no announcement
REFRESH_S = 0.25  # of the bar: drawing costs the training time
KEYS = (
    "step", "tokens", "loss", "val_loss", "dt_s", "dt_min_s", "dt_mean_s", "slowest_rank", "dtf_s", "dtb_s",
    "samples_per_s", "samples_per_s_per_rank", "tokens_per_s", "tokens_per_s_per_rank", "mfu", "grad_norm", "lr",
    "memory_gib", "memory_min_gib", "memory_mean_gib", "elapsed_s", "start_up_s",
)  # fmt: skip


class Report:
    """See the module. `clock` (of the timer), `now` (seconds) and `terminal` are for tests.

    `peak`, FLOP/s of one rank, may be set before `start`, with `peak_name`: a measured one, on a CPU.
    """

    def __init__(
        self, ranks, options, layout, config, corpus, folder, *, clock=None, now=time.perf_counter, terminal=None
    ):
        self.ranks, self.options, self.layout = ranks, options, layout
        self.config, self.corpus, self.folder = config, corpus, folder
        self.now, self.mean_loss = now, None
        self.resumed = (0, 0)  # the step at which a resumed run goes on, and the tokens seen until then
        self.timer = StepTimer(ranks.device, clock)
        self.flops_per_token = flops_per_token(config)
        self.peak = dense_peak(ranks.device, options.train.precision)
        self.peak_name = f"{device_name(ranks.device)} in {options.train.precision}"
        if self.peak:
            self.peak_name = f"{self.peak / 1e12:,.1f} TFLOP/s, the dense peak of {self.peak_name}"
        self.began = now()
        self.rows, self.pending, self.closed, self.in_steps_s = [], None, False, 0.0
        self.first, self.start_up_said = True, False  # no step reported yet
        self.measured_from, self.end_said = None, False  # (step, seconds) after the first step
        self.shows = ranks.rank == 0
        self.bar = self.log = self.trackers = None
        if self.shows:
            self.terminal = sys.stdout.isatty() if terminal is None else terminal
            self.bar = Bar(options.train.steps, self.terminal and options.log.progress)

    def start(self, num_params):
        """Show who and what runs and the legend."""
        if not self.shows:
            return
        everything = columns.all_columns(
            self.options, self.config, self.ranks.device, self.ranks.world_size, self.layout.pipeline,
            self.peak and self.peak_name,
        )  # fmt: skip
        self.columns = columns.fitting(everything, screen_width())
        about = run_header(self.ranks, self.options, self.layout, self.config, self.corpus, self.folder, num_params)
        legend = columns.legend(everything, self.columns, screen_width(), self.terminal)
        self.bar.write(f"{about}\n\n{legend}\n")
        self.log = self._guarded(lambda: StepLog(self.ranks, str(self.folder.absolute() / "steps.jsonl")))
        self.trackers = Trackers(self.options, self.folder, self.ranks.world_size, self.note)
        self.bar.start()

    def step(self, step, loss, grad_norm, lr):
        """Step number `step` is done. All ranks call it. `loss`: this rank's; `grad_norm`: the global one (0-dim
        tensors).
        """
        due = self._due(step)
        expected = self._expected_end(step, due) if self.shows else None
        if not due:
            if self.shows:
                self.bar.advance(step)
            if expected:
                self.note(expected)
            return
        self._flush()
        timing = self.timer.take()
        mean = self.mean_loss(loss) if self.mean_loss else loss
        mine = (timing.step_s, timing.forward_s, timing.backward_s, peak_memory_gib(self.ranks))
        dt_n, dtf_n, dtb_n, memory_n = self._over_ranks(mine)
        if not self.shows:
            return
        row = self._row(step, loss=float(mean), grad_norm=float(grad_norm), lr=float(lr))
        row |= {
            "dtf_s": _mean(dtf_n), "dtb_s": _mean(dtb_n),
            "memory_gib": max(memory_n), "memory_min_gib": min(memory_n), "memory_mean_gib": _mean(memory_n),
        }  # fmt: skip
        if dt_n and max(dt_n) > 0:
            self.in_steps_s += max(dt_n) * timing.steps
            row |= self._rates(dt_n)
        self.pending = row
        if not self._evaluated(step):
            self._flush()
        self.bar.advance(step, row)
        if expected:
            self.bar.write(expected)

    def _expected_end(self, step, line):
        """A sentence, once, as soon as the steps have shown how fast they are, else None. Reads the clock, no more.

        `line`: whether a line ends with this step. The first step, which warms up and may compile, does not count.
        """
        now = self.now()
        if self.measured_from is None:
            self.measured_from = (step, now)
            return None
        first, began = self.measured_from
        if self.end_said or (not line and now - began < SOON_S):
            return None
        self.end_said, left = True, self.options.train.steps - step
        step_s = (now - began) / (step - first)
        if left * step_s < WORTH_S:
            return None
        end = time.strftime("%a %d %b, %H:%M", time.localtime(time.time() + left * step_s))
        return (
            f"{left:,} steps are left at about {columns.seconds(step_s)} each: {duration(left * step_s)}, until {end}"
        )

    def _due(self, step):
        """Does a line end with this step? The same answer on all ranks."""
        log, first = self.options.log, self.first
        self.first = False
        return first or step % log.every == 0 or self._evaluated(step)

    def _evaluated(self, step):
        every = self.options.log.eval_every
        return step == self.options.train.steps or (every > 0 and step % every == 0)

    def _over_ranks(self, mine):
        """For each number its values over all ranks, in rank order; an empty list if it is none. One all-reduce."""
        size = self.ranks.world_size
        device = "cpu" if "gloo" in self.ranks.backend else self.ranks.device
        table_nk = torch.zeros(size, len(mine), dtype=torch.float64)
        table_nk[self.ranks.rank] = torch.tensor([math.nan if value is None else value for value in mine])
        if dist.is_initialized():
            table_nk = table_nk.to(device)
            dist.all_reduce(table_nk)  # each rank adds zeros to the others' rows
        return [[v for v in values if not math.isnan(v)] for values in table_nk.t().tolist()]

    def _rates(self, dt_n):
        dt, size = max(dt_n), self.ranks.world_size
        samples_per_s = self.options.train.global_batch / dt
        tokens_per_s = samples_per_s * self.config.block_size
        done = self.flops_per_token * tokens_per_s / size
        return {
            "dt_s": dt, "dt_min_s": min(dt_n), "dt_mean_s": _mean(dt_n), "slowest_rank": dt_n.index(dt),
            "samples_per_s": samples_per_s, "samples_per_s_per_rank": samples_per_s / size,
            "tokens_per_s": tokens_per_s, "tokens_per_s_per_rank": tokens_per_s / size,
            "mfu": done / self.peak if self.peak else None,
        }  # fmt: skip

    def tokens(self, step):
        """What the model has seen after `step` steps, those of a run before this one included."""
        since, before = self.resumed
        return before + (step - since) * self.options.train.global_batch * self.config.block_size

    def _row(self, step, **values):
        elapsed = self.now() - self.began
        known = {"step": step, "tokens": self.tokens(step), "elapsed_s": elapsed}
        return dict.fromkeys(KEYS) | known | values

    def _flush(self):
        """Show and write the line that waits, if one does."""
        row, self.pending = self.pending, None
        if row is None:
            return
        if not self.start_up_said and self.timer.first_start_s:
            row["start_up_s"] = max(0.0, self.timer.first_start_s - launch_time(self.ranks.launcher))
            self.start_up_said = True
            self.bar.write(f"start-up: {row['start_up_s']:.1f} s from launch to the first step")
        text = columns.line(self.columns, row)
        if len(self.rows) % HEADER_EVERY == 0:
            text = f"{columns.header(self.columns)}\n{text}"
        self.rows.append(row)
        self.bar.write(text)
        if self.log and not self._guarded(lambda: self.log.write(**row) or True):
            self.log = None  # said once
        self.trackers.log(row)

    def evaluation(self, step, val_loss):
        """The validation loss after `step`: in the line of that step, else in one of its own. All ranks may call it."""
        if not self.shows:
            return
        if self.pending is None or self.pending["step"] != step:
            self._flush()
            self.pending = self._row(step)
        self.pending["val_loss"] = float(val_loss)
        self._flush()

    def sample(self, step, text):
        """Show text that the model wrote. Control characters are shown by their codes."""
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
        """Say how the run ended, draw its curves, end the trackers. All ranks may call it, again too."""
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
        share = columns.share(self.in_steps_s / elapsed) if elapsed else "-"
        lines = [f"{reason}: {elapsed:.1f} s, {share} of them in steps"]
        measured = [row for row in self.rows if math.isfinite(row["val_loss"] or math.nan)]
        if measured:
            best = min(measured, key=lambda row: row["val_loss"])
            lines.append(f"  lowest val_loss {best['val_loss']:.4f} after step {best['step']}")
        speeds = [row["tokens_per_s"] for row in self.rows if row["tokens_per_s"]][1:]  # the first one warms up
        if speeds:
            lines.append(f"  median {columns.rate(statistics.median(speeds))} tokens/s")
        return "\n".join([*lines, f"  every number: {self.folder / 'steps.jsonl'}"])

    def _draw(self):
        from manyhands.train import curves

        self.bar.write(curves.terminal(self.rows, screen_width()))
        self.bar.write(f"curves: {curves.png(self.rows, self.folder / 'curves.png')}")

    def _guarded(self, call):
        """What is written must not end a training: a failure is said, and None returned."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001
            self.bar.write(f"report: {type(error).__name__}: {error}; training goes on")


class Bar:
    """A progress bar below the lines of a run, where `active`: a terminal. Lines go through `write`, and stand above
    it.
    """

    def __init__(self, steps, active):
        self.progress, self.drawn = None, 0.0
        if active:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self.progress = Progress(
                MofNCompleteColumn(), TextColumn("steps"), BarColumn(), TextColumn("{task.fields[loss]}"),
                TextColumn("left:"), TimeRemainingColumn(), console=Console(force_terminal=True), auto_refresh=False,
                transient=True, redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip
            self.task = self.progress.add_task("", total=steps, loss="")

    def start(self):
        if self.progress:
            self.progress.start()
            self.progress.console.show_cursor(True)  # rich hides it, and a run that is killed cannot bring it back

    def advance(self, step, row=None):
        """`step` steps are done; `row`: a line's numbers, if there are new ones."""
        if not self.progress:
            return
        self.progress.update(self.task, completed=step)
        if row:
            self.progress.update(self.task, loss=f"loss {row['loss']:.4f}")
        if row or time.perf_counter() - self.drawn > REFRESH_S:
            self.drawn = time.perf_counter()
            self.progress.refresh()

    def write(self, text):
        if self.progress and self.progress.live.is_started:
            from rich.text import Text

            self.progress.console.print(Text.from_ansi(text), soft_wrap=True, highlight=False)
        else:
            write(f"{text}\n")

    def stop(self):
        if self.progress:
            self.progress.stop()


def run_header(ranks, options, layout, config, corpus, folder, num_params):
    """A few aligned lines. `num_params`: parameters of the whole model."""
    train, size, block = options.train, ranks.world_size, config.block_size
    share = train.global_batch // layout.data
    micro = f" in {layout.micro_batches} micro-batches" if layout.micro_batches > 1 else ""
    tokens = train.global_batch * block
    epochs = train.steps * tokens / max(1, len(corpus.train_ids))
    device = device_name(ranks.device)
    lines = {
        "run": f"preset {options.preset}, {train.steps:,} steps; files in {folder}",
        "model": f"{num_params:,} parameters: {config.n_layer} layers, {config.n_head} heads, width {config.n_embd}, "
        f"block {block}, a vocabulary of {config.vocab_size}",
        "ranks": f"{size} on {device}, {options.parallel.strategy}: {layout}",
        "batch": f"{train.global_batch} sequences = {tokens:,} tokens per step; {share} per data rank{micro}",
        "corpus": f"{corpus.name}, {len(corpus.train_ids):,} tokens to train on: {epochs:.2g} epochs in this run",
        "arithmetic": f"{train.precision}{', compiled' if train.compile else ''}; "
        f"{flops_per_token(config) / 1e6:,.1f} MFLOP per token",
    }
    whole = {"subsequent_indent": " " * 12, "break_long_words": False, "break_on_hyphens": False}
    return "\n".join(textwrap.fill(f"{name:<11} {fact}", screen_width(), **whole) for name, fact in lines.items())


def shown_text(text, width):
    """Text of unknown content for a screen: control characters as codes, long lines wrapped, a bar at the left."""
    visible = "".join(c if c == "\n" or c.isprintable() else repr(c)[1:-1] for c in text.expandtabs(4))
    lines = []
    for line in visible.split("\n"):
        lines += textwrap.wrap(line, max(20, min(width, 100) - 4), drop_whitespace=False) or [""]
    return "\n".join(f"  | {line}".rstrip() for line in lines)


def launch_time(launcher):
    """When the command was given, as time.time(): the start of the launcher where it is our parent, else of this
    process.
    """
    process = psutil.Process()
    if launcher in ("torchrun", "mpich"):
        process = process.parent() or process
    return process.create_time()


def duration(value):
    """Seconds for people, in two units at most: 4 min, 3 h 20 min, 2 days 3 h."""
    minutes = round(value / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(round(value / 3600), 24)
    return f"{days} day{'s' * (days > 1)}" + (f" {hours} h" if hours else "")


def _mean(values):
    return statistics.fmean(values) if values else None
