"""A trace of a few steps from each rank."""

import json
from pathlib import Path

import pytest
import torch
from manyhands.config.options import from_preset, merged
from manyhands.train.timing import profiled
from rank_pool import ranks_of, run_on_ranks

RANKS = ranks_of(lesson="train")
A_NN = torch.ones(8, 8)


def profiled_run(ranks, folder, steps=20, profile=True, ends_at=None):
    """A run whose steps multiply two matrices; what it said."""
    said = []
    options = merged(from_preset("nano"), {"train": {"steps": steps}, "log": {"profile": profile}}, "test")
    with profiled(ranks, options, Path(folder), said.append, steps) as step_done:
        for step in range(steps):
            A_NN @ A_NN
            if step == ends_at:
                raise KeyboardInterrupt
            step_done()
    return said


def traced(folder, rank):
    """(the steps, the number of products) in a rank's trace."""
    events = json.loads((Path(folder) / "profile" / f"rank-{rank}.json").read_text())["traceEvents"]
    names = [event.get("name", "") for event in events if event.get("cat") in ("cpu_op", "user_annotation")]
    return sorted({name for name in names if name.startswith("ProfilerStep")}), names.count("aten::mm")


def test_each_rank_leaves_a_trace_of_three_steps(tmp_path):
    said = run_on_ranks(2, profiled_run, str(tmp_path))
    for rank in (0, 1):
        assert traced(tmp_path, rank) == (["ProfilerStep#6", "ProfilerStep#7", "ProfilerStep#8"], 3)
    assert said[1] == [] and "ui.perfetto.dev" in said[0][-1]


def test_without_the_flag_nothing_happens(tmp_path):
    assert profiled_run(RANKS, tmp_path, profile=False) == [] and list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
@pytest.mark.parametrize("steps, expected", [(1, 1), (2, 2), (4, 3), (5, 3), (8, 3), (9, 3)])
def test_a_short_run_is_traced_too(tmp_path, steps, expected):
    said = profiled_run(RANKS, tmp_path, steps=steps)
    assert traced(tmp_path, 0)[1] == expected and "perfetto" in said[0]


def test_a_run_that_stops_while_it_is_traced_writes_what_it_has(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        profiled_run(RANKS, tmp_path, ends_at=7)
    assert traced(tmp_path, 0)[1] == 2
