"""scripts/launch.py: the right command for where it is, and a keeper that ends what hangs and leaves nothing behind."""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from manyhands.course.lessons import find_lessons
from manyhands.jobs import stamp
from manyhands.launch import commands, program
from manyhands.launch.allocation import ENGINES
from manyhands.launch.commands import blame, command_for
from manyhands.launch.processes import Torchrun
from manyhands.launch.program import DIVERGED, NO_ROOM, STATUS_FILE
from manyhands.notebook.small_programs import run_under
from manyhands.tools.doctor_in_job import numbers_in
from manyhands.tools.lesson_run import Run
from manyhands.train.preemption import GRACE_S

pytestmark = pytest.mark.ranks

PROGRAM = ["scripts/train.py", "--train.steps", "20"]


@pytest.fixture
def nodefile(tmp_path):
    """Two nodes of PBS with four slots each, which repeats a host per slot."""
    path = tmp_path / "nodes"
    path.write_text("x1\n" * 4 + "x2\n" * 4)
    return path


SLURM = {"SLURM_JOB_ID": "123", "SLURM_JOB_NODELIST": "nid[01-02]", "SLURM_JOB_NUM_NODES": "2"}


@pytest.fixture
def srun(tmp_path, monkeypatch):
    """A program of that name on PATH."""
    program_in(tmp_path / "slurm", "srun")
    monkeypatch.setenv("PATH", f"{tmp_path / 'slurm'}:{os.environ['PATH']}")


def started(words):
    """The command that ends in `words` and the program."""
    return [*words.split(), sys.executable, *PROGRAM]


PBS = {"PBS_JOBID": "77.server", "MPIEXEC": "mpiexec", "MPIEXEC_FLAGS": "--cpu-bind none"}


def test_on_one_machine_it_is_torchrun_which_passes_signals_on(nodefile):
    command = command_for(PROGRAM, {}, nproc=4)
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert {"--standalone", "--nproc-per-node=4"} < set(command) and command[-3:] == PROGRAM
    (signals,) = [word for word in command if word.startswith("--signals-to-handle=")]
    assert "SIGUSR1" in signals
    nodefile.write_text("x1\nx1\n")
    command = command_for(PROGRAM, PBS | {"PBS_NODEFILE": str(nodefile)})
    assert "--standalone" in command and "--nproc-per-node=2" in command, "a job of one node is one machine"


def test_in_a_job_of_several_nodes_it_is_mpiexec_or_srun_with_the_sites_flags(nodefile, srun):
    pbs, slurm = PBS | {"PBS_NODEFILE": str(nodefile)}, SLURM | {"SRUN_FLAGS": "--gpus-per-task=1"}
    assert command_for(PROGRAM, pbs) == started("mpiexec -n 8 -ppn 4 --cpu-bind none")
    assert command_for(PROGRAM, slurm, nproc=4) == started(
        "srun --nodes=2 --ntasks=8 --ntasks-per-node=4 --kill-on-bad-exit=1 --gpus-per-task=1"
    )
    assert "--overlap" in command_for(PROGRAM, {**SLURM, "SLURM_STEP_ID": "0"}, nproc=4)
    # torchrun starts once on each node, and all meet on the first
    for environ, start, place in (
        (pbs, "mpiexec -n 2 -ppn 1", "x1:20077"),
        (SLURM, "srun --nodes=2 --ntasks=2 --ntasks-per-node=1", "nid01:20123"),
    ):
        command = command_for(PROGRAM, environ, nproc=3, starter="torchrun")
        assert " ".join(command).startswith(start)
        assert {"--nnodes=2", "--nproc-per-node=3", f"--rdzv-endpoint={place}"} < set(command)
        more = {"TORCHRUN_FLAGS": "--numa-binding=node", "HOST_SUFFIX": "i"}
        command = command_for(PROGRAM, environ | more, nproc=3, starter="torchrun")
        assert {"--numa-binding=node", f"--rdzv-endpoint={place.replace(':', 'i:')}"} < set(command)


