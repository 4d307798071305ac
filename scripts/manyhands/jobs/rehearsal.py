"""Say which job of the rehearsal is next, and whether those before were healthy. Nothing is submitted.

make rehearsal
"""

import json
import sys
from pathlib import Path

from manyhands.course.folders import ROOT
from manyhands.jobs import submit
from manyhands.launch.run_folder import outputs_folder

STEPS = {  # job: what it shows
    "doctor": "cores, GPUs and channels of the nodes",
    "ddp_shakespeare": "lesson 03 on all nodes",
    "preflight": "every lesson of the event",
}


def ended(name: str, outputs: Path) -> int | None:
    """Return the exit status of the newest job of this name that has ended, or None."""
    files = sorted((outputs / "jobs").glob(f"{name}.*.status"), key=lambda file: file.stat().st_mtime)
    words = files[-1].read_text().split() if files else []
    return int(words[0]) if words and words[0].isdecimal() else None


def wrong(name: str, root: Path, outputs: Path) -> str:
    """Return what was not healthy in the newest job of this name, which has ended with status 0; "" if all was."""
    if name == "doctor":
        files = sorted(root.glob("doctor.o*"), key=lambda file: file.stat().st_mtime)
        text = files[-1].read_text("utf-8", "replace") if files else ""
        return "NCCL goes over sockets (NET/Socket): load the site's plug-in" if "NET/Socket" in text else ""
    if name == "ddp_shakespeare":
        try:
            run = json.loads((outputs / "03_data_parallel" / "latest" / "metrics.json").read_text("utf-8"))
        except (OSError, ValueError):
            return "it left no metrics.json in outputs/03_data_parallel/latest"
        where = run["conditions"]["hardware"]
        return "" if " nodes" in where else f"it ran on one node: {where}"
    try:
        flight = json.loads((outputs / "preflight" / "flight.json").read_text("utf-8"))
    except (OSError, ValueError):
        return "it left no outputs/preflight/flight.json"
    failed = [run["name"] for run in flight["runs"].values() if run["error"]]
    if not flight["finished"]:
        return "it did not make all runs: submit it again, and it goes on"
    return (
        f"{len(failed)} runs failed, the first of them {failed[0]}; see outputs/preflight/report.html" if failed else ""
    )


def report(root: Path, outputs: Path, via: str | None) -> tuple[list[str], bool]:
    """Return (lines for the screen, whether all steps were healthy)."""
    start = {"slurm": "sbatch jobs/{}.slurm", "pbs": "qsub jobs/{}.pbs"}.get(via or "", "bash jobs/{}.pbs")
    lines = [] if via else ["no scheduler answers here: what follows rehearses this machine alone"]
    for name, shows in STEPS.items():
        status = ended(name, outputs)
        fault = f"it ended with status {status}; see the end of its output" if status else ""
        if status is None:
            return [*lines, f"next: {start.format(name)}    # {shows}; then make rehearsal again"], False
        if fault := fault or wrong(name, root, outputs):
            return [*lines, f"{name}: {fault}", f"then again: {start.format(name)}"], False
        lines.append(f"{name}: healthy")
    return [*lines, "all three were healthy; on the hub two accounts now run lesson 02 at the same time"], True


def main() -> int:
    """Print the report."""
    print("\n".join(report(ROOT, outputs_folder(), submit.scheduler())[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
