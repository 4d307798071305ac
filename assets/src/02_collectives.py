"""Figures of lesson 02: what each collective does to four ranks."""

import itertools

from draw import arrow, cell
from manyhands.plots.looks import EDGE, FAINT, INK, QUIET, box, card, rank_box, rank_colour, write

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

    axes.add_patch(Rectangle((x, y), width, 3.2, fc="none", ec=FAINT, lw=1, ls=(0, (2, 2)), zorder=1))


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
    "broadcast: everybody gets rank 0's tensor", [_own(0, 3), [None], [None], [None]], [_own(0, 3)] * N, _FROM_0
)
scatter = _collective(
    "scatter: everybody gets one part of rank 0's tensor",
    [_PARTS[0], [None], [None], [None]],
    [[part] for part in _PARTS[0]],
    _FROM_0,
)
gather = _collective("gather: rank 0 gets all tensors, side by side", _SINGLE, [_ALL, [None], [None], [None]], _TO_0)
reduce = _collective(
    "reduce: rank 0 gets the sum of all tensors", _SINGLE, [[(10, None)], [None], [None], [None]], _TO_0
)
all_reduce = _collective("all-reduce: everybody gets the sum of all tensors", _SINGLE, [[(10, None)]] * N, _EVERY_PAIR)
all_gather = _collective("all-gather: everybody gets all tensors, side by side", _SINGLE, [_ALL] * N, _EVERY_PAIR)
reduce_scatter = _collective(
    "reduce-scatter: everybody gets one part of the sum", _PARTS, [[(total, None)] for total in _SUMS], _EVERY_PAIR
)
all_to_all = _collective("all-to-all: part k of everybody goes to rank k", _PARTS, _COLUMNS, _EVERY_PAIR)

PLATE = (  # before and after, in the order of the lesson's blanks
    ([_own(0, 3), [None], [None], [None]], [_own(0, 3)] * N),
    ([_PARTS[0], [None], [None], [None]], [[part] for part in _PARTS[0]]),
    (_SINGLE, [_ALL, [None], [None], [None]]),
    (_SINGLE, [[(10, None)], [None], [None], [None]]),
    (_SINGLE, [[(10, None)]] * N),
    (_SINGLE, [_ALL] * N),
    (_PARTS, [[(total, None)] for total in _SUMS]),
    (_PARTS, _COLUMNS),
)


def plate():
    """Eight pictures without names: what each of four ranks holds before and after a collective."""
    figure, axes = card(106, 44, "before and after: which collective is it?")
    for number, states in enumerate(PLATE, 1):
        left, top = 2 + 25.6 * ((number - 1) % 4), 5.5 + 20 * ((number - 1) // 4)
        write(axes, left + 1.2, top + 1, str(number), size=12, weight="bold")
        for name, x in (("before", 4), ("after", 14.8)):
            write(axes, left + x, top + 1, name, colour=QUIET, ha="left")
        for rank in range(N):
            y = top + 3 + 3.7 * rank
            rank_box(axes, rank, left, y, width=2.8, height=3.1, label=str(rank))
            for state, x in zip(states, (4, 14.8), strict=True):
                for place, content in enumerate(state[rank]):
                    if content is None:
                        _nothing(axes, left + x + 2.4 * place, y, 2.4)
                    else:
                        cell(axes, left + x + 2.4 * place, y, *content, width=2.4, height=3.1)
    return figure


def send_recv():
    """One rank sends, one receives, the others have nothing to do with it."""
    figure, axes = _stage("send and recv: one rank to one other; the rest is not involved")
    for rank in range(N):
        _row(axes, rank, BEFORE, _own(rank, NUMBERS[rank]))
        _row(axes, rank, AFTER, _own(1, NUMBERS[1]) if rank == 2 else _own(rank, NUMBERS[rank]))
    _between(axes, 1, 2)
    write(axes, _centre(1) - 6.2, BEFORE + 5.4, "send(x, 2)", family="monospace")
    write(axes, _centre(2) + 6.2, AFTER - 2.2, "recv(x, 1)", family="monospace")
    return figure


def barrier():
    """Ranks arrive one by one, and leave together."""
    figure, axes = card(LEFT + COLUMN * N + 1, 25, "barrier: nobody goes on before all have come")
    arrivals, leave, right = (20, 34, 48, 27), 52, 74
    for rank, arrival in enumerate(arrivals):
        y = 6 + 4.2 * rank
        rank_box(axes, rank, 2, y - 1.5, width=9, height=3)
        cell(axes, 13, y - 1.2, "work", rank, width=arrival - 13, height=2.4)
        cell(axes, leave, y - 1.2, "goes on", rank, width=right - leave, height=2.4)
        says = "waits" if arrival < leave - 4 else ""
        box(axes, arrival, y - 1.2, leave - arrival, 2.4, says, edge=EDGE, dotted=True)
    axes.plot([leave, leave], [4, 21], color=INK, lw=2, zorder=3)
    arrow(axes, (60, 23), (74, 23), colour=QUIET)
    write(axes, 57, 23, "time", colour=QUIET)
    return figure


FIGURES = {
    "02_plate": plate,
    "02_broadcast": broadcast,
    "02_scatter": scatter,
    "02_gather": gather,
    "02_reduce": reduce,
    "02_all_reduce": all_reduce,
    "02_all_gather": all_gather,
    "02_reduce_scatter": reduce_scatter,
    "02_all_to_all": all_to_all,
    "02_send_recv": send_recv,
    "02_barrier": barrier,
}