def test_on_aurora_mpiexec_starts_each_rank_on_cores_of_its_own(nodefile):
    site = stamp.site_named("aurora").settings
    environ = PBS | {"PBS_NODEFILE": str(nodefile), "MPIEXEC_FLAGS": site["MPIEXEC_FLAGS"]}
    command = command_for(PROGRAM, environ, nproc=int(site["NPROC_PER_NODE"]), starter=site["STARTER"])
    *start, cores = command[: -len(PROGRAM) - 1]
    assert start == ["mpiexec", "-n", "24", "-ppn", "12", "--pmi=pmix", "--cpu-bind"]
    kind, *lists = cores.split(":")
    own = [set(numbers_in(one)) for one in lists]
    assert kind == "list" and [len(one) for one in own] == [4] * 12 and len(set().union(*own)) == 48
    assert not {0, 52} & set().union(*own), "the system keeps these"
    for variable in ("CCL_PROCESS_LAUNCHER=pmix", "CCL_ATL_TRANSPORT=mpi", "CCL_KVS_MODE=mpi"):
        assert f" {variable}" in site["site_setup"]


IMAGE = {"IMAGE": "course.sif", "IMAGE_FLAGS": "--nv --bind '/a b'"}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_ranks_of_an_image_are_started_by_its_engine_and_torchrun_in_it_by_itself(nodefile, srun, tmp_path, engine):
    """Stand-ins for the engines: empty programs. No engine runs in these tests."""
    program_in(tmp_path / "slurm", engine)
    environ = IMAGE | {"ENGINE": engine, "PATH": os.environ["PATH"]}
    here, tmp = os.getcwd(), tempfile.gettempdir()
    seen = [f"--volume={here}:{here}", f"--volume={tmp}:{tmp}", f"--workdir={here}"]
    words = {
        "apptainer": ["apptainer", "exec"], "singularity": ["singularity", "exec"],
        "podman-hpc": ["podman-hpc", "run", "--rm", "--env-host", "--network=host", "--ipc=host", *seen],
    }  # fmt: skip
    pyxis = engine == "pyxis"
    python = ["python"] if pyxis else [*words[engine], "--nv", "--bind", "/a b", "course.sif", "python"]
    torchrun = [*python, "-m", "torch.distributed.run"]
    pbs = PBS | {"PBS_NODEFILE": str(nodefile)} | environ
    container = ["--container-image=course.sif", f"--container-mounts={here}:{here},{tmp}:{tmp}"]
    container += [f"--container-workdir={here}", "--nv", "--bind", "/a b"]
    start = "srun --nodes=2 --ntasks={} --ntasks-per-node={} --kill-on-bad-exit=1".format
    for n, starter, then in ((8, "srun", python), (2, "torchrun", torchrun)):
        command = command_for(PROGRAM, SLURM | environ, nproc=4, starter=starter)
        assert " ".join(command).startswith(" ".join([start(n, n // 2), *container * pyxis, *then])), command
    one = command_for(PROGRAM, SLURM | environ | {"SLURM_JOB_NODELIST": "nid01"}, nproc=4, starter="torchrun")
    assert one[one.index("--standalone") - len(torchrun) : one.index("--standalone")] == torchrun
    assert any(word.startswith("--signals-to-handle=") for word in one) and (one[0] == "srun") == pyxis
    if pyxis:
        for wrong in (pbs, environ):
            with pytest.raises(commands.RanksError, match="pyxis starts ranks only by srun, in a Slurm job"):
                command_for(PROGRAM, wrong, nproc=4)
    else:
        for starter, then in (("mpiexec", python), ("torchrun", torchrun)):
            command = command_for(PROGRAM, pbs, nproc=4, starter=starter)
            assert command[: len(then) + 7][-len(then) :] == then and command[-3:] == PROGRAM, command


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        ("docker", "ENGINE=docker is unknown; use one of apptainer, singularity, podman-hpc, pyxis"),
        ("singularity", "found no singularity for IMAGE=course.sif: load its module in site_setup"),
    ],
)
def test_an_engine_that_is_unknown_or_not_here_is_a_sentence(engine, sentence):
    with pytest.raises(commands.RanksError, match=sentence):
        command_for(PROGRAM, IMAGE | {"ENGINE": engine, "PATH": "/nowhere"}, nproc=2)


def test_an_older_torch_in_an_image_is_not_given_flags_that_it_lacks(monkeypatch):
    from torch.distributed import run

    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc-per-node")
    monkeypatch.setattr(run, "get_args_parser", lambda: parser)
    words = ["--nproc-per-node=2", "--signals-to-handle=SIGTERM", "--shutdown-timeout=120", "x.py", "--steps=3"]
    assert commands._known(words) == ["--nproc-per-node=2", "x.py", "--steps=3"]


def program_in(folder, name, text="#!/bin/sh\n"):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    return folder / name


@pytest.fixture
def tmrsh(tmp_path):
    """A stand-in for pbs_tmrsh, which starts its words as they are, with an empty environment and in another folder.

    Like the real one it passes no signal on: what it has started outlives it.
    """
    text = f'#!/bin/bash\nhost=$1; shift; cd /; env -i HOST="$host" "$@" >>{tmp_path}/$host & wait $!\n'
    return program_in(tmp_path / "bin", "pbs_tmrsh", text)


def on_nodes(tmrsh, folder, shown, *words, **environ):
    environ = os.environ | {"MANYHANDS_OUTPUTS": str(folder / "out")} | environ
    command = ["bash", commands.ON_NODES, tmrsh, "x1 x2", "bash", "-c", shown, "sh", *words]
    return subprocess.Popen(command, env=environ, cwd=folder, stderr=subprocess.PIPE, text=True)


WAITS = 'trap "echo told; exit $1" TERM; echo runs; for i in {1..6000}; do sleep 0.1; done'


def test_where_one_node_fails_the_others_are_ended_and_the_run_has_its_status(tmrsh, tmp_path):
    """Each node has the words, the folder and the environment of the run, but for what PBS says of its tasks."""
    shown = 'echo "$HOST $PWD $WORDS $PBS_TASKNUM|$1" >&2; '
    fails = f'if [ "$HOST" = x2 ]; then until [ -s x1 ]; do :; done; exit 7; fi; {WAITS}'.replace("exit $1", "exit 0")
    environ = {"WORDS": 'it\'s a "quoted" $word', "PBS_TASKNUM": "1"}
    run = on_nodes(tmrsh, tmp_path, shown + fails, "two  words; $(id)", **environ)
    *seen, last = run.communicate(timeout=100)[1].splitlines()
    assert run.returncode == 7
    assert last == "launch.py: the part of this run on x2 ended with status 7, so the others end, too"
    assert sorted(seen) == [f'{host} {tmp_path} it\'s a "quoted" $word |two  words; $(id)' for host in ("x1", "x2")]
    assert (tmp_path / "x1").read_text() == "runs\ntold\n"
    assert list((tmp_path / "out" / "jobs").iterdir()) == []


@pytest.mark.parametrize(("sent", "of_x1"), [(signal.SIGUSR1, "runs\ntold\n"), (signal.SIGTERM, "runs\n")])
def test_a_signal_reaches_all_nodes_but_the_first_which_qdel_has_told_itself(tmrsh, tmp_path, sent, of_x1):
    """A second SIGTERM would end its torchrun before its ranks have saved; that one rank hears is enough."""
    x1 = f"trap 'echo told; exit 0' TERM; echo runs; until grep -qs told {tmp_path}/x2; do sleep 0.1; done; sleep 1"
    run = on_nodes(tmrsh, tmp_path, f'if [ "$HOST" = x1 ]; then {x1}; exit; fi; {WAITS}', "0")
    while not all((tmp_path / host).exists() and (tmp_path / host).read_text() for host in ("x1", "x2")):
        assert run.poll() is None
        time.sleep(0.05)
    run.send_signal(sent)
    assert run.communicate(timeout=100)[1] == "" and run.returncode == 0
    assert (tmp_path / "x1").read_text() == of_x1 and (tmp_path / "x2").read_text() == "runs\ntold\n"


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({"NPROC_PER_NODE": "3"}, 3),
        ({**SLURM, "SLURM_GPUS_ON_NODE": "4"}, 4),
        ({**SLURM, "SLURM_NTASKS_PER_NODE": "6"}, 6),
        ({**SLURM, "SLURM_NTASKS_PER_NODE": "6", "NPROC_PER_NODE": "2"}, 2),
    ],
)
def test_ranks_per_node_come_from_you_from_the_gpus_or_from_the_scheduler(monkeypatch, srun, environ, ranks):
    monkeypatch.setattr(commands, "_gpus_here", lambda environ: 0)
    command = command_for(PROGRAM, environ)
    assert f"--nproc-per-node={ranks}" in command or f"--ntasks-per-node={ranks}" in command
    assert f"--ntasks-per-node={5}" in command_for(PROGRAM, {**SLURM, **environ}, nproc=5)


