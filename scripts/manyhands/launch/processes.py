"""Run a command and everything it starts under a time-out: sample its memory, end all of it, leave nothing behind.

A lesson starts kernels, controllers, engines and launchers, several of them in sessions of their own, so neither
the process group nor the tree of children holds them all. Each run therefore carries a mark in its environment;
what carries the mark belongs to the run, whoever its parent is by now.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from manyhands.launch.end_with_parent import with_us
from manyhands.launch.launchers import is_a_rank

MARK = "MANYHANDS_RUN"
LINGER_S = 15  # the ranks of a notebook are gone within this time of their kernel's end
SAMPLE_S = 0.5  # between samples of the memory; more often at the start


@dataclass(frozen=True)
class Ended:
    """How a supervised command ended."""

    status: int | None  # None: it had to be ended, or never started
    seconds: float
    peak_bytes: int  # of all its processes together, the largest sample
    timed_out: bool = False
    left_behind: tuple[str, ...] = ()  # processes that outlived it and were killed
    error: str = ""  # why it did not start


class Family:
    """The processes that carry one mark. Knows the strangers it has met, so that each is looked at once."""

    def __init__(self, mark, variable=MARK):
        self.mark, self.variable, self._strangers, self._since_s = mark, variable, set(), time.time()

    def members(self):
        """Living processes with the mark, except this one."""
        found = []
        for process in psutil.process_iter():
            if process in self._strangers:
                continue
            try:
                environ = process.environ()
                if environ.get(self.variable) != self.mark:
                    if environ or process.create_time() < self._since_s:  # it is empty for a moment during exec
                        self._strangers.add(process)
                elif _alive(process) and process.pid != os.getpid():
                    found.append(process)
            except psutil.AccessDenied:
                self._strangers.add(process)
            except (psutil.Error, OSError):  # it has just ended
                continue
        return found

    def memory_bytes(self):
        """Memory in use: pages shared by several processes count once where the system tells (Linux)."""
        total = 0
        for process in self.members():
            with contextlib.suppress(psutil.Error, OSError):
                memory = process.memory_full_info()
                total += getattr(memory, "pss", 0) or memory.uss
        return total

    def print_stacks(self, program, patience_s=10.0):
        """Make each rank that runs `program` print where it is: Python's fault handler does so when it is aborted."""
        ranks, others = [], []
        for process in self.members():
            with contextlib.suppress(psutil.Error, OSError):
                here = is_a_rank(process.environ()) and program in process.cmdline()
                (ranks if here else others).append(process)
        for process in others if ranks else []:  # a launcher kills its ranks as soon as one has ended
            _quietly(process.suspend)
        for process in ranks:
            if hasattr(process, "rlimit"):
                _quietly(process.rlimit, psutil.RLIMIT_CORE, (0, 0))  # stacks are wanted, core files are not
        for process in ranks:
            _quietly(process.send_signal, signal.SIGABRT)
        deadline = time.monotonic() + patience_s
        while any(map(_alive, ranks)) and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in others:
            _quietly(process.resume)

    def end(self, grace_s=3.0):
        """Ask all members to end, then kill what is left, also what appears meanwhile."""
        members = self.members()
        for process in members:
            _quietly(process.terminate)
        psutil.wait_procs(members, timeout=grace_s)
        self.kill()

    def kill(self):
        """Kill all members, also what appears meanwhile."""
        for _ in range(20):
            members = self.members()
            if not members:
                return
            for process in members:
                _quietly(process.kill)
            psutil.wait_procs(members, timeout=0.5)


def supervise(command, *, log, timeout_s, environ=None, cwd=None, program="", stop=None, linger_s=LINGER_S):
    """Run `command` (a list) with its output in the file `log`; returns Ended, raises nothing for what it does.

    Ranks that run `program` at the time-out print their stacks first. `stop` is a threading.Event: once it is set, the
    command is ended at once.
    """
    stop = stop or threading.Event()
    mark = secrets.token_hex(8)
    family = Family(mark)
    family.members()  # meets all strangers: else the first look at the run, in which it may end, takes seconds
    environ = {**(os.environ if environ is None else environ), MARK: mark, "PYTHONFAULTHANDLER": "1"}
    started, peak_bytes, sample_s = time.monotonic(), 0, 0.02
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    if shutil.which(command[0], path=environ.get("PATH")) is None:
        return Ended(None, 0.0, 0, error=f"{command[0]} did not start: there is no such program")
    with open(log, "wb") as output:
        try:
            child = subprocess.Popen(
                [*with_us(), *command], env=environ, cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return Ended(None, 0.0, 0, error=f"{command[0]} did not start: {error}")
        try:
            while child.poll() is None and time.monotonic() - started < timeout_s and not stop.is_set():
                peak_bytes = max(peak_bytes, family.memory_bytes())
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(min(sample_s, max(0.01, timeout_s - (time.monotonic() - started))))
                sample_s = min(SAMPLE_S, 2 * sample_s)
            seconds = time.monotonic() - started
            if stop.is_set():
                return Ended(None, seconds, peak_bytes, error="stopped")
            if child.poll() is None:
                family.print_stacks(program)
                family.end()
                child.wait()
                return Ended(None, seconds, peak_bytes, timed_out=True)
            while (left := family.members()) and time.monotonic() - started < seconds + linger_s:
                time.sleep(0.2)
            names = tuple(filter(None, map(_describe, left)))
            return Ended(child.returncode, seconds, peak_bytes, left_behind=names)
        finally:
            family.end(grace_s=1.0)
            child.wait()


@contextlib.contextmanager
def sigterm_interrupts():
    """SIGTERM, which a job gets at its wall time, raises KeyboardInterrupt as Ctrl-C does: runs are ended on the way out."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _quietly(action, *args):
    """Do it to a process that may have ended meanwhile."""
    with contextlib.suppress(psutil.Error, OSError):
        action(*args)


def _alive(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _describe(process):
    """ "pid 71 (python -m ipyparallel.engine ...)", or "" if it has just ended."""
    with contextlib.suppress(psutil.Error):
        words = [Path(word).name if word == sys.executable else word for word in process.cmdline()]
        return f"pid {process.pid} ({' '.join(words)[:80]})"
    return ""
