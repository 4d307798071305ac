"""Lesson 11's own code, on real failures: a killed run goes on bit for bit, no save is half, nothing is left behind."""

import ast
import contextlib
import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from definitions import taken_from
from manyhands.course.folders import SCRIPTS
from manyhands.data.corpus import Corpus, load_corpus
from manyhands.launch.processes import ChildError, Torchrun
from rank_pool import RankFailed, run_on_ranks
from torch.nn.parallel import DistributedDataParallel

LESSON = "11_when_it_breaks"
TRAINEE = ("small_gpt", "Trainee", "train_step", "state_of", "go_on")
SAVED = ("write", "sync", "save_whole", "save", "restore", "damaged", "newest")
RUN = (*TRAINEE, *SAVED, "begin_or_resume", "note", "ask_to_requeue", "train", "heard_so_far")
STEPS, EVERY = 14, 4


def lessons_own(corpus=None):
    corpus = corpus or Corpus.from_text("test", "to be, or not to be " * 40)
    return taken_from(LESSON, *RUN, corpus=corpus, global_batch=24)


# ---- kill -9, SIGTERM, and the curve ----


def go_on(ranks, folder):
    """Train to the end, on the ranks of the test: [(step, loss)] of all lives so far."""
    lesson = lessons_own(load_corpus(ranks))
    lesson.train(Path(folder), STEPS, EVERY)
    dist.barrier()
    return [(line["step"], line["loss"]) for line in lesson.heard_so_far(Path(folder))]


