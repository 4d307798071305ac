"""The ranks of a notebook: their output, their failures, and what is left of them afterwards."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import notebook_kernel
import pytest
from manyhands.notebook import engine_processes
from notebook_kernel import JOIN, Kernel, left_behind, listening_addresses, wait_until

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def notebook(tmp_path_factory, root):
    """A kernel with four joined ranks; a test that loses them starts new ones."""
    with Kernel(tmp_path_factory.mktemp("course"), root) as kernel:
        assert "4 ranks on this machine (MPI)" in kernel.start().text
        assert kernel.run(JOIN).error is None
        yield kernel


def test_a_watchdog_that_is_asked_to_end_takes_its_ranks_and_their_folder_along(tmp_path, monkeypatch):
    """A preflight ends a hung notebook so: the kernel lives on for a moment, and the watchdog would be killed next."""
    folder, mark = tmp_path / "manyhands-folder", f"test-{os.getpid()}"
    folder.mkdir()
    rank = subprocess.Popen(["sleep", "600"], env={**os.environ, "MANYHANDS_CLUSTER": mark})

    def unheard(*_):
        raise AssertionError("SIGTERM ended the watchdog")

    before = signal.signal(signal.SIGTERM, unheard)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(engine_processes.time, "sleep", lambda seconds: os.kill(os.getpid(), signal.SIGTERM))
            with pytest.raises(SystemExit):
                engine_processes.watch(os.getpid(), mark, str(folder))
        assert rank.poll() is not None and not folder.exists()
    finally:
        signal.signal(signal.SIGTERM, before)
        rank.kill()
        rank.wait()


def test_output_comes_in_rank_order_and_equal_output_once_and_live_output_ends_in_the_same(notebook):
    cell = "%%ranks\nfor i in range(4):\n    print(f'{i} of rank 0' if rank == 0 else 'x'); time.sleep(0.8)"
    quiet = notebook.run(cell)
    notebook.run("import os; os.environ['MANYHANDS_LIVE'] = '1'")
    live = notebook.run(cell)
    notebook.run("os.environ['MANYHANDS_LIVE'] = '0'")
    assert live.text == quiet.text and live.html == quiet.html
    assert quiet.text.splitlines()[:2] == ["rank 0    | 0 of rank 0", "rank 0    | 1 of rank 0"]
    output = notebook.run("%%ranks\nprint('hello', length)")
    assert output.text.splitlines() == ["all ranks | hello 3"]
    output = notebook.run("%%ranks\ntime.sleep(0.1 * (3 - rank))\nprint('even' if rank % 2 == 0 else f'odd {rank}')")
    assert output.text.splitlines() == ["ranks 0, 2 | even", "rank 1     | odd 1", "rank 3     | odd 3"]
    output = notebook.run("%%ranks\nif rank == 2: print('<b> & co')")
    assert output.text.splitlines() == ["rank 2 | <b> & co"]
    assert "&lt;b&gt; &amp; co" in output.html and "word-break:normal" in output.html
    output = notebook.run("%%ranks\nfor i in range(3): print(f'step {i}', end='\\r')\nprint()\nrank * 0")
    assert output.text.splitlines() == ["all ranks | step 2", "all ranks | 0"], "a line that is rewritten"


PAST_PYTHON = """%%ranks 1
import ctypes, faulthandler, multiprocessing, subprocess, sys
print("first")
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]): pass  # it would print when it begins
os.system("echo of a child")
print("then")
subprocess.run(["sh", "-c", "echo of another; echo and its errors >&2"], stdout=sys.stdout)
os.write(2, "written à la main\\n".encode())
ctypes.CDLL(None).puts(b"of C")
ctypes.CDLL(None).fflush(None)
sys.stdout.buffer.write(b"bytes\\n")
other = multiprocessing.get_context("fork").Process(target=print, args=("of a fork",))
other.start(); other.join()
faulthandler.enable(); faulthandler.disable()
print(sys.stdout.fileno(), sys.stderr.fileno())
os.system("echo last")
_ = ctypes.CDLL(None).puts(b"of C, at the end")
"""


def test_what_a_ranks_children_and_c_print_is_in_the_cell_in_its_place(notebook):
    """What a child prints between two cells is in the next one."""
    notebook.run("%%ranks 1\nos.system('(sleep 0.3; echo between two cells) &')")
    time.sleep(1)
    lines = [line.partition(" | ")[2] for line in notebook.run(PAST_PYTHON).text.splitlines()]
    assert lines == [
        "between two cells", "first", "of a child", "then", "of another", "and its errors", "written à la main",
        "of C", "bytes", "of a fork", "1 1", "last", "of C, at the end",
    ]  # fmt: skip


def test_figures_of_a_rank_arrive_as_pictures(notebook):
    output = notebook.run("""%%ranks
        if rank == 1:
            import matplotlib.pyplot as plt
            plt.plot([1, 2])
    """)
    assert len(output.pictures) == 1 and output.error is None
    assert output.text.startswith("rank 1 | shows:"), "one sees whose it is"


def test_the_kernel_reads_what_each_rank_holds(notebook):
    assert notebook.run("hands.pull('rank'), hands[2]['rank']").text.strip() == "([0, 1, 2, 3], 2)"
    assert notebook.run("hands.compare('rank % 2')").text.splitlines() == [
        "rank % 2 differs:", "  ranks 0, 2: int", "  ranks 1, 3: 1, on rank 0 0"
    ]  # fmt: skip


LEARNERS = """%%ranks
def my_reduce(tensor, op="sum", group=None):
    "Reduce as I do."
    return tensor

