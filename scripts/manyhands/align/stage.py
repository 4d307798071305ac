"""Implement SFT, and the parts shared with DPO and GRPO: padded rows, masks, answers drawn from the model, `Stage`.

    ids_NT, answer_NT = padded([chat.encode(messages) for messages in examples])
    inputs_bT, targets_bT, mask_bT = shifted(ids_bT, answer_bT)
    loss = masked_sum(logits_bTV, targets_bT, mask_bT) / num_tokens      # num_tokens: of all ranks

    uniform_bn = own_draws(seed, step, B, n, data_rank, data_size)
    ids_bT, answer_bT = complete(parallel.logits, prompt_ids_bP, lengths_b, n, end, uniform_bn)

    class MyStage(Stage):
        def next_batch(self, step): ...            # the tensors that this rank learns from in step `step`
        def loss(self, model, *tensors): ...       # of a micro-batch of them; the step's numbers go into self.numbers
        def held_out_loss(self): ...               # says which checkpoint is the best: less is better

    start = start_from(base, LoraOptions(rank=4))                    # the model that learns
    policy = parallelize(config, layout, options, ranks, start)      # by any strategy with whole logits
    frozen = reference(base, config, options, ranks)                 # what it is measured against, sharded over all

The mask says of each *target* whether the assistant wrote it. Between ranks the number of such tokens differs, so a
rank divides by the global number, never by its own (transformers#34191). All draws come from (seed, step) for the whole
global batch, and a data rank keeps its rows: nothing is sent for it, any number of ranks learns from the same, and
which rank completes an answer does not change it.
Shapes: N examples, B rows of all ranks, b of this data rank, P tokens of the longest prompt, n drawn at most,
T = P + n, V tokens in the vocabulary.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from manyhands.align.chat import chat_of, conversations, speech_messages, speeches
from manyhands.checkpoint.folders import ModelFolder
from manyhands.config.layout import resolve_layout
from manyhands.config.options import OptionError, ParallelOptions
from manyhands.data.corpus import Corpus
from manyhands.data.shakespeare import DataError
from manyhands.gpt.lora import add_lora
from manyhands.gpt.model import GPT
from manyhands.gpt.sampling import Sampling, Sequence, write_next
from manyhands.launch.program import explained
from manyhands.parallel.fsdp import without_numbers
from manyhands.parallel.strategy import own_precision, parallelize
from manyhands.train.start import fill

HELD_OUT_SEED = 7  # the same held-out words in every run
MOST_SPEECHES = 128  # speeches or conversations on which the held-out loss is measured
SHOWN = 4  # answers in a sample


def rows(encoded: list[tuple], longest: int | None = None, length: int | None = None):
    """[(ids, answer)] of `chat.encode` as (ids_NT, answer_NT): padded behind with id 0, which no mask counts.

    T is `length`, else that of the longest. Attention is causal: what stands behind an example changes nothing in it.
    Raise ValueError for one that is longer than `longest` (none: any).
    """
    T = length or max(len(ids) for ids, _ in encoded)
    if longest is not None and longest < T:
        raise ValueError(f"an example has {T} tokens and the model reads {longest}; use shorter ones")
    ids_NT = torch.tensor([ids + [0] * (T - len(ids)) for ids, _ in encoded])
    return ids_NT, torch.tensor([answer + [False] * (T - len(answer)) for _, answer in encoded])


def shifted(ids_bT, answer_bT):
    """(inputs, targets, mask), each [b, T - 1]: position t predicts token t + 1, counted if it is the assistant's."""
    return ids_bT[:, :-1], ids_bT[:, 1:], answer_bT[:, 1:]


def token_log_probs(logits_bTV, targets_bT):
    """log p(target) [b, T] in float32 at least."""
    if logits_bTV.dtype.itemsize < 4:
        logits_bTV = logits_bTV.float()
    return -F.cross_entropy(logits_bTV.flatten(0, 1), targets_bT.flatten(), reduction="none").view(targets_bT.shape)


