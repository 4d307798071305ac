"""ZeRO by DeepSpeed: equal to one process, resumed where it was, refused with the cure where it is not installed."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from manyhands.config.layout import resolve_layout
from manyhands.config.options import model_config, read_options
from rank_pool import run_on_ranks

pytestmark = pytest.mark.ranks

installed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: pip install -e .[deepspeed]"
)
# 36 and 65 do not split evenly over the ranks; 6 sequences at a time are 2 micro-batches
SMALL = (
    "--model.n-layer 2 --model.n-head 2 --model.n-embd 36 --model.block-size 16 --train.global-batch 24"
    " --train.micro-batch 6 --optimizer.clip 0.5"
)


def build(ranks, flags):
    from manyhands.parallel.optimizer import build_optimizer
    from manyhands.parallel.strategy import parallelize

    options = read_options(f"{SMALL} {flags}".split())
    config = model_config(options, 65)
    layout = resolve_layout(options, config, ranks.world_size)
    parallel = parallelize(config, layout, options, ranks)
    return parallel, build_optimizer(parallel, options), options


def train(parallel, optimizer, options, steps, first=0):
    """[(loss, gradient norm) per step], and the full gradients after the first one's clipping."""
    from manyhands.data.corpus import get_batch

    ids, seen, gradients = torch.arange(3000) ** 2 % 65, [], None
    for step in range(first, first + steps):
        share = get_batch(ids, step, 24, 16, parallel.data_rank, parallel.data_size, options.train.seed)
        loss = parallel.forward_backward(*share)
        norm = parallel.clip(options.optimizer.clip)
        gradients = gradients or parallel.named_full_gradients()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((parallel.mean_loss(loss).item(), norm.item()))
    return seen, gradients


def two_ranks(ranks, stages, flags):
    """Per stage: what a run of 5 steps saw; and what another engine sees that goes on from the checkpoint after 2."""
    found = {}
    for stage in stages:
        ds = f"{flags} --parallel.strategy deepspeed --parallel.zero-stage {stage}"
        parallel, optimizer, options = build(ranks, ds)
        begin, gradients = train(parallel, optimizer, options, 2)
        saved = parallel.checkpoint_tensors()
        end, _ = train(parallel, optimizer, options, 3, first=2)
        held = sum(p.numel() for p in parallel.named_parameters().values())
        fresh, its_optimizer, _ = build(ranks, ds)
        fresh.take_checkpoint(saved)
        again, _ = train(fresh, its_optimizer, options, 3, first=2)
        mode, randomness = parallel.model.training, torch.get_rng_state()
        parallel.evaluate(torch.zeros(6, 16, dtype=torch.long), torch.zeros(6, 16, dtype=torch.long))
        logits = parallel.logits(torch.zeros(1, 3, dtype=torch.long))
        found[stage] = {
            "seen": begin + end,
            "gradients": gradients,
            "parameters": parallel.named_full_parameters(),
            "again": (end, again),
            "saved": saved,
            "trains": parallel.model.training is mode is True and torch.equal(torch.get_rng_state(), randomness),
            "logits": logits.shape,
            "held": held,
        }
    return found


def one_process(ranks, flags):
    parallel, optimizer, options = build(ranks, flags)
    seen, gradients = train(parallel, optimizer, options, 5)
    return {"seen": seen, "gradients": gradients, "parameters": parallel.named_full_parameters()}


def all_cases(ranks, cases):
    """Two ranks that have imported DeepSpeed once, which takes seconds: what `two_ranks` finds in each case."""
    return [two_ranks(ranks, stages, flags) for stages, flags in cases]


CASES = {
    "adamw": ((1, 2, 3), "--optimizer.name adamw"),
    "sgd": ((3,), "--optimizer.name sgd"),
    "bf16": ((2,), "--train.precision bf16"),
}


@pytest.fixture(scope="module")
def found():
    """{case: [what `two_ranks` found, by rank]}."""
    ranks = run_on_ranks(2, all_cases, list(CASES.values()), timeout_s=400)
    return {case: [answer[i] for answer in ranks] for i, case in enumerate(CASES)}


@installed
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_every_stage_goes_the_way_of_one_process_and_resumes_on_it(pool, found, name):
    stages, flags = CASES[name]
    expected = pool.run(1, one_process, flags)[0]
    found = found[name]
    for stage in stages:
        mine = found[0][stage]
        for (loss, norm), (loss_1, norm_1) in zip(mine["seen"], expected["seen"], strict=True):
            assert loss == pytest.approx(loss_1, abs=2e-6) and norm == pytest.approx(norm_1, abs=2e-6)
        assert expected["seen"][0][1] > 0.5, "nothing would be clipped"
        for key in ("gradients", "parameters"):
            assert set(mine[key]) == set(expected[key])
            for parameter, value in expected[key].items():
                torch.testing.assert_close(mine[key][parameter], value, rtol=0, atol=2e-6)
        assert all(rank[stage]["seen"] == mine["seen"] for rank in found), "ranks disagree"
        end, again = mine["again"]
        assert again == end, "a resumed run goes on bit for bit"
        slots = {key.rpartition(".")[2] for key in mine["saved"] if key.startswith("optimizer.")}
        assert slots == ({"exp_avg", "exp_avg_sq", "step"} if name == "adamw" else set())
        assert mine["trains"] and mine["logits"] == (1, 3, 65)
    num_params = sum(p.numel() for p in expected["parameters"].values())
    assert found[0][3]["held"] < num_params / 4, "between steps stage 3 holds the small weights only"


@installed
def test_bf16_multiplies_in_bfloat16_and_steps_in_float32(pool, found):
    expected = pool.run(1, one_process, "--train.precision fp32")[0]
    mine = found["bf16"][0][2]
    assert {value.dtype for value in mine["parameters"].values()} == {torch.float32}
    off = [abs(loss - loss_1) for (loss, _), (loss_1, _) in zip(mine["seen"], expected["seen"], strict=True)]
    assert 1e-6 < max(off) < 1e-2, "bfloat16 rounds visibly, and not more"


def test_a_run_without_it_ends_with_status_2_and_the_sentence_alone(root, tmp_path):
    (tmp_path / "deepspeed.py").write_text("raise ImportError('No module named deepspeed')")
    environ = os.environ | {"PYTHONPATH": str(tmp_path), "MANYHANDS_OUTPUTS": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "scripts/train.py", "--parallel.strategy", "deepspeed"],
        cwd=root, env=environ, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert ran.returncode == 2
    assert ran.stderr.count("needs DeepSpeed") == 1 and "Traceback" not in ran.stderr
    assert "pip install -e .[deepspeed]" in ran.stderr and "parallel.strategy=fsdp" in ran.stderr
