"""Checks of lesson 08: dependencies, orders of stages and what they hold, forward and backward across a cut, balanced
stages, numbers of micro-batches.

Orders are judged by simulation (`predict.pipeline_schedules`): every action once, no circular wait, no more
micro-batches in flight and no more idle time than necessary. Every order with these properties is accepted.
The checks of the chart draw what the learner's code makes of four stages, with wrong actions marked.
"""

import functools
from itertools import accumulate, combinations, pairwise, product

import torch
import torch.nn.functional as F
from torch import nn

from manyhands.checks import CORRECT, NOT_ATTEMPTED, TIMEOUT_S, Wrong, exercise
from manyhands.checks.drawn import generator, luck, normal, seeded, sizes
from manyhands.checks.expect import expect_equal, expect_number, expect_scalar, expect_tensor, plain
from manyhands.checks.stop import NeverEnds, stopped_after
from manyhands.checks.witness import shown
from manyhands.launch.ranks import joined
from manyhands.launch.run_folder import show
from manyhands.plots.schedule import chart
from manyhands.predict.pipeline_schedules import (
    TIMES,
    Action,
    Slot,
    as_far_as_it_goes,
    bubble_formula,
    in_flight,
    named,
    orders_of,
    simulate,
)
from manyhands.predict.pipeline_schedules import needs as needs_of

P = 4  # stages of a drawn chart


def draws(name, charted):
    """Make a check draw on rank 0 the chart of the learner's code; nothing is drawn for an answer not attempted.

    `charted(answer)` returns (title, slots, notes, wrong slots). Slots are marked only if the check finds a fault.
    """

    def decorate(check):
        @functools.wraps(check)
        def and_draw(answer, ranks=None, **given):
            verdict = check(answer, ranks, **given)
            if verdict == NOT_ATTEMPTED:
                return verdict
            if ranks is not None and ranks.rank == 0 and joined() is not None:  # a picture lies in the run's folder
                try:
                    title, slots, notes, wrong = stopped_after(TIMEOUT_S)(lambda: charted(answer))()
                except (Exception, SystemExit, NeverEnds):  # noqa: BLE001 - the verdict says what is wrong
                    return verdict
                wrong = [] if verdict == CORRECT else wrong
                if slots:
                    show(chart([(title, slots, notes)], wrong=wrong), name, f"a row per rank, {title}")
            return verdict

        return and_draw

    return decorate


def _by_needs(answer, m=2):
    """Chart GPipe by the learner's `needs`; an action is wrong if `needs` returns something else for it."""
    orders = orders_of("GPipe", P, m)

    def by_answer(action, p):
        return [Action(*one) for one in answer(tuple(action), p)]

    slots, _ = as_far_as_it_goes(orders, P, needs=by_answer)
    wrong = [slot for slot in slots if {*by_answer(slot.action, P)} != {*needs_of(slot.action, P)}]
    return f"{m} micro-batches, by your needs", slots, (), wrong


def _by_order(name, m=8):
    """Chart the learner's orders; on each rank, the first action that departs from this schedule is wrong."""

    def charted(answer):
        orders = [[Action(*one) for one in answer(s, P, m)] for s in range(P)]
        slots, done = as_far_as_it_goes(orders, P)
        wrong = []
        for rank, (order, right) in enumerate(zip(orders, orders_of(name, P, m), strict=True)):
            at = next((k for k, one in enumerate(order) if [one] != right[k : k + 1]), len(order))
            ran = [slot for slot in slots if slot.rank == rank]
            if at == done[rank] < len(order):  # deadlock: drawn where it waits
                end = ran[-1].end if ran else 0
                slots.append(Slot(rank, order[at], end, end + TIMES[order[at].kind]))
                ran.append(slots[-1])
            wrong += ran[at : at + 1]
        notes = [f"holds {in_flight(order)}" for order in orders]
        idle = "it never ends"
        if done == [2 * m] * P:
            idle = f"idle {100 * float(simulate(orders).bubble):.0f} %"
        return f"your {name}, {m} micro-batches: {idle}", slots, notes, wrong

    return charted


@draws("needs", _by_needs)
@exercise("A", "who waits for whom")
def needs(answer, ranks=None):
    """`answer(action, p)` lists what must be done before the action begins."""
    for p in (3, 1, 4):
        for s, kind, i in product(range(p), "FB", (0, 2)):
            _judge_needs(answer((kind, s, i), p), (kind, s, i), p)


