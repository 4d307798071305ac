"""A training run, whatever the strategy: `scripts/train.py` calls `train(options)`.

The loop is in full view at the end of `Run`. What differs between strategies is in `parallelize`, what people see in
`report`, what survives in `checkpoint`. Step k means: after k optimizer steps. Batch k is drawn from (seed, k) alone, so the
position in the data is the step.
"""

import dataclasses
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from manyhands.checkpoints.checkpoints import Checkpoints
from manyhands.checkpoints.manifest import CheckpointError, read_facts
from manyhands.config.layout import resolve_layout
from manyhands.config.options import OptionError, model_config, to_dict
from manyhands.data.corpus import get_batch, load_corpus
from manyhands.gpt.sampling import generate
from manyhands.launching.join import end, join, leave, refuse
from manyhands.parallel.optimizer import (
    LossScale,
    build_optimizer,
    learning_rate,
    optimizer_state,
    set_learning_rate,
)
from manyhands.parallel.parallelize import parallelize
from manyhands.runs.exit_status import DIVERGED, INTERRUPTED, say_status
from manyhands.runs.metrics import Metrics
from manyhands.runs.run_folder import run_folder
from manyhands.trainer.profiling import Profile
from manyhands.trainer.random_state import random_state, seed_dropout, set_random_state
from manyhands.trainer.refusals import refuse_text
from manyhands.trainer.report import Report
from manyhands.trainer.stalls import StallWatch
from manyhands.trainer.stopping import BY_HAND, Stopping, clear_requeue, write_requeue

SLOW_S = 1800.0  # a checkpoint on a slow disk or a compilation that takes longer counts as a stall
WAITS = ("timeout_s", "stall_s", "device")  # options of the place where a run is, not of what it learns
VALIDATION_SEED = 1  # the same validation batches at each evaluation of each run


class Diverged(RuntimeError):
    """The loss, the gradients or the weights are no numbers any more."""


def train(options):
    """Run `options` on all ranks that were started. Returns this process's exit status. All ranks must call it.

    Refuses what cannot be (status 2) before the first collective of the training.
    """
    ranks = join(name="train", device=options.train.device, timeout_s=options.train.timeout_s)
    corpus = load_corpus(ranks)
    try:
        config = model_config(options, len(corpus.symbols))
        layout = resolve_layout(options, config, ranks.world_size, ranks.local_world_size)
        refuse_text(options, config, corpus)
        run = Run(options, config, layout, corpus, ranks)
    except (OptionError, CheckpointError) as error:
        refuse(str(error))
    try:
        run.resume()
        status = run.go()
    except CheckpointError as error:  # on all ranks: a foreign or broken one, or a full disk
        run.close()
        refuse(str(error))
    except Diverged as error:  # on all ranks too: what it looks at is global
        run.close()
        end(f"train.py: {error}", DIVERGED, sys.stderr)
    leave()
    if status and ranks.rank == 0:
        say_status(status)
    return status


