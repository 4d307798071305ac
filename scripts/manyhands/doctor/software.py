"""Checks of what is installed: Python, torch, MPI, the packages, and what may come before them on the paths."""

import functools
import importlib.metadata
import json
import os
import platform
import re
import site
import struct
import sys
import tomllib
from pathlib import Path

from manyhands.course.folders import ROOT
from manyhands.doctor.finding import ask, error, ok, warning

OLDEST = (3, 11)
SLOW_IMPORT_S = 20
NAMES_AT_RISK = ("torch", "numpy", "mpi4py", "ipyparallel", "ipykernel", "IPython", "matplotlib", "manyhands")


def python(version=None, system=None, bits=None):
    version, system = version or sys.version_info, system or platform.system()
    text = f"{'.'.join(map(str, version[:3]))}, {sys.executable}"
    if system == "Windows":
        return error("python", "Windows itself has no gloo on loopback, no MPI wheel, no fork", "use Linux in WSL2")
    if (bits or struct.calcsize("P") * 8) != 64:
        return error("python", f"{text} is a 32-bit build", "install a 64-bit Python: torch has no other")
    if tuple(version[:2]) < OLDEST:
        return error("python", f"{text} is older than 3.11", "make kernel PYTHON=/path/to/python3.11 (or newer)")
    return ok("python", text)


def packages(required=None, installed=None, pins=None):
    """Every package that pyproject.toml asks for: there, within its range, as tested?"""
    required = requirements(ROOT / "pyproject.toml") if required is None else required
    pins = pinned(ROOT / "requirements.txt") if pins is None else pins
    versions = {name: (installed or _installed)(name) for name in required}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        return error("packages", f"missing: {', '.join(missing)}", f"{sys.executable} -m pip install -e {ROOT}")
    old = [
        f"{name} {versions[name]} ({range_})" for name, range_ in required.items() if not within(versions[name], range_)
    ]
    if old:
        return warning("packages", f"too old: {', '.join(old)}", "make kernel, which installs the tested versions")
    others = [f"{name} {version}" for name, version in versions.items() if not _as_pinned(version, pins.get(name))]
    if others:
        return ok("packages", f"{len(versions) - len(others)} as tested, others: {', '.join(others)}")
    return ok("packages", f"all {len(versions)} as tested")


def requirements(pyproject):
    """Package -> range, such as {"torch": ">=2.6"}, of the dependencies in pyproject.toml."""
    lines = tomllib.loads(Path(pyproject).read_text("utf-8"))["project"]["dependencies"]
    found = (re.match(r"([\w.-]+)(?:\[.*?\])?\s*([^;]*)", line) for line in lines)
    return {line[1]: line[2].strip() for line in found}


def pinned(requirements_txt):
    """Package -> version of the lines `name==version`; {} without the file."""
    try:
        text = Path(requirements_txt).read_text(encoding="utf-8")
    except OSError:
        return {}
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE))


def within(version, range_):
    """Is version "2.13.0+cpu" within ">=2.6"? Ranges of the course have one lower bound."""
    return _numbers(version) >= _numbers(range_.split(">=", 1)[1]) if ">=" in range_ else True


def _numbers(version):
    return [int(number) for number in re.findall(r"\d+", re.split(r"[+,<a-z]", version)[0])]


def _as_pinned(version, pin):
    return pin is None or version.split("+")[0] == pin  # 2.13.0+cpu is 2.13.0


