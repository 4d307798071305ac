"""`--log.profile`: where the time of a step goes, by torch's profiler on each rank and by pyinstrument on rank 0.

    with Profile(ranks, options, folder, say) as profile:      # all ranks; nothing happens without --log.profile
        for step in ...:
            ...
            profile.step()

Each rank writes <folder>/profile/rank-N.json, a trace of a few steps for https://ui.perfetto.dev or chrome://tracing.
Rank 0 also writes rank-0.html and rank-0.txt: how long each Python function took, over the whole run. Both cost time:
a profiled run's tokens/s are not its speed.
"""

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from manyhands.launch.settings import set_default

LATER, WARM_UP, TRACED = 4, 2, 3  # steps let pass (compilation, first allocations), warmed up, traced
SILENT = "99"  # torch's profiler would write "USDT: ... profiler_start" into the table of steps
SAMPLE_S = 0.002  # pyinstrument looks at the stack so often


class Profile:
    """`steps`: how many this run will do (none: train.steps). `say(sentence)` is called on rank 0."""

    def __init__(self, ranks, options, folder, say=print, steps=None):
        self.ranks, self.folder, self.say = ranks, folder / "profile", say
        self.trace = self.stacks = None
        self.active = options.log.profile
        self.steps = options.train.steps if steps is None else steps

    def __enter__(self):
        self.active = self.active and self._guarded(self._make_folder)
        if self.active:
            set_default(KINETO_LOG_LEVEL=SILENT)
            self.trace = profile(
                activities=_activities(),
                schedule=schedule(**windows(self.steps), repeat=1),
                on_trace_ready=self._write_trace,
                acc_events=True,
            )
            if self.ranks.rank == 0:
                self.stacks = self._pyinstrument()
            self.trace.start()
        return self

    def step(self):
        """A step is done."""
        if self.trace:
            self.trace.step()

    def __exit__(self, *_):
        if not self.active:
            return
        trace, self.trace = self.trace, None
        trace.stop()  # a run that ended early writes what it has
        if self.stacks:
            self.stacks.stop()
            self._guarded(self._write_stacks)
        if self.ranks.rank == 0:
            self.say(f"profiles: {self.folder}; open rank-*.json in https://ui.perfetto.dev")

    def _make_folder(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        return True

    def _write_trace(self, trace):
        path = self.folder / f"rank-{self.ranks.rank}.json"
        self._guarded(lambda: trace.export_chrome_trace(str(path)))

    def _write_stacks(self):
        (self.folder / "rank-0.html").write_text(self.stacks.output_html(), encoding="utf-8")
        text = self.stacks.output_text(unicode=False, color=False, show_all=False)
        (self.folder / "rank-0.txt").write_text(text, encoding="utf-8")

    def _guarded(self, call):
        """A profile that cannot be written must not end a training: what is wrong is said."""
        try:
            return call()
        except (OSError, RuntimeError) as error:
            self.say(f"profile: {type(error).__name__}: {error}. Training goes on")

    def _pyinstrument(self):
        try:
            from pyinstrument import Profiler
        except ImportError:
            self.say(
                "pyinstrument is not installed, so only torch's traces are written; "
                "install it by: pip install -e '.[profile]'"
            )
            return None
        stacks = Profiler(interval=SAMPLE_S)
        stacks.start()
        return stacks


def windows(steps):
    """The profiler's schedule in a run of `steps` steps: a short run is traced from its start."""
    active = max(1, min(TRACED, steps))
    warmup = min(WARM_UP, steps - active)
    return {"wait": min(LATER, steps - active - warmup), "warmup": warmup, "active": active}


def _activities():
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    if getattr(torch, "xpu", None) and torch.xpu.is_available():
        activities.append(ProfilerActivity.XPU)
    return activities
