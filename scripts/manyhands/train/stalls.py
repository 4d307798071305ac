"""Names the rank that stopped. In a distributed program one rank that hangs leaves all others waiting for it, silently.

    with StallWatch(ranks, stall_s=120) as watch:
        for step in range(steps):
            watch.at(step, "data")              # each rank, at each step and before each long part of it
            ...
            watch.moved()                       # the part goes on: after each piece of it, on all ranks
            watch.at(step, "checkpoint", allow_s=1800)    # this part may take longer than stall_s

You see, from rank 0 or, if rank 0 is the one that stopped, from the next one:

    rank 1 of 4 (node2, process 71) has not moved for 121 s: it stands at step 5, data, in loader.py line 33, read.
    Ranks 0, 2-3 wait at step 5, training. If it is only slow, raise --train.stall-s.

then the stack of every rank, and the run ends with status 1. A thread of each rank reports where its main thread is, every
few seconds, over the process group's store, on a connection of its own (`stall_messages`); the collectives do not know of it.
A second thread keeps the time, because a store that is gone answers nothing, not even an error. The rules by which a rank
is named are in `stall_rules`.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress

import psutil

from manyhands.train.stall_messages import Talk
from manyhands.train.stall_rules import Heard, place_of

SHOW = signal.SIGURG  # makes a rank print its stack and go on; a program that knows nothing of it ignores it
FORWARD_S = 2  # for its launcher to hand that on: once a rank has ended, it throws the rest away
ABORT_S = 20  # for the end of a process on a busy node


class StallWatch:
    """Ends the run with status 1 if a rank makes no progress for `stall_s` seconds (0: never). All ranks enter it.

    Progress is a call of `at` or `moved`. A rank whose process is stopped, or whose node is gone, is noticed by its silence.
    """

    def __init__(self, ranks, stall_s):
        self.ranks, self.stall_s = ranks, stall_s
        self.beat_s = min(5.0, max(0.1, stall_s / 8))
        self._at = (
            0,
            None,
            "start",
            time.monotonic(),
            stall_s,
        )  # always replaced whole: the threads read it any time
        self._answered = time.monotonic()
        self._over, self._ending, self._threads = threading.Event(), threading.Lock(), []

    def __enter__(self):
        if self.stall_s > 0:
            self._main = threading.get_ident()
            faulthandler.register(SHOW, file=sys.__stderr__)  # a stopped process can be made to say where it was
            self._talk = Talk(self.ranks, self.stall_s, self.beat_s)
            self.at(None, "start")
            self._talk.tell(self._here())
            for action in (self._converse, self._guard):
                self._threads.append(threading.Thread(target=action, name="stall watch", daemon=True))
                self._threads[-1].start()
        return self

    def __exit__(self, *error):
        self._over.set()
        for thread in self._threads:
            thread.join(2)  # one that waits for a store that is gone ends with the process

    def at(self, step, phase, allow_s=None):
        """This rank has got as far as `phase` of `step`, and the phase may take `allow_s` seconds (None: stall_s)."""
        self._at = (self._at[0] + 1, step, phase, time.monotonic(), allow_s or self.stall_s)

    def moved(self):
        """The phase goes on, and from now on may take as long again."""
        ats, step, phase, _, patience_s = self._at
        self._at = (ats + 1, step, phase, time.monotonic(), patience_s)

    # --- the threads

    def _converse(self):
        """Tell the others where this rank is, and ask whether somebody has found a stall, or find it."""
        with suppress(RuntimeError):  # the store has ended: `_guard` notices, if the run has not
            while self._sleep():
                self._talk.tell(self._here())
                verdict = self._talk.verdict()
                self._answered = time.monotonic()
                if verdict:
                    if "sentence" in verdict:
                        _print(verdict["sentence"])
                    self._end(verdict["silent"], self._talk)
            self._talk.tell(self._here(left=True))

    def _guard(self):
        """A run that makes progress does not need the store; one that does not, and gets no answer, has lost rank 0."""
        while self._sleep():
            now, (_, _, _, since, patience_s) = time.monotonic(), self._at
            # a long phase is no excuse where the store is silent too: rank 0 serves it while it writes, unless it is stopped
            if now - since > min(patience_s, self.stall_s) + self.beat_s and now - self._answered > self.stall_s:
                _print(
                    f"rank {self.ranks.rank} of {self.ranks.world_size} waits for {now - since:.0f} s at"
                    f" {self._here().place}, and rank 0, or the launcher that connects the ranks, does not answer:"
                    " it was stopped, or its node is gone"
                )
                self._end([self._talk.first_rank] if self._talk.first_rank else [])

    def _sleep(self):
        """Until the next beat; False once the watch is over. Time in which the whole job was suspended does not count."""
        before = time.monotonic()
        over = self._over.wait(self.beat_s)
        now = time.monotonic()
        if now - before > 3 * self.beat_s + 1:
            self._at = (*self._at[:3], now, self._at[4])
            self._answered = now
            self._talk.forget()
        return not over

    def _here(self, left=False):
        """What this rank says about itself."""
        ats, step, phase, since, patience_s = self._at
        idle_s, own = time.monotonic() - since, psutil.Process()
        where, busy = place_of(sys._current_frames().get(self._main)) if idle_s > patience_s else ("", False)
        return Heard(
            rank=self.ranks.rank, host=self.ranks.host, pid=own.pid, born=own.create_time(), ats=ats, step=step,
            phase=phase, idle_s=idle_s, patience_s=patience_s, where=where, busy=busy, left=left,
        )  # fmt: skip

    def _end(self, silent, talk=None):
        """Show this rank's stack, end processes that were stopped, and leave with status 1."""
        if self._over.is_set() or not self._ending.acquire(blocking=False):
            return
        frame = sys._current_frames().get(self._main)
        lines = "".join(traceback.format_stack(frame)) if frame else "  its main thread has ended"
        _print(f"rank {self.ranks.rank} stands here:\n{lines}".rstrip())
        if talk:
            # a launcher ends all ranks with the first one, and rank 0 may serve the store: first everybody prints
            _bounded(lambda: talk.wait_for_the_others(len(silent)), 2 * self.beat_s + 1)
        here = [one for one in silent if one.host == self.ranks.host]
        for action, then_s in ((_show, FORWARD_S), (_abort, 0)):
            for one in here:
                _with_process(one, action)
            time.sleep(then_s if here else 0)
        _bounded(sys.stdout.flush)
        os._exit(1)


def _with_process(one, action):
    """Do it to the process of a rank of this node, if it still lives."""
    with suppress(psutil.Error, OSError):
        process = psutil.Process(one.pid)
        if process.create_time() == one.born:  # else the number is another's by now
            action(process)


def _show(process):
    """Continue a process that was stopped; the first thing that it does is to print its stack."""
    process.send_signal(SHOW)
    process.resume()


def _abort(process):
    if hasattr(process, "rlimit"):
        process.rlimit(psutil.RLIMIT_CORE, (0, 0))  # no core file
    process.send_signal(signal.SIGABRT)
    _, alive = psutil.wait_procs([process], timeout=ABORT_S)
    for one in alive:
        one.kill()


def _print(text):
    _bounded(lambda: os.write(2, f"{text}\n".encode()))  # one write; the main thread may hold sys.stderr


def _bounded(action, most_s=1.0):
    """Do it within `most_s` or leave it: a screen that nobody reads must not keep this process alive."""

    def quietly():
        with suppress(OSError, ValueError, RuntimeError):
            action()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(most_s)
