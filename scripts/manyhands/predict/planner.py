"""Which layout to train with: every family of layouts is refused with its numbers, or ranked by predicted step time.

    answer = plan(Question(preset_model("gpt-7b"), machine_named("h100"), gpus=64, global_batch=512))
    answer.best, answer.ranked, answer.refused     # Plan or None, [Plan], [(name of a family, sentence)]
    smallest_fit(question)                         # where nothing fits: on how many GPUs something would

What does not fit is never recommended, nor what leaves no reserve. Of the plans that are within CLOSE of the fastest,
closer than predictions are right, the simplest is best: for train.py no context axis, whose ring holds more than is
planned, then fewer axes, then the simpler way to share, then less recomputation, then the simpler schedule, then the
shorter step.

What it knows stands in tables: ways to share state in `config.strategies`, machines, models and published runs in TOML
files here, bytes by a strategy's dp_mode in `memory.STATES`, messages by dp_mode in `traffic.OF_DATA` and of the other
axes in `traffic.OF_AXIS`; `step_time` turns them into seconds, one field of StepTime for each thing that is waited for.
"""

from dataclasses import dataclass, replace

from manyhands.config.layout import SPLIT_BACKWARD, LayoutError, resolve_layout
from manyhands.predict.layouts import (
    CHECKPOINTING,
    SCHEDULES,
    SHARINGS,
    Candidate,
    Question,
    divisors,
    families,
)  # fmt: skip
from manyhands.predict.memory import RankBytes, bytes_per_rank, room, state_of_rank, with_micro_batch
from manyhands.predict.models import OTHERS, PlannedModel
from manyhands.predict.program import MEGATRON, TRAIN_PY, Program
from manyhands.predict.step_time import Assumptions, StepTime, planned_work, step_time
from manyhands.predict.traffic import spreads_experts

CLOSE = 1.05
MOST_NODES = 600  # where the search for a machine that is large enough ends
GB = 1e9


@dataclass(frozen=True)
class Plan(Candidate):
    """A layout that fits, and what it is predicted to take."""

    held: RankBytes = None
    time: StepTime = None
    mfu: float = 0.0  # model FLOPs per second over the peak of all GPUs
    tokens_per_s: float = 0.0  # of all GPUs together

    @property
    def name(self) -> str:
        return str(self)

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
        return f"{self.layout.micro_batches}x{self.micro_batch}"

    def complexity(self) -> tuple:
        """For `sorted`: the simplest plan first."""
        layout = self.layout
        axes = sum(getattr(layout, axis) > 1 for axis in ("tensor", "pipeline", "context", "expert", "data"))
        kind = list(SHARINGS).index(self.sharing)
        again, schedule = CHECKPOINTING.index(self.checkpointing), list(SCHEDULES).index(self.schedule)
        # context ranks come last: train.py's ring needs more than is planned
        last = layout.context > 1 and self.program.name == TRAIN_PY.name
        return last, axes, kind, again, schedule, layout.stages_per_rank, self.step_s, self.held.on_gpu


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


def program_for(model: PlannedModel) -> Program:
    """Return the program that would train a model: train.py what it can, one of Megatron-LM's kind any other.

    And those of models.toml, as published.
    """
    return TRAIN_PY if model.capacity is None and model.name not in OTHERS else MEGATRON


def not_trained(question: Question, candidate: Candidate) -> str:
    """Why train.py cannot run a plan, in a sentence; "" where it can."""
    if not question.is_trained:
        return "planned as Megatron-LM or torchtitan would train it: train.py has no command for this"
    layout = candidate.layout
    if question.model.name in OTHERS:
        return "planned by its sizes, without its rotary positions: there is no command for this model"
    if question.model.capacity is not None:
        return "train.py drops no token: there is no command for experts with a capacity"
    if layout.context > 1:
        return "train.py's ring holds a block of scores, which is not planned: there is no command for this layout"
    return ""


