"""The job files: written for a site, checked, and run for real on this machine without a scheduler."""

import json
import os
import re
import shutil
import subprocess
import sys
import time

import psutil
import pytest
from course_copy import copy_course
from manyhands.course.lessons import find_lessons
from manyhands.jobs import directives, sites, stamp, submit

SITES = sorted(sites.sites())
FILES = ["ddp_shakespeare.pbs", "ddp_shakespeare.slurm"]


@pytest.fixture
def folder(tmp_path, root):
    """A copy of the job files that a test may write."""
    copy = tmp_path / "jobs"
    copy.mkdir()
    for name in FILES:
        shutil.copy(root / "jobs" / name, copy)
    return copy


def account_of(site):
    return "Hands" if "account" in sites.site_named(site).needs else None


def in_order(path, site):
    scheduler = directives.SCHEDULERS[path.suffix]
    return list(directives.complaints(path.read_text(), scheduler, sites.site_named(site)))


def test_sites_that_the_course_promises_are_there():
    assert {"polaris", "aurora", "perlmutter", "frontier", "generic"} <= set(SITES)


@pytest.mark.parametrize("site", SITES)
def test_each_site_says_when_and_where_it_was_read_and_what_was_not_verified(site):
    known = sites.site_named(site)
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", known.checked)
    assert all(source.startswith("https://") for source in known.sources) and known.sources
    assert "ubmitted" in known.verified  # whether a job of ours ever ran there


@pytest.mark.parametrize("name", FILES)
def test_job_files_as_committed_suit_a_generic_site(root, name):
    path = root / "jobs" / name
    assert stamp.stamped_site(path.read_text()) == "generic"
    assert in_order(path, "generic") == []


@pytest.mark.parametrize("site", SITES)
def test_stamped_files_are_in_order_for_their_site(folder, site):
    written = stamp.stamp(site, account=account_of(site), folder=folder)
    assert written
    for path in written:
        assert in_order(path, site) == []
        assert stamp.stamped_site(path.read_text()) == site
        subprocess.run(["bash", "-n", path], check=True)


@pytest.mark.parametrize("site", SITES)
def test_stamping_twice_changes_nothing_and_generic_brings_the_committed_file_back(folder, root, site):
    written = stamp.stamp(site, account=account_of(site), folder=folder)
    once = {path: path.read_text() for path in written}
    stamp.stamp(site, account=account_of(site), folder=folder)
    assert {path: path.read_text() for path in written} == once
    stamp.stamp("generic", folder=folder)
    for path in written:
        assert path.read_text() == (root / "jobs" / path.name).read_text()


def test_only_the_file_that_the_site_reads_is_written(folder, root):
    assert [path.name for path in stamp.stamp("polaris", account="Hands", folder=folder)] == [FILES[0]]
    assert (folder / FILES[1]).read_text() == (root / "jobs" / FILES[1]).read_text()


def test_what_polaris_must_have_stands_in_its_file(folder):
    stamp.stamp(
        "polaris", account="Hands", queue="debug-scaling", walltime="00:20:00", nodes=4, folder=folder
    )
    text = (folder / FILES[0]).read_text()
    for line in (
        "#PBS -A Hands", "#PBS -q debug-scaling", "#PBS -l select=4:system=polaris", "#PBS -l place=scatter",
        "#PBS -l filesystems=home:eagle", "#PBS -l walltime=00:20:00",
    ):  # fmt: skip
        assert line in text.splitlines()
    assert "NPROC_PER_NODE=${NPROC_PER_NODE:-4} " in text and "${MPIEXEC_FLAGS:---cpu-bind none}" in text


def test_what_perlmutter_must_have_stands_in_its_file(folder):
    stamp.stamp("perlmutter", account="m1234_g", queue="regular", reservation="class", folder=folder)
    lines = (folder / FILES[1]).read_text().splitlines()
    for line in (
        "--account=m1234_g", "--constraint=gpu", "--gpus-per-node=4", "--qos=regular", "--reservation=class",
    ):  # fmt: skip
        assert f"#SBATCH {line}" in lines


