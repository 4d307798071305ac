"""A learner's own files beside the lessons: no command takes a copy for the lesson, and what is lost comes back."""

import importlib.util
import os
import shutil
import subprocess
import sys
import time

import fake_course
import pytest
from manyhands.course import handouts, lessons, pairs, update
from manyhands.course.folders import ROOT, version
from manyhands.course.lessons import Lesson, find_lessons
from manyhands.launch.allocation import RanksError
from manyhands.notebook.start import start_ranks
from manyhands.tools import preflight

SCRIPT = """
# %% tags=["active-ipynb"]
# hands = start_ranks("{}", globals())

# %%
answer = 42
"""


def write(root, name):
    """Write the pair of a lesson."""
    lesson = Lesson(name, root)
    lesson.script.parent.mkdir(parents=True, exist_ok=True)
    lesson.script.write_text(fake_course.HEADER + SCRIPT.format(name))
    pairs.sync(lesson)
    return lesson


def git(root, *words):
    who = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    subprocess.run(["git", *who, *words], cwd=root, check=True, capture_output=True)


def of(root):
    """{name: bytes} of notebooks and scripts."""
    return {path.name: path.read_bytes() for form in ("notebooks", "scripts") for path in (root / form).iterdir()}


def copied(root, old, new, how=shutil.copy2):
    """As JupyterLab does it: both forms; how=shutil.move renames."""
    for mine, theirs in zip((Lesson(old, root).notebook, Lesson(old, root).script),
                            (Lesson(new, root).notebook, Lesson(new, root).script), strict=True):  # fmt: skip
        how(mine, theirs)


@pytest.fixture(params=["a clone", "an attendee's copy", "an attendee's copy in git", "a zip"])
def course(request, tmp_path, monkeypatch):
    """A course of lessons 02 and 05, in which we are."""
    root = tmp_path / "course"
    for name in ("02_collectives", "05_same_science"):
        write(root, name)
    if "copy" in request.param:
        root = handouts.copy(tmp_path / "copy", root)
    if "clone" in request.param or "git" in request.param:
        git(root, "init", "-q")
        git(root, "add", ".")
        git(root, "commit", "-q", "-m", "the course")
    monkeypatch.chdir(root)
    return root


def has_originals(root):
    return (root / ".git").exists() or (root / lessons.ORIGINALS).exists()


def test_a_number_means_the_lesson_and_its_duplicate_is_left_alone_and_named(course, capsys):
    copied(course, "02_collectives", "02_collectives-Copy1")
    if (course / ".git").exists():
        git(course, "add", ".")
        git(course, "commit", "-q", "-m", "with a copy")
    lesson, before = Lesson("02_collectives", course), of(course)
    lesson.notebook.write_text(lesson.notebook.read_text().replace("answer = 42", "answer = 43"))
    os.utime(lesson.notebook, (time.time() + 5,) * 2)
    pairs.main(["sync", "2"])
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("02_collectives: wrote 02_collectives.ipynb into the script")
    assert said[1:] == ["left alone: 02_collectives-Copy1, since 02 is 02_collectives"]
    assert "answer = 43" in lesson.script.read_text()
    assert pairs.main(["sync", "02_collectives-Copy1"]) == 2
    assert "no lesson '02_collectives-Copy1' (left alone: 02_collectives-Copy1, since 02 is" in capsys.readouterr().err
    if has_originals(course):
        assert handouts.main(["reset", "02"]) == 0
        assert of(course) == before


