"""Each check of lesson 07 accepts right answers in another style and rejects mutants, several from published code."""

import torch.distributed as dist
from exercises import AnswersOfRanks
from manyhands.checks import tensor_parallel as checks


def f_by_hook(x, group):  # right: no Function at all
    y = x.view_as(x)
    y.register_hook(checks.of(group))
    return y


def g_by_detaching(x, group):  # right: the sum's value, and the gradient of x
    return x + (checks.of(group)(x.detach()) - x.detach())


def in_two_calls(x, group):  # right: the bytes of one all-reduce
    parts = x.flatten().chunk(group.size())
    own = parts[0].new_empty(len(parts[0]))
    dist.reduce_scatter_tensor(own, x.flatten().contiguous(), group=group)
    row = own.new_empty(x.numel())
    dist.all_gather_into_tensor(row, own, group=group)
    return row.view(x.shape)


def f_in_two_calls(x, group):
    return checks.Move.apply(x, None, lambda gradient: in_two_calls(gradient, group))


def g_in_two_calls(x, group):
    return checks.Move.apply(x, lambda x: in_two_calls(x, group), None)


BACK, THERE = "all_reduced(gradient, group)", "all_reduced(x, group)"
COLUMN = "F.linear(enter(x_BTD), w_mD, b_m)"
SCATTER_BACK, SCATTER = "reduce_scattered(gradient, group)", "reduce_scattered(x, group)"
GATHER_BACK = "all_gathered(gradient, group)"
CALL, PARTS = "    dist.all_reduce(row_P, group=group)\n", "dist.all_reduce(part, group=group)"
SUMS, KEYS = "g(shifted_Nv.exp().sum(-1), group)", "sorted({query // per_kv for query in queries})"
HEADS = "{num_heads} heads do not split over {t} tensor ranks; use a divisor of {num_heads}"
REJECTED = {
    "f_and_g": [
        (BACK, "gradient", "that is this rank's partial sum; the other ranks have used x as"),
        (BACK, f"{BACK} / group.size()", "that is the mean of the partial sums; a gradient of several"),
        ("lambda x: x,", f"lambda x: {THERE},", "x is the same on all of them, so nothing is to be summed"),
        ("gradient: gradient", f"gradient: {BACK}", "all ranks have the same loss, so it was counted 4 times"),
        (THERE, f"{THERE} / group.size()", "that is the mean; g sums the partial sums"),
        (THERE, "dist.all_reduce(x) or x.clone()", "x was changed; leave it as it is"),
        (BACK, "all_reduced(gradient, None)", "your code calls all_reduce on ranks 0-3, and the group that it was"),
    ],
    "linears": [
        ("enter(x_BTD)", "x_BTD", "`enter` was called 0 times where x enters once"),
        ("enter(x_BTD)", "enter(enter(x_BTD))", "`enter` was called 2 times"),
        (COLUMN, "enter(x_BTD) @ w_mD.T + b_m", "your code raised TypeError"),
        ("w_mD, b_m)", "w_mD)", "that is without the bias"),
        ("w_Dm)) + b_D", "w_Dm, b_D))", "each rank added it to its part; add it once, after the sum"),
        ("w_Dm)) + b_D", "w_Dm, b_D / dist.get_world_size()))", "the bias was divided by n; add it whole"),
        ("leave(F.linear(x_BTm, w_Dm))", "F.linear(x_BTm, w_Dm)", "let the product pass through `leave`"),
    ],
    "gathered_and_scattered": [
        (SCATTER_BACK, "own_part(gradient, group)", "what this rank alone found for its positions"),
        (SCATTER_BACK, f"{SCATTER_BACK} / group.size()", "that is the mean of the partial sums; sum them"),
        (SCATTER_BACK, f"own_part({BACK}, group)", "gathered passes on is right, but"),
        (SCATTER, "own_part(x, group)", "those are its positions of this rank's own partial sum; the"),
        (SCATTER, f"own_part({THERE}, group)", "forward, what scattered returns is right, but"),
        (GATHER_BACK, "all_gathered(gradient, group) * group.size()", "what came is 4 times that"),
        (GATHER_BACK, "all_gathered(gradient, dist.group.WORLD)", "calls all_gather on ranks 0-3, and"),
    ],
    "add_up": [
        (CALL, f"{CALL}    row_P /= group.size()\n", "that is the mean; these are partial sums, there is nothing to"),
        (CALL, f"    [{PARTS} for part in row_P.split(4)]\n", "one all_reduce for all of them does"),
        ("p.grad = part", "part", "that is this rank's partial sum; write the sum back into p.grad"),
        ("p.grad", "p.data", "a weight was changed; leave it as it is"),
        (CALL, f"    row_P = row_P.float()\n{CALL}", "view_as(p)", "view_as(p).double()", "is float32's accuracy"),
        (CALL, "    dist.all_reduce(row_P)\n", "your code calls all_reduce on ranks 0-3, and the group"),
        ("p.grad = part", "p.grad += part", "p.grad of parameter 0 should be the sum over the ranks"),
    ],
    "split_loss": [
        ("amax(-1)", "amax(-1) * 0", "subtract the largest logit of all ranks before you take exp"),
        (".mean()", ".sum()", "that is the sum over the tokens"),
        (SUMS, f"{SUMS} / group.size()", "the loss should be"),
        (SUMS, "shifted_Nv.exp().sum(-1)", "that is with this rank's columns alone in the sum of exp"),
        ("(sums_N.log() - g(logit_N, group))", "(g(logit_N, group) - sums_N.log())", "that is its negative"),
        ("op=dist.ReduceOp.MAX, group=group", "op=dist.ReduceOp.MAX", "calls all_reduce on ranks 0-3, and the group"),
        ("g(logit_N, group)", "g(logit_N.detach(), group)", "that is softmax alone: the target's logit"),
    ],
    "agree": [
        ("(y.detach(), gradient)", "(y.detach(),)", "you said True: its gradient is twice what it should be"),
        ("torch.randn(y.shape, dtype=y.dtype, generator=draw).to(y.device)", "torch.ones_like(y)",
         "which v of ones would not show"),
        (", generator=draw", "", "a right function was called wrong: is v the same on all ranks"),
        ("(a - b).abs().max()", "(a - b).sum().abs()", "by 0.001 and -0.001 in two places"),
        ("(a - b).abs().max()", "(a - b).mean().abs()", "you said True"),
        ("    apart =", "    x.grad = None\n    apart =", "x.grad was changed"),
        ("op=dist.ReduceOp.MAX, group=group", "op=dist.ReduceOp.MAX", "calls all_reduce on ranks 0-3, and the group"),
    ],
    "my_heads": [
        (KEYS, "list(range(rank * (num_kv_heads // t), (rank + 1) * (num_kv_heads // t)))",
         "its queries use, should be [0], not []"),
        ("range(rank * each, (rank + 1) * each)", "range(rank, num_heads, t)", "should be [0, 1], not [0, 4]"),
        ("if num_heads % t:", "if False:", "raise a ValueError that names"),
        ("if num_kv_heads % t and t % num_kv_heads:", "if num_kv_heads % t:", "are fine: do not raise"),
        (HEADS, "does not fit", "; yours says does not fit"),
        ("raise ValueError", "raise AssertionError", "yours was AssertionError"),
        (KEYS, "[query // per_kv for query in queries]", "not [0, 0]: each of them once"),
    ],
}  # fmt: skip
RIGHT = {
    "f_and_g": [(f_by_hook, g_by_detaching), (f_in_two_calls, g_in_two_calls)],
    "linears": [
        ("F.linear(x_BTm, w_Dm)", "x_BTm @ w_Dm.T"),
    ],
    "gathered_and_scattered": [
        ("all_gathered(x, group)", "all_gathered(x.clone(), group)"),
    ],
    "add_up": [
        ("p.grad = part.view_as(p)", "p.grad.copy_(part.view_as(p))"),
    ],
    "split_loss": [
        ("(sums_N.log() - g(logit_N, group)).mean()", "sums_N.log().mean() - g(logit_N, group).mean()"),
    ],
    "agree": [("(y, leaf, v)", "((y * v).sum(), leaf)"), ("return apart.item() <= 1e-10", "return apart <= 1e-10")],
    "my_heads": [
        ("return queries, sorted", "return torch.tensor(queries), sorted"),
    ],
}


class TestAnswers(AnswersOfRanks):
    lesson, checks, rejected, right, world = "07_tensor_parallel", checks, REJECTED, RIGHT, 4
    around = ("Move", "all_reduced", "all_gathered", "reduce_scattered", "own_part", "f", "g")
    solutions = {
        "f_and_g": ("f", "g"),
        "linears": ("column_linear", "row_linear"),
        "gathered_and_scattered": ("gathered", "scattered"),
    }
