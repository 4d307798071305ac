"""Checks of lesson 09: a block in an online softmax, its gradients, zig-zag positions; split sizes, combine, a balancing loss.

All is in float64 and in the CPU's memory, where the trial group can send. What each rank is given follows from seeds.
"""

import math

import torch
import torch.distributed as dist

from manyhands.checks import Wrong, exercise
from manyhands.checks.movements import judge_cost, judge_tensor, normal, untouched
from manyhands.checks.tensors import count
from manyhands.checks.values import number, shown
from manyhands.measure import wire

B, H, S, K = 2, 2, 3, 4  # sequences, heads, queries, numbers per head
STATE = ("largest", "total", "weighted")


@exercise("A", "take in a block")
def absorb(answer, ranks=None):
    """`answer(state, s_BHsu, v_BHuK)` is the state (largest, total, weighted) after one more block of keys."""
    for name, blocks in _sequences_of_blocks().items():
        state, expected = _empty(), _empty()
        for nth, (s, v) in enumerate(blocks, 1):
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
                where = f"{name}, `{what}` after block {nth}"
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


MANY = 200_000  # tokens in exercise 3, where a loop over them would take seconds


@exercise("D", "the sizes of the parts")
def split_sizes(answer, ranks):
    """`answer(experts_Nk, E, group)`: rows to each rank, rows from each, and [n, e] of those, for one all-to-all of E integers."""
    n, rank = ranks.world_size, ranks.rank
    for e, k in ((1, 1), (3, 2)):
        E, N = e * n, 7
        choices = [_choices(300 + 10 * k + r, N + r, E, k) for r in range(n)]  # a different N on each rank
        sent = torch.stack([torch.bincount(c.flatten(), minlength=E) for c in choices]).view(n, n, e)
        given = choices[rank].clone()
        with wire.watch() as seen:
            found = answer(given, E, dist.group.WORLD)
        untouched(given, choices[rank], "experts_Nk")
        if not isinstance(found, (tuple, list)) or len(found) != 3:
            raise Wrong(
                f"split_sizes should return (rows to each rank, rows from each rank, arriving_ne), not {shown(found)}"
            )
        case = f"{E} experts on {count(n, 'rank')}, k = {k}"
        leaving, arriving = sent[rank].sum(1).tolist(), sent[:, rank].sum(1).tolist()
        _judge_sizes(found[0], leaving, f"{case}: rows to each rank", {
            f"rows for each expert; add up the {e} experts of a rank": sent[rank].flatten().tolist(),
            "tokens, but one that chooses two experts travels twice": _tokens_of(choices[rank], n, e),
            "what arrives; the first list is what leaves": arriving,
        })  # fmt: skip
        _judge_sizes(found[1], arriving, f"{case}: rows from each rank", {
            "what leaves; what arrives only the others know, so exchange the counts": leaving,
            "rows from all ranks for each of my experts; add up by rank": sent[:, rank].sum(0).tolist(),
        })  # fmt: skip
        _judge_arriving(found[2], sent[:, rank], sent[rank], case)
        _judge_counts_cost(seen, E, case)


@exercise("E", "combine")
def combine(answer, ranks=None):
    """`answer(rows_RD, order_R, gates_Nk)` is [N, D]: each token's results times their gates, with both gradients."""
    N, D = 5, 3
    for k in (1, 2, 3):
        order = _choices(330 + k, N, 4, k).flatten().argsort(stable=True)
        rows, gates = normal(331, N * k, D), normal(332, N, k + 1).softmax(-1)[:, :k]
        use = normal(333, N, D)
        leaves = [x.clone().requires_grad_() for x in (rows, gates)]
        found = answer(leaves[0], order.clone(), leaves[1])
        for leaf, old, name in zip(leaves, (rows, gates), ("rows_RD", "gates_Nk"), strict=True):
            untouched(leaf.detach(), old, name)
        back = torch.empty_like(rows)
        back[order] = rows  # choice by choice
        wanted = (back.view(N, k, D) * gates[..., None]).sum(1)
        case = f"k = {k}, combine(...)"
        hints = {
            "in the order in which rows were sent; put row j at choice order_R[j] first": _weighted(rows, gates),
            "rows[order_R]: that applies the order once more; its inverse is needed": _weighted(rows[order], gates),
            "without gates": back.view(N, k, D).sum(1),
            "a mean over the choices; add them up": wanted / k,
        }
        judge_tensor(found, wanted, case, "each token's results times their gates, added up", hints)
        if not found.requires_grad:
            raise Wrong(f"{case}: the numbers are right, but no gradient reaches rows or gates")
        d_rows, d_gates = torch.autograd.grad(found, leaves, use, allow_unused=True)
        per_choice = use.repeat_interleave(k, 0)
        wanted_rows = (per_choice * gates.reshape(-1, 1))[order]
        wanted_gates = (per_choice * back).sum(1).view(N, k)
        judge_tensor(d_rows, wanted_rows, f"{case}, the gradient of rows_RD", "gate times gradient", {})
        judge_tensor(d_gates, wanted_gates, f"{case}, the gradient of gates_Nk", "result times gradient", {})


