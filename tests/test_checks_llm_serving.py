"""Each check of lesson 14 accepts right answers in another style and rejects mutants, several from published code."""

import torch
from exercises import Answers, AnswersOfRanks
from manyhands.checks import llm_serving as checks

PLACED = "torch.zeros_like(p_V).scatter(0, places_V, sorted_V / sorted_V.sum())"
JOIN_K, JOIN_V = "torch.cat([old_k, k_BHTE], dim=2)", "torch.cat([old_v, v_BHTE], dim=2)"
STORE, STEP = "    cache[layer] = k_BHTE, v_BHTE\n", "step(ids[known:], known)"
BYTES, STACK = "2 * N * KV * E * S * size", "torch.stack([torch.stack(cache[layer]) for layer in range(shape[0])])"
ACCEPT, REST = "u * q_V[draft_token] < p_V[draft_token]", "(p_V - q_V).clamp(min=0)"
FITTING, HIT = "(memory - P * size) // (2 * N * KV * E * S * size)", "(salt, *ids[: end + size]) in known"
ERROR, ATTENTION = "statistics.stdev(worse) / math.sqrt(len(worse))", "F.scaled_dot_product_attention("
WRONG = {
    "kept": [
        ("- sorted_V  #", "- 1e-12  #", "before_V >= top_p", "before_V > top_p",
         "top_p=0.6 what is kept is wrong: the token that crosses the line is missing"),
        ("before_V >= top_p", "sorted_V.cumsum(0) > top_p", "the token that crosses the line is missing"),
        (PLACED, PLACED.replace(" / sorted_V.sum()", ""), "the right tokens, but their sum is 0.7; divide by it"),
        ("top_p * sorted_V.sum()", "top_p", "top-p is of what top-k has left"),
        (PLACED, "sorted_V / sorted_V.sum()", "the right probabilities at other places; put them back"),
        ("torch.zeros_like(p_V)", "p_V.zero_()", "p_V was changed"),
        ("top_k is not None", "top_k is None", "with top_k=None and top_p=0.6 what is kept is wrong"),
        ("    if top_p < 1:", "    if False:", "with top_k=None and top_p=0.6 what is kept"),
        ("before_V >= top_p", "sorted_V < top_p", "what is kept is wrong"),
        (PLACED, "torch.zeros_like(p_V).scatter(0, places_V, sorted_V).softmax(0)", "what is kept is wrong"),
        ("[top_k:]", "[top_k + 1 :]", "element [0] should be 0.4444, not 0.4"),
    ],
    "remember": [
        ("if layer in cache", "if False",
         "after 5 in layer 0 should be those of all 6, in order: those are the new ones alone"),
        (JOIN_K, "torch.cat([k_BHTE, old_k], dim=2)", "all are there, but the new ones stand first"),
        (JOIN_V, "torch.cat([v_BHTE, old_v], dim=2)", "the values returned for 1 new position after 5 in layer 0"),
        ("= k_BHTE, v_BHTE\n    return k_BHTE, v_BHTE", "= v_BHTE, k_BHTE\n    return k_BHTE, v_BHTE",
         "changed places"),
        (STORE, "    cache.setdefault(layer, (k_BHTE, v_BHTE))\n", "after 6 positions should be those of all 6"),
        (STORE, "", "after 5 positions cache[0] is empty: store what you return"),
        ("layer in cache", "0 in cache", "cache[layer]\n        k", "cache[0]\n        k",
         "each layer has keys and values of its own"),
        (JOIN_V, "torch.cat([old_k, v_BHTE], dim=2)", "they begin with the old keys"),
        (JOIN_K, "old_k",
         "keys returned for 1 new position after 5 in layer 0 should be those of all 6, in order: the new ones"),
        ("dim=2", "dim=1", "your code raised"),
    ],
    "attend": [
        ("attn_mask=mask_TS", "is_causal=True", "1 new position after 5 finds in layer 0 is wrong: query 0 is aligned"),
        (", attn_mask=mask_TS", "",
         "5 new positions after 0 find in layer 0 is wrong: the new positions see the future"),
        ("attn_mask=mask_TS", "attn_mask=mask_TS.double()", "numbers in a mask are added to the scores: make it bool"),
        ("attn_mask=mask_TS", "attn_mask=~mask_TS", "the mask is True where a query may look"),
        ("tril(S - T)", "tril(S - T + 1)", "the new positions see the future"),
        (", attn_mask=mask_TS", ", attn_mask=mask_TS, scale=0.5",
         "what 1 new position after 1 finds in layer 0 is wrong"),
        (", attn_mask=mask_TS", ", attn_mask=mask_TS, scale=1.0", "the scores are not divided by sqrt(E)"),
        ("tril(S - T)", "tril(S - T - 1)", "a query must see its own position, too"),
        ("= remember(cache, layer, k_BHTE, v_BHTE)", "= k_BHTE, v_BHTE", "each new position sees only the new ones"),
        ("remember(cache, layer", "remember(cache, 0", "each layer has keys and values of its own"),
    ],
    "continued": [
        (STEP, "step(ids, 0)", "hand over only what is not known yet"),
        (STEP, "step(ids[-1], known)", "step takes a list of ids, not"),
        (STEP, "step(ids[known:], known + 1)", "and 0 are in the cache: `start` is how many it holds"),
        (STEP, "step(ids[known:], 0)", "step was told that the ids start at position 0, and 5 are in the cache: hand"),
        ("        known = len(ids)\n        ids.append(token)", "        ids.append(token)\n        known = len(ids)",
         "the last id of the text is not in the cache yet"),
        ("        known = len(ids)\n", "", "hand over only what is not known yet"),
        ("range(n)", "range(n - 1)", "what came for n=4"),
        ("return ids", "step(ids[known:], known)\n    return ids", "the positions that step computed for 5 ids"),
        ("    for", "    known = 0\n    for", "with 6 ids, 5 of them known: step was told"),
        ("known = len(ids)", "known += 1", "step was told that the ids start at position 1, and 5 are in the cache"),
    ],
    "cache_bytes": [
        (BYTES, "N * KV * E * S * size", "keys *and* values are kept"),
        (BYTES, "2 * N * H * E * S * size", "only KV heads are stored"),
        (BYTES, "2 * KV * E * S * size", "each layer has keys and values of its own"),
        (BYTES, "2 * N * KV * E * S", "a number takes 8 bytes"),
        (BYTES, "2 * N * KV * E * S * 2", "a number takes 8 bytes"),
        (BYTES, "2 * N * KV * E * size", "every position has keys and values"),
        (BYTES, "2 * N * E * S * size", "each KV head has its own"),
        (BYTES, "2 * N * KV * S * size", "a head has E numbers"),
    ],
    "call_s": [
        ("(2 * P + caches)", "2 * P", "the caches are read, too"),
        ("max(memory_s, arithmetic_s)", "memory_s + arithmetic_s", "take the longer one, not the sum"),
        ("max(", "min(", "time alone, and the other takes longer"),
        ("(2 * P + caches)", "2 * (P + caches)", "`caches` are bytes already"),
        ("return max(memory_s, arithmetic_s)", "return memory_s, arithmetic_s", "return a number of seconds, not the"),
        ("(2 * P + caches)", "(P + caches)", "a weight has 2 bytes"),
        ("2 * P * positions", "P * positions", "a position takes 2 FLOPs per weight"),
        ("(2 * P + caches)", "(2 * P * positions + caches)", "the weights are read once"),
        ("max(memory_s, arithmetic_s)", "memory_s", "that is the memory's time alone"),
        ("max(memory_s, arithmetic_s)", "arithmetic_s", "that is the arithmetic's time alone"),
    ],
    "judged": [
        (ACCEPT, "True", "they follow q: every draft token is kept"),
        (REST, "p_V", "after a refusal you draw from p again; draw from max(0, p - q)"),
        (REST, "q_V", "you draw from q again"),
        ("u * q_V[draft_token]", "u", "a draft token is kept with probability p, not p/q"),
        (ACCEPT, "False", REST, "p_V", "the tokens follow p, but 0.00 of the drafts are kept, and 0.40"),
        (ACCEPT, "u * p_V[draft_token] < q_V[draft_token]", "p/q, and not the other way round"),
        (ACCEPT, "p_V[draft_token] > q_V[draft_token]", ", which is not p"),
        (REST, "(q_V - p_V).clamp(min=0)", "or draw from max(0, q - p)"),
        (REST, "(p_V - q_V).abs()", ", which is not p"),
        (", v), False", ", 0.5), False", ", which is not p"),
        (f"drawn({REST}, v)", "int((p_V - q_V).argmax())", ", which is not p"),
        (", v), False", ", u), False", ", which is not p"),
        (ACCEPT, "torch.rand(()) * q_V[draft_token] < p_V[draft_token]", "the same u and v gave two different"),
        (", v), False", ", torch.rand(()).item()), False", "the same u and v gave two different answers"),
        (", True", "", "return two things, the token and whether it is the draft token, not"),
        (f"drawn({REST}, v)", "draft_token", "after a refusal you write the draft token, or draw from max(0, q - p)"),
        ("return draft_token", "return 1 - draft_token", "it says that the draft token 0 was kept, and writes 1"),
        ("return drawn(", "return 7 + drawn(", "return a token from 0 to 2, not"),
    ],
    "users_that_fit": [
        ("2 * N", "N", "keys *and* values are kept"),
        ("N * ", "", "each layer has keys and values of its own"),
        ("memory - P * size", "memory", "the weights take memory, too"),
        ("P * size", "P", "weights and cache have 4 bytes per number"),
        ("S * size)", "S * size) + 1", "one user too many"),
        ("//", "/", "users come whole: round down"),
        ("E * S * size", "E * S", "weights and cache have 4 bytes per number"),
        ("KV * E", "E", "what fits should be"),
        ("max(0,", "max(1,", "what fits should be 0 users, not 1 users."),
        (f"max(0, {FITTING})", FITTING, "alone do not fit"),
    ],
    "reusable": [
        ("size < len", "size <= len", "the last one must be computed anyway"),
        (HIT, "True", "blocks after a gap cannot be used) should be 0"),
        (HIT, "(salt, *ids[end : end + size]) in {(one[0], *one[1:][-size:]) for one in known}",
         "a block is found by all ids before its end"),
        (HIT, "tuple(ids[: end + size]) in {one[1:] for one in known}", "the blocks belong to another model"),
        ("    return", "    known.clear()\n    return", "`known` was changed"),
        ("return end", "return end // size", "what can be reused of"),
        ("        end += size", "        end += 4", "what can be reused of"),
        ("return end", "return min(end, size)", "(two blocks are known) should be 8"),
        (HIT, "sum(key[0] == salt for key in known) > end / size", "what can be reused of"),
        ("while", "if", "(two blocks are known) should be 8 positions, not 4"),
    ],
    "may_serve": [
        (ERROR, "math.sqrt((statistics.variance(new) + statistics.variance(old)) / len(new))",
         "may serve, but it is worse by three standard errors of the differences"),
        (" / math.sqrt(len(worse))", "", "may serve, but it is worse by three standard errors"),
        ("z * ", "0 * ", "may not serve, but it is worse by only one standard error"),
        ("return False", "return True", "may serve, but one loss is nan"),
        ("a - b for", "b - a for", "your gate says that the candidate"),
        ("a - b for", "abs(a - b) for", "may not serve, but it is better"),
        ("all(map(math.isfinite, worse))", "all(not math.isnan(x) for x in worse)", "your code raised AttributeError"),
        ("statistics.mean(worse)", "statistics.median(worse)", "your gate says"),
        (f"return statistics.mean(worse) <= z * {ERROR}", "return statistics.mean(new) <= statistics.mean(old)",
         "may not serve, but it is worse by only one"),
        ("stdev", "pstdev", "a sample's variance is divided by n - 1"),
        (f"return statistics.mean(worse) <= z * {ERROR}",
         "return sum(d > 0 for d in worse) <= len(worse) / 2 + z * math.sqrt(len(worse)) / 2",
         "compare the mean difference, do not count which is larger"),
        ("return statistics.mean(worse) <= z * ", "return statistics.mean(worse) / ", "return True or False, not "),
        ("z * ", "2 * ", "may not serve, but z is 4 here"),
    ],
}  # fmt: skip


