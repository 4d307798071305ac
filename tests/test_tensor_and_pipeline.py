"""Tensor and pipeline parallelism, and their products with the others, are one process; and they talk no more than they
must.
"""

from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from manyhands.config.layout import LayoutError, layers_of_stages, resolve_layout
from manyhands.gpt.model import GPT
from manyhands.measure import wire
from one_process import (
    CONFIG,
    EXACT,
    LLAMA,
    OLMO,
    assert_equal,
    batches,
    build,
    one_process,
    options_of,
    share,
    steps_of,
)

TIED = replace(CONFIG, n_layer=2, tie=True, qkv_bias=True)
UNEVEN = replace(CONFIG, n_layer=7)
SHALLOW = replace(CONFIG, n_layer=2)  # enough where no stage is cut in two


@pytest.fixture(scope="module")
def reference():
    known = {}

    def of(options, config):
        key = (options.train.precision, config)
        if key not in known:
            known[key] = one_process(options, config)
        return known[key]

    return of


def assert_trains_like_one_process(pool, reference, n, config=CONFIG, **options):
    options = options_of(**options)
    assert_equal(pool.run(n, steps_of, options, config), reference(options, config))


TENSOR = {
    "two ranks": (2, {}),
    "four ranks": (4, {}),
    "sequence parallel": (2, {"sequence_parallel": True}),
    "loss parallel": (2, {"loss_parallel": True}),
    "sequence and loss parallel, four ranks": (4, {"sequence_parallel": True, "loss_parallel": True}),
    "micro-batches": (2, {"sequence_parallel": True, "loss_parallel": True, "micro_batch": 2}),
    "checkpointing": (2, {"sequence_parallel": True, "activation_checkpointing": "block"}),
    "checkpointing what is cheap": (2, {"sequence_parallel": True, "activation_checkpointing": "selective"}),
}


# what the others combine, or differs in one flag: `make test-full` has it
ONE_FLAG = (
    "four ranks", "sequence parallel", "loss parallel", "sequence and loss parallel, four ranks",
    "checkpointing", "checkpointing what is cheap",
)  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.full] * (case in ONE_FLAG)) for case in TENSOR])
def test_tensor_ranks_train_like_one_process(pool, reference, case):
    n, options = TENSOR[case]
    assert_trains_like_one_process(pool, reference, n, SHALLOW, strategy="tp", **options)


def redistributed(ranks, cases):
    """The times that DTensor moves a tensor in the forward and backward of each case: each costs Python's time."""
    from torch.distributed.tensor import _redistribute

    found = []
    for config, parallel in cases:
        model = build(ranks, options_of(**parallel), config)
        with mock.patch.object(
            _redistribute, "redistribute_local_tensor", wraps=_redistribute.redistribute_local_tensor
        ) as moved:
            model.forward_backward(*share(model, *next(batches(config))))
        found.append(moved.call_count)
    return found


def test_dtensor_moves_nothing_between_the_layers_of_tensor_ranks(pool):
    cases = [(config, {"strategy": "tp", "sequence_parallel": shared}) for config in (TIED, LLAMA) for shared in (0, 1)]
    assert pool.run(2, redistributed, cases) == [[0] * len(cases)] * 2


@pytest.mark.parametrize("loss_parallel", [pytest.param(False, marks=pytest.mark.full), True])
def test_tied_weights_stay_one_weight_on_tensor_ranks(pool, reference, loss_parallel):
    options = {"strategy": "tp", "sequence_parallel": True, "loss_parallel": loss_parallel}
    assert_trains_like_one_process(pool, reference, 2, config=TIED, **options)


# --- a llama: ranks have heads of keys of their own, or several of them hold one alike

