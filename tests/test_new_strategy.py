"""A strategy is one module and one registration: nothing else of the course is touched, and it trains."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from manyhands.config.strategies import STRATEGIES

ROOT = Path(__file__).resolve().parents[1]
MODULE = '''
"""Gradients are summed in rank order, by hand: a strategy that only this test knows."""

import torch.distributed as dist

from manyhands.parallel.ddp import NoParallel
from manyhands.parallel.mesh_strategy import MeshStrategy


class ByHand(MeshStrategy):
    def replicate(self, model):
        return Averaged(model)


class Averaged(NoParallel):
    def backward(self, loss, last=True):
        loss.backward()
        if last:
            for p in self.model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
'''
REGISTRATION = """
STRATEGIES["by-hand"] = Registration(
    "the batch, and nothing is overlapped",
    axis="replicate",
    dp_mode="replicas",
    implementation="by_hand.ByHand",
    options=("all_reduce",),
    refusal=lambda options, degrees: "by-hand has no tensor ranks; use tp" if degrees["tensor"] > 1 else "",
)
STRATEGIES["by-heart"] = Registration("nothing that a formula knows", axis="replicate", dp_mode="by heart")
"""
TINY = "--model.n-layer 2 --model.n-embd 32 --train.steps 6 --log.eval-every 3 --log.sample 0 --log.no-plots"


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """The programs and the package, with a strategy more, in the two places that CONTRIBUTING names."""
    scripts = tmp_path_factory.mktemp("course") / "scripts"
    shutil.copytree(ROOT / "scripts", scripts, ignore=shutil.ignore_patterns("__pycache__"))
    (scripts / "manyhands" / "parallel" / "by_hand.py").write_text(MODULE.lstrip())
    registry = scripts / "manyhands" / "config" / "strategies.py"
    text = registry.read_text()
    end = text.index("\n\ndef strategies_help")
    registry.write_text(text[:end] + REGISTRATION + text[end:])
    return scripts


def run(course, *words, ranks=1, program="train.py"):
    """A finished run of a program: the process."""
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environ |= {"MANYHANDS_OUTPUTS": str(course.parent / "outputs"), "OMP_NUM_THREADS": "1"}
    command = [*start, str(course / program), *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)


@pytest.mark.ranks
def test_one_module_and_one_registration_are_a_strategy_that_trains_as_ddp_does(course):
    losses = []
    for strategy in ("by-hand", "ddp"):
        ended = run(course, "--parallel.strategy", strategy, "--train.precision", "fp64", *TINY.split(), ranks=2)
        assert ended.returncode == 0, ended.stderr
        content = json.loads((course.parent / "outputs" / "train" / "latest" / "metrics.json").read_text())
        losses.append(content["exact"]["val_losses"])
    assert losses[0].keys() == losses[1].keys() == {"0", "3", "6"}
    assert all(abs(losses[0][step] - losses[1][step]) < 1e-10 for step in losses[0])


@pytest.mark.ranks
def test_flags_help_refusals_and_the_dry_run_know_a_registered_strategy(course):
    assert "by-hand    the batch, and nothing is overlapped" in run(course, "--help").stdout
    dry = ("--dry-run", "--ranks", "4", "--parallel.strategy", "by-hand")
    shown = run(course, *dry, "--parallel.all-reduce", "flat")
    assert 'strategy = "by-hand"' in shown.stdout and "4 ranks, strategy by-hand: replicate 4" in shown.stdout, (
        shown.stderr
    )
    refused = run(course, *dry, "--parallel.tensor", "2")
    assert refused.returncode == 2 and "by-hand has no tensor ranks; use tp" in refused.stderr
    refused = run(course, *dry, "--parallel.sharding", "hybrid")
    assert "parallel.sharding=hybrid needs parallel.strategy=fsdp, not by-hand" in refused.stderr


def test_the_planner_tries_a_registered_strategy_and_names_one_that_it_has_no_formulas_for(course):
    question = ("--preset", "gpt2", "--gpus", "8")
    told = json.loads(run(course, *question, "--json", program="plan.py").stdout)
    plans = {one["layout"]: one for one in told["plans"]}
    by_hand, ddp = plans["by-hand 8"], plans["replicas 8"]
    state = ("parameters", "gradients", "optimizer", "copies")
    assert [by_hand["bytes"][kind] for kind in state] == [ddp["bytes"][kind] for kind in state]
    sums = [[one["payload_bytes"] for one in plan["messages"]] for plan in (by_hand, ddp)]
    assert sums[0] == sums[1], "both are of dp_mode replicas; ddp's go at once, beside a CUDA graph"
    assert "by-hand" in by_hand["train_flags"] and "replicas 4 x tensor 2" in plans
    names = [*plans, *(one["layout"] for one in told["refused"])]
    assert not [name for name in names if "by-heart" in name or ("by-hand" in name and "tensor" in name)]
    why = "no formula of memory and traffic for dp_mode='by heart' in manyhands.predict"
    assert told["not_planned"]["by-heart"] == why
    assert f"Not planned: by-heart: {why}." in run(course, *question, program="plan.py").stdout
    refused = run(course, "--dry-run", "--ranks", "4", "--parallel.strategy", "by-heart")
    assert refused.returncode == 2 and "no formula says what a rank holds under dp_mode='by heart'" in refused.stderr


def test_the_trainers_page_says_what_the_ranks_share_under_each_strategy():
    text = (ROOT / "assets" / "site" / "train.md").read_text()
    assert all(f"| `{name}` |" in text for name in STRATEGIES)
