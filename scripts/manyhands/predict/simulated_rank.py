"""One rank of a world that is not there: torch builds its share of a model on the fake backend, and the bytes are
counted.

    python -m manyhands.predict.simulated_rank 64,1024 --preset gpt-7b --parallel.tensor 8   # JSON: bytes
    in_own_process([64, 1024], ["--preset", "gpt-7b", "--parallel.tensor", "8"])           # the same, in Python

`torch.testing._internal.distributed.fake_pg` (torch 2.13) has a process group whose collectives return at once and move
nothing, so one process can be rank 0 of 1,024. The weights are on the meta device: shapes and no numbers. What torch
cuts is real: DTensor's and fully_shard's shards, padding included, and Adam's state. Not simulated: anything of time,
and what a forward keeps. Layouts of strategies fsdp and ddp: a replica is the whole model, and nothing cuts it.

It runs in a process of its own, because a process has one default process group, and ranks are in theirs.
"""

import json
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from manyhands.config.layout import AXES, layers_of_stages, resolve_layout, stage_owners
from manyhands.config.options import OptionError, model_config, read_options
from manyhands.course.folders import SCRIPTS
from manyhands.gpt.model import GPT
from manyhands.launch.launchers import without_launchers
from manyhands.launch.settings import environment, for_python
from manyhands.measure.tensor_bytes import tensor_bytes
from manyhands.parallel.experts import expert_mesh, spread_experts
from manyhands.parallel.fsdp import shard
from manyhands.parallel.pipeline import Stage
from manyhands.parallel.tensor_parallel import apply_tensor_parallel
from manyhands.predict.memory import bytes_per_rank
from manyhands.predict.models import SHAKESPEARE_VOCAB_SIZE

PER_NODE = 8


def in_own_process(worlds: list[int], flags: list[str], timeout_s: float = 150) -> list[dict]:
    """[what `simulate` returns] for each number of ranks in `worlds`. Local; nothing is sent.

    Raise ValueError with the sentence of what was refused, subprocess.TimeoutExpired after `timeout_s`.
    """
    environ = for_python(without_launchers(environment()), SCRIPTS)  # a launcher's variables would make a rank of it
    command = [sys.executable, "-m", "manyhands.predict.simulated_rank", ",".join(map(str, worlds)), *flags]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        raise ValueError((done.stderr.strip() or f"it ended with status {done.returncode}").splitlines()[-1])
    return [json.loads(line) for line in done.stdout.splitlines()]


def simulate(gpus: int, flags: list[str]) -> dict:
    """{"layout", "held", "planned", "seconds"} of rank 0 among `gpus`; held and planned are {kind: bytes}.

    Raise OptionError, and LayoutError, for flags that do not go together and for a strategy other than these.
    """
    options = read_options(flags)
    config = model_config(options, SHAKESPEARE_VOCAB_SIZE)
    layout = resolve_layout(options, config, gpus, min(PER_NODE, gpus))
    if layout.dp_mode(options) not in ("fsdp", "replicas"):
        raise OptionError(f"strategy={options.parallel.strategy} is not simulated; use fsdp or ddp")
    start = time.perf_counter()
    held = _held(config, layout, options)
    return {
        "layout": str(layout),
        "held": held,
        "planned": bytes_per_rank(config, layout, options).by_kind(),
        "seconds": time.perf_counter() - start,
    }


def _held(config, layout, options):
    """{kind: bytes} that torch gives rank 0. Opens and closes the process's default group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.world_size)
    mesh = init_device_mesh("cpu", tuple(getattr(layout, axis) for axis in AXES), mesh_dim_names=AXES)
    parts, parallel = _parts(config, layout, options), options.parallel
    for part in parts:
        if layout.expert > 1:
            spread_experts(part, expert_mesh("cpu", layout), torch.device("meta"))
        if layout.tensor > 1:
            apply_tensor_parallel(part, mesh["tensor"], parallel.sequence_parallel, parallel.loss_parallel)
        if layout.dp_mode(options) == "fsdp":
            shard(part, mesh, options)
    model = torch.nn.ModuleList(parts)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()  # Adam's state is made in the first step
    held = tensor_bytes(model, optimizer)
    counters = sum(4 for state in optimizer.state.values() if "step" in state)
    dist.destroy_process_group()
    return {"parameters": held.parameters, "gradients": held.gradients, "optimizer": held.optimizer - counters}


def _parts(config, layout, options):
    """The GPT, or the first pipeline rank's stages of it, without numbers."""
    with torch.device("meta"):
        model = GPT(config)
    if layout.pipeline == 1:
        return [model]
    owners = stage_owners(options.parallel.schedule, layout.pipeline, layout.stages_per_rank)
    layers = layers_of_stages(config.n_layer, len(owners))
    return [Stage(model, layers[i]) for i, owner in enumerate(owners) if owner == 0]


if __name__ == "__main__":
    try:
        for world in sys.argv[1].split(","):
            print(json.dumps(simulate(int(world), sys.argv[2:])), flush=True)
    except OptionError as refused:
        sys.exit(f"simulated_rank: {refused}")
