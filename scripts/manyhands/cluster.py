"""The processes behind a notebook's ranks: controller, engines and watchdog, wherever the notebook runs.

On one node everything listens on 127.0.0.1. In an allocation of several nodes the controller listens on this
node's address; its messages are signed with a key that only the user can read. Engines start under MPI (mpiexec, or
srun from inside a Slurm job step, where mpiexec dies), or one by one where MPI is missing or forbidden.
"""

import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from manyhands.watchdog import kill_marked

LOOPBACK_MPI = {"UCX_NET_DEVICES": "lo", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "lo"}
MOST_RANKS_BY_DEFAULT = 4
# A launcher that hears of a dead rank kills all others. So it watches this shell, which outlives a killed engine.
KEEP_QUIET = ["/bin/sh", "-c", '"$@"; [ $? -lt 128 ] || exec sleep 86400', "sh"]


class RanksError(RuntimeError):
    """The ranks could not start, or are gone; the message says what to do."""

    def _render_traceback_(self):  # in a notebook the sentence is what helps
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True)
class Allocation:
    """Where ranks can run: this machine, or the nodes that a scheduler gave us."""

    kind: str  # "local", "pbs", "slurm" (Hydra knows the allocation), "slurm step" (only srun works there)
    num_nodes: int
    slots: int | None  # ranks that the scheduler gave room for

    @classmethod
    def find(cls, environ=os.environ):
        if "PBS_NODEFILE" in environ:
            try:
                hosts = Path(environ["PBS_NODEFILE"]).read_text().split()
            except OSError as error:
                raise RanksError(
                    f"PBS_NODEFILE names a file that cannot be read ({error}); unset it, or start the "
                    "notebook inside the job"
                ) from None
            if "SLURM_JOB_ID" not in environ:  # Debian's qsub sets it inside Slurm jobs
                return cls("pbs", len(set(hosts)), len(hosts))
        if "SLURM_JOB_ID" in environ:
            nodes = int(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or 1)
            slots = environ.get("SLURM_NTASKS") if "SLURM_STEP_ID" not in environ else None
            slots = int(slots) if slots else _slurm_cpus(environ, nodes)
            return cls("slurm step" if "SLURM_STEP_ID" in environ else "slurm", nodes, slots)
        return cls("local", 1, None)

    def default_ranks(self):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return self.slots or min(MOST_RANKS_BY_DEFAULT, max(2, cores))


def _slurm_cpus(environ, nodes):
    """CPUs of the whole job: "2(x2),4" in SLURM_JOB_CPUS_PER_NODE is 2+2+4."""
    total = 0
    for part in environ.get("SLURM_JOB_CPUS_PER_NODE", "").split(","):
        count, _, times = part.partition("(x")
        total += int(count) * int(times.rstrip(")") or 1) if count.isdigit() else 0
    return total or nodes


def find_mpiexec():
    """The mpiexec of this environment as a command (MANYHANDS_MPIEXEC overrides it), or None."""
    if "MANYHANDS_MPIEXEC" in os.environ:
        return shlex.split(os.environ["MANYHANDS_MPIEXEC"]) or None
    own = Path(sys.prefix) / "bin" / "mpiexec"
    path = str(own) if own.exists() else shutil.which("mpiexec")
    return [path] if path else None


def engine_launcher(allocation, n, mpi):
    """The command in front of the engine's own, or None for engines that are started one by one."""
    if not mpi:
        return None
    if allocation.kind == "slurm step":
        # block: ranks 0 and 1 on the first node. The notebook's own step may have left SLURM_DISTRIBUTION=cyclic.
        return ["srun", "--overlap", "--mpi=pmi2", "--kill-on-bad-exit=0", "--distribution=block",
                f"--nodes={allocation.num_nodes}", f"--ntasks={n}", f"--ntasks-per-node={-(-n // allocation.num_nodes)}"]  # fmt: skip
    mpiexec = find_mpiexec()
    if mpiexec is None:
        return None
    return [*mpiexec, "-n", str(n)]


