"""A rank that stops at breakpoint() in a notebook's cell: stepped in a terminal, left, and gone with its kernel."""

import os
import queue
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import notebook_kernel
import pytest
from manyhands.notebook import debug
from notebook_kernel import JOIN, Kernel, left_behind, wait_until

pytestmark = pytest.mark.ranks

STOP = """%%ranks --timeout 2
def twice(v):
    result = 2 * v
    return result
if rank == 2:
    breakpoint()
x = torch.tensor([float(twice(rank))])
dist.all_reduce(x)
say(x.item())"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory, root):
    with Kernel(tmp_path_factory.mktemp("course"), root, {"MANYHANDS_LIVE": "1"}) as kernel:
        kernel.start()
        assert kernel.run(JOIN).error is None
        kernel.ranks_folder = Path(kernel.run("print(hands.processes.folder)").text.strip())
        yield kernel


def sockets(kernel):
    return sorted(kernel.ranks_folder.glob("*.pdb"))


def terminal(kernel, rank=""):
    """A terminal in which the command runs that the cell names."""
    wait_until(lambda: sockets(kernel))
    path = str(kernel.ranks_folder / f"{rank}.pdb") if rank != "" else str(sockets(kernel)[0])
    command = [sys.executable, "-m", "manyhands.notebook.debug", path]
    environ = {**os.environ, "PYTHONPATH": str(kernel.root / "scripts")}
    return subprocess.Popen(
        command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def shown(kernel, question, text):
    """What the running cell shows once `text` is in it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            message = kernel.client.get_iopub_msg(timeout=5)
        except queue.Empty:
            continue
        said = message["content"].get("data", {}).get("text/plain", "")
        if message["parent_header"].get("msg_id") == question and text in said:
            return said
    raise AssertionError(f"the cell never showed {text!r}")


def test_a_rank_is_stepped_for_longer_than_the_cells_time_out_and_all_go_on(notebook):
    question = notebook.send(STOP)
    said = shown(notebook, question, "ranks 0-1, 3: waiting in all_reduce, line 8")
    assert "rank 2: stopped at line 6 of this cell: breakpoint()" in said
    assert f"In a terminal: {sys.executable} -m manyhands.notebook.debug" in said
    assert "While rank 2 is stopped, no time-out ends this cell" in said
    assert os.stat(notebook.ranks_folder).st_mode & 0o077 == 0
    assert notebook.ranks_folder / "2.pdb" in debug.stopped()
    time.sleep(5)  # 2 s, twice for this kernel's patience
    with terminal(notebook, 2) as stepping:
        told, _ = stepping.communicate("l\ns\ns\np 100 + rank\nw\nr\nn\nn\nn\nc\n", timeout=60)
    cell = notebook.collect(question)
    assert cell.error is None and cell.text == "all ranks | 12.0\n"
    assert "result = 2 * v" in told and "\n(Pdb) 102\n" in told
    assert "> this cell(2)twice()" in told and "-> dist.all_reduce(x)" in told
    assert "IPython" not in told, "neither in the stack nor between two statements"
    assert told.endswith("the cell has ended\n") and not sockets(notebook)
    assert notebook.run("%%ranks\nsay(int(x))").text == "all ranks | 12\n"


LOOP = """%%ranks
for step in range(50):
    import pdb; pdb.set_trace()
dist.barrier()
say('done')"""


@pytest.mark.parametrize("leave", ["q", "closed"])
def test_each_rank_stops_and_whoever_leaves_lets_it_go_on_without_further_stops(notebook, leave):
    question = notebook.send(LOOP)
    wait_until(lambda: len(sockets(notebook)) == 4)
    for rank in range(4):
        with terminal(notebook, rank) as stepping:
            assert "rank" in stepping.stdout.readline()
            if leave == "closed":
                stepping.send_signal(signal.SIGKILL)
            stepping.communicate("c\nq\n" if leave == "q" else None, timeout=60)
    cell = notebook.collect(question)
    assert cell.error is None and cell.text == "all ranks | done\n"


def test_stopping_the_cell_ends_it_and_the_ranks_go_on(notebook):
    question = notebook.send(STOP)
    wait_until(lambda: sockets(notebook))
    notebook.manager.interrupt_kernel()
    _, said, lines = notebook.collect(question).error
    assert "interrupted" in said and "rank 2: waiting in the debugger, line 6: breakpoint()" in lines
    assert not sockets(notebook)
    assert notebook.run("%%ranks\ndist.barrier(); say('ready')").text == "all ranks | ready\n"


def test_a_killed_kernel_leaves_no_stopped_rank_and_no_socket(tmp_path, root):
    with Kernel(tmp_path, root, {"MANYHANDS_LIVE": "1"}) as kernel:
        kernel.start(2)
        mark = kernel.mark()
        kernel.ranks_folder = Path(kernel.run("print(hands.processes.folder)").text.strip())
        kernel.send("%%ranks\nbreakpoint()")
        wait_until(lambda: len(sockets(kernel)) == 2)
        with terminal(kernel, 0) as stepping:
            assert "rank 0 stopped" in stepping.stdout.readline()
            os.kill(kernel.pid, signal.SIGKILL)
            stepping.communicate(timeout=60)
        assert not left_behind(mark, 60)
        wait_until(lambda: not kernel.ranks_folder.exists())


@pytest.mark.full
def test_sixteen_ranks_are_traced_one_is_stepped_and_a_killed_kernel_leaves_none(tmp_path, root):
    with Kernel(tmp_path, root, {"MANYHANDS_LIVE": "1"}) as kernel:
        kernel.collect(
            kernel.send(notebook_kernel.START.format(scripts=str(root / "scripts"), n_ranks=16, length=3)), 250
        )
        assert kernel.run(JOIN, 250).error is None
        mark = kernel.mark()
        kernel.ranks_folder = Path(kernel.run("print(hands.processes.folder)").text.strip())
        traced = "%%ranks --trace\nif rank == 11:\n    breakpoint()\ndist.all_reduce(torch.ones(10))"
        question = kernel.send(traced)
        wait_until(lambda: sockets(kernel))
        time.sleep(1)  # the others wait as long
        with terminal(kernel, 11) as stepping:
            told, _ = stepping.communicate("p 100 + rank\nc\n", timeout=60)
        cell = kernel.collect(question, 250)
        assert "111" in told and cell.error is None
        lines = [line for line in cell.text.splitlines() if re.match(r"rank \d+: computing", line)]
        assert len(set(lines)) == 16 and sum("for rank 11" in line for line in set(lines)) == 15
        assert len(cell.pictures) == 1
        kernel.send("%%ranks\nif rank == 11:\n    breakpoint()\ndist.barrier()")
        wait_until(lambda: sockets(kernel))
        os.kill(kernel.pid, signal.SIGKILL)
        assert not left_behind(mark, 120)
        wait_until(lambda: not kernel.ranks_folder.exists())
