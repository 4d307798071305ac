"""Checks of lesson 13: what a loss counts, the DPO loss, a model at rest in shares, advantages, rewards, adapters."""

import itertools

import torch
import torch.nn.functional as F

from manyhands.checks import Wrong, exercise
from manyhands.checks.drawn import CLOSE, generator, luck, normal, sizes
from manyhands.checks.expect import count, expect_number, expect_scalar, expect_tensor, expect_traffic, number
from manyhands.measure import wire


@exercise("A", "the loss mask")
def loss_mask(answer, ranks=None):
    """`answer(ids_BT, assistant, end)` says of each token after the first whether the assistant wrote it."""
    for user, assistant, end in ((90, 91, 92), (300, 45, 44), luck(1).sample(range(10, 500), 3)):
        question, reply = (user, 1, 2, end), (assistant, 3, 4, end)
        for talks, what in (
            ([[*question, *reply]], "of one question with its answer"),
            ([[*question, assistant, 3, end, 0, 0], [user, 1, 2, 5, end, *reply]], "with padding"),
            ([[user, 1, end, assistant, 3, 4]], "of an answer that was cut off"),
            ([_some_talk(i, user, assistant, end) for i in range(2, 5)], "of turns, padded with the end marker"),
        ):
            ids_BT = torch.tensor(talks)
            found_BT = answer(ids_BT, assistant, end)
            wanted_BT = torch.tensor([_written(row, assistant, end) for row in talks])
            ends_BT = ids_BT[:, 1:] == end
            slips = {
                "that is one position too late: target t is token t + 1, so the first letter counts at the assistant's "
                "marker": F.pad(wanted_BT[:, :-1], (1, 0)),
                "the end of an answer counts: without it the model never learns to stop": wanted_BT & ~ends_BT,
                "an end marker that ends no answer does not count": wanted_BT | ends_BT,
                "nobody has to learn what the user wrote": torch.ones_like(wanted_BT),
                "an answer ends at its end marker": ((ids_BT == assistant).cumsum(1) > 0)[:, :-1],
            }
            wanted_BT = wanted_BT.to(getattr(found_BT, "dtype", torch.bool))  # ones and zeros will do
            expect_tensor(found_BT, wanted_BT, f"for a conversation {what} the mask of the targets", slips)


def _some_talk(seed, user, assistant, end, length=23):
    draw, row = luck(seed), []
    while len(row) < length - 5:
        for speaker in (user, assistant):
            row += [speaker, *draw.choices(range(1, 9), k=draw.randint(0, 3)), end]
    return (row + [end] * length)[:length]


def _written(row, assistant, end):
    """What the rule says, token by token: a plain copy of it, kept apart from the lesson's solution."""
    found, speaks = [], False
    for token in row:
        found.append(speaks)
        speaks = token == assistant or (speaks and token != end)
    return found[1:]


@exercise("B", "the DPO loss")
def dpo_loss(answer, ranks=None):
    """`answer(log_p_b2T, mask_b2T, reference_b2, beta, num_pairs)` is this rank's part of the mean over all pairs."""
    draw, some = generator(13), sorted(sizes(13, 2, 2, 12))
    for b, num_pairs, beta, far in ((3, 3, 1.0, 1.0), (2, 8, 0.1, 1.0), (2, 4, 0.5, 900.0), (*some, 0.3, 1.0)):
        log_p = -torch.rand(b, 2, 5, generator=draw, dtype=torch.float64)
        log_p[:, 0] *= far  # where it is far, the chosen answer is the unlikely one
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
    """(value, gradient)"""
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
        "beta multiplies the policy's part only, not the whole margin": value(reference=reference / beta),
        "the reference's part has the wrong sign": value(reference=-reference),
    }


