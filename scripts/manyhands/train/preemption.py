"""A scheduler says "leave": all ranks save after the same step, and say beside the checkpoint that they were not done.

    act_on_options("train.py", read, act)           # signals wait from here on: importing torch takes seconds
    with PreemptionHandler(ranks) as preemption:    # and are heard from here on, as soon as the ranks have met
        while step < steps:
            ...
            if stop := preemption.agreed():         # all ranks, after each step: None, or "SIGTERM", "SIGUSR1" ...
                break
        save()
    if stop and stop != BY_HAND:
        write_requeue(folder, stop, step, ranks)  # a job file that finds requeue.json puts its job back into the queue

Ctrl-C saves too, but whoever pressed it wants the run to stay stopped, so there is no file then.

torchrun turns every exit status of its ranks into 1, so the file says what a status cannot. Signals reach the ranks
through torchrun (`--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1`), srun or mpiexec, not always all ranks,
and never at the same moment: so the ranks agree. That takes an all-reduce of two numbers about twice a second, not one
per step. Imports no torch before the options are read: a wrong flag is said at once.
"""

import json
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from pathlib import Path

from manyhands.course.folders import write_whole
from manyhands.launch.launchers import LaunchError, resolve
from manyhands.launch.processes import end_with_parent
from manyhands.launch.program import Refused, end, end_by, importing, is_first_rank

# one number each, from 1: the larger one wins. SIGHUP: the terminal of the run is gone
SIGNALS = (signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
BY_HAND = "SIGINT"  # Ctrl-C
INTERVAL_S = 0.5  # between two agreements, about
ECHO_S = 5.0  # one request arrives more than once: from the scheduler itself, and passed on by the launcher
GROWTH = 4  # the next interval has at most so many times the turns of the last one
REQUEUE = "requeue.json"

# for ranks to meet after a signal: a scheduler kills 30 s after SIGTERM, and people wait for Ctrl-C
GRACE_S = {signal.SIGTERM: 20.0, signal.SIGHUP: 20.0, signal.SIGINT: 3.0}

_held = []  # signals that came before there was anything to stop
_before = {}  # their handlers until then
_met = threading.Event()  # there is a PreemptionHandler


def defer_signals():
    """From now on SIGNALS wait for a `PreemptionHandler`, and a launcher that dies is a SIGTERM.

    If ranks left one by one, the others would take them for lost. Where they do not meet within GRACE_S, they end.
    Call it first: importing torch takes seconds. Whoever is started by hand may outlive the shell (nohup).
    """
    for one in SIGNALS:
        if signal.getsignal(one) != signal.SIG_IGN:
            _before[one] = signal.signal(one, _hold)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_end_late, args=(reader,), daemon=True).start()
    with suppress(LaunchError):  # `join` will say so
        if resolve().launcher not in ("alone", "by hand"):
            end_with_parent()


def _hold(number, frame):
    if number == signal.SIGINT and importing(frame):
        end_by(number)
    _held.append(number)


def _end_late(reader):
    """A thread hears signals also while the main one waits in a library for a rank that does not come."""
    while (number := os.read(reader, 1)[0]) not in GRACE_S:
        pass
    if not _met.wait(GRACE_S[number]):
        end_by(number)


def act_on_options(prog, read, act):
    """What train.py and align.py do: the status of `act(options)` for the options of the command line.

    `read(words)` may raise Refused: that ends the program with status 2, and one rank says why.
    """
    defer_signals()  # a scheduler's SIGUSR1 may come while torch is still being imported
    try:
        with open(os.devnull, "w") as nowhere, ExitStack() as quiet:
            if not is_first_rank():  # all ranks read the same flags: one says what is wrong with them
                quiet.enter_context(redirect_stdout(nowhere))
                quiet.enter_context(redirect_stderr(nowhere))
            options = read(sys.argv[1:])
    except Refused as error:
        status, why = 2, f"{prog}: {error}"
    except SystemExit as ended:  # tyro has printed its help, or what it did not understand
        status, why = ended.code or 0, ""
    else:
        return act(options)
    end(why, status)


class PreemptionHandler:
    """Waits for SIGTERM, SIGHUP, SIGINT and SIGUSR1 from `with` on. Only the main thread hears signals; elsewhere it
    only agrees.

    The first signal is kept for `agreed`; one that comes more than ECHO_S later does what it did before: SIGTERM ends
    the process at once. After a signal the handlers stay when the block ends: the process is leaving, and an echo must
    not end it before it has said so. What is ignored stays ignored: SIGINT in a shell's background, SIGHUP under nohup.
    """

    def __init__(self, ranks):
        self.ranks = ranks
        self._heard, self._heard_at = 0, None  # the signal's number, from 1; when the first one came
        self._turn = self._next = 0  # how often ranks could have agreed, and when they do so again
        self._answer, self._width, self._since = None, 1, time.monotonic()
        self._before = {}

    def __enter__(self):
        _met.set()
        if threading.current_thread() is threading.main_thread():
            for one in SIGNALS:
                if signal.getsignal(one) != signal.SIG_IGN:
                    before = signal.signal(one, self._hear)
                    self._before[one] = _before.pop(one, before)
            while _held:
                self._hear(_held.pop(), None)
        return self

    def __exit__(self, *error):
        if self._heard_at is None:
            self._restore()

    def agreed(self):
        """The signal by which all ranks stop, or None. All ranks call it as often: after steps, between batches."""
        import torch  # late, so that `defer_signals` costs nothing
        import torch.distributed as dist

        self._turn += 1
        if self._answer is None and self._turn >= self._next:
            mine = [self._heard, self._turn_of_next() if self.ranks.rank == 0 else 0]
            agreed = torch.tensor(mine)  # on the CPU: a GPU is not waited for
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
            number, self._next = agreed.tolist()
            self._answer = SIGNALS[number - 1].name if number else None
        return self._answer

    def _turn_of_next(self):
        """Rank 0 says for all when they ask each other again: clocks of several ranks would not agree."""
        now = time.monotonic()
        one_turn_s = max(now - self._since, 1e-6) / self._width  # of those since the last time
        self._since = now
        self._width = max(1, min(int(INTERVAL_S / one_turn_s), GROWTH * self._width))
        return self._turn + self._width

    def _hear(self, number, frame):
        now = time.monotonic()
        if self._heard_at is None:
            self._heard_at = now
        elif now - self._heard_at > ECHO_S:
            self._restore()
            os.kill(os.getpid(), number)
        self._heard = max(self._heard, SIGNALS.index(number) + 1)

    def _restore(self):
        for one, handler in self._before.items():
            signal.signal(one, handler or signal.SIG_DFL)


def write_requeue(folder, stop, step, ranks):
    """Say in <folder>/requeue.json that `stop` ("SIGUSR1") ended the run after `step` steps. Rank 0 writes it."""
    if ranks.rank == 0:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        said = {"signal": stop, "step": step, "time": time.time()}
        write_whole(folder / REQUEUE, json.dumps(said) + "\n")


def clear_requeue(folder, ranks):
    """A run that starts is asked for nothing yet. Rank 0 removes the file of the run before."""
    if ranks.rank == 0:
        (Path(folder) / REQUEUE).unlink(missing_ok=True)
