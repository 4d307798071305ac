"""Each check of the doctor on faked inputs: what is well, what is not, and that the remedy is named."""

import errno
import functools
import json
import os
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import pytest
from manyhands.tools import doctor
from manyhands.tools import doctor_software as software
from manyhands.tools.doctor_software import Fault, ask

pytestmark = pytest.mark.ranks

GIB = 2**30


def nothing(name):
    """`which` where nothing is installed."""


def everything(name):
    return f"/usr/bin/{name}"


def answering(text, status=0):
    return lambda *_, **__: (status, text)


def says(check, status, *words):
    """Run the check; assert its status, and that each word is in what it says or in its remedy."""
    ((finding),) = doctor.examine({"it": check})
    text = f"{finding['says']} -> {finding['remedy']}"
    assert finding["status"] == status, text
    assert [word for word in words if word not in text] == [], text
    assert bool(finding["remedy"]) == (status != "ok"), text


def case(check, *arguments, **named):
    return functools.partial(check, *arguments, **named)


NEW = {"torch": "2.13.0+cpu", "numpy": "2.4.6"}
LEAST = {"torch": "2.6", "numpy": "1.26"}
TORCH = {"version": "2.13.0", "seconds": 2.0, "gpu_build": "", "gloo": True, "gpus": 0}
LISTED = "".join(f"GPU {n}: NVIDIA H200 (UUID: GPU-{n})\n" for n in range(4))
SPEC = {"argv": [sys.executable, "-m", "ipykernel_launcher"], "env": {"PYTHONNOUSERSITE": "1"}}
MPIEXEC = ["mpiexec", "-n", "2"]
PROXY = {"https_proxy": "http://proxy:3128"}
INF = float("inf")


def torch_says(**changed):
    return lambda: ({**TORCH, **changed}, "")


def broken_torch():
    return None, "crashed: Illegal instruction"


def gpus(there, probe):
    return case(software.gpus, probe, answering(LISTED), everything if there else nothing)


def refuse_port(address):
    raise OSError(98, "Address already in use")


def unknown_host(name):
    raise OSError("Name or service not known")


