"""The ranks of a notebook: run cells on all of them, fetch what they hold, stop them. `start_ranks` makes them.

    hands[2]["x"], hands.pull("x"), hands.compare("x"), hands.restart(), hands.stop()

Ranks are ipyparallel engines under MPI, or without MPI where it is missing. They end with the kernel, however it
ends, and after MANYHANDS_IDLE_S seconds (default 1800) without a cell.
"""

import atexit
import builtins
import contextlib
import json
import platform
import secrets
import socket
import threading
import time

from IPython.display import display

from manyhands.course import catch_up
from manyhands.launch import rendezvous, settings
from manyhands.launch.allocation import Allocation, RanksError
from manyhands.launch.machine import login_node
from manyhands.notebook import engine
from manyhands.notebook.cell import Cell
from manyhands.notebook.compare import compare
from manyhands.notebook.engine_processes import Processes, TimeLimit, engine_launcher

LOOK_UP_S = 0.5  # for Tab and Shift-Tab: then the kernel answers alone

_current = None  # one set of ranks per kernel: starting again replaces it


def replace_ranks(pool):
    """From now on these are the ranks of this kernel; those before end."""
    global _current
    if _current is not None:
        _current.stop()
    _current = pool


def current_ranks():
    """The ranks of this kernel. Raises RanksError where there are none."""
    if _current is None or _current.client is None:
        cure = "run the cell with start_ranks(...) at the top, then those of Start below it"
        if _current is None:
            raise RanksError(f"no ranks yet: {cure}. In a notebook of your own: %load_ext manyhands, then %ranks 4")
        if not _current.lesson:
            cure = f"%ranks {_current.world_size} starts new ones; then run your cells again"
        raise RanksError(f"{_current.why_stopped}: {cure}")
    return _current


def lesson_here():
    """Return the lesson whose ranks this kernel has started, "" for none."""
    return _current.lesson if _current is not None else ""


