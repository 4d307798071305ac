"""A copy of the course in a folder of its own, as an attendee has it: jobs may leave their files in it."""

import shutil
from pathlib import Path

from manyhands.course import pairs
from manyhands.course.lessons import find_lessons

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "outputs", "tests", "tinyshakespeare.txt", "__pycache__", "*.egg-info", ".*_cache", ".hypothesis",
    ".ipynb_checkpoints",
)  # fmt: skip


def copy_course(folder):
    """Copy the course to `folder` and bring its pairs in sync, scripts first. Returns `folder`."""
    shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
    for lesson in find_lessons(folder):
        if lesson.script.exists():
            lesson.notebook.unlink(missing_ok=True)
            pairs.sync(lesson)
    return folder
