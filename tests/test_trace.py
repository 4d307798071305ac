"""The trace of a run: who waited for whom, how long, and how many bytes; as text, and as a file for Perfetto."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from manyhands.measure import trace, wire
from manyhands.measure.timeline import Timeline

LATE_S = 1.0


def straggler(ranks):
    x, other = torch.ones(250_000), torch.empty(50_000)
    dist.all_reduce(x)
    with wire.watch() as seen, trace.record() as recorder:
        if ranks.rank == 2:
            time.sleep(LATE_S)
        dist.all_reduce(x)
        if ranks.rank == 0:
            dist.send(x[:50_000], 1)
        elif ranks.rank == 1:
            dist.recv(other)  # from anybody
        dist.all_gather_into_tensor(torch.empty(4_000), x[:1_000])
    return recorder.result(), seen.payload_bytes(), {call.op: seen.count(call.op) for call in seen.calls}


@pytest.fixture(scope="module")
def straggled(pool):
    return pool.run(4, straggler)


@pytest.fixture(scope="module")
def timeline(straggled):
    return Timeline({rank: record for rank, (record, _, _) in enumerate(straggled)})


def test_the_ranks_wait_for_a_straggler_as_long_as_it_is_late(timeline):
    slept_s = timeline.rows[2].compute_s  # LATE_S, and more where the machine is busy
    for row in timeline.rows:
        if row.rank == 2:
            assert row.compute_s >= LATE_S and 2 not in row.waits_for
        else:
            assert 0.9 * LATE_S < row.waits_for[2] < 1.1 * slept_s
        assert row.waiting_s == pytest.approx(sum(row.waits_for.values()))


def test_the_bytes_and_calls_of_a_trace_are_those_of_wire(timeline, straggled):
    assert [(row.bytes, row.calls) for row in timeline.rows] == [(n_bytes, calls) for _, n_bytes, calls in straggled]
    assert timeline.rows[0].bytes == 1_000_000 + 200_000 + 16_000


def test_a_message_is_an_arrow_also_where_the_receiver_takes_it_from_anybody(timeline):
    ((arrow),) = timeline.arrows
    assert (arrow.source, arrow.to, arrow.bytes) == (0, 1, 200_000) and arrow.start_s < arrow.end_s


def test_the_file_holds_what_perfetto_draws(timeline, tmp_path):
    events = json.loads(timeline.write(tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {rank: f"rank {rank}" for rank in range(4)}
    waited = [e for e in events if e["ph"] == "X" and e["pid"] == 0 and e["name"] == "waiting for rank 2"]
    assert sum(e["dur"] for e in waited) == pytest.approx(1e6 * timeline.rows[0].waits_for[2])
    begun, ended = ([e for e in events if e["ph"] == ph] for ph in "be")
    assert [e["id"] for e in begun] == [e["id"] for e in ended] and len(begun) == 4 * 2 + 2
    assert {e["args"]["bytes"] for e in begun if e["name"].startswith("all_reduce")} == {1_000_000}
    assert [(e["ph"], e["pid"]) for e in events if e["cat" if "cat" in e else "ph"] == "message"] == [
        ("s", 0),
        ("f", 1),
    ]
    assert all(e["ts"] >= 0 and e.get("dur", 0) >= 0 for e in events if e["ph"] != "M")


def late_backward(ranks):
    """The replicas wait for rank 1 in C++, where DDP waits, and in functional collectives, as DTensor calls them."""
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    model(torch.ones(2, 64)).sum().backward()
    group = dist.group.WORLD
    reduce = dist._functional_collectives.all_reduce
    reduce(torch.ones(1), "sum", group) + 1
    with trace.record() as recorder:
        loss = model(torch.ones(2, 64)).sum()
        if ranks.rank == 1:
            time.sleep(0.5)
        loss.backward()
        dist.barrier()
        if ranks.rank == 0:
            time.sleep(0.5)
        reduce(torch.ones(1), "sum", group) + 1
    return recorder.result()


def test_waiting_within_ddps_backward_and_in_functional_collectives_is_seen(pool):
    timeline = Timeline(dict(enumerate(pool.run(2, late_backward))))
    zero, one = timeline.rows
    assert 0.4 < zero.waits_for[1] < 5 and 0.4 < one.waits_for[0] < 5  # busy: longer
    assert zero.calls["all_reduce"] >= 2


def call(rank, start_s, done_s, n_bytes=8, key="world: 1"):
    blocked = [[start_s, 9.0 if done_s is None else done_s]]
    group = [0, 1, 2]
    return {"op": "all_reduce", "bytes": n_bytes, "peer": None, "group": group, "key": key, "start_s": start_s,
            "done_s": done_s, "blocked": blocked}  # fmt: skip


def test_a_rank_that_never_comes_is_who_the_others_wait_for_until_the_end():
    records = {r: {"start_s": 0.0, "end_s": 9.0, "calls": [call(r, float(r), None)] if r else []} for r in range(3)}
    timeline = Timeline(records)
    assert [row.waits_for for row in timeline.rows] == [{}, {0: 8.0}, {0: 7.0}]
    assert timeline.rows[0].compute_s == 9.0


SCRIPT = """
import time, torch, torch.distributed as dist
from manyhands import join, leave
ranks = join(name="mine", quiet=True)
if ranks.rank == 1:
    time.sleep(0.5)
dist.all_reduce(torch.ones(250_000))
leave()
"""


@pytest.mark.ranks
def test_a_script_leaves_one_trace_of_all_its_ranks(tmp_path, root):
    (tmp_path / "mine.py").write_text(SCRIPT)
    environ = {**os.environ, "MANYHANDS_OUTPUTS": str(tmp_path / "out"), "PYTHONPATH": str(root / "scripts"),
               "OMP_NUM_THREADS": "1"}  # fmt: skip
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "manyhands.measure.trace", str(tmp_path / "mine.py")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "out" / "traces").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["trace.json", "trace.svg"]
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    waited = sum(e["dur"] for e in events if e["name"] == "waiting for rank 1" and e["pid"] == 0)
    assert waited >= 0.35e6  # of the 0.5 s that rank 1 sleeps: rank 0 may be late itself
    assert "rank 0: computing" in done.stdout and f"trace {folder}/trace.json: open it in" in done.stdout
