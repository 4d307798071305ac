"""Checks of lesson 09: a block in an online softmax, the ring, a block's gradients, zig-zag positions, positions to
heads; split sizes, combine, experts' gradients, a bias for balance, a global balancing loss, capacity.

All tensors are float64 on the CPU, where the trial group can send. Each rank's inputs are drawn from seeds, so that
every rank can compute the right answer without communicating.
"""

import math
from itertools import product

import torch

from manyhands.checks import Wrong, exercise
from manyhands.checks.drawn import CLOSE, generator, luck, normal, sizes
from manyhands.checks.expect import (
    count,
    expect_equal,
    expect_number,
    expect_refusal,
    expect_scalar,
    expect_tensor,
    expect_traffic,
)
from manyhands.checks.trial import groups_of
from manyhands.measure import wire

STATE = {
    "largest": "the largest score so far",
    "total": "the sum of exp(score - largest) over all keys so far",
    "weighted": "the sum of exp(score - largest) times the values over all keys so far",
}
MANY = 200_000  # tokens in exercise 3, where a loop over them would take seconds


@exercise("A", "take in a block")
def absorb(answer, ranks=None):
    """`answer(state, s_BHsu, v_BHuK)` is the state (largest, total, weighted) after one more block of keys."""
    B, H, (S, K) = 2, 2, sizes(1, 2, 3, 7)
    s, v = [normal(220 + i, B, H, S, i + 2) for i in range(3)], [normal(230 + i, B, H, i + 2, K) for i in range(3)]
    masked = torch.full_like(s[0], -math.inf)
    for case, blocks in {
        "three blocks": [(s[0], v[0]), (s[1] + 1, v[1]), (s[2] - 1, v[2])],
        "scores near 1,000": [(s[2] + 900, v[2]), (s[0] + 1000, v[0])],
        "a first block that is -inf throughout": [(masked, v[0]), (s[1], v[1])],
        "a second block that is -inf throughout": [(s[1], v[1]), (masked, v[0])],
    }.items():
        least = torch.full((B, H, S, 1), torch.finfo(torch.float64).min, dtype=torch.float64)
        state = least, torch.zeros_like(least), torch.zeros(B, H, S, K, dtype=torch.float64)
        for nth, (scores, values) in enumerate(blocks, 1):
            largest, total, weighted = found = answer(state, scores, values)
            wrong = _mistaken_states(state, scores, values)
            state = _absorbed(state, scores, values)
            for i, (what, it_is) in enumerate(STATE.items()):
                slips = {why: mistaken[i] for why, mistaken in wrong.items()}
                expect_tensor(found[i], state[i], f"{case}, `{what}` after block {nth}", slips, it_is)


def _absorbed(state, s, v):
    largest, total, weighted = state
    new = torch.maximum(largest, s.amax(-1, keepdim=True))
    shrink, p = (largest - new).exp(), (s - new).exp()
    return new, total * shrink + p.sum(-1, keepdim=True), weighted * shrink + p @ v


def _mistaken_states(state, s, v):
    """Return {mistake: the state that it gives}."""
    largest, total, weighted = state
    new, right_total, right_weighted = _absorbed(state, s, v)
    shrink, block = (largest - new).exp(), s.amax(-1, keepdim=True)
    p, own, early = (s - new).exp(), torch.nan_to_num((s - block).exp()), (s - largest).exp()

    def after(p, shrink, largest=new):
        return largest, total * shrink + p.sum(-1, keepdim=True), weighted * shrink + p @ v

    return {
        "that is without shrinking what was there": after(p, 1),
        "`shrink` is exp(old largest - new largest), not the other way round": after(p, 1 / shrink),
        "that is with the old largest subtracted from this block's scores, not the new one": after(early, shrink),
        "that is with this block's own largest score subtracted, not the largest so far": after(own, shrink, block),
        "that is divided by the total already": (new, right_total, right_weighted / right_total),
        "that is a mean over keys; add up": (new, total * shrink + p.mean(-1, keepdim=True), right_weighted),
    }