@exercise("F", "finish the gradients")
def finish(answer, ranks):
    """`answer(copies, experts, group)`: copies' gradients are averaged, experts' divided by n, nothing sent for these."""
    n, rank, shapes = ranks.world_size, ranks.rank, ((4, 3), (5,), (2, 3, 4), (2, 4, 3))
    gradients = [[normal(340 + 10 * r + i, *shape) for i, shape in enumerate(shapes)] for r in range(n)]
    weights = [normal(345 + i, *shape) for i, shape in enumerate(shapes)]
    parameters = [torch.nn.Parameter(w.clone()) for w in weights]
    for p, gradient in zip(parameters, gradients[rank], strict=True):
        p.grad = gradient.clone()
    with wire.watch() as seen:
        answer(parameters[:2], parameters[2:], dist.group.WORLD)
    for p, w in zip(parameters, weights, strict=True):
        untouched(p.detach(), w, "a weight", ": only gradients are to be finished")
    for i, p in enumerate(parameters[:2]):
        total = sum(gradients[r][i] for r in range(n))
        hints = {
            "the sum; each rank's loss is a mean over its own tokens, so divide by the ranks": total,
            "this rank's own; the others' tokens are missing": gradients[rank][i],
            "this rank's own divided by the ranks; add the ranks' gradients up": gradients[rank][i] / n,
            "divided by the ranks twice": total / n**2,
        }
        judge_tensor(p.grad, total / n, f"p.grad of copy {i}", "the mean over the ranks", hints)
    for i, p in enumerate(parameters[2:], 2):
        own, total = gradients[rank][i], sum(gradients[r][i] for r in range(n))
        hints = {
            f"{n} times that: the exchange has summed over the losses of {n} ranks, so divide by {n}": own,
            "the mean over the ranks, but other ranks' experts are other experts": total / n,
            "the sum over the ranks, but other ranks' experts are other experts": total,
            f"divided by {n} twice": own / n**2,
        }
        judge_tensor(p.grad, own / n, f"p.grad of expert weight {i - 2}", f"its own divided by {n}", hints)
    judge_cost(seen, ["all_reduce"] * 2, sum(p.nbytes for p in parameters[:2]) / 2, "finish, both copies", each=2)


@exercise(2, "a balancing loss that does not depend on the number of ranks")
def global_balance(answer, ranks):
    """`answer(probs_NE, experts_Nk, group)` is E · sum f P of all tokens; averaged gradients are one process's."""
    n, rank, N, E, k = ranks.world_size, ranks.rank, 6, 5, 2
    probs = [normal(350 + r, N, E).add(r * torch.arange(E) / 4).softmax(-1) for r in range(n)]
    chosen = [p.topk(k).indices for p in probs]
    shares = [torch.bincount(c.flatten(), minlength=E).double() / (N * k) for c in chosen]
    f, P = sum(shares) / n, sum(p.mean(0) for p in probs) / n
    given = probs[rank].clone().requires_grad_()
    with wire.watch() as there:
        loss = answer(given, chosen[rank].clone(), dist.group.WORLD)
    untouched(given.detach(), probs[rank], "probs_NE")
    found = number(loss.detach() if isinstance(loss, torch.Tensor) else loss, "the loss, a number")
    wanted, own = (E * (f * P).sum()).item(), (E * (shares[rank] * probs[rank].mean(0)).sum()).item()
    if not abs(found - wanted) <= 1e-10 * wanted:
        local = E * sum((s * p.mean(0)).sum() for s, p in zip(shares, probs, strict=True)).item() / n
        mistakes = {
            "that is this rank's tokens alone": own,
            "that is the mean of the ranks' own losses: average f and P first, then multiply": local,
            "that is without the factor E": wanted / E,
            "f should sum to 1 over the experts, not to k": k * wanted,
            "f is of all ranks, P of this one": E * (f * probs[rank].mean(0)).sum().item(),
        }
        why = next((f": {why}" for why, m in mistakes.items() if abs(found - m) <= 1e-10 * abs(m)), "")
        raise Wrong(f"the loss should be {wanted:.6f}, not {found:.6f}{why}")
    if not (isinstance(loss, torch.Tensor) and loss.requires_grad):
        raise Wrong("the loss is right, but has no gradient: P comes from probs_NE")
    with wire.watch() as back:
        (gradient,) = torch.autograd.grad(loss, given, allow_unused=True)
    slope = (E * f / N).expand(N, E)
    hints = {
        f"an n-th of that, {n} ranks: gradients are averaged over ranks afterwards": slope / n,
        f"{n} times that: gradients are averaged over ranks afterwards": slope * n,
    }
    judge_tensor(gradient, slope, "the gradient of probs_NE", "E · f / N in each row", hints if n > 1 else {})
    _judge_balance_cost(there, back, E, n)


