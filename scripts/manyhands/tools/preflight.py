"""Run every lesson in every way before an event, and say what is ready, what is slow and what broke.

`lesson_run` is one run, `preflight_report` writes down what came of all of them.
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
from manyhands.tools.lesson_run import NOTEBOOK_RANKS, WAYS, Outcome, Run, positive

FOLDER_MARK = ".preflight"  # in the folder of the runs, so that only our own is ever removed
OFFLINE = (
    "The offline corpus stood in for Shakespeare: the losses differ from the course's. "
    "`python scripts/prepare_data.py`, or MANYHANDS_SHAKESPEARE=file, gives the real one."
)


def parser(description=None):
    """The options of scripts/preflight.py."""
    parser = argparse.ArgumentParser(
        description=description or __doc__.split("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    devices = "where all runs compute (MANYHANDS_DEVICE); they fail where it is not to be had"
    ranks = "ranks of every run (repeatable; default: 2 and 4, notebooks their own)"
    add = parser.add_argument
    add("--lesson", action="append", default=[], metavar="03", help="only this lesson (repeatable)")
    add("--device", choices=("cpu", "cuda", "xpu"), help=devices)
    add("--ranks", action="append", type=positive, metavar="N", help=ranks)
    add("--timeout", type=positive, default=600, metavar="S", help="seconds for one run (default: %(default)s)")
    add("--short", action="store_true", help="short parameters: about 10 s of work per run")
    add("--notebooks", action="store_true", help="only the notebooks, no launchers")
    add("--output", type=Path, metavar="FOLDER", help="default: outputs/preflight")
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
        runs = plan(
            lessons, _fresh_folder(output / "runs"), ranks=options.ranks, device=options.device, short=options.short,
            notebooks_only=options.notebooks,
        )  # fmt: skip
    except (ValueError, OSError) as error:
        print(f"preflight: {error}", file=sys.stderr)
        return 2
    console, started = Console(highlight=False, soft_wrap=True), time.monotonic()
    try:
        with sigterm_interrupts():
            results = judge(carry_out(runs, options.timeout, console))
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
    page = report.page(output, results, metadata, warnings, time.monotonic() - started)
    (output / "report.html").write_text(page, encoding="utf-8")
    report.write_junit(output / "junit.xml", results, metadata)
    state, verdict = report.verdict_of(results, warnings)
    bad = [f"{result.lesson.name} {said}" for result in results for said in result.complaints]
    lines = [(line, "bold red") for line in bad] + [(f"warning: {warning}", "yellow") for warning in warnings]
    for line, style in [*lines, (verdict, "bold red" if state == "broken" else "bold green")]:
        console.print(line, style=style, markup=False)
    if recorded:
        console.print(f"recorded on GPUs, to copy into assets/recorded: {output / 'recorded'}")
    console.print(f"report: {output / 'report.html'}")
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
        ways = [("notebook", most)] + [(way, n) for n in ranks or (2, 4) for way in WAYS if way != "notebook"]
        for way, n in ways:
            own = folder / lesson.name / (f"{way}-{n}" if n else way)
            (notebooks if way == "notebook" else scripts).append(Run(lesson, way, n, own, parameters, device))
    return notebooks if notebooks_only else notebooks + scripts


def at_once(run, running, cores, memory_bytes) -> bool:
    """May `run` start beside the `running` ones? Alone it always may."""
    wanted = sum((r.n_ranks or NOTEBOOK_RANKS) for r in [run, *running])
    on_gpus = run.device not in (None, "cpu")
    return not running or (not on_gpus and wanted <= cores and (len(running) + 1) * AIM_BYTES <= memory_bytes)


def carry_out(runs, timeout_s, console) -> list[Outcome]:
    """Carry out all runs, in order, several at once where cores and memory allow; their Outcomes, in order.

    Interrupted (Ctrl-C, the end of a job), it ends the processes of all runs before it passes the interrupt on.
    """
    cores, memory_bytes = cores_here(), available_memory_bytes()
    waiting, running, outcomes, stop = list(runs), {}, {}, threading.Event()
    with ThreadPoolExecutor(max_workers=cores) as pool:
        try:
            while waiting or running:
                while waiting and at_once(waiting[0], running.values(), cores, memory_bytes):
                    run = waiting.pop(0)
                    console.print(f"        {run.lesson.name} {run.title} ...")
                    running[pool.submit(run.carry_out, timeout_s, stop)] = run
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    run, outcome = running.pop(future), future.result()
                    outcomes[run] = outcome
                    style = {"ok": "green", "slow": "yellow", "failed": "bold red"}[outcome.state]
                    name = f"[{len(outcomes):>2}/{len(runs)}] {run.lesson.name} {run.title}: "
                    console.print(Text(name).append(outcome.words, style))
        finally:
            stop.set()  # nothing runs any more, or nothing should
    return [outcomes[run] for run in runs]


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
        """What is wrong with the lesson beside its runs."""
        return [f"metrics: {said}" for said in self.differences] + [self.stale] * bool(self.stale)


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
