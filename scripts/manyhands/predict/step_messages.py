"""What a GPU sends in a step, by axis, and the seconds that it waits for it: each function appends to `messages`.

All take a `Work`, a Machine and the `Assumptions` of `step_time`, and give seconds of one micro-batch; `data_s` of the step.
"""

from dataclasses import dataclass

from manyhands.predict.link_time import Group, Sent


@dataclass(frozen=True)
class Message:
    """Collectives of one kind in a step, of one GPU."""

    axis: str  # tensor, pipeline, context, experts, data or host
    operation: str
    calls: int
    payload_bytes: float  # of all calls together
    sent: Sent


def tensor_s(work, machine, a, messages):
    """Seconds of a micro-batch's messages within layers: they are waited for."""
    if work.tensor == 1:
        return 0.0
    group = Group(machine, work.tensor, 1, a.link_share)
    calls, payload = work.tensor_calls, work.tensor_calls * work.tensor_payload
    total = work.micro_batches
    messages.append(
        Message("tensor", "all_reduce", calls * total, payload * total, group.sent("all_reduce", payload) * total)
    )
    return group.seconds("all_reduce", payload, calls)


def pipeline_s(work, machine, a, messages):
    """Seconds of a micro-batch's messages between stages, forward and backward: none of it is taken to be hidden."""
    if work.pipeline == 1:
        return 0.0
    group = Group(machine, work.pipeline, work.tensor * work.data, a.link_share)
    calls = 2 * work.stages_per_rank
    payload = calls * work.stream_bytes / (work.tensor if work.stream_scattered else 1)
    crossing = min(1.0, (group.nodes - 1) / (work.pipeline - 1))
    total = work.micro_batches
    sent = Sent(payload * (1 - crossing), payload * crossing) * total
    messages.append(Message("pipeline", "send", calls * total, payload * total, sent))
    link = machine.inside_bytes_per_s if group.nodes == 1 else machine.between_bytes_per_s
    hidden_by_none = Group(machine, 2, work.tensor * work.data, a.link_share)
    return payload / (link * a.link_share) + calls * hidden_by_none.seconds("all_gather", 0.0)


def context_s(work, machine, a, messages):
    """Seconds of a micro-batch that attention waits for keys and values on their way around the ring.

    Each rank computes with the block that it has while the next one arrives (Liu et al. 2023, Ring Attention,
    arXiv:2310.01889): what takes longer than attention's products is waited for. With zig-zag shares, of the first and the
    last positions together, all ranks have as much to do under the causal mask.
    """
    if work.context == 1:
        return 0.0
    group = Group(machine, work.context, work.tensor, a.link_share)
    attention_s = work.attention_flops / (machine.peak_flops * a.matmul_share)
    waited = 0.0
    for payload, times, behind_s in (
        (work.ring_payload, work.forwards, attention_s),
        (work.ring_back_payload, 1, 2 * attention_s),
    ):
        calls, payload = work.layers * times, work.layers * times * payload
        seconds = group.seconds("ring", payload, calls)
        waited += max(0.0, seconds - behind_s * times) if a.overlap else seconds
        all_calls, all_payload = calls * work.micro_batches, payload * work.micro_batches
        messages.append(Message("context", "ring", all_calls, all_payload, group.sent("ring", all_payload)))
    return waited


def experts_s(work, machine, a, messages):
    """Seconds of a micro-batch's all-to-alls, which send tokens to their experts and back: they are waited for."""
    if work.expert == 1:
        return 0.0
    group = Group(machine, work.expert, work.tensor, a.link_share)
    calls, payload = work.exchange_calls, work.exchange_calls * work.exchange_payload * a.routing
    total = work.micro_batches
    sent = group.sent("all_to_all", payload) * total
    messages.append(Message("experts", "all_to_all", calls * total, payload * total, sent))
    return group.seconds("all_to_all", payload, calls)


def data_s(work, machine, a, messages, forward_s, backward_s):
    """Seconds that the GPU waits for messages of data parallelism, and the messages."""
    if work.data == 1:
        return 0.0
    overlap = a.overlap and work.overlap
    parts = _shared(work, machine, a.link_share)

    def send(axis, operation, calls, times=1.0):
        """Seconds of an operation on all parameters: dense ones and experts have groups of their own."""
        seconds = 0.0
        for over_shards, over_copies, parameters in parts:
            group = over_shards if axis == "shard" else over_copies
            size = work.gather_bytes if operation == "all_gather" else work.gradient_bytes
            payload = parameters * size * times
            if group.ranks > 1 and payload:
                messages.append(Message("data", operation, calls, payload, group.sent(operation, payload)))
                seconds += group.seconds(operation, payload, calls)
        return seconds

    def waited(seconds, behind_s, pieces):
        """What is left of messages in `pieces` behind compute: at least one piece, which nothing can hide."""
        return max(seconds - behind_s, seconds / pieces) if overlap else seconds

    if work.sharing in ("replicas", "zero1"):
        pieces = max(1, work.units)
        summed = send("replicas", "all_reduce", pieces)
        # with zero1 each weight comes back from the rank that has updated it; nothing runs meanwhile
        back = send("replicas", "broadcast", pieces) if work.sharing == "zero1" else 0.0
        return waited(summed, backward_s, pieces) + back
    m = 1 if work.sharing == "zero2" else work.micro_batches  # how often weights are gathered
    there = send("shard", "all_gather", work.units * m, m) / m
    then = send("shard", "all_gather", work.units * m, m) / m if work.sharing != "zero2" else 0.0
    summed = send("shard", "reduce_scatter", work.units)
    summed += send("replicas", "all_reduce", work.units, 1 / work.shard)
    waits = m * waited(there, forward_s, work.units)
    waits += (m - 1) * waited(then, backward_s, work.units) if then else 0.0
    return waits + waited(then + summed, backward_s, work.units)


def _shared(work, machine, link_share):
    """[(Group that shares, Group that replicates, parameters)]: of the dense part, and of the experts.

    Ranks that the experts are spread over hold different ones: they share, or copy, that much less.
    """
    found = []
    for expert, parameters in (
        (1, work.parameters - work.expert_parameters),
        (work.expert, work.expert_parameters),
    ):
        shard, replicate = work.shard, work.replicate
        if shard > 1:
            shard //= expert
        else:
            replicate //= expert
        over_shards = Group(machine, shard, work.tensor * expert, link_share)
        over_copies = Group(
            machine, replicate, work.tensor * work.shard * (expert if work.shard == 1 else 1), link_share
        )
        found.append((over_shards, over_copies, parameters))
    return found
