"""The plot of lesson 00: what a short trial said that a step takes, and what the steps after it took."""

import statistics

from manyhands.plots.looks import ALTERNATIVES, INK, MEASURED, PREDICTED, WHISKERS


def against_trial(steps_s, trial, stopwatch_s, typical_s):
    """Steps after the first `trial` of them in blocks, median and whiskers in ms, and two guesses made before as lines.

    steps_s: seconds of each step; stopwatch_s: all time of the trial, its start too, divided by its steps; typical_s: the
    median of its steps.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    size = max(5, (len(steps_s) - trial) // 9)
    starts = range(trial, len(steps_s) - size + 1, size)
    blocks = [[1e3 * s for s in steps_s[start : start + size]] for start in starts]
    middles = [statistics.median(block) for block in blocks]
    below = [middle - min(block) for middle, block in zip(middles, blocks, strict=True)]
    above = [max(block) - middle for middle, block in zip(middles, blocks, strict=True)]

    figure = Figure(figsize=(7.5, 3.6), layout="constrained")
    axes = figure.subplots()
    at = [start + size / 2 for start in starts]
    whiskers = {"elinewidth": WHISKERS["lw"], "capsize": WHISKERS["capsize"]}
    axes.errorbar(at, middles, (below, above), ls="none", **MEASURED, **whiskers)
    guesses = [
        (stopwatch_s, {**ALTERNATIVES[2], "marker": ""}, "by stopwatch:"),
        (typical_s, PREDICTED, f"median of\nsteps 2 to {trial}:"),
    ]
    for guess_s, line, text in guesses:
        side = "bottom" if guess_s == max(stopwatch_s, typical_s) else "top"
        axes.axhline(1e3 * guess_s, **line)
        label = f" {text}\n{1e3 * guess_s:.0f} ms".replace("\n", "\n ")
        axes.text(1, 1e3 * guess_s, label, va=side, size=10, color=INK, transform=axes.get_yaxis_transform())
    ends = [1e3 * stopwatch_s, 1e3 * typical_s, *(value for block in blocks for value in block)]
    axes.set(yscale="log", xlim=(0, len(steps_s)), ylim=(min(ends) / 2, 2 * max(ends)))
    axes.set(xlabel="step", ylabel="ms per step", title=f"Guessed from {trial} steps, and what came after")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda ms, _: f"{ms:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    return figure
