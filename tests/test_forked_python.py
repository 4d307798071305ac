"""A fork of the tests' Python ends as Python does: with its status, its output and its last functions."""

import os
import subprocess
import sys
import time

import psutil
import pytest
from forked_python import WATCHDOG, ForkedPython
from notebook_kernel import wait_until

ENDS = {
    "at its end": "print('done')",
    "status": "import sys; print('three'); sys.exit(3)",
    "a sentence": "import sys; sys.exit('why')",
    "an error": "print('before'); raise ValueError('wrong')",
    "atexit": "import atexit; atexit.register(print, 'last'); print('first')",
    "a thread": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
    "a folder": "import os, tempfile, weakref; kept = tempfile.TemporaryDirectory()\n"
    "weakref.finalize(kept, print, 'tidied')",
}  # fmt: skip


@pytest.mark.parametrize("how", ENDS)
def test_a_fork_ends_as_python_does(how, forked_python):
    def ended(python):
        done = subprocess.run([python, "-c", ENDS[how]], capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout, done.stderr

    assert ended(forked_python) == ended(sys.executable)


def test_output_that_finds_no_room_is_told(forked_python):
    with open("/dev/full", "w") as full:
        done = subprocess.run([forked_python, "-c", "print('lost')"], stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, b"No space left" in done.stderr) == (120, True)


def test_what_a_fork_has_started_ends_with_the_server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("f")
    starts = "import os, time; child = os.fork(); child and print(child, flush=True); time.sleep(600)"
    with ForkedPython(folder) as python:
        program = subprocess.Popen([python.executable, "-c", starts], stdout=subprocess.PIPE, text=True)
        child = int(program.stdout.readline())
    program.communicate(timeout=60)
    until = time.monotonic() + 60
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, "the fork's own child is still there"
        time.sleep(0.05)


def test_a_kernel_that_is_killed_as_the_tests_end_leaves_no_mpiexec(tmp_path_factory, root):
    kernel, mark = subprocess.Popen(["sleep", "600"]), f"test-{os.getpid()}"
    mpiexec = subprocess.Popen(["sleep", "600"], env={**os.environ, "MANYHANDS_CLUSTER": mark})
    folder = tmp_path_factory.mktemp("f")
    try:
        with ForkedPython(folder) as python:
            watch = [python.executable, *WATCHDOG, str(kernel.pid), mark, str(folder / "of-ranks")]
            watchdog = subprocess.Popen(watch, env={**os.environ, "PYTHONPATH": str(root / "scripts")})
            wait_until(lambda: psutil.Process(python._server.pid).children() or watchdog.poll() is not None)
            kernel.kill()
        assert mpiexec.poll() is not None, "nobody watches it any more"
        watchdog.wait(timeout=60)
    finally:
        for one in (kernel, mpiexec):
            one.kill()
            one.wait()