def plan(question: Question) -> Answer:
    """The Answer to a Question."""
    plans, refused, tried, space = {}, [], 0, room(question.machine.memory_bytes)
    for family in families(question):
        held, fitting, hopeless = [], [], set()
        for alike in family.alike():  # that differ in their checkpointing alone, the least first
            way = alike[0].program, alike[0].schedule, alike[0].layout.stages_per_rank
            if way in hopeless:  # a smaller micro-batch did not fit
                continue
            for one in alike:
                held.append((_bytes(question, one), one))
                if held[-1][0].on_gpu <= space:  # the least that fits recomputes the least
                    fitting.append(_timed(question, one, held[-1][0]))
                    break
            else:
                hopeless.add(way)
        tried += len(held)
        if fitting:
            plans[family.name] = fitting
        else:
            refused.append((family.name, family.refused or _does_not_fit(question.machine, held)))
    if not plans:
        return Answer(question, (), float("inf"), tuple(refused), tried)
    every = [one for fitting in plans.values() for one in fitting]
    fastest_s = min(one.step_s for one in every)
    best = min((one for one in every if one.step_s <= fastest_s * CLOSE), key=Plan.complexity)
    others = [min(fitting, key=lambda one: one.step_s) for name, fitting in plans.items() if name != best.name]
    ranked = (best, *sorted(others, key=lambda one: one.step_s))
    return Answer(question, ranked, fastest_s, tuple(refused), tried, _by_schedule(ranked, plans))


def _bytes(question, one):
    return bytes_per_rank(question.model, one.layout, one.options, one.program)


def _by_schedule(ranked, plans):
    """The fastest plan per schedule of the first way to split that has a pipeline."""
    first = next((one for one in ranked if one.layout.pipeline > 1), None)
    if first is None:
        return ()
    fastest = {first.schedule: first}
    for one in sorted(plans[first.name], key=lambda one: one.step_s):
        fastest.setdefault(one.schedule, one)
    return tuple(fastest[name] for name in SCHEDULES if name in fastest)


def _timed(question, one, held, assumed=None):
    time = step_time(planned_work(question.model, one.layout, one.options, one.program), question.machine, assumed)
    tokens = question.global_batch * question.model.block_size
    mfu = question.model.flops_per_token() * tokens / time.total_s / question.gpus / question.machine.peak_flops
    return Plan(one.sharing, one.layout, one.options, one.program, held, time, mfu, tokens / time.total_s)


def _does_not_fit(machine, held):
    """Return why a family is refused whose smallest variant is too large: a sentence with its bytes."""
    least, candidate = min(held, key=lambda pair: pair[0].on_gpu)
    checkpointing = candidate.options.parallel.activation_checkpointing
    return (
        f"needs {least.on_gpu / GB:.1f} GB of {room(machine.memory_bytes) / GB:.1f} GB per GPU at least"
        f" ({least.largest_kinds()}), with micro-batches of {candidate.micro_batch} and activation checkpointing"
        f" {checkpointing}"
    )


def leaves_micro_batch(question: Question, candidate: Candidate) -> bool:
    """Return whether train.py, asked for no micro-batch, takes one with which a step is as good as the plan's."""
    if not question.is_trained:
        return False
    options = replace(candidate.options, train=replace(candidate.options.train, micro_batch=None))
    sizes = question.model, question.gpus, question.per_node
    try:
        own = with_micro_batch(options, *sizes, question.machine.memory_bytes)
        layout = resolve_layout(own, *sizes)
    except LayoutError:
        return False
    own = replace(candidate, options=own, layout=replace(candidate.layout, micro_batches=layout.micro_batches))
    held = _bytes(question, own)
    fits = held.on_gpu <= room(question.machine.memory_bytes)
    mine, its = (_timed(question, one, held).step_s for one in (candidate, own))
    return fits and its <= CLOSE * mine


def smallest_fit(question: Question, start: int = 1) -> int | None:
    """The smallest number of GPUs, whole nodes if more than one, on which something fits; None up to MOST_NODES nodes.

    The batch stays as it is, so that a number that does not split it may fail where a smaller one fits.
    """
    per_node = question.machine.gpus_per_node
    most = min(MOST_NODES, question.global_batch * question.model.n_layer)
    model, space = question.model, room(question.machine.memory_bytes)
    for gpus in (*divisors(per_node), *(nodes * per_node for nodes in range(2, most + 1))):
        if gpus < start:
            continue
        # micro-batches of one sequence and the most checkpointing need the least
        for family in families(replace(question, gpus=gpus), ("block", "none"), most_micro_batch=1):
            for one in family.variants:
                offload = one.options.parallel.offload
                if not offload and sum(state_of_rank(model, one.layout, one.options, one.program)) > space:
                    continue  # most fail here, and soon
                if _bytes(question, one).on_gpu <= space:
                    return gpus
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
