"""One server's state, and what happens to a request between its JSON and its answer; `app` has the routes.

    service = Service(model, metadata, token)
    await service.start()                          # in the event loop that will serve
    ticket = service.submit(request)               # Refusal if it makes no sense, or there is no room
    service.close(ticket, "gone")                  # for every ticket, once, whatever happened
    verdict = await service.consider(load)         # a new checkpoint, through the gate
    await service.stop()

All of it belongs to the event loop's thread, but for the engine, which is the worker's.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from manyhands.serve import gate
from manyhands.serve.engine import Engine
from manyhands.serve.metrics import ServerMetrics
from manyhands.serve.sampler import Sampling
from manyhands.serve.schema import ChatRequest, CompletionRequest, Limits, Refusal
from manyhands.serve.vocabulary import TextSoFar, Vocabulary
from manyhands.serve.worker import Ticket, Worker

log = logging.getLogger("manyhands.serve")


@dataclass
class Live:
    """The model that serves new requests."""

    model: object
    metadata: dict
    version: str = field(init=False)

    def __post_init__(self):
        self.version = f"step-{self.metadata['step']}-{weights_digest(self.model)}"


class Service:
    """Everything but HTTP. `name` is what clients call the model.

    `held_out_ids` [n] are what a new checkpoint is judged on, and `tolerance` is the nats per token by which it may be
    worse. Without such ids none goes live.
    """

    def __init__(self, model, metadata, token, name="manyhands", limits=None, held_out_ids=None, tolerance=0.02):
        self.live, self.token, self.name = Live(model, metadata), token, name
        self.limits, self.held_out_ids, self.tolerance = limits or Limits(), held_out_ids, tolerance
        self.words, self.started = Vocabulary(metadata), int(time.time())
        size, running = self.limits.block_size, self.limits.running
        blocks = self.limits.blocks or running * -(-self.context // size)
        prefill_tokens, version = self.limits.prefill_tokens, self.live.version
        self.engine = Engine(model, version, blocks, size, running, prefill_tokens, len(self.words))
        self.open = set()  # tickets that were not closed
        self.worker = self.metrics = None
        self.judging = asyncio.Lock()

    @property
    def context(self) -> int:
        """Positions of prompt and answer together."""
        return self.live.model.config.block_size

    async def start(self) -> None:
        self.worker = Worker(self.engine, asyncio.get_running_loop(), self.limits)
        self.metrics = ServerMetrics(self.worker)
        self.metrics.note_model(self.live.metadata)
        self.worker.start()
        if self.held_out_ids is not None:
            self.first_look = asyncio.ensure_future(self._look_at_held_out(self.live))

    async def _look_at_held_out(self, live):
        nats = await asyncio.to_thread(gate.loss_on, live.model, self.held_out_ids)
        if live is self.live:
            self.metrics.note_model(live.metadata, nats)

    async def stop(self) -> None:
        """End the engine's thread. Requests that are still open get no more tokens."""
        self.worker.stop()
        await asyncio.to_thread(self.worker.join, 30)

    def submit(self, request: CompletionRequest | ChatRequest) -> Ticket:
        """A Ticket for a `schema.Request`. Raises Refusal: 400 for what the model cannot read or hold, 429, 503."""
        code = "invalid_value"
        try:
            ids, stop_ids, stop_strings = request.encode(self.words)
            code = "context_length_exceeded"
            max_tokens = request.max_completion_tokens or request.max_tokens or max(1, self.context - len(ids))
            sampling = Sampling(request.temperature, request.top_k, request.top_p)
            sequence = self.engine.new_sequence(ids, max_tokens, sampling, request.seed, stop_ids)
        except ValueError as error:
            raise Refusal(400, str(error), code, request.source) from None
        ticket = Ticket(sequence, TextSoFar(self.words, (*request.stop, *stop_strings)))
        self.worker.submit(ticket)
        seconds = self.limits.request_s
        too_late = Refusal(504, f"not finished within {seconds:g} s; ask for fewer tokens", "timeout")
        ticket.timer = asyncio.get_running_loop().call_later(seconds, ticket.fail, too_late)
        self.open.add(ticket)
        return ticket

    def close(self, ticket: Ticket, reason: str) -> None:
        """The request is over, for whatever reason: its place is free."""
        if ticket in self.open:
            self.open.remove(ticket)
            ticket.timer.cancel()
            self.worker.cancel(ticket)
            self.metrics.note_end(ticket, reason, time.monotonic() - ticket.submitted_s)

    async def consider(self, load: Callable[[], tuple]) -> gate.Verdict:
        """The Verdict on the (model, metadata) that `load()` returns; if it has passed, it serves now.

        Requests that were being written are finished by the old model first, and none is dropped. Raises Refusal (409)
        while another one is judged; whatever `load` raises goes on.
        """
        if self.judging.locked():
            raise Refusal(409, "another checkpoint is being judged; wait for it", "busy")
        async with self.judging:
            if self.held_out_ids is None:
                return gate.Verdict(False, "there is no held-out text to judge it on; name one by --gate-text")
            verdict, candidate = await asyncio.to_thread(self._judge, load)
            self.metrics.candidates.labels("passed" if verdict.passed else "refused").inc()
            if verdict.passed and candidate.version != self.live.version:
                await self.worker.change_model(candidate.model, candidate.version, len(self.words))
                self.live = candidate
                self.metrics.note_model(candidate.metadata, verdict.loss)
            log.info("checkpoint %s: %s; %s serves", candidate.version, verdict.sentence, self.live.version)
            return verdict

    def _judge(self, load):
        candidate, live = Live(*load()), self.live
        models = candidate.model, candidate.metadata, live.model, live.metadata
        return gate.judge(*models, self.held_out_ids, self.tolerance), candidate


def weights_digest(model: torch.nn.Module) -> str:
    """Eight hexadecimal digits that differ between different weights."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:8]
