"""Every program ends quietly when nobody reads what it prints, when its streams are closed or full, and at Ctrl-C."""

import ast
import itertools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
# lessons have no entry: `join` is theirs; the environment is set up by Pythons that are too old for it
PROGRAMS = [path.name for path in SCRIPTS.glob("*.py") if not path.name[0].isdigit()]
PROGRAMS.remove("setup_environment.py")
MODULES = [
    str(path.relative_to(SCRIPTS / "manyhands"))[:-3].replace("/", ".")
    for path in SCRIPTS.glob("manyhands/*/*.py")
    if "run_program(" in path.read_text() and path.name not in ("entry.py", "commands.py", "machine.py")
]
STARTS = {name: [f"scripts/{name}"] for name in PROGRAMS}
STARTS |= {"align.py": ["scripts/align.py", "sft"]} | {name: ["-m", f"manyhands.{name}"] for name in MODULES}
OTHERS = {"setup_environment.py": ["scripts/setup_environment.py"], "a lesson": ["scripts/02_collectives.py"]}
NO_HELP = ("checkpoint.export", "setup_environment.py")  # the last ends as `ls | true` does


def source_of(name):
    return SCRIPTS / name if name in PROGRAMS else SCRIPTS / "manyhands" / f"{name.replace('.', '/')}.py"


@pytest.mark.parametrize("name", STARTS)
def test_every_program_ends_by_the_entry_and_begins_by_it_before_imports_that_take_long(name):
    tree = ast.parse(source_of(name).read_text())
    assert "run_program(" in ast.unparse(tree.body[-1])
    ours = "manyhands" if name in PROGRAMS else "torch"  # within the package, what takes long is torch
    lines = [ast.unparse(node) for node in tree.body[:-1]]
    before = itertools.takewhile(lambda line: not re.search("manyhands.launch.*entry$", line), lines)
    assert [line for line in before if re.match(rf"(from|import) (torch|tyro|numpy|{ours})\b", line)] == []


def start(root, words, stdout=None, close=(), stderr=subprocess.PIPE, before=()):
    """A program whose stdout is `stdout`, and which finds the descriptors `close` closed; its errors can be read.

    It looks for modules in the folders `before` first.
    """

    def close_them():
        for number in close:
            os.close(number)

    return subprocess.Popen(
        [sys.executable, *words], cwd=root, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, text=True,
        preexec_fn=close_them,
        env=os.environ | {
            "PYTHONPATH": ":".join(map(str, [*before, root / "scripts"])),
            "PYTHONUNBUFFERED": "1" if 1 in close else "",
        },
    )  # fmt: skip


# how a program says what its flags are: by argparse, by tyro on all ranks before they meet; a lesson; by itself
KINDS = ("plan.py", "train.py", "a lesson", "setup_environment.py")
BRING_TORCH = ("isoflop.py", "a lesson", "serve.load_test", "checkpoint.export")  # these run as forks


@pytest.fixture
def no_torch(tmp_path):
    """A folder for PYTHONPATH in which torch cannot be imported."""
    (tmp_path / "torch.py").write_text("raise RuntimeError('--help has imported torch')")
    return tmp_path


HELPED = [name for name in STARTS | OTHERS if name not in MODULES or name == "checkpoint.export"]


@pytest.mark.parametrize("name", HELPED)
def test_help_comes_without_torch_and_is_no_error_where_nobody_reads_it_or_it_finds_no_room(
    root, name, no_torch, request
):
    words, before = [*(STARTS | OTHERS)[name], "--help"], ()
    if name not in BRING_TORCH:
        request.getfixturevalue("real_python")
        before = [no_torch]
    reader, nobody = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    runs = {"<&- | true": start(root, words, nobody, [0], before=before)}
    if name in KINDS:
        runs |= {
            "<&- >&-": start(root, words, None, [0, 1], before=before),
            ">/dev/full 2>&1": start(root, words, full, stderr=full, before=before),
        }
    for number in (nobody, full):
        os.close(number)
    for how, run in runs.items():
        complaint = run.communicate(timeout=200)[1] or ""
        assert "Error" not in complaint and "Exception" not in complaint, how
        lost = how.startswith(">/dev/full") and name in PROGRAMS  # what was asked for is not there
        assert name in NO_HELP or (run.returncode, complaint) == (int(lost), ""), how


