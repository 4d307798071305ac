"""`join()` finds its place whoever started it, and says in a sentence what is wrong where it cannot."""

import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import torch.distributed as dist
from manyhands.launch import devices, settings
from manyhands.launch.join import _agree
from manyhands.launch.launchers import LAUNCHERS, LaunchError, expand_hosts, resolve, without_launchers

RECORDS = {p.stem: json.loads(p.read_text()) for p in (Path(__file__).parent / "environments").glob("*.json")}
TORCHRUN = ["python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
MPIEXEC = str(Path(sys.prefix) / "bin" / "mpiexec")


@pytest.mark.parametrize("name", sorted(name for name in RECORDS if "place" in RECORDS[name]))
def test_a_recorded_environment_names_its_place(name):
    found, expected = asdict(resolve(RECORDS[name]["environ"])), RECORDS[name]["place"]
    assert {field: found[field] for field in expected} == expected, RECORDS[name]["what"]


def test_every_launcher_has_a_record_and_an_interactive_step_is_no_rank():
    recorded = {record["place"]["launcher"] for record in RECORDS.values() if "place" in record}
    assert recorded == {row.name for row in LAUNCHERS} | {"alone"}
    environ = RECORDS["srun_notebook_server"]["environ"]
    assert resolve(environ | {"SLURM_STEP_ID": "4294967290"}).launcher == "alone"


@pytest.mark.parametrize("name", sorted(name for name in RECORDS if "error" in RECORDS[name]))
def test_half_an_environment_is_an_error_with_its_cure(name):
    with pytest.raises(LaunchError) as error:
        resolve(RECORDS[name]["environ"])
    assert [words for words in RECORDS[name]["error"] if words not in str(error.value)] == []
    assert "\n" not in str(error.value)


NEW_LAUNCHER = """
import sys
from manyhands.launch.launchers import LAUNCHERS, Launcher
LAUNCHERS.insert(0, Launcher(
    "jsrun", marks=("JSM_RANK",),
    needs={"rank": "JSM_RANK", "world_size": "JSM_SIZE", "master_addr": "JSM_HEAD", "master_port": "JSM_PORT"},
    sets=("JSM_",), command="jsrun -n {n} python {script}",
))
from manyhands import join
from manyhands.launch.metrics import command
ranks = join(name="test")
sys.argv = ["own.py"]
print(ranks.rank, ranks.world_size, ranks.local_rank, ranks.launcher, command(ranks))
"""


def test_a_launcher_is_one_row_of_the_table_and_its_ranks_meet():
    """The environment of two ranks of a launcher that there is not: nothing else need know it."""
    environ = without_launchers(os.environ) | {"JSM_SIZE": "2", "JSM_HEAD": "127.0.0.1", "JSM_PORT": str(free_port())}
    command, both = [sys.executable, "-c", NEW_LAUNCHER], []
    for rank in ("0", "1"):
        both.append(subprocess.Popen(command, env=environ | {"JSM_RANK": rank}, stdout=subprocess.PIPE, text=True))
    lines = [rank.communicate(timeout=120)[0].splitlines()[-1] for rank in both]
    assert lines == [f"{rank} 2 {rank} jsrun jsrun -n 2 python own.py" for rank in range(2)]


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node[1-3]", "node1 node2 node3"),
        ("nid[008-010,100],login1", "nid008 nid009 nid010 nid100 login1"),
        ("x1000c0s[0-1]b0n0,y[1]", "x1000c0s0b0n0 x1000c0s1b0n0 y1"),
    ],
)
def test_a_node_list_is_expanded_in_order(text, hosts):
    assert expand_hosts(text) == hosts.split()


def test_every_variable_of_the_course_is_listed_with_its_meaning(root):
    files = [
        path for place in ("scripts/manyhands", "jobs") for path in (root / place).rglob("*.*") if path.suffix != ".pyc"
    ]
    used = {name for path in files for name in re.findall(r"MANYHANDS_[A-Z_]+[A-Z]", path.read_text("utf-8"))}
    assert used == set(re.findall(r"MANYHANDS_[A-Z_]+[A-Z]", settings.__doc__))


def offer(local_rank=0, host="n1", cuda=(), xpu=(), cpus=(0, 1), quota=math.inf, omp=""):
    return {
        "host": host, "local_rank": local_rank, "cpus": list(cpus), "quota": quota, "omp_threads": omp,
        "gpus": {"cuda": list(cuda), "xpu": list(xpu)},
        "why_not": {"cuda": "" if cuda else "no CUDA here", "xpu": "" if xpu else "no XPU here"},
    }  # fmt: skip


