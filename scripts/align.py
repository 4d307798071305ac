"""Align a GPT: from a model that goes on with text to one that answers. Any strategy of train.py, one command per stage.

    python scripts/align.py sft --from outputs/train/latest                        # imitate demonstrations
    python scripts/align.py dpo --from outputs/align/latest                        # prefer right answers to its own wrong ones
    python scripts/launch.py --nproc 2 scripts/align.py -- grpo --from SFT         # draw answers, judge them, learn from both
    python -m torch.distributed.run --standalone --nproc-per-node 4 scripts/align.py grpo --from SFT --parallel.strategy fsdp
    python scripts/align.py sft --from outputs/train/latest --lora.rank 4          # thin matrices learn, the rest is frozen
    python scripts/align.py grpo --from SFT --grpo.reward in_order                 # a reward that can be hacked: watch accuracy

`--from` names what train.py, or a stage before, has left: a run's folder, a folder of checkpoints, or an exported file. The
first stage appends the chat template's four markers to the model's symbols. A stage's checkpoints are read by sample.py
(`--chat`), and resumed when the same `--checkpoint.folder` is named again, on any number of ranks.

You should see what runs, one line per interval, and at each evaluation the share of held-out words that are answered right,
beside the share that chance would have. The run's folder, outputs/align/latest, holds steps.jsonl, alignment.jsonl (reward,
KL, accuracy by step), metrics.json, the curves and the checkpoints. `val_loss` is the held-out loss (sft, dpo), or the share
of wrong answers (grpo). Tokens per second count whole blocks, which answers do not fill.
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
    from manyhands.alignment.options import read_options
    from manyhands.config.options import OptionError
    from manyhands.launching.join import end

    with open(os.devnull, "w") as nowhere, contextlib.ExitStack() as quiet:
        if _some_other_rank():  # all ranks read the same flags: one says what is wrong with them
            quiet.enter_context(contextlib.redirect_stdout(nowhere))
            quiet.enter_context(contextlib.redirect_stderr(nowhere))
        status, why = None, ""
        try:
            wanted = read_options(sys.argv[1:], prog="align.py", description=__doc__)
        except OptionError as error:
            status, why = 2, f"align.py: {error}"
        except SystemExit as ended:  # tyro has printed its help, or what it did not understand
            status = ended.code or 0
    if status is not None:
        end(why, status, sys.stderr)
    from manyhands.alignment.run import align

    return align(wanted)


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
            why = "align.py: ended by Ctrl-C"
            say_status(INTERRUPTED, why)
            print(why, file=sys.stderr)
        status = INTERRUPTED
    exit_process(status, joined())
