"""Figures of lesson 02: the ring step by step, other shapes, what a message costs, and what hangs."""

import itertools

from draw import arrow, as_frame, cell
from manyhands.plots.looks import FAINT, HATCH, INK, PAPER, QUIET, card, rank_box, rank_colour, tint, write

N = 4


def _labelled(axes, start, end, label, **kwargs):
    """An arrow with `label` at its middle."""
    arrow(axes, start, end, **kwargs)
    ground = {"boxstyle": "round,pad=0.15", "fc": PAPER, "ec": "none"}
    write(axes, (start[0] + end[0]) / 2, (start[1] + end[1]) / 2, label, bbox=ground)


def ring():
    """Four ranks in a circle; each sends to its right-hand neighbour only, all at once."""
    figure, axes = card(44, 31, "a ring of four ranks")
    corners = ((6, 7), (29, 7), (29, 22), (6, 22))
    for rank, (x, y) in enumerate(corners):
        rank_box(axes, rank, x, y, width=9, height=5)
    ends = [
        ((15.4, 9.5), (28.6, 9.5)),
        ((33.5, 12.4), (33.5, 21.6)),
        ((28.6, 24.5), (15.4, 24.5)),
        ((10.5, 21.6), (10.5, 12.4)),
    ]
    for rank, (start, end) in enumerate(ends):
        _labelled(axes, start, end, f"chunk {rank}", colour=rank_colour(rank))
    write(axes, 22, 17, "hop 0: four messages\nat the same time", colour=QUIET)
    return figure


def _reduce_scatter_states():
    """What each (rank, chunk) holds after each hop, as the ranks whose numbers are in it; and what has just arrived."""
    held = [[{rank} for _ in range(N)] for rank in range(N)]
    yield [[set(s) for s in row] for row in held], set()
    for hop in range(N - 1):
        sent = {rank: (chunk := (rank - hop) % N, set(held[rank][chunk])) for rank in range(N)}
        fresh = set()
        for rank, (chunk, numbers) in sent.items():
            held[(rank + 1) % N][chunk] |= numbers
            fresh.add(((rank + 1) % N, chunk))
        yield [[set(s) for s in row] for row in held], fresh


def _all_gather_states():
    """The same for the second half: which chunks are complete on which rank."""
    complete = {(rank, (rank + 1) % N) for rank in range(N)}
    yield set(complete), set()
    for hop in range(N - 1):
        fresh = {((rank + 1) % N, (rank + 1 - hop) % N) for rank in range(N)}
        complete |= fresh
        yield set(complete), fresh


def _panels(title, note):
    figure, axes = card(92, 28, title)
    write(axes, 90.5, 2.4, note, colour=QUIET, ha="right")
    write(axes, 9.9, 8.4, "chunk", colour=QUIET, ha="right")
    for rank in range(N):
        rank_box(axes, rank, 1.5, 10.2 + 4 * rank, width=8.4, height=3)
    for panel in range(N):
        left = 12 + 20.2 * panel
        write(axes, left + 8.4, 5.6, "at the start" if panel == 0 else f"after hop {panel - 1}", size=10, weight="bold")
        for chunk in range(N):
            write(axes, left + 2.1 + 4.2 * chunk, 8.4, str(chunk), colour=QUIET)
    return figure, axes


def _grid_cell(axes, panel, rank, chunk, text, fresh, complete):
    x, y = 12 + 20.2 * panel + 4.2 * chunk, 10 + 4 * rank
    strength = 0.55 if complete else 0.12
    cell(axes, x, y, text, rank, width=4, height=3.4, strength=strength, hatch=HATCH if fresh else None)


def ring_reduce_scatter():
    """The first half of the ring: partial sums travel, and grow by one rank's numbers at each hop."""
    figure, axes = _panels(
        "reduce-scatter on the ring", "digits: whose numbers are in it; hatched: has just arrived and was added"
    )
    for panel, (held, fresh) in enumerate(_reduce_scatter_states()):
        for rank, chunk in itertools.product(range(N), repeat=2):
            numbers = held[rank][chunk]
            text = "".join(map(str, sorted(numbers)))
            _grid_cell(axes, panel, rank, chunk, text, (rank, chunk) in fresh, len(numbers) == N)
    return figure


