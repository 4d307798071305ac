"""Bars: what ranks hold, send, keep and compute, beside the formulas; the planner's plans; what became of a text."""

from manyhands.plots import looks

KINDS = ("parameters", "optimizer", "gradients")  # what is there between two steps
GB = 1e9
COMPUTE, MESSAGES = (("compute", "memory", "optimizer"), ("tensor", "context", "experts", "pipeline", "data", "host"))


def held_and_sent(rows, num_params, title):
    """A matplotlib Figure with a bar per row in two panels: bytes per parameter by kind, and the volume of a step.

    `rows`: {name: (held, held by formula, volume, volume by formula, note)}. Held are objects with bytes as attributes,
    one for each of KINDS; volumes are in numbers of parameters, P; the note stands beside the right bar.
    """
    figure, (left, right) = looks.new_figure(9.5, 1.6 + 0.3 * len(rows), 1, 2, sharey=True)
    for i, (held, formula, volume, expected, note) in enumerate(rows.values()):
        looks.stacked(left, i, [(getattr(held, kind) / num_params, *looks.BYTES[kind]) for kind in KINDS], 0.7)
        right.barh(i, volume, 0.7, fc=looks.GREY, ec=looks.INK)
        for axes, value in ((left, sum(getattr(formula, kind) for kind in KINDS) / num_params), (right, expected)):
            by_prediction(axes, i, value, 0.48)
        right.text(max(volume, expected) + 0.08, i, f"{volume:.2f} P, {note}", va="center")
    left.set_yticks(range(len(rows)), list(rows))
    left.invert_yaxis()
    left.set(xlabel="bytes held per parameter", title=title)
    most = max([volume for _, _, volume, _, _ in rows.values()] + [1.0])
    right.set(xlabel="volume of a step, P", xlim=(0, 1.75 * most))
    legend_of(figure, "by formula")
    return figure


def by_prediction(axes, i, value, reach=0.42, **style):
    axes.plot([value, value], [i - reach, i + reach], **looks.PREDICTED | style)


def legend_of(figure, label):
    from matplotlib.lines import Line2D

    keys = [*looks.kind_keys(KINDS), Line2D([], [], **looks.PREDICTED, label=label)]
    figure.legend(handles=keys, loc="outside lower center", ncols=4, frameon=False, handleheight=1.4)


def kept_and_dropped(documents, characters, title):
    """Two rows of bars, one per reason: documents, and millions of characters. Return a matplotlib Figure.

    documents, characters: {what became of them: count}, "kept" first.
    """
    names = list(documents)
    figure, (left, right) = looks.new_figure(7.5, 0.9 + 0.36 * len(names), 1, 2, sharey=True)
    places = range(len(names))
    panels = (left, documents, "documents", 1, ",.0f"), (right, characters, "million characters", 1e6, ",.3g")
    for axes, counts, unit, scale, form in panels:
        values = [counts[name] / scale for name in names]
        fill = [looks.QUIET if name == "kept" else looks.FAINT for name in names]
        axes.barh(places, values, color=fill, edgecolor=looks.EDGE)
        for place, value in zip(places, values, strict=True):
            axes.text(value, place, f" {value:{form}}", va="center", fontsize=10, color=looks.INK)
        axes.set(xlabel=unit, xlim=(0, max([*values, 1e-9]) * 1.25))
    left.set_yticks(places, names)
    left.invert_yaxis()
    figure.suptitle(title, fontsize=10)
    return figure


def steps_of_ranks(axes, work, **style):
    """A bar per rank, stacked by the ring's steps, darkest the first: `work`[rank][step]."""
    for rank, steps in enumerate(work):
        bottom = 0
        for step, pairs in enumerate(steps):
            colour = looks.tint(looks.rank_colour(rank), 1 - 0.75 * step / max(1, len(steps) - 1))
            axes.bar(rank, pairs, 0.7, bottom=bottom, fc=colour, ec=looks.INK, **style)
            bottom += pairs


PANEL_BYTES = {  # key of the planner's left panel: (what it adds up, in which look)
    "weights": (("parameters", "unsharded_parameters", "copies"), "parameters"),
    "optimizer": (("optimizer",), "optimizer"),
    "gradients": (("gradients",), "gradients"),
    "whole gradients until the last micro-batch": (("accumulated_gradients",), "accumulated_gradients"),
    "activations": (("activations", "workspace"), "activations"),
}
PANEL_TIME = {"computing": COMPUTE, "messages": MESSAGES, "bubble": ("bubble",), "launching": ("launch",)}


def plans(rows, memory_bytes, title):
    """Left each plan's bytes with the end of the GPU's memory, right the seconds of a step by what the GPU does.

    rows: [(name, {kind: bytes on the GPU}, {part: seconds})], the recommended plan first. What a
    panel's keys add up is in PANEL_BYTES and PANEL_TIME.
    """
    from matplotlib.patches import Patch

    figure, (left, right) = looks.new_figure(12, 2.4 + 0.36 * len(rows), 1, 2, sharey=True)
    solid, pale = looks.tint(looks.INK, 0.75), looks.tint(looks.GREY, 0.4)
    look_of = {
        "computing": (solid, ""),
        "messages": ("none", looks.HATCH),
        "bubble": (pale, ""),
        "launching": (looks.GROUND, ""),
    }
    panels = (
        (left, 1, GB, {key: (kinds, looks.BYTES[look]) for key, (kinds, look) in PANEL_BYTES.items()}),
        (right, 2, 1, {key: (parts, look_of[key]) for key, parts in PANEL_TIME.items()}),
    )  # fmt: skip
    longest = max(sum(row[2].values()) for row in rows)
    for axes, column, unit, keys in panels:
        there = {}
        for place, row in enumerate(rows):
            sums = {key: sum(row[column].get(part, 0) for part in parts) for key, (parts, _) in keys.items()}
            sums = {key: value for key, value in sums.items() if value > (longest / 500 if axes is right else 0)}
            there |= {key: keys[key][1] for key in keys if key in sums}
            looks.stacked(axes, place, [(value / unit, *keys[key][1]) for key, value in sums.items()], 0.62, lw=0.6)
        drawn = [Patch(fc=there[key][0], ec=looks.INK, hatch=there[key][1], label=key) for key in keys if key in there]
        side = "left" if axes is left else "right"
        figure.legend(handles=drawn, loc=f"outside lower {side}", frameon=False, ncols=3, fontsize=9)
    end = memory_bytes / GB
    left.axvline(end, **looks.LIMIT)
    left.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    left.set(xlabel=f"GB per GPU, which has {end:.0f} (red line)", title=title, xlim=(0, end * 1.06))
    right.set(xlabel="predicted seconds per step", xlim=(0, None))
    left.set_ylim(len(rows) - 0.4, -0.6)
    return figure
