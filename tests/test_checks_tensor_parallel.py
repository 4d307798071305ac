"""Each check of lesson 07 accepts right answers in another style and rejects mutants, several from published code."""

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from exercises import AnswersOfRanks
from manyhands.checks import tensor_parallel as checks


class Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, there, back):
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.back(gradient, ctx.group), None, None, None


def pair(there, back):
    return lambda x, group: Pair.apply(x, group, there, back)


def same(x, group):
    return x.view_as(x)


def total(x, group):
    out = x.contiguous().clone()
    dist.all_reduce(out, group=group)
    return out


def mean(x, group):
    return total(x, group) / group.size()


def in_place(x, group):
    with torch.no_grad():
        dist.all_reduce(x, group=group)
    return x.clone()


def whole(x, group, dim=1):
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


def part(x, group):
    return x.chunk(group.size(), 1)[group.rank()].clone()


def part_of_total(x, group):
    pieces = [piece.contiguous() for piece in x.chunk(group.size(), 1)]
    out = torch.empty_like(pieces[0])
    dist.reduce_scatter(out, pieces, group=group)
    return out


def total_then_part(x, group):
    return part(total(x, group), group)


def alone_among_zeros(x, group):
    out = torch.zeros(x.shape[0], x.shape[1] * group.size(), *x.shape[2:], dtype=x.dtype)
    out.chunk(group.size(), 1)[group.rank()].copy_(x)
    return out


F_RIGHT, G_RIGHT = pair(same, total), pair(total, same)
IN_RIGHT, OUT_RIGHT = pair(whole, part_of_total), pair(part_of_total, whole)


def f_by_hook(x, group):  # right: no Function at all
    y = x.view_as(x)
    y.register_hook(lambda gradient: total(gradient, group))
    return y


def g_by_detaching(x, group):  # right: the sum's value, and the gradient of x
    return x + (total(x.detach(), group) - x.detach())


def f_that_is_nothing(x, group):
    return x


# ---- build B ----


def column(x, w, b, enter):
    return F.linear(enter(x), w, b)


def row(x, w, b, leave):
    return leave(F.linear(x, w)) + b


def column_by_matmul(x, w, b, enter):  # right
    y = enter(x) @ w.T
    return y if b is None else y + b


def row_by_matmul(x, w, b, leave):  # right
    return torch.add(b, leave(x.matmul(w.t())))


def column_without_enter(x, w, b, enter):
    return F.linear(x, w, b)


def column_that_gathers(x, w, b, enter):
    return whole(F.linear(enter(x), w, b).detach(), dist.group.WORLD, -1)


def column_with_any_bias(x, w, b, enter):
    return enter(x) @ w.T + b


def column_that_enters_twice(x, w, b, enter):
    return F.linear(enter(enter(x)), w, b)


def column_without_bias(x, w, b, enter):
    return F.linear(enter(x), w)


def row_with_bias_in_terms(x, w, b, leave):
    return leave(F.linear(x, w, b))


def row_with_a_share_of_the_bias(x, w, b, leave):
    return leave(F.linear(x, w, b / dist.get_world_size()))


def row_that_stays(x, w, b, leave):
    return F.linear(x, w, b)


def row_without_bias(x, w, b, leave):
    return leave(F.linear(x, w))


# ---- build D ----


def _set(parameters, row_P):
    for p, piece in zip(parameters, row_P.split([p.numel() for p in parameters]), strict=True):
        p.grad = piece.view(p.shape)


def _row(parameters):
    return torch.cat([p.grad.reshape(-1) for p in parameters])


def adds_up_in_place(parameters, group):  # right
    flat = torch._utils._flatten_dense_tensors([p.grad for p in parameters])
    dist.all_reduce(flat, group=group)
    for p, sums in zip(
        parameters, torch._utils._unflatten_dense_tensors(flat, [p.grad for p in parameters]), strict=True
    ):
        p.grad.copy_(sums)


