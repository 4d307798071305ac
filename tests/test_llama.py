"""A Llama and an OLMo in the one GPT class: the logits of the library transformers, its parts, what is refused."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from live_server import make_model
from manyhands.gpt import llama
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.llama import RMSNorm, rotated, rotation
from manyhands.gpt.model import GPT
from manyhands.gpt.sampling import Sampling
from manyhands.serve import decoder, paged_cache
from manyhands.serve.decoder import quantize, weight_bytes
from manyhands.serve.engine import Engine, generate
from torch import nn

SMALL = GPTConfig(11, 16, n_layer=2, n_head=4, n_embd=24, style="llama", n_kv_head=2, n_hidden=40)
T = 64

pytestmark = pytest.mark.usefixtures("one_thread")


def build(config=SMALL, seed=0):
    torch.manual_seed(seed)
    return GPT(config)


def ids_of(shape, config=SMALL, seed=1):
    return torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


# --- the library transformers

NAMES = {
    "model.embed_tokens": "tokens", "model.norm": "norm", "lm_head": "head", "model.layers": "blocks",
    "input_layernorm": "norm_1", "post_attention_layernorm": "norm_2", "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k", "self_attn.v_proj": "attention.v", "self_attn.o_proj": "attention.out",
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
}  # fmt: skip
TURNS = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMAS = {
    "as many keys as queries": {},
    "grouped, tied": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "one head of keys": {"num_key_value_heads": 1, "rms_norm_eps": 1e-2},
    "wide heads": {"num_key_value_heads": 2, "head_dim": 20},
    "narrow heads, tied": {"head_dim": 6, "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 5e5}},
    # from position 16 on it is beyond the context that the scaling is for
    "Llama 3's scaling": {"rope_parameters": {**TURNS, "original_max_position_embeddings": 16}},
    "OLMo": {"num_key_value_heads": 2, "clip_qkv": 0.7},
    "OLMo, tied": {"tie_word_embeddings": True},
    "Mixtral": {"num_local_experts": 5, "num_key_value_heads": 2},
    "Mixtral, three at once": {"num_local_experts": 4, "num_experts_per_tok": 3, "num_key_value_heads": 4},
}


def theirs(case):
    """A tiny model of transformers with weights that matter: at its own deviation of 0.02 attention moves nothing."""
    import transformers  # late: it takes seconds

    kind = next((kind for name, kind in {"OLMo": "Olmo", "Mixtral": "Mixtral"}.items() if name in case), "Llama")
    sizes = dict(vocab_size=65, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4)
    config = getattr(transformers, f"{kind}Config")(**sizes, **LLAMAS[case], initializer_range=0.3, eos_token_id=None)
    torch.manual_seed(3)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def ours(model):
    """The same as a GPT."""
    their, turns = model.config, model.config.rope_parameters
    rms = hasattr(their, "rms_norm_eps")
    mixture = hasattr(their, "num_local_experts")
    config = GPTConfig(
        their.vocab_size, T, their.num_hidden_layers, their.num_attention_heads, their.hidden_size, style="llama",
        tie=their.tie_word_embeddings, n_kv_head=their.num_key_value_heads, n_hidden=their.intermediate_size,
        head_dim=getattr(their, "head_dim", None), norm="rms" if rms else "layer",
        norm_eps=their.rms_norm_eps if rms else 1e-5, clip_qkv=getattr(their, "clip_qkv", None),
        rope_theta=float(turns["rope_theta"]), rope_factor=turns.get("factor", 1.0),
        rope_original=turns.get("original_max_position_embeddings", 8192),
        experts=their.num_local_experts if mixture else 1, top_k=their.num_experts_per_tok if mixture else 2,
    )  # fmt: skip
    weights = model.state_dict()
    for name, own in NAMES.items():
        weights = {key.replace(name, own): tensor for key, tensor in weights.items()}
    for i in range(config.n_layer if mixture else 0):  # theirs lie [E, 2 M, D] and [E, D, M]
        theirs_are = f"blocks.{i}.mlp.experts."
        weights[f"blocks.{i}.mlp.router"] = weights.pop(f"blocks.{i}.mlp.gate.weight")
        weights[f"blocks.{i}.mlp.up"] = weights.pop(f"{theirs_are}gate_up").flatten(0, 1)
        weights[f"blocks.{i}.mlp.down"] = weights.pop(f"{theirs_are}down").mT.flatten(0, 1)
        weights[f"blocks.{i}.mlp.bias"] = torch.zeros(config.experts)
    built = GPT(config).eval()
    built.load_state_dict(weights)
    return built


@torch.no_grad()
def apart(case):
    """The largest difference of logits at any of 64 positions, over the logits' deviation."""
    model = theirs(case)
    ids_BT = torch.randint(65, (3, T), generator=torch.Generator().manual_seed(4))
    expected_BTV = model(ids_BT).logits
    return ((ours(model)(ids_BT)[0] - expected_BTV).abs().max() / expected_BTV.std()).item()


