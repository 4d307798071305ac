"""What is sent back, in OpenAI's words: a whole answer, or a stream of server-sent events."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator

from starlette.responses import StreamingResponse

from manyhands.serve.schema import Refusal

LAST_WORD_S = 1.0  # for the sentence that ends a stream that took too long
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # no proxy keeps it, or holds it back


class Answer:
    """Forms the answer of one ticket, for a chat or a plain completion."""

    def __init__(self, ticket, chat, model_name):
        self.ticket, self.chat = ticket, chat
        self.kind = "chat.completion" if chat else "text_completion"
        self.head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}", "created": int(time.time()),
            "model": model_name, "system_fingerprint": ticket.version,
        }  # fmt: skip

    def whole(self, text: str, finish: str) -> dict:
        """The answer to a request without a stream."""
        part = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.chat else {"text": text}
        return {"object": self.kind, **self.head, "choices": [_choice(part, finish)], "usage": self.usage()}

    async def events(self, first: tuple, include_usage: bool) -> AsyncIterator[bytes]:
        """Yield the bytes of a stream: `first` and what follows it, each (text, why it ended or None) of the ticket."""
        head = {"object": "chat.completion.chunk" if self.chat else self.kind, **self.head}
        (text, finish), role = first, {"role": "assistant"}
        while finish is None:
            if text:
                yield event(head | {"choices": [_choice(self._part(text, role), None)]})
                role = {}
            text, finish = await self.ticket.more()
        end = event(head | {"choices": [_choice(self._part(text, role), finish)]})
        if include_usage:
            end += event(head | {"choices": [], "usage": self.usage()})
        yield end + b"data: [DONE]\n\n"

    def usage(self) -> dict:
        """OpenAI's count of tokens; cached ones are those whose keys and values were found."""
        sequence = self.ticket.sequence
        prompt, drawn = sequence.prompt_length, len(sequence.ids) - sequence.prompt_length
        return {
            "prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn,
            "prompt_tokens_details": {"cached_tokens": sequence.reused},
        }  # fmt: skip

    def _part(self, text, role):
        return {"delta": role | {"content": text}} if self.chat else {"text": text}


def _choice(part, finish):
    return {"index": 0, **part, "logprobs": None, "finish_reason": finish}


def event(content: dict) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"


class Stream(StreamingResponse):
    """The events of an answer. Whatever ends them, `close(why)` is called once."""

    media_type = "text/event-stream"

    def __init__(self, answer, events, close):
        super().__init__(self._until_the_end(events), headers=HEADERS)
        self.answer, self.close, self.reason = answer, close, "gone"

    async def __call__(self, scope, receive, send):
        try:
            async with asyncio.timeout_at(self.answer.ticket.timer.when() + LAST_WORD_S):
                await super().__call__(scope, receive, send)
        except TimeoutError:  # nobody reads: the server closes the connection
            self.reason = "timeout"
        finally:
            self.close(self.reason)

    async def _until_the_end(self, events):
        try:
            async for part in events:
                yield part
            self.reason = self.answer.ticket.finish or "stop"  # not earlier: who never reads has not got it
        except Refusal as error:  # the status is sent: an event says it, which OpenAI's clients raise
            self.reason = error.code
            yield event(error.content)
