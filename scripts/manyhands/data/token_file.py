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
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from manyhands.course.folders import write_whole
from manyhands.data.shakespeare import DataError

DTYPES = {"uint16": torch.uint16, "uint32": torch.uint32}


class Schema(BaseModel):
    """A JSON file of ours: these names, of these types, and no others."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    @classmethod
    def read(cls, content: bytes):
        """The values in a file's content. Raises DataError with the first thing that is wrong."""
        try:
            return cls.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise DataError(f"{'.'.join(map(str, first['loc'])) or 'its content'}: {first['msg'].lower()}") from None


Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Tokens(Schema):
    """What a file of tokens holds; all but `path` stands in its .json."""

    format: Literal["manyhands tokens 1"] = "manyhands tokens 1"
    count: int = Field(ge=0)  # tokens
    dtype: Literal["uint16", "uint32"]  # little-endian
    largest: int = Field(ge=-1)  # the largest id, -1 if there is none: a vocabulary must be larger
    sha256: Sha256  # of all bytes of the file
    path: str = Field("", exclude=True)

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
    sha256 = hashlib.sha256(content).hexdigest()
    tokens = Tokens(path=str(path), count=len(ids), dtype=dtype, largest=largest, sha256=sha256)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _beside(path).unlink(missing_ok=True)  # an old one must not describe the new file, should this end here
    write_whole(path, content.data if len(ids) else b"")
    write_whole(_beside(path), json.dumps(tokens.model_dump(), indent=1) + "\n")
    return tokens


def describe_tokens(path):
    """The Tokens in `path`, by its .json and its size; their bytes are not read. Raises DataError naming the file."""
    beside = _beside(path)
    try:
        content, num_bytes = beside.read_bytes(), os.stat(path).st_size
    except OSError as error:
        raise DataError(
            f"{error.filename} cannot be read ({error.strerror}); write both files with write_tokens()"
        ) from None
    try:
        tokens = Tokens.read(content).model_copy(update={"path": str(path)})
        if tokens.largest >= 2 ** (8 * tokens.itemsize):
            raise DataError(f"largest: {tokens.largest} does not fit into {tokens.dtype}")
    except DataError as error:
        raise DataError(
            f"{beside} does not describe a file of tokens ({error}); write both files anew with write_tokens()"
        ) from None
    if num_bytes != tokens.count * tokens.itemsize:
        raise DataError(
            f"{path} has {num_bytes} bytes, but {tokens.count} tokens of {tokens.itemsize} bytes were written; "
            f"it is cut or changed: copy it again"
        )
    return tokens


def memory_map(path):
    """All tokens of `path` as a tensor [N], torch.uint16 or uint32, of which only what is looked at is read.

    Ranks of one node share the pages that were read. Slice first, then `.long()`: torch computes next to nothing with
    these two dtypes, and does not unpickle them (2.13). What is written to the tensor stays in this process. Raises
    DataError naming the file if its size is wrong; its bytes are not checked: see `verify_tokens`.
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
