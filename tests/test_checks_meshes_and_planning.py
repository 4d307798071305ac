"""Each check of lesson 10 accepts right answers in another style and rejects mutants, by name, with the numbers."""

import itertools
import math

import numpy as np
import torch
from exercises import Answers
from manyhands.checks import meshes_and_planning as checks
from manyhands.checks.meshes_and_planning import _between, _groups, _place

# ---- grids ----


def by_strides(rank, shape):  # right
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return tuple(rank // stride % size for stride, size in zip(strides, shape, strict=True))


def by_numpy(rank, shape):  # right
    return np.unravel_index(rank, shape)


def first_axis_fastest(rank, shape):
    return _place(rank, shape[::-1])[::-1]


def back_to_front(rank, shape):
    return _place(rank, shape)[::-1]


def for_two_axes(rank, shape):
    return list(divmod(rank, shape[-1]))


def groups_by_arange(shape, axis):  # right
    return np.moveaxis(np.arange(math.prod(shape)).reshape(shape), axis, -1).reshape(-1, shape[axis]).tolist()


def groups_as_tensors(shape, axis):  # right
    grid = torch.arange(math.prod(shape)).reshape(shape)
    return [tuple(row.tolist()) for row in grid.movedim(axis, -1).reshape(-1, shape[axis])]


def consecutive(shape, axis):
    ranks = list(range(math.prod(shape)))
    return [ranks[i : i + shape[axis]] for i in range(0, len(ranks), shape[axis])]


def counted_from_the_end(shape, axis):
    return _groups(shape, len(shape) - 1 - axis)


def only_rank_0s(shape, axis):
    return [group for group in _groups(shape, axis) if 0 in group]


def one_for_each_rank(shape, axis):
    groups = _groups(shape, axis)
    return [next(g for g in groups if rank in g) for rank in range(math.prod(shape))]


def reversed_groups(shape, axis):
    return [group[::-1] for group in _groups(shape, axis)]


# ---- links ----


def _slow(hops=lambda group, nodes: zip(nodes, nodes[1:] + nodes[:1], strict=True), factor=None):
    def answer(group, payload, per_node):
        n, nodes = len(group), [rank // per_node for rank in group]
        each = 2 * (n - 1) / n if factor is None else factor(n)
        return sum(a != b for a, b in hops(group, nodes)) * each * payload

    return answer


def slow_by_tensors(group, payload, per_node):  # right
    nodes = torch.tensor(group) // per_node
    n = len(group)
    return (nodes != nodes.roll(1)).sum() * (2 * (n - 1) * payload / n)


def every_hop(group, payload, per_node):
    return 2 * (len(group) - 1) * payload


def of_one_rank(group, payload, per_node):
    return 2 * (len(group) - 1) / len(group) * payload


# ---- plans ----


def _recommend(within=1.05, fits_first=True, key=lambda plan: (plan[3], plan[2]), whole=False):
    def answer(plans, memory):
        fitting = [plan for plan in plans if plan[1] <= memory]
        if not fitting:
            return None
        limit = within * min(plan[2] for plan in (fitting if fits_first else plans))
        close = [plan for plan in fitting if plan[2] <= limit]
        if not close:
            return None
        best = min(close, key=key)
        return best if whole else best[0]

    return answer


def by_sorting(plans, memory):  # right
    rows = sorted((plan for plan in plans if plan[1] <= memory), key=lambda plan: plan[2])
    rows = [plan for plan in rows if plan[2] <= rows[0][2] * 1.05]
    return sorted(rows, key=lambda plan: plan[3])[0][0] if rows else None  # sorted is stable


def fails_on_nothing(plans, memory):
    rows = [plan for plan in plans if plan[1] <= memory]
    rows = [plan for plan in rows if plan[2] <= 1.05 * min(row[2] for row in rows)]
    return sorted(rows, key=lambda plan: (plan[3], plan[2]))[0][0]


# ---- exercises ----


def tensor_last(sizes, payloads, per_node):
    return "pipeline", "data", "tensor"


def by_search(sizes, payloads, per_node):  # right
    return list(sorted(itertools.permutations(sizes), key=lambda o: _between(o, sizes, payloads, per_node))[0])


def by_payload(sizes, payloads, per_node):
    return tuple(sorted(sizes, key=payloads.get, reverse=True))


def _roofline(giga=1e9, tera=1e12, bits=8, take=max, name=None):
    def answer(flop, memory_bytes, link_bytes, peak_tflops, memory_gbs, link_gbits):
        seconds = {
            "compute": flop / (peak_tflops * tera),
            "memory": memory_bytes / (memory_gbs * giga),
            "link": link_bytes * bits / (link_gbits * 1e9),
        }
        found = take(seconds.values())
        return found, name or max(seconds, key=seconds.get)

    return answer


def roofline_by_numpy(flop, memory_bytes, link_bytes, peak_tflops, memory_gbs, link_gbits):  # right
    seconds = np.array(
        [flop / peak_tflops * 1e-12, memory_bytes / memory_gbs * 1e-9, link_bytes / (link_gbits * 125e6)]
    )
    return seconds.max(), ("compute", "memory", "link")[seconds.argmax()]


def _phases(first=lambda M, G: (G - 1) / G * M, second=lambda M, G, N: 2 * (N - 1) / N * M / G, third=None):
    return lambda M, G, N: [first(M, G), second(M, G, N), (third or first)(M, G)]


def phases_as_messages(M, G, N):  # right
    part = M / G
    return np.array([(G - 1) * part, 2 * (N - 1) * (part / N), (G - 1) * part])


def as_first_published(M, G):
    return 2 * (G - 1) / G * M


def as_changed(M, G):
    return 2 * (G - 1) / G * M / G


REJECTED = {
    "coordinates": {
        "the first axis fastest": (first_axis_fastest, "the last axis runs fastest, yours is the first"),
        "back to front": (back_to_front, "should be [1, 2], not [2, 1]: these are the coordinates back"),
        "for two axes": (for_two_axes, "should be [1, 1, 1], not [3, 1]"),
        "by division": (lambda rank, shape: [rank / size for size in shape], "should be [1, 2], not [2.5"),
    },
    "groups_of": {
        "ranges": (consecutive, "should be [[0, 3], [1, 4], [2, 5]], not [[0, 1], [2, 3], [4, 5]]"),
        "counted from the end": (counted_from_the_end, "of a grid of 2 x 3 should be [[0, 3], [1, 4], [2, 5]], not"),
        "rank 0's alone": (only_rank_0s, "each rank is in exactly one"),
        "one for each rank": (one_for_each_rank, "each rank is in exactly one"),
        "all in one": (lambda shape, axis: [list(range(math.prod(shape)))], "[[0, 3], [1, 4], [2, 5]], not [[0, 1, 2"),
        "back to front": (reversed_groups, "in a group ranks have their order"),
    },
    "slow_bytes": {
        "every hop": (every_hop, "all 6 hops; 3 of them cross"),
        "one rank's": (of_one_rank, "what a rank sends, whether it crosses or not"),
        "a part": (lambda *a: _slow()(*a) / len(a[0]), "one rank's share of them"),
        "half": (_slow(factor=lambda n: (n - 1) / n), "that is half; an all-reduce goes around twice"),
        "no way back": (_slow(hops=lambda g, nodes: zip(nodes, nodes[1:])), "without the hop from the last rank"),  # noqa: B905
        "whole payloads": (_slow(factor=lambda n: 1), "the whole payload per hop"),
        "two payloads": (_slow(factor=lambda n: 2), "2 payloads per hop"),
    },
    "recommend": {
        "the fastest": (_recommend(within=1.0), "(4 % slower with fewer axes) should be 'b', not 'a'"),
        "the simplest of all": (_recommend(within=9.9), "(10 % slower is not close) should be 'a', not 'b'"),
        "the fastest that does not fit": (_recommend(fits_first=False), "what does not fit sets no limit"),
        "the least memory": (_recommend(key=lambda plan: plan[1]), "not"),
        "the first of equals": (_recommend(key=lambda plan: plan[3]), "of equally many axes the faster"),
        "a row": (_recommend(whole=True), "return the plan's name alone"),
        "fails on nothing": (fails_on_nothing, "your code raised IndexError"),
    },
    "best_order": {
        "always tensor inside": (tensor_last, "bytes between nodes, "),
        "innermost first": (lambda *a: by_search(*a)[::-1], "is the outermost axis first?"),
        "most bytes outermost": (by_payload, "bytes between nodes, "),
        "two axes": (lambda *_: ("pipeline", "tensor"), "return each of pipeline, data, tensor once"),
    },
    "roofline": {
        "bits as bytes": (_roofline(bits=1), "the time should be"),
        "sum": (_roofline(take=sum), "that is their sum; they overlap"),
        "binary giga": (_roofline(giga=2**30), "with GB of 2^30 bytes"),
        "binary tera": (_roofline(tera=2**40), "with tera as 2^40"),
        "milliseconds": (lambda *a: (1e3 * _roofline()(*a)[0], _roofline()(*a)[1]), "look at the units"),
        "always compute": (_roofline(name="compute"), "the seconds are right; what bounds them should be"),
    },
    "phases": {
        "as first published": (_phases(as_first_published), "that is a whole all-reduce"),
        "as changed": (_phases(third=as_changed), "in the all-gather inside the node"),
        "a shard goes back": (_phases(third=lambda M, G: (G - 1) / G * M / G), "a G-th of it; but each rank must"),
        "all between": (_phases(second=lambda M, G, N: 2 * (N - 1) / N * M), "all M bytes; inside the node M/G is"),
        "half between": (_phases(second=lambda M, G, N: (N - 1) / N * M / G), "an all-reduce goes around twice"),
        "two": (lambda M, G, N: _phases()(M, G, N)[:2], "which the check cannot use (ValueError: not enough values"),
    },
}  # fmt: skip
RIGHT = {
    "coordinates": [by_strides, by_numpy, lambda rank, shape: iter(by_strides(rank, shape))],
    "groups_of": [groups_by_arange, groups_as_tensors],
    "slow_bytes": [_slow(), slow_by_tensors],
    "recommend": [_recommend(), by_sorting],
    "best_order": [by_search, lambda *a: tuple(by_search(*a))],
    "roofline": [_roofline(), roofline_by_numpy],
    "phases": [_phases(), phases_as_messages],
}


class TestAnswers(Answers):
    lesson, checks, rejected, right = "10_meshes_and_planning", checks, REJECTED, RIGHT
    around = "coordinates", "groups_of", "slow_bytes", "crossing"


def test_the_changed_formula_is_right_for_nodes_of_two_and_that_is_why_nobody_saw():
    inside = _phases()(800, 2, 2)[2]
    assert as_changed(800, 2) == inside == as_first_published(800, 2) / 2
    assert as_changed(800, 8) == _phases()(800, 8, 2)[2] / 4
