"""Who takes part in a run: `Ranks`, which a lesson passes on; their names in a sentence; how they agree on errors.

`join` makes one and `remember`s it, for `say`'s labels and a program's end. Everything else is handed `ranks`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # a notebook's rank brings torch when a lesson joins
    import torch
    import torch.distributed as dist

T = TypeVar("T")

_joined = None


@dataclass(frozen=True)
class Ranks:
    """Who this process is. A lesson passes it on; nothing else of the launcher is needed."""

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
        """What carries tensors of `device`: "gloo", "NCCL" (on AMD's GPUs RCCL, under this name) or "XCCL"."""
        return {"cpu": "gloo", "cuda": "NCCL", "xpu": "XCCL"}[self.device.type]


def remember(ranks: Ranks | None) -> None:
    """This process is that rank from now on; None: no rank yet, or no longer."""
    global _joined
    _joined = ranks


def joined() -> Ranks | None:
    """What the last `join` returned, also after `leave`."""
    return _joined


def wrapped(text: str, indent: str = "") -> list[str]:
    """Its lines, at most 70 characters long: JupyterLab breaks longer ones within words, in a window of 1000 pixels."""
    wrapper = textwrap.TextWrapper(70, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [part for line in text.split("\n") for part in wrapper.wrap(line) or [""]]


def name_ranks(ranks: Sequence[int], world_size: int = 0) -> str:
    """[0, 1, 2, 5] -> "ranks 0-2, 5"; [1] -> "rank 1"; all of several in a world of `world_size` -> "all ranks"."""
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
    """What fails on one rank is the same error on all, so that nobody waits for a rank that gave up.

        agreement = Agreement(ranks, group, CheckpointError)
        found = agreement.on_rank_0(lambda: sorted(folder.iterdir()))     # the same on all ranks
        agreement.all(lambda: write(my_share))                            # raises on all ranks if it failed on any

    All ranks of `group` (the whole world, over the CPU) call each method, in the same order.

    `kind` is the class of the error that all ranks raise; one raised by an action keeps its sentence, the first rank's.
    Only exceptions are agreed upon. A rank that dies is noticed by the group itself.
    """

    def __init__(self, ranks: Ranks, group: dist.ProcessGroup | None, kind: type[Exception]):
        self.ranks, self.group, self.kind = ranks, group, kind

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on all ranks."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.ranks.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def all(self, action: Callable[[], T]) -> T:
        """What `action()` returned on this rank, once it went well on every rank."""
        problem, result = self._try(action)
        for other in self.gather(problem):
            if other is not None:
                raise self.kind(other)
        return result

    def on_rank_0(self, action: Callable[[], T]) -> T:
        """What `action()` returned on rank 0, on all ranks. The others only wait for it."""
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
        except Exception as error:  # noqa: BLE001 - the others wait for a word, whatever happened
            return said(self.ranks.rank, error), None


def said(rank: int | None, error: BaseException) -> str:
    """An exception of `rank`, or of a process that is none, as part of a sentence."""
    text = str(error).strip()
    why = f"{type(error).__name__}: {text.splitlines()[0] if text else 'no reason given'}"
    if isinstance(error, OSError) and error.strerror:
        why = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return why if rank is None else f"rank {rank}: {why}"
