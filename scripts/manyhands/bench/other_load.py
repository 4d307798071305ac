"""How much of this machine others used: cores' worth of work that was not ours, during a burst."""

import os
import time
from contextlib import suppress

import psutil

QUIET_CORES = 0.1  # of work by others, below which a machine is called quiet


class Others:
    """`with Others(pids) as others: ...` and then `others.cores`. Ours are `pids` and this process itself."""

    def __init__(self, pids):
        self.pids, self.cores = [os.getpid(), *pids], 0.0

    def __enter__(self):
        self._began = time.perf_counter(), busy_s(), own_s(self.pids)
        return self

    def __exit__(self, *_):
        began, busy, own = self._began
        used_s = (busy_s() - busy) - (own_s(self.pids) - own)
        self.cores = max(0.0, used_s / (time.perf_counter() - began))


def busy_s():
    """Seconds that the cores which we may use have worked, for whomever; a hypervisor's other guests count too."""
    times = psutil.cpu_times(percpu=True)
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(len(times))
    kinds = ("user", "nice", "system", "irq", "softirq", "steal")
    return sum(getattr(times[cpu], kind, 0.0) for cpu in allowed if cpu < len(times) for kind in kinds)


def own_s(pids):
    total = 0.0
    for pid in pids:
        with suppress(psutil.Error):
            spent = psutil.Process(pid).cpu_times()
            total += spent.user + spent.system
    return total
