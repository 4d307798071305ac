"""Notebook and script of a lesson stay one: which saved form wins, what is kept, and what attendees get."""

import os
import subprocess
import sys

import fake_course
import jupytext
import nbformat
import pytest
from manyhands.course import handouts, pairs
from manyhands.course.lessons import Lesson, find_lessons
from manyhands.course.pairs import stale_script

SCRIPT = """\
# ---
# jupyter:
#   jupytext:
#     formats: notebooks///ipynb,scripts///py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: {jupytext}
#   kernelspec:
#     display_name: Many Hands
#     language: python
#     name: manyhands
# ---

# %% [markdown]
# # Counting, with a wörd that is no ASCII

# %% [markdown] tags=["notes"]
# For the instructor only.

# %% tags=["parameters"]
n_ranks = 2  # processes

# %% tags=["active-ipynb"]
# hands = start_ranks("05_tiny", globals())

# %%
# %%ranks --timeout 5
print(1)

# %%
# %%ranks
print(2)

# %%
# %%ranks --timeout 5
print(1)

# %% jupyter={{"source_hidden": true}} tags=["solution"]
# %%ranks
answer = 42
"""


@pytest.fixture
def lesson(tmp_path):
    """A lesson whose notebook holds an output in each cell that prints; both were saved long ago, at the same time."""
    lesson = Lesson("05_tiny", tmp_path / "course")
    for path in (lesson.script, lesson.notebook):
        path.parent.mkdir(parents=True)
    lesson.script.write_text(SCRIPT.format(jupytext=jupytext.__version__), encoding="utf-8")
    notebook = pairs.read(lesson.script)
    for number, cell in enumerate(cell for cell in notebook.cells if "print" in cell.source):
        cell.outputs = [nbformat.v4.new_output("stream", text=f"output {number}\n")]
        cell.execution_count = number + 1
    lesson.notebook.write_text(pairs.as_notebook(notebook), encoding="utf-8")
    saved(lesson.script, 1_000_000)
    saved(lesson.notebook, 1_000_000)
    return lesson


def saved(path, seconds):
    os.utime(path, (seconds, seconds))


def edit(path, old, new, at=2_000_000):
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    saved(path, at)


def outputs(lesson):
    """The texts that the notebook stores, cell by cell."""
    cells = nbformat.read(lesson.notebook, 4).cells
    return [cell.outputs[0].text if cell.outputs else None for cell in cells if "print" in cell.source]


