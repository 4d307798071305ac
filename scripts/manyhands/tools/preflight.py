"""Run every lesson in every way before an event, and say what is ready, what is slow, what broke, what has changed.

`lesson_run` is one run. What came of all is in `report.html`, one page that loads nothing, and in `junit.xml`; both are
written again after each run. `flights` keeps what the next preflight compares with; `classroom` reckons for a class.
"""

import functools
import importlib.metadata
import os
import platform
import re
import shlex
import sys
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from os.path import relpath
from pathlib import Path
from tokenize import TokenError

import jinja2
import psutil
from junitparser import Failure, JUnitXml, TestCase, TestSuite
from rich.console import Console
from rich.text import Text

from manyhands.course import pairs
from manyhands.course.folders import ROOT, make_private, version, write_whole
from manyhands.course.lesson_parameters import least_ranks, read
from manyhands.course.lessons import AIM_BYTES, Lesson, find_lessons, left_alone
from manyhands.launch.allocation import Allocation, RanksError, find_mpiexec, mpi_launcher, pyxis_flags
from manyhands.launch.commands import ranks_on_a_node
from manyhands.launch.flags import Flags
from manyhands.launch.machine import available_memory_bytes, cores_here, refuse_on_login_node
from manyhands.launch.processes import sigterm_interrupts
from manyhands.launch.recorded_runs import record
from manyhands.launch.settings import device, environment
from manyhands.tools import flights
from manyhands.tools.lesson_run import GPU_TIMEOUT_S, NOTEBOOK_RANKS, TIMEOUT_S, Run, positive, write_page

SUBMIT_S = 600  # from which on a job of --submit that has not ended is cancelled
NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
PACKAGES = {"torch", "numpy", "mpi4py", "ipyparallel", "jupyterlab", "jupytext", "papermill"}
OFFLINE = (
    "The offline corpus stood in for Shakespeare: the losses differ from the course's. "
    "`python scripts/prepare_data.py`, or MANYHANDS_SHAKESPEARE=file, gives the real one."
)
NO_MPIEXEC = "no mpiexec here, so no script was run by it: `pip install mpich`, or load the site's MPI module"


def parser(description=None):
    """The options of scripts/preflight.py."""
    parser = Flags(description=description)
    devices = "where all runs compute (default: MANYHANDS_DEVICE, else what is there)"
    ranks = "ranks of every run (repeatable; default: 2 and 4, notebooks their own; on several nodes a rank for each "
    ranks += "of their GPUs, or NPROC_PER_NODE on each)"
    limit = f"seconds for one run (default: {TIMEOUT_S}, on GPUs {GPU_TIMEOUT_S})"
    resume = "keep what went well in the same --output, and make the other runs; with the word unfinished: only where "
    resume += "the last preflight was interrupted"
    add = parser.add_argument
    add("--lesson", action="append", default=[], metavar="03", help="only this lesson (repeatable)")
    add("--device", choices=("cpu", "cuda", "xpu"), help=devices)
    add("--ranks", action="append", type=positive, metavar="N", help=ranks)
    add("--timeout", type=positive, metavar="S", help=limit)
    add("--short", action="store_true", help="short parameters: about 10 s of work per run")
    add("--notebooks", action="store_true", help="only the notebooks, no launchers")
    add("--resume", nargs="?", const="always", choices=("always", "unfinished"), help=resume)
    add("--submit", action="store_true", help=f"also submit a small job to the scheduler; {SUBMIT_S} s to its end")
    add("--output", type=Path, metavar="FOLDER", help="default: outputs/preflight")
    add("--attendees", type=positive, metavar="N", help="run nothing: print whether N attendees fit on this node, and")
    hour = "on GPUs, what nobody has run there yet, each result kept in assets/recorded at once; quarter: 15 minutes"
    add("--gpu-hour", nargs="?", const="hour", choices=("hour", "quarter"), help=hour)
    add("--nodes", type=positive, metavar="N", help="... with N nodes for all of them")
    add("--gpus-per-node", type=positive, metavar="N", help="... of N GPUs, how long their jobs take")
    return parser


