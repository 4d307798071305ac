"""What is sent back, in OpenAI's words: whole answers, and the chunks of a stream as server-sent events."""

import json
import secrets
import time

ENDS = {"stop": "stop", "length": "length", "stop string": "stop"}


class Reply:
    """Forms the answer to one request: `chat` or plain completion."""

    def __init__(self, chat, model_name):
        self.chat, self.model_name = chat, model_name
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.created = int(time.time())

    def whole(self, text, finish, usage, version):
        """The answer to a request without a stream."""
        part = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.chat else {"text": text}
        choice = {"index": 0, **part, "logprobs": None, "finish_reason": ENDS[finish]}
        kind = "chat.completion" if self.chat else "text_completion"
        return self._around(kind, [choice], version) | {"usage": usage}

    def first(self, version):
        """Opens the stream of a chat: who speaks. Nothing for a completion."""
        return self._chunk({"role": "assistant", "content": ""}, "", None, version) if self.chat else b""

    def piece(self, text, version):
        return self._chunk({"content": text}, text, None, version)

    def last(self, finish, version):
        return self._chunk({}, "", ENDS[finish], version)

    def usage(self, usage, version):
        """The chunk that `stream_options.include_usage` asks for: no choices."""
        return event(self._around(self._kind(), [], version) | {"usage": usage})

    def _kind(self):
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _chunk(self, delta, text, finish, version):
        part = {"delta": delta} if self.chat else {"text": text}
        choice = {"index": 0, **part, "logprobs": None, "finish_reason": finish}
        return event(self._around(self._kind(), [choice], version))

    def _around(self, kind, choices, version):
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model_name,
            "system_fingerprint": version, "choices": choices,
        }  # fmt: skip


def event(content):
    """One server-sent event."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def usage_of(sequence):
    """OpenAI's count of tokens; cached ones are those whose keys and values were found."""
    prompt, drawn = sequence.prompt_length, len(sequence.ids) - sequence.prompt_length
    return {
        "prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn,
        "prompt_tokens_details": {"cached_tokens": sequence.reused},
    }  # fmt: skip
