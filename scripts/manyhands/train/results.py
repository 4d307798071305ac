"""Where a run leaves its files, agreed by all ranks, and the numbers by which two runs are compared."""

from pathlib import Path

import torch.distributed as dist

from manyhands.config.options import OptionError, to_dict
from manyhands.launch.metrics import Metrics
from manyhands.launch.run_folder import run_folder


def agreed_folder(ranks):
    """Rank 0's run folder, on all ranks. Raises OptionError on all where it cannot be made."""
    found = [None, None]
    if ranks.rank == 0:
        try:
            found[0] = str(run_folder(ranks, latest=False))
        except (OSError, ValueError) as error:
            found[1] = str(error)
    dist.broadcast_object_list(found, src=0)
    if found[1]:
        raise OptionError(found[1])
    return Path(found[0])


def write_metrics(run):
    """metrics.json of a run that has ended; where there is no room for it, a sentence."""
    metrics = Metrics(run.ranks, run.corpus, {"options": _without_places(to_dict(run.options))})
    losses = {str(step): loss for step, loss in run.val_losses.items()}
    metrics.exact(val_losses=losses)
    metrics.close(val_losses=losses)
    try:
        metrics.write()
    except OSError as error:
        # the training is over and saved: it has not failed, and starting it again would not help
        run.report.note(f"metrics.json could not be written ({error}); the training itself is complete")


def _without_places(options):
    """Options without the names of folders: two runs of one configuration are compared."""
    without = {group: {**options[group], "folder": None} for group in ("data", "checkpoint")}
    return {**options, "config": None, **without}