def _judge_needs(given, action, p):
    case = f"before {named(action)} of {p}"
    found, wanted = _actions(given, case), needs_of(action, p)
    for one in found:
        if not 0 <= one[1] < p:
            raise Wrong(f"{case}: there is no stage {one[1]}; the stages are 0 to {p - 1}")
        if one not in wanted:
            why = "micro-batches do not depend on each other; that a stage does one at a time is its order"
            if one[2] == action[2]:
                why = {
                    "FF": "forward goes from stage 0 upwards", "BB": "backward comes from the last stage",
                    "BF": "that is implied by another one", "FB": "forward comes before backward",
                }[action[0] + one[0]]  # fmt: skip
            raise Wrong(f"{case}: it does not wait for {named(one)}: {why}")
    for one in wanted:
        if one not in found:
            why = {
                "FF": "whose output is its input",
                "BF": "which has made the activations that it uses",
                "BB": "which sends the gradient of its output",
            }[action[0] + one[0]]
            raise Wrong(f"{case}: it needs {named(one)}, {why}")


@draws("gpipe", _by_order("GPipe"))
@exercise("B", "GPipe's order")
def gpipe(answer, ranks=None):
    """`answer(s, p, m)` is the order of stage s: all forwards, then all backwards."""
    for p, m in ((4, 8), (1, 3), (3, 1), tuple(sizes(5, 2, 2, 9))):
        case = f"with p = {p} and m = {m}"
        orders = [_read_order(answer(s, p, m), s, m, case) for s in range(p)]
        for s, order in enumerate(orders):
            kinds = "".join(kind for kind, *_ in order)
            if kinds != "F" * m + "B" * m:
                raise Wrong(f"{case}: stage {s} does {' '.join(kinds)}; all forwards come before the first backward")
        _judge_bubble(orders, bubble_formula("GPipe", p, m), case)


@exercise("C1", "how many forwards come first")
def ahead(answer, ranks=None):
    """`answer(s, p, m)` is the number of forwards with which stage s of 1F1B begins."""
    for p, m in ((4, 8), (4, 2), (1, 3), (6, 1), tuple(sizes(6, 2, 2, 9))):
        for s in range(p):
            right, case = min(m, p - s), f"with p = {p} and m = {m}, forwards of stage {s} before its first backward"
            slips = {
                "then the last stage would begin with a backward that has no forward": p - s - 1,
                f"there are only {m} micro-batches": p - s,
                "that is GPipe, which holds them all": m,
                "the later ones would wait at the next stages, and be held": min(m, 2 * (p - s) - 1),
                "micro-batch 0 must reach the last stage and come back: the first stage waits longest": min(m, s + 1),
            }
            expect_equal(answer(s, p, m), right, case, slips)


@draws("1f1b", _by_order("1F1B"))
@exercise("C2", "1F1B's order")
def one_f_one_b(answer, ranks=None):
    """`answer(s, p, m)` is the order of stage s: as little in flight as 1F1B, and no more idle time."""
    for p, m in ((4, 8), (4, 2), (3, 7), (2, 4), (1, 3), (5, 5), (6, 1), tuple(sizes(6, 2, 2, 9))):
        case = f"with p = {p} and m = {m}"
        orders = [_read_order(answer(s, p, m), s, m, case) for s in range(p)]
        for s, order in enumerate(orders):
            for kind in "FB":
                micros = [i for k, _, i in order if k == kind]
                if micros != sorted(micros):
                    raise Wrong(f"{case}: stage {s} does {kind} of micro-batches {micros}; they go in order")
            held, limit = in_flight(order), min(m, p - s)
            if held > limit:
                raise Wrong(f"{case}: stage {s} holds up to {held} micro-batches, and {limit} are enough")
        _judge_bubble(orders, bubble_formula("1F1B", p, m), case)


@exercise("D1", "backward across the cut")
def backward_of(answer, ranks=None):
    """`answer(x, y, dy)` adds the gradients of a stage's weights and returns that of its input; the graph is freed."""
    stages, target = [_stage() for _ in range(3)], normal(95, 5, 3)
    for i in range(2):  # two micro-batches one after the other
        also = " after the second micro-batch: gradients add up" * i
        _judge_backward(answer, stages, normal(80 + i, 5, 6), normal(90 + i, 5, 3), also=also)
    stages, case = [_stage() for _ in range(3)], "on the last stage, where dy is None and y is the loss, "
    _judge_backward(answer, stages, normal(85, 5, 6), None, case, loss=lambda y: F.mse_loss(y, target))
    also = " on the first stage, where backward has to run as well"
    _judge_backward(answer, [_table() for _ in range(3)], torch.tensor([1, 3, 3]), normal(96, 3, 3), also=also)


