"""Figures of lesson 15: what compute nodes lack, the domains of a node, the rows of a sweep."""

from draw import arrow
from manyhands.plots.looks import EDGE, GREY, GROUND, INK, PAPER, QUIET, box, card, of_rank, rank_box, tint, write


def _area(axes, x, y, width, height, **look):
    """A ground on which ranks and boxes stand."""
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), width, height, **{"fc": GROUND, "ec": INK, "lw": 1.2, "zorder": 0.5} | look))


def _offline():
    figure, axes = card(92, 46, "everything is there before the job starts")
    box(axes, 2, 12, 14, 8, "the internet", face=PAPER, edge=QUIET, dotted=True)
    box(axes, 24, 7, 19, 18, face=GROUND)
    write(axes, 33.5, 9.6, "login node", weight="bold")
    write(axes, 33.5, 16.6, "make kernel,\nprepare_data.py,\napptainer build")
    arrow(axes, (16, 16), (24, 16))
    write(axes, 20, 13.6, "packages,\ndata", colour=QUIET)
    for node in range(2):
        top = 6 + 13 * node
        _area(axes, 62, top, 28, 11.4)
        write(axes, 76, top + 1.8, f"compute node {node + 1}: no internet", weight="bold")
        for local in range(2):
            rank_box(axes, 2 * node + local, 63, top + 4 + 3.6 * local, 9, 3.2)
        box(axes, 77, top + 4.2, 11.6, 6.2, "own disk:\na copy", face=PAPER)
        arrow(axes, (76.8, top + 7.4), (72.4, top + 7.4), colour=QUIET)
    write(axes, 76, 32.2, "local rank 0 copies for its node", colour=QUIET)
    box(axes, 2, 36.5, 88, 7, face=GREY)
    write(axes, 46, 38.6, "shared file system", weight="bold")
    write(axes, 46, 41.4, ".venv or manyhands.sif, the corpus, jobs/, outputs/")
    arrow(axes, (33.5, 25), (33.5, 36.2))
    arrow(axes, (58.5, 36.2), (58.5, 12), style="-")
    for y in (12, 25):
        arrow(axes, (58.5, y), (62, y))
    return figure


def _affinity():
    figure, axes = card(92, 40, "a node of Polaris: 4 domains of 8 cores")
    for domain in range(4):
        x, gpu = 2 + 22.4 * domain, 3 - domain
        _area(axes, x, 6, 21, 24, ec=EDGE, ls=":")
        write(axes, x + 10.5, 8.2, f"domain {domain}", weight="bold")
        for core in range(8):
            patch = of_rank(gpu)
            box(axes, x + 1.2 + 2.35 * core, 11, 2.1, 3.4, face=tint(patch["fc"], 0.3))
        write(axes, x + 10.5, 16.4, f"cores {8 * domain} to {8 * domain + 7}", colour=QUIET)
        rank_box(axes, gpu, x + 2, 18.6, 17, 4, f"GPU {gpu}, rank {gpu}")
        if domain in (0, 2):
            box(axes, x + 4, 24.6, 13, 3.6, f"network card {domain // 2}")
    rank_box(axes, 0, 2, 32.5, 21, 4.4, "rank 0 on cores 0 to 7")
    arrow(axes, (23.2, 34.7), (88, 34.7), style="-")
    arrow(axes, (88, 34.7), (88, 22.8))
    write(axes, 55, 36.8, "the mistake: bound in order, each rank is far from its GPU", colour=INK)
    return figure


def _sweep():
    figure, axes = card(92, 40, "an array of six tasks, a table of six rows")
    for title, x0, first in (("off by one", 4, 1), ("counted from one", 50, 0)):
        write(axes, x0, 6.8, title, ha="left", weight="bold")
        for i in range(6):
            y = 9.6 + 4.6 * i
            taken = i >= first
            box(axes, x0, y, 12, 3.6, f"task {i + 1}", face=GROUND)
            box(axes, x0 + 26, y, 12, 3.6, f"row {i + 1}", face=GREY if taken else PAPER, dotted=not taken)
            if i + first < 6:
                arrow(axes, (x0 + 12.2, y + 1.8), (x0 + 25.8, y + 1.8 + 4.6 * first))
        if first:
            write(axes, x0 + 13, 9.6 + 4.6 * 5 + 1.8, "?", size=12, weight="bold")
    write(axes, 4, 38, "row 1 is never trained; task 6 trains with the defaults", ha="left", colour=QUIET)
    return figure


FIGURES = {"15_offline": _offline, "15_affinity": _affinity, "15_sweep": _sweep}
