"""Each check of the doctor on faked inputs: what is well, what is not, and that the remedy is named."""

import errno
import json
import os
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import pytest
from manyhands import doctor
from manyhands.doctor import machine, place, server, software
from manyhands.doctor.finding import Answer, Finding, ask

pytestmark = pytest.mark.ranks

GIB = 2**30


def nothing(name):
    """`which` where nothing is installed."""


def everything(name):
    return f"/usr/bin/{name}"


def says(finding, status, *words):
    """Assert the status, that each word is in the text or the remedy, and that what is not well has a remedy."""
    text = f"{finding.says} -> {finding.remedy}"
    assert finding.status == status, text
    for word in words:
        assert word in text, text
    assert bool(finding.remedy) == (status != "ok"), text


def answering(text, status=0):
    return lambda *_, **__: Answer(status, text)


# ------------------------------------------------------------------ software


def test_python_must_be_3_11_or_newer_64_bit_and_not_windows_own():
    says(software.python((3, 11, 7), "Linux", 64), "ok", "3.11.7")
    says(software.python((3, 10, 18), "Linux", 64), "error", "older than 3.11", "make kernel PYTHON=")
    says(software.python((3, 11, 7), "Windows", 64), "error", "WSL2")
    says(software.python((3, 11, 7), "Linux", 32), "error", "64-bit")


def test_packages_missing_or_too_old_are_named():
    required = {"torch": ">=2.6", "numpy": ">=1.26"}
    versions = {"torch": "2.13.0+cpu", "numpy": "2.4.6"}
    says(
        software.packages(required, versions.get, {"torch": "2.13.0", "numpy": "2.4.6"}),
        "ok",
        "all 2 as tested",
    )
    says(software.packages(required, versions.get, {"numpy": "2.0.0"}), "ok", "others: numpy 2.4.6")
    says(software.packages(required, {"torch": "2.13.0"}.get, {}), "error", "missing: numpy", "pip install")
    says(software.packages(required, {**versions, "numpy": "1.9.3"}.get, {}), "warning", "numpy 1.9.3 (>=1.26)")


def test_versions_compare_as_numbers_not_as_text():
    assert software.within("2.13.0+cpu", ">=2.6") and not software.within("2.5.1", ">=2.6")
    assert software.within("2.6.0rc1", ">=2.6") and software.within("7.4", "")


def test_the_packages_of_this_course_are_read_from_its_own_files(root):
    required = software.requirements(root / "pyproject.toml")
    assert required["torch"].startswith(">=") and {"mpi4py", "papermill", "psutil"} <= required.keys()


FACTS = {"version": "2.13.0", "seconds": 2.0, "cuda_build": None, "gloo": True, "cuda": 0, "xpu": 0}


@pytest.mark.parametrize(
    "facts, why, status, words",
    [
        ({}, "", "ok", ["2.13.0 with gloo"]),
        ({"gloo": False}, "", "error", ["no gloo"]),
        ({"seconds": 63}, "", "warning", ["63 s", "make shared"]),
        (None, "crashed: Illegal instruction", "error", ["Illegal instruction", "SITE_PYTHON"]),
    ],
)
def test_torch_must_import_in_reasonable_time_and_have_gloo(facts, why, status, words):
    probe = (None, why) if facts is None else ({**FACTS, **facts}, "")
    says(software.torch(lambda: probe), status, *words)


def test_two_mpi_ranks_say_hello():
    launcher = ["mpiexec", "-n", "2"]
    says(software.mpi(launcher, None, answering("hello 2 2\nhello 2 2\n")), "ok", "2 ranks say hello")
    worlds = software.mpi(launcher, None, answering("hello 1 1\nhello 1 1\n"))
    says(worlds, "error", "two worlds of one", "another MPI than mpi4py", "mpiexec beside")
    says(
        software.mpi(launcher, None, answering("no answer within 45 s", None)),
        "error",
        "no answer within 45 s",
    )
    says(software.mpi(launcher, None, answering("hello 2 2\n")), "error", "did not say hello")


