"""Use DeepSpeed's ZeRO as a strategy. An optional extra: `pip install -e .[deepspeed]`.

    parallel = DeepSpeedParallel(config, layout, options, ranks)     # all ranks; parallelize() calls it
    loss = parallel.forward_backward(ids_bT, targets_bT)
    norm = parallel.clip(1.0)
    parallel.optimizer.step()

options.parallel.zero_stage says what the data ranks share: 1 the optimizer's state, 2 the gradients too, 3 the
parameters too (Rajbhandari et al. 2020, ZeRO, section 5). DeepSpeed uses the process group that we have joined, on a
CPU through gloo; its launcher and its compiled kernels are not needed. Gradients of stages 2 and 3 are reduced after
each micro-batch, because no rank can hold all of them.

Shapes: b sequences of this data rank, B that all ranks hold alike, T positions, V tokens in the vocabulary.
"""

import logging
import warnings

import torch

from manyhands.config.options import OptionError
from manyhands.launch.settings import set_default
from manyhands.parallel.optimizer import build_optimizer
from manyhands.parallel.strategy import Strategy, evaluating, full_model

BUCKET_NUMEL = 25 * 2**20 // 4  # numbers collected before they are sent; DeepSpeed's own 5e8 are 2 GB in fp32
LIVE_NUMEL = 10**9  # stage 3: the most gathered numbers that stay until the step is over (DeepSpeed's default)
MOMENTS = ("exp_avg", "exp_avg_sq")


