"""`make lesson`: what it writes runs at once in every way, changes no file of the course, and few rules judge it."""

import subprocess
import sys

import nbformat
import pytest
from course_copy import copy_course
from manyhands.course import handouts, pairs
from manyhands.course.folders import ROOT
from manyhands.course.lessons import find_lessons
from manyhands.course.new_lesson import main, write_skeleton
from manyhands.course.update import update
from manyhands.tools import preflight
from test_slides import slides as slides  # noqa: PLC0414 - a fixture
from wants import complaints, report

RIGHT = "total / dist.get_world_size()"


@pytest.fixture(scope="module")
def centre(tmp_path_factory):
    """A clone of the course with lesson 03 alone, and a skeleton beside it."""
    course = copy_course(tmp_path_factory.mktemp("centre") / "course", only=["03"])
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], cwd=course, check=True)
    write_skeleton("17_mine", "Our network", course)
    return course


def test_a_skeleton_is_two_new_files_in_sync_with_all_that_an_own_lesson_has(centre):
    said = subprocess.run(["git", "status", "--porcelain"], cwd=centre, capture_output=True, text=True).stdout
    changed = [line for line in said.splitlines() if not line.startswith("A ")]
    assert changed == ["?? notebooks/17_mine.ipynb", "?? scripts/17_mine.py"]
    lesson = find_lessons(centre, ["17"])[0]
    assert lesson.own and pairs.identical(lesson)
    assert report(lesson) == "17_mine has all 7 things that a lesson of your own has"
    assert [one.name for one in find_lessons(centre, own=False)] == ["03_data_parallel"]
    lesson.script.write_text(lesson.script.read_text().replace("**you can**", "you may").replace("metrics.write()", ""))
    assert [line.split(":")[0] for line in complaints(lesson)][:3] == [
        "`notebooks/17_mine.ipynb`, `scripts/17_mine.py`", "first cell", "last cells",
    ]  # fmt: skip
    lesson.script.unlink()
    pairs.sync(lesson)


def test_a_skeleton_is_flown_handed_out_updated_and_shown_as_slides(centre, slides, tmp_path, monkeypatch):
    assert {run.lesson.name for run in preflight.plan(find_lessons(centre), tmp_path)} >= {"17_mine"}
    copied, newer = (handouts.copy(tmp_path / name, centre) for name in ("copy", "newer"))
    (theirs,) = find_lessons(newer, ["17"])
    assert "For the instructor" not in theirs.script.read_text()
    for path in (theirs.script, theirs.notebook):
        path.write_text(path.read_text().replace("After an all-reduce", "After one all-reduce"))
    assert "17_mine: cell 11: Recap" in update(newer, copied)
    for module in (slides, sys.modules["build"]):
        monkeypatch.setattr(module, "ROOT", centre)
    notebook = nbformat.read(centre / "notebooks/17_mine.ipynb", 4)
    row = sys.modules["build"].own_row(find_lessons(centre, ["17"])[0])
    assert (row.title, row.core) == ("Our network", 10)
    assert [slide.kind for slide in slides.deck(row, notebook)] == ["title", "section", "card"]


@pytest.mark.parametrize(
    "name, said",
    [
        ("mine", "NAME='mine' is no name of a lesson; as in make lesson NAME=17_mine"),
        ("", "NAME='' is no name of a lesson"),
        ("03_mine", "03 is taken by 03_data_parallel; a free number is 17"),
    ],
)
def test_a_name_that_is_none_and_a_number_that_is_taken_are_refused(name, said, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main([name]) == 2
    assert capsys.readouterr().err.startswith(said)
    assert not [*ROOT.glob("*/03_mine*")]


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize(
    "answer, said",
    [
        (RIGHT, "build A (the mean): correct"),
        ("total", "not yet. Rank 0: What you return should be the mean over the ranks"),
        ("____", "not attempted. The cells below use the lesson's own mean_over_ranks."),
    ],
)
def test_the_skeletons_check_judges_an_answer_on_ranks_and_names_the_mistake(centre, tmp_path, answer, said):
    (lesson,) = find_lessons(centre, ["17"])
    script = tmp_path / "scripts" / "17_mine.py"
    script.parent.mkdir()
    script.write_text(lesson.script.read_text().replace("return ____", f"return {answer}"))
    (script.parent / "manyhands").symlink_to(ROOT / "scripts" / "manyhands")
    command = [sys.executable, ROOT / "scripts/launch.py", "--nproc", "2", "--timeout", "120", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr
    assert ("that is the sum" in done.stdout) == (answer == "total")
    assert done.stdout.count("the first number of the mean is") == 2
