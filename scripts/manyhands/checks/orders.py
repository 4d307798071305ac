"""Orders of a pipeline's stages as answers give them: read, simulated, and told what is wrong with them.

Whatever keeps the rules is right, however it was made: every action once, nobody waits in a circle, no more micro-batches in
flight and no more idle time than is needed.
"""

import operator

from manyhands.checks import Wrong
from manyhands.checks.values import plain, shown
from manyhands.predict.pipeline_schedules import named, needs, orders_of, simulate


def judge_needs(given, action, p):
    given = listed(list(given) if isinstance(given, (set, tuple)) else given)
    case = f"before {named(action)} of {p}"
    if not isinstance(given, list):
        raise Wrong(f"{case}: return a list of actions, not {shown(given)}")
    found = [_action(entry, case) for entry in given]
    wanted = [tuple(one) for one in needs(action, p)]
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


def read_order(given, s, p, m, case):
    """An answer's order of stage s as a list of actions, each of them once."""
    given = listed(given)
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


def listed(given):
    return given.tolist() if hasattr(given, "tolist") else given


def first_forwards(order):
    return next((k for k, action in enumerate(order) if action[0] == "B"), len(order))


def judge_own_order(order, s, case):
    for kind in "FB":
        micros = [i for k, _, i in order if k == kind]
        if micros != sorted(micros):
            raise Wrong(f"{case}: stage {s} does {kind} of micro-batches {micros}; they go in order")


def judge_held(held, limit, s, case, first):
    if held > limit:
        raise Wrong(
            f"{case}: stage {s} begins with {first} forwards and holds {held} micro-batches at most, where {limit} are enough"
        )


def judge_bubble(orders, p, m, best, case):
    try:
        run = simulate(orders)
    except ValueError as error:
        raise Wrong(f"{case}: {error}") from None
    if run.bubble > best:
        raise Wrong(
            f"{case}: the step takes {run.length}, of which {100 * float(run.bubble):.0f} % are idle; "
            f"{100 * float(best):.0f} % are possible: start forwards as early as memory allows"
        )


def capped(s, p, m, room):
    """1F1B with at most `room` forwards ahead: the order of that stage of 1F1B which begins with so many."""
    alike = orders_of("1F1B", p, m)[p - min(room, p - s)]
    return [(kind, s, i) for kind, _, i in alike]
