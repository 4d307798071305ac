"""A service on a socket: where it listens, how its owner finds address and token, and how it ends.

    bound = listen("127.0.0.1", None)              # 8000, or another port where that is taken
    path = write_address(folder, address_of(bound), token)
    run(app, bound, drain_s=30)                    # until SIGTERM or Ctrl-C

SIGTERM: no new connections, what was asked for is finished, for up to `drain_s`; then the rest is cut off. A second
Ctrl-C does not wait. Loopback is shared with everybody on a login node: there is no server without a token.
"""

import json
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import uvicorn

PORT = 8000
VARIABLE = "MANYHANDS_SERVE_TOKEN"
LEAST = 16  # characters of a token


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
        sentence = f"{host}:{port or PORT} cannot be listened on ({error.strerror}); name another --port"
        raise ValueError(sentence) from None
    return bound


def address_of(bound: socket.socket) -> str:
    """http://host:port of a bound socket, as a client on this machine reaches it."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}"


def write_address(folder: str | Path, address: str, token: str) -> Path:
    """`folder`/serving-PORT.json with mode 0600: where the server is, and its token. Returns the path."""
    path = Path(folder) / f"serving-{address.rpartition(':')[2]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        path.unlink()  # of an earlier server, perhaps with another mode
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump({"address": address, "token": token, "pid": os.getpid()}, file)
    return path


def server_of(app, connections: int = 1024, drain_s: int = 30) -> uvicorn.Server:
    """uvicorn's Server for `app`, not yet running. Its own lines about requests, which hold their queries, are off."""
    config = uvicorn.Config(
        app, log_config=None, access_log=False, log_level="warning", server_header=False, ws="none", lifespan="on",
        limit_concurrency=connections, timeout_keep_alive=5, timeout_graceful_shutdown=drain_s,
    )  # fmt: skip
    return uvicorn.Server(config)


def run(app, bound: socket.socket, connections: int = 1024, drain_s: int = 30) -> None:
    """Serve on the socket until a signal, with a line on stderr per event. A second one: KeyboardInterrupt."""
    server, handler = server_of(app, connections, drain_s), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    # who does not wait gets no traceback for each request that is cut off
    handler.addFilter(lambda record: not server.force_exit)
    for name, level in (("manyhands.serve", logging.INFO), ("uvicorn.error", logging.WARNING)):
        logger = logging.getLogger(name)  # httpx and others, which show URLs, stay silent
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)

    def end(number, frame):
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):  # before uvicorn takes them over, and after it gives them back
        signal.signal(number, end)
    server.run(sockets=[bound])
    if server.force_exit:
        raise KeyboardInterrupt
