"""The job files: written for a site, checked, and run for real on this machine without a scheduler."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from course_copy import copy_course, only_the_start_of_lesson_03
from manyhands.course.lessons import find_lessons
from manyhands.jobs import directives, stamp, submit
from manyhands.launch import allocation

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
def test_the_files_that_a_site_reads_are_in_order_for_it_and_generic_brings_the_committed_ones_back(folder, root, site):
    committed = {path.name: path.read_text() for path in folder.iterdir()}
    written = stamp.stamp(site, account=account_of(site), folder=folder)
    schedulers = {suffix for suffix, name in directives.SCHEDULERS.items() if getattr(stamp.site_named(site), name)}
    assert {path.name for path in written} == {name for name in ALL_FILES if "." + name.split(".")[1] in schedulers}
    once = {path: path.read_text() for path in folder.iterdir()}
    assert {path.name for path, text in once.items() if text != committed[path.name]} <= {p.name for p in written}
    known = stamp.site_named(site)
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", known.checked) and known.sources
    assert all(source.startswith("https://") for source in known.sources)
    assert "ubmitted" in known.verified  # whether a job of ours ever ran there
    device = known.settings.get("MANYHANDS_DEVICE")
    assert device in ("cuda", "xpu") or site == "generic"  # or torch of the wrong kind would train on the CPUs
    for path in written:
        assert in_order(path, site) == []
        assert stamp.stamped_site(path.read_text()) == site
        if device and not path.name.startswith("sweep"):  # which runs train.*
            job = {".pbs": "PBS_JOBID", ".slurm": "SLURM_JOB_ID"}[path.suffix]
            assert f"MANYHANDS_DEVICE=${{MANYHANDS_DEVICE:-${{{job}:+{device}}}}} " in path.read_text()
            assert re.search("^export .*MANYHANDS_DEVICE", path.read_text(), re.MULTILINE)
        subprocess.run(["bash", "-n", path], check=True)
    stamp.stamp(site, account=account_of(site), folder=folder)
    assert {path: path.read_text() for path in folder.iterdir()} == once, "stamping twice changes nothing"
    stamp.stamp("generic", folder=folder)
    assert {path.name: path.read_text() for path in folder.iterdir()} == committed


MUST_HAVE = [
    ("polaris", FILES[0], {"account": "Hands", "queue": "debug-scaling", "walltime": "00:20:00", "nodes": 4},
     ["#PBS -A Hands", "#PBS -q debug-scaling", "#PBS -l select=4:system=polaris", "#PBS -l place=scatter",
      "#PBS -l filesystems=home:eagle", "#PBS -l walltime=00:20:00",
      "NPROC_PER_NODE=${NPROC_PER_NODE:-4} ", "${MPIEXEC_FLAGS:---cpu-bind none}", "NCCL_COLLNET_ENABLE=1 "]),
    ("perlmutter", FILES[1], {"account": "m1234_g", "queue": "regular", "reservation": "class"},
     ["#SBATCH --account=m1234_g", "#SBATCH --constraint=gpu", "#SBATCH --gpus-per-node=4", "#SBATCH --qos=regular",
      "#SBATCH --reservation=class",
      "export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3 GLOO_SOCKET_IFNAME=hsn0 FABRIC=Slingshot;"]),
    ("aurora", FILES[0], {"account": "Hands", "reservation": "R123456"},  # it is a queue there
     ["#PBS -q R123456\n", "STARTER=${STARTER:-mpiexec} ", "${MPIEXEC_FLAGS:---pmi=pmix --cpu-bind list:4-7:8-11:12",
      "FI_MR_CACHE_MONITOR=userfaultfd CCL_PROCESS_LAUNCHER=pmix CCL_ATL_TRANSPORT=mpi CCL_KVS_MODE=mpi;"]),
    ("kempner", FILES[1], {"account": "lab", "queue": "kempner_h100", "gpus": 4, "mem": "360G"},
     ["#SBATCH --account=lab", "#SBATCH --partition=kempner_h100", "#SBATCH --mem=360G", "#SBATCH --gpus-per-node=4",
      "#SBATCH --cpus-per-task=64"]),
    ("leonardo", FILES[1], {"account": "hands", "gpus": 2},
     ["#SBATCH --gres=gpu:2", "#SBATCH --cpus-per-task=16", "NPROC_PER_NODE=${NPROC_PER_NODE:-2}",
      "#SBATCH --partition=boost_usr_prod", "#SBATCH --qos=boost_qos_dbg"]),
    ("jean-zay", FILES[1], {"account": "abc@h100"},
     ["#SBATCH --account=abc@h100", "#SBATCH --constraint=h100", "#SBATCH --gres=gpu:4", "module load arch/h100;"]),
    ("lumi", FILES[1], {"account": "project_1"},
     ["#SBATCH --mem=480G", "module load lumi-aif-singularity-bindings && export ", "{ENGINE:-singularity} ",
      "IMAGE=${IMAGE:-${SLURM_JOB_ID:+/appl/local/laifs/containers/lumi-multitorch-", "130625.sif}} ",
      "IMAGE_FLAGS=${IMAGE_FLAGS:-} "]),
    ("frontier", FILES[1], {"account": "abc123", "queue": "debug"},
     ["#SBATCH --account=abc123", "#SBATCH --partition=batch", "#SBATCH --qos=debug", "#SBATCH --network=disable_rdzv",
      "NPROC_PER_NODE=${NPROC_PER_NODE:-8} ", "STARTER=${STARTER:-srun} ", "--gpus-per-task=1 --gpu-bind=closest}",
      "module load PrgEnv-gnu/8.7.0 cpe/26.03 rocm/7.1.1 rccl-net-plugin craype-accel-amd-gfx90a && ",
      "export LD_LIBRARY_PATH=$CRAY_LD_LIBRARY_PATH:$LD_LIBRARY_PATH "]),
    ("jureca", FILES[1], {"account": "training1"},
     ["#SBATCH --account=training1", "#SBATCH --partition=dc-gpu-devel", "#SBATCH --gres=gpu:4",
      "#SBATCH --cpus-per-task=128", "NPROC_PER_NODE=${NPROC_PER_NODE:-4} ", "export HOST_SUFFIX=i;"]),
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


def test_gpus_nodes_and_memory_are_asked_for_on_wish_and_stay_and_the_generic_site_alone_undoes_all(folder):
    committed = {path.name: path.read_text() for path in folder.iterdir()}
    pbs, slurm = (folder / name for name in FILES)
    wishes = {"account": "me", "queue": "big", "reservation": "R1", "walltime": "01:00:00"}
    stamp.stamp("generic", **wishes, nodes=3, mem="64G", gpus=4, folder=folder)
    assert "#PBS -l select=3:ncpus=16:mpiprocs=1:ngpus=4:mem=64gb" in pbs.read_text().splitlines()
    asked = {"#SBATCH --nodes=3", "#SBATCH --mem=64G", "#SBATCH --gpus-per-node=4", "#SBATCH --cpus-per-task=16"}
    assert asked < set(slurm.read_text().splitlines())
    stamp.stamp("generic", account="you", walltime="00:20:00", folder=folder)
    for path in (pbs, slurm):
        assert "NPROC_PER_NODE=${NPROC_PER_NODE:-4} " in path.read_text() and in_order(path, "generic") == []
        assert re.search("ngpus=4:mem=64gb|--gpus-per-node=4", path.read_text())
    stamp.stamp("generic", gpus=0, walltime="00:10:00", folder=folder)
    assert not re.search("ngpus|gpus-per-node|NPROC_PER_NODE:-4", pbs.read_text() + slurm.read_text())
    stamp.stamp("generic", folder=folder)
    assert {path.name: path.read_text() for path in folder.iterdir()} == committed


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


def test_stamping_again_keeps_what_the_user_wrote(folder):
    path = folder / FILES[0]
    stamp.stamp("polaris", account="Hands", folder=folder)
    text = path.read_text().replace("#PBS -j oe", "#PBS -j oe\n#PBS -M me@site.org")
    text = text.replace("#PBS -l walltime=", "#PBS -l software=lab,walltime=")
    text = text.replace("select=2:", "select=8:").replace("home:eagle", "home").replace(":-.venv}", ":-/my/env}")
    path.write_text(text.replace("VENV=${VENV-.venv}", "VENV=${VENV-/my/env}"))
    stamp.stamp("polaris", queue="debug-scaling", walltime="00:45:00", folder=folder)
    text = path.read_text()
    mine = "-M me@site.org", "-l software=lab\n", "select=8:system", "filesystems=home\n", "/my/env}", "-A Hands"
    assert [kept for kept in mine if kept not in text] == []
    assert "#PBS -q debug-scaling" in text and "#PBS -l walltime=00:45:00" in text


@pytest.mark.parametrize(
    ("wish", "sentence"),
    [
        ({"site": "summit"}, "no site 'summit': take SITE=aurora, frontier, generic, jean-zay, jureca, kempner"),
        ({"site": "polaris"}, "charges each job to a project: make jobs SITE=polaris ACCOUNT="),
        ({"site": "generic", "walltime": "10"}, "walltime '10' is not hours:minutes:seconds"),
        ({"site": "polaris", "account": "a", "walltime": "02:00:00"}, "at most 01:00:00, not 120 minutes"),
        ({"site": "polaris", "account": "a", "nodes": 4}, "queue debug of Polaris (ALCF) takes 1 to 2 nodes, not 4"),
        ({"site": "generic", "account": "a\nrm"}, "is not a name that a scheduler takes"),
        ({"site": "aurora", "account": "a", "queue": "prod", "nodes": 31}, "prod of Aurora (ALCF) takes 256 to 10624"),
    ],
)
def test_a_wrong_wish_is_refused_with_its_cure_and_nothing_is_written(folder, wish, sentence):
    before = {path: path.read_text() for path in folder.iterdir()}
    with pytest.raises(stamp.JobError, match=re.escape(sentence)):
        stamp.stamp(**wish, folder=folder)
    assert {path: path.read_text() for path in folder.iterdir()} == before


OURS = """\
title = "Ours"
checked = "2026-11-28"
sources = ["https://ours.example/guide"]
verified = "No job was submitted there by us."
needs = ["account"]
walltime = "00:10:00"

