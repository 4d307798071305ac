"""Checks of lesson 07: f and g, split linears, positions, unfinished gradients, the loss of split logits, heads.

All tensors are float64 on the CPU, where the trial group can send. Each rank's inputs are drawn from seeds that contain
the rank, so that every rank can compute the right answer without communicating. Answers get the trial's group.
"""

import re
from itertools import product
from unittest.mock import Mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from manyhands.checks import Wrong, exercise
from manyhands.checks.drawn import generator, luck, normal, sizes
from manyhands.checks.expect import (
    count,
    expect_equal,
    expect_number,
    expect_refusal,
    expect_scalar,
    expect_tensor,
    expect_traffic,
    expect_unchanged,
    truth,
)
from manyhands.checks.trial import groups_of
from manyhands.checks.witness import shown
from manyhands.measure import wire


class Move(torch.autograd.Function):
    """Apply `forward(x)` in forward and `backward(gradient)` in backward; None is the identity."""

    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return x.view_as(x) if there is None else there(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient if ctx.back is None else ctx.back(gradient), None, None


def of(group):
    """Return a function that sums over the ranks of a group (None: all) into a new tensor."""

    def summed(x):
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    return summed


class Pass:
    """Run `function` forward on x and backward from v; keep the gradients of x and `others`, and the calls made.

    Raise Wrong if it returns no tensor, changes x or v, or if backward does not reach x. Backward runs with a
    contiguous gradient and with one that is not.
    """

    def __init__(self, name, function, x, v, *others):
        self.name, leaf = name, x.clone().requires_grad_()
        with wire.watch() as self.there:
            result = function(leaf)
        if not isinstance(result, torch.Tensor):
            raise Wrong(f"{name} should return a tensor, not {shown(result)}")
        self.result, self.gradients = result.detach(), []
        if result.shape != v.shape:
            return
        if not result.requires_grad:
            raise Wrong(f"backward does not arrive at x: what {name} returned has no gradient; use Move.apply")
        for sent in (v.clone(), v.transpose(0, 1).contiguous().transpose(0, 1)):
            try:
                with wire.watch() as self.back:
                    found = torch.autograd.grad(result, (leaf, *others), sent, retain_graph=True, allow_unused=True)
            except RuntimeError as error:  # by Move; torch's own sentence names Move's inner class
                if not (given := re.search(r"invalid gradient at index 0 - got (\[.*?\])", str(error))):
                    raise
                what = f"backward, the gradient that {name} passes on"
                raise Wrong(f"{what} should have the shape of x, {list(x.shape)}, not {given[1]}") from None
            self.gradients.append(found)
            expect_unchanged(sent, v, f"the gradient that arrived at {name}", ": work in a new tensor")

    def expect_forward(self, wanted, it_is, slips=None, volume=0, calls=1):
        """Judge forward; volume: bytes of the permitted `calls`, all-reduces counted twice, 0 for none."""
        what = f"forward, what {self.name} returns"
        expect_tensor(self.result, wanted, what, slips, it_is)
        expect_traffic(self.there, f"{what} is right", calls=calls * (volume > 0), volume=volume)

    def expect_backward(self, wanted, it_is, slips=None, volume=0, calls=1):
        what = f"backward, the gradient that {self.name} passes on"
        for found, *_ in self.gradients:
            expect_tensor(found, wanted, what, slips, it_is)
        expect_traffic(self.back, f"{what} is right", calls=calls * (volume > 0), volume=volume)


@exercise("A", "f and g")
def f_and_g(answers, ranks):
    """`answers` are f(x, group) and g(x, group): identity and all-reduce, each the other's backward.

    An all-reduce may be a reduce-scatter and an all-gather: the same bytes in two calls.
    """
    f, g = answers
    for group, members, where in groups_of(ranks):
        n, me, shape = len(members), group.rank(), (len(members), *sizes(1, 2, 2, 6))
        x, uses = normal(1, *shape), [normal(10 + r, *shape) for r in members]
        seen = Pass(f"{where}f", lambda x, group=group: f(x, group), x, uses[me])
        slips = {"that is the sum over the ranks; x is the same on all of them, so nothing is to be summed": n * x}
        seen.expect_forward(x, "x itself", slips)
        slips = {
            "that is this rank's partial sum; the other ranks have used x as well, so add up": uses[me],
            "that is the mean of the partial sums; a gradient of several uses is their sum": sum(uses) / n,
        }
        seen.expect_backward(sum(uses), "the sum over the ranks", slips, volume=2 * x.nbytes, calls=2)

        parts, use = [normal(20 + r, *shape) for r in members], normal(2, *shape)
        seen = Pass(f"{where}g", lambda x, group=group: g(x, group), parts[me], use)
        slips = {
            "that is this rank's partial sum alone; g adds them up": parts[me],
            "that is the mean; g sums the partial sums": sum(parts) / n,
        }
        seen.expect_forward(sum(parts), "the sum of the ranks' partial sums", slips, volume=2 * x.nbytes, calls=2)
        slips = {f"that is {n} times as much: all ranks have the same loss, so it was counted {n} times": n * use}
        seen.expect_backward(use, "what arrived", slips)


@exercise("B", "two linear layers")
def linears(answers, ranks):
    """`answers` are column_linear(x, w, b, enter) and row_linear(x, w, b, leave), of which each rank has a share."""
    column, row = answers
    n, rank = ranks.world_size, ranks.rank
    B, T, D = sizes(3, 3, 2, 7)
    M = n * luck(3).randint(2, 4)
    x, w_in, b_in = normal(3, B, T, D), normal(4, M, D), normal(5, M)
    for bias in (None, b_in):
        _judge_column(column, x, w_in, bias, n, rank)
    _judge_row(row, x, normal(6, D, M), normal(7, D), n, rank)


def _judge_column(column, x, w, b, n, rank):
    case = "column_linear" if b is not None else "column_linear without a bias"
    w_share, b_share = w.chunk(n)[rank], None if b is None else b.chunk(n)[rank]
    uses = [normal(100 + r, *x.shape[:2], len(w) // n) for r in range(n)]
    enter = Mock(side_effect=lambda x: Move.apply(x, None, of(None)))
    seen = Pass(case, lambda x: column(x, w_share.clone(), b_share, enter), x, uses[rank])
    slips = {"that is without the bias": None if b is None else F.linear(x, w_share)}
    seen.expect_forward(F.linear(x, w_share, b_share), "this rank's outputs [B, T, m]", slips)
    if enter.call_count != 1:
        raise Wrong(f"{case}: `enter` was called {count(enter.call_count, 'time')} where x enters once")
    partial = [F.linear(use, part.T) for use, part in zip(uses, w.chunk(n), strict=True)]
    slips = {
        "that is this rank's partial sum: let x pass through `enter` before the product": partial[rank],
        "that is with `enter` after the product; x itself is what enters": F.linear(sum(uses), w_share.T),
    }
    seen.expect_backward(sum(partial), "the sum over the ranks", slips, volume=2 * x.nbytes)


def _judge_row(row, x, w, b, n, rank):
    hidden = [normal(110 + r, *x.shape[:2], w.shape[1] // n) for r in range(n)]
    w_share, use, bias = w.chunk(n, 1)[rank].contiguous(), normal(8, *x.shape), b.clone().requires_grad_()
    leave = Mock(side_effect=lambda x: Move.apply(x, of(None), None))
    seen = Pass("row_linear", lambda x: row(x, w_share.clone(), bias, leave), hidden[rank], use, bias)
    product = F.linear(torch.cat(hidden, -1), w)
    slips = {
        f"that is with the bias {n} times: each rank added it to its part; add it once, after the sum": product + n * b,
        "that is without the bias": product,
        "that is this rank's partial sum: let the product pass through `leave`": F.linear(hidden[rank], w_share) + b,
        "that is with `leave` before the product; its partial sums are what leaves": F.linear(sum(hidden), w_share) + b,
    }
    seen.expect_forward(product + b, "all outputs [B, T, D]", slips, volume=2 * use.nbytes)
    if leave.call_count != 1:
        raise Wrong(f"row_linear: `leave` was called {count(leave.call_count, 'time')}; the partial sums leave once")
    seen.expect_backward(F.linear(use, w_share.T), "this rank's part")
    found, total = seen.gradients[0][1], use.sum((0, 1))
    slips = {"the bias was divided by n; add it whole": total / n}
    expect_tensor(found, total, "backward, row_linear, the gradient of the bias", slips, "the sum over tokens")


@exercise("C", "into the columns, and out of the rows")
def gathered_and_scattered(answers, ranks):
    """`answers` are gathered(x_BsD, group) and scattered(x_BTD, group): all-gather and reduce-scatter along dim 1."""
    gathered, scattered = answers
    B, s, D = sizes(4, 3, 2, 7)
    for group, members, where in groups_of(ranks):
        n, me = len(members), group.rank()
        mine = slice(s * me, s * me + s)
        parts, uses = ([normal(one + r, B, T, D) for r in members] for one, T in ((30, s), (40, s * n)))
        seen = Pass(f"{where}gathered", lambda x, group=group: gathered(x, group), parts[me], uses[me])
        slips = {
            "those are the ranks' parts along another dim; positions are dim 1": torch.cat(parts, dim=0),
            "those are the right positions in another order; rank 0's come first": torch.stack(parts, 2).flatten(1, 2),
        }
        volume = uses[0].nbytes
        seen.expect_forward(torch.cat(parts, dim=1), "all positions", slips, volume)
        slips = {
            "that is what this rank alone found for its positions; the others have used them, too": uses[me][:, mine],
            "that is the mean of the partial sums; sum them": sum(uses)[:, mine] / n,
        }
        seen.expect_backward(sum(uses)[:, mine], "the sum over the ranks", slips, volume)

        parts, uses = ([normal(one + r, B, T, D) for r in members] for one, T in ((50, s * n), (60, s)))
        seen = Pass(f"{where}scattered", lambda x, group=group: scattered(x, group), parts[me], uses[me])
        own, total = parts[me][:, mine], sum(parts)[:, mine]
        slips = {
            "those are its positions of this rank's own partial sum; the other ranks' belong to the sum": own,
            "that is the mean of the partial sums; sum them": total / n,
        }
        seen.expect_forward(total, "this rank's positions of the sum", slips, volume)
        alone = torch.zeros_like(parts[0])
        alone[:, mine] = uses[me]
        slips = {"that is zero at the other ranks' positions; each rank needs the gradients of all": alone}
        seen.expect_backward(torch.cat(uses, dim=1), "that of all positions", slips, volume)


@exercise("D", "finish the norms' gradients")
def add_up(answer, ranks):
    """`answer(parameters, group)` leaves in each gradient its sum over the group, for one all-reduce."""
    a, b, c = sizes(5, 3, 2, 9)
    shapes = [(a,), (a,), (b, c), (c,), (1,)]
    for group, members, where in groups_of(ranks):
        gradients = [[normal(70 + 10 * r + i, *shape) for i, shape in enumerate(shapes)] for r in members]
        parameters = [torch.nn.Parameter(normal(7 + i, *shape)) for i, shape in enumerate(shapes)]
        own, n = gradients[group.rank()], len(members)
        for p, gradient in zip(parameters, own, strict=True):
            p.grad = gradient.clone()
        with wire.watch() as seen:
            answer(parameters, group)
        for i, p in enumerate(parameters):
            total = sum(of_rank[i] for of_rank in gradients)
            slips = {
                "that is this rank's partial sum; write the sum back into p.grad": own[i],
                "that is the mean; these are partial sums, there is nothing to divide": total / n,
                "that is the sum and this rank's partial sum once more; replace p.grad": total + own[i],
            }
            expect_tensor(p.grad, total, f"{where}p.grad of parameter {i}", slips, "the sum over the ranks")
        volume = 2 * sum(p.nbytes for p in parameters)
        expect_traffic(seen, "all gradients are right", "one all_reduce for all of them does", calls=1, volume=volume)


@exercise(1, "the loss of split logits")
def split_loss(answer, ranks):
    """`answer(logits_Nv, targets_N, first, group)` is the mean cross-entropy, for three all-reduces of N numbers."""
    each, N = sizes(6, 2, 3, 8)
    for group, members, where in groups_of(ranks):
        _judge_split_loss(answer, 1.0, where, each, N, group, members)
        large = f"{where}for logits as large as 400 "  # exp(710) overflows float64
        _judge_split_loss(answer, 400.0, large, each, N, group, members)


class _NoBackward(TorchDispatchMode):
    """Raise Wrong at a call of torch.distributed on a tensor with a graph: autograd does not know of the call."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        tensors = (leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
        if operator.namespace == "c10d" and any(tensor.requires_grad for tensor in tensors):
            raise Wrong("torch's all_reduce has no backward: use g for the sums, and detach the largest logits")
        return operator(*args, **(kwargs or {}))


def _judge_split_loss(answer, scale, case, each, N, group, members):
    what = f"{case}the loss"
    n, me, V = len(members), group.rank(), each * len(members) - 1  # the last rank has one token fewer
    logits = (scale * normal(80 + members[0], N, V)).requires_grad_()
    targets = torch.randint(V, (N,), generator=generator(81 + members[0]))
    targets[0], targets[1] = 0, V - 1
    expected = F.cross_entropy(logits, targets)
    (slopes,) = torch.autograd.grad(expected, logits)
    mine = logits.detach().split(each, 1)[me].clone().requires_grad_()
    with _NoBackward(), wire.watch() as there:
        loss = answer(mine, targets, each * me, group)
    expect_scalar(loss, what, ": subtract the largest logit of all ranks before you take exp")
    hit, own = logits.detach().gather(1, targets[:, None])[:, 0], mine.detach().logsumexp(-1)
    slips = {
        "that is the sum over the tokens; the mean is asked for": N * expected.item(),
        "that is with this rank's columns alone in the sum of exp: add it up with g": (own - hit).mean().item(),
        "that is its negative": -expected.item(),
    }
    expect_number(loss.detach(), expected.item(), what, slips=slips, rel=1e-7)
    with wire.watch() as back:
        (gradient,) = torch.autograd.grad(loss, mine, allow_unused=True)
    share, hits = slopes.split(each, 1)[me], F.one_hot(targets, V).double().split(each, 1)[me] / N
    slips = {
        f"that is {n} times as much: use g for the sums, whose backward is no sum": n * share,
        "that is softmax alone: the target's logit has a gradient as well": share + hits,
        "that is of the target's logit alone: the sum of exp has a gradient as well": -hits,
    }
    it_is = "softmax minus one at the target, divided by N"
    expect_tensor(gradient, share, f"{case}the gradient of this rank's logits", slips, it_is, close=1e-7)
    cure = f"three all-reduces of {N} numbers are: largest, sum, target's logit"
    expect_traffic(there, f"{what} is right", cure, calls=3, payload=3 * 8 * N)
    expect_traffic(back, "the gradient is right", "backward needs no call", calls=0)


@exercise(2, "a test that a wrong backward does not pass")
def agree(answer, ranks):
    """`answer(parallel, single, x, group)` is True on every rank only if outputs and products agree on all of them."""
    shape = sizes(7, 2, 3, 7)
    for group, members, where in groups_of(ranks):
        torch.manual_seed(1000 + ranks.rank)  # the ranks' generators differ, as in real runs
        for fault, parallel in _suspects(group, members, shape):
            x, old = normal(90, *shape).requires_grad_(), normal(91, *shape)
            x.grad = old.clone()
            given = answer(parallel, lambda x: torch.tanh(x) * 3, x, group)
            if x.grad is None or not torch.equal(x.grad, old):
                raise Wrong("x.grad was changed; work on a copy of x, or use torch.autograd.grad")
            if not x.requires_grad:
                raise Wrong("x does not require a gradient any more; leave it as you found it")
            verdict = truth(given)
            if fault and verdict:
                raise Wrong(f"{where}this one is wrong, and you said True: {fault}")
            if not fault and not verdict:
                asked = "is v the same on all ranks, and the limit 1e-10?"
                raise Wrong(f"{where}a right function was called wrong: {asked}")


def _suspects(group, members, shape):
    """Return [(fault or "", function)]; the single-process function is 3 tanh(x)."""

    def off(change):
        return lambda x: torch.tanh(Move.apply(x, None, change)) * 3

    me, last, weights = group.rank(), group.rank() == len(members) - 1, [normal(92 + r, *shape).exp() for r in members]
    share, seesaw = weights[me] / sum(weights), torch.zeros(*shape, dtype=torch.float64)
    seesaw[0, 0], seesaw[0, 1] = 1e-3, -1e-3
    apart = 1e-3 * ((me == 0) - last)  # on the first rank in one direction, on the last in the other
    only, opposite = f"on rank {members[-1]} only, so all ranks must say False", f"on ranks {members[0]}, {members[-1]}"
    means = "its backward replaces the gradient by the columns' means, which v of ones would not show"
    return [
        ("", off(lambda v: v)),
        ("", lambda x: Move.apply(share * torch.tanh(Move.apply(x, None, of(group))) * 3, of(group), None)),
        ("its outputs are off by 1e-6", lambda x: torch.tanh(x) * 3 + 1e-6),
        ("its gradient is twice what it should be", off(lambda v: 2 * v)),
        (means, lambda x: Move.apply(torch.tanh(x) * 3, None, lambda v: v.mean(0, keepdim=True).expand(v.shape))),
        ("its gradient is off by 1e-7", off(lambda v: v + 1e-7)),
        ("its outputs are off by 0.001 and -0.001 in two places", lambda x: torch.tanh(x) * 3 + seesaw),
        ("its gradient is off by 0.001 and -0.001 in two places", off(lambda v: v + seesaw)),
        (f"its gradient is wrong {only}", off(lambda v: -v if last else v)),
        (f"its output is wrong {only}", lambda x: torch.tanh(x) * 3 + last),
        (f"its output is off by 0.001 and -0.001 {opposite}" * (len(members) > 1), lambda x: torch.tanh(x) * 3 + apart),
        (f"its gradient is off by 0.001 and -0.001 {opposite}" * (len(members) > 1), off(lambda v: v + apart)),
    ]


@exercise(3, "fewer key heads than ranks")
def my_heads(answer, ranks=None):
    """`answer(num_heads, num_kv_heads, t, rank)` is (query heads, KV heads), or ValueError with the numbers."""
    cases = [(8, 8, 4), (8, 4, 4), (8, 2, 4), (8, 1, 4), (32, 8, 16), (12, 4, 2), (6, 6, 1)]
    cases += [(per * kv, kv, t) for per, kv, t in product(range(1, 5), range(1, 7), range(1, 9))]
    for heads, kv, t in cases:
        case = f"{heads} query heads, {kv} KV heads and {t} ranks"
        for rank in range(t):
            if heads % t or (kv % t and t % kv):
                _judge_refusal(answer, heads, kv, t, rank)
                continue
            try:
                queries, keys = answer(heads, kv, t, rank)
            except ValueError as error:
                raise Wrong(f"{case} are fine: do not raise ValueError ({str(error)[:60]})") from None
            wanted = list(range(rank * heads // t, (rank + 1) * heads // t))
            expect_equal(queries, wanted, f"for {case} the query heads of rank {rank}")
            needed = sorted({query * kv // heads for query in wanted})
            slips = {"each of them once": [query * kv // heads for query in wanted]}
            what = f"for {case} the KV heads of rank {rank}, those that its queries use,"
            expect_equal(keys, needed, what, slips)


def _judge_refusal(answer, heads, kv, t, rank):
    named, why = ((kv, t), f"neither of {kv} and {t} divides the other")
    if heads % t:
        named, why = ((heads, kv) if kv % t and t % kv else heads, t), f"{t} does not divide {heads} heads"
    expect_refusal(lambda: answer(heads, kv, t, rank), f"{heads} heads, {kv} KV heads, {t} ranks: {why}", *named)
