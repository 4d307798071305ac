"""Parse flags with argparse, with errors of one line."""

import argparse
import difflib
import sys
from collections.abc import Iterable
from typing import NoReturn

from manyhands.launch.program import REFUSED

HINT = "(--help lists all flags)"


class Flags(argparse.ArgumentParser):
    """argparse's parser, with errors that omit the usage of up to 15 lines."""

    def __init__(self, **about):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **about)

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: "):
            message += meant(message.split()[2], self._option_string_actions)
        print(f"{self.prog}: {message} {HINT}", file=sys.stderr)
        raise SystemExit(REFUSED)


def meant(word: str, known: Iterable[str]) -> str:
    """Suggest, as the end of a sentence, the entry of `known` nearest to an unknown `word` or flag with its value."""
    near = difflib.get_close_matches(word.partition("=")[0], list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""