@pytest.mark.parametrize("case", LLAMAS)
def test_the_logits_are_those_of_transformers_at_every_position(case):
    assert apart(case) <= 1e-5


def in_neighbouring_pairs(x_BTHE, turn):
    """As Meta's own files have it: number 2i turns with number 2i + 1."""
    x_BTHE = torch.cat((x_BTHE[..., ::2], x_BTHE[..., 1::2]), dim=-1)
    return rotated(x_BTHE, turn)


@pytest.mark.parametrize(
    "part, wrong",
    [
        ("rotated", in_neighbouring_pairs),
        ("rotated", lambda x_BTHE, turn: x_BTHE),
        ("rotation", lambda config, *rest: rotation(dataclasses.replace(config, rope_factor=1.0), *rest)),
    ],
    ids=["interleaved rows", "no positions", "no scaling"],
)
def test_a_copy_that_turns_otherwise_fails_that_test(monkeypatch, part, wrong):
    monkeypatch.setattr(f"manyhands.gpt.model.{part}", wrong)
    assert apart("Llama 3's scaling") > 1e-2


# --- its parts


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie": True}, {"n_kv_head": None, "n_hidden": None}, {"head_dim": 10, "n_embd": 25}, {"norm": "layer"},
     {"experts": 5}],
    ids=str,
)  # fmt: skip
def test_the_formula_counts_every_parameter_and_none_is_a_bias(changes):
    model = build(dataclasses.replace(SMALL, **changes))
    assert model.config.num_params() == model.num_params() == sum(p.numel() for p in model.parameters())
    assert not any("bias" in name or "positions" in name for name, _ in model.named_parameters())


def test_scores_depend_on_the_distance_alone():
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 6, dtype=torch.float64, generator=draw)

    def score(i, j):
        here, there = (rotated(x, rotation(SMALL, torch.tensor([at]), torch.float64)) for x, at in ((q, i), (k, j)))
        return (here * there).sum().item()

    assert score(9, 5) == pytest.approx(score(1004, 1000), abs=1e-4) != pytest.approx(score(9, 6), abs=1e-2)


def test_angles_are_float32_whatever_the_model_is():
    far_T = torch.arange(60_000, 60_004)
    cos, _ = rotation(SMALL, far_T, torch.float64)
    half, _ = rotation(SMALL, far_T, torch.bfloat16)
    assert cos.dtype == torch.float64 and torch.equal(cos, cos.float().double())
    assert torch.equal(half, cos.to(torch.bfloat16)) and len(half[:, 0, 0].unique()) == 4
    assert not list(build().buffers()), "what is stored would be cast with the model"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rms_norm_has_the_values_and_gradients_of_torchs_in_float32_at_least(dtype):
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 5, 8, generator=draw).to(dtype), torch.rand(8, generator=draw).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    norm = RMSNorm(8, 1e-5).to(dtype)
    norm.weight.data, own = weight, x.clone().requires_grad_()
    w, y = weight.to(wide).requires_grad_(), x.to(wide).requires_grad_()
    norm(own).square().sum().backward()
    F.rms_norm(y, (8,), w, 1e-5).square().sum().backward()
    assert norm(x).dtype == dtype
    close = dict(rtol=2e-2, atol=2e-2) if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(norm(x), F.rms_norm(y, (8,), w, 1e-5).to(dtype), **close)
    torch.testing.assert_close(own.grad, y.grad.to(dtype), **close)
    torch.testing.assert_close(norm.weight.grad, w.grad.to(dtype), **close)
    if dtype == torch.float64:
        assert torch.autograd.gradcheck(llama._RMS.apply, (own, norm.weight, 1e-5))


