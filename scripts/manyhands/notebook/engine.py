"""A rank's side of the notebook: what runs inside each ipyparallel engine.

`enter` gives the process its identity and opens the control line to the notebook's kernel, a socket read by a
thread of its own. The line works while the rank hangs in a collective: over it the kernel asks where the rank is,
frees it, or ends it, and the rank ends itself when the line breaks, because then the kernel is gone.
`run_cell` runs one cell and returns what it printed, displayed and raised, in the order in which that appeared.
"""

import asyncio
import base64
import builtins
import codecs
import contextlib
import ctypes
import importlib.machinery
import io
import json
import linecache
import math
import os
import pdb
import re
import signal
import socket
import stat
import sys
import threading
import traceback
from pathlib import Path

from IPython import get_ipython
from IPython.core import page
from IPython.core.autocall import ExitAutocall
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.magics import execution

from manyhands.course import catch_up
from manyhands.launch import rendezvous, settings
from manyhands.launch.ranks import joined, wrapped
from manyhands.notebook import names
from manyhands.notebook.debug import Debugger, in_cell

KEPT_CHARS = 25_000  # at least, of a very long output, at its beginning and at its end
SHOWN_LINES = 25  # of a cell that runs
# what init_process_group says where torchrun has set no variables, and where join() has been called
OWN_GROUP = re.compile("environment variable RANK expected|initialize the default process group twice")
JOIN_INSTEAD = (
    "init_process_group is for scripts: here `from manyhands import join; ranks = join()`, in a cell of all ranks,"
    " makes the group, and leave() ends it"
)
WIDGET = "application/vnd.jupyter.widget-view+json"
WIDGET_HERE = (
    "A widget of a rank is not connected to this page: make it in a cell without %%ranks. For progress, use tqdm.\n"
)
ABORT_S = 5.0  # that process groups have to abort
_telling = threading.RLock()  # one message after the other
_line = None  # the control line of this process: one rank per process, one line per rank
_own_sockets = set()  # ipyparallel's, MPI's and the control line's: those that `free` leaves alone
_running = threading.Event()
_recorder = None  # of the cell that runs
_awaits_device = False  # the cell's lines are done, and its device is not
_folder = None  # of the notebook's ranks; only the user can open it
_debugger = None  # of the cell that runs
_pid = None  # this rank's, which its forked children do not have
_exit = os._exit
_outside = None  # open for reading: the file that stands for descriptors 1 and 2, where children and C++ print
_loop = None  # asyncio's, in which this rank's cells await
_awaited = None  # the task of the cell that awaits
_read_to = 0  # so far cells have shown it: what a child prints between two cells, the next one shows


def enter(identity, control, token, store_address, folder):
    """Become a rank: set the variables that `launchers.resolve` reads, connect the control line.

    identity: str -> str, the MANYHANDS_* variables; control: (host, port) of the kernel; store_address: of rank 0;
    folder: of the notebook's ranks, private to the user.
    """
    global _line, _folder, _pid, _outside
    _folder, _pid = Path(folder), os.getpid()
    with contextlib.suppress(OSError):  # for ps and top, where there is Linux
        Path("/proc/self/comm").write_text(f"rank {identity['MANYHANDS_RANK']}")
    settings.set_variables(**identity, MANYHANDS_STORE=store_address)
    _line = socket.create_connection(control, timeout=60)
    _line.settimeout(None)
    _tell(hello=int(identity["MANYHANDS_RANK"]), pid=os.getpid(), token=token)
    _own_sockets.update(_sockets())
    threading.Thread(target=_listen, name="manyhands-control", daemon=True).start()
    show_figures_as_png(get_ipython())
    _outside = _gather_descriptors()
    sys.breakpointhook = pdb.set_trace = _stop
    builtins.input = _refuse_input
    get_ipython().user_ns.update(exit=_Exit(), quit=_Exit())
    get_ipython().loop_runner = _await_in_cell
    get_ipython().set_hook("show_in_pager", page.as_hook(_print_page), 0)
    execution.Timer = _SharedTimer
    sys.meta_path.insert(0, _PlainProgress())
    os._exit = _tell_and_exit


def _gather_descriptors():
    """Lead what this process and its children print past Python into a file without a name, which cells read."""
    name = _folder / f"{settings.value('MANYHANDS_RANK')}.printed"
    file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    name.unlink()
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    return file


