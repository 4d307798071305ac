"""Plots of lesson 09."""

from statistics import median_high

from manyhands.plots import looks
from manyhands.plots.bars import steps_of_ranks


def draw_work(work, fair, published=()):
    """Draw for each layout a bar per rank, stacked by the ring's steps. Return a Figure.

    `work`: {layout: [rank][step] query-key pairs}; `fair`: pairs of a rank under perfect balance. published: dicts with
    `name`, `hardware` and `points`, [[number of GPUs, % of the rate that one GPU promises]], drawn in a
    panel on the right.
    """
    figure, panels = looks.new_figure(9.5, 3.2, 1, len(work) + bool(published), squeeze=False)
    panels = panels[0]
    most = max([fair, *(sum(steps) for rows in work.values() for steps in rows)])
    for axes, (name, rows) in zip(panels, work.items(), strict=False):
        steps_of_ranks(axes, rows)
        axes.axhline(fair, **looks.PREDICTED)
        axes.set(title=name, xlabel="rank (darkest: step 0)", ylim=(0, 1.08 * most))
        axes.set_xticks(range(len(rows)))
    panels[0].set_ylabel("query-key pairs")
    at_start = {"xycoords": ("axes fraction", "data"), "va": "bottom", "fontsize": 10}
    panels[0].annotate("  a fair share", (0, fair), **at_start)
    for axes in panels[len(work) :]:
        for i, one in enumerate(published):
            ((gpus, share),) = one["points"]
            axes.barh(i, share, 0.62, fc=looks.GREY, ec=looks.INK)
            axes.text(share, i, f" {share:.0f} %", va="center")
        axes.set_yticks(range(len(published)), [one["name"] for one in published])
        axes.invert_yaxis()
        axes.set(xlabel="% of what one GPU promises", xlim=(0, 118), title=published[0]["hardware"])
        axes.set_xticks(range(0, 101, 25))
    return figure


def draw_skew(skewed, shares):
    """A matplotlib Figure of two panels.

    `skewed`: {share of expert 0: ([rank 0's bytes over the mean, for each draw], predicted)}; `shares`:
    {way: [for each seed: shares of the experts, largest first]}.
    """
    figure, (left, right) = looks.new_figure(9.5, 3.4, 1, 2)
    popular = sorted(skewed)
    left.plot(popular, [skewed[p][1] for p in popular], **looks.PREDICTED, label="predicted")
    for i, p in enumerate(popular):
        samples = skewed[p][0]
        left.plot([p] * len(samples), samples, **looks.MEASURED, ls="none", label=None if i else "measured")
    left.set(xlabel="share of choices that are expert 0", ylabel="bytes at rank 0 / mean", ylim=(0, None))
    left.set_title("what skew costs")
    left.legend(frameon=False)
    for style, (name, seeds) in zip(looks.ALTERNATIVES, shares.items(), strict=False):
        places = range(1, len(seeds[0]) + 1)
        middle, errors = looks.errorbars([[seed[i - 1] for seed in seeds] for i in places], middle=median_high)
        right.errorbar(list(places), middle, yerr=errors, capsize=3, label=name, **style)
    even = 1 / len(seeds[0])
    right.axhline(even, **looks.PREDICTED)
    right.annotate("even", (1.01, even), xycoords=("axes fraction", "data"), va="center", fontsize=10)
    right.set(xlabel="experts, busiest first", ylabel="share of choices", ylim=(0, None))
    right.set_title("trained routers, all seeds")
    right.legend(frameon=False)
    return figure
