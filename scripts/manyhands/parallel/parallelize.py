"""Apply any strategy, or a product of them, to the GPT from outside; training sees one interface.

    parallel = parallelize(config, layout, options, ranks)          # all ranks
    loss = parallel.forward_backward(ids_bT, targets_bT)            # this data rank's share of the global batch
    norm = parallel.clip(1.0)                                       # global, whatever is sharded
    optimizer.step(); optimizer.zero_grad()                         # over parallel.named_parameters()

All ranks build the same full weights from the same seed on the CPU, so that every layout starts from one process's numbers;
each keeps its own share and moves only that to its device. A rank's share of a model of P parameters takes what `rank_memory`
says, but while it starts it needs room for all 4 P bytes in the host's memory.

Order on a model: tensor parallel, recomputation, compilation, then FSDP or DDP: each wraps what the ones before made.
Shapes: B sequences that all ranks hold alike, b of this data rank, T positions, V symbols.
"""

import contextlib
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from manyhands.config.layout import AXES
from manyhands.gpt.recompute import recompute
from manyhands.parallel import gradient_norm
from manyhands.parallel.ddp import Replicas
from manyhands.parallel.flat_ddp import FlatReplicas
from manyhands.parallel.fsdp import LOW_PRECISION, hold, let_go, shard, whole, with_synchronisation
from manyhands.parallel.full_model import full_model

HELD_BYTES = 2 * 2**30  # a model up to this size is gathered once for a whole sample, not for each symbol


def parallelize(config, layout, options, ranks):
    """The GPT of `config`, spread over `ranks` as `layout` says: a `Parallel`. All ranks must call it.

    `layout` comes from `resolve_layout`, which has refused what does not go together.
    """
    if options.parallel.strategy == "deepspeed":
        from manyhands.parallel.deepspeed_engine import DeepSpeedParallel

        return DeepSpeedParallel(config, layout, options, ranks)
    return Parallel(config, layout, options, ranks)


