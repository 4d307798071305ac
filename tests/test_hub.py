"""What a hub, Binder or an editor reads: repo2docker's rules step by step, the Dockerfile's, the devcontainer's."""

import json
import os
import re
import subprocess

import pytest
import yaml
from manyhands.course import handouts
from manyhands.course.folders import ROOT

# of repo2docker's build packs those that come before conda's, by the files that each looks for
BEFORE_CONDA = ("Dockerfile", "Project.toml", "JuliaProject.toml", "REQUIRE", "default.nix", "runtime.txt", "install.R")
COPIED = handouts.files_of_the_course(ROOT)


def test_repo2docker_finds_environment_yml_and_no_pack_that_comes_before_it():
    tops = {name.split("/")[0] for name in COPIED}
    assert not tops & {"binder", ".binder", *BEFORE_CONDA} and "environment.yml" in tops and "postBuild" in tops


def test_repo2docker_stages_the_whole_course_before_pip_reads_it_and_knows_the_python():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    (pip,) = [entry["pip"] for entry in environment if isinstance(entry, dict)]
    assert any(line.startswith(("-r", "-e")) for line in pip)  # else only environment.yml would be there
    assert all((ROOT / line.split()[1]).exists() for line in pip)
    (version,) = [found[1] for line in map(str, environment) if (found := re.match(r"python\s*=+\s*([\d.]*)", line))]
    assert version == "3.11"


def test_post_build_prepares_the_corpus_and_the_kernel_and_stops_at_the_first_failure(tmp_path):
    assert os.access(ROOT / "postBuild", os.X_OK)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >>"{tmp_path}/ran"\ntest "$FAIL" != "$1"\n')
    python.chmod(0o755)
    for fail, runs in (("none", 3), ("scripts/prepare_data.py", 2)):
        (tmp_path / "ran").unlink(missing_ok=True)
        environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "FAIL": fail}
        done = subprocess.run([ROOT / "postBuild"], cwd=ROOT, env=environ, timeout=60)
        ran = (tmp_path / "ran").read_text().splitlines()
        assert len(ran) == runs and (done.returncode == 0) == (fail == "none")
        assert all((ROOT / name).exists() for name in re.findall(r"\S+/\S+\.\w+", " ".join(ran)))
    assert ran[0].endswith("-r data/plays.txt")


@pytest.fixture
def steps():
    """[(instruction, its words)] of the Dockerfile."""
    lines = [line for line in (ROOT / "jobs" / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    return [tuple(line.split(" ", 1)) for line in lines]


def test_the_dockerfile_becomes_a_plain_user_before_it_builds_and_starts_make_lab(steps):
    kinds = [kind for kind, _ in steps]
    user = kinds.index("USER")
    assert steps[user][1] == "learner" and ("RUN", "useradd --create-home --uid 1000 learner") in steps[:user]
    built = [i for i, (kind, words) in enumerate(steps) if kind == "RUN" and "make environment" in words]
    assert built and user < built[0] and kinds.index("ARG") < built[0] and kinds.count("USER") == 1
    assert json.loads(steps[-1][1]) == ["make", "lab", "OPEN=no"]
    ignored = (ROOT / "jobs" / "Dockerfile.dockerignore").read_text().split()
    assert {".git", ".venv", "outputs", ".manyhands-env"} <= {*ignored}


def test_every_command_of_the_dockerfile_and_of_the_devcontainer_exists(steps):
    makefile = (ROOT / "Makefile").read_text()
    devcontainer = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    text = "\n".join(words for _, words in steps) + devcontainer["postCreateCommand"]
    targets = re.findall(r"(?<!recommends )make ([a-z]+)", text)
    assert {"environment", "kernel"} <= {*targets}
    assert [name for name in targets if not re.search(rf"^{name}:", makefile, re.M)] == []
    assert all((ROOT / name).exists() for name in re.findall(r"scripts/\w+\.py", text))


def test_the_attendees_copy_has_what_a_hub_reads():
    assert {"postBuild", "environment.yml", "jobs/Dockerfile", ".devcontainer/devcontainer.json"} <= {*COPIED}
