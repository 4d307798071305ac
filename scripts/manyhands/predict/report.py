"""Show a plan: plain text for people, a dict for programs, and the lines that start it.

    print(as_text(answer, top=8))
    json.dumps(as_dict(answer))
    train_flags(question, candidate)      # ["--preset", "gpt-7b", "--train.global-batch", "512", ...]
    start_lines(question, candidate)      # lines of a shell that submit it as a job

Sizes are in decimal GB, as vendors state memories.
"""

import dataclasses
import re
import shlex
from math import ceil

from manyhands.config.options import PRESETS, from_model, from_preset
from manyhands.predict.layouts import NOT_PLANNED, SCHEDULES, Candidate, Question
from manyhands.predict.machines import Sent
from manyhands.predict.memory import RESERVE, room
from manyhands.predict.planner import (
    CLOSE,
    Answer,
    leaves_micro_batch,
    not_trained,
    smallest_fit,
    unbalanced_s,
    weakest_assumption,
)
from manyhands.predict.traffic import spreads_experts

GB = 1e9
# replicate and shard count the ranks of context and expert: they have, or share, the dense weights, too
COLUMNS = ("GB/GPU", "in GB", "out GB", "bubble", "step s")
AXES = ("pipeline", "replicate", "shard", "tensor", "context", "expert")
IN_A_NAME = {"GPipe": " GPipe", "Interleaved1F1B": " interleaved", "InterleavedZeroBubble": " zero bubble"}
SHOWN = 4  # refusals of a kind


def as_text(answer: Answer, top: int = 8, show_all: bool = False) -> str:
    """The whole answer, as lines. `top` rows of the ranking; show_all: every one, and every refusal."""
    refused = _refusals(answer.refused, show_all)
    end = [*refused, *(f"Not planned: {name}: {why}." for name, why in NOT_PLANNED.items())]
    found = _plans(answer, top, show_all) if answer.best else _nothing_fits(answer)
    return "\n".join([*_question(answer.question), "", *found, *end])