def ring_moving():
    """Both halves of the ring, hop by hop, as a moving figure."""
    figure, axes = card(44, 32, "an all-reduce on a ring of four ranks")
    for rank in range(N):
        rank_box(axes, rank, 2, 9.2 + 4.4 * rank, width=9, height=3.4)
        write(axes, 16 + 6.4 * rank, 7.4, f"chunk {rank}", colour=QUIET)
    everything = set(range(N))
    states = [(held, fresh, "at the start" if hop == 0 else f"hop {hop - 1}: reduce-scatter")
              for hop, (held, fresh) in enumerate(_reduce_scatter_states())]  # fmt: skip
    scattered = states[-1][0]
    for hop, (complete, fresh) in enumerate(_all_gather_states()):
        held = [[everything if (rank, chunk) in complete else scattered[rank][chunk] for chunk in range(N)]
                for rank in range(N)]  # fmt: skip
        states += [(held, fresh, f"hop {hop - 1}: all-gather")] if hop else []

    def frame(held, fresh, words):
        for rank, chunk in itertools.product(range(N), repeat=2):
            numbers, hatch = held[rank][chunk], HATCH if (rank, chunk) in fresh else None
            strength = 0.55 if numbers == everything else 0.12
            text = "".join(map(str, sorted(numbers)))
            cell(axes, 13 + 6.4 * chunk, 9.2 + 4.4 * rank, text, rank, 6, 3.4, hatch, strength)
        write(axes, 25.6, 4.8, words, weight="bold")

    for number, state in enumerate(states):
        as_frame(axes, number, lambda state=state: frame(*state))
    write(axes, 22, 29.2, "digits: whose numbers are in it; hatched: has just arrived", colour=QUIET)
    return figure


def ring_all_gather():
    """The second half: finished chunks travel, and nothing is added any more."""
    figure, axes = _panels("all-gather on the ring", "0123: a finished sum; hatched: has just arrived")
    for panel, (complete, fresh) in enumerate(_all_gather_states()):
        for rank, chunk in itertools.product(range(N), repeat=2):
            done = (rank, chunk) in complete
            _grid_cell(axes, panel, rank, chunk, "0123" if done else "", (rank, chunk) in fresh, done)
    return figure


# ---- what hangs, what costs, and other shapes ----


def ordered_sends():
    """Everybody's send waits for a receive that comes after the neighbour's own send."""
    figure, axes = card(80, 25, "everybody sends first: nobody ever receives")
    for rank in range(N):
        x = 3 + 19.5 * rank
        rank_box(axes, rank, x, 5.5, width=15.5, height=3.4)
        cell(axes, x, 10.5, "1  send to right", rank, width=15.5, height=3.2, strength=0.4)
        cell(axes, x, 15, "2  recv from left", None, width=15.5, height=3.2)
        if rank < N - 1:
            arrow(axes, (x + 15.7, 12), (x + 19.3, 16.2), colour=rank_colour(rank))
    arrow(axes, (77.2, 12), (79.4, 14.6), colour=rank_colour(3), style="-")  # out on the right, in on the left
    arrow(axes, (0.6, 14), (2.8, 16.2), colour=rank_colour(3))
    write(axes, 40, 21.8, "Each send waits for the neighbour's recv, which comes after its own send.", size=10)
    return figure


def alpha_beta():
    """Time of a message against its size: a constant plus a slope."""
    figure, axes = card(56, 28, "what a message costs: α + bytes / β")
    arrow(axes, (8, 24), (53, 24))
    arrow(axes, (8, 24), (8, 5))
    write(axes, 47, 26, "bytes")
    write(axes, 4.6, 6, "time")
    axes.plot([8, 49], [19, 7], color=INK, lw=2.5, zorder=3)
    axes.plot([8, 49], [19, 19], color=QUIET, lw=1, ls=":", zorder=2)
    arrow(axes, (11, 24), (11, 19), style="<|-|>")
    write(axes, 12.3, 21.5, "α: what an empty message costs (latency)", ha="left")
    arrow(axes, (46, 19), (46, 8.2), style="<|-|>")
    write(axes, 44.8, 15.6, "bytes / β\n(bandwidth)", ha="right")
    return figure


