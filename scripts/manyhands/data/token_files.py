"""Tokens in files: how they lie there, how each rank comes to its share of them, and how to read ahead.

    write_tokens("data/tokens.bin", ids)              # one process; 2 bytes per token below 65,536, else 4
    verify_tokens("data/tokens.bin")                  # reads all of it: has a byte changed?

`tokens.bin` holds the ids as raw little-endian numbers, `tokens.bin.json` says what they are. Raw, so that every
program can read it (`numpy.fromfile(path, "<u2")`) and every rank knows where its share begins without reading what
lies before it. Shares are contiguous, differ by at most one token, and together are the file. Ways to them:

    memory_map(path)[share(n, rank, world_size)]      each rank reads for itself, without communication
    read_own_file(folder, rank, world_size)           one file per rank, written before by write_own_files()
    read_mpi_io(path, comm)                           MPI reads one file for all ranks together
    scatter_from_readers(path, n_readers, ranks)      few ranks read and send the others theirs

    with Prefetch(batches, depth=2) as ahead:         # a thread reads the next batches while this one is computed
        for batch in ahead:
            ...
    print(ahead.waited_s, ahead.read_s)               # without prefetch, the loop would have waited read_s
"""

import hashlib
import os
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from pydantic import Field, model_validator

from manyhands.course.folders import write_whole
from manyhands.data.schema import Count, Schema, Sha256, open_regular
from manyhands.data.shakespeare import DataError
from manyhands.launch.program import explained
from manyhands.launch.ranks import Agreement

DTYPES = {"uint16": torch.uint16, "uint32": torch.uint32}
END = object()  # what reading gives behind the last batch


class Tokens(Schema):
    """The description of a file of tokens; all except `path` is in its .json, or in a prepared text's manifest."""

    format: Literal["manyhands tokens 1"] = "manyhands tokens 1"
    count: Count  # tokens
    dtype: Literal["uint16", "uint32"]  # little-endian
    largest: int = Field(ge=-1, lt=2**32)  # the largest id, -1 if there is none: a vocabulary must be larger
    sha256: Sha256  # of all bytes of the file
    path: str = Field("", exclude=True)

    @model_validator(mode="after")
    def _agrees(self):
        if (self.count == 0) != (self.largest == -1):
            raise ValueError(f"count is {self.count}, and largest is {self.largest}")
        if self.dtype == "uint16" and self.largest >= 2**16:
            raise ValueError(f"largest is {self.largest}, and dtype is uint16")
        return self

    @property
    def itemsize(self):
        """Bytes per token."""
        return DTYPES[self.dtype].itemsize

    def at(self, path):
        """These tokens as they lie in the file `path`: its size is checked. Raise DataError."""
        with explained(DataError, "write both files anew with write_tokens()"), open_regular(path) as file:
            num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes != self.count * self.itemsize:
            why = f"{path} has {num_bytes} bytes, but {self.count} tokens of {self.itemsize} bytes were written"
            raise DataError(f"{why}; it is cut or changed: copy it again")
        return self.model_copy(update={"path": str(path)})

    def verify(self):
        """Read all of the file and compare it with its sha256: these tokens. Raise DataError."""
        with open_regular(self.path) as file:
            _compare(self, hashlib.file_digest(file, "sha256").hexdigest())
        return self


