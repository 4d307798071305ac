"""What the trainer's part of the bench compares: one Row each, and what a process of it is told."""

from dataclasses import dataclass, field, replace

from manyhands.config.options import LogOptions, ModelOptions, Options, ParallelOptions, TrainOptions

SEQUENCES = 12  # per rank and step
MODEL = ModelOptions(n_layer=4, n_head=4, n_embd=128, block_size=64)
NEVER_S = 1e6


@dataclass(frozen=True)
class Row:
    """`worlds` groups of `ranks` processes that compute at the same time, each with `threads` (None: one per core)."""

    name: str
    kind: str = "trainer"  # trainer, plain, or peak
    ranks: int = 1
    worlds: int = 1
    threads: int | None = None
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    compiled: bool = False  # --train.compile; it is compared with what is compiled too

    @property
    def processes(self):
        return self.worlds * self.ranks


def _two(name, compiled=False, **parallel):
    return Row(name, ranks=2, threads=1, parallel=ParallelOptions(**parallel), compiled=compiled)


PEAK = Row("matrix products", kind="peak")
PLAIN = Row("plain PyTorch loop", kind="plain")
PLAIN_COMPILED = Row("plain loop, compiled", kind="plain", compiled=True)
ONE = Row("trainer, one process")
ONE_THREAD = Row("one rank of one thread", threads=1)
TWO = _two("2 ranks")
APART = Row("2 that never communicate", worlds=2, threads=1)
APART_COMPILED = Row("2 that never communicate, compiled", worlds=2, threads=1, compiled=True)
ONE_COMPILED = Row("one process, compiled", compiled=True)
ONE_THREAD_COMPILED = Row("one thread, compiled", threads=1, compiled=True)
TWO_COMPILED = _two("2 ranks, compiled", compiled=True)
ROWS = (
    PLAIN,
    ONE,
    ONE_THREAD,
    TWO,
    APART,
    PLAIN_COMPILED,
    ONE_COMPILED,
    ONE_THREAD_COMPILED,
    TWO_COMPILED,
    APART_COMPILED,
    _two("2 ranks, torch's DDP", all_reduce="buckets"),
    _two("2 ranks, zero1", strategy="zero1"),
    _two("2 ranks, fsdp", strategy="fsdp"),
    _two("2 ranks, tp", strategy="tp"),
    _two("2 ranks, pp", strategy="pp"),
)


def options_of(row, model=MODEL, timeout_s=600.0):
    """The trainer's Options: as `scripts/train.py` has them, but endless, and without evaluations and samples."""
    return replace(
        Options(),
        model=model,
        parallel=row.parallel,
        # between its bursts a row waits for the others': that is no stall, and no message is under way meanwhile
        train=TrainOptions(
            steps=10**9,
            global_batch=SEQUENCES * row.ranks,
            device="cpu",
            timeout_s=timeout_s,
            stall_s=NEVER_S,
            compile=row.compiled,
        ),
        log=LogOptions(eval_every=0, sample=0, plots=False, progress=False),
    )


@dataclass(frozen=True)
class Job:
    """What one process of a row is told when it starts."""

    kind: str
    rank: int
    world_size: int
    threads: int
    store: str  # path of the file through which the ranks of a world meet
    corpus: tuple  # name, path
    options: Options
