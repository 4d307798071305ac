"""Measure the course's promises about speed: the trainer against a plain loop, a notebook's ranks.

In every round each row of the trainer runs once, as people start it, and reports its tokens per second in a
`steps.jsonl`. A ratio compares runs of one round, so that the machine's load affects both.
"""

import io
import json
import os
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from manyhands.course.folders import ROOT, SCRIPTS, make_private, write_whole
from manyhands.launch.flags import Flags
from manyhands.launch.processes import sigterm_interrupts, supervise
from manyhands.launch.settings import environment, for_python
from manyhands.tools.lesson_run import positive
from manyhands.tools.preflight import gather_metadata
from manyhands.tools.reference_loops import MODEL, SEQUENCES

START_UP_AIM_S = 10
LINE_STEPS = 10  # steps per line of steps.jsonl
WARM_UP_LINES = 2
RUN_S = 300  # when a run of the trainer is stopped
PLAIN = "plain loop"
NANOGPT = "nanoGPT's train.py"
APART = "2 that never communicate"
COMPILED = ", compiled"
PLAIN_SWITCHES = "as it is"
SWITCHES = {
    "not compiled": ("--train.no-compile",),
    "without CUDA graphs": ("--train.no-cuda-graphs",),
    "all logits at once": ("--train.no-chunk-loss",),
    "liger's loss, and no CUDA graphs": ("--train.loss-kernel=liger",),
    "FlashAttention 3": ("--train.flash=FA3",),
    "a stream of 32 bits": ("--train.no-low-stream",),
    "vocabulary not padded": ("--train.no-pad-vocab",),
    "micro-batches of 4": ("--train.micro-batch=4",),
    "garbage as Python likes": ("--train.no-hold-garbage",),
}
SWITCHES_LEGEND = "Medians of the rounds; a ratio is taken to the first row's run of the same round."
LEGEND = (
    "Medians of the rounds; a ratio is taken to the plain loop's run of the same round. Scaling: to as many processes\n"
    "that never communicate. Ranks have one thread each, one process has all.\n"
    "The aims are for two cores: `taskset -c 0,1 make bench`."
)


@dataclass(frozen=True)
class Number:
    """One measurement. `aim` is the most it should be, or the least where `at_least`; value None: `note` says why."""

    what: str
    value: float | None
    unit: str
    aim: float
    at_least: bool = False
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.value is None:
            return self.note or "not measured"
        kept = self.value >= self.aim if self.at_least else self.value <= self.aim
        return ("within" if kept else "beyond") + (f"; {self.note}" if self.note else "")


def main(argv=None, description=None, root=ROOT) -> int:
    """Measure, print, write. Return the exit status."""
    parser = Flags(description=description)
    add = parser.add_argument
    parts = ("trainer", "switches", "notebook")
    add("--only", choices=parts, default="trainer", help="default: trainer")
    add("--rounds", type=positive, default=5, metavar="N", help="of the trainer (default: 5)")
    add("--steps", type=positive, default=100, metavar="N", help="of each of its runs (default: 100)")
    add("--nanogpt", type=Path, metavar="CLONE", help="a row for nanoGPT's train.py on the same sizes")
    add("--output", type=Path, metavar="FOLDER", help="default: outputs/bench")
    options = parser.parse_args(argv)
    output = (options.output or root / "outputs" / "bench").resolve()
    metadata = {**gather_metadata(root), "load before": f"{os.getloadavg()[0]:.2f}"}
    numbers, rows, ways = [], [], []
    with sigterm_interrupts():
        if options.only == "notebook":
            from manyhands.tools import notebook_bench  # late: it brings the notebook's ranks

            ways = notebook_bench.all_measured()
        if options.only == "trainer":
            rows = all_rows() + reference_rows(options.nanogpt)
            rows = measure(output / "runs" / "trainer", options.rounds, options.steps, rows)
            numbers += trainer_numbers(rows)
        if options.only == "switches":
            from manyhands.launch.devices import gpus_here  # late: it brings torch

            kind, _ = gpus_here()
            rows = switch_rows(kind) + reference_rows(options.nanogpt, kind)
            rows = measure(output / "runs" / "switches", options.rounds, options.steps, rows)
    judged = [{**asdict(n), "verdict": n.verdict} for n in numbers]
    content = {"metadata": metadata, "numbers": judged, "rows": [asdict(row) for row in rows], "ways": ways}
    make_private(output)
    write_whole(output / "bench.json", json.dumps(content, indent=1) + "\n")
    legend = SWITCHES_LEGEND if options.only == "switches" else LEGEND
    tables = [trainer_table(rows), legend] * bool(rows) + [number_table(numbers)] * (not ways)
    if ways:
        tables.append("\n".join(notebook_bench.table(ways)))
    kept = Console(file=io.StringIO(), width=120)
    for console in (Console(), kept):
        for table in tables:
            console.print(table, highlight=False, soft_wrap=isinstance(table, str))
    write_whole(output / "bench.txt", kept.file.getvalue())
    print(f"written: {output / 'bench.txt'} and bench.json")
    return int(any(n.value is None for n in numbers) or any(row.error for row in rows))


