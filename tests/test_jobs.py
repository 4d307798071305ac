"""The job files: written for a site, checked, and run for real on this machine without a scheduler."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import jupytext
import psutil
import pytest
from course_copy import copy_course, only_the_start_of_lesson_03
from manyhands.course.lessons import find_lessons
from manyhands.jobs import directives, stamp, submit

pytestmark = pytest.mark.ranks

SITES = sorted(stamp.sites())
FILES = ["ddp_shakespeare.pbs", "ddp_shakespeare.slurm"]
ALL_FILES = [f"{name}.{kind}" for name in ("ddp_shakespeare", "doctor", "train", "preflight", "sweep")
             for kind in ("pbs", "slurm")]  # fmt: skip


@pytest.fixture
def folder(tmp_path, root):
    """A copy of the job files that a test may write."""
    copy = tmp_path / "jobs"
    copy.mkdir()
    for name in [*ALL_FILES, "sweep.tsv"]:
        shutil.copy(root / "jobs" / name, copy)
    return copy


def account_of(site):
    return "Hands" if "account" in stamp.site_named(site).needs else None


def in_order(path, site):
    scheduler = directives.SCHEDULERS[path.suffix]
    complaints = directives.complaints(path.read_text(), scheduler, stamp.site_named(site))
    return [*complaints, *stamp.table_complaints(path, scheduler)]


@pytest.mark.parametrize("site", SITES)
def test_each_site_says_when_and_where_it_was_read_and_what_was_not_verified(site):
    known = stamp.site_named(site)
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", known.checked)
    assert all(source.startswith("https://") for source in known.sources) and known.sources
    assert "ubmitted" in known.verified  # whether a job of ours ever ran there


@pytest.mark.parametrize("name", ALL_FILES)
def test_job_files_as_committed_suit_a_generic_site(root, name):
    path = root / "jobs" / name
    assert stamp.stamped_site(path.read_text()) == "generic"
    assert in_order(path, "generic") == []


@pytest.mark.parametrize("site", SITES)
def test_the_files_that_a_site_reads_are_in_order_for_it_and_generic_brings_the_committed_ones_back(folder, root, site):
    committed = {path.name: path.read_text() for path in folder.iterdir()}
    written = stamp.stamp(site, account=account_of(site), folder=folder)
    schedulers = {suffix for suffix, name in directives.SCHEDULERS.items() if getattr(stamp.site_named(site), name)}
    assert {path.name for path in written} == {name for name in ALL_FILES if "." + name.split(".")[1] in schedulers}
    once = {path: path.read_text() for path in folder.iterdir()}
    assert {path.name for path, text in once.items() if text != committed[path.name]} <= {p.name for p in written}
    for path in written:
        assert in_order(path, site) == []
        assert stamp.stamped_site(path.read_text()) == site
        subprocess.run(["bash", "-n", path], check=True)
    stamp.stamp(site, account=account_of(site), folder=folder)
    assert {path: path.read_text() for path in folder.iterdir()} == once, "stamping twice changes nothing"
    stamp.stamp("generic", folder=folder)
    assert {path.name: path.read_text() for path in folder.iterdir()} == committed


MUST_HAVE = [
    ("polaris", FILES[0], {"account": "Hands", "queue": "debug-scaling", "walltime": "00:20:00", "nodes": 4},
     ["#PBS -A Hands", "#PBS -q debug-scaling", "#PBS -l select=4:system=polaris", "#PBS -l place=scatter",
      "#PBS -l filesystems=home:eagle", "#PBS -l walltime=00:20:00",
      "NPROC_PER_NODE=${NPROC_PER_NODE:-4} ", "${MPIEXEC_FLAGS:---cpu-bind none}", 'NCCL_NET="AWS Libfabric"']),
    ("perlmutter", FILES[1], {"account": "m1234_g", "queue": "regular", "reservation": "class"},
     ["#SBATCH --account=m1234_g", "#SBATCH --constraint=gpu", "#SBATCH --gpus-per-node=4", "#SBATCH --qos=regular",
      "#SBATCH --reservation=class"]),
    ("aurora", FILES[0], {"account": "Hands", "reservation": "R123456"},  # it is a queue there
     ["#PBS -q R123456\n", "${MPIEXEC_FLAGS:---cpu-bind list:4-27,56-79}"]),
    ("kempner", FILES[1], {"account": "lab", "queue": "kempner_h100", "gpus": 4, "mem": "360G"},
     ["#SBATCH --account=lab", "#SBATCH --partition=kempner_h100", "#SBATCH --mem=360G", "#SBATCH --gpus-per-node=4",
      "#SBATCH --cpus-per-task=64"]),
    ("frontier", FILES[1], {"account": "Hands"},
     ["export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3 GLOO_SOCKET_IFNAME=hsn0 "]),
    ("perlmutter", FILES[1], {"account": "m1234_g"},
     ["export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3 GLOO_SOCKET_IFNAME=hsn0;"]),
    ("jureca", FILES[1], {"account": "training"}, ["#SBATCH --partition=dc-gpu-devel", "#SBATCH --gres=gpu:4"]),
    ("lumi", FILES[1], {"account": "project_1", "queue": "standard-g", "walltime": "40:00:00", "nodes": 64},
     ["#SBATCH --partition=standard-g", "#SBATCH --gpus-per-node=8", "export NCCL_SOCKET_IFNAME=hsn "]),
    ("leonardo", FILES[1], {"account": "hands", "gpus": 2},
     ["#SBATCH --gres=gpu:2", "#SBATCH --cpus-per-task=16", "NPROC_PER_NODE=${NPROC_PER_NODE:-2}",
      "#SBATCH --partition=boost_usr_prod", "#SBATCH --qos=boost_qos_dbg"]),
    ("jean-zay", FILES[1], {"account": "abc@h100"},
     ["#SBATCH --account=abc@h100", "#SBATCH --constraint=h100", "#SBATCH --gres=gpu:4", "module load arch/h100;"]),
    ("aurora", FILES[0], {"account": "Hands"}, ["&& export FI_MR_CACHE_MONITOR=userfaultfd;"]),
]  # fmt: skip


@pytest.mark.parametrize(("site", "name", "wishes", "lines"), MUST_HAVE, ids=[row[0] for row in MUST_HAVE])
def test_what_a_site_must_have_and_one_wishes_stands_in_its_file(folder, site, name, wishes, lines):
    stamp.stamp(site, **wishes, folder=folder)
    text = (folder / name).read_text()
    assert [line for line in lines if line not in text] == []


def test_a_job_that_is_to_survive_says_so_in_its_directives(root):
    keys = {name: {d.key: d.value for d in directives.read((root / "jobs" / name).read_text(), name.split(".")[1])}
            for name in ALL_FILES}  # fmt: skip
    for name in ("train.slurm", "sweep.slurm"):
        assert keys[name]["--signal"] == "B:USR1@120" and "--requeue" in keys[name]
        assert keys[name]["--open-mode"] == "append"  # the second start must not wipe out what the first one said
    assert keys["train.pbs"]["-r"] == keys["sweep.pbs"]["-r"] == "y"


def test_each_site_with_gpus_names_its_device_so_that_no_job_trains_on_its_cpus(folder):
    """As a class finds out after an hour, where PyPI's torch lies on a machine of AMD's or Intel's."""
    devices = {site: stamp.site_named(site).settings.get("MANYHANDS_DEVICE") for site in SITES if site != "generic"}
    assert set(devices.values()) == {"cuda", "xpu"} and devices["aurora"] == "xpu"
    for site, device in devices.items():
        for path in stamp.stamp(site, account="Hands", folder=folder):
            if not path.name.startswith("sweep"):  # which runs train.*
                assert f"MANYHANDS_DEVICE=${{MANYHANDS_DEVICE:-{device}}}" in path.read_text()
                assert re.search("^export .*MANYHANDS_DEVICE", path.read_text(), re.MULTILINE)


