"""scripts/launch.py: the right command for where it is, and a keeper that ends what hangs and leaves nothing behind."""

import json
import os
import platform
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from manyhands.data.corpus import load_corpus
from manyhands.launch import commands, processes
from manyhands.launch.allocation import Allocation, RanksError, find_site_mpiexec
from manyhands.launch.commands import after_signal, blame, command_for
from manyhands.launch.join import join, leave
from manyhands.launch.program import DIVERGED, NO_ROOM, STATUS_FILE, read_status
from manyhands.launch.ranks import joined
from rank_pool import run_on_ranks

pytestmark = pytest.mark.ranks

PROGRAM = ["scripts/train.py", "--train.steps", "20"]


@pytest.fixture
def nodefile(tmp_path):
    """Two nodes of PBS with four slots each, which repeats a host per slot."""
    path = tmp_path / "nodes"
    path.write_text("x1\n" * 4 + "x2\n" * 4)
    return path


SLURM = {"SLURM_JOB_ID": "123", "SLURM_JOB_NODELIST": "nid[01-02]", "SLURM_JOB_NUM_NODES": "2"}


def started(words):
    """The command that ends in `words` and the program."""
    return [*words.split(), sys.executable, *PROGRAM]


PBS = {"PBS_JOBID": "77.server", "MPIEXEC": "mpiexec", "MPIEXEC_FLAGS": "--cpu-bind none"}


def test_on_one_machine_it_is_torchrun_which_passes_signals_on(nodefile):
    command = command_for(PROGRAM, {}, nproc=4)
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert "--nproc-per-node=4" in command and command[-4:] == ["--standalone", *PROGRAM]
    (signals,) = [word for word in command if word.startswith("--signals-to-handle=")]
    assert "SIGUSR1" in signals
    nodefile.write_text("x1\nx1\n")
    command = command_for(PROGRAM, PBS | {"PBS_NODEFILE": str(nodefile)})
    assert "--standalone" in command and "--nproc-per-node=2" in command, "a job of one node is one machine"


def test_in_a_job_of_several_nodes_it_is_mpiexec_or_srun_with_the_sites_flags(nodefile):
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


@pytest.mark.parametrize(
    ("hosts", "environ", "said"),
    [
        ("", {"MPIEXEC": "mpiexec 'x"}, "MPIEXEC=mpiexec 'x cannot be read .*: close the quote"),
        ("", {"MPIEXEC_FLAGS": "mpiexec 'x"}, "MPIEXEC_FLAGS=mpiexec 'x cannot be read .*: close the quote"),
        ("\n", {}, "PBS_NODEFILE names .*, which is empty"),
    ],
)
def test_a_job_whose_variables_cannot_be_read_is_refused_by_their_names(nodefile, hosts, environ, said):
    nodefile.write_text(hosts or nodefile.read_text())
    with pytest.raises(RanksError, match=said):
        per_node(nodefile, [], **environ)


def program_in(folder, name, text="#!/bin/sh\n"):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    return folder / name


def per_node(nodefile, folders, **environ):
    """The words that start one torchrun on each of two PBS nodes."""
    path = ":".join(map(str, folders)) + ":/usr/bin:/bin"
    environ = {"PBS_NODEFILE": str(nodefile), "PBS_JOBID": "77.server", "PATH": path} | environ
    command = command_for(PROGRAM, environ, nproc=2, starter="torchrun")
    return command[: command.index(sys.executable)]


def test_pbs_own_mpiexec_is_no_mpiexec_and_where_there_is_none_pbs_itself_starts_each_node(nodefile, tmp_path):
    pbs, site = tmp_path / "pbs", tmp_path / "site"
    for name in ("mpiexec", "pbsdsh"):
        program_in(pbs, name, "#!/bin/sh\necho no non-PBS mpiexec; exit 1\n")
    mpiexec = str(program_in(site, "mpiexec"))
    assert per_node(nodefile, [pbs, site])[0] == mpiexec
    tmrsh = str(program_in(pbs, "pbs_tmrsh"))
    assert per_node(nodefile, [pbs, site])[0] == mpiexec
    shutil.rmtree(site)
    if find_site_mpiexec({"PATH": "/usr/bin:/bin"}) is None:
        assert per_node(nodefile, [pbs])[2:] == [tmrsh, "x1 x2"]
    # Debian's Slurm installs one that is no MPI's either
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpiexec").symlink_to(program_in(tmp_path / "slurm", "mpiexec.slurm"))
    assert find_site_mpiexec({"PATH": f"{tmp_path}/bin"}) is None


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


