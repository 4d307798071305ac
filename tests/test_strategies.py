"""Every strategy gives the losses, gradients and gradient norms of one process."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from manyhands.checks.zero_fsdp import Peak
from manyhands.gpt.model import GPT
from manyhands.parallel import mesh_strategy
from manyhands.parallel.strategy import full_model
from one_process import (
    CONFIG,
    EXACT,
    LLAMA,
    MAX_NORM,
    OLMO,
    TIED,
    assert_equal,
    batches,
    build,
    one_process,
    options_of,
    share,
    steps_of,
)


@pytest.fixture(scope="module")
def references():
    return {config: one_process(options_of(), config) for config in (CONFIG, TIED, LLAMA, OLMO)}


SHARDINGS = ("full", "grad_op", "hybrid", "none")
WRAPPINGS = ("block", "block_and_size", "block_group:3", "size:3000")
CASES = {
    **{
        f"ddp {all_reduce}{accumulating}": dict(strategy="ddp", all_reduce=all_reduce, micro_batch=micro_batch)
        for all_reduce in ("buckets", "flat")
        for accumulating, micro_batch in (("", None), (" accumulating", 1))
    },
    "zero1": dict(strategy="zero1"),
    # what `sharding` sets holds for each unit, and what `wrapping` makes units of does not depend on it
    **{f"fsdp full {wrapping}": dict(strategy="fsdp", wrapping=wrapping) for wrapping in WRAPPINGS},
    "fsdp grad_op size:3000": dict(strategy="fsdp", sharding="grad_op", wrapping="size:3000"),
    "fsdp hybrid block_group:3": dict(strategy="fsdp", sharding="hybrid", wrapping="block_group:3"),
    "fsdp none block_and_size": dict(strategy="fsdp", sharding="none", wrapping="block_and_size"),
    **{
        f"fsdp {sharding} accumulating": dict(strategy="fsdp", sharding=sharding, micro_batch=1)
        for sharding in SHARDINGS
    },
    "fsdp offloaded": dict(strategy="fsdp", offload=True),
    "fsdp x tensor": dict(strategy="fsdp", tensor=2),
    "ddp x tensor accumulating": dict(strategy="ddp", tensor=2, micro_batch=2),
    **{
        f"{strategy} checkpointing {kind}": dict(strategy=strategy, activation_checkpointing=kind)
        for strategy in ("ddp", "fsdp")
        for kind in ("block", "selective")
    },
}


# what another case here, or a product of `test_tensor_and_pipeline`, shows as well: `make test-full` has it
MORE = (
    "fsdp full block", "fsdp grad_op size:3000",
    "ddp flat", "fsdp full block_and_size", "fsdp full block_group:3", "fsdp full size:3000",
    "fsdp none block_and_size", "fsdp grad_op accumulating", "fsdp hybrid accumulating", "fsdp none accumulating",
    "fsdp x tensor", "ddp x tensor accumulating", "ddp checkpointing block", "ddp checkpointing selective",
    "fsdp checkpointing block",
)  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.full] * (case in MORE)) for case in CASES])
def test_four_ranks_take_the_steps_of_one_process(pool, references, case):
    assert_equal(pool.run(4, steps_of, options_of(**CASES[case])), references[CONFIG])


@pytest.mark.parametrize(
    "strategy", ["fsdp", *(pytest.param(name, marks=pytest.mark.full) for name in ("ddp", "zero1"))]
)
def test_a_world_of_one_takes_the_same_path(pool, references, strategy):
    assert_equal(pool.run(1, steps_of, options_of(strategy=strategy, micro_batch=2)), references[CONFIG])


@pytest.mark.parametrize(
    "case",
    ["block"]
    + [
        pytest.param(case, marks=pytest.mark.full)
        for case in ("flat", "buckets", "size:3000", "block_and_size", "block_group:3")
    ],
)
def test_tied_weights_stay_one_weight(pool, references, case):
    parallel = (
        dict(strategy="ddp", all_reduce=case) if case in ("buckets", "flat") else dict(strategy="fsdp", wrapping=case)
    )
    assert_equal(pool.run(4, steps_of, options_of(**parallel), TIED), references[TIED])


# --- a llama

OF_A_LLAMA = [
    dict(strategy="ddp", all_reduce="flat", micro_batch=1), dict(strategy="ddp", all_reduce="buckets"),
    dict(strategy="zero1"), dict(strategy="fsdp", wrapping="size:3000"),
    dict(strategy="fsdp", sharding="grad_op", activation_checkpointing="block"),
    dict(strategy="fsdp", sharding="hybrid", micro_batch=1, wrapping="block_and_size"),
    dict(strategy="fsdp", sharding="none", activation_checkpointing="selective"), dict(strategy="fsdp", offload=True),
]  # fmt: skip


def steps_of_all(ranks, cases):
    return [steps_of(ranks, options_of(**parallel), config) for parallel, config in cases]


def test_a_llama_takes_the_steps_of_one_process_under_each_strategy(pool, references):
    cases = [(parallel, (LLAMA, OLMO)[i % 2]) for i, parallel in enumerate(OF_A_LLAMA)]
    cases += [(dict(strategy="fsdp"), LLAMA), (dict(strategy="fsdp"), OLMO)]
    results = pool.run(4, steps_of_all, cases, timeout_s=240)
    for i, (_, config) in enumerate(cases):
        assert_equal([own[i] for own in results], references[config])


# --- the start: under FSDP alone no rank ever has the whole model


def held_at_the_start(ranks, options, config):
    """Bytes that building takes at most, and those of this rank's rows, the whole model and its largest weight."""
    with Peak() as held:
        parallel = build(ranks, options, config)
    state = torch.get_rng_state()
    whole = dict(full_model(config, options).named_parameters())
    assert torch.equal(state, torch.get_rng_state()), "the run goes on with other random numbers"
    rows = {name: weight.to_local() for name, weight in parallel.modules[0].named_parameters()}
    for name, own in rows.items():
        expected = [*whole[name].chunk(ranks.world_size), *[whole[name][:0]] * 3][ranks.rank]
        assert own.dtype == expected.dtype and torch.equal(own, expected), name
    sizes = [weight.nbytes for weight in whole.values()]
    return held.peak, sum(own.nbytes for own in rows.values()), sum(sizes), max(sizes)


