"""The trainer in each of its ways beside a plain PyTorch loop, on this machine.

Every row's processes start once, as `python -m manyhands.tools.bench_trainer FD` with one end of a pipe. Then come
rounds: in each, every row computes one burst of steps, and the plain loop one directly before it, compiled where the
row is. A ratio so compares neighbours in time, whatever the machine does in the long run.
"""

import math
import os
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

from manyhands.course.folders import SCRIPTS
from manyhands.launch.allocation import loopback_gloo
from manyhands.launch.settings import environment, for_python, set_default

SEQUENCES = 12  # per rank and step
MODEL = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64}
WARM_UP_STEPS = 12
START_S = 300  # for torch's import by all processes at once, and the first steps
BURST_S = 120
PLAIN = "plain loop"
APART = "2 that never communicate"


@dataclass
class Row:
    """`worlds` groups of `ranks` processes that compute at the same time; its samples, one per round."""

    name: str
    ranks: int = 1
    worlds: int = 1
    threads: int | None = None  # of each process; None: one per core
    parallel: dict = field(default_factory=dict)
    compiled: bool = False  # --train.compile; it is compared with what is compiled too
    tokens_per_s: list = field(default_factory=list)
    ratio: list = field(default_factory=list)  # to the plain loop's burst directly before
    scaling: list = field(default_factory=list)  # to as many processes that share the machine and never communicate
    error: str = ""  # why there are no more samples

    @property
    def is_plain(self):
        return self.name.startswith(PLAIN)

    def like(self, name):
        """The name of the row to compare with: like is compared with like."""
        return name + ", compiled" if self.compiled else name


def all_rows() -> list[Row]:
    two = {"ranks": 2, "threads": 1}
    kinds = {PLAIN: {}, "one process": {}, "2 ranks": two, APART: {"worlds": 2, "threads": 1}}
    rows = [Row(name, **kind) for name, kind in kinds.items()]
    rows += [Row(f"{name}, compiled", **kind, compiled=True) for name, kind in kinds.items()]
    rows.append(Row("2 ranks, torch's DDP", **two, parallel={"all_reduce": "buckets"}))
    return rows + [Row(f"2 ranks, {s}", **two, parallel={"strategy": s}) for s in ("zero1", "fsdp", "tp", "pp")]


def measure(folder, rounds, steps, rows=None, model=MODEL) -> list[Row]:
    """The rows (None: all of them) with their samples; `folder` takes the logs of their processes."""
    from manyhands.data.corpus import load_corpus
    from manyhands.launch.machine import cores_here

    rows, crews = rows or all_rows(), {}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    corpus = load_corpus()  # looked for once, not by each process
    (folder / "corpus.txt").write_bytes(corpus.text.encode())
    try:
        for i, row in enumerate(rows):
            crews[row.name] = Crew(row, model, folder / "corpus.txt", folder / f"row{i}", cores_here())
        print(f"{len(rows)} rows: their processes start ...", flush=True)
        for row in rows:
            burst(crews, row, WARM_UP_STEPS, START_S)
        for number in range(rounds):
            one_round(crews, rows, steps)
            print(f"round {number + 1} of {rounds} done, {steps} steps per row", flush=True)
    finally:
        for crew in crews.values():
            crew.end()
    return with_scaling(rows)


def one_round(crews, rows, steps):
    """One burst of each row, and one of the plain loop directly before it."""
    of = {row.name: row for row in rows}
    for row in rows:
        beside = of.get(row.like(PLAIN))
        plain = burst(crews, beside, steps) if beside and not row.is_plain else None
        tokens_per_s = burst(crews, row, steps)
        if tokens_per_s:
            row.tokens_per_s.append(tokens_per_s)
        if tokens_per_s and plain:
            row.ratio.append(tokens_per_s / plain)


def burst(crews, row, steps, timeout_s=BURST_S):
    """Tokens/s, or None: a row that fails has no more turns, its `error` says why, and the others go on."""
    if row.error:
        return None
    try:
        return crews[row.name].burst(steps, timeout_s)
    except RuntimeError as error:
        row.error = str(error)
        print(f"{row.name}: not measured: {error}", flush=True)
        return None


