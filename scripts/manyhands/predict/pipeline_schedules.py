"""Pipeline schedules as lists of actions, and a simulation of their dependencies: bubble, activations in flight, chart.

    orders = orders_of("1F1B", p=4, m=8)                   # orders[rank]: the rank's actions, in its order
    run = simulate(orders)                                 # raises ValueError for a schedule that waits in a circle
    run.bubble, run.in_flight                              # 3/11, [4, 3, 2, 1]
    run.slots                                              # what each rank did when, for `plots.schedule`
    held_at_once("1F1B", n_layer=32, p=4, m=16)            # ((32, 0), (8, 1)): layers, heads: first, last rank

p ranks, m micro-batches, v stages per rank; stage s is on rank s % p. An action is a tuple (kind, stage, micro-batch):

    F  forward                                             needs F of the stage before
    B  backward                                            needs F of its own stage, and B of the stage after
    I  the first half of B: the input's gradient           needs what B needs
    W  the second half: the gradient of the weights        needs I of its own stage, and nobody waits for it

Sources: GPipe, Huang et al. 2019 (arXiv:1811.06965); 1F1B (there PipeDream-Flush) and interleaved, Narayanan et al.
2021 (arXiv:2104.04473); zero-bubble, here ZB-H1, Qi et al. 2024 (arXiv:2401.10241), who call I and W B and W.
Interleaved and zero-bubble order their actions as torch.distributed.pipelining does, so m need be no multiple of p.
"""

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from manyhands.config.layout import layers_of_stages, stage_owners

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble")  # names of torch.distributed.pipelining
ALL_AT_ONCE = ("GPipe", "LoopedBFS")  # schedules whose forwards all come before the backwards
# backward multiplies twice as much as forward, one half each for I and W
TIMES = {"F": 1, "B": 2, "I": 1, "W": 1}
# micro-batches whose activations a rank holds: until B, or until W, as torch 2.13 keeps the graph of I for it
HOLDS = {"F": 1, "B": -1, "I": 0, "W": -1}


class Action(NamedTuple):
    """A rank's work in one slot: `kind` F, B, I or W, for micro-batch `micro` of stage `stage`."""

    kind: str
    stage: int
    micro: int


@dataclass(frozen=True)
class Slot:
    """Rank `rank` did `action` from `start` to `end`, in the units of the times."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Run:
    """The result of a simulation: the slots of all ranks, and the most micro-batches that each held at once."""

    slots: list
    in_flight: list
    p: int

    @property
    def length(self):
        """From the first action's start to the last one's end."""
        return max((slot.end for slot in self.slots), default=0)

    @property
    def bubble(self):
        """The idle share of all ranks' time, 0 to 1: a Fraction where the times are whole numbers."""
        busy, whole = sum(slot.end - slot.start for slot in self.slots), self.p * self.length
        if isinstance(busy, int) and isinstance(whole, int):
            return 1 - Fraction(busy, whole)
        return 1 - busy / whole


def orders_of(schedule: str, p: int, m: int, v: int = 1) -> list[list[Action]]:
    """[each rank's actions] of a schedule in SCHEDULES; v counts for the last two only.

    Raise ValueError for another name, for numbers below 1, for v > 1 where a rank has one stage, and where m does not
    split into rounds of equal size, of which interleaved schedules have max(1, m // p).
    """
    return [order_of(schedule, rank, p, m, v) for rank in range(max(p, 1))]  # p=0 is refused there


