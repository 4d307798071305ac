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

Every storage is followed from its birth to its end, views of it count once (see `storages`). The kinds:

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

from contextlib import contextmanager
from dataclasses import dataclass

import torch

from manyhands.measure.storages import Storages

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
