"""The learning rate follows the run, decay is for matrices, and the loss scale gives way to overflow."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from manyhands.config.options import OptimizerOptions, Options, TrainOptions
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT
from manyhands.parallel.optimizer import LossScale, build_optimizer, learning_rate
from manyhands.parallel.strategy import Strategy


def options(steps, **optimizer):
    return Options(train=TrainOptions(steps=steps), optimizer=OptimizerOptions(**optimizer))


class OneProcess(Strategy):
    """What `parallelize` returns, as far as an optimizer needs it."""

    def __init__(self):
        torch.manual_seed(0)
        self.modules = [GPT(GPTConfig(vocab_size=7, block_size=4, n_layer=1, n_head=1, n_embd=8))]


@given(st.integers(1, 3000), st.floats(1e-5, 1))
def test_the_learning_rate_reaches_its_peak_and_ends_at_its_least_in_a_run_of_any_length(steps, lr):
    wanted = options(steps, lr=lr)
    rates = [learning_rate(step, wanted) for step in range(steps)]
    assert all(0 < rate <= lr * (1 + 1e-12) for rate in rates)
    assert max(rates) == pytest.approx(lr)
    if steps > 2:
        assert rates[-1] == pytest.approx(lr / 10)


def test_warm_up_rises_in_equal_parts_and_the_cosine_falls_from_there():
    rates = [learning_rate(step, options(100, lr=1.0, warmup=4, min_lr=0.0)) for step in range(100)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(0)
    assert rates[4 + 95 // 2] == pytest.approx(0.5, abs=0.02)  # half way


def test_a_longer_run_keeps_its_rate_high_for_longer():
    assert learning_rate(150, options(200)) < learning_rate(150, options(2000))
    for steps, warmup in ((10, 0), (515, 25), (100_000, 100)):
        assert learning_rate(0, options(steps, lr=1.0)) == pytest.approx(1 / (warmup + 1))


def test_only_matrices_decay():
    parallel = OneProcess()
    optimizer = build_optimizer(parallel, options(10, lr=0.5, weight_decay=0.1))
    before = {name: p.detach().clone() for name, p in parallel.named_parameters().items()}
    for parameter in parallel.named_parameters().values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in parallel.named_parameters().items():
        shrunk = before[name] * (1 - 0.5 * 0.1 * (parameter.ndim >= 2))
        torch.testing.assert_close(parameter.detach(), shrunk)


def test_the_loss_scale_halves_when_gradients_overflow_and_grows_after_good_steps():
    scale = LossScale(scale=1024.0, patience=3)
    assert not scale.take(math.inf) and scale.scale == 512
    assert not scale.take(math.nan) and scale.scale == 256
    assert [scale.take(1.0) for _ in range(3)] == [True] * 3
    assert scale.scale == 512
    other = LossScale()
    other.restore(scale.state())
    assert other.state() == scale.state()


def test_sgd_keeps_no_state():
    parallel = OneProcess()
    optimizer = build_optimizer(parallel, replace(options(10), optimizer=OptimizerOptions(name="sgd")))
    assert parallel.optimizer_state(optimizer) == {}
