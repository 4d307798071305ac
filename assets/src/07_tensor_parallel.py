"""Figures of lesson 07: products by columns and rows, f and g, heads, positions, the vocabulary."""

from draw import arrow, cell
from manyhands.plots.looks import EDGE, GREY, HATCH, INK, PAPER, QUIET, box, card, rank_box, rank_colour, tint, write


def _matrix(axes, x, y, rows, owner=None, side=3.4):
    """Numbers in cells; `owner(i, j)` is the rank in whose colour a cell is, or None."""
    for i, row in enumerate(rows):
        for j, value in enumerate(row):
            rank = owner(i, j) if owner else None
            cell(axes, x + side * j, y + side * i, value, rank, width=side, height=side)


def columns_rows():
    figure, axes = card(92, 46, "one product, two ways to split it")
    x, w, wanted = [[1, 2, 3], [4, 5, 6]], [[1, 2], [3, 4], [5, 6]], [[22, 28], [49, 64]]
    write(axes, 2, 7, "by columns", ha="left", weight="bold")
    _matrix(axes, 4, 11, x)
    write(axes, 16.2, 14.4, "·", size=14)
    _matrix(axes, 18.5, 9.3, w, lambda i, j: j)
    write(axes, 28.6, 14.4, "=", size=14)
    _matrix(axes, 32, 11, wanted, lambda i, j: j)
    write(axes, 41, 14.4, "all of x on both ranks; each has a part of the result", ha="left", colour=QUIET)
    write(axes, 2, 23, "by rows", ha="left", weight="bold")
    _matrix(axes, 4, 27, x, lambda i, j: j)
    write(axes, 16.2, 30.4, "·", size=14)
    _matrix(axes, 18.5, 25.3, w, lambda i, j: i)
    write(axes, 28.6, 30.4, "=", size=14)
    for rank, term in enumerate(([[1, 2], [4, 8]], [[6, 8], [15, 20]], [[15, 18], [30, 36]])):
        _matrix(axes, 32 + 10.5 * rank, 27, term, lambda i, j, rank=rank: rank)
        if rank:
            write(axes, 30.6 + 10.5 * rank, 30.4, "+", size=14)
    arrow(axes, (61, 30.4), (80.6, 30.4))
    _matrix(axes, 81.5, 27, wanted)
    box(axes, 63, 28.6, 14, 3.6, "all-reduce", hatch=HATCH)
    write(axes, 32, 37.2, "each rank has a partial sum, of full size", ha="left", colour=QUIET)
    for rank in range(3):
        rank_box(axes, rank, 4 + 10.5 * rank, 40.6, width=9, height=3)
    write(axes, 36.5, 42.1, "colour: where it is; white: on all ranks", ha="left", colour=QUIET)
    return figure


def f_and_g():
    figure, axes = card(92, 45, "an MLP on two ranks: columns, then rows")
    for rank, y in ((0, 9), (1, 24)):
        rank_box(axes, rank, 1.5, y + 1.8, width=8, height=4.4)
        face, edge = tint(rank_colour(rank), 0.3), rank_colour(rank)
        sub = "₀₁"[rank]
        parts = (
            (11.5, 6, "X", GREY, INK), (27.5, 10, f"· A{sub}", face, edge), (39.5, 9, "GELU", face, edge),
            (50.5, 10, f"· B{sub}", face, edge), (62.5, 6, f"Y{sub}", face, edge), (83.5, 6, "Y", GREY, INK),
        )  # fmt: skip
        for x, width, text, fill, line in parts:
            box(axes, x, y, width, 8, text, face=fill, edge=line, size=12)
        for start, end in (
            (17.7, 19.8),
            (25.2, 27.3),
            (37.7, 39.3),
            (48.7, 50.3),
            (60.7, 62.3),
            (68.7, 71.8),
            (79.2, 83.3),
        ):
            arrow(axes, (start, y + 4), (end, y + 4))
    for x, text, hatch in ((20, "f", None), (72, "g", HATCH)):
        width = 5 if text == "f" else 7
        box(axes, x, 7.5, width, 26, text, face=PAPER, hatch=hatch, size=16)
    write(axes, 22.5, 6, "X is the same", colour=QUIET)
    write(axes, 75.5, 6, "partial sums", colour=QUIET)
    write(axes, 2, 36.6, "forward →", ha="left", weight="bold")
    write(axes, 22.5, 36.6, "nothing")
    write(axes, 75.5, 36.6, "all-reduce of Y₀ + Y₁")
    write(axes, 2, 40.6, "backward ←", ha="left", weight="bold")
    write(axes, 22.5, 40.6, "?", weight="bold")
    write(axes, 75.5, 40.6, "?", weight="bold")
    write(axes, 49, 38.6, "nothing is sent in between", colour=QUIET)
    return figure


