"""Checks of lesson 13: loss masks, GRPO's terms and divisors, handing over weights, DPO, rewards."""

import itertools
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

from manyhands.checks import Wrong, exercise
from manyhands.checks.drawn import CLOSE, generator, luck, normal, sizes
from manyhands.checks.expect import count, expect_number, expect_scalar, expect_tensor, expect_traffic, number
from manyhands.measure import wire


@exercise("A", "the loss mask")
def loss_mask(answer, ranks=None):
    """`answer(ids_BT, assistant, end)` is a mask: for each token after the first, whether the assistant wrote it."""
    for user, assistant, end, system in ((90, 91, 92, 93), (300, 45, 44, 9), luck(1).sample(range(10, 500), 4)):
        question, reply = (user, 1, 2, end), (assistant, 3, 4, end)
        for talks, what in (
            ([[*question, *reply]], "of one question with its answer"),
            ([[*question, assistant, 3, end, 0, 0], [user, 1, 2, 5, end, *reply]], "with padding"),
            ([[user, 1, end, assistant, 3, 4]], "of an answer that was cut off"),
            ([[system, 1, end, *question, *reply]], "that begins with the system's message"),
            ([_some_talk(i, user, assistant, end) for i in range(2, 5)], "of turns, padded with the end marker"),
        ):
            ids_BT = torch.tensor(talks)
            found_BT = answer(ids_BT, assistant, end)
            wanted_BT = torch.tensor([_written(row, assistant, end) for row in talks])
            ends_BT = ids_BT[:, 1:] == end
            slips = {
                "that is one position too late: the token after the marker counts": F.pad(wanted_BT[:, :-1], (1, 0)),
                "that is one position too early: the assistant's marker is no target": F.pad(wanted_BT[:, 1:], (0, 1)),
                "the end of an answer counts: without it the model never learns to stop": wanted_BT & ~ends_BT,
                "an end marker that ends no answer does not count": wanted_BT | ends_BT,
                "the user's text is not a target": torch.ones_like(wanted_BT),
                "nothing counts: the end of the system's or user's text closes no answer": torch.zeros_like(wanted_BT),
                "an answer ends at its end marker": ((ids_BT == assistant).cumsum(1) > 0)[:, :-1],
            }
            if isinstance(found_BT, torch.Tensor):
                wanted_BT = wanted_BT.to(found_BT.dtype)  # ones and zeros are accepted
            expect_tensor(found_BT, wanted_BT, f"for a conversation {what} the mask of the targets", slips)


def _some_talk(seed, user, assistant, end, length=23):
    draw, row = luck(seed), []
    while len(row) < length - 5:
        for speaker in (user, assistant):
            row += [speaker, *draw.choices(range(1, 9), k=draw.randint(0, 3)), end]
    return (row + [end] * length)[:length]


def _written(row, assistant, end):
    """Return the mask by applying the rule token by token, independently of the lesson's solution."""
    found, speaks = [], False
    for token in row:
        found.append(speaks)
        speaks = token == assistant or (speaks and token != end)
    return found[1:]


@exercise("B", "advantages")
def group_advantages(answer, ranks=None):
    """`answer(rewards_B, group)` is the advantage of each answer in its group."""
    draw = generator(29)
    for group, num_groups in ((4, 1), (2, 5), (8, 3), (3, 4)):
        rewards_B = torch.randint(0, 3, (group * num_groups,), generator=draw).double()
        rewards_B[:2] = torch.tensor([0.0, 2.0])
        rewards_B[-group:] = 1.0 if num_groups > 1 else rewards_B[-group:]
        case = f"for {count(num_groups, 'group')} of {group} what came back"
        slips = _advantage_slips(rewards_B, group)
        expect_tensor(answer(rewards_B, group), _advantages(rewards_B, group), case, slips, it_is="the advantages")


