"""The layouts that a program like Megatron-LM or torchtitan can run, searched: the fastest of each way to split GPUs.

    found = search(model, machine, gpus=16384, batch=2048)
    found.plans                                   # {name of a way to split: Timed}, those that fit
    found.refused                                 # [(name, why)]

Tried are tensor ranks within a node; context ranks, a power of two, across nodes as well; pipelines of up to a stage
per layer; data ranks that share nothing, the optimizer (zero1), gradients too (zero2), or weights too (zero3, and
hybrid within a node), with pipeline ranks outside them or inside; experts over some of these ranks. Of activation
checkpointing the least that fits is taken: it recomputes the least.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil

from manyhands.predict.layouts import divisors
from manyhands.predict.machines import Machine
from manyhands.predict.megatron import TODAY, Program, Split, bytes_held, work_of
from manyhands.predict.memory import RankBytes
from manyhands.predict.models import PlannedModel
from manyhands.predict.step_time import StepTime, step_time

RESERVE = 0.06  # of a GPU's memory, for what is not modelled: the context, buffers of NCCL, what the allocator wastes
SHORTEST = 4096  # positions that a context rank gets at least
MOST_TOKENS, MOST_MICRO_BATCH = 65_536, 32  # of a micro-batch: what is larger saves no time
GB = 1e9


@dataclass(frozen=True)
class Timed:
    """A layout that fits, and what it is predicted to take."""

    split: Split
    held: RankBytes
    time: StepTime


@dataclass
class Found:
    """The result of `search`."""

    plans: dict[str, Timed] = field(default_factory=dict)
    refused: list[tuple[str, str]] = field(default_factory=list)
    tried: int = 0


def name_of(split: Split) -> str:
    """A way to split for people: "zero1 128 x tensor 8 x pipeline 16"; 1 is left out."""
    data = f"{split.replicas // split.within} x {split.within}" if split.sharing == "hybrid" else str(split.data)
    shared = split.data > 1 or (split.context > 1 and split.sharing != "replicas")
    parts = [f"{split.sharing} {data}"] * shared
    parts += [f"{axis} {n}" for axis in ("context", "tensor", "pipeline") if (n := getattr(split, axis)) > 1]
    name = " x ".join(parts) or "one GPU"
    return f"{name}, experts over {split.expert}" if split.expert > 1 else name


def search(
    model: PlannedModel, machine: Machine, gpus: int, batch: int, program: Program = TODAY, contexts: list[int] = ()
) -> Found:
    """The fastest layout of each way to split `gpus` GPUs, for `batch` sequences per step."""
    found, room = Found(), machine.memory_bytes * (1 - RESERVE)
    for axes in _axes(model, machine, gpus, program, contexts or _contexts(model, gpus)):
        name = name_of(axes)
        if batch % axes.data:
            found.refused.append((name, f"{batch} sequences do not split over {axes.data} data ranks"))
            continue
        best, least = None, None
        for split in _variants(model, axes, batch):
            for kind in program.checkpointings:
                one = _replaced(split, checkpointing=kind)
                found.tried += 1
                held = bytes_held(model, one, batch, program)
                least = min(least or held, held, key=lambda held: held.on_gpu)
                if held.on_gpu <= room:
                    time = step_time(work_of(model, one, batch, program), machine)
                    if best is None or time.total_s < best.time.total_s:
                        best = Timed(one, held, time)
                    break
        if best is not None:
            found.plans[name] = best
        elif least is not None:
            found.refused.append((name, _does_not_fit(machine, room, least)))
        else:
            why = f"{batch // axes.data} sequences per data rank are no multiple of {axes.pipeline} micro-batches"
            found.refused.append((name, why))
    return found


def _does_not_fit(machine, room, held):
    return (
        f"needs {held.on_gpu / GB:.1f} GB per GPU at least ({held.largest_kinds()});"
        f" {machine.memory_bytes / GB:.0f} GB leave {room / GB:.1f} after a reserve of {RESERVE:.0%}"
    )


def _contexts(model, gpus):
    degrees = [1]
    while model.block_size // (ranks := 2 * degrees[-1]) >= SHORTEST and gpus % ranks == 0:
        degrees.append(ranks)
    return degrees


def _axes(model, machine, gpus, program, contexts) -> Iterator[Split]:
    """Every product of axes with every way to share, micro-batches and stages left open."""
    per_node = min(machine.gpus_per_node, gpus)
    for context in contexts if "context" in program.axes else [1]:
        for tensor in divisors(per_node) if "tensor" in program.axes else [1]:
            if model.n_head % tensor or model.n_kv_head % tensor or gpus % (tensor * context):
                continue
            for pipeline in divisors(gpus // tensor // context) if "pipeline" in program.axes else [1]:
                if pipeline > model.n_layer:
                    break
                data = gpus // tensor // context // pipeline
                for sharing in _sharings(program, pipeline, data * context):
                    within = per_node // tensor
                    if sharing == "hybrid" and not (1 < within < data * context and data * context % within == 0):
                        continue
                    for expert in _experts(model, program, sharing, data * context, tensor, per_node):
                        yield Split(
                            tensor, context, pipeline, data, expert, sharing, within if sharing == "hybrid" else 1
                        )


def _sharings(program, pipeline, replicas):
    if replicas == 1:
        return ("replicas",)
    # stages would gather their weights for each micro-batch
    return [name for name in program.sharings if pipeline == 1 or name not in ("zero3", "hybrid")]


def _experts(model, program, sharing, replicas, tensor, per_node):
    """Over how many ranks the experts are spread: as few as tensor ranks, within a node, over nodes."""
    if model.n_expert == 1:
        return [1]
    fit = [n for n in divisors(model.n_expert) if n % tensor == 0 and replicas % (n // tensor) == 0]
    if sharing == "hybrid" or "expert" not in program.axes:
        return fit[:1]
    return [n for n in fit if n == fit[0] or n >= min(per_node, fit[-1])]


def _variants(model, axes, batch) -> Iterator[Split]:
    """By micro-batch, stages per rank, and which of data and pipeline ranks are the outer ones."""
    own, layers = batch // axes.data, ceil(model.n_layer / axes.pipeline)
    share = model.block_size // axes.context
    outer = (False, True) if axes.pipeline > 1 and axes.data > 1 and axes.tensor * axes.context < 8 else (False,)
    for size in divisors(own):
        if size > 1 and (size > MOST_MICRO_BATCH or size * share > MOST_TOKENS):
            break
        for stages in divisors(layers) if axes.pipeline > 1 else (1,):
            if stages > 1 and own // size % axes.pipeline:
                continue  # an interleaved schedule takes micro-batches in rounds
            for data_outside in outer:
                yield _replaced(axes, micro_batch=size, stages_per_rank=stages, data_outside=data_outside)


def _replaced(split, **changes):
    return Split(**(split.__dict__ | changes))
