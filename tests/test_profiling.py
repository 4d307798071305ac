"""A trace of a few steps from each rank, and on rank 0 where Python's time went."""

import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from manyhands.config.options import from_preset, merged
from manyhands.train.profiling import Profile, windows
from rank_pool import ranks_of, run_on_ranks

RANKS = ranks_of(lesson="train")


def options_of(profile=True, steps=20):
    return merged(from_preset("nano"), {"train": {"steps": steps}, "log": {"profile": profile}}, "test")


def profiled_run(ranks, folder, steps=20, **kwargs):
    """A run whose steps multiply two matrices; what it said."""
    said = []
    a_nn = torch.ones(8, 8)
    with Profile(ranks, options_of(steps=steps), Path(folder), said.append, **kwargs) as profile:
        for _ in range(steps):
            a_nn @ a_nn
            profile.step()
    return said


def traced(folder, rank):
    """(the steps, the number of products) in a rank's trace."""
    events = json.loads((Path(folder) / "profile" / f"rank-{rank}.json").read_text())["traceEvents"]
    names = [event.get("name", "") for event in events if event.get("cat") in ("cpu_op", "user_annotation")]
    return sorted({name for name in names if name.startswith("ProfilerStep")}), names.count("aten::mm")


@pytest.fixture
def no_pyinstrument(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyinstrument", None)


def test_each_rank_leaves_a_trace_of_three_steps(tmp_path):
    said = run_on_ranks(2, profiled_run, str(tmp_path))
    for rank in (0, 1):
        assert traced(tmp_path, rank) == (["ProfilerStep#6", "ProfilerStep#7", "ProfilerStep#8"], 3)
    assert said[1] == [] and "ui.perfetto.dev" in said[0][-1]


def said_below_python(ranks, folder):
    """What a profiled run writes to standard error, also past Python."""
    said = Path(folder) / "said"
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    profiled_run(ranks, folder)
    return said.read_text()


def test_torchs_profiler_writes_nothing_of_its_own_into_the_table_of_steps(tmp_path):
    assert "USDT" not in run_on_ranks(1, said_below_python, str(tmp_path))[0]


def test_without_the_flag_nothing_happens(tmp_path):
    with Profile(RANKS, options_of(profile=False), tmp_path) as profile:
        profile.step()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
@pytest.mark.parametrize("steps, expected", [(1, 1), (2, 2), (4, 3)])
def test_a_short_run_is_traced_too(tmp_path, no_pyinstrument, steps, expected):
    profiled_run(RANKS, tmp_path, steps=steps)
    assert traced(tmp_path, 0)[1] == expected


def test_a_resumed_runs_last_steps_are_traced(tmp_path, no_pyinstrument):
    """Of 20 steps 5 are left."""
    a_nn = torch.ones(8, 8)
    with Profile(RANKS, options_of(), tmp_path, steps=5) as profile:
        for _ in range(5):
            a_nn @ a_nn
            profile.step()
    assert traced(tmp_path, 0)[1] == 3


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 9, 1000])
def test_the_traced_steps_end_within_the_run(steps):
    assert 1 <= sum(windows(steps).values()) <= steps


def test_a_run_that_stops_while_it_is_traced_writes_what_it_has(tmp_path, no_pyinstrument):
    a_nn = torch.ones(8, 8)
    with pytest.raises(KeyboardInterrupt), Profile(RANKS, options_of(), tmp_path, [].append) as profile:
        for step in range(20):
            a_nn @ a_nn
            if step == 7:
                raise KeyboardInterrupt
            profile.step()
    assert traced(tmp_path, 0)[1] == 2


def test_a_folder_that_cannot_be_made_is_said_and_the_run_goes_on(tmp_path):
    (tmp_path / "profile").write_text("in the way")
    (sentence,) = profiled_run(RANKS, tmp_path)
    assert "FileExistsError" in sentence and sentence.endswith("Training goes on")


def test_missing_pyinstrument_is_said_with_its_cure_and_the_trace_is_written(tmp_path, no_pyinstrument):
    said = profiled_run(RANKS, tmp_path)
    assert "pip install -e '.[profile]'" in said[0]
    assert traced(tmp_path, 0)[1] == 3


def test_pyinstruments_report_is_written_as_text_and_as_a_page(tmp_path, monkeypatch):
    class Profiler:
        def __init__(self, interval):
            self.running = False

        def start(self):
            self.running = True

        def stop(self):
            assert self.running

        def output_html(self):
            return "<html>"

        def output_text(self, **kwargs):
            return "2.7 Tensor.backward"

    module = ModuleType("pyinstrument")
    module.Profiler = Profiler
    monkeypatch.setitem(sys.modules, "pyinstrument", module)
    profiled_run(RANKS, tmp_path)
    assert (tmp_path / "profile" / "rank-0.html").read_text() == "<html>"
    assert "Tensor.backward" in (tmp_path / "profile" / "rank-0.txt").read_text()
