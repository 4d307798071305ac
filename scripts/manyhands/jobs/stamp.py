"""Write a site's directives into the job files, once, so that the plain `qsub jobs/ddp_shakespeare.pbs` works.

    python -m manyhands.jobs.stamp sites
    python -m manyhands.jobs.stamp stamp --site polaris --account MyProject --queue debug --walltime 00:20:00
    python -m manyhands.jobs.stamp check

(`make jobs SITE=polaris ACCOUNT=MyProject ...` calls the second.) A scheduler reads its directives before any shell
runs, so they cannot come from a variable or a sourced file. A site is a small file in jobs/sites; a stamped file says
which in its line "# site: ...". Stamping again changes only the given settings and keeps the rest: your own directives,
the number of nodes, every other line; for the same site also what an earlier stamp, or you, wrote there.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from manyhands.course.folders import ROOT, write_whole
from manyhands.jobs import directives
from manyhands.launch.program import Refused

try:
    import tomllib
except ModuleNotFoundError:  # before Python 3.11: pip brings one
    try:
        from pip._vendor import tomli as tomllib
    except ImportError:
        sys.exit(f"error: {sys.executable} is older than Python 3.11: make jobs PYTHON=/path/to/a/newer/python3 ...")

SETTINGS = {
    "NPROC_PER_NODE": "2", "MPIEXEC_FLAGS": "", "STARTER": "torchrun", "SRUN_FLAGS": "", "MANYHANDS_DEVICE": "",
    "IMAGE": "", "IMAGE_FLAGS": "", "ENGINE": "apptainer", "site_setup": ":",
}  # fmt: skip
WISHES = ("account", "queue", "reservation", "walltime", "nodes", "gpus", "mem")
ARRAY = {"pbs": "-J", "slurm": "--array"}
ENGINES = ("apptainer", "singularity", "podman-hpc", "pyxis")  # `allocation.ENGINES`, which imports packages
ACCOUNTS = ("-A", "-P", "-W group_list")  # what PBS charges a job to, as sites have it


def _walltime(value):
    with suppress(ValueError):
        return isinstance(value, str) and directives.duration_s(value) > 0


def _texts(value, allowed=None):
    return isinstance(value, list) and all(isinstance(one, str) and one in (allowed or [one]) for one in value)


def _one_of(*allowed):
    return " or ".join(f'"{one}"' for one in allowed), lambda value: value in allowed


# What a site file may hold: {table: {key: (what its value is, in words; whether a value is that)}}. No package checks
# this, as `make jobs` needs none.
_TEXT = "text in quotes, on one line", lambda value: isinstance(value, str) and "\n" not in value.strip()
_LINES = "text in quotes", lambda value: isinstance(value, str) and value.strip() != ""
_DEFAULT = "text in quotes, without }", lambda value: isinstance(value, str) and not re.search(r"[}\n]", value)
_NUMBER = "a whole number from 1", lambda value: type(value) is int and value > 0
_TIME = 'hours:minutes:seconds in quotes, as "00:10:00"', _walltime
_TEXTS = 'a list of texts, as ["..."]', _texts
_OPTIONS = 'a list of options, as ["-k doe"]', lambda value: _texts(value) and all(one[:1] == "-" for one in value)
_NODES = (
    "the fewest and the most nodes, as [1, 4]",
    lambda value: isinstance(value, list) and [type(n) for n in value] == [int, int] and 1 <= value[0] <= value[1],
)
KEYS = {
    "": {
        "title": _LINES, "checked": ('a date in quotes, as "2026-11-28"', _TEXT[1]), "sources": _TEXTS,
        "verified": _LINES, "walltime": _TIME, "login": _TEXT, "queue": _TEXT, "cores_per_gpu": _NUMBER,
        "needs": ('a list of "account" and "queue"', lambda value: _texts(value, ["account", "queue"])),
    },
    "pbs": {"chunk": _TEXT, "directives": _OPTIONS, "filesystems": _TEXTS, "account_option": _one_of(*ACCOUNTS)},
    "slurm": {"directives": _OPTIONS, "queue_option": _one_of("--partition", "--qos"), "required": _OPTIONS},
    "queues": {"nodes": _NODES, "walltime": _TIME, "jobs": _NUMBER},  # of each queue
    "settings": {name: _TEXT if name == "site_setup" else _DEFAULT for name in SETTINGS}
    | {"STARTER": _one_of("torchrun", "mpiexec", "srun"), "ENGINE": _one_of(*ENGINES)},
}  # fmt: skip
REQUIRED = {
    "": ("title", "checked", "sources", "verified", "walltime"),
    "pbs": ("chunk",),
    "queues": ("nodes", "walltime"),
}
NAME = r"[A-Za-z0-9][A-Za-z0-9_.@-]*"


class JobError(Refused):
    """A site, an account, a walltime or a file that cannot be used; the message holds the cure."""


@dataclass(frozen=True)
class Site:
    """One machine: what its scheduler wants, when that was read, and where. `pbs`, `slurm`: None where it has none."""

    name: str
    title: str
    checked: str  # date
    sources: list
    verified: str  # what was compared with the sources, and what was not
    walltime: str
    login: str = ""  # what comes before `make` builds an environment on a login node
    needs: list = field(default_factory=list)
    queue: str | None = None
    pbs: dict | None = None
    slurm: dict | None = None
    cores_per_gpu: int | None = None  # None: a job gets whole nodes
    queues: dict = field(default_factory=dict)  # name -> nodes [least, most], walltime, jobs of one user in any state
    settings: dict = field(default_factory=dict)

    @classmethod
    def read(cls, path):
        """Return the site in a file. Raise JobError, with the key and the cure, for whatever is wrong in it."""
        try:
            found = tomllib.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise JobError(f"{path} is no site ({error}); jobs/sites/generic.toml shows the form") from None
        _check_table(path, "", {key: value for key, value in found.items() if key not in KEYS})
        for table in KEYS.keys() & found.keys():
            if not isinstance(found[table], dict):
                raise JobError(f"{path}: {table} = {found[table]!r}: it is a table, [{table}]")
            for name, inner in found["queues"].items() if table == "queues" else [(table, found[table])]:
                _check_table(path, table, inner, name)
        if not {"pbs", "slurm"} & found.keys():
            raise JobError(f"{path} has neither a table [pbs] nor [slurm]: add the one of your scheduler")
        return cls(name=path.stem, **found)

    @property
    def filesystems(self):
        return self.pbs.get("filesystems", [])

    @property
    def queue_option(self):
        """Return the Slurm option that QUEUE sets here: --partition or --qos."""
        return self.slurm.get("queue_option", "--partition")

    @property
    def account_option(self):
        """Return the PBS option that ACCOUNT sets here: -A, -P or -W group_list."""
        return (self.pbs or {}).get("account_option", ACCOUNTS[0])

    def fixed(self, scheduler):
        """{key: value} of the directives that each job on this machine gets; none where it has no such scheduler."""
        lines = (getattr(self, scheduler) or {}).get("directives", [])
        text = "".join(f"{directives.PREFIX[scheduler]} {line}\n" for line in lines)
        return {directive.key: directive.value for directive in directives.read(text, scheduler)}

    def usual_walltime(self, name, queue):
        """Return the default walltime of a job file. A preflight has many runs: an hour, if its queue allows it."""
        longest = self.queues.get(queue or self.queue, {}).get("walltime", "01:00:00")
        return min("01:00:00", longest, key=directives.duration_s) if name == "preflight" else self.walltime

    def over_limits(self, queue, nodes, walltime_s):
        """Sentences on what `queue` does not allow; none for a queue whose limits are not known."""
        if queue not in self.queues:
            return
        (least, most), longest = self.queues[queue]["nodes"], self.queues[queue]["walltime"]
        if nodes is not None and not least <= nodes <= most:
            yield f"queue {queue} of {self.title} takes {least} to {most} nodes, not {nodes}"
        if walltime_s > directives.duration_s(longest):
            yield f"queue {queue} of {self.title} takes at most {longest}, not {walltime_s / 60:.0f} minutes"


def _check_table(path, table, found, queue=""):
    """Raise JobError for a key of a site file's table that is unknown, misplaced or missing, or of the wrong kind."""
    keys, at = KEYS[table], f"{path}, {f'queue {queue}' if table == 'queues' else f'[{table}]' if table else 'top'}"
    if not isinstance(found, dict):
        raise JobError(f'{at}: it is a table, as {queue} = {{ nodes = [1, 4], walltime = "01:00:00" }}')
    for key, value in found.items():
        if key not in keys:
            homes = [f"[{name}]" if name else "the top, above the first [table]" for name in KEYS if key in KEYS[name]]
            tables = [f"[{name}]" for name in KEYS if name] if not table else []
            near = difflib.get_close_matches(f"[{key}]" if isinstance(value, dict) else key, [*keys, *tables], 1)
            near = ["site_setup"] if key.startswith("module") else near
            cure = f"known are {', '.join([*keys, *tables])}"
            if homes or near:
                cure = f"it belongs into {' or '.join(homes)}" if homes else f"use {near[0]}"
            raise JobError(f"{at}: {key} is unknown there; {cure}")
        words, fits = keys[key]
        if not fits(value):
            raise JobError(f"{at}: {key} = {value!r} must be {words}")
    for key in REQUIRED.get(table, ()):
        if key not in found:
            raise JobError(f"{at}: {key} is missing: {keys[key][0]}")


