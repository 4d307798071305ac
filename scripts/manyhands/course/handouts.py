"""Copies of the course: the one that attendees get, and the originals that a lesson can be reset to.

    python -m manyhands.course.handouts copy FOLDER         # the course for attendees; FOLDER.zip: packed, for a hub
    python -m manyhands.course.handouts reset LESSON ...    # the lesson as it was, one's own work kept in outputs/kept

LESSON is "03" or "03_data_parallel".

An attendee's lessons have no outputs and no notes. Their solutions are folded, as everywhere.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from pathlib import Path

from manyhands.course.folders import VERSION, make_private, version, write_whole
from manyhands.course.lessons import ORIGINALS, Lesson, course_here, find_lessons, left_alone
from manyhands.course.pairs import PairError, as_notebook, as_script, check, for_lessons, read, reported

MANIFEST = f"{ORIGINALS}/files.json"  # of a copy: the digest of each file but the lessons, as it was handed out
NOT_HANDED_OUT = ("tests/", ".ci/", f"{ORIGINALS}/")
CORPUS = "data/tinyshakespeare.txt"  # downloaded: with it the copy needs no network
JOBS = "ddp_shakespeare", "doctor", "preflight", "sweep", "train"
COURSE = (  # where there is no git, as in an unpacked zip: what the course consists of
    ".devcontainer/*", ".gitattributes", ".gitignore", ".github/**/*", ".gitlab-ci.yml", ".pre-commit-config.yaml",
    "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "environment.yml",
    "postBuild", "pyproject.toml", "requirements.txt",
    "assets/**/*", "data/README.md", "data/plays.txt", "jobs/README.md",
    "jobs/Dockerfile", "jobs/Dockerfile.dockerignore", "jobs/manyhands.def", "jobs/sweep.tsv", "jobs/sites/*.toml",
    *(f"jobs/{name}.{kind}" for kind in ("pbs", "slurm") for name in JOBS),
    "notebooks/[0-9][0-9]_*.ipynb", "scripts/*.py", "scripts/requirements.lock", "scripts/manyhands/**/*",
    "tests/**/*", ".ci/*",
)  # fmt: skip
# what a centre adds and need not commit: its site, its logo and pages, its lessons
OWN = ("jobs/sites/*.toml", "assets/", "notebooks/[0-9][0-9]_*.ipynb", "scripts/[0-9][0-9]_*.py")


def reset(lesson):
    """Write the lesson as the course has it; what was there is kept. Returns the folder it is kept in, if anything was.

    Raises PairError, and touches nothing, where there is no original.
    """
    originals = {path: _original(path, lesson.root) for path in (lesson.notebook, lesson.script)}
    kept = keep(lesson)
    for path, text in originals.items():
        path.parent.mkdir(exist_ok=True)
        write_whole(path, text)
    return kept


def keep(lesson):
    """Copy what there is of a lesson into a new folder in outputs/kept. Returns it; None where there is nothing."""
    if not (there := [path for path in (lesson.notebook, lesson.script) if path.exists()]):
        return None
    parent = lesson.root / "outputs" / "kept"
    make_private(parent)
    kept = Path(tempfile.mkdtemp(prefix=f"{lesson.name}-{time.strftime('%Y%m%d-%H%M%S')}-", dir=parent))
    for path in there:
        shutil.copy2(path, kept)
    return kept


def _original(path, root):
    """Return the course's text of `path`: from the copy's own originals, else from the last commit."""
    name = path.relative_to(root).as_posix()
    if (root / ORIGINALS / name).exists():
        return (root / ORIGINALS / name).read_text("utf-8")
    try:
        shown = subprocess.run(["git", "show", f"HEAD:./{name}"], cwd=root, capture_output=True)
        if shown.returncode == 0:
            return shown.stdout.decode()
        why = shown.stderr.decode(errors="replace").strip().split("\n")[0]
    except OSError as error:
        why = f"git does not run ({error.strerror})"
    raise PairError(f"there is no original of {name}: {root} is no copy made by `make copy`, and {why}")


def copy(target, root):
    """Copy the course below `root` to `target`, a folder or a .zip, as attendees get it.

    The copy has the course's files as they are now without the tests, which know the answers, then a centre's own site,
    logo and lessons, and the corpus. A new copy appears when it is complete; one that `copy` made is updated, and what
    else lies in it stays. Raises PairError if something else is there, if the copy was edited, lies inside the course
    or lacks the site of a job file, or if a lesson's two forms differ.
    """
    target, root = Path(target).expanduser().absolute(), Path(root).absolute()
    if target.exists() and not _is_copy(target):
        raise PairError(f"{target} exists already, and `make copy` did not make it; name a folder that does not exist")
    if re.search(r"[.](tar|tgz|gz|bz2|xz|zst|7z|rar)$", target.name):
        raise PairError(f"{target.name} is no .zip, and nothing else is packed; `make bundle` writes a .tar")
    if target.resolve().is_relative_to(root.resolve()):
        raise PairError(f"{target} lies inside the course; name a folder outside it")
    for lesson in find_lessons(root):
        check(lesson)
    names = files_of_the_course(root)
    _check_sites(root, names)
    target.parent.mkdir(parents=True, exist_ok=True)
    growing = target.with_name(f".{target.stem}-{os.getpid()}")
    packed = growing.with_suffix(".zip")
    try:
        course = growing / target.stem if target.suffix == ".zip" else growing
        for name in names:
            (course / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, course / name, follow_symlinks=False)
        for lesson in find_lessons(root):
            if f"scripts/{lesson.name}.py" in names:
                _hand_out(Lesson(lesson.name, course))
        _write_manifest(course)
        write_whole(course / VERSION, version(root) + "\n")
        _open_to_all(growing)
        if target.suffix == ".zip":
            shutil.make_archive(growing, "zip", growing)
            packed.chmod(0o644)
            os.replace(packed, target)
        elif target.exists():
            _write_over(growing, target)
        else:
            os.replace(growing, target)
    finally:
        shutil.rmtree(growing, ignore_errors=True)
        packed.unlink(missing_ok=True)
    return target


def _is_copy(target):
    """Return whether `copy` made this folder or .zip."""
    if target.is_dir():
        return (target / MANIFEST).is_file()
    with suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(target) as packed:
        return any(name.endswith(f"/{MANIFEST}") for name in packed.namelist())
    return False


def _handed_out(course):
    """Return {name: digest} of every file of a copy outside ORIGINALS, as handed out."""
    originals = [path for kind in ("notebooks", "scripts") for path in (course / ORIGINALS / kind).glob("*")]
    return manifest(course) | {path.relative_to(course / ORIGINALS).as_posix(): digest(path) for path in originals}


def _write_over(new, target):
    """Bring the copy `target` to the state of `new`, file by file; what is not the copy's own stays.

    Raises PairError, and touches nothing, if somebody has edited it.
    """
    files = {path.relative_to(new).as_posix(): path for path in new.rglob("*") if path.is_file()}
    before = _handed_out(target)
    there = {name: digest(target / name) for name in before if (target / name).is_file()}
    edited = [
        name for name, here in there.items() if here != before[name] and here != digest(files.get(name, os.devnull))
    ]
    if edited:
        raise PairError(f"{target} was edited since `make copy` made it: {', '.join(edited)}; name another folder")
    for name in before.keys() - files.keys():
        for gone in (target / name, target / ORIGINALS / name):
            gone.unlink(missing_ok=True)
    for name, path in files.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(target / name, path.read_bytes(), path.stat().st_mode & 0o777)


def _check_sites(root, names):
    """Raise PairError for a job file that was written for a site which the copy will not have."""
    for name in names:
        if re.fullmatch(r"jobs/[^/]+[.](pbs|slurm)", name):
            site = re.search(r"^# site: (\S+)", (root / name).read_text("utf-8"), re.MULTILINE)
            if site and (wanted := f"jobs/sites/{site[1]}.toml") not in names:
                why = "git ignores it" if (root / wanted).is_file() else "it does not exist"
                cure = f"add it (git add -f {wanted}), or write the job files for another site: make jobs SITE=generic"
                raise PairError(f"{name} is for site {site[1]}, and the copy would not have {wanted}: {why}; {cure}")


def digest(path):
    """Return the SHA-256 of a file, as text."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _write_manifest(course):
    lessons = {path for lesson in find_lessons(course) for path in (lesson.notebook, lesson.script)}
    files = [path for path in course.rglob("*") if path.is_file() and path not in lessons]
    names = {path: path.relative_to(course).as_posix() for path in files}
    listed = {names[path]: digest(path) for path in sorted(files) if not names[path].startswith(NOT_HANDED_OUT)}
    (course / MANIFEST).parent.mkdir(exist_ok=True)
    write_whole(course / MANIFEST, json.dumps(listed, indent=0) + "\n")


