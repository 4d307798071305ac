"""What a forward keeps for the backward: counted from saved tensors, by our formula, and by the two in circulation."""

import dataclasses

import pytest
import torch
from manyhands.config.layout import resolve_layout
from manyhands.config.options import model_config, read_options
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT, checkpoint_activations
from manyhands.measure.tensor_bytes import count_saved
from manyhands.parallel.strategy import parallelize
from manyhands.predict.activation_memory import (
    activation_bytes,
    published_bytes,
    saved_bytes,
    sequences_at_once,
    slide_values,
)
from manyhands.predict.memory import bytes_per_rank
from torch import nn

CONFIGS = {
    "the lessons' GPT": GPTConfig(vocab_size=65),
    "odd sizes": GPTConfig(vocab_size=17, block_size=9, n_layer=3, n_head=2, n_embd=14),
    "a large vocabulary": GPTConfig(vocab_size=1000, block_size=32, n_layer=2, n_head=2, n_embd=64),
    "GPT-2's variant": GPTConfig(
        vocab_size=300, block_size=48, n_layer=3, n_head=4, n_embd=96, tie=True, qkv_bias=True
    ),
    "a Llama": GPTConfig(17, 9, 3, 4, 24, style="llama", n_kv_head=2, n_hidden=40),
    "a Llama with wide heads": GPTConfig(17, 9, 3, 4, 24, style="llama", n_kv_head=1, head_dim=10, tie=True),
    "an OLMo": GPTConfig(17, 9, 3, 2, 24, style="llama", norm="layer", clip_qkv=0.1),
}


def forward(config, sequences, dtype=torch.float32, kind="none"):
    """(model, call): one forward with loss over `sequences` sequences."""
    torch.manual_seed(0)
    model = GPT(config).to(dtype)
    checkpoint_activations(model, kind)
    ids_BT, targets_BT = torch.randint(config.vocab_size, (2, sequences, config.block_size))
    return model, lambda: model(ids_BT, targets_BT)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("sequences", [1, 3])
def test_the_formula_gives_what_autograd_keeps_to_the_byte(config, sequences):
    model, call = forward(config, sequences)
    assert count_saved(call, model).bytes == sum(saved_bytes(config, sequences).values())


@pytest.mark.parametrize(
    "experts",
    [{"top_k": 1}, {"top_k": 2, "shared_experts": 2}, {"style": "llama", "n_kv_head": 2, "n_hidden": 172}],
    ids=str,
)
def test_experts_keep_what_the_formula_says_within_one_per_cent(experts):
    """What is not in it: where each row went, as numbers of 64 bits."""
    config = GPTConfig(vocab_size=65, n_layer=2, experts=4, **experts)
    model, call = forward(config, 3)
    expected = sum(saved_bytes(config, 3).values())
    assert expected < count_saved(call, model).bytes < 1.01 * expected


