"""Activations of a step by formula, against what autograd keeps."""

import dataclasses

import pytest
import torch
from manyhands.config.layout import resolve_layout
from manyhands.config.options import model_config, read_options
from manyhands.gpt.activation_checkpointing import checkpoint_activations
from manyhands.gpt.model import GPT
from manyhands.measure.saved_activations import count_saved
from manyhands.predict.activation_memory import activation_bytes, saved_bytes, sequences_at_once

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
    with torch.autocast("cpu", torch.bfloat16, enabled=options.train.precision == "bf16"):
        return count_saved(lambda: model(ids_bT, targets_bT), model).bytes


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_kept_is_what_autograd_keeps(precision):
    config, _, _ = resolved("")
    copies = 2 * config.num_params() * (precision == "bf16")  # autocast's, of weights
    seen = kept_for_the_backward(f"--train.precision {precision}") - copies
    assert expected(f"--train.precision {precision}") == pytest.approx(seen, rel=0.02)


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
        "--parallel.strategy tp --train.global-batch 12 --parallel.sequence-parallel --parallel.loss-parallel",
        2,
    )
    assert whole / 2 < less < halves < whole


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
