"""The tensors of a checkpoint on disk: safetensors files by torch.distributed.checkpoint (DCP), which hold no code.

    write_tensors(folder, tensors, group)     # all ranks; each writes what it owns, replicas are written once
    read_tensors(folder, tensors, group)      # all ranks; in place; from any number of ranks to any other
    whole_tensors(folder, "model.")           # one process: {name: the full tensor on the CPU}

Each rank writes one file, whose header says which piece of which tensor lies where: there is no pickle to trust. (DCP's
own format has one, `.metadata`, and its reader runs what is in it.) A rank needs room in its host's memory for its file
once more while it writes.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata

from manyhands.checkpoint.manifest import CheckpointError, read_manifest

Tensors = Mapping[str, torch.Tensor]


def files_of_rank(folder: Path, rank: int) -> list[Path]:
    """What `rank` has written into `folder`: one file, or none where other ranks have written all that it holds."""
    return sorted(folder.glob(f"shard-{rank + 1:05d}-*.safetensors"))


def read_index(folder: Path | str) -> Metadata:
    """DCP's description of the tensors in `folder`: names, shapes, and where each piece lies, from the files' headers.

    Raises CheckpointError where a file does not say, or the pieces of a tensor are not the whole of it.
    """
    return _Reader(Path(folder)).read_metadata()


class _Reader(HuggingFaceStorageReader):
    """DCP's reader, of the files that the manifest lists and no others, and only if they hold all of each tensor."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        listed = {self.folder / name for name in read_manifest(self.folder).files}
        try:
            index = super().read_metadata()
        except Exception as error:  # noqa: BLE001 - a doctored header may raise anything
            raise CheckpointError(
                f"{self.folder} is refused, for a file of it does not only hold tensors: {error}"
            ) from None
        foreign = {Path(piece.relative_path) for piece in index.storage_data.values()} - listed
        if foreign:
            raise CheckpointError(f"{min(foreign)} is not in the manifest; remove it, or use another step")
        # so no shape asks for more room than the files take, and no number is left as it was
        for name, entry in index.state_dict_metadata.items():
            pieces = {tuple(chunk.offsets): chunk.sizes.numel() for chunk in entry.chunks}
            if len(pieces) < len(entry.chunks) or sum(pieces.values()) != entry.size.numel():
                raise CheckpointError(f"{self.folder} does not hold all of {name}; use another step")
        return index


def write_tensors(folder: Path, tensors: Tensors, group: dist.ProcessGroup) -> None:
    """Write {name: tensor or DTensor} of all ranks into `folder`. All ranks of `group` call it, each with its own
    names.

    A tensor that several ranks hold is written by one of them. Every file is on the disk when this returns.
    Raises CheckpointException (no Exception!) on all ranks if one of them failed: see `failures_of`.
    """
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    # several names may stand for one step counter, and safetensors takes no memory twice
    own = {name: tensor.clone() if tensor.ndim == 0 else tensor for name, tensor in tensors.items()}
    dcp.save(own, storage_writer=writer, planner=planner, process_group=group)


def read_tensors(folder: Path, tensors: Tensors, group: dist.ProcessGroup | None, no_dist: bool = False) -> None:
    """Fill {name: tensor or DTensor} in place from `folder`. All ranks of `group` call it, each with its own names.

    Each rank reads the pieces that overlap with its own. Raises CheckpointException as `write_tensors`.
    """
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(dict(tensors), storage_reader=_Reader(folder), planner=planner, process_group=group, no_dist=no_dist)


def failures_of(error: CheckpointException) -> dict[int, BaseException]:
    """{rank: exception} behind a CheckpointException of DCP."""
    return {rank: wrapped[0] for rank, wrapped in error.failures.items()}


def whole_tensors(folder: Path | str, prefix: str = "") -> dict[str, torch.Tensor]:
    """{name without prefix: the full tensor on the CPU} of all names that start with `prefix`, in one process.

    Verify the checkpoint first. Raises CheckpointError.
    """
    folder = Path(folder)
    wanted = {name: entry for name, entry in read_index(folder).state_dict_metadata.items() if name.startswith(prefix)}
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in wanted.items()}
    try:
        with warnings.catch_warnings():  # that one process is meant, DCP says at each call
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            read_tensors(folder, tensors, None, no_dist=True)
    except CheckpointException as error:
        raise CheckpointError(f"{folder} cannot be read: {failures_of(error)[0]}") from None
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
