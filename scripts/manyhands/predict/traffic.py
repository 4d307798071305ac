"""Count a rank's communication in one training step, by formula: operations, calls and payload bytes.

    messages(model, layout, options, layers=32)    # [Message] on every axis of a plan, for `step_time`
    per_step(config, layout, options)              # {"all_gather": Traffic(calls, payload_bytes)}, as `wire` counts

A step here is forward, backward and `optimizer.step()`. Beside it the trainer sends two single numbers, the mean loss
and, where gradients are sharded, their norm. A payload is the whole tensor that a collective is about (see `wire`);
what then goes over the wires depends on the algorithm: in a ring 2 (n-1)/n of it for an all-reduce, (n-1)/n for the
others.

Messages of data ranks are held to real ranks by tests, to the call and the byte; those of the other axes to counts by
hand.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from manyhands.config.layout import SPLIT_BACKWARD, records_graph, stage_owners
from manyhands.config.strategies import STRATEGIES
from manyhands.predict.activation_memory import ID_BYTES, PRECISION_BYTES, sequences_at_once, stream_bytes, weight_bytes
from manyhands.predict.machines import Sent
from manyhands.predict.memory import fullest_share, padded, storage_of
from manyhands.predict.models import PlannedModel, model_of, share_of
from manyhands.predict.program import TRAIN_PY, Program

FIRST_BUCKET, LATER_BUCKETS = 2**20, 25 * 2**20  # bytes at which DDP closes a bucket (torch 2.13's defaults)


class Message(NamedTuple):
    """Collectives of one kind in a step, of one rank, in a group of `ranks` ranks that are `stride` apart."""

    axis: str  # tensor, pipeline, context, experts, data or host
    operation: str
    calls: int
    payload_bytes: float  # of all calls together
    ranks: int
    stride: int
    # what may hide it: a step's "first forward", its "forwards", "backwards" without the last, or "last backward"
    behind: str = ""
    behind_flops: float = 0.0  # operations of attention that may hide it
    sent: Sent = Sent()  # by a GPU of a machine: `step_time` knows


@dataclass(frozen=True)
class Traffic:
    """Calls of one collective operation, and their payloads together in bytes."""

    calls: int
    payload_bytes: int


def per_step(config, layout, options) -> dict[str, Traffic]:
    """{operation: Traffic} of one rank in one step: strategies ddp, zero1 and fsdp. Nothing is allocated.

    In the second step DDP, and zero1 with it, also agrees on the order of its buckets: two broadcasts of a few hundred
    bytes, not counted here. Of `all_reduce`, auto is taken as on CPUs: one flat vector (see `ddp.FlatReplicas`). With
    expert ranks `all_to_all` is the mean over the ranks: the router decides what each of them receives. Raises
    ValueError for other strategies, and with tensor, pipeline or context ranks.
    """
    strategy, plain = options.parallel.strategy, layout.tensor == layout.pipeline == layout.context == 1
    registered = STRATEGIES[strategy]
    if not plain or registered.dp_mode not in OF_DATA:
        raise ValueError(
            f"there is no formula for strategy={strategy} with tensor={layout.tensor}, pipeline={layout.pipeline},"
            f" and context={layout.context}; use ddp, zero1 or fsdp on data ranks alone"
        )
    flat = "all_reduce" in registered.options and options.parallel.all_reduce != "buckets"
    calls, payloads, model = Counter(), Counter(), model_of(config)
    sent = _experts(model, layout, options, config.n_layer, TRAIN_PY) if layout.expert > 1 else ()
    for message in (*_data(model, layout, options, TRAIN_PY, flat), *sent):
        calls[message.operation] += message.calls
        payloads[message.operation] += message.payload_bytes
    return {operation: Traffic(calls[operation], payloads[operation]) for operation in calls}


def messages(model: PlannedModel, layout, options, layers: int, program: Program = TRAIN_PY) -> list[Message]:
    """Every Message of a step on GPUs, where DDP sends buckets unless a CUDA graph is recorded, of a rank that runs
    `layers` layers.

    Tensor ranks send in low precision; what stages send goes in fp32, and so do gradients by default.
    """
    found = []
    for axis, of_axis in OF_AXIS.items():
        if getattr(layout, axis) > 1:
            found += of_axis(model, layout, options, layers, program)
    flat = options.parallel.all_reduce
    flat = flat == "flat" or (flat == "auto" and not program.master and records_graph(model, layout, options))
    return found + [message for message in _data(model, layout, options, program, flat) if message.ranks > 1]


def forwards(layout, options) -> int:
    """Forwards of a layer per micro-batch: block checkpointing repeats it, for each half of a split backward."""
    if options.parallel.activation_checkpointing != "block":
        return 1
    return 3 if layout.pipeline > 1 and options.parallel.schedule in SPLIT_BACKWARD else 2


def tokens_at_once(model: PlannedModel, layout, options) -> int:
    """Return the tokens of a micro-batch on one rank: context ranks share the positions."""
    return sequences_at_once(layout, options) * model.block_size // layout.context


def spreads_experts(model: PlannedModel, layout) -> bool:
    """Return whether ranks share the experts out, so that one of them may get more tokens than the others."""
    return layout.expert > 1 or (model.experts > 1 and layout.tensor > 1)


def _tensor(model, layout, options, layers, program):
    """Two all-reduces per layer and forward, and two in the backward; or sequence parallelism's pairs instead."""
    calls = layers * 2 * (forwards(layout, options) + 1) * layout.micro_batches
    payload = tokens_at_once(model, layout, options) * model.n_embd * _low(options)
    yield Message("tensor", "all_reduce", calls, calls * payload, layout.tensor, 1)


