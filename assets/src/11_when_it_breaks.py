"""Figures of lesson 11: a missing call, a straggler, NaN on its way, a save, resharding, a restart, pre-emption."""

from draw import arrow, cell
from manyhands.plots.looks import (
    EDGE,
    FAINT,
    GREY,
    GROUND,
    HATCH,
    INK,
    QUIET,
    box,
    card,
    rank_box,
    rank_colour,
    tint,
    write,
)


def missing_call():
    figure, axes = card(92, 29, "which call did each rank make?")
    for rank in range(4):
        y = 6 + 5 * rank
        rank_box(axes, rank, 2, y, width=9, height=4)
        write(axes, 14, y + 2, "...")
        for i, number in enumerate((3, 4, 5, 6)):
            x = 17 + 10 * i
            if rank == 2 and number == 6:
                box(axes, x, y, 9, 4, "?", edge=EDGE, dotted=True, size=12)
                write(axes, 58, y + 2, "did not call it", ha="left", weight="bold")
            else:
                cell(axes, x, y, str(number), rank, width=9, height=4, hatch=None)
        if rank != 2:
            box(axes, 58, y, 22, 4, "waits in number 6", edge=EDGE, dotted=True)
    write(axes, 17, 27, "number of the all-reduce, in this group", ha="left", size=10, colour=QUIET)
    return figure


def straggler():
    figure, axes = card(92, 30, "every step is as long as its slowest rank")
    for step, (x, slow) in enumerate(((13, 1.0), (36, 2.0), (71, 1.0))):
        length = 14 * slow
        for rank in range(4):
            y, own = 6 + 4.8 * rank, length if rank == 2 else 14
            box(axes, x, y, own, 3.8, "compute", face=tint(rank_colour(rank), 0.5), size=10)
            if length > own:
                box(axes, x + own, y, length - own, 3.8, "wait", edge=EDGE, dotted=True, size=10)
            box(axes, x + length, y, 4, 3.8, "", hatch=HATCH)
        write(axes, x + (length + 4) / 2, 26, f"step {step}", size=10)
    for rank in range(4):
        write(axes, 2, 7.9 + 4.8 * rank, f"rank {rank}", ha="left", weight="bold")
    write(axes, 2, 28.3, "hatched: all-reduce; in step 1 rank 2 is twice as slow", ha="left", size=10, colour=QUIET)
    return figure


def nan():
    figure, axes = card(92, 30, "one NaN before the all-reduce, NaN everywhere after it")
    for x, title in ((22, "own gradient"), (73, "averaged gradient")):
        write(axes, x, 6, title, colour=QUIET)
    own = [("0.2", "-0.1", "0.4"), ("0.1", "0.3", "0.2"), ("0.3", "NaN", "0.1"), ("0.2", "0.1", "0.3")]
    box(axes, 40, 8, 14, 18.8, "all-reduce", hatch=HATCH)
    for rank, values in enumerate(own):
        y = 8 + 5 * rank
        rank_box(axes, rank, 2, y, width=9, height=3.8)
        for i, value in enumerate(values):
            found = value == "NaN"
            cell(axes, 13 + 6 * i, y, value, rank, width=6, height=3.8, strength=0.9 if found else 0.2)
        arrow(axes, (32, y + 1.9), (39.5, y + 1.9), colour=rank_colour(rank))
        arrow(axes, (54.5, y + 1.9), (63, y + 1.9), colour=rank_colour(rank))
        for i, value in enumerate(("0.2", "NaN", "0.25")):
            strength = 0.9 if value == "NaN" else 0.2
            cell(axes, 64 + 6 * i, y, value, rank, width=6, height=3.8, strength=strength)
    write(axes, 31, 28.4, "look here", size=10, weight="bold", ha="right")
    write(axes, 64, 28.4, "too late", size=10, weight="bold", ha="left")
    return figure


def save():
    figure, axes = card(96, 36, "all shards, then the manifest, then one rename")
    box(axes, 30, 7, 27, 24, "", face=GROUND, edge=EDGE, dotted=True)
    write(axes, 43.5, 9, "step-0006.partial", weight="bold")
    for rank in range(4):
        y = 11 + 4.2 * rank
        rank_box(axes, rank, 2, y, width=9, height=3.6)
        arrow(axes, (11.5, y + 1.8), (31.5, y + 1.8), colour=rank_colour(rank))
        cell(axes, 32, y, f"rank-{rank}.safetensors", rank, width=23, height=3.6, size=10)
    write(axes, 21, 9, "1. write, sync, sha256", size=10)
    box(axes, 32, 27.6, 23, 2.8, "manifest.json", size=10)
    write(axes, 28.6, 30.6, "3. rank 0, when all have told", size=10, ha="right")
    write(axes, 28.6, 28.2, "2. all tell size and sum", size=10, ha="right")
    arrow(axes, (57.5, 19), (67.5, 19))
    write(axes, 62.5, 16.6, "4. rename", size=10)
    box(axes, 68, 7, 26, 24, "", face=GROUND)
    write(axes, 81, 9, "step-0006", weight="bold")
    for rank in range(4):
        cell(axes, 69.5, 11 + 4.2 * rank, f"rank-{rank}.safetensors", rank, width=23, height=3.6, size=10)
    box(axes, 69.5, 27.6, 23, 2.8, "manifest.json", size=10)
    write(axes, 43.5, 33.6, "killed before: nobody reads this", size=10, colour=QUIET)
    write(axes, 81, 33.6, "killed after: whole", size=10, colour=QUIET)
    return figure


