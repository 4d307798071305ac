"""Harness and plots of lesson 15: a machine whose ranks share a core, and its plots."""

import os
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from manyhands.launch import devices
from manyhands.launch.run_folder import show
from manyhands.measure.timing import take_turns
from manyhands.plots import looks
from manyhands.plots.bars import KINDS

ALL, ONE = "on all cores", "on one core"
PRODUCTS = 40  # products of a sample: a few milliseconds


@dataclass
class Shared:
    """Samples in seconds, of `n_ranks` ranks of a node; `predicted`: how many times as long one core should take."""

    samples: dict[str, list[float]]
    n_ranks: int
    predicted: int

    @property
    def ratio(self) -> float:
        """Return how many times as long one core took, by the medians."""
        return median(self.samples[ONE]) / median(self.samples[ALL])

    def __str__(self) -> str:
        """Return the ratio beside the predicted one, in a line."""
        near = 0.8 < self.ratio / self.predicted < 1.25
        off = "" if near else ": other programs use these cores too, look at the whiskers"
        return f"measured {self.ratio:.1f} times as long, predicted {self.predicted}{off}"


def time_on_one_core(ranks, repeats):
    """Time a product of one thread, first on a core each, then with all ranks on one. All ranks call it.

    No more ranks of a node compute than it has cores; the others wait. Where ranks are bound apart, or cannot be bound
    (macOS), both are the same. Each rank's cores and threads are as before at the end.
    """
    can_bind = hasattr(os, "sched_setaffinity")
    mine = sorted(os.sched_getaffinity(0)) if can_bind else []
    said = [None] * ranks.world_size
    dist.all_gather_object(said, (ranks.host, mine))
    of_node = [set(cores) for host, cores in said if host == ranks.host]
    common = sorted(set.intersection(*of_node))
    n_ranks = min(len(of_node), devices.cores(devices.look(os.environ)))
    own = [common[ranks.local_rank % len(common)]] if common else mine  # left alone, two may start on one core
    matrix, threads = torch.randn(256, 256), torch.get_num_threads()

    def multiply_on(cores):
        if cores:
            os.sched_setaffinity(0, cores)
        for _ in range(PRODUCTS if ranks.local_rank < n_ranks else 0):
            matrix @ matrix

    torch.set_num_threads(1)
    try:
        samples = take_turns({ALL: lambda: multiply_on(own), ONE: lambda: multiply_on(common[:1])}, repeats, ranks)
    finally:
        torch.set_num_threads(threads)
        if mine:
            os.sched_setaffinity(0, mine)
    return Shared(samples, n_ranks, n_ranks if common else 1)


def draw_held_against_limit(rungs, limit_bytes, title, published=()):
    """Draw a bar per rung, the MB that a rank holds by kind, and a line where its memory ends. Return a Figure.

    rungs: {name: object with the bytes of each of KINDS as attributes}. published: dicts with `name` and `points`,
    [[number of GPUs, tokens/s of each GPU], ...], which are drawn in a panel on the right.
    """
    from matplotlib.lines import Line2D

    rows = max(len(rungs), 4 if published else 1)
    figure, panels = looks.new_figure(
        9.5 if published else 7.5, 1.5 + 0.34 * rows, 1, 2 if published else 1, squeeze=False
    )
    bars = panels[0][0]
    for i, held in enumerate(rungs.values()):
        total = looks.stacked(bars, i, [(getattr(held, kind) / 1e6, *looks.BYTES[kind]) for kind in KINDS], 0.66)
        bars.text(total, i, f" {total:.1f}", va="center")
    most = max([limit_bytes, *(sum(getattr(held, kind) for kind in KINDS) for held in rungs.values())]) / 1e6
    bars.axvline(limit_bytes / 1e6, **looks.LIMIT)
    bars.set_yticks(range(len(rungs)), list(rungs))
    bars.invert_yaxis()
    bars.set(xlabel=title, xlim=(0, 1.15 * most))
    for axes in panels[0][1:]:
        for look, curve in zip(looks.ALTERNATIVES, published, strict=False):
            gpus, rates = zip(*curve["points"], strict=True)
            axes.semilogx(gpus, rates, ms=5, **look)
            looks.end_label(axes, gpus[-1], rates[-1], curve["name"], look["color"])
        ticks = sorted({gpus for curve in published for gpus, _ in curve["points"]})
        axes.set_xticks(ticks, ticks)
        axes.minorticks_off()
        axes.set(xlabel="H100 GPUs", ylabel="tokens/s per GPU", ylim=(0, None), xlim=(6, 6 * ticks[-1]))
    keys = [*looks.kind_keys(KINDS), Line2D([], [], **looks.LIMIT, label="memory of a rank")]
    figure.legend(handles=keys, loc="outside lower center", ncols=4, frameon=False, handleheight=1.4)
    return figure


def draw_one_core(shared, ranks, folded=""):
    """Show on rank 0 both times, and the line at which one core should be; `folded` as for `show`."""
    if ranks.rank:
        return
    from manyhands.plots.looks import PREDICTED, note
    from manyhands.plots.times import compared

    title = f"{shared.n_ranks} ranks of a node, each multiplies {PRODUCTS} times"
    figure = compared(shared.samples, title, "ms, slowest rank")
    (axes,) = figure.axes
    x = 1e3 * shared.predicted * median(shared.samples[ALL])
    axes.axvline(x, **PREDICTED)
    axes.set_xlim(0, 1.15 * max([x, *(1e3 * s for times in shared.samples.values() for s in times)]))
    note(axes, f"predicted: {shared.predicted} times as long", (x, 0.5), (-4, 0), ha="right")
    alt = "times of the same products on all cores and on one, and the predicted line for one"
    show(figure, "one_core", alt, folded)
