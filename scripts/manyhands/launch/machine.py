"""The machine that this process is on: the cores, memory and processes that it may use, and whether it is a login node.

python -m manyhands.launch.machine "make test"      # on a login node: says why not, and ends with status 2
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
    """The least that is left between `limit` and `usage` in our control group and those above it; None: no limit.

    cgroup_headroom("memory.max", "memory.current") is in bytes, ("pids.max", "pids.current") in processes. Knows
    version 2, and version 1 by its own names of these files.
    """
    left = []
    for folder in _cgroup_folders():
        for names in ((limit, usage), (VERSION_1.get(limit, limit), VERSION_1.get(usage, usage))):
            with suppress(OSError, ValueError):  # missing, or "max"
                most, used = (int((folder / name).read_text()) for name in names)
                if most < 2**60:  # version 1 says 2**63 for "no limit"
                    left.append(max(0, most - used))
    return min(left, default=None)


def _cgroup_folders():
    """The folders of our control groups and of all above them, innermost first."""
    folders = []
    lines = OWN_CGROUP.read_text().splitlines() if OWN_CGROUP.exists() else []
    for line in [*lines, "0::/"]:
        _, controllers, path = line.split(":", 2)
        top = CGROUPS / controllers
        inner = top / path.strip("/")
        folders += [folder for folder in (inner, *inner.parents) if folder.is_relative_to(top)]
    return folders


def compiler_for(kind: str, environ: Mapping[str, str], which: Callable = shutil.which) -> str | None:
    """The compiler that torch.compile builds code with on "cpu", "cuda" or "xpu", or None: it would fail there.

    Triton looks for CC, gcc and clang, and Inductor, on the CPU, for CXX and g++ (torch 2.13).
    """
    on_cpu = "clang++" if sys.platform == "darwin" else "g++"
    variable, names = ("CXX", (on_cpu,)) if kind == "cpu" else ("CC", ("gcc", "clang"))
    named = environ.get(variable)
    return next(filter(None, map(which, [named] if named else names)), None)


def cpus() -> list[int]:
    """The cores that this process may run on, by affinity."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))  # macOS has no affinity


def quota_cores() -> float:
    """The cores' worth of time that the control groups grant (cpu.max), infinity where there is no limit.

    A limit anywhere above holds too, so the smallest counts.
    """
    least = math.inf
    for folder in _cgroup_folders():
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
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if most != resource.RLIM_INFINITY and os.getuid() != 0:  # root is not held to it
        found.append(max(0, most - own_threads()))
    return min((n for n in found if n is not None), default=None)


def own_threads() -> int:
    """Threads of all processes of this user."""
    total = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            total += process.num_threads() if process.uids().real == os.getuid() else 0
    return total


def login_node() -> str | None:
    """Why this is a login node, where work of many processes is not welcome, as a phrase; None if it is not.

    By the host's name, or because a scheduler answers here that does not count this host among its compute nodes.
    MANYHANDS_LOGIN_NODE=1 or =0 says it outright.
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
    """A sentence that refuses `what` ("make preflight") on a login node, or "" where it may run."""
    if reason := login_node():
        return (
            f"{what} runs many processes, and this is a login node ({reason}); run it on a compute node, say in an "
            "interactive job. If this is no login node, set MANYHANDS_LOGIN_NODE=0"
        )
    return ""


def _ask(command: Sequence[str]) -> str:
    """What a scheduler's command prints; "" where it is missing, fails or does not answer."""
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
