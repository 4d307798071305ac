"""Train an isoFLOP grid of small GPTs, each with a budget of FLOPs, and fit the best size for each budget.

    row = train_point(Point(6e10, 24), corpus, ranks)         # on all ranks: lesson 12 does it live
    optima = [parabola(rows) for rows in by_budget(points).values()]
    fit = power_law(optima)                    # params = scale * budget ** exponent
    low, high = spread(points)["exponent"]     # 90 % range under noise as large as the residuals

A budget's points differ in width, and so in the number of tokens: tokens = budget / FLOPs per token. The FLOPs are
counted exactly, by `models.flops_per_token`; the usual 6 N per token omits attention's products and counts
embeddings, which cost nothing. Points are rows with budget_flops, params and val_loss.

This is the second approach of Hoffmann et al. 2022 (section 3.2, "IsoFLOP profiles") at a millionth of a millionth of
its scale: a budget's losses are fitted by a parabola in log N, and the parabolas' lowest points by a straight line in
logarithms.
"""

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np
import torch
from tqdm.auto import tqdm

from manyhands.config.layout import resolve_layout
from manyhands.config.options import Options, merged, model_config
from manyhands.data.corpus import Corpus, get_batch
from manyhands.gpt.sampling import generate
from manyhands.launch.ranks import Ranks
from manyhands.parallel.optimizer import build_optimizer, learning_rate, set_learning_rate
from manyhands.parallel.strategy import Strategy, parallelize
from manyhands.predict.models import flops_per_token

LAYERS, HEADS, BLOCK = 2, 2, 32
GLOBAL_BATCH = 24  # sequences per batch; rounded up to a multiple of the number of ranks
SEED = 1337
LOOK_ROWS, LOOK_AT_ONCE = 1024, 64  # validation sequences


