#!/usr/bin/env python3
"""Serve a trained GPT, as OpenAI's clients expect it: text and chat, streamed, many at a time.

    python scripts/serve.py       # what lesson 13 or scripts/align.py made last; before that, assets/models/plays
    python scripts/serve.py outputs/mine --step newest --port 8123  # a run's checkpoints; or a .safetensors file
    python scripts/serve.py outputs/mine --gate-text held_out.txt --watch-s 30   # newer ones, if they are not worse
    python scripts/launch.py --nproc 2 scripts/serve.py -- outputs/mine --tensor 2    # two ranks share each layer

You should see one line with the model, and the address of a chat page with the token in it: open it, or give both to
`openai.OpenAI(base_url=".../v1", api_key=...)`. Behind a hub: the same page by jupyter-server-proxy, .../proxy/PORT/.
Where stdout is no terminal, as in a job, the token is only in the file that the line names (mode 0600). It listens on
loopback unless --host says otherwise; a token is always asked for, since loopback is shared on a login node. The token
can be set by the variable MANYHANDS_SERVE_TOKEN; there is no flag, because every user of a machine sees flags.

Prompt and answer together fit into the model's context (block_size of its training, or max_positions): a chat leaves
out its oldest turns and says so; what is longer still is refused with the numbers. /healthz needs no token, and
`curl -H "Authorization: Bearer ..." .../metrics` is for Prometheus. Ctrl-C or SIGTERM: what was asked for is finished,
for up to --drain-s; a second Ctrl-C does not wait. Status 0: a clean end. 2: there is nothing to
serve, it cannot start, or a value makes no sense, with the cure. 130: a second Ctrl-C.
"""

import os
import sys
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

sys.path.insert(0, str(Path(__file__).parent))  # it runs without an install

import manyhands.launch.entry as entry  # first: Ctrl-C in the imports below is a sentence
import tyro
from manyhands.config.bounds import Count, Positive, Rate
from manyhands.config.command_line import parsed
from manyhands.serve.schema import Limits
from pydantic import Field

ALIGNED = ("align/latest/checkpoints", "13_llm_alignment/latest/aligned.safetensors")  # among the outputs
PLAYS = Path(__file__).parents[1] / "assets" / "models" / "plays.safetensors"  # the model that the course ships
SMALL = 20e6  # parameters


@dataclass(frozen=True)
class Options:
    # a folder of checkpoints, a run's, one step's, one as transformers writes it, or a .safetensors file; none: what
    # lesson 13 or align.py made last, or the shipped assets/models/plays.safetensors
    source: tyro.conf.Positional[Path | None] = None
    step: str = "best"  # which checkpoint: best (validation loss), newest, or a number
    name: Annotated[str, Field(min_length=1)] = "manyhands"  # what clients call the model
    host: str = "127.0.0.1"  # where to listen; 0.0.0.0: for everybody who reaches this machine
    port: Annotated[int, Field(ge=0, lt=65536)] | None = None  # none: 8000, or another one where that is taken
    gate_text: Path | None = None  # the text that new checkpoints are judged on; none: the end of the course's corpus
    gate_tolerance: Rate = 0.02  # nats per token by which a new one may be worse
    # look for a newer checkpoint so often; none: only when POST /admin/checkpoint asks
    watch_s: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    drain_s: Count = 30  # after SIGTERM, for what is being written
    cap: Limits = Limits()
    device: Literal["auto", "cpu", "cuda", "xpu"] = "auto"  # where to compute
    dtype: Literal["fp32", "bf16"] = "fp32"  # of weights, products and the cache; bf16: half the memory
    tensor: Positive = 1  # ranks that share each layer and the cache: as many as launch.py starts


def default_source():
    """Return what lesson 13 or align.py has made last; before that, the model of 36 plays. Says which in one line."""
    from manyhands.checkpoint.manifest import steps_in
    from manyhands.launch.run_folder import outputs_folder

    places = [outputs_folder() / name for name in ALIGNED]
    # a run that has just begun has a folder, and no checkpoint in it
    there = [path for path in places if path.is_file() or steps_in(path)]
    if there:
        source = max(there, key=lambda path: path.stat().st_mtime)
        print(f"no model named: {source}, the aligned model that was made last", flush=True)
        return source
    name = PLAYS.relative_to(PLAYS.parents[2])
    print(f"no model named, and none aligned yet: {name} continues your text in Shakespeare's style", flush=True)
    return PLAYS


