"""LoRA: a frozen linear layer, and beside it a product of two thin matrices that learns (Hu et al. 2021, section 4.1).

    add_lora(model, rank=4, alpha=8.0)          # in place: only the adapters learn from here on
    weights = folded(state, alpha / rank)       # {name: tensor} without adapters, the same function

y = x W^T + b + (alpha / rank) (x A^T) B^T. A is drawn, B is zero: at the start the model says what it said before.
Shapes: B sequences, T positions, i numbers in, o numbers out, r the rank.
"""

import torch
import torch.nn.functional as F
from torch import nn

A, B = ".lora_a", ".lora_b"  # how the adapters' names end


class LoRALinear(nn.Linear):
    """A linear layer with an adapter; `weight` and `bias` do not learn. Made from one by `from_linear`."""

    @classmethod
    def from_linear(cls, linear, rank, scale, generator):
        """The layer around `linear`'s own weights; A is drawn from `generator` as torch draws a linear layer's."""
        o, i = linear.weight.shape
        self = cls(i, o, bias=linear.bias is not None, device="meta")
        self.weight, self.bias, self.scale = linear.weight, linear.bias, scale
        bound = i**-0.5
        a_ri = torch.empty(rank, i, dtype=torch.float64).uniform_(-bound, bound, generator=generator)
        self.lora_a = nn.Parameter(a_ri.to(linear.weight))
        self.lora_b = nn.Parameter(linear.weight.new_zeros(o, rank))
        return self

    def forward(self, x_BTi):
        y_BTo = F.linear(x_BTi, self.weight, self.bias)
        return y_BTo + self.scale * F.linear(F.linear(x_BTi, self.lora_a), self.lora_b)


def add_lora(model, rank, alpha, seed=0):
    """Freeze `model`, a GPT, and put an adapter beside each linear layer of its blocks, in place; returns the model.

    The same `seed` draws the same adapters on every rank. Raises ValueError for a rank that is not 1 to the width.
    """
    widest = model.config.n_embd
    if not 1 <= rank <= widest:
        raise ValueError(f"lora.rank={rank} does not fit a model of width {widest}; use 1 to {widest}")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for block in model.blocks:
        for part in (block.attention, block.mlp):
            for name, linear in linears_of(part):
                setattr(part, name, LoRALinear.from_linear(linear, rank, alpha / rank, generator))
    return model


def linears_of(part):
    """[(name, linear layer)] of a block's attention or MLP, in order; none of experts."""
    return [(name, layer) for name, layer in part.named_children() if isinstance(layer, nn.Linear)]


def folded(weights, scale):
    """{name: tensor} with each adapter added to the matrix beside it, under the names of a model without adapters."""
    plain = {name: tensor for name, tensor in weights.items() if not name.endswith((A, B))}
    for name in [name for name in weights if name.endswith(A)]:
        layer = name.removesuffix(A)
        a_ri, b_or = weights[layer + A].double(), weights[layer + B].double()
        matrix = plain[f"{layer}.weight"]
        plain[f"{layer}.weight"] = (matrix.double() + scale * (b_or @ a_ri)).to(matrix.dtype)
    return plain