def number_table(numbers):
    table = Table("what", show_edge=False, pad_edge=False)
    table.add_column("measured", justify="right")
    table.add_column("aim", justify="right")
    table.add_column("")
    for n in numbers:
        measured = "-" if n.value is None else f"{n.value:.3g} {n.unit}".strip()
        table.add_row(n.what, measured, f"{'at least' if n.at_least else 'at most'} {n.aim:g}", n.verdict)
    return table


# ------------------------------------------------------------------ the trainer


@dataclass
class Row:
    """`worlds` times `ranks` processes that compute at the same time; its samples, one per round."""

    name: str
    ranks: int = 1
    worlds: int = 1
    flags: tuple = ()  # of scripts/train.py
    loop: str = ""  # instead of the trainer: a function of `reference_loops`
    given: tuple = ()  # what that is called with
    tokens_per_s: list = field(default_factory=list)
    start_up_s: list = field(default_factory=list)
    ratio: list = field(default_factory=list)  # to the plain loop
    scaling: list = field(default_factory=list)  # to as many processes that share the machine and never communicate
    to_nanogpt: list = field(default_factory=list)  # of 2 ranks, beside its train.py
    error: str = ""  # why there are no more samples


def all_rows() -> list[Row]:
    """The ways of the trainer that are measured; what is compiled is compared with what is compiled too."""
    kinds = {"one process": {}, "2 ranks": {"ranks": 2}, APART: {"worlds": 2}}
    rows = [Row(PLAIN, loop="plain"), *(Row(name, **kind) for name, kind in kinds.items())]
    rows.append(Row(PLAIN + COMPILED, loop="plain", given=(True,)))
    rows += [Row(name + COMPILED, **kind, flags=("--train.compile",)) for name, kind in kinds.items()]
    rows.append(Row("2 ranks, torch's DDP", 2, flags=("--parallel.all-reduce=buckets",)))
    return rows + [Row(f"2 ranks, {s}", 2, flags=(f"--parallel.strategy={s}",)) for s in ("zero1", "fsdp", "tp", "pp")]


def switch_rows(kind) -> list[Row]:
    """Return rows with all speed switches on, and with each one off: GPT-2 on a GPU if `kind` is one, else MODEL."""
    gpt2 = ("--preset=gpt2", "--train.global-batch=64", f"--train.device={kind}", "--train.compile")
    base = ("--train.device=cpu",) if kind == "cpu" else gpt2
    return [Row(PLAIN_SWITCHES, flags=base)] + [Row(name, flags=(*base, *flags)) for name, flags in SWITCHES.items()]


def reference_rows(clone, kind="cpu") -> list[Row]:
    """Return a row for nanoGPT if there is a clone of it: of MODEL, or of GPT-2 on a GPU."""
    preset = None if kind == "cpu" else "gpt2"
    return [Row(NANOGPT, loop="nanogpt", given=(str(clone.resolve()), preset, kind))] if clone else []


def measure(folder, rounds, steps, rows) -> list[Row]:
    """The rows with their samples; `folder` takes what their processes write."""
    for number in range(rounds):
        for i, row in enumerate(rows):
            if not row.error:  # a row that fails has no more turns, and the others go on
                print(f"round {number + 1} of {rounds}: {row.name} ...", flush=True)
                take_turn(row, folder / f"row{i}" / f"round{number}", steps)
    return compared(rows)


def take_turn(row, folder, steps):
    """Run a row once, its worlds at the same time, and note what it reports, or why it does not."""

    def run(world):
        return run_world(row, folder / f"world{world}", steps)

    try:
        with ThreadPoolExecutor(row.worlds) as pool:
            worlds = list(pool.map(run, range(row.worlds)))
    except RuntimeError as error:
        row.error = str(error)
        print(f"{row.name}: not measured: {error}", flush=True)
        return
    # what a world reports is its slowest rank's
    medians = [statistics.median(line["tokens_per_s"] for line in lines[WARM_UP_LINES:]) for lines in worlds]
    row.tokens_per_s.append(sum(medians))
    row.start_up_s.append(worlds[0][0].get("start_up_s"))


