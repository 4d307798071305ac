"""Pipeline schedules: every action once, nobody waits in a circle, bubbles and memory as published, torch's order."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manyhands.lessons.pipeline_parallel import run_asleep
from manyhands.predict.pipeline_schedules import (
    SCHEDULES,
    Action,
    bubble_formula,
    in_flight,
    needs,
    orders_of,
    simulate,
    slots_of,
)
from torch import nn
from torch.distributed.pipelining import schedules as torchs

P, M = range(2, 9), range(1, 33)
ONE_STAGE = ("GPipe", "1F1B")


@pytest.mark.parametrize("schedule", ONE_STAGE)
def test_one_stage_per_rank_idles_and_holds_as_its_formulas_say_however_long_a_backward_is(schedule):
    for p, m in itertools.product(P, M):
        run = simulate(orders_of(schedule, p, m))
        assert run.bubble == bubble_formula(schedule, p, m) == Fraction(p - 1, m + p - 1)
        assert run.length == 3 * (m + p - 1)
        assert run.in_flight == [m if schedule == "GPipe" else min(m, p - s) for s in range(p)]
    for backward in (1, 5):
        assert simulate(orders_of(schedule, 4, 8), {"F": 1, "B": backward}).bubble == Fraction(3, 11)


def test_on_four_ranks_schedules_idle_and_hold_as_in_their_papers():
    assert bubble_formula("Interleaved1F1B", 4, 8, 2) == Fraction(3, 19)
    assert bubble_formula("InterleavedZeroBubble", 4, 8) == Fraction(3, 27) and bubble_formula("GPipe", 1, 8) == 0
    assert simulate(orders_of("Interleaved1F1B", 4, 8, 1)).in_flight == [7, 5, 3, 1]
    assert simulate(orders_of("Interleaved1F1B", 4, 8, 2)).in_flight == [11, 9, 7, 5]
    assert simulate(orders_of("InterleavedZeroBubble", 4, 8, 1)).in_flight == [4, 4, 4, 4]


@st.composite
def asked(draw):
    """(schedule, p, m, v) that a schedule accepts, for p from 2 to 8 and m from 1 to 32."""
    schedule, p = draw(st.sampled_from(SCHEDULES)), draw(st.integers(2, 8))
    m = draw(st.integers(1, 32).filter(lambda m: schedule in ONE_STAGE or m % max(1, m // p) == 0))
    return schedule, p, m, 1 if schedule in ONE_STAGE else draw(st.integers(1, 3))


@settings(max_examples=160, derandomize=True)
@given(asked=asked(), times=st.tuples(*[st.integers(1, 9)] * 4), message=st.integers(0, 3))
def test_every_schedule_is_valid_whatever_its_actions_take_and_idles_as_its_formula_says(asked, times, message):
    """Each micro-batch once through each stage and back, nothing before what it needs, one action of a rank at a
    time."""
    schedule, p, m, v = asked
    if m >= p:
        assert simulate(orders_of(*asked)).bubble == bubble_formula(*asked)
    run = simulate(orders_of(*asked), dict(zip("FBIW", times, strict=True)), message)
    ended = {slot.action: slot for slot in run.slots}
    halves = 3 if schedule == "InterleavedZeroBubble" else 2
    assert len(ended) == len(run.slots) == p * v * m * halves
    for slot in run.slots:
        for before in needs(slot.action, p * v):
            late = message if ended[before].rank != slot.rank else 0
            assert ended[before].end + late <= slot.start
    for rank in range(p):
        own = sorted((slot for slot in run.slots if slot.rank == rank), key=lambda slot: slot.start)
        assert all(one.end <= other.start for one, other in itertools.pairwise(own))
        assert {slot.action.stage % p for slot in own} == {rank}
        assert in_flight([slot.action for slot in own]) == run.in_flight[rank] <= m * v


class Recorder:
    """What a schedule of torch's asks a stage to do, without messages and without computing."""

    submod = nn.Identity()

    def __init__(self, index, p, num_stages, seen):
        self.stage_index, self.num_stages, self.seen = index, num_stages, seen
        self.group_size, self.group_rank = p, index % p
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.get_fwd_recv_ops = self.get_fwd_send_ops = self.get_bwd_recv_ops = self.get_bwd_send_ops = lambda i: []
        self.set_local_fwd_input = self.set_local_bwd_input = self.perform_reduce_grad = lambda *_: None
        self.get_local_bwd_output = lambda i: None

    def forward_one_chunk(self, i, *_, **__):
        self.seen.append(Action("F", self.stage_index, i))

    def backward_one_chunk(self, i, full_backward=True, **_):
        self.seen.append(Action("B" if full_backward else "I", self.stage_index, i))

    def backward_weight_one_chunk(self, i, **_):
        self.seen.append(Action("W", self.stage_index, i))


def executed(name, p, m, v=1):
    """[what torch's schedule does on each rank]."""
    kind, orders = torchs.get_schedule_class(name), []
    schedule = None
    for rank in range(p):
        seen = []
        stages = [Recorder(chunk * p + rank, p, p * v, seen) for chunk in range(v)]
        if name in ONE_STAGE:
            schedule = kind(stages[0], n_microbatches=m)
        else:
            schedule = schedule or kind(stages, n_microbatches=m)
            schedule.rank, schedule._stages = rank, stages
        schedule._initialize_stage = schedule._initialize_stages = lambda *_: None
        schedule._step_microbatches()
        orders.append(seen)
    return orders


