"""A memory timeline follows every storage of a step, once, and says what it was for: as the formulas have it."""

import contextlib

import pytest
import torch
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT, checkpoint_activations
from manyhands.measure.memory_timeline import KINDS, MemoryTimeline, Sample
from manyhands.measure.tensor_bytes import count_saved
from manyhands.plots.memory_stack import memory_stacks
from torch import nn

CONFIG = GPTConfig(vocab_size=65, block_size=32, n_layer=3, n_head=2, n_embd=48)


def batch(config=CONFIG, sequences=4):
    generator = torch.Generator().manual_seed(1)
    shape = (sequences, config.block_size)
    return [torch.randint(config.vocab_size, shape, generator=generator) for _ in range(2)]


def end_of(seen, phase):
    """The last Sample of a phase."""
    return next(sample for sample in reversed(seen.samples) if sample.phase == phase)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), fused=True)


def one_step(model, optimizer, **kwargs):
    """The MemoryTimeline of one step."""
    ids_BT, targets_BT = batch()
    with MemoryTimeline(model, optimizer, **kwargs) as seen:
        with seen.phase("forward"):
            _, loss = model(ids_BT, targets_BT)
        with seen.phase("backward"):
            loss.backward()
        with seen.phase("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
    return seen


@pytest.fixture(scope="module")
def step():
    """(model, timeline) of a second step, when the optimizer has its state."""
    torch.manual_seed(0)
    model = GPT(CONFIG)
    optimizer = adamw(model)
    one_step(model, optimizer)
    return model, one_step(model, optimizer)


def test_parameters_gradients_and_optimizer_have_the_bytes_of_the_formula(step):
    model, seen = step
    P = model.num_params()
    assert {sample.bytes["parameters"] for sample in seen.samples} == {4 * P}
    assert end_of(seen, "forward").bytes["gradients"] == 0
    assert end_of(seen, "backward").bytes["gradients"] == seen.highest("gradients") == 4 * P
    steps = 4 * len(list(model.parameters()))  # AdamW counts its steps, in a number for each parameter
    assert {sample.bytes["optimizer"] for sample in seen.samples} == {8 * P + steps}


def test_activations_at_the_end_of_the_forward_are_what_autograd_has_saved(step):
    model, seen = step
    ids = 2 * 8 * batch()[0].numel()  # saved too, but there before the step
    assert end_of(seen, "forward").bytes["activations"] == count_saved(lambda: model(*batch()), model).bytes - ids
    assert ids < 0.02 * seen.highest("activations")
    assert seen.highest("activations") == end_of(seen, "forward").bytes["activations"]
    assert end_of(seen, "backward").bytes["activations"] == 0


def test_samples_go_through_the_phases_and_leave_what_was_there(step):
    model, seen = step
    phases = list(dict.fromkeys(sample.phase for sample in seen.samples))
    assert phases == ["", "forward", "backward", "optimizer"]
    assert all(set(sample.bytes) == set(KINDS) and min(sample.bytes.values()) >= 0 for sample in seen.samples)
    end = seen.samples[-1].bytes
    assert end["gradients"] == end["activations"] == end["unsharded_parameters"] == end["copies"] == 0
    assert seen.peak == max(seen.samples, key=lambda sample: sample.total)
    assert seen.peak.phase == "backward"  # everything saved, and a result of the moment


def test_a_storage_counts_once_however_many_views_and_names_it_has():
    model = GPT(GPTConfig(vocab_size=65, block_size=32, n_layer=1, n_head=2, n_embd=48, tie=True))
    x = torch.ones(1000)
    with MemoryTimeline(model) as seen:
        y = x * 2
        views = [y.view(10, 100), y[5:], y.view(torch.int32), y.detach(), y[None]]
        z = y.add_(1)
    assert seen.samples[-1].bytes["parameters"] == 4 * model.num_params()
    assert seen.samples[-1].bytes["other"] == 4000 + 4000  # x, which was there, and y
    assert len(views) == 5 and z is y


def test_recomputed_blocks_keep_their_inputs_alone_and_one_block_at_a_time_in_the_backward():
    results = {}
    for kind in ("none", "block", "selective"):
        torch.manual_seed(0)
        model = GPT(CONFIG)
        checkpoint_activations(model, kind)
        results[kind] = one_step(model, adamw(model))
    forward = {kind: end_of(seen, "forward").bytes["activations"] for kind, seen in results.items()}
    per_block = {kind: forward[kind] / CONFIG.n_layer for kind in forward}
    assert forward["block"] < forward["selective"] < forward["none"]
    assert per_block["block"] > 4 * batch()[0].numel() * CONFIG.n_embd, "the stream"
    # the backward of a block has the activations of that block, and what the others keep
    assert forward["block"] < results["block"].highest("activations") < forward["block"] + per_block["none"]
    assert results["block"].peak.total < results["none"].peak.total
    for kind, seen in results.items():
        # what a recomputed block makes and lets go never counts
        kept = [sample.bytes["activations"] for sample in seen.samples if sample.phase == "forward"]
        assert max(kept) == forward[kind]
        assert end_of(seen, "backward").bytes["activations"] == 0
        assert seen.highest("gradients") == 4 * CONFIG.num_params()


def test_weights_cast_by_autocast_are_copies():
    model = GPT(CONFIG)
    ids_BT, targets_BT = batch()
    with MemoryTimeline(model) as seen, seen.phase("forward"), torch.autocast("cpu", torch.bfloat16):
        model(ids_BT, targets_BT)
    matrices = sum(p.numel() for name, p in model.named_parameters() if "norm" not in name)
    embeddings = (CONFIG.vocab_size + CONFIG.block_size) * CONFIG.n_embd  # looked up, never multiplied
    assert seen.highest("copies") == 2 * (matrices - embeddings)


def test_a_step_computes_the_same_numbers_inside_a_timeline():
    gradients = []
    for kind in ("none", "block", "selective"):
        for inside in (False, True):
            torch.manual_seed(0)
            model = GPT(CONFIG)
            checkpoint_activations(model, kind)
            with MemoryTimeline(model) if inside else contextlib.nullcontext():
                model(*batch())[1].backward()
            gradients.append([p.grad for p in model.parameters()])
    for others in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], others, strict=True))


