"""Identify this process's rank from its environment, with a table of launchers: a RankInfo.

A launcher is one row of LAUNCHERS. `resolve(environ)` is a pure function of a mapping, so
that recorded environments can test it. The order of rows matters, because launchers nest: mpiexec may start torchrun,
and srun mpiexec. The innermost one started *this* process, so its row comes first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

Environ = Mapping[str, str]


class LaunchError(ValueError):
    """The launcher's variables are incomplete or contradictory; the message says what to do."""


@dataclass(frozen=True)
class RankInfo:
    """This process's rank according to its environment. None: the launcher does not set it, so MPI must be asked."""

    launcher: str  # a name in LAUNCHERS, or "alone"
    rank: int
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    mpi: bool = False  # whether the launcher made an MPI world
    agent_store: bool = False  # whether torchrun's agent already serves a store at master_addr:master_port
    key: str = ""  # an identifier shared by the ranks of this start, if they find each other by it

    @property
    def single_node(self) -> bool:
        """Return True only if the launcher says that all ranks are on this node."""
        return self.world_size is not None and self.world_size == self.local_world_size


@dataclass(frozen=True)
class Launcher:
    """A launcher: how to recognise it, and the variables in which it passes a process's rank."""

    name: str
    marks: tuple[str, ...]  # it started this process if one of these variables is set ...
    needs: dict[str, str]  # field of RankInfo -> its variable; a partial set is an error
    # the same for optional variables; the first of several names that is set
    may: dict[str, str] = field(default_factory=dict)
    unless: Callable[[Environ], bool] = lambda environ: False  # ... unless this returns that another launcher did
    details: Callable[[dict, Environ], dict] = lambda told, environ: told  # the values read -> the fields of RankInfo
    sets: tuple[str, ...] = ()  # prefixes of its variables
    mpi: str = ""  # the MPI world that it makes: of "any" MPI, or possibly of the PyPI "wheel"
    waits_for_all: bool = False  # whether the other ranks keep running for a while after one fails
    command: str = "{script}, {n} ranks"  # the command that starts a script on `n` ranks, `local` on each of `nodes`
    title: str = ""  # its name in sentences, if different
    cure: str = ""  # if different from its command

    def told(self, environ: Environ) -> dict:
        """Return {field: number} from the launcher's variables. Raise LaunchError naming missing or malformed ones."""
        title = self.title or self.name
        start = self.command.format(n=4, local=4, nodes=1, script="script.py")
        cure = self.cure or f"start the script with `{start}`"
        if missing := [name for name in self.needs.values() if not environ.get(name)]:
            there = [name for name in self.needs.values() if environ.get(name)]
            found = f"set {', '.join(there)} but not" if there else "left its mark but did not set"
            raise LaunchError(f"{title} {found} {', '.join(missing)}; {cure}")
        told: dict = {}
        for what, name in self.needs.items():
            if what not in TEXTS and not environ[name].isdecimal():
                raise LaunchError(f"{title} set {name}={environ[name]!r}, which is not a number; {cure}")
            told[what] = environ[name] if what in TEXTS else int(environ[name])
        for what, names in self.may.items():
            told[what] = next((int(environ[name]) for name in names.split() if environ.get(name, "").isdecimal()), None)
        return told


TEXTS = ("master_addr", "nodes")  # all other values are numbers
BATCH_STEP = 4294967280  # Slurm's step ids from here on belong to batch scripts, interactive shells and similar


def _of_agent(told, environ):
    """Return the fields for torchrun, whose agent may serve the store itself, a new one after each restart."""
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    key = f"{environ['TORCHELASTIC_RUN_ID']}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return told | {"agent_store": agent, "key": key}


def _in_srun(environ):
    """Return whether this process is an srun task. A batch script has SLURM_PROCID=0 and SLURM_NTASKS=4 as well."""
    step = environ.get("SLURM_STEP_ID")
    return step is not None and not (step.isdecimal() and int(step) >= BATCH_STEP)


