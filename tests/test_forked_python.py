"""A fork of the tests' Python ends as Python does: with its status, its output and its last functions."""

import subprocess
import sys

import pytest

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
