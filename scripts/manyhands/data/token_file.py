"""A text of tokens on disk: the ids as raw little-endian numbers in `tokens.bin`, what they are in `tokens.bin.json`.

    write_tokens("data/tokens.bin", ids)         # one process; 2 bytes per token below 65,536, else 4
    ids = memory_map("data/tokens.bin")          # a tensor that reads from the disk where it is looked at
    verify_tokens("data/tokens.bin")             # reads all of it: has a byte changed?

Raw, so that every program can read it (`numpy.fromfile(path, "<u2")`) and every rank knows where its share begins
without reading what lies before it.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from manyhands.course.folders import write_whole
from manyhands.data.shakespeare import DataError

FORMAT = "manyhands tokens 1"
DTYPES = {"uint16": torch.uint16, "uint32": torch.uint32}


@dataclass(frozen=True)
class Tokens:
    """What a file of tokens holds."""

    path: str
    count: int  # tokens
    dtype: str  # "uint16" or "uint32", little-endian
    largest: int  # the largest id, -1 if there is none: a vocabulary must be larger
    sha256: str  # of all bytes of the file

    @property
    def itemsize(self):
        """Bytes per token."""
        return DTYPES[self.dtype].itemsize


def _beside(path):
    return Path(f"{path}.json")


def write_tokens(path, ids):
    """Write `ids` (whole numbers, [N]) to `path` and what they are to `path`.json: Tokens. One process calls it.

    Both are complete or not there under these names. Raises ValueError for what is no row of ids below 2^32, OSError.
    """
    ids = np.asarray(ids)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise ValueError(
            f"{path} takes one row of whole numbers, not {ids.dtype} of shape {ids.shape}; give a tensor [N]"
        )
    lowest, largest = (int(ids.min()), int(ids.max())) if len(ids) else (0, -1)
    if lowest < 0 or largest >= 2**32:
        raise ValueError(f"{path} takes ids from 0 to {2**32 - 1}, and these go from {lowest} to {largest}; mend them")
    dtype = "uint16" if largest < 2**16 else "uint32"
    content = np.ascontiguousarray(ids, dtype=np.dtype(dtype).newbyteorder("<"))
    tokens = Tokens(str(path), len(ids), dtype, largest, hashlib.sha256(content).hexdigest())
    described = {"format": FORMAT} | {k: v for k, v in asdict(tokens).items() if k != "path"}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _beside(path).unlink(missing_ok=True)  # an old one must not describe the new file, should this end here
    write_whole(path, content.data if len(ids) else b"")
    write_whole(_beside(path), json.dumps(described, indent=1) + "\n")
    return tokens


def describe_tokens(path):
    """The Tokens in `path`, by its .json and its size; their bytes are not read. Raises DataError naming the file."""
    beside = _beside(path)
    try:
        found = json.loads(beside.read_text(encoding="utf-8"))
        num_bytes = os.stat(path).st_size
    except OSError as error:
        raise DataError(
            f"{error.filename} cannot be read ({error.strerror}); write both files with write_tokens()"
        ) from None
    except ValueError:
        found = None
    try:
        sound = found.pop("format") == FORMAT and found["dtype"] in DTYPES
        tokens = Tokens(str(path), **found)
        sound = sound and type(tokens.count) is type(tokens.largest) is int and tokens.count >= 0
        sound = sound and tokens.largest < 2 ** (8 * tokens.itemsize) and len(tokens.sha256) == 64
    except (TypeError, KeyError, AttributeError):  # no JSON, or JSON of something else
        sound = False
    if not sound:
        raise DataError(f"{beside} does not describe a file of tokens; write both files anew with write_tokens()")
    if num_bytes != tokens.count * tokens.itemsize:
        raise DataError(
            f"{path} has {num_bytes} bytes, but {tokens.count} tokens of {tokens.itemsize} bytes were written; "
            f"it is cut or changed: copy it again"
        )
    return tokens


def memory_map(path):
    """All tokens of `path` as a tensor [N], torch.uint16 or uint32, of which only what is looked at is read.

    Ranks of one node share the pages that were read. Slice first, then `.long()`: torch computes next to nothing with
    these two dtypes, and does not unpickle them (2.13). What is written to the tensor stays in this process. Raises DataError naming the file if its size is wrong; its bytes are not checked: see `verify_tokens`.
    """
    tokens = describe_tokens(path)
    return torch.from_file(str(path), shared=False, size=tokens.count, dtype=DTYPES[tokens.dtype])


def verify_tokens(path):
    """Read all of `path` and compare it with its sha256: Tokens. Raises DataError naming the file.

    One rank calls it, once after a copy. It takes about a second per gigabyte or two, and the disk's time.
    """
    tokens = describe_tokens(path)
    with open(path, "rb") as file:
        compare(tokens, hashlib.file_digest(file, "sha256").hexdigest())
    return tokens


def compare(tokens, sha256):
    """Raises DataError if the bytes that were read have another sha256."""
    if sha256 != tokens.sha256:
        raise DataError(f"{tokens.path} has changed since it was written (other sha256); copy it again")
