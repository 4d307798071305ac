"""Each check of lesson 12 accepts right answers in other styles and rejects plausible wrong ones by their fault.

The checks communicate nothing, so most are judged in this process; the lesson's own solutions on ranks, too.
"""

import functools
import math
import operator

import numpy as np
import torch
from exercises import Answers, heard_alike
from manyhands.checks import llm_pretraining as checks

PRIME = 2**31 - 1

# ---- build A ----


def sign(hashes_S, a_K, b_K):
    return ((np.outer(hashes_S, a_K) + b_K) % PRIME).min(axis=0).astype("int32")


def by_loop(hashes_S, a_K, b_K):  # right
    return np.array([min((x * a + b) % PRIME for x in hashes_S) for a, b in zip(a_K, b_K, strict=True)], np.int32)


def by_reduce(hashes_S, a_K, b_K):  # right
    return torch.tensor(np.minimum.reduce((a_K * hashes_S[:, None] + b_K) % PRIME), dtype=torch.int32).numpy()


def alike(one_K, other_K):
    return np.mean(one_K == other_K)


def alike_by_count(one_K, other_K):  # right
    return sum(map(operator.eq, one_K, other_K)) / len(one_K)


def in_place(hashes_S, a_K, b_K):
    hashes_S %= 1000
    return sign(hashes_S, a_K, b_K)


SIGNATURES = {
    "largest": (lambda h, a, b: ((h[:, None] * a + b) % PRIME).max(0).astype(np.int32), "those are the largest"),
    "wrong_axis": (lambda h, a, b: ((h[:, None] * a + b) % PRIME).min(1), "along the wrong axis"),
    "no_remainder": (lambda h, a, b: (h[:, None] * a + b).min(0), "without the remainder"),
    "no_b": (lambda h, a, b: (h[:, None] * a % PRIME).min(0).astype(np.int32), "b is missing"),
    "first_only": (lambda h, a, b: ((h[0] * a + b) % PRIME).astype(np.int32), "of the first shingle alone"),
    "eight_bytes": (lambda h, a, b: sign(h, a, b).astype(np.int64), "takes 256 bytes where int32 takes 128"),
    "one_number": (lambda h, a, b: sign(h, a, b).min(), "should have the shape [32], not []"),
    "in_place": (in_place, "hashes_S was changed"),
}  # fmt: skip
SIMILARITIES = {
    "number": (lambda x, y: (x == y).sum(), "that is how many"),
    "as_sets": (lambda x, y: len(set(x.tolist()) & set(y.tolist())) / len(x), "number k of one belongs to number k"),
    "unequal": (lambda x, y: (x != y).mean(), "that is the share that differs"),
    "of_sets": (lambda x, y: len(np.intersect1d(x, y)) / len(np.union1d(x, y)), "the estimate should be 0.75, not 0.6"),
}  # fmt: skip

# ---- build B ----


def frequent(pairs):
    return min(pairs, key=lambda pair: (-pairs[pair], pair))


def join_pairs(ids, pair, new):
    out = []
    for i in ids:
        out.append(i)
        if tuple(out[-2:]) == pair:
            out[-2:] = [new]
    return out


def by_sorting(pairs):  # right
    return sorted(pairs.items(), key=lambda item: (-item[1], item[0]))[0][0]


def by_text(ids, pair, new):  # right
    text = "".join(chr(i) for i in ids)
    return [ord(c) for c in text.replace(chr(pair[0]) + chr(pair[1]), chr(new))]


def changes_the_list(ids, pair, new):
    for i in range(len(ids) - 2, -1, -1):
        if tuple(ids[i : i + 2]) == pair:
            ids[i : i + 2] = [new]
    return ids


def uses_twice(ids, pair, new):
    out, i = [], 0
    while i < len(ids):
        hit = tuple(ids[i : i + 2]) == pair
        out.append(new if hit else ids[i])
        i += 1
    return out


