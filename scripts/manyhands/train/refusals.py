"""What a run refuses before it begins, beyond what `layout` knows."""

import torch
import torch.distributed as dist

from manyhands.config.options import OptionError
from manyhands.launch.limits import available_memory_bytes


def refuse_text(options, config, corpus):
    """Raises OptionError where the corpus has no window of block_size, or not the prompt's characters."""
    least = min(len(corpus.train_ids), len(corpus.val_ids))
    if least <= config.block_size:
        raise OptionError(
            f"model.block_size={config.block_size} needs {config.block_size + 1} tokens and the corpus's smaller part has"
            f" {least}; use a smaller block_size"
        )
    try:
        corpus.encode(options.log.prompt)
    except ValueError as error:
        raise OptionError(f"log.prompt={options.log.prompt!r}: {error}") from None


def refuse_size(config, ranks):
    """Raises OptionError on all ranks, which call it, where a node has no room for what its ranks hold as they start.

    Each makes all weights in float32 before it keeps its share (`parallel.strategy.full_model`); what training adds is not counted.
    """
    room = torch.tensor(available_memory_bytes() / ranks.local_world_size, dtype=torch.float64)
    dist.all_reduce(room, dist.ReduceOp.MIN)
    needed = 4 * config.num_params()
    if needed > room:
        raise OptionError(
            f"the model's {config.num_params():,} parameters take {needed / 2**30:,.1f} GiB on each rank while it starts, and"
            f" a rank finds {room.item() / 2**30:,.1f} GiB; use a smaller model or fewer ranks on a node (--dry-run computes"
            " what training adds)"
        )