def masked_sum(logits_bTV, targets_bT, mask_bT):
    """Return the sum, in nats, of the cross-entropy at the masked positions: a 0-dim tensor."""
    return -(token_log_probs(logits_bTV, targets_bT) * mask_bT).sum()


def own_draws(seed: int, step: int, num_rows: int, n: int, rank: int, size: int) -> torch.Tensor:
    """This rank's rows of [num_rows, n] numbers in [0, 1), float64, drawn from (seed, step)."""
    draw = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(step, 1)))
    return torch.from_numpy(np.array_split(draw.random((num_rows, n)), size)[rank])


@torch.no_grad()
def complete(logits, prompts_bP, lengths_b, n, end, uniform_bn=None, temperature=1.0, vocab_size=None):
    """(ids_bT, answer_bT): the prompts and n tokens behind each, and which the model has written: up to its end marker.

    `logits`: of ids [b, any length], [b, T, V]. Row i's prompt is its first lengths_b[i] ids. `end`: the id of the end
    marker, or a set of them; what would follow it is 0. `uniform_bn`: the draws; none: the likeliest token each time.
    Ids from `vocab_size` on, which stand for nothing, are never drawn. Every rank calls `logits` n times: they gather
    weights.
    """
    ends = {end} if isinstance(end, int) else end
    how = Sampling(temperature if uniform_bn is not None else 0)
    numbers = [[0.0] * n] * len(prompts_bP) if uniform_bn is None else uniform_bn.tolist()
    prompts = [ids[:length] for ids, length in zip(prompts_bP.tolist(), lengths_b.tolist(), strict=True)]
    texts_b = [Sequence(ids, n, how, row, ends) for ids, row in zip(prompts, numbers, strict=True)]
    device, P = prompts_bP.device, max(map(len, prompts))
    for i in range(n):
        # what stands behind a row's last token is not seen by it: attention is causal. A rank without any that goes on
        # calls, too: the others wait for its part of the weights
        going = [text for text in texts_b if text.finish is None]
        ids_gT, _ = rows([(text.ids, []) for text in going or texts_b[:1]], length=P + i)
        logits_gTV = logits(ids_gT.to(device))
        if going:
            last_g = [len(text.ids) - 1 for text in going]
            write_next(going, logits_gTV[range(len(going)), last_g, :vocab_size])
    written = [(text.ids, [False] * text.prompt_length + [True] * len(text.drawn)) for text in texts_b]
    return tuple(part.to(device) for part in rows(written, length=prompts_bP.shape[1] + n))


@dataclass(frozen=True)
class Conversations(Corpus):
    """A Corpus of a file's conversations: pairs (ids, answer) of tensors."""

    learned: tuple = ()
    held_out: tuple = ()

    def epochs(self, sequences, block_size):
        return sequences / len(self.learned)