def with_scaling(rows) -> list[Row]:
    """Fills in `scaling`, round by round: the machine may be faster in one than in the next."""
    of = {row.name: row for row in rows}
    for row in rows:
        apart = of.get(row.like(APART))
        if row.ranks > 1 and apart and row.ranks == apart.worlds:
            row.scaling = [mine / theirs for mine, theirs in zip(row.tokens_per_s, apart.tokens_per_s, strict=False)]
    return rows


LEGEND = (
    "Medians of the rounds; a ratio is taken to the plain loop's burst directly before. Scaling: to as many processes\n"
    "that never communicate. Ranks have one thread each, one process has all.\n"
    "The aims are for two cores: `taskset -c 0,1 make bench`."
)


def table(rows):
    from rich.table import Table

    found = Table("", "tokens/s", "/ plain", "range", "scaling", box=None, pad_edge=False)
    for row in rows:
        if row.error or not row.tokens_per_s:
            found.add_row(row.name, f"not measured: {row.error}")
            continue
        spread = f"{min(row.ratio):.2f}-{max(row.ratio):.2f}" if row.ratio else "-"
        ratio, scaling = (f"{statistics.median(s):.2f}" if s else "-" for s in (row.ratio, row.scaling))
        found.add_row(row.name, f"{statistics.median(row.tokens_per_s):,.0f}", ratio, spread, scaling)
    return found


# ------------------------------------------------------------------ the processes of a row


class Crew:
    """A row's processes. They end with the bench, however it ends: their end of the pipe is closed then."""

    def __init__(self, row, model, corpus, folder, cores):
        from manyhands.launch.commands import rank_environment

        self.row, self.folder, self.members = row, Path(folder), []  # (name, process, our end of its pipe), by world
        self.tokens_per_step = SEQUENCES * row.ranks * model["block_size"]  # of one world
        self.folder.mkdir(parents=True, exist_ok=True)
        # the trainer as scripts/launch.py starts it; the plain loop as anybody does
        environ = for_python(environment() if row.is_plain else rank_environment(several=False), SCRIPTS)
        environ["MANYHANDS_OUTPUTS"] = str(self.folder)
        environ.pop("OMP_NUM_THREADS", None)
        try:
            for world in range(row.worlds):
                for rank in range(row.ranks):
                    ours, theirs = Pipe()
                    with open(self.folder / f"world{world}-rank{rank}.log", "wb") as log, theirs:
                        process = subprocess.Popen(
                            [sys.executable, "-m", "manyhands.tools.bench_trainer", str(theirs.fileno())],
                            pass_fds=[theirs.fileno()], env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                        )  # fmt: skip
                    name = f"rank {rank} of {row.ranks}" + f", world {world}" * (row.worlds > 1)
                    self.members.append((name, process, ours))
                    # as bytes: the other side's classes are those of a module that it runs as its main program
                    store = str(self.folder / f"store{world}")
                    ours.send((vars(row), model, str(corpus), rank, row.threads or cores, store))
        except BaseException:
            self.end()
            raise

    @property
    def pids(self):
        return [process.pid for _, process, _ in self.members]

    def burst(self, steps, timeout_s) -> float:
        """Tokens/s of all processes together. Raises RuntimeError, one sentence; the row has ended then."""
        try:
            seconds = self._ask(steps, timeout_s)
        except BaseException:
            self.end()
            raise
        size = self.row.ranks
        worlds = [max(seconds[i : i + size]) for i in range(0, len(seconds), size)]  # the slowest rank's time counts
        return sum(steps * self.tokens_per_step / slowest_s for slowest_s in worlds)

    def _ask(self, steps, timeout_s):
        for _, _, pipe in self.members:
            with suppress(OSError):  # it has ended; what it said before it left is read below
                pipe.send(steps)
        waiting, answers = {pipe: i for i, (_, _, pipe) in enumerate(self.members)}, {}
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = " and ".join(self.members[i][0] for i in waiting.values())
                raise RuntimeError(f"{silent} did not answer within {timeout_s:g} s; see {self.folder}")
            for pipe in ready:
                name, process, _ = self.members[i := waiting.pop(pipe)]
                try:
                    answers[i] = pipe.recv()
                except (EOFError, OSError):
                    raise RuntimeError(f"{name} ended with status {process.wait(5)}; see {self.folder}") from None
                if isinstance(answers[i], str):
                    raise RuntimeError(f"{name}: {answers[i]}")
        return [answers[i] for i in range(len(self.members))]

    def end(self):
        """No process of the row is left when this returns."""
        for _, process, pipe in self.members:
            pipe.close()
            process.kill()
        for _, process, _ in self.members:
            process.wait()
        self.members = []


