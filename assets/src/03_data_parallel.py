"""Figures of lesson 03: replicas that stay the same, hooks, buckets, overlap, no_sync, who waits, weak scaling."""

from draw import arrow, cell
from manyhands.plots.looks import EDGE, GREY, HATCH, INK, PAPER, QUIET, box, card, rank_box, rank_colour, tint, write

GROUND_OF_TEXT = {"boxstyle": "round,pad=0.15", "fc": PAPER, "ec": "none"}  # where text stands on a line


def two_copies():
    figure, axes = card(92, 44, "one weight, four ranks, one step")
    for x, title in (
        (20, "its row of the data"),
        (40, "the same replica"),
        (52, "its gradient"),
        (81, "the same update"),
    ):
        write(axes, x, 6.2, title, colour=QUIET)
    box(axes, 58.5, 8, 14, 33.5, "all-reduce\nand divide:\n−13", hatch=HATCH)
    for rank, (x, y, gradient) in enumerate(((1, 3, "−4"), (2, 4, "−8"), (3, 7, "−24"), (4, 6, "−16"))):
        top = 8.5 + 8.5 * rank
        colour, middle = rank_colour(rank), top + 3
        rank_box(axes, rank, 2, top + 0.5, width=9, height=5)
        for column, text in enumerate((f"x = {x}", f"y = {y}")):
            cell(axes, 13 + 7 * column, top + 1.5, text, rank, width=7, height=3)
        arrow(axes, (27.5, middle), (33.5, middle), colour=colour)
        box(axes, 34, top, 11, 6, "w = 1")
        arrow(axes, (45.5, middle), (48.5, middle), colour=colour)
        cell(axes, 49, top, gradient, rank, width=6.5, height=6, size=12)
        arrow(axes, (55.7, middle), (58.3, middle), colour=colour)
        arrow(axes, (72.7, middle), (75.5, middle))
        box(axes, 76, top, 14, 6, "w = 1 + 0.13")
    return figure


def same_start():
    figure, axes = card(84, 35, "the same steps, from two starts and from one")
    steps = [(4, -4), (5, -1), (3, -3), (5, -2), (4, -3)]
    panels = ((4, "each rank its own start", ((8, 27), (11, 30))), (44, "one start", ((8, 28), (8, 28))))
    for left, title, starts in panels:
        box(axes, left, 8, 36, 24, "")
        write(axes, left + 18, 6.2, title, weight="bold")
        one = starts[0] == starts[1]
        for rank, (x, y) in enumerate(starts):
            path = [(left + x, y)]
            for dx, dy in steps:
                path.append((path[-1][0] + dx, path[-1][1] + dy))
            # of two equal paths the second is thinner, so that both are seen
            width = 6 if one and rank == 0 else 2
            axes.plot(*zip(*path, strict=True), "o-", color=rank_colour(rank), lw=width, ms=width + 3, zorder=3 + rank)
            if not one:
                write(axes, left + x - 1.4, y, f"rank {rank}", ha="right")
        if one:
            write(axes, left + 6.4, 28, "ranks\n0 and 1", ha="right")
            write(axes, path[-1][0] - 4, path[-1][1] - 3.4, "still the same", colour=QUIET)
        else:
            end_x, end_y = path[-1]
            arrow(axes, (end_x - 2.5, end_y - 2.5), (end_x - 0.5, end_y - 0.5), style="<->")
            write(axes, end_x - 4, end_y - 5.4, "still as far apart", colour=QUIET)
        write(axes, left + 18, 33.4, "one weight →  (the other one upwards)", colour=QUIET)
    return figure


def hooks():
    figure, axes = card(92, 30, "backward finishes the last layer first")
    names = ["embeddings", "block 0", "block 1", "block 2", "block 3", "head"]
    for start, end, y, text in ((3, 76, 7, "forward"), (76, 3, 16.5, "backward")):
        arrow(axes, (start, y), (end, y))
        write(axes, 39.5, y, text, bbox=GROUND_OF_TEXT)
    for i, name in enumerate(names):
        x, order = 3 + 12.4 * i, len(names) - i
        box(axes, x, 9, 11, 5, name, face=GREY)
        if i:
            arrow(axes, (x - 1.4, 11.5), (x, 11.5))
        write(axes, x + 5.5, 20, "hook: gradient\nis ready")
        box(axes, x + 1.5, 22.5, 8, 4, f"{order}.", hatch=HATCH)
    box(axes, 79, 9, 10, 5, "loss")
    arrow(axes, (76, 11.5), (79, 11.5))
    write(axes, 84, 24.5, "sent in\nthis order", colour=QUIET)
    return figure


