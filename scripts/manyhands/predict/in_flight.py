"""What a pipeline's schedule leaves in memory: layers, and outputs of the head, between their forward and their backward.

    held_at_once("1F1B", n_layer=32, p=4, m=16)                    # ((32, 0), (8, 1)): first rank, last rank
    held_at_once("InterleavedZeroBubble", 32, p=4, m=16, v=2)      # ((32, 0), (32, 4))

The numbers are those of the orders in `pipeline_schedules`. A micro-batch is held until its B, or until its W where the
backward is in two halves: torch 2.13 keeps the graph of the first half for the second.
"""

from functools import cache

from manyhands.predict.pipeline_schedules import SCHEDULES, order_of

ALL_AT_ONCE = ("GPipe", "LoopedBFS")  # schedules whose forwards all come before the backwards


@cache
def held_at_once(schedule, n_layer, p, m, v=1):
    """((layers, heads) of the first rank, of the last rank): the most that each holds at a time, counted per micro-batch.

    The first rank has the most layers and the most micro-batches in flight, the last one has the head. `m` is a multiple of
    p. A V-shaped schedule, which `pipeline_schedules` does not know, gets a bound: 2 p micro-batches of all its layers.
    """
    layers = [layers_of_rank(n_layer, rank, p, v) for rank in (0, p - 1)]
    if schedule in ALL_AT_ONCE:
        return (m * sum(layers[0]), 0), (m * sum(layers[1]), m)
    if schedule not in SCHEDULES:
        most = min(m, 2 * p)
        return (most * sum(layers[0]), 1), (most * sum(layers[1]), 1)
    m = min(m, 4 * p)  # more change nothing: it is a steady state
    first, last = (_held(order_of(schedule, rank, p, m, v), p, of) for rank, of in zip((0, p - 1), layers, strict=True))
    return (first[0], 0), last


def layers_of_rank(n_layer, rank, p, v):
    """[layers of the rank's first stage, of its second, ...]: stage s is on rank s % p, the first stages get what is left."""
    least, extra = divmod(n_layer, p * v)
    return [least + (chunk * p + rank < extra) for chunk in range(v)]


def _held(order, p, layers):
    """(most layers, most micro-batches of the last stage) that are between F and B, or F and W, at a time."""
    held, last, most = 0, 0, (0, 0)
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    for kind, stage, _ in order:
        chunk = stage // p
        held += change[kind] * layers[chunk]
        last += change[kind] * (chunk == len(layers) - 1)
        most = max(most[0], held), max(most[1], last)
    return most
