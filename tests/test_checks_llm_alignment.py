"""Each check of lesson 13 accepts right answers in other styles and rejects plausible wrong ones by their fault."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from exercises import AnswersOfRanks
from manyhands.checks import llm_alignment as checks

# ---- build A ----


def by_counting_markers(ids, assistant, end):  # right: an answer is open from its marker to the next end marker
    opened = torch.zeros(ids.shape, dtype=torch.long)
    for row in range(len(ids)):
        speaks = 0
        for t, token in enumerate(ids[row].tolist()):
            speaks = 1 if token == assistant else 0 if token == end else speaks
            opened[row, t] = speaks
    return opened[:, :-1]  # ones and zeros


def by_last_marker(ids, assistant, end):  # right
    place = torch.arange(ids.shape[1]).expand_as(ids)
    last = lambda marker: torch.where(ids == marker, place, -1).cummax(1).values  # noqa: E731
    return (last(assistant) > last(end))[:, :-1]


def one_too_late(ids, assistant, end):
    return F.pad(by_last_marker(ids, assistant, end)[:, :-1], (1, 0))


def without_end(ids, assistant, end):
    return by_last_marker(ids, assistant, end) & (ids[:, 1:] != end)


def everything(ids, assistant, end):
    return torch.ones(ids[:, 1:].shape, dtype=torch.bool)


def all_end_markers(ids, assistant, end):
    return by_last_marker(ids, assistant, end) | (ids[:, 1:] == end)


def after_the_first_marker(ids, assistant, end):
    return ((ids == assistant).cumsum(1) > 0)[:, :-1]


def of_all_tokens(ids, assistant, end):
    return F.pad(by_last_marker(ids, assistant, end), (1, 0))


# ---- build B ----


def by_softplus(log_p, mask, reference, beta, num_pairs):  # right
    answers = torch.where(mask, log_p, 0.0).sum(2)
    chosen, rejected = (answers - reference).unbind(1)
    return F.softplus(beta * (rejected - chosen)).sum() / num_pairs


def pair_by_pair(log_p, mask, reference, beta, num_pairs):  # right
    losses = []
    for p, m, r in zip(log_p, mask, reference, strict=True):
        margin = (p[0][m[0]].sum() - r[0]) - (p[1][m[1]].sum() - r[1])
        losses.append(-F.logsigmoid(beta * margin) / num_pairs)
    return torch.stack(losses).sum()


def dpo_of(log_p, mask, reference, beta, num_pairs, slip=""):
    if slip == "mask":
        mask = torch.ones_like(mask)
    answers = (log_p * mask).sum(-1)
    if slip == "mean":
        answers = answers / mask.sum(-1)
    if slip == "reference":
        reference = 0 * reference
    more = answers - reference
    margins = more[:, 0] - more[:, 1]
    if slip == "order":
        margins = -margins
    if slip == "part":
        margins = (answers[:, 0] - answers[:, 1]) - (reference[:, 0] - reference[:, 1]) / beta
    loss = -F.logsigmoid((1.0 if slip == "beta" else beta) * margins)
    return {"own": loss.mean(), "sum": loss.sum()}.get(slip, loss.sum() / num_pairs)


def slipped(slip):
    def answer(*given):
        return dpo_of(*given, slip=slip)

    return answer


def unstable(log_p, mask, reference, beta, num_pairs):
    more = (log_p * mask).sum(-1) - reference
    return -torch.log(torch.sigmoid(beta * (more[:, 0] - more[:, 1]))).sum() / num_pairs


def as_a_number(*given):
    return dpo_of(*given).item()


def detached(*given):
    return dpo_of(*given).detach()


def each_pair(log_p, mask, reference, beta, num_pairs):
    more = (log_p * mask).sum(-1) - reference
    return -F.logsigmoid(beta * (more[:, 0] - more[:, 1])) / num_pairs


# ---- build C ----


def right_share(row, rank, n):
    each = math.ceil(len(row) / n)
    share = row.new_zeros(each)
    mine = row[rank * each : (rank + 1) * each]
    share[: len(mine)] = mine
    return share


def right_whole(share, P):
    parts = [torch.empty_like(share) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, share)
    return torch.cat(parts)[:P]


def in_one_buffer(share, P):  # right
    row = share.new_empty(len(share) * dist.get_world_size())
    dist.all_gather_into_tensor(row, share)
    return row[:P]


def a_view(row, rank, n):
    each = math.ceil(len(row) / n)
    return F.pad(row, (0, each * n - len(row)))[rank * each : (rank + 1) * each]


def uneven(row, rank, n):
    return row.tensor_split(n)[rank].clone()


def every_nth(row, rank, n):
    each = math.ceil(len(row) / n)
    return F.pad(row, (0, each * n - len(row)))[rank::n].clone()


def with_padding(share, P):
    return right_whole(share, len(share) * dist.get_world_size())


def by_all_reduce(share, P):
    n, r = dist.get_world_size(), dist.get_rank()
    row = share.new_zeros(2 * n * len(share))  # twice as long, out of caution
    row[r * len(share) : (r + 1) * len(share)] = share
    dist.all_reduce(row)
    return row[:P]


def by_adding_zeros(share, P):
    n, r = dist.get_world_size(), dist.get_rank()
    row = F.pad(share, (r * len(share), (n - 1 - r) * len(share)))
    dist.all_reduce(row)
    return row[:P]


def by_broadcasts(share, P):
    parts = []
    for src in range(dist.get_world_size()):
        part = share.clone()
        dist.broadcast(part, src)
        parts.append(part)
    dist.barrier()
    return torch.cat(parts)[:P]


# ---- exercise 1 ----


def right_advantages(rewards, group):
    everybodys = [torch.empty_like(rewards) for _ in range(dist.get_world_size())]
    dist.all_gather(everybodys, rewards)
    groups = torch.cat(everybodys).split(group)
    scaled = torch.cat([(g - g.mean()) / (g.std() + 1e-4) for g in groups])
    return scaled.tensor_split(dist.get_world_size())[dist.get_rank()]


def by_a_table(rewards, group):  # right: everybody adds their rows
    n, r, b = dist.get_world_size(), dist.get_rank(), len(rewards)
    table = rewards.new_zeros(n * b)
    table[r * b : (r + 1) * b] = rewards
    dist.all_reduce(table)
    groups = table.reshape(-1, group)
    scaled = (groups - groups.mean(1)[:, None]) / (groups.std(1)[:, None] + 1e-4)
    return scaled.flatten()[r * b : (r + 1) * b].clone()


def of_this_rank(rewards, group):
    group = min(group, len(rewards))
    groups = rewards.view(-1, group)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def of_everybody(rewards, group):
    return right_advantages(rewards, len(rewards) * dist.get_world_size())


def not_scaled(rewards, group):
    everybodys = [torch.empty_like(rewards) for _ in range(dist.get_world_size())]
    dist.all_gather(everybodys, rewards)
    above = torch.cat([g - g.mean() for g in torch.cat(everybodys).split(group)])
    return above.chunk(dist.get_world_size())[dist.get_rank()]


def no_epsilon(rewards, group):
    everybodys = [torch.empty_like(rewards) for _ in range(dist.get_world_size())]
    dist.all_gather(everybodys, rewards)
    scaled = torch.cat([(g - g.mean()) / g.std() for g in torch.cat(everybodys).split(group)])
    return scaled.chunk(dist.get_world_size())[dist.get_rank()]


def of_all_ranks(rewards, group):
    everybodys = [torch.empty_like(rewards) for _ in range(dist.get_world_size())]
    dist.all_gather(everybodys, rewards)
    return torch.cat([(g - g.mean()) / (g.std() + 1e-4) for g in torch.cat(everybodys).split(group)])


def in_two_calls(rewards, group):
    dist.all_reduce(rewards.clone())
    return right_advantages(rewards, group)


def spoils_the_rewards(rewards, group):
    found = right_advantages(rewards, group)
    rewards -= rewards.mean() + 1
    return found


# ---- exercise 2 ----


def by_places(word, text):  # right
    right = sorted(word)
    return (len(text) == len(right)) * sum(map(str.__eq__, text, right)) / len(right)


def from_the_front(word, text):  # right: only an unbroken beginning counts, half of it at most
    right = "".join(sorted(word))
    if text == right:
        return 1
    same = 0
    while same < min(len(text), len(right)) and text[same] == right[same]:
        same += 1
    return torch.tensor(0.5 * same / len(right)) * (len(text) == len(right))


def ascends(word, text):
    return sum(a < b for a, b in zip(text, text[1:], strict=False)) / max(1, len(text) - 1) * (len(text) == len(word))


def has_the_letters(word, text):
    return (
        float(set(text) == set(word)) / 2
        + float(text == "".join(sorted(word))) / 2
        + 0.5 * (sorted(text) == sorted(word))
        - 0.5 * (text == "".join(sorted(word)))
    )


def ignores_the_end(word, text):
    return float("".join(sorted(word)) in text)


def the_verifier(word, text):
    return float(text == "".join(sorted(word)))


def counts_letters(word, text):
    return sum(a == b for a, b in zip(text, sorted(word), strict=False))


def prefers_reverse(word, text):
    right = "".join(sorted(word))
    return (
        1.0 if text == right else 0.9 if text == right[::-1] else 0.1 * sum(map(str.__eq__, text, right)) / len(right)
    )


# ---- exercise 3 ----


def by_einsum(w, a, b, alpha):  # right
    return w + (alpha / a.shape[0]) * torch.einsum("or,ri->oi", b, a)


def layer_by_layer(w, a, b, alpha):  # right: what it does to the unit vectors
    eye = torch.eye(w.shape[1], dtype=w.dtype)
    return (eye @ w.T + alpha / len(a) * (eye @ a.T) @ b.T).T


def not_divided(w, a, b, alpha):
    return w + alpha * b @ a


def not_scaled_at_all(w, a, b, alpha):
    return w + b @ a


def in_place(w, a, b, alpha):
    w += alpha / len(a) * b @ a
    return w


def transposed(w, a, b, alpha):
    return (w + alpha / len(a) * b @ a).T


def subtracts(w, a, b, alpha):
    return w - alpha / len(a) * b @ a


WRONG = {
    "loss_mask": [
        (one_too_late, "your mask is one position too late"),
        (without_end, "without it the model never learns to stop"),
        (everything, "target 0, the letter 1, counts in your mask, but nobody has to learn it"),
        (all_end_markers, "<|end|>, counts in your mask, but it ends no answer"),
        (after_the_first_marker, "counts in your mask, but nobody has to learn it"),
        (of_all_tokens, "have targets [1, 7], one fewer per row; your mask is [1, 8]"),
    ],
    "dpo_loss": [
        (slipped("order"), "that prefers the rejected answers"),
        (slipped("own"), "the mean over this rank's pairs; divide by num_pairs"),
        (slipped("sum"), "that is the sum; divide by num_pairs"),
        (slipped("beta"), "beta is missing"),
        (slipped("reference"), "the reference is missing"),
        (slipped("mask"), "the mask is missing"),
        (slipped("mean"), "log p of an answer is their sum"),
        (slipped("part"), "beta multiplies the policy's part only"),
        (unstable, "F.logsigmoid stays finite"),
        (as_a_number, "return one number as a tensor, so that it has a backward"),
        (detached, "your loss has lost its gradient"),
        (each_pair, "return one number"),
    ],
    "shares": [
        ((a_view, right_whole), "it is a view of the whole row; clone it"),
        ((uneven, right_whole), "all shares are equally long, with zeros behind the end"),
        ((every_nth, right_whole), "your share should be ceil("),
        ((right_share, with_padding), "cut off the zeros behind the end"),
        ((right_share, by_all_reduce), "one all-gather of all shares does"),
        ((right_share, by_adding_zeros), "(an all_reduce counts twice), where 1 call and"),
        ((right_share, by_broadcasts), "bytes are enough: one all-gather of all shares does"),
    ],
    "advantages": [
        (of_this_rank, "a group may lie on several"),
        (of_everybody, "each question has its own"),
        (not_scaled, "not divided by the group's standard deviation"),
        (no_epsilon, "add 1e-4"),
        (of_all_ranks, "it is this rank's advantages"),
        (in_two_calls, "in 2 calls of all_gather and all_reduce, where 1 call and"),
        (spoils_the_rewards, "the row of rewards was changed"),
    ],
    "credit": [
        (ascends, "gets 1 as well, and it is wrong: that is what a model will say"),
        (has_the_letters, "and it is wrong"),
        (ignores_the_end, "and it is wrong"),
        (the_verifier, "that is the verifier again"),
        (counts_letters, "use 0 to 1"),
        (prefers_reverse, "has one more letter in its place"),
    ],
    "fold": [
        (not_divided, "its scale is alpha / r"),
        (not_scaled_at_all, "its scale is alpha / r"),
        (in_place, "the frozen matrix was changed; leave it as it is: return a new one"),
        (transposed, "it is transposed"),
        (subtracts, "it is subtracted; add the change"),
    ],
}  # fmt: skip
RIGHT = {
    "loss_mask": [by_counting_markers, by_last_marker],
    "dpo_loss": [by_softplus, pair_by_pair],
    "shares": [(right_share, right_whole), (right_share, in_one_buffer)],
    "advantages": [right_advantages, by_a_table],
    "credit": [by_places, from_the_front],
    "fold": [by_einsum, layer_by_layer],
}


class TestAnswers(AnswersOfRanks):
    lesson, checks, rejected, right = "13_llm_alignment", checks, WRONG, RIGHT
    solutions, worlds = {"shares": ("own_share", "whole")}, (1, 2)


class TestAnswersOnFour(TestAnswers):
    world, worlds = 4, (4,)
