"""Checks of the JupyterLab that people open the lessons in. It may live in another environment than the course.

jupytext (which keeps notebook and script together when one saves) and the front end of the widgets work in the
server's environment; the kernel's cannot help.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from manyhands.doctor.finding import ask, error, ok, warning

PROGRAMS = ("jupyterhub-singleuser", "jupyter-labhub", "jupyter-lab", "jupyter-server", "jupyter-notebook")
MODULES = (
    "jupyterhub.singleuser",
    "jupyterlab",
    "jupyter_server",
    "notebook",
)  # as in `python -m jupyterlab`
PROBE = """
import importlib.metadata as m, json
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
print(json.dumps({n: version(n) for n in ("jupyterlab", "jupytext", "jupyterlab_widgets")}))
"""


@dataclass(frozen=True)
class Server:
    """A JupyterLab: the Python it runs on, how it was found, and its packages (name -> version or None)."""

    python: str
    found: str
    versions: dict


def find_server(environ=os.environ, commands=None, which=shutil.which, run=ask):
    """The running JupyterLab of this user, else the one that `jupyter lab` would start, else None."""
    for words, found in _commands() if commands is None else commands:
        if _is_server(words) and (python := _python_of(words)):
            return _probe(python, found, run)
    hub = " (on a hub)" if any(name.startswith("JUPYTERHUB_") for name in environ) else ""
    for program in ("jupyter-lab", "jupyter"):
        script = which(program)
        if script and (python := shebang(script)):
            return _probe(python, f"{script}{hub}", run)
    return None


def server(found):
    if found is None:
        return warning("JupyterLab", "none is running and none is on PATH", "make lab starts one")
    version = found.versions.get("jupyterlab")
    where = f"{found.python}, {found.found}"
    if version is None:
        return warning("JupyterLab", f"not in {where}", "open the lessons in a JupyterLab 4, as `make lab` starts it")
    if int(version.split(".")[0]) < 4:
        return warning(
            "JupyterLab",
            f"{version} in {where} is older than 4",
            f"{found.python} -m pip install -U jupyterlab",
        )
    return ok("JupyterLab", f"{version} in {where}")


def jupytext(found):
    if found is None:
        return ok("jupytext", "no server to look into")
    if version := found.versions.get("jupytext"):
        return ok("jupytext", f"{version} in the server: saving a notebook updates its script")
    return warning(
        "jupytext", f"not in the server's environment ({found.python}): saving a notebook leaves its script as it was",
        f"`make sync` before a job, or {found.python} -m pip install jupytext and start the server again",
    )  # fmt: skip


def widgets(found):
    if found is None:
        return ok("widgets", "no server to look into")
    if version := found.versions.get("jupyterlab_widgets"):
        return ok("widgets", f"jupyterlab_widgets {version} in the server")
    return warning(
        "widgets", f"the server ({found.python}) cannot draw them: their static pictures are shown",
        f"{found.python} -m pip install jupyterlab_widgets, then reload the page",
    )  # fmt: skip


def kernel(specs=None):
    """Is the kernel "Many Hands" there, and does its Python exist?"""
    specs = _kernelspecs() if specs is None else specs
    spec = specs.get("manyhands")
    if spec is None:
        return warning("kernel", 'no kernel "Many Hands"', "make kernel")
    python = spec["argv"][0]
    if shutil.which(python) is None:
        return error("kernel", f'the kernel "Many Hands" starts {python}, which is not there', "make kernel")
    if not spec.get("env", {}).get("PYTHONNOUSERSITE"):
        return warning("kernel", f"{python}, but it sees the packages in ~/.local", "make kernel")
    return ok("kernel", python)


def shebang(script):
    """The Python in the first line of a console script, also in the form that long paths need; None: there is none."""
    try:
        lines = Path(script).read_bytes()[:1000].decode(errors="replace").splitlines()
    except OSError:
        return None
    words = lines[0].removeprefix("#!").split() if lines and lines[0].startswith("#!") else []
    if words and words[0].endswith("sh") and len(lines) > 1:  # '''exec' /very/long/path/python "$0" "$@"
        words = [word for word in lines[1].split() if "python" in word]
    python = words[-1].strip("'\"") if words else ""
    return shutil.which(python)


def _is_server(words):
    """Whether a command line starts a Jupyter server, by a script or as a module."""
    if any(Path(word).name.startswith(PROGRAMS) for word in words[:3]):
        return True
    if "-m" not in words[1:4] or "python" not in Path(words[0]).name:
        return False
    module = words[words.index("-m") + 1 :][:1]
    return any(f"{name}.".startswith(tuple(f"{known}." for known in MODULES)) for name in module)


def _python_of(words):
    """The Python of a server's command line: its first word, or the shebang of what it names."""
    if "python" in Path(words[0]).name:
        return words[0]
    return next((python for word in words[:3] if os.path.isabs(word) and (python := shebang(word))), None)


def _commands():
    """(words, how found) of the processes above this one, then of the servers that say they run."""
    import psutil
    from jupyter_core.paths import jupyter_runtime_dir

    for process in psutil.Process().parents():
        yield _cmdline(process), "running above this process"
    for path in sorted(Path(jupyter_runtime_dir()).glob("jpserver-*.json"), reverse=True):
        try:
            process = psutil.Process(json.loads(path.read_text())["pid"])
        except (OSError, ValueError, KeyError, psutil.Error):
            continue  # a server that was killed leaves its file
        yield _cmdline(process), f"running as pid {process.pid}"


def _cmdline(process):
    import psutil

    try:
        return process.cmdline() or [""]
    except psutil.Error:
        return [""]


def _probe(python, found, run):
    answer = run([python, "-c", PROBE], 60, {k: v for k, v in os.environ.items() if k != "PYTHONPATH"})
    versions = json.loads(answer.last_line) if answer.status == 0 else {}
    return Server(python, found, versions)


def _kernelspecs():
    from jupyter_client.kernelspec import KernelSpecManager

    return {name: entry["spec"] for name, entry in KernelSpecManager().get_all_specs().items()}
