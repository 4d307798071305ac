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
COLUMN, ROW = "F.linear(enter(x_BTD), w_mD, b_m)", "leave(F.linear(x_BTm, w_Dm)) + b_D"
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
        (THERE, "x.clone()", "that is this rank's partial sum alone; g adds them up"),
        (THERE, f"{THERE} / group.size()", "that is the mean; g sums the partial sums"),
        (THERE, "dist.all_reduce(x) or x.clone()", "x was changed; leave it as it is"),
        (f"Move.apply(x, lambda x: {THERE}, lambda gradient: gradient)", "all_reduced(x.detach(), group)",
         "backward does not arrive at x"),
        (BACK, "all_gathered(gradient[None], group).view(group.size(), *gradient.shape).sum(0)",
         "bytes were communicated in 1 call of all_gather"),
        (BACK, "all_reduced(gradient, None)", "your code calls all_reduce on ranks 0-3, and the group that it was"),
        (THERE, "all_reduced(x, dist.group.WORLD)", "was given is ranks 0, 2: hand on `group=group`"),
        (BACK, "dist.all_reduce(gradient, group=group) or gradient", "the gradient that arrived at f was changed"),
        ("Move.apply(x, lambda x: x,", "(lambda *_: x)(x, lambda x: x,", "that is this rank's partial sum; the other"),
        ("gradient: gradient", "gradient: gradient / group.size()", "what came is 0.25 times that"),
        (THERE, f"{THERE} * group.size() / dist.get_world_size()", "in the group of ranks 0, 2, g returns should be"),
    ],
    "linears": [
        ("enter(x_BTD)", "x_BTD", "`enter` was called 0 times where x enters once"),
        ("enter(x_BTD)", "enter(enter(x_BTD))", "`enter` was called 2 times"),
        (COLUMN, "enter(x_BTD) @ w_mD.T + b_m", "your code raised TypeError"),
        ("w_mD, b_m)", "w_mD)", "that is without the bias"),
        ("w_Dm)) + b_D", "w_Dm, b_D))", "each rank added it to its part; add it once, after the sum"),
        ("w_Dm)) + b_D", "w_Dm, b_D / dist.get_world_size()))", "the bias was divided by n; add it whole"),
        ("leave(F.linear(x_BTm, w_Dm))", "F.linear(x_BTm, w_Dm)", "let the product pass through `leave`"),
        (" + b_D", "", "that is without the bias"),
        (COLUMN, "enter(F.linear(x_BTD, w_mD, b_m))", "that is with `enter` after the product"),
        (ROW, "F.linear(leave(x_BTm), w_Dm) + b_D", "that is with `leave` before the product"),
        (ROW, "leave(F.linear(x_BTm, w_Dm) + (b_D if dist.get_rank() == 0 else 0))",
         "the gradient of the bias should be the sum over tokens, not None"),
        ("enter(x_BTD)", "enter(x_BTD.detach())", "backward does not arrive at x"),
        (ROW, "leave(F.linear(x_BTm, w_Dm)) + b_D.detach()", "the gradient of the bias should be the sum over tokens"),
    ],
    "gathered_and_scattered": [
        (SCATTER_BACK, "own_part(gradient, group)", "what this rank alone found for its positions"),
        (SCATTER_BACK, f"{SCATTER_BACK} / group.size()", "that is the mean of the partial sums; sum them"),
        (SCATTER_BACK, GATHER_BACK, "that gathered passes on should have the shape of x, [7, 5, 6], not [7, 80"),
        (GATHER_BACK, "gradient", "that scattered passes on should have the shape of x, [7, "),
        (SCATTER_BACK, f"own_part({BACK}, group)", "gathered passes on is right, but"),
        ("all_gathered(x, group)", "all_gathered(x.transpose(0, 1), group).transpose(0, 1)",
         "those are the ranks' parts along another dim; positions are dim"),
        (SCATTER, "own_part(x, group)", "those are its positions of this rank's own partial sum; the"),
        (SCATTER, f"{SCATTER} / group.size()", "that is the mean of the partial sums; sum them"),
        (SCATTER, f"own_part({THERE}, group)", "forward, what scattered returns is right, but"),
        (GATHER_BACK, "torch.cat([gradient * (r == group.rank()) for r in range(group.size())], 1)",
         "zero at the other ranks' positions"),
        (GATHER_BACK, "all_gathered(gradient, group) * group.size()", "what came is 4 times that"),
        (GATHER_BACK, "all_gathered(gradient, dist.group.WORLD)", "calls all_gather on ranks 0-3, and"),
        (GATHER_BACK, "all_gathered(gradient, group) / group.size()", "what came is 0.25 times that"),
        ("all_gathered(x, group)", "torch.stack(all_gathered(x, group).chunk(group.size(), 1), 2).flatten(1, 2)",
         "those are the right positions in another order"),
        (SCATTER, "reduce_scattered(x, dist.group.WORLD)", "on ranks 0-3, and the group that it was given"),
    ],
    "add_up": [
        (CALL, f"{CALL}    row_P /= group.size()\n", "that is the mean; these are partial sums, there is nothing to"),
        (CALL, f"    [{PARTS} for part in row_P.split(4)]\n", "one all_reduce for all of them does"),
        ("p.grad = part", "part", "that is this rank's partial sum; write the sum back into p.grad"),
        ("p.grad", "p.data", "a weight was changed; leave it as it is"),
        (CALL, f"    row_P = row_P.float()\n{CALL}", "view_as(p)", "view_as(p).double()", "is float32's accuracy"),
        (CALL, "    dist.all_reduce(row_P)\n", "your code calls all_reduce on ranks 0-3, and the group"),
        (CALL, "", "that is this rank's partial sum"),
        ("p.grad = part", "p.grad += part", "that is the sum and this rank's partial sum once more; replace p.grad"),
        (CALL, CALL + CALL, "what came is 4 times that"),
        ("p.grad.flatten()", "p.flatten()", "should be the sum over the ranks"),
        ("p.grad = part.view_as(p)", "p.data -= part.view_as(p)", "a weight was changed"),
    ],
    "split_loss": [
        ("amax(-1)", "amax(-1) * 0", "subtract the largest logit of all ranks before you take exp"),
        (".mean()", ".sum()", "that is the sum over the tokens"),
        ("    largest_N =",
         f"    def g(x, group):\n        return Move.apply(x, *[lambda x: {THERE}] * 2)\n\n    largest_N =",
         "use g for the sums, whose backward is no sum"),
        (SUMS, f"{SUMS} / group.size()", "the loss should be"),
        (SUMS, "shifted_Nv.exp().sum(-1)", "that is with this rank's columns alone in the sum of exp"),
        ("g(logit_N, group)", "logit_N", "the loss should be"),
        (SUMS, "shifted_Nv.exp().sum(-1)", "g(logit_N, group)", "logit_N", "the loss should be"),
        (" * here_N", "", "the loss should be"),
        ("(sums_N.log() - g(logit_N, group))", "(g(logit_N, group) - sums_N.log())", "that is its negative"),
        ("op=dist.ReduceOp.MAX, group=group", "op=dist.ReduceOp.MAX", "calls all_reduce on ranks 0-3, and the group"),
        ("g(logit_N, group)", "g(logit_N.detach(), group)", "that is softmax alone: the target's logit"),
        ("shifted_Nv.exp()", "shifted_Nv.clamp(max=0, min=-9).exp()",
         "for logits as large as 400 the loss should be 1,245.167, not 1,245.171"),
        ("sums_N.log()", "sums_N.log().detach()", "that is of the target's logit alone"),
        (".mean()", ".mean().item()", "the loss should be one number with its graph, a tensor, not"),
        ("    shifted_Nv =", "    logits_Nv.data -= 1\n    shifted_Nv =", "logits_Nv was changed; leave it as it is"),
        (SUMS, SUMS.replace("g(", "all_reduced("), "torch's all_reduce has no backward: use g for the sums"),
        ("g(logit_N, group)", "all_reduced(logit_N, group)", "torch's all_reduce has no backward: use g for the sums"),
        ("    sums_N", "    dist.all_reduce(targets_N.clone(), group=group)\n    sums_N",
         "largest, sum, target's logit"),
    ],
    "agree": [
        ("(y.detach(), gradient)", "(y.detach(),)", "you said True: its gradient is twice what it should be"),
        ("torch.randn(y.shape, dtype=y.dtype, generator=draw).to(y.device)", "torch.ones_like(y)",
         "which v of ones would not show"),
        ("    dist.all_reduce(apart, op=dist.ReduceOp.MAX, group=group)\n", "",
         "on rank 3 only, so all ranks must say False"),
        (", generator=draw", "", "a right function was called wrong: is v the same on all ranks"),
        ("(a - b).abs().max()", "(a - b).sum().abs()", "by 0.001 and -0.001 in two places"),
        ("(a - b).abs().max()", "(a - b).mean().abs()", "you said True"),
        ("x.detach().clone().requires_grad_()", "x.requires_grad_()", "    return apart",
         "    x.requires_grad_(False)\n    return apart", "x does not require a gradient any more"),
        ("    apart =", "    x.grad = None\n    apart =", "x.grad was changed"),
        ("op=dist.ReduceOp.MAX, group=group", "op=dist.ReduceOp.MAX", "calls all_reduce on ranks 0-3, and the group"),
        ("(a - b).abs().max()", "(a - b).flatten()[0]", "    dist.all_reduce(apart, op=dist.ReduceOp.MAX",
         "    dist.all_reduce(apart, op=dist.ReduceOp.SUM", "and you said True: its"),
        ("1e-10", "1e-5", "its outputs are off by 1e-6"),
        ("1e-10", "1e-6", "its gradient is off by 1e-7"),
        ("x.detach().clone().requires_grad_()", "x", "(gradient,) = torch.autograd.grad(y, leaf, v)",
         "y.backward(v)\n        gradient = x.grad", "x.grad was changed"),
    ],
    "my_heads": [
        (KEYS, "list(range(rank * (num_kv_heads // t), (rank + 1) * (num_kv_heads // t)))",
         "its queries use, should be [0], not []"),
        (KEYS, "list(range(num_kv_heads))", "its queries use, should be [0, 1], not [0, 1, 2, 3, 4, 5, 6, 7]"),
        ("range(rank * each, (rank + 1) * each)", "range(rank, num_heads, t)", "should be [0, 1], not [0, 4]"),
        ("if num_heads % t:", "if False:", "raise a ValueError that names"),
        ("if num_kv_heads % t and t % num_kv_heads:", "if num_kv_heads % t:", "are fine: do not raise"),
        (HEADS, "does not fit", "; yours says does not fit"),
        ("raise ValueError", "raise AssertionError", "yours was AssertionError"),
        (KEYS, "[query // per_kv for query in queries]", "not [0, 0]: each of them once"),
        (KEYS, "[rank * num_kv_heads // t]", "its queries use, should be [0, 1], not [0]"),
        ("num_kv_heads % t and t % num_kv_heads", "num_kv_heads % t", "2 KV heads and 4 ranks are fine"),
        ("num_kv_heads % t and t % num_kv_heads", "False", "neither of"),
        ("if num_heads % t:", "if num_heads % t or t > num_kv_heads:", "are fine: do not raise ValueError"),
    ],
}  # fmt: skip
RIGHT = {
    "f_and_g": [(f_by_hook, g_by_detaching), (f_in_two_calls, g_in_two_calls)],
    "linears": [
        ("F.linear(x_BTm, w_Dm)", "x_BTm @ w_Dm.T"),
        (COLUMN, "enter(x_BTD) @ w_mD.T + (0 if b_m is None else b_m)"),
    ],
    "gathered_and_scattered": [
        ("all_gathered(x, group)", "all_gathered(x.clone(), group)"),
        (SCATTER_BACK, "reduce_scattered(gradient.contiguous(), group)"),
    ],
    "add_up": [
        ("p.grad = part.view_as(p)", "p.grad.copy_(part.view_as(p))"),
        ("p.grad.flatten()", "p.grad.reshape(-1)"),
    ],
    "split_loss": [
        ("(sums_N.log() - g(logit_N, group)).mean()", "sums_N.log().mean() - g(logit_N, group).mean()"),
        ("(sums_N.log() - g(logit_N, group)).mean()", "(-(g(logit_N, group) - sums_N.log())).sum() / len(targets_N)"),
    ],
    "agree": [("(y, leaf, v)", "((y * v).sum(), leaf)"), ("return apart.item() <= 1e-10", "return apart <= 1e-10")],
    "my_heads": [
        ("return queries, sorted", "return torch.tensor(queries), sorted"),
        (KEYS, "list(dict.fromkeys(query // per_kv for query in queries))"),
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
