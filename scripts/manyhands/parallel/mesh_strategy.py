"""Replicas, shards, tensor ranks and pipeline stages of the GPT, and products of them, by torch: applied from outside.

All ranks draw the same full weights from the same seed on the CPU, so that every layout starts from one process's
numbers; each keeps its own share and moves only that to its device. A rank's share of a model of P parameters takes
what `predict.memory` says. While it starts it needs room for all 4 P bytes in the host's memory; where FSDP alone cuts
the model, for one weight and its share (`fsdp.drawn_in_shares`).

Order on a model, each around the ones before: tensor parallel, activation checkpointing, compilation, FSDP or DDP.
Shapes: B sequences that all ranks hold alike, b of this data rank, T positions, V tokens in the vocabulary.
"""

import contextlib
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention.flex_attention import create_block_mask

from manyhands.config.layout import AXES, Layout, logits_at_once, records_graph, starts_in_shares
from manyhands.config.options import Options
from manyhands.gpt.chunked_loss import liger_loss
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.experts import move_biases
from manyhands.gpt.model import checkpoint_activations, document_blocks
from manyhands.launch.ranks import Ranks
from manyhands.parallel.context import share_of_context
from manyhands.parallel.cuda_graphs import Recorded
from manyhands.parallel.ddp import FlatReplicas, NoParallel, Replicas
from manyhands.parallel.experts import expert_mesh, finish_expert_gradients, spread_experts, spread_weights
from manyhands.parallel.fsdp import (
    LOW_PRECISION,
    Sharded,
    drawn_in_shares,
    emptied,
    full_tensor,
    keep_unsharded,
    reshard,
    shard,
    without_numbers,
)
from manyhands.parallel.optimizer import clip_gradients, global_norm
from manyhands.parallel.strategy import ModelMaker, Strategy, evaluating, full_model
from manyhands.parallel.tensor_parallel import apply_tensor_parallel, finish_gradients, sharded_loss

VOCABULARY_MULTIPLE = 64  # tokens: see `gpt.model.Head`
HELD_BYTES = 2 * 2**30  # a model up to this size is gathered once for a whole sample, not for each token


