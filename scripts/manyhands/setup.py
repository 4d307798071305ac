"""What `make lab`, `make kernel` and `make shared` do once the environment is there.

    python -m manyhands.setup data               # fetch Shakespeare, or say that the offline corpus will be used
    python -m manyhands.setup kernel [--user]    # a kernel named "Many Hands", here or for this user's JupyterLab
    python -m manyhands.setup lab [--open no]    # start JupyterLab on the first lesson

Several actions may be given at once: `data kernel`.
"""

import argparse
import os
import sys
from pathlib import Path

from manyhands.lessons import ROOT

KERNEL = "manyhands"


def fetch_data():
    """Fetch the corpus into the cache. Returns the exit status: 2 where a named file is missing or wrong."""
    from manyhands import data

    try:
        corpus = data.load_corpus()
    except data.DataError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"corpus: {corpus.name}, {len(corpus.text):,} characters")
    return 0


def install_kernel(user):
    """Write the kernelspec "Many Hands": for this user, or inside this environment. Prints its folder."""
    from ipykernel.kernelspec import install

    environ = {"PYTHONNOUSERSITE": "1"}
    shared_data = Path(sys.prefix) / "share" / "manyhands" / "data"
    if shared_data.is_dir():
        environ["MANYHANDS_DATA"] = str(shared_data)
    folder = install(
        user=user,
        prefix=None if user else sys.prefix,
        kernel_name=KERNEL,
        display_name="Many Hands",
        env=environ,
    )
    print(f"kernel: {folder}")


def start_lab(open_browser):
    """Replace this process by JupyterLab, on loopback, with the first lesson open."""
    os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")
    lesson = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))[0]
    command = [
        sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={ROOT}", "--ServerApp.ip=127.0.0.1",
        f"--LabApp.default_url=/lab/tree/notebooks/{lesson.name}",
    ]  # fmt: skip
    if not open_browser:
        command.append("--no-browser")
    if os.geteuid() == 0:
        command.append("--allow-root")
    os.execv(sys.executable, command)


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("actions", nargs="+", choices=["data", "kernel", "lab"])
    parser.add_argument(
        "--user", action="store_true", help="the kernel is for this user's JupyterLab, wherever it runs"
    )
    parser.add_argument("--open", choices=["yes", "no"], default="yes", help="open a browser")
    options = parser.parse_args(arguments)
    for action in options.actions:
        if action == "data":
            if status := fetch_data():
                return status
        elif action == "kernel":
            install_kernel(options.user)
        else:
            start_lab(options.open == "yes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
