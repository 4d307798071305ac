"""Checks of the place: scheduler, login node, the course's folder, its data."""

import os
import shutil
import tempfile
from pathlib import Path

from manyhands.course.folders import ROOT
from manyhands.doctor.finding import error, ok, warning
from manyhands.launch.login_node import login_node

JOBS = {"SLURM_JOB_ID": "Slurm", "PBS_JOBID": "PBS"}
SUBMIT = {"sbatch": "Slurm", "qsub": "PBS"}


def scheduler(environ=os.environ, which=shutil.which):
    for variable, name in JOBS.items():
        if variable in environ:
            return ok("scheduler", f"inside {name} job {environ[variable]}")
    found = [f"{name} ({path})" for program, name in SUBMIT.items() if (path := which(program))]
    return ok(
        "scheduler",
        f"{', '.join(found)}, no job" if found else "none: bash jobs/ddp_shakespeare.pbs runs here",
    )


def login(reason=...):
    reason = login_node() if reason is ... else reason
    if reason:
        return warning(
            "login node", f"yes ({reason}): use 2 ranks; make test and make preflight refuse",
            "work in an interactive job or in the hub; MANYHANDS_LOGIN_NODE=0 if this is no login node",
        )  # fmt: skip
    return ok("login node", "no")


def outputs(environ=os.environ, course=ROOT, home=None):
    """Where runs write. A read-only course is fine: its outputs go to the user's own place."""
    if named := environ.get("MANYHANDS_OUTPUTS"):
        if _can_be_written(Path(named).expanduser()):
            return ok("outputs", named)
        return error("outputs", f"MANYHANDS_OUTPUTS={named} cannot be written", "name another folder, or unset it")
    if _can_be_written(Path(course) / "outputs"):
        return ok("outputs", str(Path(course) / "outputs"))
    users = Path(home or Path.home()) / ".local/share/manyhands/outputs"
    if _can_be_written(users):
        return ok("outputs", f"{course} cannot be written: outputs go to {users}")
    return error(
        "outputs", f"neither {course} nor {users} can be written", "export MANYHANDS_OUTPUTS=/path/to/a/folder of yours"
    )  # fmt: skip


def _can_be_written(folder):
    """Whether a file can be made there, or where the folder would be made. Tried: modes do not know a read-only disk."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return True
    except OSError:
        return False


def data(environ=os.environ):
    """Is Shakespeare there? Without it every run falls back to another text, and shows other numbers. Downloads nothing."""
    from manyhands.data import shakespeare

    get_it = "python scripts/prepare_data.py where there is a network, or MANYHANDS_SHAKESPEARE=/path/to/the/file"
    try:
        if environ.get("MANYHANDS_SHAKESPEARE"):
            content, _ = shakespeare.find()
            where = environ["MANYHANDS_SHAKESPEARE"]
        else:
            where, content = shakespeare.from_cache() or (None, None)
    except shakespeare.DataError as problem:
        return error("data", str(problem), get_it)
    if content is None:
        return warning("data", "Shakespeare is not here; without it lessons train on another text", get_it)
    return ok("data", f"Shakespeare, {len(content):,} bytes, checked ({where})")