def _print_page(data, **_):
    """Print what `?` and `%pinfo` show, for which a rank has no pager; a cell's file has another name on each rank."""
    text = data["text/plain"].rstrip() if isinstance(data, dict) else data
    print(re.sub(r"\x1b\[[\d;]*m|\n\S*File:\S* +\S*/ipykernel_\d+/\S*", "", text))


class _PlainProgress:
    """Import the plain tqdm as `tqdm.notebook`, for tqdm.auto too: the widgets of a rank are dead, and text is not."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == "tqdm.notebook" else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        from tqdm import std

        module.tqdm = module.tqdm_notebook = std.tqdm
        module.trange = module.tnrange = std.trange


class _Exit(ExitAutocall):
    """Ends the cell in place of the rank, which would leave the others waiting."""

    def __repr__(self):
        return "exit() ends only this cell: the rank stays, with its variables; hands.stop() ends all"

    def __call__(self, *_, **__):
        raise RuntimeError(repr(self))


def _tell_and_exit(status):
    """End this process, as ever; a rank, which is not one of its forked children, says so."""
    if os.getpid() == _pid:
        _tell(ended=status)
    _exit(status)


def _refuse_input(*_, **__):
    cure = "print what you want to see, or set the variable in the cell"
    raise RuntimeError(f"input() needs a keyboard, and a rank has none: {cure}")


def _stop(*_, **__):
    """Stop where breakpoint() or pdb.set_trace() is called, until a terminal lets the rank go on: see `debug`."""
    if _debugger is None:
        raise RuntimeError("breakpoint() needs somebody who watches, and nobody watches this run: remove it")
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("breakpoint() stops only in the cell's own thread, and this is another one: move it")
    _debugger.stop(sys._getframe(1))


def _await_in_cell(coroutine):
    """Run a cell that awaits, in a loop that stays: the engine's own runs already, and waits for this cell."""
    global _loop, _awaited
    outer = asyncio._get_running_loop()
    task = asyncio.current_task(outer) if outer else None
    _loop = _loop or asyncio.new_event_loop()
    if task:
        asyncio._leave_task(outer, task)
    asyncio._set_running_loop(None)
    try:
        _awaited = _loop.create_task(coroutine)
        try:
            return _loop.run_until_complete(_awaited)
        except BaseException:  # an interrupt: the next cell must not go on with this one
            _awaited.cancel()
            with contextlib.suppress(BaseException):
                _loop.run_until_complete(_awaited)
            raise
    finally:
        _awaited = None
        asyncio._set_running_loop(outer)
        if task:
            asyncio._enter_task(outer, task)


class _Timings:
    """The times from which `%timeit` chooses its loops: the first rank's for all, so that collectives meet.

    A rank may hear them before it begins the cell. (cell, None) says that the first rank has ended the cell: from then
    on each rank chooses.
    """

    def __init__(self):
        self.cell, self.leads, self.asked, self.heard, self.changed = 0, True, 0, {}, threading.Condition()

    def begin(self, cell, leads):
        with self.changed:
            self.cell, self.leads, self.asked = cell, leads, 0
            self.heard = {key: time_s for key, time_s in self.heard.items() if key[0] >= cell}

    def share(self, own_s):
        """Return the first rank's time; there it is `own_s`."""
        self.asked += 1
        key = self.cell, self.asked
        if self.leads:
            _tell(timed=[*key, own_s])
            return own_s
        with self.changed:
            self.changed.wait_for(lambda: key in self.heard or (self.cell, None) in self.heard)
            return self.heard.get(key, own_s)

    def hear(self, cell, number, time_s):
        with self.changed:
            self.heard[cell, number] = time_s
            self.changed.notify_all()

    def end(self):
        if self.leads and _line is not None:
            _tell(timed=[self.cell, None, None])


_timings = _Timings()


class _SharedTimer(execution.Timer):
    """The timer of `%timeit`. It calls `timeit` to choose the number of loops, and `repeat` to measure."""

    measures = False

    def timeit(self, number):
        own_s = super().timeit(number)
        return own_s if self.measures else _timings.share(own_s)

    def repeat(self, *counts):
        self.measures = True
        return super().repeat(*counts)