def _of_step(told, environ):
    """Return a step's fields. Without PMI its ranks connect on its first host, at a port made of job and step id."""
    job, step, hosts = told.pop("job"), told.pop("step"), expand_hosts(told.pop("nodes"))
    told["local_world_size"] = told["world_size"] if len(hosts) == 1 else _tasks_here(environ, told["world_size"])
    # The PMI of "cray_shasta" works only with Cray's MPICH: there the ranks connect without MPI.
    of_cray = "PALS_RANKID" in environ or environ.get("SLURM_MPI_TYPE") == "cray_shasta"
    if not of_cray and ("PMI_RANK" in environ or "PMIX_RANK" in environ):
        return told | {"mpi": True}
    port = 20000 + (job * 37 + step) % 10000
    address = "127.0.0.1" if len(hosts) == 1 else hosts[0] + environ.get("HOST_SUFFIX", "")
    return told | {"mpi": False, "master_addr": address, "master_port": port, "key": f"slurm-{job}-{step}"}


LAUNCHERS = [
    Launcher(
        "notebook",
        title="the notebook's engine",
        marks=("MANYHANDS_NOTEBOOK",),
        needs={
            "rank": "MANYHANDS_RANK", "world_size": "MANYHANDS_WORLD_SIZE", "local_rank": "MANYHANDS_LOCAL_RANK",
            "local_world_size": "MANYHANDS_LOCAL_WORLD_SIZE", "mpi": "MANYHANDS_MPI",
        },
        details=lambda told, environ: told | {"mpi": bool(told["mpi"])},
        sets=tuple(f"MANYHANDS_{name}" for name in ("NOTEBOOK", "RANK", "WORLD", "LOCAL", "LESSON", "STORE")),
        mpi="wheel",
        cure="restart the ranks with hands.restart()",
    ),
    Launcher(
        "torchrun",
        marks=("TORCHELASTIC_RUN_ID",),
        needs={
            "rank": "RANK", "world_size": "WORLD_SIZE",
            "local_rank": "LOCAL_RANK", "local_world_size": "LOCAL_WORLD_SIZE",
            "master_port": "MASTER_PORT", "master_addr": "MASTER_ADDR",
        },
        details=_of_agent,
        sets=(
            "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC",
            "PET_",  # its settings, such as PET_NNODES, which a job file or Kubeflow's trainer sets
        ),
        command="python -m torch.distributed.run --nnodes {nodes} --nproc-per-node {local} {script}",
    ),
    Launcher(
        "openmpi",
        title="Open MPI",
        marks=tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
        needs={
            "rank": "OMPI_COMM_WORLD_RANK", "world_size": "OMPI_COMM_WORLD_SIZE",
            "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK", "local_world_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
        },
        sets=("OMPI_COMM_",),
        mpi="any",
        command="mpiexec -n {n} python {script}",
    ),
    Launcher(
        "pals",
        title="PALS",
        marks=("PALS_RANKID",),
        unless=_in_srun,  # Slurm's MPI plugin "cray_shasta" sets PALS_RANKID for Cray MPICH
        needs={"rank": "PALS_RANKID", "local_rank": "PALS_LOCAL_RANKID"},
        may={"world_size": "PMI_SIZE", "local_world_size": "PALS_LOCAL_SIZE PMI_LOCAL_SIZE"},
        sets=("PALS_RANK", "PALS_LOCAL"),
        mpi="any",
        command="mpiexec -n {n} --ppn {local} python {script}",
    ),
    Launcher(
        "mpich",
        title="mpiexec (MPICH)",
        marks=("PMI_RANK", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALRANKID"),
        # srun --mpi=pmi2 sets PMI_RANK too, but no MPI_LOCALRANKID
        unless=lambda environ: "SLURM_STEP_ID" in environ and "MPI_LOCALRANKID" not in environ,
        needs={"rank": "PMI_RANK", "world_size": "PMI_SIZE"},
        may={"local_rank": "MPI_LOCALRANKID", "local_world_size": "MPI_LOCALNRANKS"},
        sets=("PMI", "HYDI", "MPI_LOCAL"),  # HYDRA_* are settings of a user or site
        mpi="wheel",
        waits_for_all=True,
        command="mpiexec -n {n} python {script}",
        cure="start the script with the mpiexec of this environment, `.venv/bin/mpiexec -n 4 python script.py`",
    ),
    Launcher(
        "srun",
        marks=("SLURM_STEP_ID",),
        unless=lambda environ: not _in_srun(environ),
        needs={
            "job": "SLURM_JOB_ID", "step": "SLURM_STEP_ID", "rank": "SLURM_PROCID",
            "world_size": "SLURM_STEP_NUM_TASKS", "local_rank": "SLURM_LOCALID", "nodes": "SLURM_STEP_NODELIST",
        },
        details=_of_step,
        mpi="wheel",
        command="srun --nodes {nodes} --ntasks {n} python {script}",
    ),
    Launcher(  # torch's own convention, exported by a job script
        "by hand",
        title="your environment",
        marks=("RANK", "LOCAL_RANK"),  # WORLD_SIZE or MASTER_ADDR alone is a setting, not a launcher
        needs={"rank": "RANK", "world_size": "WORLD_SIZE", "master_port": "MASTER_PORT", "master_addr": "MASTER_ADDR"},
        may={"local_rank": "LOCAL_RANK", "local_world_size": "LOCAL_WORLD_SIZE"},
        details=lambda told, environ: told | {"key": "by-hand"},
        cure="set all of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, or none of them and use a launcher",
    ),
]  # fmt: skip
ALONE = Launcher("alone", marks=(), needs={}, command="python {script}")


def launcher_named(name: str) -> Launcher:
    """Return a launcher's row, or ALONE for a process without a launcher."""
    return next((row for row in LAUNCHERS if row.name == name), ALONE)


def resolve(environ: Environ | None = None) -> RankInfo:
    """Return the RankInfo of the process with this environment (None: this process).

    Raise LaunchError if only part of a launcher's variables are set, or if they contradict each other.
    """
    environ = os.environ if environ is None else environ
    for row in LAUNCHERS:
        if any(name in environ for name in row.marks) and not row.unless(environ):
            told = row.details(row.told(environ), environ)
            return _checked(RankInfo(row.name, **{"mpi": bool(row.mpi), **told}))
    return RankInfo("alone", 0, 1, 0, 1)


def claimed(what: str, default: int, environ: Environ | None = None) -> int:
    """Return the first number that any launcher's variable gives "rank" or "world_size", even if `resolve` raises."""
    environ = os.environ if environ is None else environ
    names = [row.needs.get(what, "") for row in LAUNCHERS] + ["PMIX_RANK"] * (what == "rank")
    return next((int(environ[name]) for name in names if environ.get(name, "").isdecimal()), default)


def without_launchers(environ: Environ, *others: str, only: str = "") -> dict[str, str]:
    """Return the environment without the variables of launchers (or one of them) and without prefixes `others`.

    Use it for a child that is not one of their ranks. An MPI started by a child of torchrun dies if it inherits an
    outer mpiexec's variables.
    """
    foreign = (*others, *(start for row in LAUNCHERS if only in ("", row.name) for start in row.sets))
    return {
        name: value for name, value in environ.items() if name == "MANYHANDS_RANKS" or not name.startswith(foreign)
    }  # which is a site's


def expand_hosts(nodelist: str) -> list[str]:
    """Expand a Slurm node list in order: `nid[01-03,7],login1` -> nid01 nid02 nid03 nid7 login1."""
    hosts = []
    for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        expanded = [""]
        for text, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", word):
            numbers = [text] if text else [n for part in ranges.split(",") for n in _range(part)]
            expanded = [head + tail for head in expanded for tail in numbers]
        hosts += expanded
    return hosts


def _range(part):
    first, _, last = part.partition("-")
    return [f"{n:0{len(first)}d}" for n in range(int(first), int(last or first) + 1)]


def expand_counts(text: str) -> list[int]:
    """Expand Slurm's numbers per node: `4(x2),2` -> 4 4 2."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in found for _ in range(int(times or 1))]


def _tasks_here(environ, size):
    """Return the number of the step's tasks on this node, if Slurm sets it."""
    counts, node = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", "")), environ.get("SLURM_NODEID", "")
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) and sum(counts) == size else None


def _checked(info):
    who, rank, size = info.launcher, info.rank, info.world_size
    if size is not None and rank >= size:
        raise LaunchError(f"{who} says rank {rank} of {size}, but ranks run from 0 to {size - 1}; unset its variables")
    if info.local_rank is None and size == 1:
        return replace(info, local_rank=0, local_world_size=1)
    local = info.local_world_size
    if local is not None and info.local_rank is not None and info.local_rank >= local:
        raise LaunchError(f"{who} says local rank {info.local_rank} of {local}; unset its variables")
    return info
