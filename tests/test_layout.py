"""Layouts: which ranks stand where, that nobody's sequence is lost, and what does not fit together."""

import dataclasses
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manyhands.config.layout import AXES, Layout, LayoutError, resolve_layout
from manyhands.config.options import from_preset, model_config, read_options
from manyhands.config.strategies import STRATEGIES


def layout_of(flags, world_size, ranks_per_node=None):
    options = read_options(flags.split())
    return resolve_layout(options, model_config(options, 65), world_size, ranks_per_node)


def degrees(layout):
    return {axis: size for axis, size in layout.sizes().items() if size > 1}


@pytest.mark.parametrize(
    "flags, world_size, expected",
    [
        ("", 1, {}),
        ("", 4, {"replicate": 4}),
        ("--parallel.strategy zero1", 4, {"replicate": 4}),
        ("--parallel.strategy fsdp", 4, {"shard": 4}),
        ("--parallel.strategy fsdp --parallel.sharding none", 4, {"replicate": 4}),
        ("--parallel.strategy fsdp --parallel.sharding hybrid", 4, {"replicate": 2, "shard": 2}),
        ("--parallel.strategy fsdp --parallel.sharding hybrid --parallel.replicate 4", 8, {"replicate": 4, "shard": 2}),
        ("--parallel.strategy tp", 4, {"tensor": 4}),
        ("--parallel.strategy pp", 4, {"pipeline": 4}),
        ("--parallel.tensor 2", 4, {"replicate": 2, "tensor": 2}),
        ("--parallel.strategy fsdp --parallel.tensor 2 --parallel.pipeline 2", 8,
         {"pipeline": 2, "shard": 2, "tensor": 2}),
        ("--parallel.context 2", 4, {"replicate": 2, "context": 2}),
        ("--parallel.context 2 --parallel.strategy fsdp --parallel.sharding hybrid", 8,
         {"replicate": 2, "shard": 2, "context": 2}),
    ],
)  # fmt: skip
def test_the_strategy_uses_the_ranks_that_no_axis_claims(flags, world_size, expected):
    layout = layout_of(flags, world_size)
    assert degrees(layout) == expected
    assert layout.world_size == world_size
    assert str(layout) == (" x ".join(f"{axis} {n}" for axis, n in expected.items()) or "one rank")


def test_hybrid_sharding_shards_within_a_node_and_copies_across():
    flags = "--parallel.strategy fsdp --parallel.sharding hybrid"
    assert degrees(layout_of(flags, 8, ranks_per_node=4)) == {"replicate": 2, "shard": 4}
    assert degrees(layout_of(f"{flags} --train.global-batch 48", 16, ranks_per_node=2)) == {"replicate": 8, "shard": 2}


def test_ranks_that_differ_only_in_tensor_are_neighbours():
    layout = Layout(pipeline=2, replicate=3, shard=5, tensor=7)
    assert layout.world_size == 210
    assert layout.coordinates(0) == {"pipeline": 0, "replicate": 0, "shard": 0, "tensor": 0}
    assert layout.coordinates(6) == {"pipeline": 0, "replicate": 0, "shard": 0, "tensor": 6}
    assert layout.coordinates(7) == {"pipeline": 0, "replicate": 0, "shard": 1, "tensor": 0}
    assert layout.coordinates(209) == {"pipeline": 1, "replicate": 2, "shard": 4, "tensor": 6}


@pytest.mark.parametrize(
    "flags, world_size, micro_batches",
    [
        ("", 2, 1),
        ("--train.micro-batch 3", 2, 4),  # 24 sequences, 12 per rank, 3 at a time
        ("--parallel.strategy pp", 4, 8),  # twice as many as stages
        ("--parallel.strategy pp --train.micro-batch 4", 2, 6),
    ],
)
def test_the_share_of_a_rank_is_cut_into_micro_batches(flags, world_size, micro_batches):
    assert layout_of(flags, world_size).micro_batches == micro_batches


