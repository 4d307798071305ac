"""Figures of lesson 00: processes, nodes, launchers, clocks."""

from manyhands.figures import Drawing, arrow, card, cell, rank_box, write
from manyhands.figures.looks import EDGE, GROUND, INK, PAPER, QUIET, rank_colour, tint


def _box(axes, x, y, width, height, text="", colour=INK, fill=GROUND, size=10, **kwargs):
    """A plain rounded box with a text in its middle: a program, a file, a node."""
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=0.8"
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle=style, fc=fill, ec=colour, lw=1.4, zorder=1)
    )
    write(axes, x + width / 2, y + height / 2, text, size=size, **kwargs)


def _bar(axes, x, y, width, height, colour, text="", hatch=None, strength=0.3, size=9, ec=None):
    """A stretch of time."""
    from matplotlib.patches import Rectangle

    face = tint(colour, strength)
    axes.add_patch(Rectangle((x, y), width, height, fc=face, ec=ec or colour, lw=1.2, hatch=hatch, zorder=2))
    if text:
        ground = {"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none"} if hatch else None
        write(axes, x + width / 2, y + height / 2, text, size=size, bbox=ground)


def _spmd():
    figure, axes = card(70, 31, "One program, four processes")
    _box(axes, 3, 11, 13, 10, "00_start.py", weight="bold")
    write(axes, 9.5, 23, "one file", size=9, colour=QUIET)
    for rank in range(4):
        y = 5 + 6 * rank
        rank_box(axes, rank, 27, y, 9, 4.4)
        arrow(axes, (16.3, 16), (26.6, y + 2.2), colour=rank_colour(rank))
        cell(axes, 39, y + 0.7, f"x = {rank + 1}", rank=rank, width=9, height=3)
        write(axes, 50, y + 2.2, f"its own memory, pid {4711 + rank}", size=9, colour=QUIET, ha="left")
    return figure


def _nodes():
    figure, axes = card(72, 29, "Two nodes of four ranks: a world of eight")
    for node in range(2):
        left = 3 + 34 * node
        _box(axes, left, 5, 32, 18.5, fill=GROUND, colour=EDGE)
        write(axes, left + 16, 7, f"node {node}", weight="bold")
        for local in range(4):
            rank = 4 * node + local
            x = left + 1.5 + 7.5 * local
            rank_box(axes, rank, x, 9, 6.5, 7, label=f"rank\n{rank}")
            write(axes, x + 3.25, 18, f"local rank {local}", size=7.5)
            write(axes, x + 3.25, 20.6, f"GPU {local}", size=8, colour=QUIET)
    write(
        axes, 36, 26, "rank: once in the world.   local rank: once on its node, it picks the GPU.", size=9.5
    )
    return figure


def _launchers():
    figure, axes = card(74, 31, "From a launcher to a group")
    for row, (name, variables) in enumerate(
        [("torchrun", "RANK  WORLD_SIZE"), ("mpiexec", "PMI_RANK  PMI_SIZE"), ("srun", "SLURM_PROCID  ...")]
    ):
        y = 6.5 + 7.5 * row
        _box(axes, 3, y, 10, 5, name, weight="bold")
        arrow(axes, (13.2, y + 2.5), (18.8, y + 2.5))
        _box(axes, 19, y, 19, 5, variables, fill=PAPER, size=8.5, family="monospace")
        arrow(axes, (38.2, y + 2.5), (43.8, 16.5 - 1.5 + 1.5 * row))
    _box(axes, 44, 13.5, 8.5, 6, "join()", fill=PAPER, weight="bold", family="monospace")
    arrow(axes, (52.7, 16.5), (56.6, 16.5))
    for rank, (x, y) in enumerate([(57.5, 9), (65, 9), (57.5, 18), (65, 18)]):
        rank_box(axes, rank, x, y, 6, 5, label=str(rank))
    write(axes, 64.2, 26.5, "one group of four", size=9)
    write(axes, 8, 29, "starts processes", size=9, colour=QUIET)
    write(axes, 28.5, 29, "tells each who it is", size=9, colour=QUIET)
    write(axes, 48.2, 22, "reads it", size=9, colour=QUIET)
    return figure


def _worlds():
    figure, axes = card(70, 24, "Four processes are not yet a world of four")
    write(axes, 17, 6, "one world of four", weight="bold")
    _box(axes, 3, 8, 29, 8, fill=PAPER, colour=EDGE)
    for rank in range(4):
        rank_box(axes, rank, 4.2 + 6.9 * rank, 9.5, 6, 5, label=f"{rank} of 4")
    write(axes, 17, 19, "an all-reduce of 1 gives 4", size=9.5)
    write(axes, 52, 6, "four worlds of one", weight="bold")
    for rank in range(4):
        x = 37 + 7.6 * rank
        _box(axes, x, 8, 7.1, 8, fill=PAPER, colour=EDGE)
        rank_box(axes, 0, x + 0.55, 9.5, 6, 5, label="0 of 1")
    write(axes, 52, 19, "an all-reduce of 1 gives 1; nobody complains", size=9.5)
    return figure


