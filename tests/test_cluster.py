"""Where the ranks of a notebook start, who may talk to them, and what killed ones leave on a node."""

import json
import mmap
import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import psutil
import pytest
from manyhands.launch import limits, processes
from manyhands.launch.allocation import OWN_MPIEXEC, PBS_NODE, Allocation, RanksError, find_mpiexec, mpi_launcher
from manyhands.launch.commands import command_for
from manyhands.launch.metrics import compare
from manyhands.notebook import engine_processes
from manyhands.notebook.engine_processes import engine_launcher
from manyhands.notebook.rank_pool import ControlLines, RankPool
from manyhands.tools.lesson_run import Run

TWO = ("n1", "n2")


def test_outside_an_allocation_ranks_start_on_this_machine_and_in_a_pbs_job_on_all_slots_of_the_node_file(tmp_path):
    found = Allocation.find({})
    assert (found.kind, found.num_nodes) == ("local", 1) and 2 <= found.default_ranks() <= 4
    (tmp_path / "nodes").write_text("n1\nn1\nn2\nn2\n")
    found = Allocation.find({"PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_JOBID": "7.server"})
    assert (found.kind, found.num_nodes, found.default_ranks()) == ("pbs", 2, 4)
    with pytest.raises(RanksError, match="cannot be read .*; unset PBS_NODEFILE"):
        Allocation.find({"PBS_NODEFILE": str(tmp_path / "gone")})


def test_in_a_slurm_job_the_tasks_count_and_inside_a_step_the_cpus_of_all_nodes(tmp_path):
    (tmp_path / "srun").touch(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "nid[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    job |= {"SLURM_NTASKS": "6", "SLURM_JOB_CPUS_PER_NODE": "4(x2)", "PATH": str(tmp_path)}
    assert Allocation.find(job) == Allocation("slurm", ("nid1", "nid2"), 6, job=7, cpus_per_node=4)
    # the notebook server is one task of its step: SLURM_NTASKS speaks of the server, not of us
    step = {**job, "SLURM_STEP_ID": "0", "SLURM_NTASKS": "1"}
    threads = job | {"SLURM_JOB_CPUS_PER_NODE": "192(x2)", "SLURM_NTASKS_PER_NODE": "4", "SLURM_CPUS_PER_TASK": "24"}
    assert Allocation.find(threads).cpus_per_node == 96, "of 192 hardware threads the job asked for 96 cores"
    assert Allocation.find(step) == Allocation("slurm step", ("nid1", "nid2"), 8, job=7, cpus_per_node=4)
    assert Allocation.find(step | {"PATH": ""}).kind == "local", "a container without srun"


def test_elsewhere_the_mpiexec_of_this_environment_starts_them_not_the_first_in_path(tmp_path, monkeypatch):
    other = tmp_path / "mpiexec"
    other.write_text("#!/bin/sh\nexit 1\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert engine_launcher(Allocation("local", ("here",)), 3, mpi=True) == [f"{sys.prefix}/bin/mpiexec", "-n", "3"]
    monkeypatch.setenv("MANYHANDS_MPIEXEC", "mpiexec --ppn 2 --cpu-bind depth")
    assert engine_launcher(Allocation("pbs", TWO, 4), 4, mpi=True)[-2:] == ["-n", "4"]
    assert find_mpiexec() == ["mpiexec", "--ppn", "2", "--cpu-bind", "depth"]
    monkeypatch.setenv("MANYHANDS_MPIEXEC", "mpiexec")
    command = engine_launcher(Allocation("pbs", TWO, 2), 4, mpi=True)  # as many on each node, where that is possible
    assert command[:3] == ["mpiexec", "-n", "4"] and command[-1] in ("2", "ppr:2:node")
    assert engine_launcher(Allocation("pbs", TWO, 2), 3, mpi=True) == ["mpiexec", "-n", "3"]


HYDRA = "#!/bin/sh\necho HYDRA build details\n"


@pytest.fixture
def pbs_job(tmp_path, monkeypatch):
    """A job of two PBS nodes without ssh between them: a folder in PATH with a stand-in for pbs_tmrsh.

    It writes down the host that it is asked for, and starts the words here, without this environment, as PBS does.
    """
    tmrsh = f'#!/bin/bash\necho "$1" >>{tmp_path}/hosts; shift; cd /; exec env -i "$@"\n'
    for name, text in (("pbs_tmrsh", tmrsh), ("mpiexec", HYDRA)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "nodes").write_text("127.0.0.2\n127.0.0.2\n127.0.0.3\n127.0.0.3\n")
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "nodes"))
    monkeypatch.setenv("PBS_JOBID", "77.server")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("MANYHANDS_MPIEXEC", str(tmp_path / "mpiexec"))
    return tmp_path


