"""Plots of lesson 07."""

from manyhands.plots import looks
from manyhands.plots.bars import by_prediction


def draw_kept_for_backward(kept, title):
    """Draw the bytes that a rank keeps between forward and backward, a bar for each way. Return a Figure.

    `kept`: {way: (bytes measured, bytes that every rank keeps by formula, bytes of its share by formula)}; the measured
    bar is divided where the formula says.
    """
    from matplotlib.patches import Patch

    figure, axes = looks.new_figure(7, 2.6)
    colour, hatch = looks.BYTES["activations"]
    for i, (measured, whole, share) in enumerate(kept.values()):
        looks.stacked(axes, i, [(whole / 1e6, looks.GREY, ""), ((measured - whole) / 1e6, colour, hatch)], 0.6)
        by_prediction(axes, i, (whole + share) / 1e6)
        axes.text((max(measured, whole + share)) / 1e6, i, f"  {measured / 1e6:.2f} MB", va="center")
    axes.set(xlabel="kept for backward, MB", title=title)
    axes.set_xlim(0, 1.35 * max(row[0] for row in kept.values()) / 1e6)
    axes.set_yticks(range(len(kept)), list(kept))
    axes.invert_yaxis()
    keys = [
        Patch(fc=looks.GREY, ec=looks.INK, label="whole on every rank"),
        Patch(fc=colour, ec=looks.INK, hatch=hatch, label="divided among ranks"),
    ]
    _legend_below(axes, [*keys, _by_formula()])
    return figure


def draw_layer_times(times, alone_s, title, published=()):
    """Draw how long a layer takes, a bar for each placement, with its communication hatched. Return a Figure.

    `times`: {placement: (seconds, of which communication, seconds by formula)}; `alone_s`: seconds of one rank that has
    the whole layer, or None for no such bar. published: dicts with `name` and `points`, [[ranks in the group, tokens/s
    of each GPU], ...], drawn in a panel on the right with a line where the group leaves a node of 8.
    """
    from matplotlib.patches import Patch

    rows = ({"one GPU alone": (alone_s, 0.0, alone_s)} if alone_s else {}) | times
    size = (9.5 if published else 7, max(3.2, 1.4 + 0.32 * len(rows)))
    figure, panels = looks.new_figure(*size, 1, 2 if published else 1, squeeze=False)
    left = panels[0][0]
    for i, (total, communication, formula) in enumerate(rows.values()):
        pieces = [(1e3 * (total - communication), looks.GREY, ""), (1e3 * communication, "none", looks.HATCH)]
        looks.stacked(left, i, pieces if communication else pieces[:1], 0.6)
        by_prediction(left, i, 1e3 * formula)
        left.text(1e3 * total, i, f"  {1e3 * total:.2f} ms", va="center")
    left.set(xlabel="ms", title=title)
    left.set_xlim(0, 1.3e3 * max(row[0] for row in rows.values()))
    left.set_yticks(range(len(rows)), list(rows))
    left.invert_yaxis()
    keys = [
        Patch(fc=looks.GREY, ec=looks.INK, label="compute"),
        Patch(fc="none", **looks.ACTIVITIES["communication"], label="communication"),
    ]
    _legend_below(left, [*keys, _by_formula()])
    for axes in panels[0][1:]:
        for look, curve in zip(looks.ALTERNATIVES, published, strict=False):
            axes.semilogx(*zip(*curve["points"], strict=True), ms=5, label=curve["name"], **look)
        ticks = sorted({size for curve in published for size, _ in curve["points"]})
        axes.set_xticks(ticks, ticks)
        axes.minorticks_off()
        axes.axvline(8 * 2**0.5, **looks.LIMIT, label="end of a node")
        axes.set(xlabel="GPUs of the tensor-parallel group", ylabel="tokens/s per GPU", ylim=(0, None))
        axes.set_title("a real machine, 3 B model")
        axes.legend(frameon=False, loc="lower left")
    return figure


def _legend_below(axes, keys):
    place = 0.45, -0.7 / axes.figure.get_figheight()
    below = {"loc": "upper center", "bbox_to_anchor": place, "frameon": False, "handleheight": 1.3}
    axes.legend(handles=keys, ncols=len(keys), **below)


def _by_formula():
    from matplotlib.lines import Line2D

    return Line2D([], [], **looks.PREDICTED, label="by formula")
