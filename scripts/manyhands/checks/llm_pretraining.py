"""Checks of lesson 12: MinHash, keys to ranks, pairs of equal keys, one merge, a document mask, the minimum of a
parabola; bits per byte, tokens of a word, targets, the next loss.

Nothing here communicates: each rank judges the answer by itself, on the same numbers.
"""

import math
from itertools import combinations, pairwise

import numpy as np
import torch

from manyhands.checks import Wrong, exercise
from manyhands.checks.drawn import luck, sizes
from manyhands.checks.expect import expect_equal, expect_number, expect_tensor, several
from manyhands.checks.witness import shown

PRIME = 2**31 - 1
LEFT_OUT = -100


@exercise("A", "signature and estimate")
def minhash(answers, ranks=None):
    """`answers` are signature(hashes_S, a_K, b_K), int32 [K], and similarity(one_K, other_K), a float."""
    signature, similarity = answers
    draw = np.random.default_rng(luck(5).randrange(10**6))
    for K, size in ((32, 7), (32, 1), (48, 90)):
        a_K, b_K = draw.integers(1, PRIME, size=(2, K))
        hashes_S = np.sort(draw.integers(0, PRIME, size=size))
        _judge_signature(np.asarray(signature(hashes_S, a_K, b_K)), hashes_S, a_K, b_K)
    for K, share in ((32, 0.75), (32, 1.0), (48, 0.25), (48, 0.0)):
        one_K = np.arange(K, dtype=np.int32)
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
        "that is where it stands in the list; take the number that stands there": ordered_SK.argmin(0),
        "b is missing": (hashes_S[:, None] * a_K % PRIME).min(0),
        "that is one number for each shingle, so the smallest was sought along the wrong axis": ordered_SK.min(1),
    }
    slips = {why: torch.from_numpy(value.astype(np.int32)) for why, value in slips.items()}
    wanted = torch.from_numpy(ordered_SK.min(0)).int()  # all of them as the cell's .astype(np.int32) leaves them
    expect_tensor(torch.from_numpy(found_K.astype(np.int64)).int(), wanted, case, slips)
    if found_K.nbytes > 4 * len(a_K):
        raise Wrong(f"{case} is right, but takes {found_K.nbytes} bytes where int32 takes {4 * len(a_K)}")


@exercise("B", "who gets which record")
def parcels(answer, ranks=None):
    """`answer(records_N2, n)` is a list of n tensors: rows (key, document) whose key leaves the remainder r."""
    draw = luck(15)
    for n, size in ((3, 12), (1, 4), (4, 9), (2, 0)):
        rows = [[draw.randrange(1000), draw.randrange(50)] for _ in range(size)]
        records_N2 = torch.tensor(rows, dtype=torch.int32).view(-1, 2)
        found = answer(records_N2.clone(), n)
        if not isinstance(found, list | tuple) or len(found) != n or not all(map(torch.is_tensor, found)):
            came = f"{len(found)} of them" if isinstance(found, list | tuple) and len(found) != n else shown(found)
            raise Wrong(f"for {n} ranks there should be a list of {n} tensors, not {came}")
        keys_N, documents_N = records_N2.unbind(1)
        whole = math.ceil(size / n) if size else 1
        for r, parcel in enumerate(found):
            wanted = records_N2[keys_N % n == r]
            slips = {
                "that is by the document's number; equal keys must meet": records_N2[documents_N % n == r],
                "that cuts the rows in order; equal keys must meet": records_N2[r * whole : (r + 1) * whole],
                "that deals the rows in turn; equal keys must meet": records_N2[r::n],
                "that sends everything to every rank": records_N2,
                "those are the keys alone; the rank must know the documents": wanted[:, 0],
                "those are the documents alone; the rank must know the keys": wanted[:, 1],
            }
            expect_tensor(parcel, wanted, f"of {size} records for {n} ranks the parcel for rank {r}", slips)


@exercise("C", "who meets whom")
def colliding(answer, ranks=None):
    """`answer(records)` is the set of pairs (i, j), i < j, of documents that share a key."""
    draw = luck(16)
    some = [[draw.randrange(6), draw.randrange(20)] for _ in range(14)]
    for records in ([[5, 3], [5, 8], [7, 8]], [[5, 9], [5, 2], [5, 4]], [[1, 6], [2, 6], [2, 6]], [], some):
        groups: dict[int, list[int]] = {}
        for key, document in records:
            groups.setdefault(key, []).append(document)
        each = [sorted(set(group)) for group in groups.values()]
        wanted = {(i, j) for group in each for i in group for j in group if i < j}
        slips = {
            "each document meets the first one only; the others may be copies of each other": {
                (group[0], j) for group in each for j in group[1:]
            },
            "only neighbours are there; all that share a key meet": {p for group in each for p in pairwise(group)},
            "the smaller number comes first": {(j, i) for i, j in wanted},
            "a document is not a copy of itself": {(i, j) for group in each for i in group for j in group if i <= j},
            "each pair is there twice": {(i, j) for group in each for i in group for j in group if i != j},
            "documents of different keys do not meet": set(
                combinations(sorted({document for _, document in records}), 2)
            ),
        }
        found = answer([list(record) for record in records])
        expect_equal(found, wanted, f"for the records {records} the pairs", slips)