ONE_KEY = replace(LLAMA, n_kv_head=1, n_layer=2)
FOUR_HIDDEN = replace(LLAMA, n_hidden=52, n_layer=2)  # 2 heads of keys, for 4 ranks
LLAMAS = {
    2: [
        (replace(LLAMA, n_layer=2), dict(strategy="tp")),
        (replace(OLMO, n_layer=2), dict(strategy="tp", sequence_parallel=True, loss_parallel=True, micro_batch=2)),
        (ONE_KEY, dict(strategy="tp", sequence_parallel=True, activation_checkpointing="block")),
        (replace(ONE_KEY, clip_qkv=0.02), dict(strategy="tp", activation_checkpointing="selective")),
    ],
    4: [
        (FOUR_HIDDEN, dict(strategy="tp", sequence_parallel=True, loss_parallel=True)),
        (ONE_KEY, dict(strategy="fsdp", tensor=2, micro_batch=2)),
        (replace(OLMO, n_layer=2, n_kv_head=2), dict(strategy="ddp", tensor=2, sequence_parallel=True)),
        (ONE_KEY, dict(strategy="fsdp", sharding="grad_op", tensor=2, loss_parallel=True, wrapping="size:300")),
    ],
    8: [
        (ONE_KEY, dict(strategy="fsdp", sharding="hybrid", tensor=2, sequence_parallel=True)),
        (replace(FOUR_HIDDEN, tie=False), dict(strategy="fsdp", tensor=4, wrapping="block_and_size")),
    ],
}


def steps_of_all(ranks, cases):
    return [steps_of(ranks, options_of(**parallel), config) for config, parallel in cases]


def assert_cases_train_like_one_process(pool, reference, n, cases):
    results = pool.run(n, steps_of_all, cases, timeout_s=240)
    for i, (config, parallel) in enumerate(cases):
        assert_equal([own[i] for own in results], reference(options_of(**parallel), config))


@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.full), 4, pytest.param(8, marks=pytest.mark.full)])
def test_tensor_ranks_train_a_llama_like_one_process(pool, reference, n):
    assert_cases_train_like_one_process(pool, reference, n, LLAMAS[n])


SCHEDULES = {
    "GPipe": (2, CONFIG),
    "1F1B": (4, UNEVEN),
    "LoopedBFS": (2, CONFIG),
    "Interleaved1F1B": (2, CONFIG),
    "InterleavedZeroBubble": (2, CONFIG),
    "ZBVZeroBubble": (2, CONFIG),
    "DualPipeV": (2, CONFIG),
}


RARE = ("LoopedBFS", "InterleavedZeroBubble", "DualPipeV")


@pytest.mark.parametrize(
    "schedule", [pytest.param(name, marks=[pytest.mark.full] * (name in RARE)) for name in SCHEDULES]
)
def test_a_pipeline_trains_like_one_process_under_every_schedule(pool, reference, schedule):
    n, config = SCHEDULES[schedule]
    assert_trains_like_one_process(pool, reference, n, config, strategy="pp", schedule=schedule)


# --- tied: the first and the last stage hold one matrix, of which each makes a part of the gradient

DEEP_TIED, TIED_LLAMA = replace(TIED, n_layer=4), replace(LLAMA, n_kv_head=1)
TIED_PIPELINES = {
    2: [
        (DEEP_TIED, dict(strategy="pp")),
        (LLAMA, dict(strategy="pp", schedule="Interleaved1F1B")),
        (DEEP_TIED, dict(strategy="pp", schedule="ZBVZeroBubble")),
    ],
    4: [
        (DEEP_TIED, dict(strategy="pp", schedule="GPipe")),  # between them stages that hold nothing of it
        (LLAMA, dict(strategy="fsdp", pipeline=2, wrapping="block_and_size")),
        (DEEP_TIED, dict(strategy="ddp", pipeline=2, schedule="DualPipeV")),
        (TIED_LLAMA, dict(strategy="pp", tensor=2, sequence_parallel=True)),
        (DEEP_TIED, dict(strategy="fsdp", pipeline=2, sharding="grad_op", schedule="ZBVZeroBubble")),
    ],
    8: [
        (TIED_LLAMA, dict(strategy="fsdp", pipeline=2, tensor=2, sharding="grad_op", schedule="ZBVZeroBubble")),
        (DEEP_TIED, dict(strategy="fsdp", pipeline=2, tensor=2)),
        (DEEP_TIED, dict(strategy="ddp", pipeline=4)),
    ],
}


@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.full), 4, pytest.param(8, marks=pytest.mark.full)])
def test_the_ends_of_a_pipeline_share_a_tied_matrix_as_one_process_has_it(pool, reference, n):
    assert_cases_train_like_one_process(pool, reference, n, TIED_PIPELINES[n])


