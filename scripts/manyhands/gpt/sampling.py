"""Sampling: the plain loop, one token of each row after another, and how a token is drawn. No trace in the training.

    ids_BT = generate(parallel, prompt_BT, 200, generator=torch.Generator().manual_seed(seed))    # any number of ranks
    for next_B in continued(logits, prompt_BT, 200, block_size, drawing(temperature=0.8)): ...

Shapes: B sequences, T positions, V tokens in the vocabulary.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F


def generate(parallel, ids_BT, n, temperature=1.0, generator=None):
    """`ids_BT` [B, any length] and n sampled tokens after it, the same on all ranks. All ranks must call it.

    Every rank draws the same from its own `generator`: equal states on all ranks.
    """
    with parallel.gathered():
        return extended(parallel.logits, ids_BT, n, parallel.config.block_size, drawing(temperature, generator))


def extended(logits, ids_BT, n, block_size, draw):
    """`ids_BT` followed by n tokens, [B, T + n]: see `continued`."""
    return torch.cat([ids_BT, *(next_B[:, None] for next_B in continued(logits, ids_BT, n, block_size, draw))], dim=1)


def continued(
    logits: Callable, ids_BT: torch.Tensor, n: int, block_size: int, draw: Callable
) -> Iterator[torch.Tensor]:
    """Yield the next token of each row, [B], n times.

    `logits`: of the last `block_size` ids, [B, T, V]; `draw`: of the last position's logits [B, V], ids [B].
    """
    for _ in range(n):
        next_B = draw(logits(ids_BT[:, -block_size:])[:, -1]).to(ids_BT.device)
        yield next_B
        ids_BT = torch.cat((ids_BT, next_B[:, None]), dim=1)


def drawing(temperature: float = 1.0, generator: torch.Generator | None = None, top_k: int | None = None) -> Callable:
    """A function logits_BV -> ids [B], drawn among the `top_k` likeliest (None: all).

    Draws from `generator` (None: a fresh one with seed 0), never from torch's global one. Temperature 0: the likeliest
    token. Raises ValueError for a negative one.
    """
    if temperature < 0:
        raise ValueError(f"temperature={temperature} is negative; use 0 for the most likely token, 1 to sample")
    generator = torch.Generator().manual_seed(0) if generator is None else generator

    def draw(logits_BV):
        if temperature == 0:
            return logits_BV.argmax(-1)
        if top_k is not None and top_k < logits_BV.shape[-1]:
            least_B1 = logits_BV.topk(top_k).values[:, -1:]
            logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
        p_BV = F.softmax(logits_BV / temperature, dim=-1)
        # drawn where the generator lives: with one on the CPU, a GPU samples as the CPU does
        return torch.multinomial(p_BV.to(generator.device), 1, generator=generator)[:, 0]

    return draw
