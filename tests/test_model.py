"""The GPT: its size by formula, causality, sampling that leaves no trace."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT

SMALL = GPTConfig(vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=12)


pytestmark = pytest.mark.usefixtures("one_thread")


def build(config=SMALL, seed=0):
    torch.manual_seed(seed)
    return GPT(config)


def ids_of(shape, config=SMALL, seed=1):
    return torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shared_experts", [0, 2])
def test_the_formula_counts_router_experts_and_what_they_share(shared_experts):
    config = GPTConfig(11, 5, 3, 2, 6, experts=4, shared_experts=shared_experts)
    assert config.num_params() == sum(p.numel() for p in build(config).parameters())


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("qkv_bias", [False, True])
@pytest.mark.parametrize("V, T, N, H, D", [(65, 64, 4, 4, 128), (1, 1, 1, 1, 1), (11, 5, 3, 2, 6)])
def test_the_formula_counts_every_parameter(V, T, N, H, D, tie, qkv_bias):
    config = GPTConfig(V, T, N, H, D, tie=tie, qkv_bias=qkv_bias)
    with torch.device("meta"):
        model = GPT(config)
    assert config.num_params() == sum(p.numel() for p in model.parameters()) == model.num_params()
    if not tie and not qkv_bias:  # as lesson 01 writes it
        assert config.num_params() == N * (12 * D**2 + 10 * D) + D * (V + T) + 2 * D + V * (D + 1)


def test_future_tokens_do_not_change_past_logits():
    model, ids_BT = build().double(), ids_of((2, 8))
    before_BTV, _ = model(ids_BT)
    for t in range(1, 8):
        changed_BT = ids_BT.clone()
        changed_BT[:, t:] = (changed_BT[:, t:] + 1) % SMALL.vocab_size
        after_BTV, _ = model(changed_BT)
        assert torch.allclose(after_BTV[:, :t], before_BTV[:, :t], rtol=0, atol=1e-12)
        assert (after_BTV[:, t] - before_BTV[:, t]).abs().max() > 1e-6


def test_attention_is_the_textbooks_softmax_of_q_times_k():
    attention = build().double().blocks[0].attention
    x_BTD = torch.randn(2, 8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    heads, E = [], 6
    for w_qkv_rows in attention.qkv.weight.split(3 * E):  # rows lie head by head
        q_BTE, k_BTE, v_BTE = (x_BTD @ w_ED.T for w_ED in w_qkv_rows.split(E))
        scores_BTT = (q_BTE @ k_BTE.mT / math.sqrt(E)).masked_fill(torch.ones(8, 8).triu(1).bool(), -math.inf)
        heads.append(F.softmax(scores_BTT, -1) @ v_BTE)
    expected_BTD = attention.out(torch.cat(heads, -1))
    assert torch.allclose(attention(x_BTD), expected_BTD, rtol=0, atol=1e-12)


def test_a_tied_head_is_the_embedding_itself_and_gets_both_gradients():
    model, ids_BT = build(GPTConfig(11, 8, 2, 2, 12, tie=True)), ids_of((3, 9))
    assert model.head.weight.data_ptr() == model.tokens.weight.data_ptr()
    assert model.head.bias is None
    assert len(list(model.parameters())) == len(list(build().parameters())) - 2
    twin = build(GPTConfig(11, 8, 2, 2, 12, qkv_bias=False))  # the same weights in two matrices
    twin.load_state_dict(model.state_dict() | {"head.bias": torch.zeros(11)})
    for each in (model, twin):
        each(ids_BT[:, :-1], ids_BT[:, 1:])[1].backward()
    both_VD = twin.tokens.weight.grad + twin.head.weight.grad
    assert torch.allclose(model.head.weight.grad, both_VD, atol=1e-7)


def test_a_model_built_on_meta_gets_the_weights_of_one_built_at_once():
    with torch.device("meta"):
        late = GPT(SMALL)
    late.to_empty(device="cpu")
    torch.manual_seed(0)
    late.init_weights()
    early = GPT(SMALL)  # torch's own defaults drew from the generator first
    torch.manual_seed(0)
    early.init_weights()
    assert all(torch.equal(a, b) for a, b in zip(late.parameters(), early.parameters(), strict=True))


@pytest.mark.parametrize("config", [SMALL, replace(SMALL, style="llama", n_kv_head=1)], ids=["gpt", "llama"])
def test_a_few_steps_learn_a_repeating_text(config):
    model = build(config)
    ids_BT = (torch.arange(9) % 4).repeat(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(ids_BT[:, :-1], ids_BT[:, 1:])[1]
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    assert model.generate(ids_BT[:1, :4], 12, temperature=0).tolist() == [[0, 1, 2, 3] * 4]


def test_generation_leaves_train_mode_and_the_global_generator_as_they_were():
    model = build(GPTConfig(11, 8, 2, 2, 12, dropout=0.5)).train()
    model.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    texts = [model.generate(ids_of((2, 3)), 9) for _ in range(2)]
    assert torch.equal(*texts)  # no dropout, and the same seed
    assert texts[0].shape == (2, 12) and torch.equal(texts[0][:, :3], ids_of((2, 3)))
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert not texts[0].requires_grad


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"n_head": 3}, "n_embd=128 does not split over 3 heads; use a multiple of 3"),
        ({"n_layer": 0}, "n_layer=0 is too small; use at least 1"),
        ({"dropout": 1.0}, "dropout=1.0 is not a probability"),
    ],
)
def test_sizes_that_make_no_model_are_refused_with_the_numbers(sizes, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(65, **sizes)