def _pen():
    figure, axes = card(66, 20, "Pass the pen")
    for rank in range(4):
        x = 4 + 16 * rank
        rank_box(axes, rank, x, 5.5, 9, 4.5)
        if rank < 3:
            arrow(axes, (x + 9.2, 7.7), (x + 15.8, 7.7), "send", colour=rank_colour(rank))
        arrow(axes, (x + 4.5, 10.2), (x + 4.5, 13.2), colour=rank_colour(rank))
        cell(axes, x, 13.4, f"line {rank}", rank=rank, width=9, height=3)
    write(
        axes,
        33,
        18.3,
        "write your line, then hand the pen to the next rank: n - 1 messages",
        size=9,
        colour=QUIET,
    )
    return figure


def _clock():
    figure, axes = card(72, 26, "A clock that stops too early")
    host, device = rank_colour(0), rank_colour(1)
    write(axes, 10, 9, "your Python", ha="right", size=9.5)
    write(axes, 10, 15.5, "the device", ha="right", size=9.5)
    for k, name in enumerate(["forward", "backward"]):
        _bar(axes, 11 + 3.2 * k, 7.5, 3, 3, host)
        _bar(axes, 11.5 + 24 * k, 14, 23.5, 3, device, name)
        arrow(axes, (12.5 + 3.2 * k, 10.6), (12.5 + 23 * k + 0.2, 13.9), colour=QUIET)
    axes.plot([17.6, 17.6], [6, 19], color=INK, lw=1.2, ls="--", zorder=3)
    write(axes, 18.4, 6.6, "clock read here: 17 ms, the work is only queued", ha="left", size=9)
    axes.plot([59.2, 59.2], [12, 19], color=INK, lw=1.2, ls="--", zorder=3)
    write(
        axes, 59, 20.7, "synchronise, then read: most of the 284 ms step", ha="right", size=9, weight="bold"
    )
    arrow(axes, (11, 23.5), (64, 23.5), colour=QUIET)
    write(axes, 66.5, 23.5, "time", size=9, colour=QUIET)
    return figure


def _threads():
    figure, axes = card(70, 27, "Four ranks on two cores")
    for column, (title, threads) in enumerate([("1 thread per rank", 1), ("2 threads per rank", 2)]):
        left = 3 + 33 * column
        write(axes, left + 15.5, 6, title, weight="bold")
        for rank in range(4):
            for thread in range(threads):
                width = 6.4 if threads == 1 else 3.1
                x = left + 1 + 7.5 * rank + 3.3 * thread
                hatch = "...." if thread else None
                _bar(axes, x, 8.5, width, 4, rank_colour(rank), hatch=hatch)
                if not thread:
                    write(axes, x + width / 2, 10.5, str(rank), weight="bold")
        for core in range(2):
            _box(axes, left + 4 + 12.5 * core, 17.5, 10, 4, f"core {core}", size=9)
            arrow(axes, (left + 9 + 12.5 * core, 13), (left + 9 + 12.5 * core, 17.2), colour=QUIET)
    write(axes, 18.5, 24.3, "2 run, 2 wait for their turn", size=9.5)
    write(axes, 51.5, 24.3, "2 run, 6 wait: even for their own half", size=9.5)
    return figure


FIGURES = {
    "00_spmd": Drawing(
        _spmd,
        "one file, 00_start.py, is started as four processes; each has its own memory and its own value of x",
    ),
    "00_nodes": Drawing(
        _nodes,
        "two nodes with four ranks each: ranks 0 to 7 in the world, local ranks 0 to 3 on each node, one GPU each",
    ),
    "00_launchers": Drawing(
        _launchers,
        "torchrun, mpiexec and srun each start processes and set their own variables; join() reads them and makes one group",
    ),
    "00_worlds": Drawing(
        _worlds,
        "one world of four ranks, and beside it four processes that are each rank 0 of a world of one",
    ),
    "00_pen": Drawing(
        _pen, "ranks 0 to 3 write their line one after the other; each sends the pen to the next when done"
    ),
    "00_clock": Drawing(
        _clock,
        "Python has queued forward and backward after 17 ms, the device needs most of a 284 ms step: synchronise, then read the clock",
    ),
    "00_threads": Drawing(
        _threads,
        "four ranks on two cores: with one thread each two wait for a core, with two threads each six wait",
    ),
}
