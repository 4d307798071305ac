"""What the bursts of all rounds say about each row. Only arithmetic."""

import statistics
from dataclasses import dataclass, replace

from manyhands.bench.compared_runs import (
    APART,
    APART_COMPILED,
    ONE,
    ONE_COMPILED,
    ONE_THREAD,
    ONE_THREAD_COMPILED,
    TWO,
    TWO_COMPILED,
)
from manyhands.bench.numbers import Number
from manyhands.bench.other_load import QUIET_CORES

TWO_AIM, ONE_AIM = 1.3, 1.1  # times the tokens per second of the plain loop, on two cores
SCALING_AIM = 0.9
WISH = 1.5


@dataclass(frozen=True)
class Burst:
    """One burst of a row, and tokens/s of the plain loop's directly before it (None: it has failed)."""

    tokens_per_s: float
    peak_gib: float  # of its largest process
    others: float  # cores' worth of work by others meanwhile
    plain: float | None = None


@dataclass(frozen=True)
class Range:
    """Median, least and most over the rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values):
        """None without values."""
        values = list(values)
        return cls(statistics.median(values), min(values), max(values)) if values else None


@dataclass(frozen=True)
class Found:
    """A row's numbers; `error` says why there are none. A ratio is taken in each round, and then its median."""

    row: object
    error: str = ""
    tokens_per_s: Range | None = None
    ratio: Range | None = None  # to the plain loop
    mfu: float | None = None
    scaling: Range | None = None  # tokens/s / (processes x one rank of one thread)
    of_silent: Range | None = None  # tokens/s / those of as many processes that never communicate
    peak_gib: float | None = None
    others: float | None = None  # the most of all rounds


@dataclass(frozen=True)
class Comparison:
    """All rows; FLOP/s of the best matrix product (None: not measured); bursts in all, and those that were not quiet."""

    rows: list
    flop_per_s: float | None
    bursts: int
    loud: int

    def __getitem__(self, row):
        return next((found for found in self.rows if found.row == row), None)


def compare(rows, rounds, failures, flop_per_s, flops_per_token):
    """A Comparison of `rounds`, each {row: Burst}. `failures`: {row: why}."""
    found = []
    for row in rows:
        bursts = [measured[row] for measured in rounds if row in measured]
        if row in failures or not bursts:
            found.append(Found(row, failures.get(row, "it had no burst")))
            continue
        tokens = Range.of(burst.tokens_per_s for burst in bursts)
        found.append(
            Found(
                row,
                tokens_per_s=tokens,
                ratio=Range.of(burst.tokens_per_s / burst.plain for burst in bursts if burst.plain),
                mfu=tokens.median * flops_per_token / flop_per_s if flop_per_s else None,
                scaling=_scaling(row, rounds, ONE_THREAD_COMPILED if row.compiled else ONE_THREAD),
                of_silent=_scaling(row, rounds, APART_COMPILED if row.compiled else APART),
                peak_gib=max(burst.peak_gib for burst in bursts),
                others=max(burst.others for burst in bursts),
            )
        )
        if row.kind == "plain":
            found[-1] = replace(found[-1], ratio=None)
    everything = [burst.others for measured in rounds for burst in measured.values()]
    return Comparison(found, flop_per_s, len(everything), sum(others > QUIET_CORES for others in everything))


def _scaling(row, rounds, other):
    """Tokens/s per process beside those of `other`; None for one process, or where one of them has failed."""
    both = [(measured[row], measured[other]) for measured in rounds if row in measured and other in measured]
    if row.processes == 1 or not both:
        return None
    share = other.processes / row.processes
    return Range.of(share * one.tokens_per_s / beside.tokens_per_s for one, beside in both)


def numbers(found, starts=()):
    """The promises: each Number beside its aim, of the rows that are in the Comparison; and those of `starts`."""
    wanted = (
        (TWO, "ratio", "tokens/s of 2 ranks / the plain loop's", TWO_AIM, f"{WISH:g} is wished for"),
        (ONE, "ratio", "tokens/s of one process / the plain loop's", ONE_AIM, ""),
        (TWO, "of_silent", "weak scaling: 2 ranks / 2 that never communicate", SCALING_AIM, ""),
        (TWO_COMPILED, "ratio", "tokens/s of 2 compiled ranks / the compiled loop's", TWO_AIM, ""),
        (ONE_COMPILED, "ratio", "tokens/s of one compiled process / the compiled loop's", ONE_AIM, ""),
        (TWO_COMPILED, "of_silent", "weak scaling of compiled ranks, likewise", SCALING_AIM, ""),
    )
    promised = []
    for row, what, name, aim, note in wanted:
        if found[row] is None:
            continue
        value = getattr(found[row], what)
        if value is None:
            note = found[row].error or "what it is compared with has failed"
        promised.append(Number(name, value and value.median, "", aim, at_least=True, note=note))
    return [*promised, *starts]
