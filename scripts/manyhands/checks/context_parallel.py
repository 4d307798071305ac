"""Checks of lesson 09's first half: a block in an online softmax, a block's gradients, zig-zag positions, positions to heads.

All is in float64 and in the CPU's memory, where the trial group can send. What each rank is given follows from seeds.
"""

import math

import torch
import torch.distributed as dist

from manyhands.checks import Wrong, exercise
from manyhands.checks.movements import judge_cost, judge_tensor, normal, untouched
from manyhands.checks.values import shown
from manyhands.measure import wire

B, H, S, K = 2, 2, 3, 4  # sequences, heads, queries, numbers per head
STATE = ("largest", "total", "weighted")


@exercise("A", "take in a block")
def absorb(answer, ranks=None):
    """`answer(state, s_BHsu, v_BHuK)` is the state (largest, total, weighted) after one more block of keys."""
    for name, blocks in _sequences_of_blocks().items():
        state, expected = _empty(), _empty()
        for number, (s, v) in enumerate(blocks, 1):
            given = [part.clone() for part in state]
            before_s, before_v = s.clone(), v.clone()
            found = _three(answer(tuple(given), s, v), "absorb", STATE)
            for part, old, what in zip(given, state, STATE, strict=True):
                untouched(part, old, what, ": return new tensors")
            untouched(s, before_s, "the scores")
            untouched(v, before_v, "the values")
            hints = _mistaken_states(expected, s, v)
            expected = _absorbed(expected, s, v)
            for i, what in enumerate(STATE):
                where = f"{name}, `{what}` after block {number}"
                _no_nan(found[i], where)
                judge_tensor(found[i], expected[i], where, _IT_IS[what], {k: h[i] for k, h in hints.items()})
            state = [part.clone() for part in found]


@exercise("B", "one block's gradients")
def block_gradients(answer, ranks=None):
    """`answer(q, k, v, s, log_sums, d_out, delta)` are the block's terms (d_q, d_k, d_v) under the whole softmax."""
    q, d_out = normal(201, B, H, S, K), normal(202, B, H, S, K)
    keys, values = normal(203, B, H, 2 * S, K), normal(204, B, H, 2 * S, K)
    q_at, k_at = torch.arange(S) + S, torch.arange(2 * S)
    s = (q @ keys.mT / math.sqrt(K)).masked_fill(k_at[None] > q_at[:, None], -math.inf)
    log_sums, p = s.logsumexp(-1, keepdim=True), s.softmax(-1)
    delta = (d_out * (p @ values)).sum(-1, keepdim=True)
    for name, here in (
        ("the block of the past", slice(0, S)),
        ("the block on the diagonal", slice(S, 2 * S)),
    ):
        given = [x.clone() for x in (q, keys[:, :, here], values[:, :, here], s[..., here], log_sums, d_out, delta)]
        before = [x.clone() for x in given]
        found = _three(answer(*given), "block_gradients", ("d_q", "d_k", "d_v"))
        for part, old in zip(given, before, strict=True):
            untouched(part, old, "an argument", ": return new tensors")
        wanted = _block_terms(*before)
        for i, what in enumerate(("d_q", "d_k", "d_v")):
            hints = {why: terms[i] for why, terms in _mistaken_gradients(*before).items()}
            _no_nan(found[i], f"{name}, {what}")
            judge_tensor(found[i], wanted[i], f"{name}, {what}", "this block's term", hints)


@exercise("C", "zig-zag positions")
def zig_zag(answer, ranks=None):
    """`answer(T, n, rank)` are chunk `rank` of 2n and its mirror image; ValueError with both numbers where T does not split."""
    for T, n in ((8, 1), (8, 2), (16, 4), (24, 2), (48, 8), (36, 3)):
        each = T // (2 * n)
        for rank in range(n):
            late = 2 * n - 1 - rank
            wanted = [*range(rank * each, (rank + 1) * each), *range(late * each, (late + 1) * each)]
            case = f"{T} positions on {n} ranks: rank {rank}"
            found = _positions(answer(T, n, rank), case)
            if found == wanted:
                continue
            if sorted(found) == wanted:
                raise Wrong(f"{case} has the right positions, but not in ascending order: {found}")
            if found == [*range(2 * rank * each, 2 * (rank + 1) * each)]:
                raise Wrong(f"{case} has one stretch, {found}; it should be two chunks, {wanted}")
            raise Wrong(f"{case} should have {wanted}, not {found}")
    for T, n in ((12, 4), (10, 4), (7, 2)):
        try:
            found = answer(T, n, 0)
        except ValueError as error:
            if str(T) not in str(error) or not ({str(n), str(2 * n)} & set(_numbers(str(error)))):
                raise Wrong(f"the ValueError should name {T} and {2 * n}; it says: {error or 'nothing'}") from None
        else:
            raise Wrong(
                f"{T} positions on {n} ranks should be refused with a ValueError: they do not split into {2 * n} chunks; "
                f"it returned {shown(found)}"
            )


