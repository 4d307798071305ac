"""What autograd really keeps of a call for its backward."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch.autograd.graph import saved_tensors_hooks

from manyhands.measure.tensor_bytes import local_part


@dataclass
class Saved:
    """What autograd kept of a call: bytes of storages, each once. Those of one module are under its name (""
    elsewhere)."""

    result: Any = None
    bytes: int = 0
    by_name: dict[str, int] = field(default_factory=dict)  # {module in which it was first saved: bytes}
    by_shape: dict[tuple[int, ...], int] = field(default_factory=dict)  # {shape as first saved: bytes}


def count_saved(call, model=None):
    """Run `call()` and count what autograd keeps for its backward: a `Saved`. Local.

    Each storage counts once and as a whole, whatever views of it are kept; the parameters of `model` do not, nor what
    FSDP has gathered of them. Copies that autocast makes of parameters do count. Inside activation checkpointing its
    inputs count, as nothing else is kept there.
    """
    kept, weights, inside = {}, set(), [""]

    def pack(tensor):
        storage = local_part(tensor).untyped_storage()
        # the storage itself is held on to: a new one at the address of one that is gone would look the same
        kept.setdefault(storage._cdata, (storage, inside[-1], tuple(tensor.shape)))
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
    for address, (storage, name, shape) in kept.items():
        if address not in weights:
            seen.bytes += storage.nbytes()
            seen.by_name[name] = seen.by_name.get(name, 0) + storage.nbytes()
            seen.by_shape[shape] = seen.by_shape.get(shape, 0) + storage.nbytes()
    return seen


def _storages(module):
    return {local_part(p).untyped_storage()._cdata for p in module.parameters(recurse=False)}