class Run:
    """Model, optimizer, checkpoints and report of one run."""

    def __init__(self, options, config, layout, corpus, ranks):
        self.options, self.config, self.layout = options, config, layout
        self.corpus, self.ranks = corpus, ranks
        self.folder = _agreed_folder(ranks)
        self.train_ids = corpus.train_ids.to(ranks.device)
        self.val_ids = corpus.val_ids.to(ranks.device)
        self.parallel = parallelize(config, layout, options, ranks)
        self.optimizer = build_optimizer(self.parallel, options)
        self.scale = LossScale() if options.train.precision == "fp16" else None
        self.step, self.val_losses = 0, {}
        seed_dropout(options.train.seed, layout, ranks)
        wanted = options.checkpoint
        self.checkpoint_folder = Path(wanted.folder) if wanted.folder else self.folder / "checkpoints"
        self.checkpoints = Checkpoints(
            self.checkpoint_folder, ranks, keep=wanted.keep, asynchronous=wanted.asynchronous
        )
        self.saved = None  # the last step that was saved
        self.report = Report(ranks, options, layout, config, corpus, self.folder)
        self.report.mean_loss = self.parallel.mean_loss

    # --- where a run begins and what it leaves

    def tensors(self):
        """All that training changes, under names that no strategy changes."""
        if hasattr(self.parallel, "checkpoint_tensors"):
            return self.parallel.checkpoint_tensors()
        model = {f"model.{name}": p.detach() for name, p in self.parallel.named_parameters().items()}
        state = optimizer_state(self.parallel, self.optimizer)
        return model | {f"optimizer.{name}": value for name, value in state.items()}

    def take(self, tensors):
        """After a load: most strategies' tensors are the training's own, DeepSpeed's are copies."""
        if hasattr(self.parallel, "take_checkpoint"):
            self.parallel.take_checkpoint(tensors)

    def resume(self):
        """Go on from the newest checkpoint of the folder, if there is one and it is wanted. Raises CheckpointError."""
        self.checkpoints.claim()  # it can be written, and no other run writes there
        wanted, newest = self.options.checkpoint.resume, self.checkpoints.newest()
        if newest is None:
            if not self.checkpoints.empty():
                raise CheckpointError(
                    f"{self.checkpoint_folder} holds checkpoints and none of them can be trusted; mend it, or name another"
                )
            if wanted == "must":
                raise CheckpointError(f"{self.checkpoint_folder} holds no complete checkpoint to resume from")
            return
        if wanted == "never":
            raise CheckpointError(
                f"{self.checkpoint_folder} holds {newest.name} already; name another folder, or resume from it "
                "(--checkpoint.resume auto)"
            )
        self.refuse_foreign(newest)
        rank_state = random_state(self.ranks.device)
        tensors = self.tensors()
        facts = self.checkpoints.load(newest, tensors, rank_state, str(self.layout))
        self.take(tensors)
        if facts["rank_state_restored"]:
            set_random_state(rank_state, self.ranks.device)
        else:  # saved under another layout: draw on, but not what the first steps drew
            seed_dropout(self.options.train.seed, self.layout, self.ranks, facts["step"])
        if self.scale and facts.get("loss_scale"):
            self.scale.restore(facts["loss_scale"])
        self.step = self.saved = facts["step"]
        if facts.get("tokens") is not None:
            self.report.resumed = (self.step, facts["tokens"])
        several = "s" * (facts["world_size"] != 1)
        self.report.note(
            f"resumed from {newest}, saved by {facts['world_size']} rank{several} ({facts['layout']})"
        )
        if changed := _changed(facts.get("options", {}), to_dict(self.options)):
            self.report.note(f"it goes on with other options: {', '.join(changed)}")
        if self.step > self.options.train.steps:
            self.report.note(
                f"step {self.step} is already past train.steps={self.options.train.steps}: nothing is left to train"
            )

    def refuse_foreign(self, path):
        """Another model or another text is another run. Raises CheckpointError with what differs."""
        facts = read_facts(path)
        own = dataclasses.asdict(self.config)
        differing = [f"{k}={facts['config'].get(k)}" for k in own if facts["config"].get(k) != own[k]]
        if differing:
            here = ", ".join(f"{d.split('=')[0]}={own[d.split('=')[0]]}" for d in differing)
            raise CheckpointError(f"{path} holds another model ({', '.join(differing)}; here {here})")
        if facts["corpus"]["sha256"] != self.corpus.sha256:
            raise CheckpointError(
                f"{path} was trained on another text ({facts['corpus']['name']}); use that one"
            )

    def save(self):
        if self.saved == self.step:
            return
        tensors = self.tensors()
        self.refuse_broken_weights(tensors)
        facts = {
            "step": self.step,
            "options": to_dict(self.options),
            "config": dataclasses.asdict(self.config),
            "corpus": self.corpus.facts() | {"alphabet": self.corpus.symbols},
            "layout": str(self.layout),
            "world_size": self.ranks.world_size,
            "val_loss": self.val_losses.get(self.step),
            "tokens": self.report.tokens(self.step),
            "loss_scale": self.scale and self.scale.state(),
        }
        self.checkpoints.save(
            self.step, tensors, facts, random_state(self.ranks.device), val_loss=facts["val_loss"]
        )
        self.saved = self.step

    # --- the parts of a step

    def batch(self, ids, step, seed):
        """This rank's share of global batch `step`: [b, T] twice. Ranks of one tensor or pipeline group get the same."""
        return get_batch(
            ids, step, self.options.train.global_batch, self.config.block_size,
            self.parallel.data_rank, self.parallel.data_size, seed,
        )  # fmt: skip

    def evaluate(self):
        """Validation loss, all ranks each on its share; and a sample. Raises Diverged on all ranks."""
        log, losses = self.options.log, []
        for i in range(log.eval_batches):
            self.parallel.moved()
            losses.append(self.parallel.evaluate(*self.batch(self.val_ids, i, VALIDATION_SEED)))
        loss = self.parallel.mean_loss(torch.stack(losses).mean()).item()
        if not math.isfinite(loss):
            raise self.diverged(f"the validation loss is {loss}")
        self.val_losses[self.step] = loss
        self.report.evaluation(self.step, self.val_losses[self.step])
        if log.sample:
            prompt = self.corpus.encode(log.prompt).to(self.ranks.device)[None]
            drawn = torch.Generator().manual_seed(self.options.train.seed)
            ids = generate(self.parallel, prompt, log.sample, 1.0, drawn)
            # a vocabulary may be wider than the corpus's alphabet
            known = [i for i in ids[0].tolist() if i < len(self.corpus.symbols)]
            self.report.sample(self.step, self.corpus.decode(known))

    def train_step(self):
        """One optimizer step. Returns the global gradient norm, a tensor."""
        timer = self.report.timer
        timer.step_start()
        ids, targets = self.batch(self.train_ids, self.step, self.options.train.seed)
        lr = learning_rate(self.step, self.options)
        set_learning_rate(self.optimizer, lr)
        timer.batch_ready()
        if self.scale:
            self.parallel.loss_scale = self.scale.scale
        loss = self.parallel.forward_backward(ids, targets, timer)
        norm = self.parallel.clip(self.options.optimizer.clip)
        if self.scale is None or self.scale.take(norm.item()):
            self.optimizer.step()
        self.optimizer.zero_grad()
        timer.step_done()
        self.step += 1
        self.report.step(self.step, loss, norm, lr)
        return norm

    def go(self):
        """Train to the end, or until a signal says so. Returns the exit status."""
        options, report = self.options, self.report
        clear_requeue(self.checkpoint_folder, self.ranks)
        report.start(self.config.num_params())
        try:
            with (
                Stopping(self.ranks) as stopping,
                StallWatch(self.ranks, options.train.stall_s) as watch,
                Profile(
                    self.ranks, options, self.folder, report.note, options.train.steps - self.step
                ) as profile,
            ):
                stop = self.loop(stopping, watch, profile)
        except BaseException as error:
            report.close(f"ended at step {self.step} by {type(error).__name__}")
            raise
        if stop and stop != BY_HAND:
            write_requeue(self.checkpoint_folder, stop, self.step, self.ranks)
        saved = self.saved == self.step
        report.close(
            "done" if not stop
            else f"stopped by {stop} and saved at step {self.step}" if saved
            else f"stopped by {stop} at step {self.step}, and not saved: name a --checkpoint.folder to go on from"
        )  # fmt: skip
        self.write_metrics()
        self.checkpoints.close()
        return 0 if saved else INTERRUPTED

    def loop(self, stopping, watch, profile):
        """All steps that are left. Returns the signal that ended them early, or None."""
        every, stop = self.options.log, None
        self.parallel.moved = watch.moved
        if self.step == 0 and every.eval_every:
            watch.at(0, "evaluation")
            self.evaluate()
        first = self.step
        while self.step < self.options.train.steps and stop is None:
            compiles = self.step == first and self.options.train.compile
            watch.at(self.step, "training", SLOW_S if compiles else None)
            norm = self.train_step()
            profile.step()
            if any(map(self.due, (every.every, every.eval_every, self.options.checkpoint.every))):
                self.refuse_nan(norm)
            if self.due(every.eval_every):
                watch.at(self.step, "evaluation")
                self.evaluate()
            if self.due(self.options.checkpoint.every):
                watch.at(self.step, "checkpoint", SLOW_S)
                self.save()
            stop = stopping.agreed(self.step)
        if self.step > first:
            self.refuse_nan(norm)
        watch.at(self.step, "evaluation")
        if stop is None and self.step not in self.val_losses:
            self.evaluate()
        watch.at(self.step, "checkpoint", SLOW_S)
        if stop != BY_HAND or self.options.checkpoint.folder:  # who wants to go on has named a folder
            self.save()
        self.checkpoints.wait()
        return stop

    def due(self, every):
        """Whether what happens each `every` steps (0: never) happens now; the end has its own turn."""
        return every and self.step % every == 0 and self.step < self.options.train.steps

    def refuse_nan(self, norm):
        """Raises Diverged on all ranks, before such weights are saved."""
        if self.scale is None and not math.isfinite(norm.item()):
            raise self.diverged(f"the gradient norm is {norm.item()}")

    def refuse_broken_weights(self, tensors):
        """What the last step made of finite gradients. Raises Diverged on all ranks, which all call it."""
        # the largest number of each: the norm needs no room of its own, and hands a NaN on
        largest = [
            torch.linalg.vector_norm(_local(value), math.inf)
            for name, value in tensors.items()
            if name.startswith("model.") and _local(value).numel()
        ]
        broken = torch.tensor(int(bool(largest) and not torch.stack(largest).isfinite().all()))
        dist.all_reduce(broken, op=dist.ReduceOp.MAX)
        if broken:
            raise self.diverged("a weight is no finite number")

    def diverged(self, what):
        return Diverged(
            f"{what} at step {self.step}: lower optimizer.lr={self.options.optimizer.lr:g}, or go on from the last"
            " checkpoint with another seed"
        )

    def write_metrics(self):
        metrics = Metrics(self.ranks, self.corpus, {"options": _without_places(to_dict(self.options))})
        losses = {str(step): loss for step, loss in self.val_losses.items()}
        metrics.exact(val_losses=losses)
        metrics.close(val_losses=losses)
        metrics.write()

    def close(self):
        """Before a run that was refused ends."""
        self.report.close("refused")
        self.checkpoints.close()


def _agreed_folder(ranks):
    """Rank 0's run folder, on all ranks. Raises OptionError on all where it cannot be made."""
    found = [None, None]
    if ranks.rank == 0:
        try:
            found[0] = str(run_folder(ranks))
        except (OSError, ValueError) as error:
            found[1] = str(error)
    dist.broadcast_object_list(found, src=0)
    if found[1]:
        raise OptionError(found[1])
    return Path(found[0])


def _local(tensor):
    """This rank's share of a DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _changed(before, now):
    """What of the training differs between two runs' options, as phrases; an option that one lacks counts for nothing."""
    return [
        f"{group}.{name}={value} (was {before[group][name]})"
        for group in ("train", "optimizer", "parallel")
        for name, value in now[group].items()
        if name not in WAITS and before.get(group, {}).get(name, value) != value
    ]


def _without_places(options):
    """Options without the names of folders: two runs of one configuration are compared."""
    return {**options, "config": None, "checkpoint": {**options["checkpoint"], "folder": None}}
