"""The progress board: a check of somebody who joined is on it, nobody else's is, and no file breaks it."""

import json
import os
import subprocess
import sys
import time

import pytest
from manyhands.checks import Wrong, exercise
from manyhands.course import board
from manyhands.course.lessons import ROOT


@exercise("B", "the mean")
def mean(answer, ranks=None):
    """answer() -> 2."""
    if answer() != 2:
        raise Wrong(f"the mean is 2, not {answer()}")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "board").mkdir()
    return tmp_path / "board"


@pytest.fixture
def attendee(tmp_path, folder, monkeypatch):
    """attendee(number, name): the following checks are theirs, in a notebook of their course."""

    def enter(number, name=None):
        notebooks = tmp_path / f"course{number}" / "notebooks"
        notebooks.mkdir(parents=True, exist_ok=True)
        if name is not None:
            board.join(folder, name, notebooks.parent)
        monkeypatch.chdir(notebooks)

    return enter


def test_the_board_shows_what_fails_most_and_where_each_attendee_is(attendee, folder):
    attendee(1, "Ana")
    mean(lambda: 3)
    attendee(2, "")
    mean(lambda: 3)
    attendee(3, "")
    mean(lambda: 3)
    mean(lambda: 2)
    entries, strange = board.read_folder(folder)
    (fails, where) = board.tables(entries, entries[-1].at + 120, {"test_board": "07"})
    assert fails[2] == [("07 B the mean", "2", "1", "The mean is 2, not 3.")] and strange == 0
    assert [row[1:4] for row in where[2]] == [("07 B the mean", "2", correct) for correct in "001"]
    assert where[2][0][0] == "Ana" and all(len(row[0]) == 8 for row in where[2][1:])


def test_a_build_that_run_all_passed_is_not_where_an_attendee_is(attendee, folder, capsys):
    attendee(1, "Ana")
    mean(lambda: 3)
    board.note("test_board", "4", "the last build", board.NOT_ATTEMPTED)
    entries, _ = board.read_folder(folder)
    assert [(row[1], row[4]) for row in board.tables(entries, time.time(), {})[1][2]] == [
        ("B the mean", "The mean is 2, not 3.")
    ]
    board.show(folder, 0, folder.parent / "board.html")
    assert "1 attendee, 2 checks, as of" in capsys.readouterr().out
    (folder / sorted(path.name for path in folder.iterdir())[0]).unlink()
    entries, _ = board.read_folder(folder)
    assert [row[4] for row in board.tables(entries, time.time(), {})[1][2]] == ["not attempted"]


def test_who_did_not_join_or_left_writes_nothing(attendee, folder, monkeypatch):
    attendee(1)
    mean(lambda: 3)
    attendee(2, "")
    monkeypatch.setattr(board, "course_here", lambda: board.Path.cwd().parent)
    assert board.main(["leave"]) == 0
    mean(lambda: 3)
    assert list(folder.iterdir()) == []


def test_a_board_that_is_gone_does_not_touch_the_check(attendee, folder, capsys):
    attendee(1, "")
    folder.rmdir()
    assert mean(lambda: 2) == "correct"
    (board.Path.cwd().parent / board.JOINED).write_text("half a {")
    assert mean(lambda: 3) == "The mean is 2, not 3."


def test_files_that_no_check_wrote_are_counted_and_markup_is_text(attendee, folder, capsys):
    attendee(1, "<script>alert(1)</script>")
    mean(lambda: 3)
    (folder / "a.json").write_text("{}")
    (folder / "b.json").write_text("x" * 10_000)
    (folder / "c.json").write_text(json.dumps({"who": "x", "at": "never"}))
    os.mkfifo(folder / "d.json")
    output = folder.parent / "board.html"
    board.show(folder, 0, output)
    page = output.read_text()
    assert "4 files are not a check" in page and "&lt;script&gt;" in page and "<script" not in page
    assert "http-equiv" not in page


@pytest.mark.ranks
def test_a_planted_fault_is_on_the_page_that_is_written_again_within_10_s(attendee, folder, tmp_path):
    attendee(1, "")
    output = tmp_path / "page.html"
    command = [sys.executable, "-m", "manyhands.course.board", "show", folder, "--every", "1", "--output", output]
    environ = os.environ | {"PYTHONPATH": str(ROOT / "scripts")}
    with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL) as program:
        try:
            deadline = time.monotonic() + 60
            while not output.exists() and time.monotonic() < deadline:
                time.sleep(0.1)
            mean(lambda: 41)
            deadline = time.monotonic() + 10
            while "not 41" not in output.read_text() and time.monotonic() < deadline:
                time.sleep(0.1)
            assert "The mean is 2, not 41." in output.read_text() and 'http-equiv="refresh"' in output.read_text()
        finally:
            program.terminate()
