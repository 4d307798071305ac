"""One point of an isoFLOP grid: a small GPT trained with a budget of FLOPs, and a look at what it has learned.

    row = train_point(Point(6e10, 24), corpus, ranks)         # by all ranks: lesson 12 does it live

One budget's points differ in width only, and in how many tokens the budget then buys: tokens = budget / FLOPs per
token. The FLOPs are counted exactly, by `models.flops_per_token`; the usual 6 N per token leaves out attention's
products and counts embeddings, which cost nothing.

This is the second approach of Hoffmann et al. 2022 (section 3.2, "IsoFLOP profiles") at a millionth of a millionth of
its scale. `manyhands.predict.scaling` fits what comes out.
"""

import time
from dataclasses import dataclass, replace

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
from manyhands.data.corpus import Corpus, get_batch
from manyhands.gpt.sampling import generate
from manyhands.launch.ranks import Ranks
from manyhands.parallel.optimizer import build_optimizer, learning_rate, set_learning_rate
from manyhands.parallel.strategy import parallelize
from manyhands.predict.models import flops_per_token

LAYERS, HEADS, BLOCK = 2, 2, 32
GLOBAL_BATCH = 24  # sequences: 1, 2, 3, 4, 6, 8, 12 and 24 ranks divide it
SEED = 1337
IN_A_ROW = 5  # characters that must all be right
LOOK_ROWS, LOOK_AT_ONCE = 1024, 64  # sequences of the validation text


@dataclass(frozen=True)
class Point:
    """A budget in FLOPs and a width; what follows from them."""

    budget_flops: float
    width: int
    seed: int = SEED

    def options(self, vocab_size: int, strategy: str = "ddp") -> Options:
        """The trainer's options. The learning rate falls with the width; it was tuned for the smallest budget only."""
        model = ModelOptions(n_layer=LAYERS, n_head=HEADS, n_embd=self.width, block_size=BLOCK, vocab_size=vocab_size)
        options = Options(model=model, optimizer=OptimizerOptions(lr=0.3 / self.width))
        per_step = flops_per_token(model_config(options, vocab_size)) * GLOBAL_BATCH * BLOCK
        steps = max(2, round(self.budget_flops / per_step))
        train = TrainOptions(steps=steps, global_batch=GLOBAL_BATCH, seed=self.seed)
        return replace(options, train=train, parallel=ParallelOptions(strategy=strategy))


def train_point(point: Point, corpus: Corpus, ranks: Ranks, strategy: str = "ddp", sample: int = 0) -> dict:
    """Train one point to its end, over all ranks, and look at it: a row of the grid. All ranks call it.

    `strategy`: ddp, zero1 or fsdp. The row is the same on all ranks but for `seconds`, and but for rounding the same
    under each of them on any number of ranks. `sample`: so many characters that the model writes are the row's
    "sample".
    """
    options = point.options(len(corpus.vocab), strategy)
    config = model_config(options, len(corpus.vocab))
    parallel = parallelize(config, resolve_layout(options, config, ranks.world_size), options, ranks)
    optimizer = build_optimizer(parallel, options)
    began, steps = time.perf_counter(), options.train.steps
    for step in range(steps):
        share = parallel.data_rank, parallel.data_size, options.train.seed
        batch = get_batch(corpus.train_ids, step, GLOBAL_BATCH, BLOCK, *share)
        ids, targets = (part.to(ranks.device) for part in batch)
        set_learning_rate(optimizer, learning_rate(step, options))
        parallel.forward_backward(ids, targets)
        parallel.clip(options.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - began
    written = {}
    if sample:  # what it writes after a line's end: the same on all ranks, which all take part
        start_11 = corpus.encode("\n").to(ranks.device)[None]
        ids_1T = generate(parallel, start_11, sample, 1.0, torch.Generator().manual_seed(SEED))
        written["sample"] = corpus.decode(ids_1T[0, 1:])
    tokens = steps * GLOBAL_BATCH * BLOCK
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


@torch.no_grad()
def look(parallel, corpus, ranks) -> dict[str, float]:
    """What the model knows of the validation text: the same on all ranks, which all call it.

    val_loss: nats per character; accuracy: how often the likeliest character is the right one; in_a_row: how often it
    is for IN_A_ROW characters one after the other, given the right ones before each.
    """
    rows = min(LOOK_ROWS, (len(corpus.val_ids) - 1) // BLOCK)
    x_BT, y_BT = (corpus.val_ids[i : i + rows * BLOCK].view(rows, BLOCK) for i in (0, 1))
    found = torch.zeros(5, dtype=torch.float64)
    # ranks that hold whole replicas read a share each; others compute all of it together
    apart = parallel.layout.dp_mode(parallel.options) == "replicas" and parallel.data_size == ranks.world_size
    for number, first in enumerate(range(0, rows, LOOK_AT_ONCE)):
        if apart and number % ranks.world_size != ranks.rank:
            continue
        x_bT, y_bT = (ids_BT[first : first + LOOK_AT_ONCE].to(ranks.device) for ids_BT in (x_BT, y_BT))
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