def _node(axes, rank, x, y):
    rank_box(axes, rank, x - 1.9, y - 1.6, width=3.8, height=3.2, label=str(rank))


def tree():
    """A broadcast from rank 0 to eight ranks: whoever has the data passes it on, so the number doubles each round."""
    figure, axes = card(66, 33, "broadcast by a binomial tree: 1, 2, 4, 8 have it")
    places = {0: (34, 7), 1: (46, 13), 2: (27, 19), 3: (52, 19), 4: (10, 26), 5: (40, 26), 6: (31, 26), 7: (58, 26)}
    for child in range(1, 8):
        parent = child - (1 << (child.bit_length() - 1))
        (x0, y0), (x1, y1) = places[parent], places[child]
        start, end = (x0 + (x1 - x0) * 0.13, y0 + 1.9), (x1 - (x1 - x0) * 0.05, y1 - 1.9)
        _labelled(axes, start, end, f"{child.bit_length()}", colour=rank_colour(parent))
    for rank, place in places.items():
        _node(axes, rank, *place)
    write(axes, 64.5, 30.6, "number on an arrow: the round", colour=QUIET, ha="right")
    return figure


def hierarchical():
    """Two nodes of two ranks: sum inside each node, then across, then spread inside again."""
    figure, axes = card(84, 29, "hierarchical all-reduce: 2 nodes of 2 ranks")
    titles = ("1  reduce-scatter inside", "2  all-reduce across", "3  all-gather inside")
    for panel, title in enumerate(titles):
        left = 2 + 27 * panel
        write(axes, left + 13, 6, title, size=10, weight="bold")
        for node in range(2):
            x = left + 1 + 13 * node
            _box(axes, x, 8.6, f"node {node}")
            for local in range(2):
                rank_box(axes, 2 * node + local, x + 1.6, 11 + 7.6 * local, width=7.8, height=3)
            if panel != 1:
                arrow(axes, (x + 5.5, 14.2), (x + 5.5, 18.4), style="<|-|>")
        if panel == 1:
            for local in range(2):
                y = 12.5 + 7.6 * local
                arrow(axes, (left + 10.6, y), (left + 15.4, y), style="<|-|>")
    write(axes, 42, 25.9, "Only step 2 uses the slow link, with half of the bytes per rank.", size=10)
    return figure


def _box(axes, x, y, label):
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), 11, 14, fc=tint(INK, 0.04), ec=FAINT, lw=1, zorder=0.5))
    write(axes, x + 5.5, y + 1.2, label, colour=QUIET)


def strong_scaling():
    """The same work cut into more and more pieces, and the times that somebody measured, to scale."""
    figure, axes = card(78, 26, "strong scaling: the same work on 1, 2, 4, 8 ranks")
    for row, (n, seconds) in enumerate({1: 8.03, 2: 4.21, 4: 2.09, 8: 1.06}.items()):
        y, pieces, height = 6 + 4.6 * row, 8 // n, 3.4 / n
        write(axes, 9.5, y + 1.7, f"{n} rank{'s' if n > 1 else ''}", ha="right", weight="bold")
        width = 5.6 * seconds / pieces
        for rank, piece in itertools.product(range(n), range(pieces)):
            x, top = 11 + width * piece, y + height * rank
            cell(axes, x, top, rank=rank, width=width, height=height, strength=0.4)
        write(axes, 12.2 + 5.6 * seconds, y + 1.7, f"{seconds} s", ha="left")
    arrow(axes, (11, 24.6), (56, 24.6), colour=QUIET)
    write(axes, 59, 24.6, "time", colour=QUIET)
    return figure


FIGURES = {
    "02_strong_scaling": strong_scaling,
    "02_ring": ring,
    "02_ring_moving": ring_moving,
    "02_ring_reduce_scatter": ring_reduce_scatter,
    "02_ring_all_gather": ring_all_gather,
    "02_ordered_sends": ordered_sends,
    "02_alpha_beta": alpha_beta,
    "02_tree": tree,
    "02_hierarchical": hierarchical,
}
