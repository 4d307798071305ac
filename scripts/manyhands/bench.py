"""Measure what the course promises about speed: a table, `outputs/bench/bench.json` and `bench.svg`.

    python -m manyhands.bench            # or `make bench`: some minutes
    python -m manyhands.bench --lesson 03

You see each number beside its aim. Nothing is asserted: a number belongs to the machine that it was taken on, and to what
else that machine did meanwhile (its load is in the file). Exit status: 0, or 1 where something could not be measured.
"""

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from manyhands.lessons import AIM_BYTES, ROOT, find_lessons

FIRST_OUTPUT_AIM_S = 15
DDP_AIM = 0.9  # of the library's tokens per second
RING_AIM = 2.0  # times gloo's own time
RING_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Number:
    """One measurement. `aim` is the most it should be, or the least where `at_least`; value None: not measured."""

    what: str
    value: float | None
    unit: str
    aim: float
    at_least: bool = False
    note: str = ""

    @property
    def within(self):
        """Does it keep its aim? None if it was not measured."""
        if self.value is None:
            return None
        return self.value >= self.aim if self.at_least else self.value <= self.aim


def main(argv=None, root=ROOT):
    """Measure, print, write. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m manyhands.bench", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--lesson", action="append", default=[], metavar="03", help="only this lesson (repeatable)"
    )
    parser.add_argument(
        "--starts", type=int, default=3, metavar="N", help="kernels started (default: %(default)s)"
    )
    parser.add_argument("--timeout", type=int, default=600, metavar="S", help="seconds for one lesson")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="default: outputs/bench")
    options = parser.parse_args(argv)
    try:
        lessons = find_lessons(root, options.lesson)
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    output = (options.output or root / "outputs" / "bench").resolve()
    output.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    from manyhands.preflight.supervise import sigterm_interrupts

    with sigterm_interrupts():
        numbers = (
            [first_output(lessons[0], output / "runs", options.starts)] if lessons and options.starts else []
        )
        for lesson in lessons:
            numbers += lesson_numbers(lesson, output / "runs" / lesson.name, options.timeout)
    write(output, numbers, load, root)
    show(numbers, output)
    return int(any(number.value is None for number in numbers))


def first_output(lesson, folder, starts):
    """Seconds from running a notebook's first cell to the first thing its 4 ranks say; the median of some starts."""
    from manyhands.preflight.runs import Run

    samples, note = [], ""
    for start in range(starts):
        print(f"first output of the ranks, start {start + 1} of {starts} ...", flush=True)
        run = Run(lesson, "notebook", None, folder / f"start-{start + 1}")
        try:
            samples.append(seconds_to_first_output(first_cells(lesson.notebook), run))
        except (OSError, RuntimeError, ValueError) as error:
            note = str(error)
    value = statistics.median(samples) if samples else None
    return Number("first output of 4 ranks", value, "s", FIRST_OUTPUT_AIM_S, note=note)


def first_cells(notebook):
    """Sources of a notebook's code cells up to the first that runs on the ranks."""
    cells = [
        cell
        for cell in json.loads(Path(notebook).read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
    ]
    sources = ["".join(cell["source"]) for cell in cells]
    last = next((n for n, source in enumerate(sources) if source.startswith("%%ranks")), None)
    if last is None:
        raise ValueError(f"{notebook} has no cell that runs on the ranks")
    return sources[: last + 1]


def seconds_to_first_output(sources, run, timeout_s=120):
    """Run cells in a fresh kernel; seconds from sending the first to the first output of the last."""
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import KernelManager

    from manyhands.preflight.runs import KERNEL, write_kernelspec
    from manyhands.preflight.supervise import MARK, Family

    kernels = run.folder / "jupyter" / "kernels"
    if not kernels.exists():
        write_kernelspec(kernels / KERNEL)
    specs = KernelSpecManager(kernel_dirs=[str(kernels)])
    manager = KernelManager(kernel_name=KERNEL, kernel_spec_manager=specs)
    mark = f"bench-{os.getpid()}-{time.monotonic_ns()}"
    environ = {**run.environ(), MARK: mark}
    with open(run.log, "wb") as log:
        manager.start_kernel(env=environ, cwd=str(run.lesson.notebook.parent), stdout=log, stderr=log)
    client = manager.blocking_client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=timeout_s)
        started = time.perf_counter()
        for source in sources:
            _run_cell(client, source, timeout_s, until_output=source is sources[-1])
        return time.perf_counter() - started
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        Family(mark).end()


