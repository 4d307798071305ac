"""A cell on a rank and on all of them, without starting any: whose error it is, how long it may take, what follows."""

import pickle
import re
import types

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from manyhands.course.pairs import for_some_ranks
from manyhands.course.ranks_line import CellOptions
from manyhands.launch import launchers, settings
from manyhands.launch import ranks as who
from manyhands.launch.allocation import RanksError
from manyhands.notebook import cell, engine, engine_processes, magic


@pytest.fixture
def a_rank_on(monkeypatch):
    """a_rank_on(kind): this process is a rank whose device is of that kind and has this `synchronize`."""
    monkeypatch.setattr(engine, "get_ipython", InteractiveShell.instance)
    monkeypatch.setattr(engine.rendezvous, "begin_cell", lambda number: None)
    before = who.joined()

    def become(kind, synchronize):
        device = types.SimpleNamespace(type=kind)
        who.remember(who.Ranks(0, 1, 0, 1, device, "cpu:gloo,cuda:nccl", "notebook", "n1", "02_collectives"))
        monkeypatch.setattr(torch, "get_device_module", lambda _: types.SimpleNamespace(synchronize=synchronize))

    yield become
    who.remember(before)


def broken_device(device):
    raise RuntimeError(f"CUDA error: device-side assert triggered on {device.type}")


def test_what_a_device_still_does_when_the_lines_are_done_fails_in_that_cell(a_rank_on):
    a_rank_on("cuda", broken_device)
    result = engine.run_cell("print('queued')", 1, CellOptions())
    assert result["items"] == [("text", "queued\n")]
    assert result["error"]["value"] == "CUDA error: device-side assert triggered on cuda"
    assert engine.run_cell("1 / 0", 2, CellOptions())["error"]["name"] == "ZeroDivisionError", "the first error stays"
    a_rank_on("cpu", broken_device)
    assert engine.run_cell("pass", 3, CellOptions())["error"] is None, "a CPU has nothing to wait for"


def recorded(*pieces, whole=False):
    recorder = engine.Recorder(whole)
    for piece in pieces:
        recorder.write(piece)
    ((_, text),) = recorder.result()["items"]
    return recorder, text


def test_of_100_000_lines_both_ends_are_kept_and_the_rest_is_counted():
    lines = [f"line {i}\n" for i in range(100_000)]
    recorder, text = recorded(*lines)
    assert len(recorder.items[0][1].pieces) < 40_000, "memory is bounded, too"
    first, left_out, last = re.split(
        r"\n\[\.\.\. ([\d,]+) characters left out: %%ranks --all shows them \.\.\.\]\n", text
    )
    assert first.startswith("line 0\nline 1\n") and last.endswith("line 99998\nline 99999\n")
    assert min(len(first), len(last)) >= engine.KEPT_CHARS > len(text) / 5
    assert len(first) + int(left_out.replace(",", "")) + len(last) == len("".join(lines))
    assert recorder.tail().split("\n")[-3:] == ["line 99998", "line 99999", ""]
    assert recorded(*lines, whole=True)[1] == "".join(lines)
    assert "left out" not in recorded("x" * engine.KEPT_CHARS, "y" * 3 * engine.KEPT_CHARS)[1]


def test_of_one_endless_line_both_ends_are_kept():
    _, text = recorded("a" + "x" * 10**6 + "b", "\n")
    assert text.startswith("ax") and text.endswith("xb\n") and "[... 950,002 characters left out" in text


def test_a_hub_says_how_patient_its_notebooks_are(monkeypatch):
    monkeypatch.setenv("MANYHANDS_PATIENCE", "7.5")
    assert settings.patience() == 7.5
    monkeypatch.setenv("MANYHANDS_PATIENCE", "much")
    with pytest.raises(launchers.LaunchError, match="invalid MANYHANDS_PATIENCE 'much'"):
        settings.patience()


@pytest.mark.parametrize("line", ["one", "2-1", "-1", "--fast", "--time 5", "--timeout soon", "--timeout", "'"])
def test_the_magic_refuses_what_it_does_not_know_in_a_sentence(monkeypatch, line):
    monkeypatch.setattr(magic, "current_ranks", Pool)
    with pytest.raises(magic.CellFailed, match="takes only ranks .* --timeout SECONDS .*, not ") as refused:
        magic.ranks(line, "pass")
    assert " ".join(refused.value._render_traceback_()) == str(refused.value)


@pytest.mark.parametrize(
    ("line", "ranks"),
    [("", None), ("2", (2,)), ("0,2", (0, 2)), ("2, 0 2", (0, 2)), ("1-3 --timeout 5", (1, 2, 3)), ("--all 0", (0,)),
     ("0 --timeout 5 2", (0, 2)), ("--timeout 5  # 0,2", None)],
)  # fmt: skip
def test_a_line_means_the_same_to_the_magic_and_to_the_pairs_of_notebook_and_script(line, ranks):
    assert magic._options(line, 60, 4).ranks == ranks
    assert for_some_ranks(f"%%ranks {line}") == for_some_ranks(f"# %%ranks {line}") == (ranks is not None)


def test_what_a_line_asks_for_comes_whole_to_the_ranks():
    options = magic._options("--trace 1 --all --timeout 5", 60, 4)
    assert options == CellOptions(timeout_s=5, ranks=(1,), whole=True, trace=True)
    sent = []

    class View:
        def apply_async(self, function, *given, **roles):
            sent.append(pickle.loads(pickle.dumps(given))[2])
            return types.SimpleNamespace(ready=lambda: True, get=lambda timeout: {"items": [], "error": None})

    pool = types.SimpleNamespace(
        world_size=4, nodes=["n1"] * 4, views=[View()] * 4, next_cell=lambda: 1,
        control=types.SimpleNamespace(stopped={}, dead=set(), ended={}),
    )  # fmt: skip
    ended = cell.Cell(pool, options)
    ended.run("pass")
    assert sent == [options] and sorted(ended.done) == [1] and ended.limit.seconds == 5


