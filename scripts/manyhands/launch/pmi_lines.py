"""Relay PMI lines between MPICH and Slurm, short enough for Slurm to read.

    shorten()                                # in a rank, before MPI starts
    python pmi_lines.py run COMMAND...       # a command that starts MPI itself

`srun --mpi=pmi2` speaks PMI-1 with MPICH over the socket PMI_FD. It allows values of 1,024 bytes, but reads
lines of 1,024 bytes, which include a name. MPICH 5.0 sends its address together with the memory after it, 4 kB in
run-length coded pieces. If that memory contains text, a piece hardly gets shorter, its line is cut, and all ranks wait
for each other forever. So a small process relays between the two, and announces a limit of 512.
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys

SAID, MEANT = b"vallen_max=1024", b"vallen_max=512"
SHORT = "MANYHANDS_PMI_FD"  # the socket that already has a relay
_relays: list[subprocess.Popen] = []  # closed when this process ends


def shorten() -> None:
    """Start the relay between this process and Slurm, once; do nothing for a rank that Slurm did not start."""
    by_slurm = "SLURM_STEP_ID" in os.environ and "MPI_LOCALRANKID" not in os.environ  # set by mpiexec
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
    """Forward data in both directions until one side has ended."""
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