@exercise("D", "one merge")
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
        ([7, 7, 7, 7, 7], (7, 7), [256, 256, 7]), ([2, 1, 2], (1, 2), [2, 256]), ([1], (1, 2), [1]), ([], (1, 2), []),
        *_some_merges(),
    ):  # fmt: skip
        given, new = list(ids), 256 if 301 not in wanted else 301
        found = merge(given, (a, b), new)
        if given != ids:
            raise Wrong(f"the list {ids} that merge was given was changed; make a new one")
        starts = [i for i in range(len(ids) - 1) if ids[i : i + 2] == [a, b]]
        slips = {
            "nothing was merged: a list never equals a tuple": ids if len(starts) > 1 else None,
            "merge each occurrence, not only the first": next(([*ids[:i], new, *ids[i + 2 :]] for i in starts), None),
            "a token was used twice": [new if i in starts else token for i, token in enumerate(ids)],
            "what is left at the end got lost": wanted[:-1],
        }
        expect_equal(found, wanted, f"{ids} with {(a, b)} merged into {new}", slips)


def _some_merges():
    draw = luck(7)
    for _ in range(9):
        ids, pair = draw.choices((1, 2, 7), k=draw.randint(2, 12)), (draw.choice((1, 2)), draw.choice((1, 2)))
        yield ids, pair, _merged(ids, pair, 301)


def _merged(ids, pair, new):
    """Merge each pair from left to right; `new` itself is not in a pair."""
    found = []
    for token in ids:
        if found and (found[-1], token) == pair:
            found[-1] = new
        else:
            found.append(token)
    return found


@exercise("E", "the mask")
def document_mask(answer, ranks=None):
    """`answer(documents_BT)` is bool [B, T, T]: True where query (second dim) may look at key (third)."""
    for rows in ([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]], [[7, 7, 7, 3, 3, 9]], [[0]], _some_documents()):
        documents_BT = torch.tensor(rows)
        same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
        found_BTT = answer(documents_BT)
        slips = {
            "queries and keys have changed places: token 0 looks at later ones, and not vice versa": same_BTT.triu(),
            "a token can look at later ones of its document: hide them": same_BTT,
            "a token can look at other documents: hide them": torch.ones_like(same_BTT).tril(),
            "a token cannot look at itself: softmax over nothing is nan": same_BTT.tril(-1),
            "that is the first row's mask; each row has its own documents": same_BTT[:1].tril().expand_as(same_BTT),
        }
        expect_tensor(found_BTT, same_BTT.tril(), f"for the documents {rows} the mask", slips)


def _some_documents():
    """Return rows [B][T] of document numbers, each document contiguous."""
    draw, (B, T) = luck(8), sizes(8, 2, 2, 9)
    numbers = [draw.sample(range(T), T) for _ in range(B)]
    return [[row[cut] for cut in sorted(draw.choices(range(T), k=T))] for row in numbers]


@exercise("F", "the lowest point")
def lowest(answer, ranks=None):
    """`answer(params, losses)` is (parameters, loss) at the lowest point of a parabola in ln(parameters)."""
    draw = luck(17)
    for best, bottom, bend in ((1e4, 2.0, 0.05), (draw.uniform(2e3, 9e5), draw.uniform(1, 3), draw.uniform(0.02, 0.2))):
        params = [best * factor for factor in (0.2, 0.6, 1.4, 3.0)]
        losses = [bottom + bend * math.log(size / best) ** 2 for size in params]
        found = several(answer(list(params), list(losses)), 2, "two numbers, parameters and loss")
        case = f"for {', '.join(f'{size:,.0f}' for size in params)} parameters the"
        plain = np.polyfit(params, losses, 2)
        slips = {
            "that is its logarithm; undo it by math.exp": math.log(best),
            "that is a parabola in the parameters; take their logarithm": -plain[1] / 2 / plain[0],
            "that is the best of the points; the lowest point lies between": params[int(np.argmin(losses))],
            "the derivative is 2·bend·x + slope: a factor of 2 is missing": best**2,
            "the sign is wrong": 1 / best,
            "parameters first, then the loss": bottom,
        }
        expect_number(found[0], best, f"{case} best size", slips=slips, rel=1e-4)
        expect_number(found[1], bottom, f"{case} lowest loss", rel=1e-4)


@exercise(1, "bits per byte")
def bits_per_byte(answer, ranks=None):
    """`answer(nats_per_token, tokens, num_bytes)` is the loss in bits per byte."""
    drawn = luck(9).uniform(1, 9), *sizes(9, 2, 20, 900)
    for nats, tokens, num_bytes in ((3 * math.log(2), 100, 100), (2 * math.log(2), 50, 200), (6.0, 1000, 1900), drawn):
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


