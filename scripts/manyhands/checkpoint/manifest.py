"""What a checkpoint's folder says about itself: `manifest.json`, and the steps that a folder of checkpoints holds.

    for path in steps_in(folder):       # newest first; whatever is not complete has another name and is not listed
        verify(path)                    # CheckpointError names the file that is missing, cut or changed
        metadata = read_metadata(path)

The manifest is written last. It holds the step, the validation loss, the metadata of the run, and the size and sha256 of
every other file, and a sha256 of its own lines. That finds what a disk, a copy or a killed job damaged. It is no
signature: who can write the folder can write a manifest that fits, which is why nothing here or in `tensor_files` runs
code that a file brings along.
"""

import hashlib
import json
import math
import os
import re
import time
from pathlib import Path

MANIFEST = "manifest.json"
FORMAT = "manyhands checkpoint 2"
COMPLETE = re.compile(r"step-(\d{8,})(\.replaced)?")  # .replaced: its successor of the same step is being moved in


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, found or trusted: one sentence with the file's name and the cure."""


def step_folder(folder, step):
    """Where the checkpoint of `step` lies in `folder`."""
    return Path(folder) / f"step-{step:08d}"


def step_of(path):
    """The step in the name of a checkpoint's folder, or None if it has another name."""
    found = COMPLETE.fullmatch(Path(path).name)
    return int(found[1]) if found else None


def steps_in(folder):
    """The complete checkpoints in `folder` by their names, newest first. Nothing is read."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if COMPLETE.fullmatch(path.name) and path.is_dir()]
    # a `.replaced` one counts only while the one that replaces it is not there
    newest = sorted(found, key=lambda path: (-step_of(path), path.name))
    return [path for path in newest if path.suffix != ".replaced" or path.with_suffix("") not in found]


def describe_file(path):
    """{"bytes", "sha256"} of a file, as the manifest records it."""
    with open(path, "rb") as file:
        return {
            "bytes": os.fstat(file.fileno()).st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def write_manifest(path, step, val_loss, metadata, files):
    """Write the manifest of the checkpoint in `path`, on the disk when this returns. `files`: {name: description}.

    Raises TypeError if `metadata` hold what JSON cannot, OSError if the disk is full.
    """
    content = {
        "format": FORMAT,
        "step": step,
        "val_loss": val_loss if val_loss is not None and math.isfinite(val_loss) else None,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "metadata": metadata,
        "files": files,
    }
    content["sha256"] = _fingerprint(content)
    with open(path / MANIFEST, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(path):
    """The manifest of the checkpoint in `path`, its own sha256 checked. Raises CheckpointError."""
    file = Path(path) / MANIFEST
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        fits = content["format"] == FORMAT and content["sha256"] == _fingerprint(content)
        sound = fits and all(Path(name).name == name for name in content["files"])
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing; {path} is no complete checkpoint, use another step") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError):  # no UTF-8, no JSON, or JSON of something else
        sound = False
    if not sound:
        raise CheckpointError(f"{file} is damaged or of another program; use another step")
    if step_of(path) not in (None, content["step"]):
        raise CheckpointError(
            f"{file} is of step {content['step']}, but its folder says step {step_of(path)}; give the folder its old name"
        )
    return content


def _fingerprint(content):
    rest = {name: value for name, value in content.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_metadata(path):
    """What the run that saved the checkpoint in `path` said of itself. Raises CheckpointError."""
    return read_manifest(path)["metadata"]


def verify(path):
    """Read all of the checkpoint in `path` and compare it with its manifest. Raises CheckpointError naming the file."""
    for name, expected in read_manifest(path)["files"].items():
        verify_file(Path(path) / name, expected)


def verify_file(path, expected):
    """Compare one file with its description. Raises CheckpointError naming it."""
    try:
        found = path.stat().st_size
        if found != expected["bytes"]:
            raise CheckpointError(
                f"{path} has {found} bytes, but was written with {expected['bytes']}: it is cut or changed; use another step"
            )
        if describe_file(path)["sha256"] != expected["sha256"]:
            raise CheckpointError(f"{path} has changed since it was written (other sha256); use another step")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; use another step") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def sync_folder(folder):
    """See to it that names made or changed in `folder` are on the disk. Where folders cannot be synced, nothing happens."""
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
