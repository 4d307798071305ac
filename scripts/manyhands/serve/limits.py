"""What a server refuses, and with which status: every limit is here, and every refusal is one sentence with the cure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Of one server. Lengths beyond the model's context are refused in any case: its positions are learned."""

    running: int = 32  # requests that are computed at once
    queue: int = 256  # requests that wait for them; one more is refused with 429
    request_s: float = 120.0  # for a whole request, the queue included
    body_bytes: int = 1_000_000  # of a request
    body_s: float = 10.0  # for its body to arrive
    messages: int = 256  # in a chat
    stops: int = 4  # stop strings
    stop_characters: int = 64  # in each
    connections: int = 1024  # open at once

    def __post_init__(self):
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"limits.{name}={value} lets nothing through; use more than 0")


class Refusal(Exception):
    """An answer that is no text: status, sentence, and OpenAI's words for its kind."""

    def __init__(self, status, sentence, code, param=None, retry_after_s=None):
        super().__init__(sentence)
        self.status, self.code, self.param, self.retry_after_s = status, code, param, retry_after_s

    @property
    def content(self):
        """As OpenAI's clients expect an error."""
        kind = "invalid_request_error" if self.status < 429 else "server_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, kind)
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self):
        found = {"Retry-After": str(self.retry_after_s)} if self.retry_after_s is not None else {}
        return found | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def invalid(sentence, param=None, code="invalid_value"):
    return Refusal(400, sentence, code, param)


def too_late(seconds):
    return Refusal(504, f"not finished within {seconds:g} s; ask for fewer tokens", "timeout")


def queue_full(running, waiting):
    return Refusal(
        429, f"{running} requests run and {waiting} wait, which is all the room; try again later", "queue_full",
        retry_after_s=1,
    )  # fmt: skip
