"""A notebook's ranks are forked from one process that has imported torch."""

import ast
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import time

import psutil
import pytest
from manyhands.launch.allocation import OWN_MPIEXEC, Allocation
from manyhands.launch.limits import mapped
from manyhands.launch.processes import Family
from manyhands.notebook import engine_processes
from manyhands.notebook.engine_processes import MARK, why_not_forked
from manyhands.notebook.fork_server import ForkServer
from notebook_kernel import JOIN, START, Kernel, left_behind, wait_until

ABOUT = """%%ranks
import random, resource, numpy
print([open("/proc/self/comm").read().strip(), os.getppid(), len(os.sched_getaffinity(0)),
       resource.getrlimit(resource.RLIMIT_NOFILE)[0], os.environ.get("OURS"), os.getcwd(),
       random.random(), numpy.random.rand()])
"""


@pytest.fixture(scope="module", params=["auto", pytest.param("off", marks=pytest.mark.full)])
def kernel(request, tmp_path_factory, root):
    environ = {"MANYHANDS_MPI": request.param, "PYTHONPATH": str(root / "scripts")}
    with Kernel(tmp_path_factory.mktemp("forks"), root, environ) as kernel:
        kernel.start(n_ranks=2)
        assert kernel.run(JOIN).error is None
        yield kernel


def about(kernel):
    lines = kernel.run(ABOUT).text.splitlines()
    return [ast.literal_eval(line.split(" | ")[1]) for line in lines]


def server_of(kernel):
    (server,) = {psutil.Process(one[1]) for one in about(kernel)}
    assert "manyhands.notebook.fork_server" in server.cmdline()
    return server


@pytest.mark.ranks
def test_forks_have_names_seeds_and_what_the_kernel_gives_them_and_their_server_has_one_thread(kernel):
    first, other = about(kernel)
    assert (first[0], other[0]) == ("rank 0", "rank 1")
    assert first[6] != other[6] and first[7] != other[7], "random numbers of their own"
    assert server_of(kernel).num_threads() == 1
    kernel.run("""
        import os, resource
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (500, hard))
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
        hands.restart(quiet=True)
    """)
    assert kernel.run(JOIN).error is None
    again = about(kernel)
    assert [one[1:6] for one in again] == [[first[1], 1, 500, None, first[5]]] * 2, "of the same server"
    assert again[0][6] != first[6] and again[0][7] != first[7]
    kernel.run("os.environ['OURS'] = 'theirs'\nhands.restart(quiet=True)")
    assert kernel.run(JOIN).error is None
    assert [one[4] for one in about(kernel)] == ["theirs"] * 2
    assert not psutil.pid_exists(first[1]), "libraries read the environment as they load: this is another server"


@pytest.mark.ranks
def test_ranks_and_server_share_their_memory(kernel):
    kernel.start(n_ranks=4)
    kernel.run(f"{JOIN}\ndist.all_reduce(torch.ones(1))")
    tree = {psutil.Process(kernel.pid), server_of(kernel), *Family(kernel.mark(), MARK).members()}
    tree |= {*psutil.Process(kernel.pid).children(recursive=True)}
    assert sum(one.memory_full_info().pss for one in tree) < 720e6, "the kernel and its controller, too"
    kernel.run("""%%ranks
        from torch.distributed.fsdp import fully_shard
        model = fully_shard(torch.nn.Linear(64, 64))
        model(torch.ones(2, 64)).sum().backward()
        torch.optim.AdamW(model.parameters()).step()
    """)
    of_ranks = [psutil.Process(one[1]) for one in about(kernel)[:1]]
    of_ranks += [one for one in Family(kernel.mark(), MARK).members() if one.name().startswith("rank ")]
    assert len(of_ranks) == 5
    assert sum(one.memory_full_info().pss for one in of_ranks) < 600e6, "four that import torch take 1,100 MB"


