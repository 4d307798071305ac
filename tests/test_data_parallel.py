"""Lesson 03's data parallel, built by hand, computes what the library's DDP and one process compute, and sends no more.

What is tested is the lesson's own code, taken from its script. Plain SGD in float64: Adam would hide a wrong factor.
"""

import contextlib
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from definitions import taken_from
from manyhands.lessons.data_parallel import pack
from manyhands.measure import wire
from manyhands.measure.replicas import flat, spread
from rank_pool import run_on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.ranks

LESSON = "03_data_parallel"
ROWS = 12  # of the global batch: 1, 2, 3 and 4 ranks divide it
STEPS = 3


def ours():
    """The lesson's definitions, fresh."""
    names = (
        "broadcast_state",
        "start_all_reduce",
        "bucket_hook",
        "finish",
        "Bucket",
        "BucketedDDP",
        "no_sync",
    )
    return taken_from(LESSON, *names, world_size=dist.get_world_size())


class Tidy(nn.Sequential):
    """6 -> 4 -> 2 with 38 parameters: every one is used by every row."""

    def __init__(self):
        super().__init__(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))


class Tied(nn.Module):
    """One matrix is used twice."""

    def __init__(self):
        super().__init__()
        self.first, self.out = nn.Linear(6, 6), nn.Linear(6, 2)
        self.again = nn.Linear(6, 6, bias=False)
        self.again.weight = self.first.weight

    def forward(self, x):
        return self.out(torch.tanh(self.again(torch.tanh(self.first(x)))))


class Frozen(nn.Module):
    """The first layer does not train."""

    def __init__(self):
        super().__init__()
        self.first, self.out = nn.Linear(6, 5), nn.Linear(5, 2)
        self.first.requires_grad_(False)

    def forward(self, x):
        return self.out(torch.tanh(self.first(x)))


class Unused(nn.Module):
    """`nobody` is never used; `rare` only where a row's last input is 1: on one rank, another one at each step."""

    def __init__(self):
        super().__init__()
        self.nobody, self.rare, self.out = nn.Linear(3, 3), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        special = x[:, -1:] == 1
        if special.any():
            x = torch.where(special, torch.tanh(self.rare(x)), x)
        return self.out(x)


MODELS = [Tidy, Tied, Frozen, Unused]
BUCKETS_MIB = [1e-9, 1.2e-4, 1.0]  # one parameter each; a few; everything in one


def make(kind):
    torch.manual_seed(7)
    return kind().double()


def global_rows(step):
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.rand(ROWS, width, generator=generator, dtype=torch.float64) for width in (6, 2))
    x[(5 * step) % ROWS, -1] = 1  # rows 0, 5, 10: another rank's
    return x, y


def train(model, share=lambda x: x, finish=lambda: None, steps=STEPS):
    """Gradients of the last step and weights after it, of what trains; None counts as zeros."""
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        x, y = global_rows(step)
        F.mse_loss(model(share(x)), share(y)).backward()
        finish()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return torch.cat([g.flatten() for g in gradients]), torch.cat([p.detach().flatten() for p in model.parameters()])


# ---- what the ranks measure: all of it in one start of n processes ----


def three_ways(ranks, lesson):
    """{(model, way): (gradients, weights)} of one process, the library and ours with all bucket sizes and orders."""

    def share(rows):
        return rows.chunk(ranks.world_size)[ranks.rank]

    found = {}
    for kind in MODELS:
        found[kind.__name__, "one process"] = train(make(kind))
        library = DistributedDataParallel(make(kind), find_unused_parameters=kind is Unused)
        found[kind.__name__, "library"] = train(library, share)
        for overlap in (True, False):
            for bucket_mib in BUCKETS_MIB:
                model = lesson.BucketedDDP(make(kind), bucket_mib)
                model.sync = overlap  # without: `finish` starts all buckets
                found[kind.__name__, f"ours {overlap} {bucket_mib}"] = train(model, share, model.finish)
    return found


def calls_of_a_step(ranks, lesson):
    """{bucket size: (all-reduces, bytes, buckets)}"""
    seen = {}
    for bucket_mib in BUCKETS_MIB:
        model = lesson.BucketedDDP(make(Tidy), bucket_mib)
        x, y = global_rows(0)
        with wire.watch() as calls:
            F.mse_loss(model(x), y).backward()
            model.finish()
        seen[bucket_mib] = calls.count("all_reduce"), calls.payload_bytes("all_reduce"), len(model.buckets)
    return seen


def transport_of_a_step(ranks, lesson):
    torch.manual_seed(0)
    model = lesson.BucketedDDP(nn.Linear(600, 600))
    for _ in range(2):
        with wire.watch(sockets=True) as seen:
            model(torch.ones(1, 600)).sum().backward()
            model.finish()
    return seen.transport_bytes


