"""Print and end programs: whole lines, no traceback on Ctrl-C, a correct exit status. The first import of a program is
`entry`, which calls `run`.

torchrun turns the status of its ranks into 1. So `scripts/launch.py` names a file in the environment, and rank 0, or a
rank that fails, writes the program's status and the reason there. Without the variable nothing is written.
In a notebook the `%%ranks` magic labels each rank's output. In a script each line starts with its rank.
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
REFUSED = 2  # invalid request: nothing was run
DIVERGED = 65  # the loss or weights became NaN or infinite: the same seed would fail again
NO_ROOM = 66  # a GPU ran out of memory: the same options would do so again
NOT_AGAIN = (0, REFUSED, DIVERGED, NO_ROOM)  # statuses for which a retry is pointless
LATE_S = 0.5  # between ranks that receive the same Ctrl-C
SPEAKS_FIRST_S = 10  # other ranks let rank 0 report first: launchers end a job at its first failure
LOST_S = 10.0  # a launcher ends the other ranks within this time of the first one's end
WORD_S = 20.0  # a start that waits longer says what for
INTERRUPTED = 128 + signal.SIGINT  # a shell's status for a program ended by Ctrl-C
MEMORY = (
    "usually memory; use fewer ranks, a smaller micro-batch or a smaller model (--dry-run says what train.py needs)"
)
ON_A_GPU = (
    "use a smaller micro-batch (--train.micro-batch), more GPUs or a smaller model (--dry-run says what train.py needs)"
)

_name = ""  # the running program's name, for its last message
_lost: list[OSError] = []  # errors of writing stdout to a file; a closed pipe does not count


def listen(name: str) -> None:
    """Make Ctrl-C end the program `name` from now on, unless it is ignored (nohup, `&`)."""
    global _name
    _name = name
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number, frame):
    """Raise KeyboardInterrupt, but end the process inside an import, where a library may swallow or replace it."""
    if importing(frame):
        end_by(number)
    raise KeyboardInterrupt


def importing(frame: FrameType | None) -> bool:
    """Return whether `frame`, interrupted by a signal, belongs to an import."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def end_by(number: int) -> NoReturn:
    """End the process because of signal `number` while there is nothing to clean up; rank 0 reports it."""
    _say_ended_by(number)
    flush()
    os._exit(128 + number)


def _say_ended_by(number):
    if is_first_rank():
        sentence = f"{_name}: ended by {'Ctrl-C' if number == signal.SIGINT else signal.Signals(number).name}"
        say_status(128 + number, sentence)
        with suppress(OSError, AttributeError):  # no reader, or a closed stream
            print(sentence, file=sys.stderr)


