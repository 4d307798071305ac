"""What makes a step faster changes nothing of it: a loss in chunks, a stream in 16 bits, and what is chosen unasked."""

import sys
from types import SimpleNamespace

import pytest
import torch
from manyhands.config.layout import resolve_layout
from manyhands.config.options import read_options
from manyhands.gpt.chunked_loss import chunked_loss, liger_loss
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT, Head
from manyhands.launch.ranks import Ranks
from manyhands.measure.memory_timeline import MemoryTimeline
from manyhands.train import start
from one_process import CONFIG, TIED, assert_equal, build, one_process, options_of, steps_of
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

AT_ONCE = 7 * CONFIG.vocab_size  # logits: a chunk has fewer rows than a sequence


def steps_in_chunks(ranks, options, config, multiple):
    from manyhands.parallel import mesh_strategy

    whole, mesh_strategy.logits_at_once = mesh_strategy.logits_at_once, lambda layout, options: AT_ONCE
    try:
        return steps_of(ranks, options, config, between=lambda parallel: None)
    finally:
        mesh_strategy.logits_at_once = whole


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("n", "options"),
    [(1, {}), (2, {}), (2, {"all_reduce": "buckets"}), (2, {"strategy": "fsdp"}), (2, {"context": 2})],
    ids=["one process", "flat", "buckets", "fsdp", "context"],
)
def test_a_loss_in_chunks_trains_like_one_process_with_all_logits(pool, n, options, config):
    options = options_of(**options)
    assert_equal(pool.run(n, steps_in_chunks, options, config, 1), one_process(options, config))


@pytest.mark.parametrize("rows", [1, 5, 12, 60])
@pytest.mark.parametrize("padding", [0, 14])
def test_a_loss_in_chunks_is_the_loss_and_so_are_its_gradients(rows, padding):
    """With rows of padding behind the vocabulary, which get no gradient; scaled, as fp16 and micro-batches do."""
    draw = torch.Generator().manual_seed(1)
    x, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, generator=draw, requires_grad=True)
        for shape in ((60, 8), (50 + padding, 8), (50 + padding,))
    )
    targets = torch.randint(50, (60,), generator=draw)
    wanted = cross_entropy((x @ weight.T + bias)[:, :50], targets)
    gradients = torch.autograd.grad(3 * wanted, (x, weight, bias))
    loss = chunked_loss(x, weight, bias, targets, 50, rows)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)
    for seen, expected in zip(torch.autograd.grad(3 * loss, (x, weight, bias)), gradients, strict=True):
        torch.testing.assert_close(seen, expected, rtol=1e-10, atol=1e-14)
    assert not gradients[1][50:].any()
    with torch.no_grad():
        assert chunked_loss(x, weight, bias, targets, 50, rows).item() == pytest.approx(wanted.item(), rel=1e-12)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("padding", [0, 14])
def test_ligers_loss_is_given_what_makes_it_ours(monkeypatch, padding, biased):
    """Its kernels need a GPU: here its function is what its documentation says, the mean loss of a linear layer."""
    given = []

    def stand_in(x, weight, targets, bias=None, accum_dtype=None):
        given.append((x.dtype, weight.dtype, bias if bias is None else bias.dtype, accum_dtype))
        return cross_entropy(torch.nn.functional.linear(x, weight, bias).double(), targets)

    module = SimpleNamespace(liger_fused_linear_cross_entropy=stand_in)
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", module)
    torch.manual_seed(1)
    head = Head(8, 50, bias=biased).double()
    head.multiple, head.at_once = 50 + padding, 7 * 50
    x, targets = torch.randn(3, 20, 8, dtype=torch.float64, requires_grad=True), torch.randint(50, (3, 20))
    found = []
    for head.fused in (None, liger_loss):
        loss = head(x, targets)
        found.append([loss, *torch.autograd.grad(2 * loss, (x, *head.parameters()))])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)
    with torch.autocast("cpu", torch.bfloat16):
        assert head(x.float(), targets).item() == pytest.approx(loss.item(), rel=1e-2)
    low = torch.bfloat16
    assert given[-1] == (low, low, low if biased or padding else None, torch.float32)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--train.loss-kernel liger", "train.loss_kernel=liger needs a GPU and the package liger-kernel on"),
        ("--train.flash FA3", "(No module named 'flash_attn_interface'); install its package, or leave it out"),
        ("--train.loss-kernel liger --parallel.strategy tp", "train.loss_kernel=liger needs the whole head on each"),
    ],
)
def test_kernels_that_are_not_there_are_refused_before_the_first_step(pool, flags, words):
    assert all(words in said for said in pool.run(2, refusal, read_options(flags.split())))


def refusal(ranks, options):
    try:
        resolve_layout(options, CONFIG, ranks.world_size)
        start.refuse_missing(options, ranks)
    except ValueError as error:
        return str(error)


def peak_of(at_once):
    torch.manual_seed(0)
    model, (ids, targets) = GPT(GPTConfig(4000, n_layer=1, n_embd=32)), torch.randint(4000, (2, 16, 64))
    model.head.at_once = at_once
    optimizer = torch.optim.SGD(model.parameters())
    with MemoryTimeline(model, optimizer) as seen:
        logits, loss = model(ids, targets)
        loss.backward()
    assert (logits is None) == (at_once is not None)
    return seen.peak.total


def test_a_loss_in_chunks_needs_a_fraction_of_the_memory():
    all_logits = 4 * 16 * 64 * 4000
    assert peak_of(None) - peak_of(64 * 4000) > 1.5 * all_logits


