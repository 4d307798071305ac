"""Plots of pre-training: estimates of similarity, bytes of deduplication, isoFLOP valleys, mixtures of data."""

import math

from manyhands.plots import looks


def estimates(true, found, hashes):
    """Draw estimated against true similarities, the diagonal, and one standard deviation on both sides of it."""
    figure, axes = looks.new_figure(6, 4.2)
    line = [i / 100 for i in range(101)]
    sigma = [math.sqrt(j * (1 - j) / hashes) for j in line]
    axes.plot(line, line, color=looks.QUIET, lw=1)
    for sign in (-1, 1):
        axes.plot(line, [j + sign * s for j, s in zip(line, sigma, strict=True)], **looks.PREDICTED)
    axes.plot(true, found, **looks.MEASURED | {"mfc": "none"}, ls="none")
    known, colour = "± sqrt(J (1 - J) / K)", looks.PREDICTED["color"]
    looks.note(axes, known, (0.5, 0.5 + sigma[50]), (-8, 6), colour, ha="right")
    axes.set(xlabel="true similarity J", ylabel=f"estimate from {hashes} hashes", xlim=(0, 1.02), ylim=(0, 1.02))
    return figure


def received(documents, hashes, ranks, measured_kb, bands=16):
    """Draw the kB that a rank receives from the others to find copies, against the number of ranks.

    measured_kb: by keys, on `ranks` ranks. The line of the keys leaves out the candidates' signatures.
    """
    figure, axes = looks.new_figure(7, 3.6)
    sizes = [2**k for k in range(1, 11)]
    gather = [4 * hashes * documents * (n - 1) / n / 1e3 for n in sizes]
    keys = [8 * bands * documents / n * (n - 1) / n / 1e3 for n in sizes]
    axes.loglog(sizes, gather, **looks.LIMIT)
    axes.loglog(sizes, keys, **looks.PREDICTED)
    looks.note(axes, "all-gather of the signatures", (sizes[-1], gather[-1]), (0, 6), looks.LIMIT["color"], ha="right")
    looks.note(axes, "each key to one rank", (sizes[-3], keys[-3]), (6, 6), looks.PREDICTED["color"])
    if ranks > 1:
        axes.loglog(ranks, measured_kb, **looks.MEASURED, ls="none")
        looks.note(axes, "counted here, with candidates", (ranks, measured_kb), (8, 4))
    axes.set(xlabel="ranks", ylabel="kB that a rank receives", title=f"finding copies among {documents:,} documents")
    axes.margins(y=0.15)
    return figure


def by_size(one):
    """Return [(parameters, loss), ...] by size, of a published series of points [tokens, loss] of equal FLOPs."""
    return sorted((one["budget_flops"] / 6 / tokens, loss) for tokens, loss in one["points"])


def valleys(grids, lowest_of, live, published, lowest):
    """Draw losses against parameters for equal budgets: ours on the left, published ones on the right.

    grids: {budget: points}; lowest_of: {budget: (parameters, loss)}; live: a point that was trained just now;
    published: series with `budget_flops`; lowest: the function that finds a valley's lowest point.
    """
    figure, (ours, theirs) = looks.new_figure(10, 4.2, 1, 2)
    for (budget, rows), look in zip(grids.items(), looks.ALTERNATIVES[1:], strict=False):
        points = [(row["params"], row["val_loss"]) for row in rows]
        _valley(ours, points, lowest_of[budget], budget, look)
    for one, look in zip(published, looks.ALTERNATIVES[1:], strict=False):
        points = by_size(one)
        _valley(theirs, points, lowest(*zip(*points, strict=True)), one["budget_flops"], look)
    ours.plot(live["params"], live["val_loss"], **{**looks.MEASURED, "marker": "x", "ms": 10, "mew": 2}, ls="none")
    looks.note(ours, "trained here", (live["params"], live["val_loss"]), (8, 10))
    ours.set(ylabel="loss, nats per character", title="here: equal FLOPs on each curve")
    theirs.set(ylabel="loss, nats per token", title="published: Hoffmann et al. 2022")
    for axes in (ours, theirs):
        axes.set(xscale="log", xlabel="parameters")
        axes.margins(x=0.18)
    return figure


def longer_run(curves, live, title):
    """Draw training and validation loss against FLOPs, and the point that was trained just now.

    curves: {"train" and "val": [(FLOPs, loss), ...]}; live: a row of `train.isoflop.train_point`.
    """
    figure, axes = looks.new_figure(7, 3.6)
    for (name, look), label in zip(
        (("train", looks.PREDICTED), ("val", looks.MEASURED | {"ms": 3})), ("training", "validation"), strict=True
    ):
        axes.plot(*zip(*curves[name], strict=True), **look)
        looks.note(axes, label, curves[name][-1], (6, -3), look["color"])
    axes.plot(live["flops"], live["val_loss"], **{**looks.MEASURED, "marker": "x", "ms": 10, "mew": 2}, ls="none")
    looks.note(axes, "trained here", (live["flops"], live["val_loss"]), (8, 6))
    axes.set(xscale="log", xlabel="training FLOPs", ylabel="loss, nats per character", title=title)
    axes.margins(x=0.2, y=0.15)
    return figure


def _valley(axes, points, best, budget, look):
    """Draw points (parameters, loss) of a budget, a line through them, and a star at the lowest point."""
    axes.plot(*zip(*points, strict=True), **look | {"ms": 5, "lw": 1})
    axes.plot(*best, marker="*", ms=15, color=look["color"], mec=looks.PAPER)
    looks.note(axes, f"{budget:.0e}".replace("e+", "e"), points[-1], (6, 0), look["color"], va="center")


def mixtures(shares, losses):
    """Draw the losses of each domain against the share of the second one. losses: {domain: loss of each share}."""
    figure, axes = looks.new_figure(6.5, 3.6)
    samples = {name: [[loss] for loss in found] for name, found in losses.items()}
    looks.series_with_ends(axes, [100 * share for share in shares], samples, looks.ALTERNATIVES)
    axes.set(xlabel="share of code, %", ylabel="loss, nats per byte", xlim=(-3, 122), xticks=[0, 25, 50, 75, 100])
    return figure
