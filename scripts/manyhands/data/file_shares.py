"""Ways to bring its share of a file of tokens (see `token_file`) to each rank. All give the same bytes.

    share(n, rank, world_size)                        slice: where this rank's share begins and ends
    memory_map(path)[share(...)]                      each rank reads for itself; nothing is said between ranks
    read_own_file(folder, rank, world_size)           one file per rank, written before by write_own_files()
    read_mpi_io(path, comm)                           MPI reads one file for all ranks together
    scatter_from_readers(path, n_readers, ranks)      few ranks read and send the others theirs

The shares are contiguous; they differ by at most one token, and together are the file.
"""

import hashlib
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from manyhands.data.shakespeare import DataError
from manyhands.data.token_file import DTYPES, compare, describe_tokens, memory_map, write_tokens
from manyhands.launch.ranks import Agreement

AT_ONCE = 2**30  # bytes per call of MPI: many libraries count in 32 bits


def share(n, rank, world_size):
    """This rank's slice of n things in a row; the first n % world_size ranks have one more. Raises ValueError."""
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
    """This rank's share from its own file in `folder`: tensor [b], its sha256 checked. Raises DataError."""
    path = _own_file(folder, rank, world_size)
    if not path.exists():
        sets = sorted(int(other.stem[-5:]) for other in Path(folder).glob(f"tokens-{rank:05d}-of-*.bin"))
        held = f"files for {' and for '.join(map(str, sets))} ranks" if sets else "none"
        raise DataError(
            f"{folder} does not hold a file for rank {rank} of {world_size} ranks but {held}; write them with "
            "write_own_files()"
        )
    tokens = describe_tokens(path)
    content = np.fromfile(path, np.dtype(tokens.dtype).newbyteorder("<"))
    compare(tokens, hashlib.sha256(content).hexdigest())
    return torch.from_numpy(content)


def read_mpi_io(path, comm, at_once=AT_ONCE):
    """This rank's share of `path` by MPI's collective read: tensor [b]. All ranks of `comm` (mpi4py) call it.

    MPI may let few processes touch the disk, in large pieces, and pass on what they read ("two-phase I/O"): so the
    ranks must call together, also those that are done, in rounds of at most `at_once` bytes each.
    Raises DataError, on all ranks alike; ValueError without an MPI world.
    """
    if comm is None:
        raise ValueError("read_mpi_io needs an MPI world; start with mpiexec -n 4 python ...")
    from mpi4py import MPI

    agreement = _OverMPI(comm, None, DataError)
    tokens = agreement.gather(agreement.all(lambda: describe_tokens(path) if comm.rank == 0 else None))[0]
    mine = share(tokens.count, comm.rank, comm.size)
    content = np.empty(mine.stop - mine.start, np.dtype(tokens.dtype).newbyteorder("<"))
    rest, offset = memoryview(content.view(np.uint8)), mine.start * tokens.itemsize
    longest = share(tokens.count, 0, comm.size).stop * tokens.itemsize  # rank 0's
    rounds = -(-longest // at_once)

    def read():
        try:
            missing = _read_together(MPI, comm, path, offset, rest, rounds, at_once)
        except MPI.Exception as error:
            why = MPI.Get_error_string(error.Get_error_class())
            raise DataError(f"MPI cannot read {path} ({why}); put it where every node sees it") from None
        if missing:
            raise DataError(f"{path} ends {missing} bytes before the share of rank {comm.rank} does; copy it again")

    agreement.all(read)
    return torch.from_numpy(content)


class _OverMPI(Agreement):
    """Among the ranks of a communicator, which need no process group of torch's."""

    def gather(self, value):
        return self.ranks.allgather(value)


def _read_together(MPI, comm, path, offset, rest, rounds, at_once):
    """Fill `rest` from `offset` on. Returns how many bytes were not there. Raises MPI.Exception."""
    missing, failure = 0, None
    file = MPI.File.Open(comm, str(path), MPI.MODE_RDONLY)
    for begin in range(0, rounds * at_once, at_once):
        piece, status = rest[begin : begin + at_once], MPI.Status()
        try:
            file.Read_at_all(offset + begin, [piece, MPI.BYTE], status)
            missing += len(piece) - status.Get_count(MPI.BYTE)
        except MPI.Exception as error:
            failure = failure or error  # and on: the others wait for this rank in every round
    file.Close()
    if failure:
        raise failure
    return missing


def scatter_from_readers(path, n_readers, ranks):
    """This rank's share of `path`, which only `n_readers` ranks read: tensor [b], on the CPU. All ranks call it.

    The ranks form `n_readers` rows of neighbours; the first of each row reads what its row needs and sends it on, as a
    scatter does (torch's own wants equal parts). With one reader per node, each byte enters each node once.
    Raises DataError, on all ranks alike; ValueError, before anything is sent, if `n_readers` is not 1 to world_size.
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
    if any(other and (other.count, other.sha256) != (tokens.count, tokens.sha256) for other in found):
        raise DataError(
            f"{tokens.path} differs between the nodes of ranks {[row.start for row in rows]}; copy it again"
        )
    # as bytes: gloo does not send uint16
    mine = share(tokens.count, ranks.rank, n)
    mine_b = torch.empty((mine.stop - mine.start) * tokens.itemsize, dtype=torch.uint8)
    if reads:
        whole = memory_map(path)
        parts = [whole[share(tokens.count, r, n)].view(torch.uint8) for r in range(row.start, row.stop)]
        sends = [dist.isend(part, row.start + i) for i, part in enumerate(parts) if i and len(part)]
        mine_b.copy_(parts[0])
        for send in sends:
            send.wait()
    elif len(mine_b):
        dist.recv(mine_b, row.start)
    return mine_b.view(DTYPES[tokens.dtype])
