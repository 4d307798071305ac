"""Checks of lesson 08: backward across a cut, who waits for whom, orders of stages, shares of a loss, balanced stages.

Orders are judged by simulation (`predict.pipeline_schedules`): every action once, nobody waits in a circle, so many
micro-batches in flight, so much idle time. Any order that keeps these is right, however it was made.
"""

import operator
from itertools import combinations

import torch
import torch.nn.functional as F
from torch import nn

from manyhands.checks import Wrong, exercise
from manyhands.checks.values import plain, shown
from manyhands.predict.pipeline_schedules import bubble_formula, in_flight, named, orders_of, simulate
from manyhands.predict.pipeline_schedules import needs as needs_of

CLOSE = 1e-10


@exercise("A", "backward across the cut")
def backward_of(answer, ranks=None):
    """`answer(x, y, dy)` adds the gradients of a stage's weights and returns that of its input; the graph is freed."""
    _judge_middle(answer)
    _judge_last(answer)
    _judge_first(answer)


@exercise("B", "who waits for whom")
def needs(answer, ranks=None):
    """`answer(action, p)` lists what must be done before the action begins."""
    for p in (3, 1, 4):
        for s in range(p):
            for kind in "FB":
                for i in (0, 2):
                    _judge_needs(answer((kind, s, i), p), (kind, s, i), p)


@exercise("C", "forward of one micro-batch")
def forward_of(answer, ranks=None):
    """`answer(stage, arrived, targets, m)` is (x, y): a leaf, and the stage's output or its share of the mean loss."""
    stage, m = _stage(), 4
    arrived, _ = _micro(0)
    x, y = _pair(answer(stage, arrived.clone(), None, m))
    _judge_leaf(x, arrived)
    _judge_output(y, stage(arrived), "on a stage in the middle")
    table = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 3)).double()
    ids = torch.tensor([[1, 3, 3]])
    x, y = _pair(answer(table, ids.clone(), None, m))
    if not isinstance(x, torch.Tensor) or not torch.equal(x, ids):
        raise Wrong(f"on the first stage x should be the ids as they arrived, not {shown(x)}")
    _judge_output(y, table(ids), "on the first stage")
    _judge_last_forward(answer, m)


@exercise("D", "1F1B's order")
def one_f_one_b(answer, ranks=None):
    """`answer(s, p, m)` is the order of stage s: as little in flight as 1F1B, and no more idle time."""
    for p, m in ((4, 8), (4, 2), (3, 7), (2, 4), (1, 3), (5, 5)):
        case = f"with p = {p} and m = {m}"
        orders = [_read_order(answer(s, p, m), s, p, m, case) for s in range(p)]
        for s, order in enumerate(orders):
            _judge_own_order(order, s, case)
            _judge_held(in_flight(order), min(m, p - s), s, case, _first_forwards(order))
        _judge_bubble(orders, p, m, bubble_formula("1F1B", p, m), case)


@exercise(1, "a schedule for less memory")
def fitting(answer, ranks=None):
    """`answer(p, m, room)` is the orders of all stages: at most `room` in flight, idle as little as that allows."""
    for p, m, room in ((4, 8, 4), (4, 8, 2), (4, 8, 1), (3, 6, 2), (4, 6, 3), (2, 5, 8)):
        case = f"with p = {p}, m = {m} and room for {room}"
        given = _listed(answer(p, m, room))
        if not isinstance(given, (list, tuple)) or len(given) != p:
            raise Wrong(f"{case}: return a list of {p} orders, one for each stage, not {shown(given)}")
        orders = [_read_order(order, s, p, m, case) for s, order in enumerate(given)]
        for s, order in enumerate(orders):
            if in_flight(order) > room:
                raise Wrong(
                    f"{case}: stage {s} holds {in_flight(order)} micro-batches at most, and there is room for {room}"
                )
        best = simulate([_capped(s, p, m, room) for s in range(p)]).bubble
        _judge_bubble(orders, p, m, best, case)


