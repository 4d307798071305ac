"""Figures of lesson 06: halves of a model, ZeRO's stages, volumes, a step of FSDP, storage, norms, wrapping, HSDP."""

import itertools

from draw import arrow, as_frame, cell
from manyhands.plots.looks import (
    BYTES,
    EDGE,
    GREY,
    HATCH,
    INK,
    PAPER,
    QUIET,
    box,
    card,
    rank_box,
    rank_colour,
    tint,
    write,
)


def _share(axes, x, y, width, height, n, held, size=10, text=None):
    """A row of n pieces: those in `held` {piece: text} tinted in their owner's colour, the others outlined."""
    piece = width / n
    for i in range(n):
        if i in held:
            colour = rank_colour(i)
            box(axes, x + i * piece, y, piece, height, held[i], tint(colour, 0.35), colour, size=size)
        else:
            box(axes, x + i * piece, y, piece, height, edge=EDGE, dotted=True)
    if text:
        write(axes, x + width / 2, y + height / 2, text, size=size)


def two_halves():
    figure, axes = card(92, 33, "38 weights on two ranks")
    for x, title in ((23, "DDP: all, twice"), (50, "FSDP at rest: 19 each"), (79, "FSDP while it computes")):
        write(axes, x, 6.2, title, weight="bold")
    for rank, y in ((0, 9), (1, 20)):
        rank_box(axes, rank, 2, y + 1, width=9, height=5)
        box(axes, 13, y, 20, 7, "38", face=GREY, size=12)
        _share(axes, 40, y, 20, 7, 2, {rank: "19"}, size=12)
        _share(axes, 69, y, 20, 7, 2, {0: "19", 1: "19"}, size=12)
        arrow(axes, (60.5, y + 3.5), (68.5, y + 3.5))
    box(axes, 59, 16.6, 11, 2.8, "all-gather", hatch=HATCH)
    write(axes, 23, 30, "76 numbers kept", colour=QUIET)
    write(axes, 50, 30, "38 numbers kept", colour=QUIET)
    write(axes, 79, 30, "whole for the moment", colour=QUIET)
    return figure


def stages():
    figure, axes = card(92, 43, "7.5 billion parameters on N = 64 ranks, 2 + 2 + 12 bytes each, to scale")
    rows = (
        ("none", "all on every rank", 0, "120 GB"),
        ("ZeRO-1", "Adam in shares", 1, "31.4 GB"),
        ("ZeRO-2", "and gradients", 2, "16.6 GB"),
        ("ZeRO-3", "and weights", 3, "1.9 GB"),
    )
    kinds = (("parameters", 3, 2), ("gradients", 2, 2), ("optimizer", 1, 12))  # from which stage on in shares; bytes
    columns, unit = (("rank 0", 0, 0), ("rank 1", 1, 1), ("rank N-1", 63, 2)), 19 / 16
    for i, (label, _, colour_of) in enumerate(columns):
        rank_box(axes, colour_of, 21 + 21.5 * i, 5, width=19, height=3, label=label)
    for row, (name, gloss, stage, gigabytes) in enumerate(rows):
        y = 10 + 7.4 * row
        write(axes, 2, y + 1.6, name, ha="left", weight="bold")
        write(axes, 2, y + 4.2, gloss, ha="left", colour=QUIET)
        for i, (_, piece, colour_of) in enumerate(columns):
            x, colour = 21 + 21.5 * i, rank_colour(colour_of)
            for kind, first, size in kinds:
                width, hatch = size * unit, BYTES[kind][1]
                if stage >= first:  # a 64th, where it lies in the row of all
                    box(axes, x, y, width, 5.4, edge=EDGE, dotted=True)
                    box(axes, x + piece * width / 64, y, width / 64, 5.4, face=colour, edge=colour)
                else:
                    box(axes, x, y, width, 5.4, face=GREY, hatch=hatch)
                x += width
        write(axes, 87, y + 2.7, gigabytes, weight="bold")
    x = 4
    for kind, text in (("parameters", "weights"), ("gradients", "gradients"), ("optimizer", "Adam and fp32 copy")):
        box(axes, x, 39.6, 3.4, 2, hatch=BYTES[kind][1], face=GREY)
        write(axes, x + 4.2, 40.6, text, ha="left")
        x += 8 + 0.8 * len(text)
    box(axes, x, 39.6, 3.4, 2, edge=EDGE, dotted=True)
    write(axes, x + 4.2, 40.6, "on other ranks; colour: this rank's 64th", ha="left")
    return figure


