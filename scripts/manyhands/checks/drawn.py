"""Numbers and models that every rank can draw by itself, from seeds that say the rank: so all know the right answer.

    for case in in_turn([(3, 4), (5, 2)]):                       # the second time in another order
        n, m = sizes(1, 2, least=2, most=20)                     # unequal, without a common divisor
        x_nm, first = normal(2, n, m), luck(3).randrange(n)      # other numbers the second time

A check with another seed draws all of them anew. An answer is judged twice, the second time with other numbers, in
another order, of the same sizes: who keeps sums by their shape is found.

And a model that sees how an answer calls it (Watched), and what the gradient of a loss over tokens should be.
"""

import math
import random
import weakref

import torch
import torch.nn.functional as F
from torch import nn

from manyhands.checks import TURN, Wrong
from manyhands.checks.expect import expect_tensor

CLOSE = 1e-6  # of the largest: a count divided by a count is a float32, and right all the same
IGNORED = -100  # the target of a position that does not count, as F.cross_entropy has it


def generator(seed):
    """A torch.Generator for this seed, of this turn of the check."""
    return torch.Generator().manual_seed(_of_turn(seed))


def luck(seed):
    """A random.Random for this seed, of this turn of the check."""
    return random.Random(_of_turn(seed))


def normal(seed, *shape, dtype=torch.float64):
    """Normally distributed numbers of a shape."""
    return torch.randn(*shape, generator=generator(seed), dtype=dtype)


def seeded(make, seed):
    """What `make()` draws after this seed; the generator of the process is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(_of_turn(seed))  # the CPU's alone: others' are far slower to seed
        return make()


def sizes(seed, how_many, least=2, most=20):
    """Unequal sizes from least to most, no two of which have a common divisor; in both turns of a check the same."""
    whole_check, _ = TURN.get()
    draws = random.Random(1_000_003 * whole_check + seed)
    while True:
        found = draws.sample(range(least, most + 1), how_many)
        if math.prod(found) == math.lcm(*found):
            return found


def in_turn(cases):
    """A list of cases as it stands the first time, and back to front the second."""
    _, turn = TURN.get()
    return list(cases)[:: -1 if turn else 1]


def _of_turn(seed):
    whole_check, turn = TURN.get()
    return seed + 1_000_003 * (2 * whole_check + turn)


def flat(tensors):
    """All numbers of some tensors in one row, a copy."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def gradients(model, cure="run a backward pass for each micro-batch"):
    """The gradients of a model's parameters in one row; raise Wrong with the cure where one has none."""
    found = [p.grad for p in model.parameters()]
    if any(gradient is None for gradient in found):
        raise Wrong(f"some gradients are None: {cure}")
    return flat(found)


def expect_token_mean(found, make, parts, what="the row of all gradients"):
    """Raise Wrong unless `found` is the gradient of make() for the mean over all targets that count.

    parts: of each rank its micro-batches, pairs of inputs and targets.
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
        f"{m} times too large: that is the number of micro-batches": m,
        f"{m} times too small: that is the number of micro-batches": 1 / m,
        counted: tokens / rows,
        f"{counted}; and {mean}": tokens / rows / n,
        "the number of tokens divides the sum of the losses": tokens,
    }
    slips = {
        f"that is the mean of the ranks' means: the ranks have {list(map(_tokens, parts))} tokens, and one of a rank "
        "with few counts more than one of a rank with many": sum(_token_mean(make, p) for p in of_ranks) / n,
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
    """The gradient of make() for the mean over all targets that count, in one process."""
    model = make()
    losses = [F.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction="sum") for x, y in batches]
    (sum(losses) / _tokens(batches)).backward()
    return gradients(model)


class Watched(nn.Module):
    """Calls `model`, and counts its forward passes and those whose activations are in memory at the same time.

    forwards: passes with a graph; largest: the most rows in one of them; graphs: those alive; most: as many at once. A
    graph lives until a backward pass frees what it saved, so one that is retained does not count as done.
    """

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.begin()

    def begin(self):
        """Count anew."""
        self.graphs, self.most, self.forwards, self.largest = weakref.WeakSet(), 0, 0, 0

    def forward(self, x):
        graph = _Graph()
        self.graphs.add(graph)
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: (graph, saved), lambda kept: kept[1]):
            outputs = self.model(x)
        if outputs.requires_grad:  # else nothing keeps it
            self.forwards += 1
            self.most, self.largest = max(self.most, len(self.graphs)), max(self.largest, len(x))
        return outputs

    def expect_one_at_a_time(self, rows, done):
        """Raise Wrong where more than the rows of a micro-batch were in memory at once, {done}: "it is right"."""
        if self.largest > rows:
            raise Wrong(f"{done}, but the model was given {self.largest} rows at once, and a micro-batch has {rows}")
        if self.most > 1:
            raise Wrong(
                f"{done}, but the activations of {self.most} micro-batches were in memory at once; call backward "
                "before the next forward, and let it free the graph"
            )


class _Graph:
    """Of one forward pass: whatever it saves for backward holds this as well, and nobody else does."""