def join_again(cell):
    """After a failure: leave what is left of the broken group and join again as before. False if there was none."""
    if joined() is None:
        return False
    from manyhands.launch.join import rejoin  # late: it brings torch, which a lesson imports when it joins

    rendezvous.begin_cell(cell)
    try:
        return rejoin()
    finally:
        _pass_over()


def _pass_over():
    """Show no cell what was printed past Python so far: it is about ranks that were freed."""
    global _read_to
    if _outside is not None:
        _read_to = os.fstat(_outside).st_size


def _tell(**message):
    with contextlib.suppress(OSError), _telling:
        _line.sendall(json.dumps(message).encode() + b"\n")


def _listen():
    with _line.makefile("r") as lines:
        for text in lines:
            message = json.loads(text)
            if message["do"] == "where":
                _tell(reply=message["id"], answer=where())
            elif message["do"] == "names":  # a thread of its own: the line must be read on
                threading.Thread(target=_look_up, args=(message,), name="manyhands-names", daemon=True).start()
            elif message["do"] == "timed":
                _timings.hear(*message["timed"])
            elif message["do"] == "said" and _running.is_set():
                _tell(said=_recorder.tail())
            elif message["do"] == "free":
                if _recorder is not None:
                    _recorder.deaf = True
                _abort_groups()
            elif message["do"] == "interrupt" and _running.is_set():
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            elif message["do"] == "exit":
                break
    if settings.value("MPI_LOCALRANKID"):  # mpiexec kills all others when a rank goes without this line of PMI
        with contextlib.suppress(OSError, ValueError):
            launcher = socket.socket(fileno=int(settings.value("PMI_FD", "")))
            launcher.settimeout(1)
            launcher.sendall(b"cmd=finalize\n")
            launcher.recv(4096)  # its answer would break on a line that is closed
    _exit(0)  # the kernel is gone or told us to go; the main thread may hang, so no farewells


def _look_up(message):
    """Answer Tab and Shift-Tab: see `names`."""
    space, answer = get_ipython().user_ns, None
    with contextlib.suppress(Exception):  # the cell that runs changes what is looked at
        if message["detail"] is None:
            answer = names.complete(space, message["path"], message["prefix"], message["call"])
        else:
            answer = names.describe(space, message["path"], message["detail"])
    _tell(reply=message["id"], answer=answer)


def _abort_groups():
    """Wake a rank that waits inside a collective. SIGINT does not reach it before the backend's own time-out.

    NCCL listens to abort. gloo does not while all ranks wait; it does notice that its connections are gone, so
    every TCP connection that was opened after `enter`, except the store's, is shut down.
    """
    if "torch.distributed" in sys.modules:
        # a thread of its own: NCCL's abort may wait for the group's time-out, and the control line must be read on
        abort = threading.Thread(target=_abort, daemon=True)
        abort.start()
        abort.join(ABORT_S)
    _, store_port = settings.store_address()
    for descriptor, _ in _sockets() - _own_sockets:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as link:
            tcp = link.type == socket.SOCK_STREAM and link.family in (socket.AF_INET, socket.AF_INET6)
            if tcp and store_port not in (link.getsockname()[1], link.getpeername()[1]):
                link.shutdown(socket.SHUT_RDWR)


def _abort():
    from torch.distributed import distributed_c10d as c10d

    with contextlib.suppress(Exception):
        c10d._abort_process_group()


def _sockets():
    """(descriptor, inode) of every socket of this process."""
    found = set()
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found


def where():
    """Return where the main thread is: {"call": innermost named call or "", "line": line number, "source": its text}.

    None while no cell runs; line 0 before and after the cell's own lines.
    """
    if not _running.is_set():
        return None
    if _debugger is not None and (at := _debugger.at):
        return at
    frame, call = sys._current_frames().get(threading.main_thread().ident), ""
    while frame is not None and not in_cell(frame):
        name = frame.f_code.co_name
        if name != "wrapper":  # torch wraps each collective for its log
            call = name
        frame = frame.f_back
    if frame is None and (task := _awaited) is not None:
        frame, call = _place_of(task.get_coro())
    if frame is None:
        return {"call": "synchronize" if _awaits_device else "", "line": 0, "source": ""}
    source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return {"call": call, "line": frame.f_lineno, "source": source}


