"""Check that a class fits: all notebooks on this node, all GPU jobs on the nodes of the class.

    python scripts/preflight.py --attendees 30 --nodes 8 --gpus-per-node 4

Nothing is run. What one notebook holds is what the last preflight here measured, else the course's aim. Job files count
as they stand: `make jobs` first. Run it on the node on which the notebooks will run. The reports of later preflights
hold it too, reckoned anew from what they measured.
"""

import json
import platform
import re
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from manyhands.course.folders import make_private, write_whole
from manyhands.course.lessons import AIM_BYTES
from manyhands.jobs import directives, stamp, submit
from manyhands.launch.machine import available_memory_bytes, available_processes, cores_here
from manyhands.notebook.engine_processes import PORT_RANGE, PORTS
from manyhands.tools import flights
from manyhands.tools.doctor import NOTEBOOK_PROCESSES
from manyhands.tools.lesson_run import NOTEBOOK_RANKS

RANKS_PER_CORE = 10  # ten attendees with two ranks each finish lesson 02 on two busy cores: tests/test_cluster.py
IMPORT_CALLS = 20_000  # to the file system, of one `import torch`: 19,754 of 2.13 by strace -f -c -e trace=%file
ASKED = "class.json"  # beside report.html: the class that was last asked about
JOB_COLUMNS = (
    "job", "nodes", "at once", "turns", "min, measured", "min, at most", "node hours", "imports", "queue"
)  # fmt: skip
AT_MOST = "at most: each job takes all of its walltime (make jobs WALLTIME=...); imports: of torch, at once"
OF_INSTRUCTORS = {"preflight"}  # job files that attendees do not submit


@dataclass(frozen=True)
class Need:
    """One thing that a class needs. `wrong`: what is too little, and the cure; "" where it fits."""

    what: str
    each: str
    together: str
    here: str
    wrong: str = ""


