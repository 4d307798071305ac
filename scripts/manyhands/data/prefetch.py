"""Read the next batches while the current one is computed.

    with Prefetch(batches, depth=2) as ahead:       # batches: anything to iterate over
        for batch in ahead:
            ...
    print(ahead.waited_s, ahead.read_s)             # without prefetch, the loop would have waited read_s

A thread helps where reading waits for a disk or a network, or computes without Python's lock, as numpy and torch mostly
do. Where preparing a batch is Python's own work, use a DataLoader with worker processes.
"""

import threading
import time
from collections import deque


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
        self._batches, self._thread = batches, None
        self._ready, self._error = deque(), None
        self._ended = self._closed = False
        self._changed = threading.Condition()

    def __enter__(self):
        if self._thread is not None or self._closed:
            raise RuntimeError("this Prefetch has been used; make a new one for the next epoch")
        self._thread = threading.Thread(target=self._read_ahead, name="prefetch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """End the thread and drop what it had ready. Called twice, nothing happens."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._batches = self._error = None  # an error holds the frames, and so the batches, of where it came from

    def __iter__(self):
        return self

    def __next__(self):
        if self._thread is None:
            raise RuntimeError("no thread reads yet; write `with Prefetch(batches) as ahead: for batch in ahead`")
        begin = time.perf_counter()
        with self._changed:
            while not (self._ready or self._ended or self._closed):
                self._changed.wait()
            self.waited_s += time.perf_counter() - begin
            if self._ready:
                batch = self._ready.popleft()
                self._changed.notify_all()
                return batch
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def _read_ahead(self):
        error = None
        try:
            iterator = iter(self._batches)
            while self._room():
                begin = time.perf_counter()
                try:
                    batch = next(iterator)
                except StopIteration:
                    break
                finally:
                    self.read_s += time.perf_counter() - begin
                with self._changed:
                    if not self._closed:
                        self._ready.append(batch)
                    self._changed.notify_all()
                del batch  # else a batch that was handed over lives on here
        except BaseException as raised:  # noqa: BLE001 - whatever it is, it belongs to the loop that asked
            error = raised
        with self._changed:
            self._error, self._ended = error, True
            self._changed.notify_all()

    def _room(self):
        """Wait until fewer than `depth` batches are ready. False once closed."""
        with self._changed:
            while len(self._ready) >= self.depth and not self._closed:
                self._changed.wait()
            return not self._closed
