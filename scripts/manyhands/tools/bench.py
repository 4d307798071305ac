"""What the course promises about speed: how soon ranks answer, how long lessons take, the trainer beside a plain loop.

`bench_trainer` measures the trainer; lessons are measured here, by runs of the preflight.
"""

import argparse
import io
import json
import os
import statistics
import sys
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from manyhands.course.folders import ROOT, write_whole
from manyhands.course.lessons import AIM_BYTES, find_lessons
from manyhands.launch.processes import sigterm_interrupts
from manyhands.tools import bench_trainer
from manyhands.tools.bench_trainer import COMPILED
from manyhands.tools.lesson_run import Run, positive
from manyhands.tools.preflight_report import gather_metadata

FIRST_OUTPUT_AIM_S = 15
START_UP_AIM_S = 10
DDP_AIM = 0.9  # of the library's tokens per second
RING_AIM = 2.0  # times gloo's own time
RING_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Number:
    """One measurement. `aim` is the most it should be, or the least where `at_least`; value None: `note` says why."""

    what: str
    value: float | None
    unit: str
    aim: float
    at_least: bool = False
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.value is None:
            return self.note or "not measured"
        kept = self.value >= self.aim if self.at_least else self.value <= self.aim
        return ("within" if kept else "beyond") + (f"; {self.note}" if self.note else "")


def main(argv=None, description=None, root=ROOT) -> int:
    """Measure, print, write. Returns the exit status."""
    options = parsed(argv, description)
    try:
        lessons = find_lessons(root, options.lesson) if options.lessons else []
    except ValueError as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 2
    output = (options.output or root / "outputs" / "bench").resolve()
    metadata = {**gather_metadata(root), "load before": f"{os.getloadavg()[0]:.2f}"}
    numbers, rows = [], []
    with sigterm_interrupts():
        if options.lessons:
            numbers += lesson_numbers(lessons, output / "runs", options.timeout)
        if options.trainer:
            rows = bench_trainer.measure(output / "runs" / "trainer", options.rounds, options.steps)
            numbers += trainer_numbers(rows)
    judged = [{**asdict(n), "verdict": n.verdict} for n in numbers]
    content = {"metadata": metadata, "numbers": judged, "rows": [asdict(row) for row in rows]}
    output.mkdir(parents=True, exist_ok=True)
    write_whole(output / "bench.json", json.dumps(content, indent=1) + "\n")
    tables = [bench_trainer.table(rows), bench_trainer.LEGEND] * bool(rows) + [number_table(numbers)]
    kept = Console(file=io.StringIO(), width=120)
    for console in (Console(), kept):
        for table in tables:
            console.print(table, highlight=False, soft_wrap=isinstance(table, str))
    write_whole(output / "bench.txt", kept.file.getvalue())
    print(f"written: {output / 'bench.txt'} and bench.json")
    return int(any(n.value is None for n in numbers) or any(row.error for row in rows))


def parsed(argv=None, description=None):
    """The options; naming one of a part chooses that part, naming none both."""
    parser = argparse.ArgumentParser(
        prog="bench.py", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lessons", action="store_true", help="only the lessons")
    parser.add_argument("--trainer", action="store_true", help="only the trainer")
    parser.add_argument("--lesson", action="append", metavar="03", help="only this lesson (repeatable)")
    parser.add_argument("--timeout", type=positive, metavar="S", help="seconds for one lesson (default: 600)")
    parser.add_argument("--rounds", type=positive, metavar="N", help="of the trainer (default: 5)")
    parser.add_argument("--steps", type=positive, metavar="N", help="of each of its runs (default: 100)")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="default: outputs/bench")
    options = parser.parse_args(argv)
    options.lessons |= bool(options.lesson or options.timeout)
    options.trainer |= bool(options.rounds or options.steps)
    if not (options.lessons or options.trainer):
        options.lessons = options.trainer = True
    options.timeout, options.rounds, options.steps = options.timeout or 600, options.rounds or 5, options.steps or 100
    return options


def number_table(numbers):
    table = Table("what", show_edge=False, pad_edge=False)
    table.add_column("measured", justify="right")
    table.add_column("aim", justify="right")
    table.add_column("")
    for n in numbers:
        measured = "-" if n.value is None else f"{n.value:.3g} {n.unit}".strip()
        table.add_row(n.what, measured, f"{'at least' if n.at_least else 'at most'} {n.aim:g}", n.verdict)
    return table


