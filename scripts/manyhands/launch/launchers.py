"""Who am I? What each launcher writes into the environment, read into a Place.

`resolve(environ)` is pure: it looks at a mapping and at nothing else, so that recorded environments test it.
Order matters, because launchers nest: torchrun may have been started by mpiexec, mpiexec by srun. The innermost
one started *this* process and is asked first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace


class LaunchError(ValueError):
    """The launcher did not say who this process is, or says two different things. The message holds the cure."""


@dataclass(frozen=True)
class Place:
    """What the environment says about this process. None: the launcher does not tell, MPI has to be asked."""

    launcher: str  # torchrun, mpich, openmpi, pals, srun, notebook, by hand, alone
    rank: int
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    mpi: bool = False  # the launcher made an MPI world
    agent_store: bool = False  # torchrun's agent already serves a store at master_addr:master_port
    key: str = ""  # what the ranks of this start have in common, where they must find each other by it

    @property
    def single_node(self) -> bool:
        """True only where the launcher says that all ranks are on this node."""
        return self.world_size is not None and self.world_size == self.local_world_size


# launcher, the variable that gives it away, those it must set with it, the cure for half of them
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OPENMPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
NOTEBOOK = tuple(f"MANYHANDS_{name}" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MPI"))
NO_RANK_STEPS = 4294967280  # Slurm's step ids from here on are batch scripts, interactive shells and their like


def resolve(environ: Mapping[str, str]) -> Place:
    """The Place of the process that has this environment.

    Raises LaunchError where half of a launcher's variables are set, or where they contradict each other.
    """
    for asked in (_notebook, _torchrun, _openmpi, _pals, _mpich, _srun, _by_hand):
        place = asked(environ)
        if place is not None:
            return _checked(place)
    return Place("alone", 0, 1, 0, 1)


def without_foreign_mpi(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what an outer mpiexec left in it: MPI started by a child of torchrun dies of it."""
    foreign = re.compile(r"PMI|HYDI|HYDRA|MPI_LOCAL")
    return {name: value for name, value in environ.items() if not foreign.match(name)}


def _notebook(environ):
    if environ.get("MANYHANDS_NOTEBOOK") != "1":
        return None
    rank, size, local_rank, local_size, mpi = _numbers(
        environ, "the notebook's engine", NOTEBOOK, "restart the ranks with hands.restart()"
    )
    return Place("notebook", rank, size, local_rank, local_size, mpi=bool(mpi))


def _torchrun(environ):
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    cure = "start the script itself with `python -m torch.distributed.run --standalone --nproc-per-node 4 script.py`"
    rank, size, local_rank, local_size, port = _numbers(
        environ, "torchrun", [name for name in TORCHRUN if name != "MASTER_ADDR"], cure
    )
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True"
    key = f"{environ['TORCHELASTIC_RUN_ID']}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return Place("torchrun", rank, size, local_rank, local_size, _address(environ, cure), port, False, agent, key)


def _openmpi(environ):
    if not any(name.startswith("OMPI_COMM_WORLD_") for name in environ):
        return None
    return Place("openmpi", *_numbers(environ, "Open MPI", OPENMPI, "start the script with `mpiexec -n 4`"), mpi=True)


def _pals(environ):
    if "PALS_RANKID" not in environ or _in_srun(environ):
        return None  # Slurm's MPI plugin "cray_shasta" sets PALS_RANKID for Cray MPICH; srun started this one
    rank, local_rank = _numbers(
        environ, "PALS", ("PALS_RANKID", "PALS_LOCAL_RANKID"), "start the script with `mpiexec -n 4 --ppn 4`"
    )
    size, local_size = _optional(environ, "PMI_SIZE"), _optional(environ, "PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE")
    return Place("pals", rank, size, local_rank, local_size, mpi=True)


