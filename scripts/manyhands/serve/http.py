"""Serve HTTP: OpenAI's completions and chat, models, health, metrics, a chat page, and loading a new checkpoint.

    bound = listen("127.0.0.1", None)              # 8000, or another port if it is taken
    server = Server(make_app(service), on_start=lambda: write_address(path, address_of(bound), token))
    server.run_until_signal(bound)                 # SIGTERM or Ctrl-C

| route | token | |
|---|---|---|
| POST /v1/chat/completions, POST /v1/completions | yes | complete, or `"stream": true` |
| GET /v1/models, GET /v1/models/NAME | yes | the model and its context |
| GET /metrics | yes | for Prometheus (`authorization: credentials_file`) |
| POST /admin/checkpoint | yes | `{"step": "newest"}`: judge it and serve it if it is not worse |
| GET /healthz | no | 200, or 503 when the engine has failed |
| GET / | no | the page; it contains no secret, and sends no request until it has the token |

All paths are relative to the page, so that a proxy may add any prefix. On SIGTERM the server accepts no new
connections and finishes open requests for up to `drain_s`; then it closes the rest. A second Ctrl-C does not wait. All
users of a login node share loopback: every server has a token, and a connection without a request is closed after
`HEAD_S` seconds.
"""

import asyncio
import base64
import contextlib
import errno
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
LEAST = 16  # minimum length of a token in characters
HEAD_S = 10.0  # seconds for a connection to send the head of its next request
LAST_WORD_S = 1.0  # seconds to send the sentence that ends a stream after its time-out
NO_STORE = {"Cache-Control": "no-store"}
PAGE = files("manyhands.serve").joinpath("page.html").read_text("utf-8")
log = logging.getLogger("manyhands.serve")


def make_app(service: Service, source: Path | None = None, watch_s: float | None = None) -> "Door":
    """Return the ASGI application. While it runs, the service runs, and checks `source` every `watch_s` seconds."""

    @contextlib.asynccontextmanager
    async def lifespan(app):
        await service.start()
        watching = asyncio.ensure_future(watch(service, source, watch_s)) if watch_s else None
        try:
            yield
        finally:  # even if no client waits for the end
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
            error = refusal_of(error, request.url.path, service.name)
        return error.response()

    async def unexpected(request, error):
        return Refusal(500, "internal error; see the server's log", "internal").response()

    routes = [
        Route("/", Response(PAGE, media_type="text/html", headers=page_headers()), methods=["GET"]),
        Route("/healthz", healthz),
        Route("/metrics", metrics),
        Route("/v1/models", models),
        Route(f"/v1/models/{service.name}", model),  # no parameter: a client's text stays out of the log
        Route("/v1/chat/completions", Texts(service, ChatRequest), methods=["POST"]),
        Route("/v1/completions", Texts(service, CompletionRequest), methods=["POST"]),
        Route("/admin/checkpoint", checkpoint, methods=["POST"]),
    ]
    handlers = {HTTPException: refused, Exception: unexpected}
    return Door(Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan), service)


def refusal_of(error: HTTPException, path: str, model: str) -> Refusal:
    """Return the Refusal of a request for a path that no route has, or by a method that its route has not."""
    sentence, code, field = f"{error.detail}; see /v1/models and /v1/chat/completions", "no_route", None
    if error.status_code == 404 and path.startswith("/v1/models/"):
        sentence, code, field = f"unknown model; use {model}", "model_not_found", "model"
    elif path.startswith("/v1/embeddings"):
        sentence, code = "this server writes text and makes no embeddings; see /v1/chat/completions", "unsupported"
    return Refusal(error.status_code, sentence, code, field, dict(error.headers or {}))


async def watch(service: Service, source: Path, every_s: float) -> None:
    """Loop: consider a newer checkpoint in `source` once it has stopped growing, and again if it grows further."""
    seen = before = newest_in(source)
    while True:
        await asyncio.sleep(every_s)
        try:
            newest = await asyncio.to_thread(newest_in, source)
            grows, before = newest != before, newest
            if newest != seen and not grows:
                seen = newest
                await service.consider("newest")
        except Exception:  # an unreadable checkpoint must not end the loop
            log.exception("the newest checkpoint could not be considered")


