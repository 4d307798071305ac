"""Checks of lesson 14: what is kept, attention with a memory, judged guesses; users that fit, shared blocks, a fair gate.

None of them communicates: every rank judges the same answer on the same numbers, in float64 on the CPU.
"""

import math
import statistics

import torch
import torch.nn.functional as F

from manyhands.checks import Wrong, exercise
from manyhands.checks.values import number, shown

CLOSE = 1e-9


def _tensor(found, wanted, what):
    """`found` as a float64 tensor of `wanted`'s shape. Raises Wrong for anything else."""
    if found is ...:
        raise NotImplementedError
    if not isinstance(found, torch.Tensor):
        raise Wrong(f"return {what}, a tensor {list(wanted.shape)}, not {shown(found)}")
    if found.shape != wanted.shape:
        raise Wrong(f"return {what} of shape {list(wanted.shape)}, not {list(found.shape)}")
    return found.detach().cpu().double()


def _near(a, b):
    return bool(((a - b).abs() <= CLOSE).all())


# ---- build A ----

FOUR = (0.4, 0.3, 0.2, 0.1)
DICE = (  # probabilities, top_k, top_p
    (FOUR, None, 1.0), (FOUR, None, 0.6), (FOUR, None, 0.35), (FOUR, 3, 1.0), (FOUR, 1, 1.0), (FOUR, 9, 0.95),
    (FOUR, 2, 0.56), ((0.05, 0.5, 0.15, 0.3), None, 0.75), ((0.05, 0.5, 0.15, 0.3), 3, 0.8), ((0.2, 0.3, 0.5), 3, 0.45),
)  # fmt: skip


def _kept(p, top_k, top_p, crossing=True, of_rest=True):
    """The right answer, and wrong ones: without the token that crosses the line, or top-p of everything."""
    order = sorted(range(len(p)), key=lambda i: -p[i])[:top_k]
    whole = sum(p[i] for i in order) if of_rest else 1.0
    found, before = torch.zeros(len(p), dtype=torch.float64), 0.0
    for i in order:
        if top_p == 1 or (before < top_p * whole - CLOSE if crossing else before + p[i] <= top_p * whole + CLOSE):
            found[i] = p[i]
        before += p[i]
    return found / found.sum() if found.sum() else found


@exercise("A", "what is kept")
def kept(answer, ranks=None):
    """`answer(p_V, top_k, top_p)` is top-k, then top-p of the rest, with sum 1, in the order of the tokens."""
    for p, top_k, top_p in DICE:
        given = torch.tensor(p, dtype=torch.float64)
        right = _kept(p, top_k, top_p)
        found = _tensor(answer(given, top_k, top_p), right, "the probabilities")
        if not torch.equal(given, torch.tensor(p, dtype=torch.float64)):
            raise Wrong("p_V was changed; it is still needed, so work on a copy")
        if _near(found, right):
            continue
        raise Wrong(f"of {list(p)} with top_k={top_k}, top_p={top_p}: {_kept_fault(found, right, p, top_k, top_p)}")


def _kept_fault(found, right, p, top_k, top_p):
    rounded = [round(value, 4) for value in found.tolist()]
    if not torch.isfinite(found).all():
        return "some of them are not finite; was everything cut off, and the rest divided by its sum, 0?"
    if _near(found, _kept(p, top_k, top_p, crossing=False)):
        return "the token that crosses the line is missing: keep a token if those before it do not reach top_p yet"
    if found.sum() < 1 - CLOSE and _near(found / found.sum().clamp(min=CLOSE), right):
        return f"the right tokens, but their sum is {found.sum():.4g}; divide by it"
    if _near(found, _kept(p, top_k, top_p, of_rest=False)):
        return "top-p is of what top-k has left, so of its sum, which is less than 1"
    if _near(found.sort().values, right.sort().values):
        return f"the right probabilities at other places, {rounded}; put them back to where their tokens were"
    return f"{int((found > 0).sum())} tokens are kept, {rounded}; it should be {[round(v, 4) for v in right.tolist()]}"


