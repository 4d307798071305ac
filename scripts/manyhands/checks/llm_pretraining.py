"""Checks of lesson 12: MinHash, one merge, a document mask, bits per byte, tokens of a word, targets, the next loss.

Nothing here communicates: an answer is judged on each rank alone, on the same numbers everywhere.
"""

import math

import numpy as np
import torch

from manyhands.checks import Wrong, exercise
from manyhands.checks.expect import expect_equal, expect_number, expect_tensor, expect_unchanged, shown

PRIME = 2**31 - 1
LEFT_OUT = -100


@exercise("A", "signature and estimate")
def minhash(answers, ranks=None):
    """`answers` are signature(hashes_S, a_K, b_K), int32 [K], and similarity(one_K, other_K), a float."""
    signature, similarity = answers
    draw, K = np.random.default_rng(5), 32
    a_K, b_K = draw.integers(1, PRIME, size=(2, K))
    for size in (7, 1, 90):
        hashes_S = np.sort(draw.integers(0, PRIME, size=size))
        before_S = hashes_S.copy()
        found_K = np.asarray(signature(hashes_S, a_K, b_K))
        expect_unchanged(torch.from_numpy(hashes_S), torch.from_numpy(before_S), "hashes_S")
        _judge_signature(found_K, before_S, a_K, b_K)
    one_K = np.arange(K, dtype=np.int32)
    for share in (0.75, 1.0, 0.25, 0.0):
        other_K = np.where(one_K < K * share, one_K, one_K[::-1] + 100).astype(np.int32)
        slips = {
            "that is how many; the estimate is their share": K * share,
            "that is the share that differs": 1 - share,
        }
        if not share:  # the same numbers at other places
            other_K = np.roll(one_K, 1)
            slips = {"number k of one belongs to number k of the other": 1.0}
        case = f"where {K * share:.0f} of {K} numbers agree place by place the estimate"
        expect_number(similarity(one_K, other_K), share, case, slips=slips)


def _judge_signature(found_K, hashes_S, a_K, b_K):
    case = f"for a set of {len(hashes_S)} and {len(a_K)} hash functions the signature"
    places_SK = hashes_S[:, None] * a_K + b_K
    ordered_SK = places_SK % PRIME
    slips = {
        "those are the largest; the first in the order is the smallest": ordered_SK.max(0),
        "that is without the remainder: `% PRIME` makes the order a random one": places_SK.min(0),
        "those are of the first shingle alone; take the smallest over the set": ordered_SK[0],
        "that is the shingle that comes first, not its place, (a x + b) mod PRIME": hashes_S[ordered_SK.argmin(0)],
        "the remainder was taken after the smallest was sought": places_SK.min(0) % PRIME,
        "b is missing": (hashes_S[:, None] * a_K % PRIME).min(0),
        "that is one number for each shingle, so the smallest was sought along the wrong axis": ordered_SK.min(1),
    }
    slips = {why: torch.from_numpy(value) for why, value in slips.items()}
    expect_tensor(torch.from_numpy(found_K.astype(np.int64)), torch.from_numpy(ordered_SK.min(0)), case, slips)
    if found_K.nbytes > 4 * len(a_K):
        raise Wrong(
            f"{case} is right, but takes {found_K.nbytes} bytes where int32 takes {4 * len(a_K)}: ranks send it"
        )


@exercise("B", "one merge")
def one_merge(answers, ranks=None):
    """`answers` are most_frequent(pairs), the pair that is merged, and merge(ids, pair, new), a new list."""
    most_frequent, merge = answers
    for pairs, wanted in (
        ({(1, 2): 3, (2, 3): 5, (3, 1): 1}, (2, 3)),
        ({(97, 110): 2, (98, 256): 2, (32, 260): 2, (32, 116): 1}, (32, 260)),
        ({(300, 1): 4, (5, 299): 4, (5, 7): 4}, (5, 7)),
        ({(9, 9): 0, (300, 2): 1}, (300, 2)),
    ):
        case = f"of {', '.join(f'{pair} {n} times' for pair, n in pairs.items())} the pair to merge"
        equals = [pair for pair in pairs if pair != wanted and pairs[pair] == pairs[wanted]]
        slips = {f"{pair} is as frequent as {wanted}, which is smaller": pair for pair in equals}
        expect_equal(most_frequent(dict(pairs)), wanted, case, slips)
    for ids, (a, b), wanted in (
        ([1, 2, 3, 1, 2], (1, 2), [256, 3, 256]),
        ([7, 7, 7, 7, 7], (7, 7), [256, 256, 7]),
        ([2, 1, 2], (1, 2), [2, 256]),
        ([1, 3, 2], (1, 2), [1, 3, 2]),
        ([1], (1, 2), [1]),
        ([], (1, 2), []),
        ([1, 1, 2, 2], (1, 2), [1, 256, 2]),
    ):
        given = list(ids)
        found = merge(given, (a, b), 256)
        if given != ids:
            raise Wrong(f"the list {ids} that merge was given was changed; make a new one")
        starts = [i for i in range(len(ids) - 1) if ids[i : i + 2] == [a, b]]
        slips = {
            "merge each occurrence, not only the first": [*ids[: starts[0]], 256, *ids[starts[0] + 2 :]]
            if starts
            else None,
            f"a token was used twice: the new one takes the place of both, {a} and {b}": (
                [256 if i in starts else token for i, token in enumerate(ids)]
            ),
            "what is left at the end got lost": wanted[:-1],
        }
        expect_equal(found, wanted, f"{ids} with {(a, b)} merged into 256", slips)