THROUGH_PBS = ["-launcher", "rsh", "-launcher-exec", str(PBS_NODE)]


@pytest.mark.parametrize("n", [4, 3])
def test_in_a_pbs_job_ranks_of_notebooks_and_scripts_reach_the_other_nodes_through_pbs(pbs_job, n):
    command = engine_launcher(Allocation.find(), n, mpi=True)
    assert command[1:3] == ["-n", str(n)] and command[-4:] == THROUGH_PBS
    assert command_for(["x.py"], nproc=2, starter="mpiexec")[-6:-2] == THROUGH_PBS
    assert mpi_launcher(2)[1:5] == THROUGH_PBS


def test_flags_of_mpiexec_reach_the_ranks_of_notebooks_but_not_those_of_another_mpiexec(pbs_job, monkeypatch):
    monkeypatch.setenv("MPIEXEC_FLAGS", "-iface eth1")
    assert engine_launcher(Allocation.find(), 4, mpi=True)[-6:] == [*THROUGH_PBS, "-iface", "eth1"]
    assert engine_launcher(Allocation("local", ("here",)), 4, mpi=True)[-2:] == ["-iface", "eth1"]
    monkeypatch.delenv("MANYHANDS_MPIEXEC")
    monkeypatch.setattr("manyhands.launch.allocation.OWN_MPIEXEC", pbs_job / "mpiexec")
    monkeypatch.setattr(engine_processes, "OWN_MPIEXEC", pbs_job / "mpiexec")
    monkeypatch.setenv("MPIEXEC", "/site/mpiexec")
    assert "-iface" not in engine_launcher(Allocation.find(), 4, mpi=True)


@pytest.mark.skipif(not OWN_MPIEXEC.exists(), reason="no MPI in this environment")
def test_hydra_starts_its_ranks_on_each_node_through_pbs(pbs_job):
    command = [str(OWN_MPIEXEC), "-n", "4", "-ppn", "2", *THROUGH_PBS, "sh", "-c", 'echo "$PMI_RANK of $PMI_SIZE"']
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert sorted(ran.stdout.splitlines()) == [f"{rank} of 4" for rank in range(4)], ran.stderr
    assert sorted((pbs_job / "hosts").read_text().split()) == ["127.0.0.2", "127.0.0.3"]


def test_without_mpi_ranks_start_one_by_one_but_not_on_several_nodes(monkeypatch):
    monkeypatch.setenv("MANYHANDS_MPIEXEC", "")
    assert engine_launcher(Allocation("local", ("here",)), 4, mpi=True) is None
    with pytest.raises(RanksError, match="2 nodes need MPI"):
        engine_processes.Processes(4, Allocation("pbs", TWO, 4), mpi=True)


