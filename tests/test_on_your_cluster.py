"""Lesson 15's surroundings: the container's definition, the presets in full size, Polaris as the figure shows it."""

import contextlib
import http.server
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
from unittest.mock import patch

import pytest
from definitions import taken_from
from manyhands.checks.on_your_cluster import POLARIS
from manyhands.lessons import on_your_cluster
from manyhands.predict.simulated_rank import in_own_process

LESSON = "15_on_your_cluster"


@pytest.fixture(scope="module")
def parts(root):
    """{section of the definition: its lines}"""
    text = (root / "jobs" / "manyhands.def").read_text()
    found = re.findall(r"^%(\w+)\n((?:    .*\n|\n)*)", text, re.MULTILINE)
    return {name: [line[4:] for line in body.splitlines() if line.strip()] for name, body in found}


def bound(ranks):
    """{case of the lesson's measurement: the cores that this rank may use in it}, and those afterwards."""

    def look(calls, *_):
        return {name: (call(), sorted(os.sched_getaffinity(0)))[1] for name, call in calls.items()}

    with patch.object(on_your_cluster, "take_turns", look):
        found = on_your_cluster.time_on_one_core(ranks, 1)
    return found.samples, sorted(os.sched_getaffinity(0))


def test_ranks_have_a_core_each_before_they_share_one_and_all_cores_again_afterwards(pool):
    """Left alone, two of them may begin on one core, which then seems as fast as two."""
    cores = sorted(os.sched_getaffinity(0))
    for rank, (found, after) in enumerate(pool.run(2, bound)):
        assert found == {on_your_cluster.ALL: [cores[rank % len(cores)]], on_your_cluster.ONE: cores[:1]}
        assert after == cores


