"""The corpus of the course, and batches from it.

    corpus = load_corpus(ranks)                      # all ranks must call it
    x_bT, y_bT = get_batch(corpus.train_ids, step, 12, 64, rank, world_size, seed)

A text of your own, prepared by scripts/prepare_data.py: `own_text` opens it, with the same face as `Corpus`. Data sets of
other kinds: `samplers` says which items a rank reads, `file_shares` brings tokens from files to the ranks, and
`prefetch` reads ahead. Their names are here, too.

The corpus is Shakespeare (from a file, the cache or the web: see `shakespeare`), or where none has it, the
manual that every Python carries, which every run then says.

Shapes: T positions, B sequences in the global batch, b this rank's.
"""

import hashlib
import sys
import weakref
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from manyhands.data import shakespeare
from manyhands.data.shakespeare import DataError
from manyhands.data.text_tokenizer import encode_characters
from manyhands.launch.join import leave
from manyhands.launch.program import say_status
from manyhands.launch.screen import say

_silent_web = weakref.WeakKeyDictionary()  # process group -> why the web did not answer: it is asked once per group


@dataclass(frozen=True)
class Corpus:
    """A text as numbers: id i is the i-th character of its alphabet. 90 % train, the rest validates."""

    name: str  # "shakespeare" or "offline"
    sha256: str
    text: str = field(repr=False)
    vocab: list = field(repr=False)
    train_ids: torch.Tensor = field(repr=False)  # torch.long, on the CPU
    val_ids: torch.Tensor = field(repr=False)
    separator = None  # the token that begins a document: this is one text

    @classmethod
    def from_text(cls, name, text):
        vocab = sorted(set(text))
        ids = torch.from_numpy(encode_characters(text, vocab))
        num_train = len(ids) * 9 // 10
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        return cls(name, sha256, text, vocab, ids[:num_train], ids[num_train:])

    def encode(self, text):
        """The ids of `text`, torch.long [T]. Raises ValueError for a character that the corpus lacks."""
        return torch.from_numpy(encode_characters(text, self.vocab))

    def decode(self, ids):
        """The text of `ids`, a tensor [T] or a list."""
        return "".join(self.vocab[i] for i in (ids.tolist() if isinstance(ids, torch.Tensor) else ids))

    def facts(self):
        """What metrics.json records of it."""
        return {
            "name": self.name,
            "characters": len(self.text),
            "vocab_size": len(self.vocab),
            "sha256": self.sha256,
        }

    def vocabulary(self):
        """What a checkpoint keeps beside `facts`, so that its model can write."""
        return {"alphabet": self.vocab}


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

    Rank 0 finds the text while the others wait, and hands the text, or what went wrong, to all of them: one
    process downloads, nobody waits for a rank that gave up, and no two nodes train on different texts.
    Raises DataError; a script ends with status 2 on all ranks instead, after one sentence.
    """
    first = ranks is None or ranks.rank == 0
    in_script = ranks is not None and ranks.launcher != "notebook"
    found = [_find() if first else None]
    if first:
        _, _, notice, error = found[0]
        if notice:
            say(notice)
        if error and in_script:  # before the others hear of it: a launcher kills all when the first one ends
            print(f"{ranks.lesson}.py: {error}", file=sys.stderr, flush=True)
    if ranks is not None and dist.is_initialized():
        dist.broadcast_object_list(found, src=0)
    name, text, _, error = found[0]
    if error and in_script:
        leave()  # Python's exit under a living gloo group aborts now and then: status 134 instead of 2
        if first:
            say_status(2, f"{ranks.lesson}.py: {error}")
        raise SystemExit(2)
    if error:
        raise DataError(error)
    return Corpus.from_text(name, text)


def _find():
    """(name, text, notice, error) of the first source that has a text."""
    group = dist.group.WORLD if dist.is_initialized() else None
    try:
        content, why_not = (None, _silent_web[group]) if group in _silent_web else shakespeare.find()
    except DataError as error:
        return None, None, None, str(error)
    except Exception as error:  # noqa: BLE001 - the other ranks wait for a word, whatever happened
        return None, None, None, f"the corpus could not be read: {type(error).__name__}: {error}"
    if content is not None:
        return "shakespeare", content.decode(), None, None
    if group is not None:
        _silent_web[group] = why_not
    return "offline", shakespeare.offline_text(), shakespeare.offline_notice(why_not), None
