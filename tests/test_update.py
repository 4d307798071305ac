"""`make update`: a fix of the course comes into an attendee's copy, and what the attendee wrote stays."""

import os
import shutil
import time
import zipfile

import nbformat
import pytest
from course_copy import copy_course
from manyhands.course import handouts, pairs
from manyhands.course.lessons import find_lessons
from manyhands.course.update import update

BUILD, CHECK = "def average_gradients", "checks.average_gradients"


def lesson_of(course):
    (lesson,) = find_lessons(course, only=["03"])
    return lesson


def write_script(course, *changes):
    """Replace each (old, new) in lesson 03's script of the instructor's course, and write its notebook."""
    lesson = lesson_of(course)
    text = lesson.script.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    lesson.script.write_text(text)
    lesson.notebook.unlink()
    pairs.sync(lesson)


def edit_notebook(course, change):
    """Save lesson 03's notebook as JupyterLab does, two seconds later, after `change(cells)`."""
    lesson = lesson_of(course)
    notebook = nbformat.read(lesson.notebook, 4)
    change(notebook.cells)
    nbformat.write(notebook, lesson.notebook)
    os.utime(lesson.notebook, (time.time() + 2,) * 2)


def texts(course):
    return [cell.source for cell in pairs.read(lesson_of(course).notebook).cells]


def code_cells(course):
    return [cell.source for cell in pairs.read(lesson_of(course).script).cells if cell.cell_type == "code"]


@pytest.fixture(scope="module")
def handed_out(tmp_path_factory):
    """(the instructor's course with lesson 03 alone, its copy), neither of which a test changes."""
    folder = tmp_path_factory.mktemp("update")
    course = copy_course(folder / "course", only=["03"])
    shutil.rmtree(course / "assets")  # each test copies the course
    return course, handouts.copy(folder / "copy", course)


@pytest.fixture
def course(handed_out, tmp_path):
    return shutil.copytree(handed_out[0], tmp_path / "course")


@pytest.fixture
def mine(handed_out, tmp_path):
    return shutil.copytree(handed_out[1], tmp_path / "mine")


