"""Record a step's memory, event by event and by kind.

    with MemoryTimeline(model, optimizer) as seen:      # one step, which is not timed
        with seen.phase("forward"):
            logits, loss = model(ids, targets)
        with seen.phase("backward"):
            loss.backward()
        with seen.phase("optimizer"):
            optimizer.step()
    seen.highest("activations"), seen.peak
    show(memory_stack(seen.samples, "one step", predicted={"parameters": 4 * P}), "memory", alt="...")

Every storage, the memory under a tensor and all views of it, is followed from its birth to its end. Births are seen by
a TorchDispatchMode (below autograd, so that nothing is hidden), ends by a weak reference. A kind holds for a storage's
whole life. The kinds:

    parameters    of the model, and what the optimizer updates; of a DTensor this rank's shard
    optimizer     the optimizer's state, on this rank
    gradients     what parameters' .grad hold at the end of a phase, or when the optimizer's step begins
    activations   made in this step and kept for the backward; those of activation checkpointing while they last
    unsharded_parameters   whole weights that FSDP or ZeRO-3 gathered from the shards of all ranks, for the moment
    copies        weights once more in another precision, such as autocast's
    other         the rest: results of the moment, the batch, messages' buffers, whole gradients before they are cut

Not seen: what an operator allocates and frees inside itself, and what communication libraries and the allocator keep.
In a FakeTensorMode (model, batch and step made inside it) it tells the same of a model that does not fit here.
"""

import weakref
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

KINDS = ("parameters", "optimizer", "gradients", "activations", "unsharded_parameters", "copies", "other")
# what a storage was, when several are true of it: the first
PRECEDENCE = ("parameters", "gradients", "optimizer", "unsharded_parameters", "copies", "activations", "other")


@dataclass(frozen=True)
class Sample:
    """Bytes by kind after one event of a step; `phase` is "" outside of phases."""

    phase: str
    bytes: dict

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


@dataclass(slots=True, eq=False)
class _Storage:
    """A storage that lives."""

    number: int
    n_bytes: int
    born: bool  # in this block
    reference: weakref.ref  # stays here so that it can tell of the end
    alive: bool = True


