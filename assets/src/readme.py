"""The first picture of README and site: two cells on four ranks, as they ran; the second one hangs.

    python assets/src/readme.py     # 30 s: run the cells again, write assets/recorded/readme.json and assets/readme.svg

`make figures` only draws what that run printed. A third cell, with a wrong answer and the sentence of its check, is
text on the site's opening page.
"""

import json
import platform
import re
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

from manyhands.plots.looks import (  # noqa: E402
    EDGE,
    FAINT,
    GROUND,
    INK,
    PAPER,
    QUIET,
    SHARED_COLOUR,
    box,
    card,
    rank_box,
    rank_colour,
    write,
)

RECORDED = ROOT / "assets" / "recorded" / "readme.json"
N_RANKS, WAIT_S = 4, 5
CELLS = (
    """%%ranks
mine = rank + 1.0
total = torch.tensor([mine])
dist.all_reduce(total)
say(f"I had {mine:g}, the sum is {total.item():g}")""",
    """%%ranks
if rank != 2:
    dist.all_reduce(total)""",
)
WRONG = """%%ranks
def ring_seconds(n_bytes, n, alpha, beta):
    return (n - 1) * (alpha + n_bytes / n / beta)

checks.ring_seconds(ring_seconds, ranks)"""
LEFT, TOP, LINE, RIGHT = 3, 4.6, 2.3, 78


def record():
    """Run the cells in a notebook's kernel, stop the second, and write what they printed. Returns the file."""
    import torch
    from notebook_kernel import JOIN, Kernel

    with tempfile.TemporaryDirectory() as folder, Kernel(Path(folder), ROOT) as kernel:
        kernel.start(N_RANKS)
        kernel.run(JOIN)
        first = kernel.run(CELLS[0]).text
        hung = kernel.send(CELLS[1])
        time.sleep(WAIT_S)  # ranks 0, 1 and 3 are in all_reduce by then
        kernel.manager.interrupt_kernel()
        second = kernel.collect(hung).error[2]
        kernel.run("%%ranks\nfrom manyhands.checks import collectives as checks")
        judged = kernel.run(WRONG).text
    *printed, check = [
        {"source": source, "lines": text.strip("\n").split("\n")}
        for source, text in zip((*CELLS, WRONG), (first, second, judged), strict=True)
    ]
    conditions = {
        "date": date.today().isoformat(), "hardware": f"{N_RANKS} ranks on a CPU", "python": platform.python_version(),
        "torch": torch.__version__, "command": "python assets/src/readme.py",
    }  # fmt: skip
    RECORDED.write_text(
        json.dumps({"conditions": conditions, "cells": printed, "check": check}, indent=1, ensure_ascii=False) + "\n",
        "utf-8",
    )
    return RECORDED


def code(axes, y, text, indent=0.0, **style):
    write(axes, LEFT + 2 + indent, y, text, size=11, ha="left", family="monospace", **style)


def cell(axes, y, source):
    """A notebook's cell with its top at `y`. Returns where it ends."""
    lines = source.split("\n")
    height = LINE * len(lines) + 1.4
    box(axes, LEFT, y, RIGHT - LEFT - 5, height, face=GROUND, edge=FAINT)
    for i, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        where = LEFT + 2 + 0.92 * indent, y + 0.7 + LINE * (i + 0.5)
        write(
            axes, *where, line.lstrip(), size=11, ha="left", family="monospace", weight="bold" if i == 0 else "normal"
        )
    return y + height + 0.8


def output(axes, y, lines):
    """What a cell printed: a bar in the rank's color on the left of what a rank said. Returns where it ends."""
    for line in lines:
        rank = re.match(r"\s*rank (\d+)", line)
        if rank or line.startswith("all ranks"):
            colour = rank_colour(int(rank[1])) if rank else SHARED_COLOUR
            box(axes, LEFT + 0.7, y + 0.2, 0.5, LINE - 0.4, face=colour, edge=colour)
        code(axes, y + LINE / 2, line.strip())
        y += LINE
    return y + 1.2


def ranks(axes, y, labels):
    """Four ranks in a row of two by two, with what each holds or does below; a rank without a label is not there."""
    for rank, (label, takes_part) in enumerate(labels):
        x, top = RIGHT + 17.5 * (rank % 2), y + 8.4 * (rank // 2)
        if takes_part:
            rank_box(axes, rank, x, top, width=15.5, height=4)
        else:
            box(axes, x, top, 15.5, 4, f"rank {rank}", face=PAPER, edge=EDGE, dotted=True, colour=QUIET)
        write(axes, x + 7.75, top + 5.6, label, size=10.5, colour=INK if takes_part else QUIET)


def readme():
    first, second = json.loads(RECORDED.read_text("utf-8"))["cells"]
    held = re.findall(r"I had (\d+)", "\n".join(first["lines"]))
    total = re.search(r"the sum is (\d+)", "\n".join(first["lines"]))[1]
    waits = ["waiting in" in line for line in second["lines"] if re.match(r"\s*rank \d", line)]
    figure, axes = card(114.6, 60.5, "One cell runs in four processes")
    end = output(axes, cell(axes, TOP, first["source"]), first["lines"])
    ranks(axes, TOP + 3, [(f"{number} → {total}", True) for number in held])
    title = "Rank 2 skips the all-reduce. Stop the cell, and it says who is waiting, and where"
    write(axes, 1.5, end + 1, title, size=12, weight="bold", ha="left")
    begin = end + 3.6
    output(axes, cell(axes, begin, second["source"]), second["lines"])
    ranks(axes, begin + 2, [("waits in all_reduce" if one else "is done", one) for one in waits])
    return figure


FIGURES = {"readme": readme}

if __name__ == "__main__":
    import draw

    print(record())
    draw.save("readme", ROOT / "assets" / "readme.svg")
    print(ROOT / "assets" / "readme.svg")