def first_only(ids, pair, new):
    for i in range(len(ids) - 1):
        if (ids[i], ids[i + 1]) == pair:
            return [*ids[:i], new, *ids[i + 2 :]]
    return list(ids)


def loses_the_end(ids, pair, new):
    out, i = [], 0
    while i < len(ids) - 1:
        hit = (ids[i], ids[i + 1]) == pair
        out.append(new if hit else ids[i])
        i += 1 + hit
    return out


PAIRS = {
    "largest_tie": (lambda pairs: max(pairs, key=lambda pair: (pairs[pair], pair)),
                    "is as frequent as (32, 260), which is smaller"),
    "first_met": (lambda pairs: max(pairs, key=pairs.get), "is as frequent as"),
    "rarest": (lambda pairs: min(pairs, key=pairs.get), "the pair to merge should be [2, 3], not [3, 1]"),
    "with_count": (lambda pairs: max(pairs.items(), key=lambda item: item[1]), "should be [2, 3], not [[2, 3], 5]"),
}  # fmt: skip
MERGED = {
    "changes": (changes_the_list, "was changed; make a new one"),
    "twice": (uses_twice, "a token was used twice"),
    "first": (first_only, "merge each occurrence"),
    "end": (loses_the_end, "what is left at the end got lost"),
    "nothing": (lambda ids, pair, new: list(ids), "should be [256, 3, 256], not [1, 2, 3, 1, 2]"),
}  # fmt: skip

# ---- build C ----


def same_of(documents_BT):
    return documents_BT.unsqueeze(2) == documents_BT.unsqueeze(1)


def by_positions(documents_BT):  # right
    at_T = torch.arange(documents_BT.shape[1])
    return same_of(documents_BT) & (at_T[:, None] >= at_T)


def by_blocks(documents_BT):  # right
    rows = []
    for documents_T in documents_BT:
        _, counts = documents_T.unique_consecutive(return_counts=True)
        rows.append(torch.block_diag(*[torch.ones(n, n).tril() for n in counts]).bool())
    return torch.stack(rows)


def first_row_only(documents_BT):
    return by_positions(documents_BT[:1]).expand(len(documents_BT), -1, -1)


MASKS = {
    "no_causal": (same_of, "can look at token 1, a later one"),
    "causal_only": (lambda d: torch.ones_like(same_of(d)).tril(), "can look at token 0, one of document 0"),
    "transposed": (lambda d: same_of(d).triu(), "queries and keys have changed places"),
    "not_itself": (lambda d: same_of(d).tril(-1), "cannot look at itself: softmax over nothing is nan"),
    "earlier_documents": (lambda d: (d[:, :, None] >= d[:, None, :]).tril(), "can look at token 0, one of document 0"),
    "scores": (lambda d: torch.where(by_positions(d), 0.0, -math.inf),
               "return a mask bool[2, 6, 6], not float32[2, 6, 6]"),
    "first_row": (first_row_only, "document"),
    "no_batch": (lambda d: by_positions(d)[0], "[2, 6, 6], not bool[6, 6]"),
}  # fmt: skip

# ---- build D ----


def by_log2(nats, tokens, num_bytes):  # right
    return np.float64(nats) * math.log2(math.e) * (tokens / num_bytes)


def by_perplexity(nats, tokens, num_bytes):  # right
    return torch.tensor(math.log2(math.exp(nats)) * tokens / num_bytes, dtype=torch.float64)


BITS = {
    "nats": (lambda nats, tokens, b: nats * tokens / b, "that is in nats; a bit is ln 2"),
    "times": (lambda nats, tokens, b: nats * tokens / b * math.log(2), "divide by ln 2, do not multiply"),
    "per_token": (lambda nats, tokens, b: nats / math.log(2), "that is per token"),
    "places": (lambda nats, tokens, b: nats / math.log(2) * b / tokens, "have changed places"),
    "whole": (lambda nats, tokens, b: nats * tokens / math.log(2), "for all bytes together"),
}  # fmt: skip

