"""environment.yml, requirements.txt and pyproject.toml say one and the same."""

import importlib.metadata
import re
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


@pytest.fixture(scope="module")
def pins(root):
    """The lines of requirements.txt as Requirements, in order."""
    lines = [line.split("#")[0].strip() for line in (root / "requirements.txt").read_text().splitlines()]
    return [Requirement(line) for line in lines if line]


@pytest.fixture(scope="module")
def project(root):
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]


OPT_IN = {"deepspeed", "liger", "tensorboard", "wandb", "profile"}  # extras that requirements.txt leaves out


def asked_for(project):
    groups = project["optional-dependencies"]
    extras = [line for name, group in groups.items() if name not in OPT_IN for line in group]
    return [Requirement(line) for line in project["dependencies"] + extras]


def test_every_line_is_one_exact_version_nothing_is_named_twice_and_torch_names_no_build(pins):
    assert all(re.fullmatch(r"==[\w.]+", str(pin.specifier)) for pin in pins)
    names = [canonicalize_name(pin.name) for pin in pins]
    assert sorted(names) == sorted(set(names))
    assert str(pins[0]) == "torch==2.13.0"  # +cpu would refuse every GPU


def test_everything_that_pyproject_asks_for_is_pinned_within_its_range(pins, project):
    versions = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins}
    for wanted in asked_for(project):
        assert versions[canonicalize_name(wanted.name)] in wanted.specifier, str(wanted)


def test_the_pins_are_closed_whatever_they_ask_for_is_pinned_too(pins):
    names = {canonicalize_name(pin.name) for pin in pins}
    for pin in pins:
        for line in importlib.metadata.requires(pin.name) or []:
            wanted = Requirement(line)
            gpu = wanted.name.startswith(("nvidia-", "cuda-", "triton"))  # torch's GPU build pins these itself
            if not gpu and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
                assert canonicalize_name(wanted.name) in names, f"{pin.name} asks for {wanted}"


def test_the_lock_holds_hashes_of_each_pin_but_torchs(pins, root):
    text = (root / "scripts" / "requirements.lock").read_text()
    locked = dict(re.findall(r"^(\S+) \\\n((?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text, re.MULTILINE))
    assert "".join(f"{pin} \\\n{hashes}" for pin, hashes in locked.items()) == text
    names = {canonicalize_name(pin.name): str(pin.specifier) for pin in pins[1:]}
    assert {canonicalize_name(p.split("==")[0]): f"=={p.split('==')[1]}" for p in locked} == names, "make lock"


def test_the_extra_notebook_brings_every_package_that_ranks_in_a_notebook_import(root, project):
    code = root / "scripts" / "manyhands"
    files = {*(code / "notebook").glob("*.py"), *(code / "measure" / name for name in ("trace.py", "timeline.py"))}
    files |= {code / "plots" / "trace.py", code / "plots" / "schedule.py", code / "plots" / "looks.py"}
    files |= {code / "launch" / name for name in ("join.py", "rendezvous.py", "devices.py", "settings.py")}
    files -= {code / "notebook" / "jupyter.py"}  # starts JupyterLab
    text = "\n".join(file.read_text() for file in files)
    imported = set(re.findall(r"^ *(?:import|from) (\w+)", text, re.M)) - set(sys.stdlib_module_names)
    lines = project["dependencies"] + project["optional-dependencies"]["notebook"]
    named = {Requirement(line).name for line in lines}
    # mpi4py only where MPI is, tqdm where a cell imports it; ipykernel brings IPython
    assert imported - {"manyhands", "mpi4py", "IPython", "tqdm"} <= named
    assert {"jupyterlab", "tyro"}.isdisjoint(named), "a user's notebook has its own JupyterLab"


def test_transformers_is_the_tests_yardstick_and_the_course_imports_none_of_it(root):
    for file in (root / "scripts").rglob("*.py"):
        assert not re.search(r"^ *(?:import|from) transformers\b", file.read_text("utf-8"), re.M), file
