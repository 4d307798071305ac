"""Flags that argparse reads, where what is wrong with them is one line."""

import argparse
import difflib
import sys
from collections.abc import Iterable
from typing import NoReturn

from manyhands.launch.program import REFUSED

HINT = "(--help lists all flags)"


class Flags(argparse.ArgumentParser):
    """argparse's parser; its errors come without the usage, which takes up to 15 lines."""

    def __init__(self, **about):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **about)

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: "):
            message += meant(message.split()[2], self._option_string_actions)
        print(f"{self.prog}: {message} {HINT}", file=sys.stderr)
        raise SystemExit(REFUSED)


def meant(word: str, known: Iterable[str]) -> str:
    """What to add to a sentence about a `word`, or a flag with its value, that is none of `known`: the nearest one."""
    near = difflib.get_close_matches(word.partition("=")[0], list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""