@pytest.mark.parametrize("name", ["05", "05_same_science"])
@pytest.mark.parametrize("lost", ["renamed", "deleted"])
def test_a_lesson_that_was_renamed_or_deleted_is_brought_back_and_the_renamed_one_stays(course, capsys, lost, name):
    before = of(course)
    if (course / ".git").exists() and lost == "renamed":
        copied(course, "05_same_science", "05_mine", lambda old, new: git(course, "mv", str(old), str(new)))
    else:
        copied(course, "05_same_science", "05_mine", shutil.move)
    if lost == "deleted":
        for path in (Lesson("05_mine", course).notebook, Lesson("05_mine", course).script):
            path.unlink()
    mine = {name: content for name, content in of(course).items() if "mine" in name}
    assert [lesson.name for lesson in find_lessons(course)] == ["02_collectives"]
    if not has_originals(course):
        assert handouts.main(["reset", name]) == 2
        return
    assert pairs.main(["sync"]) == 0
    assert "05_same_science is not here; `make reset LESSON=05` brings it back" in capsys.readouterr().out
    assert pairs.main(["sync", "05"]) == 2
    assert "05_same_science is not here; `make reset LESSON=05` brings it back" in capsys.readouterr().err
    assert handouts.main(["reset", name]) == 0
    said = capsys.readouterr().out
    assert said.startswith("05_same_science is as it was\n") and ("left alone: 05_mine" in said) == (lost == "renamed")
    assert of(course) == before | mine


def test_own_notebooks_are_named_once_and_no_command_takes_them(course, capsys):
    for name in ("notes", "20_notes"):
        (course / "notebooks" / f"{name}.ipynb").write_text("{}")
    copied(course, "05_same_science", "16_mine")  # its header is the lesson's, and it starts the lesson's ranks
    before = of(course)
    assert pairs.main(["sync"]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "left alone: 16_mine, since its header declares no lesson and git does not track the pair",
        "left alone: 20_notes, since its header declares no lesson and git does not track the pair",
        "left alone, since they are no lessons: notes",
    ]
    assert of(course) == before


def test_a_pair_of_the_centres_own_is_a_lesson_if_its_header_says_so_or_git_tracks_it(course):
    write(course, "16_ours")
    assert [lesson.name for lesson in find_lessons(course, ["16"])] == ["16_ours"]
    if (course / ".git").exists():
        for path in (course / "notebooks" / "17_ours.ipynb", course / "scripts" / "17_ours.py"):
            path.write_text("")
        assert [lesson.number for lesson in find_lessons(course)] == ["02", "05", "16"]
        git(course, "add", ".")
        assert [lesson.number for lesson in find_lessons(course)] == ["02", "05", "16", "17"]


def test_two_claims_on_a_number_are_named_and_none_is_taken(course, capsys):
    for name in ("16_ours", "16_theirs"):
        write(course, name)
    before = of(course)
    for name in ("16", "16_ours"):
        assert pairs.main(["sync", name]) == 2
        said = "16_ours and 16_theirs, since both claim 16; give one of them a free number"
        assert said in capsys.readouterr().err
    assert [lesson.number for lesson in find_lessons(course)] == ["02", "05"] and of(course) == before


def test_copies_are_not_handed_out(course, tmp_path, capsys):
    copied(course, "05_same_science", "05_mine")
    copied(course, "05_same_science", "16_mine")
    assert handouts.main(["copy", str(tmp_path / "class")]) == 0
    assert "left alone: 05_mine, since 05 is 05_same_science" in capsys.readouterr().out
    assert {name[:-3].removesuffix(".ip") for name in of(tmp_path / "class")} == {"02_collectives", "05_same_science"}


@pytest.fixture
def two_copies(tmp_path):
    """(an attendee's copy, the newer one)."""
    root = tmp_path / "course"
    for name in ("02_collectives", "05_same_science"):
        write(root, name)
    mine = handouts.copy(tmp_path / "mine", root)
    for name in ("02_collectives", "05_same_science"):
        script = Lesson(name, root).script
        script.write_text(script.read_text().replace("42", "43"))
        Lesson(name, root).notebook.unlink()
        pairs.sync(Lesson(name, root))
    return mine, handouts.copy(tmp_path / "newer", root)