def seen(kind, *gpus_of_ranks, host="n1"):
    return [offer(rank, host, **{kind: list(gpus)}) for rank, gpus in enumerate(gpus_of_ranks)]


@pytest.mark.parametrize(
    ("wanted", "offers", "kind", "indices", "reason"),
    [
        ("auto", seen("cuda", *["abcd"] * 4), "cuda", [0, 1, 2, 3], ""),
        ("auto", seen("xpu", "ab", "ab"), "xpu", [0, 1], ""),
        ("cuda", seen("cuda", *"abcd"), "cuda", [0, 0, 0, 0], ""),  # one visible GPU for each task is device 0
        ("auto", seen("cuda", "ab", "cd", "efg"), "cuda", [0, 0, 0], ""),  # several of its own: the first of them
        ("auto", seen("cuda", "ab", "bc", "de"), "cpu", [0] * 3, "3 ranks on n1 but 5 cuda devices"),  # two share b
        ("cpu", seen("cuda", *["abcd"] * 4), "cpu", [0] * 4, ""),
        ("auto", seen("cuda", "ab", "ab") + seen("cuda", *["cd"] * 3, host="n2"), "cpu", [0] * 5,
         "3 ranks on n2 but 2 cuda devices"),  # one node sends all to the CPU
        ("auto", [offer()], "cpu", [0], "no CUDA here on n1"),
    ],
)  # fmt: skip
def test_a_gpu_for_each_rank_or_the_cpu_for_all_with_the_reason(wanted, offers, kind, indices, reason):
    assert devices.choose(wanted, offers) == {"kind": kind, "indices": indices, "reason": reason}


def test_a_device_comes_from_the_environment_and_one_that_cannot_be_is_refused_with_the_cure():
    assert settings.device({"MANYHANDS_DEVICE": "cpu"}) == "cpu"
    assert settings.device({"MANYHANDS_DEVICE": ""}) == settings.device({}) == "auto"
    with pytest.raises(LaunchError, match="MANYHANDS_DEVICE='gpu' is unknown; use one of auto, cpu, cuda, xpu"):
        settings.device({"MANYHANDS_DEVICE": "gpu"})
    with pytest.raises(LaunchError, match="^4 ranks on n1 but 1 cuda device; start fewer ranks"):
        devices.choose("cuda", seen("cuda", *["a"] * 4))
    with pytest.raises(LaunchError, match="auto, cpu, cuda, xpu"):
        devices.choose("gpu", seen("cuda", *["a"] * 4))


@pytest.mark.parametrize(
    ("kind", "cpus", "quota", "omp", "threads"),
    [
        ("cpu", [range(8)] * 4, math.inf, "", 1),  # ranks that share cores would only take turns
        ("cpu", [range(2 * r, 2 * r + 2) for r in range(4)], math.inf, "", 2),  # bound
        ("cpu", [range(2 * r, 2 * r + 2) for r in range(4)], 2.0, "", 1),  # bound, but 2 cores' time for 8
        ("cuda", [range(8)] * 4, math.inf, "", 2),  # ranks on GPUs divide the cores that they share
        ("cuda", [range(8 * r, 8 * r + 8) for r in range(8)], 16.0, "", 2),  # bound, but 16 cores' time for 64
        ("cpu", [range(8)], math.inf, "", 8),  # alone it takes its cores, or what OMP_NUM_THREADS says
        ("cpu", [range(8)], math.inf, "3", 3),
        ("cpu", [range(8)], 1.5, "", 1),  # cores are whole ones
    ],
)
def test_threads_of_a_rank_among_others(kind, cpus, quota, omp, threads):
    offers = [offer(rank, cpus=own, quota=quota, omp=omp) for rank, own in enumerate(cpus)]
    assert {devices.threads(kind, own, offers) for own in offers} == {threads}


