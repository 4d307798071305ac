"""Run the GPT of gpt/model.py position by position: the same weights and products, with attention passed in.

    logits_BTV = run(model, ids_BT, positions_BT, attend)       # attend(layer, q, k, v) -> y [B, H, T, E]
    quantize(model)                       # in place: every linear layer of the blocks in 8 bits
    weight_bytes(model)                   # bytes that decoding reads for each token

`model` is a GPT in eval mode; without a cache its own `forward` gives the same numbers. That `forward` has no
option for a cache, so that lessons 01 to 11 need not mention caches. `attend` keeps attention within documents, where
the model does, and a server ends a text at the separator that would begin another.
Shapes: B sequences, T new positions, D width, V tokens in the vocabulary, H heads of size E, O outputs.
"""

import torch
import torch.nn.functional as F
from torch import nn

from manyhands.gpt.lora import linears_of
from manyhands.gpt.model import GPT


def run(model, ids_BT, positions_BT, attend):
    """Return logits [B, T, V] of tokens at given positions; `attend` provides the earlier positions."""
    x_BTD, turn = model.embed(ids_BT, positions_BT)
    for layer, block in enumerate(model.blocks):
        attention = block.attention
        y_BHTE = attend(layer, *attention.heads(block.norm_1(x_BTD), turn))
        x_BTD = x_BTD + attention.out(y_BHTE.transpose(1, 2).flatten(2))
        x_BTD = x_BTD + block.mlp(block.norm_2(x_BTD))
    return model.head(model.norm(x_BTD))


class Int8Linear(nn.Module):
    """A linear layer with 8-bit weights and one float scale per output: a weight is off by at most half a step.

    On a GPU a kernel multiplies 8-bit weights as it reads them. Here they are converted to float first, so only memory
    is saved.
    """

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
    """Replace the linear layers in a GPT's blocks; embeddings, norms, experts and head stay. Return the model."""
    for block in model.blocks:
        for part in (block.attention, block.mlp):
            for name, full in linears_of(part):  # experts are unchanged
                setattr(part, name, Int8Linear(full))
    return model


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
