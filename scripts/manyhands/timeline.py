"""Who did what, when: spans of time, a recorder for real ones, and a Gantt chart of all ranks.

    timeline = Timeline(ranks)                          # all ranks: agrees on time zero
    with timeline.span("forward"):
        ...
    done = timeline.start("all-reduce", lane="communication")   # something that ends elsewhere, or later
    ...; done()
    spans = gather(timeline.spans, ranks)               # on rank 0, None elsewhere
    if ranks.rank == 0:
        show(gantt(spans, "one step"), "step", alt="...")

The virtual network (`vnet`) records the same spans in virtual seconds; `gantt(..., virtual=True)` says so in the figure.
"""

import socket
import time
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from manyhands.figures import HATCH, INK

LANES = ("compute", "communication", "waiting")
LOOKS = {  # so that the lanes differ without colour
    "compute": {"ec": INK},
    "communication": {"ec": INK, "hatch": HATCH},
    "waiting": {"fc": "none", "ec": "#888888", "ls": ":"},
}


@dataclass(frozen=True)
class Span:
    """Something that rank `rank` did from start_s to end_s (seconds); `lane` is one of LANES."""

    rank: int
    lane: str
    name: str
    start_s: float
    end_s: float

    def __post_init__(self):
        if self.lane not in LANES:
            raise ValueError(f"lane {self.lane!r} is none of {', '.join(LANES)}")


class Timeline:
    """Records the spans of one rank in real time, in seconds since a zero that all ranks share.

    On one node the ranks share one monotonic clock, and zero is exact; between nodes it is as good as a barrier, about a
    millisecond. A GPU works asynchronously: synchronise before a span ends, or it shows the launch of the work only.
    """

    def __init__(self, ranks):
        self._rank = ranks.rank
        self.spans = []
        dist.barrier()
        readings = [None] * ranks.world_size
        dist.all_gather_object(readings, (socket.gethostname(), time.perf_counter()))
        host = readings[ranks.rank][0]
        self._zero = min(reading for name, reading in readings if name == host)

    def now(self):
        """Seconds since the common zero."""
        return time.perf_counter() - self._zero

    def start(self, name, lane="compute"):
        """Begin a span; the returned function ends it, from any thread."""
        begin = self.now()
        return lambda *_: self.spans.append(Span(self._rank, lane, name, begin, self.now()))

    @contextmanager
    def span(self, name, lane="compute"):
        """The block is one span, also when it raises."""
        end = self.start(name, lane)
        try:
            yield
        finally:
            end()


def gather(spans, ranks, group=None):
    """All ranks' spans, sorted by rank and start, on rank 0 (None elsewhere); all ranks call it."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    everyone = [None] * world_size if rank == 0 else None
    dist.gather_object(list(spans), everyone, group=group, group_dst=0)
    if rank != 0:
        return None
    return sorted(
        (span for part in everyone for span in part), key=lambda span: (span.rank, span.start_s, span.end_s)
    )


def gantt(spans, title, virtual=False, until_s=None):
    """A chart with one row per rank: compute solid in the rank's colour, communication hatched below it, waiting outlined.

    Returns a matplotlib Figure. A span's name is written into it where it fits. With virtual=True title and axis say that
    the time is virtual; `until_s` ends the axis there, so that two charts have one scale.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    from .figures import rank_colour, tint

    ranks = sorted({span.rank for span in spans})
    longest = until_s or max((span.end_s for span in spans), default=0.0)
    unit, scale = next(
        (u, s) for u, s in (("s", 1), ("ms", 1e3), ("µs", 1e6)) if longest * s >= 1 or u == "µs"
    )
    figure = Figure(figsize=(8, 1.5 + 0.62 * max(len(ranks), 1)), layout="constrained")
    axes = figure.subplots()
    for span in spans:
        colour, top = (
            rank_colour(span.rank),
            ranks.index(span.rank) - (0 if span.lane == "communication" else 0.36),
        )
        look = {"compute": {"fc": colour}, "communication": {"fc": tint(colour, 0.3)}}.get(span.lane, {})
        length = span.end_s - span.start_s
        axes.broken_barh(
            [(span.start_s * scale, length * scale)], (top, 0.36), lw=0.7, **LOOKS[span.lane], **look
        )
        if span.lane != "waiting" and length > 0.0095 * longest * len(
            span.name
        ):  # the name fits into the box
            ground = {"boxstyle": "round,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.8}
            middle = (span.start_s + length / 2) * scale
            axes.text(middle, top + 0.18, span.name, fontsize=7, ha="center", va="center", bbox=ground)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.set(xlim=(0, longest * scale * 1.01 or 1), ylim=(len(ranks) - 0.4, -0.6))
    axes.set_xlabel(f"virtual time, {unit}" if virtual else f"time, {unit}")
    axes.set_title(f"{title} (virtual)" if virtual and "virtual" not in title else title)
    axes.spines[["top", "right"]].set_visible(False)
    present = [lane for lane in LANES if any(span.lane == lane for span in spans)]
    if present:
        keys = [Patch(**{"fc": "#bbbbbb", **LOOKS[lane]}, label=lane) for lane in present]
        figure.legend(handles=keys, loc="outside lower center", ncols=3, frameon=False)
    return figure