def main(argv=None, description=None, root=ROOT) -> int:
    """Run the preflight of the course below `root`. Exit status: 0 well, 1 not, 2 refused, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    flags = parser(description)
    options = flags.parse_args(argv)
    output = (options.output or root / "outputs" / "preflight").resolve()
    if options.gpu_hour:
        from manyhands.tools import gpu_hour  # it brings torch

        return gpu_hour.main(root, options.gpu_hour, options.device or "auto", again=options.resume == "always")
    if options.attendees:
        from manyhands.tools import classroom  # like `devices` it brings torch: not for --help

        return classroom.main(options.attendees, options.nodes or 1, options.gpus_per_node or 0, output)
    if options.nodes or options.gpus_per_node:
        flags.error("--nodes and --gpus-per-node are what a class has: name its --attendees, too")
    try:
        if refusal := refuse_on_login_node("make preflight"):
            raise ValueError(refusal)
        Allocation.find()  # a job whose nodes cannot be read
        lessons = find_lessons(root, options.lesson)
        kind = usual_device(options.device or device())  # before anything is planned: on GPUs runs take turns
        runs = plan(
            lessons, output / "runs", ranks=options.ranks or usual_ranks(kind), device=kind, short=options.short,
            notebooks_only=options.notebooks,
        )  # fmt: skip
    except (ValueError, RanksError) as error:
        print(f"preflight: {error}", file=sys.stderr)
        return 2
    command = shlex.join(["python", "scripts/preflight.py", *argv])
    preflight = Preflight(root, output, command, runs, options.resume, needs_mpiexec=not options.notebooks)
    try:
        with sigterm_interrupts():
            preflight.run(options.timeout or (TIMEOUT_S if kind == "cpu" else GPU_TIMEOUT_S), options.submit)
    except KeyboardInterrupt:
        preflight.report()
        ended = f"interrupted after {len(preflight.outcomes)} of {_count(len(runs), 'run')}; all its runs were ended"
        cure = "go on with --resume"
        print(f"preflight: {ended}; report: {output / 'report.html'}; {cure}", file=sys.stderr)
        return 130
    return preflight.conclude(records=not options.short)  # what a short run measures is not what a lesson shows


class Preflight:
    """The runs of one preflight, their outcomes so far, and the files in `output` that tell them."""

    def __init__(self, root, output, command, runs, resume, needs_mpiexec):
        self.root, self.output, self.runs, self.needs_mpiexec = root, output, runs, needs_mpiexec
        self.console, self.started = Console(highlight=False, soft_wrap=True), time.monotonic()
        self.metadata = gather_metadata(root) | {"command": command}
        self.outcomes, self.queue_warnings = {}, []
        if others := self.metadata.get("other files"):
            self.console.print(others, markup=False)
        goes_on, self.last = flights.begin(output, resume)
        if goes_on:
            other = flights.changed(flights.read(output)["metadata"], self.metadata, flights.SAME_RUNS)
            if other:
                self.console.print(f"nothing of the earlier preflight counts: {'; '.join(other)}")
            else:
                self.outcomes = {run: outcome for run in runs if (outcome := run.earlier())}
        for run in runs:
            if run not in self.outcomes:
                run.forget()
        if self.outcomes:
            self.console.print(f"{_count(len(self.outcomes), 'run')} of {len(runs)} went well before: kept")

    def run(self, timeout_s, submit):
        """Carry out the runs that have no outcome yet, and report after each; then submit a job, if that is wanted."""
        carry_out(self.runs, timeout_s, self.console, self.outcomes, self.report)
        if submit:
            self.metadata["submitted"], well = try_queue()
            self.queue_warnings += [] if well else [self.metadata["submitted"]]

    def report(self, **more):
        """Write what there is so far: (results, warnings)."""
        from manyhands.tools import classroom

        made = [self.outcomes[run] for run in self.runs if run in self.outcomes]
        results, missing = judge(made), len(self.runs) - len(made)
        corpus = " and ".join(sorted(corpora(results))) or "none used by these runs"
        metadata = self.metadata | {"corpus": corpus} | more
        warnings = [*self.queue_warnings, *[OFFLINE] * ("offline" in corpora(results))]
        warnings += [NO_MPIEXEC] if self.needs_mpiexec and not has_mpiexec() else []
        if self.last:
            warnings += flights.worse(self.last, metadata, made)
            since = flights.changed(self.last["metadata"], metadata) or ["nothing has changed"]
            metadata["since"] = "; ".join([self.last["metadata"]["when"], *since])
        make_private(self.output)
        flights.write(self.output, metadata, made, finished=not missing)
        fit = classroom.remembered(self.output, list(flights.read(self.output)["runs"].values()))
        text = page(self.output, results, metadata, warnings, time.monotonic() - self.started, missing, fit)
        write_whole(self.output / "report.html", text)
        write_junit(self.output / "junit.xml", results, metadata)
        return results, warnings

    def conclude(self, records) -> int:
        """Print the verdict; with `records`, propose the figures from GPUs for assets/recorded. Return the status."""
        results, warnings = self.report()
        folder = self.output / "recorded"
        if recorded := export_recorded(results, folder) if records else []:
            branch = f"preflight-{time.strftime('%Y%m%d-%H%M%S')}-{Allocation.find().job}"
            take = flights.propose(recorded, self.root, branch, self.output / "recorded.patch")
            self.report(recorded=f"{', '.join(path.name for path in recorded)} in {folder}; to keep them: {take}")
        state, verdict = verdict_of(results, warnings)
        bad = [f"{result.lesson.name} {said}" for result in results for said in result.complaints]
        lines = [(line, "bold red") for line in bad] + [(f"warning: {warning}", "yellow") for warning in warnings]
        for line, style in [*lines, (verdict, "bold red" if state == "broken" else "bold green")]:
            self.console.print(line, style=style, markup=False)
        if recorded:
            self.console.print(f"recorded on GPUs, in {folder}; to have them in assets/recorded: {take}")
        self.console.print(f"report: {self.output / 'report.html'}")
        return 1 if state == "broken" else 0


# ------------------------------------------------------------------ which runs, and how many at once


def usual_device(named) -> str:
    """Return the device that `named` means. "auto" is the CPU if there is one GPU, as lessons have more ranks.

    But MANYHANDS_RANKS=1, of a site whose nodes have one, means that GPU.
    """
    from manyhands.launch import devices

    alone = Allocation.find().kind == "local" and devices.gpus_here()[1] == 1
    alone = alone and environment().get("MANYHANDS_RANKS") != "1"
    return "cpu" if named == "auto" and alone else devices.device_named(named)


def usual_ranks(kind) -> list[int] | None:
    """Ranks of the runs where nobody says. None: 2 and 4, notebooks their own; on GPUs no more than there are."""
    where, environ = Allocation.find(), environment(MANYHANDS_DEVICE=kind)
    if where.num_nodes > 1 or environ.get("NPROC_PER_NODE"):
        return [where.num_nodes * ranks_on_a_node(where, environ)]
    if kind == "cpu":
        return None
    from manyhands.launch import devices

    gpus = devices.gpus_here(environ)[1]
    return sorted({n for n in (2, 4) if n < gpus} | {gpus})


def try_queue(limit_s: float = SUBMIT_S) -> tuple[str, bool]:
    """Submit a small job as lesson 04 does; returns (a sentence, whether it went well).

    A job that has not ended after `limit_s` seconds is cancelled.
    """
    from manyhands.jobs import submit

    if (via := submit.scheduler()) is None:
        return "no scheduler answers here, so no job was submitted", False
    try:
        job = submit.submit("ddp_shakespeare", "--steps 20 --repeats 1", via=via)
    except (submit.SubmitError, pairs.PairError) as error:
        return f"{via} did not take a job: {' '.join(str(error).split())}", False
    try:
        state = job.watch(limit_s)
        said = ", ".join(filter(None, job.state()))
    finally:
        if not job.ended():
            job.cancel()
    if state not in submit.ENDED:
        return f"{via}'s job {job.number} was cancelled after {limit_s:g} s: {said}", False
    return f"{via}'s job {job.number}: {said}; its output is {job.output.name}", state == "completed"


def has_mpiexec() -> bool:
    """Return whether ranks can be started by MPI here: a site may have nothing but srun."""
    return bool(environment().get("MPIEXEC") or mpi_launcher(1))


def plan(lessons, folder, *, ranks=None, device=None, short=False, notebooks_only=False) -> list[Run]:
    """First every notebook, then every script under torchrun and mpiexec, if it is here, on 2 and 4 ranks, or `ranks`.

    Raise ValueError for short parameters that a lesson does not know.
    """
    notebooks, scripts = [], []
    # as on sites that advise against torchrun
    environ = environment()
    mpi = has_mpiexec() and not pyxis_flags(environ)
    launchers = list(dict.fromkeys([environ.get("STARTER") or "torchrun", *["mpiexec"] * mpi]))
    for lesson in lessons:
        parameters = dict(lesson.short) if short else {}
        known, least = set(parameters), 1
        with suppress(OSError, ValueError, SyntaxError, TokenError):  # a broken script says so in its own runs
            found = read(lesson.script)
            known, least = {one.name for one in found}, least_ranks(found)
        if unknown := parameters.keys() - known:
            raise ValueError(f"SHORT in lessons.py sets {', '.join(unknown)}, which {lesson.name} does not have")
        most = max(least, *ranks) if ranks else None
        # a job that lesson 04 submits would wait in the queue, and a queue may take one of each user: this one
        at_once = parameters | ({"submit_via": "bash"} if "submit_via" in known else {})
        ways = [("notebook", most)] + [
            (way, n) for n in dict.fromkeys(max(least, n) for n in ranks or (2, 4)) for way in launchers
        ]
        for way, n in ways:
            own = folder / lesson.name / (f"{way}-{n}" if n else way)
            if way == "notebook":
                notebooks.append(Run(lesson, way, n, own, at_once, device))
            else:
                scripts.append(Run(lesson, way, n, own, parameters, device))
    return notebooks if notebooks_only else notebooks + scripts


def at_once(run, running, cores, memory_bytes) -> bool:
    """May `run` start beside the `running` ones? Alone it always may, and on several nodes only alone."""
    if any(r.nodes > 1 for r in [run, *running]):
        return not running
    wanted = sum((r.n_ranks or NOTEBOOK_RANKS) for r in [run, *running])
    on_gpus = run.device not in (None, "cpu")
    return not running or (not on_gpus and wanted <= cores and (len(running) + 1) * AIM_BYTES <= memory_bytes)


def carry_out(runs, timeout_s, console, outcomes, report) -> None:
    """Carry out the runs that `outcomes` {Run: Outcome} lacks, in order, several at once where cores and memory allow.

    Each Outcome goes into `outcomes`, then `report()` is called. Interrupted (Ctrl-C, the end of a job), it ends the
    processes of all runs before it passes the interrupt on.
    """
    cores, memory_bytes = cores_here(), available_memory_bytes()
    waiting, running, stop = [run for run in runs if run not in outcomes], {}, threading.Event()
    with ThreadPoolExecutor(max_workers=cores) as pool:
        try:
            while waiting or running:
                while waiting and at_once(waiting[0], running.values(), cores, memory_bytes):
                    run = waiting.pop(0)
                    console.print(f"        {run.lesson.name} {run.title} ...")
                    running[pool.submit(run.carry_out, timeout_s, stop)] = run
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    run, outcome = running.pop(future), future.result()
                    if run.executed.exists():
                        write_page(run.executed, run.executed.with_suffix(".html"))
                    outcomes[run] = outcome
                    style = {"ok": "green", "slow": "yellow", "failed": "bold red"}[outcome.state]
                    name = f"[{len(outcomes):>2}/{len(runs)}] {run.lesson.name} {run.title}: "
                    console.print(Text(name).append(outcome.words, style))
                    report()
        finally:
            stop.set()  # nothing runs any more, or nothing should


# ------------------------------------------------------------------ what came of them


@dataclass
class LessonResult:
    """A lesson's outcomes in the order of its runs, and where their metrics differ."""

    lesson: Lesson
    outcomes: list = field(default_factory=list)
    differences: list = field(default_factory=list)  # sentences
    compared: int = 0  # runs whose metrics were compared
    stale: str = ""  # where notebook and script do not hold the same cells

    @property
    def complaints(self) -> list[str]:
        """Return the lesson's problems besides those of its runs."""
        return [f"metrics: {said}" for said in self.differences] + [self.stale] * bool(self.stale)


