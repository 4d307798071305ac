"""Catch up to here: any section of a lesson runs after only the start cells."""

import subprocess
import sys

import pytest
from manyhands.course.lessons import find_lessons

# Runs in a process of its own, as a world of one: the start cells once, then each section on a copy of what they define.
PROGRAM = """
import sys
from pathlib import Path
from manyhands import leave
from manyhands.course.pairs import read

script = Path(sys.argv[0])
cells = [cell for cell in read(script).cells if "active-ipynb" not in cell.metadata.get("tags", [])]
starts = [i for i, cell in enumerate(cells) if cell.cell_type == "markdown" and cell.source.startswith("## ")]
sections = [(cells[a].source.split("\\n")[0], cells[a:b]) for a, b in zip(starts, [*starts[1:], len(cells)])]
assert sections[0][0].startswith("## Start"), sections[0][0]

def run(cells, namespace):
    for cell in cells:
        if cell.cell_type == "code" and "leave()" not in cell.source:
            source = cell.source.replace("%%ranks", "#", 1)
            exec(compile(source, str(script), "exec"), namespace)

start = {"__file__": str(script), "__name__": "__main__"}
run(cells[: starts[1]], start)
for title, section in sections[1:]:
    try:
        run(section, dict(start))
    except BaseException as error:
        raise SystemExit(f"section {title!r} does not run after the start cells alone: {error!r}")
leave()
"""


@pytest.mark.lesson
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "lesson", find_lessons(only=["00", "01", "02", "03", "05", "06", "11"]), ids=lambda lesson: lesson.name
)
def test_each_section_runs_after_the_start_cells_alone(lesson, tmp_path):
    flags = [
        text for name, value in lesson.short.items() for text in (f"--{name.replace('_', '-')}", str(value))
    ]
    program = "import sys; sys.argv = sys.argv[1:]\n" + PROGRAM
    done = subprocess.run(
        [sys.executable, "-c", program, str(lesson.script), *flags],
        check=False, capture_output=True, text=True, timeout=360, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
