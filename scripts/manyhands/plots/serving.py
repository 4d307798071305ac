"""Plots of lesson 14: what a decode step reads from memory by users, next to the latencies of a real server."""

from manyhands.plots import looks


def reads_and_published(curves, published, title):
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
