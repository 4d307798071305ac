"""Copies of the course: the one that attendees get, and the originals that a lesson can be reset to.

    python -m manyhands.course.handouts copy FOLDER         # the course for attendees, without the instructor's notes
    python -m manyhands.course.handouts reset LESSON ...    # the lesson as it was, one's own work kept in outputs/kept

LESSON is "03" or "03_data_parallel".
"""

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from manyhands.course.folders import write_whole
from manyhands.course.lessons import course_here, find_lessons
from manyhands.course.pairs import PairError, as_notebook, as_script, check, read

ORIGINALS = ".originals"  # in an attendee's copy, which has no git: the lessons as they were handed out
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".ci", ".venv", ".manyhands-env", "outputs", ORIGINALS, "__pycache__", "*.egg-info", ".*_cache", ".hypothesis",
    ".ipynb_checkpoints",
)  # fmt: skip


def reset(lesson):
    """Write the lesson as the course has it; what was there is kept. Returns the folder it is kept in.

    Raises PairError, and touches nothing, where there is no original.
    """
    originals = {path: _original(path, lesson.root) for path in (lesson.notebook, lesson.script)}
    kept = _new_folder(lesson.root / "outputs" / "kept", f"{lesson.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    for path, text in originals.items():
        if path.exists():
            shutil.copy2(path, kept)
        path.parent.mkdir(exist_ok=True)
        write_whole(path, text)
    return kept


def _new_folder(parent, name):
    for attempt in itertools.count(1):
        folder = parent / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:  # a second reset within the same second
            continue


def _original(path, root):
    """What the course has for `path`: the copy's own originals, else the last commit."""
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
    """Copy the course below `root` to `target`, a folder that does not exist yet, without the instructor's notes.

    Downloaded data comes along, so that the copy needs no network. The folder appears when it is complete. Raises
    PairError if it exists, lies inside the course, or a lesson's two forms differ.
    """
    target, root = Path(target).expanduser().absolute(), Path(root).absolute()
    if target.exists():
        raise PairError(f"{target} exists already; name a folder that does not")
    if target.resolve().is_relative_to(root.resolve()):
        raise PairError(f"{target} lies inside the course; name a folder outside it")
    for lesson in find_lessons(root):
        check(lesson)
    target.parent.mkdir(parents=True, exist_ok=True)
    growing = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        shutil.copytree(root, growing, ignore=LEFT_OUT, symlinks=True)
        for lesson in find_lessons(growing):
            _leave_out_notes(lesson)
        os.replace(growing, target)
    finally:
        shutil.rmtree(growing, ignore_errors=True)
    return target


def _leave_out_notes(lesson):
    for path, write in ((lesson.notebook, as_notebook), (lesson.script, as_script)):
        content = read(path)
        content.cells = [cell for cell in content.cells if "notes" not in cell.metadata.get("tags", [])]
        text = write(content)
        original = lesson.root / ORIGINALS / path.relative_to(lesson.root)
        original.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
        write_whole(original, text)


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("copy").add_argument("folder")
    actions.add_parser("reset").add_argument("lessons", nargs="*", metavar="LESSON")
    options = parser.parse_args(arguments)
    try:
        if options.action == "copy":
            if not options.folder:
                raise PairError("name a folder that does not exist yet: make copy TO=/path")
            print(f"copied to {copy(options.folder, course_here())}")
            return 0
        if not options.lessons:
            raise PairError("name the lesson to reset: make reset LESSON=03")
        for lesson in find_lessons(course_here(), options.lessons):
            print(f"{lesson.name} is as it was; your work is in {reset(lesson)}")
    except (PairError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
