"""Write a run's metrics.json, with the conditions under which it was made, and a JSON line per step.

    metrics = Metrics(ranks, corpus=corpus, parameters={"steps": 300})
    metrics.exact(ring_steps=6, losses=losses)    # bit-equal from every launcher at the same number of ranks
    metrics.close(final_loss=loss)                # equal within a tolerance on any number of ranks
    metrics.measured(step_s=timing.slowest_s)     # times and memory: never compared
    metrics.write()                               # rank 0 writes <run folder>/metrics.json

JSON keeps floats exactly: Python writes the shortest digits that read back as the same float64, and every
float32 is a float64. So equal numbers in two files are equal bits; NaN and infinity are written as strings.
"""

import hashlib
import json
import math
import platform
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from manyhands.course.folders import ROOT, commit, write_whole
from manyhands.launch.launchers import launcher_named
from manyhands.launch.machine import cores_here
from manyhands.launch.ranks import Ranks
from manyhands.launch.run_folder import run_folder

TOLERANCE = {torch.float64: 1e-10}  # for different numbers of ranks at the same global batch
FP32_TOLERANCE = 1e-3


class Metrics:
    """Collect a run's numbers on all ranks; rank 0's are written. No call communicates.

    Values are numbers, strings, lists of them, dicts, or tensors (their numbers; large ones: `fingerprint`).
    """

    def __init__(self, ranks: Ranks, corpus=None, parameters: Mapping[str, Any] | None = None):
        self.ranks = ranks
        # without the number of ranks, so that runs on 2 and on 4 can be compared
        lesson_parameters = {k: v for k, v in (parameters or {}).items() if k != "n_ranks"}
        self.content = {
            "lesson": ranks.lesson, "launcher": ranks.launcher, "world_size": ranks.world_size,
            "device": ranks.device.type, "backend": ranks.backend,
            "torch": torch.__version__, "python": platform.python_version(),
            "corpus": corpus.metadata() if corpus is not None else None,
            "parameters": _plain("parameters", lesson_parameters),
            "exact": {}, "close": {}, "measured": {}, "conditions": {},
        }  # fmt: skip

    def exact(self, **values: Any) -> None:
        """Record values that are bit-identical under every launcher at the same number of ranks."""
        self.content["exact"] |= {name: _plain(name, value) for name, value in values.items()}

    def close(self, tolerance: float | None = None, **values: Any) -> None:
        """Record values that stay within `tolerance` (relative, or absolute below 1) on any number of ranks.

        None: 1e-10 for float64 tensors, else 1e-3.
        """
        for name, value in values.items():
            limit = tolerance or TOLERANCE.get(getattr(value, "dtype", torch.float32), FP32_TOLERANCE)
            self.content["close"][name] = {"value": _plain(name, value), "tolerance": limit}

    def measured(self, **values: Any) -> None:
        """Record values of this run and machine, such as times, which are never compared."""
        self.content["measured"] |= {name: _plain(name, value) for name, value in values.items()}

    def write(self) -> Path | None:
        """Write `metrics.json` atomically on rank 0 and return its path; return None on other ranks."""
        if self.ranks.rank != 0:
            return None
        self.content["conditions"] = conditions(self.ranks)
        text = json.dumps(self.content, indent=1, allow_nan=False) + "\n"
        return write_whole(run_folder(self.ranks) / "metrics.json", text)


def fingerprint(tensors: Iterable[torch.Tensor]) -> str:
    """Return the sha256 of the bytes of tensors such as `model.parameters()`, to compare them bit by bit."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(str((tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _plain(name, value):
    """Convert `value` to JSON's types without loss. Raise TypeError, naming the metric."""
    if hasattr(value, "tolist"):  # a tensor, a numpy array or number
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(name, item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(name, item) for key, item in value.items()}
    raise TypeError(f"metric {name}: {type(value).__name__} is not a number, text, list, dict or tensor")


