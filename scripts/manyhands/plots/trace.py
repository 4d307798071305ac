"""The chart of a recorded trace: the Gantt chart of `schedule`, with for whom a rank waits, and messages as arrows."""

from manyhands.plots import looks
from manyhands.plots.schedule import gantt

MOST_ARROWS = 60  # more would hide the chart


def chart(spans, arrows, title):
    """A row per rank of `timeline.Timeline`'s spans, an arrow per message -> a matplotlib Figure.

    Up to MOST_ARROWS messages are drawn: the largest.
    """
    figure = gantt(spans, title)
    axes = figure.axes[0]
    longest = max((span.end_s for span in spans), default=0.0)
    seconds, _ = looks.prefix("s", longest)
    row = {rank: number for number, rank in enumerate(sorted({span.rank for span in spans}))}
    for span in spans:
        length = span.end_s - span.start_s
        if span.lane == "waiting" and length > 0.0135 * longest * len(span.name):
            middle = (span.start_s + length / 2) / seconds
            axes.text(middle, row[span.rank] - 0.18, span.name, fontsize=10, ha="center", va="center")
    for arrow in sorted(arrows, key=lambda arrow: -arrow.bytes)[:MOST_ARROWS]:
        tip, tail = (arrow.end_s / seconds, row[arrow.to]), (arrow.start_s / seconds, row[arrow.source])
        axes.annotate("", tip, tail, arrowprops={"arrowstyle": "->", "color": looks.INK, "lw": 0.9})
    return figure
