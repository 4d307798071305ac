"""From the trainer's flags to a model spread over the ranks, as `scripts/train.py` makes it, and what the formulas say
of it.

spread = model_from_flags("--parallel.strategy fsdp --parallel.wrapping block", ranks, vocab_size=65)
loss = spread.parallel.forward_backward(ids_bT, targets_bT)
spread.optimizer.step()
spread.held_by_formula, spread.sent_by_formula
"""

import shlex
from dataclasses import dataclass

from manyhands.config.layout import Layout, resolve_layout
from manyhands.config.options import Options, model_config, read_options
from manyhands.gpt.model import GPTConfig
from manyhands.parallel.optimizer import build_optimizer
from manyhands.parallel.strategy import Strategy, full_model, parallelize
from manyhands.predict import memory, traffic


@dataclass(frozen=True)
class ModelFromFlags:
    """A strategy that holds the model, its optimizer, and from what they were made."""

    parallel: Strategy
    optimizer: object
    config: GPTConfig
    layout: Layout
    options: Options

    @property
    def held_by_formula(self) -> memory.RankBytes:
        """The `RankBytes` of the fullest rank."""
        return memory.bytes_per_rank(self.config, self.layout, self.options)

    @property
    def sent_by_formula(self) -> dict[str, traffic.Traffic]:
        """{collective: Traffic} of a step; ValueError for a strategy without a formula."""
        return traffic.per_step(self.config, self.layout, self.options)


def model_from_flags(flags, ranks, vocab_size, start=full_model):
    """A ModelFromFlags by the trainer's `flags`, a text as on a command line. All ranks must call it.

    `start(config, options)` makes the whole GPT that is spread: see `parallelize`.
    Raises OptionError as the trainer does.
    """
    options = read_options(shlex.split(flags))
    config = model_config(options, vocab_size)
    layout = resolve_layout(options, config, ranks.world_size)
    parallel = parallelize(config, layout, options, ranks, start)
    return ModelFromFlags(parallel, build_optimizer(parallel, options), config, layout, options)
