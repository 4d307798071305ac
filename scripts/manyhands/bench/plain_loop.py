"""The loop to compare with: one process, no ranks, as nanoGPT's train.py writes it. Nothing of the trainer is in it.

The model is the trainer's own. AdamW as torch gives it (not fused), decay on matrices only; windows drawn by
`torch.randint` and stacked; the gradients clipped by torch; the loss looked at every 50 steps.
"""

import math

import torch

from manyhands.gpt.model import GPT

LR, MIN_LR, PERIOD = 1e-3, 1e-4, 1000


def train(config, ids, batch_size, turns, compiled=False):
    """Train on `ids`, one step per item of `turns`."""
    torch.manual_seed(1337)
    model = GPT(config)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    if compiled:
        model.compile()
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.99))
    for step, _ in enumerate(turns):
        for group in optimizer.param_groups:
            group["lr"] = MIN_LR + 0.5 * (LR - MIN_LR) * (1 + math.cos(math.pi * step / PERIOD))
        inputs, targets = draw(ids, batch_size, config.block_size)
        _, loss = model(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


def draw(ids, batch_size, block):
    """[B, T] twice."""
    starts = torch.randint(len(ids) - block, (batch_size,))
    inputs = torch.stack([ids[i : i + block] for i in starts])
    targets = torch.stack([ids[i + 1 : i + 1 + block] for i in starts])
    return inputs, targets
