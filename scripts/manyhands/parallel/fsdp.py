"""Fully sharded data parallelism: each rank keeps a share of every weight and gathers a unit of them when it is needed.

    shard(model, mesh, options)                 # in place, by torch's fully_shard; all ranks of the data axes call it
    replicas = Sharded(model)                   # micro-batches through it, as in `ddp`

After Rajbhandari et al. 2020 (ZeRO) and Zhao et al. 2023 (PyTorch FSDP). A unit is gathered at once: larger
units mean fewer, longer messages and more memory. `parallel.wrapping` chooses the units; all other parameters form one
more, the root:

    block            each block
    block_and_size   each block, and each of the two large matrices outside: token embedding and head
    block_group:M    M consecutive blocks
    size:N           any module with N parameters or more that are in no unit further inside

`parallel.sharding` chooses what is sharded, and for how long (FSDP's and ZeRO's names):

    full      parameters, gradients, optimizer state; gathered for the forward and again for the backward (ZeRO-3)
    grad_op   the same, but what the forward gathered stays until the backward is done (SHARD_GRAD_OP, ZeRO-2)
    hybrid    full within a group of ranks (axis shard), replicas between groups (axis replicate)
    none      nothing: replicas on axis replicate, gradients averaged (NO_SHARD)
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.modules.module import register_module_module_registration_hook

from manyhands.config import wrapping as wrapping_rule
from manyhands.config.options import Options
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT
from manyhands.parallel.ddp import NoParallel
from manyhands.parallel.experts import spread_weights
from manyhands.parallel.strategy import own_precision

LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}


def shard(model: nn.Module, mesh: DeviceMesh, options: Options) -> None:
    """Turn `model`, a GPT or a stage of one, into FSDP units, in place. Every rank holds the same full weights before.

    `mesh` has the axes replicate and shard. The weights may be on the CPU: each unit is moved to the ranks' device, cut
    and resharded before the next. Tied weights are in one unit. With mixed precision, what is gathered and multiplied
    is low; the shards and the optimizer stay float32, and so do the gradients' sums unless `parallel.reduce_dtype` says
    bf16, in which micro-batches then add up, too.
    """
    parallel, low = options.parallel, LOW_PRECISION.get(options.train.precision)
    reduced = torch.bfloat16 if parallel.reduce_dtype == "bf16" else torch.float32 if low else None
    settings: dict[str, Any] = {
        "mesh": mesh["shard"] if mesh["replicate"].size() == 1 else mesh["replicate", "shard"],
        "mp_policy": MixedPrecisionPolicy(low, reduced),
        # pinned memory is a GPU's: a CPU build of torch cannot allocate any
        "offload_policy": CPUOffloadPolicy(mesh.device_type != "cpu") if parallel.offload else OffloadPolicy(),
        # None: torch's own choice, True for all but the root, which the backward needs first
        "reshard_after_forward": False if _keeps_gathered(options) else None,
        "ignored_params": set(spread_weights(model).values()),
    }
    # it warns of operations in place on such a result; there are none
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for unit in units(model, parallel.wrapping):
        fully_shard(unit if len(unit) > 1 else unit[0], **settings)
    fully_shard(model, **settings)
    model.keeps_gathered = _keeps_gathered(options)


def _keeps_gathered(options):
    parallel = options.parallel
    return parallel.strategy != "fsdp" or parallel.sharding in ("grad_op", "none")


def units(model: Any, wrapping: str) -> list[list[nn.Module]]:
    """Return the units except the root, innermost first: lists of modules. `layout` has refused unknown wrappings."""
    kind, count = wrapping_rule.parsed(wrapping)
    blocks = list(model.blocks.values() if hasattr(model.blocks, "values") else model.blocks)
    if kind == "size":
        modules = {tuple(name.split(".")) * bool(name): module for name, module in model.named_modules()}
        own = {path: sum(p.numel() for p in module.parameters(recurse=False)) for path, module in modules.items()}
        lists = [path for path, module in modules.items() if isinstance(module, (nn.ModuleList, nn.ModuleDict))]
        found = [[modules[path]] for path in wrapping_rule.units_of_size(own, count, lists) if path]
    else:
        found = [blocks[i : i + count] for i in range(0, len(blocks), count)]
        if kind == "block_and_size":
            found += [[getattr(model, name)] for name in wrapping_rule.OUTSIDE if hasattr(model, name)]
    if is_tied(model):  # one weight cannot be in two units
        apart = [unit for unit in found if unit not in ([model.tokens], [model.head])]
        found = apart + [[model.tokens, model.head]] if len(apart) < len(found) else found
    return found


def parameters_by_unit(model: nn.Module, wrapping: str) -> list[list[nn.Parameter]]:
    """The parameters of each unit but those of units inside: what one message gathers. Last, maybe [], the root's."""
    found: list[list[nn.Parameter]] = []
    taken: set[nn.Parameter] = set()
    for unit in [*units(model, wrapping), [model]]:
        own = {p: None for module in unit for p in module.parameters() if p not in taken}
        taken.update(own)
        found.append(list(own))
    return found


