"""How programs begin, print and end: no traceback where people stop them, whole lines, a status that is heard.

    if __name__ == "__main__":
        run_program("plan.py", main)

torchrun turns the status of its ranks into 1. Whoever starts torchrun names a file in the environment
(`scripts/launch.py` does); rank 0 says there how the program ends, and why. Without the variable nothing is written.
In a notebook the `%%ranks` magic labels what each rank says. In a script each line carries its rank.
"""

from __future__ import annotations

import ctypes
import io
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

from manyhands.launch import settings
from manyhands.launch.launchers import claimed
from manyhands.launch.ranks import joined

STATUS_FILE = "MANYHANDS_STATUS_FILE"
FRAME = 4  # rows of a text plot that show no values: title, frame, and the words below it
REFUSED = 2  # what was asked for cannot be: nothing was run
DIVERGED = 65  # a training whose loss or weights are NaN or infinite: the same seed would end there again
NOT_AGAIN = (0, REFUSED, DIVERGED)  # what would end again as it ended
INTERRUPTED = 128 + signal.SIGINT  # the status that shells give to what Ctrl-C ended
MEMORY = (
    "usually memory; use fewer ranks, a smaller micro-batch or a smaller model (--dry-run says what train.py needs)"
)


def run_program(name: str, main: Callable[[], int | None]) -> NoReturn:
    """End this process with the status that `main()` returns. A reader that went away is none of a program's business.

    Ctrl-C ends it with status 130 and one sentence, of rank 0. What ignores it (nohup, `&`) still does.
    """
    mend_streams()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        status = main()
    except SystemExit as ended:  # it has said why, or says it now
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        status = 1 if isinstance(ended.code, str) else ended.code
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's and the launcher's: it is said once
        if is_first_rank():
            say_status(INTERRUPTED, f"{name}: ended by Ctrl-C")
            print(f"{name}: ended by Ctrl-C", file=sys.stderr)
        status = INTERRUPTED
    except Exception:
        if is_alone():
            raise
        sys.excepthook(*sys.exc_info())
        flush()
        os._exit(1)  # without MPI's goodbye, for which the others would be waited for: the launcher ends them
    end_process(status or 0)


def end_process(status: int) -> NoReturn:
    """End this process with `status`; a rank has left its group before.

    One of several ranks ends at once: the interpreter's own end waits for no thread of gloo, and one that still holds
    the last tensor that it sent then aborts the process ("terminate called without an active exception", torch 2.13).
    """
    if is_alone():
        sys.exit(status)
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and status != INTERRUPTED and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()  # mpiexec takes a rank that ends without it for one that failed
    flush()
    if mpi:  # C's own end, not Python's: there MPICH says goodbye, and else mpiexec kills whoever ends a moment later
        ctypes.CDLL(None).exit(status)
    os._exit(status)


def is_alone() -> bool:
    """Whether this process is no rank, or a world of one."""
    ranks = joined()
    return ranks is None or ranks.world_size == 1


def flush() -> None:
    """Write what has been printed; whoever read it may have gone."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def is_first_rank() -> bool:
    """Whether this process is rank 0, or no rank at all: before `join`, and where launchers contradict each other."""
    return claimed("rank", 0) == 0


def say_status(status: int, why: str = "") -> None:
    """Rank 0 of a program says how it ends; the last word counts. A file that cannot be written is no failure."""
    if path := settings.path(STATUS_FILE):
        with suppress(OSError):  # on another node than the one who asked: it does without
            path.write_text(json.dumps([status, why]))


def say_nothing_yet() -> None:
    """A program begins: what was said before it is not of its end."""
    if path := settings.path(STATUS_FILE):
        with suppress(OSError):
            path.unlink(missing_ok=True)


def read_status() -> int | None:
    """The status that the program has left in the file named for it, or None: it was killed, or raised."""
    path = settings.path(STATUS_FILE)
    try:
        return json.loads(path.read_text())[0] if path else None
    except (OSError, ValueError):
        return None


def say(text: object) -> None:
    """Print `text` in one write, newline included, with the rank in front of each line of a script.

    A world of one needs no label.
    """
    ranks, label = joined(), ""
    if ranks is not None and ranks.world_size > 1 and ranks.launcher != "notebook":
        label = f"[rank {ranks.rank:>{len(str(ranks.world_size - 1))}}] "
    write("".join(f"{label}{line}\n" for line in str(text).split("\n")))


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
