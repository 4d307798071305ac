"""Step a rank that stopped at breakpoint() in a `%%ranks` cell, from a terminal.

    python -m manyhands.notebook.debug          # the lowest stopped rank that nobody steps yet
    python -m manyhands.notebook.debug 2        # rank 2

A stopped rank listens on a Unix socket in the private folder of the notebook's ranks, so only their user can connect.
The rank goes on when the terminal leaves: with q, Ctrl-D, Ctrl-C, or by closing it.
"""

import io
import linecache
import os
import pdb
import platform
import re
import select
import shlex
import socket
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from IPython import get_ipython

WELCOME = (
    "rank {rank} stopped. n: next line, s: step into the call, p x: print x, l: list the code, c: go on to the next "
    "breakpoint(), q or Ctrl-C: leave, and the cell goes on"
)


def in_cell(frame):
    """Return whether the frame runs code of a cell. ipyparallel's own line, and what `exec` runs, are "<string>"."""
    return frame.f_globals is get_ipython().user_ns and frame.f_code.co_filename != "<string>"


class Terminal(io.TextIOBase):
    """The rank's end of the connection. A terminal that is gone reads as the end of the input."""

    def __init__(self, connection):
        self.connection, self.lines = connection, connection.makefile("r", encoding="utf-8", errors="replace")

    def write(self, text):
        with suppress(OSError):
            self.connection.sendall(text.encode("utf-8", "replace"))
        return len(text)

    def readline(self):
        with suppress(OSError):
            return self.lines.readline()
        return ""


class Debugger(pdb.Pdb):
    """The debugger of one cell on one rank; its first stop waits until a terminal connects.

    path: of the socket; tell(stop): called with {"line", "cell", "source", "node", "attached"}, and with None when the
    rank goes on by itself. After `q` the cell stops no more.
    """

    def __init__(self, rank, path, tell):
        super().__init__(stdin=io.StringIO(), stdout=io.StringIO(), nosigint=True)
        self.rank, self.path, self.tell = rank, path, tell
        self.terminal, self.at, self.left = None, None, False

    def stop(self, frame):
        """Stop in `frame`, at the line that it is in."""
        if self.left:
            return
        self.reset()
        below = frame
        while below is not None:
            below.f_trace, self.botframe = self.trace_dispatch, below
            if in_cell(below) and below.f_code.co_name == "<module>":
                break
            below = below.f_back
        self.interaction(frame, None)
        if not self.left and (self.stoplineno != -1 or self.breaks):  # -1: continue
            sys.settrace(self.trace_dispatch)  # last: what runs after it would be traced

    def close(self):
        """End tracing and hang up, at the end of the cell."""
        sys.settrace(None)
        self.clear_all_breaks()
        if self.terminal is not None:
            self._hang_up("the cell has ended")
            self.terminal.connection.close()
            self.terminal.lines.close()
        self.tell(None)

    def _hang_up(self, why):
        self.terminal.write(f"{why}\n")
        with suppress(OSError):
            self.terminal.connection.shutdown(socket.SHUT_RDWR)

    def interaction(self, frame, *about):
        self.at = {"call": "the debugger", **self._place(frame)}
        stop = {**self._place(frame), "node": platform.node(), "attached": self.terminal is not None}
        try:
            self.tell(stop)
            if self.terminal is None:
                self._wait_for_terminal()
                self.tell(stop | {"attached": True})
            super().interaction(frame, *about)
        finally:
            self.at = None

    def _wait_for_terminal(self):
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                try:
                    listener.bind(str(self.path))
                    listener.listen(1)
                except OSError as error:
                    cure = "set TMPDIR to a short path on a local disk and start the kernel again"
                    raise RuntimeError(f"breakpoint() cannot listen on {self.path} ({error}): {cure}") from None
                self.terminal = Terminal(listener.accept()[0])
        finally:
            Path(self.path).unlink(missing_ok=True)  # one terminal: the next one finds another rank
        self.stdin = self.stdout = self.terminal
        self.message(WELCOME.format(rank=self.rank))

    def _place(self, frame):
        """The innermost line of a cell: {"line", "cell", "source"}."""
        while frame.f_back is not None and not in_cell(frame):
            frame = frame.f_back
        file, line = frame.f_code.co_filename, frame.f_lineno
        return {"line": line, "cell": _cell_of(file) or file, "source": linecache.getline(file, line).strip()}

    def get_stack(self, *about):
        stack, index = super().get_stack(*about)
        above = next((i for i, (frame, _) in enumerate(stack) if in_cell(frame)), 0)  # IPython's frames
        return stack[above:], index - above

    def _cmdloop(self):
        self.cmdloop()  # pdb's own goes on after an interrupt of the kernel, which is to end the cell

    def stop_here(self, frame):
        if not super().stop_here(frame):
            return False
        while frame is not None and not in_cell(frame):  # not in IPython, between two statements of a cell
            frame = frame.f_back
        return frame is not None

    # IPython compiles each statement of a cell by itself: no call and no return for the one who steps
    def user_call(self, frame, arguments):
        if not _is_statement(frame):
            super().user_call(frame, arguments)

    def user_return(self, frame, value):
        if _is_statement(frame):
            self.set_step()
        else:
            super().user_return(frame, value)

    def format_stack_entry(self, frame_lineno, *about):
        file = frame_lineno[0].f_code.co_filename
        return super().format_stack_entry(frame_lineno, *about).replace(self.canonic(file), _cell_of(file) or file)

    def set_continue(self):
        self.tell(None)
        super().set_continue()

    def do_quit(self, _):
        """q(uit): leave the debugger; the cell goes on, and stops no more on this rank."""
        self.left = True
        self.clear_all_breaks()
        self.set_continue()
        self._hang_up("the cell goes on")
        return 1

    def do_interact(self, _):
        """Not available: a rank has no keyboard."""
        self.error("interact needs a keyboard of the rank; type one statement after !")

    do_q = do_exit = do_EOF = do_quit