def test_open_mpi_gets_its_own_flag_for_ranks_per_node_and_a_site_may_say_another(nodefile, tmp_path):
    mpiexec = str(program_in(tmp_path / "bin", "mpiexec", "#!/bin/sh\necho 'mpiexec (OpenRTE) 4.1.4'\n"))
    assert per_node(nodefile, [tmp_path / "bin"]) == [mpiexec, "-n", "2", "--map-by", "ppr:1:node"]
    found = per_node(nodefile, [tmp_path / "bin"], MPIEXEC_FLAGS="-npernode 1 --bind-to none")
    assert found == [mpiexec, "-n", "2", "-npernode", "1", "--bind-to", "none"]


def test_a_port_that_is_taken_is_left_to_whoever_has_it():
    """torchrun on the first node would wait at it without a word, and so would all others."""
    here = Allocation("slurm", (platform.node(), "other"), job=4321)
    first = commands._port(here)
    with socket.socket() as stranger:
        stranger.bind(("", first))
        stranger.listen()
        assert first < commands._port(here) < first + 100
    assert commands._port(Allocation("slurm", ("other", platform.node()), job=4321)) == 24321


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({"NPROC_PER_NODE": "3"}, 3),
        ({**SLURM, "SLURM_GPUS_ON_NODE": "4"}, 4),
        ({**SLURM, "SLURM_NTASKS_PER_NODE": "6"}, 6),
        ({**SLURM, "SLURM_NTASKS_PER_NODE": "6", "NPROC_PER_NODE": "2"}, 2),
    ],
)
def test_ranks_per_node_come_from_you_from_the_gpus_or_from_the_scheduler(monkeypatch, environ, ranks):
    monkeypatch.setattr(commands, "_gpus_here", lambda environ: 0)
    command = command_for(PROGRAM, environ)
    assert f"--nproc-per-node={ranks}" in command or f"--ntasks-per-node={ranks}" in command
    assert f"--ntasks-per-node={5}" in command_for(PROGRAM, {**SLURM, **environ}, nproc=5)


@pytest.mark.parametrize(
    ("flags", "cpus"),
    [("", ["--cpus-per-task=15"]), ("-c 3", []), ("--cpus-per-task=7", ["--cpus-per-task=7"]), ("-c9 --mpi=none", [])],
)
def test_ranks_that_slurm_starts_share_all_cores_of_the_job_unless_the_site_says_it(flags, cpus):
    """A step does not take over its job's --cpus-per-task: each rank would have one core."""
    environ = {**SLURM, "SLURM_JOB_CPUS_PER_NODE": "64,60", "SRUN_FLAGS": flags}
    for command in (
        command_for(PROGRAM, environ, nproc=4, starter="srun"),
        Allocation.find(environ).srun_mpi(8, environ=environ),
    ):
        assert [word for word in command if word.startswith("--cpus-per-task")] == cpus
    assert flags or "--cpus-per-task=60" in command_for(PROGRAM, environ, 4, "torchrun")


def launch(root, *words, environ=None, **options):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PBS_", "NPROC"))}
    return subprocess.Popen(
        [sys.executable, str(root / "scripts" / "launch.py"), *map(str, words)], env=clean | (environ or {}),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options,
    )  # fmt: skip


def ended(run, timeout_s=200):
    said = run.communicate(timeout=timeout_s)[0]
    return run.returncode, said


def test_dry_run_prints_the_command_for_train_py_and_runs_nothing(root):
    status, said = ended(launch(root, "--nproc", 2, "--dry-run", "--", "--log.prompt", "a; touch /tmp/x $(id)"))
    assert status == 0 and said.startswith("$ ") and said.count("\n") == 1
    words = shlex.split(said[2:])  # as a shell would read what was printed
    assert words[-3:] == [str(root / "scripts" / "train.py"), "--log.prompt", "a; touch /tmp/x $(id)"]


def test_what_train_py_would_refuse_is_refused_before_a_rank_starts_in_its_own_words(root):
    status, said = ended(launch(root, "--nproc", 2, "--retries", 2, "--", "--train.steps", 0))
    assert (status, said) == (2, "launch.py: train.steps=0 is too small; use at least 1\n")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--nproc", "0"], "argument --nproc: 0 is less than 1"),
        (["--retries", "-1"], "argument --retries: -1 is less than 0"),
        (["--timeout", "x"], "argument --timeout: invalid int value: 'x'"),
        (["nowhere.py"], "no such program: nowhere.py; put the program's flags after `--`"),
        (["--starter", "srun", "--nproc", "2"], "job; use salloc or sbatch"),
        (["--preset", "gpt2"], "unrecognized arguments"),
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


def test_a_run_that_prints_now_and_then_is_left_alone(root, script):
    program = script("import time\nfor i in range(6):\n    print(i, flush=True)\n    time.sleep(1)\n")
    status, said = ended(launch(root, *ALONE, "--timeout", 5, program))
    assert status == 0 and "0\n1\n2\n3\n4\n5\n" in said and "no output" not in said


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
    ("number", "own", "status", "said"),
    [
        (signal.SIGTERM, 0, 0, "stopped cleanly on SIGTERM"),
        (signal.SIGINT, None, 130, "ended by Ctrl-C"),
        (signal.SIGINT, 130, 130, ""),  # the program has said so itself
        (signal.SIGTERM, None, 143, "ended by SIGTERM"),
        (signal.SIGUSR1, DIVERGED, DIVERGED, ""),
    ],
)
def test_torchrun_dies_of_a_signal_that_it_passes_on_and_the_status_is_the_programs_own(number, own, status, said):
    assert after_signal(number, own) == (status, said)


