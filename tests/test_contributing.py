"""What the guides to a new lesson and a new site promise: each is in just those places that they name."""

import os
import shutil
import subprocess
import sys

import minutes
import pytest
from course_copy import LEFT_OUT
from manyhands.course import handouts, pairs
from manyhands.course.lessons import find_lessons
from manyhands.jobs import directives, stamp
from manyhands.tools import preflight

HEADER = """\
# ---
# jupyter:
#   jupytext:
#     formats: notebooks///ipynb,scripts///py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Many Hands
#     language: python
#     name: manyhands
# ---
"""

LESSON = """
# %% [markdown]
# # 15 Made up
# **5 minutes**, 6 with those marked MORE. ![a bar per rank](../assets/15_bars.svg)

# %% tags=["parameters"]
n_ranks = 2  # processes
length = 4  # numbers, >= 1

# %%
from manyhands.checks import made_up as checks
from manyhands.course.lesson_parameters import parse, read
import sys

length = parse(read(__file__), sys.argv[1:]).get("length", length)

# %%
def total(length):
    return sum(range(length))


checks.total(total)
print(total(length))
"""

CHECKS = '''
"""Lesson 15: the sum."""


def total(answer):
    if answer(4) != 6:
        raise AssertionError(f"the sum of 0, 1, 2, 3 is 6, not {answer(4)}")
'''

DRAWINGS = '''
"""The figure of lesson 15."""

from matplotlib.figure import Figure


def bars():
    figure = Figure()
    figure.subplots().bar([0, 1], [1, 2])
    return figure


FIGURES = {"15_bars": bars}
'''


@pytest.fixture
def course(tmp_path, root):
    """A copy of the course without its lessons, figures and recorded runs."""
    ignore = shutil.ignore_patterns("[0-9][0-9]_*", "*.svg", "recorded")
    folder = tmp_path / "course"
    shutil.copytree(root, folder, ignore=lambda *where: LEFT_OUT(*where) | ignore(*where))
    for name in ("scripts", "notebooks"):
        (folder / name).mkdir(exist_ok=True)
    return folder


def run(course, *words):
    environ = {**os.environ, "PYTHONPATH": str(course / "scripts")}
    done = subprocess.run(
        [sys.executable, *words], cwd=course, env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.ranks
def test_a_lesson_is_its_pair_its_checks_and_its_drawings(course, tmp_path):
    script = course / "scripts" / "15_made_up.py"
    script.write_text(HEADER + LESSON)
    (course / "scripts" / "manyhands" / "checks" / "made_up.py").write_text(CHECKS.lstrip())
    (course / "assets" / "src" / "15_made_up.py").write_text(DRAWINGS.lstrip())
    (lesson,) = find_lessons(course)
    pairs.sync(lesson)
    assert pairs.difference(lesson) is None and lesson.notebook.exists()
    assert run(course, script, "--length=5").splitlines()[-1] == "10"
    drawn = "import sys; sys.path.insert(0, 'assets/src'); import draw; print(*draw.drawings())"
    assert "15_bars" in run(course, "-c", drawn).split()
    assert minutes.stated(lesson) == (5, 6)
    ways = {run.way for run in preflight.plan([lesson], tmp_path / "runs", short=True)}
    assert ways == {"notebook", "torchrun", "mpiexec"}
    (handed_out,) = find_lessons(handouts.copy(tmp_path / "class", course))
    assert handed_out.script.read_text() == lesson.script.read_text()


SITE = """\
title = "Our cluster"
checked = "2026-11-23"
sources = ["https://cluster.example.org/guide"]
verified = "Directives and modules follow the guide. No job was submitted there by us."
needs = ["account"]
walltime = "00:10:00"

[slurm]
directives = ["--gpus-per-node=2"]

[queues]
short = { nodes = [1, 2], walltime = "00:30:00" }

[settings]
NPROC_PER_NODE = "2"
site_setup = "module load torch"
"""


def test_a_site_is_one_file(course, monkeypatch):
    (course / "jobs" / "sites" / "ours.toml").write_text(SITE)
    monkeypatch.chdir(course)
    assert "ours" in stamp.sites()
    written, *_ = stamp.stamp("ours", account="Hands", queue="short", folder=course / "jobs", walltime="00:20:00")
    text = written.read_text()
    assert "#SBATCH --gpus-per-node=2" in text and "module load torch" in text
    assert list(directives.complaints(text, "slurm", stamp.site_named("ours"))) == []
    with pytest.raises(stamp.JobError, match="queue short of Our cluster takes at most 00:30:00"):
        stamp.stamp("ours", account="Hands", queue="short", folder=course / "jobs", walltime="01:00:00")
