"""Where the time of a step goes: `StepTimer` in every run, `profiled` with `--log.profile`.

    timer = StepTimer(device)
    timer.step_start()    # then, when each is over: batch_ready(), forward_done(), backward_done(), step_done()
    timer.take()          # Timing since the last take: waits for the device, once

    with profiled(ranks, options, folder, say, steps) as step_done:      # all ranks; nothing without --log.profile
        for _ in range(steps):
            ...
            step_done()

A GPU works behind the program: a clock on the wall would see how fast work is handed over. There, each mark is an event
in the device's own queue, and its times are read when they are asked for. On a CPU a mark is `perf_counter`.

Profiled, each rank writes <folder>/profile/rank-N.json, a trace of a few steps for https://ui.perfetto.dev or
chrome://tracing. Rank 0 also writes rank-0.html and rank-0.txt: how long each Python function took, over the whole run.
Both cost time: a profiled run's tokens/s are not its speed.
"""

import itertools
import time
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch

from manyhands.launch.settings import set_default

LATER, WARM_UP, TRACED = 4, 2, 3  # steps let pass (compilation, first allocations), warmed up, traced
SILENT = "99"  # torch's profiler would write "USDT: ... profiler_start" into the table of steps
SAMPLE_S = 0.002  # pyinstrument looks at the stack so often


class Timing(NamedTuple):
    """Mean seconds per step over `steps` steps; None where nothing was marked (a forward in a pipeline)."""

    steps: int
    step_s: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None


class HostEvent:
    """A point in time of the host, with the interface of a GPU's event."""

    def __init__(self, now):
        self.at_s = now()

    def synchronize(self):
        pass

    def elapsed_time(self, later):
        """Milliseconds, as GPUs count them."""
        return 1000 * (later.at_s - self.at_s)


class StepTimer:
    """Collects the marks of each step. A step may have many forwards and backwards: one pair per micro-batch."""

    def __init__(self, device=None, now=time.perf_counter):
        self.device = device
        self.event = self._gpu_event if device and device.type != "cpu" else lambda: HostEvent(now)
        self.first_start_s = None  # time.time() at the first step's start
        self.steps, self.marks = [], []  # since the last take: a step's marks are [(what ended there, event), ...]

    def _gpu_event(self):
        event = torch.get_device_module(self.device).Event(enable_timing=True)
        event.record()
        return event

    def step_start(self):
        self.first_start_s = self.first_start_s or time.time()
        self.marks = [("start", self.event())]

    def batch_ready(self):
        self.marks.append(("batch", self.event()))

    def forward_done(self):
        self.marks.append(("forward", self.event()))

    def backward_done(self):
        self.marks.append(("backward", self.event()))

    def step_done(self):
        self.marks.append(("done", self.event()))
        self.steps.append(self.marks)

    def take(self):
        """The `Timing` of the steps since the last call; the device has done them all when this returns."""
        steps, self.steps = self.steps, []
        if not steps:
            return Timing(0)
        steps[-1][-1][1].synchronize()
        sums = {"step": 0.0, "forward": None, "backward": None}
        for marks in steps:
            sums["step"] += marks[0][1].elapsed_time(marks[-1][1]) / 1000
            for (_, start), (name, end) in itertools.pairwise(marks):
                if name in ("forward", "backward"):
                    sums[name] = (sums[name] or 0.0) + start.elapsed_time(end) / 1000
        return Timing(len(steps), *(value if value is None else value / len(steps) for value in sums.values()))


@contextmanager
def profiled(ranks, options, folder, say, steps):
    """Inside, a run of `steps` steps is profiled if `options` ask for it; gives what to call after each step.

    torch's profiler on each rank, pyinstrument on rank 0, where `say(sentence)` is called.
    """
    if not options.log.profile:
        yield lambda: None
        return
    folder = folder / "profile"
    folder.mkdir(parents=True, exist_ok=True)
    set_default(KINETO_LOG_LEVEL=SILENT)

    def write_trace(trace):
        try:
            trace.export_chrome_trace(str(folder / f"rank-{ranks.rank}.json"))
        except (OSError, RuntimeError) as error:  # a full disk must not end a training
            say(f"profile: {type(error).__name__}: {error}. Training goes on")

    active = max(1, min(TRACED, steps))  # a short run is traced from its start
    warmup = min(WARM_UP, steps - active)
    schedule = torch.profiler.schedule(wait=min(LATER, steps - active - warmup), warmup=warmup, active=active, repeat=1)
    with ExitStack() as stack:  # a run that ends early writes what it has
        trace = stack.enter_context(
            torch.profiler.profile(schedule=schedule, on_trace_ready=write_trace, acc_events=True)
        )
        if ranks.rank == 0:
            stack.enter_context(_python_profile(folder, say))
        yield trace.step
    if ranks.rank == 0:
        say(f"profiles: {folder}; open rank-*.json in https://ui.perfetto.dev")


@contextmanager
def _python_profile(folder, say):
    try:
        from pyinstrument import Profiler
    except ImportError:
        say("pyinstrument is not installed: only torch's traces are written; pip install -e '.[profile]' installs it")
        yield
        return
    profiler = Profiler(interval=SAMPLE_S)
    profiler.start()
    try:
        yield
    finally:
        profiler.stop()
        text = profiler.output_text(unicode=False, color=False, show_all=False)
        for name, content in (("rank-0.html", profiler.output_html()), ("rank-0.txt", text)):
            (folder / name).write_text(content, encoding="utf-8")
