"""Run a function of a test module on n ranks, each a process in a gloo group on loopback.

    results = run_on_ranks(4, function, *args)     # function(ranks, *args) on 4 fresh ranks; results in rank order

    with RankPool(8) as pool:                      # processes that stay: what a first call warms up serves the next
        results = pool.run(4, function, *args)     # a fresh group among the first 4

The ranks are forked from a server that has imported torch once, so that starting four costs a fraction of a second.
"""

import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import time
import traceback
from datetime import timedelta

import kept_parsers  # noqa: F401
from manyhands.launch import settings

_server = multiprocessing.get_context("forkserver")
# torch._dynamo: the first collective under a TorchDispatchMode (wire.watch) imports it, one second of CPU on each rank
_server.set_forkserver_preload(
    [
        "torch", "torch.distributed", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
        "torch.distributed.pipelining", "torch.distributed.checkpoint", "hypothesis", "pytest", "rich.progress",
        "psutil", "safetensors.torch", "tyro", "manyhands.train.run", "manyhands.train.start",
        "manyhands.parallel.mesh_strategy",
    ]
)  # fmt: skip


TIMEOUT_S = 120  # a hang is told after this time, and on a busy machine after as much more as it is busier
MOST_THREADS = 24  # of a rank of a pool: with a group and its axes it has 13
PATIENCE_S = 0.5  # how long a pool listens for an earlier failure than the one it has heard of


class RankFailed(AssertionError):
    """A rank raised, died or did not end in time; the message names it and holds its traceback."""


def ranks_of(rank=0, world_size=1, launcher="test", lesson="test", **changes):
    """The Ranks that `join` returns on a CPU of one node."""
    import torch
    from manyhands import Ranks

    told = {
        "rank": rank, "world_size": world_size, "local_rank": rank, "local_world_size": world_size,
        "device": torch.device("cpu"), "backend": "gloo", "launcher": launcher, "host": "here", "lesson": lesson,
    }  # fmt: skip
    return Ranks(**told | changes)


