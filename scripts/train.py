"""Train a GPT: any strategy, one command, from one process on a laptop to many nodes of GPUs.

    python scripts/train.py                                              # preset nano, a world of one
    python scripts/launch.py --nproc 2 -- --train.steps 1000             # two data-parallel ranks (DDP)
    python -m torch.distributed.run --standalone --nproc-per-node 4 scripts/train.py --parallel.strategy fsdp
    mpiexec -n 8 python scripts/train.py --parallel.strategy fsdp --parallel.tensor 2 --parallel.pipeline 2
    python scripts/train.py --data.folder data/mine                      # a text of your own: scripts/prepare_data.py
    python scripts/train.py --preset olmo-7b --ranks 64 --dry-run        # what would run, and whether it fits
    sbatch jobs/train.slurm --preset gpt2 --train.precision bf16         # a job; jobs/README.md has PBS

Strategies: ddp, zero1, fsdp, tp, pp, deepspeed, and products of them: `--parallel.tensor 2` gives two ranks to each layer
and the strategy gets the rest. Presets: `--preset`, then a file (`--config run.toml`), then flags; `--help` lists all.

You should see what runs, one line per interval, a sample at each evaluation, and curves at the end. The run's folder,
outputs/train/latest, holds steps.jsonl, metrics.json and the curves, and the checkpoints unless
`--checkpoint.folder` names a place: naming the same one again resumes, on any number of ranks, with any strategy.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def main():
    from manyhands.trainer.stopping import hold

    hold()  # a scheduler's SIGUSR1 may come while torch is still being imported
    from manyhands.config.options import OptionError, read_options
    from manyhands.launching.join import end

    with open(os.devnull, "w") as nowhere, contextlib.ExitStack() as quiet:
        if _some_other_rank():  # all ranks read the same flags: one says what is wrong with them
            quiet.enter_context(contextlib.redirect_stdout(nowhere))
            quiet.enter_context(contextlib.redirect_stderr(nowhere))
        status, why = None, ""
        try:
            options = read_options(sys.argv[1:], prog="train.py", description=__doc__)
        except OptionError as error:
            status, why = 2, f"train.py: {error}"
        except SystemExit as ended:  # tyro has printed its help, or what it did not understand
            status = ended.code or 0
    if status is not None:
        end(why, status, sys.stderr)
    if options.dry_run:
        from manyhands.trainer.dry_run import dry_run

        return dry_run(options)
    from manyhands.trainer.run import train

    return train(options)


def _some_other_rank():
    from manyhands.launching.launchers import LaunchError, resolve

    try:
        return resolve(os.environ).rank != 0
    except LaunchError:
        return False


if __name__ == "__main__":
    from manyhands.runs.exit_status import INTERRUPTED, say_status
    from manyhands.runs.ranks import joined
    from manyhands.trainer.stopping import exit_process

    try:
        status = main()
    except SystemExit as ended:  # it has said why
        status = ended.code
    except KeyboardInterrupt:  # Ctrl-C before the training began, or for the second time
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's and the launcher's: it is said once
        if not _some_other_rank():
            why = "train.py: ended by Ctrl-C"
            say_status(INTERRUPTED, why)
            print(why, file=sys.stderr)
        status = INTERRUPTED
    exit_process(status, joined())
