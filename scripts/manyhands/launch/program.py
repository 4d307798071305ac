"""How every program of the course begins and ends: without a traceback where people stop it, and with a status that is
heard.

    if __name__ == "__main__":
        run_program("plan.py", main)

torchrun turns the status of its ranks into 1. Whoever starts torchrun names a file in the environment
(`scripts/launch.py` does); rank 0 says there how the program ends, and why. Without the variable nothing is written.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from manyhands.launch import settings
from manyhands.launch.launchers import claimed
from manyhands.launch.ranks import joined
from manyhands.launch.screen import mend_streams

STATUS_FILE = "MANYHANDS_STATUS_FILE"
REFUSED = 2  # what was asked for cannot be: nothing was run
DIVERGED = 65  # a training whose loss or weights are NaN or infinite: the same seed would end there again
INTERRUPTED = 128 + signal.SIGINT  # the status that shells give to what Ctrl-C ended
MEMORY = (
    "usually memory; use fewer ranks, a smaller micro-batch or a smaller model (--dry-run says what train.py needs)"
)


def run_program(name: str, main: Callable[[], int | None]) -> NoReturn:
    """End this process with the status that `main()` returns. A reader that went away is none of a program's business.

    Ctrl-C ends it with status 130 and one sentence, of rank 0. What ignores it still does (nohup, a shell's
    background).
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
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def is_first_rank() -> bool:
    """Whether this process is rank 0, or no rank at all: before `join`, and where launchers contradict each other."""
    return claimed("rank", 0) == 0


def say_status(status: int, why: str = "") -> None:
    """Rank 0 of a program says how it ends; the last word counts. A file that cannot be written is no failure."""
    if path := settings.status_file():
        with contextlib.suppress(OSError):  # on another node than the one who asked: it does without
            path.write_text(json.dumps([status, why]))


def say_nothing_yet() -> None:
    """A program begins: what was said before it is not of its end."""
    if path := settings.status_file():
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def read_status() -> int | None:
    """The status that the program has left in the file named for it, or None: it was killed, or raised."""
    path = settings.status_file()
    try:
        return json.loads(path.read_text())[0] if path else None
    except (OSError, ValueError):
        return None