@pytest.mark.parametrize("config", [replace(LLAMA, tie=False), OLMO], ids=["llama", "olmo"])
def test_fsdp_draws_a_llamas_weights_in_shares_as_one_process(pool, config):
    config = replace(config, n_layer=6, n_embd=40, vocab_size=66)
    for peak, rows, whole, largest in pool.run(4, held_at_the_start, options_of(strategy="fsdp"), config):
        assert rows < 0.3 * whole and peak < rows + 3 * largest < whole


@pytest.mark.parametrize(
    "how",
    [{}]
    + [
        pytest.param(how, marks=pytest.mark.full)
        for how in (dict(wrapping="block_and_size", precision="fp32"), dict(offload=True, precision="bf16"))
    ],
    ids=str,
)
def test_fsdp_draws_the_weights_of_one_process_and_a_rank_holds_its_rows_and_one_weight(pool, how):
    config = replace(CONFIG, n_layer=6, n_embd=36, vocab_size=66, experts=5, top_k=2)  # ranks with fewer rows, or none
    for peak, rows, whole, largest in pool.run(4, held_at_the_start, options_of(strategy="fsdp", **how), config):
        assert rows < 0.3 * whole and peak < rows + 3 * largest < whole


# --- the vocabulary, padded as on a GPU


def padded_steps(ranks, options, config):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh_strategy, "pads_vocabulary", lambda device, low: True)
        rows = []
        patch.setattr(F, "linear", noting(rows, F.linear))
        found = steps_of(ranks, options, config)
    return found, max(rows)


def noting(rows, linear):
    def called(x, weight, bias=None):
        rows.append(weight.shape[0])
        return linear(x, weight, bias)

    return called


@pytest.mark.parametrize(
    ("parallel", "config"),
    [
        (dict(strategy="ddp"), TIED), (dict(strategy="fsdp", wrapping="block_and_size"), CONFIG),
        (dict(strategy="pp"), CONFIG),
    ],
    ids=["ddp tied", "fsdp", "pp"],
)  # fmt: skip
def test_a_head_with_rows_of_zeros_changes_no_loss_and_no_gradient(pool, references, parallel, config):
    results = pool.run(2, padded_steps, options_of(**parallel), config)
    assert_equal([found for found, _ in results], references[config])
    assert max(rows for _, rows in results) == 128, "65 tokens, and zeros up to a multiple of 64"


# --- precision


def low_precision_step(ranks, options, loss_scale):
    parallel = build(ranks, options)
    parallel.loss_scale = loss_scale
    inside = set()
    for block in parallel.modules[0].blocks:
        block.mlp.up.register_forward_hook(lambda module, args, out: inside.add(out.dtype))
    loss = parallel.forward_backward(*share(parallel, *next(batches())))
    scaled = parallel.named_full_gradients()
    norm = parallel.clip(0.0)
    held = {p.dtype for p in parallel.named_parameters().values()}
    held |= {p.grad.dtype for p in parallel.named_parameters().values()}
    logits = parallel.logits(torch.zeros(1, 3, dtype=torch.long))
    gradients = parallel.named_full_gradients()
    parallel.loss_scale = 4.0  # as if there were one in what is left
    quarter = parallel.clip(MAX_NORM)
    parallel.loss_scale = 1.0
    norms = norm, quarter, parallel.clip(0.0)
    return inside, held, parallel.mean_loss(loss), norms, scaled, gradients, logits.dtype


