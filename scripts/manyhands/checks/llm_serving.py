"""Checks of lesson 14: a cache in three steps, its bytes, the time of a call, moving a cache to another rank; in MORE
top-k and top-p, accepting draft tokens, users, shared blocks, a fair gate.

Only `hand_over` communicates. In the others every rank judges the answer on the same numbers, in float64 on the CPU.
"""

import math
import statistics

import torch
import torch.nn.functional as F

from manyhands.checks import FACT, Wrong, exercise
from manyhands.checks.drawn import luck, normal, sizes
from manyhands.checks.expect import count, expect_equal, expect_number, expect_tensor, number, truth
from manyhands.checks.witness import shown
from manyhands.measure import wire

CLOSE = 1e-9


FOUR = (0.4, 0.3, 0.2, 0.1)
DICE = (  # probabilities, top_k, top_p
    (FOUR, None, 0.6), (FOUR, None, 1.0), (FOUR, 3, 1.0), (FOUR, 9, 0.95), (FOUR, 2, 0.56), ((0.2, 0.3, 0.5), 3, 0.45),
)  # fmt: skip


@exercise("G", "what is kept")
def kept(answer, ranks=None):
    """`answer(p_V, top_k, top_p)` is top-k, then top-p of the rest, with sum 1, in the order of the tokens."""
    for p, top_k, top_p in (*DICE, *_some_dice()):
        p_V, right_V = torch.tensor(p, dtype=torch.float64), _kept(p, top_k, top_p)
        found_V = answer(p_V, top_k, top_p)
        undivided_V = torch.where(right_V > 0, p_V, 0.0)
        slips = {
            "the token that crosses the line is missing": _kept(p, top_k, top_p, crossing=False),
            f"the right tokens, but their sum is {undivided_V.sum():.4g}; divide by it": undivided_V,
            "top-p is of what top-k has left, whose sum is less than 1": _kept(p, top_k, top_p, of_rest=False),
            "the right probabilities at other places; put them back": right_V.sort(descending=True).values,
        }
        case = f"of {list(p)} with top_k={top_k} and top_p={top_p} what is kept"
        expect_tensor(found_V, right_V, case, slips, close=CLOSE)


def _some_dice():
    draw = luck(14)
    for _ in range(6):
        weights = draw.sample(range(1, 60), draw.randint(3, 9))
        p = [w / sum(weights) for w in weights]
        yield p, draw.choice((None, draw.randint(1, len(p)))), draw.uniform(0.2, 0.95)


def _kept(p, top_k, top_p, crossing=True, of_rest=True):
    """Return the right answer and two wrong ones: without the token that crosses the line, and top-p of everything."""
    order = sorted(range(len(p)), key=lambda i: -p[i])[:top_k]
    whole = sum(p[i] for i in order) if of_rest else 1.0
    found, before = torch.zeros(len(p), dtype=torch.float64), 0.0
    for i in order:
        if top_p == 1 or (before < top_p * whole - CLOSE if crossing else before + p[i] <= top_p * whole + CLOSE):
            found[i] = p[i]
        before += p[i]
    return found / found.sum() if found.sum() else found


class Memory(dict):
    """A dict that is passed to an answer without being copied, whatever it contains."""


@exercise("A", "remember")
def remember(answer, ranks=None):
    """`answer(cache, layer, k, v)` is all keys and values so far, which `cache` then holds."""
    for pieces, (B, H, E) in (((5, 1, 2), (2, 3, 4)), ((4, 3, 2), sizes(13, 3, 2, 9))):
        full = normal(13 + E, 2, 2, B, H, 9, E)  # two layers' k, v
        cache, start = Memory(), 0
        for size in pieces:
            stop = start + size
            for layer in range(2):
                found = answer(cache, layer, *full[layer, :, :, :, start:stop].clone())
                case = f"returned for {count(size, 'new position')} after {start} in layer {layer}"
                _judge_pair(found, full[layer, :, :, :, :stop], size, case, full[0, :, :, :, :stop] if layer else None)
            start = stop
            for layer in range(2):
                if layer not in cache:
                    raise Wrong(f"after {start} positions cache[{layer}] is empty: store what you return")
                _judge_pair(
                    cache[layer], full[layer, :, :, :, :start], size, f"in cache[{layer}] after {start} positions"
                )


