"""The routes: OpenAI's completions and chat, models, health, metrics, a chat page, and the door for a new checkpoint.

    app = make_app(service, load)                  # load(step) -> (model, metadata), for POST /admin/checkpoint

| route | token | |
|---|---|---|
| POST /v1/chat/completions, POST /v1/completions | yes | whole, or `"stream": true` |
| GET /v1/models | yes | the one model, and its context |
| GET /metrics | yes | for Prometheus (`authorization: credentials_file`) |
| POST /admin/checkpoint | yes | `{"step": "newest"}`: judge it, and serve it if it is not worse |
| GET /healthz | no | 200, or 503 when the engine has failed |
| GET / | no | the page; it holds no secret, and asks for nothing until it has the token |

All paths are relative to where the page lies, so that a proxy may put any prefix in front.
"""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import logging
import re
import time
from collections.abc import Mapping
from importlib.resources import files
from math import isfinite
from pathlib import Path

from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from manyhands.checkpoint.export import newest_in
from manyhands.checkpoint.manifest import CheckpointError
from manyhands.serve.answers import Answer, Stream
from manyhands.serve.schema import ChatRequest, CheckpointRequest, CompletionRequest, Limits, Refusal, read
from manyhands.serve.service import Service

log = logging.getLogger("manyhands.serve")
NO_STORE = {"Cache-Control": "no-store"}
PAGE = files("manyhands.serve").joinpath("page.html").read_text("utf-8")


def make_app(service: Service, load=None, source: Path | None = None, watch_s: float | None = None) -> FastAPI:
    """The ASGI application. While it lives the service runs, and looks into `source` each `watch_s` seconds."""

    @contextlib.asynccontextmanager
    async def lifespan(app):
        await service.start()
        watching = asyncio.ensure_future(watch(service, load, source, watch_s)) if watch_s else None
        try:
            yield
        finally:  # also where nobody waits for the end
            if watching is not None:
                watching.cancel()
            await service.stop()

    # no pages of documentation: they would load their scripts from elsewhere
    app = FastAPI(title="Many Hands", openapi_url=None, lifespan=lifespan)
    app.add_middleware(Log, service=service)
    _handle_errors(app)
    app.include_router(_open_routes(service))
    app.include_router(_routes_with_token(service, load))
    return app


async def watch(service: Service, load, source: Path, every_s: float) -> None:
    """For ever: whatever is newer in the folder `source` is considered once."""
    seen = newest_in(source)
    while True:
        await asyncio.sleep(every_s)
        newest = await asyncio.to_thread(newest_in, source)
        if newest == seen:
            continue
        seen = newest
        try:
            await service.consider(lambda: load("newest"))
        except Exception:  # a checkpoint that cannot be read must not end the watch
            log.exception("the newest checkpoint could not be considered")


def _open_routes(service):
    router, headers = APIRouter(), page_headers()

    @router.get("/healthz")
    async def healthz():
        failed = service.worker.failed or not service.worker.is_alive()
        return JSONResponse({"status": "failed" if failed else "ok"}, status_code=503 if failed else 200)

    @router.get("/")
    async def chat_page():
        return Response(PAGE, media_type="text/html", headers=headers)

    return router