@functools.cache
def _stale(lesson):
    try:
        return pairs.difference(lesson) or ""
    except (pairs.PairError, OSError) as error:
        return str(error)


def judge(outcomes) -> list[LessonResult]:
    """One LessonResult per lesson. Each run's metrics are compared with the first's, and with those of the first on as
    many ranks, where exact values count too. A pair whose halves differ was not run as it will be shown."""
    from manyhands.launch.metrics import compare

    results = {}
    for outcome in outcomes:
        lesson = outcome.run.lesson
        results.setdefault(lesson, LessonResult(lesson)).outcomes.append(outcome)
    for result in results.values():
        if result.lesson.notebook.exists() and result.lesson.script.exists():
            result.stale = _stale(result.lesson)
        complete = [outcome for outcome in result.outcomes if outcome.metrics is not None]
        result.compared = len(complete) if len(complete) > 1 else 0
        first_of = {}
        for outcome in complete:
            like = first_of.setdefault(outcome.metrics["world_size"], outcome)
            reference = complete[0] if like is outcome else like
            names = f"{outcome.run.title} against {reference.run.title}"
            found = compare(reference.metrics, outcome.metrics)  # the very first with itself: nothing
            result.differences += [f"{names}: {sentence}" for sentence in found]
    return list(results.values())


