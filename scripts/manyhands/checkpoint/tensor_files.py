"""The tensors of a checkpoint on disk, by torch.distributed.checkpoint (DCP), without trusting what lies there.

    write_tensors(folder, tensors, group)     # all ranks; each writes what it owns, copies are written once
    read_tensors(folder, tensors, group)      # all ranks; in place; from any number of ranks to any other
    whole_tensors(folder, "model.")           # one process: {name: the full tensor on the CPU}

DCP's own reader unpickles `.metadata` with all that pickle can do, and loads whatever is no tensor by a full unpickling
(torch 2.13, `filesystem.py` and `default_planner.py`). Here `.metadata` is compared with the manifest's sha256 first, an
unpickler with a list of what may appear reads it, and a checkpoint holds tensors only.
"""

import hashlib
import io
import math
import pickle
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo

from manyhands.checkpoint.manifest import CheckpointError, read_manifest

METADATA = ".metadata"
CLASSES = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        dcp_metadata.Metadata,
        dcp_metadata.MetadataIndex,
        dcp_metadata.TensorStorageMetadata,
        dcp_metadata.ChunkStorageMetadata,
        dcp_metadata.TensorProperties,
        dcp_metadata._MEM_FORMAT_ENCODING,
        dcp_metadata.StorageMeta,
        _StorageInfo,
    )
} | {("torch", "Size"): torch.Size, ("torch.serialization", "_get_layout"): torch.serialization._get_layout}
DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class _ListedUnpickler(pickle.Unpickler):
    """Builds the few plain classes that describe tensors, and refuses every other name that a pickle may call."""

    def find_class(self, module, name):
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if (module, name) not in CLASSES:
            raise pickle.UnpicklingError(f"it calls {module}.{name}")
        return CLASSES[module, name]


def read_tensor_index(folder):
    """DCP's description of the tensors in `folder`: names, shapes, and where each piece lies. Raises CheckpointError."""
    file, files = Path(folder) / METADATA, read_manifest(folder)["files"]
    try:
        content = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    if hashlib.sha256(content).hexdigest() != files.get(METADATA, {}).get("sha256"):
        raise CheckpointError(f"{file} has changed since it was written (other sha256); use another step")
    try:
        metadata = _ListedUnpickler(io.BytesIO(content)).load()
        entries = list(metadata.state_dict_metadata.values())
        pieces = list(metadata.storage_data.values())
        known = all(type(entry) is dcp_metadata.TensorStorageMetadata for entry in entries)
        known = known and all(piece.relative_path in files and not piece.transform_descriptors for piece in pieces)
    except Exception as error:  # noqa: BLE001 - a doctored pickle may raise anything
        raise CheckpointError(f"{file} is refused, for it does not only describe tensors: {error}") from None
    if not known:
        raise CheckpointError(f"{file} is refused, for it points to what is no tensor of this checkpoint")
    return metadata


class _Writer(dcp.FileSystemWriter):
    """DCP's writer; `.metadata` does not record the path on this machine."""

    def storage_meta(self):
        return dcp_metadata.StorageMeta(save_id=self.save_id)


class _Reader(dcp.FileSystemReader):
    """DCP's reader, which takes `.metadata` as `read_tensor_index` lets it through."""

    def __init__(self, folder):
        super().__init__(folder)
        self.folder = Path(folder)

    def read_metadata(self, *args, **kwargs):
        metadata = read_tensor_index(self.folder)
        metadata.storage_meta = dcp_metadata.StorageMeta(load_id=self.load_id)
        return metadata


class _TensorsOnly(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item, value):
        raise CheckpointError(f"{read_item.dest_index.fqn} is no tensor in this checkpoint; it is not read")


def write_tensors(folder, tensors, group):
    """Write {name: tensor or DTensor} of all ranks into `folder`. All ranks of `group` call it, each with its own names.

    A tensor that several ranks hold is written by one of them. Every file is on the disk when this returns.
    Raises CheckpointException (no Exception!) on all ranks if one of them failed: see `failures_of`.
    """
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.save(tensors, storage_writer=_Writer(folder, sync_files=True), planner=planner, process_group=group)


def read_tensors(folder, tensors, group):
    """Fill {name: tensor or DTensor} in place from `folder`. All ranks of `group` call it, each with its own names.

    Each rank reads the pieces that overlap with its own. Raises CheckpointException as `write_tensors`.
    """
    planner = _TensorsOnly(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(tensors, storage_reader=_Reader(folder), planner=planner, process_group=group)


def failures_of(error):
    """{rank: exception} behind a CheckpointException of DCP."""
    return {rank: wrapped[0] for rank, wrapped in error.failures.items()}


def whole_tensors(folder, prefix=""):
    """{name without prefix: the full tensor on the CPU} of all names that start with `prefix`, in one process.

    Verify the checkpoint first. Raises CheckpointError.
    """
    described = read_tensor_index(folder).state_dict_metadata
    wanted = {name: entry for name, entry in described.items() if name.startswith(prefix)}
    needed = sum(math.prod(entry.size) * entry.properties.dtype.itemsize for entry in wanted.values())
    there = sum(about["bytes"] for about in read_manifest(folder)["files"].values())
    if needed > there:  # before room is asked for: a forged shape asks for any amount
        raise CheckpointError(f"{folder} describes tensors of {needed:,} bytes in files of {there:,}; use another step")
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in wanted.items()}
    planner = _TensorsOnly(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings():  # that one process is meant, DCP says at each call
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(tensors, storage_reader=_Reader(folder), planner=planner, no_dist=True)
    except CheckpointException as error:
        cause = failures_of(error)[0]
        if isinstance(
            cause, pickle.UnpicklingError
        ):  # torch's own sentence recommends to run what the file brings along
            cause = "a file of it holds more than tensors, and is not read"
        raise CheckpointError(f"{folder} cannot be read: {cause}") from None
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
