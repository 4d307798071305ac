"""What a GPU does in a step under a layout of the trainer: the `Work` that `step_time` needs, from the course's formulas.

work = planned_work(model, layout, options, sharing="zero3")
"""

from functools import lru_cache

from manyhands.config.layout import SPLIT_BACKWARD
from manyhands.predict.activation_memory import AROUND, rank_terms, sequences_at_once
from manyhands.predict.plan_memory import rank_parameters, stages_of_ranks
from manyhands.predict.planned_model import share_of
from manyhands.predict.precision import PRECISION_BYTES, weight_bytes
from manyhands.predict.work import Work

CHEAP = ("norms", "gelu", "mlp down")  # what selective recomputation repeats: norms, GELU and its output
OF_EXPERTS = ("mlp up", "gelu", "mlp down", "routing")  # what grows with the tokens that a rank's experts get


def planned_work(model, layout, options, sharing):
    """The Work of the busiest GPU: of a pipeline the rank whose layers, with the head if it is the last, take longest.

    Without a pipeline a rank runs all layers. In low precision are the products and what tensor ranks send; sums of
    gradients and what stages send are in fp32, as the trainer has them.
    """
    parallel, low = options.parallel, PRECISION_BYTES[options.train.precision]
    size, tensor = weight_bytes(options), layout.tensor
    sequences = sequences_at_once(layout, options)
    tokens = sequences * model.block_size // layout.context
    layers, has_head = busiest_rank(model, layout.pipeline, layout.stages_per_rank)
    terms = rank_terms(share_of(model, layout.context), layout, options)
    a_layer = sum(kept for term, kept in terms.items() if term not in AROUND) / model.n_layer
    cheap = sum(terms[term] for term in CHEAP) / model.n_layer
    flops = layers * tokens * model.computed_flops() / tensor
    again = {"none": 0.0, "selective": cheap, "block": a_layer}[parallel.activation_checkpointing]
    parameters, expert_parameters = rank_parameters(
        model, tensor, layout.pipeline, layout.stages_per_rank, layout.expert
    )
    whole = sharing in ("replicas", "zero1")
    split = layout.pipeline > 1 and parallel.schedule in SPLIT_BACKWARD
    repeats = 2 if split else 1  # torch recomputes a layer for each of the two halves of its backward
    forwards = 1 + repeats * (parallel.activation_checkpointing == "block")
    routed = model.routed if layout.expert > 1 else 1.0  # summed over tensor ranks before or after tokens come back
    keys_values = sequences * model.block_size * 2 * model.kv_width / tensor  # numbers in one layer, of whole sequences
    return Work(
        tensor=tensor,
        pipeline=layout.pipeline,
        replicate=layout.replicate,
        shard=layout.shard,
        micro_batches=layout.micro_batches,
        stages_per_rank=layout.stages_per_rank,
        sharing=sharing,
        layers=layers,
        layers_flops=flops,
        head_flops=tokens * model.head_flops() / tensor if has_head else 0.0,
        again_flops=flops * repeats if parallel.activation_checkpointing == "block" else 0.0,
        layers_bytes=layers * a_layer,
        again_bytes=layers * again * repeats,
        around_bytes=sum(terms[term] for term in AROUND) if has_head else 0.0,
        # two in the forward, two in the backward; recomputed layers send theirs again
        tensor_calls=layers * 2 * (forwards + 1) if tensor > 1 else 0,
        tensor_payload=tokens * model.n_embd * low * (1 + routed) / 2,
        stream_bytes=tokens * model.n_embd * size,
        stream_scattered=False,
        parameters=parameters,
        units=model.n_layer // layout.pipeline + 1,
        gather_bytes=low,
        gradient_bytes=size,
        # autocast reads the weights in fp32 and writes them in low precision, once per forward
        cast_bytes=parameters * (size + low) if whole else 0.0,
        # gradients of a pipeline's replicas are averaged when all micro-batches are done
        overlap=not (layout.pipeline > 1 and whole),
        idle_share=1 / 3 if split else 1.0,
        context=layout.context,
        attention_flops=layers * tokens * model.attention_flops() / tensor,
        ring_payload=keys_values * low,
        ring_back_payload=keys_values * (low + size),  # torch sums gradients of K and V in fp32 on their way
        forwards=forwards,
        expert=layout.expert,
        expert_parameters=expert_parameters,
        expert_flops=layers * tokens * model.expert_flops() / tensor,
        expert_bytes=layers * sum(terms.get(term, 0.0) for term in OF_EXPERTS) / model.n_layer,
        # to the experts and back, in the forward and in the backward; positions are split over the tensor ranks, or not
        exchange_calls=layers * 2 * (forwards + 1),
        exchange_payload=tokens * model.routed * model.n_embd * low / (tensor if parallel.sequence_parallel else 1),
    )


@lru_cache(maxsize=4096)
def busiest_rank(model, pipeline, stages_per_rank):
    """(layers, whether the head is there) of the pipeline rank with the most operations per micro-batch."""
    ranks = [
        (sum(layers for layers, _, _ in stages), any(is_last for _, _, is_last in stages))
        for stages in stages_of_ranks(model.n_layer, pipeline, stages_per_rank)
    ]
    return max(ranks, key=lambda rank: rank[0] * model.layer_flops() + rank[1] * model.head_flops())
