"""Is this the login node of a cluster, where work of many processes is not welcome?"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from manyhands.launch import settings

NAMES = re.compile(r"(^|[-_.])(login|uan|front-?end|headnode|submit)([-_]?\d+)?([-_.]|$)", re.IGNORECASE)
ANSWER_S = 5.0


def login_node(
    environ: Mapping[str, str] | None = None,
    hostname: str | None = None,
    ask: Callable[[Sequence[str]], str | None] | None = None,
) -> str | None:
    """Why this is a login node, as a phrase for a sentence, or None if it is not.

    By the host's name, or because a scheduler answers here that does not count this host among its compute nodes.
    MANYHANDS_LOGIN_NODE=1 or =0 says it outright. `ask(command) -> output, or None if it fails` is for tests.
    """
    environ = settings.environment() if environ is None else environ
    hostname = hostname or socket.gethostname()
    ask = ask or _ask
    if (said := settings.login_node(environ)) is not None:
        return "MANYHANDS_LOGIN_NODE says so" if said else None
    if any(name in environ for name in ("SLURMD_NODENAME", "PBS_NODEFILE", "PBS_JOBID")):
        return None  # inside a job
    if NAMES.search(hostname):
        return f"its name is {hostname}"
    short = hostname.split(".", 1)[0]
    nodes = ask(["sinfo", "--noheader", "--Node", "--format=%n %N"])  # hostname and name in Slurm
    if nodes is not None and nodes.split():
        return None if short in nodes.split() else f"Slurm answers here and has no compute node {short}"
    nodes = ask(["pbsnodes", "-a", "-F", "dsv"])
    if nodes is not None and "Name=" in nodes:
        found = re.search(rf"\b{re.escape(short)}\b", nodes)
        return None if found else f"PBS answers here and has no compute node {short}"
    return None


def refuse_on_login_node(what: str) -> str:
    """A sentence that refuses `what` ("make preflight") on a login node, or "" where it may run."""
    if reason := login_node():
        return (
            f"{what} runs many processes, and this is a login node ({reason}); run it on a compute node, say in an "
            "interactive job. If this is no login node, set MANYHANDS_LOGIN_NODE=0"
        )
    return ""


def _ask(command):
    if shutil.which(command[0]) is None:
        return None
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ANSWER_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout if answer.returncode == 0 else None


def main() -> int:
    """`python -m manyhands.launch.login_node "make test"` ends with status 2 and says why on a login node."""
    refusal = refuse_on_login_node(sys.argv[1])
    if refusal:
        print(refusal, file=sys.stderr)
    return 2 if refusal else 0


if __name__ == "__main__":
    from manyhands.launch.program import run_program

    run_program("login_node", main)
