"""A folder of checkpoints as one process sees it: its steps, what their manifests say, what is kept.

    for path in steps_in(folder):       # newest first; whatever is not complete has another name and is not listed
        verify(path)                    # CheckpointError names the file that is missing, cut or changed
        metadata = read_manifest(path).metadata

`manifest.json` is written last. It holds the step, the validation loss, the metadata of the run, the size and sha256 of
every other file, and a sha256 of its own lines. That finds what a disk, a copy or a killed job damaged.

Nothing here communicates: rank 0 alone changes the folder. The order of renames is such that a kill between any two of
them leaves, of each step, the old checkpoint or the new one, complete and under a name that `steps_in` lists.
"""

import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Container
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveInt, create_model, model_validator

from manyhands.data.schema import Count, Partly, Schema, Sha256, Signed, open_regular
from manyhands.data.tokenizer import Tokens
from manyhands.gpt.config import OF_A_LLAMA, GPTConfig
from manyhands.launch.program import Refused, explained

MANIFEST = "manifest.json"
FORMAT = "manyhands checkpoint 2"
COMPLETE = re.compile(r"step-(\d{8,})(\.replaced)?")  # .replaced: its successor of the same step is being moved in
Scalar = str | int | float | bool | None


class CheckpointError(Refused):
    """A checkpoint that cannot be written, found or trusted: one sentence with the file's name and the cure."""


class File(Schema):
    bytes: Count
    sha256: Sha256


# the config of a GPT, with all its names; those of experts and of a llama came later, and older files lack them
LATER = ("experts", "top_k", "shared_experts", "router", "gelu", "style", *OF_A_LLAMA)
Sizes = create_model(
    "Sizes",
    __base__=Schema,
    **{f.name: (Count if f.type is int else f.type, f.default if f.name in LATER else ...) for f in fields(GPTConfig)},
)


class ModelText(Partly):  # what a model reads and writes
    vocab_size: Count | None = None
    alphabet: Tokens | None = None  # this, or
    vocabulary: dict[str, Any] | None = None  # see `data.tokenizer`


class RunText(ModelText):  # what a run was trained on: it goes on with no other
    name: str
    sha256: str


class RunOptions(Partly):  # of `train.py`: a run that goes on says what has changed
    train: dict[str, Scalar] = {}
    optimizer: dict[str, Scalar] = {}
    parallel: dict[str, Scalar] = {}


class ModelMetadata(Partly):
    """The description of weights."""

    step: Count
    config: Sizes
    corpus: ModelText
    val_loss: float | None = None
    tokens: Count | None = None
    options: RunOptions = RunOptions()

    @model_validator(mode="after")
    def _is_a_model(self):
        GPTConfig(**self.config.model_dump())
        text, size = self.corpus, self.config.vocab_size
        if text.alphabet is not None and text.vocabulary is not None:
            raise ValueError("corpus: an alphabet and a vocabulary, and one of them is read")
        said, found = text.vocab_size or 0, len(text.alphabet or ())
        if said > size or (said and found and said != found):
            raise ValueError(f"corpus.vocab_size is {said}, with an alphabet of {found}, config.vocab_size {size}")
        return self


class LossScale(Schema):  # of fp16: see `parallel.optimizer`
    scale: Annotated[float, Field(gt=0)]
    good_steps: Count


class Lora(Schema):  # adapters beside the weights: see `gpt.lora`
    rank: Annotated[Count, Field(ge=1)]
    alpha: float
    rows: bool = False  # does the vocabulary learn, too?


class Stage(Partly):  # of `align.py`
    method: str


class RunMetadata(ModelMetadata):
    """A run's metadata, needed to resume it."""

    corpus: RunText
    layout: Annotated[str, Field(pattern="^[a-z0-9 ]+$")]
    world_size: PositiveInt
    loss_scale: LossScale | None = None
    lora: Lora | None = None
    alignment: Stage | None = None

    @model_validator(mode="after")
    def _has_its_ranks(self):
        axes = self.layout.partition(" with ")[0]  # "replicate 4 with experts over 2"
        if math.prod(map(int, re.findall("[0-9]+", axes))) != self.world_size:
            raise ValueError(f"layout is {self.layout}, and world_size is {self.world_size}")
        return self


