"""Bars: what ranks hold, send, keep and compute, beside the formulas; the planner's plans; what became of a text."""

from statistics import median_high

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
            _predicted(axes, i, value, 0.48)
        right.text(max(volume, expected) + 0.08, i, f"{volume:.2f} P, {note}", va="center")
    left.set_yticks(range(len(rows)), list(rows))
    left.invert_yaxis()
    left.set(xlabel="bytes held per parameter", title=title)
    most = max([volume for _, _, volume, _, _ in rows.values()] + [1.0])
    right.set(xlabel="volume of a step, P", xlim=(0, 1.75 * most))
    _legend(figure, "by formula")
    return figure


def held_against_limit(rungs, limit_bytes, title, published=()):
    """Draw a bar per rung, the MB that a rank holds by kind, and a line where its memory ends. Return a Figure.

    rungs: {name: object with the bytes of each of KINDS as attributes}. published: dicts with `name` and `points`,
    [[number of GPUs, tokens/s of each GPU], ...], which are drawn in a panel on the right.
    """
    from matplotlib.lines import Line2D

    rows = max(len(rungs), 4 if published else 1)
    figure, panels = looks.new_figure(
        9.5 if published else 7.5, 1.5 + 0.34 * rows, 1, 2 if published else 1, squeeze=False
    )
    bars = panels[0][0]
    for i, held in enumerate(rungs.values()):
        total = looks.stacked(bars, i, [(getattr(held, kind) / 1e6, *looks.BYTES[kind]) for kind in KINDS], 0.66)
        bars.text(total, i, f" {total:.1f}", va="center")
    most = max([limit_bytes, *(sum(getattr(held, kind) for kind in KINDS) for held in rungs.values())]) / 1e6
    bars.axvline(limit_bytes / 1e6, **looks.LIMIT)
    bars.set_yticks(range(len(rungs)), list(rungs))
    bars.invert_yaxis()
    bars.set(xlabel=title, xlim=(0, 1.15 * most))
    for axes in panels[0][1:]:
        for look, curve in zip(looks.ALTERNATIVES, published, strict=False):
            gpus, rates = zip(*curve["points"], strict=True)
            axes.semilogx(gpus, rates, ms=5, **look)
            looks.end_label(axes, gpus[-1], rates[-1], curve["name"], look["color"])
        ticks = sorted({gpus for curve in published for gpus, _ in curve["points"]})
        axes.set_xticks(ticks, ticks)
        axes.minorticks_off()
        axes.set(xlabel="H100 GPUs", ylabel="tokens/s per GPU", ylim=(0, None), xlim=(6, 6 * ticks[-1]))
    keys = [*looks.kind_keys(KINDS), Line2D([], [], **looks.LIMIT, label="memory of a rank")]
    figure.legend(handles=keys, loc="outside lower center", ncols=4, frameon=False, handleheight=1.4)
    return figure


def share_of_peak(here, published, title):
    """Draw a bar per machine: how many % of its peak FLOP/s it reached. Return a Figure.

    here: {name: % of the peak that was measured here}. published: dicts with `name`, `unit` and `points`, [[peak,
    reached]].
    """
    rows = {}
    for one in published:
        ((peak, reached),) = one["points"]
        rows[one["name"]] = 100 * reached / peak, f"{reached:,.0f} of {peak:,} TFLOP/s"
    rows |= {name: (share, "") for name, share in here.items()}
    figure, axes = looks.new_figure(8.6, 1.2 + 0.36 * len(rows))
    for i, (name, (share, said)) in enumerate(rows.items()):
        axes.barh(i, 100, 0.66, fc=looks.PAPER, ec=looks.FAINT)
        axes.barh(i, share, 0.66, fc=looks.INK if name in here else looks.GREY, ec=looks.INK)
        axes.text(102, i, f"{share:.2g} %" + f", {said}" * bool(said), va="center")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set(xlabel="% of the peak", title=title, xlim=(0, 150), xticks=range(0, 101, 20))
    return figure


def planned_and_held(rows, title):
    """A matplotlib Figure with a stacked bar per layout.

    `rows`: [(name, {kind: bytes held}, bytes planned)], with a value for each of KINDS.
    """
    figure, axes = looks.new_figure(8.6, 1.6 + 0.34 * len(rows))
    most = max(max(sum(held.values()), planned) for _, held, planned in rows)
    for i, (_, held, planned) in enumerate(rows):
        total = 1e3 * looks.stacked(axes, i, [(held[kind] / 1e3, *looks.BYTES[kind]) for kind in KINDS], 0.64)
        _predicted(axes, i, planned / 1e3, 0.5, lw=2.2, zorder=3)
        said = f"{total / 1e3:,.1f} kB, planned {planned / 1e3:,.1f}"
        axes.text((max(total, planned) + 0.015 * most) / 1e3, i, said, va="center")
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.invert_yaxis()
    axes.set(xlabel="kB on the fullest rank", title=title, xlim=(0, 1.34 * most / 1e3))
    _legend(figure, "planned")
    return figure


