"""A virtual network: a logical clock on every rank, real messages between them, and runs that repeat exactly.

    net = VirtualNetwork(ranks, inside=Link(2e-6, 150e9), between=Link(10e-6, 25e9), ranks_per_node=2)
    net.compute(1e-3, "forward")            # 1 ms of virtual work: only the clock moves
    net.exchange(mine, right, theirs, left)  # a real message, whose virtual cost is latency + bytes / bandwidth
    net.clock_s, net.gather_spans()

The algorithm is real: it runs on real ranks, moves real tensors, and hangs or gives wrong sums if it is wrong. Only
*time* is computed. A message carries the time at which it was sent; whoever receives it moves its clock to

    max(own clock, time sent) + latency + bytes / bandwidth,

and the sender is busy for as long (one message out and one in at a time: the alpha-beta or Hockney 1994 model with one
port per direction; logical clocks: Lamport 1978). Nothing reads a real clock, so a loaded machine changes nothing.
Every rank has a network card of its own, and an all-reduce between nodes uses all cards of a node, as NCCL does: with k
ranks on a node it runs k rings, each of which leaves the node from another rank. Switches never fill up.

Asynchronous messages run on a second clock, so that they can overlap with compute:

    with net.asynchronous("bucket 0") as work:   # starts when the data is ready and the link is free
        net.all_reduce(bucket)
    net.compute(1e-3, "backward")
    net.wait(work)                               # the clock moves to the end of `work`, if that is later

A straggler is a rank whose compute takes longer; where the others then wait, the steps say:

    net = VirtualNetwork(ranks, inside=link, slowdown={2: 3.0})    # or a function: (rank, step) -> factor
    for step in range(8):
        with net.step(step):
            net.compute(1e-3, "forward and backward")
            net.all_reduce(gradient)
    steps = net.gather_steps()       # rank 0: {"compute": [[s of each step] of each rank], "communication": ...}
"""

import itertools
import math
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

LANES = ("compute", "communication", "waiting")
_STAMP = 8  # bytes of the time sent, ahead of each message's payload
_ROUNDING = 1e-9  # of a clock's reading: ranks in step differ by no more


