"""Which layout to train with: every family of layouts is refused with its numbers, or ranked by predicted step time.

    answer = plan(Question(preset_model("olmo-7b"), machine_named("h100"), gpus=64, global_batch=512))
    answer.best, answer.ranked, answer.refused     # Plan or None, [Plan], [(name of a family, sentence)]
    smallest_fit(question)                         # where nothing fits: on how many GPUs something would

What does not fit is never recommended. Of the plans that are within CLOSE of the fastest, closer than predictions are
right, the simplest is best: no context axis (train.py has none), then fewer axes, then the simpler way to share, then
less recomputation, then the simpler schedule, then less memory.

What it knows stands in tables: ways to share state in `config.strategies`, machines, models and published runs in TOML
files here, bytes by a strategy's dp_mode in `memory.STATES`, messages by dp_mode in `traffic.OF_DATA` and of the other
axes in `traffic.OF_AXIS`; `step_time` turns them into seconds, one field of StepTime for each thing that is waited for.
"""

from dataclasses import dataclass, replace

from manyhands.config.layout import SPLIT_BACKWARD, Layout
from manyhands.predict import megatron_layouts
from manyhands.predict.layouts import (
    CHECKPOINTING,
    SCHEDULES,
    SHARINGS,
    Candidate,
    Question,
    divisors,
    families,
)  # fmt: skip
from manyhands.predict.megatron import TODAY, Program, Split, work_of
from manyhands.predict.memory import RankBytes, bytes_per_rank, state_of_rank
from manyhands.predict.models import PlannedModel
from manyhands.predict.step_time import Assumptions, StepTime, planned_work, step_time
from manyhands.predict.traffic import spreads_experts

CLOSE = 1.05
MOST_NODES = 600  # where the search for a machine that is large enough ends
GB = 1e9


@dataclass(frozen=True)
class Plan(Candidate):
    """A layout that fits, and what it is predicted to take."""

    held: RankBytes
    time: StepTime
    split: Split | None  # of another program than train.py: its layout; `options` are then those of `base` alone
    mfu: float  # model FLOPs per second over the peak of all GPUs
    tokens_per_s: float  # of all GPUs together

    @property
    def name(self) -> str:
        return megatron_layouts.name_of(self.split) if self.split else str(self)

    @property
    def step_s(self) -> float:
        return self.time.total_s

    @property
    def bubble(self) -> float:
        """The pipeline's idle share of a step."""
        return self.time.bubble_s / self.step_s

    @property
    def micro(self) -> str:
        """Micro-batches and their sequences, "8x4"."""
        return f"{self.layout.micro_batches}x{self.split.micro_batch if self.split else self.micro_batch}"

    @property
    def schedule(self) -> str:
        if self.split:
            return "Interleaved1F1B" if self.split.stages_per_rank > 1 else self.split.schedule
        return self.options.parallel.schedule

    @property
    def checkpointing(self) -> str:
        return self.split.checkpointing if self.split else self.options.parallel.activation_checkpointing

    def complexity(self) -> tuple:
        """For `sorted`: the simplest plan first."""
        layout = self.layout
        axes = sum(getattr(layout, axis) > 1 for axis in ("tensor", "pipeline", "context", "expert", "data"))
        kind = list(SHARINGS).index(self.sharing)
        again, schedule = CHECKPOINTING.index(self.checkpointing), list(SCHEDULES).index(self.schedule)
        # context ranks come last: train.py's ring needs more than is planned
        last = layout.context > 1 and self.split is None
        return last, axes, kind, again, schedule, layout.stages_per_rank, self.held.on_gpu, self.step_s


@dataclass(frozen=True)
class Answer:
    """The result of `plan`."""

    question: Question
    ranked: tuple[Plan, ...]  # one of each family that fits: the recommended plan, then the others, the fastest first
    fastest_s: float  # a step of the fastest plan of all: `best` may take up to CLOSE times as long
    refused: tuple[tuple[str, str], ...]
    tried: int  # layouts, variants of families included
    # of the first of `ranked` that has a pipeline: the fastest plan with each schedule that fits
    schedules: tuple[Plan, ...] = ()

    @property
    def best(self) -> Plan | None:
        return self.ranked[0] if self.ranked else None

    @property
    def best_trained(self) -> Plan | None:
        """The first of `ranked` that train.py can run, or None."""
        return next((one for one in self.ranked if not not_trained(self.question, one)), None)


