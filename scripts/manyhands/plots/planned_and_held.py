"""Bars of the bytes that a rank holds in each layout, on the planner's dashed lines."""

from manyhands.plots.looks import BYTES, INK, PREDICTED

KINDS = ("parameters", "optimizer", "gradients")  # what is there between two steps


def planned_and_held(rows, title):
    """A matplotlib Figure with a stacked bar per layout.

    `rows`: [(name, {kind: bytes held}, bytes planned)], with a value for each of KINDS.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure = Figure(figsize=(8.6, 1.6 + 0.34 * len(rows)), layout="constrained")
    axes = figure.subplots()
    most = max(max(sum(held.values()), planned) for _, held, planned in rows)
    for i, (_, held, planned) in enumerate(rows):
        start = 0.0
        for kind in KINDS:
            colour, hatch = BYTES[kind]
            axes.barh(i, held[kind] / 1e3, 0.64, left=start / 1e3, fc=colour, ec=INK, hatch=hatch)
            start += held[kind]
        axes.plot([planned / 1e3] * 2, [i - 0.5, i + 0.5], **PREDICTED | {"lw": 2.2}, zorder=3)
        said = f"{start / 1e3:,.1f} kB, planned {planned / 1e3:,.1f}"
        axes.text((max(start, planned) + 0.015 * most) / 1e3, i, said, va="center")
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.invert_yaxis()
    axes.set(xlabel="kB on the fullest rank", title=title, xlim=(0, 1.34 * most / 1e3))
    axes.spines[["top", "right"]].set_visible(False)
    keys = [Patch(fc=BYTES[kind][0], ec=INK, hatch=BYTES[kind][1], label=kind) for kind in KINDS]
    keys.append(Line2D([], [], **PREDICTED, label="planned"))
    figure.legend(handles=keys, loc="outside lower center", ncols=4, frameon=False, handleheight=1.4)
    return figure
