"""Fork a notebook's ranks from one process that has imported torch: they start sooner, and share its memory.

    server = ForkServer(environ)                # in the kernel, as it starts: the server is ready before the first cell
    subprocess.Popen([*mpiexec, *server.command(), "ipyparallel.engine", ...])

The command is a small program, which stands where the rank would: a launcher starts, watches and ends it. It hands its
environment, folder, cores, limits and files to the server, which forks; it ends as the fork ends, and if it is killed,
so is the fork. Where no server answers, it runs the module itself. The server ends when its stdin does, that is with
the kernel, however that ends, and its forks end with it.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import struct
import sys

MARK, NO_MARK = "MANYHANDS_CLUSTER", "0" * 16  # as long as the marks of `engine_processes`
# From elsewhere alone: a restart of the ranks reads the course's own modules anew.
PRELOAD = (
    "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.pipelining",
    "ipykernel.ipkernel", "ipykernel.debugger", "ipyparallel.engine.app", "ipyparallel.controller.app", "pdb",
    "IPython.core.completerlib", "IPython.extensions.storemagic", "tornado.platform.asyncio", "mpi4py",
)  # fmt: skip
PR_SET_PDEATHSIG = 1


class ForkServer:
    """A kernel's server. It keeps `environ` in so far as libraries read it when they load."""

    def __init__(self, environ):
        import secrets  # here and below: the small program starts without what it does not need
        import subprocess

        self.environ, self.name = environ, f"manyhands-{secrets.token_hex(16)}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{self.name}")  # Linux frees such a name with its last user
            listener.listen(1024)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "manyhands.notebook.fork_server", "serve", str(listener.fileno())],
                env=environ | {MARK: NO_MARK}, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, pass_fds=[listener.fileno()], start_new_session=True,
            )  # fmt: skip

    def alive(self):
        return self._process.poll() is None

    def command(self):
        """The command that runs a module in a fork, as `python -m` does in a new process."""
        return [sys.executable, "-ISE", __file__, "ask", self.name]

    def end(self):
        self._process.stdin.close()
        self._process.wait()


def _of_this_user(connection):
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1] == os.getuid()


# ------------------------------------------------------------------ the small program


def ask(name, *arguments):
    """Let the server fork a process that runs `python -m *arguments`, and end as it ends."""
    mask = os.umask(0)
    os.umask(mask)
    job = json.dumps({
        "arguments": arguments, "environ": dict(os.environ), "folder": os.getcwd(), "umask": mask,
        "cores": sorted(os.sched_getaffinity(0)),
        "limits": [(kind, resource.getrlimit(kind)) for kind in range(16)],
    }).encode()  # fmt: skip
    answers = server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(f"\0{name}")
        if not _of_this_user(server):
            raise PermissionError
        files = [0, 1, 2, *([int(os.environ["PMI_FD"])] if "PMI_FD" in os.environ else [])]
        socket.send_fds(server, [b"%16d" % len(job)], files)
        server.sendall(job)
        answers = server.makefile("r")
        if not answers.readline():
            raise ConnectionError
    except OSError:  # the server has ended
        os.execv(sys.executable, [sys.executable, "-m", *arguments])
    status = int(answers.readline() or signal.SIGKILL)
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


# ------------------------------------------------------------------ the server


def serve(listener):
    """Fork a process for each request. Returns in the forks alone: what to run, and the files for it."""
    import selectors

    wakes, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    asked = {}  # of each fork: the connection of its small program
    ready = selectors.DefaultSelector()
    for file in (sys.stdin, listener, wakes):
        ready.register(file, selectors.EVENT_READ)
    while True:
        for key, _ in ready.select():
            if key.fileobj is sys.stdin:
                for pid in asked:
                    _kill(pid)
                os._exit(0)
            elif key.fileobj is listener:
                connection, _ = listener.accept()
                try:
                    job, files = _request(connection)
                except (OSError, ValueError):
                    connection.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    ready.close()
                    for one in (listener, wakes, wake, connection, *asked.values()):
                        one.close()
                    return job, files
                for file in files:
                    os.close(file)
                asked[pid] = connection
                ready.register(connection, selectors.EVENT_READ, pid)
                _answer(connection, pid)
            elif key.fileobj is wakes:
                wakes.recv(4096)
                while asked and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    connection = asked.pop(ended[0])
                    with contextlib.suppress(ProcessLookupError):  # what it has forked
                        os.killpg(ended[0], signal.SIGKILL)
                    if connection.fileno() in ready.get_map():
                        ready.unregister(connection)
                    _answer(connection, ended[1])
                    connection.close()
            elif key.data in asked:  # its small program was killed
                ready.unregister(key.fileobj)
                _kill(key.data)


def _kill(fork):
    """Kill a fork that was not waited for, with its group of processes, if it has one already."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(fork, signal.SIGKILL)


def _request(connection):
    connection.settimeout(60)
    if not _of_this_user(connection):
        raise PermissionError
    length, files, _, _ = socket.recv_fds(connection, 16, 4)
    with connection.makefile("rb") as text:
        return json.loads(text.read(int(length))), files


def _answer(connection, number):
    with contextlib.suppress(OSError):  # it was killed
        connection.sendall(b"%d\n" % number)


# ------------------------------------------------------------------ a fork


def become(job, files, server):
    """Take over what the small program has: after this the process is as if it had been started there."""
    import ctypes
    import random

    import numpy as np

    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(job["environ"])
    if files[3:]:
        os.environ["PMI_FD"] = str(files[3])
    _show_mark(os.environ.get(MARK, ""))
    os.umask(job["umask"])
    os.chdir(job["folder"])
    os.sched_setaffinity(0, job["cores"])
    for kind, limits in job["limits"]:
        resource.setrlimit(kind, tuple(limits))
    random.seed()
    np.random.seed()
    sys.path[0] = job["folder"]


def _show_mark(mark):
    """Write the mark where /proc shows a process's first environment, by which `Family` finds what belongs together."""
    import ctypes
    from pathlib import Path

    ours, its = f"{MARK}={NO_MARK}\0".encode(), f"{MARK}={mark}\0".encode()
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47])
    at = Path("/proc/self/environ").read_bytes().find(ours)
    if at >= 0 and len(ours) == len(its):
        ctypes.memmove(start + at, its, len(its))


def main():
    import fcntl
    import gc
    import importlib
    import runpy

    listener, server = socket.socket(fileno=int(sys.argv[2])), os.getpid()
    flags = fcntl.fcntl(0, fcntl.F_GETFL)
    fcntl.fcntl(0, fcntl.F_SETOWN, server)
    fcntl.fcntl(0, fcntl.F_SETFL, flags | os.O_ASYNC)  # while it imports, SIGIO ends it with the kernel
    for module in PRELOAD:
        importlib.import_module(module)
    fcntl.fcntl(0, fcntl.F_SETFL, flags)
    gc.collect()
    gc.freeze()
    if os.fork() == 0:
        os._exit(0)
    os.wait()  # OpenBLAS has ended its threads before this fork, and the server has no use for new ones
    job, files = serve(listener)
    become(job, files, server)
    sys.argv = job["arguments"]
    runpy._run_module_as_main(sys.argv[0])


if __name__ == "__main__" and sys.argv[1] == "ask":
    ask(*sys.argv[2:])
elif __name__ == "__main__":
    main()
