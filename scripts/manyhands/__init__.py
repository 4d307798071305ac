"""Many Hands: distributed training, taught on real ranks.

    from manyhands import join, leave, say, show

    ranks = join(globals())     # whoever started this process: torchrun, mpiexec, srun, a notebook, or nobody
    say(f"rank {ranks.rank} of {ranks.world_size}")
    leave()

These names load on first use: `manyhands.watchdog` and the doctor run without torch, which takes seconds to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from manyhands.launch import LaunchError, Ranks, join, leave, mpi_world
    from manyhands.screen import say, show

__all__ = ["LaunchError", "Ranks", "join", "leave", "mpi_world", "say", "show"]


def __getattr__(name):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "manyhands.screen" if name in ("say", "show") else "manyhands.launch"
    globals()[name] = getattr(import_module(home), name)  # so that this is asked once
    return globals()[name]
