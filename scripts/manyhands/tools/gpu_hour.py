"""Run on GPUs what nobody has run there yet, the unknown first, and keep each result as soon as it is there.

    make gpu-hour                                           # or gpu-quarter: what 15 minutes of one GPU can tell
    qsub -v PREFLIGHT_ARGS=--gpu-hour jobs/preflight.pbs    # as a job

A row is a run of train.py, whose speed, memory and last loss go into `train_speed.<gpu>x<n>.json`, or another command,
whose end goes into `test_gpu.<gpu>x<n>.json`, both in assets/recorded. They are written after each row. A row that
fails is kept with the reason, and the next one begins; a second start makes the rows that are missing. Rows that went
well on these GPUs under other versions come last. At the end there are a page and a branch to send.
"""

import contextlib
import json
import math
import os
import platform
import shlex
import signal
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from manyhands.course.folders import SCRIPTS, commit, write_whole
from manyhands.launch.processes import sigterm_interrupts, supervise
from manyhands.launch.recorded_runs import RECORDED, default_name
from manyhands.launch.settings import environment, for_python
from manyhands.tools import flights

MEASURED = "--train.steps 40 --log.every 5 --log.eval-every 0 --log.eval-batches 1 --log.sample 0 --log.no-plots"
UNSAVED = "--checkpoint.no-at-end"  # 15 GB of a model of 1.2 B parameters, for each row
SAID = 4  # last lines of a command that are kept, without the course's folder
WARM_UP_LINES = 2
APART = 0.02  # of a loss in bf16 on several GPUs from the same batch's on one
ENDS_S = 60  # after a rank was killed
QUARTER_S = 14 * 60  # after them no row of a quarter begins
CORES = 2  # of the machine, for each of the rows that run side by side
LLAMA = "--preset llama3.2-1b --train.global-batch 16 --train.compile --parallel.activation-checkpointing block"
GPT2, GPT_1B = "--preset gpt2 --train.global-batch 64", "--preset gpt-1b --train.global-batch 32"


@dataclass(frozen=True)
class Row:
    """A run of train.py with `flags`, or else a `command`, on `gpus` ranks.

    like: a row on one GPU with the same batch, whose last loss this one's must be. of: the row on one GPU whose folder
    is `{of}` in the command. keeps: its checkpoint stays, for such rows. on: ranks of the run that goes on from this
    one's checkpoint. kill: one of its ranks is killed, and all others must end. beside: nothing of it is timed, so it
    may share the GPU with others of this kind.
    """

    what: str
    flags: str = ""
    command: str = ""
    gpus: int = 1
    limit_s: int = 240
    like: str = ""
    of: str = ""
    keeps: bool = False
    on: int = 0
    kill: bool = False
    beside: bool = False


def lesson(number, gpus):
    return Row(f"lesson {number}", command=f"launch.py --nproc {gpus} {number}", gpus=gpus, beside=gpus == 1)


def aligned(of) -> list[Row]:
    """Return rows that align and serve the model of the row `of`, which keeps its checkpoint."""
    steps = "--train.steps 10 --train.global-batch 16 --data.held-out 32 --log.no-plots"
    load = "manyhands.serve.load_test --model {of}/train/latest --clients 32 --tokens 48"
    sft = Row(f"{of}, sft", command=f"align.py sft --from {{of}}/train/latest {steps}", of=of)
    grpo = Row(f"{of}, grpo", command=f"align.py grpo --from {{of}}/align/latest {steps} {UNSAVED}", of=sft.what)
    return [sft, grpo, Row(f"{of}, served", command=load, of=of)]


