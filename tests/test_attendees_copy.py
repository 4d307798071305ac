"""What attendees get: no output and no note, links that lead somewhere, and nothing of somebody else's."""

import os
import re
import subprocess
import zipfile
from types import SimpleNamespace

import pytest
from course_copy import copy_course
from manyhands.course import handouts, pairs
from manyhands.course.folders import ROOT
from manyhands.course.lessons import find_lessons

TEXT = {".py", ".md", ".ipynb", ".txt", ".yml", ".toml", ".pbs", ".slurm", ".svg", ".json"}
LESSONS = find_lessons(ROOT)


@pytest.fixture(scope="module")
def course(attendees):
    return attendees["00_start"].root


@pytest.fixture(scope="module")
def texts(course):
    return {
        path.relative_to(course): path.read_text("utf-8", errors="replace")
        for path in course.rglob("*") if path.is_file() and path.suffix in TEXT
    }  # fmt: skip


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_a_lesson_of_the_copy_has_no_output_and_no_note_and_its_pair_is_the_same(lesson, course):
    (copied,) = find_lessons(course, [lesson.number])
    cells = pairs.read(copied.notebook).cells
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []
    assert [cell for cell in cells if "notes" in cell.metadata.get("tags", [])] == []
    assert pairs.difference(copied) is None and pairs.identical(copied)


def test_every_link_of_a_lesson_and_of_the_readme_leads_to_a_file_of_the_copy(course, texts):
    dead = []
    for path, text in texts.items():
        if path.suffix == ".md" or (path.suffix == ".py" and re.match(r"[01]\d_", path.name)):
            here = (course / path).parent if path.suffix == ".md" else course / "notebooks"
            for target in re.findall(r"\]\(([\w./-]+)(?:#[^)]*)?\)", text):
                if not re.match(r"[a-z]+:", target) and not (here / target).exists():
                    dead.append(f"{path}: {target}")
    assert dead == []


PRIVATE = (
    "data/thesis.txt", "data/prepared/tokens.bin", "jobs/mine.pbs", "jobs/train.pbs.orig", "notes.md",
    "outputs/run/x.txt", "notebooks/notes.ipynb", "scripts/manyhands/__pycache__/x.pyc", "scripts/grades.csv",
)  # fmt: skip


@pytest.mark.parametrize("git", [True, False])
def test_what_somebody_laid_beside_the_course_is_not_handed_out_and_the_corpus_is(tmp_path, git):
    theirs = copy_course(tmp_path / "theirs", only=["03"])
    if git:
        for words in (["init", "-q"], ["add", "."]):
            subprocess.run(["git", *words], cwd=theirs, check=True)
        (theirs / "CITATION.cff").unlink()
    for name in (*PRIVATE, handouts.CORPUS):
        (theirs / name).parent.mkdir(parents=True, exist_ok=True)
        (theirs / name).touch()
    copied = handouts.copy(tmp_path / "copy", theirs)
    assert [name for name in PRIVATE if (copied / name).exists()] == []
    assert (copied / handouts.CORPUS).exists() and (copied / "CITATION.cff").exists() == (not git)


def test_with_and_without_git_the_same_files_are_the_courses(monkeypatch):
    by_git = handouts.files_of_the_course(ROOT)
    monkeypatch.setattr(handouts.subprocess, "run", lambda *words, **how: SimpleNamespace(stdout=b""))
    assert handouts.files_of_the_course(ROOT) == by_git


def test_folder_and_zip_hold_the_same_files_and_everybody_may_read_them_whatever_the_umask_and_the_modes(tmp_path):
    theirs, packed = copy_course(tmp_path / "theirs", only=["03"]), tmp_path / "zips" / "many-hands.zip"
    packed.parent.mkdir()
    (theirs / "README.md").chmod(0o600)
    before = os.umask(0o077)
    try:
        copied = handouts.copy(tmp_path / "copy", theirs)
        handouts.copy(packed, theirs)
    finally:
        os.umask(before)
    found = [copied, *copied.rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in found if path.is_dir()} == {0o755}
    assert {path.stat().st_mode & 0o777 for path in found if path.is_file()} <= {0o644, 0o755}
    assert packed.stat().st_mode & 0o777 == 0o644
    infos = zipfile.ZipFile(packed).infolist()
    assert all(info.external_attr >> 16 & 0o044 == 0o044 for info in infos)
    files = {f"many-hands/{path.relative_to(copied).as_posix()}" for path in found if path.is_file()}
    assert {info.filename for info in infos if not info.is_dir()} == files, "in one folder"
    assert [path.name for path in packed.parent.iterdir()] == ["many-hands.zip"]
