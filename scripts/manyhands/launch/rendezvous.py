"""How the ranks find each other: a store that all of them reach, before there is a process group.

The ranks of a notebook on one node meet in a file that only their user can open: any user of the node may write to a
port on loopback. Else, where all ranks are on one node, nothing listens beyond loopback: `tcp://127.0.0.1` would open
the port on every interface, so rank 0 binds the socket itself and hands it to the store.
"""

from __future__ import annotations

import secrets
import socket
import sys
import warnings
from dataclasses import replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.launch import pmi_lines, settings
from manyhands.launch.allocation import LOOPBACK, loopback_mpi, own_address
from manyhands.launch.launchers import LaunchError, RankInfo, launcher_named

if TYPE_CHECKING:
    import torch.distributed as dist

# at known addresses: rank 0 must not close one while others come back
_stores: dict[tuple[str | None, int | None], dist.Store] = {}
_joins = count()  # such a store outlives a join: each join has a corner of its own in it
_cell = 0  # number of the notebook's cell that runs: all ranks agree on it
_listener: socket.socket | None = None  # rank 0's, from the start of a notebook's ranks until their first join


def listen() -> str:
    """Rank 0 of a notebook on several nodes: bind the socket of the store of all joins; returns "host:port"."""
    global _listener
    _listener = _bound(own_address(), 0)
    return "{}:{}".format(*_listener.getsockname())


def begin_cell(number: int) -> None:
    """The joins that follow are of cell `number`: its ranks meet under that number, whatever an earlier cell left."""
    global _cell, _joins
    _cell, _joins = number, count()


class Unreachable(LaunchError):
    """This one rank cannot meet the others. They do not know of it, so that it must say so itself."""

    status = 2


class Lost(Unreachable):
    """The others did not come, or have ended: the same start may work the next time."""

    status = 1


def store_for(info: RankInfo, timeout_s: float) -> dist.Store:
    """A store shared by the ranks of `info`. All ranks call it.

    Raises Unreachable where rank 0 cannot listen, or where this rank does not reach it within `timeout_s`.
    """
    import torch.distributed as dist  # late: a notebook's rank brings torch when a lesson joins

    if info.launcher == "notebook":
        where = settings.store_address()
        if where not in _stores:
            alone = where[1] == 0  # on one node: a file
            _stores[where] = dist.FileStore(where[0]) if alone else _tcp_store(info, *where, _listener, timeout_s)
            _stores[where].set_timeout(timedelta(seconds=timeout_s))
        return dist.PrefixStore(f"cell{_cell}/join{next(_joins)}", _stores[where])
    if info.world_size == 1:
        return dist.HashStore()  # nobody else to reach: nothing listens
    if info.mpi:
        world = import_mpi(info).COMM_WORLD
        listener = _bound(LOOPBACK if info.single_node else own_address(), 0) if info.rank == 0 else None
        # A random corner, so that a stranger on the same node does not write into it by accident.
        found = (*listener.getsockname(), f"manyhands/{secrets.token_hex(8)}") if listener else None
        address, port, corner = world.bcast(found)
        return dist.PrefixStore(corner, _tcp_store(info, address, port, listener, timeout_s))
    hosted = not info.agent_store  # else torchrun's agent listens already
    address = LOOPBACK if hosted and info.single_node else info.master_addr
    port = info.master_port
    if (address, port) not in _stores:
        listener = _bound(address, port) if hosted and info.rank == 0 else None
        _stores[address, port] = _tcp_store(info, address, port, listener, timeout_s)
    return dist.PrefixStore(f"manyhands/{info.key}/join{next(_joins)}", _stores[address, port])


def _tcp_store(info, address, port, listener, timeout_s):
    """A store that rank 0 serves on `listener`, and to which the others connect."""
    import torch.distributed as dist  # late, as above

    served = {"is_master": True, "master_listen_fd": listener.detach()} if listener else {"is_master": False}
    patience = timedelta(seconds=timeout_s)
    try:
        return dist.TCPStore(address, port, info.world_size, timeout=patience, wait_for_workers=False, **served)
    except RuntimeError as error:  # DistNetworkError and DistStoreError are RuntimeErrors
        raise Unreachable(
            f"rank {info.rank} did not reach rank 0 at {address}:{port} within {timeout_s:g} s;"
            " is rank 0 still alive, and may the nodes talk to each other on this port?"
        ) from error


def ask_mpi(info: RankInfo) -> RankInfo:
    """`info` completed by MPI's own world. Raises LaunchError where the two contradict each other.

    N processes that each see "rank 0 of 1" come from the mpiexec of one MPI and the mpi4py of another.
    """
    mpi = import_mpi(info)
    world = mpi.COMM_WORLD
    if info.world_size is None and world.size == 1:  # each process is alone, and the others do not know of it
        raise Unreachable(
            f"{info.launcher} started this process as rank {info.rank} and does not say of how many, and MPI says"
            f" rank 0 of 1: the launcher and mpi4py ({mpi.get_vendor()[0]}) belong to different MPIs;"
            " start with `python scripts/launch.py --starter torchrun`"
        )
    if world.rank != info.rank or world.size != (info.world_size or world.size):
        size = f" of {info.world_size}" if info.world_size else ""
        library = mpi.get_vendor()[0]
        raise LaunchError(
            f"{info.launcher} started this process as rank {info.rank}{size}, but MPI says rank {world.rank} of"
            f" {world.size}: the launcher and mpi4py ({library}) belong to different MPIs;"
            f" use {Path(sys.prefix) / 'bin' / 'mpiexec'}, or under Slurm `srun --mpi=pmi2`"
        )
    here = world.Split_type(mpi.COMM_TYPE_SHARED)
    local_rank, local_size = here.rank, here.size
    here.Free()
    return replace(info, world_size=world.size, local_rank=local_rank, local_world_size=local_size)


def import_mpi(info: RankInfo):
    """mpi4py's MPI. On one node the MPICH of the PyPI wheel is told to stay on loopback before it starts.

    Raises LaunchError where mpi4py or its MPI library is missing.
    """
    if info.single_node and launcher_named(info.launcher).mpi == "wheel":
        settings.set_default(**loopback_mpi())
    # Perlmutter's default of 1 aborts an MPI without Cray's GPU library; ours carries what lies on the host alone.
    settings.set_variables(MPICH_GPU_SUPPORT_ENABLED="0")
    pmi_lines.shorten()
    try:
        with warnings.catch_warnings():  # mpi4py warns of a foreign launcher on each rank; `ask_mpi` says it once
            warnings.simplefilter("ignore", RuntimeWarning)
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"{info.launcher} started this process but MPI does not load ({error}); `pip install mpi4py mpich`,"
            " or start with `python -m torch.distributed.run --standalone --nproc-per-node 4`"
        ) from error
    return MPI


def _bound(address, port):
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
    except OSError as error:
        raise Unreachable(f"rank 0 cannot listen on {address}:{port} ({error.strerror}); start again") from error
    listener.listen(1024)
    return listener
