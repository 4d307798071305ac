"""Who sends how much to whom in a training step, when ranks stand on a grid of pipeline, data and tensor ranks.

    sizes = {"pipeline": 2, "data": 2, "tensor": 4}        # in the order of the axes, the outermost first
    partners(sizes, rank=5)                                # {"pipeline": [5, 13], "data": [1, 5], "tensor": [4, 5, 6, 7]}
    links(sizes, payloads_of_7b(sizes))                    # {(4, 5): Sent("tensor", bytes), ...}
    between_nodes(links(...), per_node=8)                  # {axis: bytes in a step}

A rank sends to the next one of its ring: 2 (n-1)/n of the payload of an all-reduce (lesson 02). Stages hand activations to
the next one and gradients back; they form a line, not a ring.
"""

from dataclasses import dataclass
from math import prod

TOKENS, WIDTH, LAYERS, PARAMETERS = (
    2048,
    4096,
    32,
    6.7e9,
)  # the lesson's 7B model, one sequence per micro-batch
MICRO_BATCHES = 8


@dataclass(frozen=True)
class Sent:
    """What goes over one link in a step, in one direction."""

    axis: str
    bytes: float


def partners(sizes, rank):
    """{axis: ranks of the group that `rank` is in, in order}, on a grid of {axis: ranks}, the last axis fastest."""
    axes, found = list(sizes), {}
    for i, axis in enumerate(axes):
        stride = prod(sizes[other] for other in axes[i + 1 :])
        first = rank - rank // stride % sizes[axis] * stride
        found[axis] = list(range(first, first + sizes[axis] * stride, stride))
    return found


def payloads_of_7b(sizes):
    """{axis: bytes that a rank hands to it in a step}: a micro-batch's activations, gradients in fp32, all-reduces of layers."""
    activation = 2 * TOKENS * WIDTH  # bf16
    return {
        "pipeline": MICRO_BATCHES * activation,  # as many bytes come back
        "data": 4 * PARAMETERS / (sizes["pipeline"] * sizes["tensor"]),
        "tensor": MICRO_BATCHES * 4 * LAYERS / sizes["pipeline"] * activation,
    }


def links(sizes, payloads):
    """{(from rank, to rank): Sent} of a step."""
    found = {}
    for rank in range(prod(sizes.values())):
        for axis, group in partners(sizes, rank).items():
            n, me = len(group), group.index(rank)
            if axis == "pipeline":
                for other in (me - 1, me + 1):
                    if 0 <= other < n:
                        found[rank, group[other]] = Sent(axis, payloads[axis])
            elif n > 1:
                found[rank, group[(me + 1) % n]] = Sent(axis, 2 * (n - 1) / n * payloads[axis])
    return found


def between_nodes(sent, per_node):
    """{axis: bytes of a step that leave a node, all ranks together}; an axis that sends nothing is left out."""
    found = {}
    for (start, end), one in sent.items():
        leaves = start // per_node != end // per_node
        found[one.axis] = found.get(one.axis, 0.0) + leaves * one.bytes
    return found
