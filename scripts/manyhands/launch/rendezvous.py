"""Connect the ranks through a store that all of them reach, before there is a process group.

The ranks of a notebook on one node use a file that only their user can open, because any user of the node may write to
a port on loopback. Other ranks on a single node listen on loopback only: `tcp://127.0.0.1` would open the port on every
interface, so rank 0 binds the socket itself and passes it to the store.
"""

from __future__ import annotations

import errno
import secrets
import socket
import sys
import warnings
from dataclasses import replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.launch import limits, pmi_lines, settings
from manyhands.launch.allocation import LOOPBACK, loopback_mpi, own_address
from manyhands.launch.launchers import LaunchError, RankInfo, launcher_named
from manyhands.launch.program import told

if TYPE_CHECKING:
    import torch.distributed as dist

# by address: rank 0 must not close one while others reconnect
_stores: dict[tuple[str | None, int | None], dist.Store] = {}
_joins = count()  # such a store outlives a join: each join has its own prefix
_cell = 0  # number of the notebook's running cell, equal on all ranks
_listener: socket.socket | None = None  # rank 0's socket, from the start of a notebook's ranks until their first join


def listen() -> str:
    """Bind the socket of the store, on rank 0 of a notebook on several nodes, and return "host:port"."""
    global _listener
    _listener = _bound(own_address(), 0)
    return "{}:{}".format(*_listener.getsockname())


def begin_cell(number: int) -> None:
    """Use cell `number` as the prefix of the following joins, independent of an earlier cell's state."""
    global _cell, _joins
    _cell, _joins = number, count()


class Unreachable(LaunchError):
    """This rank cannot connect to the others, so it must report the error itself."""

    status = 2


class Lost(Unreachable):
    """The other ranks did not connect or have ended; a retry may succeed."""

    status = 1


def store_for(info: RankInfo, timeout_s: float) -> dist.Store:
    """Return a store shared by the ranks of `info`. All ranks call it.

    Raise Unreachable if rank 0 cannot listen, or if this rank does not reach it within `timeout_s`.
    """
    import torch.distributed as dist  # imported late: a notebook's rank imports torch only when a lesson joins

    if info.launcher == "notebook":
        where = settings.store_address()
        if where not in _stores:
            alone = where[1] == 0  # on one node: a file
            _stores[where] = dist.FileStore(where[0]) if alone else _tcp_store(info, *where, _listener, timeout_s)
            _stores[where].set_timeout(timedelta(seconds=timeout_s))
        return dist.PrefixStore(f"cell{_cell}/join{next(_joins)}", _stores[where])
    if info.world_size == 1:
        return dist.HashStore()  # a world of one: no port is opened
    if info.mpi:
        world = import_mpi(info).COMM_WORLD
        listener = _bound(LOOPBACK if info.single_node else own_address(), 0) if info.rank == 0 else None
        # A random prefix, so that another user on the same node does not write into it by accident.
        found = (*listener.getsockname(), f"manyhands/{secrets.token_hex(8)}") if listener else None
        address, port, corner = world.bcast(found)
        return dist.PrefixStore(corner, _tcp_store(info, address, port, listener, timeout_s))
    hosted = not info.agent_store  # otherwise torchrun's agent already listens
    address = LOOPBACK if hosted and info.single_node else info.master_addr
    port = info.master_port
    if (address, port) not in _stores:
        listener = _bound(address, port) if hosted and info.rank == 0 else None
        _stores[address, port] = _tcp_store(info, address, port, listener, timeout_s)
    return dist.PrefixStore(f"manyhands/{info.key}/join{next(_joins)}", _stores[address, port])


def _tcp_store(info, address, port, listener, timeout_s):
    """Return a store that rank 0 serves on `listener` and the others connect to."""
    import torch.distributed as dist  # imported late, as above

    served = {"is_master": True, "master_listen_fd": listener.detach()} if listener else {"is_master": False}
    patience = timedelta(seconds=timeout_s)
    try:
        where = f"{address}:{port}, up to {timeout_s:.0f} s"
        with told(lambda: f"rank {info.rank} waits for rank 0 at {where}; did it start, and can the nodes connect?"):
            return dist.TCPStore(address, port, info.world_size, timeout=patience, wait_for_workers=False, **served)
    except RuntimeError as error:  # DistNetworkError and DistStoreError are RuntimeErrors
        if limits.cure(str(error)):
            raise
        raise Unreachable(
            f"rank {info.rank} did not reach rank 0 at {address}:{port} within {timeout_s:g} s;"
            " check that rank 0 is alive and that the nodes can connect on this port"
        ) from error


def ask_mpi(info: RankInfo) -> RankInfo:
    """Complete `info` from MPI's world. Raise LaunchError if the two contradict each other.

    N processes that each see "rank 0 of 1" result from mixing one MPI's mpiexec with another's mpi4py.
    """
    mpi = import_mpi(info)
    world = mpi.COMM_WORLD
    if info.world_size is None and world.size == 1:  # each process is a world of one, so each must report it
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
    """Import mpi4py's MPI. On one node, first restrict the PyPI wheel's MPICH to loopback.

    Raise LaunchError if mpi4py or its MPI library is missing.
    """
    of_open_mpi = info.launcher == "openmpi" and settings.value("PMIX_RANK") is not None
    if of_open_mpi and loopback_mpi() and settings.value("MPI4PY_MPIABI") is None:  # the wheel's MPICH is what loads
        raise LaunchError(  # MPICH would abort the process: "unsupported PMI version PMIx"
            "Open MPI's mpiexec started this process, and mpi4py here uses MPICH, which cannot join it; use"
            f" {Path(sys.prefix) / 'bin' / 'mpiexec'}, or `python scripts/launch.py --starter torchrun`"
        )
    starts = info.single_node and "mpi4py.MPI" not in sys.modules and loopback_mpi()
    if starts and (sentence := limits.no_room(info.rank, info.world_size or 1)):
        raise LaunchError(sentence)  # on all ranks, before some die of a bus error
    if info.single_node and launcher_named(info.launcher).mpi == "wheel":
        settings.set_default(**loopback_mpi())
    # Perlmutter's default of 1 aborts an MPI without Cray's GPU library; we send only host memory over MPI.
    settings.set_variables(MPICH_GPU_SUPPORT_ENABLED="0")
    pmi_lines.shorten()
    try:
        with warnings.catch_warnings():  # mpi4py warns of a foreign launcher on each rank; `ask_mpi` reports it once
            warnings.simplefilter("ignore", RuntimeWarning)
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"{info.launcher} started this process but MPI does not load ({error}); `pip install mpi4py mpich`,"
            " or start with `python -m torch.distributed.run --standalone --nproc-per-node 4`"
        ) from error
    return MPI


def _bound(address, port):
    try:
        ((family, _, _, _, where), *_) = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        return socket.create_server(where[:2], family=family, backlog=1024)  # IPv4 or IPv6
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while")[0]
        cure = "MASTER_ADDR must be an address of rank 0's host"
        if error.errno == errno.EADDRINUSE:
            cure = "name another MASTER_PORT" if port else "start again"
        raise Unreachable(f"rank 0 cannot listen on {address}:{port} ({why}); {cure}") from error