class RankPool:
    """A notebook's ranks. `world_size` is their number, `client` ipyparallel's client (None when stopped).

    lesson: "02_collectives"; "" in a notebook that is no lesson.
    """

    def __init__(self, lesson, values, mpi=None):
        self.lesson, self.values = lesson, values
        self.allocation = Allocation.find()
        self.world_size = values.get("n_ranks") or self.allocation.default_ranks()
        self.mpi = settings.value("MANYHANDS_MPI") != "off" if mpi is None else mpi
        reason = login_node() if self.allocation.kind == "local" else None
        if reason and (self.world_size > 2 or self.mpi):
            print(f"2 ranks, without MPI, as this is a login node ({reason}).\nRun the notebook in a job for more.")
            self.world_size, self.mpi = min(self.world_size, 2), False
        self.client = self.processes = self.control = None
        self.why_stopped = "the ranks are not running"
        self.joined = False  # whether they have met in a process group since they started
        self.restarted = False  # and the start cells have not been run since
        self._cell = 0
        self._idle = None

    def start(self, quiet=False):
        """Start controller and engines, give each its rank, push the parameters."""
        started = Starting(self.world_size)
        if self.mpi and engine_launcher(self.allocation, self.world_size, True) is None:
            self.mpi = False
            print("No mpiexec here: the ranks start without MPI;\ncells that need MPI say so.")
        for tries_left in (2, 1, 0):
            self.control, self.joined = None, False
            self.processes = Processes(self.world_size, self.allocation, self.mpi, started.tell)
            atexit.register(self.stop)
            try:
                self._connect()
                break
            except BaseException as error:
                again = tries_left and isinstance(error, Exception) and self.processes.port_taken()
                self.stop()
                if not again:
                    raise
        if not quiet:
            kind = "MPI" if self.mpi else "no MPI"
            nodes = self.allocation.num_nodes
            place = "this machine" if nodes == 1 else f"{nodes} nodes"
            took = f", after {started.seconds():.0f} s" if settings.live() else ""
            started.show(f"{self.world_size} ranks on {place} ({kind}){took}. %%ranks runs a cell on all.")

    def _connect(self):
        import ipyparallel

        self.processes.wait_until(self.processes.can_be_reached, lambda: "the controller did not start")

        def answers():  # asked anew after 5 s: a controller may end, or be slow, at any moment of its start
            with contextlib.suppress(ipyparallel.error.TimeoutError):
                self.client = ipyparallel.Client(str(self.processes.connection_file), timeout=5)
            return self.client is not None

        self.processes.wait_until(answers, lambda: "the controller did not answer")
        self.processes.wait_until(
            lambda: len(self.client.ids) >= self.world_size,
            lambda: f"only {len(self.client.ids)} of {self.world_size} ranks started",
        )
        self._enter()
        self.processes.note_shared_memory()
        self._touch()

    def _enter(self):
        """Give every engine its identity, in the order of their MPI ranks."""
        ids = sorted(self.client.ids)
        nodes = self.nodes = self._answers([self.client[one].apply_async(platform.node) for one in ids])
        self.control = ControlLines(self.world_size, self.processes.host)
        store = str(self.processes.folder / "store")  # whose folder only the user can open
        if len(set(nodes)) > 1:
            (store,) = self._answers([self.client[ids[0]].apply_async(rendezvous.listen)])
        address, pending = (self.processes.host, self.control.port), []
        for rank, engine_id in enumerate(ids):
            known = {
                "RANK": rank, "WORLD_SIZE": self.world_size,
                "LOCAL_RANK": nodes[:rank].count(nodes[rank]), "LOCAL_WORLD_SIZE": nodes.count(nodes[rank]),
                "MPI": int(self.mpi), "LESSON": self.lesson,
            }  # fmt: skip
            identity = {f"MANYHANDS_{name}": str(value) for name, value in known.items()}
            enter = engine.enter, identity, address, self.control.token, store, str(self.processes.folder)
            pending.append(self.client[engine_id].apply_async(*enter))
        self._answers(pending)
        self.processes.wait_until(
            lambda: not self.control.wait_for_all(0),
            lambda: f"ranks {self.control.wait_for_all(0)} did not open their control line",
        )
        self.views = [self.client[engine_id] for engine_id in ids]
        self._answers([view.push(self.values, block=False) for view in self.views])

    def _answers(self, pending):
        """Return the ranks' answers once they have started. Raises RanksError as soon as one of them has died."""
        self.processes.wait_until(
            lambda: all(answer.ready() for answer in pending),
            lambda: f"rank {next(r for r, answer in enumerate(pending) if not answer.ready())} did not answer",
        )
        return [answer.get() for answer in pending]

    def restart(self, quiet=False):
        """Fresh ranks: all variables are gone; a lesson's start cells that only define and join run by themselves."""
        self.stop()
        self.start(quiet)
        self.restarted = True

    def stop(self, why="the ranks were stopped"):
        """End all ranks, the controller and the watchdog; nothing is left behind."""
        self.why_stopped = why
        client, control, processes = self.client, self.control, self.processes
        self.client = self.control = self.processes = None
        if self._idle is not None:
            self._idle.cancel()
        if control is not None:
            control.close()
        if client is not None:
            client.close()
        if processes is not None:
            processes.stop(told=control is not None)
        atexit.unregister(self.stop)

    def _touch(self):
        """Something ran: the idle time starts anew."""
        if self._idle is not None:
            self._idle.cancel()
        idle_s = settings.idle_s()
        why = f"the ranks were stopped after {idle_s / 60:.0f} idle minutes"
        self._idle = threading.Timer(idle_s, self.stop, [why])
        self._idle.daemon = True
        self._idle.start()

    def __getitem__(self, rank):
        """ipyparallel's view of a rank: hands[2]["x"] reads a variable of it."""
        current_ranks()
        return self.views[rank]

    def pull(self, name):
        """The variable `name` of every rank: a list in rank order."""
        current_ranks()
        return [view.pull(name, block=True) for view in self.views]

    def compare(self, expression, ranks=None):
        """Compare the value of `expression`, such as "loss", between `ranks` (default: all); return a Comparison."""
        current_ranks()
        return compare(self.views, expression, ranks)

    def run(self, source, options, on_wait=None):
        """Run `source` as these CellOptions say; returns the Cell once its ranks are done, freed or given up.

        on_wait(elapsed_s, cell) is called while it runs.
        """
        self._idle.cancel()
        cell = Cell(self, options)
        try:
            cell.run(source, on_wait)
            if not cell.restarted:
                self.joined = self.joined or any(done.get("joined") for done in cell.done.values())
        finally:
            if self.client is not None:
                self._touch()
        return cell

    def catch_up(self, source, ranks=None):
        """Before a cell of a lesson runs: define on its ranks what it needs and none of them has; return what to say.

        One decision for all of them: a name that only some ranks have is named, and not brought.
        """
        if not self.lesson:
            return ""
        known = catch_up.outline(self.lesson)
        try:
            wanted, stars = catch_up.reads(source)
        except SyntaxError:  # IPython will say so
            return ""
        wanted -= known.start | vars(builtins).keys()
        found = self._ask(ranks, engine.lacking, wanted, stars, known.graph()) if wanted else []
        if not found or not any(found):
            return ""
        missing = set.intersection(*map(set, found))
        pieces = [piece for name, piece in known.pieces.items() if name in missing]
        self._ask(ranks, engine.define, pieces)
        partly = sorted(set.union(*map(set, found)) - missing - {p.name for p in known.pieces.values() if p.is_import})
        lines = [catch_up.said(missing, self.lesson)]
        lines += [
            f"{name} is there on some of these ranks only: run the cell that defines it on all" for name in partly
        ]
        return "\n".join(filter(None, lines))

    def start_cells(self, cell):
        """Return the lesson's start cells, if the ranks were restarted and `cell` is not one of them; else ""."""
        again, self.restarted = self.restarted and self.lesson, False
        begin = catch_up.outline(self.lesson).begin if again else ""
        return "" if cell.strip() in begin else begin

    def _ask(self, ranks, function, *arguments):
        """Return the answers of ranks that run no cell; [] if one is gone or does not answer, as the cell will say."""
        ranks = range(self.world_size) if ranks is None else ranks
        answers = [self.views[rank].apply_async(function, *arguments) for rank in ranks]
        limit = TimeLimit(20 * settings.patience())
        while not all(answer.ready() for answer in answers):
            if self.control.dead or limit.over():
                return []
            time.sleep(0.002)
        return [answer.get() for answer in answers]

    def look_up(self, rank, **question):
        """Return what `names` says of the rank's variables, also while it runs a cell; None if it does not answer."""
        control = self.control
        answer = control.ask([rank], LOOK_UP_S, "names", **question)[rank] if control is not None else None
        return None if answer == "silent" else answer

    def next_cell(self):
        """A number for the next cell: ranks that join in it meet under that number."""
        self._cell += 1
        return self._cell

    def rejoin(self):
        """After a failure: a fresh process group of all ranks. False if none of them had joined one."""
        number = self.next_cell()
        answers = [view.apply_async(engine.join_again, number) for view in self.views]
        patience_s = 20 * settings.patience()
        return any([answer.get(timeout=patience_s) for answer in answers])


