"""A progress bar below the lines of a run, on a terminal; elsewhere only the lines. One write per call."""

import time

from manyhands.launch.screen import write

REFRESH_S = 0.25  # drawing costs the training time


class Bar:
    """`active`: draw it. Lines go through `write`, so that they stand above the bar."""

    def __init__(self, steps, active):
        self.progress, self.drawn = None, 0.0
        if active:
            self.progress = _progress()
            self.task = self.progress.add_task("", total=steps, loss="")

    def start(self):
        if self.progress:
            self.progress.start()
            self.progress.console.show_cursor(True)  # rich hides it, and a run that is killed cannot bring it back

    def advance(self, step, row=None):
        """`step` steps are done; `row`: a line's numbers, if there are new ones."""
        if not self.progress:
            return
        self.progress.update(self.task, completed=step)
        if row:
            self.progress.update(self.task, loss=f"loss {row['loss']:.4f}")
        if row or time.perf_counter() - self.drawn > REFRESH_S:
            self.drawn = time.perf_counter()
            self.progress.refresh()

    def write(self, text):
        if self.progress and self.progress.live.is_started:
            from rich.text import Text

            self.progress.console.print(Text.from_ansi(text), soft_wrap=True, highlight=False)
        else:
            write(f"{text}\n")

    def stop(self):
        if self.progress:
            self.progress.stop()


def _progress():
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        MofNCompleteColumn(), TextColumn("steps"), BarColumn(), TextColumn("{task.fields[loss]}"),
        TextColumn("left:"), TimeRemainingColumn(),
        console=Console(force_terminal=True), auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False,
    )  # fmt: skip
