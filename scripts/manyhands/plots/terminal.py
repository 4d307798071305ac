"""Plots of plain characters, for terminals and log files.

print(text_plot(losses, "loss", height=13))
"""

import math
from collections.abc import Sequence

FRAME = 4  # rows of a plot that show no values: title, frame, and the words below it


def step_ticks(steps: Sequence[int]) -> tuple[list[int], list[str]]:
    """Five steps from the first to the last, and how they are written: plotext would write 3.3e2."""
    first, last = min(steps), max(steps)
    places = sorted({round(first + (last - first) * i / 4) for i in range(5)})
    return places, [f"{place:,}" for place in places]


def text_curves(curves, title: str, width: int, height: int, ticks=None) -> str:
    """Curves (x, y, marker) in one plot of plain characters; points marked "." are joined by lines.

    `ticks`: (places, words) along x, as of `step_ticks`; None leaves them to the library.
    """
    import plotext

    figure = plotext.figure
    figure.clear()
    figure.theme("colorless").plot_size(width, height).title(title)
    for x, y, marker in curves:
        figure.draw(figure.signal(x, y, marker=marker).lines(marker == "."))
    if ticks:
        figure.ruler("x").ticks(*ticks)
    if levels := _levels([value for _, y, _ in curves for value in y], height - FRAME):
        figure.ruler("y").ticks(*levels)
    lines = plotext.uncolorize(str(figure.build())).split("\n")
    return "\n".join(line.rstrip() for line in lines).rstrip("\n")


def _levels(values, rows):
    """Values at equal distances, each in the middle of one of `rows` rows, as written; None: all are equal.

    plotext takes five levels for any number of rows, and sets those that fall between two rows at the nearest one.
    """
    low, high = min(values), max(values)
    if low == high or rows < 2:
        return None
    parts = next(parts for parts in (4, 5, 3, 2, 1) if (rows - 1) % parts == 0)
    places = [low + (high - low) * i / parts for i in range(parts + 1)]
    digits = max(0, 2 - math.floor(math.log10(high - low)))
    return places, [f"{place:,.{digits}f}" for place in places]
