"""Checks of lesson 07: f and g, split linears, positions, unfinished gradients, the loss of split logits, a test, heads.

All is in float64 and in the CPU's memory, where the trial group can send. What each rank is given follows from seeds that
say the rank, so that every rank knows the right answer without communicating. Answers get the trial's group; n is its size.
"""

import operator

import torch
import torch.distributed as dist
import torch.nn.functional as F

from manyhands.checks import Wrong, exercise
from manyhands.checks.movements import (
    Calls,
    Pass,
    judge_cost,
    judge_tensor,
    move,
    normal,
    summed,
    untouched,
)
from manyhands.checks.tensors import count
from manyhands.checks.values import number, plain, shown
from manyhands.measure import wire


@exercise("A", "f and g")
def f_and_g(answers, ranks):
    """`answers` are f(x, group) and g(x, group): identity and all-reduce, each the other's backward."""
    f, g = answers
    n, rank, group = ranks.world_size, ranks.rank, dist.group.WORLD
    x, weights = normal(1, 3, 4), [normal(10 + r, 3, 4) for r in range(n)]
    seen = Pass(lambda x: f(x, group), x, weights[rank], "f")
    hints = {"the sum over the ranks: x is the same on all of them, nothing is to be added up": n * x}
    judge_tensor(seen.result, x, "forward, f(x)", "x itself", hints)
    judge_cost(seen.there, [], 0, "forward, f")
    term = weights[rank]
    hints = {
        "this rank's term; the other ranks have used x as well, so add the terms up": term,
        "the mean of the terms; a gradient of several uses is their sum": sum(weights) / n,
    }
    judge_tensor(seen.gradient, sum(weights), "backward, the gradient that f passes on", "the sum", hints)
    judge_cost(seen.back, ["all_reduce"], x.nbytes, "backward, f")

    terms, weight = [normal(20 + r, 3, 4) for r in range(n)], normal(2, 3, 4)
    seen = Pass(lambda x: g(x, group), terms[rank], weight, "g")
    hints = {
        "this rank's term alone; g adds the terms up": terms[rank],
        "the mean; g adds the terms up": sum(terms) / n,
    }
    judge_tensor(seen.result, sum(terms), "forward, g(x)", "the sum of the ranks' terms", hints)
    judge_cost(seen.there, ["all_reduce"], x.nbytes, "forward, g")
    hints = {f"{n} times that: all ranks have the same loss, so it was counted {n} times": n * weight}
    judge_tensor(seen.gradient, weight, "backward, the gradient that g passes on", "what arrived", hints)
    judge_cost(seen.back, [], 0, "backward, g")


@exercise("B", "two linear layers")
def linears(answers, ranks):
    """`answers` are column_linear(x, w, b, enter) and row_linear(x, w, b, leave), of which each rank has a share."""
    column, row = answers
    n, rank, group = ranks.world_size, ranks.rank, dist.group.WORLD
    x, w_in, b_in, w_out, b_out = _mlp(n)
    enter, leave = (
        Calls(lambda x: move(x, None, summed, group)),
        Calls(lambda x: move(x, summed, None, group)),
    )
    for bias in (None, b_in):
        _judge_column(column, enter, x, w_in, bias, n, rank)
    _judge_row(row, leave, w_out, b_out, n, rank)


@exercise("C", "into the columns, and out of the rows")
def gathered_and_scattered(answers, ranks):
    """`answers` are gathered(x_BsD, group) and scattered(x_BTD, group): all-gather and reduce-scatter along dim 1."""
    gathered, scattered = answers
    n, rank, group = ranks.world_size, ranks.rank, dist.group.WORLD
    parts, uses = [normal(30 + r, 2, 3, 4) for r in range(n)], [normal(40 + r, 2, 3 * n, 4) for r in range(n)]
    whole, mine = torch.cat(parts, dim=1), slice(3 * rank, 3 * rank + 3)
    seen = Pass(lambda x: gathered(x, group), parts[rank], uses[rank], "gathered")
    hints = {"the ranks' parts along another dim; positions are dim 1": torch.cat(parts, dim=0)}
    judge_tensor(seen.result, whole, "forward, gathered(x)", "all positions", hints)
    judge_cost(seen.there, ["all_gather"], whole.nbytes, "forward, gathered")
    hints = {
        "what this rank alone found for its positions; the others have used them as well: their terms "
        "must be added up": uses[rank][:, mine],
        "the mean of the terms; they are added up": sum(uses)[:, mine] / n,
    }
    wanted = sum(uses)[:, mine]
    judge_tensor(seen.gradient, wanted, "backward, the gradient that gathered passes on", "a sum", hints)
    judge_cost(seen.back, ["reduce_scatter"], whole.nbytes, "backward, gathered")

    terms, uses = [normal(50 + r, 2, 3 * n, 4) for r in range(n)], [normal(60 + r, 2, 3, 4) for r in range(n)]
    seen = Pass(lambda x: scattered(x, group), terms[rank], uses[rank], "scattered")
    hints = {
        "its positions of this rank's own term; the other ranks' terms belong to the sum": terms[rank][:, mine],
        "the mean of the terms; they are added up": sum(terms)[:, mine] / n,
    }
    wanted = sum(terms)[:, mine]
    judge_tensor(seen.result, wanted, "forward, scattered(x)", "this rank's positions of the sum", hints)
    judge_cost(seen.there, ["reduce_scatter"], whole.nbytes, "forward, scattered")
    alone = torch.zeros_like(whole)
    alone[:, mine] = uses[rank]
    hints = {
        "zero at the other ranks' positions; every term counts at all positions, so each rank needs "
        "all gradients": alone
    }
    wanted = torch.cat(uses, dim=1)
    judge_tensor(seen.gradient, wanted, "backward, the gradient that scattered passes on", "all", hints)
    judge_cost(seen.back, ["all_gather"], whole.nbytes, "backward, scattered")


