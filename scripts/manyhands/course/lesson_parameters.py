"""The `parameters` cell of a lesson: one place for a value, its type, its help and its range.

    length = 4         # numbers per rank, at least 1
    bucket_mib = 0.1   # bucket size in MiB, > 0
    kind = "ring"      # which algorithm, one of ring, tree

(`>= 1` says the same as "at least 1"; but papermill cannot read a line with a second "=".)

In a notebook papermill may inject other values; in a script `--length 8` overrides them. Both are checked here.
"""

from __future__ import annotations

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
TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


class ParameterError(ValueError):
    """A flag or a value that a lesson does not take. The message names it and says what is taken."""


@dataclass(frozen=True)
class Parameter:
    """One line of the cell. `limits` is its range, "" where anything of the type is allowed."""

    name: str
    default: int | float | str | bool | None
    help: str
    limits: str = ""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def read(script: str | Path) -> list[Parameter]:
    """The parameters of a lesson's script, in order; [] where it has no such cell."""
    return read_cell(cell_of(Path(script).read_text(encoding="utf-8")))


def cell_of(script_text: str) -> str:
    """The source of the cell tagged `parameters` in a script in percent format, "" without one."""
    found = re.search(r'^# %%.*"parameters".*\n((?:(?!# %%).*\n?)*)', script_text, re.MULTILINE)
    return found[1] if found else ""


def read_cell(source: str) -> list[Parameter]:
    """The parameters in a cell's source. Raises ValueError for a line that is no `name = literal`."""
    comments = {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found = []
    for node in ast.parse(source).body:
        if not (isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)):
            raise ValueError(f"line {node.lineno} of the parameters cell is no `name = literal`")
        comment = comments.get(node.end_lineno, "")
        limits = re.search(r"(?:^|[,;]\s*|\s)((?:>=|<=|>|<|at least)\s*\S+|\S+ to \S+|one of .+)$", comment)
        limits = limits[1] if limits and _is_range(limits[1]) else ""
        text = comment[: len(comment) - len(limits)].rstrip(" ,;")
        limits = limits.replace("at least ", ">= ")
        found.append(Parameter(node.targets[0].id, ast.literal_eval(node.value), text, limits))
    return found


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
            raise ParameterError(_unknown(word, flag, known))
        if not equals:
            if not words or words[0].startswith("--"):
                raise ParameterError(f"{flag} needs a value: {_wanted(known[flag])}")
            text = words.pop(0)
        if known[flag].name in values:
            raise ParameterError(f"{flag} is given twice; keep one")
        values[known[flag].name] = _from_text(known[flag], text)
    return values


def validate(parameters: Sequence[Parameter], values: Mapping) -> dict:
    """These values, checked for name, type and range (as papermill injects them). Raises ParameterError."""
    known = {p.name: p for p in parameters}
    checked = {}
    for name, value in values.items():
        if name not in known:
            raise ParameterError(_unknown(name, name, known))
        checked[name] = _in_range(known[name], _of_type(known[name], value), name)
    return checked


def help_text(parameters: Sequence[Parameter], program: str) -> str:
    """What `--help` prints."""
    rows = [(p.flag, p) for p in parameters if p.name != LAUNCHERS_OWN]
    width = max((len(flag) for flag, _ in rows), default=0)
    lines = [f"{flag:<{width}}  {p.help}{'; ' * bool(p.help)}{_wanted(p)} (now {p.default})" for flag, p in rows]
    usage = f"python {program}" + " [--flag value ...]" * bool(rows)
    return "\n".join([usage, *(f"  {line}" for line in lines or ["takes no flags"])])


def _unknown(word, flag, known):
    if not known:
        return f"{word} is no flag: this script takes none"
    close = difflib.get_close_matches(flag, known, 1, 0.6)
    return f"{word} is unknown{f'; did you mean {close[0]}?' if close else ';'} valid here: {', '.join(known)}"


def _kind(parameter):
    return type(parameter.default)


def _wanted(parameter):
    if parameter.limits.startswith("one of"):
        return parameter.limits
    name = TYPE_NAMES.get(_kind(parameter), "a number, a text or none")
    return f"{name} {parameter.limits}".strip()


def _refuse(parameter, label, shown):
    return ParameterError(f"{label} {shown} is not accepted: it takes {_wanted(parameter)}")


def _from_text(parameter, text):
    """`text` of the command line as the type that the cell's literal has."""
    kind, flag = _kind(parameter), parameter.flag
    try:
        if kind is bool:
            value = {"true": True, "false": False}[text.lower()]
        elif kind in (int, float):
            value = kind(text)
        elif kind is str:
            value = text
        else:
            value = _any(text)
    except (KeyError, ValueError):
        raise _refuse(parameter, flag, text) from None
    return _in_range(parameter, value, flag)


def _any(text):
    if text.lower() == "none":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _of_type(parameter, value):
    kind = _kind(parameter)
    if kind is float and type(value) is int:
        return float(value)
    if parameter.name == LAUNCHERS_OWN and value is None:
        return value  # None: all slots of the allocation
    if parameter.default is not None and type(value) is not kind:
        raise _refuse(parameter, parameter.name, f"= {value!r}")
    return value


def _is_range(limits):
    return limits.startswith("one of ") or bool(_bounds(limits))


def _bounds(limits):
    """The comparisons that `>= 1`, `> 0` or `1 to 256` stand for; [] if it is ordinary prose."""
    try:
        if between := re.fullmatch(r"(\S+) to (\S+)", limits):
            return [(">=", float(between[1])), ("<=", float(between[2]))]
        if one := re.fullmatch(r"(>=|<=|>|<)\s*(\S+)", limits.replace("at least ", ">= ")):
            return [(one[1], float(one[2]))]
    except ValueError:
        pass
    return []


def _in_range(parameter, value, label):
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and not math.isfinite(value):
        raise _refuse(parameter, label, value)
    if parameter.name == LAUNCHERS_OWN and number and value < 1:
        raise _refuse(parameter, label, f"= {value}")
    if parameter.limits.startswith("one of "):
        allowed = [word.strip() for word in parameter.limits.removeprefix("one of ").split(",")]
        if str(value) not in allowed:
            raise _refuse(parameter, label, value)
    elif number and not all(COMPARE[sign](value, bound) for sign, bound in _bounds(parameter.limits)):
        raise _refuse(parameter, label, value)
    return value