def test_a_reservation_is_a_queue_under_pbs(folder):
    stamp.stamp("aurora", account="Hands", reservation="R123456", folder=folder)
    assert "#PBS -q R123456" in (folder / FILES[0]).read_text().splitlines()


def test_stamping_again_keeps_what_the_user_wrote(folder):
    path = folder / FILES[0]
    stamp.stamp("polaris", account="Hands", folder=folder)
    text = path.read_text().replace("#PBS -j oe", "#PBS -j oe\n#PBS -M me@site.org")
    text = (
        text.replace("select=2:", "select=8:").replace("home:eagle", "home").replace(":-.venv}", ":-/my/env}")
    )
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
        ({"site": "summit"}, "no site 'summit': take SITE=aurora, frontier, generic, perlmutter, polaris"),
        (
            {"site": "polaris"},
            "charges each job to a project, and none was named: make jobs SITE=polaris ACCOUNT=",
        ),
        ({"site": "generic", "walltime": "10"}, "walltime '10' is not hours:minutes:seconds"),
        ({"site": "generic", "walltime": "00:00:00"}, "above zero"),
        ({"site": "generic", "walltime": "1:99:00"}, "write ten minutes as 00:10:00"),
        ({"site": "polaris", "account": "a", "walltime": "02:00:00"}, "at most 01:00:00, not 120 minutes"),
        (
            {"site": "polaris", "account": "a", "nodes": 4},
            "queue debug of Polaris (ALCF) takes 1 to 2 nodes, not 4",
        ),
        ({"site": "generic", "account": "a\nrm"}, "is not a name that a scheduler takes"),
        ({"site": "generic", "queue": "x; rm -rf"}, "QUEUE='x; rm -rf' is not a name"),
        ({"site": "generic", "nodes": 0}, "NODES=0"),
    ],
)
def test_a_wrong_wish_is_refused_with_its_cure_and_nothing_is_written(folder, wish, sentence):
    before = {path: path.read_text() for path in folder.iterdir()}
    with pytest.raises(sites.JobError, match=re.escape(sentence)):
        stamp.stamp(**wish, folder=folder)
    assert {path: path.read_text() for path in folder.iterdir()} == before


