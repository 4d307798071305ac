"""Every strategy of the trainer runs to its end as real processes: status, folder and metrics are as they should be.

Under mpiexec a rank ends through C's own `exit`, whose handlers are torch's as well; and torchrun may find itself in a
rank of mpiexec, where it inherits variables of two launchers.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]
ROOT = Path(__file__).parent.parent
MPIEXEC = [str(Path(sys.executable).parent / "mpiexec")]
TORCHRUN = ["python", "-m", "torch.distributed.run"]
TRAIN = [
    *("scripts/train.py", "--model.n-layer", "2", "--model.n-head", "2", "--model.n-embd", "32"),
    *("--model.block-size", "32", "--train.global-batch", "8", "--train.steps", "3", "--log.sample", "0"),
    *("--log.eval-batches", "1", "--train.device", "cpu"),
]
STARTS = {
    "torchrun": ([*TORCHRUN, "--standalone", "--nproc-per-node", "2"], "torchrun"),
    "mpiexec": ([*MPIEXEC, "-n", "2", "python"], "mpich"),
}


def run(words, outputs):
    environ = {**os.environ, "MANYHANDS_OUTPUTS": str(outputs)}
    words = [sys.executable if word == "python" else word for word in words]
    return subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=250)


# each strategy once in `make test`; fsdp, tp and pp under mpiexec, where handlers of torch run at the end
ALWAYS = [("mpiexec", "fsdp"), ("mpiexec", "tp"), ("torchrun", "ddp"), ("torchrun", "zero1"), ("mpiexec", "pp")]


@pytest.mark.parametrize(
    ("start", "strategy"),
    [
        pytest.param(start, strategy, marks=[pytest.mark.full] * ((start, strategy) not in ALWAYS))
        for start in STARTS
        for strategy in ("ddp", "zero1", "fsdp", "tp", "pp")
    ],
)
def test_a_finished_run_ends_with_status_0_and_its_numbers_lie_in_its_folder(start, strategy, tmp_path):
    words, launcher = STARTS[start]
    done = run([*words, *TRAIN, "--parallel.strategy", strategy], tmp_path)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "train" / "latest" / "metrics.json").read_text())
    assert (metrics["lesson"], metrics["launcher"], metrics["world_size"]) == ("train", launcher, 2)
    assert list(metrics["exact"]["val_losses"]) == ["0", "3"]
    assert "Fatal" not in done.stderr and "BAD TERMINATION" not in done.stdout


def nested(tmp_path, *words):
    """Two nodes of one rank each: mpiexec starts a torchrun on each, and both torchruns make one world."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meet = f"--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port} --rdzv-id=nested --local-addr=127.0.0.1"
    torchrun = [*TORCHRUN, "--nnodes=2", "--nproc-per-node=1", *meet.split()]
    return run([*MPIEXEC, "-n", "2", *torchrun, *words], tmp_path)


@pytest.mark.parametrize(
    ("lesson", "words"),
    [
        pytest.param("train", TRAIN, id="train"),
        pytest.param(
            "02_collectives", ["scripts/02_collectives.py", "--repeats", "1"], id="02", marks=pytest.mark.full
        ),
    ],
)
def test_torchrun_inside_mpiexec_leaves_its_outputs_under_the_programs_name(lesson, words, tmp_path):
    done = nested(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert [folder.name for folder in tmp_path.iterdir()] == [lesson]
    metrics = json.loads((tmp_path / lesson / "latest" / "metrics.json").read_text())
    assert (metrics["lesson"], metrics["launcher"], metrics["world_size"]) == (lesson, "torchrun", 2)