def _pipeline(model, layout, options, layers, program):
    """The stream to the next stage, and its gradient back: none of it is taken to be hidden."""
    calls = 2 * layout.stages_per_rank * layout.micro_batches
    payload = tokens_at_once(model, layout, options) * model.n_embd * stream_bytes(options)
    payload /= layout.tensor if program.scattered else 1
    stride = layout.tensor * (layout.context if program.data_outside else layout.replicate * layout.shard)
    yield Message("pipeline", "send", calls, calls * payload, layout.pipeline, stride)
    first, *_, last = stage_owners(options.parallel.schedule, layout.pipeline, layout.stages_per_rank)
    if model.tie and first != last:  # the halves of the gradient of what both ends hold
        held, _ = padded([model.front_weights()[0].of_tensor_rank(layout.tensor)], layout)
        yield Message("pipeline", "all_reduce", 1, held * weight_bytes(options), 2, stride * (layout.pipeline - 1))


def _context(model, layout, options, layers, program):
    """Keys and values, and with them their gradients, on their way around the ring of context ranks.

    Each rank computes with the block that it has while the next one arrives (Liu et al. 2023, Ring Attention,
    arXiv:2310.01889): what takes longer than attention's products is waited for. With zig-zag shares, of the first and
    the last positions together, all ranks have as much to do under the causal mask.
    """
    low, times = _low(options), forwards(layout, options)
    kv_width = share_of(model, 1, layout.tensor).kv_width
    numbers = sequences_at_once(layout, options) * model.block_size * 2 * kv_width / layout.tensor  # of one layer
    flops = tokens_at_once(model, layout, options) * model.attention_flops() / layout.tensor / 2  # half is masked
    # torch sums gradients of K and V in fp32 on their way
    for itemsize, passes, work in ((low, times, times), (low + weight_bytes(options), 1, 2)):
        calls = layers * passes * layout.micro_batches
        behind = layers * layout.micro_batches * work * flops
        yield Message("context", "ring", calls, calls * numbers * itemsize, layout.context, layout.tensor, "", behind)


