"""The processes behind a notebook's ranks: controller, engines and watchdog, wherever the notebook runs.

On one node everything listens on 127.0.0.1. In an allocation of several nodes the controller listens on this
node's address; its messages are signed with a key that only the user can read. Engines start under MPI (mpiexec, or
srun from inside a Slurm job step, where mpiexec dies), or one by one where MPI is missing or forbidden.

Every process of a cluster, and every process that those start, carries MANYHANDS_CLUSTER=MARK in its environment. The
watchdog ends them when the notebook's kernel is gone, however it went:

    python -m manyhands.notebook.engine_processes PARENT_PID MARK FOLDER
"""

import contextlib
import os
import platform
import random
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
from IPython import get_ipython

from manyhands.course.folders import SCRIPTS, write_whole
from manyhands.launch import pmi_lines, settings
from manyhands.launch.allocation import (
    LOOPBACK,
    OWN_MPIEXEC,
    Allocation,
    RanksError,
    find_mpiexec,
    find_site_mpiexec,
    hydra_launcher,
    loopback_gloo,
    loopback_mpi,
    own_address,
    words_of,
)
from manyhands.launch.commands import mpiexec_over
from manyhands.launch.limits import cure, mapped, sweep_shared_memory
from manyhands.launch.processes import Family
from manyhands.notebook.fork_server import MARK, ForkServer

OURS = f"manyhands-{platform.node()}-"  # then the kernel's process and something random: a folder of a notebook's ranks
LAST_LINES = 10  # of what a process printed, in an error
START_S = 300  # a cold environment on a parallel file system is read slowly
LEAVING_S = 4.0  # that ranks have to go by themselves
NEVER_S = 86_400  # the kernel ends what it no longer waits for
PORTS, PORT_RANGE = 20, range(10_000, 20_000)  # of a controller, and where they are: below those of connections
# A rank is there after its second heartbeat: at ipyparallel's 3 s that is most of the start. Missed for 30 s, as there.
HEARTBEATS = ["--HeartMonitor.period=100", "--HeartMonitor.max_heartmonitor_misses=300"]
SEGMENTS = "segments"  # a file in the folder: paths of MPICH's shared memory, a line for each
DIED = "died"  # a file in the folder: engines that failed, a line for each
# A launcher that hears of a dead rank kills all others. So it watches this shell, which outlives a killed engine, never
# fails, and tells us of failures in the file that is its $0.
KEEP_QUIET = """"$@"
status=$?
[ $status = 0 ] && exit
echo "rank ${PMI_RANK-${OMPI_COMM_WORLD_RANK-$SLURM_PROCID}} ended with status $status" >> "$0"
[ $status -lt 128 ] || exec sleep 86400"""