@st.composite
def wishes(draw):
    """(parallel options, world size, global batch, micro-batch): mostly what fits together, now and then not."""
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    axes = {
        "pipeline": pick(1, 1, 2, 4),
        "replicate": pick(1, 2, 3),
        "shard": pick(1, 2, 4),
        "tensor": pick(1, 1, 2, 4),
    }
    context = pick(1, 1, 1, 2, 4)
    world_size = prod(axes.values()) * context + pick(0, 0, 0, 0, 1)
    wish = {axis: pick(None, degree, degree) for axis, degree in axes.items()}
    wish |= {
        "strategy": pick("fsdp", *STRATEGIES),
        "sharding": pick("hybrid", "hybrid", "full", "grad_op", "none"),
        "schedule": pick("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"),
        "stages_per_rank": pick(None, None, None, 1, 2, 3),
        "sequence_parallel": pick(False, False, True),
        "context": context,
    }
    if wish["strategy"] != "pp" and axes["pipeline"] == 1:
        wish |= {
            "schedule": pick(wish["schedule"], "1F1B", "1F1B", "1F1B"),
            "stages_per_rank": pick(None, None, None, 2),
        }
    data, micro_batch = axes["replicate"] * axes["shard"], pick(None, None, 1, 2, 3)
    global_batch = data * axes["pipeline"] * (micro_batch or 1) * pick(1, 2, 3) + pick(0, 0, 0, 0, 1)
    return wish, world_size, global_batch, micro_batch


@settings(max_examples=400)
@given(wishes(), st.sampled_from([None, 1, 2, 4]))
def test_a_layout_that_resolves_uses_every_rank_and_covers_each_sequence_once(asked, ranks_per_node):
    wish, world_size, global_batch, micro_batch = asked
    options = from_preset("nano")
    options = dataclasses.replace(
        options,
        parallel=dataclasses.replace(options.parallel, **wish),
        train=dataclasses.replace(options.train, global_batch=global_batch, micro_batch=micro_batch),
    )
    try:
        layout = resolve_layout(options, model_config(options, 65), world_size, ranks_per_node)
    except LayoutError as error:
        sentence = str(error)
        assert sentence.count("\n") == 0 and len(sentence) > 30
        return
    assert layout.world_size == layout.pipeline * layout.replicate * layout.shard * layout.tensor == world_size
    for axis in AXES:  # what was asked for is what one gets
        assert wish[axis] in (None, layout.sizes()[axis])
    assert prod(layout.sizes().values()) == world_size and layout.sizes()["context"] == wish["context"]
    places = [tuple(layout.coordinates(rank).values()) for rank in range(world_size)]
    assert len(set(places)) == world_size, "two ranks stand at one place"
    # per pipeline stage and tensor share, the data ranks are 0, 1, ..., data - 1, each once per context rank
    groups = {}
    for rank in range(world_size):
        place = layout.coordinates(rank)
        groups.setdefault((place["pipeline"], place["tensor"]), []).append(layout.data_rank(rank))
    assert len(groups) == layout.pipeline * layout.tensor
    whole = [share for share in range(layout.data) for _ in range(layout.context)]
    assert all(ranks == whole for ranks in groups.values()), "neighbours share sequences"
    # so the shares, cut into micro-batches, are the global batch: nothing twice, nothing left over
    share, rest = divmod(global_batch, layout.data)
    size, left = divmod(share, layout.micro_batches)
    assert rest == left == 0 and size >= 1
    assert micro_batch in (None, size)
    assert layout.micro_batches % layout.pipeline == 0
    assert layout.pipeline * layout.stages_per_rank <= 4 or layout.pipeline == 1  # layers of nano
    assert 4 % layout.tensor == 0  # heads of nano