@pytest.mark.ranks
def test_a_killed_stand_in_ends_its_rank_and_a_killed_server_its_ranks_and_the_next_start_works(kernel):
    kernel.start(n_ranks=2)
    kernel.run(JOIN)
    server, mark = server_of(kernel), kernel.mark()
    rank = next(one for one in Family(mark, MARK).members() if one.name() == "rank 1")
    stands = [one for one in Family(mark, MARK).members() if one.cmdline()[3:4] == ["ask"]]
    stands = [one for one in stands if "ipyparallel.engine" in one.cmdline()]
    assert len(stands) == 2
    child = kernel.run("%%ranks 1\nchild = os.fork()\nif child == 0: time.sleep(600); os._exit(0)\nprint(child)").text
    for one in stands:
        one.kill()
    wait_until(lambda: not rank.is_running() and not psutil.pid_exists(int(child.split(" | ")[1])))
    kernel.start(n_ranks=2)
    kernel.run(JOIN)
    assert server_of(kernel) == server
    server.kill()
    assert "died" in kernel.run("%%ranks\ntime.sleep(60)").error[1]
    kernel.start(n_ranks=2)
    assert kernel.run(JOIN).error is None
    assert server_of(kernel) != server
    assert left_behind(mark, 30) == []


@pytest.mark.ranks
def test_ranks_that_are_stopped_go_by_themselves_and_their_mpiexec_ends_with_status_0(tmp_path, root):
    with Kernel(tmp_path, root, {"PYTHONPATH": str(root / "scripts")}) as kernel:
        kernel.start(n_ranks=2)
        kernel.run("""%%ranks
            import time
            from mpi4py import MPI
            from manyhands.notebook import engine
            go = engine._exit
            engine._exit = lambda status: (time.sleep(0.5), go(status))
        """)
        mark = kernel.mark()
        stopped = """
            from manyhands.notebook import engine_processes
            mpiexec = next(one for one in hands.processes._children if one.name == "engines")
            kill, before = engine_processes.end_all, []
            engine_processes.end_all = lambda *given: (before.append(mpiexec.poll()), kill(*given))
            hands.stop()
            print(before, mpiexec.returncode)
        """
        assert kernel.run(stopped).text == "[0] 0\n", "what is killed gives mpiexec status 9 now and then"
        assert left_behind(mark, 30) == []


@pytest.mark.ranks
def test_kill_9_of_a_kernel_ends_its_server_and_switched_off_no_rank_is_a_fork(tmp_path, root):
    with Kernel(tmp_path / "a", root, {"PYTHONPATH": str(root / "scripts")}) as kernel:
        kernel.start(n_ranks=2)
        kernel.run(JOIN)
        server, mark = server_of(kernel), kernel.mark()
        os.kill(kernel.pid, signal.SIGKILL)
        wait_until(lambda: not server.is_running())
        assert left_behind(mark, 30) == []
    with Kernel(tmp_path / "b", root, {"MANYHANDS_FORK": "0", "MANYHANDS_MPI": "off"}) as kernel:
        kernel.start(n_ranks=2)
        kernel.run(JOIN)
        assert {one[1] for one in about(kernel)} == {kernel.pid}


@pytest.mark.parametrize(
    ("platform", "nodes", "launcher", "fork", "why"),
    [
        ("linux", ["a"], [str(OWN_MPIEXEC), "-n", "2"], "", ""),
        ("linux", ["a"], None, "1", ""),
        ("linux", ["a"], None, "0", "MANYHANDS_FORK=0"),
        ("darwin", ["a"], None, "1", "this is darwin, not Linux"),
        ("linux", ["a", "b"], [str(OWN_MPIEXEC)], "1", "there are 2 nodes"),
        ("linux", ["a"], ["/opt/cray/mpiexec"], "1", "mpiexec starts them, not this environment's mpiexec"),
        ("linux", ["a"], ["srun", "-n", "2"], "1", "srun starts them, not this environment's mpiexec"),
    ],
)
def test_what_is_not_forked_says_why(monkeypatch, platform, nodes, launcher, fork, why):
    monkeypatch.setenv("MANYHANDS_FORK", fork)
    monkeypatch.setattr(engine_processes.sys, "platform", platform)
    assert why_not_forked(Allocation("slurm", nodes, 2), launcher) == why


def test_a_server_that_still_imports_ends_with_its_kernel_all_the_same(root):
    server = ForkServer({**os.environ, "PYTHONPATH": str(root / "scripts")})
    process = psutil.Process(server._process.pid)
    wait_until(lambda: any("libtorch" in one.path for one in process.memory_maps()))
    server.end()
    assert server._process.returncode == -signal.SIGIO, "it imported to the end"