def _stage():
    return seeded(lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double(), 3)


def _table():
    return seeded(lambda: nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3)).double(), 4)


def _judge_backward(answer, stages, x, dy, case="", also="", loss=lambda y: y):
    """Judge one micro-batch on (a stage, its copy with the right gradients, its copy with those of y.sum())."""
    stage, reference, of_ones = stages
    x.requires_grad_(x.is_floating_point())
    leaf = x.detach().clone().requires_grad_(x.requires_grad)
    torch.autograd.backward(loss(reference(leaf)), dy)
    loss(of_ones(x.detach())).sum().backward()
    y = loss(stage(x))
    given = answer(x, y, dy)
    if given is not None and not x.requires_grad:
        raise Wrong(f"on the first stage x holds ids, which have no gradient: return None, not {shown(given)}")
    _judge_weights(stage, reference, of_ones, also)
    if x.requires_grad:
        slips = {
            "that is x itself; the stage before needs the gradient of the loss with respect to x": x,
            "that is dy, the gradient of this stage's output; the stage before needs that of its input": dy,
        }
        expect_tensor(given, leaf.grad, f"{case}what came back", slips, "the gradient of x")
        if given.requires_grad:
            raise Wrong("the result has a graph of its own; a message has only numbers")
    try:
        torch.autograd.backward(y, dy)
    except RuntimeError:
        return
    raise Wrong("all gradients are right, but the graph is still there, and with it the activations: no retain_graph")


def _judge_weights(stage, reference, of_ones, also=""):
    pairs = zip(reference.parameters(), of_ones.parameters(), strict=True)
    for (name, w), (right, ones) in zip(stage.named_parameters(), pairs, strict=True):
        if w.grad is None:
            raise Wrong(
                f"the weight {name} has no gradient{also}: run backward, which adds to `grad`; autograd.grad does not"
            )
        slips = {"y's gradient is dy, not ones": ones.grad}
        expect_tensor(w.grad, right.grad, f"the gradient of {name}{also}", slips)


def _actions(given, case):
    """Return an answer's actions as a list of (kind, stage, micro-batch)."""
    found = list(sorted(given) if isinstance(given, set) else given)
    for entry in found:
        if not isinstance(entry, (list, tuple)) or len(entry) != 3 or entry[0] not in ("F", "B"):
            raise Wrong(f'{case}: each entry is an action ("F" or "B", stage, micro-batch), not {shown(entry)}')
    return [tuple(plain(entry)) for entry in found]


@exercise("D2", "forward of one micro-batch")
def forward_of(answer, ranks=None):
    """`answer(stage, arrived, targets, m)` is (x, y): a leaf, and the stage's output or its share of the mean loss."""
    for m in luck(5).sample((3, 5, 6, 7, 9), 2):
        for where, make, arrived in (
            ("on a stage in the middle", _stage, normal(80 + m, 5, 6)),
            ("on the first stage", _table, torch.tensor([[1, 3, 3]])),
        ):
            _judge_forward(answer, make, arrived, None, m, where)
        targets = torch.randint(3, (2, 4), generator=generator(m))
        _judge_forward(answer, _stage, normal(9, 2, 4, 6), targets, m, "on the last stage")


def _judge_forward(answer, make, arrived, targets, m, where):
    """Run forward on a stage and on a copy of it, then backward on both."""
    stage, reference, leaf = make(), make(), arrived.clone().requires_grad_(arrived.is_floating_point())
    wanted = reference(leaf)
    x, y = answer(stage, arrived.clone(), targets, m)
    expect_tensor(x, arrived, f"{where} x", it_is="what has arrived")
    if leaf.requires_grad and not x.requires_grad:
        raise Wrong("your x does not require a gradient, so backward will find none to send to the stage before")
    if not x.is_leaf:
        raise Wrong("your x is not a leaf, so its gradient will not be kept: the graph of this stage begins at x")
    if targets is None:
        slips = {"only the loss is divided, on the last stage": wanted / m}
        expect_tensor(y, wanted, f"{where} y", slips, "the stage's output")
        if not y.requires_grad:
            raise Wrong(f"{where} y has no graph, and backward needs it: what is sent is detached, what is kept is not")
        dy = normal(7, *y.shape)
    else:
        expect_scalar(y, f"{where} y, the loss,")
        mean, positions = F.cross_entropy(wanted.flatten(0, 1), targets.flatten()), targets.numel()
        wanted, dy = mean / m, None
        slips = {
            f"that is the micro-batch's mean; {m} of them add up in backward, so it is to be divided by m": mean.item(),
            "it was divided by m twice": mean.item() / m**2,
            "that is a sum over positions; their mean, divided by m, is its part": mean.item() * positions,
            "that is a sum over positions, divided by m; it should be their mean": mean.item() * positions / m,
        }
        expect_number(y.detach(), wanted.item(), f"{where} y", slips=slips, close=1e-10)
    torch.autograd.backward(wanted, dy)
    torch.autograd.backward(y, dy)
    if leaf.requires_grad:
        if x.grad is None:
            raise Wrong(f"{where} backward from y does not arrive at x: let the stage compute on the x that you return")
        expect_tensor(x.grad, leaf.grad, f"{where} y is right, but after backward x.grad", it_is="the gradient of x")
    _judge_weights(stage, reference, reference, f" {where}, after backward from y,")