@exercise("D", "who reduces the norms' gradients")
def add_up(answer, ranks):
    """`answer(parameters, group)` leaves in each gradient its sum over the group, for one all-reduce."""
    n, rank = ranks.world_size, ranks.rank
    shapes = ((5,), (5,), (2, 3), (7,))
    gradients = [[normal(70 + 10 * r + i, *shape) for i, shape in enumerate(shapes)] for r in range(n)]
    parameters = [torch.nn.Parameter(normal(7 + i, *shape)) for i, shape in enumerate(shapes)]
    for p, gradient in zip(parameters, gradients[rank], strict=True):
        p.grad = gradient.clone()
    with wire.watch() as seen:
        answer(parameters, dist.group.WORLD)
    for i, p in enumerate(parameters):
        if not torch.equal(p.detach(), normal(7 + i, *shapes[i])):
            raise Wrong("the weights were changed; add up p.grad, and leave the update to the optimizer")
        total = sum(gradients[r][i] for r in range(n))
        hints = {
            "this rank's term; write the sum back into p.grad": gradients[rank][i],
            "the mean; these are terms of a sum, there is nothing to divide": total / n,
        }
        judge_tensor(p.grad, total, f"p.grad of parameter {i}", "the sum over the ranks", hints)
    judge_cost(seen, ["all_reduce"], sum(p.nbytes for p in parameters), "add_up", each=len(parameters))


@exercise(1, "the loss of split logits")
def split_loss(answer, ranks):
    """`answer(logits_Nv, targets_N, first, group)` is the mean cross-entropy, for three all-reduces of N numbers."""
    n, rank = ranks.world_size, ranks.rank
    N, V = 6, 5 * n - 1  # the last rank has one token less
    for scale in (1.0, 400.0):  # exp(710) is more than a float64 holds
        logits = (scale * normal(80, N, V)).requires_grad_()
        targets = torch.randint(V, (N,), generator=torch.Generator().manual_seed(81))
        targets[0], targets[1] = 0, V - 1
        expected = F.cross_entropy(logits, targets)
        (slopes,) = torch.autograd.grad(expected, logits)
        mine = logits.detach().chunk(n, 1)[rank].clone().requires_grad_()
        given = mine.detach().clone()
        with wire.watch() as there:
            loss = answer(mine, targets.clone(), 5 * rank, dist.group.WORLD)
        untouched(mine.detach(), given, "logits_Nv")
        found = number(loss.detach() if isinstance(loss, torch.Tensor) else loss, "the mean loss, a number")
        wanted = expected.item()
        if not abs(found - wanted) <= 1e-9 * max(1.0, wanted):
            why = "; add the terms of all ranks up" if scale == 1 else f", for logits as large as {scale:g}"
            if abs(found - N * wanted) <= 1e-9 * abs(wanted):
                why = ": that is the sum over the tokens; the mean is asked for"
            raise Wrong(f"the loss should be {wanted:.4f}, not {found:.4f}{why}")
        if not (isinstance(loss, torch.Tensor) and loss.requires_grad):
            raise Wrong("the loss is right, but has no backward: return a tensor that comes from logits_Nv")
        with wire.watch() as back:
            (gradient,) = torch.autograd.grad(loss, mine, allow_unused=True)
        share = slopes.chunk(n, 1)[rank]
        what = f"backward, the gradient of this rank's logits{'' if scale == 1 else ' (large ones)'}"
        hints = {f"{n} times that: use g for the sums, whose backward is no sum": n * share}
        judge_tensor(gradient, share, what, "softmax minus one at the target, divided by N", hints)
        _judge_loss_cost(there, back, N, n)


