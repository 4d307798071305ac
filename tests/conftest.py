"""What every test shares: the course's folders, and an environment in which nothing is written into the tree."""

import functools
import gc
import importlib.util
import json
import os
import re
import signal
import sys
import tempfile
from pathlib import Path

# threads that wait for work without spinning: ranks, and tests that run beside each other, share the cores; set before
# torch is imported
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# in the background of a shell Ctrl-C is ignored, also by what is started there
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from hypothesis import HealthCheck, settings

# jsonschema would build 38 grammars of web addresses, which takes 2 s, to look at formats that no notebook has
sys.modules["rfc3987_syntax"] = None

ROOT = Path(__file__).resolve().parents[1]
# what is tested is the CPU's, on a node with GPUs as well, unless GPUs are asked for: `make test-gpu`
ASKED = os.environ.setdefault("MANYHANDS_DEVICE", "cpu")
sys.dont_write_bytecode = False  # the tests themselves are rewritten, which takes each process seconds
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each of some thousand programs compiles the package anew
REAL_PYTHON = sys.executable
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

import kept_parsers  # noqa: E402, F401
from forked_python import ForkedPython  # noqa: E402
from rank_pool import RankPool  # noqa: E402

# the same examples in each run: a landing must not hang on luck. On a busy machine an example may take a second
settings.register_profile(
    "course", settings(), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("course")


@pytest.fixture(scope="session", autouse=True)
def _shared_memory():
    """Tests that kill ranks leave MPICH's segments, 4 MiB each. Young ones may be those of another worker's ranks."""
    from manyhands.launch.limits import sweep_shared_memory

    yield
    sweep_shared_memory(older_s=60)


@pytest.fixture(scope="session")
def root():
    return ROOT


@pytest.fixture(scope="session")
def program(root):
    """program("sample") -> scripts/sample.py as a module."""

    def load(name):
        spec = importlib.util.spec_from_file_location(f"{name}_program", root / "scripts" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return functools.cache(load)


@pytest.fixture(scope="session")
def pool():
    """Up to eight ranks that stay for all tests: `pool.run(n, function, *args)`; see rank_pool."""
    with RankPool(8) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def forked_python():
    """A Python that starts programs and ranks in a moment: they are forked from a process that has imported torch."""
    with tempfile.TemporaryDirectory(prefix="mh-") as folder, ForkedPython(folder) as python:
        yield python.executable


@pytest.fixture(scope="module", autouse=True)
def _programs_are_forks(request):
    """In the files of FORKED whatever is started with sys.executable is a fork; see forked_python."""
    if request.path.name in FORKED:
        before, sys.executable = sys.executable, request.getfixturevalue("forked_python")
        yield
        sys.executable = before
    else:
        yield


@pytest.fixture
def real_python(monkeypatch):
    """In a file of FORKED: what this test starts is no fork, because it looks at processes from outside."""
    monkeypatch.setattr(sys, "executable", REAL_PYTHON)


@pytest.fixture(autouse=True)
def _outputs_outside_the_tree(tmp_path, monkeypatch):
    monkeypatch.setenv("MANYHANDS_OUTPUTS", str(tmp_path / "outputs"))


@pytest.fixture(scope="module")
def one_thread():
    """For tensors so small that two threads are slower than one, by far where the cores are shared."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_runtest_logreport(report):
    """Keep how each test of `make test-gpu` ended as soon as it has: its time may be over before the last one."""
    if ASKED != "cpu" and report.when == "call" and "PYTEST_XDIST_WORKER" not in os.environ:  # its controller hears all
        path = ROOT / "outputs" / "test_gpu.json"
        path.parent.mkdir(exist_ok=True)
        found = json.loads(path.read_text()) if path.exists() else {}
        found[report.nodeid] = {"outcome": report.outcome, "seconds": round(report.duration, 1)}
        path.write_text(json.dumps(found, indent=1) + "\n")


@pytest.fixture(scope="session")
def gpus():
    """How many GPUs of the kind that was asked for this machine has; without one, the tests that need it fail."""
    from manyhands.launch.devices import gpus_here

    if ASKED not in ("cuda", "xpu"):
        pytest.skip("needs a GPU, and none was asked for: make test-gpu")
    kind, count = gpus_here({"MANYHANDS_DEVICE": ASKED})
    if kind == "cpu":
        pytest.fail(f"MANYHANDS_DEVICE={ASKED} asks for tests on GPUs, and torch sees none of that kind here")
    return count


@pytest.fixture(scope="session")
def attendees(tmp_path_factory):
    """{name: lesson} of an attendees' copy of the course."""
    from manyhands.course import handouts
    from manyhands.course.lessons import find_lessons

    copied = handouts.copy(tmp_path_factory.mktemp("class") / "course", ROOT)
    return {lesson.name: lesson for lesson in find_lessons(copied)}


@pytest.fixture(scope="session")
def short_run(tmp_path_factory, attendees):
    """short_run(lesson, way, n_ranks) -> the metrics of a short run, made once; on 2 ranks of the attendees' copy."""
    from manyhands.tools.lesson_run import Run

    made = {}

    def run(lesson, way, n_ranks, **changed):
        key = lesson.name, way, n_ranks, *changed.values()
        if key not in made:
            folder = tmp_path_factory.mktemp(f"{lesson.number}-{way}-{n_ranks}")
            one = attendees[lesson.name] if n_ranks == 2 else lesson
            outcome = Run(one, way, n_ranks, folder, lesson.short | changed).carry_out(timeout_s=280)
            assert not outcome.error, f"{lesson.name}, {way} on {n_ranks} ranks: {outcome.error}"
            if n_ranks == 2 and way != "notebook":
                found = re.findall(
                    r"\b(exercise|build) \w+ \(.*\): ([^.\n]*)", (folder / "log.txt").read_text(errors="replace")
                )
                assert len(found) >= 3 and {verdict for _, verdict in found} == {"not attempted"}
            made[key] = outcome.metrics
        return made[key]

    return run


# What runs beside what (`make test` is pytest -n 3): two processes take the files that run lessons, one the lessons of
# even numbers and one those of odd ones, and the third meanwhile those that mostly wait, for schedulers, browsers and
# time-outs; then all take what is left, file by file, the long ones first. With two processes both cores idled by half.
LESSONS = ["test_lessons.py", "test_slurm.py", "test_side_by_side.py"]
WAIT = [
    "test_train_jobs.py", "test_preflight.py", "test_widgets_browser.py", "test_browser.py", "test_stalls.py",
    "test_sweep.py", "test_launch_program.py", "test_preemption.py", "test_stand_in_device.py", "test_jupyterhub.py",
]  # fmt: skip
# those that compute longest, so that the last file of all is a short one
LONG = [
    "test_training.py", "test_tensor_and_pipeline.py", "test_strategies.py", "test_saves.py", "test_ranks.py",
    "test_checks.py",
    "test_when_it_breaks.py", "test_own_text.py", "test_widgets.py", "test_programs.py", "test_bad_input.py",
    "test_every_strategy_ends.py", "test_serving.py", "test_on_your_cluster.py", "test_memory.py",
]  # fmt: skip
FIRST = LESSONS + WAIT + LONG
# what starts many programs; not what looks at command lines in /proc, or at the memory of what it has started
FORKED = [
    "test_lessons.py", "test_stand_in_device.py", "test_train_program.py", "test_align_program.py", "test_sample.py",
    "test_prepare_data.py", "test_bad_input.py", "test_dry_run.py", "test_serve_program.py", "test_own_text.py",
    "test_stalls.py", "test_preemption.py", "test_sweep.py", "test_launch_program.py", "test_programs.py",
    "test_deepspeed.py", "test_new_strategy.py", "test_launch.py", "test_reading.py", "test_data.py",
    "test_checkpoint.py", "test_same_science.py", "test_data_parallel.py", "test_screen.py", "test_recorded.py",
    "test_plan_program.py", "test_slurm.py", "test_train_jobs.py", "test_cluster.py", "test_ranks.py",
    "test_side_by_side.py", "test_jobs.py", "test_pairs.py", "test_bench.py", "test_chat_page.py",
    "test_contributing.py", "test_when_it_breaks.py", "test_meshes_and_planning.py", "test_browser.py",
    "test_widgets_browser.py", "test_every_strategy_ends.py",
    "test_recipes.py", "test_doctor_in_job.py", "test_size.py", "test_tensor_serving.py",
]  # fmt: skip


# what `make test-full` adds; single tests are marked `full`
FULL = [
    "test_stand_in_device.py", "test_checks_seeds.py", "test_slurm.py", "test_cluster.py", "test_flights.py",
    "test_deepspeed.py", "test_side_by_side.py", "test_new_strategy.py", "test_jupyterhub.py",
]  # fmt: skip


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported and collected stays to the end: to look for garbage in it takes seconds, then and later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(items):
    for item in items:
        for fixture, mark in (("pool", "ranks"), ("gpus", "gpu")):
            if fixture in item.fixturenames:
                item.add_marker(mark)
        if item.path.name in FULL or item.get_closest_marker("slurm") or item.get_closest_marker("browser"):
            item.add_marker("full")
    items.sort(key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST))


def pytest_terminal_summary(terminalreporter, config):
    """Seconds per file of tests, longest first, in outputs/tests/durations.tsv: for when the suite has grown slow."""
    seconds = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                file = report.nodeid.split("::")[0]
                seconds[file] = seconds.get(file, 0.0) + report.duration
    if len(seconds) > 20:  # not after the tests of one thing
        table = ROOT / "outputs" / "tests" / "durations.tsv"
        table.parent.mkdir(parents=True, exist_ok=True)
        rows = sorted(seconds.items(), key=lambda row: -row[1])
        table.write_text("".join(f"{duration:.1f}\t{file}\n" for file, duration in rows))
        terminalreporter.write_line(
            f"{sum(seconds.values()):.0f} s of tests, by file in {table.relative_to(ROOT)}; the longest:"
        )
        for file, duration in rows[:12]:
            terminalreporter.write_line(f"{duration:8.1f} s  {file}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class FileByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = Path(nodeid.split("::")[0]).name
            if file in LESSONS:
                number = re.search(r"\[(\d\d)", nodeid)
                return f"lessons {int(number[1]) % 2}" if number else "lessons"
            return file

    config.option.loadscopereorder = False  # as sorted above
    return FileByFile(config, log)
