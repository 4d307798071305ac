"""Preflight on a small course: what is well is told from what fails, hangs or differs, and nothing stays behind."""

import contextlib
import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace

import fake_course
import psutil
import pytest
from manyhands.course.lesson_parameters import read
from manyhands.course.lessons import SHORT, Lesson, find_lessons
from manyhands.launch import processes
from manyhands.tools import lesson_run as runs
from manyhands.tools import preflight

pytestmark = pytest.mark.ranks


TIMEOUT_S = 600
HANG = 1 + 2 + 2  # the notebook's own process, and the ranks of the scripts


@pytest.fixture(scope="module")
def flown(tmp_path_factory, forked_python):
    """(course, exit status, outcomes by (lesson, way), results by lesson) of one preflight, all of its runs at once.

    What hangs is at its time-out when it hangs and nothing else is left, however long that took on this machine.
    """
    root = tmp_path_factory.mktemp("course")
    fake_course.write_course(root)
    judged, real_python, now = [], sys.executable, time.monotonic

    def keep(outcomes, inner=preflight.judge):
        judged[:] = inner(outcomes)  # again after each run
        return judged

    def clock():
        there = len(list(root.glob("outputs/preflight/runs/03_hangs/*/outputs/hangs-*"))) == HANG
        return now() + TIMEOUT_S * (there and sum(len(result.outcomes) for result in judged) >= 6)

    def command(run, timeout_s, inner=runs.Run.command):  # a fork neither stops with its launcher nor prints its stack
        words = inner(run, timeout_s)
        scripts = run.lesson.name == "03_hangs" and run.way != "notebook"
        return [real_python if word == forked_python and scripts else word for word in words]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight, "cores_here", lambda: 64)
        patch.setattr(preflight, "available_memory_bytes", lambda: 2**40)
        patch.setattr(preflight, "judge", keep)
        patch.setattr(processes, "SAMPLE_S", 4)  # nine looks at all processes at once are a load of their own
        patch.setattr(processes, "time", SimpleNamespace(monotonic=clock, time=time.time, sleep=time.sleep))
        patch.setattr(runs.Run, "command", command)
        patch.setattr(sys, "executable", forked_python)
        patch.setenv("MANYHANDS_LOGIN_NODE", "0")
        status = preflight.main(["--ranks", "2", f"--timeout={TIMEOUT_S}"], root=root)
    outcomes = {(r.lesson.name, o.run.way): o for r in judged for o in r.outcomes}
    return root, status, outcomes, {r.lesson.name: r for r in judged}


WAYS = ("notebook", "torchrun", "mpiexec")


@pytest.mark.parametrize("way", WAYS)
def test_what_is_well_what_raises_and_what_hangs_are_told_apart(flown, way):
    """Of ranks the first error is rank 1's, although rank 0 lost its connection."""
    good, raises, hangs = (flown[2][name, way] for name in ("04_differs", "02_raises", "03_hangs"))
    assert not good.error and good.ended.seconds > 0 and 2**20 < good.ended.peak_bytes < 2**31
    if way == "notebook":
        assert str(raises.error) == "ValueError: rank 1 has 3 numbers, the others 4 (cell 3)"
    else:
        assert raises.error.says.startswith("ValueError: rank 1 has 3 numbers, the others 4 (02_raises.py, line")
        assert raises.error.rank == 1 and raises.error.detail.startswith("Traceback")
    assert hangs.ended.timed_out and hangs.ended.seconds >= TIMEOUT_S
    where = "in cell 3" if way == "notebook" else "rank 1 in 03_hangs.py, line"
    assert f"did not end within {TIMEOUT_S} s" in hangs.error.says and where in hangs.error.says


