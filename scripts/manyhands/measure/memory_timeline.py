"""What a step holds in memory, event by event and by kind.

    with MemoryTimeline(model, optimizer) as seen:      # one step, which is not timed
        with seen.phase("forward"):
            logits, loss = model(ids, targets)
        with seen.phase("backward"):
            loss.backward()
        with seen.phase("optimizer"):
            optimizer.step()
    seen.highest("activations"), seen.peak
    show(memory_stack(seen.samples, "one step", predicted={"parameters": 4 * P}), "memory", alt="...")

Every storage is followed from its birth to its end, views of it count once (see `Storages`). The kinds:

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


@dataclass(frozen=True)
class Sample:
    """Bytes by kind after one event of a step; `phase` is "" outside of phases."""

    phase: str
    bytes: dict

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


class MemoryTimeline:
    """Follows one rank's memory while the block runs; local, no rank waits for another.

    `optimizer` may be a ZeroRedundancyOptimizer. `device` is the one whose memory counts (default: that of the first
    parameter). It slows a step down by a fifth or so: do not time it. `samples` are there when the block has ended; on
    a GPU `allocator_peak` then is the most bytes that torch's allocator gave out in it (its counter starts anew), else
    None.
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
        self.samples, self.allocator_peak = [], None
        self._storages = Storages(self.device)

    @contextmanager
    def phase(self, name):
        """What happens in the block belongs to phase `name`."""
        outer, self._storages.label = self._storages.label, name
        try:
            yield
        finally:
            self._look_around()
            self._storages.boundary(name)
            self._storages.label = outer

    @property
    def peak(self) -> Sample:
        """The Sample with the most bytes."""
        return max(self.samples, key=lambda sample: sample.total)

    def highest(self, kind: str) -> int:
        """The most bytes that `kind` had."""
        return max(sample.bytes[kind] for sample in self.samples)

    def __enter__(self):
        for parameter in self.parameters:
            self._storages.mark(parameter, "parameters", born=False)
        for buffer in self.model.buffers():
            self._storages.mark(buffer, "other", born=False)
        self._look_around(born=False)
        self._look_at_state(born=False)
        self._storages.boundary("")
        if self.optimizer is not None:  # gradients are told also where nobody marks phases
            self._hook = self.optimizer.register_step_pre_hook(lambda *_: self._look_around())
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._storages.start()
        return self

    def __exit__(self, *_):
        self._look_around()
        self._look_at_state()
        self._storages.boundary("")
        self._storages.stop()
        if self.optimizer is not None:
            self._hook.remove()
        if self.device.type == "cuda":
            self.allocator_peak = torch.cuda.max_memory_allocated(self.device)
        self.samples = [Sample(phase, {kind: held[kind] for kind in KINDS}) for phase, held in self._storages.replay()]

    def _look_around(self, born=True):
        """Mark the gradients that are there now."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                self._storages.mark(parameter.grad, "gradients", born)

    def _look_at_state(self, born=True):
        """Mark the optimizer's state, whenever it was made: it stays."""
        for state in self.optimizer.state.values() if self.optimizer is not None else []:
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    self._storages.mark(value, "optimizer", born)


# what a storage was, when several are true of it: the first
PRECEDENCE = ("parameters", "gradients", "optimizer", "unsharded_parameters", "copies", "activations", "other")
_PLACES = {kind: place for place, kind in enumerate(PRECEDENCE)}


class _Storage:
    """A storage that lives. `born`: in this block; `reference` stays here so that it can tell of the end."""

    __slots__ = ("number", "n_bytes", "born", "alive", "reference")