@exercise("B", "the ring")
def ring_forward(answer, ranks):
    """`answer(q, k, v, at, group)` is full attention at this rank's positions, its log of sums; n - 1 messages."""
    B, H, (S, K) = 2, 2, sizes(9, 2, 2, 7)
    for group, members, where in groups_of(ranks):
        n, i = len(members), group.rank()
        q, k, v = (normal(240 + nth + 10 * members[0], B, H, n * S, K) for nth in range(3))
        at = list(torch.randperm(n * S, generator=generator(247)).chunk(n))  # a layout that is neither of the lesson's
        given = [x[:, :, at[i]].clone() for x in (q, k, v)]

        def over(blocks, q=given[0], k=k, v=v, at=at, i=i):
            """Return (attention, log of sums) over blocks: (positions for the mask, owner of keys and values)."""
            told, keys, values = zip(*((at[a], k[:, :, at[b]], v[:, :, at[b]]) for a, b in blocks), strict=True)
            s = (q @ torch.cat(keys, 2).mT / math.sqrt(q.shape[-1])).masked_fill(
                torch.cat(told)[None] > at[i][:, None], -math.inf
            )
            return s.softmax(-1) @ torch.cat(values, 2), s.logsumexp(-1, keepdim=True)

        owners = [(i - step) % n for step in range(n)]
        wanted, log_sums = over([(owner, owner) for owner in owners])
        mistaken = {
            "that is over this rank's own keys alone": [(i, i)],
            "every block is masked as if it were this rank's own; the block of step i is from i places behind": (
                [(i, owner) for owner in owners]
            ),
            "blocks are masked as if they came from the rank ahead; they come from behind": (
                [((i + step) % n, owner) for step, owner in enumerate(owners)]
            ),
            "every block is masked as if it came from one place behind; that of step i is from i places behind": (
                [((i - 1) % n, owner) for owner in owners]
            ),
            "that is with this rank's own keys in every step; take what arrives": [(owner, i) for owner in owners],
        }
        with wire.watch() as seen:
            found = answer(*given, at, group)
        for nth, (what, right) in enumerate((("the attention", wanted), ("the log of the sums", log_sums))):
            slips = {why: over(blocks)[nth] for why, blocks in mistaken.items()}
            expect_tensor(found[nth], right, f"{where}{what} of this rank's queries", slips, "that over all keys")
        case = f"{where}the attention is right, but the"
        expect_equal(seen.messages, n - 1, f"{case} messages that this rank sends, n - 1 on {count(n, 'rank')},")
        expect_equal(seen.sent_bytes, 2 * (n - 1) * given[0].nbytes, f"{case} bytes that it sends")


@exercise("C", "one block's gradients")
def block_gradients(answer, ranks=None):
    """`answer(q, k, v, s, log_sums, d_out, delta)` are the block's part of (d_q, d_k, d_v) under the whole softmax."""
    for H, S, K in ((2, 3, 5), sizes(2, 3, 2, 9)):  # heads, queries, numbers per head
        q, d_out = normal(201, 2, H, S, K), normal(202, 2, H, S, K)
        keys, values = normal(203, 2, H, 2 * S, K), normal(204, 2, H, 2 * S, K)
        q_at, k_at = torch.arange(S) + S, torch.arange(2 * S)
        s = (q @ keys.mT / math.sqrt(K)).masked_fill(k_at[None] > q_at[:, None], -math.inf)
        log_sums, p = s.logsumexp(-1, keepdim=True), s.softmax(-1)
        delta = (d_out * (p @ values)).sum(-1, keepdim=True)
        for case, here in (("the block of the past", slice(0, S)), ("the block on the diagonal", slice(S, 2 * S))):
            given = [x.clone() for x in (q, keys[:, :, here], values[:, :, here], s[..., here], log_sums, d_out, delta)]
            d_q, d_k, d_v = found = answer(*given)
            (_, wanted), *wrong = _block_gradients(*given).items()
            for i, what in enumerate(("d_q", "d_k", "d_v")):
                slips = {why: mistaken[i] for why, mistaken in wrong}
                expect_tensor(found[i], wanted[i], f"{case}, {what}", slips, "this block's part")


