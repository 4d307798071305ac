"""Checks of the machine: cores, memory, limits, space, network and GPUs."""

import os
import re
import shutil
import socket
import sys
import tempfile
from pathlib import Path

from manyhands.course.folders import ROOT
from manyhands.doctor.finding import ask, error, ok, warning
from manyhands.doctor.software import probe_torch

GIB = 2**30
LESSON_BYTES = 3 * GIB  # what a lesson may hold with 4 ranks
LEAST_BYTES = 3 * GIB // 2  # below this not even 2 ranks start
NOTEBOOK_PROCESSES = 150  # processes and threads of a notebook with 4 ranks, and then some
OPEN_FILES = 1024
SHM_BYTES = 256 * 2**20  # MPICH's ranks talk through it; a container's default is 64 MiB
HOME_BYTES = GIB // 2
ENVIRONMENT_BYTES, ENVIRONMENT_FILES = 2 * GIB, 50_000
PORTS = 40  # what a few notebooks at once listen on


def cores(affinity=None, quota=None, machine=None):
    if affinity is None:
        from manyhands.launch import cores

        affinity, quota = len(cores.cpus()), cores.quota_cores()
    granted = max(1, int(min(affinity, quota)))
    text = f"{granted} of {machine or os.cpu_count()} (affinity {affinity}, control group {_quota(quota)})"
    if granted < 2:
        return warning("cores", f"{text}: 4 ranks take turns on one core", "ask for 2 or more, say --cpus-per-task=4")
    return ok("cores", text)


def _quota(quota):
    return "sets no limit" if quota == float("inf") else f"{quota:g}"


def memory(available=None, address_space=None):
    if available is None:
        from manyhands.launch.limits import available_memory_bytes

        available = available_memory_bytes()
    address_space = _soft_limit("RLIMIT_AS") if address_space is None else address_space
    text = f"{available / GIB:.1f} GiB free for us"
    if available < LEAST_BYTES:
        return error("memory", f"{text}, 2 ranks with torch need {LEAST_BYTES / GIB:.1f}", "ask for 4 GB or more")
    if available < LESSON_BYTES:
        return warning(
            "memory",
            f"{text}, a lesson may take {LESSON_BYTES / GIB:.0f}",
            "use n_ranks = 2, or ask for 4 GB",
        )
    if 0 < address_space < 64 * GIB:
        return warning(
            "memory",
            f"ulimit -v is {address_space / GIB:.0f} GiB: torch maps far more than it uses",
            "ulimit -v unlimited",
        )
    return ok("memory", text)


def processes(available=...):
    if available is ...:
        from manyhands.launch.limits import available_processes

        available = available_processes()
    if available is None:
        return ok("processes", "no limit by ulimit -u or the control group")
    text = f"{available} more (ulimit -u and the control group's pids.max)"
    if available < NOTEBOOK_PROCESSES:
        return error(
            "processes", f"only {text}, a notebook with 4 ranks takes about {NOTEBOOK_PROCESSES}",
            "end other processes (ps ux), or ask for a higher limit",
        )  # fmt: skip
    return ok("processes", text)


def open_files(limit=None):
    limit = _soft_limit("RLIMIT_NOFILE") if limit is None else limit
    if 0 <= limit < OPEN_FILES:
        return warning("open files", f"ulimit -n is {limit}", f"ulimit -n {OPEN_FILES * 4}")
    return ok("open files", f"ulimit -n is {'unlimited' if limit < 0 else limit}")


def shared_memory(free=None, folder="/dev/shm"):
    if free is None:
        if not Path(folder).is_dir():
            return ok("/dev/shm", "this system has none")
        free = shutil.disk_usage(folder).free
    text = f"{free / 2**20:.0f} MiB free"
    if free < SHM_BYTES:
        return warning(
            "/dev/shm", f"{text}: ranks under MPI may crash with a bus error",
            "in a container --shm-size=1g; else remove old files there, or use torchrun",
        )  # fmt: skip
    return ok("/dev/shm", text)


def space(places=None, usage=None):
    """Room and files for outputs and caches; a full disk shows as strange errors."""
    places = places or {"home": Path.home(), "temporary files": Path(tempfile.gettempdir()), "course": ROOT}
    texts = []
    for name, folder in places.items():
        free, files = (usage or _usage)(folder)
        texts.append(f"{name} {free / GIB:.1f} GiB")
        if free < HOME_BYTES or files < 1000:
            short = f"{free / 2**20:.0f} MiB" if free < HOME_BYTES else f"{files} files"
            return error(
                "space",
                f"only {short} left for {name} ({folder})",
                "remove files there, or set TMPDIR or MANYHANDS_OUTPUTS",
            )
    return ok("space", f"{', '.join(texts)} free")


def _usage(folder):
    """(bytes, files) that are free for us."""
    found = os.statvfs(folder)
    files = found.f_favail if found.f_files else ENVIRONMENT_FILES  # btrfs and others count no files
    return found.f_bavail * found.f_frsize, files


