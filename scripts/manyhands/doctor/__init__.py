"""What this machine has and what it lacks for the course: a line per check, each with its remedy."""

import argparse
import json
from contextlib import nullcontext

from manyhands.doctor import machine, place, server, software
from manyhands.doctor.finding import Finding
from manyhands.launch.login_node import login_node

MARKS = {"ok": "OK", "warning": "warning", "error": "ERROR"}
COLOURS = {"ok": "green", "warning": "yellow", "error": "bold red"}


def checks():
    """name -> the check, in the order of the table. What several of them look at is looked at once."""
    looked = {}

    def lab():
        if "lab" not in looked:
            looked["lab"] = server.find_server()
        return looked["lab"]

    return {
        "python": software.python,
        "packages": software.packages,
        "torch": software.torch,
        "MPI": lambda: software.mpi(login=login_node()),
        "ipyparallel": software.ipyparallel,
        "kernel": server.kernel,
        "JupyterLab": lambda: server.server(lab()),
        "jupytext": lambda: server.jupytext(lab()),
        "widgets": lambda: server.widgets(lab()),
        "~/.local": software.user_site,
        "PYTHONPATH": software.python_path,
        "conda": software.conda,
        "cores": machine.cores,
        "memory": machine.memory,
        "processes": machine.processes,
        "open files": machine.open_files,
        "/dev/shm": machine.shared_memory,
        "space": machine.space,
        "quota": machine.quota,
        "ports": machine.ports,
        "host name": machine.host_name,
        "proxies": machine.proxies,
        "GPUs": machine.gpus,
        "scheduler": place.scheduler,
        "login node": place.login,
        "outputs": place.outputs,
        "data": place.data,
    }


def examine(named):
    """Yield the Finding of each check. A check that itself breaks is a warning that says how."""
    for name, check in named.items():
        try:
            yield check()
        except Exception as problem:  # noqa: BLE001 - whatever it is, the other checks go on
            says = f"could not be checked ({type(problem).__name__}: {problem})"
            yield Finding(name, "warning", says, "see packages above: the environment may be incomplete")


def main(argv=None, named=None):
    """Print the findings; the exit status is 1 if one of them is an error, else 0."""
    parser = argparse.ArgumentParser(prog="python scripts/doctor.py", description=__doc__)
    parser.add_argument("--json", action="store_true", help="a list of findings for programs")
    options = parser.parse_args(argv)
    named = checks() if named is None else named
    if options.json:
        findings = list(examine(named))
        print(json.dumps([finding.as_dict() for finding in findings], indent=1))
    else:
        findings = show(examine(named))
    return 1 if any(finding.status == "error" for finding in findings) else 0


def show(findings):
    """Print findings as they come, then a sentence; returns them. Without rich: plain lines."""
    try:
        from rich.console import Console
    except ImportError:
        Console = None
    return _show_plain(findings) if Console is None else _show_table(findings, Console(highlight=False))


def summary(findings):
    counts = {status: sum(finding.status == status for finding in findings) for status in MARKS}
    said = [f"{n} {status}{'s' * (n != 1)}" for status, n in counts.items() if n and status != "ok"]
    return f"{counts['ok']} of {len(findings)} checks are OK" + (f", {' and '.join(said)}" if said else "")


def _show_plain(findings):
    seen = []
    for finding in findings:
        seen.append(finding)
        print(f"{finding.check:<12} {MARKS[finding.status]:<8} {finding.says}", flush=True)
        if finding.remedy:
            print(f"{'':<21} -> {finding.remedy}", flush=True)
    print(summary(seen))
    return seen


def _show_table(findings, console):
    from rich.table import Table
    from rich.text import Text

    seen = []
    with console.status("looking ...") if console.is_terminal else nullcontext() as status:
        for finding in findings:
            seen.append(finding)
            if status:
                status.update(f"looked at {finding.check} ...")
    table = Table(show_edge=False, pad_edge=False, header_style="bold")
    for column in ("check", "", "what was found, and what to do"):
        table.add_column(column, overflow="fold")
    for finding in seen:
        says = Text(finding.says)
        if finding.remedy:
            says.append(f"\n-> {finding.remedy}", style="bold")
        table.add_row(finding.check, Text(MARKS[finding.status], style=COLOURS[finding.status]), says)
    console.print(table)
    console.print(summary(seen))
    return seen
