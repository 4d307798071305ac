"""The trainer in each of its ways beside a plain PyTorch loop, on this machine.

In every round each row runs once, as people start it, and reports its tokens per second in a `steps.jsonl`. A ratio
compares two runs of one round, so whatever the machine does in the long run, it does to both.

    python -m manyhands.tools.bench_trainer 100 [--train.compile]     # the plain loop alone
"""

import json
import math
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from rich.table import Table

from manyhands.course.folders import SCRIPTS
from manyhands.launch.processes import supervise
from manyhands.launch.run_folder import outputs_folder
from manyhands.launch.settings import environment, for_python

SEQUENCES = 12  # per rank and step
MODEL = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64}
LINE_STEPS = 10  # steps per line of steps.jsonl
WARM_UP_LINES = 2
RUN_S = 300
PLAIN = "plain loop"
APART = "2 that never communicate"
COMPILED = ", compiled"
LEGEND = (
    "Medians of the rounds; a ratio is taken to the plain loop's run of the same round. Scaling: to as many processes\n"
    "that never communicate. Ranks have one thread each, one process has all.\n"
    "The aims are for two cores: `taskset -c 0,1 make bench`."
)


@dataclass
class Row:
    """`worlds` times `ranks` processes that compute at the same time; its samples, one per round."""

    name: str
    ranks: int = 1
    worlds: int = 1
    flags: tuple = ()  # of scripts/train.py
    tokens_per_s: list = field(default_factory=list)
    start_up_s: list = field(default_factory=list)
    ratio: list = field(default_factory=list)  # to the plain loop
    scaling: list = field(default_factory=list)  # to as many processes that share the machine and never communicate
    error: str = ""  # why there are no more samples


def all_rows() -> list[Row]:
    """The ways of the trainer that are measured; what is compiled is compared with what is compiled too."""
    kinds = {PLAIN: {}, "one process": {}, "2 ranks": {"ranks": 2}, APART: {"worlds": 2}}
    rows = [Row(name, **kind) for name, kind in kinds.items()]
    rows += [Row(name + COMPILED, **kind, flags=("--train.compile",)) for name, kind in kinds.items()]
    rows.append(Row("2 ranks, torch's DDP", 2, flags=("--parallel.all-reduce=buckets",)))
    return rows + [Row(f"2 ranks, {s}", 2, flags=(f"--parallel.strategy={s}",)) for s in ("zero1", "fsdp", "tp", "pp")]


def measure(folder, rounds, steps, rows=None) -> list[Row]:
    """The rows (None: all of them) with their samples; `folder` takes what their processes write."""
    rows = rows or all_rows()
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
    row.tokens_per_s.append(
        sum(statistics.median(line["tokens_per_s"] for line in lines[WARM_UP_LINES:]) for lines in worlds)
    )
    row.start_up_s.append(worlds[0][0].get("start_up_s"))


def run_world(row, folder, steps) -> list[dict]:
    """The lines that one world of a row reports. Raises RuntimeError, one sentence, if it does not end well."""
    if row.name.startswith(PLAIN):
        command = [sys.executable, "-m", "manyhands.tools.bench_trainer", str(steps), *row.flags]
    else:
        model = [f"--model.{name.replace('_', '-')}={value}" for name, value in MODEL.items()]
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
        suffix = COMPILED * row.name.endswith(COMPILED)
        plain, apart = of.get(PLAIN + suffix), of.get(APART + suffix)
        if plain and row is not plain:
            row.ratio = [mine / theirs for mine, theirs in zip(row.tokens_per_s, plain.tokens_per_s, strict=False)]
        if apart and row.ranks == apart.worlds:
            row.scaling = [mine / theirs for mine, theirs in zip(row.tokens_per_s, apart.tokens_per_s, strict=False)]
    return rows


def table(rows) -> Table:
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


def plain_loop(steps, compiled):
    """The loop to compare with, as nanoGPT's train.py writes it: one process, no ranks, nothing of the trainer in it.

    The model is the trainer's own. AdamW as torch gives it (not fused), decay on matrices only; windows drawn by
    `torch.randint` and stacked; the gradients clipped by torch; the loss looked at every 50 steps.
    """
    import torch

    from manyhands.data.corpus import load_corpus
    from manyhands.gpt.model import GPT, GPTConfig

    corpus = load_corpus()
    ids, block_size = corpus.train_ids, MODEL["block_size"]
    folder = outputs_folder() / "train" / "latest"
    folder.mkdir(parents=True)
    torch.manual_seed(1337)
    model = GPT(GPTConfig(len(corpus.vocab), **MODEL))
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    if compiled:
        model.compile()
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))
    began = time.perf_counter()
    with open(folder / "steps.jsonl", "w") as lines:
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = 1e-4 + 0.5 * 9e-4 * (1 + math.cos(math.pi * step / steps))
            starts = torch.randint(len(ids) - block_size, (SEQUENCES,))
            inputs_BT = torch.stack([ids[i : i + block_size] for i in starts])
            targets_BT = torch.stack([ids[i + 1 : i + 1 + block_size] for i in starts])
            _, loss = model(inputs_BT, targets_BT)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step % 50 == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)
            if (step + 1) % LINE_STEPS == 0:
                now = time.perf_counter()
                tokens_per_s = LINE_STEPS * SEQUENCES * block_size / (now - began)
                lines.write(json.dumps({"step": step + 1, "tokens_per_s": tokens_per_s}) + "\n")
                began = now


if __name__ == "__main__":
    plain_loop(int(sys.argv[1]), "--train.compile" in sys.argv)