def test_who_is_here_takes_a_line_for_each_host():
    offers = [offer(r, "n1", cpus=range(8)) for r in range(4)] + [offer(0, "n2", cpus=range(4))]
    text = devices.describe("srun", offers, devices.choose("auto", offers))
    assert text.splitlines() == [
        "5 ranks, launcher srun, backend gloo",
        "  n1: ranks 0-3 on cpu; 8 cores, 1 thread per rank",
        "  n2: rank 4 on cpu; 4 cores, 4 threads per rank",
        "  on cpu because no CUDA here on n1",
    ]
    offers = [offer(r, cuda=["a"]) for r in range(2)]
    assert devices.describe("srun", offers, devices.choose("auto", offers)).splitlines()[-1] == (
        "  WARNING: GPUs are available but unused: on cpu because 2 ranks on n1 but 1 cuda device"
    )
    assert (
        devices.describe("notebook", offers, devices.choose("auto", offers))
        .splitlines()[-1]
        .endswith("but 1 cuda device; in a notebook set n_ranks, or MANYHANDS_RANKS, to the number of GPUs")
    )
    offers = [offer(r, cuda=["a", "b"]) for r in range(2)]
    text = devices.describe("torchrun", offers, devices.choose("auto", offers))
    assert "backend cpu:gloo,cuda:nccl" in text and "ranks 0-1 on cuda 0, 1;" in text and "because" not in text


