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
SLOWEST = "return max(sum(costs[a:b]) for a, b in zip((0, *cuts), (*cuts, len(costs)), strict=True))"
REJECTED = {
    "backward_of": [
        ("backward(y, dy)", "backward(y.sum())", "y's gradient is dy, not ones"),
        (f"{BACK}\n    {GRADIENT}", "return torch.autograd.grad(y, x, dy)[0]",
         "has no gradient: run backward, which adds to `grad`"),
        ("(y, dy)", "(y, dy, retain_graph=True)", "no retain_graph"),
        (GRADIENT, "x.grad", "what came back should be the gradient of x, not None"),
        (GRADIENT, "return x", "that is x itself"),
        (GRADIENT, "return dy", "that is dy, the gradient of this stage's output"),
        (GRADIENT, "return x.grad / 8", "what came is 0.125 times that"),
        (BACK, f"torch.autograd.backward(y, dy, retain_graph=True)\n    {BACK}", "what came is 2 times that"),
        (GRADIENT, "return torch.zeros(x.shape) if x.grad is None else x.grad",
         "x holds ids, which have no gradient: return None"),
        ("backward(y, dy)", "backward((y * dy).sum())", "TypeError"),
        (BACK, f"if dy is None:\n        return None\n    {BACK}", "has no gradient: run backward"),
        (BACK, f"if not x.is_floating_point():\n        return None\n    {BACK}",
         "the weight 0.weight has no gradient on the first stage"),
        ("(y, dy)", "(y, dy, retain_graph=dy is None)", "no retain_graph"),
        (GRADIENT, "return x.grad.clone()", "your code raised AttributeError"),
        (GRADIENT, "return x.grad.sum(0)", "what came back should have the shape [5, 6], not [6]"),
    ],
    "needs": [
        ('("F", s, i), *', "*", "it needs F of micro-batch 0 on stage 0, which has made the activations that it uses"),
        (" if s > 0 else []", "", "there is no stage -1"),
        (" if s < p - 1 else []", "", "there is no stage 3; the stages are 0 to 2"),
        (AFTER, '[("B", s - 1, i)] if s > 0 else []',
         "it needs B of micro-batch 0 on stage 1, which sends the gradient of its output"),
        ("*gradient_arrives]", '*gradient_arrives, ("B", s, i - 1)]', "micro-batches know nothing of each other"),
        (BEFORE, '[("F", t, i) for t in range(s)]', "it does not wait for F of micro-batch 0 on stage 0"),
        (BEFORE, '[("F", s, i - 1)] if i > 0 else []', "not wait for F of micro-batch 1 on stage 0: micro-batches"),
        (BEFORE, "[]", "it needs F of micro-batch 0 on stage 0, whose output is its input"),
        (AFTER, '[("B", p - 1, i)] if s < p - 1 else []', "on stage 2: backward comes from the last"),
        (AFTER, '[("F", p - 1, i)] if s < p - 1 else []', "that is implied by another one"),
        ('("F", s, i), ', '("F", p - 1, i), ', "it does not wait for F of micro-batch 0 on stage 2: that is implied"),
        ('("F", s, i), ', 'f"F{s}.{i}", ', 'an action is ("F" or "B", stage, micro-batch)'),
    ],
    "forward_of": [
        ("stage(x)", "stage(arrived.detach())", "backward from y does not arrive at x"),
        (" / m", "", "of them add up in backward, so it is to be divided by m"),
        (" / m", " / m / m", "it was divided by m twice"),
        ("flatten()) / m", 'flatten(), reduction="sum")', "that is a sum over positions; their mean"),
        ("flatten())", 'flatten(), reduction="sum")', "that is a sum over positions, divided by m"),
        (" / m", " / 4", "on the last stage y should be"),
        (" / m", " / len(arrived)", "on the last stage y should be"),
        (" / m", " * m", "on the last stage y should be"),
        ("stage(x)", "stage((x + x.detach()) / 2 if x.requires_grad else x)",
         "after backward x.grad should be the gradient of x: what came is 0.5 times"),
        ("y = stage(x)", "y = stage(x)\n    if x.requires_grad:\n        x.register_hook(lambda dx: dx / m)",
         "y is right, but after backward x.grad should be the gradient of x"),
        (" / m", " / m\n        y = y.detach()", "on the last stage y, the loss, has no graph"),
        (LEAF, "arrived", "x does not require a gradient"),
        (LEAF, "arrived.requires_grad_() * 1 if arrived.is_floating_point() else arrived", "x is not a leaf"),
        (LEAF, "arrived.requires_grad_()", "RuntimeError: only Tensors of floating point"),
        ("stage(x)", "stage(x) / m", "only the loss is divided, on the last stage"),
        ("stage(x)", "stage(x).detach()", "y has no graph, and backward needs it"),
        ("x, y", "y, x", "x should have the shape [5, 6], not [5, 3]: it is what has arrived"),
    ],
    "one_f_one_b": [
        ("p - s", "p - s - 1", "the schedule never ends: stage 0 waits with "),
        ("p - s", "p - s + 1", "stage 0 holds 5 micro-batches at most, where 4 are enough"),
        ("min(m, p - s)", "p - s", "with p = 4 and m = 2: stage 0 does F of micro-batch 2; they are 0 to 1"),
        (B_FIRST, "", "i + first))", f"i + first))\n{B_FIRST}", "holds 5 micro-batches at most, where 4 are enough"),
        ("p - s", "p", "stage 1 holds 4"),
        ("min(m, p - s)", "1", "75 % of the step are idle, and 27 % are possible"),
        ("min(m, p - s)", "m", "holds 8 micro-batches at most, where 4 are enough"),
        ("min(m, p - s)", "m", '("B", s, i)', '("B", s, m - 1 - i)', "stage 0 does B of micro-batches [7, 6, 5"),
        ("in range(m)", "in range(m - 1)", "stage 0 never does B of micro-batch 7"),
        ("min(m, p - s)", "min(m, s + 1)", "stage 2 holds 3 micro-batches at most, where 2 are enough"),
        ("range(first)", "range(m)", "does F of micro-batch"),
        ("if i + first < m:", "if i + first <= m:", "does F of micro-batch 8; they are 0 to 7"),
        ('("B", s, i)', '("B", s, m - 1 - i)', "they go in order"),
        ("min(m, p - s)", "min(m, p - s, 2)", "of the step are idle, and 27 % are possible: start forwards earlier"),
        ("return order", "return [action[::2] for action in order]",
         'an action is ("F" or "B", stage, micro-batch), not (\'F\', 0)'),
        ("    first =", "    s = 0\n    first =", "stage 1 cannot do F of micro-batch 0 on stage 0"),
    ],
    "fitting": [
        (AHEAD, "min(m, p - s)", "stage 0 holds 4 micro-batches at most, and there is room for 2"),
        (AHEAD, "m", "stage 0 holds 8 micro-batches at most, and there is room for 4"),
        (AHEAD, "1", "are idle, and 27 % are possible"),
        ("return orders", "return orders[0]", "return a list of 4 orders, one for each stage"),
        (AHEAD, "min(m, room)", "with p = 4, m = 8 and room for 4: "),
        (AHEAD, "min(p - s, room)", "does F of micro-batch"),
        (AHEAD, "max(1, min(m, p - s, room) - 1)", "start forwards earlier"),
        (AHEAD, "min(m, p - s, room + 1)", "micro-batches at most, and there is room for"),
        ("return orders", "return orders[::-1]", "stage 0 cannot do F of micro-batch 0 on stage 3"),
    ],
    "loss_share": [
        (SUM, ").nan_to_num() / len(all_targets)", "those with few targets weigh too much: divide by all"),
        (SUM, ") * (targets_bT != -100).sum() / counted", "the share of micro-batch 2 is nan: a mean over no target"),
        (" / counted", "", "that is a sum, not a mean"),
        ("(targets != -100).sum()", "targets.numel()", "targets of -100 do not count"),
        (" / counted", " / counted / len(all_targets)",
         "divided by the number of micro-batches, although the sum was"),
        ("(targets != -100).sum()", "(targets > 0).sum()", "the gradient of all logits should be that of one mean"),
        (SUM, ").nan_to_num() * targets_bT.numel() / counted", "the gradient of all logits should be that of one mean"),
        (" / counted", " / counted * len(all_targets)", "the gradient of all logits should be that of one mean"),
        ("for targets in all_targets)", "for targets in all_targets[:2])", "the gradient of all logits should be"),
        (SUM, ', reduction="sum") / max(1, (targets_bT != -100).sum()) / len(all_targets)', "those with few targets"),
        (") / counted", ").detach() / counted", "the share of micro-batch 0 has no graph"),
        (") / counted", ").item() / counted.item()", "the share of micro-batch 0 should be one number with its graph"),
    ],
    "balance": [
        ("return max(sum(costs[a:b])", "return sum(sum(costs[a:b]) ** 2", "that is the least variance; only"),
        ("return max(sum(costs[a:b])", "return -min(sum(costs[a:b])", "the slowest stage takes"),
        (SLOWEST, SLOWEST.replace("return max", "each = sorted") + "\n        return each[-1] - each[0]",
         "the slowest stage takes"),
        (SLOWEST, SLOWEST.replace("return max", "return sum").replace("sum(costs[a:b]) for",
         "abs(sum(costs[a:b]) - sum(costs) / p) for"), "the slowest stage takes"),
        ("key=slowest", "key=lambda cuts: max(b - a for a, b in zip((0, *cuts), (*cuts, len(costs))))", "is possible"),
        ("min(combinations(range(1, len(costs)), p - 1), key=slowest)", "[len(costs) * k // p for k in range(1, p)]",
         "the slowest stage takes 4, and 3.5 is possible: equal numbers are not equal times"),
        ("return [", "return [len(costs), *[0] * (p - 1)] or [", "leaves a stage without a layer"),
        ("b - a for", "float(b - a) for", "numbers of layers are integers, not ["),
        ("b - a for", "b - a - (a == 0) for", "all layers, should be 6, not 5"),
        ("return [", "return cuts or [", "return a list of 2 numbers of layers, not [4]"),
    ],
}  # fmt: skip
RIGHT = {
    "backward_of": [(BACK, "(y if dy is None else (y * dy).sum()).backward()"), (BACK, "y.backward(dy)")],
    "needs": [
        ('[("F", s, i), *gradient_arrives]', '{("F", s, i), *gradient_arrives}'),
        ('[("B", s + 1, i)]', '[["B", s + 1, i]]'),
    ],
    "forward_of": [
        (LEAF, "arrived.detach().clone().requires_grad_(arrived.is_floating_point())"),
        (" / m", " * (1 / m)"),
    ],
    "one_f_one_b": [
        ("return order", "return tuple(map(list, order))"),
        ("first = min(m, p - s)", "first = p - s if p - s < m else m"),
    ],
    "fitting": [
        ("return orders", "return tuple(orders)"),
        ("ahead = min(m, p - s, room)", "ahead = sorted([m, p - s, room])[0]"),
    ],
    "loss_share": [('reduction="sum")', 'reduction="none").sum()'), ("sum((targets != -100)", "sum((targets >= 0)")],
    "balance": [
        ("key=slowest", "key=lambda cuts: (slowest(cuts), [-cut for cut in cuts])"),
        ("return [b - a", "return [float(b - a) and b - a"),
    ],
}


class TestAnswers(Answers):
    lesson, checks, rejected, right = "08_pipeline_parallel", checks, REJECTED, RIGHT