def jobs_folder():
    """The folder of the job files: of the course in which we are, else of that around the package. Raise JobError."""
    for course in (Path.cwd(), Path.cwd().parent, ROOT):
        if (course / "jobs" / "sites").is_dir():
            return course / "jobs"
    raise JobError("there are no job files here: go to the course's folder, the one that holds jobs/ and scripts/")


def sites():
    """Return {name: Site} of every file in jobs/sites, by name. Raise JobError for an invalid one."""
    paths = sorted((jobs_folder() / "sites").glob("*.toml"))
    return {path.stem: Site.read(path) for path in paths}


def site_named(name):
    """Return the site of a name. Raise JobError with the list of sites if it is unknown."""
    known = sites()
    if name not in known:
        cure = f"take SITE={', '.join(known)}, or copy jobs/sites/generic.toml to a file for yours"
        raise JobError(f"no site {name!r}: {cure}")
    return known[name]


def job_files(folder=None):
    """[(path, scheduler)] of the job files: their ending says who reads them."""
    paths = sorted(path for path in (folder or jobs_folder()).iterdir() if path.suffix in directives.SCHEDULERS)
    return [(path, directives.SCHEDULERS[path.suffix]) for path in paths]


def stamped_site(text):
    """Return the name of the site that a job file was written for."""
    line = re.search(r"^# site: (\S+)", text, re.MULTILINE)
    return line.group(1) if line else "generic"


