"""Each check of lesson 08 accepts right answers in other styles and rejects plausible wrong ones by their fault.

The checks communicate nothing, so most are judged in this process; the lesson's own solutions on ranks, too.
"""

import functools
import itertools
import statistics

import numpy as np
import torch
import torch.nn.functional as F
from exercises import Answers
from manyhands.checks import pipeline_parallel as checks

# ---- build A ----


def runs_with_grad_of_ones(x, y, dy):
    y.sum().backward()
    return x.grad


def asks_for_the_input_only(x, y, dy):
    return torch.autograd.grad(y, x, dy)[0] if x.is_floating_point() else None


def keeps_the_graph(x, y, dy):
    y.backward(dy, retain_graph=True)
    return x.grad


def returns_nothing(x, y, dy):
    y.backward(dy)


def returns_x(x, y, dy):
    y.backward(dy)
    return x


def returns_dy(x, y, dy):
    y.backward(dy)
    return dy


def doubles(x, y, dy):
    y.backward(dy, retain_graph=True)
    y.backward(dy)
    return x.grad


def ids_need_one_too(x, y, dy):
    y.backward(dy)
    return x.grad if x.grad is not None else torch.zeros(x.shape)


def dy_always_there(x, y, dy):
    (y * dy).sum().backward()
    return x.grad


def scales_the_gradient(x, y, dy):
    y.backward(dy)
    return x.grad / 8


def by_a_product(x, y, dy):  # right
    (y if dy is None else (y * dy).sum()).backward()
    return x.grad


def by_grad_of_all(x, y, dy):  # right
    y.backward(gradient=dy)
    return None if x.grad is None else x.grad.clone()


# ---- build B ----


def both_ways(action, p):
    kind, s, i = action
    return [("F", s - 1, i)] * (s > 0) if kind == "F" else [("B", s + 1, i)] * (s < p - 1)


def no_first_stage(action, p):
    kind, s, i = action
    return [("F", s - 1, i)] if kind == "F" else [("F", s, i)] + [("B", s + 1, i)] * (s < p - 1)


def no_last_stage(action, p):
    kind, s, i = action
    return [("F", s - 1, i)] * (s > 0) if kind == "F" else [("F", s, i), ("B", s + 1, i)]


def wrong_way_back(action, p):
    kind, s, i = action
    if kind == "F":
        return [("F", s - 1, i)] * (s > 0)
    return [("F", s, i)] + [("B", s - 1, i)] * (s > 0)


def the_one_before(action, p):
    kind, s, i = action
    return right_needs(action, p) + [(kind, s, i - 1)] * (i > 0)


def all_stages_before(action, p):
    kind, s, i = action
    if kind == "F":
        return [("F", t, i) for t in range(s)]
    return right_needs(action, p)


def right_needs(action, p):
    kind, s, i = action
    if kind == "F":
        return [("F", s - 1, i)] * (s > 0)
    return [("F", s, i)] + [("B", s + 1, i)] * (s < p - 1)


def as_a_set(action, p):  # right
    return set(right_needs(action, p))


def in_another_order(action, p):  # right
    return tuple([kind, np.int64(s), i] for kind, s, i in right_needs(action, p)[::-1])


# ---- build C ----


def forward_with(leaf=True, divide=lambda loss, m: loss / m, mean=True, elsewhere=lambda y, m: y, swap=False):
    def answer(stage, arrived, targets_bT, m):
        x = arrived.requires_grad_() if leaf and arrived.is_floating_point() else arrived
        y = stage(x)
        if targets_bT is None:
            y = elsewhere(y, m)
        else:
            kind = "mean" if mean else "sum"
            y = divide(F.cross_entropy(y.flatten(0, 1), targets_bT.flatten(), reduction=kind), m)
        return (y, x) if swap else (x, y)

    return answer


def only_y(stage, arrived, targets_bT, m):
    return forward_with()(stage, arrived, targets_bT, m)[1]


def not_a_leaf(stage, arrived, targets_bT, m):
    x = arrived.requires_grad_() * 1 if arrived.is_floating_point() else arrived
    return x, forward_with(leaf=False)(stage, x, targets_bT, m)[1]


