"""A grid of small GPTs that cost the same: for each budget of FLOPs several sizes, each trained once on the corpus.

    python -m manyhands.tools.isoflop                       # all points into assets/recorded/12_isoflop.json: minutes
    python -m manyhands.tools.isoflop --budget 6e10 --to outputs/mine.json
    row = train_point(Point(6e10, 24), corpus, ranks)         # one point, by all ranks: lesson 12 does it live

A point that the file holds already is not run again, so a grid that was stopped goes on. One budget's sizes differ in
width only, and in how many tokens the budget then buys: tokens = budget / FLOPs per token. The FLOPs are counted
exactly, by `flops.flops_per_token`; the usual 6 N per token leaves out attention's products and counts embeddings,
which cost nothing.

This is the second approach of Hoffmann et al. 2022 (section 3.2, "IsoFLOP profiles") at a millionth of a millionth of
its scale. `manyhands.predict.scaling` fits what comes out.
"""

import argparse
import dataclasses
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from manyhands.config.layout import resolve_layout
from manyhands.config.options import (
    ModelOptions,
    OptimizerOptions,
    Options,
    ParallelOptions,
    TrainOptions,
    model_config,
)
from manyhands.course.folders import ASSETS, write_whole
from manyhands.data.corpus import get_batch, load_corpus
from manyhands.gpt.sampling import generate
from manyhands.launch.join import join, leave
from manyhands.launch.metrics import conditions
from manyhands.launch.program import say
from manyhands.parallel.optimizer import build_optimizer, learning_rate, set_learning_rate
from manyhands.parallel.strategy import parallelize
from manyhands.predict.flops import flops_per_token

PATH = ASSETS / "recorded" / "12_isoflop.json"
GRID = {  # FLOPs: widths
    6e10: (8, 12, 16, 24, 32, 48),
    2e11: (12, 16, 24, 32, 48, 64),
    6e11: (16, 24, 32, 48, 64, 96),
}
LAYERS, HEADS, BLOCK = 2, 2, 32
GLOBAL_BATCH = 24  # sequences: 1, 2, 3, 4, 6, 8, 12 and 24 ranks divide it
SEED = 1337
IN_A_ROW = 5  # characters that must all be right


@dataclass(frozen=True)
class Point:
    """A budget in FLOPs and a width; what follows from them."""

    budget_flops: float
    width: int
    seed: int = SEED

    def options(self, vocab_size):
        """The trainer's options. The learning rate falls with the width; it was tuned for the smallest budget only."""
        model = ModelOptions(n_layer=LAYERS, n_head=HEADS, n_embd=self.width, block_size=BLOCK, vocab_size=vocab_size)
        options = Options(model=model, optimizer=OptimizerOptions(lr=0.3 / self.width))
        per_step = flops_per_token(model_config(options, vocab_size)) * GLOBAL_BATCH * BLOCK
        train = TrainOptions(
            steps=max(2, round(self.budget_flops / per_step)), global_batch=GLOBAL_BATCH, seed=self.seed
        )
        return dataclasses.replace(options, train=train)