@exercise("C", "at rest a share, whole while it reads")
def shares(answer, ranks):
    """`answer` is (own_share(row_P, rank, world_size), whole(share, P)): a row rests in n parts, whole by one call."""
    own_share, whole = answer
    n, rank = ranks.world_size, ranks.rank
    for P, first in ((8 * n, 1), (8 * n - 3, 101), (1, 7), (n + 1, luck(3).randint(2, 99))):
        row_P, each = torch.arange(first, first + P, dtype=torch.float64), -(-P // n)
        row_P[3::4] = 0  # also a weight may be zero
        share = own_share(row_P, rank, n)
        case = f"of {count(P, 'number')} on {count(n, 'rank')} your share"
        it_is = f"ceil({P}/{n}) = {each} numbers: all shares are equally long, with zeros behind the end"
        expect_tensor(share, F.pad(row_P, (0, each * n - P)).chunk(n)[rank], case, it_is=it_is, close=0)
        if share.untyped_storage().nbytes() > share.nbytes:
            raise Wrong(f"{case} keeps all {share.untyped_storage().nbytes()} bytes: it is a view of the row; clone it")
        own_share(row_P + 1, rank, n)  # whoever keeps a row elsewhere than in its share has only this one now
        with wire.watch() as seen:
            back_P = whole(share, P)
        slips = {
            "cut off the zeros behind the end": F.pad(row_P, (0, each * n - P)) if each * n > P else None,
            "zeros of the row itself are missing; cut it off after P numbers": row_P[row_P != 0] if P > 3 else None,
        }
        it_is = "the shares in the order of the ranks"
        expect_tensor(back_P, row_P, f"for {count(P, 'number')} what `whole` returned", slips, it_is, close=0)
        expect_traffic(seen, "the row is right", "one all-gather of all shares does", calls=1, volume=8 * each * n)


@exercise(1, "advantages across ranks")
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
        slips = {
            "that is over all answers: each question has its own": _advantages(rewards_B, len(rewards_B)),
            "they are not divided by the group's standard deviation": (
                torch.cat([g - g.mean() for g in rewards_B.split(group)])
            ),
            "they are divided by the standard deviation alone; add 1e-4 to it": _advantages(rewards_B, group, eps=0.0),
            "the standard deviation is that of n, not of n - 1": _advantages(rewards_B, group, correction=0),
        }
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


@exercise(2, "partial credit that cannot be hacked")
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
            raise Wrong("no wrong answer gets anything: that is the verifier again, and no partial credit")
        for text, i in itertools.product(got, range(len(right))):
            better = text[:i] + right[i] + text[i + 1 :]
            if len(text) == len(right) and got.get(better, 1) < got[text] - 1e-10:
                raise Wrong(f"for {word!r}, {better!r} has one more letter in its place than {text!r}, and gets less")


def _texts(right, letters):
    """All texts of the right length over the letters, and what models come up with besides."""
    exact = ("".join(each) for each in itertools.product(letters, repeat=len(right)))
    besides = (
        "", right[:-1], right[0], right + right[-1], right + "a", right * 2, right[::-1], right.upper(), " " + right,
        right + " ",
    )  # fmt: skip
    return dict.fromkeys([*exact, *besides])


@exercise(3, "fold it")
def fold(answer, ranks=None):
    """`answer(w_oi, a_ri, b_or, alpha)` is the matrix with its adapter in it."""
    for o, i, r, alpha in ((5, 3, 2, 4.0), (4, 4, 4, 2.0), (*sizes(4, 3, 2, 9), luck(5).uniform(1, 20))):
        w_oi, a_ri, b_or = normal(4, o, i), normal(6, r, i), normal(7, o, r)
        found_oi = answer(w_oi, a_ri, b_or, alpha)
        slips = {
            f"the change is scaled by {scale:g}; its scale is alpha / r = {alpha:g} / {r}": w_oi + scale * b_or @ a_ri
            for scale in (alpha, 1.0, 1 / r, alpha * r, r / alpha, 2 * alpha / r)
        }
        slips |= {
            "it is subtracted; add the change": w_oi - alpha / r * b_or @ a_ri,
            "it is transposed": (w_oi + alpha / r * b_or @ a_ri).T,
        }
        it_is = f"a matrix [{o}, {i}] that does what matrix and adapter do together, W + alpha / r B A"
        expect_tensor(found_oi, w_oi + alpha / r * b_or @ a_ri, "what came back", slips, it_is)
