"""Draw results of runs: losses of a killed run, scaling laws, rewards of alignment, tokens per call with draft tokens;
which rank read what and how far apart trainings are; and the planner's predictions beside published runs.

Series have shades and markers, not the ranks' colours: a curve is a run, a batch, a formula. Whiskers: least and most.
"""

import math
import statistics

from manyhands.plots import looks

OFF = 0.05  # the thin lines of the left panel: 5 % to either side
OFF_OTHERS = 0.1
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
    axes.set(xlabel="draft tokens k per call of the large model", ylabel="tokens written per call")
    axes.set(xticks=ks, ylim=(1, None), title="points: mean of the texts; whiskers: least and most")
    return figure


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

    pairs: {name: (losses [steps], losses of one rank [steps])}, four at most. Equal losses have no point.
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


def curves(named, ylabel, title):
    """Draw one line per name, the first one wide, so that equal lines can be told. named: {name: values by update}."""
    figure, axes = looks.new_figure(7.5, 3.4)
    for (name, values), look, width in zip(named.items(), looks.ALTERNATIVES, (5, 1.6, 1.6), strict=False):
        axes.plot(values, **look | {"lw": width, "marker": "none"}, label=name)
    axes.legend(frameon=False)
    axes.set(xlabel="update", ylabel=ylabel, title=title)
    return figure


def batch_growth(here, published, title):
    """Draw this model's noise scale and published batches, in tokens, against tokens read; both axes logarithmic.

    here: [[tokens read, noise scale in tokens], ...]. published: dicts with `name` and `points` of the same kind.
    """
    figure, axes = looks.new_figure(7.5, 3.6)
    series = {"noise scale here": here} | {f"batch of {one['name']}": one["points"] for one in published}
    for (name, points), look in zip(series.items(), looks.ALTERNATIVES, strict=False):
        x, y = zip(*points, strict=True)
        axes.loglog(x, y, **look | {"ms": 5})
        looks.note(axes, name, (x[0], y[0]), (0, 8), look["color"])
    axes.margins(y=0.15)
    axes.set(xlabel="tokens read", ylabel="tokens per update", title=title)
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
            middles, errors = looks.errorbars([found for _, found in runs], middle=statistics.mean)
            x = [rate for rate, _ in runs]
            axes.errorbar(x, middles, yerr=errors, **{**looks.WHISKERS, **look, "ms": 5})
            up = 8 if middles[0] == max(statistics.mean(losses[kind, b, x[0]]) for b in batches) else -18
            looks.note(axes, f"batch {batch}", (x[0], middles[0]), (2, up + 6 if up > 0 else up), look["color"])
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
    known = "predicted: variance of one × (1/B - 1/256)"
    looks.end_label(axes, sizes[0], predicted[0], known, looks.PREDICTED["color"])
    axes.set(xlabel="sequences B", ylabel="squared distance", title="noise of the gradient of B sequences")
    axes.set_xticks(sizes, sizes)
    axes.minorticks_off()
    return figure


def scaling(sizes, virtual_s, curves_s, speed_ups):
    """Left virtual step times on `sizes` ranks and curves up to many ranks, right this machine's speed-ups."""
    figure, (left, right) = looks.new_figure(10, 3.8, 1, 2)
    dotted = {"color": looks.ALTERNATIVES[2]["color"], "ls": ":", "lw": 1.6}
    styles = (looks.PREDICTED, looks.PREDICTED | {"ls": "-."}, dotted)
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


MARKERS = "os^DvP<X>*"  # one for each source


def table_and_others(table, others, title):
    """A Figure of two panels, each with the line of a right prediction.

    `table`: [(label, published, predicted, whether it was fitted)], each point with its label, fitted ones hollow.
    `others`: the same, on logarithmic axes with one marker for each label.
    """
    figure, (left, right) = looks.new_figure(11.5, 5.2, 1, 2)
    _frame(left, table, OFF, title)
    for label, published, predicted, fitted in table:
        left.plot(published, predicted, "o", color=looks.INK, ms=7, fillstyle="none" if fitted else "full", mew=1.4)
        below = predicted < published
        shift, side = ((5, -9), "left") if below else ((-6, 3), "right")
        left.annotate(label, (published, predicted), shift, textcoords="offset points", fontsize=10, ha=side)
    ends = _frame(right, others, OFF_OTHERS, "other sources")
    for i, label in enumerate(dict.fromkeys(row[0] for row in others)):
        look = looks.ALTERNATIVES[i % len(looks.ALTERNATIVES)] | {"ls": "none", "ms": 7, "mew": 1.2}
        look["marker"] = MARKERS[i % len(MARKERS)]
        right.plot([], [], label=label, **look)
        for _, published, predicted, fitted in (row for row in others if row[0] == label):
            right.plot(published, predicted, fillstyle="none" if fitted else "full", **look)
    right.set(xscale="log", yscale="log")
    ticks = [100, 150, 200, 300, 400, 500]
    for axis in (right.xaxis, right.yaxis):
        axis.set_ticks(ticks, ticks)
        axis.set_ticks([], minor=True)
    right.set(xlim=ends, ylim=ends)
    right.legend(frameon=False, loc="upper left", fontsize=10)
    return figure


def _frame(axes, rows, off, title):
    """Equal axes around the rows, the line of a right prediction, thin ones `off` to either side. Return its ends."""
    numbers = [number for row in rows for number in row[1:3]]
    ends = [0.96 * min(numbers), 1.05 * max(numbers)]
    axes.plot(ends, ends, **looks.PREDICTED)
    for sign in (1, -1):
        axes.plot(ends, [end * (1 + sign * off) for end in ends], color=looks.EDGE, lw=1)
    axes.set(xlim=ends, ylim=ends, xlabel="published TFLOP/s per GPU", ylabel="predicted TFLOP/s per GPU")
    axes.set_title(f"{title} (thin lines: {100 * off:.0f} % off)", fontsize=12)
    return ends
