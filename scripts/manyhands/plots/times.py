"""Plots of times: of steps with their spread, against buckets, ranks and message sizes; and what a formula says.

Times are given as samples in seconds; a point is their median, its whiskers reach from the least to the most. Series
have shades and markers, not the ranks' colours: a curve is a library or an algorithm.
"""

import math
import statistics

from manyhands.plots import looks as style

_NUDGE = 1.1  # series beside each other at one size, so that whiskers do not cover each other
_APART = 0.075  # of the axes' height: names at the ends of lines


def compared(samples, title, unit="ms per step, slowest rank"):
    """A row for each name: the median of its samples and their whiskers. samples: {name: seconds}."""
    figure, axes = style.new_figure(7.5, 1.1 + 0.38 * len(samples))
    for row, times in enumerate(samples.values()):
        (middle,), errors = style.errorbars([times], 1e3)
        axes.errorbar(middle, row, xerr=errors, **style.WHISKERS | style.MEASURED)
        style.note(axes, f"{middle:.0f}", (middle, row), (0, 7), ha="center")
    axes.set_yticks(range(len(samples)), samples)
    axes.set(xlabel=unit, title=title, xlim=(0, None), ylim=(len(samples) - 0.5, -0.7))
    return figure


def between_failures(published, best_interval):
    """Draw hours between failures against GPUs, both axes logarithmic, and below each curve how often to save.

    published: dicts with `name` and `points`, [[GPUs, hours], ...]; from `projected_from` GPUs on they are hollow. A
    single point is drawn down to 64 GPUs by the rule hours x GPUs = constant. best_interval: a function of the seconds
    between failures. Return a Figure.
    """
    figure, axes = style.new_figure(8, 3.8)
    looks = _looks([one["name"] for one in published])
    for one in published:
        look, points = {**looks[one["name"]], "ls": "none", "ms": 7}, one["points"]
        for n, hours in points:
            hollow = {"mfc": "none"} if n >= one.get("projected_from", math.inf) else {}
            axes.plot(n, hours, **look | hollow)
        if len(points) == 1:
            ((n, hours),) = points
            points = [[64, hours * n / 64], *points]
        gpus, hours = zip(*points, strict=True)
        axes.plot(gpus, hours, color=look["color"], lw=1)
        axes.plot(gpus, [best_interval(3600 * h) / 3600 for h in hours], **style.PREDICTED | {"color": look["color"]})
        style.note(axes, one["name"], (gpus[0], hours[0]), (10, 4), look["color"])
    style.note(axes, "save every ... hours (dashed)", (gpus[0], best_interval(3600 * hours[0]) / 3600), (0, 12))
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="hours", title="a failure every ... hours")
    axes.set_ylim(top=3000)
    axes.set_xticks([8, 64, 1024, 16384, 131072], ["8", "64", "1,024", "16,384", "131,072"])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    return figure


def against_trial(steps_s, trial, stopwatch_s, typical_s):
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


def against_size(sizes_b, measured, predicted, title, unit="measured", looks=None, formula="predicted"):
    """Seconds against bytes per message, and below them measured / predicted.

    measured and predicted: {series: seconds for each size}; of a measured series also all samples for each size, which
    are drawn as their median with whiskers from the least to the most. A series without a prediction has no curve
    below, and one without measurements is drawn as a line alone. `unit` says what kind of time it is ("measured",
    "virtual"), `formula` what the dashed line is, `looks` ({series: one of ALTERNATIVES}) what a series looks like.
    """
    figure, (times, ratios) = style.new_figure(7.5, 5.4, 2, 1, sharex=True, height_ratios=(3, 1))
    looks = looks or _looks([*measured, *predicted])
    samples = {name: [s if isinstance(s, (list, tuple)) else [s] for s in found] for name, found in measured.items()}
    medians = {name: [statistics.median(some) for some in found] for name, found in samples.items()}
    # a world of one sends nothing, and zero has no place on a logarithmic axis
    positive = any(s > 0 for seconds in medians.values() for s in seconds)
    times.set(xscale="log", yscale="log" if positive else "linear")
    for seconds in predicted.values():
        times.plot(sizes_b, [1e3 * s for s in seconds], **style.PREDICTED)
    several = len(medians) > 1 and any(len(some) > 1 for found in samples.values() for some in found)
    for place, name in enumerate(medians):
        nudge = _NUDGE ** (place - (len(medians) - 1) / 2) if several else 1
        nudged_b = [b * nudge for b in sizes_b]
        _points(times, nudged_b, samples[name], looks[name], loose=name in predicted)
    found = []
    for name in (name for name in medians if name in predicted):
        ratio = [m / p if p and m else 1 for m, p in zip(medians[name], predicted[name], strict=True)]
        found += ratio
        ratios.semilogx(sizes_b, ratio, ms=4, lw=1, **looks[name])
    if positive:
        style.plain_log_ticks(times.yaxis)
    times.set(ylabel=f"{unit} time, ms", title=title)
    if predicted:
        times.plot([], [], label=formula, **style.PREDICTED)
        times.legend(frameon=False, loc="upper left")
    ratios.axhline(1, color=style.QUIET, lw=1)
    reach = max([2, *(max(ratio, 1 / ratio) for ratio in found)])  # half and twice are equally far from 1
    ratios.set(xlabel="bytes", ylabel=f"{unit} /\n{formula}", yscale="log")
    ratios.set_yticks([1 / 16, 1 / 4, 1, 4, 16] if reach > 4 else [1 / 4, 1 / 2, 1, 2, 4])
    ratios.set_ylim(0.8 / reach, reach / 0.8)
    ratios.yaxis.set_major_formatter("{x:g}")
    ratios.yaxis.set_minor_formatter("")
    _bytes_axis(ratios)
    last_s = {name: seconds[-1] for name, seconds in (predicted | medians).items()}
    _name_ends(times, {name: 1e3 * s for name, s in last_s.items()}, looks)
    return figure


