"""What a report says about the machine it was made on."""

import importlib.metadata
import os
import platform
import subprocess
import sys
import time

import psutil

from manyhands.launch.allocation import find_mpiexec
from manyhands.launch.conditions import commit, cpu_name
from manyhands.launch.limits import available_memory_bytes
from manyhands.preflight.plan import free_cores

PACKAGES = ("torch", "numpy", "mpi4py", "ipyparallel", "jupyterlab", "jupytext", "papermill")


def gather_facts(root, results=()):
    """name -> text: when, where, devices, versions, corpus, commit."""
    facts = {
        "when": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "host": platform.node(),
        "system": platform.platform(terse=True),
        "cores": f"{free_cores()} of {os.cpu_count()}",
        "memory": f"{available_memory_bytes() / 2**30:.1f} GiB free of {psutil.virtual_memory().total / 2**30:.1f} GiB",
        "devices": devices_text(),
        "python": f"{platform.python_version()} ({sys.executable})",
        "packages": ", ".join(f"{name} {_version(name)}" for name in PACKAGES),
        "MPI": mpi_text(),
        "corpus": corpus_text(results),
        "commit": commit(root),
    }
    return {name: text for name, text in facts.items() if text}


def corpora(results):
    """Names of the corpora that the runs trained on, such as {"shakespeare"}."""
    metrics = [outcome.metrics for result in results for outcome in result.outcomes if outcome.metrics]
    return {m["corpus"]["name"] for m in metrics if m.get("corpus")}


def corpus_text(results):
    used = sorted(corpora(results))
    return " and ".join(used) if used else "none used by these runs"


def devices_text():
    import torch

    for name in ("cuda", "xpu"):
        backend = getattr(torch, name, None)
        if backend is not None and backend.is_available():
            n = backend.device_count()
            return f"{n} x {backend.get_device_name(0)}"
    return f"no GPU, {cpu_name()}"


def mpi_text():
    mpiexec = find_mpiexec()
    if mpiexec is None:
        return "none"
    version = subprocess.run([*mpiexec, "--version"], capture_output=True, text=True, check=False).stdout
    lines = [line.strip() for line in version.splitlines()]
    number = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("Version:")), "")
    first = f"Hydra {number}" if "HYDRA" in version else (lines or ["unknown"])[0]
    return f"{first} ({mpiexec[0]})"


def _version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
