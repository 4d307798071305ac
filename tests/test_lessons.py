"""Each lesson as its users run it: notebook and script in their shortest runs, with equal numbers.

Of long lessons `make test` runs the notebook alone. `make test-full` adds their scripts, the notebooks at full
length, and lesson 02 from every launcher on 2 and 4 ranks, 03 from two on 2 and under torchrun on 4. What runs on 2
ranks is the attendees' copy, in which nobody has written a line yet. `make preflight` runs every lesson every way.
"""

import ast
import json
import os
import re
import subprocess
import sys
from contextlib import suppress

import nbformat
import pytest
import shortest
import torch
import torch.distributed as dist
from each_section import run, sections
from manyhands.config.layout import resolve_layout
from manyhands.config.options import model_config
from manyhands.course import handouts
from manyhands.course.folders import ROOT
from manyhands.course.lesson_parameters import read
from manyhands.course.lessons import find_lessons
from manyhands.data.corpus import load_corpus
from manyhands.launch.metrics import compare
from manyhands.tools.lesson_run import Run, find_metrics, write_kernelspec
from manyhands.train.isoflop import Point
from papermill.inspection import inspect_notebook
from rank_pool import ranks_of
from torch.testing._internal.distributed.fake_pg import FakeStore
from wants import questions, told_too_early

LESSONS = find_lessons(ROOT, own=False)
# 30 processor seconds and more on 2 ranks
LONG = [lesson for lesson in LESSONS if lesson.number in ("01", "03", "05", "06", *map(str, range(10, 16)))]
MATRIX = [lesson for lesson in LESSONS if lesson.number in ("02", "03")]
# four ranks behind a notebook: the run of full length; four under torchrun: beside a world of one, below
LAUNCHERS = [*(("02", *way) for way in (("mpiexec", 2), ("notebook", 2), ("mpiexec", 4))), ("03", "mpiexec", 2)]


def each(lessons, *marks):
    return pytest.mark.parametrize("lesson", [pytest.param(lesson, id=lesson.name, marks=marks) for lesson in lessons])


named = each(LESSONS)


@pytest.fixture(scope="module")
def corpus():
    return load_corpus()


@pytest.fixture(scope="module")
def shortened(tmp_path_factory):
    """{name: lesson} of an attendees' copy in which nothing is repeated for long."""
    copied = find_lessons(handouts.copy(tmp_path_factory.mktemp("class") / "course", ROOT))
    for lesson in copied:
        shortest.shorten(lesson)
    return {lesson.name: lesson for lesson in copied}


