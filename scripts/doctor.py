#!/usr/bin/env python3
"""Look at this machine before the course does: what is OK, what is missing, and what to do about it.

    python scripts/doctor.py           # or `make doctor`
    python scripts/doctor.py --json    # the same for programs

You see a line for each check (Python, torch, MPI, JupyterLab, ports, memory, limits, GPUs, scheduler, data ...) with
OK, warning or ERROR and the remedy. It changes nothing. Exit status: 0 without errors, 1 with.
"""


def main():
    from manyhands.tools import doctor

    return doctor.main(description=__doc__)


if __name__ == "__main__":
    from manyhands.launch.program import run_program

    run_program("doctor.py", main)
