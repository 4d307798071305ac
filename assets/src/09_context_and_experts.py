"""Figures of lesson 09: the online softmax, a ring of keys, zig-zag, positions against heads, dispatch and combine."""

from draw import arrow, cell
from manyhands.plots.looks import EDGE, FAINT, GREY, HATCH, PAPER, QUIET, box, card, rank_box, rank_colour, tint, write


def online_softmax():
    figure, axes = card(92, 36, "softmax over two blocks of scores")
    for x, scores, name in ((3, (1, 2), "block 1"), (41, (3, 0), "block 2")):
        write(axes, x, 7, name, ha="left", weight="bold")
        for i, score in enumerate(scores):
            cell(axes, x + 11 + 4.6 * i, 5, score, width=4, height=4)
    rows = (
        (13, "largest", "2", "3"),
        (20, "sum", "exp(1 - 2) + exp(2 - 2) = 1.37", "1.37 · exp(2 - 3) + exp(3 - 3) + exp(0 - 3) = ?"),
    )
    for y, name, first, second in rows:
        write(axes, 3, y + 2.5, name, ha="left")
        box(axes, 11, y, 25, 5, first, face=GREY)
        box(axes, 41, y, 48, 5, second, face=GREY)
        arrow(axes, (36.4, y + 2.5), (40.6, y + 2.5))
    write(axes, 41, 29, "1.37 shrinks by exp(2 - 3) = 0.37: the largest is now 3", ha="left", colour=QUIET)
    write(axes, 41, 32.2, "weighted values shrink by the same factor", ha="left", colour=QUIET)
    return figure


def ring():
    figure, axes = card(92, 44, "four ranks, four steps: queries stay, keys and values move on")
    write(axes, 14.5, 7, "queries", weight="bold")
    for step in range(4):
        write(axes, 29 + 18 * step, 7, f"step {step}", weight="bold")
    for rank in range(4):
        y = 9.5 + 7 * rank
        rank_box(axes, rank, 1.5, y, width=8, height=4.6)
        cell(axes, 12, y, f"Q{rank}", rank, width=5, height=4.6)
        for step in range(4):
            owner, x = (rank - step) % 4, 24 + 18 * step
            cell(axes, x, y, f"K{owner} V{owner}", owner, width=10, height=4.6)
            if step < 3 and rank < 3:
                arrow(axes, (x + 10.4, y + 2.8), (x + 17.6, y + 8.6))
            elif step < 3:
                arrow(axes, (x + 10.4, y + 2), (x + 17.6, 12.6), colour=EDGE)
    write(
        axes,
        12,
        40.5,
        "colour: whose keys; every arrow is one message, rank 3 sends to rank 0",
        ha="left",
        colour=QUIET,
    )
    return figure


def _triangle(axes, x0, y0, side, owners):
    """Query chunks downwards, key chunks to the right; a row has its rank's colour as far as the mask lets it see."""
    for i, rank in enumerate(owners):
        for j in range(len(owners)):
            seen = j <= i
            colour = rank_colour(rank) if seen else FAINT
            strength = 0.18 if j == i else 0.45  # half of a diagonal block is needed
            face = tint(colour, strength) if seen else PAPER
            box(axes, x0 + side * j, y0 + side * i, side, side, face=face, edge=colour)
        write(axes, x0 - 3, y0 + side * (i + 0.5), str(rank), weight="bold")


def zig_zag():
    figure, axes = card(92, 50, "which pairs of query and key a causal mask needs")
    layouts = (("in order", 8, [0, 0, 1, 1, 2, 2, 3, 3]), ("zig-zag", 54, [0, 1, 2, 3, 3, 2, 1, 0]))
    for name, x, owners in layouts:
        write(axes, x, 7, name, ha="left", weight="bold")
        _triangle(axes, x, 10, 4, owners)
        areas = [sum(i + 0.5 for i, owner in enumerate(owners) if owner == rank) for rank in range(4)]
        text = ", ".join(f"{area:g}" for area in areas)
        write(axes, x, 44.4, f"squares of ranks 0 to 3: {text}", ha="left")
    write(
        axes,
        2,
        47.6,
        "rows: chunks of queries, by rank; columns: chunks of keys; pale squares count half",
        ha="left",
        colour=QUIET,
    )
    return figure


def ulysses():
    figure, axes = card(92, 40, "four ranks trade positions for heads")
    for x0, title, by_row in (
        (8, "before: some positions, all heads", True),
        (56, "after: all positions, some heads", False),
    ):
        write(axes, x0, 7, title, ha="left", weight="bold")
        for i in range(4):
            for j in range(4):
                rank = i if by_row else j
                cell(axes, x0 + 6.4 * j, 10 + 5.6 * i, f"{i},{j}", rank, width=6, height=5.2)
        write(axes, x0 + 12.8, 34.4, "heads →", colour=QUIET)
    write(axes, 4, 21, "positions →", colour=QUIET, rotation=-90)
    box(axes, 38, 17, 12, 8, "all-to-all", hatch=HATCH)
    arrow(axes, (34.4, 21), (37.6, 21))
    arrow(axes, (50.4, 21), (55.4, 21))
    write(
        axes, 8, 37.4, "the diagonal stays where it is; three quarters of the numbers travel", ha="left", colour=QUIET
    )
    return figure


def dispatch():
    figure, axes = card(100, 42, "two ranks with two experts each, k = 1")
    heads = ((12, "choices"), (27, "sorted"), (51, "arrived, by rank"), (68, "worked on"), (88, "own tokens"))
    for x, text in heads:
        write(axes, x, 6.4, text, weight="bold")
    chosen = ((0, 3, 1), (2, 0, 3))  # expert of each token
    arrived = (((0, 0), (0, 1), (1, 0)), ((0, 3), (1, 2), (1, 3)))  # (from rank, expert)
    for rank in range(2):
        y = 9 + 15.5 * rank
        rank_box(axes, rank, 1.5, y + 3.6, width=7.6, height=4.6)
        for i in range(3):
            top = y + 4 * i
            cell(axes, 10.4, top, chosen[rank][i], rank, width=3.4, height=3.4)
            cell(axes, 25.4, top, sorted(chosen[rank])[i], rank, width=3.4, height=3.4)
            source, expert = arrived[rank][i]
            cell(axes, 49.4, top, expert, source, width=3.4, height=3.4)
            cell(axes, 66.4, top, expert, source, width=3.4, height=3.4, strength=0.55)
            cell(axes, 86.4, top, chosen[rank][i], rank, width=3.4, height=3.4, strength=0.55)
        for start, end in ((14.4, 24.8), (29.4, 33.4), (44.6, 48.8), (53.4, 65.8), (70.4, 73.2), (83.4, 85.8)):
            arrow(axes, (start, y + 5.6), (end, y + 5.6))
        write(axes, 59.5, y + 3.6, f"experts {2 * rank}, {2 * rank + 1}")
    box(axes, 33.8, 9, 10.4, 27, "dispatch", hatch=HATCH)
    box(axes, 73.6, 9, 9.4, 27, "combine", hatch=HATCH)
    write(
        axes,
        1.8,
        39.4,
        "number: the token's expert; colour: the rank whose token it is; dark: a result",
        ha="left",
        colour=QUIET,
    )
    return figure


FIGURES = {
    "09_dispatch": dispatch,
    "09_online_softmax": online_softmax,
    "09_ring": ring,
    "09_ulysses": ulysses,
    "09_zig_zag": zig_zag,
}