def test_a_rank_says_hello_in_one_write(monkeypatch):
    """Pieces of two ranks would mix."""
    world = SimpleNamespace(allreduce=lambda value: 2, size=2)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=SimpleNamespace(COMM_WORLD=world)))
    written = []
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=written.append, flush=lambda: None))
    exec(software.HELLO, {})  # noqa: S102
    assert written == ["hello 2 2\n"]


def test_mpi_is_not_tried_on_a_login_node_and_its_absence_is_no_error(monkeypatch):
    def never(*_, **__):
        raise AssertionError("mpiexec was started on a login node")

    says(software.mpi(["mpiexec"], "its name is login3", never), "warning", "not tried", "compute node")
    monkeypatch.setattr("manyhands.launch.allocation.mpi_launcher", lambda n: None)
    says(software.mpi(), "warning", "no mpiexec", "pip install mpich", "torchrun work without")


def test_ipyparallel_must_load():
    says(software.ipyparallel(answering("9.2.0\n")), "ok", "9.2.0")
    says(
        software.ipyparallel(answering("ModuleNotFoundError: No module named 'ipyparallel'", 1)),
        "error",
        "make kernel",
    )


def package_folder(folder, *names):
    for name in names:
        (folder / name).mkdir(parents=True)
    return folder


def test_home_packages_shadow_only_where_python_sees_them(tmp_path):
    folder = package_folder(tmp_path, "torch", "numpy", "harmless")
    says(software.user_site(True, folder, {}), "warning", "torch, numpy", "export PYTHONNOUSERSITE=1")
    says(software.user_site(True, folder, {"PYTHONNOUSERSITE": "1"}), "ok", "does not see")
    says(software.user_site(False, folder, {}), "ok", "does not see")
    says(software.user_site(True, tmp_path / "none", {}), "ok", "none of our packages")


def test_python_path_with_our_packages_is_an_error_and_without_is_none(tmp_path, root):
    ours, harmless = package_folder(tmp_path / "a", "torch"), package_folder(tmp_path / "b", "my_thesis")
    path = os.pathsep.join
    says(
        software.python_path({"PYTHONPATH": path([str(harmless), str(ours)])}),
        "error",
        "torch",
        "unset PYTHONPATH",
    )
    says(software.python_path({"PYTHONPATH": path([str(harmless), str(root / "scripts")])}), "ok", "2 entries")
    says(software.python_path({}), "ok", "not set")


def test_an_active_conda_matters_only_if_python_is_not_its_own(tmp_path):
    says(software.conda({"CONDA_PREFIX": str(tmp_path)}, "/other/.venv"), "warning", "conda deactivate")
    says(software.conda({"CONDA_PREFIX": str(tmp_path)}, str(tmp_path)), "ok", "its own")
    says(software.conda({}), "ok", "not active")


# ------------------------------------------------------------------ the server


def fake_server(**versions):
    return server.Server("/opt/hub/bin/python", "running as pid 71", {"jupyterlab": "4.6.6", **versions})


def test_jupytext_and_widgets_are_looked_for_in_the_servers_environment():
    whole = fake_server(jupytext="1.19.6", jupyterlab_widgets="3.0.17")
    says(server.server(whole), "ok", "4.6.6 in /opt/hub/bin/python, running as pid 71")
    says(server.jupytext(whole), "ok", "1.19.6")
    says(server.widgets(whole), "ok", "3.0.17")
    bare = fake_server()
    says(server.jupytext(bare), "warning", "make sync", "/opt/hub/bin/python -m pip install jupytext")
    says(
        server.widgets(bare),
        "warning",
        "static pictures",
        "/opt/hub/bin/python -m pip install jupyterlab_widgets",
    )


def test_a_missing_or_old_jupyterlab_is_a_warning():
    says(server.server(None), "warning", "make lab")
    says(server.server(fake_server(jupyterlab="3.6.1")), "warning", "older than 4")
    says(server.server(fake_server(jupyterlab=None)), "warning", "not in /opt/hub/bin/python")
    assert {server.jupytext(None).status, server.widgets(None).status} == {"ok"}


