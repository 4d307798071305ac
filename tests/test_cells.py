"""A cell on a rank and on all of them, without starting any: whose error it is, how long it may take, what follows."""

import types

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from manyhands.launch import join, launchers
from manyhands.launch import ranks as who
from manyhands.notebook import cell, engine, magic


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
    result = engine.run_cell("print('queued')", 1, live=False)
    assert result["items"] == [("text", "queued\n")]
    assert result["error"]["value"] == "CUDA error: device-side assert triggered on cuda"
    assert engine.run_cell("1 / 0", 2, live=False)["error"]["name"] == "ZeroDivisionError", "the first error stays"
    a_rank_on("cpu", broken_device)
    assert engine.run_cell("pass", 3, live=False)["error"] is None, "a CPU has nothing to wait for"


def test_a_rank_that_waits_for_its_device_says_so(a_rank_on, monkeypatch):
    seen = []
    a_rank_on("cuda", lambda _: seen.append(engine.where()))
    monkeypatch.setattr(engine.get_ipython(), "user_ns", {})
    engine.run_cell("pass", 1, live=False)
    assert seen == [{"call": "synchronize", "line": 0, "source": ""}]
    assert magic._place(seen[0]) == "waiting in synchronize"


class Pool:
    """Two ranks that did what they are told to have done; they note how they were treated."""

    def __init__(self):
        self.treated, self.joined = [], True

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
    pool.world_size = 2
    ended = cell.Cell(pool)
    ended.done = {r: {"items": [], "error": {"name": name, "value": value, "traceback": []}} for r in range(2)}
    ended.errors = [1, 0]
    ended._recover()
    assert pool.treated == cure
    assert ("variables are gone" in magic._outlook(ended)) == (cure == ["restart"])


def test_a_cell_has_five_minutes_until_the_ranks_have_met_and_one_afterwards(monkeypatch):
    given = []

    class Started(Pool):
        def run(self, source, timeout_s, *_):
            given.append(timeout_s)
            raise KeyboardInterrupt

    pool = Started()
    monkeypatch.setattr(magic, "current_ranks", lambda: pool)
    for pool.joined, line in ((False, ""), (True, ""), (False, "--timeout 7")):
        with pytest.raises(KeyboardInterrupt):
            magic.ranks(line, "pass")
    assert given == [300, 60, 7]


def test_the_group_of_a_notebook_is_more_patient_than_any_cell(monkeypatch):
    given = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, timeout, **__: given.append(timeout))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda _: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(join, "store_for", lambda *_: None)
    seen = {"host": "n1", "local_rank": 0, "cpus": [0], "quota": 1.0, "omp_threads": ""}
    monkeypatch.setattr(join, "_agree", lambda *_: ([seen], {"kind": "cpu", "indices": [0], "reason": ""}))
    for launcher in ("notebook", "alone"):
        monkeypatch.setattr(join, "resolve", lambda launcher=launcher: launchers.RankInfo(launcher, 0, 1, 0, 1))
        join._enter("02_collectives", "auto", 60, quiet=True)
    assert [patience.total_seconds() for patience in given] == [3600, 60]
