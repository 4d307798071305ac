"""Name the rank that stopped. In a distributed program, one rank that hangs silently blocks all others.

    with StallWatch(ranks, stall_s=120) as watch:
        for step in range(steps):
            watch.at(step, "data")              # on each rank, at each step and before each long phase
            ...
            watch.moved()                       # progress within the phase, on all ranks
            watch.at(step, "checkpoint", allow_s=1800)    # this phase may take longer than stall_s

You see, from rank 0 or, if rank 0 is the one that stopped, from the next one:

    rank 1 of 4 (node2, process 71) has not moved for 121 s: it stands at step 5, data, in loader.py line 33, read.
    Ranks 0, 2-3 wait at step 5, training. If it is only slow, raise --train.stall-s.

then the stack of every rank, and the run ends with status 1. A thread of each rank sends a heartbeat with its main
thread's position every few seconds, over a separate connection to the process group's store, independent of
collectives. A second thread watches the time, because a lost store returns nothing, not even an error.
"""

import faulthandler
import json
import linecache
import os
import re
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from manyhands.launch.ranks import name_ranks

SHOW = signal.SIGURG  # makes a rank print its stack and continue; other programs ignore it
FORWARD_S = 2  # for the launcher to forward the output: after a rank's end it discards the rest
TORCH = str(Path(torch.__file__).parent) + os.sep
# in these files of torch a rank waits for the others, or for a GPU that does
WAITING_FILES = ("distributed" + os.sep, os.path.join("nn", "parallel", "distributed.py"), "autograd" + os.sep)
WAITING_LINES = re.compile(
    r"\.(wait|item|tolist|synchronize|cpu)\(|all_reduce|all_gather|reduce_scatter|broadcast|barrier|all_to_all"
    r"|\b(i?send|i?recv|gather|scatter)\b"
)

CURE = "If it is only slow, raise --train.stall-s."

_watches = count()  # a store outlives a watch: each watch has its own prefix


@dataclass
class Heartbeat:
    """A rank's last report, and its age. A rank that never reported has only its number."""

    rank: int
    host: str = "?"
    pid: int | None = None
    born: float = 0.0  # start of its process, because process ids are reused
    beats: int = 0  # number of reports
    ats: int = 0  # calls of `StallWatch.at`, the measure of progress
    step: int | None = None
    phase: str = "start"
    idle_s: float = 0.0  # seconds since its last call of `at`, at the time of the report
    patience_s: float = 0.0  # limit of the phase in seconds
    where: str = ""  # file, line and function, once it is idle for longer
    busy: bool = False  # it does not seem to wait for another rank
    left: bool = False  # it left the watch normally
    silent_s: float = 0.0  # seconds since its last new report

    @property
    def place(self):
        return self.phase if self.step is None else f"step {self.step}, {self.phase}"