@pytest.mark.parametrize(
    ("failures", "status", "sentence"),
    [
        # rank 1 was killed; rank 0 lost its connection, and rank 2 was ended by torchrun
        ([(0, 1, 50), (1, -9, 50), (2, -15, 50)], 137, "rank 1 was killed (signal 9): usually memory"),
        ([(1, 7, 50), (0, -15, 50)], 7, "rank 1 ended with status 7; the reason stands above"),
        ([(1, 1, 50), (0, -9, 170)], 1, "rank 1 ended with status 1"),  # torchrun killed 0
        ([(0, 1, 50), (1, -11, 50)], 139, "rank 1 died of signal 11 (SIGSEGV)"),
        ([(0, -15, 50)], 143, "rank 0 died of signal 15 (SIGTERM)"),
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


REFUSES = """\
import os, sys, time
if "FIRST" in os.environ:
    sys.exit(2)
time.sleep(600)
"""


@pytest.mark.full
@pytest.mark.usefixtures("real_python")
def test_a_node_that_loses_the_first_one_says_so_in_one_line(root, script):
    """torchrun's own words are a traceback and, from its store, 50 lines of C++ frames."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--nproc-per-node=1", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=1"]
    words += [f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1", str(script(REFUSES))]
    environ = os.environ | {"PYTHONPATH": str(root / "scripts"), "OMP_NUM_THREADS": "1"}

    def node(**variables):
        command = [sys.executable, "-m", "manyhands.launch.commands", *words]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ | variables)

    first, deadline = node(FIRST="1"), time.monotonic() + 100
    while True:  # until it has the port: the store is on the first node
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.1)
    second = node()
    assert (second.communicate(timeout=100)[1], second.returncode) == (
        f"launch.py: {platform.node()} lost the run's first node, which has ended; see its output\n",
        1,
    )
    assert first.wait(timeout=100) == 2


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


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_under_the_log_of_launch_py_does_not_end_what_it_keeps(root, script, tmp_path):
    program = script(f"print('x' * 200_000, flush=True)\nopen({str(tmp_path / 'done')!r}, 'w')")
    words = [sys.executable, root / "scripts" / "launch.py", *ALONE, "--timeout", "60", program]
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(list(map(str, words)), stdout=full, stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stderr) == (0, b"") and (tmp_path / "done").exists()


HANGS_UP = """\
import os, signal, sys
os.kill(int(sys.argv[1]), signal.SIGHUP)
sys.exit(5 if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else 0)
"""


@pytest.mark.usefixtures("real_python")
def test_under_nohup_a_hangup_reaches_neither_the_keeper_nor_what_it_keeps():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert processes.keep([sys.executable, "-c", HANGS_UP, str(os.getpid())]) == (5, None)
        (flag,) = [word for word in command_for(PROGRAM, {}, nproc=4) if word.startswith("--signals-to-handle=")]
        assert "SIGTERM" in flag and "SIGHUP" not in flag
    finally:
        signal.signal(signal.SIGHUP, before)


def statuses_on_the_way(ranks, folder):
    """What stands in the file after a group was left, after another was joined, and after a corpus was refused."""
    seen = []
    os.environ |= {STATUS_FILE: f"{folder}/status", "MANYHANDS_SHAKESPEARE": f"{folder}/none.txt"}
    leave()
    seen.append(read_status())
    seen.append(join(name="test") and read_status())
    try:
        load_corpus(joined())
    except SystemExit:
        seen.append(read_status())
    return seen, Path(folder, "status").read_text()


def test_a_program_that_leaves_has_status_0_until_it_joins_again_and_a_refused_corpus_has_2(tmp_path):
    seen, said = run_on_ranks(1, statuses_on_the_way, str(tmp_path))[0]
    assert seen == [0, None, 2] and "none.txt cannot be read" in said


def until(run, text):
    for line in run.stdout:
        if text in line:
            return
    raise AssertionError(f"it ended without {text!r}")


def test_srun_which_ends_its_ranks_on_sigterm_is_sent_sigusr1_instead():
    for end in (signal.SIGTERM, signal.SIGHUP):
        assert processes._translated(end, ["srun", "python"]) == signal.SIGUSR1
    assert processes._translated(signal.SIGTERM, [sys.executable, "-m", "torch.distributed.run"]) == signal.SIGTERM
    assert processes._translated(signal.SIGINT, ["/opt/bin/mpiexec"]) == signal.SIGINT


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