def stamp(
    site, account=None, queue=None, reservation=None, walltime=None, nodes=None, gpus=None, mem=None, folder=None
):
    """Write `site`'s directives into each job file that its scheduler reads; the paths of these files.

    `nodes`: of each job; a row of a table (sweep.slurm) keeps its own. `gpus`: per node, with a rank, cores and memory
    for each; 0 asks for none, None leaves them as they stand. `mem`: of a node, such as "64G". The generic site without
    a wish brings back what a checkout holds.
    Nothing is written unless all of it can be. Raise JobError: unknown site, missing account, a walltime or a name
    that is none, more than the queue allows, files that cannot be written.
    """
    site, wishes = site_named(site), {"account": account, "queue": queue, "reservation": reservation}
    for name, value in wishes.items():
        if value and not re.fullmatch(NAME, value):
            raise JobError(f"{name.upper()}={value!r} is not a name that a scheduler takes: letters, digits and ._@-")
    if nodes is not None and nodes < 1:
        raise JobError(f"NODES={nodes}: a job needs at least one node")
    if mem and not re.fullmatch("[1-9][0-9]*[MGT]", mem):
        raise JobError(f"MEM={mem!r} is no memory of a node: write a whole number and M, G or T, as MEM=64G")
    wishes |= {"walltime": walltime, "nodes": nodes, "gpus": gpus, "mem": mem}
    new = {}
    for path, scheduler in job_files(folder):
        if getattr(site, scheduler):
            text = path.read_text(encoding="utf-8")
            new[path] = _stamped(text, scheduler, site, wishes | {"usual": site.usual_walltime(path.stem, queue)})
            if wrong := directives.complaints(new[path], scheduler, site):
                raise JobError(f"{path.name} for {site.title}: " + "; ".join(wrong))
    for path, text in new.items():
        try:
            write_whole(path, text)
        except OSError as error:
            cure = "work in a copy of the course that is yours"
            raise JobError(f"{path} cannot be written ({error.strerror}): {cure}") from None
    return list(new)


