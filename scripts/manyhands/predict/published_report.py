"""What `plan.py --published` prints: runs that others have published, and what is predicted of them."""

from manyhands.predict.published_runs import FITTED_ON, RUNS, predicted_tflops, residual, summary
from manyhands.predict.step_time import MATMUL_SHARE, MEMORY_PASSES


def published_text():
    """The tables of published runs: predicted, published, residual, and what each rests on."""
    head = f"{'run':28}{'GPUs':>6}{'layout':>14}{'published':>11}{'predicted':>11}{'residual':>10}"
    lines = [
        f"Two constants, fitted on {' and '.join(FITTED_ON)} alone: matrix products attain {MATMUL_SHARE:.1%} of the peak, kept"
        f" bytes pass {MEMORY_PASSES:.2f} times through memory.",
        "TFLOP/s per GPU, counted as the source counts them.",
    ]
    for source in dict.fromkeys(run.source for run in RUNS):
        runs = [run for run in RUNS if run.source == source]
        lines += ["", source, head, *(_published_row(run) for run in runs)]
        middle, worst = summary(runs)
        lines.append(f"  not fitted: median error {middle:.1%}, largest {worst:.1%}")
        lines += [f"  checked: {said}" for said in dict.fromkeys(run.checked for run in runs)]
        lines += [
            f"  assumed, as the source leaves it open: {said}" for said in dict.fromkeys(run.assumed for run in runs)
        ]
    return "\n".join(lines)


def _published_row(run):
    layout, fitted = f"t {run.tensor}, p {run.pipeline}", " (fitted)" * (run.name in FITTED_ON)
    values = f"{run.published:11.1f}{predicted_tflops(run):11.1f}{residual(run):+10.1%}{fitted}"
    return f"{run.name:28}{run.gpus:6,}{layout:>14}{values}"
