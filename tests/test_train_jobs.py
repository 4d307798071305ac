"""jobs/train.*: run on this machine without a scheduler, and on a real Slurm of two nodes.

There they are pre-empted, requeued and cancelled: what is saved, goes back into the queue, and ends with the numbers of
a run that nobody disturbed. `fake_train.py` stands in for the trainer where its numbers do not matter (see there).
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from course_copy import copy_course
from manyhands.launch.processes import MARK, Family
from slurm_nodes import slurm_of_this_machine, wait_until_gone

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]
PATIENCE_S = 280  # a busy machine takes minutes for what takes seconds otherwise
LINGER = "--linger=20"  # fake_train waits there to be told to leave, however late that is
FILES = ["train.pbs", "train.slurm"]
ALL = 3 * 40 * 41 // 2  # what 40 steps of two ranks of fake_train add up to


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """The course, with fake_train in the trainer's place."""
    copy = copy_course(tmp_path_factory.mktemp("course") / "many-hands", only=())
    shutil.copy(copy / "scripts" / "train.py", copy / "scripts" / "real_train.py")
    shutil.copy(os.path.join(os.path.dirname(__file__), "fake_train.py"), copy / "scripts" / "train.py")
    launch = copy / "scripts" / "launch.py"  # fake_train takes flags that the trainer would refuse
    launch.write_text(launch.read_text().replace(", refuse_flags=read_options", ""))
    return copy


