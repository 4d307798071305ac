"""How long a training step takes: compute, memory, messages that nothing hides, and the bubble, each in seconds.

    time = step_time(work, machine)          # StepTime; work is a Work: what one GPU does, by `plan_work` or `published_runs`
    time.total_s, time.bubble_s

Two constants are fitted, on two published runs (see `published_runs.fit`), and never per row: the share of the peak that
matrix products attain, and how often the bytes that a forward leaves for its backward pass through the GPU's memory. All
else is arithmetic over the table of machines and the assumptions of `link_time`.

A micro-batch on a stage takes: 2 (forward) + 4 (backward) + 2 (recomputation) operations per weight at that share of the
peak; 1 + 2 + 1 passes of the memory-bound bytes; and the messages of tensor parallelism, which wait for nobody. 1F1B
idles for (P - 1) micro-batches, with v stages per rank for a v-th of that (Narayanan et al. 2021, section 2.2).
"""

from dataclasses import dataclass, field, fields

from manyhands.predict.link_time import LINK_SHARE, Group, Sent

MATMUL_SHARE = 0.666  # of the dense peak; fitted
MEMORY_PASSES = 2.22  # of each byte that is kept; fitted
# Assumption: a layer's forward starts so many kernels, its backward twice as many, and the CPU starts one in so long; what a
# GPU finishes faster it waits for. PyTorch in eager mode, autocast included.
KERNELS, KERNEL_S = 25, 5e-6
OPTIMIZER_BYTES = (
    32  # read and written per parameter in fp32: weight, gradient, two moments, and the gradient's norm
)


@dataclass(frozen=True)
class Assumptions:
    """What a prediction rests on: change one to see what hangs on it."""

    matmul_share: float = MATMUL_SHARE
    memory_passes: float = MEMORY_PASSES
    link_share: float = LINK_SHARE
    overlap: bool = (
        True  # are messages of data parallelism hidden behind compute, where the strategy allows it?
    )


@dataclass(frozen=True)
class Message:
    """Collectives of one kind in a step, of one GPU."""

    axis: str  # tensor, pipeline or data
    operation: str
    calls: int
    payload_bytes: float  # of all calls together
    sent: Sent