def run(name: str, main: Callable[[], int | None], product: bool = False) -> NoReturn:
    """End this process with the status that `main()` returns. A closed stdout (broken pipe) is not an error.

    `product`: the output is the program's purpose, as with `--help`. If the disk has no room for it, print a sentence
    and turn status 0 into 1. Ctrl-C ends it with status 130 and one sentence from rank 0. An error of a file, a folder
    or memory ends it with one sentence and status 1.
    """
    try:
        mend_streams()
        listen(name)
        status = main()
    except SystemExit as ended:  # the reason has been printed, or is printed now
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        status = 1 if isinstance(ended.code, str) else ended.code
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # signals of the terminal and the launcher: reported once
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
    """Return the status that another rank has written, or None after printing this rank's traceback.

    A rank whose connection broke does not have the reason: the rank that broke it reports it, and the launcher ends
    the others. Or all ranks are about to receive the same Ctrl-C.
    """
    by_hand = False
    with suppress(LaunchError):
        by_hand = resolve().launcher == "by hand"  # then nobody ends the others
    lost = re.search("gloo|NCCL", str(error)) and not by_hand
    deadline = time.monotonic() + (LOST_S if lost else LATE_S)
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
    """Return a sentence if the request or the machine is at fault, not the program; else ""."""
    if isinstance(error, Refused | LaunchError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {reason(error)}"
    if _is_out_of_gpu_memory(error):
        what = ". ".join(str(error).split(". ")[:2]).rstrip(".")  # the lines after the first are about the allocator
        return f"{what}: {ON_A_GPU}"
    return f"there is not enough memory: {error}".rstrip(": ") if isinstance(error, MemoryError) else ""


def _is_out_of_gpu_memory(error):
    return type(error).__name__ == "OutOfMemoryError"  # torch's, a RuntimeError; torch is not imported here


class Refused(ValueError):
    """An invalid request: a sentence with the cure. A program that raises it ends with status 2."""


def reason(error: Exception) -> str:
    """Return an error's message; for an OSError, without its number and path."""
    return getattr(error, "strerror", None) or str(error)


@contextmanager
def explained(kind: type[Exception], cure: str, path: object = "", verb: str = "read") -> Iterator[None]:
    """Turn a system's or schema's error about a file into a `kind`: a sentence that names the file and the `cure`."""
    try:
        yield
    except kind:
        raise
    except OSError as error:
        raise kind(f"{error.filename or path} cannot be {verb} ({reason(error)}); {cure}") from None
    except ValueError as error:
        raise kind(f"{path} cannot be used ({error}); {cure}") from None


def end_process(status: int, failed: bool = False) -> NoReturn:
    """End this process with `status`; a rank has left its group already, or it `failed`.

    One of several ranks ends immediately. The interpreter's shutdown does not wait for gloo's threads, and one that
    still holds its last sent tensor would abort the process ("terminate called without an active exception", torch
    2.13).
    """
    if is_alone():
        sys.exit(status)
    # a failed rank skips MPI's finalize, which would wait for the others: the launcher ends them
    mpi = None if failed else sys.modules.get("mpi4py.MPI")
    if mpi and status != INTERRUPTED and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()  # mpiexec treats a rank that ends without it as failed
    flush()
    # C's exit, not Python's: MPICH disconnects there; without it mpiexec kills ranks that end a moment later. PyDLL
    # keeps the interpreter's lock, which exit handlers of torch need
    if mpi:
        ctypes.PyDLL(None).exit(status)
    os._exit(status)


def end(text: str, status: int, stream: str = "stderr", everybody: bool = False) -> NoReturn:
    """End this program, before or after `join`. Rank 0 prints the reason, or every rank if only it has it.

    All ranks must call it. The launcher kills the other ranks when the first one ends, so rank 0 ends first.
    """
    launcher = ""
    try:
        info = resolve()
        rank, launcher = info.rank, info.launcher
    except LaunchError:  # finding the rank failed: trust any variable that names a rank
        rank = claimed("rank", 0)
        everybody = everybody or rank >= claimed("world_size", 1 << 62)  # RANK=5 of 2: there may be no rank 0
    if rank == 0 or everybody:
        say_status(status, text)
        if text:
            mend_streams()  # `--help | head`
            print(text, file=getattr(sys, stream), flush=True)
    elif status and not launcher_named(launcher).waits_for_all:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher's signal after rank 0 has ended
        time.sleep(SPEAKS_FIRST_S)
    raise SystemExit(status)


@contextmanager
def told(sentence: Callable[[], str]) -> Iterator[None]:
    """Print `sentence()` to stderr, unless it is "", if the block takes longer than WORD_S."""

    def tell():
        if text := sentence():
            print(text, file=sys.stderr, flush=True)

    timer = threading.Timer(WORD_S, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def is_alone() -> bool:
    """Return whether this process is not a rank, or is a world of one."""
    ranks = joined()
    return ranks is None or ranks.world_size == 1


def flush() -> None:
    """Flush stdout and stderr, ignoring a closed pipe."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def is_first_rank() -> bool:
    """Return whether this process is rank 0 or not a rank; works before `join` and with contradictory launchers."""
    return claimed("rank", 0) == 0


def say_status(status: int, why: str = "") -> None:
    """Write how the program ends, on rank 0; a later call overwrites it. An unwritable file is not an error."""
    if path := settings.path(STATUS_FILE):
        with suppress(OSError):  # the file's folder is on another node
            path.write_text(json.dumps([status, why]))


def say_nothing_yet() -> None:
    """Clear the status file when a program begins."""
    if path := settings.path(STATUS_FILE):
        with suppress(OSError):
            path.unlink(missing_ok=True)


def read_status() -> int | None:
    """Return the status in the program's status file, or None if it was killed or raised."""
    path = settings.path(STATUS_FILE)
    return read_end(path)[0] if path else None


def read_end(path: Path) -> tuple[int | None, str]:
    """Return (status, reason) that `say_status` wrote to the file `path`, or (None, "")."""
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


def say_once(text: object) -> None:
    """Print `text` as `say` does on rank 0, or in a process that is no rank."""
    if (ranks := joined()) is None or ranks.rank == 0:
        say(text)


class _Lossy(io.FileIO):
    """A stream whose writes never fail: output that cannot be written is lost. Later writes may succeed again."""

    def write(self, data):
        try:
            return super().write(data)
        except OSError as error:  # no reader, a closed terminal or a full disk
            if self.fileno() == 1 and (error.errno == errno.ENOSPC or stat.S_ISREG(os.fstat(1).st_mode)):
                _lost.append(error)
            return len(data)


def say_how_it_ended(call: Callable[[], object], quiet: bool = False) -> None:
    """Call `call()` and print how it ended on this rank: the first line of its error, and after how many seconds.

    quiet: print nothing.
    """
    began = time.monotonic()
    try:
        call()
    except RuntimeError as error:
        line = str(error).split("] ")[-1].splitlines()[0].replace(os.getcwd(), ".")
        ended = f"{line} (after {time.monotonic() - began:.0f} s)"
    else:
        ended = "passed"
    if not quiet:
        say(ended)


def mend_streams() -> None:
    """Make this process ignore errors of its screen or log, even while it ends."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed (`>&-`): the next opened file would get its number, and all printed text
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # like any standard stream
    for name, number, errors in (("stdout", 1, "replace"), ("stderr", 2, "backslashreplace")):
        before = getattr(sys, name)
        raw = before.buffer if hasattr(before, "buffer") else None
        raw = getattr(raw, "raw", raw)  # PYTHONUNBUFFERED omits the buffer
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
    """Write to stdout immediately. An error of the screen or log never ends a run: the text is lost."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except (OSError, UnicodeEncodeError, AttributeError):  # a closed stream has none
        mend_streams()
        sys.stdout.write(text)
        sys.stdout.flush()
