"""Any strategy, or a product of them, applied to the GPT from outside; training sees one interface, `Strategy`.

    parallel = parallelize(config, layout, options, ranks)          # all ranks
    optimizer = build_optimizer(parallel, options)
    loss = parallel.forward_backward(ids_bT, targets_bT)            # this data rank's share of the global batch
    norm = parallel.clip(1.0)                                       # global, whatever is sharded
    optimizer.step(); optimizer.zero_grad()

`config.strategies` registers them all; a new one fills in what `Strategy` leaves open. Nobody asks which one it has
got. Shapes: B sequences that all ranks hold alike, b of this data rank, T positions, V tokens in the vocabulary.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from manyhands.config.layout import Layout
from manyhands.config.options import Options
from manyhands.config.strategies import STRATEGIES
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.experts import Experts
from manyhands.gpt.model import GPT
from manyhands.launch.ranks import Ranks
from manyhands.parallel.optimizer import ensure_state

ModelMaker = Callable[[GPTConfig, Options], GPT]
Tensors = dict[str, torch.Tensor]

LENGTH_MULTIPLE = 64  # on a GPU `logits` reads a multiple of this number of positions, see `Strategy.pad`


def full_model(config: GPTConfig, options: Options) -> GPT:
    """The whole GPT on the CPU, from options.train.seed, the same on every rank: what each cuts its share from."""
    torch.manual_seed(options.train.seed)
    return GPT(config).to(own_precision(options))


def own_precision(options: Options) -> torch.dtype:
    """The weights' own precision, whatever is multiplied."""
    return torch.float64 if options.train.precision == "fp64" else torch.float32


def parallelize(
    config: GPTConfig, layout: Layout, options: Options, ranks: Ranks, start: ModelMaker = full_model
) -> "Strategy":
    """The GPT of `config`, spread over `ranks` as `layout` says. All ranks must call it.

    `start(config, options)` makes the full GPT that every rank takes its share of: drawn from the seed by default.
    `layout` comes from `resolve_layout`, which has refused what does not go together.
    """
    module, kind = STRATEGIES[options.parallel.strategy].implementation.split(".")
    return getattr(import_module(f"manyhands.parallel.{module}"), kind)(config, layout, options, ranks, start)