class Careful(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first_layer = torch.nn.Linear(2, 3)

    @property
    def collective(self):
        dist.barrier()  # hangs: no other rank calls it

    def __dir__(self):
        dist.barrier()

    def __repr__(self):
        dist.barrier()

    def a_method(self):
        "Say a."

careful, only_here, xs = Careful(), torch.ones(2, 3), [torch.ones(4)]
"""


def test_tab_and_shift_tab_know_what_a_rank_holds_and_run_nothing_of_it(notebook):
    assert notebook.run(LEARNERS).error is None
    assert notebook.tab("%%ranks\nonly_") == {"only_here": "instance"}
    assert notebook.tab("%%ranks\nmy_red") == {"my_reduce": "function"}
    assert "all_reduce" in notebook.tab("%%ranks\nif rank:\n    dist.all_re")
    assert {"sum", "shape"} <= set(notebook.tab("%%ranks\nonly_here.s")) and "sum" in notebook.tab("%%ranks\nxs[0].su")
    own = notebook.tab("%%ranks\ncareful.")
    assert own["a_method"] == "function" and {"first_layer", "collective", "parameters"} <= set(own)
    assert "in_features" in notebook.tab("%%ranks\ncareful.first_layer.in_")
    assert notebook.tab("%%ranks\ncareful.collective.") == {}
    assert notebook.tab("%%ranks\nmy_reduce(xs[0], gro")["group="] == "param"
    assert {"hands", "length"} <= set(notebook.tab("%%ranks\n")), "and what the kernel knows"
    assert "print" in notebook.tab("%%ranks\npri")
    assert list(notebook.tab("%%ranks --t")) == ["--timeout", "--trace"]
    assert list(notebook.tab("%%ranks 0,2 ")) == ["--timeout", "--all", "--trace"]
    assert "only_here" not in notebook.tab("only_"), "a cell of the kernel"
    text = notebook.shift_tab("%%ranks\ny = my_reduce")
    assert text.startswith("Signature: my_reduce(tensor, op='sum', group=None)") and "Reduce as I do." in text
    assert "Shape:     (2, 3)\nDtype:     torch.float32" in notebook.shift_tab("%%ranks\nonly_here")
    assert "Say a." in notebook.shift_tab("%%ranks\ncareful.a_method")
    assert notebook.shift_tab("%%ranks\ncareful").startswith("Type:      Careful")
    assert "Type:      property" in notebook.shift_tab("%%ranks\ncareful.collective")
    assert "--timeout SECONDS" in notebook.shift_tab("%%ranks --time")
    (page,) = notebook.answer(notebook.send("%%ranks?"))["payload"]
    assert notebook.shift_tab("%%ranks --time") in page["data"]["text/plain"], "%%ranks? shows the same"
    assert notebook.run("%%ranks\ndist.barrier()").error is None, "no rank waits anywhere"


def test_a_question_mark_shows_in_a_cell_of_ranks_what_it_shows_elsewhere(notebook):
    assert notebook.run("%%ranks\ndef mine(a):\n    'Say so.'").error is None
    for question in ("?mine", "mine?", "print(end='')\n%pinfo mine"):
        assert notebook.run(f"%%ranks\n{question}").text.splitlines() == [
            "all ranks | Signature: mine(a)", "all ranks | Docstring: Say so.", "all ranks | Type:      function"
        ], "once"  # fmt: skip
    assert "all ranks |     'Say so.'" in notebook.run("%%ranks\nmine??").text


def test_tab_and_shift_tab_are_answered_while_ranks_hang_and_a_stopped_rank_leaves_it_to_the_kernel(notebook, tmp_path):
    notebook.run("%%ranks\nonly_here = 1\ndef my_reduce():\n    'Reduce as I do.'")
    running, pids = tmp_path / "running", tmp_path / "pids"
    hang = f"if rank == 3:\n    open({str(running)!r}, 'w').close()\n    while True: time.sleep(0.01)\ndist.barrier()"
    cell = notebook.send(f"%%ranks\n{hang}")
    wait_until(running.exists)
    assert "only_here" in notebook.tab("%%ranks\nonly_")
    assert "Reduce as I do." in notebook.shift_tab("%%ranks 3\nmy_reduce")
    os.kill(notebook.pid, signal.SIGINT)
    assert notebook.collect(cell).error[1] == "interrupted: the ranks were freed"
    notebook.run(f"import os, signal; open({str(pids)!r}, 'w').write(str(hands.control.pids[0]))")
    os.kill(int(pids.read_text()), signal.SIGSTOP)
    try:
        assert "only_here" not in notebook.tab("%%ranks\n") and "length" in notebook.tab("%%ranks\nlen")
        assert "my_reduce" not in notebook.shift_tab("%%ranks\nmy_reduce")
    finally:
        os.kill(int(pids.read_text()), signal.SIGCONT)
    assert "only_here" in notebook.tab("%%ranks\nonly_")


def test_a_rank_that_dies_while_it_is_asked_leaves_the_answer_to_the_kernel(tmp_path, root):
    """Its thread is held; the kernel waits as long for its answer as for its end."""
    with Kernel(tmp_path, root) as kernel:
        kernel.start(2)
        kernel.run(JOIN)
        kernel.run(
            """%%ranks 0
            import threading
            from manyhands.notebook import names
            def held(*_): os.kill(os.getpid(), signal.SIGKILL)
            names.complete, only_here = held, 1
            """
        )
        kernel.run("from manyhands.notebook import rank_pool; rank_pool.LOOK_UP_S = 600")
        assert "only_here" not in kernel.tab("%%ranks\n")
        assert kernel.run("%%ranks\n1").error[0] in ("CellFailed", "RanksError")


def test_cell_magics_inside_a_cell_of_ranks_run_and_their_errors_fail_it(notebook, tmp_path):
    output = notebook.run("%%ranks\n%%time\ntotal = rank * 0 + 7\ntotal")
    assert output.error is None and 1 <= output.text.count("Wall time") <= 4 and "| 7" in output.text
    _, value, lines = notebook.run("%%ranks\n%%time\nx = 1\n\nraise ValueError('no luck')").error
    assert value == "rank 0: ValueError: no luck" and lines.count("same error") == 3
    assert "the cell, line 5" in lines and "raise ValueError" in lines, "lines are counted as the learner sees them"
    _, value, lines = notebook.run("%%ranks\n\n%%capture kept\nprint('a')\n1 / 0").error
    assert value == "rank 0: ZeroDivisionError: division by zero" and "the cell, line 5" in lines
    assert notebook.run("%%ranks\n%%capture kept\n%%time\nprint('quiet', rank * 0)").text == ""
    assert "quiet 0" in notebook.run("%%ranks\nprint(kept.stdout)").text
    assert notebook.run("%%ranks\n%%time 3\n4").error[1].startswith("rank 0: UsageError: Can't use statement")
    assert notebook.run("%%ranks\n%%no_such\n1").error[1].startswith("rank 0: UsageError: Cell magic `%%no_such`")
    assert notebook.run("%%ranks\nif rank == 2:\n    %no_such").error[1].startswith("rank 2: UsageError: Line magic")
    group = (
        "import asyncio\nasync with asyncio.TaskGroup() as tasks:\n    tasks.create_task(asyncio.to_thread(int, 'x'))"
    )
    assert notebook.run(f"%%ranks\n{group}").error[1].startswith("rank 0: ExceptionGroup"), "IPython only prints it"
    path = tmp_path / "written.txt"
    assert notebook.run(f"%%ranks 1-3\n%%writefile -a {path}\na line").text.startswith("rank 1 | Writing")
    assert path.read_text() == "a line\n", "once on a node, as all ranks see it"
    output = notebook.run("%%ranks\n%%time\nsqrt(4)")
    assert "sqrt" in output.text.splitlines()[0], "what the lesson defines comes by itself"


def test_timeit_around_a_collective_ends_as_the_first_rank_chooses_for_all(notebook):
    cell = "x = torch.ones(1)\n%timeit -o -q time.sleep(0.002 * rank); dist.all_reduce(x)"
    assert notebook.run(f"%%ranks\n{cell}").error is None
    output = notebook.run("%%ranks\n%%timeit -r 2 -v timed\ntime.sleep(0.3 * (rank == 3)); dist.all_reduce(x)")
    assert output.error is None and output.text.count("per loop") == 4
    assert notebook.run("hands[0]['timed'].loops == hands[3]['timed'].loops").text.strip() == "True"
    assert "per loop" in notebook.run("%%ranks\nif rank == 2:\n    %timeit -r 1 time.sleep(0.1)").text, "one alone"
    assert "per loop" in notebook.run("%%ranks 1,3\n%timeit -r 1 time.sleep(0.1)").text


def test_a_cell_awaits_and_one_that_hangs_there_is_named_and_freed(notebook):
    output = notebook.run("%%ranks\nimport asyncio\nawait asyncio.sleep(0.01)\ny = await asyncio.sleep(0, rank * 0)\ny")
    assert output.error is None and output.text == "all ranks | 0\n"
    notebook.run("%%ranks\nlater = asyncio.create_task(asyncio.sleep(0.01, 'done'))\nawait asyncio.sleep(0)")
    assert notebook.run("%%ranks\nawait later").text == "all ranks | 'done'\n", "tasks go on in the next cell"
    began = "async def stuck():\n    await asyncio.sleep(600)\n"
    lines = notebook.run(
        f"%%ranks --timeout 2\nif rank == 1:\n    {began.replace(chr(10), chr(10) + '    ')}\n    await stuck()"
    ).error[2]
    assert (
        "rank 1: waiting in sleep, line 4: await asyncio.sleep(600)" in lines and "variables are kept" in lines.lower()
    )
    assert notebook.run("%%ranks\nawait asyncio.sleep(0, 3)").text == "all ranks | 3\n"


@pytest.mark.parametrize("package", ["tqdm", "tqdm.auto", "tqdm.notebook"])
def test_a_progress_bar_moves_while_the_cell_runs_and_its_last_line_is_stored(notebook, package):
    notebook.run("import os; os.environ['MANYHANDS_LIVE'] = '1'")
    begin = f"%%ranks\nfrom {package} import tqdm, trange\n"
    output = notebook.run(f"{begin}for _ in tqdm(range(40), desc=f'bar {{rank}}'): time.sleep(0.1)\nprint('end')")
    notebook.run("os.environ['MANYHANDS_LIVE'] = '0'")
    moved = {found[1] for text in output.live[:-1] if (found := re.search(r"bar 0: +(\d+)%", text))}
    assert len(moved) >= 3 and moved <= {str(percent) for percent in range(101)}, output.live
    stored = [line.partition(" | ")[2] for line in output.text.splitlines()]
    assert [line[: line.index("|")] for line in stored[::2]] == [f"bar {rank}: 100%" for rank in range(4)]
    assert stored[1::2] == ["end"] * 4
    nested = "for _ in trange(3, desc='outer'):\n    for _ in trange(4, desc='inner', leave=False): pass\nprint('end')"
    lines = notebook.run(f"%%ranks 0\nfrom {package} import tqdm, trange\n{nested}").text.splitlines()
    assert len(lines) == 2 and "outer: 100%" in lines[0] and lines[1].endswith("| end")


def test_bars_of_a_long_cell_are_one_line_each_and_leave_nothing_out(notebook):
    """Each state is text: of 300,000 characters all but the last states would be cut out of the middle."""
    cell = """
        from tqdm.auto import tqdm
        with tqdm(total=1500, desc="first", mininterval=0, position=0) as first:
            with tqdm(total=1500, desc="second", mininterval=0, position=1) as second:
                for _ in range(1500): first.update(); second.update()
        print("end")
    """
    lines = notebook.run(f"%%ranks 0\n{textwrap.dedent(cell)}").text.splitlines()
    assert [re.search(r"\w+(?=: 100%)|end|$", line)[0] for line in lines if line.partition("|")[2].strip()] == [
        "second", "first", "end"
    ], "in the order in which they end, as in a terminal"  # fmt: skip


def test_a_widget_of_a_rank_is_one_sentence_and_a_display_that_is_updated_is_stored_once(notebook):
    output = notebook.run("%%ranks\nimport ipywidgets\nipywidgets.IntSlider(3)")
    assert output.error is None and output.text.startswith("all ranks | A widget of a rank is not connected")
    cell = "from IPython.display import display\nshown = display('0 of 2', display_id=True)\nshown.update('2 of 2')"
    assert notebook.run(f"%%ranks\n{cell}").text == "all ranks | '2 of 2'\n"


def test_an_error_shows_one_traceback_with_the_lines_of_the_cell_and_where_the_others_are(notebook):
    output = notebook.run("""%%ranks
        x = torch.ones(2)
        if rank == 1:
            raise ValueError("no luck")
        if rank != 2:
            dist.all_reduce(x)
    """)
    name, value, lines = output.error
    assert (name, value) == ("CellFailed", "rank 1: ValueError: no luck")
    assert lines.count("Traceback") == 1 and "the cell, line 4" in lines
    assert "rank 0: waiting in all_reduce, line 6: dist.all_reduce(x)" in lines
    assert "rank 2: done" in lines
    assert "Variables are kept" in lines
    assert notebook.run("%%ranks\ny = torch.ones(1); dist.all_reduce(y); say(y)").text == "all ranks | tensor([4.])\n"


def test_a_name_that_is_not_defined_is_said_once_with_whose_it_is_and_which_cell_uses_it(notebook):
    _, value, lines = notebook.run("%%ranks\nundefined_name").error
    assert value.startswith("rank 0: NameError") and lines.count("same error") == 3
    assert notebook.run("%%ranks\n# first\ndef uses_it():\n    return weight").error is None
    lines = " ".join(notebook.run("%%ranks\nuses_it()").error[2].split())
    assert "the cell, line 2" in lines and "an earlier cell, line 4" in lines
    assert 'weight is defined below "And weigh it": run the cells there first.' in lines


def test_ranks_that_stay_silent_are_named_and_freed_at_the_time_out(notebook):
    began = time.monotonic()
    output = notebook.run("""%%ranks --timeout 2
        print("before")
        if rank == 3:
            while True: time.sleep(0.01)
        dist.barrier()
    """)
    assert time.monotonic() - began < 40
    assert output.text.splitlines() == ["all ranks | before"], output.text
    assert "did not end within 2 s" in output.error[1]
    assert "rank 0: waiting in barrier, line 5" in output.error[2]
    assert "rank 3: " in output.error[2] and "line 4: while True: time.sleep(0.01)" in output.error[2]
    assert notebook.run("%%ranks\ndist.barrier(); say('again')").text == "all ranks | again\n"


def test_the_stop_button_frees_a_hung_cell(notebook, tmp_path):
    there = tmp_path / "rank 0 is there"
    question = notebook.send(
        f"%%ranks\nif rank == 0: open({str(there)!r}, 'w').close(); dist.recv(torch.ones(1), src=1)"
    )
    wait_until(there.exists)
    time.sleep(0.5)  # from the file to the next call
    notebook.manager.interrupt_kernel()
    output = notebook.collect(question, timeout_s=60)
    assert "interrupted" in output.error[1]
    assert "rank 0: waiting in recv" in output.error[2]
    assert notebook.run("%%ranks\ndist.barrier(); say('again')").text == "all ranks | again\n"


ANSWERS = """%%ranks
from manyhands.checks import collectives as checks
kept = 42
def loops(*_):
    while True: time.sleep(0.01)
def right(points, count):
    share = torch.tensor(points // 4 + (rank < points % 4))
    hits = torch.tensor(count(share, rank))
    dist.reduce(hits, 0)
    return 4 * hits.item() / points if rank == 0 else None
"""


def test_an_answer_to_a_check_that_never_ends_is_freed_and_the_variables_are_kept(notebook):
    assert notebook.run(ANSWERS).error is None
    stopped = notebook.run("%%ranks --timeout 2\nchecks.estimate_pi(loops, ranks)")
    assert "did not end within 2 s" in stopped.error[1]
    after = notebook.run("%%ranks\nchecks.estimate_pi(right, ranks); say(kept)")
    assert after.error is None, after.error
    assert "(pi with one reduce): correct" in after.text and "42" in after.text


def test_a_cell_runs_on_the_named_ranks_only_and_the_others_wait_for_the_next_one(notebook):
    assert notebook.run("%%ranks\nhere = 0").error is None
    assert notebook.run("%%ranks 0,2\nhere = 1; print('I ran')").text == "ranks 0, 2 | I ran\n"
    assert notebook.run("hands.pull('here')").text.strip() == "[1, 0, 1, 0]"
    assert notebook.run("%%ranks\ndist.barrier(); say('met')").text == "all ranks | met\n"
    assert notebook.run("%%ranks 4\nhere = 2").error[1].startswith("rank 4 cannot run this cell")
    _, value, lines = notebook.run("%%ranks 3\n1 / 0").error
    assert value == "rank 3: ZeroDivisionError: division by zero" and "rank 0: does not run this cell" in lines


def test_some_ranks_that_enter_a_collective_of_all_are_named_at_the_time_out_and_freed(notebook):
    output = notebook.run("%%ranks 0,2 --timeout 2\nkept = 5\ndist.all_reduce(torch.ones(1))")
    lines = " ".join(output.error[2].split())
    assert "did not end within 2 s" in output.error[1]
    assert "rank 0: waiting in all_reduce, line 3: dist.all_reduce(torch.ones(1)) rank 1: does not run this" in lines
    assert "Only ranks 0, 2 ran this cell. A collective ends once all ranks of its group have called it" in lines
    assert notebook.run("%%ranks 0,2\nsay(kept)").text == "ranks 0, 2 | 5\n"
    assert notebook.run("%%ranks\ndist.barrier(); say('again')").text == "all ranks | again\n"


def test_a_trace_shows_who_waited_for_whom_in_a_chart_in_lines_and_in_a_file(notebook, tmp_path):
    notebook.run(f"import os; os.environ['MANYHANDS_OUTPUTS'] = {str(tmp_path)!r}")
    output = notebook.run("""%%ranks --trace
        if rank == 2:
            time.sleep(1)
        dist.all_reduce(torch.ones(250_000))
        say("summed")
    """)
    assert output.error is None and len(output.pictures) == 1
    assert output.text.startswith("all ranks | summed\n")
    waited = re.search(r"^rank 0: .*, waiting ([\d.]+) s \(.* s for rank 2\); 1 all_reduce; 1 MB$", output.text, re.M)
    assert 0.9 <= float(waited[1]) < 5  # longer where the machine is busy
    (path,) = (tmp_path / "traces").iterdir()
    assert str(path) in output.text and "waiting for rank 2" in path.read_text()


def test_a_trace_of_a_cell_that_hangs_says_for_whom_the_ranks_wait(notebook, tmp_path):
    notebook.run(f"import os; os.environ['MANYHANDS_OUTPUTS'] = {str(tmp_path)!r}")
    output = notebook.run("%%ranks --trace --timeout 2\nif rank != 3: dist.barrier()")
    assert "did not end within 2 s" in output.error[1]
    assert re.search(r"^rank 0: .*, waiting [\d.]+ s \([\d.]+ s for rank 3\); 1 barrier; 0 bytes$", output.text, re.M)
    assert notebook.run("%%ranks\ndist.barrier(); say('again')").text == "all ranks | again\n"


def test_a_cell_that_prints_15_000_lines_keeps_the_ranks_and_says_what_it_leaves_out(notebook):
    notebook.run("os.environ['MANYHANDS_LIVE'] = '1'")
    cell = "kept = 7\nfor i in range(15_000): print(f'line {i} of {rank}')"
    short = notebook.run(f"%%ranks\n{cell}").text
    assert "characters left out" in short and "%%ranks --all" in short and len(short.splitlines()) < 40_000
    assert [f"line 14999 of {rank}" in short for rank in range(4)] == [True] * 4
    whole = notebook.run(f"%%ranks --all --timeout 300\nif rank == 0:\n    {cell.split(chr(10))[1]}").text
    notebook.run("os.environ['MANYHANDS_LIVE'] = '0'")
    assert len(whole.splitlines()) == 15_000 and "left out" not in whole
    assert notebook.run("%%ranks\ndist.barrier(); say(kept)").text == "all ranks | 7\n"


def test_a_rank_keeps_nothing_of_what_its_cells_have_printed(notebook):
    """IPython would keep two objects of every print, in which the garbage collector then looks for garbage."""
    prints = (
        "%%ranks 1\nimport gc\nfor i in range(5000): print(i)\ngc.collect()\nprint('objects', len(gc.get_objects()))"
    )
    counts = [int(re.search(r"objects (\d+)", notebook.run(prints).text)[1]) for _ in range(2)]
    assert counts[1] - counts[0] < 1000


def test_what_needs_a_person_is_refused_where_there_is_none(notebook):
    for call, why in (
        ("breakpoint()", "breakpoint() needs somebody who watches, and nobody watches this run"),
        ("input('lr? ')", "input() needs a keyboard, and a rank has none"),
    ):
        _, said, lines = notebook.run(f"%%ranks\n{call}").error
        assert why in said
        assert "engine.py" not in lines and call in lines


def test_exit_ends_the_cell_and_not_the_rank(notebook):
    assert notebook.run("%%ranks\nkept = 6").error is None
    for word in ("exit()", "quit()"):
        _, said, lines = notebook.run(f"%%ranks\nif rank == 1:\n    {word}\n    print('rank 1 goes on')").error
        assert said.startswith("rank 1: RuntimeError: exit() ends only this cell: the rank stays"), said
        assert "engine.py" not in lines and "rank 0: done" in lines
    assert notebook.run("%%ranks\nexit").text.startswith("all ranks | exit() ends only this cell")
    assert notebook.run("%%ranks\nprint(kept)").text == "all ranks | 6\n"
    assert notebook.run("%%ranks\ndist.barrier(); say('all here')").text == "all ranks | all here\n"


@pytest.mark.parametrize("presses", [2, 10])
def test_a_stop_button_that_is_pressed_again_and_again_frees_the_ranks_once_with_all_variables(notebook, presses):
    assert notebook.run("%%ranks\nkept = 8").error is None
    question = notebook.send("""%%ranks
        if rank == 0: dist.all_reduce(torch.ones(1))
        else: time.sleep(60)
    """)
    time.sleep(2)
    for _ in range(presses):
        notebook.manager.interrupt_kernel()
        time.sleep(0.3 if presses == 2 else 0.1)
    name, value, lines = notebook.collect(question, timeout_s=60).error
    assert (name, value) == ("CellFailed", "interrupted: the ranks were freed")
    assert "rank 0: waiting in all_reduce" in lines and ".py" not in lines
    after = notebook.run("%%ranks\nx = torch.ones(1); dist.all_reduce(x); say((kept, x))")
    assert after.error is None and after.text == "all ranks | (8, tensor([4.]))\n"
    question = notebook.send("import time; time.sleep(60)")  # the kernel itself can be interrupted as ever
    time.sleep(1)
    notebook.manager.interrupt_kernel()
    assert notebook.collect(question, timeout_s=30).error[0] == "KeyboardInterrupt"


def test_a_group_of_ones_own_is_one_sentence_that_names_join(notebook):
    for cell in ("leave(); dist.init_process_group('gloo')", "join(quiet=True); dist.init_process_group('gloo')"):
        _, said, lines = notebook.run(f"%%ranks\n{cell}").error
        assert said.startswith("rank 0: ValueError: init_process_group is for scripts: here `from manyhands import")
        assert "Traceback" not in lines and lines.count("same error") == 3
    assert notebook.run(JOIN).error is None


def test_other_users_of_the_node_cannot_reach_the_ranks(notebook):
    assert listening_addresses(notebook) == {"127.0.0.1"}, "nothing listens beyond loopback"
    store = notebook.run("%%ranks\nif rank == 0: say(os.environ['MANYHANDS_STORE'])").text.split(" | ")[1].strip()
    assert os.path.isfile(store), "a port would be open to all users"
    assert os.stat(os.path.dirname(store)).st_mode & 0o077 == 0


@pytest.mark.full  # MPI waits with all of a core
def test_ranks_hung_in_mpi_are_restarted_and_the_cell_says_so(notebook):
    output = notebook.run("%%ranks --timeout 2\nif rank == 0: mpi_world().recv(source=1)")
    assert "All ranks were restarted (rank 0 could not be woken" in output.error[2]
    assert "rank 0: " in output.error[2] and "mpi_world().recv(source=1)" in output.error[2]
    after = notebook.run("%%ranks\nprint(length)").text
    assert "the start cells were run again" in after and after.endswith("all ranks | 3\n")
    assert notebook.run(JOIN).error is None


def test_a_killed_rank_is_named_and_the_next_cell_has_fresh_ranks_with_what_start_defines(notebook):
    began = time.monotonic()
    output = notebook.run("%%ranks\nif rank == 2: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()")
    assert time.monotonic() - began < 40
    assert output.error[1].startswith("rank 2 died")
    assert ": lost its connection to a rank that died" in output.error[2]
    assert "All ranks were restarted: their variables are gone." in " ".join(output.error[2].split())
    assert "all ranks | 3\n" in notebook.run("%%ranks\nprint(length)").text


def test_a_rank_that_ends_itself_is_told_from_one_that_died_and_its_children_end_as_ever(notebook):
    notebook.run(JOIN)
    children = notebook.run("""%%ranks
        import multiprocessing
        child = os.fork()
        if child == 0: os._exit(3)
        other = multiprocessing.get_context("fork").Process(target=os._exit, args=(4,))
        other.start(); other.join()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), other.exitcode)
    """)
    assert children.error is None and children.text == "all ranks | 3 4\n"
    _, said, lines = notebook.run("%%ranks\nif rank == 1: os._exit(3)\ndist.barrier()").error
    assert said == "rank 1 ended itself (os._exit(3))" and "rank 1: died" in lines


def test_a_parameter_out_of_its_range_is_refused_and_stopping_leaves_no_process(notebook):
    said = notebook.start(length=-1).error[1]
    assert "length" in said and "-1" in said and ">= 1" in said
    mark = notebook.mark()
    notebook.run("hands.stop()")
    assert left_behind(mark, 30) == []


def test_stopping_leaves_no_shared_memory_of_mpi(tmp_path, root, real_python):
    with Kernel(tmp_path, root) as kernel:
        kernel.start(n_ranks=2)
        maps = "%%ranks\nimport re\nprint(set(re.findall(r'/dev/shm/mpich_shm_\\w+', open('/proc/self/maps').read())))"
        segments = re.findall(r"/dev/shm/\w+", kernel.run(maps).text)
        assert segments and all(map(os.path.exists, segments))
        kernel.run("hands.stop()")
        assert not any(map(os.path.exists, segments)), "4 MiB would stay after each start"


def test_two_notebooks_run_side_by_side_and_kill_9_of_a_kernel_leaves_no_process(tmp_path, root):
    with Kernel(tmp_path / "a", root) as a, Kernel(tmp_path / "b", root, {"MANYHANDS_MPI": "off"}) as b:
        assert "2 ranks on this machine (MPI)" in a.start(n_ranks=2).text
        assert "2 ranks on this machine (no MPI)" in b.start(n_ranks=2).text
        questions = [k.send(JOIN + "\nx = torch.ones(1); dist.all_reduce(x); say(x)") for k in (a, b)]
        for kernel, question in zip((a, b), questions, strict=True):
            assert kernel.collect(question).text == "all ranks | tensor([2.])\n"
        mark, other = a.mark(), b.mark()
        b.send("%%ranks\nif rank == 0: dist.recv(torch.ones(1), src=1)")  # it hangs while its kernel dies
        time.sleep(0.5)
        os.kill(b.pid, signal.SIGKILL)
        assert left_behind(other, 30) == []
        assert a.run("%%ranks\ndist.barrier(); say('still here')").text == "all ranks | still here\n"
    assert left_behind(mark, 30) == []


def test_on_a_login_node_two_ranks_start_without_mpi_and_end_when_they_are_idle(tmp_path, root):
    """Before they start, as after a restart of the kernel, and when they have ended, a cell says what to do."""
    environ = {"MANYHANDS_IDLE_S": "6", "MANYHANDS_LOGIN_NODE": "1", "PYTHONPATH": str(root / "scripts")}
    with Kernel(tmp_path, root, environ) as kernel:
        assert kernel.run("%%ranks\nprint(1)").error[:2] == (
            "RanksError",
            "no ranks yet: run the cell with start_ranks(...) at the top, then those of Start below it. "
            "In a notebook of your own: %load_ext manyhands, then %ranks 4",
        )
        text = kernel.start(n_ranks=4).text
        assert "2 ranks, without MPI, as this is a login node (MANYHANDS_LOGIN_NODE says so)" in text
        output = kernel.run(JOIN + "\nx = torch.ones(1); dist.all_reduce(x); say(f'{rank} of 2, {mpi_world()}, {x}')")
        assert output.text.splitlines() == [f"rank {rank} | {rank} of 2, None, tensor([2.])" for rank in range(2)]
        mark = kernel.mark()
        assert left_behind(mark, 40) == []
        assert "idle" in kernel.run("%%ranks\nprint(1)").error[1]


def plain_kernelspec(folder):
    """A kernel that knows nothing of the course."""
    folder.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (folder / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "plain", "language": "python"}))


def test_load_ext_manyhands_gives_ranks_to_any_notebook(tmp_path, root, monkeypatch):
    monkeypatch.setattr(notebook_kernel, "write_kernelspec", plain_kernelspec)
    with Kernel(tmp_path, root, {"PYTHONPATH": str(root / "scripts")}) as kernel:
        assert "not found" in kernel.run("%ranks 2").text
        assert kernel.run("%load_ext manyhands").error is None
        assert kernel.run("%%ranks\n1").error[1].endswith("%load_ext manyhands, then %ranks 4")
        assert "takes the number of ranks to start, or stop, not 'two'" in kernel.run("%ranks two").error[1]
        assert "2 ranks on this machine" in kernel.run("%ranks 2").text
        assert kernel.run(JOIN + "x = torch.ones(1); dist.all_reduce(x); say(x)").text == "all ranks | tensor([2.])\n"
        assert kernel.run("hands.compare('x')").text.startswith("x is equal on all ranks: tensor of shape (1,)")
        died = kernel.run("%%ranks 1\nos.kill(os.getpid(), signal.SIGKILL)").error[2]
        assert "Run %ranks 2, then your cells again" in " ".join(died.split())
        assert kernel.run("%%ranks\n1").error[1] == ("rank 1 died: %ranks 2 starts new ones; then run your cells again")
        kernel.run("%ranks 3")
        mark = kernel.mark()
        kernel.run("%ranks stop")
        assert left_behind(mark, 30) == []