def bandwidths(sizes_b, measured, factor, title, looks=None):
    """Two panels: algorithm bandwidth (bytes / seconds), and bus bandwidth (that times `factor`), in MB/s."""
    figure, panels = style.new_figure(7.5, 3.2, 1, 2, sharey=True)
    looks = looks or _looks(measured)
    names = ("algorithm: bytes / time", f"bus: × {factor:g}")
    for axes, name, times in zip(panels, names, (1, factor), strict=True):
        for series, seconds in measured.items():
            rate = [times * b / s / 1e6 if s else 0 for b, s in zip(sizes_b, seconds, strict=True)]
            axes.semilogx(sizes_b, rate, ms=5, **looks[series])
        axes.set(xlabel="bytes", title=name)
        _bytes_axis(axes)
    panels[0].set(ylabel="MB/s", ylim=(0, None))
    last = {series: factor * sizes_b[-1] / s[-1] / 1e6 if s[-1] else 0 for series, s in measured.items()}
    _name_ends(panels[1], last, looks)
    figure.suptitle(title)
    return figure


def beside_published(sizes_b, seconds, ranks, published, title):
    """Draw the bus bandwidth of an all-reduce measured here below curves of real machines, both axes logarithmic.

    sizes_b, seconds: bytes of the tensor and seconds of the all-reduce over `ranks` ranks. published: dicts with `name`
    and `points`, [[bytes, GB/s], ...]. A world of one sends nothing and has no curve. Return a Figure.
    """
    figure, axes = style.new_figure(7.5, 3.6)
    here = [[b, 2 * (ranks - 1) / ranks * b / s / 1e9] for b, s in zip(sizes_b, seconds, strict=True)]
    curves = {curve["name"]: curve["points"] for curve in published} | ({"this machine": here} if ranks > 1 else {})
    looks = _looks(["this machine", *curves])
    for name, points in curves.items():
        axes.loglog(*zip(*points, strict=True), ms=5, **looks[name])
    axes.set(xlabel="bytes of the tensor", ylabel="bus bandwidth, GB/s", title=title)
    axes.yaxis.set_major_formatter("{x:g}")
    _bytes_axis(axes)
    _name_ends(axes, {name: points[-1][1] for name, points in curves.items()}, looks)
    return figure


def _looks(names):
    return dict(zip(dict.fromkeys(names), style.ALTERNATIVES, strict=False))


def _points(axes, sizes_b, samples, look, loose):
    """Medians of a series, joined by a line unless they are `loose`, with whiskers where there are several samples."""
    middle, errors = style.errorbars(samples, 1e3)
    if any(len(some) > 1 for some in samples):
        axes.errorbar(sizes_b, middle, yerr=errors, fmt="none", ecolor=look["color"], **style.WHISKERS)
    axes.plot(sizes_b, middle, ms=5, **({**look, "ls": "none"} if loose else look))


def _name_ends(axes, ends, looks):
    """The name of each series at the height where it ends on the right; names that would touch are moved apart."""
    height = {y: axes.transAxes.inverted().transform(axes.transData.transform((1, y)))[1] for y in ends.values()}
    lowest = float("-inf")
    for name, y in sorted(ends.items(), key=lambda end: end[1]):
        lowest = max(height[y], lowest + _APART)
        axes.text(1.01, lowest, name, transform=axes.transAxes, color=looks[name]["color"], va="center")


def _bytes_axis(axes):
    ticks = {2**6: "64", 2**10: "1 Ki", 2**14: "16 Ki", 2**18: "256 Ki", 2**22: "4 Mi", 2**26: "64 Mi", 2**30: "1 Gi"}
    low, high = axes.get_xlim()
    axes.set_xticks([b for b in ticks if low <= b <= high], [ticks[b] for b in ticks if low <= b <= high])
    axes.minorticks_off()
