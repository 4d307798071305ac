"""Bytes per rank by formula: against what real ranks hold under each strategy, and against known numbers."""

from dataclasses import replace

import pytest
import torch
from manyhands.config.layout import resolve_layout
from manyhands.config.options import model_config, read_options
from manyhands.gpt.model import GPT
from manyhands.measure.memory_timeline import MemoryTimeline
from manyhands.measure.tensor_bytes import Bytes, tensor_bytes
from manyhands.predict.memory import Share, bytes_per_rank, checkpoint_bytes, with_lora
from manyhands.predict.models import model_of

# odd numbers: nothing splits evenly but what must
SMALL = (
    "--model.n-layer 3 --model.n-head 2 --model.n-embd 14 --model.block-size 9 --model.vocab-size 65 "
    "--train.global-batch 4"
)


def read(flags, world_size):
    options = read_options(flags.split())
    config = model_config(options, 65)
    return config, resolve_layout(options, config, world_size), options


def held(flags, world_size):
    return bytes_per_rank(*read(flags, world_size))


# ------------------------------------------------------------------ what real ranks hold


def measure(ranks, flags, start=None):
    """{kind: bytes} that this rank holds after a step; copies and unsharded parameters are those of a step's peak."""
    from manyhands.data.corpus import get_batch
    from manyhands.parallel.optimizer import build_optimizer
    from manyhands.parallel.strategy import full_model, parallelize

    config, layout, options = read(flags, ranks.world_size)
    parallel = parallelize(config, layout, options, ranks, start or full_model)
    optimizer = build_optimizer(parallel, options)
    ids = torch.arange(500) % 65
    share = get_batch(ids, 0, 4, config.block_size, parallel.data_rank, parallel.data_size, 1)
    model = torch.nn.ModuleList(parallel.modules)
    parallel.forward_backward(*share)
    optimizer.step()
    held = tensor_bytes(model, optimizer)
    at_peak = {}
    if layout.pipeline == layout.tensor == 1:  # stages are gathered at times of their own, shares of shares not seen
        optimizer.zero_grad()
        with MemoryTimeline(model, optimizer) as seen:
            parallel.forward_backward(*share)
        at_peak = {kind: seen.highest(kind) for kind in ("copies", "unsharded_parameters")}
    own = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer's, inside
    steps = sum(4 for state in own.state.values() if "step" in state)
    at_rest = {"parameters": held.parameters, "gradients": held.gradients, "optimizer": held.optimizer - steps}
    return {**at_rest, **at_peak}


def measure_all(ranks, all_flags):
    return [measure(ranks, flags) for flags in all_flags]


ON_TWO = [
    f"{SMALL} {flags}"
    for flags in (
        "",
        "--optimizer.name sgd",
        "--train.precision fp64",
        "--train.precision bf16",
        "--parallel.all-reduce buckets",
        "--parallel.strategy zero1",
        "--parallel.strategy fsdp",
        "--parallel.strategy fsdp --parallel.wrapping block_and_size",
        "--parallel.strategy fsdp --parallel.wrapping block_group:2",
        "--parallel.strategy fsdp --parallel.wrapping size:250",  # units inside of units
        "--parallel.strategy fsdp --parallel.wrapping size:10000",  # the root alone
        "--parallel.strategy fsdp --parallel.sharding grad_op --train.precision bf16",
        "--parallel.strategy fsdp --parallel.sharding grad_op --train.micro-batch 1",
        "--parallel.strategy fsdp --parallel.sharding none",
        "--parallel.strategy fsdp --train.micro-batch 1 --train.precision bf16 --parallel.reduce-dtype bf16",
        "--parallel.strategy tp",
        "--parallel.strategy tp --parallel.sequence-parallel --model.block-size 10",
        "--parallel.strategy pp",
        "--parallel.strategy pp --parallel.schedule ZBVZeroBubble --model.n-layer 5",
        "--parallel.strategy fsdp --model.tie --model.qkv-bias",
        "--parallel.strategy pp --model.tie --model.vocab-size 500",  # the last stage is the fullest, by its copy
        "--parallel.strategy pp --model.tie --parallel.schedule ZBVZeroBubble --model.n-layer 5",
    )
]
LLAMA = f"{SMALL} --model.style llama --model.head-dim 6 --model.n-kv-head 1 --model.n-hidden 31"
LLAMA_ON_TWO = [
    f"{LLAMA} {flags}"
    for flags in (
        "",
        "--train.precision bf16",
        "--parallel.strategy zero1 --model.tie",
        "--parallel.strategy fsdp --parallel.wrapping block_and_size",
        "--parallel.strategy fsdp --parallel.wrapping size:250 --model.norm layer",
        "--parallel.strategy fsdp --parallel.sharding grad_op --train.precision bf16",
        "--parallel.strategy fsdp --model.tie --train.micro-batch 1",
        "--parallel.strategy tp --model.n-hidden 30 --model.tie",  # two ranks hold the one head of keys
        "--parallel.strategy tp --model.n-hidden 30 --model.n-kv-head 2 --model.norm layer",
        "--parallel.strategy pp --parallel.schedule ZBVZeroBubble --model.n-layer 5",
        "--parallel.strategy fsdp --model.experts 4",
        "--parallel.strategy fsdp --model.experts 4 --parallel.expert 2",
        "--parallel.strategy tp --model.experts 4 --model.n-hidden 30",
    )
]
ON_FOUR = [
    f"{SMALL} {flags}"
    for flags in (
        "--parallel.strategy zero1",
        "--parallel.strategy fsdp",
        "--parallel.strategy fsdp --parallel.sharding hybrid",
        "--parallel.strategy fsdp --parallel.tensor 2",
        "--parallel.strategy fsdp --parallel.tensor 2 --model.style llama --model.n-kv-head 1 --model.head-dim 6",
        "--parallel.strategy fsdp --parallel.pipeline 2",
        "--parallel.pipeline 2",
        "--parallel.tensor 2 --parallel.pipeline 2",
        "--parallel.pipeline 2 --parallel.strategy fsdp --model.tie --parallel.wrapping block_and_size",
        "--parallel.pipeline 2 --parallel.strategy fsdp --model.tie --parallel.sharding grad_op "
        "--parallel.schedule ZBVZeroBubble --model.n-layer 5",
    )
]


