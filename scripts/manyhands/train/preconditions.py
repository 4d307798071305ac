"""What a run needs before it begins, beyond what `layout` knows: a text, its prompt, and room for the model."""

import torch
import torch.distributed as dist

from manyhands.config.options import LogOptions, OptionError
from manyhands.data.corpus import load_corpus, open_text
from manyhands.data.shakespeare import DataError
from manyhands.launch.machine import available_memory_bytes


def corpus_of(options, ranks=None):
    """The corpus that `options.data` names, the same on all ranks. All ranks must call it.

    Raises OptionError, on all of them, for a folder that is no prepared text.
    """
    if options.data.folder is None:
        return load_corpus(ranks)
    try:
        return open_text(options.data.folder, ranks)
    except DataError as error:
        raise OptionError(f"data.folder: {error}") from None


def refuse_text(options, config, corpus):
    """Raises OptionError where the corpus has no window of block_size, or not what a sample begins with."""
    least = min(len(corpus.train_ids), len(corpus.val_ids))
    if least <= config.block_size:
        raise OptionError(
            f"model.block_size={config.block_size} needs {config.block_size + 1} tokens and the corpus's smaller part"
            " has"
            f" {least}; use a smaller block_size"
        )
    if options.log.sample:
        prompt_ids(options, corpus)


def prompt_ids(options, corpus):
    """The ids that a sample goes on from: of `log.prompt`, or the text's first token where that is its default and
    unknown.

    Raises OptionError.
    """
    try:
        return corpus.encode(options.log.prompt)
    except ValueError as error:
        if options.log.prompt == LogOptions().prompt:  # a text without a newline
            return corpus.train_ids[:1].long()
        raise OptionError(f"log.prompt={options.log.prompt!r}: {error}") from None


def refuse_size(config, ranks):
    """Raises OptionError on all ranks, which call it, where a node has no room for what its ranks hold as they start.

    Each makes all weights in float32 before it keeps its share (`parallel.strategy.full_model`); what training adds is
    not counted.
    """
    room = torch.tensor(available_memory_bytes() / ranks.local_world_size, dtype=torch.float64)
    dist.all_reduce(room, dist.ReduceOp.MIN)
    needed = 4 * config.num_params()
    if needed > room:
        raise OptionError(
            f"the model's {config.num_params():,} parameters take {needed / 2**30:,.1f} GiB on each rank while it"
            " starts, and"
            f" a rank finds {room.item() / 2**30:,.1f} GiB; use a smaller model or fewer ranks on a node (--dry-run"
            " computes"
            " what training adds)"
        )