@dataclass(frozen=True)
class Work:
    """What the busiest GPU does in one step."""

    tensor: int
    pipeline: int
    replicate: int
    shard: int
    micro_batches: int
    stages_per_rank: int
    sharing: str  # copies, zero1, zero2, zero3, hybrid or offload
    layers: int  # of this GPU
    # of one micro-batch, on this GPU: operations of the forward, of all its layers and of the head
    layers_flops: float
    head_flops: float
    again_flops: float  # that recomputation repeats
    # bytes that its forward leaves for its backward; that recomputation writes once more; of its layers, and around them
    layers_bytes: float
    again_bytes: float
    around_bytes: float
    # tensor parallelism: all-reduces of one micro-batch, or the pairs that take their place, and the payload of one
    tensor_calls: int
    tensor_payload: float
    stream_bytes: float  # that a stage sends to the next one for a micro-batch
    stream_scattered: bool  # whether the tensor ranks share that
    # parameters of this GPU's share of layers and tensors; bytes of a number in gathers and in sums of gradients
    parameters: float
    units: int  # in how many pieces FSDP gathers them
    gather_bytes: int
    gradient_bytes: int
    cast_bytes: float = 0.0  # that autocast reads and writes per micro-batch
    overlap: bool = True  # False: this program sends its gradients when all backwards are done

    @property
    def data(self):
        return self.replicate * self.shard


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by what the GPU waits for."""

    compute_s: float  # matrix products
    memory_s: float  # all that is bound by the GPU's memory
    tensor_s: float  # messages of tensor parallelism
    pipeline_s: float  # messages between stages
    bubble_s: float  # idle
    data_s: float  # messages of data parallelism that nothing hides
    optimizer_s: float
    host_s: float  # what offload copies
    launch_s: float  # idle until the CPU has started the next kernel: micro-batches that are too small
    messages: tuple[Message, ...] = field(default=(), compare=False)

    @property
    def total_s(self):
        busy = (
            self.compute_s + self.memory_s + self.tensor_s + self.pipeline_s + self.optimizer_s + self.host_s
        )
        return busy + self.bubble_s + self.data_s + self.launch_s

    def by_part(self):
        """{part: seconds}."""
        return {
            f.name.removesuffix("_s"): getattr(self, f.name) for f in fields(self) if f.name != "messages"
        }

    def sent(self, axis=None):
        """The Sent of a step: of one axis, or of all."""
        return sum((m.sent for m in self.messages if axis in (None, m.axis)), Sent())


def step_time(work, machine, assumed=None):
    """The StepTime of a `Work` on a Machine."""
    a = assumed or Assumptions()
    m, messages = work.micro_batches, []
    flop_s = 1 / (machine.peak_flops * a.matmul_share)
    byte_s = a.memory_passes / machine.memory_bytes_per_s
    forward = work.layers_flops + work.head_flops
    forward_s = forward * flop_s + (work.layers_bytes + work.around_bytes) * byte_s
    backward_s = 2 * forward_s + work.again_flops * flop_s + work.again_bytes * byte_s
    launching_s = work.layers * KERNELS * KERNEL_S * (4 if work.again_flops or work.again_bytes else 3)
    late_s = max(0.0, launching_s - forward_s - backward_s)
    tensor_s = _tensor(work, machine, a, messages)
    around_s = 3 * (work.head_flops * flop_s + work.around_bytes * byte_s)
    stream_s = _pipeline(work, machine, a, messages)
    # the bubble is made of layers: the head stands on the last stage alone
    idle = (work.pipeline - 1) / work.stages_per_rank
    bubble_s = idle * (forward_s + backward_s - around_s + late_s + tensor_s + stream_s)
    data_s = _data(work, machine, a, messages, forward_s + late_s / 3, backward_s + late_s * 2 / 3)
    owned = work.parameters / (1 if work.sharing == "copies" else work.data)
    owned = work.parameters / work.shard if work.sharing == "hybrid" else owned
    optimizer_s, host_s = owned * OPTIMIZER_BYTES / machine.memory_bytes_per_s, 0.0
    if work.sharing == "offload":
        # weights go up for each forward and backward, gradients come down; the host's Adam is taken to be as slow as the link
        moved = owned * (work.gather_bytes * 2 * m + 4) + owned * OPTIMIZER_BYTES
        optimizer_s, host_s = 0.0, moved / (machine.host_bytes_per_s * a.link_share)
    cast_s = work.cast_bytes / machine.memory_bytes_per_s
    return StepTime(
        compute_s=m * (3 * forward + work.again_flops) * flop_s,
        memory_s=m * ((3 * (work.layers_bytes + work.around_bytes) + work.again_bytes) * byte_s + cast_s),
        tensor_s=m * tensor_s,
        pipeline_s=m * stream_s,
        bubble_s=bubble_s,
        data_s=data_s,
        optimizer_s=optimizer_s,
        host_s=host_s,
        launch_s=m * late_s,
        messages=tuple(messages),
    )


def _tensor(work, machine, a, messages):
    """Seconds of a micro-batch's messages within layers: they are waited for."""
    if work.tensor == 1:
        return 0.0
    group = Group(machine, work.tensor, 1, a.link_share)
    calls, payload = work.tensor_calls, work.tensor_calls * work.tensor_payload
    total = work.micro_batches
    messages.append(
        Message(
            "tensor", "all_reduce", calls * total, payload * total, group.sent("all_reduce", payload) * total
        )
    )
    return group.seconds("all_reduce", payload, calls)


def _pipeline(work, machine, a, messages):
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


def _data(work, machine, a, messages, forward_s, backward_s):
    """Seconds that the GPU waits for messages of data parallelism, and the messages."""
    if work.data == 1:
        return 0.0
    overlap = a.overlap and work.overlap
    over_shards = Group(machine, work.shard, work.tensor, a.link_share)
    over_copies = Group(machine, work.replicate, work.tensor * work.shard, a.link_share)

    def send(group, operation, calls, payload):
        if group.ranks == 1:
            return 0.0
        messages.append(Message("data", operation, calls, payload, group.sent(operation, payload)))
        return group.seconds(operation, payload, calls)

    def waited(seconds, behind_s, pieces):
        """What is left of messages in `pieces` behind compute: at least one piece, which nothing can hide."""
        return max(seconds - behind_s, seconds / pieces) if overlap else seconds

    gradients, gathered = work.parameters * work.gradient_bytes, work.parameters * work.gather_bytes
    if work.sharing in ("copies", "zero1"):
        pieces = max(1, work.units)
        summed = send(over_copies, "all_reduce", pieces, gradients)
        # with zero1 each weight comes back from the rank that has updated it; nothing runs meanwhile
        back = send(over_copies, "broadcast", pieces, gradients) if work.sharing == "zero1" else 0.0
        return waited(summed, backward_s, pieces) + back
    m = 1 if work.sharing == "zero2" else work.micro_batches  # how often weights are gathered
    again = 0 if work.sharing == "zero2" else 1
    there = send(over_shards, "all_gather", work.units * m, gathered * m) / m
    then = send(over_shards, "all_gather", work.units * m * again, gathered * m * again) / m if again else 0.0
    summed = send(over_shards, "reduce_scatter", work.units, gradients)
    summed += send(over_copies, "all_reduce", work.units, gradients / work.shard)
    waits = m * waited(there, forward_s, work.units)
    waits += max(0, m - 1) * waited(then, backward_s, work.units) if again else 0.0
    return waits + waited(then + summed, backward_s, work.units)
