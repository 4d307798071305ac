"""HTTP: OpenAI's completions and chat, models, health, metrics, a chat page, the door for a new checkpoint; the socket.

    bound = listen("127.0.0.1", None)              # 8000, or another port where that is taken
    server = Server(make_app(service), on_start=lambda: write_address(path, address_of(bound), token))
    server.run_until_signal(bound)                 # SIGTERM or Ctrl-C

| route | token | |
|---|---|---|
| POST /v1/chat/completions, POST /v1/completions | yes | whole, or `"stream": true` |
| GET /v1/models, GET /v1/models/NAME | yes | the one model, and its context |
| GET /metrics | yes | for Prometheus (`authorization: credentials_file`) |
| POST /admin/checkpoint | yes | `{"step": "newest"}`: judge it, and serve it if it is not worse |
| GET /healthz | no | 200, or 503 when the engine has failed |
| GET / | no | the page; it holds no secret, and asks for nothing until it has the token |

All paths are relative to where the page lies, so that a proxy may put any prefix in front. SIGTERM: no new connections,
what was asked for is finished, for up to `drain_s`; then the rest is cut off. A second Ctrl-C does not wait. Loopback
is shared with everybody on a login node: there is no server without a token, and a connection without a request is
closed after `HEAD_S` seconds.
"""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import logging
import os
import re
import resource
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path

import psutil
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from manyhands.checkpoint.export import newest_in
from manyhands.checkpoint.manifest import CheckpointError
from manyhands.course.folders import write_whole
from manyhands.serve import schema
from manyhands.serve.schema import Answer, ChatRequest, CompletionRequest, Limits, Refusal, event
from manyhands.serve.service import Service

PORT = 8000
VARIABLE = "MANYHANDS_SERVE_TOKEN"
LEAST = 16  # characters of a token
HEAD_S = 10.0  # within which a connection must send the head of its next request
LAST_WORD_S = 1.0  # for the sentence that ends a stream that took too long
NO_STORE = {"Cache-Control": "no-store"}
PAGE = files("manyhands.serve").joinpath("page.html").read_text("utf-8")
log = logging.getLogger("manyhands.serve")


