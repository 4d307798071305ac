"""Keep a command: copy its output, pass signals on to it, end it when it falls silent, leave no process of it behind."""

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from manyhands.launch.end_with_parent import with_us
from manyhands.launch.processes import MARK, Family

PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
GRACE_S = 10.0  # from "please end" to "killed"
ECHO_S = 5.0  # one request to leave may arrive twice within this time
TIMED_OUT = 124  # as timeout(1)


def keep(command, environ=None, idle_s=None, grace_s=GRACE_S):
    """Run `command` to its end, pass signals on to it, and leave no process of it behind: (its status, the last signal).

    With `idle_s`, its output goes through a pipe, and a command that prints nothing for so long is ended (status 124).
    """
    mark = secrets.token_hex(8)
    family, heard = Family(mark), []
    pipe = subprocess.PIPE if idle_s else None
    child = subprocess.Popen(
        [*with_us(), *command], env={**(environ or os.environ), MARK: mark}, stdin=subprocess.DEVNULL,
        stdout=pipe, stderr=subprocess.STDOUT if pipe else None, start_new_session=True,
    )  # fmt: skip

    told_at = []

    def pass_on(number, frame):
        heard.append(number)
        now = time.monotonic()
        if number != signal.SIGINT and told_at and now - told_at[-1] < ECHO_S:
            return  # from the scheduler itself, and passed on by the job file: a second one would end torchrun at once
        told_at.append(now)
        if child.poll() is None:
            child.send_signal(_translated(number, command))

    # nohup and a shell's background ignore a signal for the whole run: it stays ignored
    taken = [one for one in PASSED_ON if signal.getsignal(one) != signal.SIG_IGN]
    before = {one: signal.signal(one, pass_on) for one in taken}
    try:
        status = _until_idle(child, idle_s) if idle_s else child.wait()
        if status is None:
            print(f"launch.py: no output for {idle_s:g} s; ending the run", file=sys.stderr, flush=True)
            family.end(grace_s)
            child.wait()
            status = TIMED_OUT
    finally:
        family.end(grace_s)  # what outlived its launcher
        child.wait()
        for one, handler in before.items():
            signal.signal(one, handler)
    return (128 - status if status < 0 else status), (heard[-1] if heard else None)


def _until_idle(child, idle_s):
    """Copy the child's output to ours. Its status, or None once nothing came for `idle_s` seconds."""
    last = [time.monotonic()]

    def copy():
        while data := os.read(child.stdout.fileno(), 65536):
            last[0] = time.monotonic()
            with suppress(OSError):  # the log's disk is full, or nobody reads: the run goes on
                os.write(sys.stdout.fileno(), data)

    copier = threading.Thread(target=copy, daemon=True)
    copier.start()
    while True:
        rest = last[0] + idle_s - time.monotonic()
        try:
            status = child.wait(min(max(rest, 0.01), 1.0))
        except subprocess.TimeoutExpired:
            if time.monotonic() > last[0] + idle_s:
                return None
        else:
            copier.join(5)  # the last lines; a process that outlived the child may hold the pipe open
            return status


def _translated(number, command):
    """mpiexec and srun end their ranks on SIGTERM and SIGHUP without letting them save; SIGUSR1 they pass on."""
    through = Path(command[0]).name in ("srun", "mpiexec", "mpirun")
    return signal.SIGUSR1 if number in (signal.SIGTERM, signal.SIGHUP) and through else number
