"""Plots of lesson 12: estimated against true similarity, isoFLOP curves with their lowest points, two scores of one model.

Curves of one budget share line and marker, see `looks.ALTERNATIVES`; a rank's points have the rank's colour.
"""

import math

from manyhands.plots.looks import ALTERNATIVES, INK, LIMIT, MEASURED, PREDICTED, QUIET, rank_colour


def estimates(of_ranks, hashes):
    """Each rank's pairs (true similarity, estimate), the diagonal, and one standard deviation on both sides of it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.2), layout="constrained")
    axes = figure.subplots()
    line = [i / 100 for i in range(101)]
    sigma = [math.sqrt(j * (1 - j) / hashes) for j in line]
    axes.plot(line, line, color=QUIET, lw=1)
    for sign in (-1, 1):
        axes.plot(line, [j + sign * s for j, s in zip(line, sigma, strict=True)], **PREDICTED)
    for rank, pairs in enumerate(of_ranks):
        if pairs:
            axes.plot(
                *zip(*pairs, strict=True), ls="none", marker="o^sDv<>p"[rank % 8], ms=5, mfc="none",
                color=rank_colour(rank), label=f"rank {rank}",
            )  # fmt: skip
    axes.annotate(
        "± sqrt(J (1 - J) / K)", (0.5, 0.5 + sigma[50]), (-8, 6), textcoords="offset points",
        ha="right", color=PREDICTED["color"],
    )  # fmt: skip
    axes.legend(frameon=False, loc="lower right")
    axes.set(xlabel="true similarity J", ylabel=f"estimate from {hashes} hashes", xlim=(0, 1.02), ylim=(0, 1.02))
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def isoflop(grids, optima, law, live):
    """Left the losses of each budget with its parabola and lowest point, right the lowest points and their line.

    grids: {budget: points}; optima and law: of `predict.scaling`; live: a point that was trained just now.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    valleys, line = figure.subplots(1, 2, width_ratios=[1.5, 1])
    for (budget, rows), best, look in zip(grids.items(), optima, ALTERNATIVES[1:], strict=False):
        sizes = [row["params"] for row in rows]
        valleys.plot(sizes, [row["val_loss"] for row in rows], **{**look, "ls": "none"}, ms=6)
        fine = [sizes[0] * (sizes[-1] / sizes[0]) ** (i / 60) for i in range(61)]
        valleys.plot(fine, [best.curve(size) for size in fine], **PREDICTED)
        valleys.plot(best.params, best.loss, marker="*", ms=13, color=look["color"])
        valleys.annotate(
            f"{budget:.0e}".replace("e+", "e"), (fine[-1], best.curve(fine[-1])), (6, 0),
            textcoords="offset points", color=look["color"], va="center",
        )  # fmt: skip
        line.plot(best.budget_flops, best.params, marker="*", ms=13, color=look["color"])
    valleys.plot(live["params"], live["val_loss"], **{**MEASURED, "marker": "x", "ms": 10, "mew": 2}, ls="none")
    valleys.annotate("trained here", (live["params"], live["val_loss"]), (8, 8), textcoords="offset points", color=INK)
    valleys.set(xscale="log", xlabel="parameters", ylabel="validation loss, nats per character")
    valleys.set_title("equal cost on each curve, FLOPs at its end")
    low, high = min(grids), 10 * max(grids)
    line.plot([low, high], [law.at(low)[0], law.at(high)[0]], **PREDICTED)
    line.set(xscale="log", yscale="log", xlabel="budget, FLOPs", ylabel="best number of parameters")
    line.set_title(f"best size grows as budget^{law.exponent:.2f}")
    line.axvline(max(grids), **{**LIMIT, "lw": 1})
    line.annotate(
        "measured\nup to here", (max(grids), law.at(low)[0]), (-6, 0), textcoords="offset points",
        ha="right", color=LIMIT["color"],
    )  # fmt: skip
    for axes in (valleys, line):
        axes.spines[["top", "right"]].set_visible(False)
    valleys.margins(x=0.12)
    return figure


def emergence(points):
    """Left how often the next character is right, right how often five in a row are, against the loss: the same answers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    one, five = figure.subplots(1, 2)
    losses = [point["val_loss"] for point in points]
    ordered = sorted(points, key=lambda point: point["val_loss"])
    one.plot(losses, [100 * point["accuracy"] for point in points], **MEASURED, ls="none")
    five.plot(losses, [100 * point["in_a_row"] for point in points], **MEASURED, ls="none")
    five.plot(
        [point["val_loss"] for point in ordered],
        [100 * point["accuracy"] ** 5 for point in ordered],
        **PREDICTED,
    )
    five.annotate(
        "dashed: if guesses were independent",
        (0.03, 0.93),
        xycoords="axes fraction",
        color=PREDICTED["color"],
    )
    one.set(title="the next character is right", ylabel="%")
    five.set(title="five in a row are right")
    for axes in (one, five):
        axes.invert_xaxis()  # better models to the right
        axes.set(xlabel="validation loss (better →)", ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
    return figure