def _place_of(coroutine):
    """Return the innermost frame of a cell in a coroutine that waits, and the name of what it awaits there."""
    frame, call, of_cell = None, "", False
    while coroutine is not None:
        at = getattr(coroutine, "cr_frame", None)
        if at is not None and in_cell(at):
            frame, call, of_cell = at, "", True
        elif of_cell:
            call, of_cell = getattr(coroutine, "__name__", type(coroutine).__name__), False
        coroutine = getattr(coroutine, "cr_await", None)
    return frame, call


def run_cell(source, cell, options, watched=False, writes=True, leads=True):
    """Run cell number `cell` in this rank's namespace. Of a very long text the middle is left out, unless
    `options.whole`. `watched`: somebody sees that it runs, so breakpoint() may stop it. `writes`: this rank runs
    `%%writefile`; `leads`: it chooses the loops of `%timeit`.

    Returns what `Recorder.result` returns, and "joined": whether this rank has entered a process group so far; with
    `options.trace` also "trace", the record of its collectives.
    """
    global _recorder, _debugger
    rendezvous.begin_cell(cell)
    _timings.begin(cell, leads)
    shell = get_ipython()
    try:
        with recording(shell, options.whole, cell) as _recorder, _traced(options.trace) as traced:
            if watched:
                rank = settings.value("MANYHANDS_RANK")
                _debugger = Debugger(rank, _folder / f"{rank}.pdb", lambda stop: _tell(stopped=stop))
            _running.set()
            shell.execution_count = cell  # by which a traceback names the cell that a function comes from
            if source.startswith("%%") and (code := re.sub(r"\A(%%[^\n]*\n)+", "", source)):
                lines = code.splitlines(keepends=True)  # which a traceback shows, and `where`
                linecache.cache |= {name: (len(code), None, lines, name) for name in ("<timed exec>", "<magic-timeit>")}
            if writes or not source.startswith(("%%writefile", "%%file")):
                _fail_with(shell.run_cell(source, store_history=False))
            try:
                _await_device()
            except BaseException:  # noqa: BLE001 - also an interrupt: what fails here is this cell's failure
                shell.showtraceback()
    finally:
        _running.clear()
        _timings.end()
        if _debugger is not None:
            _debugger.close()
            _debugger = None
    return _recorder.result() | {"joined": joined() is not None, "trace": traced and traced.result()}


def _fail_with(result):
    """Let the cell fail also of errors that IPython only prints, such as an exception group."""
    error = result.error_before_exec or result.error_in_exec
    if error is not None and _recorder.error is None:
        _recorder.fail(type(error), error, ["".join(traceback.format_exception_only(error)).rstrip()])


def lacking(wanted, stars, graph):
    """Return what `catch_up.lacking` finds in this rank's namespace."""
    return catch_up.lacking(get_ipython().user_ns, wanted, stars, graph)


def define(pieces):
    """Define pieces of the lesson in this rank's namespace."""
    catch_up.define(get_ipython().user_ns, pieces)


def _traced(trace):
    if not trace:
        return contextlib.nullcontext()
    from manyhands.measure.trace import record  # late: it brings torch

    return record()


def _await_device():
    """Wait until this rank's device has done what the cell gave it. A collective of NCCL returns before it is done:
    what hangs or fails in it belongs to this cell, not to the next one that waits for the device."""
    global _awaits_device
    ranks = joined()
    if ranks is None or ranks.device.type == "cpu":
        return
    from manyhands.measure.timing import synchronise  # late: it brings torch

    _awaits_device = True
    try:
        synchronise(ranks.device)
    finally:
        _awaits_device = False


class Text:
    """Consecutive printed text; if it exceeds 4 times `kept` characters, its middle is left out."""

    def __init__(self, kept):
        self.kept, self.pieces, self.held, self.left_out = kept, [], 0, 0

    def add(self, piece):
        self.pieces.append(piece)
        self.held += len(piece)
        if self.held > 4 * self.kept:  # rarely enough for the time to grow with the text alone
            text = "".join(self.pieces)
            if not self.left_out and len(short := _shortened(text)) < 2 * self.kept:  # progress bars
                self.pieces, self.held = [short], len(short)
                return
            self.pieces = [text[: self.kept], text[-self.kept :]]
            self.left_out += self.held - 2 * self.kept
            self.held = 2 * self.kept

    def __str__(self):
        notice = (
            f"\n[... {self.left_out:,} characters left out: %%ranks --all shows them ...]\n" if self.left_out else ""
        )
        return _last_states("".join([*self.pieces[:1], notice, *self.pieces[1:]]))


