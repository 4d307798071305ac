"""A rank ends with its launcher: Linux tells it when the process that started it is gone."""

import ctypes
import os
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