[pbs]
chunk = "ncpus=64:ngpus=2:mpiprocs=2:mem=480gb"
directives = ["-l place=scatter"]

[queues]
debug = { nodes = [1, 4], walltime = "01:00:00" }

[settings]
NPROC_PER_NODE = "2"
"""


@pytest.fixture
def ours(tmp_path, root, folder, monkeypatch):
    """write(old, new): our own site file, with a change, beside the job files and the generic one."""
    monkeypatch.chdir(tmp_path)
    (folder / "sites").mkdir()
    shutil.copy(root / "jobs/sites/generic.toml", folder / "sites")

    def write(old="", new=""):
        assert old in OURS
        (folder / "sites" / "ours.toml").write_text(OURS.replace(old, new, 1))
        return folder

    return write


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('["account"]', '["acount"]', """top: needs = ['acount'] must be a list of "account" and "queue\""""),
        ("NPROC_PER", 'modules = "gcc"\nNPROC_PER', "[settings]: modules is unknown there; use site_setup"),
        ("chunk", "chunks", "[pbs]: chunks is unknown there; use chunk"),
        ("chunk =", "#", "[pbs]: chunk is missing: text in quotes"),
        ("[1, 4]", "4", "queue debug: nodes = 4 must be the fewest and the most nodes, as [1, 4]"),
        ("walltime", "queu = 1\nwalltime", "top: queu is unknown there; use queue"),
        ("[settings]", "[setting]", "top: setting is unknown there; use [settings]"),
        ('NODE = "2"', "NODE = 2", "[settings]: NPROC_PER_NODE = 2 must be text in quotes"),
        ("title", "#", "top: title is missing"),
        ("walltime", 'STARTER = "srun"\nwalltime', "top: STARTER is unknown there; it belongs into [settings]"),
        ("[pbs]", "[PBS]", "top: PBS is unknown there; known are title, "),
        ('["-l place=scatter"]', '"-l place=scatter"', """[pbs]: directives = '-l place=scatter' must be a list of"""),
        ('"00:10:00"', '"10"', "top: walltime = '10' must be hours:minutes:seconds in quotes"),
        ("[queues]\ndebug =", "[queues]\nshort = 1\ndebug =", "queue short: it is a table, as short = { nodes"),
        ('title = "Ours"', "title =", "ours.toml is no site (Invalid value"),
    ],
)
def test_a_mistake_in_a_site_file_is_a_sentence_with_the_key_and_the_cure(ours, old, new, sentence):
    ours(old, new)
    with pytest.raises(stamp.JobError, match=re.escape(sentence)):
        stamp.sites()


