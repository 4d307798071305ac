"""Each check of lesson 09 accepts right answers in another style and rejects mutants, several from published code."""

import torch
from exercises import AnswersOfRanks
from manyhands.checks import context_and_experts as checks


def combine_by_index_add(rows, order, gates):  # right
    weighted = rows * gates.flatten()[order][:, None]
    out = torch.zeros(len(gates), rows.shape[1], dtype=rows.dtype)
    return out.index_add(0, order // gates.shape[1], weighted)


def kept_by_sorting(experts, E, capacity):  # right
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    first = torch.searchsorted(chosen[order].contiguous(), torch.arange(E))
    keep = torch.empty(len(chosen), dtype=torch.bool)
    keep[order] = torch.arange(len(chosen)) - first[chosen[order]] < capacity
    return keep.view_as(experts)


LARGEST = "torch.maximum(largest, s_BHsu.amax(-1, keepdim=True))"
TOTAL, WEIGHTED = "total * shrink + p_BHsu.sum(-1, keepdim=True)", "weighted * shrink + p_BHsu @ v_BHuK"
P_OF_BLOCK = "(s_BHsu - log_sums).exp()", "s_BHsu.softmax(-1)"
PICK = "[chunks[rank], chunks[2 * n - 1 - rank]]"
WORDS = "{T} positions do not split into {2 * n} chunks; use a multiple of {2 * n}"
EXCHANGE, JOIN = "dist.all_to_all_single(received, parts, group=group)", "torch.cat(received.unbind(), dim=2)"
TABLE, REDUCE = "tolist(), arriving_ne\n", "    dist.all_reduce(both, group=group)\n"
OWN_P, MEANS = "own_E - own_E.detach()", "    f_E, P_E = both / group.size()\n"
REJECTED = {
    "absorb": [
        (" * shrink", "", "without shrinking what was there"),
        ("total * shrink", "total", "`total` after block 2 should be"),
        ("weighted * shrink", "weighted", "that is without shrinking what was there"),
        (LARGEST, "s_BHsu.amax(-1, keepdim=True)", "`largest` after block 2 should be the largest score so far"),
        ("p_BHsu.sum", "p_BHsu.mean", "a mean over keys; add up"),
        (WEIGHTED, f"({WEIGHTED}) / ({TOTAL})", "divided by the total already"),
        (LARGEST, "0 * largest", "`largest` after block 1 should be"),
        ("total * shrink", "total.mul_(shrink)", "`total` was changed; leave it as it is"),
    ],
    "block_gradients": [
        (" / math.sqrt(q.shape[-1])", "", "without the 1 / sqrt(K)"),
        (" - delta", "", "without delta"),
        (*P_OF_BLOCK, "with a softmax over this block alone"),
        ("p_BHsu * (", "(", "without the factor P"),
        (*P_OF_BLOCK, "- delta", "- (p_BHsu * (d_out @ v.mT)).sum(-1, keepdim=True)", "normalised over this block"),
        ("d_s @ k, d_s.mT @ q", "d_s.mT @ q, d_s @ k", "d_q should be this block's part"),
    ],
    "zig_zag": [
        (f"torch.cat({PICK})", "torch.arange(T).chunk(n)[rank]", "that is one stretch; two chunks are asked for"),
        (PICK, f"{PICK}[::-1]", "not in ascending order"),
        (PICK, "[chunks[n - 1 - rank], chunks[n + rank]]", "of rank 0 should be [0, 1, 6, 7], not [2, 3, 4, 5]"),
        (f"torch.cat({PICK})", "torch.arange(rank, T, n)", "of rank 0 should be [0, 1, 6, 7], not [0, 2, 4, 6]"),
        ("if T % (2 * n)", "if False", "raise a ValueError that names 12 and 8"),
        (WORDS, "does not fit", "raise a ValueError that names 12 and 8; yours says does not fit"),
    ],
    "to_heads": [
        (EXCHANGE, f"{EXCHANGE}\n    dist.barrier()", "one all_to_all does"),
        ("dim=2", "dim=1", "should have the shape"),
        (JOIN, "torch.stack(received.unbind(), dim=3).flatten(2, 3)", "positions out of order"),
        (JOIN, "x_BHsK", "should have the shape"),
        ("x_BHsK.chunk", "x_BHsK.roll(-x_BHsK.shape[1] // group.size(), 1).chunk", "those are another rank's heads"),
    ],
    "split_sizes": [
        ("return leaving_ne.sum(1)", "return leaving_ne.flatten()",
         "that is for each expert; add up the 3 experts of a rank"),
        ("return leaving_ne.sum(1).tolist()",
         "return [int((experts_Nk * group.size() // E == r).any(1).sum()) for r in range(group.size())]",
         "one that chooses two experts travels twice"),
        ("arriving_ne.sum(1)", "leaving_ne.sum(1)", "that is what leaves; what arrives"),
        ("arriving_ne.sum(1)", "arriving_ne.sum(0)", "those are from all ranks for each of my experts; add up by rank"),
        ("return leaving_ne", "return arriving_ne", "that is what arrives"),
        (TABLE, "tolist(), leaving_ne\n", "that is what leaves"),
        (TABLE, "tolist(), arriving_ne.flatten()\n", "arriving_ne should have the shape"),
        ("    return", "    dist.barrier()\n    return", "one all_to_all of 3 integers does"),
    ],
    "combine": [
        ("[order_R.argsort()]", "", "in the order in which rows were sent"),
        (".argsort()", "", "that is rows[order_R], the order once more; its inverse is"),
        (" * gates_Nk[..., None]", "", "without gates"),
        (".sum(1)", ".mean(1)", "a mean over the choices"),
        (".sum(1)", ".sum(1).detach()", "no gradient reaches rows or gates"),
        ("gates_Nk[..., None]", "gates_Nk.detach()[..., None]", "the gradient of gates_Nk"),
    ],
    "finish": [
        ("[*copies, *experts]", "copies", "the exchange has summed over the losses of all 3 ranks, so divide"),
        ("in copies", "in [*copies, *experts]", "other ranks' experts are other experts"),
        ("[*copies, *experts]", "experts", "the sum; each rank's loss is a mean"),
        ("*experts]", "*experts, *experts]", "divided by 3 twice"),
        ("dist.all_reduce(p.grad, group=group)", "pass", "add the ranks' gradients up"),
    ],
    "global_balance": [
        (REDUCE, "", "both / group.size()", "both", "that is this rank's tokens alone"),
        (REDUCE, "", MEANS, "    f_E, P_E = both\n    loss = E * f_E @ P_E\n    dist.all_reduce(loss)\n",
         "return E", "return loss / 3 + 0", "that is the mean of the ranks' own losses"),
        ("return E * ", "return ", "that is without the factor E"),
        ("chosen_E.sum()", "len(experts_Nk)", "f should sum to 1 over the experts"),
        (f"P_E + {OWN_P}", "own_E", "f is of all ranks, P of this one"),
        (OWN_P, f"({OWN_P}) / 3", "that is an n-th of it"),
        (OWN_P, f"3 * ({OWN_P})", "that is 3 times as much"),
        ("own_E.detach())).sum()", "own_E.detach())).sum().detach()", "the loss has no graph"),
        (REDUCE, "    [dist.all_reduce(row, group=group) for row in both]\n", "one all_reduce of 10 numbers does"),
    ],
    "kept": [
        ("place <= capacity", "place > 0", "an expert keeps at most"),
        ("place <= capacity", "place < capacity", "one more row of each expert would fit"),
        ("flatten()", "flip(0, 1).flatten()", "view_as(experts_Nk)", "view_as(experts_Nk).flip(0, 1)",
         "earlier tokens come first"),
        ("experts_Nk.flatten()", "experts_Nk.T.flatten()", "view_as(experts_Nk)", "view_as(experts_Nk.T).T",
         "of one token its first choice before its second"),
        ("(place <= capacity)", "(place <= capacity).long()", "should be bool"),
    ],
}  # fmt: skip
RIGHT = {
    "absorb": [("p_BHsu @ v_BHuK", 'torch.einsum("bhsu,bhuk->bhsk", p_BHsu, v_BHuK)')],
    "block_gradients": [("/ math.sqrt(q.shape[-1])", "* q.shape[-1] ** -0.5")],
    "zig_zag": [(f"torch.cat({PICK})", f"[*{PICK}[0].tolist(), *{PICK}[1].tolist()]")],
    "to_heads": [(JOIN, "received.permute(1, 2, 0, 3, 4).flatten(2, 3)")],
    "split_sizes": [(".tolist()", "")],
    "combine": [combine_by_index_add],
    "finish": [("p.grad /= group.size()", "p.grad = p.grad / group.size()")],
    "global_balance": [("return E * (f_E * (", "return E * (f_E @ (", ")).sum()", "))")],
    "kept": [kept_by_sorting],
}


class TestAnswers(AnswersOfRanks):
    lesson, checks, rejected, right = "09_context_and_experts", checks, REJECTED, RIGHT
    worlds = (1, 2, 4)
