"""What lesson 01 builds by hand counts, computes and predicts what the library does.

What is tested is the lesson's own code, taken from its script.
"""

import pytest
import torch
import torch.nn.functional as F
from definitions import taken_from
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT
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


# ---- bytes ----


def test_what_is_kept_for_backward_is_what_the_package_counts_and_what_the_formula_says(lesson):
    model, (ids, targets) = model_of(SHAKESPEARE), batch_of(SHAKESPEARE)
    ours, _ = lesson.kept_for_backward(lambda: model(ids, targets), model)
    block, head = lesson.predict_kept(SHAKESPEARE, SEQUENCES)
    assert ours == count_saved(lambda: model(ids, targets), model).bytes
    assert ours == pytest.approx(4 * block + head, rel=0.005)
    assert ours == pytest.approx(sum(activation_memory.saved_bytes(SHAKESPEARE, SEQUENCES).values()), rel=0.005)


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
