"""Find where ranks can run (this machine, or a scheduler's nodes) and which MPI is available."""

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
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from manyhands.launch.launchers import expand_counts, expand_hosts
from manyhands.launch.machine import cores_here
from manyhands.launch.program import explained
from manyhands.launch.ranks import wrapped
from manyhands.launch.settings import environment, value

LOOPBACK = "127.0.0.1"
TORCHRUN = "torch.distributed.run"
INTERNET = (socket.AF_INET, socket.AF_INET6)
LOOPBACK_MPI = {"UCX_NET_DEVICES": "lo", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "lo"}
MOST_RANKS_BY_DEFAULT = 4
OWN_MPIEXEC = Path(sys.prefix) / "bin" / "mpiexec"
ENGINES = {  # words between an engine's name and the site's flags
    "apptainer": ("exec",),
    "singularity": ("exec",),
    "podman-hpc": ("run", "--rm", "--env-host", "--network=host", "--ipc=host"),  # else a container has its own of each
    "pyxis": (),  # flags of srun
}
PBS_NODE = Path(__file__).with_name("pbs_node.sh")


class RanksError(RuntimeError):
    """The ranks could not start or have ended; the message says what to do."""

    def _render_traceback_(self):  # a notebook shows only the sentence
        return wrapped(f"{type(self).__name__}: {self}")


