"""Lesson 05: the number of ranks does not show in the result, and every figure it prints follows from a formula.

What is tested is the lesson's own code, taken from its script, on real ranks.
"""

import re
import statistics
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from manyhands.course.catch_up import taken_from
from manyhands.data.samplers import PartitionedSampler
from manyhands.gpt.model import GPT, GPTConfig

LESSON = "05_same_science"
NUMBERS = (1, 2, 3, 4)
T, STEPS, BATCH = 8, 6, 12
CONFIG = GPTConfig(vocab_size=11, block_size=T, n_layer=1, n_head=2, n_embd=8)
IDS = (torch.arange(4000) ** 2 // 7) % 11  # a text with an order that can be learnt


def lesson(*names, **given):
    """These definitions of the lesson, over a small corpus and model, on this rank."""
    alone = not dist.is_initialized()
    rank, world_size = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    around = {
        "corpus": SimpleNamespace(train_ids=IDS), "config": CONFIG, "T": T, "steps": STEPS, "global_batch": BATCH,
        "micro_batch": 1, "rank": rank, "world_size": world_size, "device": torch.device("cpu"),
    }  # fmt: skip
    needed = [
        name
        for name in ("new_model", "flat", "uneven_batch", "loss_sum", "gradient_row", "summed", "gradients")
        if name not in names
    ]
    return taken_from(LESSON, *needed, *names, **around | given)


# ---- on the ranks ----


def trajectories(ranks):
    """Losses by n, for every n up to the number of ranks: of the lesson, in float32, and of the mean of means."""
    ours = lesson("trajectory")
    n = ranks.world_size
    kinds = {"float64": {}, "float32": {"dtype": torch.float32}, "mean of means": {"count_all": False}}
    return {kind: ours.trajectory(n, **how) for kind, how in kinds.items()}


def on_fewer(ranks):
    """Losses on the first two of these ranks; None on those that only watch."""
    return lesson("trajectory").trajectory(2)


def measurements(ranks):
    from manyhands.measure.virtual_network import Link

    link = Link(50e-6, 1e9)
    ours = lesson(
        "noise_scale", "ring_s", "virtual_step",
        link=link, num_params=1000, serial_s=1e-3, work_s=20e-3, ranks=ranks,
    )  # fmt: skip
    torch.manual_seed(0)
    n = ranks.world_size
    steps = [ours.virtual_step(n, strong) for strong in (True, False)]
    return ours.noise_scale(GPT(CONFIG), num=24), steps, ours.ring_s(n)


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


def test_ranks_outside_the_group_take_no_part(pool, reference):
    first, second, third = pool.run(3, on_fewer)
    assert third is None
    assert torch.equal(first, second) and (first - reference).abs().max() < 1e-10


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
    for n, (other, (strong_s, weak_s), ring_s) in found.items():
        assert other == pytest.approx(scale, rel=1e-3)
        assert strong_s == pytest.approx(1e-3 + 20e-3 / n + ring_s, rel=1e-12)
        assert weak_s == pytest.approx(21e-3 + ring_s, rel=1e-12)


# ---- figures of the lesson ----


def test_seeds_of_a_launcher_in_wide_use_collide_on_ranks_2_and_8():
    ours = lesson("with_equal_seeds")
    assert ours.with_equal_seeds(2) == [[2, 8]]
    assert ours.with_equal_seeds(1) == []
    assert len(ours.with_equal_seeds(2, seed=0)) == 1, "all ranks agree"


def test_streams_of_ranks_epochs_and_seeds_differ():
    stream = lesson("stream").stream
    draws = {
        tuple(stream(r, e, s).integers(0, 2**62, 2)) for r in range(64) for e in range(4) for s in range(4)
    }
    assert len(draws) == 64 * 4 * 4


def test_the_lessons_order_is_that_of_the_package():
    order_of = lesson("order_of").order_of
    sampler = PartitionedSampler(100, 0, 1, seed=5)
    sampler.set_epoch(3)
    assert order_of(100, 3, seed=5).tolist() == list(sampler)


def test_accumulation_comes_out_even_or_is_refused_with_the_numbers():
    accumulation = lesson("accumulation").accumulation
    assert [accumulation(48, 2, n) for n in (1, 2, 3, 4, 8)] == [24, 12, 8, 6, 3]
    with pytest.raises(ValueError, match="48 is no multiple of 2 x 5; use a multiple of 10"):
        accumulation(48, 2, 5)


def test_updates_per_epoch_are_those_of_the_table():
    updates = lesson("updates_per_epoch").updates_per_epoch
    assert [updates(15_685, 12, n) for n in (1, 4, 64, 1024)] == [1307, 326, 20, 1]


def test_amdahls_fit_finds_the_serial_part_of_times_that_obey_the_law():
    a, b = lesson("amdahl_fit").amdahl_fit([1, 2, 4, 8], [1 + 19 / n for n in (1, 2, 4, 8)])
    assert (a, b) == pytest.approx((1, 19))


def test_the_published_series_gives_136_68_60_and_81_percent():
    rates = {1: 281, 2: 382, 4: 689, 8: 1341, 16: 3627}
    assert round(100 * rates[2] / rates[1]) == 136
    assert [round(100 * rate / n / 281) for n, rate in rates.items()] == [100, 68, 61, 60, 81]
    assert round(rates[16] / rates[8], 2) == 2.70


# ---- plots ----


def test_losses_that_are_equal_to_the_last_bit_have_no_point():
    from manyhands.figures.many_ranks import differences

    one, two = torch.tensor([3.0, 2.0], dtype=torch.float64), torch.tensor([3.0, 2.5], dtype=torch.float64)
    axes = differences({"float64": {1: one, 2: two}}, limit=1e-10).axes[0]
    first, second = axes.lines[0].get_ydata()
    assert first != first and second == 0.5, "the first is not a number"
    assert axes.get_yscale() == "log"


def test_histograms_count_how_often_a_sequence_was_read_and_by_how_many_ranks():
    from manyhands.figures.many_ranks import times_read

    figure = times_read({"A": [[0, 0, 0], [1, 1]], "B": [[0, 1, 2], [3]]})
    a_times, b_times, a_ranks, b_ranks = (
        [
            round(bar.get_x() + bar.get_width() / 2)
            for bar in axes.patches
            for _ in range(int(bar.get_height()))
        ]
        for axes in figure.axes
    )
    assert (a_times, b_times) == ([2, 3], [1, 3])
    assert (a_ranks, b_ranks) == ([1, 1], [1, 3])


# ---- the lesson as a whole ----


@pytest.fixture(scope="module")
def cells(root):
    import jupytext  # not above: the ranks import this module too

    return jupytext.read(root / "scripts" / f"{LESSON}.py", fmt="py:percent").cells


def test_cells_are_short_and_alternate_with_text(cells):
    lengths = [len(cell.source.splitlines()) for cell in cells if cell.cell_type == "code"]
    assert 4 <= statistics.median(lengths) <= 15
    assert max(lengths) <= 31, "the magic and 30 lines"
    assert sum(cell.cell_type == "markdown" for cell in cells) >= 0.6 * len(lengths)


def test_lesson_has_the_sections_that_every_lesson_has(cells):
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    for words in (
        "Warm-up",
        "Experiment",
        "A bug from the zoo",
        "On the cluster",
        "Recap",
        "Further reading",
    ):
        assert any(heading.startswith(words) for heading in headings), words
    assert "you can" in text and text.count("**Predict.**") >= 10
    core = [int(m) for m in re.findall(r"\(CORE, (\d+) min\)", text)]
    assert sum(core) == 55
    recap = text.split("## Recap")[1].split("## Further")[0]
    assert len(re.findall(r"^\d\. ", recap, re.M)) == 5


def test_a_batch_that_does_not_split_is_refused_in_one_sentence(root, tmp_path):
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, root / "scripts" / f"{LESSON}.py", "--global-batch=5"],
        check=False, capture_output=True, text=True, timeout=150, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2
    assert "global_batch=5 is no multiple of micro_batch=2 x 1 ranks; use a multiple of 2" in done.stderr
