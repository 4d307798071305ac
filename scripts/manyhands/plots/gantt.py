"""A Gantt chart of all ranks: compute solid in the rank's colour, communication hatched, waiting outlined."""

from manyhands.plots.looks import ACTIVITIES, GREY, PAPER, of_rank


def gantt(spans, title, virtual=False, until_s=None):
    """A chart with one row per rank: compute solid in the rank's colour, communication hatched below it, waiting outlined.

    Returns a matplotlib Figure. A span's name is written into it where it fits. With virtual=True title and axis say that
    the time is virtual; `until_s` ends the axis there, so that two charts have one scale.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = sorted({span.rank for span in spans})
    longest = until_s or max((span.end_s for span in spans), default=0.0)
    unit, scale = next((u, s) for u, s in (("s", 1), ("ms", 1e3), ("µs", 1e6)) if longest * s >= 1 or u == "µs")
    figure = Figure(figsize=(8, 1.5 + 0.62 * max(len(ranks), 1)), layout="constrained")
    axes = figure.subplots()
    for span in spans:
        top = ranks.index(span.rank) - (0 if span.lane == "communication" else 0.36)
        length = span.end_s - span.start_s
        axes.broken_barh([(span.start_s * scale, length * scale)], (top, 0.36), lw=0.7, **of_rank(span.rank, span.lane))
        if span.lane != "waiting" and length > 0.0135 * longest * len(span.name):  # the name fits into the box
            ground = {"boxstyle": "round,pad=0.1", "fc": PAPER, "ec": "none", "alpha": 0.8}
            middle = (span.start_s + length / 2) * scale
            axes.text(middle, top + 0.18, span.name, fontsize=10, ha="center", va="center", bbox=ground)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.set(xlim=(0, longest * scale * 1.01 or 1), ylim=(len(ranks) - 0.4, -0.6))
    axes.set_xlabel(f"virtual time, {unit}" if virtual else f"time, {unit}")
    axes.set_title(f"{title} (virtual)" if virtual and "virtual" not in title else title)
    axes.spines[["top", "right"]].set_visible(False)
    present = [lane for lane in ACTIVITIES if any(span.lane == lane for span in spans)]
    if present:
        keys = [Patch(**{"fc": GREY, **ACTIVITIES[lane]}, label=lane) for lane in present]
        figure.legend(handles=keys, loc="outside lower center", ncols=3, frameon=False)
    return figure
