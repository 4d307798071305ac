"""Plots of times: of steps with their spread, against buckets, ranks and message sizes; and what a formula says.

Times are given as samples in seconds; a point is their median, its whiskers reach from the least to the most. Series
have shades and markers, not the ranks' colours: a curve is a library or an algorithm.
"""

from manyhands.plots import looks as style

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


def beside_published(sizes_b, seconds, ranks, published, title):
    """Draw the bus bandwidth of an all-reduce measured here below curves of real machines, both axes logarithmic.

    sizes_b, seconds: bytes of the tensor and seconds of the all-reduce over `ranks` ranks. published: dicts with `name`
    and `points`, [[bytes, GB/s], ...]. A world of one sends nothing and has no curve. Return a Figure.
    """
    figure, axes = style.new_figure(7.5, 3.6)
    here = [[b, 2 * (ranks - 1) / ranks * b / s / 1e9] for b, s in zip(sizes_b, seconds, strict=True)]
    curves = {curve["name"]: curve["points"] for curve in published} | ({"this machine": here} if ranks > 1 else {})
    looks = looks_of(["this machine", *curves])
    for name, points in curves.items():
        axes.loglog(*zip(*points, strict=True), ms=5, **looks[name])
    axes.set(xlabel="bytes of the tensor", ylabel="bus bandwidth, GB/s", title=title)
    axes.yaxis.set_major_formatter("{x:g}")
    bytes_axis(axes)
    name_ends(axes, {name: tuple(points[-1]) for name, points in curves.items()}, looks)
    return figure


def looks_of(names):
    return dict(zip(dict.fromkeys(names), style.ALTERNATIVES, strict=False))


def name_ends(axes, ends, looks):
    """The name of each series right of its end (x, y) in the data; names that would touch are moved apart."""
    place = {end: axes.transAxes.inverted().transform(axes.transData.transform(end)) for end in ends.values()}
    lowest = float("-inf")
    for name, end in sorted(ends.items(), key=lambda named: named[1][1]):
        (x, y), look = place[end], looks[name]
        lowest = max(y, lowest + _APART)
        axes.text(x + 0.055, lowest, name, transform=axes.transAxes, color=look["color"], va="center")


def bytes_axis(axes):
    ticks = {2**6: "64", 2**10: "1 Ki", 2**14: "16 Ki", 2**18: "256 Ki", 2**22: "4 Mi", 2**26: "64 Mi", 2**30: "1 Gi"}
    low, high = axes.get_xlim()
    axes.set_xticks([b for b in ticks if low <= b <= high], [ticks[b] for b in ticks if low <= b <= high])
    axes.minorticks_off()