# ---- build B ----

B, H, E = 2, 3, 4


class Memory(dict):
    """A dict that an answer gets itself, and no copy of it, whatever it puts in."""


@exercise("B", "attention with a memory")
def attend(answer, ranks=None):
    """`answer(cache, layer, q, k, v)` is causal attention over all positions so far, which `cache` then holds."""
    draw = torch.Generator().manual_seed(14)
    full = torch.randn(2, 3, B, H, 9, E, generator=draw, dtype=torch.float64)  # two layers' q, k, v
    for pieces in ((5, 1, 1), (1, 1), (4, 3, 2)):
        cache, start = Memory(), 0
        for size in pieces:
            for layer in range(2):
                q, k, v = full[layer, :, :, :, start : start + size]
                _judge_attend(answer, cache, layer, (q, k, v), full[layer], start)
            start += size
        _judge_cache(cache, full, start)


def _judge_attend(answer, cache, layer, new, full, start):
    given = [part.clone() for part in new]
    size = given[0].shape[2]
    stop = start + size
    right = F.scaled_dot_product_attention(*full[:, :, :, :stop], is_causal=True)[:, :, start:]
    found = _tensor(answer(cache, layer, *given), right, "what the new positions find")
    if any(not torch.equal(a, b) for a, b in zip(given, new, strict=True)):
        raise Wrong("q, k or v was changed; make new tensors")
    if _near(found, right):
        return
    q, k, v = (part[:, :, :stop] for part in full)
    open_mask = torch.ones(size, stop, dtype=torch.bool)
    hints = {
        "each new position sees only the new ones: put the old keys and values in front": (
            F.scaled_dot_product_attention(*new, is_causal=True)
        ),
        "query 0 is aligned with key 0, as is_causal=True does it; it is position S - T, here "
        f"{start}": F.scaled_dot_product_attention(q[:, :, start:], k, v, is_causal=True),
        "the new positions see each other's future: query t may look at keys up to S - T + t": (
            F.scaled_dot_product_attention(q[:, :, start:], k, v, attn_mask=open_mask)
        ),
    }
    hints["a query must see its own position, too"] = F.scaled_dot_product_attention(
        q[:, :, start:], k, v, attn_mask=open_mask.tril(start - 1)
    )
    where = f"{size} new position{'s' if size > 1 else ''} after {start}, layer {layer}"
    for sentence, wrong in hints.items():
        if _near(found, wrong):
            raise Wrong(f"{where}: {sentence}")
    raise Wrong(
        f"{where}: the result is off by {(found - right).abs().max():.2g}; does each layer have keys of its own?"
    )


def _judge_cache(cache, full, positions):
    for layer in range(2):
        held = cache.get(layer)
        if not isinstance(held, tuple | list) or len(held) != 2:
            raise Wrong(f"cache[{layer}] should be (keys, values), not {shown(held)}")
        for name, part, whole in zip(("keys", "values"), held, full[layer, 1:], strict=True):
            wanted = whole[:, :, :positions]
            if not isinstance(part, torch.Tensor) or part.shape != wanted.shape or not _near(part, wanted):
                what = list(part.shape) if isinstance(part, torch.Tensor) else shown(part)
                raise Wrong(
                    f"after {positions} positions the {name} of layer {layer} are {what}; keep all {positions} once, "
                    f"{list(wanted.shape)}"
                )


# ---- build C ----

PAIRS = (((0.1, 0.2, 0.7), (0.6, 0.3, 0.1)), ((0.5, 0.5), (0.9, 0.1)), ((0.0, 0.4, 0.6), (0.5, 0.5, 0.0)))
GRID = 20


@exercise("C", "keep it, or draw another")
def judged(answer, ranks=None):
    """`answer(guess, p_V, q_V, u, v)` -> (token, was it the guess?): tokens follow p, most guesses are kept."""
    for p, q in PAIRS:
        p_V, q_V = (torch.tensor(x, dtype=torch.float64) for x in (p, q))
        written, held = torch.zeros(len(p), dtype=torch.float64), 0.0
        for guess in [i for i, x in enumerate(q) if x > 0]:
            for token, right in _grid(answer, guess, p_V, q_V):
                written[token] += q[guess] / GRID**2
                held += q[guess] * right / GRID**2
        if p_V.tolist() != list(p) or q_V.tolist() != list(q):
            raise Wrong("p_V or q_V was changed; make new tensors")
        _judge_distribution(written, held, p_V, q_V)


def _grid(answer, guess, p_V, q_V):
    """What is answered for each (u, v) of a grid."""
    for i in range(GRID):
        for j in range(GRID):
            found = answer(guess, p_V, q_V, (i + 0.5) / GRID, (j + 0.5) / GRID)
            if found is ...:
                raise NotImplementedError
            if not isinstance(found, tuple | list) or len(found) != 2:
                raise Wrong(f"return the token and whether it is the guess, not {shown(found)}")
            token = int(number(found[0], "a token"))
            if not 0 <= token < len(p_V):
                raise Wrong(f"return a token from 0 to {len(p_V) - 1}, not {token}")
            if found[1] and token != guess:
                raise Wrong(f"it says that guess {guess} was kept, and writes {token}")
            yield token, bool(found[1])


def _judge_distribution(written, held, p_V, q_V):
    most, near = torch.minimum(p_V, q_V).sum().item(), 1.5 / GRID
    case = f"p={p_V.tolist()}, q={q_V.tolist()}"
    text = [round(x, 2) for x in written.tolist()]
    if ((written - p_V).abs() <= near).all():
        if held < most - near:
            raise Wrong(
                f"{case}: the tokens follow p, but {held:.2f} of the guesses are kept, and {most:.2f} could be: keep one "
                "with probability min(1, p/q)"
            )
        return
    accepted = torch.minimum(p_V, q_V)
    refused = 1 - accepted.sum()
    follows_q = "they follow q: every guess is kept, whatever p says"
    if held < 1 - near:
        follows_q = "they follow q; a guess is kept with probability p/q, and not the other way round"
    hints = {
        follows_q: q_V,
        "after a refusal you draw from p again, so that tokens that q likes come too often; draw from max(0, p - q)": (
            accepted + refused * p_V
        ),
        "after a refusal you draw from q again; draw from max(0, p - q)": accepted + refused * q_V,
        "a guess is kept with probability p, not p/q: it was drawn with q already": _kept_with_p(p_V, q_V),
    }
    distance = {sentence: (written - wrong).abs().max().item() for sentence, wrong in hints.items()}
    closest = min(distance, key=distance.get)
    because = f"; {closest}" if distance[closest] <= near else ", which is not p"
    raise Wrong(f"{case}: the tokens come with {text}{because}")


def _kept_with_p(p_V, q_V):
    rest_V = (p_V - q_V).clamp(min=0)
    return p_V * q_V + (1 - (p_V * q_V).sum()) * rest_V / rest_V.sum()


# ---- exercises ----


