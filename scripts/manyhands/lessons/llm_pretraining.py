"""Harness and plots of lesson 12: near copies by keys, a tiny model, and its plots."""

import math
import zlib
from collections.abc import Callable, Iterable

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT
from manyhands.plots import looks

BANDS = 16
BLOCK = 32


def by_size(one):
    """Return [(parameters, loss), ...] by size, of a published series of points [tokens, loss] of equal FLOPs."""
    return sorted((one["budget_flops"] / 6 / tokens, loss) for tokens, loss in one["points"])


def band_records(mine_eK: np.ndarray, bands: int = BANDS) -> torch.Tensor:
    """Return a row (key, document) for each band of each signature of this rank: int32 [e * bands, 2].

    A key is a hash of 31 bits of the band's number and content. Two documents may share one by accident: it only makes
    a pair to compare.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    records = [
        (zlib.crc32(part.tobytes(), band) >> 1, rank + n * row)
        for row, signature_K in enumerate(mine_eK)
        for band, part in enumerate(np.split(signature_K, bands))
    ]
    return torch.tensor(records, dtype=torch.int32).view(-1, 2)


def exchange_rows(parcels: list[torch.Tensor]) -> torch.Tensor:
    """Send parcels[r] to rank r and return the rows that arrive, those of rank 0 first. All ranks call it."""
    leaving = torch.tensor([len(parcel) for parcel in parcels], device=parcels[0].device)
    arriving = torch.empty_like(leaving)
    dist.all_to_all_single(arriving, leaving)
    rows = parcels[0].new_empty((int(arriving.sum()), *parcels[0].shape[1:]))
    dist.all_to_all_single(rows, torch.cat(parcels), arriving.tolist(), leaving.tolist())
    return rows


def near_pairs(
    pairs: Iterable[tuple[int, int]],
    mine_eK: np.ndarray,
    similarity: Callable[[np.ndarray, np.ndarray], float],
    limit: float,
    device: torch.device | str = "cpu",
) -> dict[int, int]:
    """Return {document of this rank: the first earlier one whose signature is as similar as `limit`}.

    pairs: (first, second) with first < second, those that this rank found. All ranks call it.
    """
    n = dist.get_world_size()
    mine_eK = torch.from_numpy(mine_eK).to(device)
    asked_P2 = torch.tensor(sorted(set(pairs)), dtype=torch.int32, device=device).view(-1, 2)
    asked_P2 = exchange_rows([asked_P2[asked_P2[:, 0] % n == r] for r in range(n)])
    asked_P2 = torch.unique(asked_P2, dim=0)  # several ranks may have found a pair, each by another band
    sent = torch.cat([asked_P2, mine_eK[(asked_P2[:, 0] // n).long()]], dim=1)
    arrived = exchange_rows([sent[asked_P2[:, 1] % n == r] for r in range(n)]).cpu().numpy()
    first_of: dict[int, int] = {}
    for first, second, *first_K in sorted(arrived.tolist()):
        if second not in first_of and similarity(np.array(first_K), mine_eK[second // n].cpu().numpy()) >= limit:
            first_of[second] = first
    return first_of


def train_tiny(
    batch_of: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    vocab_size: int,
    steps: int,
    lr: float = 5e-3,
    seed: int = 1337,
    device: torch.device | str = "cpu",
) -> GPT:
    """Return a GPT of two layers and width 48 after `steps` steps of AdamW."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(vocab_size, block_size=BLOCK, n_layer=2, n_head=2, n_embd=48)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        x_BT, y_BT = (ids.to(device) for ids in batch_of(step))
        model(x_BT, y_BT)[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@torch.no_grad()
def mean_loss(model: GPT, ids: torch.Tensor) -> float:
    """Return the mean loss of the model on a text, in nats per token. It is read in pieces of BLOCK tokens."""
    device = next(model.parameters()).device
    rows = (len(ids) - 1) // BLOCK
    x_BT, y_BT = (ids[i : i + rows * BLOCK].view(rows, BLOCK).long().to(device) for i in (0, 1))
    logits_BTV = model(x_BT)[0]
    return F.cross_entropy(logits_BTV.flatten(0, 1), y_BT.flatten()).item()


def draw_estimates(true, found, hashes):
    """Draw estimated against true similarities, the diagonal, and one standard deviation on both sides of it."""
    figure, axes = looks.new_figure(6, 4.2)
    line = [i / 100 for i in range(101)]
    sigma = [math.sqrt(j * (1 - j) / hashes) for j in line]
    axes.plot(line, line, color=looks.QUIET, lw=1)
    for sign in (-1, 1):
        axes.plot(line, [j + sign * s for j, s in zip(line, sigma, strict=True)], **looks.PREDICTED)
    axes.plot(true, found, **looks.MEASURED | {"mfc": "none"}, ls="none")
    known, colour = "± sqrt(J (1 - J) / K)", looks.PREDICTED["color"]
    looks.note(axes, known, (0.5, 0.5 + sigma[50]), (-8, 6), colour, ha="right")
    axes.set(xlabel="true similarity J", ylabel=f"estimate from {hashes} hashes", xlim=(0, 1.02), ylim=(0, 1.02))
    return figure


def draw_received(documents, hashes, ranks, measured_kb, bands=16):
    """Draw the kB that a rank receives from the others to find copies, against the number of ranks.

    measured_kb: by keys, on `ranks` ranks. The line of the keys leaves out the candidates' signatures.
    """
    figure, axes = looks.new_figure(7, 3.6)
    sizes = [2**k for k in range(1, 11)]
    gather = [4 * hashes * documents * (n - 1) / n / 1e3 for n in sizes]
    keys = [8 * bands * documents / n * (n - 1) / n / 1e3 for n in sizes]
    axes.loglog(sizes, gather, **looks.LIMIT)
    axes.loglog(sizes, keys, **looks.PREDICTED)
    looks.note(axes, "all-gather of the signatures", (sizes[-1], gather[-1]), (0, 6), looks.LIMIT["color"], ha="right")
    looks.note(axes, "each key to one rank", (sizes[-3], keys[-3]), (6, 6), looks.PREDICTED["color"])
    if ranks > 1:
        axes.loglog(ranks, measured_kb, **looks.MEASURED, ls="none")
        looks.note(axes, "counted here, with candidates", (ranks, measured_kb), (8, 4))
    axes.set(xlabel="ranks", ylabel="kB that a rank receives", title=f"finding copies among {documents:,} documents")
    axes.margins(y=0.15)
    return figure


def draw_valleys(grids, lowest_of, live, published, lowest):
    """Draw losses against parameters for equal budgets: ours on the left, published ones on the right.

    grids: {budget: points}; lowest_of: {budget: (parameters, loss)}; live: a point that was trained just now;
    published: series with `budget_flops`; lowest: the function that finds a valley's lowest point.
    """
    figure, (ours, theirs) = looks.new_figure(10, 4.2, 1, 2)
    for (budget, rows), look in zip(grids.items(), looks.ALTERNATIVES[1:], strict=False):
        points = [(row["params"], row["val_loss"]) for row in rows]
        _valley(ours, points, lowest_of[budget], budget, look)
    for one, look in zip(published, looks.ALTERNATIVES[1:], strict=False):
        points = by_size(one)
        _valley(theirs, points, lowest(*zip(*points, strict=True)), one["budget_flops"], look)
    ours.plot(live["params"], live["val_loss"], **{**looks.MEASURED, "marker": "x", "ms": 10, "mew": 2}, ls="none")
    looks.note(ours, "trained here", (live["params"], live["val_loss"]), (8, 10))
    ours.set(ylabel="loss, nats per character", title="here: equal FLOPs on each curve")
    theirs.set(ylabel="loss, nats per token", title="published: Hoffmann et al. 2022")
    for axes in (ours, theirs):
        axes.set(xscale="log", xlabel="parameters")
        axes.margins(x=0.18)
    return figure


def draw_longer_run(curves, live, title):
    """Draw training and validation loss against FLOPs, and the point that was trained just now.

    curves: {"train" and "val": [(FLOPs, loss), ...]}; live: a row of `train.isoflop.train_point`.
    """
    figure, axes = looks.new_figure(7, 3.6)
    for (name, look), label in zip(
        (("train", looks.PREDICTED), ("val", looks.MEASURED | {"ms": 3})), ("training", "validation"), strict=True
    ):
        axes.plot(*zip(*curves[name], strict=True), **look)
        looks.note(axes, label, curves[name][-1], (6, -3), look["color"])
    axes.plot(live["flops"], live["val_loss"], **{**looks.MEASURED, "marker": "x", "ms": 10, "mew": 2}, ls="none")
    looks.note(axes, "trained here", (live["flops"], live["val_loss"]), (8, 6))
    axes.set(xscale="log", xlabel="training FLOPs", ylabel="loss, nats per character", title=title)
    axes.margins(x=0.2, y=0.15)
    return figure


def draw_mixtures(shares, losses):
    """Draw the losses of each domain against the share of the second one. losses: {domain: loss of each share}."""
    figure, axes = looks.new_figure(6.5, 3.6)
    samples = {name: [[loss] for loss in found] for name, found in losses.items()}
    looks.series_with_ends(axes, [100 * share for share in shares], samples, looks.ALTERNATIVES)
    axes.set(xlabel="share of code, %", ylabel="loss, nats per byte", xlim=(-3, 122), xticks=[0, 25, 50, 75, 100])
    return figure


def _valley(axes, points, best, budget, look):
    """Draw points (parameters, loss) of a budget, a line through them, and a star at the lowest point."""
    axes.plot(*zip(*points, strict=True), **look | {"ms": 5, "lw": 1})
    axes.plot(*best, marker="*", ms=15, color=look["color"], mec=looks.PAPER)
    looks.note(axes, f"{budget:.0e}".replace("e+", "e"), points[-1], (6, 0), look["color"], va="center")