@pytest.mark.parametrize(
    "flags, world_size, words",
    [
        # ranks
        ("--parallel.tensor 2 --parallel.pipeline 2", 2, ("2 ranks", "pipeline=2, tensor=2", "multiple of 4")),
        ("--parallel.replicate 2 --parallel.tensor 2", 8, ("replicate 2 x tensor 2 = 4 ranks", "8 were started")),
        # sizes
        ("--parallel.strategy tp", 3, ("model.n_head=4", "3 tensor ranks")),
        ("--parallel.strategy pp", 5, ("5 stages (5 ranks x 1)", "model.n_layer=4")),
        ("--train.global-batch 25", 2, ("train.global_batch=25", "2 data-parallel ranks", "multiple of 2")),
        ("--train.micro-batch 5", 2, ("share of 12", "micro-batches of 5", "divisor of 12")),
        ("--parallel.strategy pp --train.micro-batch 24", 2, ("1 micro-batches", "2 pipeline ranks", "multiple of 2")),
        # strategies and their own options
        ("--parallel.shard 2", 2, ("parallel.shard=2", "strategy=fsdp")),
        ("--parallel.strategy fsdp --parallel.shard 2 --parallel.replicate 2", 4,
         ("replicate=2 and shard=2", "hybrid")),
        ("--parallel.strategy zero1 --parallel.tensor 2", 4, ("zero1", "fsdp")),
        ("--parallel.strategy deepspeed --train.precision fp16", 2, ("deepspeed", "not fp16")),
        ("--parallel.strategy deepspeed --parallel.reduce-dtype bf16", 2, ("deepspeed", "leave parallel.reduce_dtype")),
        ("--parallel.sequence-parallel", 2, ("parallel.sequence_parallel", "parallel.tensor=2")),
        ("--parallel.strategy pp --train.compile", 2, ("train.compile", "--train.no-compile")),
        ("--parallel.strategy pp --train.precision fp16", 2, ("fp16", "bf16")),
        # options that would have no effect
        ("--parallel.zero-stage 1", 2, ("parallel.zero_stage=1", "strategy=deepspeed, not ddp")),
        # context ranks
        ("--parallel.context 2 --model.block-size 66", 4, ("block_size=66", "2 x 2 equal pieces", "multiple of 4")),
        ("--parallel.context 2 --parallel.strategy pp", 4, ("parallel.context=2", "pipeline", "parallel.strategy=ddp")),
        ("--parallel.context 2 --model.dropout 0.1", 2, ("parallel.context=2", "model.dropout=0, not 0.1")),
        # a llama
        ("--preset smollm2-135m --parallel.tensor 2", 2,
         ("model.n_head=9 with model.n_kv_head=3 does", "over 2 tensor ranks", "use 1, 3 or 9")),
        ("--preset llama-nano --model.n-head 12 --model.n-embd 48 --model.n-kv-head 6 --parallel.strategy tp", 4,
         ("n_kv_head=6", "over 4 tensor ranks", "use 1, 2, 3, 6 or 12")),
        ("--preset llama-nano --model.n-hidden 342 --parallel.strategy tp", 4,
         ("model.n_hidden=342", "4 tensor ranks", "use a divisor of 342")),
        ("--preset llama-nano --parallel.expert 2", 2, ("model.experts=1", "parallel.expert=2")),
        ("--preset llama-nano --parallel.strategy deepspeed", 2, ("model.style=llama", "deepspeed", "model.style=gpt")),
        # schedules and wrapping
        ("--parallel.strategy pp --parallel.schedule 1F1B --parallel.stages-per-rank 2", 2,
         ("1F1B", "not 2", "Interleaved1F1B")),
        ("--parallel.strategy fsdp --parallel.wrapping blocks", 2, ("blocks", "block_group:2")),
        ("--parallel.strategy fsdp --parallel.wrapping block_group:5", 2, ("block_group:5", "4 blocks")),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_numbers_and_a_cure(flags, world_size, words):
    with pytest.raises(LayoutError) as error:
        layout_of(flags, world_size)
    sentence = str(error.value)
    assert all(word in sentence for word in words), sentence
    assert any(word in sentence for word in (" use ", "; start", "; leave", "; choose", "needs", "runs here")), sentence