def _judge_pair(pair, wanted, size, where, other=None):
    """Raise Wrong unless `pair` is these keys and values [2, B, H, S, E]; the last `size` positions are new."""
    for i, (name, part) in enumerate(zip(("keys", "values"), pair, strict=True)):
        latest = wanted[i, :, :, -size:]
        slips = {
            "those are the new ones alone": latest,
            "all are there, but the new ones stand first": torch.cat((latest, wanted[i, :, :, :-size]), 2),
            "keys and values have changed places": wanted[1 - i],
            f"they begin with the old {('values', 'keys')[i]}": torch.cat((wanted[1 - i, :, :, :-size], latest), 2),
            "the new ones are missing": wanted[i, :, :, :-size],
        }
        if other is not None:
            slips["each layer has keys and values of its own"] = torch.cat((other[i], latest), 2)
        expect_tensor(part, wanted[i], f"the {name} {where}", slips, f"those of all {wanted.shape[3]}, in order", CLOSE)


@exercise("B", "who may look where")
def attend(answer, ranks=None):
    """`answer(cache, layer, q, k, v)` is causal attention over all positions so far, which `cache` then holds."""
    for pieces, (B, H, E) in (((5, 1, 1), (2, 3, 4)), ((1, 1), (1, 2, 3)), ((4, 3, 2), sizes(14, 3, 2, 9))):
        full = normal(14 + E, 2, 3, B, H, 9, E)  # two layers' q, k, v
        cache, start = Memory(), 0
        for size in pieces:
            for layer in range(2):
                _judge_attend(answer, cache, layer, full, start, start + size)
            start += size
        for layer in range(2):
            where = f"in cache[{layer}] after {start} positions"
            _judge_pair(cache[layer], full[layer, 1:, :, :, :start], size, where)


def _judge_attend(answer, cache, layer, full, start, stop):
    attention = F.scaled_dot_product_attention
    new = full[layer, :, :, :, start:stop]
    (_, old_k, old_v), (q, k, v) = full[0, :, :, :, :stop], full[layer, :, :, :, :stop]
    new_q, all_open = q[:, :, start:], torch.ones(stop - start, stop, dtype=torch.bool)
    mask, after = all_open.tril(start), all_open.tril(start + 1)

    def by(mask_TS, **how):
        return attention(new_q, k, v, attn_mask=mask_TS, **how)

    both_k, both_v = torch.cat((old_k, k), 2), torch.cat((old_v, v), 2)
    both_open = torch.cat((all_open, mask), 1)
    found = answer(cache, layer, *new.clone())
    slips = {
        "each new position sees only the new ones: put the old in front": attention(*new, is_causal=True),
        f"query 0 is aligned with key 0; it is position S - T, here {start}": attention(new_q, k, v, is_causal=True),
        "the new positions see the future: query t may look at keys up to S - T + t": [by(None), by(after)],
        "a query must see its own position, too": by(all_open.tril(start - 1)),
        "the scores are not divided by sqrt(E)": by(mask, scale=1.0),
        "numbers in a mask are added to the scores: make it bool": by(mask.double()),
        "the mask is True where a query may look": [by(~mask), by(all_open.triu())] if start == 0 else None,
        "each layer has keys and values of its own": attention(new_q, both_k, both_v, attn_mask=both_open),
    }
    case = f"what {count(stop - start, 'new position')} after {start} find{'s' * (stop - start == 1)} in layer {layer}"
    expect_tensor(found, attention(q, k, v, is_causal=True)[:, :, start:], case, slips, close=CLOSE)


