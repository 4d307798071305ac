"""torchrun without the pages that it prints when a rank fails: `scripts/launch.py` runs this for `torch.distributed.run`.

The flags are torchrun's. What ranks say is left alone. A failure ends with one sentence, which names the rank, and a signal
that was passed on ends without a traceback; both with status 1, as under torchrun.
"""

import logging
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # it runs without an install

from manyhands.launch.exit_status import MEMORY, STATUS_FILE, read_status, say_status

# who writes about failures and signals, beside the traceback
TALKERS = ("agent.server.api", "multiprocessing.api")


def blame(failures):
    """One sentence on [(rank, exit status, negative where a signal ended it, second in which that was seen)].

    torchrun ends the others with SIGTERM, and later with SIGKILL, and lists them too.
    """
    first = min(second for _, _, second in failures)
    causes = [(rank, status) for rank, status, second in failures if second == first]
    causes = [cause for cause in causes if cause[1] != -signal.SIGTERM] or causes
    for rank, status in causes:
        if status == -signal.SIGKILL:
            return f"launch.py: rank {rank} was killed (signal 9): {MEMORY}"
    for rank, status in causes:
        if status < 0:  # that the others lost their connection is the effect
            return f"launch.py: rank {rank} died of signal {-status} ({signal.Signals(-status).name})"
    rank, status = causes[0]
    return f"launch.py: rank {rank} ended with status {status}; the reason stands above"


def main():
    try:
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import main as torchrun

        for name in TALKERS:
            logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    except KeyboardInterrupt:  # importing torch takes seconds
        return 1
    try:
        torchrun()
    except (SignalException, KeyboardInterrupt):
        return 1
    except ChildFailedError as error:
        own = read_status(os.environ.get(STATUS_FILE, ""))
        if own is None or own[0] == 0:  # the program has not said itself why
            seen = [(rank, one.exitcode, one.timestamp) for rank, one in error.failures.items()]
            say_status(1, blame(seen))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
