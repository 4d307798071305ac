"""Ranks on a grid over nodes, and what each link carries: axes and their order, ranks per node, one rank's partners."""

from itertools import permutations
from math import prod

from manyhands.plots.cards import box, card, rank_box, write
from manyhands.plots.looks import EDGE, FAINT, HEAT, INK, PAPER, QUIET
from manyhands.predict.traffic import between_nodes, links, partners, payloads_of_7b
from manyhands.widgets.display import Controls, is_live, labelled, show_picture

AXES = ("pipeline", "data", "tensor")
ORDERS = tuple(" x ".join(order) for order in permutations(AXES))
MOST_RANKS = 64
MARKS = {"pipeline": "P", "data": "D", "tensor": "T"}
GB = 1e9


def rank_grid_figure(pipeline=2, data=2, tensor=2, per_node=4, rank=0, order=ORDERS[0]):
    """A matplotlib Figure: left a box per rank, `rank`'s partners with a letter; right the bytes from each to each.

    `order` names the axes, the outermost first. Where the numbers make no grid, the figure says why.
    """
    why = _refused(pipeline, data, tensor, per_node, rank)
    if why:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 1.2))
        figure.text(0.02, 0.5, why, fontsize=11, va="center")
        return figure
    sizes = _sizes(pipeline, data, tensor, order)
    sent = links(sizes, payloads_of_7b(sizes))
    across = min(8, per_node)  # boxes in a line; a large node takes several
    lines = prod(sizes.values()) // per_node * (1.6 + 5.2 * -(-per_node // across))
    height = max(46, 23 + lines)
    figure, axes = card(120, height, f"{_said(sizes)}: rank {rank} and its partners")
    _boxes(axes, partners(sizes, rank), rank, prod(sizes.values()), per_node, across)
    for i, line in enumerate(_in_words(sizes, sent, rank, per_node)):
        write(axes, 2, lines + 10.5 + 3.4 * i, line, ha="left", weight="bold" if i == 3 else "normal")
    write(axes, 70, 2.4, "GB per step from rank (row) to rank (column)", size=12, weight="bold", ha="left")
    _matrix(figure, sent, prod(sizes.values()), per_node, height)
    return figure


def show_rank_grid(**settings):
    """Choose sizes, order, ranks per node and a rank (as for `rank_grid_figure`). A picture where nobody can."""
    if not is_live():
        show_picture(rank_grid_figure(**settings), _alt(**settings))
        return
    import ipywidgets as w

    def number(name, value, least=1):
        return labelled(w.BoundedIntText, name, 10, 16, value=value, min=least, max=MOST_RANKS)

    controls = {
        "pipeline": number("pipeline ranks", 2),
        "data": number("data ranks", 2),
        "tensor": number("tensor ranks", 2),
        "per_node": number("ranks per node", 4),
        "rank": number("look at rank", 0, least=0),
        "order": labelled(w.Dropdown, "outermost first", 10, 28, options=list(ORDERS), value=ORDERS[0]),
    }
    for name, value in settings.items():
        controls[name].value = value
    chosen = list(controls.values())

    def draw():
        now = {name: control.value for name, control in controls.items()}
        return rank_grid_figure(**now), _alt(**now)

    page = Controls([chosen[:3], chosen[3:]], draw)
    page.redraw_with(*chosen)
    page.show()


def _sizes(pipeline, data, tensor, order):
    given = dict(zip(AXES, (pipeline, data, tensor), strict=True))
    return {axis: given[axis] for axis in order.split(" x ")}


def _said(sizes):
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items())


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
    """What each rank sends to each in a step; a dark line goes around each node: what lies outside of these is slow."""
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Rectangle

    inch = height / 10
    side = min(3.6, inch - 1.0)
    axes = figure.add_axes((7.6 / 12, 1 - (0.6 + side) / inch, side / 12, side / inch))
    bar = figure.add_axes((11.25 / 12, 1 - (0.6 + side) / inch, 0.15 / 12, side / inch))
    values = [[float("nan")] * n for _ in range(n)]
    for (start, end), one in sent.items():
        values[start][end] = one.bytes / GB
    image = axes.imshow(values, cmap=HEAT, norm=LogNorm(0.05, 100), interpolation="nearest")
    for first in range(0, n, per_node):
        axes.add_patch(Rectangle((first - 0.5, first - 0.5), per_node, per_node, fc="none", ec=INK, lw=1.6, zorder=3))
    ticks = range(0, n, max(1, n // 8))
    axes.set_xticks(ticks, ticks, fontsize=10)
    axes.set_yticks(ticks, ticks, fontsize=10)
    axes.spines[:].set_color(FAINT)
    figure.colorbar(image, cax=bar, ticks=[0.1, 1, 10, 100], format="%g")


def _in_words(sizes, sent, rank, per_node):
    """A line for each axis, with the bytes of its link from this rank, then the sum of what goes between nodes."""
    told = []
    for axis, group in partners(sizes, rank).items():
        size = max((one.bytes for pair, one in sent.items() if pair[0] == rank and one.axis == axis), default=0.0)
        nodes = len({one // per_node for one in group})
        where = "alone" if len(group) == 1 else "within a node" if nodes == 1 else f"over {nodes} nodes"
        each = f", {size / GB:.2g} GB a step to its neighbour" if size else ""
        told.append(f"{MARKS[axis]}  {axis}: {len(group)} rank{'s' * (len(group) > 1)}, {where}{each}")
    slow, all_of_it = sum(between_nodes(sent, per_node).values()), sum(one.bytes for one in sent.values())
    return [*told, f"between nodes: {slow / GB:,.1f} of {all_of_it / GB:,.1f} GB in a step of a 7B model"]


def _alt(pipeline=2, data=2, tensor=2, per_node=4, rank=0, order=ORDERS[0]):
    why = _refused(pipeline, data, tensor, per_node, rank)
    if why:
        return why
    sizes = _sizes(pipeline, data, tensor, order)
    sent = links(sizes, payloads_of_7b(sizes))
    told = ", ".join(f"{axis} {' '.join(map(str, group))}" for axis, group in partners(sizes, rank).items())
    words = "; ".join(line.replace("  ", " ") for line in _in_words(sizes, sent, rank, per_node))
    return f"rank {rank} of {_said(sizes)} is in the groups {told}. {words}"