def volume():
    figure, axes = card(92, 34, "what a step communicates, in P")
    rows = (
        ("DDP", (("forward", 0), ("backward", 0), ("all-reduce: gradients", 2), ("update", 0)), "2 P"),
        (
            "ZeRO-1, 2",
            (("forward", 0), ("backward", 0), ("reduce-scatter", 1), ("update", 0), ("all-gather", 1)),
            "2 P",
        ),
        (
            "ZeRO-3",
            (
                ("all-gather", 1), ("forward", 0), ("all-gather", 1), ("backward", 0), ("reduce-scatter", 1),
                ("update", 0),
            ),
            "3 P",
        ),
    )  # fmt: skip
    for row, (name, parts, total) in enumerate(rows):
        y = 7 + 7.8 * row
        write(axes, 2, y + 2.4, name, ha="left", weight="bold")
        x = 14
        for text, cost in parts:
            width = 24 if cost == 2 else 12 if cost else 9
            box(axes, x, y, width, 4.8, text, face=PAPER if cost else GREY, hatch=HATCH if cost else None)
            x += width
        write(axes, 86, y + 2.4, total, weight="bold", size=12)
    note = "hatched: communication, one box of this width for each P; much of it overlaps with computing"
    write(axes, 14, 31.3, note, ha="left", colour=QUIET)
    return figure


def fsdp_step():
    figure, axes = card(92, 41, "one unit, two ranks, one step")
    steps = (
        ("at rest", "own"), ("all-gather", "whole"), ("forward", "whole"), ("free", "own"), ("all-gather", "whole"),
        ("backward", "grads"), ("reduce-\nscatter", "sum"), ("free,\nupdate", "new"),
    )  # fmt: skip
    for i, (name, _) in enumerate(steps):
        x = 11.5 + 10 * i
        hatched = name.startswith(("all-gather", "reduce"))
        box(axes, x, 5, 9, 4.6, name, hatch=HATCH if hatched else None, face=PAPER if hatched else GREY)
        if i:
            arrow(axes, (x - 1, 7.3), (x, 7.3))
    for rank, y in ((0, 12), (1, 25)):
        rank_box(axes, rank, 1.5, y + 1.4, width=8.5, height=4.4)
        for i, (_, state) in enumerate(steps):
            x = 11.5 + 10 * i
            weights = {0: "w₀", 1: "w₁"} if state in ("whole", "grads") else {rank: f"w{'₀₁'[rank]}"}
            if state == "new":
                weights = {rank: f"w{'₀₁'[rank]}′"}
            _share(axes, x, y, 9, 4, 2, weights)
            if state == "grads":
                box(axes, x, y + 5, 9, 4, "whole g", face=tint(rank_colour(rank), 0.15), edge=rank_colour(rank))
            if state in ("sum", "new"):
                _share(axes, x, y + 5, 9, 4, 2, {rank: "Σg"})
    write(axes, 11.5, 38.3, "upper row: weights; lower row: gradients; dotted: not here", ha="left", colour=QUIET)
    return figure


def fsdp_moving():
    """A step of FSDP over four units, unit by unit, as a moving figure."""
    figure, axes = card(64, 44, "a step of FSDP: four units, two ranks")
    weights = "w₀", "w₁"
    for rank in range(2):
        rank_box(axes, rank, 12 + 26 * rank, 8.2, width=24, height=4)
        write(axes, 18 + 26 * rank, 14.4, "weights", colour=QUIET)
        write(axes, 30 + 26 * rank, 14.4, "gradients", colour=QUIET)
    for unit in range(4):
        write(axes, 10.5, 18.2 + 6 * unit, f"unit {unit}", ha="right")

    def frame(words, whole=None, done=()):
        """Unit `whole` has all its weights; the units in `done` have their share of the summed gradient."""
        for rank, unit in itertools.product(range(2), range(4)):
            held = dict(enumerate(weights)) if unit == whole else {rank: weights[rank]}
            _share(axes, 12.5 + 26 * rank, 16 + 6 * unit, 11, 4.4, 2, held)
            _share(axes, 24.5 + 26 * rank, 16 + 6 * unit, 11, 4.4, 2, {rank: "Σg"} if unit in done else {})
        write(axes, 32, 5.2, words, weight="bold")

    frames = [("at rest: half of everything",)]
    frames += [(f"forward: gather unit {unit}, compute, free it", unit) for unit in range(4)]
    frames += [(f"backward: gather unit {unit}, compute, reduce-scatter, free", unit, range(unit, 4))
               for unit in reversed(range(4))]  # fmt: skip
    frames += [("each rank updates its own half", None, range(4))]
    for number, state in enumerate(frames):
        as_frame(axes, number, lambda state=state: frame(*state))
    write(axes, 32, 41.6, "dotted: not here", colour=QUIET)
    return figure


def storage():
    figure, axes = card(92, 33, "free the storage, keep the tensors")
    for i, (title, full) in enumerate((("gathered", True), ("freed", False), ("gathered again", True))):
        x = 3 + 30.5 * i
        write(axes, x + 12.5, 6.2, title, weight="bold")
        box(axes, x, 8.5, 11.5, 5.4, "p\n[512, 128]", face=GREY)
        box(axes, x + 13.5, 8.5, 11.5, 5.4, "saved by\nautograd", face=GREY)
        _share(axes, x, 18.5, 25, 4.6, 4, dict.fromkeys(range(4), "") if full else {})
        for start in (x + 5.7, x + 19.2):
            arrow(axes, (start, 14), (x + 12.5 + (start - x - 12.5) * 0.45, 18.3), colour=INK if full else EDGE)
        write(axes, x + 12.5, 25, "storage of the row" if full else "0 bytes", colour=QUIET)
        box(axes, x, 27, 6.2, 3.6, "share", face=tint(rank_colour(0), 0.35), edge=rank_colour(0))
        write(axes, x + 7.2, 28.8, "memory of its own", ha="left", colour=QUIET)
        if i:
            arrow(axes, (x - 4.6, 20.8), (x - 0.8, 20.8))
    return figure