def test_the_running_server_is_found_before_the_one_on_path(tmp_path):
    commands = [
        (["bash"], "running above this process"),
        (
            ["/opt/hub/bin/python3.11", "/opt/hub/bin/jupyterhub-singleuser", "--port=1"],
            "running above this process",
        ),
    ]
    run = answering('{"jupyterlab": "4.2.0", "jupytext": null, "jupyterlab_widgets": null}')
    found = server.find_server({}, commands, lambda name: None, run)
    assert (found.python, found.versions["jupyterlab"]) == ("/opt/hub/bin/python3.11", "4.2.0")
    script = tmp_path / "jupyter-lab"
    script.write_text(f"#!{sys.executable}\nprint()\n")
    found = server.find_server({"JUPYTERHUB_USER": "ada"}, commands[:1], lambda name: str(script), run)
    assert (found.python, found.found) == (sys.executable, f"{script} (on a hub)")
    assert server.find_server({}, [], lambda name: None, run) is None


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
    program, *rest = command.split()
    commands = [([f"/opt/hub/bin/{program}", *rest], "running as pid 71")]
    run = answering('{"jupyterlab": "4.2.0", "jupytext": null, "jupyterlab_widgets": null}')
    found = server.find_server({}, commands, lambda name: None, run)
    assert (found.python if found else None) == (f"/opt/hub/bin/{program}" if is_server else None)


def test_the_python_of_a_console_script_is_found_in_both_forms(tmp_path):
    long_path = tmp_path / "long"
    long_path.write_text(f"#!/bin/sh\n'''exec' {sys.executable} \"$0\" \"$@\"\n' '''\nimport sys\n")
    assert server.shebang(long_path) == sys.executable
    assert server.shebang(tmp_path / "missing") is None


def test_the_kernel_must_exist_and_leave_home_packages_out():
    spec = {"argv": [sys.executable, "-m", "ipykernel_launcher"], "env": {"PYTHONNOUSERSITE": "1"}}
    says(server.kernel({"manyhands": spec}), "ok", sys.executable)
    says(server.kernel({"python3": spec}), "warning", "make kernel")
    says(server.kernel({"manyhands": {**spec, "env": {}}}), "warning", "~/.local")
    says(
        server.kernel({"manyhands": {**spec, "argv": ["/gone/python"]}}),
        "error",
        "/gone/python",
        "make kernel",
    )


# ------------------------------------------------------------------ the machine


def test_cores_are_what_affinity_and_the_control_group_leave():
    says(machine.cores(8, float("inf"), 64), "ok", "8 of 64")
    says(machine.cores(8, 2.5, 64), "ok", "2 of 64", "control group 2.5")
    says(machine.cores(1, float("inf"), 64), "warning", "take turns", "--cpus-per-task")


def test_memory_below_what_ranks_need_is_an_error_below_a_lessons_a_warning():
    says(machine.memory(16 * GIB, -1), "ok", "16.0 GiB")
    says(machine.memory(2 * GIB, -1), "warning", "n_ranks = 2")
    says(machine.memory(1 * GIB, -1), "error", "ask for 4 GB")
    says(machine.memory(16 * GIB, 8 * GIB), "warning", "ulimit -v")


def test_limits_of_processes_and_files():
    says(machine.processes(None), "ok", "no limit")
    says(machine.processes(4000), "ok", "4000 more")
    says(machine.processes(60), "error", "only 60 more", "ps ux")
    says(machine.open_files(-1), "ok", "unlimited")
    says(machine.open_files(256), "warning", "ulimit -n is 256", "ulimit -n 4096")


def test_a_containers_default_shared_memory_is_too_small(tmp_path):
    says(machine.shared_memory(64 * 2**20), "warning", "64 MiB", "--shm-size=1g")
    says(machine.shared_memory(8 * GIB), "ok", "8192 MiB")
    says(machine.shared_memory(None, tmp_path / "none"), "ok", "has none")


