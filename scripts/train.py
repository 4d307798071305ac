"""Train a GPT: any strategy, one command, from one process on a laptop to many nodes of GPUs.

    python scripts/train.py                                              # preset nano, a world of one
    python scripts/launch.py --nproc 2 -- --train.steps 1000             # two data-parallel ranks (DDP)
    python -m torch.distributed.run --standalone --nproc-per-node 4 scripts/train.py --parallel.strategy fsdp
    mpiexec -n 8 python scripts/train.py --parallel.strategy fsdp --parallel.tensor 2 --parallel.pipeline 2
    python scripts/train.py --data.folder data/mine                      # a text of your own: scripts/prepare_data.py
    python scripts/train.py --from SmolLM2-135M --data.folder data/mine  # go on from a folder as transformers writes it
    python scripts/train.py --preset gpt-7b --ranks 64 --dry-run        # what would run, and whether it fits
    sbatch jobs/train.slurm --preset gpt2 --train.precision bf16         # a job; jobs/README.md has PBS

Any strategy (they stand below), and products of ddp, fsdp, tp and pp: `--parallel.tensor 2` gives two ranks to each
layer, `--parallel.context 2` two ranks to each sequence, and the strategy gets the rest. Presets: `--preset`, then a
file (`--config run.toml`), then flags; `--help` lists all.

You should see what runs, one line per interval, a sample at each evaluation, and curves at the end. The run's folder,
outputs/train/latest, holds steps.jsonl, metrics.json and the curves, and the checkpoints unless
`--checkpoint.folder` names a place: naming the same one again resumes, on any number of ranks, with any strategy.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def read(words):
    from manyhands.config.options import read_options

    return read_options(words, prog="train.py", description=__doc__)


def act(options):
    if options.dry_run:
        from manyhands.train.dry_run import dry_run

        return dry_run(options)
    from manyhands.train.run import train

    return train(options)


if __name__ == "__main__":
    from manyhands.launch.entry import run_program
    from manyhands.train.preemption import act_on_options

    run_program("train.py", lambda: act_on_options("train.py", read, act))
