"""A text as numbers, and batches from it.

    corpus = load_corpus(ranks)                      # all ranks must call it
    x_bT, y_bT = get_batch(corpus.train_ids, step, 12, 64, rank, world_size, seed)

The course's corpus is Shakespeare (from a file, the cache or the web: see `shakespeare`), or where none has it, the
manual that every Python carries, which every run then says. A text of your own, prepared by scripts/prepare_data.py, is
a Corpus, too: `own_text` opens it. Data sets of other kinds: `samplers` says which items a rank reads, `file_shares`
brings tokens from files to the ranks, and `prefetch` reads ahead.

Shapes: T positions, B sequences in the global batch, b this rank's.
"""

import hashlib
import weakref
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from manyhands.data import shakespeare
from manyhands.data.shakespeare import DataError
from manyhands.data.tokenizer import CharTokenizer, Tokenizer
from manyhands.launch.join import refuse
from manyhands.launch.program import say
from manyhands.launch.ranks import Agreement

_silent_web = weakref.WeakKeyDictionary()  # process group -> why the web did not answer: it is asked once per group


@dataclass(frozen=True)
class Corpus:
    """A tokenizer, and the ids of a text: some to train on, the rest validates."""

    name: str  # "shakespeare", "offline", or of a prepared text's folder
    sha256: str  # of the text, or of the tokenizer and the tokens
    tokenizer: Tokenizer = field(repr=False)
    train_ids: torch.Tensor = field(repr=False)  # torch.long, on the CPU; of a prepared text `own_text.ShardedTokens`
    val_ids: torch.Tensor = field(repr=False)
    counts: dict = field(repr=False)  # {"characters": n} and, of a prepared text, "documents" and "tokens"
    text: str | None = field(default=None, repr=False)  # None: it stays on the disk

    @classmethod
    def from_text(cls, name, text):
        """Of one text: id i is the i-th character of its alphabet. 90 % train."""
        tokenizer = CharTokenizer(sorted(set(text)))
        ids = tokenizer.encode(text)
        cut = len(ids) * 9 // 10
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        return cls(name, sha256, tokenizer, ids[:cut], ids[cut:], {"characters": len(text)}, text)

    @property
    def vocab(self):
        """What each id stands for, as text."""
        return self.tokenizer.vocab

    @property
    def separator(self):
        """The id that begins each document; None: this is one text."""
        return self.tokenizer.separator

    def encode(self, text):
        """The ids of `text`, torch.long [T]. Raises ValueError for a character that the vocabulary lacks."""
        return self.tokenizer.encode(text)

    def decode(self, ids):
        """The text of `ids`, a tensor [T] or a list."""
        return self.tokenizer.decode(ids)

    def metadata(self):
        """What metrics.json records of it."""
        of_tokenizer = {"vocab_size": len(self.vocab), "tokenizer": self.tokenizer.kind}
        return {"name": self.name, **self.counts, **of_tokenizer, "sha256": self.sha256}

    def vocabulary(self):
        """What a checkpoint keeps beside `metadata`, so that its model can write."""
        return {"alphabet": self.vocab} if self.separator is None else {"vocabulary": self.tokenizer.content}


def get_batch(ids, step, global_batch, block, rank, world_size, seed):
    """This rank's share of global batch number `step`: inputs and targets, torch.long [b, T].

    Targets are one token further. The same (seed, step) draws the same global batch for any number of ranks:
    rank r takes the r-th of `world_size` equal cuts. Windows start anywhere and may overlap, as in nanoGPT.
    Raises ValueError if the batch does not split, or if the text is too short for one window.
    """
    if global_batch < 1 or global_batch % world_size:
        raise ValueError(
            f"global_batch={global_batch} does not split over {world_size} ranks; use a multiple of {world_size}"
        )
    if len(ids) <= block:
        raise ValueError(f"block={block} needs {block + 1} tokens and the text has {len(ids)}; use a smaller block")
    # not torch.Generator: on a CPU it keeps only 32 bits of its seed, while this mixes both numbers in full
    draw = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(step,)))
    start_B = draw.integers(0, len(ids) - block, size=global_batch)
    start_b = torch.from_numpy(start_B).chunk(world_size)[rank].to(ids.device)
    index_bT = start_b[:, None] + torch.arange(block, device=ids.device)
    # .long(): a memory map has two bytes per token, and only what is picked here becomes eight
    return ids[index_bT].long(), ids[index_bT + 1].long()


def load_corpus(ranks=None):
    """The corpus, the same on all ranks. All ranks must call it.

    Rank 0 finds the text while the others wait, and sends the text, or what went wrong, to all of them: one
    process downloads, nobody waits for a rank that gave up, and no two nodes train on different texts.
    Raises DataError; a script ends with status 2 on all ranks instead, after one sentence.
    """
    try:
        if ranks is not None and dist.is_initialized():
            name, text, notice = Agreement(ranks, None, DataError).on_rank_0(_find)
        else:
            name, text, notice = _find()
    except DataError as error:
        if ranks is None or ranks.launcher == "notebook":
            raise
        refuse(str(error))
    if notice and (ranks is None or ranks.rank == 0):
        say(notice)
    return Corpus.from_text(name, text)


def _find():
    """(name, text, what people should know) of the first source that has a text. Raises DataError."""
    group = dist.group.WORLD if dist.is_initialized() else None
    content, why_not = (None, _silent_web[group]) if group in _silent_web else shakespeare.find()
    if content is not None:
        return "shakespeare", content.decode(), None
    if group is not None:
        _silent_web[group] = why_not
    return "offline", shakespeare.offline_text(), shakespeare.offline_notice(why_not)