@exercise(1, "a schedule for less memory")
def fitting(answer, ranks=None):
    """`answer(p, m, room)` is the orders of all stages: at most `room` in flight, and the least idle time possible."""
    for p, m, room in ((4, 8, 4), (4, 8, 2), (4, 8, 1), (3, 6, 2), (4, 6, 3), (2, 5, 8), tuple(sizes(7, 3, 2, 9))):
        case = f"with p = {p}, m = {m} and room for {room}"
        given = answer(p, m, room)
        if len(given) != p:
            raise Wrong(f"{case}: return a list of {p} orders, one for each stage, not {shown(given)}")
        orders = [_read_order(order, s, m, case) for s, order in enumerate(given)]
        for s, held in enumerate(map(in_flight, orders)):
            if held > room:
                raise Wrong(f"{case}: stage {s} holds up to {held} micro-batches, and there is room for {room}")
        best = simulate([_capped(s, p, m, room) for s in range(p)]).bubble
        _judge_bubble(orders, best, case)


@exercise(2, "how many micro-batches")
def fewest(answer, ranks=None):
    """`answer(p, sequences, most_idle)`: the fewest equal micro-batches whose bubble is small enough, or None."""
    draw = luck(8)
    drawn = [(draw.randint(2, 8), draw.randint(12, 60), draw.choice((0.11, 0.19, 0.29))) for _ in range(12)]
    given = [(4, 40, 0.29), (4, 8, 0.28), (4, 36, 0.12), (4, 30, 0.19), (4, 12, 0.61), (4, 16, 0.05)]
    for p, sequences, most_idle in [*given, *drawn]:  # chosen so that no bubble equals one of these
        equal = [m for m in range(1, sequences + 1) if sequences % m == 0]
        right = next((m for m in equal if (p - 1) / (m + p - 1) <= most_idle), None)
        case = f"for {sequences} sequences on {p} stages, idle at most {100 * most_idle:g} %, what you return"
        if right is None:
            slips = {"even one sequence in each micro-batch leaves too large a bubble": sequences}
        else:
            enough = next(m for m in range(1, sequences + 1) if (p - 1) / (m + p - 1) <= most_idle)
            slips = {
                "that many do not split the sequences equally": enough,
                "(p - 1)/m is the bubble by the work; its share of the time is (p - 1)/(m + p - 1)": next(
                    (m for m in equal if (p - 1) / m <= most_idle), None
                ),
                "that is the number of sequences in a micro-batch": sequences // right,
                "that is enough, and fewer are": sequences,
            }
        expect_equal(answer(p, sequences, most_idle), right, case, _unlike(slips, right))


def _unlike(slips, right):
    """Keep the slips whose value is neither right nor another slip's, so that no sentence names a wrong fault."""
    values = [*slips.values(), right]
    return {why: value for why, value in slips.items() if values.count(value) == 1}


@exercise(3, "what an order holds")
def held(answer, ranks=None):
    """`answer(order)`: the most (stage, micro-batch) pairs that a rank holds from F to B, or to W."""
    draw = luck(9)
    schedules = [("Interleaved1F1B", 4, 8, 2), ("InterleavedZeroBubble", 4, 8, 1)]
    schedules += [("1F1B", 4, 8, 1), ("GPipe", 4, 8, 1)]
    schedules += [(name, p, p * draw.randint(1, 4), v) for name, p, _, v in schedules]
    for name, p, m, v in schedules:
        for rank, order in enumerate(orders_of(name, p, m, v)):
            plainly = [tuple(action) for action in order]
            to_input = max(accumulate({"F": 1, "W": 0}.get(kind, -1) for kind, *_ in plainly))
            right = in_flight(order)
            slips = {
                "an I keeps nearly all: count to W": to_input,
                "those are all micro-batches": m,
                "those are all forwards": m * v,
            }
            case = f"{name}, p = {p}, m = {m}: what rank {rank} holds at most"
            expect_equal(answer(plainly), right, case, _unlike(slips, right))