@contextlib.contextmanager
def one_interrupt():
    """Let only the first interrupt raise KeyboardInterrupt: a second press of the stop button would cut short what the
    first one has begun, or the report of it. What this yields ignores interrupts from now on, to the block's end."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    def hold():
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def first(*_):
        nonlocal pressed
        hold()
        pressed = shell is not None
        raise KeyboardInterrupt

    def release(*_):
        signal.signal(signal.SIGINT, before)
        if pressed:
            shell.events.unregister("post_run_cell", release)

    shell, pressed = get_ipython(), False
    signal.signal(signal.SIGINT, first)
    try:
        yield hold
    finally:
        if pressed:
            shell.events.register("post_run_cell", release)
        else:
            release()


class TimeLimit:
    """`over()` once `seconds` have passed, times the highest load per core that was seen meanwhile, up to `most`."""

    def __init__(self, seconds, most=20.0):
        self.seconds, self.most, self.times, self._began = seconds, most, 1.0, time.monotonic()

    def over(self):
        self.times = max(self.times, settings.patience(self.most))
        return time.monotonic() - self._began > self.seconds * self.times

    def extend(self, seconds):
        """Do not count these seconds."""
        self._began += seconds

    def __str__(self):
        if self.times < 1.05 or not settings.live():  # what is stored tells no times of the machine it ran on
            return f"{self.seconds:g} s"
        return f"{self.seconds * self.times:.0f} s ({self.seconds:g} s, {self.times:.1f} times as this machine is busy)"


def engine_launcher(allocation, n, mpi):
    """The command in front of the engine's own, or None for engines that are started one by one."""
    if not mpi:
        return None
    if allocation.kind == "slurm step":
        # block: ranks 0 and 1 on the first node. The notebook's own step may have left SLURM_DISTRIBUTION=cyclic.
        return allocation.srun_mpi(n, "--kill-on-bad-exit=0", "--distribution=block", environ=settings.environment())
    mpiexec = find_mpiexec()
    if mpiexec is None:
        return None
    nodes = allocation.num_nodes
    environ = settings.environment()
    own = mpiexec == [str(OWN_MPIEXEC)]
    if own and (environ.get("MPIEXEC") or find_site_mpiexec(environ)):
        environ.pop("MPIEXEC_FLAGS", None)  # they are flags of the site's mpiexec, which job files use
    if nodes > 1 and n % nodes == 0:  # as many ranks on each, as scripts have them
        return mpiexec_over(allocation, n // nodes, environ, mpiexec)
    return [*mpiexec, "-n", str(n), *hydra_launcher(mpiexec, environ), *words_of(environ, "MPIEXEC_FLAGS")]


_server = None  # of this kernel's forks


def why_not_forked(allocation, launcher):
    """Return why ranks that this command launches (None: none does) are not forked but started one by one, or ""."""
    if settings.value("MANYHANDS_FORK", "1") == "0":
        return "MANYHANDS_FORK=0"
    if sys.platform != "linux":
        return f"this is {sys.platform}, not Linux"
    if allocation.num_nodes > 1:
        return f"there are {allocation.num_nodes} nodes"
    if launcher is not None and launcher[0] != str(OWN_MPIEXEC):
        return f"{Path(launcher[0]).name} starts them, not this environment's mpiexec"
    return ""


def fork_server():
    """Return this kernel's server of forks, or a new one if that has ended, or has another environment than we."""
    global _server
    environ = settings.for_python({"MPLBACKEND": "agg", **_kept()}, SCRIPTS)
    if _server is not None and (_server.environ != environ or not _server.alive()):
        _server.end()
        _server = None
    _server = _server or ForkServer(environ)
    return _server


def why_not_forked_here():
    """Return what `why_not_forked` says of the ranks that a notebook would start now."""
    allocation = Allocation.find()
    return why_not_forked(allocation, engine_launcher(allocation, 2, settings.value("MANYHANDS_MPI") != "off"))


def prepare():
    """Start the server, if ranks will be forked, before somebody starts them."""
    with contextlib.suppress(Exception):  # the start of ranks says what is wrong
        if not why_not_forked_here():
            fork_server()


def _kept():
    return {k: v for k, v in settings.environment().items() if not k.startswith(("JPY_", "MANYHANDS_RANK"))}


class Processes:
    """Controller, n engines and the watchdog; `stop` leaves none of them."""

    def __init__(self, n, allocation, mpi, on_wait=lambda: None):
        self.n, self.allocation, self.on_wait = n, allocation, on_wait
        self.launcher = engine_launcher(allocation, n, mpi)
        self.mark = secrets.token_hex(8)
        if self.launcher is None and allocation.num_nodes > 1:
            raise RanksError(
                f"{allocation.num_nodes} nodes need MPI to start ranks on all of them; load an MPI module "
                "and set MANYHANDS_MPIEXEC, or ask for one node"
            )
        self.host = LOOPBACK if allocation.num_nodes == 1 else own_address()
        shared = settings.home() / ".manyhands" if allocation.num_nodes > 1 else None
        if shared:
            shared.mkdir(mode=0o700, exist_ok=True)
        sweep_folders(shared or Path(tempfile.gettempdir()))
        sweep_shared_memory()
        # only the user can read it
        self.folder = Path(tempfile.mkdtemp(prefix=f"{OURS}{os.getpid()}-", dir=shared))
        self._children, self._began_s = [], time.time()
        self._server = None if why_not_forked(allocation, self.launcher) else fork_server()
        self._start()

    def _start(self):
        kept = _kept()
        mpi, gloo = (loopback_mpi(), loopback_gloo()) if self.allocation.num_nodes == 1 else ({}, {})
        unmarked = settings.for_python({"MPLBACKEND": "agg", **mpi, **kept, **gloo}, SCRIPTS) | {
            "MANYHANDS_NOTEBOOK": "1", "IPYTHONDIR": str(self.folder / "ipython"),
            "MPICH_GPU_SUPPORT_ENABLED": "0",  # as in rendezvous: MPI carries what lies on the host
        }  # fmt: skip
        environ = unmarked | {MARK: self.mark}
        watch = ["manyhands.notebook.engine_processes", str(os.getpid()), self.mark, str(self.folder)]
        self._spawn("watchdog", watch, unmarked)
        for part in ("security", "log", "pid", "startup", "db"):
            (self.folder / "profile" / part).mkdir(parents=True, mode=0o700)
        profile = f"--profile-dir={self.folder / 'profile'}"
        controller = ["ipyparallel.controller", profile, "--usethreads", "--nodb", "--log-level=ERROR"]
        controller += [*HEARTBEATS, f"--ports={_free_ports(self.host)}"]
        self._spawn("controller", [*controller, f"--ip={self.host}", f"--location={self.host}"], environ)
        security = self.folder / "profile" / "security"
        self.connection_file, self._for_engines = security / "ipcontroller-client.json", security / "for-engines.json"
        engine = [
            "ipyparallel.engine", profile, f"--file={self._for_engines}",
            f"--timeout={NEVER_S}", f"--IPEngine.wait_for_url_file={NEVER_S}",
            "--IPEngine.max_heartbeat_misses=200", "--IPEngine.enable_nanny=False", "--log-level=ERROR",
        ]  # fmt: skip
        if self.launcher is not None:
            quiet = ["/bin/sh", "-c", KEEP_QUIET, str(self.folder / DIED)]
            if self.allocation.kind == "slurm step":
                quiet += [sys.executable, pmi_lines.__file__, "run"]
            self._spawn("engines", [*engine, "--mpi"], environ, [*self.launcher, *quiet])
        else:
            for rank in range(self.n):
                self._spawn(f"engine-{rank}", engine, environ)

    def _spawn(self, name, module, environ, prefix=()):
        forked = self._server is not None and name != "watchdog"  # which outlives the kernel
        python = self._server.command() if forked else [sys.executable, "-m"]
        with open(self.folder / f"{name}.log", "wb") as log:
            child = subprocess.Popen(
                [*prefix, *python, *module], env=environ, cwd=os.getcwd(), stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True, restore_signals=False,  # see `Supervised`
            )  # fmt: skip
        child.name = name
        self._children.append(child)

    def port_taken(self):
        """Return whether another process took a port of the controller first, for which it would wait forever."""
        return "Address already in use" in (self.folder / "controller.log").read_text(errors="replace")

    def can_be_reached(self):
        """Return whether the controller has written its addresses for client and engines; pass them to these."""
        theirs = self.connection_file.with_name("ipcontroller-engine.json")
        if not all(file.exists() and file.stat().st_size for file in (self.connection_file, theirs)):
            return False
        write_whole(self._for_engines, theirs.read_bytes(), 0o600)  # an engine that finds half a file ends
        return True

    def wait_until(self, there, late):
        """Wait until `there()`. Raises RanksError with the end of what was printed: at once where a process has ended,
        with `late()` after START_S."""
        limit = TimeLimit(START_S)
        while not there():
            for child in self._children:
                died = self._died() if child.name == "engines" else ""
                if died or child.poll() is not None:
                    why = died or f"{child.name} ended with status {child.returncode}"
                    patience = TimeLimit(1)
                    while not self._printed(child) and not patience.over():
                        time.sleep(0.02)  # mpiexec tells of a rank's end before it hands on what that has printed
                    said = f"the ranks did not start; {why}: {self._printed(child) or 'no output'}"
                    raise RanksError("\n".join(filter(None, [said, cure(said, "set MANYHANDS_MPI=off")])))
            if self.port_taken():
                raise RanksError("the ranks did not start: another process took a port of their controller")
            if limit.over():
                starter = f" ({shlex.join(self.launcher)})" if self.launcher else ""
                printed = [f"{child.name}: {text}" for child in self._children if (text := self._printed(child))]
                raise RanksError(
                    f"{late()} within {limit}; run `make doctor`, or start fewer with n_ranks. "
                    + "\n".join([f"What was printed{starter}:", *(printed or ["nothing"])])
                )
            self.on_wait()
            time.sleep(0.02)

    def _died(self):
        """Return the failures that the engines' shells noted, as a phrase."""
        lines = (self.folder / DIED).read_text().splitlines() if (self.folder / DIED).exists() else []
        killed = "; 137 is a kill, such as by a memory limit" if any(line.endswith(" 137") for line in lines) else ""
        return ", ".join(lines) + killed

    def _printed(self, child):
        """The last lines of a process."""
        lines = (self.folder / f"{child.name}.log").read_text(errors="replace").strip().splitlines()
        return "\n".join(lines[-LAST_LINES:])

    def note_shared_memory(self):
        """Note the segments that MPICH has opened: whoever ends the ranks removes them, when the ranks are gone."""
        pids = [process.pid for process in Family(self.mark, MARK).members()]
        segments = set(re.findall(r"/dev/shm/mpich_shm_\w+", mapped(pids)))
        if segments:  # else they are not known, as where /proc does not show a process's mark: `end_all` looks for them
            write_whole(self.folder / SEGMENTS, "\n".join(segments).encode())

    def stop(self, told=False):
        """Leave no process. `told`: the ranks have heard that they go, so mpiexec ends by itself, with status 0."""
        for child in self._children:
            if told and child.name == "engines" and not self._died():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(LEAVING_S)
        end_all(self.mark, self.folder, self._began_s)
        for child in self._children:
            child.kill()
            child.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _free_ports(host, n=PORTS):
    """A row of n free ports, below those of outgoing connections: one of these would be gone when it is bound."""
    for _ in range(50):
        first = random.choice(PORT_RANGE[:-n])
        with contextlib.ExitStack() as sockets, contextlib.suppress(OSError):
            for port in range(first, first + n):
                sockets.enter_context(socket.socket()).bind((host, port))
            break
    return f"{first}-{first + n - 1}"


# ------------------------------------------------------------------ what killed ranks leave on a node
# Who is asked to end removes it; `kill -9` of a kernel and of its watchdog, or of ranks in MPI, does not.


def sweep_folders(place: Path) -> list[Path]:
    """Remove this user's folders OURS*PID-* in `place` whose process on this node is gone; returns them."""
    gone = []
    for folder in place.glob(f"{OURS}*"):
        pid = folder.name.removeprefix(OURS).split("-")[0]
        with contextlib.suppress(OSError):
            if pid.isdecimal() and not psutil.pid_exists(int(pid)) and folder.stat().st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)
                gone.append(folder)
    return gone


