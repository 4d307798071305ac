"""What runs reached: losses of a killed run, scaling laws, rewards of alignment, tokens per call with draft tokens."""

import math
import statistics

from manyhands.plots import looks

SIZES = (11, 8, 5)  # of the markers: where two lives made the same step both stay in sight


def killed_and_resumed(undisturbed, lives, title):
    """The losses of all lives over the undisturbed curve; below them each life's loss minus the undisturbed one.

    undisturbed: {step: loss}; lives: for each start of the run {step: loss}, with steps that `undisturbed` has.
    """
    figure, (above, below) = looks.new_figure(8, 4, 2, 1, sharex=True, height_ratios=[3, 1])
    above.plot(list(undisturbed), list(undisturbed.values()), color=looks.FAINT, lw=8)
    first = next(iter(undisturbed))
    looks.note(above, "undisturbed", (first, undisturbed[first]), (12, -2))
    residuals = []
    for i, own in enumerate(lives):
        style = looks.ALTERNATIVES[i % len(looks.ALTERNATIVES)] | {"ms": SIZES[i % len(SIZES)], "mfc": "none"}
        above.plot(list(own), list(own.values()), **style)
        label = {"size": 10, "color": style["color"], "ha": "center", "va": "top"}
        above.text((min(own) + max(own)) / 2, 0.97, f"life {i + 1}", transform=above.get_xaxis_transform(), **label)
        residuals.append([loss - undisturbed[step] for step, loss in own.items()])
        below.plot(list(own), residuals[-1], **style)
    low, high = above.get_ylim()
    above.set(ylim=(low, high + (high - low) / 6), ylabel="loss", title=title)  # room for the labels
    furthest = max((abs(residual) for life in residuals for residual in life), default=0)
    below.set(xlabel="step", ylabel="residual", ylim=(-1.2 * furthest or -1e-6, 1.2 * furthest or 1e-6))
    return figure


def estimates(of_ranks, hashes):
    """Each rank's pairs (true similarity, estimate), the diagonal, and one standard deviation on both sides of it."""
    figure, axes = looks.new_figure(6, 4.2)
    line = [i / 100 for i in range(101)]
    sigma = [math.sqrt(j * (1 - j) / hashes) for j in line]
    axes.plot(line, line, color=looks.QUIET, lw=1)
    for sign in (-1, 1):
        axes.plot(line, [j + sign * s for j, s in zip(line, sigma, strict=True)], **looks.PREDICTED)
    for rank, pairs in enumerate(of_ranks):
        if pairs:
            axes.plot(
                *zip(*pairs, strict=True), ls="none", marker="o^sDv<>p"[rank % 8], ms=5, mfc="none",
                color=looks.rank_colour(rank), label=f"rank {rank}",
            )  # fmt: skip
    known, colour = "± sqrt(J (1 - J) / K)", looks.PREDICTED["color"]
    looks.note(axes, known, (0.5, 0.5 + sigma[50]), (-8, 6), colour, ha="right")
    axes.legend(frameon=False, loc="lower right")
    axes.set(xlabel="true similarity J", ylabel=f"estimate from {hashes} hashes", xlim=(0, 1.02), ylim=(0, 1.02))
    return figure


def isoflop(grids, optima, law, live):
    """Left the losses of each budget with its parabola and lowest point, right the lowest points and their line.

    grids: {budget: points}; optima and law: of `predict.scaling`; live: a point that was trained just now.
    """
    figure, (valleys, line) = looks.new_figure(10, 4.2, 1, 2, width_ratios=[1.5, 1])
    for (budget, rows), best, look in zip(grids.items(), optima, looks.ALTERNATIVES[1:], strict=False):
        sizes = [row["params"] for row in rows]
        valleys.plot(sizes, [row["val_loss"] for row in rows], **{**look, "ls": "none"}, ms=6)
        fine = [sizes[0] * (sizes[-1] / sizes[0]) ** (i / 60) for i in range(61)]
        valleys.plot(fine, [best.curve(size) for size in fine], **looks.PREDICTED)
        valleys.plot(best.params, best.loss, marker="*", ms=13, color=look["color"])
        flops = f"{budget:.0e}".replace("e+", "e")
        looks.note(valleys, flops, (fine[-1], best.curve(fine[-1])), (6, 0), look["color"], va="center")
        line.plot(best.budget_flops, best.params, marker="*", ms=13, color=look["color"])
    valleys.plot(live["params"], live["val_loss"], **{**looks.MEASURED, "marker": "x", "ms": 10, "mew": 2}, ls="none")
    looks.note(valleys, "trained here", (live["params"], live["val_loss"]), (8, 8))
    valleys.set(xscale="log", xlabel="parameters", ylabel="validation loss, nats per character")
    valleys.set_title("equal cost on each curve, FLOPs at its end")
    low, high = min(grids), 10 * max(grids)
    line.plot([low, high], [law.at(low)[0], law.at(high)[0]], **looks.PREDICTED)
    line.set(xscale="log", yscale="log", xlabel="budget, FLOPs", ylabel="best number of parameters")
    line.set_title(f"best size grows as budget^{law.exponent:.2f}")
    line.axvline(max(grids), **{**looks.LIMIT, "lw": 1})
    edge, colour = (max(grids), law.at(low)[0]), looks.LIMIT["color"]
    looks.note(line, "measured\nup to here", edge, (-6, 0), colour, ha="right")
    valleys.margins(x=0.12)
    return figure


