"""Cores that this process may use: by affinity, and by what the control group grants."""

from __future__ import annotations

import math
import os
from pathlib import Path


def cpus() -> list[int]:
    """The cores that this process may run on, by affinity."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))  # macOS has no affinity


def quota_cores(root="/sys/fs/cgroup", membership="/proc/self/cgroup") -> float:
    """The cores' worth of time that the control group grants (cpu.max), infinity where there is no limit.

    A limit anywhere above holds too, so the smallest on the way up to the root counts.
    """
    try:
        own = next(line.split("::", 1)[1] for line in Path(membership).read_text().splitlines() if "::" in line)
    except (OSError, StopIteration):
        own = "/"
    folder, least = Path(root) / own.strip("/"), math.inf
    for place in (folder, *folder.parents):
        try:
            granted, period = (place / "cpu.max").read_text().split()
            least = min(least, math.inf if granted == "max" else int(granted) / int(period))
        except (OSError, ValueError):
            pass
        if place == Path(root):
            break
    return least


def cores_here() -> int:
    """Whole cores for this process: what affinity allows, and no more than the control group grants."""
    return max(1, int(min(len(cpus()), quota_cores())))
