"""What is installed: Python, the packages, torch, MPI, the kernel and JupyterLab, and what may come before them.

A check returns what it found, or raises a Fault with what to do. Only the standard library is imported before it is
needed: the doctor also runs where nothing is installed.
"""

import functools
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import site
import struct
import subprocess
import sys
import tomllib
from pathlib import Path

from manyhands.course.folders import ROOT
from manyhands.launch.login_node import login_node

OLDEST = (3, 11)
SLOW_IMPORT_S = 20
MPI_TIMEOUT_S = 45
NAMES_AT_RISK = ("torch", "numpy", "mpi4py", "ipyparallel", "ipykernel", "IPython", "matplotlib", "manyhands")


class Fault(Exception):
    """What is not well: "warning" or "error", what was found, and what to do about it."""

    def __init__(self, status, says, remedy):
        super().__init__(says)
        self.status, self.says, self.remedy = status, says, remedy


warning, error = functools.partial(Fault, "warning"), functools.partial(Fault, "error")


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
        text, _ = child.communicate(timeout=timeout_s)
        return child.returncode, text
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGTERM)
        try:
            child.communicate(timeout=3)  # mpiexec ends its ranks, which have sessions of their own
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        return None, f"no answer within {timeout_s:g} s"


def last_line(text):
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")


def python(version=None, system=None, bits=None):
    version, system = version or sys.version_info, system or platform.system()
    text = f"{'.'.join(map(str, version[:3]))}, {sys.executable}"
    if system == "Windows":
        raise error("Windows itself has no gloo on loopback, no MPI wheel, no fork", "use Linux in WSL2")
    if (bits or struct.calcsize("P") * 8) != 64:
        raise error(f"{text} is a 32-bit build", "install a 64-bit Python: torch has no other")
    if tuple(version[:2]) < OLDEST:
        raise error(f"{text} is older than 3.11", "make kernel PYTHON=/path/to/python3.11 (or newer)")
    return text


def packages(required=None, installed=None):
    """Every package that pyproject.toml asks for: there, and within its range?"""
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    required = required or dict(line.split(">=") for line in lines)
    versions = {name: (installed or _installed)(name) for name in required}
    if missing := [name for name, version in versions.items() if version is None]:
        raise error(f"missing: {', '.join(missing)}", f"{sys.executable} -m pip install -e {ROOT}")
    old = [f"{n} {versions[n]} (>={least})" for n, least in required.items() if _numbers(versions[n]) < _numbers(least)]
    if old:
        raise warning(f"too old: {', '.join(old)}", "make kernel, which installs the tested versions")
    return f"all {len(versions)}, new enough"


def _installed(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version):
    """ "2.13.0+cpu" -> [2, 13, 0]: versions compare as numbers, not as text."""
    return [int(number) for number in re.findall(r"\d+", re.split(r"[+a-z]", version)[0])]