@pytest.mark.parametrize("starter", ["torchrun", "mpiexec"])
@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}])
def test_in_a_container_of_a_slurm_job_which_has_no_srun_ranks_start_on_this_node(
    root, script, monkeypatch, starter, step
):
    monkeypatch.setenv("PATH", f"{sys.prefix}/bin")
    program = script("import os\nprint('rank', os.environ.get('RANK') or os.environ['PMI_RANK'], flush=True)\n")
    words = ["--nproc", 2, "--starter", starter] if starter == "mpiexec" else ["--nproc", 2]
    status, said = ended(launch(root, *words, program, environ=SLURM | {"SLURM_NODELIST": "nid[01-02]"} | step), 60)
    assert status == 0 and sorted(said.splitlines()[1:]) == ["rank 0", "rank 1"], said


def launch(root, *words, environ=None, **options):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PBS_", "NPROC"))}
    return subprocess.Popen(
        [sys.executable, str(root / "scripts" / "launch.py"), *map(str, words)], env=clean | (environ or {}),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options,
    )  # fmt: skip


def ended(run, timeout_s=200):
    said = run.communicate(timeout=timeout_s)[0]
    return run.returncode, said


NAMELESS = """\
import socket
socket.getfqdn = lambda name="": "no-such-name.invalid"
"""
# one write, or lines run together
WHO = "import os, sys\nsys.stdout.write(f\"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\\n\")\n"