class Over(Exception):
    """The bench has closed the pipe."""


def turns(pipe, barrier=lambda: None):
    """Yields once before each step that the pipe asks for. All ranks of a world start and end a burst together.

    A burst's first step wakes caches and threads up, and is not timed.
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
        pipe.send(time.perf_counter() - start)


def serve(pipe):
    """One process of a row, until the pipe is closed. It answers with seconds; what goes wrong is its last answer."""
    try:
        import torch

        row, model, corpus_path, rank, threads, store = pipe.recv()
        torch.set_num_threads(threads)
        run(Row(**row), model, corpus_path, rank, store, pipe)
    except Over:
        pass
    except Exception as error:  # noqa: BLE001 - the bench says why there is no number
        traceback.print_exc()
        lines = str(error).strip().splitlines()
        pipe.send(f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}")


def run(row, model, corpus_path, rank, store, pipe):
    import torch
    import torch.distributed as dist

    from manyhands.config.options import model_config
    from manyhands.data.corpus import Corpus
    from manyhands.launch.ranks import Ranks

    corpus = Corpus.from_text("bench", Path(corpus_path).read_bytes().decode())
    options = options_of(row, model)
    config = model_config(options, len(corpus.vocab))
    if row.is_plain:
        return plain_loop(config, corpus.train_ids, turns(pipe), row.compiled)
    set_default(**loopback_gloo())
    waits = timedelta(seconds=options.train.timeout_s)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, row.ranks), rank=rank, world_size=row.ranks, timeout=waits
    )
    device = torch.device("cpu")
    ranks = Ranks(rank, row.ranks, rank, row.ranks, device, "gloo", "bench", os.uname().nodename, "train")
    held_run(ranks, options, config, corpus, turns(pipe, dist.barrier))


def options_of(row, model):
    """The trainer's Options: as `scripts/train.py` has them, but endless, and without evaluations and samples."""
    from manyhands.config.options import LogOptions, ModelOptions, Options, ParallelOptions, TrainOptions

    # between its bursts a row waits for the others': that is no stall, and no message is under way meanwhile
    train = TrainOptions(
        steps=10**9, global_batch=SEQUENCES * row.ranks, device="cpu", timeout_s=600.0, stall_s=1e6,
        compile=row.compiled,
    )  # fmt: skip
    log = LogOptions(eval_every=0, sample=0, plots=False, progress=False)
    return Options(model=ModelOptions(**model), parallel=ParallelOptions(**row.parallel), train=train, log=log)


def held_run(ranks, options, config, corpus, each):
    """The trainer's own `Run.go`, held before each step until the next item of `each`. Raises Over after the last."""
    from manyhands.config.layout import resolve_layout
    from manyhands.train.run import Run

    class HeldRun(Run):
        def train_step(self):
            if next(each, Over) is Over:
                raise Over
            return super().train_step()

    HeldRun(
        options, config, resolve_layout(options, config, ranks.world_size, ranks.local_world_size), corpus, ranks
    ).go()


def plain_loop(config, ids, turns, compiled=False):
    """The loop to compare with, as nanoGPT's train.py writes it: one process, no ranks, nothing of the trainer in it.

    The model is the trainer's own. AdamW as torch gives it (not fused), decay on matrices only; windows drawn by
    `torch.randint` and stacked; the gradients clipped by torch; the loss looked at every 50 steps.
    """
    import torch

    from manyhands.gpt.model import GPT

    torch.manual_seed(1337)
    model = GPT(config)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    if compiled:
        model.compile()
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))
    for step, _ in enumerate(turns):
        for group in optimizer.param_groups:
            group["lr"] = 1e-4 + 0.5 * 9e-4 * (1 + math.cos(math.pi * step / 1000))
        starts = torch.randint(len(ids) - config.block_size, (SEQUENCES,))
        inputs_BT = torch.stack([ids[i : i + config.block_size] for i in starts])
        targets_BT = torch.stack([ids[i + 1 : i + 1 + config.block_size] for i in starts])
        _, loss = model(inputs_BT, targets_BT)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
    sys.stdout.flush()
    os._exit(0)  # a group that others have left already cannot be left in order
