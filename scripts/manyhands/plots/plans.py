"""Plots of the planner: what its plans hold and take, and its predictions beside published runs.

plans(rows, memory_bytes, title).savefig("plan.png")
table_and_others(table, others, "table 1").savefig("published.png")
"""

from manyhands.plots.looks import ALTERNATIVES, BYTES, EDGE, GREY, HATCH, INK, LIMIT, PREDICTED, new_figure, tint

GB = 1e9
KINDS = {"accumulated_gradients": "gradients", "workspace": "other"}  # those that `looks` has no colour of its own for
COMPUTE, MESSAGES = (("compute", "memory", "optimizer"), ("tensor", "context", "experts", "pipeline", "data", "host"))
STRENGTH = {"compute": 0.75, "memory": 0.5, "optimizer": 0.3}


def plans(rows, memory_bytes, title):
    """Left each plan's bytes by kind and the memory's limit, right the seconds of a step by what the GPU waits for.

    rows: [(name, {kind: bytes on the GPU}, {part: seconds})], the recommended plan first.
    """
    figure, (left, right) = new_figure(12, 2.6 + 0.36 * len(rows), 1, 2, sharey=True)
    longest = max(sum(seconds.values()) for _, _, seconds in rows)
    for row, (_, held, seconds) in enumerate(rows):
        _stack(left, row, [(kind.replace("_", " "), size / GB, *_look_of_bytes(kind)) for kind, size in held.items()])
        shown = [(part, value) for part, value in seconds.items() if value > longest / 500]
        _stack(right, row, [(part, value, *_look_of_time(part)) for part, value in shown])
    left.axvline(memory_bytes / GB, **LIMIT, label="memory")
    left.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    left.set(xlabel="GB per GPU", title=title, xlim=(0, memory_bytes / GB * 1.06))
    right.set(xlabel="predicted seconds per step", xlim=(0, None))
    left.set_ylim(len(rows) - 0.4, -0.6)
    for axes in (left, right):
        handles, labels = axes.get_legend_handles_labels()
        once = dict(zip(labels, handles, strict=True))
        below = {"loc": "upper left", "bbox_to_anchor": (0, -0.7 / (0.36 * len(rows) + 0.6))}
        axes.legend(once.values(), once, frameon=False, ncols=3, fontsize=9, **below)
    return figure


def _stack(axes, row, pieces):
    start = 0.0
    for label, size, colour, hatch in pieces:
        if size > 0:
            axes.barh(row, size, left=start, height=0.62, fc=colour, hatch=hatch, ec=INK, lw=0.6, label=label)
            start += size


def _look_of_bytes(kind):
    colour, hatch = BYTES[KINDS.get(kind, kind)]
    return (tint(colour, 0.5), hatch) if kind == "accumulated_gradients" else (colour, hatch)


def _look_of_time(part):
    """Compute is solid, messages are hatched, idle time is pale."""
    if part in MESSAGES:
        shades = (EDGE, tint(EDGE, 0.8), tint(INK, 0.35), GREY, tint(EDGE, 0.2), tint(EDGE, 0.6))
        return shades[MESSAGES.index(part)], HATCH
    return (tint(INK, STRENGTH[part]), "") if part in COMPUTE else (tint(GREY, 0.4), "")


OFF = 0.05  # the thin lines of the left panel: 5 % to either side
OFF_OTHERS = 0.1


def table_and_others(table, others, title):
    """A Figure of two panels, each with the line of a right prediction.

    `table`: [(label, published, predicted, whether it was fitted)], each point with its label, fitted ones hollow.
    `others`: the same, on logarithmic axes with one marker for each label.
    """
    figure, (left, right) = new_figure(11.5, 5.2, 1, 2)
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
    """Equal axes around the rows, the line of a right prediction, thin ones `off` to either side. Returns its ends."""
    numbers = [number for row in rows for number in row[1:3]]
    ends = [0.96 * min(numbers), 1.05 * max(numbers)]
    axes.plot(ends, ends, **PREDICTED)
    for sign in (1, -1):
        axes.plot(ends, [end * (1 + sign * off) for end in ends], color=EDGE, lw=1)
    axes.set(xlim=ends, ylim=ends, xlabel="published TFLOP/s per GPU", ylabel="predicted TFLOP/s per GPU")
    axes.set_title(f"{title} (thin lines: {100 * off:.0f} % off)", fontsize=12)
    return ends
