"""Check of lesson 05: do losses betray on how many ranks they were made, or is it rounding?

`three_trainings` trains in one process: a share of the batch stands for a rank, and sums are taken share by share.
"""

import functools
import operator

import torch

from manyhands.checks import Wrong, exercise
from manyhands.checks.values import shown

LIMIT = 1000  # what the lesson allows for rounding, in eps: the relative rounding of one operation
ROUNDING, A_FAULT = 100, 1e4  # well below, well above


@functools.cache
def three_trainings(num_ranks=4, updates=12):
    """{"A", "B", "C": (losses on one rank, losses on `num_ranks`, dtype)}, lists of floats; one of them betrays the number."""
    kinds = {"A": (torch.float32, True), "B": (torch.float32, False), "C": (torch.float64, True)}
    return {
        name: (_train(1, updates, dtype, weigh), _train(num_ranks, updates, dtype, weigh), dtype)
        for name, (dtype, weigh) in kinds.items()
    }


def _train(n, updates, dtype, weigh, classes=6, width=8, rows=960):
    """Losses per row of a linear classifier, trained on n shares; `weigh` False: by the mean of the shares' means."""
    generator = torch.Generator().manual_seed(5)
    truth_DC = torch.randn(width, classes, generator=generator, dtype=torch.float64)
    w_DC = torch.zeros(width, classes, dtype=dtype)
    often_B, losses = torch.linspace(1.0, 0.2, rows), []
    for _ in range(updates):
        x_BD = torch.randn(rows, width, generator=generator, dtype=torch.float64)
        noise_BC = torch.randn(rows, classes, generator=generator, dtype=torch.float64)
        y_B = (x_BD @ truth_DC + noise_BC).argmax(1)
        counts_B = torch.rand(rows, generator=generator) < often_B  # fewer and fewer from the first share on
        gradient_DC, total = torch.zeros_like(w_DC), torch.zeros((), dtype=dtype)
        for x_bD, y_b, counts_b in zip(x_BD.chunk(n), y_B.chunk(n), counts_B.chunk(n), strict=True):
            x_bD, y_b = x_bD[counts_b].to(dtype), y_b[counts_b]
            logs_bC = (x_bD @ w_DC).log_softmax(1)
            wanted_bC = torch.nn.functional.one_hot(y_b, classes).to(dtype)
            share = int(counts_B.sum()) if weigh else n * len(y_b)
            gradient_DC += x_bD.T @ (logs_bC.exp() - wanted_bC) / share
            total -= (logs_bC * wanted_bC).sum(1).cumsum(0)[-1]  # one by one, as it rounds most
        losses.append((total / int(counts_B.sum())).item())
        w_DC -= 0.5 * gradient_DC
    return losses


@exercise(3, "spot the rank count")
def betrays(answer, ranks=None):
    """`answer(one, many, dtype)` is the first update whose loss differs by more than rounding, or None."""
    for one, many, dtype, wanted, why in _cases():
        given = answer(list(one), list(many), dtype)
        if given is not None and (isinstance(given, bool) or not hasattr(given, "__index__")):
            raise Wrong(f"return the number of an update, or None, not {shown(given)}")
        given = None if given is None else operator.index(given)
        if given != wanted:
            told = "None" if given is None else f"update {given}"
            right = "None" if wanted is None else f"update {wanted}"
            raise Wrong(f"{why}: {right}, not {told}")


def _cases():
    """(losses on one rank, on many, dtype, first update that betrays the number of ranks or None, why)."""
    names = {torch.float32: "float32", torch.float64: "float64"}
    for name, (one, many, dtype) in three_trainings().items():
        wanted = next((i for i, (a, b) in enumerate(zip(one, many, strict=True)) if _apart(a, b, dtype)), None)
        why = f"training {name} is {'right' if wanted is None else 'wrong'}, in {names[dtype]}"
        yield one, many, dtype, wanted, why
    falling = [4.0 * 0.97**step for step in range(30)]
    for dtype, name in names.items():
        eps = torch.finfo(dtype).eps
        drift = [a * (1 + (-1) ** i * eps * ROUNDING * i / 30) for i, a in enumerate(falling)]
        yield falling, drift, dtype, None, f"in {name} a difference that grows to {ROUNDING} eps is rounding"
        large = [1000 * a for a in falling]
        drift = [1000 * a for a in drift]
        yield (
            large,
            drift,
            dtype,
            None,
            f"in {name} a loss of 4,000 rounds a thousand times as far as one of 4",
        )
        once = [a * (1 + eps * A_FAULT * (i == 7)) for i, a in enumerate(falling)]
        yield falling, once, dtype, 7, f"in {name} one loss is off by {A_FAULT:g} eps, and later ones are not"
        start = [a * (1 + eps * A_FAULT) for a in falling]
        yield falling, start, dtype, 0, f"in {name} the very first losses differ: they did not start alike"
        below = [a * (1 - eps * A_FAULT * (i >= 3)) for i, a in enumerate(falling)]
        yield falling, below, dtype, 3, f"in {name} the losses of many ranks are too small by {A_FAULT:g} eps"
        lost = falling[:5] + [float("nan")] * 25
        yield falling, lost, dtype, 5, "nan is no rounding"


def _apart(a, b, dtype):
    return not abs(a - b) <= LIMIT * torch.finfo(dtype).eps * abs(a)
