"""Serve a model that several ranks share: rank 0 has the clients and the schedule, all compute each step's row.

    python scripts/launch.py --nproc 2 scripts/serve.py -- FOLDER --tensor 2    # each holds half of layers and cache

    shared = TensorRanks(ranks, load)                       # all ranks; ValueError for a model that does not split
    Engine(shared.model, "step 300", runner=shared.lead)    # rank 0: its steps are everybody's
    shared.end()                                            # rank 0: the others' `follow` returns
    shared.follow()                                         # all other ranks

A row is sent as the numbers that `engine.Row` holds, by gloo; the layers' sums go as in training (lesson 07).
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from manyhands.config.layout import resolve_layout
from manyhands.config.options import Options, ParallelOptions
from manyhands.gpt.model import GPT
from manyhands.launch.ranks import Ranks
from manyhands.parallel.tensor_parallel import apply_tensor_parallel
from manyhands.serve.engine import Row, Runner

NOBODY_ASKS = timedelta(days=365)  # the longest wait for a next request


class TensorRanks:
    """The ranks of one model that serves; each of them has it whole, on the CPU, until it is split.

    `load()` returns (model, metadata). Raise ValueError on all ranks where one cannot load it, or it does not split.
    """

    def __init__(self, ranks: Ranks, load: Callable[[], tuple[GPT, dict]]):
        self.device, self.size = ranks.device, ranks.world_size
        self.mesh = init_device_mesh(self.device.type, (self.size,), mesh_dim_names=("tensor",))
        self.control = dist.new_group(backend="gloo", timeout=NOBODY_ASKS)
        problems = [""] * self.size
        try:
            self.model, self.metadata = load()
            resolve_layout(Options(parallel=ParallelOptions(strategy="tp")), self.model.config, self.size)
            problem = ""
        except (ValueError, OSError) as error:
            problem = str(error)
        dist.all_gather_object(problems, problem, self.control)
        for problem in filter(None, problems):
            raise ValueError(problem)

    def lead(self, model: GPT, num_blocks: int, block_size: int) -> "Leader":
        """Return rank 0's Runner of the model, which is split in place. The others `follow`."""
        self.send((num_blocks, block_size))
        return Leader(self, self._split(model), num_blocks, block_size, self.size)

    def follow(self) -> None:
        """Compute what rank 0 computes, until it ends."""
        if (sizes := self.send()) is None:
            return
        num_blocks, block_size = sizes
        runner = Runner(self._split(self.model), num_blocks, block_size, self.size)
        while (row := self.send()) is not None:
            runner.logits(row)

    def end(self) -> None:
        """Let the other ranks go."""
        self.send(None)

    def send(self, what: Any = None) -> Any:
        """Return on all ranks what rank 0 sends."""
        box = [what]
        dist.broadcast_object_list(box, 0, self.control)
        return box[0]

    def _split(self, model):
        apply_tensor_parallel(model, self.mesh)
        return model.to(self.device)


class Leader(Runner):
    """Rank 0's Runner: the others compute each row with it. After an error no row is computed any more."""

    def __init__(self, ranks: TensorRanks, *args: Any):
        super().__init__(*args)
        self.ranks, self.apart = ranks, False

    def logits(self, row: Row) -> torch.Tensor:
        """Return the logits [N, V] of a row's positions. Raise RuntimeError if an earlier row failed."""
        if self.apart:  # the others may still wait in that row: their sums would meet those of another one
            raise RuntimeError("an earlier step failed on one of the ranks; start the server again")
        self.apart = True
        self.ranks.send(row)
        found = super().logits(row)
        self.apart = False
        return found
