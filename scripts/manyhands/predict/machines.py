"""The speeds of a GPU and its links, from a table with its sources (machines.toml) or your own file, and the time of a
collective.

    machine = machine_named("h100")                # Machine: peak, memory, bandwidths
    machine = machine_from_file("mine.toml")       # the same fields; `base = "h100"` fills in the rest
    group = Group(machine, ranks=64, stride=8)     # 64 ranks, of which each node has one
    group.seconds("all_gather", payload_bytes)     # alpha and beta, with the number of nodes that the ranks are on
    group.sent("all_gather", payload_bytes)        # Sent(inside, between, host): bytes that a GPU sends over each link
    dense_peak(device, "bf16")                     # FLOP/s of this GPU without sparsity; None: not in gpus.toml

Bandwidths are what vendors state; `step_time` counts with a share of them.
"""

import re
import tomllib
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from math import ceil, log2
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, TypeAdapter, ValidationError

from manyhands.course.folders import named
from manyhands.launch.program import reason

if TYPE_CHECKING:
    import torch

# Assumptions, by order of magnitude: what nccl-tests and osu-tests print of small and of large messages on such
# machines. Nothing here is fitted.
LINK_SHARE = 0.8  # of a stated bandwidth that a collective attains
LAUNCH_S = 10e-6  # of a collective's kernel
HOP_INSIDE_S, HOP_BETWEEN_S = 1e-6, 5e-6  # of a message to the next rank
RING_FACTOR = {"all_reduce": 2}  # of what all other operations send


@dataclass(frozen=True)
class Machine:
    """GPUs in nodes. Raises ValueError for a number that cannot be."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    name: str
    peak_flops: float  # dense bf16 matrix products, FLOP/s, as the vendor states it
    # a vendor's GB, taken as 10^9 bytes: devices have 7 % more, which is left to the context, NCCL and the allocator
    memory_bytes: float
    memory_bytes_per_s: float  # of the GPU's own memory
    inside_bytes_per_s: float  # a GPU to another one of its node, one direction
    between_bytes_per_s: float  # a GPU's share of what its node can send to other nodes, one direction
    gpus_per_node: int
    host_bytes_per_s: float  # a GPU to the host's memory, one direction
    best_share: float = 0.869  # of the peak that a product of the best shape reaches, measured; an A100's
    best_fp8_flops: float | None = None  # that one in 8 bits reaches, measured; none: the GPU has no such products
    site: str = "generic"  # whose job directives fit: see jobs/sites
    sources: tuple[str, ...] = ()

    @property
    def matmul_flops(self) -> float:
        """The highest rate that a bf16 product reaches, FLOP/s."""
        return self.peak_flops * self.best_share

    def __post_init__(self):
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not 0 < value < float("inf"):
                raise ValueError(f"machine {self.name}: {name}={value!r}; use a number above 0")


_rows = tomllib.loads(Path(__file__).with_name("machines.toml").read_text("utf-8"))["machine"]
MACHINES = {machine.name: machine for machine in TypeAdapter(list[Machine]).validate_python(_rows)}


def machine_named(name: str) -> Machine:
    """The Machine of the table. Raise ValueError for an unknown name."""
    if name not in MACHINES:
        raise ValueError(f"machine {name!r} is unknown; use one of {', '.join(MACHINES)}, or a file that ends in .toml")
    return MACHINES[name]


def machine_from_file(path: str | Path) -> Machine:
    """A Machine from a TOML file with the fields of the class, over `base`. Raise ValueError with the cure."""
    path = named(path)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        base = asdict(machine_named(values.pop("base"))) if "base" in values else {}
        found = base | {"name": path.stem, "sources": (str(path),)} | values
        return TypeAdapter(Machine).validate_python(found)
    except ValidationError as error:
        fault = error.errors()[0]
        known = ", ".join(field.name for field in fields(Machine))
        told = ": ".join([*map(str, fault["loc"]), fault["msg"].lower()])
        raise ValueError(f'{path}: {told}; a machine has {known}, or some of them over a base = "h100"') from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {reason(error)}") from None


@dataclass(frozen=True)
class Sent:
    """Bytes that one GPU sends, on average over its group: in its node, to other nodes, and to and from its host."""

    inside: float = 0.0
    between: float = 0.0
    host: float = 0.0

    def __add__(self, other):
        return Sent(self.inside + other.inside, self.between + other.between, self.host + other.host)


@dataclass(frozen=True)
class Group:
    """`ranks` ranks, `stride` apart, that talk to each other while all other groups of their axis do the same.

    Bandwidth is a ring's: an all-reduce sends 2 (n-1)/n of the payload from each rank, an all-gather and a
    reduce-scatter half of that (Patarasuk and Yuan 2009); "ring" is an all-gather of which each rank uses a piece at a
    time. An all-to-all sends each rank its own piece: most of it leaves the node where most ranks are on others. A ring
    that leaves the node is as fast as the share of the node's network cards that its ranks have: all groups of an axis
    work at the same time.
    """

    machine: Machine
    ranks: int
    stride: int = 1
    link_share: float = LINK_SHARE

    @cached_property
    def on_a_node(self) -> int:
        """Ranks of the group that share a node."""
        return max(1, min(self.ranks, self.machine.gpus_per_node // self.stride))

    @cached_property
    def nodes(self) -> int:
        return ceil(self.ranks / self.on_a_node)

    @cached_property
    def bytes_per_s(self) -> float:
        """The bandwidth of the ring's slowest link, in one direction."""
        inside, between = self.machine.inside_bytes_per_s, self.machine.between_bytes_per_s
        if self.nodes == 1:
            return inside * self.link_share
        return min(inside if self.on_a_node > 1 else between, self.on_a_node * between) * self.link_share

    def seconds(self, operation: str, payload_bytes: float, calls: int = 1) -> float:
        """Return the time of `calls` collectives with a total payload of `payload_bytes`. 0 for one rank alone."""
        if self.ranks == 1 or not calls:
            return 0.0
        latency_s = calls * self._latency_s(operation)
        if operation == "send":
            link = self.machine.inside_bytes_per_s if self.nodes == 1 else self.machine.between_bytes_per_s
            return payload_bytes / (link * self.link_share) + latency_s
        if operation == "all_to_all":
            # both kinds of links work at once, and each GPU has its share of the node's cards
            sent, machine = self.sent(operation, payload_bytes), self.machine
            slowest_s = max(sent.inside / machine.inside_bytes_per_s, sent.between / machine.between_bytes_per_s)
            return slowest_s / self.link_share + latency_s
        return self._volume(operation, payload_bytes) / self.bytes_per_s + latency_s

    def sent(self, operation: str, payload_bytes: float) -> Sent:
        """The Sent of a collective."""
        crossing = self.nodes / self.ranks if self.nodes > 1 else 0.0
        if operation == "all_to_all":
            crossing = (self.ranks - self.on_a_node) / max(1, self.ranks - 1)
        elif operation == "send":  # from stage to stage, in a line
            crossing = min(1.0, (self.nodes - 1) / max(1, self.ranks - 1))
        volume = self._volume(operation, payload_bytes)
        return Sent(volume * (1 - crossing), volume * crossing)

    def _volume(self, operation, payload_bytes):
        if operation == "send":
            return payload_bytes
        return RING_FACTOR.get(operation, 1) * (self.ranks - 1) / self.ranks * payload_bytes

    def _latency_s(self, operation):
        """A ring visits every rank; an all-reduce may take a tree instead, up and down."""
        if operation == "send":
            return replace(self, ranks=2)._latency_s("all_gather")
        between = self.nodes if self.nodes > 1 else 0
        if operation == "all_to_all":  # messages to all ranks are under way together
            return LAUNCH_S + (HOP_BETWEEN_S if between else HOP_INSIDE_S)
        ring = (self.ranks - 1 - between) * HOP_INSIDE_S + between * HOP_BETWEEN_S
        if operation == "all_reduce":
            tree = log2(self.on_a_node) * HOP_INSIDE_S + log2(self.nodes) * HOP_BETWEEN_S
            return LAUNCH_S + 2 * min(ring, tree)
        launches = self.ranks - 1 if operation == "ring" else 1
        return launches * LAUNCH_S + max(ring, 0)


