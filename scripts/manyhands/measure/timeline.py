"""Who did what, when: spans of time and a recorder for real ones; `plots.schedule.gantt` draws them.

    timeline = Timeline(ranks)                          # all ranks: agrees on time zero
    with timeline.span("forward"):
        ...
    done = timeline.start("all-reduce", lane="communication")   # something that ends elsewhere, or later
    ...; done()
    spans = gather(timeline.spans, ranks)               # on rank 0, None elsewhere
    if ranks.rank == 0:
        show(gantt(spans, "one step"), "step", alt="...")

`virtual_network` records the same spans in virtual seconds; `gantt(..., virtual=True)` says so in the figure.
"""

import socket
import time
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

LANES = ("compute", "communication", "waiting")


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

    On one node the ranks share one monotonic clock, and zero is exact; between nodes it is as good as a barrier, about
    a millisecond. A GPU works asynchronously: synchronise before a span ends, or it shows the launch of the work only.
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
    return sorted((span for part in everyone for span in part), key=lambda span: (span.rank, span.start_s, span.end_s))