def test_the_page_on_a_site_of_ones_own_has_each_key_that_a_file_may_have(root):
    rows = [line for line in (root / "assets/site/new_site.md").read_text().splitlines() if line.startswith("| ")]
    named = set(re.findall(r"`([\w.]+)`", "\n".join(rows)))
    assert [key for keys in stamp.KEYS.values() for key in keys if key not in named] == []


@pytest.mark.parametrize(("option", "line"), [("-P", "-P Hands"), ("-W group_list", "-W group_list=Hands")])
def test_pbs_charges_the_account_by_the_option_of_the_site(ours, option, line):
    folder = ours("chunk", f'account_option = "{option}"\nchunk')
    path = folder / FILES[0]
    path.write_text(path.read_text().replace("#PBS -j oe", "#PBS -j oe\n#PBS -W umask=022,stagein=a@b:c,d@e:f"))
    with pytest.raises(stamp.JobError, match="charges each job to a project: make jobs SITE=ours ACCOUNT="):
        stamp.stamp("ours", folder=folder)
    for _ in range(2):
        stamp.stamp("ours", account="Hands", folder=folder)
    lines = path.read_text().splitlines()
    assert [said for said in lines if "Hands" in said] == [f"#PBS {line}"] and in_order(path, "ours") == []
    assert [value for value in lines if value.startswith("#PBS -W umask")]
    ours()  # its file is corrected: the account moves to the other option, and nothing of the first one stays
    stamp.stamp("ours", folder=folder)
    assert [said for said in path.read_text().splitlines() if "Hands" in said] == ["#PBS -A Hands"]
    stamp.stamp("ours", account="Other", folder=folder)
    assert "#PBS -A Other" in path.read_text() and "Hands" not in path.read_text()


