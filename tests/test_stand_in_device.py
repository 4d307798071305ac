"""Every lesson and every strategy of the trainer on GPUs that are none, on two ranks: what a GPU refuses is refused.

See stand_in_device for what it can show, and what it cannot.
"""

import os
import re
import subprocess
import sys

import pytest
import shortest
import torch
import torch.distributed as dist
from conftest import ROOT
from manyhands.checks import start as checks
from manyhands.course.lessons import find_lessons
from manyhands.tools.lesson_run import LABELS, Run
from stand_in_device import GPU, StandIn, WrongDevice, on_gpu

PROGRAM = str(ROOT / "tests" / "stand_in_device.py")
EACH_SECTION = str(ROOT / "tests" / "each_section.py")
LESSONS = find_lessons(ROOT, own=False)
TRAIN = "--model.n-layer 2 --model.n-embd 16 --model.block-size 16 --train.steps 2 --train.global-batch 4 "
TRAIN += "--log.eval-batches 1 --log.sample 4 --log.no-plots "
STRATEGIES = {
    "replicas, DDP's buckets": "--parallel.all-reduce buckets",
    "replicas, one flat vector": "--parallel.all-reduce flat",
    "ZeRO-1": "--parallel.strategy zero1",
    "FSDP": "--parallel.strategy fsdp --train.precision bf16",
    "FSDP, states on the CPU": "--parallel.strategy fsdp --parallel.offload",
    "tensor parallel": "--parallel.tensor 2 --parallel.sequence-parallel --parallel.loss-parallel",
    "pipeline": "--parallel.pipeline 2 --parallel.activation-checkpointing block",
}


def run(command, outputs, timeout_s=360):
    """Run a program: the completed process, its errors among its output."""
    environ = os.environ | {"OMP_NUM_THREADS": "1", "MANYHANDS_OUTPUTS": str(outputs)}
    return subprocess.run(
        command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s,
        env=environ, cwd=ROOT,
    )  # fmt: skip


class OnGpus(Run):
    """A script on ranks that believe to have GPUs."""

    def command(self, timeout_s=60):
        words = super().command(timeout_s)
        at = words.index(str(self.source))
        return [*words[:at], PROGRAM, *words[at:]]


each_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)


@pytest.mark.lesson
@pytest.mark.timeout(400)
@each_lesson
def test_the_attendees_script_runs_on_two_gpus_and_speaks_of_them(lesson, attendees, tmp_path):
    """Nobody has written a line in it yet."""
    way = "mpiexec" if int(lesson.number) % 4 == 0 else "torchrun"
    outcome = OnGpus(attendees[lesson.name], way, 2, tmp_path / "run", shortest.values(lesson)).carry_out(timeout_s=360)
    log = LABELS.sub("", (tmp_path / "run" / "log.txt").read_text(errors="replace"))
    assert not outcome.error, f"{outcome.error}\n{log[-3000:]}"
    assert (outcome.metrics["world_size"], outcome.metrics["device"]) == (2, "cuda")
    found = re.findall(r"\b(?:exercise|build) \w+ \(.*\): ([^.\n]*)", log)
    assert len(found) >= 3 and set(found) == {"not attempted"}
    if lesson.number != "04":  # which shows the recorded log of a job on CPUs
        spoken = log.replace("cpu:gloo,cuda:nccl", "")
        for asked in ("shards and gradients rest on cpu", "gloo put"):  # as lesson 06 has asked for
            spoken = spoken.replace(asked, "")
        for recorded in (ROOT / "assets" / "recorded").glob(f"{lesson.number}_*.out"):  # a doctor's on CPUs, in 15
            for line in recorded.read_text().splitlines():
                spoken = spoken.replace(line.strip() or "\n", "\n")
        assert not re.findall(r"^.*(?:\bgloo\b|\bsockets?\b|\bcpu\b).*$", spoken, re.M)