def _experts(model, layout, options, layers, program):
    """All-to-alls that send tokens to their experts and back, in the forward and in the backward.

    In `train.py` one more, before each forward, says how many will come for each expert.
    """
    calls = layers * 2 * (forwards(layout, options) + 1) * layout.micro_batches
    # positions are split over the tensor ranks, or not; in `train.py` each of them sends for its own experts
    share = layout.tensor if options.parallel.sequence_parallel or model.stacks_experts else 1
    tokens, low = tokens_at_once(model, layout, options), 1.5 if program.fp8 else _low(options)
    payload, behind = tokens * model.routed * model.n_embd * low / share, 0.0
    if program.hides_experts:
        behind = 3 * layout.micro_batches * layers * tokens * model.layer_flops() / layout.tensor
    yield Message("experts", "all_to_all", calls, calls * payload, layout.expert, layout.tensor, "", behind)
    if model.stacks_experts:
        calls = layers * forwards(layout, options) * layout.micro_batches
        payload = calls * model.experts // layout.tensor * ID_BYTES
        yield Message("experts", "all_to_all", calls, payload, layout.expert, layout.tensor)


def _low(options):
    return PRECISION_BYTES[options.train.precision]


# {axis of a Layout: its messages}; those of data ranks come on top
OF_AXIS = {"tensor": _tensor, "pipeline": _pipeline, "context": _context, "expert": _experts}

# ------------------------------------------------------------------ data parallelism


def _data(model, layout, options, program, flat=False):
    """Messages of data parallelism; dense weights and experts have groups of their own."""
    storage = storage_of(layout, options, program)
    found = OF_DATA[storage.dp_mode](model, layout, storage, flat)
    if layout.expert > 1 and model.stacks_experts:  # left out by DDP and FSDP: see `finish_expert_gradients`
        own = [weight.numel * storage.size for weight in fullest_share(model, layout).weights if weight.expert]
        ranks = layout.shard * layout.replicate // layout.expert
        if ranks > 1:
            found = [*found, Message("data", "all_reduce", len(own), sum(own), ranks, layout.expert * layout.tensor)]
    return found


def _degrees(model, layout):
    """Over how many ranks what DDP or FSDP sums up is spread: 1 for dense weights, and the experts' degree."""
    return [1] if model.stacks_experts else sorted({1, layout.expert})


