"""What a rank hands to the library in one training step, by formula: calls and payload bytes, as `wire.watch()` counts them.

    per_step(config, layout, options)       # {"all_gather": Traffic(calls=9, payload_bytes=...), "reduce_scatter": ...}
    ideal_volume(stage=3, num_params=P)     # 3 P numbers: what the method needs, whatever a library does

A step here is forward, backward and `optimizer.step()`. Beside it the trainer sends two single numbers, the mean loss and,
where gradients are sharded, their norm. A payload is the whole tensor that a collective is about (see `wire`); what then
goes over the wires depends on the algorithm: in a ring 2 (n-1)/n of it for an all-reduce, (n-1)/n for the others.
"""

from dataclasses import dataclass
from math import ceil

import torch

from manyhands.gpt.model import GPT
from manyhands.parallel.fsdp import parameters_by_unit
from manyhands.predict.precision import PRECISION_BYTES, weight_bytes

FIRST_BUCKET, LATER_BUCKETS = 2**20, 25 * 2**20  # bytes at which DDP closes a bucket (torch 2.13's defaults)


@dataclass(frozen=True)
class Traffic:
    """Calls of one collective operation, and their payloads together in bytes."""

    calls: int
    payload_bytes: int


def ideal_volume(stage, num_params):
    """Numbers per step and rank that a stage of ZeRO needs to move; 0 is plain data parallelism. ValueError for another.

    Rajbhandari et al. 2020, section 7, counts a reduce-scatter or an all-gather of P numbers as P (a ring sends (n-1)/n of
    it), and an all-reduce, which is one of each, as 2 P. Stages 1 and 2 reduce-scatter gradients and all-gather updated
    weights: 2 P. Stage 3 gathers the weights for the forward and again for the backward: 3 P.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage} is none of ZeRO's; use 0 (nothing partitioned), 1, 2 or 3")
    return (3 if stage == 3 else 2) * num_params


def per_step(config, layout, options):
    """{operation: Traffic} of one rank in one step: strategies ddp, zero1 and fsdp. Nothing is allocated.

    In the second step DDP, and zero1 with it, also agrees on the order of its buckets: two broadcasts of a few hundred bytes,
    not counted here. Raises ValueError for other strategies, and with tensor or pipeline ranks.
    """
    kinds = {"ddp": _ddp, "zero1": _zero1, "fsdp": _fsdp}
    strategy = options.parallel.strategy
    if strategy not in kinds or layout.tensor > 1 or layout.pipeline > 1:
        raise ValueError(
            f"there is no formula for strategy={strategy} with tensor={layout.tensor} and pipeline={layout.pipeline};"
            " use ddp, zero1 or fsdp, without tensor and pipeline ranks"
        )
    with torch.device("meta"):
        model = GPT(config)
    payloads = kinds[strategy](model, layout, options)
    return {op: Traffic(len(members), sum(members)) for op, members in payloads.items() if members}


def _ddp(model, layout, options):
    """Gradients, once per step: on CPUs in one flat vector (see `ddp.FlatReplicas`), else in DDP's buckets; which, options.all_reduce says.

    `auto` is taken as on CPUs. One rank alone has nothing to add up, but DDP does not look.
    """
    if options.parallel.all_reduce == "buckets":
        return {"all_reduce": _buckets(model, weight_bytes(options))}
    whole = sum(p.numel() for p in model.parameters()) * weight_bytes(options)
    return {"all_reduce": [whole] if layout.world_size > 1 else []}


def _zero1(model, layout, options):
    """DDP's buckets, and after the update each weight from the rank that has updated it: 3 P, where the ideal is 2 P."""
    size = weight_bytes(options)
    return {
        "all_reduce": _buckets(model, size),
        "broadcast": [p.numel() * size for p in model.parameters()],
    }


def _buckets(model, size):
    """Bytes of DDP's buckets from the third step on: filled in the order in which gradients come, last layers first.

    A bucket is closed by the gradient with which it reaches its limit (Li et al. 2020, section 3.2.3).
    """
    buckets, limit, fill = [], FIRST_BUCKET, 0
    for n_bytes in (p.numel() * size for p in _as_gradients_come(model)):
        fill += n_bytes
        if fill >= limit:
            buckets.append(fill)
            limit, fill = LATER_BUCKETS, 0
    return [*buckets, fill] if fill else buckets


def _as_gradients_come(model):
    """The parameters in the order of the backward: the modules reversed, of a linear layer the bias first."""
    return reversed(list(model.parameters()))


def _fsdp(model, layout, options):
    """Per unit: gathers in the precision of the products, and sums of gradients in that of the weights.

    Each weight is cut along its first dim and padded, so that all ranks send alike. Units are gathered for the forward and,
    as they are let go after it, again for the backward, in each micro-batch; the root stays, since the backward begins with
    it. Under grad_op all stay to the end of the step. Gradients are summed in the last micro-batch alone. Between replicas
    (axis replicate) the shards of the sums are added up once more.

    Not counted: with several micro-batches and a wrapping so fine that nothing is left to the root (size:1), torch 2.13
    gathers the last unit once more.
    """
    low, size, shard = PRECISION_BYTES[options.train.precision], weight_bytes(options), layout.shard
    *units, root = [
        sum(ceil(p.shape[0] / shard) * shard * p[0].numel() for p in part)
        for part in parameters_by_unit(model, options.parallel.wrapping)
    ]
    members = [count for count in [*units, root] if count]
    if options.parallel.sharding == "grad_op":
        gathers = members
    else:
        gathers = [*units, *units, *([root] if root else [])] * layout.micro_batches
    return {
        "all_gather": [count * low for count in gathers] if shard > 1 else [],
        "reduce_scatter": [count * size for count in members] if shard > 1 else [],
        "all_reduce": [count // shard * size for count in members] if layout.replicate > 1 else [],
    }
