"""What attendees get: no output and no note, links that lead somewhere, and nothing of somebody else's."""

import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from course_copy import copy_course
from manyhands.course import handouts, pairs
from manyhands.course.folders import ROOT, version
from manyhands.course.lessons import ORIGINALS, Lesson, find_lessons
from manyhands.course.update import update
from manyhands.tools import doctor

TEXT = {".py", ".md", ".ipynb", ".txt", ".yml", ".toml", ".pbs", ".slurm", ".svg", ".json"}
LESSONS = find_lessons(ROOT, own=False)


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
        commit_all(theirs)
        (theirs / "CITATION.cff").unlink()
    for name in (*PRIVATE, handouts.CORPUS):
        (theirs / name).parent.mkdir(parents=True, exist_ok=True)
        (theirs / name).touch()
    copied = handouts.copy(tmp_path / "copy", theirs)
    assert [name for name in PRIVATE if (copied / name).exists()] == []
    assert (copied / handouts.CORPUS).exists() and (copied / "CITATION.cff").exists() == (not git)


def commit_all(course):
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], cwd=course, check=True)


OWN = "jobs/sites/ours.toml", "assets/site/logo.svg", "notebooks/17_mine.ipynb", "scripts/17_mine.py"


@pytest.fixture
def centre(tmp_path):
    """A checkout of the course with a centre's own site, logo and lesson, none of which is committed."""
    theirs = copy_course(tmp_path / "theirs", only=["03"])
    commit_all(theirs)
    shutil.copy(theirs / "jobs/sites/generic.toml", theirs / OWN[0])
    (theirs / OWN[1]).write_text("<svg/>")
    (lesson,) = find_lessons(theirs)
    (theirs / OWN[3]).write_text(lesson.script.read_text().replace("03_data_parallel", "17_mine"))
    pairs.sync(Lesson("17_mine", theirs))
    job = theirs / "jobs/train.pbs"
    job.write_text(job.read_text().replace("# site: generic", "# site: ours"))
    return theirs


def test_a_centres_own_site_logo_and_lesson_are_handed_out_before_they_are_committed(centre, tmp_path):
    copied = handouts.copy(tmp_path / "copy", centre)
    assert [name for name in OWN if not (copied / name).is_file()] == []
    assert (copied / ORIGINALS / OWN[2]).is_file()
    (centre / ".git/info/exclude").write_text("17_mine*\n")
    assert [name for name in OWN if not (handouts.copy(tmp_path / "ignored", centre) / name).exists()] == [*OWN[2:]]


@pytest.mark.parametrize("why", ["git ignores it", "it does not exist"])
def test_a_job_file_whose_site_would_be_missing_in_the_copy_is_refused_by_name(centre, tmp_path, why):
    if "ignores" in why:
        (centre / ".git/info/exclude").write_text("ours.toml\n")
    else:
        (centre / OWN[0]).unlink()
    said = f"jobs/train.pbs is for site ours, and the copy would not have jobs/sites/ours.toml: {why}"
    with pytest.raises(pairs.PairError, match=said):
        handouts.copy(tmp_path / "copy", centre)
    assert not (tmp_path / "copy").exists()


def test_a_copy_is_updated_where_it_lies_unless_somebody_has_edited_it(centre, tmp_path):
    copied, packed = (handouts.copy(tmp_path / name, centre) for name in ("copy", "copy.zip"))
    (copied / "notes.txt").write_text("the centre's")
    (centre / "README.md").write_text("new")
    (centre / OWN[1]).unlink()
    for suffix in (".py", ".ipynb"):
        (lesson,) = centre.rglob(f"17_mine{suffix}")
        lesson.unlink()
    assert handouts.copy(copied, centre) == copied
    assert (copied / "README.md").read_text() == "new" and (copied / "notes.txt").exists()
    assert [name for name in OWN if (copied / name).exists()] == [OWN[0]]
    fresh = handouts.copy(tmp_path / "fresh", centre)
    state = {path.relative_to(copied): path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    there = {path.relative_to(fresh): path.read_bytes() for path in fresh.rglob("*") if path.is_file()}
    assert state == there | {Path("notes.txt"): b"the centre's"}
    assert "new" in zipfile.ZipFile(handouts.copy(packed, centre)).read("copy/README.md").decode()
    (copied / "notebooks/03_data_parallel.ipynb").write_text("mine")
    (centre / "README.md").write_text("newer")
    with pytest.raises(pairs.PairError, match="was edited since .*: notebooks/03_data_parallel.ipynb; name another"):
        handouts.copy(copied, centre)
    assert (copied / "README.md").read_text() == "new"


@pytest.mark.parametrize("name", ["there", "there.zip"])
def test_what_make_copy_did_not_make_is_not_touched(tmp_path, name):
    (tmp_path / name).mkdir() if name == "there" else (tmp_path / name).write_text("x")
    with pytest.raises(pairs.PairError, match="exists already, and `make copy` did not make it"):
        handouts.copy(tmp_path / name, ROOT)


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


def test_a_copy_keeps_the_version_that_it_was_made_from_and_an_update_says_from_which_to_which(
    centre, tmp_path, capsys
):
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    made = []
    for number in ("1.0.0", "1.1.0"):
        project = centre / "pyproject.toml"
        project.write_text(re.sub('^version = ".*"', f'version = "{number}"', project.read_text(), flags=re.M))
        subprocess.run(["git", *who, "commit", "-qam", number], cwd=centre, check=True)
        copied = handouts.copy(tmp_path / number, centre)
        assert re.fullmatch(
            rf"{number} \([0-9a-f]+ with uncommitted changes\)", version(copied)
        )  # the centre's own files
        made.append(copied)
    old, new = map(version, made)
    assert update(made[1], made[0])[0] == f"from version {old} to {new}" and version(made[0]) == new
    assert update(made[1], made[0]) == []


def test_the_version_is_the_same_in_the_package_the_citation_and_the_changes_and_the_doctor_says_it_first():
    (number,) = re.findall(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    (released,) = re.findall(rf"^version: {number}\ndate-released: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert f"\n## {number} ({released})\n" in (ROOT / "CHANGELOG.md").read_text()
    first, *_ = doctor.examine(doctor.CHECKS)
    assert first["check"] == "course" and first["says"] == version(ROOT) and version(ROOT).startswith(number)
