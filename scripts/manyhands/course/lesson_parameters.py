"""The `parameters` cell of a lesson: one place for a value, its type, its help and its range.

    length = 4         # numbers per rank, at least 1
    bucket_mib = 0.1   # bucket size in MiB, > 0
    kind = "ring"      # which algorithm, one of ring, tree

(`>= 1` says the same as "at least 1"; but papermill cannot read a line with a second "=".) A lesson that needs two
ranks says so of `n_ranks`: "at least 2".

In a notebook papermill may inject other values; in a script `--length 8` overrides them. Both are checked here.
"""

import ast
import difflib
import io
import math
import operator
import re
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LAUNCHERS_OWN = "n_ranks"  # how many processes: in a script that is the launcher's decision
COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
TYPE_NAMES = {int: "a whole number", float: "a number", str: "a text"}
NUMBER = r"-?\d[\d.]*(?:e-?\d+)?"
LIMITS = re.compile(rf"(?:^|[,;]\s*|\s)((?:[<>]=?|at least)\s*{NUMBER}|{NUMBER} to {NUMBER}|one of .+)$")


class ParameterError(ValueError):
    """A flag or a value that a lesson does not take. The message names it and says what is taken."""


@dataclass(frozen=True)
class Parameter:
    """One line of the cell. `limits` is its range, "" where anything of the type is allowed."""

    name: str
    default: int | float | str
    help: str
    limits: str = ""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def takes(self) -> str:
        """ "a whole number >= 1", "one of ring, tree"."""
        kind = "" if self.limits.startswith("one of") else TYPE_NAMES.get(type(self.default), "a whole number")
        return f"{kind} {self.limits}".strip()

    def admits(self, value) -> bool:
        """Return whether the cell may hold `value`, of whatever type."""
        if self.name == LAUNCHERS_OWN:  # None: all slots of the allocation
            return value is None or (type(value) is int and value >= least_ranks([self]))
        if type(value) is not type(self.default):
            return False
        if self.limits.startswith("one of "):
            return str(value) in re.split(r",\s*", self.limits.removeprefix("one of "))
        if isinstance(value, str):
            return True
        bounds = [float(bound) for bound in re.findall(NUMBER, self.limits)]
        if " to " in self.limits:
            return bounds[0] <= value <= bounds[1]
        sign, *_ = self.limits.split(" ")
        return math.isfinite(value) and (not bounds or COMPARE[sign](value, bounds[0]))

    def refused(self, shown: str) -> ParameterError:
        return ParameterError(f"{shown} is not accepted: it takes {self.takes}")


def read(script: str | Path) -> list[Parameter]:
    """The parameters of a lesson's script, in order; [] where it has no such cell."""
    text = Path(script).read_text(encoding="utf-8")
    found = re.search(r'^# %%.*"parameters".*\n((?:(?!# %%).*\n?)*)', text, re.MULTILINE)
    return read_cell(found[1] if found else "")


def read_cell(source: str) -> list[Parameter]:
    """The parameters in a cell's source. Raises ValueError for a line that is no `name = number or text`."""
    comments = {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found = []
    for node in ast.parse(source).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=literal):
                default = ast.literal_eval(literal)
            case _:
                raise ValueError(f"line {node.lineno} of the parameters cell is no `name = literal`")
        if type(default) not in TYPE_NAMES and name != LAUNCHERS_OWN:
            raise ValueError(f"{name} of the parameters cell is neither a number nor a text")
        comment = comments.get(node.end_lineno, "")
        limits = LIMITS.search(comment)
        text = comment[: limits.start(1)].rstrip(" ,;") if limits else comment
        spelled = re.sub(r"^at least\s*|^([<>]=?)\s*", lambda m: f"{m[1] or '>='} ", limits[1]) if limits else ""
        found.append(Parameter(name, default, text, spelled))
    return found


def least_ranks(parameters: Sequence[Parameter]) -> int:
    """Return the fewest ranks that a lesson with these parameters runs on; 1 where it does not say."""
    said = [re.match(r"(>?)=? ?(\d+)", p.limits) for p in parameters if p.name == LAUNCHERS_OWN]
    return max([1, *(int(least[2]) + bool(least[1] and "=" not in least[0]) for least in said if least)])


def parse(parameters: Sequence[Parameter], argv: Sequence[str]) -> dict:
    """The values that the command line gives: `--name value` or `--name=value`. Raises ParameterError."""
    known = {p.flag: p for p in parameters if p.name != LAUNCHERS_OWN}
    values, words = {}, list(argv)
    while words:
        word = words.pop(0)
        flag, equals, text = word.partition("=")
        flag = re.sub(r"(?<=\w)_", "-", flag)
        if flag == "--n-ranks":
            raise ParameterError(
                "--n-ranks is no flag of a script: the launcher decides, as in"
                " `python -m torch.distributed.run --standalone --nproc-per-node 4` or `mpiexec -n 4`"
            )
        if flag not in known:
            raise _unknown(word, flag, known)
        parameter = known[flag]
        if not equals:
            if not words or words[0].startswith("--"):
                raise ParameterError(f"{flag} needs a value: {parameter.takes}")
            text = words.pop(0)
        try:
            value = type(parameter.default)(text)
        except ValueError:
            raise parameter.refused(f"{flag} {text}") from None
        if not parameter.admits(value):
            raise parameter.refused(f"{flag} {text}")
        values[parameter.name] = value
    return values


def validate(parameters: Sequence[Parameter], values: Mapping) -> dict:
    """These values, checked for name, type and range (as papermill injects them). Raises ParameterError."""
    known, checked = {p.name: p for p in parameters}, {}
    for name, value in values.items():
        if name not in known:
            raise _unknown(name, name, known)
        whole_for_float = type(known[name].default) is float and type(value) is int
        checked[name] = float(value) if whole_for_float else value
        if not known[name].admits(checked[name]):
            raise known[name].refused(f"{name} = {value!r}")
    return checked


def help_text(parameters: Sequence[Parameter], program: str) -> str:
    """Return the text that `--help` prints."""
    rows = [p for p in parameters if p.name != LAUNCHERS_OWN]
    width = max((len(p.flag) for p in rows), default=0)
    lines = [f"{p.flag:<{width}}  {p.help}{'; ' * bool(p.help)}{p.takes} (now {p.default})" for p in rows]
    usage = f"python {program}" + " [--flag value ...]" * bool(rows)
    return "\n".join([usage, *(f"  {line}" for line in lines or ["takes no flags"])])


def _unknown(word, flag, known):
    if not known:
        return ParameterError(f"{word} is no flag: this script takes none")
    close = difflib.get_close_matches(flag, known, 1, 0.6)
    meant = f"; did you mean {close[0]}?" if close else ";"
    return ParameterError(f"{word} is unknown{meant} valid here: {', '.join(known)}")
