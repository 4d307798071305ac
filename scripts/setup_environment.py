"""Build the course's environment; the Makefile calls it. Only the standard library: nothing is installed yet.

    python3 scripts/setup_environment.py --venv .venv                      # torch, MPI and all the rest, pinned
    python3 scripts/setup_environment.py --venv .venv --site-python PATH   # on a site's Python: its torch, its MPI

Nothing happens where the environment is up to date: a stamp in it holds what it was built from.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST = (3, 10)
FROM_THE_SITE = {"torch", "mpi4py", "mpich"}  # never installed beside a site's own
ASK_SITE = (
    "import json, sys, importlib.metadata as m; print(json.dumps({'version': sys.version_info[:2], 'paths': "
    "[p for p in sys.path if p.endswith(('site-packages', 'dist-packages'))], "
    "'names': sorted({d.metadata['Name'].lower().replace('_', '-') for d in m.distributions() if d.metadata['Name']})}))"
)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--site-python", type=Path)
    parser.add_argument("--copy", action="store_true", help="install a copy of the package: for a shared environment")
    options = parser.parse_args()
    if sys.version_info[:2] < OLDEST and options.site_python is None:
        sys.exit(f"Many Hands needs Python {OLDEST[0]}.{OLDEST[1]} or newer, not {sys.version.split()[0]}; "
                 "name one: make lab PYTHON=/path/to/python3.11")  # fmt: skip
    stamp, wanted = options.venv / "manyhands-stamp", what_it_is_built_from(options)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"building the environment in {options.venv}; this takes minutes, once", flush=True)
    pins = requirements()
    if options.site_python is None:
        run(sys.executable, "-m", "venv", options.venv)
    else:
        site = ask_site(options.site_python)
        run(options.site_python, "-m", "venv", options.venv)
        pth = next(options.venv.glob("lib/python*/site-packages")) / "site-python.pth"
        pth.write_text("\n".join(site["paths"]) + "\n")
        pins = {name: line for name, line in pins.items() if name not in FROM_THE_SITE | set(site["names"])}
    python = options.venv / "bin" / "python"
    if "torch" in pins:  # first and alone, so that nothing else chooses a build of it
        run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", pins["torch"])
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *pins.values())
    editable = [] if options.copy else ["-e"]
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", *editable, ROOT)
    stamp.write_text(wanted)


def requirements():
    """{name: line} of requirements.txt."""
    lines = [line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    return {re.split(r"[=<>\[; ]", line)[0].lower().replace("_", "-"): line for line in lines if line}


def ask_site(python):
    """Where the site's packages are and which there are; ends with a sentence if torch or mpi4py is missing."""
    try:
        site = json.loads(subprocess.run([python, "-c", ASK_SITE], capture_output=True, text=True, check=True).stdout)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"SITE_PYTHON={python} does not run: {error}")
    if missing := {"torch", "mpi4py"} - set(site["names"]):
        sys.exit(f"SITE_PYTHON={python} lacks {', '.join(sorted(missing))}; load the site's modules first, or leave "
                 "SITE_PYTHON away and the course installs its own")  # fmt: skip
    if tuple(site["version"]) < OLDEST:
        sys.exit(f"SITE_PYTHON={python} is Python {site['version']}; {OLDEST[0]}.{OLDEST[1]} or newer is needed")
    return site


def what_it_is_built_from(options):
    files = [(ROOT / name).read_bytes() for name in ("requirements.txt", "pyproject.toml")]
    digest = hashlib.sha256(b"".join(files)).hexdigest()
    return f"{digest} {ROOT} {sys.version_info[:2]} {options.site_python} {options.copy}\n"


def run(*command):
    environ = {**os.environ, "PYTHONNOUSERSITE": "1"}
    environ.pop("PYTHONPATH", None)
    done = subprocess.run([str(word) for word in command], env=environ)
    if done.returncode:
        sys.exit(f"{' '.join(str(word) for word in command)[:200]} failed with status {done.returncode}")


if __name__ == "__main__":
    main()
