"""A rank that stops is named, with its step and phase; every rank shows its stack; nothing is left behind."""

import os
import secrets
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from manyhands.launch.processes import MARK, Family
from manyhands.train.stalls import Heartbeat, judged, place_of

pytestmark = pytest.mark.ranks


def ranks_at(*ats, idle_s=0.0, patience_s=10.0, **more):
    """One Heartbeat per number of `at` calls, all in the phase of that call."""
    return [
        Heartbeat(r, f"node{r}", 70 + r, 1.0, 1, n, n // 2, ["data", "training"][n % 2], idle_s, patience_s, **more)
        for r, n in enumerate(ats)
    ]


def test_the_rank_that_got_least_far_is_named_and_the_others_wait():
    assert judged(ranks_at(6, 7, 6, idle_s=9.0), 10) == (None, []), "everybody moves"
    sentence, silent = judged(ranks_at(7, 6, 7, 7, idle_s=11.0), 10)
    assert sentence == (
        "rank 1 of 4 (node1, process 71) has not moved for 11 s: it stands at step 3, data."
        " Ranks 0, 2-3 wait at step 3, training. If it is only slow, raise --train.stall-s."
    )
    assert silent == []
    sentence, _ = judged(ranks_at(7, 7, idle_s=11.0), 10)
    assert "rank 0 of 2" in sentence and "rank 1 of 2" in sentence, "all wait for each other"
    heard = ranks_at(8, 7, idle_s=50.0)
    heard[1].patience_s = 600.0  # it compiles, as it has announced, and rank 0 waits for it
    assert judged(heard, 10) == (None, [])
    sentence, _ = judged(ranks_at(*[7] * 1000, *[6] * 24, idle_s=11.0), 10)
    assert "...and 16 more ranks." in sentence and "Ranks 0-999 wait" in sentence and len(sentence) < 1500


def test_a_silent_rank_is_named_only_if_the_others_stand_still():
    heard = ranks_at(7, 6, idle_s=1.0)
    heard[1].silent_s = 30.0
    assert judged(heard, 10) == (None, [])
    heard[0].idle_s = 11.0
    sentence, silent = judged(heard, 10)
    assert sentence.startswith("rank 1 of 2 (node1, process 71) gave no sign of life for 30 s: it was last at step 3")
    assert silent == [heard[1]]
    assert "slow" not in sentence  # its thread says nothing either: no longer limit cures that


def test_a_rank_that_reads_a_file_is_busy_and_one_inside_a_collective_is_not():
    seen = {}

    def look(name, action, end):
        thread = threading.Thread(target=action, daemon=True)
        thread.start()
        deadline = time.monotonic() + 60
        while (frame := sys._current_frames()[thread.ident]).f_code is not action.__code__:
            assert time.monotonic() < deadline, "the thread does not get there"
            time.sleep(0.01)
        seen[name] = place_of(frame)
        end()

    reading, writing = os.pipe()
    look("reads", lambda: os.read(reading, 1), lambda: os.write(writing, b"x"))
    lock = threading.Lock()
    lock.acquire()
    work = SimpleNamespace(wait=lock.acquire)  # no Python inside, as in torch's Work: the line of ours says it
    look("waits", lambda: work.wait(), lock.release)
    assert seen["reads"][1] and "test_stalls.py line" in seen["reads"][0]
    assert not seen["waits"][1]


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.parametrize(
    ("launcher", "fault", "named"),
    [
        (None, "hang:1:5", "rank 1 of 2 ("),
        (TORCHRUN, "stop:0:5", "rank 0 of 2 ("),  # torchrun serves the store: rank 1 sees who is silent
        (None, "stop:0:5", "rank 1 of 2 waits"),  # under mpiexec rank 0 serves it: its own end is all that is known
    ],
)  # fmt: skip
def test_a_rank_that_sleeps_or_is_stopped_is_named_with_stacks_and_no_process_is_left(root, launcher, fault, named):
    mark = secrets.token_hex(8)
    # four seconds until the fault, six beats of the watch: what rank 0 says of itself must have been heard once
    program = [str(root / "tests" / "fake_train.py"), "--stall-s=5", "--step-s=0.8", f"--fault={fault}"]
    mpiexec = [os.path.join(sys.prefix, "bin", "mpiexec"), "-n", "2", sys.executable]
    command = [sys.executable, *launcher] if launcher else mpiexec
    family = Family(mark)
    try:
        done = subprocess.run(
            [*command, *program], env={**os.environ, MARK: mark}, timeout=200,
            capture_output=True, text=True, check=False
        )  # fmt: skip
        said = done.stdout + done.stderr
        assert done.returncode != 0
        assert named in said
        waiting = int(fault.split(":")[1] == "0")
        assert f"rank {waiting} stands here:" in said and "in all_reduce" in said  # the one that waits
        if "waits for" not in named:
            assert "step 5, training" in said or "it was last at" in said
            assert "in misbehave" in said  # where the culprit was
        assert f"done, sum {3 * 40 * 41 // 2}" not in said
        deadline = time.monotonic() + 30
        while family.members():  # a launcher ends with its first rank, the others a moment later
            assert time.monotonic() < deadline, "it outlived its launcher"
            time.sleep(0.1)
    finally:
        family.end(grace_s=3)
