"""Plots of lesson 09: pairs per rank and step under two layouts; skew of experts against bytes; shares of choices."""

from manyhands.plots.looks import ALTERNATIVES, INK, MEASURED, PREDICTED, rank_colour, tint


def work_per_rank(work, fair):
    """A matplotlib Figure: for each layout a bar per rank, stacked by the ring's steps.

    `work`: {layout: [rank][step] query-key pairs}; `fair`: pairs of a rank under perfect balance.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    panels = figure.subplots(1, len(work), sharey=True, squeeze=False)[0]
    for axes, (name, rows) in zip(panels, work.items(), strict=True):
        for rank, steps in enumerate(rows):
            bottom = 0
            for step, pairs in enumerate(steps):
                strength = 1 - 0.75 * step / max(1, len(steps) - 1) if len(steps) > 1 else 1
                axes.bar(rank, pairs, 0.7, bottom=bottom, fc=tint(rank_colour(rank), strength), ec=INK)
                bottom += pairs
        axes.axhline(fair, **PREDICTED)
        axes.set(title=name, xlabel="rank of the group (darkest: step 0)")
        axes.set_xticks(range(len(rows)))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("query-key pairs")
    panels[-1].annotate(
        "a fair share", (1, fair), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=10
    )
    return figure


def skew_and_balance(skewed, shares):
    """A matplotlib Figure of two panels.

    `skewed`: {share of expert 0: ([rank 0's bytes over the mean, for each draw], predicted)}; `shares`:
    {way: [for each seed: shares of the experts, largest first]}.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    popular = sorted(skewed)
    left.plot(popular, [skewed[p][1] for p in popular], **PREDICTED, label="predicted")
    for i, p in enumerate(popular):
        samples = skewed[p][0]
        left.plot([p] * len(samples), samples, **MEASURED, ls="none", label=None if i else "measured")
    left.set(
        xlabel="share of choices that are expert 0",
        ylabel="bytes at rank 0 / mean",
        ylim=(0, None),
        title="what skew costs",
    )
    left.legend(frameon=False)
    for style, (name, seeds) in zip(ALTERNATIVES, shares.items(), strict=False):
        places = range(1, len(seeds[0]) + 1)
        middle = [sorted(seed[i] for seed in seeds)[len(seeds) // 2] for i in range(len(seeds[0]))]
        low, high = ([ends(seed[i] for seed in seeds) for i in range(len(seeds[0]))] for ends in (min, max))
        errors = [
            [m - x for m, x in zip(middle, low, strict=True)],
            [x - m for m, x in zip(middle, high, strict=True)],
        ]
        right.errorbar(list(places), middle, yerr=errors, capsize=3, label=name, **style)
    even = 1 / len(seeds[0])
    right.axhline(even, **PREDICTED)
    right.annotate("even", (1.01, even), xycoords=("axes fraction", "data"), va="center", fontsize=10)
    right.set(
        xlabel="experts, busiest first",
        ylabel="share of choices",
        ylim=(0, None),
        title="trained routers, all seeds",
    )
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure
