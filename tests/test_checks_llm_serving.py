"""Each check of lesson 14 accepts right answers in another style and rejects mutants, several from published code."""

import math
import statistics

import numpy as np
import torch
import torch.nn.functional as F
from exercises import Answers
from manyhands.checks import llm_serving as checks

# ---- build A ----


def kept_by_loop(p_V, top_k, top_p):  # right
    out, before = torch.zeros_like(p_V), 0.0
    order = sorted(range(len(p_V)), key=lambda i: -p_V[i].item())[: top_k or len(p_V)]
    whole = sum(p_V[i].item() for i in order)
    for i in order:
        if top_p < 1 and before >= top_p * whole:
            break
        out[i] = p_V[i]
        before += p_V[i].item()
    return out / out.sum()


def kept_by_mask(p_V, top_k, top_p):  # right, as an ascending sort
    values, places = p_V.topk(min(top_k or len(p_V), len(p_V)))
    values = values / values.sum()
    keep = torch.cat((torch.zeros(1, dtype=p_V.dtype), values.cumsum(0)[:-1])) < top_p
    keep[0] = True
    return torch.zeros_like(p_V).index_put((places[keep],), values[keep] / values[keep].sum())


def kept_without_crossing(p_V, top_k, top_p):  # reasoning-from-scratch#164
    values, places = p_V.sort(descending=True)
    values[top_k or len(p_V) :] = 0
    keep = values.cumsum(0) <= top_p * values.sum() + 1e-12
    return torch.zeros_like(p_V).scatter(0, places, values * keep / (values * keep).sum())


def kept_with_the_first_at_least(p_V, top_k, top_p):
    values, places = p_V.sort(descending=True)
    values[top_k or len(p_V) :] = 0
    keep = values.cumsum(0) <= top_p * values.sum() + 1e-12
    keep[0] = True
    return torch.zeros_like(p_V).scatter(0, places, values * keep / (values * keep).sum())


def kept_not_divided(p_V, top_k, top_p):
    right = kept_by_loop(p_V, top_k, top_p)
    return torch.where(right > 0, p_V, 0.0)


def kept_of_everything(p_V, top_k, top_p):
    values, places = p_V.sort(descending=True)
    before = values.cumsum(0) - values
    values[(before >= top_p) & torch.tensor(top_p < 1)] = 0
    values[top_k or len(p_V) :] = 0
    return torch.zeros_like(p_V).scatter(0, places, values / values.sum())


def kept_sorted(p_V, top_k, top_p):
    return kept_by_loop(p_V, top_k, top_p).sort(descending=True).values


def kept_in_place(p_V, top_k, top_p):
    right = kept_by_loop(p_V, top_k, top_p)
    p_V.copy_(right)
    return right


def kept_one_more(p_V, top_k, top_p):
    return kept_by_loop(p_V, top_k and top_k + 1, top_p)


# ---- build B ----


def attend_by_softmax(cache, layer, q, k, v):  # right, without the library
    old = cache.get(layer)
    if old:
        k, v = torch.cat((old[0], k), 2), torch.cat((old[1], v), 2)
    cache[layer] = [k, v]
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    own = k.shape[2] - q.shape[2] + torch.arange(q.shape[2])[:, None]
    return scores.masked_fill(torch.arange(k.shape[2]) > own, -torch.inf).softmax(-1) @ v


def attend_one_by_one(cache, layer, q, k, v):  # right: one query at a time
    found = []
    for t in range(q.shape[2]):
        pair = [k[:, :, t : t + 1], v[:, :, t : t + 1]]
        pair = [torch.cat(two, 2) for two in zip(cache[layer], pair, strict=True)] if layer in cache else pair
        cache[layer] = tuple(pair)
        found.append(F.scaled_dot_product_attention(q[:, :, t : t + 1], *pair))
    return torch.cat(found, 2)


def attend_with(mask=None, causal=False, store=True, use=True, one_layer=False):
    def attend(cache, layer, q, k, v):
        key = 0 if one_layer else layer
        if key in cache and use:
            k, v = torch.cat((cache[key][0], k), 2), torch.cat((cache[key][1], v), 2)
        if store:
            cache[key] = k, v
        T, S = q.shape[2], k.shape[2]
        if causal:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        given = None if mask is None else torch.ones(T, S, dtype=torch.bool).tril(S - T + mask)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=given)

    return attend


def attend_keys_only(cache, layer, q, k, v):
    right = attend_by_softmax(cache, layer, q, k, v)
    cache[layer] = cache[layer][0]
    return right