# ---- exercise 1 ----


def in_order(word, table):  # right: a pair that is merged away does not come back
    ids = list(word)
    for number, pair in enumerate(table):
        ids = join_pairs(ids, tuple(pair), 256 + number)
    return ids


def one_at_a_time(word, table):  # right
    ids = list(word)
    while True:
        known = [(table.index(pair), i) for i, pair in enumerate(zip(ids, ids[1:], strict=False)) if pair in table]
        if not known:
            return tuple(ids)
        number, i = min(known)
        ids[i : i + 2] = [256 + number]


def from_the_left(word, table):
    ids, i = list(word), 0
    while i < len(ids) - 1:
        if (ids[i], ids[i + 1]) in table:
            ids[i : i + 2] = [256 + table.index((ids[i], ids[i + 1]))]
            i = 0
        else:
            i += 1
    return ids


def one_round(word, table):
    ids = list(word)
    for pair in zip(ids, ids[1:], strict=False):
        if pair in table:
            return join_pairs(ids, pair, 256 + table.index(pair))
    return ids


def longest_first(word, table):
    ids = list(word)
    for number in range(len(table) - 1, -1, -1):
        ids = join_pairs(ids, table[number], 256 + number)
    return ids


def empties_the_table(word, table):
    ids, number = list(word), 256
    while table:
        ids, number = join_pairs(ids, table.pop(0), number), number + 1
    return ids


WORDS = {
    "left": (from_the_left, "`an` was learned first"),
    "one_round": (one_round, "should be [257, 256, 97], not"),
    "reversed": (longest_first, "should be"),
    "numbers_from_0": (lambda word, table: [i - 256 if i > 255 else i for i in in_order(word, table)],
                       "The tokens of b'an' should be [256], not [0]"),
    "empties": (empties_the_table, "the table was changed"),
}  # fmt: skip

# ---- exercise 2 ----


def targets_by_loop(ids_BT, documents_BT):  # right
    return torch.tensor(
        [
            [ids[t + 1] if t + 1 < len(ids) and docs[t + 1] == docs[t] else -100 for t in range(len(ids))]
            for ids, docs in zip(ids_BT.tolist(), documents_BT.tolist(), strict=True)
        ]
    )


def targets_by_roll(ids_BT, documents_BT):  # right
    found = ids_BT.roll(-1, 1)
    found[documents_BT != documents_BT.roll(-1, 1)] = -100
    found[:, -1] = -100
    return found


def across(ids_BT, documents_BT):
    found = ids_BT.roll(-1, 1)
    found[:, -1] = -100
    return found


def no_end(ids_BT, documents_BT):
    found = ids_BT.roll(-1, 1)
    found[documents_BT != documents_BT.roll(-1, 1)] = -100
    return found


def wrong_side(ids_BT, documents_BT):
    found = ids_BT.roll(-1, 1)
    found[documents_BT != documents_BT.roll(1, 1)] = -100
    found[:, -1] = -100
    return found


def on_the_ids(ids_BT, documents_BT):
    ids_BT[documents_BT != documents_BT.roll(-1, 1)] = -100
    return ids_BT.roll(-1, 1)


TARGETS = {
    "across": (across, "is the first of another document"),
    "no_end": (no_end, "the sequence ends here"),
    "wrong_side": (wrong_side, "should be"),
    "minus_one": (lambda i, d: torch.where(targets_by_roll(i, d) == -100, -1, targets_by_roll(i, d)),
                  "should be -100, not -1"),
    "itself": (lambda i, d: i.clone(), "(token 1 goes on with the same document) should be 6, not 5"),
    "on_the_ids": (on_the_ids, "ids_BT was changed"),
    "too_short": (lambda i, d: targets_by_roll(i, d)[:, :-1], "return targets int64[1, 6], not int64[1, 5]"),
}  # fmt: skip

