"""Drawn products of strategies and axes train a llama as one process does, in float64."""

import random
from dataclasses import replace

import pytest
from manyhands.config.layout import LayoutError, resolve_layout
from manyhands.config.options import read_options
from one_process import BATCH, CONFIG, LLAMA, OLMO, assert_equal, one_process, options_of, steps_of
from test_saves import drawn

pytestmark = pytest.mark.ranks
MIXTRAL = replace(CONFIG, style="llama", n_kv_head=2, n_hidden=20, experts=4)
MODELS = [replace(model, n_kv_head=k) for model in (LLAMA, OLMO, MIXTRAL) for k in (1, 2, 4)]
SCHEDULES = ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble")


def composition(seed):
    """(ranks, options, model) of `test_saves.drawn`'s layout, with more that changes how it is computed, or None."""
    case, draw = drawn(seed), random.Random(-seed)
    tie, vocab = case.tie or draw.random() < 0.3, draw.choice((65, 35))
    config = replace(
        draw.choice([m for m in MODELS if m.experts == case.experts]), vocab_size=vocab, tie=tie, n_layer=4
    )
    words = case.layout
    if "--parallel.tensor" in words or "strategy tp" in words:
        words += draw.choice(("", " --parallel.sequence-parallel"))
    if "pipeline" in words or "strategy pp" in words:
        words += f" --parallel.schedule {draw.choice(SCHEDULES)}"
    words += draw.choice(("", " --parallel.activation-checkpointing block"))
    parallel = read_options(words.split()).parallel
    micro = draw.choice((None, 1, 2))
    options = replace(options_of(), parallel=parallel)
    options = replace(
        options, train=replace(options.train, micro_batch=micro),
        optimizer=replace(options.optimizer, balance_loss=0.0, balance_speed=0.05),
    )  # fmt: skip
    try:
        layout = resolve_layout(options, config, case.n)
    except LayoutError:
        return None
    return (case.n, options, config) if BATCH % (layout.data or 1) == 0 else None


COMPOSITIONS = [one for one in map(composition, range(300)) if one is not None][:66]
GROUPS = [COMPOSITIONS[i::11] for i in range(11)]


def steps_of_each(ranks, compositions):
    return [steps_of(ranks, options, config) for _, options, config in compositions]


@pytest.mark.full
@pytest.mark.parametrize("group", range(11))
def test_drawn_compositions_take_the_steps_of_one_process(pool, group):
    for n in (2, 4, 8):
        some = [one for one in GROUPS[group] if one[0] == n]
        found = pool.run(n, steps_of_each, some, timeout_s=240)
        for i, (_, options, config) in enumerate(some):
            assert_equal([rank[i] for rank in found], one_process(options, config))


def test_the_drawn_compositions_hold_what_they_are_drawn_for():
    pairs = [(options.parallel, config) for _, options, config in COMPOSITIONS]
    assert len(pairs) >= 60
    pipelines = [config for parallel, config in pairs if parallel.strategy == "pp" or (parallel.pipeline or 1) > 1]
    assert sum(config.tie for config in pipelines) >= 4
    assert sum(parallel.context > 1 for parallel, _ in pairs) >= 4
    assert sum(parallel.expert > 1 for parallel, _ in pairs) >= 2
    copies = [c for parallel, c in pairs if c.kv_heads < (parallel.tensor or 1)]
    assert len(copies) >= 5, "tensor ranks that hold a head of keys alike"
