"""Read and write assets/recorded: results recorded on other machines, shown where those are not available.

recorded.text("04_pending.out")        # what a program printed
recorded.numbers("04_queue.json")      # a dict; its "conditions" say on what and when it was made
recorded.runs("06")                    # every recorded run of lesson 06
recorded.beside("06", {"step time": (step_s, "s", "step_s")})      # a table: here | each recorded run
recorded.published("02_all_reduce")    # curves that others have published, from assets/published
recorded.all_reduce_curves()           # bus bandwidth by bytes: our recorded runs of lesson 02, else published ones

    python -m manyhands.launch.recorded_runs 06 [--run outputs/06_zero_fsdp/latest] [--name h200x4]

writes assets/recorded/06_zero_fsdp.h200x4.json from the metrics.json of a run on GPUs. See assets/recorded/README.md.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from manyhands.course.folders import ASSETS, write_whole
from manyhands.course.lessons import find_lessons
from manyhands.launch.run_folder import outputs_folder

RECORDED = ASSETS / "recorded"
PUBLISHED = ASSETS / "published"
ALONE = {"01_one_device"}  # lessons that run as one process on one GPU
# fields of a file, in order; all from metrics.json or its conditions
FIELDS = (
    "lesson", "name", "hardware", "versions", "commit", "date", "command", "launcher", "backend", "device",
    "world_size", "corpus", "parameters", "measured", "exact",
)  # fmt: skip
VENDORS = r"nvidia|amd|intel|\(r\)|data center gpu|instinct"


def text(name: str) -> str:
    """Return the text of assets/recorded/<name>."""
    return (RECORDED / name).read_text(encoding="utf-8")


def numbers(name: str) -> dict:
    """Return the content of a JSON file in assets/recorded."""
    return json.loads(text(name))


def runs(lesson: str, folder: Path | None = None) -> list[dict]:
    """Return the recorded runs of a lesson ("06" or "06_zero_fsdp"), sorted by name: dicts with FIELDS."""
    files = sorted((folder or RECORDED).glob(f"{_full_name(lesson)}.*.json"))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def beside(lesson: str, here: dict[str, tuple], folder: Path | None = None) -> str:
    """Return a table of this run's numbers next to each recorded run's, or the two commands that record one.

    `here`: {label: (value, unit, name in `measured` or `exact`)}. "times.ddp": in a dict or list. "-": not recorded.
    """
    name, others = _full_name(lesson), runs(lesson, folder)
    if not others:
        gpus, start = "4 GPUs", "python -m torch.distributed.run --standalone --nproc-per-node 4"
        if name in ALONE:
            gpus, start = "a GPU", "python"
        return (
            f"No GPU run of {name} is recorded yet. On a node with {gpus}:\n"
            f"{start} scripts/{name}.py\n"
            f"python -m manyhands.launch.recorded_runs {name.split('_')[0]}"
        )
    rows = [["", "here", *(run["name"] for run in others)]]
    for label, (value, unit, found) in here.items():
        theirs = [_look_up(run, found) for run in others]
        rows.append([f"{label}, {unit}" if unit else label, *map(_shown, [value, *theirs])])
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = [
        f"{row[0]:<{first}}" + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], widths, strict=True))
        for row in rows
    ]
    return "\n".join([line.rstrip() for line in lines] + [describe(run) for run in others])


def describe(run: dict) -> str:
    """Describe in one line on what, when and with what a recorded run was made."""
    known = {"torch": run["versions"]["torch"], "CUDA": run["versions"]["cuda"], "NCCL": run["versions"]["nccl"]}
    said = ", ".join(f"{what} {version}" for what, version in known.items() if version)
    set_to = " ".join(f"{name}={value}" for name, value in run["parameters"].items())
    return (
        f"{run['name']}: {run['world_size']} ranks on {run['hardware']}; {said}; {run['date']}, "
        f"commit {run['commit'] or 'unknown'}" + (f"; {set_to}" if set_to else "")
    )


def published(name: str) -> list[dict]:
    """Return the series of assets/published/<name>.json, each with its source; see assets/published/README.md."""
    return json.loads((PUBLISHED / f"{name}.json").read_text(encoding="utf-8"))["series"]


def all_reduce_curves(folder: Path | None = None) -> list[dict]:
    """Return bus bandwidth in GB/s against bytes: of our recorded runs of lesson 02, else the published curves.

    Each is a dict with at least `name`, `hardware`, `source` and `points`, [[bytes, GB/s], ...].
    """
    ours = []
    for run in runs("02", folder):
        n, found = run["world_size"], run["measured"]
        seconds = next(iter(found["all_reduce_s"].values()))  # its first word is the library
        rates = [2 * (n - 1) / n * b / s / 1e9 for b, s in zip(found["sizes_b"], seconds, strict=True)]
        points = [list(point) for point in zip(found["sizes_b"], rates, strict=True)]
        ours.append({"name": run["name"], "hardware": run["hardware"], "source": describe(run), "points": points})
    return ours or published("02_all_reduce")


def record(metrics: dict, folder: Path | None = None, name: str | None = None) -> Path:
    """Write a run's metrics (its metrics.json) to assets/recorded/<lesson>.<name>.json and return the path.

    The default `name` is made of hardware and number of ranks. Raise ValueError for a run on a CPU, a run without its
    conditions, and an invalid name.
    """
    lesson = metrics["lesson"]
    if metrics["device"] == "cpu":
        raise ValueError(f"this run of {lesson} was on a CPU; only runs on GPUs are recorded")
    if not metrics.get("conditions"):
        raise ValueError(f"this run of {lesson} does not say on what it was made; run the lesson again")
    name = name or default_name(metrics)
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name):
        raise ValueError(f"invalid name {name!r} (small letters, digits, - and _, such as h200x4)")
    values = {**metrics, **metrics["conditions"], "name": name}
    path = (folder or RECORDED) / f"{lesson}.{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_whole(path, json.dumps({field: values[field] for field in FIELDS}, indent=1, allow_nan=False) + "\n")


def default_name(metrics: dict) -> str:
    """Return "a100-sxm4-40gbx8" for "8 x NVIDIA A100-SXM4-40GB on 2 nodes"."""
    kind = re.sub(rf"^\d+ x | on \d+ nodes$|{VENDORS}", " ", metrics["conditions"]["hardware"].lower())
    return f"{re.sub(r'[^a-z0-9]+', '-', kind).strip('-')}x{metrics['world_size']}"


def _full_name(lesson):
    """Return "06_zero_fsdp" for "06", and "train" for the trainer. Raise ValueError for an unknown lesson."""
    return lesson if lesson == "train" else find_lessons(only=[lesson])[0].name


def _look_up(run, name):
    """Return a number of a recorded run, or None."""
    for found in (run["measured"], run["exact"]):
        for part in [name] if name in found else name.split("."):
            if isinstance(found, list):
                found = {str(i): value for i, value in enumerate(found)}
            found = found.get(part) if isinstance(found, dict) else None
        if found is not None:
            return found
    return None


def _shown(value):
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    prog = "python -m manyhands.launch.recorded_runs"
    parser = argparse.ArgumentParser(prog=prog, description="Record a lesson's run on GPUs.")
    parser.add_argument("lesson", help="06 or 06_zero_fsdp")
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="the run's folder (default: the lesson's last one)")
    parser.add_argument("--name", help="such as h200x4 (default: made of the hardware and the number of ranks)")
    options = parser.parse_args(argv)
    try:
        lesson = _full_name(options.lesson)
        run = options.run or outputs_folder() / lesson / "latest"
        metrics = json.loads((run / "metrics.json").read_text(encoding="utf-8"))
        if metrics["lesson"] != lesson:
            raise ValueError(f"{run} is a run of {metrics['lesson']}, not of {lesson}; name another with --run")
        path = record(metrics, name=options.name)
    except (FileNotFoundError, ValueError) as error:
        missing = "{} does not exist; run the lesson first, or name its folder with --run"
        said = error if isinstance(error, ValueError) else missing.format(error.filename)
        print(f"recorded: {said}", file=sys.stderr)
        return 2
    if "uncommitted" in (metrics["conditions"]["commit"] or "uncommitted"):
        print("the run had uncommitted changes, which the file records; commit and run again for a result to keep")
    print(path)
    return 0


if __name__ == "__main__":
    from manyhands.launch.entry import run_program

    run_program("recorded_runs", main)
