"""Read the line `%%ranks` of a cell, for the magic as for the pairs of notebook and script.

options = read_line("0,2 --timeout 5")      # CellOptions(timeout_s=5.0, ranks=(0, 2), whole=False, trace=False)
"""

import argparse
import re
import shlex
from dataclasses import dataclass

CELL_S = 60.0
MANUAL = """\
Run the cell on every rank and show what they say, in rank order, equal outputs once.

In a script the line is a comment and the cell's lines run anyway, on every rank: a lesson, which is a script too, takes
`if rank == 2` instead of RANKS."""
PARSER = argparse.ArgumentParser(
    add_help=False, exit_on_error=False, allow_abbrev=False, description=MANUAL,
    usage="%%%%ranks [RANKS] [--timeout SECONDS] [--all] [--trace]",
    formatter_class=argparse.RawDescriptionHelpFormatter,
)  # fmt: skip
PARSER.add_argument(
    "ranks", nargs="*", metavar="RANKS", help="2, or 0,2, or 0-2: these run the cell, the others wait for the next one"
)
PARSER.add_argument(
    "--timeout", type=float, metavar="SECONDS",
    help=f"for the whole cell: {CELL_S:.0f}, and 300 until the ranks have met. It grows with the load of the machine, "
    "up to 3 times, or by MANYHANDS_PATIENCE",
)  # fmt: skip
PARSER.add_argument("--all", action="store_true", help="show all that a cell prints, also 100,000 lines")
PARSER.add_argument(
    "--trace", action="store_true",
    help="show below the cell what each rank did when: computing, in which collective, waiting for whom; "
    "`measure.trace` says how",
)  # fmt: skip
FLAGS = ["--timeout", "--all", "--trace"]


@dataclass(frozen=True)
class CellOptions:
    """Hold how a cell runs on ranks.

    timeout_s: for the whole cell; ranks: those that run it, sorted, None for all; whole: all that they print is shown;
    trace: their collectives are recorded.
    """

    timeout_s: float = CELL_S
    ranks: tuple[int, ...] | None = None
    whole: bool = False
    trace: bool = False


def read_line(line: str, timeout_s: float = CELL_S) -> CellOptions:
    """Return what follows `%%ranks`; `timeout_s` is for a line that names none. Raises ValueError if it is wrong."""
    try:
        found, others = PARSER.parse_known_args(shlex.split(line, comments=True))
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
    timeout_s = timeout_s if found.timeout is None else found.timeout
    if not timeout_s > 0:
        raise ValueError(line)
    words = found.ranks + others  # ranks may stand on both sides of a flag
    return CellOptions(timeout_s, _ranks_named(" ".join(words)) if words else None, found.all, found.trace)


def _ranks_named(text):
    """The ranks in "0,2-3" or "0 2 3", each once, sorted: (0, 2, 3). Raises ValueError for anything else."""
    found = set()
    for part in re.split(r"\s*,\s*|\s+", text.strip()):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) < int(first):
            raise ValueError(text)
        found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))
