#!/usr/bin/env python3
"""Measure what the course promises about speed: each number beside its aim, on a machine that does nothing else.

    python scripts/bench.py                  # or `make bench`: the trainer, beside a plain PyTorch loop
    python scripts/bench.py --only switches  # what makes a step faster, each switched off once: for a GPU
    python scripts/bench.py --only notebook  # a notebook's ranks beside other packages that are installed here

You see the tables that `outputs/bench/bench.txt` keeps; `bench.json` beside it holds every sample and the machine.
Nothing is asserted: a number belongs to the machine that it was taken on. Exit status: 0, or 1 where something could
not be measured.
"""


def main():
    from manyhands.tools import bench

    return bench.main(description=__doc__)


if __name__ == "__main__":
    from manyhands.launch.entry import run_program

    run_program("bench.py", main)
