"""One process of a row: `python -m manyhands.bench.worker FD`, where FD is its end of a pipe to the bench.

Through the pipe it gets a Job, then numbers of steps; it answers each with the seconds that so many steps took, and leaves
when the pipe is closed. What it prints goes to its log.
"""

import os
import sys
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection


class Over(Exception):
    """The bench has closed the pipe."""


def turns(pipe, barrier=lambda: None):
    """Yields once before each step. A burst's first step wakes caches and threads up, and is not timed.

    All ranks of a world start and end a burst together.
    """
    while True:
        try:
            steps = pipe.recv()
        except EOFError:
            return
        yield
        barrier()
        start = time.perf_counter()
        for _ in range(steps):
            yield
            if pipe.poll():  # nothing is said during a burst: the bench has ended
                return
        barrier()
        pipe.send({"seconds": time.perf_counter() - start, "peak_gib": peak_gib()})


def serve(pipe):
    """Do what the Job says until the pipe is closed. What goes wrong is the last answer."""
    try:
        job = pipe.recv()
        import torch

        torch.set_num_threads(job.threads)
        {"plain": plain, "trainer": trainer, "peak": peak}[job.kind](job, pipe)
    except Over:
        pass
    except Exception as error:  # noqa: BLE001 - the bench says why there is no number
        traceback.print_exc()
        lines = str(error).strip().splitlines()
        pipe.send({"error": f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"})


def trainer(job, pipe):
    import torch.distributed as dist

    ranks = enter(job)
    run_trainer(ranks, job, turns(pipe, dist.barrier))


def enter(job):
    import platform

    import torch
    import torch.distributed as dist

    from manyhands.launch.ranks import Ranks

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    dist.init_process_group(
        "gloo", store=dist.FileStore(job.store, job.world_size), rank=job.rank, world_size=job.world_size,
        timeout=timedelta(seconds=job.options.train.timeout_s),
    )  # fmt: skip
    return Ranks(
        job.rank, job.world_size, job.rank, job.world_size, torch.device("cpu"), "gloo", "bench", platform.node(), "train"
    )  # fmt: skip


def run_trainer(ranks, job, each):
    """The trainer's own `Run.go`, held before each step until the next item of `each`. Raises Over after the last."""
    from manyhands.config.layout import resolve_layout
    from manyhands.config.options import model_config
    from manyhands.train.run import Run

    class HeldRun(Run):
        def train_step(self):
            if next(each, Over) is Over:
                raise Over
            return super().train_step()

    corpus = read_corpus(job)
    config = model_config(job.options, len(corpus.vocab))
    layout = resolve_layout(job.options, config, ranks.world_size, ranks.local_world_size)
    HeldRun(job.options, config, layout, corpus, ranks).go()


def plain(job, pipe):
    from manyhands.bench.plain_loop import train
    from manyhands.config.options import model_config

    corpus = read_corpus(job)
    config = model_config(job.options, len(corpus.vocab))
    train(config, corpus.train_ids, job.options.train.global_batch, turns(pipe), job.options.train.compile)


def peak(job, pipe):
    """Answers any number with the FLOP/s of this machine's best matrix product."""
    import torch

    from manyhands.measure.timing import gemm_peak

    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        pipe.send({"flop_per_s": gemm_peak(torch.device("cpu"), torch.float32), "peak_gib": peak_gib()})


def read_corpus(job):
    from pathlib import Path

    from manyhands.data.corpus import Corpus

    name, path = job.corpus
    return Corpus.from_text(name, Path(path).read_bytes().decode())


def peak_gib():
    from types import SimpleNamespace

    import torch

    from manyhands.measure.timing import peak_memory_gib

    return peak_memory_gib(SimpleNamespace(device=torch.device("cpu")))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
    sys.stdout.flush()
    os._exit(0)  # a group that others have left already cannot be left in order
