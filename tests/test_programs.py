"""Every program ends quietly when nobody reads what it prints, when its terminal is closed, and at Ctrl-C."""

import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.ranks

PROGRAMS = [
    f"{name}.py"
    for name in ("train", "sample", "serve", "plan", "launch", "doctor", "preflight", "bench", "prepare_data")
]
MODULES = [
    "checkpoint.export", "course.handouts", "course.minutes", "course.pairs", "jobs.stamp",
    "launch.recorded_runs", "notebook.jupyter", "serve.load_test",
]  # fmt: skip
STARTS = {name: [f"scripts/{name}"] for name in PROGRAMS}
STARTS |= {"align.py": ["scripts/align.py", "sft"]} | {name: ["-m", f"manyhands.{name}"] for name in MODULES}


def start(root, words, stdout, close=()):
    """A program whose stdout is `stdout`, and which finds the descriptors `close` closed; its errors can be read."""

    def close_them():
        for number in close:
            os.close(number)

    return subprocess.Popen(
        [sys.executable, *words], cwd=root, stdout=stdout, stderr=subprocess.PIPE, text=True, preexec_fn=close_them,
        env=os.environ | {"PYTHONPATH": str(root / "scripts"), "PYTHONUNBUFFERED": "1" if close else ""},
    )  # fmt: skip


@pytest.mark.parametrize("name", STARTS)
def test_help_that_nobody_reads_or_that_has_no_terminal_is_no_error(root, name):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        words = [*STARTS[name], "--help"]
        runs = [start(root, words, writer), start(root, words, None, [0, 1])]
    finally:
        os.close(writer)
    ended = [(run.communicate(timeout=120)[1], run.returncode) for run in runs]
    usage = name in ("checkpoint.export", "course.minutes")  # which know no --help
    for complaint, status in ended:
        assert "Error" not in complaint and "Exception" not in complaint
        assert usage or (status, complaint) == (0, "")


INTERRUPTED = """
import os, runpy, signal, sys
from manyhands.launch import program
run = program.run_program
program.run_program = lambda name, main: run(name, lambda: (os.kill(os.getpid(), signal.SIGINT), main())[1])
if os.environ.pop("IGNORED", ""):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.argv = sys.argv[1:]
if sys.argv[0] == "-m":
    runpy.run_module(sys.argv[1], run_name="__main__")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("name", STARTS)
def test_ctrl_c_is_one_sentence_and_status_130(root, name):
    run = start(root, ["-c", INTERRUPTED, *STARTS[name]], subprocess.DEVNULL)
    complaint = run.communicate(timeout=120)[1]
    assert complaint == f"{name.split('.')[-1] if name in MODULES else name}: ended by Ctrl-C\n"
    assert run.returncode == 130


@pytest.mark.parametrize(("rank", "ignored", "status", "said"), [("1", "", 130, False), ("0", "yes", 2, False)])
def test_of_several_ranks_the_first_one_says_it_and_what_ignores_ctrl_c_goes_on(
    root, monkeypatch, rank, ignored, status, said
):
    monkeypatch.setenv("IGNORED", ignored)
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    run = start(root, ["-c", INTERRUPTED, "scripts/prepare_data.py", "--validation", "2"], subprocess.DEVNULL)
    complaint = run.communicate(timeout=60)[1]
    assert (run.returncode, "Ctrl-C" in complaint) == (status, said)


def test_a_program_that_a_signal_ends_has_the_status_that_shells_give_it(root):
    code = "import os, signal, sys; sys.path.insert(0, 'scripts'); from manyhands.launch.program import run_program;"
    code += "run_program('mine', lambda: os.kill(os.getpid(), signal.SIGTERM))"
    run = start(root, ["-c", code], subprocess.DEVNULL)
    assert run.wait(60) == -signal.SIGTERM
