"""Each lesson has what the table wants, the page for authors shows it, and a lesson is told all it lacks at once."""

import json
import os
import shutil

import pytest
from manyhands.course import pairs
from manyhands.course.folders import ROOT
from manyhands.course.lessons import Lesson, find_lessons
from wants import complaints, page, report


@pytest.mark.parametrize("lesson", find_lessons(ROOT, own=False), ids=lambda lesson: lesson.name)
def test_a_lesson_has_all_that_is_wanted(lesson):
    assert complaints(lesson) == []


def test_the_page_on_how_to_write_a_lesson_shows_the_table():
    """`PYTHONPATH=scripts python tests/wants.py --page` prints it."""
    assert page() in (ROOT / "assets" / "site" / "new_lesson.md").read_text("utf-8")


# what a pair alone lacks
BARE = [
    "README.md's table of lessons: no row `| [16](notebooks/16_mine.ipynb) | title | minutes | track |`",
    '`SHORT` in `scripts/manyhands/course/lessons.py`: no row "16_mine": {...}',
    "`scripts/manyhands/checks/mine.py`: it is missing",
    "`scripts/manyhands/checks/mine.py`: the lesson has no `from manyhands.checks import mine as checks`",
    "`tests/test_checks_mine.py`: the tests of the checks are missing",
    "`assets/src/16_mine.py`: the drawings are missing",
    "bug from the zoo: ZOO has no row of lesson 16",
    "`scripts/manyhands/lessons/mine.py`: it uses the module of collectives",
]
# a fault of the script, in words old and new, and what is said of it
FAULTS = [
    ("**you can**", "you may", "first cell: its first cell lacks `**you can**`, with a list below"),
    ("(CORE, 1 min)", "(CORE, 40 min)", "headings `## Title (CORE, 5 min)`: the headings of CORE say "),
    ("  # largest message of the experiment in MiB, > 0", "", "cell tagged `parameters`: largest_mib has no comment"),
    ("samples of each timing, at least 1", "samples",
     "cell tagged `parameters`: the comment of repeats states no range"),
    ("<summary>Solution 1<", "<summary>Solution 9<",
     "each `### Build A: ...` and `### Exercise 1: ...`: no folded solution 1"),
    ("![Four ranks on", "![x](../assets/gone.svg) ![Four ranks on", "pictures: ../assets/gone.svg is missing"),
    ("", "", "pictures: ../assets/gone.svg needs a sentence"),
    ("\nguess = ____", "\nimport colorsys; typed = ____", "predictions: no cell has `guess = ____`"),
    ("", "", "ruff: "),
    ("## A bug from the zoo", "## A bug", "bug from the zoo: no section is named `## A bug from the zoo`"),
    ("\ncard(", "\nprint(", "last cell of CORE: notebooks/16_mine.ipynb: no cell calls `card(...)`"),
    ("", "", "stored outputs: 1 cells that say something have no output"),
    ("For the instructor", "For all", "instructor's notes: no cell tagged notes begins"),
]  # fmt: skip


def mine(folder, change=lambda text: text):
    """A course in `folder` with lesson 02 alone, which is now lesson 16, after `change`."""
    (origin,) = find_lessons(ROOT, only=["02"])
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    for name in ("scripts", "notebooks", "assets"):
        (folder / name).mkdir()
    for figure in (ROOT / "assets").glob("*.*"):
        shutil.copy(figure, folder / "assets")
    lesson = Lesson("16_mine", folder)
    shutil.copy(origin.notebook, lesson.notebook)
    os.utime(lesson.notebook, (1_000_000, 1_000_000))
    lesson.script.write_text(change(origin.script.read_text("utf-8")))
    pairs.sync(lesson)
    return lesson


def with_all_faults(text):
    for old, new, _ in FAULTS:
        assert old in text
        text = text.replace(old, new) if old else text
    return text


def test_a_pair_alone_is_told_which_files_and_rows_are_missing(tmp_path):
    assert complaints(mine(tmp_path)) == BARE


def test_a_lesson_with_many_faults_is_told_all_of_them_in_one_run(tmp_path):
    lesson = mine(tmp_path, with_all_faults)
    notebook = json.loads(lesson.notebook.read_text("utf-8"))
    first = next(cell for cell in notebook["cells"] if cell.get("outputs"))
    first["outputs"].append({"output_type": "stream", "name": "stderr", "text": "UserWarning: slow\n"})
    lesson.notebook.write_text(json.dumps(notebook))
    with pytest.raises(pairs.PairError, match="16_mine lacks ") as told:
        report(lesson)
    said = [line.strip() for line in str(told.value).splitlines()[1:]]
    missing = {*BARE, *(fault for *_, fault in FAULTS), "stored outputs: an error or a warning is stored"}
    assert [fault for fault in missing if not any(line.startswith(fault) for line in said)] == []


def test_what_cannot_be_read_is_said_once(tmp_path):
    lesson = mine(tmp_path)
    lesson.script.write_text("# %% [markdown\n")
    lesson.notebook.write_text("{}")
    said = complaints(lesson)
    assert len([line for line in said if "is neither a notebook nor a script of cells" in line]) == 1
