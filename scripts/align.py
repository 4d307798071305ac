"""Align a GPT: from a model that goes on with text to one that answers, by any strategy of train.py.

    python scripts/align.py sft --from outputs/train/latest                 # imitate demonstrations
    python scripts/align.py dpo --from outputs/align/latest                 # prefer right answers to its own wrong ones
    python scripts/launch.py --nproc 2 scripts/align.py -- grpo --from SFT  # draw answers, judge them, learn from both
    python -m torch.distributed.run --standalone --nproc-per-node 4 scripts/align.py grpo --from SFT
    python scripts/align.py sft --from outputs/train/latest --lora.rank 4   # thin matrices learn, the rest is frozen
    python scripts/align.py grpo --from SFT --grpo.reward in_order          # a reward that can be hacked
    python scripts/align.py sft --from SmolLM2-135M-Instruct --data.file talks.jsonl    # conversations of your own
    python scripts/align.py sft --from SmolLM2-135M-Instruct --ranks 4 --dry-run        # what it takes, with LoRA too

`--from` names what train.py, or a stage before, has left: a run's folder, a folder of checkpoints, or an exported file.
The first stage appends the chat template's four markers to the model's tokens. Or it names a folder as transformers
writes it, which brings a template of its own. A stage's checkpoints are read by
sample.py (`--chat`), and resumed when the same `--checkpoint.folder` is named again, on any number of ranks.
`align.py grpo --help` shows the defaults of that stage; `--parallel.strategy fsdp` and others are train.py's.

You should see what runs, one line per interval, and at each evaluation the share of held-out words that are answered
right, beside the share that chance would have. The run's folder, outputs/align/latest, holds steps.jsonl,
alignment.jsonl (reward, KL, accuracy by step), metrics.json, the curves and the checkpoints. `val_loss` is the held-out
loss (sft, dpo), or the share of wrong answers (grpo). Tokens per second count whole blocks, which answers do not fill.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def read(words):
    from manyhands.align.options import read_options

    return read_options(words, prog="align.py", description=__doc__)


def act(wanted):
    from manyhands.align.run import align

    return align(wanted)


if __name__ == "__main__":
    from manyhands.launch.entry import run_program
    from manyhands.train.preemption import act_on_options

    run_program("align.py", lambda: act_on_options("align.py", read, act))
