"""A Python that has imported torch already: the tests' programs start in 0.05 s instead of 2 to 3 s of processor time.

    with ForkedPython(folder) as python:                       # the fixture `forked_python` does this, once per process
        subprocess.run([python.executable, "scripts/train.py", "--train.steps", "4"])

`executable` takes what python takes. It is a small program that hands its arguments, environment, folder and open files
to a server, which has imported torch and forks; then it passes signals on, and ends as the fork ends. In the fork
`sys.executable` is that program again, so that torchrun, mpiexec and ipyparallel start their ranks in the same way. The
launchers are the real ones, and so are exit statuses, signals, output and files; what a fork does not have is a command
line and an environment of its own in /proc: there the small program stands for it, and if that is killed, so is the
fork. What a fork leaves in its group of processes is killed when it ends. The server ends with its test run, and so do
its forks, but for the watchdogs of notebooks: these end first what their kernels have left, such as mpiexec. On a node
of tests/slurm_nodes.py it has that node's name and addresses. What forks import beyond that is compiled once for all,
also where Python is told to keep no bytecode.
"""

import array
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

# what most of the course's programs import from elsewhere; nothing of the course, whose copies have their own packages
PRELOAD = (
    "torch", "torch.distributed", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining", "torch.distributed.checkpoint", "torch.distributed.run",
    "numpy", "rich.console", "tyro", "matplotlib.figure", "ipykernel.ipkernel", "ipyparallel.engine.app", "nbformat",
    "pydantic.dataclasses", "pydantic.type_adapter", "plotext", "safetensors.torch",
    "papermill.cli", "torch.profiler", "matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg",
    "torch.distributed.optim", "torch.utils.flop_counter", "sqlite3", "psutil",
)  # fmt: skip
WATCHDOG = ["-m", "manyhands.notebook.engine_processes"]
CLIENT = """\
#!{python} -ISE
import array, json, os, resource, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
files = [int(name) for name in os.listdir("/proc/self/fd")]
files = [fd for fd in files if fd != server.fileno() and os.path.exists(f"/proc/self/fd/{{fd}}")]
umask = os.umask(0); os.umask(umask)
job = json.dumps({{"arguments": sys.argv[1:], "folder": os.getcwd(), "environ": dict(os.environ), "files": files,
                  "pid": os.getpid(), "umask": umask, "cores": sorted(os.sched_getaffinity(0)),
                  "limits": [[kind, resource.getrlimit(kind)] for kind in range(16)]}}, ensure_ascii=True).encode()
child = None
def passed_on(number, frame):
    os.kill(child, number) if child else early.append(number)
early = []
for number in (1, 2, 3, 10, 12, 15, 18):
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, passed_on)
server.sendmsg([b"%16d" % len(job)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
server.sendall(job)
answer = server.makefile("r")
child = int(answer.readline() or 0)
for number in early:
    os.kill(child, number)
for fd in files:
    if fd != 2:
        os.close(fd)
status = int(answer.readline() or 256 * 71)
if os.WIFSIGNALED(status):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) not in (9, 19) else None
    os.kill(os.getpid(), os.WTERMSIG(status))
os._exit(os.WEXITSTATUS(status))
"""


