"""Manage one server's state and process requests, from parsed JSON to pieces of text; `http` has the routes.

    service = Service(model, metadata, token, held_out_ids, load)
    await service.start()                          # in the server's event loop
    ticket = await service.submit(request)         # Refusal if it is invalid or the server is full
    async for piece in ticket.pieces(): ...        # new tokens, as they are drawn
    service.close(ticket, "gone")                  # exactly once for every ticket
    verdict = await service.consider("newest")     # a new checkpoint, through the gate
    await service.stop()

Everything runs in the event loop, except the engine's steps, which run in a thread. Changes requested during a step
are applied before the next one. A slow reader gets more tokens at a time and does not delay others.
"""

import asyncio
import hashlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from manyhands.checkpoint.export import not_finite
from manyhands.gpt.model import GPT
from manyhands.serve import gate
from manyhands.serve.engine import NOT_FINITE, Engine, Runner
from manyhands.serve.scheduler import CachedSequence
from manyhands.serve.schema import ChatRequest, CompletionRequest, Limits, Refusal
from manyhands.serve.vocabulary import TextSoFar, TooLong, Vocabulary

log = logging.getLogger("manyhands.serve")
EVENT_S = 0.04  # tokens drawn within this many seconds are sent together


class Piece(NamedTuple):
    """A choice's new text since the last piece."""

    choice: "Choice"
    text: str
    tokens: list[tuple]  # of the text, where log p is asked for: (id, where it begins, log p, {id: log p})
    finish: str | None  # why the text has ended, if it has


class Choice:
    """One text of a request, while it is generated."""

    def __init__(self, index: int, sequence: CachedSequence, text: TextSoFar, echo: str):
        self.index, self.sequence, self.text = index, sequence, text
        self.ids: list[int] = []  # drawn, and not read yet
        self.finish: str | None = None
        self.shown, self.echo = "", echo  # echo: stands before the first piece
        self.tokens: list[tuple] = []  # of `shown`

    def take(self) -> Piece:
        """Convert the ids drawn so far into a Piece."""
        ids, self.ids = self.ids, []
        piece = self.text.add(ids)
        if self.text.stopped:  # at a string; the engine may be behind it already
            self.finish = "stop"
        elif self.finish is not None:
            piece += self.text.end()
        if not self.shown:
            piece = self.echo + piece
        self.shown += piece
        tokens, sequence = [], self.sequence
        if sequence.sampling.logprobs is not None:
            for i in range(len(self.tokens), self.text.ids_shown()):
                start = len(self.echo) + self.text.starts[i]
                tokens.append((sequence.ids[sequence.prompt_length + i], start, *sequence.logprobs[i]))
        self.tokens += tokens
        return Piece(self, piece, tokens, self.finish)


