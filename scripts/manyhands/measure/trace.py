"""Record when this rank called which collective, how long it stood still in it, and how many bytes it is about.

    python -m torch.distributed.run --standalone --nproc-per-node 4 -m manyhands.measure.trace my_script.py --its flags
    mpiexec -n 4 python -m manyhands.measure.trace my_script.py --its flags

Each rank writes its record into MANYHANDS_OUTPUTS/traces (else outputs/traces). Rank 0 joins them to a file that opens
in https://ui.perfetto.dev, draws the chart next to it, and prints a line per rank. In a notebook it is
`%%ranks --trace`; in a program

    with trace.record() as recorder:
        train()
    record = recorder.result()               # of this rank; Timeline({rank: record, ...}) takes those of all

Calls and bytes are those of `wire`. Every operator passes through Python meanwhile, so computing takes longer than
without a trace. On a GPU each call waits for the device, before and after: what overlaps otherwise does not overlap
here. Clocks of several nodes are compared as they are.
"""

import json
import os
import runpy
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.utils._pytree import tree_leaves

from manyhands.course.folders import write_whole
from manyhands.launch.launchers import resolve
from manyhands.launch.run_folder import outputs_folder, save_figure
from manyhands.measure import wire
from manyhands.measure.timeline import Timeline
from manyhands.measure.timing import synchronise

RUN_IDS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PBS_JOBID")
LAST_PART_S = 10.0  # that the first ranks to end are given to write their records


@contextmanager
def record():
    """Record this rank's calls while the block runs; local, no rank waits for another. Yields a Recorder."""
    recorder, wait, wait_tensor = Recorder(), dist.Work.wait, functional.wait_tensor

    def traced_wait(work, *args, **kwargs):
        with recorder.blocked_in(id(work)):
            return wait(work, *args, **kwargs)

    def traced_wait_tensor(tensor):
        with recorder.blocked_in(_storage(tensor)):
            return wait_tensor(tensor)

    dist.Work.wait, functional.wait_tensor = traced_wait, traced_wait_tensor
    try:
        with recorder:
            yield recorder
    finally:
        dist.Work.wait, functional.wait_tensor = wait, wait_tensor
        recorder.end_s = recorder.now()


class Recorder(wire.Calls):
    """Notes each call that `wire` counts, with its times; `result()` is what `Timeline` takes."""

    def __init__(self):
        super().__init__(wire.Seen())
        self._to_wall_s = time.time() - time.monotonic()  # of one node all ranks have the same monotonic clock
        self.calls, self.start_s, self.end_s = [], self.now(), None
        self._open = {}  # what a rank waits for, see `_handle` -> (call, the object, which keeps its id)
        self._counts = {}  # of calls per group, or per pair of ranks
        self._unfinished, self._last_operator_s = [], self.start_s

    def now(self):
        return time.monotonic() + self._to_wall_s

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self._find_blocks_in_cpp()
        ours = operator.namespace in ("c10d", "_c10d_functional")
        device = next((a.device for a in tree_leaves(args) if isinstance(a, torch.Tensor)), None) if ours else None
        if device is not None:
            _synchronise(device)
        start_s, known = self.now(), len(self.seen.calls)
        result = super().__torch_dispatch__(operator, types, args, kwargs)
        if len(self.seen.calls) > known:
            self._note(self.seen.calls[-1], start_s, operator.namespace, args, result, device)
        self._last_operator_s = self.now()
        return result

    def _find_blocks_in_cpp(self):
        """DDP waits for its buckets in C++: a call that ended since the last operator held this thread until then."""
        for call in [call for call in self._unfinished if call["done_s"] is not None]:
            self._unfinished.remove(call)
            if not call["blocked"] and call["done_s"] > self._last_operator_s:
                call["in_cpp"] = [max(call["start_s"], self._last_operator_s), call["done_s"]]

    def _note(self, seen, start_s, namespace, args, result, device):
        group = _group(namespace, args)
        call = {
            "op": seen.op, "bytes": seen.bytes, "peer": seen.peer, "start_s": start_s, "done_s": None, "blocked": [],
            "group": dist.get_process_group_ranks(group), "name": group.group_name, "device": device, "key": None,
        }  # fmt: skip
        self.calls.append(call)
        self._unfinished.append(call)
        self._match(call)
        last = result[-1] if isinstance(result, (tuple, list)) else result
        if isinstance(last, torch.ScriptObject):
            work = dist.Work.unbox(last)
            self._open[id(work)] = call, work
            with suppress(RuntimeError):  # gloo's send and recv have no future: they end when they were waited for
                work.get_future().add_done_callback(lambda future: self._ended(call, future))
        elif isinstance(last, torch.Tensor):
            for tensor in result if isinstance(result, (tuple, list)) else [result]:
                self._open[_storage(tensor)] = call, tensor

    def _ended(self, call, future):
        try:
            future.value()
        except RuntimeError:  # freed after a time-out: it never ended
            return
        call["done_s"] = call["done_s"] or self.now()

    def _match(self, call):
        """Give the call the key that it has on the other ranks, too: its number in its group, or between two ranks."""
        here, between = dist.get_rank(), call["name"]
        if call["op"] in ("send", "recv"):
            if call["peer"] is None:
                call["key"] = f"from anybody, on rank {here}: {len(self.calls)}"  # until it has come
                return
            call["group"] = [here, call["peer"]]
            pair = (here, call["peer"]) if call["op"] == "send" else (call["peer"], here)
            between = f"{between}, {pair[0]} to {pair[1]}"
        self._counts[between] = self._counts.get(between, 0) + 1
        call["key"] = f"{between}: {self._counts[between]}"

    @contextmanager
    def blocked_in(self, handle):
        """This rank waits for the call behind `handle` while the block runs."""
        call, waited_for = self._open.pop(handle, (None, None))
        if call is None:
            yield
            return
        began_s = self.now()
        call["blocked"].append([began_s, None])
        try:
            yield
            if call["device"] is not None:
                _synchronise(call["device"])
            call["done_s"] = call["done_s"] if call["done_s"] and call["device"].type == "cpu" else self.now()
            if call["op"] == "recv" and call["peer"] is None and isinstance(waited_for, dist.Work):
                call["peer"] = call["group"][waited_for._source_rank()]
                self._match(call)
        finally:
            call["blocked"][-1][1] = self.now()

    def result(self):
        """{"start_s", "end_s", "calls"}, in seconds of the wall clock and without tensors."""
        end_s, calls = self.end_s or self.now(), []
        self._find_blocks_in_cpp()
        for call in self.calls:
            blocked = call["blocked"] or ([call["in_cpp"]] if "in_cpp" in call else [])
            kept = {key: call[key] for key in ("op", "bytes", "peer", "group", "key", "start_s", "done_s")}
            calls.append({**kept, "blocked": [[start_s, until_s or end_s] for start_s, until_s in blocked]})
        return {"start_s": self.start_s, "end_s": end_s, "calls": calls}


