"""`.gitlab-ci.yml` and the workflows: as GitLab and GitHub take them, and true to the course that they run."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from check_jsonschema import main as check_jsonschema
from click.testing import CliRunner
from manyhands.jobs import directives, stamp

ROOT = Path(__file__).resolve().parents[1]
CENTRE, *WORKFLOWS = PIPELINES = [ROOT / ".gitlab-ci.yml", *sorted((ROOT / ".github" / "workflows").glob("*.yml"))]
GITLAB = yaml.safe_load(CENTRE.read_text())
GITHUB = {path.stem: yaml.load(path.read_text(), yaml.BaseLoader) for path in WORKFLOWS}  # "on" is no truth value
JOBS = {name: GITLAB[".site"] | job for name, job in GITLAB.items() if isinstance(job, dict) and "script" in job}
SITES = {re.search('"(.+)"', rule["if"])[1]: rule["variables"] for rule in GITLAB[".site"]["rules"]}
JACAMARS_OWN = {"-N", "-j", "-k", "--job-name", "--output"}  # it names its job, and reads what that prints
AGAIN = {"-r", "--requeue", "--open-mode", "--signal"}  # a job that comes back: Jacamar has ended it by then


@pytest.mark.parametrize("path", PIPELINES, ids=lambda path: path.name)
def test_gitlab_and_github_know_every_key(path):
    kind = ["github-workflows"] if path in WORKFLOWS else ["gitlab-ci", "--data-transform", "gitlab-ci"]
    done = CliRunner().invoke(check_jsonschema, ["--builtin-schema", f"vendor.{kind[0]}", *kind[1:], str(path)])
    assert done.exit_code == 0, done.output


def test_the_centres_pipeline_offers_sites_that_there_are():
    offered = GITLAB["variables"]["SITE"]
    assert set(offered["options"]) == set(SITES) <= set(stamp.sites()) and offered["value"] in SITES
    for site, variables in SITES.items():
        assert variables.get("SETUP", "") == stamp.site_named(site).login


def options_for(site):
    """{key: value} of the directives that the pipeline asks the scheduler of `site` for, as account Hands."""
    (name,) = [name for name in SITES[site] if name.endswith("SCHEDULER_PARAMETERS")]
    known = {"ACCOUNT": "Hands", "NODES": GITLAB["variables"]["NODES"]["value"], **SITES[site]}
    words = shlex.split(re.sub(r"\$(\w+)", lambda match: known[match[1]], SITES[site][name]))
    scheduler = directives.SCHEDULERS[Path(SITES[site]["JOB"]).suffix]
    lines = re.sub(" (?=-)", "\n", " ".join(words)).splitlines()
    text = "".join(f"{directives.PREFIX[scheduler]} {line}\n" for line in lines)
    return {directive.key: directive.value for directive in directives.read(text, scheduler)}


@pytest.mark.parametrize("site", SITES)
def test_the_centres_pipeline_asks_the_scheduler_for_what_make_jobs_writes(site, tmp_path):
    folder, variables = shutil.copytree(ROOT / "jobs", tmp_path / "jobs"), SITES[site]
    nodes, gpus = int(GITLAB["variables"]["NODES"]["value"]), variables.get("GPUS")
    wishes = {name.lower(): variables.get(name) for name in ("QUEUE", "WALLTIME", "MEM")}
    stamp.stamp(site, account="Hands", nodes=nodes, gpus=gpus and int(gpus), folder=folder, **wishes)
    job = tmp_path / variables["JOB"]
    written = directives.read(job.read_text(), directives.SCHEDULERS[job.suffix])
    assert options_for(site) == {d.key: d.value for d in written if d.key not in JACAMARS_OWN | AGAIN}


def commands():
    """(file, command) of every line that a pipeline runs."""
    yield from ((CENTRE.name, line) for job in JOBS.values() for line in job["script"])
    steps = ((name, step) for name, flow in GITHUB.items() for job in flow["jobs"].values() for step in job["steps"])
    yield from ((name, step["run"]) for name, step in steps if "run" in step)


@pytest.mark.parametrize(("where", "command"), list(commands()))
def test_what_a_pipeline_runs_exists(where, command):
    makefile = (ROOT / "Makefile").read_text()
    program, *words = shlex.split(command)
    assert program in ("make", "bash", "sudo", "eval", "export", "unset")
    if program == "make":
        assert re.search(rf"^{words[0]}:", makefile, re.MULTILINE), f"there is no `make {words[0]}`"
        given = [word.split("=")[0] for word in words[1:]]
        assert [name for name in given if not re.search(rf"\$\({name}\)|\$\${name}\b", makefile)] == []
    files = [variables["JOB"] for variables in SITES.values()] if "$JOB" in command else words
    assert [name for name in files if re.search(r"^\w*/|^\.ci/", name) and not (ROOT / name).exists()] == []


def test_every_job_has_an_end_and_what_costs_gpus_is_alone_starts_by_hand_or_by_a_schedule_and_downloads_nothing():
    assert all(job["timeout"] and job["resource_group"] for job in JOBS.values())
    assert all(int(job["timeout-minutes"]) for flow in GITHUB.values() for job in flow["jobs"].values())
    assert GITHUB["gpu"]["concurrency"]["group"]
    assert set(GITHUB["gpu"]["on"]) == {"workflow_dispatch", "schedule"}
    started = {rule["if"] for rule in GITLAB["workflow"]["rules"]}
    assert set(re.findall('"(.+?)"', " ".join(started))) == {"web", "schedule"}
    assert all(flow["permissions"] == {"contents": "read"} for flow in GITHUB.values())
    assert "secrets." not in "".join(path.read_text() for path in PIPELINES)
    assert JOBS["preflight"]["needs"] == ["environment"] and "batch" in JOBS["preflight"]["tags"]
    assert not re.search("make|pip|uv|curl|prepare_data", " ".join(JOBS["preflight"]["script"]))


@pytest.mark.ranks
@pytest.mark.parametrize("site", ["perlmutter", "polaris"])
def test_the_batch_job_starts_the_preflight_in_its_own_folder_wherever_jacamar_submitted_it(site, tmp_path):
    course, seen, binaries = (tmp_path / name for name in ("course", "seen", "bin"))
    shutil.copytree(ROOT / "jobs", course / "jobs")
    for file, text in (
        (course / "scripts" / "preflight.py", ""),
        (binaries / "activate", f'PATH="{binaries}:$PATH"\n'),
        (binaries / "python", f'#!/bin/sh\necho "$PWD" "$@" "$MANYHANDS_DEVICE" >>"{seen}"\n'),
    ):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    stamp.stamp(site, account="Hands", folder=course / "jobs")
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "SITE": site, "PREFIX": str(tmp_path)}
    environ |= {"PREFLIGHT_ARGS": "--lesson 03", "SLURM_SUBMIT_DIR": "/", "PBS_O_WORKDIR": "/"}
    environ |= {"perlmutter": {"SLURM_JOB_ID": "7"}, "polaris": {"PBS_JOBID": "7"}}[
        site
    ]  # its device is for jobs alone
    script = "\n".join(["set -e", *JOBS["preflight"]["script"]])
    subprocess.run(["bash", "-c", script], cwd=course, env=environ | {"JOB": SITES[site]["JOB"]}, check=True)
    assert seen.read_text().splitlines()[-1] == f"{course} scripts/preflight.py --resume unfinished --lesson 03 cuda"
