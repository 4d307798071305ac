"""Draw results of runs: losses of a killed run, scaling laws, rewards of alignment, tokens per call with draft tokens;
which rank read what and how far apart trainings are; and the planner's predictions beside published runs.

Series have shades and markers, not the ranks' colours: a curve is a run, a batch, a formula. Whiskers: least and most.
"""

from manyhands.plots import looks

OFF = 0.05  # the thin lines of the left panel: 5 % to either side
OFF_OTHERS = 0.1


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
        below = predicted < published and predicted == min(row[2] for row in table if row[1] == published)
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