def test_an_error_in_the_step_leaves_torch_as_it_was_and_the_samples_so_far():
    original = torch.UntypedStorage.resize_
    model = nn.Linear(8, 8)
    optimizer = adamw(model)
    seen = MemoryTimeline(model, optimizer)
    with pytest.raises(KeyError), seen, seen.phase("forward"):
        assert torch.UntypedStorage.resize_ is not original
        model(torch.ones(8))
        raise KeyError
    assert torch.UntypedStorage.resize_ is original
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert not optimizer._optimizer_step_pre_hooks
    assert end_of(seen, "forward").bytes["parameters"] == 4 * 72


def _sharded(ranks, keep_gathered):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = GPT(CONFIG)
    mesh = init_device_mesh("cpu", (ranks.world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=not keep_gathered)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model)
    first = one_step(model, optimizer)
    second = one_step(model, optimizer)
    own = sum(p.to_local().numel() for p in model.parameters())
    block = sum(p.numel() for p in model.blocks[0].parameters())
    return own, block, [[(s.phase, s.bytes) for s in seen.samples] for seen in (first, second)]


@pytest.mark.parametrize("keep_gathered", [False, True])
def test_fully_sharded_weights_are_own_shards_and_unsharded_for_the_moment(pool, keep_gathered):
    P = CONFIG.num_params()
    root = P - 3 * (12 * 48**2 + 10 * 48)
    for own, block, steps in pool.run(2, _sharded, keep_gathered):
        assert own == pytest.approx(P / 2, rel=0.02)
        for samples in steps:
            highest = {kind: max(held[kind] for _, held in samples) for kind in KINDS}
            assert highest["parameters"] == pytest.approx(4 * own, rel=0.02)
            assert highest["gradients"] == pytest.approx(4 * own, rel=0.02)
            assert highest["optimizer"] == pytest.approx(8 * own, rel=0.02)
            # the root stays from its forward on; of the blocks all do, or the one at work alone
            at_end = next(held["unsharded_parameters"] for phase, held in reversed(samples) if phase == "forward")
            assert at_end == pytest.approx(4 * (root + keep_gathered * 3 * block), rel=0.02)
            at_most = 4 * (root + (3 if keep_gathered else 1) * block)
            assert highest["unsharded_parameters"] == pytest.approx(at_most, rel=0.02)
            assert samples[-1][1]["unsharded_parameters"] == 0
            assert samples[0][1]["other"] < 5000  # gloo's own buffers are there when it works, not before


def _averaged(ranks, in_buckets):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(GPT(CONFIG), gradient_as_bucket_view=in_buckets)
    seen = one_step(model, adamw(model))
    return seen.highest("gradients"), seen.samples[-1].bytes["other"]


def test_buckets_of_ddp_are_the_gradients_or_come_on_top(pool):
    P = CONFIG.num_params()
    (views, left_by_views), _ = pool.run(2, _averaged, True)
    (apart, left_apart), _ = pool.run(2, _averaged, False)
    assert views == apart == 4 * P
    assert left_apart - left_by_views == 4 * P


def _zero1(ranks):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    model = GPT(CONFIG)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW)
    own = sum(p.numel() for p in optimizer._partition_parameters()[ranks.rank][0]["params"])
    seen = one_step(model, optimizer)
    return own, {kind: seen.highest(kind) for kind in KINDS}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_zero_redundancy_optimizer_has_the_state_of_this_ranks_share(pool):
    P = CONFIG.num_params()
    results = pool.run(2, _zero1)
    assert sum(own for own, _ in results) == P
    for own, highest in results:
        assert highest["optimizer"] == pytest.approx(8 * own, rel=0.02)
        assert highest["parameters"] == highest["gradients"] == 4 * P


def test_timelines_side_by_side_name_the_peak_of_each():
    heights = [("forward", 0), ("forward", 2e6), ("update", 0)]
    samples = [Sample(phase, {"parameters": 1e6, "activations": a}) for phase, a in heights]
    figure = memory_stacks({"few": samples, "many": samples})
    assert [axes.get_title() for axes in figure.axes] == ["few\npeak 3.0 MB", "many\npeak 3.0 MB"]