def attend_queries_too(cache, layer, q, k, v):
    right = attend_by_softmax(cache, layer, q, k, v)
    cache[layer] = (*cache[layer], q)
    return right


# ---- build C ----


def another(weights, v):
    sums = weights.cumsum(0)
    return min(int((sums <= v * sums[-1]).sum()), len(weights) - 1)


def judged_by_ratio(draft_token, p_V, q_V, u, v):  # right; the numbers the other way round
    if v <= min(1.0, (p_V[draft_token] / q_V[draft_token]).item()):
        return torch.tensor(draft_token), torch.tensor(True)
    return another(torch.relu(p_V - q_V), u), False


def judged_with(accept, rest):
    def judged(draft_token, p_V, q_V, u, v):
        if u < accept(p_V[draft_token].item(), q_V[draft_token].item()):
            return draft_token, True
        return another(rest(p_V, q_V), v), False

    return judged


def judged_by_argmax(draft_token, p_V, q_V, u, v):
    return (draft_token, True) if u < p_V[draft_token] / q_V[draft_token] else (int(missing(p_V, q_V).argmax()), False)


def judged_by_one_number(draft_token, p_V, q_V, u, v):
    return judged_with(ratio, missing)(draft_token, p_V, q_V, u, u)


def ratio(p, q):
    return p / q


def missing(p_V, q_V):
    return (p_V - q_V).clamp(min=0)


# ---- exercises ----


def fits(memory, P, N, D, S, size=2):
    return np.int64(max(0, math.floor((memory - size * P) / (2 * size * N * D * S))))


