"""Run a training with any strategy: `scripts/train.py` calls `train(options)`.

`Run.go` sets up monitoring, `Run.loop` is the whole training, `Run.train_step` one step of it. Set-up is in `start`,
the strategies are in `parallel`, output is in `report`, and saved state in `checkpoints`. Step k means: after k
optimizer steps. Batch k is drawn from (seed, k) alone, so the position in the data is the step.
"""

import dataclasses
import math
from pathlib import Path

import torch
import torch.distributed as dist

from manyhands.checkpoint.checkpoints import Checkpoints
from manyhands.checkpoint.manifest import CheckpointError, steps_in
from manyhands.config.layout import resolve_layout, starts_in_shares
from manyhands.config.options import model_config, to_dict
from manyhands.data.corpus import get_batch
from manyhands.gpt.sampling import continued, drawing
from manyhands.launch.join import join, leave, refuse
from manyhands.launch.metrics import Metrics
from manyhands.launch.program import DIVERGED, INTERRUPTED, Refused, end, reason, say_status
from manyhands.launch.ranks import Agreement
from manyhands.launch.run_folder import point_latest_to, run_folder
from manyhands.measure.tensor_bytes import local_part
from manyhands.parallel.fsdp import without_numbers
from manyhands.parallel.optimizer import LossScale, build_optimizer, learning_rate, set_learning_rate
from manyhands.parallel.strategy import full_model, parallelize
from manyhands.train.garbage import garbage_held
from manyhands.train.preemption import BY_HAND, PreemptionHandler, clear_requeue, write_requeue
from manyhands.train.report import Report
from manyhands.train.stalls import StallWatch
from manyhands.train.start import (
    choose_tf32,
    corpus_of,
    decided,
    model_folder,
    of_all_ranks,
    prompt_ids,
    random_state,
    refuse_missing,
    refuse_size,
    refuse_text,
    resume,
    seed_dropout,
)
from manyhands.train.timing import profiled

SLOW_S = 1800.0  # a checkpoint or a compilation that takes longer counts as a stall
VALIDATION_SEED = 1  # the same validation batches in every evaluation of every run


class Diverged(RuntimeError):
    """The loss, the gradients or the weights of `run` are NaN or infinite; the message says which, and what to do."""

    def __init__(self, run, what):
        super().__init__(
            f"{what} at step {run.step}: lower optimizer.lr={run.options.optimizer.lr:g}, or go on from the last"
            " checkpoint with another seed"
        )