def _advantage_slips(rewards_B, group):
    groups, mean, std = rewards_B.split(group), rewards_B.mean(), rewards_B.std()
    return {
        "that is over all answers: each question has its own": _advantages(rewards_B, len(rewards_B)),
        "they are not divided by the group's standard deviation": torch.cat([g - g.mean() for g in groups]),
        "the mean is over all answers": torch.cat([(g - mean) / (g.std() + 1e-4) for g in groups]),
        "the standard deviation is over all answers": torch.cat([(g - g.mean()) / (std + 1e-4) for g in groups]),
        "add 1e-4 to the standard deviation, before you divide": _advantages(rewards_B, group, eps=0.0) + 1e-4,
        "they are divided by the standard deviation alone; add 1e-4 to it": _advantages(rewards_B, group, eps=0.0),
        "the standard deviation is that of n, not of n - 1": _advantages(rewards_B, group, correction=0),
    }


@exercise("C", "the term of one token")
def clipped(answer, ranks=None):
    """`answer(log_p_bT, old_bT, advantages_b, clip)` is -min(ratio A, clip(ratio) A) of each token."""
    for b, T, clip in ((4, 5, 0.2), (3, 7, 0.1), (*sizes(5, 2, 2, 9), 0.3)):
        old, moved = -4 * normal(1, b, T).abs(), 0.5 * normal(2, b, T)
        moved[0, :2] = torch.tensor([1.0, -1.0])
        A = normal(3, b)
        A[0], A[1] = 1.5, -1.5
        moved[1, :2] = moved[0, :2]
        log_p = (old + moved).requires_grad_()
        found = answer(log_p, old, A) if clip == 0.2 else answer(log_p, old, A, clip)
        ratio, A1 = moved.exp(), A[:, None]
        capped = ratio.clamp(1 - clip, 1 + clip)

        def terms(ratio, low=1 - clip, high=1 + clip, A1=A1):
            return -torch.minimum(ratio * A1, ratio.clamp(low, high) * A1)

        slips = {
            "the sign is wrong: a gain lowers the loss": -terms(ratio),
            "that is not clipped": -ratio * A1,
            "that is clipped on both sides: take the smaller of the two products": -capped * A1,
            "that takes the larger of the two products": -torch.maximum(ratio * A1, capped * A1),
            "the smaller ratio is not the smaller product where A is negative": -torch.minimum(ratio, capped) * A1,
            "the ratio is exp(log p - log p_old)": [terms(moved), terms((old + moved) / old)],
            "the ratio is the wrong way round": terms(1 / ratio),
            "capped is limited to the range 1 - clip to 1 + clip": [terms(ratio, 0.8, 1.2), terms(ratio, -clip, clip)],
        }
        expect_tensor(found, terms(ratio), "what came back", slips, it_is="the term of each token")
        if not found.requires_grad:
            raise Wrong("the terms have no graph: do not detach log p")


