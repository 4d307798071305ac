"""What an isoFLOP grid says: the best size for each budget, how it grows with the budget, and how sure that is.

    optima = [parabola(rows) for rows in by_budget(points).values()]
    fit = power_law(optima)                    # params = scale * budget ** exponent
    low, high = spread(points)["exponent"]     # 90 % of what noise as large as the residuals makes of the same grid

A budget's losses are fitted by a parabola in log N, and the parabolas' lowest points by a straight line in logarithms,
as in Hoffmann et al. 2022, section 3.2 ("IsoFLOP profiles"). Points are dicts with budget_flops, params and val_loss,
such as `train.isoflop` makes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np


@dataclass(frozen=True)
class Optimum:
    """The lowest point of a budget's parabola, and the parabola: loss = c[0] x^2 + c[1] x + c[2] with x =
    ln(params)."""

    budget_flops: float
    params: float
    loss: float
    coefficients: tuple

    def curve(self, params: float) -> float:
        """The fitted loss at these numbers of parameters."""
        return np.polyval(self.coefficients, np.log(params))


@dataclass(frozen=True)
class PowerLaw:
    """params = scale * budget ** exponent, and loss = loss_scale * budget ** loss_exponent (within the range that was
    seen)."""

    scale: float
    exponent: float
    loss_scale: float
    loss_exponent: float

    def at(self, budget_flops: float) -> tuple[float, float]:
        """(params, loss) of the best model for this budget."""
        return (self.scale * budget_flops**self.exponent, self.loss_scale * budget_flops**self.loss_exponent)


def by_budget(points: Sequence[dict]) -> dict[float, list[dict]]:
    """{budget: its points, by size}, budgets in order."""
    ordered = sorted(points, key=itemgetter("budget_flops", "params"))
    return {budget: list(rows) for budget, rows in groupby(ordered, key=itemgetter("budget_flops"))}


def parabola(points: Sequence[dict]) -> Optimum:
    """The `Optimum` of one budget's points. Raises ValueError for fewer than three sizes, or where the curve has no
    bottom."""
    sizes = {point["params"] for point in points}
    if len(sizes) < 3:
        raise ValueError(f"{len(sizes)} sizes make no parabola; train at least 3 for each budget")
    x = np.log([point["params"] for point in points])
    coefficients = np.polyfit(x, [point["val_loss"] for point in points], 2)
    bend, slope, _ = coefficients
    if bend <= 0:
        raise ValueError(
            f"the losses of {points[0]['budget_flops']:.0e} FLOPs have no lowest point; try smaller and larger models"
        )
    best = -slope / (2 * bend)
    lowest = float(np.polyval(coefficients, best))
    return Optimum(points[0]["budget_flops"], math.exp(best), lowest, tuple(map(float, coefficients)))


def power_law(optima: Sequence[Optimum]) -> PowerLaw:
    """The straight lines through the logarithms of the optima. Raises ValueError for fewer than two."""
    if len(optima) < 2:
        raise ValueError(f"{len(optima)} budget makes no line; use at least 2")
    budgets = np.log([optimum.budget_flops for optimum in optima])
    exponent, scale = np.polyfit(budgets, np.log([optimum.params for optimum in optima]), 1)
    loss_exponent, loss_scale = np.polyfit(budgets, np.log([optimum.loss for optimum in optima]), 1)
    return PowerLaw(math.exp(scale), float(exponent), math.exp(loss_scale), float(loss_exponent))


def residuals(points: Sequence[dict]) -> tuple[float, list[float]]:
    """(their standard deviation over all budgets, with three parameters taken by each parabola; the residuals)."""
    found, fitted = [], by_budget(points)
    for rows in fitted.values():
        optimum = parabola(rows)
        found += [row["val_loss"] - float(optimum.curve(row["params"])) for row in rows]
    free = len(found) - 3 * len(fitted)
    if free < 1:
        raise ValueError(f"{len(found)} points leave nothing to judge the noise by; use more than 3 per budget")
    return math.sqrt(sum(r * r for r in found) / free), found


def spread(
    points: Sequence[dict], draws: int = 1000, share: float = 0.9, seed: int = 0, ahead: float = 10.0
) -> dict[str, tuple[float, float]]:
    """Ranges that hold `share` of the fits to `draws` grids: the fitted parabolas plus noise as large as the residuals.

    {"exponent": (low, high), "params": ..., "loss": ...}: the last two at `ahead` times the largest budget. A draw
    without a lowest point in each budget is drawn again, up to ten times as often. Raises ValueError.
    """
    sigma, _ = residuals(points)
    grids = by_budget(points)
    optima = {budget: parabola(rows) for budget, rows in grids.items()}
    rng, found, target = np.random.default_rng(seed), [], ahead * max(grids)
    for _ in range(10 * draws):
        if len(found) == draws:
            break
        drawn = [
            {**row, "val_loss": float(optima[budget].curve(row["params"])) + rng.normal(0, sigma)}
            for budget, rows in grids.items()
            for row in rows
        ]
        try:
            law = power_law([parabola(rows) for rows in by_budget(drawn).values()])
        except ValueError:
            continue
        found.append((law.exponent, *law.at(target)))
    if not found:
        raise ValueError("no draw had a lowest point in each budget: the noise is as large as the curves are deep")
    edges = np.quantile(found, [(1 - share) / 2, (1 + share) / 2], axis=0)
    return {
        name: (float(low), float(high)) for name, low, high in zip(("exponent", "params", "loss"), *edges, strict=True)
    }
