"""Run every lesson in every way before an event, and say what is ready, what is slow and what broke.

`plan` decides what runs, `runs` is one run, `supervise` its processes, `errors` finds the first error and its rank,
`report` and `junit` write it down, `recording` keeps what GPUs measured for `assets/recorded`.
"""

import argparse
import shlex
import sys
import time
from pathlib import Path

from rich.console import Console

from manyhands.course.folders import ROOT
from manyhands.course.lessons import find_lessons
from manyhands.launch.login_node import refuse_on_login_node

FOLDER_MARK = ".preflight"  # in the folder of the runs, so that only our own is ever removed


def parser():
    text = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog="python scripts/preflight.py", description=text)
    parser.add_argument(
        "--lesson",
        action="append",
        type=_named,
        default=[],
        metavar="03",
        help="only this lesson (repeatable)",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda", "xpu"),
        help="where all runs compute (MANYHANDS_DEVICE); they fail where it is not to be had",
    )
    parser.add_argument(
        "--ranks", action="append", type=_positive, metavar="N", help="ranks of every run (repeatable; default: 2 and 4, "
        "notebooks their own)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout",
        type=_positive,
        default=600,
        metavar="S",
        help="seconds for one run (default: %(default)s)",
    )
    parser.add_argument("--short", action="store_true", help="short parameters: about 10 s of work per run")
    parser.add_argument("--notebooks", action="store_true", help="only the notebooks, no launchers")
    parser.add_argument(
        "--output", type=lambda text: Path(_named(text)), metavar="FOLDER", help="default: outputs/preflight"
    )
    return parser


def main(argv=None, root=ROOT):
    """Run the preflight of the course below `root`. Exit status: 0 well, 1 not, 2 refused, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    options = parser().parse_args(argv)
    if refusal := refuse_on_login_node("make preflight"):
        return _refuse(refusal)
    output = (options.output or root / "outputs" / "preflight").resolve()
    from manyhands.launch.processes import sigterm_interrupts
    from manyhands.preflight.plan import carry_out, judge, plan
    from manyhands.preflight.progress import Watch

    try:
        lessons = find_lessons(root, options.lesson)
        folder = _fresh_folder(output / "runs")
        runs = plan(
            lessons, folder, ranks=options.ranks, device=options.device, short=options.short,
            notebooks_only=options.notebooks,
        )  # fmt: skip
    except (ValueError, OSError) as error:
        return _refuse(error)
    started = time.monotonic()
    try:
        with sigterm_interrupts(), Watch(len(runs)) as watch:
            results = judge(carry_out(runs, options.timeout, on_start=watch.started, on_end=watch.ended))
    except KeyboardInterrupt:
        print("preflight: interrupted; all its runs were ended, there is no report", file=sys.stderr)
        return 130
    return _write(output, results, root, time.monotonic() - started, argv)


def _write(output, results, root, seconds, argv):
    from manyhands.preflight.facts import corpora, gather_facts
    from manyhands.preflight.junit import write_junit
    from manyhands.preflight.recording import export_recorded
    from manyhands.preflight.report import verdict_of, write_report

    facts = gather_facts(root, results)
    short = parser().parse_args(argv).short  # what it measures is not what a lesson shows
    recorded = [] if short else export_recorded(results, output / "recorded")
    if recorded:
        facts["recorded"] = f"{', '.join(path.name for path in recorded)} in {output / 'recorded'}"
    warnings = []
    if "offline" in corpora(results):
        warnings.append(
            "The offline corpus stood in for Shakespeare: the losses differ from the course's. "
            "`python scripts/prepare_data.py`, or MANYHANDS_SHAKESPEARE=file, gives the real one."
        )
    command = shlex.join(["python", "scripts/preflight.py", *argv])
    write_report(output / "report.html", results, facts, warnings, seconds, command)
    write_junit(output / "junit.xml", results, facts)
    state, verdict = verdict_of(results, warnings)
    console = Console(highlight=False)
    for result in results:
        for sentence in result.differences:
            console.print(f"{result.lesson.name} metrics: {sentence}", style="bold red", soft_wrap=True, markup=False)
        if result.stale:
            console.print(f"{result.lesson.name}: {result.stale}", style="bold red", soft_wrap=True, markup=False)
    for warning in warnings:
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True, markup=False)
    console.print(verdict, style="bold red" if state == "broken" else "bold green", soft_wrap=True)
    if recorded:
        console.print(f"recorded on GPUs, to copy into assets/recorded: {output / 'recorded'}", soft_wrap=True)
    console.print(f"report: {output / 'report.html'}", soft_wrap=True)
    return 1 if state == "broken" else 0


def _fresh_folder(folder):
    """The folder of the runs, without those of an earlier preflight. Raises ValueError if it holds anything else."""
    import shutil

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


def _refuse(reason):
    print(f"preflight: {reason}", file=sys.stderr)
    return 2
