"""Run every lesson in every way before an event, and say what is ready, what is slow and what broke.

`lesson_run` is one run, `first_error` finds what went wrong in it and on which rank, `preflight_report` writes it down.
"""

import argparse
import shlex
import shutil
import sys
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from manyhands.course import pairs
from manyhands.course.folders import ROOT
from manyhands.course.lesson_parameters import read
from manyhands.course.lessons import AIM_BYTES, Lesson, find_lessons
from manyhands.launch.machine import available_memory_bytes, cores_here, refuse_on_login_node
from manyhands.launch.metrics import compare
from manyhands.launch.processes import sigterm_interrupts
from manyhands.launch.recorded_runs import record
from manyhands.tools import preflight_report as report
from manyhands.tools.lesson_run import NOTEBOOK_RANKS, Run

FOLDER_MARK = ".preflight"  # in the folder of the runs, so that only our own is ever removed
OFFLINE = (
    "The offline corpus stood in for Shakespeare: the losses differ from the course's. "
    "`python scripts/prepare_data.py`, or MANYHANDS_SHAKESPEARE=file, gives the real one."
)


def parser(description=None):
    parser = argparse.ArgumentParser(
        description=description or __doc__.split("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--lesson", action="append", type=_named, default=[], metavar="03", help="only this lesson (repeatable)")
    add(
        "--device", choices=("cpu", "cuda", "xpu"),
        help="where all runs compute (MANYHANDS_DEVICE); they fail where it is not to be had",
    )  # fmt: skip
    add(
        "--ranks", action="append", type=_positive, metavar="N",
        help="ranks of every run (repeatable; default: 2 and 4, notebooks their own)",
    )  # fmt: skip
    add("--timeout", type=_positive, default=600, metavar="S", help="seconds for one run (default: %(default)s)")
    add("--short", action="store_true", help="short parameters: about 10 s of work per run")
    add("--notebooks", action="store_true", help="only the notebooks, no launchers")
    add("--output", type=lambda text: Path(_named(text)), metavar="FOLDER", help="default: outputs/preflight")
    return parser


def main(argv=None, description=None, root=ROOT) -> int:
    """Run the preflight of the course below `root`. Exit status: 0 well, 1 not, 2 refused, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    options = parser(description).parse_args(argv)
    output = (options.output or root / "outputs" / "preflight").resolve()
    try:
        if refusal := refuse_on_login_node("make preflight"):
            raise ValueError(refusal)
        lessons = find_lessons(root, options.lesson)
        folder = _fresh_folder(output / "runs")
        runs = plan(
            lessons, folder, ranks=options.ranks, device=options.device, short=options.short,
            notebooks_only=options.notebooks,
        )  # fmt: skip
    except (ValueError, OSError) as error:
        print(f"preflight: {error}", file=sys.stderr)
        return 2
    console, started = Console(highlight=False), time.monotonic()
    try:
        with sigterm_interrupts(), Watch(len(runs), console) as watch:
            results = judge(carry_out(runs, options.timeout, on_start=watch.started, on_end=watch.ended))
    except KeyboardInterrupt:
        print("preflight: interrupted; all its runs were ended, there is no report", file=sys.stderr)
        return 130
    # what a short run measures is not what a lesson shows
    recorded = [] if options.short else export_recorded(results, output / "recorded")
    metadata = report.gather_metadata(root, results)
    if recorded:
        metadata["recorded"] = f"{', '.join(path.name for path in recorded)} in {output / 'recorded'}"
    metadata["command"] = shlex.join(["python", "scripts/preflight.py", *argv])
    warnings = [OFFLINE] if "offline" in report.corpora(results) else []
    report.write_report(output / "report.html", results, metadata, warnings, time.monotonic() - started)
    report.write_junit(output / "junit.xml", results, metadata)
    state, verdict = report.verdict_of(results, warnings)
    for result in results:
        for sentence in [f"metrics: {said}" for said in result.differences] + [result.stale] * bool(result.stale):
            console.print(f"{result.lesson.name} {sentence}", style="bold red", soft_wrap=True, markup=False)
    for warning in warnings:
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True, markup=False)
    console.print(verdict, style="bold red" if state == "broken" else "bold green", soft_wrap=True)
    if recorded:
        console.print(f"recorded on GPUs, to copy into assets/recorded: {output / 'recorded'}", soft_wrap=True)
    console.print(f"report: {output / 'report.html'}", soft_wrap=True)
    return 1 if state == "broken" else 0


def _fresh_folder(folder):
    """The folder of the runs, without those of an earlier preflight. Raises ValueError if it holds anything else."""
    if folder.exists():
        if not (folder / FOLDER_MARK).exists():
            raise ValueError(f"{folder} exists and no preflight made it; name another --output, or remove it")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / FOLDER_MARK).touch()
    return folder


def _positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


def _named(text):
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty (is a variable of the shell unset?)")
    return text


# ------------------------------------------------------------------ which runs, and how many at once


def plan(lessons, folder, *, ranks=None, device=None, short=False, notebooks_only=False) -> list[Run]:
    """First every notebook, then every script under torchrun and mpiexec on 2 and 4 ranks, or on `ranks`.

    Raises ValueError for short parameters that a lesson does not know.
    """
    notebooks, scripts = [], []
    for lesson in lessons:
        parameters = dict(lesson.short) if short else {}
        known = {parameter.name for parameter in read(lesson.script)} if lesson.script.exists() else set(parameters)
        if unknown := parameters.keys() - known:
            raise ValueError(f"SHORT in lessons.py sets {', '.join(unknown)}, which {lesson.name} does not have")
        most = max(ranks) if ranks else None
        ways = [("notebook", most)] + [(way, n) for n in ranks or (2, 4) for way in ("torchrun", "mpiexec")]
        for way, n in ways:
            own = folder / lesson.name / (f"{way}-{n}" if n else way)
            (notebooks if way == "notebook" else scripts).append(Run(lesson, way, n, own, parameters, device))
    return notebooks if notebooks_only else notebooks + scripts


def at_once(run, running, cores, memory_bytes) -> bool:
    """May `run` start beside the `running` ones? Alone it always may."""
    wanted = sum((r.n_ranks or NOTEBOOK_RANKS) for r in [run, *running])
    on_gpus = run.device not in (None, "cpu")
    return not running or (not on_gpus and wanted <= cores and (len(running) + 1) * AIM_BYTES <= memory_bytes)


def carry_out(runs, timeout_s, *, on_start, on_end):
    """Carry out all runs, in order, several at once where cores and memory allow; their Outcomes, in order.

    Interrupted (Ctrl-C, the end of a job), it ends the processes of all runs before it passes the interrupt on.
    """
    cores, memory_bytes = cores_here(), available_memory_bytes()
    waiting, running, outcomes = list(runs), {}, {}
    stop = threading.Event()
    with ThreadPoolExecutor(max_workers=cores) as pool:
        try:
            while waiting or running:
                while waiting and at_once(waiting[0], running.values(), cores, memory_bytes):
                    run = waiting.pop(0)
                    on_start(run)
                    running[pool.submit(run.carry_out, timeout_s, stop=stop)] = run
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    run = running.pop(future)
                    outcomes[run] = future.result()
                    on_end(outcomes[run])
        finally:
            stop.set()  # nothing runs any more, or nothing should
    return [outcomes[run] for run in runs]


class Watch:
    """Shows runs while they go: a line per run, and on a terminal what runs now and for how long."""

    def __init__(self, total, console):
        self.total, self.done, self.console, self._tasks = total, 0, console, {}
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

    def __enter__(self):
        self._progress.start()
        return self

    def __exit__(self, *_):
        self._progress.stop()

    def started(self, run):
        name = f"{run.lesson.name} {run.title}"
        self._tasks[run] = self._progress.add_task(name)
        if not self.console.is_terminal:
            self.console.print(f"        {name} ...", soft_wrap=True)

    def ended(self, outcome):
        self.done += 1
        self._progress.remove_task(self._tasks.pop(outcome.run))
        style = ("yellow" if outcome.slow else "green") if outcome.ok else "bold red"
        line = Text(f"[{self.done:>2}/{self.total}] {outcome.run.lesson.name} {outcome.run.title}: ")
        line.append(outcome.words, style)
        self.console.print(line, soft_wrap=True)


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
    def ok(self):
        return not self.differences and not self.stale and all(outcome.ok for outcome in self.outcomes)


def judge(outcomes) -> list[LessonResult]:
    """One LessonResult per lesson. Each run's metrics are compared with the first's, and with those of the first on as
    many ranks, where exact values count too. A pair whose halves differ was not run as it will be shown."""
    results = {}
    for outcome in outcomes:
        lesson = outcome.run.lesson
        results.setdefault(lesson, LessonResult(lesson)).outcomes.append(outcome)
    for result in results.values():
        if result.lesson.notebook.exists() and result.lesson.script.exists():
            result.stale = pairs.difference(result.lesson) or ""
        complete = [outcome for outcome in result.outcomes if outcome.metrics is not None]
        first_of = {}
        result.compared = len(complete) if len(complete) > 1 else 0
        for outcome in complete:
            reference = first_of.setdefault(outcome.metrics["world_size"], outcome)
            if reference is outcome:
                reference = complete[0]
            if reference is not outcome:
                names = f"{outcome.run.title} against {reference.run.title}"
                found = compare(reference.metrics, outcome.metrics)
                result.differences += [f"{names}: {sentence}" for sentence in found]
    return list(results.values())


def export_recorded(results, folder) -> list[Path]:
    """Write <folder>/<lesson>.<name>.json, for assets/recorded, of each lesson that went well on GPUs.

    A lesson's run is the one on the most ranks, a script's rather than the notebook's. Runs on a CPU are left out, and
    metrics that do not say under which conditions they were made.
    """
    paths = []
    for result in results:
        on_gpus = [o for o in result.outcomes if o.ok and o.metrics["device"] != "cpu" and o.metrics.get("conditions")]
        if on_gpus:
            best = max(on_gpus, key=lambda outcome: (outcome.metrics["world_size"], outcome.run.way != "notebook"))
            paths.append(record(best.metrics, folder))
    return paths