@dataclass(frozen=True)
class Span:
    """Something that rank `rank` did from start_s to end_s, in seconds, here virtual ones; `lane` is one of LANES."""

    rank: int
    lane: str
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Link:
    """alpha and beta of a connection: seconds that any message costs, and bytes per second after that."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self):
        if self.latency_s < 0 or self.bytes_per_s <= 0:
            raise ValueError(f"{self}: the latency must be at least 0 and the bandwidth positive")

    def cost_s(self, n_bytes: float) -> float:
        """Seconds that one message of n_bytes takes."""
        return self.latency_s + n_bytes / self.bytes_per_s


@dataclass
class Work:
    """Asynchronous messages: when they began and ended, in virtual seconds."""

    name: str
    start_s: float
    end_s: float
    sending: dist.Work | None = None  # the real message of an isend


class VirtualNetwork:
    """Clocks and links of one rank; every rank makes one with the same arguments.

    `inside` is the link between ranks of one node, `between` (default: the same) the link between nodes of
    `ranks_per_node` ranks each (default: all ranks on one node). `group` is the process group that carries the messages
    (default: all ranks); destinations and sources are ranks in it. Messages travel through host memory, over gloo.
    `slowdown` makes compute take longer: {rank: factor}, or a function (rank, step) -> factor that gives the same
    answer each time it is asked (step: the number given to `step`; outside of steps that of the last one, 0 before the
    first). Raises ValueError for nodes that the ranks do not fill, and for a slowdown of ranks that there are not.
    """

    def __init__(self, ranks, inside, between=None, ranks_per_node=None, group=None, slowdown=None):
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.ranks_per_node = ranks_per_node or self.world_size
        if self.world_size % self.ranks_per_node:
            why = f"{self.world_size} ranks do not fill nodes of {self.ranks_per_node}"
            raise ValueError(f"{why}; choose ranks_per_node so that it divides {self.world_size}")
        self.inside, self.between, self.group = inside, between or inside, group
        factors = {} if callable(slowdown) else slowdown or {}
        if strangers := factors.keys() - range(self.world_size):
            why = f"slowdown names rank {min(strangers)}"
            raise ValueError(f"{why}, but the {self.world_size} ranks are 0 to {self.world_size - 1}")
        self._slowdown = slowdown if callable(slowdown) else lambda rank, step: factors.get(rank, 1.0)
        self.reset()

    def reset(self) -> None:
        """All clocks of this rank to zero, no spans, no steps."""
        self.clock_s = self.communication_clock_s = 0.0
        self.spans, self.steps = [], []
        self._spent = dict.fromkeys(LANES, 0.0)  # where this rank's clock went
        self._step, self._in_step, self._asynchronous = 0, False, False

    def link(self, other: int) -> Link:
        """The Link between this rank and rank `other`."""
        same_node = self.rank // self.ranks_per_node == other // self.ranks_per_node
        return self.inside if same_node else self.between

    def compute(self, seconds: float, name: str = "compute") -> None:
        """Virtual work: the clock moves by `seconds` (times this rank's slowdown), nothing else happens."""
        factor = self._slowdown(self.rank, self._step)
        if seconds < 0 or not 0 < factor < math.inf:
            raise ValueError(f"compute takes {factor} x {seconds} s; time does not run backwards, nor stand still")
        self._move("compute", name, self.clock_s, self.clock_s + factor * seconds)

    @contextmanager
    def step(self, i):
        """Count this rank's work in the block as step `i`: `steps` gets {lane: virtual seconds}, and their total.

        A rank waits for another rank's message or, in `wait`, for its own asynchronous messages.
        """
        if self._in_step:
            raise ValueError(f"step {i} begins inside step {self._step}; end that one first")
        self._step, self._in_step = i, True
        start, spent = self.clock_s, dict(self._spent)
        try:
            yield
        finally:
            self._in_step = False
        lanes = {lane: self._spent[lane] - spent[lane] for lane in LANES}
        self.steps.append({**lanes, "total": self.clock_s - start})

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Send; this rank is busy for the message's cost. (Really gloo waits until the message is received.)"""
        start = self._now
        _post(tensor, dst, start, self.group).wait()
        self._communicate(f"to {dst}", start, start + self._cost_s(tensor, dst))

    def recv(self, tensor: torch.Tensor, src: int, tag: int = 0) -> None:
        """Receive into `tensor`, waiting (virtually) until the message was sent, then for its cost.

        Messages of one tag arrive in the order in which they were sent; `isend` gives them their tag.
        """
        start = self._now
        ready = max(start, _take(tensor, src, self.group, tag))
        self._communicate(f"from {src}", start, ready + self._cost_s(tensor, src), late_s=ready - start)

    def exchange(self, send_tensor: torch.Tensor, dst: int, recv_tensor: torch.Tensor, src: int) -> None:
        """Send and receive at once, as on a link with two directions: ends when both have ended."""
        self._exchange({dst: send_tensor}, {src: recv_tensor})

    @contextmanager
    def asynchronous(self, name):
        """Messages in this block run on the communication clock, one block after another; yields their Work.

        The block starts when this rank reaches it (the data is ready) and the block before has ended. The code itself
        runs at once, so every rank must enter its asynchronous blocks in the same order, as with any collective.
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

    def isend(self, tensor: torch.Tensor, dst: int, name: str | None = None, tag: int = 0) -> Work:
        """Send on the communication clock without waiting for the receiver; returns a Work that must be waited for."""
        with self.asynchronous(name or f"to {dst}") as work:
            work.sending = _post(tensor, dst, self._now, self.group, tag)
            self._communicate(work.name, self._now, self._now + self._cost_s(tensor, dst))
        return work

    def wait(self, *works: Work) -> None:
        """Move the clock to the end of these works, where that is later."""
        for work in works:
            if work.sending:
                work.sending.wait()
        end = max([self.clock_s, *(work.end_s for work in works)])
        self._move("waiting", "wait", self.clock_s, end)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a contiguous `tensor` over all ranks, in place, by rings as in lesson 02; any length.

        Within a node one ring. Between nodes one for each of a node's ranks, with its part of the tensor: they leave
        the node from different ranks, so that each network card carries one of them.
        """
        n, on_a_node = self.world_size, self.ranks_per_node
        rings = [
            [node + (i + first) % on_a_node for node in range(0, n, on_a_node) for i in range(on_a_node)]
            for first in range(on_a_node if on_a_node < n else 1)
        ]
        length = -(-tensor.numel() // (n * len(rings)))
        # the last ones may be short or empty
        parts = [tensor.view(-1)[i * length : (i + 1) * length] for i in range(n * len(rings))]
        for hop in range(2 * (n - 1)):
            give, take = {}, {}  # {other rank: parts}
            for i, ring in enumerate(rings):
                at = ring.index(self.rank)
                give.setdefault(ring[(at + 1) % n], []).append(parts[i * n + (at - hop) % n])
                take.setdefault(ring[(at - 1) % n], []).append(parts[i * n + (at - hop - 1) % n])
            incoming = {src: torch.cat(to) for src, to in take.items()}
            self._exchange({dst: torch.cat(of) for dst, of in give.items()}, incoming)
            for src, to in take.items():
                for part, came in zip(to, incoming[src].split([part.numel() for part in to]), strict=True):
                    part.copy_(part + came if hop < n - 1 else came)
        return tensor

    def gather_spans(self):
        """Every rank's spans on rank 0, by rank and start; None on the others. All ranks call it."""
        everyone = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(self.spans, everyone, group=self.group, group_dst=0)
        if self.rank != 0:
            return None
        return sorted(itertools.chain(*everyone), key=lambda span: (span.rank, span.start_s, span.end_s))

    def gather_steps(self):
        """{lane or "total": [[seconds of each step] of each rank]} on rank 0, else None. All ranks call it.

        Raises ValueError, on all of them, where ranks made different numbers of steps.
        """
        everyone = [None] * self.world_size
        dist.all_gather_object(everyone, self.steps, group=self.group)
        counts = [len(steps) for steps in everyone]
        if len(set(counts)) > 1:
            raise ValueError(f"ranks made {counts} steps; put `with net.step(i):` around each step of every rank")
        if self.rank != 0:
            return None
        return {kind: [[step[kind] for step in steps] for steps in everyone] for kind in (*LANES, "total")}

    @property
    def _now(self):
        return self.communication_clock_s if self._asynchronous else self.clock_s

    def _cost_s(self, tensor, other):
        return self.link(other).cost_s(tensor.nbytes)

    def _exchange(self, give, take):
        """{rank: tensor} to send and to receive into, all at once, each on a link of its own."""
        start = self._now
        sending = [_post(tensor, dst, start, self.group) for dst, tensor in give.items()]
        ends = [start + self._cost_s(tensor, dst) for dst, tensor in give.items()]
        on_time = max(ends + [start + self._cost_s(tensor, src) for src, tensor in take.items()])
        for src, tensor in take.items():
            ends.append(max(start, _take(tensor, src, self.group)) + self._cost_s(tensor, src))
        name = f"to {', '.join(map(str, give))}, from {', '.join(map(str, take))}"
        self._communicate(name, start, max(ends), late_s=max(ends) - on_time)
        for work in sending:
            work.wait()

    def _communicate(self, name, start, end, late_s=0.0):
        """A message from start to end, of which the first `late_s` went by because the other rank was not ready."""
        if self._asynchronous:
            self.communication_clock_s = end  # the whole block is one span
            return
        begin = start + late_s if late_s > _ROUNDING * end else start
        self._move("waiting", name, start, begin)
        self._move("communication", name, begin, end)

    def _move(self, lane, name, start, end):
        """Move this rank's clock from start to end."""
        self.clock_s = end
        self._spent[lane] += end - start
        self._span(lane, name, start, end)

    def _span(self, lane, name, start, end):
        if end > start:
            self.spans.append(Span(self.rank, lane, name, start, end))


def _post(tensor, dst, sent_s, group=None, tag=0):
    """Begin to send `tensor` to rank `dst` of the group, stamped with `sent_s`; returns the dist.Work to wait for.

    It travels through host memory, over gloo. The messages of a process group have to be received in the order in which
    they were sent, as with any send and recv; those of another `tag` have an order of their own.
    """
    stamp = torch.tensor([sent_s], dtype=torch.float64).view(torch.uint8)
    message = torch.cat([stamp, tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)])
    return dist.isend(message, group=group, tag=tag, group_dst=dst)


def _take(tensor, src, group=None, tag=0):
    """Receive into `tensor` from rank `src` of the group; returns the virtual time at which it was sent."""
    message = torch.empty(_STAMP + tensor.nbytes, dtype=torch.uint8)
    dist.recv(message, group=group, tag=tag, group_src=src)
    tensor.copy_(message[_STAMP:].clone().view(tensor.dtype).view(tensor.shape))
    return message[:_STAMP].view(torch.float64).item()