def heads():
    figure, axes = card(92, 42, "attention: whole heads on each rank")
    write(axes, 16, 6.2, "the projection to q, k and v", weight="bold")
    for head in range(4):
        rank, y = head // 2, 8.4 + 7.4 * head
        for j, name in enumerate("qkv"):
            colour = rank_colour(rank)
            box(axes, 11, y + 2.3 * j, 10, 2.3, name, face=tint(colour, 0.3), edge=colour)
        write(axes, 5.8, y + 3.4, f"head {head}")
        arrow(axes, (21.6, y + 3.4), (28, y + 3.4))
        box(
            axes,
            28.4,
            y + 0.9,
            20,
            5,
            f"attention of head {head}",
            face=tint(rank_colour(rank), 0.15),
            edge=rank_colour(rank),
        )
    for rank in range(2):
        y, colour = 8.4 + 14.8 * rank, rank_colour(rank)
        arrow(axes, (48.8, y + 7.1), (53, y + 7.1))
        box(axes, 53.4, y + 2, 13, 10.2, "its rows of\nthe output\nprojection", face=tint(colour, 0.3), edge=colour)
        arrow(axes, (66.8, y + 7.1), (72.5, y + 7.1))
        rank_box(axes, rank, 56, y - 1.4, width=8, height=3)
    box(axes, 72.8, 8.4, 7, 29.2, "g", face=PAPER, hatch=HATCH, size=16)
    arrow(axes, (80.2, 23), (84, 23))
    box(axes, 84.4, 20, 6, 6, "sum", face=GREY)
    write(axes, 11, 39.9, "heads do not look at each other before the output projection", ha="left", colour=QUIET)
    return figure


def sequence():
    figure, axes = card(92, 52, "what two ranks hold between the split layers")
    names = ("norm, add", "attention", "norm, add", "MLP", "norm, add")
    for title, y0, split in (("tensor parallel", 5, False), ("and sequence parallel", 28, True)):
        write(axes, 2, y0 + 0.8, title, ha="left", weight="bold")
        for rank in range(2):
            y, colour = y0 + 4 + 8 * rank, rank_colour(rank)
            rank_box(axes, rank, 1.5, y + 1, width=8, height=4)
            for i, name in enumerate(names):
                x = 11.5 + 16.4 * i
                if i % 2:
                    box(axes, x, y, 11.4, 6, f"{name}:\nits part", face=tint(colour, 0.35), edge=colour)
                elif split:
                    box(axes, x, y, 11.4, 6, edge=EDGE, dotted=True)
                    box(axes, x, y + 3 * rank, 11.4, 3, name, face=tint(colour, 0.35), edge=colour)
                else:
                    box(axes, x, y, 11.4, 6, name, face=GREY)
        for i in range(4):
            x = 23.4 + 16.4 * i
            label = (("AG", "RS") if split else ("f", "g"))[i % 2]
            box(axes, x, y0 + 4, 4, 14, label, hatch=HATCH if split or i % 2 else None, face=PAPER)
    write(axes, 11.5, 25, "grey: the same positions on both ranks, kept twice", ha="left", colour=QUIET)
    note = "upper half: positions 0 to T/2, lower half: the rest; AG: all-gather, RS: reduce-scatter"
    write(axes, 11.5, 49.6, note, ha="left", colour=QUIET)
    return figure


def vocabulary():
    figure, axes = card(92, 36, "65 tokens on four ranks: the embedding looks up token 40")
    firsts, x0, unit = (0, 17, 34, 51, 65), 11.5, 76 / 65
    for rank in range(4):
        first, last = firsts[rank], firsts[rank + 1]
        colour, x = rank_colour(rank), x0 + unit * firsts[rank]
        width = unit * (last - first)
        rank_box(axes, rank, x + width / 2 - 4.5, 5.6, width=9, height=3.4)
        box(axes, x, 10.6, width, 5, f"{first} to {last - 1}", face=tint(colour, 0.35), edge=colour)
        here = first <= 40 < last
        text = "its row 6" if here else "zeros"
        arrow(axes, (x + width / 2, 16), (x + width / 2, 20.3), colour=INK if here else EDGE)
        box(axes, x + width / 2 - 6, 20.6, 12, 4, text, face=tint(colour, 0.35) if here else PAPER, edge=colour)
    write(axes, 6, 13.1, "rows of")
    write(axes, 6, 22.6, "finds")
    box(axes, x0, 27.2, 76, 3.4, "g: the sum is the row of token 40, on all ranks", hatch=HATCH)
    write(axes, x0, 33.4, "pieces of 17, 17, 17 and 14 rows: the last one is shorter", ha="left", colour=QUIET)
    return figure


FIGURES = {
    "07_columns_rows": columns_rows,
    "07_f_and_g": f_and_g,
    "07_heads": heads,
    "07_sequence": sequence,
    "07_vocabulary": vocabulary,
}
