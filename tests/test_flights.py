"""What one preflight leaves for the next, which figures it proposes, and whether a class fits."""

import os
import re
import shutil
import subprocess
import sys

import fake_course
import pytest
from course_copy import copy_course
from manyhands.course.lessons import Lesson
from manyhands.jobs import stamp
from manyhands.launch import devices
from manyhands.launch.processes import Ended
from manyhands.tools import classroom, flights, preflight
from manyhands.tools.lesson_run import FirstError, Outcome, Run

HERE = {"when": "today", "devices": "4 x H200", "cores": "8 of 8", "packages": "numpy 2.0.0, torch 2.13.0"}


def outcome(tmp_path, name="01_good", seconds=20.0, error=None, way="torchrun"):
    run = Run(Lesson(name, tmp_path), way, 2, tmp_path / name)
    return Outcome(run, Ended(0, seconds, 2**30), error and FirstError(error))


@pytest.mark.parametrize(
    ("finished", "resume", "goes_on"),
    [(True, None, False), (True, "unfinished", False), (True, "always", True),
     (False, None, False), (False, "unfinished", True), (False, "always", True)],
)  # fmt: skip
def test_a_preflight_goes_on_where_one_was_interrupted_and_else_as_it_is_told(tmp_path, finished, resume, goes_on):
    flights.write(tmp_path, HERE, [outcome(tmp_path)], finished)
    found, last = flights.begin(tmp_path, resume)
    assert found == goes_on
    assert bool(last) == (finished and not goes_on)  # only what has ended is an event to compare with


# ------------------------------------------------------------------ on GPUs and over nodes


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """planned(*words) -> (status, the runs that this preflight would make, the limit of each in seconds)."""
    fake_course.write_lesson(tmp_path, "01_good", fake_course.GOOD)
    monkeypatch.setenv("MANYHANDS_LOGIN_NODE", "0")
    for name in ("NPROC_PER_NODE", "MANYHANDS_DEVICE", "STARTER"):
        monkeypatch.delenv(name, raising=False)
    seen = {}
    monkeypatch.setattr(preflight, "carry_out", lambda runs, timeout_s, *_: seen.update(runs=runs, timeout_s=timeout_s))

    def plan(*words):
        return preflight.main(list(words), root=tmp_path), seen.get("runs"), seen.get("timeout_s")

    return plan


def test_on_gpus_that_nobody_names_runs_take_turns_with_no_more_ranks_than_gpus(planned, monkeypatch):
    """Side by side on the same GPUs they would take each other's time and memory, and be recorded so."""
    monkeypatch.setattr(devices, "device_named", lambda name: "cuda")
    monkeypatch.setattr(devices, "gpus_here", lambda environ=None: ("cuda", 8))
    _, runs, timeout_s = planned()
    assert {run.device for run in runs} == {"cuda"} and timeout_s == 1200
    assert [run.n_ranks for run in runs] == [8, 2, 2, 4, 4, 8, 8]
    assert preflight.at_once(runs[1], [], 64, 2**40) and not preflight.at_once(runs[1], [runs[0]], 64, 2**40)
    assert planned("--timeout", "77")[2] == 77
    monkeypatch.setattr(devices, "gpus_here", lambda environ=None: ("cuda", 1))
    assert {(run.device, run.n_ranks) for run in planned("--device", "cuda")[1]} == {("cuda", 1)}
    assert {run.device for run in planned()[1]} == {"cpu"}  # the ranks of a lesson would not take one GPU
    monkeypatch.setenv("MANYHANDS_RANKS", "1")  # a site's: here attendees' notebooks take it
    assert {(run.device, run.n_ranks) for run in planned()[1]} == {("cuda", 1)}