def of_course(course):
    """Living processes of the runs of a course."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get("MANYHANDS_OUTPUTS", "").startswith(str(course))
            found += [process] if ours and process.status() != psutil.STATUS_ZOMBIE else []
        except psutil.Error:
            continue
    return found


def test_the_others_go_on_nothing_is_left_and_what_differs_between_launchers_is_named(flown):
    course, status, outcomes, results = flown
    assert of_course(course) == [], "not even what detached itself"
    assert status == 1 and len(outcomes) == 9
    assert {name for (name, _), outcome in outcomes.items() if outcome.error} == {"02_raises", "03_hangs"}
    assert results["04_differs"].differences == [
        "mpiexec on 2 ranks against notebook on 2 ranks: exact answer: 42 and 43"
    ]
    assert results["04_differs"].compared == 3


def test_the_report_is_one_page_that_loads_nothing_and_junit_counts_each_run_and_each_comparison(flown):
    folder = flown[0] / "outputs" / "preflight"
    report = (folder / "report.html").read_text()
    assert not re.search(r"<(script|link|img)|=.https?://|@import|url\(", report)
    links = re.findall(r'href="([^"]+)"', report)
    assert "runs/04_differs/notebook-2/04_differs.ipynb" in links
    assert all((folder / link).is_file() for link in links)
    assert "Not ready: 6 of 9 runs failed, 1 lesson with metrics that differ" in report
    torch = f"torch {importlib.metadata.version('torch')}"
    for fact in ("rank 1: ValueError: rank 1 has 3 numbers, the others 4", "shakespeare", torch, "mpiexec"):
        assert fact in report
    suite = ET.parse(folder / "junit.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures")) == ("13", "7")  # 9 runs, 1 comparison, 3 pairs
    failed = [case for case in suite.iter("testcase") if case.find("failure") is not None]
    failed = {(case.get("classname"), case.get("name")) for case in failed}
    assert ("02_raises", "mpiexec on 2 ranks") in failed and ("04_differs", "metrics agree") in failed


@pytest.fixture
def fly(tmp_path, monkeypatch):
    """fly(*words, after=N) -> (status, names of the lessons that ran) of a preflight of two lessons without processes.

    After N runs Ctrl-C comes. `fly.before` holds the report as it was before each run.
    """
    for name in ("01_good", "02_also"):
        fake_course.write_lesson(tmp_path, name, fake_course.GOOD)
    report = tmp_path / "outputs" / "preflight" / "report.html"
    monkeypatch.setattr(preflight, "at_once", lambda run, running, cores, memory: not running)
    monkeypatch.setenv("MANYHANDS_LOGIN_NODE", "0")

    def flight(*words, after=None, corpus=None):
        made, flight.before = [], []

        def carry_out(run, timeout_s, stop):
            if len(made) == after:
                raise KeyboardInterrupt
            made.append(run.lesson.name)
            flight.before.append(report.read_text() if report.exists() else "")
            metrics = {"lesson": run.lesson.name, "corpus": corpus, "parameters": {}, "device": "cpu", "exact": {},
                       "close": {}, "world_size": 4}  # fmt: skip
            outcome = runs.Outcome(run, processes.Ended(0, 1.0, 0), None, metrics)
            run.folder.mkdir(parents=True, exist_ok=True)
            outcome.keep()
            return outcome

        monkeypatch.setattr(runs.Run, "carry_out", carry_out)
        return preflight.main(["--notebooks", *words], root=tmp_path), made

    return flight


def is_papermill_or_kernel(process):
    with contextlib.suppress(psutil.Error):
        return any(name in " ".join(process.cmdline()) for name in ("papermill", "ipykernel"))


@pytest.mark.parametrize("how", ["SIGTERM, as at the wall time", "SIGKILL"])
def test_a_preflight_that_is_ended_leaves_none_of_its_runs(tmp_path, root, forked_python, how):
    fake_course.write_lesson(tmp_path, "03_hangs", fake_course.HANGS)
    # a fork does not know who started it
    python = f"sys.executable = {sys.executable!r}; " if how == "SIGKILL" else ""
    start = (
        f"import sys; {python}from pathlib import Path; from manyhands.tools.preflight import main; "
        "sys.exit(main(['--notebooks'], root=Path(sys.argv[1])))"
    )
    environ = {**os.environ, "PYTHONPATH": str(root / "scripts"), "MANYHANDS_LOGIN_NODE": "0"}
    flight = subprocess.Popen([forked_python, "-c", start, tmp_path], env=environ, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        # the preflight itself, papermill, the kernel, what the kernel detached
        while len(of_course(tmp_path)) < 4 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(of_course(tmp_path)) >= 4
        if how == "SIGKILL":
            flight.kill()
            flight.wait()
            deadline = time.monotonic() + 60
            while any(map(is_papermill_or_kernel, of_course(tmp_path))) and time.monotonic() < deadline:
                time.sleep(0.2)
            left = of_course(tmp_path)  # only what the lesson detached: ranks have a watchdog of their own
            assert not any(map(is_papermill_or_kernel, left))
            for process in left:
                process.kill()
            psutil.wait_procs(left, timeout=10)
        else:
            flight.terminate()
            _, said = flight.communicate(timeout=120)
            report = tmp_path / "outputs" / "preflight" / "report.html"
            assert flight.returncode == 130 and "interrupted after 0 of 1 run; all its runs were ended" in said
            assert f"report: {report}; go on with --resume" in said
            assert "Not ready: 1 run not ended" in report.read_text()
    finally:
        flight.kill()
    assert of_course(tmp_path) == []


def test_a_resumed_preflight_makes_only_what_did_not_go_well_or_was_changed(flown, monkeypatch, capsys, forked_python):
    root, made = flown[0], []
    script = root / "scripts" / "04_differs.py"
    before = script.read_text()

    def fly_again(run, timeout_s, stop):
        made.append((run.lesson.name, run.way))
        return flown[2][run.lesson.name, run.way]

    monkeypatch.setattr(sys, "executable", forked_python)  # what another Python has done does not count
    monkeypatch.setattr(runs.Run, "carry_out", fly_again)
    monkeypatch.setenv("MANYHANDS_LOGIN_NODE", "0")
    again = ["--ranks", "2", "--lesson=02", "--lesson=04", "--resume"]
    try:
        script.write_text(before + "# edited\n")
        assert preflight.main(again, root=root) == 1
    finally:
        script.write_text(before)
    edited = [("04_differs", way) for way in ("torchrun", "mpiexec")]
    assert sorted(made) == sorted([("02_raises", way) for way in WAYS] + edited)
    assert "1 run of 6 went well before: kept" in capsys.readouterr().out


def test_the_report_is_written_after_each_run_and_a_flight_that_began_anew_keeps_no_earlier_runs(fly, tmp_path, capsys):
    """Flight 1 was whole, flight 2 was interrupted after one run: flight 3 has one run to keep, not two."""
    assert fly() == (0, ["01_good", "02_also"])
    assert ["Not ready: 1 run not ended" in text for text in fly.before] == [False, True]
    assert "Ready" in (tmp_path / "outputs" / "preflight" / "report.html").read_text()
    assert fly(after=1) == (130, ["01_good"])
    capsys.readouterr()
    assert fly("--resume") == (0, ["02_also"])
    assert "1 run of 2 went well before: kept" in capsys.readouterr().out


def test_in_a_preflight_lesson_04_leaves_no_job_in_the_queue():
    by_way = {run.way: run.parameters for run in preflight.plan(find_lessons(only=["04"]), Path("x"), ranks=[2])}
    assert by_way["notebook"] == {"submit_via": "bash"} and by_way["torchrun"] == {}
    (notebook,) = preflight.plan(find_lessons(only=["04"]), Path("x"), notebooks_only=True)
    assert "--short" not in notebook.again()
    (short,) = preflight.plan(find_lessons(only=["04"]), Path("x"), notebooks_only=True, short=True)
    assert short.parameters.keys() > {"submit_via", "steps"} and "--short" in short.again()


def test_the_last_lines_of_a_failed_job_stand_behind_the_notebooks_error(tmp_path):
    (run,) = preflight.plan(find_lessons(only=["04"]), tmp_path, notebooks_only=True)
    jobs = run.folder / "outputs" / "jobs"
    jobs.mkdir(parents=True)
    for number, status, said in ((7, "0", "well"), (8, "1", "line 30: module: command not found")):
        (jobs / f"ddp_shakespeare.{number}.status").write_text(f"{status}\n")
        (jobs / f"ddp_shakespeare.o{number}").write_text(f"{said}\n")
    error = {"output_type": "error", "ename": "AssertionError", "evalue": "the job failed", "traceback": ["here"]}
    run.executed.write_text(json.dumps({"cells": [{"cell_type": "code", "metadata": {}, "outputs": [error]}]}))
    found = run.first_error(runs.Ended(1, 1.0, 0), 60, None, {})
    last = "job 8 (ddp_shakespeare) failed; its last lines:\nline 30: module: command not found"
    assert found.detail == f"here\n\n{last}" and "the job failed" in found.says


@pytest.mark.parametrize("how", fake_course.BROKEN)
def test_a_broken_notebook_stops_no_other_lesson_and_the_report_names_it_with_the_cure(fly, tmp_path, capsys, how):
    fake_course.break_notebook(Lesson("01_good", tmp_path), how)
    assert fly() == (1, ["01_good", "02_also"])
    report, junit = ((tmp_path / "outputs" / "preflight" / name).read_text() for name in ("report.html", "junit.xml"))
    for text in (capsys.readouterr().out, report, junit):
        assert "01_good.ipynb is neither a notebook nor a script of cells" in text
    assert "delete it, and `make sync LESSON=01` writes it" in report and "Not ready: 1 lesson" in report


@pytest.mark.parametrize("broken", ["<<<<<<< HEAD\nn_ranks = 2\n", "steps = (\n", "steps = 1 + 1\n"])
def test_a_broken_cell_of_parameters_stops_no_other_lesson(fly, tmp_path, broken):
    script = tmp_path / "scripts" / "01_good.py"
    script.write_text(script.read_text().replace("n_ranks = 2", f"{broken}n_ranks = 2"))
    status, made = fly()
    assert (status, made) == (1, ["01_good", "02_also"])


# ------------------------------------------------------------------ what is refused


def test_a_login_node_an_unknown_lesson_and_a_number_of_ranks_that_is_none_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MANYHANDS_LOGIN_NODE", "1")
    assert preflight.main([], root=tmp_path) == 2
    said = capsys.readouterr().err
    assert "login node" in said and "compute node" in said and "MANYHANDS_LOGIN_NODE=0" in said
    assert not (tmp_path / "outputs").exists()
    monkeypatch.setenv("MANYHANDS_LOGIN_NODE", "0")
    fake_course.write_lesson(tmp_path, "01_good", fake_course.GOOD)
    assert preflight.main(["--lesson", "7"], root=tmp_path) == 2
    assert "there is no lesson '7'; the lessons are: 01_good" in capsys.readouterr().err
    for words in ("x", "0", "1.5"):
        with pytest.raises(SystemExit, match="2"):
            preflight.main(["--ranks", words], root=tmp_path)
        assert f"argument --ranks: '{words}' is not a whole number above 0" in capsys.readouterr().err


# ------------------------------------------------------------------ the plan


def test_notebooks_come_first_then_scripts_under_both_launchers_with_2_and_4_ranks(tmp_path):
    for name in ("01_good", "02_also"):
        fake_course.write_lesson(tmp_path, name, fake_course.GOOD)
    planned = [(run.lesson.number, run.title) for run in preflight.plan(find_lessons(tmp_path), tmp_path)]
    scripts = ["torchrun on 2 ranks", "mpiexec on 2 ranks", "torchrun on 4 ranks", "mpiexec on 4 ranks"]
    assert planned == [("01", "notebook"), ("02", "notebook")] + [(n, way) for n in ("01", "02") for way in scripts]
    needs_3 = tmp_path / "scripts" / "02_also.py"
    needs_3.write_text(needs_3.read_text().replace("# processes", "# processes, at least 3"))
    planned = preflight.plan(find_lessons(tmp_path, only=["02"]), tmp_path)
    assert [(run.way, run.n_ranks) for run in planned] == [("notebook", None)] + [
        (way, n) for n in (3, 4) for way in ("torchrun", "mpiexec")
    ]
    assert {run.n_ranks for run in preflight.plan(find_lessons(tmp_path, only=["02"]), tmp_path, ranks=[1, 2])} == {3}


def test_ranks_short_and_device_reach_notebooks_and_scripts_also_by_what_a_report_gives_to_try_again(
    tmp_path, monkeypatch
):
    fake_course.write_lesson(tmp_path, "01_good", fake_course.GOOD)
    monkeypatch.setitem(SHORT, "01_good", {"length": "--steps 4 --repeats 1"})
    notebook, *scripts = planned = preflight.plan(find_lessons(tmp_path), tmp_path, ranks=[8], device="cpu", short=True)
    assert json.loads(notebook.command()[-1]) == {"length": "--steps 4 --repeats 1", "n_ranks": 8}
    words = shlex.split(notebook.again())
    again = preflight.parser().parse_args(words[2:])
    assert words[:2] == ["python", "scripts/preflight.py"] and again.short and again.notebooks
    assert (again.lesson, again.ranks, again.device) == (["01"], [8], "cpu")
    for script in scripts:
        assert script.command()[-1] == "--length=--steps 4 --repeats 1"
        assert {"8", "--nproc-per-node=8"} & set(script.command())
        words = shlex.split(script.again())
        assert words[0] == "CUDA_VISIBLE_DEVICES=" and "8" in words and words[-1] == "--length=--steps 4 --repeats 1"
    hidden = {"MANYHANDS_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": "", "ONEAPI_DEVICE_SELECTOR": "*:cpu"}
    for run in planned:
        assert run.environ({"MANYHANDS_DEVICE": "cuda"}).items() >= hidden.items()
    [on_gpus] = preflight.plan(find_lessons(tmp_path), tmp_path, device="cuda", notebooks_only=True)
    assert on_gpus.environ({})["MANYHANDS_DEVICE"] == "cuda"
    usual, *_ = preflight.plan(find_lessons(tmp_path), tmp_path)
    assert "MANYHANDS_DEVICE" not in usual.environ({})
    of_site = {"MANYHANDS_RANKS": "2", "MANYHANDS_RANK": "0"}  # a notebook on its own number of ranks has the site's
    assert "MANYHANDS_RANKS" not in notebook.environ(of_site) and "MANYHANDS_RANK" not in usual.environ(of_site)
    assert usual.environ(of_site)["MANYHANDS_RANKS"] == "2"


def test_a_short_parameter_that_the_lesson_does_not_have_is_refused(tmp_path, monkeypatch):
    for lesson in find_lessons():
        assert lesson.short.keys() <= {parameter.name for parameter in read(lesson.script)}, lesson.name
    fake_course.write_lesson(tmp_path, "01_good", fake_course.GOOD)
    monkeypatch.setitem(SHORT, "01_good", {"lenght": 2})
    with pytest.raises(ValueError, match="lenght, which 01_good does not have"):
        preflight.plan(find_lessons(tmp_path), tmp_path, short=True)


@pytest.mark.parametrize("cores, gib, together", [(2, 24, 1), (8, 24, 2), (8, 5, 1), (64, 24, 4)])
def test_as_many_notebooks_run_at_once_as_cores_and_memory_allow(tmp_path, cores, gib, together):
    lessons = [Lesson(f"0{n}_x", tmp_path) for n in range(4)]
    running = []
    for lesson in lessons:
        run = runs.Run(lesson, "notebook", None, tmp_path)
        if preflight.at_once(run, running, cores, gib * 2**30):
            running.append(run)
    assert len(running) == together


# ------------------------------------------------------------------ processes and errors


TAKE_A_PORT = """
import json, pathlib, socket, sys
taken = pathlib.Path(__file__).with_name("taken")
if "ipykernel_launcher" in sys.orig_argv and not taken.exists():
    taken.touch()
    ports = json.loads(pathlib.Path(sys.orig_argv[sys.orig_argv.index("-f") + 1]).read_text())
    sys.other = socket.create_server((ports["ip"], ports["shell_port"]))