def files(folder):
    """{name: bytes} of all files below a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run(module, *arguments, cwd):
    command = [sys.executable, "-m", f"manyhands.course.{module}", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=150)


# ------------------------------------------------------------------ the same?


def test_a_pair_is_the_same_whatever_its_outputs_its_folding_and_the_times_of_its_files(lesson):
    for script_at, notebook_at in ((1, 9_000), (9_000, 1)):
        saved(lesson.script, script_at)
        saved(lesson.notebook, notebook_at)
        assert pairs.difference(lesson) is None
    edit(lesson.notebook, '"source_hidden": true', '"source_hidden": false')
    edit(lesson.notebook, "output 1", "another")
    assert pairs.difference(lesson) is None


@pytest.mark.parametrize("form", ["notebook", "script"])
def test_a_cell_for_some_ranks_only_is_refused_since_the_script_would_run_it_on_every_rank(lesson, form):
    line = "%%ranks --timeout 5 0-1"
    edit(getattr(lesson, form), *{
        "notebook": ('"%%ranks\\n",\n    "print(2)"', f'"{line}\\n",\n    "print(2)"'),
        "script": ("%%ranks\nprint(2)", f"{line}\nprint(2)"),
    }[form])  # fmt: skip
    before = lesson.script.read_text(), lesson.notebook.read_text()
    for do in (pairs.check, pairs.sync):
        with pytest.raises(pairs.PairError, match="in the script its lines would run on every rank") as refused:
            do(lesson)
        assert repr(line) in str(refused.value)
    assert (lesson.script.read_text(), lesson.notebook.read_text()) == before
    if form == "script":  # join says it on rank 0
        assert f"begins with {line!r}: in the script" in pairs.stale_script(lesson.script)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("answer = 42", "answer = 43",
         "cell 8 of 05_tiny differs: the notebook has 'answer = 42', the script 'answer = 43'"),
        ('tags=["notes"]', 'tags=["note"]', "cell 2 of 05_tiny differs: its kind or its tags"),
        ("answer = 42\n", "answer = 42\n\n# %%\n1 / 0\n", "05_tiny has 8 cells as a notebook and 9 as a script"),
    ],
)  # fmt: skip
def test_the_first_difference_is_named(lesson, old, new, sentence):
    edit(lesson.script, old, new)
    assert pairs.difference(lesson) == sentence


def test_a_script_older_than_another_notebook_says_which_cell_and_the_cure(lesson):
    assert stale_script(lesson.script) == ""
    edit(lesson.notebook, "answer = 42", "answer = 43", at=2_000_000)
    said = stale_script(lesson.script)
    assert "05_tiny.py runs as it was before 05_tiny.ipynb was saved" in said and "(cell 8 of 05_tiny differs: " in said
    assert "`make sync LESSON=05`" in said and "\n" not in said
    saved(lesson.script, 3_000_000)  # a script that was edited last runs as it was meant
    assert stale_script(lesson.script) == ""


def test_every_lesson_opens_in_a_browser_whichever_of_its_files_is_newer(root):
    """A clone scrambles the times, and a newer notebook must not differ from its script by a blank line."""
    lessons = find_lessons(root, own=False)
    assert [lesson.name for lesson in lessons if not pairs.identical(lesson)] == [], "run `make sync`"


# ------------------------------------------------------------------ sync


def test_the_script_saved_last_is_written_into_the_notebook_and_unchanged_cells_keep_their_outputs(lesson):
    edit(lesson.script, "print(2)", "print(2, 'changed')")
    assert pairs.sync(lesson).startswith("05_tiny: wrote 05_tiny.py into the notebook (cell 6 of 05_tiny differs")
    assert pairs.difference(lesson) is None
    assert outputs(lesson) == ["output 0\n", None, "output 2\n"]
    assert "source_hidden" in lesson.notebook.read_text()


def test_the_notebook_saved_last_is_written_into_the_script_and_no_other_line_changes(lesson):
    before = lesson.script.read_text("utf-8")
    edit(lesson.notebook, "answer = 42", "answer = 43")
    assert "wrote 05_tiny.ipynb into the script" in pairs.sync(lesson)
    assert lesson.script.read_text("utf-8") == before.replace("answer = 42", "answer = 43")
    assert pairs.sync(lesson) == "05_tiny: notebook and script are the same"


def test_what_a_browser_notes_in_a_notebook_stays_out_of_the_script(lesson):
    before = lesson.script.read_text("utf-8")
    notebook = nbformat.read(lesson.notebook, 4)
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata.papermill = {"duration": 3.0}
    notebook.cells[4].metadata.execution = {"iopub.status.busy": "2026-01-01"}
    notebook.cells[4].source += "\nprint(3)"
    nbformat.write(notebook, lesson.notebook)
    pairs.sync(lesson)
    assert lesson.script.read_text("utf-8") == before.replace("print(1)\n", "print(1)\nprint(3)\n", 1)


def test_a_form_that_is_missing_is_written_from_the_other(lesson):
    script = lesson.script.read_text("utf-8")
    lesson.script.unlink()
    pairs.sync(lesson)
    assert lesson.script.read_text("utf-8") == script
    lesson.notebook.unlink()
    pairs.sync(lesson)
    assert pairs.difference(lesson) is None


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(lesson, monkeypatch):
    edit(lesson.script, "answer = 42", "answer = 43")
    before = files(lesson.root)

    def full(*paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        pairs.sync(lesson)
    assert files(lesson.root) == before


def test_two_forms_that_differ_and_were_saved_in_the_same_second_are_refused(lesson):
    edit(lesson.script, "answer = 42", "answer = 43", at=3_000_000.2)
    edit(lesson.notebook, "answer = 42", "answer = 44", at=3_000_000.9)
    before = files(lesson.root)
    with pytest.raises(pairs.PairError, match="both were saved at the same time, so save the one that you want"):
        pairs.sync(lesson)
    assert files(lesson.root) == before


def test_stored_outputs_and_cell_names_repeat_exactly(lesson):
    text = lesson.notebook.read_text("utf-8")
    again = pairs.read(lesson.notebook)
    again.cells[3].metadata.papermill = {"duration": 1.0}
    again.cells[3]["id"] = "random"
    assert pairs.as_notebook(again) == text


@pytest.mark.parametrize("how", fake_course.BROKEN)
def test_a_broken_notebook_stops_the_sync_of_no_other_lesson_and_is_named_with_a_cure_that_works(
    lesson, monkeypatch, capsys, how
):
    name = "06_later"
    later = Lesson(name, lesson.root)
    for path in (lesson.script, lesson.notebook):
        (path.parent / f"{name}{path.suffix}").write_bytes(path.read_bytes().replace(b"05_tiny", b"06_later"))
    edit(later.script, "answer = 42", "answer = 43")
    saved(later.notebook, 1_000_000)
    whole = files(lesson.root)
    fake_course.break_notebook(lesson, how)
    broken = lesson.notebook.read_bytes()
    monkeypatch.chdir(lesson.root)
    assert pairs.main(["sync"]) == 2
    said = capsys.readouterr()
    assert said.out.startswith("06_later: wrote 06_later.py into the notebook")
    assert said.err.count("05_tiny.ipynb is neither a notebook nor a script of cells: ") == 1
    assert "delete it, and `make sync LESSON=05` writes it; or `make reset LESSON=05` brings both forms" in said.err
    assert lesson.notebook.read_bytes() == broken and stale_script(lesson.script) == ""
    lesson.notebook.unlink()
    assert pairs.main(["sync", "05"]) == 0 and pairs.difference(lesson) is None
    assert files(lesson.root)["scripts/05_tiny.py"] == whole["scripts/05_tiny.py"]


# ------------------------------------------------------------------ reset


def git(folder, *arguments):
    who = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


def test_reset_writes_the_committed_lesson_and_keeps_ones_work(lesson):
    original = files(lesson.root)
    for arguments in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "the course")):
        git(lesson.root, *arguments)
    edit(lesson.script, "answer = 42", "answer = 'mine'")
    edit(lesson.notebook, "answer = 42", "answer = 'also mine'")
    edited = files(lesson.root / "scripts") | files(lesson.root / "notebooks")
    kept = handouts.reset(lesson)
    assert {name: files(lesson.root)[name] for name in original} == original
    assert files(kept) == edited
    assert kept.parent == lesson.root / "outputs" / "kept"
    assert handouts.reset(lesson) != kept, "a second reset within the second has a folder of its own"


def test_reset_touches_nothing_where_there_is_no_original(lesson):
    before = files(lesson.root)
    with pytest.raises(pairs.PairError, match="no original of notebooks/05_tiny.ipynb"):
        handouts.reset(lesson)
    assert files(lesson.root) == before


# ------------------------------------------------------------------ the attendees' copy


def test_a_lesson_of_the_copy_can_be_reset_without_git(lesson, tmp_path):
    (copied,) = find_lessons(handouts.copy(tmp_path / "copy", lesson.root))
    handed_out = copied.script.read_bytes()
    edit(copied.script, "print(2)", "print('mine')")
    kept = handouts.reset(copied)
    assert copied.script.read_bytes() == handed_out
    assert "'mine'" in (kept / "05_tiny.py").read_text("utf-8")


def test_a_copy_is_refused_where_it_would_overwrite_or_contain_itself_or_a_pair_differs(lesson, tmp_path):
    with pytest.raises(pairs.PairError, match="exists already"):
        handouts.copy(tmp_path, lesson.root)
    with pytest.raises(pairs.PairError, match="x.tar.gz is no .zip, and nothing else is packed"):
        handouts.copy(tmp_path / "x.tar.gz", lesson.root)
    with pytest.raises(pairs.PairError, match="lies inside the course"):
        handouts.copy(lesson.root / "deep" / "copy", lesson.root)
    edit(lesson.script, "answer = 42", "answer = 43")
    with pytest.raises(pairs.PairError, match="cell 8 of 05_tiny differs"):
        handouts.copy(tmp_path / "copy", lesson.root)
    assert not (tmp_path / "copy").exists()


# ------------------------------------------------------------------ the commands


def test_check_ends_with_status_2_and_a_sentence_with_the_cure(lesson):
    done = run("pairs", "check", cwd=lesson.root)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    edit(lesson.notebook, "answer = 42", "answer = 43")
    done = run("pairs", "check", "5", cwd=lesson.root)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "cell 8 of 05_tiny differs: the notebook has 'answer = 43', the script 'answer = 42'; save the notebook, then "
        "`make sync LESSON=05` writes what was saved last into the other"
    ]


def test_what_is_left_out_of_an_import_is_left_out_for_this_thread_alone():
    import importlib
    import threading

    sys.modules.pop("wave", None)  # of the standard library, and imported by nobody here
    others = []

    def import_it():
        others.append(importlib.import_module("wave").__name__)

    with pairs.without("wave"):
        with pytest.raises(ModuleNotFoundError, match="wave is left out"):
            importlib.import_module("wave")
        assert "wave" not in sys.modules, "no hole that others would see"
        thread = threading.Thread(target=import_it)
        thread.start()
        thread.join()
    assert others == ["wave"] and importlib.import_module("wave").__name__ == "wave"
