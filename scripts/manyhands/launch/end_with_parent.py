"""A process ends with the one that started it, however that ends: Linux tells it."""

import ctypes
import os
import shutil
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with_parent(number=signal.SIGTERM):
    """Ask Linux to send this process `number` when its parent has died; elsewhere nothing happens.

    A torchrun that is killed by -9 cannot tell its ranks, which would train on, hold their folder and their node.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:  # it died before we asked
        os.kill(os.getpid(), number)


def with_us():
    """A prefix by which a command is asked to end when the thread that starts it is gone, with or without its process."""
    return ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
