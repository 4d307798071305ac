"""Lesson 06's sharding, built by hand: ZeRO-1 to 3 are fully_shard, and one process; what each rank holds and sends.

What is tested is the lesson's own code, taken from its script. Plain SGD in float64, clipped by the global norm.
"""

import functools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from definitions import taken_from
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT
from manyhands.launch.ranks import Agreement
from manyhands.lessons.zero_fsdp import OutOfMemory, Rungs
from manyhands.measure import wire
from manyhands.measure.memory_timeline import Sample
from manyhands.measure.replicas import flat
from manyhands.measure.tensor_bytes import tensor_bytes
from torch import nn

LESSON = "06_zero_fsdp"
NAMES = (
    "my_share", "Unit", "reduce_scatter", "all_gather", "ShardedOptimizer", "reduce_in_backward", "zero_2",
    "gather", "free", "gather_when_needed", "zero_3", "clip_by_global_norm", "library_clip", "clip_my_share",
)  # fmt: skip
# 14 and 65 split evenly over no number of ranks
CONFIG = GPTConfig(vocab_size=65, block_size=8, n_layer=3, n_head=2, n_embd=14)
BATCH, STEPS, MAX_NORM = 12, 2, 0.2
WRAPPINGS = ("block", "block_and_size", "block_group:2", "size:800")


def ours():
    """The lesson's definitions, on this rank."""
    place = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "device": torch.device("cpu")}
    return taken_from(LESSON, *NAMES, **place)


def new_model(config=CONFIG):
    torch.manual_seed(3)
    return GPT(config).double()


def batch(step, rank=0, world_size=1):
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(65, (BATCH, 9), generator=draw).chunk(world_size)[rank]
    return ids[:, :-1], ids[:, 1:]


