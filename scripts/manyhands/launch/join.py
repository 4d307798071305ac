"""Enter the process group with `join()`, under any launcher.

    python -m torch.distributed.run --standalone --nproc-per-node 4 scripts/02_collectives.py --repeats 3
    .venv/bin/mpiexec -n 4 python scripts/02_collectives.py --repeats 3
    srun --ntasks 4 python scripts/02_collectives.py --repeats 3
    python scripts/02_collectives.py            # a world of one takes the same path

`launchers` determines who started this process, `rendezvous` how ranks connect, `devices` what they compute on.
"""

import contextlib
import gc
import json
import os
import platform
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from manyhands.course import lesson_parameters
from manyhands.course.pairs import stale_script
from manyhands.launch import devices, settings
from manyhands.launch.allocation import loopback_gloo, missing_interfaces
from manyhands.launch.launchers import LaunchError, resolve, without_launchers
from manyhands.launch.limits import cure
from manyhands.launch.program import SPEAKS_FIRST_S, end, say_nothing_yet, say_status, told, write
from manyhands.launch.ranks import Ranks, joined, remember
from manyhands.launch.rendezvous import Lost, Unreachable, ask_mpi, import_mpi, store_for

LAST_TENSOR_S = 0.1  # on a busy machine, a thread waits up to this long for a core
LESSON_S = 300  # scaled by the patience: lesson 11 trains on one rank while others wait; the first GPU message is slow
BY_HAND_S = 120  # scaled by the patience, for ranks whose launcher does not end them when one has ended
NOTEBOOK_S = 86_400  # longer than the --timeout of any cell, even on a busy machine
TF32 = (
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1, which some containers set, makes this GPU multiply fp32 in TF32: what lessons"
    " compare to 1e-4 may differ; unset it"
)
_again: dict[str, Any] = {}  # the arguments of the last join, until `leave`


def join(
    lesson: dict | None = None, *, name: str | None = None, device: str = "auto",
    timeout_s: float | None = None, quiet: bool = False, options: dict[str, Any] | None = None,
) -> Ranks:  # fmt: skip
    """Enter the process group and return this process's Ranks. All ranks call it; it can be called again.

    `lesson` is the caller's globals(): in a script, flags override the values of its `parameters` cell there.
    A program that parses its flags itself passes its `name` instead, and `options` that all ranks must have alike.
    `device`: auto, cpu, cuda or xpu; a lesson's own parameter `device` comes first, and "auto" of either means what the
    variable MANYHANDS_DEVICE says, where it is set. `timeout_s` is the group's; LESSON_S times
    `settings.patience` where none is named.
    Raise LaunchError or ParameterError, both ValueErrors; a script prints it once, on rank 0, and ends with
    status 2, before the first collective.
    """
    leave()
    _again.update(lesson=lesson, name=name, device=device, timeout_s=timeout_s, options=options)
    script, least = (lesson or {}).get("__file__", f"{name}.py" if name else None), 1
    try:
        if name is None:
            name = settings.value("MANYHANDS_LESSON", "")
            if script:
                name, options, least = _take_flags(lesson, script)
        named = settings.device()  # first, to refuse invalid values
        wanted = str((lesson or {}).get("device", device)).split(":")[0]
        ranks = _enter(name, named if wanted == "auto" else wanted, timeout_s, quiet, options or {})
    except (LaunchError, lesson_parameters.ParameterError) as error:
        if script is None:
            raise
        end(f"{Path(script).name}: {error}", getattr(error, "status", 2), everybody=isinstance(error, Unreachable))
    except RuntimeError as error:  # of a thread or a library that met a limit of this machine
        if script is None or not (what_to_do := cure(str(error))):
            raise
        end(f"{Path(script).name}: {str(error).splitlines()[0]}; {what_to_do}", 2, everybody=True)
    remember(ranks)
    if ranks.world_size < least:
        refuse(f"it needs at least {least} ranks, and was started on {ranks.world_size}")
    if ranks.rank == 0:
        say_nothing_yet()  # from an earlier group
        if script and not quiet and (warning := stale_script(script)):
            write(warning + "\n")
    return ranks


