"""Ranks on a grid over nodes: choose the axes' sizes and a rank, and see its partners on each axis."""

from math import prod

from manyhands.figures import box, card, rank_box, write
from manyhands.figures.looks import EDGE, PAPER, QUIET
from manyhands.widgets.display import Controls, is_live, labelled, show_picture

AXES = ("pipeline", "data", "tensor")
MOST_RANKS = 64
MARKS = {"pipeline": "P", "data": "D", "tensor": "T"}


def partners(shape, rank):
    """{axis: ranks of the group that `rank` is in}, on a grid of `shape` = (pipeline, data, tensor), the last one fastest."""
    found = {}
    for i, axis in enumerate(AXES):
        stride = prod(shape[i + 1 :])
        first = rank - rank // stride % shape[i] * stride
        found[axis] = list(range(first, first + shape[i] * stride, stride))
    return found


def rank_grid_figure(pipeline=2, data=2, tensor=2, per_node=4, rank=0):
    """A matplotlib Figure: a row of boxes per node; `rank` in its colour, and letters for the axes that others share with it.

    Where the numbers make no grid, the figure says why.
    """
    why = _refused(pipeline, data, tensor, per_node, rank)
    if why:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 1.2))
        figure.text(0.02, 0.5, why, fontsize=11, va="center")
        return figure
    shape = (pipeline, data, tensor)
    groups, n = partners(shape, rank), prod(shape)
    across = min(8, per_node)  # boxes in a line; a large node takes several
    lines = -(-per_node // across)
    nodes = n // per_node
    height = 12 + nodes * (lines * 5.4 + 1.8)
    figure, axes = card(
        92, height, f"pipeline {pipeline} x data {data} x tensor {tensor}: the partners of rank {rank}"
    )
    for other in range(n):
        node, place = divmod(other, per_node)
        x = 12 + 9.8 * (place % across)
        y = 6 + node * (lines * 5.4 + 1.8) + 5.4 * (place // across)
        if place == 0:
            write(axes, 2, y + 2.1, f"node {node}", ha="left", colour=QUIET)
        marks = "".join(MARKS[axis] for axis in AXES if other in groups[axis] and other != rank)
        if other == rank:
            rank_box(axes, rank, x, y, width=8.6, height=4.2)
        else:
            text = f"{other} {marks}" if marks else str(other)
            box(
                axes,
                x,
                y,
                8.6,
                4.2,
                text,
                face=PAPER,
                edge=EDGE,
                dotted=not marks,
                weight="bold" if marks else "normal",
            )
    write(axes, 2, height - 2.6, _in_words(groups, rank, per_node), ha="left")
    return figure


def show_rank_grid(**settings):
    """Choose the axes' sizes, ranks per node and a rank (as for `rank_grid_figure`). A picture where nobody can."""
    if not is_live():
        show_picture(rank_grid_figure(**settings), _alt(**settings))
        return
    import ipywidgets as w

    values = {"pipeline": 2, "data": 2, "tensor": 2, "per_node": 4, "rank": 0} | settings
    labels = {"per_node": "ranks per node", "rank": "rank"}
    controls = {
        name: labelled(
            w.BoundedIntText,
            labels.get(name, name),
            8,
            14,
            value=value,
            min=0 if name == "rank" else 1,
            max=MOST_RANKS,
        )
        for name, value in values.items()
    }
    chosen = list(controls.values())

    def draw():
        now = {name: control.value for name, control in controls.items()}
        return rank_grid_figure(**now), _alt(**now)

    page = Controls([chosen], draw)
    page.redraw_with(*chosen)
    page.show()


def _refused(pipeline, data, tensor, per_node, rank):
    """Why these numbers make no picture, or ""."""
    n = pipeline * data * tensor
    if n > MOST_RANKS:
        return f"{pipeline} x {data} x {tensor} = {n} ranks are more than {MOST_RANKS}; use fewer"
    if n % per_node:
        return f"{n} ranks do not fill nodes of {per_node}; use a divisor of {n}"
    if rank >= n:
        return f"there is no rank {rank} among {n}; use 0 to {n - 1}"
    return ""


def _in_words(groups, rank, per_node):
    """T: tensor 0 1 (inside); D: ...: which of the rank's groups stay on a node."""
    told = []
    for axis in reversed(AXES):
        ranks = groups[axis]
        nodes = len({one // per_node for one in ranks})
        where = "alone" if len(ranks) == 1 else "within a node" if nodes == 1 else f"over {nodes} nodes"
        told.append(f"{MARKS[axis]} {axis}: {len(ranks)} rank{'s' * (len(ranks) > 1)}, {where}")
    return ";  ".join(told)


def _alt(pipeline=2, data=2, tensor=2, per_node=4, rank=0):
    why = _refused(pipeline, data, tensor, per_node, rank)
    if why:
        return why
    groups = partners((pipeline, data, tensor), rank)
    told = ", ".join(f"{axis} {' '.join(map(str, groups[axis]))}" for axis in AXES)
    return f"rank {rank} of {pipeline} x {data} x {tensor} is in the groups {told}: {_in_words(groups, rank, per_node)}"