@pytest.mark.parametrize("name", ["the lessons' GPT", "a Llama"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_formula_holds_in_other_precisions_within_two_per_cent(dtype, name):
    config = dataclasses.replace(CONFIGS[name], n_embd=128, n_hidden=300 if name == "a Llama" else None)
    model, call = forward(config, 2, dtype)
    expected = sum(saved_bytes(config, 2, dtype.itemsize).values())
    assert count_saved(call, model).bytes == pytest.approx(expected, rel=0.02)


def test_each_module_keeps_what_the_formulas_term_says():
    config = CONFIGS["the lessons' GPT"]
    model, call = forward(config, 2)
    seen, terms = count_saved(call, model), saved_bytes(config, 2)
    for module, term, share in (
        ("blocks.1.attention.qkv", "qkv", 1 / 4),
        ("blocks.1.mlp.down", "mlp down", 1 / 4),
        ("blocks.1.mlp", "gelu", 1 / 4),
        ("norm", "final norm", 1),
        ("head", "head", 1),
    ):
        assert seen.by_name[module] == terms[term] * share, module
    assert sum(seen.by_name.values()) == seen.bytes


def test_parameters_do_not_count_and_a_storage_counts_once_whatever_views_are_kept():
    layer, x = nn.Linear(10, 10, bias=False), torch.randn(5, 10, requires_grad=True)
    assert count_saved(lambda: layer(x), layer).bytes == x.nbytes
    assert count_saved(lambda: layer(x)).bytes == x.nbytes + layer.weight.nbytes, "nobody named the model"
    assert count_saved(lambda: x[:2].sin() + x[2:4].sin() + x.cos()[:2]).bytes == x.nbytes


def test_memory_that_is_free_again_during_the_call_is_not_taken_for_what_comes_after_it():
    x = torch.randn(1000, requires_grad=True)

    def call():
        for _ in range(5):
            x.sin().exp()  # exp keeps its result, which is gone at once, and the next may get its address
        return x.sum()

    assert count_saved(call).bytes == (1 + 2 * 5 - 5) * x.nbytes


def test_the_result_of_the_call_comes_along_and_no_hook_stays_behind():
    model, call = forward(CONFIGS["odd sizes"], 1)
    logits_BTV, loss = count_saved(call, model).result
    loss.backward()
    assert logits_BTV.shape == (1, 9, 17) and model.head.weight.grad is not None
    with pytest.raises(ValueError, match="do not fit"):
        count_saved(lambda: model(torch.zeros(1, 10, dtype=torch.long)), model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_checkpointing_keeps_the_input_of_each_block():
    config = CONFIGS["the lessons' GPT"]
    model, call = forward(config, 2, kind="block")
    terms = saved_bytes(config, 2)
    inputs = 4 * 2 * config.block_size * config.n_embd * config.n_layer
    outside = sum(terms[term] for term in ("final norm", "head", "loss", "ids"))
    assert count_saved(call, model).bytes == pytest.approx(inputs + outside, rel=0.02)


def test_masks_of_dropout_are_refused_and_not_forgotten():
    with pytest.raises(ValueError, match="dropout=0.2 keeps masks"):
        saved_bytes(GPTConfig(vocab_size=65, dropout=0.2), 1)


def test_the_published_estimate_without_its_masks_and_scores_is_our_block_in_two_bytes():
    """34 T D are 32 of tensors and 2 of masks; 5 H T^2 are scores. What ours has beside them are statistics, below 1
    %."""
    config = GPTConfig(vocab_size=32100, block_size=2048, n_layer=16, n_head=16, n_embd=2048)
    N, T, D, H = 16, 2048, 2048, 16
    assert published_bytes(config, 3) == 3 * N * (34 * T * D + 5 * H * T**2)
    terms = saved_bytes(config, 3, itemsize=2)
    blocks = sum(terms[t] for t in terms if t not in ("final norm", "head", "loss", "ids"))
    assert blocks == pytest.approx(published_bytes(config, 3) - 3 * N * (2 * T * D + 5 * H * T**2), rel=0.01)


def test_the_slides_formula_has_a_third_of_what_a_layer_keeps_beside_its_scores():
    config = CONFIGS["the lessons' GPT"]
    terms, ours = slide_values(config, 8), saved_bytes(config, 8, itemsize=1)
    assert terms == {
        "feed-forward": 5 * 4 * 8 * 64 * 128,
        "attention scores": 8 * 4 * 4 * 64**2,
        "logits and their gradient": 2 * 8 * 65 * 64,
        "norms and head": 2 * 8 * 64 * 128,
        "loss": 2 * 8 * 64,
    }
    layers = sum(ours[t] for t in ("norms", "qkv", "attention", "attention out", "mlp up", "gelu", "mlp down"))
    assert layers > 3 * terms["feed-forward"]


# ------------------------------------------------------------------ of a step

# wide, so that the copies that autocast makes of weights are small beside the activations
SMALL = "--model.n-layer 4 --model.n-embd 64 --model.block-size 64 --train.global-batch 24 --train.micro-batch 12"


def resolved(flags, world_size=2):
    options = read_options(f"{SMALL} {flags}".split())
    config = model_config(options, 300)
    return config, resolve_layout(options, config, world_size), options


def expected(flags, world_size=2):
    return activation_bytes(*resolved(flags, world_size))


def kept_for_the_backward(flags):
    config, layout, options = resolved(flags)
    torch.manual_seed(0)
    model = GPT(config)
    checkpoint_activations(model, options.parallel.activation_checkpointing)
    ids_bT, targets_bT = torch.randint(300, (2, sequences_at_once(layout, options), config.block_size))
    low = options.train.precision == "bf16"
    model.stream = torch.bfloat16 if low and options.train.low_stream else None
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        return count_saved(lambda: model(ids_bT, targets_bT), model).bytes


@pytest.mark.parametrize("flags", ["fp32", "bf16", "bf16 --train.no-low-stream"])
def test_what_is_kept_is_what_autograd_keeps(flags):
    config, _, _ = resolved("")
    copies = 2 * config.num_params() * flags.startswith("bf16")  # autocast's, of weights
    seen = kept_for_the_backward(f"--train.precision {flags}") - copies
    assert expected(f"--train.precision {flags}") == pytest.approx(seen, rel=0.02)


def test_with_recomputation_the_inputs_of_layers_are_kept_and_one_layer_is_there_again():
    config, layout, options = resolved("--parallel.activation-checkpointing block")
    a_layer = (
        sum(size for term, size in saved_bytes(config, 12).items() if term not in ("final norm", "head", "loss", "ids"))
        / 4
    )
    seen = kept_for_the_backward("--parallel.activation-checkpointing block")
    assert activation_bytes(config, layout, options) == pytest.approx(seen + a_layer, rel=0.01)
    assert expected("--parallel.activation-checkpointing block") < expected(
        "--parallel.activation-checkpointing selective"
    )
    assert expected("--parallel.activation-checkpointing selective --model.n-layer 12") < expected("--model.n-layer 12")


def test_micro_batches_divide_it_and_more_ranks_at_the_same_micro_batch_do_not():
    assert expected("--train.micro-batch 3") == pytest.approx(expected("") / 4, rel=0.01)
    assert expected("--train.micro-batch 3", 4) == expected("--train.micro-batch 3", 2)


def test_tensor_ranks_share_what_is_inside_a_layer():
    whole = expected("--parallel.strategy tp --train.global-batch 12", 1)
    halves = expected("--parallel.strategy tp --train.global-batch 12", 2)
    less = expected(
        "--parallel.strategy tp --train.global-batch 12 --parallel.sequence-parallel --parallel.loss-parallel", 2
    )
    assert whole / 2 < less < halves < whole


def kept_on_tensor_ranks(ranks, all_flags):
    found = []
    for flags in all_flags:
        config, layout, options = resolved(flags, ranks.world_size)
        model = parallelize(config, layout, options, ranks).model
        ids_bT, targets_bT = torch.randint(300, (2, sequences_at_once(layout, options), config.block_size))
        found.append(count_saved(lambda model=model, batch=(ids_bT, targets_bT): model(*batch), model).bytes)
    return found


OF_A_LLAMA = "--model.style llama --model.n-hidden 172 --parallel.strategy tp --train.global-batch 12"
ON_TENSOR_RANKS = [
    f"{OF_A_LLAMA} {flags}"
    for flags in (
        "--model.n-kv-head 2", "--model.n-kv-head 1", "--model.n-kv-head 1 --model.norm layer --model.clip-qkv 1",
        "--model.n-kv-head 1 --parallel.sequence-parallel",
    )
]  # fmt: skip


@pytest.mark.ranks
def test_tensor_ranks_keep_of_a_llama_what_the_formula_says_each_a_head_of_keys(pool):
    for found in pool.run(2, kept_on_tensor_ranks, ON_TENSOR_RANKS):
        for flags, seen in zip(ON_TENSOR_RANKS, found, strict=True):
            assert bytes_per_rank(*resolved(flags)).activations == seen, flags


def test_a_pipeline_holds_a_micro_batch_per_stage_and_gpipe_all():
    flags = "--parallel.strategy pp --train.micro-batch 3"
    one = expected("--train.micro-batch 3")
    assert expected(flags) <= one * 1.01, "two micro-batches of half of the layers"
    assert expected(f"{flags} --parallel.schedule GPipe") > 3 * one, "eight"


def test_masks_of_dropout_are_left_out():
    config, layout, options = resolved("--model.dropout 0.2")
    assert activation_bytes(config, layout, options) == activation_bytes(
        dataclasses.replace(config, dropout=0.0), layout, options
    )
