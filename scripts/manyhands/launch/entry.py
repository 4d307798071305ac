"""The first import of every program, and its last call: Ctrl-C is one sentence from the imports to the end.

import manyhands.launch.entry as entry           # above imports that take long: from here on Ctrl-C is heard
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