def export_recorded(results, folder) -> list[Path]:
    """Write <folder>/<lesson>.<name>.json, for assets/recorded, of each lesson that went well on GPUs.

    A lesson's run is the one on the most ranks, a script's rather than the notebook's. Runs on a CPU are left out, and
    metrics that do not say under which conditions they were made.
    """
    paths = []
    for result in results:
        well = [o for o in result.outcomes if not o.error and o.metrics.get("conditions")]
        if on_gpus := [o for o in well if o.metrics["device"] != "cpu"]:
            best = max(on_gpus, key=lambda outcome: (outcome.metrics["world_size"], outcome.run.way != "notebook"))
            paths.append(record(best.metrics, folder))
    return paths


# ------------------------------------------------------------------ the report


def gather_metadata(root) -> dict[str, str]:
    """When, where, devices, versions: name -> text."""
    import torch

    from manyhands.launch.metrics import cpu_name

    gpu = next((backend for backend in (torch.cuda, torch.xpu) if backend.is_available()), None)
    where = Allocation.find()
    versions = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    metadata = {
        "when": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "host": platform.node(),
        "job": "" if where.kind == "local" else f"{where.job} of {where.kind} on {', '.join(where.hosts)}",
        "system": platform.platform(terse=True),
        "cores": f"{cores_here()} of {os.cpu_count()}",
        "memory": f"{available_memory_bytes() / 2**30:.1f} GiB free of {psutil.virtual_memory().total / 2**30:.1f} GiB",
        "devices": f"{gpu.device_count()} x {gpu.get_device_name(0)}" if gpu else f"no GPU, {cpu_name()}",
        "python": f"{platform.python_version()} ({sys.executable})",
        "packages": ", ".join(f"{name} {versions[name]}" for name in sorted(PACKAGES & versions.keys())),
        "MPI": " ".join(find_mpiexec() or ["none"]),
        "version": version(root),
        "other files": "; ".join(left_alone(root)),
    }
    return {name: text for name, text in metadata.items() if text}