def kept_for_backward(kept, title):
    """Draw the bytes that a rank keeps between forward and backward, a bar for each way. Return a Figure.

    `kept`: {way: (bytes measured, bytes that every rank keeps by formula, bytes of its share by formula)}; the measured
    bar is divided where the formula says.
    """
    from matplotlib.patches import Patch

    figure, axes = looks.new_figure(7, 2.6)
    colour, hatch = looks.BYTES["activations"]
    for i, (measured, whole, share) in enumerate(kept.values()):
        looks.stacked(axes, i, [(whole / 1e6, looks.GREY, ""), ((measured - whole) / 1e6, colour, hatch)], 0.6)
        _predicted(axes, i, (whole + share) / 1e6)
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


def layer_times(times, alone_s, title, published=()):
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
        _predicted(left, i, 1e3 * formula)
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


def _predicted(axes, i, value, reach=0.42, **style):
    axes.plot([value, value], [i - reach, i + reach], **looks.PREDICTED | style)


def _legend(figure, label):
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


def work_per_rank(work, fair, published=()):
    """Draw for each layout a bar per rank, stacked by the ring's steps. Return a Figure.

    `work`: {layout: [rank][step] query-key pairs}; `fair`: pairs of a rank under perfect balance. published: dicts with
    `name`, `hardware` and `points`, [[number of GPUs, % of the rate that one GPU promises]], drawn in a
    panel on the right.
    """
    figure, panels = looks.new_figure(9.5, 3.2, 1, len(work) + bool(published), squeeze=False)
    panels = panels[0]
    most = max([fair, *(sum(steps) for rows in work.values() for steps in rows)])
    for axes, (name, rows) in zip(panels, work.items(), strict=False):
        steps_of_ranks(axes, rows)
        axes.axhline(fair, **looks.PREDICTED)
        axes.set(title=name, xlabel="rank (darkest: step 0)", ylim=(0, 1.08 * most))
        axes.set_xticks(range(len(rows)))
    panels[0].set_ylabel("query-key pairs")
    at_start = {"xycoords": ("axes fraction", "data"), "va": "bottom", "fontsize": 10}
    panels[0].annotate("  a fair share", (0, fair), **at_start)
    for axes in panels[len(work) :]:
        for i, one in enumerate(published):
            ((gpus, share),) = one["points"]
            axes.barh(i, share, 0.62, fc=looks.GREY, ec=looks.INK)
            axes.text(share, i, f" {share:.0f} %", va="center")
        axes.set_yticks(range(len(published)), [one["name"] for one in published])
        axes.invert_yaxis()
        axes.set(xlabel="% of what one GPU promises", xlim=(0, 118), title=published[0]["hardware"])
        axes.set_xticks(range(0, 101, 25))
    return figure


def steps_of_ranks(axes, work, **style):
    """A bar per rank, stacked by the ring's steps, darkest the first: `work`[rank][step]."""
    for rank, steps in enumerate(work):
        bottom = 0
        for step, pairs in enumerate(steps):
            colour = looks.tint(looks.rank_colour(rank), 1 - 0.75 * step / max(1, len(steps) - 1))
            axes.bar(rank, pairs, 0.7, bottom=bottom, fc=colour, ec=looks.INK, **style)
            bottom += pairs


def skew_and_balance(skewed, shares):
    """A matplotlib Figure of two panels.

    `skewed`: {share of expert 0: ([rank 0's bytes over the mean, for each draw], predicted)}; `shares`:
    {way: [for each seed: shares of the experts, largest first]}.
    """
    figure, (left, right) = looks.new_figure(9.5, 3.4, 1, 2)
    popular = sorted(skewed)
    left.plot(popular, [skewed[p][1] for p in popular], **looks.PREDICTED, label="predicted")
    for i, p in enumerate(popular):
        samples = skewed[p][0]
        left.plot([p] * len(samples), samples, **looks.MEASURED, ls="none", label=None if i else "measured")
    left.set(xlabel="share of choices that are expert 0", ylabel="bytes at rank 0 / mean", ylim=(0, None))
    left.set_title("what skew costs")
    left.legend(frameon=False)
    for style, (name, seeds) in zip(looks.ALTERNATIVES, shares.items(), strict=False):
        places = range(1, len(seeds[0]) + 1)
        middle, errors = looks.errorbars([[seed[i - 1] for seed in seeds] for i in places], middle=median_high)
        right.errorbar(list(places), middle, yerr=errors, capsize=3, label=name, **style)
    even = 1 / len(seeds[0])
    right.axhline(even, **looks.PREDICTED)
    right.annotate("even", (1.01, even), xycoords=("axes fraction", "data"), va="center", fontsize=10)
    right.set(xlabel="experts, busiest first", ylabel="share of choices", ylim=(0, None))
    right.set_title("trained routers, all seeds")
    right.legend(frameon=False)
    return figure


def waits(rows, title):
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


def layouts(published, predicted, title):
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
        _predicted(axes, i, guess, lw=2.2, zorder=3)
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


def _look_of_time(part):
    """Return (colour, hatch) of the messages of an axis."""
    strengths = (1, 0.8, 0.5, 0.35, 0.15, 0.6)
    return looks.tint(looks.EDGE, strengths[MESSAGES.index(part)]), looks.HATCH