def paths(environ=os.environ, user_site=None, sees_user_site=None, prefix=sys.prefix):
    """What may be taken instead of the environment's packages: PYTHONPATH, ~/.local, another conda environment."""
    entries = [Path(entry) for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if shadows := [f"{entry} has {', '.join(names)}" for entry in entries if (names := _ours_in(entry))]:
        raise error(f"PYTHONPATH: {'; '.join(shadows)}: taken instead of the environment's", "unset PYTHONPATH")
    user_site = Path(user_site or site.getusersitepackages())
    sees = site.ENABLE_USER_SITE if sees_user_site is None else sees_user_site
    if (names := _ours_in(user_site)) and sees and not environ.get("PYTHONNOUSERSITE"):
        raise warning(f"{user_site} has {', '.join(names)}, which may be taken instead", "export PYTHONNOUSERSITE=1")
    active = environ.get("CONDA_PREFIX")
    if active and Path(active).resolve() != Path(prefix).resolve():
        says = (
            f"conda's {active} is active, but this Python is in {prefix}: conda's mpiexec and libraries may come first"
        )
        raise warning(says, "conda deactivate")
    return "nothing comes before the environment's packages"


def _ours_in(folder):
    """Which packages of ours lie in a folder, the course's own scripts folder excepted."""
    if folder.resolve() == ROOT / "scripts":
        return []
    return [name for name in NAMES_AT_RISK if (folder / name).is_dir() or (folder / f"{name}.py").exists()]


TORCH_PROBE = """
import json, time
start = time.perf_counter()
import torch, torch.distributed as dist
seconds = time.perf_counter() - start
print(json.dumps({
    "version": torch.__version__, "seconds": seconds, "gpu_build": torch.version.cuda or torch.version.hip or "",
    "gloo": dist.is_available() and dist.is_gloo_available(),
    "gpus": torch.accelerator.device_count() if torch.accelerator.is_available() else 0}))
"""


@functools.cache
def probe_torch():
    """(what torch says of itself, "") in a process of its own, because a broken one may crash; or (None, why not)."""
    status, text = ask([sys.executable, "-c", TORCH_PROBE], timeout_s=180)
    if status == 0:
        return json.loads(last_line(text)), ""
    return None, f"crashed: {last_line(text)}" if status is not None and status < 0 else last_line(text)


def torch(probe=probe_torch):
    found, why = probe()
    if found is None:
        remedy = "make kernel; on a site's own Python: make kernel SITE_PYTHON=/path"
        raise error(f"does not import ({why})", remedy)
    if not found["gloo"]:
        raise error(f"{found['version']} has no gloo", "install a build with torch.distributed: make kernel")
    if found["seconds"] > SLOW_IMPORT_S:
        says = f"{found['version']}, but importing it took {found['seconds']:.0f} s: the file system is slow"
        raise warning(says, "put the environment on a faster one, or use one shared by all (make shared PREFIX=/path)")
    return f"{found['version']} with gloo, imported in {found['seconds']:.1f} s"


def gpus(probe=probe_torch, run=ask, which=shutil.which):
    """Does torch see the GPUs that the driver sees?"""
    listed = run(["nvidia-smi", "-L"], 20)[1] if which("nvidia-smi") else ""
    there = len(re.findall(r"^GPU \d+:", listed, re.MULTILINE))
    found, _ = probe()
    if found is None:
        raise warning(f"{there} by nvidia-smi, but torch does not import", "see torch above")
    if there and not found["gpu_build"]:
        says = f"{there} here, but torch {found['version']} is a CPU build"
        raise warning(says, "install torch from the index that pytorch.org names, or make kernel SITE_PYTHON=/path")
    if there and not found["gpus"]:
        says = f"{there} here, torch (CUDA {found['gpu_build']}) sees none: an older driver, or CUDA_VISIBLE_DEVICES"
        raise warning(says, "nvidia-smi shows the driver's CUDA version; unset CUDA_VISIBLE_DEVICES")
    return f"{found['gpus']}, which torch sees" if found["gpus"] else "none: lessons run on the CPU with gloo"


# one write: `print` writes in pieces where PYTHONUNBUFFERED is set, and the ranks' pieces mix
HELLO = (
    "import sys; from mpi4py import MPI; w = MPI.COMM_WORLD; "
    "sys.stdout.write(f'hello {w.allreduce(1)} {w.size}\\n'); sys.stdout.flush()"
)


def mpi(launcher=None, login=None, run=ask):
    """Do two ranks say hello to each other?"""
    from manyhands.launch.allocation import loopback_mpi, mpi_launcher

    launcher = launcher or mpi_launcher(2)
    install = f"{sys.executable} -m pip install mpich mpi4py, or load the site's MPI module; all else works without"
    if launcher is None:
        raise warning("no mpiexec here", install)
    if login := login or login_node():
        raise warning(f"not tried: a login node ({login}) may forbid it", "run the doctor on a compute node")
    command = [*launcher, sys.executable, "-c", HELLO]
    _, text = run(command, timeout_s=MPI_TIMEOUT_S, environ={**loopback_mpi(), **os.environ})
    said = re.findall(r"hello (\d+) (\d+)", text)
    if said == [("1", "1")] * 2:
        says = f"`{' '.join(launcher)}` started two worlds of one: it belongs to another MPI than mpi4py"
        raise error(says, f"use the mpiexec beside {sys.executable}, or pip install --no-binary mpi4py mpi4py")
    if said != [("2", "2")] * 2:
        raise error(
            f"two ranks did not say hello: {last_line(text)}", f"try `{' '.join(launcher)} hostname`; {install}"
        )
    return f"2 ranks say hello: {launcher[0]}"


# ------------------------------------------------------------------ Jupyter


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


# started as a script, or as a module
SERVER = re.compile(
    r"(^|/)(jupyterhub-singleuser|jupyter-labhub|jupyter-lab|jupyter-server|jupyter-notebook)( |$)"
    r"|^\S*python\S* (-\w+ )*-m ?(jupyterhub\.singleuser|jupyterlab|jupyter_server|notebook)(\.\S+)?( |$)"
)
SERVER_PROBE = """
import importlib.metadata as m, json
names = {d.metadata["Name"]: d.version for d in m.distributions()}
print(json.dumps({n: names.get(n) for n in ("jupyterlab", "jupytext", "jupyterlab_widgets")}))
"""


def jupyterlab(running=None, which=shutil.which, run=ask):
    """The JupyterLab that people open the lessons in. It may live in another environment than the course.

    jupytext, which keeps notebook and script together when one saves, and the widgets' front end work in the server's.
    """
    servers = [(words, how) for words, how in running or _running() if SERVER.search(" ".join(words[:5]))]
    servers += [([script], f"started by {script}")] if (script := which("jupyter-lab")) else []
    found = [(python, how) for words, how in servers if (python := _python_of(words))]
    if not found:
        raise warning("none is running and none is on PATH", "make lab starts one")
    python, how = found[0]
    status, text = run([python, "-c", SERVER_PROBE], 60, {k: v for k, v in os.environ.items() if k != "PYTHONPATH"})
    versions = json.loads(last_line(text)) if status == 0 else {}
    lab, where = versions.get("jupyterlab"), f"{python}, {how}"
    if lab is None:
        raise warning(f"not in {where}", "open the lessons in a JupyterLab 4, as `make lab` starts it")
    if _numbers(lab) < [4]:
        raise warning(f"{lab} in {where} is older than 4", f"{python} -m pip install -U jupyterlab")
    if not versions["jupytext"]:
        says = f"{lab} in {where}, without jupytext: saving a notebook leaves its script as it was"
        raise warning(says, f"`make sync` before a job, or {python} -m pip install jupytext and start the server again")
    if not versions["jupyterlab_widgets"]:
        says = f"{lab} in {where} cannot draw widgets: their static pictures are shown"
        raise warning(says, f"{python} -m pip install jupyterlab_widgets, then reload the page")
    return f"{lab} in {where}, with jupytext and widgets"


def _python_of(words):
    """The Python of a server's command line: its first word, or what the script that it names starts with; or None."""
    if "python" in Path(words[0]).name:
        return words[0]
    for script in filter(os.path.isabs, words[:3]):
        head = Path(script).read_bytes()[:1000].decode(errors="replace")
        # "#!/venv/bin/python", or for long paths "#!/bin/sh" and '''exec' /very/long/path/python "$0" "$@"
        if (found := re.search(r"(/\S*python[\w.]*)", head)) and shutil.which(found[1]):
            return found[1]
    return None


def _running():
    """(words, how found) of the processes above this one, then of the servers that say they run."""
    import psutil
    from jupyter_core.paths import jupyter_runtime_dir

    for process in psutil.Process().parents():
        yield _cmdline(process), "running above this process"
    for path in sorted(Path(jupyter_runtime_dir()).glob("jpserver-*.json"), reverse=True):
        try:
            process = psutil.Process(json.loads(path.read_text())["pid"])
        except (OSError, ValueError, KeyError, psutil.Error):
            continue  # a server that was killed leaves its file
        yield _cmdline(process), f"running as pid {process.pid}"


def _cmdline(process):
    import psutil

    try:
        return process.cmdline() or [""]
    except psutil.Error:
        return [""]
