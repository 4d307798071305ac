"""A mixture of experts: its routing by hand, its balance, and the trainer's runs, which are one process's."""

import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from manyhands.config.layout import LayoutError, resolve_layout
from manyhands.config.options import model_config, read_options
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.experts import Experts, move_biases
from manyhands.gpt.model import GPT
from manyhands.measure.tensor_bytes import local_part
from manyhands.parallel.experts import spread_weights
from manyhands.parallel.optimizer import build_optimizer
from manyhands.predict.memory import bytes_per_rank
from manyhands.predict.simulated_rank import in_own_process
from one_process import CONFIG, assert_equal, batches, build, one_process, options_of, share, steps_of

MIXTURE = replace(CONFIG, n_layer=2, experts=6, top_k=2)
SIGMOID = replace(MIXTURE, router="sigmoid", shared_experts=1)
SWITCH = replace(MIXTURE, top_k=1)
EIGHT = replace(SIGMOID, experts=8, top_k=3)
MIXTRAL = replace(MIXTURE, experts=8, style="llama", n_kv_head=2, n_hidden=20)


def more_of(*cases):
    """Cases that `make test-full` adds."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.full) for case in cases]


def options_with(speed=0.05, loss=0.01, **parallel):
    """Those of a run whose biases and balancing loss show within two steps."""
    options = options_of(**parallel)
    return replace(options, optimizer=replace(options.optimizer, balance_speed=speed, balance_loss=loss))


def layer_of(router="softmax", experts=5, top_k=2, width=8):
    torch.manual_seed(3)
    layer = Experts(width, experts, top_k, router).double()
    layer.init_weights(0.5, 0.5)
    return layer


def dense(layer, x_ND):
    """Every expert on every token; what is not chosen has weight 0."""
    logits_NE = x_ND @ layer.router.T
    scores_NE = logits_NE.sigmoid() if layer.sigmoid else logits_NE.softmax(-1)
    chosen_Nk = (scores_NE + layer.bias).topk(layer.top_k).indices
    gates_NE = torch.zeros_like(scores_NE).scatter(1, chosen_Nk, scores_NE.gather(1, chosen_Nk))
    if layer.top_k > 1:
        gates_NE = gates_NE / gates_NE.sum(-1, keepdim=True)
    up_EMD, down_EMD = (w.unflatten(0, (len(layer.router), -1)) for w in (layer.up, layer.down))
    return (gates_NE.T[..., None] * (F.gelu(x_ND @ up_EMD.mT) @ down_EMD)).sum(0)


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_the_sorted_rows_give_what_every_expert_on_every_token_gives(router, top_k):
    layer, draw = layer_of(router, top_k=top_k), torch.Generator().manual_seed(4)
    layer.bias += torch.randn(5, generator=draw, dtype=torch.float64)
    x_BTD = torch.randn(3, 7, 8, generator=draw, dtype=torch.float64)
    d_out = torch.randn(3, 7, 8, generator=draw, dtype=torch.float64)
    found = []
    for way in (layer, lambda x_BTD: dense(layer, x_BTD.flatten(0, 1)).view_as(x_BTD)):
        inputs = x_BTD.clone().requires_grad_()
        y_BTD = way(inputs)
        found.append([y_BTD, *torch.autograd.grad(y_BTD, [inputs, *layer.parameters()], d_out)])
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-12)


def test_the_bias_chooses_and_does_not_weigh():
    layer = layer_of(top_k=5)
    x_BTD = torch.randn(1, 9, 8, dtype=torch.float64)
    before = layer(x_BTD)
    layer.bias[2] += 10
    torch.testing.assert_close(layer(x_BTD), before)  # all are chosen whatever the bias is
    layer.top_k = 1
    assert (layer.route(x_BTD)[1] == 2).all()


def test_biases_move_towards_even_choices_and_the_busiest_is_told():
    layers = [layer_of(experts=4), layer_of(experts=4)]
    chosen_NE = torch.tensor([[6, 4, 2, 4], [4, 4, 4, 4]])
    assert move_biases(layers, chosen_NE, 0.25).item() == 1.5
    assert layers[0].bias.tolist() == [-0.25, 0, 0.25, 0] and layers[1].bias.tolist() == [0] * 4


def train(speed, loss, steps=300):
    """The busiest expert over the mean in the last 10 of `steps` steps of a router that prefers two experts."""
    torch.manual_seed(0)
    model = GPT(replace(MIXTURE, n_layer=1, experts=8))
    layer = model.blocks[0].mlp
    layer.run = lambda rows_RD, sizes_E, up, down: rows_RD * 0  # the router alone
    draw = torch.Generator().manual_seed(1)
    favourite_D = torch.randn(32, generator=draw)
    with torch.no_grad():
        layer.router[:2] += 0.1 * favourite_D
        model.blocks[0].norm_2.bias += favourite_D / favourite_D.norm()
    model.balance_loss, last = loss, []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        ids = torch.randint(65, (16, 17), generator=draw)
        model(ids[:, :-1], ids[:, 1:])[1].backward()
        optimizer.step()
        optimizer.zero_grad()
        busiest = move_biases([layer], layer.chosen[None], speed).item()
        if step >= steps - 10:
            last.append(busiest)
    return sum(last) / len(last)


def test_biases_end_within_1_3_of_the_mean_where_nothing_else_balances():
    assert train(speed=0.0, loss=0.0, steps=50) > 2
    assert train(speed=0.001, loss=0.0) < 1.3


# --- a trainer's steps


@pytest.fixture(scope="module")
def references():
    return {config: one_process(options_with(), config) for config in (MIXTURE, SIGMOID, SWITCH, EIGHT, DEEP, MIXTRAL)}


CASES = {
    "one rank": (1, MIXTURE, dict(strategy="ddp", micro_batch=2)),
    "ddp": (2, MIXTURE, dict(strategy="ddp")),
    "ddp by buckets": (4, SIGMOID, dict(strategy="ddp", all_reduce="buckets", micro_batch=1)),
    "zero1": (2, SWITCH, dict(strategy="zero1")),
    "fsdp": (4, MIXTURE, dict(strategy="fsdp", micro_batch=1)),
    "fsdp recomputing": (2, SIGMOID, dict(strategy="fsdp", activation_checkpointing="block", wrapping="size:3000")),
    "hybrid": (4, SWITCH, dict(strategy="fsdp", sharding="hybrid")),
    "ddp, experts over 2": (2, MIXTURE, dict(strategy="ddp", expert=2, micro_batch=2)),
    "ddp, experts over 2 of 4": (4, SIGMOID, dict(strategy="ddp", expert=2)),
    "ddp by buckets, experts over 2 of 4": (4, SWITCH, dict(strategy="ddp", expert=2, all_reduce="buckets")),
    "fsdp, experts over 2": (2, SIGMOID, dict(strategy="fsdp", expert=2, activation_checkpointing="block")),
    "fsdp, experts over 2 of 4": (4, MIXTURE, dict(strategy="fsdp", expert=2, micro_batch=1, wrapping="size:3000")),
    "pipeline": (2, SIGMOID, dict(strategy="pp", micro_batch=2)),
    "pipeline recomputing": (2, MIXTURE, dict(strategy="pp", schedule="GPipe", activation_checkpointing="block")),
    "pipeline of replicas": (4, SWITCH, dict(strategy="ddp", pipeline=2, micro_batch=1)),
    "pipeline of shards": (4, MIXTURE, dict(strategy="fsdp", pipeline=2, micro_batch=2)),
    "pipeline, experts over 2": (4, SIGMOID, dict(strategy="pp", replicate=2, expert=2, micro_batch=1)),
    "pipeline of shards, experts over 2": (4, MIXTURE, dict(strategy="fsdp", pipeline=2, expert=2, micro_batch=2)),
    "tensor": (2, MIXTURE, dict(strategy="tp", micro_batch=2)),
    "tensor, one shared, recomputing": (2, SIGMOID, dict(strategy="tp", activation_checkpointing="block")),
    "tensor, positions split": (2, SIGMOID, dict(strategy="tp", sequence_parallel=True)),
    "tensor of shards": (4, SWITCH, dict(strategy="fsdp", tensor=2, micro_batch=2)),
    "tensor of replicas": (4, SIGMOID, dict(strategy="ddp", tensor=2, sequence_parallel=True)),
    "tensor of shards, experts over 2": (4, EIGHT, dict(strategy="fsdp", tensor=2, expert=2, micro_batch=1)),
    "tensor of replicas, experts over 2": (4, EIGHT, dict(strategy="ddp", tensor=2, expert=2, sequence_parallel=True)),
    "tensor in a pipeline": (4, SIGMOID, dict(strategy="pp", tensor=2, micro_batch=2, sequence_parallel=True)),
    "a llama's by fsdp, over 2": (2, MIXTRAL, dict(strategy="fsdp", expert=2, activation_checkpointing="block")),
    "a llama's on tensor ranks": (2, MIXTRAL, dict(strategy="tp", micro_batch=2)),
    "a llama's by buckets": (2, MIXTRAL, dict(strategy="ddp", all_reduce="buckets", micro_batch=2)),
    "a llama's in a pipeline, over 2": (4, MIXTRAL, dict(strategy="pp", replicate=2, expert=2, micro_batch=1)),
    "a llama's on tensor ranks, over 2": (4, MIXTRAL, dict(strategy="fsdp", tensor=2, expert=2, micro_batch=1)),
}
DEEP = replace(MIXTURE, n_layer=4)
SCHEDULED = {
    f"{schedule} {name}": (n, DEEP, dict(pipeline=2, micro_batch=1, schedule=schedule, **parallel))
    for schedule in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    for name, n, parallel in (("alone", 2, {}), ("experts over 2", 4, {"expert": 2}))
}
CASES |= SCHEDULED
SHORT = {"ddp", "zero1", "ddp, experts over 2 of 4", "fsdp, experts over 2", "pipeline", "tensor"}
SHORT |= {"a llama's by fsdp, over 2", "a llama's on tensor ranks"}


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in SHORT else pytest.mark.full) for c in CASES])
def test_data_ranks_take_the_steps_of_one_process(pool, references, case):
    n, config, parallel = CASES[case]
    assert_equal(pool.run(n, steps_of, options_with(**parallel), config), references[config])


@pytest.mark.parametrize(
    ("config", "parallel"),
    [
        (MIXTURE, dict(context=2, expert=2)),
        *more_of(
            (MIXTURE, dict(context=2)), (MIXTURE, dict(strategy="fsdp", context=2, tensor=2)),
            (MIXTURE, dict(strategy="fsdp", tensor=2, loss_parallel=True)),
            (MIXTRAL, dict(context=2, expert=2)), (MIXTRAL, dict(strategy="fsdp", context=2, expert=4)),
            (MIXTRAL, dict(strategy="fsdp", context=2, tensor=2, expert=2)),
        ),
    ],
)  # fmt: skip
def test_parts_of_sequences_and_of_the_loss_take_the_steps_of_one_process_without_the_balancing_loss(
    pool, config, parallel
):
    wanted = one_process(options_with(loss=0.0), config)
    assert_equal(pool.run(4, steps_of, options_with(loss=0.0, **parallel), config), wanted)


def warnings_of(ranks, options, config):
    """What a user reads who builds the model."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        build(ranks, options, config)
    return [str(warning.message) for warning in found]