def corpora(results) -> set[str]:
    """Names of the corpora that the runs trained on, such as {"shakespeare"}."""
    metrics = [outcome.metrics for result in results for outcome in result.outcomes if outcome.metrics]
    return {m["corpus"]["name"] for m in metrics if m.get("corpus")}


def verdict_of(results, warnings, missing=0) -> tuple[str, str]:
    """("ready" | "warned" | "broken", a sentence). `missing`: runs that have not ended yet."""
    states = [outcome.state for result in results for outcome in result.outcomes]
    failed, slow = states.count("failed"), states.count("slow")
    differing = sum(bool(result.differences) for result in results)
    stale = sum(bool(result.stale) for result in results)
    bad = [f"{failed} of {_count(len(states), 'run')} failed"] * bool(failed)
    bad += [f"{_count(differing, 'lesson')} with metrics that differ"] * bool(differing)
    bad += [f"{_count(stale, 'lesson')} with a stale half"] * bool(stale)
    bad += ["nothing was run"] * (not results and not missing)
    bad += [f"{_count(missing, 'run')} not ended"] * bool(missing)
    worth_a_look = [_count(len(warnings), "warning")] * bool(warnings) + [f"{slow} slow"] * bool(slow)
    if bad:
        return "broken", "Not ready: " + ", ".join(bad)
    return ("warned", "Ready, with " + " and ".join(worth_a_look)) if worth_a_look else ("ready", "Ready")