class MeshStrategy(Strategy):
    """A GPT on the mesh pipeline x replicate x shard x tensor; the interface is `Strategy`'s."""

    stages: Any = None  # of a pipeline
    tied: Any = None  # of a pipeline with a tied model: its `TiedCopy`
    replicas: Any = None  # without one: who takes micro-batches through the model
    flat: FlatReplicas | None = None
    records = False  # whether micro-batches are recorded: see `cuda_graphs`
    _recorded: Recorded | None = None
    pipeline_group: dist.ProcessGroup | None = None
    context_group: dist.ProcessGroup | None = None  # of ranks that share each sequence
    expert_mesh: DeviceMesh | None = None  # where ranks hold different experts

    def __init__(
        self, config: GPTConfig, layout: Layout, options: Options, ranks: Ranks, start: ModelMaker = full_model
    ) -> None:
        super().__init__(config, layout, options, ranks)
        shape = tuple(getattr(layout, axis) for axis in AXES)
        self.mesh = init_device_mesh(ranks.device.type, shape, mesh_dim_names=AXES)
        if layout.context > 1:  # the same ranks in the same order, by the sequences that they see
            by_sequence = {
                "pipeline": layout.pipeline, "data": layout.data, "context": layout.context, "tensor": layout.tensor
            }  # fmt: skip
            mesh = init_device_mesh(ranks.device.type, tuple(by_sequence.values()), mesh_dim_names=tuple(by_sequence))
            self.context_group = mesh["context"].get_group()
        if layout.expert > 1:
            self.expert_mesh = expert_mesh(ranks.device.type, layout)
        low = LOW_PRECISION.get(options.train.precision)
        self.autocast = partial(torch.autocast, ranks.device.type, low, enabled=low is not None)
        self.sharded = layout.dp_mode(options) == "fsdp"
        self._keeps_unsharded = False
        # FSDP cuts what tensor ranks have left: where no number is set, neither has memory before the last cut
        self._without_memory = start is without_numbers and self.sharded and layout.tensor > 1
        begun: contextlib.AbstractContextManager[Any]
        if start is full_model and starts_in_shares(config, layout, options):
            begun = drawn_in_shares(config, options, torch.device("cpu") if options.parallel.offload else ranks.device)
        else:
            begun = contextlib.nullcontext(start(config, options))
        with begun as model:
            if layout.tensor == 1 and options.train.pad_vocab and pads_vocabulary(ranks.device, low):
                model.head.multiple = VOCABULARY_MULTIPLE
            model.head.at_once = logits_at_once(layout, options)
            model.head.fused = liger_loss if options.train.loss_kernel == "liger" else None
            if low is torch.bfloat16 and options.train.low_stream:
                model.stream = low
            if layout.pipeline == 1:
                self._prepare(model)
        if layout.pipeline > 1:
            from manyhands.parallel.pipeline import Stages, TiedCopy  # late: it brings the compiler

            self.pipeline_group = self.mesh["pipeline"].get_group()
            self.stages = Stages(model, layout, options, self.mesh, ranks.device, self._prepare)
            self.modules = list(self.stages.own.values())
        else:
            model.balance_loss = options.optimizer.balance_loss
            self.model, self.modules = model, [model]
            self.replicas = self.replicate(model)
        # taken once: between forward and backward FSDP puts the gathered weights where its shards were
        self._named = {name: p for module in self.modules for name, p in module.named_parameters()}
        if self.stages and config.tie:
            last = self._named.pop("head.weight", None)
            self.tied = TiedCopy(layout, self.stages.owners, self._named.get("tokens.weight"), last)
            if last is not None:  # it has the embedding's name, of which a checkpoint holds one
                self._named.setdefault("tokens.weight", last)

    def _prepare(self, model):
        """Spread a GPT, or a stage of one, over the ranks of the axes replicate, shard and tensor, in place."""
        layout, parallel = self.layout, self.options.parallel
        if self.expert_mesh is not None:
            spread_experts(model, self.expert_mesh, self.ranks.device)
        if self._without_memory:
            emptied(model, "meta")
        if layout.tensor > 1:
            apply_tensor_parallel(model, self.mesh["tensor"], parallel.sequence_parallel, parallel.loss_parallel)
        checkpoint_activations(model, parallel.activation_checkpointing)
        if self.options.train.compile:
            from torch._dynamo import config as dynamo  # late: they take their time
            from torch._inductor import config as inductor

            # it would start a compiler for each core of the node, in each rank
            inductor.compile_threads = min(inductor.compile_threads, torch.get_num_threads())
            dynamo.optimize_ddp = False  # it would cut blocks in two, for an overlap that they have
            # one graph serves all blocks: that of a whole GPT of 8 layers took 4 times as long to build, and no step
            # was faster by it. FSDP's hooks stand around each block, and would cut a longer one
            for block in model.blocks:
                block.compile()
            if not parallel.loss_parallel:  # the logits are then one rank's share of the vocabulary
                model.loss = torch.compile(model.loss)
                model.head.share = torch.compile(model.head.share)
            if skips_blocks(self.config, self.options, self.ranks.device):
                model.allowed = partial(document_blocks, make=torch.compile(create_block_mask))
        if self.sharded:
            shard(model, self.mesh, self.options)
            if self._without_memory:
                emptied(model, "cpu" if parallel.offload else self.ranks.device)
        else:
            model.to(self.ranks.device)

    def replicate(self, model: nn.Module) -> NoParallel:
        """Return the object that runs micro-batches through `model` and combines the data ranks' gradients."""
        if self.sharded:
            return Sharded(model)
        if self.layout.tensor > 1:
            return NoParallel(model)  # DDP refuses DTensors; there is one data rank
        all_reduce, reduce_dtype = self.options.parallel.all_reduce, self.options.parallel.reduce_dtype
        plays = self.ranks.device.type == "cuda" and not torch.version.hip  # AMD's graphs were never tried
        records = plays and records_graph(self.config, self.layout, self.options)
        if all_reduce == "flat" or (all_reduce == "auto" and (records or self.ranks.device.type == "cpu")):
            self.flat = FlatReplicas(model, reduce_dtype)  # where ranks compute on the cores that would send
            self.records = records
            return self.flat
        return Replicas(model, reduce_dtype)

    # --- what a training step is made of

    def forward_backward(self, ids_bT, targets_bT, timer=None):
        if self.records:
            return self._replayed(ids_bT, targets_bT)
        if not self.stages:
            return self._forward_backward(self._own_loss, (ids_bT, targets_bT), timer)
        self._micro_batch_size(len(ids_bT))
        if self.tied:
            self.tied.refresh()
            self.tied.before_backward()
        loss = self.stages.forward_backward(ids_bT, targets_bT)
        tied_too = [self.tied.mirror] if self.tied and self.tied.mirror is not None else []
        finish_gradients([*self._named.values(), *tied_too])
        if self.tied:
            self.tied.sum_gradients()
        if self.layout.data > 1 and not self.sharded:  # fully_shard averages by itself
            from manyhands.parallel.pipeline import average_gradients

            left = [weight for module in self.modules for weight in spread_weights(module).values()]
            same = [p for p in self._named.values() if all(p is not weight for weight in left)]
            average_gradients(same, self.mesh["replicate"].get_group(), self.options.parallel.reduce_dtype)
        self._finish_expert_gradients()
        return loss

    def forward_backward_by(self, loss_of, tensors, timer=None):
        if self.stages or self.context_group or self.options.parallel.loss_parallel:
            raise ValueError(
                "no rank of a pipeline, of a context group, or under loss_parallel, holds whole logits; leave them out"
            )
        return self._forward_backward(loss_of, tensors, timer)

    def _forward_backward(self, loss_of, tensors, timer):
        count, losses = self.layout.micro_batches, []
        with self.autocast():  # which casts each weight once, for all micro-batches
            for i, share in enumerate(self._micro_batches(*tensors)):
                last = i == count - 1  # gradients add up here, and are averaged over the ranks once
                with sharded_loss(self.options.parallel.loss_parallel):
                    loss = loss_of(partial(self.replicas, last=last), *share)
                    if timer:
                        timer.mark("forward")
                    with self.autocast(enabled=False):
                        # divided by the micro-batches once, here; by the data ranks where they meet, by nothing else
                        self.replicas.backward(loss * (self.loss_scale / count), last)
                    if timer:
                        timer.mark("backward")
                losses.append(loss.detach())
        finish_gradients(self._named.values())
        self._finish_expert_gradients()
        return torch.stack(losses).mean()

    def _finish_expert_gradients(self):
        if self.expert_mesh is None:
            return
        # FlatReplicas has divided each loss already
        divide = 1 if self.flat else self.layout.replicate * self.layout.shard
        for module in self.modules:
            finish_expert_gradients(module, self.expert_mesh, divide)

    def _replayed(self, ids_bT, targets_bT):
        """`_forward_backward` of a recorded micro-batch."""
        shares, losses = list(self._micro_batches(ids_bT, targets_bT)), []

        def forward_backward(ids_bT, targets_bT):
            with self.autocast():
                loss = self._own_loss(self.model, ids_bT, targets_bT)
            (loss / (len(shares) * self.flat.world_size)).backward()
            return loss.detach()

        self.flat.attach()
        if self._recorded is None:
            self._recorded = Recorded(forward_backward, *shares[0])
            self.flat.gradients.zero_()
        for share in shares:
            losses.append(self._recorded(*share))
        self.flat.add_up()
        return torch.stack(losses).mean()

    def clip(self, max_norm):
        parameters = [part for part, _ in self.optimizer_parts()]
        copy = self.tied.weight if self.tied and not self.tied.counted else None
        norm = global_norm([p for p in parameters if p is not copy], self.pipeline_group)
        return clip_gradients(parameters, norm, max_norm, self.loss_scale)

    def balance(self):
        layers = list(self.experts().values())
        if not layers:
            return None
        chosen_NE = torch.stack([layer.chosen for layer in layers])
        for axis in ("replicate", "shard"):  # the other ranks have other layers, or have counted the same tokens
            if self.mesh[axis].size() > 1:
                dist.all_reduce(chosen_NE, group=self.mesh[axis].get_group())
        busiest = move_biases(layers, chosen_NE, self.options.optimizer.balance_speed)
        if self.pipeline_group is not None:
            dist.all_reduce(busiest, dist.ReduceOp.MAX, group=self.pipeline_group)
        return busiest

    # --- without gradients

    @torch.no_grad()
    def evaluate(self, ids_bT, targets_bT):
        self._micro_batch_size(len(ids_bT))
        if self.tied:
            self.tied.refresh()
        with self._evaluating():
            if self.stages:
                return self.stages.evaluate(ids_bT, targets_bT)
            shares = self._micro_batches(ids_bT, targets_bT)
            with sharded_loss(self.options.parallel.loss_parallel), self.autocast():
                return torch.stack([self._own_loss(self.model, *share) for share in shares]).mean()

    @torch.no_grad()
    def logits(self, ids_BT):
        B, T = ids_BT.shape
        ids_BT = self.pad(ids_BT)
        self.moved()
        if self.tied:
            self.tied.refresh()
        with self._evaluating():
            if self.stages:
                return self.stages.logits(ids_BT)[:B, :T]
            with self.autocast():
                logits_BTV, _ = self.model(ids_BT)
            return logits_BTV[:B, :T].to(torch.promote_types(logits_BTV.dtype, torch.float32))

    @contextlib.contextmanager
    def gathered(self):
        """Inside, what FSDP has gathered for `logits` stays for the next call, if the whole model is small. Local."""
        self._keeps_unsharded = self.config.num_params() * 4 <= HELD_BYTES
        for module in self.modules:
            keep_unsharded(module, self._keeps_unsharded)
        try:
            yield
        finally:
            self._keeps_unsharded = False
            for module in self.modules:
                keep_unsharded(module, False)
                reshard(module)

    # --- what it holds

    def named_parameters(self):
        return dict(self._named)

    def optimizer_parts(self):
        if not self.flat:
            return super().optimizer_parts()
        return self.flat.parts + [(weight, True) for weight in spread_weights(self.model).values()]

    def optimizer_state(self, optimizer):
        state = super().optimizer_state(optimizer)
        return state | self.flat.cut(optimizer) if self.flat else state

    def named_full_parameters(self):
        return self._whole({name: p.detach() for name, p in self._named.items()})

    def named_full_gradients(self):
        return self._whole({name: p.grad for name, p in self._named.items()})

    def _whole(self, tensors):
        # a copy: gradients are views of DDP's buckets, which the next step fills again
        own = {name: full_tensor(tensor).to("cpu", copy=True) for name, tensor in tensors.items()}
        if self.pipeline_group is None:
            return own
        parts = [None] * self.layout.pipeline
        dist.all_gather_object(parts, own, group=self.pipeline_group)
        return {name: tensor for part in parts for name, tensor in part.items()}

    # --- inside a step

    def _own_loss(self, model, ids_bT, targets_bT):
        """The GPT's: mean cross-entropy of the next token, over the positions that this rank has of a sequence."""
        part = ids_bT, targets_bT
        if self.context_group:
            part = share_of_context(*part, self.config.separator, self.context_group)
        return model(*part)[1]

    def _micro_batches(self, *tensors):
        size = self._micro_batch_size(len(tensors[0]))
        for share in zip(*(tensor.split(size) for tensor in tensors), strict=True):
            self.moved()
            yield share

    def _micro_batch_size(self, b):
        count = self.layout.micro_batches
        if b % count:
            raise ValueError(f"{b} sequences do not split into {count} micro-batches; use a multiple of {count}")
        return b // count

    @contextlib.contextmanager
    def _evaluating(self):
        """eval() inside; afterwards each part's own mode, and shards where FSDP gathered (see `gathered`)."""
        with evaluating(self.modules):
            try:
                yield
            finally:
                for module in [] if self._keeps_unsharded else self.modules:
                    reshard(module)


def pads_vocabulary(device, low) -> bool:
    """Return whether the head's products are faster with padding: on GPUs, in 16 bits (`low`: their dtype, or None)."""
    return device.type != "cpu" and low is not None


def skips_blocks(config: GPTConfig, options: Options, device: torch.device) -> bool:
    """Return whether FlexAttention may serve a compiled GPT whose attention stays within documents.

    It has no dropout, no float64 and no backward on CPUs. In torch 2.13 a checkpointed block with it does not compile.
    """
    plain = not config.dropout and options.parallel.activation_checkpointing == "none"
    return config.separator is not None and device.type == "cuda" and plain and options.train.precision != "fp64"
