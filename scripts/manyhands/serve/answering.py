"""From a ticket to an answer over HTTP: whole or as a stream, with a time limit, and never for a client who has gone."""

import asyncio
import json
import time

from starlette.responses import Response

from manyhands.serve.limits import Refusal, too_late
from manyhands.serve.replies import DONE, Reply, event, usage_of
from manyhands.serve.vocabulary import TextSoFar

LAST_WORD_S = 1.0  # for the sentence that ends a stream that took too long


class Gone(Exception):
    """The client has closed the connection: nobody reads an answer."""


async def unless_gone(receive, work):
    """What the coroutine `work` returns. Raises Gone as soon as the client has closed the connection."""
    gone, doing = asyncio.ensure_future(_until_gone(receive)), asyncio.ensure_future(work)
    try:
        await asyncio.wait({gone, doing}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise Gone
        return doing.result()
    finally:
        gone.cancel()
        doing.cancel()
        await asyncio.gather(gone, doing, return_exceptions=True)


async def _until_gone(receive):
    while (await receive())["type"] != "http.disconnect":
        pass


class Answer:
    """One request's answer in the making."""

    def __init__(self, service, asked, chat, receive):
        self.service, self.asked, self.receive = service, asked, receive
        self.reply, self.text = Reply(chat, service.name), TextSoFar(service.words, asked.stop_strings)
        self.ticket = service.submit(asked)
        self.until_s = self.ticket.submitted_s + service.limits.request_s

    async def response(self):
        """The Response. A stream begins with its first token: until then a refusal still has a status."""
        try:
            first = await unless_gone(self.receive, self.in_time(self._more()))
            if self.asked.stream:
                return Stream(self, first)
            return await unless_gone(self.receive, self.in_time(self._whole(first)))
        except BaseException as error:
            self.service.close(self.ticket, reason_of(error))
            raise

    async def in_time(self, work):
        try:
            async with asyncio.timeout(max(0.0, self.until_s - time.monotonic())):
                return await work
        except TimeoutError:
            raise too_late(self.service.limits.request_s) from None

    async def _more(self):
        """(text that can be shown now, why it is over or None)"""
        ids, finish = await self.ticket.more()
        shown = self.text.add(ids)
        if self.text.stopped:
            return shown, "stop string"
        return (shown + self.text.end(), finish) if finish else (shown, None)

    async def _whole(self, first):
        shown, finish = first
        pieces = [shown]
        while finish is None:
            shown, finish = await self._more()
            pieces.append(shown)
        self.service.close(self.ticket, finish)
        content = self.reply.whole("".join(pieces), finish, usage_of(self.ticket.sequence), self.ticket.version)
        return Response(json.dumps(content), media_type="application/json", headers={"Cache-Control": "no-store"})

    async def write(self, first, send):
        """All events of a stream, from the first on."""
        (shown, finish), version = first, self.ticket.version
        head = self.reply.first(version)
        while True:
            body = head + (self.reply.piece(shown, version) if shown else b"")
            head = b""
            if finish is not None:
                body += self.reply.last(finish, version)
                if self.asked.include_usage:
                    body += self.reply.usage(usage_of(self.ticket.sequence), version)
                body += DONE
            if body:
                await send(_body(body, more=finish is None))
            if finish is not None:
                self.service.close(self.ticket, finish)  # not earlier: who never reads has not got it
                return
            shown, finish = await self._more()


class Stream(Response):
    """Server-sent events. Whatever ends it, the ticket is closed."""

    media_type = "text/event-stream"

    def __init__(self, answer, first):
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self.answer, self.first = answer, first
        del self.headers["content-length"]

    async def __call__(self, scope, receive, send):
        answer, reason = self.answer, "gone"
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await unless_gone(receive, answer.in_time(answer.write(self.first, send)))
        except Gone:
            pass
        except Refusal as error:  # the status is sent: an event says it, which OpenAI's clients raise
            reason = reason_of(error)
            try:
                async with asyncio.timeout(LAST_WORD_S):
                    await send(_body(event(error.content), more=False))
            except TimeoutError:
                return  # nobody reads: the server closes the connection
        finally:
            answer.service.close(answer.ticket, reason)


def _body(content, more):
    return {"type": "http.response.body", "body": content, "more_body": more}


def reason_of(error):
    """Why a text ended, as a word for the metrics."""
    if isinstance(error, Refusal):
        return error.code
    return "gone" if isinstance(error, Gone | asyncio.CancelledError) else "error"
