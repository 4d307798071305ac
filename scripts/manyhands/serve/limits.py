"""What one server takes on, and how it refuses the rest: a sentence with the cure, in the shape of OpenAI's errors."""

from dataclasses import dataclass

from starlette.exceptions import HTTPException


@dataclass(frozen=True)
class Limits:
    """Of one server. Lengths beyond the model's context are refused in any case: its positions are learned."""

    running: int = 32  # requests that are computed at once
    queue: int = 256  # requests that wait for them; one more gets 429
    request_s: float = 120.0  # seconds for a whole request, its wait included
    connections: int = 1024  # open at once
    body_bytes: int = 1_000_000  # of a request's body
    body_s: float = 10.0  # seconds for a request's body to arrive
    blocks: int | None = None  # of the cache; none: for all that run, at full length
    block_size: int = 16  # positions in a block
    prefill_tokens: int = 256  # of prompts in one step


class Refusal(HTTPException):
    """An answer that is no text: HTTP's status, a sentence, and OpenAI's words for its kind."""

    def __init__(self, status, sentence, code, param=None, headers=None):
        super().__init__(status, sentence, headers)
        self.code, self.param = code, param

    @property
    def content(self):
        """The body, as OpenAI's clients expect an error."""
        kind = "invalid_request_error" if self.status_code < 429 else "server_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status_code, kind)
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}