def _cell_of(file):
    """Return "this cell" or "an earlier cell" for the file name of a cell's code, "" for any other."""
    shell = get_ipython()
    name = shell.compile.format_code_name(file)
    return name and ("this cell" if name[1] == f"In[{shell.execution_count}]" else "an earlier cell")


def _is_statement(frame):
    return frame.f_code.co_name == "<module>" and in_cell(frame)


# ------------------------------------------------------------------ in the terminal


def stopped():
    """The sockets of this user's ranks that wait for a terminal, in the order of their notebooks and ranks."""
    from manyhands.launch.settings import home
    from manyhands.notebook.engine_processes import OURS

    places = {Path(tempfile.gettempdir()), Path("/tmp"), home() / ".manyhands"}
    found = {path for place in places for path in place.glob(f"{OURS}*/*.pdb")}
    with suppress(OSError):  # Linux: also where the notebook has another TMPDIR
        bound = re.findall(rf"(/.*/{re.escape(OURS)}[^/]+/\d+\.pdb)$", Path("/proc/net/unix").read_text(), re.M)
        found |= {Path(path) for path in bound}
    ours = {path.resolve() for path in found if os.path.exists(path) and path.stat().st_uid == os.getuid()}
    return sorted(ours, key=lambda path: (path.parent, int(path.stem)))


def main(arguments):
    """Connect to a stopped rank and carry lines both ways until one side ends. Returns the exit status."""
    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    paths = stopped()
    if arguments:
        paths = [path for path in paths if arguments[0] in (path.stem, str(path))]
    if len({path.parent for path in paths}) > 1:
        print("Ranks of several notebooks are stopped:")
        print("\n".join(f"  python -m manyhands.notebook.debug {shlex.quote(str(path))}" for path in paths))
        return 2
    if not paths:
        print("no stopped rank waits for a terminal" + (f" as {arguments[0]}" * bool(arguments)) + " on this machine")
        return 1
    with socket.socket(socket.AF_UNIX) as rank, suppress(KeyboardInterrupt, ConnectionError):
        rank.connect(str(paths[0]))
        sources = [rank, sys.stdin]
        while True:
            ready, _, _ = select.select(sources, [], [])
            if rank in ready:
                said = rank.recv(65536)
                if not said:
                    return 0
                sys.stdout.buffer.write(said)
                sys.stdout.flush()
            if sys.stdin in ready:
                typed = os.read(sys.stdin.fileno(), 65536)
                if typed:
                    rank.sendall(typed)
                else:  # Ctrl-D
                    sources.remove(sys.stdin)
                    rank.shutdown(socket.SHUT_WR)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