def train_point(point, corpus, ranks, strategy="ddp", sample=0):
    """Train one point to its end, over all ranks, and look at it: a row of the file. All ranks call it.

    `strategy`: ddp, zero1 or fsdp. The row is the same on all ranks but for `seconds`, and but for rounding the same
    under each of them on any number of ranks. `sample`: so many characters that the model writes are the row's
    "sample".
    """
    options = point.options(len(corpus.vocab))
    options = dataclasses.replace(options, parallel=ParallelOptions(strategy=strategy))
    config = model_config(options, len(corpus.vocab))
    layout = resolve_layout(options, config, ranks.world_size)
    parallel = parallelize(config, layout, options, ranks)
    optimizer = build_optimizer(parallel, options)
    began, steps = time.perf_counter(), options.train.steps
    for step in range(steps):
        ids, targets = _share(corpus.train_ids, step, options, parallel)
        set_learning_rate(optimizer, learning_rate(step, options))
        parallel.forward_backward(ids, targets)
        parallel.clip(options.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - began
    tokens = steps * GLOBAL_BATCH * BLOCK
    written = {"sample": _written(parallel, corpus, sample)} if sample else {}
    return {
        "budget_flops": point.budget_flops,
        "flops": tokens * flops_per_token(config),
        "width": point.width,
        "params": config.num_params(),
        "tokens": tokens,
        "epochs": tokens / len(corpus.train_ids),
        "steps": steps,
        "lr": options.optimizer.lr,
        "seed": point.seed,
        **look(parallel, corpus, ranks),
        "seconds": seconds,
        **written,
    }


def _written(parallel, corpus, n):
    """What the model writes after a line's end: n characters, the same on all ranks, which all call it."""
    start_11 = corpus.encode("\n").to(parallel.ranks.device)[None]
    ids_1T = generate(parallel, start_11, n, 1.0, torch.Generator().manual_seed(SEED))
    return corpus.decode(ids_1T[0, 1:])


def _share(ids, step, options, parallel):
    """This data rank's sequences of global batch number `step`, inputs and targets [b, T]."""
    rank, size = parallel.data_rank, parallel.data_size
    share = get_batch(ids, step, GLOBAL_BATCH, BLOCK, rank, size, options.train.seed)
    return [part.to(parallel.ranks.device) for part in share]


@torch.no_grad()
def look(parallel, corpus, ranks, rows=1024, at_once=64):
    """What the model knows of the validation text: the same on all ranks, which all call it.

    Ranks that hold whole copies read a share each; others compute all of it together.

    val_loss: nats per character; accuracy: how often the likeliest character is the right one; in_a_row: how often it
    is for IN_A_ROW characters one after the other, given the right ones before each.
    """
    T = BLOCK
    rows = min(rows, (len(corpus.val_ids) - 1) // T)
    x_BT, y_BT = (corpus.val_ids[i : i + rows * T].view(rows, T) for i in (0, 1))
    found = torch.zeros(5, dtype=torch.float64)
    apart = parallel.layout.dp_mode(parallel.options) == "replicas" and parallel.data_size == ranks.world_size
    for first in range(0, rows, at_once):
        x_bT, y_bT = (ids_BT[first : first + at_once].to(ranks.device) for ids_BT in (x_BT, y_BT))
        if apart and (first // at_once) % ranks.world_size != ranks.rank:
            continue
        logits_bTV = parallel.logits(x_bT).float()
        loss = torch.nn.functional.cross_entropy(logits_bTV.flatten(0, 1), y_bT.flatten(), reduction="sum")
        right_bT = logits_bTV.argmax(-1) == y_bT
        rows_right = right_bT.unfold(1, IN_A_ROW, IN_A_ROW).all(-1)
        counted = (loss, right_bT.sum(), right_bT.numel(), rows_right.sum(), rows_right.numel())
        found += torch.tensor([float(number) for number in counted], dtype=torch.float64)
    found = found.to(ranks.device)
    if apart:
        dist.all_reduce(found)
    loss, right, characters, right_rows, groups = found.tolist()
    return {"val_loss": loss / characters, "accuracy": right / characters, "in_a_row": right_rows / groups}


def is_there(content, point):
    """Whether a file's content holds this point."""
    return any(
        (row["budget_flops"], row["width"], row["seed"]) == (point.budget_flops, point.width, point.seed)
        for row in content["points"]
    )


def run_grid(points, path, corpus, ranks):
    """Run the points that the file at `path` lacks, and write it after each. Returns its content."""
    made = conditions(ranks) | {"command": "python -m manyhands.tools.isoflop"}  # whatever part of it this is
    content = {"conditions": made, "corpus": corpus.metadata(), "recipe": recipe(), "points": []}
    if path.exists():
        held = json.loads(path.read_text(encoding="utf-8"))
        same_text = held["corpus"]["sha256"] == corpus.sha256
        for what, same in (("recipe", held["recipe"] == content["recipe"]), ("corpus", same_text)):
            if not same:
                raise ValueError(f"{path} was made with another {what}; name another file with --to")
        content = held
    for point in points:
        if is_there(content, point):
            continue
        row = train_point(point, corpus, ranks)
        content["points"].append(row)
        if ranks.rank == 0:
            write_whole(path, json.dumps(content, indent=1) + "\n")
            say(
                f"{point.budget_flops:.0e} FLOPs, {row['params']:7,} parameters, {row['tokens']:10,} tokens: "
                f"validation {row['val_loss']:.4f}, {row['seconds']:.0f} s"
            )
    return content


def recipe():
    """What is the same for all points."""
    return {"layers": LAYERS, "heads": HEADS, "block": BLOCK, "global_batch": GLOBAL_BATCH, "lr": "0.3 / width"}


def main(argv=None):
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m manyhands.tools.isoflop", description="Train a grid of small GPTs for lesson 12."
    )
    parser.add_argument("--to", type=Path, default=PATH, metavar="FILE", help=f"default: assets/recorded/{PATH.name}")
    parser.add_argument(
        "--budget", type=float, action="append", help="of 6e10, 2e11, 6e11; several times (default: all)"
    )
    parser.add_argument("--width", type=int, action="append", help="only these widths")
    parser.add_argument("--seed", type=int, default=SEED, help="of weights and batches")
    wanted = parser.parse_args(argv)
    unknown = [budget for budget in wanted.budget or () if budget not in GRID]
    if unknown:
        print(f"isoflop: budget {unknown[0]:g} is none of {', '.join(f'{b:.0e}' for b in GRID)}", file=sys.stderr)
        return 2
    points = [
        Point(budget, width, wanted.seed)
        for budget, widths in GRID.items()
        for width in widths
        if budget in (wanted.budget or GRID) and width in (wanted.width or widths)
    ]
    if not points:
        print(
            f"isoflop: these budgets have no width {', '.join(map(str, wanted.width))}; see GRID in this file",
            file=sys.stderr,
        )
        return 2
    ranks = join(name="isoflop", quiet=True)
    torch.set_num_threads(1)  # these models are so small that a second thread only waits for the first
    corpus = load_corpus(ranks)
    try:
        run_grid(points, wanted.to, corpus, ranks)
    except ValueError as error:
        print(f"isoflop: {error}", file=sys.stderr)
        return 2
    finally:
        leave()
    return 0


if __name__ == "__main__":
    from manyhands.launch.program import run_program

    run_program("isoflop", main)  # at Ctrl-C the points that are done lie in the file
