"""The store in which the ranks of a notebook meet: rank 0 listens once, and each join has a corner of its own in it."""

import os
import socket
from datetime import timedelta

from manyhands.launch.addresses import LOOPBACK, own_address

_store = None  # the listening socket of rank 0 until the first join, then the torch store
_cell = 0  # number of the cell that runs: all ranks agree on it
_joins = 0  # joins made in this cell


def listen(single_node):
    """Rank 0: bind the socket on which the store of all joins will listen; returns "host:port"."""
    global _store
    host = LOOPBACK if single_node else own_address()
    _store = socket.socket()
    _store.bind((host, 0))
    _store.listen(1024)
    return f"{host}:{_store.getsockname()[1]}"


def begin_cell(number):
    """The joins that follow are of cell `number`: its ranks meet under that number, whatever an earlier cell left."""
    global _cell, _joins
    _cell, _joins = number, 0


def store(timeout_s):
    """The store in which the ranks meet for this join: its keys are apart from those of every earlier join."""
    import torch.distributed as dist

    global _store, _joins
    if not isinstance(_store, dist.Store):
        host, port = os.environ["MANYHANDS_STORE"].rsplit(":", 1)
        listener = {"master_listen_fd": _store.detach()} if _store is not None else {}
        _store = dist.TCPStore(
            host, int(port), is_master=bool(listener), wait_for_workers=False, timeout=timedelta(seconds=timeout_s),
            **listener,
        )  # fmt: skip
    _joins += 1
    return dist.PrefixStore(f"cell{_cell}/join{_joins}", _store)
