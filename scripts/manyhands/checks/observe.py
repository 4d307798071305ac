"""What an answer does while it runs: when it waits for messages, and which graphs it keeps in memory."""

import weakref
from unittest import mock

import torch
import torch.distributed as dist


class Waits:
    """Notes when this process waits for a message while the block runs, itself or in a call that does so.

    calls: the calls that were watched so far, a list that grows (`wire.watch`). `after`: how many of them had been made
    at each wait, in order; empty if there was none.
    """

    def __init__(self, calls):
        self.after, wait = [], dist.Work.wait

        def noted(work, *args, **kwargs):
            self.after.append(len(calls))
            return wait(work, *args, **kwargs)

        self._patch = mock.patch.object(dist.Work, "wait", noted)

    def __enter__(self):
        self._patch.start()
        return self

    def __exit__(self, *error):
        self._patch.stop()


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
