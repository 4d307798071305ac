"""The lessons' part of the bench: how soon ranks answer, how long lessons take, what their metrics measured."""

import json
import os
import statistics
import time
from pathlib import Path

from manyhands.bench.numbers import Number
from manyhands.course.lessons import AIM_BYTES

FIRST_OUTPUT_AIM_S = 15
DDP_AIM = 0.9  # of the library's tokens per second
RING_AIM = 2.0  # times gloo's own time
RING_BYTES = 16 * 2**20


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
        cell for cell in json.loads(Path(notebook).read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"
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

    from manyhands.launch.processes import MARK, Family
    from manyhands.preflight.runs import KERNEL, write_kernelspec

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