def emergence(points):
    """How often the next character (left) and five in a row (right) are right in the same answers, against the loss."""
    figure, (one, five) = looks.new_figure(9, 3.6, 1, 2)
    losses = [point["val_loss"] for point in points]
    ordered = sorted(points, key=lambda point: point["val_loss"])
    one.plot(losses, [100 * point["accuracy"] for point in points], **looks.MEASURED, ls="none")
    five.plot(losses, [100 * point["in_a_row"] for point in points], **looks.MEASURED, ls="none")
    five.plot(
        [point["val_loss"] for point in ordered], [100 * point["accuracy"] ** 5 for point in ordered], **looks.PREDICTED
    )
    known, colour = "dashed: if guesses were independent", looks.PREDICTED["color"]
    five.text(0.03, 0.93, known, transform=five.transAxes, color=colour)
    one.set(title="the next character is right", ylabel="%")
    five.set(title="five in a row are right")
    for axes in (one, five):
        axes.invert_xaxis()  # better models to the right
        axes.set(xlabel="validation loss (better →)", ylim=(0, None))
    return figure


def reward_and_kl(runs, chance):
    """A matplotlib Figure with three panels over the steps: mean reward, accuracy on held-out words, KL per answer.

    `runs`: {name: ([(step, mean reward, KL in nats)], {step: accuracy})}; the accuracy of chance is a dashed line.
    """
    figure, axes = looks.new_figure(9.5, 3.2, 1, 3)
    for (name, (points, shares)), look in zip(runs.items(), looks.ALTERNATIVES, strict=False):
        steps, rewards, kls = zip(*points, strict=True)
        line = {key: look[key] for key in ("color", "ls")} | {"lw": 1.6}
        axes[0].plot(steps, rewards, **line)
        axes[1].plot(list(shares), list(shares.values()), ms=5, **(look | {"lw": 1.6}))
        axes[2].plot(steps, kls, label=name, **line)
    axes[1].axhline(chance, **looks.PREDICTED)
    axes[1].text(0.99, chance + 0.03, "chance", transform=axes[1].get_yaxis_transform(), ha="right", va="bottom")
    for panel, title in zip(axes, ("mean reward", "held-out accuracy", "KL, nats per answer"), strict=True):
        panel.set(title=title, xlabel="step")
    for panel in axes[:2]:
        panel.set_ylim(-0.03, 1.05)
    figure.legend(loc="outside lower center", ncols=len(runs), frameon=False, title="trained on the reward of")
    return figure


def stages(shares, chance):
    """A matplotlib Figure: the accuracy on held-out words after each stage, a point per seed, over chance.

    `shares`: {stage: [accuracy of each seed]}.
    """
    figure, axes = looks.new_figure(7, 3.4)
    for i, found in enumerate(shares.values()):
        axes.plot([i] * len(found), found, **(looks.MEASURED | {"ls": "none", "ms": 7, "mfc": "none"}))
        axes.text(i + 0.12, sum(found) / len(found), f"{sum(found) / len(found):.0%}", va="center")
    axes.axhline(chance, **looks.PREDICTED)
    axes.text(len(shares) - 0.45, chance + 0.015, "chance", ha="right", va="bottom")
    axes.set_xticks(range(len(shares)), list(shares))
    axes.set(
        xlim=(-0.5, len(shares) - 0.4),
        ylim=(-0.03, 1.05),
        ylabel="held-out words right",
        title="a point per seed, and their mean",
    )
    return figure


def tokens_per_call(samples, predicted, alpha):
    """Points of each text's tokens per call, with whiskers from the least to the most, and the formula as a line.

    samples: {draft tokens: rates of texts}; predicted: {draft tokens: rate}; alpha: the share of them that are kept.
    """
    figure, axes = looks.new_figure(7.5, 4)
    for k, rates in samples.items():
        middle, errors = looks.errorbars([rates], middle=statistics.mean)
        axes.errorbar(k, middle, yerr=errors, **looks.WHISKERS | looks.MEASURED)
    ks = sorted(predicted)
    axes.plot(ks, [predicted[k] for k in ks], **looks.PREDICTED)
    formula, colour = f"formula, alpha = {alpha:.2f}", looks.PREDICTED["color"]
    looks.note(axes, formula, (ks[-1], predicted[ks[-1]]), (-14, 8), colour, ha="right")
    axes.set(
        xlabel="draft tokens k per call of the large model", ylabel="tokens written per call",
        xticks=ks, ylim=(1, None), title="points: mean of the texts; whiskers: least and most",
    )  # fmt: skip
    return figure
