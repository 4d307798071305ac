"""The trainer's part of the bench: the trainer in each of its ways beside a plain PyTorch loop, on this machine.

Every row's processes start once. Then come rounds: in each, every row computes one burst of steps, and the plain loop one
directly before it, compiled where the row is, so that a ratio compares neighbours in time, whatever the machine does in the long run. A burst during
which others used the machine is done again, as long as there is patience; what then stays is said.
"""

import os
import shutil
import time
from contextlib import ExitStack
from pathlib import Path

from manyhands.bench import comparison, start_up
from manyhands.bench.compared_runs import MODEL, PEAK, PLAIN, PLAIN_COMPILED, ROWS, Job, options_of
from manyhands.bench.crew import Crew, CrewError
from manyhands.bench.other_load import QUIET_CORES, Others
from manyhands.config.options import model_config
from manyhands.predict.flops import flops_per_token

WARM_UP_STEPS = 12
START_S = 300  # for torch's import by all processes at once, and the first steps
ATTEMPTS = 4  # at one burst
PATIENCE_S = 240  # for bursts that are done again, all together


def measure_trainer(output, root, rounds=5, steps=40, rows=ROWS, model=MODEL, burst_s=120, starts=start_up.STARTS):
    """Measure, print, write trainer.json and trainer.svg. Returns the exit status: 1 if a number is missing."""
    from manyhands.bench.trainer_report import show_trainer, write_trainer
    from manyhands.preflight.plan import free_cores

    began, load = time.monotonic(), os.getloadavg()[0]
    folder = output / "runs" / "trainer"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    corpus = write_corpus(folder)
    with ExitStack() as stack:
        bursts = Bursts(rows, model, corpus, folder, free_cores(), burst_s)
        stack.callback(bursts.end)
        print(f"{len(rows)} rows: their processes start ...", flush=True)
        bursts.warm_up()
        print(f"{rounds} rounds of {steps} steps per row begin", flush=True)
        measured = [bursts.round(i, rounds, steps) for i in range(rounds)]
    config = model_config(options_of(PLAIN, model), len(set(Path(corpus[1]).read_bytes().decode())))
    found = comparison.compare(rows, measured, bursts.failures, bursts.flop_per_s, flops_per_token(config))
    numbers = comparison.numbers(found, [start_up.measure(start, folder / "starts", model) for start in starts])
    settings = {"steps": steps, "rounds": rounds, "load before": round(load, 2), "cores": free_cores()}
    settings["seconds"] = round(time.monotonic() - began)
    write_trainer(output, root, found, numbers, settings)
    show_trainer(output, found, numbers, settings)
    missing = [one.error for one in found.rows if one.error] + [n for n in numbers if n.value is None]
    return int(bool(missing) or found.flop_per_s is None)


def write_corpus(folder):
    """(name, path) of the corpus: it is looked for once, not by each process."""
    from manyhands.data.corpus import load_corpus

    corpus = load_corpus()
    path = folder / "corpus.txt"
    path.write_bytes(corpus.text.encode())
    return corpus.name, str(path)


class Bursts:
    """The crews of all rows. One that fails has no more turns: its reason is in `failures`, and the others go on."""

    def __init__(self, rows, model, corpus, folder, cores, burst_s):
        self.rows, self.burst_s, self.patience_s = rows, burst_s, PATIENCE_S
        self.crews, self.failures, self.flop_per_s = {}, {}, None
        try:
            for i, row in enumerate((PEAK, *rows)):
                job = Job(row.kind, 0, 1, row.threads or cores, "", corpus, options_of(row, model, burst_s))
                self.crews[row] = Crew(row, job, folder / f"row{i}")
        except BaseException:
            self.end()
            raise

    def warm_up(self):
        for row in list(self.crews):
            if row.kind != "peak":
                self._burst(row, WARM_UP_STEPS, START_S)

    def round(self, number, count, steps):
        """{row: Burst}: what was measured of each row that could be."""
        peak = self._burst(PEAK, 0, START_S)
        if peak:  # a ceiling: what the machine has once reached counts
            self.flop_per_s = max(self.flop_per_s or 0.0, peak["flop_per_s"])
        measured, plain = {}, {}
        for row in self.rows:
            like = PLAIN_COMPILED if row.compiled else PLAIN  # like is compared with like
            if row.kind != "plain" and (beside := self._quiet_burst(like, steps)):
                plain[like] = beside["tokens_per_s"]
            burst = self._quiet_burst(row, steps)
            if burst:
                measured[row] = comparison.Burst(plain=plain.get(like), **burst)
        print(f"round {number + 1} of {count} done", flush=True)
        return measured

    def _quiet_burst(self, row, steps):
        """The quietest of some attempts at a burst; None if the row has failed."""
        best = None
        for _ in range(ATTEMPTS):
            began = time.monotonic()
            with Others([pid for crew in self.crews.values() for pid in crew.pids]) as others:
                burst = self._burst(row, steps, self.burst_s)
            if burst is None:
                return None
            burst["others"] = others.cores
            if best is None or burst["others"] < best["others"]:
                best = burst
            if best["others"] <= QUIET_CORES or self.patience_s <= 0:
                break
            self.patience_s -= time.monotonic() - began
        return best

    def _burst(self, row, steps, timeout_s):
        if row not in self.crews:
            return None
        try:
            return self.crews[row].burst(steps, timeout_s)
        except CrewError as error:
            self.failures[row] = str(error)
            del self.crews[row]
            print(f"{row.name}: not measured: {error}", flush=True)
            return None

    def end(self):
        while self.crews:
            self.crews.popitem()[1].end()
