"""Births and ends of every storage that operators touch while a block runs, and what each of them was for.

A storage is the memory under a tensor and all views of it. Births are seen by a TorchDispatchMode (below autograd, so
that nothing is hidden), ends by a weak reference. Kinds are marked whenever they show, and hold for a storage's whole
life. `memory_timeline` is what users see of it.
"""

import weakref
from contextlib import ExitStack, contextmanager
from functools import cache, partial

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

# what a storage was, when several are true of it: the first
PRECEDENCE = ("parameters", "gradients", "optimizer", "unsharded_parameters", "copies", "activations", "other")
_PLACES = {kind: place for place, kind in enumerate(PRECEDENCE)}


class _Storage:
    """A storage that lives. `born`: in this block; `reference` stays here so that it can tell of the end."""

    __slots__ = ("number", "n_bytes", "born", "alive", "reference")


class Storages:
    """Follows the storages on `device` between `start()` and `stop()`; `mark(tensor, kind)` says what one is for.

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