def compare(one: Any, other: Any) -> list[str]:
    """Return sentences on how two runs of a lesson differ where they must not; an empty list if they do not.

    `one` and `other` are contents of metrics.json, or paths of it. Exact values are compared if ranks and device agree.
    On GPUs they need only be close and fingerprints are ignored, as launchers may choose other kernels and orders.
    """
    one, other = (json.loads(Path(m).read_text()) if isinstance(m, (str, Path)) else m for m in (one, other))
    for what in ("lesson", "corpus", "parameters"):
        if one[what] != other[what]:
            return [f"{what} differs, so the runs cannot be compared: {one[what]} and {other[what]}"]
    differences = []
    if all(one[what] == other[what] for what in ("world_size", "device")):
        tolerance = 0 if one["device"] == "cpu" else FP32_TOLERANCE
        for name in sorted(one["exact"].keys() | other["exact"].keys()):
            values = [run["exact"].get(name, "missing") for run in (one, other)]
            if not (tolerance and all(isinstance(value, str) for value in values)):
                differences += _differences(f"exact {name}", values[0], values[1], tolerance)
    for name in sorted(one["close"].keys() | other["close"].keys()):
        values = [run["close"].get(name, {"value": "missing", "tolerance": 0}) for run in (one, other)]
        tolerance = max(value["tolerance"] for value in values)
        differences += _differences(f"close {name}", values[0]["value"], values[1]["value"], tolerance)
    return differences


def _differences(name, a, b, tolerance):
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = [(f"{name}[{i}]", x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    elif isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        pairs = [(f"{name}.{key}", a[key], b[key]) for key in a]
    elif repr(a) == repr(b):  # as bits: 0.0 and -0.0 differ, 1 and 1.0 too
        return []
    elif tolerance and {type(a), type(b)} in ({float}, {int, float}):
        apart = abs(a - b)
        if apart <= tolerance * max(1, abs(a), abs(b)):
            return []
        return [f"{name}: {a} and {b} are {apart:.2g} apart, more than the tolerance {tolerance:g}"]
    else:
        return [f"{name}: {a} and {b}"]
    # report only the first difference of a list
    return next((found for pair in pairs if (found := _differences(*pair, tolerance))), [])


class StepLog:
    """Append a JSON line per step to the file `path` on rank 0, flushed immediately; other ranks write nothing."""

    def __init__(self, ranks: Ranks, path: Path):
        self.file = open(path, "a", buffering=1) if ranks.rank == 0 else None  # noqa: SIM115

    def write(self, **values: Any) -> None:
        if self.file:
            self.file.write(json.dumps({name: _plain(name, value) for name, value in values.items()}) + "\n")

    def close(self) -> None:
        if self.file:
            self.file.close()


def conditions(ranks: Ranks) -> dict:
    """Return the conditions of a run in JSON's types, without host names or folders.

    {"hardware", "versions": of the libraries that this device uses, "commit", "date", "command"}; None if unknown.
    """
    cuda = ranks.device.type == "cuda"
    versions = {
        "torch": torch.__version__,
        "cuda": (torch.version.cuda or torch.version.hip) if cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "python": platform.python_version(),
    }
    made = {"hardware": hardware(ranks), "versions": versions, "commit": commit()}
    return made | {"date": time.strftime("%Y-%m-%d"), "command": command(ranks)}


def hardware(ranks: Ranks) -> str:
    """Describe the hardware as rank 0 sees it: "4 x NVIDIA H200" or "2 cores of ...", with the nodes if several."""
    if ranks.device.type == "cpu":
        count = cores_here()
        found = f"{count} core{'s' * (count > 1)} of {cpu_name()}"
    else:
        found = f"{ranks.world_size} x {torch.get_device_module(ranks.device).get_device_name(ranks.device)}"
    nodes = -(-ranks.world_size // ranks.local_world_size)
    return found + (f" on {nodes} nodes" if nodes > 1 else "")


def command(ranks: Ranks) -> str:
    """Return the command that repeats this run, or the notebook's name."""
    if ranks.launcher == "notebook":
        return f"notebooks/{ranks.lesson}.ipynb with n_ranks = {ranks.world_size}"
    path = Path(sys.argv[0]).resolve()
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name  # omits other folders
    script = " ".join([name, *sys.argv[1:]])
    nodes = -(-ranks.world_size // ranks.local_world_size)
    form = launcher_named(ranks.launcher).command
    return form.format(n=ranks.world_size, local=ranks.local_world_size, nodes=nodes, script=script)


def cpu_name() -> str:
    """Return the system's name of its CPU."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
