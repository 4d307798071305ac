"""The curves of a run: in the terminal, and as a PNG.

    curves.terminal(rows, width)          # text: loss and validation loss, tokens per second
    curves.png(rows, folder / "curves.png")
    python -m manyhands.train.curves outputs/train/latest      # of a run that is over, or still going on

`rows` are the lines of steps.jsonl as dicts; what is none or not finite is left out.
"""

import json
import math
import sys
from pathlib import Path

from manyhands.launch.program import step_ticks, text_curves, write
from manyhands.plots.looks import TRAINING, VALIDATION
from manyhands.train.columns import screen_width

PLOT_WIDTH = 100  # at most, in characters


def read_rows(folder):
    """The rows of a run's folder. Raises FileNotFoundError. A last line that is half written is left out."""
    rows = []
    for line in (Path(folder) / "steps.jsonl").read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def series(rows, key):
    """(steps, values) of a column, where it has a finite number."""
    points = [(row["step"], row.get(key)) for row in rows]
    points = [(step, v) for step, v in points if isinstance(v, (int, float)) and math.isfinite(v)]
    return [step for step, _ in points], [value for _, value in points]


def speeds(rows):
    """(steps, tokens/s) without the first measured line, which warms up."""
    steps, values = series(rows, "tokens_per_s")
    return steps[1:], values[1:]


def terminal(rows, width):
    """Plots of plain characters, at most `width` wide."""
    width = max(30, min(width, PLOT_WIDTH))
    steps, speed = speeds(rows)
    thousands = [value / 1000 for value in speed]
    plots = [
        _text_plot(
            "loss (.) and validation loss (x) over steps",
            [(*series(rows, "loss"), "."), (*series(rows, "val_loss"), "x")],
            width,
            15,
        ),
        _text_plot("thousand tokens/s over steps", [(steps, thousands, ".")], width, 9),
    ]
    return "\n\n".join(plot for plot in plots if plot)


def _text_plot(title, curves, width, height):
    curves = [(x, y, marker) for x, y, marker in curves if x]
    if not curves:
        return ""
    return text_curves(curves, title, width, height, step_ticks([step for x, _, _ in curves for step in x]))


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
    speed.xaxis.set_major_locator(MaxNLocator(integer=True))  # there is no step 2.5
    for axes in (loss, norm, speed):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    return path


def main(argv):
    if len(argv) != 1:
        sys.exit("name the folder of a run: python -m manyhands.train.curves outputs/train/latest")
    try:
        rows = read_rows(argv[0])
    except OSError as error:
        sys.exit(f"no run to draw: {error}")
    if len(rows) < 2:
        sys.exit(f"{argv[0]}/steps.jsonl has {len(rows)} lines so far; a curve needs two")
    write(f"{terminal(rows, screen_width())}\n\ncurves: {png(rows, Path(argv[0]) / 'curves.png')}\n")


if __name__ == "__main__":
    from manyhands.launch.program import run_program

    run_program("curves", lambda: main(sys.argv[1:]))