def test_a_sites_image_and_its_starter_stand_in_every_job_file_and_are_for_its_jobs_alone(ours, course, tmp_path):
    assert set(stamp.ENGINES) == set(allocation.ENGINES)
    own = 'IMAGE = "/sw/course.sif"\nIMAGE_FLAGS = "--nv"\nENGINE = "singularity"\nSTARTER = "mpiexec"\n'
    folder = ours("NPROC_PER", own + "NPROC_PER")
    files = stamp.stamp("ours", account="Hands", folder=folder)
    python = program(tmp_path / "bin" / "python", '[ "$2" = manyhands.course.pairs ] || echo "$IMAGE $ENGINE $*"')
    environ = {"VENV": "", "PATH": f"{python.parent}:{os.environ['PATH']}", "MANYHANDS_OUTPUTS": str(tmp_path)}
    for path in (path for path in files if not path.name.startswith("sweep")):  # it runs train's file
        job = {".pbs": "PBS_JOBID", ".slurm": "SLURM_JOB_ID"}[path.suffix]
        assert f"IMAGE=${{IMAGE:-${{{job}:+/sw/course.sif}}}} " in path.read_text()
        inside, outside = (run_job(course, path, **environ, **more).stdout for more in ({job: "7"}, {}))
        assert "/sw/course.sif singularity scripts/" in inside and "\n singularity scripts/" in "\n" + outside
        if not path.name.startswith("preflight"):
            assert "--starter mpiexec" in inside and "--starter torchrun" in outside
    ours("NPROC_PER", 'ENGINE = "docker"\nNPROC_PER')
    with pytest.raises(stamp.JobError, match='ENGINE = .docker. must be "apptainer" or "singularity" or'):
        stamp.stamp("ours", account="Hands", folder=folder)