def test_future_tokens_do_not_change_past_logits_and_each_document_attends_to_itself():
    model, ids_BT = build().double(), ids_of((2, 16))
    changed_BT = ids_BT.clone()
    changed_BT[:, 9:] = (changed_BT[:, 9:] + 1) % 11
    before_BTV, after_BTV = model(ids_BT)[0], model(changed_BT)[0]
    torch.testing.assert_close(before_BTV[:, :9], after_BTV[:, :9], rtol=0, atol=1e-12)
    assert (before_BTV[:, 9:] - after_BTV[:, 9:]).abs().amax(-1).min() > 1e-6
    apart = build(dataclasses.replace(SMALL, separator=0)).double()
    ids_BT = ids_BT.clamp(min=1)
    ids_BT[:, 6] = 0
    changed_BT = ids_BT.clone()
    changed_BT[:, :6] = changed_BT[:, :6] % 10 + 1
    torch.testing.assert_close(apart(ids_BT)[0][:, 6:], apart(changed_BT)[0][:, 6:], rtol=0, atol=1e-12)
    # a document's scores depend on distances: alone it is what it is behind another one
    alone_BTV = apart(ids_BT[:, 6:])[0]
    torch.testing.assert_close(apart(ids_BT)[0][:, 6:], alone_BTV, rtol=0, atol=1e-6)


@torch.no_grad()
def test_decoding_with_a_cache_gives_the_logits_of_the_whole():
    model, ids_BT = build(dataclasses.replace(SMALL, clip_qkv=0.05)).eval(), ids_of((2, 16))
    expected_BTV, cache = model(ids_BT)[0], {}

    def attend(layer, q, k, v):
        before = cache.get(layer, (k[:, :, :0], v[:, :, :0]))
        k, v = cache[layer] = [torch.cat(pair, dim=2) for pair in zip(before, (k, v), strict=True)]
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True)

    seen = []
    for start, stop in ((0, 7), *((t, t + 1) for t in range(7, 16))):
        positions_BT = torch.arange(start, stop).expand(2, -1)
        seen.append(decoder.run(model, ids_BT[:, start:stop], positions_BT, attend))
    torch.testing.assert_close(torch.cat(seen, dim=1), expected_BTV, rtol=0, atol=1e-5)
    assert cache[0][0].shape == (2, 2, 16, 6), "the heads of keys alone"


def test_it_reads_and_writes_up_to_max_positions_and_not_further():
    model = make_model(1, dataclasses.replace(SMALL, max_positions=24))
    whole, longer = model(ids_of((1, 24)))[0], dataclasses.replace(SMALL, block_size=24)
    other = GPT(longer).double().eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(whole, other(ids_of((1, 24)))[0]), "what is trained changes nothing"
    with pytest.raises(ValueError, match="25 positions do not fit into max_positions=24; cut the sequences"):
        model(ids_of((1, 25)))
    prompt = ids_of((1, 14))
    written = model.generate(prompt, 16, temperature=0)
    assert written[0, -1] == model(written[:, 5:29])[0][0, -1].argmax() and written.shape == (1, 30)
    assert torch.equal(generate(model, prompt, 10, Sampling(0)), written[:, :24])
    with pytest.raises(
        ValueError, match="14 tokens of the prompt and 11 more do not fit into the model's context of 24"
    ):
        generate(model, prompt, 11)
    with pytest.raises(ValueError, match="1 blocks of 16 positions do not hold one sequence of 24; use 2 or more"):
        Engine(model, "", num_blocks=1)