def on_one_node(
    attendees: int, notebook_bytes: int, memory_bytes: int, cores: int, processes: int | None
) -> list[Need]:
    """Return what the attendees' notebooks, of NOTEBOOK_RANKS ranks each, need of one node that has this free."""
    gib, ranks = 2**30, attendees * NOTEBOOK_RANKS
    fit = memory_bytes // notebook_bytes
    most = int(RANKS_PER_CORE * cores / NOTEBOOK_RANKS)
    rows = len(PORT_RANGE) // PORTS
    wanted = attendees * NOTEBOOK_PROCESSES
    fewer = "spread the class over more nodes, or set n_ranks = 2"
    return [
        Need(
            "memory, GiB", f"{notebook_bytes / gib:.1f}", f"{attendees * notebook_bytes / gib:.0f}",
            f"{memory_bytes / gib:.0f}", f"room for {fit} attendees; {fewer}" * (attendees > fit),
        ),
        Need(
            "ranks on cores", f"{NOTEBOOK_RANKS}", f"{ranks}", f"{cores} cores",
            f"{ranks / cores:.0f} ranks per core: up to {RANKS_PER_CORE} was tried, which is {most} attendees; {fewer}"
            * (attendees > most),
        ),
        Need(
            "ports", f"{PORTS}", f"{attendees * PORTS:,}", f"{PORT_RANGE.start:,} to {PORT_RANGE.stop - 1:,}",
            f"at most {rows // 2} attendees find a free row of {PORTS} soon" * (attendees > rows // 2),
        ),
        Need(
            "processes and threads", f"{NOTEBOOK_PROCESSES}", f"{wanted:,}",
            "no limit" if processes is None else f"{processes:,}",
            "the limit of this user or container: each attendee needs an account, or raise pids.max"
            * (processes is not None and wanted > processes),
        ),
        Need(
            "imports of torch", f"{NOTEBOOK_RANKS + 1}", f"{ranks + attendees}",
            f"{(ranks + attendees) * IMPORT_CALLS / 1e6:.1f} million look-ups of files if all start at once",
        ),
    ]  # fmt: skip


@dataclass(frozen=True)
class ClassJob:
    """A job file, submitted by everybody."""

    name: str
    nodes: int
    gpus: int  # per node; 0: it does not say, and has whole nodes
    jobs: int  # of one attendee: the rows of an array
    walltime_s: int
    lesson: str  # that it runs, or ""
    allowed: str  # by the queue
    wrong: list  # what the queue does not allow, as sentences

    @classmethod
    def read(cls, path, scheduler):
        """The job of a job file as it stands."""
        text = path.read_text(encoding="utf-8")
        site = stamp.site_named(stamp.stamped_site(text))
        values = {d.key: d.value for d in directives.read(text, scheduler)}
        gpus = directives.gpus_per_node(values | directives.chunk(values.get("-l select", "")))
        tasks = re.match(r"(\d+)-(\d+)", values.get(stamp.ARRAY[scheduler], "1-1"))
        shared = site.cores_per_gpu is not None and gpus
        queue = values.get("-q" if scheduler == "pbs" else site.queue_option, "")
        limits, lessons = site.queues.get(queue), re.findall(r"scripts/(\d\d_\w+)\.py -- ", text)
        known = f"{limits['nodes'][1]} nodes, {limits['walltime']}" if limits else "no limits known"
        return cls(
            path.name, directives.number_of_nodes(values, scheduler) or 1, gpus if shared else 0,
            int(tasks[2]) - int(tasks[1]) + 1,
            directives.duration_s(values["-l walltime" if scheduler == "pbs" else "--time"]),
            "".join(lessons[:1]),
            f"{queue}: {known}" if queue else known,
            directives.complaints(text, scheduler, site) + stamp.crowd_complaints(path, scheduler),
        )  # fmt: skip

    def at_once(self, nodes: int, gpus_per_node: int) -> int:
        """Return how many of these jobs run at once on `nodes` nodes; 0 where not even one does."""
        share = gpus_per_node // self.gpus if self.gpus else 1
        return nodes // self.nodes * share

    def turns(self, attendees: int, nodes: int, gpus_per_node: int) -> int:
        """In how many turns all jobs of the class run."""
        return -(-attendees * self.jobs // self.at_once(nodes, gpus_per_node))

    def node_hours(self, attendees: int, gpus_per_node: int, seconds: float) -> float:
        """Return the cost of the class's jobs if each takes `seconds`; a job pays for its share of a node's GPUs."""
        share = self.gpus / gpus_per_node if self.gpus else 1
        return attendees * self.jobs * self.nodes * share * seconds / 3600


def job_files():
    """[(path, scheduler)] of what attendees submit: of two files of a name the one that is written for a site."""
    usual, chosen = submit.scheduler() or "slurm", {}
    files = [(stamp.stamped_site(path.read_text(encoding="utf-8")), path, kind) for path, kind in stamp.job_files()]
    for _, path, kind in sorted(files, key=lambda file: (file[0] != "generic", file[2] == usual)):
        chosen[path.stem] = path, kind
    return [chosen[stem] for stem in sorted(chosen.keys() - OF_INSTRUCTORS)]


def notebook_bytes(runs) -> tuple[int, str]:
    """(what the largest notebook of these runs of a preflight held, or the aim; which of them, in words)."""
    measured = [run["peak_bytes"] for run in runs if run["notebook"] and not run["error"]]
    return (max(measured), "measured by the last preflight here") if measured else (AIM_BYTES, "the course's aim")


def lesson_s(runs, lesson) -> float | None:
    """Seconds of the longest of these runs of a lesson under torchrun, or None."""
    well = [run for run in runs if lesson and not run["error"] and run["name"].startswith(f"{lesson} torchrun")]
    return max((run["seconds"] for run in well), default=None)


@dataclass(frozen=True)
class Fit:
    """The answer whether a class fits, and the node hours of its jobs. `wrong`: sentences, none where it fits."""

    attendees: int
    of: str  # the nodes and GPUs of the class, and whence the memory of a notebook is known
    needs: list[Need]
    jobs: list[tuple]  # cells, one for each of JOB_COLUMNS
    node_hours: float  # at most, each job once per attendee
    wrong: list[str]
    columns = JOB_COLUMNS
    at_most = AT_MOST


def fit(attendees: int, nodes: int, gpus_per_node: int, runs: list) -> Fit:
    """Reckon for a class from the runs of a preflight, this node, and the job files as they stand."""
    each_bytes, whence = notebook_bytes(runs)
    needs = on_one_node(attendees, each_bytes, available_memory_bytes(), cores_here(), available_processes())
    wrong = [f"{need.what}: {need.wrong}" for need in needs if need.wrong]
    total_h, rows = 0.0, []
    for job in (ClassJob.read(*file) for file in job_files()):
        wrong += [f"{job.name}: {sentence}" for sentence in job.wrong]
        if not (at_once := job.at_once(nodes, gpus_per_node)):
            asks = f"{job.nodes} nodes" + f" of {job.gpus} GPUs" * bool(job.gpus)
            cure = "make jobs NODES=... GPUS=..."
            wrong.append(f"{job.name} asks for {asks}, the class has {nodes} of {gpus_per_node}: {cure}")
            continue
        turns, running = job.turns(attendees, nodes, gpus_per_node), min(at_once, attendees * job.jobs)
        imports = running * job.nodes * ((job.gpus or gpus_per_node or 1) + 1)  # a rank for each GPU, and torchrun
        measured_s = lesson_s(runs, job.lesson)
        minutes = f"{turns * measured_s / 60:.0f}" if measured_s else "-", f"{turns * job.walltime_s / 60:.0f}"
        total_h += (cost_h := job.node_hours(attendees, gpus_per_node, job.walltime_s))
        cells = job.name, f"{job.nodes}", f"{at_once}", f"{turns}", *minutes, f"{cost_h:,.1f}", f"{imports:,}"
        rows.append((*cells, job.allowed))
    of = (
        f"{attendees} notebooks of {NOTEBOOK_RANKS} ranks at once on {platform.node()}; jobs on {nodes} nodes of "
        f"{gpus_per_node} GPUs; memory of one: {whence}"
    )
    return Fit(attendees, of, needs, rows, total_h, wrong)


def remembered(output, runs) -> Fit | None:
    """Return the Fit of the class that `main` was last asked about with this folder, or None. `runs`: as measured."""
    try:
        asked = json.loads((output / ASKED).read_text())
        return fit(asked["attendees"], asked["nodes"], asked["gpus_per_node"], runs)
    except (OSError, ValueError, LookupError):
        return None


def main(attendees: int, nodes: int, gpus_per_node: int, output) -> int:
    """Print what the class needs; the next report.html in `output` holds it too. Status: 0 it fits, 1 it does not."""
    flight = flights.read(output) or flights.read(output, flights.LAST) or {"runs": {}}
    found = fit(attendees, nodes, gpus_per_node, list(flight["runs"].values()))
    make_private(output)
    asked = {"attendees": attendees, "nodes": nodes, "gpus_per_node": gpus_per_node}
    write_whole(output / ASKED, json.dumps(asked) + "\n")
    console = Console(highlight=False, width=140, soft_wrap=True)
    table = Table("on one node", "each", "together", platform.node(), box=None)
    for need in found.needs:
        table.add_row(need.what, need.each, need.together, need.here)
    console.print(table)
    console.print(found.of)
    jobs = Table(*JOB_COLUMNS, box=None)
    for cells in found.jobs:
        jobs.add_row(*cells)
    console.print(jobs)
    console.print(AT_MOST)
    console.print(f"node hours, each job once per attendee, at most: {found.node_hours:,.1f}")
    for sentence in found.wrong:
        console.print(f"does not fit: {sentence}", style="bold red", markup=False)
    if not found.wrong:
        console.print(f"{attendees} attendees fit", style="bold green")
    return 1 if found.wrong else 0
