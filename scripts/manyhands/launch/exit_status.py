"""The exit status of a program, where its launcher keeps it to itself: torchrun turns every failure into 1.

Whoever starts torchrun names a file in the environment (`scripts/launch.py` does); rank 0 says there how the program
ends, and why. Without the variable nothing is written.
"""

import contextlib
import json
import os
from pathlib import Path

STATUS_FILE = "MANYHANDS_STATUS_FILE"
REFUSED = 2  # what was asked for cannot be: nothing was run
DIVERGED = 65  # a training whose numbers are none any more: the same seed would end there again
INTERRUPTED = 130  # the status that shells give to what Ctrl-C ended
MEMORY = (
    "usually memory; use fewer ranks, a smaller micro-batch or a smaller model (--dry-run says what train.py needs)"
)


def say_status(status, why=""):
    """Rank 0 of a program says how it ends; the last word counts. A file that cannot be written is no failure."""
    if path := os.environ.get(STATUS_FILE):
        with contextlib.suppress(OSError):  # on another node than the one who asked: it does without
            Path(path).write_text(json.dumps([status, why]))


def say_nothing_yet():
    """A program begins: what was said before it is not of its end."""
    if path := os.environ.get(STATUS_FILE):
        with contextlib.suppress(OSError):
            Path(path).unlink(missing_ok=True)


def read_status(path):
    """(status, why) that a program left in `path`, or None: it was killed, or raised."""
    try:
        status, why = json.loads(Path(path).read_text())
    except (OSError, ValueError):
        return None
    return status, why
