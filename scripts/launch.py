#!/usr/bin/env python3
"""Start ranks with the right command for where you are: torchrun here, mpiexec in a PBS job, srun in a Slurm one.

    python scripts/launch.py -- --preset shakespeare --parallel.strategy fsdp     # scripts/train.py with these flags
    python scripts/launch.py --nproc 4 --dry-run -- --train.steps 20              # only print the command
    python scripts/launch.py --nproc 4 scripts/02_collectives.py -- --repeats 3   # another program
    python scripts/launch.py --timeout 600 --retries 3 -- --checkpoint.folder outputs/mine

You should see the command, ready to be copied, and then what it prints. `--timeout S` ends a run that prints nothing
for S seconds: its processes are asked to end, then killed. `--retries K` starts a failed run again, up to K times, and
not one whose flags are wrong or whose loss has diverged; train.py goes on where it was if a checkpoint folder is named.
Signals are passed on, unless they are ignored, as SIGHUP under nohup; no process is left behind. The exit status is the
run's own, also under torchrun (128 + n where signal n ended it; 0 where it saved and left), 124 after a time-out, 2 for
a wrong flag.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def main():
    from manyhands.config.options import read_options
    from manyhands.launch import commands

    return commands.main(description=__doc__, refuse_flags=read_options)


if __name__ == "__main__":
    from manyhands.launch.entry import run_program

    run_program("launch.py", main)