class Recorder(io.TextIOBase):
    """Stands in for stdout and stderr, and collects displays and the error of the cell beside the text.

    outside: the descriptor of a file where others print meanwhile, such as children; its text is read between writes.
    """

    encoding = "utf-8"

    def __init__(self, whole=False, cell=None, outside=None):
        self.outside, self.seen = outside, _read_to
        self.decoder, self.buffer = codecs.getincrementaldecoder("utf-8")("replace"), _Bytes(self)
        self.cell = cell  # its number
        self.items, self.error, self.lock = [], None, threading.Lock()
        self.shown = {}  # display_id -> its place in items: an update replaces it
        self.kept = math.inf if whole else KEPT_CHARS
        self.deaf = False  # once a rank is being freed, what it says is about that and no longer the cell's

    def fileno(self):
        if self.outside is None:
            return super().fileno()
        return 1  # and 2 leads to the same file

    def write(self, text):
        if self.outside and os.getpid() != _pid:  # a forked child
            os.write(1, text.encode("utf-8", "replace"))
        elif not self.deaf:
            with self.lock:  # autograd's thread prints too
                self._read_outside()
                self._add(text)
        return len(text)

    def read_outside(self):
        """Take in what was printed past Python so far."""
        with self.lock:
            self._read_outside()

    def _read_outside(self):
        while self.outside and not self.deaf and (printed := os.pread(self.outside, 65536, self.seen)):
            self.seen += len(printed)
            self._add(self.decoder.decode(printed))

    def _add(self, text):
        if text:
            if not self.items or self.items[-1][0] != "text":
                self.items.append(("text", Text(self.kept)))
            self.items[-1][1].add(text)

    def tail(self):
        """The last SHOWN_LINES lines of what was printed last."""
        with self.lock:
            self._read_outside()
            pieces = next((item[1].pieces[-1000:] for item in reversed(self.items) if item[0] == "text"), [])
        return "\n".join(_last_states("".join(pieces)[-5000:]).split("\n")[-SHOWN_LINES:])

    def writable(self):
        return True

    def display(self, data, metadata, display_id=None, update=False):
        with self.lock:
            self._read_outside()
            if WIDGET in data:
                self._add(WIDGET_HERE)
            elif update and display_id in self.shown:
                self.items[self.shown[display_id]] = ("data", data, metadata)
            else:
                self.shown[display_id] = len(self.items)
                self.items.append(("data", data, metadata))

    def fail(self, kind, value, traceback_lines):
        if self.error is None:
            lines = _lines_of_the_cell(traceback_lines, self.cell)
            missing, says = value.name if kind is NameError else None, str(value)
            if kind is ValueError and OWN_GROUP.search(says):
                says, lines = JOIN_INSTEAD, wrapped(f"ValueError: {JOIN_INSTEAD}")
            self.error = {"name": kind.__name__, "value": says, "traceback": lines, "missing": missing}

    def result(self):
        """{"items": [("text", str) | ("data", mime bundle, metadata)], "error": None or a dict}: name, value, traceback
        and missing, the name that is not defined.
        """
        joined = [("text", str(item[1])) if item[0] == "text" else item for item in self.items]
        return {"items": [item for item in joined if item[1]], "error": self.error}


class _Bytes(io.RawIOBase):
    """`sys.stdout.buffer` of a Recorder."""

    def __init__(self, recorder):
        self.recorder = recorder

    def writable(self):
        return True

    def fileno(self):
        return self.recorder.fileno()

    def write(self, data):
        self.recorder.write(bytes(data).decode("utf-8", "replace"))
        return len(data)


class _Publisher(CapturingDisplayPublisher):
    def publish(self, data, metadata=None, *, transient=None, update=False, **_):
        self.recorder.display(data, metadata or {}, (transient or {}).get("display_id"), update)