def make_service(options, load, token, shared=None):
    """The Service of the model that `load(step)` returns, which `shared` ranks share. CheckpointError, ValueError."""
    import torch
    from manyhands.checkpoint.export import described
    from manyhands.serve import gate
    from manyhands.serve.engine import Runner
    from manyhands.serve.service import Service
    from manyhands.serve.vocabulary import Vocabulary

    model, metadata = load(options.step)
    about = described(model, metadata)
    if model.num_params() < SMALL:  # sharing such small products costs more than it gains
        torch.set_num_threads(1)
    if shared is not None:
        held_out_ids, load, runner = None, _no_other, shared.lead
    else:
        held_out_ids, runner = gate.held_out(Vocabulary(metadata), options.gate_text), Runner
    service = Service(
        model, metadata, token, held_out_ids, load, options.name, options.cap, options.gate_tolerance, runner
    )
    print(
        f"{about}, context {service.context}; cache {service.engine.cache.num_bytes() / 2**20:.1f} MiB"
        f"{f' on each of {shared.size} ranks' if shared is not None else ''}; "
        f"{'chat template' if service.words.speaks_template else 'base model'}",
        flush=True,
    )
    return service


def _no_other(step):
    from manyhands.checkpoint.manifest import CheckpointError

    raise CheckpointError("a model that ranks share is not changed while it serves; start the server again")


def tell_address(options, address, token, path):
    """Say where the page is: with the token on its user's terminal, without it anywhere else."""
    from manyhands.serve.http import write_address

    write_address(path, address, token)
    if sys.stdout.isatty():
        print(f"open {address}/#token={token}\n(also in {path}, which only you can read)", flush=True)
    else:
        print(f"listening on {address}; the token is in {path}, which only you can read", flush=True)
    if options.host not in ("127.0.0.1", "::1", "localhost"):
        print(f"--host {options.host}: others on the network reach it, and what is sent is not encrypted", flush=True)


def serve(options, shared=None):
    """Run until a signal. Raises CheckpointError, ValueError or OSError if it cannot start."""
    from manyhands.launch.devices import device_named
    from manyhands.launch.run_folder import outputs_folder
    from manyhands.serve import http

    token, device = http.make_token(os.environ), device_named(options.device)
    load = partial(loaded, options, device) if shared is None else lambda step: (shared.model, shared.metadata)
    with closing(http.listen(options.host, options.port)) as bound:
        app = http.make_app(make_service(options, load, token, shared), options.source, options.watch_s)
        address = http.address_of(bound)
        path = outputs_folder() / "serve" / f"serving-{bound.getsockname()[1]}.json"
        tell = partial(tell_address, options, address, token, path)  # not before a signal ends it as it should
        try:
            http.Server(app, options.drain_s, tell).run_until_signal(bound)
        finally:
            path.unlink(missing_ok=True)


def loaded(options, device, step):
    """(model, metadata) of a step, on a device. Raises CheckpointError."""
    from manyhands.checkpoint.export import DTYPES, load_model

    model, metadata = load_model(options.source, step, lambda text: print(text, file=sys.stderr, flush=True))
    return model.to(device, DTYPES[options.dtype]), metadata


def serve_on_ranks(options):
    """`serve` on rank 0, while the other ranks compute with it: they share the model."""
    import signal

    from manyhands.launch.join import join, leave, mpi_world
    from manyhands.launch.launchers import resolve
    from manyhands.serve.tensor_ranks import TensorRanks

    if options.watch_s is not None or options.gate_text is not None:
        raise ValueError("ranks that share a model serve one checkpoint; leave --watch-s and --gate-text out")
    if (n := resolve().world_size or mpi_world().Get_size()) != options.tensor:
        started = f"--tensor {options.tensor} needs as many ranks, and {n} {'was' if n == 1 else 'were'} started"
        raise ValueError(f"{started}; use scripts/launch.py --nproc {options.tensor} scripts/serve.py -- ...")
    same = {name: str(getattr(options, name)) for name in ("source", "step", "dtype")}
    ranks = join(name="serve", device=options.device, options=same)
    shared = TensorRanks(ranks, partial(loaded, options, "cpu", options.step))
    if ranks.rank == 0:
        try:
            serve(options, shared)
        finally:
            shared.end()
    else:
        for number in (signal.SIGTERM, signal.SIGINT):  # rank 0 first finishes what was asked for
            signal.signal(number, signal.SIG_IGN)
        shared.follow()
    leave()


def main(argv=None):
    from manyhands.launch.program import end

    try:
        options = parsed(Options, sys.argv[1:] if argv is None else argv, "serve.py", __doc__)
        options = replace(options, source=options.source or default_source())
        serve(options) if options.tensor == 1 else serve_on_ranks(options)
        return 0
    except (ValueError, OSError) as error:
        end(f"serve.py: {error}", 2)


if __name__ == "__main__":
    entry.run_program("serve.py", main)
