"""Copies of a model on all ranks, whose gradients are averaged: plain data parallelism by torch's DDP.

    replicas = Replicas(model)                      # all ranks, with equal weights
    for i, (ids, targets) in enumerate(shares):
        last = i == len(shares) - 1
        loss = replicas(ids, targets, last=last)[1] / len(shares)
        replicas.backward(loss, last)               # the last one also averages over the ranks

`flat_ddp` has the same interface for ranks on CPUs, `fsdp` for shards, and `NoParallel` for a model that has no copies.
"""

from torch.nn.parallel import DistributedDataParallel


class NoParallel:
    """The only copy of a model: nothing is averaged."""

    def __init__(self, model):
        self.model = model

    def __call__(self, *args, last=True):
        return self.model(*args)

    def backward(self, loss, last=True):
        loss.backward()


class Replicas(NoParallel):
    """torch's DistributedDataParallel (Li et al. 2020): buckets of gradients are sent while the backward goes on."""

    def __init__(self, model):
        # the gradients are views of the buckets that are sent: nothing is held or copied twice
        super().__init__(DistributedDataParallel(model, gradient_as_bucket_view=True))

    def __call__(self, *args, last=True):
        # what DDP.no_sync() sets, but before the forward too: around the backward alone it would do nothing
        # (build-nanogpt#30), because DDP decides in the forward
        self.model.require_backward_grad_sync = last
        return self.model(*args)