@pytest.mark.ranks
@pytest.mark.usefixtures("real_python")
@pytest.mark.parametrize(
    ("fork", "mpi", "end", "said", "prints"),
    [
        ("1", True, "kill(os.getpid(), 9)", "rank 1 ended with status 137; 137 is a kill", "no memory for that"),
        ("1", True, "_exit(3)", "rank 1 ended with status 3: ", "no memory for that"),
        ("1", False, "kill(os.getpid(), 9)", "engine-[01] ended with status -9", "no memory for that"),
        (
            "0",
            True,
            "kill(os.getpid(), 7)",
            "rank 1 ended with status 135: (.|\n)*/dev/shm is full or small",
            "Bus error",
        ),
        ("0", True, "_exit(1)", "rank 1 ended with status 1: (.|\n)*ulimit -u or", "can\\'t start new thread"),
    ],
)
def test_a_rank_that_dies_while_it_starts_is_named_at_once_with_what_it_printed(
    fork, mpi, end, said, prints, tmp_path, monkeypatch
):
    """Its launcher does not hear of it, so that a rank that dies later takes no other one along."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, runpy\n"
        "run = runpy._run_module_as_main\n"  # by `python -m`, and in a fork
        "def run_or_die(name, *more):\n"
        "    if os.environ.get('PMI_RANK', '1') == '1' and name == 'ipyparallel.engine':\n"
        f"        print('{prints}', flush=True); os.{end}\n"
        "    run(name, *more)\n"
        "runpy._run_module_as_main = run_or_die\n"
    )
    monkeypatch.setenv("MANYHANDS_FORK", fork)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    ranks = RankPool("02_collectives", {"n_ranks": 2}, mpi=mpi)
    monkeypatch.setattr(engine_processes.TimeLimit, "over", lambda limit: False)
    with pytest.raises(RanksError) as died:
        ranks.start()
    assert re.match(f"the ranks did not start; {said}", str(died.value))
    assert prints.replace("\\", "") in str(died.value)


@pytest.fixture
def load_of_20():
    """Twenty processes that compute; they yield to ours, or the test would take twice as long."""
    while_we_live = f"while kill -0 {os.getpid()}; do :; done"
    burners = [subprocess.Popen(["nice", "sh", "-c", while_we_live], stderr=subprocess.DEVNULL) for _ in range(20)]
    yield
    for burner in burners:
        burner.kill()
        burner.wait()


@pytest.mark.lesson
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["00_start", "02_collectives"])
def test_ten_attendees_at_once_on_two_busy_cores_all_finish(load_of_20, attendees, tmp_path, monkeypatch, name):
    """Ten kernels with two ranks each: the same numbers, and nothing is left."""
    monkeypatch.setattr(processes, "SAMPLE_S", 30)  # ten times a look at all processes would be a load of its own
    lesson, cores = attendees[name], os.sched_getaffinity(0)
    runs = [Run(lesson, "notebook", 2, tmp_path / "class" / f"{n}", lesson.short, "cpu") for n in range(10)]
    os.sched_setaffinity(0, sorted(cores)[:2])  # inherited by the threads below, and by what they start
    try:
        with ThreadPoolExecutor(10) as room:
            outcomes = [future.result() for future in [room.submit(run.carry_out, 1500) for run in runs]]
    finally:
        os.sched_setaffinity(0, cores)
    assert [str(outcome.error or "") for outcome in outcomes] == [""] * 10
    assert [compare(outcomes[0].metrics, outcome.metrics) for outcome in outcomes] == [[]] * 10
    left = [p for p in psutil.process_iter(["environ"]) if str(tmp_path / "class") in str(p.info["environ"])]
    assert left == []


def talk(lines, **hello):
    line = socket.create_connection(("127.0.0.1", lines.port), timeout=60)
    line.sendall(json.dumps(hello).encode() + b"\n")
    return line


def test_a_control_line_without_the_token_is_hung_up_and_changes_nothing():
    lines = ControlLines(1)
    for hello in ({"hello": 0, "pid": 1, "token": "guess"}, {"hello": 0, "pid": 1}, {"token": lines.token}):
        with talk(lines, **hello) as line:
            assert line.recv(1) == b""
    assert lines.wait_for_all(0.2) == [0]
    with talk(lines, hello=0, pid=1, token=lines.token):
        assert lines.wait_for_all(60) == []
    lines.close()


def test_folders_of_kernels_that_are_gone_are_removed_and_no_others(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    gone = f"{engine_processes.OURS}{ended.pid}-ab"
    for name in (gone, f"{engine_processes.OURS}{os.getpid()}-ab", "manyhands-elsewhere-1-ab"):
        (tmp_path / name / "profile").mkdir(parents=True)
    (tmp_path / f"{engine_processes.OURS}x").mkdir()
    assert engine_processes.sweep_folders(tmp_path) == [tmp_path / gone]
    assert len(list(tmp_path.iterdir())) == 3


def test_segments_of_mpi_go_when_they_are_old_and_nobody_maps_them(tmp_path):
    long_ago = time.time() - 2 * limits.OLD_S
    for name in ("mpich_shm_1_0", "mpich_shm_2_0", "mpich_shm_3_0", "torch_1"):
        (tmp_path / name).write_bytes(b"x" * 8192)
        if name != "mpich_shm_3_0":  # a young one: its ranks may be starting
            os.utime(tmp_path / name, (long_ago, long_ago))
    with open(tmp_path / "mpich_shm_2_0", "r+b") as file, mmap.mmap(file.fileno(), 0):
        os.utime(tmp_path / "mpich_shm_2_0", (long_ago, long_ago))
        assert limits.sweep_shared_memory(tmp_path) == [tmp_path / "mpich_shm_1_0"]
    assert limits.sweep_shared_memory(tmp_path) == [tmp_path / "mpich_shm_2_0"]
    assert limits.sweep_shared_memory(tmp_path, older_s=-1, since_s=time.time() + 9) == []
    assert limits.sweep_shared_memory(tmp_path, older_s=-1) == [tmp_path / "mpich_shm_3_0"]


@pytest.mark.parametrize(("free_mib", "said"), [(4, "has 4.0 MiB free, and 4 ranks under MPI need 4"), (5, "")])
def test_ranks_for_which_shared_memory_has_no_room_are_told_before_they_start(tmp_path, monkeypatch, free_mib, said):
    """Segments that killed ranks have left go first."""
    left = tmp_path / "mpich_shm_1_0"
    left.write_bytes(b"x")
    os.utime(left, (1, 1))
    free = Mock(side_effect=lambda place: Mock(free=(free_mib - left.exists()) * 2**20))
    monkeypatch.setattr(limits.shutil, "disk_usage", free)
    found = limits.no_room(0, 4, tmp_path)
    assert said in found and bool(found) == bool(said) and not left.exists()
    left.write_bytes(b"x" * 2**20)  # rank 0's, which is starting
    assert limits.no_room(0, 4, tmp_path) and bool(limits.no_room(1, 4, tmp_path)) == bool(said)


POOL = """
from manyhands.notebook.rank_pool import RankPool
pool = RankPool("02_collectives", {"n_ranks": 4})
try:
    pool.start()