# ------------------------------------------------------------------ lessons


def lesson_numbers(lessons, folder, timeout_s) -> list[Number]:
    """Each lesson run headless: its seconds and memory, what it measured, and how soon its ranks answered."""
    found, starts = [], []
    for lesson in lessons:
        print(f"{lesson.name}, headless ...", flush=True)
        outcome = Run(lesson, "notebook", None, folder / lesson.name).carry_out(timeout_s)
        print(f"{lesson.name}: {outcome.words}", flush=True)
        seconds, gib = (outcome.ended.seconds, outcome.ended.peak_bytes / 2**30) if not outcome.error else (None, None)
        why = str(outcome.error or "")
        found.append(Number(f"{lesson.name} headless", seconds, "s", lesson.aim_s, note=why))
        found.append(Number(f"{lesson.name} memory", gib, "GiB", AIM_BYTES / 2**30, note=why))
        measured = (outcome.metrics or {}).get("measured", {})
        if lesson.number == "02":
            found.append(Number("time of our ring / gloo's, 16 MiB", ring_to_gloo(measured), "", RING_AIM))
        if lesson.number == "03":
            ratio = measured.get("ours_to_library")
            found.append(Number("tokens/s of our DDP / the library's", ratio, "", DDP_AIM, at_least=True))
        if (start_s := seconds_to_first_output(outcome.run.executed)) is not None:
            starts.append(start_s)
    first_s = statistics.median(starts) if starts else None
    note = f"median of {len(starts)}, {min(starts):.1f} to {max(starts):.1f} s" if starts else ""
    return [Number("first cell until ranks have answered", first_s, "s", FIRST_OUTPUT_AIM_S, note=note), *found]


def seconds_to_first_output(executed) -> float | None:
    """From the start of an executed notebook's first cell to the end of its first on the ranks; None: there is none."""
    if not Path(executed).exists():
        return None
    cells = json.loads(Path(executed).read_text("utf-8"))["cells"]
    timed = [cell for cell in cells if cell.get("metadata", {}).get("papermill", {}).get("end_time")]
    on_ranks = [cell for cell in timed if "".join(cell["source"]).startswith("%%ranks")]
    if not on_ranks:
        return None
    begun, ended = timed[0]["metadata"]["papermill"]["start_time"], on_ranks[0]["metadata"]["papermill"]["end_time"]
    return (datetime.fromisoformat(ended) - datetime.fromisoformat(begun)).total_seconds()


def ring_to_gloo(measured) -> float | None:
    """Time of our ring over time of gloo's all-reduce at 16 MiB, from lesson 02's metrics; None if it is not there."""
    sizes, times = measured.get("sizes_b", []), measured.get("all_reduce_s", {})
    if RING_BYTES not in sizes or not {"our ring", "gloo"} <= times.keys():
        return None
    at = sizes.index(RING_BYTES)
    return times["our ring"][at] / times["gloo"][at]


# ------------------------------------------------------------------ the trainer


def trainer_numbers(rows) -> list[Number]:
    """What is promised about the trainer: the medians over the rounds of the rows that were measured."""
    promised = [
        ("2 ranks", "ratio", "tokens/s of 2 ranks / the plain loop's", 1.3),
        ("one process", "ratio", "tokens/s of one process / the plain loop's", 1.1),
        ("2 ranks", "scaling", "weak scaling: 2 ranks / 2 that never communicate", 0.9),
    ]
    promised += [(name + COMPILED, what, says + COMPILED, aim) for name, what, says, aim in promised]
    promised += [(name, "start_up_s", f"start-up, {name}", START_UP_AIM_S) for name in ("one process", "2 ranks")]
    found, of = [], {row.name: row for row in rows}
    for name, what, says, aim in promised:
        if row := of.get(name):
            samples, seconds = getattr(row, what), what == "start_up_s"
            note = "" if samples else row.error or "what it is compared with has failed"
            value = statistics.median(samples) if samples else None
            found.append(Number(says, value, "s" if seconds else "", aim, at_least=not seconds, note=note))
    return found
