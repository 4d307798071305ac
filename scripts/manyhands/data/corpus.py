"""Load a text as token ids and draw batches from it.

    corpus = load_corpus(ranks)                      # Shakespeare; all ranks must call it
    corpus = open_text("data/mine", ranks)           # a text of your own, by scripts/prepare_data.py; all ranks
    x_bT, y_bT = get_batch(corpus.train_ids, step, 12, 64, rank, world_size, seed)
    verify_text("data/mine")                         # reads every byte and checks it

The course's corpus is Shakespeare (from a file, the cache or the web: see `shakespeare`). Without it, Python's own
manual is used, and every run reports that. A text of your own is a folder:

    data/mine/manifest.json            what is here, with the sha256 of every file
              tokenizer.json           of `tokenizers`, or the characters; see `tokenizer`
              train-00000.bin(.json)   one document after the other, each begun by the separator; see `token_files`
              validation-00000.bin(.json)
              report.json, report.png  what was dropped, and why: see `preparation`

Its tokens stay on disk, and a rank reads those of its windows. A window begins anywhere, so it packs consecutive
documents: the end of one, some complete ones, the beginning of another. Data sets of other kinds: `samplers` says
which items a rank reads, `token_files` brings tokens to the ranks.

Shapes: T positions, B sequences in the global batch, b this rank's.
"""

import functools
import hashlib
import itertools
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from pydantic import Field, model_validator

from manyhands.data import shakespeare
from manyhands.data.schema import Count, Partly, Schema, Sha256, Signed, open_regular, read_regular
from manyhands.data.shakespeare import DataError
from manyhands.data.token_files import Tokens
from manyhands.data.tokenizer import CharTokenizer, Tokenizer, tokenizer_from
from manyhands.launch.join import refuse
from manyhands.launch.program import explained, say
from manyhands.launch.ranks import Agreement

MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"  # of a user's text
SPLITS = ("train", "validation")
OPEN_FILES = 100  # at once; most systems allow 1,024


@dataclass(frozen=True)
class Corpus:
    """A tokenizer, and the ids of a text: some to train on, the rest validates."""

    name: str  # "shakespeare", "offline", or of a prepared text's folder
    sha256: str  # of the text, or of the tokenizer and the tokens
    tokenizer: Tokenizer = field(repr=False)
    train_ids: torch.Tensor = field(repr=False)  # torch.long, on the CPU; of a prepared text `ShardedTokens`
    val_ids: torch.Tensor = field(repr=False)
    counts: dict = field(repr=False)  # {"characters": n} and, of a prepared text, "documents" and "tokens"
    text: str | None = field(default=None, repr=False)  # None: it stays on the disk

    @classmethod
    def from_text(cls, name, text):
        """Make a corpus of one text: id i is the i-th character of its alphabet; 90 % are for training."""
        tokenizer = CharTokenizer(sorted(set(text)))
        ids = tokenizer.encode(text)
        cut = len(ids) * 9 // 10
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        return cls(name, sha256, tokenizer, ids[:cut], ids[cut:], {"characters": len(text)}, text)

    @property
    def vocab(self):
        """Return the text of each id."""
        return self.tokenizer.vocab

    @property
    def separator(self):
        """Return the id that begins each document, or None for a single text."""
        return self.tokenizer.separator

    def encode(self, text):
        """Return the ids of `text`, torch.long [T]. Raise ValueError for a character that the vocabulary lacks."""
        return self.tokenizer.encode(text)

    def decode(self, ids):
        """Return the text of `ids`, a tensor [T] or a list."""
        return self.tokenizer.decode(ids)

    def epochs(self, sequences, block_size):
        """Return how often `sequences` of `block_size` tokens go through the text that is trained on."""
        return sequences * block_size / max(1, len(self.train_ids))

    def metadata(self):
        """Return the description for metrics.json."""
        of_tokenizer = {"vocab_size": len(self.vocab), "tokenizer": self.tokenizer.kind}
        return {"name": self.name, **self.counts, **of_tokenizer, "sha256": self.sha256}

    def vocabulary(self):
        """Return the vocabulary that a checkpoint keeps in addition to `metadata`, so that its model can write text."""
        plain = self.tokenizer.kind == "char" and self.separator is None
        return {"alphabet": self.vocab} if plain else {"vocabulary": self.tokenizer.content}


