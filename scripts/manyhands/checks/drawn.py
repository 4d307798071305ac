"""Numbers and models that every rank can draw by itself, from seeds that say the rank: so all know the right answer.

And how many of a model's graphs an answer keeps in memory (LiveGraphs).
"""

import weakref

import torch


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


class LiveGraphs:
    """Counts forward passes whose activations are in memory at the same time.

    live = LiveGraphs()
    logits = live.run(module, ids)     # module(ids)
    live.most                          # the most graphs that were alive at once, this one included

    A graph lives until a backward pass frees what it saved, so one that is retained does not count as done.
    """

    def __init__(self):
        self.alive, self.most = weakref.WeakSet(), 0

    def run(self, forward, *inputs):
        """forward(*inputs), one tensor, with its graph counted."""
        graph = _Graph()
        self.alive.add(graph)
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: (graph, saved), lambda kept: kept[1]):
            outputs = forward(*inputs)
        if outputs.requires_grad:  # else nothing keeps it
            self.most = max(self.most, len(self.alive))
        return outputs


class _Graph:
    """Of one forward pass: whatever it saves for backward holds this as well, and nobody else does."""
