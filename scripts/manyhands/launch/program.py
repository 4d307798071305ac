"""How programs print and end: no traceback where people stop them, whole lines, a status that is heard. The first
import of a program is `entry`, which calls `run`.

torchrun turns the status of its ranks into 1. Whoever starts torchrun names a file in the environment
(`scripts/launch.py` does); rank 0, or a rank that fails, says there how the program ends, and why. Without the variable
nothing is written.
In a notebook the `%%ranks` magic labels what each rank says. In a script each line carries its rank.
"""

from __future__ import annotations

import ctypes
import errno
import io
import json
import os
import re
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from manyhands.launch import settings
from manyhands.launch.launchers import LaunchError, claimed, launcher_named, resolve
from manyhands.launch.ranks import joined

STATUS_FILE = "MANYHANDS_STATUS_FILE"
REFUSED = 2  # what was asked for cannot be: nothing was run
DIVERGED = 65  # a training whose loss or weights are NaN or infinite: the same seed would end there again
NO_ROOM = 66  # a GPU's memory is full: the same options need as much again
NOT_AGAIN = (0, REFUSED, DIVERGED, NO_ROOM)  # what would end again as it ended
LATE_S = 0.5  # between ranks that hear the same Ctrl-C
SPEAKS_FIRST_S = 10  # launchers end a job with its first failure: who has nothing to say lets rank 0 speak first
LOST_S = 10.0  # a launcher ends the others within this time of the first rank's end
INTERRUPTED = 128 + signal.SIGINT  # the status that shells give to what Ctrl-C ended
MEMORY = (
    "usually memory; use fewer ranks, a smaller micro-batch or a smaller model (--dry-run says what train.py needs)"
)
ON_A_GPU = (
    "use a smaller micro-batch (--train.micro-batch), more GPUs or a smaller model (--dry-run says what train.py needs)"
)

_name = ""  # of the program that runs, for what it says as it ends
_lost: list[OSError] = []  # why a file did not take what was printed on stdout; a reader that went away is no loss


def listen(name: str) -> None:
    """From now on Ctrl-C ends the program `name`. What ignores it (nohup, `&`) still does."""
    global _name
    _name = name
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number, frame):
    """Raises KeyboardInterrupt, unless it would end in an import: a library may swallow it there, or raise another."""
    if importing(frame):
        end_by(number)
    raise KeyboardInterrupt


