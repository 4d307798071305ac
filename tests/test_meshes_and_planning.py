"""Lesson 10: grids as DeviceMesh has them, messages between nodes, 1,024 simulated ranks."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from definitions import taken_from
from manyhands.config.layout import AXES as LAYOUT_AXES
from manyhands.config.layout import Layout
from manyhands.measure import wire
from manyhands.measure.virtual_network import Link, VirtualNetwork
from manyhands.predict.simulated_rank import in_own_process

LESSON = "10_meshes_and_planning"
AXES = ("data", "pipeline", "tensor")


def ours(**given):
    names = "coordinates", "groups_of", "slow_bytes", "ring_sum", "crossing", "recommend", "phases", "exposed_s"
    return taken_from(LESSON, *names, **given)


# ------------------------------------------------------------------ grids


@pytest.mark.parametrize("layout", [Layout(2, 2, 1, 2), Layout(3, 1, 2, 2), Layout(1, 4, 1, 1)])
def test_coordinates_are_those_of_the_trainers_layout(layout):
    shape = (layout.pipeline, layout.replicate, layout.shard, layout.tensor)
    for rank in range(layout.world_size):
        place = layout.coordinates(rank)
        assert ours().coordinates(rank, shape) == [place[axis] for axis in LAYOUT_AXES]


@pytest.mark.parametrize("shape", [(2, 2, 2), (3, 1, 4), (5,), (2, 3, 2, 2)])
def test_the_groups_of_an_axis_hold_each_rank_once_and_differ_in_that_axis_alone(shape):
    lesson = ours()
    for axis in range(len(shape)):
        groups = lesson.groups_of(shape, axis)
        assert sorted(rank for group in groups for rank in group) == list(range(math.prod(shape)))
        for group in groups:
            places = [lesson.coordinates(rank, shape) for rank in group]
            assert [place.pop(axis) for place in places] == list(range(shape[axis]))
            assert all(place == places[0] for place in places)


def meshed(ranks, shape):
    """(coordinates, {axis: group}) by DeviceMesh, and by the lesson."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh, lesson = init_device_mesh("cpu", shape, mesh_dim_names=AXES), ours()
    theirs = {axis: dist.get_process_group_ranks(mesh[axis].get_group()) for axis in AXES}
    mine = {axis: next(g for g in lesson.groups_of(shape, i) if ranks.rank in g) for i, axis in enumerate(AXES)}
    return (list(mesh.get_coordinate()), theirs), (lesson.coordinates(ranks.rank, shape), mine)


@pytest.mark.parametrize(("n", "shape"), [(1, (1, 1, 1)), (4, (2, 1, 2)), (8, (2, 2, 2))])
def test_the_grid_is_device_meshs(pool, n, shape):
    for theirs, mine in pool.run(n, meshed, shape):
        assert theirs == mine


# ------------------------------------------------------------------ links


