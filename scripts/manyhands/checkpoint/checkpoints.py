"""Checkpoints: complete or absent, never half; written by all ranks, read by any number of them.

    checkpoints = Checkpoints(folder, ranks, keep=2)                                  # all ranks, always
    checkpoints.save(300, tensors, metadata, rank_state, val_loss=1.93)
    path = checkpoints.newest()                                                       # None: no valid checkpoint
    metadata = checkpoints.load(path, tensors, rank_state)                            # in place

One checkpoint is a folder `step-00000300/`: a safetensors file per rank, and `manifest.json` (see `manifest`). It is
written under the name `step-00000300.partial`; every file is synced and hashed; only after all ranks agreed that theirs
are complete, and the files' headers have shown that they cover each tensor once, does rank 0 write the manifest and
rename the folder. A killed run leaves a `.partial` folder, which is never read and which the next save removes.

The files are written and read by torch.distributed.checkpoint (DCP). Each header lists the file's pieces of
tensors, so no pickle is needed. (DCP's own format has one, `.metadata`, and reading it runs its code.) While it writes,
a rank needs host memory for a second copy of its file.

Communication uses a separate gloo group, so that a save in the background does not interfere with the training's.
"""

import errno
import json
import math
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from manyhands.checkpoint import manifest
from manyhands.checkpoint.manifest import CheckpointError, describe_file, read_manifest, step_of, steps_in, verify_file
from manyhands.course.folders import lock
from manyhands.data.schema import visible
from manyhands.launch.program import explained, say
from manyhands.launch.ranks import Agreement, said
from manyhands.measure.tensor_bytes import local_part

REMOVE = "remove this checkpoint, and the run goes on from the one before it"