@pytest.mark.parametrize(
    ("check", "status", "words"),
    [
        (case(software.python, (3, 11, 7), "Linux", 64), "ok", ["3.11.7"]),
        (case(software.python, (3, 10, 18), "Linux", 64), "error", ["older than 3.11", "make kernel PYTHON="]),
        (case(software.python, (3, 11, 7), "Windows", 64), "error", ["WSL2"]),
        (case(software.python, (3, 11, 7), "Linux", 32), "error", ["64-bit"]),
        (case(software.packages, LEAST, NEW.get), "ok", ["all 2"]),
        (case(software.packages, LEAST, {"torch": "2.13.0"}.get), "error", ["missing: numpy", "pip install"]),
        # as numbers, not as text
        (case(software.packages, LEAST, {**NEW, "numpy": "1.9.3"}.get), "warning", ["numpy 1.9.3 (>=1.26)"]),
        (case(software.packages, LEAST, {**NEW, "torch": "2.6.0rc1"}.get), "ok", []),
        (case(software.torch, torch_says()), "ok", ["2.13.0 with gloo"]),
        (case(software.torch, torch_says(gloo=False)), "error", ["no gloo"]),
        (case(software.torch, torch_says(seconds=63)), "warning", ["63 s", "make shared"]),
        (case(software.torch, broken_torch), "error", ["Illegal instruction", "SITE_PYTHON"]),
        (gpus(0, torch_says()), "ok", ["run on the CPU with gloo"]),
        (gpus(4, torch_says(gpu_build="13.0", gpus=4)), "ok", ["4, which torch sees"]),
        (gpus(4, torch_says()), "warning", ["4 here", "CPU build", "SITE_PYTHON"]),
        (gpus(4, torch_says(gpu_build="13.0")), "warning", ["sees none", "older driver"]),
        (gpus(4, broken_torch), "warning", ["torch does not import"]),
        (case(software.mpi, MPIEXEC, None, answering("hello 2 2\nhello 2 2\n")), "ok", ["2 ranks say hello"]),
        (case(software.mpi, MPIEXEC, None, answering("hello 1 1\nhello 1 1\n")), "error", ["than mpi4py", "use the"]),
        (case(software.mpi, MPIEXEC, None, answering("no answer within 45 s", None)), "error", ["within 45 s"]),
        (case(software.mpi, MPIEXEC, None, answering("hello 2 2\n")), "error", ["did not say hello"]),
        (case(software.mpi, MPIEXEC, "login3", pytest.fail), "warning", ["login3", "not tried", "compute node"]),
        (case(software.kernel, {"manyhands": SPEC}), "ok", [sys.executable]),
        (case(software.kernel, {"python3": SPEC}), "warning", ["make kernel"]),
        (case(software.kernel, {"manyhands": {**SPEC, "env": {}}}), "warning", ["~/.local"]),
        (case(software.kernel, {"manyhands": {**SPEC, "argv": ["/gone/python"]}}), "error", ["/gone/python"]),
        (case(doctor.cores, 8, INF, 64), "ok", ["8 of 64"]),
        (case(doctor.cores, 8, 2.5, 64), "ok", ["2 of 64", "control group 2.5"]),
        (case(doctor.cores, 1, INF, 64), "warning", ["take turns", "--cpus-per-task"]),
        (case(doctor.memory, 16 * GIB, -1), "ok", ["16.0 GiB"]),
        (case(doctor.memory, 2 * GIB, -1), "warning", ["n_ranks = 2"]),
        (case(doctor.memory, 1 * GIB, -1), "error", ["ask for 4 GB"]),
        (case(doctor.memory, 16 * GIB, 8 * GIB), "warning", ["ulimit -v"]),
        (case(doctor.limits, None, -1), "ok", ["no limit of processes", "any number of open files"]),
        (case(doctor.limits, 4000, 4096), "ok", ["4000 more"]),
        (case(doctor.limits, 60, -1), "error", ["only 60 more", "ps ux"]),
        (case(doctor.limits, None, 256), "warning", ["ulimit -n is 256", "ulimit -n 4096"]),
        (case(doctor.network, {}, resolve=str), "ok", ["40 free ports"]),
        (case(doctor.network, {}, refuse_port), "error", ["port 1 of 40", "Address already in use", "ss -tln"]),
        (case(doctor.network, {}, resolve=unknown_host), "warning", ["has no address", "to /etc/hosts"]),
        (case(doctor.network, PROXY, resolve=str), "warning", ["127.0.0.1 and localhost", "export NO_PROXY="]),
        (case(doctor.network, {**PROXY, "no_proxy": "localhost,.local"}, resolve=str), "warning", ["lacks 127.0.0.1"]),
        (case(doctor.network, {**PROXY, "NO_PROXY": "localhost, 127.0.0.1"}, resolve=str), "ok", ["no proxy stands"]),
        (case(doctor.scheduler, {}, nothing, None), "ok", ["none", "bash jobs/"]),
        (case(doctor.scheduler, {}, everything, None), "ok", ["Slurm (/usr/bin/sbatch), PBS (/usr/bin/qsub), no job"]),
        (case(doctor.scheduler, {"PBS_JOBID": "123.server"}, everything, None), "ok", ["inside PBS job 123.server"]),
        (case(doctor.scheduler, {}, nothing, "its name is login3"), "warning", ["login3", "2 ranks"]),
    ],
)  # fmt: skip
def test_a_check_says_what_is_there_and_what_to_do(check, status, words):
    says(check, status, *words)


def test_the_absence_of_mpi_is_no_error(monkeypatch):
    monkeypatch.setattr("manyhands.launch.allocation.mpi_launcher", lambda n: None)
    says(software.mpi, "warning", "no mpiexec", "pip install mpich", "all else works without")


def test_a_rank_says_hello_in_one_write(monkeypatch):
    """Pieces of two ranks would mix."""
    world = SimpleNamespace(allreduce=lambda value: 2, size=2)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=SimpleNamespace(COMM_WORLD=world)))
    written = []
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=written.append, flush=lambda: None))
    exec(software.HELLO, {})  # noqa: S102
    assert written == ["hello 2 2\n"]


def test_what_comes_before_the_environments_packages_is_named(tmp_path, root):
    for name in ("ours/torch", "ours/numpy", "ours/harmless", "theirs/my_thesis"):
        (tmp_path / name).mkdir(parents=True)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    path = os.pathsep.join([str(theirs), str(ours)])
    says(case(software.paths, {"PYTHONPATH": path}, theirs), "error", "torch, numpy", "unset PYTHONPATH")
    path = os.pathsep.join([str(theirs), str(root / "scripts")])
    says(case(software.paths, {"PYTHONPATH": path}, theirs), "ok")
    says(case(software.paths, {}, ours, True), "warning", "torch, numpy", "export PYTHONNOUSERSITE=1")
    says(case(software.paths, {"PYTHONNOUSERSITE": "1"}, ours, True), "ok")
    says(case(software.paths, {}, ours, False), "ok")
    conda = {"CONDA_PREFIX": str(tmp_path)}
    says(case(software.paths, conda, theirs, prefix="/other/.venv"), "warning", "conda deactivate")
    says(case(software.paths, conda, theirs, prefix=str(tmp_path)), "ok")