def importing(frame: FrameType | None) -> bool:
    """Whether `frame`, which a signal interrupts, is of an import."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def end_by(number: int) -> NoReturn:
    """Signal `number` came while there is nothing to tidy up: rank 0 says so, and the process ends."""
    _say_ended_by(number)
    flush()
    os._exit(128 + number)


def _say_ended_by(number):
    if is_first_rank():
        sentence = f"{_name}: ended by {'Ctrl-C' if number == signal.SIGINT else signal.Signals(number).name}"
        say_status(128 + number, sentence)
        with suppress(OSError, AttributeError):  # nobody reads; the stream is closed
            print(sentence, file=sys.stderr)


def run(name: str, main: Callable[[], int | None], product: bool = False) -> NoReturn:
    """End this process with the status that `main()` returns. A reader that went away is none of a program's business.

    `product`: what it prints is what it was started for, as `--help` is of any program; where the disk has no room for
    that, a sentence says so, and status 0 becomes 1.
    Ctrl-C ends it with status 130 and one sentence, of rank 0. A file or folder that does not do what was asked of it,
    and memory that is not there, are a sentence too, and status 1.
    """
    try:
        mend_streams()
        listen(name)
        status = main()
    except SystemExit as ended:  # it has said why, or says it now
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        status = 1 if isinstance(ended.code, str) else ended.code
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's and the launcher's: it is said once
        _say_ended_by(signal.SIGINT)
        status = INTERRUPTED
    except Exception as error:
        status, said = 1 if isinstance(error, OSError | MemoryError) else REFUSED, _trouble(error)
        status = NO_ROOM if _is_out_of_gpu_memory(error) else status
        if said:
            say_status(status, f"{name}: {said}")
            print(f"{name}: {said}", file=sys.stderr)
        elif is_alone():
            raise
        else:
            status = _let_others_speak(error) or 1
        end_process(status, failed=True)
    flush()
    if _lost and (product or {"-h", "--help"} & set(sys.argv[1:])):
        print(f"{name}: stdout cannot be written ({reason(_lost[0])}); make room, and start it again", file=sys.stderr)
        status = status or 1
    end_process(status or 0)


def _let_others_speak(error):
    """The status that another rank has said, or None once this one has shown its traceback.

    A rank whose connection broke knows nothing: the one that broke it says why, and the launcher ends the others. Or
    all are about to hear of the same Ctrl-C.
    """
    deadline = time.monotonic() + (LOST_S if re.search("gloo|NCCL", str(error)) else LATE_S)
    try:
        while time.monotonic() < deadline:
            time.sleep(LATE_S / 10)
            if status := read_status():
                return status
    except KeyboardInterrupt:
        end_by(signal.SIGINT)
    sys.excepthook(type(error), error, error.__traceback__)
    return None


def _trouble(error):
    """What is wrong with what was asked for, or with this machine, not with the program: a sentence, or ""."""
    if isinstance(error, Refused | LaunchError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {reason(error)}"
    if _is_out_of_gpu_memory(error):
        what = ". ".join(str(error).split(". ")[:2]).rstrip(".")  # then follow lines about the allocator
        return f"{what}: {ON_A_GPU}"
    return f"there is not enough memory: {error}".rstrip(": ") if isinstance(error, MemoryError) else ""


def _is_out_of_gpu_memory(error):
    return type(error).__name__ == "OutOfMemoryError"  # torch's, which is a RuntimeError; this module needs no torch


class Refused(ValueError):
    """What was asked for cannot be: a sentence with the cure. A program that raises it ends with status 2."""


def reason(error: Exception) -> str:
    """What an OSError says without its number and path, or what another error says."""
    return getattr(error, "strerror", None) or str(error)


@contextmanager
def explained(kind: type[Exception], cure: str, path: object = "", verb: str = "read") -> Iterator[None]:
    """What the system or a schema says of a file becomes a `kind`: a sentence that names the file, with `cure`."""
    try:
        yield
    except kind:
        raise
    except OSError as error:
        raise kind(f"{error.filename or path} cannot be {verb} ({reason(error)}); {cure}") from None
    except ValueError as error:
        raise kind(f"{path} cannot be used ({error}); {cure}") from None


def end_process(status: int, failed: bool = False) -> NoReturn:
    """End this process with `status`; a rank has left its group before, or it `failed`.

    One of several ranks ends at once: the interpreter's own end waits for no thread of gloo, and one that still holds
    the last tensor that it sent then aborts the process ("terminate called without an active exception", torch 2.13).
    """
    if is_alone():
        sys.exit(status)
    # a rank that failed says no goodbye to MPI, for which the others would be waited for: the launcher ends them
    mpi = None if failed else sys.modules.get("mpi4py.MPI")
    if mpi and status != INTERRUPTED and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()  # mpiexec takes a rank that ends without it for one that failed
    flush()
    # C's own end, not Python's: MPICH says goodbye there; without it mpiexec kills whoever ends a moment later. PyDLL
    # keeps the interpreter's lock, which exit handlers of torch need
    if mpi:
        ctypes.PyDLL(None).exit(status)
    os._exit(status)


def end(text: str, status: int, stream: str = "stderr", everybody: bool = False) -> NoReturn:
    """End this program, before `join` or after it. Rank 0 says why, or everybody where the others do not know.

    All ranks must call it. Whatever started them kills the others when the first one ends, so rank 0 goes first.
    """
    launcher = ""
    try:
        info = resolve()
        rank, launcher = info.rank, info.launcher
    except LaunchError:  # who am I? is what went wrong: trust any variable that names a rank
        rank = claimed("rank", 0)
        everybody = everybody or rank >= claimed("world_size", 1 << 62)  # RANK=5 of 2: there may be no rank 0 to say it
    if rank == 0 or everybody:
        say_status(status, text)
        if text:
            mend_streams()  # `--help | head`
            print(text, file=getattr(sys, stream), flush=True)
    elif status and not launcher_named(launcher).waits_for_all:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher's, when rank 0 has ended
        time.sleep(SPEAKS_FIRST_S)
    raise SystemExit(status)


def is_alone() -> bool:
    """Whether this process is no rank, or a world of one."""
    ranks = joined()
    return ranks is None or ranks.world_size == 1


def flush() -> None:
    """Write what has been printed; whoever read it may have gone."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def is_first_rank() -> bool:
    """Whether this process is rank 0, or no rank at all: before `join`, and where launchers contradict each other."""
    return claimed("rank", 0) == 0


