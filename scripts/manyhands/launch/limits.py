"""What this process may use: cores, memory and processes, by the machine, the control group and ulimit."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

import psutil

try:
    import resource
except ImportError:  # not a Unix
    resource = None  # type: ignore[assignment]

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def cgroup_headroom(limit: str, usage: str, root: Path = CGROUPS, own: Path = OWN_CGROUP) -> int | None:
    """The least that is left between `limit` and `usage` in our control group and those above it; None: no limit.

    cgroup_headroom("memory.max", "memory.current") is in bytes, ("pids.max", "pids.current") in processes. Knows
    version 2, and version 1 by its own names of these files.
    """
    least = None
    names = [(limit, usage), (VERSION_1.get(limit, limit), VERSION_1.get(usage, usage))]
    for folder in cgroup_folders(root, own):
        for limit_name, usage_name in names:
            most, used = _number(folder / limit_name), _number(folder / usage_name)
            if most is not None and used is not None and most < 2**60:  # version 1 says 2**63 for "no limit"
                least = max(0, most - used) if least is None else min(least, max(0, most - used))
    return least


VERSION_1 = {"memory.max": "memory.limit_in_bytes", "memory.current": "memory.usage_in_bytes"}


def cgroup_folders(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> list[Path]:
    """The folders of our control groups and of all above them, innermost first."""
    folders = []
    try:
        lines = Path(own).read_text().splitlines()
    except OSError:
        lines = []
    for line in [*lines, "0::/"]:
        _, controllers, path = line.split(":", 2)
        top = Path(root) / controllers if controllers else Path(root)
        inner = top / path.strip("/")
        folders += [folder for folder in (inner, *inner.parents) if folder.is_relative_to(top)]
    return list(dict.fromkeys(folders))


def cpus() -> list[int]:
    """The cores that this process may run on, by affinity."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))  # macOS has no affinity


def quota_cores(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> float:
    """The cores' worth of time that the control groups grant (cpu.max), infinity where there is no limit.

    A limit anywhere above holds too, so the smallest counts.
    """
    least = math.inf
    for folder in cgroup_folders(root, own):
        with suppress(OSError, ValueError):
            granted, period = (folder / "cpu.max").read_text().split()
            least = min(least, int(granted) / int(period))  # ValueError: "max"
    return least


def cores_here() -> int:
    """Whole cores for this process: what affinity allows, and no more than the control group grants."""
    return max(1, int(min(len(cpus()), quota_cores())))


def available_memory_bytes() -> int:
    """Memory that new processes can take, on the machine and in the control group."""
    within = cgroup_headroom("memory.max", "memory.current")
    machine = psutil.virtual_memory().available
    return machine if within is None else min(machine, within)


def available_processes() -> int | None:
    """How many more processes (threads count) we may start, by ulimit -u and the control group; None: no limit."""
    found = [cgroup_headroom("pids.max", "pids.current")]
    if hasattr(resource, "RLIMIT_NPROC") and os.getuid() != 0:  # root is not held to it
        most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        if most != resource.RLIM_INFINITY:
            found.append(max(0, most - own_threads()))
    return min((n for n in found if n is not None), default=None)


def own_threads() -> int:
    """Threads of all processes of this user."""
    total = 0
    for process in psutil.process_iter():
        try:
            if process.uids().real == os.getuid():
                total += process.num_threads()
        except (psutil.Error, OSError):
            continue
    return total


def _number(path):
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # missing, or "max"
        return None
