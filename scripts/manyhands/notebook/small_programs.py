"""Start a program of a few lines beside the notebook, under a launcher that one names.

for line in run_under("mpiexec", program, 2):
    print(line)
"""

import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from manyhands.course.folders import SCRIPTS
from manyhands.launch import settings
from manyhands.launch.allocation import loopback_gloo, loopback_mpi, mpi_launcher, torchrun_here
from manyhands.launch.launchers import without_launchers
from manyhands.launch.machine import login_node

LAUNCHERS = ("torchrun", "mpiexec", "python")
LAST_LINES = 3  # of a program that failed
WAIT_S = 2.0  # then it says what it waits for, where output is live


def run_under(launcher, program, n_processes=1, timeout_s=60):
    """The lines that `n_processes` of `program` (its text) print on this node, sorted: which is first is an accident.

    launcher: torchrun, mpiexec or python (which starts one process). Where there is no MPI, or the program fails or
    does not end within `timeout_s`, the lines say that. Raises ValueError for another launcher.
    """
    if launcher not in LAUNCHERS:
        raise ValueError(f"unknown launcher {launcher!r}; use one of {', '.join(LAUNCHERS)}")
    # without PYTHONUNBUFFERED, by which a print is two writes, and lines of several processes run together; without
    # what Slurm says of a job, whose other nodes do not have the file
    kept = without_launchers(settings.environment(), "PYTHONUNBUFFERED", "SLURM_")
    environ = settings.for_python({"OMP_NUM_THREADS": "1", **loopback_mpi(), **kept, **loopback_gloo()}, SCRIPTS)
    waiting = threading.Timer(
        WAIT_S, print, [f"waiting for {launcher} (processes: {n_processes}) ..."], {"flush": True}
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(program, encoding="utf-8")
        command = _command(launcher, n_processes, folder, environ)
        if command is None:
            return ["there is no MPI here, so this start is left out"]
        try:
            command = [*command, str(path)]
            if settings.live():
                waiting.start()
            how = {"capture_output": True, "text": True, "timeout": timeout_s}
            done = subprocess.run(command, env=environ, restore_signals=False, **how)  # see `Supervised`
        except subprocess.TimeoutExpired:
            return [f"no end within {timeout_s:g} s, so it was stopped"]
        finally:
            waiting.cancel()
        said, complained = done.stdout + _logs(folder, "stdout"), done.stderr + _logs(folder, "stderr")
    if done.returncode:
        return [f"exit status {done.returncode}:", *complained.strip().splitlines()[-LAST_LINES:]]
    return sorted(line for line in said.splitlines() if line.strip())


def _command(launcher, n_processes, folder, environ):
    """The command but for the program, or None where there is no MPI."""
    if launcher == "python":
        return [sys.executable]
    if launcher == "torchrun":
        # its own way to start Python is `python -u`, by which a print is two writes, and lines run together
        return torchrun_here(n_processes, "--no-python", sys.executable)
    if settings.value("MANYHANDS_MPI") == "off" or login_node():
        return None
    mpiexec = mpi_launcher(n_processes, folder, environ)  # a file for each process, or their lines run together
    if mpiexec and "PBS_NODEFILE" in environ and "--tag-output" not in mpiexec:  # all on this node; not Open MPI's word
        mpiexec += ["-ppn", str(n_processes)]
    return mpiexec and [*mpiexec, sys.executable]


def _logs(folder, stream):
    return "".join(path.read_text() for path in sorted(Path(folder).glob(f"*.{stream}.log")))