def test_gpus_are_asked_for_on_wish_with_a_rank_for_each_and_left_out_again(folder, root):
    pbs, slurm = (folder / name for name in FILES)
    stamp.stamp("generic", gpus=4, folder=folder)
    assert "#PBS -l select=2:ncpus=16:mpiprocs=1:ngpus=4" in pbs.read_text().splitlines()
    assert {"#SBATCH --gpus-per-node=4", "#SBATCH --cpus-per-task=16"} < set(slurm.read_text().splitlines())
    stamp.stamp("generic", walltime="00:20:00", folder=folder)
    for path in (pbs, slurm):
        assert "NPROC_PER_NODE=${NPROC_PER_NODE:-4} " in path.read_text()
        assert re.search("ngpus=4|--gpus-per-node=4", path.read_text()) and in_order(path, "generic") == []
    stamp.stamp("generic", gpus=0, walltime="00:10:00", folder=folder)
    assert all(path.read_text() == (root / "jobs" / path.name).read_text() for path in (pbs, slurm))


def test_a_site_that_asks_for_gpus_by_gres_does_so_on_wish_too_and_in_no_other_way(folder):
    path = folder / FILES[1]
    for wishes, kept in (({"gpus": 2}, "gpu:2"), ({"queue": "boost_qos_lprod"}, "gpu:2"), ({"gpus": 1}, "gpu:1")):
        stamp.stamp("leonardo", account="Hands", folder=folder, **wishes)
        asked = {directive.key: directive.value for directive in directives.read(path.read_text(), "slurm")}
        assert asked["--gres"] == kept and "--gpus-per-node" not in asked


def test_nodes_and_memory_are_asked_for_on_wish_and_the_generic_site_alone_undoes_all(folder, root):
    committed = {path.name: path.read_text() for path in folder.iterdir()}
    wishes = {"account": "me", "queue": "big", "reservation": "R1", "walltime": "01:00:00"}
    stamp.stamp("generic", **wishes, nodes=3, mem="64G", gpus=2, folder=folder)
    assert "#PBS -l select=3:ncpus=8:mpiprocs=1:ngpus=2:mem=64gb" in (folder / FILES[0]).read_text()
    assert {"#SBATCH --nodes=3", "#SBATCH --mem=64G"} < set((folder / FILES[1]).read_text().splitlines())
    stamp.stamp("generic", account="you", folder=folder)
    assert "#SBATCH --mem=64G" in (folder / FILES[1]).read_text()
    stamp.stamp("generic", folder=folder)
    assert {path.name: path.read_text() for path in folder.iterdir()} == committed


@pytest.mark.parametrize(("site", "most"), [("aurora", 1), ("frontier", 1), ("perlmutter", 5)])
def test_a_sweep_that_is_more_jobs_than_a_queue_takes_of_one_user_is_named_with_what_works(folder, capsys, site, most):
    stamp.stamp(site, account="Hands", queue="debug", folder=folder)
    suffix = "pbs" if site == "aurora" else "slurm"
    (said,) = stamp.crowd_complaints(folder / f"sweep.{suffix}", suffix)
    assert f"queue debug of {stamp.site_named(site).title} takes {most} of your jobs at a time" in said
    assert "not 6" in said and f"`bash jobs/sweep.{suffix}` in an interactive job" in said
    assert stamp.crowd_complaints(folder / f"train.{suffix}", suffix) == []


