"""A text as numbers, and batches from it.

    corpus = load_corpus(ranks)                      # Shakespeare; all ranks must call it
    corpus = open_text("data/mine", ranks)           # a text of your own, by scripts/prepare_data.py; all ranks
    x_bT, y_bT = get_batch(corpus.train_ids, step, 12, 64, rank, world_size, seed)
    verify_text("data/mine")                         # reads every byte: has one changed?

The course's corpus is Shakespeare (from a file, the cache or the web: see `shakespeare`), or where none has it, the
manual that every Python carries, which every run then says. A text of your own is a folder:

    data/mine/manifest.json            what is here, with the sha256 of every file
              tokenizer.json           of `tokenizers`, or the characters; see `tokenizer`
              train-00000.bin(.json)   one document after the other, each begun by the separator; see `token_files`
              validation-00000.bin(.json)
              report.json, report.png  what was dropped, and why: see `preparation`

Its tokens stay on the disk: a rank reads those of its windows, through the memory map that all ranks of a node share. A
window begins anywhere, so it packs what follows each other: the end of one document, some whole ones, the beginning of
another. Data sets of other kinds: `samplers` says which items a rank reads, `token_files` brings tokens to the ranks.

Shapes: T positions, B sequences in the global batch, b this rank's.
"""

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from pydantic import Field, NonNegativeInt

from manyhands.data import shakespeare
from manyhands.data.shakespeare import DataError
from manyhands.data.token_files import Schema, Sha256, describe_tokens, memory_map, verify_tokens
from manyhands.data.tokenizer import CharTokenizer, Tokenizer, tokenizer_from
from manyhands.launch.join import refuse
from manyhands.launch.program import say
from manyhands.launch.ranks import Agreement

MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"  # of a text of one's own
SPLITS = ("train", "validation")


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
        why = f"global_batch={global_batch} does not split over {world_size} ranks; use a multiple of {world_size}"
        raise ValueError(why)
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
    content, why_not = shakespeare.find()
    if content is not None:
        return "shakespeare", content.decode(), None
    return "offline", shakespeare.offline_text(), shakespeare.offline_notice(why_not)


class Shard(Schema):
    file: str = Field(pattern=r"^(train|validation)-\d{5,}\.bin$")
    tokens: NonNegativeInt
    dtype: Literal["uint16", "uint32"]
    sha256: Sha256


class Split(Schema):
    documents: NonNegativeInt
    characters: NonNegativeInt
    bytes: NonNegativeInt
    tokens: NonNegativeInt
    shards: list[Shard]


class TokenizerFile(Schema):
    kind: Literal["bpe", "char"]
    symbols: NonNegativeInt  # the size of the vocabulary
    mark: int  # the separator's id
    sha256: Sha256


class Manifest(Schema):
    """manifest.json of a prepared text."""

    format: Literal["manyhands text 1"] = "manyhands text 1"
    tokenizer: TokenizerFile
    splits: dict[Literal["train", "validation"], Split]
    sha256: str = ""  # see `identity`

    def identity(self) -> str:
        """sha256 over tokenizer and tokens: two texts with the same one give the same batches."""
        parts = [self.tokenizer.sha256]
        parts += [f"{name} {shard.sha256}" for name, split in self.splits.items() for shard in split.shards]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class ShardedTokens:
    """The tokens of several files as one row: `ids[index]` are torch.long, on `device`, of an index of any shape."""

    def __init__(self, shards, device="cpu"):
        """`shards`: arrays [N]. What is picked of them goes to `device`."""
        self.device = torch.device(device)
        self._shards, self._ends = shards, np.cumsum([0, *map(len, shards)])[1:]

    def __len__(self):
        return int(self._ends[-1])

    def to(self, device):
        """The same tokens, which stay where they are, for another device."""
        return ShardedTokens(self._shards, device)

    def __getitem__(self, index):
        """Raises IndexError for a place behind the last."""
        if isinstance(index, slice):
            index = torch.arange(*index.indices(len(self)))
        places = torch.as_tensor(index).cpu().numpy()
        which = np.searchsorted(self._ends, places, side="right")
        found = np.empty(places.shape, np.int64)
        for i in np.unique(which):
            shard = self._shards[i]
            found[which == i] = shard[places[which == i] - (self._ends[i] - len(shard))]
        return torch.from_numpy(found).to(self.device)


def open_text(folder, ranks=None):
    """The Corpus in `folder`, the same on all ranks, which all must call it.

    Sizes are checked, and the tokenizer's sha256; `verify_text` checks the rest. Raises DataError, on all ranks alike.
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
    try:
        content = (folder / TOKENIZER).read_bytes()
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read ({error.strerror}); copy the folder again") from None
    if hashlib.sha256(content).hexdigest() != manifest.tokenizer.sha256:
        raise DataError(f"{folder / TOKENIZER} has changed since it was written; prepare the text again")
    rows = {}
    for split, about in manifest.splits.items():
        tokens = [describe_tokens(folder / shard.file) for shard in about.shards]
        for found, shard in zip(tokens, about.shards, strict=True):
            if found.sha256 != shard.sha256:
                raise DataError(f"{found.path} is not the file that {MANIFEST} names; copy the folder again")
        rows[split] = ShardedTokens([memory_map(found.path).numpy() for found in tokens])
    splits = manifest.splits.values()
    counts = {name: sum(getattr(one, name) for one in splits) for name in ("characters", "documents", "tokens")}
    tokenizer = tokenizer_from(json.loads(content))
    return Corpus(folder.resolve().name, manifest.sha256, tokenizer, rows["train"], rows["validation"], counts)


def read_manifest(folder):
    """manifest.json of a prepared text, a Manifest. Raises DataError with the cure."""
    path = Path(os.path.expanduser(folder)) / MANIFEST
    if not path.exists():
        why = f"{folder} is not a prepared text (it has no {MANIFEST})"
        raise DataError(f"{why}; make one: python scripts/prepare_data.py FILES --to data/mine")
    try:
        manifest = Manifest.read(path.read_bytes())
        if manifest.sha256 != manifest.identity():
            raise ValueError("sha256: it is that of other files")
    except ValueError as error:
        raise DataError(f"{path} cannot be used ({error}); prepare the text again") from None
    return manifest


def verify_text(folder):
    """Read all of a prepared text and compare it with its checksums: the number of bytes read. Raises DataError."""
    _open(folder)
    folder = Path(os.path.expanduser(folder))
    shards = [shard for split in read_manifest(folder).splits.values() for shard in split.shards]
    read = [verify_tokens(folder / shard.file) for shard in shards]
    return sum(tokens.count * tokens.itemsize for tokens in read)