def _read_order(given, s, m, case):
    """Return an answer's order of stage s as a list of actions, each exactly once."""
    order = _actions(given, f"{case}, stage {s}")
    for kind, stage, i in order:
        if stage != s:
            raise Wrong(f"{case}: stage {s} cannot do {named((kind, stage, i))}")
        if not 0 <= i < m:
            raise Wrong(f"{case}: stage {s} does {kind} of micro-batch {i}; they are 0 to {m - 1}")
    for kind in "FB":
        for i in range(m):
            times = order.count((kind, s, i))
            if times != 1:
                does = f"does {kind} of micro-batch {i} twice" if times else f"never does {kind} of micro-batch {i}"
                raise Wrong(f"{case}: stage {s} {does}")
    return order


def _judge_bubble(orders, best, case):
    try:
        run = simulate(orders)
    except ValueError as error:
        raise Wrong(f"{case}: {str(error).replace('rank ', 'stage ')}") from None  # each rank is one stage here
    if run.bubble > best:
        idle, possible = (f"{100 * float(share):.0f} %" for share in (run.bubble, best))
        raise Wrong(f"{case}: {idle} of the step are idle, and {possible} is possible: start forwards earlier")


def _capped(s, p, m, room):
    """Return 1F1B's order with at most `room` forwards ahead: that of the stage that begins with this number."""
    alike = orders_of("1F1B", p, m)[p - min(room, p - s)]
    return [(kind, s, i) for kind, _, i in alike]


COSTS = (([0.5, 1, 1, 1, 1, 2], 2), ([0.25, 1, 1, 1, 1, 1, 1, 1, 1, 4], 4), ([2, 2, 2, 2], 4), ([1, 2, 3], 1))
NEARLY = {  # what a plausible but wrong answer minimises instead of the largest time
    "that is the least variance": lambda times: sum(time**2 for time in times),
    "that is the largest minimum": lambda times: -min(times),
    "that is the least difference between slowest and fastest": lambda times: max(times) - min(times),
}


@exercise("E", "balance uneven layers")
def balance(answer, ranks=None):
    """`answer(costs, p)` is the number of consecutive layers per stage; the slowest is as fast as possible."""
    for costs, p, nearly in (*((*case, {}) for case in COSTS), *map(_misleading, NEARLY)):
        counts, case = plain(answer(list(costs), p)), f"costs {costs} on {p} stages"
        if len(counts) != p:
            raise Wrong(f"{case}: return a list of {p} numbers of layers, not {counts}")
        if not all(isinstance(number, int) for number in counts):
            raise Wrong(f"{case}: numbers of layers are integers, not {counts}")
        expect_equal(sum(counts), len(costs), f"{case}: the sum of {counts}, all layers,")
        if min(counts) < 1:
            raise Wrong(f"{case}: {counts} leaves a stage without a layer")
        times = _times(costs, counts)
        best = min(max(_times(costs, each)) for each in _splits(len(costs), p))
        if max(times) > best + 1e-10:
            equal = ": equal numbers are not equal times" * (max(counts) - min(counts) <= 1)
            why = next((f": {why}; only the slowest counts" for why, worst in nearly.items() if times == worst), equal)
            raise Wrong(f"{case}: with {counts} the slowest stage takes {max(times):g}, and {best:g} is possible{why}")


def _misleading(why):
    """Yield (costs, stages, {why: the times of that split}) in which a nearly right split is not the best."""
    draw = luck(90 + len(why))
    while True:
        costs, p = [draw.randint(1, 9) for _ in range(draw.randint(5, 9))], draw.randint(3, 4)
        splits = [_times(costs, counts) for counts in _splits(len(costs), p)]
        nearly = min(splits, key=NEARLY[why])
        alike = [one for one in splits if NEARLY[why](one) == NEARLY[why](nearly)]
        if max(nearly) > min(map(max, splits)) and len(alike) == 1:
            return costs, p, {why: nearly}


def _splits(layers, p):
    cuts = combinations(range(1, layers), p - 1)
    return [[b - a for a, b in pairwise((0, *each, layers))] for each in cuts]


def _times(costs, counts):
    ends = [0, *accumulate(counts)]
    return [sum(costs[a:b]) for a, b in pairwise(ends)]
