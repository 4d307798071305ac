"""Plots of lesson 05: who read what, how far apart trainings are, rules for the learning rate, and scaling.

Series have shades and markers, not the ranks' colours: a curve here is a run, a rule or a formula.
"""

import math

from manyhands.figures.looks import EDGE, GREY, INK, MEASURED, PAPER, QUIET

RULES = ({"ls": "-"}, {"ls": ":"}, {"ls": "--"}, {"ls": "-."}, {"color": EDGE})


def times_read(readers):
    """Histograms of runs side by side: above how often a sequence was read, below by how many ranks.

    readers: {run: for each sequence the ranks that read it, one for each time}.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.4), layout="constrained")
    above, below = figure.subplots(2, len(readers))
    for top, bottom, (name, by) in zip(above, below, readers.items(), strict=True):
        for axes, numbers, what, ticks in (
            (top, [len(ranks) for ranks in by], "times read", range(2, 13, 2)),
            (bottom, [len(set(ranks)) for ranks in by], "different ranks that read it", range(1, 5)),
        ):
            axes.hist(numbers, bins=[x - 0.5 for x in range(1, 14)], color=GREY, edgecolor=INK)
            axes.set(xlabel=what, ylabel="sequences", title=f"run {name}", ylim=(0, 250), xticks=ticks)
            axes.set_xlim(0.4, ticks[-1] + 0.6)
    return figure


def differences(kinds, limit):
    """|loss - loss of n=1| at each update, on a logarithmic axis, and a line at `limit`.

    kinds: {name: {n: losses [steps]}} with n=1 among them, three kinds at most. Where two losses are equal to the last bit
    there is no point.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for (name, runs), face in zip(kinds.items(), (PAPER, GREY, INK), strict=False):
        for n, marker in zip(sorted(runs)[1:], "os^", strict=False):
            apart = (runs[n] - runs[1]).abs().cpu().double()
            apart[apart == 0] = math.nan
            axes.semilogy(apart, marker, color=INK, mfc=face, ms=6, label=f"{name}, n={n}")
    axes.axhline(limit, color=EDGE, lw=1)
    axes.text(0, 1.4 * limit, f"{limit:g}", color=QUIET)
    axes.set(xlabel="update", ylabel="|loss - loss of n=1|", title="the same training on n ranks")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def by_rule(results, titles, rules, tokens):
    """Smoothed training losses over characters read: a panel for each optimizer, a curve for each of five rules.

    results: {(optimizer, rule): (losses of the updates, validation loss)}; titles: {optimizer: title};
    tokens: characters that each run read.
    """
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    panels = figure.subplots(1, len(titles), sharey=True)
    for axes, (kind, title) in zip(panels, titles.items(), strict=True):
        for i, (rule, style) in enumerate(zip(rules, RULES, strict=True)):
            losses, val = results[kind, rule]
            window = max(1, len(losses) // 16)
            smooth = np.convolve(losses, np.ones(window) / window, "valid")
            x = (np.arange(len(smooth)) + window) * tokens / len(losses)
            axes.plot(x, smooth, **{"color": INK, **style}, lw=1.3 if i else 2, label=f"{rule}: {val:.2f}")
        axes.set(xlabel="characters read", ylabel="training loss", title=title)
        axes.legend(title="validation loss")
    return figure


def scaling(sizes, virtual_s, curves_s, speed_ups):
    """Left virtual step times on `sizes` ranks and three curves up to many ranks, right speed-ups of this machine.

    curves_s: {name: seconds on 1, 2, 3, ... ranks}; speed_ups: {name: speed-up on each of `sizes`}, measured, fitted,
    measured.
    """
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    grey = {"color": EDGE, "ls": ":"}
    left.loglog(sizes, 1e3 * np.array(virtual_s), **MEASURED, ls="none", label="measured (virtual)")
    looks = ({"color": INK, "lw": 1}, {"color": INK, "ls": "--", "lw": 1}, grey)
    for (name, seconds), look in zip(curves_s.items(), looks, strict=True):
        left.loglog(range(1, len(seconds) + 1), 1e3 * np.array(seconds), label=name, **look)
    ticks = [1, 2, 4, 8, 16, 32, 64]
    left.set_xticks(ticks, ticks)
    left.set(xlabel="ranks", ylabel="virtual ms per step", title="strong scaling (virtual)")
    looks = ({"marker": "o"}, {"ls": "--", "lw": 1}, {"marker": "s", "mfc": PAPER})
    for (name, values), look in zip(speed_ups.items(), looks, strict=True):
        right.plot(sizes, values, color=INK, label=name, **look)
    right.plot(sizes, sizes, label="ideal", **grey)
    right.set(xlabel="ranks", ylabel="speed-up", title="this machine", xticks=sizes, ylim=0)
    for axes in (left, right):
        axes.legend(fontsize=8)
    return figure
