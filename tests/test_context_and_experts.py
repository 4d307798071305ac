"""Lesson 09's rings, trades and exchanges: one process, forward and backward; messages, bytes, pairs, gradients.

What is tested is the lesson's own code, taken from its script, in float64, under a random v.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from definitions import taken_from
from manyhands.measure import wire

LESSON = "09_context_and_experts"
CONTEXT = (
    "normal", "scores", "start", "absorb", "post", "ring_forward", "in_order", "mine_of", "block_gradients",
    "ring_backward", "RingAttention", "zig_zag", "pairs_of", "to_heads", "to_positions", "Trade",
)  # fmt: skip
EXPERTS = (
    "normal", "route", "dense_mixture", "split_sizes", "Exchange", "run_experts", "combine", "expert_parallel",
    "finish", "share_of_choices", "balance_loss", "global_balance", "kept", "by_library", "biased_route", "nudge",
    "run_grouped", "limited",
)  # fmt: skip
B, H, T, K = 2, 4, 32, 5
N, D, M, E, k = 12, 6, 7, 8, 2


def ours(names, group):
    return taken_from(LESSON, *names, me=group.rank(), c=group.size(), device=torch.device("cpu"))


def subgroup(ranks, c):
    """This rank's group of c neighbours."""
    made = [dist.new_group(range(first, first + c)) for first in range(0, ranks.world_size, c)]
    return made[ranks.rank // c]


def full_attention(lesson, seed):
    """Inputs with their gradients, the output, and v."""
    *inputs, v_out = (lesson.normal(seed + i, B, H, T, K) for i in range(4))
    leaves = [x.requires_grad_() for x in inputs]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True)
    out.backward(v_out)
    return leaves, out.detach(), v_out


def furthest(pairs):
    return max((mine - wanted).abs().max().item() for mine, wanted in pairs)


