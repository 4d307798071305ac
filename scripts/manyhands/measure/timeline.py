"""Show each rank over time, from the records of `trace`: computing, communicating, and waiting for which rank.

    timeline = Timeline({0: record, 1: record})
    timeline.spans, timeline.rows, timeline.lines()      # for a Gantt chart, as numbers, as text
    timeline.write("trace.json")                         # opens in https://ui.perfetto.dev

A rank waits in a collective until the last rank that it needs has called it too; the rest of the call is
communication. All time outside of calls counts as computing. Imports no torch: a notebook's kernel reads records.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from manyhands.course.folders import write_whole
from manyhands.launch.ranks import name_ranks
from manyhands.measure.virtual_network import Span
from manyhands.plots.looks import prefix


@dataclass(frozen=True)
class Arrow:
    """A message of `bytes` from rank `source`, which sent it at start_s, to rank `to`, which had it at end_s."""

    source: int
    to: int
    bytes: int
    start_s: float
    end_s: float


@dataclass
class Row:
    """The seconds and bytes of one rank; waits_for: seconds for each rank, of which it was the last to come."""

    rank: int
    compute_s: float = 0.0
    communication_s: float = 0.0  # that it stood still for
    waiting_s: float = 0.0
    waits_for: dict = None
    bytes: int = 0  # as `wire.Seen.payload_bytes()`
    calls: dict = None  # op: how often


class Timeline:
    """`spans`, `arrows` and `rows` of {rank: record of trace.record()}; `total_s` from the first start to the last end.

    A rank may be missing: what the others wait for there is still named.
    """

    def __init__(self, records):
        self.ranks = sorted(records)
        self.origin_s = min((records[r]["start_s"] for r in self.ranks), default=0.0)
        self.total_s = max((records[r]["end_s"] for r in self.ranks), default=0.0) - self.origin_s
        self.spans, self.arrows, self.rows = [], [], []
        self._calls = []  # (rank, call, end in s, for whom it waited)
        self._program = {r: tuple(records[r][key] - self.origin_s for key in ("start_s", "end_s")) for r in self.ranks}
        self._at = {}  # key of a call -> {rank: call}
        for rank in self.ranks:
            for call in records[rank]["calls"]:
                self._at.setdefault(call["key"], {})[rank] = call
        for rank in self.ranks:
            self._add(rank, records[rank])

    def _add(self, rank, record):
        row = Row(rank, waits_for={}, calls={})
        self.rows.append(row)
        free_from = record["start_s"]  # the rank computes from here on
        for call in sorted(record["calls"], key=lambda call: (call["blocked"] or [[call["start_s"]]])[0][0]):
            row.calls[call["op"]] = row.calls.get(call["op"], 0) + 1
            row.bytes += call["bytes"] if call["op"] != "recv" else 0
            end_s = call["done_s"] or record["end_s"]
            late, came_s, for_whom = self._last(rank, call, end_s)
            began_s = min(max(call["start_s"], came_s), end_s)
            for block_s, until_s in call["blocked"]:
                block_s = max(block_s, free_from)  # two calls may be waited for at once
                if until_s <= block_s:
                    continue
                turn_s = min(max(block_s, came_s), until_s)
                self._span(row, "compute", "", free_from, block_s)
                self._span(row, "waiting", for_whom, block_s, turn_s)
                row.communication_s += until_s - turn_s
                for other in late if turn_s > block_s else ():
                    row.waits_for[other] = row.waits_for.get(other, 0.0) + turn_s - block_s
                free_from = until_s
            self._span(row, "communication", _named(call), began_s, end_s)
            self._calls.append((rank, call, end_s, for_whom if came_s > call["start_s"] else ""))
            if call["op"] == "recv" and call["done_s"] and (sent := self._at[call["key"]].get(call["peer"])):
                arrow = sent["start_s"] - self.origin_s, call["done_s"] - self.origin_s
                self.arrows.append(Arrow(call["peer"], rank, call["bytes"], *arrow))
        self._span(row, "compute", "", free_from, record["end_s"])

    def _last(self, rank, call, end_s):
        """(the ranks for which this one waits, until when, as text): who called last before this call ended."""
        others = [q for q in call["group"] if q != rank]
        at = self._at[call["key"]]
        if call["done_s"] is None and (absent := [q for q in others if q not in at]):
            return absent, end_s, f"for {name_ranks(absent)}"
        came = {q: at[q]["start_s"] for q in others if q in at and at[q]["start_s"] <= end_s}
        if not came:
            return [], call["start_s"], ""
        last = max(came, key=came.get)
        return [last], came[last], f"for rank {last}"

    def _span(self, row, lane, name, start_s, end_s):
        if end_s <= start_s:
            return
        if lane != "communication":
            setattr(row, f"{lane}_s", getattr(row, f"{lane}_s") + end_s - start_s)
        self.spans.append(Span(row.rank, lane, name, start_s - self.origin_s, end_s - self.origin_s))

    def lines(self):
        """The chart as text: one line per rank."""
        return [_line(row, self.total_s) for row in self.rows]

    def write(self, path):
        """Write the file `path` in Chrome's trace format. Returns the path."""
        write_whole(Path(path), json.dumps({"traceEvents": self.events(), "displayTimeUnit": "ms"}))
        return Path(path)

    def events(self):
        """Events of Chrome's trace format: a process per rank, its calls, and an arrow per message.

        The slices of a rank's program follow each other without a gap, because Perfetto drops an arrow that begins or
        ends outside a slice (its `FlowTracker`). Calls may overlap, so they are asynchronous events.
        """
        events = []
        for rank in self.ranks:
            for name, value in (
                ("process_name", {"name": f"rank {rank}"}),
                ("process_sort_index", {"sort_index": rank}),
            ):
                events.append({"ph": "M", "pid": rank, "tid": 0, "name": name, "args": value})
            events.append({"ph": "M", "pid": rank, "tid": 0, "name": "thread_name", "args": {"name": "program"}})
        for rank in self.ranks:
            program = [span for span in self.spans if span.rank == rank and span.lane != "communication"]
            until_s, end_s = self._program[rank]
            for span in sorted(program, key=lambda span: span.start_s):
                if span.start_s > until_s:
                    events.append(_slice(rank, "communication", "communicating", until_s, span.start_s))
                name = " ".join(filter(None, [{"compute": "computing"}.get(span.lane, span.lane), span.name]))
                events.append(_slice(rank, span.lane, name, span.start_s, span.end_s))
                until_s = span.end_s
            if until_s < end_s:
                events.append(_slice(rank, "communication", "communicating", until_s, end_s))
        for number, (rank, call, end_s, for_whom) in enumerate(self._calls):
            told = {"bytes": call["bytes"], "ranks": call["group"], "waited": for_whom, "ended": bool(call["done_s"])}
            common = {"pid": rank, "tid": 0, "cat": "communication", "id": number, "name": _named(call)}
            events.append({"ph": "b", "ts": (call["start_s"] - self.origin_s) * 1e6, "args": told, **common})
            events.append({"ph": "e", "ts": (end_s - self.origin_s) * 1e6, **common})
        for number, arrow in enumerate(self.arrows):
            common = {"tid": 0, "cat": "message", "id": number, "name": _amount(arrow.bytes, "bytes")}
            events.append({"ph": "s", "pid": arrow.source, "ts": arrow.start_s * 1e6, **common})
            events.append({"ph": "f", "bp": "e", "pid": arrow.to, "ts": arrow.end_s * 1e6, **common})
        return events