def test_a_full_disk_or_one_out_of_files_is_an_error(tmp_path):
    places = {"home": tmp_path}
    says(machine.space(places, lambda _: (GIB, 10**6)), "ok", "home 1.0 GiB")
    says(machine.space(places, lambda _: (GIB // 8, 10**6)), "error", "128 MiB", "home", "MANYHANDS_OUTPUTS")
    says(machine.space(places, lambda _: (GIB, 7)), "error", "7 files")


QUOTA = """Disk quotas for user ada (uid 1000):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
     /dev/sda1  {used}  20971520 22020096           31000       0       0
"""


def test_a_quota_near_its_end_is_a_warning_and_an_unwritable_home_an_error(tmp_path):
    says(machine.quota(answering(QUOTA.format(used="5242880")), everything, tmp_path), "ok")
    says(
        machine.quota(answering(QUOTA.format(used="20000000")), everything, tmp_path),
        "warning",
        "19.1 of 20.0 GiB",
    )
    says(
        machine.quota(answering(QUOTA.format(used="20971521*")), everything, tmp_path),
        "warning",
        "make shared",
    )
    says(machine.quota(which=nothing, home=tmp_path), "ok", "no quota program")
    says(machine.quota(which=nothing, home=tmp_path / "gone"), "error", "cannot be written")


def test_ports_on_loopback_must_be_free_and_reachable():
    def refuse():
        raise OSError(98, "Address already in use")

    says(machine.ports(), "ok", "40 free ones")
    says(machine.ports(refuse), "error", "port 1 of 40", "Address already in use", "ss -tln")


def test_a_host_without_an_address_is_a_warning():
    def unknown(name):
        raise OSError("Name or service not known")

    says(machine.host_name("ada", lambda name: "10.0.0.7"), "ok", "ada is 10.0.0.7")
    says(machine.host_name("ada", unknown), "warning", '"127.0.0.1 ada" to /etc/hosts')


def test_a_proxy_must_leave_this_machine_alone():
    proxy = {"https_proxy": "http://proxy:3128"}
    says(machine.proxies({}), "ok", "none set")
    says(machine.proxies(proxy), "warning", "127.0.0.1 and localhost", "export NO_PROXY=127.0.0.1,localhost")
    says(machine.proxies({**proxy, "no_proxy": "localhost,.local"}), "warning", "lacks 127.0.0.1")
    says(machine.proxies({**proxy, "NO_PROXY": "localhost, 127.0.0.1"}), "ok", "not for this machine")


@pytest.mark.parametrize(
    "driver, facts, status, words",
    [
        (0, {}, "ok", ["run on the CPU with gloo"]),
        (4, {"cuda_build": "13.0", "cuda": 4}, "ok", ["4 x CUDA"]),
        (4, {}, "warning", ["CPU build", "SITE_PYTHON"]),
        (4, {"cuda_build": "13.0"}, "warning", ["sees none", "older driver"]),
        (0, {"xpu": 6}, "ok", ["6 x XPU"]),
        (2, None, "warning", ["torch does not import"]),
    ],
)
def test_torch_must_see_the_gpus_that_the_driver_sees(driver, facts, status, words):
    listed = "".join(f"GPU {n}: NVIDIA H200 (UUID: GPU-{n})\n" for n in range(driver))
    probe = (None, "broken") if facts is None else ({**FACTS, **facts}, "")
    says(machine.gpus(lambda: probe, answering(listed), everything if driver else nothing), status, *words)


# ------------------------------------------------------------------ the place


def test_scheduler_and_job_are_named():
    says(place.scheduler({}, nothing), "ok", "none", "bash jobs/")
    says(place.scheduler({}, everything), "ok", "Slurm (/usr/bin/sbatch), PBS (/usr/bin/qsub), no job")
    says(place.scheduler({"PBS_JOBID": "123.server"}, everything), "ok", "inside PBS job 123.server")


def test_a_login_node_is_a_warning_with_what_it_changes():
    says(place.login(None), "ok", "no")
    says(
        place.login("its name is login3"),
        "warning",
        "login3",
        "2 ranks",
        "make preflight refuse",
        "interactive job",
    )


def test_outputs_of_a_read_only_course_go_elsewhere_and_where_nothing_can_be_written_is_an_error(tmp_path, monkeypatch):
    home, course = tmp_path / "home", tmp_path / "course"
    for folder in (home, course):
        folder.mkdir()
    says(place.outputs({}, course, home), "ok", str(course / "outputs"))
    assert not any(course.iterdir()), "the doctor leaves nothing"
    read_only = [course]
    tried = tempfile.TemporaryFile

    def refuse(dir):
        if dir in read_only:
            raise OSError(errno.EROFS, "Read-only file system")
        return tried(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)  # root may write whatever the modes say
    says(place.outputs({}, course, home), "ok", "cannot be written", f"{home}/.local/share/manyhands")
    read_only.append(home)
    says(place.outputs({}, course, home), "error", f"{home}/.local", "export MANYHANDS_OUTPUTS=")
    read_only.append(tmp_path)
    says(place.outputs({"MANYHANDS_OUTPUTS": str(tmp_path / "x")}, course), "error", "name another folder")


def test_data_is_found_missing_or_wrong(tmp_path, monkeypatch):
    from manyhands.data import shakespeare

    monkeypatch.setenv("MANYHANDS_DATA", str(tmp_path))
    monkeypatch.setattr(shakespeare, "download", lambda url: pytest.fail("the doctor downloads nothing"))
    says(place.data({}), "warning", "not here", "prepare_data.py", "MANYHANDS_SHAKESPEARE=")
    (tmp_path / shakespeare.FILE_NAME).write_text("To be, or not to be")
    says(place.data({}), "error", "is not the course's Shakespeare")
    monkeypatch.setattr(shakespeare, "_is_shakespeare", lambda content: True)
    says(place.data({}), "ok", "19 bytes, checked")
    monkeypatch.setenv("MANYHANDS_SHAKESPEARE", str(tmp_path / "gone"))
    says(place.data(os.environ), "error", "cannot be read")


# ------------------------------------------------------------------ the whole


def broken():
    raise ImportError("No module named 'psutil'")


GOOD, POOR, BAD = (lambda s=s: Finding("one", s, f"this is {s}", "" if s == "ok" else "mend it") for s in doctor.MARKS)


@pytest.mark.parametrize(
    "checks, status, says",
    [
        ([GOOD], 0, "1 of 1 checks are OK"),
        ([GOOD, POOR], 0, "1 warning"),
        ([GOOD, POOR, BAD, BAD], 1, "1 warning and 2 errors"),
    ],
)
def test_the_exit_status_is_1_only_with_errors(checks, status, says, capsys):
    assert doctor.main([], {str(n): check for n, check in enumerate(checks)}) == status
    assert says in capsys.readouterr().out


def test_a_check_that_breaks_is_a_warning_and_the_others_go_on(capsys):
    assert doctor.main(["--json"], {"memory": broken, "one": GOOD}) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["check"], first["status"], second["status"]) == ("memory", "warning", "ok")
    assert "psutil" in first["says"] and first["remedy"]


def test_the_table_shows_remedies_with_and_without_rich(capsys, monkeypatch):
    doctor.main([], {"one": POOR})
    assert "-> mend it" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "rich.console", None)
    doctor.main([], {"one": POOR})
    assert "this is warning" in (plain := capsys.readouterr().out) and "-> mend it" in plain


def run_python(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=240, check=False)


def test_it_runs_here_and_reports_every_check_as_json(root):
    done = run_python(root / "scripts" / "doctor.py", "--json")
    findings = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert findings.keys() == doctor.checks().keys() and done.stderr == ""
    assert findings["python"]["status"] == "ok"
    # on a machine that is busy or cold the import is slow, which the doctor has to say
    assert findings["torch"]["status"] == "ok" or "importing it took" in findings["torch"]["says"]
    assert done.returncode == any(finding["status"] == "error" for finding in findings.values())
    assert not [f for f in findings.values() if "could not be checked" in f["says"]]


WITHOUT_SITE_PACKAGES = """
import sys
sys.path.insert(0, sys.argv[1])
from manyhands.doctor import checks, main
slow = ("torch", "ipyparallel", "GPUs")  # these start a Python of their own
sys.exit(main([], {name: check for name, check in checks().items() if name not in slow}))
"""


def test_it_runs_where_nothing_is_installed_and_says_so(root):
    done = run_python("-I", "-S", "-c", WITHOUT_SITE_PACKAGES, root / "scripts")
    assert done.returncode == 1 and done.stderr == ""
    assert "missing: torch, numpy" in done.stdout and "-m pip install -e" in done.stdout


def test_a_program_that_hangs_is_ended():
    answer = ask([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.5)
    assert answer.status is None and "no answer within 0.5 s" in answer.text
    assert "did not start" in ask(["no-such-program"]).text