@pytest.mark.parametrize("config", [MIXTURE, SIGMOID], ids=["no shared expert", "a shared expert"])
def test_experts_are_shared_out_over_tensor_ranks_without_a_warning(pool, config):
    assert pool.run(2, warnings_of, options_with(loss=0.0, strategy="tp"), config) == [[]] * 2


def gradients_without_expert_0(ranks, options):
    """This rank's gradients of expert 0, which the bias lets nobody choose, and the largest of the others."""
    parallel = build(ranks, options, MIXTURE)
    for layer in parallel.experts().values():
        layer.bias[0] = -100
    parallel.forward_backward(*share(parallel, *next(batches(MIXTURE))))
    up_EMD = parallel.named_full_gradients()["blocks.0.mlp.up"].unflatten(0, (6, -1))
    return up_EMD[0].abs().max().item(), up_EMD[1:].abs().amax((1, 2)).min().item()


@pytest.mark.parametrize("parallel", [dict(all_reduce="buckets"), dict(strategy="fsdp")], ids=["ddp", "fsdp"])
def test_an_expert_without_tokens_has_gradients_of_zero(pool, parallel):
    for nobody, somebody in pool.run(2, gradients_without_expert_0, options_of(**parallel)):
        assert nobody == 0 and somebody > 0


def held_by(ranks, options, config):
    """Bytes of this rank's weights, gradients and moments after a step; and what the formula says."""
    parallel, layout = build(ranks, options, config), resolve_layout(options, config, ranks.world_size)
    optimizer = build_optimizer(parallel, options)
    parallel.forward_backward(*share(parallel, *next(batches(config))))
    weights = parallel.named_parameters().values()
    gradients = sum(local_part(weight.grad).nbytes for weight in weights)
    optimizer.step()
    moments = [value for name, value in parallel.optimizer_state(optimizer).items() if not name.endswith(".step")]
    formula = bytes_per_rank(config, layout, options)
    held = sum(local_part(weight).nbytes for weight in weights), gradients, sum(local_part(m).nbytes for m in moments)
    return held, (formula.parameters, formula.gradients, formula.optimizer)


