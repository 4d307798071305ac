"""What a preflight shows while it runs: a table that moves on a terminal, one line per run elsewhere."""

import threading
import time

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text


def outcome_words(outcome):
    """ "ok, 6.1 s, 0.8 GiB" or "FAILED after 3.0 s: rank 1: ValueError: ..."."""
    if outcome.ok:
        slow = f" (slow: {outcome.slow})" if outcome.slow else ""
        return f"ok, {outcome.ended.seconds:.1f} s, {outcome.ended.peak_bytes / 2**30:.1f} GiB{slow}"
    return f"FAILED after {outcome.ended.seconds:.1f} s: {outcome.error}"


class Watch:
    """Context manager with the callbacks `started(run)` and `ended(outcome)`."""

    def __init__(self, total, console=None):
        self.console = console or Console(highlight=False)
        self.total, self.done = total, 0
        self._running, self._lock = {}, threading.Lock()
        self._bar = Progress(
            TextColumn("preflight"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
        )
        self._task = self._bar.add_task("", total=total)
        self._spinner = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=self.console
        )
        self._live = Live(Group(self._spinner, self._bar), console=self.console) if self.console.is_terminal else None

    def __enter__(self):
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_):
        if self._live:
            self._live.stop()

    def started(self, run):
        name = f"{run.lesson.name} {run.title}"
        with self._lock:
            self._running[run] = (self._spinner.add_task(name), time.monotonic())
        if not self._live:
            self.console.print(f"        {name} ...", soft_wrap=True)

    def ended(self, outcome):
        with self._lock:
            self.done += 1
            task, _ = self._running.pop(outcome.run)
            self._spinner.remove_task(task)
            self._bar.advance(self._task)
        style = ("yellow" if outcome.slow else "green") if outcome.ok else "bold red"
        line = Text(f"[{self.done:>2}/{self.total}] {outcome.run.lesson.name} {outcome.run.title}: ")
        line.append(outcome_words(outcome), style)
        self.console.print(line, soft_wrap=True)
