"""Flags as dataclasses name them; what is wrong with a command line is one sentence, with what is allowed.

options = parsed(Options, ["--train.steps", "40"], "train.py", "what it does")
"""

import argparse
import dataclasses
import typing
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import tyro
from tyro import _errors  # tyro's own words fill a box of 5 to 26 lines; the versions that have this are in pyproject

from manyhands.config.bounds import refuse_bounds
from manyhands.launch.flags import HINT, meant
from manyhands.launch.program import Refused

KINDS = {"INT": "a whole number", "FLOAT": "a number", "{None}|INT": "a whole number", "{None}|FLOAT": "a number"}


def parsed(kind: Any, argv: Sequence[str], prog: str, description: str | None = None, default: Any = None) -> Any:
    """A `kind`, a dataclass whose comments are the help, of a command line; `default` stands for what it leaves out.

    Raise Refused with the flag, its value and what is allowed; `--help` ends the program.
    """

    def refuse(event):
        if sentence := _sentence(event, kind, argv):
            raise Refused(f"{sentence} {HINT}")

    argv = [_spelled_out(word, kind) for word in argv]
    rest = {} if default is None else {"default": default}
    with _errors.on_parse_error(refuse):
        options = tyro.cli(kind, prog=prog, description=description, args=list(argv), **rest)
    refuse_bounds(options)
    return options


def _spelled_out(word, kind):
    """A switch that may be left open, as tyro wants it: --a.switch=True for --a.switch, =False for --a.no-switch."""
    group, _, name = word.rpartition(".")
    positive = f"{group}.{name.removeprefix('no-')}" if group else word
    return f"{positive}={word == positive}" if positive in _open_switches(kind) else word


@cache
def _open_switches(kind, group=""):
    """The flags of a dataclass that are on, off or left open."""
    hints, found = typing.get_type_hints(kind), set()
    for one in dataclasses.fields(kind):
        name = f"{group}{one.name.replace('_', '-')}"
        if dataclasses.is_dataclass(hints[one.name]):
            found |= _open_switches(hints[one.name], f"{name}.")
        elif hints[one.name] == bool | None:
            found.add(f"--{name}")
    return found


def named_value(argv: Sequence[str], flag: str) -> str | None:
    """Return the value of `flag` on a command line, in either spelling; the last of several, as in tyro."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag, dest="value", nargs="?")
    return parser.parse_known_args(list(argv))[0].value


def _sentence(event, kind, argv):
    """Return tyro's error as a sentence, or "" if tyro prints its own message."""
    if isinstance(event, _errors.UnrecognizedArgs):
        word = event.tokens[0].partition("=")[0]
        if not word.startswith("-"):
            return f"{word} is not understood: flags begin with --"
        return f"there is no flag {word}{meant(word, flags_of(kind))}"
    if isinstance(event, _errors.MissingArgs):
        return f"name {' and '.join(_name(one.arg) for one in event.missing_arguments)}"
    if isinstance(event, _errors.InvalidChoice):
        choices = ", ".join(event.choices)
        return f"{_name(event.argument)} {event.value} is not one of {choices}{meant(event.value, event.choices)}"
    if argument := getattr(event, "argument", None):
        name, wanted = _name(argument), KINDS.get(argument.lowered.metavar, argument.lowered.metavar)
        value = named_value(argv, name)
        return f"{name} {value} is not {wanted}" if value is not None else f"{name} needs {wanted}"
    return ""


def _name(argument):
    return (argument.lowered.name_or_flags or [""])[0] if not argument.is_positional() else argument.lowered.metavar


def flags_of(kind: Any, group: str = "") -> Iterator[str]:
    """Return all flags of a dataclass, as they are spelled."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for one in dataclasses.fields(kind):
        said = [about.name for about in getattr(hints[one.name], "__metadata__", ()) if getattr(about, "name", None)]
        name = f"{group}{(said or [one.name])[0].replace('_', '-')}"
        if dataclasses.is_dataclass(hints[one.name]):
            yield from flags_of(hints[one.name], f"{name}.")
        else:
            yield f"--{name}"
            if hints[one.name] in (bool, bool | None):
                yield f"--{group}no-{one.name.replace('_', '-')}"