@pytest.mark.parametrize(
    ("n", "parallel"),
    [
        (1, {}), (2, dict(expert=2)), (4, dict(strategy="fsdp", expert=2)),
        *more_of((4, dict(expert=2)), (4, dict(strategy="fsdp")), (2, dict(strategy="fsdp", expert=2))),
    ],
)  # fmt: skip
def test_a_rank_holds_what_the_formula_of_the_dry_run_says(pool, n, parallel):
    config = replace(SIGMOID, vocab_size=64, experts=8)  # nothing is padded
    for held, formula in pool.run(n, held_by, options_of("fp32", **parallel), config):
        assert held == formula


# --- what is refused


@pytest.mark.parametrize(
    "sizes, words",
    [
        (dict(experts=4, top_k=5), "top_k=5 of 4 experts is not possible; use 1 to 4"),
        (dict(shared_experts=1), "shared_experts=1 need other experts; use experts=2 or more"),
        (dict(experts=0), "experts=0 is too small; use at least 1"),
        (dict(experts=2, router="top"), "router='top' is unknown; use softmax or sigmoid"),
    ],
)
def test_sizes_that_make_no_mixture_are_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        GPTConfig(65, **sizes)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--parallel.expert 3", "model.experts=4 does not split over parallel.expert=3 ranks; use a multiple of 3"),
        ("--parallel.strategy deepspeed", "does not run under deepspeed; use parallel.strategy=ddp or fsdp"),
        ("--train.compile", "does not go with train.compile; use --train.no-compile"),
        ("--parallel.tensor 2 --parallel.loss-parallel", "leave it out, or use optimizer.balance_loss=0"),
        ("--parallel.context 2", "use optimizer.balance_loss=0, and leave balancing to the biases"),
    ],
)
def test_what_experts_do_not_go_together_with_is_refused_with_the_cure(flags, words):
    options = read_options(["--model.experts", "4", *flags.split()])
    with pytest.raises(LayoutError, match=words):
        resolve_layout(options, model_config(options, 65), 2)