@named
def test_1_8_12_16_and_32_ranks_are_refused_by_no_lesson(lesson, corpus, monkeypatch):
    """As many GPUs have one node of Frontier, one of Aurora, four of Polaris, and four of Frontier.

    The start cells run as rank 0 on torch's fake backend, which moves nothing. Then each batch that the lesson asks for
    must split, over all ranks or over a group of the first n.
    """
    begin, *_ = sections(lesson.script)
    few = {"13": {"base_steps": 1}}.get(lesson.number, {})  # all else as it stands there
    batches = [
        [compile(ast.Expression(call.args[place]), lesson.name, "eval") for place in (2, 5)]
        for call in ast.walk(ast.parse(lesson.script.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "get_batch"
    ]  # fmt: skip
    new_group = dist.new_group
    monkeypatch.setattr(dist, "new_group", lambda *of, backend=None: new_group(*of))
    monkeypatch.setattr("manyhands.refuse", pytest.fail)
    monkeypatch.setattr("manyhands.data.corpus.load_corpus", lambda ranks: corpus)
    for world_size in (1, 8, 12, 16, 32):
        ranks = ranks_of(0, world_size, lesson=lesson.name)
        monkeypatch.setattr("manyhands.join", lambda namespace, r=ranks: namespace.update(few) or r)
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        try:
            namespace = {"__file__": str(lesson.script), "__name__": "__main__"}
            with torch.enable_grad():  # lesson 14 turns gradients off
                run(begin, namespace, lesson.script)
        finally:
            dist.destroy_process_group()
        for size, parts in batches:
            for n in (1, 2, 3, 4):
                with suppress(NameError):  # what a function is given: its caller's batch
                    names = {"n": n} | namespace
                    assert eval(size, names) % eval(parts, names) == 0, f"on {world_size} ranks"
        assert namespace.get("ANSWERS", 0) % world_size == 0  # of lesson 13, dealt out, too
        if lesson.number == "12":
            options = Point(1e9, 24).options(65, world_size=world_size)
            resolve_layout(options, model_config(options, 65), world_size)


@named
def test_papermill_knows_every_parameter(lesson):
    known = {parameter.name: parameter for parameter in read(lesson.script)}
    inferred = inspect_notebook(lesson.notebook)
    assert inferred.keys() == known.keys(), "papermill warns of a parameter that it cannot infer"
    for name, parameter in known.items():
        assert ast.literal_eval(inferred[name]["default"]) == parameter.default, name


SHELL_LINES = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
shell, said = InteractiveShell.instance(), []
shell.colors = "nocolor"
for cell in json.load(sys.stdin):
    with capture_output() as seen:
        shell.run_cell(cell)
    said.append(seen.stdout)
print(json.dumps(said))
"""


def test_the_shell_lines_of_notebooks_show_from_the_repositorys_root_what_is_stored(tmp_path):
    """As papermill runs them by default; `!` raises nothing where a file is not found."""
    code = [cell for lesson in LESSONS for cell in nbformat.read(lesson.notebook, 4).cells if cell.cell_type == "code"]
    shown = [cell for cell in code if re.search(r"^!", cell.source, re.M)]
    assert len(shown) >= 5
    sources = ["from manyhands.course.folders import ROOT", *(cell.source for cell in shown)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "scripts"), "IPYTHONDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SHELL_LINES], input=json.dumps(sources), env=environ, cwd=ROOT, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    _, *said = json.loads(done.stdout.splitlines()[-1])
    for cell, found in zip(shown, said, strict=True):
        stored = "".join(output.text for output in cell.outputs)
        missing = set(stored.split()) - set(found.split())  # `ls` may have found more since
        assert not missing and bool(found) == bool(stored), (cell.source, found)


IN_SHORT = [pytest.param(lesson, 2, id=lesson.name) for lesson in LESSONS if lesson not in LONG]
IN_FULL = [
    pytest.param(lesson, n, id=f"{lesson.name}, {n} ranks", marks=pytest.mark.full) for lesson in LONG for n in (1, 2)
]  # fmt: skip


@each(LONG, pytest.mark.lesson)
@pytest.mark.timeout(600)
def test_the_attendees_notebook_of_a_long_lesson_runs_and_each_check_is_not_attempted(lesson, shortened, tmp_path):
    """On 2 ranks. Its script, which holds the same cells (see test_pairs), runs in `make test-full`."""
    run_of(shortened[lesson.name], "notebook", 2, tmp_path / "notebook")
    cells = nbformat.read(tmp_path / "notebook" / f"{lesson.name}.ipynb", 4).cells
    shown = [output.get("data", {}).get("text/plain", "") for cell in cells for output in cell.get("outputs", ())]
    assert_not_attempted("\n".join(shown))


def run_of(lesson, way, n_ranks, folder):
    """Return the metrics of the shortest run of a shortened lesson."""
    outcome = Run(lesson, way, n_ranks, folder, shortest.values(lesson)).carry_out(timeout_s=280)
    assert not outcome.error, f"{way}: {outcome.error}"
    assert (outcome.metrics["lesson"], outcome.metrics["world_size"]) == (lesson.name, n_ranks)
    return outcome.metrics


def assert_not_attempted(printed):
    verdicts = re.findall(r"\b(?:build|exercise) \w+ \(.*\): ([^.\n]*)", printed)
    assert len(verdicts) >= 3 and set(verdicts) == {"not attempted"}


@pytest.mark.lesson
@pytest.mark.parametrize(("lesson", "n_ranks"), IN_SHORT + IN_FULL)
@pytest.mark.timeout(600)
def test_the_attendees_notebook_and_the_script_give_the_same_numbers(lesson, n_ranks, shortened, tmp_path):
    """On 2 ranks; `make test-full` runs long lessons so too, and their scripts on 1. Nobody has written a line yet:
    each check puts the lesson's own in place."""
    ways = {"notebook": 2, "torchrun": n_ranks}
    found = {way: run_of(shortened[lesson.name], way, n, tmp_path / way) for way, n in ways.items()}
    assert n_ranks == 1 or compare(found["torchrun"], found["notebook"]) == []
    assert_not_attempted((tmp_path / "torchrun" / "log.txt").read_text(errors="replace"))


@each(LESSONS, pytest.mark.lesson, pytest.mark.full)
@pytest.mark.timeout(600)
def test_the_notebook_at_full_length_gives_the_stored_checked_outputs(lesson, tmp_path):
    """The nbval run on the lesson's own number of ranks: cells tagged nbval-check-output must print what is stored."""
    kernel = tmp_path / "jupyter" / "kernels" / "manyhands"  # before the one that is installed: this one is a fork
    write_kernelspec(kernel)
    environ = {**os.environ, "MANYHANDS_OUTPUTS": str(tmp_path), "MANYHANDS_LIVE": "0"}
    environ["JUPYTER_PATH"] = str(tmp_path / "jupyter")
    environ.pop("PYTEST_CURRENT_TEST", None)
    command = [
        sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "--nbval-lax", "-q", "-x",
        "--nbval-kernel-name=manyhands", "--nbval-cell-timeout=500", "--timeout=580", "--rootdir", str(tmp_path),
        str(lesson.notebook),
    ]  # fmt: skip
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stdout[-6000:]
    metrics = find_metrics(tmp_path, lesson.name)
    own = next(parameter.default for parameter in read(lesson.script) if parameter.name == "n_ranks")
    # 10 has three axes of two; 14 times single calls, which four ranks on two cores disturb
    assert own == 4 or (lesson.number, own) == ("10", 8) or lesson.number == "14"
    assert (metrics["launcher"], metrics["world_size"]) == ("notebook", own)
    assert metrics["exact"] or lesson.number == "04"


@pytest.mark.full
@pytest.mark.lesson
@pytest.mark.parametrize(("number", "way", "n_ranks"), LAUNCHERS, ids=lambda value: str(value))
def test_every_launcher_gives_the_metrics_of_torchrun(number, way, n_ranks, short_run):
    (lesson,) = find_lessons(ROOT, only=[number])
    metrics = short_run(lesson, way, n_ranks)
    assert metrics["world_size"] == n_ranks
    assert compare(short_run(lesson, "torchrun", n_ranks), metrics) == []


@each(MATRIX, pytest.mark.lesson, pytest.mark.full)
def test_a_world_of_one_and_a_world_of_four_agree(lesson, short_run, tmp_path):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in lesson.short.items()]
    environ = {**os.environ, "MANYHANDS_OUTPUTS": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(lesson.script), *flags], env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    alone = find_metrics(tmp_path)
    assert alone["world_size"] == 1
    for n_ranks in (2, 4):
        assert compare(alone, short_run(lesson, "torchrun", n_ranks)) == []
    if lesson.number == "03":
        assert alone["close"], "the losses of the same global batch are what is compared"


@pytest.mark.full
@pytest.mark.lesson
def test_our_own_ddp_trains_as_the_librarys_does(short_run):
    (lesson,) = find_lessons(ROOT, only=["03"])
    ours, library = short_run(lesson, "torchrun", 2), short_run(lesson, "torchrun", 2, ddp="library")
    assert (ours["parameters"]["ddp"], library["parameters"]["ddp"]) == ("ours", "library")
    assert compare(ours, {**library, "parameters": ours["parameters"]}) == []


ANSWERED = {"text/html": "<details><summary>MB: no guess yet</summary>it is 3,960 MB<br>sent 7,920</details>",
            "text/plain": "MB: no guess yet; the answer is folded"}  # fmt: skip
FIGURE = {"text/html": "<details><summary>MB: the figure</summary><img></details>",
          "text/plain": "[figure, folded: MB: the figure]"}  # fmt: skip


@pytest.mark.parametrize(
    ("since", "outputs", "wrong"),
    [
        ([], [ANSWERED, FIGURE], []),
        ([], [{**ANSWERED, "text/html": ANSWERED["text/html"].replace("ls>", "ls open>", 1)}], ["not folded"]),
        ([], [{"text/plain": "MB: no guess yet: it is 3,960 MB"}], ["not folded"]),
        ([], [ANSWERED, {"text/plain": "rank 0 | sent 3,960 MB"}], ["the answer stands beside"]),
        ([], [ANSWERED, {"text/plain": "rank 0 | sent [3960.0000] MB"}], ["the answer stands beside"]),
        ([], [ANSWERED, {"text/plain": "rank 0 | sent about 4,000 MB"}], ["the answer stands beside"]),
        ([], [ANSWERED, {"text/html": "sent <b>3,960 MB</b>"}], ["the answer stands beside"]),
        ([{"text/plain": "ranks 1-3 | sent 3,960 MB"}], [ANSWERED], ["the answer stands beside"]),
        ([], [ANSWERED, {"text/plain": "rank 3960 | sent 13,960 MB, 39.60 MB"}], []),
        ([], [ANSWERED, {"image/png": "", "text/plain": "[figure: bars]"}], ["a figure stands beside"]),
    ],
)  # fmt: skip
def test_an_answer_that_is_shown_too_early_is_found(since, outputs, wrong):
    cell = nbformat.v4.new_code_cell('%%ranks\ncompare("MB", "guess", 3960, "MB")')
    since, cell.outputs = ([nbformat.v4.new_output("display_data", data) for data in part] for part in (since, outputs))
    ((what, _),) = questions(cell)
    assert told_too_early(cell, what, since) == [f"MB: {sentence}" for sentence in wrong]