@pytest.fixture(params=["a name without an address", "PET_NNODES", "a real name without an address"])
def silent(request, tmp_path, monkeypatch):
    """Where torchrun waits for ever, unless it is told its address; a command's first words.

    The real one needs rights that not everybody has: there the first one stands in for it.
    """
    if request.param == "PET_NNODES":
        monkeypatch.setenv("PET_NNODES", "2")
    if request.param == "a name without an address":
        (tmp_path / "nameless").mkdir()
        (tmp_path / "nameless" / "sitecustomize.py").write_text(NAMELESS)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "nameless"))
    if not request.param.startswith("a real"):
        return []
    nameless = ["unshare", "-r", "-u", "-n", "sh", "-c", 'hostname no-such-name; ip link set lo up; exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*nameless, "true"], capture_output=True).returncode:
        pytest.skip("no name of one's own without more rights here")
    return nameless


@pytest.mark.usefixtures("real_python")
def test_where_this_hosts_name_has_no_address_or_pet_variables_ask_for_nodes_ranks_start(root, script, silent):
    program = [str(root / "scripts" / "launch.py"), "--nproc", "2", str(script(WHO))]
    done = subprocess.run([*silent, sys.executable, *program], capture_output=True, text=True, timeout=60)
    assert sorted(done.stdout.splitlines()[1:]) == ["rank 0 of 2", "rank 1 of 2"], done.stdout + done.stderr


@pytest.mark.usefixtures("real_python")
@pytest.mark.parametrize("silent", ["a name without an address", "PET_NNODES"], indirect=True)
def test_so_they_do_from_a_lesson_and_from_a_preflight(root, script, silent, tmp_path):
    with Torchrun(script(WHO), n_ranks=2, log=tmp_path / "log", timeout_s=60) as child:
        assert child.wait() == 0, child.last_lines()
    assert run_under("torchrun", WHO, 2, timeout_s=60) == ["rank 0 of 2", "rank 1 of 2"]
    flown = Run(find_lessons(root)[0], "torchrun", 2, tmp_path / "flight")
    assert [word for word in flown.command() if "local-addr" in word] and "PET_NNODES" not in flown.environ()


def test_what_train_py_would_refuse_is_refused_before_a_rank_starts_in_its_own_words(root):
    status, said = ended(launch(root, "--nproc", 2, "--retries", 2, "--", "--train.steps", 0))
    assert (status, said) == (2, "launch.py: train.steps=0 is too small; use at least 1\n")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--nproc", "0"], "argument --nproc: 0 is less than 1"),
        (["nowhere.py"], "no such program: nowhere.py; put the program's flags after `--`"),
        (["--starter", "srun", "--nproc", "2"], "job; use salloc or sbatch"),
        (["--dry-run"], "MANYHANDS_DEVICE='gpu' is unknown; use one of auto, cpu, cuda, xpu"),
    ],
)
def test_a_wrong_flag_is_refused_with_status_2(monkeypatch, capsys, words, sentence):
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MANYHANDS_DEVICE", "gpu" if words == ["--dry-run"] else "cpu")
    with pytest.raises(SystemExit) as refusal:
        commands.main(words)
    assert refusal.value.code == 2 and sentence in capsys.readouterr().err


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "program.py"
        path.write_text(text)
        return path

    return write