class Storages:
    """Follows the storages on `device` between `start()` and `stop()`; `mark(tensor, kind)` says what one is for.

    A storage is the memory under a tensor and all views of it. Births are seen by a TorchDispatchMode (below autograd,
    so that nothing is hidden), ends by a weak reference. A kind holds for a storage's whole life.

    What is saved for the backward is marked "activations" by itself, gathered weights "unsharded_parameters", cast ones
    "copies". `boundary(label)` is a point at which the bytes of that moment are wanted; births write one with
    `self.label`.
    """

    def __init__(self, device):
        self.device, self.label = device, ""
        self._before = []  # of storages that were there at the start: (bytes, number)
        self._log = []  # (bytes more or less, number) as they happened, and labels between them
        self._sighted = {}  # number: (_Storage, place in the log), of those whose birth nobody saw
        self._messages = set()  # numbers of those that a communication was called with
        self._kinds = []  # of each number: its place in PRECEDENCE
        self._live = {}  # address: _Storage
        self._open = None
        self._under_other_hooks = []  # made where somebody else decides what is saved, as checkpointing does

    def start(self):
        hooks = (self._save, lambda tensor: tensor)
        self._hooks = hooks
        with ExitStack() as stack:
            stack.enter_context(saved_tensors_hooks(*hooks))
            stack.enter_context(_resizes_tell(self._resize))
            stack.enter_context(_Operators(self._saw))
            self._open = stack.pop_all()

    def stop(self):
        """From now on nobody listens. What was first met on its way and is still there, was there all the time."""
        self._open.close()
        for known, place in self._sighted.values():
            if known.alive:
                self._before.append(self._log[place])
                self._log[place] = (0, known.number)
        self._live = {}

    def mark(self, tensor, kind, born=True):
        """The storage under `tensor` is of this kind, unless one earlier in PRECEDENCE is known; of a DTensor the
        shard."""
        for part in _parts(tensor):
            if (known := self._follow(part, born)) is not None:
                self._set(known, kind)

    def boundary(self, label):
        self._log.append(label)

    def replay(self):
        """[(label, {kind: bytes})] at each boundary, with the kinds that are known by now."""
        totals, samples = dict.fromkeys(PRECEDENCE, 0), []
        for entry in [*self._before, *self._log]:
            if isinstance(entry, str):
                samples.append((entry, dict(totals)))
            else:
                totals[PRECEDENCE[self._kinds[entry[1]]]] += entry[0]
        return samples

    # ---- births and ends ----

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
        address, known = storage._cdata, _Storage()
        known.number, known.n_bytes, known.born, known.alive = len(self._kinds), storage.nbytes(), born, True
        known.reference = weakref.ref(storage, partial(self._end, address))
        self._live[address] = known
        self._kinds.append(_PLACES["other"])
        if not born and self._open:
            self._sighted[known.number] = (known, len(self._log))
        (self._log if born or self._open else self._before).append((known.n_bytes, known.number))
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
            self._log += [(n_bytes - known.n_bytes, known.number), self.label]
            known.n_bytes, known.born = n_bytes, True

    def _delivered(self, to, source):
        """If this copy delivers a message out of gloo's own buffer, then that was made on the way; gloo may still hold
        it."""
        to, source = self._follow(to, born=False), self._follow(source, born=False)
        if to is not None and source is not None and to.number in self._messages:
            self._sighted.pop(source.number, None)

    # ---- kinds ----

    def _set(self, known, kind):
        place = _PLACES[kind]
        if place < self._kinds[known.number]:
            self._kinds[known.number] = place

    def _is(self, tensor, *kinds):
        known = self._follow(tensor, born=False)
        return known is not None and PRECEDENCE[self._kinds[known.number]] in kinds

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
            self._delivered(*args[:2])
        if not _makes_storage(operator):
            return
        count = len(self._kinds)
        for tensor in _tensors([result]):
            known = self._follow(tensor, born=True)
            if known is None or known.number < count:
                continue
            if not ours:
                self._under_other_hooks.append(known)
            if operator is torch.ops.aten._to_copy.default and self._is(args[0], "parameters", "unsharded_parameters"):
                self._set(known, "copies")
        if len(self._kinds) > count:
            self._log.append(self.label)


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


@contextmanager
def _resizes_tell(tell):
    """UntypedStorage.resize_, which is no operator, calls tell(storage, bytes) first."""
    original = torch.UntypedStorage.resize_

    def resize_(storage, n_bytes):
        tell(storage, n_bytes)
        return original(storage, n_bytes)

    torch.UntypedStorage.resize_ = resize_
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original


@cache
def _makes_storage(operator):
    """Whether any result may have a storage of its own; a view or an operation in place has none."""
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
