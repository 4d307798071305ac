"""Inspect this process's machine: the cores, memory and processes that it may use, and whether it is a login node.

python -m manyhands.launch.machine "make test"      # on a login node: print the reason and end with status 2
"""

import math
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from manyhands.launch import settings

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
VERSION_1 = {"memory.max": "memory.limit_in_bytes", "memory.current": "memory.usage_in_bytes"}
LOGIN_NAMES = re.compile(r"(^|[-_.])(login|uan|front-?end|headnode|submit)([-_]?\d+)?([-_.]|$)", re.IGNORECASE)
ANSWER_S = 5.0


def cgroup_headroom(limit: str, usage: str) -> int | None:
    """Return the smallest difference of `limit` and `usage` in our control group and its parents; None: no limit.

    cgroup_headroom("memory.max", "memory.current") is in bytes, ("pids.max", "pids.current") in processes.
    Version 2 is supported, and version 1 with its own names of these files.
    """
    left = []
    for folder in _cgroup_folders():
        for names in ((limit, usage), (VERSION_1.get(limit, limit), VERSION_1.get(usage, usage))):
            with suppress(OSError, ValueError):  # missing, or "max"
                most, used = (int((folder / name).read_text()) for name in names)
                if most < 2**60:  # version 1 uses 2**63 for "no limit"
                    left.append(max(0, most - used))
    return min(left, default=None)


def _cgroup_folders():
    """Return the folders of our control groups and their parents, innermost first."""
    folders = []
    lines = OWN_CGROUP.read_text().splitlines() if OWN_CGROUP.exists() else []
    for line in [*lines, "0::/"]:
        _, controllers, path = line.split(":", 2)
        top = CGROUPS / controllers
        inner = top / path.strip("/")
        folders += [folder for folder in (inner, *inner.parents) if folder.is_relative_to(top)]
    return folders


def compiler_for(kind: str, environ: Mapping[str, str], which: Callable = shutil.which) -> str | None:
    """Return the compiler that torch.compile would use on "cpu", "cuda" or "xpu"; None: torch.compile would fail.

    Triton looks for CC, gcc and clang, and Inductor, on the CPU, for CXX and g++ (torch 2.13).
    """
    on_cpu = "clang++" if sys.platform == "darwin" else "g++"
    variable, names = ("CXX", (on_cpu,)) if kind == "cpu" else ("CC", ("gcc", "clang"))
    named = environ.get(variable)
    return next(filter(None, map(which, [named] if named else names)), None)


def cpus() -> list[int]:
    """Return the cores that affinity allows this process."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))  # macOS has no affinity


def quota_cores() -> float:
    """Return the control groups' CPU quota in cores (cpu.max, version 1's cpu.cfs_*_us), or infinity without a limit.

    Limits of parent groups hold too, so the smallest counts.
    """
    least = math.inf
    for folder in _cgroup_folders():
        for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with suppress(OSError, ValueError):
                granted, period = " ".join((folder / name).read_text() for name in files).split()
                if int(granted) > 0:  # ValueError: "max"; version 1 has -1
                    least = min(least, int(granted) / int(period))
    return least


def cores_here() -> int:
    """Whole cores for this process: what affinity allows, and no more than the control group grants."""
    return max(1, int(min(len(cpus()), quota_cores())))


def available_memory_bytes() -> int:
    """Return the memory that new processes can allocate, on the machine and in the control group."""
    within = cgroup_headroom("memory.max", "memory.current")
    machine = psutil.virtual_memory().available
    return machine if within is None else min(machine, within)


def available_processes() -> int | None:
    """Return how many more processes and threads ulimit -u and the control group allow; None: no limit."""
    found = [cgroup_headroom("pids.max", "pids.current")]
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if most != resource.RLIM_INFINITY and os.getuid() != 0:  # does not apply to root
        found.append(max(0, most - own_threads()))
    return min((n for n in found if n is not None), default=None)


def own_threads() -> int:
    """Return the number of threads of all of this user's processes."""
    total = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            total += process.num_threads() if process.uids().real == os.getuid() else 0
    return total


def login_node() -> str | None:
    """Return a phrase saying why this is a login node, where large jobs are not allowed, or None if it is not.

    The evidence is the host's name, or a scheduler that answers here and does not list this host as a compute node.
    MANYHANDS_LOGIN_NODE=1 or =0 overrides it.
    """
    environ, hostname = settings.environment(), socket.gethostname()
    if said := environ.get("MANYHANDS_LOGIN_NODE"):
        return "MANYHANDS_LOGIN_NODE says so" if said != "0" else None
    if any(name in environ for name in ("SLURMD_NODENAME", "PBS_NODEFILE", "PBS_JOBID")):
        return None  # inside a job
    if LOGIN_NAMES.search(hostname):
        return f"its name is {hostname}"
    short = hostname.split(".", 1)[0]
    for scheduler, command in (
        ("Slurm", ["sinfo", "--noheader", "--Node", "--format=%n %N"]),  # hostname, and name in Slurm
        ("PBS", ["pbsnodes", "-a", "-F", "dsv"]),
    ):
        if nodes := _ask(command).strip():
            known = short in re.split(r"[\s|=.]+", nodes)  # of PBS: Name=x1|Mom=x1.hsn|...
            return None if known else f"{scheduler} answers here and has no compute node {short}"
    return None


def refuse_on_login_node(what: str) -> str:
    """Return a sentence that refuses `what` ("make preflight") on a login node, or "" if it may run."""
    if reason := login_node():
        return (
            f"{what} runs many processes, and this is a login node ({reason}); run it on a compute node, say in an "
            "interactive job. If this is not a login node, set MANYHANDS_LOGIN_NODE=0"
        )
    return ""


def _ask(command: Sequence[str]) -> str:
    """Return the output of a scheduler's command, or "" if it is missing, fails or does not answer."""
    if shutil.which(command[0]) is None:
        return ""
    with suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ANSWER_S)
        return answer.stdout if answer.returncode == 0 else ""
    return ""


def main() -> int:
    refusal = refuse_on_login_node(sys.argv[1])
    if refusal:
        print(refusal, file=sys.stderr)
    return 2 if refusal else 0


if __name__ == "__main__":
    from manyhands.launch.entry import run_program

    run_program("machine", main)