ALONE = ("--starter", "mpiexec", "--nproc", 1)  # quick: no torch is imported


def test_flags_reach_the_program_as_they_are_and_its_status_comes_back(root, script):
    program = script("import sys, json; print(json.dumps(sys.argv[1:])); sys.exit(7)")
    status, said = ended(launch(root, *ALONE, program, "--", "two words", "*", "--timeout", "$HOME"))
    assert json.loads(said.splitlines()[1]) == ["two words", "*", "--timeout", "$HOME"]
    assert status == 7


STUBBORN = """\
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) == 1:
    subprocess.Popen([sys.executable, __file__, "grandchild"], start_new_session=True)
    print("working", flush=True)
time.sleep(600)
"""


def test_a_run_that_prints_nothing_is_ended_with_all_its_processes_and_it_says_so(root, script, tmp_path):
    program = script(STUBBORN)
    status, said = ended(launch(root, *ALONE, "--timeout", 6, program))
    assert status == 124
    assert "working\n" in said and "launch.py: no output for 6 s; ending the run" in said
    gone(program)


def living(program):
    found = []
    for process in psutil.process_iter():
        try:
            if str(program) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def gone(program, timeout_s=60):
    """No process of it is left: a killed one takes a moment."""
    deadline = time.monotonic() + timeout_s
    while left := living(program):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


THIRD = """\
import pathlib, sys
tries = pathlib.Path(sys.argv[1])
tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
sys.exit(3 if len(tries.read_text()) < 3 else 0)
"""


def test_a_failed_run_is_started_again_until_it_ends_well(root, script, tmp_path):
    status, said = ended(launch(root, *ALONE, "--retries", 3, script(THIRD), "--", tmp_path / "tries"))
    assert status == 0 and (tmp_path / "tries").read_text() == "xxx"
    assert "launch.py: status 3; retry 1 of 3" in said


def kept_as(monkeypatch, status, heard=None):
    """`launch.py` sees runs that end with `status` after a signal was `heard`; the list of their starts."""
    starts = []
    monkeypatch.setattr(commands, "keep", lambda command, *_: (starts.append(command), (status, heard))[1])
    return starts


@pytest.mark.parametrize(
    ("status", "heard", "starts"),
    [(0, None, 1), (2, None, 1), (DIVERGED, None, 1), (NO_ROOM, None, 1), (137, None, 3), (143, signal.SIGTERM, 1)],
)
def test_what_would_end_as_before_or_was_asked_to_end_is_not_started_again(monkeypatch, capsys, status, heard, starts):
    seen = kept_as(monkeypatch, status, heard)
    assert commands.run(["srun", "python", "program.py"], None, 2) == status
    said = capsys.readouterr().err
    assert len(seen) == starts and said.count("retry") == starts - 1
    assert ("a rank was killed (signal 9): usually memory" in said) == (status == 137)


@pytest.mark.parametrize(
    ("failures", "status", "sentence"),
    [
        # rank 1 was killed; rank 0 lost its connection, and rank 2 was ended by torchrun
        ([(0, 1, 50), (1, -9, 50), (2, -15, 50)], 137, "rank 1 was killed (signal 9): usually memory"),
        ([(1, 7, 50), (0, -15, 50)], 7, "rank 1 ended with status 7; the reason stands above"),
        ([(0, 1, 50), (1, -11, 50)], 139, "rank 1 died of signal 11 (SIGSEGV)"),
    ],
)
def test_of_several_ranks_that_failed_the_cause_is_named_and_not_the_effect(failures, status, sentence):
    found, said = blame(failures)
    assert found == status and said.startswith(sentence)


KILLED = """\
import os, signal, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


def test_of_torchruns_own_pages_nothing_is_seen_but_which_rank_was_killed(root, script):
    status, said = ended(launch(root, "--nproc", 2, script(KILLED)))
    # torch's C++ says so on each rank where no name server answers
    lines = [line for line in said.splitlines() if "hostname of the client socket" not in line]
    assert status == 137 and len(lines) == 2
    assert lines[1].startswith("launch.py: rank 1 was killed (signal 9): usually memory")


STARTING = """\
import os, signal
from manyhands.launch.entry import run_program
from manyhands.train.preemption import act_on_options
def act(options):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    from manyhands import join
    join(name="train")