LOW = {"bf16": (torch.bfloat16, 1.0, 1e-2), "fp16": (torch.float16, 2.0**16, 1e-3)}


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [("ddp", "fp16"), ("fsdp", "bf16")]
    + [pytest.param(*pair, marks=pytest.mark.full) for pair in (("ddp", "bf16"), ("fsdp", "fp16"))],
)
def test_low_precision_is_the_one_asked_for_and_weights_stay_float32(pool, references, strategy, precision):
    dtype, loss_scale, budget = LOW[precision]
    options = options_of(precision, strategy=strategy)
    expected = references[CONFIG]["steps"][0]
    for result in pool.run(2, low_precision_step, options, loss_scale):
        inside, held, loss, (norm, quarter, clipped), scaled, gradients, logits_dtype = result
        assert inside == {dtype}
        assert held == {torch.float32}
        assert loss.dtype == logits_dtype == torch.float32
        assert loss.item() == pytest.approx(expected["loss"].item(), abs=budget)
        assert norm.item() == pytest.approx(expected["norm"].item(), rel=budget)
        assert quarter.item() == pytest.approx(norm.item() / 4)
        assert clipped.item() == pytest.approx(MAX_NORM, rel=1e-4)
        for name, gradient in gradients.items():
            torch.testing.assert_close(scaled[name], gradient * loss_scale)


# --- clipping


def norm_with_infinity(ranks, options):
    parallel = build(ranks, options)
    parallel.forward_backward(*share(parallel, *next(batches())))
    before = parallel.named_full_gradients()
    unclipped = parallel.clip(0.0)
    untouched = parallel.named_full_gradients()
    first = next(iter(parallel.named_parameters().values())).grad
    if ranks.rank == 0:
        getattr(first, "_local_tensor", first)[0] = torch.inf
    return unclipped, parallel.clip(MAX_NORM), before, untouched, parallel.named_full_gradients()


def test_a_norm_that_is_not_finite_is_seen_by_all_ranks_and_scales_nothing(pool, references):
    for unclipped, norm, before, untouched, after in pool.run(2, norm_with_infinity, options_of(strategy="fsdp")):
        assert unclipped.item() == pytest.approx(references[CONFIG]["steps"][0]["norm"].item())
        assert norm == torch.inf
        for name, gradient in before.items():
            assert torch.equal(untouched[name], gradient)
            if name != "tokens.weight":
                assert torch.equal(after[name], gradient)


# --- looking at the model in between