@pytest.mark.parametrize("flags", [{}, {"strategy": "fsdp"}, {"strategy": "pp"}, {"strategy": "tp"}], ids=str)
def test_in_bf16_the_stream_has_16_bits_and_the_loss_and_the_gradients_are_near(pool, flags):
    options = options_of("bf16", **flags)
    exact = one_process(options_of("fp32"))["steps"][0]
    for stream, steps in pool.run(2, stream_in_bf16, options):
        assert stream == {torch.bfloat16}
        assert abs(steps["loss"] - exact["loss"]) < 1e-2
        far = {n: ((steps[n] - exact[n]).norm() / exact[n].norm()).item() for n in exact if n.endswith("weight")}
        assert 1e-4 < max(far.values()) < 0.1


def stream_in_bf16(ranks, options):
    from one_process import batches, share

    parallel, seen = build(ranks, options), set()
    for module in parallel.modules:
        blocks = module.blocks.values() if hasattr(module.blocks, "values") else module.blocks
        for block in blocks:
            block.register_forward_hook(lambda block, given, x: seen.add(x.dtype))
    ids, targets = next(batches())
    loss = parallel.mean_loss(parallel.forward_backward(*share(parallel, ids, targets)))
    return seen, {"loss": loss} | parallel.named_full_gradients()


def casts_of_a_step(ranks, options):
    from one_process import batches, share

    class Casts(TorchDispatchMode):
        """The shapes of what is cast to bf16."""

        def __init__(self):
            super().__init__()
            self.shapes = []

        def __torch_dispatch__(self, function, types, given=(), settings=None):
            made = function(*given, **(settings or {}))
            if function is torch.ops.aten._to_copy.default and made.dtype is torch.bfloat16:
                self.shapes.append(tuple(made.shape))
            return made

    parallel = build(ranks, options)
    rows, seen = parallel.model.head.weight.shape, []
    for _, (ids, targets) in zip(range(2), batches(), strict=False):
        with Casts() as casts:
            parallel.forward_backward(*share(parallel, ids, targets))
        seen.append(casts.shapes.count(tuple(rows)))
    return parallel.layout.micro_batches, seen


@pytest.mark.parametrize("flags", [{}, {"all_reduce": "buckets"}, {"activation_checkpointing": "block"}], ids=str)
def test_a_weight_is_cast_once_a_step_and_not_once_a_micro_batch(pool, flags):
    options = options_of("bf16", micro_batch=1, **flags)
    for micro_batches, seen in pool.run(2, casts_of_a_step, options):
        assert micro_batches > 1 and seen == [1, 1]


SUMMED = [
    {}, {"all_reduce": "buckets"}, {"strategy": "zero1"}, {"strategy": "fsdp"}, {"pipeline": 2},
    {"strategy": "fsdp", "sharding": "hybrid"},
]  # fmt: skip


@pytest.mark.parametrize("flags", SUMMED, ids=str)
def test_gradients_summed_in_bf16_are_near_and_equal_on_all_ranks(pool, flags):
    exact = one_process(options_of("fp32"))["steps"][0]
    n = 4 if {"pipeline", "sharding"} & flags.keys() else 2
    found = pool.run(n, gradients_of, options_of("fp32", reduce_dtype="bf16", **flags))
    for gradients in found:
        far = {n: ((gradients[n] - exact[n]).norm() / exact[n].norm()).item() for n in gradients}
        assert 1e-5 < max(far.values()) < 0.01
        assert all(torch.equal(gradients[name], found[0][name]) for name in gradients)


def gradients_of(ranks, options):
    from one_process import batches, share

    parallel = build(ranks, options)
    parallel.forward_backward(*share(parallel, *next(batches())))
    return parallel.named_full_gradients()


# ------------------------------------------------------------------ what is chosen unasked


def chosen(flags, monkeypatch, kind="cuda", compiler="/usr/bin/gcc", ranks=1):
    from manyhands.config.layout import resolve_layout
    from manyhands.config.options import model_config

    monkeypatch.setattr(start, "memory_of_a_rank", lambda kind, on_node: 80 * 2**30)
    monkeypatch.setattr(start, "compiler_for", lambda kind, environ: compiler)
    monkeypatch.setattr(start.dist, "all_reduce", lambda tensor, op: None)
    options = read_options(flags.split())
    config = model_config(options, 65)
    place = Ranks.__new__(Ranks)
    for name, value in {"device": torch.device(kind), "world_size": ranks, "local_world_size": ranks}.items():
        object.__setattr__(place, name, value)
    return start.decided(options, config, resolve_layout(options, config, ranks), place)


@pytest.mark.parametrize(
    ("flags", "kind", "ranks", "compiled"),
    [
        ("", "cuda", 1, True),
        ("", "cpu", 1, False),
        ("--train.steps 99 --log.eval-every 0", "cuda", 1, False),
        ("--train.no-compile", "cuda", 1, False),
        ("--train.compile", "cpu", 1, True),
        ("--parallel.strategy fsdp", "cuda", 2, True),
        ("--parallel.strategy zero1", "cuda", 2, True),
        ("--parallel.strategy tp", "cuda", 2, False),
        ("--parallel.strategy pp", "cuda", 2, False),
        ("--parallel.context 2", "cuda", 2, False),
        ("--model.experts 4", "cuda", 1, False),
        ("--train.precision fp64", "cuda", 1, False),
    ],
)
def test_gpus_compile_unasked_where_it_pays_and_is_possible(flags, kind, ranks, compiled, monkeypatch):
    options, sentence = chosen(flags, monkeypatch, kind, ranks=ranks)
    assert options.train.compile is compiled and sentence is None


def test_without_a_compiler_a_gpu_trains_uncompiled_and_says_so(monkeypatch):
    options, sentence = chosen("", monkeypatch, compiler=None)
    assert options.train.compile is False and "no C compiler" in sentence and "doctor" in sentence
    assert chosen("--train.no-compile", monkeypatch, compiler=None)[1] is None