def one_gpu() -> list[Row]:
    """Return what one GPU can tell."""
    joins = "pytest -q -n 0 -m gpu tests/test_on_gpus.py -k join"  # what a group takes of the GPU: with nobody beside
    tests = "pytest -q -n 4 -m gpu tests/test_on_gpus.py -k 'not lesson and not join'"
    kernels = {
        "liger's loss": "--train.loss-kernel liger", "FlashAttention 3": "--train.flash FA3",
        "micro-batches of 8": "--train.micro-batch 8", "all logits at once": "--train.no-chunk-loss",
    }  # fmt: skip
    return [
        *(lesson(number, 1) for number in ("10", "11", "12", "13", "14", "15")),
        Row("tests of kernels, memory and the trainer", command=tests, limit_s=600, beside=True),
        Row("joins", command=joins),
        Row("gpt2", GPT2 + " --train.compile"),
        *(Row(f"gpt2, {what}", f"{GPT2} --train.compile {flags}", like="gpt2") for what, flags in kernels.items()),
        *(Row(f"llama3.2-1b, micro-batch {m}", f"{LLAMA} --train.micro-batch {m}", limit_s=400) for m in (4, 2, 8)),
        Row("gpt2, heads of 128", GPT2 + " --train.compile --model.n-head 6"),
        Row("smollm2-135m", "--preset smollm2-135m --train.global-batch 32 --train.compile", keeps=True),
        *aligned("smollm2-135m"),
        Row("experts", "--preset shakespeare-moe --train.precision bf16"),
        Row("notebooks", command="preflight.py --ranks 1 --short --notebooks --output outputs/gpu_hour/notebooks",
            limit_s=1200),
    ]  # fmt: skip


