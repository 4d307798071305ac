"""What a checkpoint's folder says about itself: `manifest.json`, and the steps that a folder of checkpoints holds.

    for path in steps_in(folder):       # newest first; whatever is not complete has another name and is not listed
        verify(path)                    # CheckpointError names the file that is missing, cut or changed
        metadata = read_manifest(path).metadata

The manifest is written last. It holds the step, the validation loss, the metadata of the run, and the size and sha256
of every other file, and a sha256 of its own lines. That finds what a disk, a copy or a killed job damaged. It is no
signature: who can write the folder can write a manifest that fits, which is why its content is held to a schema here,
once, and no file of a checkpoint can bring code along (see `tensor_files`).
"""

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, FiniteFloat, NonNegativeInt, PositiveInt, ValidationError, model_validator

from manyhands.data.shakespeare import DataError
from manyhands.data.token_file import Schema, Sha256

MANIFEST = "manifest.json"
FORMAT = "manyhands checkpoint 2"
COMPLETE = re.compile(r"step-(\d{8,})(\.replaced)?")  # .replaced: its successor of the same step is being moved in
LARGEST = 2**28  # bytes of a manifest: an encoding's vocabulary takes a few MB


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, found or trusted: one sentence with the file's name and the cure."""


class File(Schema):
    """A file beside a manifest."""

    bytes: NonNegativeInt
    sha256: Sha256


class Corpus(Schema):
    """The text of a run: its name and hash, and an `alphabet` or a `vocabulary` (see `data.tokenizer`)."""

    model_config = ConfigDict(extra="allow")
    name: str = ""
    sha256: str | None = None
    alphabet: list[str] = []


class LossScale(Schema):
    """Of fp16: see `parallel.optimizer`."""

    scale: Annotated[FiniteFloat, Field(gt=0)]
    good_steps: NonNegativeInt


class Lora(Schema):
    """Adapters beside the weights: see `gpt.lora`."""

    model_config = ConfigDict(extra="allow")
    rank: PositiveInt
    alpha: FiniteFloat


class RunMetadata(Schema):
    """What a run says of itself, as far as somebody reads it again; it may say more."""

    model_config = ConfigDict(extra="allow")
    step: NonNegativeInt | None = None
    val_loss: FiniteFloat | None = None
    tokens: NonNegativeInt | None = None
    world_size: PositiveInt | None = None
    config: dict[str, int | float | bool | None] | None = None  # of the GPT
    corpus: Corpus | None = None
    options: dict[str, dict[str, Any] | bool | int | float | str | None] = {}
    loss_scale: LossScale | None = None
    lora: Lora | None = None
    alignment: dict[str, Any] | None = None


class Manifest(Schema):
    """The content of a manifest; `metadata` is as the run wrote it, and fits `RunMetadata`."""

    format: Literal["manyhands checkpoint 2"]
    step: NonNegativeInt
    val_loss: FiniteFloat | None
    time: str
    metadata: dict[str, Any]
    files: dict[Annotated[str, Field(pattern=r"^shard-[\d]+-model-[\d]+-of-[\d]+\.safetensors$")], File]
    sha256: Sha256

    @model_validator(mode="after")
    def _metadata_fits(self):
        if RunMetadata.model_validate(self.metadata).step not in (None, self.step):
            raise ValueError(f"metadata.step is {self.metadata['step']}, and step is {self.step}")
        return self


def step_folder(folder: Path | str, step: int) -> Path:
    """Where the checkpoint of `step` lies in `folder`."""
    return Path(folder) / f"step-{step:08d}"


def step_of(path: Path | str) -> int | None:
    """The step in the name of a checkpoint's folder, or None if it has another name."""
    found = COMPLETE.fullmatch(Path(path).name)
    return int(found[1]) if found else None


def steps_in(folder: Path | str) -> list[Path]:
    """The complete checkpoints in `folder` by their names, newest first. Nothing is read."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if COMPLETE.fullmatch(path.name) and path.is_dir()]
    # a `.replaced` one counts only while the one that replaces it is not there
    newest = sorted(found, key=lambda path: (-step_of(path), path.name))
    return [path for path in newest if path.suffix != ".replaced" or path.with_suffix("") not in found]


def describe_file(path: Path) -> File:
    """Size and hash of a file, as the manifest records them."""
    with open(path, "rb") as file:
        return File(bytes=os.fstat(file.fileno()).st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def write_manifest(
    path: Path, step: int, val_loss: float | None, metadata: Mapping[str, Any], files: Mapping[str, File]
) -> None:
    """Write the manifest of the checkpoint in `path`, on the disk when this returns.

    Raises TypeError if `metadata` holds what JSON cannot, OSError if the disk is full.
    """
    content = {
        "format": FORMAT,
        "step": step,
        "val_loss": val_loss if val_loss is not None and math.isfinite(val_loss) else None,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "metadata": metadata,
        "files": {name: file.model_dump() for name, file in files.items()},
    }
    content["sha256"] = _fingerprint(content)
    with open(path / MANIFEST, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(path: Path | str) -> Manifest:
    """The manifest of the checkpoint in `path`, its own sha256 checked. Raises CheckpointError."""
    file = Path(path) / MANIFEST
    content = read_small(file, f"{path} is no complete checkpoint, use another step")
    try:
        manifest = Manifest.read(content)
        if manifest.sha256 != _fingerprint(json.loads(content)):
            raise DataError("its sha256 does not fit")
    except DataError as error:
        raise CheckpointError(f"{file} is damaged or of another program ({error}); use another step") from None
    if step_of(path) not in (None, manifest.step):
        raise CheckpointError(
            f"{file} is of step {manifest.step}, but its folder says step {step_of(path)}; give the folder its old name"
        )
    return manifest


def read_small(file: Path, missing: str) -> bytes:
    """The content of a JSON file beside weights. Raises CheckpointError, with `missing` where there is none."""
    try:
        if not file.is_file() or file.stat().st_size > LARGEST:  # of a pipe one would wait for the end
            raise CheckpointError(f"{file} is {'no such file' if file.exists() else 'missing'}; {missing}")
        return file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None


def fault(error: ValidationError) -> str:
    """The first thing that a schema finds wrong: "metadata.step: input should be a valid integer"."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'its content'}: {first['msg'].lower()}"


def _fingerprint(content):
    rest = {name: value for name, value in content.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def verify(path: Path | str) -> None:
    """Read all of the checkpoint in `path` and compare it with its manifest. Raises CheckpointError naming the file."""
    for name, expected in read_manifest(path).files.items():
        verify_file(Path(path) / name, expected)


def verify_file(path: Path, expected: File) -> None:
    """Compare one file with its description. Raises CheckpointError naming it."""
    try:
        found = path.stat().st_size
        if found != expected.bytes:
            raise CheckpointError(
                f"{path} has {found} bytes, but was written with {expected.bytes}: it is cut or changed; use another"
                " step"
            )
        if not path.is_file() or describe_file(path) != expected:
            raise CheckpointError(f"{path} has changed since it was written (other sha256); use another step")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; use another step") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def sync_folder(folder: Path) -> None:
    """See to it that names made or changed in `folder` are on the disk. Where folders cannot be synced, nothing
    happens.
    """
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:  # some network file systems refuse: they sync names by themselves
        pass
    finally:
        os.close(handle)
