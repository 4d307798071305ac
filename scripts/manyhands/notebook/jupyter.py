"""Do the work of `make lab`, `make kernel` and `make shared` once the environment is there.

    python -m manyhands.notebook.jupyter kernel [--user]    # a kernel "Many Hands", here or for this user's JupyterLab
    python -m manyhands.notebook.jupyter remember           # this environment is the course's, also for the next `make`
    python -m manyhands.notebook.jupyter lab [--open no]    # start JupyterLab on the first lesson

Several actions may be given at once: `remember kernel`.
"""

import argparse
import json
import os
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from manyhands.course.folders import write_whole
from manyhands.course.lessons import course_here, find_lessons
from manyhands.course.pairs import reported
from manyhands.launch.run_folder import can_be_written
from manyhands.launch.settings import environment, home

KERNEL = "manyhands"
AT_START = ["--IPKernelApp.extra_extensions=manyhands.notebook.magic"]  # %%ranks is known before any ranks are there
# where Jupyter, IPython and matplotlib write, unless they are set: below the user's home
AT_HOME = ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR", "MPLCONFIGDIR")
REMEMBERED = ".manyhands-env"  # one line in the course's folder: the environment that `make ... ENV=` named


def install_kernel(user):
    """Write the kernelspec "Many Hands": for this user, or inside this environment. Prints its folder.

    In somebody else's environment, which cannot be written, the one that its owner put there serves.
    """
    from ipykernel.kernelspec import install
    from jupyter_core.paths import jupyter_data_dir

    environ = {"PYTHONNOUSERSITE": "1"}
    shared_data = Path(sys.prefix) / "share" / "manyhands" / "data"
    if shared_data.is_dir():  # `make shared` put it there
        environ["MANYHANDS_DATA"] = str(shared_data)
    site = Path(sys.prefix) / "manyhands-site.json"
    if site.exists():
        # a hub starts kernels without the modules that were loaded when this was built on a site's Python
        environ |= json.loads(site.read_text())
    data = Path(jupyter_data_dir()) if user else Path(sys.prefix, "share", "jupyter")
    before = _python_of(data / "kernels" / KERNEL)
    try:
        place = {"user": True} if user else {"prefix": sys.prefix}
        folder = install(**place, kernel_name=KERNEL, display_name="Many Hands", env=environ)
        spec = json.loads((Path(folder) / "kernel.json").read_text())
        spec["argv"] += AT_START
        write_whole(Path(folder) / "kernel.json", json.dumps(spec, indent=1) + "\n")
    except OSError:
        if user or before != sys.executable:
            raise
        folder = data / "kernels" / KERNEL
    print(f'kernel "Many Hands": {folder}')
    if before not in (None, sys.executable):
        print(f"it starts {sys.executable} from now on; before, it started {before}")


def _python_of(kernel):
    """The Python that a kernelspec starts, None without one."""
    try:
        return json.loads((kernel / "kernel.json").read_text())["argv"][0]
    except (OSError, ValueError, LookupError):
        return None


def remember():
    """Note in the course's folder that this is its environment: the Makefile's targets and the job files read it."""
    note = course_here() / REMEMBERED
    try:
        write_whole(note, f"{sys.prefix}\n")
    except OSError as error:  # somebody else's copy
        print(f"{note} cannot be written ({error.strerror}): name ENV={sys.prefix} with every make")


def start_lab(open_browser):
    """Replace this process by JupyterLab on loopback, with the first lesson open. It asks for a token.

    Raises ValueError where there is no notebook.
    """
    from jupyter_core.paths import jupyter_runtime_dir

    course = course_here()
    lessons = [lesson.notebook for lesson in find_lessons(course) if lesson.notebook.exists()]
    notebooks = lessons or sorted((course / "notebooks").glob("*.ipynb"))  # somebody's own alone will do
    if not notebooks:
        raise ValueError(f"there are no notebooks below {course}; run `make sync`, or start in the course's folder")
    _ask_no_questions()
    environ = {"JUPYTER_PREFER_ENV_PATH": "1", **environment()}  # not another checkout's kernel of the same name
    # in its terminals `python` and `mpiexec` are the course's
    environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", os.defpath)])
    if not can_be_written(Path(jupyter_runtime_dir())):  # OpenShift's HOME=/, a read-only home
        place = _own_temporary_folder()
        environ |= {name: f"{place}/{name.lower()}" for name in AT_HOME if name not in environ}
        print(f"{home()} cannot be written: JupyterLab's own files go to {place}, and are gone with it")
    command = [
        sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={course}", "--ServerApp.ip=127.0.0.1",
        f"--LabApp.default_url=/lab/tree/notebooks/{notebooks[0].name}",
        "--log-level=ERROR", "--LabApp.log_level=ERROR",  # else forty lines bury the address
    ]  # fmt: skip
    if not open_browser:
        command.append("--no-browser")
    if os.geteuid() == 0:
        command.append("--allow-root")
    print("JupyterLab is starting; Ctrl-C twice stops it. Its address:", flush=True)
    os.execve(sys.executable, command, environ)


def _own_temporary_folder():
    """Return this user's folder for JupyterLab's files: the next start finds it again, so one stays, not one each."""
    place = Path(tempfile.gettempdir(), f"manyhands-jupyter-{os.getuid()}")
    with suppress(OSError):
        place.mkdir(mode=0o700, exist_ok=True)
        told = place.lstat()  # in a folder that all write to, the name may be another user's, or a link of theirs
        if stat.S_ISDIR(told.st_mode) and told.st_uid == os.getuid() and not told.st_mode & 0o077:
            return str(place)
    return tempfile.mkdtemp(prefix="manyhands-jupyter-")


def _ask_no_questions():
    """Switch off JupyterLab's question about news, and its look-ups of newer versions, in this environment."""
    page_config = Path(sys.prefix) / "etc" / "jupyter" / "labconfig" / "page_config.json"
    if page_config.exists():
        return
    with suppress(OSError):  # somebody else's environment
        page_config.parent.mkdir(parents=True, exist_ok=True)
        page_config.write_text('{"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": true}}\n')


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("actions", nargs="+", choices=["remember", "kernel", "lab"])
    for_user = "the kernel is for this user's JupyterLab, wherever it runs"
    parser.add_argument("--user", action="store_true", help=for_user)
    parser.add_argument("--open", choices=["yes", "no"], default="yes", help="open a browser")
    options = parser.parse_args(arguments)
    acts = {
        "remember": remember, "kernel": lambda: install_kernel(options.user),
        "lab": lambda: start_lab(options.open == "yes"),
    }  # fmt: skip
    return next((status for action in options.actions if (status := reported(acts[action]))), 0)


if __name__ == "__main__":
    from manyhands.launch.entry import run_program

    run_program("jupyter", main)
