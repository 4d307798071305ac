"""Figures of lesson 02: what each collective does to four ranks, the ring step by step, trees, and what hangs."""

import itertools

from . import HATCH, INK, QUIET, Drawing, arrow, card, cell, rank_box, rank_colour, tint, write

N = 4
NUMBERS = (3, 1, 4, 2)  # what ranks 0 to 3 hold in the warm-up
COLUMN, LEFT = 17, 11  # width of a rank's column; where the first one begins
BEFORE, AFTER = 10.3, 19.3  # rows, top edge


def _centre(rank):
    return LEFT + COLUMN * rank + COLUMN / 2 - 1


def _stage(title, height=24.5):
    """A card with four ranks side by side and the two rows 'before' and 'after'."""
    figure, axes = card(LEFT + COLUMN * N + 1, height, title)
    for rank in range(N):
        rank_box(axes, rank, _centre(rank) - 4.5, 5, width=9, height=3.4)
    for y, name in ((BEFORE, "before"), (AFTER, "after")):
        write(axes, 2, y + 1.6, name, colour=QUIET, ha="left")
    return figure, axes


def _row(axes, rank, y, cells, width=3.2):
    """Cells side by side under a rank: [(text, rank it comes from)]; None is a place without data."""
    left = _centre(rank) - width * len(cells) / 2
    for i, content in enumerate(cells):
        if content is None:
            _nothing(axes, left + i * width, y, width)
        else:
            text, origin = content
            cell(axes, left + i * width, y, text, origin, width=width, height=3.2)


def _nothing(axes, x, y, width):
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), width, 3.2, fc="none", ec="#b0b0b0", lw=1, ls=(0, (2, 2)), zorder=1))


def _between(axes, source, target, parts=(1, 1)):
    """An arrow from rank `source` above to rank `target` below: between their rows, or, where a row has several parts,
    from the part for `target` and to the part from `source`."""
    start = _centre(source) + (3.2 * (target - 1.5) if parts[0] > 1 else 0), BEFORE + 3.6
    end = _centre(target) + (3.2 * (source - 1.5) if parts[1] > 1 else 0), AFTER - 0.4
    arrow(axes, start, end, colour=rank_colour(source))


def _collective(title, before, after, flows, height=24.5):
    """A drawing function from its data: cells per rank before and after, and who sends to whom."""

    def draw():
        figure, axes = _stage(title, height)
        for rank in range(N):
            _row(axes, rank, BEFORE, before[rank])
            _row(axes, rank, AFTER, after[rank])
        for source, target in flows:
            _between(axes, source, target, (len(before[source]), len(after[target])))
        return figure

    return draw


def _own(rank, *numbers):
    return [(number, rank) for number in numbers]


_PARTS = [[(10 * rank + part, rank) for part in range(N)] for rank in range(N)]  # rank r's part for each rank
_COLUMNS = [[_PARTS[source][part] for source in range(N)] for part in range(N)]
_SUMS = [sum(number for number, _ in column) for column in _COLUMNS]
_SINGLE = [_own(rank, NUMBERS[rank]) for rank in range(N)]
_ALL = [(NUMBERS[rank], rank) for rank in range(N)]
_EVERY_PAIR = [pair for pair in itertools.product(range(N), repeat=2)]
_TO_0, _FROM_0 = [(r, 0) for r in range(N)], [(0, r) for r in range(N)]

broadcast = _collective(
    "broadcast: everybody gets rank 0's tensor",
    [_own(0, 3), [None], [None], [None]],
    [_own(0, 3)] * N,
    _FROM_0,
)
scatter = _collective(
    "scatter: everybody gets one part of rank 0's tensor",
    [_PARTS[0], [None], [None], [None]],
    [[part] for part in _PARTS[0]],
    _FROM_0,
)
gather = _collective(
    "gather: rank 0 gets all tensors, side by side", _SINGLE, [_ALL, [None], [None], [None]], _TO_0
)
reduce = _collective(
    "reduce: rank 0 gets the sum of all tensors", _SINGLE, [[(10, None)], [None], [None], [None]], _TO_0
)
all_reduce = _collective(
    "all-reduce: everybody gets the sum of all tensors", _SINGLE, [[(10, None)]] * N, _EVERY_PAIR
)
all_gather = _collective(
    "all-gather: everybody gets all tensors, side by side", _SINGLE, [_ALL] * N, _EVERY_PAIR
)
reduce_scatter = _collective(
    "reduce-scatter: everybody gets one part of the sum",
    _PARTS,
    [[(total, None)] for total in _SUMS],
    _EVERY_PAIR,
)
all_to_all = _collective("all-to-all: part k of everybody goes to rank k", _PARTS, _COLUMNS, _EVERY_PAIR)