class Parallel:
    """A model spread over ranks. What is said of gradients and losses holds under every strategy."""

    loss_scale = 1.0  # fp16: the loss is multiplied by it, and `clip` divides it out of the gradients
    # called before each micro-batch, except a pipeline's, and each symbol of a sample: see `stalls`
    moved = staticmethod(lambda: None)

    def __init__(self, config, layout, options, ranks):
        self.config, self.layout, self.options, self.ranks = config, layout, options, ranks
        shape = tuple(getattr(layout, axis) for axis in AXES)
        self.mesh = init_device_mesh(ranks.device.type, shape, mesh_dim_names=AXES)
        self.data_rank, self.data_size = layout.data_rank(ranks.rank), layout.data
        low = LOW_PRECISION.get(options.train.precision)
        self.autocast = partial(torch.autocast, ranks.device.type, low, enabled=low is not None)
        self.stages = self.replicas = self.flat = self.pipeline_group = None
        self._holds = False
        model = full_model(config, options)
        if layout.pipeline > 1:
            from manyhands.parallel.pipeline import Stages

            self.pipeline_group = self.mesh["pipeline"].get_group()
            self.stages = Stages(config, model, layout, options, self.mesh, ranks, self._prepare)
            self.modules = self.stages.modules
        else:
            self._prepare(model)
            self.model, self.modules = model, [model]
            if layout.tensor == 1 and not isinstance(model, FSDPModule):
                self.replicas = self._replicate(model)
        # taken once: between forward and backward FSDP puts the gathered weights where its shards were
        self._named = {name: p for module in self.modules for name, p in module.named_parameters()}

    def _prepare(self, model):
        """Spread a GPT, or a stage of one, over the ranks of the axes replicate, shard and tensor, in place."""
        layout, parallel = self.layout, self.options.parallel
        if layout.tensor > 1:
            from manyhands.parallel.tensor_parallel import apply_tensor_parallel

            apply_tensor_parallel(
                model, self.mesh["tensor"], parallel.sequence_parallel, parallel.loss_parallel
            )
        recompute(model, parallel.recompute)
        # DDP refuses DTensors: copies of tensor-parallel models are FSDP's, which shards over the 1 rank of axis shard
        sharded = parallel.strategy == "fsdp" or (
            layout.tensor > 1 and layout.data > 1 and layout.pipeline == 1
        )
        if self.options.train.compile:
            # FSDP's hooks stand around each block: a graph across them would be cut there anyway
            for part in model.blocks if sharded or layout.tensor > 1 else [model]:
                part.compile()
        if sharded:
            shard(model, self.mesh, self.options)
        else:
            model.to(self.ranks.device)

    def _replicate(self, model):
        """Copies: in one flat vector where ranks compute on CPUs, else in DDP's buckets."""
        wanted, strategy = self.options.parallel.copies, self.options.parallel.strategy
        if wanted == "flat" or (wanted == "auto" and self.ranks.device.type == "cpu" and strategy != "zero1"):
            self.flat = FlatReplicas(model)
            return self.flat
        return Replicas(model)

    # --- what a training step is made of

    def forward_backward(self, ids_bT, targets_bT, timer=None):
        """Gradients of the mean loss over the global batch, added to what is in `.grad`; returns this rank's mean loss.

        The loss is a 0-dim tensor, and 0 on ranks of a pipeline without its last stage. Raises ValueError if b does not
        split into layout.micro_batches. `timer` hears of the end of each forward and backward (not in a pipeline).
        """
        if self.stages:
            return self.stages.forward_backward(ids_bT, targets_bT)
        count, losses = self.layout.micro_batches, []
        for i, (ids, targets) in enumerate(self._micro_batches(ids_bT, targets_bT)):
            with self._micro_batch(last=i == count - 1):
                loss = self._loss(self.replicas or self.model, ids, targets)
                if timer:
                    timer.forward_done()
                # divided once, here: DDP and FSDP divide by the number of data ranks, and by nothing else;
                # flat replicas add up what was divided before
                weight = self.flat.weight if self.flat else 1.0
                (loss * (self.loss_scale * weight / count)).backward()
                if timer:
                    timer.backward_done()
            losses.append(loss.detach())
        if self.layout.tensor > 1:
            from manyhands.parallel.tensor_parallel import finish_gradients

            finish_gradients(self._named.values())
        return torch.stack(losses).mean()

    def clip(self, max_norm):
        """The global gradient norm, and gradients scaled in place to at most `max_norm` (0: any). All ranks must call it.

        A 0-dim tensor, the same on all ranks, without the loss scale. If it is not finite, the gradients stay as they are.
        """
        parameters = [part for part, _ in self.flat.parts] if self.flat else self._named.values()
        norm = gradient_norm.global_norm(parameters, self.pipeline_group)
        return gradient_norm.clip(parameters, norm, max_norm, self.loss_scale)

    def mean_loss(self, loss):
        """The mean over the global batch of what `forward_backward` or `evaluate` returned. All ranks must call it."""
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total / (self.data_size * self.layout.tensor)

    # --- without gradients

    @torch.no_grad()
    def evaluate(self, ids_bT, targets_bT):
        """The loss as `forward_backward` returns it, without dropout; modes and random states stay as they were."""
        with self._evaluating():
            if self.stages:
                return self.stages.evaluate(ids_bT, targets_bT)
            shares = self._micro_batches(ids_bT, targets_bT)
            with self._split_loss():
                return torch.stack([self._loss(self.model, *share) for share in shares]).mean()

    @torch.no_grad()
    def logits(self, ids_BT):
        """[B, T, V] on all ranks, of the same ids on all ranks, T <= block_size. All ranks must call it.

        Modes and random states stay as they were.
        """
        T = ids_BT.shape[1]
        self.moved()
        with self._evaluating():
            if self.stages:
                return self.stages.logits(ids_BT)
            if self.options.train.compile and self.config.block_size > T:
                # a shape for each T would be compiled; what is added behind changes nothing before it
                ids_BT = F.pad(ids_BT, (0, self.config.block_size - T))
            with self.autocast():
                logits_BTV, _ = self.model(ids_BT)
            return logits_BTV[:, :T].to(torch.promote_types(logits_BTV.dtype, torch.float32))

    @contextlib.contextmanager
    def gathered(self):
        """Inside, what FSDP has gathered for `logits` stays for the next call, if the whole model is small. Local."""
        self._holds = self.config.num_params() * 4 <= HELD_BYTES
        for module in self.modules:
            hold(module, self._holds)
        try:
            yield
        finally:
            self._holds = False
            for module in self.modules:
                hold(module, False)
                let_go(module)

    # --- what it holds

    def named_parameters(self):
        """{name in the full GPT: this rank's parameter, a DTensor where it is sharded}; the same objects every time."""
        return dict(self._named)

    def named_full_parameters(self):
        """{name: whole parameter on the CPU} on all ranks, those of other pipeline stages too. All ranks must call it."""
        return self._whole({name: p.detach() for name, p in self._named.items()})

    def named_full_gradients(self):
        """{name: whole gradient on the CPU} on all ranks, those of other pipeline stages too. All ranks must call it."""
        return self._whole({name: p.grad for name, p in self._named.items()})

    def _whole(self, tensors):
        # a copy: gradients are views of DDP's buckets, which the next step fills again
        own = {name: whole(tensor).to("cpu", copy=True) for name, tensor in tensors.items()}
        if self.pipeline_group is None:
            return own
        parts = [None] * self.layout.pipeline
        dist.all_gather_object(parts, own, group=self.pipeline_group)
        return {name: tensor for part in parts for name, tensor in part.items()}

    # --- inside a step

    def _micro_batches(self, *tensors):
        count, b = self.layout.micro_batches, len(tensors[0])
        if b % count:
            raise ValueError(
                f"{b} sequences do not split into {count} micro-batches; use a multiple of {count}"
            )
        for share in zip(*(tensor.split(b // count) for tensor in tensors), strict=True):
            self.moved()
            yield share

    @contextlib.contextmanager
    def _micro_batch(self, last):
        """Around forward and backward: gradients are summed over the ranks in the last micro-batch alone."""
        if isinstance(self.model, FSDPModule):
            with_synchronisation(self.model, last)
        averaging = self.replicas.micro_batch(last) if self.replicas else contextlib.nullcontext()
        with self._split_loss(), averaging:
            yield

    def _split_loss(self):
        """Around loss and backward: with loss_parallel the logits stay split over the vocabulary."""
        if not self.options.parallel.loss_parallel:
            return contextlib.nullcontext()
        from manyhands.parallel.tensor_parallel import sharded_loss

        return sharded_loss(True)

    def _loss(self, model, ids_bT, targets_bT):
        with self.autocast():
            return model(ids_bT, targets_bT)[1]

    @contextlib.contextmanager
    def _evaluating(self):
        """eval() inside; afterwards each part's own mode, and shards where FSDP gathered (see `gathered`)."""
        training = {part: part.training for module in self.modules for part in module.modules()}
        for part in training:
            part.training = False
        try:
            yield
        finally:
            for part, was_training in training.items():
                part.training = was_training
            for module in [] if self._holds else self.modules:
                let_go(module)
