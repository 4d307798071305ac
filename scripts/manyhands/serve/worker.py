"""The engine in a thread of its own, and what the event loop knows of it: a ticket for each request.

    worker = Worker(engine, loop, limits)          # start() it; stop() ends it
    ticket = worker.submit(sequence)               # Refusal (429) if all room is taken
    while not ticket.over:
        ids, finish = await ticket.more()          # whatever has been drawn since, at once
    worker.cancel(ticket)                          # always, at the end: it costs nothing if it is over

The thread alone touches the engine. It tells the loop once per step what was drawn. A reader who is slow finds more tokens
at a time; none waits for another, and a ticket never holds more than the model's context.
"""

import asyncio
import logging
import queue
import threading
import time

from manyhands.serve.limits import Refusal, queue_full

log = logging.getLogger("manyhands.serve")


class Ticket:
    """One request. Used by the event loop only."""

    def __init__(self, sequence):
        self.sequence, self.version = (
            sequence,
            None,
        )  # version: of the model that writes, known with the first token
        self.submitted_s, self.first_s = time.monotonic(), None
        self.ids, self.finish, self.error = [], None, None
        self.news = asyncio.Event()

    @property
    def over(self):
        """Whether nothing more comes, and all has been taken."""
        return self.finish is not None and not self.ids

    async def more(self):
        """(new ids, why it ended or None). Raises Refusal if the engine failed."""
        await self.news.wait()
        self.news.clear()
        if self.error is not None:
            raise self.error
        ids, self.ids = self.ids, []
        return ids, self.finish


class Worker(threading.Thread):
    """Runs `engine` until `stop`. All methods but `run` belong to the event loop's thread."""

    def __init__(self, engine, loop, limits):
        super().__init__(name="engine", daemon=True)
        self.engine, self.loop, self.limits = engine, loop, limits
        self.tickets = {}  # sequence -> ticket, of those that are not over for the engine
        self.commands = queue.SimpleQueue()
        self.next_model = None  # (arguments of engine.change_model, future)
        self.stopping = self.failed = False

    def submit(self, sequence):
        """A ticket for a new sequence. Raises Refusal if there is no room, or no engine any more."""
        if self.failed:
            raise Refusal(503, "the engine has failed; the server must be started again", "engine_failed")
        if len(self.tickets) >= self.limits.running + self.limits.queue:
            raise queue_full(self.limits.running, self.limits.queue)
        ticket = self.tickets[sequence] = Ticket(sequence)
        self.commands.put(lambda: self.engine.scheduler.add(sequence))
        return ticket

    def cancel(self, ticket):
        """The engine drops it before its next step, unless it is over."""
        if self.tickets.pop(ticket.sequence, None) is not None:
            self.commands.put(lambda: self.engine.cancel(ticket.sequence))

    def change_model(self, *model):
        """A future that is done when `engine.change_model(*model)` has happened.

        What has begun is finished with the old model first; what waits gets the new one.
        """
        changed = self.loop.create_future()
        self.commands.put(lambda: self._hold_for((model, changed)))
        return changed

    def stop(self):
        """End the thread after the present step."""
        self.stopping = True
        self.commands.put(lambda: None)

    def run(self):
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
        idle = self.engine.idle() and self.next_model is None
        with_wait = True
        while True:
            try:
                self.commands.get(block=idle and with_wait)()
            except queue.Empty:
                break
            with_wait = False
        if self.next_model is not None and not self.engine.scheduler.unfinished():
            (model, changed), self.next_model = self.next_model, None
            try:
                self.engine.change_model(*model)
            except Exception as error:  # noqa: BLE001 - such as no memory: the old model goes on
                self.engine.scheduler.hold_new = False
                self._tell(_settle, changed, None, error)
            else:
                self._tell(_settle, changed, self.engine.version, None)

    def _hold_for(self, next_model):
        if self.next_model is not None:
            raise AssertionError("two models at once; the gate lets one through at a time")
        self.next_model, self.engine.scheduler.hold_new = next_model, True

    def _drop_all(self, error, last):
        scheduler = self.engine.scheduler
        dropped = [*scheduler.running, *scheduler.waiting]
        for sequence in dropped:
            self.engine.cancel(sequence)
        self.failed = last
        if last and self.next_model is not None:
            self._tell(_settle, self.next_model[1], None, error)
        self._tell(self._fail, dropped, last)

    def _tell(self, function, *args):
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function, *args)

    def _deliver(self, drawn, version):
        now = time.monotonic()
        for one in drawn:
            ticket = self.tickets.get(one.sequence)
            if ticket is None:  # cancelled meanwhile
                continue
            if ticket.first_s is None:
                ticket.first_s, ticket.version = now - ticket.submitted_s, version
            ticket.ids.append(one.id)
            ticket.finish = one.finish
            if one.finish is not None:
                del self.tickets[one.sequence]
            ticket.news.set()

    def _fail(self, sequences, last):
        for ticket in list(self.tickets.values()) if last else [self.tickets.get(s) for s in sequences]:
            if ticket is not None:
                self.tickets.pop(ticket.sequence, None)
                ticket.finish = "error"
                ticket.error = Refusal(500, "the engine failed while it computed this; try again", "engine_failed")
                ticket.news.set()


def _settle(future, result, error):
    if future.done():  # whoever waited has gone
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
