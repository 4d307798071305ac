"""Checks of lesson 12: MinHash, one merge, a document mask, bits per byte, a word's tokens, packed targets, the next loss.

Nothing here communicates: an answer is judged on each rank alone, on the same numbers everywhere.
"""

import math
import operator

import numpy as np
import torch

from manyhands.checks import Wrong, exercise
from manyhands.checks.values import number, plain, shown

PRIME = 2**31 - 1
LEFT_OUT = -100


@exercise("A", "signature and estimate")
def minhash(answers, ranks=None):
    """`answers` are signature(hashes_S, a_K, b_K), int32 [K], and similarity(one_K, other_K), a float."""
    signature, similarity = answers
    draw = np.random.default_rng(5)
    a_K, b_K = draw.integers(1, PRIME, size=(2, 32))
    for size in (7, 1, 90):
        hashes_S = np.sort(draw.integers(0, PRIME, size=size))
        before = hashes_S.copy()
        found = signature(hashes_S, a_K, b_K)
        if not np.array_equal(hashes_S, before):
            raise Wrong("hashes_S was changed; make a new array")
        _judge_signature(found, hashes_S, a_K, b_K)
    one = np.arange(32, dtype=np.int32)
    for share in (0.75, 1.0, 0.25, 0.0):
        other = np.where(np.arange(32) < 32 * share, one, one[::-1] + 100).astype(np.int32)
        other = other if share else np.roll(one, 1)
        found = number(similarity(one, other), "the share of equal numbers")
        _judge_similarity(found, share)


@exercise("B", "one merge")
def one_merge(answers, ranks=None):
    """`answers` are most_frequent(pairs), the pair that is merged, and merge(ids, pair, new), a new list."""
    most_frequent, merge = answers
    cases = (
        ({(1, 2): 3, (2, 3): 5, (3, 1): 1}, (2, 3)),
        ({(97, 110): 2, (98, 256): 2, (32, 260): 2, (32, 116): 1}, (32, 260)),
        ({(300, 1): 4, (5, 299): 4, (5, 7): 4}, (5, 7)),
        ({(9, 9): 0, (300, 2): 1}, (300, 2)),
    )
    for pairs, wanted in cases:
        _judge_pair(most_frequent(dict(pairs)), wanted, pairs)
    for ids, pair, wanted in (
        ([1, 2, 3, 1, 2], (1, 2), [256, 3, 256]),
        ([7, 7, 7, 7, 7], (7, 7), [256, 256, 7]),
        ([2, 1, 2], (1, 2), [2, 256]),
        ([1, 3, 2], (1, 2), [1, 3, 2]),
        ([1], (1, 2), [1]),
        ([], (1, 2), []),
        ([1, 1, 2, 2], (1, 2), [1, 256, 2]),
    ):
        given = list(ids)
        found = merge(given, pair, 256)
        if given != ids:
            raise Wrong(f"the list {ids} that merge was given was changed; make a new one")
        _judge_merged(found, ids, pair, wanted)


@exercise("C", "the mask")
def document_mask(answer, ranks=None):
    """`answer(documents_BT)` is bool [B, T, T]: True where query (second dim) may look at key (third)."""
    for rows in ([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]], [[7, 7, 7, 3, 3, 9]], [[0]]):
        documents_BT = torch.tensor(rows)
        before = documents_BT.clone()
        mask = answer(documents_BT)
        if not torch.equal(documents_BT, before):
            raise Wrong("documents_BT was changed; make a new tensor")
        _judge_mask(mask, documents_BT)


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
        found = number(answer(nats, tokens, num_bytes), "a number of bits")
        if abs(found - wanted) <= 1e-9 * wanted:
            continue
        case = f"{nats:.4g} nats per token, {tokens} tokens, {num_bytes} bytes: {wanted:.4f} bits per byte, not {found:.4f}"
        slips = {
            "that is in nats; a bit is ln 2 = 0.693 nats": wanted * math.log(2),
            "divide by ln 2, do not multiply": wanted * math.log(2) ** 2,
            "that is per token; the text has other numbers of bytes and tokens": nats / math.log(2),
            "bytes and tokens have changed places": nats * num_bytes / tokens / math.log(2),
            "that is the logarithm of the loss; the loss is in nats already": math.log2(nats) * tokens / num_bytes,
            "that is for all bytes together": wanted * num_bytes,
        }
        raise Wrong(f"{case}{_slip(found, slips)}")