def write_tokens(path, ids):
    """Write `ids` (whole numbers, [N]) to `path` and what they are to `path`.json: Tokens. One process calls it.

    Both are complete or not there under these names. Raise ValueError for what is no row of ids below 2^32, OSError.
    """
    ids = np.asarray(ids)
    lowest, largest = (int(ids.min()), int(ids.max())) if ids.size else (0, -1)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu") or lowest < 0 or largest >= 2**32:
        why = f"{path} takes one row of ids from 0 to {2**32 - 1}"
        raise ValueError(f"{why}, not {ids.dtype} of shape {ids.shape} from {lowest} to {largest}")
    dtype = "uint16" if largest < 2**16 else "uint32"
    content = np.ascontiguousarray(ids, dtype=np.dtype(dtype).newbyteorder("<"))
    sha256 = hashlib.sha256(content).hexdigest()
    tokens = Tokens(path=str(path), count=len(ids), dtype=dtype, largest=largest, sha256=sha256)
    path, beside = Path(path), Path(f"{path}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    beside.unlink(missing_ok=True)  # an old one must not describe the new file, should this end here
    write_whole(path, content.data if len(ids) else b"")
    write_whole(beside, tokens.content())
    return tokens


def describe_tokens(path):
    """The Tokens in `path`, by its .json and its size; their bytes are not read. Raise DataError naming the file."""
    beside = Path(f"{path}.json")
    with explained(DataError, "write both files anew with write_tokens()", beside):
        tokens = Tokens.read(beside)
    return tokens.at(path)


def memory_map(path):
    """All tokens of `path` as a tensor [N], torch.uint16 or uint32, of which only what is looked at is read.

    Ranks of one node share the pages that were read. Slice first, then `.long()`: torch computes next to nothing with
    these two dtypes. Raise DataError naming the file if its size is wrong; its bytes are checked by `verify_tokens`.
    """
    tokens = describe_tokens(path)
    return torch.from_file(str(path), shared=False, size=tokens.count, dtype=DTYPES[tokens.dtype])


def verify_tokens(path):
    """Read all of `path` and compare it with its sha256: Tokens. Raise DataError naming the file."""
    return describe_tokens(path).verify()


def _compare(tokens, sha256):
    """Raise DataError if the bytes that were read have another sha256."""
    if sha256 != tokens.sha256:
        raise DataError(f"{tokens.path} has changed since it was written (other sha256); copy it again")


def share(n, rank, world_size):
    """This rank's slice of n things in a row; the first n % world_size ranks have one more. Raise ValueError."""
    if n < 0 or not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} of {world_size} has no share of {n} things; use ranks 0 to {world_size - 1}")
    each, more = divmod(n, world_size)
    begin = rank * each + min(rank, more)
    return slice(begin, begin + each + (rank < more))


def _own_file(folder, rank, world_size):
    return Path(folder) / f"tokens-{rank:05d}-of-{world_size:05d}.bin"


def write_own_files(folder, ids, world_size):
    """Write `ids` [N] as one file per rank into `folder`. One process calls it. Raises as `write_tokens`."""
    for rank in range(world_size):
        write_tokens(_own_file(folder, rank, world_size), ids[share(len(ids), rank, world_size)])


def read_own_file(folder, rank, world_size):
    """This rank's share from its own file in `folder`: tensor [b], its sha256 checked. Raise DataError."""
    path = _own_file(folder, rank, world_size)
    if not path.exists():
        there = ", ".join(sorted(other.name for other in Path(folder).glob(f"tokens-{rank:05d}-of-*.bin"))) or "none"
        raise DataError(f"{folder} has no {path.name} for this rank but {there}; write it with write_own_files()")
    tokens = describe_tokens(path)
    content = np.fromfile(path, np.dtype(tokens.dtype).newbyteorder("<"))
    _compare(tokens, hashlib.sha256(content).hexdigest())
    return torch.from_numpy(content)


def read_mpi_io(path, comm):
    """This rank's share of `path` by MPI's collective read: tensor [b]. All ranks of `comm` (mpi4py) call it.

    MPI may let few processes touch the disk, in large pieces, and pass on what they read ("two-phase I/O"): so the
    ranks must call together. A share has less than 2^31 tokens: many libraries count in 32 bits.
    Raise DataError, on all ranks alike; ValueError without an MPI world.
    """
    if comm is None:
        raise ValueError("read_mpi_io needs an MPI world; start with mpiexec -n 4 python ...")
    from mpi4py import MPI

    agreement = _OverMPI(comm, None, DataError)
    tokens = agreement.on_rank_0(lambda: describe_tokens(path))
    mine = share(tokens.count, comm.rank, comm.size)
    content, status = np.empty(mine.stop - mine.start, np.dtype(tokens.dtype)), MPI.Status()

    def read():
        try:
            file = MPI.File.Open(comm, str(path), MPI.MODE_RDONLY)
            file.Read_at_all(mine.start * tokens.itemsize, content, status)
            file.Close()
        except MPI.Exception as error:
            why = MPI.Get_error_string(error.Get_error_class())
            raise DataError(f"MPI cannot read {path} ({why}); put it where every node sees it") from None
        if missing := content.nbytes - status.Get_count(MPI.BYTE):
            raise DataError(f"{path} ends {missing} bytes before the share of rank {comm.rank} does; copy it again")

    agreement.all(read)
    return torch.from_numpy(content)