def get_batch(ids, step, global_batch, block, rank, world_size, seed):
    """Return this rank's share of global batch number `step`: inputs and targets, torch.long [b, T].

    Targets are shifted by one token. The same (seed, step) draws the same global batch for any number of ranks:
    rank r takes the r-th of `world_size` equal cuts. Windows start anywhere and may overlap, as in nanoGPT.
    Raise ValueError if the batch does not split, or if the text is too short for one window.
    """
    if global_batch < 1 or global_batch % world_size:
        why = f"global_batch={global_batch} does not split over {world_size} ranks; use a multiple of {world_size}"
        raise ValueError(why)
    if len(ids) <= block:
        raise ValueError(f"block={block} needs {block + 1} tokens and the text has {len(ids)}; use a smaller block")
    # not torch.Generator: on a CPU it keeps only 32 bits of its seed, while this mixes both numbers in full
    draw = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(step,)))
    start_B = draw.integers(0, len(ids) - block, size=global_batch)
    start_b = torch.from_numpy(start_B).chunk(world_size)[rank].to(ids.device)
    # .long(): a memory map has two bytes per token, and only what is picked here becomes eight
    window_bT = ids[start_b[:, None] + torch.arange(block + 1, device=ids.device)].long()
    return window_bT[:, :-1].contiguous(), window_bT[:, 1:].contiguous()


