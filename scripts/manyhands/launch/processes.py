"""Supervise a command and everything it starts: watch it, pass signals on, end all of it, leave nothing behind.

    with Supervised(command, log) as run: ...                   # used by the following three
    supervise(command, log=path, timeout_s=60)                  # with a time-out; measures memory
    status, heard = keep(command, idle_s=600)                   # replaces this program: passes on output and signals
    with Torchrun(script, n_ranks=2, log=path) as child: ...    # a separate torchrun while this program runs

A lesson starts kernels, controllers, engines and launchers, several of them in sessions of their own, so neither
the process group nor the tree of children holds them all. Each run therefore sets a mark in its environment;
every process with the mark belongs to the run, whatever its parent is now.
"""

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from manyhands.launch.allocation import torchrun_here
from manyhands.launch.launchers import claimed, without_launchers
from manyhands.launch.settings import environment

MARK = "MANYHANDS_RUN"
LINGER_S = 15  # a notebook's ranks end within this time of their kernel's end
SAMPLE_S = 0.5  # between memory samples; shorter at the start
POLL_S = 0.01
SETTLED_S = 5  # at this age a process has surely called exec
PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
ECHO_S = 5.0  # one request to stop may arrive twice within this time
TIMED_OUT = 124  # as in timeout(1)
PR_SET_PDEATHSIG = 1


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Ask Linux to send this process signal `number` when its parent dies; do nothing on other systems.

    A torchrun killed by -9 cannot notify its ranks, which would keep training and occupy their folder and node.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:  # the parent died before the request
        os.kill(os.getpid(), number)


class Family:
    """The processes that carry one mark. Unrelated processes are remembered, so that each is inspected once."""

    def __init__(self, mark: str, variable: str = MARK):
        self.mark, self.variable, self._since_s = mark, variable, time.time()
        self._strangers: set[psutil.Process] = set()

    def members(self) -> list[psutil.Process]:
        """Return the living processes with the mark, except this one."""
        found = []
        for process in psutil.process_iter():
            if process in self._strangers:
                continue
            try:
                environ = process.environ()
                if environ.get(self.variable) != self.mark:
                    born_s = process.create_time()  # before exec, its environment is its parent's, then empty
                    if born_s < (time.time() if environ else self._since_s) - SETTLED_S:
                        self._strangers.add(process)
                elif _alive(process) and process.pid != os.getpid():
                    found.append(process)
            except psutil.AccessDenied:
                self._strangers.add(process)
            except (psutil.Error, OSError):  # it has just ended
                continue
        return found

    def memory_bytes(self) -> int:
        """Return the memory in use; on Linux, pages shared by several processes count once."""
        total = 0
        for process in self.members():
            with contextlib.suppress(psutil.Error, OSError):
                memory = process.memory_full_info()
                total += getattr(memory, "pss", 0) or memory.uss
        return total

    def print_stacks(self, program: str, patience_s: float = 10.0) -> None:
        """Make each rank that runs `program` print its stack, by aborting it: Python's fault handler prints it."""
        ranks: list[psutil.Process] = []
        others: list[psutil.Process] = []
        for process in self.members():
            with contextlib.suppress(psutil.Error, OSError):
                here = claimed("rank", -1, process.environ()) >= 0 and program in process.cmdline()
                (ranks if here else others).append(process)
        for process in others if ranks else []:  # a launcher kills the other ranks as soon as one has ended
            _quietly(process.suspend)
        for process in ranks:
            if hasattr(process, "rlimit"):
                _quietly(process.rlimit, psutil.RLIMIT_CORE, (0, 0))  # print stacks without core files
        for process in ranks:
            _quietly(process.send_signal, signal.SIGABRT)
        deadline = time.monotonic() + patience_s
        while any(map(_alive, ranks)) and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in others:
            _quietly(process.resume)

    def end(self, grace_s: float) -> None:
        """Ask all members to end, then kill those left, including any that appear meanwhile."""
        members = self.members()
        for process in members:
            _quietly(process.terminate)
        psutil.wait_procs(members, timeout=grace_s)
        self.kill()

    def kill(self) -> None:
        """Kill all members, including any that appear meanwhile."""
        for _ in range(20):
            members = self.members()
            if not members:
                return
            for process in members:
                _quietly(process.kill)
            psutil.wait_procs(members, timeout=0.5)


