"""Numbers and models that every rank can draw by itself, from seeds that say the rank: so all know the right answer.

And a model that sees how an answer calls it (Watched).
"""

import weakref

import torch
from torch import nn

from manyhands.checks import Wrong


def normal(seed, *shape, dtype=torch.float64):
    """Normally distributed numbers of a shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def seeded(make, seed):
    """What `make()` draws after this seed; the generator of the process is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def flat(tensors):
    """All numbers of some tensors in one row, a copy."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def gradients(model):
    """The gradients of a model's parameters in one row; None where one has none."""
    found = [p.grad for p in model.parameters()]
    return None if any(gradient is None for gradient in found) else flat(found)


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
