"""A virtual network: a logical clock on every rank, real messages between them, and runs that repeat exactly.

    net = VirtualNetwork(ranks, inside=Link(2e-6, 150e9), between=Link(10e-6, 25e9), ranks_per_node=2)
    net.compute(1e-3, "forward")            # 1 ms of virtual work: only the clock moves
    net.exchange(mine, right, theirs, left)  # a real message, whose virtual cost is latency + bytes / bandwidth
    net.clock_s, net.gather_spans()

The algorithm is real: it runs on real ranks, moves real tensors, and hangs or gives wrong sums if it is wrong. Only *time*
is computed. A message carries the time at which it was sent; whoever receives it moves its clock to

    max(own clock, time sent) + latency + bytes / bandwidth,

and the sender is busy for as long (one message out and one in at a time: the alpha-beta or Hockney 1994 model with one
port per direction; logical clocks: Lamport 1978). Nothing reads a real clock, so a loaded machine changes nothing.
Every rank has a link of its own to every other: a node's ranks do not share a network card, and switches never fill up.

Asynchronous messages run on a second clock, so that they can overlap with compute:

    with net.asynchronous("bucket 0") as work:   # starts when the data is ready and the link is free
        net.all_reduce(bucket)
    net.compute(1e-3, "backward")
    net.wait(work)                               # the clock moves to the end of `work`, if that is later
"""

from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .timeline import Span, gather

_STAMP = 8  # bytes of the time sent, ahead of each message's payload


