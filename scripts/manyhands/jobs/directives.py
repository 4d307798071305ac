"""Find, replace and check the lines of a job file that the scheduler reads.

A directive is known by its key: `-A`, `-l select` (PBS; `-l` and `-W` lines are taken apart at their commas) or
`--account` (Slurm; short options become long ones). `complaints` names errors that a scheduler would silently ignore;
qsub and sbatch themselves refuse unknown options and resources.
"""

import re
from dataclasses import dataclass

SCHEDULERS = {".pbs": "pbs", ".slurm": "slurm"}
PREFIX = {"pbs": "#PBS", "slurm": "#SBATCH"}
PROGRAM = {"pbs": "PBS", "slurm": "Slurm"}

_LONG = {
    "-A": "--account", "-C": "--constraint", "-G": "--gpus", "-J": "--job-name", "-L": "--licenses",
    "-N": "--nodes", "-S": "--core-spec", "-a": "--array", "-c": "--cpus-per-task", "-d": "--dependency",
    "-e": "--error", "-n": "--ntasks", "-o": "--output", "-p": "--partition", "-q": "--qos", "-t": "--time",
}  # fmt: skip


@dataclass(frozen=True)
class Directive:
    key: str  # "-q", "-l select", "--nodes"
    value: str  # "" if the option has none


def duration_s(text):
    """Return seconds of hours:minutes:seconds. ValueError otherwise: a bare 10 is seconds to PBS, minutes to Slurm."""
    match = re.fullmatch(r"(\d+):([0-5]\d):([0-5]\d)", text)
    if not match or int(text.replace(":", "")) == 0:
        raise ValueError(f"walltime {text!r} is not hours:minutes:seconds above zero; write ten minutes as 00:10:00")
    hours, minutes, seconds = map(int, match.groups())
    return 3600 * hours + 60 * minutes + seconds


def _split(line, scheduler):
    words = re.sub(r"\s#.*", "", line[len(PREFIX[scheduler]) :]).split(maxsplit=1)
    if not words:
        return []
    key, value = words[0], words[1].strip() if len(words) > 1 else ""
    if scheduler == "slurm":
        key, equals, attached = key.partition("=")
        return [Directive(_LONG.get(key, key), attached if equals else value)]
    if key not in ("-l", "-W"):
        return [Directive(key, value)]
    pairs = [item.strip().partition("=") for item in re.split(r",(?=\s*\w+=)" if key == "-W" else ",", value)]
    return [Directive(f"{key} {name}", content) for name, _, content in pairs]


def _first_command(lines):
    """Return the index of the first line that is neither blank nor a comment, where a scheduler stops reading."""
    return next((n for n, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines))


def read(text, scheduler):
    """Return the directives of a job file that its scheduler will see, in order."""
    lines = text.splitlines()
    return [
        directive
        for line in lines[: _first_command(lines)]
        if line.startswith(PREFIX[scheduler])
        for directive in _split(line, scheduler)
    ]


def as_line(key, value, scheduler):
    """`#PBS -l select=2`, `#PBS -q debug`, `#SBATCH --nodes=2`."""
    joint = "=" if value and (scheduler == "slurm" or key.startswith(("-l ", "-W "))) else " " if value else ""
    return f"{PREFIX[scheduler]} {key}{joint}{value}"


def replace(text, scheduler, owned, wanted):
    """Return `text` with the directives in `owned` replaced by `wanted` {key: value}.

    All other lines, and the rest of a `-l` line that held an owned resource, stay as they are.
    """
    lines, end = text.splitlines(), _first_command(text.splitlines())
    kept, at = [], None
    for i, line in enumerate(lines):
        here = _split(line, scheduler) if line.startswith(PREFIX[scheduler]) and i < end else []
        if any(directive.key in owned for directive in here):
            at = len(kept) if at is None else at
            kept += [as_line(d.key, d.value, scheduler) for d in here if d.key not in owned]
        else:
            kept.append(line)
    if at is None:  # none of ours yet: after the last of the user's, or after #!/bin/bash
        at = max([n for n, line in enumerate(kept) if line.startswith(PREFIX[scheduler])], default=0) + 1
    kept[at:at] = [as_line(key, value, scheduler) for key, value in wanted.items()]
    return "\n".join(kept) + "\n"