class Starting:
    """One line on the screen while `n` ranks start: after two seconds for how long, at the end what there is."""

    def __init__(self, n):
        self.n, self.began, self.said, self._line = n, time.monotonic(), 1, None

    def seconds(self):
        return time.monotonic() - self.began

    def tell(self):
        """Show the elapsed seconds, once per second, unless the output is stored."""
        if settings.live() and self.seconds() >= self.said + 1:
            self.said = int(self.seconds())
            self.show(f"starting {self.n} ranks: {self.said} s", stays=False)

    def show(self, text, stays=True):
        """Put `text` into the line; text that stays is printed where there is no line yet."""
        if self._line is None and stays:
            print(text)
        elif self._line is None:
            self._line = display({"text/plain": text}, raw=True, display_id=True)
        else:
            self._line.update({"text/plain": text}, raw=True)


class ControlLines:
    """The kernel's end of the control lines: one socket per rank, open while the ranks live.

    A rank that hangs in a collective runs no code that is sent to it, but the thread behind its control line does: it
    says where the rank is and frees it. A line that breaks means that the rank is gone, within milliseconds.
    Listens for `n` ranks on `host`; each must show the token.
    """

    def __init__(self, n, host="127.0.0.1"):
        self.n, self.token = n, secrets.token_hex(16)
        self.pids, self.dead, self.said = {}, set(), ""
        self.ended = {}  # rank -> the status with which it called os._exit
        self.stopped = {}  # rank -> where it stopped: what `debug.Debugger` tells
        self._lines, self._replies, self._asked, self._next_id = {}, {}, set(), 0
        self._changed, self._writing = threading.Condition(), threading.Lock()
        self._listener = socket.create_server((host, 0), backlog=max(n, 8))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="manyhands-control", daemon=True).start()

    def _accept(self):
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._read, args=(line,), name="manyhands-rank", daemon=True).start()

    def _read(self, line):
        line.settimeout(60)
        with line, line.makefile("r") as messages:
            try:
                hello = json.loads(next(messages))
                if not secrets.compare_digest(str(hello["token"]), self.token):
                    return
                rank = int(hello["hello"])
            except (OSError, ValueError, KeyError, StopIteration, TypeError):
                return
            line.settimeout(None)
            with self._changed:
                self._lines[rank], self.pids[rank] = line, hello["pid"]
                self._changed.notify_all()
            with contextlib.suppress(OSError, ValueError):
                for text in messages:
                    self._receive(rank, json.loads(text))
            with self._changed:
                self.stopped.pop(rank, None)
                self.dead.add(rank)
                self._changed.notify_all()

    def _receive(self, rank, message):
        if "said" in message:
            self.said = message["said"]
            return
        if "timed" in message:
            self.tell(sorted(self._lines), "timed", timed=message["timed"])
            return
        if "ended" in message:
            self.ended[rank] = message["ended"]
            return
        if "stopped" in message:
            if message["stopped"] is None:
                self.stopped.pop(rank, None)
            else:
                self.stopped[rank] = message["stopped"]
            return
        with self._changed:
            if message["reply"] in self._asked:  # else nobody waits for this answer any more
                self._replies[message["reply"], rank] = message["answer"]
            self._changed.notify_all()

    def wait_for_all(self, timeout_s):
        """Block until every rank is on its line; returns the ranks that are missing after `timeout_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._lines) == self.n, timeout_s)
            return sorted(set(range(self.n)) - set(self._lines))

    def tell(self, ranks, do, **more):
        for rank in ranks:
            if rank in self._lines and rank not in self.dead:
                with contextlib.suppress(OSError), self._writing:
                    self._lines[rank].sendall(json.dumps({"do": do, **more}).encode() + b"\n")

    def where(self, ranks, timeout_s=None):
        """Return where each rank is: rank -> {"call", "line", "source"}, None (no cell runs), or "silent"."""
        return self.ask(ranks, timeout_s or 4 * settings.patience(), "where")

    def ask(self, ranks, timeout_s, do, **more):
        """Return the answer of each rank, also while it runs a cell: rank -> answer, "silent" after the time-out."""
        with self._changed:
            self._next_id += 1
            question = self._next_id
            self._asked.add(question)
        self.tell(ranks, do, id=question, **more)
        with self._changed:
            self._changed.wait_for(
                lambda: all((question, r) in self._replies or r in self.dead for r in ranks), timeout_s
            )
            self._asked.discard(question)
            return {r: self._replies.pop((question, r), "silent") for r in ranks}

    def close(self):
        """Hang up: every rank that is still there ends itself."""
        self._listener.close()
        for line in list(self._lines.values()):
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
