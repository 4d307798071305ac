"""The planner to play with: a model, a machine, GPUs and a batch; the plans that fit in a ranked table and as bars."""

from manyhands.plots.bars import plans
from manyhands.predict.layouts import Question
from manyhands.predict.machines import MACHINES, machine_named
from manyhands.predict.models import MODELS, preset_model
from manyhands.predict.planner import plan, smallest_fit
from manyhands.widgets.display import sentence, show_with_controls

GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
ROWS = 6


def planner_figure(model="olmo-7b", machine="h100", gpus=64, global_batch=512, offload=True):
    """A matplotlib Figure: the recommended plan and the next best, or why nothing fits or cannot be asked."""
    return _figure(*_answer(model, machine, gpus, global_batch, offload))


def show_planner(**settings):
    """Choose model, machine, GPUs, batch and offload (as for `planner_figure`). A picture where nobody can."""

    def draw(**now):
        found = _answer(**now)
        return _figure(*found), _alt(*found)

    show_with_controls(
        draw, settings,
        {
            "model": ("Dropdown", "olmo-7b", "model", 6, 18, {"options": list(MODELS)}),
            "machine": ("Dropdown", "h100", "machine", 6, 16, {"options": list(MACHINES)}),
            "gpus": ("Dropdown", 64, "GPUs", 4, 11, {"options": [(f"{n:,}", n) for n in GPUS]}),
        },
        {
            "global_batch": ("BoundedIntText", 512, "sequences per step", 10, 18, {"min": 1, "max": 65536}),
            "offload": ("Dropdown", True, "offload", 5, 13, {"options": [("allowed", True), ("no", False)]}),
        },
    )  # fmt: skip


def _answer(model, machine, gpus, global_batch, offload):
    """(the Answer, "") or (None, why there is none)."""
    try:
        question = Question(preset_model(model), machine_named(machine), gpus, global_batch, offload)
    except ValueError as error:
        return None, str(error)
    answer = plan(question)
    if answer.best:
        return answer, ""
    enough = smallest_fit(question, start=gpus)
    cure = f"something fits on {enough:,} GPUs" if enough else "no number of GPUs that was tried is enough"
    return None, f"nothing of {model} fits on {gpus:,} {machine}; {cure}"


def _figure(answer, why):
    if answer is None:
        return sentence(why)
    rows = [(one.name, one.held.kinds_on_gpu(), one.time.by_part()) for one in answer.ranked[:ROWS]]
    figure = plans(rows, answer.question.machine.memory_bytes, _title(answer))
    _tabulate(figure.axes[0], answer.ranked[:ROWS])
    return figure


def _tabulate(axes, shown):
    """Make a table of the names beside the bars: each plan's place, bytes, seconds and MFU in columns."""
    wide = max(len("layout"), *(len(one.name) for one in shown))
    lines = [
        f"{place} {one.name:{wide}} {one.held.on_gpu / 1e9:6.1f} {one.step_s:7.2f} {one.mfu:5.0%}"
        for place, one in enumerate(shown, start=1)
    ]
    axes.set_yticks(range(len(shown)), lines, family="monospace", fontsize=10)
    head = f"  {'layout':{wide}} {'GB':>6} {'s/step':>7} {'MFU':>5}"
    axes.annotate(head, (0, 1), (-7, 2), "axes fraction", "offset points", family="monospace", fontsize=10, ha="right")


def _title(answer):
    question = answer.question
    return f"{question.model.name} on {question.gpus:,} {question.machine.name}"


def _alt(answer, why):
    if answer is None:
        return why
    told = [
        f"{one.name}, {one.held.on_gpu / 1e9:.0f} GB, {one.step_s:.2f} s per step, MFU {one.mfu:.0%}"
        for one in answer.ranked[:2]
    ]
    then = f"; then {told[1]}" if len(told) > 1 else ""
    return f"{_title(answer)}: best is {told[0]}{then}; {len(answer.refused)} families are refused"