def _stamped(text, scheduler, site, wishes):
    """Return the text of a job file, written for `site`."""
    old = {directive.key: directive.value for directive in directives.read(text, scheduler)}
    undo = site.name == "generic" and not any(wishes[name] is not None for name in WISHES)
    same = stamped_site(text) == site.name and not undo
    nodes = not undo and directives.number_of_nodes(old, scheduler)
    if ARRAY[scheduler] in old:  # a row of a sweep is small, whatever other jobs have
        queue = site.queues.get(wishes["reservation"] or wishes["queue"] or site.queue, {})
        nodes = max(nodes or 1, queue.get("nodes", [1])[0])
    else:
        nodes = wishes["nodes"] or nodes or 2
    before = []  # where jobs are charged and the site's option is not there, its file named another one then
    if scheduler == "pbs" and same and "account" in site.needs and site.account_option not in old:
        before = [option for option in ACCOUNTS if option in old]
        old[site.account_option] = next((old[option] for option in before), "")
    wanted = (_pbs if scheduler == "pbs" else _slurm)(site, wishes, nodes, old if same else {})
    owned = set(wanted) | {"--partition", "--qos", *before}  # of the previous site
    for other in sites().values():
        owned |= {*other.fixed(scheduler), *([other.account_option] if scheduler == "pbs" else [])}
    text = directives.replace(text, scheduler, owned, {key: value for key, value in wanted.items() if value})
    text = re.sub(r"^# site: \S+", f"# site: {site.name}", text, flags=re.MULTILINE)
    settings = {} if same else SETTINGS | site.settings
    if wishes["gpus"] is not None:
        settings["NPROC_PER_NODE"] = str(wishes["gpus"] or site.settings["NPROC_PER_NODE"])
    return _with_settings(text, settings, scheduler)


def _pbs(site, wishes, nodes, kept):
    """{key: value or None}, in the order in which they will stand. Under PBS a reservation is a queue."""
    usual = directives.chunk(f"1:{site.pbs['chunk']}")
    chunk = directives.chunk(kept["-l select"]) if kept.get("-l select") else usual
    if wishes["gpus"] is not None:
        chunk = _follow(site, usual, chunk, "ngpus", wishes["gpus"])
    if wishes["mem"]:
        chunk["mem"] = f"{wishes['mem'].lower()}b"
    return {
        site.account_option: wishes["account"] or kept.get(site.account_option),
        "-q": wishes["reservation"] or wishes["queue"] or kept.get("-q") or site.queue,
        "-l select": ":".join([str(nodes), *(f"{name}={value}" for name, value in chunk.items() if value)]),
        **{key: kept.get(key) or value for key, value in site.fixed("pbs").items()},
        "-l walltime": wishes["walltime"] or kept.get("-l walltime") or wishes["usual"],
    }


def _slurm(site, wishes, nodes, kept):
    usual = site.fixed("slurm")
    fixed = {key: kept.get(key) or value for key, value in usual.items()}
    fixed |= {key: kept.get(key) or usual.get(key) for key in ("--gpus-per-node", "--mem")}
    if wishes["gpus"] is not None:  # --gres: where the site's pages ask for GPUs in this way
        option = "--gres" if "--gres" in usual else "--gpus-per-node"
        fixed = _follow(site, usual, fixed, option, wishes["gpus"])
    return {
        "--account": wishes["account"] or kept.get("--account"),
        "--nodes": str(nodes),
        **fixed,
        "--mem": wishes["mem"] or fixed["--mem"],
        site.queue_option: wishes["queue"] or kept.get(site.queue_option) or site.queue,
        "--reservation": wishes["reservation"] or kept.get("--reservation"),
        "--time": wishes["walltime"] or kept.get("--time") or wishes["usual"],
    }


