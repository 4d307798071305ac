"""Predicted beside published TFLOP/s per GPU: left the runs of one table, right those of other papers.

table_and_others(table, others, "table 1 of ...")     # a matplotlib Figure; rows: [(label, published, predicted, fitted?)]
"""

from manyhands.plots.looks import ALTERNATIVES, EDGE, INK, PREDICTED

OFF = 0.05  # the thin lines of the left panel: 5 % to either side
OFF_OTHERS = 0.1


def table_and_others(table, others, title):
    """A Figure of two panels, each with the line of a right prediction.

    `table`: [(label, published, predicted, whether it was fitted)], each point with its label, fitted ones hollow.
    `others`: the same, on logarithmic axes with one marker for each label.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _frame(left, table, OFF, title)
    for label, published, predicted, fitted in table:
        left.plot(published, predicted, "o", color=INK, ms=7, fillstyle="none" if fitted else "full", mew=1.4)
        below = predicted < published
        shift, side = ((5, -9), "left") if below else ((-6, 3), "right")
        left.annotate(label, (published, predicted), shift, textcoords="offset points", fontsize=10, ha=side)
    ends = _frame(right, others, OFF_OTHERS, "other papers")
    looks = [look | {"ls": "none"} for look in ALTERNATIVES]
    for i, label in enumerate(dict.fromkeys(row[0] for row in others)):
        points = [row[1:3] for row in others if row[0] == label]
        right.plot(*zip(*points, strict=True), **looks[i % len(looks)], ms=7, label=label)
    right.set(xscale="log", yscale="log")
    ticks = [100, 150, 200, 300, 400, 500]
    for axis in (right.xaxis, right.yaxis):
        axis.set_ticks(ticks, ticks)
        axis.set_ticks([], minor=True)
    right.set(xlim=ends, ylim=ends)
    right.legend(frameon=False, loc="upper left", fontsize=10)
    return figure


def _frame(axes, rows, off, title):
    """Equal axes around the rows, with the line of a right prediction and thin ones `off` to either side; their ends."""
    numbers = [number for row in rows for number in row[1:3]]
    ends = [0.96 * min(numbers), 1.05 * max(numbers)]
    axes.plot(ends, ends, **PREDICTED)
    for sign in (1, -1):
        axes.plot(ends, [end * (1 + sign * off) for end in ends], color=EDGE, lw=1)
    axes.set(xlim=ends, ylim=ends, xlabel="published TFLOP/s per GPU", ylabel="predicted TFLOP/s per GPU")
    axes.set_title(f"{title} (thin lines: {100 * off:.0f} % off)", fontsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    return ends
