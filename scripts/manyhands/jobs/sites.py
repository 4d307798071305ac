"""The machines that the job files can be written for: one small file each in jobs/sites, with its date and source."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from manyhands.course.folders import ROOT
from manyhands.jobs import directives

try:
    import tomllib
except ModuleNotFoundError:  # before Python 3.11: pip brings one
    try:
        from pip._vendor import tomli as tomllib
    except ImportError:
        sys.exit(f"error: {sys.executable} is older than Python 3.11: make jobs PYTHON=/path/to/a/newer/python3 ...")


class JobError(ValueError):
    """A site, an account, a walltime or a file that cannot be used; the message holds the cure."""


@dataclass(frozen=True)
class Site:
    """One machine: what its scheduler wants, when that was read, and where. `pbs`, `slurm`: None where it has none."""

    name: str
    title: str
    checked: str  # date
    sources: list
    verified: str  # what was compared with the sources, and what was not
    walltime: str
    needs: list = field(default_factory=list)
    queue: str | None = None
    pbs: dict | None = None
    slurm: dict | None = None
    queues: dict = field(default_factory=dict)
    settings: dict = field(default_factory=dict)

    @property
    def filesystems(self):
        return self.pbs.get("filesystems", [])

    @property
    def queue_option(self):
        """What QUEUE means in Slurm here: --partition, or --qos."""
        return self.slurm.get("queue_option", "--partition")

    def fixed(self, scheduler):
        """{key: value} of the directives that each job on this machine gets; none where it has no such scheduler."""
        lines = (getattr(self, scheduler) or {}).get("directives", [])
        text = "".join(f"{directives.PREFIX[scheduler]} {line}\n" for line in lines)
        return {directive.key: directive.value for directive in directives.read(text, scheduler)}

    def over_limits(self, queue, nodes, walltime_s):
        """Sentences on what `queue` does not allow; none for a queue whose limits are not known."""
        if queue not in self.queues:
            return
        (least, most), longest = self.queues[queue]["nodes"], self.queues[queue]["walltime"]
        if nodes is not None and not least <= nodes <= most:
            yield f"queue {queue} of {self.title} takes {least} to {most} nodes, not {nodes}"
        if walltime_s > directives.duration_s(longest):
            yield f"queue {queue} of {self.title} takes at most {longest}, not {walltime_s / 60:.0f} minutes"


def jobs_folder():
    """The folder of the job files: of the course in which we are, else of that around the package. Raises JobError."""
    for course in (Path.cwd(), Path.cwd().parent, ROOT):
        if (course / "jobs" / "sites").is_dir():
            return course / "jobs"
    raise JobError("there are no job files here: go to the course's folder, the one that holds jobs/ and scripts/")


def sites():
    """{name: Site} of every file in jobs/sites, by name."""
    return {
        path.stem: Site(name=path.stem, **tomllib.loads(path.read_text(encoding="utf-8")))
        for path in sorted((jobs_folder() / "sites").glob("*.toml"))
    }


def site_named(name):
    """Raises JobError with the list of sites if there is none of that name."""
    known = sites()
    if name not in known:
        raise JobError(
            f"no site {name!r}: take SITE={', '.join(known)}, or copy jobs/sites/generic.toml to a file for yours"
        )
    return known[name]