def test_gpus_change_every_line_that_follows_from_them_and_what_somebody_wrote_stays(ours, capsys):
    folder = ours("[pbs]", "cores_per_gpu = 32\n\n[pbs]")
    path = folder / FILES[0]
    for gpus, line in ((1, "ncpus=32:ngpus=1:mpiprocs=1:mem=240gb"), (2, "ncpus=64:ngpus=2:mpiprocs=2:mem=480gb")):
        stamp.stamp("ours", account="a", gpus=gpus, folder=folder)
        assert f"select=2:{line}\n" in path.read_text() and f"NPROC_PER_NODE:-{gpus}}}" in path.read_text()
    stamp.stamp("ours", gpus=1, mem="100G", folder=folder)
    stamp.stamp("ours", gpus=2, folder=folder)
    assert "select=2:ncpus=64:ngpus=2:mpiprocs=2:mem=100gb\n" in path.read_text()
    assert stamp.main(["check"]) == 0
    path.write_text(path.read_text().replace("ngpus=2", "ngpus=1"))
    capsys.readouterr()
    assert stamp.main(["check"]) == 2
    said = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(FILES[0]))
    for wrong in (
        "NPROC_PER_NODE is 2, and a node of the job has 1 GPUs",
        "ncpus=64 is for 2 GPUs",
        "mpiprocs=2 is for",
    ):
        assert f"{wrong}" in said
    assert "make jobs SITE=ours GPUS=1" in said and "mem=" not in said


def test_gpus_leave_the_cores_of_whole_nodes_and_say_so(ours, capsys):
    ours()
    stamp.main(["stamp", "--site", "ours", "--account", "a", "--gpus", "1"])
    assert (
        "but ncpus=64 is for 2 GPUs, and the job asks for 1 per node: write your own number, or cores_per_gpu"
        in capsys.readouterr().out
    )
    assert "ncpus=64:ngpus=1:mpiprocs=1:mem=240gb" in Path("jobs", FILES[0]).read_text()


def test_nodes_are_those_of_each_job_but_not_of_a_row_of_the_sweep(ours, capsys):
    folder = ours()
    stamp.main(["stamp", "--site", "ours", "--account", "a", "--nodes", "4"])
    assert "select=4:" in (folder / FILES[0]).read_text() and "select=1:" in (folder / "sweep.pbs").read_text()
    assert capsys.readouterr().out.count("but NODES=4 leaves a row of its table on 1: change that line by hand") == 1