def program_for(model: PlannedModel) -> Program | None:
    """Return the program that would train a model: None (train.py) for its own GPT, else one of Megatron-LM's kind."""
    return None if model.style == "gpt" and model.capacity is None else TODAY


def not_trained(question: Question, candidate: Candidate) -> str:
    """Why train.py cannot run a plan, in a sentence; "" where it can."""
    if question.program is not None:
        return "planned as Megatron-LM or torchtitan would train it: train.py has no command for this"
    if question.model.style != "gpt":
        return "train.py trains the course's GPT alone: there is no command for this model"
    if question.model.capacity is not None:
        return "train.py drops no token: there is no command for experts with a capacity"
    if candidate.layout.context > 1:
        return "train.py's ring holds a block of scores, which is not planned: there is no command for this layout"
    return ""


def plan(question: Question) -> Answer:
    """The Answer to a Question."""
    if question.program is not None:
        return _plan_for(question)
    plans, refused, tried, room = {}, [], 0, question.machine.memory_bytes
    for family in families(question):
        tried += len(family.variants)
        held = [(bytes_per_rank(question.model, one.layout, one.options), one) for one in family.variants]
        fitting = [_timed(question, one, needed) for needed, one in held if needed.on_gpu <= room]
        if fitting:
            plans[family.name] = fitting
        else:
            refused.append((family.name, family.refused or _does_not_fit(room, held)))
    if not plans:
        return Answer(question, (), float("inf"), tuple(refused), tried)
    every = [one for fitting in plans.values() for one in fitting]
    fastest_s = min(one.step_s for one in every)
    best = min((one for one in every if one.step_s <= fastest_s * CLOSE), key=Plan.complexity)
    others = [min(fitting, key=lambda one: one.step_s) for name, fitting in plans.items() if name != best.name]
    ranked = (best, *sorted(others, key=lambda one: one.step_s))
    return Answer(question, ranked, fastest_s, tuple(refused), tried, _by_schedule(ranked, plans))


def _plan_for(question):
    """Plan for a program of Megatron-LM's kind."""
    contexts = [question.context] if question.context else []
    found = megatron_layouts.search(
        question.model, question.machine, question.gpus, question.global_batch, question.program, contexts
    )
    if not found.plans:
        return Answer(question, (), float("inf"), tuple(found.refused), found.tried)
    every = sorted((_as_plan(question, one) for one in found.plans.values()), key=lambda one: one.step_s)
    fastest_s = every[0].step_s
    best = min((one for one in every if one.step_s <= fastest_s * CLOSE), key=Plan.complexity)
    ranked = (best, *(one for one in every if one is not best))
    return Answer(question, ranked, fastest_s, tuple(found.refused), found.tried)


def _as_plan(question, timed):
    split = timed.split
    shard = {"zero2": split.replicas, "zero3": split.replicas, "hybrid": split.within}.get(split.sharing, 1)
    layout = Layout(
        split.pipeline, split.replicas // shard, shard, split.tensor, context=split.context, expert=split.expert,
        micro_batches=split.micro_batches(question.global_batch), stages_per_rank=split.stages_per_rank,
    )  # fmt: skip
    return Plan(split.sharing, layout, question.base, timed.held, timed.time, split, *_speed(question, timed.time))


def _by_schedule(ranked, plans):
    """The fastest plan per schedule of the first way to split that has a pipeline."""
    first = next((one for one in ranked if one.layout.pipeline > 1), None)
    if first is None:
        return ()
    fastest = {first.schedule: first}
    for one in sorted(plans[first.name], key=lambda one: one.step_s):
        fastest.setdefault(one.schedule, one)
    return tuple(fastest[name] for name in SCHEDULES if name in fastest)


def _timed(question, candidate, held, assumed=None):
    model, split = question.model, getattr(candidate, "split", None)
    if split is not None:
        work = work_of(model, split, question.global_batch, question.program)
    else:
        work = planned_work(model, candidate.layout, candidate.options)
    time = step_time(work, question.machine, assumed)
    speed = _speed(question, time)
    return Plan(candidate.sharing, candidate.layout, candidate.options, held, time, split, *speed)


