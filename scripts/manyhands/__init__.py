"""Many Hands: distributed training, taught on real ranks.

    # what every lesson takes; all else is imported by its own path
    from manyhands import Metrics, join, leave, say, show

    ranks = join(globals())     # whoever started this process: torchrun, mpiexec, srun, a notebook, or nobody
    say(f"rank {ranks.rank} of {ranks.world_size}")
    leave()

These names load on first use: a notebook's watchdog and the doctor run without torch, which takes seconds to
import.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from manyhands.checks.predictions import ____, card, compare
    from manyhands.launch.join import join, leave, mpi_world, refuse
    from manyhands.launch.launchers import LaunchError
    from manyhands.launch.metrics import Metrics, fingerprint
    from manyhands.launch.program import say, say_once
    from manyhands.launch.ranks import Ranks
    from manyhands.launch.run_folder import show

__all__ = [
    "LaunchError", "Metrics", "Ranks", "card", "compare", "fingerprint", "join", "leave", "mpi_world",
    "refuse", "say", "say_once", "show", "____",
]  # fmt: skip
HOMES = {
    "____": "checks.predictions", "LaunchError": "launch.launchers", "Metrics": "launch.metrics",
    "Ranks": "launch.ranks", "card": "checks.predictions",
    "compare": "checks.predictions", "fingerprint": "launch.metrics", "join": "launch.join", "leave": "launch.join",
    "mpi_world": "launch.join", "refuse": "launch.join", "say": "launch.program",
    "say_once": "launch.program", "show": "launch.run_folder",
}  # fmt: skip


def load_ipython_extension(shell):
    """Make `%load_ext manyhands` work in any notebook: `%ranks 4` starts ranks, `%%ranks` runs a cell on them."""
    import_module("manyhands.notebook.start").register_for_own_work(shell)


def __getattr__(name):
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(import_module(f"manyhands.{HOMES[name]}"), name)  # so that this is asked once
    return globals()[name]
