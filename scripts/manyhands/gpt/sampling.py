"""Sampling, from a model on one process or spread over ranks: the same text on all of them, and no trace in the training.

ids = generate(parallel, prompt_BT, 200, temperature=1.0, generator=torch.Generator().manual_seed(seed))
"""

import torch
import torch.nn.functional as F


def generate(parallel, ids_B1, n, temperature=1.0, generator=None):
    """`ids_B1` [B, any length] and n sampled tokens after it, the same on all ranks. All ranks must call it.

    Every rank draws the same from its own `generator`: equal states on all ranks.
    """
    with parallel.gathered():
        return continued(parallel.logits, ids_B1, n, parallel.config.block_size, temperature, generator)


def continued(logits, ids_BT, n, block_size, temperature=1.0, generator=None):
    """`ids_BT` followed by n sampled tokens: [B, T + n]. `logits`: of ids, [B, T <= block_size, V].

    Draws from `generator` (None: a fresh one with seed 0), never from torch's global one. Temperature 0: the likeliest
    token. Raises ValueError for a negative one.
    """
    if temperature < 0:
        raise ValueError(f"temperature={temperature} is negative; use 0 for the most likely token, 1 to sample")
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    for _ in range(n):
        logits_BV = logits(ids_BT[:, -block_size:])[:, -1]
        if temperature == 0:
            next_B1 = logits_BV.argmax(-1, keepdim=True)
        else:
            p_BV = F.softmax(logits_BV / temperature, dim=-1)
            # drawn where the generator lives: with one on the CPU, a GPU samples as the CPU does
            next_B1 = torch.multinomial(p_BV.to(generator.device), 1, generator=generator)
        ids_BT = torch.cat((ids_BT, next_B1.to(ids_BT.device)), dim=1)
    return ids_BT
