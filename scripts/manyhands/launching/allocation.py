"""Where ranks can run: this machine, or the nodes that a scheduler gave us; and the MPI that is here."""

import importlib.metadata
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from manyhands.launching.launchers import expand_hosts
from manyhands.machine.cores import cores_here

LOOPBACK_MPI = {"UCX_NET_DEVICES": "lo", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "lo"}
MOST_RANKS_BY_DEFAULT = 4


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
        return self.slots or min(MOST_RANKS_BY_DEFAULT, max(2, cores_here()))


def _slurm_cpus(environ, nodes):
    """CPUs of the whole job: "2(x2),4" in SLURM_JOB_CPUS_PER_NODE is 2+2+4."""
    total = 0
    for part in environ.get("SLURM_JOB_CPUS_PER_NODE", "").split(","):
        count, _, times = part.partition("(x")
        total += int(count) * int(times.rstrip(")") or 1) if count.isdigit() else 0
    return total or nodes


def loopback_mpi():
    """LOOPBACK_MPI where MPI is the MPICH of the PyPI wheel; a site's own MPI and NCCL's plug-ins know better: {}."""
    try:
        importlib.metadata.version("mpich")
    except importlib.metadata.PackageNotFoundError:
        return {}
    return dict(LOOPBACK_MPI)


def find_mpiexec():
    """The mpiexec of this environment as a command (MANYHANDS_MPIEXEC overrides it), or None."""
    if "MANYHANDS_MPIEXEC" in os.environ:
        return shlex.split(os.environ["MANYHANDS_MPIEXEC"]) or None
    own = Path(sys.prefix) / "bin" / "mpiexec"
    path = str(own) if own.exists() else shutil.which("mpiexec")
    return [path] if path else None


@dataclass(frozen=True)
class Where:
    """The machine or allocation that this process is in."""

    kind: str  # local, pbs, slurm, slurm step
    hosts: list
    ranks_per_node: int | None  # that the scheduler made room for
    job: int  # its number, or this process's

    @classmethod
    def find(cls, environ):
        """Raises RanksError where a node file cannot be read."""
        kind = Allocation.find(environ).kind
        if kind == "pbs":
            lines = Path(environ["PBS_NODEFILE"]).read_text().split()
            hosts = list(dict.fromkeys(lines))  # it repeats a host mpiprocs times
            return cls(kind, hosts, len(lines) // len(hosts), _leading_number(environ.get("PBS_JOBID", "")))
        if kind.startswith("slurm"):
            hosts = expand_hosts(environ.get("SLURM_JOB_NODELIST", "")) or ["127.0.0.1"]
            per_node = environ.get("SLURM_NTASKS_PER_NODE", "")
            return cls(
                kind,
                hosts,
                int(per_node) if per_node.isdecimal() else None,
                _leading_number(environ["SLURM_JOB_ID"]),
            )
        return cls("local", ["127.0.0.1"], None, os.getpid())


def _leading_number(text):
    digits = text[: len(text) - len(text.lstrip("0123456789"))]  # 123.server and 123[4].server: 123
    return int(digits) if digits else os.getpid()


# what a launcher around preflight has set would be taken for the run's own
LAUNCHER_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC",
    "PMI", "HYDI", "HYDRA", "MPI_LOCAL", "OMPI_COMM_", "PALS_RANK", "PALS_LOCAL", "MANYHANDS_RANK", "MANYHANDS_NOTEBOOK",
)  # fmt: skip


def mpi_launcher(n_ranks, folder=None, environ=os.environ):
    """The command that starts n_ranks MPI ranks here, their output in files of `folder` or labelled where that works.

    None where there is no MPI.
    """
    if "SLURM_STEP_ID" in environ and shutil.which("srun"):  # Hydra dies inside a job step
        out = ["--output", f"{folder}/%t.stdout.log", "--error", f"{folder}/%t.stderr.log"] if folder else []
        return ["srun", "--overlap", "--mpi=pmi2", "--kill-on-bad-exit=1", f"--ntasks={n_ranks}", *out]
    mpiexec = find_mpiexec()
    if mpiexec is None:
        return None
    version = subprocess.run([*mpiexec, "--version"], capture_output=True, text=True, check=False).stdout
    flags = []
    if "HYDRA" in version and folder:  # its -prepend-rank labels pieces of lines
        flags = ["-outfile-pattern", f"{folder}/%r.stdout.log", "-errfile-pattern", f"{folder}/%r.stderr.log"]
    elif "Open MPI" in version or "OpenRTE" in version:
        flags = ["--tag-output"]
    return [*mpiexec, *flags, "-n", str(n_ranks)]