@exercise(3, "capacity", timeout_s=10.0)
def kept(answer, ranks=None):
    """`answer(experts_Nk, E, capacity)`: bool [N, k], the first `capacity` choices of each expert."""
    cases = [(_choices(360 + k, N, E, k), E, C) for N, E, k, C in ((6, 3, 1, 2), (9, 4, 2, 3), (5, 8, 2, 1))]
    cases += [(torch.zeros(4, 1, dtype=torch.int64), 2, 4), (torch.zeros(4, 1, dtype=torch.int64), 2, 0)]
    cases += [(_choices(369, MANY, 8, 2), 8, MANY // 8)]
    for experts, E, capacity in cases:
        given = experts.clone()
        found = answer(given, E, capacity)
        untouched(given, experts, "experts_Nk")
        wanted = _kept(experts, E, capacity)
        case = f"{len(experts)} tokens, {E} experts, capacity {capacity}"
        if not isinstance(found, torch.Tensor) or found.dtype != torch.bool or found.shape != wanted.shape:
            what = f"{found.dtype} {list(found.shape)}" if isinstance(found, torch.Tensor) else shown(found)
            raise Wrong(f"{case}: return a bool tensor {list(wanted.shape)}, not {what}")
        if torch.equal(found, wanted):
            continue
        most = int(torch.bincount(experts[found], minlength=E).max())
        if most > capacity:
            raise Wrong(f"{case}: an expert keeps {most} rows")
        missing = int(wanted.sum() - found.sum())
        if missing > 0:
            raise Wrong(f"{case}: {int(found.sum())} choices are kept, and {missing} more would fit")
        where = tuple((found != wanted).nonzero()[0].tolist())
        raise Wrong(
            f"{case}: the number of choices is right, but at [token, choice] {list(where)} it should be {bool(wanted[where])}: "
            "earlier tokens first, and a token's first choice before its second"
        )


# ---- what ranks are given ----


def _choices(seed, N, E, k):
    """k different experts for each token, the low ones popular; [N, k]."""
    k = min(k, E)
    draw = torch.Generator().manual_seed(seed)
    return (torch.rand(N, E, generator=draw) - torch.arange(E) / (3 * E)).topk(k).indices


# ---- build D ----


def _judge_sizes(found, wanted, what, hints):
    """Raises Wrong unless a list (or tensor) of sizes is `wanted`."""
    try:
        values = [int(value) for value in (found.tolist() if hasattr(found, "tolist") else found)]
    except (TypeError, ValueError):
        raise Wrong(f"{what} should be a list of integers, not {shown(found)}") from None
    if values == wanted:
        return
    why = next((f": that is {why}" for why, mistaken in hints.items() if values == mistaken), "")
    raise Wrong(f"{what} should be {wanted}, not {values}{why}")


def _judge_arriving(found, wanted_ne, leaving_ne, case):
    if not isinstance(found, torch.Tensor) or found.shape != wanted_ne.shape:
        what = list(found.shape) if isinstance(found, torch.Tensor) else shown(found)
        raise Wrong(f"{case}: arriving_ne should be a tensor {list(wanted_ne.shape)}, not {what}")
    if torch.equal(found.long(), wanted_ne):
        return
    why = ": that is what leaves" if torch.equal(found.long(), leaving_ne) else ""
    raise Wrong(f"{case}: arriving_ne should be {wanted_ne.tolist()}, not {found.tolist()}{why}")


def _judge_counts_cost(seen, E, case):
    calls, sent = [call.op for call in seen.calls], sum(call.bytes for call in seen.calls)
    if dist.get_world_size() > 1 and (len(calls) > 1 or sent > 8 * E):
        raise Wrong(
            f"{case}: the sizes are right, but it made {count(len(calls), 'call')} ({', '.join(sorted(set(calls)))}) of {sent} "
            f"bytes; one all_to_all of {E} integers, {8 * E} bytes, is enough"
        )


def _tokens_of(choices, n, e):
    """How many different tokens go to each rank."""
    return [int((choices // e == r).any(1).sum()) for r in range(n)]


# ---- build E ----


def _weighted(rows, gates):
    return (rows.view(*gates.shape, -1) * gates[..., None]).sum(1)


# ---- exercise 2 ----


def _judge_balance_cost(there, back, E, n):
    calls, sent = [call.op for call in there.calls], there.payload_bytes()
    if n > 1 and (len(calls) > 1 or sent > 16 * E):
        raise Wrong(
            f"the loss is right, but it made {count(len(calls), 'call')} of {sent} bytes; one all_reduce of {2 * E} numbers is enough"
        )
    if n > 1 and back.calls:
        raise Wrong(f"the gradient is right, but backward made {count(len(back.calls), 'call')}; none is needed")


# ---- exercise 3 ----


def _kept(experts, E, capacity):
    chosen = experts.flatten()
    place = torch.nn.functional.one_hot(chosen, E).cumsum(0).gather(1, chosen[:, None])[:, 0]
    return (place <= capacity).view_as(experts)
