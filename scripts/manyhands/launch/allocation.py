"""Where ranks can run: this machine, or the nodes that a scheduler gave us; and the MPI that is here."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from manyhands.launch.launchers import expand_counts, expand_hosts
from manyhands.launch.machine import cores_here
from manyhands.launch.program import explained
from manyhands.launch.ranks import wrapped
from manyhands.launch.settings import environment, value

LOOPBACK = "127.0.0.1"
LOOPBACK_MPI = {"UCX_NET_DEVICES": "lo", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "lo"}
MOST_RANKS_BY_DEFAULT = 4
OWN_MPIEXEC = Path(sys.prefix) / "bin" / "mpiexec"
PBS_NODE = Path(__file__).with_name("pbs_node.sh")


class RanksError(RuntimeError):
    """The ranks could not start, or are gone; the message says what to do."""

    def _render_traceback_(self):  # in a notebook the sentence is what helps
        return wrapped(f"{type(self).__name__}: {self}")


@dataclass(frozen=True)
class Allocation:
    """Where ranks can run: this machine, or the nodes that a scheduler gave us."""

    kind: str  # "local", "pbs", "slurm" (Hydra knows the allocation), "slurm step" (only srun works there)
    hosts: tuple[str, ...]
    slots: int | None = None  # ranks that the scheduler gave room for, on all nodes
    ranks_per_node: int | None = None  # that it was asked for
    job: int = 0  # its number, or this process's
    cpus_per_node: int | None = None  # that a Slurm job has on each of its nodes, at least

    @classmethod
    def find(cls, environ: Mapping[str, str] | None = None) -> Allocation:
        """Where a process with this environment may start ranks. Raises RanksError for a node file without nodes."""
        environ = environment() if environ is None else environ
        if "PBS_NODEFILE" in environ:
            lines = _node_file(environ["PBS_NODEFILE"])
            if "SLURM_JOB_ID" not in environ:  # Debian's qsub sets it inside Slurm jobs
                hosts = tuple(dict.fromkeys(lines))  # it repeats a host mpiprocs times
                job = _leading_number(environ.get("PBS_JOBID", ""))
                return cls("pbs", hosts, len(lines), len(lines) // len(hosts), job)
        if "SLURM_JOB_ID" in environ:
            inside = "SLURM_STEP_ID" in environ
            hosts = tuple(expand_hosts(environ.get("SLURM_JOB_NODELIST", ""))) or (LOOPBACK,)
            tasks = environ.get("SLURM_NTASKS") if not inside else None
            cpus = expand_counts(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
            slots = int(tasks) if tasks else sum(cpus) or len(hosts)
            per_node = environ.get("SLURM_NTASKS_PER_NODE", "")
            job = _leading_number(environ["SLURM_JOB_ID"])
            kind = "slurm step" if inside else "slurm"
            return cls(
                kind, hosts, slots, int(per_node) if per_node.isdecimal() else None, job, min(cpus, default=None)
            )
        return cls("local", (LOOPBACK,), job=os.getpid())

    @property
    def num_nodes(self) -> int:
        return len(self.hosts)

    def default_ranks(self) -> int:
        return self.slots or min(MOST_RANKS_BY_DEFAULT, max(2, cores_here()))

    def srun(self, n_ranks: int, *flags: str) -> list[str]:
        """The srun that spreads n_ranks ranks over the nodes of a Slurm job, as many on each."""
        nodes = min(self.num_nodes, n_ranks)
        inside = ["--overlap"] if self.kind == "slurm step" else []  # beside the step that this process is in
        per_node = -(-n_ranks // nodes)
        counts = [f"--nodes={nodes}", f"--ntasks={n_ranks}", f"--ntasks-per-node={per_node}"]
        # a step does not take its job's over, and would give each rank one core
        if self.cpus_per_node and not any(flag.startswith(("-c", "--cpus-per-task")) for flag in flags):
            counts.append(f"--cpus-per-task={max(1, self.cpus_per_node // per_node)}")
        return ["srun", *inside, *counts, *flags]

    def srun_mpi(self, n_ranks: int, *flags: str, environ: Mapping[str, str]) -> list[str]:
        """As `srun`, for ranks that meet as an MPI world: with what the site needs (SRUN_FLAGS), and a PMI.

        `--mpi=none` among these is for ranks that need no MPI.
        """
        own = [flag for flag in words_of(environ, "SRUN_FLAGS") if flag != "--mpi=none"]
        pmi = [] if any(flag.startswith("--mpi=") for flag in own) else ["--mpi=pmi2"]
        return self.srun(n_ranks, *pmi, *flags, *own)


def _node_file(path):
    """The words of PBS's node file."""
    with explained(RanksError, "unset PBS_NODEFILE, or start the notebook inside the job"):
        words = Path(path).read_text().split()
    if not words:
        raise RanksError(f"PBS_NODEFILE names {path}, which is empty; unset it, or start inside the job")
    return words


def _leading_number(text):
    digits = text[: len(text) - len(text.lstrip("0123456789"))]  # 123.server and 123[4].server: 123
    return int(digits) if digits else os.getpid()


