"""Between MPICH and Slurm: lines that Slurm can read.

    shorten()                                # in a rank, before MPI starts
    python pmi_lines.py run COMMAND...       # a command that starts MPI itself

`srun --mpi=pmi2` speaks PMI-1 with MPICH over the socket PMI_FD. It says that a value may have 1,024 bytes, and reads
lines of 1,024 bytes, which hold a name too. MPICH 5.0 sends its address with whatever lies behind that in memory, 4 kB
run-length coded in pieces: where text lies there, a piece hardly gets shorter, its line is cut, and all ranks wait for
each other forever. So a small process stands between the two, and says 512.
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys

SAID, MEANT = b"vallen_max=1024", b"vallen_max=512"
SHORT = "MANYHANDS_PMI_FD"  # the socket that this has been done with
_relays: list[subprocess.Popen] = []  # they end with this process: their socket does


def shorten() -> None:
    """Put the small process between this one and Slurm, once; a rank that Slurm has not started is left as it is."""
    by_slurm = "SLURM_STEP_ID" in os.environ and "MPI_LOCALRANKID" not in os.environ  # which mpiexec sets
    fd = os.environ.get("PMI_FD")
    if fd is None or not by_slurm or fd == os.environ.get(SHORT):
        return
    ours, its = socket.socketpair()
    command = [sys.executable, "-ISE", __file__, "relay", fd, str(its.fileno())]
    _relays.append(subprocess.Popen(command, pass_fds=[int(fd), its.fileno()], stdin=subprocess.DEVNULL))
    os.close(int(fd))
    its.close()
    os.environ["PMI_FD"] = os.environ[SHORT] = str(ours.detach())


def relay(slurm: int, mpich: int) -> None:
    """Hand on what comes from either until one of them has ended."""
    ready, to = selectors.DefaultSelector(), {slurm: mpich, mpich: slurm}
    for fd in to:
        ready.register(fd, selectors.EVENT_READ)
    while True:
        for key, _ in ready.select():
            if not (text := os.read(key.fd, 1 << 16)):
                return
            os.write(to[key.fd], text.replace(SAID, MEANT) if key.fd == slurm else text)


if __name__ == "__main__" and sys.argv[1] == "relay":
    relay(*map(int, sys.argv[2:]))
elif __name__ == "__main__":
    shorten()
    os.set_inheritable(int(os.environ.get(SHORT, "0")), True)
    os.execvp(sys.argv[2], sys.argv[2:])
