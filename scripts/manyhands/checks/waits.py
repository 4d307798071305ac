"""When a process waited for its messages."""

from unittest import mock

import torch.distributed as dist


class Waits:
    """Notes when this process waits for a message while the block runs, itself or in a call that does so.

    calls: the calls that were watched so far, a list that grows (`wire.watch`). `after`: how many of them had been made
    at each wait, in order; empty if there was none.
    """

    def __init__(self, calls):
        self.after, wait = [], dist.Work.wait

        def noted(work, *args, **kwargs):
            self.after.append(len(calls))
            return wait(work, *args, **kwargs)

        self._patch = mock.patch.object(dist.Work, "wait", noted)

    def __enter__(self):
        self._patch.start()
        return self

    def __exit__(self, *error):
        self._patch.stop()
