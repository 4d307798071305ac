"""The optimizer of a training run, its learning rate, and its state under names that no strategy changes.

A state tensor is called "<parameter>.<slot>", such as "blocks.0.mlp.up.weight.exp_avg", and lies as its parameter does
(a DTensor where that is one). So what one strategy saved, another can load.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from manyhands.config.options import Options

WARMUP_SHARE, WARMUP_MOST = 20, 100  # warm-up by itself: a twentieth of the run, at most 100 steps


def learning_rate(step: int, options: Options) -> float:
    """Of step 0, 1, ...: linear up to its peak, then half a cosine down to `min_lr` at the last step."""
    optimizer, steps = options.optimizer, options.train.steps
    warmup = warmup_steps(options)
    if step < warmup:
        return optimizer.lr * (step + 1) / (warmup + 1)
    least = optimizer.lr / 10 if optimizer.min_lr is None else optimizer.min_lr
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return least + (optimizer.lr - least) * (1 + math.cos(math.pi * min(1, done))) / 2


def warmup_steps(options: Options) -> int:
    if options.optimizer.warmup is not None:
        return options.optimizer.warmup
    return min(WARMUP_MOST, options.train.steps // WARMUP_SHARE)


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
    return parallel.make_optimizer(
        torch.optim.AdamW, groups, lr=wanted.lr, betas=(wanted.beta1, wanted.beta2), fused=True
    )


def ensure_state(optimizer: torch.optim.Optimizer) -> None:
    """Give AdamW its state before its first step, so that a checkpoint can be loaded into it."""
    if not isinstance(optimizer, torch.optim.AdamW):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in optimizer.state or not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device if group["fused"] else "cpu"),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def named_state(
    named_parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """{"<parameter>.<slot>": tensor}: the very tensors that the optimizer works on."""
    ensure_state(optimizer)
    return {
        f"{name}.{slot}": value
        for name, parameter in named_parameters.items()
        for slot, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }


class LossScale:
    """fp16 keeps nothing under 6e-8: the loss is multiplied so that gradients stay above, and divided out again.

    The scale doubles after 1,000 good steps and halves after one whose gradients overflowed, which is not taken
    (Micikevicius et al. 2018, section 3.2). The decision hangs on the global gradient norm, so all ranks agree.
    """

    def __init__(self, scale: float = 2.0**16, patience: int = 1000) -> None:
        self.scale, self.patience, self.good_steps, self.skipped = scale, patience, 0, 0

    def take(self, norm: float) -> bool:
        """Whether to take this step, given its global gradient norm."""
        if math.isfinite(norm):
            self.good_steps += 1
            if self.good_steps == self.patience:
                self.scale, self.good_steps = self.scale * 2, 0
            return True
        self.scale, self.good_steps, self.skipped = self.scale / 2, 0, self.skipped + 1
        return False

    def state(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.scale, self.good_steps = state["scale"], state["good_steps"]