# ------------------------------------------------------------------ the server


def server_with(**versions):
    return answering(
        json.dumps({"jupyterlab": "4.6.6", "jupytext": "1.19.6", "jupyterlab_widgets": "3.0.17"} | versions)
    )


@pytest.mark.parametrize(
    ("versions", "status", "words"),
    [
        ({}, "ok", ["4.6.6 in /opt/hub/bin/python, running as pid 71"]),
        ({"jupytext": None}, "warning", ["make sync", "/opt/hub/bin/python -m pip install jupytext"]),
        ({"jupyterlab_widgets": None}, "warning", ["static pictures", "pip install jupyterlab_widgets"]),
        ({"jupyterlab": "3.6.1"}, "warning", ["older than 4"]),
        ({"jupyterlab": None}, "warning", ["not in /opt/hub/bin/python"]),
    ],
)
def test_jupytext_and_widgets_are_looked_for_in_the_servers_environment(versions, status, words):
    running = [(["/opt/hub/bin/python", "/opt/hub/bin/jupyter-lab", "--port=1"], "running as pid 71")]
    says(case(software.jupyterlab, running, nothing, server_with(**versions)), status, *words)


def test_the_running_server_is_found_before_the_one_on_path(tmp_path):
    running = [
        (["bash"], "running above this process"),
        (["/opt/hub/bin/python3.11", "/opt/hub/bin/jupyterhub-singleuser", "--port=1"], "running above this process"),
    ]
    script = tmp_path / "jupyter-lab"
    script.write_text(f"#!{sys.executable}\nprint()\n")
    says(case(software.jupyterlab, running, lambda name: str(script), server_with()), "ok", "/opt/hub/bin/python3.11")
    says(case(software.jupyterlab, running[:1], lambda name: str(script), server_with()), "ok", sys.executable)
    # the form that long paths need
    script.write_text(f"#!/bin/sh\n'''exec' {sys.executable} \"$0\" \"$@\"\n' '''\nimport sys\n")
    says(case(software.jupyterlab, running[:1], lambda name: str(script), server_with()), "ok", sys.executable)
    says(case(software.jupyterlab, running[:1], nothing), "warning", "make lab")


@pytest.mark.parametrize(
    ("command", "is_server"),
    [
        ("python -m jupyterlab --ServerApp.ip=127.0.0.1", True),
        ("python3.11 -I -m jupyterhub.singleuser --port=1", True),
        ("python -m jupyter_server", True),
        ("python -m jupyter_server.serverapp", True),
        ("python -m jupyterhub", False),
        ("python -m ipykernel_launcher -f jupyterlab", False),
        ("python train.py jupyterlab", False),
        ("bash -m jupyterlab", False),
    ],
)
def test_a_server_that_was_started_as_a_module_is_found(command, is_server):
    assert bool(software.SERVER.search(f"/opt/hub/bin/{command}")) == is_server


# ------------------------------------------------------------------ the disk, and the data


def disk_with(free=GIB, files=10**6, shm=GIB):
    def usage(folder):
        return SimpleNamespace(f_bavail=shm if folder == "/dev/shm" else free, f_frsize=1, f_files=1, f_favail=files)

    return usage


