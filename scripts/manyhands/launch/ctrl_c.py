"""Ctrl-C ends a program at once and in one sentence, where there is nothing to save on the way out.

ends_at_once("prepare_data.py")          # first thing of the program, on all ranks
"""

import os
import signal
import sys

from manyhands.launch.exit_status import INTERRUPTED, say_status
from manyhands.launch.launchers import LaunchError, resolve


def ends_at_once(program):
    """From now on SIGINT ends this process with status 130; rank 0 says why. What ignores it still does (nohup, `&`).

    Not by an exception: it would travel through whatever ranks are waiting in, and each would show its own traceback.
    """

    def end(number, frame):
        try:
            first = resolve(os.environ).rank == 0
        except LaunchError:
            first = True
        if first:
            say_status(INTERRUPTED, f"{program}: ended by Ctrl-C")
            print(f"{program}: ended by Ctrl-C", file=sys.stderr, flush=True)
        os._exit(INTERRUPTED)

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, end)
