"""Each check of the doctor on faked inputs: what is well, what is not, and that the remedy is named."""

import functools
import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from manyhands.tools import doctor

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


case = functools.partial
SPEC = {"argv": [sys.executable, "-m", "ipykernel_launcher"], "env": {"PYTHONNOUSERSITE": "1"}}
MPIEXEC = ["mpiexec", "-n", "2"]
PROXY = {"https_proxy": "http://proxy:3128"}
INF = float("inf")


def torch(gpus_here=0, **changed):
    """The check where torch says this of itself, and nvidia-smi lists so many GPUs."""
    probe = {
        "version": "2.13.0", "seconds": 2.0, "gpu_build": "", "gloo": True, "gpus": 0, "capability": None,
        "built_for": ["sm_75", "sm_90", "sm_100", "sm_120a"],
    } | changed  # fmt: skip
    listed = "".join(f"GPU {n}: NVIDIA H200 (UUID: GPU-{n})\n" for n in range(gpus_here))
    answers = {"nvidia-smi": (0, listed), sys.executable: (0, f"a warning\n{json.dumps(probe)}\n")}
    return case(doctor.torch, lambda command, timeout_s: answers[command[0]], everything if gpus_here else nothing)


def packages(**versions):
    """The check with these versions, else the oldest that serve; None: missing."""
    project = tomllib.loads((doctor.ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    oldest = dict(line.split(">=") for line in project["dependencies"] + extras["notebook"] + extras["course"])

    def version(name):
        if (found := (oldest | versions)[name]) is None:
            raise importlib.metadata.PackageNotFoundError
        return found

    return case(doctor.packages, version)


def server_with(**versions):
    known = {"jupyterlab": "4.6.6", "jupytext": "1.19.6", "jupyterlab_widgets": "3.0.17"} | versions
    return case(doctor.jupyterlab, [("/opt/hub/bin/python", "running as pid 71")], answering(json.dumps(known)))


def refuse_port(address):
    raise OSError(98, "Address already in use")


def unknown_host(name):
    raise OSError("Name or service not known")


@pytest.mark.parametrize(
    ("check", "status", "words"),
    [
        (case(doctor.python, (3, 10, 18)), "error", ["older than 3.11", "make kernel PYTHON="]),
        (packages(), "ok", ["new enough"]),
        (packages(numpy=None), "error", ["missing: numpy", "pip install"]),
        (packages(numpy="1.9.3"), "warning", ["numpy 1.9.3 (>=1.26)"]),  # as numbers, not as text
        (torch(), "ok", ["2.13.0 with gloo", "run on the CPU"]),
        (case(doctor.torch, answering("", -4)), "error", ["crashed", "SITE_PYTHON"]),
        (torch(4, gpu_build="13.0", gpus=4, capability=[9, 0]), "ok", ["sees 4 GPUs"]),
        (torch(4, gpu_build="13.0", gpus=4, capability=[7, 0]), "error", ["7.0", "kernels from 7.5 on", "whl/cu126"]),
        (torch(4), "warning", ["4 GPUs here", "CPU build", "SITE_PYTHON"]),
        (case(doctor.mpi, MPIEXEC, None, answering("hello 2 2\nhello 2 2\n")), "ok", ["2 ranks say hello"]),
        (case(doctor.mpi, MPIEXEC, None, answering("hello 1 1\nhello 1 1\n")), "error", ["than mpi4py", "use the"]),
        (case(doctor.mpi, MPIEXEC, None, answering("-----\nNo slots for 2\n-----\n", 1)), "error", ["hello: No slots"]),
        (case(doctor.mpi, MPIEXEC, "login3", pytest.fail), "warning", ["login3", "not tried", "compute node"]),
        (case(doctor.kernel, {"manyhands": SPEC}), "ok", [sys.executable]),
        (case(doctor.kernel, {"python3": SPEC}), "warning", ["make kernel"]),
        (case(doctor.kernel, {"manyhands": {**SPEC, "argv": ["/gone/python"]}}), "error", ["/gone/python"]),
        # jupytext and widgets are looked for in the server's environment
        (server_with(), "ok", ["4.6.6 in /opt/hub/bin/python, running as pid 71"]),
        (server_with(jupytext=None), "warning", ["make sync", "/opt/hub/bin/python -m pip install jupytext"]),
        (case(doctor.jupyterlab, []), "warning", ["make lab"]),
        (case(doctor.cores, 1, INF), "warning", ["take turns", "--cpus-per-task"]),
        (case(doctor.memory, 2 * GIB), "warning", ["n_ranks = 2"]),
        (case(doctor.limits, 60, -1), "error", ["only 60 more", "ps ux"]),
        (case(doctor.limits, None, 256), "warning", ["ulimit -n is 256", "ulimit -n 4096"]),
        (case(doctor.network, {}, resolve=str), "ok", ["127.0.0.1 answers"]),
        (case(doctor.network, {}, refuse_port), "error", ["Address already in use", "ss -tln"]),
        (case(doctor.network, {}, resolve=unknown_host), "warning", ["has no address", "to /etc/hosts"]),
        (case(doctor.network, {"GLOO_SOCKET_IFNAME": "lo,ib0"}, resolve=str), "warning", ["has no ib0", "ip -brief"]),
        (case(doctor.network, {"NCCL_SOCKET_IFNAME": "ib,hsn"}, resolve=str), "warning", ["no ib, hsn", "unset NCCL_"]),
        (case(doctor.network, {"NCCL_SOCKET_IFNAME": "=l"}, resolve=str), "warning", ["no l with an address"]),
        (case(doctor.network, {"NCCL_SOCKET_IFNAME": "ib,l"}, resolve=str), "ok", []),
        (case(doctor.network, {"NCCL_SOCKET_IFNAME": "^l"}, resolve=str), "ok", []),
        (case(doctor.network, {"PET_NNODES": "2"}, resolve=str), "warning", ["PET_NNODES=2", "wait for other nodes"]),
        (case(doctor.network, PROXY, resolve=str), "warning", ["127.0.0.1 and localhost", "export NO_PROXY="]),
        (case(doctor.compiler, {}, everything), "ok", ["/usr/bin/gcc, /usr/bin/g++"]),
        (case(doctor.compiler, {}, nothing), "warning", ["no C and no C++ compiler", "--train.compile", "module"]),
        (case(doctor.scheduler, {}, nothing, None), "ok", ["none", "bash jobs/"]),
        (case(doctor.scheduler, {}, everything, None), "ok", ["Slurm (/usr/bin/sbatch), PBS (/usr/bin/qsub), no job"]),
        (case(doctor.scheduler, {"SLURM_JOB_ID": "7"}, everything, None), "ok", ["inside Slurm job 7"]),
        (case(doctor.scheduler, {"SLURM_JOB_ID": "7"}, nothing, None), "warning", ["no srun here", "-launcher fork"]),
        (case(doctor.scheduler, {}, nothing, "its name is login3"), "warning", ["login3", "2 ranks"]),
    ],
)  # fmt: skip
def test_a_check_says_what_is_there_and_what_to_do(check, status, words):
    says(check, status, *words)


def test_one_check_reports_all_that_it_finds():
    environ = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib", "PET_NNODES": "2", "HTTP_PROXY": "http://x"}
    found = list(doctor.examine({"network": case(doctor.network, environ, resolve=unknown_host)}))
    assert [one["check"] for one in found] == ["network"] * 5
    for one, word in zip(found, ("no address", "GLOO_", "NCCL_", "PET_", "HTTP_PROXY"), strict=True):
        assert word in one["says"] and one["status"] == "warning" and one["remedy"]
    found = doctor.examine({"limits": case(doctor.limits, 3, 64)})
    assert [one["status"] for one in found] == ["error", "warning"]


def test_the_absence_of_mpi_is_no_error_and_a_hub_has_a_jupyterlab_so_none_is_to_be_started(monkeypatch):
    monkeypatch.setattr("manyhands.launch.allocation.mpi_launcher", lambda n: None)
    says(doctor.mpi, "warning", "no mpiexec", "pip install mpich", "all else works without")
    monkeypatch.setenv("JUPYTERHUB_API_URL", "http://127.0.0.1:8081/hub/api")
    says(case(doctor.jupyterlab, []), "warning", "make kernel, then choose Many Hands in the hub's JupyterLab")


def test_what_comes_before_the_environments_packages_is_named(tmp_path, root, monkeypatch):
    monkeypatch.setattr("site.ENABLE_USER_SITE", True)
    for name in ("ours/torch", "ours/numpy", "ours/harmless", "theirs/my_thesis"):
        (tmp_path / name).mkdir(parents=True)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    path = os.pathsep.join([str(theirs), str(ours)])
    says(case(doctor.paths, {"PYTHONPATH": path}, theirs), "error", "torch, numpy", "unset PYTHONPATH")
    path = os.pathsep.join([str(theirs), str(root / "scripts")])
    says(case(doctor.paths, {"PYTHONPATH": path}, theirs), "ok")
    says(case(doctor.paths, {}, ours), "error", "torch, numpy", "export PYTHONNOUSERSITE=1")
    says(case(doctor.paths, {"PYTHONNOUSERSITE": "1"}, ours), "ok")
    conda = {"CONDA_PREFIX": str(tmp_path)}
    says(case(doctor.paths, conda, theirs, prefix="/other/.venv"), "warning", "conda deactivate")
    says(case(doctor.paths, conda, theirs, prefix=str(tmp_path)), "ok")
    pip = {"PIP_TARGET": "/sw/mine", "PIP_PREFIX": "/sw"}
    says(case(doctor.paths, pip, theirs), "warning", "PIP_TARGET=/sw/mine", "unset PIP_TARGET PIP_PREFIX")
    says(case(doctor.paths, {}, theirs, course=tmp_path / "10:30"), "error", "10:30 has a colon", "rename")


def test_places_without_room_or_permission_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MANYHANDS_OUTPUTS", str(tmp_path / "outputs"))
    monkeypatch.setattr(doctor, "SHM", tmp_path)

    def free(**rooms):
        return lambda folder: SimpleNamespace(free=rooms.get(Path(folder).name, 100 * GIB))

    says(case(doctor.disk, free()), "ok", f"outputs go to {tmp_path}/outputs")
    says(case(doctor.disk, free(outputs=2**20)), "error", "only 1 MiB left for outputs", "MANYHANDS_OUTPUTS")
    monkeypatch.setattr(doctor, "SHM", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    says(case(doctor.disk, free(shm=2 * 2**20)), "warning", "shm has 2 MiB free", "--shm-size=1g", "torchrun")
    monkeypatch.setenv("HOME", "/proc/nobody")
    says(case(doctor.disk, free()), "error", "/proc/nobody", "set HOME, TMPDIR or MANYHANDS_OUTPUTS")


def test_it_says_why_ranks_are_not_forked(monkeypatch):
    monkeypatch.setenv("MANYHANDS_FORK", "0")
    says(doctor.ranks, "ok", "each rank of a notebook imports torch by itself: MANYHANDS_FORK=0")


def test_data_is_found_missing_or_wrong(tmp_path, monkeypatch):
    from manyhands.data import shakespeare

    monkeypatch.setenv("MANYHANDS_DATA", str(tmp_path))
    monkeypatch.delenv("MANYHANDS_SHAKESPEARE", raising=False)
    monkeypatch.setenv("MANYHANDS_PLAYS", "")
    monkeypatch.setattr(shakespeare, "download", lambda url: pytest.fail("the doctor downloads nothing"))
    says(doctor.data, "warning", "not here", "data/plays.txt", "MANYHANDS_SHAKESPEARE=")
    (tmp_path / shakespeare.FILE_NAME).write_text("To be, or not to be")
    says(doctor.data, "error", "is not the course's Shakespeare")
    monkeypatch.setattr(shakespeare, "checked", lambda content, where, cure: content)
    says(doctor.data, "ok", "19 bytes, checked")
    monkeypatch.setenv("MANYHANDS_SHAKESPEARE", str(tmp_path / "gone"))
    says(doctor.data, "error", "cannot be read")


# ------------------------------------------------------------------ the whole


def a_check(what):
    if isinstance(what, Exception):
        raise what
    return what


OK, POOR, BAD = "this is ok", doctor.warning("this is poor", "mend it"), doctor.error("this is bad", "mend it")


@pytest.mark.parametrize(
    ("whats", "status", "printed"),
    [
        ([OK], 0, "1 of 1 checks are OK"),
        ([OK, POOR], 0, "-> mend it\n1 of 2 checks are OK, 1 warning"),
        ([OK, POOR, BAD, BAD], 1, "1 warning and 2 errors"),
    ],
)
def test_the_exit_status_is_1_only_with_errors(whats, status, printed, capsys):
    assert doctor.main([], checks={str(n): case(a_check, what) for n, what in enumerate(whats)}) == status
    assert printed in capsys.readouterr().out


def run_python(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=240, check=False)


def test_it_runs_here_and_reports_every_check_as_json(root, forked_python, monkeypatch):
    monkeypatch.setattr(sys, "executable", forked_python)
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
sys.exit(main([], checks={name: check for name, check in CHECKS.items() if name != "torch"}))
"""


def test_it_runs_where_nothing_is_installed_and_says_so(root):
    done = run_python("-I", "-S", "-c", WITHOUT_SITE_PACKAGES, root / "scripts")
    assert done.returncode == 1 and done.stderr == ""
    assert "missing: torch, numpy" in done.stdout and "-m pip install -e" in done.stdout


def test_a_jupyterlab_in_another_terminal_is_seen_and_a_kernel_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    started = []
    for name in ("jupyter-kernel", "jupyter-lab"):
        (tmp_path / name).write_text("print('here', flush=True); input()")
        started.append(
            subprocess.Popen(
                [sys.executable, tmp_path / name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        )
    kernel, lab = started
    try:
        assert [process.stdout.readline() for process in started] == ["here\n"] * 2
        found = {how for _, how in doctor.find_servers()}
        assert f"running as pid {lab.pid}" in found and f"running as pid {kernel.pid}" not in found
    finally:
        for process in started:
            process.communicate("\n")
