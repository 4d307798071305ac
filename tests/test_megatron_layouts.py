"""The search over a large program's layouts: bytes by hand, what it may and may not choose, and its properties."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manyhands.predict.layouts import Question
from manyhands.predict.machines import machine_named
from manyhands.predict.megatron import TODAY, Program, Split, bytes_held, kept_per_token, work_of
from manyhands.predict.megatron_layouts import RESERVE, name_of, search
from manyhands.predict.models import PlannedModel, preset_model
from manyhands.predict.planner import plan, smallest_fit
from manyhands.predict.report import as_text
from manyhands.predict.step_time import step_time

H100 = machine_named("h100")
LLAMA = PlannedModel("llama", 32000, 4096, 32, 32, 4096, 8, 14336, "llama")
MIXTURE = replace(LLAMA, n_expert=8, top_k=2)


def test_state_is_18_bytes_per_parameter_and_what_is_shared_is_divided():
    P = LLAMA.num_params()
    held = {name: bytes_held(LLAMA, Split(data=8, sharing=name), 8) for name in ("replicas", "zero1", "zero2", "zero3")}
    assert held["replicas"].between_steps == pytest.approx(18 * P, rel=1e-5), "but the last norm"
    assert held["zero1"].between_steps == pytest.approx((2 + 4 + 12 / 8) * P, rel=1e-5)
    layer = sum(weight.numel for weight in LLAMA.layer_weights())
    assert held["zero2"].gradients == pytest.approx(4 * (P / 8 + layer), rel=1e-5)
    assert held["zero3"].parameters == pytest.approx(2 * P / 8, rel=1e-5)
    assert held["zero3"].unsharded_parameters == 2 * 2 * layer, "the layer that computes and the next one"


def test_a_layer_keeps_the_inputs_of_its_products_and_tensor_ranks_share_them():
    D, M, kv = LLAMA.n_embd, LLAMA.n_hidden, LLAMA.kv_width
    kept = kept_per_token(LLAMA, 1, TODAY)
    assert kept["none"] == 2 * (4 * D + 2 * D + 2 * kv + 3 * M)
    assert kept["selective"] == 2 * (2 * D + 2 * D + 2 * kv + 2 * M), "without the norms' outputs and the product"
    assert kept["block"] == 2 * D
    assert kept_per_token(LLAMA, 8, TODAY)["none"] == kept["none"] / 8
    gpt = PlannedModel("gpt", 51200, 2048, 24, 16, 2048)
    old = Program(flash=False, sequence_parallel=False)
    # Korthikanti et al. 2022, table 2: T D (10 + 24 / t + 5 H T / D t)
    assert kept_per_token(gpt, 4, old)["none"] == 2048 * (10 + 24 / 4 + 5 * 16 * 2048 / 2048 / 4)


def test_a_pipeline_keeps_the_micro_batches_in_flight_and_interleaving_more_of_them():
    plain = bytes_held(LLAMA, Split(pipeline=4), 16).activations
    alone = bytes_held(LLAMA, Split(), 1).activations
    assert plain == pytest.approx(alone), "4 micro-batches of a quarter of the layers"
    deep = bytes_held(LLAMA, Split(pipeline=4, stages_per_rank=8), 16).activations
    assert deep / plain == pytest.approx((2 * 3 + 7 * 4 + 1) / (4 * 8))


def test_experts_over_ranks_divide_their_weights_and_send_each_token_top_k_times():
    whole, spread = Split(data=8, sharing="zero1"), Split(data=8, expert=8, sharing="zero1")
    experts = 32 * sum(weight.numel for weight in MIXTURE.layer_weights() if weight.expert)
    saved = bytes_held(MIXTURE, whole, 8).parameters - bytes_held(MIXTURE, spread, 8).parameters
    assert saved == 2 * experts * 7 / 8
    (sent,) = (one for one in work_of(MIXTURE, spread, 8).messages if one.axis == "experts")
    assert (sent.calls, sent.ranks) == (32 * 4, 8)
    assert sent.payload_bytes == sent.calls * 4096 * 2 * 4096 * 2


def test_eight_bits_speed_up_linear_layers_alone_and_only_where_the_machine_has_them():
    low = Program(fp8=True)
    by_machine = {}
    for name in ("h100", "a100-80"):
        times = [step_time(work_of(LLAMA, Split(), 8, program), machine_named(name)) for program in (TODAY, low)]
        by_machine[name] = times[1].compute_s / times[0].compute_s
    assert by_machine["a100-80"] == 1
    assert 1 / 1.77 < by_machine["h100"] < 0.75, "attention and the head stay"


def test_every_choice_fits_with_the_reserve_and_every_refusal_says_what_it_needs():
    found = search(preset_model("llama3-70b"), H100, 64, 512)
    room = 80e9 * (1 - RESERVE)
    assert found.plans and all(one.held.on_gpu <= room for one in found.plans.values())
    assert {name_of(one.split) for one in found.plans.values()} == set(found.plans)
    assert all(one.split.gpus == 64 for one in found.plans.values())
    needs = [why for _, why in found.refused if "GB per GPU" in why]
    assert needs and all("80 GB leave 75.2 after a reserve of 6%" in why for why in needs)
    assert all(float(why.split()[1]) > 75.2 for why in needs)


def test_16384_gpus_are_searched_by_few_thousand_layouts():
    assert 500 < search(preset_model("llama3-405b"), H100, 16384, 2048).tried < 10_000


def test_a_mixture_of_671_billion_gets_experts_over_ranks_and_a_dense_one_none():
    found = plan(Question(preset_model("mixtral-8x7b"), H100, 128, 256, program=TODAY))
    assert found.best.layout.expert > 1
    assert all(one.layout.expert == 1 for one in plan(Question(LLAMA, H100, 16, 64, program=TODAY)).ranked)


def test_where_nothing_fits_a_power_of_two_of_nodes_is_named_on_which_something_would():
    question = Question(preset_model("llama3-405b"), H100, 8, 512, program=TODAY)
    assert plan(question).best is None
    assert smallest_fit(question) == 128
    assert "something fits on 128 of these GPUs" in as_text(plan(question))


models = st.builds(
    lambda layers, width, style: PlannedModel(
        "any", 32000, 2048, layers, width // 128, width, style=style,
        n_hidden=None if style == "gpt" else 3 * width,
    ),
    st.sampled_from([8, 24, 32]), st.sampled_from([1024, 4096, 8192]), st.sampled_from(["gpt", "llama"]),
)  # fmt: skip


examples = pytest.mark.parametrize("examples", [4, pytest.param(30, marks=pytest.mark.full)])


@examples
def test_more_gpus_with_as_many_sequences_each_never_train_fewer_tokens_per_second(examples):
    @settings(max_examples=examples)
    @given(models, st.sampled_from([1, 2, 8, 16, 64]))
    def holds(model, gpus):
        few, many = (plan(Question(model, H100, n, 4 * n, program=TODAY)) for n in (gpus, 2 * gpus))
        if few.best:
            assert min(one.step_s for one in many.ranked) < 2 * few.fastest_s
            assert max(one.tokens_per_s for one in many.ranked) >= max(one.tokens_per_s for one in few.ranked)

    holds()


@examples
def test_less_memory_never_makes_a_layout_fit(examples):
    @settings(max_examples=examples)
    @given(models, st.sampled_from([8, 16]), st.floats(0.2, 1.0))
    def holds(model, gpus, share):
        smaller = replace(H100, memory_bytes=share * H100.memory_bytes)
        with_less, with_all = (search(model, machine, gpus, 4 * gpus).plans for machine in (smaller, H100))
        assert set(with_less) <= set(with_all)
        assert all(one.time.total_s >= with_all[name].time.total_s * (1 - 1e-9) for name, one in with_less.items())

    holds()