class Calls:
    """A step that records its calls and returns an id that depends on all positions so far."""

    def __init__(self, known):
        self.ids, self.computed, self.fault = list(known), 0, ""

    def step(self, new, start):
        if not hasattr(new, "__len__"):
            raise Wrong(f"step takes a list of ids, not {shown(new)}")
        new, start = [int(number(i)) for i in new], int(number(start))
        there = len(self.ids)
        if start != there and not self.fault:
            why = "the last id of the text is not in the cache yet" if self.computed else "`start` is how many it holds"
            why = "hand over only what is not known yet" if start < there else why
            self.fault = f"step was told that the ids start at position {start}, and {there} are in the cache: {why}"
        self.ids, self.computed = self.ids[:start] + new, self.computed + len(new)
        return sum((7 + i) * one for i, one in enumerate(self.ids)) % 53


@exercise("C", "prefill, then decode")
def continued(answer, ranks=None):
    """`answer(step, ids, n, known)` is the ids and n more; step computes each position once, none of the known."""
    draw = luck(12)
    for length, n, known in ((5, 4, 0), (6, 3, 5), (1, 6, 0), (draw.randint(4, 9), draw.randint(2, 6), 2)):
        ids = [draw.randrange(50) for _ in range(length)]
        calls, judge, wanted = Calls(ids[:known]), Calls([]), list(ids)
        for _ in range(n):
            wanted.append(judge.step(wanted, 0))
        found = answer(calls.step, list(ids), n, known)
        if calls.fault:
            raise Wrong(f"with {count(length, 'id')}, {known} of them known: {calls.fault}")
        expect_equal(list(found), wanted, f"with {count(length, 'id')}, {known} of them known, what came for n={n}")
        case = f"the ids are right, but the positions that step computed for {length} ids, {known} known, and {n} more"
        expect_number(calls.computed, length + n - 1 - known, case)


@exercise("D", "the bytes of a cache")
def cache_bytes(answer, ranks=None):
    """`answer(N, H, KV, E, S, size)` -> bytes of the keys and values of one sequence: those of KV heads."""
    for N, H, KV, E, S, size in (
        (3, 15, 5, 7, 11, 8), (32, 32, 8, 128, 4096, 2), (2, 4, 4, 3, 5, 8), (*sizes(14, 5, 2, 30), 1),
    ):  # fmt: skip
        right = 2 * N * KV * E * S * size
        slips = {
            "keys *and* values are kept": right / 2,
            "only KV heads are stored, not a pair for each query head": [2 * N * H * E * S * size, right * H],
            "each layer has keys and values of its own": right / N,
            f"a number takes {size} bytes": [right / size, right / size * 2],
            "every position has keys and values": right / S,
            "a head has E numbers": right / E,
            "each KV head has its own": right / KV,
        }
        case = f"for N={N}, H={H}, KV={KV}, E={E}, S={S} and {size} bytes a number what a cache takes"
        expect_number(answer(N, H, KV, E, S, size), right, case, "bytes", slips)


@exercise("E", "the seconds of a call")
def call_s(answer, ranks=None):
    """`answer(P, positions, caches)` -> seconds on an H100, the longer one of memory and arithmetic."""
    bandwidth, peak = 3.35e12, 989e12
    for P, positions, caches in (
        (8.03e9, 119, 6.4e10), (7e9, 1, 0), (7e9, 2048, 0), (7e9, 400, 3e10), (luck(16).uniform(1e9, 9e10), 3000, 1e9),
    ):  # fmt: skip
        memory, arithmetic = (2 * P + caches) / bandwidth, 2 * P * positions / peak
        shorter = "memory" if memory < arithmetic else "arithmetic"
        slips = {
            "the caches are read, too": max(2 * P / bandwidth, arithmetic),
            "memory and arithmetic work at the same time: take the longer one, not the sum": memory + arithmetic,
            f"that is the {shorter}'s time alone, and the other takes longer": min(memory, arithmetic),
            "`caches` are bytes already": max((2 * P + 2 * caches) / bandwidth, arithmetic),
            "a weight has 2 bytes": max((P + caches) / bandwidth, arithmetic),
            "a position takes 2 FLOPs per weight": max(memory, arithmetic / 2),
            "the weights are read once, for all positions": max((2 * P * positions + caches) / bandwidth, arithmetic),
        }
        right = max(memory, arithmetic)
        case = f"for P={P:.3g}, {count(positions, 'position')} and {caches:.3g} bytes of caches a call"
        expect_number(answer(P, positions, caches), right, case, "s", slips)


