"""Limits that a start of ranks meets: shared memory, of which MPICH takes 1 MiB for each rank, and processes.

MPICH removes its segment at the end of a program that is not killed. What killed ranks leave soon fills a container's
64 MiB.
"""

import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

from manyhands.launch.machine import available_processes

SHM = Path("/dev/shm")
RANK_BYTES = 1.02 * 2**20  # of MPICH 5's segment, for each rank of a node; without them a rank dies of a bus error
OLD_S = 3600  # by then all ranks have opened a segment: it may go although processes that are not seen here map it
RANK_PROCESSES = 16  # processes and threads of a rank at most, while it trains or its answer is judged
MISSED_S = 60  # so old is a segment that goes where there is no room for another one
SMALL_SHM = (
    "/dev/shm is full or small: remove old files there, in a container give --shm-size=1g, or"
    " {instead}; make doctor says how much is free"
)
LIMITS = (  # what a start says that meets a limit -> what to do
    ("status 135|Bus error|No space left on device", SMALL_SHM),
    (
        "can't start new thread|Resource temporarily unavailable",
        "ulimit -u or the control group's pids.max allows too few processes: end others (ps ux), start fewer ranks,"
        " or ask for a higher limit; make doctor says how many are left",
    ),
)


def cure(text: str, instead: str = "use `python scripts/launch.py --starter torchrun`") -> str:
    """Return what to do about a limit that `text` speaks of, or "". `instead`: how to start without shared memory."""
    return next((says.format(instead=instead) for found, says in LIMITS if re.search(found, text)), "")


def few_processes(num_ranks: int) -> str:
    """Return a sentence if the limit of processes may be met by `num_ranks` ranks of this node, else "".

    Some ranks that meet it end with an error that does not name it, and some wait for those that could not start.
    """
    left = available_processes()
    if left is None or left >= num_ranks * RANK_PROCESSES:
        return ""
    says = f"{left} more processes and threads are allowed here, and {num_ranks} ranks may take"
    return f"{says} {num_ranks * RANK_PROCESSES}; if they fail or wait: {cure('Resource temporarily unavailable')}"


def no_room(rank: int, num_ranks: int, place: Path = SHM) -> str:
    """Return a sentence if MPICH cannot start `num_ranks` ranks of this node for lack of shared memory, else "".

    Where there is no room, what killed ranks have left goes first. Rank 0 may have made the segment meanwhile.
    """
    if not place.is_dir():
        return ""
    for attempt in range(2):
        free = shutil.disk_usage(place).free
        made = sum(_bytes_of(one) for one in place.glob("mpich_shm_*")) if rank else 0
        if free + made >= num_ranks * RANK_BYTES:
            return ""
        if attempt == 0:
            sweep_shared_memory(place, MISSED_S)
    needs = f"{num_ranks} ranks under MPI need {num_ranks * RANK_BYTES / 2**20:.0f}"
    return f"{place} has {free / 2**20:.1f} MiB free, and {needs}; {cure('Bus error')}"


def _bytes_of(segment):
    """Return the bytes of a segment if it is new, else 0."""
    with suppress(OSError):
        status = segment.stat()
        return status.st_blocks * 512 if time.time() - status.st_mtime < MISSED_S else 0
    return 0


def sweep_shared_memory(place: Path = SHM, older_s: float = OLD_S, since_s: float = 0.0) -> list[Path]:
    """Remove this user's segments of MPICH in `place` that no process uses, and return them.

    They are `older_s` old, and were made after the time `since_s`.
    """
    old = []
    for segment in place.glob("mpich_shm_*"):
        with suppress(OSError):
            status = segment.stat()
            if status.st_uid == os.getuid() and since_s <= status.st_mtime < time.time() - older_s:
                old.append(segment)
    used = mapped() if old else ""
    gone = [segment for segment in old if str(segment) not in used]
    for segment in gone:
        segment.unlink(missing_ok=True)
    return gone


def mapped(pids=("[0-9]*",)) -> str:
    """Return the memory maps of this user's processes, or of those with these numbers, as one text."""
    maps = []
    for process in (path for pid in pids for path in Path("/proc").glob(f"{pid}/maps")):
        with suppress(OSError):
            maps.append(process.read_text())
    return "".join(maps)