@pytest.mark.lesson
@pytest.mark.timeout(400)
@pytest.mark.parametrize("lesson", [one for one in LESSONS if one.number != "04"], ids=lambda lesson: lesson.name)
def test_each_section_runs_after_the_start_cells_alone(lesson, tmp_path):
    """A world of one, without GPUs. Whatever a section needs from above it catches up with; in 04 it needs all."""
    done = run([sys.executable, EACH_SECTION, str(lesson.script), *shortest.FLAGS[lesson.name].split()], tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.lesson
@pytest.mark.timeout(400)
@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_core_alone_runs_to_its_end(lesson, tmp_path):
    """In a room nobody runs MORE: CORE needs nothing of it, also in the last cell, which writes and leaves."""
    words = [sys.executable, EACH_SECTION, "core", str(lesson.script), *shortest.FLAGS[lesson.name].split()]
    done = run(words, tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]
    assert next(tmp_path.rglob("metrics.json"))


@pytest.mark.ranks
@pytest.mark.timeout(400)
def test_the_trainers_strategies_run_on_gpus_and_agree(tmp_path):
    words = []
    for flags in STRATEGIES.values():
        words += ["THEN", str(ROOT / "scripts" / "train.py"), *TRAIN.split(), *flags.split()]
    two = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", PROGRAM]
    done = run([*two, *words], tmp_path, timeout_s=360)
    assert done.returncode == 0, done.stdout[-3000:]
    losses = re.findall(r"lowest val_loss (\S+) after step 2", done.stdout)
    assert len(losses) == len(STRATEGIES), done.stdout[-3000:]
    assert max(map(float, losses)) - min(map(float, losses)) < 0.02  # one of them computes in bf16


def _on_a_stand_in(ranks, action):
    with StandIn():
        try:
            return action(ranks)
        except WrongDevice as error:
            return str(error)


def _nccl_gets_a_tensor_of_the_cpu(ranks):
    group = dist.new_group(backend="nccl")
    dist.all_reduce(torch.ones(2), group=group)


def test_a_collective_of_nccl_takes_tensors_of_gpus(pool):
    (said,) = pool.run(1, _on_a_stand_in, _nccl_gets_a_tensor_of_the_cpu)
    assert "allreduce_: a tensor of the CPU in a group of nccl" in said


def _judged_with_a_tensor_of_a_gpu(ranks):
    def roll_call(rank, started):
        roll = torch.zeros(started, device="cuda")
        roll[rank] = 1
        dist.all_reduce(roll)
        return roll

    with StandIn():
        return str(checks.roll_call(roll_call, ranks))


def test_an_answer_that_sends_a_gpus_tensor_where_only_gloo_is_hears_so(pool):
    (said, _) = pool.run(2, _judged_with_a_tensor_of_a_gpu)
    assert said == (
        f"Rank 0 hands all_reduce a tensor of {GPU}, and here the ranks communicate over gloo: create it on the CPU."
    )


@pytest.mark.ranks
@pytest.mark.parametrize(("override", "said"), [("1", 1), ("0", 0)])
def test_where_a_container_turns_tf32_on_ranks_with_gpus_are_told_once(tmp_path, monkeypatch, override, said):
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", override)
    (tmp_path / "joins.py").write_text("import torch\nfrom manyhands import join\njoin()\n"
                                       "assert torch.get_float32_matmul_precision() == 'highest'\n")  # fmt: skip
    start = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    done = run([sys.executable, *start, PROGRAM, str(tmp_path / "joins.py")], tmp_path)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1, which some containers set, makes") == said


def test_a_tensor_knows_where_it_is_and_operators_refuse_what_cuda_refuses():
    with StandIn():
        here, there = torch.ones(3), torch.ones(3, device="cuda")
        assert there.device == GPU and there.is_cuda and not here.is_cuda
        assert (there * 2)[1:].view(2, 1).device == GPU and on_gpu(torch.zeros_like(there))
        assert there.to("cpu").device.type == "cpu" and on_gpu(here.to(there))
        assert (there + torch.tensor(1.0)).device == GPU  # without dimensions a tensor of the CPU goes along
        assert there[torch.tensor([0, 2])].shape == (2,)  # and so do indices
        for wrong in (lambda: here + there, lambda: torch.cat([here, there]), lambda: torch.dot(here, there)):
            with pytest.raises(WrongDevice, match=f"tensors of {GPU} and of the CPU in one operator"):
                wrong()
        with pytest.raises(WrongDevice, match="can't convert a cuda:0 tensor to numpy"):
            there.numpy()
        assert there.cpu().numpy().tolist() == [1, 1, 1]
        weight = torch.ones(3, device="cuda", requires_grad=True)
        (weight * there).sum().backward()
        assert weight.grad.device == GPU
    assert there.device.type == "cpu"  # outside nothing is left of it