@contextlib.contextmanager
def recording(shell, whole=False, cell=None):
    """Within the block everything that IPython's `shell` puts out goes into the Recorder that this yields."""
    global _read_to
    recorder = Recorder(whole, cell, _outside)

    def display_value(value):  # of a cell's last line
        if value is not None:
            recorder.display(*shell.display_formatter.format(value))

    saved = shell.display_pub, shell.display_trap.hook, sys.stdout, sys.stderr
    shell.display_pub = _Publisher()
    shell.display_pub.recorder = recorder
    shell.display_trap.hook = display_value
    shell._showtraceback = recorder.fail
    shell.show_usage_error = lambda error: recorder.fail(type(error), error, [f"{type(error).__name__}: {error}"])
    shell._tee = lambda channel: contextlib.nullcontext()  # IPython's would keep two objects of every print for good
    sys.stdout = sys.stderr = recorder
    try:
        yield recorder
        if _outside:
            ctypes.CDLL(None).fflush(None)  # C's own buffers
            recorder.read_outside()
        _flush_pyplot(recorder)
    finally:
        _read_to = recorder.seen
        if recorder.deaf:
            _pass_over()
        shell.display_pub, shell.display_trap.hook, sys.stdout, sys.stderr = saved
        del shell._showtraceback, shell.show_usage_error, shell._tee


def show_figures_as_png(shell):
    """Do what `%matplotlib inline` does, without importing matplotlib before a cell needs it."""
    formatter = shell.display_formatter.formatters["image/png"]
    formatter.for_type_by_name("matplotlib.figure", "Figure", _png)


def _png(figure):
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=100, bbox_inches="tight")
    return base64.b64encode(picture.getvalue()).decode()


def _flush_pyplot(recorder):
    """Figures that a cell left open in pyplot appear below it, as in any notebook."""
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        for number in pyplot.get_fignums():
            recorder.display({"image/png": _png(pyplot.figure(number))}, {})
        pyplot.close("all")


def _last_states(text):
    """Text as a terminal shows it in the end, with a blank line for one that was overwritten with spaces."""
    if "\r" not in text and "\x1b[" not in text:
        return text
    return "\n".join(row if row.strip() else "" for row in _rows(text)[0])


def _shortened(text):
    """Text without the states that its end has replaced; what is written after it replaces the same lines."""
    rows, at, rewrites = _rows(text)
    up = len(rows) - 1 - at
    return "\n".join(rows) + f"\x1b[{up}A" * bool(up) + "\r" * rewrites


def _rows(text):
    """Return a terminal's lines, which of them is written next, and whether that replaces what stands there.

    It does so after a carriage return, after going up, and in a line further down that is there already.
    """
    rows, at, rewrites = [""], 0, False
    for piece in re.split(r"(\r*\n|\r|\x1b\[\d*[AKJ])", text):
        if piece.endswith("\n"):
            at, rewrites = at + 1, True
            rows += [""] * (at == len(rows))
        elif piece == "\r":
            rewrites = True
        elif piece.startswith("\x1b[") and piece.endswith("A"):
            at, rewrites = max(0, at - int(piece[2:-1] or 1)), True
        elif piece and not re.fullmatch(r"\x1b\[\d*[KJ]", piece):
            rows[at], rewrites = piece if rewrites else rows[at] + piece, False
    return rows, at, rewrites


def _lines_of_the_cell(traceback_lines, cell):
    """A traceback that reads well on light and dark pages: no colours, narrow, no frame of ours.

    Of its cells that with the number `cell` is "the cell", any other one an earlier cell.
    """
    text = re.sub(r"\x1b\[[\d;]*m", "", "\0".join(traceback_lines))
    text = re.sub(rf"Cell In ?\[{cell}\], line |File <(?:timed exec|magic-timeit)>:", "the cell, line ", text)
    text = re.sub(r"Cell In ?\[\d+\], line", "an earlier cell, line", text)
    *frames, said = re.sub(r"^-{20,}\0(\w+) +Traceback", r"\1: Traceback", text).split("\0")
    theirs = [
        frame
        for frame in frames
        if "/manyhands/notebook/engine.py:" not in frame.partition("\n")[0] and "().run_cell_magic(" not in frame
    ]
    return [*"\n".join(theirs).split("\n"), *wrapped(said)]
