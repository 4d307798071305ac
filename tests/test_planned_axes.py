"""Context ranks and experts in a plan: bytes and messages by hand, and no command that train.py lacks."""

import dataclasses

import pytest
from manyhands.config.layout import resolve_layout
from manyhands.config.options import model_config, read_options
from manyhands.predict.layouts import Question, families
from manyhands.predict.machines import machine_named
from manyhands.predict.memory import bytes_per_rank, state_of_rank
from manyhands.predict.models import PlannedModel, preset_model
from manyhands.predict.planner import plan, unbalanced_s
from manyhands.predict.program import MEGATRON
from manyhands.predict.report import as_text, train_flags
from manyhands.predict.step_time import Assumptions, planned_work, step_time

H100 = machine_named("h100")
LONG = PlannedModel(32000, 32768, 8, 16, 2048, n_kv_head=4, n_hidden=8192, style="llama", name="long")
MOE = dataclasses.replace(LONG, block_size=2048, n_hidden=4096, experts=8, apart=True, name="moe")


def candidate(name, model, gpus, batch=64, machine=H100, micro_batch=1, checkpointing="none", **kwargs):
    """The first candidate of that name."""
    found = families(Question(model, machine, gpus, batch, **kwargs), (checkpointing,))
    return next(c for f in found if f.name == name for c in f.variants if c.micro_batch == micro_batch)


def work_of(model, one):
    return planned_work(model, one.layout, one.options)


def messages(time, axis):
    return [m for m in time.messages if m.axis == axis]


def test_a_context_axis_divides_activations_and_leaves_weights_as_data_ranks_do():
    plain = candidate("zero3 8", LONG, 8)
    context = candidate("zero3 2 x context 4", LONG, 8)
    assert (context.layout.shard, context.layout.data, context.layout.world_size) == (8, 2, 8)
    all_logits = dataclasses.replace(
        plain.options.train, chunk_loss=False
    )  # in chunks each rank keeps the head's whole gradient
    whole, share = (
        bytes_per_rank(LONG, one.layout, dataclasses.replace(one.options, train=all_logits)) for one in (plain, context)
    )
    assert share.activations == pytest.approx(whole.activations / 4, rel=1e-3)
    assert state_of_rank(LONG, plain.layout, plain.options) == state_of_rank(LONG, context.layout, context.options)
    replicas = candidate("replicas 2 x context 4", LONG, 8)
    assert (replicas.layout.replicate, replicas.layout.shard, replicas.layout.data) == (8, 1, 2)
    parameters, gradients, *_ = state_of_rank(LONG, replicas.layout, replicas.options)
    assert parameters == gradients == 4 * LONG.num_params(), "each context rank has all weights"


def test_keys_and_values_go_around_once_forward_and_with_their_gradients_backward():
    one = candidate("zero3 2 x context 4", LONG, 8)
    forward, backward = messages(step_time(work_of(LONG, one), H100), "context")
    keys_and_values = 2 * 4 * 128 * 32768  # numbers of a layer: 4 heads of 128 each
    layers, micro_batches = 8, 32
    assert forward.payload_bytes == layers * micro_batches * keys_and_values * 2
    assert forward.sent.inside == forward.payload_bytes * 3 / 4 and forward.sent.between == 0
    assert backward.payload_bytes == layers * micro_batches * keys_and_values * (2 + 4), "gradients in fp32"
    again = candidate("zero3 2 x context 4", LONG, 8, checkpointing="block")
    repeated, _ = messages(step_time(work_of(LONG, again), H100), "context")
    assert repeated.payload_bytes == 2 * forward.payload_bytes


def test_attention_costs_a_context_rank_its_share_of_the_whole_and_hides_the_ring():
    one, alone = candidate("zero3 2 x context 4", LONG, 8), candidate("zero3 8", LONG, 8)
    shared, whole = work_of(LONG, one), work_of(LONG, alone)
    assert shared.layers_flops * 4 == whole.layers_flops, "every query meets every key, wherever they are"
    bare = step_time(shared, H100, Assumptions(overlap=False))
    assert step_time(shared, H100, Assumptions(taken=0.0)).context_s == 0 < bare.context_s


def test_long_sequences_try_context_ranks_within_a_node_and_short_ones_do_not():
    def degrees(model, **kwargs):
        question = Question(model, H100, 32, 64, **kwargs)
        return {c.layout.context for f in families(question, ("none",), 1) for c in f.variants}

    assert degrees(LONG) == {1, 2, 4, 8}
    assert degrees(dataclasses.replace(LONG, block_size=8192)) == {1, 2}
    assert degrees(dataclasses.replace(LONG, block_size=4096)) == {1}
    assert degrees(dataclasses.replace(LONG, block_size=4096), context=16) == {16}
    assert degrees(LONG, context=1) == {1}
    for family in families(Question(LONG, H100, 32, 64), ("none",), 1):
        assert all(c.layout.context == 1 or c.layout.context * c.layout.tensor <= 8 for c in family.variants)


