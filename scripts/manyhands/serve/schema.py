"""Define OpenAI's requests as pydantic models, the answers, and how invalid requests are refused.

    request = read(body, ChatRequest)                       # bytes of JSON; Refusal (400) for what is wrong
    prompts = request.encode(words, context=64)             # ValueError for characters without a token
    answer = Answer(ticket, words, chat=True, model_name="manyhands")
    answer.content()                                          # or, of a stream: answer.events(piece), ...

An unknown field is refused, so that a misspelt one cannot silently change the answer. To support a field of `NEUTRAL`,
remove it there and declare it in `Request`.
"""

import json
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from manyhands.config.bounds import Positive, Seconds

if TYPE_CHECKING:
    from manyhands.gpt.sampling import Sampling

# fields that change no answer here
HARMLESS = {
    "user", "name", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls",
    "include_obfuscation",
}  # fmt: skip
# unsupported fields, and their values (besides null) that have no effect
NEUTRAL = {
    "best_of": (1,), "suffix": ("",), "response_format": ({"type": "text"},), "modalities": (["text"],),
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "tool_calls": ([],), "annotations": ([],), "audio": (), "prediction": (), "min_p": (0, 0.0),
    "repetition_penalty": (1, 1.0), "stop_token_ids": ([],),
}  # fmt: skip
TEXTS = 64  # limit for one request


@dataclass(frozen=True)
class Limits:
    """One server's limits. Lengths beyond the model's context are always refused."""

    running: Positive = 32  # requests that are computed at once
    queue: Positive = 256  # requests that wait for them; one more gets 429
    request_s: Seconds = 120.0  # seconds for a whole request, its wait included
    body_bytes: Positive = 1_000_000  # of a request's body
    body_s: Seconds = 10.0  # seconds that the server waits for a request's body
    blocks: Positive | None = (
        None  # of the cache; none: for all that run, as long as in training, or one at full length
    )
    block_size: Positive = 16  # positions in a block
    prefill_tokens: Positive = 256  # of prompts in one step


class Refusal(HTTPException):
    """A refused request: the HTTP status, a sentence, and OpenAI's error type."""

    def __init__(self, status: int, sentence: str, code: str, param: str | None = None, headers: dict | None = None):
        super().__init__(status, sentence, headers)
        self.code, self.param = code, param

    @property
    def content(self) -> dict:
        """The body, as OpenAI's clients expect an error."""
        kind = "invalid_request_error" if self.status_code < 429 else "server_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status_code, kind)
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.content, self.status_code, self.headers)


