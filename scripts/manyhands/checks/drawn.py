"""Draw numbers and models from seeds that contain the rank, so that every rank can compute the right answer.

    for case in in_turn([(3, 4), (5, 2)]):                       # reversed in the second trial
        n, m = sizes(1, 2, least=2, most=20)                     # unequal and coprime
        x_nm, first = normal(2, n, m), luck(3).randrange(n)      # different in the second trial

A different seed of the check draws everything again. An answer is judged twice: the second trial has different numbers
of the same sizes in another order. This finds an answer that caches results by shape.

`Watched` is a model that records how an answer calls it. `expect_token_mean` checks the gradient of a loss over tokens.
"""

import math
import random
import weakref

import torch
import torch.nn.functional as F
from torch import nn

from manyhands.checks import TURN, Wrong
from manyhands.checks.expect import expect_tensor

CLOSE = 1e-6  # relative to the largest: a quotient of two counts may be a float32
IGNORED = -100  # the target of an ignored position, as in F.cross_entropy


def generator(seed):
    """Return a torch.Generator for this seed and this trial of the check."""
    return torch.Generator().manual_seed(_of_turn(seed))


def luck(seed):
    """Return a random.Random for this seed and this trial of the check."""
    return random.Random(_of_turn(seed))


def normal(seed, *shape, dtype=torch.float64):
    """Return normally distributed numbers of the given shape."""
    return torch.randn(*shape, generator=generator(seed), dtype=dtype)


def seeded(make, seed):
    """Return what `make()` draws after this seed, leaving the process's generator unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(_of_turn(seed))  # only the CPU's generator: others are far slower to seed
        return make()


def sizes(seed, how_many, least=2, most=20):
    """Return unequal, pairwise coprime sizes from least to most, the same in both trials of a check."""
    whole_check, _ = TURN.get()
    draws = random.Random(1_000_003 * whole_check + seed)
    while True:
        found = draws.sample(range(least, most + 1), how_many)
        if math.prod(found) == math.lcm(*found):
            return found


def in_turn(cases):
    """Return the cases in order in the first trial and reversed in the second."""
    _, turn = TURN.get()
    return list(cases)[:: -1 if turn else 1]


def _of_turn(seed):
    whole_check, turn = TURN.get()
    return seed + 1_000_003 * (2 * whole_check + turn)


def flat(tensors):
    """Return all numbers of some tensors as one flat copy."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def gradients(model, cure="run a backward pass for each micro-batch"):
    """Return a model's gradients as one flat row; raise Wrong with the cure if a parameter has none."""
    found = [p.grad for p in model.parameters()]
    if any(gradient is None for gradient in found):
        raise Wrong(f"some gradients are None: {cure}")
    return flat(found)


def expect_token_mean(found, make, parts, what="the row of all gradients"):
    """Raise Wrong unless `found` is the gradient of make() for the mean over all targets that count.

    parts: for each rank, its micro-batches as pairs of inputs and targets.
    """
    n, m, every = len(parts), len(parts[0]), sum(parts, [])
    wanted, tokens, rows = _token_mean(make, every), _tokens(every), sum(y.numel() for _, y in every)
    if not found.isfinite().all():
        raise Wrong(
            f"{what} became nan: where a {'micro-batch' if m > 1 else 'rank'} has no token, its mean is 0/0; divide "
            "its sum by the number of all tokens"
        )
    of_ranks, of_batches = ([p for p in cut if _tokens(p)] for cut in (parts, [[batch] for batch in every]))
    mean = "DDP takes the mean over the ranks, and the count is that of all ranks"
    counted = f"{rows} targets were counted, and {tokens} of them are not {IGNORED}"
    factors = {
        f"{n} times too large: {mean}": n,
        f"{n} times too small: {mean}; multiply the loss by the number of ranks": 1 / n,
        f"{n * n} times too small: {mean}; multiply the loss by the number of ranks, and do not divide": 1 / n**2,
        f"{m} times too large: that is the number of micro-batches": m,
        f"{m} times too small: that is the number of micro-batches": 1 / m,
        counted: tokens / rows,
        f"{counted}; and {mean}": tokens / rows / n,
        "the number of tokens divides the sum of the losses": tokens,
        "the number of tokens divides the sum of the losses, and the number of ranks multiplies it": tokens / n,
    }
    of_means = sum(_token_mean(make, p) for p in of_ranks)
    slips = {
        f"that is the mean of the ranks' means: the ranks have {list(map(_tokens, parts))} tokens, and one of a rank "
        "with few counts more than one of a rank with many": of_means / n,
        "that is the sum of the ranks' means: divide by the count of all ranks, not by a rank's own": of_means,
        "that is the mean of the micro-batches' means: a token of a short micro-batch counts more than one of a long": (
            sum(_token_mean(make, p) for p in of_batches) / len(every)
        ),
        **{why: factor * wanted for why, factor in factors.items()},
    }
    close = CLOSE * min(1.0, wanted.abs().max().item())
    expect_tensor(found, wanted, what, slips, "that of the mean over all tokens", close)


def _tokens(batches):
    return sum(int((y != IGNORED).sum()) for _, y in batches)


def _token_mean(make, batches):
    """Return the gradient of make() for the mean over all counted targets, in one process."""
    model = make()
    losses = [F.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction="sum") for x, y in batches]
    (sum(losses) / _tokens(batches)).backward()
    return gradients(model)


class Watched(nn.Module):
    """Call `model` and count its forward passes and those whose activations are in memory at the same time.

    forwards: passes with a graph; largest: the most rows in one of them; graphs: live graphs now; most: the most live
    graphs at once. A graph lives until a backward pass frees its saved tensors, so a retained one counts as live.
    """

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.begin()

    def begin(self):
        """Reset the counters."""
        self.graphs, self.most, self.forwards, self.largest = weakref.WeakSet(), 0, 0, 0

    def forward(self, x):
        graph = _Graph()
        self.graphs.add(graph)
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: (graph, saved), lambda kept: kept[1]):
            outputs = self.model(x)
        if outputs.requires_grad:  # nothing else references it
            self.forwards += 1
            self.most, self.largest = max(self.most, len(self.graphs)), max(self.largest, len(x))
        return outputs

    def expect_one_at_a_time(self, rows, done):
        """Raise Wrong if more than one micro-batch was in memory at once; `done` begins the sentence: "it is right"."""
        if self.largest > rows:
            raise Wrong(f"{done}, but the model was given {self.largest} rows at once, and a micro-batch has {rows}")
        if self.most > 1:
            raise Wrong(
                f"{done}, but the activations of {self.most} micro-batches were in memory at once; call backward "
                "before the next forward, and let it free the graph"
            )


class _Graph:
    """A marker of one forward pass: only its saved tensors reference it."""
