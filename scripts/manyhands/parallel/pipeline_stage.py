"""A stage of a pipeline: some consecutive parts of a GPT; and which rank has which.

    stage_owners("1F1B", pipeline=2, stages_per_rank=1)        # [0, 1]: stage 0 is on rank 0 of the pipeline axis
    layers_of_stages(n_layer=6, num_stages=4)                  # [range(0, 2), range(2, 4), range(4, 5), range(5, 6)]
    Stage(full_model, range(0, 2))                             # takes these parts of the model

A stage's parameters have the names that they have in the GPT, whatever the number of stages.
"""

import contextlib

import torch
from torch import nn

from manyhands.gpt.model import GPT, within_documents

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # a rank's two stages lie symmetric in the depth


def stage_owners(schedule: str, pipeline: int, stages_per_rank: int) -> list[int]:
    """[rank of stage 0, 1, ...] on the pipeline axis: around in a loop, or down and up again for V-shaped schedules."""
    if schedule in V_SHAPED:
        return [*range(pipeline), *reversed(range(pipeline))]
    return list(range(pipeline)) * stages_per_rank


def layers_of_stages(n_layer: int, num_stages: int) -> list[range]:
    """A range of layers per stage, sizes differing by one at most; the last stage, which has the head, gets no extra
    one.
    """
    least, extra = divmod(n_layer, num_stages)
    ends = [least * (s + 1) + min(s + 1, extra) for s in range(num_stages)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


class Stage(nn.Module):
    """Some consecutive parts of a GPT, under the names that they have in it.

    Takes ids [b, T] (the first stage) or the stream [b, T, D], gives the stream or (the last stage) logits [b, T, V].
    """

    def __init__(self, full_model: GPT, layers: range, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        self.config, self.autocast = full_model.config, autocast
        self.dtype = full_model.positions.weight.dtype
        self.is_first, self.is_last = layers.start == 0, layers.stop == self.config.n_layer
        if self.is_first:
            self.tokens, self.positions = full_model.tokens, full_model.positions
            self.drop = full_model.drop
        self.blocks = nn.ModuleDict({str(layer): full_model.blocks[layer] for layer in layers})
        if self.is_last:
            self.norm, self.head = full_model.norm, full_model.head

    def forward(self, x: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        """`ids` [b, T] for every stage, where attention stays within documents."""
        allowed = None if ids is None else within_documents(ids, self.config.separator)
        with torch.autocast(x.device.type, self.autocast) if self.autocast else contextlib.nullcontext():
            if self.is_first:
                x = self.drop(self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device)))
            for block in self.blocks.values():
                x = block(x, allowed)
            if self.is_last:
                return self.head(self.norm(x))
        return x.to(self.dtype)  # what the next stage has room for