class Supervised:
    """A command in a separate session, which ends with us. At the end of the block no process that it started is left.

    `output` is a file or subprocess.PIPE for stdout and stderr, or None for ours. Processes that outlive it are asked
    to end, and killed after `grace_s`.
    """

    def __init__(self, command: Sequence[str], output=None, environ=None, cwd=None, grace_s: float = 3.0):
        self.mark, self.grace_s = secrets.token_hex(8), grace_s
        self.family = Family(self.mark)
        self.family.members()  # inspect unrelated processes now: it takes seconds
        # the signal is sent when the starting thread ends, even if its process lives on
        with_us = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
        # signals as Python has them: MPICH's mpiexec may write to a process that is gone, and SIGPIPE would end it
        self.process = subprocess.Popen(
            [*with_us, *command], env={**(environment() if environ is None else environ), MARK: self.mark}, cwd=cwd,
            stdin=subprocess.DEVNULL, stdout=output, stderr=None if output is None else subprocess.STDOUT,
            start_new_session=True, restore_signals=False,
        )  # fmt: skip

    def end(self) -> None:
        """End the processes that are left."""
        self.family.end(self.grace_s)
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()


@dataclass(frozen=True)
class Ended:
    """The result of a supervised command."""

    status: int | None  # None: it had to be ended, or did not start
    seconds: float
    peak_bytes: int  # the largest sample over all its processes together
    timed_out: bool = False
    left_behind: tuple[str, ...] = ()  # processes that outlived it and were killed
    error: str = ""  # why it did not start


def supervise(
    command: Sequence[str], *, log, timeout_s: float, environ: Mapping[str, str] | None = None, cwd=None,
    program: str = "", stop: threading.Event | None = None, linger_s: float = LINGER_S,
) -> Ended:  # fmt: skip
    """Run `command` with its output in the file `log`; its failures raise nothing.

    At the time-out, ranks that run `program` first print their stacks. Setting `stop` ends the command.
    """
    environ = {**(environment() if environ is None else environ), "PYTHONFAULTHANDLER": "1"}
    stop, peak_bytes, sample_s = stop or threading.Event(), 0, 0.02
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    if shutil.which(command[0], path=environ.get("PATH")) is None:
        return Ended(None, 0.0, 0, error=f"{command[0]} did not start: no such program")
    with open(log, "wb") as output, Supervised(command, output, environ, cwd) as run:
        child, family, started = run.process, run.family, time.monotonic()
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
            return Ended(None, seconds, peak_bytes, timed_out=True)
        while (left := family.members()) and time.monotonic() - started < seconds + linger_s:
            time.sleep(0.2)
        return Ended(child.returncode, seconds, peak_bytes, left_behind=tuple(filter(None, map(_describe, left))))


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Make SIGTERM, which a job gets at its wall time, raise KeyboardInterrupt, so that runs are ended."""

    def interrupt(*_):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # qdel also signals the job file, which forwards it
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _quietly(action, *args):
    """Call a method of a process that may have ended meanwhile."""
    with contextlib.suppress(psutil.Error, OSError):
        action(*args)


def _alive(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _describe(process):
    """Describe a process, "pid 71 (python -m ipyparallel.engine ...)", or return "" if it has just ended."""
    with contextlib.suppress(psutil.Error):
        words = [Path(word).name if word == sys.executable else word for word in process.cmdline()]
        return f"pid {process.pid} ({' '.join(words)[:80]})"
    return ""


def keep(
    command: Sequence[str], environ: Mapping[str, str] | None = None, idle_s: float | None = None, grace_s: float = 10.0
) -> tuple[int, int | None]:
    """Run `command` to its end, forward signals to it, and return (its status, the last signal).

    With `idle_s`, its output goes through a pipe, and a command without output for that long is ended (status 124).
    """
    run = Supervised(command, subprocess.PIPE if idle_s else None, environ, grace_s=grace_s)
    heard: list[int] = []
    told_at: list[float] = []

    def pass_on(number, frame):
        heard.append(number)
        now = time.monotonic()
        if number != signal.SIGINT and told_at and now - told_at[-1] < ECHO_S:
            return  # sent by the scheduler and again by the job file: a second one would end torchrun at once
        told_at.append(now)
        if run.process.poll() is None:
            run.process.send_signal(_translated(number, command))

    # a signal that nohup or a shell's background ignores stays ignored
    taken = [one for one in PASSED_ON if signal.getsignal(one) != signal.SIG_IGN]
    before = {one: signal.signal(one, pass_on) for one in taken}
    try:
        with run:
            status = _until_idle(run.process, idle_s) if idle_s else run.process.wait()
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    return (128 - status if status < 0 else status), (heard[-1] if heard else None)


def _until_idle(child, idle_s):
    """Copy the child's output to ours; return its status, or TIMED_OUT after `idle_s` seconds without output."""
    last = [time.monotonic()]

    def copy():
        while data := os.read(child.stdout.fileno(), 65536):
            last[0] = time.monotonic()
            with contextlib.suppress(OSError):  # the disk is full or the reader has gone: continue the run
                os.write(sys.stdout.fileno(), data)

    copier = threading.Thread(target=copy, daemon=True)
    copier.start()
    while time.monotonic() < last[0] + idle_s:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = child.wait(min(max(last[0] + idle_s - time.monotonic(), 0.01), 1.0))
            copier.join(5)  # the last lines; a process that outlived the child may hold the pipe open
            return status
    print(f"launch.py: no output for {idle_s:g} s; ending the run", file=sys.stderr, flush=True)
    return TIMED_OUT