def sent_between(ranks, order, per_node):
    """(sum of the ring, bytes that this rank sent to another node, number of messages) in a group of that order."""
    group = dist.new_group(order, sort_ranks=False) if order != sorted(order) else dist.new_group(order)
    if ranks.rank not in order:
        return None
    x = torch.full((24,), float(ranks.rank))
    with wire.watch() as seen:
        ours().ring_sum(x, group)
    sends = [call for call in seen.calls if call.op == "send"]
    crossing = sum(call.bytes for call in sends if call.peer // per_node != ranks.rank // per_node)
    return x.tolist(), crossing, len(sends)


@pytest.mark.parametrize(("n", "order", "per_node"), [(4, [0, 1, 2, 3], 2), (4, [0, 2], 2), (3, [0, 1, 2], 2)])
def test_real_messages_between_nodes_are_those_of_the_formula(pool, n, order, per_node):
    found = [one for one in pool.run(n, sent_between, order, per_node) if one]
    assert all(values == [float(sum(order))] * 24 for values, _, _ in found)
    assert all(count == 2 * (len(order) - 1) for _, _, count in found)
    assert sum(crossing for _, crossing, _ in found) == ours().slow_bytes(order, 96, per_node)


ORDERS = [("pipeline", "data", "tensor"), ("data", "pipeline", "tensor"), ("tensor", "data", "pipeline")]


@pytest.fixture(scope="module")
def job():
    """The lesson's job of 16 GPUs: ({order: GB between nodes}, {order: ms that a GPU waits}), worked out here again."""
    stream, own = 2 * 8 * 2048 * 4096, 6.7e9 / 8
    payloads = {"data": 4 * own, "pipeline": 8 * stream, "tensor": 8 * 4 * 16 * stream}
    sizes = {"data": 2, "pipeline": 2, "tensor": 4}
    sent = {"data": payloads["data"], "pipeline": payloads["pipeline"], "tensor": 1.5 * payloads["tensor"]}
    behind = {"data": 4 * own * 8 * 2048 / (0.5 * 989.4e12), "pipeline": 0.0, "tensor": 0.0}
    given = {"SIZES": sizes, "PER_NODE": 8, "SENT": sent, "BEHIND_S": behind, "FAST": 450e9, "SLOW": 50e9}
    names = "coordinates", "groups_of", "slow_bytes", "exposed_s", "waited_ms", "crossing"
    lesson = taken_from(LESSON, *names, **given)
    between = {order: sum(lesson.crossing(order, sizes, payloads, 8).values()) / 1e9 for order in ORDERS}
    return between, {order: sum(lesson.waited_ms(order).values()) for order in ORDERS}


def test_data_outermost_sends_three_times_the_bytes_of_pipeline_outermost_and_waits_less(job):
    between, waited = job
    pipeline, data, tensor = ORDERS
    assert between[data] == pytest.approx(3.12 * between[pipeline], rel=0.01)
    assert round(waited[pipeline]) == 251 and round(waited[data]) == 231
    assert waited[tensor] > 4 * waited[data], "tensor ranks on two nodes"


def third_phase(ranks):
    """(virtual seconds of the lesson's all-gather, what each rank of it then has)."""
    link = Link(0.0, 1e9)
    given = {"NVLINK": link, "VirtualNetwork": VirtualNetwork, "ranks": ranks, "whole": torch.zeros(240)}
    given["whole"].chunk(ranks.world_size)[ranks.rank].fill_(ranks.rank + 1.0)
    seconds = taken_from(LESSON, "back_inside", **given).back_inside(dist.group.WORLD)
    return seconds, given["whole"].unique().tolist()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_way_back_takes_what_each_rank_must_receive_and_arrives(pool, n):
    for seconds, values in pool.run(n, third_phase):
        assert seconds == pytest.approx((n - 1) / n * 960 / 1e9)
        assert values == [r + 1.0 for r in range(n)]


# ------------------------------------------------------------------ a thousand ranks


def test_a_rank_of_8_64_and_1024_holds_what_the_formula_says():
    flags = ["--preset", "gpt-7b", "--parallel.tensor", "8"]
    eight, some, many = in_own_process([8, 64, 1024], flags)
    for found in (eight, some, many):
        planned = {kind: found["planned"][kind] for kind in found["held"]}
        assert found["held"] == planned, found["layout"]
    assert (some["layout"], many["layout"]) == ("shard 8 x tensor 8", "shard 128 x tensor 8")
    # 128 times as many data ranks hold a 128th, and padding
    assert 1 <= 128 * many["held"]["parameters"] / eight["held"]["parameters"] < 1.02


def test_what_is_not_simulated_is_refused_with_its_sentence():
    with pytest.raises(ValueError, match="strategy=zero1 is not simulated; use fsdp or ddp"):
        in_own_process([8], ["--preset", "nano", "--parallel.strategy", "zero1"])


# ------------------------------------------------------------------ the figure


def test_the_lessons_eight_layouts_exist_on_four_ranks():
    """The lesson's nodes are half of the ranks: what the planner calls hybrid then shards over one of them."""
    from manyhands.predict.layouts import Question, families
    from manyhands.predict.machines import machine_named
    from manyhands.predict.models import PlannedModel

    tiny = PlannedModel(vocab_size=65, block_size=8, n_layer=4, n_head=4, n_embd=32)
    node = replace(machine_named("h100"), gpus_per_node=2)
    found = {f.name: f for f in families(Question(tiny, node, 4, 8), ("none",), most_micro_batch=2)}
    assert found["hybrid 2 x 2"].variants[0].layout.shard == 2
    wanted = {"replicas 4", "zero1 4", "zero2 4", "zero3 4", "replicas 2 x pipeline 2", "zero3 2 x tensor 2"}
    assert wanted | {"tensor 2 x pipeline 2"} <= {name for name, family in found.items() if family.variants}