@exercise("D", "divide, in three ways")
def three_losses(answer, ranks=None):
    """`answer(terms_bT, mask_bT, num_answers, num_tokens, longest)` is (per answer, per token, Dr. GRPO)."""
    for b, T, num_answers, num_tokens, longest in ((2, 4, 2, 5, 4), (3, 6, 8, 31, 9), (*sizes(6, 2, 3, 9), 20, 70, 12)):
        terms = normal(1, b, T).requires_grad_()
        mask = torch.arange(T) < torch.randint(1, T, (b, 1), generator=generator(2))
        mask[0], mask[1] = torch.arange(T) < T - 1, torch.arange(T) < 2
        found = answer(terms, mask, num_answers, num_tokens, longest)
        found = list(found) if isinstance(found, torch.Tensor) and found.dim() else found
        if not isinstance(found, tuple | list) or len(found) != 3:
            raise Wrong("three losses should come back: per answer, per token, Dr. GRPO")
        sums, lengths = (terms * mask).sum(1), mask.sum(1)
        unmasked, means, total = terms.sum(), (sums / lengths).sum(), sums.sum()
        cases = (
            ("per answer", means / num_answers, {
                "the mask is missing": terms.sum(1).div(lengths).sum() / num_answers,
                "an answer is divided by all T places, not by its own tokens": (sums / T).sum() / num_answers,
                "that is the mean of this rank's answers; divide by num_answers": means / b,
                "the answers are not divided by their lengths": total / num_answers,
                "divide by the number of answers as well": means,
            }),
            ("per token", total / num_tokens, {
                "the mask is missing": unmasked / num_tokens,
                "that is divided by this rank's tokens; divide by those of all ranks": total / lengths.sum(),
                "that is the sum; divide by num_tokens": total,
                "that is divided by the answers, not by their tokens": total / num_answers,
            }),
            ("Dr. GRPO", total / (num_answers * longest), {
                "the mask is missing": unmasked / (num_answers * longest),
                "that is divided by the answers alone; divide by the constant `longest` as well": total / num_answers,
                "`longest` is a constant, not this rank's longest answer": total / (num_answers * lengths.max()),
                "that is the loss per token": total / num_tokens,
                "divide by the number of answers as well": total / longest,
                "divide by the product of the two": total / num_answers * longest,
            }),
        )  # fmt: skip
        for value, (name, wanted, slips) in zip(found, cases, strict=True):
            slips = {why: wrong.item() for why, wrong in slips.items()}
            expect_number(expect_scalar(value, name).item(), wanted.item(), f"{name}: the loss", slips=slips, rel=CLOSE)


@exercise("E", "hand over the weights")
def hand_over(answer, ranks):
    """`answer(model, group)` gives all ranks of the group rank 0's parameters, by one broadcast."""
    n, rank = ranks.world_size, ranks.rank
    for first, second in ((3, 2), sizes(8, 2, 2, 7)):
        model = torch.nn.Sequential(torch.nn.Linear(first, second), torch.nn.Linear(second, 1)).double()
        start = [torch.arange(p.numel()).view_as(p).double() + i for i, p in enumerate(model.parameters())]
        for p, values in zip(model.parameters(), start, strict=True):
            p.data = values + 300 * (rank + 1) ** 2
        before = list(model.parameters())
        groups, broadcast = [], dist.broadcast

        def noted(tensor, src=None, group=None, **more):
            groups.append(group)  # noqa: B023
            return broadcast(tensor, src, group, **more)  # noqa: B023

        with wire.watch() as seen, mock.patch.object(dist, "broadcast", noted):
            answer(model, dist.group.WORLD)
        if None in groups:
            raise Wrong("all ranks take part in that broadcast, also those outside of `group`: hand it on, group=group")
        if [id(p) for p in model.parameters()] != [id(p) for p in before]:
            raise Wrong("the model has other parameters now, and an optimizer still holds the old ones: fill them")
        for p, values in zip(model.parameters(), start, strict=True):
            slips = {
                "they are this rank's own: all call broadcast, then put the row back": values + 300 * (rank + 1) ** 2,
                "that is rank 1's: the source is rank 0": values + 1200,
                "that is the mean over the ranks; the others' weights are old": values + 50 * (n + 1) * (2 * n + 1),
            }
            expect_tensor(p, values + 300, "the weights", slips, it_is="rank 0's", close=0)
        P = sum(p.numel() for p in model.parameters())
        cure = "one broadcast of one row does"
        expect_traffic(seen, "the weights are right", cure, calls=1, payload=8 * P)