def _mpich(environ):
    if "SLURM_STEP_ID" in environ and "MPI_LOCALRANKID" not in environ:
        return None  # srun --mpi=pmi2 sets PMI_RANK too, but no MPI_LOCALRANKID: srun started this one
    if not any(name in environ for name in ("PMI_RANK", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALRANKID")):
        return None
    cure = "start the script with the mpiexec of this environment, `.venv/bin/mpiexec -n 4 python script.py`"
    rank, size = _numbers(environ, "mpiexec (MPICH)", ("PMI_RANK", "PMI_SIZE"), cure)
    local_rank, local_size = _optional(environ, "MPI_LOCALRANKID"), _optional(environ, "MPI_LOCALNRANKS")
    return Place("mpich", rank, size, local_rank, local_size, mpi=True)


def _srun(environ):
    # The batch script of a job has SLURM_PROCID=0 and SLURM_NTASKS=4 as well; only a task of a step is a rank.
    if not _in_srun(environ):
        return None
    cure = "start the script with `srun --ntasks 4 python script.py`"
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    job, step, rank, size, local_rank = _numbers(environ, "srun", names, cure)
    if "SLURM_STEP_NODELIST" not in environ:
        raise LaunchError(f"srun set SLURM_STEP_ID but not SLURM_STEP_NODELIST; {cure}")
    hosts = expand_hosts(environ["SLURM_STEP_NODELIST"])
    local_size = size if len(hosts) == 1 else _tasks_here(environ, size)
    # The PMI of "cray_shasta" serves Cray's own MPICH alone: there the ranks meet without MPI.
    of_cray = "PALS_RANKID" in environ or environ.get("SLURM_MPI_TYPE") == "cray_shasta"
    with_pmi = not of_cray and ("PMI_RANK" in environ or "PMIX_RANK" in environ)
    address = None if with_pmi else ("127.0.0.1" if len(hosts) == 1 else hosts[0])
    port = None if with_pmi else 20000 + (job * 37 + step) % 10000
    key = f"slurm-{job}-{step}"
    return Place("srun", rank, size, local_rank, local_size, address, port, mpi=with_pmi, key=key)


def _in_srun(environ):
    """Whether this process is a task of an srun, not a batch script or an interactive shell."""
    step = environ.get("SLURM_STEP_ID")
    return step is not None and not (step.isdigit() and int(step) >= NO_RANK_STEPS)


def _by_hand(environ):
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT exported by a job script: torch's own convention."""
    if "RANK" not in environ and "LOCAL_RANK" not in environ:
        return None  # a WORLD_SIZE or MASTER_ADDR alone is somebody's setting, not a launcher
    cure = "set all of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, or none of them and use a launcher"
    rank, size, port = _numbers(environ, "your environment", ("RANK", "WORLD_SIZE", "MASTER_PORT"), cure)
    local_rank, local_size = _optional(environ, "LOCAL_RANK"), _optional(environ, "LOCAL_WORLD_SIZE")
    return Place("by hand", rank, size, local_rank, local_size, _address(environ, cure), port, key="by-hand")


def expand_hosts(nodelist: str) -> list[str]:
    """The hosts of a Slurm node list in order: `nid[01-03,7],login1` -> nid01 nid02 nid03 nid7 login1."""
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


def _tasks_here(environ, size):
    """How many tasks of the step run on this node: entry SLURM_NODEID of `4(x2),2`, where Slurm says so."""
    counts = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if found := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part):
            counts += [int(found[1])] * int(found[2] or 1)
    node = _optional(environ, "SLURM_NODEID")
    return counts[node] if node is not None and node < len(counts) and sum(counts) == size else None


def _numbers(environ, who, names, cure):
    """The integers of these variables; LaunchError that names what is missing or malformed."""
    missing = [name for name in names if name not in environ]
    if missing:
        there = [name for name in names if name in environ]
        found = f"set {', '.join(there)} but not" if there else "left its mark but did not set"
        raise LaunchError(f"{who} {found} {', '.join(missing)}; {cure}")
    for name in names:
        if not re.fullmatch(r"\d+", environ[name]):
            raise LaunchError(f"{who} set {name}={environ[name]!r}, which is not a number; {cure}")
    return [int(environ[name]) for name in names]


def _optional(environ, *names):
    for name in names:
        if re.fullmatch(r"\d+", environ.get(name, "")):
            return int(environ[name])
    return None


def _address(environ, cure):
    if not environ.get("MASTER_ADDR"):
        raise LaunchError(f"MASTER_ADDR is not set, so the ranks cannot find rank 0; {cure}")
    return environ["MASTER_ADDR"]


def _checked(place):
    who, rank, size = place.launcher, place.rank, place.world_size
    if size is not None and rank >= size:
        raise LaunchError(f"{who} says rank {rank} of {size}, but ranks run from 0 to {size - 1}; unset its variables")
    if place.local_rank is None and size == 1:
        return replace(place, local_rank=0, local_world_size=1)
    local = place.local_world_size
    if local is not None and place.local_rank is not None and place.local_rank >= local:
        raise LaunchError(f"{who} says local rank {place.local_rank} of {local}; unset its variables")
    return place
