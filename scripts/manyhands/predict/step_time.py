"""Predict the time of a training step: compute, memory, exposed messages, and the bubble, each in seconds.

    work = planned_work(model, layout, options)    # Work: what the busiest GPU does in a step
    time = step_time(work, machine)                # StepTime
    time.total_s, time.bubble_s

Two constants are fitted, on a few published runs (see `published_runs.fit`), and never per row: the share of the peak
that matrix products attain, and how often the bytes that a forward leaves for its backward pass through the GPU's
memory. All else is arithmetic over the table of machines and the assumptions of `machines`.

A micro-batch on a stage takes: 2 (forward) + 4 (backward) + 2 (checkpointing) operations per weight at that share of
the peak; 1 + 2 + 1 passes of the memory-bound bytes; and the messages of tensor parallelism, which wait for nobody.
1F1B idles for (P - 1) micro-batches, with v stages per rank for a v-th of that (Narayanan et al. 2021, section 2.2).
Zero-bubble idles for a third of that again, if F, I and W take equally long (ZB-H1, Qi et al. 2024, arXiv:2401.10241):
an assumption.
"""

from collections import defaultdict
from dataclasses import dataclass, field, fields
from functools import cache, cached_property

from manyhands.config.layout import SPLIT_BACKWARD, compiles, records_graph
from manyhands.predict.activation_memory import AROUND, rank_terms, repeated_bytes
from manyhands.predict.machines import LINK_SHARE, Group, Machine, Sent
from manyhands.predict.memory import fullest_share, state_of_rank, storage_of
from manyhands.predict.models import PlannedModel, share_of
from manyhands.predict.pipeline_schedules import stages_of_ranks
from manyhands.predict.program import TRAIN_PY, Program
from manyhands.predict.traffic import Message, forwards, messages, spreads_experts, tokens_at_once

MATMUL_SHARE = 0.766  # of the GPU's best product; fitted
ATTENTION_SHARE = 0.258  # of the same, of FlashAttention, whose masked half is skipped; fitted
TORCH_ATTENTION_SHARE = 0.46  # of the same, of the kernel that torch takes in train.py; fitted on our own runs
# Assumption: a collective's kernel takes so much of a GPU from the products beside it: 20 of 132 processors
# (DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.2)
TAKEN_SHARE = 0.15
MEMORY_PASSES = 2.22  # of each byte that is kept; fitted
UNFUSED = 1.57  # times as many without fused kernels; fitted
CASTS = 1.5  # assumption: times as many where linear layers cast what they multiply to 8 bits
# Assumption: a layer's forward starts this number of kernels, its backward twice that, each at this cost to the CPU;
# what a GPU finishes faster it waits for. PyTorch in eager mode, autocast included.
KERNELS, KERNEL_S = 25, 5e-6
OPTIMIZER_BYTES = 32  # read and written per parameter in fp32: weight, gradient, two moments, and the gradient's norm
OF_EXPERTS = ("mlp up", "gelu", "mlp down", "routing")  # what grows with the tokens that a rank's experts get


@dataclass(frozen=True)
class Work:
    """The work of the busiest GPU in one step."""

    micro_batches: int
    layers: int  # of this GPU
    # of one micro-batch, on this GPU: operations of the forward, of all its layers and of the head
    layers_flops: float
    head_flops: float
    again_flops: float  # that activation checkpointing repeats
    # bytes that its forward leaves for its backward; that checkpointing writes again; of layers, and around them
    layers_bytes: float
    again_bytes: float
    around_bytes: float
    owned: float  # parameters that this GPU updates
    messages: tuple[Message, ...]  # of the step
    units: int  # pieces that messages of data parallelism come in: the time of one is never hidden
    bubble: float = 0.0  # micro-batches that it idles for while the pipeline fills and drains
    # of that bubble what is left where W fills the rest of it: a third
    idle_share: float = 1.0
    cast_bytes: float = 0.0  # that autocast reads and writes per micro-batch
    offload: bool = False
    # of a micro-batch's `layers_flops` and `layers_bytes` those of experts that are spread over ranks
    expert_flops: float = 0.0
    expert_bytes: float = 0.0
    # of `layers_flops`: attention's, which a kernel of its own computes at another rate, and what is multiplied in 8
    # bits; and how often `again_flops` has them
    attention_flops: float = 0.0
    attention_again: float = 0.0
    low_flops: float = 0.0
    low_again: float = 0.0
    fused: bool = True  # norms and activations are kernels of their own
    recorded: bool = False  # in a CUDA graph, which the CPU starts at once
    torch_attention: bool = False


