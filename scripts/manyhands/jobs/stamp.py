"""Write a site's directives into the job files, once, so that the plain `qsub jobs/ddp_shakespeare.pbs` works.

    python -m manyhands.jobs.stamp sites
    python -m manyhands.jobs.stamp stamp --site polaris --account MyProject --queue debug --walltime 00:20:00
    python -m manyhands.jobs.stamp check

(`make jobs SITE=polaris ACCOUNT=MyProject ...` calls the second.) A scheduler reads its directives before any shell
runs, so they cannot come from a variable or a sourced file. A site is a small file in jobs/sites; a stamped file says
which in its line "# site: ...". Stamping again changes what it is told to and keeps the rest: your own directives,
the number of nodes, every other line; for the same site also what an earlier stamp, or you, wrote there.
"""

import argparse
import re
import sys

from manyhands.course.folders import write_whole
from manyhands.jobs import directives
from manyhands.jobs.sites import JobError, jobs_folder, site_named, sites

SETTINGS = {
    "NPROC_PER_NODE": "2",
    "MPIEXEC_FLAGS": "",
    "STARTER": "torchrun",
    "SRUN_FLAGS": "",
    "MANYHANDS_DEVICE": "",
    "site_setup": ":",
}
NAME = r"[A-Za-z0-9][A-Za-z0-9_.@-]*"


def job_files(folder=None):
    """[(path, scheduler)] of the job files: their ending says who reads them."""
    paths = sorted(path for path in (folder or jobs_folder()).iterdir() if path.suffix in directives.SCHEDULERS)
    return [(path, directives.SCHEDULERS[path.suffix]) for path in paths]


def stamped_site(text):
    """The name of the site that a job file says it was written for."""
    line = re.search(r"^# site: (\S+)", text, re.MULTILINE)
    return line.group(1) if line else "generic"


def stamp(site, account=None, queue=None, reservation=None, walltime=None, nodes=None, gpus=None, folder=None):
    """Write `site`'s directives into each job file that its scheduler reads; the paths of these files.

    `gpus`: per node, with a rank for each; 0 asks for none, None leaves them as they stand.

    Nothing is written unless all of it can be. Raises JobError: unknown site, missing account, a walltime or a name
    that is none, more than the queue allows, files that cannot be written.
    """
    site, wishes = site_named(site), {"account": account, "queue": queue, "reservation": reservation}
    for name, value in wishes.items():
        if value and not re.fullmatch(NAME, value):
            raise JobError(f"{name.upper()}={value!r} is not a name that a scheduler takes: letters, digits and ._@-")
    if nodes is not None and nodes < 1:
        raise JobError(f"NODES={nodes}: a job needs at least one node")
    new = {}
    for path, scheduler in job_files(folder):
        if getattr(site, scheduler):
            text = path.read_text(encoding="utf-8")
            new[path] = _stamped(text, scheduler, site, wishes | {"walltime": walltime, "nodes": nodes, "gpus": gpus})
            if wrong := directives.complaints(new[path], scheduler, site):
                raise JobError(f"{path.name} for {site.title}: " + "; ".join(wrong))
    for path, text in new.items():
        try:
            write_whole(path, text)
        except OSError as error:
            raise JobError(
                f"{path} cannot be written ({error.strerror}): work in a copy of the course that is yours"
            ) from None
    return list(new)


def _stamped(text, scheduler, site, wishes):
    """The text of a job file, written for `site`."""
    old = {directive.key: directive.value for directive in directives.read(text, scheduler)}
    same = stamped_site(text) == site.name
    nodes = wishes["nodes"] or directives.number_of_nodes(old, scheduler) or 2
    wanted = (_pbs if scheduler == "pbs" else _slurm)(site, wishes, nodes, old if same else {})
    account = wanted["-A" if scheduler == "pbs" else "--account"]
    if "account" in site.needs and not account:
        raise JobError(
            f"{site.title} charges each job to a project, and none was named: make jobs SITE={site.name} ACCOUNT=..."
        )
    owned = set(wanted) | {"--partition", "--qos"}  # of whichever site was here before
    owned = owned.union(*(other.fixed(scheduler) for other in sites().values()))
    text = directives.replace(text, scheduler, owned, {key: value for key, value in wanted.items() if value})
    text = re.sub(r"^# site: \S+", f"# site: {site.name}", text, flags=re.MULTILINE)
    settings = {} if same else SETTINGS | site.settings
    if wishes["gpus"] is not None:
        settings["NPROC_PER_NODE"] = str(wishes["gpus"] or site.settings["NPROC_PER_NODE"])
    return _with_settings(text, settings)