def continued_by_slices(step, ids, n, known=0):  # right
    new, text = list(ids[known:]), list(ids)
    while len(text) < len(ids) + n:
        new = [step(new, len(text) - len(new))]
        text += new
    return text


RIGHT = {
    "kept": [("before_V >= top_p * sorted_V.sum()", "before_V / sorted_V.sum() >= top_p"), ("if top_p < 1:",
    "if top_p != 1.0:")],
    "remember": [
        (STORE, "    cache[layer] = [k_BHTE, v_BHTE]\n"),
        (JOIN_K, "torch.cat((old_k, k_BHTE), -2)", "return k_BHTE, v_BHTE", "return cache[layer]"),
    ],
    "attend": [
        (f"{ATTENTION}q_BHTE, k_BHSE, v_BHSE, attn_mask=mask_TS)",
         "(q_BHTE @ k_BHSE.mT / q_BHTE.shape[-1] ** 0.5).masked_fill(~mask_TS, -1e9).softmax(-1) @ v_BHSE"),
    ],
    "continued": [continued_by_slices],
    "cache_bytes": [(BYTES, "float(size * S * E * KV * N * 2)")],
    "call_s": [("max(memory_s, arithmetic_s)", "torch.tensor([memory_s, arithmetic_s], dtype=torch.float64).amax()")],
    "judged": [(ACCEPT, "u < p_V[draft_token] / q_V[draft_token]", "_token, True", "_token, 1"),
    (REST, "torch.relu(p_V - q_V)")],
    "users_that_fit": [("//", "/", "max(0, ", "max(0, 1.0 * math.floor(", "S * size)", "S * size))"),
    (f"max(0, {FITTING})", f"int(({FITTING} > 0) * {FITTING})")],
    "reusable": [("return end", "return float(end)"), (HIT, "(salt,) + tuple(ids[: end + size]) in known")],
    "may_serve": [("return statistics.mean(worse) <=", "return torch.tensor(worse).double().mean() <="),
    ("[a - b for a, b in zip(new, old, strict=True)]", "(torch.tensor(new) - torch.tensor(old)).tolist()")],
}  # fmt: skip


