"""Plots of lesson 10."""

from manyhands.plots import looks
from manyhands.plots.bars import KINDS, MESSAGES, by_prediction, legend_of


def draw_planned_and_held(rows, title):
    """A matplotlib Figure with a stacked bar per layout.

    `rows`: [(name, {kind: bytes held}, bytes planned)], with a value for each of KINDS.
    """
    figure, axes = looks.new_figure(8.6, 1.6 + 0.34 * len(rows))
    most = max(max(sum(held.values()), planned) for _, held, planned in rows)
    for i, (_, held, planned) in enumerate(rows):
        total = 1e3 * looks.stacked(axes, i, [(held[kind] / 1e3, *looks.BYTES[kind]) for kind in KINDS], 0.64)
        by_prediction(axes, i, planned / 1e3, 0.5, lw=2.2, zorder=3)
        said = f"{total / 1e3:,.1f} kB, planned {planned / 1e3:,.1f}"
        axes.text((max(total, planned) + 0.015 * most) / 1e3, i, said, va="center")
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.invert_yaxis()
    axes.set(xlabel="kB on the fullest rank", title=title, xlim=(0, 1.34 * most / 1e3))
    legend_of(figure, "planned")
    return figure


def draw_waits(rows, title):
    """Draw the milliseconds of a step that a GPU waits for messages: a bar for each order of the axes, by axis.

    rows: {order: {axis: ms}}. Return a Figure.
    """
    from matplotlib.patches import Patch

    figure, axes = looks.new_figure(9, 1.7 + 0.4 * len(rows))
    most = max(sum(row.values()) for row in rows.values())
    for i, row in enumerate(rows.values()):
        pieces = [(ms, *_look_of_time(axis)) for axis, ms in row.items() if ms]
        axes.text(looks.stacked(axes, i, pieces, 0.6), i, f"  {sum(row.values()):,.0f} ms", va="center")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set(xlabel="ms per step", title=title, xlim=(0, 1.18 * most))
    looked = {axis: _look_of_time(axis) for row in rows.values() for axis in row}
    keys = [Patch(fc=colour, ec=looks.INK, hatch=hatch, label=axis) for axis, (colour, hatch) in looked.items()]
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False, handleheight=1.3)
    return figure


def draw_layouts(published, predicted, title):
    """Draw the published speed of each layout as points on a bar, and a dashed mark where it is predicted.

    published: dicts with `name` and `points`, [[tensor ranks, TFLOP/s per GPU], ...], a point for each time that it was
    measured. predicted: TFLOP/s of each, in the same order. Return a Figure.
    """
    from matplotlib.lines import Line2D

    figure, axes = looks.new_figure(9, 1.7 + 0.4 * len(published))
    for i, (one, guess) in enumerate(zip(published, predicted, strict=True)):
        values = [value for _, value in one["points"]]
        axes.barh(i, max(values), 0.6, fc=looks.GREY, ec=looks.INK)
        axes.plot(values, [i] * len(values), **looks.MEASURED | {"ls": "none"})
        by_prediction(axes, i, guess, lw=2.2, zorder=3)
        axes.text(max(*values, guess), i, f"   {max(values):.0f}, predicted {guess:.0f}", va="center")
    axes.set_yticks(range(len(published)), [one["name"] for one in published])
    axes.invert_yaxis()
    most = max(value for one in published for _, value in one["points"])
    axes.set(xlabel="TFLOP/s per GPU", title=title, xlim=(0, 1.35 * most))
    keys = [
        Line2D([], [], **looks.MEASURED | {"ls": "none"}, label="published"),
        Line2D([], [], **looks.PREDICTED, label="predicted"),
    ]
    figure.legend(handles=keys, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _look_of_time(part):
    """Return (colour, hatch) of the messages of an axis."""
    strengths = (1, 0.8, 0.5, 0.35, 0.15, 0.6)
    return looks.tint(looks.EDGE, strengths[MESSAGES.index(part)]), looks.HATCH
