"""Train the grid of small GPTs that lesson 12 shows, three budgets and six widths: assets/recorded/12_isoflop.json.

One point of it is trained with further seeds as well.

    python scripts/isoflop.py                              # minutes; torchrun and mpiexec start it on more ranks
    python scripts/isoflop.py --to outputs/isoflop.json

A point that the file holds already is not run again, so a grid that was stopped goes on.
"""

import json
from pathlib import Path

import manyhands.launch.entry as entry  # first: Ctrl-C in the imports below is a sentence
import torch
from manyhands.course.folders import ASSETS, write_whole
from manyhands.data.corpus import load_corpus
from manyhands.launch.flags import Flags
from manyhands.launch.join import join, leave
from manyhands.launch.metrics import conditions
from manyhands.launch.program import Refused, say
from manyhands.train.isoflop import BLOCK, GLOBAL_BATCH, HEADS, LAYERS, SEED, Point, train_point

GRID = {  # FLOPs: widths
    6e10: (8, 12, 16, 24, 32, 48),
    2e11: (12, 16, 24, 32, 48, 64),
    6e11: (16, 24, 32, 48, 64, 96),
}
SEEDS = (1, 2, 3, 4)  # further ones at the best width of the smallest budget: how far does chance move a point?
RECIPE = {"layers": LAYERS, "heads": HEADS, "block": BLOCK, "global_batch": GLOBAL_BATCH, "lr": "0.3 / width"}


def run_grid(points, path, corpus, ranks):
    """Run the points that the file at `path` lacks, and write it after each. Returns its content.

    Raises Refused for a file of another recipe or corpus.
    """
    made = conditions(ranks) | {"command": "python scripts/isoflop.py"}
    content = {"conditions": made, "corpus": corpus.metadata(), "recipe": RECIPE, "points": []}
    if path.exists():
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["recipe"] != RECIPE or content["corpus"]["sha256"] != corpus.sha256:
            raise Refused(f"{path} was made with another recipe or corpus; name another file with --to")
    content.setdefault("other_seeds", [])
    rows = content["points"] + content["other_seeds"]
    held = {(row["budget_flops"], row["width"], row["seed"]) for row in rows}
    for point in points:
        if (point.budget_flops, point.width, point.seed) not in held:
            row = train_point(point, corpus, ranks)
            content["points" if point.seed == SEED else "other_seeds"].append(row)
            if ranks.rank == 0:
                write_whole(path, json.dumps(content, indent=1) + "\n")
                what = f"{row['params']:7,} parameters, {row['tokens']:10,} tokens: validation {row['val_loss']:.4f}"
                say(f"{point.budget_flops:.0e} FLOPs, {what}, {row['seconds']:.0f} s")
    return content


def main():
    parser = Flags(description=__doc__.split("\n\n")[0])
    parser.add_argument("--to", type=Path, default=ASSETS / "recorded" / "12_isoflop.json", metavar="FILE")
    path = parser.parse_args().to
    ranks = join(name="isoflop", quiet=True)
    torch.set_num_threads(1)  # these models are so small that a second thread only waits for the first
    points = [Point(budget, width) for budget, widths in GRID.items() for width in widths]
    points += [Point(6e10, 16, seed) for seed in SEEDS]
    run_grid(points, path, load_corpus(ranks), ranks)
    leave()


if __name__ == "__main__":
    entry.run_program("isoflop.py", main)