# ---- exercise 3 ----


def lowest(points, budget):
    here = [p for p in points if p["budget_flops"] == budget]
    x = np.log([p["params"] for p in here])
    bend, slope, height = np.polyfit(x, [p["val_loss"] for p in here], 2)
    return math.exp(-slope / 2 / bend), height - slope**2 / 4 / bend


def along(points, budget_flops, of=lowest, x_of=math.log, y_of=math.log, back=math.exp):
    budgets = sorted({p["budget_flops"] for p in points})
    rows = [of(points, b) for b in budgets]
    lines = [np.polyfit([x_of(b) for b in budgets], [y_of(row[k]) for row in rows], 1) for k in (0, 1)]
    return tuple(back(np.polyval(line, x_of(budget_flops))) for line in lines)


def best_point(points, budget):
    best = min((p for p in points if p["budget_flops"] == budget), key=lambda p: p["val_loss"])
    return best["params"], best["val_loss"]


def by_least_squares(points, budget_flops):  # right
    budgets = sorted({p["budget_flops"] for p in points})
    A = np.stack([np.ones(len(budgets)), np.log(budgets)], 1)
    y = np.log([lowest(points, b) for b in budgets])
    return np.exp(np.array([1, math.log(budget_flops)]) @ np.linalg.lstsq(A, y, rcond=None)[0])


def in_decades(points, budget_flops):  # right
    return along(points, budget_flops, x_of=math.log10, y_of=math.log10, back=lambda y: 10**y)


NEXT = {
    "points": (functools.partial(along, of=best_point), "that is the best of the points"),
    "numbers": (functools.partial(along, x_of=float, y_of=float, back=float), "take logarithms"),
    "last": (lambda points, b: lowest(points, max(p["budget_flops"] for p in points)), "go on along the line"),
    "swapped": (lambda points, b: along(points, b)[::-1], "parameters first, then the loss"),
    "log": (lambda points, b: tuple(map(math.log, along(points, b))), "that is its logarithm"),
    "loss_line": (lambda points, b: (along(points, b)[0], along(points, b, y_of=float, back=float)[1]),
                  "logarithms of the losses"),
}  # fmt: skip

REJECTED = {  # {check: {mutant: (answer, sentence)}}
    "minhash": {name: ((f, alike), text) for name, (f, text) in SIGNATURES.items()}
    | {name: ((sign, f), text) for name, (f, text) in SIMILARITIES.items()},
    "one_merge": {name: ((f, join_pairs), text) for name, (f, text) in PAIRS.items()}
    | {name: ((frequent, f), text) for name, (f, text) in MERGED.items()},
    "document_mask": MASKS,
    "bits_per_byte": BITS,
    "encode_word": WORDS,
    "packed_targets": TARGETS,
    "next_best": NEXT,
}
RIGHT = {
    "minhash": [(by_loop, alike_by_count), (by_reduce, alike)],
    "one_merge": [(by_sorting, by_text), (frequent, join_pairs)],
    "document_mask": [by_positions, by_blocks],
    "bits_per_byte": [by_log2, by_perplexity],
    "encode_word": [in_order, one_at_a_time],
    "packed_targets": [targets_by_loop, targets_by_roll],
    "next_best": [by_least_squares, in_decades],
}


class TestAnswers(Answers):
    lesson, checks, rejected, right = "12_llm_pretraining", checks, REJECTED, RIGHT
    solutions = {"minhash": ("signature", "similarity"), "one_merge": ("most_frequent", "merge")}
    given = {"PRIME": PRIME}


def hears_of_rank_1(ranks):
    return checks.document_mask(same_of if ranks.rank else by_positions, ranks)


def test_a_fault_of_one_rank_is_told_on_all(pool):
    assert heard_alike(pool.run(2, hears_of_rank_1)).startswith("Rank 1: In [0, 0, 1, 1, 1, 2] token 0")