def reshard():
    figure, axes = card(92, 30, "one row of 12 numbers, three ways to cut it")
    left, unit = 20, 5.6
    for y, n, what in ((6, 4, "saved by 4 ranks"), (14, 2, "loaded by 2, saved"), (22, 3, "loaded by 3")):
        write(axes, 2, y + 2, what, ha="left", weight="bold", size=10)
        length = 12 // n
        for rank in range(n):
            x = left + unit * length * rank
            cell(axes, x, y, f"rank {rank}", rank, width=unit * length, height=4)
    from matplotlib.lines import Line2D

    for cuts, y in (((3, 6, 9), 10), ((6,), 18)):
        for cut in cuts:
            axes.add_line(Line2D([left + unit * cut] * 2, [y, y + 4], color=EDGE, lw=1.2, ls=":", zorder=1))
    for rank in range(2):
        for part in range(2):
            x = left + unit * (6 * rank + 3 * part + 1.5)
            arrow(axes, (x, 10.2), (x, 13.8), colour=rank_colour(2 * rank + part))
    for x, rank in ((2, 0), (5, 0), (7, 1), (10, 1)):
        arrow(axes, (left + unit * x, 18.2), (left + unit * x, 21.8), colour=rank_colour(rank))
    write(
        axes,
        left,
        28.3,
        "each reader takes the pieces that overlap with its own part",
        ha="left",
        size=10,
        colour=QUIET,
    )
    return figure


def restart():
    figure, axes = card(96, 39, "a run of three lives")
    left, unit = 11, 3.3
    lives = [("life 1", 0, 8), ("life 2", 6, 14), ("life 3", 14, 24)]  # steps first + 1 to last

    def at(step):
        return left + unit * step

    for i, (name, first, last) in enumerate(lives):
        y = 7 + 9.5 * i
        write(axes, 2, y + 2, name, ha="left", weight="bold")
        for step in range(first, last):
            repeated = i == 1 and step < 8
            box(axes, at(step), y, unit, 4, str(step + 1), face=FAINT if repeated else GROUND, size=10)
    for step, i, ha in ((6, 0, "center"), (12, 1, "center"), (14, 1, "left"), (18, 2, "center"), (24, 2, "center")):
        y = 7 + 9.5 * i
        axes.plot([at(step)] * 2, [y - 1, y + 5], color=INK, lw=2.5, zorder=4)
        write(axes, at(step) - (0.8 if ha == "left" else 0), y + 6.3, f"save {step}", size=10, weight="bold", ha=ha)
    write(axes, at(8) + 1, 9, "kill -9", ha="left", size=11, weight="bold")
    write(axes, at(14) + 1.4, 18.5, "SIGTERM: save, leave", ha="left", size=11, weight="bold")
    arrow(axes, (at(6), 14.4), (at(6), 16.2))
    arrow(axes, (at(14) + 1, 23.9), (at(14) + 1, 25.7))
    write(axes, at(7), 22.8, "repeated", size=10)
    write(
        axes,
        left,
        36,
        "steps; what was made after the last save is made again, with the same numbers",
        ha="left",
        size=10,
        colour=QUIET,
    )
    return figure


def preemption():
    figure, axes = card(96, 31, "two minutes' notice")
    arrow(axes, (6, 22), (92, 22))
    for x, label in ((14, "-120 s"), (86, "0 s")):
        axes.plot([x, x], [21.2, 22.8], color=INK, lw=1.5, zorder=4)
        write(axes, x, 24.6, label, size=10)
    box(axes, 2, 7, 12, 4.5, "scheduler", face=GREY)
    write(axes, 8, 13, "USR1 or TERM", size=10)
    write(axes, 24.5, 13, "or its own clock", size=10)
    arrow(axes, (14.5, 9.2), (18.5, 9.2))
    box(axes, 19, 7, 11, 4.5, "job script", face=GREY)
    arrow(axes, (30.5, 9.2), (34.5, 9.2))
    box(axes, 35, 7, 10, 4.5, "torchrun", face=GREY)
    arrow(axes, (45.5, 9.2), (49.5, 9.2))
    for rank in range(2):
        y = 5.6 + 4 * rank
        rank_box(axes, rank, 50, y, width=8, height=3.4)
        cell(axes, 59, y, "finish the step, agree, save", rank, width=28, height=3.4, size=10)
    arrow(axes, (72, 13.4), (72, 15.2))
    box(axes, 62, 15.4, 20, 3.6, "requeue.json", size=10)
    arrow(axes, (61.5, 17.2), (27, 17.2), bend=0)
    write(axes, 44, 15.6, "all have left", size=10)
    write(axes, 26, 17.2, "back into the queue", weight="bold", size=10, ha="right")
    write(axes, 86, 19.6, "kill -9", size=10, weight="bold")
    write(
        axes,
        6,
        28.4,
        "PBS sends no warning: there the job script's clock gives it; "
        "torchrun waits 30 s for its ranks, unless told otherwise",
        ha="left",
        size=10,
        colour=QUIET,
    )
    return figure


FIGURES = {
    "11_missing_call": missing_call,
    "11_straggler": straggler,
    "11_nan": nan,
    "11_save": save,
    "11_reshard": reshard,
    "11_restart": restart,
    "11_preemption": preemption,
}
