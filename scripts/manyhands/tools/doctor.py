"""What this machine has and what it lacks for the course: a line per check, each with its remedy.

`doctor_software` has the checks of what is installed; those of the machine are here.
"""

import argparse
import json
import os
import shutil
import socket
import tempfile
from pathlib import Path

from manyhands.course.folders import ROOT
from manyhands.launch.login_node import login_node
from manyhands.tools import doctor_software as software
from manyhands.tools.doctor_software import Fault, error, warning

GIB = 2**30
LESSON_BYTES = 3 * GIB  # what a lesson may hold with 4 ranks
LEAST_BYTES = 3 * GIB // 2  # below this not even 2 ranks start
NOTEBOOK_PROCESSES = 150  # processes and threads of a notebook with 4 ranks, and then some
OPEN_FILES = 1024
SHM_BYTES = 256 * 2**20  # MPICH's ranks talk through it; a container's default is 64 MiB
DISK_BYTES, DISK_FILES = GIB // 2, 1000
PORTS = 40  # what a few notebooks at once listen on
MARKS = {"ok": "OK", "warning": "warning", "error": "ERROR"}


def examine(checks):
    """Yield {"check", "status", "says", "remedy"} of each. A check that itself breaks is a warning that says how."""
    for name, check in checks.items():
        status, remedy = "ok", ""
        try:
            says = check()
        except Fault as fault:
            status, says, remedy = fault.status, fault.says, fault.remedy
        except Exception as problem:  # noqa: BLE001 - whatever it is, the other checks go on
            status, says = "warning", f"could not be checked ({type(problem).__name__}: {problem})"
            remedy = "see packages above: the environment may be incomplete"
        yield {"check": name, "status": status, "says": says, "remedy": remedy}