def end_all(mark: str, folder: Path, since_s: float) -> None:
    """Kill every process of the cluster `mark`, and remove the segments of MPICH that its `folder` names.

    If it names none, the start failed or was cut short: those go that were made after `since_s` and nobody uses.
    """
    Family(mark, MARK).kill()
    if not (folder / SEGMENTS).exists():
        sweep_shared_memory(older_s=0, since_s=since_s)
    with contextlib.suppress(OSError):
        segments = (folder / SEGMENTS).read_text().splitlines()
        used = mapped() if segments else ""
        for segment in segments:
            if segment not in used:
                Path(segment).unlink(missing_ok=True)


def watch(parent_pid: int, mark: str, folder: str) -> None:
    """Once the process `parent_pid` is gone, or SIGTERM has come, kill what carries the mark, and remove `folder`.

    This runs in a session of its own, so that what kills the kernel does not reach it. SIGTERM comes at the end of a
    job or of a preflight: then nobody else would do it.
    """

    def end(*_):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_all(mark, Path(folder), psutil.Process().create_time())
        shutil.rmtree(folder, ignore_errors=True)
        raise SystemExit

    signal.signal(signal.SIGTERM, end)
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(parent_pid)
        while parent.is_running() and parent.status() != psutil.STATUS_ZOMBIE:  # is_running knows reused pids
            time.sleep(1)
    end()


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2], sys.argv[3])
