"""Replicas of a model on all ranks, whose gradients are averaged once per step: plain data parallelism.

    replicas = Replicas(model)                      # torch's DDP; all ranks, with equal weights
    for i, (ids, targets) in enumerate(shares):
        last = i == len(shares) - 1
        loss = replicas(ids, targets, last=last)[1] / len(shares)
        replicas.backward(loss, last)               # the last one also averages over the ranks

    replicas = FlatReplicas(model)                  # for ranks on CPUs: one vector, one all-reduce
    optimizer = AdamW([part for part, _ in replicas.parts], fused=True)

`fsdp.Sharded` has the same interface for shards, and `NoParallel` for a model that one rank has for itself.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from manyhands.parallel.experts import spread_weights
from manyhands.parallel.optimizer import ensure_state

# torch 2.13 has another name for it, and warns of the old one
SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)


class NoParallel:
    """The only replica of a model: nothing is averaged."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model

    def __call__(self, *args: torch.Tensor, last: bool = True) -> Any:
        return self.model(*args)

    def backward(self, loss: torch.Tensor, last: bool = True) -> None:
        """Add the gradients of `loss` to `.grad`; after the `last` micro-batch they are those of all ranks."""
        loss.backward()


class Replicas(NoParallel):
    """torch's DistributedDataParallel (Li et al. 2020): buckets of gradients are sent while the backward goes on."""

    def __init__(self, model: nn.Module) -> None:
        # the gradients are views of the buckets that are sent: nothing is held or copied twice
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(spread_weights(model)))
        # the only buffers are the experts' biases, which all ranks move alike
        own_buffers: dict[str, Any] = {SYNC_BUFFERS: False}
        super().__init__(DistributedDataParallel(model, gradient_as_bucket_view=True, **own_buffers))

    def __call__(self, *args: torch.Tensor, last: bool = True) -> Any:
        # what DDP.no_sync() sets, but before the forward too: around the backward alone it would do nothing
        # (build-nanogpt#30), because DDP decides in the forward
        self.model.require_backward_grad_sync = last
        return self.model(*args)


class FlatReplicas(NoParallel):
    """Replicas for ranks on CPUs: all parameters in one vector, all gradients in another, one all-reduce per step.

    Where the ranks compute on the very cores that would send, a message under way slows the backward down by as much as
    it hides, so buckets and overlap gain nothing; few large kernels do. The model's parameters and their `.grad` are
    views of the vectors: whoever reads them sees what one always sees. A `.grad` that `zero_grad` dropped is attached
    again. Over all ranks of the default group. Raises ValueError if the parameters have several dtypes or devices.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        left = spread_weights(model)  # experts that each rank has others of
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad and n not in left]  # a tied one once
        if len({(p.dtype, p.device) for _, p in named}) != 1:
            raise ValueError("parameters of one dtype on one device fit into one vector; use DDP for others")
        named.sort(key=lambda pair: pair[1].ndim < 2)  # matrices first: they decay, the rest does not
        self.values = torch.cat([p.detach().flatten() for _, p in named])
        self.gradients = torch.zeros_like(self.values)
        self.places = {}  # {name: (part, where it begins there, shape)}
        self.parts: list[tuple[nn.Parameter, bool]] = []  # (vector of parameters, does it decay?)
        self._attached = []  # (parameter or part, its share of the gradients)
        at = 0
        for decays in (True, False):
            begin = at
            for name, p in (pair for pair in named if (pair[1].ndim >= 2) == decays):
                self.places[name] = (len(self.parts), at - begin, p.shape)
                share = slice(at, at + p.numel())
                p.data = self.values[share].view_as(p)
                self._attached.append((p, self.gradients[share].view_as(p)))
                at = share.stop
            if at > begin:
                part = nn.Parameter(self.values[begin:at])
                self.parts.append((part, decays))
                self._attached.insert(0, (part, self.gradients[begin:at]))
        self.world_size = dist.get_world_size()

    def backward(self, loss: torch.Tensor, last: bool = True) -> None:
        """After the last micro-batch of a step, and only then, ranks add up gradients. All ranks call it."""
        self.attach()
        # the mean over the ranks is the sum of shares that are divided before: one message, and no pass over it
        (loss / self.world_size).backward()
        if last:
            self.add_up()

    def attach(self) -> None:
        """Give each parameter its share of the vector of gradients again, filled with zeros."""
        for parameter, gradient in self._attached:
            if parameter.grad is None:
                parameter.grad = gradient.zero_()

    def add_up(self) -> None:
        """Sum the gradients over the ranks. All ranks call it."""
        if self.world_size > 1:
            dist.all_reduce(self.gradients)

    def cut(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """An optimizer's state over `parts` as that of the parameters in them: views, which loading writes through."""
        ensure_state(optimizer)
        states = [optimizer.state.get(part, {}) for part, _ in self.parts]
        slots = [slot for slot, value in states[0].items() if isinstance(value, torch.Tensor)]
        parts = {slot: [state[slot] for state in states] for slot in slots}
        return {f"{name}.{slot}": self.view(name, of) for name in self.places for slot, of in parts.items()}

    def view(self, name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The share of parameter `name` in `tensors`, one per part, such as AdamW's moments; a 0-dim one as it is."""
        part, at, shape = self.places[name]
        whole = tensors[part]
        return whole if whole.ndim == 0 else whole[at : at + shape.numel()].view(shape)