class Checkpoints:
    """The checkpoints in `folder` (rank 0's counts). All ranks call every method, in the same order.

    `keep`: the number of last ones to keep, in addition to the best. `asynchronous`: `save` copies the tensors to the
    CPU's memory and returns; a thread writes them; what went wrong there is raised by the next call. `timeout_s`: a
    slow disk's.
    """

    def __init__(self, folder, ranks, keep=2, asynchronous=False, timeout_s=1800):
        self.ranks, self.keep, self.asynchronous = ranks, keep, asynchronous
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._agreement = Agreement(ranks, self._group, CheckpointError)
        self.folder = self._agreement.on_rank_0(lambda: Path(folder).absolute())
        self._lock = None  # on rank 0: the open file that holds the folder's lock
        self._writer, self._writing = ThreadPoolExecutor(1, "checkpoint"), None  # a save in the background, a future
        self._verified = None  # verified by `newest`, so `load` need not read it twice
        self._broken = set()  # skipped by `newest`

    def save(self, step, tensors, metadata, rank_state=None, val_loss=None):
        """Write the checkpoint of `step`; one of the same step is replaced.

        `tensors`: {name: Tensor or DTensor}; ranks may hold different names; what several hold is written once.
        `metadata`: what JSON can hold, rank 0's is written. `rank_state`: {name: tensor} of this rank alone, such as
        the state of its random numbers. Raise CheckpointError on all ranks; the older checkpoints stay.
        """
        self.wait()
        json.dumps(metadata)  # a TypeError here is raised on all ranks before any waits
        self.claim()
        partial = self._agreement.on_rank_0(lambda: manifest.make_partial(self.folder, step, self._broken))
        self._broken.clear()
        self._agreement.all(lambda: self._see(partial))
        tensors = dict(tensors) | self._own(rank_state)
        about = (partial, step, metadata, None if val_loss is None else float(val_loss))
        if not self.asynchronous:
            self._write(tensors, *about)
            return
        staged = self._agreement.all(lambda: {n: t.detach().to("cpu", copy=True) for n, t in tensors.items()})
        self._writing = self._writer.submit(self._write, staged, *about)  # finishes even if the program ends

    def wait(self):
        """Wait until nothing is being written. Raise CheckpointError on all ranks if the last save failed."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            if error := writing.exception():
                raise CheckpointError(str(error))

    def claim(self):
        """Lock the folder for this run until it ends; otherwise the first `save` does so.

        Raise CheckpointError on all ranks if another run that still lives writes there, or if it cannot be written.
        """
        self._agreement.on_rank_0(self._hold)

    def close(self):
        """Wait for a save in the background, ignoring its errors, and release the folder and the group."""
        self._writer.shutdown()
        if self._lock is not None:
            self._lock.close()
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._lock = self._group = None

    def empty(self):
        """Return whether the folder holds no checkpoint at all, not even one that `newest` would pass over."""
        return self._agreement.on_rank_0(lambda: not steps_in(self.folder))

    def newest(self):
        """Return the newest undamaged checkpoint, or None. Rank 0 reports those that it skipped."""
        self.wait()
        for path in self._agreement.on_rank_0(lambda: steps_in(self.folder)):
            try:
                self._verify(path)
            except CheckpointError as error:
                self._broken.add(path)
                if self.ranks.rank == 0:
                    say(f"step {step_of(path)} is passed over: {error}")
                continue
            self._verified = path
            return path
        return None

    def load(self, path, tensors, rank_state=None, layout=None):
        """Fill `tensors` in place from the checkpoint in `path`, whatever ranks saved it, and return its metadata.

        `rank_state` is filled where the checkpoint has the like of it for every rank: the number of ranks and
        metadata["layout"] must be the same (layout none: the number decides). metadata["rank_state_restored"] says if
        it was. Raise CheckpointError on all ranks, before a tensor has changed, if it is damaged or does not fit, and
        afterwards if a number is NaN or a weight infinite.
        """
        self.wait()
        path = Path(path)
        if path != self._verified:
            self._verify(path)
        self._verified = None
        metadata = self._agreement.on_rank_0(lambda: read_manifest(path).metadata)
        saved = self._agreement.all(lambda: {name: _kind(entry) for name, entry in _index(path).items()})
        self._refuse_misfit(path, tensors, saved)
        own = self._own(rank_state)
        same_place = metadata["world_size"] == self.ranks.world_size and layout in (None, metadata["layout"])
        if same_place:
            self._agreement.all(lambda: self._refuse_odd_state(path, own, saved))
        restored = same_place and all(self._agreement.gather(bool(own) and own.keys() <= saved.keys()))
        try:
            read_tensors(path, dict(tensors) | (own if restored else {}), self._group)
        except CheckpointException as error:  # on all ranks
            raise CheckpointError(f"{path} cannot be read: {_first_failure(error)}") from None
        self._agreement.all(lambda: self._refuse_nan(path, tensors))
        return metadata | {"rank_state_restored": restored}

    def _hold(self):
        """Hold the folder's lock, and take it again if the folder has been removed."""
        _refuse_name(self.folder)
        if self._lock is None or not os.path.exists(self._lock.name):
            with explained(CheckpointError, "name another folder", self.folder, "written"):
                self._lock = lock(self.folder, f"process {os.getpid()} on {self.ranks.host}")

    def _write(self, tensors, partial, step, metadata, val_loss):
        """Write and describe the files on all ranks; then rank 0 commits the checkpoint."""
        try:
            try:
                wanted = write_tensors(partial, tensors, self._group)
            except CheckpointException as error:  # on all ranks
                self._explain(error, step, partial)
            described = self._agreement.gather(self._agreement.all(lambda: self._describe_own(partial)))
            files = {name: about for own in described for name, about in own.items()}

            def complete():
                prove(partial, wanted)  # before an older one goes
                manifest.complete(partial, step, val_loss, metadata, files, self.keep)

            self._agreement.on_rank_0(complete)
        except CheckpointError:
            self._agreement.on_rank_0(lambda: shutil.rmtree(partial, ignore_errors=True))
            raise

    def _describe_own(self, partial):
        # one file, or none if other ranks have written all of this rank's tensors
        return {path.name: describe_file(path) for path in partial.glob(f"shard-{self.ranks.rank + 1:05d}-*")}

    def _explain(self, error, step, partial):
        """Raise the CheckpointError for DCP's exception, which all ranks have."""
        self._agreement.on_rank_0(lambda: shutil.rmtree(partial, ignore_errors=True))
        free = self._agreement.on_rank_0(lambda: shutil.disk_usage(self.folder).free)
        if any(getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT) for cause in _failures(error).values()):
            why = f"{self.folder} is full: step {step} needs more, and {free / 1e6:.1f} MB are free; free some"
            raise CheckpointError(f"{why}, keep fewer, or name another folder (the checkpoints that are there stay)")
        raise CheckpointError(f"step {step} could not be saved in {self.folder}: {_first_failure(error)}")

    def _verify(self, path):
        """`manifest.verify` by all ranks together, each reading its share of the files."""
        files = self._agreement.on_rank_0(lambda: read_manifest(path).files)
        mine = sorted(files)[self.ranks.rank :: self.ranks.world_size]
        self._agreement.all(lambda: [verify_file(path / name, files[name]) for name in mine])

    def _refuse_misfit(self, path, tensors, saved):
        here = {}
        for own in self._agreement.gather({name: _kind(tensor) for name, tensor in tensors.items()}):
            here |= own
        there = {name: kind for name, kind in saved.items() if not name.startswith("rank.")}
        if odd := [name for name in sorted(here | there) if here.get(name) != there.get(name)]:
            told = [f"{n} is {there.get(n, 'missing')} there and {here.get(n, 'missing')} here" for n in odd[:3]]
            rest = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
            why = f"{path} does not fit this run: {', '.join(told)}{rest}"
            raise CheckpointError(f"{why}; use the options it was saved with, or another folder")

    def _refuse_odd_state(self, path, own, saved):
        for name, tensor in own.items():
            if saved.get(name, _kind(tensor)) != _kind(tensor):
                why = f"the state of its random numbers is damaged ({name} is {saved[name]}, not {_kind(tensor)})"
                raise CheckpointError(f"{path} cannot be resumed from: {why}; {REMOVE}")

    def _refuse_nan(self, path, tensors):
        for name, tensor in tensors.items():
            if (part := local_part(tensor)).numel() and part.is_floating_point():
                largest = torch.linalg.vector_norm(part, math.inf)  # it allocates nothing, and NaN stays NaN
                if largest.isnan() or (largest.isinf() and name.startswith("model.")):
                    raise CheckpointError(f"{path} cannot be resumed from: {name} holds NaN or infinity; {REMOVE}")

    def _see(self, partial):
        if not partial.is_dir():
            why = f"rank {self.ranks.rank} on {self.ranks.host} does not see {partial}, which rank 0 made"
            raise CheckpointError(f"{why}; checkpoints need a folder that all nodes share: name one")

    def _own(self, rank_state):
        return {f"rank.{self.ranks.rank}.{name}": tensor for name, tensor in (rank_state or {}).items()}


