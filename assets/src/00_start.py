"""Figures of lesson 00: processes, nodes, launchers, clocks."""

from draw import arrow, cell
from manyhands.plots.looks import EDGE, GROUND, INK, PAPER, QUIET, box, card, rank_box, rank_colour, tint, write


def _place(axes, x, y, width, height, text="", colour=INK, fill=GROUND, **kwargs):
    """A plain rounded box with a text in its middle: a program, a file, a node."""
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=0.8"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, fc=fill, ec=colour, lw=1.4, zorder=1))
    write(axes, x + width / 2, y + height / 2, text, **kwargs)


def _spmd():
    figure, axes = card(72, 31, "One program, four processes")
    _place(axes, 3, 11, 13, 10, "00_start.py", weight="bold")
    write(axes, 9.5, 23, "one file", colour=QUIET)
    for rank in range(4):
        y = 5 + 6 * rank
        rank_box(axes, rank, 27, y, 9, 4.4)
        arrow(axes, (16.3, 16), (26.6, y + 2.2), colour=rank_colour(rank))
        cell(axes, 39, y + 0.7, f"x = {rank + 1}", rank=rank, width=9, height=3)
        write(axes, 50, y + 2.2, f"its own memory, pid {4711 + rank}", colour=QUIET, ha="left")
    return figure


def _nodes():
    figure, axes = card(78, 33, "Two nodes of four ranks: a world of eight")
    for node in range(2):
        left = 2.5 + 37 * node
        _place(axes, left, 5, 36, 22, fill=GROUND, colour=EDGE)
        write(axes, left + 18, 7.2, f"node {node}", weight="bold")
        for local in range(4):
            rank, x = 4 * node + local, left + 1.2 + 8.6 * local
            rank_box(axes, rank, x, 9.5, 7.8, 6, label=f"rank {rank}")
            write(axes, x + 3.9, 19, f"local\nrank {local}")
            write(axes, x + 3.9, 24, f"GPU {local}", colour=QUIET)
    write(axes, 39, 30, "rank: once in the world.   local rank: once on its node, it picks the GPU.")
    return figure


def _launchers():
    figure, axes = card(82, 32, "From a launcher to a group")
    for row, (name, variables) in enumerate([("torchrun", "RANK"), ("mpiexec", "PMI_RANK"), ("srun", "SLURM_PROCID")]):
        y = 8 + 7.5 * row
        _place(axes, 2.5, y, 11, 5, name, weight="bold")
        arrow(axes, (13.7, y + 2.5), (18.4, y + 2.5))
        _place(axes, 18.6, y, 21.5, 5, variables, fill=PAPER, family="monospace")
        arrow(axes, (40.3, y + 2.5), (46.8, 16.5 + 1.5 * row))
    _place(axes, 47, 15, 9.5, 6, "join()", fill=PAPER, weight="bold", family="monospace")
    arrow(axes, (56.7, 18), (61.4, 18))
    for rank, (x, y) in enumerate([(62.5, 11), (71.5, 11), (62.5, 20), (71.5, 20)]):
        rank_box(axes, rank, x, y, 7.6, 5)
    write(axes, 70.8, 28.2, "one group of four")
    write(axes, 8, 5.8, "starts processes", colour=QUIET)
    write(axes, 29.3, 5.8, "tells each who it is", colour=QUIET)
    write(axes, 51.7, 23.5, "reads it", colour=QUIET)
    return figure


def _worlds():
    figure, axes = card(72, 24, "Four processes are not yet a world of four")
    write(axes, 18, 6, "one world of four", weight="bold")
    _place(axes, 3, 8, 30, 8, fill=PAPER, colour=EDGE)
    for rank in range(4):
        rank_box(axes, rank, 4.2 + 7.1 * rank, 9.5, 6.4, 5, label=f"{rank} of 4")
    write(axes, 18, 19, "an all-reduce of ones gives 4")
    write(axes, 53.5, 6, "four worlds of one", weight="bold")
    for rank in range(4):
        x = 38 + 7.9 * rank
        _place(axes, x, 8, 7.4, 8, fill=PAPER, colour=EDGE)
        rank_box(axes, 0, x + 0.5, 9.5, 6.4, 5, label="0 of 1")
    write(axes, 53.5, 19, "it gives 1, and nobody complains")
    return figure


