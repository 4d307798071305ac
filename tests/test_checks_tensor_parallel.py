"""Each check of lesson 07 accepts right answers in another style and rejects mutants, several from published code."""

from exercises import AnswersOfRanks
from manyhands.checks import tensor_parallel as checks


def f_by_hook(x, group):  # right: no Function at all
    y = x.view_as(x)
    y.register_hook(checks.summed)
    return y


def g_by_detaching(x, group):  # right: the sum's value, and the gradient of x
    return x + (checks.summed(x.detach()) - x.detach())


BACK, THERE = "all_reduced(gradient, group)", "all_reduced(x, group)"
COLUMN, ROW = "F.linear(enter(x_BTD), w_mD, b_m)", "leave(F.linear(x_BTm, w_Dm)) + b_D"
SCATTER_BACK, SCATTER = "reduce_scattered(gradient, group)", "reduce_scattered(x, group)"
CALL, PARTS = "    dist.all_reduce(row_P, group=group)\n", "dist.all_reduce(part, group=group)"
SUMS, KEYS = "g(shifted_Nv.exp().sum(-1), group)", "sorted({query // per_kv for query in queries})"
HEADS = "{num_heads} heads do not split over {t} tensor ranks; use a divisor of {num_heads}"
REJECTED = {
    "f_and_g": [
        (BACK, "gradient", "that is this rank's partial sum; the other ranks have used x as"),
        (BACK, f"{BACK} / group.size()", "that is the mean of the partial sums; a gradient of several"),
        ("lambda x: x,", f"lambda x: {THERE},", "x is the same on all of them, nothing is to be added up"),
        ("gradient: gradient", f"gradient: {BACK}", "all ranks have the same loss, so it was counted 3 times"),
        (THERE, "x.clone()", "that is this rank's partial sum alone; g adds them up"),
        (THERE, f"{THERE} / group.size()", "that is the mean; g adds the partial sums up"),
        (THERE, "dist.all_reduce(x) or x.clone()", "the x that g was given was changed; leave it as it is"),
        (f"Move.apply(x, lambda x: {THERE}, lambda gradient: gradient)", "all_reduced(x.detach(), group)",
         "backward does not arrive at x"),
        (BACK, "all_gathered(gradient[None], group).view(3, 3, 4).sum(0)",
         "is right, but 288 bytes were communicated in 1 call of all_gather"),
    ],
    "linears": [
        ("enter(x_BTD)", "x_BTD", "`enter` was called 0 times where x enters once"),
        ("enter(x_BTD)", "enter(enter(x_BTD))", "`enter` was called 2 times"),
        (COLUMN, "enter(x_BTD) @ w_mD.T + b_m", "your code raised TypeError"),
        ("w_mD, b_m)", "w_mD)", "that is without the bias"),
        ("w_Dm)) + b_D", "w_Dm, b_D))", "each rank added it to its part; add it once, after the sum"),
        ("w_Dm)) + b_D", "w_Dm, b_D / dist.get_world_size()))", "the bias was divided by n; add it once, whole"),
        ("leave(F.linear(x_BTm, w_Dm))", "F.linear(x_BTm, w_Dm)", "let the product pass through `leave`"),
        (" + b_D", "", "that is without the bias"),
    ],
    "gathered_and_scattered": [
        (SCATTER_BACK, "own_part(gradient, group)", "what this rank alone found for its positions"),
        (SCATTER_BACK, f"{SCATTER_BACK} / group.size()", "that is the mean of the partial sums; they are added up"),
        (SCATTER_BACK, f"own_part({BACK}, group)", "gathered passes on is right, but 1,152 bytes were communicated"),
        ("all_gathered(x, group)", "all_gathered(x.transpose(0, 1), group).transpose(0, 1)",
         "those are the ranks' parts along another dim; positions are dim"),
        (SCATTER, "own_part(x, group)", "those are its positions of this rank's own partial sum; the"),
        (SCATTER, f"{SCATTER} / group.size()", "that is the mean of the partial sums; they are added up"),
        (SCATTER, f"own_part({THERE}, group)", "forward, what scattered returns is right, but 1,152 bytes were"),
        ("all_gathered(gradient, group)", "F.pad(gradient, (0, 0, 3 * rank, 6 - 3 * rank))",
         "zero at the other ranks' positions"),
    ],
    "add_up": [
        (CALL, f"{CALL}    row_P /= group.size()\n", "that is the mean; these are partial sums, there is nothing to"),
        (CALL, f"    [{PARTS} for part in row_P.split(4)]\n", "one all_reduce for all of them does"),
        ("p.grad = part", "part", "that is this rank's partial sum; write the sum back into p.grad"),
        ("p.grad", "p.data", "add up p.grad, and leave the update to the optimizer"),
        (CALL, f"    row_P = row_P.float()\n{CALL}", "view_as(p)", "view_as(p).double()", "is float32's accuracy"),
    ],
    "split_loss": [
        ("amax(-1)", "amax(-1) * 0", "subtract the largest logit of all ranks before you take exp"),
        (".mean()", ".sum()", "that is the sum over the tokens"),
        ("    largest_N =",
         f"    def g(x, group):\n        return Move.apply(x, *[lambda x: {THERE}] * 2)\n\n    largest_N =",
         "use g for the sums, whose backward is no sum"),
        (SUMS, f"{SUMS} / group.size()", "the loss should be 2.933, not"),
        (SUMS, "shifted_Nv.exp().sum(-1)", "the loss should be"),
        (".mean()", ".mean().item()", "the loss should be one number with its graph, a tensor, not"),
        ("    shifted_Nv =", "    logits_Nv.data -= 1\n    shifted_Nv =", "logits_Nv was changed; leave it as it is"),
        ("    sums_N", "    dist.all_reduce(targets_N, group=group)\n    sums_N", "targets_N - first",
         "targets_N // group.size() - first", "largest, sum, target's logit"),
    ],
    "agree": [
        ("(y.detach(), gradient)", "(y.detach(),)", "you said True: its gradient is twice what it should be"),
        ("torch.randn(y.shape, dtype=y.dtype, generator=draw).to(y.device)", "torch.ones_like(y)",
         "which v of ones would not show"),
        ("    dist.all_reduce(apart, op=dist.ReduceOp.MAX, group=group)\n", "",
         "on rank 2 only, so all ranks must say False"),
        (", generator=draw", "", "a right function was said to be wrong"),
        ("1e-10", "1e-5", "its outputs are off by 1e-6"),
        ("1e-10", "1e-6", "its gradient is off by 1e-7"),
        ("x.detach().clone().requires_grad_()", "x", "(gradient,) = torch.autograd.grad(y, leaf, v)",
         "y.backward(v)\n        gradient = x.grad", "x.grad was filled"),
    ],
    "my_heads": [
        (KEYS, "list(range(rank * (num_kv_heads // t), (rank + 1) * (num_kv_heads // t)))",
         "its queries use, should be [0], not []"),
        (KEYS, "list(range(num_kv_heads))", "its queries use, should be [0, 1], not [0, 1, 2, 3, 4, 5, 6, 7]"),
        ("range(rank * each, (rank + 1) * each)", "range(rank, num_heads, t)", "should be [0, 1], not [0, 4]"),
        ("if num_heads % t:", "if False:", "raise a ValueError that names 8 and 3; yours says 2 KV heads"),
        ("if num_kv_heads % t and t % num_kv_heads:", "if num_kv_heads % t:", "there is a way: do not raise"),
        (HEADS, "does not fit", "raise a ValueError that names 8 and 3; yours says does not fit"),
        ("raise ValueError", "raise AssertionError", "yours was AssertionError"),
    ],
}  # fmt: skip
RIGHT = {
    "f_and_g": [(f_by_hook, g_by_detaching)],
    "linears": [("F.linear(x_BTm, w_Dm)", "x_BTm @ w_Dm.T")],
    "gathered_and_scattered": [("all_gathered(x, group)", "all_gathered(x.clone(), group)")],
    "add_up": [("p.grad = part.view_as(p)", "p.grad.copy_(part.view_as(p))")],
    "split_loss": [("(sums_N.log() - g(logit_N, group)).mean()", "sums_N.log().mean() - g(logit_N, group).mean()")],
    "agree": [("(y, leaf, v)", "((y * v).sum(), leaf)"), ("return apart.item() <= 1e-10", "return apart <= 1e-10")],
    "my_heads": [("return queries, sorted", "return torch.tensor(queries), sorted")],
}


class TestAnswers(AnswersOfRanks):
    lesson, checks, rejected, right = "07_tensor_parallel", checks, REJECTED, RIGHT
    around = ("Move", "all_reduced", "all_gathered", "reduce_scattered", "own_part", "f", "g")
    solutions = {
        "f_and_g": ("f", "g"),
        "linears": ("column_linear", "row_linear"),
        "gathered_and_scattered": ("gathered", "scattered"),
    }