def program(folder):
    """The program that the lesson writes for torchrun, slowed down: it must not be done before somebody has watched."""
    for node in ast.parse((SCRIPTS / f"{LESSON}.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PROGRAM":
            slow = node.value.value.replace("pace_s=0.1", "pace_s=0.5")
            assert slow != node.value.value
            (folder / "program.py").write_text(slow)
    return folder / "program.py"


def left_over(mark):
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get("MANYHANDS_RUN") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.cmdline())
    return found


@pytest.mark.full  # of the trainer's: test_kill
def test_a_run_that_is_killed_and_preempted_lies_on_the_undisturbed_one_bit_for_bit(pool, tmp_path):
    lesson = lessons_own()
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    undisturbed.mkdir()
    killed.mkdir()
    given = (program(killed), killed, STEPS, EVERY)
    with Torchrun(*given, n_ranks=2, restarts=1, log=tmp_path / "log", timeout_s=150) as child:
        reference = threading.Thread(target=lambda: losses.update(pool.run(2, go_on, undisturbed)[0]))
        losses = {}
        reference.start()  # while torchrun starts
        child.until(lambda: any(line["step"] >= EVERY + 1 for line in lesson.heard_so_far(killed)))
        processes = lesson.heard_so_far(killed)[-1]["processes"]
        os.kill(processes[1], signal.SIGKILL)
        child.until(lambda: lesson.heard_so_far(killed)[-1]["processes"] != processes)
        child.signal(signal.SIGTERM)
        assert child.wait() != 0, "torchrun itself says that it was ended"
    reference.join()
    assert left_over(child.mark) == []
    asked = json.loads((killed / "requeue.json").read_text())
    assert EVERY <= asked["step"] < STEPS, "it saved and left before the end"
    assert lesson.damaged(killed / f"step-{asked['step']:04d}") == []
    lives = pool.run(2, go_on, killed)[0]
    assert sorted({step for step, _ in lives}) == list(range(1, STEPS + 1))
    assert len(lives) > STEPS, "some steps were made twice"
    assert [step for step, loss in lives if loss != losses[step]] == []


def test_the_ranks_that_wait_for_rank_0s_programs_wait_as_long_as_these_may_take(root):
    """Where a torchrun imports torch for a minute, the others would else give up before rank 0 says why."""
    cells = (root / "scripts/11_when_it_breaks.py").read_text().split("\n# %%")
    (cell,) = (cell for cell in cells if "with Torchrun(" in cell)
    may_take = int(re.search(r'"timeout_s": (\d+)}', cell)[1]) * cell.count("with Torchrun(")
    (group, seconds) = re.search(r"(\w+) = dist.new_group\(.*timedelta\(seconds=(\d+)\)", cell).groups()
    assert int(seconds) > may_take and int(re.search(r"--timeout (\d+)", cell)[1]) > may_take
    assert re.findall(r"^dist.barrier\((.*)\)", cell, re.MULTILINE)[-1] == group


@pytest.mark.usefixtures("real_python")
def test_nothing_is_left_of_a_child_that_ignores_every_request(tmp_path):
    deaf = tmp_path / "deaf.py"
    deaf.write_text(
        "import signal, sys, time\nfrom pathlib import Path\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "(Path(sys.argv[1]) / str(time.time_ns())).touch()\ntime.sleep(60)\n"
    )
    ready = tmp_path / "ready"
    ready.mkdir()
    with (
        pytest.raises(ChildError, match="did not hold in time"),
        Torchrun(deaf, ready, n_ranks=2, log=tmp_path / "log", timeout_s=100) as child,
    ):
        child.until(lambda: len(list(ready.iterdir())) == 2)
        child._deadline = time.monotonic()
        child.until(lambda: False)
    assert left_over(child.mark) == []


def test_a_child_that_ends_too_early_is_reported_with_its_last_lines(tmp_path):
    with (
        pytest.raises(ChildError, match="(?s)ended with status 2.*no-such-flag"),
        Torchrun("nothing.py", n_ranks=1, flags=("--no-such-flag",), log=tmp_path / "log") as child,
    ):
        child.until(lambda: False)


# ---- a save is whole or not there ----


def killed_at_each_operation(ranks, folder):
    """Interrupt a save before each operation on the disk: [what `newest` finds afterwards, what is damaged]."""
    lesson, found = lessons_own(), []
    trainee = lesson.Trainee()
    lesson.train_step(trainee)
    lesson.save(Path(folder), trainee)
    operations = [(os, "fsync"), (Path, "rename"), (Path, "mkdir")]
    for stop_at in range(1, 20):
        trainee.step, done = 1 + stop_at, []
        with pytest.MonkeyPatch.context() as patch:
            for place, name in operations:
                real = getattr(place, name)

                def counted(*args, real=real, done=done, stop_at=stop_at, **given):
                    done.append(1)
                    if len(done) == stop_at:
                        raise KeyboardInterrupt
                    return real(*args, **given)

                patch.setattr(place, name, counted)
            try:
                lesson.save(Path(folder), trainee)
                finished = True
            except KeyboardInterrupt:
                finished = False
        there = sorted(Path(folder).glob("step-????"))
        newest = lesson.newest(Path(folder), trainee).name
        found.append((finished, newest, [lesson.damaged(path) for path in there]))
        if finished:
            return found
    raise AssertionError("a save takes more than 20 operations?")


def test_a_save_that_is_interrupted_anywhere_leaves_the_one_before_it(pool, tmp_path):
    found = pool.run(1, killed_at_each_operation, tmp_path)[0]
    *interrupted, renamed, last = found
    assert len(interrupted) >= 4, "two files to sync, a folder, a rename"
    assert all(newest == "step-0001" and not any(damages) for _, newest, damages in interrupted)
    assert renamed[1] == f"step-{len(found):04d}" and not any(renamed[2]), "before the folder is synced it is whole"
    assert last[0] and last[1] == f"step-{1 + len(found):04d}" and not any(last[2])


def dies_while_it_writes(ranks, folder):
    lesson = lessons_own()
    trainee = lesson.Trainee()
    lesson.save(Path(folder), trainee)
    lesson.train_step(trainee)
    if ranks.rank == 1:
        os.fsync = lambda handle: os._exit(9)
    lesson.save(Path(folder), trainee)


def test_no_checkpoint_counts_that_one_rank_did_not_finish(tmp_path):
    with pytest.raises(RankFailed):
        run_on_ranks(2, dies_while_it_writes, tmp_path, timeout_s=60)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000", "step-0001.partial"]


def damaged_is_replaced(ranks, folder):
    lesson = lessons_own()
    trainee = lesson.Trainee()
    for _ in range(2):
        lesson.train_step(trainee)
        path = lesson.save(Path(folder), trainee)
    if ranks.rank == 0:
        os.truncate(path / "rank-0.safetensors", 100)
    dist.barrier()
    fresh = lesson.Trainee()
    trusted = lesson.newest(Path(folder), fresh)
    lesson.restore(trusted, fresh)
    lesson.train_step(fresh)
    again = lesson.save(Path(folder), fresh)  # the same step, over the damaged one
    return (
        trusted.name,
        again.name,
        lesson.damaged(again),
        all(torch.equal(part, trainee.state[name]) for name, part in fresh.state.items()),
    )


def test_a_truncated_checkpoint_is_passed_over_and_replaced_by_the_same_numbers(pool, tmp_path):
    assert pool.run(3, damaged_is_replaced, tmp_path) == [("step-0001", "step-0002", [], True)] * 3


def refuses_another_world(ranks, folder):
    lesson, group = lessons_own(), dist.new_group([0, 1])
    if ranks.rank < 2:
        path = lesson.save(Path(folder), lesson.Trainee(group))
    dist.barrier()
    path = Path(folder) / "step-0000"
    trainee = lesson.Trainee()
    before = {name: part.clone() for name, part in trainee.state.items()}
    with pytest.raises(ValueError, match="saved by 2 ranks and here are 3; reshard it"):
        lesson.restore(path, trainee)
    return all(torch.equal(part, trainee.state[name]) for name, part in before.items())


def test_a_checkpoint_of_another_number_of_ranks_is_refused_before_anything_changes(pool, tmp_path):
    assert pool.run(3, refuses_another_world, tmp_path) == [True] * 3


# ---- who hangs, who makes NaN ----


def hang(ranks, guilty):
    from datetime import timedelta

    lesson = taken_from(LESSON, "train_together", "flight_record", "calls_in", "usual", "missing_call")
    name = f"training {guilty}"
    dist.barrier()  # none of them spends the group's patience on its imports
    patience = timedelta(seconds=3)
    groups = [dist.new_group(backend="gloo", timeout=patience, group_desc=each) for each in (name, "validation")]
    with pytest.raises(RuntimeError):  # on every rank, the one at fault too
        lesson.train_together(4 if ranks.rank == guilty else 5, *groups)
    records = [None] * ranks.world_size
    dist.all_gather_object(records, lesson.flight_record([name]))
    return lesson.missing_call(lesson.calls_in(name, records))


@pytest.mark.parametrize("guilty", [0, 2])
def test_the_flight_recorder_names_the_rank_that_did_not_call(pool, guilty):
    assert pool.run(3, hang, guilty) == [(5, [guilty])] * 3


def flipped_bit(ranks):
    lesson = taken_from(
        LESSON, "flip_bit", "who_is_not_finite", "small_gpt", "first_not_finite",
        corpus=Corpus.from_text("test", "to be, or not to be " * 40), world_size=ranks.world_size,
    )  # fmt: skip
    model = lesson.small_gpt()
    if ranks.rank == 1:
        lesson.flip_bit(model.blocks[1].mlp.up.weight, 100)
    ids = torch.arange(24)[None] % 8
    return lesson.first_not_finite(model, ids), lesson.who_is_not_finite([model(ids)[0]])


def looked_at_before_averaging(ranks):
    lesson = taken_from(LESSON, "look_and_average", "who_is_not_finite", world_size=ranks.world_size)
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    seen = []
    model.register_comm_hook(seen, lesson.look_and_average)
    x = torch.full((1, 2), float("inf") if ranks.rank == 1 else 1.0)
    model(x).sum().backward()
    return lesson.who_is_not_finite(seen), lesson.who_is_not_finite([p.grad for p in model.parameters()])


def test_the_comm_hook_names_the_rank_before_averaging_gives_its_infinity_to_all(pool):
    assert pool.run(3, looked_at_before_averaging) == [([1], [0, 1, 2])] * 3


def test_a_flipped_bit_is_traced_to_its_rank_and_to_the_layer_where_it_overflows(pool):
    assert pool.run(3, flipped_bit) == [(None, [1]), ("norm", [1]), (None, [1])]