@exercise("F", "hand the cache over")
def hand_over(answer, ranks=None):
    """`answer(cache, shape, src, dst)`: rank dst has the cache of rank src, which came in one message."""
    n, rank = (ranks.world_size, ranks.rank) if ranks else (1, 0)
    if n == 1:
        FACT.set("A single rank has no peer: run this check on two or more ranks")
        return
    for turn, (src, dst) in enumerate(((0, 1), (n - 1, 0))):
        N, (B, H, S, E) = 3, sizes(17 + turn, 4, 2, 9)
        full = normal(17 + turn, N, 2, B, H, S, E)
        if rank not in (src, dst):
            continue
        given = Memory({layer: tuple(full[layer].clone()) for layer in range(N)} if rank == src else {})
        with wire.watch() as seen:
            found = answer(given, (N, 2, B, H, S, E), src, dst)
        messages = 1 if rank == src else 0
        case = f"from rank {src} to rank {dst}: the messages that rank {rank} sends"
        expect_equal(seen.messages, messages, case)
        if rank == src:
            expect_equal(seen.sent_bytes, full.nbytes, f"from rank {src} to rank {dst}: the bytes that it sends")
            continue
        if not isinstance(found, dict) or set(found) != set(range(N)):
            came = sorted(found) if isinstance(found, dict) else shown(found)
            raise Wrong(f"return a dict with the layers 0 to {N - 1} on rank {dst}, not {came}")
        for layer in range(N):
            for name, part, i in zip(("keys", "values"), found[layer], (0, 1), strict=True):
                slips = {
                    "keys and values have changed places": full[layer, 1 - i],
                    "those are another layer's: the first one comes first": full[N - 1 - layer, i],
                    "nothing has arrived there": torch.zeros_like(full[layer, i]),
                }
                case = f"from rank {src} to rank {dst}: the {name} of layer {layer}"
                expect_tensor(part, full[layer, i], case, slips, "those of the sender", CLOSE)


PAIRS = (  # p, q
    ((0.1, 0.2, 0.7), (0.6, 0.3, 0.1)), ((0.5, 0.5), (0.9, 0.1)), ((0.0, 0.4, 0.6), (0.5, 0.5, 0.0)),
    ((0.3, 0.2, 0.1, 0.4), (0.05, 0.05, 0.0, 0.9)),  # three tokens to draw from after a refusal
)  # fmt: skip
# (u, v): a Fibonacci lattice. The share of its points in any [0, a) x [0, b) is within 0.013 of a*b
LATTICE = [((i + 0.5) / 144, (89 * i % 144 + 0.5) / 144) for i in range(144)]
NEAR = 0.075


@exercise("H", "keep it, or draw another")
def judged(answer, ranks=None):
    """`answer(draft, p_V, q_V, u, v)` -> (token, was it the draft?): tokens follow p, most drafts are kept."""
    weights = [luck(seed).choices(range(1, 10), k=4) for seed in (15, 19)]
    for p, q in (*PAIRS, [[w / sum(some) for w in some] for some in weights]):
        p_V, q_V = (torch.tensor(x, dtype=torch.float64) for x in (p, q))
        written_V, held = torch.zeros(len(p), dtype=torch.float64), 0.0
        for draft in [i for i, x in enumerate(q) if x > 0]:
            for token, was_kept in _of_each_draw(answer, draft, p_V, q_V):
                written_V[token] += q[draft] / len(LATTICE)
                held += q[draft] * was_kept / len(LATTICE)
        _judge_distribution(written_V, held, p_V, q_V)


