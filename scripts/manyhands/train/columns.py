"""The columns of a run's lines: what each is called, means, and looks like.

    columns = fitting(all_columns(...), width=120)
    header(columns); line(columns, values); legend(everything, columns, width, colour)

`values` maps a column's key to a number or None. Keys are those of the JSON lines, with their units; a value has the
same width in every line, so that lines align.
"""

import io
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass

from manyhands.predict.models import flops_per_token

LOG_WIDTH = 160  # where there is no terminal: every column
OVER_RANKS = {  # keys of what compares ranks: one rank alone has none of it
    "dt_min_s", "dt_mean_s", "samples_per_s_per_rank", "tokens_per_s_per_rank", "memory_min_gib", "memory_mean_gib",
}  # fmt: skip
PHASES = {"dtf_s", "dtb_s"}  # which a pipeline has not: its forwards and backwards alternate


@dataclass(frozen=True)
class Column:
    """`meaning` is its row in the legend; of columns that do not fit, the one with the highest `spare` goes first."""

    key: str
    name: str
    width: int
    form: Callable[[float], str]
    spare: int
    meaning: str

    def cell(self, value):
        if value is None:
            text = "-"
        elif isinstance(value, float) and not math.isfinite(value):
            text = str(value)  # nan, inf
        else:
            text = self.form(value)
        return text.rjust(self.width)


def seconds(value):
    """Seven characters at most: 45.1ms, 12.35s."""
    if value < 0.9999:
        return f"{value * 1000:.1f}ms" if value >= 0.001 else f"{value * 1000:.3f}ms"
    return f"{value:.2f}s" if value < 999 else f"{value:.0f}s"


def gib(value):
    return f"{value:.2f}GiB" if value < 9.995 else f"{value:.1f}GiB" if value < 99.95 else f"{value:.0f}GiB"


def loss(value):
    digits = 4 if abs(value) < 9.99995 else 3 if abs(value) < 99.9995 else 1
    return f"{value:.{digits}f}" if abs(value) < 9999 else f"{value:.0e}"


def rate(value):
    for unit, size in (("", 1), ("k", 1e3), ("M", 1e6), ("G", 1e9)):
        if value < 99999.5 * size or unit == "G":
            shown = value / size
            return f"{shown:.1f}{unit}" if shown < 999.95 else f"{shown:.0f}{unit}"


def share(value):
    return f"{value:.1%}" if value < 0.9995 else f"{value:.0%}"


def screen_width():
    """Characters per line: of the terminal, or what COLUMNS says; a log file takes all columns."""
    return shutil.get_terminal_size((LOG_WIDTH, 24)).columns


def all_columns(options, config, device, world_size, pipeline, peak_name):
    """Every column of a run, in order, with its numbers in the meanings.

    `pipeline`: stages of it. `peak_name` describes the peak that MFU is a share of; None: the device is unknown.
    """
    unit, batch, clip = "rank" if device.type == "cpu" else "GPU", options.train.global_batch, options.optimizer.clip
    clipped = f"before it is clipped to {clip:g}" if clip else "(it is not clipped)"
    held = "of the process" if device.type == "cpu" else "of tensors on its GPU"
    mfu = "unknown device: no vendor's dense peak is listed for it, so no share of it can be given"
    if peak_name:
        mfu = f"{flops_per_token(config) / 1e6:,.1f} MFLOP per token x tokens/s/{unit}, as a share of {peak_name}"
    wide = max(4, len(str(options.train.steps)))
    columns = [
        Column("step", "step", wide, str, 0, "optimizer steps done"),
        Column("loss", "loss", 6, loss, 0,
               "cross-entropy in nats per token: the mean over the global batch of this step"),
        Column("val_loss", "val_loss", 8, loss, 0,
               "the same on text that is never trained on; - where it was not measured"),
        Column("dt_s", "dt", 7, seconds, 0,
               "time of one step, on the slowest rank: mean of the steps since the line above"),
        Column("dt_min_s", "dt_min", 7, seconds, 5, "dt of the fastest rank"),
        Column("dt_mean_s", "dt_mean", 7, seconds, 5, "dt, mean over ranks"),
        Column("dtf_s", "dtf", 7, seconds, 2, "the part of dt in the forward pass (mean over ranks)"),
        Column("dtb_s", "dtb", 7, seconds, 2,
               "the part of dt in the backward pass; what is left is the batch, clipping and the optimizer"),
        Column("samples_per_s", "samples/s", 9, rate, 1,
               f"sequences per second of all ranks together: the global batch of {batch} / dt"),
        Column("samples_per_s_per_rank", f"samples/s/{unit}", 10 + len(unit), rate, 4,
               f"samples/s divided by the number of {unit}s"),
        Column("tokens_per_s", "tokens/s", 8, rate, 0, f"samples/s x {config.block_size} tokens"),
        Column("tokens_per_s_per_rank", f"tokens/s/{unit}", 9 + len(unit), rate, 3,
               f"tokens/s divided by the number of {unit}s"),
        Column("mfu", "MFU", 5, share, 1, f"model FLOPs utilisation: {mfu}"),
        Column("grad_norm", "grad_norm", 9, "{:.4g}".format, 0,
               f"length of the gradient of the whole model, {clipped}"),
        Column("lr", "lr", 8, "{:.2e}".format, 0, "learning rate of this step"),
        Column("memory_gib", "memory", 7, gib, 0, f"the most memory {held} that any rank has held so far"),
        Column("memory_min_gib", "mem_min", 7, gib, 6, "memory of the rank with the least"),
        Column("memory_mean_gib", "mem_mean", 8, gib, 6, "memory, mean over ranks"),
    ]  # fmt: skip
    absent = (OVER_RANKS if world_size == 1 else set()) | (PHASES if pipeline > 1 else set())
    return [column for column in columns if column.key not in absent]


def fitting(columns, width):
    """The columns that fit into `width` characters, most spare ones left out first."""
    columns = list(columns)
    while len(header(columns)) > width and any(column.spare for column in columns):
        most = max(column.spare for column in columns)
        columns = [column for column in columns if column.spare != most]
    return columns


def header(columns):
    return " ".join(column.name.rjust(column.width) for column in columns)


def line(columns, values):
    return " ".join(column.cell(values.get(column.key)) for column in columns)


def legend(everything, shown, width, colour):
    """The legend as text: a row per column of `shown`, and the names of the others of `everything`."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("column", no_wrap=True, style="bold")
    table.add_column("what it says")
    for column in shown:
        table.add_row(column.name, column.meaning)
    text, system = io.StringIO(), "standard" if colour else None
    console = Console(file=text, width=width, force_terminal=colour, color_system=system, markup=False)
    console.print(table)
    missing = ", ".join(column.name for column in everything if column not in shown)
    if missing:
        console.print(f" {width} characters have no room for {missing}: see steps.jsonl")
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip("\n").split("\n"))
