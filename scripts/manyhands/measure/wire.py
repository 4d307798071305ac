"""Count what leaves this rank: calls, messages and bytes, below the libraries that make them.

    with wire.watch(sockets=True) as seen:
        dist.all_reduce(x)
    seen.count("all_reduce"), seen.messages, seen.sent_bytes, seen.transport_bytes

Two independent instruments:

- *calls*: every operation that enters torch.distributed, with its payload. They are read from the dispatcher (a
  TorchDispatchMode over the `c10d` operators), so DDP's buckets and FSDP's gathers are seen as well; functions of
  `torch.distributed` that one patches by hand are not what DDP calls.
- *transport*, with `sockets`: bytes that the TCP sockets of this process delivered (Linux, TCP_INFO). It sees what an
  algorithm really sends, headers included. It also sees everything else this process says over TCP meanwhile (a few
  hundred bytes: the store, a notebook's heartbeat), so compare it with payloads of 100 kB or more.

The payload of a call is the whole tensor that the collective is about, as in nccl-tests: what one rank holds in an
all-reduce, a broadcast or an all-to-all, and all ranks' parts together in any gather or scatter.
"""

import os
import socket
import struct
import time
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# In the field's words. The dispatcher's names, of torch.distributed and the functional ones of DTensor, hold one each,
# with or without the underscore: "_allgather_base_", "reduce_scatter_tensor_coalesced". The first that fits counts.
_NAMES = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all",
    "broadcast", "barrier", "reduce", "gather", "scatter", "send", "recv",
)  # fmt: skip
# Which argument of the c10d operator holds all ranks' parts.
_WHERE_THE_WHOLE_IS = {"all_gather": 0, "gather": 0, "reduce_scatter": 1, "scatter": 1}


@dataclass(frozen=True)
class Call:
    """One operation that entered the library: its name, its payload in bytes, and for send and recv the other rank."""

    op: str
    bytes: int
    peer: int | None = None


@dataclass
class Seen:
    """The record of one rank in a `watch()`. Point-to-point sends are `messages`; collectives are `calls` only."""

    calls: list[Call] = field(default_factory=list)
    transport_bytes: int | None = None
    over_sockets: bool = True  # no tensor of a GPU was sent: NCCL takes NVLink, shared memory or a card of its own

    @property
    def messages(self) -> int:
        """Number of point-to-point sends of this rank."""
        return self.count("send")

    @property
    def sent_bytes(self) -> int:
        """Payload bytes of those sends."""
        return self.payload_bytes("send")

    def count(self, op: str) -> int:
        """Return the number of calls of `op` ("all_reduce", "send", ...)."""
        return sum(call.op == op for call in self.calls)

    def payload_bytes(self, op: str | None = None) -> int:
        """Payload bytes of the calls of `op`; without a name, of everything but receives (each is another's send)."""
        return sum(call.bytes for call in self.calls if (call.op == op if op else call.op != "recv"))


@contextmanager
def watch(sockets: bool = False):
    """Count this rank's calls and, with `sockets`, its transport while the block runs; no rank waits for another.

    Yields a Seen. `transport_bytes` is filled when the block ends, and stays None where there is no TCP_INFO, and where
    a GPU's tensor was sent: hardly any of it passes a socket. It takes up to 40 ms, until the last is acknowledged.
    """
    seen = Seen()
    before = _delivered_bytes() if sockets else None
    try:
        with Calls(seen):
            yield seen
    finally:
        after = _delivered_bytes() if before is not None else None
        if seen.over_sockets and after is not None:
            seen.transport_bytes = sum(done - before.get(key, 0) for key, done in after.items())


def ring_all_reduce_bytes(n_bytes: int, n: int) -> float:
    """Bytes each of n ranks sends in a ring all-reduce of n_bytes: 2 (n-1)/n of them (Patarasuk and Yuan 2009)."""
    return 2 * (n - 1) / n * n_bytes


class Calls(TorchDispatchMode):
    """Appends a Call for each communication operator. It wraps every operator: do not time inside it."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace in ("c10d", "_c10d_functional"):
            theirs = operator._schema.name.split("::")[1].replace("_", "")
            name = next((name for name in _NAMES if name.replace("_", "") in theirs), None)
            if name:
                self.seen.calls.append(_call(name, operator.namespace, args))
                tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
                self.seen.over_sockets &= all(leaf.device.type == "cpu" for leaf in tensors)
        return operator(*args, **(kwargs or {}))


def _call(name, namespace, args):
    if name == "barrier":
        return Call(name, 0)
    # (input, ..., group size, group name): the input is one rank's part of a gather
    if namespace == "_c10d_functional":
        return Call(name, _bytes(args[0]) * (args[1] if name == "all_gather" else 1))
    if name in ("send", "recv"):  # (tensors, group, peer, tag); a receive from anybody has no peer
        peer = dist.get_global_rank(dist.ProcessGroup.unbox(args[1]), args[2]) if len(args) == 4 else None
        return Call(name, _bytes(args[0]), peer)
    whole = args[_WHERE_THE_WHOLE_IS.get(name, 0)]
    if name in ("gather", "scatter") and not whole:  # only the root holds all parts
        group = dist.ProcessGroup.unbox(next(arg for arg in args if isinstance(arg, torch.ScriptObject)))
        return Call(name, _bytes(args[1 - _WHERE_THE_WHOLE_IS[name]]) * group.size())
    return Call(name, _bytes(whole))


def _bytes(tensors):
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_bytes(tensor) for tensor in tensors)


# Offsets in struct tcp_info (linux/tcp.h): packets (u32), bytes (u64), bytes (u32).
_UNACKED, _BYTES_ACKED, _NOT_SENT = 24, 120, 144


def _delivered_bytes(patience_s=3.0):
    """{socket: bytes acknowledged so far} of this process's TCP sockets; None where the system does not tell.

    An acknowledgement comes a little after the bytes, so this waits until nothing is under way (at most patience_s).
    """
    deadline, pause_s = time.monotonic() + patience_s, 0.001
    while True:
        readings = _tcp_sockets()
        if readings is None:
            return None
        if not any(under_way for _, under_way in readings.values()) or time.monotonic() > deadline:
            return {key: acked for key, (acked, _) in readings.items()}
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)


def _tcp_sockets():
    """{(descriptor, inode): (bytes acknowledged, anything under way)} of the connected TCP sockets of this process."""
    if not hasattr(socket, "TCP_INFO") or not os.path.isdir("/proc/self/fd"):
        return None
    readings = {}
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if not target.startswith("socket:"):
                continue
            copy = os.dup(int(descriptor))  # closing the copy leaves the library's socket alone
            with socket.socket(fileno=copy) as tcp:
                info = tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
        except OSError:  # closed meanwhile, or no TCP socket
            continue
        if len(info) < _NOT_SENT + 4:
            return None
        (acked,) = struct.unpack_from("Q", info, _BYTES_ACKED)
        waiting = struct.unpack_from("I", info, _UNACKED)[0] or struct.unpack_from("I", info, _NOT_SENT)[0]
        readings[descriptor, target] = acked, bool(waiting)
    return readings