def averages(parameters, group):
    _set(parameters, mean(_row(parameters), group))


def a_call_for_each(parameters, group):
    for p in parameters:
        dist.all_reduce(p.grad, group=group)


def forgets_to_write_back(parameters, group):
    total(_row(parameters), group)


def adds_up_weights(parameters, group):
    for p in parameters:
        p.data = total(p.data, group)


def adds_up_in_float32(parameters, group):
    _set(parameters, total(_row(parameters).float(), group).double())


def gathers_all(parameters, group):
    _set(parameters, whole(_row(parameters)[None, None], group).sum((0, 1)))


# ---- exercise 1 ----


def _loss(there=total, back=same, largest=True, cut=True, reduction=torch.mean, together=False):
    """The right answer but for one part."""

    def answer(logits, targets, first, group):
        move = pair(there, back)
        top = logits.detach().max(1).values
        if largest:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        else:
            top = torch.zeros_like(top)
        shifted = logits - top[:, None]
        hits = (
            F.one_hot((targets - first).clamp(-1, logits.shape[1]) + 1, logits.shape[1] + 2)[:, 1:-1] if cut else None
        )
        sums, picked = shifted.exp().sum(1), (shifted * hits).sum(1)
        if together:
            sums, picked = move(torch.stack([sums, picked]), group).unbind()
        else:
            sums, picked = move(sums, group), move(picked, group)
        return reduction(sums.log() - picked)

    return answer


def gathers_logits(logits, targets, first, group):
    V = 5 * group.size() - 1
    padded = F.pad(logits, (0, 5 - logits.shape[1]))
    full = pair(lambda x, group: whole(x, group), lambda v, group: part(v, group))(padded, group)
    return F.cross_entropy(full[:, :V], targets)


def only_its_own(logits, targets, first, group):
    return F.cross_entropy(logits, (targets - first).clamp(0, logits.shape[1] - 1))


def as_a_number(logits, targets, first, group):
    return _loss()(logits, targets, first, group).item()


def changes_the_logits(logits, targets, first, group):
    logits.data -= logits.data.max()
    return _loss()(logits, targets, first, group)


# ---- exercise 2 ----


def _agrees(v=None, gradients=True, everywhere=True, limit=1e-10):
    def answer(parallel, single, x, group):
        found = []
        for function in (parallel, single):
            leaf = x.detach().clone().requires_grad_()
            y = function(leaf)
            draw = torch.Generator().manual_seed(5)
            weights = torch.randn(y.shape, generator=draw, dtype=y.dtype) if v is None else v(y)
            y.backward(weights)
            found.append([y.detach(), leaf.grad] if gradients else [y.detach()])
        apart = max((a - b).abs().max() for a, b in zip(*found, strict=True))
        if everywhere:
            dist.all_reduce(apart, op=dist.ReduceOp.MAX, group=group)
        return bool(apart <= limit)

    return answer


def by_objects(parallel, single, x, group):  # right
    v = torch.sin(torch.arange(x.numel(), dtype=x.dtype)).view_as(x)
    a, b = (torch.autograd.functional.vjp(function, x.detach(), v) for function in (parallel, single))
    mine = all(torch.allclose(p, q, rtol=0, atol=1e-10) for p, q in zip(a, b, strict=True))
    everyone = [None] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    return np.bool_(all(everyone))


def fills_the_gradient(parallel, single, x, group):
    parallel(x).sum().backward()
    return True


# ---- exercise 3 ----


