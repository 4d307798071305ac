"""Plots of lesson 00."""

from collections.abc import Sequence

from manyhands.plots import looks as style
from manyhands.plots.terminal import step_ticks, text_curves


def draw_as_text(values: Sequence[float], title: str, width: int = 72, height: int = 11) -> str:
    """Numbers over their index as a plot of plain characters, for terminals and log files. None of `values` is NaN."""
    places = list(range(len(values)))
    return text_curves([(places, list(values), "dot")], title, width, height, step_ticks(places))


def draw_against_trial(steps_s, trial, stopwatch_s, typical_s):
    """Steps after the first `trial` of them in blocks, median and whiskers in ms; as lines, two guesses made before.

    steps_s: of each step; stopwatch_s: the trial's whole time, start too, per step; typical_s: the median of its steps.
    """
    size = max(5, (len(steps_s) - trial) // 9)
    starts = range(trial, len(steps_s) - size + 1, size)
    blocks = [[1e3 * s for s in steps_s[start : start + size]] for start in starts]
    middles, errors = style.errorbars(blocks)
    figure, axes = style.new_figure(7.5, 3.6)
    at = [start + size / 2 for start in starts]
    axes.errorbar(at, middles, errors, **style.WHISKERS | style.MEASURED | {"ls": "none"})
    by_stopwatch = (stopwatch_s, {**style.ALTERNATIVES[2], "marker": ""}, "by stopwatch:")
    for guess_s, line, text in (by_stopwatch, (typical_s, style.PREDICTED, f"median of\nsteps 2 to {trial}:")):
        side = "bottom" if guess_s == max(stopwatch_s, typical_s) else "top"
        axes.axhline(1e3 * guess_s, **line)
        label = f" {text}\n{1e3 * guess_s:.0f} ms".replace("\n", "\n ")
        axes.text(1, 1e3 * guess_s, label, va=side, size=10, color=style.INK, transform=axes.get_yaxis_transform())
    ends = [1e3 * stopwatch_s, 1e3 * typical_s, *(value for block in blocks for value in block)]
    axes.set(yscale="log", xlim=(0, len(steps_s)), ylim=(min(ends) / 2, 2 * max(ends)))
    axes.set(xlabel="step", ylabel="ms per step", title=f"Guessed from {trial} steps, and what came after")
    style.plain_log_ticks(axes.yaxis)
    return figure
