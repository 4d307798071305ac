"""jobs/sweep.*: row i of the table for task i, the first and the last one too, each once; the header is no row."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slurm_nodes import slurm_of_this_machine

pytestmark = pytest.mark.timeout(600)
FILES = ["sweep.pbs", "sweep.slurm"]
TABLE = """\
# a comment, and a line of nothing

optimizer.lr\ttrain.global-batch
1e-3\t12
2e-3\t24
3e-3\t48
"""
ROWS = [f"--optimizer.lr {lr} --train.global-batch {batch}" for lr, batch in (("1e-3", 12), ("2e-3", 24), ("3e-3", 48))]
# Each row of fake_train runs to its end but the last one, which waits to be told to leave (see there).
TO_BE_PREEMPTED = "linger\n99\n99\n20\n"
SAY = "import os, sys; print('ran with', *sys.argv[1:], flush=True)\n"


@pytest.fixture
def course(root, tmp_path):
    """The job files, a table of three rows, a trainer that says with what it was started, and two stand-ins.

    Instead of launch.py, which would take seconds, `python` runs its program once. `qstat` answers about an array as
    PBS Pro does (written down: no PBS runs in these tests).
    """
    folder = tmp_path / "course"
    shutil.copytree(root / "jobs", folder / "jobs")
    (folder / "jobs" / "sweep.tsv").write_text(TABLE)
    (folder / "scripts").mkdir()
    (folder / "scripts" / "train.py").write_text(SAY)
    (folder / "bin").mkdir()
    for name, text in (
        ("python", f'while [[ $1 != -- ]]; do shift; done\nshift\nexec {sys.executable} scripts/train.py "$@"'),
        ("qstat", 'echo "Job Id: $2"; echo "    array_indices_submitted = $FAKE_ARRAY"'),
    ):
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    return folder


def run(course, name, *arguments, **environ):
    """The job file under bash."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PBS_"))}
    clean |= {"VENV": "", "MANYHANDS_OUTPUTS": "out", "PATH": f"{course / 'bin'}:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", f"jobs/{name}", *arguments], cwd=course, env=clean | {k: str(v) for k, v in environ.items()},
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip


def task(name, i, count, first=1):
    """What a scheduler tells task i of an array of `count` tasks."""
    if name.endswith(".pbs"):
        return {"PBS_ARRAY_INDEX": i, "PBS_ARRAY_ID": "77[].server", "FAKE_ARRAY": f"{first}-{first + count - 1}"}
    return {
        "SLURM_ARRAY_JOB_ID": 77, "SLURM_ARRAY_TASK_ID": i, "SLURM_ARRAY_TASK_COUNT": count,
        "SLURM_ARRAY_TASK_MIN": first, "SLURM_ARRAY_TASK_MAX": first + count - 1,
    }  # fmt: skip


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("i", [1, 3])
def test_task_i_takes_row_i(course, name, i):
    done = run(course, name, "--train.steps", "20", **task(name, i, 3))
    assert done.returncode == 0, done.stderr
    assert f"row {i} of 3: {ROWS[i - 1]}\n" in done.stdout and done.stdout.count("ran with") == 1
    flags = f"--checkpoint.folder out/sweep-77/row-{i} --checkpoint.resume auto {ROWS[i - 1]} --train.steps 20"
    assert f"ran with {flags}" in done.stdout