class Strategy:
    """A model distributed over ranks, with the same gradients and losses under every strategy."""

    loss_scale = 1.0  # fp16: the loss is multiplied by it, and `clip` divides it out of the gradients
    optimizer: Any = None  # of a strategy that has its own; see `optimizer.build_optimizer`
    # called before each micro-batch, except a pipeline's, and each token of a sample: see `stalls`
    moved: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, config: GPTConfig, layout: Layout, options: Options, ranks: Ranks) -> None:
        self.config, self.layout, self.options, self.ranks = config, layout, options, ranks
        self.data_rank, self.data_size = layout.data_rank(ranks.rank), layout.data
        self.modules: list[nn.Module] = []  # what of the model this rank has: the GPT, or its stages

    # --- what a training step is made of

    def forward_backward(self, ids_bT: torch.Tensor, targets_bT: torch.Tensor, timer: Any = None) -> torch.Tensor:
        """Gradients of the mean loss over the global batch, added to what is in `.grad`; returns this rank's mean loss.

        The loss is a 0-dim tensor, and 0 on ranks of a pipeline without its last stage. Raise ValueError if b does not
        split into layout.micro_batches. `timer` hears of the end of each forward and backward (not in a pipeline).
        All ranks must call it.
        """
        raise NotImplementedError

    def forward_backward_by(
        self, loss_of: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor], timer: Any = None
    ) -> torch.Tensor:
        """Run `forward_backward` with a custom loss: loss_of(model, *share) for each micro-batch's share of `tensors`.

        model(ids_bT) is (logits_bTV, None), and `loss_of` calls it once. The gradients are those of the mean over
        micro-batches and data ranks. Raise ValueError for a strategy whose ranks do not hold whole logits.
        """
        others = ", ".join(name for name, one in STRATEGIES.items() if one.whole_logits)
        raise ValueError(f"parallel.strategy={self.options.parallel.strategy} has a loss of its own; use {others}")

    def clip(self, max_norm: float) -> torch.Tensor:
        """The global gradient norm; scales gradients in place to at most `max_norm` (0: any). All ranks must call it.

        A 0-dim tensor, the same on all ranks, without the loss scale. Gradients stay as they are if it is not finite.
        """
        raise NotImplementedError

    def balance(self) -> torch.Tensor | None:
        """Move the biases of experts, once per step. All ranks must call it.

        Returns the busiest expert's choices over the mean, a 0-dim tensor, in the least even layer; None without
        experts.
        """
        return None

    def mean_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean over the global batch of what `forward_backward` or `evaluate` returned. All ranks must call it."""
        total = torch.as_tensor(loss, device=self.ranks.device).detach().clone()
        dist.all_reduce(total)
        return total / (self.data_size * self.layout.context * self.layout.tensor)

    # --- without gradients

    def evaluate(self, ids_bT: torch.Tensor, targets_bT: torch.Tensor) -> torch.Tensor:
        """The loss as `forward_backward` returns it, without dropout; modes and random states stay as they were."""
        raise NotImplementedError

    def logits(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """[B, T, V] on all ranks, of the same ids on all ranks, T <= config.context. All ranks must call it.

        Modes and random states stay as they were.
        """
        raise NotImplementedError

    def pad(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """`ids_BT` with rows and positions of id 0 behind, so that texts of growing length come in few shapes.

        Attention is causal and rows are independent: nothing changes for the ids that were there. On a GPU, cuDNN
        plans attention for each shape that it meets, and torch.compile builds code for it. The CPU does neither, and
        reads the ids as they are.
        """
        compiles = self.options.train.compile
        if self.ranks.device.type == "cpu" and not compiles:
            return ids_BT
        B, T = ids_BT.shape
        size = self.config.block_size if self.config.block_size >= T else self.config.context
        longer = size if compiles else min(T + -T % LENGTH_MULTIPLE, size)
        more = 1 << (B - 1).bit_length()
        return F.pad(ids_BT, (0, longer - T, 0, more - B))

    def gathered(self) -> contextlib.AbstractContextManager[None]:
        """Inside, what was gathered for `logits` may stay for the next call. Local."""
        return contextlib.nullcontext()

    # --- what it holds

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """{name in the full GPT: this rank's parameter, a DTensor where it is sharded}; the same objects every time."""
        return {name: p for module in self.modules for name, p in module.named_parameters()}

    def experts(self) -> dict[str, Experts]:
        """{name in the full GPT: a layer of experts}."""
        parts = [pair for module in self.modules for pair in module.named_modules()]
        return {name: part for name, part in parts if isinstance(part, Experts)}

    def named_full_parameters(self) -> Tensors:
        """{name: whole parameter on the CPU} on all ranks, of other pipeline stages too. All ranks must call it."""
        raise NotImplementedError

    def named_full_gradients(self) -> Tensors:
        """{name: whole gradient on the CPU} on all ranks, of other pipeline stages too. All ranks must call it."""
        raise NotImplementedError

    # --- its optimizer

    def optimizer_parts(self) -> list[tuple[nn.Parameter, bool]]:
        """[(parameter, does it decay?)] that the optimizer works on."""
        return [(p, p.ndim >= 2) for p in self.named_parameters().values() if p.requires_grad]

    def make_optimizer(
        self, kind: type[torch.optim.Optimizer], groups: list[dict[str, Any]], **settings: Any
    ) -> torch.optim.Optimizer:
        """An optimizer of class `kind` over parameter groups. All ranks must call it."""
        return kind(groups, **settings)

    def optimizer_state(self, optimizer: Any) -> Tensors:
        """{"<parameter>.<slot>": tensor}, such as "blocks.0.mlp.up.weight.exp_avg", which lies as its parameter does.

        They are the very tensors that this rank's optimizer works on.
        """
        ensure_state(optimizer)
        return {
            f"{name}.{slot}": value
            for name, parameter in self.named_parameters().items()
            for slot, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        }

    # --- its checkpoints

    def checkpoint_tensors(self, optimizer: Any) -> Tensors:
        """{"model.<name>" and "optimizer.<name>.<slot>": tensor}, names that no strategy changes. All ranks call it.

        A DTensor is saved as its shards. What is loaded into them is the training's own, or `take_checkpoint` takes it.
        """
        model = {f"model.{name}": p.detach() for name, p in self.named_parameters().items()}
        state = self.optimizer_state(optimizer)
        model |= {f"model.{name}.bias": layer.bias for name, layer in self.experts().items()}
        return model | {f"optimizer.{name}": value for name, value in state.items()}

    def take_checkpoint(self, tensors: Tensors) -> None:
        """After a load into what `checkpoint_tensors` gave. All ranks call it."""


@contextlib.contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """eval() of all parts inside; each part's own mode afterwards."""
    training = {part: part.training for module in modules for part in module.modules()}
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part, was_training in training.items():
            part.training = was_training