def _fits(schema):
    """For a dict that is kept as somebody wrote it: does it fit `schema`?"""
    return AfterValidator(lambda values: schema.parsed(json.dumps(values)) and values)


class Manifest(Signed):
    """The content of a checkpoint's manifest."""

    format: Literal["manyhands checkpoint 2"]
    step: Count
    val_loss: float | None
    time: str
    metadata: Annotated[dict[str, Any], _fits(RunMetadata)]  # as the run wrote it
    files: dict[Annotated[str, Field(pattern=r"^shard-[0-9]+-model-[0-9]+-of-[0-9]+\.safetensors$")], File]

    @model_validator(mode="after")
    def _agrees(self):
        for name in ("step", "val_loss"):
            if (other := self.metadata.get(name)) not in (None, getattr(self, name)):
                raise ValueError(f"metadata.{name} is {other}, and {name} is {getattr(self, name)}")
        return self


class Export(Signed):
    """The content of the file beside exported weights."""

    format: Literal["manyhands export 2"]
    metadata: Annotated[dict[str, Any], _fits(ModelMetadata)]
    file: File


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
    """The manifest of the checkpoint in `path`, its own sha256 checked. Raise CheckpointError."""
    path = Path(path)
    file = path / MANIFEST
    with explained(CheckpointError, f"{path} is not a complete checkpoint, use another step", file):
        manifest = Manifest.read(file)
    if step_of(path) not in (None, manifest.step):
        why = f"{file} is of step {manifest.step}, but its folder says step {step_of(path)}"
        raise CheckpointError(f"{why}; give the folder its old name")
    if foreign := {file.name for file in path.glob("*.safetensors")} - manifest.files.keys():  # they would be read, too
        raise CheckpointError(f"{path / min(foreign)} is not in the manifest; remove it, or use another step")
    return manifest


def verify(path: Path | str) -> None:
    """Read all of the checkpoint in `path` and compare it with its manifest. Raise CheckpointError naming the file."""
    for name, expected in read_manifest(path).files.items():
        verify_file(Path(path) / name, expected)


def verify_file(path: Path, expected: File) -> None:
    """Compare one file with its description. Raise CheckpointError naming it."""
    with explained(CheckpointError, "use another step", path):
        with open_regular(path) as file:
            found = os.fstat(file.fileno()).st_size
        same = found != expected.bytes or describe_file(path) == expected  # of another size it is not read
    if found != expected.bytes:
        cut = f"{path} has {found} bytes, but was written with {expected.bytes}: it is cut or changed"
        raise CheckpointError(f"{cut}; use another step")
    if not same:
        raise CheckpointError(f"{path} has changed since it was written (other sha256); use another step")


def describe_file(path: Path) -> File:
    """Size and hash of a file, as the manifest records them."""
    with open_regular(path) as file:
        return File(bytes=os.fstat(file.fileno()).st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def make_partial(folder: Path, step: int, broken: Container[Path]) -> Path:
    """Tidy up after a run that was killed, put `broken` checkpoints aside, and make the folder to write into: its path.

    Raise CheckpointError if the folder holds a later step: another run's; OSError.
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
    """Make the checkpoint in `partial` count; all but the last `keep` and the best one go. Raise OSError."""
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

    Raise TypeError or ValueError if `metadata` could not be read again, OSError if the disk is full.
    """
    about = Manifest.signed(
        format=FORMAT, step=step, metadata=metadata, time=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        val_loss=val_loss if val_loss is not None and math.isfinite(val_loss) else None,
        files={name: file.model_dump() for name, file in files.items()},
    )  # fmt: skip
    with open(path / MANIFEST, "w", encoding="utf-8") as file:
        file.write(about.content())
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
