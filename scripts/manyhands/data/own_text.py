"""A text of one's own as `scripts/prepare_data.py` leaves it: a folder of tokens in shards, with a tokenizer and a manifest.

    text = open_text("data/mine", ranks)             # all ranks; the same face as `corpus.Corpus`
    x_bT, y_bT = get_batch(text.train_ids, step, 12, 64, rank, world_size, seed)
    verify_text("data/mine")                         # reads every byte: has one changed?

    data/mine/manifest.json            what is here, with the sha256 of every file
              tokenizer.json           of `tokenizers`, or the characters; see `text_tokenizer`
              train-00000.bin(.json)   one document after the other, each begun by the separator; see `token_file`
              validation-00000.bin(.json)
              report.json, report.png  what was dropped, and why

Tokens stay on the disk: a rank reads those of its windows, through the memory map that all ranks of a node share. A window
begins anywhere, so it packs what follows each other: the end of one document, some whole ones, the beginning of another.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from manyhands.data.shakespeare import DataError
from manyhands.data.text_tokenizer import tokenizer_from
from manyhands.data.token_file import describe_tokens, memory_map, verify_tokens
from manyhands.launch.agreement import Agreement

FORMAT = "manyhands text 1"
MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"
SPLITS = ("train", "validation")


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


@dataclass(frozen=True)
class OwnText:
    """A prepared text, with the face of `corpus.Corpus`."""

    name: str  # of its folder
    sha256: str  # of tokenizer and tokens
    tokenizer: object = field(repr=False)
    train_ids: ShardedTokens = field(repr=False)
    val_ids: ShardedTokens = field(repr=False)
    counts: dict = field(repr=False)  # {split: {"tokens", "documents", "characters"}}

    @property
    def vocab(self):
        """What each id stands for, as text."""
        return self.tokenizer.vocab

    @property
    def separator(self):
        """The id that begins each document."""
        return self.tokenizer.separator

    def encode(self, text):
        """The ids of `text`, torch.long [T]. Raises ValueError for a character that a tokenizer of characters lacks."""
        return torch.from_numpy(self.tokenizer.encode(text).astype(np.int64))

    def decode(self, ids):
        """The text of `ids`, a tensor [T] or a list."""
        return self.tokenizer.decode(ids)

    def facts(self):
        """What metrics.json records of it."""
        train, validation = (self.counts[split] for split in SPLITS)
        return {
            "name": self.name,
            "characters": train["characters"] + validation["characters"],
            "documents": train["documents"] + validation["documents"],
            "tokens": train["tokens"] + validation["tokens"],
            "vocab_size": len(self.vocab),
            "tokenizer": self.tokenizer.kind,
            "sha256": self.sha256,
        }

    def vocabulary(self):
        """What a checkpoint keeps beside `facts`, so that its model can write."""
        return {"vocabulary": self.tokenizer.content}


def open_text(folder, ranks=None):
    """The OwnText in `folder`, the same on all ranks, which all must call it.

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
    described = manifest["tokenizer"]
    content = _read(folder / TOKENIZER)
    if hashlib.sha256(content).hexdigest() != described["sha256"]:
        raise DataError(f"{folder / TOKENIZER} has changed since it was written; prepare the text again")
    tokenizer = tokenizer_from(json.loads(content))
    if len(tokenizer.vocab) != described["symbols"] or tokenizer.separator is None:
        raise DataError(f"{folder / TOKENIZER} does not fit {MANIFEST}; prepare the text again")
    rows = {}
    for split in SPLITS:
        shards = []
        for shard in manifest["splits"][split]["shards"]:
            tokens = describe_tokens(folder / shard["file"])
            if (tokens.count, tokens.sha256) != (shard["tokens"], shard["sha256"]):
                raise DataError(f"{tokens.path} is not the file that {MANIFEST} names; copy the folder again")
            if tokens.largest >= described["symbols"]:
                raise DataError(
                    f"{tokens.path} has token {tokens.largest}, and the vocabulary has {described['symbols']}; prepare the text again"
                )
            shards.append(memory_map(tokens.path))
        rows[split] = ShardedTokens(shards)
    counts = {split: {k: v for k, v in manifest["splits"][split].items() if k != "shards"} for split in SPLITS}
    return OwnText(folder.resolve().name, manifest["sha256"], tokenizer, *rows.values(), counts)


def read_manifest(folder):
    """manifest.json of a prepared text. Raises DataError with the cure."""
    path = Path(folder).expanduser() / MANIFEST
    if not path.exists():
        raise DataError(
            f"{folder} is no prepared text (it has no {MANIFEST}); make one: "
            "python scripts/prepare_data.py FILES --to data/mine"
        )
    try:
        manifest = json.loads(_read(path))
        sound = manifest["format"] == FORMAT and manifest["sha256"] == identity(manifest)
        sound = sound and all(
            Path(shard["file"]).name == shard["file"]
            for split in SPLITS for shard in manifest["splits"][split]["shards"]
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise DataError(f"{path} is damaged, or of another version; prepare the text again")
    return manifest


def identity(manifest):
    """sha256 over tokenizer and tokens: two texts with the same one give the same batches."""
    parts = [manifest["tokenizer"]["sha256"]]
    parts += [f"{split} {shard['sha256']}" for split in SPLITS for shard in manifest["splits"][split]["shards"]]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def verify_text(folder):
    """Read all of a prepared text and compare it with its checksums: the number of bytes read. Raises DataError."""
    text, folder = _open(folder), Path(folder).expanduser()
    manifest = read_manifest(folder)
    shards = [shard["file"] for split in SPLITS for shard in manifest["splits"][split]["shards"]]
    read = sum((tokens := verify_tokens(folder / name)).count * tokens.itemsize for name in shards)
    held = {split: len(row) for split, row in zip(SPLITS, (text.train_ids, text.val_ids), strict=True)}
    for split, count in held.items():
        if count != text.counts[split]["tokens"]:
            raise DataError(f"{folder}: {split} has {count} tokens, not {text.counts[split]['tokens']}; copy it again")
    return read


def _read(path):
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); copy the folder again") from None