def test_a_full_disk_or_one_out_of_files_is_an_error(tmp_path):
    disk = case(doctor.disk, {"home": tmp_path}, shm=str(tmp_path / "none"))
    says(case(disk, usage=disk_with()), "ok", "home 1.0 GiB")
    says(case(disk, usage=disk_with(free=GIB // 8)), "error", "128 MiB", "home", "MANYHANDS_OUTPUTS")
    says(case(disk, usage=disk_with(files=7)), "error", "7 files")
    says(case(doctor.disk, {"home": tmp_path}, disk_with(shm=64 * 2**20)), "warning", "64 MiB", "--shm-size=1g")


def test_outputs_of_a_read_only_course_go_elsewhere_and_where_nothing_can_be_written_is_an_error(tmp_path, monkeypatch):
    home, course = tmp_path / "home", tmp_path / "course"
    for folder in (home, course):
        folder.mkdir()
    monkeypatch.setattr(doctor, "ROOT", course)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("MANYHANDS_OUTPUTS")
    disk = case(doctor.disk, usage=disk_with())
    says(disk, "ok", f"outputs go to {course / 'outputs'}")
    assert not any(course.iterdir()), "the doctor leaves nothing"
    read_only, tried = [course], tempfile.TemporaryFile

    def refuse(dir):
        if dir in read_only:
            raise OSError(errno.EROFS, "Read-only file system")
        return tried(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)  # root may write whatever the modes say
    says(disk, "ok", f"outputs go to {home}/.local/share/manyhands")
    read_only.append(home)
    says(disk, "error", f"home: {home} cannot be written", "set HOME")
    monkeypatch.setenv("MANYHANDS_OUTPUTS", str(course / "x"))
    read_only.remove(home)
    says(disk, "error", f"outputs: {course} cannot be written", "MANYHANDS_OUTPUTS")


def test_data_is_found_missing_or_wrong(tmp_path, monkeypatch):
    from manyhands.data import shakespeare

    monkeypatch.setenv("MANYHANDS_DATA", str(tmp_path))
    monkeypatch.delenv("MANYHANDS_SHAKESPEARE", raising=False)
    monkeypatch.setattr(shakespeare, "download", lambda url: pytest.fail("the doctor downloads nothing"))
    says(doctor.data, "warning", "not here", "prepare_data.py", "MANYHANDS_SHAKESPEARE=")
    (tmp_path / shakespeare.FILE_NAME).write_text("To be, or not to be")
    says(doctor.data, "error", "is not the course's Shakespeare")
    monkeypatch.setattr(shakespeare, "checked", lambda content, where, cure: content)
    says(doctor.data, "ok", "19 bytes, checked")
    monkeypatch.setenv("MANYHANDS_SHAKESPEARE", str(tmp_path / "gone"))
    says(doctor.data, "error", "cannot be read")


# ------------------------------------------------------------------ the whole


def broken():
    raise ImportError("No module named 'psutil'")


def good():
    return "this is ok"


def poor():
    raise Fault("warning", "this is poor", "mend it")


def bad():
    raise Fault("error", "this is bad", "mend it")


@pytest.mark.parametrize(
    ("checks", "status", "printed"),
    [
        ([good], 0, "1 of 1 checks are OK"),
        ([good, poor], 0, "-> mend it\n1 of 2 checks are OK, 1 warning"),
        ([good, poor, bad, bad], 1, "1 warning and 2 errors"),
    ],
)
def test_the_exit_status_is_1_only_with_errors(checks, status, printed, capsys):
    assert doctor.main([], checks={str(n): check for n, check in enumerate(checks)}) == status
    assert printed in capsys.readouterr().out


def test_a_check_that_breaks_is_a_warning_and_the_others_go_on(capsys):
    assert doctor.main(["--json"], checks={"memory": broken, "one": good}) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["check"], first["status"], second["status"]) == ("memory", "warning", "ok")
    assert "psutil" in first["says"] and first["remedy"]


def run_python(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=240, check=False)


def test_it_runs_here_and_reports_every_check_as_json(root):
    done = run_python(root / "scripts" / "doctor.py", "--json")
    findings = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert findings.keys() == doctor.CHECKS.keys() and done.stderr == ""
    assert findings["python"]["status"] == findings["packages"]["status"] == "ok"
    # on a machine that is busy or cold the import is slow, which the doctor has to say
    assert findings["torch"]["status"] == "ok" or "importing it took" in findings["torch"]["says"]
    assert done.returncode == any(finding["status"] == "error" for finding in findings.values())
    assert not [f for f in findings.values() if "could not be checked" in f["says"]]


WITHOUT_SITE_PACKAGES = """
import sys
sys.path.insert(0, sys.argv[1])
from manyhands.tools.doctor import CHECKS, main
sys.exit(main([], checks={name: check for name, check in CHECKS.items() if name not in ("torch", "GPUs")}))
"""


def test_it_runs_where_nothing_is_installed_and_says_so(root):
    done = run_python("-I", "-S", "-c", WITHOUT_SITE_PACKAGES, root / "scripts")
    assert done.returncode == 1 and done.stderr == ""
    assert "missing: torch, numpy" in done.stdout and "-m pip install -e" in done.stdout


def test_a_program_that_hangs_is_ended():
    status, text = ask([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.5)
    assert status is None and "no answer within 0.5 s" in text
    assert "did not start" in ask(["no-such-program"])[1]
