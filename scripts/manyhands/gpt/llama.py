"""Define the parts of a Llama that a GPT lacks: RMSNorm, rotary positions and SwiGLU.

    turn = rotation(config, positions_T, torch.float32)      # (cos, sin), the same for all layers and heads
    q_BTHE = rotated(q_BTHE, turn)

Weights and their order are those of the library transformers: number i of a head turns with number i + E/2.

Shapes: B sequences, T positions, D width, H heads of size E, e = E/2 pairs, M hidden.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from manyhands.gpt.experts import multiplied_in


class _RMS(torch.autograd.Function):
    """x / sqrt(mean(x^2) + eps) times a weight, in float32 at least. Keeps x and one number per position.

    On CPUs torch's own keeps a second tensor as large as x.
    """

    @staticmethod
    def forward(ctx, x_BTD, weight_D, eps):
        wide_BTD = x_BTD.to(torch.promote_types(x_BTD.dtype, torch.float32))
        scale_BT1 = (wide_BTD.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x_BTD, weight_D, scale_BT1)
        return (weight_D * (wide_BTD * scale_BT1).to(x_BTD.dtype)).to(x_BTD.dtype)

    @staticmethod
    def backward(ctx, grad_BTD):
        x_BTD, weight_D, scale_BT1 = ctx.saved_tensors
        norm_BTD, grad_BTD = x_BTD.to(scale_BT1.dtype) * scale_BT1, grad_BTD.to(scale_BT1.dtype)
        # not flattened: sequence parallelism has split the positions
        weight_grad_D = (grad_BTD * norm_BTD).sum(tuple(range(x_BTD.ndim - 1))).to(weight_D.dtype)
        grad_BTD = grad_BTD * weight_D
        grad_BTD = scale_BT1 * (grad_BTD - norm_BTD * (grad_BTD * norm_BTD).mean(-1, keepdim=True))
        return grad_BTD.to(x_BTD.dtype), weight_grad_D, None


rms_norm = _RMS.apply


class RMSNorm(nn.RMSNorm):
    """Each position over its root mean square, times a weight (Zhang and Sennrich 2019, equation 4)."""

    def forward(self, x_BTD):
        return rms_norm(x_BTD, self.weight, self.eps)


def norm_of(config):
    """The norm of a GPTConfig's style: LayerNorm, RMSNorm, or OLMo's LayerNorm without weight and bias."""
    if config.style == "gpt":
        return nn.LayerNorm(config.n_embd)
    if config.norm == "rms":
        return RMSNorm(config.n_embd, config.norm_eps)
    return nn.LayerNorm(config.n_embd, elementwise_affine=False)


class SwiGLU(nn.Module):
    """Three linear layers without biases: down(silu(gate x) * up x) (Shazeer 2020, equation 6)."""

    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.n_embd, config.hidden, bias=False)
        self.up = nn.Linear(config.n_embd, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.n_embd, bias=False)

    def forward(self, x_BTD):
        x_BTD = x_BTD.to(multiplied_in(x_BTD))  # once for both, where autocast would do it for each
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


def rotation(config, positions_T, dtype):
    """(cos, sin) [T, 1, e] of the angles by which the pairs of a head turn; positions [B, T] give [B, T, 1, e].

    Pair i turns by position / theta^(i / e) (Su et al. 2021, equation 15). Angles are float32, whatever the model is:
    with few bits, far positions would share one. They are computed, not stored, so that nothing casts them.
    """
    E, device = config.head_size, positions_T.device
    turns_e = 1 / config.rope_theta ** (torch.arange(0, E, 2, dtype=torch.float32, device=device) / E)
    if config.rope_factor != 1:
        # Llama 3.1: what turns fewer than rope_low times within the first context turns rope_factor times slower, what
        # turns more than rope_high times stays, and what is between goes from one to the other
        times_e = config.rope_original * turns_e / (2 * math.pi)
        kept_e = ((times_e - config.rope_low) / (config.rope_high - config.rope_low)).clamp(0, 1)
        turns_e = turns_e * (kept_e + (1 - kept_e) / config.rope_factor)
    angles = positions_T[..., None, None] * turns_e
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(x_BTHE, turn):
    """Queries or keys [B, T, H, E], each pair (i, i + e) turned by its angle."""
    cos, sin = turn
    x_BTHe, y_BTHe = x_BTHE.chunk(2, dim=-1)
    return torch.cat((x_BTHe * cos - y_BTHe * sin, y_BTHe * cos + x_BTHe * sin), dim=-1)