def test_a_checked_sweep_of_a_crowded_queue_is_not_in_order(folder, monkeypatch, capsys):
    files = stamp.job_files(folder)
    monkeypatch.setattr(stamp, "job_files", lambda _=None: files)
    assert stamp.main(["check"]) == 0
    stamp.main(["stamp", "--site", "frontier", "--account", "Hands", "--queue", "debug"])
    assert "  but queue debug of Frontier (OLCF) takes 1 of your jobs" in capsys.readouterr().out
    assert stamp.main(["check"]) == 2
    assert "sweep.slurm for Frontier (OLCF): queue debug" in capsys.readouterr().out


def test_a_table_that_a_user_throttles_still_fits(folder):
    path = folder / "sweep.slurm"
    path.write_text(path.read_text().replace("--array=1-6", "--array=1-6%2"))
    assert in_order(path, "generic") == []


def test_make_jobs_needs_no_environment(root, tmp_path):
    """Any Python writes the files: who has a shared environment is not told to build one."""
    course = tmp_path / "many-hands"
    for part in ("jobs", "scripts/manyhands"):
        shutil.copytree(root / part, course / part)
    shutil.copy(root / "Makefile", course)
    python = program(tmp_path / "bin" / "python3", f'exec {sys.executable} -S "$@"')  # without packages
    done = subprocess.run(
        ["make", "jobs", "SITE=polaris", "ACCOUNT=Hands", "GPUS=2", "NODES=1", "MEM=9G", f"PYTHON={python}"],
        cwd=course, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "#PBS -A Hands" in (course / "jobs" / FILES[0]).read_text()
    assert "select=1:system=polaris:ngpus=2:mem=9gb" in (course / "jobs" / FILES[0]).read_text()
    assert not (course / ".venv").exists()


def test_an_old_python_without_pips_parser_is_told_to_be_newer(root, tmp_path):
    hide = "import sys; sys.modules.update({'tomllib': None, 'pip': None})"
    run = (
        f"{hide}; import runpy; sys.argv[1:] = ['sites']; runpy.run_module('manyhands.jobs.stamp', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", run], env=os.environ | {"PYTHONPATH": str(root / "scripts")},
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "older than Python 3.11: make jobs PYTHON=" in done.stderr


def test_away_from_the_course_a_shared_environment_says_where_to_go(tmp_path, monkeypatch):
    monkeypatch.setattr(stamp, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(stamp.JobError, match="^there are no job files here: go to the course's folder"):
        stamp.main(["check"])


@pytest.mark.parametrize("wrong", ['needs = ["account"', 'acount = "me"'])
def test_a_site_file_that_is_none_is_named_with_what_is_wrong(tmp_path, root, monkeypatch, wrong):
    shutil.copytree(root / "jobs" / "sites", tmp_path / "jobs" / "sites")
    with open(tmp_path / "jobs" / "sites" / "mine.toml", "w") as file:
        file.write((root / "jobs" / "sites" / "generic.toml").read_text().replace("needs = []", wrong))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(stamp.JobError, match=r"sites/mine.toml is no site \(.*generic.toml shows the form$"):
        stamp.main(["sites"])


def test_stamping_again_keeps_what_the_user_wrote(folder):
    path = folder / FILES[0]
    stamp.stamp("polaris", account="Hands", folder=folder)
    text = path.read_text().replace("#PBS -j oe", "#PBS -j oe\n#PBS -M me@site.org")
    text = text.replace("select=2:", "select=8:").replace("home:eagle", "home").replace(":-.venv}", ":-/my/env}")
    path.write_text(text.replace("VENV=${VENV-.venv}", "VENV=${VENV-/my/env}"))
    stamp.stamp("polaris", queue="debug-scaling", walltime="00:45:00", folder=folder)
    text = path.read_text()
    for kept in ("-M me@site.org", "select=8:system", "filesystems=home\n", "${VENV-/my/env}", "-A Hands"):
        assert kept in text
    assert "#PBS -q debug-scaling" in text and "#PBS -l walltime=00:45:00" in text


def test_replacing_one_resource_of_an_l_line_keeps_its_neighbours(folder):
    text = (folder / FILES[0]).read_text().replace("place=scatter", "place=scatter,software=lab")
    text = directives.replace(text, "pbs", {"-l place"}, {"-l place": "scatter:excl"})
    assert "#PBS -l software=lab" in text.splitlines() and "#PBS -l place=scatter:excl" in text.splitlines()


@pytest.mark.parametrize(
    ("wish", "sentence"),
    [
        ({"site": "summit"}, "no site 'summit': take SITE=aurora, frontier, generic, jean-zay, jureca, kempner"),
        ({"site": "polaris"}, "charges each job to a project: make jobs SITE=polaris ACCOUNT="),
        ({"site": "generic", "walltime": "10"}, "walltime '10' is not hours:minutes:seconds"),
        ({"site": "generic", "walltime": "00:00:00"}, "above zero"),
        ({"site": "generic", "walltime": "1:99:00"}, "write ten minutes as 00:10:00"),
        ({"site": "polaris", "account": "a", "walltime": "02:00:00"}, "at most 01:00:00, not 120 minutes"),
        ({"site": "polaris", "account": "a", "nodes": 4}, "queue debug of Polaris (ALCF) takes 1 to 2 nodes, not 4"),
        ({"site": "generic", "account": "a\nrm"}, "is not a name that a scheduler takes"),
        ({"site": "generic", "queue": "x; rm -rf"}, "QUEUE='x; rm -rf' is not a name"),
        ({"site": "generic", "nodes": 0}, "NODES=0"),
        ({"site": "generic", "mem": "64"}, "MEM='64' is no memory of a node: write a whole number and M, G or T"),
        ({"site": "aurora", "account": "a", "queue": "prod", "nodes": 31}, "prod of Aurora (ALCF) takes 256 to 10624"),
    ],
)
def test_a_wrong_wish_is_refused_with_its_cure_and_nothing_is_written(folder, wish, sentence):
    before = {path: path.read_text() for path in folder.iterdir()}
    with pytest.raises(stamp.JobError, match=re.escape(sentence)):
        stamp.stamp(**wish, folder=folder)
    assert {path: path.read_text() for path in folder.iterdir()} == before


def test_command_line_says_the_error_once_and_ends_with_status_2(root):
    command = [sys.executable, "-m", "manyhands.jobs.stamp", "stamp", "--site", "summit", "--account", ""]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and re.fullmatch("stamp: no site 'summit': .*\n", done.stderr)


WRONG = [
    # file, what is put in, for what, site, the sentence
    (0, "#PBS -l place=scatter\n", "", "generic", "no -l place=scatter"),
    (0, "#PBS -l place=scatter", "#PBS -l place=pack", "generic", "no -l place=scatter"),
    (0, "#PBS -j oe", "#PBS -l select=1", "generic", "2 lines with -l select=: PBS wants exactly one"),
    (0, "#PBS -l select=2:ncpus=2:mpiprocs=1\n", "", "generic", "0 lines with -l select="),
    (0, "#PBS -j oe", "# PBS -j oe", "generic", "'# PBS' is a comment, which PBS ignores: write '#PBS'"),
    (0, "#PBS -l walltime=00:10:00\n", "", "generic", "no walltime"),
    (0, "#PBS -j oe", "#PBS -j oe\nset -e\n#PBS -q debug", "generic", "stands below the first command"),
    (0, "#PBS -A Hands\n", "", "polaris", "charges each job to a project: make jobs SITE=polaris ACCOUNT="),
    (0, "#PBS -l filesystems=home:eagle\n", "", "polaris", "no -l filesystems=: mandatory on Polaris"),
    (0, "home:eagle", "home:flare", "polaris", "Polaris (ALCF) has no file system 'flare'"),
    (0, "home:flare", "home:eagle", "aurora", "Aurora (ALCF) has no file system 'eagle'"),
    (0, "select=2:", "select=3:", "polaris", "takes 1 to 2 nodes, not 3"),
    (1, "#SBATCH --nodes=2", "# SBATCH --nodes=2", "generic", "'# SBATCH' is a comment, which Slurm ignores"),
    (1, "#SBATCH --nodes=2\n", "", "generic", "no --nodes"),
    (1, "#SBATCH --nodes=2", "#SBATCH --nodes=2\n#SBATCH -N 4", "generic", "--nodes stands there twice"),
    (1, "--time=00:10:00", "--time=10", "generic", "walltime '10' is not"),
    (1, "#SBATCH --constraint=gpu\n", "", "perlmutter", "needs --constraint"),
    (1, "#SBATCH --gpus-per-node=4\n", "", "perlmutter", "needs --gpus-per-node"),
    (1, "#SBATCH --partition=batch\n", "", "frontier", "needs --partition"),
    (1, "#SBATCH --mem=64G\n", "", "kempner", "needs --mem"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "old", "new", "site", "sentence"), WRONG, ids=[wrong[-1] for wrong in WRONG])
def test_a_wrong_directive_is_rejected_with_the_right_sentence(folder, file, old, new, site, sentence):
    stamp.stamp(site, account=account_of(site), folder=folder)
    path = folder / FILES[file]
    assert in_order(path, site) == []
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    assert any(sentence in complaint for complaint in in_order(path, site)), in_order(path, site)


def program(path, lines):
    """A program of these lines of shell."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{lines}\n")
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    return only_the_start_of_lesson_03(copy_course(tmp_path_factory.mktemp("course") / "many-hands", only=("03",)))


def short_flags():
    lesson = find_lessons(only=["03"])[0]
    return [part for name, value in lesson.short.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def run_job(course, name, *arguments, cwd=None, **environ):
    """bash jobs/<name>, as on a laptop: no scheduler's variables, this Python's environment."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PBS_"))}
    clean |= {"VENV": str(Path(sys.executable).parents[1]), "NPROC_PER_NODE": "2", **environ}
    return subprocess.run(
        ["bash", course / "jobs" / name, *arguments], cwd=cwd or course, env=clean, capture_output=True, text=True,
        timeout=200, check=False,
    )  # fmt: skip