def _slice(rank, category, name, start_s, end_s):
    """Return a slice of a rank's program, in whole nanoseconds, so that no slice overlaps the next one."""
    start_ns, end_ns = round(start_s * 1e9), round(end_s * 1e9)
    at = {"ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3}
    return {"ph": "X", "pid": rank, "tid": 0, "cat": category, "name": name, **at}


def _amount(value, unit):
    if not value:
        return f"0 {unit}"
    scale, shown = prefix(unit, value)
    return f"{value / scale:.3g} {shown}"


def _named(call):
    return f"{call['op']} {_amount(call['bytes'], 'bytes')}" if call["bytes"] else call["op"]


def _line(row, total_s):
    scale, unit = prefix("s", total_s)
    waited = ", ".join(f"{s / scale:.3g} {unit} for rank {q}" for q, s in sorted(row.waits_for.items()))
    calls = ", ".join(f"{count} {op}" for op, count in row.calls.items()) or "no collectives"
    return (
        f"rank {row.rank}: computing {row.compute_s / scale:.3g} {unit}, "
        f"communicating {row.communication_s / scale:.3g} {unit}, waiting {row.waiting_s / scale:.3g} {unit}"
        f"{f' ({waited})' if waited else ''}; {calls}; {_amount(row.bytes, 'bytes')}"
    )
