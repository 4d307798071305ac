"""One server's state, and what happens to a request between its JSON and its answer; `app` has the routes.

    service = Service(model, facts, token)
    await service.start()                          # in the event loop that will serve
    ticket = service.submit(asked)                 # Refusal if there is no room
    service.close(ticket, "gone")                  # for every ticket, once, whatever happened
    verdict = await service.consider(load)         # a new checkpoint, through the gate
    await service.stop()

All of it belongs to the event loop's thread, but for the engine, which is the worker's.
"""

import asyncio
import hashlib
import logging
import time
from dataclasses import dataclass, field

import torch

from manyhands.serve import gate
from manyhands.serve.engine import Engine
from manyhands.serve.limits import Limits, Refusal
from manyhands.serve.metrics import ServerMetrics
from manyhands.serve.vocabulary import Vocabulary
from manyhands.serve.worker import Worker

log = logging.getLogger("manyhands.serve")


@dataclass(frozen=True)
class Cache:
    """The paged cache: how many blocks of how many positions. blocks=None: all that run, at full length."""

    blocks: int | None = None
    block_size: int = 16
    prefill_tokens: int = 256  # of prompts in one step

    def num_blocks(self, context, running):
        return self.blocks or running * -(-context // self.block_size)


@dataclass(frozen=True)
class Gate:
    """What a new checkpoint is judged by: ids of a held-out text, and nats by which it may be worse."""

    ids: object = None  # a tensor; None: nothing comes through
    tolerance: float = 0.02


@dataclass
class Live:
    """The model that serves new requests."""

    model: object
    facts: dict
    version: str = field(init=False)

    def __post_init__(self):
        self.version = f"step-{self.facts['step']}-{weights_digest(self.model)}"


class Service:
    """Everything but HTTP. `name` is what clients call the model."""

    def __init__(self, model, facts, token, name="manyhands", limits=None, cache=None, judged_by=None):
        self.live, self.token, self.name = Live(model, facts), token, name
        self.limits, self.gate = limits or Limits(), judged_by or Gate()
        self.words, self.started = Vocabulary(facts), int(time.time())
        cache, context = cache or Cache(), model.config.block_size
        self.engine = Engine(
            model,
            self.live.version,
            cache.num_blocks(context, self.limits.running),
            cache.block_size,
            self.limits.running,
            cache.prefill_tokens,
            len(self.words),
        )
        self.open = set()  # tickets that were not closed
        self.worker = self.metrics = None
        self.judging = asyncio.Lock()

    @property
    def context(self):
        """Positions of prompt and answer together."""
        return self.live.model.config.block_size

    async def start(self):
        self.worker = Worker(self.engine, asyncio.get_running_loop(), self.limits)
        self.metrics = ServerMetrics(self.worker)
        self.metrics.note_model(self.live.facts)
        self.worker.start()
        if self.gate.ids is not None:
            self.first_look = asyncio.ensure_future(self._look_at_held_out(self.live))

    async def _look_at_held_out(self, live):
        nats = await asyncio.to_thread(gate.loss_on, live.model, self.gate.ids)
        if live is self.live:
            self.metrics.note_model(live.facts, nats)

    async def stop(self):
        """End the engine's thread. Requests that are still open get no more tokens."""
        self.worker.stop()
        await asyncio.to_thread(self.worker.join, 30)

    def submit(self, asked):
        """A ticket. Raises Refusal (429, 503) if nothing more can be taken."""
        sequence = self.engine.new_sequence(asked.prompt, asked.max_tokens, asked.sampling, asked.seed, asked.stop_ids)
        ticket = self.worker.submit(sequence)
        self.open.add(ticket)
        return ticket

    def close(self, ticket, reason):
        """The request is over, for whatever reason: its place is free."""
        if ticket in self.open:
            self.open.remove(ticket)
            self.worker.cancel(ticket)
            self.metrics.note_end(ticket, reason, time.monotonic() - ticket.submitted_s)

    async def consider(self, load):
        """The Verdict on the (model, facts) that `load()` returns; if it has passed, it serves now.

        Requests that were being written are finished by the old model first, and none is dropped. Raises Refusal (409)
        while another one is judged; whatever `load` raises goes on.
        """
        if self.judging.locked():
            raise Refusal(409, "another checkpoint is being judged; wait for it", "busy")
        async with self.judging:
            if self.gate.ids is None:
                return gate.Verdict(False, "there is no held-out text to judge it on; name one by --gate-text")
            verdict, candidate = await asyncio.to_thread(self._judge, load)
            self.metrics.candidates.labels("passed" if verdict.passed else "refused").inc()
            if verdict.passed and candidate.version != self.live.version:
                await self.worker.change_model(candidate.model, candidate.version, len(self.words))
                self.live = candidate
                self.metrics.note_model(candidate.facts, verdict.loss)
            log.info("checkpoint %s: %s; %s serves", candidate.version, verdict.sentence, self.live.version)
            return verdict

    def _judge(self, load):
        candidate = Live(*load())
        verdict = gate.judge(
            candidate.model,
            candidate.facts,
            self.live.model,
            self.live.facts,
            self.gate.ids,
            self.gate.tolerance,
        )
        return verdict, candidate


def weights_digest(model):
    """Eight hexadecimal digits that differ between different weights."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:8]