WRONG = [
    # file, what is put in, for what, site, the sentence
    (0, "#PBS -l place=scatter\n", "", "generic", "no -l place=scatter"),
    (0, "#PBS -j oe", "#PBS -l select=1", "generic", "2 lines with -l select=: PBS wants exactly one"),
    (0, "#PBS -l select=2:ncpus=2:mpiprocs=1\n", "", "generic", "0 lines with -l select="),
    (0, "#PBS -j oe", "#PBS -j oe\nset -e\n#PBS -q debug", "generic", "stands below the first command"),
    (0, "#PBS -A Hands\n", "", "polaris", "charges each job to a project: make jobs SITE=polaris ACCOUNT="),
    (0, "#PBS -l filesystems=home:eagle\n", "", "polaris", "no -l filesystems=: mandatory on Polaris"),
    (0, "home:eagle", "home:flare", "polaris", "Polaris (ALCF) has no file system 'flare'"),
    (1, "#SBATCH --nodes=2", "# SBATCH --nodes=2", "generic", "'# SBATCH' is a comment, which Slurm ignores"),
    (1, "#SBATCH --nodes=2", "#SBATCH --nodes=2\n#SBATCH -N 4", "generic", "--nodes stands there twice"),
    (1, "#SBATCH --constraint=gpu\n", "", "perlmutter", "needs --constraint"),
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


def test_a_slurm_job_with_gpus_has_a_rank_for_each(course, tmp_path):
    says_its_words = program(tmp_path / "python", '[ "$2" = manyhands.course.pairs ] || echo "$@"')
    environ = {"VENV": "", "PATH": f"{says_its_words.parent}:{os.environ['PATH']}", "NPROC_PER_NODE": ""}
    assert "--nproc 3 " in run_job(course, FILES[1], SLURM_GPUS_ON_NODE="3", **environ).stdout
    assert "--nproc 2 " in run_job(course, FILES[1], **environ).stdout


@pytest.mark.parametrize(
    ("name", "site", "job"),
    [(FILES[0], "aurora", "PBS_JOBID"), (FILES[1], "jean-zay", "SLURM_JOB_ID"), (FILES[1], "lumi", "SLURM_JOB_ID")],
)
def test_a_sites_modules_and_device_are_for_its_jobs_alone(course, folder, tmp_path, name, site, job):
    stamp.stamp(site, account="Hands", folder=folder)
    python = program(
        tmp_path / "bin" / "python", '[ "$2" = manyhands.course.pairs ] || echo "on $MANYHANDS_DEVICE$IMAGE"'
    )
    environ = {"VENV": "", "PATH": f"{python.parent}:{os.environ['PATH']}", "BASH_FUNC_module%%": "() { echo module; }"}
    assert run_job(course, folder / name, **environ, MANYHANDS_DEVICE="").stdout == "on \n"
    assert run_job(course, folder / name, **environ, MANYHANDS_DEVICE="cpu").stdout == "on cpu\n"
    known = stamp.site_named(site).settings
    said = run_job(course, folder / name, **environ, MANYHANDS_DEVICE="", **{job: "7"}).stdout
    modules = "module\n" * known["site_setup"].count("module ")
    assert modules and said == f"{modules}on {known['MANYHANDS_DEVICE']}{known.get('IMAGE', '')}\n"


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


@pytest.mark.parametrize("name", FILES)
def test_a_job_outside_the_course_or_without_its_environment_or_with_yesterdays_code_stops(course, name, tmp_path):
    done = run_job(course, name, cwd=tmp_path)
    assert done.returncode == 2
    assert "is not the course's folder" in done.stderr and done.stderr.count("\n") == 1
    done = run_job(course, name, VENV="/nowhere")  # and takes no other Python
    assert done.returncode == 1 and "no environment in /nowhere: make kernel" in done.stderr
    assert ("qsub -v VENV=/path" if name.endswith(".pbs") else "VENV=/path sbatch") in done.stderr
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


def test_a_job_file_that_is_stamped_for_a_cluster_runs_on_a_laptop(in_the_course, folder, monkeypatch):
    stamp.stamp("aurora", account="Hands", folder=folder)
    monkeypatch.delenv("NPROC_PER_NODE")
    path = in_the_course / "jobs" / FILES[0]
    before = path.read_text()
    path.write_text((folder / FILES[0]).read_text())
    try:
        job = submit.submit("ddp_shakespeare", " ".join(short_flags()), via="bash")
        assert job.watch(200) == "completed", job.output.read_text()
        assert job.metrics("03_data_parallel")["world_size"] == 2
    finally:
        path.write_text(before)


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


def test_a_job_of_pbs_that_is_asked_to_end_leaves_its_status_and_a_mark_of_it(course, tmp_path):
    waits = 'trap "exit 143" TERM; echo hears; for i in {1..2000}; do sleep 0.1; done'
    python = program(tmp_path / "bin" / "python", f'[ "$2" = manyhands.course.pairs ] || {{ {waits}; }}')
    environ = {"VENV": "", "PATH": f"{python.parent}:{os.environ['PATH']}", "MANYHANDS_OUTPUTS": str(tmp_path)}
    run = subprocess.Popen(
        ["bash", course / "jobs" / FILES[0]], cwd=course, env=os.environ | environ | {"PBS_JOBID": "5.head"},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert run.stdout.readline() == "hears\n"
    run.terminate()
    assert run.wait(100) == 143
    assert (tmp_path / "jobs" / "ddp_shakespeare.5.status").read_text() == "143\n"
    assert (tmp_path / "jobs" / "ddp_shakespeare.5.cancelled").exists()


def test_a_failed_job_says_so(in_the_course, capsys):
    job = submit.submit("ddp_shakespeare", "--no-such-flag 1", via="bash")
    assert job.watch(200) == "failed"
    job.grep("no-such-flag")
    job.grep("____")  # as the lesson gives it
    said = capsys.readouterr().out
    assert "--no-such-flag is unknown" in said
    assert said.endswith("your turn: a word in place of ____\n")


def test_where_the_scheduler_refuses_a_job_its_own_words_and_the_cure_are_shown(in_the_course, monkeypatch, tmp_path):
    limited = "this queue limits the number of your jobs, waiting ones too"
    for via, sentence, cure in (
        ("slurm", "sbatch: error: Invalid account", "make jobs SITE="),
        ("slurm", "sbatch: error: QOSMaxSubmitJobPerUserLimit", limited),
        ("pbs", "qsub: would exceed queue debug's per-user limit", limited),
    ):
        answers(monkeypatch, tmp_path, **{sentence.split(":")[0]: f"echo {shlex.quote(sentence)} >&2; exit 1"})
        with pytest.raises(submit.SubmitError, match=cure) as refused:
            submit.submit("ddp_shakespeare", via=via)
        # with a limit an account or a queue would be the wrong place to look
        assert sentence in str(refused.value) and ("ACCOUNT" in str(refused.value)) == (cure != limited)


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
    "runs, history off": ((KNOWN + "    job_state = R\n    exec_host = x1/0+x2/0",), NOTHING, "running", "x1/0+x2/0"),
    "ended well": (HISTORY, (KNOWN + "    job_state = F\n    Exit_status = 0",), "completed", ""),
    "failed": (HISTORY, (KNOWN + "    job_state = F\n    Exit_status = 1",), "failed", "exit 1"),
    "deleted while it ran": (HISTORY, (KNOWN + "    job_state = F\n    Exit_status = 271",), "cancelled", ""),
    "killed at its walltime": (HISTORY, (KNOWN + "    job_state = F\n    Exit_status = -29",), "failed", "over time"),
    "gone, history off": (UNKNOWN, NOTHING, "ended", "read its output"),
    "the server is silent": (SILENT, SILENT, "unknown", "does not answer"),
}  # fmt: skip


@pytest.fixture
def pbs(in_the_course, monkeypatch, tmp_path):
    """A PBS that is written down: OpenPBS 23.06's own sentences and statuses. No PBS runs in these tests."""
    return Pbs(monkeypatch, tmp_path)


class Pbs:
    def __init__(self, monkeypatch, folder):
        self.answers = partial(answers, monkeypatch, folder)

    def job(self, flags="--steps 20 --repeats 1"):
        self.answers(qsub='echo "$@" >&2; echo "args: $LESSON_ARGS" >&2; echo 123.head')
        return submit.submit("ddp_shakespeare", flags, via="pbs")

    def says(self, live, past):
        self.answers(qstat=f'if [ "$1" = -x ]; then\n{recorded(*past)}\nfi\n{recorded(*live)}')


@pytest.mark.parametrize("case", PBS_STATES)
def test_a_cell_follows_a_job_of_pbs(in_the_course, pbs, capsys, case):
    live, past, state, remark = PBS_STATES[case]
    job, said = pbs.job(), capsys.readouterr().out
    assert f"VENV={Path(sys.executable).parents[1]}" in said and "LESSON_ARGS=--steps 20 --repeats 1" in said
    assert job.number == "123" and job.output == in_the_course / "ddp_shakespeare.o123"
    pbs.says(live, past)
    found = job.state()
    assert found[0] == state and remark in found[1]
    assert job.ended() == (state not in ("waiting", "running", "unknown"))


SLURMSTEPD = "slurmstepd: error: *** JOB 123 ON nid1 CANCELLED AT 2026-11-23T12:00:00"
OVER, CANCELLED = ("failed", "over time"), ("cancelled", "")
NOBODY_KNOWS = ("ended", "how, the scheduler has forgotten: read its output, job.tail(20)")
ENDS = {
    # what the job's output holds, the files of its own, the state of a job of which nobody knows any more
    "well": ("done\n", {"status": "0"}, ("completed", "")),
    "failed": ("step 3\n", {"status": "3"}, ("failed", "exit 3")),
    "over its walltime": ("=>> PBS: job killed: walltime 620 exceeded limit 600\n", {"status": "143"}, OVER),
    "of memory": ("=>> PBS: job killed: mem 9gb exceeded 8gb\n", {}, ("failed", "mem 9gb exceeded 8gb")),
    "killed in the middle": ("step 3\n", {}, NOBODY_KNOWS),
    "Slurm's time is over": (f"{SLURMSTEPD} DUE TO TIME LIMIT ***\n", {}, OVER),
    "cancelled in Slurm": (f"{SLURMSTEPD} ***\n", {"status": "0"}, CANCELLED),
}


@pytest.mark.parametrize("case", ENDS)
def test_with_history_off_its_output_and_its_own_files_tell_how_a_job_ended(pbs, tmp_path, case):
    said, files, state = ENDS[case]
    job = pbs.job()
    pbs.says(UNKNOWN, NOTHING)
    job.output = tmp_path / "output"
    job.output.write_text(said)
    (tmp_path / "outputs" / "jobs").mkdir(parents=True)
    for kind, text in files.items():
        (tmp_path / "outputs" / "jobs" / f"ddp_shakespeare.123.{kind}").write_text(text)
    assert job.state() == state


def test_flags_with_a_comma_and_what_starts_the_ranks_of_a_site_reach_a_job_of_pbs(pbs, monkeypatch, capsys):
    """A comma ends a value of `qsub -v`: such a variable is only named there; qsub reads it from its environment."""
    monkeypatch.setenv("MPIEXEC", "/site/bin/mpiexec")
    monkeypatch.setenv("MPIEXEC_FLAGS", "--cpu-bind none")
    pbs.job("--sizes 1,2")
    said = capsys.readouterr().out
    assert "$ LESSON_ARGS='--sizes 1,2' qsub -v " in said and ",LESSON_ARGS" in said and "args: --sizes 1,2" in said
    assert "MPIEXEC=/site/bin/mpiexec,MPIEXEC_FLAGS=--cpu-bind none" in said


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


@pytest.mark.parametrize("case", SLURM_STATES)
def test_a_cell_follows_a_job_of_slurm(in_the_course, monkeypatch, tmp_path, case):
    now, past, state, remark = SLURM_STATES[case]
    programs = {"sbatch": "echo Submitted batch job 7", "squeue": "", "sacct": recorded(*past)}
    programs["squeue" if "|" in now[0] else "scontrol"] = recorded(*now)
    answers(monkeypatch, tmp_path, **programs)
    found = submit.submit("ddp_shakespeare", via="slurm").state()
    assert found[0] == state and remark in found[1]


def test_job_files_have_the_line_ends_of_linux_in_a_clone_that_git_for_windows_made(root, tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for name in (".gitattributes", "jobs", "Makefile"):
        copy = shutil.copytree if (root / name).is_dir() else shutil.copy
        copy(root / name, theirs / name)
    who = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "x"]):
        subprocess.run(["git", *words], cwd=theirs, check=True, capture_output=True)
    clone = tmp_path / "clone"
    subprocess.run(["git", "-c", "core.autocrlf=true", "clone", "-q", theirs, clone], check=True)
    files = [clone / "Makefile", *clone.glob("jobs/*.slurm"), *clone.glob("jobs/*.pbs")]
    assert len(files) > 9 and [path.name for path in files if b"\r" in path.read_bytes()] == []
    for path in files[1:]:
        subprocess.run(["bash", "-n", path], check=True)
