"""Python's collection of garbage, at the same steps on all ranks.

    with garbage_held() as collect:
        for step in range(1000):
            train_step()
            collect(step)

A collection that one rank begins by itself makes all others wait for it in the next collective. With many ranks nearly
every step waits for one.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY = 100  # steps


@contextmanager
def garbage_held(wanted: bool = True) -> Iterator[Callable[[int], None]]:
    """Collect nothing in the block but what `collect(step)` does, each EVERY steps. Not `wanted`: Python decides."""
    if not wanted or not gc.isenabled():
        yield lambda step: None
        return

    def collect(step):
        if step % EVERY == 0:
            gc.collect()

    gc.collect()
    gc.freeze()  # what is there stays: it need not be looked at again
    gc.disable()
    try:
        yield collect
    finally:
        gc.enable()
        gc.unfreeze()
