"""Build a run's optimizer, with its learning rate, gradient clipping and fp16's loss scale.

optimizer = build_optimizer(parallel, options)
norm = global_norm(parameters)                        # collective; the same 0-dim tensor on all ranks
norm = clip_gradients(parameters, norm, max_norm=1.0)           # in place, local
set_learning_rate(optimizer, learning_rate(step, options))
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from manyhands.config.options import Options
from manyhands.measure.tensor_bytes import local_part

WARMUP_SHARE, WARMUP_MOST = 20, 100  # warm-up by itself: a twentieth of the run, at most 100 steps
TINY = 1e-6  # what torch.nn.utils.clip_grad_norm_ adds to the norm before it divides


def learning_rate(step: int, options: Options) -> float:
    """Return the rate of step 0, 1, ...: linear up to its peak, then half a cosine to `min_lr` at the last step."""
    optimizer, steps = options.optimizer, options.train.steps
    warmup = min(WARMUP_MOST, steps // WARMUP_SHARE) if optimizer.warmup is None else optimizer.warmup
    if step < warmup:
        return optimizer.lr * (step + 1) / (warmup + 1)
    least = optimizer.lr / 10 if optimizer.min_lr is None else optimizer.min_lr
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return least + (optimizer.lr - least) * (1 + math.cos(math.pi * min(1, done))) / 2


def set_learning_rate(optimizer: Any, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def build_optimizer(parallel: Any, options: Options) -> Any:
    """AdamW (fused) or SGD over this rank's parameters; decay on matrices only. All ranks must call it."""
    if parallel.optimizer is not None:
        return parallel.optimizer
    wanted = options.optimizer
    by_kind: dict[Any, list[torch.Tensor]] = {}
    for parameter, decays in parallel.optimizer_parts():
        # one group per mesh: torch's fused and foreach kernels take no mixture of DTensors and plain tensors
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        by_kind.setdefault((decays, mesh), []).append(parameter)
    groups = [
        {"params": members, "weight_decay": wanted.weight_decay if decays else 0.0}
        for (decays, _), members in by_kind.items()
    ]
    if wanted.name == "sgd":
        return parallel.make_optimizer(torch.optim.SGD, groups, lr=wanted.lr)
    betas = wanted.beta1, wanted.beta2
    return parallel.make_optimizer(torch.optim.AdamW, groups, lr=wanted.lr, betas=betas, fused=True)


def ensure_state(optimizer: torch.optim.Optimizer) -> None:
    """Give AdamW its state before its first step, so that a checkpoint can be loaded into it."""
    if not isinstance(optimizer, torch.optim.AdamW):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state.get(parameter):
                step = torch.zeros((), device=parameter.device if group["fused"] else "cpu")
                moments = {slot: torch.zeros_like(parameter) for slot in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = {"step": step, **moments}


@torch.no_grad()
def global_norm(parameters: Iterable[nn.Parameter], pipeline_group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the 2-norm of all gradients, a 0-dim float64 tensor that is equal on all ranks. All ranks must call it.

    A rank's local shards have a norm too, and it is not the model's: clipped by it, ranks scale their shards
    differently and by too little (torchtitan#766, pytorch#170862). Sums of squares add up over exactly those mesh axes
    that a gradient is sharded on; where it is replicated, every replica has the whole.

    `parameters` are this rank's: plain tensors, which all ranks (of a pipeline stage) hold whole, and DTensors, on one
    mesh or several. `pipeline_group`: the ranks that hold the other stages, None without a pipeline.
    """
    # {the groups whose ranks hold the other shares, innermost axis first: local gradients that are cut in this way}
    cut: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for gradient in (p.grad for p in parameters if p.grad is not None):
        groups = _shard_groups(gradient) + ([pipeline_group] if pipeline_group is not None else [])
        cut.setdefault(tuple(groups), []).append(local_part(gradient))
    # in float64: the square of a large float32 norm would overflow; an empty share counts as 0
    sums = {groups: torch.stack(torch._foreach_norm(g)).double().square().sum() for groups, g in cut.items()}
    while any(sums):  # an all-reduce per group, whatever is sharded on it
        # an inner group first: then its sum joins that of what is sharded on the outer ones alone
        group = max(sums, key=len)[0]
        members = [groups for groups in sums if group in groups]
        flat = torch.stack([sums.pop(groups) for groups in members])
        dist.all_reduce(flat, group=group)
        for groups, total in zip(members, flat, strict=True):
            rest = tuple(g for g in groups if g is not group)
            sums[rest] = sums.get(rest, 0) + total
    return sums[()].sqrt()


def _shard_groups(gradient):
    """Return the groups over which a gradient is sharded, innermost axis first."""
    if not isinstance(gradient, DTensor):
        return []
    mesh, placements = gradient.device_mesh, gradient.placements
    assert not any(p.is_partial() for p in placements), f"{placements}: partial sums have no norm yet, reduce them"
    axes = [axis for axis, p in enumerate(placements) if not p.is_replicate() and mesh.size(axis) > 1]
    return [mesh.get_group(axis) for axis in reversed(axes)]


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter], norm: torch.Tensor, max_norm: float, loss_scale: float = 1.0
) -> torch.Tensor:
    """Divide gradients by `loss_scale` and scale them, in place, to a global norm of at most `max_norm` (0: any).

    `norm` is that of the gradients as they are, with the loss scale in them; returns the norm without it. A norm that
    is not finite leaves the gradients as they are. Nothing waits for the device: the decision is taken on it.
    """
    norm = norm / loss_scale
    if max_norm == 0 and loss_scale == 1.0:
        return norm
    factor = (max_norm / (norm + TINY)).clamp(max=1.0) if max_norm > 0 else torch.ones_like(norm)
    factor = torch.where(norm.isfinite(), factor / loss_scale, 1.0)
    gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    torch._foreach_mul_(gradients, factor.to(gradients[0]))
    return norm


class LossScale:
    """The loss scale of fp16, which has no numbers below 6e-8: the loss is multiplied, and gradients are divided again.

    The scale doubles after 1,000 good steps and halves after one whose gradients overflowed, which is not taken
    (Micikevicius et al. 2018, section 3.2). The decision depends on the global gradient norm, so all ranks agree.
    """

    def __init__(self, scale: float = 2.0**16, patience: int = 1000) -> None:
        self.scale, self.patience, self.good_steps = scale, patience, 0

    def take(self, norm: float) -> bool:
        """Return whether to take this step, given its global gradient norm."""
        if not math.isfinite(norm):
            self.scale, self.good_steps = self.scale / 2, 0
            return False
        self.good_steps += 1
        if self.good_steps == self.patience:
            self.scale, self.good_steps = self.scale * 2, 0
        return True

    def state(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.scale, self.good_steps = state["scale"], state["good_steps"]
