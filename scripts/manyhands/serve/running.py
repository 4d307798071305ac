"""A service on a socket: where it listens, how its address is told, and how it ends.

    socket = listen("127.0.0.1", None)             # 8000, or another port where that is taken
    status = run(app, socket, drain_s=30)          # until SIGTERM or Ctrl-C; 0 if every request got its end

SIGTERM: no new connections, what was asked for is finished, for up to `drain_s`; then the rest is cut off. A second
signal does not wait.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading

import uvicorn

PORT = 8000
log = logging.getLogger("manyhands.serve")


def listen(host, port=None):
    """A bound socket. port=None: PORT, or any free one where that is taken. Raises ValueError if it cannot be had."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        try:
            bound.bind((host, PORT if port is None else port))
        except OSError:
            if port is not None:
                raise
            bound.bind((host, 0))
        bound.listen(1024)
    except OSError as error:
        bound.close()
        raise ValueError(
            f"{host}:{port or PORT} cannot be listened on ({error.strerror}); name another --port"
        ) from None
    return bound


def address_of(bound):
    """http://host:port of a bound socket, as a client on this machine reaches it."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn's, which ends with status 0 after a signal, and at once after a second one."""

    signals = 0

    def handle_exit(self, sig, frame):
        self.signals += 1
        self.should_exit = True
        self.force_exit = self.signals > 1

    @contextlib.contextmanager
    def capture_signals(self):
        if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def server_of(app, connections=1024, drain_s=30):
    """A Server for `app`, not yet running. Its own lines about requests, which hold their queries, are off."""
    config = uvicorn.Config(
        app, log_config=None, access_log=False, log_level="warning", server_header=False, ws="none", lifespan="on",
        limit_concurrency=connections, timeout_keep_alive=5, timeout_graceful_shutdown=drain_s,
    )  # fmt: skip
    return Server(config)


def run(app, bound, connections=1024, drain_s=30, ready=lambda: None):
    """Serve until a signal; the exit status. `ready` is called when connections are answered."""
    server = server_of(app, connections, drain_s)

    async def serve():
        task = asyncio.ensure_future(server.serve(sockets=[bound]))
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        if server.started:
            ready()
        await task

    with server.capture_signals():  # from now on, not only once it serves
        asyncio.run(serve())
    return 0 if server.started else 1


def log_to_stderr():
    """One line per event, with its time. httpx and others, which show URLs, stay silent."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name in ("manyhands.serve", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO if name == "manyhands.serve" else logging.WARNING)
