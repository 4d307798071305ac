"""Plots of lesson 13."""

import numpy as np

from manyhands.plots import looks


def draw_kl(runs, chance):
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


def draw_token_weights(lengths, weights):
    """Draw the weight of each token of an answer against the answer's length. weights: {loss: one for each length}."""
    figure, axes = looks.new_figure(7, 3.2)
    for (name, values), look in zip(weights.items(), looks.ALTERNATIVES, strict=False):
        axes.plot(lengths, values, **look | {"ms": 4}, label=name)
    axes.legend(frameon=False)
    axes.set(xlabel="tokens of the answer", ylabel="weight of each", title="how much a token counts in the loss")
    axes.set(xlim=(0, None), ylim=(0, None))
    return figure


def draw_stale(ratios, rewards, published):
    """Draw importance ratios and mean rewards by staleness, and next to them published seconds of a step in two ways.

    ratios: {staleness: values}; rewards: {staleness: mean reward by step}; published: series whose points are
    [place, seconds] of the parts in the field `parts`, drawn on top of each other.
    """
    figure, (left, middle, right) = looks.new_figure(12, 3.6, 1, 3)
    edges = np.geomspace(1 / 3, 3, 40)
    for (k, values), look in zip(ratios.items(), looks.ALTERNATIVES, strict=False):
        counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges)
        left.stairs(100 * counts / max(1, len(values)), edges, color=look["color"], ls=look["ls"], lw=1.8)
        middle.plot(rewards[k], color=look["color"], ls=look["ls"], lw=1.8, label=f"{k}")
    for limit in (0.8, 1.2):
        left.axvline(limit, **looks.LIMIT)
    left.set(xscale="log", yscale="log", xlabel="p / p_old", ylabel="% of the tokens", title="importance ratios")
    left.set_xticks([1 / 3, 0.8, 1.2, 3], ["1/3, less", 0.8, 1.2, "3, more"])  # the outermost bars hold what is beyond
    left.minorticks_off()
    middle.set(xlabel="step", ylim=(0, 1.02), title="mean reward")
    middle.legend(frameon=False, title="staleness", loc="lower right")
    for place, series in enumerate(published):
        below = 0
        for (_, seconds), part in zip(series["points"], series["parts"], strict=True):
            shade = looks.PAPER if part in ("old log p", "other") else looks.GREY
            right.bar(place, seconds, bottom=below, color=shade, edgecolor=looks.INK, width=0.6)
            right.text(place, below + seconds / 2, f"{part} {seconds}", ha="center", va="center", fontsize=9)
            below += seconds
    right.set_xticks(range(len(published)), [series["name"] for series in published], fontsize=9)
    right.set(title="published: seconds of a step", ylim=(0, None))
    return figure


def draw_answers_seen(shares, budgets, chance):
    """Draw a bar for each stage, a point for each seed, and under each bar the answers that it took.

    shares: {stage: accuracy of each seed}; budgets: {stage: (gold answers, answers seen)}.
    """
    figure, axes = looks.new_figure(8, 3.8)
    for place, (_, found) in enumerate(shares.items()):
        mean = 100 * sum(found) / len(found)
        axes.bar(place, mean, color=looks.GREY, edgecolor=looks.INK, width=0.6)
        points = looks.MEASURED | {"ls": "none", "mfc": "none"}
        axes.plot([place] * len(found), [100 * share for share in found], **points)
        axes.text(place + 0.34, mean, f"{mean:.0f} %", va="center")
    axes.axhline(100 * chance, **looks.PREDICTED)
    looks.note(axes, "chance", (len(shares) - 0.25, 100 * chance), (0, 4), looks.PREDICTED["color"], ha="right")
    labels = [f"{name}\n{budgets[name][0]} gold,\n{budgets[name][1]:,} seen" for name in shares]
    axes.set_xticks(range(len(shares)), labels)
    axes.set(ylim=(0, 108), xlim=(-0.6, len(shares) - 0.2), ylabel="% of held-out words right")
    axes.set_title("bars: means; a point per seed")
    return figure
