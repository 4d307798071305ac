"""Activation checkpointing: keep less of the forward, compute it again in the backward (Chen et al. 2016).

    checkpoint_activations(model, "block")     # in place; the names of parameters do not change

`block` keeps the input of each block alone, for a third more compute. `selective` also keeps the results of what is
dear to compute (matrix products, attention, messages of tensor parallelism) and repeats what is cheap and large: norms,
GELU, dropout, sums.
"""

from functools import partial

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from manyhands.gpt.model import Block

DEAR = {"mm", "addmm", "bmm", "baddbmm", "linear"}


def checkpoint_activations(model, kind):
    """Make each block of `model`, a GPT or a stage of one, recompute its forward; none, block or selective."""
    if kind == "none":
        return
    for block in model.blocks.values() if hasattr(model.blocks, "values") else model.blocks:
        # Another class for the same object, as fully_shard does it: a module around it would be part of each
        # parameter's name, and a function of its own per block would be compiled anew for each.
        block.__class__ = Checkpointed if kind == "block" else SelectivelyCheckpointed


def _keep_what_is_dear(context, operator, *args, **kwargs):
    namespace, name = operator._schema.name.split("::")
    dear = name in DEAR or name.startswith("_scaled_dot_product") or namespace == "_c10d_functional"
    return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed(Block):
    """A block that keeps its input alone."""

    how = {"use_reentrant": False}

    def forward(self, x_BTD, allowed_B1TT=None):
        return checkpoint(super().forward, x_BTD, allowed_B1TT, **self.how)


class SelectivelyCheckpointed(Checkpointed):
    """A block that keeps its input and what is dear to compute."""

    how = {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, _keep_what_is_dear)}
