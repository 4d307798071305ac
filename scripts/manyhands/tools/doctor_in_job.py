"""Ask the ranks of a job four questions: which cores, which GPUs, which channels, how long the imports took.

    python scripts/launch.py --nproc 2 scripts/doctor.py -- --job     # in a job, as jobs/doctor.* do

Every rank looks at itself, and rank 0 judges what all of them said: a line per question, what to expect, a remedy. The
judges are pure functions of these answers, so that a recorded job can be judged as well.
"""

import os
import re
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

from manyhands.tools.doctor import GIB, SLOW_IMPORT_S, error, examine, warning

LOGGED = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,P2P,SHM"}
INHERITED = re.compile(r"(NCCL|RCCL|FI|GLOO|UCX)_\w+")
EXPECT = {
    "cores": "a rank has cores of its own, those nearest to its GPU",
    "GPUs": "as many ranks as GPUs, and a GPU for each",
    "channels": "between nodes your site's network, straight from the GPUs' memory (GDRDMA), not Socket",
    "imports": f"a few seconds, on all ranks alike; more than {SLOW_IMPORT_S} s is a slow file system",
}


def examine_job():
    """Return the findings, as `doctor.examine` yields them, on rank 0, and an empty list elsewhere. All ranks call."""
    start = time.perf_counter()
    import torch  # the doctor has not imported it before

    import_s = time.perf_counter() - start
    inherited = sorted(filter(INHERITED.fullmatch, os.environ))
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "nccl"
        os.environ.update({**LOGGED, "NCCL_DEBUG_FILE": str(log)})  # before NCCL starts: it reads them once
        from manyhands.launch.join import join, leave

        ranks = join(name="doctor")
        torch.distributed.all_reduce(torch.ones(2**20, device=ranks.device))  # all ranks: it opens the channels
        if ranks.device.type != "cpu":
            torch.accelerator.synchronize()
        text = log.read_text(errors="replace") if log.exists() else ""
    mine = _look(ranks) | {"import_s": import_s, "inherited": inherited, "ways": dict(Counter(ways(text)))}
    said = [None] * ranks.world_size
    torch.distributed.all_gather_object(said, mine)
    leave()
    if ranks.rank:
        return []
    findings = list(examine({name: partial(judge, said) for name, judge in JUDGES.items()}))
    return [finding | {"expect": EXPECT[finding["check"]]} for finding in findings]


def _look(ranks):
    """Return what this rank has, as plain values: it travels to rank 0."""
    from manyhands.launch.machine import cpus

    own = {"host": ranks.host, "rank": ranks.rank, "cores": cpus(), "backend": ranks.backend, **_gpu(ranks.device)}
    return own | {"fabric": os.environ.get("FABRIC", "")}  # what the site says its nodes are connected by


def _gpu(device):
    """Return the GPU of this rank: its name, identity, free bytes, how many the process sees, and its nearest cores."""
    import torch

    none = {"gpu": None, "gpu_id": None, "free_bytes": 0, "visible": 0, "near": []}
    if device.type != "cuda":
        return none
    properties = torch.cuda.get_device_properties(device)
    place = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    near = []
    if None not in place:
        bus = "{:04x}:{:02x}:{:02x}.0".format(*place)
        listed = Path("/sys/bus/pci/devices") / bus / "local_cpulist"
        near = numbers_in(listed.read_text()) if listed.exists() else []
    found = {"gpu": properties.name, "gpu_id": str(getattr(properties, "uuid", device.index)), "near": near}
    return found | {"free_bytes": torch.cuda.mem_get_info(device)[0], "visible": torch.cuda.device_count()}


def numbers_in(text):
    """Return the numbers of a list as Linux writes it: "0-2,8" is [0, 1, 2, 8]."""
    pairs = [part.partition("-")[::2] for part in text.strip().split(",") if part]
    return [n for first, last in pairs for n in range(int(first), int(last or first) + 1)]


def in_short(numbers):
    """Return a sorted list of numbers as Linux writes it: [0, 1, 2, 8] is "0-2,8"."""
    runs = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs)


def ways(log):
    """Return for each channel of NCCL's log what it goes `via`: "NET/IB/0/GDRDMA", "P2P/CUMEM", "SHM/direct/direct"."""
    return re.findall(r"Channel \d+\S* : .* via (\S.*?)\s*$", log, re.MULTILINE)


def _by_node(said):
    """Return {host: its ranks' answers}, in the order of the ranks."""
    nodes = {}
    for one in said:
        nodes.setdefault(one["host"], []).append(one)
    return nodes


