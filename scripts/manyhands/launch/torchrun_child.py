"""A torchrun of its own beside the program that runs: started, watched, sent signals, and gone at the end.

    with Torchrun(program, folder, n_ranks=2, log=folder / "log.txt", restarts=1) as child:   # on one rank only
        child.until(lambda: (folder / "ready").exists())
        child.signal(signal.SIGTERM)
        status = child.wait()

A child must not believe that it is a rank of the job, notebook or launcher that started it, so what those wrote into the
environment is left out. torchrun starts its ranks in sessions of their own; a mark in the environment finds them all.
"""

import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

from manyhands.launch.end_with_parent import with_us
from manyhands.launch.launchers import without_launchers
from manyhands.launch.processes import MARK, Family

POLL_S = 0.01


class ChildError(RuntimeError):
    """A child that did not do what was waited for; the message ends with the last lines of its log."""


class Torchrun:
    """`python -m torch.distributed.run --standalone` on `program` and its flags, with its output in the file `log`.

    `restarts`: how often torchrun starts all ranks again after one has failed; `flags` are further ones of torchrun.
    After `timeout_s` whoever waits for it gets a ChildError. Leaving the block ends whatever is left of it.
    """

    def __init__(self, program, *given, n_ranks, log, restarts=0, flags=(), timeout_s=110):
        self.mark, self.log = secrets.token_hex(8), Path(log)
        self._family = Family(self.mark)
        self._deadline = time.monotonic() + timeout_s
        self.command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}",
            f"--max-restarts={restarts}", *flags, str(program), *map(str, given),
        ]  # fmt: skip
        with open(self.log, "ab") as output:
            self._process = subprocess.Popen(
                [*with_us(), *self.command], env=_environment() | {MARK: self.mark}, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def until(self, condition):
        """Wait until `condition()` holds. Raises ChildError if the child ends before, or the time is over."""
        while not condition():
            if self._process.poll() is not None:
                raise ChildError(f"it ended with status {self._process.returncode}\n{self.last_lines()}")
            if time.monotonic() > self._deadline:
                raise ChildError(f"what was waited for did not happen in time\n{self.last_lines()}")
            time.sleep(POLL_S)

    def signal(self, number):
        """Send a signal to torchrun itself, as a scheduler would."""
        self._process.send_signal(number)

    def wait(self):
        """Its exit status, negative if a signal ended it. Raises ChildError once the time is over."""
        try:
            return self._process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise ChildError(f"it did not end in time\n{self.last_lines()}") from None

    def last_lines(self, number=60):
        """The end of its log; torchrun's own report is most of it."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-number:])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._family.end(grace_s=1.0)
        self._process.wait()


def _environment():
    kept = without_launchers(os.environ, "PET_")  # flags of torchrun, as a job file sets them
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
