"""Plots of lesson 03: step times with their spread, a training curve with samples, bucket sizes, weak scaling.

Times are given as samples in seconds; a point is their median, its whiskers reach from the least to the most.
"""

import math
import statistics

from manyhands.plots.looks import (
    ALTERNATIVES,
    INK,
    MEASURED,
    PREDICTED,
    QUIET,
    TRAINING,
    VALIDATION,
    WHISKERS,
    errorbars,
    new_figure,
)


def compared(samples, title, unit="ms per step, slowest rank"):
    """A row for each name: the median of its samples and their whiskers. samples: {name: seconds}."""
    figure, axes = new_figure(7.5, 1.1 + 0.38 * len(samples))
    for row, times in enumerate(samples.values()):
        (middle,), errors = errorbars([times], 1e3)
        axes.errorbar(middle, row, xerr=errors, **WHISKERS | MEASURED)
        axes.annotate(f"{middle:.0f}", (middle, row), (0, 7), textcoords="offset points", ha="center")
    axes.set_yticks(range(len(samples)), samples)
    axes.set(xlabel=unit, title=title, xlim=(0, None), ylim=(len(samples) - 0.5, -0.7))
    return figure


def training(losses, looks, vocab_size, title):
    """Left the loss of each step and the validation loss at the looks, right what the model wrote then.

    losses: [steps]; looks: [(step, validation loss, text)]; vocab_size: how many tokens there are to guess from.
    """
    figure, (axes, beside) = new_figure(10, 4, 1, 2, width_ratios=[1, 1.1])
    axes.plot([step for step, _, _ in looks], [loss for _, loss, _ in looks], **VALIDATION, label="validation")
    axes.plot(range(len(losses)), losses, **TRAINING, label="training, mean over the ranks")
    guess = math.log(vocab_size)
    axes.axhline(guess, **PREDICTED)
    axes.annotate(
        f"knowing nothing: ln {vocab_size} = {guess:.2f}",
        (len(losses), guess),
        (0, 3),
        textcoords="offset points",
        ha="right",
    )
    axes.legend(frameon=False, loc="center right")
    axes.set(xlabel="step", ylabel="loss, nats per character", title=title)
    axes.margins(y=0.1)
    beside.axis("off")
    for row, (step, loss, text) in enumerate(looks):
        top, line = 1 - 0.26 * row, text.replace("\n", "/")
        beside.text(0, top, f"step {step}, validation {loss:.2f}", weight="bold", va="top")
        style = {"family": "monospace", "va": "top", "parse_math": False}
        beside.text(0, top - 0.07, line[:45] + "\n" + line[45:90], **style)
    return figure


def bucket_sizes(counts, virtual_s, predicted_s, real_counts, samples, title):
    """Step time against the number of buckets, left in virtual time, right measured.

    virtual_s, predicted_s: seconds for each of `counts`. samples: {name: for each of `real_counts` its seconds} of two
    lines, and then {name: seconds} of the step that averages nothing.
    """
    figure, (virtual, real) = new_figure(10, 3.8, 1, 2)
    virtual.plot(counts, [1e3 * s for s in predicted_s], **PREDICTED)
    virtual.plot(counts, [1e3 * s for s in virtual_s], **MEASURED, ls="none")
    _label(virtual, counts[-1], 1e3 * predicted_s[-1], "predicted", PREDICTED["color"], up=-1)
    virtual.set(ylabel="virtual ms per step", title="a network of its own (virtual)")
    *lines, alone = samples
    ends = [1e3 * statistics.median(samples[name][-1]) for name in lines]
    for name, style, end in zip(lines, ALTERNATIVES[1::-1], ends, strict=True):
        middles, errors = errorbars(samples[name], 1e3)
        real.errorbar(real_counts, middles, yerr=errors, **{**WHISKERS, **style, "ms": 5})
        _label(real, real_counts[-1], end, name, style["color"], up=1 if end == max(ends) else -1)
    alone_ms = 1e3 * statistics.median(samples[alone])
    real.axhline(alone_ms, color=QUIET, lw=1)
    _label(real, real_counts[-1], alone_ms, alone, QUIET, up=-1)
    real.set(ylabel="ms per step, slowest rank", title=title)
    for axes, ticks in ((virtual, counts), (real, real_counts)):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, ticks)
        axes.minorticks_off()
        axes.set(xlabel="number of buckets", ylim=(0, None), xlim=(0.8 * min(ticks), 3.2 * max(ticks)))
    return figure


def weak_scaling(sizes, samples, tokens_per_rank, title):
    """Tokens per second of the world against its ranks, and the line of n times one rank.

    samples: for each of `sizes` the seconds of a step in which every rank reads `tokens_per_rank`.
    """
    figure, axes = new_figure(5.5, 3.4)
    rates = [[n * tokens_per_rank / s for s in times] for n, times in zip(sizes, samples, strict=True)]
    middles, errors = errorbars(rates)
    axes.errorbar(sizes, middles, yerr=errors, **WHISKERS | MEASURED)
    axes.plot(sizes, [n * middles[0] / sizes[0] for n in sizes], **PREDICTED)
    _label(axes, sizes[-1], sizes[-1] * middles[0] / sizes[0], "ideal", PREDICTED["color"])
    _label(axes, sizes[-1], middles[-1], "measured", INK)
    axes.set(xlabel="ranks", ylabel="tokens/s", xticks=sizes, ylim=(0, None), xlim=(0.7, 1.35 * sizes[-1]), title=title)
    return figure


def _label(axes, x, y, text, colour, up=0):
    """`text` at the end of a line, a little above (up=1) or below (-1) its last point."""
    va = {1: "bottom", 0: "center", -1: "top"}[up]
    axes.annotate(text, (x, y), (9, 2 * up), textcoords="offset points", va=va, color=colour)


def against_trial(steps_s, trial, stopwatch_s, typical_s):
    """Steps after the first `trial` of them in blocks, median and whiskers in ms; as lines, two guesses made before.

    steps_s: seconds of each step; stopwatch_s: all time of the trial, its start too, divided by its steps; typical_s:
    the median of its steps.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    size = max(5, (len(steps_s) - trial) // 9)
    starts = range(trial, len(steps_s) - size + 1, size)
    blocks = [[1e3 * s for s in steps_s[start : start + size]] for start in starts]
    middles = [statistics.median(block) for block in blocks]
    below = [middle - min(block) for middle, block in zip(middles, blocks, strict=True)]
    above = [max(block) - middle for middle, block in zip(middles, blocks, strict=True)]

    figure, axes = new_figure(7.5, 3.6)
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
