"""Lessons and job files on a real Slurm of two nodes: the same numbers as under torchrun, to the bit.

Slurm is started for this file and stopped at its end (see slurm_nodes). Where it cannot be, the tests skip and say why;
in the project's CI, which has it, that is a failure. Jobs are polled: `sbatch --wait` looks ever more rarely.
"""

import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

import jupytext
import pytest
from course_copy import copy_course, only_the_start_of_lesson_03
from fake_course import assert_named, remember_an_event, take_the_place_of_the_lessons
from manyhands.course.lessons import find_lessons
from manyhands.launch import recorded_runs
from manyhands.launch.metrics import compare
from manyhands.tools.lesson_run import Run
from slurm_nodes import ENDED, slurm_of_this_machine, wait_until_gone

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
PATIENCE_S = 400  # a busy machine takes minutes for what takes seconds otherwise
RANKS, NODES = 4, 2


@pytest.fixture(scope="session")
def slurm():
    with slurm_of_this_machine() as nodes:
        yield nodes
        left = nodes.folder
    assert not left.exists()


@pytest.fixture(scope="session")
def course(tmp_path_factory):
    return copy_course(tmp_path_factory.mktemp("slurm") / "many-hands", only=("03",))


@pytest.fixture(scope="module")
def environ(tmp_path_factory, course):
    """What every run gets: this Python, and outputs in one place. Caches of the user's own home serve the corpus."""
    return {
        "VENV": str(Path(sys.executable).parents[1]),
        "MANYHANDS_OUTPUTS": str(tmp_path_factory.mktemp("outputs")),
        "NPROC_PER_NODE": "2",
    }


def flags(name):
    short = find_lessons(only=[name])[0].short
    return [part for key, value in short.items() for part in (f"--{key.replace('_', '-')}", str(value))]


def metrics(environ, lesson):
    """What the last run of this lesson wrote."""
    latest = os.path.join(environ["MANYHANDS_OUTPUTS"], lesson, "latest")
    with open(os.path.join(latest, "metrics.json")) as file:
        return json.load(file)


def assert_same_numbers(found, expected, launcher):
    assert (found["launcher"], found["world_size"]) == (launcher, RANKS)
    assert compare(found, expected) == []


@pytest.fixture(scope="session")
def short_course(course, tmp_path_factory):
    """The course with the start of lesson 03 alone: what starts its ranks is what is looked at."""
    folder = tmp_path_factory.mktemp("short") / "many-hands"
    return only_the_start_of_lesson_03(Path(shutil.copytree(course, folder)))


@pytest.fixture(scope="session")
def of_short_course(short_course, tmp_path_factory):
    """The metrics of its lesson 03 on four ranks under torchrun, with the lesson's short flags."""
    (lesson,) = find_lessons(short_course, only=["03"])
    outcome = Run(lesson, "torchrun", RANKS, tmp_path_factory.mktemp("run"), lesson.short).carry_out(PATIENCE_S)
    assert not outcome.error, outcome.error
    return outcome.metrics