@dataclass(frozen=True)
class Allocation:
    """A place to run ranks: this machine, or the nodes that a scheduler allocated."""

    kind: str  # "local", "pbs", "slurm" (Hydra finds the allocation), "slurm step" (only srun works there)
    hosts: tuple[str, ...]
    slots: int | None = None  # number of ranks that the scheduler allocated, over all nodes
    ranks_per_node: int | None = None  # requested from the scheduler
    job: int = 0  # the job's id, or this process's
    cpus_per_node: int | None = None  # minimum per node of a Slurm job

    @classmethod
    def find(cls, environ: Mapping[str, str] | None = None) -> Allocation:
        """Return where a process with this environment may start ranks. Raise RanksError for an empty node file."""
        environ = environment() if environ is None else environ
        if "PBS_NODEFILE" in environ:
            lines = _node_file(environ["PBS_NODEFILE"])
            if "SLURM_JOB_ID" not in environ:  # Debian's qsub sets it inside Slurm jobs
                hosts = tuple(dict.fromkeys(lines))  # it repeats a host mpiprocs times
                job = _leading_number(environ.get("PBS_JOBID", ""))
                return cls("pbs", hosts, len(lines), len(lines) // len(hosts), job)
        if "SLURM_JOB_ID" in environ and has_srun(environ):
            inside = "SLURM_STEP_ID" in environ
            hosts = tuple(expand_hosts(environ.get("SLURM_JOB_NODELIST", ""))) or (LOOPBACK,)
            tasks = environ.get("SLURM_NTASKS") if not inside else None
            cpus = expand_counts(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
            slots = int(tasks) if tasks else sum(cpus) or len(hosts)
            per_node, of_task = environ.get("SLURM_NTASKS_PER_NODE", ""), environ.get("SLURM_CPUS_PER_TASK", "")
            if per_node.isdecimal() and of_task.isdecimal():  # that count may be of hardware threads
                cpus = [min(int(per_node) * int(of_task), *cpus)]
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
        """Return the srun command that starts n_ranks ranks, equally many on each node of a Slurm job."""
        nodes = min(self.num_nodes, n_ranks)
        inside = ["--overlap"] if self.kind == "slurm step" else []  # in addition to this process's own step
        per_node = -(-n_ranks // nodes)
        counts = [f"--nodes={nodes}", f"--ntasks={n_ranks}", f"--ntasks-per-node={per_node}"]
        # a step does not inherit the job's value, and would give each rank one core
        if self.cpus_per_node and not any(flag.startswith(("-c", "--cpus-per-task")) for flag in flags):
            counts.append(f"--cpus-per-task={max(1, self.cpus_per_node // per_node)}")
        return ["srun", *inside, *counts, *flags]

    def srun_mpi(self, n_ranks: int, *flags: str, environ: Mapping[str, str]) -> list[str]:
        """Return the `srun` command for ranks that form an MPI world: with the site's SRUN_FLAGS and a PMI.

        `--mpi=none` among these flags is for ranks that need no MPI.
        """
        own = [flag for flag in words_of(environ, "SRUN_FLAGS") if flag != "--mpi=none"]
        pmi = [] if any(flag.startswith("--mpi=") for flag in own) else ["--mpi=pmi2"]
        return self.srun(n_ranks, *pmi, *flags, *own)


def has_srun(environ: Mapping[str, str]) -> bool:
    """Return whether Slurm can start ranks here: a container in a Slurm job has the job's variables, and no srun."""
    return shutil.which("srun", path=environ.get("PATH")) is not None


def _node_file(path):
    """Return the words of PBS's node file."""
    with explained(RanksError, "unset PBS_NODEFILE, or start the notebook inside the job"):
        words = Path(path).read_text().split()
    if not words:
        raise RanksError(f"PBS_NODEFILE names {path}, which is empty; unset it, or start inside the job")
    return words


def _leading_number(text):
    digits = text[: len(text) - len(text.lstrip("0123456789"))]  # 123.server and 123[4].server: 123
    return int(digits) if digits else os.getpid()


def loopback_gloo() -> dict[str, str]:
    """Return the variable that keeps gloo on loopback; the interface has a different name on a Mac."""
    return {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}


def missing_interfaces(environ: Mapping[str, str]) -> dict[str, str]:
    """Return {variable: name} of the interfaces by which gloo or NCCL cannot connect ranks: they have no address here.

    gloo needs each that it is told; NCCL one whose name begins so ("=": is so, "^": all others).
    """
    here = {name for name, found in psutil.net_if_addrs().items() if any(one.family in INTERNET for one in found)}
    gloo = [name for name in environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name and name not in here]
    missing = {"GLOO_SOCKET_IFNAME": ", ".join(gloo)} if gloo else {}
    told = environ.get("NCCL_SOCKET_IFNAME", "")
    starts = tuple(filter(None, told.removeprefix("=").split(",")))
    found = any(name in starts if told.startswith("=") else name.startswith(starts) for name in here)
    if starts and not told.startswith("^") and not found:
        missing["NCCL_SOCKET_IFNAME"] = ", ".join(starts)
    return missing


def torchrun_here(n_ranks: int, *flags: str, python: Sequence[str] = (sys.executable,)) -> list[str]:
    """Return the command of torchrun for `n_ranks` on this node, without the program.

    `python`: what runs it and the ranks (`in_image`). By default torchrun publishes this host's name, and waits in
    silence where the name has no address: a laptop without a network, a fresh container. Its environment must not have
    torchrun's settings (PET_*), which would come first.
    """
    start = [*python, "-m", TORCHRUN, "--standalone", f"--local-addr={LOOPBACK}"]
    return [*start, f"--nproc-per-node={n_ranks}", *flags]


def own_address() -> str:
    """Return this host's address as other nodes see it."""
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
    """Split a variable's command or flags into a list. Raise RanksError for an unclosed quote."""
    try:
        return shlex.split(environ.get(name, ""))
    except ValueError as error:
        raise RanksError(f"{name}={environ[name]} cannot be read ({error}): close the quote") from None


def in_image(environ: Mapping[str, str]) -> list[str]:
    """Return the command of the ranks' Python: this one, or the one in the container IMAGE, which ENGINE starts.

    An engine that shows a container nothing of the host gets the working folder and that of temporary files. Raise
    RanksError for an engine that is unknown or not here.
    """
    image, engine = environ.get("IMAGE"), environ.get("ENGINE") or "apptainer"
    if not image:
        return [sys.executable]
    if engine not in ENGINES:
        raise RanksError(f"ENGINE={engine} is unknown; use one of {', '.join(ENGINES)}")
    if engine == "pyxis":
        return ["python"]
    if shutil.which(engine, path=environ.get("PATH")) is None:
        raise RanksError(f"found no {engine} for IMAGE={image}: load its module in site_setup, or name another ENGINE")
    seen = [f"--volume={one}:{one}" for one in _host_folders()] + [f"--workdir={os.getcwd()}"]
    return [
        engine,
        *ENGINES[engine],
        *seen * (engine == "podman-hpc"),
        *words_of(environ, "IMAGE_FLAGS"),
        image,
        "python",
    ]


def pyxis_flags(environ: Mapping[str, str]) -> list[str]:
    """Return the flags of srun for the container IMAGE where ENGINE is pyxis, a plug-in of Slurm's for enroot."""
    if not environ.get("IMAGE") or environ.get("ENGINE") != "pyxis":
        return []
    mounts = ",".join(f"{one}:{one}" for one in _host_folders())
    own = [
        f"--container-image={environ['IMAGE']}",
        f"--container-mounts={mounts}",
        f"--container-workdir={os.getcwd()}",
    ]
    return [*own, *words_of(environ, "IMAGE_FLAGS")]


def _host_folders():
    return [os.getcwd(), tempfile.gettempdir()]


def loopback_mpi() -> dict[str, str]:
    """Return LOOPBACK_MPI if MPI is the PyPI wheel's MPICH, or {} for a site's own MPI or NCCL plug-ins."""
    try:
        importlib.metadata.version("mpich")
    except importlib.metadata.PackageNotFoundError:
        return {}
    # NCCL's plug-in for libfabric reads FI_*, too: if a site has set up either, leave its settings unchanged
    foreign = any(name == "NCCL_NET" or name.startswith("FI_") for name in environment())
    return {name: value for name, value in LOOPBACK_MPI.items() if not (foreign and name.startswith("FI_"))}


def find_mpiexec() -> list[str] | None:
    """Return this environment's mpiexec as a command (MANYHANDS_MPIEXEC overrides it), or None."""
    if (named := value("MANYHANDS_MPIEXEC")) is not None:
        return words_of({"MANYHANDS_MPIEXEC": named}, "MANYHANDS_MPIEXEC") or None
    return [str(OWN_MPIEXEC)] if OWN_MPIEXEC.exists() else find_site_mpiexec(environment())


def find_site_mpiexec(environ: Mapping[str, str]) -> list[str] | None:
    """Return the first mpiexec in PATH that is neither this environment's nor a scheduler's, as a command, or None.

    PBS's is a wrapper that looks for another mpiexec and fails if there is none; pbsdsh is in the same folder. Slurm's
    is a wrapper of srun, which Debian installs as mpiexec.
    """
    for folder in environ.get("PATH", "").split(os.pathsep):
        found = shutil.which("mpiexec", path=folder) if folder != f"{sys.prefix}/bin" else None
        if found and not Path(found).with_name("pbsdsh").exists() and Path(found).resolve().name != "mpiexec.slurm":
            return [found]
    return None


@functools.cache
def version_of(*mpiexec: str) -> str:
    """Return an mpiexec's version text, or "" if it does not start."""
    try:
        return subprocess.run([*mpiexec, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""


def is_open_mpi(mpiexec: Sequence[str]) -> bool:
    return any(name in version_of(*mpiexec) for name in ("Open MPI", "OpenRTE"))


def hydra_launcher(mpiexec: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return flags for Hydra where its own choice does not work.

    It starts ranks on a PBS job's other nodes through PBS instead of ssh, and on this node where a job of Slurm has no
    srun. Return [] for another mpiexec, elsewhere, without `pbs_tmrsh`, and if the user has named a launcher.
    """
    in_slurm = any(name.startswith("SLURM_JOB") for name in environ)
    pbs = not in_slurm and "PBS_JOBID" in environ and "PBS_NODEFILE" in environ
    through_pbs = pbs and shutil.which("pbs_tmrsh", path=environ.get("PATH"))
    in_container = in_slurm and not has_srun(environ)
    if not (through_pbs or in_container) or "HYDRA" not in version_of(*mpiexec):
        return []
    flags = [*mpiexec, *words_of(environ, "MPIEXEC_FLAGS")]
    if any(flag.startswith("-") and flag.lstrip("-").startswith(("launcher", "bootstrap")) for flag in flags):
        return []
    if any(name.startswith(("HYDRA_LAUNCHER", "HYDRA_BOOTSTRAP")) for name in environ):
        return []
    return ["-launcher", "fork"] if in_container else ["-launcher", "rsh", "-launcher-exec", str(PBS_NODE)]


def mpi_launcher(n_ranks: int, folder=None, environ: Mapping[str, str] | None = None) -> list[str] | None:
    """Return the command that starts n_ranks MPI ranks here, with output in files of `folder`, or labelled if possible.

    Return None if there is no MPI.
    """
    environ = environment() if environ is None else environ
    if "SLURM_STEP_ID" in environ and has_srun(environ):  # Hydra dies inside a job step
        out = ["--output", f"{folder}/%t.stdout.log", "--error", f"{folder}/%t.stderr.log"] if folder else []
        return Allocation.find().srun_mpi(n_ranks, "--kill-on-bad-exit=1", *out, environ=environ)
    mpiexec = find_mpiexec()
    if mpiexec is None:
        return None
    flags = hydra_launcher(mpiexec, environ)
    if "HYDRA" in version_of(*mpiexec) and folder:  # -prepend-rank would label fragments of lines
        flags += ["-outfile-pattern", f"{folder}/%r.stdout.log", "-errfile-pattern", f"{folder}/%r.stderr.log"]
    elif is_open_mpi(mpiexec):
        flags = ["--tag-output"]
    return [*mpiexec, *flags, "-n", str(n_ranks)]
