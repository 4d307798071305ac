"""Each check of lesson 09 accepts right answers in another style and rejects mutants, several from published code."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from exercises import AnswersOfRanks
from manyhands.checks import context_and_experts as checks

# ---- build A ----


def _absorb(shrink_total=True, shrink_weighted=True, own=False, mean=False, divide=False, plain=False):
    def absorb(state, s, v):
        largest, total, weighted = state
        new = s.amax(-1, keepdim=True) if own else torch.maximum(largest, s.amax(-1, keepdim=True))
        new = torch.zeros_like(new) if plain else new
        p, shrink = torch.exp(s - new), torch.exp(largest - new)
        added = p.mean(-1, keepdim=True) if mean else p.sum(-1, keepdim=True)
        total = total * shrink + added if shrink_total else total + added
        weighted = weighted * shrink + p @ v if shrink_weighted else weighted + p @ v
        return new, total, weighted / total if divide else weighted

    return absorb


def absorb_by_joining(state, s, v):  # right: largest of both at once, einsum
    largest, total, weighted = state
    new = torch.cat([largest, s], dim=-1).max(dim=-1, keepdim=True).values
    p = torch.exp(s - new)
    old = torch.exp(largest - new)
    return [new, p.sum(dim=-1)[..., None] + old * total, torch.einsum("bhsu,bhuk->bhsk", p, v) + old * weighted]


def absorb_by_where(state, s, v):  # right: -inf is left out by hand
    largest, total, weighted = state
    new = torch.where(s.amax(-1, keepdim=True) > largest, s.amax(-1, keepdim=True), largest)
    p = torch.where(s == -math.inf, 0.0, torch.exp(s - new))
    return (new, total * (largest - new).exp() + p.sum(-1, True), weighted * (largest - new).exp() + p.matmul(v))


def absorb_in_place(state, s, v):
    largest, total, weighted = state
    new = torch.maximum(largest, s.amax(-1, keepdim=True))
    shrink, p = (largest - new).exp(), (s - new).exp()
    return new, total.mul_(shrink).add_(p.sum(-1, keepdim=True)), weighted.mul_(shrink).add_(p @ v)


# ---- build B ----


def _terms(root=True, use_delta=True, alone=False, factor=True, swap=False):
    def block_gradients(q, k, v, s, log_sums, d_out, delta):
        p = s.softmax(-1) if alone else (s - log_sums).exp()
        d_p = d_out @ v.mT
        d_s = (d_p - delta) if use_delta else d_p
        d_s = (p * d_s if factor else d_s) / (math.sqrt(q.shape[-1]) if root else 1)
        d_q, d_k = d_s @ k, d_s.mT @ q
        return (d_k, d_q, p.mT @ d_out) if swap else (d_q, d_k, p.mT @ d_out)

    return block_gradients


def terms_by_einsum(q, k, v, s, log_sums, d_out, delta):  # right
    p = torch.exp(s - log_sums)
    d_p = torch.einsum("bhsk,bhuk->bhsu", d_out, v)
    d_s = p * (d_p - delta) * q.shape[-1] ** -0.5
    d_k = torch.einsum("bhsu,bhsk->bhuk", d_s, q)
    return [torch.einsum("bhsu,bhuk->bhsk", d_s, k), d_k, torch.einsum("bhsu,bhsk->bhuk", p, d_out)]


def terms_scaled_late(q, k, v, s, log_sums, d_out, delta):  # right
    p = (s - log_sums).exp()
    d_s, root = p * (d_out @ v.transpose(-1, -2) - delta), math.sqrt(q.size(-1))
    return d_s @ k / root, d_s.transpose(-1, -2) @ q / root, p.transpose(-1, -2) @ d_out


def terms_by_autograd(q, k, v, s, log_sums, d_out, delta):
    with torch.enable_grad():
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        raw = leaves[0] @ leaves[1].mT / math.sqrt(q.shape[-1])
        out = raw.masked_fill(s == -math.inf, -math.inf).softmax(-1) @ leaves[2]
        return torch.autograd.grad(out, leaves, d_out)


# ---- build C ----


def _zig_zag(pick, refuse=True, error=ValueError, names=True):
    def zig_zag(T, n, rank):
        if refuse and T % (2 * n):
            raise error(f"{T} positions, {2 * n} chunks" if names else "does not fit")
        return pick(T, n, rank)

    return zig_zag


def chunked(T, n, rank):
    parts = torch.arange(T).chunk(2 * n)
    return torch.cat([parts[rank], parts[-1 - rank]])


def by_arithmetic(T, n, rank):  # right: a list
    e = T // (2 * n)
    return [*range(rank * e, rank * e + e), *range(T - (rank + 1) * e, T - rank * e)]


def by_view(T, n, rank):  # right
    return torch.arange(T).view(2 * n, -1)[[rank, 2 * n - 1 - rank]].flatten()


# ---- exercise 1 ----


def _to_heads(pick=1, join=2):
    def to_heads(x, group):
        parts = torch.stack(x.chunk(group.size(), pick))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return torch.cat(received.unbind(), join)

    return to_heads


def heads_by_permute(x, group):  # right
    n, (B, H, s, K) = group.size(), x.shape
    parts = x.view(B, n, H // n, s, K).permute(1, 0, 2, 3, 4).contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received.permute(1, 2, 0, 3, 4).reshape(B, H // n, n * s, K)


def heads_by_gather(x, group):
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, 2).chunk(group.size(), 1)[group.rank()].clone()


def heads_by_view(x, group):  # the right shape by a reshape that mixes positions
    n, (B, H, s, K) = group.size(), x.shape
    parts = torch.stack(x.chunk(n, 1))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received.permute(1, 2, 3, 0, 4).reshape(B, H // n, n * s, K)


# ---- build D ----


def _sizes(change=lambda leaving, arriving: (leaving.sum(1).tolist(), arriving.sum(1).tolist(), arriving)):
    def split_sizes(experts, E, group):
        leaving = torch.bincount(experts.flatten(), minlength=E).view(group.size(), -1)
        arriving = torch.empty_like(leaving)
        dist.all_to_all_single(arriving, leaving, group=group)
        return change(leaving, arriving)

    return split_sizes


def sizes_by_one_hot(experts, E, group):  # right: tensors of sizes
    n = group.size()
    leaving = F.one_hot(experts, E).sum((0, 1))
    arriving = torch.empty_like(leaving)
    dist.all_to_all_single(arriving, leaving, group=group)
    return leaving.view(n, -1).sum(-1), arriving.view(n, -1).sum(-1), arriving.view(n, -1)


def sizes_of_tokens(experts, E, group):
    _, arriving, table = _sizes()(experts, E, group)
    e = E // group.size()
    return [int((experts // e == r).any(1).sum()) for r in range(group.size())], arriving, table


def sizes_by_gather(experts, E, group):
    n, e = group.size(), E // group.size()
    mine = torch.bincount(experts.flatten(), minlength=E)
    parts = [torch.empty_like(mine) for _ in range(n)]
    dist.all_gather(parts, mine, group=group)
    arriving = torch.stack(parts).view(n, n, e)[:, group.rank()]
    return mine.view(n, e).sum(1).tolist(), arriving.sum(1).tolist(), arriving


# ---- build E ----


def _combine(place, weigh=lambda rows, gates: rows * gates[..., None], add=lambda x: x.sum(1)):
    return lambda rows, order, gates: add(weigh(place(rows, order).view(*gates.shape, -1), gates))


def by_inverse(rows, order):
    return rows[order.argsort()]


def combine_by_index_add(rows, order, gates):  # right
    weighted = rows * gates.flatten()[order][:, None]
    out = torch.zeros(len(gates), rows.shape[1], dtype=rows.dtype)
    return out.index_add(0, order // gates.shape[1], weighted)


def combine_by_index_copy(rows, order, gates):  # right
    back = torch.zeros_like(rows).index_copy(0, order, rows).view(*gates.shape, -1)
    return torch.einsum("nkd,nk->nd", back, gates)


# ---- build F ----


def _finish(copies=lambda g, n: g / n, experts=lambda g, n: g / n, reduce_experts=False):
    def finish(replicated, own, group):
        for p in [*replicated, *(own if reduce_experts else [])]:
            dist.all_reduce(p.grad, group=group)
        for p in replicated:
            p.grad = copies(p.grad, group.size())
        for p in own:
            p.grad = experts(p.grad, group.size())

    return finish


def finish_in_one(copies, experts, group):  # right: one all-reduce for all copies
    flat = torch.cat([p.grad.flatten() for p in copies]) / group.size()
    dist.all_reduce(flat, group=group)
    for p, part in zip(copies, flat.split([p.numel() for p in copies]), strict=True):
        p.grad.copy_(part.view_as(p))
    for p in experts:
        p.grad.div_(group.size())


def finish_without_reducing(copies, experts, group):
    for p in [*copies, *experts]:
        p.grad /= group.size()


# ---- exercise 2 ----


def _balance(local=False, factor=True, per_token=False, scale=1.0, detached=False, own_P=False):
    def global_balance(probs, experts, group):
        E, own = probs.shape[1], probs.mean(0)
        f = torch.bincount(experts.flatten(), minlength=E).double() / (len(experts) if per_token else experts.numel())
        both = torch.stack([f, own.detach()])
        if not local:
            dist.all_reduce(both, group=group)
            both = both / group.size()
        f, P = both
        P = own if own_P else P + scale * (own - own.detach())
        loss = (E if factor else 1) * (f * P).sum()
        return loss.detach() if detached else loss

    return global_balance


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def balance_by_function(probs, experts, group):  # right: sums with a backward of their own
    E, n = probs.shape[1], group.size()
    f = F.one_hot(experts, E).double().mean((0, 1))
    both = Summed.apply(torch.cat([f, probs.mean(0)]), group) / n
    loss = E * (both[:E] * both[E:]).sum()
    return loss + (n - 1) * (loss - loss.detach())  # the gradient is averaged later on


def balance_in_two(probs, experts, group):
    E, n, own = probs.shape[1], group.size(), probs.mean(0)
    f, P = F.one_hot(experts, E).double().mean((0, 1)), own.detach().clone()
    dist.all_reduce(f, group=group)
    dist.all_reduce(P, group=group)
    return E * (f / n * (P / n + own - own.detach())).sum()


# ---- exercise 3 ----


def kept_by_cumsum(experts, E, capacity):  # right
    chosen = experts.reshape(-1)
    counts = torch.nn.functional.one_hot(chosen, E).cumsum(0)
    return (counts[torch.arange(len(chosen)), chosen] <= capacity).reshape(experts.shape)


def kept_by_sorting(experts, E, capacity):  # right
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    first = torch.searchsorted(chosen[order].contiguous(), torch.arange(E))
    keep = torch.empty(len(chosen), dtype=torch.bool)
    keep[order] = torch.arange(len(chosen)) - first[chosen[order]] < capacity
    return keep.view_as(experts)


def kept_from_the_back(experts, E, capacity):
    return kept_by_cumsum(experts.flip(0, 1), E, capacity).flip(0, 1)


def kept_choice_by_choice(experts, E, capacity):
    return kept_by_cumsum(experts.T.contiguous(), E, capacity).T.contiguous()


REJECTED = {
    "absorb": {
        "forgets to shrink": (_absorb(shrink_total=False, shrink_weighted=False), "without shrinking what was there"),
        "shrinks only the values": (_absorb(shrink_total=False), "`total` after block 2 should be"),
        "shrinks only the sum": (_absorb(shrink_weighted=False),
            "that is without shrinking what was there, by exp(old largest -"),
        "the block's own largest": (_absorb(own=True), "`largest` after block 2 should be the largest score so far"),
        "a mean": (_absorb(mean=True), "a mean over keys; add up"),
        "divides each time": (_absorb(divide=True), "divided by the total already"),
        "no largest": (_absorb(plain=True), "`largest` after block 1 should be"),
        "in place": (absorb_in_place, "`total` was changed; leave it as it is"),
        "two of three": (lambda state, s, v: _absorb()(state, s, v)[:2],
            "not enough values to unpack (expected 3, got 2)"),
    },
    "block_gradients": {
        "no root": (_terms(root=False), "without the 1 / sqrt(K)"),
        "no delta": (_terms(use_delta=False), "without delta"),
        "this block's softmax": (_terms(alone=True), "with a softmax over this block alone"),
        "no factor P": (_terms(factor=False), "without the factor P"),
        "autograd": (terms_by_autograd, "normalised over this block alone"),
        "swapped": (_terms(swap=True), "d_q should be this block's part"),
        "two of three": (lambda *given: _terms()(*given)[:2], "not enough values to unpack (expected 3, got 2)"),
    },
    "zig_zag": {
        "in order": (_zig_zag(lambda T, n, r: torch.arange(T).chunk(n)[r]),
                     "that is one stretch; two chunks are asked for"),
        "late first": (_zig_zag(lambda T, n, r: chunked(T, n, r).roll(T // (2 * n))), "not in ascending order"),
        "mirrored": (_zig_zag(lambda T, n, r: chunked(T, n, n - 1 - r)),
                     "of rank 0 should be [0, 1, 6, 7], not [2, 3, 4, 5]"),
        "striped": (_zig_zag(lambda T, n, r: torch.arange(r, T, n)),
                    "of rank 0 should be [0, 1, 6, 7], not [0, 2, 4, 6]"),
        "refuses nothing": (_zig_zag(lambda T, n, r: chunked(T, n, r) if T % (2 * n) == 0 else [0], refuse=False),
                            "raise a ValueError that names 12 and 8, and do not return the"),
        "no numbers": (_zig_zag(chunked, names=False),
                       "raise a ValueError that names 12 and 8; yours says does not fit"),
    },
    "to_heads": {
        "gathers all": (heads_by_gather, "one all_to_all does"),
        "splits positions": (_to_heads(pick=2, join=1), "should have the shape"),
        "joins heads": (_to_heads(join=1), "should have the shape"),
        "mixes positions": (heads_by_view, "positions out of order"),
        "keeps its own": (lambda x, group: x, "should have the shape"),
    },
    "split_sizes": {
        "by expert": (_sizes(lambda a, b: (a.flatten().tolist(), b.sum(1).tolist(), b)),
                      "that is for each expert; add up the 3 experts of a rank"),
        "tokens": (sizes_of_tokens, "one that chooses two experts travels twice"),
        "what leaves": (_sizes(lambda a, b: (a.sum(1).tolist(), a.sum(1).tolist(), b)),
            "that is what leaves; what arrives"),
        "swapped": (_sizes(lambda a, b: (b.sum(1).tolist(), a.sum(1).tolist(), b)), "that is what arrives"),
        "table of what leaves": (_sizes(lambda a, b: (a.sum(1).tolist(), b.sum(1).tolist(), a)), "that is what leaves"),
        "gathers all": (sizes_by_gather, "one all_to_all of 3 integers does"),
        "a flat table": (_sizes(lambda a, b: (a.sum(1).tolist(), b.sum(1).tolist(), b.flatten())),
            "arriving_ne should have the shape"),
    },
    "combine": {
        "as sent": (_combine(lambda rows, order: rows), "in the order in which rows were sent"),
        "the order again": (_combine(lambda rows, order: rows[order]),
            "that is rows[order_R], the order once more; its inverse is"),
        "no gates": (_combine(by_inverse, weigh=lambda rows, gates: rows), "without gates"),
        "mean": (_combine(by_inverse, add=lambda x: x.mean(1)), "a mean over the choices"),
        "no gradient": (lambda *given: combine_by_index_copy(*given).detach(), "no gradient reaches rows or gates"),
        "gates without gradient": (lambda r, o, g: combine_by_index_copy(r, o, g.detach()), "the gradient of gates_Nk"),
    },
    "finish": {
        "experts left alone": (_finish(experts=lambda g, n: g),
            "the exchange has summed over the losses of all 3 ranks, so divide"),
        "experts as copies": (_finish(reduce_experts=True), "other ranks' experts are other experts"),
        "sums": (_finish(copies=lambda g, n: g), "the sum; each rank's loss is a mean"),
        "twice": (_finish(experts=lambda g, n: g / n**2), "divided by 3 twice"),
        "nothing reduced": (finish_without_reducing, "add the ranks' gradients up"),
    },
    "global_balance": {
        "local": (_balance(local=True), "that is this rank's tokens alone"),
        "no factor": (_balance(factor=False), "that is without the factor E"),
        "f sums to k": (_balance(per_token=True), "f should sum to 1 over the experts"),
        "own P": (_balance(own_P=True), "f is of all ranks, P of this one"),
        "an n-th": (_balance(scale=1 / 3), "that is an n-th of it"),
        "n times": (_balance(scale=3.0), "that is 3 times as much"),
        "no gradient": (_balance(detached=True), "has no gradient"),
        "two calls": (balance_in_two, "one all_reduce of 10 numbers does"),
    },
    "kept": {
        "all": (lambda x, E, C: torch.ones_like(x, dtype=torch.bool), "an expert keeps"),
        "one too few": (lambda x, E, C: kept_by_cumsum(x, E, C - 1), "more would fit"),
        "from the back": (kept_from_the_back, "earlier tokens first"),
        "first choices first": (kept_choice_by_choice, "a token's first choice before its second"),
        "numbers": (lambda x, E, C: kept_by_cumsum(x, E, C).long(), "return a bool tensor"),
    },
}  # fmt: skip
RIGHT = {
    "absorb": [absorb_by_joining, absorb_by_where],
    "block_gradients": [terms_by_einsum, terms_scaled_late],
    "zig_zag": [_zig_zag(by_arithmetic), _zig_zag(by_view)],
    "to_heads": [_to_heads(), heads_by_permute],
    "split_sizes": [_sizes(), sizes_by_one_hot],
    "combine": [combine_by_index_add, combine_by_index_copy],
    "finish": [_finish(), finish_in_one],
    "global_balance": [_balance(), balance_by_function],
    "kept": [kept_by_cumsum, kept_by_sorting],
}


class TestAnswers(AnswersOfRanks):
    lesson, checks, rejected, right = "09_context_and_experts", checks, REJECTED, RIGHT
    worlds = (1, 2, 4)
