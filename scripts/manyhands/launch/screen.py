"""What people see: lines that do not run together, and plots of plain characters.

In a notebook the `%%ranks` magic labels what each rank says. In a script each line carries its rank.
"""

from __future__ import annotations

import io
import math
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from manyhands.launch.ranks import joined

FRAME = 4  # rows of a text plot that show no values: title, frame, and the words below it


def say(text: object) -> None:
    """Print `text` in one write, newline included, with the rank in front of each line of a script.

    A world of one needs no label.
    """
    label = _label()
    write("".join(f"{label}{line}\n" for line in str(text).split("\n")))


def text_plot(values: Sequence[float], title: str, width: int = 72, height: int = 11) -> str:
    """Numbers over their index as a plot of plain characters, for terminals and log files. None of `values` is NaN."""
    places = list(range(len(values)))
    return text_curves([(places, list(values), "dot")], title, width, height, step_ticks(places))


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


def _label():
    ranks = joined()
    if ranks is not None:
        rank, size = ranks.rank, 1 if ranks.launcher == "notebook" else ranks.world_size
    else:
        return ""
    return "" if size == 1 else f"[rank {rank:>{len(str(size - 1))}}] "


class _Lossy(io.FileIO):
    """A screen or a log that no write fails of: what it cannot take is lost. There may be room again later."""

    def write(self, data):
        try:
            return super().write(data)
        except OSError:  # nobody reads, the terminal is closed, the disk is full
            return len(data)


def mend_streams() -> None:
    """From now on nothing that is wrong with this process's screen or log makes it fail, or complain as it ends."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed (`>&-`): the next file that is opened would get its number, and what is printed
            os.open(os.devnull, os.O_RDWR)
    for name, number, errors in (("stdout", 1, "replace"), ("stderr", 2, "backslashreplace")):
        before = getattr(sys, name)
        raw = before.buffer if hasattr(before, "buffer") else None
        raw = getattr(raw, "raw", raw)  # PYTHONUNBUFFERED leaves the buffer out
        if before is not None and (not isinstance(raw, io.FileIO) or isinstance(raw, _Lossy) or raw.fileno() != number):
            continue  # a notebook's, or a test's
        with suppress(OSError, AttributeError):
            before.flush()
        lossy = _Lossy(number, "w", closefd=False)
        at_once = before is not None and before.write_through
        stream = io.TextIOWrapper(
            lossy if at_once else io.BufferedWriter(lossy), before.encoding if before else "utf-8", errors,
            line_buffering=before is None or before.line_buffering, write_through=at_once,
        )  # fmt: skip
        setattr(sys, name, stream)


def write(text: str) -> None:
    """Write to stdout, now. Nothing wrong with the screen or the log ends a run: what cannot be shown is lost."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except (OSError, UnicodeEncodeError, AttributeError):  # of a stream that is closed there is none
        mend_streams()
        sys.stdout.write(text)
        sys.stdout.flush()
