"""What SFT, DPO and GRPO share as parts of a run: the models, a step's share of a rank, and accuracy on held-out words.

    class MyStage(Stage):
        def next_batch(self, step): ...            # all that this rank needs of step `step`
        def gradients(self, batch, timer): ...     # this rank's loss; the numbers of the step go into self.numbers

    start = start_from(base, LoraOptions(rank=4))                    # the model that learns
    policy = parallelize(config, layout, options, ranks, start)      # by any strategy with whole logits
    frozen = reference(base, config, options, ranks)                 # what it is measured against, sharded over all
    ranks

All draws come from (seed, step) for the whole global batch, and a data rank keeps its rows: nothing is sent for it, and
any number of ranks learns from the same. Shapes: B rows of all ranks, b of this data rank, T tokens.
"""

from dataclasses import replace

import numpy as np
import torch

from manyhands.align.chat_template import END, answered, encode
from manyhands.align.rollouts import complete, rows, texts
from manyhands.config.layout import resolve_layout
from manyhands.config.options import OptionError, ParallelOptions
from manyhands.gpt.lora import add_lora
from manyhands.gpt.model import GPT
from manyhands.parallel.strategy import parallelize

HELD_OUT_SEED = 7  # the same held-out words in every run


class Stage:
    """`run` has options, wanted (AlignOptions), parallel, corpus (a ChatCorpus), ranks. All ranks call every method."""

    def __init__(self, run):
        self.run, self.wanted, self.task = run, run.wanted, run.wanted.letter_task
        self.parallel, self.vocab = run.parallel, run.corpus.vocab
        self.end = self.vocab.index(END)
        self.numbers = {}  # {name: what this rank adds to the mean over data ranks}, of the last step
        self.words = self.task.draw(self.wanted.data.held_out, [HELD_OUT_SEED], held_out=True)
        if len(self.words) < self.parallel.data_size:
            raise OptionError(
                f"data.held_out={len(self.words)} words leave a rank of {self.parallel.data_size} without any; use more"
            )
        # the answer, its end marker, and one more for answers that are too long
        self.most = self.task.length + 2
        longest = len(self._encoded_question(self.words[0])) + self.most
        if longest > run.config.block_size:
            raise OptionError(
                f"data.length={self.task.length}: a question and its answer take {longest} tokens, and the model reads"
                f" {run.config.block_size}; use shorter words"
            )

    # --- what a step is made of

    def next_batch(self, step):
        raise NotImplementedError

    def gradients(self, batch, timer):
        raise NotImplementedError

    def draws(self, step, size, n, stream=0):
        """`n` numbers below `size`, the same on all ranks: rows of a step's global batch. Each `stream` differs."""
        key = np.random.SeedSequence(self.run.options.train.seed, spawn_key=(step, stream))
        return torch.from_numpy(np.random.default_rng(key).integers(0, size, n))

    def own(self, rows_B):
        """This data rank's rows of what all ranks hold alike."""
        return rows_B.tensor_split(self.parallel.data_size)[self.parallel.data_rank].to(self.run.ranks.device)

    def share(self, num_terms):
        """The factor of a micro-batch's sum with which the mean over micro-batches and ranks is sum / num_terms."""
        return self.run.layout.micro_batches * self.parallel.data_size / num_terms

    def mean(self, numbers):
        """{name: mean over the data ranks}. One all-reduce."""
        values = torch.tensor([float(value) for value in numbers.values()], dtype=torch.float64)
        return dict(zip(numbers, self.parallel.mean_loss(values).tolist(), strict=True))

    # --- on held-out words

    def held_out_loss(self):
        """What says which checkpoint is the best: less is better."""
        raise NotImplementedError

    def accuracy(self):
        """(share of held-out words that are answered right by the likeliest tokens, [(word, answer)] of this rank)."""
        words = np.array_split(self.words, self.parallel.data_size)[self.parallel.data_rank].tolist()
        answers = self.answers(self.parallel, words)
        right = sum(self.task.right(word, answer) for word, answer in zip(words, answers, strict=True))
        share = self.mean({"right": right * self.parallel.data_size})["right"] / len(self.words)
        return share, list(zip(words, answers, strict=True))

    def answers(self, model, words, uniform_bn=None):
        """The texts with which `model`, a Strategy, answers each word."""
        ids_bT, _, lengths_b = self.completions(model, words, uniform_bn)
        return texts(ids_bT, lengths_b, self.vocab, answered)

    def completions(self, model, words, uniform_bn=None, temperature=1.0):
        """(ids_bT, answer_bT, lengths_b) of one answer to each word."""
        device, prompts = self.run.ranks.device, [self._encoded_question(word) for word in words]
        prompts_bP, _ = rows([(ids, [False] * len(ids)) for ids in prompts])
        lengths_b = torch.tensor([len(ids) for ids in prompts], device=device)
        rest = self.most, self.end, uniform_bn, temperature, len(self.vocab)
        with model.gathered():  # what FSDP gathers for one token stays for the next
            ids_bT, answer_bT = complete(model.logits, prompts_bP.to(device), lengths_b, *rest)
        return ids_bT, answer_bT, lengths_b

    def _encoded_question(self, word):
        return encode(self.task.messages(word), self.vocab, reply=True)[0]

    def encoded_words(self, words):
        """[(ids, answer)] of questions and right answers. Raises OptionError for letters unknown to the model."""
        try:
            return [encode(self.task.messages(word, self.task.answer(word)), self.vocab) for word in words]
        except ValueError as error:
            raise OptionError(f"data.task={self.task.name}: {error}") from None


def start_from(base, lora=None):
    """`start(config, options)` for `parallelize`: `base`'s weights, room for config.vocab_size tokens, and adapters."""

    def start(config, options):
        model = widened(base, config, options.train.seed)
        if lora and lora.rank:
            add_lora(model, lora.rank, lora.alpha, options.train.seed)
            if base.config.vocab_size < config.vocab_size:  # the markers' rows are as drawn: they must learn
                for part in (model.tokens, model.head):
                    part.requires_grad_(True)
        return model.to(torch.float64 if options.train.precision == "fp64" else torch.float32)

    return start


@torch.no_grad()
def widened(base, config, seed):
    """A GPT of `config` that is `base` on its tokens. What it has not (rows of new tokens) is drawn from `seed`."""
    torch.manual_seed(seed)
    model = GPT(config)
    old, new = base.state_dict(), model.state_dict()
    for name, tensor in new.items():
        tensor[: len(old[name])] = old[name]  # the vocabulary is axis 0 of embedding, head and its bias
    return model


def reference(base, config, options, ranks):
    """The start, frozen: a share of each weight on every rank, gathered block by block when it reads. All ranks call
    it.

    It has no gradients and no optimizer: 4 P / n bytes per rank for P parameters on n ranks. Its `logits` are called by
    all ranks equally often, each with rows of its own.
    """
    start = start_from(base)

    def frozen(config, options):
        return start(config, options).requires_grad_(False)

    train = replace(options.train, global_batch=ranks.world_size, micro_batch=None, compile=False)
    options = replace(options, train=train, parallel=ParallelOptions(strategy="fsdp"))
    return parallelize(config, resolve_layout(options, config, ranks.world_size), options, ranks, frozen)
