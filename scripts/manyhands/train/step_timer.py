"""Times the parts of a training step without making the device wait.

    timer = StepTimer(device)
    timer.step_start()    # then, when each is over: batch_ready(), forward_done(), backward_done(), step_done()
    timer.take()          # Timing since the last take: waits for the device, once

A GPU works behind the program: a clock on the wall would see how fast work is handed over. There, each mark is an event
in the device's own queue, and its times are read when they are asked for. On a CPU a mark is `perf_counter`.
"""

import time
from collections import deque
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Mean seconds per step over `steps` steps; None where nothing was marked (a forward in a pipeline)."""

    steps: int
    step_s: float | None
    forward_s: float | None
    backward_s: float | None


class HostClock:
    """Marks are points in time of the host, `now()` seconds."""

    def __init__(self, now=time.perf_counter):
        self.now = now

    def mark(self):
        return self.now()

    def reached(self, mark):
        return True

    def settle(self, mark):
        pass

    def seconds(self, start, end):
        return end - start


class DeviceClock:
    """Marks are events in the queue of a GPU's current stream."""

    def __init__(self, device):
        self.module = torch.get_device_module(device)

    def mark(self):
        event = self.module.Event(enable_timing=True)
        event.record()
        return event

    def reached(self, mark):
        return mark.query()

    def settle(self, mark):
        mark.synchronize()

    def seconds(self, start, end):
        return start.elapsed_time(end) / 1000


class StepTimer:
    """Collects the marks of each step. A step may have many forwards and backwards: one pair per micro-batch."""

    def __init__(self, device=None, clock=None):
        self.clock = clock or (DeviceClock(device) if device and device.type != "cpu" else HostClock())
        self.first_start_s = None  # time.time() at the first step's start
        self.unread = deque()  # finished steps whose marks the device may not have reached
        self.marks = None  # of the step under way: [(name of what ended there, mark), ...]
        self._clear()

    def _clear(self):
        self.steps, self.sums = 0, {"step": 0.0, "forward": None, "backward": None}

    def step_start(self):
        if self.first_start_s is None:
            self.first_start_s = time.time()
        self.marks = [("start", self.clock.mark())]

    def batch_ready(self):
        self._mark("batch")

    def forward_done(self):
        self._mark("forward")

    def backward_done(self):
        self._mark("backward")

    def step_done(self):
        if self.marks is None:
            return
        self._mark("done")
        self.unread.append(self.marks)
        self.marks = None
        while self.unread and self.clock.reached(self.unread[0][-1][1]):  # so that they never pile up
            self._read()

    def _mark(self, name):
        if self.marks is not None:
            self.marks.append((name, self.clock.mark()))

    def _read(self):
        marks = self.unread.popleft()
        self.steps += 1
        self.sums["step"] += self.clock.seconds(marks[0][1], marks[-1][1])
        for (_, start), (name, end) in zip(marks, marks[1:], strict=False):
            if name in ("forward", "backward"):
                self.sums[name] = (self.sums[name] or 0.0) + self.clock.seconds(start, end)

    def take(self):
        """The `Timing` of the steps since the last call; the device has done them all when this returns."""
        while self.unread:
            self.clock.settle(self.unread[0][-1][1])
            self._read()
        steps, sums = self.steps, self.sums
        self._clear()
        if not steps:
            return Timing(0, None, None, None)
        return Timing(steps, *(value if value is None else value / steps for value in sums.values()))