def say_status(status: int, why: str = "") -> None:
    """Rank 0 of a program says how it ends; the last word counts. A file that cannot be written is no failure."""
    if path := settings.path(STATUS_FILE):
        with suppress(OSError):  # on another node than the one who asked: it does without
            path.write_text(json.dumps([status, why]))


def say_nothing_yet() -> None:
    """A program begins: what was said before it is not of its end."""
    if path := settings.path(STATUS_FILE):
        with suppress(OSError):
            path.unlink(missing_ok=True)


def read_status() -> int | None:
    """The status that the program has left in the file named for it, or None: it was killed, or raised."""
    path = settings.path(STATUS_FILE)
    return read_end(path)[0] if path else None


def read_end(path: Path) -> tuple[int | None, str]:
    """(status, why) as `say_status` has left them in the file `path`; (None, "") where it has not."""
    try:
        status, why = json.loads(path.read_text())
        return status, why
    except (OSError, ValueError):
        return None, ""


def say(text: object) -> None:
    """Print `text` in one write, newline included, with the rank in front of each line of a script.

    A world of one needs no label.
    """
    ranks, label = joined(), ""
    if ranks is not None and ranks.world_size > 1 and ranks.launcher != "notebook":
        label = f"[rank {ranks.rank:>{len(str(ranks.world_size - 1))}}] "
    write("".join(f"{label}{line}\n" for line in str(text).split("\n")))


class _Lossy(io.FileIO):
    """A screen or a log that no write fails of: what it cannot take is lost. There may be room again later."""

    def write(self, data):
        try:
            return super().write(data)
        except OSError as error:  # nobody reads, the terminal is closed, the disk is full
            if self.fileno() == 1 and (error.errno == errno.ENOSPC or stat.S_ISREG(os.fstat(1).st_mode)):
                _lost.append(error)
            return len(data)


def mend_streams() -> None:
    """From now on nothing that is wrong with this process's screen or log makes it fail, or complain as it ends."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed (`>&-`): the next file that is opened would get its number, and what is printed
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # as any such stream
    for name, number, errors in (("stdout", 1, "replace"), ("stderr", 2, "backslashreplace")):
        before = getattr(sys, name)
        raw = before.buffer if hasattr(before, "buffer") else None
        raw = getattr(raw, "raw", raw)  # PYTHONUNBUFFERED leaves the buffer out
        if before is not None and (not isinstance(raw, io.FileIO) or isinstance(raw, _Lossy) or raw.fileno() != number):
            continue  # a notebook's, or a test's
        with suppress(OSError, AttributeError):
            before.flush()
        lossy = _Lossy(number, "w", closefd=False)
        at_once = before is not None and before.write_through
        stream = io.TextIOWrapper(
            lossy if at_once else io.BufferedWriter(lossy), before.encoding if before else "utf-8", errors,
            line_buffering=before is None or before.line_buffering, write_through=at_once,
        )  # fmt: skip
        setattr(sys, name, stream)


def write(text: str) -> None:
    """Write to stdout, now. Nothing wrong with the screen or the log ends a run: what cannot be shown is lost."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except (OSError, UnicodeEncodeError, AttributeError):  # of a stream that is closed there is none
        mend_streams()
        sys.stdout.write(text)
        sys.stdout.flush()
