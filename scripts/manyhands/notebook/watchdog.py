"""Ends the processes of a notebook's ranks when the notebook's kernel is gone, however it went.

    python -m manyhands.notebook.watchdog PARENT_PID MARK FOLDER

Every process of a cluster, and every process that those start, carries MANYHANDS_CLUSTER=MARK in its environment.
The watchdog runs in a session of its own, so that what kills the kernel does not reach it, looks at the kernel
once a second, and afterwards kills what carries the mark and removes FOLDER. Asked to end by SIGTERM, as at the end of a
job or of a preflight, it does so at once: nobody else would.
"""

import os
import shutil
import signal
import sys
import time

import psutil


def marked(mark):
    """The living processes of this user whose environment carries the mark, except this one."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.uids().real == os.getuid():
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if process.environ().get("MANYHANDS_CLUSTER") == mark:
                    found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def kill_marked(mark, patience_s=2.0):
    """Kill what carries the mark, also what appears meanwhile; returns when nothing is left or patience ends."""
    deadline = time.monotonic() + patience_s
    while processes := marked(mark):
        for process in processes:
            try:
                process.kill()
            except psutil.Error:
                continue
        psutil.wait_procs(processes, timeout=0.5)
        if time.monotonic() > deadline:
            break


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
    kill_marked(mark)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