@exercise(1, "encode a word")
def encode_word(answer, ranks=None):
    """`answer(word, table)` is the list of the tokens of a word of bytes under the merges of `table`, in their order."""
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
        found = _ids(answer(word, table), f"the tokens of {word!r}")
        if table != spell:
            raise Wrong("the table was changed; leave it as it is")
        if found != wanted:
            raise Wrong(f"the word {word!r} should be {wanted}, not {found}{': ' if why else ''}{why}")


@exercise(2, "packed targets")
def packed_targets(answer, ranks=None):
    """`answer(ids_BT, documents_BT)` is the next token of the same document, else -100."""
    for ids, documents in (
        ([[5, 6, 9, 7, 9, 8]], [[0, 0, 0, 1, 1, 2]]),
        ([[1, 2, 3, 4], [4, 3, 2, 1]], [[0, 0, 0, 0], [0, 1, 2, 2]]),
        ([[3]], [[0]]),
    ):
        ids_BT, documents_BT = torch.tensor(ids), torch.tensor(documents)
        before = ids_BT.clone()
        found = answer(ids_BT, documents_BT)
        if not torch.equal(ids_BT, before):
            raise Wrong("ids_BT was changed; work on a copy")
        _judge_targets(found, ids_BT, documents_BT)


@exercise(3, "predict the next loss")
def next_best(answer, ranks=None):
    """`answer(points, budget_flops)` is (parameters, loss) of the best model for a larger budget."""
    for budgets, target in (((1e10, 1e11), 1e12), ((1e10, 4e10, 1.6e11), 1e13)):
        points = _grid(budgets)
        _judge_prediction(answer(points, target), points, budgets, target)


# ---- build A ----


def _judge_signature(found, hashes_S, a_K, b_K):
    S, K = len(hashes_S), len(a_K)
    found = np.asarray(found)
    ordered_SK = (hashes_S[:, None] * a_K + b_K) % PRIME
    case = f"for a set of {S} and {K} hash functions"
    if found.shape != (K,):
        why = " (that is one number for each shingle, so the smallest was sought along the wrong axis)"
        raise Wrong(
            f"{case} the signature should have shape [{K}], not {list(found.shape)}{why if found.shape == (S,) else ''}"
        )
    if found.dtype.kind not in "iu":
        raise Wrong(f"{case} the numbers should be int32, not {found.dtype}")
    wanted = ordered_SK.min(0)
    if not np.array_equal(found.astype(np.int64), wanted):
        slips = {
            "those are the largest; the first in the order is the smallest": ordered_SK.max(0),
            "that is without the remainder: `% PRIME` makes the order a random one": (
                hashes_S[:, None] * a_K + b_K
            ).min(0),
            "those are of the first shingle alone; take the smallest over the set": ordered_SK[0],
            "that is the shingle that comes first, not its place; then equal sets agree as well, but keep to (a x + b) mod PRIME": hashes_S[
                ordered_SK.argmin(0)
            ],
            "the remainder was taken after the smallest was sought": ((hashes_S[:, None] * a_K + b_K).min(0)) % PRIME,
            "b is missing": (hashes_S[:, None] * a_K % PRIME).min(0),
        }
        told = next((f": {text}" for text, slip in slips.items() if np.array_equal(found.astype(np.int64), slip)), "")
        first = int(np.flatnonzero(found.astype(np.int64) != wanted)[0])
        raise Wrong(f"{case} number {first} should be {wanted[first]}, not {found[first]}{told}")
    if found.nbytes > 4 * K:
        raise Wrong(
            f"{case} the signature is right, but takes {found.nbytes} bytes where int32 takes {4 * K}: ranks send it"
        )