run_program("train.py", lambda: act_on_options("train.py", lambda words: None, act))
"""


def test_a_rank_killed_during_the_start_is_named_and_the_others_wait_no_longer_for_it(root, script):
    """torchrun's SIGTERM to the others is no end of the job's time, whose status would be 143."""
    program = script(STARTING)
    status, said = ended(launch(root, "--nproc", 2, program), 60)
    assert status == 137 and "launch.py: rank 1 was killed (signal 9): usually memory" in said, said
    assert GRACE_S[signal.SIGTERM] < 11
    gone(program, 1)


def test_started_by_hand_a_rank_that_lost_another_leaves_at_once_and_under_torchrun_lets_it_speak(monkeypatch, capsys):
    waits = []
    monkeypatch.setattr(program.time, "sleep", waits.append)
    monkeypatch.setattr(program.time, "monotonic", lambda: sum(waits))
    by_hand = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for more, most_s in (({}, 1), ({"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, 11)):
        for name, value in (by_hand | more).items():
            monkeypatch.setenv(name, value)
        waits.clear()
        program._let_others_speak(RuntimeError("[gloo] Connection closed by peer"))
        assert most_s - 1 <= sum(waits) <= most_s
        assert "Connection closed by peer" in capsys.readouterr().err


def test_a_torchrun_that_waits_for_other_nodes_says_so():
    soon = "from manyhands.launch import commands, program; program.WORD_S = 1; commands.quiet_torchrun()"
    meet = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--rdzv-id=1", "--nproc-per-node=1"]
    waits = subprocess.Popen([sys.executable, "-c", soon, *meet, "x.py"], stderr=subprocess.PIPE, text=True)
    try:
        said = next(line for line in waits.stderr if line.startswith("launch.py: "))
    finally:
        waits.kill()
        waits.communicate()
    assert "waits for the run's other nodes (--nnodes=2 --rdzv-endpoint=127.0.0.1:0); do they start" in said


@pytest.mark.parametrize(
    ("here", "suffix", "flags"),
    [
        ("10.0.0.2", "", ["--local-addr=10.0.0.2"]),
        ("10.0.0.1", "i", ["--local-addr=10.0.0.1", "--rdzv-conf=is_host=1"]),
        ("10.0.0.2", "i", ["--local-addr=10.0.0.2", "--rdzv-conf=is_host=0"]),
        ("127.0.0.1", "", []),
    ],
)
def test_a_node_names_itself_by_the_address_from_which_it_reaches_the_first_one(monkeypatch, here, suffix, flags):
    monkeypatch.setattr(commands.socket, "gethostbyname", {f"node1{suffix}": "10.0.0.1"}.__getitem__)
    monkeypatch.setattr(commands, "_address_towards", lambda host, port: here)
    meet = ["torchrun", "--rdzv-backend=c10d", f"--rdzv-endpoint=node1{suffix}:29400"]
    assert commands.own_address(meet, suffix) == flags
    assert commands.own_address([*meet, "--local-addr=10.1.1.1"], suffix) == []
    assert commands.own_address(["torchrun", "--standalone"], suffix) == []


@pytest.mark.parametrize(("nodes", "said"), [(1, ""), (2, "mine.py: --stepz is unknown\n")])
def test_on_several_nodes_a_refusal_is_the_last_line_again(monkeypatch, capsys, nodes, said):
    def keep(command, environ, idle_s):
        Path(environ[STATUS_FILE]).write_text(json.dumps([2, "mine.py: --stepz is unknown"]))
        return 2, None

    monkeypatch.setattr(commands, "keep", keep)
    assert commands.run(["torchrun", *["--rdzv-backend=c10d"] * (nodes - 1)], None, 2) == 2
    assert capsys.readouterr().err == said


OUT_OF_MEMORY = """\
import manyhands.launch.entry as entry
class OutOfMemoryError(RuntimeError):
    "As torch's, of which no GPU is needed to raise it."
def main():
    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB.")