class Ticket:
    """One request and its texts in progress: `n` choices for each prompt, in the order of prompts."""

    def __init__(self, choices: list[Choice], n: int, dropped_messages: int, drop: Callable[[CachedSequence], None]):
        self.choices, self.n, self.dropped_messages, self.drop = choices, n, dropped_messages, drop
        self.version = None  # of the model that writes, known with the first token
        self.submitted_s, self.first_s = time.monotonic(), None
        self.error: Refusal | None = None
        self.news = asyncio.Event()
        self.timer: asyncio.TimerHandle  # fails it when its time is over

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield new pieces as they arrive. Raise the Refusal passed to `fail`."""
        unfinished = list(self.choices)
        while unfinished:
            await self.news.wait()
            self.news.clear()
            for choice in list(unfinished):
                if self.error is not None:
                    raise self.error
                if choice.ids:
                    piece = choice.take()
                    if piece.finish is not None:
                        unfinished.remove(choice)
                        self.drop(choice.sequence)
                    yield piece

    def fail(self, error: Refusal) -> None:
        """Make the reader of further pieces raise this Refusal."""
        self.error = error
        self.news.set()


class Live:
    """The model that serves new requests. Its version names the step, and differs between different weights."""

    def __init__(self, model: GPT, metadata: dict):
        digest = hashlib.sha256()
        for name, tensor in model.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        self.model, self.metadata = model, metadata
        self.version = f"step-{metadata['step']}-{digest.hexdigest()[:8]}"


class Service:
    """The server without HTTP. `name`: the model's name for clients.

    `held_out_ids` [n] are the text for judging a new checkpoint, and `tolerance` is the nats per token by which it may
    be worse; without them none is judged. `load(step)` returns a checkpoint's (model, metadata); without it none can be
    loaded. `runner` is the engine's. Raise ValueError for a model with a weight that is NaN or infinite.
    """

    def __init__(
        self, model: GPT, metadata: dict, token: str, held_out_ids: torch.Tensor | None,
        load: Callable[[str], tuple] | None = None, name="manyhands", limits=Limits(), tolerance=0.02,  # noqa: B008
        runner: Callable[[GPT, int, int], Runner] = Runner,
    ):  # fmt: skip
        if (bad := not_finite(model)) is not None:
            raise ValueError(f"{bad} of step {metadata['step']} holds NaN or infinity; serve another checkpoint")
        self.live, self.token, self.name, self.limits = Live(model, metadata), token, name, limits
        self.held_out_ids, self.load, self.tolerance = held_out_ids, load, tolerance
        self.words, self.started = Vocabulary(metadata), int(time.time())
        size, running = limits.block_size, limits.running
        trained = running * -(-model.config.block_size // size)
        blocks = limits.blocks or max(trained, -(-self.context // size))
        sizes = blocks, size, running, limits.prefill_tokens, len(self.words)
        self.engine = Engine(model, self.live.version, *sizes, runner)
        self.waited_for: dict[CachedSequence, tuple[Ticket, Choice]] = {}  # those that are not over for the engine
        self.changes: deque[tuple | None] = deque()  # changes to apply to the engine before its next step
        self.failed = False  # the last step did
        self.metrics = Metrics(self.engine)

    @property
    def context(self) -> int:
        """Return the number of positions of prompt and answer together."""
        return self.live.model.config.context

    async def start(self) -> None:
        self.woken, self.still, self.judging = asyncio.Event(), asyncio.Lock(), asyncio.Lock()
        self.thread = ThreadPoolExecutor(1, "engine")
        self.writing = asyncio.create_task(self._write())
        self.metrics.live_step.set(self.live.metadata["step"])
        self.first_look = asyncio.create_task(self._look_at_held_out())

    async def stop(self) -> None:
        """Stop after the current step. Open requests get no more tokens."""
        tasks = self.writing, self.first_look
        self.changes.append(None)  # no step after the present one
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.thread.shutdown()

    def healthy(self) -> bool:
        return not self.failed and not self.writing.done()

    async def submit(self, request: CompletionRequest | ChatRequest) -> Ticket:
        """Return a Ticket for a request. Raise Refusal: 400 for a text that does not fit the model, 429 if full."""
        code, sampling = "invalid_value", request.sampling(self.words)
        choices: list[Choice] = []
        try:
            prompts = request.encode(self.words, self.context)
            for ids, echo in prompts.each:
                code = "context_length_exceeded"
                max_tokens = request.most or max(1, self.context - len(ids))
                for i in range(request.n):
                    new = self.engine.new_sequence(ids, max_tokens, sampling, request.seed, prompts.stop_ids, i)
                    text = TextSoFar(self.words, (*request.stop, *prompts.stop_strings))
                    choices.append(Choice(len(choices), new, text, echo))
                await asyncio.sleep(0)  # others are answered while many prompts are read
                code = "invalid_value"
        except ValueError as error:
            code = "context_length_exceeded" if isinstance(error, TooLong) else code
            raise Refusal(400, str(error), code, request.source) from None
        texts, running, waiting = len(choices), self.limits.running, self.limits.queue
        if texts > running + waiting:
            sentence = f"{texts} texts are asked for and this server holds {running + waiting}; ask for fewer at once"
            raise Refusal(400, sentence, "too_many_texts", "n")
        if len(self.waited_for) + texts > running + waiting:
            sentence = f"{running} requests run and {waiting} wait, which is all the room; try again later"
            raise Refusal(429, sentence, "queue_full", headers={"Retry-After": "1"})
        siblings = [choice.sequence for choice in choices]
        ticket = Ticket(choices, request.n, prompts.dropped_messages, self._drop)
        seconds = self.limits.request_s
        too_late = Refusal(504, f"not finished within {seconds:g} s; ask for fewer tokens", "timeout")
        ticket.timer = asyncio.get_running_loop().call_later(seconds, ticket.fail, too_late)
        for choice in choices:
            choice.sequence.siblings = siblings
            self.waited_for[choice.sequence] = ticket, choice
            self._change(self.engine.scheduler.add, choice.sequence)
        return ticket

    def close(self, ticket: Ticket, reason: str | None = None) -> None:
        """Close a request for `reason` (none: its texts have ended) and free its places before the next step."""
        ticket.timer.cancel()
        for choice in ticket.choices:
            self._drop(choice.sequence)
        self.metrics.note_end(ticket, reason)

    def _drop(self, sequence):
        if self.waited_for.pop(sequence, None) is not None:
            self._change(self.engine.scheduler.cancel, sequence)

    def _change(self, change, sequence):
        self.changes.append((change, sequence))
        self.woken.set()

    async def _write(self):
        """Main loop: apply pending changes, then step until there are more."""
        loop, engine = asyncio.get_running_loop(), self.engine
        while True:
            await self.woken.wait()
            async with self.still:
                while self.changes:
                    change, sequence = self.changes.popleft()
                    change(sequence)
                if engine.idle():
                    self.woken.clear()
                    continue
                try:
                    await loop.run_in_executor(self.thread, self._steps, loop)
                except Exception:  # an error of one request must not end all others
                    log.exception("the engine failed in a step")
                    self.failed = True
                    self._drop_all()

    def _steps(self, loop):
        """Run steps in the thread, without waiting for the loop, until a change is pending."""
        scheduler, drawn, told_s = self.engine.scheduler, [], 0.0
        while True:
            new = [(sequence, next_id, sequence.finish) for sequence, next_id in self.engine.step()]
            drawn += new
            last = self.changes or scheduler.hold_new or self.engine.idle()
            # an event costs the loop as much as a token costs the engine: first and last tokens are not kept waiting
            ends = any(finish or len(sequence.ids) == sequence.prompt_length + 1 for sequence, _, finish in new)
            if last or ends or time.monotonic() >= told_s + EVENT_S:
                loop.call_soon_threadsafe(self._deliver, drawn)
                drawn, told_s = [], time.monotonic()
            if last:
                return

    def _deliver(self, drawn):
        now, self.failed = time.monotonic(), False
        for sequence, next_id, finish in drawn:
            if sequence not in self.waited_for:  # closed during the step
                continue
            ticket, choice = self.waited_for[sequence]
            if ticket.first_s is None:
                ticket.first_s, ticket.version = now - ticket.submitted_s, self.engine.version
            if finish is not None:
                del self.waited_for[sequence]
            if finish == NOT_FINITE:
                ticket.fail(Refusal(500, "the model's numbers for this text are not finite; change the text", finish))
                continue
            choice.ids.append(next_id)
            choice.finish = finish  # as of this step: the thread may be further
            ticket.news.set()

    def _drop_all(self):
        scheduler = self.engine.scheduler
        for sequence in [*scheduler.running, *scheduler.waiting]:
            scheduler.cancel(sequence)
            if sequence in self.waited_for:
                self.waited_for.pop(sequence)[0].fail(
                    Refusal(500, "the engine failed while it computed this; try again", "engine_failed")
                )

    async def consider(self, step: str) -> gate.Verdict:
        """Judge the checkpoint of a step ("newest", "best", or a number), serve it if it passes, return the Verdict.

        The old model first finishes the started requests, and none is dropped. Raise Refusal (409) while another
        checkpoint is judged, or if none can be loaded; errors of `load` propagate.
        """
        if self.load is None:
            raise Refusal(409, "this server has no folder of checkpoints; start scripts/serve.py with one", "no_source")
        if self.judging.locked():
            raise Refusal(409, "another checkpoint is being judged; wait for it", "busy")
        async with self.judging:
            verdict, candidate = await asyncio.to_thread(self._judge, step)
            self.metrics.candidates.labels("passed" if verdict.passed else "refused").inc()
            if verdict.passed and candidate.version != self.live.version:
                await self._change_model(candidate)
                self.metrics.live_step.set(candidate.metadata["step"])
                self.metrics.held_out_nats.set(verdict.loss)
            log.info("checkpoint %s: %s; %s serves", candidate.version, verdict.sentence, self.live.version)
            return verdict

    def _judge(self, step):
        candidate, live = Live(*self.load(step)), self.live
        models = candidate.model, candidate.metadata, live.model, live.metadata
        return gate.judge(*models, self.held_out_ids, self.tolerance), candidate

    async def _change_model(self, candidate):
        """Change the model between two steps, once started requests have finished; waiting ones get the new model."""
        self.engine.scheduler.hold_new = True
        try:
            while self.live is not candidate:
                async with self.still:  # the next step waits in line for it
                    if not self.engine.scheduler.unfinished():
                        self.engine.change_model(candidate.model, candidate.version, len(self.words))
                        self.live = candidate
        finally:
            self.engine.scheduler.hold_new = False

    async def _look_at_held_out(self):
        live = self.live
        if self.held_out_ids is None:
            return
        nats = await asyncio.to_thread(gate.loss_on, live.model, self.held_out_ids)
        if live is self.live:
            self.metrics.held_out_nats.set(nats)


class Metrics:
    """A server's counters for Prometheus, in a separate registry. Labels never contain text from a client.

    Drift: `prompt_nats` is the loss on recent prompts, per token; `held_out_nats` is the loss on the gate's held-out
    text. If the first grows far above the second, users write text unlike the training data.
    """

    SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120)
    FADING = 0.999  # the weight of a token of a prompt after each further one: about the last 1,000 count

    def __init__(self, engine: Engine):
        def make(kind, name, words, labels=(), **more):
            return kind(f"manyhands_{name}", words, labels, registry=self.registry, **more)

        self.registry, self.engine = CollectorRegistry(), engine
        self.requests = make(Counter, "requests", "answers", ["route", "status"])
        self.ended = make(Counter, "generations", "texts, by why they ended", ["reason"])
        self.tokens = make(Counter, "tokens", "tokens: of prompts, found in the cache, drawn", ["kind"])
        self.preemptions = make(Counter, "preemptions", "sequences that gave their blocks back to an older one")
        self.candidates = make(Counter, "candidates", "checkpoints at the gate", ["verdict"])
        self.first_s = make(Histogram, "first_token_seconds", "to the first token", buckets=self.SECONDS)
        self.whole_s = make(Histogram, "request_seconds", "to the last token", buckets=self.SECONDS)
        self.live_step = make(Gauge, "model_step", "the training step of the model that serves")
        self.held_out_nats = make(Gauge, "held_out_nats", "its loss on the gate's text, nats per token")
        self.held_out_nats.set(float("nan"))
        self.seen, self.recent = (0.0, 0), (0.0, 0.0)  # of the engine's (nats, tokens) of prompts; with older ones less
        for name, words, function in (
            ("running", "requests that are computed", lambda: len(engine.scheduler.running)),
            ("waiting", "requests in the queue", lambda: len(engine.scheduler.waiting)),
            ("blocks_held", "blocks of the cache that somebody holds", engine.pool.held),
            ("blocks", "blocks of the cache", lambda: engine.pool.num_blocks),
            ("cache_bytes", "memory of the cache", lambda: engine.cache.num_bytes()),
            ("prompt_nats", "loss on recent prompts, nats per token", self.prompt_nats),
        ):
            make(Gauge, name, words).set_function(function)

    def note_end(self, ticket: Ticket, reason: str | None) -> None:
        """Count the end of a request, for `reason`; none: each text for its own reason."""
        for choice in ticket.choices:
            sequence = choice.sequence
            self.ended.labels(reason or choice.finish).inc()
            self.preemptions.inc(sequence.num_preemptions)
            self.tokens.labels("prompt").inc(sequence.prompt_length)
            self.tokens.labels("reused").inc(sequence.num_cached_tokens)
            self.tokens.labels("drawn").inc(len(sequence.ids) - sequence.prompt_length)
        if ticket.first_s is not None:
            self.first_s.observe(ticket.first_s)
        self.whole_s.observe(time.monotonic() - ticket.submitted_s)

    def prompt_nats(self) -> float:
        """Return the nats per token of recent prompts, NaN before the first one."""
        now = self.engine.prompt_nats, self.engine.prompt_tokens
        fade = self.FADING ** (now[1] - self.seen[1])
        nats, tokens = (fade * old + new - before for old, new, before in zip(self.recent, now, self.seen, strict=True))
        self.seen, self.recent = now, (nats, tokens)
        return nats / tokens if tokens else float("nan")

    def content(self) -> bytes:
        """Return the page that Prometheus reads."""
        return generate_latest(self.registry)
