"""Pipeline parallelism: the ranks of one mesh axis share the depth of a GPT, under any schedule of torch.

    Stage(full_model, range(0, 2))                           # takes these parts of the model
    stages = Stages(config, full_model, layout, options, mesh, ranks, prepare)       # all ranks
    loss = stages.forward_backward(ids_bT, targets_bT)       # this data rank's share, in layout.micro_batches pieces
    logits_BTV = stages.logits(ids_BT)                       # whole, on all ranks

The GPT is cut into layout.pipeline x layout.stages_per_rank stages. Activations and their gradients travel between them
micro-batch by micro-batch, in the schedule's order (GPipe: Huang et al. 2019; 1F1B: Narayanan et al. 2019; interleaved:
Narayanan et al. 2021; zero-bubble, which splits the backward in two: Qi et al. 2024).

Shapes: B sequences that all ranks hold alike, b of this data rank, T positions, D width, V tokens in the vocabulary.
"""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from manyhands.config.layout import Layout, layers_of_stages, stage_owners
from manyhands.config.options import Options
from manyhands.gpt.model import GPT, experts_of, turn_of, within_documents
from manyhands.measure.tensor_bytes import local_part
from manyhands.parallel.ddp import sum_over

BUCKET_BYTES = 25 * 2**20  # gradients are averaged over replicas in pieces of about this size


