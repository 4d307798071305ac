"""A text of one's own as `scripts/prepare_data.py` leaves it: a folder of tokens in shards, with a tokenizer and a
manifest.

    text = open_text("data/mine", ranks)             # all ranks; a Corpus
    x_bT, y_bT = get_batch(text.train_ids, step, 12, 64, rank, world_size, seed)
    verify_text("data/mine")                         # reads every byte: has one changed?

    data/mine/manifest.json            what is here, with the sha256 of every file
              tokenizer.json           of `tokenizers`, or the characters; see `tokenizer`
              train-00000.bin(.json)   one document after the other, each begun by the separator; see `token_file`
              validation-00000.bin(.json)
              report.json, report.png  what was dropped, and why

Tokens stay on the disk: a rank reads those of its windows, through the memory map that all ranks of a node share. A
window begins anywhere, so it packs what follows each other: the end of one document, some whole ones, the beginning of
another.
"""

import hashlib
import json
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from pydantic import Field, NonNegativeInt

from manyhands.data.corpus import Corpus
from manyhands.data.shakespeare import DataError
from manyhands.data.token_file import Schema, Sha256, describe_tokens, memory_map, verify_tokens
from manyhands.data.tokenizer import tokenizer_from
from manyhands.launch.ranks import Agreement

MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"
SPLITS = ("train", "validation")


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


class Splits(Schema):
    train: Split
    validation: Split


class Manifest(Schema):
    """manifest.json of a prepared text."""

    format: Literal["manyhands text 1"] = "manyhands text 1"
    tokenizer: TokenizerFile
    splits: Splits
    sha256: str = ""  # see `identity`

    def shards(self) -> list[Shard]:
        """Those of both splits."""
        return [*self.splits.train.shards, *self.splits.validation.shards]

    def identity(self) -> str:
        """sha256 over tokenizer and tokens: two texts with the same one give the same batches."""
        parts = [self.tokenizer.sha256]
        parts += [f"{name} {shard.sha256}" for name, split in self.splits for shard in split.shards]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class ShardedTokens:
    """The tokens of several files as one row: `ids[index]` are torch.long, on `device`, of an index of any shape."""

    def __init__(self, shards, device="cpu"):
        """`shards`: tensors [N] as of `memory_map`."""
        self.device = torch.device(device)
        self._shards = [shard.numpy() for shard in shards]
        self._ends = np.cumsum([len(shard) for shard in self._shards])

    def __len__(self):
        return int(self._ends[-1]) if len(self._ends) else 0

    def to(self, device):
        """The same tokens, which stay where they are; what is picked goes to `device`."""
        moved = ShardedTokens([], device)
        moved._shards, moved._ends = self._shards, self._ends
        return moved

    def __getitem__(self, index):
        """Raises IndexError for a place that is not there."""
        if isinstance(index, slice):
            index = torch.arange(*index.indices(len(self)))
        places = torch.as_tensor(index).cpu().numpy()
        if places.size and not 0 <= places.min() <= places.max() < len(self):
            raise IndexError(f"places {places.min()} to {places.max()} of {len(self)} tokens; use 0 and more")
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
    folder = Path(folder).expanduser()
    manifest = read_manifest(folder)
    content = _read(folder / TOKENIZER)
    if hashlib.sha256(content).hexdigest() != manifest.tokenizer.sha256:
        raise DataError(f"{folder / TOKENIZER} has changed since it was written; prepare the text again")
    tokenizer = tokenizer_from(json.loads(content))
    size = manifest.tokenizer.symbols
    if len(tokenizer.vocab) != size or tokenizer.separator is None:
        raise DataError(f"{folder / TOKENIZER} does not fit {MANIFEST}; prepare the text again")
    rows = {}
    for split, about in manifest.splits:
        shards = []
        for shard in about.shards:
            tokens = describe_tokens(folder / shard.file)
            if (tokens.count, tokens.sha256) != (shard.tokens, shard.sha256):
                raise DataError(f"{tokens.path} is not the file that {MANIFEST} names; copy the folder again")
            if tokens.largest >= size:
                raise DataError(
                    f"{tokens.path} has token {tokens.largest}, and the vocabulary has {size}; prepare the text again"
                )
            shards.append(memory_map(tokens.path))
        rows[split] = ShardedTokens(shards)
        if len(rows[split]) != about.tokens:
            raise DataError(f"{folder}: {split} has {len(rows[split])} tokens, not {about.tokens}; copy it again")
    counts = {
        name: sum(getattr(about, name) for _, about in manifest.splits)
        for name in ("characters", "documents", "tokens")
    }
    return Corpus(folder.resolve().name, manifest.sha256, tokenizer, rows["train"], rows["validation"], counts)


def read_manifest(folder):
    """manifest.json of a prepared text, a Manifest. Raises DataError with the cure."""
    path = Path(folder).expanduser() / MANIFEST
    if not path.exists():
        raise DataError(
            f"{folder} is no prepared text (it has no {MANIFEST}); make one: "
            "python scripts/prepare_data.py FILES --to data/mine"
        )
    content = _read(path)
    try:
        manifest = Manifest.read(content)
        if manifest.sha256 != manifest.identity():
            raise DataError("sha256: it is that of other files")
    except DataError as error:
        raise DataError(f"{path} is damaged, or of another version ({error}); prepare the text again") from None
    return manifest


def verify_text(folder):
    """Read all of a prepared text and compare it with its checksums: the number of bytes read. Raises DataError."""
    _open(folder)
    folder = Path(folder).expanduser()
    read = [verify_tokens(folder / shard.file) for shard in read_manifest(folder).shards()]
    return sum(tokens.count * tokens.itemsize for tokens in read)


def _read(path):
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); copy the folder again") from None