@pytest.mark.ranks
@pytest.mark.parametrize("image", ["manyhands.def", "Dockerfile", ""])
def test_a_plain_mpiexec_in_a_container_of_a_slurm_job_starts_its_ranks_where_the_image_says_how(parts, root, image):
    """The job's variables are there, and no srun. Without the image's line mpiexec asks for srun, and hangs."""
    host, only = platform.node(), f"{sys.prefix}/bin"
    job = {"JOB_ID": "7", "NNODES": "1", "NODELIST": host, "NTASKS": "2", "TASKS_PER_NODE": "2"}
    job |= {"JOB_NODELIST": host, "JOB_NUM_NODES": "1", "JOBID": "7"}
    dockerfile = (root / "jobs" / "Dockerfile").read_text()
    lines = {
        "manyhands.def": [line for line in parts["environment"] if "srun" in line],
        "Dockerfile": [f"export {line[4:]}" for line in dockerfile.splitlines() if line.startswith("ENV ")],
        "": [],
    }[image]
    start = subprocess.Popen(
        ["/bin/sh", "-c", "\n".join([*lines, "exec mpiexec -n 2 python -c 'print(7)'"])], start_new_session=True,
        env={"PATH": only} | {f"SLURM_{name}": value for name, value in job.items()},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        said = start.communicate(timeout=60)[0] if image else start.stdout.readline()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(start.pid, signal.SIGKILL)
        start.wait()
    assert said.split() == ["7", "7"] if image else "execvp error on file srun" in said


STAND_INS = {  # in front of PATH: nothing is downloaded, and nothing of this machine is removed
    "apt-get": 'echo "apt-get $*" >>"$LOG"',
    "rm": ":",
    "python3": f'exec {sys.executable} "$@"',
    "uv": 'echo "uv $*" >>"$LOG"; for word; do [ "$last" != -r ] || cat "$word" >>"$LOG.pins"; last=$word; done',
}


@pytest.fixture
def index_here():
    """The address of an index that answers, and has nothing."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()


@pytest.mark.ranks
def test_the_container_installs_exactly_the_pins_with_their_hashes(parts, root, tmp_path, index_here):
    """Apptainer is not here: %files and %post are run as it would run them, in a folder in the place of /opt."""
    opt, stubs, log = tmp_path / "opt", tmp_path / "bin", tmp_path / "log"
    stubs.mkdir()
    for name, line in STAND_INS.items():
        (stubs / name).write_text(f"#!/bin/bash\n{line}\n")
        (stubs / name).chmod(0o755)
    for source, target in (line.split() for line in parts["files"]):
        place = tmp_path / target.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        ignore = shutil.ignore_patterns("__pycache__")
        if (root / source).is_dir():
            shutil.copytree(root / source, place, ignore=ignore)
        else:
            shutil.copy(root / source, place)
    ((name, usual),) = (line.split("=") for line in parts["arguments"])
    assert usual.startswith("https://")
    index = index_here  # set-up looks whether it can be reached, and no test needs the web
    post = "\n".join(parts["post"]).replace("{{ " + name + " }}", index).replace("/opt", str(opt))
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TORCH_INDEX", "VIRTUAL_ENV")}
    environ |= {"PATH": f"{stubs}:{os.environ['PATH']}", "LOG": str(log)}
    done = subprocess.run(["/bin/sh", "-c", post], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]

    wanted = set(re.findall(r"^[\w-]+==\S+", (root / "requirements.txt").read_text(), re.MULTILINE))
    wanted |= set(re.findall(r"^[\w-]+==\S+", (root / "data" / "plays.txt").read_text(), re.MULTILINE))
    calls = log.read_text()
    assert {"gcc", "g++", "libc6-dev", "libibverbs1"} < set(re.search("^apt-get install (.*)$", calls, re.M)[1].split())
    installed = re.findall(r"^([\w-]+==\S+) \\$", (tmp_path / "log.pins").read_text(), re.MULTILINE)
    (torch,) = re.findall(r"^uv .*--index-url (\S+) (torch==\S+)$", calls, re.MULTILINE)
    assert torch == (index, "torch==2.13.0")
    spelled = {pin.lower().replace("_", "-") for pin in wanted}
    assert {pin.lower().replace("_", "-") for pin in [*installed, torch[1]]} == spelled and len(installed) == len(
        wanted
    ) - 1
    assert "--require-hashes" in calls and "libibverbs1" in calls
    assert next(opt.glob("manyhands/lib/python*/site-packages/manyhands/__init__.py")).exists()
    assert any("/opt/manyhands/bin:$PATH" in line for line in parts["environment"])


@pytest.mark.full  # `test_meshes_and_planning` has a smaller model on as many ranks
@pytest.mark.ranks
@pytest.mark.parametrize("preset", ["gpt-1b", "gpt-7b"])
def test_the_presets_in_full_size_hold_what_the_dry_run_plans_on_8_64_and_1024_ranks(preset):
    worlds = (8, 64, 1024)
    sizes = []
    for found in in_own_process(worlds, ["--preset", preset, "--train.global-batch", "4096"]):
        held, planned = (sum(found[key][kind] for kind in found["held"]) for key in ("held", "planned"))
        assert held == planned
        sizes.append(held)
    if preset == "gpt-1b":  # replicas: 16 bytes for each of 0.941 billion parameters, on any number of ranks
        assert len(set(sizes)) == 1 and sizes[0] / 16 == pytest.approx(0.941e9, rel=1e-3)
    else:
        for n, held in zip(worlds, sizes, strict=True):
            assert 1 <= held * n / (16 * 6.715e9) < 1.02


def test_on_polaris_each_gpu_gets_the_eight_cores_that_its_guide_gives_it():
    """docs.alcf.anl.gov: GPU 0 beside cores 24 to 31, ..., GPU 3 beside cores 0 to 7."""
    cores_beside = taken_from(LESSON, "cores_beside").cores_beside
    for gpu in range(4):
        assert cores_beside(gpu, POLARIS) == list(range(24 - 8 * gpu, 32 - 8 * gpu))