def test_a_rank_that_is_not_there_is_refused_before_any_rank_runs_the_cell(monkeypatch):
    pool = Pool()
    pool.world_size = 4
    monkeypatch.setattr(magic, "current_ranks", lambda: pool)
    with pytest.raises(magic.CellFailed) as refused:
        magic.ranks("0,4-5", "pass")
    assert str(refused.value) == "ranks 4-5 cannot run this cell: this notebook has only ranks 0-3"


class Pool:
    """Two ranks that did what they are told to have done; they note how they were treated."""

    world_size, lesson = 2, "02_collectives"

    def __init__(self):
        self.treated, self.joined, self.control = [], True, types.SimpleNamespace()

    def rejoin(self):
        self.treated.append("rejoin")
        return True

    def restart(self, quiet):
        self.treated.append("restart")


@pytest.mark.parametrize(
    ("name", "value", "cure"),
    [
        ("ValueError", "no luck", []),
        ("RuntimeError", "Connection closed by peer [127.0.0.1]:4711", ["rejoin"]),
        ("AcceleratorError", "CUDA error: device-side assert triggered", ["restart"]),
        ("DistBackendError", "NCCL error in: NCCLUtils.cpp:94, unhandled system error", ["restart"]),
        ("RuntimeError", "HIP error: an illegal memory access was encountered", ["restart"]),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB", []),
    ],
)
def test_ranks_that_lost_their_device_are_restarted_and_those_that_lost_a_peer_meet_again(name, value, cure):
    pool = Pool()
    ended = cell.Cell(pool, CellOptions())
    ended.done = {r: {"items": [], "error": {"name": name, "value": value, "traceback": []}} for r in range(2)}
    ended.errors = [1, 0]
    ended._recover()
    assert pool.treated == cure
    assert ("variables are gone" in magic._outlook(ended)) == (cure == ["restart"])


def test_a_cell_has_five_minutes_until_the_ranks_have_met_and_one_afterwards(monkeypatch):
    given = []

    class Started(Pool):
        def catch_up(self, source, ranks):
            return ""

        def start_cells(self, cell):
            return ""

        def run(self, source, options, *_):
            given.append(options.timeout_s)
            raise KeyboardInterrupt

    pool = Started()
    monkeypatch.setattr(magic, "get_ipython", lambda: types.SimpleNamespace(transform_cell=str))
    monkeypatch.setattr(magic, "current_ranks", lambda: pool)
    for pool.joined, line in ((False, "# slow"), (True, ""), (False, "--timeout 7")):
        with pytest.raises(KeyboardInterrupt):
            magic.ranks(line, "pass")
    assert given == [300, 60, 7]


def test_a_cell_that_hangs_says_from_ten_seconds_on_who_is_where_and_how_to_stop_it(monkeypatch):
    shown = []
    monkeypatch.setattr(magic, "display", lambda page, **_: shown.append(page) or types.SimpleNamespace(update=update))

    def update(page, **_):
        shown.append(page)

    line = {"call": "recv", "line": 4, "source": "dist.recv(x, src=1)"}
    control = types.SimpleNamespace(
        said="", stopped={}, tell=lambda ranks, do: None, where=lambda ranks, timeout_s: {0: line}
    )
    running = cell.Cell(types.SimpleNamespace(world_size=4, control=control), CellOptions())
    running.done, running.limit = dict.fromkeys((2, 1, 3)), engine_processes.TimeLimit(60)
    live = magic._Live(control)
    for elapsed_s in (9.9, 10.1):
        live.last = 0.0
        live.update(elapsed_s, running)
    assert "recv" not in shown[0]["text/plain"]
    assert shown[1]["text/plain"].splitlines()[1:] == [
        "... 10 s",
        "rank 0: waiting in recv, line 4: dist.recv(x, src=1)",
        "ranks 1-3: done (output is shown when all ranks are)",
        "The square button above stops the cell; otherwise it is stopped after 60 s.",
    ]
    assert "rank 0: waiting in recv, line 4" in shown[1]["text/html"]


def test_a_traceback_has_no_colours_and_no_line_that_breaks_within_a_word(a_rank_on):
    """JupyterLab's dark page makes IPython's colours unreadable, and 1000 pixels hold 71 characters."""
    a_rank_on("cpu", None)
    said = "a sentence " * 12 + "with a cure"
    lines = engine.run_cell(f"x = 1\nraise ValueError({said!r})", 1, CellOptions())["error"]["traceback"]
    assert lines[0] == "ValueError: Traceback (most recent call last)" and "the cell, line 2" in lines[1]
    ended = types.SimpleNamespace(
        world_size=2, ranks=[0, 1], dead=[], stuck=[], errors=[], where={}, interrupted=True, restarted=False,
        rejoined=True,
        done={r: {"error": {"name": "ValueError", "value": said, "traceback": []}} for r in range(2)}, first_error=0,
    )  # fmt: skip
    ended.where = {0: {"call": "all_reduce", "line": 9, "source": "dist.all_reduce(x) " * 5}}
    lines += magic.report(ended)[1] + RanksError(said)._render_traceback_()
    long = [line for line in lines if len(line) > 70 and "raise" not in line]
    assert long == [] and not any("\x1b" in line for line in lines)