@exercise(1, "positions to heads")
def to_heads(answer, ranks):
    """`answer(x_BHsK, group)` is [B, h, T, K]: all positions of this rank's heads, for one all-to-all."""
    n, rank = ranks.world_size, ranks.rank
    for heads_each in (1, 2):
        whole = normal(210 + heads_each, B, heads_each * n, S * n, K)
        given = whole.chunk(n, 2)[rank].clone()
        before = given.clone()
        with wire.watch() as seen:
            found = answer(given, dist.group.WORLD)
        untouched(given, before, "x_BHsK")
        wanted = whole.chunk(n, 1)[rank].clone()
        case = f"{heads_each * n} heads, to_heads(x)"
        hints = {
            "this rank's heads, but positions out of order: rank 0's come first": _shuffled(wanted, n),
            "another rank's heads; rank r has heads r·h to (r+1)·h - 1": whole.chunk(n, 1)[(rank + 1) % n],
        }
        judge_tensor(found, wanted, case, "all positions of this rank's heads", hints if n > 1 else {})
        judge_cost(seen, ["all_to_all"], given.nbytes, case)


# ---- build A ----

_IT_IS = {
    "largest": "the largest score so far",
    "total": "the sum of exp(score - largest) over all keys so far",
    "weighted": "the sum of exp(score - largest) times the values over all keys so far",
}


def _empty():
    least = torch.full((B, H, S, 1), torch.finfo(torch.float64).min, dtype=torch.float64)
    return least, torch.zeros_like(least), torch.zeros(B, H, S, K, dtype=torch.float64)


def _absorbed(state, s, v):
    largest, total, weighted = state
    new = torch.maximum(largest, s.amax(-1, keepdim=True))
    shrink, p = (largest - new).exp(), (s - new).exp()
    return new, total * shrink + p.sum(-1, keepdim=True), weighted * shrink + p @ v


def _sequences_of_blocks():
    """{what they are like: [(scores, values)]}: in any order, large, and masked throughout."""
    s, v = (
        [normal(220 + i, B, H, S, i + 2) for i in range(3)],
        [normal(230 + i, B, H, i + 2, K) for i in range(3)],
    )
    masked = torch.full_like(s[0], -math.inf)
    return {
        "three blocks": [(s[0], v[0]), (s[1] + 1, v[1]), (s[2] - 1, v[2])],
        "scores near 1,000": [(s[2] + 900, v[2]), (s[0] + 1000, v[0])],
        "a first block that is -inf throughout": [(masked, v[0]), (s[1], v[1])],
        "a second block that is -inf throughout": [(s[1], v[1]), (masked, v[0])],
    }


def _mistaken_states(state, s, v):
    """{which mistake: the state that it gives}."""
    largest, total, weighted = state
    new, right_total, right_weighted = _absorbed(state, s, v)
    shrink, block = (largest - new).exp(), s.amax(-1, keepdim=True)
    p, own = (s - new).exp(), torch.nan_to_num((s - block).exp())
    return {
        "without shrinking what was there, by exp(old largest - new largest)": (
            new, total + p.sum(-1, keepdim=True), weighted + p @ v,
        ),
        "as if this block were the only one": (block, own.sum(-1, keepdim=True), own @ v),
        "with this block's own largest score subtracted, not the largest so far": (
            block, total * shrink + own.sum(-1, keepdim=True), weighted * shrink + own @ v,
        ),
        "divided by the total already; divide once, at the end": (new, right_total, right_weighted / right_total),
        "a mean over keys; add up": (new, total * shrink + p.mean(-1, keepdim=True), right_weighted),
    }  # fmt: skip


# ---- build B ----


def _block_terms(q, k, v, s, log_sums, d_out, delta):
    p = (s - log_sums).exp()
    d_s = p * (d_out @ v.mT - delta) / math.sqrt(K)
    return d_s @ k, d_s.mT @ q, p.mT @ d_out


def _mistaken_gradients(q, k, v, s, log_sums, d_out, delta):
    """{which mistake: the gradients that it gives}."""
    p, d_p = (s - log_sums).exp(), d_out @ v.mT
    alone = s.softmax(-1)
    own_delta = (alone * d_p).sum(-1, keepdim=True)
    ways = {
        "without the 1 / sqrt(K) of the scores": (p, p * (d_p - delta)),
        "without delta: every probability pulls at the others": (p, p * d_p / math.sqrt(K)),
        "normalised over this block alone; log_sums is over all keys": (
            alone,
            alone * (d_p - own_delta) / math.sqrt(K),
        ),
        "with a softmax over this block alone in place of exp(scores - log_sums)": (
            alone,
            alone * (d_p - delta) / math.sqrt(K),
        ),
        "without the factor P in dS": (p, (d_p - delta) / math.sqrt(K)),
    }
    return {why: (d_s @ k, d_s.mT @ q, p.mT @ d_out) for why, (p, d_s) in ways.items()}


# ---- all ----


def _three(found, name, parts):
    """What an answer returned, as three tensors."""
    if not isinstance(found, (tuple, list)) or len(found) != 3:
        raise Wrong(f"{name} should return three tensors, ({', '.join(parts)}), not {shown(found)}")
    return found


def _no_nan(found, where):
    if isinstance(found, torch.Tensor) and found.isnan().any():
        raise Wrong(f"{where} is nan: a difference of two infinities, or 0 / 0; subtract the largest so far")


def _positions(found, case):
    """A returned tensor, array or list of positions as a list of int."""
    try:
        values = found.tolist() if hasattr(found, "tolist") else list(found)
        return [int(value) for value in values]
    except (TypeError, ValueError):
        raise Wrong(f"{case} needs a tensor of positions, not {shown(found)}") from None


def _numbers(text):
    return "".join(letter if letter.isdigit() else " " for letter in text).split()


def _shuffled(x, n):
    """Positions of [B, h, T, K] as one gets them by reading ranks innermost."""
    return torch.stack(x.chunk(n, 2), dim=3).flatten(2, 3)