STAGES = [
    ("auto", "", "Processes.can_be_reached"),  # controller and mpiexec have just started
    pytest.param("off", "", "Processes.can_be_reached", marks=pytest.mark.full),
    ("auto", "engine_processes.fork_server().end()", "Processes.can_be_reached"),  # what waits for it runs itself
    pytest.param("auto", "", "RankPool._enter", marks=pytest.mark.full),  # the ranks are there
    pytest.param("off", "", "RankPool._enter", marks=pytest.mark.full),
    ("auto", "", "Processes.note_shared_memory"),  # and have met
]


@pytest.mark.ranks
@pytest.mark.parametrize(("mpi", "first", "stage"), STAGES)
def test_kill_9_of_a_kernel_at_any_stage_of_a_start_leaves_no_process_and_no_memory(mpi, first, stage, tmp_path, root):
    """What MPICH has opened is in the maps of the ranks, and in a file of theirs only once they have met."""
    environ = {"MANYHANDS_MPI": mpi, "PYTHONPATH": str(root / "scripts")}
    with Kernel(tmp_path, root, environ) as kernel:
        kernel.send(f"""
            import os, pathlib, re, signal
            from manyhands.notebook import engine_processes, rank_pool
            from manyhands.notebook.engine_processes import MARK, Family, Processes
            from manyhands.notebook.rank_pool import RankPool
            def killed(self, *_):
                processes = getattr(self, "processes", self)
                {first}
                pids = [one.pid for one in Family(processes.mark, MARK).members()]
                segments = set(re.findall("/dev/shm/mpich_shm_\\w+", engine_processes.mapped(pids)))
                told = pathlib.Path({str(tmp_path / "told")!r})
                told.with_suffix(".new").write_text(" ".join([processes.mark, str(processes.folder), *segments]))
                told.with_suffix(".new").rename(told)
                os.kill(os.getpid(), signal.SIGKILL)
            {stage} = killed
        """)
        kernel.send(START.format(scripts=str(root / "scripts"), n_ranks=2, length=3))
        wait_until((tmp_path / "told").exists)
        mark, folder, *segments = (tmp_path / "told").read_text().split()
        assert segments or mpi == "off" or "reached" in stage
        assert left_behind(mark, 30) == []
        wait_until(lambda: not os.path.exists(folder))  # the watchdog's last act
        assert not any(map(os.path.exists, segments))


STARTS = """
import sys
from manyhands.notebook import engine_processes, rank_pool
engine_processes.prepare()
statuses = []
for number in range(int(sys.argv[2])):
    if number == int(sys.argv[3]):
        print("begun", flush=True)
    pool = rank_pool.RankPool("", {"n_ranks": 2}, mpi=sys.argv[1] == "auto")
    pool.start(quiet=True)
    started = [one for one in pool.processes._children if one.name == "engines"]
    pool.stop()
    statuses += [mpiexec.returncode for mpiexec in started]
print(statuses)
"""


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mpi", ["auto", "off"])
def test_50_starts_and_stops_end_mpiexec_with_status_0_and_17_killed_at_any_moment_leave_nothing(mpi, root):
    drawn, segments = random.Random(50), set()
    # a start on its own waits for the server, which imports; the second one finds it ready
    for starts, before in [(1, 0)] * 8 + [(2, 1)] * 9 + [(50, 0)]:
        family = Family(secrets.token_hex(8), "STARTS")
        environ = {**os.environ, "PYTHONPATH": str(root / "scripts"), "STARTS": family.mark, "MANYHANDS_LIVE": "0"}
        kernel = subprocess.Popen(
            [sys.executable, "-c", STARTS, mpi, str(starts), str(before)], env=environ, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        printed = kernel.stdout.readline()
        if starts < 50:
            time.sleep(drawn.uniform(0, 4 if before else 8))  # it has ended by itself, if it was quick
            pids = [one.pid for one in family.members()]
            segments.update(re.findall(r"/dev/shm/mpich_shm_\w+", mapped(pids)))
            kernel.kill()
        printed += kernel.communicate(timeout=800)[0]
        assert printed.startswith("begun") and kernel.returncode in (0, -signal.SIGKILL if starts < 50 else 0), printed
        if starts == 50:
            assert ast.literal_eval(printed.splitlines()[-1]) == [0] * 50 * (mpi == "auto")
        wait_until(lambda family=family: not family.members(), 30)
    assert segments or mpi == "off"
    wait_until(lambda: not any(map(os.path.exists, segments)))
