"""Handle a scheduler's signal to stop: all ranks save after the same step, and mark the checkpoint as unfinished.

    act_on_options("train.py", read, act)           # signals are deferred from here on: importing torch takes seconds
    with PreemptionHandler(ranks) as preemption:    # and are handled from here on, when the ranks have joined
        while step < steps:
            ...
            if stop := preemption.agreed():         # all ranks, after each step: None, or "SIGTERM", "SIGUSR1" ...
                break
        save()
    if stop and stop != BY_HAND:
        write_requeue(folder, stop, step, ranks)  # a job file that finds requeue.json puts its job back into the queue

Ctrl-C also saves but writes no file, because the user wants the run to stay stopped.

torchrun turns every exit status of its ranks into 1, so a file is needed. Signals reach the ranks
through torchrun (`--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1`), srun or mpiexec, not always all ranks,
and never at the same moment, so the ranks must agree. That takes an all-reduce of two numbers about twice a second, not
one per step. torch is not imported before the options are read, so a wrong flag is reported immediately.
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

# numbered from 1; the larger number wins. SIGHUP: the run's terminal was closed
SIGNALS = (signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
BY_HAND = "SIGINT"  # Ctrl-C
INTERVAL_S = 0.5  # approximate seconds between two agreements
ECHO_S = 5.0  # one request arrives more than once: from the scheduler and forwarded by the launcher
GROWTH = 4  # limit on the growth of the interval in steps
REQUEUE = "requeue.json"

# for ranks to join after a signal: torchrun sends SIGTERM, too, when a rank was killed that the others wait for
GRACE_S = {signal.SIGTERM: 8.0, signal.SIGHUP: 8.0, signal.SIGINT: 3.0}

_held = []  # signals that arrived before the PreemptionHandler existed
_before = {}  # the handlers before deferral
_met = threading.Event()  # whether a PreemptionHandler exists


def defer_signals():
    """Defer SIGNALS until a `PreemptionHandler` exists, and treat the launcher's death as SIGTERM.

    If ranks left one by one, the others would report them as lost. If they do not join within GRACE_S, they end.
    Call it first: importing torch takes seconds. A process started by hand may outlive its shell (nohup).
    """
    for one in SIGNALS:
        if signal.getsignal(one) != signal.SIG_IGN:
            _before[one] = signal.signal(one, _hold)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_end_late, args=(reader,), daemon=True).start()
    with suppress(LaunchError):  # `join` will report it
        if resolve().launcher not in ("alone", "by hand"):
            end_with_parent()


def _hold(number, frame):
    if number == signal.SIGINT and importing(frame):
        end_by(number)
    _held.append(number)


def _end_late(reader):
    """Wait for signals in a thread, which works even while the main thread waits in a library for a missing rank."""
    while (number := os.read(reader, 1)[0]) not in GRACE_S:
        pass
    if not _met.wait(GRACE_S[number]):
        end_by(number)


def act_on_options(prog, read, act):
    """Run `act(options)` for the command line's options in train.py and align.py, and return its status.

    If `read(words)` raises Refused, the program ends with status 2, and one rank prints the reason.
    """
    defer_signals()  # a scheduler's SIGUSR1 may arrive while torch is being imported
    try:
        with open(os.devnull, "w") as nowhere, ExitStack() as quiet:
            if not is_first_rank():  # all ranks read the same flags: only one reports an error
                quiet.enter_context(redirect_stdout(nowhere))
                quiet.enter_context(redirect_stderr(nowhere))
            options = read(sys.argv[1:])
    except Refused as error:
        status, why = 2, f"{prog}: {error}"
    except SystemExit as ended:  # tyro has printed its help or its error
        status, why = ended.code or 0, ""
    else:
        return act(options)
    end(why, status)


class PreemptionHandler:
    """Record SIGTERM, SIGHUP, SIGINT and SIGUSR1 inside the block, in the main thread; in other threads only agree.

    The first signal is kept for `agreed`. One that arrives more than ECHO_S later has its original effect: SIGTERM ends
    the process immediately. After a signal the handlers remain when the block ends, so that an echo does not end the
    process before it has reported. Ignored signals stay ignored: SIGINT in a shell's background, SIGHUP under nohup.
    """

    def __init__(self, ranks):
        self.ranks = ranks
        self._heard, self._heard_at = 0, None  # the signal's number, from 1, and the time of the first one
        self._turn = self._next = 0  # number of calls of `agreed`, and the call at which ranks agree next
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
        """Return the signal by which all ranks stop, or None. All ranks call it equally often (after each step)."""
        import torch  # imported late, so that `defer_signals` runs before
        import torch.distributed as dist

        self._turn += 1
        if self._answer is None and self._turn >= self._next:
            mine = [self._heard, self._turn_of_next() if self.ranks.rank == 0 else 0]
            agreed = torch.tensor(mine)  # on the CPU, so as not to wait for a GPU
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
            number, self._next = agreed.tolist()
            self._answer = SIGNALS[number - 1].name if number else None
        return self._answer

    def _turn_of_next(self):
        """Let rank 0 set the next agreement for all ranks, because their clocks differ."""
        now = time.monotonic()
        one_turn_s = max(now - self._since, 1e-6) / self._width  # since the last agreement
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
    """Record in <folder>/requeue.json that `stop` ("SIGUSR1") ended the run after `step` steps. Rank 0 writes it."""
    if ranks.rank == 0:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        said = {"signal": stop, "step": step, "time": time.time()}
        write_whole(folder / REQUEUE, json.dumps(said) + "\n")


def clear_requeue(folder, ranks):
    """Remove an earlier run's requeue file, on rank 0, when a run starts."""
    if ranks.rank == 0:
        (Path(folder) / REQUEUE).unlink(missing_ok=True)