@exercise(2, "a test that a wrong backward does not pass")
def agree(answer, ranks):
    """`answer(parallel, single, x, group)` is True on every rank only if outputs and products agree on all of them."""
    n, rank = ranks.world_size, ranks.rank
    torch.manual_seed(1000 + rank)  # ranks' own generators differ, as in real runs
    for fault, parallel in _suspects(n, rank).items():
        x = normal(90, 4, 3).requires_grad_()
        before = x.detach().clone()
        given = answer(parallel, lambda x: torch.tanh(x) * 3, x, dist.group.WORLD)
        untouched(x.detach(), before, "x")
        if x.grad is not None:
            raise Wrong("x.grad was filled; work on a copy of x, or use torch.autograd.grad")
        verdict = _truth(given)
        if verdict == (fault == ""):
            continue
        if fault == "":
            raise Wrong(
                "a right function was said to be wrong; v must be the same on all ranks (seed a generator of your own), "
                "and the limit is 1e-10"
            )
        raise Wrong(f"this one is wrong, and you said True: {fault}")


@exercise(3, "fewer key heads than ranks")
def my_heads(answer, ranks=None):
    """`answer(num_heads, num_kv_heads, t, rank)` is (query heads, KV heads), or ValueError with the numbers."""
    for heads, kv, t in ((8, 8, 4), (8, 4, 4), (8, 2, 4), (8, 1, 4), (32, 8, 16), (12, 4, 2), (6, 6, 1)):
        for rank in range(t):
            case = f"{heads} heads, {kv} KV heads, {t} ranks: rank {rank} "
            queries, keys = _two_lists(answer(heads, kv, t, rank), case)
            wanted = list(range(rank * heads // t, (rank + 1) * heads // t))
            if queries != wanted:
                raise Wrong(f"{case}should hold the query heads {wanted}, not {queries}")
            needed = sorted({query * kv // heads for query in wanted})
            if keys != needed:
                raise Wrong(f"{case}should hold the KV heads {needed}, which its queries use, not {keys}")
    for heads, kv, t in ((8, 2, 3), (12, 6, 4), (12, 3, 2)):
        _judge_refusal(answer, heads, kv, t)


# ---- build B ----


def _mlp(n):
    """Input, weights and biases of a full MLP: B = 2, T = 3, D = 5, two hidden units per rank."""
    M = 2 * n
    return normal(3, 2, 3, 5), normal(4, M, 5), normal(5, M), normal(6, 5, M), normal(7, 5)


def _judge_column(column, enter, x, w, b, n, rank):
    case = "column_linear" if b is not None else "column_linear without a bias"
    share_w, share_b = w.chunk(n)[rank], None if b is None else b.chunk(n)[rank]
    uses = [normal(100 + r, 2, 3, len(w) // n) for r in range(n)]
    enter.calls = 0
    seen = Pass(lambda x: column(x, share_w.clone(), share_b, enter), x, uses[rank], case)
    wanted = F.linear(x, share_w, share_b)
    hints = {"without the bias": F.linear(x, share_w)} if b is not None else {}
    judge_tensor(seen.result, wanted, f"forward, {case}", "this rank's outputs [B, T, m]", hints)
    if enter.calls != 1:
        raise Wrong(
            f"{case}: outputs are right, but `enter` was called {count(enter.calls, 'time')} where x enters once: without "
            "it the gradient of x is this rank's term only"
        )
    judge_cost(seen.there, [], 0, f"forward, {case}")
    total = sum(F.linear(use, part.T) for use, part in zip(uses, w.chunk(n), strict=True))
    hints = {"this rank's term: let x pass through `enter` before the product": F.linear(uses[rank], share_w.T)}
    judge_tensor(seen.gradient, total, f"backward, {case}, the gradient of x", "the sum of terms", hints)
    judge_cost(seen.back, ["all_reduce"], x.nbytes, f"backward, {case}")


def _judge_row(row, leave, w, b, n, rank):
    hidden = [normal(110 + r, 2, 3, w.shape[1] // n) for r in range(n)]
    share_w, use = w.chunk(n, 1)[rank].contiguous(), normal(8, 2, 3, 5)
    bias = b.clone().requires_grad_()
    leave.calls = 0
    seen = Pass(lambda x: row(x, share_w.clone(), bias, leave), hidden[rank], use, "row_linear", bias)
    product = F.linear(torch.cat(hidden, -1), w)
    own = F.linear(hidden[rank], share_w)
    hints = {
        f"that with the bias {n} times: each rank added it to its term; add it once, after the sum": product + n * b,
        "that without the bias": product,
        "this rank's term: let the product pass through `leave`": own + b,
    }
    judge_tensor(seen.result, product + b, "forward, row_linear", "all outputs [B, T, D]", hints)
    if leave.calls != 1:
        raise Wrong(f"row_linear: `leave` was called {count(leave.calls, 'time')}; the terms leave once")
    judge_cost(seen.there, ["all_reduce"], use.nbytes, "forward, row_linear")
    what = "backward, row_linear, the gradient of x"
    judge_tensor(seen.gradient, F.linear(use, share_w.T), what, "this rank's part", {})
    hints = {f"an n-th of that: the bias was divided by {n}; add it once, whole": use.sum((0, 1)) / n}
    what = "backward, row_linear, the gradient of the bias"
    judge_tensor(seen.others[0], use.sum((0, 1)), what, "the sum over tokens", hints)
    judge_cost(seen.back, [], 0, "backward, row_linear")


# ---- exercise 1 ----


def _judge_loss_cost(there, back, N, n):
    if n == 1:
        return
    calls, sent = [call.op for call in there.calls], there.payload_bytes()
    if len(calls) > 3 or sent > 3 * N * 8:
        raise Wrong(
            f"the loss is right, but forward handed over {sent // 8} numbers in {count(len(calls), 'call')} "
            f"({', '.join(sorted(set(calls)))}); three all-reduces of {N} numbers are enough: largest, sum, target's logit"
        )
    if back.calls:
        raise Wrong(f"the gradient is right, but backward made {count(len(back.calls), 'call')}; none is needed")


# ---- exercise 2 ----


def _suspects(n, rank):
    """{what is wrong, "" for a right one: function}; the single one is 3 tanh(x)."""

    def with_gradient(change):
        def function(x):
            return torch.tanh(Backward.apply(x, change)) * 3

        return function

    last = rank == n - 1
    return {
        "": with_gradient(lambda gradient: gradient),
        "its outputs are off by 1e-6": lambda x: torch.tanh(x) * 3 + 1e-6,
        "its gradient is twice what it should be": with_gradient(lambda gradient: 2 * gradient),
        "its backward replaces the gradient by the columns' means, which v of ones would not show": _mean_first,
        "its gradient is off by 1e-7": with_gradient(lambda gradient: gradient + 1e-7),
        f"its gradient is wrong on rank {n - 1} only, so all ranks must say False": with_gradient(
            lambda gradient: -gradient if last else gradient
        ),
        f"its output is wrong on rank {n - 1} only, so all ranks must say False": (
            lambda x: torch.tanh(x) * 3 + (1.0 if last else 0.0)
        ),
    }


class Backward(torch.autograd.Function):
    """Nothing in forward, `change(gradient)` in backward."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.change(gradient), None


def _mean_first(x):
    y = torch.tanh(x) * 3
    return Backward.apply(y, lambda v: v.mean(0, keepdim=True).expand(v.shape))


def _truth(given):
    if isinstance(given, torch.Tensor) and given.numel() == 1:
        given = given.item()
    if isinstance(given, bool) or type(given).__name__ in ("bool_", "bool"):
        return bool(given)
    raise Wrong(f"return True or False, not {shown(given)}")


# ---- exercise 3 ----


def _two_lists(given, case):
    if given is ...:
        raise NotImplementedError
    try:
        queries, keys = given
        return [operator.index(q) for q in queries], [operator.index(k) for k in keys]
    except (TypeError, ValueError):
        raise Wrong(f"{case}needs two lists of heads, not {plain(given)}") from None


def _judge_refusal(answer, heads, kv, t):
    named = (heads, t) if heads % t else (kv, t)
    why = (
        f"{t} does not divide {heads} heads"
        if heads % t
        else f"neither of {kv} KV heads and {t} ranks divides the other"
    )
    for rank in range(t):
        try:
            answer(heads, kv, t, rank)
        except NotImplementedError:
            raise
        except ValueError as error:
            if not all(str(value) in str(error) for value in named):
                raise Wrong(
                    f"{heads} heads, {kv} KV heads, {t} ranks: the ValueError should name {named[0]} and {named[1]}; "
                    f"it says: {str(error)[:80]}"
                ) from None
            continue
        raise Wrong(f"{heads} heads, {kv} KV heads, {t} ranks should be refused with a ValueError: {why}")
