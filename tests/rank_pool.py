"""Run a function of a test module on n fresh ranks, each a process in a gloo group on loopback.

    results = run_on_ranks(4, function, *args)     # function(ranks, *args) on every rank; results in rank order

The ranks are forked from a server that has imported torch once, so that starting four costs a fraction of a second.
"""

import multiprocessing
import os
import pickle
import queue
import tempfile
import time
import traceback
from datetime import timedelta

_server = multiprocessing.get_context("forkserver")
# torch._dynamo: the first collective under a TorchDispatchMode (wire.watch) imports it, one second of CPU on each rank
_server.set_forkserver_preload(
    ["torch", "torch.distributed", "torch._dynamo", "hypothesis", "pytest", "manyhands"]
)


class RankFailed(AssertionError):
    """A rank raised, died or did not end in time; the message names it and holds its traceback."""


def _one_rank(rank, world_size, store_path, function, args, results, timeout_s, extra_environ):
    os.environ.update(extra_environ)
    import torch
    import torch.distributed as dist
    from manyhands import Ranks

    torch.set_num_threads(1)
    ranks = Ranks(
        rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size,
        device=torch.device("cpu"), backend="gloo", launcher="test", host="127.0.0.1", lesson="test",
    )  # fmt: skip
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store_path, world_size), rank=rank, world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )  # fmt: skip
        answer = function(ranks, *args)
        # as bytes: a queue would hand over tensors by shared memory, which ends with this process
        results.put((rank, None, pickle.dumps(answer)))
        dist.barrier()  # nobody leaves while another still reads from it
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, traceback.format_exc(), None))


def run_on_ranks(n, function, *args, timeout_s=60, environ=None):
    """What `function(ranks, *args)` returned on each of n ranks, in rank order.

    Raises RankFailed with the first traceback, or with the ranks that died or were silent for `timeout_s` seconds.
    """
    environ = {"GLOO_SOCKET_IFNAME": "lo", **(environ or {})}
    with tempfile.TemporaryDirectory() as folder:
        results = _server.Queue()
        processes = [
            _server.Process(
                target=_one_rank,
                args=(rank, n, os.path.join(folder, "store"), function, args, results, timeout_s, environ),
                daemon=True,
            )
            for rank in range(n)
        ]
        for process in processes:
            process.start()
        answers, deadline = {}, time.monotonic() + timeout_s
        try:
            while len(answers) < n:
                try:
                    rank, error, answer = results.get(timeout=0.2)
                except queue.Empty:
                    silent = [r for r in range(n) if r not in answers]
                    dead = [r for r in silent if processes[r].exitcode not in (None, 0)]
                    if dead or time.monotonic() > deadline:
                        state = f"died: {dead}" if dead else f"silent for {timeout_s} s: {silent}"
                        raise RankFailed(f"ranks that {state}") from None
                    continue
                if error is not None:
                    raise RankFailed(f"rank {rank} of {n}:\n{error}")
                answers[rank] = pickle.loads(answer)
            for process in processes:
                process.join(5)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
    return [answers[rank] for rank in range(n)]
