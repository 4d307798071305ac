"""Preflight's runs on GPUs as files for assets/recorded, so that the lessons can show them where there is no GPU."""

from manyhands.launch.recorded_runs import record


def export_recorded(results, folder):
    """Write <folder>/<lesson>.<name>.json for each lesson that went well on GPUs; returns the paths.

    A lesson's run is the one on the most ranks, a script's rather than the notebook's. Runs on a CPU are left out, and
    metrics that do not say under which conditions they were made.
    """
    paths = []
    for result in results:
        fit = [
            outcome
            for outcome in result.outcomes
            if outcome.ok and outcome.metrics["device"] != "cpu" and outcome.metrics.get("conditions")
        ]
        if fit:
            best = max(fit, key=lambda outcome: (outcome.metrics["world_size"], outcome.run.way != "notebook"))
            paths.append(record(best.metrics, folder))
    return paths
