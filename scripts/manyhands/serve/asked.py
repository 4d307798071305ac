"""What a request asks for, out of JSON from anybody: OpenAI's fields, checked one by one, each fault one sentence.

    asked = asked_completion(body, words, limits, context)         # /v1/completions
    asked = asked_chat(body, words, limits, context)               # /v1/chat/completions

Fields that would change the answer and that we do not have are refused; others, such as `user`, are not looked at.
"""

import json
from dataclasses import dataclass

from manyhands.serve.limits import invalid
from manyhands.serve.sampler import Sampling

# what we do not have, and the values that ask for nothing
NEUTRAL = {
    "n": (None, 1), "best_of": (None, 1), "logprobs": (None, False, 0), "top_logprobs": (None, 0), "echo": (None, False),
    "suffix": (None, ""), "logit_bias": (None, {}), "tools": (None, []), "functions": (None, []),
    "response_format": (None, {"type": "text"}), "presence_penalty": (None, 0), "frequency_penalty": (None, 0),
    "modalities": (None, ["text"]), "audio": (None,), "prediction": (None,),
}  # fmt: skip
LARGEST_SEED = 2**63


@dataclass(frozen=True)
class Asked:
    """One request, ready for the engine."""

    prompt: list
    max_tokens: int
    sampling: Sampling
    seed: int | None
    stop_ids: frozenset
    stop_strings: tuple
    stream: bool
    include_usage: bool


def read_json(content):
    """The object in a body of bytes. Raises Refusal."""
    try:
        body = json.loads(content, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is no JSON ({_short(error)}); send an object", code="invalid_json") from None
    if not isinstance(body, dict):
        raise invalid(f"the body is a JSON {type(body).__name__}; send an object", code="invalid_json")
    return body


def asked_completion(body, words, limits, context):
    """Of a body with `prompt`, a string. Raises Refusal."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str) or not prompt:
        raise invalid("prompt is missing or not one string; send some text", "prompt")
    ids = _as_sentence(lambda: words.encode(prompt), "prompt")
    return _asked(body, ids, frozenset(words.markers), (), limits, context)


def asked_chat(body, words, limits, context):
    """Of a body with `messages`. Raises Refusal."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid('messages is missing or empty; send [{"role": "user", "content": "..."}]', "messages")
    if len(messages) > limits.messages:
        raise invalid(f"{len(messages)} messages are more than {limits.messages}; send the last ones", "messages")
    plain = [_plain_message(i, message) for i, message in enumerate(messages)]
    ids, stop_ids = _as_sentence(lambda: words.encode_chat(plain), "messages")
    return _asked(body, ids, frozenset(stop_ids), words.chat_stops(), limits, context)


def _plain_message(i, message):
    """Role and content as strings: OpenAI's clients may send content as a list of parts."""
    if not isinstance(message, dict):
        raise invalid(f"messages[{i}] is no object; send role and content", "messages")
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        texts = [part.get("text") for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
    if not isinstance(content, str):
        raise invalid(f"messages[{i}].content is no text; only text is understood", "messages")
    return {"role": "system" if role == "developer" else role, "content": content}


def _asked(body, ids, stop_ids, more_stops, limits, context):
    for name, values in NEUTRAL.items():
        if not any(body.get(name) == value and type(body.get(name)) is type(value) for value in values):
            raise invalid(f"{name} with this value is not supported; leave it out", name, "unsupported_value")
    max_tokens = _integer(body, "max_completion_tokens", _integer(body, "max_tokens", None, 1), 1)
    if len(ids) + (max_tokens or 1) > context:
        asked_for = f" and {max_tokens} more" if max_tokens else ", with room for one more,"
        room = context - len(ids)
        cure = f", or ask for at most {room}" if room > 0 else f" to {context - 1} or fewer"
        raise invalid(
            f"{len(ids)} tokens of the prompt{asked_for} do not fit into the model's context of {context}; "
            f"shorten the prompt{cure}",
            "max_tokens" if max_tokens and len(ids) < context else "messages" if "messages" in body else "prompt",
            "context_length_exceeded",
        )
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise invalid("stream_options is no object", "stream_options")
    sampling = _as_sentence(
        lambda: Sampling(
            _number(body, "temperature", 1.0, 2.0),
            _integer(body, "top_k", None, 1),
            _number(body, "top_p", 1.0, 1.0),
        ),
        "temperature",
    )
    return Asked(
        ids, max_tokens or context - len(ids), sampling, _integer(body, "seed", None, 0, LARGEST_SEED), stop_ids,
        (*_stops(body.get("stop"), limits), *more_stops), _truth(body, "stream"), _truth(options or {}, "include_usage"),
    )  # fmt: skip


def _stops(stops, limits):
    stops = [stops] if isinstance(stops, str) else stops or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise invalid("stop is no string, nor a list of them; none may be empty", "stop")
    if len(stops) > limits.stops or any(len(stop) > limits.stop_characters for stop in stops):
        raise invalid(
            f"stop has more than {limits.stops} strings, or one of more than {limits.stop_characters} characters",
            "stop",
        )
    return stops


def _number(body, name, default, largest):
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= largest:
        raise invalid(f"{name} is no number from 0 to {largest:g}", name)
    return float(value)


def _integer(body, name, default, least, below=2**31):
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < below:
        raise invalid(f"{name} is no integer from {least} to {below - 1}", name)
    return value


def _truth(body, name):
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise invalid(f"{name} is neither true nor false", name)
    return bool(value)


def _as_sentence(function, param):
    try:
        return function()
    except ValueError as error:
        raise invalid(str(error), param) from None


def _no_number(name):
    raise ValueError(f"{name} is no JSON number")


def _short(error):
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:100]