def _block_gradients(q, k, v, s, log_sums, d_out, delta):
    """Return {"" or a mistake: the gradients that it gives}, the right ones first."""
    p, d_p, root = (s - log_sums).exp(), d_out @ v.mT, math.sqrt(q.shape[-1])
    alone = s.softmax(-1)
    own_delta = (alone * d_p).sum(-1, keepdim=True)
    ways = {
        "": (p, p * (d_p - delta) / root),
        "that is without the 1 / sqrt(K) of the scores": (p, p * (d_p - delta)),
        "that is divided by K, not by its square root": (p, p * (d_p - delta) / root**2),
        "that is with the opposite sign": (p, p * (delta - d_p) / root),
        "that is without delta: every probability pulls at the others": (p, p * d_p / root),
        "that is normalised over this block alone": (alone, alone * (d_p - own_delta) / root),
        "that is with a softmax over this block alone": (alone, alone * (d_p - delta) / root),
        "that is without the factor P in dS": (p, (d_p - delta) / root),
    }  # fmt: skip
    return {why: (d_s @ k, d_s.mT @ q, p.mT @ d_out) for why, (p, d_s) in ways.items()}


@exercise("D", "zig-zag positions")
def zig_zag(answer, ranks=None):
    """`answer(T, n, rank)` are chunk `rank` of 2n and its mirror image, or a ValueError with both numbers."""
    for T, n in ((8, 1), (8, 2), (16, 4), (24, 2), (48, 8), (36, 3)):
        chunks = torch.arange(T).chunk(2 * n)
        for rank in range(n):
            early, late = chunks[rank], chunks[2 * n - 1 - rank]
            slips = {
                "the positions are right, but not in ascending order": torch.cat((late, early)).tolist(),
                "that is one stretch; two chunks are asked for": torch.arange(T).chunk(n)[rank].tolist(),
            }
            case = f"of {T} positions on {count(n, 'rank')} those of rank {rank}"
            expect_equal(answer(T, n, rank), torch.cat((early, late)).tolist(), case, slips)
    for T, n in ((12, 4), (10, 4), (7, 2)):
        case = f"{T} positions on {n} ranks do not split into {2 * n} chunks"
        expect_refusal(lambda T=T, n=n: answer(T, n, 0), case, T, (2 * n, n))


@exercise(1, "positions to heads")
def to_heads(answer, ranks):
    """`answer(x_BHsK, group)` is [B, h, T, K]: all positions of this rank's heads, for one all-to-all."""
    B, S, K = sizes(3, 3, 2, 7)
    for (group, members, where), each in product(groups_of(ranks), (1, 2)):  # heads of a rank
        n, rank = len(members), group.rank()
        full = normal(210 + each + 10 * members[0], B, each * n, S * n, K)
        given = full.chunk(n, 2)[rank].clone()
        with wire.watch() as seen:
            found = answer(given, group)
        wanted = full.chunk(n, 1)[rank]
        slips = {
            "those are its heads, positions out of order": torch.stack(wanted.chunk(n, 2), dim=3).flatten(2, 3),
            "those are another rank's heads; rank r has heads r·h to (r+1)·h - 1": full.chunk(n, 1)[(rank + 1) % n],
        }
        case, it_is = f"{where}with {each * n} heads what to_heads returns", "all positions of this rank's heads"
        expect_tensor(found, wanted, case, slips, it_is)
        expect_traffic(seen, f"{case} is right", "one all_to_all is enough", calls=1, volume=given.nbytes)


def _choices(seed, N, E, k):
    """k different experts for each token, the low ones popular; [N, k]."""
    k = min(k, E)
    return (torch.rand(N, E, generator=generator(seed)) - torch.arange(E) / (3 * E)).topk(k).indices


