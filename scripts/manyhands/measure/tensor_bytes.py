"""Bytes of one rank by kind: what tensors really take, against which `predict.memory`'s formulas are held.

    held = tensor_bytes(model, optimizer)       # Bytes
    print(held.parameters, held.gradients, held.optimizer, held.unsharded_parameters, held.total)

    count_saved(lambda: model(ids, targets), model).bytes       # what autograd keeps for the backward

All bytes are those of one rank.
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Bytes:
    """Bytes of one rank, by kind."""

    parameters: int = 0  # what the optimizer updates
    gradients: int = 0
    optimizer: int = 0  # Adam's moments
    unsharded_parameters: int = 0  # FSDP and ZeRO-3: weights of other ranks that are here for the moment

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def tensor_bytes(model: torch.nn.Module, optimizer=None) -> Bytes:
    """MEASURED: the `Bytes` of this rank's parameters, gradients and optimizer state. Local; no rank waits for another.

    `model` is a module; `optimizer` a torch optimizer, a ZeroRedundancyOptimizer, or an object that has one as an
    attribute (ValueError if it has none). Of a DTensor the local shard counts. Each storage counts once and as a whole:
    views of one buffer (flat vectors, DDP's buckets, FSDP's padded shards) do not count twice, and padding and Adam's
    step counters, 4 bytes per tensor, do count. `unsharded_parameters` are the whole weights that stand where FSDP's
    shards do at other times, between forward and backward; then the optimizer alone knows the shards, so name it. Not
    seen: activations, and copies in another precision.
    """
    own = _optimizers(optimizer)
    whole = _unsharded(model)
    parameters = [p for p in model.parameters() if id(p) not in whole]
    parameters += [p for part in own for group in part.param_groups for p in group["params"]]
    gradients = [p.grad for p in [*parameters, *whole.values()] if p.grad is not None]
    counted = set()  # storages: the first kind that has one keeps it
    return Bytes(
        parameters=_bytes(parameters, counted),
        gradients=_bytes(gradients, counted),
        optimizer=_bytes([tensor for part in own for tensor in _tensors(part.state)], counted),
        unsharded_parameters=_bytes(whole.values(), counted),
    )


def _optimizers(optimizer):
    """The torch optimizers that hold this rank's state: the object itself, or what it is made around."""
    if optimizer is None:
        return []
    inner = getattr(optimizer, "optim", None)  # a ZeroRedundancyOptimizer's; its own shows that of others too
    if isinstance(inner, torch.optim.Optimizer):
        return [inner]
    if isinstance(optimizer, torch.optim.Optimizer):
        return [optimizer]
    found = [value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer)]
    if not found:
        raise ValueError(f"{type(optimizer).__name__} holds no torch optimizer; name the one with the state")
    return [part for value in found for part in _optimizers(value)]


def _unsharded(model):
    """{id: parameter} of what FSDP has made whole for now: in its modules every other parameter is a DTensor."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return {id(p): p for unit in units for p in unit.parameters() if not isinstance(p, DTensor)}


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _tensors(value):
    """The tensors in an optimizer's state, however they are nested."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(inner)


def _bytes(tensors, counted):
    storages = [local_part(tensor).untyped_storage() for tensor in tensors]
    new = {storage._cdata: storage.nbytes() for storage in storages if storage._cdata not in counted}
    counted.update(new)  # by _cdata: data_ptr() is 0 for all empty ones
    return sum(new.values())


@dataclass
class Saved:
    """The bytes that autograd kept of a call, each storage once; a module's are under its name ("" elsewhere)."""

    result: Any = None
    bytes: int = 0
    by_name: Counter[str] = field(default_factory=Counter)  # {module in which it was first saved: bytes}


def count_saved(call, model=None):
    """Run `call()` and count what autograd keeps for its backward: a `Saved`. Local.

    Each storage counts once and as a whole, whatever views of it are kept; the parameters of `model` do not, nor what
    FSDP has gathered of them. Autocast's copies of parameters do. Inside activation checkpointing its inputs do.
    """
    kept, weights, inside = {}, set(), [""]

    def pack(tensor):
        storage = local_part(tensor).untyped_storage()
        # the storage itself is held on to: a new one at the address of one that is gone would look the same
        kept.setdefault(storage._cdata, (storage, inside[-1]))
        # the tensor itself would hold the graph that holds it, where no backward comes
        return tensor.detach()

    def leave(module, *_):
        inside.pop()
        weights.update(_storages(module))  # FSDP: whole now, shards before and after

    with ExitStack() as stack:
        for name, module in model.named_modules() if model is not None else ():
            enter = module.register_forward_pre_hook(lambda *_, name=name: inside.append(name))
            stack.callback(enter.remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
            weights.update(_storages(module))
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            result = call()
    seen = Saved(result)
    for address, (storage, name) in kept.items():
        if address not in weights:
            seen.bytes += storage.nbytes()
            seen.by_name[name] += storage.nbytes()
    return seen


def _storages(module):
    return {local_part(p).untyped_storage()._cdata for p in module.parameters(recurse=False)}