@pytest.mark.ranks
@pytest.mark.parametrize("mpi", [[], ["--mpi=pmi2"]], ids=["without pmi", "pmi2"])
def test_srun_gives_the_numbers_of_torchrun(slurm, short_course, environ, of_short_course, mpi):
    lesson = "03_data_parallel"
    done = slurm.run(
        "srun", *mpi, f"--nodes={NODES}", f"--ntasks={RANKS}", "--kill-on-bad-exit=1", sys.executable,
        f"scripts/{lesson}.py", *flags(lesson), environ=environ, cwd=short_course, timeout_s=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "node1: ranks 0-1" in done.stdout and "node2: ranks 2-3" in done.stdout
    assert_same_numbers(metrics(environ, lesson), of_short_course, "srun")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("passed", "launcher"),
    [
        ({}, "torchrun"),
        ({"SRUN_FLAGS": "--mpi=pmi2"}, "torchrun"),  # torchrun inherits another launcher's variables
        ({"STARTER": "srun"}, "srun"),  # as on Frontier
    ],
)
def test_sbatch_runs_the_job_file_on_two_nodes(slurm, short_course, environ, of_short_course, passed, launcher):
    command = ["sbatch", "jobs/ddp_shakespeare.slurm", *flags("03_data_parallel")]
    job = slurm.submit(*command, environ=environ | passed, cwd=short_course)
    state = slurm.wait(job, timeout_s=PATIENCE_S)
    output = (short_course / f"ddp_shakespeare.o{job}").read_text()
    assert state == "COMPLETED", output
    assert "node1: ranks 0-1" in output and "node2: ranks 2-3" in output
    assert_same_numbers(metrics(environ, "03_data_parallel"), of_short_course, launcher)
    assert not [name for name in os.listdir(environ["MANYHANDS_OUTPUTS"]) if name.startswith("PMI")]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("limit_s", "said", "well"),
    [(PATIENCE_S, r"slurm's job \d+: completed.*; its output is ddp_shakespeare\.o\d+", True),
     (0.5, r"slurm's job \d+ was cancelled after 0\.5 s: .*", False)],
)  # fmt: skip
def test_preflight_submits_one_small_job_and_cancels_it_at_its_limit(slurm, short_course, environ, limit_s, said, well):
    code = f"from manyhands.tools import preflight; print(*preflight.try_queue({limit_s}), sep='|')"
    environ = environ | {"PYTHONPATH": str(short_course / "scripts")}
    done = slurm.run(sys.executable, "-c", code, environ=environ, cwd=short_course, timeout_s=PATIENCE_S + 60)
    sentence, _, went_well = done.stdout.strip().splitlines()[-1].rpartition("|")
    assert re.fullmatch(said, sentence) and went_well == str(well), done.stdout + done.stderr
    number = re.search(r"\d+", sentence)[0]
    assert slurm.wait(int(number)) == ("COMPLETED" if well else "CANCELLED")


@pytest.mark.lesson
def test_the_recorded_run_of_lesson_04_is_what_this_job_still_computes(short_run):
    content = recorded_runs.numbers("04_ddp_shakespeare.json")["metrics"]
    found = short_run(find_lessons(only=["03_data_parallel"])[0], "torchrun", RANKS)
    if found["corpus"]["sha256"] != content["corpus"]["sha256"]:
        pytest.skip("recorded on Shakespeare, which is not here: name its file in MANYHANDS_SHAKESPEARE")
    again = "record it again: python tests/record_first_job.py run"
    assert content["parameters"]["global_batch"] == found["parameters"]["global_batch"], again
    assert found["exact"]["losses"][:4] == pytest.approx(content["exact"]["losses"][:4], abs=1e-3), again


HELLO = """\
from manyhands import join, leave, say
ranks = join(globals())
say(f"rank {ranks.rank} of {ranks.world_size} on {ranks.host}")
leave()
"""


@pytest.fixture
def hello(tmp_path):
    script = tmp_path / "hello.py"
    script.write_text(HELLO)
    return script


MUCH_TEXT = """\
import random
text = bytes(random.Random(1).choices(range(32, 127), k=5000))
kept = [bytearray(text[:n]) for _ in range(3000) for n in (600, 700, 800, 1000, 2000, 3000, 5000)]
del kept[::8]
"""


def test_ranks_with_much_text_in_memory_meet_over_pmi2(slurm, environ, tmp_path):
    """MPICH sends what lies behind its address too, and Slurm's lines are short: `launch.pmi_lines`."""
    script = tmp_path / "hello.py"
    script.write_text(HELLO.replace("ranks = join", MUCH_TEXT + "ranks = join"))
    step = ["srun", "-N2", "-n4", "--mpi=pmi2", "--time=1", sys.executable, script]
    done = slurm.run(*step, environ=environ)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines())[-RANKS:] == [
        f"[rank {r}] rank {r} of 4 on node{r // 2 + 1}" for r in range(RANKS)
    ]