@pytest.mark.parametrize(
    "world_size, all_flags",
    [
        (2, ON_TWO[::3]),
        (2, LLAMA_ON_TWO),
        (4, ON_FOUR[2:5] + ON_FOUR[-2:]),
        *(pytest.param(*case, marks=pytest.mark.full) for case in ((2, ON_TWO), (4, ON_FOUR))),
    ],
    ids=["2", "2, a llama", "4", "all on 2", "all on 4"],
)
def test_the_fullest_rank_holds_what_the_formula_says_to_the_byte(pool, world_size, all_flags):
    measured = pool.run(world_size, measure_all, all_flags, timeout_s=120)
    for i, flags in enumerate(all_flags):
        expected = held(flags, world_size)
        for kind in measured[0][i]:
            fullest = max(ranks[i][kind] for ranks in measured)
            assert getattr(expected, kind) == fullest, f"{kind} of {flags.removeprefix(SMALL)}"


def measure_lora(ranks, all_flags):
    from manyhands.align.options import LoraOptions
    from manyhands.align.stage import start_from

    def start(config, options):
        return start_from(GPT(replace(config, vocab_size=65 - NEW)), LoraOptions(rank=3))(config, options)

    return [measure(ranks, flags, start) for flags in all_flags]


NEW = 4  # tokens that the base model does not know, whose rows learn


def test_with_adapters_the_fullest_rank_holds_what_the_formula_says_to_the_byte(pool):
    all_flags = [f"{sizes} --parallel.strategy {name}" for sizes in (SMALL, LLAMA) for name in ("ddp", "zero1", "fsdp")]
    all_flags.append(f"{SMALL} --parallel.strategy fsdp --model.tie --model.qkv-bias")
    measured = pool.run(2, measure_lora, all_flags, timeout_s=120)
    for i, flags in enumerate(all_flags):
        expected = with_lora(held(flags, 2), *read(flags, 2), rank=3, rows=True)
        for kind in ("parameters", "gradients", "optimizer"):
            fullest = max(ranks[i][kind] for ranks in measured)
            assert getattr(expected, kind) == fullest, f"{kind} of {flags.removeprefix(SMALL)}"


# ------------------------------------------------------------------ known numbers


def test_adam_in_fp32_takes_sixteen_bytes_per_parameter():
    """ZeRO, section 3.1, counts 4 for the weights, 4 for the gradients and 8 for the moments."""
    for ranks in (1, 8):  # replicas save nothing
        found = held("--model.vocab-size 65", ranks)
        assert (found.parameters, found.gradients, found.optimizer) == (4 * 816_705, 4 * 816_705, 8 * 816_705)
        assert found.copies == found.unsharded_parameters == found.accumulated_gradients == 0


@pytest.mark.parametrize(
    "stage, per_rank", [(1, (4, 4, 8 / 64)), (2, (4, 4 / 64, 8 / 64)), (3, (4 / 64, 4 / 64, 8 / 64))]
)
def test_the_stages_of_zero_share_one_thing_more_each(stage, per_rank):
    bytes_ = held(
        f"--preset gpt-1b --parallel.strategy deepspeed --train.precision fp32 --parallel.zero-stage {stage}", 64
    )
    P = 941_346_148
    for kind, factor in zip(("parameters", "gradients", "optimizer"), per_rank, strict=True):
        assert getattr(bytes_, kind) == pytest.approx(factor * P, rel=1e-6)


def test_a_checkpoint_is_as_large_under_every_strategy():
    config, _, options = read("--model.vocab-size 65", 1)
    assert checkpoint_bytes(config, options) == 12 * 816_705