def planned_work(model: PlannedModel, layout, options, program: Program = TRAIN_PY) -> Work:
    """The Work of the busiest GPU: of a pipeline the rank whose layers, with the head if it is the last, take longest.

    Without a pipeline a rank runs all layers.
    """
    parallel, tensor, m = options.parallel, layout.tensor, layout.micro_batches
    storage, kind = storage_of(layout, options, program), parallel.activation_checkpointing
    tokens = tokens_at_once(model, layout, options)
    layers, has_head = _busiest_rank(model, layout.pipeline, layout.stages_per_rank)
    terms = rank_terms(share_of(model, layout.context, tensor), layout, options, program)
    a_layer = sum(kept for term, kept in terms.items() if term not in AROUND) / model.n_layer
    cheap = repeated_bytes(terms, program) / model.n_layer
    # FlashAttention skips the masked half, and is a kernel with a rate of its own
    attention = layers * tokens * model.attention_flops() / tensor / (2 if program.flash else 1)
    flops = layers * tokens * share_of(model, 1, tensor).computed_flops() / tensor - attention * program.flash
    flash, forward_times = attention * program.flash, forwards(layout, options)
    again_flops = attention if kind == "selective" and not program.flash else flops * (forward_times - 1)
    again = {"none": 0.0, "selective": cheap, "block": a_layer}[kind]
    split = layout.pipeline > 1 and parallel.schedule in SPLIT_BACKWARD
    sent = messages(model, layout, options, layers, program)
    units = max((message.calls for message in sent if message.operation in ("reduce_scatter", "all_reduce") and
                 message.axis == "data"), default=1)  # fmt: skip
    owned = state_of_rank(model, layout, options, program).optimizer / storage.moments
    if parallel.offload:
        # FSDP copies fp32 weights up for each forward and backward, and casts them there; gradients come down once
        moved = owned * storage.size * (2 * m + 1)
        sent.append(Message("host", "copy", units * (2 * m + 1), moved, 1, 1))
    spread = spreads_experts(model, layout)
    # autocast reads the weights in fp32 and writes them in low precision, once per forward
    cast = 0 if storage.dp_mode == "fsdp" or program.master else fullest_share(model, layout).numel
    return Work(
        micro_batches=m,
        layers=layers,
        layers_flops=flops,
        head_flops=tokens * model.head_flops() / tensor if has_head else 0.0,
        again_flops=again_flops,
        layers_bytes=layers * a_layer,
        again_bytes=layers * again * (2 if split else 1),
        around_bytes=sum(terms[term] for term in AROUND) if has_head else 0.0,
        owned=owned,
        messages=tuple(sent),
        units=units,
        bubble=(layout.pipeline - 1) / layout.stages_per_rank,
        idle_share=1 / 3 if split else 1.0,
        cast_bytes=cast * (storage.size + storage.low),
        offload=parallel.offload,
        attention_flops=flash,
        attention_again=forward_times - 1,
        low_flops=(flops - flash) * program.fp8,
        low_again=forward_times - 1,
        fused=compiles(layout, options) if program.fused is None else program.fused,
        recorded=not program.master and records_graph(model, layout, options),
        torch_attention=program.saves == "autograd",
        expert_flops=layers * tokens * model.expert_flops() / tensor if spread else 0.0,
        expert_bytes=layers * sum(terms.get(term, 0.0) for term in OF_EXPERTS) / model.n_layer if spread else 0.0,
    )


@cache
def _busiest_rank(model, pipeline, stages_per_rank):
    """(layers, whether the head is there) of the pipeline rank with the most operations per micro-batch."""
    ranks = [
        (sum(layers for layers, _, _ in stages), any(is_last for _, _, is_last in stages))
        for stages in stages_of_ranks(model.n_layer, pipeline, stages_per_rank)
    ]
    return max(ranks, key=lambda rank: rank[0] * model.layer_flops() + rank[1] * model.head_flops())


@dataclass(frozen=True)
class Assumptions:
    """The assumptions behind a prediction: change one to see its effect."""

    matmul_share: float = MATMUL_SHARE
    attention_share: float = ATTENTION_SHARE
    torch_attention_share: float = TORCH_ATTENTION_SHARE
    memory_passes: float = MEMORY_PASSES
    unfused: float = UNFUSED  # times as many where kernels are not fused
    link_share: float = LINK_SHARE
    # are messages of data and context parallelism hidden behind compute, where the strategy allows it?
    overlap: bool = True
    taken: float = TAKEN_SHARE
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
    context_s: float  # keys and values on their way around the ring, where attention does not hide them
    experts_s: float  # tokens on their way to experts and back
    messages: tuple[Message, ...] = field(default=(), compare=False)

    @cached_property
    def total_s(self) -> float:
        return sum(self.by_part().values())

    def by_part(self) -> dict[str, float]:
        """{part: seconds}."""
        return {name: getattr(self, f"{name}_s") for name in PARTS}

    def sent(self) -> Sent:
        """By a GPU in a step."""
        return sum((message.sent for message in self.messages), Sent())


PARTS = tuple(f.name.removesuffix("_s") for f in fields(StepTime) if f.name != "messages")