@exercise(1, "the DPO loss")
def dpo_loss(answer, ranks=None):
    """`answer(log_p_b2T, mask_b2T, reference_b2, beta, num_pairs)` is this rank's part of the mean over all pairs."""
    draw, some = generator(13), sorted(sizes(13, 2, 2, 12))
    for b, num_pairs, beta, far in ((3, 3, 1.0, 1.0), (2, 8, 0.1, 1.0), (2, 4, 0.5, 900.0), (*some, 0.3, 1.0)):
        log_p = -torch.rand(b, 2, 5, generator=draw, dtype=torch.float64)
        log_p[:, 0] *= far  # with a large margin, the chosen answer is the unlikely one
        log_p.requires_grad_()
        mask = torch.ones(b, 2, 5, dtype=torch.bool)
        mask[:, :, 0], mask[:, 1, 3:], mask[0, 0, 4] = False, False, False
        reference = -4 * torch.rand(b, 2, generator=draw, dtype=torch.float64)
        wanted, gradient = _dpo(log_p, mask, reference, beta, num_pairs)
        given = answer(log_p, mask, reference, beta, num_pairs)
        expect_scalar(given, "the loss", "; F.logsigmoid stays finite where margins are hundreds of nats").backward()
        slips = _dpo_slips(log_p.detach(), mask, reference, beta, num_pairs)
        expect_number(given.item(), wanted, "the loss", slips=slips, rel=CLOSE)
        expect_tensor(log_p.grad, gradient, "the loss is right; its gradient", close=CLOSE)


def _dpo(log_p, mask, reference, beta, num_pairs):
    """Return (value, gradient) of the DPO loss."""
    leaf = log_p.detach().clone().requires_grad_()
    chosen_b, rejected_b = ((leaf * mask).sum(-1) - reference).unbind(1)
    loss = F.softplus(-beta * (chosen_b - rejected_b)).sum() / num_pairs
    loss.backward()
    return loss.item(), leaf.grad


def _dpo_slips(log_p, mask, reference, beta, num_pairs):
    def value(log_p=log_p, mask=mask, reference=reference, beta=beta, divisor=num_pairs):
        return _dpo(log_p, mask, reference, beta, 1)[0] / divisor

    lengths = mask.sum(-1, keepdim=True)
    flipped = value(log_p.flip(1), mask.flip(1), reference.flip(1))
    return {
        "that prefers the rejected answers: the chosen ones come first": flipped,
        "that is the mean over this rank's pairs; divide by num_pairs, those of all ranks": value(divisor=len(log_p)),
        "that is the sum; divide by num_pairs": value(divisor=1),
        "beta is missing": value(beta=1.0),
        "the reference is missing: compare with it": value(reference=torch.zeros_like(reference)),
        "the mask is missing: only what the assistant wrote counts": value(mask=torch.ones_like(mask)),
        "that takes the mean over an answer's tokens; log p of an answer is their sum": value(log_p=log_p / lengths),
        "beta multiplies the margin, inside the sigmoid": beta * value(beta=1.0),
        "beta multiplies the policy's part only, not the whole margin": value(reference=reference / beta),
        "the reference's part has the wrong sign": value(reference=-reference),
    }


