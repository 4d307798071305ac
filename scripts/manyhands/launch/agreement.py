"""What fails on one rank is the same error on all, so that nobody waits for a rank that gave up.

agreement = Agreement(ranks, group, CheckpointError)
found = agreement.on_rank_0(lambda: sorted(folder.iterdir()))     # the same on all ranks
agreement.all(lambda: write(my_share))                            # raises on all ranks if it failed on any
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from manyhands.launch.ranks import Ranks

T = TypeVar("T")


class Agreement:
    """All ranks of `group` (the whole world, over the CPU) call each method, in the same order.

    `kind` is the class of the error that all ranks raise; one raised by an action keeps its sentence, the first rank's.
    Only exceptions are agreed upon. A rank that dies is noticed by the group itself.
    """

    def __init__(self, ranks: Ranks, group: dist.ProcessGroup | None, kind: type[Exception]):
        self.ranks, self.group, self.kind = ranks, group, kind

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on all ranks."""
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


def said(rank: int, error: BaseException) -> str:
    """An exception of `rank` as part of a sentence."""
    text = str(error).strip()
    return f"rank {rank}: {type(error).__name__}: {text.splitlines()[0] if text else 'no reason given'}"
