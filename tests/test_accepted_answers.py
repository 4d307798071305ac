"""What a check accepts carries the lesson to its end: the k-th accepted answer of all its builds and exercises at once.

A new answer joins by a line in the table `right` of the tests of its check, and here where it makes a list longer.
"""

import os
import subprocess
import sys

import pytest
import shortest
from each_section import tables_of
from manyhands.course.folders import ROOT
from manyhands.course.lessons import find_lessons

# as many runs as the longest list of a lesson's accepted answers
RUNS = {
    "00": 2, "01": 4, "02": 3, "03": 6, "04": 3, "05": 4, "06": 4, "07": 2, "08": 2, "09": 2, "10": 3, "11": 2, "12": 2,
    "13": 3, "14": 2, "15": 10,
}  # fmt: skip
LESSONS = find_lessons(ROOT, own=False)


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_every_accepted_answer_has_a_run(lesson):
    assert RUNS[lesson.number] == max(len(right) for table in tables_of(lesson.name) for right in table.right.values())


@pytest.mark.full
@pytest.mark.lesson
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("lesson", "number"),
    [pytest.param(lesson, k, id=f"{lesson.name}-{k}") for lesson in LESSONS for k in range(RUNS[lesson.number])],
)
def test_a_lesson_runs_to_its_end_with_answers_that_its_checks_accept(lesson, number, tmp_path):
    script = ["tests/each_section.py", "answers", str(number), str(lesson.script)]
    start = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *start, *script, *shortest.FLAGS[lesson.name].split()], cwd=ROOT,
        capture_output=True, text=True, env={**os.environ, "MANYHANDS_OUTPUTS": str(tmp_path)}, timeout=580,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"answer {number} to " in done.stdout