def test_in_a_job_of_several_nodes_notebooks_and_scripts_have_ranks_on_all_of_them(planned, tmp_path, monkeypatch):
    (tmp_path / "nodes").write_text("x1\nx2\n")
    for name, value in {"PBS_NODEFILE": str(tmp_path / "nodes"), "NPROC_PER_NODE": "3", "MPIEXEC": "mpiexec"}.items():
        monkeypatch.setenv(name, value)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    _, runs, _ = planned("--device", "cpu")
    assert [(run.way, run.n_ranks, run.nodes) for run in runs] == [
        ("notebook", 6, 2), ("torchrun", 6, 2), ("mpiexec", 6, 2),
    ]  # fmt: skip
    assert not preflight.at_once(runs[0], [runs[1]], 64, 2**40)
    assert "--nproc-per-node=3" in runs[1].command() and runs[2].command()[1:5] == ["-n", "6", "-ppn", "3"]


def test_a_site_without_mpiexec_is_served(planned, monkeypatch, capsys):
    """Each run by mpiexec had failed: no such site was ever ready."""
    monkeypatch.setenv("MANYHANDS_MPIEXEC", "")
    monkeypatch.delenv("MPIEXEC", raising=False)
    _, runs, _ = planned("--device", "cpu")
    assert [run.way for run in runs] == ["notebook", "torchrun", "torchrun"]
    said = capsys.readouterr().out
    assert said.count("warning: no mpiexec here, so no script was run by it: `pip install mpich`, or load") == 1


# ------------------------------------------------------------------ figures for assets/recorded


@pytest.fixture
def recorded(tmp_path):
    path = tmp_path / "recorded" / "03_data_parallel.h200x4.json"
    path.parent.mkdir()
    path.write_text('{\n "lesson": "03_data_parallel"\n}\n')
    return path


def git(folder, *words):
    identity = {f"GIT_{who}_{what}": "x@y" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    done = subprocess.run(
        ["git", "-C", folder, *words], check=True, capture_output=True, text=True, env=os.environ | identity
    )
    return done.stdout


def test_figures_become_one_commit_on_a_branch_and_what_is_staged_stays(tmp_path, recorded, monkeypatch):
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "x")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "x@y")
    course = tmp_path / "course"
    course.mkdir()
    git(course, "init", "-q")
    (course / "README.md").write_text("a course")
    git(course, "add", ".")
    git(course, "commit", "-qm", "a course")
    (course / "mine.txt").write_text("half done")
    git(course, "add", "mine.txt")
    before = git(course, "status", "--porcelain=v2", "--branch")
    take = flights.propose([recorded], course, "preflight-1", tmp_path / "recorded.patch")
    assert git(course, "status", "--porcelain=v2", "--branch") == before
    assert not (tmp_path / "recorded.patch").exists()
    git(course, "reset", "-q")
    subprocess.run(take.split(), cwd=course, check=True, capture_output=True)
    assert (course / "assets" / "recorded" / recorded.name).read_text() == recorded.read_text()
    assert git(course, "diff", "--stat", "HEAD~1", "--name-only") == f"assets/recorded/{recorded.name}\n"


# ------------------------------------------------------------------ a class


@pytest.fixture
def course_of(tmp_path, root, monkeypatch):
    """course_of(site, **wishes): we are in a course whose job files are written for it."""

    def write(site, **wishes):
        shutil.copytree(root / "jobs", tmp_path / "jobs")
        monkeypatch.chdir(tmp_path)
        stamp.stamp(site, **wishes, folder=tmp_path / "jobs")
        return {path.stem: classroom.ClassJob.read(path, scheduler) for path, scheduler in classroom.job_files()}

    return write