def main(argv=None, description=None, checks=None) -> int:
    """Print the findings; the exit status is 1 if one of them is an error, else 0."""
    parser = argparse.ArgumentParser(
        description=description or __doc__.split("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="a list of findings for programs")
    options = parser.parse_args(argv)
    findings = []
    for finding in examine(CHECKS if checks is None else checks):
        findings.append(finding)
        if not options.json:
            print(f"{finding['check']:<11} {MARKS[finding['status']]:<8} {finding['says']}", flush=True)
            if finding["remedy"]:
                print(f"{'':<20} -> {finding['remedy']}", flush=True)
    counts = {status: sum(finding["status"] == status for finding in findings) for status in MARKS}
    said = [f"{n} {status}{'s' * (n != 1)}" for status, n in counts.items() if n and status != "ok"]
    if options.json:
        print(json.dumps(findings, indent=1))
    else:
        print(f"{counts['ok']} of {len(findings)} checks are OK" + (f", {' and '.join(said)}" if said else ""))
    return int(counts["error"] > 0)


# ------------------------------------------------------------------ the machine


def cores(affinity=None, quota=None, machine=None):
    from manyhands.launch import limits

    affinity, quota = affinity or len(limits.cpus()), quota or limits.quota_cores()
    granted = max(1, int(min(affinity, quota)))
    limit = "sets no limit" if quota == float("inf") else f"{quota:g}"
    text = f"{granted} of {machine or os.cpu_count()} (affinity {affinity}, control group {limit})"
    if granted < 2:
        raise warning(f"{text}: 4 ranks take turns on one core", "ask for 2 or more, say --cpus-per-task=4")
    return text


def memory(available=None, address_space=None):
    from manyhands.launch.limits import available_memory_bytes

    available = available or available_memory_bytes()
    address_space = address_space or _soft_limit("RLIMIT_AS")
    text = f"{available / GIB:.1f} GiB free for us"
    if available < LEAST_BYTES:
        raise error(f"{text}, 2 ranks with torch need {LEAST_BYTES / GIB:.1f}", "ask for 4 GB or more")
    if available < LESSON_BYTES:
        raise warning(f"{text}, a lesson may take {LESSON_BYTES / GIB:.0f}", "use n_ranks = 2, or ask for 4 GB")
    if 0 < address_space < 64 * GIB:
        says = f"ulimit -v is {address_space / GIB:.0f} GiB: torch maps far more than it uses"
        raise warning(says, "ulimit -v unlimited")
    return text


def limits(processes=..., files=None):
    """Processes and open files."""
    from manyhands.launch.limits import available_processes

    processes = available_processes() if processes is ... else processes
    files = files or _soft_limit("RLIMIT_NOFILE")
    if processes is not None and processes < NOTEBOOK_PROCESSES:
        says = f"only {processes} more processes (ulimit -u, the control group's pids.max), a notebook takes about"
        raise error(f"{says} {NOTEBOOK_PROCESSES}", "end other processes (ps ux), or ask for a higher limit")
    if 0 <= files < OPEN_FILES:
        raise warning(f"ulimit -n is {files}", f"ulimit -n {OPEN_FILES * 4}")
    said = "no limit of processes" if processes is None else f"{processes} more processes"
    return f"{said}, {'any number of' if files < 0 else files} open files"


def _soft_limit(name):
    """A soft limit of this process; -1: unlimited, or not known here."""
    import resource

    limit = resource.getrlimit(getattr(resource, name))[0]
    return -1 if limit == resource.RLIM_INFINITY else limit


def disk(places=None, usage=os.statvfs, shm="/dev/shm"):
    """Room, files and permission for what runs write; a full disk shows as strange errors."""
    outputs = _outputs()
    places = places or {"home": Path.home(), "temporary files": Path(tempfile.gettempdir()), "outputs": outputs}
    texts = []
    for name, folder in places.items():
        folder = _existing(folder)
        found = usage(folder)
        free, files = found.f_bavail * found.f_frsize, found.f_favail if found.f_files else DISK_FILES
        if not _can_be_written(folder):
            raise error(
                f"{name}: {folder} cannot be written", "set HOME, TMPDIR or MANYHANDS_OUTPUTS to a place with room"
            )
        if free < DISK_BYTES or files < DISK_FILES:  # btrfs and others count no files
            short = f"{free / 2**20:.0f} MiB" if free < DISK_BYTES else f"{files} files"
            remedy = "remove files there (du -sh ~/* ~/.cache), or set TMPDIR or MANYHANDS_OUTPUTS"
            raise error(f"only {short} left for {name} ({folder})", remedy)
        texts.append(f"{name} {free / GIB:.1f} GiB")
    if Path(shm).is_dir() and (free := usage(shm).f_bavail * usage(shm).f_frsize) < SHM_BYTES:
        says = f"{shm} has {free / 2**20:.0f} MiB free: ranks under MPI may crash with a bus error"
        raise warning(says, "in a container --shm-size=1g; else remove old files there, or use torchrun")
    return f"{', '.join(texts)} free; outputs go to {outputs}"


def _outputs():
    """Where runs write. A read-only course is fine: its outputs go to the user's own place."""
    if named := os.environ.get("MANYHANDS_OUTPUTS"):
        return Path(named).expanduser()
    own = ROOT / "outputs"
    return own if _can_be_written(_existing(own)) else Path.home() / ".local/share/manyhands/outputs"


def _existing(folder):
    """The folder, or the one in which it would be made."""
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())


def _can_be_written(folder):
    """Tried: modes do not know a read-only disk, nor a used-up quota."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(2**20))
        return True
    except OSError:
        return False


def network(environ=os.environ, listen=None, resolve=socket.gethostbyname):
    """Free ports on loopback, an address for this host's name, and no proxy between the processes of one machine."""
    sockets = []
    try:
        for _ in range(PORTS):
            sockets.append((listen or socket.create_server)(("127.0.0.1", 0)))
        socket.create_connection(sockets[0].getsockname(), timeout=5).close()
    except OSError as problem:
        remedy = "a firewall or too many open ports: ss -tln shows them; ip link set lo up"
        raise error(f"port {len(sockets) + 1} of {PORTS} on 127.0.0.1: {problem}", remedy) from None
    finally:
        for one in sockets:
            one.close()
    name = socket.gethostname()
    try:
        resolve(name)  # torchrun and MPI look up this host by its name
    except OSError:
        says = f"{name} has no address: torchrun and mpiexec may wait long for it"
        raise warning(says, f'add "127.0.0.1 {name}" to /etc/hosts, or ask the administrator to') from None
    proxies = [name for name in environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy") and environ[name]]
    without = {word.strip() for name in ("no_proxy", "NO_PROXY") for word in environ.get(name, "").split(",")}
    missing = [host for host in ("127.0.0.1", "localhost") if host not in without and "*" not in without]
    if proxies and missing:
        says = f"{', '.join(proxies)} set, and NO_PROXY lacks {' and '.join(missing)}"
        raise warning(says, "export NO_PROXY=127.0.0.1,localhost no_proxy=127.0.0.1,localhost")
    return f"{PORTS} free ports on 127.0.0.1, {name} has an address, no proxy stands between"


def scheduler(environ=os.environ, which=shutil.which, login=...):
    """Slurm, PBS or neither, and whether this is a login node."""
    if reason := login_node() if login is ... else login:
        says = f"a login node ({reason}): use 2 ranks; make test and make preflight refuse"
        raise warning(says, "work in an interactive job or in the hub; MANYHANDS_LOGIN_NODE=0 if this is no login node")
    for variable, name in {"SLURM_JOB_ID": "Slurm", "PBS_JOBID": "PBS"}.items():
        if variable in environ:
            return f"inside {name} job {environ[variable]}"
    submit = {"sbatch": "Slurm", "qsub": "PBS"}
    found = [f"{name} ({path})" for program, name in submit.items() if (path := which(program))]
    return f"{', '.join(found)}, no job" if found else "none: bash jobs/ddp_shakespeare.pbs runs here"


def data():
    """Is Shakespeare there? Without it every run falls back to another text, and shows other numbers."""
    from manyhands.data import shakespeare  # it is looked for, not downloaded

    get_it = "python scripts/prepare_data.py where there is a network, or MANYHANDS_SHAKESPEARE=/path/to/the/file"
    where, content = os.environ.get("MANYHANDS_SHAKESPEARE"), None
    try:
        if where:
            content, _ = shakespeare.find()
        elif found := shakespeare.from_cache():
            where, content = found
    except shakespeare.DataError as problem:
        raise error(str(problem), get_it) from None
    if content is None:
        raise warning("Shakespeare is not here; without it lessons train on another text", get_it)
    return f"Shakespeare, {len(content):,} bytes, checked ({where})"


CHECKS = {
    "python": software.python, "packages": software.packages, "paths": software.paths, "torch": software.torch,
    "GPUs": software.gpus, "MPI": software.mpi, "kernel": software.kernel, "JupyterLab": software.jupyterlab,
    "cores": cores, "memory": memory, "limits": limits, "disk": disk, "network": network, "scheduler": scheduler,
    "data": data,
}  # fmt: skip
