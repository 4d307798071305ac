"""Run Python's garbage collection at the same steps on all ranks.

    with garbage_held() as collect:
        for step in range(1000):
            train_step()
            collect(step)

A garbage collection on one rank makes all other ranks wait in the next collective. With many ranks, nearly every step
would wait for one.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY = 100  # steps


@contextmanager
def garbage_held(wanted: bool = True) -> Iterator[Callable[[int], None]]:
    """Collect garbage in the block only by `collect(step)`, every EVERY steps. Without `wanted`, leave it to Python."""
    if not wanted or not gc.isenabled():
        yield lambda step: None
        return

    def collect(step):
        if step % EVERY == 0:
            gc.collect()

    gc.collect()
    gc.freeze()  # existing objects stay, so do not scan them again
    gc.disable()
    try:
        yield collect
    finally:
        gc.enable()
        gc.unfreeze()