def norm():
    figure, axes = card(80, 31, "lengths of shares, length of the whole")
    a, b, c = (14, 26), (34, 26), (34, 11)
    axes.plot([b[0] - 2, b[0] - 2, b[0]], [b[1], b[1] - 2, b[1] - 2], color=QUIET, lw=1, zorder=2)
    axes.plot([a[0], b[0]], [a[1], b[1]], color=rank_colour(1), lw=4, zorder=3)
    axes.plot([b[0], c[0]], [b[1], c[1]], color=rank_colour(0), lw=4, zorder=3)
    axes.plot([a[0], c[0]], [a[1], c[1]], color=INK, lw=4, ls=(0, (4, 1)), zorder=3)
    write(axes, 24, 28.4, "rank 1's share: 4")
    write(axes, 35.5, 18.5, "rank 0's share: 3", ha="left")
    write(axes, 21.5, 16.2, "the gradient: 5", ha="right", weight="bold")
    lines = (
        ("√(3² + 4²) = 5", "right: one all-reduce of one number"),
        ("3 on rank 0, 4 on rank 1", "each clips by its own"),
        ("3 + 4 = 7", "clips too much"),
    )
    for i, (what, why) in enumerate(lines):
        write(axes, 50.5, 9 + 6.6 * i, what, ha="left", weight="bold" if i == 0 else "normal")
        write(axes, 50.5, 11.6 + 6.6 * i, why, ha="left", colour=QUIET)
    return figure


def wrapping():
    from matplotlib.patches import Rectangle

    figure, axes = card(92, 42, "what is gathered at once, and what is the root")
    parts = (
        ("token\nembed.", 11),
        ("pos.", 6),
        ("block 0", 12),
        ("block 1", 12),
        ("block 2", 12),
        ("block 3", 12),
        ("norm", 6),
        ("head", 9),
    )
    rows = (
        ("block", "4 units", (None, None, 0, 1, 2, 3, None, None)),
        ("block_and_size", "6 units", (4, None, 0, 1, 2, 3, None, 5)),
        ("block_group:2", "2 units", (None, None, 0, 0, 2, 2, None, None)),
        ("all in one", "the root alone", (None,) * 8),
    )  # fmt: skip
    for row, (name, gloss, unit_of) in enumerate(rows):
        y = 6 + 8.4 * row
        write(axes, 1.5, y + 1.8, name, ha="left", weight="bold")
        write(axes, 1.5, y + 4.4, gloss, ha="left", colour=QUIET)
        x, open_units = 16.0, {}
        for (text, width), unit in zip(parts, unit_of, strict=True):
            width *= 0.87
            x += 0.8 if unit is not None and unit not in open_units else 0
            box(axes, x, y, width, 6, text, GREY if unit is None else PAPER, dotted=unit is None)
            if unit is not None:
                left, _ = open_units.setdefault(unit, (x, x))
                open_units[unit] = left, x + width
            x += width
        for left, right in open_units.values():
            axes.add_patch(Rectangle((left, y), right - left, 6, fc="none", ec=INK, lw=3, zorder=3))
    write(
        axes,
        16,
        40.2,
        "framed: a unit; grey and dotted: the root, whole from forward to backward",
        ha="left",
        colour=QUIET,
    )
    return figure


def hsdp():
    figure, axes = card(92, 36, "HSDP on two nodes of four: shares within, copies between")
    for node in range(2):
        y = 6 + 15 * node
        box(axes, 12, y, 78, 10.4, face="none", edge=QUIET)
        write(axes, 6.5, y + 5.2, f"node {node}", weight="bold")
        for i in range(4):
            x = 14 + 19.2 * i
            rank_box(axes, 4 * node + i, x, y + 1, width=17, height=3)
            for piece in range(4):
                if piece == i:
                    cell(axes, x + 4.25 * piece, y + 5.2, f"w{'₀₁₂₃'[i]}", 4 * node + i, width=4.25, height=4)
                else:
                    box(axes, x + 4.25 * piece, y + 5.2, 4.25, 4, edge=EDGE, dotted=True)
    for i in range(4):
        arrow(axes, (22.5 + 19.2 * i, 16.6), (22.5 + 19.2 * i, 20.8), style="<|-|>")
    note = (
        "in a node: all-gather weights, reduce-scatter gradients; "
        "between nodes (arrows): all-reduce a quarter of the gradients"
    )
    write(axes, 2, 34, note, ha="left", colour=QUIET)
    return figure


FIGURES = {
    "06_two_halves": two_halves,
    "06_stages": stages,
    "06_volume": volume,
    "06_fsdp_step": fsdp_step,
    "06_fsdp_moving": fsdp_moving,
    "06_storage": storage,
    "06_norm": norm,
    "06_wrapping": wrapping,
    "06_hsdp": hsdp,
}
