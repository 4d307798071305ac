"""Each check of lesson 14 accepts right answers in another style and rejects mutants, several from published code."""

from exercises import Answers
from manyhands.checks import llm_serving as checks

PLACED = "torch.zeros_like(p_V).scatter(0, places_V, sorted_V / sorted_V.sum())"
ACCEPT, REST = "u * q_V[draft_token] < p_V[draft_token]", "(p_V - q_V).clamp(min=0)"
FITTING, HIT = "(memory - P * size) // (2 * N * S * D * size)", "(salt, *ids[: end + size]) in known"
ERROR, ATTENTION = "statistics.stdev(worse) / math.sqrt(len(worse))", "F.scaled_dot_product_attention("
WRONG = {
    "kept": [
        ("- sorted_V  #", "- 1e-12  #", "before_V >= top_p", "before_V > top_p",
         "top_p=0.6 what is kept is wrong: the token that crosses the line is missing"),
        (PLACED, PLACED.replace(" / sorted_V.sum()", ""), "the right tokens, but their sum is 0.7; divide by it"),
        ("top_p * sorted_V.sum()", "top_p", "top-p is of what top-k has left"),
        (PLACED, "sorted_V / sorted_V.sum()", "the right probabilities at other places; put them back"),
        ("torch.zeros_like(p_V)", "p_V.zero_()", "p_V was changed"),
        ("top_k is not None", "top_k is None", "with top_k=None and top_p=1.0 what is kept is wrong"),
        ("    if top_p < 1:", "    if False:", "with top_k=None and top_p=0.6 what is kept"),
        ("before_V >= top_p", "sorted_V < top_p", "what is kept is wrong"),
        ("sorted_V.cumsum(0) - sorted_V", "sorted_V.cumsum(0)", "the token that crosses the line is missing"),
        (PLACED, "torch.zeros_like(p_V).scatter(0, places_V, sorted_V).softmax(0)", "what is kept is wrong"),
        ("[top_k:]", "[top_k + 1 :]", "element [0] should be 0.4444, not 0.4"),
    ],
    "attend": [
        ("attn_mask=mask_TS", "is_causal=True", "1 new position after 5 finds in layer 0 is wrong: query 0 is aligned"),
        (", attn_mask=mask_TS", "",
         "5 new positions after 0 find in layer 0 is wrong: the new positions see each other's future"),
        ("if layer in cache", "if False", "each new position sees only the new ones"),
        (", attn_mask=mask_TS", ", attn_mask=mask_TS, scale=0.5",
         "what 1 new position after 1 finds in layer 0 is wrong"),
        (", attn_mask=mask_TS", ", attn_mask=mask_TS, scale=1.0", "the scores are not divided by sqrt(E)"),
        ("zip(cache[layer], (k_BHTE, v_BHTE)", "zip((k_BHTE, v_BHTE), cache[layer]", "should be those of all 7, once"),
        ("    cache[layer] = k_BHTE, v_BHTE\n", "    cache.setdefault(layer, (k_BHTE, v_BHTE))\n", "find"),
        ("    cache[layer] = k_BHTE, v_BHTE\n", "    cache[layer] = k_BHTE[:, :, -1:], v_BHTE[:, :, -1:]\n",
         "in layer"),
        ("    cache[layer] = k_BHTE, v_BHTE\n", "    cache[layer] = v_BHTE, k_BHTE\n", "in layer"),
        ("tril(S - T)", "tril(S - T - 1)", "a query must see its own position, too"),
        ("layer in cache", "0 in cache", "cache[layer]", "cache[0]",
         "find in layer 1 is wrong: each layer has keys and values of its own"),
        ("= k_BHTE, v_BHTE\n    T", "= k_BHTE\n    T", "your code raised"),
    ],
    "judged": [
        (ACCEPT, "True", "they follow q: every draft token is kept"),
        (REST, "p_V", "after a refusal you draw from p again; draw from max(0, p - q)"),
        (REST, "q_V", "you draw from q again"),
        ("u * q_V[draft_token]", "u", "a draft token is kept with probability p, not p/q"),
        (ACCEPT, "False", REST, "p_V", "the tokens follow p, but 0.00 of the drafts are kept, and 0.40"),
        (ACCEPT, "u * p_V[draft_token] < q_V[draft_token]", "p/q, and not the other way round"),
        (ACCEPT, "u < 0.5", ", which is not p"),
        (ACCEPT, "p_V[draft_token] > q_V[draft_token]", ", which is not p"),
        (ACCEPT, "v * q_V[draft_token] < p_V[draft_token]", ", which is not p"),
        (REST, "(q_V - p_V).clamp(min=0)", "after a refusal you draw from max(0, q - p)"),
        (REST, "(p_V - q_V).abs()", ", which is not p"),
        (", v), False", ", 0.5), False", ", which is not p"),
        (f"drawn({REST}, v)", "int((p_V - q_V).argmax())", ", which is not p"),
        (", v), False", ", u), False", ", which is not p"),
        ("return draft_token", "return 1 - draft_token", "it says that the draft token 0 was kept, and writes 1"),
        ("return drawn(", "return 7 + drawn(", "return a token from 0 to 2, not"),
    ],
    "users_that_fit": [
        ("2 * N", "N", "keys *and* values are kept"),
        ("N * ", "", "each layer has keys and values of its own"),
        ("memory - P * size", "memory", "the weights take memory, too"),
        ("P * size", "P", "weights and cache have 4 bytes per number"),
        ("D * size)", "D * size) + 1", "one user too many"),
        ("//", "/", "a part of a user is none"),
        ("S * D * size", "S * D", "weights and cache have 4 bytes per number"),
        ("S * D * size", "S * size", "what fits should be"),
        ("S * D * size", "D * size", "what fits should be"),
        ("2 * N * S", "4 * N * S", "what fits should be"),
        ("max(0,", "max(1,", "what fits should be 0 users, not 1 users."),
        (f"max(0, {FITTING})", FITTING, "alone do not fit"),
    ],
    "reusable": [
        ("size < len", "size <= len", "the last one must be computed all the same"),
        (HIT, "True", "lies behind a gap cannot be used) should be 0"),
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
        ("z * ", "2 * ", "may not serve, but z is 4 here"),
    ],
}  # fmt: skip
RIGHT = {
    "kept": [("before_V >= top_p * sorted_V.sum()", "before_V / sorted_V.sum() >= top_p"), ("if top_p < 1:",
    "if top_p != 1.0:")],
    "attend": [
        (f"{ATTENTION}q_BHTE, k_BHTE, v_BHTE, attn_mask=mask_TS)",
         "(q_BHTE @ k_BHTE.mT / q_BHTE.shape[-1] ** 0.5).masked_fill(~mask_TS, -1e9).softmax(-1) @ v_BHTE"),
        ("cache[layer] = k_BHTE, v_BHTE", "cache[layer] = [k_BHTE, v_BHTE]"),
    ],
    "judged": [(ACCEPT, "u < p_V[draft_token] / q_V[draft_token]", "_token, True", "_token, 1"),
    (REST, "torch.relu(p_V - q_V)")],
    "users_that_fit": [("//", "/", "max(0, ", "max(0, 1.0 * math.floor(", "D * size)", "D * size))"),
    (f"max(0, {FITTING})", f"int(({FITTING} > 0) * {FITTING})")],
    "reusable": [("return end", "return float(end)"), (HIT, "(salt,) + tuple(ids[: end + size]) in known")],
    "may_serve": [("return statistics.mean(worse) <=", "return torch.tensor(worse).double().mean() <="),
    ("[a - b for a, b in zip(new, old, strict=True)]", "(torch.tensor(new) - torch.tensor(old)).tolist()")],
}  # fmt: skip


class TestAnswers(Answers):
    lesson, checks, around, rejected, right = "14_llm_serving", checks, ("drawn",), WRONG, RIGHT
