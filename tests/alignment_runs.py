"""A small alignment run on the ranks of a test: its base, its text, its options, and what each rank saw."""

import os
from dataclasses import replace

import torch
from manyhands.align.chat import END, with_markers
from manyhands.align.stage import widened
from manyhands.data.corpus import Corpus
from manyhands.data.tokenizer import CharTokenizer
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT
from manyhands.train.preemption import PreemptionHandler

SPEECH = "ROMEO:\nSpeak, you are the fair lock.\n\nBIG JULIET:\nI am, jovial.\n\n"
TEXT = SPEECH * 30
ALPHABET = sorted({*TEXT, *"You are. Speak. sort reverse abcdefghijkl"})
VOCAB = with_markers(ALPHABET)
BASE = GPTConfig(vocab_size=len(ALPHABET), block_size=72, n_layer=2, n_head=2, n_embd=8)
OF_LLAMA = replace(BASE, style="llama", n_kv_head=1, n_hidden=20)
PLAIN_SGD = {"optimizer": {"name": "sgd", "lr": 0.05, "warmup": 0, "clip": 0.0}}
SMALL = {
    "data": {"held_out": 12, "demos": 20, "letters": 8, "length": 3},
    "dpo": {"questions": 40},
    "grpo": {"group": 4, "kl": 0.1, "reward": "in_order"},
    "train": {"steps": 3, "global_batch": 8, "precision": "fp64"},
    "log": {"every": 1, "eval_every": 0, "sample": 0, "plots": False},
}


def base(config=BASE):
    """A GPT that knows nothing of the template, far enough from uniform for what it says to differ."""
    torch.manual_seed(3)
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model.double()


@torch.no_grad()
def chatty(config=BASE):
    """`base` with the markers' rows, which answers with a few of the task's letters and an end: some have a reward."""
    model = widened(base(config), replace(config, vocab_size=len(VOCAB)), 0).double()
    bias = model.head.bias
    if bias is None:  # a number that is large at every position, so about 3 x 8^0.5 behind the last norm
        model.tokens.weight[:, 0] = 9.0
        bias = model.head.weight[:, 0].zero_()
    for token in "abcdefgh":
        bias[VOCAB.index(token)] = 3.0 if config.style == "gpt" else 0.4
    bias[VOCAB.index(END)] = 4.0 if config.style == "gpt" else 0.5
    return model


def wanted_of(method, *changes):
    """The AlignOptions of a small run, with groups of options changed: {"train": {"steps": 5}}."""
    from manyhands.align.options import default_options, refuse_senseless

    wanted = default_options(method)
    for change in (SMALL, PLAIN_SGD, *changes):
        groups = {name: replace(getattr(wanted, name), **values) for name, values in change.items()}
        wanted = replace(wanted, **groups)
    refuse_senseless(wanted)
    return wanted


def begin(ranks, wanted, outputs, config=BASE):
    """The Alignment of these options, before it resumes. All ranks."""
    from manyhands.align.options import trainer_options
    from manyhands.align.run import Alignment
    from manyhands.config.layout import resolve_layout

    os.environ["MANYHANDS_OUTPUTS"] = str(outputs)
    model = chatty(config)
    corpus, config = replace(Corpus.from_text("test", TEXT), tokenizer=CharTokenizer(VOCAB)), model.config
    layout = resolve_layout(trainer_options(wanted, config), config, ranks.world_size)
    return Alignment(wanted, model, config, layout, corpus, ranks, PreemptionHandler(ranks))


def carry_out(ranks, wanted, outputs, config=BASE):
    """Align on all ranks; what this rank saw."""
    from manyhands.train.start import resume

    run = begin(ranks, wanted, outputs, config)
    resume(run)
    first = run.step
    run.go()
    return {
        "first": first, "numbers": run.numbers, "val_losses": run.val_losses,
        "weights": run.parallel.named_full_parameters(), "checkpoints": str(run.checkpoint_folder),
    }  # fmt: skip


def first_gradients(ranks, wanted, outputs):
    """The global loss and the whole gradients of the first step, before any is taken."""
    run = begin(ranks, wanted, outputs)
    run.stage.mean({"awake": 1.0})
    loss = run.parallel.mean_loss(run.gradients(run.next_batch(), None))
    seen = {"loss": loss, **run.parallel.named_full_gradients()}
    run.checkpoints.close()
    return seen
