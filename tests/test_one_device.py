"""What lesson 01 builds by hand counts, computes and predicts what the library does.

What is tested is the lesson's own code, taken from its script.
"""

import pytest
import torch
import torch.nn.functional as F
from definitions import taken_from
from manyhands.gpt.model import GPT, GPTConfig
from manyhands.launch import recorded_runs
from manyhands.measure.memory_timeline import MemoryTimeline
from manyhands.measure.tensor_bytes import count_saved
from manyhands.predict import activation_memory
from manyhands.predict.models import flops_per_token
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

LESSON = "01_one_device"
SMALL = GPTConfig(vocab_size=11, block_size=8, n_layer=3, n_head=2, n_embd=12)
SHAKESPEARE = GPTConfig(vocab_size=65)
SEQUENCES = 4


def model_of(config=SMALL, dtype=torch.float32):
    torch.manual_seed(0)
    return GPT(config).to(dtype)


def batch_of(config=SMALL, sequences=SEQUENCES):
    generator = torch.Generator().manual_seed(1)
    draw = torch.randint(config.vocab_size, (2, sequences, config.block_size), generator=generator)
    return draw[0], draw[1]


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.fixture(scope="module")
def lesson():
    names = (
        "master_step", "MasterAdamW", "Counter", "kept_for_backward", "predict_kept", "recompute_backward", "Recompute",
        "forward_with", "accumulate", "cast_by_hand", "LossScaler", "step_of", "predict_bytes", "count_parameters",
    )  # fmt: skip
    return taken_from(LESSON, *names, shakespeare=SHAKESPEARE, sequences=SEQUENCES)


# ---- the counter ----


@pytest.mark.parametrize("config", [SMALL, SHAKESPEARE], ids=["small", "shakespeare"])
def test_our_counter_the_librarys_and_the_formula_agree_on_the_flops_of_a_step(lesson, config):
    ids, targets = batch_of(config)
    with sdpa_kernel(SDPBackend.MATH):
        with lesson.Counter() as ours:
            model_of(config)(ids, targets)[1].backward()
        with FlopCounterMode(display=False) as library:
            model_of(config)(ids, targets)[1].backward()
    assert ours.total() == library.get_total_flops() == flops_per_token(config) * ids.numel()


def test_the_counter_counts_the_bytes_of_what_is_read_and_written_and_none_for_views(lesson):
    a_nk, b_km = torch.ones(3, 4), torch.ones(4, 5)
    with lesson.Counter() as seen:
        a_nk @ b_km
        a_nk.t().reshape(2, 6)
        a_nk.view(4, 3)
        a_nk.add_(1)
    assert seen.rows["mm"] == [1, 2 * 3 * 4 * 5, 4 * (12 + 20 + 15)]
    assert seen.rows["view"][2] == seen.rows["t"][2] == 0
    assert seen.rows["add_"][2] == 4 * 24
    assert seen.rows["clone"][2] == 4 * 24, "reshape of a transposed matrix copies"


# ---- bytes ----


def test_what_is_kept_for_backward_is_what_the_package_counts_and_what_the_formula_says(lesson):
    model, (ids, targets) = model_of(SHAKESPEARE), batch_of(SHAKESPEARE)
    ours, _ = lesson.kept_for_backward(lambda: model(ids, targets), model)
    block, head = lesson.predict_kept(SHAKESPEARE, SEQUENCES)
    assert ours == count_saved(lambda: model(ids, targets), model).bytes
    assert ours == pytest.approx(4 * block + head, rel=0.005)
    assert ours == pytest.approx(sum(activation_memory.saved_bytes(SHAKESPEARE, SEQUENCES).values()), rel=0.005)


def test_a_storage_that_is_kept_twice_counts_once_and_parameters_do_not_count(lesson):
    layer = nn.Linear(3, 3, bias=False)
    x = torch.ones(2, 3, requires_grad=True)
    kept, _ = lesson.kept_for_backward(lambda: layer(x) * x.view(2, 3), layer)
    assert kept == x.nbytes + 2 * 3 * 4, "x once, though it is kept by two operators, and the product's result"


@pytest.mark.parametrize("case", ["plain", "4 micro-batches", "checkpointing"])
def test_predicted_bytes_of_each_kind_are_within_two_percent_of_the_measured_ones(lesson, case):
    model = model_of(SHAKESPEARE)
    optimizer = torch.optim.AdamW(model.parameters())
    ids, targets = batch_of(SHAKESPEARE)
    for _ in range(2):
        with MemoryTimeline(model, optimizer) as seen:
            lesson.step_of(case, model, optimizer, ids, targets, seen)
    for kind, predicted in lesson.predict_bytes(case).items():
        assert seen.highest(kind) == pytest.approx(predicted, rel=0.02), kind