def several_gpus(n) -> list[Row]:
    """Return what only n GPUs can tell, n at least 2: joins, each strategy beside one GPU, a hang, a kill, a resume."""
    joins = "pytest -q -n 0 -m gpu tests/test_on_gpus.py -k 'join or saves'"
    hangs = "pytest -q -n 0 tests/test_ranks.py -k 'hang or interrupt or killed'"
    rows = [Row("joins and checkpoints", command=joins, gpus=n, limit_s=300), lesson("02", n)]
    kinds = {
        "ddp": "", "ddp, buckets": " --parallel.all-reduce buckets --train.no-cuda-graphs",
        "fsdp": " --parallel.strategy fsdp", "fsdp, grad_op": " --parallel.strategy fsdp --parallel.sharding grad_op",
        "zero1": " --parallel.strategy zero1",
    }  # fmt: skip
    served = f"manyhands.serve.load_test --model {{of}}/train/latest --clients 32 --tokens 48 --tensor {n}"
    rows.append(Row("gpt2 on one GPU", GPT2 + " --train.compile", keeps=True))
    rows += [Row(f"gpt2, {kind}", GPT2 + " --train.compile" + flags, gpus=m, like="gpt2 on one GPU")
             for kind, flags in kinds.items() for m in sorted({2, n})]  # fmt: skip
    axes = {
        "fsdp and tensor 2": " --parallel.strategy fsdp --parallel.tensor 2", "pipeline 2": " --parallel.pipeline 2",
        "context 2": " --parallel.context 2", "tensor 2": " --parallel.tensor 2",
    }  # fmt: skip
    rows += [Row(f"gpt2, {axis}", GPT2 + flags, gpus=n, like="gpt2 on one GPU") for axis, flags in axes.items()]
    moe = "--preset shakespeare-moe --train.precision bf16"
    rows += [Row("experts on one GPU", moe), Row("experts over 2", moe + " --parallel.expert 2", gpus=n,
                                                 like="experts on one GPU")]  # fmt: skip
    rows += [Row(f"gpt-1b, {kind}", f"{GPT_1B} --train.compile --parallel.strategy {kind}", gpus=n, limit_s=400)
             for kind in ("ddp", "fsdp", "fsdp --parallel.sharding hybrid")]  # fmt: skip
    rows += [
        Row("a rank is killed", GPT2, gpus=n, kill=True),
        Row(f"a run on {n} goes on on {n // 2}", GPT2 + " --parallel.strategy fsdp", gpus=n, on=n // 2),
        Row("gpt2 served", command=served, gpus=n, of="gpt2 on one GPU"),
        Row("hangs in a notebook", command=hangs, gpus=n, limit_s=400),
        Row("notebooks", command=f"preflight.py --ranks {n} --short --notebooks --output outputs/gpu_hour/notebooks",
            gpus=n, limit_s=1200),
    ]  # fmt: skip
    return rows + [lesson(number, n) for number in ("10", "11", "12", "13", "14", "15")]


def small(n) -> list[Row]:
    """Return a row of each kind, to try on CPUs."""
    nano = "--preset nano"
    return [
        Row("nano on one", nano, keeps=True), *aligned("nano on one"),
        Row("nano, fsdp", nano + " --parallel.strategy fsdp", gpus=n, like="nano on one"),
        Row("a rank is killed", nano, gpus=n, kill=True),
        Row(f"a run on {n} goes on on {n // 2}", nano + " --parallel.strategy fsdp", gpus=n, on=n // 2),
        lesson("02", n),
    ]  # fmt: skip


def unknown_first(rows, records) -> list[Row]:
    """Return `rows` with those behind that went well in one of `records` and are needed by none before them."""
    well = {(one["what"], one["gpus"]) for record in records for one in record["rows"] if not one["why"]}
    needed, unknown, known = set(), [], []
    for row in reversed(rows):
        if (row.what, row.gpus) in well and row.what not in needed:
            known.append(row)
        else:
            unknown.append(row)
            needed |= {row.like, row.of}
    return unknown[::-1] + known[::-1]


class Hour:
    """The rows of one machine, and their records in `folder`, written after each; after `seconds` none begins."""

    def __init__(self, root: Path, rows: list[Row], folder: Path, kind: str, gpus: int, seconds: float = math.inf):
        self.root, self.folder, self.kind, self.until = root, folder, kind, time.monotonic() + seconds
        self.output = root / "outputs" / "gpu_hour"
        self.about = conditions(kind, gpus)
        name = default_name({"conditions": self.about, "world_size": gpus})
        self.paths = {"train": folder / f"train_speed.{name}.json", "test": folder / f"test_gpu.{name}.json"}
        self.found, self.before = {}, {}
        for which, path in self.paths.items():
            self.found[which], self.before[which] = self._earlier(path)
        self.rows = unknown_first(rows, [one for records in self.before.values() for one in records])
        self.stop, self.writing = threading.Event(), threading.Lock()

    def _earlier(self, path):
        """(the rows that another start of the same versions has left, the records of other versions)."""
        record = json.loads(path.read_text("utf-8")) if path.exists() else {"rows": []}
        before = record.pop("before", [])
        if record.get("versions") == self.about["versions"]:
            return record["rows"], before
        return [], before + [record] * bool(record["rows"])

    def missing(self, again=False) -> list[Row]:
        """Return the rows without a result; `again`: the failed ones, too."""
        rows = [one for found in self.found.values() for one in found]
        done = {(one["what"], one["gpus"]) for one in rows if not (again and one["why"])}
        return [row for row in self.rows if (row.what, row.gpus) not in done]

    def run(self, again=False) -> int:
        """Make the rows that are missing, write each one, and return the number of all rows that failed."""
        rows = self.missing(again)
        beside = [row for row in rows if row.beside]
        with ThreadPoolExecutor(min(len(beside), max(1, len(os.sched_getaffinity(0)) // CORES)) or 1) as pool:
            made = [pool.submit(self._make, row) for row in beside]
            try:
                for one in made:
                    one.result()
            except BaseException:
                self.stop.set()
                pool.shutdown(cancel_futures=True)
                raise
        for row in rows:
            if not row.beside:
                self._make(row)
        return sum(bool(one["why"]) for rows in self.found.values() for one in rows)

    def _make(self, row):
        began = time.monotonic()
        if began > self.until:
            return
        print(f"{row.what}, on {row.gpus} ...", flush=True)
        result = {"what": row.what, "gpus": row.gpus, "flags": row.flags or row.command, "why": ""}
        try:
            result |= self._train(row) if row.flags else self._command(row)
        except Exception as error:  # noqa: BLE001 - the rows that follow have this hour alone
            result["why"] = str(error) if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
        if self.stop.is_set():
            return  # it was ended, and has no result
        result["seconds"] = round(time.monotonic() - began, 1)
        kept = self.found["train" if row.flags else "test"]
        with self.writing:
            kept[:] = [one for one in kept if (one["what"], one["gpus"]) != (row.what, row.gpus)] + [result]
            self.write()
        print(f"{row.what}, on {row.gpus}: {result['why'] or 'well'}, {result['seconds']:.0f} s", flush=True)

    def write(self):
        """Write both records and the page."""
        for kind, path in self.paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if self.found[kind]:
                record = self.about | {"rows": self.found[kind]} | {"before": self.before[kind]}
                write_whole(path, json.dumps(record, indent=1) + "\n")
        self.output.mkdir(parents=True, exist_ok=True)
        write_whole(self.output / "page.md", self.page())

    def page(self) -> str:
        """Return what was found, as Markdown: what failed, speeds, and what is missing."""
        rows = [one for found in self.found.values() for one in found]
        failed = [f"- **{one['what']}**, on {one['gpus']}: {one['why']}" for one in rows if one["why"]]
        speeds = [
            f"| {one['what']} | {one['gpus']} | {statistics.median(one['tokens_per_s']):,.0f} | "
            f"{100 * (one['mfu'] or 0):.1f} % | {one['memory_gib']:.1f} | {one['loss']:.4f} |"
            for one in rows if "tokens_per_s" in one
        ]  # fmt: skip
        missing = ", ".join(f"{row.what} on {row.gpus}" for row in self.missing()) or "nothing"
        table = ["| row | ranks | tokens/s | MFU | GiB | loss |", "|---|---|---|---|---|---|", *speeds]
        lines = [f"# {self.about['hardware']}", "", f"torch {self.about['versions']['torch']}, {self.about['commit']}",
                 "", f"## Failed: {len(failed)} of {len(rows)}", "", *failed, "", "## Speed", "", *table, "",
                 f"Not run: {missing}."]  # fmt: skip
        return "\n".join(lines) + "\n"

    def _start(self, row, command, log, limit_s):
        environ = for_python(environment(MANYHANDS_OUTPUTS=str(log.parent), MANYHANDS_DEVICE=self.kind), SCRIPTS)
        ended = supervise(command, log=log, timeout_s=limit_s, environ=environ, cwd=self.root, stop=self.stop)
        said = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()] or ["nothing"]
        if ended.status != 0:
            how = f"did not end within {limit_s} s" if ended.timed_out else f"ended with status {ended.status}"
            raise RuntimeError(f"{how}: {said[-1][:200]}")
        return [line.replace(f"{self.root}/", "")[:200] for line in said[-SAID:]]

    def _folder(self, what, gpus=1):
        return self.output / "runs" / f"{''.join(c if c.isalnum() else '_' for c in what)}_{gpus}"

    def _command(self, row):
        program, *rest = shlex.split(row.command.format(of=shlex.quote(str(self._folder(row.of)))))
        if program == "launch.py":  # the last word is a lesson's number
            rest[-1] = str(next(SCRIPTS.glob(f"{rest[-1]}_*.py")))
        start = [str(SCRIPTS / program)] if program.endswith(".py") else ["-m", program]
        log = self._folder(row.what, row.gpus) / "log.txt"
        return {"said": self._start(row, [sys.executable, *start, *rest], log, row.limit_s)}

    def _train(self, row):
        folder = self._folder(row.what, row.gpus)
        flags = [*shlex.split(f"{MEASURED} {row.flags}"), f"--train.device={self.kind}"]
        flags += [] if row.on or row.keeps else [UNSAVED]
        if row.on:
            flags += ["--checkpoint.folder", str(folder / "checkpoints"), "--train.steps", "20"]
        if row.kill:
            return self._killed(row, flags, folder)
        self._start(row, self._launch(row.gpus, flags), folder / "log.txt", row.limit_s)
        if row.on:
            self._start(row, self._launch(row.on, [*flags, "--train.steps", "40"]), folder / "log.txt", row.limit_s)
        steps = (folder / "train" / "latest" / "steps.jsonl").read_text("utf-8").splitlines()
        lines = [json.loads(line) for line in steps]
        found = {name: lines[-1][name] for name in ("loss", "mfu", "memory_gib")}
        found["tokens_per_s"] = [round(line["tokens_per_s"]) for line in lines[WARM_UP_LINES:]]
        like = {one["what"]: one for one in self.found["train"] if "loss" in one}.get(row.like)
        if like and abs(like["loss"] - found["loss"]) > APART:
            raise RuntimeError(f"its last loss is {found['loss']:.4f}, and {like['loss']:.4f} in {row.like!r}")
        return found

    def _launch(self, ranks, flags):
        return [sys.executable, str(SCRIPTS / "launch.py"), f"--nproc={ranks}", "--", *flags]

    def _killed(self, row, flags, folder):
        """Kill a rank once it trains; all must end with an error, and leave nothing."""
        steps, ended = folder / "train" / "latest" / "steps.jsonl", []
        command = self._launch(row.gpus, [*flags, "--train.steps", "100000"])

        def run():
            with contextlib.suppress(RuntimeError):
                self._start(row, command, folder / "log.txt", row.limit_s)
                ended.append("no error")

        steps.unlink(missing_ok=True)
        thread = threading.Thread(target=run)
        thread.start()
        while thread.is_alive() and not steps.exists():
            time.sleep(0.5)
        ranks = [one for one in psutil.Process().children(recursive=True) if str(SCRIPTS / "train.py") in _words(one)]
        ranks = [one for one in ranks if not one.children() and "launch" not in " ".join(_words(one))]
        if not ranks:
            thread.join()
            raise RuntimeError(f"it never trained; see {folder / 'log.txt'}")
        os.kill(ranks[-1].pid, signal.SIGKILL)
        thread.join(ENDS_S)
        left = [one for one in ranks if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        if thread.is_alive() or left or ended:
            for one in left:
                one.kill()
            raise RuntimeError(f"{len(left)} ranks were there {ENDS_S} s after one was killed" if left else "no error")
        return {}


def _words(process):
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def conditions(kind: str, gpus: int) -> dict:
    """Return {"hardware", "versions", "commit", "date"} of this machine."""
    import torch

    from manyhands.launch.metrics import cpu_name

    name = cpu_name() if kind == "cpu" else torch.get_device_module(kind).get_device_name(0)
    versions = {"torch": torch.__version__.split("+")[0], "cuda": torch.version.cuda or torch.version.hip}
    versions["python"] = platform.python_version()
    about = {"hardware": f"{gpus} x {name}", "versions": versions, "commit": commit()}
    return about | {"date": time.strftime("%Y-%m-%d"), "command": f"train.py {MEASURED}, and the flags of a row"}


def main(root: Path, length: str, device: str, again: bool = False) -> int:
    """Run the hour or the quarter on this machine's GPUs, or the small list on CPUs. Return the exit status."""
    from manyhands.launch.devices import gpus_here

    kind, gpus = ("cpu", 4) if device == "cpu" else gpus_here()
    if kind == "cpu" and device != "cpu":
        print("gpu-hour: no GPU here; --device cpu tries a small list on CPUs", file=sys.stderr)
        return 2
    gpus = min(gpus, 4)
    rows = small(gpus) if kind == "cpu" else one_gpu()
    if kind != "cpu" and gpus > 1 and length == "hour":
        rows = several_gpus(gpus)
    if length == "quarter":
        rows = [replace(row, limit_s=min(row.limit_s, 180)) for row in rows]
    folder = root / "outputs" / "gpu_hour" / "recorded" if kind == "cpu" else RECORDED
    hour = Hour(root, rows, folder, kind, gpus, QUARTER_S if length == "quarter" else math.inf)
    with sigterm_interrupts():
        try:
            failed = hour.run(again)
        except KeyboardInterrupt:
            print(f"gpu-hour: interrupted; {len(hour.missing())} rows are missing: start it again", file=sys.stderr)
            return 130
    missing = f", {len(hour.missing())} missing" if hour.missing() else ""
    print(f"{len(rows)} rows, {failed} failed{missing}; page: {hour.output / 'page.md'}")
    if kind != "cpu":
        kept = [path for path in hour.paths.values() if path.exists()]
        branch = f"gpu-hour-{time.strftime('%Y%m%d-%H%M%S')}"
        print(f"to have them in the course: {flights.propose(kept, root, branch, hour.output / 'recorded.patch')}")
    return int(failed > 0)
