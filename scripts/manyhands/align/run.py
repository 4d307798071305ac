"""An alignment run, `align(wanted)`: the trainer's loop, checkpoints and report around a stage.

What a step learns from and its loss are the stage's (`sft`, `dpo`, `grpo`); all else is the trainer's.
"""

import dataclasses
import math
import sys
from datetime import datetime

from manyhands.align.chat import chat_of, with_markers
from manyhands.align.dpo import Preference
from manyhands.align.grpo import Reinforcement
from manyhands.align.options import trainer_options
from manyhands.align.stage import Imitation, corpus_of_conversations, start_from
from manyhands.checkpoint.export import load_model, opened, tokenizer_of
from manyhands.checkpoint.folders import ModelFolder
from manyhands.checkpoint.manifest import CheckpointError, read_manifest, steps_in
from manyhands.config.layout import resolve_layout
from manyhands.config.model_folder import LONGEST
from manyhands.config.options import OptionError
from manyhands.data.corpus import load_corpus
from manyhands.data.tokenizer import CharTokenizer
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT
from manyhands.launch.join import join, refuse
from manyhands.launch.metrics import StepLog
from manyhands.launch.program import Refused
from manyhands.launch.ranks import Agreement
from manyhands.predict.memory import bytes_per_rank, with_lora
from manyhands.train import dry_run
from manyhands.train.preemption import PreemptionHandler
from manyhands.train.report import about_run
from manyhands.train.run import Diverged, Run, carry_out
from manyhands.train.start import of_all_ranks, refuse_missing, refuse_size

STAGES = {"sft": Imitation, "dpo": Preference, "grpo": Reinforcement}
SHOWN = 4  # answers in a sample


class Alignment(Run):
    """A `Run` that starts from `base` (see `start_from`) and learns by the method that `wanted` names."""

    def __init__(self, wanted, base, config, layout, corpus, ranks, preemption, metadata=None):
        before, source = metadata or {}, base if isinstance(base, ModelFolder) else None
        start = start_from(base, wanted.lora, base is None and (before.get("lora") or {}).get("rows", False))
        options = trainer_options(wanted, config)
        super().__init__(options, config, layout, corpus, ranks, preemption, start, source)
        self.wanted, self.base, self.origin = wanted, base, before.get("base")
        self.numbers = []  # rank 0's lines of alignment.jsonl
        self.stage = STAGES[wanted.method](self)
        self.log = None

    def metadata(self):
        lora = None
        if self.wanted.lora.rank:
            rows = self.parallel.named_parameters()["tokens.weight"].requires_grad
            lora = dataclasses.asdict(self.wanted.lora) | {"rows": rows}
        return super().metadata() | {"lora": lora, "alignment": self.about()}

    def about(self):
        """Return a checkpoint's metadata on the stage, in addition to the trainer's options."""
        groups = {name: dataclasses.asdict(getattr(self.wanted, name)) for name in ("data", "dpo", "grpo")}
        return {"method": self.wanted.method, "from": str(self.wanted.source), **groups}

    def next_batch(self):
        return self.stage.next_batch(self.step)

    def gradients(self, batch, timer):
        loss = self.stage.gradients(batch, timer)
        if self.stage.numbers:
            self.tell(self.step + 1, **self.stage.mean(self.stage.numbers))
        return loss

    def evaluate(self):
        """Compute held-out loss and accuracy, each rank on its share; otherwise as in the trainer."""
        self.parallel.moved()
        accuracy, said = self.stage.accuracy()
        self.parallel.moved()
        if stop := self.preemption.agreed():
            return stop
        loss = self.stage.held_out_loss()
        if not math.isfinite(loss):
            raise Diverged(self, f"the held-out loss is {loss}")
        self.val_losses[self.step] = loss
        self.report.evaluation(self.step, loss)
        if accuracy is not None:
            self.tell(self.step, accuracy=accuracy)
            chance = self.stage.task.chance
            right = f"{accuracy:.1%} of {len(self.stage.words)} held-out words right (chance: {chance:.1%})"
            self.report.note(f"step {self.step}: {right}")
        if self.options.log.sample:
            self.report.sample(self.step, "\n".join(f"{asked} -> {answer}" for asked, answer in said[:SHOWN]))
        return None

    def tell(self, step, **numbers):
        """Write a line of alignment.jsonl, and of `numbers`, on rank 0."""
        if self.ranks.rank == 0:
            self.numbers.append({"step": step, **numbers})
            self.log = self.log or StepLog(self.ranks, self.folder / "alignment.jsonl")
            self.log.write(step=step, **numbers)


def refuse_other_method(run):
    """Raise CheckpointError on all ranks if the folder has another stage's checkpoints; report other changes."""

    def look():
        now = run.about()
        for path in steps_in(run.checkpoint_folder)[:1]:
            before = read_manifest(path).metadata.get("alignment") or {"method": "pre-training"}
            if before["method"] != now["method"]:
                why = f"{run.checkpoint_folder} holds checkpoints of {before['method']}, not of {now['method']}"
                raise CheckpointError(f"{why}; name another --checkpoint.folder, and this one as --from")
            return [name for name in now if before.get(name, now[name]) != now[name]]

    changed = Agreement(run.ranks, None, CheckpointError).on_rank_0(look)
    if changed:
        run.report.note(f"it goes on with another {' and another '.join(changed)}")