def _installed(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


TORCH_PROBE = """
import json, time
start = time.perf_counter()
import torch, torch.distributed as dist
seconds = time.perf_counter() - start
xpu = getattr(torch, "xpu", None)
print(json.dumps({
    "version": torch.__version__, "seconds": seconds, "cuda_build": torch.version.cuda or torch.version.hip,
    "gloo": dist.is_available() and dist.is_gloo_available(), "cuda": torch.cuda.device_count(),
    "xpu": xpu.device_count() if xpu is not None and xpu.is_available() else 0}))
"""


@functools.cache
def probe_torch():
    """(facts, "") of torch in a process of its own, because a broken one may crash; or (None, why not)."""
    answer = ask([sys.executable, "-c", TORCH_PROBE], timeout_s=180)
    if answer.status == 0:
        return json.loads(answer.last_line), ""
    return (
        None,
        answer.last_line if answer.status is not None and answer.status >= 0 else f"crashed: {answer.last_line}",
    )


def torch(probe=probe_torch):
    facts, why = probe()
    if facts is None:
        return error(
            "torch",
            f"does not import ({why})",
            "make kernel; on a site's own Python: make kernel SITE_PYTHON=/path",
        )
    if not facts["gloo"]:
        return error("torch", f"{facts['version']} has no gloo", "install a build with torch.distributed: make kernel")
    if facts["seconds"] > SLOW_IMPORT_S:
        return warning(
            "torch", f"{facts['version']}, but importing it took {facts['seconds']:.0f} s",
            "the file system is slow: put the environment on a faster one, or use one shared by all (make shared PREFIX=/path)",
        )  # fmt: skip
    return ok("torch", f"{facts['version']} with gloo, imported in {facts['seconds']:.1f} s")


# one write: `print` writes in pieces where PYTHONUNBUFFERED is set, and the ranks' pieces mix
HELLO = (
    "import sys; from mpi4py import MPI; w = MPI.COMM_WORLD; "
    "sys.stdout.write(f'hello {w.allreduce(1)} {w.size}\\n'); sys.stdout.flush()"
)
MPI_TIMEOUT_S = 45


def mpi(launcher=None, login=None, run=ask):
    """Do two ranks say hello to each other?"""
    if launcher is None:
        from manyhands.launch.allocation import mpi_launcher

        launcher = mpi_launcher(2)
    install = f"{sys.executable} -m pip install mpich mpi4py, or load the site's MPI module; notebooks and torchrun work without"
    if launcher is None:
        return warning("MPI", "no mpiexec here", install)
    if login:
        return warning("MPI", f"not tried: a login node ({login}) may forbid it", "run the doctor on a compute node")
    from manyhands.launch.allocation import loopback_mpi

    answer = run(
        [*launcher, sys.executable, "-c", HELLO],
        timeout_s=MPI_TIMEOUT_S,
        environ={**loopback_mpi(), **os.environ},
    )
    said = re.findall(r"hello (\d+) (\d+)", answer.text)
    shown = " ".join(launcher)
    if said == [("2", "2")] * 2:
        return ok("MPI", f"2 ranks say hello: {launcher[0]}")
    if said == [("1", "1")] * 2:
        return error(
            "MPI", f"`{shown}` started two worlds of one: it belongs to another MPI than mpi4py",
            f"use the mpiexec beside {sys.executable}, or build mpi4py with this MPI (pip install --no-binary mpi4py mpi4py)",
        )  # fmt: skip
    return error("MPI", f"two ranks did not say hello: {answer.last_line}", f"try `{shown} hostname`; {install}")


def ipyparallel(run=ask):
    """Can the ranks of a notebook start? Controller and engine must load."""
    answer = run(
        [
            sys.executable,
            "-c",
            "import ipyparallel.controller, ipyparallel.engine; print(ipyparallel.__version__)",
        ],
        60,
    )
    if answer.status == 0:
        return ok("ipyparallel", answer.last_line)
    return error("ipyparallel", f"does not load ({answer.last_line})", "make kernel")


def user_site(enabled=None, folder=None, environ=os.environ):
    """Packages in ~/.local come before those of the environment where it has not its own."""
    enabled = site.ENABLE_USER_SITE if enabled is None else enabled
    folder = Path(folder or site.getusersitepackages())
    names = _ours_in(folder)
    if not names:
        return ok("~/.local", "holds none of our packages")
    if not enabled or environ.get("PYTHONNOUSERSITE"):
        return ok("~/.local", f"has {', '.join(names)}, which this Python does not see")
    return warning(
        "~/.local",
        f"{folder} has {', '.join(names)}, which may be taken instead",
        "export PYTHONNOUSERSITE=1",
    )


def python_path(environ=os.environ):
    entries = [Path(entry) for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    shadows = [f"{entry} has {', '.join(names)}" for entry in entries if (names := _ours_in(entry))]
    if shadows:
        return error("PYTHONPATH", f"{'; '.join(shadows)}: taken instead of the environment's", "unset PYTHONPATH")
    return ok("PYTHONPATH", f"{len(entries)} entries, none holds our packages" if entries else "not set")


def conda(environ=os.environ, prefix=None):
    active, prefix = environ.get("CONDA_PREFIX"), prefix or sys.prefix
    if not active:
        return ok("conda", "not active")
    if Path(active).resolve() == Path(prefix).resolve():
        return ok("conda", f"this Python is its own ({active})")
    return warning(
        "conda", f"{active} is active, but this Python is in {prefix}: conda's mpiexec and libraries may come first",
        "conda deactivate",
    )  # fmt: skip


def _ours_in(folder):
    """Which packages of ours lie in a folder, the course's own scripts folder excepted."""
    folder = Path(folder)
    if folder.resolve() == ROOT / "scripts":
        return []
    return [name for name in NAMES_AT_RISK if (folder / name).is_dir() or (folder / f"{name}.py").exists()]
