"""Plot a run's curves in the terminal and as a PNG.

    curves.terminal(rows, width)          # text: loss and validation loss, tokens per second
    curves.png(rows, folder / "curves.png")

`rows` are the lines of steps.jsonl as dicts; None and non-finite values are omitted.
"""

import math

from manyhands.launch.run_folder import save_figure
from manyhands.plots.looks import TRAINING, VALIDATION
from manyhands.plots.terminal import step_ticks, text_curves

PLOT_WIDTH = 100  # at most, in characters


def series(rows, key):
    """Return (steps, values) of a column's finite numbers."""
    points = [(row["step"], row.get(key)) for row in rows]
    points = [(step, v) for step, v in points if isinstance(v, (int, float)) and math.isfinite(v)]
    return [step for step, _ in points], [value for _, value in points]


def speeds(rows):
    """Return (steps, tokens/s) without the first measured line, which includes the warm-up."""
    steps, values = series(rows, "tokens_per_s")
    return steps[1:], values[1:]


def terminal(rows, width):
    """Return plots of plain characters, at most `width` wide."""
    steps, speed = speeds(rows)
    plots = {
        "loss (.) and validation loss (x) over steps": (
            [(*series(rows, "loss"), "."), (*series(rows, "val_loss"), "x")],
            15,
        ),
        "thousand tokens/s over steps": ([(steps, [value / 1000 for value in speed], ".")], 9),
    }
    texts = []
    for title, (curves, height) in plots.items():
        if drawn := [curve for curve in curves if curve[0]]:
            ticks = step_ticks([step for steps, *_ in drawn for step in steps])
            texts.append(text_curves(drawn, title, max(30, min(width, PLOT_WIDTH)), height, ticks))
    return "\n\n".join(texts)


def png(rows, path):
    """Draw loss, gradient norm and speed over steps. Returns the path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 9), layout="constrained")
    FigureCanvasAgg(figure)
    loss, norm, speed = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))
    loss.plot(*series(rows, "loss"), **TRAINING, label="training batch")
    steps, values = series(rows, "val_loss")
    if steps:
        loss.plot(steps, values, **VALIDATION, label="validation")
    loss.set_ylabel("loss, nats per token")
    loss.legend(frameon=False)
    norm.plot(*series(rows, "grad_norm"), **TRAINING)
    norm.set_ylabel("gradient norm")
    speed.plot(*speeds(rows), **TRAINING)
    speed.set(ylabel="tokens/s, all ranks", xlabel="step", ylim=(0, None))
    speed.xaxis.set_major_locator(MaxNLocator(integer=True))  # steps are whole numbers
    for axes in (loss, norm, speed):
        axes.grid(alpha=0.3)
    save_figure(figure, path, dpi=120)
    return path