def _routes_with_token(service, load):
    async def authorised(request: Request):
        authorise(request.headers, service.token)

    router = APIRouter(dependencies=[Depends(authorised)])

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request):
        return await respond(service, request, ChatRequest)

    @router.post("/v1/completions")
    async def completions(request: Request):
        return await respond(service, request, CompletionRequest)

    def model():
        return {
            "id": service.name, "object": "model", "created": service.started, "owned_by": "manyhands",
            "context": service.context, "version": service.live.version,
        }  # fmt: skip

    @router.get("/v1/models")
    async def models():
        return JSONResponse({"object": "list", "data": [model()]})

    @router.get("/v1/models/{name}")
    async def one_model(name: str):
        refuse_model(name, service.name)
        return JSONResponse(model())

    @router.get("/metrics")
    async def metrics():
        return Response(service.metrics.content(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.post("/admin/checkpoint")
    async def checkpoint(request: Request):
        step = read(await read_body(request, service.limits) or b"{}", CheckpointRequest).step
        try:
            verdict = await service.consider(lambda: load(step))
        except CheckpointError as error:
            raise Refusal(409, str(error), "unreadable") from None
        # JSON has no NaN
        content = {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in vars(verdict).items()}
        return JSONResponse(content | {"serves": service.live.version}, status_code=200 if verdict.passed else 409)

    return router


def authorise(headers: Mapping[str, str], token: str) -> None:
    """Raises Refusal (401) unless the headers carry the token, as `Authorization: Bearer` or `X-Api-Key`.

    The page sends the second: behind a hub the first is the hub's own. The token is never in a URL's path or query,
    which proxies and browsers write down.
    """
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = [bearer.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
    # every one is compared, in a time that does not depend on where they differ
    matches = [hmac.compare_digest(one.encode("utf-8", "replace"), token.encode()) for one in given]
    if not any(matches):
        sentence = "the token is missing or wrong; the server's terminal, or the file that it names there, has it"
        raise Refusal(401, sentence, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


async def respond(
    service: Service, http_request: Request, kind: type[CompletionRequest] | type[ChatRequest]
) -> Response:
    """The Response to a request for text. A stream begins with its first token: until then a refusal has a status."""
    request = read(await read_body(http_request, service.limits), kind)
    refuse_model(request.model, service.name)
    ticket = service.submit(request)
    watching = asyncio.ensure_future(_fail_if_gone(http_request.receive, ticket))
    try:
        first = await ticket.more()
        answer = Answer(ticket, kind is ChatRequest, service.name)
        if request.stream:
            events = answer.events(first, request.stream_options.include_usage)
            return Stream(answer, events, lambda reason: service.close(ticket, reason))
        pieces = [first]
        while pieces[-1][1] is None:
            pieces.append(await ticket.more())
        service.close(ticket, ticket.finish)
        return JSONResponse(answer.whole("".join(text for text, _ in pieces), ticket.finish), headers=NO_STORE)
    except BaseException as error:
        service.close(ticket, getattr(error, "code", "error"))
        raise
    finally:
        watching.cancel()


async def _fail_if_gone(receive, ticket):
    """Nobody reads an answer when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
    ticket.fail(Refusal(499, "the client has gone", "gone"))


def refuse_model(asked: object, name: str) -> None:
    """Raises Refusal (404) if a request names another model; none is the one there is."""
    if asked not in (None, name):
        raise Refusal(404, f"there is no such model; the one here is {name}", "model_not_found", "model")


async def read_body(request: Request, limits: Limits) -> bytes:
    """The body's bytes. Raises Refusal for one that is too large (413), too slow (408), or whose client leaves (499).

    What is too large is read on for a while and thrown away: who is still sending would lose the answer.
    """
    most = limits.body_bytes
    too_large = Refusal(413, f"the body has more than {most:,} bytes", "body_too_large")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > 10 * most:
        raise too_large
    content, size = bytearray(), 0
    try:
        async with asyncio.timeout(limits.body_s):
            async for part in request.stream():
                size += len(part)
                if size > 10 * most:
                    raise too_large
                if size <= most:
                    content += part
    except TimeoutError:
        raise Refusal(408, f"the body did not arrive within {limits.body_s:g} s", "timeout") from None
    except ClientDisconnect:
        raise Refusal(499, "the client has gone", "gone") from None
    if size > most:
        raise too_large
    return bytes(content)


def _handle_errors(app):
    @app.exception_handler(HTTPException)
    async def refused(request, error):
        if not isinstance(error, Refusal):
            sentence = f"{error.detail}; see /v1/models and /v1/chat/completions"
            error = Refusal(error.status_code, sentence, "no_route", headers=error.headers)
        return JSONResponse(error.content, status_code=error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def unexpected(request, error):
        return JSONResponse(Refusal(500, "the server has made a mistake; its log has it", "internal").content, 500)


class Log:
    """One line per request: route, status, seconds. Never a query, a header, or what was written."""

    def __init__(self, app, service):
        self.app, self.service = app, service

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        status, began_s = 0, time.monotonic()

        async def noting(message):
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noting)
        finally:
            route = getattr(scope.get("route"), "path", "another path")
            self.service.metrics.requests.labels(route, str(status)).inc()
            log.info("%s %s %d %.3f s", scope["method"], route, status, time.monotonic() - began_s)


def page_headers() -> dict[str, str]:
    """Under which a browser runs the script of our page, and no other."""

    def hashes(element):
        texts = re.findall(rf"<{element}>(.*?)</{element}>", PAGE, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    policy = (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    )
    more = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
    return {"Content-Security-Policy": policy, **more, **NO_STORE}