def ring(ranks, c, layout):
    """(distance from full attention, blocks sent forward and backward, messages of both, pairs of each step)."""
    group = subgroup(ranks, c)
    lesson = ours(CONTEXT, group)
    leaves, wanted, v_out = full_attention(lesson, 10 * (ranks.rank // c))  # every group has a sequence of its own
    at = [getattr(lesson, layout)(T, c, r) for r in range(c)]
    here = at[group.rank()]
    mine = [lesson.mine_of(x.detach(), at) for x in leaves]
    with wire.watch() as there:
        out = lesson.RingAttention.apply(*mine, at, group)
    with wire.watch() as back:
        out.backward(v_out[:, :, here])
    unit = 2 * B * H * (T // c) * K * 8
    apart = furthest(
        [(out, wanted[:, :, here]), *((a.grad, b.grad[:, :, here]) for a, b in zip(mine, leaves, strict=True))]
    )
    sent = there.sent_bytes / unit, back.sent_bytes / unit
    return apart, sent, (there.messages, back.messages), lesson.pairs_of(at, group)


@pytest.mark.parametrize("layout", ["in_order", "zig_zag"])
@pytest.mark.parametrize(("n", "c"), [(1, 1), (2, 2), (4, 4), (4, 2)])
def test_a_ring_is_full_attention_in_forward_and_backward_for_c_minus_1_and_2c_minus_1_blocks(pool, n, c, layout):
    for apart, sent, messages, _ in pool.run(n, ring, c, layout):
        assert apart < 1e-10
        assert sent == (c - 1, 2 * c - 1 if c > 1 else 0)
        assert messages == (c - 1, 2 * c - 1 if c > 1 else 0)


def test_zig_zag_gives_every_rank_the_same_pairs_in_every_step_and_in_order_takes_2_minus_1_nth_as_long(pool):
    s = T // 4
    rows = [found[3] for found in pool.run(4, ring, 4, "zig_zag")]
    assert all(row == [s * (s + 1) // 2, *[s * s // 2] * 3] for row in rows)
    rows = [found[3] for found in pool.run(4, ring, 4, "in_order")]
    assert sum(max(row[step] for row in rows) for step in range(4)) == s * (s + 1) // 2 + 3 * s * s
    assert sum(map(sum, rows)) == T * (T + 1) // 2


def ring_of_shared_keys(ranks):
    """(distance from full attention, numbers sent per query number) where 16 query heads share one KV head."""
    group = dist.group.WORLD
    lesson, n, me = ours(CONTEXT, group), ranks.world_size, ranks.rank
    q, k, v = (lesson.normal(seed, B, heads, T, K) for seed, heads in enumerate((16, 1, 1)))
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    at = [lesson.zig_zag(T, n, r) for r in range(n)]
    with wire.watch() as seen, torch.no_grad():
        out = lesson.ring_forward(*(x[:, :, at[me]] for x in (q, k, v)), at, group)[0]
    return furthest([(out, wanted[:, :, at[me]])]), seen.sent_bytes / (q.nbytes / n)


def test_a_ring_of_four_sends_0_375_units_where_16_query_heads_share_their_keys(pool):
    for apart, units in pool.run(4, ring_of_shared_keys):
        assert apart < 1e-10 and units == 0.375


def test_torchs_context_parallel_gathers_all_keys_by_default_and_has_no_kernel_of_a_cpu():
    """The lesson says so of the pinned version, whose names these are; both are private."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    assert theirs._cp_options.rotate_method == theirs._RotateMethod.ALL_GATHER
    assert theirs._cp_options.enable_load_balance, "zig-zag"
    handled = {operator.name() for operator in theirs.custom_ops}
    assert "aten::_scaled_dot_product_flash_attention" in handled and not any("for_cpu" in name for name in handled)


def ulysses(ranks):
    group = dist.group.WORLD
    lesson, n, me = ours(CONTEXT, group), ranks.world_size, ranks.rank
    leaves, wanted, v_out = full_attention(lesson, 0)
    mine = [x.detach().chunk(n, 2)[me].clone().requires_grad_() for x in leaves]
    with wire.watch() as seen:
        heads = [lesson.Trade.apply(x, lesson.to_heads, lesson.to_positions, group) for x in mine]
        out = F.scaled_dot_product_attention(*heads, is_causal=True)
        out = lesson.Trade.apply(out, lesson.to_positions, lesson.to_heads, group)
    out.backward(v_out.chunk(n, 2)[me])
    pairs = [(a.grad, b.grad.chunk(n, 2)[me]) for a, b in zip(mine, leaves, strict=True)]
    return furthest([(out, wanted.chunk(n, 2)[me]), *pairs]), [call.bytes for call in seen.calls]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_ulysses_is_full_attention_for_four_all_to_alls_forward(pool, n):
    for apart, sizes in pool.run(n, ulysses):
        assert apart < 1e-10
        assert sizes == [8 * B * H * T // n * K] * 4


def experts(ranks, c, way):
    """(distance from the dense mixture, ratios of expert gradients before finish, bytes of forward's calls, predicted).

    The ratios are to one process's. The loss is the mean of v · y with a random v, over all tokens of the group.
    """
    group = subgroup(ranks, c)
    lesson, e, me = ours(EXPERTS, group), E // c, group.rank()
    held, here = slice(me * e, (me + 1) * e), slice(me * N, (me + 1) * N)
    weights = lesson.normal(1, E, D), lesson.normal(2, E, D, M), lesson.normal(3, E, M, D)
    tokens, v = lesson.normal(20, c * N, D), lesson.normal(21, c * N, D)
    single = [w.clone().requires_grad_() for w in (tokens, *weights)]
    wanted = lesson.dense_mixture(*single, k)
    (v * wanted).mean().backward()
    mine = [w.clone().requires_grad_() for w in (tokens[here], weights[0], weights[1][held], weights[2][held])]
    with wire.watch() as seen:
        y, _, chosen = lesson.expert_parallel(
            *mine, k, group, lesson.Exchange.apply if way == "ours" else lesson.by_library
        )
    (v[here] * y).mean().backward()  # a mean over this rank's tokens
    before = [(mine[i].grad.norm() / single[i].grad[held].norm()).item() for i in (2, 3)]
    lesson.finish([mine[1]], mine[2:], group)
    wanted_grads = [single[0].grad[here] * c, single[1].grad, single[2].grad[held], single[3].grad[held]]
    apart = furthest([(y, wanted[here]), *zip([w.grad for w in mine], wanted_grads, strict=True)])
    everybody = lesson.route(tokens, weights[0], k)[1]
    arrived = int(((everybody >= held.start) & (everybody < held.stop)).sum())
    predicted = [8 * E, 8 * D * arrived, 8 * D * N * k]
    return apart, before, [call.bytes for call in seen.calls], predicted


@pytest.mark.parametrize(("n", "c"), [(1, 1), (2, 2), (4, 4), (4, 2)])
def test_experts_on_other_ranks_are_the_dense_mixture_and_unfinished_gradients_are_c_times_too_large(pool, n, c):
    for apart, before, sizes, predicted in pool.run(n, experts, c, "ours"):
        assert apart < 1e-10
        assert before == pytest.approx([c, c])
        assert sizes == predicted


@pytest.mark.parametrize("n", [1, 4])
def test_so_they_are_by_torchs_exchange(pool, n):
    for apart, *_ in pool.run(n, experts, n, "torch's"):
        assert apart < 1e-10


def nobody_chooses(ranks):
    """All tokens choose expert 0: the other ranks receive nothing, and backward passes."""
    group = dist.group.WORLD
    lesson, n = ours(EXPERTS, group), ranks.world_size
    chosen = torch.zeros(N, 1, dtype=torch.int64)
    leaving, arriving, table = lesson.split_sizes(chosen, E, group)
    x = lesson.normal(ranks.rank, N, D).requires_grad_()
    up, down = (lesson.normal(i, E // n, *shape) for i, shape in ((1, (D, M)), (2, (M, D))))
    rows = lesson.Exchange.apply(x, leaving, arriving, group)
    out = lesson.Exchange.apply(lesson.run_experts(rows, table, up, down), arriving, leaving, group)
    out.sum().backward()
    return len(rows), bool(x.grad.abs().sum() > 0)


def test_a_rank_that_nobody_chooses_takes_part_with_no_rows(pool):
    found = pool.run(4, nobody_chooses)
    assert [rows for rows, _ in found] == [4 * N, 0, 0, 0]
    assert all(arrived for _, arrived in found)


def balances(ranks):
    group = dist.group.WORLD
    lesson = ours(EXPERTS, group)
    probs = [lesson.normal(5 + r, N, E).softmax(-1) for r in range(ranks.world_size)]
    mine = probs[ranks.rank]
    value = lesson.global_balance(mine, mine.topk(k).indices, group)
    share = lesson.share_of_choices(mine.topk(k).indices, E, group)
    own = lesson.balance_loss(mine, share)
    dist.all_reduce(own)
    return value.item(), own.item() / ranks.world_size, share.sum().item()


def test_the_balancing_loss_averaged_over_ranks_is_that_of_all_tokens(pool):
    for value, averaged, total in pool.run(4, balances):
        assert value == pytest.approx(averaged, rel=1e-12)
        assert total == pytest.approx(1)


def test_a_bias_chooses_and_does_not_weigh_and_moves_towards_even_shares():
    lesson = taken_from(LESSON, "route", "biased_route", "nudge")
    torch.manual_seed(1)
    x, router = torch.randn(50, D, dtype=torch.float64), torch.randn(E, D, dtype=torch.float64)
    for found, wanted in zip(
        lesson.biased_route(x, router, k, torch.zeros(E)), lesson.route(x, router, k), strict=True
    ):
        assert torch.equal(found, wanted), "without a bias it is the plain router"
    bias = torch.zeros(E)
    for _ in range(400):
        chosen = lesson.biased_route(x, router, k, bias)[1]
        bias = lesson.nudge(bias, torch.bincount(chosen.flatten(), minlength=E) / chosen.numel(), 0.002)
    before, after = (
        torch.bincount(route(x, router, k)[1].flatten(), minlength=E).max()
        for route in (lesson.route, lambda *given: lesson.biased_route(*given, bias))
    )
    assert after < before, "the busiest expert has fewer rows"


def test_grouped_products_are_the_loop_also_where_an_expert_has_no_row():
    lesson = taken_from(LESSON, "run_experts", "run_grouped")
    arriving_ne = torch.tensor([[2, 0, 3], [1, 0, 4]])
    rows, up, down = torch.randn(10, 8), torch.randn(3, 8, 12), torch.randn(3, 12, 8)  # each row a multiple of 16 bytes
    assert torch.allclose(lesson.run_grouped(rows, arriving_ne, up, down),
                          lesson.run_experts(rows, arriving_ne, up, down), atol=1e-4)  # fmt: skip


def test_a_token_visits_the_nodes_with_the_best_scores_and_no_more_than_allowed():
    limited = taken_from(LESSON, "limited").limited
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.5, 0.8, 0.2, 0.3, 0.0]])  # of eight experts on four nodes
    assert set(limited(scores, 2, 4, 1)[0].tolist()) == {2, 3}, "0.6 + 0.5 is more than 0.9 + 0.1"
    assert set(limited(scores, 2, 4, 2)[0].tolist()) == {0, 4}


def test_each_half_fits_forty_minutes():
    from manyhands.course.lessons import find_lessons
    from minutes import sections

    (lesson,) = find_lessons(only=["09"])
    core = [part for part in sections(lesson) if part.core]
    second = next(i for i, part in enumerate(core) if part.name.startswith("Who gets how many"))
    start = sum(part.minutes for part in core[:2])  # needed before either half
    halves = sum(part.minutes for part in core[:second]), start + sum(part.minutes for part in core[second:])
    assert max(halves) <= 40
    stated = sum(part.stated or 0 for part in core[:second]), sum(part.stated or 0 for part in core[second:])
    assert max(stated) <= 40, "as the head says"
