"""Many Hands: distributed training, taught on real ranks.

from manyhands import join, leave, say, show

ranks = join(globals())     # whoever started this process: torchrun, mpiexec, srun, a notebook, or nobody
say(f"rank {ranks.rank} of {ranks.world_size}")
leave()
"""

from manyhands.launch import LaunchError, Ranks, join, leave, mpi_world
from manyhands.screen import say, show

__all__ = ["LaunchError", "Ranks", "join", "leave", "mpi_world", "say", "show"]