def fits_with(halves=2, layers=True, weights=True, sized=True, less=0):
    def answer(memory, P, N, D, S, size=2):
        left = memory - (P * (size if sized else 1) if weights else 0)
        return max(0, left // (halves * (N if layers else 1) * D * S * size) - less)

    return answer


def reusable_by_all(ids, known, size, salt):  # right
    ends = range(size, len(ids), size)
    found = [end for end in ends if all((salt, *ids[:e]) in known for e in range(size, end + 1, size))]
    return max(found, default=0)


def reusable_with_all(ids, known, size, salt):
    end = 0
    while end + size <= len(ids) and (salt, *ids[: end + size]) in known:
        end += size
    return end


def reusable_over_gaps(ids, known, size, salt):
    return max((e for e in range(size, len(ids), size) if (salt, *ids[:e]) in known), default=0)


def reusable_by_own_ids(ids, known, size, salt):
    tails = {entry[1:][-size:] for entry in known if entry[0] == salt}
    end = 0
    while end + size < len(ids) and tuple(ids[end : end + size]) in tails:
        end += size
    return end


def reusable_without_salt(ids, known, size, salt):
    bare = {entry[1:] for entry in known}
    end = 0
    while end + size < len(ids) and tuple(ids[: end + size]) in bare:
        end += size
    return end


def reusable_that_forgets(ids, known, size, salt):
    found = reusable_by_all(ids, known, size, salt)
    known.clear()
    return found


def gate_by_numpy(new, old, z):  # right
    worse = np.array(new) - np.array(old)
    if not np.isfinite(worse).all():
        return False
    return worse.mean() <= z * worse.std(ddof=1) / np.sqrt(len(worse))


def gate_unpaired(new, old, z):
    if not all(map(math.isfinite, new)):
        return False
    error = math.sqrt((statistics.variance(new) + statistics.variance(old)) / len(new))
    return statistics.mean(new) - statistics.mean(old) <= z * error


def gate_by_deviation(new, old, z):
    worse = [a - b for a, b in zip(new, old, strict=True)]
    return all(map(math.isfinite, worse)) and statistics.mean(worse) <= z * statistics.stdev(worse)


def gate_by_mean(new, old, z):
    return math.isfinite(sum(new)) and statistics.mean(new) <= statistics.mean(old)


def gate_that_lets_nan_in(new, old, z):
    worse = [a - b for a, b in zip(new, old, strict=True)]
    if not all(map(math.isfinite, worse)):
        return True
    return gate_by_numpy(new, old, z)


def gate_of_two(new, old, z):
    return gate_by_numpy(new, old, 2)


def gate_by_pstdev(new, old, z):
    worse = np.array(new) - np.array(old)
    return bool(np.isfinite(worse).all() and worse.mean() <= z * worse.std() / math.sqrt(len(worse)))


RIGHT = {
    "kept": [kept_by_loop, kept_by_mask],
    "attend": [attend_by_softmax, attend_one_by_one],
    "judged": [judged_by_ratio, judged_with(ratio, missing)],
    "users_that_fit": [fits, lambda *given: torch.tensor(fits(*given))],
    "reusable": [reusable_by_all, lambda *given: float(reusable_by_all(*given))],
    "may_serve": [gate_by_numpy, lambda *given: torch.tensor(bool(gate_by_numpy(*given)))],
}
WRONG = {
    "kept": [
        (kept_without_crossing, "top_p=0.6 what is kept is wrong: the token that crosses the line is missing"),
        (kept_with_the_first_at_least, "the token that crosses the line is missing"),
        (kept_not_divided, "the right tokens, but their sum is 0.7; divide by it"),
        (kept_of_everything, "top-p is of what top-k has left"),
        (kept_sorted, "the right probabilities at other places; put them back"),
        (kept_in_place, "p_V was changed"),
        (kept_one_more, "element [0] should be 0.4444, not 0.4"),
        (lambda p, k, q: kept_by_loop(p, k, q)[:2], "should have the shape [4], not [2]"),
    ],
    "attend": [
        (attend_with(causal=True), "1 new position after 5 finds in layer 0 is wrong: query 0 is aligned"),
        (attend_with(), "5 new positions after 0 find in layer 0 is wrong: the new positions see each other's future"),
        (attend_with(mask=0, use=False), "each new position sees only the new ones"),
        (attend_with(mask=0, store=False), "each new position sees only the new ones"),
        (attend_with(mask=-1), "a query must see its own position, too"),
        (attend_with(mask=0, one_layer=True), "find in layer 1 is wrong: each layer has keys and values of its own"),
        (attend_keys_only, "your code raised"),
        (attend_queries_too, "cache[0] should be (keys, values), not the tuple"),
    ],
    "judged": [
        (judged_with(lambda p, q: 1, missing), "they follow q: every draft token is kept"),
(judged_with(ratio, lambda p, q: p), "you draw from p again, so that tokens that q likes come too often"),
        (judged_with(ratio, lambda p, q: q), "you draw from q again"),
        (judged_with(lambda p, q: p, missing), "a draft token is kept with probability p, not p/q"),
        (judged_with(lambda p, q: 0, lambda p, q: p), "the tokens follow p, but 0.00 of the drafts are kept, and 0.40"),
        (judged_with(lambda p, q: q / p if p else 0, missing), "p/q, and not the other way round"),
        (judged_with(lambda p, q: 0.5, missing), ", which is not p"),
        (judged_by_argmax, ", which is not p"),
        (judged_by_one_number, ", which is not p"),
        (lambda draft_token, *_: (1 - draft_token, True), "it says that the draft token 0 was kept, and writes 1"),
        (lambda draft_token, *_: (7, False), "return a token from 0 to 2, not 7"),
    ],
    "users_that_fit": [
        (fits_with(halves=1), "keys *and* values are kept"),
        (fits_with(layers=False), "each layer has keys and values of its own"),
        (fits_with(weights=False), "the weights take memory, too"),
        (fits_with(less=-1), "one user too many"),
        (lambda memory, P, N, D, S, size: (memory - P * size) / (2 * N * S * D * size), "a part of a user is none"),
        (lambda memory, P, N, D, S, size: (memory - P * size) // (2 * N * S * D * size), "alone do not fit"),
        (lambda memory, P, N, D, S, size: fits(memory, P, N, D, S, 2), "not"),
    ],
    "reusable": [
        (reusable_with_all, "the last one must be computed all the same"),
        (reusable_over_gaps, "what lies behind a gap cannot be used"),
        (reusable_by_own_ids, "a block is found by all ids before its end"),
        (reusable_without_salt, "the blocks belong to another model"),  # vllm#3264
        (reusable_that_forgets, "`known` was changed"),
        (lambda ids, known, size, salt: len(ids) // size * size, "lies behind a gap cannot be used) should be 0"),
    ],
    "may_serve": [
        (gate_unpaired, "may serve, but it is worse by three standard errors of the differences"),
        (gate_by_deviation, "may serve, but it is worse by three standard errors"),
        (gate_by_mean, "may not serve, but it is worse by only one standard error"),
        (gate_that_lets_nan_in, "may serve, but one loss is nan"),
        (gate_by_pstdev, "a sample's variance is divided by n - 1"),
        (gate_of_two, "may not serve, but z is 4 here"),
    ],
}  # fmt: skip


class TestAnswers(Answers):
    lesson, checks, around, rejected, right = "14_llm_serving", checks, ("drawn",), WRONG, RIGHT