def test_master_weights_take_small_steps_that_bf16_would_lose(lesson):
    alone, mastered = (nn.Parameter(torch.ones(1, dtype=torch.bfloat16)) for _ in range(2))
    optimizers = torch.optim.AdamW([alone], lr=1e-3), lesson.MasterAdamW([mastered], lr=1e-3)
    for _ in range(20):
        for parameter, optimizer in zip((alone, mastered), optimizers, strict=True):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    assert alone.item() == 1
    assert mastered.item() == pytest.approx(0.98, abs=0.004)
    assert optimizers[1].masters[0].dtype == torch.float32


def test_a_master_copy_takes_sixteen_bytes_between_steps_and_twenty_within(lesson):
    weigh = taken_from(
        LESSON, "master_step", "MasterAdamW", "weigh", shakespeare=SHAKESPEARE,
        new_model=lambda dtype: model_of(SHAKESPEARE, dtype), batch=lambda: batch_of(SHAKESPEARE),
    ).weigh  # fmt: skip
    for recipe, between, within in (("fp32", 16, 16), ("bf16", 8, 8), ("bf16 + fp32 master", 16, 20)):
        assert weigh(recipe) == pytest.approx((between, within), abs=0.01), recipe


# ---- time for memory ----


def test_recomputed_gradients_are_the_librarys_and_those_without_for_less_memory(lesson):
    ways = {
        "plain": lambda block, x: block(x),
        "ours": lesson.Recompute.apply,
        "library": lambda block, x: checkpoint(block, x, use_reentrant=False),
    }
    found, kept = {}, {}
    for name, through in ways.items():
        model = model_of(dtype=torch.float64)
        ids, targets = batch_of()
        kept[name], loss = lesson.kept_for_backward(
            lambda m=model, t=through, i=ids, y=targets: lesson.forward_with(m, t, i, y), model
        )
        loss.backward()
        found[name] = gradient(model)
    model = model_of(dtype=torch.float64)
    model(*batch_of())[1].backward()
    for name, given in found.items():
        assert (given - gradient(model)).abs().max() < 1e-10, name
    assert kept["ours"] == kept["library"] < kept["plain"] / 3


def test_mixed_precision_by_hand_is_autocast_to_the_last_bit(lesson):
    torch.manual_seed(2)
    layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    x = torch.randn(5, 8)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            library = layers(x)
        by_hand = lesson.cast_by_hand(layers, x, dtype)
        assert by_hand.dtype == library.dtype and torch.equal(by_hand, library)


@pytest.mark.parametrize("first_scale", [2.0**20, 4.0], ids=["too large", "small"])
def test_our_loss_scaler_follows_the_librarys_step_by_step(lesson, first_scale):
    trained = []
    for library in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = (
            torch.amp.GradScaler("cpu", first_scale, growth_interval=3)
            if library
            else lesson.LossScaler(first_scale, 3)
        )
        scales = []
        for step in range(10):
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                guess = model(x)
            loss = F.mse_loss(guess.float(), x[:, :1])
            (scaler.scale(loss) if library else loss * scaler.scale).backward()
            scaler.step(optimizer)
            if library:
                scaler.update()
            scales.append(scaler.get_scale() if library else scaler.scale)
        trained.append((scales, torch.cat([p.detach().flatten() for p in model.parameters()])))
    assert trained[0][0] == trained[1][0]
    assert torch.equal(trained[0][1], trained[1][1])
    assert len(set(trained[0][0])) > 1, "the scale has moved"


# ---- parameters, and does it fit ----


@pytest.mark.parametrize("config", [SMALL, SHAKESPEARE], ids=["small", "shakespeare"])
def test_parameters_by_hand_are_those_of_the_model(lesson, config):
    by_hand = lesson.count_parameters(config.vocab_size, config.block_size, config.n_embd, config.n_layer)
    assert by_hand == sum(p.numel() for p in model_of(config).parameters())


def test_a_gpu_run_to_record_is_one_process(tmp_path):
    assert recorded_runs.beside("01", {}, tmp_path).splitlines() == [
        "No GPU run of 01_one_device is recorded yet. On a node with a GPU:",
        "python scripts/01_one_device.py",
        "python -m manyhands.launch.recorded_runs 01",
    ]
    assert "--nproc-per-node 4 scripts/05_same_science.py" in recorded_runs.beside("05", {}, tmp_path)
