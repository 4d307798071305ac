"""Read the next batches while the current one is computed.

    with Prefetch(batches, depth=2) as ahead:       # batches: anything to iterate over
        for batch in ahead:
            ...
    print(ahead.waited_s, ahead.read_s)             # without prefetch, the loop would have waited read_s

A thread helps where reading waits for a disk or a network, or computes without Python's lock, as numpy and torch mostly
do. Where preparing a batch is Python's own work, use a DataLoader with worker processes.
"""

import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

END = object()  # what reading gives behind the last batch


class Prefetch:
    """Iterate over `batches`, of which a thread holds up to `depth` ready. Same order, nothing lost.

    What the thread's reading raises is raised by `next()`, after the batches that came before it. Leaving the `with`
    block ends the thread, early or late; if it is just reading, that one read is waited for.
    `waited_s`: seconds that `next()` had to wait so far; `read_s`: seconds that the thread spent reading.
    """

    def __init__(self, batches, depth=2):
        """Raises ValueError for a depth below 1."""
        if depth < 1:
            raise ValueError(f"depth={depth} keeps no batch ready; use 1 or more")
        self.depth, self.waited_s, self.read_s = depth, 0.0, 0.0
        self._batches, self._iterator, self._thread = batches, None, None
        self._ready = deque()  # futures, in order

    def __enter__(self):
        if self._thread is not None:
            raise RuntimeError("this Prefetch has been used; make a new one for the next epoch")
        self._thread = ThreadPoolExecutor(1, "prefetch")
        self._ready.extend(self._thread.submit(self._read) for _ in range(self.depth))
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """End the thread and drop what it had ready. Called twice, nothing happens."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._ready.clear()
        self._batches = self._iterator = None

    def __iter__(self):
        return self

    def __next__(self):
        if self._thread is None:
            raise RuntimeError("no thread reads yet; write `with Prefetch(batches) as ahead: for batch in ahead`")
        if not self._ready:
            raise StopIteration
        begin = time.perf_counter()
        try:
            batch = self._ready[0].result()
        except BaseException:
            self._ready.clear()  # it is raised once
            raise
        finally:
            self.waited_s += time.perf_counter() - begin
        self._ready.popleft()
        if batch is END:
            self._ready.clear()
            raise StopIteration
        self._ready.append(self._thread.submit(self._read))
        return batch

    def _read(self):
        begin = time.perf_counter()
        try:
            if self._iterator is None:
                self._iterator = iter(self._batches)
            return next(self._iterator, END)
        finally:
            self.read_s += time.perf_counter() - begin