class StallWatch:
    """End the run with status 1 if a rank makes no progress for `stall_s` seconds (0: never). All ranks enter it.

    Progress is a call of `at` or `moved`. A rank whose process is stopped or whose node is lost is detected by missing
    heartbeats.
    """

    def __init__(self, ranks, stall_s):
        self.ranks, self.stall_s = ranks, stall_s
        self.beat_s = min(5.0, max(0.1, stall_s / 8))
        # replaced atomically: the threads read it at any time
        self._at = (0, None, "start", time.monotonic(), stall_s)
        self._answered = time.monotonic()
        self._over, self._ending, self._threads = threading.Event(), threading.Lock(), []

    def __enter__(self):
        if self.stall_s > 0:
            self._main = threading.get_ident()
            faulthandler.register(SHOW, file=sys.__stderr__)  # a stopped process can still print its stack
            self._heartbeats = HeartbeatStore(self.ranks, self.stall_s, self.beat_s)
            self.at(None, "start")
            self._heartbeats.tell(self._here())
            for action in (self._converse, self._guard):
                self._threads.append(threading.Thread(target=action, name="stall watch", daemon=True))
                self._threads[-1].start()
        return self

    def __exit__(self, *error):
        self._over.set()
        for thread in self._threads:
            thread.join(2)  # a daemon: one that waits for a lost store ends with the process

    def at(self, step, phase, allow_s=None):
        """Record that this rank begins `phase` of `step`, which may take `allow_s` seconds (None: stall_s)."""
        self._at = (self._at[0] + 1, step, phase, time.monotonic(), allow_s or self.stall_s)

    def moved(self):
        """Record progress within the phase and restart its time limit."""
        ats, step, phase, _, patience_s = self._at
        self._at = (ats + 1, step, phase, time.monotonic(), patience_s)

    def _converse(self):
        """Send this rank's heartbeat, and look for a stall or another rank's verdict."""
        with suppress(RuntimeError):  # the store has ended: `_guard` detects it if the run continues
            while self._sleep():
                self._heartbeats.tell(self._here())
                sentence, silent = self._heartbeats.verdict()
                self._answered = time.monotonic()
                if sentence is not None:
                    if sentence:
                        _print(sentence)
                    self._end(silent, self._heartbeats)
            self._heartbeats.tell(self._here(left=True))

    def _guard(self):
        """End the run if it makes no progress and the store does not answer, which means that rank 0 is lost."""
        while self._sleep():
            now, (_, _, _, since, patience_s) = time.monotonic(), self._at
            # even in a long phase the store must answer: rank 0 serves it meanwhile
            if now - since > min(patience_s, self.stall_s) + self.beat_s and now - self._answered > self.stall_s:
                _print(
                    f"rank {self.ranks.rank} of {self.ranks.world_size} waits for {now - since:.0f} s at"
                    f" {self._here().place}, and rank 0, or the launcher that connects the ranks, does not answer:"
                    " it was stopped, or its node is gone"
                )
                self._end([self._heartbeats.first_rank] if self._heartbeats.first_rank else [])

    def _sleep(self):
        """Sleep until the next heartbeat; return False once the watch is over. Suspended time does not count."""
        before = time.monotonic()
        over = self._over.wait(self.beat_s)
        now = time.monotonic()
        if now - before > 3 * self.beat_s + 1:
            self._at = (*self._at[:3], now, self._at[4])
            self._answered = now
            self._heartbeats.forget()
        return not over

    def _here(self, left=False):
        """Return this rank's Heartbeat."""
        ats, step, phase, since, patience_s = self._at
        idle_s, own = time.monotonic() - since, psutil.Process()
        where, busy = place_of(sys._current_frames().get(self._main)) if idle_s > patience_s else ("", False)
        return Heartbeat(
            rank=self.ranks.rank, host=self.ranks.host, pid=own.pid, born=own.create_time(), ats=ats, step=step,
            phase=phase, idle_s=idle_s, patience_s=patience_s, where=where, busy=busy, left=left,
        )  # fmt: skip

    def _end(self, silent, store=None):
        """Show this rank's stack, end stopped processes, and exit with status 1."""
        if self._over.is_set() or not self._ending.acquire(blocking=False):
            return
        frame = sys._current_frames().get(self._main)
        lines = "".join(traceback.format_stack(frame)) if frame else "  its main thread has ended"
        _print(f"rank {self.ranks.rank} stands here:\n{lines}".rstrip())
        if store:
            # a launcher ends all ranks with the first one, and rank 0 may serve the store: let all ranks print first
            _bounded(lambda: store.wait_for_the_others(len(silent)), 2 * self.beat_s + 1)
        here = [one for one in silent if one.host == self.ranks.host]
        for action, then_s in ((_show, FORWARD_S), (psutil.Process.kill, 0)):
            for one in here:
                with suppress(psutil.Error, OSError):
                    process = psutil.Process(one.pid)
                    if process.create_time() == one.born:  # otherwise the process id has been reused
                        action(process)
            time.sleep(then_s if here else 0)
        _bounded(sys.stdout.flush)
        os._exit(1)


class HeartbeatStore:
    """One rank's access to the heartbeats, for one thread at a time; calls may block forever if the store is lost."""

    def __init__(self, ranks, stall_s, beat_s):
        self.ranks, self.stall_s, self.beat_s = ranks, stall_s, beat_s
        # a separate connection: the main thread's calls block the other
        shared = dist.distributed_c10d._get_default_store().clone()
        self._store = dist.PrefixStore(f"stalls{next(_watches)}", shared)
        self._beats = 0
        self.first_rank = None  # rank 0's last report
        self.forget()

    def forget(self):
        """Start to listen: from now on, missing heartbeats count."""
        self._seen = {}  # {rank: (number of its last heartbeat, when it arrived)}
        self._since = time.monotonic()

    def tell(self, here):
        """Send this rank's Heartbeat to the others."""
        self._beats += 1
        here.beats = self._beats
        self._store.set(f"rank{here.rank}", json.dumps(vars(here)))

    def verdict(self):
        """Return (None, []), or after a stall (sentence, silent ranks), with "" except on the rank that prints it.

        Rank 0 judges. If it is silent or has left, the next ranks do, each a little later than the one before.
        """
        sentence, own = "", b""
        if not self._store.check(["verdict"]):
            if self.ranks.rank:
                (self.first_rank,) = self._listen([0])
                if self.first_rank.silent_s < self.stall_s + 2 * self.beat_s * self.ranks.rank:
                    return None, []
            sentence, silent = judged(self._listen(range(self.ranks.world_size)), self.stall_s)
            if sentence is None:
                return None, []
            own = json.dumps([self.ranks.rank, *map(vars, silent)]).encode()
            self._store.compare_set("verdict", "", own.decode())  # if two ranks judge at once, the first one counts
        heard = self._store.get("verdict")
        return sentence if heard == own else "", [Heartbeat(**one) for one in json.loads(heard)[1:]]

    def _listen(self, ranks):
        """Return [Heartbeat] of these ranks, with the seconds since each one's last new report."""
        heard, now = [], time.monotonic()
        for rank in ranks:
            said = Heartbeat(rank, patience_s=self.stall_s)
            if self._store.check([f"rank{rank}"]):
                said = Heartbeat(**json.loads(self._store.get(f"rank{rank}")))
            if self._seen.get(rank, (0, 0))[0] != said.beats:
                self._seen[rank] = (said.beats, now)
            said.silent_s = now - self._seen.get(rank, (0, self._since))[1]
            heard.append(said)
        return heard

    def wait_for_the_others(self, num_silent):
        """Return when all ranks except the silent ones have arrived here."""
        self._store.add("printed", 1)
        while self._store.add("printed", 0) < self.ranks.world_size - num_silent:
            time.sleep(0.05)
        time.sleep(0.2)  # others still query this store