def _begin(wanted, tell):
    """Return (base, metadata), base as in `start_from`.

    A run that goes on without a reference reads what it has kept, and not --from.
    """
    kept = wanted.checkpoint.folder
    if kept is not None and not _has_reference(wanted) and steps_in(kept):
        return None, opened(kept, "newest", tell)[-1]
    if (wanted.source / "config.json").is_file():
        *_, metadata = opened(wanted.source)
        base = GPTConfig(**metadata["config"])
        if learner(wanted, base, metadata)[0].vocab_size == base.vocab_size:
            return ModelFolder(wanted.source, base), metadata
    return load_model(wanted.source, wanted.step, tell)


def _has_reference(wanted):
    return wanted.method == "dpo" or (wanted.method == "grpo" and wanted.grpo.kl)


def learner(wanted, config, metadata):
    """Return (GPTConfig of the model that learns, its tokenizer) from what --from holds. Raise OptionError."""
    tokenizer = tokenizer_of(metadata)
    tokenizer = CharTokenizer(with_markers(tokenizer.vocab)) if tokenizer.kind == "char" else tokenizer
    try:
        chat_of(tokenizer)
    except ValueError as error:
        raise OptionError(f"from={wanted.source}: {error}") from None
    # of a longer model's context no more is trained on, and a GPT's positions are weights
    size = config.block_size if config.style == "gpt" else min(config.block_size, LONGEST)
    vocabulary = max(config.vocab_size, len(tokenizer.vocab))
    if (rank := wanted.lora.rank) > config.n_embd:
        raise OptionError(f"lora.rank={rank} is more than the width {config.n_embd}; use less")
    if rank and config.experts > 1:
        why = f"lora.rank={rank}: adapters do not stand next to {config.experts} experts"
        raise OptionError(f"{why}; use lora.rank=0")
    return dataclasses.replace(config, vocab_size=vocabulary, block_size=size), tokenizer


def describe(wanted, world_size, per_node=None):
    """Return what a run would take on `world_size` ranks, with and without LoRA. Raise Refused."""
    *_, metadata = opened(wanted.source, wanted.step, lambda text: print(text, file=sys.stderr))
    base = GPTConfig(**metadata["config"])
    config, _ = learner(wanted, base, metadata)
    options, per_node = trainer_options(wanted, config), per_node or dry_run.usual_per_node(world_size)
    layout = resolve_layout(options, config, world_size, per_node)
    room, whose = dry_run.room_of(wanted.gpu_gib, min(per_node, world_size))
    whole, rows = bytes_per_rank(config, layout, options), config.vocab_size > base.vocab_size
    held, other = whole, dry_run.with_lora_line(whole, config, layout, options, rows)
    if wanted.lora.rank:
        held = with_lora(whole, config, layout, options, wanted.lora.rank, rows)
        other = [f"without LoRA a rank keeps {dry_run.kept(whole)}"]
    if _has_reference(wanted):
        other.insert(0, f"the reference takes {dry_run.gib(4 * config.num_params() / world_size)} more")
    lines = [
        *(f"{name}: {fact}" for name, fact in about_run(options, config, layout).items()),
        *dry_run.held_lines(held, options, layout, config.dropout > 0),
        dry_run.fits(held.on_gpu, room, whose),
        *other,
    ]
    return "\n".join(lines)


def align(wanted):
    """Run `wanted` on all ranks that were started. Returns this process's exit status. All ranks must call it."""
    if wanted.dry_run:
        return dry_run.dry_run(wanted, "align.py", describe)
    train = wanted.train
    ranks = join(name="align", device=train.device, timeout_s=train.timeout_s, options=of_all_ranks(wanted))
    with PreemptionHandler(ranks) as preemption:
        file = wanted.data.file
        course = load_corpus(ranks) if file is None else None
        tell = print if ranks.rank == 0 else lambda text: None
        try:
            agreement = Agreement(ranks, None, Refused)
            base, metadata = agreement.all(lambda: _begin(wanted, tell))
            config, tokenizer = learner(wanted, GPTConfig(**metadata["config"]), metadata)
            tokenizer.now = agreement.gather(datetime.now())[0]  # noqa: DTZ005 - rank 0's, for all conversations
            corpus = dataclasses.replace(course, tokenizer=tokenizer) if course else None  # its ids are not of these
            if file is not None:
                longest = config.block_size + 1
                corpus = agreement.all(lambda: corpus_of_conversations(file, tokenizer, longest, tell))
            if len(set(agreement.gather(corpus.sha256))) > 1:
                raise OptionError(f"data.file={file} is not the same on all nodes; put it where they all see it")
            options = trainer_options(wanted, config)
            layout = resolve_layout(options, config, ranks.world_size, ranks.local_world_size)
            # a GPT is whole on every rank
            refuse_size(config, ranks, None if isinstance(base, GPT) else ranks.world_size // layout.replicate)
            refuse_missing(options, ranks)
            run = Alignment(wanted, base, config, layout, corpus, ranks, preemption, metadata)
        except Refused as error:
            refuse(str(error))
        return carry_out(run, "align.py", refuse_other_method)