def _heads(refuse=True, keys=None, queries=None, names=True, error=ValueError):
    def answer(heads, kv, t, rank):
        if refuse and (heads % t or (kv % t and t % kv)):
            raise error(f"{heads} heads, {kv} KV heads, {t} ranks do not fit" if names else "does not fit")
        mine = list(range(rank * heads // t, (rank + 1) * heads // t))
        if queries:
            mine = queries(heads, t, rank)
        return mine, keys(heads, kv, t, rank) if keys else sorted({q * kv // heads for q in mine})

    return answer


def as_arrays(heads, kv, t, rank):  # right
    queries, keys = _heads()(heads, kv, t, rank)
    return np.array(queries), tuple(keys)


REJECTED = {
    "f_and_g": {
        "f does nothing": ((f_that_is_nothing, G_RIGHT),
            "that is this rank's partial sum; the other ranks have used x as"),
        "f averages": ((pair(same, mean), G_RIGHT), "that is the mean of the partial sums; a gradient of several"),
        "f sums forward too": ((pair(total, total), G_RIGHT),
            "x is the same on all of them, nothing is to be added up"),
        "g sums backward too": ((F_RIGHT, pair(total, total)),
            "all ranks have the same loss, so it was counted 3 times"),
        "g does nothing": ((F_RIGHT, pair(same, same)), "that is this rank's partial sum alone; g adds them up"),
        "g averages": ((F_RIGHT, pair(mean, same)), "that is the mean; g adds the partial sums up"),
        "the other way round": ((G_RIGHT, F_RIGHT), "that is the sum over the ranks; x is the same on all of them,"),
        "g in place": ((F_RIGHT, pair(in_place, same)), "the x that g was given was changed; leave it as it is"),
        "g without a gradient": ((F_RIGHT, lambda x, group: total(x.detach(), group)), "backward does not arrive at x"),
        "f gathers": (
            (pair(same, lambda v, group: whole(v[None], group, 0).sum(0)), G_RIGHT),
            "is right, but 288 bytes were communicated in 1 call of all_gather",
        ),
    },
    "linears": {
        "no enter": ((column_without_enter, row), "`enter` was called 0 times where x enters once"),
        "enters twice": ((column_that_enters_twice, row), "`enter` was called 2 times"),
        "gathers outputs": ((column_that_gathers, row), "should have the shape [2, 3, 2], not [2, 3, 6]"),
        "no bias is no bias": ((column_with_any_bias, row), "your code raised TypeError"),
        "column without bias": ((column_without_bias, row), "that is without the bias"),
        "bias in each term": ((column, row_with_bias_in_terms),
            "each rank added it to its part; add it once, after the sum"),
        "a share of the bias": ((column, row_with_a_share_of_the_bias),
            "the bias was divided by n; add it once, whole"),
        "no leave": ((column, row_that_stays), "let the product pass through `leave`"),
        "row without bias": ((column, row_without_bias), "that is without the bias"),
    },
    "gathered_and_scattered": {
        "takes its part": ((pair(whole, part), OUT_RIGHT), "what this rank alone found for its positions"),
        "averages": (
            (pair(whole, lambda v, group: part_of_total(v, group) / group.size()), OUT_RIGHT),
            "that is the mean of the partial sums; they are added up",
        ),
        "all-reduces and cuts": (
            (pair(whole, total_then_part), OUT_RIGHT),
            "gathered passes on is right, but 1,152 bytes were communicated",
        ),
        "sequences, not positions": (
            (pair(lambda x, group: whole(x, group, 0), part_of_total), OUT_RIGHT),
            "those are the ranks' parts along another dim; positions are dim",
        ),
        "zeros elsewhere": ((IN_RIGHT, pair(part_of_total, alone_among_zeros)), "zero at the other ranks' positions"),
        "its own term": ((IN_RIGHT, pair(part, whole)), "those are its positions of this rank's own partial sum; the"),
        "sums all to keep a part": ((IN_RIGHT, pair(total_then_part, whole)),
            "Forward, what scattered returns is right, but 1,152 bytes were"),
        "swapped": ((OUT_RIGHT, IN_RIGHT), "what gathered returns should have the shape [2, 9, 4]"),
    },
    "add_up": {
        "averages": (averages, "that is the mean; these are partial sums, there is nothing to"),
        "a call for each": (a_call_for_each, "one all_reduce for all of them does"),
        "forgets to write back": (forgets_to_write_back,
            "that is this rank's partial sum; write the sum back into p.grad"),
        "adds up weights": (adds_up_weights, "add up p.grad, and leave the update to the optimizer"),
        "in float32": (adds_up_in_float32, "which is float32's accuracy"),
        "gathers all": (gathers_all, "one all_reduce for all of them does"),
    },
    "split_loss": {
        "no largest": (_loss(largest=False), "subtract the largest logit of all ranks before you take exp"),
        "sums over tokens": (_loss(reduction=torch.sum), "that is the sum over the tokens"),
        "sums backward too": (_loss(back=total), "use g for the sums, whose backward is no sum"),
        "averages": (_loss(there=mean), "The loss should be 2.933, not 0.751"),
        "gathers logits": (gathers_logits, "largest, sum, target's logit"),
        "only its own": (only_its_own, "the loss should be"),
        "a number": (as_a_number, "the loss is right, but has no backward"),
        "changes the logits": (changes_the_logits, "logits_Nv was changed; leave it as it is"),
    },
    "agree": {
        "output only": (_agrees(gradients=False), "you said True: its gradient is twice what it should be"),
        "ones": (_agrees(v=torch.ones_like), "which v of ones would not show"),
        "this rank only": (_agrees(everywhere=False), "on rank 2 only, so all ranks must say False"),
        "each rank its v": (_agrees(v=lambda y: torch.randn_like(y) * (1 + dist.get_rank())),
            "a right function was said to be wrong"),
        "loose": (_agrees(limit=1e-5), "its outputs are off by 1e-6"),
        "looser": (_agrees(limit=1e-6), "its gradient is off by 1e-7"),
        "fills the gradient": (fills_the_gradient, "x.grad was filled"),
        "always": (lambda *_: True, "you said True"),
        "never": (lambda *_: False, "a right function was said to be wrong"),
        "a text": (lambda *_: "yes", "return True or False, not the text 'yes'"),
    },
    "my_heads": {
        "no copies": (
            _heads(keys=lambda h, kv, t, r: list(range(r * (kv // t), (r + 1) * (kv // t)))),
            "its queries use, should be [0], not []",
        ),
        "all of them": (_heads(keys=lambda h, kv, t, r: list(range(kv))),
            "its queries use, should be [0, 1], not [0, 1, 2, 3, 4, 5, 6, 7]"),
        "round robin": (_heads(queries=lambda h, t, r: list(range(r, h, t))), "of rank 0 should be [0, 1], not [0, 4]"),
        "refuses nothing": (_heads(refuse=False), "raise a ValueError that names 8 and 3, and do not return the"),
        "no numbers": (_heads(names=False), "raise a ValueError that names 8 and 3; yours says does not fit"),
        "another error": (_heads(error=AssertionError), "yours was AssertionError"),
    },
}  # fmt: skip
RIGHT = {
    "f_and_g": [(F_RIGHT, G_RIGHT), (f_by_hook, g_by_detaching)],
    "linears": [(column, row), (column_by_matmul, row_by_matmul)],
    "gathered_and_scattered": [(IN_RIGHT, OUT_RIGHT)],
    "add_up": [adds_up_in_place],
    "split_loss": [_loss(), _loss(together=True)],
    "agree": [_agrees(), by_objects],
    "my_heads": [_heads(), as_arrays],
}


class TestAnswers(AnswersOfRanks):
    lesson, checks, rejected, right = "07_tensor_parallel", checks, REJECTED, RIGHT
    around = ("Move", "all_reduced", "all_gathered", "reduce_scattered", "own_part")
    solutions = {
        "f_and_g": ("f", "g"),
        "linears": ("column_linear", "row_linear"),
        "gathered_and_scattered": ("gathered", "scattered"),
    }
