"""A run whose numbers are none any more ends before such weights are saved."""

import math

import torch
import torch.distributed as dist

from manyhands.measure.tensor_bytes import local_part


class Diverged(RuntimeError):
    """The loss, the gradients or the weights of `run` are no numbers any more: `what`, and the cure."""

    def __init__(self, run, what):
        super().__init__(
            f"{what} at step {run.step}: lower optimizer.lr={run.options.optimizer.lr:g}, or go on from the last"
            " checkpoint with another seed"
        )


def refuse_nan(run, norm):
    """Raises Diverged where the global gradient norm, a 0-dim tensor, is no number: on all ranks, which have the same."""
    if run.scale is None and not math.isfinite(norm.item()):  # fp16 leaves such steps out, and goes on
        raise Diverged(run, f"the gradient norm is {norm.item()}")


def refuse_broken_weights(run, tensors):
    """What the last step made of finite gradients. Raises Diverged on all ranks, which all call it."""
    # the largest number of each: the norm needs no room of its own, and hands a NaN on
    largest = [
        torch.linalg.vector_norm(part, math.inf)
        for part in (local_part(value) for name, value in tensors.items() if name.startswith("model."))
        if part.numel()
    ]
    broken = torch.tensor(int(bool(largest) and not torch.stack(largest).isfinite().all()))
    dist.all_reduce(broken, op=dist.ReduceOp.MAX)  # a shard is one rank's alone: one tells all
    if broken:
        raise Diverged(run, "a weight is no finite number")