@pytest.mark.parametrize("changes", [{}, {"norm": "layer", "clip_qkv": 0.05}, {"head_dim": 10, "tie": True}], ids=str)
def test_a_server_writes_what_the_models_own_forward_draws_from_a_cache_of_its_heads_of_keys(changes, monkeypatch):
    """Prompts of unequal lengths in pieces of 5 tokens, blocks of 4; three run at a time and the others wait."""
    model = make_model(1, dataclasses.replace(SMALL, **changes))
    prompts = [ids_of((1, length), seed=length) for length in (1, 3, 7, 8, 10)]
    monkeypatch.setattr(paged_cache, "FIRST_BLOCKS", 2)
    engine = Engine(model, "", num_blocks=9, block_size=4, max_running=3, prefill_tokens=5)
    assert engine.cache.store.shape == (2, 3, 4, 2, 2, model.config.head_size), "a cache is small before it is used"
    sequences = [engine.add(ids_1T[0].tolist(), 6, Sampling(), seed=1) for ids_1T in prompts]
    while not engine.idle():
        engine.step()
    assert 6 <= engine.cache.store.shape[1] <= 10, "it has grown, and not beyond its limit"
    for ids_1T, sequence in zip(prompts, sequences, strict=True):
        assert [sequence.ids] == generate(model, ids_1T, 6, seed=1, use_cache=False).tolist()
    assert len({tuple(sequence.drawn) for sequence in sequences}) == len(prompts)
    before = weight_bytes(model)
    linears = [layer for layer in model.blocks.modules() if isinstance(layer, nn.Linear)]
    weights, outputs = sum(layer.weight.numel() for layer in linears), sum(layer.out_features for layer in linears)
    assert len(linears) == 14 and weight_bytes(quantize(model)) == before - 7 * weights + 8 * outputs


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"style": "mamba"}, "style='mamba' is unknown; use gpt or llama"),
        ({"style": "gpt"}, "n_kv_head=2 is for style=llama; use that, or leave it out"),
        ({"experts": 4, "shared_experts": 1}, "shared_experts=1 are for style=gpt; leave them out"),
        ({"qkv_bias": True}, "qkv_bias is for style=gpt"),
        ({"n_kv_head": 3}, "n_head=4 does not split over n_kv_head=3; use a divisor of 4"),
        ({"n_kv_head": 0}, "n_kv_head=0 is too small; use at least 1"),
        ({"head_dim": 5}, "heads of 5 numbers do not turn in pairs; use an even head_dim"),
        ({"n_embd": 26}, "n_embd=26 does not split over 4 heads; use a multiple of 4"),
        ({"norm": "batch"}, "norm='batch' is unknown; use rms or layer"),
        ({"norm": "layer", "norm_eps": 1e-6}, "norm_eps=1e-06 is not that of norm=layer, which is 1e-05"),
        ({"clip_qkv": 0.0}, "clip_qkv=0 is no size; use more than 0"),
        ({"rope_theta": math.inf}, "rope_theta=inf is no size; use more than 1"),
        ({"rope_factor": 0.5}, "rope_factor=0.5 makes nothing slower; use 1 or more"),
        ({"rope_low": 4.0}, "rope_high=4 is not above rope_low=4"),
        ({"max_positions": 15}, "max_positions=15 is less than block_size=16, which is trained; use more"),
        ({"style": "gpt", "n_kv_head": 4, "n_hidden": 96, "max_positions": 17}, "max_positions=17 is for style=llama"),
    ],
)  # fmt: skip
def test_sizes_that_make_no_llama_are_refused_with_the_numbers(sizes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **sizes)
