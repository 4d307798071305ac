#!/usr/bin/env python3
"""Run the whole course before an event: every notebook by papermill, every script under torchrun and mpiexec.

    python scripts/preflight.py                      # or `make preflight`: everything, at full length
    python scripts/preflight.py --lesson 03          # one lesson
    python scripts/preflight.py --short --notebooks  # a quick look at the notebooks
    python scripts/preflight.py --device cuda --ranks 8
    python scripts/preflight.py --resume             # after an interruption: what went well is kept
    python scripts/preflight.py --submit             # also one small job through the scheduler, as in lesson 04
    python scripts/preflight.py --attendees 30 --nodes 8 --gpus-per-node 4     # runs nothing: does a class fit?
    sbatch jobs/preflight.slurm                      # or qsub jobs/preflight.pbs: on the nodes of a job

Each script runs on 2 and on 4 ranks, in a job of several nodes with a rank per GPU on all of them, as notebooks do,
and the metrics of all runs of a lesson must agree. You see one line per run, and in the end the place of
`outputs/preflight/report.html`, which is written after each run: what is ready, what is slow and what broke, with the
first error and its rank, and what has changed since the last preflight that ended: versions, what is slower, what fails
now. On GPUs the numbers of each lesson become a commit on a branch of its own, or a patch, for assets/recorded.
Exit status: 0 all is well, 1 not, 2 refused, 130 interrupted.
A run that fails or hangs does not stop the others; one that hangs is ended after --timeout seconds.
"""


def main():
    from manyhands.tools import preflight

    return preflight.main(description=__doc__)


if __name__ == "__main__":
    from manyhands.launch.entry import run_program

    run_program("preflight.py", main)