def test_qsub_runs_the_pbs_file_on_two_nodes(slurm, short_course, environ):
    """Through Debian's qsub, which splits `-v` values at blanks: hence =. Below is Slurm, so srun starts torchrun."""
    passed = {**environ, "LESSON_ARGS": "--steps=6 --repeats=1"}
    job = slurm.submit("qsub", "-V", "jobs/ddp_shakespeare.pbs", environ=passed, cwd=short_course)
    state = slurm.wait(job, timeout_s=PATIENCE_S)
    output = "".join(path.read_text() for path in short_course.glob(f"ddp_shakespeare*{job}"))
    assert state == "COMPLETED", output
    assert "4 ranks, launcher torchrun" in output
    assert [f"rank {r} of 4 on node{r // 2 + 1}" in output for r in range(RANKS)] == [True] * RANKS
    assert metrics(environ, "03_data_parallel")["parameters"]["steps"] == 6


@pytest.fixture(scope="session")
def made_up(tmp_path_factory):
    return take_the_place_of_the_lessons(copy_course(tmp_path_factory.mktemp("flight") / "many-hands", only=()))


@pytest.mark.ranks
def test_a_preflight_is_a_job_on_all_nodes_that_goes_on_where_it_was_killed(slurm, made_up, environ):
    """A broken, a hanging and a slow lesson are named, the others are well, and the figures are proposed."""
    output, command = made_up / "outputs" / "preflight", ["sbatch", "jobs/preflight.slurm"]
    environ = environ | {"MANYHANDS_DEVICE": ""}
    first = slurm.submit(*command, environ=environ, cwd=made_up)
    log, deadline = made_up / f"preflight.o{first}", time.monotonic() + PATIENCE_S
    while not log.exists() or "03_hangs notebook" not in log.read_text():
        assert time.monotonic() < deadline and slurm.state(first) not in ENDED, log.read_text()
        time.sleep(0.5)
    slurm.run("scancel", first)
    assert slurm.wait(first) == "CANCELLED"
    slurm.drain()
    again = "python scripts/preflight.py --lesson 0{} --notebooks --ranks 4 --device cuda"
    remember_an_event(output, [again.format(2), again.format(4)])
    second = slurm.submit(*command, "--timeout=100", environ=environ, cwd=made_up)
    assert slurm.wait(second, timeout_s=800) == "FAILED"
    said = (made_up / f"preflight.o{second}").read_text()
    assert "1 run of 15 went well before: kept" in said, said
    assert_named(output, "notebook on 4 ranks", ["torchrun on 4 ranks", "mpiexec on 4 ranks"])
    assert f"{second} of slurm on node1, node2" in (output / "report.html").read_text()
    for way in ("notebook-4", "torchrun-4", "mpiexec-4"):
        (found,) = (output / "runs" / "05_nodes" / way / "outputs").glob("05_nodes/[!l]*/metrics.json")
        assert json.loads(found.read_text())["exact"]["hosts"] == ["node1", "node1", "node2", "node2"]
    recorded = sorted(path.name.split(".")[0] for path in (output / "recorded").iterdir())
    assert recorded == ["01_good", "03_hangs", "04_slow", "05_nodes"]
    assert (output / "recorded.patch").read_text().count("\n+++ b/assets/recorded/") == 4


