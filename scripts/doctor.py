#!/usr/bin/env python3
"""Look at this machine before the course does: what is OK, what is missing, and what to do about it.

    python scripts/doctor.py           # or `make doctor`
    python scripts/doctor.py --json    # the same for programs
    sbatch jobs/doctor.slurm           # or qsub jobs/doctor.pbs: --job asks the ranks of a job on its nodes

You see a line for each check (Python, torch, MPI, JupyterLab, memory, limits, network, GPUs, scheduler, data ...) with
OK, warning or ERROR, and below it the remedy. A check shows the first problem that it finds: after the remedy run it
again. It changes nothing. `--job` asks the ranks of a job four questions instead: which cores, which GPUs, which
channels between them, and how long importing torch took. Exit status: 0 without errors, 1 with.
"""


def main():
    from manyhands.tools import doctor

    return doctor.main(description=__doc__, examine_job=examine_job)


def examine_job():
    from manyhands.tools import doctor_in_job

    return doctor_in_job.examine_job()


if __name__ == "__main__":
    from manyhands.launch.entry import run_program

    run_program("doctor.py", main)
