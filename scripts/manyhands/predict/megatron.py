"""The cost of a layout in a program like Megatron-LM or torchtitan: bytes, operations, messages of the busiest GPU.

    split = Split(tensor=8, pipeline=16, data=128, sharing="zero1", stages_per_rank=8)
    held = bytes_held(model, split, batch=2048)    # RankBytes
    work = work_of(model, split, batch=2048)       # Work, for `step_time`

Published runs are predicted by these functions, and layouts are chosen by them: one path. The course's own trainer is
planned by `memory` and `traffic`, which real ranks are held to; it keeps weights and gradients in fp32 and sends more.

Weights are bf16, their gradients are summed in fp32, Adam has fp32 moments and a master copy: 18 bytes per parameter
before anything is shared. Tensor ranks share positions (sequence parallelism). Kernels are fused, so that of a layer
its matrix products' inputs are kept and little else; attention is FlashAttention. Korthikanti et al. 2022
(arXiv:2205.05198), section 4, counts the bytes of a layer; a `Program` of 2021 also keeps attention's scores.
"""

from dataclasses import dataclass
from functools import cache
from math import ceil

from manyhands.predict.memory import RankBytes
from manyhands.predict.models import PlannedModel
from manyhands.predict.step_time import Work
from manyhands.predict.traffic import Message

SHARINGS = ("replicas", "zero1", "zero2", "zero3", "hybrid")  # the simplest first
AXES = ("tensor", "context", "pipeline", "expert")
CHECKPOINTING = ("none", "selective", "block")
SPLIT = ("ZeroBubble",)  # schedules that halve the backward


@dataclass(frozen=True)
class Program:
    """The features of the training program. The defaults are today's; published runs of earlier years have fewer."""

    fused: bool = True  # norms and activations are kernels of their own, written by hand or by a compiler
    flash: bool = True  # attention's scores are never kept, and the masked half is not computed
    sequence_parallel: bool = True
    scattered: bool = True  # tensor ranks share what a stage sends
    overlap: bool = True  # messages of data ranks hide behind compute
    reduce_bytes: int = 4  # of a gradient on its way
    fp8: bool = False  # linear layers multiply in 8 bits
    hides_experts: bool = False  # tokens travel to experts while another micro-batch computes (DualPipe)
    # what it has: axes beside data, ways to share state, and activation checkpointing
    axes: tuple[str, ...] = AXES
    sharings: tuple[str, ...] = SHARINGS
    checkpointings: tuple[str, ...] = CHECKPOINTING


TODAY = Program()


