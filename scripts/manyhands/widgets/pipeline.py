"""A pipeline on a chart: ranks, micro-batches, stages per rank and schedule, with what is idle and what is held."""

from manyhands.plots.schedule import chart
from manyhands.predict.pipeline_schedules import SCHEDULES, bubble_formula, orders_of, simulate
from manyhands.widgets.display import show_with_controls

CHUNKED = ("Interleaved1F1B", "InterleavedZeroBubble")


def pipeline_picture(schedule="1F1B", p=4, m=8, v=1):
    """(a matplotlib Figure, its text): what each of p ranks does when, in m micro-batches and v stages per rank.

    v counts for interleaved schedules only. Raise ValueError where the schedule refuses these numbers.
    """
    v = v if schedule in CHUNKED else 1
    run, formula = simulate(orders_of(schedule, p, m, v)), bubble_formula(schedule, p, m, v)
    chunks = f", v = {v}" if schedule in CHUNKED else ""
    exact = "" if run.bubble == formula else f" (the formula is for m of p or more: {100 * float(formula):.0f} %)"
    title = f"{schedule}, p = {p}, m = {m}{chunks}: idle {100 * float(run.bubble):.0f} %{exact}"
    notes = [f"holds {held}{f'/{v}' if v > 1 else ''}" for held in run.in_flight]
    figure = chart([(title, run.slots, notes)], "forwards of a whole rank", scale=1 / v)
    held = ", ".join(map(str, run.in_flight))
    return figure, f"{title}; ranks hold {held} micro-batches{' of a stage' if v > 1 else ''} at most"


def show_pipeline(**settings):
    """Choose schedule, p, m and v (as for `pipeline_picture`). A picture where nobody can."""
    show_with_controls(
        pipeline_picture, settings,
        {
            "schedule": ("Dropdown", "1F1B", "schedule", 6, 20, {"options": list(SCHEDULES)}),
            "p": ("BoundedIntText", 4, "ranks p", 6, 12, {"min": 1, "max": 8}),
            "m": ("BoundedIntText", 8, "micro-batches m", 10, 16, {"min": 1, "max": 32}),
            "v": ("BoundedIntText", 1, "stages per rank v", 10, 16, {"min": 1, "max": 4}),
        },
    )  # fmt: skip