def _follow(site, usual, kept, option, gpus):
    """Return the requests `kept` with `gpus` per node, and the cores, processes and memory that follow from them.

    A request that is not the site's usual one for the number before was somebody's wish, and stays.
    """
    before, found = directives.gpus_per_node(kept), dict(kept)
    for name in (*usual, "ncpus" if option == "ngpus" else "--cpus-per-task"):
        if kept.get(name) == _usual(site, usual, name, before):
            found[name] = _usual(site, usual, name, gpus)
    number = f"gpu:{gpus}" if option == "--gres" else str(gpus)
    return found | {option: number if gpus else usual.get(option)}


def _usual(site, usual, name, gpus):
    """Return the site's usual value of a request on a node, for this number of GPUs; 0: as its file has it."""
    value, of = usual.get(name), directives.gpus_per_node(usual)
    if name in ("ncpus", "--cpus-per-task"):
        return str(site.cores_per_gpu * gpus) if site.cores_per_gpu and gpus else value
    per_gpu = name in ("mem", "--mem") or (name == "mpiprocs" and value == str(of))
    if not (value and per_gpu and gpus and of):
        return value
    return re.sub(r"\d+", lambda number: str(max(1, int(number[0]) * gpus // of)), value, count=1)


def gpu_complaints(path, scheduler):
    """Return sentences on lines of a job file that are for another number of GPUs per node than it asks for."""
    text = path.read_text(encoding="utf-8")
    site, values = site_named(stamped_site(text)), {d.key: d.value for d in directives.read(text, scheduler)}
    here, usual = values, site.fixed(scheduler)
    if scheduler == "pbs":
        here, usual = (
            directives.chunk(values.get("-l select", "")),
            directives.chunk(f"1:{(site.pbs or {}).get('chunk', '')}"),
        )
    gpus, of = directives.gpus_per_node(here), directives.gpus_per_node(usual)
    cure = f"make jobs SITE={site.name} GPUS={gpus}"
    ranks = re.search(r"^NPROC_PER_NODE=\$\{NPROC_PER_NODE:-(\d+)\}", text, re.MULTILINE)
    if gpus and scheduler == "pbs" and ranks and int(ranks[1]) > gpus:  # Slurm tells a job the number of its GPUs
        yield f"NPROC_PER_NODE is {ranks[1]}, and a node of the job has {gpus} GPUs: {cure}"
    for name in ("ncpus", "--cpus-per-task", "mpiprocs", "mem", "--mem"):
        if gpus and of and gpus != of and here.get(name) and here[name] == usual.get(name):
            whole = name in ("ncpus", "--cpus-per-task") and not site.cores_per_gpu
            cure = f"write your own number, or cores_per_gpu into jobs/sites/{site.name}.toml" if whole else cure
            yield f"{name}={here[name]} is for {of} GPUs, and the job asks for {gpus} per node: {cure}"


def table_complaints(path, scheduler):
    """Return sentences on errors in the array of a job that runs a table (sweep.slurm with sweep.tsv)."""
    table = path.with_suffix(".tsv")
    if not table.is_file():
        return []
    lines = [line for line in table.read_text(encoding="utf-8").splitlines() if line.strip()]
    rows = len([line for line in lines if not line.lstrip().startswith("#")]) - 1  # the first is the header
    found = {d.key: d.value for d in directives.read(path.read_text(encoding="utf-8"), scheduler)}
    array, wanted = found.get(ARRAY[scheduler]), f"1-{rows}"
    option = directives.as_line(ARRAY[scheduler], wanted, scheduler)
    fits = (array or "").partition("%")[0] == wanted  # %2: two of them at a time
    return [] if fits else [f"{table.name} has {rows} rows, the array is {array}: write {option}"]


def jobs_at_once(path, scheduler):
    """(how many jobs of one user the queue of a job file takes, waiting ones included, or None; that queue in words)"""
    text = path.read_text(encoding="utf-8")
    site, found = site_named(stamped_site(text)), {d.key: d.value for d in directives.read(text, scheduler)}
    queue = found.get("-q" if scheduler == "pbs" else site.queue_option)
    return site.queues.get(queue, {}).get("jobs"), f"queue {queue} of {site.title}"


def crowd_complaints(path, scheduler):
    """Return sentences if an array has too many jobs for its queue."""
    most, queue = jobs_at_once(path, scheduler)
    found = {d.key: d.value for d in directives.read(path.read_text(encoding="utf-8"), scheduler)}
    tasks = re.match(r"(\d+)-(\d+)", found.get(ARRAY[scheduler], ""))
    size = int(tasks[2]) - int(tasks[1]) + 1 if tasks else 1
    cure = f"take another QUEUE, or `bash jobs/{path.name}` in an interactive job: it runs one row after the other"
    crowded = most is not None and size > most
    return [f"{queue} takes {most} of your jobs at a time, waiting ones too, not {size}: {cure}"] if crowded else []


def _with_settings(text, settings, scheduler):
    """The lines between "edit here" and "end of what one edits", with these values as their defaults.

    A site's modules, device and image are for its jobs: outside of one, as on a laptop, they are left out.
    """
    job = {"pbs": "PBS_JOBID", "slurm": "SLURM_JOB_ID"}[scheduler]
    for name, value in settings.items():
        if name in ("MANYHANDS_DEVICE", "IMAGE") and value:
            value = f"${{{job}:+{value}}}"
        old, new = rf"^{name}=\$\{{{name}:-(?:[^{{}}]|\{{[^}}]*\}})*\}} *", f"{name}=${{{name}:-{value}}}"
        if name == "site_setup":
            value = value if value == ":" else f'[ -z "${{{job}:-}}" ] || {{ {value}; }}'
            old, new = r"^site_setup\(\) \{ .*; \} *", f"site_setup() {{ {value}; }}"
        text = re.sub(old, lambda match, new=new: f"{new:<41} ", text, flags=re.MULTILINE)
    return text


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m manyhands.jobs.stamp", description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("sites", help="the machines that are known").set_defaults(run=_print_sites)
    commands.add_parser("check", help="what is wrong with the directives as they stand").set_defaults(run=_print_check)
    write = commands.add_parser("stamp", help="write a site's directives into the job files")
    write.set_defaults(run=_print_stamp)
    for name in ("site", *WISHES):
        write.add_argument(f"--{name}", default="", help="empty: as it stands, or the site's usual one")
    args = parser.parse_args(argv)
    return args.run(args)


def _print_sites(args):
    for site in sites().values():
        needs = "".join(f" {need.upper()}=..." for need in site.needs)
        print(f"make jobs SITE={site.name}{needs}".ljust(44), f"{site.title}, read {site.checked}")


def _print_stamp(args):
    site, wishes = site_named(args.site), {name: getattr(args, name) or None for name in WISHES}
    for name, example in (("nodes", 2), ("gpus", 4)):
        if wishes[name] and not wishes[name].isdecimal():
            raise JobError(f"invalid {name.upper()}={wishes[name]!r}; write {name.upper()}={example}")
        wishes[name] = int(wishes[name]) if wishes[name] else None
    for path in stamp(site.name, **wishes):
        program = "qsub" if path.suffix == ".pbs" else "sbatch"
        print(f"written for {site.title}; submit with: {program} jobs/{path.name}")
        scheduler, text = directives.SCHEDULERS[path.suffix], path.read_text(encoding="utf-8")
        found = {directive.key: directive.value for directive in directives.read(text, scheduler)}
        left = directives.number_of_nodes(found, scheduler)
        if wishes["nodes"] not in (None, left):
            print(f"  but NODES={wishes['nodes']} leaves a row of its table on {left}: change that line by hand")
        for said in [*crowd_complaints(path, scheduler), *gpu_complaints(path, scheduler)]:
            print(f"  but {said}")
    if site.login:
        print(f"before `make lab`, `kernel` or `shared` on a login node there: {site.login}")
    print(f"Read {site.checked} from {site.sources[0]}. {' '.join(site.verified.split())}")


def _print_check(args):
    status = 0
    for path, scheduler in job_files():
        text = path.read_text(encoding="utf-8")
        site = site_named(stamped_site(text))
        wrong = directives.complaints(text, scheduler, site)
        wrong += [
            *table_complaints(path, scheduler),
            *crowd_complaints(path, scheduler),
            *gpu_complaints(path, scheduler),
        ]
        print(f"{path.name} for {site.title}: " + ("; ".join(wrong) or "in order"))
        status = 2 if wrong else status
    return status


if __name__ == "__main__":
    from manyhands.launch.entry import run_program

    run_program("stamp", main)
