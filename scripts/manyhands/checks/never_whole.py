"""What lesson 06's exercise on the meta device is judged by: the model, its shares, and how much memory lived at once."""

import weakref

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from manyhands.checks import Wrong


def stack():
    """Eight layers; the first and the last do not split evenly over 2, 3 or 4 ranks."""
    widths = [48, 50, 48, 48, 48, 48, 48, 48, 47]
    return nn.Sequential(*(nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False)))


def judge_sharded(model, expected, n, rank):
    if not isinstance(model, nn.Module):
        what = "nothing came back" if model is None else f"what came back is a {type(model).__name__}"
        raise Wrong(f"{what}; return the model")
    given = dict(model.named_parameters())
    if set(given) != set(expected):
        raise Wrong(f"the model has other parameters than make()'s: {', '.join(sorted(given)[:3])}")
    for name, p in given.items():
        if not isinstance(p, DTensor):
            raise Wrong(
                f"{name} is whole on every rank; call fully_shard on each layer and on the model, with this mesh"
            )
        if p.to_local().is_meta:
            raise Wrong(f"{name} is still on the meta device, without numbers: to_empty(device='cpu') gives it memory")
    if n > 1:
        _judge_units(model)
    for name, p in given.items():
        chunks = expected[name].chunk(n)
        wanted = chunks[rank] if rank < len(chunks) else expected[name][:0]
        mine = p.detach().to_local()
        if mine.shape != wanted.shape:
            raise Wrong(
                f"this rank's share of {name} is {list(mine.shape)}, not {list(wanted.shape)}: shard over `mesh`"
            )
        if torch.equal(mine, wanted):
            continue
        why = "draw whole weights in the full model's order, after torch.manual_seed(7), and keep your share"
        if n > 1 and torch.equal(mine, _drawn_as_shares(given)[name]):
            why = "it was drawn as a share, the same on every rank; draw the whole weight, then keep this rank's rows"
        elif torch.allclose(mine, 50 * wanted):
            why = "the full model's weights have std=0.02"
        raise Wrong(f"{name} has other numbers than the full model's: {why}")


def _drawn_as_shares(given):
    torch.manual_seed(7)
    return {name: torch.empty(p.to_local().shape).normal_(std=0.02) for name, p in given.items()}


def _judge_units(model):
    for name, layer in model.named_children():
        if not isinstance(layer, FSDPModule):
            raise Wrong(
                f"layer {name} is no unit of its own, so all layers would be whole at once: fully_shard each layer "
                "before the model"
            )


class Peak(TorchDispatchMode):
    """The most bytes that tensors made in the block have held at the same time; each storage once, meta ones not."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._alive = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor) and not tensor.is_meta:
                self._follow(tensor.untyped_storage())
        return result

    def _follow(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _: self._ended(key, size))
            self.now += size
            self.peak = max(self.peak, self.now)

    def _ended(self, key, size):
        del self._alive[key]
        self.now -= size