def test_srun_that_starts_worlds_of_one_is_noticed(slurm, environ, hello):
    """Without PMI each mpi4py is rank 0 of 1, with exit status 0. `join` takes Slurm's word, and sees a broken PMI."""
    bare = "from mpi4py import MPI; print(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)"
    done = slurm.run("srun", "-N2", "-n2", sys.executable, "-c", bare)
    assert (done.returncode, done.stdout) == (0, "0 1\n0 1\n")
    done = slurm.run("srun", "-N2", "-n2", sys.executable, hello, environ=environ)
    assert done.returncode == 0 and "rank 1 of 2 on node2" in done.stdout
    done = slurm.run("srun", "-N2", "-n2", "--mpi=pmi2", "env", "-u", "PMI_FD", sys.executable, hello, environ=environ)
    assert done.returncode == 2
    assert done.stderr.count("as rank 0 of 2, but MPI says rank 0 of 1") == 1 and "srun --mpi=pmi2" in done.stderr


def test_a_cell_submits_watches_and_cancels_jobs_of_slurm(slurm, course, environ, monkeypatch, capsys):
    from manyhands.jobs import submit

    for name, value in {**slurm.environ, **environ}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(course / "notebooks")
    assert submit.scheduler() == "slurm"
    # so that nothing runs before it is looked at
    before = slurm.submit("sbatch", "--nodes=2", "--output=/dev/null", "--wrap=sleep 600")
    first = submit.submit("ddp_shakespeare", "--no-such-flag 1")
    second = submit.submit("ddp_shakespeare")
    assert second.state()[0] == "waiting"
    second.cancel()
    assert second.watch(PATIENCE_S) == "cancelled"
    slurm.run("scancel", before)
    assert first.watch(PATIENCE_S) == "failed"
    first.grep("no-such-flag")
    said = capsys.readouterr().out
    assert "$ sbatch jobs/ddp_shakespeare.slurm --no-such-flag 1\nSubmitted batch job" in said
    assert f"$ scancel {second.number}" in said and "running: node[1-2]" in said
    assert "--no-such-flag is unknown" in said


TINY = """\
# %% tags=["parameters"]
n_ranks = None  # processes: all slots of the allocation
# %% tags=["active-ipynb"]
# from manyhands.notebook.start import start_ranks
# hands = start_ranks("90_hands", globals())
# %%
# %%ranks
import torch, torch.distributed as dist
from manyhands import join, leave, mpi_world, say
ranks = join(globals(), quiet=True)
total = torch.tensor([float(ranks.rank)])
dist.all_reduce(total)
say(f"rank {ranks.rank} of {ranks.world_size} on {ranks.host}, MPI {mpi_world().size}, sum {total.item():g}")
leave()
# %% tags=["active-ipynb"]
# hands.stop()
"""


def test_a_notebook_inside_a_job_step_starts_its_ranks_on_all_nodes_of_the_job(slurm, environ, tmp_path):
    """As a hub spawns it: the notebook's server is a job step. mpiexec would die there, srun --overlap does not."""
    for folder in ("scripts", "notebooks"):
        (tmp_path / folder).mkdir()
    (tmp_path / "scripts" / "90_hands.py").write_text(TINY)
    jupytext.write(jupytext.read(tmp_path / "scripts" / "90_hands.py"), tmp_path / "notebooks" / "90_hands.ipynb")
    papermill = f"{sys.executable} -m papermill --no-progress-bar -k python3 90_hands.ipynb out.ipynb"
    job = slurm.submit(
        "sbatch", f"--nodes={NODES}", "--ntasks-per-node=2", f"--output={tmp_path}/out",
        f"--wrap=srun --nodes=1 --ntasks=1 --ntasks-per-node=1 {papermill}",
        environ=environ | {"HOME": str(tmp_path)}, cwd=tmp_path / "notebooks",
    )  # fmt: skip
    state = slurm.wait(job, timeout_s=PATIENCE_S)
    assert state == "COMPLETED", (tmp_path / "out").read_text()
    said = (tmp_path / "notebooks" / "out.ipynb").read_text()
    for rank in range(RANKS):
        assert f"rank {rank} of 4 on node{rank // 2 + 1}, MPI 4, sum 6" in said
    wait_until_gone(slurm.folder, b"ipyparallel")  # engines do not outlive their notebook
