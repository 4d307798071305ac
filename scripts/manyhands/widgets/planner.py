"""The planner to play with: a model, a machine, GPUs and a batch; the plans that fit in a ranked table and as bars."""

from manyhands.plots.plans import plans
from manyhands.predict.layouts import Question
from manyhands.predict.machines import MACHINES, machine_named
from manyhands.predict.models import MODELS, preset_model
from manyhands.predict.planner import plan, smallest_fit
from manyhands.widgets.display import Controls, is_live, labelled, show_picture

GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
AT_REST = ("parameters", "gradients", "optimizer")  # what offload keeps in the host's memory
ROWS = 6


def planner_figure(model="olmo-7b", machine="h100", gpus=64, global_batch=512, offload=True):
    """A matplotlib Figure: the recommended plan and the next best, or why nothing fits or cannot be asked."""
    return _figure(*_answer(model, machine, gpus, global_batch, offload))


def show_planner(**settings):
    """Choose model, machine, GPUs, batch and offload (as for `planner_figure`). A picture where nobody can."""
    if not is_live():
        found = _answer(**settings)
        show_picture(_figure(*found), _alt(*found))
        return
    import ipywidgets as w

    controls = {
        "model": labelled(w.Dropdown, "model", 6, 18, options=list(MODELS), value="olmo-7b"),
        "machine": labelled(w.Dropdown, "machine", 6, 16, options=list(MACHINES), value="h100"),
        "gpus": labelled(w.Dropdown, "GPUs", 4, 11, options=[(f"{n:,}", n) for n in GPUS], value=64),
        "global_batch": labelled(w.BoundedIntText, "sequences per step", 10, 18, value=512, min=1, max=65536),
        "offload": labelled(w.Dropdown, "offload", 5, 13, options=[("allowed", True), ("no", False)], value=True),
    }
    for name, value in settings.items():
        controls[name].value = value
    chosen = list(controls.values())

    def draw():
        found = _answer(**{name: control.value for name, control in controls.items()})
        return _figure(*found), _alt(*found)

    page = Controls([chosen[:3], chosen[3:]], draw)
    page.redraw_with(*chosen)
    page.show()


def _answer(model="olmo-7b", machine="h100", gpus=64, global_batch=512, offload=True):
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
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 1.2))
        figure.text(0.02, 0.5, why, fontsize=11, va="center")
        return figure
    rows = []
    for one in answer.ranked[:ROWS]:
        on_host = AT_REST if one.held.offload else ()
        held = {kind: size for kind, size in one.held.by_kind().items() if size and kind not in on_host}
        rows.append((one.name, held, one.time.by_part()))
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
