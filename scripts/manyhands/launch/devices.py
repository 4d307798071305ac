"""Choose what to compute on: GPUs, cores, threads. Each rank reports what it sees; rank 0 chooses for all.

The choice is made once for the whole world, because a process group has one backend: one node without GPUs makes all
ranks use the CPU. `choose` is a pure function of the ranks' reports.
"""

import platform
from collections.abc import Mapping

import torch
import torch.distributed as dist

from manyhands.launch import settings
from manyhands.launch.launchers import LaunchError
from manyhands.launch.machine import cpus, quota_cores
from manyhands.launch.ranks import name_ranks

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}
# variables with which a launcher binds GPUs to a task
MASKS = {"cuda": ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "xpu": ("ZE_AFFINITY_MASK",)}


def look(environ: Mapping[str, str]) -> dict:
    """Return what this process sees, as plain values that are sent to rank 0 as JSON.

    `gpus` maps "cuda" and "xpu" to a list with one identity per visible device; `why_not` names what is missing.
    """
    gpus, why_not = {}, {}
    for kind, masks in MASKS.items():
        gpus[kind], why_not[kind] = _gpus(kind, " ".join(environ.get(name, "") for name in masks))
    asked = environ.get("OMP_NUM_THREADS", "")
    here = {"host": platform.node(), "cpus": cpus(), "quota": quota_cores(), "omp_threads": asked}
    return here | {"gpus": gpus, "why_not": why_not}


def _gpus(kind, visible):
    backend = torch.cuda if kind == "cuda" else getattr(torch, "xpu", None)
    if backend is None or not backend.is_available():
        return [], f"torch {torch.__version__} sees no {kind} device"
    library = {"cuda": "nccl", "xpu": "xccl"}[kind]
    if not getattr(dist, f"is_{library}_available", lambda: False)():
        return [], f"torch {torch.__version__} has no {library.upper()}"
    # The device's UUID if torch reports it, else its index: two tasks that each see a device 0 may
    # see the same one (a shared node) or two (one GPU bound to each task).
    numbers = [getattr(backend.get_device_properties(i), "uuid", i) for i in range(backend.device_count())]
    return [f"{number} {visible}" for number in numbers], ""


def gpus_here(environ: Mapping[str, str] | None = None) -> tuple[str, int]:
    """Return ("cuda" or "xpu", number of visible devices) or ("cpu", 0); MANYHANDS_DEVICE restricts the choice."""
    named = settings.device(environ)
    for kind in ("cuda", "xpu"):
        backend = getattr(torch, kind, None)
        if named in ("auto", kind) and backend is not None and backend.is_available():
            return kind, backend.device_count()
    return "cpu", 0


def device_named(name: str) -> str:
    """Resolve `--device` to "cuda", "xpu" or "cpu". Raise LaunchError for a missing GPU."""
    if name == "auto":
        return gpus_here()[0]
    if name != "cpu" and gpus_here({"MANYHANDS_DEVICE": name})[0] != name:
        raise LaunchError(f"--device {name}: torch sees no GPU of that kind here; use --device cpu")
    return name


def choose(wanted: str, offers: list[dict]) -> dict:
    """Resolve `wanted` for ranks that reported `offers`: {"kind", "indices" (one per rank), "reason"}.

    `reason` is a sentence if "auto" fell back to the CPU, else empty.
    Raise LaunchError for an unknown `wanted`, and if GPUs were requested and there are too few.
    """
    if wanted not in settings.DEVICES:
        raise LaunchError(f"device={wanted!r} is unknown; use one of {', '.join(settings.DEVICES)}")
    reasons = {}
    for kind in ("cuda", "xpu") if wanted == "auto" else (wanted,) * (wanted != "cpu"):
        indices, reasons[kind] = _one_each(kind, offers)
        if indices:
            return {"kind": kind, "indices": indices, "reason": ""}
    if wanted not in ("auto", "cpu"):
        cure = "start fewer ranks, ask for more GPUs, or use device=cpu (in the environment: MANYHANDS_DEVICE=cpu)"
        raise LaunchError(f"{reasons[wanted]}; {cure}")
    # Name the kind of GPU that exists here, if any.
    there = [kind for kind in reasons if any(offer["gpus"][kind] for offer in offers)]
    reason = reasons[there[0]] if there else next(iter(reasons.values()), "")
    return {"kind": "cpu", "indices": [0] * len(offers), "reason": reason}


