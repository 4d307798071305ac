"""What a check found, and how a check asks another program."""

import os
import signal
import subprocess
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table. `remedy` is what to do about a warning or an error."""

    check: str
    status: str  # "ok", "warning", "error"
    says: str
    remedy: str = ""

    def as_dict(self):
        return asdict(self)


def ok(check, says):
    return Finding(check, "ok", says)


def warning(check, says, remedy):
    return Finding(check, "warning", says, remedy)


def error(check, says, remedy):
    return Finding(check, "error", says, remedy)


@dataclass(frozen=True)
class Answer:
    """What a program said. `status` is None if it had to be ended, or does not exist."""

    status: int | None
    text: str

    @property
    def last_line(self):
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        return lines[-1] if lines else "no output"


def ask(command, timeout_s=30, environ=None):
    """Run `command` (a list); its output and errors as an Answer. What it started is ended with it."""
    try:
        child = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
    except OSError as problem:
        return Answer(None, f"{command[0]} did not start: {problem.strerror}")
    try:
        text, _ = child.communicate(timeout=timeout_s)
        return Answer(child.returncode, text)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGTERM)
        try:
            child.communicate(timeout=3)  # mpiexec ends its ranks, which have sessions of their own
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
        child.kill()
        child.wait()
        return Answer(None, f"no answer within {timeout_s:g} s")