def _failures(error):
    """Return {rank: exception} of DCP's CheckpointException."""
    return {rank: wrapped[0] for rank, wrapped in error.failures.items()}


def _first_failure(error):
    return said(*min(_failures(error).items(), key=lambda item: item[0]))


def _kind(tensor):
    """Return shape and type of a tensor, or of DCP's description of one."""
    dtype = tensor.dtype if isinstance(tensor, torch.Tensor) else tensor.properties.dtype
    return f"{list(tensor.size() if isinstance(tensor, torch.Tensor) else tensor.size)} {dtype}"


def own_chunk(tensor):
    """Return where this rank's share of a tensor or DTensor lies in the whole, as DCP writes it; None: it has none.

    DCP's own offsets are wrong where FSDP has cut shares of tensor ranks that are not equally large (torch 2.13).
    """
    offsets, left = [0] * tensor.ndim, list(tensor.size())
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        # FSDP cuts what tensor ranks have left, although its axis stands before theirs (`_StridedShard`)
        for axis in sorted(range(mesh.ndim), key=lambda axis: hasattr(placements[axis], "split_factor")):
            if not placements[axis].is_replicate():
                dim = placements[axis].dim
                most = -(-left[dim] // mesh.size(axis))  # the last ranks have less, or nothing
                start = min(left[dim], most * mesh.get_local_rank(axis))
                offsets[dim] += start
                left[dim] = min(most, left[dim] - start)
        left = tensor.to_local().size()
        if 0 in left:
            return None
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(left))


class SavePlanner(dcp.DefaultSavePlanner):
    """DCP's planner, with the pieces of `own_chunk`."""

    def __init__(self):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self):
        items = []
        for name, tensor in self.state_dict.items():
            if (chunk := own_chunk(tensor)) is not None:
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                about = TensorWriteData(chunk, TensorProperties.create_from_tensor(local), tensor.size())
                index = MetadataIndex(name, chunk.offsets)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=about))
        self.plan = SavePlan(items)
        return self.plan


class LoadPlanner(dcp.DefaultLoadPlanner):
    """DCP's planner, with the pieces of `own_chunk`. The files hold all names, in the right sizes."""

    def __init__(self):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self):
        items = []
        for name, tensor in self.state_dict.items():
            if (chunk := own_chunk(tensor)) is not None:
                items += create_read_items_for_chunk_list(name, self.metadata.state_dict_metadata[name], [chunk])
        return LoadPlan(items)


