"""Ends the processes of a notebook's ranks when the notebook's kernel is gone, however it went.

    python -m manyhands.notebook.watchdog PARENT_PID MARK FOLDER

Every process of a cluster, and every process that those start, carries MANYHANDS_CLUSTER=MARK in its environment. The
watchdog runs in a session of its own, so that what kills the kernel does not reach it, looks at the kernel once a
second, and afterwards kills what carries the mark and removes FOLDER. Asked to end by SIGTERM, as at the end of a job
or of a preflight, it does so at once: nobody else would.
"""

import shutil
import signal
import sys
import time

import psutil

from manyhands.launch.processes import Family

MARK = "MANYHANDS_CLUSTER"


class _Asked(Exception):
    """SIGTERM has come."""


def _ask(*_):
    raise _Asked


def main(parent_pid, mark, folder):
    signal.signal(signal.SIGTERM, _ask)
    try:
        parent = psutil.Process(parent_pid)
        while parent.is_running() and parent.status() != psutil.STATUS_ZOMBIE:  # is_running knows reused pids
            time.sleep(1)
    except (psutil.Error, _Asked):
        pass
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Family(mark, MARK).kill()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