def step_time(work: Work, machine: Machine, assumed: Assumptions | None = None) -> StepTime:
    """The StepTime of a Work on a Machine."""
    a, m = assumed or Assumptions(), work.micro_batches
    flop_s, attention_s, low_s = _rates(machine, a, work.torch_attention)
    passes = a.memory_passes * (1.0 if work.fused else a.unfused) * (CASTS if work.low_flops else 1.0)
    byte_s = passes / machine.memory_bytes_per_s
    # of experts that are spread over ranks: a rank with all experts has all tokens, whoever gets them
    more = a.routing - 1
    forward = work.layers_flops + more * work.expert_flops + work.head_flops
    kept_bytes = work.layers_bytes + more * work.expert_bytes + work.around_bytes
    slower_s = work.attention_flops * (attention_s - flop_s)
    faster_s = work.low_flops * (low_s - flop_s)
    products_s = forward * flop_s + slower_s + faster_s
    again_s = work.again_flops * flop_s + work.attention_again * slower_s + work.low_again * faster_s
    forward_s = products_s + kept_bytes * byte_s
    backward_s = 2 * forward_s + again_s + work.again_bytes * byte_s
    launching_s = work.layers * KERNELS * KERNEL_S * (4 if work.again_flops or work.again_bytes else 3)
    late_s = 0.0 if work.recorded else max(0.0, launching_s - forward_s - backward_s)
    sent, waits_s = _waits(work, machine, a, forward_s + late_s / 3, backward_s + late_s * 2 / 3)
    around_s = 3 * (work.head_flops * flop_s + work.around_bytes * byte_s)
    # the bubble is made of layers and of what their micro-batches wait for: the head is on the last stage alone
    idle = work.bubble * (work.idle_share if a.halves_fill else 1.0)
    waited_s = sum(waits_s[axis] for axis in ("tensor", "pipeline", "context", "experts")) / m
    optimizer_s, host_s = work.owned * OPTIMIZER_BYTES / machine.memory_bytes_per_s, 0.0
    if work.offload:  # the host's Adam is taken to be as slow as the link
        copied = sum(message.payload_bytes for message in sent if message.axis == "host")
        optimizer_s, host_s = 0.0, (copied + work.owned * OPTIMIZER_BYTES) / (machine.host_bytes_per_s * a.link_share)
    cast_s = work.cast_bytes / machine.memory_bytes_per_s
    return StepTime(
        compute_s=m * (3 * products_s + again_s),
        memory_s=m * ((3 * kept_bytes + work.again_bytes) * byte_s + cast_s),
        bubble_s=idle * (forward_s + backward_s - around_s + late_s + waited_s),
        optimizer_s=optimizer_s,
        host_s=host_s,
        launch_s=m * late_s,
        messages=tuple(sent),
        **{f"{axis}_s": waits_s[axis] for axis in ("tensor", "pipeline", "data", "context", "experts")},
    )


def _rates(machine, a, torch_attention):
    """Seconds of an operation: in bf16, of attention, in 8 bits."""
    flop_s = 1 / (machine.matmul_flops * a.matmul_share)
    low_s = 1 / (machine.best_fp8_flops * a.matmul_share) if machine.best_fp8_flops else flop_s
    share = a.torch_attention_share if torch_attention else a.attention_share
    return flop_s, 1 / (machine.matmul_flops * share), low_s


def _waits(work, machine, a, forward_s, backward_s):
    """([Message with what a GPU of the machine sends], {axis: seconds of a step that the GPU waits for it})."""
    m, flop_s = work.micro_batches, 1 / (machine.matmul_flops * a.matmul_share)
    compute_s = {"first forward": forward_s, "forwards": m * forward_s}
    compute_s |= {"backwards": (m - 1) * backward_s, "last backward": backward_s}
    sent, waits_s, behind_s = [], defaultdict(float), defaultdict(float)
    for message in work.messages:
        # the busiest rank's experts get more tokens
        payload = message.payload_bytes * (a.routing if message.axis == "experts" else 1)
        if message.axis == "host":
            sent.append(message._replace(sent=Sent(host=payload)))
            continue
        group = Group(machine, message.ranks, message.stride, a.link_share)
        seconds = group.seconds(message.operation, payload, message.calls)
        sent.append(message._replace(payload_bytes=payload, sent=group.sent(message.operation, payload)))
        if a.overlap and message.behind:
            behind_s[message.axis, message.behind] += seconds
        else:
            room_s = message.behind_flops * flop_s if a.overlap else 0.0
            waits_s[message.axis] += _waited(seconds, max(0.0, seconds - room_s), a)
    for (axis, phase), seconds in behind_s.items():
        # what is left of messages that come in pieces: at least one piece, which nothing can hide
        waits_s[axis] += _waited(seconds, max(seconds - compute_s[phase], seconds / work.units), a)
    return sent, waits_s


def _waited(seconds, exposed_s, a):
    """Return the cost of messages: all exposed time, and the part of the rest that their kernels take from products."""
    return exposed_s + (seconds - exposed_s) * a.taken / (1 - a.taken)