def _of_each_draw(answer, draft, p_V, q_V):
    """Return the answer for each (u, v) of the lattice."""
    for u, v in LATTICE:
        found = answer(draft, p_V, q_V, u, v)
        if not isinstance(found, tuple | list) or len(found) != 2 or isinstance(found[0], bool):
            raise Wrong(f"return two things, the token and whether it is the draft token, not {shown(found)}")
        (token, was_kept), again = found, answer(draft, p_V, q_V, u, v)
        if (number(token), bool(was_kept)) != (number(again[0]), bool(again[1])):
            raise Wrong("the same u and v gave two different answers: decide by them alone, and draw nothing else")
        token = int(number(token))
        if not 0 <= token < len(p_V):
            raise Wrong(f"return a token from 0 to {len(p_V) - 1}, not {token}")
        if was_kept and token != draft:
            raise Wrong(f"it says that the draft token {draft} was kept, and writes {token}")
        yield token, bool(was_kept)


def _judge_distribution(written_V, held, p_V, q_V):
    accepted_V = torch.minimum(p_V, q_V)
    refused, case = 1 - accepted_V.sum(), f"p={p_V.tolist()}, q={q_V.tolist()}"
    if ((written_V - p_V).abs() <= NEAR).all():
        if held < 1 - refused - NEAR:
            raise Wrong(f"the tokens follow p, but {held:.2f} of the drafts are kept, and {1 - refused:.2f} could be")
        return
    how = "a draft token is kept with probability p/q, and not the other way round"
    if held > 1 - NEAR:
        how = "every draft token is kept, whatever p says"
    elif abs(held - accepted_V.sum()) <= NEAR:
        how = "after a refusal you write the draft token, or draw from max(0, q - p); draw from max(0, p - q)"
    likely_V, missing_V = p_V * q_V, (p_V - q_V).clamp(min=0)
    slips = {
        f"they follow q: {how}": q_V,
        "after a refusal you draw from p again; draw from max(0, p - q)": accepted_V + refused * p_V,
        "after a refusal you draw from q again; draw from max(0, p - q)": accepted_V + refused * q_V,
        "a draft token is kept with probability p, not p/q: it was drawn with q already": (
            likely_V + (1 - likely_V.sum()) * missing_V / missing_V.sum()
        ),
    }
    distance = {why: (written_V - wrong_V).abs().max().item() for why, wrong_V in slips.items()}
    closest = min(distance, key=distance.get)
    because = f"; {closest}" if distance[closest] <= NEAR else ", which is not p"
    raise Wrong(f"{case}: the tokens come with {[round(x, 2) for x in written_V.tolist()]}{because}")


