"""Connections: how many there may be, and how long one may last on which nothing is asked.

    most = allowed(limits.connections)                      # no more than this process may have files open
    uvicorn.Config(app, http=partial(Connection, idle={}, most=most, head_s=10.0), ...)

Anybody on the machine can open sockets, and without a token nothing but sockets: a request without it is answered at
once. So a connection on which no request is in work lasts `head_s` seconds, however slowly bytes come, and where there
are too many the one that has been idle for longest makes room. Whoever has asked for something keeps the connection;
when all have, the next is answered with 503.
"""

import logging
import resource
import time

from uvicorn.protocols.http.h11_impl import H11Protocol

from manyhands.serve.schema import Refusal

SPARE = 32  # connections that are told that there is no room; as many more are accepted before they are counted
FULL = {"Retry-After": "1", "Connection": "close"}
TOLD = Refusal(503, "all connections are in use; try again later", "connections_full", headers=FULL).response()


def allowed(wanted: int) -> int:
    """How many connections this process can hold, at most `wanted`; its limit of open files is raised if it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < (enough := wanted + 4 * SPARE) and soft != resource.RLIM_INFINITY:
        soft = enough if hard == resource.RLIM_INFINITY else min(enough, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - 4 * SPARE))


class Connection(H11Protocol):
    """uvicorn's, bounded. `idle`: all of one server on which nothing is asked, with their timers, the oldest first."""

    def __init__(self, *args, idle: dict, most: int, head_s: float, **more):
        super().__init__(*args, **more)
        self.idle, self.most, self.head_s = idle, most, head_s

    def connection_made(self, transport):
        super().connection_made(transport)
        if len(self.connections) > self.most:
            if self.idle:
                next(iter(self.idle)).end()
            elif len(self.connections) <= self.most + SPARE:
                self.app = TOLD
            else:
                self.end()
        self.be_idle()

    def connection_lost(self, exc):
        super().connection_lost(exc)
        self.be_busy()

    def handle_events(self):
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self.be_busy()

    def on_response_complete(self):
        super().on_response_complete()
        if self.cycle.response_complete and self in self.connections:  # else the next request has come already
            self.be_idle()

    def be_idle(self):
        self.idle[self] = self.loop.call_later(self.head_s, self.end)

    def be_busy(self):
        if (timer := self.idle.pop(self, None)) is not None:
            timer.cancel()

    def end(self):
        """Whatever was sent and is not read is lost."""
        self.be_busy()
        self.transport.abort()


class OnceAMinute(logging.Filter):
    """What somebody without a token can bring about as often as they like fills no disk."""

    def __init__(self):
        super().__init__()
        self.last_s: dict[str, float] = {}

    def filter(self, record):
        now, before = time.monotonic(), self.last_s.get(record.msg, -60)
        if now < before + 60 and not record.exc_info:  # a traceback is of our own mistakes
            return False
        self.last_s[record.msg] = now
        return True