def start_job(course, name, *arguments, **environ):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PBS_"))}
    clean |= {"VENV": str(Path(sys.executable).parents[1]), "NPROC_PER_NODE": "2"}
    return subprocess.Popen(
        ["bash", f"jobs/{name}", *arguments], cwd=course, env=clean | {k: str(v) for k, v in environ.items()},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def until(run, text):
    for line in run.stdout:
        if text in line:
            return
    raise AssertionError(f"it ended without {text!r}")


@pytest.fixture
def apptainer(tmp_path):
    """A stand-in for an engine of containers: it writes down its words, and its image holds this very Python."""
    engine = tmp_path / "bin" / "apptainer"
    engine.parent.mkdir()
    engine.write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/words\nshift 4\nexec {sys.executable} "$@"\n')
    engine.chmod(0o755)
    return {"IMAGE": "course.sif", "IMAGE_FLAGS": "--nv", "PATH": f"{engine.parent}:{os.environ['PATH']}"}


@pytest.mark.parametrize(("name", "image"), [(FILES[0], False), (FILES[1], False), (FILES[0], True), (FILES[1], True)])
def test_without_a_scheduler_a_signal_to_the_job_saves_and_the_same_folder_goes_on(
    course, tmp_path, apptainer, name, image
):
    family, run_folder = Family(f"job-{tmp_path.name}-{name}"), tmp_path / "run"
    environ = {**(apptainer if image else {}), MARK: family.mark, "MANYHANDS_OUTPUTS": tmp_path / "out"}
    run = start_job(course, name, LINGER, RUN=run_folder, **environ)
    until(run, "step 10")
    run.send_signal(signal.SIGTERM)
    said = run.communicate(timeout=PATIENCE_S)[0]
    assert run.returncode == 0, said
    assert f"saved in {run_folder}: RUN={run_folder} bash jobs/{name} goes on from there" in said
    step, _ = json.loads((run_folder / "sum.json").read_text())
    assert 10 < step < 40 and family.members() == []
    again = start_job(course, name, RUN=run_folder, TRAIN_ARGS="--step-s=0", **environ)
    said = again.communicate(timeout=PATIENCE_S)[0]
    assert again.returncode == 0 and f"from step {step}" in said and f"done, sum {ALL}" in said, said
    assert "saved in" not in said
    assert [status.read_text() for status in (tmp_path / "out" / "jobs").glob("*.status")] == ["0\n", "0\n"]
    words = (tmp_path / "words").read_text() if image else ""
    assert words.count("exec --nv course.sif python -m manyhands.launch.commands --standalone") == (2 if image else 0)


def test_a_failing_run_fails_the_job_and_asks_for_nothing_even_beside_an_old_request(course, tmp_path):
    (tmp_path / "requeue.json").write_text("{}")
    run = start_job(course, FILES[1], "--fault=exit:1:3", RUN=tmp_path, NPROC_PER_NODE="2")
    said = run.communicate(timeout=PATIENCE_S)[0]
    assert run.returncode == 1 and "this rank gives up" in said and "saved in" not in said
    assert not (tmp_path / "requeue.json").exists()


def under_pbs(course, folder, programs, **environ):
    """train.pbs as a job of a PBS whose programs are written down: {name: lines of shell}."""
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    return start_job(course, FILES[0], VENV="", PATH=path, RUN=folder / "run", PBS_JOBID="123.server", **environ)


@pytest.mark.parametrize(
    ("allowed", "sentence"),
    [(True, "job 123.server goes back into the queue"), (False, "qsub -v RUN={run} jobs/train.pbs goes on from there")],
)
def test_under_pbs_a_clock_of_the_jobs_own_rings_before_the_walltime_ends(course, tmp_path, allowed, sentence):
    """qstat and qrerun as PBS Pro answers, written down: it grants qrerun to operators only. No PBS runs in these
    tests.
    """
    programs = {  # the clock starts with qstat's answer, and that one waits until the program can hear
        "qstat": f'until [ -e {tmp_path}/hears ]; do sleep 0.1; done\necho "    Resource_List.walltime = 00:10:00"',
        "qrerun": f'echo "qrerun $1: {"done" if allowed else "Unauthorized Request"}"; exit {int(not allowed)}',
        "python": f"trap 'echo {{}} > {tmp_path}/run/requeue.json; exit' USR1; mkdir -p {tmp_path}/run\n"
        f"> {tmp_path}/hears\n"
        "for i in {1..2000}; do sleep 0.1; done",
    }
    run = under_pbs(course, tmp_path, programs, LEAVE_S=600 - 2)
    said = run.communicate(timeout=PATIENCE_S)[0]
    assert run.returncode == 0 and "qrerun 123.server: " in said
    assert f"saved in {tmp_path}/run: " + sentence.format(run=tmp_path / "run") in said


@pytest.mark.parametrize("number, told", [(signal.SIGTERM, "R"), (signal.SIGUSR1, "E")])
def test_under_pbs_a_job_that_qdel_ends_saves_and_is_not_put_back_into_the_queue(course, tmp_path, number, told):
    """qdel sends SIGTERM, and leaves the job in state R for a while; where qrerun is granted it would come back."""
    programs = {
        "qstat": f'echo "    job_state = {told}"',
        "qrerun": "echo it came back",
        "python": f"trap 'echo {{}} > {tmp_path}/run/requeue.json; exit' TERM USR1; mkdir -p {tmp_path}/run\n"
        "echo hears\nfor i in {1..2000}; do sleep 0.1; done",
    }
    run = under_pbs(course, tmp_path, programs, MANYHANDS_OUTPUTS=tmp_path / "out")
    until(run, "hears")
    run.send_signal(number)
    said = run.communicate(timeout=PATIENCE_S)[0]
    assert run.returncode == 0 and "it came back" not in said
    assert f"saved in {tmp_path}/run; job 123.server was asked to end, so it is left alone" in said
    assert (tmp_path / "out" / "jobs" / "train.123.cancelled").exists() == (number == signal.SIGTERM)


@pytest.mark.parametrize(
    ("qstat", "why"),
    [
        ("exit 1", "qstat names no walltime; use --checkpoint.every"),
        ('echo "    Resource_List.walltime = 00:01:00"', "its walltime, 00:01:00, is not longer than LEAVE_S=120"),
    ],
)
def test_under_pbs_a_job_whose_clock_cannot_ring_says_so(course, tmp_path, qstat, why):
    run = under_pbs(course, tmp_path, {"qstat": qstat, "python": "exit 5"})
    said = run.communicate(timeout=100)[0]
    assert said == f"train.pbs: job 123.server is not told to save before it ends: {why}\n" and run.returncode == 5


def test_under_pbs_the_clock_ends_with_the_job(course, tmp_path):
    programs = {"qstat": 'echo "    Resource_List.walltime = 10:00:00"', "python": "exit 5"}
    family = Family(f"clock-{tmp_path.name}")
    run = under_pbs(course, tmp_path, programs, **{MARK: family.mark})
    run.communicate(timeout=100)  # a forgotten `sleep` would hold its output open for ten hours
    assert run.returncode == 5
    psutil.wait_procs(family.members(), timeout=60)
    assert family.members() == []


@pytest.fixture(scope="module")
def slurm():
    with slurm_of_this_machine() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def environ(tmp_path_factory):
    return {
        "VENV": str(Path(sys.executable).parents[1]),
        "MANYHANDS_OUTPUTS": str(tmp_path_factory.mktemp("outputs")),
        "NPROC_PER_NODE": "1",
    }


class Submitted:
    """A job on the two nodes, and its output."""

    def __init__(self, slurm, course, environ, *command):
        self.slurm, self.course = slurm, course
        self.number = slurm.submit(*command, environ=environ, cwd=course)
        self.run = os.path.join(environ["MANYHANDS_OUTPUTS"], f"train-{self.number}")

    @property
    def output(self):
        return "".join(path.read_text() for path in self.course.glob(f"*{self.number}"))

    def until(self, text):
        wait_until(lambda: text in self.output, lambda: self.output)

    def wait_for(self, *states):
        wait_until(lambda: self.slurm.state(self.number) in states, lambda: self.output)

    def signal_the_script(self):
        """As --signal=B:USR1@120 does two minutes before the end."""
        self.slurm.run("scancel", "--batch", "--signal=USR1", self.number)

    def start_again_now(self):
        """Slurm lets a requeued job wait for two minutes.

        In the second in which the first start was revoked, a node refuses the next one ("job credential revoked",
        FAILED).
        """
        self.wait_for("PENDING")
        self.slurm.run("scontrol", "update", f"JobId={self.number}", "StartTime=now+3")

    def requeue_file(self):
        return os.path.join(self.run, "requeue.json")


def wait_until(true, said):
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, said()
        time.sleep(0.2)


UNTIL_TOLD = [LINGER, "--train.steps=40"]


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("starter", "signal_name"),
    [("torchrun", "SIGUSR1"), ("srun", "SIGUSR1"), ("torchrun", "SIGTERM")],  # the last when Slurm itself requeues it
)
def test_a_preempted_job_saves_goes_back_into_the_queue_once_and_ends_with_the_whole_sum(
    slurm, course, environ, starter, signal_name
):
    job = Submitted(slurm, course, {**environ, "STARTER": starter}, "sbatch", "jobs/train.slurm", *UNTIL_TOLD)
    job.until("step 10")
    if signal_name == "SIGUSR1":
        job.signal_the_script()
    else:
        assert slurm.run("scontrol", "requeue", job.number).returncode == 0
    job.start_again_now()
    assert slurm.wait(job.number, PATIENCE_S) == "COMPLETED", job.output
    said = job.output
    assert f"launcher {starter}" in said and "node2: rank 1" in said
    assert f"stopped by {signal_name} and saved at step" in said
    if signal_name == "SIGUSR1":
        assert f"saved in {job.run}: job {job.number} goes back into the queue" in said
        assert not os.path.exists(job.requeue_file())
    assert said.count("from step 0\n") == 1 and f"done, sum {ALL}" in said
    assert "Restarts=1" in slurm.run("scontrol", "show", "job", job.number).stdout