def in_turn(course, n):
    """The sources of n code cells of lesson 03 that are there once, far from each other and of some length."""
    long = [source for source in code_cells(course) if len(source) > 120 and code_cells(course).count(source) == 1]
    return long[:: len(long) // n][:n]


def test_a_fix_arrives_and_an_edit_and_a_new_cell_and_an_output_stay(course, mine, tmp_path):
    edited, fixed, both = in_turn(course, 3)

    def as_the_learner_does(cells):
        at = {cell.source: i for i, cell in enumerate(cells)}
        cells[at[edited]].source += "\nprint('my own line')"
        cells[at[edited]].outputs = [nbformat.v4.new_output("stream", text="my output\n")]
        cells[at[both]].source += "\nprint('mine as well')"
        cells.insert(at[fixed], nbformat.v4.new_code_cell("my_scratch = 1"))

    edit_notebook(mine, as_the_learner_does)
    write_script(course, (fixed, f"{fixed}\nprint('the fix')"), (both, f"{both}\nprint('lost')"))
    said = update(handouts.copy(tmp_path / "new", course), mine)
    after = texts(mine)
    wanted = [f"{edited}\nprint('my own line')", f"{fixed}\nprint('the fix')", f"{both}\nprint('mine as well')"]
    _, of_fixed, of_both = map(after.index, wanted)
    assert after[of_fixed - 1] == "my_scratch = 1"
    assert not any("lost" in text for text in after)
    outputs = [cell.outputs for cell in pairs.read(lesson_of(mine).notebook).cells if cell.get("outputs")]
    assert [output.text for (output,) in outputs] == ["my output\n"]
    assert pairs.difference(lesson_of(mine)) is None
    (missed,) = [line for line in said if line.startswith("did not arrive")]
    assert f"03_data_parallel: cell {of_both + 1}, which you changed" in missed
    assert any(line.startswith(f"03_data_parallel: cell {of_fixed + 1}: ") for line in said)
    assert update(tmp_path / "new", mine) == [missed], "it is said again"
    kept = next((mine / "outputs" / "kept").iterdir())
    assert "my own line" in (kept / "03_data_parallel.ipynb").read_text()
    handouts.reset(lesson_of(mine))
    assert update(tmp_path / "new", mine) == []


def test_a_fix_arrives_beside_a_cell_for_some_ranks(course, mine, tmp_path):
    (fixed,) = in_turn(course, 1)
    edit_notebook(mine, lambda cells: cells.append(nbformat.v4.new_code_cell("%%ranks 1\nprint('one of us')")))
    write_script(course, (fixed, f"{fixed}\nprint('the fix')"))
    update(handouts.copy(tmp_path / "new", course), mine)
    assert f"{fixed}\nprint('the fix')" in texts(mine) and texts(mine)[-1] == "%%ranks 1\nprint('one of us')"
    assert "begins with '%%ranks 1'" in pairs.stale_script(lesson_of(mine).script), "as a script it is still told"


def test_a_filled_build_stays_though_the_cell_below_it_is_fixed_and_a_scratch_cell_lies_between(course, mine, tmp_path):
    cells = code_cells(course)
    at = next(i for i, source in enumerate(cells) if "____" in source and len(cells[i + 1]) > 40)
    build, check = cells[at], cells[at + 1]

    def fill(learner):
        (i,) = [i for i, cell in enumerate(learner) if cell.source == build]
        learner[i].source = build.replace("____", "dist.all_reduce")
        learner.insert(i + 1, nbformat.v4.new_code_cell("x = 1"))

    edit_notebook(mine, fill)
    write_script(course, (check, f"{check}  # fixed"))
    said = update(handouts.copy(tmp_path / "new", course), mine)
    after = texts(mine)
    i = after.index(build.replace("____", "dist.all_reduce"))
    assert "x = 1" in after[i : i + 4] and f"{check}  # fixed" in after[i : i + 5] and check not in after
    assert not any(line.startswith("did not arrive") for line in said)


def test_a_changed_check_arrives_and_a_changed_file_of_the_learner_stays_and_is_named(course, mine, tmp_path):
    check, job = "scripts/manyhands/checks/data_parallel.py", "jobs/train.slurm"
    for name in (check, job, "README.md"):
        (course / name).write_text((course / name).read_text() + "# fixed\n")
    (mine / job).write_text("mine\n")
    (mine / "notes.txt").write_text("mine\n")
    (mine / ".manyhands-env").write_text("/sw/manyhands\n")
    packed = handouts.copy(tmp_path / "new.zip", course)
    said = update(packed, mine)
    assert (mine / check).read_text().endswith("# fixed\n") and (mine / job).read_text() == "mine\n"
    assert (mine / "notes.txt").exists() and os.access(mine / "scripts" / "doctor.py", os.X_OK)
    assert f"replaced: README.md, {check}" in said
    missed = [line for line in said if line.startswith("did not arrive")]
    assert missed == [f"did not arrive: {job}, which you changed; yours stays"]
    assert any("make shared" in line for line in said)
    assert update(packed, mine) == missed, "it is said again"
    (mine / job).write_text((handouts.copy(tmp_path / "folder", course) / job).read_text())
    assert update(packed, mine) == []


@pytest.mark.parametrize(("before", "name", "modes"), [("", "zz", True), ("", "AA", False), ("a/b/", "zz", False)])
def test_a_zip_that_was_packed_again_on_another_system_is_taken(course, mine, tmp_path, before, name, modes):
    (course / "README.md").write_text("fixed\n")
    (course / "scripts" / "doctor.py").write_text("#!/usr/bin/env python3\n")
    new, packed = handouts.copy(tmp_path / "new", course), tmp_path / "again.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(f"{before}__MACOSX/{name}/.originals/._files.json", "a resource fork")
        archive.writestr(".DS_Store", "x")
        for path in sorted(path for path in new.rglob("*") if path.is_file()):
            info = zipfile.ZipInfo(f"{before}{name}/{path.relative_to(new).as_posix()}")
            info.external_attr = path.stat().st_mode << 16 if modes else 0x20  # as DOS has it
            archive.writestr(info, path.read_bytes())
    assert "replaced: README.md, scripts/doctor.py" in update(packed, mine)
    assert (mine / "README.md").read_text() == "fixed\n"
    modes = [(mine / file).stat().st_mode & 0o777 for file in ("README.md", "scripts/doctor.py")]
    assert modes == [0o644, 0o755]


@pytest.mark.parametrize("content", [b"no zip", None])
def test_a_zip_without_a_copy_is_refused_by_its_name(mine, tmp_path, content):
    packed = tmp_path / "x.zip"
    if content is None:
        with zipfile.ZipFile(packed, "w") as archive:
            archive.writestr("course/README.md", "from somewhere else")
    else:
        packed.write_bytes(content)
    with pytest.raises(pairs.PairError, match="x.zip (is no zip that can be read|holds no .originals/files.json, so)"):
        update(packed, mine)


def test_a_file_that_the_course_dropped_goes_unless_the_learner_changed_it(course, mine, tmp_path):
    for name in ("jobs/sweep.tsv", "jobs/sweep.pbs"):
        (course / name).unlink()
    (mine / "jobs/sweep.pbs").write_text("mine\n")
    assert "removed: jobs/sweep.tsv" in update(handouts.copy(tmp_path / "new", course), mine)
    assert not (mine / "jobs/sweep.tsv").exists() and (mine / "jobs/sweep.pbs").exists()