def train(model, optimizer, clip, rank=0, world_size=1):
    """Norms of clipped steps."""
    norms = []
    for step in range(STEPS):
        model(*batch(step, rank, world_size))[1].backward()
        norms.append(clip(MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(norms)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def one_process(config, make, clip=True):
    model = new_model(config)
    limit = functools.partial(nn.utils.clip_grad_norm_, list(model.parameters()))
    norms = train(model, make(model.parameters()), limit if clip else lambda _: torch.zeros(()))
    return norms, torch.cat([p.detach().flatten() for p in model.parameters()])


def differences(ranks, tied):
    """{way: how far its norms and weights are from one process's}."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    lesson, config, found = ours(), replace(CONFIG, tie=tied), {}
    here = {"rank": ranks.rank, "world_size": ranks.world_size}
    norms_1, weights_1 = one_process(config, sgd)
    assert (norms_1 > MAX_NORM).all(), "nothing would be clipped"
    for wrapping in WRAPPINGS:
        model = new_model(config)
        optimizer = lesson.ShardedOptimizer(lesson.zero_3(model, wrapping), sgd)
        norms = train(model, optimizer, functools.partial(lesson.clip_by_global_norm, optimizer.shares), **here)
        for unit in optimizer.units:
            lesson.gather(unit)
        found[f"ours, {wrapping}"] = norms - norms_1, flat(model.parameters()) - weights_1
    mesh = init_device_mesh("cpu", (ranks.world_size,))
    model = new_model(config)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    norms = train(model, sgd(model.parameters()), functools.partial(lesson.library_clip, model), **here)
    found["fully_shard"] = (norms - norms_1, flat(p.full_tensor() for p in model.parameters()) - weights_1)
    return {way: max(part.abs().max().item() for part in parts) for way, parts in found.items()}


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.full)])
def test_zero_3_by_hand_is_fully_shard_and_one_process_with_clipping(pool, n):
    for found in pool.run(n, differences, False):
        assert len(found) == len(WRAPPINGS) + 1
        assert max(found.values()) < 1e-10, found


def test_so_it_is_with_one_matrix_for_embedding_and_head_where_nothing_splits_evenly(pool):
    for found in pool.run(3, differences, True):
        assert max(found.values()) < 1e-10, found


def adamw_in_shares(ranks):
    """Per stage: distance from one process's weights, bytes of this rank before the last update, calls in backward."""
    lesson, found = ours(), {}
    _, weights_1 = one_process(CONFIG, adamw, clip=False)
    for stage in (1, 2, 3):
        model = new_model()
        parts = [lesson.Unit(model.parameters())] if stage == 1 else {2: lesson.zero_2, 3: lesson.zero_3}[stage](model)
        optimizer = lesson.ShardedOptimizer(parts, adamw)
        for step in range(STEPS):
            optimizer.zero_grad()
            with wire.watch() as seen:
                model(*batch(step, ranks.rank, ranks.world_size))[1].backward()
            held = tensor_bytes(model, optimizer)
            optimizer.step()
        for unit in parts:
            lesson.gather(unit)
        off = (flat(model.parameters()) - weights_1).abs().max().item()
        calls = seen.count("all_gather"), seen.count("reduce_scatter")
        found[stage] = off, (held.parameters, held.gradients, held.optimizer), calls
    return found


def test_each_stage_holds_what_it_should_and_updates_as_one_process_does(pool):
    n, P = 4, CONFIG.num_params()
    shares = {1: (1, 1, n), 2: (1, n, n), 3: (n, n, n)}  # of weights, gradients, moments
    for found in pool.run(n, adamw_in_shares):
        for stage, (off, held, calls) in found.items():
            assert off < 1e-10
            formula = [values * 8 * P / cut for values, cut in zip((1, 1, 2), shares[stage], strict=True)]
            assert held == pytest.approx(formula, rel=0.02), f"stage {stage}"
            assert calls == {1: (0, 0), 2: (0, 4), 3: (2 * 3 + 1, 4)}[stage]


def rows_that_are_whole(ranks):
    """The most numbers that ZeRO-3 had whole at once in a step; those of the largest unit and the root; after it."""
    lesson = ours()
    model = new_model()
    parts = lesson.zero_3(model)
    optimizer, most = lesson.ShardedOptimizer(parts, sgd), []

    def now():
        return sum(len(unit.whole_P) for unit in parts if unit.whole_P.untyped_storage().size())

    for module in model.modules():
        module.register_forward_pre_hook(lambda *_: most.append(now()))
        module.register_full_backward_hook(lambda *_: most.append(now()))
    model(*batch(0))[1].backward()
    gone = now()
    with torch.no_grad():
        model(*batch(0))  # an evaluation between backward and step leaves the root whole: it must not go stale
    optimizer.step()
    _, loss = model(*batch(1))
    sizes = [len(unit.whole_P) for unit in parts]
    return max(most), max(sizes[:-1]) + sizes[-1], gone, loss.item()


def test_one_unit_and_the_root_are_whole_at_most_and_nothing_after_backward(pool):
    model = new_model()
    optimizer = sgd(model.parameters())
    model(*batch(0))[1].backward()
    optimizer.step()
    _, expected = model(*batch(1))
    for most, unit_and_root, gone, loss in pool.run(2, rows_that_are_whole):
        assert most == unit_and_root
        assert gone == 0
        assert loss == pytest.approx(expected.item(), abs=1e-10)


def told_of_the_limit(ranks):
    """What a rank hears where the second alone needs more than there is, and then where both have room."""
    rungs, heard = Rungs.__new__(Rungs), []
    for limit in (8e6, 12e6):
        rungs.limit = limit
        rungs.peaks = {
            "ZeRO-2": Sample("backward", {"parameters": 4e6, "unsharded_parameters": 2e6 + 5e6 * ranks.rank})
        }
        try:
            Agreement(ranks, None, OutOfMemory).all(lambda: rungs._expect_to_fit("ZeRO-2"))
        except OutOfMemory as error:
            heard.append(str(error))
    return heard


def test_who_needs_more_memory_than_there_is_stops_all_ranks_and_names_what_takes_most(pool):
    first, second = pool.run(2, told_of_the_limit)
    assert first == second and len(first) == 1
    assert (
        "ZeRO-2 needs 11.0 MB at once, and a rank has 8.0; the largest part: unsharded parameters, 7.0 MB" in first[0]
    )


def calls_of_two_blocks(ranks):
    """[(op, numbers)] of two blocks and the root in a step by hand and by FSDP; ZeroRedundancyOptimizer's volume."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    lesson, config, found = ours(), replace(CONFIG, n_layer=2), {}
    mine, library = new_model(config), new_model(config)
    parts = lesson.zero_3(mine)
    mesh = init_device_mesh("cpu", (ranks.world_size,))
    for module in (*library.blocks, library):
        fully_shard(module, mesh=mesh)
    for way, model in (("ours", mine), ("library", library)):
        with wire.watch() as seen:
            model(*batch(0))[1].backward()
        found[way] = [(call.op, call.bytes // 8) for call in seen.calls]
    model = DistributedDataParallel(new_model(config))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    for _ in range(3):
        with wire.watch() as seen:
            model(*batch(0))[1].backward()
            optimizer.step()
    found["zero"] = {op: seen.payload_bytes(op) // 8 for op in ("all_reduce", "broadcast", "all_gather")}
    return found, [len(unit.whole_P) for unit in parts], config.num_params()


def test_two_blocks_and_the_root_make_five_all_gathers_and_three_reduce_scatters(pool):
    for found, (block, _, root), P in pool.run(2, calls_of_two_blocks):
        gather, reduce = "all_gather", "reduce_scatter"
        forward = [(gather, root), (gather, block), (gather, block)]
        backward = [(gather, block), (reduce, block), (gather, block), (reduce, block), (reduce, root)]
        assert found["ours"] == forward + backward
        for op, count in ((gather, 5), (reduce, 3)):
            assert sum(name == op for name, _ in found["library"]) == count
        assert found["zero"] == {"all_reduce": P, "broadcast": P, "all_gather": 0}, "2 P and 1 P: not the ideal 2 P"


def local_norms(ranks):
    """What the zoo's clipping measures and leaves, beside the library's norm."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    lesson, model = ours(), new_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks.world_size,)))
    model(*batch(0, ranks.rank, ranks.world_size))[1].backward()
    right = lesson.library_clip(model, float("inf")).item()
    mine = lesson.clip_my_share(model, 0.01).item()
    return mine, right, lesson.library_clip(model, float("inf")).item()


def test_the_zoos_norm_is_a_ranks_own_and_its_gradient_stays_too_long_by_the_root_of_n(pool):
    found = pool.run(4, local_norms)
    mine = [norm for norm, _, _ in found]
    assert len(set(mine)) == 4, "each rank has another norm"
    assert sum(norm**2 for norm in mine) ** 0.5 == pytest.approx(found[0][1], rel=1e-9)
    assert all(after == pytest.approx(0.01 * 4**0.5, rel=1e-3) for _, _, after in found)