@pytest.mark.slurm
def test_a_cancelled_job_saves_and_stays_cancelled(slurm, course, environ):
    job = Submitted(slurm, course, environ, "sbatch", "jobs/train.slurm", *UNTIL_TOLD)
    job.until("step 10")
    slurm.run("scancel", job.number)
    job.wait_for("CANCELLED", "PENDING")
    slurm.drain(PATIENCE_S)
    assert os.path.exists(job.requeue_file())  # RUN=... goes on from here, if you want
    assert "Restarts=0" in slurm.run("scontrol", "show", "job", job.number).stdout
    assert "goes back into the queue" not in job.output
    wait_until_gone(slurm.folder, b"train.py")


# so that it is still there when it is told to leave
PATIENT = """\
import os, runpy, time
from manyhands.train.preemption import PreemptionHandler, defer_signals

defer_signals()
agreed = PreemptionHandler.agreed


def waiting(self):
    while self._turn == 9 and not self._heard and "LINGER" in os.environ and "SLURM_RESTART_COUNT" not in os.environ:
        time.sleep(0.05)
    return agreed(self)


PreemptionHandler.agreed = waiting
runpy.run_path("scripts/real_train.py", run_name="__main__")
"""
STEPS = 24
NANO = [
    f"--train.steps={STEPS}", "--model.n-layer=2", "--log.sample=0", "--log.eval-every=0", "--log.eval-batches=2",
    "--log.every=5",
]  # fmt: skip


@pytest.fixture(scope="module")
def real_course(course):
    """The course with its own trainer, which with LINGER waits at step 10 of a job's first start."""
    folder = course.with_name("real")
    shutil.copytree(course, folder, ignore=shutil.ignore_patterns("notebooks", "assets"))
    (folder / "scripts" / "train.py").write_text(PATIENT)
    return folder


def steps_written(outputs):
    text = "".join(path.read_text() for path in outputs.glob("train/2*/steps.jsonl"))
    whole = text[: text.rfind("\n") + 1].splitlines()
    return max((json.loads(line).get("step", 0) for line in whole), default=0)


def final_numbers(outputs):
    every = [json.loads(path.read_text()) for path in outputs.glob("train/2*/metrics.json")]
    (metrics,) = [one for one in every if str(STEPS) in one["exact"]["val_losses"]]
    return metrics["exact"]["val_losses"][str(STEPS)], metrics["launcher"], metrics["world_size"]


@pytest.mark.slurm
def test_the_trainer_pre_empted_on_two_nodes_ends_with_the_loss_of_an_uninterrupted_run(
    slurm, real_course, environ, tmp_path
):
    """To the bit: the same number of ranks, the same launcher."""
    found = []
    for preempted in (False, True):
        outputs = tmp_path / f"outputs-{preempted}"
        job = Submitted(
            slurm, real_course, {**environ, "MANYHANDS_OUTPUTS": str(outputs)} | ({"LINGER": "1"} if preempted else {}),
            "sbatch", "jobs/train.slurm", *NANO,
        )  # fmt: skip
        if preempted:
            wait_until(lambda: steps_written(outputs) >= 5, lambda: job.output)  # noqa: B023
            job.signal_the_script()
            job.start_again_now()
        assert slurm.wait(job.number, PATIENCE_S) == "COMPLETED", job.output
        assert ("resumed from" in job.output) == preempted
        found.append(final_numbers(outputs))
    assert found[0] == found[1] and found[0][1:] == ("torchrun", 2)