def gradients_twice(ranks, schedule):
    parallel = build(ranks, options_of(strategy="pp", schedule=schedule), DEEP_TIED)
    once = []
    for _ in range(2):
        parallel.forward_backward(*share(parallel, *next(batches(CONFIG))))
        once.append(parallel.named_parameters()["tokens.weight"].grad.clone())
    return (once[1] - 2 * once[0]).abs().max().item(), once[0].abs().max().item()


def test_gradients_of_a_tied_matrix_add_up_over_steps_without_an_update(pool):
    for apart, largest in pool.run(2, gradients_twice, "1F1B"):
        assert apart < EXACT < largest


PIPED = replace(LLAMA, tie=False)
PIPED_LLAMAS = {
    2: [
        (config, dict(strategy="pp", schedule=schedule))
        for config, schedule in zip(
            (PIPED, replace(OLMO, separator=7), PIPED, OLMO, PIPED, OLMO, PIPED), SCHEDULES, strict=True
        )
    ],
    4: [
        (replace(PIPED, n_kv_head=1), dict(strategy="pp", tensor=2, sequence_parallel=True, schedule="ZBVZeroBubble")),
        (PIPED, dict(strategy="fsdp", pipeline=2, schedule="Interleaved1F1B", activation_checkpointing="selective")),
        (replace(PIPED, n_kv_head=1), dict(strategy="ddp", pipeline=2, activation_checkpointing="block")),
    ],
    8: [
        (replace(PIPED, n_kv_head=1), dict(strategy="fsdp", pipeline=2, tensor=2, sequence_parallel=True)),
        (replace(PIPED, n_kv_head=1), dict(strategy="ddp", pipeline=2, tensor=2)),
    ],
}


@pytest.mark.parametrize("n", [2, *(pytest.param(n, marks=pytest.mark.full) for n in (4, 8))])
def test_a_pipeline_trains_a_llama_like_one_process_under_every_schedule(pool, reference, n):
    assert_cases_train_like_one_process(pool, reference, n, PIPED_LLAMAS[n])


PRODUCTS = {
    "2 replicas x 2 tensor": dict(strategy="ddp", tensor=2),
    "2 replicas x 2 tensor, all split": dict(strategy="ddp", tensor=2, sequence_parallel=True, loss_parallel=True),
    "2 shards x 2 tensor": dict(strategy="fsdp", tensor=2, sequence_parallel=True, micro_batch=2),
    "2 tensor x 2 stages": dict(strategy="pp", tensor=2),
    "2 tensor x 2 stages, sequence parallel": dict(
        strategy="pp", tensor=2, sequence_parallel=True, schedule="ZBVZeroBubble"
    ),
    "2 replicas x 2 stages": dict(strategy="ddp", pipeline=2),
    "2 replicas x 2 stages, zero bubble": dict(
        strategy="ddp", pipeline=2, schedule="InterleavedZeroBubble", activation_checkpointing="block"
    ),
    "2 shards x 2 stages": dict(strategy="fsdp", pipeline=2, activation_checkpointing="selective"),
    "2 shards x 2 stages, interleaved": dict(strategy="fsdp", pipeline=2, schedule="Interleaved1F1B"),
    "2 shards x 2 stages, zero bubble": dict(
        strategy="fsdp", pipeline=2, sharding="grad_op", schedule="InterleavedZeroBubble"
    ),
    "2 shards x 2 stages, DualPipeV": dict(strategy="fsdp", pipeline=2, sharding="grad_op", schedule="DualPipeV"),
    "2 x 2 x 2 with replicas": dict(strategy="ddp", pipeline=2, tensor=2),
    "2 x 2 x 2 with shards, zero bubble": dict(
        strategy="fsdp", pipeline=2, tensor=2, sequence_parallel=True, sharding="grad_op", schedule="ZBVZeroBubble"
    ),
    "2 replicas x 2 shards x 2 stages": dict(strategy="fsdp", pipeline=2, sharding="hybrid"),
    "2 replicas x 2 shards x 2 tensor": dict(strategy="fsdp", tensor=2, sharding="hybrid"),
}