def _synchronise(device):
    if device.type in ("cuda", "xpu"):
        synchronise(device)


def _storage(tensor):
    elem = getattr(tensor, "elem", tensor)  # of an AsyncCollectiveTensor
    return "storage", elem.untyped_storage().data_ptr()


def _group(namespace, args):
    if namespace == "_c10d_functional":
        return dist.distributed_c10d._resolve_process_group([arg for arg in args if isinstance(arg, str)][-1])
    return dist.ProcessGroup.unbox(next(arg for arg in args if isinstance(arg, torch.ScriptObject)))


def main(arguments):
    """Run a script under `record` and leave the trace of all ranks in outputs/traces."""
    if not arguments or arguments[0].startswith("-"):
        print("usage: python -m manyhands.measure.trace SCRIPT [its flags]", file=sys.stderr)
        return 2
    info, script = resolve(), Path(arguments[0])
    run = next((os.environ[name] for name in RUN_IDS if os.environ.get(name)), os.getppid())  # the same on all ranks
    parts = outputs_folder() / "traces" / f"{script.stem}-{run}-{info.world_size}-ranks"
    parts.mkdir(parents=True, exist_ok=True)
    sys.argv, sys.path[0] = arguments, str(script.resolve().parent)
    try:
        with record() as recorder:
            runpy.run_path(str(script), run_name="__main__")
    finally:
        write_whole(parts / f"rank-{info.rank}.json", json.dumps(recorder.result()))
        if info.rank == 0:
            _join_parts(parts, info.world_size)
    return 0


def _join_parts(parts, world_size):
    """Rank 0 waits a little for the others' records, and writes what there is."""
    paths = [parts / f"rank-{rank}.json" for rank in range(world_size)]
    deadline = time.monotonic() + LAST_PART_S
    while not all(path.exists() for path in paths) and time.monotonic() < deadline:
        time.sleep(0.05)
    timeline = Timeline({r: json.loads(path.read_text("utf-8")) for r, path in enumerate(paths) if path.exists()})
    for path in paths:
        path.unlink(missing_ok=True)
    from manyhands.plots.trace import chart

    save_figure(chart(timeline.spans, timeline.arrows, parts.name), parts / "trace.svg")
    trace = timeline.write(parts / "trace.json")
    print("\n".join([*timeline.lines(), f"trace {trace}: open it in https://ui.perfetto.dev; chart {parts}/trace.svg"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