def send_recv():
    """One rank sends, one receives, the others have nothing to do with it."""
    figure, axes = _stage("send and recv: one rank to one other; the rest is not involved")
    for rank in range(N):
        _row(axes, rank, BEFORE, _own(rank, NUMBERS[rank]))
        _row(axes, rank, AFTER, _own(1, NUMBERS[1]) if rank == 2 else _own(rank, NUMBERS[rank]))
    _between(axes, 1, 2)
    write(axes, _centre(1) - 6.2, BEFORE + 5.4, "send(x, 2)", size=9, family="monospace")
    write(axes, _centre(2) + 6.2, AFTER - 2.2, "recv(x, 1)", size=9, family="monospace")
    return figure


def barrier():
    """Ranks arrive one by one, and leave together."""
    figure, axes = card(LEFT + COLUMN * N + 1, 25, "barrier: nobody goes on before all have come")
    arrivals, leave, right = (20, 34, 48, 27), 52, 74
    for rank, arrival in enumerate(arrivals):
        y, colour = 6 + 4.2 * rank, rank_colour(rank)
        rank_box(axes, rank, 2, y - 1.5, width=9, height=3)
        cell(axes, 13, y - 1.2, "work", rank, width=arrival - 13, height=2.4, size=9)
        cell(axes, leave, y - 1.2, "goes on", rank, width=right - leave, height=2.4, size=9)
        if arrival < leave - 4:
            axes.plot([arrival, leave], [y, y], color=colour, lw=1.4, ls=":", zorder=2)
            write(axes, (arrival + leave) / 2, y - 1.3, "waits", size=8, colour=QUIET)
    axes.plot([leave, leave], [4, 21], color=INK, lw=2, zorder=3)
    arrow(axes, (60, 23), (74, 23), colour=QUIET)
    write(axes, 57, 23, "time", colour=QUIET, size=9)
    return figure


# ---- the ring ----


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
        arrow(axes, start, end, colour=rank_colour(rank), label=f"chunk {rank}")
    write(axes, 22, 17, "hop 1: four messages\nat the same time", colour=QUIET, size=9)
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
    write(axes, 90.5, 2.4, note, size=9, colour=QUIET, ha="right")
    write(axes, 9.9, 8.4, "chunk", size=8.5, colour=QUIET, ha="right")
    for rank in range(N):
        rank_box(axes, rank, 1.5, 10.2 + 4 * rank, width=8.4, height=3)
    for panel in range(N):
        left = 12 + 20.2 * panel
        write(
            axes,
            left + 8.4,
            5.6,
            "at the start" if panel == 0 else f"after hop {panel}",
            size=10,
            weight="bold",
        )
        for chunk in range(N):
            write(axes, left + 2.1 + 4.2 * chunk, 8.4, str(chunk), size=8.5, colour=QUIET)
    return figure, axes


def _grid_cell(axes, panel, rank, chunk, text, fresh, complete):
    x, y = 12 + 20.2 * panel + 4.2 * chunk, 10 + 4 * rank
    strength = 0.55 if complete else 0.12
    cell(
        axes, x, y, text, rank, width=4, height=3.4, strength=strength, size=9, hatch=HATCH if fresh else None
    )