@exercise("E", "the sizes of the parts")
def split_sizes(answer, ranks):
    """`answer(experts_Nk, E, group)`: rows to each rank and from each, and [n, e] of the latter."""
    N = luck(4).randint(5, 9)
    for (group, members, where), (e, k) in product(groups_of(ranks), ((1, 1), (3, 2))):
        n, rank, E = len(members), group.rank(), e * len(members)
        choices = [_choices(300 + 10 * k + r, N + r, E, k) for r in members]  # a different N on each rank
        sent = torch.stack([torch.bincount(c.flatten(), minlength=E) for c in choices]).view(n, n, e)
        with wire.watch() as seen:
            to_each, from_each, arriving_ne = answer(choices[rank], E, group)
        case = f"{where}with {count(E, 'expert')} on {count(n, 'rank')} and k = {k}"
        if isinstance(arriving_ne, torch.Tensor) and (arriving_ne.abs() > MANY).any():
            raise Wrong(f"{case} no counts have come into arriving_ne; all_to_all_single(output, input) fills `output`")
        leaving, arriving = sent[rank].sum(1).tolist(), sent[:, rank].sum(1).tolist()
        slips = {
            f"that is for each expert; add up the {e} experts of a rank": sent[rank].flatten().tolist(),
            "those are tokens, but one that chooses two experts travels twice": (
                [int((choices[rank] // e == r).any(1).sum()) for r in range(n)]
            ),
            "that is what arrives; the first list is what leaves": arriving,
        }
        expect_equal(to_each, leaving, f"{case} the rows to each rank", slips)
        slips = {
            "that is what leaves; only the other ranks know what arrives, so exchange the counts": leaving,
            "those are from all ranks for each of my experts; add up by rank": sent[:, rank].sum(0).tolist(),
        }
        expect_equal(from_each, arriving, f"{case} the rows from each rank", slips)
        expect_tensor(arriving_ne, sent[:, rank], f"{case} arriving_ne", {"that is what leaves": sent[rank]})
        cure = f"one all_to_all of {E} integers does"
        expect_traffic(seen, f"{case} the sizes are right", cure, calls=1, volume=8 * E)


@exercise("F", "combine")
def combine(answer, ranks=None):
    """`answer(rows_RD, order_R, gates_Nk)` is [N, D]: each token's results times their gates, with both gradients."""
    N, D = sizes(5, 2, 2, 8)
    for k in (2, 1, 3):
        order = _choices(330 + k, N, 4, k).flatten().argsort(stable=True)
        rows, gates = normal(331, N * k, D), normal(332, N, k + 1).softmax(-1)[:, :k]
        leaves = [x.clone().requires_grad_() for x in (rows, gates)]
        found = answer(leaves[0], order.clone(), leaves[1])
        back = torch.empty_like(rows)
        back[order] = rows  # choice by choice

        def weighted(rows, gates=gates):
            return (rows.view(*gates.shape, -1) * gates[..., None]).sum(1)

        slips = {
            "they are in the order in which rows were sent; put row j at choice order_R[j] first": weighted(rows),
            "that is rows[order_R], the order once more; its inverse is needed": weighted(rows[order]),
            "that is without gates": back.view(N, k, D).sum(1),
            "that is a mean over the choices; add them up": weighted(back) / k,
        }
        case, it_is = f"for k = {k} what combine returns", "each token's results times their gates, added up"
        expect_tensor(found, weighted(back), case, slips, it_is)
        if not found.requires_grad:
            raise Wrong(f"{case} is right, but no gradient reaches rows or gates")
        use = normal(333, N, D)
        d_rows, d_gates = torch.autograd.grad(found, leaves, use, allow_unused=True)
        per_choice = use.repeat_interleave(k, 0)
        wanted_rows, wanted_gates = (per_choice * gates.reshape(-1, 1))[order], (per_choice * back).sum(1).view(N, k)
        expect_tensor(d_rows, wanted_rows, f"for k = {k} the gradient of rows_RD", it_is="gate times gradient")
        expect_tensor(d_gates, wanted_gates, f"for k = {k} the gradient of gates_Nk", it_is="result times gradient")


@exercise("G", "finish the gradients")
def finish(answer, ranks):
    """`answer(copies, experts, group)` averages the copies' gradients and divides the experts' by n, unsent."""
    (a, b, c), world = sizes(6, 3, 2, 6), ranks.world_size
    shapes = ((a, b), (c,), (a, b, c), (a, c, b))
    for group, members, where in groups_of(ranks):
        n, rank = len(members), group.rank()
        gradients = [[normal(340 + 10 * r + i, *shape) for i, shape in enumerate(shapes)] for r in members]
        parameters = [torch.nn.Parameter(normal(345 + i, *shape)) for i, shape in enumerate(shapes)]
        for p, gradient in zip(parameters, gradients[rank], strict=True):
            p.grad = gradient.clone()
        with wire.watch() as seen:
            answer(parameters[:2], parameters[2:], group)
        for i, p in enumerate(parameters):
            own, total = gradients[rank][i], sum(of_rank[i] for of_rank in gradients)
            if i < 2:
                what, wanted, it_is = f"copy {i}", total / n, "the mean over the ranks"
                slips = {
                    "that is the sum; each rank's loss is a mean over its own tokens, so divide by the ranks": total,
                    "that is this rank's own; the others' tokens are missing": own,
                    "that is this rank's own divided by the ranks; add the ranks' gradients up": own / n,
                    "that is divided by the ranks twice": total / n**2,
                }
            else:
                what, wanted, it_is = f"expert weight {i - 2}", own / n, f"its own divided by {n}"
                slips = {
                    f"the exchange has summed over the losses of all {n} ranks, so divide": own,
                    "that is the mean over the ranks, but other ranks' experts are other experts": total / n,
                    "that is the sum over the ranks, but other ranks' experts are other experts": total,
                    f"that is divided by {n} twice": own / n**2,
                }
            slips = {f"that is divided by all {world} ranks, and the group has {n}": n * wanted / world} | slips
            expect_tensor(p.grad, wanted, f"{where}p.grad of {what}", slips, it_is)
        volume = 2 * sum(p.nbytes for p in parameters[:2])
        expect_traffic(seen, "all gradients are right", "one all_reduce per copy is enough", calls=2, volume=volume)


@exercise("H", "balance by a bias")
def bias(answer, ranks=None):
    """`answer` is (route, nudge): the bias chooses and does not weigh; it moves by `speed` towards even shares."""
    route, nudge = answer
    N, D, E = sizes(10, 3, 5, 12)
    for k in (1, 2, 3):
        x, router, bias_E = normal(370 + k, N, D), normal(374, E, D), normal(375, E) / 2
        probs = (x @ router.T).softmax(-1)
        gates, experts, all_probs = route(x, router, k, bias_E)
        wanted = (probs + bias_E).topk(k).indices
        slips = {
            "that is without the bias": probs.topk(k).indices,
            "that is with the bias subtracted; add it": (probs - bias_E).topk(k).indices,
            "those are the experts with the lowest": (-probs - bias_E).topk(k).indices,
        }
        case = f"for k = {k} the chosen experts"
        expect_tensor(experts, wanted, case, slips, "those with the largest probability + bias")
        chosen, biased = probs.gather(1, wanted), (probs + bias_E).gather(1, wanted)
        slips = {
            "they come from probability + bias; the bias only chooses": biased / biased.sum(-1, keepdim=True),
            "they do not sum to 1; divide by the sum of the chosen": chosen,
            "those are the largest probabilities, not those of the chosen": (
                probs.topk(k).values / probs.topk(k).values.sum(-1, keepdim=True)
            ),
        }
        it_is = "the chosen experts' probabilities, divided by their sum"
        expect_tensor(gates, chosen / chosen.sum(-1, keepdim=True), f"for k = {k} the gates", slips, it_is)
        expect_tensor(all_probs, probs, f"for k = {k} the third result", it_is="the probabilities without the bias")
    share, speed = normal(376, E).softmax(-1), 1 / 8
    step = torch.sign(1 / E - share)
    slips = {
        "that moves the wrong way; an expert with more than its share should become less likely": bias_E - speed * step,
        "that moves by the distance; each step is `speed`, up or down": bias_E + speed * (1 / E - share),
        "that forgets the old bias": speed * step,
        "every bias has moved up; compare with the even share, 1 / E": bias_E + speed,
        "that is without the speed": bias_E + step,
    }
    expect_tensor(nudge(bias_E, share, speed), bias_E + speed * step, "the new bias", slips, "the old one ± speed")


@exercise(2, "a balancing loss that does not depend on the number of ranks")
def global_balance(answer, ranks):
    """`answer(probs_NE, experts_Nk, group)` is E · sum f P of all tokens; averaged gradients are one process's."""
    k, E, N = sorted(sizes(7, 3, 2, 9))
    for group, members, where in groups_of(ranks):
        n, rank, what = len(members), group.rank(), f"{where}the loss"
        probs = [normal(350 + r, N, E).add(r * torch.arange(E) / 4).softmax(-1) for r in members]
        chosen = [p.topk(k).indices for p in probs]
        shares = [torch.bincount(c.flatten(), minlength=E).double() / (N * k) for c in chosen]
        means = [p.mean(0) for p in probs]
        f, P = sum(shares) / n, sum(means) / n
        given = probs[rank].clone().requires_grad_()
        with wire.watch() as there:
            loss = answer(given, chosen[rank], group)
        wanted = (E * (f * P).sum()).item()
        slips = {
            "that is this rank's tokens alone": E * shares[rank] @ means[rank],
            "that is the mean of the ranks' own losses": E * sum(s @ m for s, m in zip(shares, means, strict=True)) / n,
            "that is without the factor E": wanted / E,
            "f should sum to 1 over the experts, not to k": k * wanted,
            "f is of all ranks, P of this one": E * f @ means[rank],
        }
        expect_number(expect_scalar(loss, what).detach(), wanted, what, slips=slips, rel=CLOSE)
        with wire.watch() as back:
            (gradient,) = torch.autograd.grad(loss, given, allow_unused=True)
        slope, own_slope = (E * f / N).expand(N, E), (E * shares[rank] / N).expand(N, E)
        slips = {
            f"that is an n-th of it, {n} ranks: gradients are averaged over ranks afterwards": slope / n,
            f"that is {n} times as much: gradients are averaged over ranks afterwards": slope * n,
            "that is with this rank's own f; f is of all ranks": own_slope,
        }
        expect_tensor(gradient, slope, "the gradient of probs_NE", slips, "E · f / N in each row", CLOSE)
        expect_traffic(there, f"{what} is right", f"one all_reduce of {2 * E} numbers does", calls=1, payload=16 * E)
        expect_traffic(back, "the gradient is right", "backward needs no call", calls=0)


@exercise(3, "capacity", timeout_s=10.0)
def kept(answer, ranks=None):
    """`answer(experts_Nk, E, capacity)`: bool [N, k], the first `capacity` choices of each expert."""
    drawn = sorted(sizes(8, 4, 1, 12))[::-1]
    cases = [(_choices(360 + k, N, E, k), E, C) for N, E, k, C in ((6, 3, 1, 2), (9, 4, 2, 3), (5, 8, 2, 1), drawn)]
    cases += [(torch.zeros(4, 1, dtype=torch.int64), 2, C) for C in (4, 0)]
    cases += [(_choices(369, MANY, 8, 2), 8, MANY // 8)]
    for experts, E, capacity in cases:
        found = answer(experts, E, capacity)
        slips = {
            "an expert keeps at most `capacity` rows": torch.ones_like(experts, dtype=torch.bool),
            "one more row of each expert would fit": _kept(experts, E, capacity - 1),
            "earlier tokens come first": _kept(experts.flip(0, 1), E, capacity).flip(0, 1),
            "earlier tokens first; of one token its first choice before its second": _kept(experts.T, E, capacity).T,
        }
        case = f"{len(experts)} tokens, {E} experts, capacity {capacity}: what is kept"
        expect_tensor(found, _kept(experts, E, capacity), case, slips)


def _kept(experts, E, capacity):
    chosen = experts.flatten()
    place = torch.nn.functional.one_hot(chosen, E).cumsum(0).gather(1, chosen[:, None])[:, 0]
    return (place <= capacity).view_as(experts)