@exercise(2, "a share of the loss")
def loss_share(answer, ranks=None):
    """`answer(logits, targets, all_targets)`: what a micro-batch adds to the mean over all targets that count."""
    draw = torch.Generator().manual_seed(8)
    all_targets = [torch.randint(5, (2, 4), generator=draw) for _ in range(4)]
    for targets, without in zip(all_targets, (0, 3, 8, 5), strict=True):  # how many do not count
        targets.view(-1)[:without] = -100
    logits = [torch.randn(2, 4, 5, generator=draw, dtype=torch.float64) for _ in all_targets]
    whole = torch.cat(logits).requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), torch.cat(all_targets).flatten())
    expected.backward()
    total, found = 0.0, []
    for i, (part, targets) in enumerate(zip(logits, all_targets, strict=True)):
        leaf = part.clone().requires_grad_()
        share = answer(leaf, targets.clone(), [t.clone() for t in all_targets])
        _judge_share(share, i, (targets != -100).sum().item())
        share.backward()
        total += share.item()
        found.append(torch.zeros_like(part) if leaf.grad is None else leaf.grad)
    _judge_shares(torch.cat(found), whole.grad, total, expected.item(), all_targets)


@exercise(3, "balance uneven layers")
def balance(answer, ranks=None):
    """`answer(costs, p)` says how many consecutive layers each stage gets; the slowest is as fast as can be."""
    cases = (
        ([0.5, 1, 1, 1, 1, 2], 2),
        ([0.25, 1, 1, 1, 1, 1, 1, 1, 1, 4], 4),
        ([3, 1, 1, 1, 1, 1], 3),
        ([1, 1, 5, 1, 1, 1, 1], 3),
        ([2, 2, 2, 2], 4),
        ([1, 2, 3], 1),
    )
    for costs, p in cases:
        given = _counts(answer(list(costs), p), costs, p)
        slowest, best = _slowest(costs, given), _fastest(costs, p)
        if slowest > best + CLOSE:
            even = f" (for layers in equal numbers it is {_slowest(costs, _even(len(costs), p)):g})"
            raise Wrong(
                f"costs {costs} on {p} stages: with {given} layers the slowest stage takes {slowest:g}, and {best:g} is "
                f"possible{even if given != _even(len(costs), p) else ': equal numbers are not equal times'}"
            )


# ---- build A ----


