"""Plots of a sweep over message sizes: time, what a formula says, and what is left over.

Series have shades and markers, not the ranks' colours: a curve here is a library or an algorithm.
"""

from statistics import median

from manyhands.plots.looks import ALTERNATIVES, PREDICTED, QUIET, WHISKERS, errorbars, new_figure

_NUDGE = 1.1  # series beside each other at one size, so that whiskers do not cover each other
_APART = 0.075  # of the axes' height: names at the ends of lines


def against_size(
    sizes_b, measured, predicted, title, unit="measured", looks=None, formula="predicted"
):  # fmt: skip
    """Seconds against bytes per message, and below them measured / predicted.

    measured and predicted: {series: seconds for each size}; of a measured series also all samples for each size, which
    are drawn as their median with whiskers from the least to the most. A series without a prediction has no curve
    below, and one without measurements is drawn as a line alone. `unit` says what kind of time it is ("measured",
    "virtual"), `formula` what the dashed line is, `looks` ({series: one of ALTERNATIVES}) what a series looks like.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, (times, ratios) = new_figure(7.5, 5.4, 2, 1, sharex=True, height_ratios=(3, 1))
    looks = looks or _looks([*measured, *predicted])
    samples = {name: [_samples(seconds) for seconds in found] for name, found in measured.items()}
    medians = {name: [median(some) for some in found] for name, found in samples.items()}
    # a world of one sends nothing, and zero has no place on a logarithmic axis
    positive = any(s > 0 for seconds in medians.values() for s in seconds)
    times.set(xscale="log", yscale="log" if positive else "linear")
    for seconds in predicted.values():
        times.plot(sizes_b, [1e3 * s for s in seconds], **PREDICTED)
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
        times.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        times.yaxis.set_major_formatter(lambda ms, _: f"{ms:g}")
        times.yaxis.set_minor_formatter(NullFormatter())
    times.set(ylabel=f"{unit} time, ms", title=title)
    if predicted:
        times.plot([], [], label=formula, **PREDICTED)
        times.legend(frameon=False, loc="upper left")
    ratios.axhline(1, color=QUIET, lw=1)
    reach = max([2, *(max(ratio, 1 / ratio) for ratio in found)])  # half and twice are equally far from 1
    ratios.set(xlabel="bytes", ylabel=f"{unit} /\n{formula}", yscale="log")
    ratios.set_yticks([1 / 16, 1 / 4, 1, 4, 16] if reach > 4 else [1 / 4, 1 / 2, 1, 2, 4])
    ratios.set_ylim(0.8 / reach, reach / 0.8)
    ratios.yaxis.set_major_formatter(lambda ratio, _: f"{ratio:g}")
    ratios.yaxis.set_minor_formatter(NullFormatter())
    _bytes_axis(ratios)
    last_s = {name: seconds[-1] for name, seconds in (predicted | medians).items()}
    _name_ends(times, {name: 1e3 * s for name, s in last_s.items()}, looks)
    return figure


def bandwidths(sizes_b, measured, factor, title, looks=None):
    """Two panels: algorithm bandwidth (bytes / seconds), and bus bandwidth (that times `factor`), in MB/s."""
    figure, panels = new_figure(7.5, 3.2, 1, 2, sharey=True)
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


def _looks(names):
    return dict(zip(dict.fromkeys(names), ALTERNATIVES, strict=False))


def _samples(seconds):
    return seconds if isinstance(seconds, (list, tuple)) else [seconds]


def _points(axes, sizes_b, samples, look, loose):
    """Medians of a series, joined by a line unless they are `loose`, with whiskers where there are several samples."""
    middle, errors = errorbars(samples, 1e3)
    if any(len(some) > 1 for some in samples):
        axes.errorbar(
            sizes_b, middle, yerr=errors, fmt="none", ecolor=look["color"],
            elinewidth=WHISKERS["lw"], capsize=WHISKERS["capsize"],
        )  # fmt: skip
    axes.plot(sizes_b, middle, ms=5, **({**look, "ls": "none"} if loose else look))


def _name_ends(axes, ends, looks):
    """The name of each series at the height where it ends on the right; names that would touch are moved apart."""
    height = {y: axes.transAxes.inverted().transform(axes.transData.transform((1, y)))[1] for y in ends.values()}
    lowest = float("-inf")
    for name, y in sorted(ends.items(), key=lambda end: end[1]):
        lowest = max(height[y], lowest + _APART)
        axes.text(1.01, lowest, name, transform=axes.transAxes, color=looks[name]["color"], va="center")


def _bytes_axis(axes):
    ticks = {2**6: "64", 2**10: "1 Ki", 2**14: "16 Ki", 2**18: "256 Ki", 2**22: "4 Mi", 2**26: "64 Mi"}
    low, high = axes.get_xlim()
    axes.set_xticks([b for b in ticks if low <= b <= high], [ticks[b] for b in ticks if low <= b <= high])
    axes.minorticks_off()
