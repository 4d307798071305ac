"""A folder of checkpoints as one process sees it: its steps, what their manifests say, who may write, what is kept.

    for path in steps_in(folder):       # newest first; whatever is not complete has another name and is not listed
        verify(path)                    # CheckpointError names the file that is missing, cut or changed
        metadata = read_manifest(path).metadata

`manifest.json` is written last. It holds the step, the validation loss, the metadata of the run, the size and sha256 of
every other file, and a sha256 of its own lines. That finds what a disk, a copy or a killed job damaged.

Nothing here communicates: rank 0 alone changes the folder. The order of renames is such that a kill between any two of
them leaves, of each step, the old checkpoint or the new one, complete and under a name that `steps_in` lists.
"""

import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Container
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

from pydantic import ConfigDict, Field, FiniteFloat, NonNegativeInt, PositiveInt, model_validator

from manyhands.data.token_files import Schema, Sha256

MANIFEST = "manifest.json"
FORMAT = "manyhands checkpoint 2"
COMPLETE = re.compile(r"step-(\d{8,})(\.replaced)?")  # .replaced: its successor of the same step is being moved in
PATIENCE_S = 5  # a run that was just killed may take so long to let go of its folder


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, found or trusted: one sentence with the file's name and the cure."""


class File(Schema):
    """A file beside a manifest."""

    bytes: NonNegativeInt
    sha256: Sha256


class RunText(Schema):
    """What a run was trained on: it goes on with no other."""

    model_config = ConfigDict(extra="allow")
    name: str
    sha256: str


class ModelMetadata(Schema):
    """What weights are, as far as somebody reads it; there may be more."""

    model_config = ConfigDict(extra="allow")
    step: NonNegativeInt
    config: dict[str, int | float | bool | None]  # of the GPT
    corpus: dict[str, Any]  # with an `alphabet` or a `vocabulary`: see `data.tokenizer`
    val_loss: FiniteFloat | None = None
    tokens: NonNegativeInt | None = None
    options: dict[str, dict[str, Any] | bool | int | float | str | None] = {}


class RunMetadata(ModelMetadata):
    """What a run says of itself, and needs to go on."""

    corpus: RunText
    layout: str
    world_size: PositiveInt
    loss_scale: dict[str, float] | None = None  # of fp16: see `parallel.optimizer`
    lora: dict[str, Any] | None = None  # adapters beside the weights: see `gpt.lora`
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
        if RunMetadata.model_validate(self.metadata).step != self.step:
            raise ValueError(f"metadata.step is {self.metadata['step']}, and step is {self.step}")
        return self


def step_of(path: Path | str) -> int | None:
    """The step in the name of a checkpoint's folder, or None if it has another name."""
    found = COMPLETE.fullmatch(Path(path).name)
    return int(found[1]) if found else None


def steps_in(folder: Path | str) -> list[Path]:
    """The complete checkpoints in `folder` by their names, newest first. Nothing is read."""
    found = [path for path in Path(folder).glob("step-*") if step_of(path) is not None and path.is_dir()]
    # a `.replaced` one counts only while the one that replaces it is not there
    newest = sorted(found, key=lambda path: (-step_of(path), path.name))
    return [path for path in newest if path.suffix != ".replaced" or path.with_suffix("") not in found]


def read_manifest(path: Path | str) -> Manifest:
    """The manifest of the checkpoint in `path`, its own sha256 checked. Raises CheckpointError."""
    path = Path(path)
    file = path / MANIFEST
    content = read_small(file, f"{path} is not a complete checkpoint, use another step")
    try:
        manifest = Manifest.read(content)
        if manifest.sha256 != _fingerprint(json.loads(content)):
            raise ValueError("it has changed since it was written: its sha256 does not fit")
    except ValueError as error:
        raise CheckpointError(f"{file} cannot be used ({error}); use another step") from None
    if step_of(path) not in (None, manifest.step):
        why = f"{file} is of step {manifest.step}, but its folder says step {step_of(path)}"
        raise CheckpointError(f"{why}; give the folder its old name")
    if foreign := {file.name for file in path.glob("*.safetensors")} - manifest.files.keys():  # they would be read, too
        raise CheckpointError(f"{path / min(foreign)} is not in the manifest; remove it, or use another step")
    return manifest


def read_small(file: Path, missing: str) -> bytes:
    """The content of a JSON file beside weights. Raises CheckpointError, with `missing` where there is none."""
    try:
        return file.read_bytes()
    except OSError as error:
        why = f"missing; {missing}" if isinstance(error, FileNotFoundError) else f"unreadable: {error.strerror}"
        raise CheckpointError(f"{file} is {why}") from None