# ------------------------------------------------------------------ the model that is counted


@pytest.mark.parametrize(
    "variant",
    ["", "--model.tie", "--model.qkv-bias", "--model.tie --model.qkv-bias --model.n-layer 7"]
    + [f"--model.style llama {flags}" for flags in ("", "--model.norm layer", "--model.n-kv-head 2 --model.tie")]
    + ["--model.style llama --model.n-kv-head 1 --model.head-dim 20 --model.n-hidden 300"]
    + ["--model.style llama --model.n-kv-head 1 --model.experts 4 --model.n-hidden 30"],
)
def test_the_weights_that_are_counted_are_those_of_the_model_in_its_order(variant):
    config, _, _ = read(f"--model.vocab-size 65 {variant}", 1)
    with torch.device("meta"):
        shapes = [tuple(p.shape) for p in GPT(config).parameters()]
    model = model_of(config)
    assert [w.shape for w in Share(model, 1, 1, ((config.n_layer, True, True),)).weights] == shapes
    assert model.num_params() == config.num_params()


@pytest.mark.parametrize(
    "flags",
    [
        "--model.vocab-size 5000 --train.global-batch 16",
        "--model.vocab-size 5000 --train.global-batch 16 --train.precision bf16",
        "--model.vocab-size 65 --train.global-batch 16 --model.n-layer 8",
        "--preset llama-nano --model.vocab-size 5000 --train.global-batch 16",
        "--preset llama-nano --model.vocab-size 5000 --train.global-batch 16 --train.precision bf16",
        "--preset llama-nano --train.global-batch 16 --model.norm layer --model.clip-qkv 1 --model.n-layer 8",
    ],
)
def test_the_peak_of_a_step_is_what_is_counted_workspace_included(flags):
    """Between micro-batches, when gradients are there already."""
    config, _, options = read(flags, 1)
    torch.manual_seed(0)
    model, (ids, targets) = GPT(config), torch.randint(config.vocab_size, (2, 16, config.block_size))
    model.stream = torch.bfloat16 if options.train.precision == "bf16" else None
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def forward_backward():
        with torch.autocast("cpu", torch.bfloat16, enabled=options.train.precision == "bf16"):
            loss = model(ids, targets)[1]
        loss.backward()

    forward_backward()
    optimizer.step()
    with MemoryTimeline(model, optimizer) as seen:
        forward_backward()
    assert held(flags, 1).on_gpu == pytest.approx(seen.peak.total, rel=0.02)


# ------------------------------------------------------------------ the scale


def test_a_storage_is_weighed_once_and_as_a_whole():
    buffer = torch.zeros(100)
    model = torch.nn.ParameterList([buffer[:40].requires_grad_(), buffer[40:90].requires_grad_()])
    assert tensor_bytes(model) == Bytes(parameters=400), "ten numbers of padding are there too"
    model[0].grad, model[1].grad = (gradients := torch.zeros(90))[:40], gradients[40:]
    assert tensor_bytes(model) == Bytes(parameters=400, gradients=360)


def test_an_optimizer_is_found_inside_what_is_made_around_it_and_must_be_there():
    class Sharded:
        def __init__(self, parameters):
            self.own = torch.optim.AdamW(parameters)

    shares = [torch.zeros(10, requires_grad=True)]
    sharded, model = Sharded(shares), torch.nn.Linear(5, 5, bias=False)
    shares[0].grad = torch.ones(10)
    sharded.own.step()
    assert tensor_bytes(model, sharded) == Bytes(parameters=140, gradients=40, optimizer=84)
    with pytest.raises(ValueError, match="list holds no torch optimizer|Linear holds no torch optimizer"):
        tensor_bytes(model, model)


def weigh_between_forward_and_backward(ranks):
    """tensor_bytes under FSDP: before the forward, before the backward, after it. grad_op keeps all in between."""
    from manyhands.parallel.optimizer import build_optimizer
    from manyhands.parallel.strategy import parallelize

    config, layout, options = read("--model.vocab-size 66 --parallel.strategy fsdp --parallel.sharding grad_op", 2)
    parallel = parallelize(config, layout, options, ranks)
    optimizer = build_optimizer(parallel, options)
    found = [tensor_bytes(parallel.model, optimizer)]
    ids = torch.zeros(1, 64, dtype=torch.long)
    loss = parallel.model(ids, ids)[1]
    found.append(tensor_bytes(parallel.model, optimizer))
    loss.backward()
    return [*found, tensor_bytes(parallel.model, optimizer)]


def test_what_fsdp_has_gathered_is_weighed_apart_from_the_shards(pool):
    P = read("--model.vocab-size 66", 2)[0].num_params()
    for found in pool.run(2, weigh_between_forward_and_backward):
        assert found == [
            Bytes(parameters=2 * P),
            Bytes(parameters=2 * P, unsharded_parameters=4 * P),
            Bytes(parameters=2 * P, gradients=2 * P),
        ]
