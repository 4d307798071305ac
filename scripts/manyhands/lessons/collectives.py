"""Harness and plots of lesson 02: bytes and seconds of an all-reduce, and its plots."""

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from manyhands.launch.machine import cores_here
from manyhands.launch.program import say
from manyhands.launch.recorded_runs import all_reduce_curves
from manyhands.launch.run_folder import show
from manyhands.measure import wire
from manyhands.measure.timing import synchronise
from manyhands.plots import looks as style
from manyhands.plots.looks import ALTERNATIVES
from manyhands.plots.times import beside_published, bytes_axis, looks_of, name_ends

_NUDGE = 1.1  # series beside each other at one size, so that whiskers do not cover each other
GRADIENT_MB = 40
_MB_PER_BLOCK = 5  # of a bar


def traffic(all_reduce, ranks):
    """Return what each rank sends and receives, in MB, in an all-reduce of 40 MB, and whether all sums are right.

    all_reduce: called as `all_reduce(x_N)` on all ranks, it sums in place with send and recv. Returns
    ([(sent, received) of rank 0, 1, ...], all right), the same on all ranks.
    """
    n = ranks.world_size
    x_N = torch.full((GRADIENT_MB * 250_000 // n * n,), float(ranks.rank), device=ranks.device)
    with wire.watch() as seen:
        all_reduce(x_N)
    right = bool((x_N == n * (n - 1) / 2).all())
    everybody = [(0.0, 0.0, False)] * n
    dist.all_gather_object(everybody, (seen.sent_bytes / 1e6, seen.payload_bytes("recv") / 1e6, right))
    return [(sent, received) for sent, received, _ in everybody], all(ok for *_, ok in everybody)


def bars(all_reduce, ranks):
    """Print on rank 0 a bar of the MB that each rank sends in an all-reduce of 40 MB. All ranks call it."""
    moved, right = traffic(all_reduce, ranks)
    if ranks.rank == 0:
        for rank, (sent, received) in enumerate(moved):
            say(f"rank {rank} sends {sent:3.0f} MB, receives {received:3.0f} MB {'█' * round(sent / _MB_PER_BLOCK)}")
        say("every rank has the sum" if right else "the sums are wrong")


def count(algorithms, ranks):
    """Print on rank 0 the sum, messages and MB of each of {name: all_reduce}, for 400,000 numbers on 4 ranks.

    All ranks call it.
    """
    for name, all_reduce in algorithms.items():
        x_N = torch.full((100_000 * ranks.world_size,), float(ranks.rank), device=ranks.device)
        with wire.watch() as seen:
            all_reduce(x_N)
        if ranks.rank == 0:
            say(f"{name:>10}: the sum is {x_N[0].item():g}, {seen.messages} messages, {seen.sent_bytes / 1e6:.1f} MB")


@dataclass(frozen=True)
class Hops:
    """Seconds of a hop and of the library's all-reduce, for each of `sizes_b` bytes: samples of the slowest rank."""

    sizes_b: list[int]
    hop_s: list[list[float]]
    all_reduce_s: list[list[float]]
    n_ranks: int  # that took part, never more than there are cores

    @property
    def fitted(self):
        """(alpha in s, beta in bytes/s) of the least-squares line through the hops."""
        return fit(self.sizes_b, [statistics.median(samples) for samples in self.hop_s])


def time_hops(exchange, ranks, largest_mib, repeats):
    """Measure a hop and an all-reduce for messages from 64 bytes to `largest_mib` MiB. All ranks call it.

    exchange: called as `exchange(give, to, take, source)`. No more ranks take part than there are cores for them: a
    rank without a core would measure how long it waits for one. Returns Hops, the same on all ranks.
    """
    n, cores = ranks.world_size, cores_here()
    n = n if ranks.local_world_size <= cores else min(n, max(2, cores))
    group, found = dist.new_group(range(n)), [None]
    if ranks.rank < n:
        right, left = (ranks.rank + 1) % n, (ranks.rank - 1) % n
        found = [_time_hops(exchange, right, left, ranks, group, sizes(largest_mib), repeats, n)]
    dist.broadcast_object_list(found, src=0)
    dist.barrier()  # nobody leaves the group while others are in it
    if ranks.rank < n:
        dist.destroy_process_group(group)
    return found[0]


def _time_hops(exchange, right, left, ranks, group, sizes_b, repeats, n):
    times = {"hop": [], "all-reduce": []}
    for n_bytes in sizes_b:
        give = torch.ones(n_bytes, dtype=torch.uint8, device=ranks.device)
        take, x_N = torch.empty_like(give), torch.zeros(max(1, n_bytes // 4), device=ranks.device)
        calls = {
            "hop": lambda give=give, take=take: exchange(give, right, take, left),
            "all-reduce": lambda x_N=x_N: dist.all_reduce(x_N, group=group),
        }
        for name, samples in sample_times(calls, n_bytes, repeats, ranks, group).items():
            times[name].append(samples)
    return Hops(sizes_b, times["hop"], times["all-reduce"], n)


def sizes(largest_mib):
    """Return message sizes in bytes: 64, 256, 1024, ... up to `largest_mib` MiB, and at least one."""
    return [64 * 4**k for k in range(20) if 64 * 4**k <= largest_mib * 2**20] or [64]


def sample_times(calls, n_bytes, repeats, ranks, group=None):
    """Return {name: seconds of the slowest rank in each of `repeats` rounds} of {name: call}. All of `group` call it.

    The calls take turns, so that a slow moment of the machine hits all of them; a first round warms up. Messages below
    1 MiB go ten at a time, so that the clock has something to see.
    """
    times, found = 10 if n_bytes < 2**20 else 1, {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            synchronise(ranks.device)
            dist.barrier(group)
            began = time.perf_counter()
            for _ in range(times):
                call()
            synchronise(ranks.device)
            slowest = torch.tensor((time.perf_counter() - began) / times, dtype=torch.float64, device=ranks.device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
            found[name].append(slowest.item())
    return {name: samples[1:] for name, samples in found.items()}


def fit(sizes_b, seconds):
    """Return (alpha in s, beta in bytes/s) of the line alpha + bytes / beta with the smallest relative errors.

    Each row is divided by its own time: bytes span many orders of magnitude, and plain least squares would care only
    about the largest.
    """
    t = torch.tensor(seconds, dtype=torch.float64)
    rows = torch.tensor([[1, b] for b in sizes_b], dtype=torch.float64) / t[:, None]
    alpha, per_byte = torch.linalg.lstsq(rows, torch.ones_like(t)[:, None]).solution.flatten().tolist()
    return max(alpha, 1e-9), 1 / max(per_byte, 1e-15)  # noise must not make them negative


def agree(all_reduce, ranks):
    """Print on each rank whether `all_reduce` agrees with the library and with one process on twelve random tensors.

    The ranks share the twelve; each sums its own, then all sum over the ranks. All ranks call it.
    """
    n = ranks.world_size
    gradients_12N = torch.randn(12, 1000 * n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mine_N = gradients_12N.tensor_split(n)[ranks.rank].sum(0).to(ranks.device)
    ours_N, library_N = all_reduce(mine_N.clone()), mine_N.clone()
    dist.all_reduce(library_N)
    for name, other_N in {"the library": library_N, "one process": gradients_12N.sum(0).to(ranks.device)}.items():
        same = torch.allclose(ours_N, other_N, rtol=0, atol=1e-10)
        say(f"{'✓ agrees' if same else '✗ disagrees'} with {name}")


def draw_against_size(sizes_b, measured, predicted, title, unit="measured", looks=None, formula="predicted"):
    """Seconds against bytes per message, and below them measured / predicted.

    measured and predicted: {series: seconds for each size}; of a measured series also all samples for each size, which
    are drawn as their median with whiskers from the least to the most. A series without a prediction has no curve
    below, and one without measurements is drawn as a line alone. `unit` says what kind of time it is ("measured",
    "virtual"), `formula` what the dashed line is, `looks` ({series: one of ALTERNATIVES}) what a series looks like.
    """
    figure, (times, ratios) = style.new_figure(7.5, 5.4, 2, 1, sharex=True, height_ratios=(3, 1))
    looks = looks or looks_of([*measured, *predicted])
    samples = {name: [s if isinstance(s, (list, tuple)) else [s] for s in found] for name, found in measured.items()}
    medians = {name: [statistics.median(some) for some in found] for name, found in samples.items()}
    # a world of one sends nothing, and zero has no place on a logarithmic axis
    positive = any(s > 0 for seconds in medians.values() for s in seconds)
    times.set(xscale="log", yscale="log" if positive else "linear")
    for seconds in predicted.values():
        times.plot(sizes_b, [1e3 * s for s in seconds], **style.PREDICTED)
    several = len(medians) > 1 and any(len(some) > 1 for found in samples.values() for some in found)
    for place, name in enumerate(medians):
        nudge = _NUDGE ** (place - (len(medians) - 1) / 2) if several else 1
        nudged_b = [b * nudge for b in sizes_b]
        _points(times, nudged_b, samples[name], looks[name], loose=name in predicted)
    found = []
    for name in (name for name in medians if name in predicted):
        ratio = [m / p if p and m else 1 for m, p in zip(medians[name], predicted[name], strict=True)]
        found += ratio
        ratios.semilogx(sizes_b, ratio, ms=4, lw=1, **looks[name])
    if positive:
        style.plain_log_ticks(times.yaxis)
    times.set(ylabel=f"{unit} time, ms", title=title)
    if predicted:
        times.plot([], [], label=formula, **style.PREDICTED)
        times.legend(frameon=False, loc="upper left")
    ratios.axhline(1, color=style.QUIET, lw=1)
    reach = max([2, *(max(ratio, 1 / ratio) for ratio in found)])  # half and twice are equally far from 1
    ratios.set(xlabel="bytes", ylabel=f"{unit} /\n{formula}", yscale="log")
    ratios.set_yticks([1 / 16, 1 / 4, 1, 4, 16] if reach > 4 else [1 / 4, 1 / 2, 1, 2, 4])
    ratios.set_ylim(0.8 / reach, reach / 0.8)
    ratios.yaxis.set_major_formatter("{x:g}")
    ratios.yaxis.set_minor_formatter("")
    bytes_axis(ratios)
    last_s = {name: seconds[-1] for name, seconds in (predicted | medians).items()}
    name_ends(times, {name: (sizes_b[-1], 1e3 * s) for name, s in last_s.items()}, looks)
    return figure


def draw_bandwidths(sizes_b, measured, factor, title, looks=None):
    """Two panels: algorithm bandwidth (bytes / seconds), and bus bandwidth (that times `factor`), in MB/s."""
    figure, panels = style.new_figure(7.5, 3.2, 1, 2, sharey=True)
    looks = looks or looks_of(measured)
    names = ("algorithm: bytes / time", f"bus: × {factor:g}")
    for axes, name, times in zip(panels, names, (1, factor), strict=True):
        for series, seconds in measured.items():
            rate = [times * b / s / 1e6 if s else 0 for b, s in zip(sizes_b, seconds, strict=True)]
            axes.semilogx(sizes_b, rate, ms=5, **looks[series])
        axes.set(xlabel="bytes", title=name)
        bytes_axis(axes)
    panels[0].set(ylabel="MB/s", ylim=(0, None))
    last = {series: factor * sizes_b[-1] / s[-1] / 1e6 if s[-1] else 0 for series, s in measured.items()}
    name_ends(panels[1], {series: (sizes_b[-1], rate) for series, rate in last.items()}, looks)
    figure.suptitle(title)
    return figure


def draw_line(hops, alpha, beta, ranks):
    """Show on rank 0 the measured hops around the line alpha + bytes / beta (s, bytes/s), and print the fitted line."""
    if ranks.rank != 0:
        return
    line = [alpha + b / beta for b in hops.sizes_b]
    title, looks = f"one hop on a ring of {hops.n_ranks} ranks, {ranks.library}", {"hop": ALTERNATIVES[0]}
    figure = draw_against_size(
        hops.sizes_b, {"hop": hops.hop_s}, {"hop": line}, title, looks=looks, formula="your line"
    )
    show(figure, "hop", alt="Time of one hop against bytes: medians and whiskers around the line.")
    fitted_alpha, fitted_beta = hops.fitted
    say(f"least squares: alpha = {1e6 * fitted_alpha:,.0f} µs, beta = {fitted_beta / 1e6:,.0f} MB/s")


def draw_machines(hops, ranks):
    """Show on rank 0 the bus bandwidth of the all-reduce measured here, next to recorded or published machines."""
    if ranks.rank != 0:
        return
    curves = all_reduce_curves()
    seconds = [statistics.median(samples) for samples in hops.all_reduce_s]
    title = "bus bandwidth of an all-reduce"
    figure = beside_published(hops.sizes_b, seconds, hops.n_ranks, curves, title)
    show(figure, "machines", alt="Bus bandwidth against bytes: GPU nodes and, far below, this machine.")
    for curve in curves:
        say(f"{curve['name']}: {curve['hardware']}")


def _points(axes, sizes_b, samples, look, loose):
    """Medians of a series, joined by a line unless they are `loose`, with whiskers where there are several samples."""
    middle, errors = style.errorbars(samples, 1e3)
    if any(len(some) > 1 for some in samples):
        axes.errorbar(sizes_b, middle, yerr=errors, fmt="none", ecolor=look["color"], **style.WHISKERS)
    axes.plot(sizes_b, middle, ms=5, **({**look, "ls": "none"} if loose else look))
