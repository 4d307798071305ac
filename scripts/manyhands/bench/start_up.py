"""Seconds from the command to the first step of a real training run, as its own report says them."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from manyhands.bench.numbers import Number
from manyhands.launch.commands import TRAIN

AIM_S = 10

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
STEPS = 3


@dataclass(frozen=True)
class Start:
    """`starter` comes between python and the program."""

    name: str
    starter: tuple = ()


STARTS = (Start("start-up, one process"), Start("start-up, torchrun with 2 ranks", TORCHRUN))


def measure(start, folder, model, timeout_s=180):
    """Run `scripts/train.py` for some steps, with everything that comes before the first: a Number."""
    import os

    from manyhands.launch.processes import supervise

    print(f"{start.name} ...", flush=True)
    outputs = Path(folder) / start.name.replace(",", "").replace(" ", "-")
    environ = {**os.environ, "MANYHANDS_OUTPUTS": str(outputs)}
    if start.starter:
        environ["OMP_NUM_THREADS"] = "1"
    flags = [f"--train.steps={STEPS}", "--train.device=cpu", *_flags(model)]
    log = outputs / "train.log"
    ended = supervise(
        [sys.executable, *start.starter, str(TRAIN), *flags], log=log, timeout_s=timeout_s, environ=environ
    )
    value, note = None, ""
    if ended.status != 0:
        how = f"did not end within {timeout_s} s" if ended.timed_out else f"ended with status {ended.status}"
        note = f"scripts/train.py {how}; see {log}"
    else:
        value = first_steps_start(outputs)
        note = "" if value is not None else f"no start-up in the run's steps.jsonl; see {log}"
    return Number(start.name, value, "s", AIM_S, note=note)


def _flags(model):
    return [
        f"--model.n-layer={model.n_layer}", f"--model.n-head={model.n_head}", f"--model.n-embd={model.n_embd}",
        f"--model.block-size={model.block_size}", "--log.no-plots",
    ]  # fmt: skip


def first_steps_start(outputs):
    """`start_up_s` of the only run in `outputs`; None if it did not say it."""
    for path in sorted(Path(outputs).glob("train/*/steps.jsonl")):
        for line in path.read_text().splitlines():
            if (value := json.loads(line).get("start_up_s")) is not None:
                return value
    return None
