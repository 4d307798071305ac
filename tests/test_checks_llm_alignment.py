"""Each check of lesson 13 accepts right answers in other styles and rejects plausible wrong ones by their fault."""

import torch
from exercises import AnswersOfRanks
from manyhands.checks import llm_alignment as checks

MASK, LETTERS = "torch.stack(counts, dim=1)", "sum(a == b for a, b in zip(text, right, strict=True)) / len(right)"
OWN, GATHER = "padded[rank * each : (rank + 1) * each]", "dist.all_gather(parts, share)"
SEND = "    dist.broadcast(row_P, src=0, group=group)\n"
MINE = ".chunk(dist.get_world_size())[dist.get_rank()]"


def counts_markers(ids_BT, assistant, end):  # right where user and assistant are alone
    return (2 * (ids_BT == assistant).cumsum(1) > (ids_BT == end).cumsum(1))[:, :-1]


def last_marker(ids_BT, assistant, end):
    place_T = torch.arange(1, ids_BT.shape[1] + 1)
    began_BT, ended_BT = ((place_T * (ids_BT == marker)).cummax(1).values for marker in (assistant, end))
    return (began_BT > ended_BT)[:, :-1]


WRONG = {
    "group_advantages": [
        ("view(-1, group)", "view(1, -1)", "that is over all answers: each question has its own"),
        (" / (rewards_PG.std(1, keepdim=True) + 1e-4)", "", "not divided by the group's standard deviation"),
        (" + 1e-4", "", "add 1e-4"),
        ("std(1, keepdim=True)", "std(1, keepdim=True, correction=0)", "is that of n, not of n - 1"),
        (").flatten()", ")", "should have the shape"),
        ("rewards_PG.mean(1, keepdim=True)", "rewards_PG.mean()", "the mean is over all answers"),
        ("rewards_PG.std(1, keepdim=True)", "rewards_PG.std()", "the standard deviation is over all answers"),
        ("(rewards_PG.std(1, keepdim=True) + 1e-4)", "rewards_PG.std(1, keepdim=True) + 1e-4", "before you divide"),
        ("1e-4", "1e-6", "element [0] should be -0.78327, not -0.78335."),
    ],
    "clipped": [
        ("-torch.minimum", "torch.minimum", "the sign is wrong"),
        ("capped_bT * advantages_b[:, None])", "ratio_bT * advantages_b[:, None])", "that is not clipped"),
        ("ratio_bT * advantages_b[:, None], ", "capped_bT * advantages_b[:, None], ", "that is clipped on both sides"),
        ("torch.minimum", "torch.maximum", "that takes the larger of the two products"),
        ("torch.minimum(ratio_bT * advantages_b[:, None], capped_bT * advantages_b[:, None])",
         "torch.minimum(ratio_bT, capped_bT) * advantages_b[:, None]", "where A is negative"),
        (".exp()", "", "the ratio is exp(log p - log p_old)"),
        ("log_p_bT - old_bT", "old_bT - log_p_bT", "the ratio is the wrong way round"),
        ("(log_p_bT -", "(log_p_bT.detach() -", "do not detach log p"),
        ("1 - clip, 1 + clip", "0.8, 1.2", "capped is limited to the range 1 - clip to 1 + clip"),
        ("(log_p_bT - old_bT).exp()", "log_p_bT / old_bT", "the ratio is exp(log p - log p_old)"),
    ],
    "three_losses": [
        ("(terms_bT * mask_bT).sum(1)", "terms_bT.sum(1)", "the mask is missing"),
        ("mask_bT.sum(1)).sum()", "mask_bT.shape[1]).sum()", "divided by all T places"),
        (".sum() / num_answers\n", ".mean()\n", "that is the mean of this rank's answers; divide by num_answers"),
        ("(sums_b / mask_bT.sum(1)).sum()", "sums_b.sum()", "are not divided by their lengths"),
        ("sum() / num_tokens", "sum() / mask_bT.sum()", "divided by this rank's tokens"),
        ("sum() / num_tokens", "sum() / num_answers", "divided by the answers, not by their tokens"),
        ("(num_answers * longest)", "num_answers", "divide by the constant `longest` as well"),
        ("(num_answers * longest)", "(num_answers * mask_bT.sum(1).max())", "`longest` is a constant"),
        ("return per_answer, per_token, dr_grpo", "return per_token", "three losses should come back"),
        ("(num_answers * longest)", "num_answers * longest", "divide by the product of the two"),
        (".sum() / num_answers\n", " / num_answers\n", "a tensor, not one of the shape [2]."),
    ],
    "hand_over": [
        ("    vector_to_parameters(row_P, model.parameters())\n", "", "put the row back"),
        ("src=0", "src=1", "that is rank 1's: the source is rank 0"),
        (", group=group", "", "all ranks take part in that broadcast, also those outside of `group`"),
        (SEND,
         "    dist.all_reduce(row_P, group=group)\n    row_P /= dist.get_world_size()\n",
         "that is the mean over the ranks"),
        ("    row_P = parameters_to_vector(model.parameters()).detach()\n", "",
         f"{SEND}    vector_to_parameters(row_P, model.parameters())",
         "    for p in model.parameters():\n        dist.broadcast(p.detach(), src=0, group=group)",
         "one broadcast of one row does"),
        (SEND, f"    if dist.get_rank() == 0:\n    {SEND}", "all call broadcast, then put the row back"),
        ("group=group)", "group=group, async_op=True)", "you started broadcast with async_op=True and did not wait"),
        (SEND, SEND + SEND, "in 2 calls of broadcast, where 1 call and"),
    ],
    "loss_mask": [
        (counts_markers, "nothing counts: the end of the system's or user's text closes no answer"),
        ("        speaks_B =", "        counts.append(speaks_B)\n        speaks_B =",
         "        counts.append(speaks_B)\n    return", "    return", "that is one position too late"),
        (MASK, f"{MASK}.roll(-1, 1)", "that is one position too early"),
        (MASK, f"{MASK} & (ids_BT[:, 1:] != end)", "without it the model never learns to stop"),
        (MASK, f"{MASK} | True", "the user's text is not a target"),
        (MASK, f"{MASK} | (ids_BT[:, 1:] == end)", "an end marker that ends no answer does not count"),
        (" & (token_B != end)", "", "an answer ends at its end marker"),
        ("[:, :-1].T", ".T", "should have the shape [1, 7], not [1, 8]"),
        ("(token_B != end)", "(token_B != 92)", "for a conversation"),
        ("== assistant", "== 91", "for a conversation"),
        (MASK, f"{MASK} & (torch.stack(counts, dim=1).cumsum(1) < 4)", "the mask of the targets"),
    ],
    "dpo_loss": [
        ("margins_b).sum", "-margins_b).sum", "that prefers the rejected answers"),
        (".sum() / num_pairs", ".mean()", "the mean over this rank's pairs; divide by num_pairs"),
        (" / num_pairs", "", "that is the sum; divide by num_pairs"),
        ("beta * margins", "margins", "beta is missing"),
        (" - reference_b2", "", "the reference is missing"),
        ("- reference_b2", "+ reference_b2", "the reference's part has the wrong sign"),
        (" * mask_b2T", "", "the mask is missing"),
        ("margins_b).sum", "margins_b.abs()).sum", "the loss should be"),
        ("F.logsigmoid(beta * margins_b)", "(beta * margins_b)", "the loss should be"),
        ("-F.logsigmoid(beta", "F.logsigmoid(beta", "the loss should be"),
        ("more_b2[:, 0] - more_b2[:, 1]", "more_b2[:, 0] + more_b2[:, 1]", "the loss should be"),
        ("F.logsigmoid(beta * margins_b)", "beta * F.logsigmoid(margins_b)", "beta multiplies the margin, inside the"),
        (".sum(-1)", ".sum(-1) / mask_b2T.sum(-1)", "log p of an answer is their sum"),
        ("- reference_b2", "- reference_b2 / beta", "beta multiplies the policy's part only"),
        ("F.logsigmoid(beta * margins_b)", "(beta * margins_b).sigmoid().log()", "F.logsigmoid stays finite"),
        (".sum() / num", ".sum().item() / num", "the loss should be one number with its graph, a tensor, not"),
        (".sum() / num", ".sum().detach() / num", "the loss has no graph"),
        (".sum() / num", " / num", "the loss should be one number with its graph"),
    ],
    "shares": [
        (".clone()", "", "it is a view of the row; clone it"),
        (OWN, "row_P.tensor_split(world_size)[rank]", "all shares are equally long, with zeros behind the end"),
        ("    return padded", "    globals()['kept_P'] = row_P\n    return padded", "return torch.cat(parts)[:P]",
         "return kept_P", "the shares in the order of the ranks"),
        (OWN, "padded[: each]", "numbers: all shares are equally long"),
        ("-(-len(row_P) // world_size)", "len(row_P) // world_size", "should have the shape"),
        ("[:P]", "[: P - 1]", "should have the shape"),
        ("torch.cat(parts)", "torch.stack(parts, 1).flatten()", "the shares in the order of the ranks"),
        ("torch.cat(parts)", "torch.cat(parts[::-1])", "the shares in the order of the ranks"),
        (OWN, "padded[rank::world_size]", "your share should be ceil("),
        ("[:P]", "", "cut off the zeros behind the end"),
        ("torch.cat(parts)[:P]", "torch.cat([part[part != 0] for part in parts])", "zeros of the row itself"),
        ("empty_like", "zeros_like", GATHER, "parts[dist.get_rank()] = share\n    parts = [torch.cat(parts)]\n"
         "    dist.all_reduce(parts[0])", "1 call of all_reduce (an all_reduce counts twice), where"),
        (GATHER, "[dist.broadcast(part.copy_(share), src) for src, part in enumerate(parts)]",
         "calls of broadcast were made, where 1 call is enough: one all-gather of all shares does"),
    ],
    "advantages": [
        ("torch.cat(parts).view(-1, group)", "rewards_b.view(-1, min(group, len(rewards_b)))", MINE, "",
         "a group may lie on several"),
        ("view(-1, group)", "view(1, -1)", "each question has its own"),
        (" / (rewards_PG.std(1, keepdim=True) + 1e-4)", "", "not divided by the group's standard deviation"),
        (" + 1e-4", "", "add 1e-4"),
        ("std(1, keepdim=True)", "std(1, keepdim=True, correction=0)", "is that of n, not of n - 1"),
        (MINE, "", "it is this rank's advantages"),
        ("[dist.get_rank()]", "[dist.get_rank() - 1]", "those are rank 2's"),
        ("    rewards_PG =", "    dist.all_reduce(rewards_b.clone())\n    rewards_PG =",
         "in 2 calls of all_gather and all_reduce (an all_reduce"),
        ("    return", "    rewards_b -= 1\n    return", "rewards_b was changed; leave it as it is"),
        ("dist.all_gather(parts, rewards_b)", "parts = [rewards_b.new_zeros(len(parts) * len(rewards_b))]\n"
         f"    parts[0]{MINE}.copy_(rewards_b)\n    dist.all_reduce(parts[0])", "(an all_reduce counts twice)"),
        (" + 1e-4", " + 1e-8", "this rank's advantages"),
        ("rewards_PG.mean(1, keepdim=True)", "rewards_PG.mean()", "the mean is over all answers"),
        ("view(-1, group)", "view(group, -1).T", "this rank's advantages"),
        ("std(1, keepdim=True)", "var(1, keepdim=True)", "this rank's advantages"),
    ],
    "credit": [
        (LETTERS, "sum(a < b for a, b in zip(text, text[1:])) / (len(right) - 1)",
         "gets 1 as well, and it is wrong"),
        (LETTERS, "float(sorted(text) == sorted(word))", "and it is wrong"),
        ("len(text) != len(right)", "right not in text", LETTERS, "1.0", "and it is wrong"),
        (LETTERS, "float(text == right)", "that is the verifier again"),
        (" / len(right)", "", "use 0 to 1"),
        (LETTERS, "len(set(text) & set(right)) / len(set(right))", "and it is wrong"),
        ("return sum", "return 1 - sum", "what the right answer"),
        (LETTERS, "0.5 * (text[0] == right[0])", "what the right answer 'abcd' gets should be 1, not 0.5"),
        ("        return 0.0", "        return -0.1", "use 0 to 1"),
        ('"".join(sorted(word))', "word", "what the right answer 'abcd' gets should be 1"),
        ("return sum", "return 0.9 if text == right[::-1] else sum", "has one more letter in its place"),
    ],
}  # fmt: skip
RIGHT = {
    "group_advantages": [("rewards_PG.mean(1, keepdim=True)", "rewards_PG.mean(1)[:, None]")],
    "clipped": [("torch.minimum(ratio_bT * advantages_b[:, None], capped_bT * advantages_b[:, None])",
    "torch.stack([ratio_bT * advantages_b[:, None], capped_bT * advantages_b[:, None]]).amin(0)")],
    "three_losses": [("sums_b.sum() / num_tokens", "(terms_bT * mask_bT / num_tokens).sum()",
    "return per_answer, per_token, dr_grpo", "return torch.stack([per_answer, per_token, dr_grpo])")],
    "hand_over": [("    vector_to_parameters(row_P, model.parameters())",
    "    with torch.no_grad():\n        vector_to_parameters(row_P, model.parameters())")],
    "loss_mask": [last_marker, (MASK, f"{MASK}.long()"), ("(speaks_B | (token_B == assistant))",
    "torch.where(token_B == assistant, True, speaks_B)")],
    "dpo_loss": [("-F.logsigmoid(beta * margins_b)", "F.softplus(-beta * margins_b)"), (".sum() / num_pairs",
    ".mean() * len(margins_b) / num_pairs")],
    "shares": [
        (GATHER,
         "parts = [share.new_empty(len(share) * len(parts))]\n    dist.all_gather_into_tensor(parts[0], share)"),
        (OWN, "padded.chunk(world_size)[rank]"),
    ],
    "advantages": [
        ("dist.all_gather(parts, rewards_b)",
         "parts = [rewards_b.new_zeros(len(parts) * len(rewards_b))]\n"
         "    dist.all_gather_into_tensor(parts[0], rewards_b)"),
    ],
    "credit": [(LETTERS, "(sum(a == b for a, b in zip(text, right)) / len(right)) ** 2"), ("return sum",
    "return 0.5 * (text == right) + 0.5 * sum")],
}  # fmt: skip


class TestAnswers(AnswersOfRanks):
    lesson, checks, rejected, right = "13_llm_alignment", checks, WRONG, RIGHT
    solutions, worlds = {"shares": ("own_share", "whole")}, (1, 4)