def _question(question):
    model, machine = question.model, question.machine
    tokens = question.global_batch * model.block_size
    active = ""
    if model.experts > 1:
        active = f" ({model.active_params():,} active: {model.chosen} of {model.experts} experts)"
    gpus, nodes = question.gpus, max(1, question.gpus // machine.gpus_per_node)
    return [
        f"{model.name}: {model.num_params():,} parameters{active}, {model.n_layer} layers of width {model.n_embd} with"
        f" {model.n_head} heads, {model.block_size:,} positions; bf16 over fp32 weights, AdamW",
        f"{gpus} GPU{'s' * (gpus > 1)} {machine.name} in {nodes} node{'s' * (nodes > 1)}:"
        f" {machine.peak_flops / 1e12:.0f} TFLOP/s, {machine.memory_bytes / GB:.0f} GB,"
        f" {machine.inside_bytes_per_s / GB:g} GB/s inside a node,"
        f" {machine.between_bytes_per_s / GB:g} GB/s between nodes",
        f"a step: {question.global_batch} sequences = {tokens:,} tokens",
        *_of_the_program(question),
    ]


def _of_the_program(question):
    said = "trained by train.py"
    if not question.is_trained:
        said = "trained as Megatron-LM or torchtitan do: gradients summed in fp32, fused kernels, FlashAttention"
        said += ", linear layers in fp8" * question.program.fp8
    space = room(question.machine.memory_bytes) / GB
    return [
        said,
        f"{space:.1f} GB of a GPU are planned: {RESERVE:.0%} is a reserve for what is not modelled, the context, NCCL's"
        " buffers, the allocator's waste",
    ]


def _nothing_fits(answer):
    question = answer.question
    if not any("GB per GPU" in sentence for _, sentence in answer.refused):
        return ["No layout is possible.", ""]
    number = smallest_fit(question)
    said = f"something fits on {number} of these GPUs, not on fewer" if number else "no number of them was found"
    return [f"Nothing fits into {room(question.machine.memory_bytes) / GB:.1f} GB per GPU: {said}.", ""]


def _plans(answer, top, show_all):
    rows = answer.ranked if show_all else answer.ranked[:top]
    # of a pipeline a name leaves out the schedule, where it is not 1F1B
    names = [p.name + _schedule_of(p) for p in rows]
    wide = max(len(name) for name in names) + 1
    head = f"{'':4}{'layout':{wide}}{'micro':>7}{'checkpointing':>15}" + "".join(f"{name:>8}" for name in COLUMNS)
    lines = [
        f"{answer.tried:,} layouts tried; {len(answer.ranked)} ways to split the GPUs fit, {len(answer.refused)} are"
        " refused.",
        f"Recommended is the simplest plan within {CLOSE - 1:.0%} of the fastest ({answer.fastest_s:.2f} s), then the"
        " others by time, each at its best.",
        "",
        f"{head}{'MFU':>6}",
    ]
    for place, (name, one) in enumerate(zip(names, rows, strict=True), start=1):
        sent = one.time.sent()
        sizes = "".join(f"{size / GB:8.1f}" for size in (one.held.on_gpu, sent.inside, sent.between))
        timed = f"{one.bubble:8.0%}{one.step_s:8.3g}{one.mfu:6.0%}"
        lines.append(f"{place:2}. {name:{wide}}{one.micro:>7}{one.checkpointing:>15}{sizes}{timed}")
    if len(rows) < len(answer.ranked):
        lines.append(f"    ... and {len(answer.ranked) - len(rows)} slower ones (--all shows them)")
    return [*lines, "", *_best(answer), "", *_schedules(answer)]


def _schedules(answer):
    """Return the best fitting candidate of each schedule, for the first split that has a pipeline."""
    if not answer.schedules:
        return []
    lines = [f"Schedules of {answer.schedules[0].name}, each at its best:"]
    lines += [
        f"    {one.schedule:22}{one.step_s:8.3g} s, bubble {one.bubble:4.0%}, {one.held.on_gpu / GB:6.1f} GB, of which"
        f" activations {one.held.activations / GB:.1f} (micro {one.micro}, checkpointing {one.checkpointing})"
        for one in answer.schedules
    ]
    there = [one.schedule for one in answer.schedules]
    if answer.question.schedule is None and (missing := [name for name in SCHEDULES if name not in there]):
        lines.append(f"    {', '.join(missing)}: no layout that fits, or refused by the trainer")
    return [*lines, ""]


def _schedule_of(one):
    """ " interleaved 8": of a pipeline that is not 1F1B, with its stages per rank where they are more than two."""
    layout = one.layout
    if layout.pipeline == 1 or one.schedule not in IN_A_NAME:
        return ""
    return IN_A_NAME[one.schedule] + f" {layout.stages_per_rank}" * (layout.stages_per_rank > 2)


def _gb(size):
    """Bytes in GB, with more digits below one."""
    return f"{size / GB:.1f}" if size >= GB else f"{size / GB:.2g}"


def _best(answer):
    """The recommended plan: its bytes, seconds and messages, what it rests on, and how to start it."""
    question, best = answer.question, answer.best
    kinds = ", ".join(f"{kind.replace('_', ' ')} {_gb(size)}" for kind, size in best.held.by_kind().items() if size)
    shown = {part: seconds for part, seconds in best.time.by_part().items() if seconds > best.step_s / 500}
    host = f", of which {best.held.on_host / GB:.1f} rest in the host's memory" if best.held.offload else ""
    lines = [
        f"GB per GPU: {kinds}{host}",
        f"seconds: {', '.join(f'{part} {seconds:.2g}' for part, seconds in shown.items())}",
        *_messages(best.time),
        f"weakest assumption: {weakest_assumption(question, best)[0]}",
    ]
    if best.held.offload:
        lines.append(f"not checked: {best.held.on_host / GB:.1f} GB per GPU, and as fast an Adam, in the host's memory")
    if question.machine.name not in ("a100-40", "a100-80", "h100"):
        lines.append(f"not checked: no published run on {question.machine.name} was predicted")
    if question.model.experts > 1:
        lines.append(f"assumed of the experts: {_routing(question, best)}")
    if why := not_trained(question, best):
        lines.append(why)
    if runs := answer.best_trained:
        if runs is not best:
            place = answer.ranked.index(runs) + 1
            lines.append(f"the first that it runs is {place}. {runs.name}, with {runs.step_s:.3g} s per step:")
        lines += [f"{what}: {line}" for what, line in start_lines(question, runs)]
    rate = f"{best.tokens_per_s:,.0f} tokens/s, {best.tokens_per_s / question.gpus:,.0f} per GPU"
    return [f"1. {best.name}: {rate}", *(f"   {line}" for line in lines)]


def _messages(time):
    """A line per axis and operation of a step."""
    for axis, operation in dict.fromkeys((m.axis, m.operation) for m in time.messages):
        alike = [m for m in time.messages if (m.axis, m.operation) == (axis, operation)]
        sent, payload = sum((m.sent for m in alike), Sent()), sum(m.payload_bytes for m in alike)
        where = f"a GPU sends {_gb(sent.inside)} GB inside its node, {_gb(sent.between)} GB to others"
        if sent.host:
            where = "a GPU copies them over the link to its host"
        yield f"{axis}: {sum(m.calls for m in alike):,} {operation} of {_gb(payload)} GB; {where}"


def _routing(question, best):
    """Return the assumption about experts, with the cost of it being wrong."""
    if not spreads_experts(question.model, best.layout):
        return "each rank has all experts of its layers, so that it does not matter how tokens spread over them"
    if (capacity := question.model.capacity) is not None:
        return f"balanced routing; what exceeds {capacity:g} times an expert's mean share is dropped"
    late = f"with twice as many tokens on the busiest rank {unbalanced_s(question, best):.2f} s per step"
    return f"balanced routing, in time and in memory; {late}"


def _refusals(refused, show_all):
    """Refused ways to split the GPUs: all, or each reason with how often, and the largest that do not fit by least."""
    if not refused or show_all:
        return ["Refused:"] * bool(refused) + [f"    {name}: {sentence}" for name, sentence in refused]
    too_large, kinds = [], {}  # the same sentence with other numbers is the same reason
    for name, sentence in refused:
        alike = too_large if "GB per GPU" in sentence else kinds.setdefault(re.sub(r"\d+", "#", sentence), [])
        alike.append((name, sentence))
    too_large.sort(key=lambda pair: float(pair[1].split()[1]))
    lines = ["Refused:", *(f"    {name}: {sentence}" for name, sentence in too_large[:SHOWN])]
    if len(too_large) > SHOWN:
        lines.append(f"    ... and {len(too_large) - SHOWN} that need more memory (--all shows them)")
    for alike in sorted(kinds.values(), key=len, reverse=True)[:SHOWN]:
        name, sentence = alike[0]
        lines.append(f"    {name}{f' and {len(alike) - 1} more like it' * (len(alike) > 1)}: {sentence}")
    if len(kinds) > SHOWN:
        lines.append(f"    ... and {len(kinds) - SHOWN} other reasons (--all shows them)")
    return lines


def as_dict(answer: Answer) -> dict:
    """The answer as plain values: bytes, seconds, counts. The same keys for every plan."""
    question, runs = answer.question, answer.best_trained
    return {
        "question": {
            "model": question.model.name,
            "parameters": question.model.num_params(),
            "active_parameters": question.model.active_params(),
            "machine": question.machine.name,
            "gpus": question.gpus,
            "global_batch": question.global_batch,
            "memory_bytes": question.machine.memory_bytes,
        },
        "tried": answer.tried,
        "plans": [_plan_dict(question, one) for one in answer.ranked],
        "refused": [{"layout": name, "reason": sentence} for name, sentence in answer.refused],
        "not_planned": NOT_PLANNED,
        "weakest_assumption": weakest_assumption(question, answer.best)[0] if answer.best else None,
        "start_layout": runs.name if runs else None,
        "start": [line for _, line in start_lines(question, runs)] if runs else [],
        "smallest_fit": question.gpus if answer.best else smallest_fit(question),
    }


def _plan_dict(question, one):
    layout = one.layout
    return {
        "layout": one.name,
        "axes": {axis: getattr(layout, axis) for axis in AXES},
        "sharing": one.sharing,
        "schedule": one.schedule if layout.pipeline > 1 else None,
        "micro_batches": layout.micro_batches,
        "micro_batch": one.micro_batch,
        "activation_checkpointing": one.checkpointing,
        "bytes": one.held.by_kind() | {"on_gpu": one.held.on_gpu, "on_host": one.held.on_host},
        "seconds": one.time.by_part() | {"total": one.step_s},
        "messages": [
            {key: getattr(message, key) for key in ("axis", "operation", "calls", "payload_bytes")}
            | {"sent_inside_bytes": sent.inside, "sent_between_bytes": sent.between, "host_bytes": sent.host}
            for message in one.time.messages for sent in (message.sent,)
        ],
        "bubble": one.bubble,
        "mfu": one.mfu,
        "tokens_per_s": one.tokens_per_s,
        "train_flags": train_flags(question, one),
    }  # fmt: skip


# ------------------------------------------------------------------ how to start it


def train_flags(question: Question, candidate: Candidate) -> list[str] | None:
    """The words behind `python scripts/train.py`. None where it cannot run the plan: see `not_trained`."""
    if not_trained(question, candidate):
        return None
    preset = question.model.name if question.model.name in PRESETS else "nano"
    base, flags, options = from_preset(preset), ["--preset", preset], candidate.options
    if question.source is not None:
        base, flags = from_model(question.source, base), ["--from", question.source]
    if leaves_micro_batch(question, candidate):
        options = dataclasses.replace(options, train=dataclasses.replace(options.train, micro_batch=None))
    for group in ("model", "train", "parallel"):
        before = dataclasses.asdict(getattr(base, group))
        for field, value in dataclasses.asdict(getattr(options, group)).items():
            name = field.replace("_", "-")
            if value == before[field]:
                continue
            if isinstance(value, bool):
                flags.append(f"--{group}.{name}" if value else f"--{group}.no-{name}")
            else:
                flags += [f"--{group}.{name}", str(value)]
    return flags


def start_lines(question: Question, candidate: Candidate) -> list[tuple[str, str]]:
    """[(what it is for, line)]: to look at first, then to run here or as a job. [] where train.py cannot run it.

    Several nodes need a job; its directives are written once, with the site's name (see jobs/README.md).
    """
    flags = train_flags(question, candidate)
    if flags is None:
        return []
    words, gpus = shlex.join(flags), question.gpus
    per_node = min(question.machine.gpus_per_node, gpus)
    memory = f"{ceil(question.machine.memory_bytes / 2**30 * 100) / 100:g}"
    lines = [("check it", f"python scripts/train.py {words} --ranks {gpus} --gpu-gib {memory} --dry-run")]
    if gpus == 1:
        return [*lines, ("run it", f"python scripts/train.py {words}")]
    if gpus == per_node:
        lines.append(("run it", f"python scripts/launch.py --nproc {gpus} -- {words}"))
    size = f"--nodes {gpus // per_node} --gpus {per_node}"
    return [
        *lines,
        ("a job, once", f"python -m manyhands.jobs.stamp stamp --site {question.machine.site} {size}"),
        ("Slurm", f"sbatch jobs/train.slurm {words}"),
        ("PBS", f'qsub -v TRAIN_ARGS="{words}" jobs/train.pbs'),
    ]
