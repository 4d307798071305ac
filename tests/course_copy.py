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


def copy_course(folder, only=None):
    """Copy the course to `folder` and bring its pairs in sync, scripts first. Returns `folder`.

    `only`: the numbers of the lessons that the copy has; None: all.
    """
    shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
    for lesson in find_lessons(folder):
        if only is not None and lesson.number not in only:
            lesson.script.unlink(missing_ok=True)
            lesson.notebook.unlink(missing_ok=True)
        elif lesson.script.exists():
            lesson.notebook.unlink(missing_ok=True)
            pairs.sync(lesson)
    return folder


STARTED = """
# %%
# %%ranks
say(f"rank {rank} of {world_size} on {ranks.host}")
if rank == 0:
    say("step   0: validation loss 4.2")
summed = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
dist.all_reduce(summed)
shakespeare.metrics.exact(seen=[world_size], summed=fingerprint([summed]))
path = shakespeare.metrics.write()

# %%
# %%ranks
leave()
"""


def only_the_start_of_lesson_03(course):
    """Cut the copy's lesson 03 behind its start cells, for tests of the files that run it.

    It still reads its flags, loads the corpus and writes metrics. Returns `course`.
    """
    (lesson,) = find_lessons(course, only=["03"])
    start, cut, _ = lesson.script.read_text().partition("\n# %% [markdown]\n# What every section uses:")
    assert cut
    lesson.script.write_text(start + STARTED)
    lesson.notebook.unlink()
    pairs.sync(lesson)
    return course
