"""Bars of what a rank keeps for backward under tensor parallelism, and of a layer's virtual time by where its ranks lie."""

from manyhands.plots.looks import ACTIVITIES, BYTES, GREY, INK, PREDICTED


def kept_and_timed(kept, times, alone_s, title):
    """A matplotlib Figure of two panels.

    `kept`: {way: (bytes measured, bytes that every rank keeps by formula, bytes of its share by formula)}; the measured bar is
    divided where the formula says. `times`: {placement: (seconds, of which communication, seconds by formula)}, in virtual
    time; `alone_s`: seconds of one rank that has the whole layer.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure = Figure(figsize=(9.5, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    colour, hatch = BYTES["activations"]
    for i, (measured, whole, share) in enumerate(kept.values()):
        left.barh(i, whole / 1e6, 0.6, fc=GREY, ec=INK)
        left.barh(i, (measured - whole) / 1e6, 0.6, left=whole / 1e6, fc=colour, ec=INK, hatch=hatch)
        _predicted(left, i, (whole + share) / 1e6)
        left.text((max(measured, whole + share)) / 1e6, i, f"  {measured / 1e6:.2f} MB", va="center")
    left.set(xlabel="kept for backward, MB", title=title)
    left.set_xlim(0, 1.35 * max(row[0] for row in kept.values()) / 1e6)
    left.set_yticks(range(len(kept)), list(kept))

    rows = {"one rank alone": (alone_s, 0.0, alone_s)} | times
    for i, (total, communication, formula) in enumerate(rows.values()):
        right.barh(i, 1e3 * (total - communication), 0.6, fc=GREY, ec=INK)
        if communication:
            left_ms, style = 1e3 * (total - communication), ACTIVITIES["communication"]
            right.barh(i, 1e3 * communication, 0.6, left=left_ms, fc="none", **style)
        _predicted(right, i, 1e3 * formula)
        right.text(1e3 * total, i, f"  {1e3 * total:.2f} ms", va="center")
    right.set(xlabel="virtual time of a layer, ms", title="forward and backward, by placement")
    right.set_xlim(0, 1.3e3 * max(row[0] for row in rows.values()))
    right.set_yticks(range(len(rows)), list(rows))
    keys = [
        Patch(fc=GREY, ec=INK, label="whole on every rank"), Patch(fc=colour, ec=INK, hatch=hatch, label="divided among ranks"),
        Patch(fc=GREY, ec=INK, label="compute"), Patch(fc="none", **ACTIVITIES["communication"], label="communication"),
        Line2D([], [], **PREDICTED, label="by formula"),
    ]  # fmt: skip
    for axes in (left, right):
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    below = {"loc": "upper center", "bbox_to_anchor": (0.45, -0.22), "frameon": False, "handleheight": 1.3}
    left.legend(handles=keys[:2], ncols=2, **below)
    right.legend(handles=keys[2:], ncols=3, **below)
    return figure


def _predicted(axes, i, value):
    axes.plot([value, value], [i - 0.42, i + 0.42], **PREDICTED)
