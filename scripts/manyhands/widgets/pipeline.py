"""A pipeline on a chart: ranks, micro-batches, stages per rank and schedule, with what is idle and what is held."""

from manyhands.plots.schedule import chart
from manyhands.predict.pipeline_schedules import SCHEDULES, bubble_formula, orders_of, simulate
from manyhands.widgets.display import sentence, show_with_controls

CHUNKED = ("Interleaved1F1B", "InterleavedZeroBubble")


def pipeline_figure(schedule="1F1B", p=4, m=8, v=1):
    """A matplotlib Figure: what each of p ranks does when, in m micro-batches and v stages per rank.

    v counts for interleaved schedules only. Where the schedule refuses these numbers, the figure says why.
    """
    try:
        run, v = _run(schedule, p, m, v)
    except ValueError as error:
        return sentence(str(error))
    notes = [f"holds {held}{f'/{v}' if v > 1 else ''}" for held in run.in_flight]
    return chart([(_title(schedule, p, m, v, run), run.slots, notes)], "forwards of a whole rank", scale=1 / v)


def show_pipeline(**settings):
    """Choose schedule, p, m and v (as for `pipeline_figure`). A picture where nobody can."""
    show_with_controls(
        lambda **now: (pipeline_figure(**now), _alt(**now)), settings,
        {
            "schedule": ("Dropdown", "1F1B", "schedule", 6, 20, {"options": list(SCHEDULES)}),
            "p": ("BoundedIntText", 4, "ranks p", 6, 12, {"min": 1, "max": 8}),
            "m": ("BoundedIntText", 8, "micro-batches m", 10, 16, {"min": 1, "max": 32}),
            "v": ("BoundedIntText", 1, "stages per rank v", 10, 16, {"min": 1, "max": 4}),
        },
    )  # fmt: skip


def _run(schedule, p, m, v):
    v = v if schedule in CHUNKED else 1
    return simulate(orders_of(schedule, p, m, v)), v


def _title(schedule, p, m, v, run):
    chunks = f", v = {v}" if schedule in CHUNKED else ""
    formula = bubble_formula(schedule, p, m, v)
    exact = "" if run.bubble == formula else f" (the formula is for m of p or more: {100 * float(formula):.0f} %)"
    return f"{schedule}, p = {p}, m = {m}{chunks}: idle {100 * float(run.bubble):.0f} %{exact}"


def _alt(schedule, p, m, v):
    try:
        run, v = _run(schedule, p, m, v)
    except ValueError as error:
        return str(error)
    held = ", ".join(str(one) for one in run.in_flight)
    return f"{_title(schedule, p, m, v, run)}; ranks hold {held} micro-batches{' of a stage' if v > 1 else ''} at most"
