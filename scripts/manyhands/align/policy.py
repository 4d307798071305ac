"""The model that learns and the one that it is measured against: both start from a checkpoint, spread over the ranks.

    start = start_from(base, LoraOptions(rank=4))
    policy = parallelize(config, layout, options, ranks, start)      # by any strategy with whole logits
    frozen = reference(base, config, options, ranks)                 # sharded over all ranks, whatever serves the policy

Shapes: V tokens in the vocabulary.
"""

from dataclasses import replace

import torch

from manyhands.config.layout import resolve_layout
from manyhands.config.options import ParallelOptions
from manyhands.gpt.lora import add_lora
from manyhands.gpt.model import GPT
from manyhands.parallel.parallelize import parallelize


def start_from(base, lora=None):
    """`start(config, options)` for `parallelize`: `base`'s weights, room for config.vocab_size tokens, and adapters."""

    def start(config, options):
        model = widened(base, config, options.train.seed)
        if lora and lora.rank:
            add_lora(model, lora.rank, lora.alpha, options.train.seed)
            if base.config.vocab_size < config.vocab_size:  # the markers' rows are as drawn: they must learn
                for part in (model.tokens, model.head):
                    part.requires_grad_(True)
        return model.to(torch.float64 if options.train.precision == "fp64" else torch.float32)

    return start


@torch.no_grad()
def widened(base, config, seed):
    """A GPT of `config` that is `base` on its tokens. What it has not (rows of new tokens) is drawn from `seed`."""
    torch.manual_seed(seed)
    model = GPT(config)
    old, new = base.state_dict(), model.state_dict()
    for name, tensor in new.items():
        tensor[: len(old[name])] = old[name]  # the vocabulary is axis 0 of embedding, head and its bias
    return model


def reference(base, config, options, ranks):
    """The start, frozen: a share of each weight on every rank, gathered block by block when it reads. All ranks call it.

    It has no gradients and no optimizer: 4 P / n bytes per rank for P parameters on n ranks. Its `logits` are called by all
    ranks equally often, each with rows of its own.
    """
    start = start_from(base)

    def frozen(config, options):
        return start(config, options).requires_grad_(False)

    train = replace(options.train, global_batch=ranks.world_size, micro_batch=None, compile=False)
    options = replace(options, train=train, parallel=ParallelOptions(strategy="fsdp"))
    return parallelize(config, resolve_layout(options, config, ranks.world_size), options, ranks, frozen)
