"""Each check of lesson 12 accepts right answers in other styles and rejects plausible wrong ones by their fault.

The checks communicate nothing, so most are judged in this process; the lesson's own solutions on ranks, too.
"""

from itertools import combinations

from exercises import Answers, heard_alike
from manyhands.checks import llm_pretraining as checks

LOWEST = "ordered_SK.min(0)"
FREQUENT = "min(pairs, key=lambda pair: (-pairs[pair], pair))"
NEXT, KNOWN = "2 if both else 1", "table[min(known)], 256 + min(known)"
GOES_ON = "torch.where(goes_on_Bt, ids_BT[:, 1:], -100)"
ENDS = f"targets_BT[:, :-1] = {GOES_ON}"
REJECTED = {
    "minhash": [
        (".min(0)", ".max(0)", "those are the largest"),
        (".min(0)", ".min(1)", "along the wrong axis"),
        (" % PRIME", "", "without the remainder"),
        (" + b_K", "", "b is missing"),
        (LOWEST, "ordered_SK[0]", "of the first shingle alone"),
        (LOWEST, "hashes_S[ordered_SK.argmin(0)]", "that is the shingle that comes first, not its place"),
        ("np.int32", "np.int64", "takes 256 bytes where int32 takes 128"),
        ("    ordered_SK", "    hashes_S %= 1000\n    ordered_SK", "hashes_S was changed"),
        (".mean()", ".sum()", "that is how many"),
        ("(one_K == other_K).mean()", "len(set(one_K) & set(other_K)) / len(one_K)",
         "number k of one belongs to number k"),
        ("(one_K == other_K).mean()", "(one_K == other_K).sum() / 32",
         "of 48 numbers agree place by place the estimate"),
        (" % PRIME", " % 2**31", "the signature is wrong: element [0] should be"),
        (LOWEST, f"np.sort({LOWEST})", "the signature is wrong: element [0] should be"),
        (LOWEST, "ordered_SK.argmin(0)", "that is where it stands in the list"),
        ("hashes_S[:, None] * a_K + b_K", "(hashes_S[:, None] + b_K) * a_K", "the signature is wrong"),
        ("one_K == other_K", "one_K != other_K", "that is the share that differs"),
    ],
    "parcels": [
        ("[:, 0] % n", "[:, 1] % n", "that is by the document's number"),
        ("[records_N2[records_N2[:, 0] % n == r] for r in range(n)]", "list(records_N2.tensor_split(n))",
         "equal keys must meet"),
        ("[records_N2[records_N2[:, 0] % n == r] for r in range(n)]", "[records_N2[r::n] for r in range(n)]",
         "that deals the rows in turn"),
        ("[records_N2[records_N2[:, 0] % n == r] for r in range(n)]", "[records_N2] * n", "everything to every rank"),
        (" for r in range(n)]", ", 0] for r in range(n)]", "== r]", "== r", "those are the keys alone"),
        ("range(n)]", "range(n - 1)]", "should be a list of 3 tensors, not 2 of them"),
        ("[:, 0] % n", "[:, 0] // n", "the parcel for rank 0"),
        ("return [", "return torch.cat([", "range(n)]", "range(n)])", "not the Tensor"),
    ],
    "colliding": [
        ("combinations(sorted(documents), 2)", "((min(documents), j) for j in documents if j > min(documents))",
         "the others may be copies of each other"),
        ("combinations(sorted(documents), 2)", "zip(sorted(documents), sorted(documents)[1:])", "only neighbours"),
        ("sorted(documents)", "sorted(documents, reverse=True)", "the smaller number comes first"),
        ("combinations(sorted(documents), 2)", "((i, j) for i in documents for j in documents if i <= j)",
         "a document is not a copy of itself"),
        ("combinations(sorted(documents), 2)", "((i, j) for i in documents for j in documents if i != j)",
         "each pair is there twice"),
        ("met[key]", "met[0]", "documents of different keys do not meet"),
        ("return {pair", "return [pair", "2)}", "2)]", "the pairs should be {(3, 8)}, not the list [(3, 8)]."),
        ("met[key].add(document)", "met[document].add(key)", "the pairs should be"),
    ],
    "lowest": [
        ("math.exp(x)", "x", "that is its logarithm"),
        ("np.log(params)", "params", "math.exp(x)", "x", "take their logarithm"),
        ("math.exp(x)", "params[int(np.argmin(losses))]", "that is the best of the points"),
        ("(2 * bend)", "bend", "a factor of 2 is missing"),
        ("-slope", "slope", "the sign is wrong"),
        ("+ slope * x", "- slope * x", "lowest loss should be"),
        ("return math.exp(x), ", "return ", "return two numbers, parameters and loss, not np.float64(2"),
        ("math.exp(x), bend * x**2 + slope * x + height", "bend * x**2 + slope * x + height, math.exp(x)",
         "parameters first, then the loss"),
    ],
    "one_merge": [
        ("(-pairs[pair], pair)", "(-pairs[pair], -pair[0])", "is as frequent as (32, 260), which is smaller"),
        ("(-pairs[pair], pair)", "pairs[pair]", "the pair to merge should be (2, 3), not (3, 1)."),
        ("    merged, i", "    for i in reversed(range(len(ids) - 1)):\n        if tuple(ids[i : i + 2]) == pair:\n"
         "            ids[i : i + 2] = [new]\n    return ids\n    merged, i", "was changed; make a new one"),
        (NEXT, "1", "a token was used twice"),
        ("tuple(ids[i : i + 2])", "ids[i : i + 2]", "nothing was merged: a list never equals a tuple"),
        ("(-pairs[pair], pair)", "(-pairs[pair], sum(pair))", "is as frequent as"),
        (FREQUENT, "max(pairs, key=pairs.get)", "is as frequent as (32, 260), which is smaller"),
        (FREQUENT, "max(pairs.values())", "the pair to merge should be (2, 3), not 5."),
        ("new if both", "256 if both", "merged into 301 should be"),
        ("== pair", "in (pair, pair[::-1])", "[2, 1, 2] with (1, 2) merged into 256 should be [2, 256], not [256, 2]"),
        ("== pair", "== pair and new not in merged", "merge each occurrence"),
        ("i < len(ids)", "i < len(ids) - 1", "what is left at the end got lost"),
    ],
    "document_mask": [
        (".tril()", "", "a token can look at later ones of its document"),
        ("same_BTT.tril", "torch.ones_like(same_BTT).tril", "a token can look at other documents: hide them"),
        (".tril()", ".triu()", "queries and keys have changed places"),
        (".tril()", ".tril(-1)", "cannot look at itself: softmax over nothing is nan"),
        (".tril()", ".tril()[:1].expand_as(same_BTT)", "that is the first row's mask"),
        (".tril()", ".tril().float()", "should be bool"),
        ("documents_BT[:, :, None] ==", "documents_BT[:, :, None] >=", "the mask is wrong"),
        ("documents_BT[:, :, None] == documents_BT[:, None, :]", "documents_BT[:, :, None] != documents_BT[:, None, :]",
         "the mask is wrong"),
        (".tril()", ".tril().unsqueeze(1)", "should have the shape [2, 6, 6], not [2, 1, 6, 6]"),
        (".tril()", ".tril(1)", "the mask is wrong: element [0, 0, 1] should be 0, not 1"),
        (".tril()", ".tril().logical_not()", "the mask is wrong: element [0, 0, 0] should be 1, not 0"),
        (".tril()", ".tril()[0]", "should have the shape [2, 6, 6], not [6, 6]"),
    ],
    "bits_per_byte": [
        (" / math.log(2)", "", "that is in nats; a bit is ln 2"),
        ("/ math.log(2)", "* math.log(2)", "divide by ln 2, do not multiply"),
        (" * tokens / math.log(2) / num_bytes", " / math.log(2)", "that is per token"),
        ("* tokens / math.log(2) / num_bytes", "* num_bytes / math.log(2) / tokens", "have changed places"),
        ("nats_per_token * tokens / math.log(2)", "math.log2(nats_per_token) * tokens",
         "that is the logarithm of the loss"),
        (" / num_bytes", "", "for all bytes together"),
        ("math.log(2)", "2",
         "the loss of 2.079 nats per token for 100 tokens of 100 bytes should be 3 bits per byte, not"),
        ("math.log(2)", "math.log(2) * 8", "should be 3 bits per byte, not 24"),
        ("nats_per_token *", "math.exp(nats_per_token) *", "should be 3 bits per byte, not"),
        ("* tokens", "/ tokens", "should be 3 bits per byte, not"),
        ("return ", "return 1 / ", "should be 3 bits per byte, not 0.6"),
    ],
    "encode_word": [
        ("min(known)", "known[0]", "`an` was learned before `na`"),
        ("while", "if", "    return ids", "        return ids\n    return ids", "should be [257, 256, 97], not"),
        ("min(known)", "max(known)", "should be"),
        ("[number[pair] for pair", "[number[pair] for pair", ", strict=False) if pair in number]", ", strict=False)\n"
         "        if pair in number and pair != (97, 97)]", "the tokens of b'aaaaa' (from left to right"),
        ("list(word)", "list(word[::-1])", "should be"),
        ("list(word)", "list(word.decode())", "should be"),
        ("return ids", "return ids[:3]", "the tokens of"),
        ("merge(ids,", "merge(ids[:-1],", "should be [256], not"),
        ("256 + min", "min", "the tokens of b'an' should be [256], not [0]"),
    ],
    "packed_targets": [
        (GOES_ON, "ids_BT[:, 1:]", "the first token of another document is no target"),
        (ENDS, "targets_BT = ids_BT.roll(-1, 1).masked_fill(documents_BT != documents_BT.roll(-1, 1), -100)",
         "the sequence ends here"),
        ("-100", "-1", "should be -100, not -1"),
        ("documents_BT[:, 1:] == documents_BT[:, :-1]", "documents_BT[:, 1:] != documents_BT[:, :-1]",
         "the row of targets"),
        ("torch.full_like(ids_BT, -100)", "torch.zeros_like(ids_BT)", "should be -100, not 0"),
        ("torch.full_like(ids_BT, -100)", "torch.full(ids_BT.shape, -100.0)", "should be int64"),
        ("return targets_BT", "return targets_BT[0]", "should have the shape [1, 6], not [6]"),
        ("return targets_BT", "return targets_BT.roll(1, 1)", "the row of targets is wrong"),
        ("return targets_BT", "return ids_BT.clone()", "those are the tokens themselves, not the next"),
        ("ids_BT[:, 1:], -100", "ids_BT[:, :-1], -100", "those are the tokens themselves, not the next"),
        ("return targets_BT", "ids_BT[:] = targets_BT\n    return targets_BT", "ids_BT was changed"),
        ("return targets_BT", "return targets_BT[:, :-1]", "should have the shape [1, 6], not [1, 5]"),
    ],
    "next_best": [
        ("-slope / 2 / bend", 'np.log(min(here, key=lambda p: p["val_loss"])["params"])', "the best of the points"),
        ("np.log(budget)", "budget", "-slope / 2 / bend", "np.exp(-slope / 2 / bend)",
         "np.exp(np.polyval(np.polyfit(x, y, 1), np.log(budget_flops)))",
         "np.polyval(np.polyfit(x, y, 1), budget_flops)", "take logarithms"),
        ("-slope / 2 / bend", "slope / 2 / bend", "best number of parameters should be"),
        ("-slope / 2 / bend", "-slope / bend", "best number of parameters should be"),
        ("height - slope**2 / 4 / bend", 'min(p["val_loss"] for p in here)', "lowest loss should be"),
        ("height - slope**2 / 4 / bend", "height", "lowest loss should be"),
        ("return tuple(", "return tuple(reversed(list(", "(log_params, log_loss))", "(log_params, log_loss))))",
         "parameters first, then the loss"),
        ("return tuple(", "return sum(", "return two numbers, parameters and loss, not 18"),
        ("np.log(budget_flops)", 'np.log(points[-1]["budget_flops"])', "go on along the line"),
        ("in (log_params, log_loss)", "in (log_loss, log_params)", "parameters first, then the loss"),
        ("float(np.exp(np.polyval(np.polyfit(x, y, 1), np.log(budget_flops))))",
         "float(np.polyval(np.polyfit(x, y, 1), np.log(budget_flops)))", "that is its logarithm"),
        ("np.log(height - slope**2 / 4 / bend)", "height - slope**2 / 4 / bend",
         "float(np.exp(np.polyval(np.polyfit(x, y, 1), np.log(budget_flops))))",
         "(np.exp if y is log_params else float)(np.polyval(np.polyfit(x, y, 1), np.log(budget_flops)))",
         "logarithms of the losses"),
    ],
}  # fmt: skip
RIGHT = {
    "parcels": [
        (
            "[records_N2[records_N2[:, 0] % n == r] for r in range(n)]",
            "tuple(records_N2[records_N2[:, 0].remainder(n).eq(r)] for r in range(n))",
        ),
    ],
    "colliding": [
        ("combinations(sorted(documents), 2)", "((i, j) for i in documents for j in documents if i < j)"),
    ],
    "lowest": [("-slope / (2 * bend)", "-0.5 * slope / bend"), ("math.exp(x)", "float(np.exp(x))")],
    "minhash": [
        ("(one_K == other_K).mean()", "sum(a == b for a, b in zip(one_K, other_K)) / len(one_K)"),
        ("ordered_SK.min(0)", "np.sort(ordered_SK, axis=0)[0]"),
    ],
    "one_merge": [
        (FREQUENT, "sorted(pairs.items(), key=lambda item: (-item[1], item[0]))[0][0]"),
        ("merged, i = [], 0", "pair, merged, i = tuple(pair), [], 0"),
    ],
    "document_mask": [
        ("same_BTT.tril()", "same_BTT & torch.ones_like(same_BTT).tril()"),
        (".tril()", " & (torch.arange(documents_BT.shape[1])[:, None] >= torch.arange(documents_BT.shape[1]))"),
    ],
    "bits_per_byte": [("math.log(2)", "0.693"), ("nats_per_token * tokens", "np.float64(nats_per_token) * tokens")],
    "encode_word": [
        ("return ids", "return tuple(ids)"),
        (
            "while known := [",
            "for i, pair in enumerate(table):\n        ids = merge(ids, pair, 256 + i)\n    while known := [",
        ),
    ],
    "packed_targets": [
        (ENDS, f"targets_BT[:, :-1] = {GOES_ON}.clone()"),
        ("torch.full_like(ids_BT, -100)", "ids_BT * 0 - 100"),
    ],
    "next_best": [
        ("np.log(", "np.log10(", "float(np.exp(", "float(10 ** ("),
        ("-slope / 2 / bend", "-0.5 * slope / bend"),
    ],
}


class TestAnswers(Answers):
    lesson, checks, rejected, right = "12_llm_pretraining", checks, REJECTED, RIGHT
    solutions = {"minhash": ("signature", "similarity"), "one_merge": ("most_frequent", "merge")}
    given = {"PRIME": checks.PRIME, "combinations": combinations}


def hears_of_rank_1(ranks):
    def answer(documents_BT):
        same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
        return same_BTT if ranks.rank else same_BTT.tril()

    return checks.document_mask(answer, ranks)


def test_a_fault_of_one_rank_is_told_on_all(pool):
    assert heard_alike(pool.run(2, hears_of_rank_1)).startswith("Rank 1: For the documents [[0, 0, 1, 1, 1, 2]")