class ForkedPython:
    """The server and its small program, in `folder`; its path must be short: a socket's address has 107 characters."""

    def __init__(self, folder):
        self.address, self.executable = str(Path(folder) / "server"), str(Path(folder) / "bin" / "python")
        (Path(folder) / "bin").mkdir()
        for program in Path(sys.executable).parent.iterdir():  # mpiexec is looked for beside the Python that runs
            if not program.name.startswith("python"):
                (Path(folder) / "bin" / program.name).symlink_to(program)
        Path(self.executable).write_text(textwrap.dedent(CLIENT).format(python=sys.executable, address=self.address))
        os.chmod(self.executable, 0o700)
        activate = Path(folder) / "bin" / "activate"  # of the job files
        activate.unlink(missing_ok=True)
        activate.write_text(f"PATH={folder}/bin:$PATH\n")

    def __enter__(self):
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._server = subprocess.Popen(
            [sys.executable, "-u", __file__, self.address, self.executable], env=environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert self._server.stdout.readline() == b"ready\n", "the server of forks did not start"
        return self

    def __exit__(self, *_):
        self._server.stdin.close()  # it kills its forks, waits for the watchdogs and ends
        self._server.wait(timeout=60)
        self._server.stdout.close()


# ------------------------------------------------------------------ the server


def serve(address):
    """Fork a process for each request. Returns in the forks alone: what to run. The server ends when its stdin does."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    wakes, wake = socket.socketpair()
    for end in (wakes, wake):
        end.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    clients, watchdogs, ending = {}, set(), False  # of each fork: the connection of its small program
    ready = selectors.DefaultSelector()
    for file in (sys.stdin, listener, wakes):
        ready.register(file, selectors.EVENT_READ)
    print("ready", flush=True)
    while True:
        for key, _ in ready.select():
            if key.fileobj is sys.stdin:
                for pid in clients.keys() - watchdogs:
                    with contextlib.suppress(ProcessLookupError):  # it has no group of its own yet
                        os.killpg(pid, signal.SIGKILL)
                    os.kill(pid, signal.SIGKILL)
                if not clients.keys() & watchdogs:
                    os._exit(0)
                ending = True
                ready.unregister(sys.stdin)
                ready.unregister(listener)
            elif key.fileobj is listener and not ending:
                connection, _ = listener.accept()
                try:
                    job, files = received(connection)
                except (OSError, ValueError):  # killed before it had said what it wants
                    connection.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    ready.close()
                    return job, files
                for fd in files:
                    os.close(fd)
                clients[pid] = connection
                watchdogs |= {pid} if job["arguments"][:2] == WATCHDOG else set()
                answer(connection, pid)
                ready.register(connection, selectors.EVENT_READ, pid)
            elif key.fileobj is wakes:
                wakes.recv(4096)
                reap(clients, ready)
                watchdogs &= clients.keys()
                if ending and not clients:
                    os._exit(0)
            elif key.data in clients:  # a small program was killed: its fork shall not outlive it
                ready.unregister(key.fileobj)
                os.kill(key.data, signal.SIGKILL)


def reap(clients, ready):
    while clients:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with contextlib.suppress(ProcessLookupError):  # what it has forked itself is not marked as its: see above
            os.killpg(pid, signal.SIGKILL)
        if connection := clients.pop(pid, None):
            if connection.fileno() in ready.get_map():
                ready.unregister(connection)
            answer(connection, status)
            connection.close()


def answer(connection, number):
    with contextlib.suppress(OSError):  # it was killed
        connection.sendall(b"%d\n" % number)


def received(connection):
    """(job, descriptors of its open files) from a small program."""
    length, files = b"", array.array("i")
    while len(length) < 16:
        part, ancillary, _, _ = connection.recvmsg(16 - len(length), socket.CMSG_SPACE(4 * 250))
        if not part:
            raise OSError("no request came")
        length += part
        for _, _, passed in ancillary:
            files.frombytes(passed[: len(passed) - len(passed) % files.itemsize])
    text = b""
    while len(text) < int(length):
        part = connection.recv(1 << 20)
        if not part:
            raise OSError("half a request came")
        text += part
    return json.loads(text), list(files)


# ------------------------------------------------------------------ in a fork


def become(job, files, executable):
    """Take over the small program's files, environment, folder and group of processes. Returns python's arguments."""
    import fcntl
    import random
    import resource

    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 1000) for fd in files]  # out of the way of the numbers that they get
    os.closerange(0, 1000)
    for fd, number in zip(high, job["files"], strict=True):
        os.dup2(fd, number, inheritable=True)
    os.closerange(1000, 2000)
    enter_namespaces_of(job["pid"])
    os.environ.clear()
    os.environ.update(job["environ"])
    os.umask(job["umask"])
    os.chdir(job["folder"])
    os.sched_setaffinity(0, job["cores"])
    for kind, limits in job["limits"]:
        resource.setrlimit(kind, tuple(limits))
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        setattr(sys, name, opened(number, mode) if number in job["files"] else None)
        setattr(sys, f"__{name}__", getattr(sys, name))
    random.seed()
    if "matplotlib" in sys.modules and "MPLBACKEND" in os.environ:  # which it reads when it is imported
        sys.modules["matplotlib"].rcParams["backend"] = os.environ["MPLBACKEND"]
    sys.executable = executable
    sys.path[:0] = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    return list(job["arguments"])


def enter_namespaces_of(pid):
    """Those of its files and names: a node's."""
    import ctypes
    import platform

    platform._uname_cache = None
    for kind in ("mnt", "uts"):
        its = f"/proc/{pid}/ns/{kind}"
        if os.readlink(its) != os.readlink(f"/proc/self/ns/{kind}"):
            with open(its) as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                    raise OSError(ctypes.get_errno(), f"{its} cannot be entered")


def opened(number, mode):
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "").partition(":")
    encoding, errors = encoding or "utf-8", errors or "strict"
    if mode == "r":
        return open(number, encoding=encoding, errors=errors, closefd=False)
    through = bool(os.environ.get("PYTHONUNBUFFERED")) or number == 2
    lines = number == 2 or os.isatty(number)
    errors = "backslashreplace" if number == 2 else errors
    file = open(number, mode, encoding=encoding, errors=errors, closefd=False, buffering=1 if lines else -1)  # noqa: SIM115
    file.reconfigure(write_through=through)
    return file