def quota(run=ask, which=shutil.which, home=None):
    """What `quota` says about this user, and whether a file can be written at home at all."""
    try:
        with tempfile.NamedTemporaryFile(dir=home or Path.home()) as file:
            file.write(bytes(2**20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as problem:
        return error(
            "quota", f"a file of 1 MiB cannot be written at home: {problem.strerror}",
            "remove files there (du -sh ~/* ~/.cache), or set HOME to a place with room",
        )  # fmt: skip
    if not which("quota"):
        return ok("quota", "home can be written; no quota program here")
    for line in run(["quota", "-w"], 10).text.splitlines():
        words = line.split()
        if len(words) < 4 or not re.fullmatch(r"\d+\*?", words[1]):
            continue
        used, soft = int(words[1].rstrip("*")), int(words[2]) if words[2].isdigit() else 0
        if words[1].endswith("*") or (soft and used > 0.9 * soft):
            return warning(
                "quota", f"{used / 2**20:.1f} of {soft / 2**20:.1f} GiB used on {words[0]}",
                "remove files, or put the environment elsewhere (make shared PREFIX=/path)",
            )  # fmt: skip
    return ok("quota", "home can be written, no quota is near its end")


def ports(listen=None):
    """Can we listen on loopback, on as many ports as a few notebooks need, and does a connection arrive?"""
    sockets = []
    try:
        for _ in range(PORTS):
            sockets.append((listen or _listen)())
        with socket.create_connection(sockets[0].getsockname(), timeout=5):
            pass
    except OSError as problem:
        return error(
            "ports", f"port {len(sockets) + 1} of {PORTS} on 127.0.0.1: {problem}",
            "a firewall or too many open ports: ss -tln shows them; ip link set lo up",
        )  # fmt: skip
    finally:
        for one in sockets:
            one.close()
    return ok("ports", f"{PORTS} free ones on 127.0.0.1, and a connection arrives")


def _listen():
    one = socket.socket()
    one.bind(("127.0.0.1", 0))
    one.listen()
    return one


def host_name(name=None, resolve=socket.gethostbyname):
    """torchrun and MPI look up this host by its name."""
    name = name or socket.gethostname()
    try:
        return ok("host name", f"{name} is {resolve(name)}")
    except OSError:
        return warning(
            "host name", f"{name} has no address: torchrun and mpiexec may wait long for it",
            f'add "127.0.0.1 {name}" to /etc/hosts, or ask the administrator to',
        )  # fmt: skip


def proxies(environ=os.environ):
    """A proxy must not stand between the browser, the server and ranks of one machine."""
    named = [
        name
        for name in ("http_proxy", "https_proxy", "all_proxy")
        for name in (name, name.upper())
        if environ.get(name)
    ]
    if not named:
        return ok("proxies", "none set")
    without = {word.strip() for name in ("no_proxy", "NO_PROXY") for word in environ.get(name, "").split(",")}
    missing = [host for host in ("127.0.0.1", "localhost") if host not in without and "*" not in without]
    if missing:
        return warning(
            "proxies", f"{', '.join(named)} set, and NO_PROXY lacks {' and '.join(missing)}",
            "export NO_PROXY=127.0.0.1,localhost no_proxy=127.0.0.1,localhost",
        )  # fmt: skip
    return ok("proxies", f"{', '.join(named)} set, not for this machine")


def gpus(probe=probe_torch, run=ask, which=shutil.which):
    """Does torch see the GPUs that the driver sees?"""
    listed = run(["nvidia-smi", "-L"], 20).text if which("nvidia-smi") else ""
    there = len(re.findall(r"^GPU \d+:", listed, re.MULTILINE))
    facts, _ = probe()
    if facts is None:
        return warning("GPUs", f"{there} by nvidia-smi, but torch does not import", "see torch above")
    seen = facts["cuda"] or facts["xpu"]
    if there and not facts["cuda_build"]:
        return warning(
            "GPUs", f"{there} here, but torch {facts['version']} is a CPU build",
            f"{sys.executable} -m pip install torch with the index that pytorch.org names, or make kernel SITE_PYTHON=/path",
        )  # fmt: skip
    if there and not seen:
        return warning(
            "GPUs", f"{there} here, torch (CUDA {facts['cuda_build']}) sees none",
            "an older driver, or CUDA_VISIBLE_DEVICES hides them: nvidia-smi shows the driver's CUDA version",
        )  # fmt: skip
    if not seen:
        return ok("GPUs", "none: lessons run on the CPU with gloo")
    return ok("GPUs", f"{seen} x {'CUDA or ROCm' if facts['cuda'] else 'XPU'}")


def _soft_limit(name):
    """A soft limit of this process; -1: unlimited, or not known here."""
    try:
        import resource

        limit = resource.getrlimit(getattr(resource, name))[0]
        return -1 if limit == resource.RLIM_INFINITY else limit
    except (ImportError, AttributeError):
        return -1
