"""From logits to the next token: temperature, top-k, top-p, and a draw that no neighbour in the batch changes.

    p_BV = probabilities(logits_BV, [Sampling(temperature=0.8, top_p=0.9), Sampling(temperature=0)])
    ids_B = draw(p_BV, uniform_B)                  # uniform_B in [0, 1): one number per sequence
    numbers = uniforms(seed=7, n=100)              # number i belongs to token i, whatever is computed beside it

Everything in float64: the model's own rounding is enough. Shapes: B sequences, V tokens in the vocabulary.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Sampling:
    """How to draw. Raises ValueError, with the cure, for a value that makes no sense."""

    temperature: float = 1.0  # 1: as the model has it; less: likelier tokens; 0: always the likeliest
    top_k: int | None = None  # among the so many likeliest; None: all
    top_p: float = 1.0  # among the fewest likeliest whose probabilities reach top_p together

    def __post_init__(self):
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature={self.temperature} is not a number >= 0; use 0 to 2")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} leaves nothing to draw; use 1 or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} is not in (0, 1]; use 1 to keep all tokens")


def probabilities(logits_BV, samplings):
    """float64 [B, V] on the CPU: row b as samplings[b] asks for.

    Top-k comes first, then top-p among what it left (Holtzman et al. 2020, section 3.1): the token with which the sum
    reaches top_p is kept. With temperature 0 the whole row is on the first of the likeliest.
    """
    logits_BV = logits_BV.detach().to("cpu", torch.float64)
    temperature_B1 = torch.tensor([[s.temperature] for s in samplings], dtype=torch.float64)
    greedy_B1 = temperature_B1 == 0
    p_BV = torch.softmax(logits_BV / temperature_B1.masked_fill(greedy_B1, 1.0), dim=-1)
    if any(s.top_k is not None or s.top_p < 1 for s in samplings):
        p_BV = _cut(p_BV, samplings)
    if greedy_B1.any():
        best_BV = torch.zeros_like(p_BV).scatter_(1, logits_BV.argmax(-1, keepdim=True), 1.0)
        p_BV = torch.where(greedy_B1, best_BV, p_BV)
    return p_BV


def _cut(p_BV, samplings):
    V = p_BV.shape[-1]
    sorted_BV, order_BV = p_BV.sort(dim=-1, descending=True, stable=True)
    top_k_B1 = torch.tensor([[s.top_k or V] for s in samplings])
    top_p_B1 = torch.tensor([[s.top_p] for s in samplings], dtype=torch.float64)
    sorted_BV = sorted_BV.masked_fill(torch.arange(V) >= top_k_B1, 0.0)
    total_B1 = sorted_BV.sum(-1, keepdim=True)
    before_BV = sorted_BV.cumsum(-1) - sorted_BV  # what the likelier ones have together
    sorted_BV = sorted_BV.masked_fill((before_BV >= top_p_B1 * total_B1) & (top_p_B1 < 1), 0.0)
    sorted_BV = sorted_BV / sorted_BV.sum(-1, keepdim=True)
    return torch.zeros_like(p_BV).scatter_(1, order_BV, sorted_BV)


def draw(p_BV, uniform_B):
    """Ids [B]: the first token at which row b's running sum exceeds uniform_B[b]. None of probability 0 is drawn."""
    sums_BV = p_BV.cumsum(-1)
    uniform_B1 = torch.as_tensor(uniform_B, dtype=torch.float64)[:, None]
    ids_B1 = torch.searchsorted(sums_BV, uniform_B1 * sums_BV[:, -1:], right=True)
    last_B1 = (sums_BV >= sums_BV[:, -1:]).to(torch.uint8).argmax(-1, keepdim=True)  # rounding must not go past it
    return torch.minimum(ids_B1, last_B1)[:, 0]


def uniforms(seed, n):
    """n numbers in [0, 1) that depend on the seed alone. With seed None they are drawn from the system."""
    return np.random.default_rng(np.random.SeedSequence(seed)).random(n).tolist()