def test_a_token_costs_its_own_experts_and_the_padding_that_mfu_leaves_out():
    dense = dataclasses.replace(MOE, experts=1, top_k=1)
    expert, router = 3 * 2048 * 4096, 8 * 2048
    assert MOE.layer_flops() - dense.layer_flops() == 2 * (expert + router)
    assert MOE.computed_flops() == MOE.layer_flops()
    padded = dataclasses.replace(MOE, capacity=1.25)
    assert padded.layer_flops() == MOE.layer_flops() and padded.flops_per_token() == MOE.flops_per_token()
    assert padded.computed_flops() - MOE.computed_flops() == pytest.approx(0.25 * 2 * 2 * expert)
    one = candidate("zero3 8, experts over 8", MOE, 8)
    more, less = (bytes_per_rank(model, one.layout, one.options).activations for model in (padded, MOE))
    assert more > less


def test_ranks_that_share_experts_hold_a_part_of_them_and_all_of_the_dense_weights():
    experts = 8 * 8 * 3 * 2048 * 4096  # of all layers
    dense = MOE.num_params() - experts
    for name, held in (
        ("replicas 8", dense + experts),
        ("replicas 8, experts over 8", dense + experts / 8),
        ("zero3 8", dense / 8 + experts / 8),
        ("zero3 8, experts over 8", dense / 8 + experts / 8),
    ):
        one = candidate(name, MOE, 8)
        parameters, _, optimizer, _, gathered = state_of_rank(MOE, one.layout, one.options)
        assert (parameters, optimizer) == (pytest.approx(4 * held), pytest.approx(8 * held)), name
        if name.startswith("zero3"):
            around = 2 * 32000 * 2048 + 2048
            a_layer = (dense - around) / 8 + experts / 8 / one.layout.expert
            assert gathered == pytest.approx(2 * (around + a_layer), rel=1e-6), "own experts are whole already"


def test_tokens_go_to_their_experts_and_back_forward_and_backward():
    one = candidate("replicas 8, experts over 8", MOE, 8)
    work = work_of(MOE, one)
    (sent,) = messages(step_time(work, H100), "experts")
    calls = 8 * one.layout.micro_batches * 4  # layers; there and back, twice
    assert sent.calls == calls
    assert sent.payload_bytes == calls * 2048 * 2 * 2048 * 2, "tokens x experts of each x width x 2 bytes"
    assert sent.sent.inside == pytest.approx(sent.payload_bytes * 7 / 8)
    padded = dataclasses.replace(MOE, capacity=1.5)
    (more,) = messages(step_time(work_of(padded, one), H100), "experts")
    assert more.payload_bytes == 1.5 * sent.payload_bytes
    assert not messages(step_time(work_of(MOE, candidate("replicas 8", MOE, 8)), H100), "experts")


def test_gradients_of_experts_are_summed_over_the_ranks_that_have_the_same_ones():
    def summed(name, gpus):
        time = step_time(work_of(MOE, candidate(name, MOE, gpus)), H100)
        return [m.sent.inside + m.sent.between for m in messages(time, "data")]

    experts = 8 * 8 * 3 * 2048 * 4096 * 4
    dense = 4 * MOE.num_params() - experts
    assert summed("replicas 8, experts over 8", 8) == [pytest.approx(2 * 7 / 8 * dense)], "each has its own"
    twice = [pytest.approx(2 * 15 / 16 * dense), pytest.approx(2 * 1 / 2 * experts / 8)]
    assert summed("replicas 16, experts over 8", 16) == twice, "two have the same ones"
    assert sum(summed("zero3 16, experts over 8", 16)) < sum(summed("zero3 16", 16))


def test_balanced_routing_is_named_as_an_assumption_with_what_it_costs():
    """Mixtral's sizes as published, Jiang et al. 2024, section 1: 47 B parameters, of which a token uses 13 B."""
    question = Question(MOE, H100, 8, 32)
    one = next(p for p in plan(question).ranked if p.layout.expert == 8)
    assert unbalanced_s(question, one) > 1.1 * one.step_s
    text = as_text(plan(Question(preset_model("mixtral-8x7b"), H100, 16, 16, schedule="1F1B", program=MEGATRON)))
    assert "46,702,792,704 parameters (12,879,925,248 active: 2 of 8 experts)" in text
    assert "assumed of the experts: balanced routing" in text and "sbatch" not in text


def with_experts(name, **sizes):
    return dataclasses.replace(preset_model(name), name=f"{name} with experts", **sizes)


@pytest.mark.parametrize(
    "model",
    [
        preset_model("shakespeare-moe"),
        with_experts("gpt-1b", experts=4, top_k=1),
        with_experts("llama3.2-1b", experts=4, top_k=2),
    ],
    ids=lambda model: model.name,
)
def test_the_commands_of_a_model_with_experts_run_as_they_were_planned(model):
    question = Question(model, H100, 8, 512)
    planned = [one for family in families(question, ("none", "block"), 1) for one in family.variants]
    kinds = {(one.layout.expert > 1, one.layout.tensor > 1, one.layout.pipeline > 1): one for one in planned}
    assert len(kinds) == 8, "experts on data ranks, with each axis"
    for one in kinds.values():
        options = read_options(train_flags(question, one))
        assert options.model.experts == model.experts
        layout = resolve_layout(options, model_config(options, 65), 8)
        assert dataclasses.replace(layout, micro_batches=one.layout.micro_batches) == one.layout
        assert layout == one.layout or options.train.micro_batch is None, "or train.py's own choice is as good"