@exercise(2, "encode a word")
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
    ):
        expect_equal(answer(word, spell), wanted, f"the tokens of {word!r}{f' ({why})' if why else ''}")
    for table, word in _some_words():
        wanted = list(word)
        for i, pair in enumerate(table):  # in order of learning: no merge creates the pair of an earlier one
            wanted = _merged(wanted, pair, 256 + i)
        expect_equal(answer(word, table), wanted, f"with the table {table} the tokens of {word!r}")


def _some_words():
    """Yield (a table learned from some text, a word) a few times."""
    draw = luck(10)
    for _ in range(12):
        ids, table = draw.choices(b"abn", k=40), []
        for new in range(256, 256 + draw.randint(2, 9)):
            table.append(draw.choice(list(pairwise(ids))))
            ids = _merged(ids, table[-1], new)
        yield table, bytes(draw.choices(b"abnx", k=draw.randint(3, 12)))


@exercise(3, "packed targets")
def packed_targets(answer, ranks=None):
    """`answer(ids_BT, documents_BT)` is the next token of the same document, else -100."""
    for ids, documents in (
        ([[5, 6, 9, 7, 9, 8]], [[0, 0, 0, 1, 1, 2]]),
        ([[3]], [[0]]),
        ([[7 * i + j for j, _ in enumerate(row)] for i, row in enumerate(_some_documents())], _some_documents()),
    ):
        ids_BT, documents_BT = torch.tensor(ids), torch.tensor(documents)
        found_BT = answer(ids_BT, documents_BT)
        next_BT, is_last = ids_BT.roll(-1, 1), torch.arange(ids_BT.shape[1]) == ids_BT.shape[1] - 1
        goes_on = documents_BT == documents_BT.roll(-1, 1)
        wanted_BT = next_BT.masked_fill(~goes_on | is_last, LEFT_OUT)
        slips = {
            "the first token of another document is no target": next_BT.masked_fill(is_last, LEFT_OUT),
            "the sequence ends here, and its last token's target is unknown": next_BT.masked_fill(~goes_on, LEFT_OUT),
            "those are the tokens themselves, not the next": [ids_BT, wanted_BT.where(wanted_BT < 0, ids_BT)],
        }
        expect_tensor(found_BT, wanted_BT, f"for ids {ids} in documents {documents} the row of targets", slips)


@exercise(4, "predict the next loss")
def next_best(answer, ranks=None):
    """`answer(points, budget_flops)` is (parameters, loss) of the best model for a larger budget."""
    _judge_prediction(answer, 3, 0.4, 20, -0.09, (1e10, 1e11), 1e12)
    _judge_prediction(answer, *_some_law())


def _some_law():
    draw = luck(12)
    law = draw.uniform(0.2, 4), draw.uniform(0.4, 0.6), draw.uniform(8, 30), -draw.uniform(0.04, 0.12)
    budgets = sorted(10 ** draw.uniform(10 + i, 10.7 + i) for i in range(3))
    return *law, budgets, budgets[-1] * draw.uniform(5, 90)


def _judge_prediction(answer, a, alpha, b, beta, budgets, target):
    """The best model of a budget C has a C^alpha parameters and a loss of b C^beta."""
    params_of, loss_of = (lambda budget: a * budget**alpha), (lambda budget: b * budget**beta)
    points = [  # on exact parabolas whose minima follow the law and lie between the points
        {
            "budget_flops": budget,
            "params": round(params_of(budget) * factor),
            "val_loss": loss_of(budget) + 0.05 * math.log(factor) ** 2,
        }
        for budget in budgets
        for factor in (0.2, 0.5, 1.3, 2.5, 5.0)
    ]
    params, loss = several(answer([dict(point) for point in points], target), 2, "two numbers, parameters and loss")
    case = f"for budgets {', '.join(f'{b:.1e}' for b in budgets)}, asked for {target:.0e}, the"
    wanted, best, last = params_of(target), loss_of(target), budgets[-1]

    def line(x, y, at):
        return np.polyval(np.polyfit(x, y, 1), at)

    logs, at = np.log(budgets), math.log(target)
    nearest = [round(params_of(budget) * 1.3) for budget in budgets]  # the best of the points
    slips = {
        "parameters first, then the loss": best,
        "that is the best of the points; the parabola's lowest lies between": math.exp(line(logs, np.log(nearest), at)),
        f"that is the best size for {last:.1e}; go on along the line": params_of(last),
        "that is its logarithm": math.log(wanted),
        "that is a line in the numbers; take logarithms": line(budgets, list(map(params_of, budgets)), target),
    }
    expect_number(params, wanted, f"{case} best number of parameters", slips=slips, rel=1e-3)
    slips = {
        "that is its logarithm": math.log(best),
        f"that is the lowest loss of {last:.1e}": loss_of(last),
        "a straight line goes through the logarithms of the losses": line(logs, list(map(loss_of, budgets)), at),
    }
    expect_number(loss, best, f"{case} lowest loss", slips=slips, rel=2e-4)
