"""Train a tiny GPT on one rank in seconds, without communication and with the same result on every rank.

model = train_tiny(batch_of, vocab_size=256, steps=200)      # batch_of(step) -> inputs, targets [B, T]
nats = mean_loss(model, *batch)
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from manyhands.gpt.model import GPT, GPTConfig

BLOCK = 32


def train_tiny(
    batch_of: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    vocab_size: int,
    steps: int,
    lr: float = 5e-3,
    seed: int = 1337,
    device: torch.device | str = "cpu",
) -> GPT:
    """Return a GPT of two layers and width 48 after `steps` steps of AdamW."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(vocab_size, block_size=BLOCK, n_layer=2, n_head=2, n_embd=48)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        x_BT, y_BT = (ids.to(device) for ids in batch_of(step))
        model(x_BT, y_BT)[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@torch.no_grad()
def mean_loss(model: GPT, ids: torch.Tensor) -> float:
    """Return the mean loss of the model on a text, in nats per token. It is read in pieces of BLOCK tokens."""
    device = next(model.parameters()).device
    rows = (len(ids) - 1) // BLOCK
    x_BT, y_BT = (ids[i : i + rows * BLOCK].view(rows, BLOCK).long().to(device) for i in (0, 1))
    logits_BTV = model(x_BT)[0]
    return F.cross_entropy(logits_BTV.flatten(0, 1), y_BT.flatten()).item()
