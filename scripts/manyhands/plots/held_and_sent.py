"""Bars of what a rank holds and of what it communicates in a step, by strategy, on what the formulas say."""

from manyhands.plots.looks import BYTES, GREY, INK, PREDICTED

KINDS = ("parameters", "optimizer", "gradients")  # what is there between two steps


def held_and_sent(rows, num_params, title):
    """A matplotlib Figure with a bar per row in two panels: bytes per parameter by kind, and the volume of a step.

    `rows`: {name: (held, held by formula, volume, volume by formula, note)}. Held are objects with bytes as attributes,
    one for each of KINDS; volumes are in numbers of parameters, P; the note stands beside the right bar.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure = Figure(figsize=(9.5, 1.6 + 0.3 * len(rows)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for i, (held, formula, volume, expected, note) in enumerate(rows.values()):
        start = 0.0
        for kind in KINDS:
            (colour, hatch), width = BYTES[kind], getattr(held, kind) / num_params
            left.barh(i, width, 0.7, left=start, fc=colour, ec=INK, hatch=hatch)
            start += width
        right.barh(i, volume, 0.7, fc=GREY, ec=INK)
        for axes, value in (
            (left, sum(getattr(formula, kind) for kind in KINDS) / num_params),
            (right, expected),
        ):
            axes.plot([value, value], [i - 0.48, i + 0.48], **PREDICTED)
        right.text(max(volume, expected) + 0.08, i, f"{volume:.2f} P, {note}", va="center")
    left.set_yticks(range(len(rows)), list(rows))
    left.invert_yaxis()
    left.set(xlabel="bytes held per parameter", title=title)
    most = max([volume for _, _, volume, _, _ in rows.values()] + [1.0])
    right.set(xlabel="volume of a step, P", xlim=(0, 1.75 * most))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    keys = [Patch(fc=BYTES[kind][0], ec=INK, hatch=BYTES[kind][1], label=kind) for kind in KINDS]
    keys.append(Line2D([], [], **PREDICTED, label="by formula"))
    figure.legend(handles=keys, loc="outside lower center", ncols=4, frameon=False, handleheight=1.4)
    return figure
