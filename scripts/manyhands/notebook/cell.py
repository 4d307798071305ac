"""One cell on all ranks: wait for it, name the ranks that are silent, free them, and leave the ranks usable."""

import contextlib
import re
import time

from manyhands.notebook import engine
from manyhands.notebook.engine_processes import TimeLimit, one_interrupt

GRACE_S = 3.0  # what the other ranks get once one has failed
TELLING_S = 15.0  # and those that are about to tell what they raised: slow where cores are few
BUSY_TIMES = 3  # a busy machine lengthens a cell's limit by at most this factor: people are waiting
LOST_PEER = re.compile(r"Connection (closed|reset)|Broken pipe|[Tt]imed out")  # as gloo says it

# What CUDA, HIP, NCCL and Intel's XCCL say where a process has lost its device or its peers: it must start again.
LOST_DEVICE = re.compile(
    r"AcceleratorError|(CUDA|HIP|NCCL|RCCL|XCCL|oneCCL|SYCL|UR) error|device-side assert|NCCL communicator|"
    r"Watchdog caught|UR_RESULT_ERROR|ZE_RESULT_ERROR"
)


class Cell:
    """The results of a cell on each rank that its CellOptions name, and how it ended.

    done, freed: rank -> {"items", "error"} of ranks that ended by themselves, or when they were freed;
    where: rank -> where it was when it was freed; ended: rank -> its status, if it called os._exit;
    errors: the ranks that raised, in that order; dead, stuck: ranks; ranks: those that run it.
    """

    def __init__(self, pool, options):
        self.pool, self.world_size, self.options = pool, pool.world_size, options
        self.ranks = list(range(pool.world_size) if options.ranks is None else options.ranks)
        self.done, self.where, self.freed = {}, {}, {}
        self.errors, self.dead, self.stuck = [], [], []
        self.timed_out, self.interrupted, self.rejoined, self.restarted = None, False, False, False
        self.limit, self.ended = None, {}
        self._pending = {}

    def run(self, source, on_wait=None):
        """Run `source` on the cell's ranks; returns once all are done, freed or given up.

        on_wait(elapsed_s, this cell) is called again and again while it runs; without it breakpoint() is an error.
        While a rank is stopped there, no time-out passes.
        """
        number = self.number = self.pool.next_cell()
        nodes = self.pool.nodes
        for rank in self.ranks:
            roles = {
                "writes": all(nodes[r] != nodes[rank] for r in self.ranks if r < rank),
                "leads": self.ranks[0] == rank,
            }
            run = engine.run_cell, source, number, self.options, on_wait is not None
            self._pending[rank] = self.pool.views[rank].apply_async(*run, **roles)
        self.limit = TimeLimit(self.options.timeout_s, BUSY_TIMES)
        with one_interrupt() as hold:
            try:
                self._wait(on_wait, hold)
                hold()
            except KeyboardInterrupt:
                self.interrupted = True
                self._free()
            self.ended = dict(self.pool.control.ended)
            self._recover()

    def _wait(self, on_wait, hold):
        """Wait until all ranks are done, or freed at the time-out."""
        last = began = time.monotonic()
        telling = deadline = None  # once a rank has failed
        while self._pending:
            time.sleep(0.01)
            self._collect(self.done)
            now, before = time.monotonic(), last
            last = now
            if self.pool.control.stopped:
                self.limit.extend(now - before)
                if deadline is not None:
                    telling.extend(now - before)
                    deadline += now - before
            if deadline is None and (self.errors or self.dead):
                telling, deadline = TimeLimit(TELLING_S), now + GRACE_S
            if self._pending and (self.limit.over() if deadline is None else now > deadline):
                if deadline and not telling.over() and self._some_are_telling():
                    deadline = now + 0.5
                    continue
                self.timed_out = str(self.limit)
                hold()
                self._free()
            elif on_wait is not None:
                on_wait(time.monotonic() - began, self)

    def places(self):
        """Return where the unfinished ranks are, as `ControlLines.where` does; a rank slow to answer is silent."""
        return self.pool.control.where(sorted(self._pending), 0.3)

    def _collect(self, into):
        """Move the ranks that ended from pending to `into`, those that died to `dead`."""
        for rank in [r for r, answer in self._pending.items() if answer.ready()]:
            into[rank] = _get(self._pending.pop(rank))
            if into is self.done and into[rank]["error"]:
                self.errors.append(rank)
        for rank in [r for r in self._pending if r in self.pool.control.dead]:
            self.dead.append(rank)
            del self._pending[rank]

    def _some_are_telling(self):
        """Return whether a rank is outside the cell's lines: it makes its traceback, or its answer is on its way."""
        places = self.pool.control.where(list(self._pending)).values()
        return any(place is None or (place != "silent" and not place["line"]) for place in places)

    def _free(self):
        """Ask the silent ranks where they are, then wake them: out of a collective, or out of Python."""
        self.where = self.pool.control.where(list(self._pending))
        for do, patience_s in (("free", 2.0), ("interrupt", 4.0)):
            self.pool.control.tell(list(self._pending), do)
            limit = TimeLimit(patience_s)
            while self._pending and not limit.over():
                time.sleep(0.01)
                self._collect(self.freed)
        self.stuck = sorted(self._pending)
        self._pending = {}

    def _recover(self):
        """Leave the ranks usable: in a fresh group, or fresh ranks where one is dead or cannot be woken."""
        errors = [self.done[rank]["error"] for rank in self.errors]
        if self.dead:
            self.pool.stop(f"rank {min(self.dead)} died")
            with contextlib.suppress(Exception):  # without a lesson nobody would define anything again
                if self.pool.lesson:
                    self.pool.restart(quiet=True)
                    self.restarted = True
        elif self.stuck or any(LOST_DEVICE.search(f"{e['name']}: {e['value']}") for e in errors):
            self.pool.restart(quiet=True)
            self.restarted = True
        elif self.freed or any(LOST_PEER.search(e["value"]) for e in errors):
            try:
                self.rejoined = self.pool.rejoin()
            except Exception:  # whatever state the ranks are in: fresh ones have none
                self.pool.restart(quiet=True)
                self.restarted = True

    def items(self, rank):
        """Return the rank's output: [("text", str) | ("data", mime bundle, metadata)]."""
        return (self.done.get(rank) or self.freed.get(rank) or {"items": []})["items"]

    @property
    def traces(self):
        """rank -> its record of collectives, of the ranks that sent one."""
        answers = {**self.done, **self.freed}
        return {rank: answers[rank]["trace"] for rank in sorted(answers) if answers[rank].get("trace")}

    @property
    def first_error(self):
        """The rank whose error came first; of ranks with that same error the lowest, so that repeats agree."""
        first = self.done[self.errors[0]]["error"]
        return min(r for r in self.errors if self.done[r]["error"]["value"] == first["value"])

    @property
    def failed(self):
        return bool(self.errors or self.dead or self.stuck or self.where or self.interrupted)


def _get(answer):
    try:
        return answer.get(timeout=5)
    except Exception as error:  # ipyparallel's own, such as a result that cannot be pickled
        name, value = type(error).__name__, str(error)
        return {"items": [], "error": {"name": name, "value": value, "traceback": [f"{name}: {value}"]}}
