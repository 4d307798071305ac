"""The counters see what left this rank: by calls, by transport, and through mpi4py."""

import ast
import sys

import pytest
import torch
import torch.distributed as dist
from manyhands.measure import wire
from rank_pool import run_on_ranks

pytestmark = pytest.mark.ranks

LINUX = sys.platform == "linux"


def _collectives(ranks):
    n, mine = ranks.world_size, torch.ones(8)  # 32 bytes each
    root = ranks.rank == 0
    with wire.watch() as seen:
        dist.all_reduce(mine)
        dist.broadcast(mine, 0)
        dist.reduce(mine, 0)
        dist.scatter(mine, list(torch.ones(n, 8)) if root else None, src=0)
        dist.gather(mine, list(torch.ones(n, 8)) if root else None, dst=0)
        dist.all_gather(list(torch.empty(n, 8)), mine)
        dist.reduce_scatter(mine, list(torch.ones(n, 8)))
        dist.all_to_all_single(torch.empty(n), torch.ones(n))
        dist.barrier()
    return [(call.op, call.bytes) for call in seen.calls]


def test_every_collective_is_counted_once_with_the_whole_tensor_as_payload():
    part, whole = 32, 3 * 32
    expected = [
        ("all_reduce", part), ("broadcast", part), ("reduce", part), ("scatter", whole), ("gather", whole),
        ("all_gather", whole), ("reduce_scatter", whole), ("all_to_all", 3 * 4), ("barrier", 0),
    ]  # fmt: skip
    assert run_on_ranks(3, _collectives) == [expected] * 3


def _messages(ranks):
    right, left = (ranks.rank + 1) % ranks.world_size, (ranks.rank - 1) % ranks.world_size
    mine, theirs = torch.ones(10, dtype=torch.float64), torch.empty(10, dtype=torch.float64)
    with wire.watch() as seen:
        ops = [dist.P2POp(dist.isend, mine, right), dist.P2POp(dist.irecv, theirs, left)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        sending = dist.isend(mine[:3], right)
        dist.recv(theirs[:3])  # from anybody
        sending.wait()
    return seen.messages, seen.sent_bytes, [(call.op, call.bytes, call.peer) for call in seen.calls]


def test_messages_are_counted_with_bytes_and_peer_batched_or_not():
    for rank, (messages, sent_bytes, calls) in enumerate(run_on_ranks(3, _messages)):
        right, left = (rank + 1) % 3, (rank - 1) % 3
        assert messages == 2
        assert sent_bytes == 80 + 24
        assert calls == [("send", 80, right), ("recv", 80, left), ("send", 24, right), ("recv", 24, None)]


def _subgroup(ranks):
    pair = dist.new_group([1, 2])
    if ranks.rank == 0:
        return None
    with wire.watch() as seen:
        (dist.send if ranks.rank == 1 else dist.recv)(torch.ones(1), 3 - ranks.rank, group=pair)
    return seen.calls[0].peer


def test_peers_are_global_ranks_also_within_a_subgroup():
    assert run_on_ranks(3, _subgroup) == [None, 2, 1]


def _ddp_backward(ranks):
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(
        torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)]), bucket_cap_mb=0.02
    )
    for _ in range(2):  # DDP rebuilds its buckets in the second step
        model(torch.ones(2, 64)).sum().backward()
    with wire.watch() as seen:
        model(torch.ones(2, 64)).sum().backward()
    return seen.count("all_reduce"), seen.payload_bytes("all_reduce")


def test_ddp_buckets_are_seen_although_its_reducer_calls_no_python():
    n_params = 3 * (64 * 64 + 64)
    for count, n_bytes in run_on_ranks(2, _ddp_backward):
        assert count > 1
        assert n_bytes == 4 * n_params


def _transport(ranks):
    x = torch.ones(1_000_000)
    dist.all_reduce(x)  # connections are made at first use
    dist.barrier()  # now everybody has read it: nothing of it is still under way
    with wire.watch(sockets=True) as seen:
        dist.all_reduce(x)
        dist.barrier()  # a hundred bytes more
    with wire.watch(sockets=True) as nothing:
        pass
    return seen.transport_bytes / 4e6, nothing.transport_bytes


@pytest.mark.skipif(not LINUX, reason="TCP_INFO is Linux's")
@pytest.mark.parametrize("n", [2, 4])
def test_transport_of_gloos_all_reduce_is_the_rings(n):
    for ratio, idle in run_on_ranks(n, _transport):
        assert ratio == pytest.approx(wire.ring_all_reduce_bytes(1, n), rel=0.01)
        assert idle < 2000


def test_without_tcp_info_the_transport_is_unknown_and_calls_still_count(monkeypatch):
    monkeypatch.setattr(wire, "_tcp_sockets", lambda: None)
    with wire.watch(sockets=True) as seen:
        torch.ones(3).sum()
    assert seen.transport_bytes is None
    assert seen.calls == []


def test_lesson_02_says_nothing_of_bytes_on_sockets_where_one_rank_has_a_gpu(root):
    """A ring of one rank sends nothing, so it has no GPU's tensor to notice; the library's all-reduce has."""
    lesson = ast.parse((root / "scripts" / "02_collectives.py").read_text())
    (shown,) = [n for n in lesson.body if isinstance(n, ast.If) and "transport_bytes" in ast.unparse(n.test)]
    alone, said = {"rank": 0, "world_size": 1, "mine_N": torch.ones(4)}, []
    for theirs, lines in ((None, 0), (0, 3)):
        seen = {"ours": wire.Seen(transport_bytes=0), "theirs": wire.Seen(transport_bytes=theirs)}
        exec(compile(ast.Module([shown], []), "02", "exec"), {**alone, **seen, "say": said.append})
        assert len(said) == lines
