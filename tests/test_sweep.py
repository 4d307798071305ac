"""jobs/sweep.*: row i of the table for task i, the first and the last one too, each once; the header is no row."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from manyhands.jobs import stamp
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
    """The job files, a table of three rows, and a trainer that says with what it was started."""
    folder = tmp_path / "course"
    shutil.copytree(root / "jobs", folder / "jobs")
    (folder / "jobs" / "sweep.tsv").write_text(TABLE)
    (folder / "scripts").mkdir()
    (folder / "scripts" / "train.py").write_text(SAY)
    return folder


def run(course, name, *arguments, **environ):
    """The job file under bash; launch.py, which would take seconds, is a shell script that runs its program once."""
    fake = course / "bin" / "python"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text(
        f'#!/bin/bash\nwhile [[ $1 != -- ]]; do shift; done\nshift\nexec {sys.executable} scripts/train.py "$@"\n'
    )
    fake.chmod(0o755)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PBS_"))}
    clean |= {"VENV": "", "MANYHANDS_OUTPUTS": "out", "PATH": f"{fake.parent}:{os.environ['PATH']}"}
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


@pytest.fixture
def with_qstat(course):
    """A qstat that answers about an array as PBS Pro does (written down: no PBS runs in these tests)."""
    (course / "bin").mkdir()
    qstat = course / "bin" / "qstat"
    qstat.write_text('#!/bin/bash\necho "Job Id: $2"; echo "    array_indices_submitted = $FAKE_ARRAY"\n')
    qstat.chmod(0o755)
    return course


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("i", [1, 3])
def test_task_i_takes_row_i(with_qstat, name, i):
    done = run(with_qstat, name, "--train.steps", "20", **task(name, i, 3))
    assert done.returncode == 0, done.stderr
    assert f"row {i} of 3: {ROWS[i - 1]}\n" in done.stdout
    assert (
        f"ran with --checkpoint.folder out/sweep-77/row-{i} --checkpoint.resume auto {ROWS[i - 1]} --train.steps 20"
        in (done.stdout)
    )
    assert done.stdout.count("ran with") == 1


@pytest.mark.parametrize("name", FILES)
def test_without_a_scheduler_each_row_runs_once_and_the_header_does_not(course, name):
    done = run(course, name, TRAIN_ARGS="--train.steps 7")
    assert done.returncode == 0, done.stderr
    ran = [line.split("--train.steps 7 ")[1] for line in done.stdout.splitlines() if line.startswith("ran with")]
    assert ran == ROWS


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(("count", "first"), [(4, 1), (3, 0)])
def test_an_array_that_does_not_fit_the_table_is_refused_with_the_numbers(with_qstat, name, count, first):
    done = run(with_qstat, name, **task(name, first, count, first))
    assert done.returncode == 2 and "ran with" not in done.stdout
    assert "jobs/sweep.tsv has 3 rows, but this array has" in done.stderr and "1-3" in done.stderr
    assert (
        f"{first} to {first + count - 1}" if name.endswith("slurm") else f"{first}-{first + count - 1}"
    ) in done.stderr


@pytest.mark.parametrize("name", FILES)
def test_a_part_of_the_table_runs_if_it_is_asked_for_by_name(with_qstat, name):
    done = run(with_qstat, name, PART="yes", **task(name, 3, 1, 3))
    assert done.returncode == 0 and ROWS[2] in done.stdout


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("i", [0, 4])
def test_a_task_beyond_either_end_is_refused(with_qstat, name, i):
    done = run(with_qstat, name, PART="yes", **task(name, i, 1, i))
    assert done.returncode == 2 and f"this is task {i}: task 1 takes row 1, 3 the last" in done.stderr


@pytest.mark.parametrize("name", FILES)
def test_a_row_with_a_value_too_few_is_refused_with_its_number(with_qstat, name):
    (with_qstat / "jobs" / "sweep.tsv").write_text(TABLE.replace("2e-3\t24", "2e-3"))
    done = run(with_qstat, name, **task(name, 2, 3))
    assert done.returncode == 2 and "its row 2 holds 1 values for 2 names" in done.stderr


def test_a_table_written_on_windows_or_without_a_last_newline_is_the_same_table(course):
    (course / "jobs" / "sweep.tsv").write_bytes(TABLE.rstrip().replace("\n", "\r\n").encode())
    done = run(course, "sweep.slurm", **task("sweep.slurm", 3, 3))
    assert done.returncode == 0 and f"row 3 of 3: {ROWS[2]}\n" in done.stdout


def test_values_meet_no_shell(course):
    (course / "jobs" / "sweep.tsv").write_text("log.prompt\n$(touch${IFS}gone);*\n")
    done = run(course, "sweep.slurm", **task("sweep.slurm", 1, 1))
    assert "--log.prompt $(touch${IFS}gone);*" in done.stdout and not (course / "gone").exists()


def test_the_check_of_job_files_counts_the_rows(course):
    for name, option in zip(FILES, ("#PBS -J 1-3", "#SBATCH --array=1-3"), strict=True):
        said = stamp.table_complaints(course / "jobs" / name, name.split(".")[1])
        assert said == [f"sweep.tsv has 3 rows, the array is 1-6: write {option}"]
    (course / "jobs" / "sweep.tsv").write_text("a\n" + "1\n" * 6)
    assert stamp.table_complaints(course / "jobs" / FILES[0], "pbs") == []


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
        refused = slurm.submit("sbatch", "--array=1-2", "jobs/sweep.slurm", environ=environ, cwd=course)
        slurm.drain()
        for i in (1, 2):
            said = (course / f"sweep.o{refused}.{i}").read_text()
            assert "jobs/sweep.tsv has 3 rows, but this array has tasks: 2, 1 to 2" in said
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