def test_a_class_sees_what_it_needs_and_what_its_queue_does_not_allow_and_the_report_says_so(
    course_of, tmp_path, capsys
):
    course_of("perlmutter", account="Hands")

    def report():
        fit = classroom.remembered(tmp_path, list((flights.read(tmp_path) or {"runs": {}})["runs"].values()))
        return preflight.page(tmp_path, [], {"when": "now", "host": "here"}, [], 1.0, fit=fit)

    def remember(seconds):
        ran = [outcome(tmp_path, "03_data_parallel", seconds), outcome(tmp_path, "02_collectives", way="notebook")]
        flights.write(tmp_path, HERE, ran, True)

    assert "node hours" not in report(), "no class was asked about"
    remember(120.0)
    words = ["--attendees", "30", "--nodes", "8", "--gpus-per-node", "4", "--output", str(tmp_path)]
    assert preflight.main(words, root=tmp_path) == 1
    said = re.sub(" +", " ", capsys.readouterr().out)
    assert "ports 20 600 10,000 to 19,999" in said and "memory of one: measured by the last preflight here" in said
    # 8 turns of 2, or at most 10 min
    assert "ddp_shakespeare.slurm 2 4 8 16 80 10.0 40 debug: 8 nodes, 00:30:00" in said
    (hours,) = re.findall(r"node hours, each job once per attendee, at most: (\S+)", said)
    not_allowed = "does not fit: sweep.slurm: queue debug of Perlmutter (NERSC) takes 5 of your jobs"
    assert not_allowed in said
    flights.begin(tmp_path, None)  # a preflight after it reckons with what it has measured
    remember(240.0)
    text = report()
    assert f"<b>{hours} node hours</b>" in text and not_allowed in text
    assert "<td>8</td><td>32</td><td>80</td><td>10.0</td>" in text  # turns, min measured and at most, node hours


# ------------------------------------------------------------------ as a job, where there is no scheduler


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    return fake_course.take_the_place_of_the_lessons(
        copy_course(tmp_path_factory.mktemp("flight") / "many-hands", only=())
    )


def start_job(course, *words, **environ):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PBS_", "MANYHANDS_DEVICE"))}
    clean |= {"VENV": sys.prefix, "NPROC_PER_NODE": "2", "MANYHANDS_LOGIN_NODE": "0", **environ}
    return subprocess.Popen(
        ["bash", "jobs/preflight.pbs", *words], cwd=course, env=clean, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_bash_runs_the_preflight_of_a_job_on_one_node_which_goes_on_after_an_interruption(made_up, monkeypatch):
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "x")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "x@y")
    git(made_up, "init", "-q")
    git(made_up, "commit", "-q", "--allow-empty", "-m", "a course")
    lessons, output = [f"--lesson=0{n}" for n in (1, 2, 3, 4)], made_up / "outputs" / "preflight"
    first = start_job(made_up, *lessons)
    for line in first.stdout:
        if "03_hangs notebook" in line:
            break
    first.terminate()
    said = first.communicate(timeout=300)[0]
    assert first.returncode == 130 and "interrupted after 2 of 12 runs" in said, said
    again = "python scripts/preflight.py --lesson 0{} --notebooks --ranks 2 --device cuda"
    fake_course.remember_an_event(output, [again.format(2), again.format(4)])
    second = start_job(made_up, "--timeout=60", *lessons)
    said = second.communicate(timeout=800)[0]
    assert second.returncode == 1 and "1 run of 12 went well before: kept" in said, said
    fake_course.assert_named(output, "notebook on 2 ranks", ["torchrun on 2 ranks", "mpiexec on 2 ranks"])
    (branch,) = re.findall(r"git cherry-pick (preflight-\S+)", said)
    kept = [f"assets/recorded/{path.name}" for path in sorted((output / "recorded").iterdir())]
    assert git(made_up, "ls-tree", "-r", "--name-only", branch).split() == kept
    assert re.findall(r"recorded/(\w+)", " ".join(kept)) == ["01_good", "03_hangs", "04_slow"]
    assert git(made_up, "log", "--format=%s", branch).splitlines() == [
        "Recorded by a preflight: 3 lessons on GPUs", "a course",
    ]  # fmt: skip


@pytest.mark.full
@pytest.mark.ranks
def test_bash_runs_the_hour_on_gpus_of_a_job_and_a_limit_of_time_leaves_it_to_be_started_again(made_up):
    job = start_job(made_up, "--gpu-hour", PREFLIGHT_ARGS="--device cpu")
    said = [next(line for line in job.stdout if line.startswith("nano on one"))]
    job.terminate()
    said.append(job.communicate(timeout=120)[0])
    assert job.returncode == 130, said
    assert re.search(r"gpu-hour: interrupted; \d+ rows are missing: start it again", said[1]), said
