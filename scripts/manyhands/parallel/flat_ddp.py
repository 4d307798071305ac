"""Plain data parallelism for ranks on CPUs: all parameters in one vector, all gradients in another, one all-reduce per step.

    replicas = FlatReplicas(model)                  # all ranks, with equal weights
    loss = replicas(ids, targets, last=True)[1]
    replicas.backward(loss, last=True)              # now the gradients are the mean over the ranks
    optimizer = AdamW([part for part, _ in replicas.parts], fused=True)

Where the ranks compute on the very cores that would send, a message under way slows the backward down by as much as it
hides, so buckets and overlap (`ddp`) gain nothing; few large kernels do. The model's parameters and their `.grad` are
views of the vectors: whoever reads them sees what one always sees. A `.grad` that `zero_grad` dropped is attached again.
"""

import torch
import torch.distributed as dist
from torch import nn

from manyhands.parallel.optimizer import ensure_state


class FlatReplicas:
    """Copies of a model on all ranks of the default group; see the module.

    Raises ValueError if the parameters have several dtypes or devices.
    """

    def __init__(self, model):
        self.model = model
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]  # a tied one once
        if len({(p.dtype, p.device) for _, p in named}) != 1:
            raise ValueError("parameters of one dtype on one device fit into one vector; use DDP for others")
        named.sort(key=lambda pair: pair[1].ndim < 2)  # matrices first: they decay, the rest does not
        self.values = torch.cat([p.detach().flatten() for _, p in named])
        self.gradients = torch.zeros_like(self.values)
        self.places = {}  # {name: (part, where it begins there, shape)}
        self.parts = []  # (vector of parameters, does it decay?)
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

    def __call__(self, *args, last=True):
        return self.model(*args)

    def backward(self, loss, last=True):
        """After the last micro-batch of a step, and only then, ranks add up gradients. All ranks call it."""
        for parameter, gradient in self._attached:
            if parameter.grad is None:
                parameter.grad = gradient.zero_()
        # the mean over the ranks is the sum of shares that are divided before: one message, and no pass over it
        (loss / self.world_size).backward()
        if last and self.world_size > 1:
            dist.all_reduce(self.gradients)

    def cut(self, optimizer):
        """The state of an optimizer over `parts` as that of the parameters in them: views, so that loading writes through."""
        ensure_state(optimizer)
        states = [optimizer.state.get(part, {}) for part, _ in self.parts]
        slots = [slot for slot, value in states[0].items() if isinstance(value, torch.Tensor)]
        return {
            f"{name}.{slot}": self.view(name, [state[slot] for state in states])
            for name in self.places
            for slot in slots
        }

    def view(self, name, tensors):
        """The share of parameter `name` in `tensors`, one per part, such as AdamW's moments; a 0-dim one as it is."""
        part, at, shape = self.places[name]
        whole = tensors[part]
        return whole if whole.ndim == 0 else whole[at : at + shape.numel()].view(shape)