class Processes:
    """Controller, n engines and the watchdog; `stop` leaves none of them."""

    def __init__(self, n, allocation, mpi):
        self.n, self.allocation = n, allocation
        self.launcher = engine_launcher(allocation, n, mpi)
        self.mark = secrets.token_hex(8)
        if self.launcher is None and allocation.num_nodes > 1:
            raise RanksError(
                f"{allocation.num_nodes} nodes need MPI to start ranks on all of them; load an MPI module "
                "and set MANYHANDS_MPIEXEC, or ask for one node"
            )
        self.host = "127.0.0.1" if allocation.num_nodes == 1 else socket.gethostbyname(socket.gethostname())
        shared = Path.home() / ".manyhands" if allocation.num_nodes > 1 else None
        if shared:
            shared.mkdir(mode=0o700, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="manyhands-", dir=shared))  # only the user can read it
        self._children = []
        self._start()

    def _start(self):
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("JPY_", "MANYHANDS_RANK"))}
        environ["MANYHANDS_CLUSTER"] = self.mark
        environ["MANYHANDS_NOTEBOOK"] = "1"
        environ["IPYTHONDIR"] = str(self.folder / "ipython")
        environ["PYTHONPATH"] = os.pathsep.join(
            [str(Path(__file__).parents[1]), *filter(None, [environ.get("PYTHONPATH")])]
        )
        environ.setdefault("MPLBACKEND", "agg")
        if self.allocation.num_nodes == 1:
            environ.update({k: v for k, v in LOOPBACK_MPI.items() if k not in environ})
            environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        unmarked = {k: v for k, v in environ.items() if k != "MANYHANDS_CLUSTER"}
        self._spawn(
            "watchdog", ["manyhands.watchdog", str(os.getpid()), self.mark, str(self.folder)], unmarked
        )
        for part in ("security", "log", "pid", "startup", "db"):
            (self.folder / "profile" / part).mkdir(parents=True, mode=0o700)
        profile = f"--profile-dir={self.folder / 'profile'}"
        controller = ["ipyparallel.controller", profile, "--usethreads", "--nodb", "--log-level=ERROR"]
        self._spawn("controller", [*controller, f"--ip={self.host}", f"--location={self.host}"], environ)
        security = self.folder / "profile" / "security"
        self.connection_file = security / "ipcontroller-client.json"
        engine = [
            "ipyparallel.engine", profile, f"--file={security / 'ipcontroller-engine.json'}", "--timeout=60",
            "--IPEngine.wait_for_url_file=60", "--IPEngine.enable_nanny=False", "--log-level=ERROR",
        ]  # fmt: skip
        if self.launcher is not None:
            self._spawn("engines", [*engine, "--mpi"], environ, [*self.launcher, *KEEP_QUIET])
        else:
            for rank in range(self.n):
                self._spawn(f"engine-{rank}", engine, environ)

    def _spawn(self, name, module, environ, prefix=()):
        with open(self.folder / f"{name}.log", "wb") as log:
            child = subprocess.Popen(
                [*prefix, sys.executable, "-m", *module], env=environ, cwd=os.getcwd(), stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        child.name = name
        self._children.append(child)

    def failed(self):
        """The last lines of the log of a child that ended early, or None."""
        for child in self._children:
            if child.poll() is not None:
                text = (self.folder / f"{child.name}.log").read_text(errors="replace").strip()
                return f"{child.name} ended with status {child.returncode}: {text[-600:] or 'no output'}"
        return None

    def wait_for(self, path, timeout_s):
        deadline = time.monotonic() + timeout_s
        while not path.exists() or not path.stat().st_size:
            if reason := self.failed():
                raise RanksError(f"the ranks did not start; {reason}")
            if time.monotonic() > deadline:
                raise RanksError(f"the controller did not start within {timeout_s} s; run `make doctor`")
            time.sleep(0.05)

    def stop(self):
        kill_marked(self.mark)
        for child in self._children:
            child.kill()
            child.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