SHORT = TABLE.replace("2e-3\t24", "2e-3")
REFUSED = {  # the task, of how many, the first one, whether a part is asked for, the table, what is said
    "from 0 on": (0, 3, 0, "", TABLE, "jobs/sweep.tsv has 3 rows, but this array has {array}1-3"),
    "row 4": (4, 1, 4, "yes", TABLE, "this is task 4: task 1 takes row 1, 3 the last"),
    "a value too few": (2, 3, 1, "", SHORT, "its row 2 holds 1 values for 2 names"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_the_table_is_refused_with_the_numbers(course, name, case):
    i, count, first, part, table, sentence = REFUSED[case]
    (course / "jobs" / "sweep.tsv").write_text(table)
    done = run(course, name, PART=part, **task(name, i, count, first))
    assert done.returncode == 2 and "ran with" not in done.stdout
    for words in sentence.split("{array}"):
        assert words in done.stderr
    if "{array}" in sentence:
        assert f"{first}{' to ' if name.endswith('slurm') else '-'}{first + count - 1}" in done.stderr


@pytest.mark.parametrize("name", FILES)
def test_without_a_scheduler_each_row_runs_once_and_the_header_does_not(course, name):
    done = run(course, name, TRAIN_ARGS="--train.steps 7")
    assert done.returncode == 0, done.stderr
    ran = [line.split("--train.steps 7 ")[1] for line in done.stdout.splitlines() if line.startswith("ran with")]
    assert ran == ROWS


def test_each_row_of_the_table_as_committed_is_one_that_the_trainer_takes(root):
    from manyhands.config.options import read_options

    lines = [line.split() for line in (root / "jobs" / "sweep.tsv").read_text().splitlines() if line[0] != "#"]
    names, rows = lines[0], lines[1:]
    options = [
        read_options([w for pair in zip(names, row, strict=True) for w in (f"--{pair[0]}", pair[1])]) for row in rows
    ]
    assert len({(o.optimizer.lr, o.train.global_batch) for o in options}) == len(rows) == 6


def wait_for(slurm, job, state, timeout_s=280):
    deadline = time.monotonic() + timeout_s
    while slurm.state(job) != state:
        assert time.monotonic() < deadline, f"job {job} is {slurm.state(job)}, not {state}"
        time.sleep(0.2)


@pytest.mark.slurm
def test_on_slurm_the_first_and_the_last_row_run_once_and_a_preempted_task_requeues_itself_alone(
    root, course, tmp_path
):
    nodes = slurm_of_this_machine()
    shutil.copy(root / "tests" / "fake_train.py", course / "scripts" / "train.py")
    shutil.copy(root / "scripts" / "launch.py", course / "scripts")
    (course / "jobs" / "sweep.tsv").write_text(TO_BE_PREEMPTED)
    environ = {
        "VENV": str(Path(sys.executable).parents[1]), "NPROC_PER_NODE": "1", "MANYHANDS_OUTPUTS": str(tmp_path / "out"),
        "MANYHANDS_SCRIPTS": str(root / "scripts"),
    }  # fmt: skip
    with nodes as slurm:
        job = slurm.submit("sbatch", "--array=1-3", "jobs/sweep.slurm", environ=environ, cwd=course)
        # the last task has the array's own number: told to requeue 77, Slurm would take all of 77_1, 77_2, 77_3
        last = course / f"sweep.o{job}.3"
        while not last.exists() or "step 10" not in last.read_text():
            time.sleep(0.2)
        slurm.run("scancel", "--batch", "--signal=USR1", f"{job}_3")
        while "Restarts=1" not in slurm.run("scontrol", "show", "job", f"{job}_3").stdout:
            time.sleep(0.2)
        for i in (1, 2):
            assert "Restarts=0" in slurm.run("scontrol", "show", "job", f"{job}_{i}").stdout
        wait_for(slurm, f"{job}_3", "PENDING")  # what is said to it before is forgotten
        slurm.run("scontrol", "update", f"JobId={job}_3", "StartTime=now+3")
        wait_for(slurm, f"{job}_3", "COMPLETED")
        slurm.drain()
        for i, row in enumerate(("--linger 99", "--linger 99", "--linger 20"), start=1):
            said = (course / f"sweep.o{job}.{i}").read_text()
            assert said.count(f"row {i} of 3: {row}\n") == (2 if i == 3 else 1), said
            assert said.count("from step 0\n") == 1 and f"done, sum {40 * 41 // 2}" in said
            saved = tmp_path / "out" / f"sweep-{job}" / f"row-{i}" / "sum.json"
            assert json.loads(saved.read_text()) == [40, 40 * 41 // 2]
