"""Plots of lesson 14."""

import statistics

from manyhands.plots import looks


def draw_tokens(samples, predicted, alpha):
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


def draw_reads_and_published(curves, published, title):
    """Left the GB that a decode step reads by users, up to a full GPU; right published latencies by concurrency.

    curves: {model: (GB of its weights, GB of a user's cache, users that fit)}. published: series of time to first token
    and of time per token, dicts with `name`, `hardware` and `points`, [[users, ms], ...]; further ones are not drawn.
    """
    figure, (left, right) = looks.new_figure(11, 4.3, 1, 2)
    for i, ((name, (weights, each, fit)), look) in enumerate(zip(curves.items(), looks.ALTERNATIVES, strict=False)):
        users = range(fit + 1)
        left.plot(users, [weights + n * each for n in users], color=look["color"], lw=1.8)
        left.plot(fit, weights + fit * each, color=look["color"], marker=look["marker"], ms=6)
        text = f"{name}\n{fit} users"
        shift, side = ((8, -8), "left") if not i else ((0, -72), "right")  # beside a steep line, below a flat one
        looks.note(left, text, (fit, weights + fit * each), shift, va="top", ha=side)
    most = max(fit for _, _, fit in curves.values())
    heaviest = max(weights for weights, _, _ in curves.values())
    left.plot([0, most], [heaviest, heaviest], **looks.PREDICTED)
    looks.note(left, "weights alone", (most, heaviest), (0, -14), looks.PREDICTED["color"], ha="right")
    left.set(xlabel="users, 4,096 positions each", ylabel="GB read per step", title=title)
    left.set(xlim=(0, None), ylim=(0, 92))
    for one, look in zip(published[:2], looks.ALTERNATIVES, strict=False):
        x, y = zip(*one["points"], strict=True)
        right.loglog(x, y, **look, ms=5)
        looks.note(right, one["name"], (x[0], y[0]), (0, 14))
    looks.plain_log_ticks(right.xaxis, subs=(1, 2.5, 5))
    looks.plain_log_ticks(right.yaxis, "{x:,g}", subs=(1,))
    right.set(xlabel="users at the same time", ylabel="ms", title=f"published: {published[0]['hardware']}")
    return figure