def ids_with_gradient(stage, arrived, targets_bT, m):
    return forward_with()(stage, arrived.requires_grad_(), targets_bT, m)


def a_new_leaf(stage, arrived, targets_bT, m):  # right
    x = arrived.detach().clone().requires_grad_(arrived.is_floating_point())
    return [x, forward_with()(stage, x, targets_bT, m)[1]]


def by_log_softmax(stage, arrived, targets_bT, m):  # right
    x, y = forward_with()(stage, arrived, None, m)
    if targets_bT is None:
        return x, y
    picked = y.log_softmax(-1).gather(-1, targets_bT.unsqueeze(-1))
    return x, -picked.sum() / (targets_bT.numel() * m)


def forward_beside(stage, arrived, targets_bT, m):
    x = arrived.clone().requires_grad_(arrived.is_floating_point())  # the stage computes on another tensor
    return x, forward_with(leaf=False)(stage, arrived, targets_bT, m)[1]


FORWARDS = {
    "beside": (forward_beside, "backward from y does not arrive at x"),
    "mean_not_divided": (forward_with(divide=lambda loss, m: loss), "that is the micro-batch's mean; 4 of them add up"),
    "divided_twice": (forward_with(divide=lambda loss, m: loss / m / m), "it was divided by m twice"),
    "a_sum": (forward_with(mean=False), "that is a sum over positions, divided by m"),
    "detached": (forward_with(divide=lambda loss, m: (loss / m).detach()), "on the last stage y has no graph"),
    "no_leaf": (forward_with(leaf=False), "x does not require a gradient"),
    "divides_everywhere": (forward_with(elsewhere=lambda y, m: y / m), "only the loss is divided, on the last stage"),
    "sends_it_at_once": (forward_with(elsewhere=lambda y, m: y.detach()), "y has no graph, and backward needs it"),
    "swapped": (forward_with(swap=True), "x should have the shape [5, 6], not [5, 3]: it is what has arrived"),
    "only_y": (only_y, "too many values to unpack (expected 2))"),
    "not_a_leaf": (not_a_leaf, "x is not a leaf"),
    "ids_with_gradient": (ids_with_gradient, "RuntimeError: only Tensors of floating point"),
}

# ---- build D ----


def one_with(ahead=lambda s, p, m: min(m, p - s), backward_first=True):
    def answer(s, p, m):
        first = ahead(s, p, m)
        order = [("F", s, i) for i in range(first)]
        for i in range(m):
            both = [("B", s, i)], [("F", s, i + first)] * (i + first < m)
            order += sum(both if backward_first else both[::-1], [])
        return order

    return answer


def like_gpipe(s, p, m):
    return [(kind, s, i) for kind in "FB" for i in range(m)]


def last_come_first_served(s, p, m):
    return [("F", s, i) for i in range(m)] + [("B", s, i) for i in reversed(range(m))]


def forgets_the_drain(s, p, m):
    return one_with()(s, p, m)[: m + m - 1]


def without_stages(s, p, m):
    return [action[::2] for action in one_with()(s, p, m)]


def always_stage_0(s, p, m):
    return one_with()(0, p, m)


def by_counting(s, p, m):  # right
    forwards, backwards, order = iter(range(m)), iter(range(m)), []
    warm_up = m if m < p - s else p - s
    for _ in range(warm_up):
        order.append(["F", s, next(forwards)])
    for i in backwards:
        order.append(["B", s, i])
        order += [["F", s, j] for j in [next(forwards, None)] if j is not None]
    return order


def as_an_iterator_of_tuples(s, p, m):  # right
    return tuple(map(tuple, by_counting(s, p, m)))


