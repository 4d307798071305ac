"""OpenAI's words: what a request may say, as pydantic models, what is sent back, and how the rest is refused.

    request = read(body, ChatRequest)                       # bytes of JSON; Refusal (400) for what is wrong
    ids, stop_ids, stop_strings = request.encode(words)     # ValueError for what the vocabulary cannot say
    answer = Answer(ticket, chat=True, model_name="manyhands")
    answer.whole(text)                                      # or, of a stream: event(answer.chunk(text)), ...

A field that nobody knows is refused, lest a misspelt one change the answer in silence. To support a field of `NEUTRAL`,
take it out there and declare it in `Request`.
"""

import json
import secrets
import time
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from starlette.exceptions import HTTPException

# what we do not have, and the values (besides null) that ask for nothing
NEUTRAL = {
    "n": (1,), "best_of": (1,), "logprobs": (False, 0), "top_logprobs": (0,), "echo": (False,), "suffix": ("",),
    "logit_bias": ({},), "presence_penalty": (0,), "frequency_penalty": (0,), "response_format": ({"type": "text"},),
    "modalities": (["text"],), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "tool_calls": ([],),
    "annotations": ([],), "audio": (), "prediction": (),
}  # fmt: skip
# what changes no answer here
HARMLESS = {
    "user", "name", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls",
}  # fmt: skip


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

    def __init__(self, status: int, sentence: str, code: str, param: str | None = None, headers: dict | None = None):
        super().__init__(status, sentence, headers)
        self.code, self.param = code, param

    @property
    def content(self) -> dict:
        """The body, as OpenAI's clients expect an error."""
        kind = "invalid_request_error" if self.status_code < 429 else "server_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status_code, kind)
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}


class Strict(BaseModel):
    """No unknown fields, no "1" for 1. Null is the same as nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def without_what_asks_for_nothing(cls, body):
        if not isinstance(body, dict):
            return body
        idle = [n for n, value in body.items() if value is None or n in HARMLESS or value in NEUTRAL.get(n, ())]
        return {name: value for name, value in body.items() if name not in idle}


class StreamOptions(Strict):
    include_usage: bool = False


class Request(Strict):
    """What both kinds of request have in common."""

    model: object = None
    max_tokens: int | None = Field(None, ge=1, lt=2**31)  # none: all that the context has room for
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)  # the newer name, which wins
    temperature: float = Field(1.0, ge=0, le=2)
    top_k: int | None = Field(None, ge=1, lt=2**31)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: list[Annotated[str, Field(min_length=1, max_length=64)]] = Field([], max_length=4)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @field_validator("stop", mode="before")
    @classmethod
    def one_or_many(cls, stop):
        return [stop] if isinstance(stop, str) else stop


class CompletionRequest(Request):
    """POST /v1/completions: the text after a prompt."""

    source: ClassVar[str] = "prompt"  # the field with the text
    prompt: str = Field(min_length=1)

    @field_validator("prompt", mode="before")
    @classmethod
    def one_in_a_list(cls, prompt):
        return prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt

    def encode(self, words) -> tuple:
        """(ids, ids that end the text, strings that end it). Raises ValueError for a character without a token."""
        return words.encode(self.prompt), words.markers, ()


class Message(Strict):
    role: str
    content: str

    @field_validator("role")
    @classmethod
    def older_name(cls, role):
        return "system" if role == "developer" else role

    @field_validator("content", mode="before")
    @classmethod
    def joined(cls, content):
        """OpenAI's clients may send content as a list of parts."""
        if not isinstance(content, list):
            return content
        if any(not isinstance(part, dict) or not isinstance(part.get("text"), str) for part in content):
            raise ValueError("only text is understood")
        return "".join(part["text"] for part in content)


class ChatRequest(Request):
    """POST /v1/chat/completions: the reply to a conversation."""

    source: ClassVar[str] = "messages"
    messages: list[Message] = Field(min_length=1, max_length=256)

    def encode(self, words) -> tuple:
        """(ids, ids that end the reply, strings that end it). Raises ValueError for what the template refuses."""
        ids, stop_ids = words.encode_chat([message.model_dump() for message in self.messages])
        return ids, stop_ids, words.chat_stops()


class CheckpointRequest(Strict):
    """POST /admin/checkpoint: which step to judge."""

    step: str = "newest"

    @field_validator("step", mode="before")
    @classmethod
    def known(cls, step):
        if step not in ("newest", "best") and not (type(step) is int and step >= 0):
            raise ValueError("use newest, best or a number")
        return str(step)


def read(body: bytes, kind):
    """An object of `kind`, one of the models above, out of bytes of JSON. Raises Refusal (400) for its first fault."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        reason = "is not supported with this value" if place in NEUTRAL else "is no field of this request"
        raise Refusal(400, f"{place} {reason}; leave it out", "unsupported_value", place)
    sentence = fault["msg"].removeprefix("Value error, ")
    code = "invalid_json" if fault["type"] == "json_invalid" else "invalid_value"
    raise Refusal(400, f"{place}: {sentence}" if place else sentence, code, place or None)


class Answer:
    """What is sent back for a ticket that has its first token: whole or in chunks, of a chat or a plain completion."""

    def __init__(self, ticket, chat: bool, model_name: str):
        self.ticket, self.chat = ticket, chat
        self.kind = "chat.completion" if chat else "text_completion"
        self.role = {"role": "assistant"}  # the first chunk says it
        self.head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}", "created": int(time.time()),
            "model": model_name, "system_fingerprint": ticket.version,
        }  # fmt: skip

    def whole(self, text: str) -> dict:
        """The answer to a request without a stream."""
        part = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.chat else {"text": text}
        return {"object": self.kind, **self.head, "choices": [self._choice(part)], "usage": self.usage()}

    def chunk(self, text: str | None = None) -> dict:
        """Of a stream: the next piece of text; the last chunk has none, and says why the text ended."""
        part: dict = {"text": text or ""}
        if self.chat:
            part = {"delta": {} if text is None else self.role | {"content": text}}
            self.role = {}
        kind = "chat.completion.chunk" if self.chat else self.kind
        return {"object": kind, **self.head, "choices": [self._choice(part, ended=text is None)]}

    def usage_chunk(self) -> dict:
        """Behind the last chunk, for who has asked for it."""
        return self.chunk() | {"choices": [], "usage": self.usage()}

    def usage(self) -> dict:
        """OpenAI's count of tokens; cached ones are those whose keys and values were found."""
        sequence = self.ticket.sequence
        prompt, drawn = sequence.prompt_length, len(sequence.ids) - sequence.prompt_length
        return {
            "prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn,
            "prompt_tokens_details": {"cached_tokens": sequence.reused},
        }  # fmt: skip

    def _choice(self, part, ended=True):
        return {"index": 0, **part, "logprobs": None, "finish_reason": self.ticket.finish if ended else None}


def event(content: dict) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"