@dataclass(frozen=True)
class Point:
    """A point of the grid: a budget in FLOPs, a width and a seed."""

    budget_flops: float
    width: int
    seed: int = SEED

    def options(self, vocab_size: int, strategy: str = "ddp", world_size: int = 1) -> Options:
        """Return options. The learning rate falls with the width; it was tuned for the smallest budget only."""
        sizes = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": self.width, "block_size": BLOCK}
        model = sizes | {"vocab_size": vocab_size}
        groups = {"model": model, "optimizer": {"lr": 0.3 / self.width}, "parallel": {"strategy": strategy}}
        options = merged(Options(), groups, "isoflop")
        global_batch = -(-GLOBAL_BATCH // world_size) * world_size
        per_step = flops_per_token(model_config(options, vocab_size)) * global_batch * BLOCK
        steps = max(2, round(self.budget_flops / per_step))
        return merged(options, {"train": {"steps": steps, "global_batch": global_batch, "seed": self.seed}}, "isoflop")


def train_point(
    point: Point, corpus: Corpus, ranks: Ranks, strategy: str = "ddp", sample: int = 0, progress: bool = False
) -> dict:
    """Train one point over all ranks and return its row of the grid. All ranks call it.

    `strategy`: ddp, zero1 or fsdp. Except for `seconds`, the row is the same on all ranks. Except for rounding, it is
    the same under every strategy and every number of ranks that divides GLOBAL_BATCH. `sample`: the number of
    characters that the model writes for the row's "sample". `progress`: whether rank 0 shows a bar.
    """
    options = point.options(len(corpus.vocab), strategy, ranks.world_size)
    config = model_config(options, len(corpus.vocab))
    parallel = parallelize(config, resolve_layout(options, config, ranks.world_size), options, ranks)
    optimizer = build_optimizer(parallel, options)
    began, steps, global_batch = time.perf_counter(), options.train.steps, options.train.global_batch
    hidden = ranks.rank > 0 or not progress
    for step in tqdm(range(steps), "steps", leave=False, mininterval=0.5, disable=hidden):
        batch = get_batch(
            corpus.train_ids, step, global_batch, BLOCK, parallel.data_rank, parallel.data_size, point.seed
        )
        set_learning_rate(optimizer, learning_rate(step, options))
        parallel.forward_backward(*(part.to(ranks.device) for part in batch))
        parallel.clip(options.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad()
    seconds, tokens = time.perf_counter() - began, steps * global_batch * BLOCK
    row = {
        "budget_flops": point.budget_flops,
        "flops": tokens * flops_per_token(config),
        "width": point.width,
        "seed": point.seed,
        "params": config.num_params(),
        "tokens": tokens,
        "epochs": tokens / len(corpus.train_ids),
        "steps": steps,
        "val_loss": validation_loss(parallel, corpus, ranks.device),
        "seconds": seconds,
    }
    if sample:  # text after a newline: all ranks take part and get the same
        start_11 = corpus.encode("\n").to(ranks.device)[None]
        ids_1T = generate(parallel, start_11, sample, 1.0, torch.Generator().manual_seed(SEED))
        row["sample"] = corpus.decode(ids_1T[0, 1:])
    return row


@torch.no_grad()
def validation_loss(parallel: Strategy, corpus: Corpus, device: torch.device) -> float:
    """Return the loss on the validation text, in nats per character. Each rank reads the same text; all call it."""
    rows = min(LOOK_ROWS, (len(corpus.val_ids) - 1) // BLOCK)
    x_BT, y_BT = (corpus.val_ids[i : i + rows * BLOCK].view(rows, BLOCK).to(device) for i in (0, 1))
    loss = 0.0
    for x_bT, y_bT in zip(x_BT.split(LOOK_AT_ONCE), y_BT.split(LOOK_AT_ONCE), strict=True):
        logits_bTV = parallel.logits(x_bT).float()
        loss += torch.nn.functional.cross_entropy(logits_bTV.flatten(0, 1), y_bT.flatten(), reduction="sum").item()
    return loss / y_BT.numel()


@dataclass(frozen=True)
class Optimum:
    """The minimum of a budget's parabola: loss = c[0] x^2 + c[1] x + c[2] with x = ln(params)."""

    budget_flops: float
    params: float
    loss: float
    coefficients: tuple

    def curve(self, params: float) -> float:
        """Return the fitted loss at these numbers of parameters."""
        return np.polyval(self.coefficients, np.log(params))


@dataclass(frozen=True)
class PowerLaw:
    """The fit params = scale * budget ** exponent, loss = loss_scale * budget ** loss_exponent, in a range."""

    scale: float
    exponent: float
    loss_scale: float
    loss_exponent: float

    def at(self, budget_flops: float) -> tuple[float, float]:
        """Return (params, loss) of the best model for this budget."""
        return (self.scale * budget_flops**self.exponent, self.loss_scale * budget_flops**self.loss_exponent)


def by_budget(points: Sequence[dict]) -> dict[float, list[dict]]:
    """Return {budget: its points, by size}, with budgets in order."""
    ordered = sorted(points, key=itemgetter("budget_flops", "params"))
    return {budget: list(rows) for budget, rows in groupby(ordered, key=itemgetter("budget_flops"))}


def parabola(points: Sequence[dict]) -> Optimum:
    """Return the `Optimum` of one budget's points. Raise ValueError for fewer than three sizes or no minimum."""
    budget, sizes = points[0]["budget_flops"], {point["params"] for point in points}
    if len(sizes) < 3:
        raise ValueError(f"{len(sizes)} sizes make no parabola; train at least 3 for each budget")
    x = np.log([point["params"] for point in points])
    coefficients = np.polyfit(x, [point["val_loss"] for point in points], 2)
    bend, slope, _ = coefficients
    if bend <= 0:
        raise ValueError(f"the losses of {budget:.0e} FLOPs have no lowest point; try smaller and larger models")
    best = -slope / (2 * bend)
    return Optimum(budget, math.exp(best), float(np.polyval(coefficients, best)), tuple(map(float, coefficients)))


def power_law(optima: Sequence[Optimum]) -> PowerLaw:
    """Fit straight lines to the logarithms of the optima. Raise ValueError for fewer than two."""
    if len(optima) < 2:
        raise ValueError(f"{len(optima)} budget makes no line; use at least 2")
    budgets = np.log([optimum.budget_flops for optimum in optima])
    exponent, scale = np.polyfit(budgets, np.log([optimum.params for optimum in optima]), 1)
    loss_exponent, loss_scale = np.polyfit(budgets, np.log([optimum.loss for optimum in optima]), 1)
    return PowerLaw(math.exp(scale), float(exponent), math.exp(loss_scale), float(loss_exponent))


def residuals(points: Sequence[dict]) -> tuple[float, list[float]]:
    """Return (standard deviation over all budgets, with three parameters fitted per parabola; the residuals)."""
    found, free = [], len(points)
    for rows in by_budget(points).values():
        optimum, free = parabola(rows), free - 3
        found += [row["val_loss"] - float(optimum.curve(row["params"])) for row in rows]
    if free < 1:
        raise ValueError(f"{len(found)} points leave nothing to judge the noise by; use more than 3 per budget")
    return math.sqrt(sum(r * r for r in found) / free), found


def spread(
    points: Sequence[dict], draws: int = 1000, share: float = 0.9, seed: int = 0, ahead: float = 10.0
) -> dict[str, tuple[float, float]]:
    """Return ranges that contain `share` of the fits to `draws` grids: the parabolas plus noise of the residuals' size.

    {"exponent": (low, high), "params": ..., "loss": ...}: the last two at `ahead` times the largest budget. A draw
    without a minimum in each budget is repeated, up to ten times as many draws in all. Raise ValueError.
    """
    sigma, grids = residuals(points)[0], by_budget(points)
    curves = {budget: parabola(rows).curve for budget, rows in grids.items()}
    rng, found, target = np.random.default_rng(seed), [], ahead * max(grids)
    for _ in range(10 * draws):
        drawn = [
            {**row, "val_loss": float(curves[budget](row["params"])) + rng.normal(0, sigma)}
            for budget, rows in grids.items()
            for row in rows
        ]
        with suppress(ValueError):
            law = power_law([parabola(rows) for rows in by_budget(drawn).values()])
            found.append((law.exponent, *law.at(target)))
        if len(found) == draws:
            break
    if not found:
        raise ValueError("no draw had a lowest point in each budget: the noise is as large as the curves are deep")
    ranges = np.quantile(found, [(1 - share) / 2, (1 + share) / 2], axis=0).T.tolist()
    return {name: (low, high) for name, (low, high) in zip(("exponent", "params", "loss"), ranges, strict=True)}