@pytest.mark.full
@pytest.mark.parametrize(
    "more",
    [
        "fsdp --parallel.context 2 --optimizer.balance-loss 0", "ddp", "fsdp --parallel.tensor 4 --model.vocab-size 68",
        "ddp --parallel.pipeline 2 --parallel.tensor 4 --model.vocab-size 68",
    ],
)  # fmt: skip
def test_a_rank_of_1024_holds_what_the_formula_says(more):
    """As torch builds it on the fake backend: 64 experts over 8 neighbours, and context ranks beside them."""
    flags = "--model.experts 64 --model.n-embd 64 --train.global-batch 2048 --parallel.expert 8 --parallel.strategy"
    (found,) = in_own_process([1024], f"{flags} {more}".split())
    assert found["held"] == pytest.approx({kind: found["planned"][kind] for kind in found["held"]}, rel=0.02)


@pytest.mark.parametrize("experts", [1, 2])
def test_the_search_for_spread_experts_which_each_step_makes_walks_the_model_once(experts, monkeypatch):
    model, walked, walk = GPT(replace(CONFIG, n_layer=8, experts=experts)), [], torch.nn.Module.named_modules

    def counted(module, *args, **kwargs):
        walked.append(module)
        return walk(module, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "named_modules", counted)
    assert spread_weights(model) == {}
    assert len(walked) == len(set(walked)), "with its square, 32 layers took 0.2 s a step"