def order_of_starts(ranks, lesson):
    """Sizes of the buckets in the order in which a rank starts them; rank 0 finishes its gradients in another order."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    model = lesson.BucketedDDP(nn.ModuleList([first, second]), 1e-9)
    sizes = []
    for bucket in model.buckets:
        bucket.start = lambda b=bucket: sizes.append(b.flat_P.numel()) or lesson.Bucket.start(b)
    x = torch.ones(1, 4, dtype=torch.float64)
    chain = (first, second) if ranks.rank else (second, first)
    model.waiting = list(model.buckets)  # as `forward` does, which here is not called
    chain[1](chain[0](x)).sum().backward()
    model.finish()
    return sizes


def accumulated(ranks, lesson):
    """(bytes, largest difference from the gradient of all rows) of three micro-batches under no_sync."""
    share = [tuple(rows.chunk(ranks.world_size)[ranks.rank] for rows in global_rows(step)) for step in range(3)]
    model, expected = lesson.BucketedDDP(make(Tidy), 1.2e-4), make(Tidy)
    for step in range(3):
        x, y = global_rows(step)
        (F.mse_loss(expected(x), y) / 3).backward()
    with wire.watch() as seen:
        with lesson.no_sync(model):
            for x, y in share[:2]:
                (F.mse_loss(model(x), y) / 3).backward()
        x, y = share[2]
        (F.mse_loss(model(x), y) / 3).backward()
        model.finish()
    apart = flat(p.grad for p in model.parameters()) - flat(p.grad for p in expected.parameters())
    return seen.payload_bytes(), apart.abs().max().item()


def sync_after_an_error(ranks, lesson):
    """Whether a model averages again after an exception inside no_sync."""
    model = lesson.BucketedDDP(make(Tidy))
    with contextlib.suppress(ZeroDivisionError), lesson.no_sync(model):
        raise ZeroDivisionError
    return model.sync


def spreads(ranks, lesson):
    """What `spread` says of equal tensors, and of tensors in which one number is the rank's."""
    same, own = torch.arange(3.0), torch.tensor([7.0, ranks.rank, 7.0])
    return spread([same, same]), spread([same, own])


def states(ranks, lesson):
    """Parameters and buffers, before and after they are broadcast; every rank begins with its own."""
    torch.manual_seed(ranks.rank)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    x, _ = global_rows(ranks.rank)
    model(x)  # each rank's running means are those of its own rows
    before = flat([*model.parameters(), *model.buffers()])
    lesson.broadcast_state(model)
    return before, flat([*model.parameters(), *model.buffers()])


MEASUREMENTS = (
    three_ways, calls_of_a_step, transport_of_a_step, order_of_starts, accumulated, sync_after_an_error, spreads,
    states,
)  # fmt: skip


def measure(ranks):
    lesson = ours()
    return {measurement.__name__: measurement(ranks, lesson) for measurement in MEASUREMENTS}


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids=lambda n: f"{n} ranks")
def measured(request):
    """{measurement: [its result on each rank]}"""
    results = run_on_ranks(request.param, measure, timeout_s=240)
    return {name: [result[name] for result in results] for name in results[0]}


@pytest.mark.parametrize("kind", [kind.__name__ for kind in MODELS])
def test_ours_the_library_and_one_process_have_the_same_gradients_and_weights(measured, kind):
    for rank, found in enumerate(measured["three_ways"]):
        expected = found[kind, "one process"]
        for (name, way), result in found.items():
            for what, given, right in zip(("gradients", "weights"), result, expected, strict=True):
                if name == kind:
                    apart = (given - right).abs().max().item()
                    assert apart < 1e-10, f"{way}, rank {rank}: {what} are {apart:.1e} off"


def test_copies_stay_identical_to_the_last_bit(measured):
    for (name, way), first in measured["three_ways"][0].items():
        for other in measured["three_ways"][1:]:
            if way != "one process":
                assert all(torch.equal(a, b) for a, b in zip(first, other[name, way], strict=True))


def test_a_step_sends_each_gradient_once_with_one_call_for_each_bucket(measured):
    for found in measured["calls_of_a_step"]:
        assert [calls for calls, _, _ in found.values()] == [4, 2, 1]
        assert all(calls == buckets and sent == 38 * 8 for calls, sent, buckets in found.values())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="bytes of sockets are read from Linux's TCP_INFO")
def test_what_leaves_a_rank_is_two_n_minus_one_nths_of_the_gradient(measured):
    sent = measured["transport_of_a_step"]
    predicted = wire.ring_all_reduce_bytes(4 * 600 * 601, len(sent))
    assert sent == pytest.approx([predicted] * len(sent), rel=0.02, abs=2000)


def test_ranks_whose_gradients_come_in_another_order_start_the_same_buckets(measured):
    assert all(sizes == [4, 16, 4, 16] for sizes in measured["order_of_starts"])


def test_no_sync_averages_three_micro_batches_by_the_bytes_of_one(measured):
    for sent, apart in measured["accumulated"]:
        assert sent == 38 * 8
        assert apart < 1e-10


def test_a_model_averages_again_after_an_error_inside_no_sync(measured):
    assert all(measured["sync_after_an_error"])


def test_spread_is_zero_for_equal_replicas_and_else_the_largest_difference_on_every_rank(measured):
    n = len(measured["spreads"])
    assert measured["spreads"] == [(0.0, n - 1.0)] * n


def test_broadcast_gives_every_rank_rank_0s_parameters_and_buffers(measured):
    rank_0s, _ = measured["states"][0]
    for rank, (before, after) in enumerate(measured["states"]):
        assert torch.equal(after, rank_0s)
        assert rank == 0 or not torch.equal(before, rank_0s)


def test_buckets_keep_to_their_size_their_order_and_one_dtype():
    layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)], nn.Linear(300, 300))
    layers[1].double()
    buckets = pack(layers, 0.05)
    assert [p for bucket in buckets for p in bucket] == list(reversed(list(layers.parameters())))
    assert all(len(b) == 1 or sum(p.nbytes for p in b) <= 0.05 * 2**20 for b in buckets)
    assert all(len({p.dtype for p in bucket}) == 1 for bucket in buckets)


# ---- the lesson as a whole ----


def test_a_global_batch_that_does_not_split_is_refused_in_one_sentence(root, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(root / "scripts" / f"{LESSON}.py"), "--global-batch=9"],
        env={**os.environ, "MANYHANDS_OUTPUTS": str(tmp_path)},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert (done.stdout + done.stderr).count("global_batch=9 does not split over 2 ranks; use a multiple of 2") == 1