def _translated(number, command):
    """Translate a signal for mpiexec and srun, which kill ranks on SIGTERM and SIGHUP before they save; use SIGUSR1."""
    through = Path(command[0]).name in ("srun", "mpiexec", "mpirun")
    return signal.SIGUSR1 if number in (signal.SIGTERM, signal.SIGHUP) and through else number


class ChildError(RuntimeError):
    """A child failed or timed out; the message ends with the last lines of its log."""


class Torchrun(Supervised):
    """Run `python -m torch.distributed.run --standalone` on `program` and its flags, with output in the file `log`.

        with Torchrun(program, folder, n_ranks=2, log=folder / "log.txt", restarts=1) as child:   # on one rank only
            child.until(lambda: (folder / "ready").exists())
            child.signal(signal.SIGTERM)
            status = child.wait()

    `restarts`: how often torchrun restarts all ranks after one has failed; `flags`: further flags of torchrun.
    Waiting longer than `timeout_s` raises ChildError. The child must not inherit our launcher's variables.
    """

    def __init__(self, program, *given, n_ranks: int, log, restarts: int = 0, flags=(), timeout_s: float = 110):
        self.log = Path(log)
        self._deadline = time.monotonic() + timeout_s
        command = [*torchrun_here(n_ranks, f"--max-restarts={restarts}", *flags), str(program), *map(str, given)]
        environ = without_launchers(environment())
        with open(self.log, "ab") as output:
            super().__init__(command, output, environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"})

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition()` holds. Raise ChildError if the child ends first or time runs out."""
        while not condition():
            if self.process.poll() is not None:
                raise ChildError(f"it ended with status {self.process.returncode}\n{self.last_lines()}")
            if time.monotonic() > self._deadline:
                raise ChildError(f"the condition did not hold in time\n{self.last_lines()}")
            time.sleep(POLL_S)

    def signal(self, number: int) -> None:
        """Send a signal to torchrun itself, as a scheduler would."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait for its exit status, negative if a signal ended it. Raise ChildError if time runs out."""
        try:
            return self.process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise ChildError(f"it did not end in time\n{self.last_lines()}") from None

    def last_lines(self, number: int = 60) -> str:
        """Return the end of its log, most of which is torchrun's own report."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-number:])
