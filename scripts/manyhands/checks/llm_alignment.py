"""Checks of lesson 13: what a loss counts, the DPO loss, a model at rest in shares, advantages, rewards, adapters."""

import itertools
import math

import torch
import torch.nn.functional as F

from manyhands.checks import Wrong, exercise
from manyhands.checks.tensors import count
from manyhands.checks.values import number, shown
from manyhands.measure import wire

CLOSE = 1e-10
USER, ASSISTANT, END = 90, 91, 92  # ids of markers


@exercise("A", "the loss mask")
def loss_mask(answer, ranks=None):
    """`answer(ids_BT, assistant, end)` says of each token after the first whether the assistant wrote it."""
    for talks, what in (
        ([[USER, 1, 2, END, ASSISTANT, 3, 4, END]], "of one question with its answer"),
        ([[USER, 1, END, ASSISTANT, 3, END, USER, 4, 5, END, ASSISTANT, 6, 7, END]], "of two turns"),
        (
            [[USER, 1, END, ASSISTANT, 3, END, 0, 0, 0], [USER, 1, 2, 5, END, ASSISTANT, 3, 4, END]],
            "with padding",
        ),
        ([[USER, 1, END, ASSISTANT, END, END, END]], "of an empty answer, padded with the end marker"),
        ([[USER, 1, END, ASSISTANT, 3, 4]], "of an answer that was cut off"),
    ):
        ids_BT = torch.tensor(talks)
        given = answer(ids_BT.clone(), ASSISTANT, END)
        wanted = torch.tensor([_written(row) for row in talks])
        if not isinstance(given, torch.Tensor):
            raise Wrong(f"return a tensor, the mask of the targets, not {shown(given)}")
        if given.shape != wanted.shape:
            raise Wrong(
                f"ids of shape {list(ids_BT.shape)} have targets of shape {list(wanted.shape)}, one fewer per row, and your mask"
                f" is {list(given.shape)}"
            )
        if not torch.equal(given.bool().to(given.dtype), given):
            raise Wrong("a mask holds True and False (or 1 and 0), and nothing else")
        _judge_mask(given.bool(), wanted, ids_BT, what)


def _written(row):
    """What the rule says, token by token: a plain copy of it, kept apart from the lesson's solution."""
    found, speaks = [], False
    for i, token in enumerate(row):
        if i:
            found.append(speaks)
        if token == ASSISTANT:
            speaks = True
        elif token == END:
            speaks = False
    return found


def _judge_mask(given, wanted, ids_BT, what):
    if torch.equal(given, wanted):
        return
    shifted = torch.zeros_like(wanted)
    shifted[:, 1:] = wanted[:, :-1]  # True where the assistant's token is read
    if torch.equal(given, shifted):
        raise Wrong(
            "your mask is one position too late: target t is token t + 1, so the first letter counts at the assistant's marker"
        )
    names = {USER: "<|user|>", ASSISTANT: "<|assistant|>", END: "<|end|>", 0: "padding"}
    row, t = (given != wanted).nonzero()[0].tolist()
    token = ids_BT[row, t + 1].item()
    name = names.get(token, f"the letter {token}")
    why = "the assistant wrote it" if wanted[row, t] else "nobody has to learn it"
    if token == END:
        why = "it ends an answer: without it the model never learns to stop" if wanted[row, t] else "it ends no answer"
    verb = "does not count" if wanted[row, t] else "counts"
    raise Wrong(f"in the conversation {what}, target {t}, {name}, {verb} in your mask, but {why}")


