#!/usr/bin/env python3
"""Look at this machine before the course does: what is OK, what is missing, and what to do about it.

    python scripts/doctor.py           # or `make doctor`
    python scripts/doctor.py --json    # the same for programs

You see a line for each check (Python, torch, MPI, JupyterLab, memory, limits, network, GPUs, scheduler, data ...) with
OK, warning or ERROR, and below it the remedy. A check shows the first problem that it finds: after the remedy run it
again. It changes nothing. Exit status: 0 without errors, 1 with.
"""


def main():
    from manyhands.tools import doctor

    return doctor.main(description=__doc__)


if __name__ == "__main__":
    from manyhands.launch.entry import run_program

    run_program("doctor.py", main)