def _stage(seed=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def _micro(i):
    draw = torch.Generator().manual_seed(80 + i)
    return torch.randn(5, 6, generator=draw, dtype=torch.float64), torch.randn(
        5, 3, generator=draw, dtype=torch.float64
    )


def _judge_middle(answer):
    """A stage in the middle, two micro-batches one after the other."""
    stage, reference = _stage(), _stage()
    for i in range(2):
        (x, dy), (x_wanted, _) = _micro(i), _micro(i)
        x.requires_grad_()
        x_wanted.requires_grad_()
        (reference(x_wanted) * dy).sum().backward()
        y, before = stage(x), dy.clone()
        given = answer(x, y, dy)
        if not torch.equal(dy, before):
            raise Wrong("dy was changed; it belongs to the stage after this one")
        _judge_weights(stage, reference, i)
        _judge_input_gradient(given, x_wanted.grad, x, y, dy)
        _judge_freed(y, dy)


def _judge_weights(stage, reference, i):
    for (name, w), right in zip(stage.named_parameters(), reference.parameters(), strict=True):
        if w.grad is None:
            raise Wrong(
                f"the weight {name} has no gradient: backward adds to `grad`, torch.autograd.grad only returns what you ask for"
            )
        if not torch.allclose(w.grad, right.grad, rtol=0, atol=CLOSE):
            also = " after the second micro-batch: gradients of micro-batches add up" if i else ""
            ratio = (w.grad.norm() / right.grad.norm()).item()
            raise Wrong(
                f"the gradient of {name} is wrong{also}; it is {ratio:.3g} times as long. y's gradient is dy, not ones, and "
                "backward runs once"
            )


def _judge_input_gradient(given, wanted, x, y, dy):
    if given is None:
        raise Wrong("nothing came back; the stage before needs the gradient of x")
    if not isinstance(given, torch.Tensor):
        raise Wrong(f"return a tensor, the gradient of x, not {shown(given)}")
    if given is x or (given.shape == x.shape and torch.equal(given, x)):
        raise Wrong("that is x itself; the stage before needs the gradient of the loss with respect to x")
    if given.shape == dy.shape and torch.equal(given, dy):
        raise Wrong("that is dy, the gradient of this stage's output; the stage before needs that of its input")
    if given.shape != wanted.shape:
        raise Wrong(f"what came back has the shape {list(given.shape)}, and x has {list(wanted.shape)}")
    if given.requires_grad:
        raise Wrong("what came back has a graph of its own; a message is only numbers")
    if not torch.allclose(given, wanted, rtol=0, atol=CLOSE):
        ratio = (given.norm() / wanted.norm()).item()
        raise Wrong(f"the gradient of x is wrong; it is {ratio:.3g} times as long as it should be")


def _judge_freed(y, dy):
    try:
        torch.autograd.backward(y, dy)
    except RuntimeError:
        return
    raise Wrong(
        "all gradients are right, but the graph is still there, and with it the activations of every micro-batch: no "
        "retain_graph"
    )


def _judge_last(answer):
    stage, reference = _stage(), _stage()
    (x, target), (x_wanted, _) = _micro(5), _micro(5)
    x.requires_grad_()
    x_wanted.requires_grad_()
    F.mse_loss(reference(x_wanted), target).backward()
    given = answer(x, F.mse_loss(stage(x), target), None)
    _judge_weights(stage, reference, 0)
    if given is None or not torch.allclose(given, x_wanted.grad, rtol=0, atol=CLOSE):
        raise Wrong("on the last stage, where dy is None and y is the loss, what comes back is not the gradient of x")


def _judge_first(answer):
    torch.manual_seed(4)
    table = nn.Embedding(7, 3).double()
    ids, dy = torch.tensor([1, 3, 3]), torch.ones(3, 3, dtype=torch.float64)
    given = answer(ids, table(ids), dy)
    if given is not None:
        raise Wrong(f"on the first stage x holds ids, which have no gradient: return None, not {shown(given)}")
    if table.weight.grad is None or table.weight.grad[3].sum().item() != 6.0:
        raise Wrong("on the first stage the embedding's gradient is not right: also there backward has to run")


# ---- build C ----


def _pair(given):
    if isinstance(given, (tuple, list)) and len(given) == 2:
        return given
    raise Wrong(f"return two things, x and y, not {shown(given)}")


def _judge_leaf(x, arrived):
    if not isinstance(x, torch.Tensor) or not torch.equal(x.detach(), arrived):
        raise Wrong(f"x should be what has arrived, not {shown(x)}")
    if not x.requires_grad:
        raise Wrong("your x does not require a gradient, so backward will find none to send to the stage before")
    if not x.is_leaf:
        raise Wrong("x is not a leaf, so its gradient will not be kept: the graph of this stage begins at x")


def _judge_output(y, wanted, where):
    if not isinstance(y, torch.Tensor) or y.shape != wanted.shape:
        raise Wrong(f"{where} y should be the stage's output of shape {list(wanted.shape)}, not {shown(y)}")
    if not torch.allclose(y, wanted, rtol=0, atol=CLOSE):
        ratio = (y.detach().norm() / wanted.detach().norm()).item()
        raise Wrong(f"{where} y is {ratio:.3g} times the stage's output; only the loss is divided, on the last stage")
    if not y.requires_grad:
        raise Wrong(f"{where} y has no graph, and backward needs it: what is sent is detached, what is kept is not")


def _judge_last_forward(answer, m):
    draw = torch.Generator().manual_seed(9)
    stage = nn.Linear(6, 5).double()
    arrived = torch.randn(2, 4, 6, generator=draw, dtype=torch.float64)
    targets = torch.randint(5, (2, 4), generator=draw)
    wanted = F.cross_entropy(stage(arrived).flatten(0, 1), targets.flatten()).item()
    x, y = _pair(answer(stage, arrived.clone(), targets, m))
    if not isinstance(y, torch.Tensor) or y.numel() != 1:
        raise Wrong(f"on the last stage y is one number, the loss, not {shown(y)}")
    _judge_leaf(x, arrived)
    if not y.requires_grad:
        raise Wrong("on the last stage y has no graph, and backward begins there: do not detach it")
    known = {
        1: f"that is the micro-batch's mean; {m} of them add up in backward, so it is to be divided by m",
        1 / m**2: "it was divided by m twice",
        targets.numel(): "that is a sum over positions; the mean of the micro-batch, divided by m, is its part",
        targets.numel() / m: "that is a sum over positions, divided by m; it should be their mean, divided by m",
    }
    if not abs(y.item() - wanted / m) <= CLOSE:
        ratio = y.item() / wanted
        told = next((text for value, text in known.items() if abs(ratio - value) < 1e-9), "check by what you divide")
        raise Wrong(f"on the last stage y should be {wanted / m:.4f}, not {y.item():.4f}: {told}")


# ---- exercise 2 ----


def _judge_share(share, i, count):
    if not isinstance(share, torch.Tensor) or share.numel() != 1:
        raise Wrong(f"return one number with its graph, a tensor, not {shown(share)}")
    if not share.isfinite().all():
        raise Wrong(
            f"micro-batch {i} has {count} targets that count, and its share is {share.item()}: a mean over none divides by 0"
        )
    if not share.requires_grad:
        raise Wrong("the share has no graph, so backward finds nothing: do not detach it")


def _judge_shares(found, wanted, total, expected, all_targets):
    if torch.allclose(found, wanted, rtol=0, atol=CLOSE):
        if not abs(total - expected) <= CLOSE:
            raise Wrong(
                f"the gradients are right, but the shares add up to {total:.4f}, and the loss is {expected:.4f}"
            )
        return
    ratio = ((found * wanted).sum() / wanted.square().sum()).item()
    m, everything = len(all_targets), sum(t.numel() for t in all_targets)
    counted = sum((t != -100).sum().item() for t in all_targets)
    if torch.allclose(found, ratio * wanted, rtol=0, atol=CLOSE):
        why = {
            m: "they are added over micro-batches",
            1 / m: "divided by the number of micro-batches, although the sum was divided by all targets already",
            counted: "a sum, not a mean",
            counted / everything: "targets of -100 do not count",
        }
        told = next(
            (text for value, text in why.items() if abs(ratio - value) < 1e-9 * value),
            "check by what you divide",
        )
        raise Wrong(f"all gradients are {ratio:.4g} times too large: {told}")
    raise Wrong(
        "the gradients of some micro-batches weigh too much: those with few targets count less, so divide by the number of "
        f"targets of the whole batch, {counted}, not by each one's own"
    )


# ---- exercise 3 ----


def _counts(given, costs, p):
    given = _listed(given)
    try:
        found = [operator.index(count) for count in given]
    except TypeError:
        raise Wrong(f"return a list of {p} numbers of layers, not {shown(given)}") from None
    case = f"costs {costs} on {p} stages"
    if len(found) != p:
        raise Wrong(f"{case}: return {p} numbers of layers, not {found}")
    if sum(found) != len(costs):
        raise Wrong(f"{case}: {found} are {sum(found)} layers, and there are {len(costs)}")
    if min(found) < 1:
        raise Wrong(f"{case}: {found} leaves a stage without a layer")
    return found


def _slowest(costs, counts):
    ends = [sum(counts[: k + 1]) for k in range(len(counts))]
    return max(sum(costs[end - count : end]) for end, count in zip(ends, counts, strict=True))


def _even(n, p):
    return [n // p + (k < n % p) for k in range(p)]


def _fastest(costs, p):
    inner = combinations(range(1, len(costs)), p - 1)
    ends = ((0, *cuts, len(costs)) for cuts in inner)
    return min(max(sum(costs[a:b]) for a, b in zip(cut, cut[1:], strict=False)) for cut in ends)


# ---- orders of stages ----


def _judge_needs(given, action, p):
    given = _listed(list(given) if isinstance(given, (set, tuple)) else given)
    case = f"before {named(action)} of {p}"
    if not isinstance(given, list):
        raise Wrong(f"{case}: return a list of actions, not {shown(given)}")
    found = [_action(entry, case) for entry in given]
    wanted = [tuple(one) for one in needs_of(action, p)]
    kind, s, i = action
    for one in found:
        if not 0 <= one[1] < p:
            raise Wrong(f"{case}: there is no stage {one[1]}; the stages are 0 to {p - 1}")
        if one == action:
            raise Wrong(f"{case}: an action cannot wait for itself")
        if one not in wanted:
            raise Wrong(f"{case}: it does not wait for {named(one)}{_why_not(one, action)}")
    for one in wanted:
        if one not in found:
            raise Wrong(f"{case}: it needs {named(one)}, {_why(one, action)}")
    if len(found) > len(wanted):
        raise Wrong(f"{case}: {named(found[-1])} is there twice")


def _why(one, action):
    if action[0] == "F":
        return "whose output is its input"
    if one[0] == "F":
        return "which has made the activations that it uses"
    return "which sends the gradient of its output"


def _why_not(one, action):
    if one[2] != action[2]:
        return ": micro-batches know nothing of each other; that a stage does one at a time is its order"
    if action[0] == "F" and one[0] == "F":
        return ": forward goes from stage 0 upwards"
    if action[0] == "B" and one[0] == "B":
        return ": backward comes from the last stage"
    if action[0] == "F":
        return ""
    return ": that is implied by another one"


def _action(entry, case):
    try:
        kind, s, i = entry
        if kind in ("F", "B"):
            return kind, operator.index(s), operator.index(i)
    except (TypeError, ValueError):
        pass
    raise Wrong(f'{case}: an action is ("F" or "B", stage, micro-batch), not {plain(entry)}')


def _read_order(given, s, p, m, case):
    """An answer's order of stage s as a list of actions, each of them once."""
    given = _listed(given)
    if not isinstance(given, (list, tuple)):
        raise Wrong(f"{case}: the order of stage {s} should be a list of actions, not {shown(given)}")
    order = [_action(entry, f"{case}, stage {s}") for entry in given]
    for kind, stage, i in order:
        if stage != s:
            raise Wrong(f"{case}: stage {s} cannot do {named((kind, stage, i))}")
        if not 0 <= i < m:
            raise Wrong(f"{case}: stage {s} does {kind} of micro-batch {i}; they are 0 to {m - 1}")
    for kind in "FB":
        for i in range(m):
            times = order.count((kind, s, i))
            if times != 1:
                raise Wrong(f"{case}: stage {s} does {kind} of micro-batch {i} {('never', '', 'twice')[min(times, 2)]}")
    return order


def _listed(given):
    return given.tolist() if hasattr(given, "tolist") else given


def _first_forwards(order):
    return next((k for k, action in enumerate(order) if action[0] == "B"), len(order))


def _judge_own_order(order, s, case):
    for kind in "FB":
        micros = [i for k, _, i in order if k == kind]
        if micros != sorted(micros):
            raise Wrong(f"{case}: stage {s} does {kind} of micro-batches {micros}; they go in order")


def _judge_held(held, limit, s, case, first):
    if held > limit:
        raise Wrong(
            f"{case}: stage {s} begins with {first} forwards and holds {held} micro-batches at most, where {limit} are enough"
        )


def _judge_bubble(orders, p, m, best, case):
    try:
        run = simulate(orders)
    except ValueError as error:
        raise Wrong(f"{case}: {error}") from None
    if run.bubble > best:
        raise Wrong(
            f"{case}: the step takes {run.length}, of which {100 * float(run.bubble):.0f} % are idle; "
            f"{100 * float(best):.0f} % are possible: start forwards as early as memory allows"
        )


def _capped(s, p, m, room):
    """1F1B with at most `room` forwards ahead: the order of that stage of 1F1B which begins with so many."""
    alike = orders_of("1F1B", p, m)[p - min(room, p - s)]
    return [(kind, s, i) for kind, _, i in alike]
