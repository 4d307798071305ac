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
RING = {
    "arrive": "kv = arrive()", "owner": "(i - step) % n", "post": "post(kv, group) if step < n - 1 else None",
    "log": "largest + total.log()", "at": "at[i], at[owner]",
}  # fmt: skip
CHOOSE, GATES, EVEN = "(probs_NE + bias_E).topk", "probs_NE.gather(1, experts_Nk)", "share_E.mean() - share_E"
REJECTED = {
    "ring_forward": [
        (RING["arrive"], "arrive()", "with this rank's own keys in every step; take what arrives"),
        (RING["owner"], "i", "every block is masked as if it were this rank's own"),
        (RING["owner"], "(i + step) % n", "as if they came from the rank ahead; they come from behind"),
        ("range(n)", "range(1)", RING["post"], "None", "that is over this rank's own keys alone"),
        (RING["owner"], "(i - 1) % n", "every block is masked as if it came from one place behind; that of step i"),
        (RING["log"], "total.log()", "the log of the sums of this rank's queries should be"),
        ("weighted / total", "weighted", "the attention of this rank's queries should be"),
        (RING["post"], "post(kv, group)", "the messages that this rank sends, n - 1 on 4 ranks"),
        (RING["post"], "post(torch.stack([kv, kv]), group) if step < n - 1 else None", RING["arrive"],
         "kv = arrive()[0]", "but the bytes that it sends"),
        (RING["at"], "at[i], at[i]", "every block is masked as if it were this rank's own"),
    ],
    "bias": [
        (CHOOSE, "probs_NE.topk", "that is without the bias"),
        (CHOOSE, "(probs_NE - bias_E).topk", "with the bias subtracted; add it"),
        (GATES, "(probs_NE + bias_E).gather(1, experts_Nk)", "the bias only chooses"),
        (GATES, "probs_NE.topk(k).values", "those are the largest probabilities, not those of the chosen"),
        ("best_Nk / best_Nk.sum(-1, keepdim=True), experts", "best_Nk, experts", "divide by the sum of the chosen"),
        (EVEN, "share_E - share_E.mean()", "that moves the wrong way"),
        (f"torch.sign({EVEN})", f"({EVEN})", "each step is `speed`, up or down"),
        ("return bias_E + ", "return ", "that forgets the old bias"),
        (EVEN, "1 - share_E", "every bias has moved up"),
        ("speed * ", "", "that is without the speed"),
        ("return bias_E + speed * torch.sign(share_E.mean() - share_E)",
         "return bias_E.add_(speed * torch.sign(share_E.mean() - share_E))", "was changed"),
    ],
    "absorb": [
        (" * shrink", "", "without shrinking what was there"),
        ("total * shrink", "total", "`total` after block 2 should be"),
        ("weighted * shrink", "weighted", "that is without shrinking what was there"),
        (LARGEST, "s_BHsu.amax(-1, keepdim=True)", "`largest` after block 2 should be the largest score so far"),
        ("p_BHsu.sum", "p_BHsu.mean", "a mean over keys; add up"),
        (WEIGHTED, f"({WEIGHTED}) / ({TOTAL})", "divided by the total already"),
        (LARGEST, "0 * largest", "`largest` after block 1 should be"),
        ("total * shrink", "total.mul_(shrink)", "state was changed; leave it as it is"),
        ("(largest - new).exp()", "(new - largest).exp()", "so far: `shrink` is exp(old largest - new largest), not"),
        ("(s_BHsu - new).exp()", "(s_BHsu - largest).exp()", "with the old largest subtracted from this block's"),
        ("(largest - new).exp()", "largest / new", "is it 0 / 0, 0 times infinity, or infinity - infinity?"),
        ("(s_BHsu - new).exp()", "s_BHsu.exp()", "`total` after block 1 should be the sum of exp(score - largest)"),
        ("p_BHsu @ v_BHuK", "s_BHsu.softmax(-1) @ v_BHuK", "`weighted` after block"),
        (TOTAL, f"({TOTAL}).log()", "`total` after block 1 should be"),
        ("torch.maximum(largest, ", "(", "`largest` after block 2 should be the largest score so far"),
    ],
    "block_gradients": [
        (" / math.sqrt(q.shape[-1])", "", "without the 1 / sqrt(K)"),
        (" - delta", "", "without delta"),
        (*P_OF_BLOCK, "with a softmax over this block alone"),
        ("p_BHsu * (", "(", "without the factor P"),
        (*P_OF_BLOCK, "- delta", "- (p_BHsu * (d_out @ v.mT)).sum(-1, keepdim=True)", "normalised over this block"),
        ("math.sqrt(q.shape[-1])", "q.shape[-1]", "that is divided by K, not by its square root"),
        ("math.sqrt(q.shape[-1])", "2", "d_q should be this block's part: what came is"),
        ("d_out @ v.mT - delta", "delta - d_out @ v.mT", "that is with the opposite sign"),
        ("(s_BHsu - log_sums).exp()", "s_BHsu.exp()", "d_q should be this block's part"),
        ("p_BHsu.mT @ d_out", "d_s.mT @ d_out", "d_v should be this block's part"),
        ("d_s @ k, d_s.mT @ q", "d_s.mT @ q, d_s @ k", "d_q should be this block's part"),
    ],
    "zig_zag": [
        (f"torch.cat({PICK})", "torch.arange(T).chunk(n)[rank]", "that is one stretch; two chunks are asked for"),
        (PICK, f"{PICK}[::-1]", "not in ascending order"),
        (PICK, "[chunks[n - 1 - rank], chunks[n + rank]]", "of rank 0 should be [0, 1, 6, 7], not [2, 3, 4, 5]"),
        (f"torch.cat({PICK})", "torch.arange(rank, T, n)", "of rank 0 should be [0, 1, 6, 7], not [0, 2, 4, 6]"),
        (f"torch.cat({PICK})", f"torch.cat({PICK}) + 0.5", "of rank 0 should be [0, 1, 2, 3, 4, 5, 6, 7], not [0.5"),
        (f"torch.cat({PICK})", f"torch.cat({PICK}).double()", "not [0.0, 1.0, 2.0"),
        (f"torch.cat({PICK})", f"torch.cat({PICK}) + 1", "not [1, 2, 3, 4, 5, 6, 7, 8]"),
        (PICK, "[chunks[rank], chunks[2 * n - 1 - rank].flip(0)]", "should be"),
        (PICK, "[chunks[rank], chunks[-rank]]", "should be"),
        ("if T % (2 * n)", "if T % n", "12 positions on 4 ranks do not split into 8 chunks: raise a ValueError"),
        ("if T % (2 * n)", "if False", "raise a ValueError that names 12 and 8"),
        (WORDS, "does not fit", "raise a ValueError that names 12 and 8; yours says does not fit"),
    ],
    "to_heads": [
        (EXCHANGE, f"{EXCHANGE}\n    dist.barrier()", "one all_to_all is enough"),
        ("dim=2", "dim=1", "should have the shape"),
        (", group=group)", ")", "your code calls all_to_all_single on ranks 0-3, and the group that it was given"),
        ("group.size()", "dist.get_world_size()", "in"),
        (EXCHANGE, "dist.all_reduce(received.copy_(parts), group=group)",
         "with 4 heads what to_heads returns should be"),
        (JOIN, "torch.cat(received.unbind()[::-1], dim=2)",
         "with 4 heads what to_heads returns should be all positions"),
        (EXCHANGE, "received = parts", "with 4 heads what to_heads returns should be all positions of"),
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
        ("arriving_ne.sum(1)", "leaving_ne.sum(1)", "that is what leaves; only the other ranks know what arrives"),
        ("arriving_ne.sum(1)", "arriving_ne.sum(0)", "those are from all ranks for each of my experts; add up by rank"),
        ("return leaving_ne", "return arriving_ne", "that is what arrives"),
        (TABLE, "tolist(), leaving_ne\n", "that is what leaves"),
        (TABLE, "tolist(), arriving_ne.flatten()\n", "arriving_ne should have the shape"),
        ("    return", "    dist.barrier()\n    return", "one all_to_all of 4 integers does"),
        (", group=group)", ")", "your code calls all_to_all_single on ranks 0-3, and"),
        ("empty_like(leaving_ne)", "full_like(leaving_ne, 1 << 40)", "(arriving_ne, leaving", "(leaving_ne, arriving",
         "no counts have come into arriving_ne"),
        ("experts_Nk.flatten()", "experts_Nk[:, 0]", "with 12 experts on 4 ranks and k = 2 the rows to each rank"),
        ("return leaving_ne.sum(1).tolist(), arriving", "return leaving_ne.sum(), arriving",
         "the rows to each rank should be"),
        ("minlength=E", "minlength=E + group.size()", "the rows to each rank should be"),
        (TABLE, "tolist(), arriving_ne.double()\n", "arriving_ne should be int64"),
    ],
    "combine": [
        ("[order_R.argsort()]", "", "in the order in which rows were sent"),
        (".argsort()", "", "that is rows[order_R], the order once more; its inverse is"),
        (" * gates_Nk[..., None]", "", "without gates"),
        (".sum(1)", ".mean(1)", "a mean over the choices"),
        ("gates_Nk[..., None]", "gates_Nk", "must match the size of tensor b (2)"),
        (".sum(1)", ".sum(1).detach()", "no gradient reaches rows or gates"),
        ("gates_Nk[..., None]", "gates_Nk.detach()[..., None]",
         "the gradient of gates_Nk should be result times gradient, not None"),
        ("rows_RD[", "rows_RD.detach()[", "the gradient of rows_RD should be gate times gradient, not None"),
        ("    back_RD", "    rows_RD.data.mul_(2)\n    back_RD", "rows_RD was changed"),
        (" * gates_Nk[..., None]", " * gates_Nk.softmax(-1)[..., None]", "what combine returns should be each token's"),
        (" * gates_Nk[..., None]", " * gates_Nk.flip(1)[..., None]", "for k = 2 what combine returns should be"),
        (".view(*gates_Nk.shape, -1)", ".view(gates_Nk.shape[1], gates_Nk.shape[0], -1).transpose(0, 1)",
         "for k = 2 what"),
    ],
    "finish": [
        ("[*copies, *experts]", "copies", "the exchange has summed over the losses of all 4 ranks, so divide"),
        ("group.size()", "dist.get_world_size()", "that is divided by all 4 ranks, and the group has 2"),
        (", group=group)", ")", "your code calls all_reduce on ranks 0-3, and the group that it was given is ranks"),
        ("p.grad /= group.size()", "p.data /= group.size()", "a weight was changed"),
        ("dist.all_reduce(p.grad, group=group)", "p.grad *= group.size()",
         "that is this rank's own; the others' tokens"),
        ("    for p in copies:", "    for p in copies[:1]:", "p.grad of copy 1 should be the mean over the ranks"),
        ("in copies", "in [*copies, *experts]", "other ranks' experts are other experts"),
        ("[*copies, *experts]", "experts", "the sum; each rank's loss is a mean"),
        ("*experts]", "*experts, *experts]", "divided by 4 twice"),
        ("dist.all_reduce(p.grad, group=group)", "pass", "add the ranks' gradients up"),
    ],
    "global_balance": [
        (REDUCE, "", "both / group.size()", "both", "that is this rank's tokens alone"),
        (REDUCE, "", MEANS, "    f_E, P_E = both\n    loss = E * f_E @ P_E\n    dist.all_reduce(loss)\n",
         "return E", "return loss / dist.get_world_size() + 0", "that is the mean of the ranks' own losses"),
        ("return E * ", "return ", "that is without the factor E"),
        ("chosen_E.sum()", "len(experts_Nk)", "f should sum to 1 over the experts"),
        (f"P_E + {OWN_P}", "own_E", "f is of all ranks, P of this one"),
        (OWN_P, f"({OWN_P}) / 4", "that is an n-th of it"),
        (OWN_P, f"4 * ({OWN_P})", "that is 4 times as much"),
        (OWN_P, "0 * own_E", "the gradient of probs_NE should be"),
        ("(f_E * (P_E + own_E - own_E.detach()))", "(f_E * P_E + (own_E - own_E.detach()) * chosen_E / chosen_E.sum())",
         "that is with this rank's own f; f is of all ranks"),
        (", group=group)", ")", "your code calls all_reduce on ranks 0-3, and the group that it was given"),
        (MEANS, MEANS.replace("group.size()", "dist.get_world_size()"),
         "in the group of ranks 0, 2, the loss should be"),
        ("own_E.detach())).sum()", "own_E.detach())).sum().detach()", "the loss has no graph"),
        (REDUCE, "    [dist.all_reduce(row, group=group) for row in both]\n", "numbers does"),
    ],
    "kept": [
        ("place <= capacity", "place > 0", "an expert keeps at most"),
        ("place <= capacity", "place < capacity", "one more row of each expert would fit"),
        ("flatten()", "flip(0, 1).flatten()", "view_as(experts_Nk)", "view_as(experts_Nk).flip(0, 1)",
         "earlier tokens come first"),
        ("experts_Nk.flatten()", "experts_Nk.T.flatten()", "view_as(experts_Nk)", "view_as(experts_Nk.T).T",
         "of one token its first choice before its second"),
        ("(place <= capacity)", "(place <= capacity).long()", "should be bool"),
        ("place <= capacity", "place <= capacity * E", "an expert keeps at most `capacity` rows"),
        ("place <= capacity", "place > len(chosen) - capacity", "what is kept is wrong"),
        ("view_as(experts_Nk)", "view(experts_Nk.T.shape).T", "9 tokens, 4 experts, capacity 3: what is kept is wrong"),
        ("(place <= capacity).view_as(experts_Nk)", "(place <= capacity)", "should have the shape [6, 1], not [6]"),
        ("cumsum(0)", "cumsum(1)", "what is kept"),
    ],
}  # fmt: skip
RIGHT = {
    "ring_forward": [
        (RING["owner"], "i - step"),
        (
            RING["owner"],
            "(i + n - step) % n",
            "        if arrive:\n            kv = arrive()",
            "        kv = arrive() if arrive else kv",
        ),
    ],
    "bias": [
        (EVEN, "1 / len(share_E) - share_E"),
        (GATES, "probs_NE[torch.arange(len(probs_NE))[:, None], experts_Nk]"),
    ],
    "absorb": [
        ("p_BHsu @ v_BHuK", 'torch.einsum("bhsu,bhuk->bhsk", p_BHsu, v_BHuK)'),
        (LARGEST, "torch.cat([largest, s_BHsu], -1).amax(-1, keepdim=True)"),
    ],
    "block_gradients": [
        ("/ math.sqrt(q.shape[-1])", "* q.shape[-1] ** -0.5"),
        ("(s_BHsu - log_sums).exp()", "s_BHsu.exp() / log_sums.exp()"),
    ],
    "zig_zag": [
        (f"torch.cat({PICK})", f"[*{PICK}[0].tolist(), *{PICK}[1].tolist()]"),
        (f"torch.cat({PICK})", f"torch.cat({PICK}).numpy()"),
    ],
    "to_heads": [
        (JOIN, "received.permute(1, 2, 0, 3, 4).flatten(2, 3)"),
        (EXCHANGE, "dist.all_to_all(list(received), list(parts), group=group)"),
    ],
    "split_sizes": [
        (".tolist()", ""),
        ("torch.bincount(experts_Nk.flatten(), minlength=E)", "F.one_hot(experts_Nk, E).sum((0, 1))"),
    ],
    "combine": [
        combine_by_index_add,
        (
            "(back_RD.view(*gates_Nk.shape, -1) * gates_Nk[..., None]).sum(1)",
            "torch.einsum('nkd,nk->nd', back_RD.view(*gates_Nk.shape, -1), gates_Nk)",
        ),
    ],
    "finish": [
        ("p.grad /= group.size()", "p.grad = p.grad / group.size()"),
        ("p.grad /= group.size()", "p.grad.div_(len(dist.get_process_group_ranks(group)))"),
    ],
    "global_balance": [
        ("return E * (f_E * (", "return E * (f_E @ (", ")).sum()", "))"),
        ("chosen_E / chosen_E.sum()", "(chosen_E / chosen_E.sum()).float().double()"),
    ],
    "kept": [kept_by_sorting, ("place <= capacity", "place - 1 < capacity")],
}


class TestAnswers(AnswersOfRanks):
    lesson, checks, rejected, right, world = "09_context_and_experts", checks, REJECTED, RIGHT, 4
    worlds, around = (1, 2), ("scores", "start", "absorb", "post")
    solutions = {"bias": ("biased_route", "nudge")}
