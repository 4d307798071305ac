"""The optimizer of a training run, its learning rate, and its state under names that no strategy changes.

A state tensor is called "<parameter>.<slot>", such as "blocks.0.mlp.up.weight.exp_avg", and lies as its parameter does
(a DTensor where that is one). So what one strategy saved, another can load.
"""

import math
import warnings

import torch
from torch.distributed.tensor import DTensor

WARMUP_SHARE, WARMUP_MOST = 20, 100  # warm-up by itself: a twentieth of the run, at most 100 steps


def learning_rate(step, options):
    """The learning rate of step 0, 1, ...: linear up to its peak, then half a cosine down to `min_lr` at the last step."""
    optimizer, steps = options.optimizer, options.train.steps
    warmup = warmup_steps(options)
    if step < warmup:
        return optimizer.lr * (step + 1) / (warmup + 1)
    least = optimizer.lr / 10 if optimizer.min_lr is None else optimizer.min_lr
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return least + (optimizer.lr - least) * (1 + math.cos(math.pi * min(1, done))) / 2


def warmup_steps(options):
    if options.optimizer.warmup is not None:
        return options.optimizer.warmup
    return min(WARMUP_MOST, options.train.steps // WARMUP_SHARE)


def set_learning_rate(optimizer, lr):
    for group in optimizer.param_groups:
        group["lr"] = lr


def build_optimizer(parallel, options):
    """AdamW (fused) or SGD over this rank's parameters; decay on matrices only.

    Under zero1 it is a ZeroRedundancyOptimizer: each rank keeps the state of its share of the parameters. All ranks must
    call it.
    """
    if getattr(parallel, "optimizer", None) is not None:
        return parallel.optimizer  # DeepSpeed's engine has its own
    wanted, groups = options.optimizer, {}
    for parameter, decays in _parts(parallel):
        # one group per mesh: torch's fused and foreach kernels take no mixture of DTensors and plain tensors
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((decays, mesh), []).append(parameter)
    groups = [
        {"params": members, "weight_decay": wanted.weight_decay if decays else 0.0}
        for (decays, _), members in groups.items()
    ]
    if wanted.name == "sgd":
        kind, settings = torch.optim.SGD, {"lr": wanted.lr}
    else:
        kind = torch.optim.AdamW
        settings = {"lr": wanted.lr, "betas": (wanted.beta1, wanted.beta2), "fused": True}
    if options.parallel.strategy != "zero1":
        return kind(groups, **settings)
    with warnings.catch_warnings():  # its package compiles old functional optimizers when it is imported
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(groups, optimizer_class=kind, **settings)


def _parts(parallel):
    """[(parameter, does it decay?)] that the optimizer works on: the flat vectors, where there are some."""
    if parallel.flat is not None:
        return parallel.flat.parts
    return [(p, p.ndim >= 2) for p in parallel.named_parameters().values()]


def _own(optimizer):
    """The optimizer that holds this rank's state: a ZeroRedundancyOptimizer has one inside."""
    return getattr(optimizer, "optim", optimizer)


def ensure_state(optimizer):
    """Give AdamW its state before its first step, so that a checkpoint can be loaded into it."""
    own = _own(optimizer)
    if not isinstance(own, torch.optim.AdamW):
        return
    for group in own.param_groups:
        for parameter in group["params"]:
            if parameter not in own.state or not own.state[parameter]:
                own.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device if group["fused"] else "cpu"),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def optimizer_state(parallel, optimizer):
    """{"<parameter>.<slot>": tensor}: the very tensors that this rank's optimizer works on."""
    ensure_state(optimizer)
    state = _own(optimizer).state
    if parallel.flat is not None:
        return _cut(parallel.flat, [state.get(part, {}) for part, _ in parallel.flat.parts])
    return {
        f"{name}.{slot}": value
        for name, parameter in parallel.named_parameters().items()
        for slot, value in state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }


def _cut(flat, states):
    """The state of flat vectors as that of the parameters in them: views, so that loading writes through."""
    slots = [slot for slot, value in states[0].items() if isinstance(value, torch.Tensor)]
    return {
        f"{name}.{slot}": flat.view(name, [state[slot] for state in states])
        for name in flat.places
        for slot in slots
    }


class LossScale:
    """fp16 keeps nothing under 6e-8: the loss is multiplied so that gradients stay above, and divided out again.

    The scale doubles after 1,000 good steps and halves after one whose gradients overflowed, which is not taken
    (Micikevicius et al. 2018, section 3.2). The decision hangs on the global gradient norm, so all ranks agree.
    """

    def __init__(self, scale=2.0**16, patience=1000):
        self.scale, self.patience, self.good_steps, self.skipped = scale, patience, 0, 0

    def take(self, norm):
        """Whether to take this step, given its global gradient norm."""
        if math.isfinite(norm):
            self.good_steps += 1
            if self.good_steps == self.patience:
                self.scale, self.good_steps = self.scale * 2, 0
            return True
        self.scale, self.good_steps, self.skipped = self.scale / 2, 0, self.skipped + 1
        return False

    def state(self):
        return {"scale": self.scale, "good_steps": self.good_steps}

    def restore(self, state):
        self.scale, self.good_steps = state["scale"], state["good_steps"]
