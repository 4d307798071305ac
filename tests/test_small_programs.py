"""A program of a few lines runs beside a notebook under each launcher; what goes wrong is a line, not a traceback."""

import os
import platform
from types import SimpleNamespace

import pytest
from manyhands.launch.processes import supervise
from manyhands.notebook import small_programs
from manyhands.notebook.engine_processes import Processes
from manyhands.notebook.small_programs import run_under

WHO = """import os
letter = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "PMI_RANK", "PMI_SIZE") if name in os.environ}
print(" ".join(f"{name}={value}" for name, value in letter.items()) or "no letter")
"""


def test_a_launchers_letter_reaches_the_program_and_that_of_another_one_does_not(monkeypatch):
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("PMI_RANK", "7")
    assert run_under("python", WHO) == ["no letter"]


@pytest.mark.parametrize(("live", "said"), [("1", ["waiting for python (processes: 1) ..."]), ("0", [])])
def test_a_start_that_takes_long_says_so_while_it_runs_but_not_in_stored_output(monkeypatch, capsys, live, said):
    monkeypatch.setattr(small_programs, "WAIT_S", 0.01)
    monkeypatch.setenv("MANYHANDS_LIVE", live)
    assert run_under("python", "import time; time.sleep(1); print('done')") == ["done"]
    assert capsys.readouterr().out.splitlines() == said


@pytest.mark.ranks
def test_torchrun_starts_as_many_as_it_is_told_and_lines_come_in_order(monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")  # a print is then two writes
    assert run_under("torchrun", WHO, 2) == ["RANK=0 WORLD_SIZE=2", "RANK=1 WORLD_SIZE=2"]


IN_A_JOB = {
    "local": {},
    "slurm": {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "nowhere[1-2]"},
    "pbs": {"PBS_JOBID": "7", "PBS_NODEFILE": "{folder}/nodes"},
}


@pytest.mark.ranks
@pytest.mark.parametrize("job", IN_A_JOB)
def test_mpiexec_starts_all_beside_the_notebook_also_inside_a_job_of_two_nodes(monkeypatch, tmp_path, job):
    """The other node does not have the program's file."""
    (tmp_path / "nodes").write_text(f"{platform.node()}\nnowhere\n")
    monkeypatch.setenv("MANYHANDS_LOGIN_NODE", "0")
    for name, value in IN_A_JOB[job].items():
        monkeypatch.setenv(name, value.format(folder=tmp_path))
    if small_programs.mpi_launcher(2, environ={}) is None:
        pytest.skip("no MPI here")
    assert run_under("mpiexec", WHO, 2) == ["PMI_RANK=0 PMI_SIZE=2", "PMI_RANK=1 PMI_SIZE=2"]


def test_no_sigpipe_ends_an_mpiexec_that_writes_to_a_process_that_is_gone(monkeypatch, tmp_path):
    """About one start of MPICH's in 400 on a busy machine."""
    itself = ["/bin/sh", "-c", "kill -PIPE $$; echo alive; exit 0"]
    monkeypatch.setattr(small_programs, "_command", lambda *_: itself)
    assert run_under("mpiexec", WHO, 2) == ["alive"]
    assert supervise(itself, log=tmp_path / "log", timeout_s=20).status == 0
    ranks = SimpleNamespace(folder=tmp_path, _server=None, _children=[])
    Processes._spawn(ranks, "engines", ["its.module"], dict(os.environ), itself)
    assert ranks._children[0].wait(20) == 0


def test_a_program_that_fails_shows_the_end_of_what_it_said():
    heard = run_under("python", "print('begun')\nraise ValueError('no luck')")
    assert heard[0] == "exit status 1:" and heard[-1] == "ValueError: no luck"


def test_a_program_that_does_not_end_is_stopped():
    assert run_under("python", "import time; time.sleep(60)", timeout_s=0.5) == [
        "no end within 0.5 s, so it was stopped"
    ]


@pytest.mark.parametrize(("name", "value"), [("MANYHANDS_MPI", "off"), ("MANYHANDS_LOGIN_NODE", "1")])
def test_where_mpi_is_not_welcome_it_is_left_out(monkeypatch, name, value):
    for variable in ("PBS_NODEFILE", "SLURM_JOB_ID", "PBS_JOBID", "SLURMD_NODENAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, value)
    assert run_under("mpiexec", WHO, 2) == ["there is no MPI here, so this start is left out"]


def test_another_launcher_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="unknown launcher 'qsub'; use one of torchrun, mpiexec, python"):
        run_under("qsub", WHO)