class Stage(nn.Module):
    """Some consecutive parts of a GPT, under the names that they have in it.

    Takes ids [b, T] (the first stage) or the stream [b, T, D], gives the stream or (the last stage) logits [b, T, V].
    """

    def __init__(self, full_model: GPT, layers: range, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        self.config, self.autocast = full_model.config, autocast
        self.stream = full_model.stream or full_model.tokens.weight.dtype
        self.is_first, self.is_last = layers.start == 0, layers.stop == self.config.n_layer
        if self.is_first:
            self.tokens, self.positions = full_model.tokens, full_model.positions
            self.drop = full_model.drop
        self.blocks = nn.ModuleDict({str(layer): full_model.blocks[layer] for layer in layers})
        if self.is_last:
            self.norm, self.head = full_model.norm, full_model.head
            if self.config.tie and not self.is_first:  # a copy: see `TiedCopy`
                self.head.weight = nn.Parameter(self.head.weight.detach().clone())

    def forward(self, x: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Run the stage. `ids` [b, T] are needed on every stage if attention stays within documents.

        And for a llama whose tensor ranks split the positions of the stream.
        """
        allowed = None if ids is None else within_documents(ids, self.config.separator)
        positions_T = torch.arange((x if ids is None else ids).shape[1], device=x.device)
        with torch.autocast(x.device.type, self.autocast) if self.autocast else contextlib.nullcontext():
            if self.is_first:
                x = self.drop(GPT.embed(self, x, positions_T)[0]).to(self.stream)  # type: ignore[arg-type]
            turn = turn_of(self.config, x, positions_T)
            for block in self.blocks.values():
                x = block(x, allowed, turn)
            if self.is_last:
                return self.head(self.norm(x))
        return x.to(self.stream)  # what the next stage has room for


class Stages:
    """This rank's stages of a GPT, and the schedule that drives them."""

    def __init__(
        self, full_model: GPT, layout: Layout, options: Options, mesh: DeviceMesh, device: torch.device,
        prepare: Callable[[nn.Module], None],
    ) -> None:  # fmt: skip
        """All ranks call it, with the same weights in `full_model`, which is taken apart.

        `mesh` has an axis pipeline. `prepare(module)` applies tensor parallelism, activation checkpointing and sharding
        to a stage, in place, and puts it on its device.
        """
        self.config, self.layout, self.parallel, self.device = full_model.config, layout, options.parallel, device
        self.group, self.here = mesh["pipeline"].get_group(), mesh["pipeline"].get_local_rank()
        autocast = torch.bfloat16 if options.train.precision == "bf16" else None
        self.owners = stage_owners(self.parallel.schedule, layout.pipeline, layout.stages_per_rank)
        self.dtype = full_model.tokens.weight.dtype  # of losses and logits
        self.stream = full_model.stream or self.dtype
        layers = layers_of_stages(self.config.n_layer, len(self.owners))
        here = [i for i, rank in enumerate(self.owners) if rank == self.here]
        self.own = {i: Stage(full_model, layers[i], autocast) for i in here}  # this rank's stages by their index
        for stage in self.own.values():
            prepare(stage)
            for layer in experts_of(stage):  # of a micro-batch, whose loss is divided likewise: see `_share_of_loss`
                layer.loss_weight = options.optimizer.balance_loss / layout.micro_batches
        self.has_last = len(self.owners) - 1 in self.own
        # tensor ranks that split the positions of the stream between stages
        self.position_ranks = layout.tensor if self.parallel.sequence_parallel else 1
        self._schedules: dict[tuple[int, int], Any] = {}

    def forward_backward(self, ids_bT: torch.Tensor, targets_bT: torch.Tensor) -> torch.Tensor:
        """This data rank's gradients, and its loss on the ranks of the last stage, else 0. All ranks call it."""
        losses: list[torch.Tensor] | None = [] if self.has_last else None
        self._schedule(*ids_bT.shape).step(
            *([ids_bT] if 0 in self.own else []),
            ids=ids_bT,  # every rank of the pipeline has the batch, nothing is sent
            target=targets_bT if self.has_last else None,
            losses=losses,
            return_outputs=False,
        )
        return self._sum(losses).detach()

    @torch.no_grad()
    def evaluate(self, ids_bT: torch.Tensor, targets_bT: torch.Tensor) -> torch.Tensor:
        """The loss as `forward_backward` returns it, without gradients. The caller has put the stages in eval mode."""
        count = self.layout.micro_batches
        targets = targets_bT.chunk(count)
        return self._sum(self._forward(ids_bT.chunk(count), lambda i, logits: self._share_of_loss(logits, targets[i])))

    @torch.no_grad()
    def logits(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """[B, T, V] on all ranks, T <= config.context: from stage to stage, then broadcast from the last.

        The caller has put the stages in eval mode.
        """
        T = ids_BT.shape[1]
        # tensor ranks split positions evenly; what is added behind changes nothing before it
        padded = F.pad(ids_BT, (0, -T % self.position_ranks))
        results = self._forward([padded], lambda _, logits: logits[:, :T].to(self.dtype).contiguous())
        shape = (*ids_BT.shape, self.config.vocab_size)
        logits_BTV = results[0] if self.has_last else torch.empty(shape, dtype=self.dtype, device=self.device)
        dist.broadcast(logits_BTV, group=self.group, group_src=self.owners[-1])
        return logits_BTV

    def _forward(self, pieces, finish):
        """Send micro-batches of ids through all stages: [finish(i, logits of piece i)] on ranks of the last.

        Breadth first: a rank takes all pieces through one of its stages, then through the next. What goes back to a
        lower rank goes when all pieces are there, and is awaited as a whole: neither has to send to the other
        meanwhile, and sends may wait for their receivers. (The schedules' own `eval` fails for V-shaped ones in torch
        2.13.)
        """
        here, last, results = self.here, len(self.owners) - 1, pieces
        for index, stage in self.own.items():
            source = self.owners[index - 1] if index else here
            target = self.owners[index + 1] if index < last else here
            arrived = [self._receive(ids, source) for ids in pieces] if source > here else results
            results = []
            for i, ids in enumerate(pieces):
                x = stage(self._receive(ids, source) if source < here else arrived[i], ids)
                results.append(finish(i, x) if index == last else x)
                if target > here:
                    self._move(dist.isend, x.contiguous(), target)
            if target < here:
                for x in results:
                    self._move(dist.isend, x.contiguous(), target)
        return results

    def _receive(self, ids, source):
        """The stream [rows, T, D] that belongs to ids [rows, T], from a rank of the pipeline axis."""
        x = torch.empty(self._stream_shape(ids.shape), dtype=self.stream, device=self.device)
        self._move(dist.irecv, x, source)
        return x

    def _move(self, operation, x, peer):
        """Send `x` to a rank of the pipeline axis, or receive it from there, and wait.

        As a batch of one: NCCL would make a communicator of its own for each pair of ranks that talk outside of one.
        """
        for work in dist.batch_isend_irecv([dist.P2POp(operation, x, group=self.group, group_peer=peer)]):
            work.wait()

    def _stream_shape(self, ids_shape):
        """Return the shape of the activations between stages: under sequence parallelism, a share of the positions."""
        return (ids_shape[0], ids_shape[1] // self.position_ranks, self.config.n_embd)

    def _sum(self, losses):
        """The sum on ranks that have losses; 0 on the others leaves sums over ranks right."""
        if self.has_last:
            return torch.stack(losses).sum()
        return torch.zeros((), dtype=self.dtype, device=self.device)

    def _schedule(self, b, T):
        """The schedule for shares of this shape: torch's stages keep buffers for what they receive."""
        if (b, T) not in self._schedules:
            count = self.layout.micro_batches
            kind = get_schedule_class(self.parallel.schedule)
            stages = [self._torch_stage(index, (b // count, T)) for index in self.own]
            self._schedules[b, T] = kind(
                stages[0] if issubclass(kind, PipelineScheduleSingle) else stages,
                n_microbatches=count,
                loss_fn=self._share_of_loss,
                scale_grads=False,  # the loss is divided, and nothing else
            )
        return self._schedules[b, T]

    def _torch_stage(self, index, shape):
        # shapes are known: torch need not run the stage once to find them out
        def like(shape, dtype=self.dtype):
            return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)

        stage = self.own[index]
        stream, logits = like(self._stream_shape(shape), self.stream), like((*shape, self.config.vocab_size))
        return PipelineStage(
            stage, index, len(self.owners), self.device, group=self.group,
            input_args=like(shape, torch.int64) if stage.is_first else stream,
            output_args=logits if stage.is_last else stream,
        )  # fmt: skip

    def _share_of_loss(self, logits_bTV, targets_bT):
        """Return a micro-batch's part of the mean loss of this data rank's share."""
        logits_bTV = logits_bTV.to(self.dtype)
        loss = F.cross_entropy(logits_bTV.flatten(0, 1), targets_bT.flatten())
        return loss / self.layout.micro_batches


class TiedCopy:
    """The head's weight on the last stage of a tied model, which is the token embedding of the first stage.

    Each of the two has a copy, and half of the gradient. Summed, it gives both the same step (Narayanan et al. 2021,
    Megatron-LM). Under a V-shaped schedule one rank has both stages: its optimizer knows the embedding alone.
    """

    def __init__(self, layout: Layout, owners: list[int], first: nn.Parameter | None, last: nn.Parameter | None):
        """All ranks call it. `first`, `last`: the weight in this rank's stages, None where it has not the stage."""
        self.weight: Any = last if first is None else first
        self.mirror: Any = None if first is None else last  # where the optimizer does not know it
        self.counted, self.group = first is not None, None  # the norm counts it on the first stage
        if owners[0] != owners[-1]:
            stride = layout.world_size // layout.pipeline
            ends = [[at + owners[0] * stride, at + owners[-1] * stride] for at in range(stride)]
            self.group, _ = dist.new_subgroups_by_enumeration(ends)

    @torch.no_grad()
    def refresh(self) -> None:
        """Before the stages run: on a rank with both, an optimizer or a checkpoint may have moved the embedding."""
        if self.mirror is not None:
            local_part(self.mirror).copy_(local_part(self.weight))

    @torch.no_grad()
    def before_backward(self) -> None:
        """Before a step's first backward: what is summed already is there twice, and will be summed again."""
        if self.group is not None and self.weight.grad is not None:
            local_part(self.weight.grad).div_(2)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """After a step's last backward, where gradients lie as their parameters do."""
        if self.group is not None:
            if (gradient := local_part(self.weight.grad)).numel():  # FSDP may have left none: to neither of the two
                dist.all_reduce(gradient, group=self.group)
        elif self.mirror is not None:
            self.weight.grad += self.mirror.grad
            local_part(self.mirror.grad).zero_()


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, reduce_dtype: str = "own") -> None:
    """Replace gradients by their mean over `group`, a bucket at a time; of a DTensor each rank's own share."""
    buckets: list[list[torch.Tensor]] = [[]]
    for gradient in (local_part(p.grad) for p in parameters if p.grad is not None):
        if sum(g.nbytes for g in buckets[-1]) > BUCKET_BYTES:
            buckets.append([])
        buckets[-1].append(gradient)
    for bucket in buckets:
        flat = torch.cat([gradient.flatten() for gradient in bucket]) / group.size()
        sum_over(flat, group, reduce_dtype)
        for gradient, mean in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(mean.view_as(gradient))
