"""Decoding: what is drawn, and that neither caches nor ranks change it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from live_server import make_model
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.sampling import Sampling, draw, probabilities
from manyhands.serve.decoder import Int8Linear, quantize, weight_bytes
from manyhands.serve.engine import generate

CONFIG = GPTConfig(vocab_size=11, block_size=48, n_layer=2, n_head=2, n_embd=16)


def gpt(seed=1, config=CONFIG):
    return make_model(seed, config)


pytestmark = pytest.mark.usefixtures("one_thread")


def chi_square_limit(degrees, z=4.5):
    """A chi-square of so many degrees exceeds this once in 300,000 times (Wilson and Hilferty 1931)."""
    return degrees * (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3


# ---------------------------------------------------------------- the sampler


def one(logits, **how):
    return probabilities(torch.tensor([logits], dtype=torch.float64), [Sampling(**how)])[0].tolist()


def test_top_p_keeps_the_token_with_which_the_sum_reaches_it():
    logits = [math.log(p) for p in (0.1, 0.5, 0.4)]
    assert one(logits, top_p=0.5) == pytest.approx([0, 1, 0])
    assert one(logits, top_p=0.51) == pytest.approx([0, 0.5 / 0.9, 0.4 / 0.9])
    assert one(logits, top_p=1e-9) == pytest.approx([0, 1, 0])
    assert one(logits, top_p=1.0) == pytest.approx([0.1, 0.5, 0.4])


def test_top_k_comes_before_top_p_and_temperature_before_both():
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert one(logits, top_k=2) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert one(logits, top_k=2, top_p=0.5) == pytest.approx([1, 0, 0, 0]), "0.4 of 0.7 is more than half"
    assert one(logits, temperature=0.5) == pytest.approx([16 / 30, 9 / 30, 4 / 30, 1 / 30])
    assert one(logits, temperature=0.5, top_p=0.5) == pytest.approx([1, 0, 0, 0])
    assert one([1.0, 3.0, 3.0], temperature=0) == [0, 1, 0]


def test_each_row_of_a_batch_has_its_own_rules():
    logits = torch.randn(4, 9, dtype=torch.float64)
    hows = [Sampling(), Sampling(temperature=0), Sampling(top_k=3), Sampling(0.7, top_p=0.6)]
    together = probabilities(logits, hows)
    for row, how in enumerate(hows):
        assert torch.allclose(together[row], probabilities(logits[row : row + 1], [how])[0], atol=1e-15)


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([0.0, 1e-300, 1e-9, 0.1, 0.5, 1.0]), min_size=1, max_size=9),
    st.floats(0, 1, exclude_max=True),
)
def test_nothing_of_probability_zero_is_drawn(weights, number):
    if sum(weights) == 0:
        weights.append(1.0)
    p = torch.tensor([weights], dtype=torch.float64)
    for u in (number, 0.0, 1 - 2**-53):
        assert p[0, draw(p, [u])[0]] > 0


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"temperature": -1.0}, "temperature=-1.0 is not a number >= 0"),
        ({"temperature": math.nan}, "temperature=nan is not a number"),
        ({"top_k": 0}, "top_k=0 leaves nothing to draw"),
        ({"top_p": 0.0}, "top_p=0.0 is not in"),
        ({"top_p": 1.5}, "top_p=1.5 is not in"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        Sampling(**wrong)


# ---------------------------------------------------------------- the cache


def test_generating_with_and_without_a_cache_writes_the_same():
    model, prompt = gpt(), torch.randint(11, (2, 5))
    for how in (Sampling(), Sampling(0), Sampling(0.7, top_k=4, top_p=0.9)):
        texts = [generate(model, prompt, 43, how, seed=3, use_cache=cached) for cached in (True, False)]
        assert torch.equal(*texts) and texts[0].shape == (2, 48)


# ---------------------------------------------------------------- 8 bits


def test_eight_bit_weights_are_off_by_half_a_step_and_take_an_eighth_of_float64():
    full = torch.nn.Linear(40, 7).double()
    small = Int8Linear(full)
    step_O1 = full.weight.abs().amax(1, keepdim=True) / 127
    assert ((small.weight_OI * small.scale_O[:, None] - full.weight).abs() <= step_O1 / 2 * (1 + 1e-9)).all()
    x = torch.randn(5, 40, dtype=torch.float64)
    bound = (x.abs().sum(-1, keepdim=True) * step_O1.T / 2) * (1 + 1e-9)
    assert ((small(x) - full(x)).abs() <= bound).all()
    model = gpt()
    before = weight_bytes(model)
    linears = 12 * 16 * 16 * CONFIG.n_layer
    outputs = (3 + 1 + 4 + 1) * 16 * CONFIG.n_layer
    assert weight_bytes(quantize(model)) == before - 7 * linears + 8 * outputs
    assert (model(torch.arange(9)[None])[0] - gpt()(torch.arange(9)[None])[0]).abs().max() < 0.5


def test_each_matrix_of_a_llamas_blocks_has_eight_bits_and_its_logits_stay_near():
    model = gpt(5, GPTConfig(37, 64, 2, 4, 16, style="llama", n_kv_head=2, n_hidden=24))
    ids_BT = torch.arange(9)[None]
    with torch.no_grad():
        before_BTV = model(ids_BT)[0]
        small = quantize(model)
        apart = (small(ids_BT)[0] - before_BTV).abs().max() / before_BTV.std()
    kinds = {name: type(module) for name, module in small.blocks.named_modules() if hasattr(module, "scale_O")}
    assert set(kinds.values()) == {Int8Linear} and len(kinds) == 2 * 7, "q, k, v, out; gate, up, down"
    assert not [m for m in small.blocks.modules() if isinstance(m, torch.nn.Linear)]
    assert 0 < apart < 0.1