def _judge_similarity(found, share):
    if abs(found - share) <= 1e-9:
        return
    case = f"of 32 numbers {32 * share:.0f} agree place by place"
    if abs(found - 32 * share) <= 1e-9:
        raise Wrong(f"{case}: that is how many; the estimate is their share, {share:g}")
    if abs(found - (1 - share)) <= 1e-9 and share != 0:
        raise Wrong(f"{case}: that is the share that differs; the estimate is {share:g}")
    if share == 0:
        raise Wrong(
            f"{case}, though both hold the same numbers: the estimate is 0, not {found:g}; number k of one belongs to "
            "number k of the other"
        )
    raise Wrong(f"{case}: the estimate should be {share:g}, not {found:g}")


# ---- build B ----


def _judge_pair(found, wanted, pairs):
    case = f"of {', '.join(f'{pair} {n} times' for pair, n in pairs.items())}"
    if isinstance(found, (tuple, list, np.ndarray)) and len(found) == 2:
        found = _whole(found, case)
    else:
        raise Wrong(f"{case}: return a pair such as {wanted}, not {plain(found)}")
    if found == wanted:
        return
    if found not in pairs:
        raise Wrong(f"{case}: {found} is none of them")
    if pairs[found] == pairs[wanted]:
        raise Wrong(f"{case}: {found} is as frequent as {wanted}, which is smaller")
    raise Wrong(f"{case}: {wanted} occurs most often, not {found}")


def _judge_merged(found, ids, pair, wanted):
    found = _ids(found, f"{ids} with {pair} merged")
    if found == wanted:
        return
    a, b = pair
    slips = (
        (len(found) > len(wanted) and found.count(256) == 1, "merge each occurrence, not only the first"),
        (
            ids and len(found) < len(wanted) and ids[-1:] != found[-1:],
            "what is left at the end got lost, or a token was used twice",
        ),
        (
            found.count(256) > wanted.count(256) or len(found) == len(ids) and 256 in found,
            f"a token was used twice: the new one takes the place of both, {a} and {b}",
        ),
    )
    told = next((f": {text}" for wrong, text in slips if wrong), "")
    raise Wrong(f"{ids} with {pair} merged into 256 should be {wanted}, not {found}{told}")


# ---- build C ----


def _judge_mask(mask, documents_BT):
    B, T = documents_BT.shape
    if not isinstance(mask, torch.Tensor) or mask.shape != (B, T, T):
        found = f"a tensor of shape {list(mask.shape)}" if isinstance(mask, torch.Tensor) else shown(mask)
        raise Wrong(f"for documents [{B}, {T}] return a mask of shape [{B}, {T}, {T}], not {found}")
    if mask.dtype != torch.bool:
        raise Wrong(
            f"the mask should be bool, not {str(mask.dtype).removeprefix('torch.')}: attention adds a mask of numbers to its scores"
        )
    same = documents_BT[:, :, None] == documents_BT[:, None, :]
    wanted = torch.stack([part.tril() for part in same])
    if torch.equal(mask, wanted):
        return
    if T > 1 and torch.equal(mask, wanted.transpose(1, 2)):
        raise Wrong(
            "queries and keys have changed places: your mask lets token 0 look at later ones, and not the other way round"
        )
    row, query, key = (int(i) for i in (mask != wanted).nonzero()[0])
    numbers = f"token {query} (document {documents_BT[row, query]})"
    if mask[row, query, key]:
        why = "a later one" if key > query else f"one of document {documents_BT[row, key]}"
        raise Wrong(f"in {documents_BT[row].tolist()} {numbers} can look at token {key}, {why}: hide it")
    if key == query:
        raise Wrong(f"in {documents_BT[row].tolist()} {numbers} cannot look at itself: softmax over nothing is nan")
    raise Wrong(
        f"in {documents_BT[row].tolist()} {numbers} cannot look at token {key}, an earlier one of its own document: allow it"
    )


# ---- exercise 2 ----