def _run_cell(client, source, timeout_s, until_output):
    """Send a cell and wait until it is done, or until it says something. Raises RuntimeError with its error."""
    import queue

    question = client.execute(source)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            message = client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
        except queue.Empty:
            raise RuntimeError(f"a cell did not end within {timeout_s} s") from None
        kind, content = message["msg_type"], message["content"]
        if message["parent_header"].get("msg_id") != question:
            continue
        if kind == "error":
            raise RuntimeError(f"{content['ename']}: {content['evalue']}")
        if until_output and kind in ("stream", "display_data", "execute_result"):
            return
        if kind == "status" and content["execution_state"] == "idle":
            return


def lesson_numbers(lesson, folder, timeout_s):
    """Seconds and memory of a lesson run headless, and what its metrics measured."""
    from manyhands.preflight.progress import outcome_words
    from manyhands.preflight.runs import Run

    print(f"{lesson.name}, headless ...", flush=True)
    outcome = Run(lesson, "notebook", None, folder).carry_out(timeout_s)
    print(f"{lesson.name}: {outcome_words(outcome)}", flush=True)
    seconds, gib = (outcome.ended.seconds, outcome.ended.peak_bytes / 2**30) if outcome.ok else (None, None)
    note = "" if outcome.ok else str(outcome.error)
    found = [
        Number(f"{lesson.name} headless", seconds, "s", lesson.aim_s, note=note),
        Number(f"{lesson.name} memory", gib, "GiB", AIM_BYTES / 2**30, note=note),
    ]
    measured = (outcome.metrics or {}).get("measured", {})
    if lesson.number == "02":
        found.append(Number("time of our ring / gloo's, 16 MiB", ring_to_gloo(measured), "", RING_AIM))
    if lesson.number == "03":
        ratio = measured.get("ours_to_library")
        found.append(Number("tokens/s of our DDP / the library's", ratio, "", DDP_AIM, at_least=True))
    return found


def ring_to_gloo(measured):
    """Time of our ring over time of gloo's all-reduce at 16 MiB, from lesson 02's metrics; None if it is not there."""
    sizes, times = measured.get("sizes_b", []), measured.get("all_reduce_s", {})
    if RING_BYTES not in sizes or not {"our ring", "gloo"} <= times.keys():
        return None
    at = sizes.index(RING_BYTES)
    return times["our ring"][at] / times["gloo"][at]


def write(output, numbers, load, root):
    """bench.json and bench.svg, each complete or not at all."""
    from manyhands.preflight.facts import gather_facts

    content = {
        "facts": {**gather_facts(root), "load before": round(load, 2)},
        "numbers": [{**asdict(number), "within": number.within} for number in numbers],
    }
    partial = output / ".bench.partial"
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(output / "bench.json")
    plot(numbers).savefig(output / "bench.svg")


def plot(numbers):
    """Each number as a share of its aim: left of the line is better; a ratio that should be large is turned over."""
    from matplotlib.figure import Figure

    from manyhands.figures import INK, RANK_COLOURS

    shown = [number for number in numbers if number.value]
    figure = Figure(figsize=(7, 0.6 + 0.32 * max(1, len(shown))), layout="constrained")
    axes = figure.subplots()
    shares = [number.aim / number.value if number.at_least else number.value / number.aim for number in shown]
    colours = [RANK_COLOURS[0] if number.within else RANK_COLOURS[5] for number in shown]
    bars = axes.barh([number.what for number in shown], shares, color=colours)
    axes.axvline(1, color=INK, lw=1.2, ls="--")
    for label in axes.bar_label(
        bars, [f"{number.value:.3g} {number.unit}" for number in shown], padding=3, fontsize=8
    ):
        label.set_bbox({"fc": "white", "ec": "none", "pad": 1})
    axes.set_xlim(0, max([1.25, *[1.35 * share for share in shares]]))
    axes.set_xlabel("share of the aim (the dashed line)")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def show(numbers, output):
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_edge=False, pad_edge=False, header_style="bold")
    for column in ("what", "measured", "aim", ""):
        table.add_column(column, justify="right" if column in ("measured", "aim") else "left")
    for number in numbers:
        sign = "at least" if number.at_least else "at most"
        value = "not measured" if number.value is None else f"{number.value:.3g} {number.unit}".strip()
        verdict = {True: ("within", "green"), False: ("beyond", "yellow"), None: (number.note, "red")}[
            number.within
        ]
        table.add_row(number.what, value, f"{sign} {number.aim:g}", Text(*verdict))
    console = Console(highlight=False)
    console.print(table)
    console.print(f"written: {output / 'bench.json'}, {output / 'bench.svg'}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