def _enter(rank, world_size, store_path, timeout_s):
    """This process in a gloo group of `world_size` that meets in a file: its Ranks."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", store=dist.FileStore(store_path, world_size), rank=rank, world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )  # fmt: skip
    return ranks_of(rank, world_size)


def run_on_ranks(n, function, *args, timeout_s=TIMEOUT_S, environ=None):
    """`RankPool.run` on n fresh ranks, which end afterwards."""
    with RankPool(n) as pool:
        return pool.run(n, function, *args, timeout_s=timeout_s, environ=environ)


class RankPool:
    """Up to n long-lived ranks that serve one call after the other, each in a gloo group of its own.

    with RankPool(8) as pool:
        results = pool.run(4, function, *args)     # function(ranks, *args) on ranks 0 to 3

    After a call that failed its ranks are started anew, so that no call meets what another left half done. No process
    survives `close()`, or the process that made the pool.
    """

    def __init__(self, n):
        self.n, self.workers, self.folder, self.calls = n, {}, tempfile.TemporaryDirectory(), 0

    def run(self, n, function, *args, timeout_s=TIMEOUT_S, environ=None):
        """What `function(ranks, *args)` returned on each of the first n ranks, in rank order.

        Raises RankFailed with the first traceback, or with the ranks that died or were silent for `timeout_s` seconds,
        on a busy machine up to twice as long;
        ValueError for more ranks than the pool has.
        """
        if n > self.n:
            raise ValueError(f"{n} ranks are more than the pool's {self.n}; make a larger pool")
        timeout_s *= settings.patience(2.0)  # no longer: pytest ends a test after 300 s
        self._start(n)
        self.calls += 1
        store = os.path.join(self.folder.name, f"store-{self.calls}")
        call = (n, store, function, args, timeout_s, {"GLOO_SOCKET_IFNAME": "lo", **(environ or {})})
        try:
            for rank in range(n):
                self.workers[rank][1].send(call)
            answers = self._answers(n, timeout_s)
        except BaseException:
            self._stop(n)
            raise
        self._retire()
        return answers

    def close(self):
        for _, pipe in self.workers.values():
            pipe.close()  # they end by themselves, and tidy up
        for process, _ in self.workers.values():
            process.join(5)
        self._stop(self.n)
        self.folder.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _start(self, n):
        for rank in range(n):
            if rank not in self.workers:
                ours, theirs = _server.Pipe()
                process = _server.Process(target=_serve, args=(rank, theirs), daemon=True)
                process.start()
                theirs.close()
                self.workers[rank] = process, ours

    def _stop(self, n):
        """End the first n: nobody else took part in their call."""
        ended = [self.workers.pop(rank) for rank in range(n) if rank in self.workers]
        for process, pipe in ended:
            pipe.close()
            process.kill()
        for process, _ in ended:
            process.join()

    def _retire(self):
        """End the ranks that have grown too many threads; the next call gets others.

        DTensor keeps some groups of a call for ever, and each of gloo's groups has threads that look for work a hundred
        times a second: with four hundred of them the two cores did little else.
        """
        for rank, (process, pipe) in list(self.workers.items()):
            with contextlib.suppress(OSError):  # elsewhere than on Linux nobody counts
                if len(os.listdir(f"/proc/{process.pid}/task")) > MOST_THREADS:
                    del self.workers[rank]
                    pipe.close()
                    process.kill()
                    process.join()

    def _answers(self, n, timeout_s):
        waiting = {self.workers[rank][1]: rank for rank in range(n)}
        answers, failures, deadline = {}, [], time.monotonic() + timeout_s
        while waiting:
            ready = multiprocessing.connection.wait(waiting, timeout=max(0, deadline - time.monotonic()))
            if not ready and not failures:
                raise RankFailed(f"ranks silent for {timeout_s:.0f} s: {sorted(waiting.values())}")
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    failed_at, answer = pipe.recv()
                except (EOFError, ConnectionResetError):
                    raise RankFailed(f"ranks that died: {[rank]}") from None
                if failed_at is None:
                    answers[rank] = pickle.loads(answer)
                else:  # others fail of it, and may be heard first: the rank that failed first is the one to name
                    failures.append((failed_at, f"rank {rank} of {n}:\n{answer}"))
                    deadline = min(deadline, time.monotonic() + PATIENCE_S)
        if failures:
            raise RankFailed(min(failures)[1])
        return [answers[rank] for rank in range(n)]


def _serve(rank, pipe):
    """A worker of a pool: serve calls until the pool closes its end."""
    gc.freeze()  # what was imported stays: the collection after each call need not look at it
    while True:
        try:
            world_size, store_path, function, args, timeout_s, environ = pipe.recv()
        except EOFError:
            return
        except BaseException:  # the function cannot be imported here
            pipe.send((time.monotonic(), traceback.format_exc()))
            continue
        _one_call(rank, pipe, world_size, store_path, function, args, timeout_s, environ)


def _one_call(rank, pipe, world_size, store_path, function, args, timeout_s, environ):
    """Send (None, what the function returned, pickled), or (when it failed, why).

    A failure is told before this rank leaves the group: what the others raise because it left, is told later. An answer
    is sent when this rank is ready for the next call.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    torch.set_num_threads(1)
    torch.manual_seed(0)
    before, answer = dict(os.environ), None
    os.environ.update(environ)
    try:
        ranks = _enter(rank, world_size, store_path, timeout_s)
        answer = pickle.dumps(function(ranks, *args))
        if dist.is_initialized():
            dist.barrier()  # nobody leaves while another still reads from it
    except BaseException:
        answer = None
        pipe.send((time.monotonic(), traceback.format_exc()))
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    # DTensor remembers results together with their mesh, and equal meshes of the next call stand for new groups
    _clear_sharding_prop_cache()
    gc.collect()
    os.environ.clear()
    os.environ.update(before)
    if answer is not None:
        pipe.send((None, answer))