@dataclass(frozen=True)
class Split:
    """The degrees by which GPUs share the work.

    Each of the `data` ranks has its own sequences; with `context`, they share the weights.
    """

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    data: int = 1
    # ranks over which the experts are spread: tensor ranks, which have other experts each instead of a part of all, and
    # neighbours among context and data ranks
    expert: int = 1
    sharing: str = "replicas"
    within: int = 1  # hybrid: ranks that share the weights
    stages_per_rank: int = 1
    schedule: str = "1F1B"  # or ZeroBubble
    micro_batch: int = 1
    checkpointing: str = "none"
    data_outside: bool = False  # data ranks are the outermost axis, not pipeline ranks

    @property
    def gpus(self) -> int:
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def expert_data(self) -> int:
        """The number of context and data ranks among the ranks over which the experts are spread."""
        return max(1, self.expert // self.tensor)

    @property
    def replicas(self) -> int:
        """Ranks with the same dense weights, or shares of them."""
        return self.data * self.context

    def micro_batches(self, batch: int) -> int:
        return batch // self.data // self.micro_batch


# ------------------------------------------------------------------ weights


@cache
def weights_of(model: PlannedModel) -> tuple[int, int, int]:
    """(dense parameters of a layer, those of all its experts, those of the embedding)."""
    layer = model.layer_weights()
    experts = sum(weight.numel for weight in layer if weight.expert)
    return sum(weight.numel for weight in layer) - experts, experts, sum(w.numel for w in model.front_weights())


def layers_of(model: PlannedModel, split: Split) -> tuple[int, bool]:
    """(layers of the busiest rank, whether it has the head).

    Where the layers do not split evenly, first and last rank have fewer, as Llama 3's have: they have the embedding and
    the head.
    """
    return ceil(model.n_layer / split.pipeline), model.n_layer % split.pipeline == 0


def _numbers(model, split):
    """(dense, of experts): parameters of the fullest rank."""
    dense, experts, around = weights_of(model)
    layers, has_head = layers_of(model, split)
    around *= (2 - model.tie if split.pipeline == 1 else 1) * has_head
    return (layers * dense + around) / split.tensor, layers * experts / split.expert


def _sharers(split):
    """(ranks over which state is spread: of dense weights, of experts)."""
    if split.sharing == "replicas":
        return 1, 1
    ranks = split.within if split.sharing == "hybrid" else split.replicas
    return ranks, max(1, ranks // split.expert_data)


# ------------------------------------------------------------------ bytes


def bytes_held(model: PlannedModel, split: Split, batch: int, program: Program = TODAY) -> RankBytes:
    """The RankBytes of the fullest rank, of `batch` sequences per step."""
    numbers, sharers = _numbers(model, split), _sharers(split)
    own = sum(count / ranks for count, ranks in zip(numbers, sharers, strict=True))
    count = sum(numbers)
    whole = 0 if split.sharing in ("zero3", "hybrid") else count  # weights that are always there
    dense, experts, _ = weights_of(model)
    unit = dense / split.tensor + experts / split.expert  # a layer
    gathered = 0 if whole else 2 * unit  # the layer that computes, and the next one
    summed = count if split.sharing in ("replicas", "zero1") else own + unit
    return RankBytes(
        parameters=int(2 * (whole or own)),
        gradients=int(4 * summed),
        optimizer=int(12 * own),
        copies=0,
        unsharded_parameters=int(2 * gathered),
        activations=int(_activations(model, split, batch, program)),
        accumulated_gradients=0,
        workspace=int(_workspace(model, split)),
    )


def _tokens(model, split):
    """Return the number of tokens of a micro-batch on one rank."""
    return split.micro_batch * model.block_size // split.context


@cache
def kept_per_token(model: PlannedModel, tensor: int, program: Program) -> dict[str, float]:
    """{checkpointing: bytes that a layer's forward keeps of a token for the backward}, on one of the tensor ranks.

    none: inputs of norms, of linear layers and of the activation. selective: the norms' outputs and the activation's
    are computed again (with `flash` False: attention's scores alone). block: the layer's input.
    """
    D, routed = model.n_embd, model.routed
    M = model.n_hidden * routed
    share = tensor if program.sequence_parallel else 1
    llama = model.style == "llama"
    attention = 2 * (2 * model.attention_width + 2 * model.kv_width)  # queries and the output, keys, values
    norms = 4 * D + 4 * D  # two inputs, two outputs
    dropout = 0 if llama else 2 * D  # masks of one byte
    low = 1 if program.fp8 else 2  # bytes of what linear layers multiply
    mlp = low * (3 * M if llama else 2 * M)  # what is multiplied with the activation, and its output
    moved = (low + 2) * D * routed if model.n_expert > 1 else 0  # tokens that came, and what goes back
    scores = 0 if program.flash else 5 * model.n_head * model.block_size
    none = (norms + dropout) / share + (attention + mlp + moved + scores) / tensor
    selective = none - scores / tensor
    if program.flash:
        back = 2 * D * routed if model.n_expert > 1 else 0
        selective = (4 * D + dropout) / share + (attention + mlp - low * M + moved - back) / tensor
    return {"none": none, "selective": selective, "block": 2 * D / share}


def _activations(model, split, batch, program):
    """At the fullest moment of the first rank, which has the most micro-batches in flight."""
    tokens, kept = _tokens(model, split), kept_per_token(model, split.tensor, program)
    layers, p, v = layers_of(model, split)[0], split.pipeline, split.stages_per_rank
    m = split.micro_batches(batch)
    stages = v if p == 1 else p if v == 1 else 2 * (p - 1) + (v - 1) * p + 1
    stages = (p + 1) * v if split.schedule in SPLIT else stages  # DualPipe's (DeepSeek-AI 2024, table 2)
    in_flight = layers / v * min(v * m, stages)
    again = kept["none"] if split.checkpointing != "none" else 0.0  # of the layer whose backward runs
    return tokens * (in_flight * kept[split.checkpointing] + again)


def _workspace(model, split):
    """Logits in fp32 and their gradient in bf16, where the first rank has the head as well; others' keys and values."""
    tokens = _tokens(model, split)
    logits = 6 * tokens * model.vocab_size / split.tensor if split.pipeline == 1 else 0.0
    ring = 8 * tokens * model.kv_width / split.tensor if split.context > 1 else 0.0
    routed = 4 * tokens * model.routed * model.n_embd / split.tensor if split.expert > 1 else 0.0
    return logits + ring + routed


# ------------------------------------------------------------------ operations


def work_of(model: PlannedModel, split: Split, batch: int, program: Program = TODAY) -> Work:
    """The Work of the busiest rank in a step of `batch` sequences."""
    layers, has_head = layers_of(model, split)
    tokens, t, m = _tokens(model, split), split.tensor, split.micro_batches(batch)
    attention = layers * tokens * model.attention_flops() / t
    linear = layers * tokens * model.computed_flops() / t - attention
    if program.flash:
        attention /= 2  # the masked half is skipped
    kept = kept_per_token(model, t, program)
    again_flops, again_bytes = 0.0, layers * tokens * (kept["none"] - kept["selective"])
    if split.checkpointing == "block":
        again_flops, again_bytes = linear + attention, layers * tokens * kept["none"]
    elif split.checkpointing == "selective" and not program.flash:
        again_flops = attention
    elif split.checkpointing == "none":
        again_bytes = 0.0
    own = sum(count / ranks for count, ranks in zip(_numbers(model, split), _sharers(split), strict=True))
    around = 4 * tokens * (model.n_embd + model.vocab_size) / t
    head = has_head or split.pipeline == 1
    return Work(
        micro_batches=m,
        layers=layers,
        layers_flops=linear + attention,
        head_flops=tokens * model.head_flops() / t if head else 0.0,
        again_flops=again_flops,
        layers_bytes=layers * tokens * kept["none"],
        again_bytes=again_bytes,
        around_bytes=around if head else 0.0,
        owned=own,
        messages=tuple(one for one in _messages(model, split, m, program) if one.ranks > 1),
        units=layers + 1,
        bubble=(split.pipeline - 1) / split.stages_per_rank,
        idle_share=1 / 3 if split.schedule in SPLIT else 1.0,
        attention_flops=attention if program.flash else 0.0,
        attention_again=1.0 if split.checkpointing == "block" and program.flash else 0.0,
        low_flops=linear if program.fp8 else 0.0,
        low_again=1.0 if split.checkpointing == "block" and program.fp8 else 0.0,
        fused=program.fused,
    )


# ------------------------------------------------------------------ messages


def _messages(model, split, m, program):
    t, layers = split.tensor, layers_of(model, split)[0]
    tokens, again = _tokens(model, split), split.checkpointing == "block"
    stream = 2 * tokens * model.n_embd
    calls = m * layers * (6 if again else 4)
    yield Message("tensor", "all_reduce", calls, calls * stream, t, 1)
    calls = m * 2 * split.stages_per_rank
    shared = t if program.scattered or program.sequence_parallel else 1
    outer = t * split.context * (1 if split.data_outside else split.data)
    yield Message("pipeline", "send", calls, calls * stream / shared, split.pipeline, outer)
    yield from _context(model, split, m, layers, tokens, again)
    yield from _experts(model, split, m, layers, tokens, program, again)
    yield from _data(model, split, m, layers, program)


def _context(model, split, m, layers, tokens, again):
    """Keys and values of all positions, in a ring, hidden behind attention's products; gradients on the way back."""
    payload = 4 * tokens * split.context * model.kv_width / split.tensor
    flops = tokens * model.attention_flops() / split.tensor / 2
    for times, work in ((2 if again else 1, 1), (2, 2)):  # the gradients travel in fp32 with keys and values
        calls = m * layers * times
        yield Message(
            "context", "ring", calls, calls * payload, split.context, split.tensor, "", m * layers * work * flops
        )


def _experts(model, split, m, layers, tokens, program, again):
    calls = m * layers * (6 if again else 4)
    payload = (1.5 if program.fp8 else 2) * tokens * model.routed * model.n_embd / split.tensor
    flops = 3 * m * layers * tokens * model.layer_flops() / split.tensor if program.hides_experts else 0.0
    yield Message("experts", "all_to_all", calls, calls * payload, split.expert, 1, "", flops)


def _data(model, split, m, layers, program):
    """Gradients and weights of data ranks; dense weights and experts have groups of their own."""
    first = split.tensor * (split.pipeline if split.data_outside else 1)
    forward, backward = ("first forward", "last backward") if program.overlap else ("", "")
    units = layers + 1
    for numbers, expert in zip(_numbers(model, split), (1, split.expert_data), strict=True):
        ranks, stride = split.replicas // expert, first * expert
        if not numbers or ranks == 1:
            continue
        if split.sharing == "replicas":
            yield Message("data", "all_reduce", units, numbers * program.reduce_bytes, ranks, stride, backward)
        elif split.sharing == "zero1":
            yield Message("data", "reduce_scatter", units, numbers * program.reduce_bytes, ranks, stride, backward)
            yield Message("data", "all_gather", units, numbers * 2, ranks, stride, forward)
        else:
            inner = max(1, split.within // expert) if split.sharing == "hybrid" else ranks
            backwards = [(m - 1, "backwards"), (1, "last backward")]
            gathers = [(1, "first forward")] if split.sharing == "zero2" else [(m, "forwards"), *backwards]
            for operation, size, phases in (
                ("all_gather", 2, gathers), ("reduce_scatter", program.reduce_bytes, backwards),
            ):  # fmt: skip
                for times, behind in phases:
                    sent = times * units, times * numbers * size
                    yield Message("data", operation, *sent, inner, stride, behind if program.overlap else "")
            if split.sharing == "hybrid":
                rest, far = numbers * program.reduce_bytes / inner, stride * inner
                yield Message("data", "all_reduce", units, rest, ranks // inner, far, backward)