ONES = {
    "one_forward_too_few": (one_with(lambda s, p, m: min(m, p - s - 1)), "the schedule never ends: "),
    "one_forward_too_many": (one_with(lambda s, p, m: min(m, p - s + 1)),
            "begins with 5 forwards and holds 5 micro-batches"),
    "more_forwards_than_there_are": (one_with(lambda s, p, m: p - s),
            "with p = 4 and m = 2: stage 0 does F of micro-batch 2; they are 0 to 1"),
    "forward_before_backward": (one_with(backward_first=False), "holds 5 micro-batches at most, where 4 are enough"),
    "the_same_on_all": (one_with(lambda s, p, m: min(m, p)), "stage 1 begins with 4 forwards and holds 4"),
    "always_one": (one_with(lambda s, p, m: 1), "of which 75 % are idle; 27 % are possible"),
    "like_gpipe": (like_gpipe, "begins with 8 forwards and holds 8 micro-batches at most, where 4 are enough"),
    "last_come_first_served": (last_come_first_served, "stage 0 does B of micro-batches [7, 6, 5"),
    "forgets_the_drain": (forgets_the_drain, "stage 0 does B of micro-batch 7 never"),
    "without_stages": (without_stages, 'an action is ("F" or "B", stage, micro-batch), not [\'F\', 0]'),
    "always_stage_0": (always_stage_0, "stage 1 cannot do F of micro-batch 0 on stage 0"),
}  # fmt: skip

# ---- exercise 1 ----


def fits_with(ahead):
    return lambda p, m, room: [one_with(functools.partial(ahead, room))(s, p, m) for s in range(p)]


def in_groups(p, m, room):
    return [
        [(kind, s, i) for k in range(0, m, room) for kind in "FB" for i in range(k, min(k + room, m))] for s in range(p)
    ]


def fits_as_arrays(p, m, room):  # right
    return tuple(fits_with(lambda room, s, p, m: min(m, p - s, room))(p, m, room))


# ---- exercise 2 ----


def ce(logits, targets, reduction="mean"):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


def counted(all_targets):
    return sum((targets != -100).sum() for targets in all_targets)


def by_weights(logits, targets, all_targets):  # right
    here = (targets != -100).sum()
    return ce(logits, targets) * here / counted(all_targets) if here else 0 * logits.sum()


def by_cat(logits, targets, all_targets):  # right
    n = int((torch.cat(all_targets) != -100).sum())
    return ce(logits, targets, "none").sum() / n


SHARES = {
    "mean_of_means": (lambda a, b, c: ce(a, b).nan_to_num() / len(c),
                      "the gradients of some micro-batches weigh too much"),
    "mean_over_none": (lambda a, b, c: ce(a, b) * (b != -100).sum() / counted(c),
                       "micro-batch 2 has 0 targets that count"),
    "a_sum": (lambda a, b, c: ce(a, b, "sum"), "that is a sum, not a mean"),
    "all_positions": (lambda a, b, c: ce(a, b, "sum") / sum(t.numel() for t in c), "targets of -100 do not count"),
    "divided_twice": (lambda a, b, c: ce(a, b, "sum") / counted(c) / len(c),
                      "divided by the number of micro-batches, although the sum was"),
    "without_graph": (lambda a, b, c: (ce(a, b, "sum") / counted(c)).detach(), "the share has no graph"),
    "a_float": (lambda a, b, c: ce(a, b, "sum").item(), "return one number with its graph"),
}  # fmt: skip

# ---- exercise 3 ----


