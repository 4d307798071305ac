"""Plain data parallelism: replicas of a model on all ranks, with gradients averaged once per step.

    replicas = Replicas(model)                      # torch's DDP; all ranks, with equal weights
    for i, (ids, targets) in enumerate(shares):
        last = i == len(shares) - 1
        loss = replicas(ids, targets, last=last)[1] / len(shares)
        replicas.backward(loss, last)               # the last one also averages over the ranks

    replicas = FlatReplicas(model)                  # for ranks on CPUs: one vector, one all-reduce
    optimizer = AdamW([part for part, _ in replicas.parts], fused=True)

`fsdp.Sharded` has the same interface for shards, and `NoParallel` for a model on one rank.
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

# torch 2.13 renamed it and warns of the old name
SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)


def sum_over(flat: torch.Tensor, group: dist.ProcessGroup | None = None, reduce_dtype: str = "own") -> None:
    """Sum `flat` over a group in place, as `parallel.reduce_dtype` says. All its ranks call it."""
    sent = flat.bfloat16() if reduce_dtype == "bf16" else flat
    dist.all_reduce(sent, group=group)
    if sent is not flat:
        flat.copy_(sent)


def averaged_in_bf16(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of DDP's over the ranks in bf16. torch's own such hook refuses other backends than NCCL."""
    gradients = bucket.buffer()
    sent = gradients.bfloat16().div_(dist.get_world_size())
    sending = dist.all_reduce(sent, async_op=True)
    assert sending is not None
    return sending.get_future().then(lambda done: gradients.copy_(done.value()[0]))


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

    def __init__(self, model: nn.Module, reduce_dtype: str = "own") -> None:
        # gradients are views of the buckets that are sent, without copies
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(spread_weights(model)))
        # the only buffers are the experts' biases, which all ranks update equally
        own_buffers: dict[str, Any] = {SYNC_BUFFERS: False}
        super().__init__(DistributedDataParallel(model, gradient_as_bucket_view=True, **own_buffers))
        if reduce_dtype == "bf16":
            self.model.register_comm_hook(None, averaged_in_bf16)

    def __call__(self, *args: torch.Tensor, last: bool = True) -> Any:
        # as in DDP.no_sync(), but before the forward too: around the backward alone it has no effect
        # (build-nanogpt#30), because DDP decides in the forward
        self.model.require_backward_grad_sync = last
        return self.model(*args)


class FlatReplicas(NoParallel):
    """Replicas for ranks on CPUs: all parameters in one vector, all gradients in another, one all-reduce per step.

    If the computing cores also send, communication slows the backward down by as much as it hides, so buckets and
    overlap gain nothing, but few large kernels do. The model's parameters and their `.grad` are views of the vectors
    and can be read as usual. A `.grad` that `zero_grad` dropped is attached again. Over all ranks of the default group.
    Raises ValueError if the parameters have several dtypes or devices.
    """

    def __init__(self, model: nn.Module, reduce_dtype: str = "own") -> None:
        super().__init__(model)
        self.reduce_dtype = reduce_dtype
        left = spread_weights(model)  # experts, which differ between ranks
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad and n not in left]  # tied ones once
        if len({(p.dtype, p.device) for _, p in named}) != 1:
            raise ValueError("parameters of one dtype on one device fit into one vector; use DDP for others")
        named.sort(key=lambda pair: pair[1].ndim < 2)  # matrices first: only they have weight decay
        self.values = torch.cat([p.detach().flatten() for _, p in named])
        self.gradients = torch.zeros_like(self.values)
        self.places = {}  # {name: (part, where it begins there, shape)}
        self.parts: list[tuple[nn.Parameter, bool]] = []  # (vector of parameters, whether it has weight decay)
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
        # the shares were divided before, so their sum is the mean: one message, no further pass
        (loss / self.world_size).backward()
        if last:
            self.add_up()

    def attach(self) -> None:
        """Attach each parameter's share of the gradient vector again, filled with zeros."""
        for parameter, gradient in self._attached:
            if parameter.grad is None:
                parameter.grad = gradient.zero_()

    def add_up(self) -> None:
        """Sum the gradients over the ranks. All ranks call it."""
        if self.world_size > 1:
            sum_over(self.gradients, None, self.reduce_dtype)

    def cut(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """Return an optimizer's state over `parts` per parameter, as views that loading can write through."""
        ensure_state(optimizer)
        states = [optimizer.state.get(part, {}) for part, _ in self.parts]
        slots = [slot for slot, value in states[0].items() if isinstance(value, torch.Tensor)]
        parts = {slot: [state[slot] for state in states] for slot in slots}
        return {f"{name}.{slot}": self.view(name, of) for name in self.places for slot, of in parts.items()}

    def view(self, name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the share of parameter `name` in `tensors`, one per part, such as AdamW's moments; keep 0-dim ones."""
        part, at, shape = self.places[name]
        whole = tensors[part]
        return whole if whole.ndim == 0 else whole[at : at + shape.numel()].view(shape)