@exercise(2, "sharded at rest, gathered to compute")
def shares(answer, ranks):
    """`answer` is (own_share(row_P, rank, world_size), whole(share, P)): a row in n parts, gathered by one call."""
    own_share, whole = answer
    n, rank = ranks.world_size, ranks.rank
    for P, first in ((8 * n, 1), (8 * n - 3, 101), (1, 7), (n + 1, luck(3).randint(2, 99))):
        row_P, each = torch.arange(first, first + P, dtype=torch.float64), -(-P // n)
        row_P[3::4] = 0  # a weight may be zero too
        share = own_share(row_P, rank, n)
        case = f"of {count(P, 'number')} on {count(n, 'rank')} your share"
        it_is = f"ceil({P}/{n}) = {each} numbers: all shares are equally long, with zeros behind the end"
        expect_tensor(share, F.pad(row_P, (0, each * n - P)).chunk(n)[rank], case, it_is=it_is, close=0)
        if share.untyped_storage().nbytes() > share.nbytes:
            raise Wrong(f"{case} keeps all {share.untyped_storage().nbytes()} bytes: it is a view of the row; clone it")
        own_share(row_P + 1, rank, n)  # an answer that cached an earlier row now finds only this one
        with wire.watch() as seen:
            back_P = whole(share, P)
        slips = {
            "cut off the zeros behind the end": F.pad(row_P, (0, each * n - P)) if each * n > P else None,
            "zeros of the row itself are missing; cut it off after P numbers": row_P[row_P != 0] if P > 3 else None,
        }
        it_is = "the shares in the order of the ranks"
        expect_tensor(back_P, row_P, f"for {count(P, 'number')} what `whole` returned", slips, it_is, close=0)
        expect_traffic(seen, "the row is right", "one all-gather of all shares does", calls=1, volume=8 * each * n)


@exercise(3, "advantages across ranks")
def advantages(answer, ranks):
    """`answer(rewards_b, group)` is this rank's advantages, in groups that may lie on several ranks."""
    n, draw = ranks.world_size, generator(31)
    for group, num_groups in ((4 * n, 1), (2, 2 * n), (2 * n, 3), (4, 3 * n // 2) if n % 2 == 0 else (3, n)):
        rewards_B = torch.randint(0, 3, (group * num_groups,), generator=draw).double()
        rewards_B[:2] = torch.tensor([0.0, 2.0])
        rewards_B[-group:] = 1.0 if num_groups > 1 else rewards_B[-group:]
        mine_b = rewards_B.chunk(n)[ranks.rank]
        with wire.watch() as seen:
            found_b = answer(mine_b, group)
        slips = _advantage_slips(rewards_B, group)
        slips = {why: wrong_B.chunk(n)[ranks.rank] for why, wrong_B in slips.items()}
        if len(mine_b) > 1 and (len(mine_b) % group == 0 or group % len(mine_b) == 0):
            slips["they have the mean of the part of a group that is on this rank; a group may lie on several"] = (
                _advantages(mine_b, min(group, len(mine_b)))
            )
        wanted = _advantages(rewards_B, group).chunk(n)
        slips |= {f"those are rank {r}'s": theirs_b for r, theirs_b in enumerate(wanted) if r != ranks.rank}
        case = f"with groups of {group} on {count(n, 'rank')}"
        expect_tensor(found_b, wanted[ranks.rank], f"{case} what came back", slips, it_is="this rank's advantages")
        expect_traffic(seen, "the advantages are right", "gather the rewards", calls=1, volume=rewards_B.nbytes)


def _advantages(rewards_B, group, eps=1e-4, correction=1):
    groups = rewards_B.split(group)
    return torch.cat([(g - g.mean()) / (g.std(correction=correction) + eps) for g in groups])


@exercise(4, "partial credit that cannot be hacked")
def credit(answer, ranks=None):
    """`answer(word, text)` is 1 for the right answer alone, and never falls when one more letter is in its place."""
    for word in ("dbca", "cab", "".join(luck(4).choices("abcdefgh", k=4))):
        right = "".join(sorted(word))
        got = {text: number(answer(word, text)) for text in _texts(right, sorted({*word, "a", "z"}))}
        for text, value in got.items():
            if not 0 <= value <= 1 + 1e-10:
                raise Wrong(f"for {word!r} the answer {text!r} gets {value:g}; use 0 to 1")
        expect_number(got[right], 1, f"for {word!r} what the right answer {right!r} gets")
        for text, value in got.items():
            if value > 1 - 1e-6 and text != right:
                raise Wrong(f"for {word!r} the answer {text!r} gets {value:g} as well, and it is wrong")
        if max(value for text, value in got.items() if text != right) <= 0:
            raise Wrong("no wrong answer gets anything: that is the verifier again, not partial credit")
        for text, i in itertools.product(got, range(len(right))):
            better = text[:i] + right[i] + text[i + 1 :]
            if len(text) == len(right) and got.get(better, 1) < got[text] - 1e-10:
                raise Wrong(f"for {word!r}, {better!r} has one more letter in its place than {text!r}, and gets less")


def _texts(right, letters):
    """Return all texts of the right length over the letters, and other texts that models produce."""
    exact = ("".join(each) for each in itertools.product(letters, repeat=len(right)))
    besides = (
        "", right[:-1], right[0], right + right[-1], right + "a", right * 2, right[::-1], right.upper(), " " + right,
        right + " ",
    )  # fmt: skip
    return dict.fromkeys([*exact, *besides])
