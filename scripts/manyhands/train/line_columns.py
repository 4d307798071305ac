"""The columns of a run's lines: what each is called, means, and looks like.

    columns = fitting(all_columns(...), width=120)
    header(columns); line(columns, values); legend(columns, hidden, width, colour)

`values` maps a column's key to a number or None. Keys are those of the JSON lines, with their units; a value has the same
width in every line, so that lines align.
"""

import io
import math
from collections.abc import Callable
from dataclasses import dataclass

from manyhands.predict.flops import flops_per_token


@dataclass(frozen=True)
class Column:
    """`meaning` is its row in the legend; of the columns that do not fit, the one with the highest `spare` goes first."""

    key: str
    name: str
    width: int
    form: Callable
    meaning: str
    spare: int = 0

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


def all_columns(meanings, steps, unit, many_ranks, phases):
    """Every column in order, for a run of `steps` steps. `meanings` maps keys to sentences, `unit` is GPU or rank.

    `many_ranks`: with what compares ranks. `phases`: with forward and backward, which a pipeline has not.
    """

    def column(key, name, width, form, spare=0):
        return Column(key, name, width, form, meanings[key], spare)

    dt_over_ranks = [
        column("dt_min_s", "dt_min", 7, seconds, 5),
        column("dt_mean_s", "dt_mean", 7, seconds, 5),
    ]
    dt_of_phases = [column("dtf_s", "dtf", 7, seconds, 2), column("dtb_s", "dtb", 7, seconds, 2)]
    samples_of_one = [column("samples_per_s_per_rank", f"samples/s/{unit}", 10 + len(unit), rate, 4)]
    tokens_of_one = [column("tokens_per_s_per_rank", f"tokens/s/{unit}", 9 + len(unit), rate, 3)]
    memory_over_ranks = [
        column("memory_min_gib", "mem_min", 7, gib, 6),
        column("memory_mean_gib", "mem_mean", 8, gib, 6),
    ]
    return [
        column("step", "step", max(4, len(str(steps))), str),
        column("loss", "loss", 6, loss),
        column("val_loss", "val_loss", 8, loss),
        column("dt_s", "dt", 7, seconds),
        *dt_over_ranks * many_ranks,
        *dt_of_phases * phases,
        column("samples_per_s", "samples/s", 9, rate, 1),
        *samples_of_one * many_ranks,
        column("tokens_per_s", "tokens/s", 8, rate),
        *tokens_of_one * many_ranks,
        column("mfu", "MFU", 5, share, 1),
        column("grad_norm", "grad_norm", 9, lambda value: f"{value:.4g}"),
        column("lr", "lr", 8, lambda value: f"{value:.2e}"),
        column("memory_gib", "memory", 7, gib),
        *memory_over_ranks * many_ranks,
    ]


def meanings(options, config, device, unit, peak_name):
    """What each column says in this run, with its numbers. `peak_name` describes the peak, None: the device is unknown."""
    batch, block = options.train.global_batch, config.block_size
    clip = options.optimizer.clip
    clipped = f"before it is clipped to {clip:g}" if clip else "(it is not clipped)"
    held = "of the process" if device.type == "cpu" else "of tensors on its GPU"
    mfu = "unknown device: no vendor's dense peak is listed for it, so no share of it can be given"
    if peak_name:
        mega = flops_per_token(config) / 1e6
        mfu = f"{mega:,.1f} MFLOP per token x tokens/s/{unit}, as a share of {peak_name}"
    return {
        "step": "optimizer steps done",
        "loss": "cross-entropy in nats per token: the mean over the global batch of this step",
        "val_loss": "the same on text that is never trained on; - where it was not measured",
        "dt_s": "time of one step, on the slowest rank: mean of the steps since the line above",
        "dt_min_s": "dt of the fastest rank",
        "dt_mean_s": "dt, mean over ranks",
        "dtf_s": "the part of dt in the forward pass (mean over ranks)",
        "dtb_s": "the part of dt in the backward pass; what is left is the batch, clipping and the optimizer",
        "samples_per_s": f"sequences per second of all ranks together: the global batch of {batch} / dt",
        "samples_per_s_per_rank": f"samples/s divided by the number of {unit}s",
        "tokens_per_s": f"samples/s x {block} tokens",
        "tokens_per_s_per_rank": f"tokens/s divided by the number of {unit}s",
        "mfu": f"model FLOPs utilisation: {mfu}",
        "grad_norm": f"length of the gradient of the whole model, {clipped}",
        "lr": "learning rate of this step",
        "memory_gib": f"the most memory {held} that any rank has held so far",
        "memory_min_gib": "memory of the rank with the least",
        "memory_mean_gib": "memory, mean over ranks",
    }


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


def legend(columns, shown, width, colour):
    """The legend as text: a row per column of `shown`, and the names of the other `columns`."""
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
    missing = ", ".join(column.name for column in columns if column not in shown)
    if missing:
        console.print(f" {width} characters have no room for {missing}: see steps.jsonl")
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip("\n").split("\n"))
