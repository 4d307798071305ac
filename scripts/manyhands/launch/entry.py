"""The first import of every program, and its last call: Ctrl-C is one sentence from the imports to the end.

if __name__ == "__main__":                       # above imports that take long
    from manyhands.launch import entry

    entry.begin()
...
if __name__ == "__main__":
    entry.run_program("plan.py", main)           # whole lines, one sentence, a status: `program.run`
"""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


def begin() -> None:
    """A program begins: Ctrl-C while it imports is one sentence, and status 130."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        early: list[int] = []
        signal.signal(signal.SIGINT, lambda number, frame: early.append(number))
        from manyhands.launch import program  # it knows what to say

        program.listen(Path(sys.argv[0]).name)
        if early:
            program.end_by(signal.SIGINT)


def run_program(name: str, main: Callable[[], int | None]) -> NoReturn:
    """End this process with the status that `main()` returns, as `program.run` does."""
    begin()
    from manyhands.launch import program

    program.run(name, main)