class Door:
    """Middleware that checks each request's token, counts the request, and logs it if the token is right.

    The log line has route, status and seconds, but never a query, a header or a body. Requests without the token are
    only counted, so that they cannot fill the disk.
    """

    OPEN = ("/", "/healthz")
    NO_TOKEN = Refusal(
        401, "the token is missing or wrong; copy it from the server's terminal or the file named there",
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
    """Return whether headers carry the token, as `Authorization: Bearer` or `X-Api-Key`.

    The page sends the second, because a hub uses the first itself. The token is never in a URL, because proxies log
    URLs.
    """
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = [bearer.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
    # compare every header in constant time
    return any([hmac.compare_digest(one.encode("utf-8", "replace"), token.encode()) for one in given])


async def read_body(request: Request, limits: Limits) -> bytes:
    """Return the body's bytes. Raise Refusal if it is too large (413) or too slow (408), or its client leaves (499).

    Drain an oversized body first: a client still sending would never see the response.
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
        raise Refusal(499, "the client has disconnected", "gone") from None
    if size > limits.body_bytes:
        raise Refusal(413, f"the body has more than {limits.body_bytes:,} bytes", "body_too_large")
    return bytes(content)


class Texts:
    """The endpoint for POSTs of `kind`: answer completely or as events. Its ticket is always closed exactly once."""

    def __init__(self, service: Service, kind: type[schema.Request]):
        self.service, self.kind = service, kind

    async def __call__(self, scope, receive, send):
        service, reason = self.service, "error"
        request = schema.read(await read_body(Request(scope, receive), service.limits), self.kind)
        if request.model not in (None, service.name):
            raise Refusal(404, f"unknown model; use {service.name}", "model_not_found", "model")
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
                reason = None  # not earlier: a client that never reads has not received it
            except Refusal as error:  # the status has been sent: send an event, which OpenAI's clients raise
                reason = error.code
                yield event(error.content)

        try:
            first = await anext(pieces)  # before it, a refusal can still set the status
            answer = Answer(ticket, service.words, self.kind is ChatRequest, service.name)
            if request.stream:
                # so that no proxy caches or buffers it
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
        except TimeoutError:  # no reader: the server closes the connection
            reason = "timeout"
        finally:
            watching.cancel()
            service.close(ticket, reason)


async def _fail_if_gone(receive, ticket):
    """Raise Refusal if the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
    ticket.fail(Refusal(499, "the client has disconnected", "gone"))


def page_headers() -> dict[str, str]:
    """Return headers that allow a browser to run our page's script and no other."""

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
    """Return this server's token: the variable's, else a new one. Raise ValueError for one that could be guessed.

    There is no flag for it, because every user of a machine can see the flags of every process.
    """
    token = environ.get(VARIABLE)
    if token is None:
        return secrets.token_urlsafe(24)
    if len(token) < LEAST or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(f"{VARIABLE} has fewer than {LEAST} characters, or blanks; unset it to get a generated token")
    return token


def listen(host: str, port: int | None = None) -> socket.socket:
    """Return a bound socket. port=None: PORT, or any free one if that is taken. Raise ValueError if that fails."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    for candidate in (PORT, 0) if port is None else (port,):
        try:
            bound.bind((host, candidate))
            bound.listen()
            return bound
        except OSError as error:
            why = error.strerror
            # no such name, no address of this machine, or neither: then the port is to blame
            wrong = "host" if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL else "port"
    bound.close()
    raise ValueError(f"cannot listen on {host}:{port or PORT} ({why}); name another --{wrong}")


def address_of(bound: socket.socket) -> str:
    """Return a bound socket's http://host:port for clients on this machine."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}"


def write_address(path: Path, address: str, token: str) -> None:
    """Write the server's address and token to a file that only its owner can read; remove dead servers' files there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for other in path.parent.glob("serving-*.json"):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # not written by a server
            about = json.loads(other.read_text())
            if about["host"] == socket.gethostname() and not psutil.pid_exists(about["pid"]):
                other.unlink()
    about = {"address": address, "token": token, "pid": os.getpid(), "host": socket.gethostname()}
    write_whole(path, json.dumps(about), 0o600)


class Connection(H11Protocol):
    """A connection that closes if no request arrives for HEAD_S. uvicorn by itself waits forever for the first one.

    A limit on connections (uvicorn's `limit_concurrency`) would count idle ones too, so any user could exhaust it.
    """

    def connection_made(self, transport):
        super().connection_made(transport)
        self.loop.call_later(HEAD_S, self.end_unless_asked, None)

    def on_response_complete(self):
        answered = self.cycle  # the next request may have arrived already
        super().on_response_complete()
        self.loop.call_later(HEAD_S, self.end_unless_asked, answered)

    def end_unless_asked(self, last_cycle):
        if self.cycle is last_cycle:
            self.transport.abort()


class Server(uvicorn.Server):
    """Run uvicorn on an app. `on_start()` is called when it listens, and a signal stops it cleanly."""

    def __init__(self, app, drain_s: int = 30, on_start: Callable[[], object] = lambda: None):
        # turn off uvicorn's request log, which contains queries
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
        """Serve on the socket, with a line on stderr per event. A second signal raises KeyboardInterrupt.

        Raise ValueError if the server could not start.
        """
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with contextlib.suppress(ValueError, OSError):  # each connection needs a file descriptor
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        # no traceback for each request that a second signal cuts off
        handler.addFilter(lambda record: not self.force_exit)
        # no warnings of uvicorn: invalid requests could fill the disk
        for name, level in (("manyhands.serve", logging.INFO), ("uvicorn.error", logging.ERROR)):
            logger = logging.getLogger(name)  # silence httpx and others, which log URLs
            logger.handlers, logger.propagate = [handler], False
            logger.setLevel(level)

        def end(number, frame):
            self.should_exit = True

        for number in (signal.SIGTERM, signal.SIGINT):  # before and after uvicorn's own handlers
            signal.signal(number, end)
        try:
            self.run(sockets=[bound])
        except SystemExit:  # uvicorn's status for a failed start; its log has the reason
            raise ValueError("the server could not start; see the lines above") from None
        if self.force_exit:
            raise KeyboardInterrupt
