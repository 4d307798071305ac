"""One run, killed with SIGKILL four times (`make test-full`: twenty): at random moments, and in the middle of saving.

It ends as if nobody had killed it.

Two ranks of the trainer train a small GPT with dropout (so that each rank's random numbers matter), whose experts they
share out, and save every few steps. The parent kills one rank or both, looks at what lies in the folder, and starts
the run again.
"""

import os
import random
import sys
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from manyhands.checkpoint import manifest
from manyhands.config.layout import resolve_layout
from manyhands.config.options import (
    CheckpointOptions,
    LogOptions,
    ModelOptions,
    OptimizerOptions,
    Options,
    ParallelOptions,
    TrainOptions,
    model_config,
)
from manyhands.data.corpus import Corpus
from manyhands.launch.metrics import fingerprint
from manyhands.train.preemption import PreemptionHandler
from manyhands.train.run import Run
from manyhands.train.start import resume
from rank_pool import _server, ranks_of

pytestmark = pytest.mark.ranks

N_RANKS = 2
EVERY = 3  # steps between checkpoints
STEPS = {4: 30, 20: 126}  # {kills: more steps than so many lives get through}: each is killed before its third save
SLOW_S = 0.03  # so much longer takes each fsync of a run that is killed: there are six in a save
PATIENCE_S = 60  # of the ranks with each other; the parent has three times as much

OPTIONS = Options(
    model=ModelOptions(n_layer=1, n_head=1, n_embd=8, block_size=8, dropout=0.2, experts=4),
    parallel=ParallelOptions(expert=2),
    train=TrainOptions(global_batch=4, stall_s=PATIENCE_S),
    optimizer=OptimizerOptions(lr=1e-2),
    log=LogOptions(every=EVERY, eval_every=4 * EVERY, eval_batches=1, sample=0, plots=False, progress=False),
    checkpoint=CheckpointOptions(every=EVERY, keep=2),
)


def train(ranks, folder, steps, asynchronous, most, tell):
    """The trainer, from the newest checkpoint to the end; the fingerprint of all that is left. `tell(what, step,
    value)`.

    After `most` steps, if it is not None, it waits to be killed: a parent that comes late finds it still alive.
    """
    wanted = replace(OPTIONS.checkpoint, folder=str(folder), asynchronous=asynchronous)
    options = replace(OPTIONS, checkpoint=wanted, train=replace(OPTIONS.train, steps=steps))
    corpus = Corpus.from_text("test", "to be, or not to be " * 20)
    config = model_config(options, len(corpus.vocab))
    layout = resolve_layout(options, config, ranks.world_size)
    run = Run(options, config, layout, corpus, ranks, PreemptionHandler(ranks))
    resume(run)
    tell("resumed", run.step)
    report, save, last = run.report.step, run.save, most and run.step + most

    def report_and_tell(step, loss, *about):
        report(step, loss, *about)
        tell("step", step, loss.item())
        while step == last:
            dist.barrier()  # raises once the other rank is dead
            time.sleep(0.01)

    def save_and_tell():
        save()
        tell("saved", run.step)

    run.report.step, run.save = report_and_tell, save_and_tell
    assert run.go() == 0
    return fingerprint([*run.tensors().values(), torch.get_rng_state()])


