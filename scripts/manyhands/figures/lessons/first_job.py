"""Figures of lesson 04: a cluster, a terminal, a job file, a job's life, and a queue with and without overtaking."""

from manyhands.figures import Drawing, arrow, card, rank_box, write
from manyhands.figures.looks import FAINT, GROUND, INK, PAPER, QUIET, rank_colour, tint


def _box(axes, x, y, width, height, text="", fill=GROUND, edge=QUIET, size=10, **kwargs):
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=0.6"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, fc=fill, ec=edge, lw=1.3, zorder=1))
    if text:
        write(axes, x + width / 2, y + height / 2, text, size=size, **kwargs)


def _cluster():
    figure, axes = card(76, 41, "where a job goes")
    _box(axes, 2, 8, 13, 9, "you:\na browser", PAPER)
    _box(axes, 21, 5, 17, 15, edge=INK)
    write(axes, 29.5, 7, "login node", weight="bold")
    write(axes, 29.5, 11.5, "JupyterLab,\nthe terminal")
    write(axes, 29.5, 17.3, "shared: no training here", size=8, colour=QUIET)
    arrow(axes, (15, 12.5), (21, 12.5))
    _box(
        axes,
        44,
        8,
        11,
        9,
        "the queue\n\nthe scheduler\npicks",
        tint(rank_colour(5), 0.15),
        rank_colour(5),
        size=9,
    )
    arrow(axes, (38, 12.5), (44, 12.5), bend=0)
    write(axes, 41, 6, "qsub or\nsbatch", size=9, family="monospace")
    for node in range(2):
        top = 3 + 13 * node
        _box(axes, 60, top, 14, 11.5, edge=INK)
        write(axes, 67, top + 1.7, f"compute node {node + 1}", size=9, weight="bold")
        for local in range(2):
            rank_box(axes, 2 * node + local, 61, top + 3.2 + 4 * local, 12, 3.3)
        arrow(axes, (55, 12.5), (60, top + 5.7))
    _box(axes, 2, 31, 72, 7.5, fill=tint(rank_colour(2), 0.15), edge=rank_colour(2))
    write(axes, 38, 33.2, "file system: every node sees the same files", weight="bold")
    write(
        axes,
        38,
        36.3,
        "jobs/ \u00a0 scripts/ \u00a0 data/ \u00a0 outputs/ \u00a0 ddp_shakespeare.o4711",
        size=9,
        family="monospace",
    )
    for x, top in ((29.5, 20), (67, 27.5)):
        arrow(axes, (x, top), (x, 31), style="<|-|>", colour=rank_colour(2))
    return figure


def _terminal():
    figure, axes = card(76, 31, "what a terminal shows")
    _box(axes, 2, 5, 39, 23, fill=INK, edge=INK)
    white, prompt = GROUND, FAINT
    lines = [
        ("ada@login1:~/many-hands$", " ls jobs"),
        (None, "ddp_shakespeare.pbs  README.md"),
        (None, "ddp_shakespeare.slurm  sites"),
        ("ada@login1:~/many-hands$", " squeue --me"),
        (None, "JOBID  ST  NODELIST(REASON)"),
        (None, " 4711  PD  (Resources)"),
        ("ada@login1:~/many-hands$", " _"),
    ]
    mono = {"family": "monospace", "ha": "left", "size": 9}
    for row, (before, text) in enumerate(lines):
        y = 7.5 + 3 * row
        if before:
            write(axes, 3.5, y, before, colour=prompt, **mono)
        text = text.replace("  ", "\u00a0 ")  # SVG would join two blanks
        write(axes, 3.5 + (0.77 * len(before) if before else 0), y, text, colour=white, **mono)
    notes = [
        (7.5, "the prompt: who@machine:folder$\nyou type what follows, then Enter"),
        (12, "what the command printed"),
        (16.5, "the next command"),
        (20.8, "its answer: job 4711 waits (PD)"),
        (25.5, "ready for the next one"),
    ]
    for y, note in notes:
        arrow(axes, (44.5, y), (41.6, y), colour=QUIET)
        write(axes, 45.2, y, note, size=9, ha="left")
    return figure


def _job_file():
    figure, axes = card(76, 38, "a job file has four parts, and four readers")
    parts = [
        (5, "#PBS -l select=2:ncpus=2:mpiprocs=1\n#PBS -l walltime=00:10:00", "how much, for how long",
         "the scheduler, when you submit;\nto the shell these are comments", 5),
        (13, "VENV=...   NPROC_PER_NODE=2\nLESSON_ARGS=...", "what you may edit",
         "you", 0),
        (21, 'cd "$PBS_O_WORKDIR" || exit 1\n... pairs check 03_data_parallel', "guards",
         "the shell on the first node;\nit stops if something is missing", 2),
        (29, "python scripts/launch.py --nproc 2\n    scripts/03_data_parallel.py -- ...", "the laptop's command",
         "every node: each starts its ranks", 3),
    ]  # fmt: skip
    for y, code, name, reader, colour in parts:
        _box(axes, 2, y, 41, 6.6, fill=tint(rank_colour(colour), 0.14), edge=rank_colour(colour))
        write(axes, 3.2, y + 3.4, code.replace("  ", "\u00a0 "), size=9, ha="left", family="monospace")
        arrow(axes, (43.4, y + 3.3), (47, y + 3.3), colour=rank_colour(colour))
        write(axes, 48, y + 1.6, name, weight="bold", ha="left")
        write(axes, 48, y + 4.5, "read by " + reader, size=9, ha="left")
    return figure