@exercise("C", "the mask")
def document_mask(answer, ranks=None):
    """`answer(documents_BT)` is bool [B, T, T]: True where query (second dim) may look at key (third)."""
    for rows in ([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]], [[7, 7, 7, 3, 3, 9]], [[0]]):
        documents_BT = torch.tensor(rows)
        before_BT = documents_BT.clone()
        mask_BTT = answer(documents_BT)
        expect_unchanged(documents_BT, before_BT, "documents_BT")
        _judge_mask(mask_BTT, before_BT)


def _judge_mask(mask_BTT, documents_BT):
    B, T = documents_BT.shape
    if _described(mask_BTT) != f"bool[{B}, {T}, {T}]":
        raise Wrong(f"for documents [{B}, {T}] return a mask bool[{B}, {T}, {T}], not {_described(mask_BTT)}")
    wanted_BTT = (documents_BT[:, :, None] == documents_BT[:, None, :]).tril()
    if torch.equal(mask_BTT, wanted_BTT):
        return
    if torch.equal(mask_BTT, wanted_BTT.mT):
        raise Wrong(
            "queries and keys have changed places: your mask lets token 0 look at later ones, and not vice versa"
        )
    row, query, key = (mask_BTT != wanted_BTT).nonzero()[0].tolist()
    documents = documents_BT[row].tolist()
    case = f"in {documents} token {query} (document {documents[query]})"
    if mask_BTT[row, query, key]:
        why = "a later one" if key > query else f"one of document {documents[key]}"
        raise Wrong(f"{case} can look at token {key}, {why}: hide it")
    if key == query:
        raise Wrong(f"{case} cannot look at itself: softmax over nothing is nan")
    raise Wrong(f"{case} cannot look at token {key}, an earlier one of its own document: allow it")


@exercise("D", "bits per byte")
def bits_per_byte(answer, ranks=None):
    """`answer(nats_per_token, tokens, num_bytes)` is the loss in bits per byte."""
    for nats, tokens, num_bytes in (
        (math.log(2), 100, 100),
        (2 * math.log(2), 50, 200),
        (6.0, 1000, 1900),
        (4.17, 10, 10),
    ):
        wanted = nats * tokens / num_bytes / math.log(2)
        slips = {
            "that is in nats; a bit is ln 2 = 0.693 nats": wanted * math.log(2),
            "divide by ln 2, do not multiply": wanted * math.log(2) ** 2,
            "that is per token; the text has other numbers of bytes and tokens": nats / math.log(2),
            "bytes and tokens have changed places": nats * num_bytes / tokens / math.log(2),
            "that is the logarithm of the loss; the loss is in nats already": math.log2(nats) * tokens / num_bytes,
            "that is for all bytes together": wanted * num_bytes,
        }
        case = f"the loss of {nats:.4g} nats per token for {tokens} tokens of {num_bytes} bytes"
        # ln 2 may be 0.693, as in the lesson's text
        expect_number(answer(nats, tokens, num_bytes), wanted, case, "bits per byte", slips, rel=3e-4)


@exercise(1, "encode a word")
def encode_word(answer, ranks=None):
    """`answer(word, table)` is the list of the tokens of a word of bytes under the merges of `table`, in order."""
    spell = [(97, 110), (98, 256), (110, 97), (257, 97), (97, 97), (260, 260)]  # an, ban, na, bana, aa, aaaa
    for word, wanted, why in (
        (b"an", [256], ""),
        (b"banana", [257, 256, 97], "`an` was learned first, so it is merged first, wherever it stands"),
        (b"nana", [110, 256, 97], "`an` was learned before `na`"),
        (b"aaaaa", [261, 97], "from left to right, and new tokens merge again"),
        (b"xyz", [120, 121, 122], "no pair of it is in the table"),
        (b"", [], ""),
        ("é".encode(), [195, 169], "a byte is a token of its own number"),
        (b"anxan", [256, 120, 256], "a pair is merged everywhere in the word"),
    ):
        table = list(spell)
        found = answer(word, table)
        if table != spell:
            raise Wrong("the table was changed; leave it as it is")
        expect_equal(found, wanted, f"the tokens of {word!r}{f' ({why})' if why else ''}")