class Run:
    """The model, optimizer, checkpoints and report of one run, which stops when `preemption` agrees on it."""

    _ahead = (-1, None)  # a step and its batch: see `gradients`

    def __init__(self, options, config, layout, corpus, ranks, preemption, start=full_model, source=None):
        self.source, self.origin = source, source and source.about()
        self.options, self.config, self.layout = options, config, layout
        self.corpus, self.ranks = corpus, ranks
        self.folder = Agreement(ranks, None, Refused).on_rank_0(lambda: run_folder(ranks, latest=False))
        self.train_ids, self.val_ids = corpus.train_ids, corpus.val_ids  # on the host, where they are indexed
        choose_tf32(options, ranks.device)
        self.parallel = parallelize(config, layout, options, ranks, start)
        self.optimizer = build_optimizer(self.parallel, options)
        self.scale = LossScale() if options.train.precision == "fp16" else None
        self.step, self.val_losses = 0, {}
        self.eval_pending = True  # of the first step, even if a signal arrived during that evaluation
        self.preemption = preemption
        seed_dropout(options.train.seed, layout, ranks)
        wanted = options.checkpoint
        self.checkpoint_folder = Path(wanted.folder) if wanted.folder else self.folder / "checkpoints"
        self.checkpoints = Checkpoints(
            self.checkpoint_folder, ranks, keep=wanted.keep, asynchronous=wanted.asynchronous
        )
        self.saved = None  # the last step that was saved
        self.report = Report(ranks, options, layout, config, corpus, self.folder, self.parallel.mean_loss)

    def go(self):
        """Train to the end or until a signal stops it, and return the exit status."""
        options, report = self.options, self.report
        if self.ranks.rank == 0:
            point_latest_to(self.folder)  # only now: a refused run must not become `latest`
        clear_requeue(self.checkpoint_folder, self.ranks)
        report.start()
        left = options.train.steps - self.step
        try:
            with (
                StallWatch(self.ranks, options.train.stall_s) as watch,
                profiled(self.ranks, options, self.folder, report.note, left) as step_done,
                garbage_held(options.train.hold_garbage) as collect,
            ):
                self.parallel.moved = watch.moved
                stop = self.loop(watch, step_done, collect)
        except BaseException as error:
            report.close(f"ended at step {self.step} by {type(error).__name__}")
            raise
        if stop and stop != BY_HAND:
            write_requeue(self.checkpoint_folder, stop, self.step, self.ranks)
        saved = self.saved == self.step
        report.close(
            "done" if not stop
            else f"stopped by {stop} and saved at step {self.step}" if saved
            else f"stopped by {stop} at step {self.step}, and not saved: set --checkpoint.folder to be able to resume"
        )  # fmt: skip
        self.write_metrics()
        self.checkpoints.close()
        return INTERRUPTED if stop and not saved else 0

    def loop(self, watch, step_done, collect):
        """Train the remaining steps and return the signal that stopped them early, or None. All ranks call it."""
        options, every, stop = self.options, self.options.log, self.preemption.agreed()
        first = self.step
        compile_s = SLOW_S if options.train.compile else None  # the first forward and evaluation compile
        if stop is None and self.eval_pending and self.due(every.eval_every):
            watch.at(self.step, "evaluation", compile_s)
            stop = self.evaluate()
        while self.step < options.train.steps and stop is None:
            # ranks wait for each other in every step: one that hangs stops all, and the watch names it
            watch.at(self.step, "training", compile_s if self.step == first else None)
            norm = self.train_step()
            step_done()
            collect(self.step)
            if any(map(self.due, (every.every, every.eval_every, options.checkpoint.every))):
                self.abort_on_nan(norm)  # the report synchronises with the GPU here anyway
            if self.due(every.eval_every):
                watch.at(self.step, "evaluation", compile_s)
                stop = self.evaluate()
            if self.due(options.checkpoint.every):
                watch.at(self.step, "checkpoint", SLOW_S)
                self.save()  # each rank writes its own shards; no weight is gathered
            stop = stop or self.preemption.agreed()
        if self.step > first:
            self.abort_on_nan(norm)
        watch.at(self.step, "evaluation", compile_s)
        if stop is None and self.step not in self.val_losses:
            stop = self.evaluate()
        watch.at(self.step, "checkpoint", SLOW_S)
        if options.checkpoint.at_end if stop is None else stop != BY_HAND or options.checkpoint.folder:
            self.save()  # a run stopped by hand can be resumed only with a folder
        self.checkpoints.wait()  # an asynchronous save may still be writing
        return stop

    def train_step(self):
        """Make one optimizer step and return the global gradient norm, a tensor. All ranks call it."""
        timer = self.report.timer
        timer.step_start()
        batch = self.next_batch()
        lr = learning_rate(self.step, self.options)
        set_learning_rate(self.optimizer, lr)
        timer.mark("batch")
        if self.scale:
            self.parallel.loss_scale = self.scale.scale
        # communicates gradients, and with FSDP, tensor or pipeline ranks also weights or activations
        loss = self.gradients(batch, timer)
        # the norm of the whole model, so that all ranks clip by the same number
        norm = self.parallel.clip(self.options.optimizer.clip)
        # only fp16 waits for the norm: all ranks skip a step whose gradients overflowed
        if self.scale is None or self.scale.take(norm.item()):
            self.optimizer.step()
        self.optimizer.zero_grad()
        busiest = self.parallel.balance()
        timer.mark("step")
        self.step += 1
        self.report.step(self.step, loss, norm, lr, busiest)  # communicates only in the last step of an interval
        return norm

    def next_batch(self):
        """Return this rank's share of this step's batch."""
        step, batch = self._ahead
        if step == self.step:
            return batch
        # every data rank draws all of the step's windows from (seed, step) and keeps its own: no communication
        return self.batch(self.train_ids, self.step, self.options.train.seed)

    def gradients(self, batch, timer):
        """Add the global batch's gradients to `.grad` and return this rank's loss. All ranks call it."""
        loss = self.parallel.forward_backward(*batch, timer)
        following, train = self.step + 1, self.options.train
        if self.ranks.device.type != "cpu" and following < train.steps:  # read the next batch while the GPU computes
            self._ahead = following, self.batch(self.train_ids, following, train.seed)
        return loss

    def evaluate(self):
        """Compute the validation loss, each rank on its share, and a sample. Raise Diverged on all ranks.

        Return the signal by which ranks agreed to stop between two batches, which ends the evaluation, or None.
        """
        log, losses = self.options.log, []
        for i in range(log.eval_batches):
            # a scheduler waits about half a minute, and an evaluation may take longer
            if i and (stop := self.preemption.agreed()):
                return stop
            self.parallel.moved()
            losses.append(self.parallel.evaluate(*self.batch(self.val_ids, i, VALIDATION_SEED)))
        loss = self.parallel.mean_loss(torch.stack(losses).mean()).item()
        if not math.isfinite(loss):
            raise Diverged(self, f"the validation loss is {loss}")
        self.val_losses[self.step] = loss
        self.report.evaluation(self.step, loss)
        return self.sample() if log.sample else None

    def sample(self):
        """Show text that the model writes. All ranks call it and draw the same tokens.

        Return the signal by which ranks agreed to stop between two tokens, or None.
        """
        draw = drawing(1.0, torch.Generator().manual_seed(self.options.train.seed))
        prompt = prompt_ids(self.options, self.corpus).to(self.ranks.device)[None]
        ids, size = prompt[0].tolist(), self.config.context
        with self.parallel.gathered():
            for next_1 in continued(self.parallel.logits, prompt, self.options.log.sample, size, draw):
                ids += next_1.tolist()
                if stop := self.preemption.agreed():
                    return stop
        # a vocabulary may be larger than the corpus's
        self.report.sample(self.step, self.corpus.decode([i for i in ids if i < len(self.corpus.vocab)]))
        return None

    def batch(self, ids, step, seed):
        """Return this rank's share of global batch `step`, [b, T] twice, the same within a tensor or pipeline group."""
        parts = get_batch(
            ids, step, self.options.train.global_batch, self.config.block_size,
            self.parallel.data_rank, self.parallel.data_size, seed,
        )  # fmt: skip
        if self.ranks.device.type == "cuda":  # a copy from pinned memory does not wait for queued work
            parts = [part.pin_memory() for part in parts]
        return [part.to(self.ranks.device, non_blocking=True) for part in parts]

    def due(self, every):
        """Return whether an event of every `every` steps (0: never) is due; the run's end is handled separately."""
        return every and self.step % every == 0 and self.step < self.options.train.steps

    def metadata(self):
        """Return a checkpoint's metadata in JSON's types."""
        return {
            "step": self.step,
            "options": to_dict(self.options),
            "config": dataclasses.asdict(self.config),
            "corpus": self.corpus.metadata() | self.corpus.vocabulary(),
            "layout": str(self.layout),
            "world_size": self.ranks.world_size,
            "val_loss": self.val_losses.get(self.step),
            "tokens": self.report.tokens(self.step),
            "loss_scale": self.scale and self.scale.state(),
            "base": self.origin,
        }

    def tensors(self):
        """Return all state that training changes, under names that do not depend on the strategy."""
        return self.parallel.checkpoint_tensors(self.optimizer)

    def save(self):
        """Save this step's checkpoint, if there is none. Raise Diverged or CheckpointError on all ranks. Collective."""
        if self.saved == self.step:
            return
        tensors = self.tensors()
        self.abort_on_broken_weights(tensors)
        metadata = self.metadata()
        self.checkpoints.save(
            self.step, tensors, metadata, random_state(self.ranks.device), val_loss=metadata["val_loss"]
        )
        self.saved = self.step

    def abort_on_nan(self, norm):
        """Raise Diverged if the global gradient norm, 0-dim and equal on all ranks, is NaN or Inf."""
        if self.scale is None and not math.isfinite(norm.item()):  # fp16 skips such steps
            raise Diverged(self, f"the gradient norm is {norm.item()}")

    def abort_on_broken_weights(self, tensors):
        """Raise Diverged on all ranks if the last step produced a weight that is NaN or Inf. All ranks call it."""
        # the largest number of each tensor: this norm allocates nothing and propagates NaN
        largest = [
            torch.linalg.vector_norm(part, math.inf)
            for part in (local_part(value) for name, value in tensors.items() if name.startswith("model."))
            if part.numel()
        ]
        broken = torch.tensor(int(bool(largest) and not torch.stack(largest).isfinite().all()))
        dist.all_reduce(broken, op=dist.ReduceOp.MAX)  # a shard belongs to one rank: share the result
        if broken:
            raise Diverged(self, "a weight is NaN or Inf")

    def write_metrics(self):
        """Write the metrics.json of a finished run; print a sentence if that fails."""
        options = to_dict(self.options) | {"config": None}
        for group in ("data", "checkpoint"):  # so that runs in different folders can be compared
            options[group] = options[group] | {"folder": None}
        metrics = Metrics(self.ranks, self.corpus, {"options": options})
        losses = {str(step): loss for step, loss in self.val_losses.items()}
        metrics.exact(val_losses=losses)
        metrics.close(val_losses=losses)
        metrics.measured(**self.report.measured())
        try:
            metrics.write()
        except OSError as error:
            # the training is complete and saved, so this is not a failure
            self.report.note(f"metrics.json could not be written ({reason(error)}); the training itself is complete")

    def close(self):
        """Close the report of a run that was refused."""
        self.report.close("refused")
        self.checkpoints.close()