def _one_each(kind, offers):
    """Return (a device index for every rank, "") or ([], the reason for having none)."""
    indices = [offer["local_rank"] for offer in offers]
    for host, here in _by_host(offers).items():
        seen = [offers[r]["gpus"][kind] for r in here]
        distinct = len({gpu for gpus in seen for gpu in gpus})
        if all(len(gpus) >= len(here) for gpus in seen):
            continue  # every rank sees enough GPUs for all: use the local rank as index
        if all(seen) and distinct == sum(map(len, seen)):
            for r in here:
                indices[r] = 0  # the launcher shows each task only its own GPUs, usually one
            continue
        if distinct == 0:
            return [], f"{offers[here[0]]['why_not'][kind]} on {host}"
        return [], f"{_count(len(here), 'rank')} on {host} but {_count(distinct, f'{kind} device')}"
    return indices, ""


def _count(n, what):
    return f"{n} {what}{'s' * (n != 1)}"


def _by_host(offers):
    """Return the ranks on each host, with hosts in the order of their first rank."""
    hosts = {}
    for rank, offer in enumerate(offers):
        hosts.setdefault(offer["host"], []).append(rank)
    return hosts


def describe(launcher: str, offers: list[dict], plan: dict) -> str:
    """Describe the ranks: one line for the world and one for each host."""
    kind = plan["kind"]
    lines = [f"{_count(len(offers), 'rank')}, launcher {launcher}, backend {BACKENDS[kind]}"]
    for host, here in _by_host(offers).items():
        neighbours = [offers[r] for r in here]
        own = "" if kind == "cpu" else " " + ", ".join(str(plan["indices"][r]) for r in here)
        share = f"{_count(threads(kind, neighbours[0], neighbours), 'thread')} per rank"
        lines.append(f"  {host}: {name_ranks(here)} on {kind}{own}; {_count(cores(neighbours[0]), 'core')}, {share}")
    if plan["reason"]:
        idle = any(gpus for offer in offers for gpus in offer["gpus"].values())
        warning = "WARNING: GPUs are available but unused: " if idle else ""
        cure = "; in a notebook set n_ranks, or MANYHANDS_RANKS, to the number of GPUs" * bool(
            idle and launcher == "notebook"
        )
        lines.append(f"  {warning}on cpu because {plan['reason']}{cure}")
    return "\n".join(lines)


def cores(offer: dict) -> int:
    """Return the whole cores for this process: those allowed by affinity, limited by the control group."""
    return max(1, int(min(len(offer["cpus"]), offer["quota"])))


def threads(kind: str, offer: dict, neighbours: list[dict]) -> int:
    """Return one rank's number of threads. `neighbours`: the reports of all ranks on its host, its own included.

    Ranks that share cores get one thread each on the CPU: more would only compete for the same cores.
    """
    granted = cores(offer)
    if kind != "cpu":  # these threads only feed a GPU, so no result depends on their number: divide only shared cores
        sharing = sum(not set(offer["cpus"]).isdisjoint(neighbour["cpus"]) for neighbour in neighbours)
        return max(1, int(min(len(offer["cpus"]) // sharing, offer["quota"] / len(neighbours))))
    bound = [cpu for neighbour in neighbours for cpu in neighbour["cpus"]]
    shared = len(bound) > len(set(bound)) or granted * len(neighbours) > offer["quota"]
    if len(neighbours) > 1 and shared:
        return 1
    asked = offer["omp_threads"]
    return min(granted, int(asked)) if asked.isdigit() and int(asked) > 0 else granted