def loopback_gloo() -> dict[str, str]:
    """What keeps gloo on loopback: its name is another one on a Mac."""
    return {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}


def own_address() -> str:
    """This host's address as other nodes see it."""
    address = socket.gethostbyname(platform.node())
    if not address.startswith("127."):
        return address
    # The host's name resolves to loopback, as Debian sets it up. Which address would a packet to elsewhere carry?
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connect() on such a socket sends nothing
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return address
        return probe.getsockname()[0]


def words_of(environ: Mapping[str, str], name: str) -> list[str]:
    """A command, or flags, that a variable holds, as a list. Raises RanksError for a quote that is not closed."""
    try:
        return shlex.split(environ.get(name, ""))
    except ValueError as error:
        raise RanksError(f"{name}={environ[name]} cannot be read ({error}): close the quote") from None


def loopback_mpi() -> dict[str, str]:
    """LOOPBACK_MPI where MPI is the MPICH of the PyPI wheel; a site's own MPI and NCCL's plug-ins know better: {}."""
    try:
        importlib.metadata.version("mpich")
    except importlib.metadata.PackageNotFoundError:
        return {}
    # NCCL's plug-in for libfabric reads FI_*, too: where a site has set up either, these stay as they are
    foreign = any(name == "NCCL_NET" or name.startswith("FI_") for name in environment())
    return {name: value for name, value in LOOPBACK_MPI.items() if not (foreign and name.startswith("FI_"))}


def find_mpiexec() -> list[str] | None:
    """The mpiexec of this environment as a command (MANYHANDS_MPIEXEC overrides it), or None."""
    if (named := value("MANYHANDS_MPIEXEC")) is not None:
        return words_of({"MANYHANDS_MPIEXEC": named}, "MANYHANDS_MPIEXEC") or None
    return [str(OWN_MPIEXEC)] if OWN_MPIEXEC.exists() else find_site_mpiexec(environment())


def find_site_mpiexec(environ: Mapping[str, str]) -> list[str] | None:
    """The first mpiexec in PATH that is neither this environment's nor a scheduler's, as a command, or None.

    PBS's own is a wrapper that looks for another mpiexec, and fails where there is none; pbsdsh lies beside it. Slurm's
    is one of srun, which Debian installs as mpiexec.
    """
    for folder in environ.get("PATH", "").split(os.pathsep):
        found = shutil.which("mpiexec", path=folder) if folder != f"{sys.prefix}/bin" else None
        if found and not Path(found).with_name("pbsdsh").exists() and Path(found).resolve().name != "mpiexec.slurm":
            return [found]
    return None


@functools.cache
def version_of(*mpiexec: str) -> str:
    """What an mpiexec says of itself, "" where it does not start."""
    try:
        return subprocess.run([*mpiexec, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""


def is_open_mpi(mpiexec: Sequence[str]) -> bool:
    return any(name in version_of(*mpiexec) for name in ("Open MPI", "OpenRTE"))


def pbs_launcher(mpiexec: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The flags by which Hydra starts ranks on the other nodes of a PBS job through PBS, where it would take ssh.

    [] for another mpiexec, outside PBS, without `pbs_tmrsh`, and where the user has named a launcher.
    """
    job = "PBS_JOBID" in environ and "PBS_NODEFILE" in environ and "SLURM_JOB_ID" not in environ
    if not (job and shutil.which("pbs_tmrsh", path=environ.get("PATH")) and "HYDRA" in version_of(*mpiexec)):
        return []
    flags = [*mpiexec, *words_of(environ, "MPIEXEC_FLAGS")]
    if any(flag.startswith("-") and flag.lstrip("-").startswith(("launcher", "bootstrap")) for flag in flags):
        return []
    if any(name.startswith(("HYDRA_LAUNCHER", "HYDRA_BOOTSTRAP")) for name in environ):
        return []
    return ["-launcher", "rsh", "-launcher-exec", str(PBS_NODE)]


def mpi_launcher(n_ranks: int, folder=None, environ: Mapping[str, str] | None = None) -> list[str] | None:
    """The command that starts n_ranks MPI ranks here, their output in files of `folder` or labelled where that works.

    None where there is no MPI.
    """
    environ = environment() if environ is None else environ
    if "SLURM_STEP_ID" in environ and shutil.which("srun"):  # Hydra dies inside a job step
        out = ["--output", f"{folder}/%t.stdout.log", "--error", f"{folder}/%t.stderr.log"] if folder else []
        return Allocation.find().srun_mpi(n_ranks, "--kill-on-bad-exit=1", *out, environ=environ)
    mpiexec = find_mpiexec()
    if mpiexec is None:
        return None
    flags = pbs_launcher(mpiexec, environ)
    if "HYDRA" in version_of(*mpiexec) and folder:  # its -prepend-rank labels pieces of lines
        flags += ["-outfile-pattern", f"{folder}/%r.stdout.log", "-errfile-pattern", f"{folder}/%r.stderr.log"]
    elif is_open_mpi(mpiexec):
        flags = ["--tag-output"]
    return [*mpiexec, *flags, "-n", str(n_ranks)]