@dataclass(frozen=True)
class Link:
    """alpha and beta of a connection: seconds that any message costs, and bytes per second after that."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self):
        if self.latency_s < 0 or self.bytes_per_s <= 0:
            raise ValueError(f"{self}: the latency must be at least 0 and the bandwidth positive")

    def cost_s(self, n_bytes):
        """Seconds that one message of n_bytes takes."""
        return self.latency_s + n_bytes / self.bytes_per_s


@dataclass
class Work:
    """Asynchronous messages: when they began and ended, in virtual seconds."""

    name: str
    start_s: float
    end_s: float
    sending: "Sending | None" = None  # the real message of an isend


@dataclass
class Sending:
    """A real message under way, and the buffer that must live until it was sent."""

    work: dist.Work
    buffer: torch.Tensor

    def wait(self):
        self.work.wait()


class VirtualNetwork:
    """Clocks and links of one rank; every rank makes one with the same arguments.

    `inside` is the link between ranks of one node, `between` (default: the same) the link between nodes of
    `ranks_per_node` ranks each (default: all ranks on one node). `group` is the process group that carries the
    messages (default: all ranks); destinations and sources are ranks in it. Messages travel through host memory, over gloo.
    """

    def __init__(self, ranks, inside, between=None, ranks_per_node=None, group=None):
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.ranks_per_node = ranks_per_node or self.world_size
        if self.world_size % self.ranks_per_node:
            raise ValueError(
                f"{self.world_size} ranks do not fill nodes of {self.ranks_per_node}; "
                f"choose ranks_per_node so that it divides {self.world_size}"
            )
        self.inside, self.between, self.group = inside, between or inside, group
        self._ranks = ranks
        self.reset()

    def reset(self):
        """All clocks of this rank to zero, no spans."""
        self.clock_s = self.communication_clock_s = 0.0
        self.spans = []
        self._asynchronous = False

    def link(self, other):
        """The Link between this rank and rank `other`."""
        same_node = self.rank // self.ranks_per_node == other // self.ranks_per_node
        return self.inside if same_node else self.between

    def compute(self, seconds, name="compute"):
        """Virtual work: the clock moves, nothing else happens."""
        if seconds < 0:
            raise ValueError(f"compute takes {seconds} s; time does not run backwards")
        self._span("compute", name, self.clock_s, self.clock_s + seconds)
        self.clock_s += seconds

    def send(self, tensor, dst):
        """Send; this rank is busy for the message's cost. (In reality it waits until the message is received, as gloo does.)"""
        start = self._now
        self._post(tensor, dst, start).wait()
        self._move(f"to {dst}", start, start + self.link(dst).cost_s(_bytes(tensor)))

    def recv(self, tensor, src):
        """Receive into `tensor`, waiting (virtually) until the message was sent, then for its cost."""
        start = self._now
        self._move(f"from {src}", start, self._take(tensor, src, start))

    def exchange(self, send_tensor, dst, recv_tensor, src):
        """Send and receive at once, as on a link with two directions: ends when both have ended."""
        start = self._now
        sending = self._post(send_tensor, dst, start)
        sent = start + self.link(dst).cost_s(_bytes(send_tensor))
        self._move(f"to {dst}, from {src}", start, max(sent, self._take(recv_tensor, src, start)))
        sending.wait()

    @contextmanager
    def asynchronous(self, name):
        """Messages in this block run on the communication clock, one block after another; yields their Work.

        The block starts when this rank reaches it (the data is ready) and the block before has ended. The code itself runs
        at once, so every rank must enter its asynchronous blocks in the same order, as with any collective.
        """
        start = max(self.clock_s, self.communication_clock_s)
        self.communication_clock_s, self._asynchronous = start, True
        work = Work(name, start, start)
        try:
            yield work
        finally:
            self._asynchronous = False
            work.end_s = self.communication_clock_s
            self._span("communication", name, start, work.end_s)

    def isend(self, tensor, dst, name=None):
        """Send on the communication clock without waiting for the receiver; returns a Work that must be waited for."""
        with self.asynchronous(name or f"to {dst}") as work:
            work.sending = self._post(tensor, dst, self._now)
            self._move(work.name, self._now, self._now + self.link(dst).cost_s(_bytes(tensor)))
        return work

    def wait(self, *works):
        """Move the clock to the end of these works, where that is later."""
        for work in works:
            if work.sending:
                work.sending.wait()
        end = max([self.clock_s, *(work.end_s for work in works)])
        self._span("waiting", "wait", self.clock_s, end)
        self.clock_s = end

    def all_reduce(self, tensor):
        """Sum a contiguous `tensor` over all ranks, in place, by the ring of lesson 02; any length."""
        n = self.world_size
        length = -(-tensor.numel() // n)
        parts = [
            tensor.view(-1)[i * length : (i + 1) * length] for i in range(n)
        ]  # the last ones may be short or empty
        for hop in range(2 * (n - 1)):
            give, take = parts[(self.rank - hop) % n], parts[(self.rank - hop - 1) % n]
            incoming = torch.empty_like(take)
            self.exchange(give, (self.rank + 1) % n, incoming, (self.rank - 1) % n)
            take.copy_(take + incoming if hop < n - 1 else incoming)
        return tensor

    def gather_spans(self):
        """Every rank's spans on rank 0, None on the others; all ranks call it."""
        return gather(self.spans, self._ranks, group=self.group)

    # ---- the active clock ----

    @property
    def _now(self):
        return self.communication_clock_s if self._asynchronous else self.clock_s

    def _move(self, name, start, end):
        if self._asynchronous:
            self.communication_clock_s = end  # the whole block is one span
        else:
            self.clock_s = end
            self._span("communication", name, start, end)

    def _span(self, lane, name, start, end):
        if end > start:
            self.spans.append(Span(self.rank, lane, name, start, end))

    # ---- real messages, stamped ----

    def _post(self, tensor, dst, start):
        stamp = torch.tensor([start], dtype=torch.float64).view(torch.uint8)
        message = torch.cat([stamp, tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)])
        return Sending(dist.isend(message, group=self.group, group_dst=dst), message)

    def _take(self, tensor, src, start):
        """Receive for real; the virtual time at which it is here."""
        message = torch.empty(_STAMP + _bytes(tensor), dtype=torch.uint8)
        dist.recv(message, group=self.group, group_src=src)
        payload = message[_STAMP:].clone().view(tensor.dtype)
        tensor.copy_(payload.view(tensor.shape))
        sent = message[:_STAMP].view(torch.float64).item()
        return max(start, sent) + self.link(src).cost_s(_bytes(tensor))


def _bytes(tensor):
    return tensor.numel() * tensor.element_size()
