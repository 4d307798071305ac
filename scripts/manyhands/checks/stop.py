"""Ends what an answer does not end: a loop, the process of a rank, threads and processes that it leaves behind."""

import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
from unittest import mock

import psutil

WALL = 6  # times the patience: a process that waits for a busy machine, or for others, uses little time of its own
_LOOK_EVERY_S = 0.5


class NeverEnds(BaseException):
    """Stops an answer; no `except Exception` of the answer may keep it."""


class LeftRunning(Exception):
    """An answer has returned, and a thread or a process that it started had not ended."""


@contextmanager
def stopped_after(patience_s):
    """The block ends, in the main thread, within so many seconds of processor time; afterwards its threads and the
    processes that it started have ended.

    It raises NeverEnds there: in a Python loop soon, in a call of a library when that returns, in an import never: half
    a module would stay behind, and its time does not count. Where the block catches it, it raises it again in the very
    next line, which is the handler's, and so goes past it. os._exit raises SystemExit, but in children that were
    forked. Raises LeftRunning where a thread or a process had to be ended.
    """
    before, here, leave = set(threading.enumerate()), os.getpid(), os._exit
    others = _processes()
    began, began_cpu = time.monotonic(), time.process_time()

    def look(_, frame):
        nonlocal began, began_cpu
        if _imports(frame):
            began, began_cpu = time.monotonic(), time.process_time()
        elif time.process_time() - began_cpu > patience_s or time.monotonic() - began > WALL * patience_s:
            stop = NeverEnds(f"your code had not ended after {time.monotonic() - began:.0f} s: does a loop never end?")
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
        if hears_signals:  # again and again: what it raises may be caught
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
    """Each line that runs from now on in `frame` and its callers, up to the block, raises `stop`."""

    def trace(_, event, __):
        if event == "line":
            raise stop
        return trace

    sys.settrace(trace)
    while frame and frame.f_code.co_filename != __file__:
        frame.f_trace = trace
        frame = frame.f_back


def _imports(frame):
    """Whether what runs now, since the block began, is an import."""
    while frame and frame.f_code.co_filename != __file__:
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            return True
        frame = frame.f_back
    return False


def _ended(threads, patience_s):
    """Those that did not end by themselves; each raises SystemExit as soon as it runs Python code again."""
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
    """Whether this process has any: to find which, all processes of the machine are looked at, and that takes long."""
    with suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return True
    return False


def _processes():
    """The processes that this one has started, but not the helper that multiprocessing keeps for itself."""
    found = set()
    for child in psutil.Process().children() if _has_children() else ():
        with suppress(psutil.Error):  # it has ended by now
            if "resource_tracker" not in " ".join(child.cmdline()):
                found.add(child)
    return found


def _killed(processes, patience_s):
    """Those that did not end by themselves, and are killed."""
    _, left = psutil.wait_procs(processes, patience_s)
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, patience_s)
    return left
