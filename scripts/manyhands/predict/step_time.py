"""How long a training step takes: compute, memory, messages that nothing hides, and the bubble, each in seconds.

    time = step_time(work, machine)          # StepTime; work is a Work: what one GPU does, by `plan_work` or `published_runs`
    time.total_s, time.bubble_s

Two constants are fitted, on two published runs (see `published_runs.fit`), and never per row: the share of the peak that
matrix products attain, and how often the bytes that a forward leaves for its backward pass through the GPU's memory. All
else is arithmetic over the table of machines and the assumptions of `link_time`.

A micro-batch on a stage takes: 2 (forward) + 4 (backward) + 2 (recomputation) operations per weight at that share of the
peak; 1 + 2 + 1 passes of the memory-bound bytes; and the messages of tensor parallelism, which wait for nobody. 1F1B
idles for (P - 1) micro-batches, with v stages per rank for a v-th of that (Narayanan et al. 2021, section 2.2). Zero-bubble
idles for a third of that again, if F, I and W take equally long (ZB-H1, Qi et al. 2024, arXiv:2401.10241): an assumption.
"""

from dataclasses import dataclass, field, fields
from functools import cached_property

from manyhands.predict.link_time import LINK_SHARE, Sent
from manyhands.predict.step_messages import Message, context_s, data_s, experts_s, pipeline_s, tensor_s

MATMUL_SHARE = 0.666  # of the dense peak; fitted
MEMORY_PASSES = 2.22  # of each byte that is kept; fitted
# Assumption: a layer's forward starts so many kernels, its backward twice as many, and the CPU starts one in so long; what a
# GPU finishes faster it waits for. PyTorch in eager mode, autocast included.
KERNELS, KERNEL_S = 25, 5e-6
OPTIMIZER_BYTES = 32  # read and written per parameter in fp32: weight, gradient, two moments, and the gradient's norm


@dataclass(frozen=True)
class Assumptions:
    """What a prediction rests on: change one to see what hangs on it."""

    matmul_share: float = MATMUL_SHARE
    memory_passes: float = MEMORY_PASSES
    link_share: float = LINK_SHARE
    # are messages of data and context parallelism hidden behind compute, where the strategy allows it?
    overlap: bool = True
    halves_fill: bool = True  # zero-bubble: does W, as long as F and I, fill two thirds of the bubble?
    routing: float = 1.0  # tokens of the busiest rank's experts over the mean: 1 is balanced


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
    context_s: float = 0.0  # keys and values on their way around the ring, where attention does not hide them
    experts_s: float = 0.0  # tokens on their way to experts and back
    messages: tuple[Message, ...] = field(default=(), compare=False)

    @cached_property
    def total_s(self):
        return sum(self.by_part().values())

    def by_part(self):
        """{part: seconds}."""
        return {name: getattr(self, f"{name}_s") for name in PARTS}

    def sent(self, axis=None):
        """The Sent of a step: of one axis, or of all."""
        return sum((m.sent for m in self.messages if axis in (None, m.axis)), Sent())


PARTS = tuple(f.name.removesuffix("_s") for f in fields(StepTime) if f.name != "messages")


def step_time(work, machine, assumed=None):
    """The StepTime of a `Work` on a Machine."""
    a = assumed or Assumptions()
    m, messages = work.micro_batches, []
    flop_s = 1 / (machine.peak_flops * a.matmul_share)
    byte_s = a.memory_passes / machine.memory_bytes_per_s
    more = a.routing - 1 if work.expert > 1 else 0.0  # a rank with all experts has all tokens, whoever gets them
    forward = work.layers_flops + more * work.expert_flops + work.head_flops
    kept_bytes = work.layers_bytes + more * work.expert_bytes + work.around_bytes
    forward_s = forward * flop_s + kept_bytes * byte_s
    backward_s = 2 * forward_s + work.again_flops * flop_s + work.again_bytes * byte_s
    launching_s = work.layers * KERNELS * KERNEL_S * (4 if work.again_flops or work.again_bytes else 3)
    late_s = max(0.0, launching_s - forward_s - backward_s)
    waits_s = {
        "tensor_s": tensor_s(work, machine, a, messages),
        "pipeline_s": pipeline_s(work, machine, a, messages),
        "context_s": context_s(work, machine, a, messages),
        "experts_s": experts_s(work, machine, a, messages),
    }
    around_s = 3 * (work.head_flops * flop_s + work.around_bytes * byte_s)
    # the bubble is made of layers: the head stands on the last stage alone
    idle = (work.pipeline - 1) / work.stages_per_rank * (work.idle_share if a.halves_fill else 1.0)
    bubble_s = idle * (forward_s + backward_s - around_s + late_s + sum(waits_s.values()))
    unhidden_s = data_s(work, machine, a, messages, forward_s + late_s / 3, backward_s + late_s * 2 / 3)
    optimizer_s, host_s = work.owned * OPTIMIZER_BYTES / machine.memory_bytes_per_s, 0.0
    if work.sharing == "offload":
        # FSDP copies fp32 weights up for each forward and backward, and casts them there; gradients come down once
        moved = work.owned * work.gradient_bytes * (2 * m + 1)
        messages.append(Message("host", "copy", work.units * (2 * m + 1), moved, Sent(host=moved)))
        # the host's Adam is taken to be as slow as the link
        moved += work.owned * OPTIMIZER_BYTES
        optimizer_s, host_s = 0.0, moved / (machine.host_bytes_per_s * a.link_share)
    cast_s = work.cast_bytes / machine.memory_bytes_per_s
    return StepTime(
        compute_s=m * (3 * forward + work.again_flops) * flop_s,
        memory_s=m * ((3 * kept_bytes + work.again_bytes) * byte_s + cast_s),
        bubble_s=bubble_s,
        data_s=unhidden_s,
        optimizer_s=optimizer_s,
        host_s=host_s,
        launch_s=m * late_s,
        messages=tuple(messages),
        **{part: m * seconds for part, seconds in waits_s.items()},
    )