class MemoryTimeline:
    """Follows one rank's memory while the block runs; local, no rank waits for another.

    `optimizer` may be a ZeroRedundancyOptimizer. `device` is the one whose memory counts (default: that of the first
    parameter). It slows a step down by a fifth or so: do not time it. `samples` are there when the block has ended.
    """

    def __init__(self, model, optimizer=None, device=None):
        self.model = model
        self.optimizer = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer's own part
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        updated = [parameter for group in groups for parameter in group["params"]]
        self.parameters = list({id(p): p for p in [*model.parameters(), *updated]}.values())
        self.device = torch.device(device or (self.parameters[0].device if self.parameters else "cpu"))
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.samples, self._phase, self._open = [], "", None
        self._before = []  # of storages that were there at the start: (bytes, number)
        self._log = []  # (bytes more or less, number) as they happened; a phase where a Sample is wanted
        self._sighted = {}  # number: (_Storage, place in the log), of those whose birth nobody saw
        self._messages = set()  # numbers of those that a communication was called with
        self._kinds = []  # of each number: its place in PRECEDENCE
        self._live = {}  # address: _Storage
        self._under_other_hooks = []  # made where somebody else decides what is saved, as checkpointing does

    @contextmanager
    def phase(self, name):
        """Assign the block's events to phase `name`."""
        outer, self._phase = self._phase, name
        try:
            yield
        finally:
            self._mark_gradients()
            self._log.append(name)
            self._phase = outer

    @property
    def peak(self) -> Sample:
        """The Sample with the most bytes."""
        return max(self.samples, key=lambda sample: sample.total)

    def highest(self, kind: str) -> int:
        """The most bytes that `kind` had."""
        return max(sample.bytes[kind] for sample in self.samples)

    def __enter__(self):
        for parameter in self.parameters:  # a weight without memory is gathered later
            here = _parts(parameter)[0].untyped_storage().size() or not parameter.numel()
            self._mark(parameter, "parameters" if here else "unsharded_parameters", born=False)
        for buffer in self.model.buffers():
            self._mark(buffer, "other", born=False)
        self._mark_gradients(born=False)
        self._mark_state(born=False)
        self._log.append("")
        self._hooks = (self._save, lambda tensor: tensor)
        resize = torch.UntypedStorage.resize_

        def resize_(storage, n_bytes):  # no operator
            self._resize(storage, n_bytes)
            return resize(storage, n_bytes)

        with ExitStack() as stack:
            if self.optimizer is not None:  # gradients are told also where nobody marks phases
                stack.callback(self.optimizer.register_step_pre_hook(lambda *_: self._mark_gradients()).remove)
            stack.enter_context(saved_tensors_hooks(*self._hooks))
            torch.UntypedStorage.resize_ = resize_
            stack.callback(setattr, torch.UntypedStorage, "resize_", resize)
            stack.enter_context(_Operators(self._saw))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *_):
        self._mark_gradients()
        self._mark_state()
        self._log.append("")
        self._open.close()
        for known, place in self._sighted.values():
            if known.alive:  # what was first met on its way and is still there, was there all the time
                self._before.append(self._log[place])
                self._log[place] = (0, known.number)
        self._live = {}
        held = dict.fromkeys(KINDS, 0)
        for entry in [*self._before, *self._log]:  # only now all kinds are known
            if isinstance(entry, str):
                self.samples.append(Sample(entry, dict(held)))
            else:
                held[PRECEDENCE[self._kinds[entry[1]]]] += entry[0]

    def _mark_gradients(self, born=True):
        """Those that are there now."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                self._mark(parameter.grad, "gradients", born)

    def _mark_state(self, born=True):
        """The optimizer's, whenever it was made: it stays."""
        for state in self.optimizer.state.values() if self.optimizer is not None else []:
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    self._mark(value, "optimizer", born)

    def _mark(self, tensor, kind, born):
        """The storage under `tensor` (of a DTensor the shard) is of this kind, unless PRECEDENCE has an earlier one."""
        for part in _parts(tensor):
            if (known := self._follow(part, born)) is not None:
                self._set(known, kind)

    def _set(self, known, kind):
        self._kinds[known.number] = min(self._kinds[known.number], PRECEDENCE.index(kind))

    def _save(self, tensor):
        """Autograd saves this tensor for the backward."""
        for part in _parts(tensor):
            known = self._follow(part, born=False)
            if known is not None and known.born:
                self._set(known, "activations")
        # the tensor itself would hold the graph that holds it, until a backward came
        if type(tensor) not in _PLAIN:
            return tensor.detach()
        with torch._C._DisableTorchDispatch():  # no event of the step
            return tensor.detach()

    def _follow(self, tensor, born):
        """The _Storage under a plain tensor, begun now if it is unknown; None if it lies elsewhere, or has none."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a sparse tensor
            return None
        known = self._live.get(storage._cdata)
        if known is None and tensor.device == self.device:
            known = self._begin(storage, born)
        return known

    def _begin(self, storage, born):
        address, number = storage._cdata, len(self._kinds)
        told = weakref.ref(storage, partial(self._end, address))
        known = self._live[address] = _Storage(number, storage.nbytes(), born, told)
        self._kinds.append(PRECEDENCE.index("other"))
        if not born and self._open:
            self._sighted[number] = (known, len(self._log))
        (self._log if born or self._open else self._before).append((known.n_bytes, number))
        return known

    def _end(self, address, _):
        if (known := self._live.pop(address, None)) is not None:
            known.alive = False
            self._log.append((-known.n_bytes, known.number))

    def _resize(self, storage, n_bytes):
        """FSDP gives the memory of gathered weights back, and takes it again, by resizing their storage."""
        if storage.device != self.device:
            return
        known = self._live.get(storage._cdata) or self._begin(storage, born=False)
        if known.n_bytes != n_bytes:
            self._log += [(n_bytes - known.n_bytes, known.number), self._phase]
            known.n_bytes, known.born = n_bytes, True

    def _saw(self, operator, args, kwargs, result):
        """An operator was carried out: note what of its arguments and results is new."""
        ours = _top_hooks(False) in (self._hooks, None)
        if self._under_other_hooks and ours and torch._C._current_graph_task_id() != -1:
            # the backward computes: what still lives of it was kept for it
            for known in self._under_other_hooks:
                if known.alive:
                    self._set(known, "activations")
            self._under_other_hooks = []
        for tensor in _tensors([*args, *kwargs.values()] if kwargs else args):
            known = self._follow(tensor, born=False)
            if known is not None and known.born and isinstance(tensor, torch.nn.Parameter):
                self._set(known, "unsharded_parameters")  # a weight, made in this step
            if operator.namespace == "c10d" and known is not None:
                self._messages.add(known.number)
        if operator is torch.ops.aten.copy_.default:
            to, source = (self._follow(tensor, born=False) for tensor in args[:2])
            if to is not None and source is not None and to.number in self._messages:
                # out of gloo's own buffer, which was made on the way, and which gloo may still hold
                self._sighted.pop(source.number, None)
        if not _makes_storage(operator):
            return
        count = len(self._kinds)
        for tensor in _tensors([result]):
            known = self._follow(tensor, born=True)
            if known is None or known.number < count:
                continue
            if not ours:
                self._under_other_hooks.append(known)
            if operator is torch.ops.aten._to_copy.default:
                source = self._follow(args[0], born=False)
                if source and PRECEDENCE[self._kinds[source.number]] in ("parameters", "unsharded_parameters"):
                    self._set(known, "copies")
        if len(self._kinds) > count:
            self._log.append(self._phase)


_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)


class _Operators(TorchDispatchMode):
    """Calls saw(operator, args, kwargs, result) after each operator on plain tensors."""

    def __init__(self, saw):
        super().__init__()
        self.saw = saw

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if types and any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back with the local tensors
        kwargs = kwargs or {}
        result = operator(*args, **kwargs)
        self.saw(operator, args, kwargs, result)
        return result


@cache
def _makes_storage(operator):
    """Return whether any result may have its own storage; views and in-place operations have none."""
    return any(result.alias_info is None for result in operator._schema.returns)


def _tensors(values):
    """The plain tensors among values and lists of values, as a list."""
    found = []
    for value in values:
        if type(value) in _PLAIN:
            found.append(value)
        elif isinstance(value, torch.Tensor):
            found += _parts(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


def _parts(tensor):
    """A tensor, or the plain tensors inside one that wraps others, such as a DTensor; as a list."""
    if type(tensor) in _PLAIN or not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return _tensors(inner)  # a DTensor names its mesh, too


_PLAIN = {torch.Tensor, torch.nn.Parameter}
