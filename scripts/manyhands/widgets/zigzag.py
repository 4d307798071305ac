"""Show which rank computes which part of causal attention: ranks, positions, a layout, and the work of each step."""

from itertools import groupby

from manyhands.plots.bars import steps_of_ranks
from manyhands.plots.looks import FAINT, PAPER, PREDICTED, new_figure, rank_colour, tint
from manyhands.widgets.display import show_with_controls

LAYOUTS = ("in order", "zig-zag", "striped")
MOST_RANKS, MOST_POSITIONS = 8, 128


def owners(layout, T, n):
    """The rank of each of T positions under a layout on n ranks: a list of T.

    "in order": one stretch each; "zig-zag": chunk r of 2n and its mirror image; "striped": every n-th position (Brandon
    et al. 2023, arXiv:2311.09431). Raise ValueError if T does not split, or the layout is unknown.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is unknown; use one of {', '.join(LAYOUTS)}")
    chunks = 2 * n if layout == "zig-zag" else n
    if T % chunks:
        raise ValueError(f"{T} positions do not split into {chunks} equal chunks; use a multiple of {chunks}")
    if layout == "striped":
        return [at % n for at in range(T)]
    numbers = [at // (T // chunks) for at in range(T)]
    return [min(number, chunks - 1 - number) for number in numbers] if layout == "zig-zag" else numbers


def pairs_by_step(owner_T, n):
    """[rank][step]: pairs left by a causal mask of rank's queries and the keys that visit it in that step."""
    pairs = [[0] * n for _ in range(n)]
    seen = [0] * n  # keys of each rank so far: all that a query may look at
    for rank in owner_T:
        seen[rank] += 1
        for owner, keys in enumerate(seen):
            pairs[rank][(rank - owner) % n] += keys
    return pairs


def zigzag_picture(ranks=4, positions=16, layout="zig-zag"):
    """(a matplotlib Figure, its text): the causal mask in the colours of the ranks whose queries they are, and each
    rank's pairs. Raise ValueError where the positions do not split.
    """
    owner_T = owners(layout, positions, ranks)
    pairs = pairs_by_step(owner_T, ranks)
    figure, (mask, work) = new_figure(9, 4.2, 1, 2, width_ratios=[1, 1.15])
    _draw_mask(mask, owner_T, layout)
    _draw_work(work, pairs)
    each = ", ".join(f"{sum(steps):,}" for steps in pairs)
    return figure, (
        f"{positions} positions {layout} on {ranks} rank{'s' if ranks > 1 else ''}: {each} query-key pairs; "
        f"the busiest ranks need {_slowdown(pairs):.2f} times a fair share"
    )


def show_zigzag(**settings):
    """Choose ranks, positions and layout (as for `zigzag_picture`). A picture where nobody can."""
    show_with_controls(
        zigzag_picture, settings,
        {
            "ranks": ("BoundedIntText", 4, "ranks c", 5, 11, {"min": 1, "max": MOST_RANKS}),
            "positions": ("BoundedIntText", 16, "positions", 6, 13, {"min": 2, "max": MOST_POSITIONS}),
            "layout": ("Dropdown", "zig-zag", "layout", 5, 16, {"options": list(LAYOUTS)}),
        },
    )  # fmt: skip


def _draw_mask(axes, owner_T, layout):
    """Queries downwards, keys to the right: a query's row has its rank's colour as far as the mask lets it look."""
    from matplotlib.collections import PolyCollection

    T = len(owner_T)
    rows = [[(0, q), (q + 1, q), (q + 1, q + 1), (0, q + 1)] for q in range(T)]
    faces = [tint(rank_colour(rank), 0.6) for rank in owner_T]
    edge = {"edgecolors": PAPER, "linewidths": 0.6} if T <= 64 else {"linewidths": 0}
    axes.add_collection(PolyCollection(rows, facecolors=faces, **edge))
    axes.plot([0, T, T, 0, 0], [0, 0, T, T, 0], color=FAINT, lw=1)
    first = 0
    for rank, stretch in groupby(owner_T):
        last = first + len(list(stretch))
        if (last - first) / T * 3.3 * 72 > 11:  # inches of the axes, points of the text
            axes.text(-0.015 * T, (first + last) / 2, str(rank), fontsize=10, ha="right", va="center")
        first = last
    axes.set(xlim=(-0.06 * T, T), ylim=(T, 0), aspect="equal", xlabel="key", ylabel="query, and its rank")
    axes.set_title(f"the causal mask, {layout}", fontsize=11)
    axes.set_xticks([]), axes.set_yticks([])
    axes.spines[:].set_visible(False)


def _draw_work(axes, pairs):
    """A bar per rank, stacked by the ring's steps, and a line where all would be with equal work."""
    n = len(pairs)
    fair = sum(map(sum, pairs)) / n
    steps_of_ranks(axes, pairs, lw=0.8)
    axes.plot([-0.6, n - 0.4], [fair, fair], **PREDICTED)
    axes.text(n - 0.35, fair, "fair\nshare", fontsize=10, va="center")
    axes.set(xlabel="rank (darkest: step 0 of the ring)", ylabel="query-key pairs", xlim=(-0.6, 1.17 * n))
    axes.set_xticks(range(n))
    axes.set_title(f"the busiest ranks need {_slowdown(pairs):.2f} times a fair share", fontsize=11)


def _slowdown(pairs):
    """The busiest rank of each step, added up, over a fair share: a ring moves on when its slowest rank does."""
    busiest = sum(max(steps) for steps in zip(*pairs, strict=True))
    return busiest * len(pairs) / sum(map(sum, pairs))
