"""torchrun without the pages that it prints when a rank fails: `scripts/launch.py` runs this for
`torch.distributed.run`.

The flags are torchrun's. What ranks say is left alone. A failure ends with one sentence, which names the rank, and with
the status of the rank that caused it; a signal that was passed on ends without a traceback, and with 0 where the
program left in good order.
"""

import logging
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # it runs without an install

from manyhands.launch.program import INTERRUPTED, MEMORY, read_status, run_program

# who writes about failures and signals, beside the traceback
TALKERS = ("agent.server.api", "multiprocessing.api")


def blame(failures: list[tuple[int, int, int]]) -> tuple[int, str]:
    """(exit status, one sentence) on [(rank, exit status, negative for a signal, second in which it was seen)].

    torchrun ends the others with SIGTERM, and later with SIGKILL, and lists them too.
    """
    first = min(second for _, _, second in failures)
    causes = [(rank, status) for rank, status, second in failures if second == first]
    causes = [cause for cause in causes if cause[1] != -signal.SIGTERM] or causes
    # a killed rank is the cause, and that the others lost their connection the effect
    rank, status = min(causes, key=lambda cause: (cause[1] != -signal.SIGKILL, cause[1] >= 0))
    if status == -signal.SIGKILL:
        return 128 + signal.SIGKILL, f"rank {rank} was killed (signal 9): {MEMORY}"
    if status < 0:
        return 128 - status, f"rank {rank} died of signal {-status} ({signal.Signals(-status).name})"
    return status, f"rank {rank} ended with status {status}; the reason stands above"


def after_signal(number: int, own: int | None) -> tuple[int, str]:
    """(exit status, sentence or "") once torchrun died of a signal that it passed on to a program that said `own`."""
    if own == 0:
        return 0, f"left in good order on {signal.Signals(number).name}"
    if own is None and number == signal.SIGINT:
        return INTERRUPTED, "ended by Ctrl-C"
    return own or 128 + number, ""


def main() -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    for name in TALKERS:
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    try:
        torchrun()
        return 0
    except (SignalException, KeyboardInterrupt) as stop:
        status, sentence = after_signal(getattr(stop, "sigval", signal.SIGINT), read_status())
    except ChildFailedError as error:
        status, sentence = read_status() or 0, ""  # it has said itself why, unless it failed after its work was done
        if not status:
            status, sentence = blame([(rank, one.exitcode, one.timestamp) for rank, one in error.failures.items()])
    if sentence:
        print(f"launch.py: {sentence}", file=sys.stderr)
    return status


if __name__ == "__main__":
    run_program("launch.py", main)
