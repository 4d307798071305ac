"""Plots of a sweep over message sizes: time, what a formula says, and what is left over.

Series have shades and markers, not the ranks' colours: a curve here is a library or an algorithm.
"""

from manyhands.figures.looks import ALTERNATIVES, QUIET


def against_size(sizes_b, measured, predicted, title, unit="measured"):
    """Seconds against bytes per message, and below them measured / predicted.

    measured and predicted: {series: seconds for each size}; a series without a prediction has no curve below, and one
    without measurements is drawn as a line alone. `unit` says what kind of time it is ("measured", "virtual").
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(7.5, 5.4), layout="constrained")
    times, ratios = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    names = list(dict.fromkeys([*measured, *predicted]))
    # a world of one sends nothing, and zero has no place on a logarithmic axis
    positive = any(s > 0 for seconds in measured.values() for s in seconds)
    times.set(xscale="log", yscale="log" if positive else "linear")
    found = []
    for name, style in zip(names, ALTERNATIVES, strict=False):
        if name in predicted:
            label = None if name in measured else name
            line = {**style, "marker": "", "ls": ":" if name in measured else "--", "lw": 1.6}
            times.plot(sizes_b, [1e3 * s for s in predicted[name]], label=label, **line)
        if name in measured:
            loose = {**style, "ls": "none"} if name in predicted else style
            times.plot(sizes_b, [1e3 * s for s in measured[name]], label=name, ms=5, **loose)
        if name in measured and name in predicted:
            ratio = [m / p if p and m else 1 for m, p in zip(measured[name], predicted[name], strict=True)]
            found += ratio
            ratios.semilogx(sizes_b, ratio, ms=4, lw=1, **style)
    if positive:
        times.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        times.yaxis.set_major_formatter(lambda ms, _: f"{ms:g}")
        times.yaxis.set_minor_formatter(NullFormatter())
    times.set(ylabel=f"{unit} time, ms", title=title)
    if any(name in measured for name in predicted):
        times.plot([], [], color=QUIET, ls=":", label="the formula")
    times.legend(frameon=False)
    ratios.axhline(1, color=QUIET, lw=1)
    reach = max([2, *(max(ratio, 1 / ratio) for ratio in found)])  # half and twice are equally far from 1
    ratios.set(xlabel="bytes", ylabel=f"{unit} /\nformula", yscale="log")
    ratios.set_yticks([1 / 16, 1 / 4, 1, 4, 16] if reach > 4 else [1 / 4, 1 / 2, 1, 2, 4])
    ratios.set_ylim(0.8 / reach, reach / 0.8)
    ratios.yaxis.set_major_formatter(lambda ratio, _: f"{ratio:g}")
    _bytes_axis(ratios)
    return figure


def bandwidths(sizes_b, measured, factor, title):
    """Two panels: algorithm bandwidth (bytes / seconds), and bus bandwidth (that times `factor`), in MB/s."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    names = ("algorithm bandwidth: bytes / time", f"bus bandwidth: × {factor:g}")
    for axes, name, times in zip(panels, names, (1, factor), strict=True):
        for (series, seconds), style in zip(measured.items(), ALTERNATIVES, strict=False):
            rate = [times * b / s / 1e6 if s else 0 for b, s in zip(sizes_b, seconds, strict=True)]
            axes.semilogx(sizes_b, rate, ms=5, label=series, **style)
        axes.set(xlabel="bytes", title=name)
        _bytes_axis(axes)
    panels[0].set(ylabel="MB/s", ylim=(0, None))
    panels[0].legend(frameon=False)
    figure.suptitle(title)
    return figure


def _bytes_axis(axes):
    ticks = {2**6: "64", 2**10: "1 Ki", 2**14: "16 Ki", 2**18: "256 Ki", 2**22: "4 Mi", 2**26: "64 Mi"}
    low, high = axes.get_xlim()
    axes.set_xticks([b for b in ticks if low <= b <= high], [ticks[b] for b in ticks if low <= b <= high])
    axes.minorticks_off()