# ------------------------------------------------------------------ peaks of GPUs, as vendors state them


class Gpu(BaseModel):
    """A row of gpus.toml: what a vendor states of a device."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str  # a regular expression
    units: PositiveInt
    tflops: dict[Literal["fp64", "fp32", "tf32", "fp16", "bf16"], PositiveFloat]
    proportional: bool = False  # a slice with fewer units does as many of these


GPUS = [Gpu(**row) for row in tomllib.loads(Path(__file__).with_name("gpus.toml").read_text("utf-8"))["gpu"]]


def dense_peak(device: "torch.device", precision: str) -> float | None:
    """The device's dense peak in FLOP/s for matrix products in `precision`, or None where no vendor's number is known.

    `precision`: fp64, fp32, bf16, fp16. fp32 means TF32 where torch is allowed to use it. A CPU is never known.
    """
    if device.type == "cpu":
        return None
    import torch  # late: who asks by name needs none

    properties = torch.get_device_module(device).get_device_properties(device)
    units = getattr(properties, "multi_processor_count", None) or getattr(properties, "max_compute_units", None)
    if precision == "fp32" and torch.get_float32_matmul_precision() != "highest":
        precision = "tf32"
    return listed_peak(properties.name, units, precision)


def listed_peak(name: str, units: int, kind: str) -> float | None:
    """FLOP/s of a device by its name and number of compute units, None if the table has no such device or kind."""
    for gpu in GPUS:
        if re.fullmatch(gpu.name, name) and (gpu.proportional or units == gpu.units):
            tflops = gpu.tflops.get("fp32" if kind == "tf32" and "tf32" not in gpu.tflops else kind)
            return tflops and tflops * 1e12 * (units / gpu.units if gpu.proportional else 1)
    return None


def device_name(device: "torch.device") -> str:
    """Return torch's name for the device: "NVIDIA H200", "cpu"."""
    if device.type == "cpu":
        return "cpu"
    import torch

    return torch.get_device_module(device).get_device_name(device)
