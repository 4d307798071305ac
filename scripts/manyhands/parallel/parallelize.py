"""Apply any strategy, or a product of them, to the GPT from outside; training sees one interface: see `strategy`.

parallel = parallelize(config, layout, options, ranks)          # all ranks
optimizer = build_optimizer(parallel, options)
loss = parallel.forward_backward(ids_bT, targets_bT)            # this data rank's share of the global batch
norm = parallel.clip(1.0)                                       # global, whatever is sharded
optimizer.step(); optimizer.zero_grad()
"""

from importlib import import_module

from manyhands.config.layout import Layout
from manyhands.config.options import Options
from manyhands.config.strategies import STRATEGIES
from manyhands.gpt.model import GPTConfig
from manyhands.launch.ranks import Ranks
from manyhands.parallel.strategy import ModelMaker, Strategy, full_model


def parallelize(
    config: GPTConfig, layout: Layout, options: Options, ranks: Ranks, start: ModelMaker = full_model
) -> Strategy:
    """The GPT of `config`, spread over `ranks` as `layout` says. All ranks must call it.

    `start(config, options)` makes the whole GPT that every rank cuts its share from: drawn from the seed, or one's own.
    `layout` comes from `resolve_layout`, which has refused what does not go together.
    """
    module, kind = STRATEGIES[options.parallel.strategy].implementation.split(".")
    return getattr(import_module(f"manyhands.parallel.{module}"), kind)(config, layout, options, ranks, start)
