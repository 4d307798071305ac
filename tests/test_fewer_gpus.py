"""A node with fewer GPUs than a notebook has ranks: the ranks follow the GPUs, or stay on the CPUs and say what to set.

The GPUs are stand-ins (see stand_in_device), which the ranks get in a cell behind the one that starts them. Each build
and exercise has its folded solution, so that every check has something to judge.
"""

import ast
import re

import nbformat
import pytest
import shortest
from conftest import ROOT
from manyhands.course import handouts
from manyhands.course.catch_up import solutions
from manyhands.course.lessons import find_lessons
from manyhands.tools.lesson_run import Run

LESSONS = [lesson for lesson in find_lessons(ROOT, own=False) if lesson.number <= "10"]
QUICK = {("00", 2)}
GPUS = """%%ranks
import sys
sys.path.append({tests!r})
import stand_in_device
stand_in_device.COUNT = {count}
stand_in_device.StandIn({lesson!r}).__enter__();
"""


def solve(notebook):
    """Put each folded solution before what judges it; return the number of solutions."""
    found, judged = 0, None
    for cell in notebook.cells:
        if cell.cell_type == "code" and re.search(r"^ *checks\.", cell.source, re.M):
            judged = cell
        for lines in solutions(re.sub("^(?=.)", "# ", cell.source, flags=re.M).replace("\n\n", "\n#\n")).values():
            tree = ast.parse(judged.source.replace("%%ranks", "# ranks", 1))
            line = next(one.lineno for one in tree.body if "checks." in ast.unparse(one)) - 1
            cell_lines = judged.source.splitlines()
            judged.source = "\n".join([*cell_lines[:line], lines, *cell_lines[line:]])
            found += 1
    return found


def give_gpus(notebook, lesson, count):
    start = next(
        i for i, cell in enumerate(notebook.cells) if "start_ranks(" in cell.source and "hands =" in cell.source
    )
    source = GPUS.format(tests=str(ROOT / "tests"), count=count, lesson=lesson.name)
    notebook.cells.insert(start + 1, nbformat.v4.new_code_cell(source))


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """{name: lesson} of a copy in which each solution is written and nothing is repeated for long."""
    lessons = find_lessons(handouts.copy(tmp_path_factory.mktemp("class") / "course", ROOT))
    return {lesson.name: lesson for lesson in lessons}


def run_on(gpus, lesson, folder, monkeypatch):
    """Run the notebook on a node with so many GPUs: (its outcome, all that its cells show, solutions)."""
    notebook = nbformat.read(lesson.notebook, 4)
    solved = solve(notebook)
    give_gpus(notebook, lesson, gpus)
    given = lesson.notebook.read_bytes()
    monkeypatch.setenv("MANYHANDS_DEVICE", "auto")
    nbformat.write(notebook, lesson.notebook)
    try:
        outcome = Run(lesson, "notebook", None, folder, shortest.values(lesson)).carry_out(timeout_s=380)
    finally:
        lesson.notebook.write_bytes(given)
    shown = ""
    if (folder / lesson.notebook.name).exists():
        for cell in nbformat.read(folder / lesson.notebook.name, 4).cells:
            for output in cell.get("outputs", ()):
                shown += output.get("text", output.get("data", {}).get("text/plain", "")) + "\n"
    return outcome, shown, solved


@pytest.mark.lesson
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("lesson", "gpus"),
    [
        pytest.param(lesson, n, id=f"{lesson.name}, {n}", marks=[pytest.mark.full] * ((lesson.number, n) not in QUICK))
        for lesson in LESSONS
        for n in (1, 2)
    ],
)
def test_the_ranks_of_a_notebook_follow_the_gpus_and_all_its_checks_pass(lesson, gpus, copied, tmp_path, monkeypatch):
    monkeypatch.setenv("MANYHANDS_RANKS", str(gpus))
    outcome, shown, solved = run_on(gpus, copied[lesson.name], tmp_path / "run", monkeypatch)
    assert not outcome.error, f"{outcome.error}\n{outcome.error.detail[-3000:]}"
    assert (outcome.metrics["world_size"], outcome.metrics["device"]) == (gpus, "cuda")
    verdicts = re.findall(r"\b(?:build|exercise) \w+ \(.*\): ([^.\n]*)", shown)
    assert solved >= 3 and len(verdicts) >= solved and set(verdicts) == {"correct"}, shown


@pytest.mark.full
@pytest.mark.lesson
@pytest.mark.timeout(400)
def test_four_ranks_on_two_gpus_stay_on_the_cpus_and_the_cell_says_what_to_set(copied, tmp_path, monkeypatch):
    outcome, shown, _ = run_on(2, copied["00_start"], tmp_path / "run", monkeypatch)
    assert not outcome.error, f"{outcome.error}\n{outcome.error.detail[-3000:]}"
    assert (outcome.metrics["world_size"], outcome.metrics["device"]) == (4, "cpu")
    assert "WARNING: GPUs are available but unused: on cpu because 4 ranks on" in " ".join(shown.split())
    assert "set n_ranks, or MANYHANDS_RANKS, to the number of GPUs" in " ".join(shown.split())
