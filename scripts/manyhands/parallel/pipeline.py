"""Pipeline parallelism: the ranks of one mesh axis share the depth of a GPT, under any schedule of torch.

    stages = Stages(config, full_model, layout, options, mesh, ranks, prepare)       # all ranks
    loss = stages.forward_backward(ids_bT, targets_bT)       # this data rank's share, in layout.micro_batches pieces
    logits_BTV = stages.logits(ids_BT)                       # whole, on all ranks

The GPT is cut into layout.pipeline x layout.stages_per_rank stages (see `pipeline_stage`). Activations and their
gradients travel between stages micro-batch by micro-batch, in the order that the schedule gives (GPipe: Huang et al.
2019; 1F1B: Narayanan et al. 2019; interleaved: Narayanan et al. 2021; zero-bubble, which splits the backward in two: Qi
et al. 2024).

Shapes: b sequences of this data rank, T positions, D width, V tokens in the vocabulary; B sequences that all ranks hold
alike.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from manyhands.config.layout import Layout
from manyhands.config.options import Options
from manyhands.gpt.model import GPT, GPTConfig
from manyhands.launch.ranks import Ranks
from manyhands.measure.tensor_bytes import local_part
from manyhands.parallel.pipeline_stage import Stage, layers_of_stages, stage_owners
from manyhands.parallel.tensor_parallel import finish_gradients

BUCKET_BYTES = 25 * 2**20  # gradients are averaged over replicas in pieces of about this size


class Stages:
    """This rank's stages of a GPT, and the schedule that drives them."""

    def __init__(
        self, config: GPTConfig, full_model: GPT, layout: Layout, options: Options, mesh: DeviceMesh, ranks: Ranks,
        prepare: Callable[[nn.Module], None],
    ) -> None:  # fmt: skip
        """All ranks call it, with the same weights in `full_model`, which is taken apart.

        `mesh` has the axes pipeline, replicate, shard, tensor. `prepare(module)` applies tensor parallelism,
        recomputation and sharding to a stage, in place, and puts it on its device. A stage that becomes an FSDPModule
        averages its gradients over the data ranks by itself; those of others are averaged here.
        """
        self.config, self.layout, self.ranks = config, layout, ranks
        self.parallel = options.parallel
        self.group, self.here = mesh["pipeline"].get_group(), mesh["pipeline"].get_local_rank()
        autocast = torch.bfloat16 if options.train.precision == "bf16" else None
        self.owners = stage_owners(self.parallel.schedule, layout.pipeline, layout.stages_per_rank)
        self.dtype = full_model.positions.weight.dtype
        self.own: dict[int, Stage] = {}  # this rank's stages by their index
        layers = layers_of_stages(config.n_layer, len(self.owners))
        for index, owner in enumerate(self.owners):
            if owner == self.here:
                self.own[index] = Stage(full_model, layers[index], autocast)
                prepare(self.own[index])
        self.has_first, self.has_last = 0 in self.own, len(self.owners) - 1 in self.own
        # the group to average gradients over; fully_shard does that by itself
        self.replicas: dist.ProcessGroup | None = None
        if layout.data > 1 and not any(isinstance(module, FSDPModule) for module in self.modules):
            self.replicas = mesh["replicate"].get_group()
        # kept, because a module that fully_shard has gathered shows others for a while
        self._parameters = {n: p for module in self.modules for n, p in module.named_parameters()}
        self._schedules: dict[tuple[int, int], Any] = {}

    @property
    def modules(self) -> list[nn.Module]:
        return list(self.own.values())

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """{name in the full GPT: this rank's parameter}."""
        return dict(self._parameters)

    def forward_backward(self, ids_bT: torch.Tensor, targets_bT: torch.Tensor) -> torch.Tensor:
        """Gradients of the mean loss over the global batch, and this data rank's loss on the ranks of the last stage,
        else 0.

        Raises ValueError if b does not split into layout.micro_batches.
        """
        losses: list[torch.Tensor] | None = [] if self.has_last else None
        self._schedule(*ids_bT.shape).step(
            *([ids_bT] if self.has_first else []),
            target=targets_bT if self.has_last else None,
            losses=losses,
            return_outputs=False,
            **self._about(ids_bT),
        )
        finish_gradients(self._parameters.values())
        if self.replicas is not None:
            _average([p.grad for p in self._parameters.values() if p.grad is not None], self.replicas)
        return self._sum(losses).detach()

    @torch.no_grad()
    def evaluate(self, ids_bT: torch.Tensor, targets_bT: torch.Tensor) -> torch.Tensor:
        """The loss as `forward_backward` returns it, without gradients. The caller has put the modules in eval mode."""
        self._refuse_shape(*ids_bT.shape)
        count = self.layout.micro_batches
        targets = targets_bT.chunk(count)
        return self._sum(self._forward(ids_bT.chunk(count), lambda i, logits: self._share_of_loss(logits, targets[i])))

    @torch.no_grad()
    def logits(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """[B, T, V] on all ranks, T <= block_size: from stage to stage, then broadcast from the last.

        The caller has put the modules in eval mode.
        """
        T, device = ids_BT.shape[1], ids_BT.device
        if self.config.block_size < T:
            raise ValueError(f"{T} positions do not fit into block_size={self.config.block_size}; cut them")
        # tensor ranks split positions evenly; what is added behind changes nothing before it
        padded = F.pad(ids_BT, (0, -T % self._position_ranks))
        results = self._forward([padded], lambda _, logits: logits[:, :T].to(self.dtype).contiguous())
        logits_BTV = (
            results[0]
            if self.has_last
            else torch.empty((*ids_BT.shape, self.config.vocab_size), dtype=self.dtype, device=device)
        )
        dist.broadcast(logits_BTV, group=self.group, group_src=self.owners[-1])
        return logits_BTV

    def _forward(self, pieces, finish):
        """Send micro-batches of ids through all stages; [finish(i, logits of piece i)] on ranks of the last, else None.

        Breadth first: a rank takes all pieces through one of its stages, then through the next. What goes around, from
        the last rank to the first, goes when all pieces are there, and is awaited as a whole: neither has to send to
        the other meanwhile, and sends may wait for their receivers. (The schedules' own `eval` fails for V-shaped ones
        in torch 2.13.)
        """
        here, last = self.here, len(self.owners) - 1
        results = pieces
        for index, module in self.own.items():
            source = self.owners[index - 1] if index else here
            target = self.owners[index + 1] if index < last else here
            from_around, around = here == 0 != source, target == 0 != here
            arrived, results = results, []
            if from_around:
                arrived = [self._receive(ids, source) for ids in pieces]
            for i, ids in enumerate(pieces):
                x = arrived[i] if from_around or source == here else self._receive(ids, source)
                x = module(x, **self._about(ids))
                if target == here or around:
                    results.append(finish(i, x) if index == last else x)
                else:
                    self._send(x, target)
            if around:
                for x in results:
                    self._send(x, target)
        return results if self.has_last else None

    def _about(self, ids):
        """What a stage needs of the ids beyond the stream: every rank of the pipeline has the batch, so nothing is
        sent.
        """
        return {} if self.config.separator is None else {"ids": ids}

    def _receive(self, ids, source):
        """The stream [rows, T, D] that belongs to ids [rows, T], from a rank of the pipeline axis."""
        x = torch.empty(self._stream_shape(ids.shape), dtype=self.dtype, device=ids.device)
        dist.recv(x, group=self.group, group_src=source)
        return x

    def _send(self, x, target):
        dist.send(x.contiguous(), group=self.group, group_dst=target)

    @property
    def _position_ranks(self):
        return self.layout.tensor if self.parallel.sequence_parallel else 1

    def _stream_shape(self, ids_shape):
        """What travels between stages has this shape: under sequence parallelism a share of the positions."""
        return (ids_shape[0], ids_shape[1] // self._position_ranks, self.config.n_embd)

    def _sum(self, losses):
        """The sum on ranks that have losses; 0 on the others leaves sums over ranks right."""
        if self.has_last:
            return torch.stack(losses).sum()
        return torch.zeros((), dtype=self.dtype, device=self.ranks.device)

    def _refuse_shape(self, b, T):
        if b % self.layout.micro_batches or T % self._position_ranks:
            raise ValueError(
                f"{b} sequences of {T} positions do not split into {self.layout.micro_batches} micro-batches and"
                f" {self._position_ranks} shares of the positions; use multiples"
            )

    def _schedule(self, b, T):
        """The schedule for shares of this shape: torch's stages keep buffers for what they receive."""
        if (b, T) not in self._schedules:
            self._refuse_shape(b, T)
            count = self.layout.micro_batches
            stages = [self._torch_stage(i, (b // count, T)) for i in self.own]
            kind = get_schedule_class(self.parallel.schedule)
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

        module = self.own[index]
        stream, logits = like(self._stream_shape(shape)), like((*shape, self.config.vocab_size))
        return PipelineStage(
            module,
            index,
            len(self.owners),
            self.ranks.device,
            input_args=like(shape, torch.int64) if module.is_first else stream,
            output_args=logits if module.is_last else stream,
            group=self.group,
        )

    def _share_of_loss(self, logits_bTV, targets_bT):
        """What a micro-batch adds to the mean loss of this data rank's share."""
        logits_bTV = logits_bTV.to(self.dtype)
        loss = F.cross_entropy(logits_bTV.flatten(0, 1), targets_bT.flatten())
        return loss / self.layout.micro_batches


@torch.no_grad()
def _average(gradients, group):
    """Replace gradients by their mean over `group`, a bucket at a time; of a DTensor each rank's own share."""
    buckets = {}
    for gradient in gradients:
        gradient = local_part(gradient)
        bucket = buckets.setdefault(gradient.dtype, [[]])
        if sum(g.nbytes for g in bucket[-1]) > BUCKET_BYTES:
            bucket.append([])
        bucket[-1].append(gradient)
    for bucket in (b for kind in buckets.values() for b in kind):
        flat = torch.cat([gradient.flatten() for gradient in bucket]) / group.size()
        dist.all_reduce(flat, group=group)
        for gradient, mean in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(mean.view_as(gradient))
