"""The first import and the last call of every program, so that Ctrl-C always ends it with one sentence.

import manyhands.launch.entry as entry           # above slow imports: handles Ctrl-C from here on
...
if __name__ == "__main__":
    entry.run_program("plan.py", main)           # whole lines, one sentence, a status: `program.run`
"""

import signal
import sys
from pathlib import Path

from manyhands.launch import program

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    program.listen(Path(sys.argv[0]).name)
run_program = program.run
