"""The kernel's end of the control lines: one socket per rank, open while the ranks live.

A rank that hangs in a collective runs no code that is sent to it, but the thread behind its control line does: it
says where the rank is and frees it. A line that breaks means that the rank is gone, within milliseconds.
"""

import contextlib
import json
import secrets
import socket
import threading


class ControlLines:
    """Listens for `n` ranks on `host`; each must show the token."""

    def __init__(self, n, host="127.0.0.1"):
        self.n, self.token = n, secrets.token_hex(16)
        self.pids, self.dead, self.on_output = {}, set(), None
        self._lines, self._replies, self._next_id = {}, {}, 0
        self._changed = threading.Condition()
        self._listener = socket.create_server((host, 0), backlog=max(n, 8))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="manyhands-control", daemon=True).start()

    def _accept(self):
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._read, args=(line,), name="manyhands-rank", daemon=True).start()

    def _read(self, line):
        line.settimeout(20)
        with line, line.makefile("r") as messages:
            try:
                hello = json.loads(next(messages))
                if not secrets.compare_digest(str(hello["token"]), self.token):
                    return
                rank = int(hello["hello"])
            except (OSError, ValueError, KeyError, StopIteration, TypeError):
                return
            line.settimeout(None)
            with self._changed:
                self._lines[rank], self.pids[rank] = line, hello["pid"]
                self._changed.notify_all()
            with contextlib.suppress(OSError, ValueError):
                for text in messages:
                    self._receive(rank, json.loads(text))
            with self._changed:
                self.dead.add(rank)
                self._changed.notify_all()

    def _receive(self, rank, message):
        if "output" in message:
            if self.on_output is not None:
                self.on_output(rank, message["output"])
            return
        with self._changed:
            self._replies[message["reply"], rank] = message["where"]
            self._changed.notify_all()

    def wait_for_all(self, timeout_s):
        """Block until every rank is on its line; returns the ranks that are missing after `timeout_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._lines) == self.n, timeout_s)
            return sorted(set(range(self.n)) - set(self._lines))

    def tell(self, ranks, do):
        for rank in ranks:
            if rank in self._lines and rank not in self.dead:
                with contextlib.suppress(OSError):
                    self._lines[rank].sendall(json.dumps({"do": do}).encode() + b"\n")

    def where(self, ranks, timeout_s=4):
        """Where each rank is: rank -> {"call", "line", "source"}, None (no cell runs), or "silent"."""
        self._next_id += 1
        question = self._next_id
        for rank in ranks:
            with contextlib.suppress(OSError, KeyError):
                self._lines[rank].sendall(json.dumps({"do": "where", "id": question}).encode() + b"\n")
        with self._changed:
            self._changed.wait_for(
                lambda: all((question, r) in self._replies or r in self.dead for r in ranks), timeout_s
            )
            return {r: self._replies.pop((question, r), "silent") for r in ranks}

    def close(self):
        """Hang up: every rank that is still there ends itself."""
        self.on_output = None
        self._listener.close()
        for line in list(self._lines.values()):
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
