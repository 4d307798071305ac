"""What a server counts, for Prometheus: requests, tokens, times, room, and how far prompts are from the training text.

Labels are routes, statuses and reasons, never anything that a client has sent. Drift: `prompt_nats` is the loss on
recent prompts, per token; `held_out_nats` is the loss on the gate's held-out text. If the first leaves the second
behind, people write what the model was not trained on.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120)
FADING = 0.999  # the weight of a token of a prompt after each further one: about the last 1,000 count


class ServerMetrics:
    """One server's numbers in a registry of their own; `content()` is the page that Prometheus reads."""

    def __init__(self, worker):
        self.registry = CollectorRegistry()
        self.worker = worker
        self.requests = self._make(Counter, "requests", "answers", ["route", "status"])
        self.ended = self._make(Counter, "generations", "texts, by why they ended", ["reason"])
        self.tokens = self._make(Counter, "tokens", "tokens: of prompts, found in the cache, drawn", ["kind"])
        self.put_back = self._make(Counter, "put_back", "sequences that gave their blocks back to an older one", [])
        self.first_s = self._make(Histogram, "first_token_seconds", "from the request to its first token", [], SECONDS)
        self.whole_s = self._make(Histogram, "request_seconds", "from the request to its last token", [], SECONDS)
        self.candidates = self._make(Counter, "candidates", "checkpoints at the gate", ["verdict"])
        self.live_step = self._make(Gauge, "model_step", "the training step of the model that serves")
        self.held_out_nats = self._make(Gauge, "held_out_nats", "its loss on the gate's text, nats per token")
        self.drift = Drift(worker.engine)
        engine, scheduler = worker.engine, worker.engine.scheduler
        for name, words, function in (
            ("running", "requests that are computed", lambda: len(scheduler.running)),
            ("waiting", "requests in the queue", lambda: len(scheduler.waiting)),
            ("blocks_held", "blocks of the cache that somebody holds", engine.pool.held),
            ("blocks", "blocks of the cache", lambda: engine.pool.num_blocks),
            ("cache_bytes", "memory of the cache", lambda: engine.cache.num_bytes()),
            ("prompt_nats", "loss on recent prompts, nats per token", self.drift.nats),
        ):
            self._make(Gauge, name, words).set_function(function)

    def _make(self, kind, name, words, labels=(), buckets=None):
        more = {"buckets": buckets} if buckets else {}
        return kind(f"manyhands_{name}", words, list(labels), registry=self.registry, **more)

    def note_end(self, ticket, reason: str, seconds: float) -> None:
        """A text has ended, for `reason`, so many seconds after it was asked for."""
        sequence = ticket.sequence
        self.ended.labels(reason).inc()
        self.put_back.inc(sequence.preempted)
        self.tokens.labels("prompt").inc(sequence.prompt_length)
        self.tokens.labels("reused").inc(sequence.reused)
        self.tokens.labels("drawn").inc(len(sequence.ids) - sequence.prompt_length)
        if ticket.first_s is not None:
            self.first_s.observe(ticket.first_s)
        self.whole_s.observe(seconds)

    def note_model(self, metadata: dict, held_out_nats: float | None = None) -> None:
        """Which model serves from now on; its loss on the gate's text, if that is known yet."""
        self.live_step.set(metadata["step"])
        self.held_out_nats.set(float("nan") if held_out_nats is None else held_out_nats)

    def content(self) -> bytes:
        return generate_latest(self.registry)


class Drift:
    """A mean over the prompts' tokens in which older ones count less, out of the engine's two running sums."""

    def __init__(self, engine):
        self.engine = engine
        self.seen = (0.0, 0)
        self.sum = self.weight = 0.0

    def nats(self) -> float:
        """Nats per token of recent prompts; NaN before the first one."""
        nats, tokens = self.engine.prompt_nats, self.engine.prompt_tokens
        new_nats, new = nats - self.seen[0], tokens - self.seen[1]
        self.seen = nats, tokens
        if new > 0:
            fade = FADING**new
            share = (1 - fade) / (1 - FADING) / new  # what is new counts as if it had come evenly
            self.sum, self.weight = fade * self.sum + share * new_nats, fade * self.weight + share * new
        return self.sum / self.weight if self.weight else float("nan")
