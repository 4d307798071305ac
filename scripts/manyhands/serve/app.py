"""The routes: OpenAI's completions and chat, models, health, metrics, a chat page, and the door for a new checkpoint.

    app = make_app(service, load)                  # load(step) -> (model, facts), for POST /admin/checkpoint

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
import contextlib
import logging
import time
from math import isfinite

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from manyhands.checkpoint.export import newest_in
from manyhands.checkpoint.manifest import CheckpointError
from manyhands.serve import page
from manyhands.serve.access import authorise
from manyhands.serve.answering import Answer, Gone
from manyhands.serve.asked import asked_chat, asked_completion, read_json
from manyhands.serve.limits import Refusal

log = logging.getLogger("manyhands.serve")


def make_app(service, load=None, source=None, watch_s=None):
    """The ASGI application. Its lifespan starts and stops the service, and looks into `source` each `watch_s` seconds."""

    @contextlib.asynccontextmanager
    async def lifespan(app):
        await service.start()
        watching = asyncio.ensure_future(watch(service, load, source, watch_s)) if watch_s else None
        yield
        if watching is not None:
            watching.cancel()
        await service.stop()

    # no pages of documentation: they would load their scripts from elsewhere
    app = FastAPI(title="Many Hands", openapi_url=None, lifespan=lifespan)
    app.add_middleware(Log, service=service)
    _handle_errors(app)
    _add_texts(app, service)
    _add_the_rest(app, service, load)
    return app


async def watch(service, load, source, every_s):
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


def _add_texts(app, service):
    async def respond(request, read, chat):
        authorise(request.headers, service.token)
        body = read_json(await read_body(request, service.limits))
        refuse_model(body, service.name)
        asked = read(body, service.words, service.limits, service.context)
        return await Answer(service, asked, chat, request.receive).response()

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request):
        return await respond(request, asked_chat, chat=True)

    @app.post("/v1/completions")
    async def completions(request: Request):
        return await respond(request, asked_completion, chat=False)


def _add_the_rest(app, service, load):
    def model():
        return {
            "id": service.name, "object": "model", "created": service.started, "owned_by": "manyhands",
            "context": service.context, "version": service.live.version,
        }  # fmt: skip

    @app.get("/v1/models")
    async def models(request: Request):
        authorise(request.headers, service.token)
        return JSONResponse({"object": "list", "data": [model()]})

    @app.get("/v1/models/{name}")
    async def one_model(request: Request, name: str):
        authorise(request.headers, service.token)
        refuse_model({"model": name}, service.name)
        return JSONResponse(model())

    @app.get("/metrics")
    async def metrics(request: Request):
        authorise(request.headers, service.token)
        return Response(service.metrics.content(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.post("/admin/checkpoint")
    async def checkpoint(request: Request):
        authorise(request.headers, service.token)
        step = read_json(await read_body(request, service.limits) or b"{}").get("step", "newest")
        if load is None or not (step in ("newest", "best") or isinstance(step, int) and step >= 0):
            raise Refusal(400, "step is neither newest, best nor a number", "invalid_value", "step")
        try:
            verdict = await service.consider(lambda: load(str(step)))
        except CheckpointError as error:
            raise Refusal(409, str(error), "unreadable") from None
        losses = {name: loss for name, loss in vars(verdict).items() if name.endswith("loss")}
        content = vars(verdict) | {name: loss if loss and isfinite(loss) else None for name, loss in losses.items()}
        content["serves"] = service.live.version
        return JSONResponse(content, status_code=200 if verdict.passed else 409)

    @app.get("/healthz")
    async def healthz():
        failed = service.worker.failed or not service.worker.is_alive()
        return JSONResponse({"status": "failed" if failed else "ok"}, status_code=503 if failed else 200)

    @app.get("/")
    async def chat_page():
        return Response(page.CONTENT, media_type="text/html; charset=utf-8", headers=page.HEADERS)


def refuse_model(body, name):
    """Raises Refusal (404) if a request names another model; none is the one there is."""
    if body.get("model") not in (None, name):
        raise Refusal(404, f"there is no such model; the one here is {name}", "model_not_found", "model")


async def read_body(request, limits):
    """The body's bytes. Raises Refusal for one that is too large (413) or too slow (408).

    What is too large is read on for a while and thrown away: who is still sending would lose the answer.
    """
    too_large = Refusal(413, f"the body has more than {limits.body_bytes:,} bytes", "body_too_large")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > 10 * limits.body_bytes:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(limits.body_s):
            async for part in request.stream():
                size += len(part)
                if size > 10 * limits.body_bytes:
                    raise too_large
                if size > limits.body_bytes:
                    parts.clear()
                else:
                    parts.append(part)
    except TimeoutError:
        raise Refusal(408, f"the body did not arrive within {limits.body_s:g} s", "timeout") from None
    if size > limits.body_bytes:
        raise too_large
    return b"".join(parts)


def _handle_errors(app):
    @app.exception_handler(Refusal)
    async def refused(request, error):
        return JSONResponse(error.content, status_code=error.status, headers=error.headers)

    @app.exception_handler(HTTPException)
    async def no_route(request, error):
        refusal = Refusal(error.status_code, f"{error.detail}; see /v1/models and /v1/chat/completions", "no_route")
        return JSONResponse(refusal.content, status_code=error.status_code, headers=error.headers)

    @app.exception_handler(Gone)
    @app.exception_handler(ClientDisconnect)
    async def gone(request, error):
        return Response(status_code=499)  # nobody reads it; the log does

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