@contextmanager
def drawn_in_shares(config: GPTConfig, options: Options, device: torch.device) -> Iterator[GPT]:
    """A GPT without numbers, to be sharded in the block; at its end `device` holds this rank's rows of `full_model`'s.

    A rank never has more than its shares and one layer in memory. It draws every weight, one after the other, as one
    process would, and keeps its rows.
    """
    torch.manual_seed(options.train.seed)

    def no_memory(parent, name, module):  # a layer's constructor draws numbers, which `init_weights` replaces
        return None if module is None else module.to("meta")

    hook = register_module_module_registration_hook(no_memory)
    try:
        model = GPT(config).to(own_precision(options))
    finally:
        hook.remove()
    yield model
    emptied(model, device)
    model.init_weights(draw_own_rows)


def without_numbers(config: GPTConfig, options: Options) -> GPT:
    """Return a GPT whose weights are not set: memory that nobody has touched takes no room. See `parallelize`."""
    with torch.device("meta"):
        model = GPT(config).to(own_precision(options))
    return emptied(model, torch.device("cpu"))


def emptied(model: Any, device: torch.device | str) -> Any:
    """Move a GPT or a stage of one, spread or not, without its numbers, in place; buffers, biases of experts, are 0."""
    tied = is_tied(model)
    model.to_empty(device=device)
    if tied:
        model.head.weight = model.tokens.weight
    for buffer in model.buffers():
        buffer.zero_()
    return model


def draw_own_rows(weight: DTensor, std: float) -> None:
    """Draw the whole weight on the CPU, and keep this rank's rows: along the last axis of its mesh, `shard`."""
    rows = torch.empty(weight.shape).normal_(std=std).chunk(weight.device_mesh.size(-1))
    if (rank := weight.device_mesh.get_local_rank(-1)) < len(rows):
        weight.to_local().copy_(rows[rank])


def is_tied(model: Any) -> bool:
    """Return whether token embedding and head are one weight."""
    return hasattr(model, "tokens") and hasattr(model, "head") and model.head.weight is model.tokens.weight


class Sharded(NoParallel):
    """A model that `shard` has spread: the last backward of a step, and only that one, sums gradients over the ranks.

    Before it a rank adds up whole units' gradients; units that stay gathered after a forward stay so for the next one.
    """

    def __call__(self, *args: torch.Tensor, last: bool = True) -> Any:
        self.model.set_requires_gradient_sync(last)
        self.model.set_is_last_backward(last)
        if self.model.keeps_gathered:
            self.model.set_reshard_after_backward(last)
        return self.model(*args)


def reshard(model: nn.Module) -> None:
    """Give back what a forward without backward has unsharded; then parameters are shards again. Local."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def keep_unsharded(model: nn.Module, kept: bool) -> None:
    """Set whether units stay unsharded after the next forwards, as under grad_op (False: reset). Local."""
    for module in model.modules():
        if isinstance(module, FSDPModule) and module is not model and not model.keeps_gathered:
            module.set_reshard_after_forward(not kept, recurse=False)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a DTensor on each rank, axis by axis: all at once, torch warns of several messages."""
    if not isinstance(tensor, DTensor):
        return tensor
    for axis in range(tensor.device_mesh.ndim):
        if not tensor.placements[axis].is_replicate():
            placements = [Replicate() if i == axis else p for i, p in enumerate(tensor.placements)]
            tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()