def _count(n, noun):
    return f"{n} {noun}{'' if n == 1 else 's'}"


def duration(seconds) -> str:
    """6.1 -> "6.1 s", 372 -> "6 min 12 s"."""
    return f"{seconds:.1f} s" if seconds < 100 else f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"


def page(folder, results, metadata, warnings, seconds, missing=0, fit=None) -> str:
    """The HTML; links are relative to `folder`.

    `metadata`: name -> text; `warnings`: sentences; `seconds`: of the whole preflight; `missing`: runs that have not
    ended yet; `fit`: the classroom.Fit of a class, if one was asked about.
    """
    outcomes = [outcome for result in results for outcome in result.outcomes]
    state, verdict = verdict_of(results, warnings, missing)
    slow = [f"{o.run.lesson.name} as a {o.run.title} took {o.slow}" for o in outcomes if o.slow]
    what = f"{_count(len(results), 'lesson')}, {_count(len(outcomes), 'run')} in {duration(seconds)}"
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("manyhands.tools", ""), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return templates.get_template("report.html.j2").render(
        state=state, verdict=verdict, sentence=f"{what}, {metadata['when']} on {metadata['host']}",
        notices=[f"warning: {text}" for text in warnings] + [f"slow: {text}" for text in slow],
        columns=list(dict.fromkeys(outcome.run.title for outcome in outcomes)), results=results,
        cards=[card for result in results for card in _cards(result)], metadata=metadata, duration=duration,
        link=lambda path: relpath(path, folder), fit=fit,
    )  # fmt: skip


def _cards(result):
    """(lesson and runs, what is wrong, in full, commands): what broke in a lesson, one for all that failed alike."""
    name, same = result.lesson.name, {}
    for outcome in result.outcomes:
        if outcome.error:
            same.setdefault(str(outcome.error), []).append(outcome)
    for says, outcomes in same.items():
        titles = ", ".join(outcome.run.title for outcome in outcomes)
        yield f"{name}: {titles}", says, outcomes[0].error.detail, [outcome.run.again() for outcome in outcomes]
    if found := result.differences:
        yield f"{name}: metrics", found[0], "\n".join(found), []
    if result.stale:
        yield f"{name}: notebook and script", result.stale, "", [f"make sync LESSON={result.lesson.number}"]


def write_junit(path, results, metadata):
    """JUnit's XML: a test case per run, and one per lesson for the metrics and one for the pair."""
    suite = TestSuite("preflight")
    for name, value in metadata.items():
        suite.add_property(name, NOT_XML.sub("", str(value)))
    for result in results:
        cases = [(o.run.title, o.ended.seconds, o.error, o.error and o.error.detail) for o in result.outcomes]
        if result.compared:
            cases.append(("metrics agree", 0, (result.differences or [""])[0], "\n".join(result.differences)))
        cases.append(("notebook and script hold the same cells", 0, result.stale, ""))
        for name, seconds, message, detail in cases:
            case = TestCase(name, result.lesson.name, seconds)
            if message:
                case.result = [failure := Failure(NOT_XML.sub("", str(message)))]
                failure.text = NOT_XML.sub("", detail or "")
            suite.add_testcase(case)
    xml = JUnitXml()
    xml.add_testsuite(suite)
    xml.write(str(path), pretty=True)