def make_app(service: Service, source: Path | None = None, watch_s: float | None = None) -> "Door":
    """The ASGI application. While it lives the service runs, and looks into `source` each `watch_s` seconds."""

    @contextlib.asynccontextmanager
    async def lifespan(app):
        await service.start()
        watching = asyncio.ensure_future(watch(service, source, watch_s)) if watch_s else None
        try:
            yield
        finally:  # also where nobody waits for the end
            if watching is not None:
                watching.cancel()
            await service.stop()

    async def healthz(request):
        healthy = service.healthy()
        return JSONResponse({"status": "ok" if healthy else "failed"}, status_code=200 if healthy else 503)

    def about():
        return {
            "id": service.name, "object": "model", "created": service.started, "owned_by": "manyhands",
            "context": service.context, "version": service.live.version,
        }  # fmt: skip

    async def models(request):
        return JSONResponse({"object": "list", "data": [about()]})

    async def model(request):
        return JSONResponse(about())

    async def metrics(request):
        return Response(service.metrics.content(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def checkpoint(request):
        body = await read_body(request, service.limits)
        step = schema.read(body or b"{}", schema.CheckpointRequest).step
        try:
            verdict = await service.consider(step)
        except CheckpointError as error:
            raise Refusal(409, str(error), "unreadable") from None
        content = {"passed": verdict.passed, "sentence": verdict.sentence, "serves": service.live.version}
        return JSONResponse(content, status_code=200 if verdict.passed else 409)

    async def refused(request, error):
        if not isinstance(error, Refusal):
            sentence = f"{error.detail}; see /v1/models and /v1/chat/completions"
            error = Refusal(error.status_code, sentence, "no_route", headers=error.headers)
        return error.response()

    async def unexpected(request, error):
        return Refusal(500, "the server has made a mistake; its log has it", "internal").response()

    routes = [
        Route("/", Response(PAGE, media_type="text/html", headers=page_headers()), methods=["GET"]),
        Route("/healthz", healthz),
        Route("/metrics", metrics),
        Route("/v1/models", models),
        Route(f"/v1/models/{service.name}", model),  # no parameter: log and metrics hold nothing that a client has sent
        Route("/v1/chat/completions", Texts(service, ChatRequest), methods=["POST"]),
        Route("/v1/completions", Texts(service, CompletionRequest), methods=["POST"]),
        Route("/admin/checkpoint", checkpoint, methods=["POST"]),
    ]
    handlers = {HTTPException: refused, Exception: unexpected}
    return Door(Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan), service)


async def watch(service: Service, source: Path, every_s: float) -> None:
    """For ever: what is newer in `source` is considered when it has stopped growing, and again if it grows on."""
    seen = before = newest_in(source)
    while True:
        await asyncio.sleep(every_s)
        try:
            newest = await asyncio.to_thread(newest_in, source)
            grows, before = newest != before, newest
            if newest != seen and not grows:
                seen = newest
                await service.consider("newest")
        except Exception:  # a checkpoint that cannot be read must not end the watch
            log.exception("the newest checkpoint could not be considered")


class Door:
    """Checks the token of each request. Counts the request, and logs it if it has the token.

    The log line has route, status and seconds; never a query, a header, or what was written. Requests without the token
    are only counted, so that nobody can fill the disk with them.
    """

    OPEN = ("/", "/healthz")
    NO_TOKEN = Refusal(
        401, "the token is missing or wrong; the server's terminal, or the file that it names there, has it",
        "invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
    ).response()  # fmt: skip

    def __init__(self, app, service):
        self.app, self.service = app, service

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        status, began_s = 0, time.monotonic()
        known = shows(Headers(scope=scope), self.service.token)
        app = self.app if known or scope["path"] in self.OPEN else self.NO_TOKEN

        async def noting(message):
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await app(scope, receive, noting)
        finally:
            route = scope["path"] if "endpoint" in scope else "another path"
            self.service.metrics.requests.labels(route, str(status)).inc()
            if known:
                log.info("%s %s %d %.3f s", scope["method"], route, status, time.monotonic() - began_s)


def shows(headers: Mapping[str, str], token: str) -> bool:
    """Whether headers carry the token, as `Authorization: Bearer` or `X-Api-Key`.

    The page sends the second: behind a hub the first is the hub's own. The token is in no URL: proxies keep those.
    """
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = [bearer.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
    # every one is compared, in a time that does not depend on where they differ
    return any([hmac.compare_digest(one.encode("utf-8", "replace"), token.encode()) for one in given])


async def read_body(request: Request, limits: Limits) -> bytes:
    """The body's bytes. Raises Refusal for one that is too large (413), too slow (408), or whose client leaves (499).

    What is too large is read to its end and thrown away: who is still sending would lose the answer.
    """
    content, size = bytearray(), 0
    try:
        async with asyncio.timeout(limits.body_s):
            async for part in request.stream():
                size += len(part)
                if size <= limits.body_bytes:
                    content += part
    except TimeoutError:
        raise Refusal(408, f"the body did not arrive within {limits.body_s:g} s", "timeout") from None
    except ClientDisconnect:
        raise Refusal(499, "the client has gone", "gone") from None
    if size > limits.body_bytes:
        raise Refusal(413, f"the body has more than {limits.body_bytes:,} bytes", "body_too_large")
    return bytes(content)


class Texts:
    """POST of a request of `kind`: the answer, whole or as events. However it ends, its ticket is closed once."""

    def __init__(self, service: Service, kind: type[schema.Request]):
        self.service, self.kind = service, kind

    async def __call__(self, scope, receive, send):
        service, reason = self.service, "error"
        request = schema.read(await read_body(Request(scope, receive), service.limits), self.kind)
        if request.model not in (None, service.name):
            raise Refusal(404, f"there is no such model; the one here is {service.name}", "model_not_found", "model")
        ticket = await service.submit(request)
        pieces, watching = ticket.pieces(), asyncio.ensure_future(_fail_if_gone(receive, ticket))

        async def events(first):
            nonlocal reason
            try:
                yield answer.events(first)
                async for piece in pieces:
                    if piece.text or piece.finish:
                        yield answer.events(piece)
                yield answer.last_events(request.stream_options.include_usage)
                reason = None  # not earlier: who never reads has not got it
            except Refusal as error:  # the status is sent: an event says it, which OpenAI's clients raise
                reason = error.code
                yield event(error.content)

        try:
            first = await anext(pieces)  # until then a refusal has a status
            answer = Answer(ticket, service.words, self.kind is ChatRequest, service.name)
            if request.stream:
                # no proxy keeps it, or holds it back
                headers = NO_STORE | {"X-Accel-Buffering": "no"}
                stream = StreamingResponse(events(first), headers=headers, media_type="text/event-stream")
                async with asyncio.timeout_at(ticket.timer.when() + LAST_WORD_S):
                    await stream.stream_response(send)
            else:
                async for _ in pieces:
                    pass
                await JSONResponse(answer.content(), headers=NO_STORE)(scope, receive, send)
                reason = None
        except Refusal as error:
            reason = error.code
            raise
        except TimeoutError:  # nobody reads: the server closes the connection
            reason = "timeout"
        finally:
            watching.cancel()
            service.close(ticket, reason)


async def _fail_if_gone(receive, ticket):
    """Nobody reads an answer when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
    ticket.fail(Refusal(499, "the client has gone", "gone"))


def page_headers() -> dict[str, str]:
    """Under which a browser runs the script of our page, and no other."""

    def hash_of(element):
        text = re.search(rf"<{element}>(.*?)</{element}>", PAGE, re.DOTALL)[1]
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    policy = (
        f"default-src 'none'; script-src {hash_of('script')}; style-src {hash_of('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    )
    more = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
    return {"Content-Security-Policy": policy, **more, **NO_STORE}


def make_token(environ: Mapping[str, str]) -> str:
    """The token of this server: the variable's, else a new one. Raises ValueError for one that others can try out.

    There is no flag for it: every user of a machine sees the flags of every process.
    """
    token = environ.get(VARIABLE)
    if token is None:
        return secrets.token_urlsafe(24)
    if len(token) < LEAST or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(f"{VARIABLE} has less than {LEAST} characters, or blanks; unset it, and one is made")
    return token


def listen(host: str, port: int | None = None) -> socket.socket:
    """A bound socket. port=None: PORT, or any free one where that is taken. Raises ValueError if it cannot be had."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    for candidate in (PORT, 0) if port is None else (port,):
        try:
            bound.bind((host, candidate))
            bound.listen()
            return bound
        except OSError as error:
            why = error.strerror
    bound.close()
    raise ValueError(f"{host}:{port or PORT} cannot be listened on ({why}); name another --port")


def address_of(bound: socket.socket) -> str:
    """http://host:port of a bound socket, as a client on this machine reaches it."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}"


def write_address(path: Path, address: str, token: str) -> None:
    """Where the server is, and its token, as a file that only its owner reads. Files of dead servers beside it go."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for other in path.parent.glob("serving-*.json"):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # of somebody else's making
            about = json.loads(other.read_text())
            if about["host"] == socket.gethostname() and not psutil.pid_exists(about["pid"]):
                other.unlink()
    about = {"address": address, "token": token, "pid": os.getpid(), "host": socket.gethostname()}
    write_whole(path, json.dumps(about), 0o600)


class Connection(H11Protocol):
    """Close a connection that sends no request for HEAD_S. uvicorn alone waits for ever for the first one.

    A limit on the number of connections (uvicorn's `limit_concurrency`) would count idle ones too: anybody could use
    it up.
    """

    def connection_made(self, transport):
        super().connection_made(transport)
        self.loop.call_later(HEAD_S, self.end_unless_asked, None)

    def on_response_complete(self):
        answered = self.cycle  # the next request may be here already
        super().on_response_complete()
        self.loop.call_later(HEAD_S, self.end_unless_asked, answered)

    def end_unless_asked(self, last_cycle):
        if self.cycle is last_cycle:
            self.transport.abort()


class Server(uvicorn.Server):
    """uvicorn on an app. `on_start()` is called when it listens, and a signal ends it as it should."""

    def __init__(self, app, drain_s: int = 30, on_start: Callable[[], object] = lambda: None):
        # uvicorn's own lines about requests, which hold their queries, are off
        super().__init__(uvicorn.Config(
            app, log_config=None, access_log=False, log_level="warning", server_header=False, ws="none", lifespan="on",
            http=Connection, timeout_graceful_shutdown=drain_s,
        ))  # fmt: skip
        self.on_start = on_start

    async def startup(self, sockets=None):
        await super().startup(sockets)
        if self.started:
            self.on_start()

    def run_until_signal(self, bound: socket.socket) -> None:
        """Serve on the socket, with a line on stderr per event. A second signal: KeyboardInterrupt.

        Raises ValueError if it could not start.
        """
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with contextlib.suppress(ValueError, OSError):  # each connection is an open file
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        # who does not wait gets no traceback for each request that is cut off
        handler.addFilter(lambda record: not self.force_exit)
        # no warnings of uvicorn: anybody could fill the disk with invalid requests
        for name, level in (("manyhands.serve", logging.INFO), ("uvicorn.error", logging.ERROR)):
            logger = logging.getLogger(name)  # httpx and others, which show URLs, stay silent
            logger.handlers, logger.propagate = [handler], False
            logger.setLevel(level)

        def end(number, frame):
            self.should_exit = True

        for number in (signal.SIGTERM, signal.SIGINT):  # before uvicorn takes them over, and after it gives them back
            signal.signal(number, end)
        try:
            self.run(sockets=[bound])
        except SystemExit:  # uvicorn's word for a start that has failed; its log says why
            raise ValueError("the server could not start; the lines above say why") from None
        if self.force_exit:
            raise KeyboardInterrupt
