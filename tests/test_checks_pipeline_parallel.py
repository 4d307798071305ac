"""Each check of lesson 08 accepts right answers in other styles and rejects plausible wrong ones by their fault.

The checks communicate nothing, so most are judged in this process; the lesson's own solutions on ranks, too.
"""

from exercises import Answers
from manyhands.checks import pipeline_parallel as checks

BACK, GRADIENT = "torch.autograd.backward(y, dy)", "return x.grad"
LEAF = "arrived.requires_grad_() if arrived.is_floating_point() else arrived"
BEFORE, AFTER = '[("F", s - 1, i)] if s > 0 else []', '[("B", s + 1, i)] if s < p - 1 else []'
B_FIRST = '        order.append(("B", s, i))\n'
AHEAD, SUM = "min(m, p - s, room)", ', reduction="sum") / counted'
REJECTED = {
    "backward_of": [
        ("backward(y, dy)", "backward(y.sum())", "y's gradient is dy, not ones"),
        (f"{BACK}\n    {GRADIENT}", "return torch.autograd.grad(y, x, dy)[0]",
         "has no gradient: backward adds to `grad`"),
        ("(y, dy)", "(y, dy, retain_graph=True)", "no retain_graph"),
        (GRADIENT, "x.grad", "nothing came back; the stage before needs the gradient of x"),
        (GRADIENT, "return x", "that is x itself"),
        (GRADIENT, "return dy", "that is dy, the gradient of this stage's output"),
        (GRADIENT, "return x.grad / 8", "what came is 0.125 times that"),
        (BACK, f"torch.autograd.backward(y, dy, retain_graph=True)\n    {BACK}", "what came is 2 times that"),
        (GRADIENT, "return torch.zeros(x.shape) if x.grad is None else x.grad",
         "x holds ids, which have no gradient: return None"),
        ("backward(y, dy)", "backward((y * dy).sum())", "TypeError"),
    ],
    "needs": [
        ('("F", s, i), *', "*", "it needs F of micro-batch 0 on stage 0, which has made the activations that it uses"),
        (" if s > 0 else []", "", "there is no stage -1"),
        (" if s < p - 1 else []", "", "there is no stage 3; the stages are 0 to 2"),
        (AFTER, '[("B", s - 1, i)] if s > 0 else []',
         "it needs B of micro-batch 0 on stage 1, which sends the gradient of its output"),
        ("*gradient_arrives]", '*gradient_arrives, ("B", s, i - 1)]', "micro-batches know nothing of each other"),
        (BEFORE, '[("F", t, i) for t in range(s)]', "it does not wait for F of micro-batch 0 on stage 0"),
        ('("F", s, i), ', 'f"F{s}.{i}", ', 'an action is ("F" or "B", stage, micro-batch)'),
    ],
    "forward_of": [
        ("stage(x)", "stage(arrived.detach())", "backward from y does not arrive at x"),
        (" / m", "", "that is the micro-batch's mean; 4 of them add up"),
        (" / m", " / m / m", "it was divided by m twice"),
        ("flatten()) / m", 'flatten(), reduction="sum")', "that is a sum over positions; the mean"),
        ("flatten())", 'flatten(), reduction="sum")', "that is a sum over positions, divided by m"),
        (" / m", " / m\n        y = y.detach()", "on the last stage y, the loss, has no graph"),
        (LEAF, "arrived", "x does not require a gradient"),
        (LEAF, "arrived.requires_grad_() * 1 if arrived.is_floating_point() else arrived", "x is not a leaf"),
        (LEAF, "arrived.requires_grad_()", "RuntimeError: only Tensors of floating point"),
        ("stage(x)", "stage(x) / m", "only the loss is divided, on the last stage"),
        ("stage(x)", "stage(x).detach()", "y has no graph, and backward needs it"),
        ("x, y", "y, x", "x should have the shape [5, 6], not [5, 3]: it is what has arrived"),
    ],
    "one_f_one_b": [
        ("p - s", "p - s - 1", "the schedule never ends: "),
        ("p - s", "p - s + 1", "stage 0 holds 5 micro-batches at most, where 4 are enough"),
        ("min(m, p - s)", "p - s", "with p = 4 and m = 2: stage 0 does F of micro-batch 2; they are 0 to 1"),
        (B_FIRST, "", "i + first))", f"i + first))\n{B_FIRST}", "holds 5 micro-batches at most, where 4 are enough"),
        ("p - s", "p", "stage 1 holds 4"),
        ("min(m, p - s)", "1", "75 % of the step are idle, and 27 % are possible"),
        ("min(m, p - s)", "m", "holds 8 micro-batches at most, where 4 are enough"),
        ("min(m, p - s)", "m", '("B", s, i)', '("B", s, m - 1 - i)', "stage 0 does B of micro-batches [7, 6, 5"),
        ("in range(m)", "in range(m - 1)", "stage 0 does B of micro-batch 7 never"),
        ("return order", "return [action[::2] for action in order]",
         'an action is ("F" or "B", stage, micro-batch), not (\'F\', 0)'),
        ("    first =", "    s = 0\n    first =", "stage 1 cannot do F of micro-batch 0 on stage 0"),
    ],
    "fitting": [
        (AHEAD, "min(m, p - s)", "stage 0 holds 4 micro-batches at most, and there is room for 2"),
        (AHEAD, "m", "stage 0 holds 8 micro-batches at most, and there is room for 4"),
        (AHEAD, "1", "are idle, and 27 % are possible"),
        ("return orders", "return orders[0]", "return a list of 4 orders, one for each stage"),
    ],
    "loss_share": [
        (SUM, ").nan_to_num() / len(all_targets)", "those with few targets weigh too much: divide by all"),
        (SUM, ") * (targets_bT != -100).sum() / counted", "the share of micro-batch 2 is nan: a mean over no target"),
        (" / counted", "", "that is a sum, not a mean"),
        ("(targets != -100).sum()", "targets.numel()", "targets of -100 do not count"),
        (" / counted", " / counted / len(all_targets)",
         "divided by the number of micro-batches, although the sum was"),
        (") / counted", ").detach() / counted", "the share of micro-batch 0 has no graph"),
        (") / counted", ").item() / counted.item()", "the share of micro-batch 0 should be one number with its graph"),
    ],
    "balance": [
        ("return max(sum(costs[a:b])", "return sum(sum(costs[a:b]) ** 2", "costs [1, 2, 2, 5, 1] on 3 stages"),
        ("min(combinations(range(1, len(costs)), p - 1), key=slowest)", "[len(costs) * k // p for k in range(1, p)]",
         "the slowest stage takes 4, and 3.5 is possible: equal numbers are not equal times"),
        ("return [", "return [len(costs), *[0] * (p - 1)] or [", "leaves a stage without a layer"),
        ("b - a for", "b - a - (a == 0) for", "all layers, should be 6, not 5"),
        ("return [", "return cuts or [", "return a list of 2 numbers of layers, not [4]"),
    ],
}  # fmt: skip
RIGHT = {
    "backward_of": [(BACK, "(y if dy is None else (y * dy).sum()).backward()")],
    "needs": [('[("F", s, i), *gradient_arrives]', '{("F", s, i), *gradient_arrives}')],
    "forward_of": [(LEAF, "arrived.detach().clone().requires_grad_(arrived.is_floating_point())")],
    "one_f_one_b": [("return order", "return tuple(map(list, order))")],
    "fitting": [("return orders", "return tuple(orders)")],
    "loss_share": [('reduction="sum")', 'reduction="none").sum()')],
    "balance": [("key=slowest", "key=lambda cuts: (slowest(cuts), [-cut for cut in cuts])")],
}


class TestAnswers(Answers):
    lesson, checks, rejected, right = "08_pipeline_parallel", checks, REJECTED, RIGHT
