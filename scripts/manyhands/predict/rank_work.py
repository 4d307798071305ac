"""What a GPU does in a training step: what `step_time` turns into seconds on a machine.

work = planned_work(model, layout, options, sharing="zero3")     # a Work, by the course's formulas
"""

from dataclasses import dataclass
from functools import cache

from manyhands.config.layout import SPLIT_BACKWARD
from manyhands.predict.activation_memory import AROUND, PRECISION_BYTES, rank_terms, weight_bytes
from manyhands.predict.memory import MOMENTS, rank_parameters, state_of_rank
from manyhands.predict.models import PlannedModel, share_of
from manyhands.predict.pipeline_schedules import stages_of_ranks
from manyhands.predict.traffic import Message, forwards, messages, tokens_at_once

CHEAP = ("norms", "gelu", "mlp down")  # what selective checkpointing repeats: norms, GELU and its output
OF_EXPERTS = ("mlp up", "gelu", "mlp down", "routing")  # what grows with the tokens that a rank's experts get


@dataclass(frozen=True)
class Work:
    """What the busiest GPU does in one step."""

    micro_batches: int
    layers: int  # of this GPU
    # of one micro-batch, on this GPU: operations of the forward, of all its layers and of the head
    layers_flops: float
    head_flops: float
    again_flops: float  # that activation checkpointing repeats
    # bytes that its forward leaves for its backward; that checkpointing writes once more; of its layers, and around
    # them
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


def planned_work(model: PlannedModel, layout, options, sharing: str) -> Work:
    """The Work of the busiest GPU: of a pipeline the rank whose layers, with the head if it is the last, take longest.

    Without a pipeline a rank runs all layers. `sharing` is a key of `layouts.SHARINGS`.
    """
    parallel, low, size = options.parallel, PRECISION_BYTES[options.train.precision], weight_bytes(options)
    tensor, m = layout.tensor, layout.micro_batches
    tokens = tokens_at_once(model, layout, options)
    layers, has_head = _busiest_rank(model, layout.pipeline, layout.stages_per_rank)
    terms = rank_terms(share_of(model, layout.context), layout, options)
    a_layer = sum(kept for term, kept in terms.items() if term not in AROUND) / model.n_layer
    cheap = sum(terms[term] for term in CHEAP) / model.n_layer
    flops = layers * tokens * model.computed_flops() / tensor
    again = {"none": 0.0, "selective": cheap, "block": a_layer}[parallel.activation_checkpointing]
    split = layout.pipeline > 1 and parallel.schedule in SPLIT_BACKWARD
    sent = messages(model, layout, options, layers)
    units = max((message.calls for message in sent if message.operation in ("reduce_scatter", "all_reduce") and
                 message.axis == "data"), default=1)  # fmt: skip
    owned = state_of_rank(model, layout, options).optimizer / (MOMENTS[options.optimizer.name] * size)
    if sharing == "offload":
        # FSDP copies fp32 weights up for each forward and backward, and casts them there; gradients come down once
        moved = owned * size * (2 * m + 1)
        sent.append(Message("host", "copy", units * (2 * m + 1), moved, 1, 1))
    spread = layout.expert > 1
    return Work(
        micro_batches=m,
        layers=layers,
        layers_flops=flops,
        head_flops=tokens * model.head_flops() / tensor if has_head else 0.0,
        again_flops=flops * (forwards(layout, options) - 1),
        layers_bytes=layers * a_layer,
        again_bytes=layers * again * (2 if split else 1),
        around_bytes=sum(terms[term] for term in AROUND) if has_head else 0.0,
        owned=owned,
        messages=tuple(sent),
        units=units,
        bubble=(layout.pipeline - 1) / layout.stages_per_rank,
        idle_share=1 / 3 if split else 1.0,
        # autocast reads the weights in fp32 and writes them in low precision, once per forward
        cast_bytes=rank_parameters(model, layout)[0] * (size + low) if sharing in ("replicas", "zero1") else 0.0,
        offload=sharing == "offload",
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