def test_command_line_says_the_error_once_and_ends_with_status_2(capsys):
    assert stamp.main(["stamp", "--site", "summit", "--account", ""]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: no site 'summit'") and error.count("\n") == 1


WRONG = [
    # file, what is put in, for what, site, the sentence
    (0, "#PBS -l place=scatter\n", "", "generic", "no -l place=scatter"),
    (0, "#PBS -l place=scatter", "#PBS -l place=pack", "generic", "no -l place=scatter"),
    (0, "#PBS -j oe", "#PBS -l ncpus=4", "generic", "-l ncpus= beside -l select= is refused by PBS"),
    (0, "#PBS -j oe", "#PBS -l select=1", "generic", "2 lines with -l select=: PBS wants exactly one"),
    (0, "#PBS -l select=2:ncpus=2:mpiprocs=1\n", "", "generic", "0 lines with -l select="),
    (0, ":mpiprocs=1", ":mpiprocs=1:gpus=4", "generic", "has no chunk resource 'gpus'"),
    (0, "#PBS -j oe", "#PBS -l filesystems=home", "generic", "knows no resource 'filesystems'"),
    (0, "#PBS -j oe", "# PBS -j oe", "generic", "'# PBS' is a comment, which PBS ignores: write '#PBS'"),
    (0, "#PBS -l walltime=00:10:00\n", "", "generic", "no walltime"),
    (0, "#PBS -j oe", "#PBS -j oe\nset -e\n#PBS -q debug", "generic", "stands below the first command"),
    (0, "#PBS -A Hands\n", "", "polaris", "ACCOUNT is missing"),
    (0, "#PBS -l filesystems=home:eagle\n", "", "polaris", "no -l filesystems=: mandatory on Polaris"),
    (0, "home:eagle", "home:flare", "polaris", "Polaris (ALCF) has no file system 'flare'"),
    (0, "home:flare", "home:eagle", "aurora", "Aurora (ALCF) has no file system 'eagle'"),
    (0, "select=2:", "select=3:", "polaris", "takes 1 to 2 nodes, not 3"),
    (1, "#SBATCH --nodes=2", "# SBATCH --nodes=2", "generic", "'# SBATCH' is a comment, which Slurm ignores"),
    (1, "#SBATCH --nodes=2\n", "", "generic", "no --nodes"),
    (1, "#SBATCH --nodes=2", "#SBATCH --nodes=2\n#SBATCH -N 4", "generic", "--nodes stands there twice"),
    (1, "--time=00:10:00", "--time=10", "generic", "walltime '10' is not"),
    (1, "--cpus-per-task=2", "--cpu-per-task=2", "generic", "option --cpu-per-task is unknown"),
    (1, "#SBATCH --constraint=gpu\n", "", "perlmutter", "needs --constraint"),
    (1, "#SBATCH --gpus-per-node=4\n", "", "perlmutter", "needs --gpus-per-node"),
    (1, "#SBATCH --partition=batch\n", "", "frontier", "needs --partition"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("file", "old", "new", "site", "sentence"), WRONG, ids=[wrong[-1] for wrong in WRONG]
)
def test_a_wrong_directive_is_rejected_with_the_right_sentence(folder, file, old, new, site, sentence):
    stamp.stamp(site, account=account_of(site), folder=folder)
    path = folder / FILES[file]
    assert in_order(path, site) == []
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    assert any(sentence in complaint for complaint in in_order(path, site)), in_order(path, site)


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    return copy_course(tmp_path_factory.mktemp("course") / "many-hands")


def short_flags():
    lesson = find_lessons(only=["03"])[0]
    return [
        part for name, value in lesson.short.items() for part in (f"--{name.replace('_', '-')}", str(value))
    ]


def run_job(course, name, *arguments, cwd=None, **environ):
    """bash jobs/<name>, as on a laptop: no scheduler's variables, this Python's environment."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PBS_"))}
    clean |= {"VENV": sys.prefix, "NPROC_PER_NODE": "2", **environ}
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


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("per_node", "flags", "batch"),
    [
        ("4", [], ["--global-batch", "12"]),
        ("8", [], ["--global-batch", "16"]),  # two nodes of Perlmutter; one of Frontier
        ("12", ["--steps", "9"], ["--steps", "9", "--global-batch", "12"]),
        ("24", [], ["--global-batch", "24"]),
        ("8", ["--global-batch", "40"], ["--global-batch", "40"]),
        ("8", ["--global_batch=40"], ["--global_batch=40"]),
    ],
)
def test_a_batch_that_nobody_names_splits_over_the_ranks(course, tmp_path, name, per_node, flags, batch):
    python = tmp_path / "python"  # says what it was started with
    python.write_text('#!/bin/sh\n[ "$2" = manyhands.course.pairs ] || echo "$@"\n')
    python.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = run_job(course, name, *flags, VENV="", PATH=path, NPROC_PER_NODE=per_node)
    assert done.stdout.split()[-len(batch) - 1 :] == ["scripts/03_data_parallel.py", *batch], done.stderr


@pytest.mark.parametrize("name", FILES)
def test_outside_the_course_a_job_says_where_to_submit_it_from(course, name, tmp_path):
    done = run_job(course, name, cwd=tmp_path)
    assert done.returncode == 2
    assert "is not the course's folder" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", FILES)
def test_without_its_environment_a_job_stops_instead_of_using_another_python(course, name):
    done = run_job(course, name, VENV="/nowhere")
    assert done.returncode == 1
    assert "no environment in /nowhere: make kernel" in done.stderr


def test_a_failing_lesson_fails_the_job(course):
    done = run_job(course, FILES[1], "--no-such-flag", "1", NPROC_PER_NODE="1")
    assert done.returncode != 0
    assert "--no-such-flag is unknown" in done.stderr


@pytest.mark.parametrize("name", FILES)
def test_a_job_refuses_to_run_yesterdays_code(course, name):
    notebook = course / "notebooks" / "03_data_parallel.ipynb"
    saved = notebook.read_text()
    notebook.write_text(saved.replace("steps = 300", "steps = 7"))
    try:
        done = run_job(course, name)
    finally:
        notebook.write_text(saved)
    assert done.returncode == 2 and done.stdout == ""
    assert "03_data_parallel" in done.stderr and "make sync" in done.stderr


@pytest.fixture
def in_the_course(course, tmp_path, monkeypatch):
    """A notebook's process: it lies in the course's notebooks/ and sees no scheduler."""
    monkeypatch.chdir(course / "notebooks")
    monkeypatch.setenv("VENV", sys.prefix)
    monkeypatch.setenv("NPROC_PER_NODE", "1")
    return course


def test_a_cell_submits_watches_and_reads_the_pbs_file_without_a_scheduler(
    in_the_course, monkeypatch, capsys
):
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    job = submit.submit("ddp_shakespeare", " ".join(short_flags()), via="bash")
    assert job.watch(200) == "completed"
    job.grep("validation loss")
    said = capsys.readouterr().out
    assert said.startswith("$ bash jobs/ddp_shakespeare.pbs --steps")
    assert "running: this machine" in said and "step   0: validation loss" in said
    assert job.metrics("03_data_parallel")["world_size"] == 2
    assert job.metrics("02_collectives") is None


def test_what_was_saved_in_the_notebook_is_in_the_script_before_the_job_starts(
    in_the_course, monkeypatch, capsys
):
    notebook, script = (
        in_the_course / "notebooks" / "03_data_parallel.ipynb",
        in_the_course / "scripts" / "03_data_parallel.py",
    )
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


def test_a_failed_job_says_so(in_the_course, capsys):
    job = submit.submit("ddp_shakespeare", "--no-such-flag 1", via="bash")
    assert job.watch(200) == "failed"
    job.grep("no-such-flag")
    assert "--no-such-flag is unknown" in capsys.readouterr().out


def test_where_the_scheduler_refuses_a_job_its_own_words_and_the_cure_are_shown(
    in_the_course, monkeypatch, tmp_path
):
    fake = tmp_path / "bin" / "sbatch"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho 'sbatch: error: Invalid account' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    with pytest.raises(submit.SubmitError, match=r"Invalid account\n.*make jobs SITE="):
        submit.submit("ddp_shakespeare", via="slurm")


PBS_STATES = [
    (
        "    job_state = Q\n    comment = Not Running: Insufficient amount of resource",
        "waiting",
        "Insufficient",
    ),
    ("    job_state = H\n    comment = Job held by ada", "waiting", "held"),
    ("    job_state = R\n    exec_host = x1/0+x2/0", "running", "x1/0+x2/0"),
    ("    job_state = F\n    Exit_status = 0", "completed", ""),
    ("    job_state = F\n    Exit_status = 1", "failed", "exit 1"),
    ("    job_state = F\n    Exit_status = 271", "cancelled", ""),
]


@pytest.mark.parametrize(
    ("answer", "state", "remark"), PBS_STATES, ids=[f"{state}" for _, state, _ in PBS_STATES]
)
def test_a_cell_follows_a_job_of_pbs(in_the_course, monkeypatch, tmp_path, capsys, answer, state, remark):
    """qsub and qstat as PBS Pro answers, written down: no PBS runs in these tests."""
    (tmp_path / "bin").mkdir()
    for name, lines in {
        "qsub": 'echo "$@" >&2\necho 123.server',
        "qstat": f"echo 'Job Id: 123.server\n{answer}'",
    }.items():
        fake = tmp_path / "bin" / name
        fake.write_text(f"#!/bin/sh\n{lines}\n")
        fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    job = submit.submit("ddp_shakespeare", "--steps 20 --repeats 1", via="pbs")
    said = capsys.readouterr().out
    assert (
        f"VENV={sys.prefix}" in said
        and 'LESSON_ARGS=--steps 20 --repeats 1" jobs/ddp_shakespeare.pbs' in said
    )
    assert job.number == "123" and job.output == in_the_course / "ddp_shakespeare.o123"
    found = job.state()
    assert found[0] == state and remark in found[1]
