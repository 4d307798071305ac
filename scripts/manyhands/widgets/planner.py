"""The planner to play with: a model, a machine, GPUs and a batch; the plans that fit in a ranked table and as bars."""

from manyhands.plots.bars import plans
from manyhands.predict.layouts import Question
from manyhands.predict.machines import MACHINES, machine_named
from manyhands.predict.models import MODELS, preset_model
from manyhands.predict.planner import plan, program_for, smallest_fit
from manyhands.widgets.display import show_with_controls

GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
ROWS = 6


def planner_picture(model="gpt-7b", machine="h100", gpus=64, global_batch=512, offload=True):
    """(a matplotlib Figure, its text): the recommended plan and the next best.

    Raise ValueError where nothing fits, or where that cannot be asked.
    """
    asked = preset_model(model)
    question = Question(asked, machine_named(machine), gpus, global_batch, offload, program=program_for(asked))
    answer = plan(question)
    if not answer.best:
        enough = smallest_fit(question, start=gpus)
        cure = f"something fits on {enough:,} GPUs" if enough else "no number of GPUs that was tried is enough"
        raise ValueError(f"nothing of {model} fits on {gpus:,} {machine}; {cure}")
    shown, title = answer.ranked[:ROWS], f"{model} on {gpus:,} {machine}"
    rows = [(one.name, one.held.kinds_on_gpu(), one.time.by_part()) for one in shown]
    figure = plans(rows, question.machine.memory_bytes, title)
    _tabulate(figure.axes[0], shown)
    told = [
        f"{one.name}, {one.held.on_gpu / 1e9:.0f} GB, {one.step_s:.2f} s per step, MFU {one.mfu:.0%}"
        for one in shown[:2]
    ]
    return figure, f"{title}: best is {'; then '.join(told)}; {len(answer.refused)} families are refused"


def show_planner(**settings):
    """Choose model, machine, GPUs, batch and offload (as for `planner_picture`). A picture where nobody can."""
    show_with_controls(
        planner_picture, settings,
        {
            "model": ("Dropdown", "gpt-7b", "model", 6, 18, {"options": list(MODELS)}),
            "machine": ("Dropdown", "h100", "machine", 6, 16, {"options": list(MACHINES)}),
            "gpus": ("Dropdown", 64, "GPUs", 4, 11, {"options": [(f"{n:,}", n) for n in GPUS]}),
        },
        {
            "global_batch": ("BoundedIntText", 512, "sequences per step", 10, 18, {"min": 1, "max": 65536}),
            "offload": ("Dropdown", True, "offload", 5, 13, {"options": [("allowed", True), ("no", False)]}),
        },
    )  # fmt: skip


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