def even(costs, p):
    n = len(costs)
    return [n // p + (k < n % p) for k in range(p)]


def up_to_the_mean(costs, p):
    counts, total, mean = [0], 0, sum(costs) / p
    for k, cost in enumerate(costs):
        left = len(costs) - k
        if counts[-1] and total + cost > mean and len(counts) < p and left >= p - len(counts):
            counts, total = [*counts, 0], 0
        counts[-1] += 1
        total += cost
    while len(counts) < p:
        counts = [*counts[:-1], counts[-1] - 1, 1]
    return counts


def by_limits(costs, p):  # right
    for limit in sorted({sum(costs[a:b]) for a in range(len(costs)) for b in range(a + 1, len(costs) + 1)}):
        counts, total = [0], 0
        for cost in costs:
            if total + cost > limit:
                counts, total = [*counts, 0], 0
            counts[-1], total = counts[-1] + 1, total + cost
        if len(counts) <= p and max(costs) <= limit:
            while len(counts) < p:
                k = max(range(len(counts)), key=counts.__getitem__)
                counts[k : k + 1] = [counts[k] - 1, 1]
            return counts
    return None


def by_recursion(costs, p):  # right
    @functools.cache
    def best(start, p):
        if p == 1:
            return sum(costs[start:]), (len(costs) - start,)
        return min(
            (max(sum(costs[start:end]), best(end, p - 1)[0]), (end - start, *best(end, p - 1)[1]))
            for end in range(start + 1, len(costs) - p + 2)
        )

    return np.array(best(0, p)[1])


def least_variance(costs, p):
    inner = itertools.combinations(range(1, len(costs)), p - 1)
    ends = [(0, *cuts, len(costs)) for cuts in inner]
    best = min(ends, key=lambda cut: statistics.pvariance([sum(costs[a:b]) for a, b in itertools.pairwise(cut)]))
    return [b - a for a, b in itertools.pairwise(best)]


BALANCES = {
    "least_variance": (least_variance, "costs [1, 2, 2, 5, 1] on 3 stages"),
    "equal_numbers": (even, "the slowest stage takes 4, and 3.5 is possible: equal numbers are not equal times"),
    "up_to_the_mean": (up_to_the_mean, "is possible"),
    "an_empty_stage": (lambda costs, p: [len(costs), *[0] * (p - 1)], "leaves a stage without a layer"),
    "one_too_few": (lambda costs, p: [count - (k == 0) for k, count in enumerate(by_limits(costs, p))],
                    "all layers, should be 6, not 5"),
    "the_cuts": (lambda costs, p: np.cumsum(by_limits(costs, p))[:-1], "return a list of 2 numbers of layers, not [4]"),
    "the_times": (lambda costs, p: [3.5, 3.0], "return a list of 2 numbers of layers"),
}  # fmt: skip

REJECTED = {
    "backward_of": {
        runs_with_grad_of_ones: "y's gradient is dy, not ones",
        asks_for_the_input_only: "has no gradient: backward adds to `grad`",
        keeps_the_graph: "no retain_graph",
        returns_nothing: "nothing came back; the stage before needs the gradient of x",
        returns_x: "that is x itself",
        returns_dy: "that is dy, the gradient of this stage's output",
        doubles: "what came is 2 times that",
        ids_need_one_too: "x holds ids, which have no gradient: return None",
        dy_always_there: "TypeError",
        scales_the_gradient: "what came is 0.125 times that",
    },
    "needs": {
        both_ways: "it needs F of micro-batch 0 on stage 0, which has made the activations that it uses",
        no_first_stage: "there is no stage -1",
        no_last_stage: "there is no stage 3; the stages are 0 to 2",
        wrong_way_back: "it needs B of micro-batch 0 on stage 1, which sends the gradient of its output",
        the_one_before: "micro-batches know nothing of each other",
        all_stages_before: "it does not wait for F of micro-batch 0 on stage 0",
        "needs names": (lambda action, p: [f"{kind}{s}.{i}" for kind, s, i in right_needs(action, p)],
            'an action is ("F" or "B", stage, micro-batch)'),
    },
    "forward_of": FORWARDS,
    "one_f_one_b": ONES,
    "fitting": {
        fits_with(
            lambda room, s, p, m: min(m, p - s)
        ): "stage 0 holds 4 micro-batches at most, and there is room for 2",
        fits_with(lambda room, s, p, m: m): "stage 0 holds 8 micro-batches at most, and there is room for 4",
        "one at a time": (lambda p, m, room: [[(kind, s, i) for i in range(m) for kind in "FB"] for s in range(p)],
            "are idle; 27 % are possible"),
        in_groups: "are idle; 27 % are possible",
        "first stage only": (lambda p, m, room: fits_with(lambda room, s, p, m: min(m, p - s, room))(p, m, room)[0],
            "return a list of 4 orders, one for each stage"),
    },
    "loss_share": SHARES,
    "balance": BALANCES,
}  # fmt: skip
RIGHT = {
    "backward_of": [by_a_product, by_grad_of_all],
    "needs": [as_a_set, in_another_order],
    "forward_of": [a_new_leaf, by_log_softmax],
    "one_f_one_b": [by_counting, as_an_iterator_of_tuples],
    "fitting": [fits_as_arrays],
    "loss_share": [by_weights, by_cat],
    "balance": [by_limits, by_recursion],
}


class TestAnswers(Answers):
    lesson, checks, rejected, right = "08_pipeline_parallel", checks, REJECTED, RIGHT