def buckets():
    figure, axes = card(92, 31, "buckets of at most 1 MiB, filled in the order of backward")
    content = [("head", "block 3"), ("block 2",), ("block 1",), ("block 0", "embeddings")]
    mib = {"head": 0.035, "embeddings": 0.063} | {f"block {i}": 0.752 for i in range(4)}  # of ShakespeareGPT
    x = 3
    for i, parts in enumerate(content):
        left = x
        for part in parts:
            width = 26 * mib[part]
            box(axes, x, 10, width, 4.5, part if width > 8 else "", face=GREY)
            if width <= 8:  # too narrow to write into
                right = part == parts[-1]
                write(axes, x + width if right else x, 8.3, part, ha="right" if right else "left")
            x += width
        arrow(axes, ((left + x) / 2, 15), ((left + x) / 2, 18.3))
        box(axes, left, 18.5, x - left, 4, f"bucket {i}")
        box(axes, left, 24.5, x - left, 4, f"all-reduce {i}", hatch=HATCH)
        x += 2.2
    arrow(axes, (3, 5.4), (x - 2.2, 5.4))
    write(axes, (3 + x) / 2, 5.4, "backward", bbox=GROUND_OF_TEXT)
    return figure


def overlap():
    figure, axes = card(92, 37, "one step, three ways to average")
    forward, backward = 14, 28

    def compute(y):
        box(axes, 17, y, forward, 3.4, "forward", face=GREY)
        box(axes, 17 + forward, y, backward, 3.4, "backward", face=GREY)

    def send(y, starts, width):
        for start in starts:
            box(axes, start, y, width, 3.4, "", hatch=HATCH)

    end = 17 + forward + backward
    for y, name in ((6, "naive:\none call each"), (16, "buckets"), (26, "buckets,\nwith overlap")):
        write(axes, 2, y + 3.5, name, ha="left", weight="bold")
        compute(y)
    send(9.6, [end + 2.3 * i for i in range(10)], 2.3)
    send(19.6, [end + 4 * i for i in range(4)], 4)
    send(29.6, [17 + forward + 7 * (i + 1) for i in range(4)], 4)
    for y, finish in ((6, end + 23), (16, end + 16), (26, end + 4)):
        axes.plot([finish, finish], [y - 0.6, y + 7.6], color=INK, lw=2.5, zorder=4)
        write(axes, finish + 0.8, y + 1.2, "update", ha="left")
    write(axes, 17, 35.3, "solid: compute; hatched: communication; time runs to the right", ha="left", colour=QUIET)
    return figure


def no_sync():
    figure, axes = card(92, 24, "three micro-batches, one update")
    for y, name, averaged in ((6.5, "without", (0, 1, 2)), (15, "with no_sync", (2,))):
        write(axes, 2, y + 2, name, ha="left", weight="bold")
        x = 18
        for i in range(3):
            box(axes, x, y, 5, 4, f"F{i}", face=GREY)
            box(axes, x + 5, y, 7, 4, f"B{i}", face=GREY)
            x += 12
            if i in averaged:
                box(axes, x, y, 9, 4, "average", hatch=HATCH)
                x += 9
        box(axes, x, y, 7, 4, "update")
    write(axes, 18, 22, "F: forward, B: backward; gradients add up in p.grad", ha="left", colour=QUIET)
    return figure


def rank_0_evaluates():
    figure, axes = card(92, 30, "a published cycle of 69 s: training, then one works and three wait")
    left, second = 12, 1.1  # units per second
    split, end = left + 28 * second, left + 69 * second
    for rank in range(4):
        y, colour = 6 + 4.6 * rank, rank_colour(rank)
        write(axes, 2, y + 1.9, f"rank {rank}", ha="left", weight="bold")
        box(axes, left, y, split - left, 3.8, "train", face=tint(colour, 0.5))
        if rank == 0:
            box(axes, split, y, end - split, 3.8, "evaluate, sample, save", face=tint(colour, 0.5))
        else:
            box(axes, split, y, end - split, 3.8, "wait", edge=EDGE, dotted=True)
    for x, label in ((left, "0 s"), (split, "28 s"), (end, "69 s")):
        write(axes, x, 25.6, label)
    write(axes, (split + end) / 2, 27.6, "59 % of the cycle", weight="bold")
    return figure


def weak_scaling():
    figure, axes = card(92, 25, "weak scaling: the work per rank stays, the batch grows")
    for left, n in ((8, 1), (28, 2), (55, 4)):
        for rank in range(n):
            x = left + 8.5 * rank
            rank_box(axes, rank, x, 6, width=8, height=3.4)
            for row in range(3):
                cell(axes, x, 10.4 + 3 * row, "text", rank, width=8, height=3)
        write(axes, left + 4.25 * n - 0.25, 21.6, f"{n} rank{'s' * (n > 1)}: {3 * n} sequences per step")
    return figure


FIGURES = {
    "03_two_copies": two_copies,
    "03_same_start": same_start,
    "03_hooks": hooks,
    "03_buckets": buckets,
    "03_overlap": overlap,
    "03_no_sync": no_sync,
    "03_rank_0_evaluates": rank_0_evaluates,
    "03_weak_scaling": weak_scaling,
}