# in `make test` one product; the others in `make test-full`
ALWAYS = ("2 shards x 2 stages, interleaved",)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in ALWAYS else pytest.mark.full) for case in PRODUCTS]
)
def test_products_train_like_one_process(pool, reference, case):
    n = 8 if case.count("2 ") + case.startswith("2 x 2 x 2") > 2 else 4
    config = CONFIG if "schedule" in PRODUCTS[case] else SHALLOW
    assert_trains_like_one_process(pool, reference, n, config, **PRODUCTS[case])


def losses_in_bf16(ranks, options):
    """(this layout's mean loss, one process's under the same autocast, the gradients' dtypes, relative gradient
    distance).
    """
    parallel = build(ranks, options)
    ids, targets = next(batches(CONFIG))
    loss = parallel.mean_loss(parallel.forward_backward(*share(parallel, ids, targets)))
    torch.manual_seed(options.train.seed)
    model = GPT(CONFIG)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(ids, targets)[1]
    expected.backward()
    seen = parallel.named_full_gradients()
    far = max(((seen[name] - p.grad).norm() / p.grad.norm()).item() for name, p in model.named_parameters())
    return loss.item(), expected.item(), {g.dtype for g in seen.values()}, far


@pytest.mark.parametrize(
    ("n", "options"),
    [
        (2, dict(strategy="tp", sequence_parallel=True, loss_parallel=True)),
        pytest.param(2, dict(strategy="pp", schedule="ZBVZeroBubble"), marks=pytest.mark.full),
        pytest.param(4, dict(strategy="fsdp", pipeline=2), marks=pytest.mark.full),
        pytest.param(4, dict(strategy="fsdp", tensor=2), marks=pytest.mark.full),
    ],
)
def test_bf16_is_autocast_with_float32_gradients(pool, n, options):
    for loss, expected, dtypes, far in pool.run(n, losses_in_bf16, options_of(precision="bf16", **options)):
        assert abs(loss - expected) < 1e-3 and dtypes == {torch.float32}
        assert 1e-5 < far < 0.1  # rounding to 8 bits in another order: neither none nor much


def collectives(ranks, options, config):
    """[how often each collective is called in a forward, and in its backward]."""
    model = build(ranks, options, config).modules[0]
    ids, targets = next(batches(config))
    with wire.watch() as forward:
        loss = model(ids, targets)[1]
    with wire.watch() as backward:
        loss.backward()
    return [Counter(call.op for call in seen.calls) for seen in (forward, backward)]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_layer_calls_two_all_reduces_forward_and_two_backward(pool, sequence_parallel):
    options = options_of(strategy="tp", sequence_parallel=sequence_parallel)
    four = pool.run(2, collectives, options, CONFIG)[0]
    two = pool.run(2, collectives, options, replace(CONFIG, n_layer=2))[0]
    of_two_layers = [more - less for more, less in zip(four, two, strict=True)]
    if sequence_parallel:  # an all-reduce in two halves, with the norms in between
        halves = {"all_gather": 4, "reduce_scatter": 4}
        assert of_two_layers == [halves, halves]
    else:
        assert of_two_layers == [{"all_reduce": 4}, {"all_reduce": 4}]


def sizes(ranks, options):
    return {
        name: (p.to_local() if hasattr(p, "to_local") else p).numel()
        for name, p in build(ranks, options).named_parameters().items()
    }


def test_stages_hold_disjoint_parts_of_the_model_and_shards_of_them(pool):
    whole = CONFIG.num_params()
    stages = pool.run(2, sizes, options_of(strategy="pp", schedule="ZBVZeroBubble"))
    assert sum(sum(rank.values()) for rank in stages) == whole
    assert not stages[0].keys() & stages[1].keys()
    # a V: the first and the last stage are on rank 0, the two in the middle on rank 1
    assert {"tokens.weight", "blocks.0.norm_1.bias", "blocks.3.norm_1.bias", "head.bias"} <= stages[0].keys()
    sharded = pool.run(4, sizes, options_of(strategy="fsdp", pipeline=2))
    assert sum(sum(rank.values()) for rank in sharded) == whole
    for shares in (sharded[:2], sharded[2:]):
        first, second = (sum(rank.values()) for rank in shares)
        assert 0.4 < first / (first + second) < 0.6