entry.run_program("train.py", main)
"""


def test_a_gpu_without_room_is_one_sentence_with_the_cure_and_a_status_that_is_not_tried_again(root, tmp_path):
    environ = {**os.environ, "PYTHONPATH": str(root / "scripts"), STATUS_FILE: str(tmp_path / "status")}
    ended = subprocess.run([sys.executable, "-c", OUT_OF_MEMORY], env=environ, capture_output=True, text=True)
    assert ended.stderr == (
        "train.py: CUDA out of memory. Tried to allocate 2.00 GiB: use a smaller micro-batch (--train.micro-batch),"
        " more GPUs or a smaller model (--dry-run says what train.py needs)\n"
    )
    assert ended.returncode == json.loads((tmp_path / "status").read_text())[0] == NO_ROOM


def until(run, text):
    for line in run.stdout:
        if text in line:
            return
    raise AssertionError(f"it ended without {text!r}")


@pytest.mark.parametrize(("starter", "sent"), [("torchrun", "SIGUSR1"), ("mpiexec", "SIGTERM")])
def test_a_signal_is_passed_on_so_that_the_run_saves_and_it_is_not_started_again(root, tmp_path, starter, sent):
    run = launch(
        root, "--nproc", 2, "--starter", starter, "--retries", 3, root / "tests" / "fake_train.py", "--",
        "--linger", 20, "--checkpoint.folder", tmp_path / "run",
    )  # fmt: skip
    until(run, "step 10")
    run.send_signal(getattr(signal, sent))
    status, said = ended(run)
    assert "and saved at step" in said and "retry" not in said
    if starter == "torchrun":  # which dies of the signal itself, with a traceback and status 1
        assert "Traceback" not in said
        assert status == 0 and said.endswith(f"launch.py: stopped cleanly on {sent}\n")
    assert (tmp_path / "run" / "requeue.json").exists()
    gone(root / "tests" / "fake_train.py")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a process that its parent died")
@pytest.mark.usefixtures("real_python")
def test_ranks_whose_torchrun_is_killed_save_and_leave(root, tmp_path):
    """They would train on otherwise, on every node, and hold the folder's lock."""
    program = root / "tests" / "fake_train.py"
    run = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program, "--linger=20",
         f"--checkpoint.folder={tmp_path / 'run'}"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    until(run, "step 10")
    ranks = [process for process in living(program) if process.ppid() == run.pid]
    run.kill()
    run.wait()
    try:
        gone(program)
    finally:
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.kill()
    assert len(ranks) == 2 and json.loads((tmp_path / "run" / "requeue.json").read_text())["signal"] == "SIGTERM"
    assert "stopped by SIGTERM and saved at step" in run.stdout.read()


COUNTS = """\
import signal, sys, time
heard = []
for one in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(one, lambda number, frame: heard.append(number))
print("ready", flush=True)
while not heard:
    time.sleep(0.01)
time.sleep(1)
print("heard", len(heard), flush=True)
"""


def test_a_request_that_comes_from_the_scheduler_and_from_the_job_file_is_passed_on_once(root):
    """torchrun dies of the second one without waiting for its ranks to save."""
    keeper = "import sys; from manyhands.launch.processes import keep; sys.exit(keep(sys.argv[1:])[0])"
    run = subprocess.Popen(
        [sys.executable, "-c", keeper, sys.executable, "-c", COUNTS],
        env=os.environ | {"PYTHONPATH": str(root / "scripts")}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    until(run, "ready")
    run.send_signal(signal.SIGTERM)
    run.send_signal(signal.SIGUSR1)
    assert run.communicate(timeout=60)[0] == "heard 1\n"


def test_when_launch_py_itself_is_killed_its_run_is_asked_to_end(root, script):
    program = script("import time\nprint('working', flush=True)\ntime.sleep(600)\n")
    run = launch(root, *ALONE, program)
    until(run, "working")
    run.kill()
    run.wait()
    gone(program)


@pytest.mark.parametrize(("left", "said"), [(None, ""), (64, ""), (34, "4 ranks may take 64")])
def test_a_start_says_before_it_begins_that_its_ranks_may_meet_the_limit_of_processes(monkeypatch, capsys, left, said):
    monkeypatch.setattr("manyhands.launch.limits.available_processes", lambda: left)
    monkeypatch.setattr(commands, "run", lambda *command: 0)
    assert commands.main(["--nproc", "4", "scripts/02_collectives.py"]) == 0
    told = capsys.readouterr().err
    assert bool(told) == bool(said) and said in told and ("ulimit -u or" in told) == bool(said)