except Exception as error:
    raise SystemExit(str(error))
"""
MOUNT = 'mount -t tmpfs -o size=2m tmpfs /dev/shm && "$@"; status=$?; ls /dev/shm; exit $status'
SMALL = ["unshare", "-m", "sh", "-c", MOUNT, "-"]


@pytest.mark.ranks
@pytest.mark.usefixtures("real_python")
@pytest.mark.parametrize("start", ["mpiexec", "launch.py", "notebook"])
def test_a_start_in_a_small_dev_shm_names_it_and_leaves_it_empty(root, tmp_path, start):
    if subprocess.run([*SMALL, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs root, for a /dev/shm of its own")
    program, python = tmp_path / "small.py", sys.executable
    program.write_text(POOL if start == "notebook" else "from manyhands import join\njoin(globals())\n")
    command = {
        "mpiexec": [str(OWN_MPIEXEC), "-n", "4", python],
        "launch.py": [python, "scripts/launch.py", "--starter", "mpiexec", "--nproc", "4"],
        "notebook": [python],
    }
    environ = {**os.environ, "PYTHONPATH": str(root / "scripts")}
    done = subprocess.run(
        [*SMALL, *command[start], program],
        cwd=root, env=environ, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert "/dev/shm is full or small: remove old files there" in done.stderr, done.stderr
    assert done.returncode and "mpich_shm" not in done.stdout
    assert start == "notebook" or done.stderr.count("/dev/shm is full") == 1
