"""Lesson 05: the number of ranks does not show in the result, and every figure it prints follows from a formula.

What is tested is the lesson's own code, taken from its script, on real ranks.
"""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from definitions import taken_from
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT
from manyhands.lessons.same_science import PartitionedSampler

LESSON = "05_same_science"
NUMBERS = (1, 2, 3, 4)
T, STEPS, BATCH = 8, 6, 12
CONFIG = GPTConfig(vocab_size=11, block_size=T, n_layer=1, n_head=2, n_embd=8)
IDS = (torch.arange(4000) ** 2 // 7) % 11  # a text with an order that can be learnt


class Groups(dict):
    """{n: a group of the first n ranks}, made by all ranks when it is asked for."""

    def __missing__(self, n):
        self[n] = dist.new_group(range(n))
        return self[n]


def lesson(*names, **given):
    """These definitions of the lesson, over a small corpus and model, on this rank."""
    alone = not dist.is_initialized()
    rank, world_size = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    around = {
        "corpus": SimpleNamespace(train_ids=IDS), "config": CONFIG, "T": T, "steps": STEPS, "global_batch": BATCH,
        "micro_batch": 1, "group_of": Groups(), "rank": rank, "world_size": world_size, "device": torch.device("cpu"),
    }  # fmt: skip
    needed = [
        name
        for name in (
            "new_model",
            "flat",
            "uneven_batch",
            "loss_sum",
            "descend",
            "summed",
            "gradients",
            "validation",
        )
        if name not in names
    ]
    return taken_from(LESSON, *needed, *names, **around | given)


# ---- on the ranks ----


def trajectories(ranks):
    """Losses by n, for every n up to the number of ranks: of the lesson, in float32, and of the mean of means."""
    ours = lesson("remaining", "token_mean", "trajectory")
    n = ranks.world_size
    own_mean = {"loss_of": lambda total, y_bT: total / (y_bT != -100).sum()}
    kinds = {"float64": {}, "float32": {"dtype": torch.float32}, "mean of means": own_mean}
    return {kind: ours.trajectory(n, **how) for kind, how in kinds.items()}


def measurements(ranks):
    from manyhands.measure.virtual_network import Link

    link = Link(50e-6, 1e9)
    ours = lesson(
        "noise_scale", "ring_s", "virtual_step",
        link=link, num_params=1000, serial_s=1e-3, work_s=20e-3, ranks=ranks,
    )  # fmt: skip
    torch.manual_seed(0)
    n = ranks.world_size
    return ours.noise_scale(GPT(CONFIG), num=24), ours.virtual_step(n), ours.ring_s(n)


@pytest.fixture(scope="module")
def losses(pool):
    """{n: {kind: losses [steps] of rank 0}}, each on n real ranks."""
    return {n: pool.run(n, trajectories)[0] for n in NUMBERS}


@pytest.fixture(scope="module")
def reference():
    """Losses [steps] of the plainest loop: one process, one pass over the global batch, the library's mean."""
    ours = lesson()
    model = ours.new_model(torch.float64)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for step in range(STEPS):
        x_BT, y_BT = ours.uneven_batch(step)
        loss = F.cross_entropy(model(x_BT)[0].flatten(0, 1), y_BT.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("n", NUMBERS)
def test_the_trajectory_on_n_ranks_is_that_of_one_plain_process_to_1e_10(losses, reference, n):
    assert (losses[n]["float64"] - reference).abs().max() < 1e-10
    assert reference[-1] < reference[0] - 0.01, "it learns, so there is something to compare"


def test_float64_tells_rounding_from_a_wrong_weight_and_float32_hardly_does(losses, reference):
    for n in NUMBERS[1:]:
        rounding, single, wrong = (
            (losses[n][kind] - reference).abs().max() for kind in ("float64", "float32", "mean of means")
        )
        assert rounding < 1e-12 < 1e-8 < single < 1e-4 < wrong


def test_sequences_of_a_global_batch_differ_in_length_and_repeat_in_every_process():
    x_BT, y_BT = lesson().uneven_batch(3)
    counts = (y_BT != -100).sum(1)
    assert counts.min() >= 4 and counts.max() <= T and len(set(counts.tolist())) > 1
    assert all(torch.equal(a, b) for a, b in zip((x_BT, y_BT), lesson().uneven_batch(3), strict=True))


def test_noise_scale_and_virtual_steps_are_those_of_the_formulas_on_any_number_of_ranks(pool):
    found = {n: pool.run(n, measurements)[0] for n in NUMBERS}
    scale = found[1][0]
    gradients = lesson().gradients
    torch.manual_seed(0)
    rows = gradients(GPT(CONFIG), 24).double()
    noise = rows.var(0).sum()
    assert scale == pytest.approx((noise / ((rows.mean(0) ** 2).sum() - noise / 24)).item(), rel=1e-3)
    for n, (other, step_s, ring_s) in found.items():
        assert other == pytest.approx(scale, rel=1e-3)
        assert step_s == pytest.approx(1e-3 + 20e-3 / n + ring_s, rel=1e-12)


# ---- figures of the lesson ----


def test_the_lessons_order_is_that_of_the_package_also_where_another_number_of_ranks_goes_on():
    remaining = lesson("remaining").remaining
    for rank in range(3):
        sampler = PartitionedSampler(100, rank, 3, seed=0)
        sampler.load_state_dict({"epoch": 3, "position": 40, "length": 100, "seed": 0, "shuffle": True})
        assert remaining(100, 3, 40, rank, 3) == list(sampler)


def test_a_batch_that_does_not_split_is_refused_in_one_sentence(root, tmp_path):
    done = subprocess.run(
        [sys.executable, root / "scripts" / f"{LESSON}.py", "--global-batch=5"],
        check=False, capture_output=True, text=True, timeout=150, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2
    assert "global_batch=5 is no multiple of micro_batch=2 x 1 ranks; use a multiple of 2" in done.stderr