def judged(heard, stall_s):
    """Return (sentence, silent ranks) if the run has stalled, else (None, []). `heard`: the Heartbeats of all ranks.

    A rank that is silent for `stall_s` is stopped or its node is lost, which is a stall only if the others do not
    progress. Otherwise the culprits are the ranks with the least progress that exceed their time limit; among several,
    those that do not wait for a message.
    """
    present = [one for one in heard if not one.left]
    silent = [one for one in present if one.silent_s > stall_s]
    others = [one for one in present if one.silent_s <= stall_s]
    if silent and all(one.idle_s > min(stall_s, one.patience_s) / 2 for one in others):
        return _sentence(silent, others, len(heard), "gave no sign of life", "silent_s"), silent
    if silent or not present:
        return None, []
    least = min(one.ats for one in present)
    last = [one for one in present if one.ats == least]
    if any(one.idle_s + one.silent_s <= one.patience_s for one in last):
        return None, []
    culprits = [one for one in last if one.busy] or last
    waiting = [one for one in present if one not in culprits]
    return f"{_sentence(culprits, waiting, len(heard), 'has not moved', 'idle_s')} {CURE}", []


def _sentence(culprits, waiting, world_size, what, clock):
    """Return a sentence per culprit, and one for the ranks that wait."""
    said = []
    for one in culprits[:8]:
        where = f", in {one.where}" if one.where else ""
        stands = "it was last" if clock == "silent_s" else "it stands"
        said.append(
            f"rank {one.rank} of {world_size} ({one.host}, process {one.pid}) {what} for {getattr(one, clock):.0f} s:"
            f" {stands} at {one.place}{where}."
        )
    if len(culprits) > 8:
        said.append(f"...and {len(culprits) - 8} more ranks.")
    places = {}
    for one in waiting:
        places.setdefault(one.place, []).append(one.rank)
    for place, ranks in places.items():
        said.append(f"{name_ranks(ranks).capitalize()} wait{'s' * (len(ranks) == 1)} at {place}.")
    return " ".join(said)


def place_of(frame):
    """Return ("loader.py line 33, read", whether it seems busy rather than waiting) for a thread's innermost frame."""
    if frame is None:
        return "", False
    innermost, waiting = frame, False
    while frame is not None and frame.f_code.co_filename.startswith(TORCH):  # torch's own lines do not help a reader
        inside = frame.f_code.co_filename[len(TORCH) :]
        waiting = waiting or inside.startswith(WAITING_FILES)
        frame = frame.f_back
    frame = frame or innermost
    file, line = frame.f_code.co_filename, frame.f_lineno
    if not waiting and frame is innermost:
        waiting = bool(WAITING_LINES.search(linecache.getline(file, line)))
    return f"{Path(file).name} line {line}, {frame.f_code.co_name}", not waiting


def _show(process):
    """Continue a stopped process, which first prints its stack."""
    process.send_signal(SHOW)
    process.resume()


def _print(text):
    _bounded(lambda: os.write(2, f"{text}\n".encode()))  # one write, because the main thread may hold sys.stderr


def _bounded(action, most_s=1.0):
    """Call a function but give up after `most_s`: a blocked screen must not keep this process alive."""

    def quietly():
        with suppress(OSError, ValueError, RuntimeError):
            action()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(most_s)
