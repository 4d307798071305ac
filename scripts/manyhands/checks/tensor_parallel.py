"""Checks of lesson 07: f and g, split linears, positions, unfinished gradients, the loss of split logits, heads.

All is in float64 and in the CPU's memory, where the trial group can send. What each rank is given follows from seeds
that say the rank, so that every rank knows the right answer without communicating. Answers get the trial's group.
"""

from unittest.mock import Mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

from manyhands.checks import Wrong, exercise
from manyhands.checks.drawn import normal
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
from manyhands.checks.witness import shown
from manyhands.measure import wire


class Move(torch.autograd.Function):
    """`forward(x)` there and `backward(gradient)` on the way back; None leaves it as it is."""

    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return x.view_as(x) if there is None else there(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient if ctx.back is None else ctx.back(gradient), None, None


def summed(x):
    """The sum over the ranks, in a new tensor."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


class Pass:
    """`function` forward on x and backward from v: what came back of x and of `others`, and which calls it took.

    Raises Wrong where no tensor comes back, x or v is changed, or backward does not arrive at x.
    """

    def __init__(self, name, function, x, v, *others):
        self.name, leaf = name, x.clone().requires_grad_()
        with wire.watch() as self.there:
            result = function(leaf)
        if not isinstance(result, torch.Tensor):
            raise Wrong(f"{name} should return a tensor, not {shown(result)}")
        expect_unchanged(leaf.detach(), x, f"the x that {name} was given", ": work in a new tensor")
        self.result, self.gradient, self.others = result.detach(), None, ()
        if result.shape != v.shape:
            return
        if not result.requires_grad:
            raise Wrong(f"backward does not arrive at x: what {name} returned has no gradient; use Move.apply")
        # neither contiguous nor the caller's own: as gradients are
        sent = v.transpose(0, 1).contiguous().transpose(0, 1)
        with wire.watch() as self.back:
            self.gradient, *self.others = torch.autograd.grad(result, (leaf, *others), sent, allow_unused=True)
        expect_unchanged(sent, v, f"the gradient that arrived at {name}", ": work in a new tensor")

    def expect_forward(self, wanted, it_is, slips=None, volume=0):
        """volume: bytes of the one call that it may make, twice if that is an all-reduce; 0 for none."""
        self._expect(self.result, wanted, it_is, slips, volume, self.there, f"forward, what {self.name} returns")

    def expect_backward(self, wanted, it_is, slips=None, volume=0):
        what = f"backward, the gradient that {self.name} passes on"
        self._expect(self.gradient, wanted, it_is, slips, volume, self.back, what)

    def _expect(self, found, wanted, it_is, slips, volume, seen, what):
        expect_tensor(found, wanted, what, slips, it_is)
        expect_traffic(seen, f"{what} is right", calls=int(volume > 0), volume=volume)


@exercise("A", "f and g")
def f_and_g(answers, ranks):
    """`answers` are f(x, group) and g(x, group): identity and all-reduce, each the other's backward."""
    f, g = answers
    n, rank, group = ranks.world_size, ranks.rank, dist.group.WORLD
    x, uses = normal(1, 3, 4), [normal(10 + r, 3, 4) for r in range(n)]
    seen = Pass("f", lambda x: f(x, group), x, uses[rank])
    slips = {"that is the sum over the ranks; x is the same on all of them, nothing is to be added up": n * x}
    seen.expect_forward(x, "x itself", slips)
    slips = {
        "that is this rank's partial sum; the other ranks have used x as well, so add up": uses[rank],
        "that is the mean of the partial sums; a gradient of several uses is their sum": sum(uses) / n,
    }
    seen.expect_backward(sum(uses), "the sum over the ranks", slips, volume=2 * x.nbytes)

    parts, use = [normal(20 + r, 3, 4) for r in range(n)], normal(2, 3, 4)
    seen = Pass("g", lambda x: g(x, group), parts[rank], use)
    slips = {
        "that is this rank's partial sum alone; g adds them up": parts[rank],
        "that is the mean; g adds the partial sums up": sum(parts) / n,
    }
    seen.expect_forward(sum(parts), "the sum of the ranks' partial sums", slips, volume=2 * x.nbytes)
    slips = {f"that is {n} times as much: all ranks have the same loss, so it was counted {n} times": n * use}
    seen.expect_backward(use, "what arrived", slips)


@exercise("B", "two linear layers")
def linears(answers, ranks):
    """`answers` are column_linear(x, w, b, enter) and row_linear(x, w, b, leave), of which each rank has a share."""
    column, row = answers
    n, rank = ranks.world_size, ranks.rank
    M = 2 * n  # two hidden units per rank, of a full MLP with B = 2, T = 3, D = 5
    x, w_in, b_in, w_out, b_out = normal(3, 2, 3, 5), normal(4, M, 5), normal(5, M), normal(6, 5, M), normal(7, 5)
    for bias in (None, b_in):
        _judge_column(column, x, w_in, bias, n, rank)
    _judge_row(row, w_out, b_out, n, rank)


def _judge_column(column, x, w, b, n, rank):
    case = "column_linear" if b is not None else "column_linear without a bias"
    w_share, b_share = w.chunk(n)[rank], None if b is None else b.chunk(n)[rank]
    uses = [normal(100 + r, 2, 3, len(w) // n) for r in range(n)]
    enter = Mock(side_effect=lambda x: Move.apply(x, None, summed))
    seen = Pass(case, lambda x: column(x, w_share.clone(), b_share, enter), x, uses[rank])
    slips = {"that is without the bias": None if b is None else F.linear(x, w_share)}
    seen.expect_forward(F.linear(x, w_share, b_share), "this rank's outputs [B, T, m]", slips)
    if enter.call_count != 1:
        raise Wrong(f"{case}: `enter` was called {count(enter.call_count, 'time')} where x enters once")
    partial = [F.linear(use, part.T) for use, part in zip(uses, w.chunk(n), strict=True)]
    slips = {"that is this rank's partial sum: let x pass through `enter` before the product": partial[rank]}
    seen.expect_backward(sum(partial), "the sum over the ranks", slips, volume=2 * x.nbytes)


def _judge_row(row, w, b, n, rank):
    hidden = [normal(110 + r, 2, 3, w.shape[1] // n) for r in range(n)]
    w_share, use, bias = w.chunk(n, 1)[rank].contiguous(), normal(8, 2, 3, 5), b.clone().requires_grad_()
    leave = Mock(side_effect=lambda x: Move.apply(x, summed, None))
    seen = Pass("row_linear", lambda x: row(x, w_share.clone(), bias, leave), hidden[rank], use, bias)
    product = F.linear(torch.cat(hidden, -1), w)
    slips = {
        f"that is with the bias {n} times: each rank added it to its part; add it once, after the sum": product + n * b,
        "that is without the bias": product,
        "that is this rank's partial sum: let the product pass through `leave`": F.linear(hidden[rank], w_share) + b,
    }
    seen.expect_forward(product + b, "all outputs [B, T, D]", slips, volume=2 * use.nbytes)
    if leave.call_count != 1:
        raise Wrong(f"row_linear: `leave` was called {count(leave.call_count, 'time')}; the partial sums leave once")
    seen.expect_backward(F.linear(use, w_share.T), "this rank's part")
    total, slip = use.sum((0, 1)), "the bias was divided by n; add it once, whole"
    what = "backward, row_linear, the gradient of the bias"
    expect_tensor(seen.others[0], total, what, {slip: total / n}, "the sum over tokens")


@exercise("C", "into the columns, and out of the rows")
def gathered_and_scattered(answers, ranks):
    """`answers` are gathered(x_BsD, group) and scattered(x_BTD, group): all-gather and reduce-scatter along dim 1."""
    gathered, scattered = answers
    n, rank, group = ranks.world_size, ranks.rank, dist.group.WORLD
    mine = slice(3 * rank, 3 * rank + 3)
    parts, uses = [normal(30 + r, 2, 3, 4) for r in range(n)], [normal(40 + r, 2, 3 * n, 4) for r in range(n)]
    seen = Pass("gathered", lambda x: gathered(x, group), parts[rank], uses[rank])
    slips = {"those are the ranks' parts along another dim; positions are dim 1": torch.cat(parts, dim=0)}
    volume = uses[0].nbytes
    seen.expect_forward(torch.cat(parts, dim=1), "all positions", slips, volume)
    slips = {
        "that is what this rank alone found for its positions; the others have used them as well": uses[rank][:, mine],
        "that is the mean of the partial sums; they are added up": sum(uses)[:, mine] / n,
    }
    seen.expect_backward(sum(uses)[:, mine], "the sum over the ranks", slips, volume)

    parts, uses = [normal(50 + r, 2, 3 * n, 4) for r in range(n)], [normal(60 + r, 2, 3, 4) for r in range(n)]
    seen = Pass("scattered", lambda x: scattered(x, group), parts[rank], uses[rank])
    own, total = parts[rank][:, mine], sum(parts)[:, mine]
    slips = {
        "those are its positions of this rank's own partial sum; the other ranks' belong to the sum": own,
        "that is the mean of the partial sums; they are added up": total / n,
    }
    seen.expect_forward(total, "this rank's positions of the sum", slips, volume)
    alone = torch.zeros_like(parts[0])
    alone[:, mine] = uses[rank]
    slips = {"that is zero at the other ranks' positions; each rank needs the gradients of all": alone}
    seen.expect_backward(torch.cat(uses, dim=1), "that of all positions", slips, volume)


@exercise("D", "who reduces the norms' gradients")
def add_up(answer, ranks):
    """`answer(parameters, group)` leaves in each gradient its sum over the group, for one all-reduce."""
    n, rank, shapes = ranks.world_size, ranks.rank, ((5,), (5,), (2, 3), (7,))
    gradients = [[normal(70 + 10 * r + i, *shape) for i, shape in enumerate(shapes)] for r in range(n)]
    weights = [normal(7 + i, *shape) for i, shape in enumerate(shapes)]
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    for p, gradient in zip(parameters, gradients[rank], strict=True):
        p.grad = gradient.clone()
    with wire.watch() as seen:
        answer(parameters, dist.group.WORLD)
    for i, (p, weight) in enumerate(zip(parameters, weights, strict=True)):
        expect_unchanged(p.detach(), weight, "a weight", ": add up p.grad, and leave the update to the optimizer")
        total = sum(gradients[r][i] for r in range(n))
        slips = {
            "that is this rank's partial sum; write the sum back into p.grad": gradients[rank][i],
            "that is the mean; these are partial sums, there is nothing to divide": total / n,
        }
        expect_tensor(p.grad, total, f"p.grad of parameter {i}", slips, "the sum over the ranks")
    volume = 2 * sum(p.nbytes for p in parameters)
    expect_traffic(seen, "all gradients are right", "one all_reduce for all of them does", calls=1, volume=volume)


@exercise(1, "the loss of split logits")
def split_loss(answer, ranks):
    """`answer(logits_Nv, targets_N, first, group)` is the mean cross-entropy, for three all-reduces of N numbers."""
    n, rank = ranks.world_size, ranks.rank
    N, V = 6, 5 * n - 1  # the last rank has one token less
    for scale, size in ((1.0, ""), (400.0, ", of logits as large as 400,")):  # exp(710) is more than a float64 holds
        logits = (scale * normal(80, N, V)).requires_grad_()
        targets = torch.randint(V, (N,), generator=torch.Generator().manual_seed(81))
        targets[0], targets[1] = 0, V - 1
        expected = F.cross_entropy(logits, targets)
        (slopes,) = torch.autograd.grad(expected, logits)
        mine = logits.detach().chunk(n, 1)[rank].clone().requires_grad_()
        given = mine.detach().clone()
        with wire.watch() as there:
            loss = answer(mine, targets.clone(), 5 * rank, dist.group.WORLD)
        expect_unchanged(mine.detach(), given, "logits_Nv")
        expect_scalar(loss, f"the loss{size}", ": subtract the largest logit of all ranks before you take exp")
        slips = {"that is the sum over the tokens; the mean is asked for": N * expected.item()}
        expect_number(loss.detach(), expected.item(), f"the loss{size}", slips=slips, close=1e-9)
        with wire.watch() as back:
            (gradient,) = torch.autograd.grad(loss, mine, allow_unused=True)
        share = slopes.chunk(n, 1)[rank]
        slips = {f"that is {n} times as much: use g for the sums, whose backward is no sum": n * share}
        it_is = "softmax minus one at the target, divided by N"
        expect_tensor(gradient, share, f"backward, the gradient of this rank's logits{size}", slips, it_is)
        cure = f"three all-reduces of {N} numbers are: largest, sum, target's logit"
        expect_traffic(there, "the loss is right", cure, calls=3, payload=3 * 8 * N)
        expect_traffic(back, "the gradient is right", "backward needs no call", calls=0)


@exercise(2, "a test that a wrong backward does not pass")
def agree(answer, ranks):
    """`answer(parallel, single, x, group)` is True on every rank only if outputs and products agree on all of them."""
    torch.manual_seed(1000 + ranks.rank)  # ranks' own generators differ, as in real runs
    for fault, parallel in _suspects(ranks.world_size, ranks.rank).items():
        x = normal(90, 4, 3).requires_grad_()
        before = x.detach().clone()
        given = answer(parallel, lambda x: torch.tanh(x) * 3, x, dist.group.WORLD)
        expect_unchanged(x.detach(), before, "the x that you were given")
        if x.grad is not None:
            raise Wrong("x.grad was filled; work on a copy of x, or use torch.autograd.grad")
        verdict = truth(given)
        if fault and verdict:
            raise Wrong(f"this one is wrong, and you said True: {fault}")
        if not fault and not verdict:
            raise Wrong("a right function was said to be wrong; v must be the same on all ranks, the limit is 1e-10")


def _suspects(n, rank):
    """{what is wrong, "" for a right one: function}; the single one is 3 tanh(x)."""

    def with_gradient(change):
        return lambda x: torch.tanh(Move.apply(x, None, change)) * 3

    last = rank == n - 1
    return {
        "": with_gradient(lambda gradient: gradient),
        "its outputs are off by 1e-6": lambda x: torch.tanh(x) * 3 + 1e-6,
        "its gradient is twice what it should be": with_gradient(lambda gradient: 2 * gradient),
        "its backward replaces the gradient by the columns' means, which v of ones would not show": (
            lambda x: Move.apply(torch.tanh(x) * 3, None, lambda v: v.mean(0, keepdim=True).expand(v.shape))
        ),
        "its gradient is off by 1e-7": with_gradient(lambda gradient: gradient + 1e-7),
        f"its gradient is wrong on rank {n - 1} only, so all ranks must say False": (
            with_gradient(lambda gradient: -gradient if last else gradient)
        ),
        f"its output is wrong on rank {n - 1} only, so all ranks must say False": (lambda x: torch.tanh(x) * 3 + last),
    }


@exercise(3, "fewer key heads than ranks")
def my_heads(answer, ranks=None):
    """`answer(num_heads, num_kv_heads, t, rank)` is (query heads, KV heads), or ValueError with the numbers."""
    for heads, kv, t in ((8, 8, 4), (8, 4, 4), (8, 2, 4), (8, 1, 4), (32, 8, 16), (12, 4, 2), (6, 6, 1)):
        for rank in range(t):
            case = f"for {heads} heads, {kv} KV heads and {t} ranks"
            try:
                queries, keys = answer(heads, kv, t, rank)
            except ValueError as error:
                raise Wrong(f"{case} there is a way: do not raise ValueError ({str(error)[:60]})") from None
            wanted = list(range(rank * heads // t, (rank + 1) * heads // t))
            expect_equal(queries, wanted, f"{case} the query heads of rank {rank}")
            needed = sorted({query * kv // heads for query in wanted})
            expect_equal(keys, needed, f"{case} the KV heads of rank {rank}, those that its queries use,")
    for heads, kv, t, named in ((8, 2, 3, (8, 3)), (12, 6, 4, (6, 4)), (12, 3, 2, (3, 2))):
        why = f"{t} does not divide {heads} heads" if heads % t else f"neither of {kv} and {t} divides the other"
        for rank in range(t):
            case = f"{heads} heads, {kv} KV heads, {t} ranks: {why}"
            expect_refusal(lambda h=heads, kv=kv, t=t, r=rank: answer(h, kv, t, r), case, *named)