def _speed(question, time):
    """(MFU, tokens per second of all GPUs)."""
    tokens = question.global_batch * question.model.block_size
    flops_per_s = question.model.flops_per_token() * tokens / time.total_s
    return flops_per_s / question.gpus / question.machine.peak_flops, tokens / time.total_s


def _does_not_fit(room, held):
    """Return why a family is refused whose smallest variant is too large: a sentence with its bytes."""
    least, candidate = min(held, key=lambda pair: pair[0].on_gpu)
    checkpointing = candidate.options.parallel.activation_checkpointing
    return (
        f"needs {least.on_gpu / GB:.1f} GB of {room / GB:.1f} GB per GPU at least ({least.largest_kinds()}), with"
        f" micro-batches of {candidate.micro_batch} and activation checkpointing {checkpointing}"
    )


def smallest_fit(question: Question, start: int = 1) -> int | None:
    """The smallest number of GPUs, whole nodes if more than one, on which something fits; None up to MOST_NODES nodes.

    The batch stays as it is, so that a number that does not split it may fail where a smaller one fits.
    """
    if question.program is not None:
        return _power_of_two(question, start)
    per_node = question.machine.gpus_per_node
    most = min(MOST_NODES, question.global_batch * question.model.n_layer)
    model, room = question.model, question.machine.memory_bytes
    for gpus in (*divisors(per_node), *(nodes * per_node for nodes in range(2, most + 1))):
        if gpus < start:
            continue
        # micro-batches of one sequence and the most checkpointing need the least
        for family in families(replace(question, gpus=gpus), ("block", "none"), most_micro_batch=1):
            for layout, options in ((one.layout, one.options) for one in family.variants):
                if not options.parallel.offload and sum(state_of_rank(model, layout, options)) > room:
                    continue  # most fail here, and soon
                if bytes_per_rank(model, layout, options).on_gpu <= room:
                    return gpus
    return None


def _power_of_two(question, start):
    """The smallest number of nodes that is a power of two, of those from `start` GPUs on; None up to MOST_NODES."""
    gpus = question.machine.gpus_per_node
    while gpus <= MOST_NODES * question.machine.gpus_per_node:
        if gpus >= start and plan(replace(question, gpus=gpus)).best:
            return gpus
        gpus *= 2
    return None


def weakest_assumption(question: Question, best: Plan) -> tuple[str, float]:
    """(sentence, seconds of a step if it is wrong): the assumption on which the recommended plan hangs most."""
    a, layout = Assumptions(), best.layout
    hidden = f"messages of data {'and context ' * (layout.context > 1)}parallelism"
    doubts = {
        f"matrix products reach {a.matmul_share:.0%} of a GPU's best product, as fitted on A100 with Megatron-LM; at"
        f" {0.7 * a.matmul_share:.0%}": {"matmul_share": 0.7 * a.matmul_share},
        f"collectives attain {a.link_share:.0%} of the links' stated bandwidth; at {a.link_share / 2:.0%}": {
            "link_share": a.link_share / 2
        },
        f"kept bytes pass {a.memory_passes:.1f} times through memory, as fitted with Megatron-LM's fused kernels; at"
        " twice that": {"memory_passes": 2 * a.memory_passes},
        f"{hidden} hide behind compute; if none does": {"overlap": False},
    }
    if layout.pipeline > 1 and best.schedule in SPLIT_BACKWARD:
        said = "the two halves of a backward take as long as a forward each; if they fill no bubble"
        doubts[said] = {"halves_fill": False}
    if spreads_experts(question.model, layout) and question.model.capacity is None:
        said = "tokens spread evenly over the experts; if the busiest rank's experts get twice as many"
        doubts[said] = {"routing": 2.0}
    seconds = {
        said: _timed(question, best, best.held, replace(a, **changed)).step_s for said, changed in doubts.items()
    }
    worst = max(seconds, key=seconds.get)
    return f"{worst}, a step takes {seconds[worst]:.2f} s instead of {best.step_s:.2f} s", seconds[worst]


def unbalanced_s(question: Question, best: Plan) -> float:
    """Seconds of a step if the busiest rank's experts get twice the mean of tokens."""
    return _timed(question, best, best.held, Assumptions(routing=2.0)).step_s