def run_world(row, folder, steps) -> list[dict]:
    """The lines that one world of a row reports. Raise RuntimeError, one sentence, if it does not end well."""
    if row.loop:
        called = f"{row.loop}(*{row.given!r}, steps={steps}, line_steps={LINE_STEPS})"
        code = f"from manyhands.tools import reference_loops; reference_loops.{called}"
        command = [sys.executable, "-c", code]
    else:
        preset = any(flag.startswith("--preset") for flag in row.flags)
        model = [] if preset else [f"--model.{name.replace('_', '-')}={value}" for name, value in MODEL.items()]
        command = [
            sys.executable, str(SCRIPTS / "launch.py"), f"--nproc={row.ranks}", "--", f"--train.steps={steps}",
            f"--train.global-batch={SEQUENCES * row.ranks}", "--train.device=cpu", f"--log.every={LINE_STEPS}",
            "--log.eval-every=0", "--log.eval-batches=1", "--log.sample=0", "--log.no-plots", *model, *row.flags,
        ]  # fmt: skip
    environ = for_python(environment(MANYHANDS_OUTPUTS=str(folder)), SCRIPTS)
    environ.pop("OMP_NUM_THREADS", None)
    if row.worlds > 1:
        environ["OMP_NUM_THREADS"] = "1"  # as ranks have it
    ended = supervise(command, log=folder / "log.txt", timeout_s=RUN_S, environ=environ)
    lines = [json.loads(line) for path in folder.glob("train/latest/steps.jsonl") for line in path.open()]
    if ended.status != 0 or len(lines) <= WARM_UP_LINES:
        how = f"did not end within {RUN_S} s" if ended.timed_out else f"ended with status {ended.status}"
        raise RuntimeError(f"it {how}; see {folder / 'log.txt'}")
    return lines


def compared(rows) -> list[Row]:
    """Fills in `ratio` and `scaling`, round by round: the machine may be faster in one than in the next."""
    of = {row.name: row for row in rows}
    for row in rows:
        if row.name == "2 ranks" and NANOGPT in of:
            row.to_nanogpt = [ours / its for ours, its in zip(row.tokens_per_s, of[NANOGPT].tokens_per_s, strict=False)]
        suffix = COMPILED * row.name.endswith(COMPILED)
        plain, apart = of.get(PLAIN + suffix) or of.get(PLAIN_SWITCHES), of.get(APART + suffix)
        if plain and row is not plain:
            row.ratio = [mine / theirs for mine, theirs in zip(row.tokens_per_s, plain.tokens_per_s, strict=False)]
        if apart and row.ranks == apart.worlds:
            row.scaling = [mine / theirs for mine, theirs in zip(row.tokens_per_s, apart.tokens_per_s, strict=False)]
    return rows


def trainer_numbers(rows) -> list[Number]:
    """Return the promises about the trainer: the medians over the rounds of the rows that were measured."""
    promised = [
        ("2 ranks", "ratio", "tokens/s of 2 ranks / the plain loop's", 1.3),
        ("one process", "ratio", "tokens/s of one process / the plain loop's", 1.1),
        ("2 ranks", "scaling", "weak scaling: 2 ranks / 2 that never communicate", 0.9),
    ]
    promised += [(name + COMPILED, what, says + COMPILED, aim) for name, what, says, aim in promised]
    promised += [(name, "start_up_s", f"start-up, {name}", START_UP_AIM_S) for name in ("one process", "2 ranks")]
    found, of = [], {row.name: row for row in rows}
    if of.keys() >= {"2 ranks", NANOGPT}:
        promised.append(("2 ranks", "to_nanogpt", "tokens/s of 2 ranks / nanoGPT's train.py", 1.25))
    for name, what, says, aim in promised:
        if row := of.get(name):
            samples, seconds = getattr(row, what), what == "start_up_s"
            note = "" if samples else row.error or "what it is compared with has failed"
            value = statistics.median(samples) if samples else None
            found.append(Number(says, value, "s" if seconds else "", aim, at_least=not seconds, note=note))
    return found


def trainer_table(rows) -> Table:
    """One line per row: medians, and the range of its ratio."""
    found = Table("", "tokens/s", "/ plain", "range", "scaling", box=None, pad_edge=False)
    for row in rows:
        if row.error or not row.tokens_per_s:
            found.add_row(row.name, f"not measured: {row.error}")
            continue
        spread = f"{min(row.ratio):.2f}-{max(row.ratio):.2f}" if row.ratio else "-"
        ratio, scaling = (f"{statistics.median(s):.2f}" if s else "-" for s in (row.ratio, row.scaling))
        found.add_row(row.name, f"{statistics.median(row.tokens_per_s):,.0f}", ratio, spread, scaling)
    return found