@exercise("B", "the DPO loss")
def dpo_loss(answer, ranks=None):
    """`answer(log_p_b2T, mask_b2T, reference_b2, beta, num_pairs)` is this rank's part of the mean over all pairs."""
    draw = torch.Generator().manual_seed(13)
    for b, num_pairs, beta, far in ((3, 3, 1.0, 1.0), (2, 8, 0.1, 1.0), (2, 4, 0.5, 900.0)):
        log_p = -torch.rand(b, 2, 5, generator=draw, dtype=torch.float64)
        log_p[:, 0] *= far  # where it is far, the chosen answer is the unlikely one
        log_p.requires_grad_()
        mask = torch.ones(b, 2, 5, dtype=torch.bool)
        mask[:, :, 0], mask[:, 1, 3:], mask[0, 0, 4] = False, False, False
        reference = -4 * torch.rand(b, 2, generator=draw, dtype=torch.float64)
        wanted, gradient = _dpo(log_p, mask, reference, beta, num_pairs)
        given = answer(log_p, mask.clone(), reference.clone(), beta, num_pairs)
        if not isinstance(given, torch.Tensor):
            raise Wrong(f"return a tensor, so that it has a backward, not {shown(given)}")
        if given.numel() != 1:
            raise Wrong(
                f"return one number, the sum of this rank's pairs over num_pairs, not {list(given.shape)} of them"
            )
        if not torch.isfinite(given).all():
            raise Wrong(f"for margins of hundreds of nats your loss is {given.item()}; F.logsigmoid stays finite")
        if abs(given.item() - wanted) > CLOSE:
            raise Wrong(_dpo_fault(given.item(), log_p.detach(), mask, reference, beta, num_pairs, wanted))
        if not given.requires_grad:
            raise Wrong("your loss has lost its gradient: do not detach or convert log_p")
        given.backward()
        if log_p.grad is None or not torch.allclose(log_p.grad, gradient, rtol=0, atol=CLOSE):
            raise Wrong("the value is right and its gradient is not")


def _dpo(log_p, mask, reference, beta, num_pairs):
    """(value, gradient), spelled out."""
    leaf = log_p.detach().clone().requires_grad_()
    total = torch.zeros((), dtype=leaf.dtype)
    for pair in range(len(leaf)):
        chosen, rejected = (leaf[pair, i][mask[pair, i]].sum() - reference[pair, i] for i in range(2))
        total = total + F.softplus(-beta * (chosen - rejected))
    (total / num_pairs).backward()
    return total.item() / num_pairs, leaf.grad


def _dpo_fault(found, log_p, mask, reference, beta, num_pairs, wanted):
    """The sentence for a wrong value: which slip has this number?"""

    def value(log_p=log_p, mask=mask, reference=reference, beta=beta, divisor=num_pairs):
        return _dpo(log_p, mask, reference, beta, 1)[0] / divisor

    lengths = mask.sum(-1, keepdim=True)
    slips = {
        "that prefers the rejected answers: the chosen ones come first": value(log_p.flip(1), mask.flip(1), reference.flip(1)),
        "that is the mean over this rank's pairs; divide by num_pairs, those of all ranks": value(divisor=len(log_p)),
        "that is the sum; divide by num_pairs": value(divisor=1),
        "beta is missing": value(beta=1.0),
        "the reference is missing: compare with it": value(reference=torch.zeros_like(reference)),
        "the mask is missing: only what the assistant wrote counts": value(mask=torch.ones_like(mask)),
        "that takes the mean over an answer's tokens; log p of an answer is their sum": value(log_p=log_p / lengths),
        "beta multiplies the policy's part only, not the whole margin": value(reference=reference / beta),
        "the reference's part has the wrong sign": value(reference=-reference),
    }  # fmt: skip
    hint = next((name for name, number in slips.items() if abs(found - number) < 1e-9), "")
    return f"the loss is {found:.6f}, not {wanted:.6f}" + (f": {hint}" if hint else "")