def leave() -> None:
    """Leave the process group, if there is one."""
    _again.clear()
    if dist.is_initialized():
        first = dist.get_rank() == 0
        dist.destroy_process_group()
        # A thread of gloo may still hold the last tensor that it sent. If that happens while the interpreter ends, the
        # process dies of "terminate called without an active exception" (torch 2.13, one run in ten): let it go now.
        gc.collect()
        time.sleep(LAST_TENSOR_S)
        if first:
            say_status(0)  # any other ending reports its status after this


def rejoin() -> bool:
    """Leave the broken group after a failure in a notebook and join again. Return False if there was no group."""
    if not _again:
        return False
    again = dict(_again)
    with contextlib.suppress(RuntimeError):  # leaving a broken group may fail
        leave()
    join(**again, quiet=True)
    return True


def refuse(sentence: str) -> None:
    """End before any work, because a lesson's value does not fit the ranks. All ranks call it.

    A script prints the sentence once, on rank 0, and ends with status 2; a notebook gets a ValueError.
    """
    ranks = joined()
    if ranks is None or ranks.launcher == "notebook":
        raise ValueError(sentence)
    if dist.is_initialized():
        dist.barrier()  # no rank leaves while another is still connecting to it
    leave()
    end(f"{ranks.lesson}.py: {sentence}", 2)


def mpi_world() -> Any:
    """Return mpi4py's COMM_WORLD if the launcher made an MPI world, else None (torchrun, srun without PMI, alone)."""
    return import_mpi(info).COMM_WORLD if (info := resolve()).mpi else None


def _take_flags(lesson, script):
    """Apply the flags to `lesson`; return (the script's stem, {parameter: value} but the device, its least ranks)."""
    known = lesson_parameters.read(script)
    if {"-h", "--help"} & set(sys.argv[1:]):
        end(lesson_parameters.help_text(known, script), 0, "stdout")
    values = {one.name: one.default for one in known} | (given := lesson_parameters.parse(known, sys.argv[1:]))
    lesson.update(given)
    values = {name: value for name, value in values.items() if name != "device"}
    return Path(script).stem, values, lesson_parameters.least_ranks(known)


def _enter(name, wanted, timeout_s, quiet, options):
    info = resolve()
    if info.launcher == "torchrun":
        for of_mpich in os.environ.keys() - without_launchers(os.environ, only="mpich").keys():
            del os.environ[of_mpich]
    if info.mpi and info.launcher != "notebook":
        info = ask_mpi(info)
    if info.single_node:
        # the interface that a profile names for several nodes may be missing
        lost = missing_interfaces(os.environ)
        settings.set_variables(**loopback_gloo(), **{name: "lo" for name in lost if name.startswith("NCCL")})
    meet_s = timeout_s or (BY_HAND_S if info.launcher == "by hand" else LESSON_S) * settings.patience()
    if timeout_s is None:
        timeout_s = LESSON_S * settings.patience()
    store = store_for(info, meet_s)
    try:
        with told(lambda: _still_missing(store, info, meet_s)):
            offers, plan = _agree(store, info, wanted, options)
    except dist.DistNetworkError as error:
        raise Lost(
            f"rank {info.rank} lost rank 0, which has ended; see its output for the reason, then start again"
        ) from error
    except dist.DistStoreError as error:
        raise Lost(_late(store, info, meet_s)) from error
    if "error" in plan:
        raise LaunchError(plan["error"])
    kind, rank, own = plan["kind"], info.rank, offers[info.rank]
    neighbours = [offer for offer in offers if offer["host"] == own["host"]]
    torch.set_num_threads(devices.threads(kind, own, neighbours))
    device = torch.device("cpu")
    if kind != "cpu":
        device = torch.device(kind, plan["indices"][rank])
        getattr(torch, kind).set_device(device)
    # A notebook's cell has its own time-out, names the silent ranks and frees the others: there the group waits
    # longer than any cell. (Out of patience, NCCL ends the process, and its variables are gone.)
    patience = timedelta(seconds=NOTEBOOK_S if info.launcher == "notebook" else timeout_s)
    torch.set_float32_matmul_precision("highest")  # lessons compare fp32; train.py chooses for itself
    settings.set_default(KINETO_LOG_LEVEL="99")  # torch's profiler would print "USDT: ... profiler_start"
    # No device_id: with one, NCCL makes each later group by splitting the world's communicator. After a split a group
    # of gloo alone may hang (pytorch#145376), and a split after a second join in one process crashes (pytorch#192106).
    at = {"store": store, "rank": rank, "world_size": info.world_size}
    speaks = rank == 0 and info.launcher != "notebook"
    with told(lambda: "rank 0 waits for all ranks to connect; is each alive?" * speaks):
        dist.init_process_group(devices.BACKENDS[kind], **at, timeout=patience)
        dist.all_reduce(torch.ones(1, device=device))  # a library that cannot connect raises here
    if rank == 0 and kind == "cuda" and os.environ.get("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE") == "1":
        write(f"WARNING: {TF32}\n")
    if rank == 0 and not quiet:
        write(devices.describe(info.launcher, offers, plan) + "\n")
    return Ranks(
        rank, info.world_size, own["local_rank"], len(neighbours), device, devices.BACKENDS[kind],
        info.launcher, platform.node(), name,
    )  # fmt: skip


