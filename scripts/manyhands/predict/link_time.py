"""How long a collective takes over the links of a machine: alpha and beta, with the number of nodes that its ranks are on.

    group = Group(machine, ranks=64, stride=8)              # 64 ranks, of which each node has one
    group.seconds("all_gather", payload_bytes)
    group.sent("all_gather", payload_bytes)                 # Sent(inside, between, host): bytes that a GPU sends over each link

Bandwidth is a ring's: an all-reduce sends 2 (n-1)/n of the payload from each rank, an all-gather and a reduce-scatter half of
that (Patarasuk and Yuan 2009); "ring" is an all-gather of which each rank uses a piece at a time. An all-to-all sends each rank
its own piece: most of it leaves the node where most ranks are on others. A ring that leaves the node is as fast as the share of the node's network cards that its ranks
have: all groups of an axis work at the same time.
"""

from dataclasses import dataclass
from functools import cached_property
from math import ceil, log2

from manyhands.predict.machines import Machine

# Assumptions, by order of magnitude: what nccl-tests and osu-tests print of small and of large messages on such machines.
# Nothing here is fitted.
LINK_SHARE = 0.8  # of a stated bandwidth that a collective attains
LAUNCH_S = 10e-6  # of a collective's kernel
HOP_INSIDE_S, HOP_BETWEEN_S = 1e-6, 5e-6  # of a message to the next rank
RING_FACTOR = {
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "broadcast": 1,
    "ring": 1,
    "all_to_all": 1,
}


@dataclass(frozen=True)
class Sent:
    """Bytes that one GPU sends, on average over its group, inside its node and to other nodes; and copies from and to its host."""

    inside: float = 0.0
    between: float = 0.0
    host: float = 0.0

    def __add__(self, other):
        return Sent(self.inside + other.inside, self.between + other.between, self.host + other.host)

    def __mul__(self, count):
        return Sent(self.inside * count, self.between * count, self.host * count)


@dataclass(frozen=True)
class Group:
    """`ranks` ranks, `stride` apart, that talk to each other while all other groups of their axis do the same."""

    machine: Machine
    ranks: int
    stride: int = 1
    link_share: float = LINK_SHARE

    @cached_property
    def on_a_node(self):
        """Ranks of the group that share a node."""
        return max(1, min(self.ranks, int(self.machine.gpus_per_node) // self.stride))

    @cached_property
    def nodes(self):
        return ceil(self.ranks / self.on_a_node)

    @cached_property
    def bytes_per_s(self):
        """Of the slowest link of the ring, in one direction."""
        inside, between = self.machine.inside_bytes_per_s, self.machine.between_bytes_per_s
        if self.nodes == 1:
            return inside * self.link_share
        return min(inside if self.on_a_node > 1 else between, self.on_a_node * between) * self.link_share

    def seconds(self, operation, payload_bytes, calls=1):
        """Of `calls` collectives with a payload of `payload_bytes` together. 0 for one rank alone."""
        if self.ranks == 1 or not calls:
            return 0.0
        latency_s = calls * self._latency_s(operation)
        if (
            operation == "all_to_all"
        ):  # both kinds of links work at once, and each GPU has its share of the node's cards
            sent, machine = self.sent(operation, payload_bytes), self.machine
            slowest_s = max(sent.inside / machine.inside_bytes_per_s, sent.between / machine.between_bytes_per_s)
            return slowest_s / self.link_share + latency_s
        return self._volume(operation, payload_bytes) / self.bytes_per_s + latency_s

    def sent(self, operation, payload_bytes):
        """The Sent of a collective."""
        crossing = self.nodes / self.ranks if self.nodes > 1 else 0.0
        if operation == "all_to_all":
            crossing = (self.ranks - self.on_a_node) / max(1, self.ranks - 1)
        volume = self._volume(operation, payload_bytes)
        return Sent(volume * (1 - crossing), volume * crossing)

    def _volume(self, operation, payload_bytes):
        return RING_FACTOR[operation] * (self.ranks - 1) / self.ranks * payload_bytes

    def _latency_s(self, operation):
        """A ring visits every rank; an all-reduce may take a tree instead, up and down."""
        between = self.nodes if self.nodes > 1 else 0
        if operation == "all_to_all":  # messages to all ranks are under way together
            return LAUNCH_S + (HOP_BETWEEN_S if between else HOP_INSIDE_S)
        ring = (self.ranks - 1 - between) * HOP_INSIDE_S + between * HOP_BETWEEN_S
        if operation == "all_reduce":
            tree = log2(self.on_a_node) * HOP_INSIDE_S + log2(self.nodes) * HOP_BETWEEN_S
            return LAUNCH_S + 2 * min(ring, tree)
        launches = self.ranks - 1 if operation == "ring" else 1
        return launches * LAUNCH_S + max(ring, 0)