SCRIPT = """\
# %% tags=["parameters"]
n_ranks = 4        # processes; in a script the launcher decides
length = 4         # numbers per rank, >= 1
device = "auto"    # where to compute, one of auto, cpu, cuda

# %%
import os
import warnings

warnings.simplefilter("error")
import psutil


def listening():
    found = psutil.Process().net_connections("inet")
    return {connection.laddr for connection in found if connection.status == "LISTEN"}


inherited = listening()     # Hydra leaves its own control port open in its children
import torch
import torch.distributed as dist
from manyhands import join, leave, mpi_world, say

ranks = join(globals())
x = torch.ones(length)
dist.all_reduce(x)
say(f"{ranks.rank}/{ranks.world_size} {ranks.launcher} sum={x.sum().item():g} mpi={mpi_world() is not None}")
again = join(globals(), quiet=True)
dist.all_reduce(x)
say(f"again={x.sum().item():g} same={again == ranks} pmi={any(k.startswith('PMI') for k in os.environ)}")
for address in listening() - inherited:
    say(f"listens on {address.ip}")
leave()
leave()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "scripts" / "07_sum.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    return path


def run(*command, timeout_s=250, **environ):
    """(exit status, output, errors) of a command in a process group of its own, which does not outlive it."""
    process = subprocess.Popen(
        [sys.executable if word == "python" else str(word) for word in command], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env=os.environ | environ, start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=timeout_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode, output, errors


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


STARTS = {
    "torchrun": ([*TORCHRUN, "2"], "torchrun", False),
    "mpiexec": ([MPIEXEC, "-n", "2", "python"], "mpich", True),
}


@pytest.mark.parametrize("start", STARTS)
def test_two_ranks_meet_leave_and_meet_again(start, script):
    command, launcher, mpi = STARTS[start]
    later = script.parents[1] / "notebooks" / "07_sum.ipynb"
    later.parent.mkdir()
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("changed()")]), later)
    os.utime(script, (1, 1))
    status, output, errors = run(*command, script, "--length", "3")
    assert status == 0, errors
    assert output.count("07_sum.py runs as it was before 07_sum.ipynb was saved") == 1  # rank 0, at the first join
    assert f"2 ranks, launcher {launcher}, backend gloo" in output
    for rank in range(2):
        assert f"[rank {rank}] {rank}/2 {launcher} sum=6 mpi={mpi}\n" in output
    assert output.count("again=12 same=True") == 2
    assert "Warning" not in errors
    listening = set(re.findall(r"listens on (\S+)", output))
    assert listening <= {"127.0.0.1"}, "nothing listens beyond loopback"
    assert listening or launcher == "torchrun", "the test sees rank 0's own socket"


def test_torchrun_inside_mpiexec_has_no_mpi(script):
    status, output, errors = run(MPIEXEC, "-n", "1", *TORCHRUN, "2", script)
    assert status == 0, errors
    assert output.count("torchrun sum=8 mpi=False") == output.count("pmi=False") == 2
    assert output.count("[rank 0] 0/2") == 1


def test_a_wrong_flag_is_one_sentence_of_rank_0(script):
    status, output, errors = run(*TORCHRUN, "2", script, "--length", "-1")
    assert errors.count("07_sum.py: --length -1 is not accepted: it takes a whole number >= 1\n") == 1
    assert (status, output) == (1, ""), "torchrun turns every status into 1"
    assert '07_sum.py", line' not in errors, "no traceback of ours"


IMPATIENT = "from manyhands.launch import program\nprogram.WORD_S = 0.5\n"  # says soon what it waits for
NOWHERE = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": "9"}  # fmt: skip
ONE_OF_FOUR = RECORDS["openmpi"]["environ"] | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("argv", "environ", "sentences"),
    [
        (["--n-ranks", "8"], {}, ["07_sum.py: --n-ranks is no flag of a script: the launcher decides"]),
        (["--device", "cuda"], {}, ["; start fewer ranks, ask for more GPUs, or use device=cpu"]),
        ([], {name: value for name, value in ONE_OF_FOUR.items() if name.startswith("OMPI_COMM_WORLD")},
         ["rank 0 of 4, but MPI says rank 0 of 1", "bin/mpiexec"]),
        ([], {name: value for name, value in ONE_OF_FOUR.items() if name.startswith(("OMPI_COMM_WORLD", "PMIX_"))},
         ["Open MPI's mpiexec started this process, and mpi4py here uses MPICH", "bin/mpiexec", "--starter torchrun"]),
        ([], NOWHERE,
         ["rank 1 waits for rank 0 at 127.0.0.1:9, up to 2 s", "rank 1 did not reach rank 0 at 127.0.0.1:9 within 2"]),
    ],
)  # fmt: skip
def test_a_wrong_start_ends_with_status_2_and_one_sentence(script, argv, environ, sentences):
    script.write_text(IMPATIENT + script.read_text().replace("join(globals())", "join(globals(), timeout_s=2)", 1))
    status, output, errors = run(sys.executable, script, *argv, **environ)
    assert (status, output) == (2, "")
    assert all(sentence in errors for sentence in sentences)
    assert errors.count("\n") == 1 or environ is NOWHERE  # torch's own warnings


def test_a_lesson_that_needs_two_ranks_does_nothing_on_one(script):
    text = re.sub(r"^n_ranks = .*$", "n_ranks = 4  # processes, at least 2", script.read_text(), flags=re.M)
    script.write_text(text)
    status, output, errors = run(sys.executable, script)
    assert (
        status == 2 and "sum" not in output and "07_sum.py: it needs at least 2 ranks, and was started on 1\n" in errors
    )


def test_help_is_printed_once_and_one_process_takes_the_same_path(script):
    status, output, errors = run(MPIEXEC, "-n", "2", sys.executable, script, "--help")
    assert (status, errors) == (0, "")
    assert output.count("--length") == 1 and "numbers per rank; a whole number >= 1 (now 4)" in output
    status, output, errors = run(sys.executable, script)
    assert (status, errors) == (0, "")
    assert "1 rank, launcher alone" in output and "[rank" not in output
    assert "0/1 alone sum=4 mpi=False" in output and "again=4 same=True" in output


@pytest.mark.parametrize("start", ["alone", "torchrun", "mpiexec"])
def test_on_one_node_ranks_meet_on_loopback_whatever_interface_a_profile_names(start, script):
    status, output, errors = run(*STARTS.get(start, [["python"]])[0], script, GLOO_SOCKET_IFNAME="ib0")
    assert status == 0 and "sum=" in output, errors


def test_an_interface_that_a_node_does_not_have_is_one_sentence_before_any_rank_connects(script):
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environ = os.environ | world | {"RANK": "1", "GLOO_SOCKET_IFNAME": "lo,ib0"}
    other = subprocess.Popen([sys.executable, script], env=environ, stderr=subprocess.PIPE, text=True)
    status, output, errors = run("python", script, RANK="0", **world)
    assert other.communicate(timeout=60)[1] == "" and other.returncode == 2
    assert (status, output) == (2, "") and "RuntimeError" not in errors
    assert errors.startswith("07_sum.py: GLOO_SOCKET_IFNAME names ib0, and ") and errors.count("\n") == 1
    assert "has no such interface with an address; unset it, or name one that `ip -brief addr` shows" in errors


@pytest.mark.parametrize(("gpus", "said"), [(["a"], "NCCL_SOCKET_IFNAME names ib, and n1 has no such"), ([], None)])
def test_an_interface_that_only_nccl_would_use_counts_where_ranks_have_gpus(monkeypatch, gpus, said):
    monkeypatch.setattr(devices, "look", lambda environ: offer(0, "n1", cuda=gpus))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib")
    info = SimpleNamespace(rank=0, world_size=1, local_rank=0)
    _, plan = _agree(dist.HashStore(), info, "auto", {})
    assert plan.get("error", "").startswith(said or "") and ("error" in plan) == bool(said)


def by_hand(script, *of_1, **world):
    """What two ranks print that are started by hand in this world, by rank: (status, output, errors).

    `of_1`: flags that only rank 1 has.
    """
    world = {"WORLD_SIZE": "2", "MASTER_PORT": str(free_port())} | world
    command = [sys.executable, script]
    with ThreadPoolExecutor() as pool:
        second = pool.submit(run, *command, *of_1, RANK="1", timeout_s=90, **world)
        return run(*command, RANK="0", timeout_s=90, **world), second.result()


NO_THREAD = "can't start new thread"


def test_a_rank_that_may_start_no_thread_says_which_limit_it_met(script):
    deny = f"def no(*_):\n    raise RuntimeError({NO_THREAD!r})\n"
    deny += "import threading\nthreading._start_new_thread = no\n"
    script.write_text(script.read_text().replace("ranks = join", f"{deny}ranks = join", 1))
    for status, output, errors in by_hand(script, MASTER_ADDR="127.0.0.1"):
        assert (status, output) == (2, "") and "Traceback" not in errors
        assert errors.startswith(f"07_sum.py: {NO_THREAD}; ulimit -u or the control group's pids.max allows")


def test_ranks_started_by_hand_meet_over_ipv6(script):
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    for rank, (status, output, errors) in enumerate(by_hand(script, MASTER_ADDR="::1", LOCAL_RANK="0")):
        assert status == 0 and f"[rank {rank}] {rank}/2 by hand sum=8" in output, errors


@pytest.mark.parametrize(
    ("program", "of_1", "said"),
    [
        (None, ["--length", "3"], "07_sum.py: rank 0 has length=4 and rank 1 length=3; start"),
        (
            "scripts/train.py",
            # the last two may differ from host to host
            ["--train.steps", "7", "--log.every", "3", "--train.stall-s", "20", "--data.folder", "nowhere"],
            "train.py: rank 0 has train.steps=300 and rank 1 train.steps=7 (and 1 more option); start",
        ),
    ],
)  # fmt: skip
def test_ranks_started_by_hand_with_different_options_are_told_before_they_wait(root, script, program, of_1, said):
    of_0, of_other = by_hand(root / program if program else script, *of_1, MASTER_ADDR="127.0.0.1")
    assert of_0 == (2, "", f"{said} all with the same options\n") and of_other == (2, "", "")


def test_ranks_may_differ_in_what_concerns_their_host(script):
    for status, output, errors in by_hand(script, "--device", "cpu", MASTER_ADDR="127.0.0.1"):
        assert status == 0 and "sum=8" in output, errors


@pytest.mark.parametrize(
    ("address", "cure"),
    [("127.0.0.1", "name another MASTER_PORT"), ("192.0.2.1", "MASTER_ADDR must be an address of rank 0's host")],
)
def test_where_rank_0_cannot_listen_it_says_what_to_change(script, address, cure):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = {"MASTER_ADDR": address, "MASTER_PORT": str(taken.getsockname()[1])}
        status, _, errors = run("python", script, RANK="0", WORLD_SIZE="2", **place)
    assert status == 2 and errors.startswith("07_sum.py: rank 0 cannot listen on ") and errors.endswith(f"{cure}\n")


def test_ranks_started_by_hand_name_those_that_do_not_come_and_say_that_rank_0_has_ended(script):
    """No launcher ends them. Rank 0 waits for rank 2, which never comes, and ends before rank 1's patience is over."""
    text = script.read_text().replace(
        "join(globals())", 'join(globals(), timeout_s=(5, 90)[int(os.environ["RANK"])])', 1
    )
    script.write_text(f"import os\n{IMPATIENT}{text}")
    world = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": "3"}
    environ = os.environ | world | {"RANK": "0", "LOCAL_RANK": "0"}
    first = subprocess.Popen([sys.executable, script], env=environ, stderr=subprocess.PIPE, text=True)
    status, _, errors = run(sys.executable, script, RANK="1", LOCAL_RANK="1", **world)
    assert status == 1 and errors.endswith(
        "rank 1 lost rank 0, which has ended; see its output for the reason, then start again\n"
    )
    of_0 = first.communicate(timeout=60)[1]
    assert first.returncode == 1 and "Traceback" not in of_0
    asks = r"rank 0 waits for ranks? (1, )?2 to join, up to 5 s; did they start, and are they alive\?\n"  # or slow
    assert len(re.findall(asks, of_0)) == 1 and " to join, up to" not in errors, "who is missing is said once, and soon"
    assert of_0.endswith("rank 0 waited 5 s for rank 2 to join; did they start, and are they alive?\n")
