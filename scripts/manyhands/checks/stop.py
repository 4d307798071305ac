"""Stop an answer that does not end, and end the threads and processes that it leaves behind."""

import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
from unittest import mock

import psutil

WALL = 6  # wall-clock limit as a multiple of the patience: a process that waits uses little processor time
_LOOK_EVERY_S = 0.5


class NeverEnds(BaseException):
    """Stop an answer; a BaseException, so that the answer's `except Exception` does not catch it."""


class LeftRunning(Exception):
    """An answer returned before a thread or a process that it started had ended."""


@contextmanager
def stopped_after(patience_s):
    """Stop the block after `patience_s` seconds of processor time; then end the threads and processes that it started.

    In the main thread, raise NeverEnds inside the block. In a Python loop this happens soon, in a library's call when
    it returns. An import is never interrupted, because half a module would remain, and its time does not count. If the
    block catches NeverEnds, it is raised again at the next line. os._exit raises SystemExit, except in forked children.
    Raise LeftRunning if a thread or a process had to be ended.
    """
    before, here, leave = set(threading.enumerate()), os.getpid(), os._exit
    others = _processes()
    began, began_cpu = time.monotonic(), time.process_time()

    def look(_, frame):
        nonlocal began, began_cpu
        if _imports(frame):
            began, began_cpu = time.monotonic(), time.process_time()
        elif time.process_time() - began_cpu > patience_s or time.monotonic() - began > WALL * patience_s:
            stop = NeverEnds(f"your code had not ended after {time.monotonic() - began:.0f} s: is a loop too long?")
            _raised_again(stop, frame)
            raise stop

    def stays(status):
        if os.getpid() != here:
            leave(status)
        raise SystemExit(status)

    traced = sys.gettrace()
    hears_signals = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGALRM, look) if hears_signals else None
    try:
        if hears_signals:  # repeatedly, because the block may catch the exception
            signal.setitimer(signal.ITIMER_REAL, patience_s, _LOOK_EVERY_S)
        with mock.patch.object(os, "_exit", stays):
            yield
    finally:
        if hears_signals:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
            sys.settrace(traced)
        left = _ended(set(threading.enumerate()) - before, patience_s)
        killed = _killed(_processes() - others, patience_s)
    if killed:
        raise LeftRunning("your code left a process running: wait for its end, or end it, before you return")
    if left:
        raise LeftRunning(f"your code left a thread running ({left[0].name}): join() it before you return")


def _raised_again(stop, frame):
    """Make every further line of `frame` and its callers, up to the block, raise `stop`."""

    def trace(_, event, __):
        if event == "line":
            raise stop
        return trace

    sys.settrace(trace)
    while frame and frame.f_code.co_filename != __file__:
        frame.f_trace = trace
        frame = frame.f_back


def _imports(frame):
    """Return whether an import that began inside the block is running."""
    while frame and frame.f_code.co_filename != __file__:
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            return True
        frame = frame.f_back
    return False


def _ended(threads, patience_s):
    """Return the threads that did not end by themselves, after raising SystemExit in each."""
    deadline = time.monotonic() + patience_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    left = [thread for thread in threads if thread.is_alive()]
    for thread in left:
        if isinstance(thread, threading.Timer):
            thread.cancel()
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
    return left


def _has_children():
    """Return whether this process has children. Listing them is slow, because it scans all processes of the machine."""
    with suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return True
    return False


def _processes():
    """Return the child processes, without multiprocessing's own helper."""
    found = set()
    for child in psutil.Process().children() if _has_children() else ():
        with suppress(psutil.Error):  # it has ended meanwhile
            if "resource_tracker" not in " ".join(child.cmdline()):
                found.add(child)
    return found


def _killed(processes, patience_s):
    """Kill the processes that did not end by themselves, and return them."""
    _, left = psutil.wait_procs(processes, patience_s)
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, patience_s)
    return left