def _groups(layout, expert, program):
    """((ranks, stride) that shard, that replicate) a weight of which `expert` ranks each have another one."""
    nearest = layout.tensor * (layout.pipeline if program.data_outside else 1)
    if layout.shard > 1:
        return (max(1, layout.shard // expert), nearest * expert), (layout.replicate, nearest * layout.shard)
    return (1, 1), (layout.replicate // expert, nearest * expert)


@cache
def _replicas(model, layout, storage, flat):
    """Gradients, once per step, in DDP's buckets, or on CPUs in one flat vector; one rank alone has nothing to add up,
    but DDP does not look. A pipeline's are summed in pieces when all micro-batches are done.

    zero1: after the update each rank sends the weights that it has updated, and nothing runs meanwhile: 3 P together,
    where the ideal is 2 P. With a master copy gradients are reduced to the rank that updates them, and all
    gather the weights in low precision while the next forward runs.
    """
    found, weights, program = [], fullest_share(model, layout).weights, storage.program
    hides = program.overlap and (program.overlap_in_pipeline or layout.pipeline == 1) and not flat
    spread_state = storage.dp_mode == "zero1 of a master copy"
    for expert in _degrees(model, layout):
        own = [weight.numel * storage.size for weight in weights if _spread(weight, layout) == expert]
        reduced = storage.reduced / storage.size if expert == 1 else 1  # experts are summed as they are
        (_, group), behind = _groups(layout, expert, program), "last backward" * hides
        buckets = [sum(own)] * (layout.world_size > 1) if flat else buckets_of(own)
        if buckets:
            operation, payload = "reduce_scatter" if spread_state else "all_reduce", int(sum(buckets) * reduced)
            found.append(Message("data", operation, len(buckets), payload, *group, behind))
        if buckets and spread_state:
            payload = sum(buckets) // storage.size * storage.low
            found.append(Message("data", "all_gather", len(buckets), payload, *group, "first forward" * hides))
        if storage.dp_mode == "zero1":
            found.append(Message("data", "broadcast", min(group[0], len(own)), sum(own), *group))
    return found


def buckets_of(sizes: list[int]) -> list[int]:
    """Bytes of DDP's buckets from the third step on: filled in the order in which gradients come, last layers first.

    A bucket is closed by the gradient with which it reaches its limit (Li et al. 2020, section 3.2.3). Gradients come
    in the order of the backward: the weights reversed, of a linear layer the bias first.
    """
    buckets, limit, fill = [], FIRST_BUCKET, 0
    for n_bytes in reversed(sizes):
        fill += n_bytes
        if fill >= limit:
            buckets.append(fill)
            limit, fill = LATER_BUCKETS, 0
    return [*buckets, fill] if fill else buckets


@cache
def _fsdp(model, layout, storage, flat):
    """Per unit: gathers in the precision of the products, and sums of gradients as `reduce_dtype` says.

    Each weight is cut along its first dim and padded, so that all ranks send alike. Units are gathered for the forward
    and, as they are resharded after it, again for the backward, in each micro-batch; the root stays, since the backward
    begins with it. Where units are kept, all stay to the end of the step. Gradients are summed in the last micro-batch
    alone. Between replicas (axis replicate) the shards of the sums are added up once more.

    Not counted: with several micro-batches and a wrapping so fine that nothing is left to the root (size:1), torch 2.13
    gathers the last unit once more.
    """
    found, m, hides = [], layout.micro_batches, storage.program.overlap
    for expert in _degrees(model, layout):
        shards, replicas = _groups(layout, expert, storage.program)
        inner, roots = [], []  # (how often, numbers)
        for units in fullest_share(model, layout).units(storage.wrapping):
            for unit in units:
                own = [weight for weight in unit.weights if _spread(weight, layout) == expert]
                if own:
                    (roots if unit is units[-1] else inner).append((unit.times, padded(own, layout)[1]))
        calls, numbers = _total(inner + roots)
        if shards[0] > 1 and storage.keeps_unsharded:
            found.append(Message("data", "all_gather", calls, numbers * storage.low, *shards, "first forward" * hides))
        elif shards[0] > 1:
            gathers = (
                (calls, numbers, m, "forwards"),
                (*_total(inner), m - 1, "backwards"),
                (*_total(inner), 1, "last backward"),
            )
            for count, gathered, times, behind in gathers:
                if count * times:
                    payload = times * gathered * storage.low
                    found.append(Message("data", "all_gather", times * count, payload, *shards, behind * hides))
        reduced = storage.reduced if expert == 1 else storage.size
        for times, behind in ((m - 1, "backwards"), (1, "last backward")):
            if shards[0] > 1 and times and (storage.program.sums_each or behind == "last backward"):
                sent = times * calls, times * numbers * reduced
                found.append(Message("data", "reduce_scatter", *sent, *shards, behind * hides))
        if replicas[0] > 1:
            payload = numbers // shards[0] * reduced
            found.append(Message("data", "all_reduce", calls, payload, *replicas, "last backward" * hides))
    return found


# {dp_mode of a strategy: (model, layout, storage, whether gradients go as one flat vector) -> [Message]}
OF_DATA = {"replicas": _replicas, "zero1": _replicas, "fsdp": _fsdp}
OF_DATA |= {"replicas of a master copy": _replicas, "zero1 of a master copy": _replicas}


def _spread(weight, layout):
    """Ranks of which each has another expert in this weight's place; 1 for a dense one."""
    return layout.expert if weight.expert else 1


def _total(units):
    return sum(times for times, _ in units), sum(times * numbers for times, numbers in units)