class _OverMPI(Agreement):
    """Among the ranks of a communicator, which need no process group of torch's."""

    def gather(self, value):
        return self.ranks.allgather(value)

    def on_rank_0(self, action):
        return self.gather(self.all(lambda: action() if self.ranks.rank == 0 else None))[0]


def scatter_from_readers(path, n_readers, ranks):
    """This rank's share of `path`, which only `n_readers` ranks read: tensor [b], on the CPU. All ranks call it.

    The ranks form `n_readers` rows of neighbours; the first of each row reads what its row needs and sends it on, as a
    scatter does (torch's own wants equal parts). With one reader per node, each byte enters each node once.
    Raise DataError, on all ranks alike; ValueError, before anything is sent, if `n_readers` is not 1 to world_size.
    """
    n = ranks.world_size
    if not 1 <= n_readers <= n:
        raise ValueError(f"n_readers={n_readers} of {n} ranks cannot read; use 1 to {n}")
    rows = [share(n, reader, n_readers) for reader in range(n_readers)]
    row = next(row for row in rows if row.start <= ranks.rank < row.stop)
    reads = ranks.rank == row.start

    agreement = Agreement(ranks, None, DataError)
    found = agreement.gather(agreement.all(lambda: describe_tokens(path) if reads else None))
    tokens = found[0]  # rank 0 reads in any case
    if len({other.sha256 for other in found if other}) > 1:
        readers = [row.start for row in rows]
        raise DataError(f"{tokens.path} differs between the nodes of ranks {readers}; copy it again")
    mine = share(tokens.count, ranks.rank, n)
    if reads:
        whole = memory_map(path)
        # as bytes: gloo does not send uint16
        parts = [whole[share(tokens.count, r, n)].view(torch.uint8) for r in range(row.start, row.stop)]
        for send in [dist.isend(part, row.start + i) for i, part in enumerate(parts) if i and len(part)]:
            send.wait()
        return whole[mine].clone()
    mine_b = torch.empty((mine.stop - mine.start) * tokens.itemsize, dtype=torch.uint8)
    if len(mine_b):
        dist.recv(mine_b, row.start)
    return mine_b.view(DTYPES[tokens.dtype])


class Prefetch:
    """Iterate over `batches`, of which a thread holds up to `depth` ready. Same order, nothing lost.

    A thread helps where reading waits for a disk or a network, or computes without Python's lock, as numpy and torch
    mostly do. Where preparing a batch is Python's own work, use a DataLoader with worker processes.

    What the thread's reading raises is raised by `next()`, after the batches that came before it. Leaving the `with`
    block ends the thread, early or late; if it is just reading, that one read is waited for.
    `waited_s`: seconds that `next()` had to wait so far; `read_s`: seconds that the thread spent reading.
    """

    def __init__(self, batches, depth=2):
        """Raise ValueError for a depth below 1."""
        if depth < 1:
            raise ValueError(f"depth={depth} keeps no batch ready; use 1 or more")
        self.depth, self.waited_s, self.read_s = depth, 0.0, 0.0
        self._batches = iter(batches)
        self._ready = deque()  # futures, in order

    def __enter__(self):
        self._thread = ThreadPoolExecutor(1, "prefetch")
        self._ready.extend(self._thread.submit(self._read) for _ in range(self.depth))
        return self

    def __exit__(self, *_):
        self._thread.shutdown(cancel_futures=True)
        self._ready.clear()
        self._batches = None

    def __iter__(self):
        return self

    def __next__(self):
        if not self._ready:  # before the `with` block, or behind the last batch
            raise StopIteration
        begin = time.perf_counter()
        try:
            batch = self._ready[0].result()
        except BaseException:
            self._ready.clear()  # it is raised once
            raise
        finally:
            self.waited_s += time.perf_counter() - begin
        self._ready.popleft()
        if batch is END:
            self._ready.clear()
            raise StopIteration
        self._ready.append(self._thread.submit(self._read))
        return batch

    def _read(self):
        begin = time.perf_counter()
        try:
            return next(self._batches, END)
        finally:
            self.read_s += time.perf_counter() - begin
