"""Represent this process's rank (`Ranks`), name ranks in sentences, and let ranks agree on errors.

`join` makes a Ranks and `remember`s it, for `say`'s labels and a program's end. Other code gets `ranks` as an argument.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # a notebook's rank imports torch only when a lesson joins
    import torch
    import torch.distributed as dist

T = TypeVar("T")

_joined = None


@dataclass(frozen=True)
class Ranks:
    """This process's place in the world. A lesson passes it on; no other information of the launcher is needed."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: str  # "gloo", "cpu:gloo,cuda:nccl" or "cpu:gloo,xpu:xccl"
    launcher: str  # torchrun, mpich, openmpi, pals, srun, by hand, notebook, alone
    host: str
    lesson: str  # the script's stem, such as "02_collectives"

    @property
    def library(self) -> str:
        """Return the library that sends tensors of `device`: "gloo", "NCCL" (which is RCCL on AMD's GPUs) or "XCCL"."""
        return {"cpu": "gloo", "cuda": "NCCL", "xpu": "XCCL"}[self.device.type]


def remember(ranks: Ranks | None) -> None:
    """Set this process's Ranks; None: not a rank yet, or no longer."""
    global _joined
    _joined = ranks


def joined() -> Ranks | None:
    """Return the result of the last `join`, even after `leave`."""
    return _joined


def wrapped(text: str, indent: str = "") -> list[str]:
    """Wrap lines at 70 characters: JupyterLab breaks longer ones within words, in a window of 1000 pixels."""
    wrapper = textwrap.TextWrapper(70, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [part for line in text.split("\n") for part in wrapper.wrap(line) or [""]]


def name_ranks(ranks: Sequence[int], world_size: int = 0) -> str:
    """Name ranks: [0, 1, 2, 5] -> "ranks 0-2, 5"; [1] -> "rank 1"; every rank of a world of several -> "all ranks"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) == world_size:
        return "all ranks"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return "ranks " + ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


class Agreement:
    """Raise an error of one rank on all ranks, so that no rank waits for one that has failed.

        agreement = Agreement(ranks, group, CheckpointError)
        found = agreement.on_rank_0(lambda: sorted(folder.iterdir()))     # the same on all ranks
        agreement.all(lambda: write(my_share))                            # raises on all ranks if it failed on any

    All ranks of `group` (the whole world, over the CPU) call each method, in the same order.

    `kind` is the class of the error that all ranks raise, with the sentence of the first rank's error.
    Only exceptions are agreed upon. The group itself detects a rank that dies.
    """

    def __init__(self, ranks: Ranks, group: dist.ProcessGroup | None, kind: type[Exception]):
        self.ranks, self.group, self.kind = ranks, group, kind

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in rank order, on all ranks."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.ranks.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def all(self, action: Callable[[], T]) -> T:
        """Return `action()` of this rank, once it has succeeded on every rank."""
        problem, result = self._try(action)
        for other in self.gather(problem):
            if other is not None:
                raise self.kind(other)
        return result

    def on_rank_0(self, action: Callable[[], T]) -> T:
        """Return rank 0's `action()` on all ranks. The others only wait for it."""
        import torch.distributed as dist

        outcome: list[Any] = [self._try(action) if self.ranks.rank == 0 else None]
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        problem, result = outcome[0]
        if problem is not None:
            raise self.kind(problem)
        return result

    def _try(self, action):
        try:
            return None, action()
        except self.kind as error:
            return str(error), None
        except Exception as error:  # noqa: BLE001 - the other ranks wait for a report in any case
            return said(self.ranks.rank, error), None


def said(rank: int | None, error: BaseException) -> str:
    """Format an exception of `rank`, or of a process that is not a rank, as part of a sentence."""
    text = str(error).strip()
    why = f"{type(error).__name__}: {text.splitlines()[0] if text else 'no reason given'}"
    if isinstance(error, OSError) and error.strerror:
        why = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return why if rank is None else f"rank {rank}: {why}"