@exercise(1, "how many users fit")
def users_that_fit(answer, ranks=None):
    """`answer(memory, P, N, KV, E, S, size)` -> whole users whose caches of S positions fit along with the weights."""
    slips = {
        "keys *and* values are kept": 29,
        "each layer has keys and values of its own": 43,
        "the weights take memory, too": 20,
        "weights and cache have 4 bytes per number": [19, 58],
        "users come whole: round down": 28000 / 1920,
        "one user too many: the last does not fit whole": 15,
    }
    for memory, P, N, KV, E, S, size in (
        (40_000, 3000, 3, 2, 4, 10, 4),  # in the first case every likely mistake gives a different number
        (8 * 10**10, 7 * 10**9, 32, 32, 128, 4096, 2), (10_000, 1000, 2, 4, 2, 10, 8), (10_240, 0, 2, 1, 8, 10, 4),
        (10**6 + luck(16).randrange(10**6), *sizes(16, 5, 2, 20), 3), (1000, 600, 1, 2, 2, 4, 2),
    ):  # fmt: skip
        each, left = 2 * N * S * KV * E * size, memory - P * size
        case = f"for {memory:,} bytes, P={P:,}, N={N}, KV={KV}, E={E}, S={S:,} and {size} bytes a number what fits"
        expect_number(answer(memory, P, N, KV, E, S, size), max(0, left // each), case, "users", slips)
        slips = {"the weights alone do not fit, so no user does": [-4]}


@exercise(2, "which blocks can be shared")
def reusable(answer, ranks=None):
    """`answer(ids, known, size, salt)` -> positions at the beginning whose blocks are known."""
    for size, salt in ((4, "a"), (3, "model-2"), (luck(17).randint(2, 9), f"model {luck(17).random():.3f}")):
        ids = [luck(18 + i).randrange(50) for i in range(2 * size + 2)]
        first, both = {(salt, *ids[:size])}, {(salt, *ids[:size]), (salt, *ids[: 2 * size])}
        for given, known, right, why in (
            (ids, both, 2 * size, "two blocks are known"),
            (ids, both - first, 0, "the first block is not known: blocks after a gap cannot be used"),
            (ids[: 2 * size], both, size, "all positions are known, but the last one must be computed anyway"),
            (ids, {("b", *key[1:]) for key in both}, 0, "the blocks belong to another model"),
            ([*ids[: size - 1], 99, *ids[size:]], both, 0, "the last token of the first block differs"),
            ([99, *ids[1:]], both, 0, "the first token differs, and so does every later key"),
            (ids, first | {(salt, *ids[size : 2 * size])}, size, "a block is found by all ids before its end"),
            ([], set(), 0, "the prompt is empty"),
            (ids[: size - 1], first, 0, "the prompt is shorter than a block"),
        ):
            before = set(known)
            found = answer(list(given), known, size, salt)
            if known != before:
                raise Wrong("`known` was changed; only read it")
            case = f"what can be reused of {len(given)} positions in blocks of {size} ({why})"
            expect_number(found, right, case, "positions")


@exercise(3, "worse, or only unlucky")
def may_serve(answer, ranks=None):
    """`answer(new, old, z)` -> whether the paired mean difference is at most z standard errors, all numbers finite."""
    n = luck(3).randint(7, 30)
    old, wobble = (2 + normal(4, n)).tolist(), 0.1 * normal(5, n)  # the windows differ a lot
    wobble = (wobble - wobble.mean()).tolist()
    error = statistics.stdev(wobble) / math.sqrt(n)

    def worse_by(errors):
        return [o + w + errors * error for o, w in zip(old, wobble, strict=True)]

    for new, z, right, why in (
        (worse_by(-5), 2.0, True, "it is better"),
        (worse_by(1), 2.0, True, "it is worse by only one standard error, and z is 2"),
        (worse_by(3), 2.0, False,
         "it is worse by three standard errors of the differences; windows differ much more, but both read the same"),
        (worse_by(3), 4.0, True, "z is 4 here, and it is worse by three standard errors"),
        (worse_by(1.99), 2.0, True, "it is worse by 1.99 standard errors; a sample's variance is divided by n - 1"),
        ([*old[1:], math.nan], 2.0, False, "one loss is nan"),
        ([*old[1:], math.inf], 2.0, False, "one loss is infinite"),
        ([-math.inf, *old[1:]], 2.0, False, "one loss is minus infinity"),
        ([o + (1.0 if i < n // 3 else -0.01) for i, o in enumerate(old)], 1.0, False,
         "a third of its losses are far too large: compare the mean difference, do not count which is larger"),
        (old, 2.0, True, "it is the same model: every difference is 0"),
    ):  # fmt: skip
        found = truth(answer(list(new), list(old), z))
        if found != right:
            raise Wrong(f"your gate says that the candidate {'may' if found else 'may not'} serve, but {why}")