class Strict(BaseModel):
    """A model without unknown fields or conversions ("1" for 1), in which null means that a field is absent."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def without_what_asks_for_nothing(cls, body):
        if not isinstance(body, dict):
            return body

        def asks(name):
            value = body[name]
            # True is not 1
            neutral = any(type(value) is type(one) and value == one for one in NEUTRAL.get(name, ()))
            return not (value is None or name in HARMLESS or neutral)

        # one unknown field is enough to refuse it: an error for each of 80,000 takes most of a second
        strange = next((name for name in body if name not in cls.model_fields and asks(name)), None)
        return {name: body[name] for name in (*cls.model_fields, strange) if name in body and asks(name)}


class StreamOptions(Strict):
    include_usage: bool = False


class Request(Strict):
    """The fields that both kinds of request have in common."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1, lt=2**31)  # none: as many as the context allows
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)  # the newer name
    n: int = Field(1, ge=1, le=TEXTS)  # texts for each prompt
    temperature: float = Field(1.0, ge=0, le=2)
    top_k: int | None = Field(None, ge=1, lt=2**31)
    top_p: float = Field(1.0, gt=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field({}, max_length=1024)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    logprobs: int | None = Field(None, ge=0, le=20)  # log p of each token, and of this number of the likeliest
    stop: list[Annotated[str, Field(min_length=1, max_length=64)]] = Field([], max_length=4)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @field_validator("stop", mode="before")
    @classmethod
    def one_or_many(cls, stop):
        return [stop] if isinstance(stop, str) else stop

    @field_validator("max_completion_tokens")
    @classmethod
    def not_two_numbers(cls, value, info):
        if info.data.get("max_tokens") not in (None, value):
            raise ValueError(f"{value}, but max_tokens is {info.data['max_tokens']}; send one of them")
        return value

    @property
    def most(self) -> int | None:
        """Return the largest number of tokens to draw; none: as many as the context allows."""
        return self.max_completion_tokens or self.max_tokens

    def sampling(self, words) -> "Sampling":
        """Return the Sampling. Raise Refusal for a bias on an id that is not a token of `words`."""
        from manyhands.gpt.sampling import Sampling  # imported late, because `serve.py --help` does not need torch

        bias = {int(i): value for i, value in self.logit_bias.items() if i.isdecimal() and i == str(int(i[:9]))}
        if len(bias) < len(self.logit_bias) or max(bias, default=0) >= len(words):
            sentence = f"logit_bias: use ids of tokens, 0 to {len(words) - 1}, as its names"
            raise Refusal(400, sentence, "invalid_value", "logit_bias")
        penalties = self.presence_penalty, self.frequency_penalty
        return Sampling(self.temperature, self.top_k, self.top_p, *penalties, bias, self.likeliest())

    def likeliest(self) -> int | None:
        """Return the number of tokens whose log p is requested; none: not even the drawn one's."""
        return self.logprobs


class Prompts(NamedTuple):
    """The texts that a model continues."""

    each: Iterable[tuple[list[int], str]]  # (ids, what the answer begins with), encoded as one asks for it
    stop_ids: set[int]  # a drawn one of these ends the text
    stop_strings: tuple[str, ...] = ()  # and each of these
    dropped_messages: int = 0  # the oldest, for which there was no room


class CompletionRequest(Request):
    """POST /v1/completions: the text after a prompt, or after each of a list."""

    source: ClassVar[str] = "prompt"  # the field with the text
    prompt: list[str | list[int]] = Field(min_length=1, max_length=TEXTS)  # texts, or ids
    echo: bool = False

    @field_validator("prompt", mode="before")
    @classmethod
    def a_list_of_prompts(cls, prompt):
        prompts = prompt if isinstance(prompt, list) and prompt and type(prompt[0]) is not int else [prompt]
        for one in prompts:
            if not one or not (isinstance(one, str) or isinstance(one, list) and all(type(i) is int for i in one)):
                raise ValueError("use a text or a list of texts, none of them empty; or ids of tokens, for each a list")
        return prompts

    @field_validator("prompt")
    @classmethod
    def not_too_many(cls, prompts, info):
        if (n := info.data.get("n", 1)) * len(prompts) > TEXTS:
            raise ValueError(f"{len(prompts)} of them, n={n} times, are more than {TEXTS} texts; send fewer at once")
        return prompts

    @field_validator("echo")
    @classmethod
    def without_logprobs(cls, echo, info):
        if echo and info.data.get("logprobs") is not None:
            raise ValueError("log p of a prompt is not kept; leave out echo or logprobs")
        return echo

    def encode(self, words, context: int) -> Prompts:
        """Its parts raise ValueError for a character or an id that is no token."""

        def encoded(one):
            ids = words.encode(one) if isinstance(one, str) else words.known_ids(one)
            return ids, words.decode(ids) if self.echo else ""

        return Prompts(map(encoded, self.prompt), words.markers)


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
        """Join content that OpenAI's clients send as a list of parts."""
        if not isinstance(content, list):
            return content
        if any(
            not isinstance(part, dict) or part.keys() != {"type", "text"} or part["type"] != "text"
            or not isinstance(part["text"], str) for part in content
        ):  # fmt: skip
            raise ValueError("only text is understood")
        return "".join(part["text"] for part in content)


class ChatRequest(Request):
    """POST /v1/chat/completions: the reply to a conversation."""

    source: ClassVar[str] = "messages"
    messages: list[Message] = Field(min_length=1, max_length=1024)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    @field_validator("top_logprobs")
    @classmethod
    def with_logprobs(cls, value, info):
        if value and not info.data.get("logprobs"):
            raise ValueError("is only given with logprobs: true")
        return value

    def likeliest(self):
        return self.top_logprobs if self.logprobs else None

    def encode(self, words, context: int) -> Prompts:
        """The last message, and as many before it as leave room for `most` tokens: for half of the context, if unsaid.

        Raises ValueError for what the template refuses.
        """
        messages = [message.model_dump() for message in self.messages]
        ids, stop_ids, dropped = words.encode_chat(messages, context - (self.most or context // 2))
        return Prompts([(ids, "")], stop_ids, words.chat_stops(), dropped)


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
    """Parse bytes of JSON as `kind`, one of the models above. Raise Refusal (400) for the first error."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
    place = repr(".".join(str(part) for part in fault["loc"]))[1:-1][:80]  # a field may be named by a new line
    if fault["type"] == "extra_forbidden":
        reason = "is not supported with this value" if fault["loc"][-1] in NEUTRAL else "is not a field of this request"
        raise Refusal(400, f"{place} {reason}; leave it out", "unsupported_value", place)
    sentence = fault["msg"].removeprefix("Value error, ")
    code = "invalid_json" if fault["type"] == "json_invalid" else "invalid_value"
    raise Refusal(400, f"{place}: {sentence}" if place else sentence, code, place or None)


class Answer:
    """The answer for a ticket that has its first token: complete or as events, for a chat or a completion."""

    def __init__(self, ticket, words, chat: bool, model_name: str):
        self.ticket, self.words, self.chat = ticket, words, chat
        self.role_unsaid = set(ticket.choices)  # a choice's first chunk says it
        self.head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}", "created": int(time.time()),
            "model": model_name, "system_fingerprint": ticket.version,
            "object": "chat.completion" if chat else "text_completion",
        }  # fmt: skip
        if chat:  # not OpenAI's: how many of the oldest messages the model has not read
            self.head["dropped_messages"] = ticket.dropped_messages

    def content(self) -> dict:
        """Return the answer to a request without a stream."""
        choices = []
        for choice in self.ticket.choices:
            part: dict = {"text": choice.shown}
            if self.chat:
                part = {"message": {"role": "assistant", "content": choice.shown, "refusal": None}}
            choices.append(self._choice(choice, part, choice.tokens, choice.finish))
        return self.head | {"choices": choices, "usage": self.usage()}

    def events(self, piece) -> bytes:
        """Return the events for a Piece of a choice, and after its last one the finish reason."""
        choice, text, tokens, finish = piece
        part: dict = {"text": text}
        if self.chat:
            part = {"delta": ({"role": "assistant"} if choice in self.role_unsaid else {}) | {"content": text}}
            self.role_unsaid.discard(choice)
        found = self._chunk([self._choice(choice, part, tokens, None)])
        if finish is not None:
            found += self._chunk([self._choice(choice, {"delta": {}} if self.chat else {"text": ""}, [], finish)])
        return found

    def last_events(self, include_usage: bool) -> bytes:
        """Return the events that end a stream."""
        return (self._chunk([], usage=self.usage()) if include_usage else b"") + b"data: [DONE]\n\n"

    def usage(self) -> dict:
        """Return OpenAI's token counts, each prompt once; cached tokens are those whose keys and values were found."""
        sequences = [choice.sequence for choice in self.ticket.choices]
        firsts = sequences[:: self.ticket.n]
        prompt, drawn = sum(s.prompt_length for s in firsts), sum(len(s.ids) - s.prompt_length for s in sequences)
        return {
            "prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn,
            "prompt_tokens_details": {"cached_tokens": sum(s.num_cached_tokens for s in firsts)},
        }  # fmt: skip

    def _chunk(self, choices, **more):
        kind = {"object": "chat.completion.chunk"} if self.chat else {}
        return event(self.head | kind | {"choices": choices} | more)

    def _choice(self, choice, part, tokens, finish):
        logprobs = None
        if choice.sequence.sampling.logprobs is not None:
            logprobs = self._chat_logprobs(tokens) if self.chat else self._text_logprobs(tokens)
        return {"index": choice.index, **part, "logprobs": logprobs, "finish_reason": finish}

    def _text_logprobs(self, tokens):
        def name(i):
            return self.words.name(i)[0]

        tops = [{name(j): log_q for j, log_q in ({i: log_p} | likeliest).items()} for i, _, log_p, likeliest in tokens]
        return {
            "tokens": [name(i) for i, *_ in tokens], "token_logprobs": [log_p for _, _, log_p, _ in tokens],
            "top_logprobs": tops, "text_offset": [start for _, start, *_ in tokens],
        }  # fmt: skip

    def _chat_logprobs(self, tokens):
        def about(i, log_p):
            return dict(zip(("token", "bytes"), self.words.name(i), strict=True)) | {"logprob": log_p}

        tops = [[about(*pair) for pair in likeliest.items()] for *_, likeliest in tokens]
        content = [about(i, p) | {"top_logprobs": top} for (i, _, p, _), top in zip(tokens, tops, strict=True)]
        return {"content": content, "refusal": None}


def event(content: dict) -> bytes:
    """Format one server-sent event."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"