HAND_OVER = {
    "hand_over": [
        ("        dist.send(packed, dst)\n", "        for layer in packed:\n            dist.send(layer, dst)\n",
         "        dist.recv(packed, src)\n", "        for layer in packed:\n            dist.recv(layer, src)\n",
         "from rank 0 to rank 1: the messages that rank 0 sends should be 1, not 3"),
        ("enumerate(packed)", "enumerate(packed.flip(0))", "those are another layer's: the first one comes first"),
        ("layer: (keys, values)", "layer: (values, keys)", "keys and values have changed places"),
        ("cache = {layer: (keys, values) for layer, (keys, values) in enumerate(packed)}", "pass",
         "return a dict with the layers 0 to 2 on rank 0, not []"),
        ("cache = {layer: (keys, values) for layer, (keys, values) in enumerate(packed)}", "cache = packed",
         "return a dict with the layers 0 to 2 on rank 0, not the Tensor"),
        ("enumerate(packed)", "enumerate(packed[:1])", "return a dict with the layers 0 to 2 on rank 0, not [0]"),
        ("        dist.recv(packed, src)\n", "        dist.recv(packed.clone(), src)\n", "the keys of layer 0"),
        ("dist.send(packed, dst)", "dist.send(packed[:1].contiguous(), dst)", "bytes"),
    ],
}  # fmt: skip
HANDED = {
    "hand_over": [
        ("dist.recv(packed, src)", "dist.irecv(packed, src).wait()"),
        ("dist.send(packed, dst)", "dist.isend(packed, dst).wait()"),
    ],
}


class TestAnswers(Answers):
    lesson, checks, around, rejected, right = "14_llm_serving", checks, ("drawn", "remember"), WRONG, RIGHT
    given, elsewhere, patient = {"BANDWIDTH": 3.35e12, "PEAK": 989e12}, ("hand_over",), ("judged",)


class TestHandOver(AnswersOfRanks):
    lesson, checks, rejected, right, given = (
        "14_llm_serving",
        checks,
        HAND_OVER,
        HANDED,
        {"device": torch.device("cpu")},
    )
    elsewhere = tuple(WRONG)
