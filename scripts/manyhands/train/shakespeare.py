"""Model and text of several lessons: ShakespeareGPT reads 64 characters of Shakespeare and guesses the next.

shakespeare = Shakespeare(ranks, global_batch=0, steps=150)
model = shakespeare.new_model()                 # the same first weights on every rank
_, loss = model(*shakespeare.batch(step))       # this rank's share of a global batch
shakespeare.metrics.exact(losses=losses)
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from manyhands.data.corpus import get_batch, load_corpus
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT
from manyhands.launch.join import refuse
from manyhands.launch.metrics import Metrics
from manyhands.launch.ranks import Ranks


class Shakespeare:
    """The corpus, the model's sizes (`config`), and the metrics of a lesson, with its parameters."""

    def __init__(self, ranks: Ranks, global_batch: int, n_layer: int = 4, **parameters: Any):
        """Load the corpus; all ranks call it. `global_batch` 0: 12 sequences, or the next multiple of the ranks.

        Refuse a batch that does not split over the ranks.
        """
        n = ranks.world_size
        self.ranks, self.global_batch = ranks, global_batch or -(-12 // n) * n
        if self.global_batch % n:
            refuse(f"global_batch={global_batch} does not split over {n} ranks; use a multiple of {n}")
        self.corpus = load_corpus(ranks)
        self.config = GPTConfig(vocab_size=len(self.corpus.vocab), n_layer=n_layer)
        self.metrics = Metrics(ranks, self.corpus, {"global_batch": self.global_batch, **parameters})

    def new_model(self, dtype: torch.dtype = torch.float32, seed: int = 1337, **sizes: int) -> GPT:
        """Return the model with its first weights, the same on every rank as long as the seed is."""
        torch.manual_seed(seed)
        return GPT(replace(self.config, **sizes)).to(self.ranks.device, dtype)

    def batch(
        self, step: int, part: int | None = None, parts: int | None = None, ids: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Return one part of global batch number `step`, this rank's unless told otherwise: inputs, targets [b, T]."""
        part, parts = (self.ranks.rank if part is None else part), parts or self.ranks.world_size
        ids = self.corpus.train_ids if ids is None else ids
        share = get_batch(ids, step, self.global_batch, self.config.block_size, part, parts, seed=1)
        return [ids_bT.to(self.ranks.device) for ids_bT in share]

    def sgd_steps(
        self, model: nn.Module, finish: Callable[[], object] = lambda: None, num_steps: int = 3, **part: int
    ) -> torch.Tensor:
        """Train with plain SGD, in which a wrong factor shows; `finish` runs after backward. All ranks call it.

        Return the losses [steps], the mean over the ranks. `part`, `parts`: as for `batch`.
        """
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(num_steps):
            optimizer.zero_grad()
            _, loss = model(*self.batch(step, **part))
            loss.backward()
            finish()
            optimizer.step()
            losses.append(loss.detach())
        found = torch.stack(losses)
        dist.all_reduce(found)
        return found / self.ranks.world_size

    @torch.no_grad()
    def validation_loss(
        self, model: nn.Module, num_batches: int, part: int | None = None, parts: int | None = None
    ) -> torch.Tensor:
        """Return the mean loss over one part of each of the first validation batches, this rank's unless told else."""
        model.eval()
        losses = [model(*self.batch(i, part, parts, self.corpus.val_ids))[1] for i in range(num_batches)]
        model.train()  # on every rank that called eval(): dropout must not stay off on some
        return torch.stack(losses).mean()

    def evaluate(self, model: nn.Module, num_batches: int) -> float:
        """Return the mean loss over whole validation batches: each rank reads its share. All ranks call it."""
        mean = self.validation_loss(model, num_batches)
        dist.all_reduce(mean)
        return mean.item() / self.ranks.world_size