def ring_reduce_scatter():
    """The first half of the ring: partial sums travel, and grow by one rank's numbers at each hop."""
    figure, axes = _panels(
        "reduce-scatter on the ring",
        "digits: whose numbers are in it; hatched: has just arrived and was added",
    )
    for panel, (held, fresh) in enumerate(_reduce_scatter_states()):
        for rank, chunk in itertools.product(range(N), repeat=2):
            numbers = held[rank][chunk]
            text = "".join(map(str, sorted(numbers)))
            _grid_cell(axes, panel, rank, chunk, text, (rank, chunk) in fresh, len(numbers) == N)
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
        cell(axes, x, 10.5, "1  send to the right", rank, width=15.5, height=3.2, strength=0.4, size=9)
        cell(axes, x, 15, "2  recv from the left", None, width=15.5, height=3.2, size=9)
        if rank < N - 1:
            arrow(axes, (x + 15.7, 12), (x + 19.3, 16.2), colour=rank_colour(rank))
    arrow(
        axes, (77.2, 12), (79.4, 14.6), colour=rank_colour(3), style="-"
    )  # out on the right, in on the left
    arrow(axes, (0.6, 14), (2.8, 16.2), colour=rank_colour(3))
    write(axes, 40, 21.8, "Line 1 ends when the neighbour is in line 2. The neighbour is in line 1.", size=10)
    return figure


def alpha_beta():
    """Time of a message against its size: a constant plus a slope."""
    figure, axes = card(56, 28, "what a message costs: α + bytes / β")
    arrow(axes, (8, 24), (53, 24))
    arrow(axes, (8, 24), (8, 5))
    write(axes, 47, 26, "bytes", size=9)
    write(axes, 4.6, 6, "time", size=9)
    axes.plot([8, 49], [19, 7], color=rank_colour(0), lw=2.5, zorder=3)
    axes.plot([8, 49], [19, 19], color=QUIET, lw=1, ls=":", zorder=2)
    arrow(axes, (11, 24), (11, 19), style="<|-|>")
    write(axes, 12.3, 21.5, "α: what an empty message costs (latency)", size=9, ha="left")
    arrow(axes, (46, 19), (46, 8.2), style="<|-|>")
    write(axes, 44.8, 15.6, "bytes / β\n(bandwidth)", size=9, ha="right")
    return figure


def _node(axes, rank, x, y):
    rank_box(axes, rank, x - 1.9, y - 1.6, width=3.8, height=3.2, label=str(rank))


def tree():
    """A broadcast from rank 0 to eight ranks: whoever has the data passes it on, so the number doubles each round."""
    figure, axes = card(66, 33, "broadcast by a tree: 1, 2, 4, 8 ranks have it")
    places = {
        0: (34, 7),
        1: (46, 13),
        2: (22, 19),
        3: (52, 19),
        4: (10, 26),
        5: (40, 26),
        6: (26, 26),
        7: (58, 26),
    }
    for child in range(1, 8):
        parent = child - (1 << (child.bit_length() - 1))
        (x0, y0), (x1, y1) = places[parent], places[child]
        start, end = (x0 + (x1 - x0) * 0.13, y0 + 1.9), (x1 - (x1 - x0) * 0.05, y1 - 1.9)
        arrow(axes, start, end, colour=rank_colour(parent), label=f"{child.bit_length()}")
    for rank, place in places.items():
        _node(axes, rank, *place)
    write(axes, 64.5, 30.6, "number on an arrow: the round", size=9, colour=QUIET, ha="right")
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
                arrow(axes, (left + 10.6, y), (left + 15.4, y), style="<|-|>", colour=rank_colour(5))
    write(axes, 42, 25.9, "Only step 2 uses the slow link, with half of the bytes per rank.", size=10)
    return figure


def _box(axes, x, y, label):
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), 11, 14, fc=tint(INK, 0.04), ec="#b0b0b0", lw=1, zorder=0.5))
    write(axes, x + 5.5, y + 1.2, label, size=8, colour=QUIET)