def run(arguments):
    """What `python *arguments` does. Its flags but -c, -m and -u are passed over."""
    import runpy

    while arguments and arguments[0].startswith("-") and arguments[0] not in ("-c", "-m", "-"):
        flag = arguments.pop(0)
        if "u" in flag and not flag.startswith("--"):
            sys.stdout.reconfigure(write_through=True)
        if flag in ("-W", "-X"):
            arguments.pop(0)
    if arguments[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = ["-m", *arguments[2:]]
        sys.modules.pop(arguments[1], None)  # imported before: runpy would warn
        runpy._run_module_as_main(arguments[1])
        return
    main = type(sys)("__main__")
    main.__builtins__, sys.modules["__main__"] = __builtins__, main
    if arguments[0] == "-c":
        sys.path.insert(0, "")
        sys.argv, source, name = ["-c", *arguments[2:]], arguments[1], "<string>"
    else:
        name = arguments[0]
        sys.argv, main.__file__ = arguments, name
        sys.path.insert(0, os.path.dirname(os.path.realpath(name)))
        with open(name, "rb") as file:
            source = file.read()
    exec(compile(source, name, "exec", dont_inherit=True), main.__dict__)


def run_to_the_end(arguments):
    """`run`, and note the status that it ends with for `end_at_once`: not of Ctrl-C, which ends as it always does."""
    try:
        run(arguments)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            _status.append((end.code or 0) & 255)
        raise
    except Exception:
        _status.append(1)
        raise
    _status.append(0)


def end_at_once():
    """End without taking all modules apart, which costs 0.4 s in a process that has imported torch.

    It is the last of the functions of atexit. What cannot be flushed is left to Python's own end, which reports it.
    """
    if not _status:
        return
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    except (OSError, ValueError):
        return
    if mpi := sys.modules.get("mpi4py.MPI"):
        import ctypes

        if _status[0]:
            return
        if mpi.Is_initialized() and not mpi.Is_finalized():
            mpi.Finalize()
        ctypes.PyDLL(None).exit(_status[0])  # C's end, in which MPICH says goodbye
    os._exit(_status[0])


def save_less_often():
    """papermill writes the whole notebook before and after each cell, texts too: 5 s of a lesson. Here it does so
    before each cell of code, and at the end."""
    from papermill.engines import NotebookExecutionManager as Manager

    def unsaved(step, kinds):
        def stepped(self, cell, *rest, **named):
            if cell.cell_type in kinds:
                self.save = lambda: None
            try:
                return step(self, cell, *rest, **named)
            finally:
                vars(self).pop("save", None)

        return stepped

    Manager.cell_start = unsaved(Manager.cell_start, ("markdown", "raw"))
    Manager.cell_complete = unsaved(Manager.cell_complete, ("markdown", "raw", "code"))


def look_up_the_stack_only():
    """torchrun asks for the name of a function's caller some ten times, each time with the source of all its callers,
    for which inspect goes through all modules: a second of each torchrun."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


def without_our_frames(kind, error, trace):
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    import atexit
    import gc
    import importlib
    import weakref

    _status = []
    atexit.register(end_at_once)  # before whatever is imported registers its own
    sys.modules["rfc3987_syntax"] = None  # as in conftest
    for _module in PRELOAD:
        importlib.import_module(_module)
    save_less_often()
    look_up_the_stack_only()
    sys.dont_write_bytecode, sys.pycache_prefix = False, os.path.dirname(sys.argv[1])  # outside the tree
    for _kept in weakref.finalize._registry:  # torch's operators, each taken apart by itself
        _kept.atexit = False
    del sys.path[0]  # this folder: the tests' modules are not the programs'
    gc.freeze()
    _job, _files = serve(sys.argv[1])
    _arguments = become(_job, _files, sys.argv[2])
    sys.excepthook = without_our_frames
    run_to_the_end(_arguments)