def look(parallel):
    """Evaluate and sample, beyond the block's 16 positions, with modules in mixed modes; nothing of it may stay."""
    from manyhands.gpt.sampling import generate

    ids, targets = next(batches())
    frozen = next(parallel.modules[0].blocks.children())
    frozen.eval()
    modes = [part.training for module in parallel.modules for part in module.modules()]
    state = torch.get_rng_state()
    loss = parallel.mean_loss(parallel.evaluate(*share(parallel, ids, targets)))
    assert shards_lie_there_again(parallel)
    logits = parallel.logits(ids[:3, :7])
    assert shards_lie_there_again(parallel)
    sampled = generate(parallel, ids[:1, :14], 4, generator=torch.Generator().manual_seed(3))
    likeliest = generate(parallel, ids[:2, :3], 2, temperature=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert [part.training for module in parallel.modules for part in module.modules()] == modes
    frozen.train()
    assert shards_lie_there_again(parallel)
    return loss, logits, sampled, likeliest


def shards_lie_there_again(parallel):
    """Whether the model's parameters are those of the optimizer, and not what FSDP gathered."""
    own = parallel.named_parameters()
    return all(p is own[name] for module in parallel.modules for name, p in module.named_parameters())


def look_and_train(ranks, options, config, looks):
    torch.manual_seed(0)
    seen = []
    between = (lambda parallel: seen.append(look(parallel))) if looks else None
    return steps_of(ranks, options, config, between, looks=False), seen


@pytest.mark.parametrize(
    "case",
    [
        dict(strategy="ddp"),
        *(
            pytest.param(
                dict(strategy="fsdp", sharding=sharding, wrapping="block_group:3"),
                marks=() if sharding == "full" else pytest.mark.full,
            )
            for sharding in SHARDINGS
        ),
    ],
    ids=str,
)
def test_evaluation_and_samples_are_one_processs_and_leave_no_trace(pool, case):
    assert_samples_are_one_processs(pool, case, replace(CONFIG, dropout=0.3))


@pytest.mark.parametrize(
    "case", [dict(strategy="fsdp"), dict(strategy="tp", sequence_parallel=True), dict(strategy="pp")]
)
def test_evaluation_and_samples_of_a_llama_are_one_processs_beyond_the_trained_length_too(pool, case):
    longer = replace(LLAMA, dropout=0.3 if case["strategy"] == "fsdp" else 0.0, max_positions=LLAMA.block_size + 2)
    longer = replace(longer, tie=case["strategy"] != "pp")
    assert longer.context == 18, "as long as what is sampled"
    assert_samples_are_one_processs(pool, case, longer)


def assert_samples_are_one_processs(pool, case, config):
    n_ranks = 4 if case.get("sharding") == "hybrid" else 2
    looked = pool.run(n_ranks, look_and_train, options_of(**case), config, True)
    blind = pool.run(n_ranks, look_and_train, options_of(**case), config, False)
    for (result, _), (other, _) in zip(looked, blind, strict=True):
        assert all(torch.equal(result["weights"][name], weight) for name, weight in other["weights"].items())
    result, seen = looked[0]
    model = GPT(config).double()
    model.load_state_dict(result["weights"], strict=not config.tie)
    model.eval()
    ids, targets = next(batches())
    expected_logits, expected_loss = model(ids, targets)
    loss, logits, sampled, likeliest = seen[-1]
    assert loss.item() == pytest.approx(expected_loss.item(), abs=EXACT)
    torch.testing.assert_close(logits, expected_logits[:3, :7], rtol=0, atol=EXACT)
    generator = torch.Generator().manual_seed(3)
    assert torch.equal(sampled, model.generate(ids[:1, :14], 4, generator=generator))
    assert torch.equal(likeliest, model.generate(ids[:2, :3], 2, temperature=0))
    assert all(torch.equal(sampled, other[1][-1][2]) for other in looked)


# --- compilation


def more_of(*cases):
    """Cases that `make test-full` adds."""
    return [pytest.param(*case, marks=pytest.mark.full) for case in cases]


def compiled_steps(ranks, options, config, backend):
    import torch._dynamo

    right = torch.compile
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.compile = lambda function, **settings: right(function, backend=backend, **settings)
    try:
        return steps_of(ranks, options, config, looks=False), torch._dynamo.utils.counters["stats"]["unique_graphs"]
    finally:
        torch.compile = right


@pytest.mark.parametrize(
    ("n", "config", "case"),
    [
        (1, replace(CONFIG, n_layer=10), dict(strategy="fsdp", activation_checkpointing="block", micro_batch=2)),
        *more_of(
            (1, CONFIG, dict(strategy="ddp", all_reduce="buckets")),
            (1, replace(LLAMA, n_layer=10), dict(strategy="fsdp", activation_checkpointing="selective", micro_batch=2)),
            (2, OLMO, dict(strategy="zero1")),
            (2, LLAMA, dict(strategy="tp")),
            (2, replace(LLAMA, n_kv_head=1), dict(strategy="tp", sequence_parallel=True)),
        ),
    ],
)  # fmt: skip
def test_one_graph_serves_all_blocks_and_another_the_loss(pool, n, config, case):
    """Of 10 layers: torch gives a function up that it compiled 8 times."""
    # the graphs are what is tested: turning them into machine code takes a minute
    found = pool.run(n, compiled_steps, options_of(compile=True, **case), config, "aot_eager")
    assert_equal([result for result, _ in found], one_process(options_of(), config))
    assert [num_graphs for _, num_graphs in found] == [2] * n


def pieces_of_wide_blocks(ranks, options, config):
    """How many pieces a compiler gets: DDP's optimizer cuts a block of more than its first bucket, 1 MiB."""
    from torch._dynamo.backends.registry import lookup_backend

    pieces = []

    def backend(graph, inputs):
        pieces.append(graph)
        return lookup_backend("eager")(graph, inputs)

    compiled_steps(ranks, options, config, backend)
    return len(pieces)


def test_ddp_cuts_no_compiled_block(pool):
    wide = replace(CONFIG, n_layer=2, n_embd=128)
    assert pool.run(2, pieces_of_wide_blocks, options_of(compile=True, strategy="zero1"), wide) == [2, 2]


@pytest.mark.full
@pytest.mark.parametrize("config", [CONFIG, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("strategy", ["ddp", "tp"])
def test_machine_code_computes_what_python_does(pool, config, strategy):
    config = replace(config, n_layer=2)
    options = options_of("fp32", compile=True, strategy=strategy)
    results = pool.run(2, compiled_steps, options, config, "inductor", timeout_s=240)
    assert_equal([result for result, _ in results], one_process(options_of("fp32"), config), budget=1e-5)
