"""Read and write this course's JSON files, each checked against a schema.

class About(Signed): ...
about = About.signed(count=3)               # its sha256 is that of everything else in it
write_whole(path, about.content())
about = About.read(path)                    # OSError, or ValueError with the first thing that is wrong
"""

import errno
import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

LARGEST = 2**28  # bytes: a vocabulary of a million merges takes less than half
SHOWN = 100  # characters of what a file holds, in a sentence

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, lt=2**53)]  # every reader of JSON keeps these


class Schema(BaseModel):
    """A JSON file of ours, or a part: these names, of these types, and no others."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """The values in a file. Raise OSError, or ValueError with the first thing that is wrong."""
        return cls.parsed(read_regular(path))

    @classmethod
    def parsed(cls, content: bytes | str) -> Self:
        """The values in a file's content. Raise ValueError with the first thing that is wrong."""
        try:
            return cls.model_validate_json(content)
        except ValidationError as error:
            found = error.errors(include_url=False)
            first = next((one for one in found if one["loc"] == ("format",)), found[0])
            where, why = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
            if first["type"] == "literal_error":  # another format, most of all
                why = f"{str(first['input'])[:SHOWN]!r} was found, and {first['ctx']['expected']} is read"
            where = f"{visible(where)}: " if where else ""
            raise ValueError(f"{where}{visible(why[:1].lower() + why[1:], 300)}") from None

    def content(self) -> str:
        """Return the file's content."""
        return json.dumps(self.model_dump(mode="json"), indent=1) + "\n"


class Partly(Schema):
    """A Schema that allows unknown fields."""

    model_config = ConfigDict(extra="allow")


class Signed(Schema):
    """A file that contains the sha256 of its own values, so that any change is detected."""

    sha256: Sha256

    @classmethod
    def signed(cls, **values: Any) -> Self:
        """Sign the other values. Raise TypeError for what JSON cannot hold, ValueError for what `read` would refuse."""
        unsigned = super().parsed(json.dumps({**values, "sha256": "0" * 64}))
        return unsigned.model_copy(update={"sha256": unsigned.fingerprint()})

    @classmethod
    def parsed(cls, content):
        found = super().parsed(content)
        if found.sha256 != found.fingerprint():
            raise ValueError("it has changed since it was written: its sha256 does not fit")
        return found

    def fingerprint(self) -> str:
        values = self.model_dump(mode="json", exclude={"sha256"})
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def open_regular(path: Path | str) -> BinaryIO:
    """Open a file to read its bytes. Raise OSError, also for a fifo, whose writer would be waited for, or a device."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def read_regular(path: Path | str) -> bytes:
    """The bytes of a file that fits into memory beside what it describes. Raise OSError."""
    with open_regular(path) as file:
        if (num_bytes := os.fstat(file.fileno()).st_size) > LARGEST:
            raise OSError(errno.EFBIG, f"{num_bytes:,} bytes, and at most {LARGEST:,} are read", str(path))
        return file.read(LARGEST)


def visible(text: str, most: int = SHOWN) -> str:
    """Return at most `most` characters of untrusted text, on one line."""
    return "".join(c if c.isprintable() else "." for c in text[:most])
