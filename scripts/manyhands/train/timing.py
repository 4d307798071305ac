"""Measure the phases of a step: `StepTimer` in every run, `profiled` with `--log.profile`.

    timer = StepTimer(device)
    timer.step_start()    # then, when each is over: mark("batch"), mark("forward"), mark("backward"), mark("step")
    timer.take()          # Timing since the last take: waits for the device, once

    with profiled(ranks, options, folder, say, steps) as step_done:      # all ranks; nothing without --log.profile
        for _ in range(steps):
            ...
            step_done()

A GPU runs asynchronously, so a wall clock would measure only how fast work is queued. There, each mark is an event in
the device's queue, whose time is read later by `take`. On a CPU a mark is `perf_counter`.

Profiled, each rank writes <folder>/profile/rank-N.json, a trace of a few steps for https://ui.perfetto.dev or
chrome://tracing. It costs time: a profiled run's tokens/s are not its speed.
"""

import itertools
import time
from contextlib import contextmanager
from typing import NamedTuple

import torch

from manyhands.launch.ranks import said

LATER, WARM_UP, TRACED = 4, 2, 3  # steps skipped (compilation, first allocations), of warm-up, and traced


class Timing(NamedTuple):
    """Mean seconds per step over `steps` steps; None for a phase that was not marked (a forward in a pipeline)."""

    steps: int
    step_s: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None


class HostEvent:
    """A point in the host's time, with the interface of a GPU's event."""

    def __init__(self, now):
        self.at_s = now()

    def synchronize(self):
        pass

    def elapsed_time(self, later):
        """Return milliseconds, like a GPU's event."""
        return 1000 * (later.at_s - self.at_s)


class StepTimer:
    """Collect the marks of each step. A step may have many forwards and backwards: one pair per micro-batch."""

    def __init__(self, device=None, now=time.perf_counter):
        self.device = device
        self.event = self._gpu_event if device and device.type != "cpu" else lambda: HostEvent(now)
        self.first_start_s = None  # time.time() at the first step's start
        self.steps = []  # steps since the last take: the marks of each, [(phase that ended, event), ...]

    def _gpu_event(self):
        event = torch.get_device_module(self.device).Event(enable_timing=True)
        event.record()
        return event

    def step_start(self):
        self.first_start_s = self.first_start_s or time.time()
        self.steps.append([("start", self.event())])

    def mark(self, ended):
        """Mark the end of a phase: "batch", "forward", "backward", or the whole "step"."""
        self.steps[-1].append((ended, self.event()))

    def take(self):
        """Wait for the device and return the `Timing` of the steps since the last call."""
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
    """Profile a run of `steps` steps in the block, if `options` ask for it; yield a function to call after each."""
    if not options.log.profile:
        yield lambda: None
        return
    folder = folder / "profile"
    folder.mkdir(parents=True, exist_ok=True)

    def write_trace(trace):
        try:
            trace.export_chrome_trace(str(folder / f"rank-{ranks.rank}.json"))
        except (OSError, RuntimeError) as error:  # a full disk must not end a training
            say(f"profile: {said(None, error)}. Training continues")

    active = max(1, min(TRACED, steps))  # trace a short run from its start
    warmup = min(WARM_UP, steps - active)
    schedule = torch.profiler.schedule(wait=min(LATER, steps - active - warmup), warmup=warmup, active=active, repeat=1)
    with torch.profiler.profile(schedule=schedule, on_trace_ready=write_trace, acc_events=True) as trace:
        yield trace.step  # write the trace even if the run ends early
    if ranks.rank == 0:
        say(f"profiles: {folder}; open rank-*.json in https://ui.perfetto.dev")
