"""Virtual time follows the formulas, repeats bit for bit also on a loaded machine, and moves real data."""

import multiprocessing
import time

import pytest
import torch
from manyhands.vnet import Link, VirtualNetwork
from rank_pool import run_on_ranks

FAST, SLOW = Link(1e-6, 1e9), Link(1e-4, 1e8)


def _ring(ranks, length, dtype):
    net = VirtualNetwork(ranks, FAST)
    x = (torch.arange(length) + ranks.rank).to(dtype)
    return net.all_reduce(x).tolist(), net.clock_s


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_rings_virtual_time_is_alpha_beta_and_its_sum_is_real(n):
    length = 12 * 1000
    expected = (torch.arange(length) * n + n * (n - 1) // 2).tolist()
    for total, clock_s in run_on_ranks(n, _ring, length, torch.float64):
        assert total == expected
        assert clock_s == pytest.approx(2 * (n - 1) * FAST.cost_s(8 * length / n), rel=1e-12)


@pytest.mark.parametrize("length", [0, 1, 3, 7])
def test_the_ring_takes_any_length_and_dtype(length):
    for dtype in (torch.int64, torch.float32, torch.bfloat16, torch.uint8):
        for total, _ in run_on_ranks(3, _ring, length, dtype):
            assert total == [3 * i + 3 for i in range(length)]


def _rules(ranks):
    net, x = (
        VirtualNetwork(ranks, Link(1.0, 8.0)),
        torch.ones(2, dtype=torch.float64),
    )  # a message costs 1 + 16/8 = 3 s
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


def test_a_receive_ends_at_the_later_of_both_clocks_plus_the_cost():
    assert run_on_ranks(2, _rules) == [[8.0, 11.0], [8.0, 21.0]]


def _nodes(ranks):
    net = VirtualNetwork(ranks, FAST, SLOW, ranks_per_node=2)
    return [net.link(other) is FAST for other in range(ranks.world_size)]


def test_links_within_a_node_differ_from_links_between_nodes():
    assert run_on_ranks(4, _nodes) == [[True, True, False, False]] * 2 + [[False, False, True, True]] * 2


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


def test_step_time_against_number_of_buckets_is_a_u():
    steps = [run_on_ranks(2, _overlap, buckets)[0][0] for buckets in (1, 8, 80)]
    assert steps[1] < steps[0]  # one bucket: no overlap
    assert steps[1] < steps[2]  # eighty buckets: latency


def test_asynchronous_messages_overlap_with_compute_and_wait_for_each_other():
    (step_s, spans), _ = run_on_ranks(2, _overlap, 4)
    ends = {}
    for span in spans:
        assert span.start_s >= ends.get(span.lane, 0.0)  # one thing at a time on each clock
        ends[span.lane] = span.end_s
    assert step_s < sum(span.end_s - span.start_s for span in spans if span.lane != "waiting")


def _repeat(ranks, times):
    return [_overlap(ranks, 8) for _ in range(times)]


def _burn(seconds):
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        pass


def test_runs_repeat_bit_for_bit_also_under_load():
    quiet = run_on_ranks(3, _repeat, 2)
    assert all(first == second for first, second in quiet)
    loads = [
        multiprocessing.get_context("spawn").Process(target=_burn, args=(6,), daemon=True) for _ in range(3)
    ]
    for load in loads:
        load.start()
    try:
        assert run_on_ranks(3, _repeat, 2) == quiet
    finally:
        for load in loads:
            load.kill()
            load.join()


def _reset(ranks):
    net = VirtualNetwork(ranks, FAST)
    if ranks.rank == 0:
        net.wait(net.isend(torch.ones(3), 1))
    else:
        net.recv(torch.empty(3), 0)
    spans = net.gather_spans()
    net.reset()
    return net.clock_s, net.communication_clock_s, net.spans, spans


def test_spans_are_gathered_on_rank_0_and_reset_starts_over():
    first, second = run_on_ranks(2, _reset)
    assert first[:3] == second[:3] == (0.0, 0.0, [])
    assert [(span.rank, span.lane, span.name) for span in first[3]] == [
        (0, "communication", "to 1"),
        (0, "waiting", "wait"),
        (1, "communication", "from 0"),
    ]
    assert second[3] is None


def _all_send_first(ranks):
    net = VirtualNetwork(ranks, Link(1.0, 8.0))
    mine, theirs = torch.full((2,), float(ranks.rank)), torch.empty(2)
    work = net.isend(mine, (ranks.rank + 1) % 3)
    net.recv(theirs, (ranks.rank - 1) % 3)
    net.wait(work)
    return theirs.tolist(), net.clock_s


def test_an_asynchronous_send_does_not_wait_for_its_receiver():
    assert run_on_ranks(3, _all_send_first) == [([(rank - 1) % 3] * 2, 2.0) for rank in range(3)]


def _unfilled_nodes(ranks):
    VirtualNetwork(ranks, FAST, SLOW, ranks_per_node=2)


def test_nodes_that_the_ranks_do_not_fill_are_refused():
    with pytest.raises(AssertionError, match="3 ranks do not fill nodes of 2"):
        run_on_ranks(3, _unfilled_nodes)


def test_impossible_links_are_refused():
    with pytest.raises(ValueError, match="bandwidth positive"):
        Link(1e-6, 0)
    with pytest.raises(ValueError, match="at least 0"):
        Link(-1e-6, 1)
