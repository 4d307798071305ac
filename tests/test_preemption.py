"""Signals that ask a run to leave: all ranks stop after the same step, save, and say so beside the checkpoint."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from manyhands.checkpoint.manifest import step_of, steps_in, verify
from manyhands.launch.processes import Family
from manyhands.train import preemption
from manyhands.train.preemption import REQUEUE, PreemptionHandler, clear_requeue, write_requeue
from rank_pool import RankFailed, run_on_ranks

pytestmark = pytest.mark.ranks


def stop_one_rank(ranks, name, who, when):
    """What each rank hears, and after which step, if rank `who` alone gets a signal at step `when`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever started these tests ignores
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup
    with PreemptionHandler(ranks) as asked:
        for step in range(1, 100_000):
            if ranks.rank == who and step == when:
                os.kill(os.getpid(), getattr(signal, name))
            if stop := asked.agreed():
                return stop, step
            time.sleep(0.001)


@pytest.mark.parametrize(("name", "who"), [("SIGTERM", 0), ("SIGUSR1", 2), ("SIGHUP", 1)])
def test_a_signal_to_one_rank_stops_all_ranks_after_the_same_step(name, who):
    answers = run_on_ranks(3, stop_one_rank, name, who, 30)
    assert len(set(answers)) == 1
    assert answers[0][0] == name and answers[0][1] >= 30


def hear_several(ranks, echo_s, *pauses_s):
    preemption.ECHO_S = echo_s
    with PreemptionHandler(ranks) as asked:
        for pause_s in pauses_s:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(pause_s)
        return asked.agreed()


def test_a_second_signal_ends_the_process_but_an_echo_is_none():
    """A rank gets one request from Slurm and once more from torchrun."""
    assert run_on_ranks(1, hear_several, 1000, 0.05, 0.05, 0.05) == ["SIGUSR1"]
    with pytest.raises(RankFailed, match=r"died: \[0\]"):
        run_on_ranks(1, hear_several, 0.5, 0.7, 0.7)


def held_before(ranks):
    preemption.defer_signals()
    os.kill(os.getpid(), signal.SIGUSR1)
    with PreemptionHandler(ranks) as asked:
        return asked.agreed()


@pytest.mark.usefixtures("real_python")
def test_a_signal_that_comes_while_a_rank_still_starts_is_not_lost():
    assert run_on_ranks(1, held_before) == ["SIGUSR1"]


def ask_and_withdraw(ranks, folder):
    write_requeue(f"{folder}/{ranks.rank}", "SIGUSR1", 120, ranks)
    found = os.listdir(f"{folder}/{ranks.rank}") if os.path.isdir(f"{folder}/{ranks.rank}") else None
    said = json.loads(Path(folder, "0", REQUEUE).read_text()) if ranks.rank == 0 else None
    dist.barrier()
    clear_requeue(f"{folder}/{ranks.rank}", ranks)
    clear_requeue(f"{folder}/{ranks.rank}", ranks)  # nothing to remove is no error
    return found, said


def test_rank_0_alone_asks_for_the_requeue_and_takes_it_back(tmp_path):
    (found, said), other = run_on_ranks(2, ask_and_withdraw, str(tmp_path))
    assert found == [REQUEUE] and (said["signal"], said["step"]) == ("SIGUSR1", 120)
    assert other == (None, None) and os.listdir(tmp_path / "0") == []


RUN = ["--train.steps", "100000", "--model.n-layer", "1", "--model.n-embd", "16", "--log.no-plots", "--log.no-progress"]


@pytest.fixture
def launched(root, tmp_path):
    """start(number, line, to, *flags): signal `number` once launch.py's run of train.py has printed `line`."""
    family = Family(secrets.token_hex(8), "MANYHANDS_TEST_RUN")  # MARK changes within: launch.py sets one of its own

    def start(number, line, to="launch.py", flags=(), program=()):
        run = subprocess.Popen(
            [sys.executable, root / "scripts" / "launch.py", "--nproc", "2", *program, "--", *RUN, *flags,
             "--checkpoint.folder", tmp_path / "run"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env=os.environ | {family.variable: family.mark},
        )  # fmt: skip
        said = next(text for text in run.stdout if line in text)
        target = run.pid
        if to == "torchrun":
            target = next(one.pid for one in family.members() if "manyhands.launch.commands" in one.cmdline())
        os.kill(target, number)
        said += run.communicate(timeout=300)[0]
        assert "Traceback" not in said and "Exception" not in said, said
        return run.returncode, said

    yield start
    family.end(grace_s=3)


EVERY_STEP = ["--checkpoint.every", "1", "--log.every", "1", "--log.sample", "0"]


@pytest.mark.parametrize(
    ("number", "line", "to", "flags"),
    [
        (signal.SIGTERM, "2 ranks, launcher torchrun", "torchrun", []),  # they have met, and there is no model yet
        (signal.SIGINT, "2 ranks, launcher torchrun", "launch.py", []),  # Ctrl-C: nobody asks to go on
        pytest.param(  # it writes its sample, for an hour
            signal.SIGTERM, "val_loss", "launch.py", ["--log.sample", "10000000"], marks=pytest.mark.full
        ),
    ],
)
def test_a_run_that_is_asked_to_leave_at_any_moment_saves_and_asks_to_go_on(
    launched, tmp_path, number, line, to, flags
):
    status, said = launched(number, line, to, flags)
    name, requeue = signal.Signals(number).name, tmp_path / "run" / REQUEUE
    assert status == 0 and f"stopped by {name} and saved at step" in said
    if number == signal.SIGINT:
        assert not requeue.exists()
    else:
        assert said.endswith("launch.py: stopped cleanly on SIGTERM\n")
        assert json.loads(requeue.read_text())["signal"] == "SIGTERM"


HELD_SAVE = """
import runpy, sys, time
from manyhands.checkpoint import checkpoints
from manyhands.train.preemption import PreemptionHandler
heard, hear, write = [], PreemptionHandler._hear, checkpoints.write_tensors
PreemptionHandler._hear = lambda self, *about: (heard.append(about), hear(self, *about))
def held(*about):
    print("a save is under way", flush=True)
    while not heard:
        time.sleep(0.01)
    return write(*about)
checkpoints.write_tensors = held
runpy.run_path(sys.argv[0].replace("held.py", "train.py"), run_name="__main__")
"""


@pytest.mark.parametrize("how", [pytest.param([], marks=pytest.mark.full), ["--checkpoint.asynchronous"]])
def test_a_signal_that_comes_while_a_checkpoint_is_written_lets_it_be_written(launched, root, tmp_path, how):
    """Each rank is within its save until it has heard the signal."""
    (tmp_path / "held.py").write_text(HELD_SAVE)
    (tmp_path / "train.py").symlink_to(root / "scripts" / "train.py")
    flags = ["--log.eval-every", "0", "--log.eval-batches", "1", *EVERY_STEP, *how]
    status, said = launched(signal.SIGTERM, "a save is under way", flags=flags, program=[tmp_path / "held.py"])
    assert (status, said.count("stopped by SIGTERM and saved at step")) == (0, 1), said
    newest = steps_in(tmp_path / "run")[0]
    verify(newest)
    assert json.loads((tmp_path / "run" / REQUEUE).read_text())["step"] == step_of(newest)