def _missing(store, info):
    """Return (ranks that have not joined, a phrase that names them)."""
    late = [r for r in range(info.world_size) if not store.check([f"offer{r}"])]
    return late, f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late[:8]))}{', ...' * (len(late) > 8)} to join"


def _still_missing(store, info, meet_s):
    """Return a sentence, on the lowest rank that has joined, on those that have not; "" on the others."""
    if info.launcher != "notebook":  # whose cell says itself who is late
        with contextlib.suppress(RuntimeError):
            late, them = _missing(store.clone(), info)  # a connection of its own: the store's waits for an answer
            if late and late[: info.rank] == list(range(info.rank)):
                return f"rank {info.rank} waits for {them}, up to {meet_s:.0f} s; did they start, and are they alive?"
    return ""


def _late(store, info, meet_s):
    """Return a sentence on which ranks have not joined within `meet_s` seconds."""
    with contextlib.suppress(RuntimeError):
        late, them = _missing(store, info)
        if late:
            return f"rank {info.rank} waited {meet_s:.0f} s for {them}; did they start, and are they alive?"
    return f"rank {info.rank} waited {meet_s:.0f} s for rank 0 to choose a device; is it alive?"


def _agree(store, info, wanted, options):
    """Exchange what each rank sees and let rank 0 choose: return (offers in rank order, plan) on every rank.

    Use the store, because the process group's backend depends on the choice. An error of one rank is raised on all.
    """
    offer = devices.look(os.environ) | {"local_rank": info.local_rank, "no_interface": missing_interfaces(os.environ)}
    store.set(f"offer{info.rank}", json.dumps(offer | {"options": options}, default=str))
    if info.rank == 0:
        offers = [json.loads(store.get(f"offer{r}")) for r in range(info.world_size)]
        for r, offer in enumerate(offers):
            if offer["local_rank"] is None:  # the launcher does not set it: count the lower ranks on this host
                offer["local_rank"] = sum(other["host"] == offer["host"] for other in offers[:r])
        try:
            _refuse_unequal([offer.pop("options") for offer in offers])
            plan = devices.choose(wanted, offers)
            for offer in offers:
                for variable, missing in offer["no_interface"].items():
                    if plan["kind"] == "cuda" or variable.startswith("GLOO"):
                        raise LaunchError(
                            f"{variable} names {missing}, and {offer['host']} has no such interface with an address;"
                            " unset it, or name one that `ip -brief addr` shows"
                        )
        except LaunchError as error:
            plan = {"error": str(error)}
        store.set("plan", json.dumps([offers, plan]))
    offers, plan = json.loads(store.get("plan"))
    if "error" in plan:  # then rank 0, which may serve the store, stays until the others know
        store.set(f"read{info.rank}", "")
        if info.rank == 0:
            with contextlib.suppress(dist.DistError):
                store.wait([f"read{r}" for r in range(info.world_size)], timedelta(seconds=SPEAKS_FIRST_S))
    return offers, plan


def _refuse_unequal(options):
    """Raise LaunchError if a rank was started with other options than rank 0: one would wait for the other."""
    for rank, own in enumerate(options):
        if other := [name for name in options[0] if own.get(name) != options[0][name]]:
            of_0, of_other = (f"{other[0]}={of.get(other[0])!r}" for of in (options[0], own))
            more = f" (and {len(other) - 1} more option{'s' * (len(other) > 2)})" * (len(other) > 1)
            raise LaunchError(f"rank 0 has {of_0} and rank {rank} {of_other}{more}; start all with the same options")