def complaints(text, scheduler, site):
    """Return sentences on errors in a job file's directives for `site` (a jobs.stamp.Site), or an empty list."""
    found = read(text, scheduler)
    values = {directive.key: directive.value for directive in found}
    say = list(_ignored_lines(text, scheduler))
    say += (_pbs if scheduler == "pbs" else _slurm)(found, values, site)
    if "account" in site.needs and not values.get(site.account_option if scheduler == "pbs" else "--account"):
        say.append(f"{site.title} charges each job to a project: make jobs SITE={site.name} ACCOUNT=...")
    walltime = values.get("-l walltime" if scheduler == "pbs" else "--time")
    queue = values.get("-q" if scheduler == "pbs" else site.queue_option)
    if "queue" in site.needs and not queue:
        say.append(f"{site.title} wants a queue named: make jobs SITE={site.name} QUEUE=...")
    try:
        if walltime is None:
            say.append("no walltime: the site would refuse the job, or guess")
        elif not values.get("--reservation"):  # a reservation has its own limits
            say += site.over_limits(queue, number_of_nodes(values, scheduler), duration_s(walltime))
    except ValueError as error:
        say.append(str(error))
    return say


def number_of_nodes(values, scheduler):
    """Nodes that {key: value} asks for, or None where that is no plain number."""
    nodes = values.get("--nodes", "") if scheduler == "slurm" else values.get("-l select", "").partition(":")[0]
    return int(nodes) if nodes.isdecimal() else None


def chunk(select):
    """Return {resource: value} of the chunk in a PBS select, such as 2:ncpus=8:ngpus=2."""
    return dict(part.partition("=")[::2] for part in select.split(":")[1:])


def gpus_per_node(values):
    """Return the GPUs per node that the directives, or a chunk's resources, ask for; 0 where they do not say."""
    asked = values.get("ngpus") or values.get("--gpus-per-node") or values.get("--gres") or "0"
    number = re.search(r"\d+$", str(asked))
    return int(number[0]) if number else 0


def _ignored_lines(text, scheduler):
    lines, prefix = text.splitlines(), PREFIX[scheduler]
    for number, line in enumerate(lines, start=1):
        if re.match(rf"#\s*{prefix[1:]}\s+-", line, re.IGNORECASE) and not line.startswith(prefix):
            start = line.split("-", 1)[0].strip()
            yield f"line {number}: {start!r} is a comment, which {PROGRAM[scheduler]} ignores: write {prefix!r}"
        elif line.startswith(prefix) and number > _first_command(lines):
            yield f"line {number}: stands below the first command, where {PROGRAM[scheduler]} no longer reads"


def _pbs(found, values, site):
    selects = sum(directive.key == "-l select" for directive in found)
    if selects != 1:
        yield f"{selects} lines with -l select=: PBS wants exactly one"
    if values.get("-l place", "").partition(":")[0] != "scatter":
        yield "no -l place=scatter: PBS may put both chunks on one node"
    systems = [part for part in site.filesystems if part]
    asked = [name for name in values.get("-l filesystems", "").split(":") if name]
    if systems and not asked:
        yield f"no -l filesystems=: mandatory on {site.title}; it has {', '.join(systems)}"
    for name in asked if systems else []:
        if name not in systems:
            yield f"{site.title} has no file system {name!r}; it has {', '.join(systems)}"


def _slurm(found, values, site):
    for key in ("--nodes", "--time", "--account", "--ntasks-per-node", "--partition", "--qos"):
        if sum(directive.key == key for directive in found) > 1:
            yield f"{key} stands there twice: Slurm takes the last"
    if not values.get("--nodes"):
        yield "no --nodes: Slurm may put all tasks on one node"
    for key in site.slurm.get("required", []):
        if not values.get(key):
            yield f"{site.title} needs {key}: without it the job gets no GPU node or is refused"