WORKS = {  # a piece of real work of each program that has some for a second; what tells that it was done
    "plan.py": (["scripts/plan.py", "--preset", "gpt-7b", "--gpus", "64", "--plot", "{folder}/done.svg"], 0),
    "train.py": (
        ["scripts/train.py", "--checkpoint.folder", "{folder}/done", "--train.steps", "2", "--model.n-layer", "1",
         "--model.n-embd", "16", "--log.eval-batches", "1", "--log.sample", "3"], 0),
    "prepare_data.py": (["scripts/prepare_data.py", "README.md", "LICENSE", "--to", "{folder}/done"], 0),
    "sample.py": (["scripts/sample.py", "{folder}/none"], 2),
    "launch.py": (["scripts/launch.py", "--nproc", "1", "--starter", "mpiexec", "{folder}/touch.py"], 0),
    "a lesson": (["scripts/02_collectives.py", "--repeats", "1", "--points", "100", "--wait-s", "0.1"], 0),
}  # fmt: skip


def test_a_plan_that_a_full_disk_does_not_take_is_a_sentence_and_status_1_and_a_closed_pipe_is_quiet(root):
    words = ["scripts/plan.py", "--preset", "gpt-7b", "--gpus", "16", "--schedule", "1F1B", "--all"]
    with open("/dev/full", "wb") as full:
        ran = start(root, words, full)
        said = ran.communicate(timeout=100)[1]
    sentence = "plan.py: stdout cannot be written (No space left on device); make room, and start it again\n"
    assert (ran.returncode, said) == (1, sentence)
    reader, nobody = os.pipe()
    os.close(reader)
    ran = start(root, words, nobody)
    os.close(nobody)
    assert (ran.communicate(timeout=100)[1], ran.returncode) == ("", 0)


HOWS = ["<&- >&- 2>&-", ">/dev/full 2>&1", "2>&1 | true"]  # the last for what people start most


@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param(name, how, marks=[pytest.mark.full] * (name != "train.py"))
        for name in WORKS for how in HOWS[: 3 if name == "train.py" else 2]
    ],
)  # fmt: skip
def test_work_is_done_whatever_is_wrong_with_the_streams(root, tmp_path, monkeypatch, name, how):
    monkeypatch.setenv("MANYHANDS_OUTPUTS", str(tmp_path / "out"))
    (tmp_path / "touch.py").write_text(f"open({str(tmp_path / 'done')!r}, 'w')")
    words, status = WORKS[name]
    command = " ".join([sys.executable, *words, how]).format(folder=tmp_path)
    ran = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], cwd=root, capture_output=True, text=True, timeout=300
    )
    lost = name == "plan.py" and "full" in how  # its table is what it was started for
    assert ran.returncode == status + lost and "Error" not in ran.stderr
    assert status or name == "a lesson" or list(tmp_path.glob("done*"))


INTERRUPTED = """
import os, runpy, signal, sys
from manyhands.launch import program
run = program.run
program.run = lambda name, main, **how: run(name, lambda: (os.kill(os.getpid(), signal.SIGINT), main())[1], **how)
if os.environ.pop("IGNORED", ""):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.argv = sys.argv[1:]
if sys.argv[0] == "-m":
    runpy.run_module(sys.argv[1], run_name="__main__")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


# one of each kind; that all begin and end by the entry is tested above
@pytest.mark.parametrize(
    ("name", "environ", "status", "said"),
    [
        *((name, {}, 130, True) for name in ("train.py", "launch.py", "serve.load_test")),
        ("prepare_data.py", {"RANK": "1"}, 130, False),  # of several ranks the first one says it
        ("prepare_data.py", {"RANK": "0", "IGNORED": "yes"}, 2, False),  # what ignores Ctrl-C goes on
    ],
)
def test_ctrl_c_is_one_sentence_of_one_process_and_status_130(root, monkeypatch, name, environ, status, said):
    if environ:
        environ = {"WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"} | environ
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)
    run = start(root, ["-c", INTERRUPTED, *STARTS[name], *["--to", "x"] * bool(environ)], subprocess.DEVNULL)
    complaint = run.communicate(timeout=120)[1]
    sentence = f"{name.split('.')[-1] if name in MODULES else name}: ended by Ctrl-C\n"
    assert run.returncode == status and (complaint == sentence if said else "Ctrl-C" not in complaint)


# a library that swallows what is raised while it is imported, and says that it is there
SWALLOWS = """
import sys, time
try:
    print("importing", flush=True)
    time.sleep(600)
except BaseException:
    raise ImportError("something else") from None
"""


@pytest.mark.usefixtures("real_python")
def test_ctrl_c_while_a_library_is_imported_is_one_sentence(root, tmp_path):
    (tmp_path / "torch.py").write_text(SWALLOWS)
    command = [sys.executable, "scripts/train.py"]
    run = subprocess.Popen(
        command, cwd=root, env=os.environ | {"PYTHONPATH": f"{tmp_path}:{root / 'scripts'}"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert run.stdout.readline() == "importing\n"
    run.send_signal(signal.SIGINT)
    complaint = run.communicate(timeout=60)[1]
    assert complaint.endswith(": ended by Ctrl-C\n") and complaint.count("\n") == 1
    assert run.returncode == 130
