"""What holds of every plan: it fits, its degrees multiply to the GPUs, its bytes are the sum of their kinds."""

import dataclasses
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manyhands.config.layout import resolve_layout
from manyhands.config.options import read_options
from manyhands.predict.layouts import Question, families, name_of
from manyhands.predict.machines import machine_named
from manyhands.predict.memory import bytes_per_rank, room, with_micro_batch
from manyhands.predict.models import PlannedModel, preset_model
from manyhands.predict.planner import CLOSE, plan
from manyhands.predict.report import train_flags
from manyhands.train.dry_run import fits

H100 = machine_named("h100")


def llama(layers, heads, groups, vocab, positions, experts, top_k, capacity):
    width = heads * groups * 64
    top_k = min(top_k, experts)
    capacity = min(capacity, experts / top_k) if capacity and experts > 1 else None
    return PlannedModel(
        vocab, positions, layers, heads * groups, width, n_kv_head=heads, n_hidden=3 * width, style="llama",
        experts=experts, top_k=top_k, capacity=capacity, apart=True,
    )  # fmt: skip


gpts = st.builds(
    lambda layers, heads, size, vocab, positions, tie: PlannedModel(
        vocab, positions, layers, heads, heads * size, tie=tie
    ),
    st.integers(1, 48), st.sampled_from([1, 3, 4, 8, 12, 25]), st.sampled_from([16, 64, 128]),
    st.integers(65, 60_000), st.sampled_from([64, 1000, 2048]), st.booleans(),
)  # fmt: skip
llamas = st.builds(
    llama, st.integers(1, 40), st.sampled_from([1, 2, 4]), st.sampled_from([1, 4]), st.integers(100, 60_000),
    st.sampled_from([512, 2048, 16_384]), st.sampled_from([1, 4, 8]), st.integers(1, 3),
    st.sampled_from([None, 1.0, 1.5]),
)  # fmt: skip
questions = st.builds(
    lambda model, memory_gb, gpus, batch, offload: Question(
        model, dataclasses.replace(H100, memory_bytes=memory_gb * 1e9), gpus, batch, offload
    ),
    gpts | llamas, st.floats(0.05, 80), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 64), st.booleans(),
)  # fmt: skip


def with_little_memory(question, pick, factor):
    """The question on a machine that is a bit too small for one of its layouts."""
    found = [c for family in families(question, ("none",), 4) for c in family.variants]
    if not found:
        return question
    one = found[pick % len(found)]
    needed = bytes_per_rank(question.model, one.layout, one.options).on_gpu
    return dataclasses.replace(question, machine=dataclasses.replace(H100, memory_bytes=needed / 0.9 / factor))


@settings(max_examples=30, derandomize=True)
@given(question=questions, pick=st.integers(0, 999), factor=st.floats(1.001, 1.1))
def test_whatever_is_ranked_fits_uses_every_gpu_and_has_the_bytes_of_its_kinds(question, pick, factor):
    question = with_little_memory(question, pick, factor)
    answer = plan(question)
    names = [family.name for family in families(question, ("none",), 1)]
    assert len(names) == len(set(names)), "a name says which way to split it is"
    assert sorted(names) == sorted([one.name for one in answer.ranked] + [name for name, _ in answer.refused])
    for one in answer.ranked:
        layout, held = one.layout, one.held
        assert one.name == name_of(one.sharing, layout) and layout.world_size == question.gpus
        assert layout.replicate * layout.shard % layout.expert == 0 == question.model.experts % layout.expert
        assert held.on_gpu <= room(question.machine.memory_bytes)
        assert held == bytes_per_rank(question.model, layout, one.options), "as the dry run counts"
        if question.model.style == "gpt":
            trained = resolve_layout(one.options, question.model, question.gpus, 8)
            assert trained == layout, "the trainer takes it"
        assert sum(held.by_kind().values()) == held.on_gpu + held.on_host and min(held.by_kind().values()) >= 0
        assert layout.pipeline * layout.data * layout.context * layout.tensor == question.gpus
        assert layout.data * layout.micro_batches * one.micro_batch == question.global_batch
        assert sum(one.time.by_part().values()) == pytest.approx(one.step_s)
        assert min(one.time.by_part().values()) >= 0 and 0 < one.mfu < 1
    for _, sentence in answer.refused:
        assert any(c.isdigit() for c in sentence)
    if answer.best:
        assert answer.best.step_s <= answer.fastest_s * CLOSE
        assert answer.fastest_s <= min(one.step_s for one in answer.ranked)


@settings(max_examples=8, derandomize=True)
@given(question=questions, factor=st.floats(1, 8))
def test_more_memory_never_makes_the_fastest_plan_slower_and_refuses_nothing_that_fitted(question, factor):
    larger = dataclasses.replace(question.machine, memory_bytes=factor * question.machine.memory_bytes)
    before, after = plan(question), plan(dataclasses.replace(question, machine=larger))
    assert after.fastest_s <= before.fastest_s
    assert {one.name for one in before.ranked} <= {one.name for one in after.ranked}


def test_what_the_planner_recommends_the_dry_run_says_fits_and_the_trainer_takes():
    """200 drawn questions about the trainer's presets, each planned, then described as `--dry-run` does."""
    drawn, said = random.Random(20261128), Counter()
    for _ in range(200):
        preset, gpus = drawn.choice(["gpt2", "gpt2-medium", "gpt-1b", "shakespeare-85m"]), drawn.choice([1, 2, 4, 8])
        machine = dataclasses.replace(H100, memory_bytes=drawn.uniform(4, 40) * 1e9)
        question = Question(preset_model(preset), machine, gpus, 8 * drawn.choice([1, 4, 16]), False, "1F1B")
        model, space = question.model, machine.memory_bytes
        for family in families(question, ("none",), 1):
            for one in family.variants[:1]:
                needed = bytes_per_rank(model, one.layout, one.options).on_gpu
                assert fits(needed, space, "").startswith("it fits: ") == (needed <= room(space))
                said[fits(needed, space, "").split(":")[0]] += 1
        for one in plan(question).ranked[:2]:
            assert fits(one.held.on_gpu, space, "").startswith("it fits: ")
            taken = with_micro_batch(read_options(train_flags(question, one)), model, gpus, gpus, space)
            needed = bytes_per_rank(model, resolve_layout(taken, model, gpus), taken).on_gpu
            assert fits(needed, space, "").startswith("it fits: "), "what the command makes the trainer take"
    assert set(said) == {"it fits", "it fits, but tightly", "IT DOES NOT FIT"}, "all three were drawn"