def strong_scaling():
    """The same work cut into more and more pieces, and the times that somebody measured."""
    figure, axes = card(78, 26, "strong scaling: the same work on 1, 2, 4, 8 ranks")
    for row, (n, seconds) in enumerate({1: 8.03, 2: 4.21, 4: 2.09, 8: 1.06}.items()):
        y, pieces = 6 + 4.6 * row, 8 // n
        write(axes, 9.5, y + 1.6, f"{n} rank{'s' if n > 1 else ''}", ha="right", weight="bold")
        for rank in range(n):
            for piece in range(pieces):
                height = 3.4 / n
                cell(
                    axes,
                    11 + 5.6 * piece,
                    y + height * rank,
                    rank=rank,
                    width=5.6,
                    height=height,
                    strength=0.4,
                )
        write(
            axes,
            11 + 5.6 * pieces + 1.2,
            y + 1.6,
            f"{seconds} s",
            size=9,
            ha="left",
        )
    arrow(axes, (11, 24.4), (56, 24.4), colour=QUIET)
    write(axes, 59, 24.4, "time", size=9, colour=QUIET)
    return figure


FIGURES = {
    "02_strong_scaling": Drawing(
        strong_scaling,
        "Strong scaling: eight pieces of work on one rank take 8.03 s; shared by 2, 4 and 8 ranks 4.21, 2.09 and 1.06 s.",
    ),
    "02_broadcast": Drawing(
        broadcast, "Broadcast: rank 0 holds 3, the others nothing; afterwards all four hold 3."
    ),
    "02_scatter": Drawing(
        scatter,
        "Scatter: rank 0 holds the parts 0, 1, 2 and 3; afterwards rank k holds part k and nothing else.",
    ),
    "02_gather": Drawing(
        gather, "Gather: the ranks hold 3, 1, 4 and 2; afterwards rank 0 holds all four numbers side by side."
    ),
    "02_reduce": Drawing(
        reduce, "Reduce: the ranks hold 3, 1, 4 and 2; afterwards rank 0 holds their sum, 10."
    ),
    "02_all_reduce": Drawing(
        all_reduce, "All-reduce: the ranks hold 3, 1, 4 and 2; afterwards every rank holds their sum, 10."
    ),
    "02_all_gather": Drawing(
        all_gather,
        "All-gather: the ranks hold 3, 1, 4 and 2; afterwards every rank holds all four side by side.",
    ),
    "02_reduce_scatter": Drawing(
        reduce_scatter,
        "Reduce-scatter: every rank holds four parts; afterwards rank k holds the sum of everybody's part k: 60, 64, 68, 72.",
    ),
    "02_all_to_all": Drawing(
        all_to_all,
        "All-to-all: every rank holds four parts; afterwards rank k holds everybody's part k, in rank order.",
    ),
    "02_send_recv": Drawing(
        send_recv, "Send and recv: rank 1 sends its 1 to rank 2; ranks 0 and 3 do not take part."
    ),
    "02_barrier": Drawing(
        barrier, "Barrier: the ranks arrive one by one, wait for the last, and go on together."
    ),
    "02_ring": Drawing(
        ring, "Four ranks on a ring; rank k sends chunk k to rank k+1, all four at the same time."
    ),
    "02_ring_reduce_scatter": Drawing(
        ring_reduce_scatter,
        "Reduce-scatter on the ring: at each of three hops every rank receives one chunk and adds it; then rank k holds "
        "the finished sum of chunk k+1.",
    ),
    "02_ring_all_gather": Drawing(
        ring_all_gather,
        "All-gather on the ring: at each of three hops every rank receives one finished chunk; then all have all four.",
    ),
    "02_ordered_sends": Drawing(
        ordered_sends,
        "Four ranks that all send before they receive: each send waits for a receive that never starts.",
    ),
    "02_alpha_beta": Drawing(
        alpha_beta,
        "The time of a message against its size is a straight line that starts at alpha and rises by 1/beta.",
    ),
    "02_tree": Drawing(
        tree,
        "Broadcast by a tree: in rounds 1, 2 and 3 the ranks that have the data double from 1 to 2, 4 and 8.",
    ),
    "02_hierarchical": Drawing(
        hierarchical,
        "Hierarchical all-reduce on 2 nodes of 2 ranks: reduce-scatter inside the nodes, all-reduce across, all-gather "
        "inside.",
    ),
}
