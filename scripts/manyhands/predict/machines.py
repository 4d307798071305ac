"""What a GPU and its links can do: a small table with its sources, or your own numbers from a file.

    machine = machine_named("h100")                # Machine: peak, memory, bandwidths
    machine = machine_from_file("mine.toml")       # the same fields; `base = "h100"` takes what it leaves out from the table

A GPU is what torch calls a device: of an MI250X one die, of a Max 1550 one stack. Bandwidths are of one direction, as vendors
state them unless a source says "measured"; `step_time` counts with a share of them.
"""

import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path

from manyhands.predict.peaks import listed_peak


@dataclass(frozen=True)
class Machine:
    """GPUs in nodes. Raises ValueError for a number that cannot be."""

    name: str
    peak_flops: float  # dense bf16 matrix products, FLOP/s
    # a vendor's GB, taken as 10^9 bytes: devices have 7 % more, which is left to the context, NCCL and the allocator
    memory_bytes: float
    memory_bytes_per_s: float  # of the GPU's own memory
    inside_bytes_per_s: float  # a GPU to another one of its node, one direction
    between_bytes_per_s: float  # a GPU's share of what its node can send to other nodes, one direction
    gpus_per_node: int
    host_bytes_per_s: float  # a GPU to the host's memory, one direction
    site: str = "generic"  # whose job directives fit: see jobs/sites
    sources: tuple[str, ...] = ()

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("name", "site", "sources"):
                continue
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
                raise ValueError(f"machine {self.name}: {field.name}={value!r}; use a number above 0")
        if self.gpus_per_node != int(self.gpus_per_node):
            raise ValueError(f"machine {self.name}: gpus_per_node={self.gpus_per_node}; use a whole number")


A100 = listed_peak("NVIDIA A100-SXM4-80GB", 108, "bf16")
H100 = listed_peak("NVIDIA H100 80GB HBM3", 132, "bf16")
MI250X_DIE = listed_peak("AMD Instinct MI250X", 110, "bf16")
MAX_1550_STACK = listed_peak("Intel(R) Data Center GPU Max 1550", 448, "bf16")  # as Aurora has it
A100_SHEET = "https://www.nvidia.com/en-us/data-center/a100/"
DGX_A100 = "https://docs.nvidia.com/dgx/dgxa100-user-guide/introduction-to-dgxa100.html"
H100_SHEET = "https://www.nvidia.com/en-us/data-center/h100/"
DGX_H100 = "https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html"
FRONTIER = "https://docs.olcf.ornl.gov/systems/frontier_user_guide.html"
AURORA = "https://docs.alcf.anl.gov/aurora/hardware-overview/machine-overview/"
AURORA_MEASURED = "https://docs.alcf.anl.gov/aurora/node-performance-overview/node-performance-overview/"

MACHINES = {
    machine.name: machine
    for machine in (
        # NVLink 600 GB/s in both directions; a 200 Gb/s card per GPU; PCIe 4 x16
        Machine("a100-40", A100, 40e9, 1555e9, 300e9, 25e9, 8, 32e9, sources=(A100_SHEET, DGX_A100)),
        Machine("a100-80", A100, 80e9, 2039e9, 300e9, 25e9, 8, 32e9, sources=(A100_SHEET, DGX_A100)),
        # NVLink 900 GB/s in both directions; a 400 Gb/s card per GPU; PCIe 5 x16
        Machine("h100", H100, 80e9, 3350e9, 450e9, 50e9, 8, 64e9, sources=(H100_SHEET, DGX_H100)),
        Machine(
            "h200", H100, 141e9, 4800e9, 450e9, 50e9, 8, 64e9,
            sources=("https://www.nvidia.com/en-us/data-center/h200/", DGX_H100),
        ),
        # a die: 64 GB; half of 3.2768 TB/s; 50 GB/s to a die of another module, the slowest in a ring; four 200 Gb/s cards
        # for 8 dies; 36 GB/s to the host
        Machine(
            "mi250x", MI250X_DIE, 64e9, 1638e9, 50e9, 12.5e9, 8, 36e9, "frontier",
            (FRONTIER, "https://www.amd.com/en/products/accelerators/instinct/mi200/mi250x.html"),
        ),
        # a stack: 64 GB; measured: 1 TB/s of memory, 15 GB/s to a stack of another GPU, the slowest in a ring, 55 GB/s to
        # the host, or 329 GB/s over 12 of them; eight 200 Gb/s cards for 12 stacks
        Machine(
            "pvc", MAX_1550_STACK, 64e9, 1000e9, 15e9, 16.7e9, 12, 27e9, "aurora", (AURORA, AURORA_MEASURED),
        ),
    )
}  # fmt: skip


def machine_named(name):
    """The Machine of the table. Raises ValueError for an unknown name."""
    if name not in MACHINES:
        raise ValueError(f"machine {name!r} is unknown; use one of {', '.join(MACHINES)}, or a file that ends in .toml")
    return MACHINES[name]


def machine_from_file(path):
    """A Machine from a TOML file with the fields of the class, over `base`. Raises ValueError with the cure."""
    path = Path(path)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    known = [field.name for field in fields(Machine)]
    base = values.pop("base", None)
    if unknown := sorted(set(values) - set(known)):
        raise ValueError(f"{path}: {unknown[0]!r} is no field of a machine; use base, {', '.join(known)}")
    values = {"name": path.stem, "sources": (str(path),)} | values
    if base is not None:
        return replace(machine_named(base), **values)
    if missing := [name for name in known if name not in values and name != "site"]:
        raise ValueError(f'{path} leaves out {", ".join(missing)}; name them, or a base = "h100"')
    return Machine(**values)
