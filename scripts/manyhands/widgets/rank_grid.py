"""Ranks on a grid over nodes, and what each link carries: axes and their order, ranks per node, one rank's partners."""

from itertools import permutations
from math import prod
from typing import NamedTuple

import numpy as np

from manyhands.plots.looks import EDGE, FAINT, HEAT, INK, PAPER, QUIET, box, card, rank_box, write
from manyhands.widgets.display import show_with_controls

AXES = ("data", "pipeline", "tensor")
ORDERS = tuple(" x ".join(order) for order in permutations(AXES))
MOST_RANKS = 64
MARKS = {"pipeline": "P", "data": "D", "tensor": "T"}
GB = 1e9
TOKENS, WIDTH, LAYERS, PARAMETERS = 8 * 2048, 4096, 32, 6.7e9  # lesson 10's 7B model, 8 sequences per micro-batch
MICRO_BATCHES = 8


class OnLink(NamedTuple):
    """The bytes that go over one link in a step, in one direction."""

    axis: str
    bytes: float


def partners(sizes: dict[str, int], rank: int) -> dict[str, list[int]]:
    """{axis: ranks of the group that `rank` is in, in order}, on a grid of {axis: ranks}, the last axis fastest."""
    shape = tuple(sizes.values())
    grid, here = np.arange(prod(shape)).reshape(shape), np.unravel_index(rank, shape)
    return {axis: grid[(*here[:i], slice(None), *here[i + 1 :])].tolist() for i, axis in enumerate(sizes)}


def payloads_of_7b(sizes: dict[str, int]) -> dict[str, float]:
    """{axis: bytes that a rank communicates on it in a step}: activations, gradients in fp32, all-reduces of layers."""
    activation = 2 * TOKENS * WIDTH  # bf16
    return {
        "pipeline": MICRO_BATCHES * activation,  # as many bytes come back
        "data": 4 * PARAMETERS / (sizes["pipeline"] * sizes["tensor"]),
        "tensor": MICRO_BATCHES * 4 * LAYERS / sizes["pipeline"] * activation,
    }


def links(sizes: dict[str, int], payloads: dict[str, float]) -> dict[tuple[int, int], OnLink]:
    """{(from rank, to rank): OnLink} of a step.

    To the next rank of a ring goes 2 (n-1)/n of an all-reduce's payload (lesson 02). Stages stand in a line: they send
    activations to the next one and gradients back.
    """
    found = {}
    for rank in range(prod(sizes.values())):
        for axis, group in partners(sizes, rank).items():
            n, me = len(group), group.index(rank)
            if axis == "pipeline":
                for other in (me - 1, me + 1):
                    if 0 <= other < n:
                        found[rank, group[other]] = OnLink(axis, payloads[axis])
            elif n > 1:
                found[rank, group[(me + 1) % n]] = OnLink(axis, 2 * (n - 1) / n * payloads[axis])
    return found


def between_nodes(sent: dict[tuple[int, int], OnLink], per_node: int) -> dict[str, float]:
    """{axis: bytes of a step that leave a node, all ranks together}; an axis that sends nothing is left out."""
    found = {}
    for (start, end), one in sent.items():
        leaves = start // per_node != end // per_node
        found[one.axis] = found.get(one.axis, 0.0) + leaves * one.bytes
    return found


def rank_grid_picture(pipeline=2, data=2, tensor=2, per_node=4, rank=0, order=ORDERS[0]):
    """(a matplotlib Figure, its text): left a box per rank, `rank`'s partners with a letter; right the bytes from each
    to each. `order` names the axes, the outermost first. Raise ValueError where the numbers make no grid.
    """
    n, given = pipeline * data * tensor, {"pipeline": pipeline, "data": data, "tensor": tensor}
    if n > MOST_RANKS:
        raise ValueError(f"{pipeline} x {data} x {tensor} = {n} ranks are more than {MOST_RANKS}; use fewer")
    if n % per_node:
        raise ValueError(f"{n} ranks do not fill nodes of {per_node}; use a divisor of {n}")
    if rank >= n:
        raise ValueError(f"there is no rank {rank} among {n}; use 0 to {n - 1}")
    sizes = {axis: given[axis] for axis in order.split(" x ")}
    sent, groups = links(sizes, payloads_of_7b(sizes)), partners(sizes, rank)
    across = min(8, per_node)  # boxes in a line; a large node takes several
    lines = n // per_node * (1.6 + 5.2 * -(-per_node // across))
    height, grid = max(46, 23 + lines), " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    figure, axes = card(120, height, f"{grid}: rank {rank} and its partners")
    _boxes(axes, groups, rank, n, per_node, across)
    words = _in_words(groups, sent, rank, per_node)
    for i, line in enumerate(words):
        write(axes, 2, lines + 10.5 + 3.4 * i, line, ha="left", weight="bold" if i == 3 else "normal")
    write(axes, 70, 2.4, "GB per step from rank (row) to rank (column)", size=12, weight="bold", ha="left")
    _matrix(figure, sent, n, per_node, height)
    told = ", ".join(f"{axis} {' '.join(map(str, group))}" for axis, group in groups.items())
    said = "; ".join(line.replace("  ", " ") for line in words)
    return figure, f"rank {rank} of {grid} is in the groups {told}. {said}"