def load_corpus(ranks=None):
    """Return the corpus, the same on all ranks. All ranks must call it.

    Rank 0 finds the text while the others wait, and sends the text or its error to all of them. So only one process
    downloads, no rank waits for one that failed, and no two nodes train on different texts.
    Raise DataError; a script ends with status 2 on all ranks instead, after one sentence.
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
    """Return (name, text, note to the user) of the first source that has a text. Raise DataError."""
    content, why_not = shakespeare.find()
    if content is not None:
        return "shakespeare", content.decode(), None
    return "offline", shakespeare.offline_text(), shakespeare.offline_notice(why_not)


class Split(Schema):
    documents: Count
    characters: Count
    bytes: Count
    tokens: Count
    shards: list[Tokens] = Field(min_length=1)  # of train-00000.bin and so on

    @model_validator(mode="after")
    def _agrees(self):
        if self.tokens != (total := sum(shard.count for shard in self.shards)):
            raise ValueError(f"tokens is {self.tokens}, and its shards have {total}")
        return self


class Splits(Schema):
    train: Split
    validation: Split


class TokenizerFile(Schema):
    kind: Literal["bpe", "char"]
    symbols: Count  # the size of the vocabulary
    mark: Count  # the separator's id
    sha256: Sha256


class Manifest(Signed):
    """manifest.json of a prepared text. Two texts with the same sha256 give the same batches."""

    format: Literal["manyhands text 3"]
    tokenizer: TokenizerFile
    splits: Splits


class ShardedTokens:
    """The tokens of several files as one row: `ids[index]` are torch.long, on `device`, of an index of any shape.

    They are read from the files, not mapped: a file truncated under a memory map kills the process silently.
    """

    def __init__(self, files, num_tokens, device="cpu"):
        """`files`: their `Tokens`; an id of `num_tokens` or more is refused. What is picked goes to `device`."""
        self.device = torch.device(device)
        self.files, self._num_tokens = files, num_tokens
        self._ends = np.cumsum([0, *(file.count for file in files)])
        self._opened = functools.lru_cache(OPEN_FILES)(lambda i: open_regular(files[i].path))

    def __len__(self):
        return int(self._ends[-1])

    def to(self, device):
        """Return the same tokens, which stay on disk, for another device."""
        return ShardedTokens(self.files, self._num_tokens, device)

    def __getitem__(self, index):
        """Raise IndexError for a place after the last, DataError for a file that has changed."""
        if isinstance(index, slice):
            index = torch.arange(*index.indices(len(self)))
        places = torch.as_tensor(index).cpu().numpy()
        flat, found = places.ravel(), np.empty(places.size, np.int64)
        which = np.searchsorted(self._ends[1:], flat, side="right")
        # each run of tokens that follow each other in one file is read at once: a window, mostly
        begins = np.flatnonzero((np.diff(flat, prepend=-2) != 1) | (np.diff(which, prepend=-1) != 0))
        for begin, end in itertools.pairwise([*begins, len(flat)]):
            i = which[begin]
            found[begin:end] = self._read(i, int(flat[begin] - self._ends[i]), end - begin)
        return torch.from_numpy(found.reshape(places.shape)).to(self.device)

    def _read(self, i, place, count):
        tokens = self.files[i]
        with explained(DataError, "copy it again", tokens.path):
            content = os.pread(self._opened(i).fileno(), count * tokens.itemsize, place * tokens.itemsize)
        if len(content) != count * tokens.itemsize:
            why = f"{tokens.path} ends before token {place + count:,} of {tokens.count:,}: it was cut"
            raise DataError(f"{why} since this run opened it; copy it again")
        ids = np.frombuffer(content, np.dtype(tokens.dtype).newbyteorder("<"))
        if len(ids) and ids.max() >= self._num_tokens:
            why = f"token {place + int(ids.argmax()):,} of {tokens.path} is {ids.max()}"
            raise DataError(f"{why}, and the vocabulary has {self._num_tokens:,}: it has changed; copy it again")
        return ids


def open_text(folder, ranks=None):
    """The Corpus in `folder`, the same on all ranks, which all must call it.

    Sizes are checked, and the tokenizer's sha256; `verify_text` checks the rest. Raise DataError, on all ranks alike.
    """
    if ranks is None or not dist.is_initialized():
        return _open(folder)
    agreement = Agreement(ranks, None, DataError)
    text = agreement.all(lambda: _open(folder))
    if len(set(agreement.gather(text.sha256))) > 1:
        raise DataError(f"{folder} is not the same on all nodes; put it into a folder that they share")
    return text


def _open(folder):
    folder = Path(os.path.expanduser(folder))
    manifest = read_manifest(folder)
    tokenizer = _tokenizer_in(folder, manifest.tokenizer)
    splits, rows = dict(manifest.splits), []
    for name, split in splits.items():
        files = [shard.at(folder / f"{name}-{i:05d}.bin") for i, shard in enumerate(split.shards)]
        for file in files:
            if file.largest >= manifest.tokenizer.symbols:
                why = f"{file.path} holds token {file.largest}, and the vocabulary has {manifest.tokenizer.symbols:,}"
                raise DataError(f"{why}; prepare the text again")
        rows.append(ShardedTokens(files, manifest.tokenizer.symbols))
    counted = ("characters", "documents", "tokens")
    counts = {name: sum(getattr(split, name) for split in splits.values()) for name in counted}
    return Corpus(folder.resolve().name, manifest.sha256, tokenizer, *rows, counts)


def _tokenizer_in(folder, about):
    path = folder / TOKENIZER
    with explained(DataError, "prepare the text again, or copy the folder again", path):
        content = read_regular(path)
        if hashlib.sha256(content).hexdigest() != about.sha256:
            raise ValueError("it has changed since it was written")
        tokenizer = tokenizer_from(Partly.parsed(content).model_dump())
        found = tokenizer.kind, len(tokenizer.vocab), tokenizer.separator
        if found != (about.kind, about.symbols, about.mark):
            raise ValueError(f"it is not the one that {MANIFEST} describes")
    return tokenizer


def read_manifest(folder):
    """Return the Manifest of a prepared text. Raise DataError with the cure."""
    path = Path(os.path.expanduser(folder)) / MANIFEST
    with explained(DataError, "prepare the text again, or copy the folder again", path):
        try:
            return Manifest.read(path)
        except (FileNotFoundError, NotADirectoryError):
            why = f"{folder} is not a prepared text (it has no {MANIFEST})"
            raise DataError(f"{why}; make one: python scripts/prepare_data.py FILES --to data/mine") from None


def verify_text(folder):
    """Read all of a prepared text, check its checksums, and return the number of bytes read. Raise DataError."""
    text = _open(folder)
    read = [tokens.verify() for tokens in (*text.train_ids.files, *text.val_ids.files)]
    return sum(tokens.count * tokens.itemsize for tokens in read)