def _pen():
    figure, axes = card(66, 20, "Pass the pen")
    for rank in range(4):
        x = 4 + 16 * rank
        rank_box(axes, rank, x, 5.5, 9, 4.5)
        if rank < 3:
            arrow(axes, (x + 9.2, 7.7), (x + 15.8, 7.7), colour=rank_colour(rank))
            write(axes, x + 12.3, 6, "send")
        arrow(axes, (x + 4.5, 10.2), (x + 4.5, 13.2), colour=rank_colour(rank))
        cell(axes, x, 13.4, f"line {rank}", rank=rank, width=9, height=3)
    write(axes, 33, 18.3, "write your line, then hand the pen on: n - 1 messages", colour=QUIET)
    return figure


STEP_MS, READ_MS = 284, 17  # of the published transcript that the lesson links to


def _clock():
    figure, axes = card(80, 28, "A clock that is read too early (to scale)")
    left, per_ms, mine = 14, 0.215, rank_colour(0)

    def at(ms):
        return left + per_ms * ms

    write(axes, left - 1, 11.5, "your Python", ha="right")
    write(axes, left - 1, 17.5, "the device", ha="right")
    box(axes, left, 10, per_ms * READ_MS, 3, face=mine)
    box(axes, at(READ_MS), 10, per_ms * (STEP_MS - READ_MS), 3, "waits for a number", edge=EDGE, dotted=True)
    box(axes, left, 16, per_ms * STEP_MS, 3, face=tint(mine, 0.3))
    write(axes, at(STEP_MS / 2), 17.5, "forward, backward, update")
    for ms, top, bottom in ((READ_MS, 7, 20.5), (STEP_MS, 8.5, 20.5)):
        axes.plot([at(ms), at(ms)], [top, bottom], color=INK, lw=1.2, ls="--", zorder=3)
        write(axes, at(ms), 22, f"{ms} ms")
    write(axes, left, 22, "0")
    write(axes, at(READ_MS) + 0.8, 7, "read here: all is queued, little is done", ha="left")
    write(axes, at(STEP_MS), 7, "synchronise, then read", ha="right", weight="bold")
    arrow(axes, (left, 25.2), (at(STEP_MS), 25.2), colour=QUIET)
    write(axes, left - 1, 25.2, "time", ha="right", colour=QUIET)
    return figure


def _threads():
    figure, axes = card(76, 27, "Four ranks on two cores")
    for column, threads in enumerate([1, 2]):
        left = 2.5 + 37 * column
        write(axes, left + 17, 6, f"{threads} thread{'s' * (threads > 1)} per rank", weight="bold")
        for rank in range(4):
            width = 7.4 / threads
            for thread in range(threads):
                x = left + 1 + 8.3 * rank + width * thread
                box(axes, x, 8.5, width, 4, str(rank), face=tint(rank_colour(rank), 0.3))
        for core in range(2):
            _place(axes, left + 4 + 14 * core, 17.5, 11, 4, f"core {core}")
            arrow(axes, (left + 9.5 + 14 * core, 13), (left + 9.5 + 14 * core, 17.2), colour=QUIET)
    write(axes, 19.5, 24.3, "2 run, 2 wait for their turn")
    write(axes, 56.5, 24.3, "2 run, 6 wait: even for their own half")
    return figure


FIGURES = {
    "00_spmd": _spmd,
    "00_nodes": _nodes,
    "00_launchers": _launchers,
    "00_worlds": _worlds,
    "00_pen": _pen,
    "00_clock": _clock,
    "00_threads": _threads,
}