def show_rank_grid(**settings):
    """Choose sizes, order, ranks per node and a rank (as for `rank_grid_picture`). A picture where nobody can."""

    def number(label, value, least=1):
        return "BoundedIntText", value, label, 10, 16, {"min": least, "max": MOST_RANKS}

    show_with_controls(
        rank_grid_picture, settings,
        {"pipeline": number("pipeline ranks", 2), "data": number("data ranks", 2), "tensor": number("tensor ranks", 2)},
        {
            "per_node": number("ranks per node", 4),
            "rank": number("look at rank", 0, least=0),
            "order": ("Dropdown", ORDERS[0], "outermost first", 10, 28, {"options": list(ORDERS)}),
        },
    )  # fmt: skip


def _boxes(axes, groups, rank, n, per_node, across):
    """A box for each rank, node by node; partners of `rank` have the letter of the axis that they share with it."""
    tall = 1.6 + 5.2 * -(-per_node // across)
    for other in range(n):
        node, place = divmod(other, per_node)
        x, y = 10 + 6.9 * (place % across), 6 + node * tall + 5.2 * (place // across)
        if place == 0:
            write(axes, 2, y + 2, f"node {node}", ha="left", colour=QUIET)
        marks = "".join(MARKS[axis] for axis in AXES if other in groups[axis] and other != rank)
        if other == rank:
            rank_box(axes, rank, x, y, width=6.3, height=4)
        elif marks:
            box(axes, x, y, 6.3, 4, f"{other} {marks}", face=PAPER, edge=EDGE, weight="bold")
        else:
            box(axes, x, y, 6.3, 4, str(other), face=PAPER, edge=EDGE, dotted=True)


def _matrix(figure, sent, n, per_node, height):
    """Draw what each rank sends to each in a step; dark lines frame the nodes: all traffic outside them is slow."""
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Rectangle

    inch = height / 10
    side = min(3.6, inch - 1.0)
    axes = figure.add_axes((7.6 / 12, 1 - (0.6 + side) / inch, side / 12, side / inch))
    bar = figure.add_axes((11.25 / 12, 1 - (0.6 + side) / inch, 0.15 / 12, side / inch))
    values = [[float("nan")] * n for _ in range(n)]
    for (start, end), one in sent.items():
        values[start][end] = one.bytes / GB
    image = axes.imshow(values, cmap=HEAT, norm=LogNorm(0.5, 200), interpolation="nearest")
    for first in range(0, n, per_node):
        axes.add_patch(Rectangle((first - 0.5, first - 0.5), per_node, per_node, fc="none", ec=INK, lw=1.6, zorder=3))
    ticks = range(0, n, max(1, n // 8))
    axes.set_xticks(ticks, ticks, fontsize=10)
    axes.set_yticks(ticks, ticks, fontsize=10)
    axes.spines[:].set_color(FAINT)
    figure.colorbar(image, cax=bar, ticks=[1, 10, 100], format="%g")


def _in_words(groups, sent, rank, per_node):
    """A line for each axis, with the bytes of its link from this rank, then the sum of what goes between nodes."""
    told = []
    for axis, group in groups.items():
        size = max((one.bytes for pair, one in sent.items() if pair[0] == rank and one.axis == axis), default=0.0)
        nodes = len({one // per_node for one in group})
        where = "alone" if len(group) == 1 else "within a node" if nodes == 1 else f"over {nodes} nodes"
        each = f", {size / GB:.1f} GB a step to its neighbour" if size else ""
        told.append(f"{MARKS[axis]}  {axis}: {len(group)} rank{'s' * (len(group) > 1)}, {where}{each}")
    slow, all_of_it = sum(between_nodes(sent, per_node).values()), sum(one.bytes for one in sent.values())
    return [*told, f"between nodes: {slow / GB:,.1f} of {all_of_it / GB:,.1f} GB in a step of a 7B model"]
