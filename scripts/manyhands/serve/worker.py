"""The engine in a thread of its own, and what the event loop knows of it: a ticket for each request.

    worker = Worker(engine, loop, limits)          # start() it; stop() ends it
    worker.submit(ticket)                          # Refusal (429) if all room is taken
    text, finish = await ticket.more()             # whatever has been drawn since, at once
    worker.cancel(ticket)                          # always, at the end: it costs nothing if it is over

The thread alone touches the engine. It tells the loop once per step what was drawn. A slow reader finds more tokens at
a time; none waits for another, and a ticket never holds more than the model's context.
"""

import asyncio
import logging
import queue
import threading
import time
from concurrent.futures import Future
from contextlib import suppress

from manyhands.serve.schema import Refusal

log = logging.getLogger("manyhands.serve")


class Ticket:
    """One request, and its text as it comes. Used by the event loop only."""

    def __init__(self, sequence, text):
        self.sequence, self.text = sequence, text  # text: a TextSoFar
        self.version = None  # of the model that writes, known with the first token
        self.submitted_s, self.first_s = time.monotonic(), None
        self.ids, self.finish, self.error = [], None, None
        self.news = asyncio.Event()
        self.timer: asyncio.TimerHandle  # fails it when its time is over; `Service.submit` sets it

    async def more(self) -> tuple[str, str | None]:
        """(text that can be shown now, why it ended or None). Raises the Refusal that `fail` was given."""
        await self.news.wait()
        self.news.clear()
        if self.error is not None:
            raise self.error
        ids, self.ids = self.ids, []
        shown = self.text.add(ids)
        if self.text.stopped:  # at a string; the engine may be behind it already
            self.finish = "stop"
        elif self.finish is not None:
            shown += self.text.end()
        return shown, self.finish

    def fail(self, error: Refusal) -> None:
        """Whoever waits for more gets this instead."""
        self.error = error
        self.news.set()


class Worker(threading.Thread):
    """Runs `engine` until `stop`. All methods but `run` belong to the event loop's thread."""

    def __init__(self, engine, loop, limits):
        super().__init__(name="engine", daemon=True)
        self.engine, self.loop, self.limits = engine, loop, limits
        self.tickets = {}  # sequence -> ticket, of those that are not over for the engine
        self.commands = queue.SimpleQueue()
        self.next_model = None  # (arguments of engine.change_model, future)
        self.stopping = self.failed = False

    def submit(self, ticket: Ticket) -> None:
        """Queue a Ticket. Raises Refusal if there is no room, or no engine any more."""
        if self.failed:
            raise Refusal(503, "the engine has failed; the server must be started again", "engine_failed")
        running, waiting = self.limits.running, self.limits.queue
        if len(self.tickets) >= running + waiting:
            sentence = f"{running} requests run and {waiting} wait, which is all the room; try again later"
            raise Refusal(429, sentence, "queue_full", headers={"Retry-After": "1"})
        self.tickets[ticket.sequence] = ticket
        self.commands.put(lambda: self.engine.scheduler.add(ticket.sequence))

    def cancel(self, ticket: Ticket) -> None:
        """The engine drops it before its next step, unless it is over."""
        if self.tickets.pop(ticket.sequence, None) is not None:
            self.commands.put(lambda: self.engine.cancel(ticket.sequence))

    def change_model(self, *model) -> asyncio.Future:
        """Awaitable: done when `engine.change_model(*model)` has happened. Raises what that raises.

        What has begun is finished with the old model first; what waits gets the new one.
        """
        changed: Future[None] = Future()
        self.commands.put(lambda: self._hold_for(model, changed))
        return asyncio.wrap_future(changed, loop=self.loop)

    def stop(self) -> None:
        """End the thread after the present step."""
        self.stopping = True
        self.commands.put(lambda: None)

    def run(self) -> None:
        failures = 0
        while not self.stopping:
            try:
                self._obey()
                if drawn := self.engine.step():
                    self._tell(self._deliver, drawn, self.engine.version)
                failures = 0
            except Exception as error:  # noqa: BLE001 - one request must not end all others for ever
                failures += 1
                log.exception("the engine failed in a step")
                self._drop_all(error, last=failures == 3)
                if failures == 3:
                    return

    def _obey(self):
        """Do what the loop has asked for; wait for it if there is nothing else to do."""
        wait = self.engine.idle() and self.next_model is None
        with suppress(queue.Empty):
            while True:
                self.commands.get(block=wait)()
                wait = False
        if self.next_model is not None and not self.engine.scheduler.unfinished():
            (model, changed), self.next_model = self.next_model, None
            try:
                self.engine.change_model(*model)
                changed.set_result(None)
            except Exception as error:  # noqa: BLE001 - such as no memory: the old model goes on
                self.engine.scheduler.hold_new = False
                changed.set_exception(error)

    def _hold_for(self, model, changed):
        assert self.next_model is None, "two models at once; the gate lets one through at a time"
        if changed.set_running_or_notify_cancel():  # else whoever waited has gone
            self.next_model, self.engine.scheduler.hold_new = (model, changed), True

    def _drop_all(self, error, last):
        scheduler = self.engine.scheduler
        dropped = [*scheduler.running, *scheduler.waiting]
        for sequence in dropped:
            self.engine.cancel(sequence)
        self.failed = last
        if last and self.next_model is not None:
            self.next_model[1].set_exception(error)
        self._tell(self._fail, dropped, last)

    def _tell(self, function, *args):
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function, *args)

    def _deliver(self, drawn, version):
        now = time.monotonic()
        for one in drawn:
            if (ticket := self.tickets.get(one.sequence)) is None:  # cancelled meanwhile
                continue
            if ticket.first_s is None:
                ticket.first_s, ticket.version = now - ticket.submitted_s, version
            ticket.ids.append(one.id)
            ticket.finish = one.finish
            if one.finish is not None:
                del self.tickets[one.sequence]
            ticket.news.set()

    def _fail(self, sequences, last):
        for sequence in list(self.tickets) if last else sequences:
            if (ticket := self.tickets.pop(sequence, None)) is not None:
                ticket.fail(Refusal(500, "the engine failed while it computed this; try again", "engine_failed"))