def write_tensors(folder, tensors, group):
    """Write {name: tensor or DTensor} of all ranks into `folder`: {name: DCP's description}. All ranks of `group` call.

    Names may differ between ranks; a tensor that several ranks hold is written by one of them. Every file is on the
    disk when this returns. Raise CheckpointException (no Exception!) on all ranks if one of them failed.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    # several names may stand for one step counter, and safetensors takes no memory twice
    own = {name: tensor.clone() if tensor.ndim == 0 else tensor for name, tensor in tensors.items()}
    return dcp.save(own, storage_writer=writer, planner=SavePlanner(), process_group=group).state_dict_metadata


def read_tensors(folder, tensors, group, no_dist=False):
    """Fill {name: tensor or DTensor} in place from `folder`. All ranks of `group` call it, each with its own names.

    Each rank reads the pieces that overlap with its own. Raise CheckpointException as `write_tensors`.
    """
    reader = HuggingFaceStorageReader(str(folder))
    dcp.load(dict(tensors), storage_reader=reader, planner=LoadPlanner(), process_group=group, no_dist=no_dist)


def prove(folder, wanted):
    """Raise CheckpointError unless the files in `folder` hold each tensor of `wanted`, what `write_tensors` gave, once.

    It reads the files' headers, and takes neither room nor time for what is in the tensors.
    """
    cure = "the checkpoints that are there stay: go on from one of them with other numbers of ranks"
    found = {name: _kind(entry) for name, entry in _index(folder, cure).items()}
    for name, entry in wanted.items():
        if found.get(name) != _kind(entry):
            raise CheckpointError(_not_whole(folder, name, cure))


def _index(folder, cure="use another step"):
    """Return {name: DCP's description of the tensor} from the files' headers. Raise CheckpointError."""
    return _metadata(folder, cure).state_dict_metadata


def _metadata(folder, cure="use another step"):
    _refuse_name(folder)
    try:
        found = HuggingFaceStorageReader(str(folder)).read_metadata()
    except Exception as error:  # noqa: BLE001 - DCP trusts what a header says: all kinds
        raise CheckpointError(f"{folder} cannot be read ({visible(said(None, error))}); {cure}") from None
    for name, entry in found.state_dict_metadata.items():
        if not _is_whole(entry):  # DCP would silently skip a tensor that no file holds
            raise CheckpointError(_not_whole(folder, name, cure))
    return found


def _refuse_name(folder):
    """Raise CheckpointError for a folder that safetensors could write into, and not read from."""
    try:
        str(folder.absolute()).encode()
    except UnicodeEncodeError:
        said = "its name is not UTF-8, in which safetensors reads names; rename it, or name another folder"
        raise CheckpointError(f"{folder} can hold no checkpoint: {said}") from None


def _not_whole(folder, name, cure):
    return f"{folder} does not hold all of {visible(name)}, or some of it twice; {cure}"


def _is_whole(entry):
    """Return whether the pieces of a tensor cover it exactly once: together as large, and no two in one place."""
    if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
        return False
    if any(len(c.offsets) != len(c.sizes) or min(c.offsets, default=0) < 0 for c in entry.chunks):
        return False
    if len(entry.chunks) == 1:
        return True
    pieces = [tuple(zip(c.offsets, c.sizes, strict=True)) for c in entry.chunks if c.sizes.numel()]
    before = []  # those that reach as far along the first axis
    for piece in sorted(pieces):
        before = [other for other in before if sum(other[0]) > piece[0][0]]
        if any(all(sum(a) > b[0] and sum(b) > a[0] for a, b in zip(piece, o, strict=True)) for o in before):
            return False
        before.append(piece)
    return True


def whole_tensors(folder, prefix=""):
    """Return {name without prefix: full tensor on the CPU} of all names that start with `prefix`, in one process.

    Verify the checkpoint first. Raise CheckpointError.
    """
    names, read = tensors_in(folder, prefix)
    return {name: read(name) for name in names}


def tensors_in(folder, prefix=""):
    """Return (names that start with `prefix`, without it; a function from one of them to the full tensor on the CPU).

    Files are opened once, and a tensor's pieces are read when it is asked for. Both raise CheckpointError.
    """
    found, files, pieces = _metadata(folder), {}, {}
    for index, about in found.storage_data.items():
        pieces.setdefault(index.fqn, []).append((index.offset, about.relative_path))

    def read(name):
        entry = found.state_dict_metadata[prefix + name]
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        try:
            for offsets, file in pieces[prefix + name]:
                if file not in files:
                    files[file] = safe_open(Path(folder, Path(file).name), "pt")  # DCP has the folder in front
                part = files[file].get_tensor(prefix + name)
                whole[tuple(slice(at, at + n) for at, n in zip(offsets, part.shape, strict=True))] = part
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder} cannot be read: {said(None, error)}") from None
        return whole

    return [name.removeprefix(prefix) for name in found.state_dict_metadata if name.startswith(prefix)], read
