"""How to start what a plan recommends: the flags of `scripts/train.py`, and the lines that submit them as a job.

    train_flags(question, candidate)      # ["--preset", "olmo-7b", "--train.global-batch", "512", ...]
    start_lines(question, candidate)      # lines of a shell

    not_trained(question, candidate)      # why there are none: a sentence, or ""

Only what differs from the preset is named.
"""

import dataclasses
import shlex

from manyhands.config.options import from_preset
from manyhands.config.presets import PRESETS

GROUPS = ("model", "train", "parallel")


def not_trained(question, candidate):
    """Why train.py cannot run a plan, in a sentence; "" where it can."""
    if question.model.style != "gpt":
        return "train.py trains the course's GPT alone: there is no command for this model"
    if question.model.n_expert > 1:
        return "train.py has no experts: there is no command for this model"
    if candidate.layout.context > 1:
        return "train.py has no context axis: there is no command for this layout"
    return ""


def train_flags(question, candidate):
    """The words behind `python scripts/train.py`. None where it cannot run the plan: see `not_trained`."""
    if not_trained(question, candidate):
        return None
    preset = question.model.name if question.model.name in PRESETS else "nano"
    base, flags = from_preset(preset), ["--preset", preset]
    for group in GROUPS:
        before, after = getattr(base, group), getattr(candidate.options, group)
        for field in dataclasses.fields(after):
            value = getattr(after, field.name)
            if value != getattr(before, field.name):
                flags += _flag(f"{group}.{field.name}", value)
    return flags


def _flag(name, value):
    name = name.replace("_", "-")
    group, option = name.split(".")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--{group}.no-{option}"]
    return [f"--{name}", str(value)]


def start_lines(question, candidate):
    """[(what it is for, line)]: to look at first, then to run here or as a job. [] where train.py cannot run it.

    Several nodes need a job; its directives are written once, with the site's name (see jobs/README.md).
    """
    flags = train_flags(question, candidate)
    if flags is None:
        return []
    words, gpus = shlex.join(flags), question.gpus
    per_node = min(int(question.machine.gpus_per_node), gpus)
    # the dry run does not take off what offload keeps in the host's memory
    room = "" if candidate.options.parallel.offload else f" --gpu-gib {question.machine.memory_bytes / 2**30:.0f}"
    lines = [("check it", f"python scripts/train.py {words} --ranks {gpus}{room} --dry-run")]
    if gpus == 1:
        return [*lines, ("run it", f"python scripts/train.py {words}")]
    if gpus == per_node:
        lines.append(("run it", f"python scripts/launch.py --nproc {gpus} -- {words}"))
    stamp = f"python -m manyhands.jobs.stamp stamp --site {question.machine.site} --nodes {gpus // per_node} --gpus {per_node}"
    return [
        *lines,
        ("a job, once", stamp),
        ("Slurm", f"sbatch jobs/train.slurm {words}"),
        ("PBS", f'qsub -v TRAIN_ARGS="{words}" jobs/train.pbs'),
    ]