def test_without_a_scheduler_bash_runs_the_slurm_file_on_this_machine(course, tmp_path):
    done = run_job(course, FILES[1], LESSON_ARGS=" ".join(short_flags()), MANYHANDS_OUTPUTS=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = json.loads((tmp_path / "03_data_parallel" / "latest" / "metrics.json").read_text())
    assert metrics["world_size"] == 2 and metrics["launcher"] == "torchrun"
    assert metrics["parameters"]["steps"] == find_lessons(only=["03"])[0].short["steps"]


@pytest.mark.parametrize("name", ALL_FILES[:4])
def test_a_job_file_ends_with_the_laptops_own_command(course, name):
    """How ranks are started stands in manyhands.launch, once: no job file names a launcher's flags or a port."""
    text = (course / "jobs" / name).read_text()
    assert "python scripts/launch.py --starter" in text
    for elsewhere in ("rdzv", "20000", "-ppn", "--ntasks=", "torch.distributed.run", "scontrol show hostnames"):
        assert elsewhere not in text


def test_a_slurm_job_with_gpus_has_a_rank_for_each(course, tmp_path):
    says_its_words = program(tmp_path / "python", '[ "$2" = manyhands.course.pairs ] || echo "$@"')
    environ = {"VENV": "", "PATH": f"{says_its_words.parent}:{os.environ['PATH']}", "NPROC_PER_NODE": ""}
    assert "--nproc 3 " in run_job(course, FILES[1], SLURM_GPUS_ON_NODE="3", **environ).stdout
    assert "--nproc 2 " in run_job(course, FILES[1], **environ).stdout


@pytest.mark.parametrize("name", ALL_FILES[:2])
def test_a_job_takes_the_environment_that_make_kernel_was_told_to_use_unless_one_is_named(course, tmp_path, name):
    for place in ("remembered", "named"):
        (tmp_path / place / "bin").mkdir(parents=True)
        (tmp_path / place / "bin" / "activate").write_text(f"echo took {place}; exit 7")
    (course / ".manyhands-env").write_text(f"{tmp_path}/remembered\n")
    try:
        assert run_job(course, name, VENV=".venv").stdout == "took remembered\n"
        assert run_job(course, name, VENV=str(tmp_path / "named")).stdout == "took named\n"
    finally:
        (course / ".manyhands-env").unlink()


@pytest.mark.parametrize("name", ALL_FILES[:2])
def test_outside_the_course_a_job_says_where_to_submit_it_from(course, name, tmp_path):
    done = run_job(course, name, cwd=tmp_path)
    assert done.returncode == 2
    assert "is not the course's folder" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", FILES)
def test_without_its_environment_a_job_stops_instead_of_using_another_python(course, name):
    done = run_job(course, name, VENV="/nowhere")
    assert done.returncode == 1
    assert "no environment in /nowhere: make kernel" in done.stderr
    assert ("qsub -v VENV=/path" if name.endswith(".pbs") else "VENV=/path sbatch") in done.stderr


@pytest.mark.parametrize("name", FILES)
def test_a_job_refuses_to_run_yesterdays_code(course, name):
    notebook = course / "notebooks" / "03_data_parallel.ipynb"
    saved = notebook.read_text()
    notebook.write_text(saved.replace("steps = 150", "steps = 7"))
    done = run_job(course, name)
    notebook.write_text(saved)
    assert done.returncode == 2 and done.stdout == ""
    assert "03_data_parallel" in done.stderr and "make sync" in done.stderr


@pytest.fixture
def in_the_course(course, tmp_path, monkeypatch):
    """A notebook's process: it lies in the course's notebooks/ and sees no scheduler."""
    monkeypatch.chdir(course / "notebooks")
    monkeypatch.setenv("VENV", str(Path(sys.executable).parents[1]))
    monkeypatch.setenv("NPROC_PER_NODE", "1")
    return course


def test_a_cell_submits_watches_and_reads_the_pbs_file_without_a_scheduler(in_the_course, monkeypatch, capsys):
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    job = submit.submit("ddp_shakespeare", " ".join(short_flags()), via="bash")
    assert job.watch(200) == "completed"
    job.grep("validation loss")
    said = capsys.readouterr().out
    assert said.startswith("$ bash jobs/ddp_shakespeare.pbs --steps")
    assert "running: this machine" in said and "step   0: validation loss" in said
    assert job.metrics("03_data_parallel")["world_size"] == 2
    assert job.metrics("02_collectives") is None


def test_what_was_saved_in_the_notebook_is_in_the_script_before_the_job_starts(in_the_course, monkeypatch, capsys):
    notebook, script = (in_the_course / part for part in ("notebooks/03_data_parallel.ipynb",
                                                          "scripts/03_data_parallel.py"))  # fmt: skip
    before = notebook.read_text(), script.read_text()
    edited = before[0].replace("global_batch = 0", "global_batch = 24", 1)
    assert edited != before[0]
    try:
        notebook.write_text(edited)
        os.utime(script, (1, 1))
        started_with = []
        monkeypatch.setattr(submit, "LocalJob", lambda name, flags: started_with.append(script.read_text()))
        submit.submit("ddp_shakespeare", via="bash")
        assert "global_batch = 24" in started_with[0]
        assert "wrote 03_data_parallel.ipynb into the script" in capsys.readouterr().out
    finally:
        notebook.write_text(before[0])
        script.write_text(before[1])


def test_a_cancelled_job_leaves_no_process(in_the_course, capsys):
    job = submit.submit("ddp_shakespeare", via="bash")
    here = psutil.Process(int(job.number))
    deadline = time.monotonic() + 200
    while not any("03_data_parallel" in command_of(child) for child in here.children()):  # a rank
        assert time.monotonic() < deadline and not job.ended()
        time.sleep(0.2)
    family = [here, *here.children(recursive=True)]
    job.cancel()
    assert job.state()[0] == "cancelled"
    _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []


def command_of(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return ""


def test_a_job_of_pbs_that_is_asked_to_end_leaves_a_mark_of_it(course, tmp_path):
    waits = 'trap "exit 143" TERM; echo hears; for i in {1..2000}; do sleep 0.1; done'
    python = program(tmp_path / "bin" / "python", f'[ "$2" = manyhands.course.pairs ] || {{ {waits}; }}')
    environ = {"VENV": "", "PATH": f"{python.parent}:{os.environ['PATH']}", "MANYHANDS_OUTPUTS": str(tmp_path)}
    command = ["bash", course / "jobs" / FILES[0]]
    run = subprocess.Popen(
        command, cwd=course, env=os.environ | environ | {"PBS_JOBID": "5.head"}, stdout=subprocess.PIPE, text=True
    )
    assert run.stdout.readline() == "hears\n"
    run.terminate()
    assert run.wait(100) == 143
    assert (tmp_path / "jobs" / "ddp_shakespeare.5.status").read_text() == "143\n"
    assert (tmp_path / "jobs" / "ddp_shakespeare.5.cancelled").exists()


def test_a_failed_job_says_so(in_the_course, capsys):
    job = submit.submit("ddp_shakespeare", "--no-such-flag 1", via="bash")
    assert job.watch(200) == "failed"
    job.grep("no-such-flag")
    assert "--no-such-flag is unknown" in capsys.readouterr().out


def test_where_the_scheduler_refuses_a_job_its_own_words_and_the_cure_are_shown(in_the_course, monkeypatch, tmp_path):
    answers(monkeypatch, tmp_path, sbatch="echo 'sbatch: error: Invalid account' >&2; exit 1")
    with pytest.raises(submit.SubmitError, match=r"Invalid account\n.*make jobs SITE="):
        submit.submit("ddp_shakespeare", via="slurm")


def test_a_limit_on_ones_jobs_is_named_as_the_cause_with_its_number(in_the_course, monkeypatch, tmp_path):
    """OpenPBS's own sentence and Slurm's: an account or a queue would be the wrong place to look."""
    refused = {
        "pbs": ("qsub", "qsub: would exceed queue debug's per-user limit"),
        "slurm": ("sbatch", "sbatch: error: QOSMaxSubmitJobPerUserLimit"),
    }
    for via, (name, sentence) in refused.items():
        answers(monkeypatch, tmp_path, **{name: f"echo {shlex.quote(sentence)} >&2; exit 1"})
        with pytest.raises(
            submit.SubmitError, match="this queue limits the number of your jobs, waiting ones too"
        ) as e:
            submit.submit("ddp_shakespeare", via=via)
        assert sentence in str(e.value) and "ACCOUNT" not in str(e.value)
    path = in_the_course / "jobs" / FILES[0]
    committed = path.read_text()
    try:
        stamp.stamp("aurora", account="Hands", folder=in_the_course / "jobs")
        with pytest.raises(
            submit.SubmitError, match=r"queue debug of Aurora \(ALCF\) takes 1 of your jobs .*`qstat -u"
        ):
            submit.submit("ddp_shakespeare", via="pbs")
    finally:
        stamp.stamp("generic", folder=in_the_course / "jobs")
    assert path.read_text() == committed


class FakeTime:
    """A clock that a sleep turns on at once."""

    def __init__(self):
        self.now_s, self.pauses_s = 0.0, []

    def monotonic(self):
        return self.now_s

    time = monotonic

    def sleep(self, seconds):
        self.pauses_s.append(seconds)
        self.now_s += seconds


def test_a_watched_job_is_asked_about_ever_more_rarely_and_after_its_end_no_more(in_the_course, monkeypatch, tmp_path):
    """Sixty people watch at once. After a change it looks closely again, as a short job may end soon."""
    job, clock = pbs_job(monkeypatch, tmp_path), FakeTime()
    monkeypatch.setattr(submit, "time", clock)
    waits, runs, ended = (recorded(*PBS_STATES[name][0]) for name in ("held", "runs, history off", "ended well"))
    asked = tmp_path / "asked"
    answers(
        monkeypatch, tmp_path,
        qstat=f'echo "$1" >>{asked}; case $(wc -l <{asked}) in [1-8])\n{waits}\n;; 9|10)\n{runs}\n;; esac\n'
        f'if [ "$1" = -x ]; then\n{recorded(*PBS_STATES["ended well"][1])}\nfi\n{ended}',
    )  # fmt: skip
    assert job.watch(1000) == "completed"
    assert clock.pauses_s == [1, 2, 4, 8, 16, 30, 30, 30, 1, 2]
    calls = len(asked.read_text().splitlines())
    assert job.state() == ("completed", "") and job.ended()
    assert len(asked.read_text().splitlines()) == calls


def test_a_watch_ends_when_its_time_is_over(in_the_course, monkeypatch, tmp_path, capsys):
    job, clock = pbs_job(monkeypatch, tmp_path), FakeTime()
    monkeypatch.setattr(submit, "time", clock)
    qstat(monkeypatch, tmp_path, *PBS_STATES["held"][:2])
    assert job.watch(10) == "waiting" and clock.now_s == 10
    assert "not ended within 10 s" in capsys.readouterr().out


@pytest.mark.parametrize("ended", [False, True])
def test_lesson_04_submits_its_second_job_only_when_the_first_has_ended(root, capsys, ended):
    """Where a queue takes one job of each user, a second one would be refused, and the lesson would stop."""
    (cell,) = [c.source for c in jupytext.read(root / "notebooks/04_first_job.ipynb").cells if "second = " in c.source]
    first, submitted = mock.Mock(ended=lambda: ended), mock.Mock()
    exec(cell, {"job": first, "submit": submitted, "job_flags": "", "via": "pbs"})
    assert submitted.called == ended
    assert ("run this cell again when it has" in capsys.readouterr().out) != ended


def answers(monkeypatch, folder, **programs):
    """Stand-ins for the scheduler's programs, ahead in PATH: {name: lines of shell}."""
    for name, lines in programs.items():
        program(folder / "bin" / name, lines)
    if str(folder / "bin") not in os.environ["PATH"]:
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")


def recorded(stdout="", stderr="", status=0):
    """Lines of shell that answer as a program of the scheduler did."""
    return f"cat <<'END'\n{stdout}\nEND\necho {shlex.quote(stderr)} >&2; exit {status}"


KNOWN = "Job Id: 123.head\n    Job_Name = ddp_shakespeare\n"
UNKNOWN = ("", "qstat: Unknown Job Id 123.head", 153)
HISTORY = ("", "qstat: 123.head Job has finished, use -x or -H to obtain historical job information", 35)
SILENT = ("", "Connection refused\nqstat: cannot connect to server head (errno=15010)", 255)
NOTHING = ("", "", 0)  # what `qstat -x -f` answers with job history off, for live jobs too
PBS_STATES = {
    # what `qstat -f` says, what `qstat -x -f` says, the state, what the remark holds
    "it waits for nodes": (
        (KNOWN + "    job_state = Q\n    comment = Not Running: Insufficient amount of resource",), NOTHING,
        "waiting", "Insufficient",
    ),
    "held": ((KNOWN + "    job_state = H\n    comment = Job held by ada",), NOTHING, "waiting", "held"),
    "runs, history off": ((KNOWN + "    job_state = R\n    exec_host = x1/0+x2/0",), NOTHING, "running", "x1/0+x2/0"),
    "a line that wraps": (
        (KNOWN + "    job_state = R\n    exec_host = x3101c0s1b0n0/0*64+x3101c0s1b1n0/0*64+x3\n\t101c0s25b0n0/0*64",),
        NOTHING, "running", "+x3101c0s25b0n0",
    ),
    "ended well": (HISTORY, (KNOWN + "    job_state = F\n    Exit_status = 0",), "completed", ""),
    "failed": (HISTORY, (KNOWN + "    job_state = F\n    Exit_status = 1",), "failed", "exit 1"),
    "deleted while it ran": (HISTORY, (KNOWN + "    job_state = F\n    Exit_status = 271",), "cancelled", ""),
    "deleted while it waited": (HISTORY, (KNOWN + "    job_state = F\n    queue = workq",), "cancelled", ""),
    "killed at its walltime": (HISTORY, (KNOWN + "    job_state = F\n    Exit_status = -29",), "failed", "over time"),
    "gone, history off": (UNKNOWN, NOTHING, "ended", "read its output"),
    "gone from the history": (UNKNOWN, UNKNOWN, "ended", "read its output"),
    "the server is silent": (SILENT, SILENT, "unknown", "does not answer"),
}  # fmt: skip


def pbs_job(monkeypatch, folder, flags="--steps 20 --repeats 1"):
    """A job of a PBS that is written down: OpenPBS 23.06's own sentences and statuses. No PBS runs in these tests."""
    answers(monkeypatch, folder, qsub='echo "$@" >&2; echo "args: $LESSON_ARGS" >&2; echo 123.head')
    monkeypatch.setenv("MANYHANDS_OUTPUTS", str(folder / "outputs"))
    return submit.submit("ddp_shakespeare", flags, via="pbs")


def qstat(monkeypatch, folder, live, past):
    answers(monkeypatch, folder, qstat=f'if [ "$1" = -x ]; then\n{recorded(*past)}\nfi\n{recorded(*live)}')


@pytest.mark.parametrize(
    ("live", "past", "state", "remark"), PBS_STATES.values(), ids=[name.replace(" ", "_") for name in PBS_STATES]
)
def test_a_cell_follows_a_job_of_pbs(in_the_course, monkeypatch, tmp_path, capsys, live, past, state, remark):
    job = pbs_job(monkeypatch, tmp_path)
    said = capsys.readouterr().out
    assert f"VENV={Path(sys.executable).parents[1]}" in said and "LESSON_ARGS=--steps 20 --repeats 1" in said
    assert job.number == "123" and job.output == in_the_course / "ddp_shakespeare.o123"
    qstat(monkeypatch, tmp_path, live, past)
    found = job.state()
    assert found[0] == state and remark in found[1]
    assert job.ended() == (state not in ("waiting", "running", "unknown"))


def test_a_silent_server_leaves_a_job_of_pbs_in_the_state_that_was_seen_last(in_the_course, monkeypatch, tmp_path):
    job = pbs_job(monkeypatch, tmp_path)
    qstat(monkeypatch, tmp_path, *PBS_STATES["runs, history off"][:2])
    assert job.state()[0] == "running"
    qstat(monkeypatch, tmp_path, SILENT, SILENT)
    assert job.state() == ("running", "the scheduler does not answer")


@pytest.mark.parametrize(("status", "state"), [("0", ("completed", "")), ("3", ("failed", "exit 3"))])
def test_of_a_forgotten_job_its_own_file_says_how_it_ended(in_the_course, monkeypatch, tmp_path, status, state):
    job = pbs_job(monkeypatch, tmp_path)
    qstat(monkeypatch, tmp_path, UNKNOWN, NOTHING)
    assert job.state()[0] == "ended"
    answers(monkeypatch, tmp_path, python=f'[ "$2" = manyhands.course.pairs ] || exit {status}')
    run_job(
        in_the_course, FILES[0], VENV="", PATH=os.environ["PATH"], PBS_JOBID="123.head",
        MANYHANDS_OUTPUTS=os.environ["MANYHANDS_OUTPUTS"],
    )  # fmt: skip
    assert job.state() == state


SLURMSTEPD = "slurmstepd: error: *** JOB 123 ON nid1 CANCELLED AT 2026-11-23T12:00:00"
OVER, CANCELLED = ("failed", "over time"), ("cancelled", "")
NOBODY_KNOWS = ("ended", "how, the scheduler has forgotten: read its output, job.tail(20)")
ENDS = {
    # what the job's output holds, the files of its own, the state of a job of which nobody knows any more
    "over its walltime": ("=>> PBS: job killed: walltime 620 exceeded limit 600\n", {"status": "143"}, OVER),
    "of memory": ("=>> PBS: job killed: mem 9gb exceeded 8gb\n", {}, ("failed", "mem 9gb exceeded 8gb")),
    "cancelled elsewhere": ("step 3\n", {"status": "143", "cancelled": ""}, CANCELLED),
    "cancelled, having saved": ("saved in outputs/train-123\n", {"status": "0", "cancelled": ""}, CANCELLED),
    "killed in the middle": ("step 3\n", {}, NOBODY_KNOWS),
    "Slurm's time is over": (f"{SLURMSTEPD} DUE TO TIME LIMIT ***\n", {}, OVER),
    "cancelled in Slurm": (f"{SLURMSTEPD} ***\n", {"status": "0"}, CANCELLED),
}


@pytest.mark.parametrize(("said", "files", "state"), ENDS.values(), ids=[name.replace(" ", "_") for name in ENDS])
def test_with_history_off_its_output_and_its_own_files_tell_how_a_job_ended(
    in_the_course, monkeypatch, tmp_path, said, files, state
):
    job = pbs_job(monkeypatch, tmp_path)
    qstat(monkeypatch, tmp_path, UNKNOWN, NOTHING)
    job.output = tmp_path / "output"
    job.output.write_text(said)
    (tmp_path / "outputs" / "jobs").mkdir(parents=True)
    for kind, text in files.items():
        (tmp_path / "outputs" / "jobs" / f"ddp_shakespeare.123.{kind}").write_text(text)
    assert job.state() == state


CANCELS = {
    # before, the status of qdel, what qstat says then, the state
    "it saved and ended with status 0": ("runs, history off", 0, "ended well", CANCELLED),
    "it had ended before": ("ended well", 1, "ended well", ("completed", "")),
    "the scheduler forgot it": ("gone, history off", 0, "gone, history off", CANCELLED),
}


@pytest.mark.parametrize("case", CANCELS)
def test_what_becomes_of_a_job_of_pbs_that_one_cancels(in_the_course, monkeypatch, tmp_path, case):
    before, status, after, state = CANCELS[case]
    job = pbs_job(monkeypatch, tmp_path)
    qstat(monkeypatch, tmp_path, *PBS_STATES[before][:2])
    answers(monkeypatch, tmp_path, qdel=f"exit {status}")
    job.cancel()
    qstat(monkeypatch, tmp_path, *PBS_STATES[after][:2])
    assert job.state() == state


SHARED = {
    "pbs": ("qsub", "qstat", "Job Id: 7.head\n    job_state = Q\nJob Id: 8.head\n    job_state = R", "-f 7 8"),
    "slurm": (
        "sbatch", "squeue", "7|PENDING|(Priority)\n8|RUNNING|nid1",
        "--me --noheader --format=%A|%T|%R --jobs=7,8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("via", SHARED)
def test_one_question_to_the_scheduler_is_for_all_live_jobs_of_a_notebook(in_the_course, monkeypatch, tmp_path, via):
    starter, lister, told, question = SHARED[via]
    jobs, asked = [], tmp_path / "asked"
    monkeypatch.setattr(submit, "time", FakeTime())
    for number in (7, 8):
        answers(monkeypatch, tmp_path, **{starter: f"echo {number}.head"})
        jobs.append(submit.submit("ddp_shakespeare", via=via))
    answers(monkeypatch, tmp_path, **{lister: f'echo "$@" >>{asked}\n{recorded(told)}'})
    assert [job.state()[0] for job in jobs] == ["waiting", "running"]
    assert asked.read_text() == f"{question}\n"
    assert jobs[1].state()[0] == "running" and asked.read_text().count(question) == 2  # and it asks anew


def test_flags_with_a_comma_reach_a_job_of_pbs(in_the_course, monkeypatch, tmp_path, capsys):
    """A comma ends a value of `qsub -v`: such a variable is only named there; qsub reads it from its environment."""
    pbs_job(monkeypatch, tmp_path, "--sizes 1,2")
    said = capsys.readouterr().out
    assert "$ LESSON_ARGS='--sizes 1,2' qsub -v " in said and ",LESSON_ARGS jobs/ddp_shakespeare.pbs" in said
    assert "args: --sizes 1,2" in said


def test_what_starts_the_ranks_of_a_site_is_passed_on_to_a_job_of_pbs(in_the_course, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("MPIEXEC", "/site/bin/mpiexec")
    monkeypatch.setenv("MPIEXEC_FLAGS", "--cpu-bind none")
    pbs_job(monkeypatch, tmp_path)
    assert "MPIEXEC=/site/bin/mpiexec,MPIEXEC_FLAGS=--cpu-bind none" in capsys.readouterr().out


GONE = ("", "slurm_load_jobs error: Invalid job id specified", 1)
SLURM_STATES = {
    # what `squeue` or else `scontrol show job` says, what `sacct` says, the state, what the remark holds
    "it waits": (("7|PENDING|(Resources)",), NOTHING, "waiting", "Resources"),
    "runs": (("7|RUNNING|nid[1-2]",), NOTHING, "running", "nid[1-2]"),
    "over time": (("JobId=7 JobState=TIMEOUT ExitCode=0:15",), NOTHING, "failed", "over time"),
    "gone, and accounted": (GONE, ("FAILED|3:0",), "failed", "FAILED, exit 3:0"),
    "gone, cancelled": (GONE, ("CANCELLED by 1000|0:0",), "cancelled", ""),
    "gone, no accounting": (GONE, ("", "Slurm accounting storage is disabled", 1), "ended", "read its output"),
    "slurmctld is silent": (
        ("", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)", 1),
        ("", "Slurm accounting storage is disabled", 1), "unknown", "does not answer",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("now", "past", "state", "remark"), SLURM_STATES.values(), ids=[name.replace(" ", "_") for name in SLURM_STATES]
)
def test_a_cell_follows_a_job_of_slurm(in_the_course, monkeypatch, tmp_path, now, past, state, remark):
    now = {"squeue" if "|" in now[0] else "scontrol": recorded(*now)}
    programs = {"sbatch": "echo Submitted batch job 7", "squeue": "", "sacct": recorded(*past)}
    answers(monkeypatch, tmp_path, **programs | now)
    monkeypatch.setenv("MANYHANDS_OUTPUTS", str(tmp_path / "outputs"))
    found = submit.submit("ddp_shakespeare", via="slurm").state()
    assert found[0] == state and remark in found[1]
