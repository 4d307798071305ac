"""Copies of a model on all ranks, whose gradients are averaged: plain data parallelism by torch's DDP.

    replicas = Replicas(model)                      # all ranks, with equal weights
    for i, (ids, targets) in enumerate(shares):
        with replicas.micro_batch(last=i == len(shares) - 1):
            loss = replicas(ids, targets)[1] / len(shares)
            loss.backward()                         # the last one also averages over the ranks

`flat_ddp` has the same interface for ranks on CPUs.
"""

import contextlib

from torch.nn.parallel import DistributedDataParallel


class Replicas:
    """torch's DistributedDataParallel (Li et al. 2020): buckets of gradients are sent while the backward goes on."""

    def __init__(self, model):
        # the gradients are views of the buckets that are sent: nothing is held or copied twice
        self.ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def __call__(self, *args):
        return self.ddp(*args)

    def micro_batch(self, last):
        """A context for forward *and* backward of a micro-batch. Only the last one of a step is averaged.

        Around the backward alone it would do nothing: DDP decides in the forward (build-nanogpt#30).
        """
        return contextlib.nullcontext() if last else self.ddp.no_sync()
