"""Plots of lesson 05: who read what, how far apart trainings are, learning rates, the noise of a gradient, and scaling.

Series have shades and markers, not the ranks' colours: a curve here is a run, a batch or a formula. Whiskers reach
from the least to the most.
"""

import math
from statistics import mean

from manyhands.plots import looks


def times_read(readers):
    """Histograms of runs side by side: above how often a sequence was read, below by how many ranks.

    readers: {run: for each sequence the ranks that read it, one for each time}.
    """
    figure, (above, below) = looks.new_figure(9, 4.4, 2, len(readers))
    for top, bottom, (name, by) in zip(above, below, readers.items(), strict=True):
        for axes, numbers, what, ticks in (
            (top, [len(ranks) for ranks in by], "times read", range(2, 13, 2)),
            (bottom, [len(set(ranks)) for ranks in by], "different ranks that read it", range(1, 5)),
        ):
            axes.hist(numbers, bins=[x - 0.5 for x in range(1, 14)], color=looks.GREY, edgecolor=looks.INK)
            axes.set(xlabel=what, ylabel="sequences", title=f"run {name}", ylim=(0, 250), xticks=ticks)
            axes.set_xlim(0.4, ticks[-1] + 0.6)
    return figure


def differences(pairs, limit, title, ylabel="|loss - loss of one rank|"):
    """|losses - those of one rank| at each update, on a logarithmic axis, and a line at `limit`.

    pairs: {name: (losses [steps], losses of one rank [steps])}, four at most. Where two losses are equal to the last
    bit there is no point.
    """
    figure, axes = looks.new_figure(7.5, 3.6)
    for (name, (losses, of_one)), look in zip(pairs.items(), looks.ALTERNATIVES, strict=False):
        apart = (losses - of_one).abs().cpu().double()
        apart[apart == 0] = math.nan
        axes.semilogy(apart, ms=5, **look)
        if last := [step for step, there in enumerate(apart.isfinite().tolist()) if there][-1:]:
            looks.end_label(axes, last[0], apart[last[0]], name, look["color"])
    end = len(losses) - 1
    axes.axhline(limit, **looks.LIMIT)
    looks.note(axes, f"{limit:,g}", (0, limit), (0, 3), looks.LIMIT["color"])
    axes.set(xlabel="update", ylabel=ylabel, title=title, xlim=(-0.3, 1.35 * end + 0.3))
    axes.set_xticks(range(0, end + 1, max(1, end // 5)))
    return figure


def by_rate(losses, advised, title):
    """Validation loss against learning rate: a panel for each optimizer, a curve for each batch.

    losses: {(optimizer, batch, rate): losses of its seeds}; advised: {optimizer: the rate of its dashed line}.
    """
    figure, (panels,) = looks.new_figure(10, 3.8, 1, len(advised), sharey=True, squeeze=False)
    for axes, kind in zip(panels, advised, strict=True):
        batches = list(dict.fromkeys(batch for optimizer, batch, _ in losses if optimizer == kind))
        for batch, look in zip(batches, looks.ALTERNATIVES, strict=False):
            runs = sorted((rate, found) for (o, b, rate), found in losses.items() if (o, b) == (kind, batch))
            middles, errors = looks.errorbars([found for _, found in runs], middle=mean)
            x = [rate for rate, _ in runs]
            axes.errorbar(x, middles, yerr=errors, **{**looks.WHISKERS, **look, "ms": 5})
            up = 8 if middles[0] == max(mean(losses[kind, b, x[0]]) for b in batches) else -18
            looks.note(axes, f"batch {batch}", (x[0], middles[0]), (0, up), look["color"])
        axes.axvline(advised[kind], **looks.PREDICTED)
        place = {"xycoords": ("data", "axes fraction")}
        looks.note(axes, "the rule", (advised[kind], 1), (4, -10), looks.PREDICTED["color"], **place)
        axes.set(xscale="log", xlabel="learning rate", title=f"{kind}, {title}")
    panels[0].set_ylabel("validation loss")
    return figure


def noise(sizes, measured, predicted):
    """Squared distance of a batch's gradient from that of everything, against the batch's size: points and a line."""
    figure, axes = looks.new_figure(5.6, 3.4)
    axes.loglog(sizes, predicted, **looks.PREDICTED)
    axes.loglog(sizes, measured, **looks.MEASURED, ls="none")
    looks.end_label(
        axes, sizes[0], predicted[0], "predicted: variance of one × (1/B - 1/256)", looks.PREDICTED["color"]
    )
    axes.set(xlabel="sequences B", ylabel="squared distance", title="noise of the gradient of B sequences")
    axes.set_xticks(sizes, sizes)
    axes.minorticks_off()
    return figure


def scaling(sizes, virtual_s, curves_s, speed_ups):
    """Left virtual step times on `sizes` ranks and curves up to many ranks, right this machine's speed-ups."""

    figure, (left, right) = looks.new_figure(10, 3.8, 1, 2)
    styles = (looks.PREDICTED, {"color": looks.ALTERNATIVES[2]["color"], "ls": ":", "lw": 1.6})
    for (name, seconds), look in zip(curves_s.items(), styles, strict=True):
        left.loglog(range(1, len(seconds) + 1), [1e3 * s for s in seconds], **look)
        looks.end_label(left, len(seconds), 1e3 * seconds[-1], name, look["color"])
    left.loglog(sizes, [1e3 * s for s in virtual_s], **looks.MEASURED, ls="none")
    ticks = [1, 2, 4, 8, 16, 32, 64]
    left.set_xticks(ticks, ticks)
    left.set_yticks([2, 5, 10, 20], [2, 5, 10, 20])
    left.set(xlabel="ranks", ylabel="virtual ms per step", title="strong scaling (virtual)", xlim=(0.9, 400))
    left.minorticks_off()
    right.plot(sizes, sizes, **looks.PREDICTED)
    looks.end_label(right, sizes[-1], sizes[-1], "ideal", looks.PREDICTED["color"])
    measured = {name: [by_n[n] for n in sizes] for name, by_n in speed_ups.items()}
    looks.series_with_ends(right, sizes, measured, looks.ALTERNATIVES)
    right.set(xlabel="ranks", ylabel="speed-up", title="this machine", xticks=sizes)
    right.set(ylim=(0, None), xlim=(0.8, 1.25 * sizes[-1] + 0.2))
    return figure
