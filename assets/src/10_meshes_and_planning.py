"""Figures of lesson 10: a grid, a cube on two nodes, rings, a three-phase all-reduce, a roofline, a plan."""

from draw import arrow, cell
from manyhands.plots.looks import (
    EDGE,
    FAINT,
    GREY,
    GROUND,
    HATCH,
    INK,
    LIMIT,
    PAPER,
    QUIET,
    box,
    card,
    rank_box,
    rank_colour,
    tint,
    write,
)


def _node(axes, x, y, width, height, text):
    """A node: an area with its name at the bottom, under the ranks."""
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), width, height, fc=GROUND, ec=FAINT, zorder=0.5))
    write(axes, x + width / 2, y + height - 1.6, text, colour=QUIET)


def grid():
    figure, axes = card(92, 32, "four ranks, two axes")
    for rank in range(4):
        x, y = 14 + 22 * (rank % 2), 9 + 11 * (rank // 2)
        rank_box(axes, rank, x, y, width=11, height=5)
    for y in (11.5, 22.5):
        arrow(axes, (25.4, y), (35.6, y), style="<|-|>")
    for x in (19.5, 41.5):
        arrow(axes, (x, 14.4), (x, 19.6), style="<|-|>", colour=EDGE)
    write(axes, 30.5, 6.6, "tensor →", weight="bold")
    write(axes, 8, 17, "data ↓", weight="bold")
    write(axes, 53, 11.5, "a row, a tensor group: one layer in parts", ha="left")
    write(axes, 53, 15.4, "groups 0 1 and 2 3", ha="left", colour=QUIET)
    write(axes, 53, 20.5, "a column, a data group: other sequences", ha="left")
    write(axes, 53, 24.4, "groups 0 2 and 1 3", ha="left", colour=QUIET)
    return figure


def cube():
    figure, axes = card(92, 49, "data 2 x pipeline 2 x tensor 2, on two nodes of four")
    _node(axes, 3, 6, 40, 34, "node 0: replica 0")
    _node(axes, 49, 6, 40, 34, "node 1: replica 1")
    places = {rank: (6 + 46 * (rank // 4) + 22 * (rank % 2), 12 + 14 * (rank // 2 % 2)) for rank in range(8)}
    for rank, (x, y) in places.items():
        rank_box(axes, rank, x, y, width=11, height=5)
    for first in (0, 2, 4, 6):
        (x, y), (end, _) = places[first], places[first + 1]
        arrow(axes, (x + 11.3, y + 2.5), (end - 0.3, y + 2.5), style="<|-|>")
    for first in (0, 1, 4, 5):
        x, y = places[first]
        arrow(axes, (x + 3, y + 5.2), (x + 3, y + 13.8), style="<|-|>", colour=EDGE)
    for first in range(4):
        (x, y), (end, _) = places[first], places[first + 4]
        bend = -0.16 if first < 2 else 0.16
        edge = y - 0.2 if first < 2 else y + 5.2
        arrow(axes, (x + 8, edge), (end + 8, edge), bend=bend, style="<|-|>", ls="--")
    write(axes, 3.5, 43.4, "horizontal: tensor, ranks next to each other", ha="left")
    write(axes, 47, 43.4, "vertical, grey: pipeline, every second rank", ha="left")
    write(axes, 3.5, 46.4, "dashed: data, every fourth rank: the only axis that leaves the node", ha="left")
    return figure


def rings():
    figure, axes = card(92, 34, "one group of four on two nodes of two: the order of the ring")
    for x0, order, said in ((3, (0, 1, 2, 3), "2 of 4 hops cross"), (49, (0, 2, 1, 3), "4 of 4 hops cross")):
        _node(axes, x0, 6, 18, 20, "node 0")
        _node(axes, x0 + 22, 6, 18, 20, "node 1")
        centre = {}
        for rank in range(4):
            x, y = x0 + 4.5 + 22 * (rank // 2), 8 + 9 * ((rank % 2) ^ (rank // 2))
            rank_box(axes, rank, x, y, width=9, height=4)
            centre[rank] = (x + 4.5, y + 2)
        for i, rank in enumerate(order):
            (x, y), (u, v) = centre[rank], centre[order[(i + 1) % 4]]
            crosses = rank // 2 != order[(i + 1) % 4] // 2
            if x == u:
                down = 1 if v > y else -1
                start, end = (x, y + 2.2 * down), (u, v - 2.2 * down)
            else:
                side = 1 if u > x else -1
                start, end = (x + 4.8 * side, y), (u - 4.8 * side, v)
            arrow(axes, start, end, ls="--" if crosses else "-")
        write(axes, x0 + 20, 30, f"{' → '.join(map(str, order))} → {order[0]}: {said}, dashed", weight="bold")
    return figure


def hierarchical():
    figure, axes = card(92, 38, "an all-reduce in three phases: two nodes of two, two pieces each")
    titles = ("1  reduce-scatter inside", "2  all-reduce between", "3  all-gather inside")
    before = [["a", "a"], ["b", "b"], ["c", "c"], ["d", "d"]]
    after = (
        [["ab", ""], ["", "ab"], ["cd", ""], ["", "cd"]],
        [["abcd", ""], ["", "abcd"], ["abcd", ""], ["", "abcd"]],
        [["abcd", "abcd"]] * 4,
    )
    for column, state in enumerate((before, *after)):
        x = 12 + 21 * column
        for rank in range(4):
            y = 10 + 6.2 * rank + (2 if rank > 1 else 0)
            if column == 0:
                rank_box(axes, rank, 1.5, y, width=8, height=4)
            for j, text in enumerate(state[rank]):
                cell(axes, x + 5.2 * j, y, text, rank=rank if text else None, width=5.2, height=4)
        if column:
            write(axes, x - 3, 7, titles[column - 1], weight="bold")
            box(axes, x - 8, 9.6, 5, 25.4, hatch=HATCH, face=PAPER)
    return figure


def plan():
    figure, axes = card(92, 32, "what a planner does with each layout")
    steps = (
        ("every split of\nthe GPUs", "4 axes,\nmicro-batches,\nrecomputation"),
        ("does it go\ntogether?", "heads, batch,\nlayers divide"),
        ("does it fit?", "bytes of the\nfullest GPU"),
        ("how long is\na step?", "compute, memory,\nlinks, bubble"),
        ("the simplest of\nthe fastest", "within 5 %"),
    )
    for i, (title, note) in enumerate(steps):
        x = 2 + 18 * i
        box(axes, x, 8, 14.5, 8, title, face=GREY if i in (1, 2) else PAPER)
        write(axes, x + 7.2, 21, note, colour=QUIET)
        if i:
            arrow(axes, (x - 3.2, 12), (x - 0.3, 12))
    write(axes, 2, 28.5, "grey: what fails is refused, with the numbers", ha="left", colour=QUIET)
    return figure


def roofline():
    figure, axes = card(92, 34, "a roofline: the slowest of three that overlap")
    rows = (
        ("compute", "operations / peak", 50),
        ("memory", "bytes / memory bandwidth", 34),
        ("link", "bytes / link bandwidth", 62),
    )
    for i, (name, formula, width) in enumerate(rows):
        y = 8 + 6.5 * i
        write(axes, 2, y + 2, name, ha="left", weight="bold")
        box(
            axes,
            14,
            y,
            width,
            4,
            formula,
            face=tint(INK, 0.15) if name != "link" else PAPER,
            hatch=HATCH if name == "link" else None,
        )
    axes.plot([76, 76], [6.5, 27.5], **LIMIT)
    write(axes, 77, 17, "the time\nof the layer", ha="left")
    write(axes, 2, 31, "here the link bounds it: a faster GPU would change nothing", ha="left", colour=QUIET)
    return figure


def fake():
    figure, axes = card(92, 28, "rank 0 of 1,024, alone")
    rank_box(axes, 0, 3, 9, width=10, height=5)
    for i in range(1, 9):
        box(axes, 18 + 7.4 * (i - 1), 9, 6, 5, {7: "...", 8: "1023"}.get(i, str(i)), edge=EDGE, dotted=True)
    write(axes, 48, 17.4, "ranks that are not there: collectives return at once and move nothing", colour=QUIET)
    box(axes, 3, 20, 30, 4.5, "its real shard of each weight", face=tint(rank_colour(0), 0.3), edge=rank_colour(0))
    write(axes, 35, 22.2, "shapes and padding as on the machine, no numbers in them", ha="left", colour=QUIET)
    return figure


FIGURES = {
    "10_grid": grid,
    "10_cube": cube,
    "10_rings": rings,
    "10_hierarchical": hierarchical,
    "10_plan": plan,
    "10_roofline": roofline,
    "10_fake": fake,
}
