"""The ring of lesson 02, taken from the lesson's own cells: right sums, and no byte more than the formula."""

import math

import pytest
import torch
import torch.distributed as dist
from definitions import taken_from
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from manyhands.measure import wire
from rank_pool import run_on_ranks

pytestmark = pytest.mark.ranks

DTYPES = {  # what gloo's own all-reduce takes: no int16
    name: getattr(torch, name)
    for name in ("int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
}
NAMES = (
    "exchange", "ring_reduce_scatter", "ring_all_gather", "ring_all_reduce", "all_reduce_any_length",
    "suspicious_ring", "mended_ring",
)  # fmt: skip


def lesson(ranks):
    n = ranks.world_size
    given = {"rank": ranks.rank, "world_size": n, "left": (ranks.rank - 1) % n, "right": (ranks.rank + 1) % n}
    return vars(taken_from("02_collectives", *NAMES, **given))


def _filled(length, dtype, rank):
    """Small whole numbers, different on each rank: exact in every dtype, also their sum over four ranks."""
    return (torch.arange(length) % 7 + rank).to(dtype)


def _sums(ranks, cases):
    """For each (algorithm, length, dtype): its result, gloo's own, and what it sent."""
    functions, found = lesson(ranks), []
    for algorithm, length, dtype in cases:
        x_N = _filled(length, DTYPES[dtype], ranks.rank)
        library_N = x_N.clone()
        dist.all_reduce(library_N)
        with wire.watch() as seen:
            returned = functions[algorithm](x_N)
        same = torch.equal(x_N, library_N) and x_N.dtype == library_N.dtype and returned is x_N
        found.append((same, seen.messages, seen.sent_bytes, [call.op for call in seen.calls]))
    return found


cases = st.lists(
    st.tuples(
        st.just("all_reduce_any_length"),
        st.one_of(st.sampled_from([0, 1, 2, 3, 4, 5]), st.integers(0, 3000)),
        st.sampled_from(sorted(DTYPES)),
    ),
    min_size=30,
    max_size=30,
)


@pytest.mark.parametrize("n", [1, 2, 3, pytest.param(4, marks=pytest.mark.full)])
# shrinking would start ranks hundreds of times
@settings(max_examples=3, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(cases=cases)
def test_the_ring_sums_any_length_and_dtype_like_gloo_with_2_n_minus_1_messages(n, cases):
    for found in run_on_ranks(n, _sums, cases):
        for (_, length, dtype), (same, messages, sent_bytes, ops) in zip(cases, found, strict=True):
            assert same, (n, length, dtype)
            assert messages == 2 * (n - 1)
            assert set(ops) <= {"send", "recv"}
            assert sent_bytes <= messages * math.ceil(length / n) * DTYPES[dtype].itemsize


@pytest.mark.parametrize("algorithm", ["ring_all_reduce", "mended_ring"])
def test_the_rings_for_divisible_lengths_send_the_same_on_every_rank(algorithm):
    cases = [(algorithm, length, "float32") for length in (3, 300, 30_000)]
    for found in run_on_ranks(3, _sums, cases):
        for (_, length, _), (same, messages, sent_bytes, _) in zip(cases, found, strict=True):
            assert (same, messages, sent_bytes) == (True, 4, wire.ring_all_reduce_bytes(4 * length, 3))


def _transport(ranks, algorithm):
    function, x_N = lesson(ranks)[algorithm], torch.ones(600_000)
    function(x_N)  # connections are made at first use
    dist.barrier()
    with wire.watch(sockets=True) as seen:
        function(x_N)
        dist.barrier()  # everybody has read everything; a hundred bytes more
    return seen.transport_bytes, x_N.nbytes


@pytest.mark.skipif(wire._tcp_sockets() is None, reason="TCP_INFO is Linux's")
@pytest.mark.parametrize("n", [3, *(pytest.param(n, marks=pytest.mark.full) for n in (2, 4))])
def test_on_the_wire_the_ring_is_within_one_percent_of_its_formula(n):
    for transported, payload in run_on_ranks(n, _transport, "ring_all_reduce"):
        assert transported == pytest.approx(wire.ring_all_reduce_bytes(payload, n), rel=0.01)


@pytest.mark.skipif(wire._tcp_sockets() is None, reason="TCP_INFO is Linux's")
def test_the_suspicious_ring_is_right_and_puts_n_times_the_bytes_on_the_wire():
    assert all(found[0][0] for found in run_on_ranks(4, _sums, [("suspicious_ring", 400, "float32")]))
    for transported, payload in run_on_ranks(4, _transport, "suspicious_ring"):
        assert transported == pytest.approx(4 * wire.ring_all_reduce_bytes(payload, 4), rel=0.01)