def test_an_update_fixes_the_others_and_says_how_a_renamed_lesson_gets_its_fix(two_copies, monkeypatch, capsys):
    mine, newer = two_copies
    copied(mine, "05_same_science", "05_mine", shutil.move)
    copied(mine, "02_collectives", "02_collectives-Copy1")
    monkeypatch.chdir(mine)
    before = of(mine)
    assert update.main([str(newer)]) == 0
    said = capsys.readouterr().out
    assert "`make reset LESSON=05`, then `make update` again, brings it back" in said
    assert "left alone: 02_collectives-Copy1" in said and "left alone: 05_mine" in said
    assert "answer = 43" in Lesson("02_collectives", mine).script.read_text()
    assert {name: old for name, old in of(mine).items() if not name.startswith("02_collectives.")} == {
        name: old for name, old in before.items() if not name.startswith("02_collectives.")
    }
    assert handouts.main(["reset", "05"]) == 0 and update.main([str(newer)]) == 0
    assert of(mine)["05_same_science.py"] == of(newer)["05_same_science.py"]


@pytest.mark.parametrize("how", ["0 bytes", "nbformat 3"])
def test_an_update_goes_on_where_a_notebook_is_broken(two_copies, how):
    mine, newer = two_copies
    fake_course.break_notebook(Lesson("02_collectives", mine), how)
    broken = Lesson("02_collectives", mine).notebook.read_bytes()
    said = update.update(newer, mine)
    (line,) = (line for line in said if line.startswith("did not arrive: lesson 02_collectives: "))
    assert "make reset LESSON=02" in line
    assert "answer = 43" in Lesson("05_same_science", mine).script.read_text()
    assert Lesson("02_collectives", mine).notebook.read_bytes() == broken


def test_a_preflight_flies_the_lesson_and_names_its_copy(tmp_path):
    write(tmp_path, "02_collectives")
    copied(tmp_path, "02_collectives", "02_collectives-Copy1")
    planned = preflight.plan(find_lessons(tmp_path, ["02"]), tmp_path / "runs")
    assert {run.source.stem for run in planned} == {"02_collectives"}
    assert preflight.gather_metadata(ROOT)["version"] == version(ROOT)
    assert preflight.gather_metadata(tmp_path)["other files"].startswith("left alone: 02_collectives-Copy1")


def test_the_site_is_built_without_copies_and_names_each_broken_notebook(tmp_path, root, monkeypatch):
    monkeypatch.syspath_prepend(root / "assets" / "site")
    spec = importlib.util.spec_from_file_location("build", root / "assets" / "site" / "build.py")
    build = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "build", build)
    spec.loader.exec_module(build)
    monkeypatch.setattr(build, "ROOT", tmp_path)
    rows = "| [{0}](notebooks/{0}_{1}.ipynb) | A title | 40 | core |\n"
    (tmp_path / "README.md").write_text(rows.format("02", "collectives") + rows.format("05", "same_science"))
    for name in ("02_collectives", "05_same_science"):
        write(tmp_path, name)
    copied(tmp_path, "02_collectives", "02_collectives-Copy1")
    assert list(build.stored(build.rows())) == ["02_collectives", "05_same_science"]
    for name in ("02_collectives", "05_same_science"):
        fake_course.break_notebook(Lesson(name, tmp_path), "half")
    with pytest.raises(SystemExit) as ended:
        build.stored(build.rows())
    assert [line.count("is neither a notebook") for line in str(ended.value).splitlines()] == [1, 1]
    Lesson("05_same_science", tmp_path).notebook.unlink()
    with pytest.raises(SystemExit, match="README.md's table of lessons differs from notebooks/: 05_same_science"):
        build.rows()


def test_a_renamed_notebook_says_how_the_lesson_comes_back(tmp_path, monkeypatch):
    write(tmp_path, "05_mine")
    monkeypatch.chdir(tmp_path / "notebooks")
    with pytest.raises(RanksError) as refused:
        start_ranks("05_made_up", {})
    assert str(refused.value) == (
        "there is no scripts/05_made_up.py; renamed? `make reset LESSON=05` brings 05_made_up back, yours stays"
    )
