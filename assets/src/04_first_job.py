"""Figures of lesson 04: a cluster, a terminal, a job file, a job's life, and a queue with and without overtaking."""

from draw import arrow
from manyhands.plots.looks import ACTIVITIES, FAINT, GREY, GROUND, INK, PAPER, QUIET, card, rank_box, write

MONO = {"family": "monospace"}


def _box(axes, x, y, width, height, text="", fill=GROUND, edge=QUIET, **kwargs):
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=0.6"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, fc=fill, ec=edge, lw=1.3, zorder=1))
    if text:
        write(axes, x + width / 2, y + height / 2, text, **kwargs)


def _cluster():
    figure, axes = card(87, 45, "where a job goes")
    _box(axes, 2, 13, 13, 9, "you:\na browser", PAPER)
    _box(axes, 21, 8, 19, 19, edge=INK)
    write(axes, 30.5, 10.6, "login node", weight="bold")
    write(axes, 30.5, 16.5, "JupyterLab,\nthe terminal")
    write(axes, 30.5, 23.5, "shared by all:\nno training here", colour=QUIET)
    _box(axes, 50, 10, 13, 15, edge=INK)
    write(axes, 56.5, 12.6, "the queue", weight="bold")
    write(axes, 56.5, 18.8, "the scheduler\nsays who\nis next")
    arrow(axes, (15, 17.5), (21, 17.5))
    arrow(axes, (40, 17.5), (50, 17.5))
    write(axes, 44.6, 14.2, "qsub or\nsbatch", **MONO)
    arrow(axes, (63, 17.5), (68, 17.5))
    _box(axes, 68, 3, 17, 29, fill=PAPER, edge=QUIET)
    for node in range(2):
        top = 4.2 + 13.6 * node
        _box(axes, 69.2, top, 14.6, 13, edge=INK)
        write(axes, 76.5, top + 2, f"compute node {node + 1}", weight="bold")
        for local in range(2):
            rank_box(axes, 2 * node + local, 70.2, top + 4 + 4.3 * local, 12.6, 3.7)
    _box(axes, 2, 36, 83, 7.2, edge=INK)
    write(axes, 43.5, 38.2, "file system: every node sees the same files", weight="bold")
    files = "jobs/ \u00a0 scripts/ \u00a0 data/ \u00a0 outputs/ \u00a0 ddp_shakespeare.o4711"
    write(axes, 43.5, 41.2, files, **MONO)
    for x, top in ((30.5, 27), (76.5, 32)):
        arrow(axes, (x, top), (x, 36), style="<|-|>", colour=QUIET)
    return figure


def _terminal():
    figure, axes = card(84, 31, "what a terminal shows")
    _box(axes, 2, 5, 43, 23, fill=INK, edge=INK)
    lines = [
        ("ada@login1:~/many-hands$", "ls jobs/ddp*"),
        (None, "jobs/ddp_shakespeare.pbs"),
        (None, "jobs/ddp_shakespeare.slurm"),
        ("ada@login1:~/many-hands$", "squeue --me"),
        (None, "JOBID  ST  NODELIST(REASON)"),
        (None, "\u00a04711  PD  (Resources)"),
        ("ada@login1:~/many-hands$", "_"),
    ]
    for row, (before, text) in enumerate(lines):
        y = 7.5 + 3 * row
        if before:
            write(axes, 3.5, y, before, colour=FAINT, ha="left", **MONO)
        text = text.replace("  ", "\u00a0 ")  # SVG would join two blanks
        x = 3.5 + (0.85 * len(before) + 1.8 if before else 0)
        write(axes, x, y, text, colour=GROUND, ha="left", **MONO)
    notes = [
        (7.5, "the prompt: who@machine:folder$\nyou type what follows, then Enter"),
        (12, "what the command printed"),
        (16.5, "the next command"),
        (20.8, "its answer: job 4711 waits (PD)"),
        (25.5, "ready for the next one"),
    ]
    for y, note in notes:
        arrow(axes, (48.8, y), (45.8, y), colour=QUIET)
        write(axes, 49.6, y, note, ha="left")
    return figure


