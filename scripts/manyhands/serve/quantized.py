"""Weights in 8 bits: a linear layer reads a quarter of float32's bytes; a weight is off by at most half a step.

    quantize(model)                       # in place: every linear layer of the blocks
    weight_bytes(model)                   # what decoding reads from memory for each token

For lesson 14. One scale per output (the largest weight of its row / 127), weights rounded to the nearest step,
activations as they are. On a GPU a kernel multiplies the 8-bit weights as it reads them; here they are made float again
first, so that this saves memory and no time.
"""

import torch
import torch.nn.functional as F
from torch import nn

from manyhands.gpt.model import GPT


class Int8Linear(nn.Module):
    """A linear layer with int8 weights and one float scale per output."""

    def __init__(self, full):
        super().__init__()
        weight_OI = full.weight.detach()
        scale_O1 = (weight_OI.abs().amax(1, keepdim=True) / 127).clamp(min=torch.finfo(weight_OI.dtype).tiny)
        self.register_buffer("weight_OI", (weight_OI / scale_O1).round().to(torch.int8))
        self.register_buffer("scale_O", scale_O1[:, 0])
        self.bias = full.bias

    def forward(self, x):
        return F.linear(x, self.weight_OI.to(x.dtype)) * self.scale_O + (0 if self.bias is None else self.bias)


def quantize(model: GPT) -> GPT:
    """Replace the linear layers in the blocks of a GPT; embeddings, norms and head stay. Returns the model."""
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        for part, name in ((attention, "qkv"), (attention, "out"), (mlp, "up"), (mlp, "down")):
            setattr(part, name, Int8Linear(getattr(part, name)))
    return model


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