def _life():
    figure, axes = card(76, 26, "the life of a job")
    states = [(2, "waiting", "PD", "Q", 5), (22, "running", "R", "R", 0), (42, "tidying up", "CG", "E", 4)]
    for x, name, slurm, pbs, colour in states:
        _box(axes, x, 7, 13, 9, fill=tint(rank_colour(colour), 0.18), edge=rank_colour(colour))
        write(axes, x + 6.5, 9.6, name, weight="bold")
        write(axes, x + 6.5, 13.2, f"Slurm {slurm}\nPBS {pbs}", size=9)
    ends = [
        (4.5, "completed", "Slurm CD"),
        (10, "failed", "Slurm F, exit not 0"),
        (15.5, "over time", "Slurm TO"),
    ]
    for y, name, how in ends:
        _box(axes, 61, y, 13.5, 4.6, fill=PAPER)
        write(axes, 67.75, y + 1.5, name, weight="bold", size=9)
        write(axes, 67.75, y + 3.3, how, size=8, colour=QUIET)
        arrow(axes, (55, 11.5), (61, y + 2.3))
    arrow(axes, (15, 11.5), (22, 11.5))
    arrow(axes, (35, 11.5), (42, 11.5))
    write(axes, 18.5, 9.6, "nodes\nare free", size=8)
    _box(axes, 22, 20.3, 13, 3.6, "cancelled", PAPER, size=9, weight="bold")
    arrow(axes, (8.5, 16), (22, 22.1), bend=0.2)
    arrow(axes, (28.5, 16), (28.5, 20.3))
    write(axes, 36.5, 18.2, "scancel or qdel", size=9, ha="left", family="monospace")
    return figure


def _queue_panel(axes, x, title, bars):
    """Two nodes over twelve minutes; bars are (job, first node, nodes, start, end)."""
    from matplotlib.patches import Rectangle

    unit, top = 2.6, 10
    write(axes, x, 6.6, title, ha="left", weight="bold")
    for node in range(2):
        write(axes, x - 0.5, top + 3 + 6 * node, f"node {node + 1}", size=9, ha="right")
    for job, node, nodes, start, end in bars:  # grey: colours belong to ranks
        edge = rank_colour(5) if nodes > 1 else QUIET
        place = (x + unit * start, top + 6 * node)
        axes.add_patch(
            Rectangle(
                place, unit * (end - start), 6 * nodes - 0.4, fc=tint(edge, 0.25), ec=edge, lw=1.5, zorder=2
            )
        )
        write(axes, place[0] + unit * (end - start) / 2, place[1] + 3 * nodes, job, weight="bold")
    for minute in range(0, 13, 3):
        write(axes, x + unit * minute, top + 13.3, str(minute), size=8, colour=QUIET)
    write(axes, x + unit * 6, top + 15.6, "minutes (virtual)", size=8, colour=QUIET)


def _overtaking():
    figure, axes = card(84, 29, "two nodes, four jobs: B asks for both")
    _queue_panel(
        axes, 8, "in order of submission",
        [("A", 0, 1, 0, 6), ("B", 0, 2, 6, 9), ("C", 0, 1, 9, 11), ("D", 1, 1, 9, 12)],
    )  # fmt: skip
    _queue_panel(
        axes, 50, "small jobs fill the gap",
        [("A", 0, 1, 0, 6), ("B", 0, 2, 6, 9), ("C", 1, 1, 0, 2), ("D", 1, 1, 2, 5)],
    )  # fmt: skip
    return figure


FIGURES = {
    "04_cluster": Drawing(
        _cluster,
        "From your browser to the login node, where JupyterLab and the terminal run; qsub or sbatch puts the job into "
        "the queue; the scheduler starts it on two compute nodes with two ranks each; all of them see the same files.",
    ),
    "04_terminal": Drawing(
        _terminal,
        "A terminal: the prompt says who you are, on which machine and in which folder; you type a command after the "
        "dollar sign, press Enter, and its output follows.",
    ),
    "04_job_file": Drawing(
        _job_file,
        "A job file has four parts: directives that the scheduler reads at submission, a block that you edit, guards "
        "that the shell runs on the first compute node, and the laptop's own command, which starts the ranks.",
    ),
    "04_life_of_a_job": Drawing(
        _life,
        "A job waits (PD or Q), runs (R), tidies up (CG or E), and ends as completed, failed or over time; scancel or "
        "qdel cancels it while it waits or runs.",
    ),
    "04_overtaking": Drawing(
        _overtaking,
        "Two nodes, four jobs. In order of submission node 2 stands idle for six minutes, because job B waits for both "
        "nodes. With overtaking the short jobs C and D run in that gap, and B starts no later.",
    ),
}
