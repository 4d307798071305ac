"""Which runs a preflight makes, how many go at once, and whether their metrics agree."""

import threading
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from manyhands.course.lesson_parameters import read
from manyhands.course.lessons import AIM_BYTES, Lesson
from manyhands.launch.limits import available_memory_bytes
from manyhands.preflight.runs import NOTEBOOK_RANKS, Run


@dataclass
class LessonResult:
    """A lesson's outcomes in the order of its runs, and where their metrics differ."""

    lesson: Lesson
    outcomes: list = field(default_factory=list)
    differences: list = field(default_factory=list)  # sentences
    compared: int = 0  # runs whose metrics were compared
    stale: str = ""  # where notebook and script do not hold the same cells

    @property
    def ok(self):
        return not self.differences and not self.stale and all(outcome.ok for outcome in self.outcomes)


def plan(lessons, folder, *, ranks=None, device=None, short=False, notebooks_only=False):
    """The Runs: first every notebook, then every script under torchrun and mpiexec on 2 and 4 ranks, or on `ranks`.

    Raises ValueError for short parameters that a lesson does not know.
    """
    notebooks, scripts = [], []
    for lesson in lessons:
        parameters = dict(lesson.short) if short else {}
        known = {parameter.name for parameter in read(lesson.script)} if lesson.script.exists() else set(parameters)
        if unknown := parameters.keys() - known:
            raise ValueError(f"SHORT in lessons.py sets {', '.join(unknown)}, which {lesson.name} does not have")
        own = folder / lesson.name

        def run(way, n, own=own, lesson=lesson, parameters=parameters):
            return Run(lesson, way, n, own / (f"{way}-{n}" if n else way), parameters, device)

        notebooks.append(run("notebook", max(ranks) if ranks else None))
        scripts += [run(way, n) for n in ranks or (2, 4) for way in ("torchrun", "mpiexec")]
    return notebooks if notebooks_only else notebooks + scripts


def free_cores():
    """Cores for our ranks, by affinity and control group."""
    from manyhands.launch import cores, devices

    return devices.cores({"cpus": cores.cpus(), "quota": cores.quota_cores()})


def at_once(run, running, cores, memory_bytes):
    """May `run` start beside the `running` ones? Alone it always may."""
    wanted = sum((r.n_ranks or NOTEBOOK_RANKS) for r in [run, *running])
    on_gpus = run.device not in (None, "cpu")
    return not running or (not on_gpus and wanted <= cores and (len(running) + 1) * AIM_BYTES <= memory_bytes)


def carry_out(runs, timeout_s, *, on_start=None, on_end=None, cores=None, memory_bytes=None):
    """Carry out all runs, in order, several at once where cores and memory allow; their Outcomes, in order.

    Interrupted (Ctrl-C, the end of a job), it ends the processes of all runs before it passes the interrupt on.
    """
    cores = cores or free_cores()
    memory_bytes = memory_bytes or available_memory_bytes()
    waiting, running, outcomes = list(runs), {}, {}
    stop = threading.Event()
    with ThreadPoolExecutor(max_workers=max(1, cores)) as pool:
        try:
            while waiting or running:
                while waiting and at_once(waiting[0], running.values(), cores, memory_bytes):
                    run = waiting.pop(0)
                    if on_start:
                        on_start(run)
                    running[pool.submit(run.carry_out, timeout_s, stop=stop)] = run
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    run = running.pop(future)
                    outcomes[run] = future.result()
                    if on_end:
                        on_end(outcomes[run])
        finally:
            stop.set()  # nothing runs any more, or nothing should
    return [outcomes[run] for run in runs]


def judge(outcomes):
    """Outcomes -> one LessonResult per lesson, metrics compared: each run with the first, and with the first on as many
    ranks, where exact values count too. A pair whose halves differ was not run as it will be shown."""
    from manyhands.course import pairs
    from manyhands.launch.metrics import compare

    results = {}
    for outcome in outcomes:
        lesson = outcome.run.lesson
        results.setdefault(lesson, LessonResult(lesson)).outcomes.append(outcome)
    for result in results.values():
        if result.lesson.notebook.exists() and result.lesson.script.exists():
            result.stale = pairs.difference(result.lesson) or ""
        complete = [outcome for outcome in result.outcomes if outcome.metrics is not None]
        first_of = {}
        result.compared = len(complete) if len(complete) > 1 else 0
        for outcome in complete:
            reference = first_of.setdefault(outcome.metrics["world_size"], outcome)
            if reference is outcome:
                reference = complete[0]
            if reference is not outcome:
                names = f"{outcome.run.title} against {reference.run.title}"
                found = compare(reference.metrics, outcome.metrics)
                result.differences += [f"{names}: {sentence}" for sentence in found]
    return list(results.values())