def _rank(rank, store, folder, steps, asynchronous, slow_s, pipe):
    """One rank of one life."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "MANYHANDS_OUTPUTS": f"{store}.outputs"}
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
    torch.set_num_threads(1)
    fsync = os.fsync
    os.fsync = lambda handle: (time.sleep(slow_s), fsync(handle))
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, N_RANKS), rank=rank, world_size=N_RANKS,
        timeout=timedelta(seconds=PATIENCE_S)
    )  # fmt: skip
    ranks = ranks_of(rank, N_RANKS)
    most = 3 * EVERY if slow_s else None
    bits = train(ranks, folder, steps, asynchronous, most, lambda *what: pipe.send(what))
    pipe.send(("done", steps, bits))
    dist.barrier()
    dist.destroy_process_group()


class Life:
    """The run from one start to its end or its death."""

    def __init__(self, number, scratch, folder, steps, asynchronous=False, slow_s=0.0):
        self.heard = [[] for _ in range(N_RANKS)]
        self.processes, self.pipes = [], []
        for rank in range(N_RANKS):
            ours, theirs = _server.Pipe(duplex=False)
            store = str(scratch / f"store{number}")
            process = _server.Process(
                target=_rank, args=(rank, store, folder, steps, asynchronous, slow_s, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def listen(self):
        for pipe, heard in zip(self.pipes, self.heard, strict=True):
            try:
                while pipe.poll():
                    heard.append(pipe.recv())
            except (EOFError, OSError):
                pass

    def until(self, condition):
        """Wait until it holds, or every rank has ended."""
        deadline, alive = time.monotonic() + 3 * PATIENCE_S, True
        while not condition() and alive:
            assert time.monotonic() < deadline, f"nothing happens: {self.heard}"
            time.sleep(0.005)
            alive = any(process.is_alive() for process in self.processes)
            self.listen()  # after that question, so that the last words of the dead are heard

    def kill(self, victims):
        """Kill some ranks; those that are left notice it and end by themselves."""
        for rank in victims:
            self.processes[rank].kill()
        for process in self.processes:
            process.join(3 * PATIENCE_S)
            assert not process.is_alive(), "a rank waits for a dead one"
        self.listen()

    def end(self):
        self.until(lambda: all(heard and heard[-1][0] == "done" for heard in self.heard))
        for process in self.processes:
            process.join(3 * PATIENCE_S)

    def values(self, what):
        """{step: value} of what rank 0 told."""
        return {step: value[0] if value else None for told, step, *value in self.heard[0] if told == what}


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.full)])
def test_a_killed_run_ends_bit_for_bit_as_one_that_was_not(tmp_path, kills):
    steps = STEPS[kills]
    life = Life("uninterrupted", tmp_path, tmp_path / "uninterrupted", steps)
    life.end()
    losses, left = life.values("step"), [heard[-1] for heard in life.heard]
    assert sorted(losses) == list(range(1, steps + 1))
    folder, luck = tmp_path / "checkpoints", random.Random(5)
    killed_while_saving = 0
    for number in range(kills):
        while_saving, asynchronous = number % 2 == 0, number % 4 >= 2
        life = Life(number, tmp_path, folder, steps, asynchronous, SLOW_S)
        life.until(lambda: life.values("resumed"))  # noqa: B023
        start = max(life.values("resumed"))
        if while_saving:  # the second save of this life: the first one is progress
            whole = folder / f"step-{start + 2 * EVERY:08d}"
            partial = whole.with_suffix(".partial")
            life.until(lambda: partial.exists() or whole.exists())  # noqa: B023
            time.sleep(luck.uniform(0, 7 * SLOW_S))
        else:
            last = start + luck.randint(1, 2 * EVERY)
            life.until(lambda: last in life.values("step"))  # noqa: B023
            time.sleep(luck.uniform(0, SLOW_S))
        killed_while_saving += any(folder.glob("*.partial"))
        life.kill(luck.choice([[0], [1], [0, 1]]))
        reached, saved = max(life.values("step"), default=start), max(life.values("saved"), default=start)
        for step, loss in life.values("step").items():
            assert loss == losses[step], f"step {step} of life {number} differs"
        there = manifest.steps_in(folder)
        for path in there:
            manifest.verify(path)  # whatever has a checkpoint's name is one
        newest = manifest.step_of(there[0]) if there else 0
        if asynchronous:  # what `saved` says has begun; the one before it is complete
            assert newest >= saved - EVERY and newest > reached - 2 * EVERY - 1
        else:
            assert newest >= saved and newest >= reached - EVERY
    assert killed_while_saving >= kills // 4, "or this test does not see what it is for"
    assert newest < steps, "the run was over before the last kill: make it longer"
    life = Life(kills, tmp_path, folder, steps)
    life.end()
    assert [heard[-1] for heard in life.heard] == left
    there = manifest.steps_in(folder)
    assert [manifest.step_of(path) for path in there[:2]] == [steps, steps - EVERY]
    assert len(there) <= 3 and set(folder.glob("step-*")) == set(there), "the last two, the best, no left-overs"
