"""Who takes part in a run: `Ranks`, a value that a lesson passes on; and how several ranks are named in a sentence.

`join` makes one and `remember`s it, so that `say` can label a line and a program's end knows its rank. Everything else
is handed `ranks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

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
