"""`scripts/train.py` as its users start it: plainly, under torchrun and under mpiexec."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from manyhands.launch.metrics import compare

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]  # three launchers, one after the other
ROOT = Path(__file__).parent.parent
FLAGS = [
    *("--train.steps", "12", "--train.global-batch", "4", "--model.n-layer", "2", "--model.n-embd", "32"),
    *("--log.every", "4", "--log.eval-every", "6", "--log.eval-batches", "1", "--log.sample", "20"),
]
LAUNCHERS = {
    "alone": ["python"],
    "torchrun": ["python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "mpich": [str(Path(sys.executable).parent / "mpiexec"), "-n", "2", "python"],
}


def run(launcher, outputs, *flags):
    environ = {**os.environ, "MANYHANDS_OUTPUTS": str(outputs)}
    command = [sys.executable if word == "python" else word for word in LAUNCHERS[launcher]]
    return subprocess.run(
        [*command, "scripts/train.py", *FLAGS, *flags],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=250,
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    outputs = {launcher: tmp_path_factory.mktemp(launcher) for launcher in LAUNCHERS}
    return {launcher: (run(launcher, folder), folder / "train" / "latest") for launcher, folder in outputs.items()}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_run_ends_well_and_leaves_its_numbers(runs, launcher):
    done, folder = runs[launcher]
    assert done.returncode == 0, done.stderr
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["launcher"] == launcher
    assert list(metrics["exact"]["val_losses"]) == ["0", "6", "12"]
    assert metrics["exact"]["val_losses"]["12"] < metrics["exact"]["val_losses"]["0"]
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if line.get("loss") is not None] == [1, 4, 6, 8, 12]
    assert (folder / "checkpoints" / "step-00000012" / "manifest.json").is_file()


def test_two_ranks_give_the_same_bits_from_torchrun_and_mpiexec(runs):
    assert compare(runs["torchrun"][1] / "metrics.json", runs["mpich"][1] / "metrics.json") == []


def test_one_rank_and_two_train_the_same(runs):
    assert compare(runs["alone"][1] / "metrics.json", runs["torchrun"][1] / "metrics.json") == []


def test_a_run_that_need_not_write_its_end_leaves_its_numbers_alone(tmp_path):
    done = run("alone", tmp_path, "--train.steps", "2", "--log.eval-every", "0", "--checkpoint.no-at-end")
    left = tmp_path / "train" / "latest"
    assert done.returncode == 0 and (left / "metrics.json").is_file(), done.stderr
    assert not list((left / "checkpoints").glob("step-*"))


def test_a_wrong_flag_is_said_once_before_anything_starts(tmp_path):
    done = run("torchrun", tmp_path, "--parallel.tensor", "3")
    assert done.returncode == 1
    assert done.stderr.count("train.py:") == 1
    assert "3 tensor" in done.stderr or "tensor=3" in done.stderr
    assert not (tmp_path / "train").exists()


# --- a llama

LLAMA = ["--model.style", "llama", "--model.n-kv-head", "2", "--model.tie", "--train.precision", "fp64"]


def last_loss(folder):
    return json.loads((folder / "manifest.json").read_text())["val_loss"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """The checkpoints of a llama: 6 steps of two ranks under fsdp, and 6 more of one process."""
    folder = tmp_path_factory.mktemp("llama")
    saved = ["--checkpoint.folder", str(folder / "two"), "--checkpoint.every", "6"]
    done = run("torchrun", folder, *LLAMA, *saved, "--parallel.strategy", "fsdp")
    assert done.returncode == 0, done.stderr
    shutil.move(folder / "two" / "step-00000012", folder / "of-two")
    done = run("alone", folder, *LLAMA, *saved)
    assert done.returncode == 0 and "saved by 2 ranks (shard 2)" in done.stdout, done.stderr + done.stdout
    return folder


def test_a_llama_goes_on_under_another_strategy_on_another_number_of_ranks(llama):
    assert last_loss(llama / "two" / "step-00000012") == pytest.approx(last_loss(llama / "of-two"), abs=1e-10)
    done = run("alone", llama, *FLAGS, "--checkpoint.folder", str(llama / "two"))
    assert done.returncode == 2 and "holds another model (" in done.stderr and "style=llama" in done.stderr


@pytest.mark.full  # tests/test_saves.py saves and reads such layouts, and the llama above goes on
def test_a_llama_of_tensor_ranks_and_shards_goes_on_in_a_pipeline(tmp_path, monkeypatch):
    monkeypatch.setitem(LAUNCHERS, "four ranks", [*LAUNCHERS["torchrun"][:-1], "4"])
    folder = tmp_path / "checkpoints"
    saved = ["--checkpoint.folder", str(folder), "--checkpoint.every", "4", "--checkpoint.keep", "9"]
    done = run("four ranks", tmp_path, *LLAMA, *saved, "--parallel.strategy", "fsdp", "--parallel.tensor", "2")
    assert done.returncode == 0, done.stderr
    whole = last_loss(folder / "step-00000012")
    for step in (6, 8, 12):
        shutil.rmtree(folder / f"step-{step:08}", ignore_errors=True)
    done = run("torchrun", tmp_path, *LLAMA, *saved, "--parallel.strategy", "pp", "--train.micro-batch", "2")
    assert done.returncode == 0 and "saved by 4 ranks (shard 2 x tensor 2)" in done.stdout, done.stderr + done.stdout
    assert last_loss(folder / "step-00000012") == pytest.approx(whole, abs=1e-10)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["sample.py", "{}", "--prompt", "ROMEO:", "--length", "80"], "ROMEO:"),  # beyond its 64 positions
        (["align.py", "sft", "--from", "{}", "--train.steps", "1", "--data.held-out", "8", "--train.global-batch", "8",
          "--data.length", "3", "--data.demos", "8", "--lora.rank", "2", "--log.no-plots"], "8 held-out words right"),
    ],
    ids=["sample", "align"],
)  # fmt: skip
def test_a_trained_llama_writes_and_learns_to_answer(llama, tmp_path, command, words):
    name, *flags = [word.replace("{}", str(llama / "two")) for word in command]
    done = subprocess.run(
        [sys.executable, f"scripts/{name}", *flags], cwd=ROOT, capture_output=True, text=True, timeout=120,
        env={**os.environ, "MANYHANDS_OUTPUTS": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0 and words in done.stdout, done.stderr