def import_deepspeed(device):
    """Import DeepSpeed for `device`. Raise OptionError with the cure if it is not installed."""
    # at import it selects GPUs by itself, even if the run uses none
    set_default(DS_ACCELERATOR=device.type)
    try:
        import deepspeed
    except ImportError as error:
        raise OptionError(
            f"parallel.strategy=deepspeed needs DeepSpeed ({error}); "
            "install it with `pip install -e .[deepspeed]`, or use parallel.strategy=fsdp"
        ) from None
    deepspeed.utils.logger.setLevel(logging.ERROR)
    # torch 2.13 has new names for two collectives
    warnings.filterwarnings("ignore", "`torch.distributed.*is deprecated", FutureWarning)
    # use gloo: its shared-memory kernel would need a compiler and a minute
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class DeepSpeedParallel(Strategy):
    """`Strategy` by DeepSpeed's engine, which flattens by itself and owns its optimizer: `optimizer`."""

    def __init__(self, config, layout, options, ranks, start=full_model):
        super().__init__(config, layout, options, ranks)
        deepspeed = import_deepspeed(ranks.device)
        set_default(LOCAL_RANK=str(ranks.local_rank))  # mpiexec and srun do not set it
        self.model = start(config, options).to(ranks.device)
        self.modules = [self.model]
        self.stage, self._clipping = options.parallel.zero_stage, 1.0
        optimizer = build_optimizer(self, options)
        self.engine, *_ = deepspeed.initialize(
            model=self.model, optimizer=optimizer, config=self._settings(), dist_init_required=False
        )
        self.optimizer = EngineOptimizer(self.engine)

    def _settings(self):
        train = self.options.train
        micro_batch = train.global_batch // self.layout.data // self.layout.micro_batches
        settings = {
            "train_batch_size": train.global_batch,
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": self.layout.micro_batches,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": BUCKET_NUMEL,
                "allgather_bucket_size": BUCKET_NUMEL,
                "stage3_prefetch_bucket_size": BUCKET_NUMEL,
                "stage3_max_live_parameters": LIVE_NUMEL,
                "stage3_max_reuse_distance": LIVE_NUMEL,
                "stage3_param_persistence_threshold": 10 * self.config.n_embd,  # norms and biases stay whole
            },
        }
        if train.precision == "bf16":
            settings["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
        return settings

    def named_full_parameters(self):
        """{name: full tensor on the CPU}, on all ranks. Collective."""
        from deepspeed.utils import safe_get_full_fp32_param

        return self._full(safe_get_full_fp32_param)

    def named_full_gradients(self):
        """{name: full tensor on the CPU}, on all ranks, between `forward_backward` and the step. Collective."""
        from deepspeed.utils import safe_get_full_grad

        # DeepSpeed scales them only inside its step
        return {name: gradient * self._clipping for name, gradient in self._full(safe_get_full_grad).items()}

    def _full(self, get):
        # copies: what DeepSpeed hands out may be its own buffer
        return {name: get(p).detach().cpu().clone() for name, p in self.model.named_parameters()}

    def forward_backward(self, ids_bT, targets_bT, timer=None):
        """Compute the global batch's gradients in DeepSpeed and return this rank's mean loss. All ranks call it."""
        count, total, self._clipping = self.layout.micro_batches, 0.0, 1.0
        for i, (ids, targets) in enumerate(self._micro_batches(ids_bT, targets_bT)):
            self.engine.set_gradient_accumulation_boundary(i == count - 1)
            _, loss = self.engine(ids, targets)
            if timer is not None:
                timer.mark("forward")
            self.engine.backward(loss)  # it divides by the number of micro-batches
            if timer is not None:
                timer.mark("backward")
            total = total + loss.detach()
        return total / count

    @torch.no_grad()
    def evaluate(self, ids_bT, targets_bT):
        """Return this rank's mean loss, without gradients and dropout. All ranks call it."""
        with evaluating([self.engine]):
            losses = [self.engine(*share)[1] for share in self._micro_batches(ids_bT, targets_bT)]
        return torch.stack(losses).mean()

    def _micro_batches(self, *tensors):
        for share in zip(*(tensor.chunk(self.layout.micro_batches) for tensor in tensors), strict=True):
            self.moved()
            yield share

    @torch.no_grad()
    def logits(self, ids_BT):
        """Return logits [B, T, V] of the same ids on all ranks. All ranks call it."""
        B, T = ids_BT.shape
        self.moved()
        with evaluating([self.engine]):
            return self.engine(self.pad(ids_BT))[0][:B, :T].float()

    def clip(self, max_norm):
        """Return the global gradient norm, 0-dim; the step clips to `max_norm` (0: no clipping). Collective."""
        zero = self.engine.optimizer
        if self.stage == 3:
            from deepspeed.runtime.utils import combine_grad_norm_groups

            norm = combine_grad_norm_groups(zero._get_norm_groups())
        else:
            norm = zero.scaled_global_norm()
        norm = torch.as_tensor(norm, device=self.ranks.device)
        zero.clip_grad = max_norm
        if max_norm > 0 and torch.isfinite(norm):
            self._clipping = min(1.0, max_norm / (norm.item() + 1e-6))
        return norm

    # --- checkpoints: whole tensors, under the names that every strategy uses

    def checkpoint_tensors(self, optimizer=None):
        """{"model.<name>" and "optimizer.<name>.<slot>": full tensor on the CPU}, on all ranks. Collective."""
        from deepspeed.utils import safe_get_full_optimizer_state

        tensors = {f"model.{name}": value for name, value in self.named_full_parameters().items()}
        if not self._ensure_state():
            return tensors
        step = next(iter(self._states()))["step"]
        for slot in MOMENTS:
            values = self._full(lambda p, slot=slot: safe_get_full_optimizer_state(p, slot))
            tensors |= {f"optimizer.{name}.{slot}": value for name, value in values.items()}
        return tensors | {f"optimizer.{name}.step": step.cpu().clone() for name in self.named_parameters()}

    @torch.no_grad()
    def take_checkpoint(self, tensors):
        """Load the tensors of `checkpoint_tensors` into the engine. All ranks call it, with the same tensors.

        In fp32 the run then continues bit for bit; in bf16 and stage 3 within bf16's rounding of the small weights.
        """
        has_state = self._ensure_state()
        for name, parameter in self.model.named_parameters():
            self._put(parameter, tensors[f"model.{name}"])
            for slot in MOMENTS if has_state else ():
                self._put(parameter, tensors[f"optimizer.{name}.{slot}"], slot)
        for state in self._states() if has_state else ():
            state["step"].copy_(tensors[f"optimizer.{next(iter(self.named_parameters()))}.step"])

    def _put(self, parameter, value, slot=None):
        """Set the whole of a parameter, or of one slot of its optimizer state, on this rank: the part that it holds."""
        from deepspeed import utils

        value = value.to(self.ranks.device)
        if self.stage == 3:
            # its parts are equal, with zeros behind the end, which DeepSpeed's own setter of full values forgets
            size = parameter.ds_tensor.ds_numel
            padded = torch.nn.functional.pad(value.flatten(), (0, size * self.data_size - value.numel()))
            share = padded.view(self.data_size, size)[self.data_rank]
            if slot is None:
                utils.safe_set_local_fp32_param(parameter, share)
                parameter.ds_tensor.copy_(share)  # the next forward gathers these
            else:
                utils.safe_set_local_optimizer_state(parameter, share, slot)
        elif slot is None:
            utils.safe_set_full_fp32_param(parameter, value)
        else:
            utils.safe_set_full_optimizer_state(parameter, value, slot)
        if slot is None and parameter.shape == value.shape:  # whole on each rank: in stage 3 the small ones
            parameter.copy_(value)

    def _flats(self):
        """Return the inner optimizer's flat tensors: one per parameter group, of which a rank has a part."""
        zero = self.engine.optimizer
        return zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups

    def _states(self):
        return (self.engine.optimizer.optimizer.state[flat] for flat in self._flats())

    def _ensure_state(self):
        """Return whether the optimizer has a state; AdamW gets its own here if it has not stepped yet."""
        zero = self.engine.optimizer
        if not isinstance(zero.optimizer, torch.optim.AdamW):
            return False
        for flat in self._flats():
            state = zero.optimizer.state[flat]
            if not state:
                state["step"] = torch.zeros((), device=flat.device)
                state |= {slot: torch.zeros_like(flat) for slot in MOMENTS}
        if self.stage < 3:  # DeepSpeed finds the parts of the first group only: it looks before the others have stepped
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()
        return True


class EngineOptimizer:
    """DeepSpeed's optimizer with the training loop's interface: `step` clips, steps and clears the gradients."""

    def __init__(self, engine):
        self.engine = engine

    @property
    def param_groups(self):
        return self.engine.optimizer.param_groups

    def step(self):
        self.engine.step()

    def zero_grad(self):
        """Do nothing: the step has cleared the gradients."""
