"""Compare the replicas of a model over the ranks: 0.0 apart means equal to the last bit."""

import torch
import torch.distributed as dist


def flat(tensors):
    """Return the numbers of all these tensors in one row [P], a copy without a gradient."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def spread(tensors):
    """Return the largest difference between any two ranks in any of these numbers, as a float. All ranks call it.

    tensors: an iterable with the same shapes on every rank, such as model.parameters().
    """
    highest_P = flat(tensors).double()
    lowest_P = highest_P.clone()
    dist.all_reduce(highest_P, op=dist.ReduceOp.MAX)
    dist.all_reduce(lowest_P, op=dist.ReduceOp.MIN)
    return (highest_P - lowest_P).max().item()