def _job_file():
    figure, axes = card(84, 38, "a job file has four parts, and four readers")
    parts = [
        ("#PBS -l select=2:ncpus=2:mpiprocs=1\n#PBS -l walltime=00:10:00", "1  how much, for how long",
         "the scheduler, when you submit;\nto the shell these are comments"),
        ("VENV=...   NPROC_PER_NODE=2\nLESSON_ARGS=...", "2  what you may edit", "you"),
        ('cd "$PBS_O_WORKDIR" || exit 1\n... pairs check 03_data_parallel', "3  guards",
         "the shell on the first node;\nit stops if something is missing"),
        ("python scripts/launch.py --nproc 2\n    scripts/03_data_parallel.py -- ...", "4  the laptop's command",
         "every node: each starts its ranks"),
    ]  # fmt: skip
    for row, (code, name, reader) in enumerate(parts):
        y = 5 + 8 * row
        _box(axes, 2, y, 41, 6.8)
        code = code.replace("  ", "\u00a0 ").replace("\u00a0 \u00a0 ", "\u00a0\u00a0\u00a0 ")
        write(axes, 3.2, y + 3.4, code, ha="left", **MONO)
        arrow(axes, (43.4, y + 3.4), (47, y + 3.4), colour=QUIET)
        write(axes, 48, y + 1.3, name.replace("  ", "\u00a0 "), weight="bold", ha="left")
        write(axes, 48, y + (4.6 if "\n" in reader else 3.8), "read by " + reader, ha="left")
    return figure


def _life():
    figure, axes = card(87, 29, "the life of a job")
    states = [(2, "waiting", "PD", "Q"), (25, "running", "R", "R"), (48, "tidying up", "CG", "E")]
    for x, name, slurm, pbs in states:
        _box(axes, x, 8, 13, 10, fill=GREY if name == "running" else GROUND, edge=INK)
        write(axes, x + 6.5, 10.4, name, weight="bold")
        write(axes, x + 6.5, 14.7, f"Slurm {slurm}\nPBS {pbs}")
    ends = [(4.5, "completed", "CD, exit 0"), (10.5, "failed", "F, exit not 0"), (16.5, "over time", "TO")]
    for y, name, how in ends:
        _box(axes, 69, y, 15.5, 5, fill=PAPER)
        write(axes, 76.75, y + 1.5, name, weight="bold")
        write(axes, 76.75, y + 3.6, how, colour=QUIET)
        arrow(axes, (61, 13), (69, y + 2.5))
    write(axes, 76.75, 24.2, "(PBS: F, with\nan Exit_status)", colour=QUIET)
    arrow(axes, (15, 13), (25, 13))
    arrow(axes, (38, 13), (48, 13))
    write(axes, 19.8, 10.2, "nodes\nare free")
    _box(axes, 25, 22.5, 13, 4, "cancelled", PAPER, weight="bold")
    arrow(axes, (8.5, 18), (25, 24.5), bend=0.2)
    arrow(axes, (31.5, 18), (31.5, 22.5))
    write(axes, 32.5, 20.3, "scancel or qdel", ha="left", **MONO)
    return figure


def _queue_panel(axes, x, title, bars, idle):
    """Two nodes over twelve minutes; bars are (job, first node, nodes, start, end), idle is (node, start, end)."""
    from matplotlib.patches import Rectangle

    unit, top = 2.6, 10
    write(axes, x, 6.6, title, ha="left", weight="bold")
    for node in range(2):
        write(axes, x - 0.6, top + 3 + 6 * node, f"node {node + 1}", ha="right")
    for job, node, nodes, start, end in bars:  # grey: colours belong to ranks
        place, width = (x + unit * start, top + 6 * node), unit * (end - start)
        face, edge = (GREY, INK) if nodes > 1 else (GROUND, QUIET)
        axes.add_patch(Rectangle(place, width, 6 * nodes - 0.4, fc=face, ec=edge, lw=1.5, zorder=2))
        write(axes, place[0] + width / 2, place[1] + 3 * nodes, job, weight="bold")
    node, start, end = idle
    place, width = (x + unit * start, top + 6 * node), unit * (end - start)
    axes.add_patch(Rectangle(place, width, 5.6, lw=1.5, **ACTIVITIES["waiting"]))
    if end - start > 3:
        write(axes, place[0] + width / 2, place[1] + 3, "idle", colour=QUIET)
    for minute in range(0, 13, 3):
        write(axes, x + unit * minute, top + 13.4, str(minute), colour=QUIET)
    write(axes, x + unit * 6, top + 16, "minutes", colour=QUIET)


def _overtaking():
    figure, axes = card(87, 29, "two nodes, four jobs: B asks for both")
    _queue_panel(
        axes, 9, "in order of submission",
        [("A", 0, 1, 0, 6), ("B", 0, 2, 6, 9), ("C", 0, 1, 9, 11), ("D", 1, 1, 9, 12)], (1, 0, 6),
    )  # fmt: skip
    _queue_panel(
        axes, 52, "small jobs fill the gap",
        [("A", 0, 1, 0, 6), ("B", 0, 2, 6, 9), ("C", 1, 1, 0, 2), ("D", 1, 1, 2, 5)], (1, 5, 6),
    )  # fmt: skip
    return figure


FIGURES = {
    "04_cluster": _cluster,
    "04_terminal": _terminal,
    "04_job_file": _job_file,
    "04_life_of_a_job": _life,
    "04_overtaking": _overtaking,
}
