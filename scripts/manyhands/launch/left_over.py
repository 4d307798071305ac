"""What killed ranks leave on a node, removed at the next start of ranks: folders in /tmp, MPI's segments in /dev/shm.

Who is asked to end removes both; `kill -9` of a kernel and of its watchdog, or of ranks in MPI, leaves them.
"""

import contextlib
import os
import platform
import shutil
import time
from pathlib import Path

import psutil

OURS = f"manyhands-{platform.node()}-"  # then the kernel's process and something random: a folder of a notebook's ranks
OLD_S = 3600  # by then all ranks have opened a segment: it may go although processes that are not seen here map it


def sweep_folders(place: Path) -> list[Path]:
    """Remove this user's folders OURS*PID-* in `place` whose process on this node is gone; returns them."""
    gone = []
    for folder in place.glob(f"{OURS}*"):
        pid = folder.name.removeprefix(OURS).split("-")[0]
        with contextlib.suppress(OSError):
            if pid.isdecimal() and not psutil.pid_exists(int(pid)) and folder.stat().st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)
                gone.append(folder)
    return gone


def sweep_shared_memory(place: Path = Path("/dev/shm")) -> list[Path]:
    """Remove this user's segments of MPICH in `place`, an hour old and used by no process; returns them."""
    old = []
    for segment in place.glob("mpich_shm_*"):
        with contextlib.suppress(OSError):
            facts = segment.stat()
            if facts.st_uid == os.getuid() and time.time() - facts.st_mtime > OLD_S:
                old.append(segment)
    used = _mapped() if old else ""
    gone = [segment for segment in old if str(segment) not in used]
    for segment in gone:
        segment.unlink(missing_ok=True)
    return gone


def _mapped():
    """The memory maps of this user's processes, as one text."""
    maps = []
    for process in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            maps.append(process.read_text())
    return "".join(maps)
