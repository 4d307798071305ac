"""Honest times: warmed up, synchronised, of the slowest rank; the most memory that was held; what a device can do."""

import statistics
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: this rank's median and samples, and the median of the slowest rank."""

    median_s: float
    slowest_s: float
    samples: list = field(repr=False)


def median_s(call, repeats, ranks, warm_up=1):
    """Time `call()`, `repeats` times after a warm-up. All ranks must call it, with the same numbers.

    Ranks start each sample together (a barrier), and a sample ends when the device has done the work.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats} leaves nothing to measure; use at least 1")
    samples = []
    for repeat in range(-warm_up, repeats):
        synchronise(ranks.device)
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        call()
        synchronise(ranks.device)
        if repeat >= 0:
            samples.append(time.perf_counter() - start)
    median = statistics.median(samples)
    return Timing(median, max_over_ranks(median, ranks), samples)


def take_turns(calls, rounds, ranks):
    """{name: [seconds of the slowest rank in each of `rounds` rounds]} of {name: call}; a round makes each call once.

    So a busy moment of the machine hits all of them, and they can be compared round by round. A first round warms up.
    All ranks must call it, with the same names and numbers.
    """
    taken = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            seconds = median_s(call, 1, ranks, warm_up=0).slowest_s
            taken[name] += [seconds] if turn else []
    return taken


def synchronise(device: torch.device) -> None:
    """Wait until `device` has done what it was given; on a CPU it has."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def max_over_ranks(value: float, ranks) -> float:
    """The largest of the ranks' values, on all ranks. All ranks must call it."""
    if not dist.is_initialized():
        return value
    # on the CPU where the group can: reading a number back from a GPU waits for all its work
    device = torch.device("cpu") if "gloo" in ranks.backend else ranks.device
    largest = torch.tensor(float(value), dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


def tok_per_s(global_batch: int, block: int, step_s: float) -> float:
    """Tokens per second of the whole world: every rank's sequences count, the slowest rank's time does."""
    return global_batch * block / step_s


def peak_memory_gib(ranks) -> float:
    """The most memory this rank has held, in GiB: of its GPU's tensors, or of the process on a CPU."""
    if ranks.device.type != "cpu":
        return torch.get_device_module(ranks.device).max_memory_allocated(ranks.device) / 2**30
    with suppress(OSError, IndexError):
        # Linux: ru_maxrss would also count what the launcher held before it became this process
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 2**20
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def gemm_peak(device: torch.device, dtype: torch.dtype, seconds: float = 1.0) -> float:
    """FLOP/s of the fastest square matrix product on `device`, measured in about `seconds`, with torch's threads.

    A ceiling for what a model can reach here: the size doubles until one product takes a tenth of the time, and the
    best of some batches of products counts, not the median.
    """
    best, n = 0.0, 256
    while True:
        a_nn, b_nn = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        one_s = _seconds_of(a_nn, b_nn, 1, device)  # warms up too
        one_s = _seconds_of(a_nn, b_nn, 1, device)
        products = max(1, int(seconds / 50 / one_s))
        batches = [_seconds_of(a_nn, b_nn, products, device) / products for _ in range(3)]
        best = max(best, 2 * n**3 / min(batches))
        if min(batches) > seconds / 20 or n >= 2**14:
            return best
        n *= 2


def gemm_together(ranks, n=1024, products=20):
    """FLOP/s of matrix products [n, n] in float32 on all ranks at once, summed. All ranks call it.

    Unlike `gemm_peak` of each rank, it counts a core that two ranks share once: the slowest rank's time is everybody's.
    """
    a_nn, b_nn = (torch.randn(n, n, device=ranks.device) for _ in range(2))
    _seconds_of(a_nn, b_nn, 2, ranks.device)  # warms up
    dist.barrier()
    slowest_s = max_over_ranks(_seconds_of(a_nn, b_nn, products, ranks.device), ranks)
    return ranks.world_size * products * 2 * n**3 / slowest_s


def _seconds_of(a_nn, b_nn, products, device):
    synchronise(device)
    start = time.perf_counter()
    for _ in range(products):
        a_nn @ b_nn
    synchronise(device)
    return time.perf_counter() - start