def corpus_of_conversations(file, tokenizer, longest, tell):
    """The Conversations in a file of JSON lines. The last tenth of those of at most `longest` tokens is held out.

    `tell` is told of longer ones, which are left out. Raise DataError, with the line, for what cannot be encoded.
    """
    chat, kept = chat_of(tokenizer), []
    talks = conversations(file)
    for number, talk in talks:
        with explained(DataError, "mend the line, or take it out", f"{file}, line {number},"):
            ids, answer = chat.encode(talk)
        if len(ids) <= longest:
            kept.append((torch.tensor(ids, dtype=torch.int32), torch.tensor(answer), talk))
    if len(kept) < len(talks):
        tell(f"{len(talks) - len(kept)} of {len(talks)} conversations have more than {longest} tokens and are left out")
    if len(kept) < 2:
        why = f"{file} has {len(kept)} conversations of at most {longest} tokens"
        raise DataError(f"{why}; use two or more: one to learn from, one held out")
    num_learned = len(kept) - max(1, len(kept) // 10)
    parts = tuple(kept[:num_learned]), tuple(kept[num_learned:])
    sha256 = hashlib.sha256(Path(file).expanduser().read_bytes()).hexdigest()
    ids = (torch.cat([ids for ids, _, _ in part]) for part in parts)
    return Conversations(Path(file).stem, sha256, tokenizer, *ids, {"conversations": len(kept)}, None, *parts)


def texts(ids_bT: torch.Tensor, lengths_b: torch.Tensor, vocab: list[str], read: Callable) -> list[str]:
    """Return the answers as texts: `read` (such as `chat.answered`) of the ids behind each prompt."""
    return [read(row[length:], vocab) for row, length in zip(ids_bT.tolist(), lengths_b.tolist(), strict=True)]


class Stage:
    """`run` has options, wanted (AlignOptions), parallel, corpus, ranks. All ranks call every method."""

    def __init__(self, run):
        self.run, self.wanted, self.task = run, run.wanted, run.wanted.letter_task
        self.parallel, self.vocab, self.chat = run.parallel, run.corpus.vocab, chat_of(run.corpus.tokenizer)
        self.numbers = {}  # {name: what this rank adds to the mean over data ranks}, of the last step
        if self.wanted.data.file is not None:
            return
        self.words = self.task.draw(self.wanted.data.held_out, [HELD_OUT_SEED], held_out=True)
        if len(self.words) < self.parallel.data_size:
            why = f"data.held_out={len(self.words)} words leave a rank of {self.parallel.data_size} without any"
            raise OptionError(f"{why}; use more")
        # the answer, its end marker, and one more for answers that are too long
        self.most = max(sum(answer) for _, answer in self.encoded_words(self.words)) + 1
        longest = max(len(self._encoded_question(word)) for word in self.words) + self.most
        if longest > run.config.block_size:
            why = f"data.length={self.task.length}: a question and its answer take {longest} tokens"
            raise OptionError(f"{why}, and the model reads {run.config.block_size}; use shorter words")

    def frozen_start(self):
        """Return the start, frozen: see `reference`. All ranks call it."""
        run = self.run
        frozen = reference(run.base, run.config, run.options, run.ranks)
        if isinstance(run.base, ModelFolder):
            fill(run, run.base, frozen)
        return frozen

    def gradients(self, batch, timer):
        """Forward and backward on this rank's rows. Return the loss: its mean over data ranks is the batch's."""
        return self.parallel.forward_backward_by(self.loss, batch, timer)

    def draws(self, step, size, n, stream=0):
        """`n` numbers below `size`, the same on all ranks: rows of a step's global batch. Each `stream` differs."""
        key = np.random.SeedSequence(self.run.options.train.seed, spawn_key=(step, stream))
        return torch.from_numpy(np.random.default_rng(key).integers(0, size, n))

    def own(self, rows_B):
        """Return this data rank's rows of tensors that are equal on all ranks."""
        return rows_B.tensor_split(self.parallel.data_size)[self.parallel.data_rank].to(self.run.ranks.device)

    def share(self, num_terms):
        """The factor of a micro-batch's sum with which the mean over micro-batches and ranks is sum / num_terms."""
        return self.run.layout.micro_batches * self.parallel.data_size / num_terms

    def mean(self, numbers):
        """{name: mean over the data ranks}. One all-reduce."""
        values = torch.tensor([float(value) for value in numbers.values()], dtype=torch.float64)
        return dict(zip(numbers, self.parallel.mean_loss(values).tolist(), strict=True))

    def accuracy(self):
        """(share of held-out words answered right by the likeliest tokens, [(question, answer)] of this rank)."""
        words = np.array_split(self.words, self.parallel.data_size)[self.parallel.data_rank].tolist()
        answers = self.answers(self.parallel, words)
        right = sum(self.task.right(word, answer) for word, answer in zip(words, answers, strict=True))
        share = self.mean({"right": right * self.parallel.data_size})["right"] / len(self.words)
        return share, list(zip(map(self.task.question, words), answers, strict=True))

    def answers(self, model, words, uniform_bn=None):
        """Return the answers of `model`, a Strategy, to each word."""
        ids_bT, _, lengths_b = self.completions(model, words, uniform_bn)
        return self.read(ids_bT, lengths_b)

    def read(self, ids_bT, lengths_b):
        """Return the answers behind prompts as texts."""
        return texts(ids_bT, lengths_b, self.vocab, lambda ids, _: self.chat.answered(ids))

    def completions(self, model, words, uniform_bn=None, temperature=1.0):
        """(ids_bT, answer_bT, lengths_b) of one answer to each word."""
        return self.completed(model, list(map(self._encoded_question, words)), self.most, uniform_bn, temperature)

    def completed(self, model, prompts, most, uniform_bn=None, temperature=1.0):
        """(ids_bT, answer_bT, lengths_b) of answers of at most `most` tokens to lists of ids."""
        device = self.run.ranks.device
        prompts_bP, _ = rows([(ids, [False] * len(ids)) for ids in prompts])
        lengths_b = torch.tensor([len(ids) for ids in prompts], device=device)
        rest = most, self.chat.ends, uniform_bn, temperature, len(self.vocab)
        with model.gathered():  # what FSDP gathers for one token stays for the next
            ids_bT, answer_bT = complete(model.logits, prompts_bP.to(device), lengths_b, *rest)
        return ids_bT, answer_bT, lengths_b

    def _encoded_question(self, word):
        return self.chat.encode(self.task.messages(word), reply=True)[0]

    def encoded_words(self, words):
        """[(ids, answer)] of questions and right answers. Raise OptionError for letters unknown to the model."""
        try:
            return [self.chat.encode(self.task.messages(word, self.task.answer(word))) for word in words]
        except ValueError as error:
            raise OptionError(f"data.task={self.task.name}: {error}") from None


class Imitation(Stage):
    """Imitate demonstrations."""

    def __init__(self, run):
        super().__init__(run)
        data, self.num_speeches = self.wanted.data, 0
        if data.file is not None:
            self.examples, held_out = run.corpus.learned, run.corpus.held_out[:MOST_SPEECHES]
            self.num_words = len(self.examples)
        else:
            demos = self.task.draw(data.demos, [run.options.train.seed, 1], held_out=False)
            learned, held_out = encoded_speeches(run.corpus, self.chat, run.config.block_size + 1)
            self.num_speeches = round(data.speeches * run.options.train.global_batch)
            if self.num_speeches and not (learned and held_out):
                why = f"data.speeches={data.speeches:g}, but the corpus has no speeches that this model can read; use 0"
                raise OptionError(why)
            self.num_words, self.examples = data.demos, self.encoded_words(demos) + learned
            held_out = self.encoded_words(self.words) + held_out[:MOST_SPEECHES] * bool(self.num_speeches)
        # rows without an answer fill up the last rank's share: all ranks read equally often
        lacking = -len(held_out) % self.parallel.data_size
        self.held_out = [F.pad(part_NT, (0, 0, 0, lacking)) for part_NT in padded(held_out)]

    def accuracy(self):
        """Return the same as other stages; for a file (None, [(last message of the user, answer)]) of a few."""
        if self.wanted.data.file is None:
            return super().accuracy()
        room, shown, prompts = self.run.config.block_size, self.run.options.log.sample, {}
        for _, _, talk in self.run.corpus.held_out[:SHOWN]:
            ids, _ = self.chat.encode(talk[:-1], reply=True)
            if len(ids) < room:
                prompts[talk[-2]["content"]] = ids
        if not (prompts and shown):
            return None, []
        most = min(shown, room - max(map(len, prompts.values())))
        ids_bT, _, lengths_b = self.completed(self.parallel, list(prompts.values()), most)
        return None, list(zip(prompts, self.read(ids_bT, lengths_b), strict=True))

    def next_batch(self, step):
        """[inputs_bT, targets_bT, mask_bT]."""
        size, speeches = self.run.options.train.global_batch, self.num_speeches
        row_B = self.draws(step, self.num_words, size - speeches)
        if speeches:
            speech_B = self.num_words + self.draws(step, len(self.examples) - self.num_words, speeches, 1)
            row_B = torch.cat((row_B, speech_B))
        ids_BT, answer_BT = padded([self.examples[i] for i in row_B.tolist()])
        self.num_tokens = int(answer_BT[:, 1:].sum())  # all ranks hold the batch's mask: nothing is sent for it
        return shifted(self.own(ids_BT), self.own(answer_BT))

    def loss(self, model, inputs_bT, targets_bT, mask_bT):
        return self.share(self.num_tokens) * masked_sum(model(inputs_bT)[0], targets_bT, mask_bT)

    @torch.no_grad()
    def held_out_loss(self):
        """Return nats per token of the assistant on what is held out."""
        layout, own = self.run.layout, 0.0
        size = self.run.options.train.global_batch // (self.parallel.data_size * layout.micro_batches)
        for part in zip(*(self.own(part_NT).split(size) for part_NT in self.held_out), strict=True):
            inputs_bT, targets_bT, mask_bT = shifted(*part)
            own += masked_sum(self.parallel.logits(inputs_bT), targets_bT, mask_bT)
            self.parallel.moved()
        num_tokens = int(self.held_out[1][:, 1:].sum())
        return self.mean({"loss": own * self.parallel.data_size})["loss"] / num_tokens


def padded(examples):
    """[(ids, answer, ...)], lists or tensors, as (ids_NT, answer_NT): see `rows`."""
    ids, answers = ([torch.as_tensor(one[i]) for one in examples] for i in (0, 1))
    return pad_sequence(ids, batch_first=True).long(), pad_sequence(answers, batch_first=True)


def encoded_speeches(corpus, chat, longest):
    """([(ids, answer)] to learn from, and held out): the corpus's speeches that fit into `longest` tokens.

    Held out are those of the text's last tenth, as in pre-training. Speeches with unknown tokens are left out.
    """
    cut, both = len(corpus.train_ids), []
    for text in (corpus.text[:cut], corpus.text[cut:]):
        talks = [speech_messages(speaker, line) for speaker, line in speeches(text)]
        found = [chat.encode(talk) for talk in talks if all(chat.knows(message["content"]) for message in talk)]
        both.append([(ids, answer) for ids, answer in found if len(ids) <= longest])
    return both


def start_from(base, lora=None, rows=False):
    """`start(config, options)` for `parallelize`: `base`'s weights, room for config.vocab_size tokens, and adapters.

    base: a GPT; else each rank sets what it holds later, from a ModelFolder or (None) from a checkpoint. `rows`: beside
    adapters the vocabulary learns, as it does where `base` lacks a part of it.
    """
    whole = isinstance(base, GPT)
    if not whole and not (lora and lora.rank):
        return without_numbers

    def start(config, options):
        model = widened(base, config, options.train.seed) if whole else without_numbers(config, options)
        if lora and lora.rank:
            add_lora(model, lora.rank, lora.alpha, options.train.seed)
            if rows or (whole and base.config.vocab_size < config.vocab_size):  # the markers' rows are as drawn
                for part in (model.tokens, model.head):
                    part.requires_grad_(True)
        return model.to(own_precision(options))

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
    """The start, frozen: a share of each weight on every rank, gathered block by block when it reads.

    All ranks call it. It has no gradients and no optimizer: 4 P / n bytes per rank for P parameters on n ranks. Its
    `logits` are called by all ranks equally often, each with rows of its own.
    """
    start = start_from(base)

    def frozen(config, options):
        return start(config, options).requires_grad_(False)

    train = replace(options.train, global_batch=ranks.world_size, micro_batch=None, compile=False)
    options = replace(options, train=train, parallel=ParallelOptions(strategy="fsdp"))
    return parallelize(config, resolve_layout(options, config, ranks.world_size), options, ranks, frozen)