def order_of(schedule: str, rank: int, p: int, m: int, v: int = 1) -> list[Action]:
    """Return the actions of one rank: the warm-up's forwards, then a forward and a backward in turns.

    GPipe has all forwards ahead. Of interleaved schedules a round of micro-batches goes through one stage, then through
    the next. Zero-bubble is ZB-H1: each backward in two halves, of which the second fills what would be idle.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule {schedule!r} is unknown; use one of {', '.join(SCHEDULES)}")
    if min(p, m, v) < 1:
        raise ValueError(f"p={p}, m={m}, v={v}: ranks, micro-batches and stages per rank are at least 1")
    one_stage, split = schedule in ("GPipe", "1F1B"), schedule == "InterleavedZeroBubble"
    if one_stage and v > 1:
        raise ValueError(f"{schedule} has one stage per rank, not v={v}; use Interleaved1F1B")
    rounds = 1 if one_stage else max(1, m // p)
    if m % rounds:
        raise ValueError(f"{m} micro-batches do not split into {rounds} equal rounds; use a multiple of p={p}")
    size = m // rounds
    rows = [range(first, first + size) for first in range(0, m, size)]
    forwards = [(chunk * p + rank, i) for row in rows for chunk in range(v) for i in row]
    backwards = [(chunk * p + rank, i) for row in rows for chunk in reversed(range(v)) for i in row]
    after = p - 1 - rank  # ranks behind this one
    ahead = {"GPipe": m, "Interleaved1F1B": (v - 1) * size + 2 * after}.get(schedule, (v - 1) * size + after)
    order = [Action("F", *at) for at in forwards[:ahead]]
    for k, at in enumerate(backwards):
        order += [Action("F", *at) for at in forwards[ahead + k : ahead + k + 1]]
        order.append(Action("I" if split else "B", *at))
        if split and k >= rank:
            order.append(Action("W", *backwards[k - rank]))
    return order + [Action("W", *at) for at in backwards[max(m * v - rank, 0) :] if split]


def bubble_formula(schedule: str, p: int, m: int, v: int = 1) -> Fraction:
    """The idle share of a schedule's time by its formula, a Fraction: messages take no time, B takes as long as I and
    W.

    For the last two where m >= p; zero-bubble's is for F, I and W of equal length.
    """
    work = {"Interleaved1F1B": v * m, "InterleavedZeroBubble": 3 * v * m}.get(schedule, m)
    return Fraction(p - 1, work + p - 1)


def needs(action: Action, num_stages: int) -> list[Action]:
    """The actions, of this and other ranks, that must be done before `action` may begin."""
    kind, s, i = action
    if kind == "F":
        return [Action("F", s - 1, i)] if s else []
    if kind == "W":
        return [Action("I", s, i)]
    after = [Action(kind, s + 1, i)] if s + 1 < num_stages else []
    return [Action("F", s, i), *after]


def in_flight(order: list[Action]) -> int:
    """The most micro-batches (times stages) whose activations a rank holds at once: from F to B, or to W."""
    return max(accumulate((HOLDS[kind] for kind, *_ in order), initial=0))


@cache
def held_at_once(schedule: str, n_layer: int, p: int, m: int, v: int = 1) -> tuple[tuple[int, int], tuple[int, int]]:
    """((layers, heads) of the first rank, of the last rank): the most that each holds between forward and
    backward at a time, counted per micro-batch.

    The first rank has the most layers and the most micro-batches in flight, the last one has the head. `m` is a
    multiple of p. A V-shaped schedule, which `pipeline_schedules` does not know, gets a bound: 2 p micro-batches of all
    its layers.
    """
    layers = [[count for count, *_ in stages] for stages in stages_of_ranks(n_layer, p, v)[:: max(1, p - 1)]]
    if schedule in ALL_AT_ONCE:
        return (m * sum(layers[0]), 0), (m * sum(layers[1]), m)
    if schedule not in SCHEDULES:
        most = min(m, 2 * p)
        return (most * sum(layers[0]), 1), (most * sum(layers[1]), 1)
    m = min(m, 4 * p)  # more change nothing: it is a steady state
    first, last = (_held(order_of(schedule, rank, p, m, v), p, of) for rank, of in zip((0, p - 1), layers, strict=True))
    return (first[0], 0), last


def stages_of_ranks(
    n_layer: int, p: int, v: int = 1, schedule: str = "1F1B"
) -> list[tuple[tuple[int, bool, bool], ...]]:
    """Per pipeline rank its stages: (layers, whether it is the first, whether it is the last)."""
    owners, sizes = stage_owners(schedule, p, v), map(len, layers_of_stages(n_layer, p * v))
    stages = [(size, s == 0, s == p * v - 1) for s, size in enumerate(sizes)]
    return [tuple(stage for stage, owner in zip(stages, owners, strict=True) if owner == rank) for rank in range(p)]


def _held(order, p, layers):
    """(most layers, most micro-batches of the last stage) that are between F and B, or F and W, at a time."""
    held = accumulate(HOLDS[kind] * layers[stage // p] for kind, stage, _ in order)
    last = accumulate(HOLDS[kind] * (stage // p == len(layers) - 1) for kind, stage, _ in order)
    return max(held), max(last)


def simulate(orders: list[list[Action]], times: dict = TIMES, message: float = 0, needs=needs) -> Run:
    """Run the orders of all ranks on a clock: each rank does its actions one after the other, as soon as it can.

    `times` gives the length of each kind, or of (kind, stage) where stages differ. What comes from another rank costs
    its receiver `message` once it is there. `needs` says what an action waits for. Raise ValueError where an action is
    missing or twice there, and where ranks wait for each other in a circle.
    """
    orders = [[Action(*action) for action in order] for order in orders]
    num_stages = _refuse_incomplete(orders)
    slots, next_up = as_far_as_it_goes(orders, num_stages, times, message, needs)
    ended = {slot.action for slot in slots}
    if waits := [
        f"rank {rank} waits with {named(order[at])} for {named(other)}"
        for rank, (at, order) in enumerate(zip(next_up, orders, strict=True)) if at < len(order)
        for other in [next(before for before in needs(order[at], num_stages) if Action(*before) not in ended)]
    ]:  # fmt: skip
        raise ValueError(f"the schedule never ends: {', '.join(waits)}")
    return Run(slots, [in_flight(order) for order in orders], len(orders))


def as_far_as_it_goes(orders, num_stages, times=TIMES, message=0, needs=needs):
    """Run orders as `simulate` does, also such as never end. Return (slots, [actions that each rank has done])."""
    owner = {action: rank for rank, order in enumerate(orders) for action in order}
    slots, ended, next_up, free = [], {}, [0] * len(orders), [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while next_up[rank] < len(order):
                action = order[next_up[rank]]
                before = [Action(*other) for other in needs(action, num_stages)]
                if any(other not in ended for other in before):
                    break
                ready = max([free[rank], *(ended[other] for other in before)])
                start = ready + message * any(owner[other] != rank for other in before)
                took = times[action[:2]] if action[:2] in times else times[action[0]]
                free[rank] = ended[action] = start + took
                slots.append(Slot(rank, action, start, free[rank]))
                next_up[rank] += 1
                moved = True
    return slots, next_up


def _refuse_incomplete(orders):
    """The number of stages, where every micro-batch goes once forward and once backward through each on one rank."""
    count = Counter(action for order in orders for action in order)
    if twice := [action for action, times in count.items() if times > 1]:
        raise ValueError(f"{named(min(twice))} is there more than once")
    stages, micros = {a.stage for a in count}, {a.micro for a in count}
    for s in sorted(stages):
        for i in sorted(micros):
            kinds = {kind for kind in "FBIW" if (kind, s, i) in count}
            if kinds not in ({"F", "B"}, {"F", "I", "W"}):
                missing = "F" if "F" not in kinds else "B" if kinds == {"F"} else "the other half of B"
                raise ValueError(f"micro-batch {i} of stage {s} has {sorted(kinds)}: {missing} is missing")
    return max(stages, default=-1) + 1


def slots_of(spans: list) -> list[Slot]:
    """The slots of a virtual network's spans: its computing, where a span is named "kind stage micro-batch"."""
    found = []
    for span in spans:
        if span.lane == "compute":
            kind, stage, micro = span.name.split()
            found.append(Slot(span.rank, Action(kind, int(stage), int(micro)), span.start_s, span.end_s))
    return found


def named(action: Action) -> str:
    """An action in words: F of micro-batch 3 on stage 0."""
    return f"{action[0]} of micro-batch {action[2]} on stage {action[1]}"
