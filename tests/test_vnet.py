"""Virtual time follows the formulas, repeats bit for bit also on a loaded machine, and moves real data."""

import io
import random
import time

import pytest
import torch
from manyhands.lessons.when_it_breaks import draw_heat_maps
from manyhands.measure.virtual_network import Link, VirtualNetwork
from manyhands.plots.schedule import gantt

FAST, SLOW = Link(1e-6, 1e9), Link(1e-4, 1e8)


@pytest.fixture(scope="module")
def run(pool):
    """run(n, function, *args): what function(ranks, *args) returned on each of n ranks."""
    return pool.run


def _ring(ranks, length, dtype):
    net = VirtualNetwork(ranks, FAST)
    x = (torch.arange(length) + ranks.rank).to(dtype)
    return net.all_reduce(x).tolist(), net.clock_s


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_rings_virtual_time_is_alpha_beta_and_its_sum_is_real(run, n):
    length = 12 * 1000
    expected = (torch.arange(length) * n + n * (n - 1) // 2).tolist()
    for total, clock_s in run(n, _ring, length, torch.float64):
        assert total == expected
        assert clock_s == pytest.approx(2 * (n - 1) * FAST.cost_s(8 * length / n), rel=1e-12)


def _rules(ranks):
    net = VirtualNetwork(ranks, Link(1.0, 8.0))
    x = torch.ones(2, dtype=torch.float64)  # a message costs 1 + 16/8 = 3 s
    history = []
    if ranks.rank == 0:
        net.compute(5.0)
        net.send(x, 1)  # busy from 5 to 8
        history.append(net.clock_s)
        net.send(x, 1)
    else:
        net.recv(x, 0)  # waits until 5, here at 8
        history.append(net.clock_s)
        net.compute(10.0)
        net.recv(x, 0)  # sent at 8, long ago: 18 + 3
    history.append(net.clock_s)
    return history


def test_a_receive_ends_at_the_later_of_both_clocks_plus_the_cost(run):
    assert run(2, _rules) == [[8.0, 11.0], [8.0, 21.0]]


def _nodes(ranks):
    net = VirtualNetwork(ranks, FAST, SLOW, ranks_per_node=2)
    return [net.link(other) is FAST for other in range(ranks.world_size)]


def test_links_within_a_node_differ_from_links_between_nodes(run):
    assert run(4, _nodes) == [[True, True, False, False]] * 2 + [[False, False, True, True]] * 2


def _overlap(ranks, n_buckets):
    net = VirtualNetwork(ranks, Link(2e-4, 1e8))
    gradient = torch.full((240_000 // n_buckets,), float(ranks.rank))
    works = []
    for bucket in range(n_buckets):
        net.compute(12e-3 / n_buckets, "backward")
        with net.asynchronous(f"bucket {bucket}") as work:
            net.all_reduce(gradient)
        works.append(work)
    net.wait(*works)
    net.compute(1e-3, "optimizer")
    return net.clock_s, net.spans


def test_step_time_against_number_of_buckets_is_a_u(run):
    steps = [run(2, _overlap, buckets)[0][0] for buckets in (1, 8, 80)]
    assert steps[1] < steps[0]  # one bucket: no overlap
    assert steps[1] < steps[2]  # eighty buckets: latency


def test_asynchronous_messages_overlap_with_compute_and_wait_for_each_other(run):
    (step_s, spans), _ = run(2, _overlap, 4)
    ends = {}
    for span in spans:
        assert span.start_s >= ends.get(span.lane, 0.0)  # one thing at a time on each clock
        ends[span.lane] = span.end_s
    assert step_s < sum(span.end_s - span.start_s for span in spans if span.lane != "waiting")


def _straggling(ranks, late_s=0.0):
    """A rank that is slow from step 2 on, asynchronous buckets included: (steps, spans) on rank 0.

    In real time each rank is up to `late_s` late for all that it does, as on a machine on which much else runs.
    """
    luck = random.Random(ranks.rank)

    def wait():
        time.sleep(luck.uniform(0, late_s))

    net = VirtualNetwork(ranks, Link(1e-4, 1e8), slowdown=lambda rank, step: 2.5 if (rank, step) > (1, 1) else 1 / 3)
    gradient = torch.ones(30_001)
    for step in range(6):
        wait()
        with net.step(step):
            wait()
            net.compute(2e-3, "forward")
            with net.asynchronous("bucket") as work:
                wait()
                net.all_reduce(gradient)
            wait()
            net.compute(1e-3, "backward")
            net.wait(work)
            wait()
            net.all_reduce(gradient[:1000])
    return net.gather_steps(), net.gather_spans()


def _pictures(steps, spans):
    """The bytes of both figures."""
    for figure in (
        draw_heat_maps({"waiting": steps["waiting"]}, "s", virtual=True),
        gantt(spans, "steps", virtual=True),
    ):
        picture = io.BytesIO()
        figure.savefig(picture, format="png")
        yield picture.getvalue()


def test_steps_spans_and_figures_repeat_bit_for_bit_however_late_the_ranks_are(run):
    at_once, late = run(3, _straggling)[0], run(3, _straggling, 0.02)[0]
    assert late == at_once
    assert list(_pictures(*late)) == list(_pictures(*at_once))


def _one_slow_rank(ranks, slowdown):
    net = VirtualNetwork(ranks, Link(0.0, 8e3), slowdown=slowdown)  # 1 ms per number of a float64
    for step in range(3):
        with net.step(step):
            net.compute(10e-3)
            net.all_reduce(torch.ones(ranks.world_size, dtype=torch.float64))
    return net.clock_s, net.steps, net.gather_steps(), net.gather_spans()


def test_all_wait_for_the_straggler_but_the_straggler(run):
    results = run(4, _one_slow_rank, {2: 3.0})
    steps = results[0][2]
    assert [result[2] for result in results[1:]] == [None] * 3
    assert steps["compute"] == [[pytest.approx(0.030 if rank == 2 else 0.010)] * 3 for rank in range(4)]
    assert steps["communication"] == [[pytest.approx(6e-3)] * 3] * 4  # 6 hops of one number
    assert [sum(waits) for waits in steps["waiting"]] == [
        pytest.approx(0 if rank == 2 else 3 * 0.020, abs=3e-3) for rank in range(4)
    ]
    for rank, (clock_s, own, _, _) in enumerate(results):
        assert [step["total"] for step in own] == steps["total"][rank]
        assert sum(steps["total"][rank]) == pytest.approx(clock_s)
        for step in own:
            lanes = step["compute"] + step["communication"] + step["waiting"]
            assert step["total"] == pytest.approx(lanes)
    waits = {span.rank for span in results[0][3] if span.lane == "waiting"}
    assert waits == {0, 1, 3}


def _refusals(ranks):
    """What each mistake is told, on this rank."""

    def unfilled():
        VirtualNetwork(ranks, FAST, SLOW, ranks_per_node=3)

    def stranger():
        VirtualNetwork(ranks, FAST, slowdown={3: 2.0})

    def standstill():
        VirtualNetwork(ranks, FAST, slowdown={0: 0.0, 1: 0.0}).compute(1.0)

    def nested():
        net = VirtualNetwork(ranks, FAST)
        with net.step(1), net.step(2):
            pass

    def uneven():
        net = VirtualNetwork(ranks, FAST)
        for step in range(1 + ranks.rank):
            with net.step(step):
                pass
        net.gather_steps()

    told = []
    for mistake in (unfilled, stranger, standstill, nested, uneven):
        with pytest.raises(ValueError) as caught:
            mistake()
        told.append(str(caught.value).split(";")[0])
    return told


def test_impossible_nodes_slowdowns_and_steps_are_refused_on_all_ranks(run):
    told = [
        "2 ranks do not fill nodes of 3",
        "slowdown names rank 3, but the 2 ranks are 0 to 1",
        "compute takes 0.0 x 1.0 s",
        "step 2 begins inside step 1",
        "ranks made [1, 2] steps",
    ]
    assert run(2, _refusals) == [told, told]


@pytest.mark.parametrize("length", [0, 1, 3, 7])
def test_the_ring_takes_any_length_and_dtype(run, length):
    for dtype in (torch.int64, torch.float32, torch.bfloat16, torch.uint8):
        for total, _ in run(3, _ring, length, dtype):
            assert total == [3 * i + 3 for i in range(length)]
