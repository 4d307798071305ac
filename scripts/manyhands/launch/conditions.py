"""Under which conditions a run was made: on what, with which versions, of which commit, when, by which command.

`metrics.json` holds them, so that what was measured on one machine can be shown on another (see `recorded_runs`).
Neither host names nor folders are in it.
"""

import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from manyhands.course.folders import ROOT
from manyhands.launch.launchers import launcher_named
from manyhands.launch.limits import cores_here
from manyhands.launch.ranks import Ranks


def conditions(ranks: Ranks) -> dict:
    """{"hardware", "versions": {...}, "commit", "date", "command"} as JSON can hold them; what is unknown is None."""
    return {
        "hardware": hardware(ranks),
        "versions": versions(ranks.device),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "command": command(ranks),
    }


def hardware(ranks: Ranks) -> str:
    """ "4 x NVIDIA H200" or "2 cores of ...", and on how many nodes where they are more than one. What rank 0 sees."""
    if ranks.device.type == "cpu":
        count = cores_here()
        found = f"{count} core{'s' * (count > 1)} of {cpu_name()}"
    else:
        found = f"{ranks.world_size} x {torch.get_device_module(ranks.device).get_device_name(ranks.device)}"
    nodes = -(-ranks.world_size // ranks.local_world_size)
    return found + (f" on {nodes} nodes" if nodes > 1 else "")


def versions(device: torch.device) -> dict[str, str | None]:
    """Of torch, CUDA, NCCL, Python and the GPU's driver; None for what this device does not use."""
    cuda = device.type == "cuda"
    return {
        "torch": torch.__version__,
        "cuda": (torch.version.cuda or torch.version.hip) if cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "python": platform.python_version(),
        "driver": _driver() if cuda else None,
    }


def commit(root: Path = ROOT) -> str | None:
    """The commit of the course at `root`, and whether files differ: "1a2b3c4 with uncommitted changes". Or None."""
    git = ["git", "--no-optional-locks", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, timeout=10)
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return None
    if head.returncode:
        return None
    return head.stdout.strip() + (" with uncommitted changes" if changed.stdout.strip() else "")


def command(ranks: Ranks, argv: Sequence[str] | None = None) -> str:
    """What one types to do the same again; in a notebook, which one it is."""
    argv = sys.argv if argv is None else argv
    if ranks.launcher == "notebook":
        return f"notebooks/{ranks.lesson}.ipynb with n_ranks = {ranks.world_size}"
    script = " ".join([_from_root(argv[0]), *argv[1:]]).strip()
    nodes = -(-ranks.world_size // ranks.local_world_size)
    form = launcher_named(ranks.launcher).command
    return form.format(n=ranks.world_size, local=ranks.local_world_size, nodes=nodes, script=script)


def cpu_name() -> str:
    """What the system calls its CPU."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _driver(path="/proc/driver/nvidia/version"):
    """The NVIDIA driver's version; None where there is none."""
    try:
        found = re.search(r"Kernel Module\b.*?\s(\d+\.\d[\d.]*)", Path(path).read_text())
    except OSError:
        return None
    return found[1] if found else None


def _from_root(path):
    """A script as seen from the course's folder; of others the name alone."""
    path = Path(path)
    try:
        return str(path.resolve().relative_to(ROOT))
    except ValueError:
        return path.name