def who_has_a_loss(ranks, options):
    parallel = build(ranks, options)
    own = share(parallel, *next(batches(CONFIG)))
    trained = parallel.forward_backward(*own)
    # outside of a batch, a message would cost NCCL a communicator for its pair of ranks
    with mock.patch.multiple("torch.distributed", send=None, recv=None):
        evaluated = parallel.evaluate(*own)
    return trained.item(), evaluated.item(), parallel.mean_loss(trained).item()


@pytest.mark.parametrize(
    ("schedule", "last"),
    [("1F1B", 1), ("ZBVZeroBubble", 0)]
    + [pytest.param(*row, marks=pytest.mark.full) for row in (("Interleaved1F1B", 1), ("DualPipeV", 0))],
)
def test_a_rank_without_the_last_stage_has_loss_zero(pool, schedule, last):
    # torchtitan#547: -1, or nothing, was read there
    results = pool.run(2, who_has_a_loss, options_of(strategy="pp", schedule=schedule))
    means = {mean for _, _, mean in results}
    assert len(means) == 1
    assert results[last][:2] == pytest.approx((means.pop(),) * 2, abs=EXACT)
    assert results[1 - last][:2] == (0, 0)


def masks(ranks, options):
    """Zeros that dropout drew in this rank's attention output's sum and in its heads, and the loss."""
    parallel = build(ranks, options, replace(CONFIG, dropout=0.5))
    drawn, original = {}, F.scaled_dot_product_attention

    def seeded(q, k, v, **settings):
        drawn.setdefault("heads", torch.rand(4))  # a number that attention's dropout would draw next
        return original(q, k, v, **settings)

    def see(module, args, out):
        drawn.setdefault("stream", out.eq(0))

    parallel.modules[0].blocks[0].drop.register_forward_hook(see)
    torch.manual_seed(1)
    with mock.patch.object(F, "scaled_dot_product_attention", seeded):
        loss = parallel.forward_backward(*next(batches(CONFIG)))
    return drawn["heads"], drawn["stream"], loss, torch.get_rng_state()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_masks_agree_on_what_tensor_ranks_share_and_differ_on_the_rest(pool, sequence_parallel):
    options = options_of(strategy="tp", sequence_parallel=sequence_parallel)
    (heads, stream, loss, state), (heads_1, stream_1, loss_1, state_1) = pool.run(2, masks, options)
    assert not torch.equal(heads, heads_1)  # each has other heads
    assert torch.equal(stream, stream_1) is not sequence_parallel  # the same stream, or other positions of it
    assert torch.equal(loss, loss_1) and torch.equal(state, state_1)


@pytest.mark.parametrize(
    ("world_size", "config", "options", "words"),
    [
        (2, CONFIG, dict(strategy="pp", schedule="DualPipeV", micro_batch=4), ("2 micro-batches", "4 or")),
        (4, CONFIG, dict(strategy="fsdp", pipeline=2, schedule="ZBVZeroBubble"), ("grad_op", "1F1B")),
        (
            2,
            CONFIG,
            dict(strategy="pp", schedule="ZBVZeroBubble", activation_checkpointing="selective"),
            ("selective", "activation_checkpointing=block"),
        ),
        (4, replace(CONFIG, vocab_size=5), dict(strategy="tp"), ("vocab_size=5", "4 tensor ranks")),
    ],
)
def test_what_torch_cannot_do_is_refused_in_a_sentence(world_size, config, options, words):
    with pytest.raises(LayoutError) as error:
        resolve_layout(options_of(**options), config, world_size)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


@pytest.mark.parametrize(("n_layer", "stages"), [(4, 4), (7, 4), (12, 8), (5, 2), (3, 1)])
def test_stages_cover_all_layers_in_order_and_evenly(n_layer, stages):
    parts = layers_of_stages(n_layer, stages)
    assert [layer for part in parts for layer in part] == list(range(n_layer))
    assert max(map(len, parts)) - len(parts[-1]) <= 1 and len(parts[-1]) == min(map(len, parts))