@exercise("C", "at rest a share, whole while it reads")
def shares(answer, ranks):
    """`answer` is (own_share(row_P, rank, world_size), whole(share, P)): a row rests in n parts and comes back by one call."""
    own_share, whole = answer
    n = ranks.world_size
    for P in (8 * n, 8 * n - 3, 1):
        row = torch.arange(1, P + 1, dtype=torch.float64)
        each = -(-P // n)
        share = own_share(row, ranks.rank, n)
        if not isinstance(share, torch.Tensor):
            raise Wrong(f"own_share should return a tensor, not {shown(share)}")
        wanted = F.pad(row, (0, each * n - P))[ranks.rank * each : (ranks.rank + 1) * each]
        if share.shape != wanted.shape:
            raise Wrong(
                f"of {P} numbers on {count(n, 'rank')} your share has the shape {list(share.shape)}, and ceil({P}/{n}) = {each};"
                " all shares are equally long, with zeros behind the end"
            )
        if not torch.equal(share, wanted):
            raise Wrong(f"of 1, 2, ..., {P} your share is {share.tolist()}, not {wanted.tolist()}")
        if share.untyped_storage().nbytes() > each * share.element_size():
            raise Wrong(
                f"your share of {each} numbers keeps {share.untyped_storage().nbytes()} bytes alive: it is a view of the whole"
                " row; clone it"
            )
        with wire.watch() as seen:
            back = whole(share, P)
        _judge_whole(back, row, seen, each, n)


def _judge_whole(back, row, seen, each, n):
    P = len(row)
    if not isinstance(back, torch.Tensor) or back.dim() != 1:
        raise Wrong(f"whole should return a row of {P} numbers, not {shown(back)}")
    if len(back) != P:
        raise Wrong(f"whole returned {len(back)} numbers, and the row has {P}: cut off the zeros behind the end")
    if not torch.equal(back, row):
        raise Wrong(
            f"whole returned {back[:6].tolist()}..., not {row[:6].tolist()}...: shares lie in the order of the ranks"
        )
    if len(seen.calls) != 1:
        raise Wrong(f"whole made {count(len(seen.calls), 'collective call')}, and one all-gather does")
    if seen.calls[0].bytes > 8 * each * n:
        raise Wrong(
            f"whole moved {seen.calls[0].bytes} bytes ({seen.calls[0].op}); all shares together are {8 * each * n}"
        )


@exercise(1, "advantages across ranks")
def advantages(answer, ranks):
    """`answer(rewards_b, group)` is this rank's advantages, with mean and deviation of groups that may lie on several ranks."""
    n = ranks.world_size
    draw = torch.Generator().manual_seed(31)
    for group, num_groups in ((4 * n, 1), (2, 2 * n), (2 * n, 3)):
        rewards_B = torch.randint(0, 3, (group * num_groups,), generator=draw).double()
        rewards_B[:2] = torch.tensor([0.0, 2.0])
        rewards_B[-group:] = 1.0 if num_groups > 1 else rewards_B[-group:]
        mine = rewards_B.chunk(n)[ranks.rank]
        before = mine.clone()
        with wire.watch() as seen:
            given = answer(mine, group)
        if not torch.equal(mine, before):
            raise Wrong("the rewards you were given have changed; work on a copy")
        wanted_B = _advantages(rewards_B, group)
        _judge_advantages(given, wanted_B.chunk(n)[ranks.rank], rewards_B, group, ranks)
        if len(seen.calls) > 1:
            raise Wrong(f"{count(len(seen.calls), 'collective call')}; one is enough: gather the rewards")
        most = 8 * len(rewards_B)
        if sum(call.bytes for call in seen.calls) > most:
            raise Wrong(
                f"you handed over {sum(call.bytes for call in seen.calls)} bytes; all rewards together are {most}"
            )


def _advantages(rewards_B, group, eps=1e-4, correction=1):
    found = []
    for rewards in rewards_B.split(group):
        found.append((rewards - rewards.mean()) / (rewards.std(correction=correction) + eps))
    return torch.cat(found)


def _judge_advantages(given, wanted, rewards_B, group, ranks):
    if not isinstance(given, torch.Tensor):
        raise Wrong(f"return a tensor of this rank's advantages, not {shown(given)}")
    if given.shape != wanted.shape:
        raise Wrong(f"return this rank's {len(wanted)} advantages, not a tensor of shape {list(given.shape)}")
    if not torch.isfinite(given).all():
        raise Wrong("in a group of equal rewards your advantages are not finite; add 1e-4 where you divide")
    if torch.allclose(given, wanted, rtol=0, atol=CLOSE):
        return
    n, r = ranks.world_size, ranks.rank
    mine = rewards_B.chunk(n)[r]
    slips = {
        "they have the mean and deviation of *all* answers: each question has its own": _advantages(rewards_B, len(rewards_B)).chunk(n)[r],
        "they are not divided by the group's standard deviation": torch.cat([g - g.mean() for g in rewards_B.split(group)]).chunk(n)[r],
        "they are divided by the standard deviation alone; add 1e-4 to it": _advantages(rewards_B, group, eps=0.0).chunk(n)[r],
        "the standard deviation is that of n, not of n - 1": _advantages(rewards_B, group, correction=0).chunk(n)[r],
    }  # fmt: skip
    if len(mine) > 1:
        slips["they have the mean of this rank's answers, and a group may lie on several ranks"] = _advantages(
            mine, len(mine)
        )
        if len(mine) % group == 0 or group % len(mine) == 0:
            part = _advantages(mine, min(group, len(mine)))
            slips["they have the mean of the part of a group that is on this rank; a group may lie on several"] = part
    why = next((name for name, slip in slips.items() if torch.allclose(given, slip, rtol=0, atol=1e-9)), "")
    raise Wrong(
        f"with groups of {group} on {count(n, 'rank')} your first advantage is {given[0].item():.4f}, not"
        f" {wanted[0].item():.4f}" + (f": {why}" if why else "")
    )


@exercise(2, "partial credit that cannot be hacked")
def credit(answer, ranks=None):
    """`answer(word, text)` is 1 for the right answer alone, and never falls when one more letter is in its place."""
    for word in ("dbca", "cab", "hgle"):
        right = "".join(sorted(word))
        letters = sorted({*word, "a", "z"})
        got = {}
        for text in _texts(right, letters):
            value = number(answer(word, text), "a number from 0 to 1")
            if not 0 <= value <= 1 + CLOSE:
                raise Wrong(f"for {word!r} the answer {text!r} gets {value:g}; use 0 to 1")
            got[text] = value
        if got[right] < 1 - CLOSE:
            raise Wrong(f"for {word!r} the right answer {right!r} gets {got[right]:g}, not 1")
        best = next((text for text, value in got.items() if value > 1 - 1e-6 and text != right), None)
        if best is not None:
            raise Wrong(
                f"for {word!r} the answer {best!r} gets {got[best]:g} as well, and it is wrong: that is what a model will say"
            )
        if max(value for text, value in got.items() if text != right) <= 0:
            raise Wrong("no wrong answer gets anything: that is the verifier again, and no partial credit")
        _judge_steps(word, right, got)


def _texts(right, letters):
    """All texts of the right length over the letters, and what models come up with besides."""
    exact = ("".join(each) for each in itertools.product(letters, repeat=len(right)))
    besides = [
        "",
        right[:-1],
        right[0],
        right + right[-1],
        right + "a",
        right * 2,
        right[::-1],
        right.upper(),
        " " + right,
        right + " ",
    ]
    return dict.fromkeys([*exact, *besides])


def _judge_steps(word, right, got):
    for text, value in got.items():
        if len(text) != len(right):
            continue
        for i, letter in enumerate(right):
            better = text[:i] + letter + text[i + 1 :]
            if better in got and got[better] < value - CLOSE:
                raise Wrong(
                    f"for {word!r}, {better!r} has one more letter in its place than {text!r}, and gets less: {got[better]:g}"
                    f" after {value:g}"
                )


@exercise(3, "fold it")
def fold(answer, ranks=None):
    """`answer(w_oi, a_ri, b_or, alpha)` is the matrix with its adapter in it."""
    draw = torch.Generator().manual_seed(4)
    for o, i, r, alpha in ((5, 3, 2, 4.0), (4, 4, 4, 2.0), (3, 6, 1, 8.0)):
        w, a, b = (torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((o, i), (r, i), (o, r)))
        before, x = w.clone(), torch.randn(7, i, generator=draw, dtype=torch.float64)
        wanted = x @ w.T + (alpha / r) * (x @ a.T) @ b.T
        given = answer(w, a.clone(), b.clone(), alpha)
        if not torch.equal(w, before):
            raise Wrong("the frozen matrix has changed; return a new one, since others may still use it")
        if not isinstance(given, torch.Tensor) or given.shape != w.shape:
            raise Wrong(f"return a matrix of shape {list(w.shape)}, as w_oi, not {shown(given)}")
        if torch.allclose(x @ given.T, wanted, rtol=0, atol=CLOSE):
            continue
        change = given - w
        wanted_change = (alpha / r) * b @ a
        ratio = (change.norm() / wanted_change.norm()).item()
        along = F.cosine_similarity(change.flatten(), wanted_change.flatten(), dim=0).item()
        if math.isclose(along, 1.0, abs_tol=1e-6):
            raise Wrong(f"the change is {ratio:.4g} times what it should be; its scale is alpha / r = {alpha:g} / {r}")
        raise Wrong("a layer with your matrix says something else than matrix and adapter together: the change is B A")