def verify(path: Path | str) -> None:
    """Read all of the checkpoint in `path` and compare it with its manifest. Raises CheckpointError naming the file."""
    for name, expected in read_manifest(path).files.items():
        verify_file(Path(path) / name, expected)


def verify_file(path: Path, expected: File) -> None:
    """Compare one file with its description. Raises CheckpointError naming it."""
    try:
        found = describe_file(path)
    except OSError as error:
        why = "missing" if isinstance(error, FileNotFoundError) else f"unreadable ({error.strerror})"
        raise CheckpointError(f"{path} is {why}; use another step") from None
    if found.bytes != expected.bytes:
        cut = f"{path} has {found.bytes} bytes, but was written with {expected.bytes}: it is cut or changed"
        raise CheckpointError(f"{cut}; use another step")
    if found != expected:
        raise CheckpointError(f"{path} has changed since it was written (other sha256); use another step")


def describe_file(path: Path) -> File:
    """Size and hash of a file, as the manifest records them."""
    with open(path, "rb") as file:
        return File(bytes=os.fstat(file.fileno()).st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def _fingerprint(content):
    rest = {name: value for name, value in content.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def lock(folder: Path, owner: str) -> TextIO:
    """Make `folder`, and make it ours to write into: an open file that holds the lock until it is closed.

    The system lets go of it however the process ends. On a file system without locks nobody can be asked, and two runs
    in one folder are not noticed. `owner` is what the other run is told. Raises CheckpointError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".writer", "a+")  # noqa: SIM115 - it is held while the run lives
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror}; name another folder") from None
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                break
            if time.monotonic() > deadline:
                file.seek(0)
                why = f"another run ({file.read().strip() or 'unknown'}) writes its checkpoints into {folder}"
                raise CheckpointError(f"{why}; wait until it ends, or name another folder") from None
            time.sleep(0.2)
    file.truncate(0)
    file.write(f"{owner}\n")
    file.flush()
    os.fsync(file.fileno())
    return file


def make_partial(folder: Path, step: int, broken: Container[Path]) -> Path:
    """Tidy up after a run that was killed, put `broken` checkpoints aside, and make the folder to write into: its path.

    Raises CheckpointError if the folder holds a later step: another run's; OSError.
    """
    for path in folder.glob("step-*.partial"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob("step-*.replaced"):
        if path.with_suffix("").exists():
            shutil.rmtree(path, ignore_errors=True)
        else:  # killed between two renames
            path.rename(path.with_suffix(""))
    for path in steps_in(folder):
        if path in broken and step_of(path) != step:
            shutil.rmtree(path.with_suffix(".broken"), ignore_errors=True)
            path.rename(path.with_suffix(".broken"))  # for somebody to look at
        elif step_of(path) > step:
            why = f"{folder} holds step {step_of(path)} of another run, later than this run's step {step}"
            raise CheckpointError(f"{why}; name another folder, or resume from that step")
    partial = folder / f"step-{step:08d}.partial"
    partial.mkdir()
    return partial


def complete(partial: Path, step: int, val_loss: float | None, metadata: dict, files: dict, keep: int) -> None:
    """Make the checkpoint in `partial` count; all but the last `keep` and the best one go. Raises OSError."""
    folder = partial.parent
    write_manifest(partial, step, val_loss, metadata, files)
    _sync_folder(partial)
    final, replaced = partial.with_suffix(""), partial.with_suffix(".replaced")
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    _sync_folder(folder)
    with suppress(OSError):  # what is left over costs only room
        shutil.rmtree(replaced, ignore_errors=True)
        losses = {}
        for path in steps_in(folder):
            with suppress(CheckpointError):  # one without a readable manifest neither counts nor goes
                losses[path] = read_manifest(path).val_loss
        best = min(losses, key=lambda path: math.inf if losses[path] is None else losses[path])  # of equals the newest
        kept = {*list(losses)[:keep]} | ({best} if losses[best] is not None else set())
        for path in losses.keys() - kept:
            path.rename(path.with_suffix(".partial"))  # at once: half a checkpoint never has a complete one's name
            shutil.rmtree(path.with_suffix(".partial"), ignore_errors=True)


def write_manifest(path: Path, step: int, val_loss: float | None, metadata: dict, files: dict[str, File]) -> None:
    """Write the manifest of the checkpoint in `path`, on the disk when this returns.

    Raises TypeError if `metadata` holds what JSON cannot, OSError if the disk is full.
    """
    content = {
        "format": FORMAT, "step": step,
        "val_loss": val_loss if val_loss is not None and math.isfinite(val_loss) else None,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "metadata": metadata,
        "files": {name: file.model_dump() for name, file in files.items()},
    }  # fmt: skip
    content["sha256"] = _fingerprint(content)
    with open(path / MANIFEST, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder):
    """See to it that names made or changed in `folder` are on the disk, where the file system lets one ask for it."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