"""


@pytest.mark.usefixtures("real_python")
def test_a_notebook_whose_kernel_lost_a_port_to_another_process_runs_again(tmp_path, monkeypatch):
    """Jupyter chooses the ports; a kernel that starts on a busy machine binds them many seconds later."""
    fake_course.write_lesson(tmp_path, "01_plain", "")
    (tmp_path / "sitecustomize.py").write_text(TAKE_A_PORT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (lesson,) = find_lessons(tmp_path)
    run = runs.Run(lesson, "notebook", None, tmp_path / "run")
    outcome = run.carry_out(120)
    assert (tmp_path / "taken").exists() and outcome.ended.status == 0, run.log.read_text()


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # dead, but init has not looked yet
    except psutil.NoSuchProcess:
        return False


def test_a_run_that_leaves_a_process_behind_has_it_named_and_killed(tmp_path):
    sleeper = "[sys.executable, '-c', 'import time; time.sleep(99)'], start_new_session=True"
    code = f"import subprocess, sys; print(subprocess.Popen({sleeper}).pid)"
    ended = processes.supervise([sys.executable, "-c", code], log=tmp_path / "log", timeout_s=120, linger_s=0.3)
    pid = int((tmp_path / "log").read_text())
    assert ended.status == 0 and len(ended.left_behind) == 1 and f"pid {pid} (python -c" in ended.left_behind[0]
    assert not alive(pid)
    ended = processes.supervise(["no-such-program"], log=tmp_path / "log", timeout_s=5)
    assert ended.status is None and "no-such-program did not start" in ended.error


@pytest.mark.parametrize(
    ("now", "said", "well"),
    [
        ("PENDING|(Resources)", "slurm's job 7 was cancelled after 0.1 s: waiting, Resources", False),
        ("PENDING|(None)", "slurm's job 7 was cancelled after 0.1 s: waiting", False),
        ("", "slurm's job 7: completed; its output is ddp_shakespeare.o7", True),
    ],
)
def test_a_job_goes_through_the_real_scheduler_where_that_is_asked_for(tmp_path, monkeypatch, capsys, now, said, well):
    programs = {
        "sinfo": "echo up", "sbatch": "echo Submitted batch job 7", "squeue": f"[ -z '{now}' ] || echo '7|{now}'",
        "scontrol": "echo JobState=COMPLETED ExitCode=0:0", "scancel": f"echo $1 >>{tmp_path}/cancelled",
    }  # fmt: skip
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert preflight.try_queue(0.1) == (said, well)
    assert (tmp_path / "cancelled").exists() != well
    monkeypatch.setenv("PATH", "/nowhere")
    assert preflight.try_queue(0.1) == ("no scheduler answers here, so no job was submitted", False)