def _pbs(site, wishes, nodes, kept):
    """{key: value or None}, in the order in which they will stand. Under PBS a reservation is a queue."""
    chunk = kept.get("-l select", "").partition(":")[2] or site.pbs["chunk"]
    if wishes["gpus"] is not None:
        others = [part for part in chunk.split(":") if not part.startswith("ngpus=")]
        chunk = ":".join([*others, f"ngpus={wishes['gpus']}"][: len(others) + bool(wishes["gpus"])])
    return {
        "-A": wishes["account"] or kept.get("-A"),
        "-q": wishes["reservation"] or wishes["queue"] or kept.get("-q") or site.queue,
        "-l select": f"{nodes}:{chunk}",
        **{key: kept.get(key) or value for key, value in site.fixed("pbs").items()},
        "-l walltime": wishes["walltime"] or kept.get("-l walltime") or site.walltime,
    }


def _gpus_per_node(site, gpus, kept):
    key = "--gpus-per-node"
    asked = (str(gpus) if gpus else None) if gpus is not None else kept.get(key)
    return {} if asked is None and key in site.fixed("slurm") else {key: asked}


def _slurm(site, wishes, nodes, kept):
    return {
        "--account": wishes["account"] or kept.get("--account"),
        "--nodes": str(nodes),
        **{key: kept.get(key) or value for key, value in site.fixed("slurm").items()},
        **_gpus_per_node(site, wishes["gpus"], kept),
        site.queue_option: wishes["queue"] or kept.get(site.queue_option) or site.queue,
        "--reservation": wishes["reservation"] or kept.get("--reservation"),
        "--time": wishes["walltime"] or kept.get("--time") or site.walltime,
    }


def table_complaints(path, scheduler):
    """What is wrong with the array of a job that runs a table (sweep.slurm beside sweep.tsv), as sentences."""
    table = path.with_suffix(".tsv")
    if not table.is_file():
        return []
    lines = [line for line in table.read_text(encoding="utf-8").splitlines() if line.strip()]
    rows = len([line for line in lines if not line.lstrip().startswith("#")]) - 1  # the first is the header
    found = {d.key: d.value for d in directives.read(path.read_text(encoding="utf-8"), scheduler)}
    array, wanted = found.get("-J" if scheduler == "pbs" else "--array"), f"1-{rows}"
    option = directives.as_line("-J" if scheduler == "pbs" else "--array", wanted, scheduler)
    return [] if array == wanted else [f"{table.name} has {rows} rows, the array is {array}: write {option}"]


def _with_settings(text, settings):
    """The lines between "edit here" and "end of what one edits", with these values as their defaults."""
    for name, value in settings.items():
        old, new = rf"^{name}=\$\{{{name}:-[^}}]*\}} *", f"{name}=${{{name}:-{value}}}"
        if name == "site_setup":
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
    for name in ("site", "account", "queue", "reservation", "walltime", "nodes", "gpus"):
        write.add_argument(f"--{name}", default="", help="empty: as it stands, or the site's usual one")
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except JobError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _print_sites(args):
    for site in sites().values():
        needs = "".join(f" {need.upper()}=..." for need in site.needs)
        print(f"make jobs SITE={site.name}{needs}".ljust(44), f"{site.title}, read {site.checked}")


def _print_stamp(args):
    if args.nodes and not args.nodes.isdecimal():
        raise JobError(f"NODES={args.nodes!r} is no number of nodes; write NODES=2")
    if args.gpus and not args.gpus.isdecimal():
        raise JobError(f"GPUS={args.gpus!r} is no number of GPUs per node; write GPUS=4")
    wishes = {name: getattr(args, name) or None for name in ("account", "queue", "reservation", "walltime")}
    site = site_named(args.site)
    counts = {name: int(getattr(args, name)) if getattr(args, name) else None for name in ("nodes", "gpus")}
    for path in stamp(site.name, **counts, **wishes):
        program = "qsub" if path.suffix == ".pbs" else "sbatch"
        print(f"written for {site.title}; submit with: {program} jobs/{path.name}")
    print(f"Read {site.checked} from {site.sources[0]}. {' '.join(site.verified.split())}")


def _print_check(args):
    status = 0
    for path, scheduler in job_files():
        text = path.read_text(encoding="utf-8")
        site = site_named(stamped_site(text))
        wrong = directives.complaints(text, scheduler, site) + table_complaints(path, scheduler)
        print(f"{path.name} for {site.title}: " + ("; ".join(wrong) or "in order"))
        status = 2 if wrong else status
    return status


if __name__ == "__main__":
    from manyhands.launch.program import run_program

    run_program("stamp", main)