def _judge_targets(found, ids_BT, documents_BT):
    B, T = ids_BT.shape
    if not isinstance(found, torch.Tensor) or found.shape != (B, T) or found.dtype != torch.long:
        what = (
            f"{str(found.dtype).removeprefix('torch.')}{list(found.shape)}"
            if isinstance(found, torch.Tensor)
            else shown(found)
        )
        raise Wrong(f"return targets int64[{B}, {T}], not {what}")
    for row in range(B):
        ids, documents, targets = (t[row].tolist() for t in (ids_BT, documents_BT, found))
        for t in range(T):
            goes_on = t + 1 < T and documents[t] == documents[t + 1]
            wanted = ids[t + 1] if goes_on else LEFT_OUT
            if targets[t] == wanted:
                continue
            case = f"ids {ids} in documents {documents}: target {t} should be {wanted}, not {targets[t]}"
            if t + 1 == T:
                raise Wrong(f"{case}; the sequence ends here, and its next token is unknown")
            if not goes_on:
                raise Wrong(f"{case}; token {t + 1} is the first of another document")
            raise Wrong(f"{case}; token {t + 1} goes on with the same document")


# ---- exercise 3 ----


def _grid(budgets):
    """Points on exact parabolas, whose lowest points lie on params = 3 C^0.4 and loss = 20 C^-0.09; none of them is a point."""
    points = []
    for budget in budgets:
        params, loss = 3 * budget**0.4, 20 * budget**-0.09
        for factor in (0.2, 0.5, 1.3, 2.5, 5.0):
            bend = 0.05 * math.log(factor) ** 2
            points.append({"budget_flops": budget, "params": round(params * factor), "val_loss": loss + bend})
    return points


def _judge_prediction(found, points, budgets, target):
    try:
        params, loss = found
    except (TypeError, ValueError):
        raise Wrong(f"return (parameters, loss), not {plain(found)}") from None
    params, loss = number(params, "a number of parameters"), number(loss, "a loss")
    wanted, best = 3 * target**0.4, 20 * target**-0.09
    case = f"budgets {', '.join(f'{b:.1e}' for b in budgets)}, asked for {target:.0e}"
    if abs(params / wanted - 1) < 1e-2 and abs(loss / best - 1) < 1e-3:
        return
    if abs(params / best - 1) < 1e-2 or abs(loss / wanted - 1) < 1e-2:
        raise Wrong(f"{case}: parameters first, then the loss")
    measured = [
        min((p for p in points if p["budget_flops"] == b), key=lambda point: point["val_loss"]) for b in budgets
    ]
    slope = np.polyfit(np.log(budgets), np.log([p["params"] for p in measured]), 1)
    by_points = math.exp(np.polyval(slope, math.log(target)))
    last = 3 * budgets[-1] ** 0.4
    slips = {
        "that is the best of the points; the lowest point of the parabola lies between them": by_points,
        f"that is the best size for {budgets[-1]:.1e}; go on along the line": last,
        "that is its logarithm": math.log(wanted),
        "that is a straight line in the numbers; take logarithms of budgets and of parameters": np.polyval(
            np.polyfit(budgets, [3 * b**0.4 for b in budgets], 1), target
        ),
    }
    if abs(params / wanted - 1) >= 1e-2:
        raise Wrong(f"{case}: {wanted:,.0f} parameters, not {params:,.0f}{_slip(params, slips, 1e-2)}")
    slips = {
        "that is its logarithm": math.log(best),
        f"that is the lowest loss of {budgets[-1]:.1e}": 20 * budgets[-1] ** -0.09,
        "a straight line goes through the logarithms of the losses": np.polyval(
            np.polyfit(np.log(budgets), [20 * b**-0.09 for b in budgets], 1), math.log(target)
        ),
    }
    raise Wrong(f"{case}: a loss of {best:.4f}, not {loss:.4f}{_slip(loss, slips, 1e-3)}")


# ---- for several ----


def _slip(found, slips, tolerance=1e-9):
    """ ": why" of the first known slip that gives this number, or ""."""
    return next(
        (f": {text}" for text, value in slips.items() if abs(found - value) <= tolerance * max(1e-12, abs(value))),
        "",
    )


def _whole(found, case):
    try:
        return tuple(operator.index(part) for part in found)
    except TypeError:
        raise Wrong(f"{case}: tokens are whole numbers, not {plain(found)}") from None


def _ids(found, what):
    if found is ...:
        raise NotImplementedError
    if isinstance(found, (bytes, str)) or not hasattr(found, "__iter__"):
        raise Wrong(f"{what}: return a list of tokens, not {shown(found)}")
    return list(_whole(found, what))