def manifest(course):
    """Return {name: digest} of a copy's files but the lessons, as handed out. Raises PairError if `make copy` did not
    make it."""
    try:
        return json.loads((Path(course) / MANIFEST).read_text("utf-8"))
    except (OSError, ValueError):
        why = f"{course} has no {MANIFEST}, so it was not made by this version's `make copy`"
        raise PairError(f"{why}; a git clone is updated by `git pull`") from None


def _open_to_all(folder):
    """Everybody may read what lies in `folder`, and run what its owner may, whatever the umask of who copies it."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)


def files_of_the_course(root, tests=False):
    """Names, relative to `root`, of what attendees get: what git knows there and OWN, else COURSE; and the corpus.

    With `tests` also those that know the answers.

    What git ignores is left out, and so is what somebody laid beside them: own texts, prepared data, job files of their
    own, copies of lessons.
    """
    names = []
    with suppress(OSError, subprocess.CalledProcessError):
        for words in ((), ("--others", "--exclude-standard", "--", *OWN)):
            listed = subprocess.run(["git", "ls-files", "-z", *words], cwd=root, capture_output=True, check=True)
            names += listed.stdout.decode().split("\0")
    if not any(names):
        found = (path for pattern in COURSE for path in root.glob(pattern))
        names = [path.relative_to(root).as_posix() for path in found if "__pycache__" not in path.parts]
    lessons = {lesson.name for lesson in find_lessons(root)}
    own = {name for name in names if re.match(r"(notebooks|scripts)/\d\d_", name) and Path(name).stem not in lessons}
    names = {name for name in [*names, CORPUS] if name not in own and (tests or not name.startswith(NOT_HANDED_OUT))}
    return sorted(name for name in names if (root / name).is_file())  # not what git knows and somebody has removed


def _hand_out(lesson):
    """Write both forms of a copied lesson as attendees get them, and once more as what `reset` takes."""
    content = read(lesson.script)
    content.cells = [cell for cell in content.cells if "notes" not in cell.metadata.get("tags", [])]
    for path, write in ((lesson.notebook, as_notebook), (lesson.script, as_script)):
        text = write(content)
        original = lesson.root / ORIGINALS / path.relative_to(lesson.root)
        original.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
        write_whole(original, text)


def _reset(lesson):
    kept = reset(lesson)
    return f"{lesson.name} is as it was" + (f"; your work is in {kept}" if kept else "")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["copy", "reset"])
    parser.add_argument("names", nargs="*", metavar="FOLDER or LESSON")
    options = parser.parse_args(arguments)
    if not any(options.names):
        print("say which: make copy TO=/path, or make reset LESSON=03", file=sys.stderr)
        return 2
    if options.action == "reset":
        return for_lessons(_reset, options.names)
    course, target = course_here(), options.names[0]
    done = "updated" if Path(target).expanduser().exists() else "copied to"

    def act():
        place = copy(target, course)
        return "\n".join([f"{done} {place}: version {version(course)}", *left_alone(course)])

    return reported(act)


if __name__ == "__main__":
    from manyhands.launch.entry import run_program

    run_program("handouts", main)
