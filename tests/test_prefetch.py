"""Prefetch gives the same batches in the same order, hands on errors, and leaves no thread behind."""

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manyhands.data.token_files import Prefetch


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@settings(max_examples=40)
@given(st.lists(st.integers(), max_size=20), st.integers(1, 25), st.integers(0, 25))
def test_same_batches_same_order_and_no_thread_left_wherever_the_loop_ends(batches, depth, taken):
    with Prefetch(batches, depth) as ahead:
        got = [batch for _, batch in zip(range(taken), ahead, strict=False)]
    assert got == batches[:taken]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


class Source:
    """Counts what was read of it, and gives batch k only when `allowed` says so."""

    def __init__(self, n):
        self.n, self.read, self.allowed = n, 0, threading.Semaphore(0)

    def __iter__(self):
        for k in range(self.n):
            assert self.allowed.acquire(timeout=60)
            self.read += 1
            yield k


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_it_reads_depth_batches_ahead_and_not_one_more():
    source = Source(10)
    source.allowed.release(10)
    with Prefetch(source, depth=3) as ahead:
        until(lambda: source.read == 3)
        time.sleep(0.05)
        assert source.read == 3
        assert next(ahead) == 0
        until(lambda: source.read == 4)
        time.sleep(0.05)
        assert source.read == 4


def test_an_error_of_the_reader_comes_after_the_batches_before_it_and_once():
    def broken():
        yield 1
        yield 2
        raise OSError("disk on fire")

    with Prefetch(broken(), depth=5) as ahead:
        assert [next(ahead), next(ahead)] == [1, 2]
        with pytest.raises(OSError, match="disk on fire"):
            next(ahead)
        assert list(ahead) == []


def test_a_depth_of_none_is_refused_with_the_cure():
    with pytest.raises(ValueError, match="depth=0 keeps no batch ready; use 1 or more"):
        Prefetch([], depth=0)