@exercise(2, "packed targets")
def packed_targets(answer, ranks=None):
    """`answer(ids_BT, documents_BT)` is the next token of the same document, else -100."""
    for ids, documents in (
        ([[5, 6, 9, 7, 9, 8]], [[0, 0, 0, 1, 1, 2]]),
        ([[1, 2, 3, 4], [4, 3, 2, 1]], [[0, 0, 0, 0], [0, 1, 2, 2]]),
        ([[3]], [[0]]),
    ):
        ids_BT, documents_BT = torch.tensor(ids), torch.tensor(documents)
        given_BT = ids_BT.clone()
        found_BT = answer(given_BT, documents_BT.clone())
        expect_unchanged(given_BT, ids_BT, "ids_BT", ": work on a copy")
        B, T = ids_BT.shape
        if _described(found_BT) != f"int64[{B}, {T}]":
            raise Wrong(f"return targets int64[{B}, {T}], not {_described(found_BT)}")
        for row, targets in enumerate(found_BT.tolist()):
            for t, target in enumerate(targets):
                _judge_target(target, t, ids[row], documents[row])


def _judge_target(target, t, ids, documents):
    is_last = t + 1 == len(ids)
    goes_on = not is_last and documents[t] == documents[t + 1]
    wanted = ids[t + 1] if goes_on else LEFT_OUT
    if is_last:
        why = "the sequence ends here, and its next token is unknown"
    else:
        why = f"token {t + 1} " + ("goes on with the same document" if goes_on else "is the first of another document")
    expect_equal(target, wanted, f"for ids {ids} in documents {documents} target {t} ({why})")


@exercise(3, "predict the next loss")
def next_best(answer, ranks=None):
    """`answer(points, budget_flops)` is (parameters, loss) of the best model for a larger budget."""
    for law, budgets, target in (
        (Law(3, 0.4, 20, -0.09), (1e10, 1e11), 1e12),
        (Law(3, 0.4, 20, -0.09), (1e10, 4e10, 1.6e11), 1e13),
        (Law(0.5, 0.5, 9, -0.05), (1e12, 3e12, 2e13), 7e14),
    ):
        points = law.points(budgets)
        params, loss = answer([dict(point) for point in points], target)
        _judge_prediction(params, loss, law, points, budgets, target)


class Law:
    """The best models of all budgets C: a C^alpha parameters, a loss of b C^beta."""

    def __init__(self, a, alpha, b, beta):
        self.a, self.alpha, self.b, self.beta = a, alpha, b, beta

    def params(self, budget):
        return self.a * budget**self.alpha

    def loss(self, budget):
        return self.b * budget**self.beta

    def points(self, budgets):
        """Points on exact parabolas, whose lowest points are the law's; none of them is a point."""
        return [
            {
                "budget_flops": budget,
                "params": round(self.params(budget) * factor),
                "val_loss": self.loss(budget) + 0.05 * math.log(factor) ** 2,
            }
            for budget in budgets
            for factor in (0.2, 0.5, 1.3, 2.5, 5.0)
        ]


def _judge_prediction(params, loss, law, points, budgets, target):
    case = f"for budgets {', '.join(f'{b:.1e}' for b in budgets)}, asked for {target:.0e}, the"
    wanted, best, last = law.params(target), law.loss(target), budgets[-1]
    measured = [
        min((p for p in points if p["budget_flops"] == b), key=lambda point: point["val_loss"]) for b in budgets
    ]

    def line(x, y, at):
        return np.polyval(np.polyfit(x, y, 1), at)

    logs, at = np.log(budgets), math.log(target)
    slips = {
        "parameters first, then the loss": best,
        "that is the best of the points; the lowest point of the parabola lies between them": (
            math.exp(line(logs, np.log([p["params"] for p in measured]), at))
        ),
        f"that is the best size for {last:.1e}; go on along the line": law.params(last),
        "that is its logarithm": math.log(wanted),
        "that is a straight line in the numbers; take logarithms of budgets and of parameters": (
            line(budgets, list(map(law.params, budgets)), target)
        ),
    }
    expect_number(params, wanted, f"{case} best number of parameters", slips=slips, rel=1e-2)
    slips = {
        "that is its logarithm": math.log(best),
        f"that is the lowest loss of {last:.1e}": law.loss(last),
        "a straight line goes through the logarithms of the losses": line(logs, list(map(law.loss, budgets)), at),
    }
    expect_number(loss, best, f"{case} lowest loss", slips=slips, rel=1e-3)


def _described(found):
    """The dtype and the shape of a tensor, int64[2, 3]; anything else is shown."""
    return f"{found.dtype}{list(found.shape)}".removeprefix("torch.") if torch.is_tensor(found) else shown(found)