def cores(said):
    """Judge the cores: every rank needs at least one that no other rank of its node depends on."""
    told = []
    for host, ranks in _by_node(said).items():
        union = sorted(set().union(*(one["cores"] for one in ranks)))
        told.append(f"{host}: {len(ranks)} ranks on {len(union)} cores ({in_short(union)})")
        if len(union) < len(ranks):
            says = f"{host}: {len(ranks)} ranks take turns on {len(union)} core (core {in_short(union)})"
            if len(union) > 1:
                says = f"{host}: {len(ranks)} ranks take turns on {len(union)} cores ({in_short(union)})"
            raise warning(says, "all cores of the node for its one task: --cpus-per-task (PBS: ncpus), no --cpu-bind")
        for one in ranks:
            if one["near"] and not set(one["cores"]) & set(one["near"]):
                says = f"{host}: rank {one['rank']} may use cores {in_short(one['cores'])}, its GPU is beside"
                raise warning(f"{says} {in_short(one['near'])}", "torchrun --numa-binding node, or --gpu-bind=closest")
    return "; ".join(told)


def gpus(said):
    """Judge the GPUs: one for each rank, and no GPU of a node idle."""
    if not any(one["gpu"] for one in said):
        return f"none: {len(said)} ranks on the CPU"
    told = []
    for host, ranks in _by_node(said).items():
        names = Counter(one["gpu"] or "the CPU" for one in ranks)
        free = min(one["free_bytes"] for one in ranks) / GIB
        told.append(f"{host}: " + ", ".join(f"{n} x {name}" for name, n in names.items()) + f", {free:.0f} GiB free")
        if len({one["gpu_id"] for one in ranks}) < len(ranks):
            says = f"{host}: {len(ranks)} ranks share {len({one['gpu_id'] for one in ranks})} GPUs"
            raise warning(says, "NPROC_PER_NODE: a rank per GPU; with srun --gpu-bind=none")
        if (seen := max(one["visible"] for one in ranks)) > len(ranks):
            says = f"{host}: {seen} GPUs and {len(ranks)} ranks, the other GPUs idle"
            raise warning(says, f"NPROC_PER_NODE={seen}")
    return "; ".join(told)


def channels(said):
    """Judge what carries the data: NCCL's channels, by what they go via; without NCCL it is gloo's TCP."""
    nodes, found = _by_node(said), Counter()
    for one in said:
        found.update(one["ways"])
    kinds = Counter()
    for way, n in found.items():
        name = way.split("/")[1] if way.startswith("NET/") else way
        kinds[f"NET/{name}{'/GDRDMA' * ('GDRDMA' in way)}" if way.startswith("NET/") else way] += n
    variables = sorted(set().union(*(one["inherited"] for one in said)))
    told = f"set before the job: {', '.join(variables)}" if variables else "no variable of NCCL or gloo is set"
    if not kinds:
        return f"gloo, TCP over {len(nodes)} nodes; {told}" if len(nodes) > 1 else f"gloo on one node; {told}"
    said_of_kinds = ", ".join(f"{n} via {kind}" for kind, n in kinds.most_common())
    fabric = next(filter(None, (one["fabric"] for one in said)), "")
    if fabric and len(nodes) > 1 and any(kind.startswith("NET/Socket") for kind in kinds):
        says = f"{said_of_kinds} over {len(nodes)} nodes, which {fabric} connects: NCCL does not use it; {told}"
        remedy = f"load NCCL's plug-in for {fabric} in site_setup: the site's support knows the module's name"
        raise error(says, f"{remedy}; unset what its page does not ask for")
    if any(kind.startswith("NET/Socket") for kind in kinds):
        remedy = "unset what your site's page does not ask for, then look for NET/IB : Using in the log"
        raise warning(f"{said_of_kinds}; {told}", remedy)
    return f"{said_of_kinds}; {told}"


def imports(said):
    """Judge how long `import torch` took."""
    slowest = max(said, key=lambda one: one["import_s"])
    told = f"torch in {min(one['import_s'] for one in said):.1f} to {slowest['import_s']:.1f} s"
    if slowest["import_s"] > SLOW_IMPORT_S:
        says = f"{told}, slowest on {slowest['host']}"
        raise warning(says, "one file instead of thousands (a container), or a copy on the node's own disk")
    return f"{told} on {len(said)} ranks"


JUDGES = {"cores": cores, "GPUs": gpus, "channels": channels, "imports": imports}
