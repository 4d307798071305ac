"""Context parallelism: its ring and the trainer's runs on it are one process's."""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from manyhands.gpt.model import within_documents
from manyhands.measure import wire
from manyhands.parallel import context
from manyhands.parallel.context import ring_attention, zig_zag
from one_process import BATCH, CONFIG, LLAMA, assert_equal, build, one_process, options_of, steps_of
from torch.autograd.graph import saved_tensors_hooks

B, H, T, K, SEPARATOR = 2, 3, 32, 5, 7


def ring(ranks, masked, low):
    """(distance from plain attention of output and gradients, bytes and messages forward and backward)."""
    n, group = ranks.world_size, dist.group.WORLD
    draw = torch.Generator().manual_seed(1)
    dtype = torch.bfloat16 if low else torch.float64
    q, k, v, d_out = (torch.randn(B, H, T, K, generator=draw, dtype=torch.float64).to(dtype) for _ in range(4))
    ids_BT = torch.randint(8, (B, T), generator=draw)
    ids_BT[0] = 0  # one text; the other has documents that begin within a rank's share, and end in another's
    ids_BT[1, [0, 5, 6, 17, 31]] = SEPARATOR
    allowed = within_documents(ids_BT, SEPARATOR if masked else None)
    whole = [x.double().requires_grad_() for x in (q, k, v)]
    wanted = F.scaled_dot_product_attention(*whole, attn_mask=allowed, is_causal=not masked)
    wanted.backward(d_out.double())
    at = [zig_zag(T, n, rank) for rank in range(n)]
    document_BT = (ids_BT == SEPARATOR).cumsum(1)
    here = at[ranks.rank]
    mine = [x[:, :, here].detach().clone().requires_grad_() for x in (q, k, v)]
    kept, products, plain = set(), set(), context.wide_product

    def noted(x, y):
        products.add((x.dtype, y.dtype, (found := plain(x, y)).dtype))
        return found

    with mock.patch.object(context, "wide_product", noted):
        with wire.watch() as forward, saved_tensors_hooks(lambda x: kept.add(x.dtype) or x, lambda x: x):
            out = ring_attention(*mine, group, [document_BT[:, at_s] for at_s in at] if masked else None)
        with wire.watch() as backward:
            out.backward(d_out[:, :, here])
    pairs = [(out, wanted), *((x.grad, y.grad) for x, y in zip(mine, whole, strict=True))]
    apart = max((x.double() - y[:, :, here]).abs().max().item() for x, y in pairs)
    sent = (forward.sent_bytes, forward.messages), (backward.sent_bytes, backward.messages)
    return apart, sent, ({x.dtype for x, _ in pairs}, products, kept)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("n", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_the_ring_is_plain_attention_for_n_minus_1_messages_of_keys_and_n_of_gradients(pool, n, masked):
    unit = 2 * B * H * (T // n) * K * 8
    for apart, sent, _ in pool.run(n, ring, masked, False):
        assert apart < 1e-12
        gradients = n if n > 1 else 0
        assert sent == (((n - 1) * unit, n - 1), ((n - 1 + gradients) * unit, n - 1 + gradients))


def test_in_low_precision_keys_travel_low_and_their_gradients_in_float32(pool):
    numbers, low, wide = 2 * B * H * (T // 2) * K, torch.bfloat16, torch.float32
    for apart, ((forward, _), (backward, _)), (dtypes, products, kept) in pool.run(2, ring, False, True):
        assert apart < 0.05 and dtypes == {low}
        assert products == {(low, low, wide)} and kept == {low, wide}, "wide: the log of each query's sum"
        assert (forward, backward) == (2 * numbers, (2 + 2 * 4) * numbers)


@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        ({}, True), ({"since": (8, 0)}, True), ({"since": (7, 5)}, False), ({"K": 320}, False), ({"K": 60}, False),
        ({"bytes": 4}, False), ({"is_cuda": False}, False), ({"documents": []}, False),
    ],
)  # fmt: skip
def test_flash_attention_works_on_a_block_where_its_kernel_can(monkeypatch, changes, chosen):
    of = {"since": (9, 0), "K": 64, "bytes": 2, "is_cuda": True, "documents": None} | changes
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: of["since"])
    q = SimpleNamespace(
        shape=(1, 2, 1, 8, of["K"]), is_cuda=of["is_cuda"], device="cuda", element_size=lambda: of["bytes"]
    )
    assert context._is_flash(q, of["documents"]) == chosen