def train(options):
    """Run `options` on all ranks that were started and return this process's exit status. All ranks must call it.

    Invalid options are refused (status 2) before the first collective of the training.
    """
    train = options.train
    ranks = join(name="train", device=train.device, timeout_s=train.timeout_s, options=of_all_ranks(options))
    with PreemptionHandler(ranks) as preemption:
        try:
            corpus = corpus_of(options, ranks)
            config = model_config(options, len(corpus.vocab), corpus.separator)
            layout = resolve_layout(options, config, ranks.world_size, ranks.local_world_size)
            refuse_text(options, config, corpus)
            source, start = None, full_model
            if options.source is not None:  # a run that goes on from a checkpoint does not read the folder
                agreement, kept = Agreement(ranks, None, Refused), options.checkpoint.folder
                if not agreement.on_rank_0(lambda: kept is not None and bool(steps_in(kept))):
                    source = agreement.all(lambda: model_folder(options, config, corpus))
                start = without_numbers
            shares = layout.shard if starts_in_shares(config, layout, options) else 1
            refuse_size(config, ranks, shares if start is full_model else ranks.world_size // layout.replicate)
            refuse_missing(options, ranks)
            options, sentence = decided(options, config, layout, ranks)
            layout = resolve_layout(options, config, ranks.world_size, ranks.local_world_size)
            run = Run(options, config, layout, corpus, ranks, preemption, start, source)
        except Refused as error:
            refuse(str(error))
        if sentence:
            run.report.note(sentence)
        return carry_out(run, "train.py")


def carry_out(run, prog, look=lambda run: None):
    """Resume a run, train to its end, return the status. `look(run)` may raise CheckpointError. All ranks call it."""
    try:
        look(run)
        resume(run)
        status = run.go()
    except CheckpointError as error:  # raised on all ranks: a foreign or damaged checkpoint, or a full disk
        run.close()
        refuse(str(error))
    except Diverged as error:  # also on all ranks, because the checked values are global
        run.close()
        end(f"{prog}: {error}", DIVERGED)
    leave()
    if status and run.ranks.rank == 0:
        say_status(status)
    return status
