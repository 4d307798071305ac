"""The processes of one row: they start once, and then compute in bursts, when they are told to.

    crew = Crew(row, job, folder)      # it is starting
    crew.burst(40, timeout_s=120)      # {"tokens_per_s": ..., "peak_gib": ...}
    crew.end()

They end with the bench, however it ends: their end of the pipe is closed then.
"""

import multiprocessing
import multiprocessing.connection
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from manyhands.course.folders import SCRIPTS
from manyhands.launch.commands import environment


class CrewError(RuntimeError):
    """A row could not be measured: one sentence."""


class Crew:
    """`job` is that of every process, but for its rank, world and store. `folder` takes their logs and runs."""

    def __init__(self, row, job, folder):
        self.row, self.job, self.folder = row, job, Path(folder)
        self.members = []  # (its name, process, our end of its pipe), world by world
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            for world in range(row.worlds):
                for rank in range(row.ranks):
                    self._start(world, rank)
        except BaseException:
            self.end()
            raise

    def _start(self, world, rank):
        name = f"rank {rank} of {self.row.ranks}" + (f", world {world}" if self.row.worlds > 1 else "")
        ours, theirs = multiprocessing.Pipe()
        path = os.pathsep.join(filter(None, [str(SCRIPTS), os.environ.get("PYTHONPATH")]))
        # the trainer as scripts/launch.py starts it; the plain loop as anybody does
        base = environment(several=False) if self.row.kind == "trainer" else os.environ
        environ = {**base, "PYTHONPATH": path, "MANYHANDS_OUTPUTS": str(self.folder)}
        environ.pop("OMP_NUM_THREADS", None)
        with open(self.folder / f"world{world}-rank{rank}.log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "manyhands.bench.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()], env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        theirs.close()
        self.members.append((name, process, ours))
        ours.send(replace(self.job, rank=rank, world_size=self.row.ranks, store=str(self.folder / f"store{world}")))

    @property
    def pids(self):
        return [process.pid for _, process, _ in self.members]

    def burst(self, steps, timeout_s):
        """Compute so many steps, on all processes at the same time. Raises CrewError; the row has ended then."""
        try:
            for name, _, pipe in self.members:
                try:
                    pipe.send(steps)
                except OSError:
                    self._answers(1.0)  # what it said before it left
                    raise CrewError(f"{name} has ended") from None
            answers = self._answers(timeout_s)
        except BaseException:
            self.end()
            raise
        return self._summed(steps, answers)

    def _answers(self, timeout_s):
        waiting = {pipe: (i, name) for i, (name, _, pipe) in enumerate(self.members)}
        answers, deadline = [None] * len(waiting), time.monotonic() + timeout_s
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = " and ".join(name for _, name in waiting.values())
                raise CrewError(f"{silent} did not answer within {timeout_s:g} s; see {self.folder}")
            for pipe in ready:
                i, name = waiting.pop(pipe)
                try:
                    answers[i] = pipe.recv()
                except (EOFError, OSError):
                    status = self.members[i][1].wait(5)
                    raise CrewError(f"{name} ended with status {status}; see {self.folder}") from None
                if "error" in answers[i]:
                    raise CrewError(f"{name}: {answers[i]['error']}")
        return answers

    def _summed(self, steps, answers):
        if self.row.kind == "peak":
            return answers[0]
        size, train = self.row.ranks, self.job.options.train
        tokens = steps * train.global_batch * self.job.options.model.block_size  # of one world
        slowest = [
            max(answer["seconds"] for answer in answers[first : first + size]) for first in range(0, len(answers), size)
        ]
        return {
            "tokens_per_s": sum(tokens / seconds for seconds in slowest),
            "peak_gib": max(answer["peak_gib"] for answer in answers),
        }

    def end(self):
        """No process of the row is left when this returns."""
        for _, process, pipe in self.members:
            pipe.close()
            process.kill()
        for _, process, _ in self.members:
            process.wait()
        self.members = []
