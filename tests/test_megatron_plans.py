"""Plans of Megatron-LM's kind: bytes by hand, what the one search may and may not choose for them, its properties."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manyhands.config.layout import Layout
from manyhands.predict.activation_memory import rank_terms, repeated_bytes
from manyhands.predict.layouts import SHARINGS, Question, options_of
from manyhands.predict.machines import machine_named
from manyhands.predict.memory import bytes_per_rank, room
from manyhands.predict.models import PlannedModel, preset_model
from manyhands.predict.planner import plan, smallest_fit
from manyhands.predict.program import MEGATRON
from manyhands.predict.report import as_text
from manyhands.predict.step_time import planned_work, step_time
from pydantic import ValidationError

H100 = machine_named("h100")
LLAMA = PlannedModel(32000, 4096, 32, 32, 4096, n_kv_head=8, n_hidden=14336, style="llama")
MIXTURE = replace(LLAMA, experts=8, apart=True)


def described(sharing="replicas", model=LLAMA, program=MEGATRON, schedule="1F1B", batch=8, **degrees):
    """What memory, traffic and step time are asked with: (model, Layout, options, Program); a sequence at a time."""
    shared = degrees.pop("ranks", 1)
    layout = Layout(**{"shard" if SHARINGS[sharing].strategy == "fsdp" else "replicate": shared} | degrees)
    layout = replace(layout, micro_batches=batch // layout.data)
    question = Question(model, H100, layout.world_size, batch, program=program)
    options = options_of(question, SHARINGS[sharing], layout, 1, schedule, layout.stages_per_rank, "none")
    return model, layout, options, program


def test_state_is_18_bytes_per_parameter_and_what_is_shared_is_divided():
    P, around = LLAMA.num_params(), 32000 * 4096
    layer = sum(weight.numel for weight in LLAMA.layer_weights())
    held = {name: bytes_per_rank(*described(name, ranks=8)) for name in ("replicas", "zero1", "zero2", "zero3")}
    assert held["replicas"].between_steps == 18 * P, "bf16, an fp32 gradient, a master copy and two moments"
    assert held["zero1"].between_steps == pytest.approx((2 + 4 + 12 / 8) * P, rel=1e-5)
    for name in ("zero2", "zero3"):  # torchtitan's: fp32 shards, which are the master copy
        assert held[name].between_steps == pytest.approx(16 * P / 8, rel=1e-5)
        assert held[name].accumulated_gradients == 0, "each micro-batch reduce-scatters"
    assert held["zero2"].unsharded_parameters == pytest.approx(2 * P, rel=1e-5)
    assert held["zero3"].unsharded_parameters == pytest.approx(2 * (layer + 2 * around), rel=1e-5), (
        "a layer and the root"
    )


def test_a_layer_keeps_the_inputs_of_its_products_and_tensor_ranks_share_them():
    def kept(checkpointing="none", model=LLAMA, program=MEGATRON, tensor=1):
        _, layout, options, _ = described(model=model, program=program, tensor=tensor, batch=1)
        terms = rank_terms(model, layout, options, program)
        a_layer = {name: size for name, size in terms.items() if name not in ("final norm", "head", "loss", "ids")}
        left_out = repeated_bytes(terms, program) if checkpointing == "selective" else 0
        return (sum(a_layer.values()) - left_out) / model.block_size / model.n_layer

    D, M, kv = LLAMA.n_embd, LLAMA.hidden, LLAMA.kv_width
    assert kept() == 2 * (4 * D + 2 * D + 2 * kv + 3 * M)
    assert kept("selective") == 2 * (2 * D + 2 * D + 2 * kv + 2 * M), "without the norms' outputs and the product"
    assert kept(tensor=8) == kept() / 8
    gpt = PlannedModel(51200, 2048, 24, 16, 2048)
    old = replace(MEGATRON, flash=False, sequence_parallel=False)
    # Korthikanti et al. 2022, table 2: T D (10 + 24 / t + 5 H T / D t)
    assert kept(model=gpt, program=old, tensor=4) == pytest.approx(2048 * (10 + 24 / 4 + 5 * 16 * 2048 / 2048 / 4))


def test_a_pipeline_keeps_the_micro_batches_in_flight_and_interleaving_more_of_them():
    def of_layers(stages, schedule):
        one = described(pipeline=4, stages_per_rank=stages, schedule=schedule, batch=16)
        return bytes_per_rank(*one).activations

    plain, deep = of_layers(1, "1F1B"), of_layers(8, "Interleaved1F1B")
    assert deep / plain == pytest.approx((2 * 3 + 7 * 4 + 1) / (4 * 8))


def test_experts_over_ranks_divide_their_weights_and_send_each_token_top_k_times():
    whole, spread = (described("zero1", MIXTURE, ranks=8, expert=expert) for expert in (1, 8))
    experts = 32 * sum(weight.numel for weight in MIXTURE.layer_weights() if weight.expert)
    assert experts == 32 * 8 * 3 * 4096 * 14336
    saved = bytes_per_rank(*whole).parameters - bytes_per_rank(*spread).parameters
    assert saved == 2 * experts * 7 / 8
    (sent,) = (one for one in planned_work(*spread).messages if one.axis == "experts")
    assert (sent.calls, sent.ranks) == (32 * 4, 8)
    assert sent.payload_bytes == sent.calls * 4096 * 2 * 4096 * 2


def test_eight_bits_speed_up_linear_layers_alone_and_only_where_the_machine_has_them():
    by_machine = {}
    for name in ("h100", "a100-80"):
        works = [planned_work(*described(program=one)) for one in (MEGATRON, replace(MEGATRON, fp8=True))]
        times = [step_time(work, machine_named(name)) for work in works]
        by_machine[name] = times[1].compute_s / times[0].compute_s
    assert by_machine["a100-80"] == 1
    assert 1 / 1.77 < by_machine["h100"] < 0.75, "attention and the head stay"


@pytest.mark.parametrize("wrong", [{"axes": ("rows",)}, {"saves": "all"}, {"reduce_bytes": 3}])
def test_a_program_with_a_word_that_no_formula_knows_is_refused(wrong):
    with pytest.raises(ValidationError):
        replace(MEGATRON, **wrong)


def test_every_choice_fits_with_the_reserve_and_every_refusal_says_what_it_needs():
    found = plan(Question(preset_model("llama3-70b"), H100, 64, 512, program=MEGATRON))
    assert found.ranked and all(one.held.on_gpu <= room(80e9) == 72e9 for one in found.ranked)
    assert len({one.name for one in found.ranked}) == len(found.ranked)
    assert all(one.layout.world_size == 64 for one in found.ranked)
    needs = [why for _, why in found.refused if "GB per GPU" in why]
    assert needs and all("of 72.0 GB per GPU at least" in why for why in needs)
    assert all(float(why.split()[1]) >= 72.0 for why in needs)


def test_16384_gpus_are_searched_by_few_thousand_layouts():
    assert 500 < plan(Question(preset_model("llama3-405b"), H100, 16384, 2048, program=MEGATRON)).tried < 10_000


def test_a_mixture_of_671_billion_gets_experts_over_ranks_and_a_dense_one_none():
    found = plan(Question(preset_model("mixtral-8x7b"), H100, 128, 256, program=MEGATRON))
    assert found.best.layout.expert > 1
    assert all(one.layout.expert == 1 for one in plan(Question(LLAMA, H100, 16, 64, program=MEGATRON)).ranked)


def test_where_nothing_fits_a_power_of_two_of_nodes_is_named_on_which_something_would():
    question = Question(preset_model("llama3-405b"), H100, 8, 512, program=MEGATRON)
    assert plan(question).best is None
    assert smallest_fit(question) == 128
    assert "something fits on 128 of these GPUs" in as_text(plan(question))


models = st.builds(
    lambda layers, width, style: PlannedModel(
        32000, 2048, layers, width // 128, width, style=style,
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
        few, many = (plan(Question(model, H100, n, 4 * n, program=MEGATRON)) for n in (gpus, 2 * gpus))
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
        with_less, with_all = (
            {one.name: one.step_s for one in plan(Question(model, machine, gpus, 4 * gpus, program=MEGATRON)).ranked}
            for machine in (smaller, H100)
        )
        assert set(with_less) <= set(with_all)
        best = min(with_all.values(), default=0)
        assert all(step_s >= best * (1 - 1e-9) for step_s in with_less.values())

    holds()