@pytest.mark.parametrize("schedule", ONE_STAGE)
def test_one_stage_per_rank_is_what_torch_executes_where_torch_accepts_it(schedule):
    for p, m in itertools.product(P, M):
        if schedule == "1F1B" and m < p:
            with pytest.raises(ValueError, match="must be greater than or equal to the number of stages"):
                executed(schedule, p, m)
        else:
            assert executed(schedule, p, m) == orders_of(schedule, p, m), (p, m)


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "InterleavedZeroBubble"])
@pytest.mark.parametrize("p, m, v", [(2, 5, 2), (3, 3, 2), (4, 8, 1), (4, 8, 2), (4, 10, 2), (5, 2, 1), (4, 12, 3)])
def test_several_stages_per_rank_are_what_torch_executes(schedule, p, m, v):
    if m % max(1, m // p):
        with pytest.raises(ValueError, match="multiple of the number of rounds"):
            executed(schedule, p, m, v)
        with pytest.raises(ValueError, match="do not split into"):
            orders_of(schedule, p, m, v)
    else:
        assert executed(schedule, p, m, v) == orders_of(schedule, p, m, v)


def test_what_comes_from_another_rank_costs_a_message_and_stages_may_take_unequal_times():
    run = simulate(orders_of("GPipe", 2, 1), message=Fraction(1, 4))
    assert [(slot.rank, slot.action.kind, slot.start) for slot in run.slots] == [
        (0, "F", 0), (1, "F", Fraction(5, 4)), (1, "B", Fraction(9, 4)), (0, "B", Fraction(9, 2)),
    ]  # fmt: skip
    assert simulate(orders_of("Interleaved1F1B", 1, 4, 2), message=5).bubble == 0
    unequal = {("F", 0): 1, ("B", 0): 2, ("F", 1): 3, ("B", 1): 6}
    assert simulate(orders_of("1F1B", 2, 4), unequal).length == 1 + 4 * 9 + 2


def test_a_schedule_that_waits_in_a_circle_is_refused_with_who_waits_for_what():
    backward_first = [[("F", 0, 0), ("B", 0, 0)], [("B", 1, 0), ("F", 1, 0)]]
    with pytest.raises(ValueError) as refused:
        simulate(backward_first)
    assert "rank 0 waits with B of micro-batch 0 on stage 0 for B of micro-batch 0 on stage 1" in str(refused.value)
    assert "rank 1 waits with B of micro-batch 0 on stage 1 for F of micro-batch 0 on stage 1" in str(refused.value)


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda order: order[:-1], "B is missing"),
        (lambda order: order[1:], "F is missing"),
        (lambda order: [*order, order[0]], "F of micro-batch 0 on stage 1 is there more than once"),
        (lambda order: [a if a.kind == "F" else Action("I", *a[1:]) for a in order], "the other half of B is missing"),
    ],
)
def test_a_schedule_that_leaves_something_out_or_does_it_twice_is_refused(change, said):
    orders = orders_of("1F1B", 2, 3)
    with pytest.raises(ValueError, match=said):
        simulate([orders[0], change(orders[1])])


@pytest.mark.parametrize(
    "given, said",
    [
        (("1f1b", 4, 8), "'1f1b' is unknown; use one of GPipe, 1F1B, Interleaved1F1B"),
        (("1F1B", 4, 0), "are at least 1"),
        (("GPipe", 4, 8, 2), "has one stage per rank, not v=2"),
        (("Interleaved1F1B", 4, 11, 2), "11 micro-batches do not split into 2 equal rounds"),
    ],
)
def test_numbers_that_fit_no_schedule_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        orders_of(*given)


def test_what_an_action_needs_and_what_a_split_backward_lets_go():
    assert needs(Action("F", 0, 2), 3) == []
    assert needs(Action("B", 1, 2), 3) == [("F", 1, 2), ("B", 2, 2)]
    assert needs(Action("I", 2, 2), 3) == [("F", 2, 2)] and needs(Action("W", 0, 1), 3) == [("I", 0, 1)]
    assert in_flight([("F", 0, 0), ("I", 0, 0), ("F", 0, 1), ("I", 0, 1), ("W", 0, 0), ("W", 0, 1)]) == 2


def asleep(ranks):
    took = {"F": 0.01, "B": 0.02}
    slots = slots_of(run_asleep(orders_of("1F1B", ranks.world_size, 3)[ranks.rank], took))
    return [(slot.rank, slot.action, slot.start, slot.end) for slot in slots]


@pytest.mark.parametrize("kind", [lambda found: map(list, found), set])
def test_what_an_action_needs_may_come_as_any_kind_of_row(kind):
    orders = orders_of("1F1B", 3, 4)
    assert simulate(orders, needs=lambda action, p: kind(needs(action, p))).slots == simulate(orders).slots
    with pytest.raises(ValueError, match="rank 0 waits with B of micro-batch 0 on stage 0 for F of micro-batch 9"):
        simulate(orders, needs=lambda action, p: kind([("F", 0, 9)] if action.kind == "B" else []))


def test_sleeping_stages_do_their_order_after_what_it_needs_and_every_rank_knows_it(pool):
    everybody = pool.run(2, asleep)
    assert everybody[0] == everybody[1]
    slots = everybody[0]
    assert [action for _, action, _, _ in slots] == [action for order in orders_of("1F1B", 2, 3) for action in order]
    ended = {action: end for _, action, _, end in slots}
    assert all(ended[before] <= start for _, action, start, _ in slots for before in needs(action, 2))
    assert all(end - start >= {"F": 0.01, "B": 0.02}[action.kind] for _, action, start, end in slots)