@pytest.mark.parametrize("n", [2, 4])
def test_zig_zag_gives_each_position_to_one_rank_and_as_many_pairs_to_all(n):
    at = [zig_zag(T, n, rank) for rank in range(n)]
    assert torch.equal(torch.cat(at).sort().values, torch.arange(T))
    for step in range(1, n):
        pairs = {int((at[r][:, None] >= at[r - step][None]).sum()) for r in range(n)}
        assert pairs == {(T // n) ** 2 // 2}


def test_positions_that_do_not_split_are_refused():
    with pytest.raises(ValueError, match="30 positions do not split into 2 x 4 equal pieces; use a multiple of 8"):
        zig_zag(30, 4, 0)


# --- a trainer's steps

DOCUMENTS = replace(CONFIG, separator=7, block_size=32)
# of 2 heads of keys, or of one that two tensor ranks hold, for 4 of queries; a rank turns by its own positions
LLAMAS = (replace(LLAMA, n_layer=2), replace(LLAMA, n_layer=2, n_kv_head=1, separator=7, block_size=32))


@pytest.fixture(scope="module")
def references():
    return {config: one_process(options_of(), config) for config in (CONFIG, DOCUMENTS, *LLAMAS)}


CASES = {
    "context 2": (2, dict(strategy="ddp", context=2)),
    "context 4": (4, dict(strategy="ddp", context=4)),
    "context 2 x ddp 2": (4, dict(strategy="ddp", context=2, micro_batch=2)),
    "context 2 x ddp 2 by buckets": (4, dict(strategy="ddp", context=2, all_reduce="buckets")),
    "context 2 x zero1 2": (4, dict(strategy="zero1", context=2)),
    "context 2 x fsdp 2": (4, dict(strategy="fsdp", context=2, micro_batch=2)),
    "context 2 x hybrid": (4, dict(strategy="fsdp", sharding="hybrid", context=2, activation_checkpointing="block")),
    "context 2 x tensor 2": (4, dict(strategy="ddp", context=2, tensor=2, sequence_parallel=True, loss_parallel=True)),
}


SHORT = {"context 4", "context 2 x fsdp 2"}


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in SHORT else pytest.mark.full) for c in CASES])
def test_ranks_that_share_sequences_take_the_steps_of_one_process(pool, references, case):
    n, parallel = CASES[case]
    assert_equal(pool.run(n, steps_of, options_of(**parallel)), references[CONFIG])


def steps_of_all(ranks, cases):
    return [steps_of(ranks, options_of(**parallel), config) for config, parallel in cases]


def test_so_they_do_with_a_llama_whose_queries_are_grouped(pool, references):
    cases = [
        (LLAMAS[0], dict(strategy="ddp", context=4)),
        (LLAMAS[1], dict(strategy="fsdp", context=2, activation_checkpointing="block")),
        (LLAMAS[1], dict(strategy="ddp", context=2, tensor=2, sequence_parallel=True, loss_parallel=True)),
    ]
    results = pool.run(4, steps_of_all, cases, timeout_s=240)
    for i, (config, _) in enumerate(cases):
        assert_equal([own[i] for own in results], references[config])


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.full)])
def test_attention_stays_within_documents_that_several_ranks_have_parts_of(pool, references, n):
    assert_equal(pool.run(n, steps_of, options_of(strategy="fsdp", context=2), DOCUMENTS), references[DOCUMENTS])


# --- what the dry run says of it


def memory_of_a_step(ranks, config, options):
    """(bytes that autograd keeps, the most of a step, both by formula) of this rank."""
    from manyhands.config.layout import resolve_layout
    from manyhands.measure.memory_timeline import MemoryTimeline
    from manyhands.measure.tensor_bytes import count_saved
    from manyhands.predict.memory import bytes_per_rank

    parallel, layout = build(ranks, options, config), resolve_layout(options, config, ranks.world_size)
    draw = torch.Generator().manual_seed(5)
    batch = torch.randint(config.vocab_size, (2, BATCH, config.block_size), generator=draw)
    kept = count_saved(lambda: parallel._own_loss(parallel.model, *batch), parallel.model).bytes
    optimizer = torch.optim.AdamW(parallel.named_parameters().values(), foreach=False)
    for _ in range(2):
        with MemoryTimeline(parallel.model, optimizer) as seen:
            parallel.forward_backward(*batch)
        optimizer.step()
    formula = bytes_per_rank(config, layout, options)
    return kept, seen.peak.total, formula.activations, formula.on_gpu


@pytest.mark.parametrize("config", [CONFIG, LLAMAS[0]], ids=["gpt", "llama"])
def test_activations_are_those_of_a_part_of_each_sequence_and_the_peak_counts_a_block_of_scores(pool, config):
    config, options = replace(config, block_size=128, vocab_size=8), options_of("fp32", context=2, all_reduce="buckets")
    for kept, peak, by_formula, peak_by_formula in pool.run(2, memory_of_a_step, config, options):
        assert by_formula == pytest.approx(kept, rel=0.01)
        scores = 2 * 4 * BATCH * CONFIG.n_head * 64 * 64
        assert peak_by_formula - scores < peak < 1.05 * peak_by_formula