@exercise(1, "how many users fit")
def users_that_fit(answer, ranks=None):
    """`answer(memory, P, N, D, S, size)` -> whole users whose caches of S positions fit beside the weights."""
    for memory, P, N, D, S, size in (
        (20_000, 3000, 3, 8, 10, 2), (8 * 10**10, 7 * 10**9, 32, 4096, 4096, 2), (10_000, 1000, 2, 8, 10, 8),
        (1000, 600, 1, 4, 4, 2), (10_240, 0, 2, 8, 10, 4),
    ):  # fmt: skip
        found = number(answer(memory, P, N, D, S, size), "a number of users")
        each, left = 2 * N * S * D * size, memory - P * size
        right = max(0, left // each)
        if found == right:
            continue
        case = f"for {memory:,} bytes, P={P:,}, N={N}, D={D}, S={S:,}, {size} bytes a number"
        if found < 0:
            raise Wrong(f"{case}: the weights alone do not fit, so 0 users, not {found:g}")
        hints = {
            "keys *and* values are kept": max(0, left // (each // 2)),
            "each layer has keys and values of its own": max(0, left // (each // N)),
            "the weights take memory, too": memory // each,
            f"weights and cache have {size} bytes per number": max(0, (memory - P) // each),
            "a part of a user is none": left / each,
            "one user too many: the last does not fit whole": right + 1,
        }
        hint = next((f": {sentence}" for sentence, wrong in hints.items() if found == wrong), "")
        raise Wrong(f"{case} it is {right}, not {found:g}{hint}")


IDS = list(range(10))


@exercise(2, "which blocks can be shared")
def reusable(answer, ranks=None):
    """`answer(ids, known, size, salt)` -> positions at the beginning whose blocks are known."""

    def ends(*stops, ids=IDS, salt="a"):
        return {(salt, *ids[:stop]) for stop in stops}

    cases = (
        (IDS, ends(4, 8), 8, "two blocks of 4 are known"),
        (IDS, ends(8), 0, "the first block is not known: what lies behind a gap cannot be used"),
        (IDS[:8], ends(4, 8), 4, "all 8 positions are known, and the last one must be computed all the same"),
        (IDS[:4], ends(4), 0, "all 4 positions are known, and the last one must be computed all the same"),
        (IDS, ends(4, 8, salt="b"), 0, "the blocks belong to another model"),
        ([99, *IDS[1:]], ends(4, 8), 0, "the first token differs, and every key behind it, too"),
        (
            IDS,
            {("a", *IDS[:4]), ("a", *IDS[4:8])},
            4,
            "a block is found by all ids before its end, not by its own",
        ),
        (IDS, set(), 0, "nothing is known"),
        ([], set(), 0, "the prompt is empty"),
        (IDS[:3], ends(4), 0, "the prompt is shorter than a block"),
    )
    for ids, known, right, why in cases:
        before = set(known)
        found = number(answer(list(ids), known, 4, "a"), "a number of positions")
        if known != before:
            raise Wrong("`known` was changed; only look things up")
        if found != right:
            raise Wrong(f"{len(ids)} positions, blocks of 4: {found:g} can be reused, should be {right}: {why}")


@exercise(3, "worse, or only unlucky")
def may_serve(answer, ranks=None):
    """`answer(new, old, z)` -> whether the paired mean difference is at most z standard errors, all numbers finite."""
    draw = torch.Generator().manual_seed(3)
    old = (2 + torch.randn(30, generator=draw, dtype=torch.float64)).tolist()  # windows differ much
    wobble = (0.1 * torch.randn(30, generator=draw, dtype=torch.float64)).tolist()
    mean = statistics.mean(wobble)
    wobble = [w - mean for w in wobble]
    error = statistics.stdev(wobble) / math.sqrt(30)
    cases = (
        ([o + w - 0.1 for o, w in zip(old, wobble, strict=True)], 2.0, True, "it is better"),
        ([o + w + error for o, w in zip(old, wobble, strict=True)], 2.0, True, "it is worse by one standard error"),
        ([o + w + 3 * error for o, w in zip(old, wobble, strict=True)], 2.0, False,
         "it is worse by three standard errors of the differences; the windows differ much more, but both have read the same"),
        ([o + w + 3 * error for o, w in zip(old, wobble, strict=True)], 4.0, True, "z is 4 here"),
        ([*old[1:], math.nan], 2.0, False, "one loss is nan"),
        ([*old[1:], math.inf], 2.0, False, "one loss is infinite"),
        (old, 2.0, True, "it is the same model: every difference is 0"),
    )  # fmt: skip
    for new, z, right, why in cases:
        found = answer(list(new), list(old), z)
        if found is ...:
            raise NotImplementedError
        if type(found).__name__ not in ("bool", "bool_") and not isinstance(found, torch.Tensor):
            raise Wrong(f"return True or False, not {shown(found)}")
        if bool(found) != right:
            verdict = "may serve" if found else "may not serve"
            raise Wrong(f"your gate says that the candidate {verdict}, but {why}")
