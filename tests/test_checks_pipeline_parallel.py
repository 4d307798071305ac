"""Each check of lesson 08 accepts right answers in other styles and rejects plausible wrong ones by their fault.

The checks communicate nothing, so most are judged in this process; the lesson's own solutions on ranks, too.
"""

from exercises import Answers
from manyhands.checks import pipeline_parallel as checks

BACK, GRADIENT = "torch.autograd.backward(y, dy)", "return x.grad"
LEAF = "arrived.requires_grad_() if arrived.is_floating_point() else arrived"
BEFORE, AFTER = '[("F", s - 1, i)] if s > 0 else []', '[("B", s + 1, i)] if s < p - 1 else []'
FIRST = "ahead(s, p, m)"
B_FIRST = '        order.append(("B", s, i))\n'
AHEAD = "min(m, p - s, room)"
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
        ("*gradient_arrives]", '*gradient_arrives, ("B", s, i - 1)]', "micro-batches do not depend on each other"),
        (BEFORE, '[("F", t, i) for t in range(s)]', "it does not wait for F of micro-batch 0 on stage 0"),
        (BEFORE, '[("F", s, i - 1)] if i > 0 else []', "not wait for F of micro-batch 1 on stage 0: micro-batches"),
        (BEFORE, "[]", "it needs F of micro-batch 0 on stage 0, whose output is its input"),
        (AFTER, '[("B", p - 1, i)] if s < p - 1 else []', "on stage 2: backward comes from the last"),
        (AFTER, '[("F", p - 1, i)] if s < p - 1 else []', "that is implied by another one"),
        ('("F", s, i), ', '("F", p - 1, i), ', "it does not wait for F of micro-batch 0 on stage 2: that is implied"),
        ('("F", s, i), ', 'f"F{s}.{i}", ', 'is an action ("F" or "B", stage, micro-batch), not the text'),
        (BEFORE, '("F", s - 1, i) if s > 0 else []', "stage 1 of 3: each entry is an action"),
        ('("F", s, i), ', 'gradient_arrives, ', "not the list [('B', 1, 0)]"),
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
    "gpipe": [
        ('("F", "B")', '("B", "F")', "stage 0 does B B B B B B B B F F"),
        ("for kind in (\"F\", \"B\") for i in range(m)", "for i in range(m) for kind in (\"F\", \"B\")",
         "stage 0 does F B F B F B F B F B F B F B F B; all forwards come before the first backward"),
        ("range(m)", "range(m - 1)", "stage 0 never does F of micro-batch 7"),
        ("range(m)", "range(1, m + 1)", "stage 0 does F of micro-batch 8; they are 0 to 7"),
        ('("F", "B")', '("F",)', "stage 0 never does B of micro-batch 0"),
        ("for i in range(m)", "for i in (range(m) if s % 2 else range(m)[::-1])", "are idle, and 27 % is possible"),
        ("(kind, s, i)", "(kind, i, s)", "stage 0 cannot do F of micro-batch 0 on stage 1"),
    ],
    "ahead": [
        ("p - s", "p - s - 1", "then the last stage would begin with a backward that has no forward"),
        ("min(m, p - s)", "p - s", "with p = 4 and m = 2, forwards of stage 0 before its first backward should be 2"),
        ("min(m, p - s)", "m", "that is GPipe, which holds them all"),
        ("min(m, p - s)", "min(m, s + 1)", "the first stage waits longest"),
        ("min(m, p - s)", "min(m, p)", "forwards of stage 1 before its first backward should be 3"),
        ("min(m, p - s)", "min(m, p - s) + 0.5", "forwards of stage 0"),
        ("min(m, p - s)", "min(m, 2 * (p - s) - 1)", "should be 4, not 7: the later ones would wait"),
    ],
    "one_f_one_b": [
        (FIRST, f"{FIRST} - 1", "the schedule never ends: stage 0 waits with "),
        (FIRST, f"{FIRST} + 1", "stage 0 holds up to 5 micro-batches, and 4 are enough"),
        (FIRST, "p - s", "with p = 4 and m = 2: stage 0 does F of micro-batch 2; they are 0 to 1"),
        (B_FIRST, "", "following))", f"following))\n{B_FIRST}", "holds up to 5 micro-batches, and 4 are enough"),
        (FIRST, "min(m, p)", "stage 1 holds up to 4"),
        (FIRST, "1", "75 % of the step are idle, and 27 % is possible"),
        (FIRST, "m", "holds up to 8 micro-batches, and 4 are enough"),
        (FIRST, "m", '("B", s, i)', '("B", s, m - 1 - i)', "stage 0 does B of micro-batches [7, 6, 5"),
        ("for i in range(m)", "for i in range(m - 1)", "stage 0 never does B of micro-batch 7"),
        (FIRST, "min(m, s + 1)", "stage 2 holds up to 3 micro-batches, and 2 are enough"),
        (f"range({FIRST})", "range(m)", "does F of micro-batch"),
        ("if following < m:", "if following <= m:", "does F of micro-batch 8; they are 0 to 7"),
        ('("B", s, i)', '("B", s, m - 1 - i)', "they go in order"),
        (FIRST, "min(m, p - s, 2)", "of the step are idle, and 27 % is possible: start forwards earlier"),
        ("return order", "return [action[::2] for action in order]",
         "an action (\"F\" or \"B\", stage, micro-batch), not the tuple ('F', 0)"),
        ("    order = [", "    s = 0\n    order = [", "stage 1 cannot do F of micro-batch 0 on stage 0"),
    ],
    "fitting": [
        (AHEAD, "min(m, p - s)", "stage 0 holds up to 4 micro-batches, and there is room for 2"),
        (AHEAD, "m", "stage 0 holds up to 8 micro-batches, and there is room for 4"),
        (AHEAD, "1", "are idle, and 27 % is possible"),
        ("return orders", "return orders[0]", "return a list of 4 orders, one for each stage"),
        (AHEAD, "min(m, room)", "with p = 4, m = 8 and room for 4: "),
        (AHEAD, "min(p - s, room)", "does F of micro-batch"),
        (AHEAD, "max(1, min(m, p - s, room) - 1)", "start forwards earlier"),
        (AHEAD, "min(m, p - s, room + 1)", "micro-batches, and there is room for"),
        ("return orders", "return orders[::-1]", "stage 0 cannot do F of micro-batch 0 on stage 3"),
    ],
    "fewest": [
        ("sequences % m == 0 and ", "", "that many do not split the sequences equally"),
        ("(m + p - 1)", "m", "(p - 1)/m is the bubble by the work"),
        ("return m\n", "return sequences // m\n", "that is the number of sequences in a micro-batch"),
        ("range(1, sequences + 1)", "range(sequences, 0, -1)", "that is enough, and fewer are"),
        ("return None", "return sequences", "even one sequence in each micro-batch leaves too large a bubble"),
        ("range(1, sequences + 1)", "range(1, sequences)", "what you return should be"),
        ("range(1, sequences + 1)", "range(p, sequences + 1)", "what you return should be"),
        ("(p - 1) / (m + p - 1)", "p / (m + p)", "should be 8, not 10."),
    ],
    "held": [
        ('"BW"', '"BI"', "now.remove", "now.discard", "an I keeps nearly all: count to W"),
        ('elif kind in "BW"', 'elif kind == "B"', "what rank 0 holds at most should be"),
        ("        most = max", "        if kind != 'F':\n            break\n        most = max",
         "an I keeps nearly all: count to W"),
        ("(stage, i)", "i", "now.remove", "now.discard", "Interleaved1F1B, p = 4, m = 8: what rank 0"),
        ("return most", "return len({i for _, _, i in order})", "those are all micro-batches"),
        ("return most", "return len(now)", "should be 11, not 0"),
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
    "gpipe": [
        (
            'for kind in ("F", "B") for i in range(m)',
            'for kind, micros in (("F", range(m)), ("B", range(m)[::-1])) for i in micros',
        ),
    ],
    "ahead": [("min(m, p - s)", "sorted((m, p - s))[0]")],
    "one_f_one_b": [
        ("return order", "return tuple(map(list, order))"),
        (FIRST, "(p - s if p - s < m else m)"),
    ],
    "fitting": [
        ("return orders", "return tuple(orders)"),
        ("ahead = min(m, p - s, room)", "ahead = sorted([m, p - s, room])[0]"),
    ],
    "fewest": [
        ("    return None", "    pass"),
        ("(p - 1) / (m + p - 1) <= most_idle", "1 - m / (m + p - 1) <= most_idle + 1e-12"),
    ],
    "held": [
        ("max(most, len(now))", "len(now) if len(now) > most else most"),
        ("for kind, stage, i in order:", "for kind, *pair in order:\n        stage, i = pair"),
    ],
    "balance": [
        ("key=slowest", "key=lambda cuts: (slowest(cuts), [-cut for cut in cuts])"),
        ("return [b - a", "return [float(b - a) and b - a"),
    ],
}


class TestAnswers(Answers):
    lesson, checks, rejected, right = "08_pipeline_parallel", checks, REJECTED, RIGHT
    around = ("ahead",)
